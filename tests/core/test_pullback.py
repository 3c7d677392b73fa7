"""A function's own pullback gets the cotangents, and tangents are JAX's: in loops, in batches, and where both are derived."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxsoftmax._core.pullback import with_pullback

from ..support import oracle
from ..support.meshes import make_mesh

pytestmark = pytest.mark.usefixtures("x64")

X, FACTOR, WEIGHTS = np.random.default_rng(0).standard_normal((3, 3, 4))


@jax.jit
def results(operands):
    """The second result depends on one operand alone."""
    x, factor = operands["x"], operands["factor"]
    return [jax.lax.scan(lambda total, _: (total + factor * jnp.sin(x), None), jnp.zeros_like(x), length=2)[0], x * x]


def pullback(operands, cotangents, types):
    """Computes ten times the cotangents."""
    x, factor = operands["x"], operands["factor"]
    c, of_square = (0.0 if each is None else 10 * each for each in cotangents)
    found = {"x": 2 * factor * jnp.cos(x) * c + 2 * x * of_square, "factor": 2 * jnp.sin(x) * c}
    shared = {name: [at for at, size in enumerate(kind.shape) if size == 1] for name, kind in types.items()}
    return {name: jnp.sum(found[name], axes, keepdims=True) for name, axes in shared.items()}


def ours(x, factor):
    return with_pullback(pullback, results, {"x": x, "factor": factor})


def true(x, factor):
    return results({"x": x, "factor": factor})


def both(f):
    """A function that is linear in the results: derivatives of its gradients use one rule alone."""
    return lambda *operands: sum(jnp.sum(jnp.asarray(WEIGHTS) * each) for each in f(*operands))


def in_a_scan(f):
    """Steps share the factor."""
    return lambda x, factor: jax.lax.scan(lambda total, row: (total + f(row, factor), None), 0.0, jnp.stack([x, 2 * x]))[0]


def gradient(f, wrt=(0, 1)):
    return lambda *operands: jax.grad(f, wrt)(*operands)


def tangent(f):
    return lambda *operands: jax.jvp(f, operands, tuple(map(jnp.cos, operands)))[1]


def total(f):
    return lambda *operands: sum(jnp.sum(jnp.cos(each)) for each in jax.tree.leaves(f(*operands)))


def ten_times(expected):
    return jax.tree.map(lambda each: 10 * each, expected)


@pytest.mark.parametrize("wrt", [0, 1, (0, 1)], ids=str)
@pytest.mark.parametrize("inside", [both, lambda f: in_a_scan(both(f))], ids=["plain", "scan"])
def test_reverse_mode_takes_the_pullback_and_forward_mode_does_not(inside, wrt):
    found, expected = (gradient(inside(f), wrt)(X, FACTOR) for f in (ours, true))
    oracle.assert_same_in_float64(found, ten_times(expected))
    oracle.assert_same_in_float64(tangent(inside(ours))(X, FACTOR), tangent(inside(true))(X, FACTOR))


@pytest.mark.parametrize("inside", [both, lambda f: in_a_scan(both(f))], ids=["plain", "scan"])
def test_what_is_derived_again_is_differentiated_by_jax(inside):
    ours_again, expected = (jax.jit(tangent(gradient(inside(f))))(X, FACTOR) for f in (ours, true))
    oracle.assert_same_in_float64(ours_again, ten_times(expected))
    for order in (lambda f: gradient(tangent(f)), lambda f: tangent(tangent(f))):
        oracle.assert_same_in_float64(*(jax.jit(order(inside(f)))(X, FACTOR) for f in (ours, true)))


def test_a_gradient_is_differentiated_in_reverse_mode():
    def of_ten_times(*operands):
        return ten_times(gradient(both(true))(*operands))

    ours_again, expected = (gradient(total(f))(X, FACTOR) for f in (gradient(both(ours)), of_ten_times))
    oracle.assert_same_in_float64(ours_again, expected)


def test_a_linear_function_is_its_own_tangent_and_transposed():
    _, linear = jax.linearize(ours, X, FACTOR)
    oracle.assert_same_in_float64(tangent(linear)(X, FACTOR), linear(jnp.cos(X), jnp.cos(FACTOR)))
    oracle.assert_same_in_float64(gradient(both(linear))(X, FACTOR), ten_times(gradient(both(true))(X, FACTOR)))
    c = [np.cos(X), np.sin(X)]
    transposed, expected = (jax.linear_transpose(f, X, FACTOR)(c) for f in (linear, jax.linearize(true, X, FACTOR)[1]))
    oracle.assert_same_in_float64(transposed, ten_times(expected))


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (None, 0)], ids=str)
def test_examples_of_a_batch_may_share_operands(axes):
    """An operand that they share has a cotangent that is a sum over them."""
    operands = [
        each if axis is None else jnp.stack([each, -each, 2 * each], axis) for each, axis in zip((X, FACTOR), axes, strict=True)
    ]

    def mapped(f):
        return lambda *operands: jax.vmap(f, axes)(*operands)

    def together(f):
        return lambda *operands: jnp.sum(mapped(both(f))(*operands) * np.arange(1.0, 4.0))

    for derived in (lambda f: gradient(together(f)), lambda f: mapped(gradient(both(f)))):
        found, expected = (derived(f)(*operands) for f in (ours, true))
        oracle.assert_same_in_float64(found, ten_times(expected))
    oracle.assert_same_in_float64(*(tangent(together(f))(*operands) for f in (ours, true)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_result_that_does_not_move_varies_over_devices(check_vma):
    mesh = make_mesh(AxisType.Auto, (4,), ("model",))

    def moved(f):
        def local(x, factor):
            return jax.lax.psum(sum(map(jnp.sum, f(x, factor))), "model")

        mapped = jax.shard_map(local, mesh=mesh, in_specs=P(None, "model"), out_specs=P(), check_vma=check_vma)
        return gradient(mapped, 1)(X, FACTOR)

    oracle.assert_same_in_float64(moved(ours), ten_times(moved(true)))


def test_the_function_is_not_transposed():
    text = jax.jit(gradient(both(ours))).lower(X, FACTOR).as_text()
    assert "stablehlo.while" not in text  # that of the function's value is not needed
