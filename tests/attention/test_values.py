"""dot_product_attention over all of its features, for every implementation: values, lse and derivatives, against float64."""

import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core.target import lowering_for, of_capability
from jaxsoftmax._gpu import schedule as kernel_tiles
from jaxsoftmax.ops.attention import dropout, primitive, xla
from jaxsoftmax.ops.attention.mosaic_sm90 import forward_plan

from ..support import cases, kernels, oracle
from ..support.attention import oracle as attention_oracle
from ..support.attention.values import (
    FEATURES,
    IN_SHAPES,
    KERNELS,
    MOVING,
    arrays,
    assert_ran,
    assert_right,
    attend,
    calls,
    check_cotangents,
    check_parts,
    function,
    random,
    segments,
    small_tiles,
    split,
    together,
    truth_of,
)

pytestmark = pytest.mark.usefixtures("hollow_kernels")

NATIVE = [pytest.param(*pair, marks=pytest.mark.gpu) for pair in itertools.product(KERNELS, ["bfloat16", "float16"])]
NATIVE_FLOAT32 = [pytest.param(name, "float32", marks=pytest.mark.gpu) for name in KERNELS]
MESHES = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


@pytest.fixture
def forced(implementation, monkeypatch):
    """The name to force, with the reference cut into small tiles where that is asked for."""
    if implementation != "xla in tiles":
        return implementation
    small_tiles(monkeypatch)
    return "xla"


@pytest.fixture
def tiles(monkeypatch):
    small_tiles(monkeypatch)


# Features that have no cotangents of their own: masks have none, and these are as others are.
WITHOUT_COTANGENTS = [name for name in FEATURES if name.startswith(("mask (", "no batch e", "equal"))]
WITH_COTANGENTS = [name for name in FEATURES if name not in WITHOUT_COTANGENTS]


@pytest.mark.parametrize(
    ("implementation", "dtype", "feature"),
    [("xla in tiles", "bfloat16", feature) for feature in WITHOUT_COTANGENTS]
    + [pytest.param(*pair.values, feature, marks=pair.marks) for pair in NATIVE for feature in FEATURES]
    + [
        pytest.param(*pair.values, feature, marks=pair.marks)
        for pair in NATIVE_FLOAT32
        for feature in WITH_COTANGENTS
        if not feature.startswith("bias (")
    ],
)
def test_values_and_lse(implementation, forced, feature, dtype):
    given, options = FEATURES[feature](dtype)
    moving, fixed = split(given)
    f = jax.jit(function(options, fixed, forced))
    assert_ran(forced, f, moving)
    out, lse = f(moving)
    assert (out.dtype, lse.dtype) == (jnp.dtype(dtype), jnp.float32)
    assert_right(forced, (out, lse), given, options)


# The reference has several features in a program, of the operands of the first of them. What depends on how scores are cut is
# in tiles, and the rest in one; the slow cases are every feature by itself, in both.
IN_ONE = [
    *(("plain",), ("two batch axes",), ("no scale",), ("sinks alone",), ("one key", "soft cap"), ("one query", "sinks")),
    *(("multi-query", "negative scale", "bias (1,1,40,56)"), ("one head", "causal window", "bias (40,56)")),
    *(("no batch", "scale", "no sink in some heads"), ("smaller values", "query lengths", "bias (56,)")),
    *(("larger values", "bias (1,4,40,56)", "dropout"), ("head size 128", "deterministic", "bias (2,4,40,56)")),
]
IN_TILES = [
    *(("plain",), ("no queries",), ("no keys",), ("lengths",), ("equal heads", "window of none"), ("odd sizes", "sinks")),
    *(("causal", "bias (4,1,1)"), ("causal, many queries", "soft cap"), ("window", "sinks", "bias (2,1,40,56)")),
    *(("window after", "dropout"), ("window before", "bias (2,4,1,56)", "dropout, broadcast")),
    *(("window on two sides", "key lengths", "bias (2,4,40,1)"), ("window, some rows see nothing", "sinks")),
    *(("offset, causal", "query lengths"), ("offset, window", "soft cap"), ("offset, some rows see nothing",)),
    *(("offset of one query", "bias (1,1,1,56)"), ("offset without a window", "segments", "bias (1,4,40,56)")),
    *(("key lengths, causal", "sinks", "dropout"), ("segments of both", "dropout, causal")),
    *(("rows that see nothing", "soft cap"), ("bias of -inf",)),
]


def test_every_feature_is_in_a_program_of_several():
    assert set(WITH_COTANGENTS) <= {name for names in IN_ONE + IN_TILES for name in names}


@pytest.mark.parametrize(
    ("implementation", "features"),
    [("xla", names) for names in IN_ONE]
    + [("xla in tiles", names) for names in IN_TILES]
    + [pytest.param(name, (f,), marks=pytest.mark.slow) for name in ["xla", "xla in tiles"] for f in WITH_COTANGENTS]
    + [pytest.param(name, (feature,), marks=pytest.mark.gpu) for name in KERNELS for feature in WITH_COTANGENTS],
    ids=lambda value: value if isinstance(value, str) else " + ".join(value),
)
def test_values_and_cotangents_of_every_feature(implementation, forced, features):
    given, options = together(features, "float32" if implementation.startswith("xla") else "bfloat16")
    check_cotangents(forced, given, options)


@pytest.mark.parametrize("feature", ["causal", "soft cap", "sinks", "bias (1,4,40,56)", "dropout, causal"])
@pytest.mark.parametrize(("implementation", "dtype"), NATIVE_FLOAT32)
def test_values_and_cotangents_of_float32_kernels(implementation, forced, feature, dtype):
    check_cotangents(forced, *FEATURES[feature](dtype))


# The reference has one dtype of 16 bits in one tile and another in many: what depends on the dtype does not depend on tiles. It
# has float32 above, and so have kernels.
@pytest.mark.parametrize(
    ("implementation", "dtype", "features"),
    [
        (*pair, names)
        for pair in (("xla", "float16"), ("xla in tiles", "bfloat16"))
        for names in (("causal", "sinks"), ("soft cap", "bias (1,4,40,56)"))
    ]
    + [
        pytest.param(*pair.values, (feature,), marks=pair.marks)
        for pair in NATIVE
        for feature in ("causal", "soft cap", "sinks", "bias (1,4,40,56)")
    ],
    ids=lambda value: value if isinstance(value, str) else " + ".join(value),
)
def test_values_and_cotangents_of_each_dtype(implementation, forced, features, dtype):
    check_cotangents(forced, *together(features, dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("feature", ["causal", "soft cap", "sinks", "bias (1,4,40,56)", "rows that see nothing", "dropout"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_native_reference_whose_weights_are_multiplied_in_three_products(feature, dtype):
    given, options = FEATURES[feature](dtype)
    check_cotangents("xla", given, options | {"precision": "high"})


@pytest.mark.gpu
def test_native_infinite_values_stay_infinite_in_three_products():
    query, key, value = (random_of(seed) for seed in range(3))
    value[0, 3, 1, 5] = np.inf
    out = jax.jit(functools.partial(jaxsoftmax.dot_product_attention, implementation="xla"))(query, key, value)
    assert np.array_equal(np.isposinf(out), np.broadcast_to(np.isposinf(value).any(1, keepdims=True), out.shape))
    assert not np.any(np.isnan(out))


def random_of(seed):
    return np.random.default_rng(seed).standard_normal((1, 64, 2, 16)).astype(jnp.bfloat16)


@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_keys_go_on_from_those_before(dtype, soft_cap):
    check_parts("xla", xla, arrays(keys=57, size=16, value_size=8, dtype=dtype), soft_cap)


def check_random_call(name, call):
    given, options = call
    moving, fixed = split(given)
    with pytest.MonkeyPatch.context() as patch:
        if name == "xla in tiles":
            patch.setattr(xla, "ONE_TILE", 0)
            patch.setattr(xla, "BLOCK", (8, 16))
        f = jax.jit(function(options, fixed, name.split()[0]))
        try:
            results = f(moving)
        except NotImplementedError:
            assume(name == "xla")  # a kernel gets another example in place of one that it refuses, until there are enough
            raise
        assert_right(name, results, given, options)


@settings(max_examples=5, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(call=calls())
@pytest.mark.parametrize("name", ["xla", "xla in tiles"])
def test_random_combinations_of_features(name, call):
    check_random_call(name, call)


@pytest.mark.gpu
@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.filter_too_much])
@given(call=calls())
@pytest.mark.parametrize("name", KERNELS)
def test_native_kernels_take_random_combinations(name, call):
    check_random_call(name, call)


# Native, in the shapes that a kernel has to cut up.


def test_the_public_function_takes_every_case_that_runs_natively():
    """A case that it refuses would fail on a GPU alone."""
    for make in (FEATURES | IN_SHAPES).values():
        given, options = make("bfloat16")
        moving, fixed = split(given)
        jax.eval_shape(function(options, fixed), moving)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", IN_SHAPES)
@pytest.mark.parametrize("name", KERNELS)
def test_native_values_and_lse_in_many_shapes(name, kind):
    check_in_shape(name, kind)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", ["385 and 513, causal", "segments sorted", "lengths, causal"])
def test_native_tiles_without_a_table(kind, monkeypatch):
    monkeypatch.setattr(kernel_tiles, "MAX_SCHEDULED", 0)
    with kernels.target(multiprocessors=3):
        check_in_shape("mosaic", kind)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("kind", ["segments, size 128", "lengths, size 128"])
def test_native_bits_do_not_depend_on_who_takes_a_tile(kind, dtype):
    given, options = IN_SHAPES[kind](dtype)
    moving, fixed = split(given)
    results = []
    for count in (1, 3, 5, 132):
        with kernels.target(multiprocessors=count):
            results += [jax.jit(function(options, fixed, "mosaic"))(moving) for _ in range(2)]
    for result in results[1:]:
        for one, other in zip(results[0], result, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["causal", "padding"])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_native_blocks_that_a_mask_rules_out_are_not_visited(size, kind, deterministic):
    """NaN in values shows in whatever visits them, though their weights are 0."""
    shape, cols = (2, 1024, 4, size), np.arange(1024)[:, None, None]
    query, key, value, dout = (random(shape, "normal", seed, "bfloat16") for seed in range(4))
    if kind == "causal":
        mask = np.tril(np.ones((1, 1, 1024, 1024), bool))
        mask[..., 300:, :300] = False  # as where padding is on the left
        clean_rows = np.arange(1024) // 256 == 2
        visited = np.tile((np.arange(1024) < 256) | (np.arange(1024) >= 768), (2, 1))
    else:
        mask = np.ones((2, 1, 1, 1024), bool)
        mask[0, ..., :300], mask[0, ..., 700:] = False, False
        clean_rows, visited = np.ones(1024, bool), np.repeat([[False], [True]], 1024, 1)

    @jax.jit
    def pull(value):
        def of_query(query):
            options = {"precision": None, "deterministic_gradients": deterministic}
            return attend(query, key, value, mask=mask, implementation="mosaic", **options)

        out, vjp = jax.vjp(of_query, query)
        return out, *vjp(dout)

    dirty = np.where((cols < 256) | (cols >= 768), np.nan, value).astype(jnp.bfloat16)
    for clean, found in zip(pull(value), pull(dirty), strict=True):
        clean, found = oracle.to64(clean), oracle.to64(found)
        assert np.all(np.isnan(found[visited]))
        chosen = clean_rows & ~visited
        clean, found = clean[chosen], found[chosen]
        rtol = 0.0 if deterministic else 2**-7  # else blocks of keys may have added in another order
        np.testing.assert_allclose(found, clean, rtol=rtol, atol=rtol * 2**-3)


def check_in_shape(name, kind, dtype=None):
    dtype = dtype or ("bfloat16", "float16")[list(IN_SHAPES).index(kind) % 2]
    given, options = IN_SHAPES[kind](dtype)
    moving, fixed = split(given)
    f = jax.jit(function(options, fixed, name))
    cases.assert_all_run_on(name, explain(f, moving))  # none is refused
    assert_right(name, f(moving), given, options)


# A few of each kind: what compute-sanitizer is run over, as CONTRIBUTING.md says.
EACH_KIND = ["65 and 63", "385 and 513, causal", "sizes 80 and 80", "sizes 128 and 256", "sizes 256 and 256", "groups of 3"]
EACH_KIND += ["sizes 64 and 64, whole", "sizes 192 and 192, whole", "sizes 256 and 256, whole", "window (200, 300), size 128"]
EACH_KIND += ["lengths, causal", "segments sorted", "segments shuffled", "soft cap", "sinks alone", "dropout", "everything"]
EACH_KIND += ["segments, size 128", "segments, size 256", "lengths, size 128", "lengths, size 256"]
EACH_KIND += ["mask of 208 keys, size 64", "mask of 202 keys, size 64", "mask of 208 keys, size 256"]
EACH_KIND += ["sizes 36 and 50", "large sizes 512 and 512, whole", "large sizes 440 and 440", "few, large sizes, everything"]
EACH_KIND += ["nothing to see", "mask (2,4,130,200) bool", "mask (1,1,130,201) bool", "bias (2,4,130,201) bfloat16"]

EACH_KIND_OF_FLOAT32 = ["1 and 1", "65 and 63", "385 and 513, causal", "sizes 80 and 80", "sizes 64 and 128", "sizes 8 and 8"]
EACH_KIND_OF_FLOAT32 += ["sizes 36 and 50", "sizes 100 and 33"]
EACH_KIND_OF_FLOAT32 += ["sizes 64 and 64, whole", "sizes 128 and 128, whole", "4097", "many tiles", "no batch axes"]
EACH_KIND_OF_FLOAT32 += ["groups of 3", "segments shuffled", "soft cap, causal", "dropout, causal", "everything"]
EACH_KIND_OF_FLOAT32 += ["segments, size 128", "lengths, size 128", "mask of 202 keys, size 128"]
EACH_KIND_OF_FLOAT32 += ["bias of the least number", "one key ahead by 13", "nothing to see", "mask (2,4,130,201) bool"]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("kind", "dtype"), [(kind, None) for kind in EACH_KIND] + [(kind, "float32") for kind in EACH_KIND_OF_FLOAT32]
)
@pytest.mark.parametrize("name", KERNELS)
def test_one_of_each_kind(name, kind, dtype):
    with kernels.target(multiprocessors=3):  # so that each works through many tiles
        check_in_shape(name, kind, dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("multiprocessors", [132, 3])
@pytest.mark.parametrize("kind", [kind for kind in EACH_KIND_OF_FLOAT32 if kind != "1 and 1"])  # one query is for decoding
def test_native_keys_and_values_that_are_split_before(kind, multiprocessors, monkeypatch):
    monkeypatch.setattr(forward_plan, "LEAST_ROWS_TO_SPLIT", 1)
    given, options = IN_SHAPES[kind]("float32")
    moving, fixed = split(given)
    (decision,) = explain(function(options, fixed, "mosaic"), moving)
    assert "split before" in decision.plan
    with kernels.target(multiprocessors=multiprocessors):
        check_in_shape("mosaic", kind, "float32")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_native_infinite_and_huge_operands_give_nan_in_their_rows_alone(monkeypatch):
    """An operand that no bfloat16 is as large as has no low term: see docs/numerics.md."""
    found = []
    for least in (1, 10**9):
        monkeypatch.setattr(forward_plan, "LEAST_ROWS_TO_SPLIT", least)
        given = arrays(length=200, keys=200, size=64)
        given["query"][0, 3, 0, 5], given["query"][1, 150, 1, 0] = np.inf, 3.4e38
        given["value"][1, 7, 0, 2] = np.inf
        found.append(jax.jit(function({}, {}, "mosaic"))(given))
    for result, other in zip(*found, strict=True):
        np.testing.assert_array_equal(np.isnan(result), np.isnan(other))
    out, lse = map(np.asarray, found[0])
    is_wrong = np.zeros(out.shape, bool)
    is_wrong[0, 3, 0], is_wrong[1, 150, 1], is_wrong[1, :, :2, 2] = True, True, True
    np.testing.assert_array_equal(np.isnan(out), is_wrong)
    assert np.count_nonzero(np.isnan(lse)) == 2


# What nobody sees may hold anything.


@pytest.mark.parametrize("feature", ["lengths", "rows that see nothing", "sinks alone", "bias of -inf"])
@pytest.mark.parametrize(
    ("implementation", "dtype"), [("xla", "float32"), ("xla in tiles", "float32"), *NATIVE, *NATIVE_FLOAT32]
)
def test_what_nobody_sees_has_no_effect(implementation, forced, feature, dtype):
    given, options = FEATURES[feature](dtype)
    moving, fixed = split(given)
    seen = attention_oracle.weights(**given, **options).seen
    if feature == "rows that see nothing":
        fixed["mask"][:, :, :, 11] = False
        seen = np.broadcast_to(fixed["mask"], seen.shape)
    clean = jax.jit(function(options, fixed, forced))
    no_key, no_row = ~seen.any((-3, -2)), ~seen.any((-3, -1))
    assert no_key.any()
    assert_ran(forced, clean, moving)
    results = clean(moving)
    for poison in (np.nan, np.inf, -np.inf):
        dirty = {k: a.copy() for k, a in moving.items()}
        dirty["key"][no_key], dirty["query"][no_row] = poison, poison
        # A kernel multiplies values with weights of 0.
        dirty["value"][no_key] = poison if implementation.startswith("xla") else 1e4
        for expected, actual in zip(results, clean(dirty), strict=True):
            assert not np.any(np.isnan(actual)), poison
            np.testing.assert_array_equal(expected, actual)


@pytest.mark.parametrize("feature", ["lengths", "rows that see nothing", "sinks alone", "bias of -inf"])
def test_gradients_of_what_nobody_sees_are_zero_and_nothing_is_nan(feature):
    given, options = FEATURES[feature]()
    moving, fixed = split(given)
    f = function(options, fixed)
    seen = attention_oracle.weights(**given, **options).seen
    no_row, no_key = ~seen.any((-3, -1)), ~seen.any((-3, -2))
    dirty = {k: a.copy() for k, a in moving.items()}
    dirty["key"][no_key], dirty["value"][no_key], dirty["query"][no_row] = np.nan, np.nan, np.nan

    def loss(moving):
        out, lse = f(moving)
        return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isneginf(lse), 0, lse) ** 2)

    @jax.jit
    def first_and_second(moving):
        return jax.jvp(jax.grad(loss), (moving,), (jax.tree.map(jnp.ones_like, moving),))

    for gradients in map(first_and_second, (moving, dirty)):
        for gradient in gradients:
            assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))
            assert np.all(np.asarray(gradient["query"])[no_row] == 0)
            assert np.all(np.asarray(gradient["key"])[no_key] == 0)
            assert np.all(np.asarray(gradient["value"])[no_key] == 0)


def test_a_nan_in_a_cotangent_of_a_row_that_sees_nothing_has_no_effect():
    for feature in ("lengths", "sinks alone"):
        given, options = FEATURES[feature]()
        moving, fixed = split(given)
        f = function(options, fixed)
        dout = np.ones((2, 40, 4, 16), np.float32)
        unseen = ~attention_oracle.weights(**given, **options).seen.any((-3, -1))
        dout[unseen] = np.nan
        gradient = jax.jit(lambda moving, dout, f=f: jax.vjp(lambda moving: f(moving)[0], moving)[1](dout)[0])(moving, dout)
        assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


TRACED_SCALES = (0.3, -0.4, 0.0)


@pytest.mark.parametrize("order", [1, 2])
def test_a_traced_scale_is_differentiated_and_mapped(order):
    given = small()
    options = {"is_causal": True, "mask": random((2, 1, 5, 7)) | (np.arange(7) == 0)}

    def loss(scale, attention):
        return jnp.sum(jnp.sin(attention(*given.values(), scale=scale, **options)))

    def derivative(attention):
        f = functools.partial(loss, attention=attention)
        return jax.value_and_grad(f if order == 1 else jax.grad(f))

    with jax.default_matmul_precision("highest"):
        scales = jnp.array(TRACED_SCALES)
        expected = [jax.jit(derivative(jax.nn.dot_product_attention))(scale) for scale in scales]
        actual = jax.jit(jax.vmap(derivative(attend)))(scales)
        for one, other in zip(actual, np.transpose(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_traced_scale_multiplies_queries_and_rounds_them_once(dtype):
    given = small(dtype)
    found = jax.jit(lambda scale: attend(**given, scale=scale))(0.3)
    query = (given["query"].astype(np.float32) * np.float32(0.3)).astype(given["query"].dtype)
    np.testing.assert_array_equal(found, attend(**given | {"query": query}, scale=1))
    found = jax.jit(lambda scale: attend(**given, scale=scale))(-0.25)  # a power of two rounds nothing
    np.testing.assert_array_equal(found, attend(**given, scale=-0.25))


def test_a_traced_scale_runs_on_kernels():
    types = [jax.ShapeDtypeStruct((2, 128, 2, 64), jnp.bfloat16)] * 3
    learn = jax.grad(lambda scale, *args: jnp.sum(attend(*args, scale=scale, precision=None).astype(jnp.float32)))
    found = explain(learn, jax.ShapeDtypeStruct((), jnp.float32), *types, platform="cuda")
    assert [decision.implementation for decision in found] == ["mosaic", "mosaic"]


HUGE = {
    "plain": {},
    "negative": {"scale": -0.3},
    "causal": {"is_causal": True},
    "cap": {"logits_soft_cap": 1e12},
    "bias": {"bias": np.linspace(-1e10, 1e10, 56, dtype=np.float32).reshape(1, 1, 1, 56)},
    "sinks": {"sinks": np.ones(4, np.float32)},
}


@pytest.mark.parametrize(
    ("kind", "cut"),
    [pytest.param(kind, cut, marks=cases.slow_unless(not cut or kind == "plain")) for kind in HUGE for cut in (False, True)],
)
def test_scores_of_1e10(kind, cut, monkeypatch):
    """One key has all of the weight of a row, or, where a tile has whole rows, all keys have equal weights."""
    if cut:
        monkeypatch.setattr(xla, "ONE_TILE", 0)
        monkeypatch.setattr(xla, "BLOCK", (16, 24))
    options, given = HUGE[kind], arrays()

    @jax.jit
    def both(moving, dout, dlse):
        results, vjp = jax.vjp(lambda moving: attend(**moving, **options, return_residual=True), moving)
        return results, vjp((dout, dlse))[0]

    for spread in (1, 0) if not cut and kind != "bias" else (1,):
        given = given | {name: np.float32(1e5) * (spread * given[name] + (1 - spread)) for name in ("query", "key")}
        dout, dlse = given["value"][:, :40].repeat(2, 2), np.ones((2, 40, 4), np.float32)
        moving = {name: given[name] for name in ("query", "key", "value")}
        (out, lse), cotangents = both(moving, dout, dlse)
        named = {"is_causal": True} if kind == "causal" else options
        truths = attention_oracle.attention(**moving, **named)
        right = attention_oracle.cotangents(dout, dlse, **moving, **named)
        for actual, truth in [(out, truths[0]), (lse, truths[1]), *((cotangents[name], right[name]) for name in moving)]:
            np.testing.assert_allclose(actual, truth.value, rtol=1e-4, atol=1e-4 * np.max(np.abs(truth.value)))


NOT_SEEN = {  # operands, options: query 4 sees no key, and keys 5 and 6 no query
    "mask": lambda: ({"mask": not_seen()}, {}),
    "bias": lambda: ({"bias": np.where(not_seen(), 0.5, -np.inf)}, {}),
    "bias of NaN, sinks, cap": lambda: (
        {"bias": np.where(not_seen(), 0.5, np.nan), "mask": not_seen(), "sinks": np.arange(4.0)},
        {"logits_soft_cap": 2.0},
    ),
    "lengths, dropout": lambda: (
        {"query_seq_lengths": np.array([4, 4]), "key_value_seq_lengths": np.array([5, 5])},
        {"dropout_rate": 0.3, "dropout_rng": jax.random.key(1)},
    ),
    "window, all": lambda: (
        {"query_seq_lengths": np.array([4, 4]), "sinks": np.arange(4.0)},
        {"local_window_size": (3, 1), "logits_soft_cap": 2.0, "dropout_rate": 0.3, "dropout_rng": jax.random.key(1)},
    ),
    "segments": lambda: (
        {"query_segment_ids": np.array([[1] * 4 + [2]] * 2), "key_value_segment_ids": np.array([[1] * 5 + [3] * 2] * 2)},
        {},
    ),
}


def not_seen():
    return (np.arange(5)[:, None] < 4) & (np.arange(7) < 5) & np.ones((2, 1, 1, 1), bool)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kind", "cut"),
    [
        pytest.param(kind, cut, marks=cases.slow_unless(kind in ("mask", "bias of NaN, sinks, cap") and not cut))
        for kind in NOT_SEEN
        for cut in (False, True)
    ],
)
def test_no_derivative_of_a_derivative_knows_what_nobody_sees(kind, cut, monkeypatch):
    if cut:
        monkeypatch.setattr(xla, "ONE_TILE", 0)
        monkeypatch.setattr(xla, "BLOCK", (2, 3))
    more, options = NOT_SEEN[kind]()
    fixed = {name: array for name, array in more.items() if name not in MOVING}
    start = small("float64", size=3) | {name: array for name, array in more.items() if name in MOVING}
    tangent = {name: np.cos(np.arange(array.size)).reshape(array.shape) for name, array in start.items()}
    dout, rows = np.sin(np.arange(2 * 5 * 4 * 3)).reshape(2, 5, 4, 3), (np.arange(5) < 4)[:, None, None]

    @jax.jit
    def derivatives(moving, tangent, dout):
        def f(moving):
            out, lse = attend(**moving, **fixed, **options, return_residual=True)
            return out, jnp.where(lse == -jnp.inf, 0, lse)

        def total(tree):
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(tree))

        def reverse(moving):
            return jax.vjp(f, moving)[1]((dout, jnp.ones((2, 5, 4))))[0]

        def forward(moving):
            return jax.jvp(f, (moving,), (tangent,))[1]

        return {
            "reverse over reverse": jax.grad(lambda moving: total(reverse(moving)))(moving),
            "reverse over forward": jax.grad(lambda moving: total(forward(moving)))(moving),
            "forward over reverse": jax.jvp(reverse, (moving,), (tangent,))[1],
        }

    expected = derivatives(start, tangent, dout)
    assert all(np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(expected))
    for poison in (np.nan, np.inf):

        def spoilt(arrays, poison=poison):
            found = {name: array.copy() for name, array in arrays.items()}
            for array, of_queries in ((found["query"], True), (found["key"], False), (found["value"], False)):
                array[:, 4 if of_queries else 5 :] = poison
            return found

        actual = derivatives(spoilt(start), spoilt(tangent), np.where(rows, dout, poison))
        for name, found in actual.items():
            for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected[name]), strict=True):
                np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-9, err_msg=f"{poison}: {name}")


def test_rows_that_see_nothing():
    given, _ = FEATURES["plain"]()
    mask = np.zeros((40, 56), bool)
    out, lse = attend(**given, mask=mask, return_residual=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, -np.inf)
    sinks = np.arange(4, dtype=np.float32)
    out, lse = attend(**given, mask=mask, sinks=sinks, return_residual=True)
    np.testing.assert_array_equal(out, 0)
    np.testing.assert_array_equal(lse, np.broadcast_to(sinks, lse.shape))


EMPTY_ROWS = {
    "mask": lambda: {"mask": random((2, 4, 40, 56)) & (np.arange(40) % 3 != 0)[:, None]},
    "mask, equal heads": lambda: {"key_heads": 4, "mask": random((2, 1, 40, 56)) & (np.arange(40) % 3 != 0)[:, None]},
    "mask and bias": lambda: {
        "mask": np.broadcast_to((np.arange(40) % 3 != 0)[:, None], (1, 1, 40, 56)),
        "bias": random((1, 4, 40, 56), "bias"),
    },
    "all of it": lambda: {"mask": np.zeros((1, 1, 1, 1), bool)},
    "causal padding left": lambda: {"mask": np.broadcast_to(np.arange(56) > 10, (1, 1, 1, 56)), "is_causal": True},
    "window and lengths": lambda: {"local_window_size": (3, 2), "key_value_seq_lengths": np.array([20, 56], np.int32)},
    "lengths of both": lambda: {
        "query_seq_lengths": np.array([17, 40], np.int32),
        "key_value_seq_lengths": np.array([0, 5], np.int32),
    },
}


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        pytest.param(kind, dtype, marks=cases.slow_unless((i + j) % 2 == 0))  # by default in one dtype, in turn
        for i, kind in enumerate(EMPTY_ROWS)
        for j, dtype in enumerate(("float32", "bfloat16"))
    ],
)
def test_fully_masked_rows_are_means_as_in_jax_nn(kind, dtype):
    options = EMPTY_ROWS[kind]()
    shapes = (2, 40, 4, 8), *((2, 56, options.pop("key_heads", 2), 8),) * 2
    q, k, v = (np.random.default_rng(seed).standard_normal(shape).astype(dtype) for seed, shape in enumerate(shapes))
    cotangent = np.random.default_rng(3).standard_normal(q.shape).astype(dtype)
    bias = jnp.asarray(options.pop("bias", np.zeros((1, 4, 40, 56))), dtype)

    def results(attention, q, k, v, bias, cotangent, **more):
        out, vjp = jax.vjp(lambda *args: attention(*args, **options, **more), q, k, v, bias)
        return [out, *vjp(cotangent)]  # the bias' too: weights that are the same for all keys do not depend on it

    @jax.jit
    def all_of_them(*arrays):
        ours = results(attend, *arrays, fully_masked_rows="mean")
        theirs = results(jax.nn.dot_product_attention, *(a.astype(np.float32) for a in arrays))
        return ours, theirs, attend(*arrays[:4], **options)

    ours, theirs, default = all_of_them(q, k, v, bias, cotangent)
    for mine, others in zip(ours, theirs, strict=True):
        assert mine.dtype == dtype
        exact = np.asarray(others)
        off = 64 * oracle.EPS if dtype == "float32" else 2**-7  # roundings of a sum of as many terms, twice
        np.testing.assert_allclose(np.asarray(mine, np.float32), exact, rtol=0, atol=off * max(1, np.max(np.abs(exact))))
    default = np.asarray(default)
    empty = np.all(default == 0, -1)
    assert np.any(empty), "there are rows that see nothing"
    np.testing.assert_array_equal(default[~empty], np.asarray(ours[0])[~empty])


def test_means_of_fully_masked_rows_know_no_dropout_and_leave_the_residual_and_sinks():
    given, _ = FEATURES["plain"]()
    mask = random((1, 4, 40, 56)) & (np.arange(40) % 3 != 0)[:, None]
    means = np.repeat(np.mean(given["value"], 1, keepdims=True), 2, 2)
    dropout = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    for options in ({}, dropout):
        (found, lse), (zero, expected) = jax.jit(
            lambda given, options=options: [
                attend(**given, mask=mask, **options, fully_masked_rows=rows, return_residual=True) for rows in ("mean", "zero")
            ]
        )(given)
        np.testing.assert_array_equal(lse, expected)
        empty = lse == -np.inf
        assert np.any(empty)
        np.testing.assert_allclose(found[empty], np.broadcast_to(means, found.shape)[empty], rtol=0, atol=64 * oracle.EPS)
        np.testing.assert_array_equal(found[~empty], zero[~empty])
    options = {"mask": mask, "sinks": np.ones(4, np.float32)}
    np.testing.assert_array_equal(attend(**given, **options, fully_masked_rows="mean"), attend(**given, **options))
    no_keys = {"query": given["query"], "key": given["key"][:, :0], "value": given["value"][:, :0]}
    np.testing.assert_array_equal(attend(**no_keys, fully_masked_rows="mean"), 0)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_means_of_fully_masked_rows_stay_sharded(kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(kind,) * 2, devices=jax.devices("cpu")[:4])
    q, k, v = (np.random.default_rng(heads).standard_normal((4, 12, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    mask = np.zeros((4, 1, 12, 12), bool)
    f = jax.jit(functools.partial(attend, fully_masked_rows="mean"))
    expected = f(q, k, v, mask=mask)
    with jax.set_mesh(mesh):
        for spec in (P("data", None, "model"), P("data")):
            sharding = NamedSharding(mesh, spec)
            found = f(*(jax.device_put(a, sharding) for a in (q, k, v)), mask=mask)
            np.testing.assert_allclose(found, expected, rtol=0, atol=64 * oracle.EPS)
            assert found.sharding.is_equivalent_to(sharding, 4)
        mixed = f(jax.device_put(q, NamedSharding(mesh, P("data", None, "model"))), k, v, mask=mask)
        np.testing.assert_allclose(mixed, expected, rtol=0, atol=64 * oracle.EPS)


def test_a_row_that_sees_nothing_is_no_infinity_unless_lse_is_asked_for():
    given, _ = FEATURES["plain"]()
    mask = np.zeros((40, 56), bool)
    with jax.debug_infs(True):
        np.testing.assert_array_equal(attend(**given, mask=mask), 0)
        with pytest.raises(FloatingPointError, match="dot_product_attention"):
            attend(**given, mask=mask, return_residual=True)


# Against jax.nn.

SHARED = ["plain", "equal heads", "multi-query", "scale", "causal", "window", "window on two sides", "causal window"]
SHARED += ["mask (1,4,40,56)", "mask (2,4,40,1)", "bias (1,4,40,56)", "bias (2,1,40,56)"]


@pytest.mark.parametrize("feature", SHARED)
def test_what_jax_nn_has_too_is_the_same(feature):
    given, options = FEATURES[feature]()
    given["value"] = random(given["key"].shape, "bias")
    with jax.default_matmul_precision("highest"):
        found, expected = jax.jit(
            lambda given: tuple(f(**given, **options, return_residual=True) for f in (attend, jax.nn.dot_product_attention))
        )(given)
    seen = attention_oracle.weights(**given, **options).seen.any(-1).swapaxes(-1, -2)  # jax.nn averages where nothing is
    truths = truth_of(attention_oracle.attention, "xla", given, options)
    for ours, theirs, truth in zip(found, expected, truths, strict=True):
        assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype)
        assert oracle.error(ours, truth) <= 1
        assert oracle.error(np.asarray(theirs)[seen], oracle.Truth(truth.value[seen], truth.budget[seen])) <= 1


def test_lengths_are_those_of_jax_nn_also_without_a_batch():
    given, _ = FEATURES["no batch"]()
    lengths = {"query_seq_lengths": np.array([30], np.int32), "key_value_seq_lengths": np.array([20], np.int32)}
    mask = random((1, 4, 40, 56))
    with jax.default_matmul_precision("highest"):
        expected = jax.jit(jax.nn.dot_product_attention)(**given, **lengths, mask=mask)
    truth, _ = attention_oracle.attention(**given, **lengths, mask=mask[0])
    for out in (jax.jit(attend)(**given, **lengths, mask=mask), expected):
        assert oracle.error(out, truth) <= 1


# Dropout.


def test_dropout_keeps_the_right_part_and_everything_is_independent():
    rows, cols = np.arange(512, dtype=np.uint32)[:, None], np.arange(1024, dtype=np.uint32)[None, :]
    size = rows.size * cols.size
    for rate in (0.01, 0.1, 0.5, 0.9):
        for seeds in ((0, 0), (1, 0), (0, 1), (123456789, 987654321)):
            kept = np.asarray(dropout.keep(*np.uint32(seeds), rows, cols, rate))
            deviation = np.sqrt(rate * (1 - rate) / size)
            assert abs(np.mean(~kept) - rate) < 5 * deviation
            for axis, count in ((0, cols.size), (1, rows.size)):
                means = np.mean(~kept, axis)
                expected = rate * (1 - rate) / kept.shape[axis]
                assert abs(np.var(means) / expected - 1) < 6 * np.sqrt(2 / count)
    half = [np.asarray(dropout.keep(*np.uint32(seeds), rows, cols, 0.5)) for seeds in ((5, 6), (4, 6), (5, 7), (6, 5))]
    patterns = [2.0 * kept - 1 for kept in half]
    limit = 5 / np.sqrt(size)
    for index, other in enumerate(patterns[1:], 1):
        assert abs(np.mean(patterns[0] * other)) < limit, index
    for shift in ((0, 1), (1, 0), (1, 1), (2, 0), (0, 2), (1, -1), (0, 16), (16, 0), (0, 256), (256, 0)):
        assert abs(np.mean(patterns[0] * np.roll(patterns[0], shift, (0, 1)))) < limit * 1.2, shift
    correlation = np.corrcoef(patterns[0])
    assert np.max(np.abs(correlation - np.eye(512))) < 6 / np.sqrt(1024)


def test_every_bit_of_a_place_and_of_the_seeds_changes_half_of_the_pattern():
    rng = np.random.default_rng(0)
    place = rng.integers(0, 2**32, (4, 4096), dtype=np.uint32)
    kept = np.asarray(dropout.keep(*place, 0.5))
    for which in range(4):
        for bit in range(32):
            flipped = place.copy()
            flipped[which] ^= np.uint32(1 << bit)
            changed = np.mean(kept != np.asarray(dropout.keep(*flipped, 0.5)))
            assert abs(changed - 0.5) < 0.05, (which, bit)


def test_dropout_keeps_what_it_always_kept():
    """The hash in arithmetic of 64 bits: another one that mixes as well would drop other weights of a model in training."""

    def mix(bits, between):
        bits = (bits ^ bits >> 16) * 0x7FEB352D % 2**32
        bits = ((bits ^ bits >> 15) + between) * 0x846CA68B % 2**32
        return bits ^ bits >> 16

    place = np.random.default_rng(0).integers(0, 2**32, (4, 4096), dtype=np.uint32)
    seed0, seed1, row, col = place.astype(np.uint64)
    first = mix(mix(seed0 ^ row * 0x9E3779B1 % 2**32, 0) ^ seed1, 0)
    second = mix(mix(seed1 ^ row * 0x85EBCA77 % 2**32, 0) ^ seed0, 0)
    words = mix(first ^ col * 0xC2B2AE3D % 2**32, second)
    for rate in (0.1, 0.5, 0.9):
        np.testing.assert_array_equal(dropout.keep(*place, rate), words >= round(rate * 2**32))
    assert [dropout.dropped(rate) for rate in (0.0, 0.25, 1 - 2**-53)] == [0, 2**30, 2**32 - 1]


def test_dropout_is_reproducible_and_its_mean_is_attention():
    given, _ = FEATURES["plain"]()
    rates = functools.partial(attend, **given, dropout_rate=0.5)
    first, again = rates(dropout_rng=jax.random.key(1)), rates(dropout_rng=jax.random.key(1))
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, rates(dropout_rng=jax.random.PRNGKey(1)))
    jitted = jax.jit(lambda key: rates(dropout_rng=key))(jax.random.key(1))
    truth, lse_truth = truth_of(attention_oracle.attention, "xla", given, {"dropout_rate": 0.5, "dropout_rng": 1})
    assert max(oracle.error(first, truth), oracle.error(jitted, truth)) <= 1  # XLA adds in another order
    assert np.any(first != rates(dropout_rng=jax.random.key(2)))
    many = np.asarray(jax.jit(jax.vmap(lambda key: rates(dropout_rng=key)))(jax.random.split(jax.random.key(0), 100)))
    np.testing.assert_allclose(np.mean(many, 0), attend(**given), atol=6 * float(np.max(np.std(many, 0))) / 10)
    np.testing.assert_array_equal(rates(dropout_rng=None, deterministic=True), attend(**given))
    _, lse = rates(dropout_rng=jax.random.key(1), return_residual=True)
    assert oracle.error(lse, lse_truth) <= 1  # that without dropout


# What is left to chance.


def equations(jaxpr):
    """The equations of a jaxpr and of all that it holds."""
    for equation in jaxpr.eqns:
        yield equation
        for param in jax.tree.leaves(list(equation.params.values())):
            inner = getattr(param, "jaxpr", param)
            if hasattr(inner, "eqns"):
                yield from equations(inner)


def bound(f, *args):
    """The primitives of attention in `f(*args)`, by name and parameters."""
    found = equations(jax.make_jaxpr(f)(*args).jaxpr)
    return [(e.primitive.name, e.params) for e in found if e.primitive.name.startswith("dot_product_attention")]


def all_deterministic(**options):
    """The parameter, if it is the same in forward pass, tangent and cotangent."""

    def loss(q):
        return jnp.sum(attend(q, K, K, **options))

    found = [*bound(jax.grad(loss), Q), *bound(lambda q: jax.jvp(loss, (q,), (q,)), Q)]
    assert {name for name, _ in found} == {"dot_product_attention", "dot_product_attention_jvp", "dot_product_attention_vjp"}
    values = {params["deterministic_gradients"] for _, params in found}
    assert len(values) == 1
    return values.pop()


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (None, False),
        ("", False),
        ("--xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops=true", True),
        ("--xla_gpu_deterministic_ops=True", True),
        ("--xla_gpu_deterministic_ops=1", True),
        ("--xla_gpu_deterministic_ops='true'", True),
        ("--xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_deterministic_ops=0", False),
        ("--xla_gpu_exclude_nondeterministic_ops", True),
        ("--xla_gpu_exclude_nondeterministic_ops=false", False),
        ("--xla_gpu_autotune_level=0\n  --xla_gpu_deterministic_ops=true --xla_gpu_cuda_data_dir=a=b", True),
        ("--xla_gpu_deterministic_ops=false --xla_gpu_deterministic_ops", True),
        ("--xla_gpu_deterministic_ops --xla_gpu_deterministic_ops=false", False),
        ("--xla_gpu_exclude_nondeterministic_ops --xla_gpu_deterministic_ops=false", True),
        ("--xla_gpu_autotune_level=1 --xla_cpu_enable_fast_math=true", False),
    ],
)
def test_derivatives_are_deterministic_where_the_caller_or_xla_flags_say_so(flags, expected, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    if flags is not None:
        monkeypatch.setenv("XLA_FLAGS", flags)
    assert all_deterministic() is expected
    assert all_deterministic(deterministic_gradients=np.bool_(True)) is True


def test_dropout_and_deterministic_derivatives_go_together(monkeypatch):
    given, _ = FEATURES["plain"]()
    dropped = functools.partial(attend, **given, dropout_rate=0.5, dropout_rng=jax.random.key(1))
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    expected = dropped()
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_deterministic_ops=true")
    np.testing.assert_array_equal(dropped(), expected)
    assert all_deterministic(dropout_rate=0.5, dropout_rng=jax.random.key(1))
    np.testing.assert_array_equal(dropped(deterministic=True), attend(**given))
    assert np.any(expected != attend(**given))


# Transformations.


def small(dtype="float32", **shapes):
    return arrays(**({"batch": (2,), "length": 5, "keys": 7, "size": 4} | shapes), dtype=dtype)


def everything(moving, module=None, **more):
    """A scalar in which output and lse matter, with most of the features."""
    del module
    out, lse = attend(
        **moving,
        is_causal=True,
        logits_soft_cap=3.0,
        dropout_rate=0.2,
        dropout_rng=jax.random.key(0),
        return_residual=True,
        **more,
    )
    weights = jnp.cos(jnp.arange(out.shape[-1], dtype=out.dtype)).reshape((1,) * (out.ndim - 1) + (-1,))
    return jnp.sum(jnp.sin(out) * weights) + jnp.sum(jnp.cos(lse))


def movable(dtype="float32"):
    return small(dtype) | {"bias": random((1, 4, 5, 7), "bias", dtype=dtype), "sinks": random((4,), "bias", dtype=dtype)}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("cut", cases.quick(True, slow=[False]))
def test_derivatives_are_those_of_finite_differences(cut, monkeypatch):
    if cut:
        monkeypatch.setattr(xla, "ONE_TILE", 0)
        monkeypatch.setattr(xla, "BLOCK", (2, 3))
    moving = movable("float64")
    rng = np.random.default_rng(3)
    direction = {name: rng.standard_normal(a.shape) for name, a in moving.items()}
    step = 1e-5

    @jax.jit
    def derivatives(moving):
        with_gradient = jax.value_and_grad(everything)
        slope = jax.jvp(everything, (moving,), (direction,))[1]
        return *with_gradient(moving), slope, jax.jvp(with_gradient, (moving,), (direction,))[1][1]

    def assert_close(actual, expected):
        """The difference misses step^2 / 6 of the third derivative, and 2^-53 / step of the value: about 1e-10 here."""
        jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-7), actual, expected)

    _, gradient, forward, second = derivatives(moving)
    ahead, behind = (derivatives({k: a + sign * step * direction[k] for k, a in moving.items()})[:2] for sign in (1, -1))
    slope, curvature = jax.tree.map(lambda a, b: (a - b) / (2 * step), ahead, behind)
    assert_close(forward, slope)
    assert_close(sum(np.vdot(gradient[name], direction[name]) for name in moving), slope)
    assert_close(second, curvature)
    if cut:  # the same rules as in one tile, once more
        return
    inner = jax.grad(lambda m: sum(jnp.vdot(jax.grad(everything)(m)[k], direction[k]) for k in m))
    assert_close(jax.jit(inner)(moving), curvature)
    pushed = jax.grad(lambda m: jax.jvp(everything, (m,), (direction,))[1])
    assert_close(jax.jit(pushed)(moving), curvature)


@pytest.mark.usefixtures("x64")
def test_out_alone_has_the_derivatives_that_it_has_beside_its_residual():
    moving = small("float64")
    tangents = jax.tree.map(np.cos, moving)

    def derivatives(f):
        return jax.jvp(f, (moving,), (tangents,)), jax.grad(lambda moving: jnp.sum(jnp.sin(f(moving))))(moving)

    @jax.jit
    def both():
        alone = derivatives(lambda moving: attend(**moving, is_causal=True))
        return alone, derivatives(lambda moving: attend(**moving, is_causal=True, return_residual=True)[0])

    oracle.assert_same_in_float64(*both())


@pytest.mark.usefixtures("x64")
def test_each_tangent_alone_is_that_of_the_cotangent():
    moving = movable("float64")
    rng = np.random.default_rng(0)
    tangents = {name: rng.standard_normal(array.shape) for name, array in moving.items()}

    @jax.jit
    def derivatives(moving, tangents):
        found = {}
        for name, array in moving.items():
            f = lambda a, name=name: everything(moving | {name: a})  # noqa: E731
            found[name] = jax.jvp(f, (array,), (tangents[name],))[1], jax.grad(f)(array)
        return jax.grad(everything)(moving), found

    gradient, found = derivatives(moving, tangents)
    for name, own in found.items():
        oracle.assert_same_in_float64(own, (np.vdot(gradient[name], tangents[name]), gradient[name]))


@pytest.mark.usefixtures("x64")
def test_jit_scan_checkpoint_and_linearize():
    moving = movable("float64")
    nothing = jax.checkpoint(everything, policy=jax.checkpoint_policies.nothing_saveable)

    def scanned(moving):
        return jnp.sum(jax.lax.scan(lambda c, _: (c, everything(c)), moving, None, length=3)[1])

    @jax.jit
    def each(moving):
        value, push = jax.linearize(everything, moving)
        return everything(moving), value, push(moving), *(jax.grad(f)(moving) for f in (everything, nothing, scanned))

    expected, check = jax.grad(everything)(moving), oracle.assert_same_in_float64
    value, linearized, pushed, jitted, checkpointed, of_scan = each(moving)
    check(jitted, expected)
    check(checkpointed, expected)
    check(linearized, value)
    check(pushed, sum(np.vdot(expected[k], moving[k]) for k in moving))
    check(of_scan, jax.tree.map(lambda a: 3 * a, expected))


OUT, LSE = primitive.SAVED_NAMES
POLICIES = jax.checkpoint_policies
BOTH = POLICIES.save_only_these_names(OUT, LSE)
OFFLOADED = {"names_which_can_be_saved": [], "names_which_can_be_offloaded": [OUT, LSE]}
RUNS = {  # of the forward pass, by what a checkpoint saves
    "out and lse": (BOTH, 1),
    "out": (POLICIES.save_only_these_names(OUT), 2),
    "lse": (POLICIES.save_only_these_names(LSE), 2),
    "all names": (POLICIES.save_any_names_but_these(), 1),
    "out and lse, on the host": (
        POLICIES.save_and_offload_only_these_names(**OFFLOADED, offload_src="device", offload_dst="pinned_host"),
        1,
    ),
    "everything": (POLICIES.everything_saveable, 1),
    "nothing": (POLICIES.nothing_saveable, 2),
    "products": (POLICIES.dots_saveable, 2),
    "products without a batch": (POLICIES.dots_with_no_batch_dims_saveable, 2),
    "products, out and lse": (POLICIES.save_from_both_policies(POLICIES.dots_saveable, BOTH), 1),
}


def layer(x, w):
    """Attention between two products: what comes after saves its output too."""
    x = jnp.tanh(jnp.dot(x, w, precision="highest"))
    out, lse = attend(x, x, x, is_causal=True, return_residual=True)
    return jnp.tanh(jnp.dot(out, w, precision="highest")), lse


def loss_of(layer):
    return lambda *args: sum(jnp.sum(jnp.sin(x)) for x in layer(*args))


def layer_inputs(dtype="float32"):
    x = random((2, 6, 4, 4), "bias", dtype=dtype)
    return x, random((4, 4), "bias", seed=2, dtype=dtype)


def runs(f, *args):
    """Counts the runs of attention's forward pass in `f(*args)`."""
    return [name for name, _ in bound(f, *args)].count("dot_product_attention")


def test_the_names_of_what_is_saved_are_documented():
    for name in primitive.SAVED_NAMES:
        assert name in jaxsoftmax.dot_product_attention.__doc__


def test_only_derivatives_name_what_they_save():
    def names(f):
        found = equations(jax.make_jaxpr(f)(*layer_inputs()).jaxpr)
        return [e.params["name"] for e in found if e.primitive.name == "name"]

    assert names(layer) == []
    assert names(jax.grad(loss_of(layer))) == [OUT, LSE]


@pytest.mark.usefixtures("x64")
def test_a_checkpoint_that_saves_out_and_lse_runs_attention_once():
    args = layer_inputs("float64")
    plain = jax.grad(loss_of(layer), (0, 1))
    assert runs(plain, *args) == 1
    every = {}
    for saved, (policy, expected) in RUNS.items():
        checkpointed = jax.grad(loss_of(jax.checkpoint(layer, policy=policy)), (0, 1))
        assert runs(checkpointed, *args) == expected, saved
        jitted = jax.grad(loss_of(jax.checkpoint(jax.jit(layer), policy=policy)), (0, 1))
        assert runs(jax.jit(jitted), *args) == expected, saved
        every[saved] = checkpointed
    gradients, found = jax.jit(lambda *args: (plain(*args), {saved: f(*args) for saved, f in every.items()}))(*args)
    for own in found.values():
        oracle.assert_same_in_float64(own, gradients)


def test_a_loop_saves_out_and_lse_once():
    x, w = layer_inputs()

    def stacked(x, ws):
        return jax.lax.scan(lambda x, w: jax.checkpoint(layer, policy=BOTH)(x, w), x, ws)

    f, args = jax.grad(loss_of(stacked), (0, 1)), (x, np.stack([w] * 3))
    assert runs(f, *args) == 1
    forward = next(e for e in equations(jax.make_jaxpr(f)(*args).jaxpr) if e.primitive.name == "scan")
    stacks = [v.aval.shape for v in forward.outvars if v.aval.shape[0] == 3]
    # The layers' inputs and out, lse as it is saved, and as it is returned.
    assert sorted(stacks) == sorted([(3, *x.shape)] * 2 + [(3, 2, 4, 6), (3, 2, 6, 4)])


@pytest.mark.usefixtures("x64")
def test_checkpoints_in_vmap_and_in_higher_derivatives():
    x, w = layer_inputs("float64")
    checkpointed = jax.checkpoint(layer, policy=BOTH)
    stack = np.stack([x, 2 * x])

    def batched(f):
        return jax.grad(loss_of(jax.vmap(f, (0, None))), (0, 1))

    def forward_over_reverse(f):
        gradient = jax.grad(loss_of(f))
        return lambda x, w: jax.jvp(lambda x: gradient(x, w), (x,), (x,))[1]

    def reverse_over_forward(f):
        return jax.grad(lambda x, w: jax.jvp(lambda x: loss_of(f)(x, w), (x,), (x,))[1])

    def reverse_over_reverse(f):
        return jax.grad(lambda x, w: jnp.sum(jnp.sin(jax.grad(loss_of(f))(x, w))))

    transformed = [(batched, stack), (forward_over_reverse, x), (reverse_over_forward, x), (reverse_over_reverse, x)]
    for transform, argument in transformed:
        assert runs(transform(checkpointed), argument, w) == 1, transform

    @jax.jit
    def each(*arguments):
        pairs = zip(transformed, arguments, strict=True)
        return [[transform(f)(argument, w) for f in (checkpointed, layer)] for (transform, _), argument in pairs]

    for actual, expected in each(*(argument for _, argument in transformed)):
        oracle.assert_same_in_float64(actual, expected)
    around = jax.grad(loss_of(jax.checkpoint(jax.vmap(layer, (0, None)), policy=BOTH)))
    assert runs(around, stack, w) == 1


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"logits_soft_cap": 5.0, "local_window_size": (2, 1)}], ids=str)
def test_attention_may_be_transposed_in_its_values_in_which_alone_it_is_linear(options):
    q, k, v = (random(shape, "array", seed) for seed, shape in enumerate([(2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6)]))
    cotangent = random((2, 5, 4, 6), "array", 3)
    (transposed,) = jax.linear_transpose(lambda v: jaxsoftmax.dot_product_attention(q, k, v, **options), v)(cotangent)
    (expected,) = jax.vjp(lambda v: jaxsoftmax.dot_product_attention(q, k, v, **options), v)[1](cotangent)
    np.testing.assert_array_equal(transposed, expected)
    of_lse = jax.linear_transpose(lambda v: jaxsoftmax.dot_product_attention(q, k, v, return_residual=True, **options)[1], v)
    np.testing.assert_array_equal(of_lse(random((2, 5, 4), "array", 4))[0], 0)
    with pytest.raises(NotImplementedError, match="linear in value or value_scale alone, and not in query"):
        jax.linear_transpose(lambda q: jaxsoftmax.dot_product_attention(q, k, v, **options), q)(cotangent)


BATCHED = [("query",), ("key",), ("value",), ("bias",), ("sinks",), ("query", "key", "value"), tuple(MOVING)]


def hessian_vector(moving):
    return jax.jvp(jax.grad(everything), (moving,), (jax.tree.map(jnp.ones_like, moving),))[1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("f", "several"),
    [(everything, BATCHED), (hessian_vector, [("sinks",), tuple(MOVING)])]
    + [pytest.param(hessian_vector, [names], marks=pytest.mark.slow) for names in BATCHED],
    ids=lambda value: "|".join(map("+".join, value)) if isinstance(value, list) else value.__name__,
)
def test_vmap_with_each_operand_batched_or_not(f, several):
    moving, stacks, axes = movable("float64"), {}, {}
    for names in several:
        own = axes[names] = {name: (1 if name == "query" else 0) if name in names else None for name in moving}
        stacks[names] = {
            name: np.stack([a, a[..., ::-1], 2 * a], own[name]) if name in names else a for name, a in moving.items()
        }
    mapped = jax.jit(lambda stacks: {names: jax.vmap(f, in_axes=(axes[names],))(own) for names, own in stacks.items()})
    one = jax.jit(f)
    for names, actual in mapped(stacks).items():
        loop = [
            one({k: np.take(a, i, axes[names][k]) if k in names else a for k, a in stacks[names].items()}) for i in range(3)
        ]
        oracle.assert_same_in_float64(actual, jax.tree.map(lambda *parts: np.stack(parts), *loop))


@pytest.mark.usefixtures("x64")
def test_vmap_of_what_is_not_differentiated():
    given, _ = FEATURES["plain"]("float64")
    lengths = np.array([[3, 56], [20, 0], [1, 2]], np.int32)
    masks, ids = random((3, 40, 56)), np.stack([segments(40, i) for i in range(3)])
    ids_of_keys = np.stack([segments(56, i) for i in range(3)])
    keys = jax.random.split(jax.random.key(0), 3)

    def f(lengths, mask, ids, ids_of_keys, key):
        return attend(
            **given,
            key_value_seq_lengths=lengths,
            mask=mask,
            query_segment_ids=ids,
            key_value_segment_ids=ids_of_keys,
            dropout_rate=0.5,
            dropout_rng=key,
        )

    args, one = (lengths, masks, ids, ids_of_keys, keys), jax.jit(f)
    axes = [(0,) * 5, *(tuple(0 if i == batched else None for i in range(5)) for batched in range(5))]
    mixed = [[a if axis == 0 else a[0] for a, axis in zip(args, own, strict=True)] for own in axes]
    mapped = jax.jit(lambda mixed: [jax.vmap(f, in_axes=own)(*given) for own, given in zip(axes, mixed, strict=True)])
    for own, given_to_one, actual in zip(axes, mixed, mapped(mixed), strict=True):
        looped = [one(*(a if axis is None else a[j] for a, axis in zip(given_to_one, own, strict=True))) for j in range(3)]
        oracle.assert_same_in_float64(actual, np.stack(looped))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("axes", [(0, None), (None, 0)])
@pytest.mark.parametrize("is_pulled", [False, True])
def test_vmap_of_a_linear_map_and_of_its_transpose(is_pulled, axes):
    """A tangent, or a cotangent, may be batched where what it belongs to is not, and the other way round."""
    moving = small("float64")
    tangents = np.stack([moving["query"], moving["query"][..., ::-1]])
    queries = tangents + 1
    if is_pulled:
        tangents = np.stack([attend(**moving), np.cos(attend(**moving))])

    def push(tangent, query):
        def f(q):
            return attend(**(moving | {"query": q}))

        return jax.vjp(f, query)[1](tangent)[0] if is_pulled else jax.jvp(f, (query,), (tangent,))[1]

    args = [a if axis == 0 else a[0] for a, axis in zip((tangents, queries), axes, strict=True)]

    def total(tangent, query):
        return jnp.sum(jnp.sin(jax.vmap(push, in_axes=axes)(tangent, query)))

    def looped(tangent, query):
        parts = [push(*(a[i] if axis == 0 else a for a, axis in zip((tangent, query), axes, strict=True))) for i in range(2)]
        return jnp.sum(jnp.sin(jnp.stack(parts)))

    actual, expected = (jax.jit(jax.grad(f, (0, 1)))(*args) for f in (total, looped))
    oracle.assert_same_in_float64(actual, expected)


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "tpu", "cuda")], ids=str)
@pytest.mark.parametrize("symbolic", [False, True])
def test_export(platforms, symbolic):
    shape = export.symbolic_shape("b, t, 4, 8") if symbolic else (2, 9, 4, 8)
    f = jax.jit(lambda q: (attend(q, q, q, is_causal=True), jax.grad(lambda q: jnp.sum(attend(q, q, q)))(q)))
    exported = export.export(f, platforms=platforms)(jax.ShapeDtypeStruct(shape, jnp.float32))
    if "cpu" in platforms:
        with jax.default_device(jax.devices("cpu")[0]):
            q = small(length=9, size=8)["query"]
            out, gradient = exported.call(q)
            assert oracle.error(out, attention_oracle.attention(q, q, q, is_causal=True)[0]) <= 1
            parts = attention_oracle.cotangents(np.ones(q.shape), np.zeros(q.shape[:3]), q, q, q).values()
            value, budget = (sum(getattr(part, name) for part in parts) for name in ("value", "budget"))
            budget += 2 * oracle.EPS * sum(np.abs(part.value) for part in parts)  # of their sum
            assert oracle.error(gradient, oracle.Truth(value, budget)) <= 1


# Long sequences.


def test_long_sequences_are_cut_into_tiles_and_short_ones_are_not():
    short, long = (jax.ShapeDtypeStruct((1, length, 1, 8), jnp.float32) for length in (4096, 4097))
    texts = [jax.jit(lambda q: attend(q, q, q)).lower(x).as_text() for x in (short, long)]
    assert ["while" in text for text in texts] == [False, True]


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"local_window_size": (700, 100)}], ids=str)
def test_tiles_that_a_window_rules_out_are_not_visited(options):
    x = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    text = jax.jit(lambda q: attend(q, q, q, **options)).lower(x).as_text()
    tiles = {"": 64, "is_causal": 36, "local_window_size": 28}["".join(options)]
    assert f"dense<{tiles}> : tensor<i32>" in text


@pytest.mark.parametrize(("length", "keys", "tiles"), [(1, 2**21, 8), (2**21, 1, 8), (64, 2**19, 128)])
def test_tiles_of_few_queries_or_keys_hold_more_of_the_others(length, keys, tiles):
    q, k = (jax.ShapeDtypeStruct((1, size, 16, 8), jnp.float32) for size in (length, keys))
    assert f"dense<{tiles}> : tensor<i32>" in jax.jit(attend).lower(q, k, k).as_text()


def test_memory_of_many_heads_is_that_of_a_few_tiles():
    x = jax.ShapeDtypeStruct((32, 1024, 32, 16), jnp.float32)
    analysis = jax.jit(jax.grad(lambda q: jnp.sum(attend(q, q, q) ** 2))).lower(x).compile().memory_analysis()
    assert analysis.temp_size_in_bytes < 8 * xla.LARGEST_TILE * 4 < 32 * 32 * 1024 * 1024 * 4


def test_memory_of_tiles_grows_with_the_length():
    def temporary(length, f):
        x = jax.ShapeDtypeStruct((1, length, 2, 16), jnp.float32)
        return jax.jit(f).lower(x).compile().memory_analysis().temp_size_in_bytes

    def forward(q):
        return attend(q, q, q, is_causal=True, dropout_rate=0.1, dropout_rng=jax.random.key(0))

    scores = 16384 * 16384 * 2 * 4
    half, whole = (temporary(length, jax.grad(lambda q: jnp.sum(forward(q) ** 2))) for length in (8192, 16384))
    assert whole < scores / 20
    assert whole <= 2.2 * half  # a straight line, and not a parabola
    assert temporary(16384, lambda q: jax.jvp(forward, (q,), (q,))) < scores / 20


def test_a_long_sequence_is_right():
    given = arrays(batch=(), length=1100, keys=1300, heads=1, key_heads=1, size=8)
    out = jax.jit(lambda given: attend(**given, is_causal=True, return_residual=True))(given)
    assert_right("xla", out, given, {"is_causal": True})


@pytest.mark.parametrize(
    ("gpu", "options", "three"),
    [
        (of_capability((9, 0), name="H100"), {}, True),
        (of_capability((8, 0), name="A100"), {}, True),
        (of_capability((7, 5), name="T4"), {}, False),
        (of_capability((9, 0)), {}, False),  # any of these, as where there is no GPU: what is exported may run on others
        (of_capability((9, 0), name="H100"), {"precision": "highest"}, False),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_on_gpus_weights_of_16_bits_are_multiplied_in_three_products(gpu, options, three, dtype):
    def gradients(*operands):
        attention = functools.partial(jaxsoftmax.dot_product_attention, implementation="xla", **options)
        return jax.vjp(attention, *operands)[1](operands[0])

    x = jax.ShapeDtypeStruct((1, 32, 2, 16), dtype)
    with lowering_for(gpu):
        program = jax.jit(gradients).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    # Queries and keys are multiplied forward and backward, values and cotangents once; weights in the result and derivatives.
    counts = len(re.findall("num_primitive_operations = 3", program)), program.count("dot_general")
    assert counts == (4 * (three and dtype != "float32"), 7)


def test_of_many_tiles_too_weights_of_16_bits_are_multiplied_in_three_products():
    x = jax.ShapeDtypeStruct((1, 8192, 1, 64), jnp.bfloat16)
    attention = functools.partial(jaxsoftmax.dot_product_attention, implementation="xla")
    with lowering_for(of_capability((9, 0), name="H100")):
        program = jax.jit(attention).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert program.count("num_primitive_operations = 3") == 1


@pytest.mark.parametrize("cut", [False, True], ids=["one tile", "tiles"])
def test_an_infinite_sink_has_all_weight(cut, monkeypatch):
    if cut:
        small_tiles(monkeypatch)
    given = arrays()
    sinks = np.array([np.inf, 0, 0, 0], np.float32)
    out, lse = jax.jit(functools.partial(attend, return_residual=True))(**given, sinks=sinks)
    assert not np.any(out[..., 0, :])
    assert np.all(np.isposinf(lse[..., 0]) & np.isfinite(lse[..., 1]))


def test_a_nan_in_a_cotangent_of_a_row_whose_scores_overflow_has_no_effect():
    given = {name: np.ones((1, 8, 1, 4), np.float32) for name in ("query", "key", "value")}
    given["query"][0, 3], given["key"] = 1e20, -1e20 * given["key"]
    out, pull = jax.vjp(lambda given: attend(**given), given)
    found = pull(jnp.ones_like(out).at[0, 3].set(jnp.nan))[0]
    assert not np.any(out[0, 3])
    assert all(np.all(np.isfinite(cotangent)) for cotangent in found.values())


def test_nan_in_cotangents_of_no_keys_has_no_effect_on_sinks():
    query, empty = np.ones((1, 2, 2, 4), np.float32), np.ones((1, 0, 2, 4), np.float32)
    out, pull = jax.vjp(lambda sinks: attend(query, empty, empty, sinks=sinks), np.zeros(2, np.float32))
    assert not np.any(pull(jnp.full_like(out, jnp.nan))[0])


@pytest.mark.usefixtures("x64")
def test_float64_is_computed_in_float64():
    given = arrays(dtype="float64")
    out, lse = attend(**given, is_causal=True, return_residual=True)
    assert (out.dtype, lse.dtype) == (np.float64, np.float64)
    for result, truth in zip((out, lse), attention_oracle.attention(**given, is_causal=True), strict=True):
        oracle.assert_same_in_float64(result, truth.value)


# Meshes.


def make_mesh(kind, shape=(2, 2), names=("data", "model")):
    devices = jax.devices("cpu")[: math.prod(shape)]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=devices)


def placed(array, mesh, spec):
    """Shards an array along its axes that are longer than 1."""
    spec = (*spec, *(None,) * (array.ndim - len(spec)))
    return jax.device_put(
        array, NamedSharding(mesh, P(*(dim if size > 1 else None for dim, size in zip(spec, array.shape, strict=True))))
    )


def on_mesh(key_heads, heads=4, length=9, keys=11):
    """Returns operands in float64. Programs for one device and for several differ by rounding alone then."""
    given = arrays((4,), length, keys, heads, key_heads, size=8, dtype="float64")
    bias, sinks = random((1, heads, length, keys), "bias", dtype="float64"), random((heads,), "bias", dtype="float64")
    return given | {"bias": bias, "sinks": sinks}


def values_and_derivatives(moving, order=2, **fixed):
    """Values, gradient, and the tangents of either the gradient, in second order, or the values."""

    def f(moving):
        return attend(**moving, **fixed, dropout_rate=0.1, dropout_rng=jax.random.key(0), return_residual=True)

    def loss(moving):
        results = f(moving)
        return sum(jnp.sum(jnp.sin(x)) for x in results), results

    gradient_of = jax.grad(loss, has_aux=True)
    if order == 1:
        return f(moving), gradient_of(moving)[0], jax.jvp(f, (moving,), (moving,))[1]
    (gradient, results), (second, _) = jax.jvp(gradient_of, (moving,), (moving,))
    return results, gradient, second


@functools.cache
def expected_on_mesh(*shape, order=2, **more):
    """Values and derivatives of `on_mesh` on one device, whatever the mesh is."""
    f = jax.jit(functools.partial(values_and_derivatives, order=order))
    return jax.tree.map(np.asarray, f(on_mesh(*shape, **more)))


def spec_of(result):
    return (*result.sharding.spec, *(None,) * (result.ndim - len(result.sharding.spec)))


@pytest.fixture
def local():
    """The reference under another name, as a kernel would be: it is given shards, and must be told which."""
    module = kernels.Local("attention", "cpu")
    with kernels.plugged_in("attention", "local", lambda: module, "cpu"):
        yield module


SPECS = [P("data"), P("data", None, "model"), P(None, None, "model"), P(("data", "model"))]
HEADS = P(None, "model")


def on_both_meshes(quick_on, *others):
    """Returns a case for each kind of axes. The one that is not `quick_on` is slow."""
    both = (AxisType.Auto, AxisType.Explicit)
    return [pytest.param(*others, kind, marks=cases.slow_unless(kind == quick_on)) for kind in both]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("spec", "key_heads", "kind"),
    [
        *on_both_meshes(None, SPECS[0], 2),
        *on_both_meshes(None, SPECS[1], 1),
        *on_both_meshes(None, SPECS[1], 2),
        *on_both_meshes(AxisType.Auto, SPECS[2], 4),
        *on_both_meshes(AxisType.Explicit, SPECS[3], 2),
    ],
    ids=str,
)
def test_batch_and_heads_stay_sharded_and_nothing_is_gathered(spec, key_heads, kind):
    check_mesh(spec, key_heads, kind)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("kind", "order"),
    [(AxisType.Auto, 1), *(pytest.param(kind, 2, marks=pytest.mark.slow) for kind in (AxisType.Auto, AxisType.Explicit))],
    ids=str,
)
def test_tiles_stay_sharded(tiles, kind, order, monkeypatch):
    monkeypatch.setattr(xla, "BLOCK", (4, 4))
    check_mesh(SPECS[1], 2, kind, order)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("order", cases.quick(1, slow=[2]))
@pytest.mark.parametrize(("key_heads", "kind"), [(1, AxisType.Auto), (2, AxisType.Explicit)], ids=["auto", "explicit"])
def test_an_implementation_gets_shards(local, key_heads, kind, order):
    check_mesh(P("data", None, "model"), key_heads, kind, order)
    shapes = {shapes[:3] for shapes in local.shapes}
    whole, part = (((4 // n, 9, 4 // n, 8), *((4 // n, 11, max(1, key_heads // n), 8),) * 2) for n in (1, 2))
    assert shapes - {whole} == {part}  # on automatic axes once for the whole, to find the types


def check_mesh(spec, key_heads, kind, order=2):
    given, mesh = on_mesh(key_heads), make_mesh(kind)
    heads = "model" if "model" in spec else None
    specs = dict.fromkeys(("query", "key", "value"), spec) | {"bias": (None, heads), "sinks": (heads,)}
    actual, text = run_on_mesh(given, mesh, specs, order)
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    (out, lse), gradient, _ = actual
    padded = (*spec, *(None,) * (4 - len(spec)))
    assert spec_of(out) == padded
    assert spec_of(lse) == padded[:3]
    assert spec_of(gradient["query"]) == padded
    oracle.assert_same_in_float64(actual, expected_on_mesh(key_heads, order=order))


def run_on_mesh(given, mesh, specs, order=2):
    """Values and derivatives of arrays that are sharded so, and the text of the compiled program."""
    with jax.set_mesh(mesh):
        shards = {name: placed(array, mesh, specs.get(name, ())) for name, array in given.items()}
        compiled = jax.jit(functools.partial(values_and_derivatives, order=order)).lower(shards).compile()
        return compiled(shards), compiled.as_text()


# Also where some of the devices have their share of the queries of another batch entry.
QUERY_SPECS = [P(None, ("data", "model")), P("data", "model"), P(None, "data", "model")]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("spec", "in_tiles", "order"),
    [(QUERY_SPECS[2], True, 1)]
    + [pytest.param(spec, in_tiles, 2, marks=pytest.mark.slow) for spec in QUERY_SPECS for in_tiles in (False, True)],
    ids=str,
)
def test_queries_stay_sharded_on_automatic_axes(spec, in_tiles, order, monkeypatch):
    if in_tiles:
        small_tiles(monkeypatch)
    length, mesh = 4 * 23, make_mesh(AxisType.Auto)
    given = on_mesh(2, 6, length, keys=50)
    batch, queries, heads = (*spec, None)[:3]
    specs = {"query": spec, "bias": (None, heads, queries), "sinks": (heads,)}
    specs |= dict.fromkeys(("key", "value"), (batch, None, heads))
    actual, text = run_on_mesh(given, mesh, specs, order)
    for collective in ("all-gather", "all-to-all", "collective-permute"):
        assert collective not in text
    assert not re.search(rf"\[(\d+,)*{length}[,\]]", text)  # no device has all queries, nor scores of all
    oracle.assert_same_in_float64(actual, expected_on_mesh(2, 6, length, keys=50, order=order))


def test_tiles_that_a_narrow_window_leaves_are_visited_on_several_devices_too():
    """All of them are less work than the share of a device in the whole. An exported program leaves shards to XLA."""
    mesh, texts = make_mesh(AxisType.Auto, (4, 2)), []
    x = jax.ShapeDtypeStruct((1, 16384, 1, 8), jnp.float32, sharding=NamedSharding(mesh, P(None, ("data", "model"))))
    for window in (300, 3000):
        f = jax.jit(lambda q, window=window: attend(q, q, q, local_window_size=window))
        texts.append(jax.export.export(f, platforms=["cpu"])(x).mlir_module())
    assert "dense<94> : tensor<i32>" in texts[0]  # of 1024
    assert "dense<128> : tensor<i32>" in texts[1]


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("shape", "shared", "kind"),
    [*on_both_meshes(AxisType.Explicit, (2, 4), "a"), *on_both_meshes(None, (4, 2), "b")],
    ids=str,
)
def test_heads_are_sharded_over_the_axes_that_share_key_heads_evenly(local, shape, shared, kind):
    mesh = make_mesh(kind, shape, ("a", "b"))
    given = on_mesh(2, heads=8)
    specs = {"query": (None, None, ("a", "b")), "bias": (None, ("a", "b"))}
    specs |= dict.fromkeys(("key", "value"), (None, None, shared))
    order = 1 if shared == "a" else 2
    actual, text = run_on_mesh(given, mesh, specs, order)
    part = ((4, 9, 4, 8), (4, 11, 1, 8), (4, 11, 1, 8))
    whole = ((4, 9, 8, 8), (4, 11, 2, 8), (4, 11, 2, 8))
    assert {shapes[:3] for shapes in local.shapes} - ({whole} if kind == AxisType.Auto else set()) == {part}
    if shared == "a":  # as here a device's heads are among those that it gets
        gathered = {tuple(map(int, m.split(","))) for m in re.findall(r"f64\[([\d,]+)\]\S* all-gather\(", text)}
        assert gathered
        assert all(math.prod(shape) <= math.prod(part[0]) for shape in gathered)
    with kernels.anew():
        expected = expected_on_mesh(2, heads=8, order=order)
    oracle.assert_same_in_float64(actual, expected)


@pytest.mark.usefixtures("x64")
@MESHES
def test_eager_calls_keep_the_sharding(kind):
    given, mesh = on_mesh(2), make_mesh(kind)
    expected = attend(**given, is_causal=True)
    with jax.set_mesh(mesh):
        shards = {name: placed(array, mesh, ("data",) if array.ndim == 4 else ()) for name, array in given.items()}
        out = attend(**shards, is_causal=True)
        assert spec_of(out)[0] == "data"
        over = jax.vmap(lambda q, k, v: attend(q, k, v, is_causal=True))(*(shards[k] for k in ("query", "key", "value")))
        assert spec_of(over)[0] == "data"
    oracle.assert_same_in_float64(out, expected)


@pytest.mark.usefixtures("x64")
@MESHES
def test_checkpoints_on_meshes(kind):
    (x, w), mesh = layer_inputs("float64"), make_mesh(kind, (2, 4))
    gradient = jax.grad(loss_of(jax.checkpoint(layer, policy=BOTH)), (0, 1))
    expected = jax.jit(gradient)(x, w)
    with jax.set_mesh(mesh):
        shards = placed(x, mesh, ("data", None, "model")), placed(w, mesh, ())
        assert runs(gradient, *shards) == 1
        actual = jax.jit(gradient)(*shards)
        assert spec_of(actual[0])[:3] == ("data", None, "model")
        over = {"mesh": mesh, "in_specs": (P("data"), P()), "out_specs": P("data")}
        outside = jax.checkpoint(jax.shard_map(layer, **over), policy=BOTH)
        inside = jax.shard_map(jax.checkpoint(layer, policy=BOTH), **over)
        shards = placed(x, mesh, ("data",)), shards[1]
        for f in (outside, inside):
            assert runs(jax.grad(loss_of(f), (0, 1)), *shards) == 1
    oracle.assert_same_in_float64(actual, expected)


@pytest.mark.parametrize(
    ("manual", "check_vma", "cut"),
    [
        (("data", "model"), True, True),
        pytest.param(("data",), False, False, marks=pytest.mark.slow),
        pytest.param(("data",), True, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.usefixtures("x64")
def test_inside_shard_map(check_vma, manual, cut, monkeypatch):
    if cut:
        small_tiles(monkeypatch)
        monkeypatch.setattr(xla, "BLOCK", (4, 4))
    given, mesh = on_mesh(2), make_mesh(AxisType.Auto)
    del given["bias"], given["sinks"]
    mask = random((9, 11))  # it does not vary as the others do

    def f(given):
        return values_and_derivatives(given, mask=mask)

    expected = jax.jit(f)({name: a[:2] for name, a in given.items()})
    repeated = {name: np.tile(a[:2], (2, 1, 1, 1)) for name, a in given.items()}  # dropout's seeds are those of a shard
    with jax.set_mesh(mesh):
        shards = {name: placed(array, mesh, ("data",)) for name, array in repeated.items()}
        mapped = jax.jit(jax.shard_map(f, in_specs=P("data"), out_specs=P("data"), axis_names=set(manual), check_vma=check_vma))
        assert "all-gather" not in mapped.lower(shards).compile().as_text()
        actual = mapped(shards)
    expected = jax.tree.map(lambda a: np.tile(a, (2,) + (1,) * (a.ndim - 1)), expected)
    oracle.assert_same_in_float64(actual, expected)


# What a wrong call says.

Q = np.zeros((2, 6, 4, 8), np.float32)
K = np.zeros((2, 7, 2, 8), np.float32)
BAD = {
    "query is a list": ({"query": [1.0]}, TypeError, ["query", "list"]),
    "query of integers": ({"query": Q.astype(np.int32)}, TypeError, ["query", "floating", "int32"]),
    "query of float8": ({"query": jnp.zeros(Q.shape, "float8_e5m2")}, TypeError, ["query", "float16", "float8_e5m2"]),
    "query of few axes": ({"query": Q[0, 0]}, ValueError, ["query", "[*batch, T, N, H]", "(4, 8)"]),
    "key of other axes": ({"key": K[0]}, ValueError, ["key", "[*batch, S, K, H]", "(7, 2, 8)", "(2, 6, 4, 8)"]),
    "key of another batch": ({"key": K[:1]}, ValueError, ["key", "batch", "(1, 7, 2, 8)", "(2, 6, 4, 8)"]),
    "key of another dtype": ({"key": K.astype(np.float16)}, TypeError, ["key", "float16", "float32"]),
    "value of another dtype": ({"value": K.astype(jnp.bfloat16)}, TypeError, ["value", "bfloat16", "float32"]),
    "key of another size": ({"key": K[..., :4]}, ValueError, ["key", "head size", "(2, 7, 2, 4)"]),
    "value of another length": ({"value": K[:, :3]}, ValueError, ["value", "(2, 3, 2, 8)", "(2, 7, 2, 8)"]),
    "value of other heads": ({"value": K[:, :, :1]}, ValueError, ["value", "(2, 7, 1, 8)", "(2, 7, 2, 8)"]),
    "heads that do not divide": ({"query": Q[:, :, :3]}, ValueError, ["query", "multiple", "3 and 2 heads"]),
    "no heads": ({"query": Q[:, :, :0]}, ValueError, ["query", "at least size 1", "(2, 6, 0, 8)"]),
    "empty heads": ({"query": Q[..., :0], "key": K[..., :0]}, ValueError, ["query", "at least size 1"]),
    "mask of floats": ({"mask": np.zeros((6, 7), np.float32)}, TypeError, ["mask", "boolean", "float32", "bias"]),
    "mask of another shape": ({"mask": np.zeros((6, 6), bool)}, ValueError, ["mask", "(6, 6)", "(2, 4, 6, 7)"]),
    "mask of too many axes": ({"mask": np.zeros((2, 2, 4, 6, 7), bool)}, ValueError, ["mask", "(2, 2, 4, 6, 7)"]),
    "bias of bools": ({"bias": np.zeros((6, 7), bool)}, TypeError, ["bias", "floating", "bool"]),
    "bias of key heads": ({"bias": np.zeros((2, 6, 7), np.float32)}, ValueError, ["bias", "(2, 6, 7)", "(2, 4, 6, 7)"]),
    "scale of an array": ({"scale": np.ones(2)}, TypeError, ["scale", "real number", "(2,)"]),
    "scale is complex": ({"scale": 1j}, TypeError, ["scale", "real number", "1j"]),
    "scale is a bool": ({"scale": True}, TypeError, ["scale", "real number", "True"]),
    "causal is a number": ({"is_causal": 1}, TypeError, ["is_causal", "True or False", "1"]),
    "lengths of floats": ({"query_seq_lengths": np.ones(2)}, TypeError, ["query_seq_lengths", "integers", "float"]),
    "lengths of another batch": (
        {"key_value_seq_lengths": np.ones(3, np.int32)},
        ValueError,
        ["key_value_seq_lengths", "[*batch]", "(2,)", "(3,)"],
    ),
    "offset of floats": ({"query_offset": 1.0}, TypeError, ["query_offset", "integers", "float"]),
    "offset of another batch": (
        {"query_offset": np.ones((2, 1), np.int32)},
        ValueError,
        ["query_offset", "one number", "[*batch]", "(2,)", "(2, 1)"],
    ),
    "infinite scale": ({"scale": 1e300}, ValueError, ["scale", "finite in float32", "1e+300"]),
    "scale is NaN": ({"scale": np.nan}, ValueError, ["scale", "finite in float32", "nan"]),
    "tiny soft cap": ({"logits_soft_cap": 1e-45}, ValueError, ["logits_soft_cap", "positive", "1e-45"]),
    "huge soft cap": ({"logits_soft_cap": 1e300}, ValueError, ["logits_soft_cap", "finite in float32", "1e+300"]),
    "key data of another shape": (
        {"dropout_rate": 0.5, "dropout_rng": np.zeros(3, np.uint32)},
        ValueError,
        ["dropout_rng", "key of jax.random", "(3,)"],
    ),
    "negative window": ({"local_window_size": -1}, ValueError, ["local_window_size", "negative", "None", "-1"]),
    "negative side": ({"local_window_size": (3, -2)}, ValueError, ["local_window_size", "negative", "(3, -2)"]),
    "three sides": ({"local_window_size": (1, 2, 3)}, ValueError, ["local_window_size", "pair", "(1, 2, 3)"]),
    "window of floats": ({"local_window_size": 1.5}, TypeError, ["local_window_size", "int", "1.5"]),
    "segments of keys alone": (
        {"key_value_segment_ids": np.zeros((2, 7), int)},
        ValueError,
        ["key_value_segment_ids", "query_segment_ids"],
    ),
    "segments of queries alone": (
        {"query_segment_ids": np.zeros((2, 6), np.int32)},
        ValueError,
        ["query_segment_ids", "key_value_segment_ids", "6 queries and 7 keys"],
    ),
    "segments of another shape": (
        {"query_segment_ids": np.zeros(6, np.int32), "key_value_segment_ids": np.zeros((2, 7), np.int32)},
        ValueError,
        ["query_segment_ids", "[*batch, T]", "(2, 6)", "(6,)"],
    ),
    "segments of floats": (
        {"query_segment_ids": np.zeros((2, 6)), "key_value_segment_ids": np.zeros((2, 7))},
        TypeError,
        ["query_segment_ids", "integers"],
    ),
    "soft cap of zero": ({"logits_soft_cap": 0.0}, ValueError, ["logits_soft_cap", "positive", "0.0"]),
    "soft cap is text": ({"logits_soft_cap": "big"}, TypeError, ["logits_soft_cap", "real number", "'big'"]),
    "sinks of key heads": ({"sinks": np.zeros(2, np.float32)}, ValueError, ["sinks", "[N] = (4,)", "(2,)"]),
    "sinks of integers": ({"sinks": np.zeros(4, np.int32)}, TypeError, ["sinks", "floating", "int32"]),
    "dropout of everything": ({"dropout_rate": 1.0}, ValueError, ["dropout_rate", "[0, 1)", "1.0"]),
    "dropout below zero": ({"dropout_rate": -0.1}, ValueError, ["dropout_rate", "[0, 1)", "-0.1"]),
    "broadcast is a number": ({"broadcast_dropout": 1}, TypeError, ["broadcast_dropout", "True or False", "1"]),
    "dropout without a key": ({"dropout_rate": 0.1}, ValueError, ["dropout_rng", "key", "None"]),
    "dropout with a number": ({"dropout_rate": 0.1, "dropout_rng": 3}, TypeError, ["dropout_rng", "key", "int"]),
    "implementation": ({"implementation": "cudnn"}, ValueError, ["implementation", "'xla'", "'cudnn'"]),
    "precision": ({"precision": "exact"}, ValueError, ["precision", "jax.lax.dot", "'exact'"]),
    "precision of a dtype": ({"precision": "bf16"}, ValueError, ["precision", "'bfloat16'", "'BF16_BF16_F32'", "'bf16'"]),
    "one precision of two": ({"precision": ("high", "low")}, ValueError, ["precision", "jax.lax.dot", "'low'"]),
    "precision is a number": ({"precision": 2}, TypeError, ["precision", "string", "2"]),
    "three precisions": ({"precision": ("high",) * 3}, ValueError, ["precision", "two", "('high', 'high', 'high')"]),
    "no precisions": ({"precision": (None, None)}, ValueError, ["precision", "two", "(None, None)"]),
    "rows of ones": ({"fully_masked_rows": "one"}, ValueError, ["fully_masked_rows", "'zero' or 'mean'", "'one'"]),
    "precision and algorithm": ({"precision": ("F32_F32_F32", "high")}, ValueError, ["precision", "two", "F32_F32_F32"]),
}


@pytest.mark.parametrize("kind", BAD)
def test_bad_arguments_are_named(kind):
    wrong, error, words = BAD[kind]
    arguments = {"query": Q, "key": K, "value": K} | wrong
    with pytest.raises(error) as raised:
        attend(**arguments)
    assert str(raised.value).startswith("dot_product_attention: ")
    for word in words:
        assert word in str(raised.value)


def test_what_must_be_concrete_says_so():
    for name in ("logits_soft_cap", "dropout_rate"):
        with pytest.raises(TypeError, match=f"{name} must be a concrete number, got a traced one"):
            jax.jit(lambda x, name=name: attend(Q, K, K, **{name: x}))(0.5)
    with pytest.raises(ValueError, match=r"dropout_rng must be one key, got shape \(2,\)"):
        attend(Q, K, K, dropout_rate=0.1, dropout_rng=jax.random.split(jax.random.key(0)))


@pytest.mark.parametrize("implementation", [None, "xla in tiles"])
@pytest.mark.parametrize("far", [2**31 - 1, *(pytest.param(far, marks=pytest.mark.slow) for far in (2**31, 2**40))])
def test_a_window_wider_than_the_sequences_rules_out_nothing(implementation, far, monkeypatch):
    if implementation:
        monkeypatch.setattr(xla, "ONE_TILE", 0)
        monkeypatch.setattr(xla, "BLOCK", (4, 4))
    near = {"local_window_size": (2, None)}
    pairs = [(far, {}), ((far, None), {}), ((None, far), {}), ((2, far), near)]
    each = [{"local_window_size": wide} for wide, _ in pairs] + [{}, near]
    *found, whole, narrow = jax.jit(lambda q: [attend(q, K + 1, K + 1, **options) for options in each])(Q)
    for (wide, options), actual in zip(pairs, found, strict=True):
        np.testing.assert_array_equal(actual, narrow if options else whole, err_msg=str(wide))


@pytest.mark.usefixtures("x64")
def test_lengths_and_segments_of_64_bits_are_whole():
    q, k = np.random.default_rng(0).standard_normal((2, 1, 6, 2, 8))
    lengths = np.array([2**32 + 1])
    oracle.assert_same_in_float64(attend(q, k, k, key_value_seq_lengths=lengths), attend(q, k, k))
    oracle.assert_same_in_float64(attend(q, k, k, query_seq_lengths=[6]), attend(q, k, k))
    ids = np.array([[0, 0, 0, 1, 1, 1]])
    expected = attend(q, k, k, query_segment_ids=ids.astype(np.int32))
    np.testing.assert_array_equal(attend(q, k, k, query_segment_ids=ids * 2**32), expected)
    with pytest.raises(TypeError, match="key_value_segment_ids must have the dtype of query_segment_ids"):
        attend(q, k, k, query_segment_ids=ids, key_value_segment_ids=ids.astype(np.int32))


def test_lengths_of_unsigned_integers_do_not_wrap():
    given = arrays(length=5, keys=5)
    unsigned, signed = (
        attend(**given, query_seq_lengths=lengths, key_value_seq_lengths=lengths)
        for lengths in (np.array([2**32 - 1, 3], np.uint32), np.array([5, 3], np.int32))
    )
    np.testing.assert_array_equal(unsigned, signed)


@pytest.mark.parametrize(("sink", "score"), [(50.0, 33.0), (50.0, 30.0), (5.0, -14.0)])
def test_a_sink_that_outweighs_the_scores_has_the_gradient_of_what_they_add(sink, score):
    """`d out / d sink = -w v`, where the weight `w` of the one key is below the rounding of lse."""
    q = np.full((1, 1, 1), score, np.float32)
    one = np.ones((1, 1, 1), np.float32)

    def f(sinks):
        return attend(q, one, one, sinks=sinks, scale=1.0)[0, 0, 0]

    sinks = np.full(1, sink, np.float32)
    expected = -np.exp(np.float64(score) - sink)
    # Units in the last place of the weight, of its score, and of the log-sum-exp that was saved.
    unit = (8 + 3 * abs(score - sink) + 8 * abs(score) + 8 * (abs(sink) + 1)) * oracle.EPS
    np.testing.assert_allclose(jax.grad(f)(sinks)[0], expected, rtol=unit, atol=0)
    np.testing.assert_allclose(jax.jvp(f, (sinks,), (np.ones(1, np.float32),))[1], expected, rtol=unit, atol=0)


def test_derivatives_of_a_forced_kernel_run_on_the_reference_where_there_is_none():
    q, wide = (jax.ShapeDtypeStruct((1, 64, 2, 64), dtype) for dtype in (jnp.bfloat16, jnp.float32))

    def f(q):
        return jnp.sum(attend(q, q, q, implementation="mosaic", precision="high").astype(jnp.float32))

    for array, expected in ((q, "mosaic"), (wide, "xla")):
        found = explain(jax.grad(f), array, platform="cuda")
        assert [(d.primitive, d.implementation) for d in found] == [
            ("dot_product_attention", "mosaic"),
            ("dot_product_attention_vjp", "mosaic"),
        ]
        found = explain(lambda q: jax.jvp(f, (q,), (q,)), array, platform="cuda")
        assert [(d.primitive, d.implementation) for d in found] == [
            ("dot_product_attention", "mosaic"),
            ("dot_product_attention_jvp", expected),
        ]
    with pytest.raises(
        NotImplementedError, match="dot_product_attention: implementation='mosaic' cannot run: it runs on cuda, not on cpu"
    ):
        explain(jax.grad(f), q, platform="cpu")


def test_numbers_may_be_arrays_without_axes():
    expected = attend(Q + 1, K + 1, K + 1, scale=0.5)
    for scale in (np.float32(0.5), np.asarray(0.5), jnp.float32(0.5), jnp.bfloat16(0.5)):
        np.testing.assert_array_equal(attend(Q + 1, K + 1, K + 1, scale=scale), expected)


def test_explain_shows_attention_and_its_derivatives():
    found = explain(jax.grad(lambda q: jnp.sum(attend(q, K, K))), Q, platform="cpu")
    assert [d.primitive for d in found] == ["dot_product_attention", "dot_product_attention_vjp"]
    found = explain(lambda q: jax.jvp(lambda q: attend(q, K, K), (q,), (q,)), Q, platform="cpu")
    assert [d.primitive for d in found] == ["dot_product_attention", "dot_product_attention_jvp"]


def test_a_window_in_which_all_is_seen():
    for queries, keys, left, right in itertools.product((1, 3, 6), (1, 2, 5), (None, 0, 2), (None, 0, 1)):
        row, col = np.arange(queries)[:, None], np.arange(keys)
        seen = (col >= row - (9 if left is None else left)) & (col <= row + (9 if right is None else right))
        assert xla.sees_all(queries, keys, left, right) == (np.all(seen.any(1)) and np.all(seen.any(0)))
