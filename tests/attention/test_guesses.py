"""Weights that the forward kernel guesses before it knows a maximum: a step on the emulator, plans, and attention natively."""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxsoftmax import explain, online
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu import wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.mosaic_sm90.common import HOST, ROWS
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import (
    _LEAD_OF_CORRECTIONS,
    _PARTS,
    _SLACK_OF_GUESSES,
    ForwardPipeline,
)
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import Correction, ForwardConfig, forward_config, shape_forward

from ..support import oracle
from ..support.attention import values
from ..support.attention.lowering import brute_force, forced, operands, shaped, window_sees
from ..support.emulator import emulated

# A step of two consumers, on the emulator.

KEYS, SCALE = 16, 0.5  # of a key block, powers of two in a unit of a score
INF, NAN = np.inf, np.nan


def run_step(correction, m, d, scores):
    """Returns `m`, `d`, factors and weights after a step, and 1 for rows whose warp corrects, from those before and scores."""

    def body(m_ref, d_ref, s_ref, *results):
        consumer = SimpleNamespace(index=lax.axis_index("wg"))
        correct = functools.partial(online.correct_log2, scale_log2=SCALE, slack=_SLACK_OF_GUESSES, lead=_LEAD_OF_CORRECTIONS)
        pipeline = SimpleNamespace(consumer=consumer, scores=SimpleNamespace(correction=correction, correct=correct))
        first, block = consumer.index * ROWS, (ROWS, KEYS)
        s = wgmma.load_product(s_ref, first, 0, block, block, varies=(True, True))
        m, d = (wgmma.load_product_rows(ref, first, ROWS, block) for ref in (m_ref, d_ref))
        sums, p = online.guess_log2(m, s, SCALE, parts=_PARTS)
        m, d, factor, p = ForwardPipeline._corrected(pipeline, m, d / 4, (sums, p), lambda: s)
        number = None if correction is Correction.FROM_SCORES else 11 + consumer.index
        is_corrected = jnp.where(wgmma.any_above(sums, 2.0**_SLACK_OF_GUESSES, number) != 0, 1.0, 0.0)
        rows = m, wgmma.sum_over_threads(d), factor, jnp.broadcast_to(is_corrected, (ROWS,))
        for ref, values_of_rows in zip(results[:-1], rows, strict=True):
            wgmma.store_product_rows(ref, first, ROWS, values_of_rows)
        wgmma.store_product(results[-1], first, 0, block, p)

    def step(*operands):
        shapes = [(2 * ROWS,)] * 4 + [(2 * ROWS, KEYS)]
        types = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        options = {"num_threads": 2, "thread_name": "wg", "kernel_name": "step_mosaic"}
        return kernel_of(body, out_type=types, **options)(*operands)

    m, d, factor, is_corrected, p = map(np.asarray, emulated(step, m, d, scores, kernels=["step_mosaic"]))
    return {"m": m, "d": d, "factor": factor, "p": p}, is_corrected


def scores_of(fill=-3.0, **columns):
    row = np.full(KEYS, fill, np.float32)
    for name, score in columns.items():
        row[int(name[1:])] = score
    return row


# `m`, `d` and scores of a row, and whether its guess is right. Column 3 and 11 are in one sum.
ROW_KINDS = {
    "right": (1.0, 5.0, scores_of(c3=2.0), True),
    "a sum at the limit": (0.0, 5.0, scores_of(c3=48.0, c11=-INF), True),
    "a sum above the limit": (0.0, 5.0, scores_of(c3=48.0, c11=4.0), False),
    "far above the limit": (2.0, 5.0, scores_of(c7=1e4), False),
    "infinite weights": (-1e30, 5.0, scores_of(), False),
    "far below": (1e30, 5.0, scores_of(), True),
    "no score so far": (-INF, 0.0, scores_of(-INF, c5=-7.0), False),
    "no score at all": (-INF, 0.0, scores_of(-INF), True),
    "all masked": (1.0, 5.0, scores_of(-INF), True),
    "an infinite score": (1.0, 5.0, scores_of(c2=INF), False),
    "an infinite score before": (INF, INF, scores_of(c2=1e3), True),
    "infinite scores": (INF, INF, scores_of(c2=INF), False),
    "a NaN": (1.0, 5.0, scores_of(c2=NAN), False),
    "a NaN before": (NAN, NAN, scores_of(), False),
}


def rows_of(kinds):
    """Returns `m`, `d` and scores of 128 rows, and whether their guesses are right."""
    m, d, scores, is_right = zip(*(ROW_KINDS[kind] for kind in kinds), strict=True)
    return (np.float32(m), np.float32(d), np.stack(scores)), np.array(is_right)


@np.errstate(all="ignore")
def true_step(m, d, scores, is_right):
    """Returns what a step gives, in float64."""
    m, d, scores = (oracle.to64(array) for array in (m, d, scores))
    most = np.finfo(np.float32).max
    following = np.where(is_right, m, np.maximum(m, scores.max(1) * SCALE + _LEAD_OF_CORRECTIONS))
    factor = np.exp2(np.clip(m, -most, most) - np.clip(following, -most, most))
    p = np.exp2(scores * SCALE - np.clip(following, -most, most)[:, None])
    return {"m": following, "d": d * factor + p.sum(1), "factor": factor, "p": p}


@pytest.mark.parametrize("correction", Correction)
def test_a_step_whose_guess_is_wrong_in_some_rows(correction):
    kinds = [[*ROW_KINDS][row % len(ROW_KINDS)] for row in range(2 * ROWS)]
    arrays, is_right = rows_of(kinds)
    found, is_corrected = run_step(correction, *arrays)
    assert is_corrected.all()
    for name, expected in true_step(*arrays, is_right).items():
        np.testing.assert_allclose(found[name], expected, rtol=1e-6, atol=1e-37, err_msg=name)
    for kind, m, d, factor in zip(kinds, found["m"], found["d"], found["factor"], strict=True):
        assert np.isposinf(m) == np.isposinf(d) == ("infinite score" in kind)
        assert np.isnan(m) == np.isnan(d) == ("NaN" in kind)
        assert factor == 1 or not ROW_KINDS[kind][-1]
    # Where the guess is right, bits are those of rows among which no guess is wrong.
    calm, _ = rows_of([kind if right else "right" for kind, right in zip(kinds, is_right, strict=True)])
    alone, is_corrected = run_step(correction, *calm)
    assert not is_corrected.any()
    for name, result in alone.items():
        np.testing.assert_array_equal(found[name][is_right], result[is_right], err_msg=name)


@pytest.mark.parametrize("kind", ["a sum above the limit", "a NaN"])
@pytest.mark.parametrize("correction", Correction)
def test_who_corrects_a_row(correction, kind):
    """Its warp, or all warps of its consumer: they multiply together."""
    kinds = ["right"] * (2 * ROWS)
    kinds[37] = kind
    _, is_corrected = run_step(correction, *rows_of(kinds)[0])
    first, last = (32, 47) if correction is Correction.FROM_SCORES else (0, 63)
    np.testing.assert_array_equal(np.flatnonzero(is_corrected), np.arange(first, last + 1))


# Plans.

NO_OPTIONS = {"window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "scale": 1.0}
HEADS = {
    (64, 64): Correction.FROM_PRODUCT,
    (40, 16): Correction.FROM_PRODUCT,
    (80, 80): Correction.FROM_SCORES,
    (128, 128): Correction.FROM_SCORES,
    (192, 192): Correction.FROM_SCORES,
    (256, 256): Correction.FROM_SCORES,
    (192, 128): Correction.FROM_SCORES,
}


def correction_of(given, **options):
    return shape_forward(given, HOPPER, **NO_OPTIONS | options).config.correction


@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_plans_guess_except_where_it_does_not_pay(sizes):
    size, value_size = sizes
    given = operands((2,), 1024, 1024, 4, 2, size, value_size)
    assert correction_of(given) is correction_of(given, window=(None, 0)) is HEADS[sizes]
    assert correction_of(given | {"sinks": shaped(4)}) is HEADS[sizes]
    for name, shape in {"mask": (2, 1, 1, 1024), "bias": (1, 4, 1024, 1024), "seeds": (2, 4, 4)}.items():
        assert correction_of(given | {name: shaped(*shape)}) is None
    for dtype in ("float16", "float32"):
        if dtype == "float16" or max(sizes) <= 128:
            assert correction_of(operands((2,), 1024, 1024, 4, 2, size, value_size, dtype=dtype)) is None
    short = operands((2,), 512, 512, 4, 2, size, value_size)
    assert correction_of(short) is HEADS[sizes]
    assert correction_of(short, window=(None, 0)) is (HEADS[sizes] if size <= 64 else None)


@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize(("name", "words"), [("key", True), ("mask", False)])
def test_explain_says_that_maxima_are_guessed(name, words):
    given = operands((2,), 1024, 1024, 4, 2, 128, 128) | ({"mask": shaped(2, 1, 1, 1024, dtype=bool)} if name == "mask" else {})
    (decision,) = explain(lambda given: forced(**given), given, gpu="h100")
    assert decision.implementation == "mosaic"
    assert ("guessed maxima" in decision.plan) == words


def test_queries_in_decoding_are_not_guessed():
    given = operands((2,), 1, 1024, 4, 2, 128, 128)
    problem = primitive.ATTENTION.problem(primitive.ATTENTION, given, NO_OPTIONS | {"precision": None})
    plan = mosaic.plan(problem, HOPPER)
    assert plan.geometry.config.correction is None
    assert "guessed" not in plan.describe()


def geometry_of(length, keys, right, config, names=()):
    given = operands((2,), length, keys, 4, 2)
    geometry = shape_forward(given, HOPPER, **NO_OPTIONS | {"window": (None, right)})
    return type(geometry)(
        **{f.name: getattr(geometry, f.name) for f in geometry.__dataclass_fields__.values() if f.init}
        | {"config": config, "names": geometry.names | frozenset(names)}
    )


def hides_later(geometry, keys):
    """Tells by brute force whether a row that is there does not see all keys of a key block but the first that is visited."""
    length, size = geometry.queries, geometry.config.block_kv
    seen = window_sees(length, keys, geometry.window)
    seen = np.pad(seen, [(0, 0), (0, -keys % size)])
    for first in range(0, length, ROWS):
        low, high = geometry.seen((length, keys), first, ROWS, HOST)
        if not seen[first : first + ROWS, low * size : (max(high, low + 1) - 1) * size].all():
            return True
    return False


CONFIGS = [forward_config(64, 64, guesses=True), forward_config(256, 256, guesses=True), ForwardConfig(2, 96, 2)]


@brute_force
@given(st.integers(1, 700), st.integers(1, 700), st.integers(0, 11), st.sampled_from(CONFIGS))
def test_keys_are_hidden_in_the_first_block_alone_where_it_is_said(length, keys, multiple, config):
    for right in (None, 32 * multiple):
        geometry = geometry_of(length, keys, right, config)
        assert not (geometry.hides_in_first_block_alone and hides_later(geometry, keys))


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: str(config.block_kv))
def test_keys_are_hidden_in_the_first_block_alone_for_these_windows_only(config):
    """Any other window hides keys of a later block too, except those that are one key short of a multiple of 64."""
    for right in (right for right in range(200) if right % ROWS != ROWS - 1):
        geometry = geometry_of(450, 700, right, config)
        assert geometry.hides_in_first_block_alone == (not hides_later(geometry, 700)), right


@pytest.mark.parametrize("name", ["query_offset", "query_lengths", "key_lengths", "ranges"])
def test_operands_may_hide_keys_of_any_block(name):
    assert geometry_of(256, 256, 0, CONFIGS[0]).hides_in_first_block_alone
    assert not geometry_of(256, 256, 0, CONFIGS[0], {name}).hides_in_first_block_alone
    window = shape_forward(operands((2,), 256, 256, 4, 2), HOPPER, **NO_OPTIONS | {"window": (70, 0)})
    assert not window.hides_in_first_block_alone


# Attention, natively. Scores rise by powers of two from key block to key block, in the order in which blocks are visited.

LENGTH, N_KEYS = 300, 900
ROWS_THAT_RISE = (5, 77, 200)


def rising(sizes, rises, level, keys=N_KEYS, noise=0.25):
    """Returns operands whose scores are `rises`, one for each query, times `level` of a key, and noise.

    The last column makes them. Tensor cores cut bits off in each addition of 16 columns: with the first column heads of 256
    exceed the budget of the log-sum-exp, up to 1.33 times, in all 16 of them.
    """
    rng = np.random.default_rng(sizes[0])
    shapes = (LENGTH, 2, sizes[0]), (keys, 1, sizes[0]), (keys, 1, sizes[1])
    query, key, value = (rng.standard_normal((1, *shape)) for shape in shapes)
    query = noise * query
    query[..., -2:], key[..., -2:] = 0, 0
    query[..., -1] = np.broadcast_to(rises, LENGTH)[:, None]
    key[..., -1] = np.asarray(level)[:, None]
    return {name: array.astype(jnp.bfloat16) for name, array in (("query", query), ("key", key), ("value", value))}


KEY_NUMBERS = np.arange(N_KEYS)
LEVELS = {
    "up": (N_KEYS - 1 - KEY_NUMBERS) // 64,
    "down": KEY_NUMBERS // 64,
    "in the first block": KEY_NUMBERS >= N_KEYS - 4,  # which is the last one by number
    "in the last block": KEY_NUMBERS < 64,
    "by one key": KEY_NUMBERS == 333,
}
ONE_ROW = np.isin(np.arange(LENGTH), ROWS_THAT_RISE)
RISES = {"10": 10, "30": 30, "100": 100, "1000": 1000, "one row": 100 * ONE_ROW, "by turns": np.array([0, 3, 30, 1000] * 75)}
MORE = {
    "plain": ({}, {}),
    "causal": ({}, {"is_causal": True}),
    "aligned window": ({}, {"local_window_size": (None, 128)}),
    "window": ({}, {"local_window_size": (70, 30)}),
    "lengths": ({"query_seq_lengths": np.int32([133]), "key_value_seq_lengths": np.int32([777])}, {}),
    "no keys": ({"key_value_seq_lengths": np.int32([0])}, {}),
    "offset": ({"query_offset": np.int32([333])}, {"is_causal": True}),
    "segments": (
        {
            "query_segment_ids": np.sort(np.arange(LENGTH) * 7 % 4).astype(np.int32)[None],
            "key_value_segment_ids": np.sort(np.arange(N_KEYS) * 7 % 5).astype(np.int32)[None],
        },
        {},
    ),
    "shuffled segments": (
        {
            "query_segment_ids": (np.arange(LENGTH) // 3 % 3).astype(np.int32)[None],
            "key_value_segment_ids": (np.arange(N_KEYS) // 100 % 3).astype(np.int32)[None],
        },
        {},
    ),
    "sinks": ({"sinks": np.float32([1000, -1000])}, {}),
    "other sinks": ({"sinks": np.float32([-np.inf, 20])}, {"is_causal": True}),
    "soft cap": ({}, {"logits_soft_cap": 50.0}),
}
CALLS = [("plain", rise, level) for rise in RISES for level in LEVELS]
CALLS += [(more, rise, "up") for more in MORE if more != "plain" for rise in ("30", "one row", "by turns")]


def guessing(given, options):
    """Returns attention in 16 bits as a function of its operands, and asserts that it guesses."""
    moving, fixed = values.split(given)
    f = jax.jit(values.function({"scale": math.log(2)} | options, fixed, "mosaic"))
    (decision,) = explain(f, moving)
    assert decision.implementation == "mosaic"
    assert "guessed maxima" in decision.plan
    return lambda **changed: f(moving | changed)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("more", "rise", "level"), CALLS, ids=lambda value: value)
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_native_attention_to_scores_that_rise(sizes, more, rise, level):
    operands, options = MORE[more]
    given = rising(sizes, RISES[rise], LEVELS[level]) | operands
    values.assert_right("mosaic", guessing(given, options)(), given, {"scale": math.log(2)} | options)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("more", ["plain", "causal", "lengths", "shuffled segments", "sinks"])
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_native_bits_of_a_row_do_not_depend_on_rows_whose_guesses_are_wrong(sizes, more):
    operands, options = MORE[more]
    calm = rising(sizes, 1, LEVELS["up"]) | operands
    attend = guessing(calm, options)
    results = attend()
    for rise in (30, 1000, np.nan):
        wild = rising(sizes, np.where(ONE_ROW, rise, 1), LEVELS["up"])["query"]
        for result, other in zip(results, attend(query=wild), strict=True):
            np.testing.assert_array_equal(np.asarray(result)[:, ~ONE_ROW], np.asarray(other)[:, ~ONE_ROW])
            assert not np.array_equal(np.asarray(result)[:, ONE_ROW], np.asarray(other)[:, ONE_ROW])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_native_infinite_scores_after_the_first_block_give_an_infinite_lse(sizes):
    given = rising(sizes, 1, LEVELS["up"])
    given["query"][0, ROWS_THAT_RISE, :, -2], given["key"][0, 400, 0, -2] = 3e38, 3e38
    out, lse = map(oracle.to64, guessing(given, {})())
    assert np.isposinf(lse[:, ONE_ROW]).all()
    assert np.isnan(out[:, ONE_ROW]).all()
    assert np.isfinite(lse[:, ~ONE_ROW]).all()
    assert np.isfinite(out[:, ~ONE_ROW]).all()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("sizes", HEADS, ids=str)
def test_native_values_may_be_as_large_as_the_documents_say(sizes):
    """The sums of weights are nearly as large as guesses leave them: `2**23.5` of 16 keys, or of 8."""
    keys, block = 1024, forward_config(*sizes, guesses=True).block_kv
    rise = 20.5 if block == 64 else 19.5
    given = rising(sizes, rise, np.arange(keys) < keys - block, keys, noise=0)
    largest = 2.0**107 / keys
    given["value"] = (largest * np.sign(oracle.to64(given["value"]))).astype(jnp.bfloat16)
    given["value"][..., 0] = largest
    out, lse = guessing(given, {})()
    assert np.isfinite(oracle.to64(out)).all()
    np.testing.assert_allclose(oracle.to64(out)[..., 0], largest, rtol=2**-7)
    values.assert_right("mosaic", (out, lse), given, {"scale": math.log(2)})
