"""The Mosaic GPU kernel of attention's tangents: natively against float64, its weights on the emulator, and lowered for CUDA.

The reference runs the same checks where that is quick, so that they and their budget are tested too.
"""

import functools
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu import wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.mosaic_sm90 import tangent_plan
from jaxsoftmax.ops.attention.mosaic_sm90.common import ROWS, GlobalOperand
from jaxsoftmax.ops.attention.mosaic_sm90.tangent_pipeline import TangentScores

from ..support import kernels, oracle
from ..support.attention import lowering
from ..support.attention import oracle as attention_oracle
from ..support.attention import values as forward
from ..support.attention.values import MOVING, case, random, split
from ..support.emulator import emulated

attend = jaxsoftmax.dot_product_attention
FORWARD, TANGENT, BACKWARD = "attention_forward_mosaic", "attention_tangent_mosaic", "attention_backward_mosaic"
EACH = pytest.mark.parametrize("name", ["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
DTYPES = ("bfloat16", "float16")
pytestmark = pytest.mark.usefixtures("native")


# What is compared with what.


def tangents_like(moving, seed=11):
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(array.shape).astype(array.dtype) for name, array in moving.items()}


def pushed(name, given, options, names=MOVING, kernel=TANGENT):
    """Returns results and tangents of attention, and the tangents of the operands `names`, from which they come."""
    moving, fixed = split(given)
    moved = tangents_like({key: moving[key] for key in names if key in moving})
    f = forward.function(options, fixed, name)

    def push(moving, moved):
        some = {key: moving[key] for key in moved}
        return jax.jvp(lambda some: f(moving | some), (some,), (moved,))

    lowered = jax.jit(push).lower(moving, moved)
    assert kernels.kernel_names(lowered.as_text()) == ([] if name == "xla" else [FORWARD, kernel] if kernel else [FORWARD])
    return *lowered.compile()(moving, moved), moved


def assert_right(name, found, given, options, moved):
    """Fails unless tangents are within the budget, and 0 for queries that see nothing."""
    truths = forward.truth_of(attention_oracle.tangents, name, given, options, moved)
    for what, actual, truth in zip(("out", "lse"), found, truths, strict=True):
        assert actual.dtype == (given["query"].dtype if what == "out" else np.float32)
        assert np.all(np.isfinite(oracle.to64(actual))), what
        assert oracle.error(actual, truth) <= 1, what
        assert np.all(oracle.to64(actual)[truth.budget <= oracle.TINY] == 0), what


def check(name, given, options, names=MOVING):
    _, found, moved = pushed(name, given, options, names)
    assert_right(name, found, given, options, moved)


# The reference is within the budget.

QUICK = [
    ("causal", "sinks alone"),
    ("multi-query", "soft cap"),
    ("smaller values", "bias (1,4,40,56)"),
    ("lengths", "bias (56,)"),
    ("segments", "causal window"),
    ("dropout, causal", "rows that see nothing"),
    ("bias of -inf",),
]


@pytest.mark.parametrize("features", QUICK, ids=" + ".join)
def test_the_reference_is_within_the_budget(features):
    check("xla", *forward.together(features, DTYPES[QUICK.index(features) % 2]))


@pytest.mark.parametrize("moved", ["query", "key", "value"])
def test_a_wrong_tangent_is_beyond_the_budget(moved):
    given, options = forward.together(("causal", "soft cap"), "bfloat16")
    _, found, tangents = pushed("xla", given, options)
    tangents[moved] = 1.05 * oracle.to64(tangents[moved])
    truth, _ = forward.truth_of(attention_oracle.tangents, "xla", given, options, tangents)
    assert oracle.error(found[0], truth) > 1


# Native. Few queries, whose forward kernel is another one, and what has no kernel are left out.

MEDIUM = {"length": 130, "keys": 200, "size": 64}
CASES = {
    name: own
    for name, own in forward.IN_SHAPES.items()
    if "few" not in name and "large sizes" not in name and name != "everything"
}
CASES |= {
    "soft cap and bias, size 128": case(
        MEDIUM | {"size": 128}, lambda: {"bias": random((2, 1, 130, 200), "bias")}, logits_soft_cap=20.0
    ),
    "bias of the least number of keys": case(
        MEDIUM, lambda: {"bias": np.where(np.arange(200) < 90, np.finfo(np.float32).min, 1).astype(np.float32)}
    ),
    "sinks alone, size 256": case(
        {"length": 150, "keys": 200, "size": 256},
        lambda: {"sinks": random((4,), "bias")} | forward.lengths_of([99, 0], [7, 0])(),
    ),
    "8 heads that share 2": case({"length": 260, "keys": 140, "heads": 8, "size": 128}, is_causal=True),
}
EACH_KIND = [
    "65 and 63",
    "385 and 513, causal",
    "sizes 80 and 80",
    "sizes 256 and 256, whole",
    "groups of 3",
    "window (200, 300), size 128",
]
EACH_KIND += ["lengths, causal", "segments shuffled", "soft cap", "sinks alone", "dropout", "soft cap and bias, size 128"]
SOME = [
    "1 and 300",
    "300 and 1",
    "129 and 127",
    "sizes 64 and 64, whole",
    "sizes 128 and 128, whole",
    "groups of 8",
    "many tiles",
]
SOME += [
    "sizes 192 and 192",
    "sizes 192 and 128",
    "sizes 64 and 128",
    "two batch axes",
    "no batch axes",
    "4097",
    "causal window",
]
SOME += ["offset, causal", "lengths of queries", "lengths of keys", "segments sorted", "bias of the least number of keys"]
SOME += ["sinks alone, size 256", "8 heads that share 2", "nothing to see"]


def check_native(kind, names=MOVING):
    make, index = CASES[kind], list(CASES).index(kind)
    given, options = make(DTYPES[index % 2])
    check("mosaic", given, options, names)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", EACH_KIND)
def test_one_of_each_kind(kind):
    check_native(kind)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=[] if kind in SOME else pytest.mark.slow) for kind in CASES if kind not in EACH_KIND]
)
def test_native_tangents_in_many_shapes(kind):
    given, _ = CASES[kind]("bfloat16")
    if "mask" in given and max(given["query"].shape[-1], given["value"].shape[-1]) > 128:
        with pytest.raises(NotImplementedError, match="with a mask have no kernel for head sizes above 128"):
            check_native(kind)
    else:
        check_native(kind)


SUBSETS = [
    ("query",),
    ("key",),
    ("value",),
    ("query", "key"),
    ("query", "value"),
    ("key", "value"),
    ("bias",),
    ("value", "sinks"),
]


@EACH
@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("names", SUBSETS, ids="+".join)
def test_tangents_of_some_operands_alone(names, size, name):
    lengths = (130, 200) if name == "mosaic" else (9, 11)
    given = forward.arrays(length=lengths[0], keys=lengths[1], size=size, dtype="bfloat16")
    given |= {"bias": random((1, 4, *lengths), "bias")} if "bias" in names else {}
    given |= {"sinks": random((4,), "bias")} if "sinks" in names else {}
    check(name, given, {"is_causal": True}, names)


@EACH
def test_the_tangent_of_sinks_alone_needs_no_kernel(name):
    given = forward.arrays(length=70, keys=50, size=64, dtype="bfloat16") | {"sinks": random((4,), "bias")}
    _, found, moved = pushed(name, given, {"is_causal": True}, ("sinks",), kernel=None)
    assert_right(name, found, given, {"is_causal": True}, moved)


@EACH
def test_tangents_of_rows_that_see_nothing_are_0_whatever_their_queries_hold(name):
    given = forward.arrays(length=130, keys=200, size=64, dtype="bfloat16")
    given |= {"query_seq_lengths": np.array([130, 65], np.int32)}
    moving, fixed = split(given)
    moved = tangents_like(moving)
    moved["query"][1, 65:] = np.nan
    f = forward.function({}, fixed, name)
    out, lse = jax.jit(lambda moving, moved: jax.jvp(f, (moving,), (moved,)))(moving, moved)[1]
    assert np.all(oracle.to64(out)[1, 65:] == 0)
    assert np.all(oracle.to64(lse)[1, 65:] == 0)
    assert np.all(np.isfinite(oracle.to64(out)))


@EACH
def test_vmap_over_tangents_alone(name):
    given = forward.arrays(length=130, keys=70, size=64, dtype="bfloat16")
    moving, fixed = split(given)
    f = forward.function({"is_causal": True}, fixed, name)
    stacks = [tangents_like(moving, seed) for seed in (1, 2, 3)]
    moved = {key: np.stack([own[key] for own in stacks]) for key in moving}
    push = jax.jit(jax.vmap(lambda moving, moved: jax.jvp(f, (moving,), (moved,))[1], (None, 0)))
    found = push(moving, moved)
    for i, own in enumerate(stacks):
        assert_right(name, [x[i] for x in found], given, {"is_causal": True}, own)


@EACH
def test_linearize_gives_the_tangents_of_jvp(name):
    given = forward.arrays(length=130, keys=70, size=64, dtype="bfloat16")
    moving, fixed = split(given)
    f, moved = forward.function({}, fixed, name), tangents_like(moving)
    linear = jax.linearize(jax.jit(f), moving)[1]
    assert_right(name, linear(moved), given, {}, moved)


# Weights and their tangents, on the emulator.

KEYS, SCALE, CAP = 16, 0.25, 3.0


@pytest.mark.parametrize("feature", ["plain", "soft cap", "value alone"])
def test_weights_of_a_key_block(feature):
    rng = np.random.default_rng(0)
    s, t = (3 * rng.standard_normal((ROWS, KEYS)).astype(np.float32) for _ in range(2))
    if feature != "soft cap":  # which bounds what is no mask
        s[1], s[2, 3] = -np.inf, -np.inf
    bent = CAP * np.tanh(SCALE * oracle.to64(s) / CAP) if feature == "soft cap" else SCALE * oracle.to64(s)
    with np.errstate(divide="ignore"):
        lse = np.log(np.sum(np.exp(np.where(s == -np.inf, -np.inf, bent)), -1)).astype(np.float32)

    def body(s_ref, t_ref, lse_ref, *results):
        zero, block = jnp.int32(0), (ROWS, KEYS)
        scores = object.__new__(TangentScores)
        scores.geometry = SimpleNamespace(
            soft_cap=CAP if feature == "soft cap" else None,
            scale=SCALE,
            moves_scores=feature != "value alone",
            query=(ROWS, 1, 8),
        )
        scores.factor, scores.shape = CAP if feature == "soft cap" else SCALE, block
        scores.operands, scores.is_banded = {"lse": GlobalOperand(lambda b: b, ref=lse_ref)}, False
        scores.tile, scores.first, scores.rows_left = SimpleNamespace(b=zero, head=zero), zero, ROWS
        scores.find_lse()
        products = [wgmma.load_product(ref, 0, 0, block, block, varies=(True, True)) for ref in (s_ref, t_ref)]
        p, w = scores.weigh(*products, [], zero, banded=False)
        both = [x.astype(jnp.bfloat16) for x in ([p] if w is None else [w, p])]
        wgmma.store_product(results[0], 0, 0, (ROWS, KEYS * len(both)), functools.reduce(wgmma.join_columns, both))
        total = jnp.zeros((ROWS,)) + scores.lse * 0 if w is None else wgmma.sum_over_threads(wgmma.sum_in_threads(w))
        wgmma.store_product_rows(results[1], 0, ROWS, total)

    def step(*operands):
        count = 1 if feature == "value alone" else 2
        types = [jax.ShapeDtypeStruct((ROWS, count * KEYS), jnp.bfloat16), jax.ShapeDtypeStruct((ROWS,), jnp.float32)]
        return kernel_of(body, out_type=types, num_threads=1, thread_name="wg", kernel_name="step_mosaic")(*operands)

    found, total = map(oracle.to64, emulated(step, s, t, lse, kernels=["step_mosaic"]))
    with np.errstate(invalid="ignore"):
        p = np.where(s == -np.inf, 0, np.exp(bent - np.where(lse == -np.inf, 0, lse)[:, None]))
        slope = 1 - (bent / CAP) ** 2 if feature == "soft cap" else 1.0
        w = np.where(s == -np.inf, 0, p * SCALE * slope * t)
    np.testing.assert_allclose(found, p if feature == "value alone" else np.concatenate([w, p], 1), rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(total, 0 * total if feature == "value alone" else np.sum(w, -1), rtol=1e-5, atol=1e-6)


# Plans.

OPTIONS = {"window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "scale": 0.1, "precision": None}
OPTIONS |= {"deterministic_gradients": False}


def planned(names=("query", "key", "value"), target=HOPPER, more=None, length=300, **shapes):
    given = lowering.operands(length=length, **shapes) | (more or {})
    query, value = given["query"], given["value"]
    given |= {f"d_{name}": given[name] for name in names}
    given["out"] = lowering.shaped(*query.shape[:-1], value.shape[-1], dtype=query.dtype)
    given["lse"] = lowering.shaped(*query.shape[:-3], query.shape[-2], query.shape[-3], dtype="float32")
    return mosaic.plan(primitive.ATTENTION_JVP.problem(primitive.ATTENTION_JVP, given, OPTIONS), target)


@pytest.mark.parametrize("size", [8, 64, 72, 128, 136, 192, 248, 256])
@pytest.mark.parametrize("value_size", [8, 64, 128, 192, 256])
def test_every_configuration_fits_into_shared_memory_and_registers(size, value_size):
    lengths = {name: lowering.shaped(2, dtype="int32") for name in ("query_lengths", "key_lengths", "query_offset")}
    for names in [*SUBSETS[:6], ("query", "key", "value")]:
        plan = planned(names, size=size, value_size=value_size, more=lengths)
        if isinstance(plan, Refusal):
            assert (names, value_size, size in (136, 192)) == (("query", "key"), 256, True)
            assert plan.lacks_kernel
            continue
        assert plan.geometry.shared_memory <= HOPPER.shared_memory
        lowering.assert_registers_fit(plan.geometry.config)
        # What a product with values takes: rows of whole tiles of the swizzle.
        assert len(plan.geometry.sources("value")) * plan.geometry.config.block_kv % 64 == 0
        assert plan.geometry.config.own_output or plan.geometry.sizes[0] >= plan.geometry.sizes[1]


def test_absent_tangents_have_no_slots():
    found = {names: planned(names, size=128).geometry for names in SUBSETS[:6]}
    for names, geometry in found.items():
        assert [len(geometry.sources(name)) for name in ("query", "key")] == [1 + (name in names) for name in ("query", "key")]
    assert found["value",].sources("value") == ["d_value"]
    assert found["query",].sources("value") == ["value"]
    assert found["key", "value"].sources("value") == ["value", "d_value"]
    assert "out" not in found["value",].names
    assert "out" in found["query",].names


def test_plans_say_how_kernels_run():
    words = "tiles of 128 queries by 64 keys, 2 stages, 2 consumer warpgroups, 1 split, tangents of key, query, value"
    assert planned(size=128).describe() == words
    assert planned(size=100).describe() == f"{words}, head sizes padded before"
    assert planned(("sinks",), more={"sinks": lowering.shaped(4, dtype="float32")}).describe() == "XLA, for the sinks alone"


def test_no_tangent_at_all_needs_no_kernel():
    """A ring gives tangents of the sinks to the first part of the keys alone."""
    plan = planned(())
    assert plan.geometry is None
    given = {"query": jnp.ones((2, 3, 4, 64), jnp.bfloat16), "key": jnp.ones((2, 5, 4, 64), jnp.bfloat16)}
    given |= {"value": given["key"], "out": jnp.full((2, 3, 4, 64), jnp.inf, jnp.bfloat16), "lse": jnp.ones((2, 4, 3))}
    d_out, d_lse = plan.run(**given)
    assert (d_out.shape, d_out.dtype, d_lse.shape, d_lse.dtype) == ((2, 3, 4, 64), jnp.bfloat16, (2, 4, 3), jnp.float32)
    assert not d_out.any()
    assert not d_lse.any()


@pytest.mark.parametrize(
    ("shapes", "words"),
    [
        ({"dtype": "float32"}, "tangents of float32 have no kernel"),
        ({"size": 264}, "tangents of head sizes above 256 have no kernel, got 264"),
        ({"value_size": 512}, "tangents of head sizes above 256 have no kernel, got 512"),
        (
            {"size": 256, "more": {"mask": lowering.shaped(2, 1, 300, 300, dtype="bool")}},
            "tangents of scores and of values with a mask have no kernel for head sizes above 128, got 256",
        ),
    ],
)
def test_refusals(shapes, words):
    assert planned(**shapes) == Refusal(words, lacks_kernel=True)


def test_what_does_not_fit_into_shared_memory_is_refused():
    refusal = planned(size=256, target=replace(HOPPER, shared_memory=150 << 10))
    assert refusal.reason.startswith("a block for head sizes 256 and 256 needs")


def test_the_batch_of_tangents_counts():
    plan = planned(more={"d_query": lowering.shaped(5, 2, 300, 4, 64)}, names=("key",))
    assert plan.geometry.batch == (5, 2)


def test_the_largest_head_sizes_take_as_many_stages_as_fit():
    config = planned(size=256).geometry.config
    assert (config.stages, config.value_stages) == (2, 1)
    assert [c.block_kv for c in tangent_plan.tangent_configs((256, 256), 1)] == [64, 64, 64]


# Which kernels programs have.

LINEAR = {
    "jvp": lambda f, x: jax.jvp(f, (x,), (x,)),
    "linearize": lambda f, x: jax.linearize(f, x)[1](x),
    "jacfwd": lambda f, x: jax.vmap(lambda t: jax.jvp(f, (x,), (t,))[1])(jnp.stack([x, x])),
}


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("kind", LINEAR)
def test_a_tangent_is_one_kernel_more(kind):
    given = lowering.operands(length=64, keys=64)
    fixed = {name: jnp.zeros(given[name].shape, given[name].dtype) for name in ("key", "value")}
    f = functools.partial(attend, **fixed, implementation="mosaic")
    kernels.lowered_for_cuda(lambda x: LINEAR[kind](f, x), given["query"], kernels=[FORWARD, TANGENT])


@pytest.mark.usefixtures("hollow_kernels")
def test_the_transpose_of_a_tangent_is_the_backward_kernel():
    given = lowering.operands(length=64, keys=64)

    def transposed(given, cotangent):
        _, linear = jax.linearize(lambda given: attend(**given, implementation="mosaic"), given)
        return jax.linear_transpose(linear, given)(cotangent)

    kernels.lowered_for_cuda(transposed, given, given["query"], kernels=[FORWARD, BACKWARD])


@lowering.CHOICES
def test_explain_shows_tangents():
    given = lowering.operands()

    def push(given):
        return jax.jvp(lambda given: attend(**given), (given,), (given,))

    found = explain(push, given, platform="cuda")
    assert [(d.primitive, d.implementation) for d in found] == [
        ("dot_product_attention", "mosaic"),
        ("dot_product_attention_jvp", "mosaic"),
    ]
    found = explain(push, lowering.operands(size=512), platform="cuda")
    assert dict(found[1].refusals)["mosaic"] == "tangents of head sizes above 256 have no kernel, got 512"


@pytest.mark.parametrize(
    ("features", "names", "sizes"),
    [
        (("causal",), ("query", "key", "value"), (128, 128)),
        (("window", "lengths", "segments", "sinks"), MOVING, (64, 64)),
        (("soft cap", "bias", "dropout"), MOVING, (128, 128)),
        (("mask of keys", "bias of heads"), MOVING, (64, 128)),
        (("causal",), ("query", "key", "value"), (256, 256)),
        (("window after",), ("query",), (248, 16)),
        ((), ("value",), (80, 72)),
    ],
    ids=str,
)
def test_kernels_lower_for_cuda(features, names, sizes):
    given, options = lowering.with_features(features, sizes, (300, 301))
    moving = {name: given.pop(name) for name in MOVING if name in given}
    moved = {name: moving[name] for name in names if name in moving}

    def push(moving, moved, given):
        def f(some):
            return lowering.forced(**given | moving | some, **options, return_residual=True)

        return jax.jvp(f, ({name: moving[name] for name in moved},), (moved,))

    kernels.lowered_for_cuda(push, moving, moved, given, kernels=[FORWARD, TANGENT])
