"""The Jensen-Shannon divergence: to float64's formula, and its derivatives."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

from ..support import cases, oracle
from ..support.divergence.cases import OPTIONS, PAIRS, options_of, pairs
from ..support.divergence.oracle import js_divergence as truth
from ..support.meshes import make_mesh


@pytest.mark.parametrize("weight", [0.5, 0.2, 0, 1])
@pytest.mark.parametrize(("dtype", "y_dtype"), [("float32", "float32"), ("bfloat16", "float16")])
@pytest.mark.parametrize("options", OPTIONS)
def test_divergences_are_within_the_budget(options, dtype, y_dtype, weight):
    kinds = [kind for kind in PAIRS if options in ("plain", "where", "rows") or "inf" not in kind]
    x, y = pairs(kinds, (5, 300), dtype, y_dtype)
    where, *scales = options_of(options, x.shape)
    squeezed = [of if of is None or np.ndim(of) == 0 else np.squeeze(of, -1) for of in scales]
    value = jaxsoftmax.js_divergence(x, y, where=where, weight=weight, p_scale=squeezed[0], q_scale=squeezed[1])
    seen = np.broadcast_to(where[:, None], x.shape) if options == "rows" else where
    assert np.all(np.asarray(value) >= 0)
    assert oracle.error(value, truth(x, y, weight, -1, seen, scale=scales[0], y_scale=scales[1])) <= 1


def plain(x, y, scale, y_scale, weight=0.3):
    log_p, log_q = (jax.nn.log_softmax(each * jnp.expand_dims(of, -1)) for each, of in ((x, scale), (y, y_scale)))
    log_m = jnp.logaddexp(log_p + math.log(weight), log_q + math.log(1 - weight))
    terms = weight * jnp.exp(log_p) * (log_p - log_m) + (1 - weight) * jnp.exp(log_q) * (log_q - log_m)
    return jnp.sum(terms, -1)


def ours(x, y, scale, y_scale, **options):
    return jaxsoftmax.js_divergence(x, y, weight=0.3, p_scale=scale, q_scale=y_scale, **options)


def both(f, *given):
    return f(*given), jax.grad(lambda *given: jnp.sum(jnp.sin(3 * f(*given))), (0, 1, 2, 3))(*given)


def operands(classes=9):
    rng = np.random.default_rng(0)
    return *rng.standard_normal((2, 8, classes)), *rng.standard_normal((2, 8))


@pytest.mark.usefixtures("x64")
def test_derivatives():
    def moved(f, *given):
        return jax.jvp(functools.partial(both, f), given, tuple(map(jnp.cos, given)))

    oracle.assert_same_in_float64(*(jax.jit(functools.partial(moved, f))(*operands()) for f in (ours, plain)))
    x, _, scale, _ = operands()  # of equal softmaxes
    oracle.assert_same_in_float64(*(jax.jit(functools.partial(moved, f))(x, x, scale, scale) for f in (ours, plain)))


def test_special_rows():
    inf, nan = np.inf, np.nan
    x = np.float32([[0, 1, -inf], [0, -inf, -inf], [0, 0, -inf], [-inf] * 3, [0, inf, 0], [nan, 0, 0], [1, 2, 3]])
    y = np.float32([[0, 1, -inf], [-inf, 0, -inf], [0, -inf, -inf], [0] * 3, [0, 0, 0], [0, 0, 0], [1, 2, 3]])
    value, pull = jax.vjp(jaxsoftmax.js_divergence, x, y)
    mixed = 0.5 * (0.5 * math.log(0.5 / 0.75) + 0.5 * math.log(2)) + 0.5 * math.log(1 / 0.75)
    np.testing.assert_allclose(value, [0, math.log(2), mixed, nan, nan, nan, 0], atol=1e-6)
    for gradient in pull(jnp.ones_like(value)):
        assert np.all(np.isfinite(gradient[:3]))
        np.testing.assert_array_equal(np.where(np.isneginf(x) & np.isneginf(y), gradient, 0)[:3], 0)
    where = np.array([True, False])
    with jax.debug_nans(True):
        f = functools.partial(jaxsoftmax.js_divergence, where=where)
        value, gradient = jax.value_and_grad(lambda x: jnp.sum(f(x, y[1::4])))(x[1::4])
    np.testing.assert_allclose(value, math.log(2), rtol=1e-6)
    np.testing.assert_array_equal(gradient[1], 0)
    np.testing.assert_array_equal(jaxsoftmax.js_divergence(np.ones((2, 0)), np.ones((2, 0))), [0, 0])


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_classes_in_a_shard_map(check_vma):
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        specs = P("data", "model"), P("data", "model"), P("data"), P("data")
        sharded = functools.partial(ours, axis_name="model")
        f = jax.shard_map(sharded, in_specs=specs, out_specs=P("data"), check_vma=check_vma)
        found = jax.jit(functools.partial(both, f))(*operands(64))
    oracle.assert_same_in_float64(found, jax.jit(functools.partial(both, ours))(*operands(64)))


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_classes_that_are_sharded(kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        specs = P("data", "model"), P("data", "model"), P("data"), P("data")
        given = [jax.device_put(each, NamedSharding(mesh, spec)) for each, spec in zip(operands(64), specs, strict=True)]
        found = jax.device_get(jax.jit(functools.partial(both, ours))(*given))
    oracle.assert_same_in_float64(found, jax.jit(functools.partial(both, ours))(*operands(64)))


@pytest.mark.parametrize(
    ("weight", "error", "words"),
    [(1.5, ValueError, "js_divergence: weight must be from 0 to 1"), ("a", TypeError, "js_divergence: weight must be")],
)
def test_bad_weights(weight, error, words):
    with pytest.raises(error, match=words):
        jaxsoftmax.js_divergence(np.zeros((2, 3), np.float32), np.zeros((2, 3), np.float32), weight=weight)


def test_states_are_computed_by_kernels():
    x = jax.ShapeDtypeStruct((64, 50257), jnp.bfloat16)
    decisions = jaxsoftmax.explain(jaxsoftmax.js_divergence, x, x, gpu="h100")
    assert {decision.primitive for decision in decisions} == {"logsumexp"}
    cases.assert_all_run_on("mosaic", decisions)


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
