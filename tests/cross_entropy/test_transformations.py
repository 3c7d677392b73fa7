"""Transformations of JAX, and sharded arrays, against the same of a loss in plain `jax.numpy`, in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY_GRADIENT

from ..support import cases, kernels, oracle
from ..support.cross_entropy.cases import ALL
from ..support.meshes import COLLECTIVE, array, make_mesh, spec_of

pytestmark = pytest.mark.usefixtures("hollow_kernels", "x64")

SHAPE = (3, 7)
LABELS = np.array([0, 6, 2])
OPTIONS = pytest.mark.parametrize("options", [{}, ALL], ids=["plain", "all"])


def x64(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def plain(x, labels, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None):
    """The loss as its formula says it."""
    x = x if logits_soft_cap is None else logits_soft_cap * jnp.tanh(x / logits_soft_cap)
    weights = (1 - label_smoothing) * jax.nn.one_hot(labels, x.shape[-1], dtype=x.dtype) + label_smoothing / x.shape[-1]
    return -jnp.sum(weights * jax.nn.log_softmax(x), -1) + z_loss * jax.nn.logsumexp(x, -1) ** 2


def pair(options, labels=LABELS):
    """Our loss and the plain one, with a nonlinear function on top."""
    return [lambda x, f=f: jnp.sin(f(x, labels, **options)) for f in (jaxsoftmax.cross_entropy, plain)]


def total(f):
    return lambda x: jnp.sum(f(x))


def pushforward(f):
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]


STEPS = {
    "grad": lambda f: jax.grad(total(f)),
    "jvp": pushforward,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda f: lambda x: jax.vmap(f)(jnp.stack([x, 2 * x])),
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
}


# The gradient of a batch is not among them: the function of which it is taken has one array.
TWO_STEPS = [steps for steps in itertools.product(STEPS, STEPS) if steps != ("grad", "vmap")]


@pytest.mark.parametrize("options", [pytest.param({}, marks=pytest.mark.slow), ALL], ids=["plain", "all"])
@pytest.mark.parametrize(
    "steps", [pytest.param(steps, marks=cases.slow_unless(i % 3 == 0)) for i, steps in enumerate(TWO_STEPS)], ids="-".join
)
def test_two_transformations(steps, options):
    def transformed(f):
        for step in reversed(steps):
            f = STEPS[step](f)
        return f

    results = jax.jit(lambda x: [transformed(f)(x) for f in pair(options)])(x64())
    oracle.assert_same_in_float64(*results)


@OPTIONS
def test_hessian(options):
    results = jax.jit(lambda x: [jax.hessian(total(f))(x) for f in pair(options)])(x64())
    oracle.assert_same_in_float64(*results)


@pytest.mark.parametrize("in_axes", [(0, None), (None, 0), (1, 1), (0, 0)], ids=str)
def test_vmap_of_logits_and_labels(in_axes):
    x = x64((4, 4, 5)) if in_axes[0] is not None else x64((4, 5))
    labels = np.random.default_rng(0).integers(0, 5, (4, 4) if in_axes[1] is not None else (4,))
    results = []
    for f in (jaxsoftmax.cross_entropy, plain):
        both = jax.vmap(lambda x, labels, f=f: (f(x, labels), jax.grad(total(lambda x: f(x, labels)))(x)), in_axes)
        results.append(jax.jit(both)(x, labels))
    oracle.assert_same_in_float64(*results)


def test_scan():
    def run(f):
        def body(x, labels):
            loss, gradient = jax.value_and_grad(lambda x: jnp.sum(f(x, labels)))(x)
            return x - 0.3 * gradient, loss

        return jax.lax.scan(body, x64(), np.stack([LABELS, LABELS[::-1]]))

    oracle.assert_same_in_float64(*jax.jit(lambda: (run(jaxsoftmax.cross_entropy), run(plain)))())


def test_the_log_sum_exp_may_be_differentiated():
    def ours(x):
        loss, lse = jaxsoftmax.cross_entropy(x, LABELS, return_lse=True)
        return jnp.sum(loss * jnp.sin(lse))

    def theirs(x):
        return jnp.sum(plain(x, LABELS) * jnp.sin(jax.nn.logsumexp(x, -1)))

    results = jax.jit(lambda x: [(jax.grad(f)(x), jax.hessian(f)(x)) for f in (ours, theirs)])(x64())
    oracle.assert_same_in_float64(*results)


def test_symbolic_shapes_are_exported():
    rows, classes = export.symbolic_shape("rows, classes")
    f = jax.jit(lambda x, labels: jax.value_and_grad(lambda x: jnp.sum(jaxsoftmax.cross_entropy(x, labels)))(x))
    given = jax.ShapeDtypeStruct((rows, classes), np.float64), jax.ShapeDtypeStruct((rows,), np.int64)
    exported = export.export(f, platforms=("cpu",))(*given)
    expected = jax.jit(jax.value_and_grad(lambda x: jnp.sum(plain(x, LABELS))))(x64())
    oracle.assert_same_in_float64(exported.call(x64(), LABELS), expected)


SHARDED = [P("data"), P("data", "model"), P(None, "model"), P(None, ("data", "model"))], [AxisType.Auto, AxisType.Explicit]


@pytest.mark.parametrize(
    ("options", "spec", "kind"),
    [
        pytest.param(options, spec, kind, marks=cases.slow_unless((i + j + k) % 2 == 0))
        for i, options in enumerate([{}, ALL])
        for j, spec in enumerate(SHARDED[0])
        for k, kind in enumerate(SHARDED[1])
    ],
    ids=str,
)
def test_sharded_rows_and_classes_are_not_gathered(options, spec, kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, sharded = array((8, 64), spec, mesh)
        labels = np.random.default_rng(0).integers(-1, 65, 8)
        labels[:2] = 0, 63
        ours = functools.partial(jaxsoftmax.cross_entropy, **options)

        def both(x, labels):
            return ours(x, labels), jax.grad(lambda x: jnp.nansum(jnp.sin(ours(x, labels))))(x)

        compiled = jax.jit(both).lower(sharded, labels).compile()
        assert "all-gather" not in compiled.as_text()
        loss, gradient = compiled(sharded, labels)
        assert spec_of(gradient, 2) == (*spec, *(None,) * (2 - len(spec)))
    expected = jax.jit(both)(x, labels)
    np.testing.assert_array_equal(np.isnan(loss), (labels < 0) | (labels > 63))
    oracle.assert_same_in_float64(list(map(np.nan_to_num, (loss, gradient))), list(map(np.nan_to_num, expected)))


@pytest.mark.parametrize(
    ("options", "spec", "kind"),
    [
        pytest.param(options, spec, kind, marks=cases.slow_unless(i == j == k))
        for i, options in enumerate([{}, ALL])
        for j, spec in enumerate([P("data", "model"), P(None, ("data", "model"))])
        for k, kind in enumerate([AxisType.Auto, AxisType.Explicit])
    ],
    ids=str,
)
def test_shards_of_classes_are_merged_by_one_collective(options, spec, kind):
    """Where there is a kernel; the reference by itself is left to XLA, which has one for each figure."""
    mesh, rng = make_mesh(kind), np.random.default_rng(0)
    x, labels, where = x64((8, 64)), rng.integers(-1, 65, 8), rng.random((8, 64)) < 0.9
    labels[:2], where[:, 0], where[2, 32:], where[3] = (0, 63), True, False, False
    x[:4] -= 1000
    x[0, :32], x[1, :8], x[4], x[5, 40], x[6, 3] = -np.inf, 0, -np.inf, np.inf, np.nan
    ours = functools.partial(jaxsoftmax.cross_entropy, return_lse=True, **options)
    params = {"label_smoothing": 0, "z_loss": 0, **options, "soft_cap": options.get("logits_soft_cap")}
    params.pop("logits_soft_cap", None)

    def masked(x, labels):
        return jax.vjp(lambda x: ours(x, labels, where=where), x)[0]

    def gradient(x, labels):
        found, pull = jax.vjp(lambda x: ours(x, labels), x)
        return pull(jax.tree.map(jnp.ones_like, found))

    def at_once(x, labels):
        operands = {"x": x, "labels": labels[:, None].astype(np.int32), "t": jnp.ones((8, 1))}
        return bind(CROSS_ENTROPY_GRADIENT, operands, axes=(1,), dtype=np.float64, implementation=None, **params)

    def tangent(x, labels):
        return jax.linearize(lambda x: ours(x, labels), x)[1](jnp.cos(x))

    with kernels.plugged_in_local("cross_entropy"), jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = [(f, jax.jit(f).lower(sharded, labels).compile()) for f in (ours, masked, gradient, at_once, tangent)]
        results = [(f, run(sharded, labels), [name for _, name in COLLECTIVE.findall(run.as_text())]) for f, run in compiled]
    expected = jax.jit(lambda *given: [f(*given) for f, *_ in results])(x, labels)
    for (f, actual, collectives), of_f in zip(results, expected, strict=True):
        assert collectives == ["all-gather", *["all-reduce"] * (f is tangent)]
        oracle.assert_same_in_float64(actual, of_f)


def test_inside_shard_map():
    mesh = make_mesh(AxisType.Auto, (8,), ("data",))
    x, labels = x64((16, 7)), np.random.default_rng(0).integers(0, 7, 16)

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=(P("data"), P("data")), out_specs=(P(), P("data")))
    def step(x, labels):
        loss, gradient = jax.value_and_grad(lambda x: jnp.sum(jaxsoftmax.cross_entropy(x, labels, **ALL)))(x)
        return jax.lax.psum(loss, "data"), gradient

    expected = jax.jit(jax.value_and_grad(lambda x: jnp.sum(plain(x, labels, **ALL))))(x)
    oracle.assert_same_in_float64(step(x, labels), expected)
