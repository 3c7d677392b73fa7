"""What Triton's kernels of attention compute, in its interpreter on the CPU; `test_triton.py` runs this file in a process.

The interpreter is chosen by `TRITON_INTERPRET=1` before Triton is imported. JAX calls the kernels where a custom call would be,
so cases and checks are those of the reference, with blocks that are small enough for several of each kind.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl
from hypothesis import HealthCheck, given, settings

import jaxsoftmax
from jaxsoftmax._triton import attention as kernels_of_attention
from jaxsoftmax._triton import attention_launch
from jaxsoftmax.ops.attention import dropout
from jaxsoftmax.ops.attention import triton as ours

from ..support import cases, kernels, oracle, triton_kernels
from ..support.attention import oracle as attention_oracle
from ..support.attention import values
from ..support.attention.values import case, random

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ran = []  # the kernels that ran, by name


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels run where a custom call would be made for a GPU, in blocks of 16 queries and 32 keys."""
    run = triton_kernels.run

    def recorded(kernel, operands, results, **options):
        ran.append(options["LAUNCH"].kernel if "LAUNCH" in options else "")
        return run(kernel, operands, results, **options)

    triton_kernels.interpret(monkeypatch, triton_kernels.run_in_jax)
    monkeypatch.setattr(triton_kernels, "run", recorded)
    monkeypatch.setattr(attention_launch, "tiling_for", lambda *args: attention_launch.AttentionTiling(16, 32, 4, 1))
    ran.clear()
    with kernels.target(triton_kernels.target_of((8, 0)), interpreted=True), kernels.anew():
        yield


# Those that address operands or hide keys in their own way.
NAMES = [
    "plain",
    "no batch",
    "two batch axes",
    "smaller values",
    "odd sizes",
    "one query",
    "negative scale",
    "no scale",
    "causal",
]
NAMES += ["window on two sides", "window, some rows see nothing", "causal window", "lengths", "key lengths, causal", "segments"]
NAMES += [
    "soft cap",
    "sinks",
    "sinks alone",
    "no sink in some heads",
    "rows that see nothing",
    "bias of -inf",
    "dropout, causal",
    "offset, causal",
    "offset, window",
    "offset, some rows see nothing",
]
NAMES += ["mask (2,4,40,56)", "mask (1,1,40,56)", "mask (2,4,1,56)", "mask (2,4,40,1)", "bias (1,4,40,56)", "bias (2,4,40,56)"]
NAMES += ["bias (2,4,1,56)", "bias (2,4,40,1)"]


@pytest.mark.parametrize(("index", "feature"), [*enumerate(NAMES)])
def test_values_and_cotangents_of_every_feature(index, feature):
    values.check_cotangents("triton", *values.FEATURES[feature](cases.DTYPES[index % 3]))
    assert sorted(ran) == ["backward_keys", "backward_queries", "forward"]


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("sizes", [(16, 16), (5, 3), (33, 70)], ids=cases.ident)
def test_head_sizes(sizes, dtype):
    given, options = case({"size": sizes[0], "value_size": sizes[1], "length": 20, "keys": 33, "heads": 2}, is_causal=True)(
        dtype
    )
    values.check_cotangents("triton", given, options)


def test_keys_in_pages():
    rng = np.random.default_rng(0)
    query, pages = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4, 16), (5, 8, 2, 16)))
    given = query, pages, pages, np.array([[3, 0, 9, 1], [2, 2, -1, 4]]), np.array([29, 7])
    actual = jax.jit(functools.partial(jaxsoftmax.cache.paged_attention, implementation="triton", is_causal=True))(*given)
    expected = jaxsoftmax.cache.paged_attention(*given, implementation="xla", is_causal=True)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)
    assert ran == ["forward"]


@pytest.mark.parametrize("dtype", cases.DTYPES)
def test_parts_of_keys_go_on_from_those_before(dtype):
    given = values.arrays(length=20, keys=99, size=33, value_size=16, dtype=dtype)
    values.check_parts("triton", ours, given, soft_cap=5.0, target=triton_kernels.target_of((8, 0)))
    assert sorted(ran) == ["backward_keys"] * 3 + ["backward_queries"] * 3 + ["forward"] * 3


@pytest.mark.parametrize("kind", ["mask", "segments"])
def test_one_query_that_sees_the_last_keys(kind):
    seen = np.arange(56) >= 40
    ids = {f"{name}_segment_ids": np.stack([own] * 2) for name, own in (("query", np.ones(1, int)), ("key_value", 2 - seen))}
    hides = {"mask": seen[None, None, None]} if kind == "mask" else {n: own.astype(np.int32) for n, own in ids.items()}
    values.check_cotangents("triton", *case({"length": 1}, lambda: hides)("float32"))


@settings(max_examples=8, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=values.calls())
def test_random_combinations_of_features(call):
    values.check_cotangents("triton", *call)


def hidden(kind):
    """Operands with which nothing sees some of 37 queries and 56 keys, where attention is causal."""
    queries, keys = np.arange(37) < 30, np.arange(56)
    keys = (keys < 40) | (keys > 50)
    both = queries[:, None] & keys[None, :]
    if kind == "lengths":
        return {"query_seq_lengths": np.array([30, 30], np.int32), "key_value_seq_lengths": np.array([40, 40], np.int32)}
    if kind == "causal":
        return {}
    if kind == "segments":
        ids = np.where(queries, 1, 7), np.where(keys, 1, 9)
        return {
            f"{name}_segment_ids": np.stack([own, own]).astype(np.int32)
            for name, own in zip(("query", "key_value"), ids, strict=True)
        }
    return {"mask": both} if kind == "mask" else {"bias": np.where(both, 0.5, -np.inf).astype(np.float32)}


HIDDEN = {
    "lengths": (slice(30, None), slice(40, None)),
    "causal": (slice(0, 0), slice(37, None)),
    **dict.fromkeys(("segments", "mask", "bias"), (slice(30, None), slice(40, 51))),
}


@pytest.mark.parametrize(
    ("kind", "with_sinks", "dtype"),
    [(kind, index % 2 == 0, "bfloat16") for index, kind in enumerate(HIDDEN)]
    + [("bias", True, "bfloat16"), ("mask", True, "float16"), ("lengths", True, "float32")],
)
def test_what_is_not_seen_may_hold_nan(kind, with_sinks, dtype):
    given, options = case({"length": 37}, lambda: hidden(kind), is_causal=True)(dtype)
    if with_sinks:
        given["sinks"] = random((4,), "bias")
    moving, fixed = values.split(given)
    rows, keys = HIDDEN[kind]
    f = jax.jit(lambda moving, dout, dlse: pulled(values.function(options, fixed, "triton"), moving, dout, dlse))
    shapes = jax.eval_shape(values.function(options, fixed), moving)
    dout, dlse = (np.random.default_rng(0).standard_normal(a.shape).astype(a.dtype) for a in shapes)
    if not with_sinks:
        dlse[:, rows] = 0  # nothing moves an lse of -inf
    expected = f(moving, dout, dlse)
    spoilt = {name: np.array(array) for name, array in moving.items()}
    spoilt["query"][:, rows], spoilt["key"][:, keys], spoilt["value"][:, keys] = np.nan, np.nan, np.nan
    dout[:, rows] = np.nan
    if not with_sinks:
        dlse[:, rows] = np.nan
    actual = f(spoilt, dout, dlse)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(np.isfinite(a.astype(np.float32)).all() for a in actual[2:])


def pulled(f, moving, dout, dlse):
    (out, lse), vjp = jax.vjp(f, moving)
    (found,) = vjp((dout, dlse))
    return [out, jnp.where(lse == -jnp.inf, 0, lse), *found.values()]


@pytest.mark.parametrize("wanted", [("query",), ("value",), ("bias",), ("sinks",), ("key", "bias")], ids=cases.ident)
def test_what_is_not_wanted_is_not_computed(wanted):
    given, options = case(None, lambda: {"bias": random((4, 40, 56), "bias"), "sinks": random((4,), "bias")})("float16")
    moving = {name: given[name] for name in wanted}
    fixed = {name: array for name, array in given.items() if name not in wanted}
    f = values.function(options, fixed, "triton")
    dout, dlse = (np.full(a.shape, 0.25, a.dtype) for a in jax.eval_shape(f, moving))
    (found,) = jax.jit(lambda moving: jax.vjp(f, moving)[1]((dout, dlse)))(moving)
    truth = values.truth_of(functools.partial(attention_oracle.cotangents, tight=True), "triton", given, options, dout, dlse)
    for name, array in found.items():
        assert oracle.error(array, truth[name]) <= 1
    needed = ["backward_keys"] * bool({"key", "value"} & {*wanted}) + ["backward_queries"] * bool({"query", "bias"} & {*wanted})
    assert sorted(ran) == [*needed, "forward"]


@pytest.mark.parametrize("which", [0, 1])
def test_the_cotangent_of_one_result_alone(which):
    given, options = values.FEATURES["causal window"]("bfloat16")
    moving, fixed = values.split(given)
    f = values.function(options, fixed, "triton")
    cotangents = [np.zeros(a.shape, a.dtype) for a in jax.eval_shape(f, moving)]
    cotangents[which] = np.random.default_rng(0).standard_normal(cotangents[which].shape).astype(cotangents[which].dtype)
    found = jax.jit(lambda m: jax.vjp(lambda m: f(m)[which], m)[1](cotangents[which])[0])(moving)
    truth = values.truth_of(functools.partial(attention_oracle.cotangents, tight=True), "triton", given, options, *cotangents)
    for name, array in found.items():
        assert oracle.error(array, truth[name]) <= 1


def test_blocks_that_nothing_sees_are_not_visited(monkeypatch):
    """NaN in them does not show, though the keys of a visited block that nothing hides for a while would."""
    visited = []
    monkeypatch.setattr(kernels_of_attention, "_push", counted(kernels_of_attention._push, visited))
    monkeypatch.setattr(attention_launch, "tiling_for", lambda *args: attention_launch.AttentionTiling(16, 16, 4, 1))
    ids = np.repeat(np.arange(4, dtype=np.int32), 16)[None]
    for options, expected in (
        ({"is_causal": True}, 1 + 2 + 3 + 4),
        ({"local_window_size": (0, 15)}, 2 + 2 + 2 + 1),
        ({"query_segment_ids": ids, "is_causal": True}, 4),
        ({"key_value_seq_lengths": np.array([20], np.int32)}, 8),
        ({"query_seq_lengths": np.array([33], np.int32)}, 12),
        ({"mask": ids[..., :, None] == ids[..., None, :]}, 4),
        ({}, 16),
    ):
        visited.clear()
        given, _ = case({"batch": (1,), "length": 64, "keys": 64, "heads": 1, "key_heads": 1})()
        f = functools.partial(values.attend, **given, **options, implementation="triton", precision="high")
        jax.block_until_ready(jax.jit(f)())
        assert len(visited) == expected, options


def counted(function, calls):
    def wrapped(*args):
        calls.append(args)
        return function(*args)

    return wrapped


# The twins.


@triton.jit
def kept(seeds, out, DROPOUT: tl.constexpr):
    rows, cols = tl.arange(0, 32).to(tl.uint32)[:, None], tl.arange(0, 64).to(tl.uint32)[None, :]
    for i in range(4):
        found = kernels_of_attention.keep(tl.load(seeds + 2 * i), tl.load(seeds + 2 * i + 1), rows + 5 * i, cols, DROPOUT)
        tl.store(out + (i * 32 + tl.arange(0, 32)[:, None]) * 64 + tl.arange(0, 64)[None, :], found.to(tl.int32))


@pytest.mark.parametrize("rate", [0.0, 1e-10, 0.1, 0.5, 0.999, 1 - 1e-12])
def test_dropout_keeps_what_the_reference_keeps(rate):
    seeds = np.random.default_rng(0).integers(0, 2**32, (4, 2), np.uint32)
    seeds[0] = 0
    results = [jax.ShapeDtypeStruct((4, 32, 64), np.int32)]
    constants = attention_launch.WeightDropout(dropout.dropped(rate), dropout.MULTIPLIERS)
    (found,) = triton_kernels.run(kept, [seeds], results, programs=1, DROPOUT=constants)
    rows = np.arange(32, dtype=np.uint32)[:, None] + np.arange(4, dtype=np.uint32)[:, None, None] * 5
    first, second = seeds[:, 0, None, None], seeds[:, 1, None, None]
    expected = dropout.keep(first, second, rows, np.arange(64, dtype=np.uint32)[None, None, :], rate)
    np.testing.assert_array_equal(found.astype(bool), expected)
