"""Calls of divergences, their derivatives, and how results are held to the truth: alike for all divergences."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .. import cases, kernels, oracle
from ..meshes import make_mesh
from .cases import OPTIONS

# Inside a warp, staged, by a block, in shared memory, by a cluster; Kullback-Leibler's longer rows are read in a loop.
WIDTHS = [37, 100, 1024, 2056, 3001, 5001, 12501, 50257]
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float16")]


def in_turn():
    """Returns cases of each width, two of them by default, with each option and dtypes in turn."""
    return [
        pytest.param(name, *dtypes, cols, marks=cases.slow_unless(i == k % len(OPTIONS) and j in (k % 4, (k + 2) % 4)))
        for k, cols in enumerate(WIDTHS)
        for i, name in enumerate(OPTIONS)
        for j, dtypes in enumerate(DTYPES)
    ]


def call(op, axis, where, scale, y_scale, **options):
    """Returns the function of both logits, for scales that keep size 1 along the axis, or are numbers."""
    scales = [of if of is None or np.ndim(of) == 0 else np.squeeze(of, axis) for of in (scale, y_scale)]
    return functools.partial(op, axis=axis, where=where, p_scale=scales[0], q_scale=scales[1], **options)


def divergence_and_gradients(op, x, y, cotangent, *arguments, **options):
    """Returns the divergence, both gradients from one call, and each alone."""
    f = call(op, *arguments, **options)
    value, pull = jax.vjp(f, x, y)
    alone = [jax.vjp(of, each)[1](cotangent)[0] for of, each in ((lambda x: f(x, y), x), (lambda y: f(x, y), y))]
    return value, *pull(cotangent), *alone


def check(truth, x, y, axis, where, scale, y_scale, run):
    """Holds the results of `run` to the truth."""
    shape = np.delete(x.shape, axis)
    cotangent = np.random.default_rng(2).normal(size=shape).astype(np.float32)
    value, *gradients = map(np.asarray, run(x, y, cotangent, axis, where, scale, y_scale))
    of_rows = where is not None and where.ndim < x.ndim
    seen = np.broadcast_to(np.expand_dims(where, axis), x.shape) if of_rows else where
    expected = truth(x, y, axis=axis, where=seen, scale=scale, y_scale=y_scale)
    assert np.all(value >= 0)
    assert oracle.error(value, expected.value) <= 1
    for gradient, wanted in zip(gradients, 2 * expected.gradients(cotangent), strict=True):
        assert oracle.error(gradient, wanted) <= 1


def total(f):
    """A function that is not linear in the result of `f`."""
    return lambda *arrays: jnp.sum(jnp.sin(3 * f(*arrays)))


def moved(f):
    return lambda *given: jax.jvp(f, given, tuple(map(jnp.cos, given)))[1]


def both(f, *given):
    return f(*given), jax.grad(total(f), (0, 1, 2, 3))(*given)


DERIVED = {
    "values": lambda f: f,
    "gradients": lambda f: jax.grad(total(f), (0, 1, 2, 3)),
    "gradients by p": lambda f: jax.grad(total(f)),
    "gradients by q": lambda f: jax.grad(total(f), 1),
    "gradients by p's scale": lambda f: jax.grad(total(f), 2),
    "tangents": moved,
    "tangents by q": lambda f: lambda x, y, *scales: moved(lambda y: f(x, y, *scales))(y),
    "second derivatives": lambda f: moved(jax.grad(total(f), (0, 1, 2, 3))),
    "second derivatives by q": lambda f: lambda x, y, *s: moved(jax.grad(total(lambda y: f(x, y, *s))))(y),
    "second derivatives in reverse": lambda f: jax.grad(total(jax.grad(total(f), 1)), (0, 1, 2, 3)),
    "third derivatives": lambda f: moved(moved(jax.grad(total(f), (0, 1, 2, 3)))),
    "p mapped alone": lambda f: lambda x, *o: jax.vmap(lambda x: f(x, *o))(jnp.stack([x, -x])),
    "q mapped alone": lambda f: lambda x, y, *o: jax.vmap(lambda y: f(x, y, *o))(jnp.stack([y, -y])),
    "gradients of q mapped alone": lambda f: (
        lambda x, y, *o: jax.vmap(jax.grad(lambda y: total(f)(x, y, *o)))(jnp.stack([y, -y]))
    ),
    "scales mapped alone": lambda f: lambda x, y, s, t: jax.vmap(lambda t: f(x, y, s, t))(jnp.stack([t, -t])),
    "checkpointed": lambda f: jax.grad(total(jax.checkpoint(f)), (0, 1)),
    "of one softmax twice": lambda f: lambda x, y, s, t: jax.grad(lambda x: total(f)(x, x, s, t))(x),
    "second derivatives where both are equal": lambda f: (
        lambda x, y, s, t: moved(lambda *arrays: jax.grad(total(f), (0, 1, 2, 3))(*arrays))(x, x, s, s)
    ),
}


def operands():
    rng = np.random.default_rng(0)
    return *rng.standard_normal((2, 4, 9)), *rng.standard_normal((2, 4))


def shared():
    """Returns logits and scales of rows that devices share, with parts of nothing except `-inf` and of no weight."""
    x, y = (np.array(each) for each in np.random.default_rng(0).standard_normal((2, 8, 64)))
    x[0, 8:32], y[0, 8:32], x[1, :48], x[2, :16] = -np.inf, -np.inf, -1000, -np.inf
    scale, y_scale = np.random.default_rng(1).standard_normal((2, 8))
    scale[:3], y_scale[:3] = 0.5, 0.7
    return x, y, scale, y_scale


def check_parts(op, kind, classes, where):
    """Holds results and gradients to those of one device, where an implementation computes the parts of two."""
    mesh = make_mesh(kind)
    x, y, *scales = (each[..., :classes] if each.ndim == 2 else each for each in shared())
    rng = np.random.default_rng(5)
    masks = {"classes": rng.random((1, classes)) < 0.7, "rows": np.arange(8) % 3 > 0}
    f = functools.partial(both, functools.partial(op, where=masks.get(where)))

    def run(x, y, *scales):
        sharding = NamedSharding(mesh, P("data", "model"))
        reshard = jax.lax.with_sharding_constraint if kind is AxisType.Auto else jax.reshard
        return f(reshard(x, sharding), reshard(y, sharding), *scales)

    with kernels.plugged_in_local("divergence") as local, jax.set_mesh(mesh):
        found = jax.device_get(jax.jit(run)(x, y, *scales))
    assert (2, 32) in {shapes[0] for shapes in local.shapes}
    oracle.assert_same_in_float64(found, jax.jit(f)(x, y, *scales))
