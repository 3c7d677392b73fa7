"""Derivatives, vmap, loops, export and shards of the largest entries and of samples, against plain JAX on one device."""

import collections
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
from jaxsoftmax import explain

from ..support import cases, kernels
from ..support.top_k.cases import plain_softmax_top_k
from ..support.top_k.oracle import assert_same

pytestmark = pytest.mark.usefixtures("hollow_kernels", "x64")

KEY = jax.random.key(3)
KINDS = [AxisType.Auto, AxisType.Explicit]


def array(shape=(4, 5), seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def largest(x):
    return jaxsoftmax.top_k(x, 3)[0]


def plain_largest(x):
    return jax.lax.top_k(x, 3)[0]


def weights(x, **options):
    found, _, lse = jaxsoftmax.softmax_top_k(x, 3, scale=0.7, return_lse=True, **options)
    return found * lse[..., None]


def plain_weights(x, **options):
    found, _, lse = plain_softmax_top_k(x, 3, scale=0.7, return_lse=True, **options)
    return found * lse[..., None]


def alone(x, **options):
    return jaxsoftmax.softmax_top_k(x, 3, **options)[0]


def plain_alone(x, **options):
    return plain_softmax_top_k(x, 3, **options)[0]


def of_rows(x, **options):
    """Returns what depends on the state of the weights alone, beside indices that have no derivative."""
    return jaxsoftmax.softmax_top_k(x, 3, return_lse=True, **options)[2]


def chances(x, **options):
    return jaxsoftmax.categorical(KEY, x, temperature=0.5, return_log_prob=True, **options)[1]


def plain_chances(x, **options):
    index = jaxsoftmax.categorical(KEY, jax.lax.stop_gradient(x), temperature=0.5, **options)
    return jnp.take_along_axis(jax.nn.log_softmax(x / 0.5, -1), index[..., None], -1)[..., 0]


PAIRS = {
    "top_k": (largest, plain_largest),
    "softmax_top_k": (weights, plain_weights),
    "selected": (
        functools.partial(weights, normalize="selected"),
        functools.partial(plain_weights, normalize="selected"),
    ),
    "alone": (alone, plain_alone),
    "selected alone": (
        functools.partial(alone, normalize="selected"),
        functools.partial(plain_alone, normalize="selected"),
    ),
    "state alone": (of_rows, lambda x: jax.nn.logsumexp(x, -1)),
    "state of selected": (functools.partial(of_rows, normalize="selected"), lambda x: jax.nn.logsumexp(x, -1)),
    "categorical": (chances, plain_chances),
    "categorical of top_k": (functools.partial(chances, top_k=2), functools.partial(plain_chances, top_k=2)),
}
STEPS = {
    "grad": lambda f: jax.grad(lambda x: jnp.sum(jnp.sin(f(x)))),
    "jvp": lambda f: lambda x: jax.jvp(f, (x,), (jnp.cos(x),)),
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "linearize": lambda f: lambda x: jax.linearize(f, x)[1](jnp.cos(x)),
}
TWO_STEPS = [steps for steps in itertools.product(STEPS, STEPS) if not (steps[0] == "grad" and steps[1] == "jvp")]


# By default three chains, each of every second pair by turns.
@pytest.mark.parametrize(
    ("steps", "pairs"),
    [
        pytest.param(steps, list(PAIRS)[first::2], marks=cases.slow_unless(i % 8 == 0 and first == i // 8 % 2))
        for i, steps in enumerate(TWO_STEPS)
        for first in (0, 1)
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) else "even" if "top_k" in value else "odd",
)
def test_two_transformations(steps, pairs):
    def transformed(f):
        for step in reversed(steps):
            f = STEPS[step](f)
        return f

    assert_same_of_pairs(transformed, pairs)


def assert_same_of_pairs(transformed, pairs):
    """Fails unless both functions of each pair give the same; all are one program, as most of them have much in common."""
    results = jax.jit(lambda x: {pair: [transformed(f)(x) for f in PAIRS[pair]] for pair in pairs})(array())
    for pair, (ours, plain) in results.items():
        try:
            assert_same(ours, plain)
        except AssertionError as error:
            raise AssertionError(pair) from error


@pytest.mark.parametrize("pairs", cases.every_other([list(PAIRS)[i::2] for i in (0, 1)], 1), ids=["even", "odd"])
def test_hessian(pairs):
    assert_same_of_pairs(lambda f: jax.hessian(lambda x: jnp.sum(jnp.sin(f(x)))), pairs)


@pytest.mark.parametrize("normalize", cases.quick("all", slow=["selected"]))
def test_the_scale_may_be_differentiated_twice(normalize):
    def loss(x, scale, f):
        found, _, lse = f(x, 3, scale=scale, normalize=normalize, return_lse=True)
        return jnp.sum(jnp.sin(found) * lse[..., None])

    derivatives = [jax.hessian(functools.partial(loss, f=f), (0, 1)) for f in FUNCTIONS]
    both = jax.jit(lambda x, scale: [derivative(x, scale) for derivative in derivatives])
    for scale in (0.7, -1.3, (0.7, -1.3, 0.5, 2.0)):
        assert_same(*both(array(), np.float64(scale)))


@pytest.mark.parametrize("return_lse", [False, True])
@pytest.mark.parametrize("normalize", ["all", "selected"])
def test_derivatives_of_the_derivatives_are_transposes(normalize, return_lse):
    """Both derivatives have derivatives in both modes, in any order, also where they are not linear in `x`."""
    x, t, c = array(), array(seed=1), (array((4, 3), 2), *([array((4,), 3)] * return_lse))

    def of(f):
        def weights(x):
            found, _, *lse = f(x, 3, normalize=normalize, return_lse=return_lse)
            return (found, *lse)

        def tangent(x, t):
            return jax.jvp(weights, (x,), (t,))[1]

        def cotangent(x, c):
            return jax.vjp(weights, x)[1](c)[0]

        linear = jax.linear_transpose(functools.partial(tangent, x), t)(c)
        back = jax.linear_transpose(functools.partial(cotangent, x), c)(t)[0]
        return (
            linear[0],
            back,
            jax.vjp(tangent, x, t)[1](c),
            jax.vjp(cotangent, x, c)[1](t),
            jax.jvp(cotangent, (x, c), (t, c))[1],
        )

    assert_same(*jax.jit(lambda: [of(f) for f in FUNCTIONS])())


def test_only_what_is_needed_is_saved():
    """Whole rows save the logits and the state; the selected save their weights alone."""
    x = jax.ShapeDtypeStruct((1000, 64), jnp.bfloat16)
    for normalize, expected in (
        ("all", {((1000, 64), "bfloat16"): 1, ((1000, 1), "float32"): 2, ((1000, 8), "int32"): 1}),
        ("selected", {((1000, 8), "bfloat16"): 1, ((1000, 8), "int32"): 1}),
    ):
        f = functools.partial(jaxsoftmax.softmax_top_k, k=8, normalize=normalize)
        pullback = jax.eval_shape(lambda x, f=f: jax.vjp(lambda x: f(x)[0], x)[1], x)
        saved = collections.Counter((leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(pullback))
        assert saved == expected, normalize


FUNCTIONS = (jaxsoftmax.softmax_top_k, plain_softmax_top_k)


@pytest.mark.parametrize(
    "options", cases.quick({}, {"shape": (6, 4), "top_k": 3}, slow=[{"top_k": 3}, {"shape": (6, 4)}]), ids=cases.ident
)
@pytest.mark.parametrize("temperature", cases.quick(np.array([0.5, 0, 2, 1]), slow=[np.float64(0.6)]), ids=["of rows", "one"])
def test_the_temperature_may_be_differentiated(temperature, options):
    x = array()

    def ours(x, temperature):
        return jnp.sum(jnp.sin(jaxsoftmax.categorical(KEY, x, temperature=temperature, return_log_prob=True, **options)[1]))

    def plain(x, temperature):
        index = jaxsoftmax.categorical(KEY, jax.lax.stop_gradient(x), temperature=jax.lax.stop_gradient(temperature), **options)
        hot = jnp.where(temperature > 0, temperature, 1)
        found = jax.nn.log_softmax(x / hot.reshape(-1, 1), -1)
        found = jnp.take_along_axis(jnp.broadcast_to(found, (*index.shape, 5)), index[..., None], -1)[..., 0]
        return jnp.sum(jnp.where(temperature > 0, jnp.sin(found), 0))

    def orders(f):
        def gradient(*given):
            found = jax.grad(f, (0, 1))(*given)
            return found, found

        return jax.jacfwd(gradient, (0, 1), has_aux=True)  # the second derivatives, and the first

    assert_same(*jax.jit(lambda *given: [orders(f)(*given) for f in (ours, plain)])(x, temperature))


def test_nothing_flows_into_what_does_not_take_part():
    x = array()
    where = np.array([True, False, True, True, False])
    x[:, 1], x[:, 4] = np.nan, np.inf
    x[1] = -np.inf
    each = (
        lambda x: jaxsoftmax.top_k(x, 4, where=where)[0][:, :3],
        lambda x: jaxsoftmax.softmax_top_k(x, 5, where=where)[0],
        lambda x: jaxsoftmax.categorical(KEY, x, where=where, return_log_prob=True)[1],
    )
    rows = np.array([0, 2, 3])
    for gradient in jax.jit(lambda x: [jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x)[rows])))(x) for f in each])(x):
        np.testing.assert_array_equal(gradient[:, ~where], 0)
        assert np.isfinite(np.asarray(gradient)[rows]).all()


@pytest.mark.parametrize("in_axes", cases.quick((None, 0), (1, 0), slow=[(0, None), (0, 0)]), ids=str)
def test_vmap_of_operands_and_masks(in_axes):
    x = array((4, 4, 5)) if in_axes[0] is not None else array((4, 5))
    where = np.random.default_rng(0).random((4, 5)) < 0.7
    where = where if in_axes[1] is None else np.stack([where, ~where, where | ~where, where])
    where[..., 0] = True

    found = [jax.tree.map(np.asarray, of_masked(*example)) for example in zip(*separate(x, where, in_axes), strict=True)]
    actual = jax.jit(jax.vmap(of_masked, in_axes))(x, where)
    assert_same(actual, jax.tree.map(lambda *parts: np.stack(parts), *found))


@jax.jit
def of_masked(x, where):
    """Returns the results of all functions for logits that a mask hides in part, with a gradient."""
    found = jaxsoftmax.top_k(x, 3, where=where), jaxsoftmax.softmax_top_k(x, 3, where=where, scale=0.5)
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(jaxsoftmax.softmax_top_k(x, 3, where=where)[0])))(x)
    options = ({"shape": (3, 4)}, {"top_p": 0.8}, {"top_k": 2, "temperature": 0.5})
    samples = [jaxsoftmax.categorical(KEY, x, where=where, return_log_prob=True, **each) for each in options]
    return found, gradient, samples


def separate(x, where, in_axes):
    """The examples of a batch."""
    size = 4
    return [
        [np.take(value, index, axis) if axis is not None else value for index in range(size)]
        for value, axis in zip((x, where), in_axes, strict=True)
    ]


def test_vmap_of_keys_scales_and_options():
    x, keys = array((3, 4, 50)), jax.random.split(KEY, 3)
    temperature, count, share = np.array([0.5, 0, 2]), np.array([1, 7, 0]), np.array([0.5, 0.9, 1.0])

    def sample(key, x, temperature, count, share):
        return jaxsoftmax.categorical(key, x, temperature=temperature, top_k=count, top_p=share, return_log_prob=True)

    given = (keys, x, temperature, count, share)
    actual = jax.jit(jax.vmap(sample))(*given)
    alone = jax.jit(sample)
    expected = [alone(*(value[index] for value in given)) for index in range(3)]
    assert_same(actual, jax.tree.map(lambda *parts: np.stack(parts), *expected))
    scales, of_scale = np.array([0.5, -2.0, 1.0]), jax.jit(lambda x, scale: jaxsoftmax.softmax_top_k(x, 5, scale=scale))
    actual = jax.jit(jax.vmap(of_scale))(x, scales)
    expected = [of_scale(x[index], scales[index]) for index in range(3)]
    assert_same(actual, jax.tree.map(lambda *parts: np.stack(parts), *expected))
    of_rows = np.array([0.5, -2.0, 1.0, 0.1]) * scales[:, None]
    actual = jax.jit(jax.vmap(of_scale, (None, 0)))(x[0], of_rows)
    assert_same(actual, jax.tree.map(lambda *parts: np.stack(parts), *[of_scale(x[0], own) for own in of_rows]))


def test_scan():
    def run(f):
        def step(x, _):
            found, gradient = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(f(x))))(x)
            return x - gradient, found

        return jax.lax.scan(step, array(), length=3)

    assert_same(*jax.jit(lambda: (run(weights), run(plain_weights)))())


def test_symbolic_shapes_are_exported():
    rows, columns = export.symbolic_shape("rows, columns", constraints=["columns >= 3"])

    def f(x):
        found = jax.value_and_grad(lambda x: jnp.sum(jnp.sin(weights(x))))(x)
        return found, largest(x), [jaxsoftmax.categorical(KEY, x, **options) for options in ({}, {"top_k": 3, "top_p": 0.8})]

    exported = export.export(jax.jit(f), platforms=("cpu",))(jax.ShapeDtypeStruct((rows, columns), np.float64))
    assert_same(exported.call(array()), jax.jit(f)(array()))


def everything(x):
    """The results of all functions, with the gradients of those that have some."""
    x = jnp.asarray(x)
    counts = 1 + jnp.arange(8, dtype=jnp.int32)
    samples = [
        jaxsoftmax.categorical(KEY, x, return_log_prob=True, **options)
        for options in (
            {"top_p": 0.9, "temperature": np.linspace(0, 2, 8)},
            {"top_k": counts},
            {"top_k": 5, "min_p": 0.01, "shape": (3, 8)},
        )
    ]
    gradients = [
        jax.grad(lambda x, f=f: jnp.sum(jnp.sin(f(x))))(x)
        for f, _ in (PAIRS["top_k"], PAIRS["selected alone"], PAIRS["categorical"])
    ]
    gradient = jax.grad(lambda x: jnp.sum(jnp.sin(PAIRS["softmax_top_k"][0](x))))
    return jaxsoftmax.top_k(x, 3), weights(x), samples, gradients, jax.jvp(gradient, (x,), (jnp.cos(x),))[1]


@functools.cache
def everything_on_one_device(cols):
    return jax.tree.map(np.asarray, jax.jit(everything)(array((8, cols))))


def spec_of(array):
    spec = array.sharding.spec
    return (*spec, *(None,) * (array.ndim - len(spec)))


@pytest.mark.parametrize("kind", [KINDS[0], pytest.param(KINDS[1], marks=pytest.mark.slow)], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "spec", cases.quick(P("data"), P(None, "model"), slow=[P(("data", "model")), P("data", "model")]), ids=str
)
def test_sharded_rows_are_not_gathered_and_the_samples_are_the_same(spec, kind):
    x, expected = array((8, 1500)), everything_on_one_device(1500)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, spec))
        compiled = jax.jit(everything).lower(sharded).compile()
        actual = compiled(sharded)
        if len(spec) == 1:
            assert "all-gather" not in compiled.as_text()
            assert all(spec_of(found) == (spec[0], *(None,) * (found.ndim - 1)) for found in jax.tree.leaves(actual[:2]))
    assert_same(actual, expected)


@pytest.mark.parametrize("kind", [pytest.param(KINDS[0], marks=pytest.mark.slow), KINDS[1]], ids=["auto", "explicit"])
def test_a_kernel_gets_shards_of_rows(kind):
    x, expected = array((8, 1500)), everything_on_one_device(1500)
    with kernels.plugged_in_local("top_k") as module:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
        with jax.set_mesh(mesh):
            actual = jax.jit(everything)(jax.device_put(x, NamedSharding(mesh, P("data"))))
        assert {(2, 1500), (1, 2, 1500)} <= {shapes[0] for shapes in module.shapes}
    assert_same(actual, expected)


def test_inside_shard_map():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x = array((4, 7))

    @jax.jit
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
    def step(x):
        found, gradient = jaxsoftmax.top_k(x, 3), jax.grad(lambda x: jnp.sum(jnp.sin(weights(x))))(x)
        key = jax.random.fold_in(KEY, jax.lax.axis_index("data"))
        counts = jnp.full(x.shape[:1], 2)
        return found, gradient, [jaxsoftmax.categorical(key, x, **options) for options in ({}, {"top_k": counts})]

    found, gradient, samples = step(x)
    expected = jax.jit(lambda x: (jaxsoftmax.top_k(x, 3), jax.grad(lambda x: jnp.sum(jnp.sin(weights(x))))(x)))(x)
    assert_same((found, gradient), expected)

    @jax.jit
    def of_device(index, x):
        key = jax.random.fold_in(KEY, index)
        return [jaxsoftmax.categorical(key, x, **options) for options in ({}, {"top_k": 2})]

    for index in range(2):
        rows = slice(2 * index, 2 * index + 2)
        np.testing.assert_array_equal([np.asarray(sample)[rows] for sample in samples], of_device(index, x[rows]))


def test_explain_shows_what_a_sample_takes():
    x = jax.ShapeDtypeStruct((4, 3000), np.float32)

    def primitives(**options):
        return [decision.primitive for decision in explain(lambda x: jaxsoftmax.categorical(KEY, x, **options), x)]

    assert (
        primitives() == primitives(top_p=0.9) == primitives(top_k=3000) == primitives(return_log_prob=True) == ["categorical"]
    )
    assert primitives(top_k=1024, top_p=0.5) == primitives(top_k=np.full(4, 7)) == ["top_k"]
    of_rows = np.float32([0.5, 1, 0, 2])
    assert primitives(top_k=7, return_log_prob=True, temperature=0.5) == ["top_k"]
    assert primitives(top_k=7, return_log_prob=True, temperature=of_rows) == ["top_k"]
    several = primitives(top_k=7, return_log_prob=True, temperature=of_rows[:, None, None] + of_rows)
    assert several == ["top_k", "logsumexp"]  # of each row and temperature
    assert primitives(top_k=1025) == primitives(top_k=np.array([1, 2, 0, 4])) == ["categorical"]
    assert sorted(primitives(top_k=jnp.full(4, 7))) == ["categorical", "top_k"]
    assert primitives(top_k=5, temperature=0.0) == ["categorical"]
