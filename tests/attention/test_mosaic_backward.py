"""The Mosaic GPU kernel of attention's derivatives: natively against float64, and lowered for CUDA without a GPU.

The reference runs the same checks where that is quick, so that they and their budget are tested too.
"""

import dataclasses
import functools
import itertools
import math
import re
import types

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import explain, online
from jaxsoftmax._core.target import HOPPER, Target, lowering_for
from jaxsoftmax._gpu import emit, schedule, wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax._triton import availability
from jaxsoftmax.ops.attention import key_blocks, operands, primitive
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention.mosaic_sm90 import backward, backward_plan, common
from jaxsoftmax.ops.attention.mosaic_sm90.backward_pipeline import BackwardRole, HalfConsumer
from jaxsoftmax.ops.attention.mosaic_sm90.common import HOST

from ..support import cases, kernels, oracle
from ..support.attention import interpreted, lowering
from ..support.attention import values as forward
from ..support.attention.gradients import assert_right, cotangents_like, pull_of
from ..support.attention.values import MOVING, case, ids, random, segments, split
from ..support.emulator import emulated

attend = jaxsoftmax.dot_product_attention
forced = functools.partial(attend, implementation="mosaic")

FORWARD, BACKWARD = "attention_forward_mosaic", "attention_backward_mosaic"
EACH = pytest.mark.parametrize("name", ["xla", pytest.param("mosaic", marks=pytest.mark.gpu)])
DTYPES = ("bfloat16", "float16")
pytestmark = pytest.mark.usefixtures("native")


def quick(every, some):
    """Parameters, of which all but `some` are slow, as lowering the kernel takes seconds."""
    return [pytest.param(value, marks=[] if value in some else pytest.mark.slow) for value in every]


# What is compared with what.


def compiled(name, f, *args, runs=(1, 1)):
    """The program of `f(*args)`, whose kernels are those of so many forward passes and derivatives, if `name` has any."""
    lowered = jax.jit(f).lower(*args)
    expected = [] if name == "xla" else [BACKWARD] * runs[1] + [FORWARD] * runs[0]
    assert sorted(kernels.kernel_names(lowered.as_text())) == expected
    return lowered.compile()


def pulled(name, given, options, **replaced):
    """Output and lse, their cotangents, of which some may be `replaced`, and the cotangents of all that moves."""
    moving, fixed = split(given)
    f = forward.function(options, fixed, name)
    both = dict(zip(("out", "lse"), cotangents_like(jax.eval_shape(f, moving)), strict=True)) | replaced
    results, found = compiled(name, pull_of(f), moving, tuple(both.values()))(moving, tuple(both.values()))
    return results, both, found


def check(name, given, options, **replaced):
    (_, lse), both, actual = pulled(name, given, options, **replaced)
    assert_right(name, actual, given, options, both["out"], both["lse"], lse)
    return actual


# The reference is within the budget.

QUICK = [
    ("causal", "sinks alone"),
    ("multi-query", "soft cap"),
    ("smaller values", "bias (1,4,40,56)"),
    ("lengths", "bias (56,)"),
]
QUICK += [("segments", "causal window"), ("dropout, causal", "rows that see nothing"), ("bias of -inf",)]


@pytest.mark.parametrize("features", QUICK, ids=" + ".join)
def test_the_reference_is_within_the_budget(features):
    check("xla", *forward.together(features, DTYPES[QUICK.index(features) % 2]))


# Native: one at a time. Those of the forward pass, and what matters to derivatives alone.


def replaced(make, **shapes):
    """A case whose arrays `make` changes, and adds to."""

    def of(dtype):
        given = forward.arrays(dtype=dtype, **({"length": 200, "keys": 300, "size": 64} | shapes))
        return given | make(given), {}

    return of


def outliers(given):
    """Scores up to some thousands: some entries of query and key are 50 times as large."""
    rng = np.random.default_rng(2)
    return {name: np.where(rng.random(given[name].shape) < 0.01, 50 * given[name], given[name]) for name in ("query", "key")}


def apart(given):
    """Scores of about 300 for some keys, -300 for the others."""
    signs = np.where(np.random.default_rng(3).random(given["key"].shape[:-1]) < 0.3, 6, -6)[..., None]
    return {"query": np.abs(given["query"]), "key": (np.abs(given["key"]) * signs).astype(given["key"].dtype)}


def huge_where_nothing_is_seen(given):
    """What no query sees, and queries that see nothing, are large."""
    given = {name: array.copy() for name, array in given.items()}
    for array in (given["key"], given["value"]):
        array[0, 130:], array[1, 17:] = 1e4, -1e4
    given["query"][0, 65:], given["query"][1, 129:] = 1e4, -1e4
    return given | forward.lengths_of([65, 129], [130, 17])()


def least_number_of_keys(dtype="float32", shape=(2, 4, 130, 200)):
    """A padding mask as a bias: the dtype's least number for some keys, blocks of them too."""
    bias = random(shape, "bias")
    bias[..., 40:45] = bias[..., 64:] = jnp.finfo(dtype).min
    return {"bias": bias.astype(jnp.dtype(dtype))}


def infinite():
    bias = random((2, 4, 200, 300), "bias")
    bias[bias > 4] = -np.inf
    bias[0, 0, :70], bias[..., 11], bias[..., 128:270], bias[1, 2] = -np.inf, -np.inf, -np.inf, -np.inf
    return {"bias": bias}


def constant(shape):
    return lambda: {"bias": np.full(shape, 300, np.float32)}


MEDIUM = {"length": 130, "keys": 200, "size": 64}
OWN = {
    **{f"sizes {h} and {v}": case({"length": 150, "keys": 200, "size": h, "value_size": v}) for h, v in [(72, 72), (96, 96)]},
    **{
        f"sizes {h} and {v}": case({"length": 150, "keys": 200, "size": h, "value_size": v}, is_causal=h > v)
        for h, v in [(80, 96), (84, 50), (112, 80), (8, 96), (192, 128), (8, 256), (64, 160)]
    },
    "8 heads that share 2, size 80": case({"length": 260, "keys": 140, "heads": 8, "size": 80}, is_causal=True),
    "bias, sizes 80 and 96": case(MEDIUM | {"size": 80, "value_size": 96}, lambda: {"bias": random((2, 4, 130, 200), "bias")}),
    "bias, sizes 192 and 128": case(
        MEDIUM | {"size": 192, "value_size": 128}, lambda: {"bias": random((1, 4, 130, 200), "bias")}
    ),
    "sizes 160 and 160": case({"length": 150, "keys": 200, "size": 160}, is_causal=True),
    "sizes 136 and 8": case({"length": 129, "keys": 129, "size": 136, "value_size": 8}, is_causal=True),
    "8 heads that share 2": case({"length": 260, "keys": 140, "heads": 8, "size": 128}, is_causal=True),
    "8 heads that share 2, size 256": case({"length": 140, "keys": 260, "heads": 8, "size": 256}),
    "window, size 256": case({"length": 300, "keys": 330, "size": 256}, local_window_size=(70, 100)),
    "bias of all heads, groups of 2, one block of queries": case(
        {"length": 60, "keys": 200, "size": 64}, lambda: {"bias": random((1, 1, 60, 200), "bias")}
    ),
    "segments, size 256, groups of 3": case(
        {"length": 300, "keys": 200, "size": 256, "heads": 6},
        lambda: {"query_segment_ids": segments(300, 0), "key_value_segment_ids": segments(200, 1)},
    ),
    "soft cap, size 256": case({"length": 200, "keys": 150, "size": 256}, logits_soft_cap=3.0),
    "soft cap and bias": case(MEDIUM, lambda: {"bias": random((1, 4, 130, 200), "bias")}, logits_soft_cap=3.0),
    "soft cap and bias, size 128": case(
        MEDIUM | {"size": 128}, lambda: {"bias": random((2, 1, 130, 200), "bias")}, logits_soft_cap=20.0
    ),
    "soft cap and bias, size 256": case(
        MEDIUM | {"size": 256}, lambda: {"bias": random((4, 1, 200), "bias")}, logits_soft_cap=3.0, is_causal=True
    ),
    "soft cap, bias and dropout, size 256": case(
        MEDIUM | {"size": 256},
        lambda: {"bias": random((2, 4, 130, 200), "bias")},
        logits_soft_cap=3.0,
        dropout_rate=0.3,
        dropout_rng=1,
    ),
    **{
        f"bias, size {size}": case(MEDIUM | {"size": size}, lambda: {"bias": random((2, 4, 130, 200), "bias")}, is_causal=True)
        for size in (128, 256)
    },
    "bias of heads and keys, size 128": case(MEDIUM | {"size": 128}, lambda: {"bias": random((4, 1, 200), "bias")}),
    "bias of queries, size 256": case(MEDIUM | {"size": 256}, lambda: {"bias": random((2, 1, 130, 1), "bias")}),
    "bias and dropout": case(MEDIUM, lambda: {"bias": random((4, 130, 200), "bias")}, dropout_rate=0.3, dropout_rng=1),
    "bias and dropout, size 256": case(
        MEDIUM | {"size": 256}, lambda: {"bias": random((1, 4, 130, 200), "bias")}, dropout_rate=0.3, dropout_rng=1
    ),
    "mask, size 128": case(MEDIUM | {"size": 128}, lambda: {"mask": random((2, 4, 130, 200))}),
    "mask, size 256": case(MEDIUM | {"size": 256}, lambda: {"mask": random((1, 4, 130, 200))}),
    "sinks, size 256": case(MEDIUM | {"size": 256}, lambda: {"sinks": random((4,), "bias")}, is_causal=True),
    "bias of -inf": case({"length": 200, "keys": 300, "size": 64}, infinite),
    "bias of -inf, size 256": case({"length": 200, "keys": 300, "size": 256}, infinite),
    "bias of the least number of keys": case(MEDIUM, least_number_of_keys),
    "bias of the least number of keys, size 256": case(MEDIUM | {"size": 256}, lambda: least_number_of_keys("bfloat16")),
    "bias of the least number of keys, of all rows": case(MEDIUM, lambda: least_number_of_keys(shape=(1, 1, 1, 200))),
    "large constant bias": case(MEDIUM, constant((1, 1, 1, 200))),
    "large constant bias of one, size 256": case(MEDIUM | {"size": 256}, constant(())),
    **{f"outliers, size {size}": replaced(outliers, size=size) for size in (64, 128, 256)},
    "scores far apart": replaced(apart, size=64),
    "scores far apart, size 256": replaced(apart, size=256),
    **{f"huge where nothing is seen, size {size}": replaced(huge_where_nothing_is_seen, size=size) for size in (64, 256)},
    "small scale": case(MEDIUM, scale=1e-6),
    "tiny scale": case(MEDIUM, scale=1e-35),
    "whole bias and soft cap, lengths, size 256": case(
        MEDIUM | {"size": 256},
        lambda: {"bias": random((2, 4, 130, 200), "bias")} | forward.lengths_of([130, 70], [150, 200])(),
        logits_soft_cap=3.0,
    ),
    "large scale": case(MEDIUM | {"size": 128}, scale=3.0),
    **{
        f"bias of all entries, lengths, size {size}": case(
            MEDIUM | {"size": size},
            lambda: {"bias": random((1, 4, 130, 200), "bias")} | forward.lengths_of([130, 70], [150, 200])(),
        )
        for size in (64, 128, 256)
    },
    **{
        f"bias {cases.ident(shape)} of 16 bits, size {size}": case(
            MEDIUM | {"size": size},
            lambda shape=shape: {"bias": random(shape, "bias").astype(jnp.bfloat16)},
            **options,
        )
        for shape, options in (
            ((2, 4, 130, 200), {"is_causal": True}),
            ((1, 4, 130, 200), {"is_causal": True}),
            ((1, 1, 130, 200), {}),
            ((2, 1, 130, 200), {"local_window_size": (30, 20)}),
        )
        for size in (64, 128, 256)
    },
}
SMALL = {name: own for name, own in forward.IN_SHAPES.items() if "large sizes" not in name}  # the others have no kernel
CASES = SMALL | {f"{name} of derivatives" if name in forward.IN_SHAPES else name: own for name, own in OWN.items()}

# Tiles that are cut, on few multiprocessors.
MANY = {"length": 700, "keys": 900, "key_heads": 4}
SIZES_OF_CUT = [(64, 64), (128, 128), (256, 256), (80, 50), (96, 96), (192, 128)]
CUT = {f"sizes {h} and {v}": case(MANY | {"size": h, "value_size": v}) for h, v in SIZES_OF_CUT}
CUT |= {
    "soft cap": case(MANY | {"size": 64}, logits_soft_cap=3.0),
    "dropout": case(MANY | {"size": 128}, dropout_rate=0.3, dropout_rng=1),
    "whole bias": case(MANY | {"size": 128}, lambda: {"bias": random((2, 4, 700, 900), "bias").astype(jnp.bfloat16)}),
    "dropout, size 256": case(MANY | {"size": 256}, dropout_rate=0.3, dropout_rng=1),
    "bias of keys": case(MANY | {"size": 64}, lambda: {"bias": random((900,), "bias")}),
    "one head": case(MANY | {"batch": (9,), "heads": 1, "key_heads": 1, "size": 128}),
    "few tiles": case({"length": 900, "keys": 100, "key_heads": 4, "size": 64}),
    "window that hides nothing": case(MANY | {"size": 128}, local_window_size=(900, 900)),
}

CAUSAL = {"length": 900, "keys": 900, "heads": 4, "key_heads": 2}
ALTERNATING = {f"causal, size {size}": case(CAUSAL | {"size": size}, is_causal=True) for size in (64, 128, 256)}
ALTERNATING |= {
    "causal, groups of 3": case(CAUSAL | {"heads": 6, "size": 128}, is_causal=True),
    "causal, one key head, soft cap": case(
        CAUSAL | {"batch": (4,), "key_heads": 1, "size": 64}, is_causal=True, logits_soft_cap=3.0
    ),
    "causal, bias of both entries": case(
        CAUSAL | {"size": 64}, lambda: {"bias": random((1, 4, 900, 900), "bias")}, is_causal=True
    ),
    "causal, bias of keys": case(CAUSAL | {"size": 128}, lambda: {"bias": random((4, 1, 900), "bias")}, is_causal=True),
    "causal, dropout, size 256": case(CAUSAL | {"size": 256}, is_causal=True, dropout_rate=0.3, dropout_rng=1),
    "causal, whole bias": case(
        CAUSAL | {"size": 128}, lambda: {"bias": random((2, 4, 900, 900), "bias").astype(jnp.bfloat16)}, is_causal=True
    ),
}

# A few of each kind: what compute-sanitizer is run over, as CONTRIBUTING.md says.
EACH_KIND = ["1 and 1", "65 and 63", "385 and 513, causal", "sizes 80 and 80", "sizes 256 and 256, whole", "groups of 3"]
EACH_KIND += ["window (200, 300), size 128", "window, size 256", "lengths, causal", "lengths, size 256", "segments shuffled"]
EACH_KIND += ["segments, size 128", "segments, size 256, groups of 3", "soft cap", "soft cap, size 256", "sinks alone"]
EACH_KIND += ["dropout", "bias and dropout, size 256", "everything", "nothing to see", "mask, size 128", "mask, size 256"]
EACH_KIND += [
    "soft cap and bias, size 256",
    "bias (2,4,130,200) bfloat16",
    "bias of heads and keys, size 128",
    "bias of queries, size 256",
]

SOME = ["1 and 300", "300 and 1", "129 and 127", "127 and 129, causal", "sizes 64 and 64, whole", "sizes 128 and 128, whole"]
SOME += [f"sizes {h} and {v}" for h, v in [(8, 8), (128, 128), (192, 192), (192, 128), (64, 128), (8, 256), (256, 24)]]
SOME += ["sizes 36 and 50", "sizes 100 and 33", "sizes 1 and 250"]
SOME += ["groups of 8", "two batch axes", "no batch axes", "many tiles", "4097", "window beyond the keys", "causal window"]
SOME += [f"window {window}" for window in [(30, None), (None, 30), (0, 0), (5, 200)]]
SOME += ["segments apart", "segments, lines of no multiple of 16 bytes"]
SOME += ["lengths of keys", "lengths, size 128", "segments sorted", "segments, window", "soft cap, causal"]
SOME += ["dropout, causal", "dropout, size 256", "sinks alone everywhere"]
SOME += [f"mask {shape} bool" for shape in ["(1,4,130,201)", "(2,4,1,201)", "(2,4,130,1)", "(201,)"]]
SOME += [f"bias {shape} float32" for shape in ["(1,4,130,201)", "(2,4,1,200)", "(1,1,1,201)", "()"]]
SOME += [f"bias {shape} bfloat16" for shape in ["(2,1,130,201)", "(130,200)", "(4,1,1)"]]


def has_float32(kind):
    """Tells by its name whether the head sizes of a case are at most 128, as those of float32 are."""
    sizes = itertools.chain(*re.findall(r"sizes? (\d+)(?: and (\d+))?", kind))
    return max(map(int, filter(None, sizes)), default=0) <= 128


def of_float32(kinds):
    return [kind for kind in kinds if has_float32(kind)]


def check_case(kind, dtype=None, *, deterministic_gradients=False):
    make, index = CASES[kind], list(CASES).index(kind)
    given, options = make(dtype or DTYPES[index % 2])
    return check("mosaic", given, options | {"deterministic_gradients": deterministic_gradients})


# Of each head size what waits for turns: with a table of lengths or segments and without, and with the most shared memory.
DETERMINISTIC = ["385 and 513, causal", "window (200, 300), size 128", "segments, size 256, groups of 3", "lengths, causal"]
DETERMINISTIC += ["bias of all heads, groups of 2, one block of queries", "segments sorted", "segments, size 128"]
DETERMINISTIC += ["sizes 80 and 96", "sizes 192 and 128", "sizes 8 and 256", "bias, sizes 192 and 128"]
DETERMINISTIC += ["whole bias and soft cap, lengths, size 256"]
DETERMINISTIC += [f"bias of all entries, lengths, size {size}" for size in (64, 128, 256)]
DETERMINISTIC += ["bias (1,4,130,201) float32", "bias (2,1,130,201) bfloat16", "bias (2,4,1,200) float32"]


def test_the_public_function_takes_every_case_of_derivatives_that_runs_natively():
    for make in (OWN | CUT | ALTERNATING).values():
        given, options = make("bfloat16")
        moving, fixed = split(given)
        jax.eval_shape(forward.function(options, fixed), moving)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "deterministic", "dtype"),
    [(kind, False, None) for kind in EACH_KIND]
    + [(kind, True, None) for kind in DETERMINISTIC]
    + [(kind, False, "float32") for kind in of_float32(EACH_KIND)]
    + [(kind, True, "float32") for kind in of_float32(DETERMINISTIC)],
)
def test_one_of_each_kind(kind, deterministic, dtype):
    check_case(kind, dtype, deterministic_gradients=deterministic)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=[] if kind in (OWN if dtype else {*SOME, *OWN}) else pytest.mark.slow)
        for dtype in (None, "float32")
        for kind in (of_float32(CASES) if dtype else CASES)
        if kind not in EACH_KIND
    ],
)
def test_native_cotangents_in_many_shapes(kind, dtype):
    check_case(kind, dtype)


def with_many_tiles(kind, dtype=None):
    """Returns operands and options of a case in `CUT` or `ALTERNATING`, whose plan says so."""
    cases, words = (CUT, "heads are cut") if kind in CUT else (ALTERNATING, "queries go down and up by turns")
    given, options = cases[kind](dtype or DTYPES[list(cases).index(kind) % 2])
    moving, fixed = split(given)
    f = forward.function(options, fixed, "mosaic")
    decision = explain(pull_of(f), moving, jax.eval_shape(f, moving), platform="cuda")[-1]
    assert words in decision.plan
    return given, options


MANY_TILES = [(kind, None) for kind in [*CUT, *ALTERNATING]] + [
    (kind, "float32")
    for kind in ("sizes 64 and 64", "sizes 128 and 128", "dropout", "one head", "causal, size 64", "causal, size 128")
]


@lowering.CHOICES
@pytest.mark.parametrize(("kind", "dtype"), MANY_TILES)
def test_native_cases_with_many_tiles_cut_them_or_alternate(kind, dtype):
    with kernels.target(multiprocessors=7):
        with_many_tiles(kind, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("size", [64, 128, 256])
def test_native_segments_that_mapped_examples_share(size):
    """Only `vmap` gives the kernels one line of segments for all entries of the batch."""
    given, options = forward.segmented("sorted", size=size)("bfloat16")
    moving, fixed = split(given)
    f = jax.vmap(forward.function(options, {name: array[0] for name, array in fixed.items()}, "mosaic"))
    cases.assert_all_run_on("mosaic", explain(f, moving))
    dout, dlse = cotangents_like(jax.eval_shape(f, moving))
    (out, lse), found = jax.jit(pull_of(f))(moving, (dout, dlse))
    given |= {name: np.broadcast_to(array[:1], array.shape) for name, array in fixed.items()}
    forward.assert_right("mosaic", (out, lse), given, options)
    assert_right("mosaic", found, given, options, dout, dlse, lse)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "dtype"), MANY_TILES)
def test_native_cotangents_of_many_tiles(kind, dtype):
    with kernels.target(multiprocessors=7):
        check("mosaic", *with_many_tiles(kind, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("multiprocessors", [132, 2])  # of which two get waves of blocks of threads, if deterministic
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(sizes, "bfloat16") for sizes in [(72, 40, 250), (64, 64, 77), (256, 200, 250), (128, 128, 512), (36, 50, 250)]]
    + [(sizes, "bfloat16") for sizes in [(80, 96, 250), (192, 128, 250)]]
    + [(sizes, "float32") for sizes in [(64, 64, 77), (128, 128, 512), (36, 50, 250)]],
    ids=str,
)
def test_native_parts_of_sums_are_the_sums_before_they_are_rounded(sizes, dtype, multiprocessors, deterministic):
    size, value_size, keys = sizes
    given = forward.arrays(length=130, keys=keys, size=size, value_size=value_size, dtype=dtype)
    target = dataclasses.replace(HOPPER, multiprocessors=multiprocessors)
    options = {"scale": 0.1, "window": (None, None), "soft_cap": None, "dropout_rate": 0.0}
    given = {name: jnp.asarray(array) for name, array in given.items()}
    given["out"], given["lse"] = forward.run_planned(mosaic, primitive.ATTENTION, target, given, **options)
    given["d_out"] = jnp.asarray(cotangents_like(jax.typeof(given["out"])))
    more = {"wanted": ("query", "key", "value"), "deterministic_gradients": deterministic}
    derivatives = functools.partial(forward.run_planned, mosaic, primitive.ATTENTION_VJP, target, given, **options, **more)
    whole, parts = (derivatives(is_partial=is_partial) for is_partial in (False, True))
    params = options | more | {"precision": "high"}
    kinds = {name: jax.typeof(array) for name, array in given.items()}
    plan = mosaic.plan(primitive.ATTENTION_VJP.problem(primitive.ATTENTION_VJP, kinds, params), target)
    added = ("query", "key", "value") if plan.geometry.has_single_heads else () if deterministic else ("query",)
    assert [part.dtype for part in parts] == [jnp.float32] * 3
    for name, part, rounded in zip(more["wanted"], parts, whole, strict=True):
        part = part * 0.1 if name == "query" else part
        if name in added:  # by tiles, in any order
            assert np.max(np.abs(oracle.to64(part) - oracle.to64(rounded))) <= 2.0**-7 * np.max(np.abs(oracle.to64(rounded)))
        else:
            np.testing.assert_array_equal(part.astype(rounded.dtype), rounded)


@st.composite
def calls(draw):
    """Any features together, in up to some blocks of queries and of keys."""
    yes, seed = st.booleans(), draw(st.integers(0, 99))
    batch = draw(st.sampled_from([(), (2,), (1, 2)]))
    length, keys = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    key_heads, groups = draw(st.sampled_from([1, 2])), draw(st.sampled_from([1, 2, 3]))
    dtype = draw(st.sampled_from((*DTYPES, "float32")))
    sizes = st.sampled_from([8, 36, 64, 72, 128] + [192, 256] * (dtype != "float32"))
    size, value_size = draw(sizes), draw(sizes)
    heads, rng = key_heads * groups, np.random.default_rng(seed)
    shapes = {"batch": batch, "length": length, "keys": keys, "heads": heads, "key_heads": key_heads}
    array_options = {"size": size, "value_size": value_size, "seed": seed, "dtype": dtype}
    given, options = forward.arrays(**shapes, **array_options), {}
    for kind in ("mask", "bias"):
        if draw(yes):
            given[kind] = random(tuple(n if draw(yes) else 1 for n in (*batch, heads, length, keys)), kind, seed)
    for name, most in (("query_seq_lengths", length), ("key_value_seq_lengths", keys)):
        if draw(yes):
            given[name] = np.asarray(rng.integers(0, most + 1, batch), np.int32)
    if draw(yes):
        given["query_segment_ids"] = segments(length, seed, batch)
        given["key_value_segment_ids"] = segments(keys, seed + 1, batch)
    if draw(yes):
        given["sinks"] = random((heads,), "bias", seed)
    side = st.none() | st.integers(0, 300)
    if draw(yes):
        options["local_window_size"] = draw(st.tuples(side, side))
    options["is_causal"] = draw(yes)
    options["logits_soft_cap"] = draw(st.sampled_from([None, 3.0, 30.0]))
    if draw(yes):
        options |= {"dropout_rate": draw(st.sampled_from([0.1, 0.5])), "dropout_rng": seed}
    return given, options


@pytest.mark.gpu
@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(call=calls())
def test_native_kernels_take_random_combinations(call):
    check("mosaic", *call)


@settings(max_examples=3, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=forward.calls())
def test_the_reference_is_within_the_budget_of_random_combinations(call):
    check("xla", *call)


# Interpreted, without a GPU.

SEGMENTS = "query_segment_ids", "key_value_segment_ids"
SQUARE = {"batch": (), "length": 128, "keys": 128, "heads": 2, "key_heads": 1}
LONG = SQUARE | {"length": 512, "keys": 512}
INTERPRETED = {
    "causal": case(SQUARE, is_causal=True),
    "bias, soft cap": case(SQUARE, lambda: {"bias": random((2, 128, 128), "bias")}, logits_soft_cap=5.0),
    "bias": case(SQUARE, lambda: {"bias": random((1, 128, 128), "bias")}, is_causal=True),
    "causal, many tiles": case(LONG, is_causal=True),
    "segments, causal": case(LONG, lambda: dict.fromkeys(SEGMENTS, segments(512, 0, ())), is_causal=True),
    "segments shuffled": case(LONG, lambda: {name: ids(512, i, "shuffled")[i] for i, name in enumerate(SEGMENTS)}),
}


EVERY_INTERPRETED = [
    (kind, size, dtype, deterministic)
    for kind, deterministic in itertools.product(INTERPRETED, (False, True))
    for size, dtype in [(64, "float32"), (128, "float32"), (64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16")]
    if size < 256 or "bias" in kind  # else two blocks of threads share a tile
]
SOME_INTERPRETED = [
    ("causal", 64, "float32", True),
    ("bias, soft cap", 64, "float32", False),
    ("causal", 128, "float32", False),
]
SOME_INTERPRETED += [("bias, soft cap", 128, "float32", True), ("bias", 256, "bfloat16", False)]
SOME_INTERPRETED += [("causal, many tiles", 64, "bfloat16", False), ("segments, causal", 64, "bfloat16", False)]
SOME_INTERPRETED += [("segments shuffled", 128, "bfloat16", True)]


@pytest.mark.parametrize("call", quick(EVERY_INTERPRETED, SOME_INTERPRETED), ids=str)
def test_interpreted_cotangents(call):
    kind, size, dtype, deterministic = call
    check_interpreted(kind, size, size, dtype, deterministic)


TAILED = [(80, 80), (96, 96), (80, 96), (96, 64), (40, 80), (80, 128), (128, 96)]  # of queries and keys, of values, or both


@pytest.mark.parametrize(
    "call",
    quick(
        [(kind, *sizes, order, n) for kind in INTERPRETED for sizes in TAILED for order in (False, True) for n in (1, 2)],
        [
            ("causal", 80, 80, False, 2),
            ("causal", 80, 96, True, 1),
            ("causal, many tiles", 96, 96, False, 1),
            ("bias, soft cap", 80, 128, True, 1),
            ("segments, causal", 40, 80, False, 1),
            ("segments shuffled", 96, 64, True, 2),
        ],
    ),
    ids=str,
)
def test_interpreted_cotangents_of_heads_with_a_tail(call):
    kind, size, value_size, deterministic, key_heads = call
    check_interpreted(kind, size, value_size, "bfloat16", deterministic, key_heads=key_heads)


@pytest.mark.parametrize(
    "call",
    quick(
        [
            (kind, *sizes, order)
            for kind in INTERPRETED
            for sizes in [(40, 40), (112, 104), (36, 20)]
            for order in (False, True)
        ],
        [("causal", 112, 104, False), ("segments, causal", 40, 40, True), ("bias, soft cap", 36, 20, False)],
    ),
    ids=str,
)
def test_interpreted_cotangents_of_heads_that_tma_clips(call):
    kind, size, value_size, deterministic = call
    check_interpreted(kind, size, value_size, "bfloat16", deterministic)


UNEQUAL = [
    (kind, *sizes, "bfloat16", deterministic)
    for kind, deterministic in itertools.product(("bias", "bias, soft cap"), (False, True))
    for sizes in [(192, 192), (192, 128), (64, 160), (144, 256)]
]
UNEQUAL += [(kind, *sizes, "float32", False) for kind in INTERPRETED for sizes in [(64, 128), (128, 40), (96, 32)]]


@pytest.mark.parametrize(
    "call",
    quick(
        UNEQUAL,
        [
            ("bias", 192, 128, "bfloat16", False),
            ("bias, soft cap", 64, 160, "bfloat16", True),
            ("causal", 64, 128, "float32", False),
        ],
    ),
    ids=str,
)
def test_interpreted_cotangents_of_other_sizes_than_those_of_configurations(call):
    check_interpreted(*call)


def check_interpreted(kind, size, value_size, dtype, deterministic, **heads):
    given, options = INTERPRETED[kind](dtype)
    length = given["query"].shape[-3]
    shapes = SQUARE | {"length": length, "keys": length} | heads
    given |= forward.arrays(**shapes, size=size, value_size=value_size, dtype=dtype)
    moving, fixed = split(given)
    out, lse = forward.function(options, fixed, "xla")(moving)
    dout, dlse = cotangents_like((out, lse))
    names = {"out": out, "lse": jnp.swapaxes(lse, -1, -2), "d_out": dout, "d_lse": jnp.swapaxes(dlse, -1, -2)}
    params = {"scale": size**-0.5, "window": (None, 0 if "is_causal" in options else None), "dropout_rate": 0.0}
    params |= {"soft_cap": options.get("logits_soft_cap"), "precision": "high", "wanted": tuple(moving)}
    target = dataclasses.replace(HOPPER, multiprocessors=1)
    found = interpreted.cotangents(target, interpreted.named(given | names), **params, deterministic_gradients=deterministic)
    assert_right("mosaic", dict(zip(moving, found, strict=True)), given, options, dout, dlse, lse)


# Cotangents of one result alone, of some operands alone, and of rows that see nothing.


def case_of(name):
    """Returns operands with a bias, sinks, and rows that see nothing. They are larger for a kernel."""
    length, keys, size = (9, 11, 8) if name == "xla" else (130, 200, 64)
    given = forward.arrays(length=length, keys=keys, size=size, dtype="bfloat16")
    given |= {"bias": random((1, 4, length, keys), "bias"), "sinks": random((4,), "bias")}
    return given | {"query_seq_lengths": np.array([length, length // 2], np.int32)}, {"is_causal": True}


@EACH
@pytest.mark.parametrize("which", [0, 1], ids=["out", "lse"])
def test_cotangents_of_one_result_alone(name, which):
    given, options = case_of(name)
    moving, fixed = split(given)
    f = forward.function(options, fixed, name)

    def pull(moving, cotangent):
        def one(moving):
            results = f(moving)
            return results[which], results[1]

        _, vjp, lse = jax.vjp(one, moving, has_aux=True)
        return lse, *vjp(cotangent)

    cotangents = cotangents_like(jax.eval_shape(f, moving))
    lse, actual = compiled(name, pull, moving, cotangents[which])(moving, cotangents[which])
    both = [own if i == which else np.zeros_like(own) for i, own in enumerate(cotangents)]
    assert_right(name, actual, given, options, *both, lse)


@EACH
@pytest.mark.parametrize("wanted", [("query",), ("value", "sinks"), ("bias",), ("sinks",)], ids="+".join)
def test_cotangents_of_some_operands_alone(name, wanted):
    given, options = case_of(name)
    moving, fixed = split(given)
    f = forward.function(options, fixed, name)
    pull = pull_of(lambda some: f(moving | some))
    args = {key: moving[key] for key in wanted}, cotangents_like(jax.eval_shape(f, moving))
    (_, lse), actual = compiled(name, pull, *args, runs=(1, int(wanted != ("sinks",))))(*args)
    assert set(actual) == set(wanted)
    assert_right(name, actual, given, options, *args[1], lse)


@EACH
@pytest.mark.parametrize("with_sinks", [False, True])
def test_cotangents_of_rows_that_see_nothing_have_no_effect(name, with_sinks):
    given, options = case_of(name)
    dout, dlse = cotangents_like(jax.eval_shape(forward.function(options, split(given)[1]), split(given)[0]))
    unseen = 1, slice(given["query_seq_lengths"][1], None)
    dout[unseen] = np.nan
    if not with_sinks:
        del given["sinks"]
        dlse[unseen] = -np.inf  # as of the square of an lse of -inf
    check(name, given, options, out=dout, lse=dlse)


@pytest.mark.parametrize(("dtype", "headroom"), [("float16", 13.0), ("bfloat16", 0.0), ("float32", 0.0)])
def test_rows_that_see_their_sink_alone_are_known_by_what_kernels_round(dtype, headroom):
    sinks = np.random.default_rng(0).uniform(-50, 50, 1000).astype(np.float32)
    state = online.lift_log2(jnp.asarray(sinks), headroom=headroom)
    lse = online.lse_log2(state)[:, None]
    assert np.any(lse[:, 0] != sinks)
    there = {
        "query": np.zeros((1, 1000, 8), dtype),
        "key": np.zeros((5, 1000, 8), dtype),
        "sinks": sinks,
        "mask": np.zeros((1, 5)),
    }
    out = jnp.zeros((1, 1000, 8), dtype)
    d_out, delta = operands.cotangents_of_rows(there, out, lse, out + np.nan, None, (None, None))
    assert not np.any(d_out)
    assert not np.any(delta)
    moved = operands.cotangents_of_rows(there, out, lse + 1e-3, out + np.nan, None, (None, None))[0]
    assert np.all(np.isnan(moved))


def test_what_rows_and_sinks_give_to_kernels():
    """`delta` is what each score of a row gets less, 0 where nothing is seen; and sinks are keys without a value."""
    rng = np.random.default_rng(0)
    out, d_out = rng.standard_normal((2, 2, 5, 3, 4)).astype(np.float32)
    lse, d_lse = rng.standard_normal((2, 2, 3, 5)).astype(np.float32)
    there = {"query": out, "key": out[:, :, :1]}
    share = np.einsum("btnh,btnh->bnt", np.float64(out), np.float64(d_out))
    found, delta = operands.cotangents_of_rows(there, out, lse, d_out, d_lse, (None, None))
    np.testing.assert_array_equal(found, d_out)
    np.testing.assert_allclose(delta, share - d_lse, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(operands.cotangents_of_rows(there, out, lse, None, d_lse, (None, None))[1], -d_lse)

    lse[1, :, 2], d_out[1, 2], d_lse[1, :, 2] = -np.inf, np.nan, np.nan
    found, delta = operands.cotangents_of_rows(there | {"mask": out[..., 0]}, out, lse, d_out, d_lse, (None, None))
    seen = lse != -np.inf
    np.testing.assert_array_equal(found, np.where(np.swapaxes(seen, 1, 2)[..., None], d_out, 0))
    np.testing.assert_allclose(delta, np.where(seen, share - d_lse, 0), rtol=1e-5, atol=1e-6)
    sinks = rng.standard_normal((1, 3)).astype(np.float32)
    weight = np.exp(sinks[..., None] - np.where(seen, lse, np.inf), dtype=np.float64)
    expected = -np.sum(weight * np.float64(delta), -1)
    np.testing.assert_allclose(operands.cotangents_of_sinks(jnp.asarray(sinks), lse, delta), expected, rtol=1e-5, atol=1e-6)


# Deterministic: the same bits every time.


def large(make=None, length=2048, size=64, key_heads=8, **options):
    return case({"length": length, "keys": length, "heads": 8, "key_heads": key_heads, "size": size}, make, **options)


def packed():
    """Segments, of a length of its own for each batch entry."""
    ids = {f"{kind}_segment_ids": segments(2048, 0, count=9) for kind in ("query", "key_value")}
    return ids | forward.lengths_of([2048, 1500], [2000, 1500])()


LARGE = {
    "whole": large(),
    "causal": large(is_causal=True),
    "segments and lengths": large(packed, size=128, key_heads=2, is_causal=True),
    "window, size 256": large(size=256, key_heads=2, local_window_size=(700, 300)),
    "bias": large(lambda: {"bias": random((2, 8, 512, 512), "bias")}, length=512, is_causal=True),
    "bias of heads": large(lambda: {"bias": random((1, 8, 512, 512), "bias")}, length=512, size=128, is_causal=True),
    "bias of entries": large(lambda: {"bias": random((2, 1, 512, 512), "bias")}, length=512, key_heads=2, size=256),
    "bias of keys": large(lambda: {"bias": random((1, 1, 1, 512), "bias")}, length=512),
    "dropout": large(length=1024, key_heads=1, dropout_rate=0.2, dropout_rng=0),
}


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("kind", "dtype"),
    [(kind, "bfloat16") for kind in LARGE]
    + [(kind, "float32") for kind in ("causal", "segments and lengths", "bias", "bias of heads", "dropout")],
)
def test_native_deterministic_bits_are_the_same_every_time(kind, dtype, monkeypatch):
    given, options = LARGE[kind](dtype)
    moving, fixed = split(given)
    f = forward.function(options, fixed, "mosaic")
    args = moving, cotangents_like(jax.eval_shape(f, moving))
    default = compiled("mosaic", pull_of(f), *args)
    if "dropout_rate" in options:  # one case asks by the flag of XLA
        monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops")
    else:
        f = forward.function(options | {"deterministic_gradients": True}, fixed, "mosaic")
    program = compiled("mosaic", pull_of(lambda moving: f(moving)), *args)
    first, compare = program(*args)[1], jax.jit(functools.partial(jax.tree.map, differ))
    assert all(np.all(np.isfinite(oracle.to64(found))) for found in first.values())
    for _ in range(50):  # a race of single warps shows in some runs
        bits = {name: found[0] for name, found in compare(first, program(*args)[1]).items()}
        sums = {name: found[1] for name, found in compare(first, default(*args)[1]).items()}
        assert not any(bits.values()), bits
        assert not any(sums.values()), sums


def differ(array, other):
    """Tells whether bits differ, and whether more differs than sums of float32 in another order do.

    The float64 truth of problems so large would take minutes; smaller ones are held to derived budgets. The bounds here are
    chosen, not derived. In 16 bits both round weights and results: so they may differ by a unit in the last place of bfloat16,
    2^-7 of a result. The terms of a sum may cancel: so they may also differ by 2^-11 of the largest result. In float32 sums
    alone differ: the bounds are 2^-14 of a result and 2^-16 of the largest, which a lost low term of 2^-9 exceeds.
    """
    of_result, of_largest = (2.0**-14, 2.0**-16) if array.dtype == jnp.float32 else (2.0**-7, 2.0**-11)
    words = jnp.dtype(f"uint{8 * array.dtype.itemsize}")
    bits = jnp.any(array.view(words) != other.view(words))
    array, other = array.astype(jnp.float32), other.astype(jnp.float32)
    bound = of_result * jnp.abs(other) + of_largest * jnp.max(jnp.abs(other))
    return bits, ~jnp.all(jnp.abs(array - other) <= bound)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "kind", ["segments shuffled", "many tiles", "bias of -inf, size 256", "segments, size 256, groups of 3"]
)
def test_native_deterministic_cotangents(kind):
    check_case(kind, deterministic_gradients=True)


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "deterministic"), [("385 and 513, causal", False), ("lengths, causal", True)])
def test_native_tiles_without_a_table(kind, deterministic, monkeypatch):
    monkeypatch.setattr(schedule, "MAX_SCHEDULED", 0)
    with kernels.target(multiprocessors=3):
        check_case(kind, deterministic_gradients=deterministic)


@pytest.mark.gpu
def test_native_deterministic_bits_do_not_depend_on_who_takes_a_tile():
    found = []
    for count in (1, 5, 132):
        with kernels.target(multiprocessors=count):
            found.append(jax.tree.map(np.asarray, check_case("segments, size 128", deterministic_gradients=True)))
    for other in found[1:]:
        assert all(found[0][name].tobytes() == other[name].tobytes() for name in other)


# Transformations.

TRANSFORMED = {
    "vmap": lambda f: jax.vmap(pull_of(f)),
    "scan": lambda f: pull_of(lambda stacks: jax.lax.scan(lambda _, moving: (None, f(moving)), None, stacks)[1]),
    "map": lambda f: lambda *args: jax.lax.map(lambda args: pull_of(f)(*args), args),
}


@EACH
@pytest.mark.parametrize("kind", TRANSFORMED)
def test_transformations(name, kind):
    given, options = case_of(name)
    moving, fixed = split(given)
    f = forward.function(options, fixed, name)
    stacks = {key: np.stack([a, a[..., ::-1], -a]) for key, a in moving.items()}
    cotangents = jax.tree.map(lambda x: np.stack([x, x[::-1], x]), cotangents_like(jax.eval_shape(f, moving)))
    args = stacks, cotangents
    check_each(name, compiled(name, TRANSFORMED[kind](f), *args)(*args), given, options, *args)


@EACH
def test_vmap_of_some_operands(name):
    given, options = case_of(name)
    moving, fixed = split(given)
    f = forward.function(options, fixed, name)
    stacks = {key: np.stack([a, a[..., ::-1]]) if key in ("query", "value") else a for key, a in moving.items()}
    axes = {key: 0 if key in ("query", "value") else None for key in moving}
    args = stacks, jax.tree.map(lambda x: np.stack([x, x[::-1]]), cotangents_like(jax.eval_shape(f, moving)))
    found = compiled(name, jax.vmap(pull_of(f), (axes, 0)), *args)(*args)
    stacks = {key: a if axes[key] == 0 else np.stack([a, a]) for key, a in stacks.items()}
    check_each(name, found, given, options, stacks, args[1])


def check_each(name, found, given, options, stacks, cotangents):
    (_, lse), actual = found
    for i in range(len(lse)):
        one = given | {key: a[i] for key, a in stacks.items()}
        assert_right(name, {key: a[i] for key, a in actual.items()}, one, options, *(c[i] for c in cotangents), lse[i])


@EACH
@pytest.mark.parametrize("saved", [True, False])
def test_checkpoint(name, saved):
    given, options = case_of(name)
    moving, fixed = split(given)
    policy = jax.checkpoint_policies.save_only_these_names(*primitive.SAVED_NAMES)
    f = jax.checkpoint(forward.function(options, fixed, name), policy=policy if saved else None)
    args = moving, cotangents_like(jax.eval_shape(f, moving))
    (_, lse), actual = compiled(name, pull_of(f), *args, runs=(1 if saved else 2, 1))(*args)
    assert_right(name, actual, given, options, *args[1], lse)


# Lowered for CUDA, without a GPU.


def gradient(given, wanted=MOVING, attend=forced, **options):
    """Of the sum of output and log-sum-exp, in what is wanted of what there is."""
    moving = {name: given[name] for name in wanted if name in given}

    def total(moving):
        out, lse = attend(**(given | moving), **options, return_residual=True)
        return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

    return jax.grad(total)(moving)


def lower(given, real=BACKWARD, **options):
    """The program, with an empty kernel of the forward pass, which has tests of its own, or empty kernels."""
    with kernels.hollow(but=real):
        return kernels.lowered_for_cuda(lambda given: gradient(given, **options), given, kernels=[FORWARD, BACKWARD])


@pytest.mark.parametrize("feature", ["causal", "mask of keys", "bias of heads", "bias"])
def test_the_program_holds_no_scores_but_those_of_a_bias(feature):
    """Nor does it hold the gradient of a bias that all of the batch shares for each of the batch."""
    given, options = lowering.with_features([feature], (64, 64), (1024, 1024))
    shapes = re.findall(r"tensor<((?:\d+x)+)", lower(given, real=None, **options))
    sizes = [given["query"].size, given["bias"].size] if feature == "bias" else [given["query"].size]
    assert max(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes) == max(sizes)


def decisions(given, **options):
    """Which implementations run forward pass and derivatives, and why the kernel does not run the latter."""
    found = explain(lambda given: gradient(given, attend=attend, **options), given, platform="cuda")
    assert [decision.primitive for decision in found] == ["dot_product_attention", "dot_product_attention_vjp"]
    return [decision.implementation for decision in found], dict(found[1].refusals).get("mosaic")


@pytest.mark.parametrize(
    ("mask", "batch"),
    [
        ((2, 1, 300, 401), 2),
        ((401,), 1),
        pytest.param((2, 4, 300, 401), None, marks=pytest.mark.slow),
        pytest.param((1, 1, 300, 401), 1, marks=pytest.mark.slow),
        pytest.param((2, 1, 1, 401), 2, marks=pytest.mark.slow),
    ],
)
def test_kernels_are_told_which_blocks_a_mask_shows_that_heads_share(mask, batch):
    given = lowering.operands(keys=401, key_heads=4) | {"mask": lowering.shaped(*mask, dtype="bool")}
    calls = [line for line in lower(given, real=None).splitlines() if "custom_call @mosaic_gpu" in line]
    found = [re.findall(r"tensor<(\d+x\d+x\d)xi32>", line.split("} : ")[-1]) for line in calls]
    assert found == ([[], []] if batch is None else [[f"{batch}x2x2"], [f"{batch}x4x4"]])


CONFIGURATIONS = [(64, 64), (128, 128), (256, 256)]
CONFIGURATIONS_OF_FLOAT32 = CONFIGURATIONS[:2]
WITH_EVERYTHING = [(256, 256), (80, 96)]
# Most of the others are in `lowering.EVERYTHING`. The slow ones have one feature each.
SEVERAL = [("causal", "lengths", "bias of heads"), ("segments", "bias of 16 bits")]


@pytest.mark.parametrize("features", quick([*SEVERAL, *((name,) for name in lowering.FEATURES)], SEVERAL), ids=" + ".join)
def test_every_feature_lowers_for_cuda(features):
    index = list(lowering.FEATURES).index(features[-1])  # in turn with configurations, lengths and dtypes
    sizes, lengths = CONFIGURATIONS[index % 3], [*lowering.LENGTHS.values()][index % 2]
    given, options = lowering.with_features(features, sizes, lengths, DTYPES[index // 2 % 2])
    lower(given, **options)


@pytest.mark.slow
@pytest.mark.parametrize("lengths", lowering.LENGTHS)
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(sizes, "bfloat16") for sizes in CONFIGURATIONS] + [(sizes, "float32") for sizes in CONFIGURATIONS_OF_FLOAT32],
    ids=str,
)
@pytest.mark.parametrize("feature", lowering.FEATURES)
def test_every_feature_lowers_for_cuda_in_every_configuration(feature, sizes, dtype, lengths):
    given, options = lowering.with_features([feature], sizes, lowering.LENGTHS[lengths], dtype)
    lower(given, **options)
    if "bias" not in feature:
        lower(given, deterministic_gradients=True, **options)


@pytest.mark.parametrize("sizes", quick(lowering.SIZES, [*CONFIGURATIONS[1:2], (84, 50)]), ids=str)
def test_every_configuration_lowers_for_cuda(sizes):
    index = lowering.SIZES.index(sizes)
    given, options = lowering.with_features((), sizes, [*lowering.LENGTHS.values()][index % 2])
    lower(given, **options)


@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [(sizes, "bfloat16") for sizes in WITH_EVERYTHING]
    + [(sizes, "float32") for sizes in CONFIGURATIONS_OF_FLOAT32]
    + [pytest.param(sizes, "bfloat16", marks=pytest.mark.slow) for sizes in lowering.SIZES if sizes not in WITH_EVERYTHING],
    ids=str,
)
def test_every_configuration_lowers_for_cuda_with_everything(sizes, dtype):
    index = lowering.SIZES.index(sizes)
    given, options = lowering.with_features(lowering.EVERYTHING, sizes, [*lowering.LENGTHS.values()][1 - index % 2], dtype)
    lower(given, **options)


@pytest.mark.parametrize("passes_both", [False, True])
@pytest.mark.parametrize(("dtype", "sizes"), [("bfloat16", CONFIGURATIONS), ("float32", CONFIGURATIONS_OF_FLOAT32)])
def test_every_configuration_is_that_of_a_size_that_is_lowered(dtype, sizes, passes_both):
    every = range(8, max(sizes)[0] + 1, 8)
    configure = functools.partial(backward_plan.backward_config, dtype=jnp.dtype(dtype), passes_both=passes_both)
    found = {configure(*pair)[1] for pair in itertools.product(every, every)}
    assert found == {configure(*pair)[1] for pair in sizes}
    for config in found:
        less, more = config.registers
        assert 128 * (less + backward_plan.CONSUMERS * more) <= 65536
        assert less % 8 == more % 8 == 0


def test_blocks_are_as_large_as_the_head_size_lets_them():
    for sizes, expected in {(8, 64): (128, 128), (72, 8): (64, 128), (128, 128): (64, 128), (64, 136): (64, 64)}.items():
        plan = plan_of(300, 300, (None, None), backward_plan.backward_config(*sizes)[1])
        assert (plan.config.block_q, plan.block_kv) == expected


@pytest.mark.parametrize("size", [64, pytest.param(256, marks=pytest.mark.slow)])
def test_deterministic_derivatives_lower_for_cuda(size):
    names = ("window", "lengths", "segments", "sinks", "mask")
    given, options = lowering.with_features(names, (size, size), (300, 301))
    for shape in ((2, 4, 300, 301), (1, 4, 300, 301)):
        bias = {"bias": lowering.shaped(*shape, dtype="float32")}
        lower(given | bias, deterministic_gradients=True, logits_soft_cap=5.0, **options)


@pytest.mark.parametrize("deterministic", quick([False, True], [True]))
@pytest.mark.parametrize("size", quick([64, 128, 256], [64]))
def test_an_offset_of_queries_lowers_for_cuda_without_a_mask(size, deterministic):
    given = lowering.operands(length=1024, keys=1024, size=size) | {"query_offset": lowering.shaped(2, dtype="int32")}
    text = lower(given, is_causal=True, local_window_size=(300, 0), deterministic_gradients=deterministic)
    assert "1024x1024" not in text


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 128, 256])
def test_deterministic_derivatives_without_lengths_lower_for_cuda(size):
    for options in ({}, {"is_causal": True}, {"local_window_size": (70, 10)}):
        lower(lowering.operands(size=size), deterministic_gradients=True, **options)


SHAPES = {
    "no batch": lowering.operands(batch=()),
    "two batch axes": lowering.operands(batch=(2, 3), heads=6, key_heads=1, size=256),
    "one query": lowering.operands(length=1),
    "one key": lowering.operands(keys=1, dtype="float16"),
    "very many tiles": lowering.operands((2**17 + 1,), 64, 64, 1, 1),
}


@pytest.mark.parametrize("shapes", quick(SHAPES, ["two batch axes", "very many tiles"]))
def test_shapes_lower_for_cuda(shapes):
    lower(SHAPES[shapes], is_causal=True)


@pytest.mark.parametrize("which", quick([0, 1], [1]))
def test_one_result_alone_lowers_for_cuda(which):
    def f(given):
        return jax.grad(lambda given: jnp.sum(forced(**given, return_residual=True)[which].astype(jnp.float32)))(given)

    with kernels.hollow(but=BACKWARD):
        kernels.lowered_for_cuda(f, lowering.operands(), kernels=[FORWARD, BACKWARD])


@pytest.mark.usefixtures("hollow_kernels")
def test_sinks_alone_need_no_kernel():
    given = lowering.operands() | {"sinks": lowering.shaped(4, dtype="float32")}
    kernels.lowered_for_cuda(lambda given: gradient(given, ("sinks",)), given, kernels=[FORWARD])


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("kind", quick([*TRANSFORMED, "checkpoint"], ["vmap"]))
def test_transformations_lower_to_one_kernel_each(kind):
    def f(moving):
        return forced(**moving, return_residual=True)

    moving = lowering.operands()
    cotangents, forwards = jax.eval_shape(f, moving), 1
    if kind == "checkpoint":
        transformed, forwards = pull_of(jax.checkpoint(f)), 2
    else:
        transformed = TRANSFORMED[kind](f)
        moving, cotangents = jax.tree.map(lambda a: jax.ShapeDtypeStruct((3, *a.shape), a.dtype), (moving, cotangents))
    text = kernels.lowered_for_cuda(transformed, moving, cotangents)
    assert sorted(kernels.kernel_names(text)) == [BACKWARD] + [FORWARD] * forwards


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("platforms", quick([("cuda",), ("cpu", "tpu", "cuda")], [("cpu", "tpu", "cuda")]), ids=str)
def test_export(platforms):
    f = jax.jit(lambda given: gradient(given, attend=attend, is_causal=True))
    exported = jax.export.export(f, platforms=platforms)(lowering.operands())
    assert sorted(kernels.kernel_names(exported.mlir_module())) == [BACKWARD, FORWARD]


@pytest.mark.parametrize("deterministic", [False, True])
def test_what_is_written_in_place_leaves_no_effect(deterministic):
    """Automatic axes go through custom_partitioning, which refuses effects, and that only while it compiles."""
    q, lse = lowering.shaped(2, 64, 4, 64), lowering.shaped(2, 4, 64, dtype="float32")
    given = {"query": q, "key": q, "value": q, "bias": lowering.shaped(2, 4, 64, 64, dtype="float32")}
    given |= {"out": q, "lse": lse, "d_out": q, "d_lse": lse}
    options = {"scale": 0.1, "window": (None, None), "soft_cap": None, "dropout_rate": 0.0}
    options |= {"deterministic_gradients": deterministic, "wanted": ("query", "key", "value", "bias")}
    derivatives = functools.partial(forward.run_planned, mosaic, primitive.ATTENTION_VJP, HOPPER, **options)
    assert jax.make_jaxpr(derivatives)(given).effects == set()


def test_derivatives_lower_with_64_bits():
    with jax.enable_x64(True):
        given = lowering.operands() | {"key_value_seq_lengths": lowering.shaped(2, dtype="int32")}
        kernels.lowered_for_cuda(functools.partial(gradient, deterministic_gradients=True), given, kernels=[FORWARD, BACKWARD])


@pytest.mark.usefixtures("hollow_kernels")
def test_export_of_symbolic_shapes_holds_the_reference():
    shape = jax.export.symbolic_shape("b, t, 4, 64")
    q = jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    f = jax.jit(lambda q: gradient({"query": q, "key": q, "value": q}, attend=attend))
    assert kernels.kernel_names(jax.export.export(f, platforms=["cuda"])(q).mlir_module()) == []


# Which blocks of queries a block of keys visits, and in which turn.

sides = st.none() | st.integers(0, 40) | st.integers(0, 700)
lengths = st.integers(1, 700)
CONFIGS = [
    (size, dtype, backward_plan.backward_config(size, size, jnp.dtype(dtype))[1])
    for dtype, sizes in (("bfloat16", CONFIGURATIONS), ("float32", CONFIGURATIONS_OF_FLOAT32))
    for size, _ in sizes
]
configs = st.sampled_from([config for *_, config in CONFIGS])


NO_BIAS = backward_plan.BiasGradient.NONE


def plan_of(length, keys, window, config, batch=(1,), names=()):
    size, dtype = next((size, dtype) for size, dtype, other in CONFIGS if other == config)
    return backward_plan.BackwardGeometry(
        batch=batch,
        query=(length, 4, size),
        key=(keys, 2, size),
        scale=0.125,
        window=window,
        soft_cap=None,
        dropout_rate=0.0,
        dtype=jnp.dtype(dtype),
        names=frozenset(names),
        multiprocessors=132,
        bias_gradient=NO_BIAS,
        is_deterministic=True,
        is_varying=False,
        size=size,
        value_size=size,
        config=config,
    )


def blocks_of(seen, plan):
    """Tells for each block of keys and each block of queries if some query sees some key, and if all see all."""
    (length, keys), rows, cols = seen.shape, plan.config.block_q, plan.block_kv
    padding = [(0, -length % rows), (0, -keys % cols)]
    some = np.pad(seen, padding).reshape(-(-length // rows), rows, -1, cols).any((1, 3)).T
    # Queries behind the last are 0, and keys behind the last are to be masked.
    every = np.pad(np.pad(seen, [padding[0], (0, 0)], constant_values=True), [(0, 0), padding[1]])
    return some, every.reshape(-(-length // rows), rows, -1, cols).all((1, 3)).T


def assert_visits(spans, seen, plan, shown=True):
    """`shown` is what a mask shows, which is looked at in every step, also where nothing else must be."""
    (some, _), (_, every) = blocks_of(seen & shown, plan), blocks_of(seen, plan)
    for block, (low, high, whole_from, whole_to) in enumerate(spans):
        assert 0 <= low <= high
        assert low == high or high <= plan.blocks_q
        assert set(np.flatnonzero(some[block])) <= set(range(low, high))
        assert set(range(whole_from, whole_to)) <= set(np.flatnonzero(every[block])) & set(range(low, high))


@lowering.brute_force
@given(lengths, lengths, st.tuples(sides, sides), configs, st.integers(1, 40), st.integers(1, 9))
def test_tiles_of_a_head_are_handed_out_in_the_order_of_turns(length, keys, window, config, heads, threads):
    plan = plan_of(length, keys, window, config)
    costs = plan.costs()
    group = plan.n_heads_at_once(costs)
    order = schedule.order(costs, heads, group).tolist()
    for head in range(heads):
        own = range(head * len(costs), (head + 1) * len(costs))
        assert [tile for tile in order if tile in own] == list(own)
    place = {tile: i for i, tile in enumerate(order)}
    for count, *own in schedule.schedule(costs, heads, group, threads).tolist():
        assert own[:count] == sorted(own[:count], key=place.__getitem__)


@pytest.mark.parametrize("taken", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("bias_gradient", backward_plan.BiasGradient)
@pytest.mark.parametrize(("size", "dtype"), [(size, dtype) for size, dtype, _ in CONFIGS])
def test_shared_memory_has_room(size, dtype, bias_gradient, deterministic, taken):
    config = backward_plan.backward_config(size, size, jnp.dtype(dtype))[1]
    plan = plan_of(300, 300, (None, None), config)
    derives_bias = bias_gradient is not NO_BIAS
    config = backward_plan.backward_config(size, size, plan.dtype, passes_both=derives_bias)[1]
    more = {"is_deterministic": deterministic, "is_varying": taken, "bias_gradient": bias_gradient, "config": config}
    plan = dataclasses.replace(plan, soft_cap=5.0, **more)
    memory = plan.scratch()
    if isinstance(memory["sums"], plgpu.RefUnion):  # whose names have the same bytes
        assert_are_as_large(memory["sums"].refs)
        memory["sums"] = memory["sums"].refs[0]
    assert memory["sums"].shape[-1] == 64 or not derives_bias  # tiles of a bias go through it
    total = 0
    for spec in memory.values():
        if isinstance(spec, plgpu.Barrier | plgpu.ClusterBarrier):
            total += 8 * int(np.prod(spec.num_barriers))
        else:
            total += -(-math.prod(spec.shape) * jnp.dtype(spec.dtype).itemsize // 1024) * 1024
    assert plan.shared_memory == total <= 227 * 1024


def of_sizes(size, value_size, dtype="bfloat16", deterministic=False, *others):
    given = lowering.operands((2,), 512, 512, 2, 2, size, value_size, dtype)
    given |= {"bias": lowering.shaped(2, 2, 512, 512, dtype=dtype)} if "bias" in others else {}
    options = {"window": (None, 0), "soft_cap": None, "dropout_rate": 0.0, "scale": 1.0}
    return backward_plan.shape_backward(given, HOPPER, ("query", "key", "value", *others), deterministic, **options)


@pytest.mark.parametrize(
    ("sizes", "columns", "in_global_memory"),
    [
        ((64, 64), (64, 64), (64, 64)),
        ((40, 8), (64, 64), (40, 8)),
        ((72, 80), (80, 80), (72, 80)),
        ((84, 50), (96, 64), (88, 56)),
        ((96, 88), (96, 96), (96, 88)),
        ((40, 96), (64, 96), (40, 96)),
        ((112, 80), (128, 80), (112, 80)),
        ((64, 128), (64, 128), (64, 128)),
        ((104, 128), (128, 128), (104, 128)),
        ((192, 128), (192, 128), (192, 128)),
        ((160, 200), (192, 256), (192, 256)),
    ],
)
def test_products_leave_out_columns_that_no_head_has(sizes, columns, in_global_memory):
    plan = of_sizes(*sizes)
    assert (plan.columns, plan.global_columns) == (columns, in_global_memory)
    assert plan.in_slabs == (any(size % 64 for size in sizes) and not plan.config.roles)
    assert plan.dq_size >= columns[0]
    assert plan.dq_size % 32 == 0
    assert ("columns" in plan.describe()) == (columns != (plan.size, plan.size))
    assert of_sizes(*sizes, "bfloat16", True).columns == columns
    if max(sizes) <= 128:
        assert of_sizes(*sizes, "float32").columns == tuple(-(-size // 64) * 64 for size in sizes)


@pytest.mark.parametrize(
    ("sizes", "deterministic", "expected"),
    [
        ((64, 64), False, [True, True]),  # of other queries
        ((80, 80), False, [True, True]),
        ((64, 128), False, [True, False]),
        ((40, 80), False, [True, False]),
        ((40, 80), True, [True, True]),
    ],
)
def test_consumers_make_no_part_of_dq_that_has_no_columns(sizes, deterministic, expected):
    plan = of_sizes(*sizes, "bfloat16", deterministic)
    assert [HalfConsumer(plan, {}, {}, {}, index).makes_dq for index in range(2)] == expected


def assert_are_as_large(refs):
    """Fails unless the arrays of a union have the same bytes of each consumer."""
    assert len({ref.shape[0] for ref in refs}) == 1
    assert len({math.prod(ref.shape) * jnp.dtype(ref.dtype).itemsize for ref in refs}) == 1


def test_results_in_slabs_have_the_same_bytes_under_each_name():
    refs = of_sizes(80, 96).scratch()["sums"].refs
    assert len(refs) == 3
    assert_are_as_large(refs)


@pytest.mark.parametrize("others", [(), ("bias",)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_shared_memory_has_room_for_every_head_size(deterministic, others):
    for sizes in itertools.product((8, 64, 80, 96, 128, 192, 256), repeat=2):
        assert of_sizes(*sizes, "bfloat16", deterministic, *others).shared_memory <= 227 * 1024


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("size", "dtype"), [(size, dtype) for size, dtype, _ in CONFIGS])
def test_segments_and_results_are_staged_in_16_bits_up_to_128(size, dtype, deterministic):
    given = lowering.operands((2,), 512, 512, 2, 2, size, dtype=dtype)
    given |= dict.fromkeys(("query_segments", "key_segments"), lowering.shaped(2, 512, dtype="int32"))
    options = {"window": (None, 0), "soft_cap": None, "dropout_rate": 0.0, "scale": 1.0}
    plan = backward_plan.shape_backward(given, HOPPER, ("query", "key", "value"), deterministic, **options)
    is_staged = dtype != "float32" and size <= 128
    assert plan.stages_segments == is_staged == ("q_segments" in plan.scratch())
    assert plan.stages_results == (is_staged and not deterministic)
    assert plan.shared_memory <= HOPPER.shared_memory
    single = dataclasses.replace(plan, has_single_heads=True)
    assert not single.stages_results  # they are added


def test_two_blocks_of_threads_share_a_tile_where_shared_memory_has_room():
    config = backward_plan.backward_config(256, 256)[1]
    plan = dataclasses.replace(plan_of(300, 300, (None, 0), config), is_deterministic=False)
    assert (plan.is_paired, plan.block_kv, plan.blocks_kv, plan.tiles_of_head, plan.n_blocks) == (True, 64, 5, 3, 6)
    assert "tiles of 128 keys" in plan.describe()
    for other in ({"bias_gradient": backward_plan.BiasGradient.ADDED}, {"config": pairless(config)}):
        single = dataclasses.replace(plan, **other)
        assert (single.is_paired, single.tiles_of_head, single.n_blocks) == (False, 5, 10)
        assert "tiles of 64 keys" in single.describe()
    many = dataclasses.replace(plan, batch=(64,), is_deterministic=True, is_varying=True)
    assert many.n_blocks == 66
    assert dataclasses.replace(many, multiprocessors=1).n_blocks == 1
    sends = "cp.async.bulk.shared::cluster.shared::cta"
    assert sends in lower(lowering.operands(size=256))
    assert sends not in lower(lowering.operands(size=256) | {"bias": lowering.shaped(2, 1, 1, 300, dtype="float32")})


def pairless(config):
    return dataclasses.replace(config, pairs=False)


def planned(bias, dtype="bfloat16", size=64, of="bfloat16", **options):
    """Returns the geometry for a bias of a shape, with 2 batch entries, 4 heads, 300 queries and 301 keys, `of` a dtype."""
    given = lowering.operands((2, 1), 300, 301, size=size, dtype=of) | {"bias": lowering.shaped(*bias, dtype=dtype)}
    options = {"soft_cap": None, "is_deterministic": False} | options
    fixed = {"scale": 0.1, "window": (None, None), "dropout_rate": 0.0}
    return backward_plan.shape_backward(given, HOPPER, ("query", "bias"), **fixed, **options)


def test_how_the_gradient_of_a_bias_is_written():
    whole, each_head = (2, 1, 4, 300, 301), (1, 1, 4, 300, 301)
    for bias, options, expected in [
        (whole, {}, "STORED"),
        (whole, {"dtype": "float32"}, "ADDED"),
        (whole, {"dtype": "float32", "of": "float32"}, "ADDED"),
        (whole, {"soft_cap": 5.0}, "ADDED"),
        (whole, {"is_partial": True}, "ADDED"),
        (whole, {"is_deterministic": True}, "STORED"),
        (each_head, {}, "ADDED"),
        ((2, 1, 1, 300, 301), {"is_deterministic": True}, "ADDED"),
        ((2, 1, 4, 1, 301), {}, "SUMS"),
        ((2, 1, 4, 300, 1), {}, "SUMS"),
    ]:
        assert planned(bias, **options).bias_gradient.name == expected, (bias, options)


@pytest.mark.parametrize("size", backward_plan.SIZES)
def test_a_bias_is_staged_where_shared_memory_has_room(size):
    for bias, options, expected in [
        ((2, 1, 4, 300, 301), {}, True),
        ((1, 1, 1, 300, 301), {}, True),
        ((1, 1, 1, 300, 301), {"is_deterministic": True}, size != 64),
        ((2, 1, 4, 300, 301), {"dtype": "float32"}, False),
        ((2, 1, 4, 300, 301), {"dtype": "float32", "of": "float32", "size": min(size, 128)}, False),
        ((2, 1, 4, 1, 301), {}, False),
    ]:
        plan = planned(bias, **{"size": size} | options)
        assert plan.config.stages_bias is expected, (bias, options)
        assert plan.shared_memory <= HOPPER.shared_memory


@lowering.brute_force
@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_turns_of_batch_entries_that_share_a_bias(batch, data):
    bias = tuple(data.draw(st.sampled_from((1, size))) for size in batch)
    plan = plan_of(300, 300, (None, None), backward_plan.backward_config(64, 64)[1], batch=tuple(batch))
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    spans = jnp.asarray(np.sort(rng.integers(0, plan.blocks_q + 1, (*batch, plan.blocks_kv, 4)), -1)[..., [0, 3, 1, 2]])
    found = plan.bias_turns_before(spans, bias)
    counters = np.zeros((*bias, plan.blocks_kv, plan.blocks_q), int)
    for number, entry in enumerate(np.ndindex(*batch)):
        own = counters[tuple(at if size > 1 else 0 for at, size in zip(entry, bias, strict=True))]
        seen = visits(spans[entry], plan)
        np.testing.assert_array_equal(np.asarray(found)[number][seen], own[seen])
        own += seen


def test_batch_entries_that_share_an_operand_are_counted():
    for batch, shape in (((2, 3), (2, 1)), ((2, 3), (1, 3)), ((4,), ()), ((2, 3), (2, 3)), ((3, 2, 2), (2, 1))):
        record, counts = common.record(batch, shape, 1, 1), {}
        for b in range(math.prod(batch)):
            index = int(record.index(jnp.int32(b)))
            assert int(record.sharers_before(jnp.int32(b))) == counts.get(index, 0)
            counts[index] = counts.get(index, 0) + 1


@pytest.mark.parametrize(("dtype", "loads"), [("float32", False), ("bfloat16", False), ("bfloat16", True)])
def test_a_product_goes_through_shared_memory_transposed(dtype, loads):
    """As tiles of a bias and of its gradient do: queries are rows in global memory, and columns of a product."""
    swizzled = plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)

    def body(x, out, staged):
        product = wgmma.load_product(x, 0, 0, (64, 64), (64, 64), varies=(True, True))
        (staged if loads else staged.T)[...] = wgmma.split_pairs(product) if dtype == "float32" else product
        emit.instruct("bar.sync 0;")
        wgmma.store_product(out, 0, 0, (64, 64), plgpu.load(staged.T if loads else staged, layout=common.LAYOUT))

    def f(x):
        kind = jax.ShapeDtypeStruct((64, 64), jnp.dtype(dtype))
        memory = [plgpu.SMEM((64, 64), jnp.dtype(dtype), transforms=swizzled)]
        return kernel_of(body, out_type=kind, scratch_types=memory, kernel_name="transposed_mosaic")(x)

    x = jnp.arange(64 * 64, dtype=jnp.float32).reshape(64, 64).astype(jnp.dtype(dtype))
    np.testing.assert_array_equal(emulated(f, x, kernels=["transposed_mosaic"]), x.T)


def test_lines_of_queries():
    """What is subtracted from scores and from derivatives, where that is where their sums start and where it is not."""
    lse, delta = jnp.array([1.5, -np.inf, 88.0]), jnp.array([0.5, 0.0, -2.0])
    plan = plan_of(128, 128, (None, None), backward_plan.backward_config(64, 64)[1])
    seeded = [np.array([-12.0, 0, -704]), np.array([-0.5, 0, 2])]
    plain = [np.array([1.5, 0, 88]) / np.log(2), delta]
    half = [plain[0], -delta]
    biased = [np.array([1.5, 0, 88]), -delta]
    roles = plan_of(128, 128, (None, None), backward_plan.backward_config(256, 256)[1])
    for own, names, expected in [
        (plan, (), seeded),
        (plan, ("mask", "query_segments"), seeded),
        (plan, ("bias",), biased),
        (plan, ("seeds",), plain),
        (dataclasses.replace(plan, soft_cap=3.0), (), half),
        (dataclasses.replace(plan, scale=1e-31), (), half),
        (roles, (), plain),
    ]:
        for found, line in zip(dataclasses.replace(own, names=frozenset(names)).lines(lse, delta), expected, strict=True):
            np.testing.assert_allclose(found, line, rtol=3 * oracle.EPS)  # roundings of a factor and of a product


def visits(spans, plan):
    """Which blocks of keys visit which blocks of queries."""
    blocks = np.arange(plan.blocks_q)
    return np.array([(low <= blocks) & (blocks < high) for low, high, *_ in spans])


def of_tiles(visited, plan):
    """Which tiles visit which blocks of queries: two blocks of keys visit all between the first and the last of both."""
    if not plan.is_paired:
        return visited
    pairs = np.pad(visited, [(0, -len(visited) % 2), (0, 0)]).reshape(-1, 2, visited.shape[1]).any(1)
    from_first, to_last = np.maximum.accumulate(pairs, 1), np.maximum.accumulate(pairs[:, ::-1], 1)[:, ::-1]
    return from_first & to_last


def clipped(low, high, whole_from, whole_to):
    """As a kernel takes what `Plan.span` gives."""
    high = max(low, high)
    whole_from = min(max(whole_from, low), high)
    return low, high, whole_from, min(max(whole_to, whole_from), high)


@lowering.brute_force
@given(lengths, lengths, st.tuples(sides, sides), configs)
def test_spans_of_a_window_hold_all_that_is_seen_and_turns_count_who_came_before(length, keys, window, config):
    plan = plan_of(length, keys, window, config)
    spans = [clipped(*plan.span(i, HOST)) for i in range(plan.blocks_kv)]
    assert_visits(spans, lowering.window_sees(length, keys, window), plan)
    visited = visits(spans, plan)
    by_tile = visits([clipped(*plan.visited(i, HOST), 0, 0) for i in range(plan.tiles_of_head)], plan)
    np.testing.assert_array_equal(by_tile, of_tiles(visited, plan))
    assert dataclasses.replace(plan, is_deterministic=False).costs() == tuple(plan.heads_per_key_head * by_tile.sum(1))
    before = np.cumsum(by_tile, 0) - by_tile
    for tile, query_block in np.argwhere(by_tile):
        assert tile - plan.first_tile(query_block, HOST) == before[tile, query_block]


@settings(lowering.compiled, max_examples=6)
@given(lengths, lengths, st.tuples(sides, sides), configs, st.data())
def test_spans_of_operands_hold_all_that_is_seen_and_turns_count_who_came_before(length, keys, window, config, data):
    plan = plan_of(length, keys, window, config, (2,))
    seen, given = np.stack([lowering.window_sees(length, keys, window)] * 2), {}
    if data.draw(st.booleans()):
        offsets = data.draw(st.tuples(*[st.integers(-750, 750)] * 2))
        given["query_offset"] = np.array(offsets, np.int32)
        seen = np.stack([lowering.window_sees(length, keys, window, offset) for offset in offsets])
    for name, size in (("query_lengths", length), ("key_lengths", keys)):
        if data.draw(st.booleans()):
            given[name] = np.array(data.draw(st.tuples(*[st.integers(0, size + 9)] * 2)), np.int32)
            there = np.arange(size) < given[name][:, None]
            seen &= there[:, :, None] if name == "query_lengths" else there[:, None, :]
    if not given or data.draw(st.booleans()):  # segments
        ids = [segments(size, data.draw(st.integers(0, 9)), count=4) for size in (length, keys)]
        if data.draw(st.booleans()):
            ids = [np.random.default_rng(0).permutation(own, -1) for own in ids]
        given |= dict(zip(("query_segments", "key_segments"), ids, strict=True))
        seen &= ids[0][:, :, None] == ids[1][:, None, :]
    mask, shown = None, np.ones_like(seen)
    if data.draw(st.booleans()):
        own = lowering.a_mask(data, length, keys)[None, None]
        if data.draw(st.booleans()):
            own = np.concatenate([own, own[..., ::-1, ::-1]])
        mask = key_blocks.mark_visible(own, (length, keys), config.block_q, plan.block_kv)
        shown &= own[:, 0]
    arrays = {name: jnp.asarray(own) for name, own in given.items()}
    spans = jax.jit(plan.spans)(arrays, mask)
    before = np.asarray(plan.turns_before(spans))
    spans = np.broadcast_to(spans, (2, *spans.shape[-2:]))
    alone = dataclasses.replace(plan, config=pairless(config)).spans(arrays, mask)
    for b, own in enumerate(np.broadcast_to(alone, (2, plan.blocks_kv, 4))):
        assert_visits(own, seen[b], plan, shown[b])
        by_tile = of_tiles(visits(own, plan), plan)
        blocks = 2 if plan.is_paired else 1
        np.testing.assert_array_equal(visits(spans[b], plan), np.repeat(by_tile, blocks, 0))
        for low, high, whole_from, whole_to in spans[b, : plan.blocks_kv]:
            assert low <= high
            assert whole_from <= whole_to
        np.testing.assert_array_equal(spans[b, : plan.blocks_kv, 2:], own[:, 2:])
        np.testing.assert_array_equal(before[b][by_tile], (np.cumsum(by_tile, 0) - by_tile)[by_tile])


@pytest.mark.parametrize(
    ("size", "dtype", "deterministic", "words"),
    [
        (
            64,
            "bfloat16",
            False,
            "tiles of 128 keys by 128 queries, 3 stages of queries, 2 of output cotangents, 2 consumer warpgroups, each",
        ),
        (
            256,
            "bfloat16",
            True,
            "tiles of 128 keys by 64 queries, 2 stages of queries, 1 of output cotangents, 2 consumer warpgroups, one",
        ),
        (64, "float32", False, "tiles of 128 keys by 64 queries, 2 stages of queries, 2 of output cotangents, 2 consumer"),
        (128, "float32", False, "tiles of 64 keys by 64 queries, 2 stages of queries, 1 of output cotangents, 2 consumer"),
    ],
)
def test_plans_say_how_kernels_run(size, dtype, deterministic, words):
    config = backward_plan.backward_config(size, size, jnp.dtype(dtype))[1]
    plan = dataclasses.replace(plan_of(300, 300, (None, None), config), is_deterministic=deterministic)
    assert ("operands split before" in plan.describe()) == (dtype == "float32")
    assert ("half of the keys and their dQ" in plan.describe()) == ((size, dtype) == (64, "float32"))
    assert plan.describe().startswith(words)
    assert plan.describe().endswith("in the order of turns") == deterministic


def shaped_by_heads(batch, length, heads, key_heads, *, size=128, window=(None, 0), deterministic=False, **more):
    """Returns the geometry for some queries and keys, as many as queries if their number is not given."""
    keys = more.pop("keys", length)
    given = lowering.operands((batch,), length, keys, heads, key_heads, size) | more.pop("operands", {})
    options = {"scale": 0.1, "window": window, "soft_cap": None, "dropout_rate": 0.0}
    plan = backward_plan.shape_backward(given, HOPPER, ("query", "key", "value"), deterministic, **options, **more)
    assert ("single query heads, which add dK and dV" in plan.describe()) == plan.has_single_heads
    return plan


def test_tiles_have_single_query_heads_where_they_are_done_sooner():
    segments = {
        batch: {name: lowering.shaped(batch, 4096, dtype="int32") for name in ("query_segments", "key_segments")}
        for batch in (4, 32)
    }
    whole = {"window": (None, None)}
    for sizes, options, expected in [
        ((4, 4096, 16, 16), {}, False),
        ((4, 4096, 16, 1), {}, True),  # there are 128 tiles of all query heads
        ((4, 4096, 16, 2), {}, False),  # they alternate
        ((4, 4096, 16, 2), {"operands": segments[4]}, True),  # those that run at a time visit 33 query heads
        ((32, 4096, 16, 4), {"operands": segments[32]}, False),
        ((4, 4096, 16, 2), whole, False),
        ((4, 4096, 16, 2), {"deterministic": True}, False),
        ((4, 4096, 16, 2), {"is_partial": True}, False),
        ((1, 16384, 16, 2), {"window": (1024, 0)}, False),  # tiles take nearly equally long
        ((1, 2048, 16, 1), whole, True),  # there are 16 tiles of all query heads
        ((4, 4096, 8, 2), {"size": 256}, False),
        ((4, 4096, 8, 1), {"size": 256}, False),
        ((4, 4096, 8, 1), {"size": 256, "operands": segments[4]}, True),
        ((2**15, 128, 8, 2), whole, False),  # the order of too many tiles is in no table
    ]:
        plan = shaped_by_heads(*sizes, **options)
        assert plan.has_single_heads is expected, (sizes, options)
        assert plan.n_tiles == sizes[0] * plan.tiles_of_head * (sizes[2] if expected else sizes[3])
        assert plan.heads_per_tile == (1 if expected else sizes[2] // sizes[3])
        of_one_head = shaped_by_heads(*sizes[:2], 1, 1, **options).costs()
        assert plan.costs() == tuple(plan.heads_per_tile * cost for cost in of_one_head)


def test_tiles_alternate_where_several_heads_share_keys_and_tiles_have_many_lengths():
    lengths = {"query_lengths": lowering.shaped(4, dtype="int32")}
    for sizes, options, expected in [
        ((4, 4096, 16, 4), {}, True),
        ((4, 4096, 16, 2), {}, True),
        ((1, 16384, 16, 4), {"size": 64}, True),
        ((4, 4096, 8, 2), {"size": 256}, True),
        ((4, 4096, 16, 4), {"window": (None, 5)}, True),
        ((4, 4096, 16, 4), {"window": (3000, 0)}, False),  # tiles at queries of their own
        ((4, 4096, 16, 4), {"window": (0, None)}, False),  # of which all start at different queries, and end at the first
        ((2**15, 512, 8, 4), {}, False),  # too many tiles for a table
        ((4, 4096, 16, 4), {"window": (None, None)}, False),
        ((4, 4096, 16, 16), {}, False),
        ((4, 4096, 16, 1), {}, False),  # tiles have single heads
        ((4, 4096, 16, 4), {"operands": lengths}, False),
        ((4, 4096, 16, 4), {"deterministic": True}, False),
    ]:
        plan = shaped_by_heads(*sizes, **options)
        assert plan.alternates is expected, (sizes, options)
        assert ("queries go down and up by turns" in plan.describe()) == expected


def test_blocks_of_threads_go_up_the_queries_in_every_second_tile():
    plan = shaped_by_heads(4, 4096, 16, 4)
    table, role, seen = schedule.table(plan), BackwardRole(plan, {}, {}, {}), []
    assert table is not None

    def work(tile, steps):
        seen.append((int(tile.head), int(tile.number), bool(tile.goes_up)))
        return steps

    with jax.disable_jit():
        schedule.BlockTiles(plan, 5, table, {}, role.tile).each(work)
    count, *numbers = np.asarray(table)[5].tolist()
    assert count > 2
    assert [goes_up for _, _, goes_up in seen] == [i % 2 == 1 for i in range(count)]
    assert [(head, number) for head, number, _ in seen] == [
        (tile // plan.tiles_of_head % 4, tile % plan.tiles_of_head) for tile in numbers[:count]
    ]


@pytest.mark.parametrize("length", [4096, 4000])
@pytest.mark.parametrize("heads", [12, 16])
def test_tiles_that_alternate_visit_each_block_of_queries_with_all_heads(heads, length):
    plan = shaped_by_heads(2, length, heads, 4)
    assert plan.alternates
    role = BackwardRole(plan, {}, {}, {})
    for number, ordinal in itertools.product((0, plan.tiles_of_head - 1, plan.tiles_of_head + 7), (0, 1, 2)):
        tile = role.tile(jnp.int32(number), ordinal=jnp.int32(ordinal))
        steps = [tuple(map(int, role.head_and_block(tile, i))) for i in range(plan.heads_per_tile * int(tile.count))]
        low, high = plan.visited(number % plan.tiles_of_head, HOST)
        blocks = range(low, high) if ordinal == 1 else range(low, high)[::-1]
        own = range(plan.heads_per_tile * int(tile.head), plan.heads_per_tile * (int(tile.head) + 1))
        assert steps == [(head, block) for block in blocks for head in own]


@pytest.mark.parametrize(
    ("shape", "options", "single"),
    [((2, 4096, 12, 4), {}, False), ((2, 4000, 16, 4), {"window": (700, 0)}, False), ((2, 4096, 16, 4), {}, True)],
    ids=["alternating", "one head after the other", "single heads"],
)
def test_consumers_step_to_the_head_and_block_of_the_next_step(shape, options, single):
    plan = dataclasses.replace(shaped_by_heads(*shape, **options), has_single_heads=single)
    assert plan.alternates == (not options and not single)
    role = BackwardRole(plan, {}, {}, {})
    for number, ordinal in itertools.product((0, plan.tiles_of_head - 1, plan.tiles_of_head + 7), (0, 1)):
        tile = role.tile(jnp.int32(number), **({"ordinal": jnp.int32(ordinal)} if plan.alternates else {}))
        steps = [role.head_and_block(tile, i) for i in range(plan.heads_per_tile * int(tile.count))]
        following = [role.next_head_and_block(tile, *step) for step in steps[:-1]]
        assert [tuple(map(int, step)) for step in following] == [tuple(map(int, step)) for step in steps[1:]]


@pytest.mark.parametrize("single", [False, True])
def test_a_duration_is_that_of_the_block_of_threads_that_ends_last(single):
    plan = dataclasses.replace(shaped_by_heads(3, 2048, 16, 4, window=(700, 0)), has_single_heads=single)
    costs, (table,) = np.asarray(plan.costs()), jax.tree.leaves(schedule.table(plan))
    ends = [
        sum(costs[tile % len(costs)] + schedule.TILE_COST for tile in tiles[:count])
        for count, *tiles in np.asarray(table).tolist()
    ]
    assert schedule.duration(plan) == pytest.approx(max(ends))


@lowering.CHOICES
@pytest.mark.parametrize(
    ("kind", "single"),
    [
        ("385 and 513, causal", True),
        ("segments, size 256, groups of 3", True),  # which tickets hand out, to two blocks of threads each
        ("lengths, causal", True),
        ("bias and dropout, size 256", True),
        ("65 and 63", False),
        ("window, size 256", True),
        ("bias (2,4,130,200) bfloat16", False),
    ],
)
def test_native_cases_have_tiles_of_single_heads_and_of_all(kind, single):
    assert kind in EACH_KIND
    given, options = CASES[kind]("bfloat16")
    moving, fixed = split(given)
    f = forward.function(options, fixed, "mosaic")
    decision = explain(pull_of(f), moving, jax.eval_shape(f, moving), platform="cuda")[-1]
    assert ("single query heads" in decision.plan) == single


@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("bias_gradient", [NO_BIAS, backward_plan.BiasGradient.ADDED])
def test_tiles_are_those_of_every_query_head_once(bias_gradient, single):
    plan = plan_of(300, 300, (None, 0), backward_plan.backward_config(128, 128)[1], batch=(3,))
    plan = dataclasses.replace(plan, bias_gradient=bias_gradient, is_deterministic=False, has_single_heads=single)
    operands = {"dbias": common.record((3,), (1,), 4, 300)}
    role = BackwardRole(plan, {}, operands, {})
    found = []
    for number in range(plan.n_tiles):
        tile = role.tile(jnp.int32(number))
        heads = {int(role.head_and_block(tile, i)[0]) for i in range(plan.heads_per_tile * int(tile.count))}
        assert {head // plan.heads_per_key_head for head in heads} == {int(tile.head)}
        found += [(int(tile.b), head, int(tile.block)) for head in heads]
    assert sorted(found) == list(itertools.product(range(3), range(4), range(3)))


def test_sums_of_keys_and_values_are_found_where_tiles_add_them():
    plan = plan_of(300, 301, (None, 0), backward_plan.backward_config(64, 64)[1], batch=(3,))
    sizes = {"query": (300, 4, 40), "key": (301, 2, 40), "value_size": 50}
    plan = dataclasses.replace(plan, **sizes, is_deterministic=False, has_single_heads=True)
    given = {"value": lowering.shaped(3, 301, 2, 50)}
    written, (dk, dv) = backward._written(plan, given, None), np.random.default_rng(0).normal(size=(2, 4, 3, 304, 64))
    sums = np.array(written["dk_dv"])
    for head, b in itertools.product(range(4), range(3)):
        consumer = HalfConsumer(plan, {}, {}, {}, 0)
        tile = types.SimpleNamespace(b=b, head=head // 2)
        for entry, key_head, values in consumer._list_sums(tile, 2.0, dv[head, b], dk[head, b]):
            sums[entry, :, key_head] += values
    assert backward._result_types(plan, is_partial=False) == {}
    found = backward._cotangents(plan, given, written | {"dk_dv": jnp.asarray(sums)}, {}, is_partial=False)
    for name, of_heads, factor, size in (("key", dk, plan.scale, 40), ("value", dv, 2.0, 50)):
        expected = factor * of_heads.reshape(2, 2, 3, 304, 64).sum(1).transpose(1, 2, 0, 3)[:, :301, :, :size]
        np.testing.assert_allclose(found[name], expected, rtol=1e-5, atol=1e-5)


def test_tiles_are_cut_where_blocks_of_threads_would_end_apart():
    whole = {"window": (None, None)}
    for sizes, options, expected in [
        ((4, 4096, 16, 16), whole, 3),
        ((1, 16384, 16, 16), whole, 1),
        ((4, 4096, 32, 32), whole | {"size": 64}, 1),
        ((4, 4096, 8, 8), whole | {"size": 256}, 2),
        ((1, 2048, 12, 12), whole, 4),
        ((3, 256, 44, 44), whole, 0),  # 264 tiles: two for each block of threads
        ((1, 2**21, 1, 1), whole | {"keys": 2**20}, 1),
        ((1, 2**24, 1, 1), whole | {"keys": 2**20}, 0),  # a line of 2^31 steps
        ((4, 4096, 16, 16), {}, 0),  # tiles of many lengths, of which short ones come last
        ((4, 4096, 16, 4), whole, 0),
        ((4, 4096, 16, 16), whole | {"deterministic": True}, 0),
        ((4, 4096, 16, 16), whole | {"is_partial": True}, 0),
        ((4, 4096, 16, 16), whole | {"operands": {"query_lengths": lowering.shaped(4, dtype="int32")}}, 0),
        ((1, 4096, 96, 96), {"keys": 256, "window": (3840, 0)}, 0),  # tiles of one length that visit a part of the queries
        ((1, 2048, 12, 12), {"window": (2048, None)}, 4),  # a window that hides nothing
    ]:
        plan = shaped_by_heads(*sizes, **options)
        assert plan.cut_heads == expected, (sizes, options)
        assert plan.n_cut == expected * plan.tiles_of_head
        assert (f"tiles of {expected} heads are cut" in plan.describe()) == (expected > 0)


@pytest.mark.parametrize(("size", "heads", "cut"), [(64, 4, 1), (128, 4, 3), (128, 1, 2), (256, 2, 4)])
def test_tiles_and_slices_visit_every_block_of_queries_once(size, heads, cut, monkeypatch):
    monkeypatch.setattr(BackwardRole, "rank", 0)  # both blocks of threads of a cluster visit the same
    plan = plan_of(300, 500, (None, None), backward_plan.backward_config(size, size)[1], batch=(3,))
    plan = dataclasses.replace(plan, query=(300, heads, size), key=(500, heads, size), is_deterministic=False, cut_heads=cut)
    plan = dataclasses.replace(plan, multiprocessors=10)
    role, found = BackwardRole(plan, {}, {}, {}), []
    for count, *numbers in np.asarray(schedule.table(plan)).tolist():
        for number, following in itertools.pairwise(numbers[: count + 1]):
            tile = role.tile(jnp.int32(number), jnp.int32(following))
            first_cut = 3 * heads - cut
            pair = int(tile.b) * heads + int(tile.head)
            assert (int(tile.cut_number) >= 0) == (pair >= first_cut)
            assert int(tile.cut_number) in (-1, (pair - first_cut) * plan.tiles_of_head + int(tile.number))
            steps = [tuple(map(int, role.head_and_block(tile, i))) for i in range(int(tile.count))]
            found += [(int(tile.b), head, int(tile.number), block) for head, block in steps]
    assert sorted(found) == list(itertools.product(range(3), range(heads), range(plan.tiles_of_head), range(plan.blocks_q)))


@pytest.mark.parametrize(("entries", "heads", "cut"), [(3, 4, 1), (3, 4, 3), (3, 4, 8), (2, 1, 2)])
def test_sums_of_slices_are_found_in_the_last_heads(entries, heads, cut):
    plan = plan_of(300, 301, (None, None), backward_plan.backward_config(64, 64)[1], batch=(entries,))
    plan = dataclasses.replace(plan, query=(300, heads, 64), key=(301, heads, 64), is_deterministic=False, cut_heads=cut)
    given = {"value": lowering.shaped(entries, 301, heads, 64)}
    written, random = backward._written(plan, given, None), np.random.default_rng(0)
    dk, dv = random.normal(size=(2, entries, heads, 304, 64)).astype(np.float32)
    sums, consumer = np.array(written["dk_dv"]), HalfConsumer(plan, {}, {}, {}, 0)
    whole = [np.zeros((entries, 304, heads, 64), plan.dtype) for _ in range(2)]
    for pair, (b, head) in enumerate(itertools.product(range(entries), range(heads))):
        first = entries * heads - cut
        if pair < first:
            whole[0][b, :, head], whole[1][b, :, head] = plan.scale * dk[b, head], 2 * dv[b, head]
            continue
        for number in range(plan.tiles_of_head):  # each tile is a slice of keys, and all add to the sums
            tile = types.SimpleNamespace(b=b, head=head, cut_number=(pair - first) * plan.tiles_of_head + number)
            rows = slice(number * 128, (number + 1) * 128)
            for entry, at, values in consumer._list_sums(tile, 2.0, dv[b, head, rows], dk[b, head, rows]):
                sums[entry, rows, at] += values
    results = dict(zip(("dk", "dv"), map(jnp.asarray, whole), strict=True))
    found = backward._cotangents(plan, given, written | {"dk_dv": jnp.asarray(sums)}, results, is_partial=False)
    for name, of_heads, factor in (("key", dk, plan.scale), ("value", dv, 2)):
        expected = np.swapaxes(factor * of_heads, 1, 2)[:, :301]
        np.testing.assert_allclose(found[name].astype(np.float32), expected, rtol=2**-8, atol=1e-6)


def test_the_cotangent_of_sinks_alone_needs_no_kernel():
    given = lowering.operands() | {"sinks": lowering.shaped(2, 4)}
    params = {"scale": 0.1, "window": (None, 0), "soft_cap": None, "dropout_rate": 0.0, "precision": None}
    params |= {"deterministic_gradients": True, "wanted": ("sinks",)}
    plan = mosaic.plan(primitive.ATTENTION_VJP.problem(primitive.ATTENTION_VJP, given, params), HOPPER)
    assert (plan.geometry, plan.describe()) == (None, "XLA, for the sinks alone")


# Which implementation runs, and why.

CHOICES = lowering.CHOICES


@CHOICES
@pytest.mark.parametrize("implementation", [None, "mosaic"])
@pytest.mark.parametrize("dtype", [*DTYPES, "float32"])
def test_the_kernel_is_chosen(dtype, implementation):
    given = lowering.operands(dtype=dtype) | {"bias": lowering.shaped(4, 1, 300, dtype="float32")}
    assert decisions(given, implementation=implementation) == (["mosaic", "mosaic"], None)


@CHOICES
@pytest.mark.parametrize("is_causal", [False, True])
def test_second_derivatives_run_the_kernel_where_they_can(is_causal):
    given = lowering.operands()

    def pushed(given):
        function = functools.partial(attend, is_causal=is_causal)
        return jax.jvp(lambda given: gradient(given, attend=function), (given,), (given,))

    found = {(decision.primitive, decision.implementation) for decision in explain(pushed, given, platform="cuda")}
    assert ("dot_product_attention_vjp", "mosaic") in found
    # Without a mask the reference has a row's share from its weights, and needs no tangent of the output.
    assert (("dot_product_attention_jvp", "mosaic") in found) == is_causal


BROADCAST = [(4, 300, 301), (2, 1, 300, 301), (2, 4, 1, 301), (2, 4, 300, 1), (301,), ()]


def biased(shape, batch=(2,), size=64, **more):
    return lowering.operands(batch, 300, 301, size=size, **more) | {"bias": lowering.shaped(*shape, dtype="float32")}


LONG = 2**21
REFUSALS = {
    "a mask of many keys": (
        lowering.operands((1,), 2, LONG + 1, 1, 1) | {"mask": lowering.shaped(1, 1, 1, LONG + 1, dtype="bool")},
        {},
        f"at most {LONG} keys with a bias or a mask, got {LONG + 1}",
    ),
    "head size 257": (lowering.operands(size=257), {}, "derivatives of head sizes above 256 have no kernel, got 257"),
    "value size 512": (lowering.operands(value_size=512), {}, "derivatives of head sizes above 256 have no kernel, got 512"),
    **{
        f"bias {shape}, deterministic": (
            biased(shape),
            {"deterministic_gradients": True},
            "bias that is the same for all keys, .* summed in any order",
        )
        for shape in BROADCAST
        if shape[-1:] != (301,)
    },
    "bias of one key, deterministic": (
        lowering.operands((2,), 300, 1) | {"bias": lowering.shaped(1, 1, 300, 1)},
        {"deterministic_gradients": True},
        "bias that is the same for all keys, .* summed in any order",
    ),
}


@CHOICES
@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_served_is_said_in_words(kind):
    given, options, words = REFUSALS[kind]
    implementations, reason = decisions(given, **options)
    assert implementations == ["mosaic", "xla"]
    assert re.search(words, reason)
    # Where it has none at all, a forced implementation leaves them to the reference.
    if kind.startswith(("head size", "value size")):
        assert decisions(given, **options, implementation="mosaic")[0] == ["mosaic", "xla"]
        return
    with pytest.raises(NotImplementedError, match=f"dot_product_attention_vjp: .* cannot run: .*{words}"):
        decisions(given, **options, implementation="mosaic")


SERVED = {
    "as many keys as a mask may have": (
        lowering.operands((1,), 2, LONG, 1, 1) | {"mask": lowering.shaped(1, 1, 1, LONG, dtype="bool")},
        {},
    ),
    "bias that is broadcast": (biased((4, 1, 301)), {}),
    "bias that is broadcast, deterministic, not wanted": (
        biased((4, 1, 301)),
        {"deterministic_gradients": True, "wanted": ("query", "key", "value")},
    ),
    **{
        f"bias {shape}, deterministic": (biased(shape), {"deterministic_gradients": True})
        for shape in BROADCAST
        if shape[-1:] == (301,)
    },
    "whole bias, deterministic": (biased((2, 4, 300, 301)), {"deterministic_gradients": True}),
    "whole bias of one batch entry, deterministic": (biased((4, 300, 301), (1,)), {"deterministic_gradients": True}),
    "whole bias without a batch, deterministic": (biased((4, 300, 301), ()), {"deterministic_gradients": True}),
    **{
        f"float32, size {size}{', deterministic' * deterministic}": (
            lowering.operands(size=size, dtype="float32"),
            {"deterministic_gradients": deterministic},
        )
        for size in (36, 64, 100, 128)
        for deterministic in (False, True)
    },
    "bias and soft cap, float32": (biased((4, 300, 301), size=128, dtype="float32"), {"logits_soft_cap": 5.0}),
    "bias and soft cap, size 128": (biased((4, 1, 301), size=128), {"logits_soft_cap": 5.0}),
    "bias and soft cap, size 256": (biased((2, 4, 300, 301), size=256), {"logits_soft_cap": 5.0}),
    "soft cap, size 256": (lowering.operands(size=256), {"logits_soft_cap": 5.0}),
}


@CHOICES
@pytest.mark.parametrize("kind", SERVED)
def test_what_is_served(kind):
    given, options = SERVED[kind]
    assert decisions(given, **options) == (["mosaic", "mosaic"], None)


@pytest.mark.parametrize("kind", lowering.REFUSALS)
@CHOICES
def test_what_the_forward_pass_refuses_derivatives_refuse_too(kind):
    given, options, words = lowering.REFUSALS[kind]
    implementations, reason = decisions(given, wanted=("query",), **options)
    assert implementations == ["xla", "xla"]
    assert re.search(words, reason)


@CHOICES
def test_a_vmap_makes_a_bias_whole():
    """What is mapped over is no sum, also where the bias itself is the same for all."""
    given = {name: lowering.shaped(3, *a.shape, dtype=a.dtype) for name, a in lowering.operands(()).items()}
    bias = lowering.shaped(4, 300, 300, dtype="float32")
    mapped = jax.vmap(
        lambda given, bias: gradient(given | {"bias": bias}, attend=attend, deterministic_gradients=True), (0, None)
    )
    found = explain(mapped, given, bias, platform="cuda")
    assert [decision.implementation for decision in found] == ["mosaic", "mosaic"]


@CHOICES
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_other_gpus_are_refused(capability, monkeypatch):
    monkeypatch.setattr(availability, "missing", lambda: "it needs jax-triton")
    words = f"it needs compute capability 9.x, got cuda {capability}"
    with lowering_for(Target("cuda", capability)):
        assert decisions(lowering.operands()) == (["xla", "xla"], words)


# Meshes.

MESHES = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def make_mesh(kind, devices=True):
    sizes, names, kinds = (4, 2), ("data", "model"), (kind,) * 2
    if devices:
        return jax.make_mesh(sizes, names, axis_types=kinds, devices=jax.devices("cpu"))
    return AbstractMesh(sizes, names, axis_types=kinds)


def on_mesh(mesh, key_heads=2):
    """Query, key and value in shards, and a bias of every head, the same for all of the batch."""
    given = lowering.operands((8,), 64, 64, 4, key_heads, 64)
    shards = lowering.sharded({"query": given["query"]}, mesh, lowering.SPEC)
    spec = lowering.SPEC if key_heads > 1 else P("data")
    shards |= lowering.sharded({name: given[name] for name in ("key", "value")}, mesh, spec)
    bias = {"bias": lowering.shaped(1, 4, 64, 64, dtype="float32")}
    return shards | lowering.sharded(bias, mesh, P(None, "model"))


@pytest.mark.parametrize("key_heads", quick([2, 1], [1]))
@pytest.mark.parametrize("devices", quick([True, False], [True]), ids=["devices", "abstract"])
def test_explicit_axes_lower_to_a_kernel_for_shards(devices, key_heads):
    mesh = make_mesh(AxisType.Explicit, devices)
    with jax.set_mesh(mesh) if devices else jax.sharding.use_abstract_mesh(mesh):
        assert "tensor<2x64x2x64xbf16>" in lower(
            on_mesh(mesh, key_heads), real=None, is_causal=True
        )  # of a batch of 8 and 4 heads


@CHOICES
@MESHES
def test_the_kernel_is_chosen_on_a_mesh(kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        found = explain(lambda given: gradient(given, attend=attend), on_mesh(mesh), platform="cuda")
        assert [decision.implementation for decision in found] == ["mosaic", "mosaic"]
        shard = ("bfloat16[2,64,2,64]", "bfloat16[2,64,1,64]", "bfloat16[2,64,1,64]")
        whole = ("bfloat16[8,64,4,64]", "bfloat16[8,64,2,64]", "bfloat16[8,64,2,64]")
        assert found[1].operands[:3] == (shard if kind == AxisType.Explicit else whole)


@CHOICES
@pytest.mark.usefixtures("hollow_kernels")
def test_automatic_axes_leave_it_to_the_compiler_which_shards_a_kernel_gets():
    mesh = make_mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        text = kernels.lowered_for_cuda(gradient, on_mesh(mesh), kernels=[])
        assert text.count("custom_call @CustomSPMDPartitioning") == 2


@pytest.mark.slow
def test_a_shard_map_holds_a_kernel_for_shards():
    mesh = make_mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        shards = on_mesh(mesh)
        del shards["bias"]
        mapped = jax.shard_map(gradient, in_specs=lowering.SPEC, out_specs=lowering.SPEC)
        assert "tensor<2x64x2x64xbf16>" in kernels.lowered_for_cuda(mapped, shards, kernels=[FORWARD, BACKWARD])


@pytest.mark.slow
@MESHES
def test_export_from_a_mesh_of_several_devices_holds_the_kernel_where_shards_are_known(kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        f = jax.jit(lambda given: gradient(given, attend=attend))
        exported = jax.export.export(f, platforms=["cuda"])(on_mesh(mesh))
        expected = [BACKWARD, FORWARD] if kind == AxisType.Explicit else []
        assert sorted(kernels.kernel_names(exported.mlir_module())) == expected
