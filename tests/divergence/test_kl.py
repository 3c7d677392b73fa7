"""The Kullback-Leibler divergence: to float64's, on the reference and on emulated kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

from ..support import cases, kernels, oracle
from ..support.divergence import calls
from ..support.divergence.calls import DERIVED, DTYPES, both, in_turn, operands, shared
from ..support.divergence.cases import OPTIONS, PAIRS, options_of, pair_of, pairs
from ..support.divergence.oracle import kl_divergence as truth
from ..support.emulator import emulating
from ..support.meshes import make_mesh

FORWARD, BACKWARD = "kl_divergence_forward_mosaic", "kl_divergence_vjp_mosaic"
divergence_and_gradients = functools.partial(calls.divergence_and_gradients, jaxsoftmax.kl_divergence)
check = functools.partial(calls.check, truth)


@pytest.mark.parametrize(("dtype", "y_dtype"), DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_divergences_and_gradients_of_the_reference(options, dtype, y_dtype):
    kinds = [kind for kind in PAIRS if options in ("plain", "where", "rows") or "inf" not in kind]
    x, y = pairs(kinds, (5, 300), dtype, y_dtype)
    check(x, y, -1, *options_of(options, x.shape), divergence_and_gradients)


@pytest.mark.parametrize(("options", "dtype", "y_dtype", "cols"), in_turn())
def test_divergences_and_gradients_of_kernels(options, dtype, y_dtype, cols):
    kinds = [kind for kind in PAIRS if options in ("plain", "where", "rows") or "inf" not in kind]
    x, y = pairs(kinds if cols < 5000 else ["one-hot", "near"], (1, cols), dtype, y_dtype)
    with emulating() as ran:
        check(x, y, -1, *options_of(options, x.shape), functools.partial(divergence_and_gradients, implementation="mosaic"))
    assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize(
    ("options", "cols", "width"), [("scales", 7, 24), ("where", 300, 24), ("plain", 3000, 40), ("plain", 20000, 16)]
)
def test_kernels_along_another_axis(options, cols, width):
    x, y = pair_of("wide", (2 if cols < 3000 else 1, cols, width), "bfloat16", "float32")
    with emulating() as ran:
        check(x, y, 1, *options_of(options, x.shape, 1), functools.partial(divergence_and_gradients, implementation="mosaic"))
    assert set(ran) == {FORWARD, BACKWARD}


# Special rows.

INF, NAN = np.inf, np.nan
SPECIAL = {
    "one class": ([2.0], [3.0], 0),
    "-inf in both": ([0, 1, -INF], [1, 2, -INF], 0),
    "-inf in p": ([0, -INF, -INF], [0, 0, -INF], np.log(2)),
    "-inf in q": ([0, 1, 2], [0, -INF, 2], INF),
    "a weight of 0 where q is 0": ([0, 0, -1e5], [3, 3, -INF], 0),
    "all -inf in p": ([-INF, -INF], [0, 0], NAN),
    "all -inf in q": ([0, 0], [-INF, -INF], NAN),
    "all -inf in both": ([-INF, -INF], [-INF, -INF], NAN),
    "+inf in p": ([INF, 0], [0, 0], NAN),
    "+inf in q where p is 0": ([0, -INF], [0, INF], NAN),
    "NaN in p": ([NAN, 0], [0, 0], NAN),
    "NaN in q where p is 0": ([0, -INF], [0, NAN], NAN),
}
# Special rows at the ends of wide ones, or alone.
PLACES = {"alone": 0, "in a warp": 64, "in a block": 1024, "in a loop": 33000}


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
    f = functools.partial(jaxsoftmax.kl_divergence, implementation=implementation)
    with emulating():
        value, pull = jax.vjp(f, x, y)
        by_x, by_y = map(np.asarray, pull(jnp.ones_like(value)))
    np.testing.assert_allclose(value, [expected for *_, expected in SPECIAL.values()], atol=1e-6)
    for row, (name, (_, _, expected)) in enumerate(SPECIAL.items()):
        if np.isfinite(expected):
            assert np.all(np.isfinite(by_x[row])), name
            assert np.all(by_x[row][np.isneginf(x[row])] == 0), name
        else:
            assert np.any(np.isnan(by_x[row])), name
        assert np.all(np.isfinite(by_y[row])) or np.isnan(expected), name


def test_rows_in_which_nothing_takes_part():
    x, y = pair_of("normal", (3, 4), "float32", "float32")
    x[1], y[2] = NAN, NAN
    for where in (np.array([True, False, False]), np.array([[True] * 4, [False] * 4, [False] * 4])):
        with jax.debug_nans(True):
            value, gradients = jax.value_and_grad(functools.partial(loss, where=where), (0, 1))(x, y)
        np.testing.assert_allclose(value, jaxsoftmax.kl_divergence(x[0], y[0]), rtol=1e-6)
        np.testing.assert_array_equal(np.asarray(gradients)[:, 1:], 0)
    np.testing.assert_array_equal(jaxsoftmax.kl_divergence(np.ones((2, 0)), np.ones((2, 0))), [0, 0])
    assert jaxsoftmax.kl_divergence(np.ones((0, 5, 2)), np.ones((0, 5, 2)), (1, 2)).shape == (0,)


def test_several_axes_and_no_axis():
    x, y = pair_of("normal", (3, 4, 5), "float32", "float32")
    expected = jaxsoftmax.kl_divergence(*(np.moveaxis(each, 1, 0).reshape(4, 15) for each in (x, y)))
    np.testing.assert_allclose(jaxsoftmax.kl_divergence(x, y, (0, 2)), expected, rtol=1e-5)
    np.testing.assert_allclose(jaxsoftmax.kl_divergence(x, y, None), jaxsoftmax.kl_divergence(x.ravel(), y.ravel()), rtol=1e-5)


def test_rounding_below_0_is_cut_off_and_derivatives_are_not():
    x, other = pair_of("normal", (500, 40), "float32", "float32")
    y = x + np.float32(1e-5) * other
    values = np.asarray(jaxsoftmax.kl_divergence(x, y))
    assert np.min(values) >= 0
    is_cut = values == 0
    assert np.any(is_cut)
    gradient = np.asarray(jax.grad(lambda y: jnp.sum(jaxsoftmax.kl_divergence(x, y)))(y))
    assert np.all(np.any(gradient[is_cut] != 0, 1))


# Derivatives of any order.


def plain(x, y, scale, y_scale):
    log_p, log_q = (jax.nn.log_softmax(each * jnp.expand_dims(of, -1)) for each, of in ((x, scale), (y, y_scale)))
    return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)


def ours(x, y, scale, y_scale, **options):
    return jaxsoftmax.kl_divergence(x, y, p_scale=scale, q_scale=y_scale, **options)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", DERIVED)
def test_transformations(name):
    found, expected = (jax.jit(DERIVED[name](f))(*operands()) for f in (ours, plain))
    oracle.assert_same_in_float64(found, expected)


@pytest.mark.usefixtures("x64")
def test_dtypes_of_results_and_gradients():
    for dtype, y_dtype, kind in (("bfloat16", "float16", "float32"), ("float32", "float64", "float64")):
        x, y = pair_of("normal", (2, 5), dtype, y_dtype)
        value, pull = jax.vjp(jaxsoftmax.kl_divergence, x, y)
        assert [value.dtype, *(each.dtype for each in pull(value))] == [kind, dtype, y_dtype]


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_rows(data):
    """Rows of a few numbers, infinite ones among them, are to float64's, or infinite or NaN as the formula is."""
    cols = data.draw(st.integers(1, 6))
    number = st.one_of(st.floats(-50, 50, width=32), st.sampled_from([-INF, 0.0, 1e4, -1e4]))
    x, y = (np.array(data.draw(st.lists(number, min_size=cols, max_size=cols)), np.float32)[None] for _ in range(2))
    scales = [data.draw(st.sampled_from([None, 0.0, -1.0, 0.5])) for _ in range(2)]
    value = np.asarray(jaxsoftmax.kl_divergence(x, y, p_scale=scales[0], q_scale=scales[1]))
    expected = truth(x, y, scale=scales[0], y_scale=scales[1]).value
    if np.any(np.isinf(expected.value)):
        scaled = x if scales[0] is None else x * np.float32(scales[0])
        if np.min(scaled - np.max(scaled)) < -80:  # a weight that float32 does not hold
            return
    assert oracle.error(value, expected) <= 1


# Classes that devices share.


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_classes_in_a_shard_map(check_vma):
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        specs = P("data", "model"), P("data", "model"), P("data"), P("data")
        sharded = functools.partial(ours, axis_name="model")
        f = jax.shard_map(sharded, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
        found = jax.jit(functools.partial(both, f))(*shared())
    oracle.assert_same_in_float64(found, jax.jit(functools.partial(both, ours))(*shared()))


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_classes_that_are_sharded(kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        specs = P("data", "model"), P("data", "model"), P("data"), P("data")
        given = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(shared(), specs, strict=True)]
        found = jax.device_get(jax.jit(functools.partial(both, ours))(*given))
    oracle.assert_same_in_float64(found, jax.jit(functools.partial(both, ours))(*shared()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("where", [None, "classes", "rows"])
@pytest.mark.parametrize(("kind", "classes"), [(AxisType.Auto, 64), (AxisType.Auto, 63), (AxisType.Explicit, 64)], ids=str)
def test_parts_of_rows_are_merged(kind, classes, where):
    """An implementation computes the parts, also where the last device has fewer classes."""
    calls.check_parts(ours, kind, classes, where)


# Arguments, and what runs.

X = np.zeros((2, 3), np.float32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"q_logits": np.zeros((2, 4), np.float32)}, ValueError, r"must have the same shape, got \(2, 3\) and \(2, 4\)"),
        ({"q_logits": np.zeros((2, 3), int)}, TypeError, "kl_divergence: q_logits must be floating"),
        ({"p_logits": np.zeros((2, 3), int)}, TypeError, "kl_divergence: p_logits must be floating"),
        ({"p_scale": np.ones(3)}, ValueError, r"p_scale must be a scalar, or broadcast to rows of shape \(2,\)"),
        ({"q_scale": True}, TypeError, "q_scale must be a real number, or one for each row, got bool"),
        ({"where": np.ones((2, 3))}, TypeError, "kl_divergence: where must be boolean"),
        ({"axis": ()}, ValueError, r"kl_divergence: axis must name an axis of logits, got \(\)"),
        ({"implementation": "cuda"}, ValueError, "kl_divergence: implementation must be None or one of"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        jaxsoftmax.kl_divergence(**{"p_logits": X, "q_logits": X} | arguments)


def loss(x, y, **options):
    return jnp.sum(jaxsoftmax.kl_divergence(x, y, **options))


def test_kernels_run_unless_they_cannot():
    x, y = (jax.ShapeDtypeStruct((64, 50257), dtype) for dtype in ("bfloat16", "float32"))
    for argnums in (0, 1, (0, 1)):
        decisions = jaxsoftmax.explain(jax.value_and_grad(functools.partial(loss, p_scale=0.5), argnums), x, y, gpu="h100")
        assert [decision.primitive for decision in decisions] == ["kl_divergence", "kl_divergence_vjp"]
        cases.assert_all_run_on("mosaic", decisions)
    (decision,) = jaxsoftmax.explain(loss, x, y, gpu="a100")
    assert decision.implementation == "xla"
    long = jax.ShapeDtypeStruct((1, 2**20), jnp.float32)
    masked = functools.partial(jaxsoftmax.explain, lambda x, y, where: loss(x, y, where=where), gpu="h100")
    (decision,) = masked(long, long, long.update(dtype=bool))
    assert ("mosaic", "no kernel computes the divergence for rows of 1048576 entries") in decision.refusals


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("by", [(), 0, 1, (0, 1)])
@pytest.mark.parametrize("shape", [(64, 37), (8, 1024), (3, 50257), (2, 2**20 + 1)])
def test_each_call_is_one_kernel_forward_and_one_backward(shape, by):
    x, y = (jax.ShapeDtypeStruct(shape, dtype) for dtype in ("bfloat16", "float32"))
    f = functools.partial(loss, implementation="mosaic")
    names = [FORWARD] if by == () else [FORWARD, BACKWARD]
    kernels.lowered_for_cuda(f if by == () else jax.value_and_grad(f, by), x, y, kernels=names)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "y_dtype"), DTYPES)
@pytest.mark.parametrize("cols", [2, 37, 130, 1000, 2000, 2047, 3000, 4095, 4096, 9001, 32768, 50257, 151936, 2**20 + 1])
def test_native_divergences_and_gradients(cols, dtype, y_dtype):
    for options in OPTIONS:
        kinds = [kind for kind in PAIRS if options in ("plain", "where", "rows") or "inf" not in kind]
        x, y = pairs(kinds if cols < 2**20 else ["one-hot", "near"], (5 if cols < 2**20 else 1, cols), dtype, y_dtype)
        where, *scales = options_of(options, x.shape)
        if options == "where" and cols > (2**17 if "float32" in (dtype, y_dtype) else 2**20):
            continue  # only the grid could hold such rows
        run = functools.partial(divergence_and_gradients, implementation="mosaic")
        check(
            x,
            y,
            -1,
            where,
            *scales,
            lambda x, y, g, axis, *o, run=run: jax.jit(lambda x, y, g: run(x, y, g, axis, *o))(x, y, g),
        )


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(3, 7, 130), (2, 300, 24), (1, 5000, 256), (1, 40000, 64)], ids=str)
def test_native_rows_along_another_axis(shape):
    for k, options in enumerate(OPTIONS):
        x, y = pair_of("wide", shape, *DTYPES[k % 4])
        run = functools.partial(divergence_and_gradients, implementation="mosaic")
        check(x, y, 1, *options_of(options, x.shape, 1), run)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cols", [300, 5001, 50257])
def test_native_rows_have_the_same_bits_wherever_they_are(cols):
    x, y = pair_of("wide", (1, cols), "bfloat16", "bfloat16")
    f = jax.jit(functools.partial(divergence_and_gradients, implementation="mosaic"), static_argnums=(3, 4, 5, 6))
    alone = f(x, y, np.ones(1, np.float32), -1, None, None, None)
    many = f(*(np.tile(each, (7, 1)) for each in (x, y)), np.ones(7, np.float32), -1, None, None, None)
    for one, several in zip(alone, many, strict=True):
        np.testing.assert_array_equal(np.broadcast_to(one, several.shape), several)
