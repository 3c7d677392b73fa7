"""The Jensen-Shannon divergence: to float64's, on the reference and on emulated kernels."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax.ops.divergence import mosaic_sm90

from ..support import cases, kernels, oracle
from ..support.divergence import calls
from ..support.divergence.calls import DERIVED, DTYPES, both, in_turn, operands, shared
from ..support.divergence.cases import OPTIONS, PAIRS, options_of, pair_of, pairs
from ..support.divergence.oracle import js_divergence as truth
from ..support.emulator import emulating
from ..support.meshes import make_mesh

FORWARD, BACKWARD, STATE = "js_divergence_forward_mosaic", "js_divergence_vjp_mosaic", "logsumexp_forward_mosaic"
SUMS = "js_divergence_sums_mosaic"
divergence_and_gradients = functools.partial(calls.divergence_and_gradients, jaxsoftmax.js_divergence)
PLAIN = (-1, None, None, None)  # axis, mask and scales


def check(weight, *arguments, **options):
    """Holds results to the truth; `options` are those of the call, and the last argument may wrap it."""
    *arguments, run = arguments
    run = functools.partial(run, weight=weight, **options)
    calls.check(functools.partial(truth, weight=weight), *arguments, run)


@pytest.mark.parametrize("weight", [0.5, 0.2, 0, 1, 1e-3])
@pytest.mark.parametrize(("dtype", "y_dtype"), [("float32", "float32"), ("bfloat16", "float16")])
@pytest.mark.parametrize("options", OPTIONS)
def test_divergences_and_gradients_of_the_reference(options, dtype, y_dtype, weight):
    x, y = pairs(PAIRS if options in ("plain", "where", "rows") else PAIRS[:7], (5, 300), dtype, y_dtype)
    check(weight, x, y, -1, *options_of(options, x.shape), divergence_and_gradients)


@pytest.mark.parametrize(("options", "dtype", "y_dtype", "cols"), in_turn())
def test_divergences_and_gradients_of_kernels(options, dtype, y_dtype, cols):
    kinds = PAIRS if options in ("plain", "where", "rows") else PAIRS[:7]
    x, y = pairs(kinds if cols < 5000 else ["one-hot", "near"], (1, cols), dtype, y_dtype)
    weight = 0.5 if dtype == y_dtype else 0.3
    with emulating() as ran:
        check(weight, x, y, -1, *options_of(options, x.shape), divergence_and_gradients, implementation="mosaic")
    assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize(
    ("options", "cols", "width"), [("scales", 7, 24), ("where", 300, 24), ("plain", 3000, 40), ("plain", 9000, 16)]
)
def test_kernels_along_another_axis(options, cols, width):
    x, y = pair_of("wide", (2 if cols < 3000 else 1, cols, width), "bfloat16", "float32")
    with emulating() as ran:
        check(0.3, x, y, 1, *options_of(options, x.shape, 1), divergence_and_gradients, implementation="mosaic")
    assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize("options", ["plain", "scales"])
def test_rows_that_no_cluster_holds(options):
    x, y = pair_of("wide", (1, 140_001), "float32", "float32")
    with emulating() as ran:
        check(0.3, x, y, -1, *options_of(options, x.shape), divergence_and_gradients, implementation="mosaic")
    assert set(ran) == {STATE, SUMS, BACKWARD}


@pytest.mark.parametrize(
    ("options", "cols", "dtype"), [("scales", 20_500, "bfloat16"), ("rows", 9001, "float32"), ("where", 9001, "float32")]
)
def test_passes_over_rows_that_are_read_in_a_loop(options, cols, dtype, monkeypatch):
    monkeypatch.setattr(mosaic_sm90, "_holds", lambda plan: False)
    x, y = pairs(["one-hot", "near"], (1, cols), dtype, dtype)
    with emulating() as ran:
        check(0.3, x, y, -1, *options_of(options, x.shape), divergence_and_gradients, implementation="mosaic")
    assert set(ran) == {STATE, SUMS, BACKWARD}


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("weight", [0.5, 0.3, 1e-40])
@pytest.mark.parametrize("cols", [64, 5001])
def test_equal_softmaxes_have_none(cols, weight, implementation):
    x, _ = pair_of("wide", (3, cols), "float32", "float32")
    with emulating():
        f = functools.partial(jaxsoftmax.js_divergence, x, weight=weight, implementation=implementation)
        np.testing.assert_array_equal(f(x), 0)
        other = np.asarray(f(np.where(np.arange(cols) < cols // 2, -np.inf, x)))
    assert np.all(np.isfinite(other))
    assert np.all(other >= 0)


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("weight", [0.5, 1e-40])
def test_the_lowest_numbers_weigh_nothing(weight, implementation):
    """Values and gradients are those of -inf in their places, and finite, whatever the cotangent."""
    x, y = np.float32([[0, 1, 2, 0], [-200, 0, 1, 3]]), np.float32([[0, 0.5, 1, 3], [0, -200, 1, 3]])

    def both(least):
        def f(x, y):
            x = x.at[0, 2].set(least)
            return jaxsoftmax.js_divergence(x, y, weight=weight, implementation=implementation)

        value, pull = jax.vjp(f, jnp.asarray(x), jnp.asarray(y))
        return value, *pull(jnp.full_like(value, 1e4))

    with emulating():
        found, expected = both(np.finfo(np.float32).min), both(-np.inf)
    for actual, wanted in zip(found, expected, strict=True):
        assert np.all(np.isfinite(actual))
        np.testing.assert_allclose(actual, wanted, rtol=1e-6, atol=1e-6)


def test_softmaxes_near_each_other():
    """The reference loses nothing to cancellation: divergences are near 1e-7."""
    x, y = pair_of("near", (20, 300), "float32", "float32")
    expected = truth(x, y).value.value
    assert np.all(expected < 1e-6)
    np.testing.assert_allclose(jaxsoftmax.js_divergence(x, y, implementation="xla"), expected, rtol=0.01)


# Special rows.

INF, NAN = np.inf, np.nan


def finite_divergence(p, q):
    """Computes the divergence of probabilities, for a weight of 0.5."""
    p, q = np.float64(p), np.float64(q)
    return sum(0.5 * of * math.log(of / (0.5 * (a + b))) for a, b in zip(p, q, strict=True) for of in (a, b) if of > 0)


SPECIAL = {
    "one class": ([2.0], [3.0], 0),
    "-inf in both": ([0, 1, -INF], [1, 2, -INF], 0),
    "-inf in p": ([0, -INF, -INF], [0, 0, -INF], finite_divergence([1, 0], [0.5, 0.5])),
    "-inf in q": ([0, 0, 0], [0, -INF, 0], finite_divergence([1 / 3] * 3, [0.5, 0, 0.5])),
    "no class in both": ([0, -INF], [-INF, 0], math.log(2)),
    "a weight of 0 where q is 0": ([0, 0, -1e5], [3, 3, -INF], 0),
    "weights of 0 far apart": ([0, -1e5, -3e38], [0, -3e38, -1e5], 0),
    "all -inf in p": ([-INF, -INF], [0, 0], NAN),
    "all -inf in q": ([0, 0], [-INF, -INF], NAN),
    "all -inf in both": ([-INF, -INF], [-INF, -INF], NAN),
    "+inf in p": ([INF, 0], [0, 0], NAN),
    "+inf in q where p is 0": ([0, -INF], [0, INF], NAN),
    "NaN in p": ([NAN, 0], [0, 0], NAN),
    "NaN in q where p is 0": ([0, -INF], [0, NAN], NAN),
}
# Special rows at the ends of wide ones, or alone.
PLACES = {"alone": 0, "in a warp": 64, "in a block": 1024, "in a cluster": 33000, "in passes": 140_000}


@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
@pytest.mark.parametrize("place", PLACES)
def test_special_rows(place, implementation):
    if implementation == "mosaic" and place == "alone":
        return
    filler = PLACES[place]
    width = max(len(x) for x, _, _ in SPECIAL.values()) + filler
    x, y = np.full((2, len(SPECIAL), width), -INF, np.float32)
    for row, (p, q, _) in enumerate(SPECIAL.values()):
        x[row, :1], y[row, :1] = p[0], q[0]
        x[row, width - len(p) + 1 :], y[row, width - len(p) + 1 :] = p[1:], q[1:]
    f = functools.partial(jaxsoftmax.js_divergence, implementation=implementation)
    with emulating():
        value, pull = jax.vjp(f, x, y)
        gradients = list(map(np.asarray, pull(jnp.ones_like(value))))
    np.testing.assert_allclose(value, [expected for *_, expected in SPECIAL.values()], atol=1e-6)
    for row, (name, (_, _, expected)) in enumerate(SPECIAL.items()):
        for of, gradient in zip((x, y), gradients, strict=True):
            if np.isfinite(expected):
                assert np.all(np.isfinite(gradient[row])), name
                assert np.all(gradient[row][np.isneginf(of[row])] == 0), name
            else:
                assert np.any(np.isnan(gradient[row])), name


@pytest.mark.parametrize("weight", [0, 0.5, 1])
def test_rows_in_which_nothing_takes_part(weight):
    x, y = pair_of("normal", (3, 4), "float32", "float32")
    x[1], y[2] = NAN, NAN
    for where in (np.array([True, False, False]), np.array([[True] * 4, [False] * 4, [False] * 4])):
        with jax.debug_nans(True):
            f = functools.partial(loss, where=where, weight=weight)
            value, gradients = jax.value_and_grad(f, (0, 1))(x, y)
        np.testing.assert_allclose(value, jaxsoftmax.js_divergence(x[0], y[0], weight=weight), rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(gradients)[:, 1:], 0)
    assert np.isnan(jaxsoftmax.js_divergence(x, y, weight=weight)[1])
    np.testing.assert_array_equal(jaxsoftmax.js_divergence(np.ones((2, 0)), np.ones((2, 0))), [0, 0])


def test_rounding_below_0_is_cut_off():
    x, _ = pair_of("normal", (2000, 40), "float32", "float32")
    for weight in (0.3, 0.5):
        values = np.asarray(jaxsoftmax.js_divergence(x, x + np.float32(1e-5), weight=weight))
        assert np.min(values) == 0
        assert np.max(values) < 1e-13


# Derivatives of any order.


def plain(x, y, scale, y_scale, weight=0.3):
    log_p, log_q = (jax.nn.log_softmax(each * jnp.expand_dims(of, -1)) for each, of in ((x, scale), (y, y_scale)))
    log_m = jnp.logaddexp(log_p + math.log(weight), log_q + math.log(1 - weight))
    terms = (
        share * jnp.where(jnp.isneginf(log), 0, jnp.exp(log) * (log - log_m))
        for share, log in ((weight, log_p), (1 - weight, log_q))
    )
    return jnp.sum(sum(terms), -1)


def ours(x, y, scale, y_scale, **options):
    return jaxsoftmax.js_divergence(x, y, weight=0.3, p_scale=scale, q_scale=y_scale, **options)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", DERIVED)
def test_transformations(name):
    found, expected = (jax.jit(DERIVED[name](f))(*operands()) for f in (ours, plain))
    oracle.assert_same_in_float64(found, expected)


@pytest.mark.usefixtures("x64")
def test_dtypes_of_results_and_gradients():
    for dtype, y_dtype, kind in (("bfloat16", "float16", "float32"), ("float32", "float64", "float64")):
        x, y = pair_of("normal", (2, 5), dtype, y_dtype)
        value, pull = jax.vjp(jaxsoftmax.js_divergence, x, y)
        assert [value.dtype, *(each.dtype for each in pull(value))] == [kind, dtype, y_dtype]


# Classes that devices share.

NAMES = ["values and gradients", "second derivatives", "gradients by q"]


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    "derived", [lambda f: functools.partial(both, f), DERIVED["second derivatives"], DERIVED["gradients by q"]], ids=NAMES
)
def test_classes_in_a_shard_map(check_vma, derived):
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        specs = P("data", "model"), P("data", "model"), P("data"), P("data")
        sharded = functools.partial(ours, axis_name="model")
        f = jax.shard_map(sharded, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
        found = jax.jit(derived(f))(*shared())
    oracle.assert_same_in_float64(found, jax.jit(derived(ours))(*shared()))


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", ["gradients", "second derivatives"])
def test_classes_that_are_sharded(kind, name):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        specs = P("data", "model"), P("data", "model"), P("data"), P("data")
        given = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(shared(), specs, strict=True)]
        found = jax.device_get(jax.jit(DERIVED[name](ours))(*given))
    oracle.assert_same_in_float64(found, jax.jit(DERIVED[name](ours))(*shared()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("where", [None, "classes", "rows"])
@pytest.mark.parametrize(("kind", "classes"), [(AxisType.Auto, 64), (AxisType.Auto, 63), (AxisType.Explicit, 64)], ids=str)
def test_states_of_parts_are_merged(kind, classes, where):
    """An implementation computes the gradients of parts, also where the last device has fewer classes."""
    calls.check_parts(ours, kind, classes, where)


def test_arrays_that_explicit_axes_shard_differently():
    mesh = make_mesh(AxisType.Explicit)
    x, y = jax.random.normal(jax.random.key(0), (2, 4, 8, 32))

    def both(x, y):
        return jaxsoftmax.js_divergence(x, y), jax.grad(lambda x, y: jnp.sum(jaxsoftmax.js_divergence(x, y)), (0, 1))(x, y)

    expected, names = both(x, y), mesh.axis_names
    specs = P(names[0], None, names[1]), P(None, names[0], names[1])
    with jax.set_mesh(mesh):
        given = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip((x, y), specs, strict=True)]
        found = jax.jit(both)(*given)
        assert [jax.typeof(each).sharding.spec for each in found[1]] == [*specs]
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)


# Arguments, and what runs.


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [(1.5, ValueError, "js_divergence: weight must be from 0 to 1"), ("a", TypeError, "js_divergence: weight must be")],
)
def test_bad_weights(weight, error, words):
    with pytest.raises(error, match=words):
        jaxsoftmax.js_divergence(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), weight=weight)


def loss(x, y, **options):
    return jnp.sum(jaxsoftmax.js_divergence(x, y, **options))


def test_kernels_run_unless_they_cannot():
    x, y = (jax.ShapeDtypeStruct((64, 50257), dtype) for dtype in ("bfloat16", "float32"))
    for argnums in (0, 1, (0, 1)):
        decisions = jaxsoftmax.explain(jax.value_and_grad(functools.partial(loss, p_scale=0.5), argnums), x, y, gpu="h100")
        assert [decision.primitive for decision in decisions] == ["js_divergence", "js_divergence_vjp"]
        cases.assert_all_run_on("mosaic", decisions)
    (decision,) = jaxsoftmax.explain(loss, x, y, gpu="a100")
    assert decision.implementation == "xla"


def test_kernels_run_in_a_shard_map():
    x, y = (jax.ShapeDtypeStruct((64, 8192), dtype) for dtype in ("bfloat16", "float32"))
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        f = functools.partial(jaxsoftmax.js_divergence, axis_name="model")
        sharded = jax.shard_map(f, in_specs=(P("data", "model"),) * 2, out_specs=P("data"))
        gradients = jax.grad(lambda x, y: jnp.sum(sharded(x, y)), (0, 1))
        decisions = jaxsoftmax.explain(gradients, x, y, gpu="h100")
    assert [decision.primitive for decision in decisions] == ["logsumexp", "logsumexp", "js_divergence_vjp"]
    cases.assert_all_run_on("mosaic", decisions)


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    [
        ((64, 8192), "bfloat16", "a block a row, 128 threads a block, rows in shared memory"),
        ((64, 151936), "bfloat16", "a cluster of 8 blocks a row, 256 threads a block, rows in shared memory"),
        ((64, 131072), "float32", "a cluster of 16 blocks a row, 256 threads a block, rows in shared memory"),
        (
            (64, 151936),
            "float32",
            "128 threads a block, rows read in a loop; both arrays are read again: a cluster of 4 blocks a row",
        ),
        (
            (64, 2**20),
            "bfloat16",
            "256 threads a block, rows read in a loop; both arrays are read again: a cluster of 8 blocks a row",
        ),
        ((4, 2**20, 64), "float32", "rows read in a loop; both arrays are read again: a cluster of 16 blocks a tile"),
    ],
)
def test_rows_are_held_if_a_cluster_can(shape, dtype, words):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    f = functools.partial(loss, axis=1)
    decisions = jaxsoftmax.explain(jax.value_and_grad(f, (0, 1)), x, x, gpu="h200")
    cases.assert_all_run_on("mosaic", decisions)
    assert words in decisions[0].plan
    assert "XLA" not in decisions[1].plan


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("by", [(), 0, 1, (0, 1)])
@pytest.mark.parametrize("shape", [(64, 37), (8, 1024), (3, 50257), (2, 2**20 + 1)])
def test_each_call_is_one_kernel_forward_and_one_backward(shape, by):
    x, y = (jax.ShapeDtypeStruct(shape, dtype) for dtype in ("bfloat16", "float32"))
    f = functools.partial(loss, implementation="mosaic")
    forward = [STATE, STATE, SUMS] if shape[1] > 2**20 else [FORWARD]
    kernels.lowered_for_cuda(f if by == () else jax.value_and_grad(f, by), x, y, kernels=forward + [BACKWARD] * (by != ()))


# On a GPU.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "y_dtype"), DTYPES)
@pytest.mark.parametrize("cols", [2, 37, 130, 1000, 2000, 4096, 9001, 32768, 50257, 151936, 2**20 + 1])
def test_native_divergences_and_gradients(cols, dtype, y_dtype):
    for k, options in enumerate(OPTIONS):
        kinds = PAIRS if options in ("plain", "where", "rows") else PAIRS[:7]
        x, y = pairs(kinds if cols < 2**20 else ["one-hot", "near"], (5 if cols < 2**20 else 1, cols), dtype, y_dtype)

        def run(x, y, cotangent, *arguments, **more):
            return jax.jit(lambda *arrays: divergence_and_gradients(*arrays, *arguments, **more))(x, y, cotangent)

        check((0.5, 0.3)[k % 2], x, y, -1, *options_of(options, x.shape), run, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(3, 7, 130), (2, 300, 24), (1, 5000, 256), (1, 40000, 64)], ids=str)
def test_native_rows_along_another_axis(shape):
    for k, options in enumerate(OPTIONS):
        x, y = pair_of("wide", shape, *DTYPES[k % 4])
        check(0.3, x, y, 1, *options_of(options, x.shape, 1), divergence_and_gradients, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("implementation", ["xla", "mosaic"])
def test_native_equal_softmaxes_have_none(implementation):
    x, _ = pair_of("wide", (3, 5001), "bfloat16", "bfloat16")
    np.testing.assert_array_equal(jaxsoftmax.js_divergence(x, x, weight=0.3, implementation=implementation), 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cols", [300, 5001, 50257])
def test_native_rows_have_the_same_bits_wherever_they_are(cols):
    x, y = pair_of("wide", (1, cols), "bfloat16", "bfloat16")
    f = jax.jit(functools.partial(divergence_and_gradients, implementation="mosaic"), static_argnums=(3, 4, 5, 6))
    alone = f(x, y, np.ones(1, np.float32), *PLAIN)
    many = f(*(np.tile(each, (7, 1)) for each in (x, y)), np.ones(7, np.float32), *PLAIN)
    for one, several in zip(alone, many, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(one, several.shape), several)
