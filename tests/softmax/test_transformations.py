"""Every transformation of JAX, in any nesting, against the same one of jax.nn in float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export

import jaxsoftmax

from ..support import cases, oracle

SHAPE = (3, 7)
NAMES = pytest.mark.parametrize("name", cases.OPS)


def x32(shape=SHAPE, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def x64(shape=SHAPE, seed=0):
    """In float64, in which two ways to one value differ in no more than rounding, whatever the order of a derivative."""
    return np.random.default_rng(seed).standard_normal(shape)


def pair(name, **options):
    """Our op and that of jax.nn, with a nonlinear and not symmetric function on top."""
    weights = np.random.default_rng(9).standard_normal(SHAPE)

    def make(module):
        def f(x):
            y = getattr(module, name)(x, axis=-1, **options)
            w = jnp.asarray(weights[:, 0] if name == "logsumexp" else weights, x.dtype)[..., : y.shape[-1]]
            return jnp.sin(y) * w

        return f

    return make(jaxsoftmax), make(jax.nn)


def assert_agree(ours, theirs, *args):
    """The same in float64, in one program."""
    with jax.enable_x64(True):
        oracle.assert_same_in_float64(*jax.jit(lambda *args: (ours(*args), theirs(*args)))(*args))


def total(f):
    return lambda x: jnp.sum(f(x))


def pushforward(f):
    return lambda x: jax.jvp(f, (x,), (jnp.cos(x),))[1]


def pullback(f):
    return lambda x: jax.vjp(f, x)[1](f(x))[0]


def linearized(f):
    return lambda x: jax.linearize(f, x)[1](jnp.cos(x))


def scanned(f):
    def g(x):
        _, ys = jax.lax.scan(lambda carry, _: (carry + 0.1, f(carry)), x, None, length=3)
        return ys

    return g


def saved_nothing(f):
    return jax.checkpoint(f, policy=jax.checkpoint_policies.nothing_saveable)


ONCE = {
    "jit": jax.jit,
    "jvp": pushforward,
    "vjp": pullback,
    "grad": lambda f: jax.grad(total(f)),
    "linearize": linearized,
    "jacfwd": jax.jacfwd,
    "jacrev": jax.jacrev,
    "checkpoint": saved_nothing,
    "scan": scanned,
    "hessian": lambda f: jax.hessian(total(f)),
}


def all_of(fs):
    """One function of all of a dictionary."""
    return lambda *args: {key: f(*args) for key, f in fs.items()}


@NAMES
def test_once(name):
    ours, theirs = pair(name)
    assert_agree(*[all_of({key: transformed(f) for key, transformed in ONCE.items()}) for f in (ours, theirs)], x64())


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("name", "transformation"),
    [
        pytest.param(name, transformation, marks=cases.slow_unless(index % 3 == place))
        for place, name in enumerate(cases.OPS)
        for index, transformation in enumerate(ONCE)
    ],
)
def test_once_step_by_step(name, transformation):
    ours, theirs = map(ONCE[transformation], pair(name))
    oracle.assert_same_in_float64(ours(x64()), jax.jit(theirs)(x64()))


def in_turn(*others):
    """Each op with each of the others; by default one of the ops, in turn."""
    return pytest.mark.parametrize(
        ("name", "others"),
        [
            pytest.param(name, own, marks=cases.slow_unless((index + index // len(others[-1])) % 3 == place))
            for place, name in enumerate(cases.OPS)
            for index, own in enumerate(itertools.product(*others))
        ],
        ids=str,
    )


TWICE = ["jvp", "vjp", "grad", "linearize", "scan", "checkpoint"]


@pytest.mark.parametrize(
    ("outer", "inners", "name"),
    [
        pytest.param(outer, TWICE[first::3], name, marks=cases.slow_unless((i + j) % 3 == first))
        for i, outer in enumerate(TWICE)
        for j, name in enumerate(cases.OPS)
        for first in range(3)
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_twice(outer, inners, name):
    """Each two transformations, by default of one op, in one program for those that are inside."""
    assert_agree(*[all_of({inner: ONCE[outer](ONCE[inner](f)) for inner in inners}) for f in pair(name)], x64())


@NAMES
def test_second_order_in_every_mode(name):
    def nested(f):
        chains = itertools.product(["jacfwd", "jacrev"], repeat=2)
        return all_of({f"{outer} of {inner}": ONCE[outer](ONCE[inner](total(f))) for outer, inner in chains})

    assert_agree(*map(nested, pair(name)), x64())


@NAMES
def test_third_order(name):
    ours, theirs = pair(name)
    third = [jax.jacfwd(jax.jacrev(jax.grad(lambda x, f=f: jnp.sum(f(x))))) for f in (ours, theirs)]
    assert_agree(*third, x64())


@settings(max_examples=10, deadline=None, derandomize=True)
@given(
    chain=st.lists(st.sampled_from(["jit", "jvp", "vjp", "grad", "linearize", "checkpoint", "scan"]), min_size=2, max_size=4),
    name=st.sampled_from(cases.OPS),
)
def test_any_nesting(chain, name):
    ours, theirs = pair(name)
    for transformation in chain:
        ours, theirs = ONCE[transformation](ours), ONCE[transformation](theirs)
    assert_agree(ours, theirs, x64())


@in_turn([0, 1, 2, -1])
def test_vmap_over_any_axis(name, others):
    (batch_axis,) = others
    x = x64((4, *SHAPE))
    fs = [all_of({"itself": f} | {inner: ONCE[inner](f) for inner in ("vjp", "jvp", "hessian")}) for f in pair(name)]
    batched = np.moveaxis(x, 0, batch_axis)
    assert_agree(*[jax.vmap(f, in_axes=batch_axis) for f in fs], batched)


@pytest.mark.usefixtures("x64")
@NAMES
def test_vmap_along_the_softmax_axis_of_the_batch_equals_a_loop(name):
    x = x64((5, 16, 128))
    f = functools.partial(getattr(jaxsoftmax, name), axis=0)
    looped = np.stack([*map(jax.jit(f), x)])
    oracle.assert_same_in_float64(jax.vmap(f)(x), looped)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    "batched", [(True, False, False), (False, True, False), (False, False, True), (True, True, True)], ids=str
)
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("softmax", np.array([0.5, -1.0, 2.0, 3.0])),
        ("log_softmax", np.linspace(-1, 2, 4 * SHAPE[0]).reshape(4, SHAPE[0])),  # one for each row
        ("logsumexp", np.linspace(-1, 2, 4 * SHAPE[0]).reshape(4, SHAPE[0])),
    ],
    ids=cases.OPS,
)
def test_vmap_of_each_operand_alone(name, scale, batched):
    x = x64((4, *SHAPE))
    where = np.random.default_rng(1).random((4, *SHAPE)) < 0.7
    where[..., 0] = True
    args = [a if b else a[0] for a, b in zip((x, where, scale), batched, strict=True)]
    axes = tuple(0 if b else None for b in batched)

    def f(x, where, scale):
        return getattr(jaxsoftmax, name)(x, axis=-1, where=where, scale=scale)

    def gradients(x, where, scale):
        def loss(x, scale):
            y = f(x, where, scale)
            return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y), 0))

        return jax.grad(loss, (0, 1))(x, scale)

    def both(*args):
        return f(*args), gradients(*args)

    one = jax.jit(both)
    rows = [one(*[a[i] if b else a for a, b in zip(args, batched, strict=True)]) for i in range(4)]
    expected = jax.tree.map(lambda *leaves: np.stack(leaves), *rows)
    oracle.assert_same_in_float64(jax.jit(jax.vmap(both, in_axes=axes))(*args), expected)


@pytest.mark.usefixtures("x64")
@NAMES
def test_vmap_of_tangents_alone(name):
    """As jacfwd and jacrev do: many tangents at one point."""
    f, x, ts = functools.partial(getattr(jaxsoftmax, name), axis=-1), x64(), x64((5, *SHAPE), 3)
    push = jax.jit(lambda t: jax.jvp(f, (x,), (t,))[1])
    oracle.assert_same_in_float64(jax.vmap(push)(ts), np.stack([*map(push, ts)]))


@NAMES
def test_masked_derivatives_of_second_order_are_finite(name):
    """NaN behind the mask, a row with nothing to see, and -inf stay harmless in every order."""
    where = np.random.default_rng(1).random(SHAPE) < 0.7
    where[0], where[1, 0] = False, True
    x = np.where(where, x32(), np.float32(np.nan))
    clean = np.where(where, x, 0).astype(np.float32)

    def loss(x):
        y = getattr(jaxsoftmax, name)(x, axis=-1, where=where)
        return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y), 0))

    derivatives = jax.jit(lambda x: [d(x) for d in (jax.grad(loss), jax.hessian(loss), jax.jacrev(jax.grad(loss)))])
    for dirty, expected in zip(map(np.asarray, derivatives(x)), derivatives(clean), strict=True):
        assert np.all(np.isfinite(dirty))
        np.testing.assert_array_equal(dirty, expected)
        assert np.all(dirty[~where] == 0)


@pytest.mark.parametrize(
    ("name", "scale"),
    [
        pytest.param(name, scale, marks=cases.slow_unless(place < 2 or (place == 2) != (name == "logsumexp")))
        for name in cases.OPS
        for place, scale in enumerate([(0.7, 0.0, -1.3), 0.0, 0.7, -1.3])
    ],
    ids=str,
)
def test_derivatives_of_scale_of_second_order(name, scale):
    weights = np.random.default_rng(2).standard_normal(SHAPE)

    def total(y):
        return jnp.sum(jnp.sin(y) * jnp.asarray(weights[:, 0] if name == "logsumexp" else weights, y.dtype))

    def ours(x, scale):
        return total(getattr(jaxsoftmax, name)(x, axis=-1, scale=scale))

    def theirs(x, scale):
        return total(getattr(jax.nn, name)(x * (scale[:, None] if scale.ndim else scale), axis=-1))

    def orders(f):
        derivatives = {"first": jax.grad(f, (0, 1)), "second": jax.hessian(f, (0, 1))}
        forward = {"tangent": lambda x, scale: jax.jvp(f, (x, scale), (jnp.cos(x), jnp.cos(scale)))[1]}
        return all_of(derivatives | forward | {"second, in reverse": jax.jacrev(jax.grad(f, 1), (0, 1))})

    assert_agree(orders(ours), orders(theirs), x64(), np.float64(scale))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_nan_behind_a_mask_spares_the_derivatives_of_scale(name):
    where, x = np.array([True, True, True, False]), np.array([1.0, 2.0, 0.5, np.nan])
    clean = np.where(where, x, 3)

    def loss(x, scale):
        y = getattr(jaxsoftmax, name)(x, where=where, scale=scale)
        return jnp.sum(jnp.where(where, y, 0) * y)  # its cotangent is NaN or infinite behind the mask

    orders = jax.grad(loss, 1), jax.jacrev(jax.grad(loss, 0), 1), jax.jacfwd(jax.grad(loss, 0), 1)
    derivatives = jax.jit(lambda x, scale: [derivative(x, scale) for derivative in orders])
    for actual, expected in zip(derivatives(x, 0.7), derivatives(clean, 0.7), strict=True):
        assert np.all(np.isfinite(actual))
        oracle.assert_same_in_float64(actual, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_complex_derivatives(name):
    z, c = np.asarray([1 + 1j, 0.2 - 0.3j, 0.2 + 0j]), np.asarray([1, 2 - 1j, 0.5j])

    def theirs(z, scale):
        weights = jnp.exp(z * scale)
        y = weights / jnp.sum(weights)
        return y if name == "softmax" else jnp.log(y)

    def ours(z, scale):
        return getattr(jaxsoftmax, name)(z, scale=scale)

    def derivatives(f):
        def pull(z, scale, c):
            return jax.vjp(f, z, scale)[1](c)

        return lambda z, scale, c: {
            "cotangents": pull(z, scale, c),
            "tangent": jax.jvp(f, (z, scale), (c, 0.3))[1],
            "second": jax.jvp(lambda z: pull(z, scale, c), (z,), (c,))[1],
        }

    both = jax.jit(lambda *args: (derivatives(ours)(*args), derivatives(theirs)(*args)))
    for scale in (-0.5, 1.3):
        oracle.assert_same_in_float64(*both(z, scale, c))


def gradient(x, cotangent, axis=-1):
    return jax.vjp(lambda x: jaxsoftmax.softmax(x, axis=axis), x)[1](cotangent)[0]


jitted_gradient = jax.jit(gradient, static_argnums=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("axis", [-1, 0, (0, 2)], ids=str)
@pytest.mark.parametrize("shape", [(16, 24, 64), (3, 4, 5)], ids=cases.ident)
def test_cotangents_have_no_effect_where_a_weight_is_0(dtype, axis, shape):
    """On a CPU the gradient is computed without a look at weights first, and again where NaN came of it."""
    rng, dtype = np.random.default_rng(5), jnp.dtype(dtype)
    x, cotangent = (rng.standard_normal(shape).astype(dtype) for _ in range(2))
    absent = rng.random(x.shape) < 0.3
    absent[:, 0, 0] = absent[0, :, 0] = absent[0, 0, :] = False
    x, most = np.where(absent, np.asarray(-np.inf, dtype), x), jnp.finfo(dtype).max
    expected = oracle.softmax_derivative(x, np.where(absent, np.asarray(0, dtype), cotangent), axis, saved=dtype)

    def found(value, there):
        return np.asarray(jitted_gradient(x, np.where(absent, np.asarray(value, dtype), there), axis))

    for value in (np.nan, np.inf, -np.inf, most):
        result = found(value, cotangent)
        assert not np.any(result[absent]), value
        assert oracle.error(result, expected) < 1, value
    if dtype != jnp.float16:  # whose largest numbers have finite differences in float32
        assert not np.any(found(most, np.asarray(-most / 2, dtype))[absent])


def test_nan_where_there_is_a_weight_is_that_of_its_row():
    rng = np.random.default_rng(6)
    x, cotangent = (rng.standard_normal((64, 512)).astype(np.float32) for _ in range(2))
    x[:, ::3] = -np.inf
    expected = np.asarray(jitted_gradient(x, cotangent))
    cotangent[5, 1] = np.nan
    found = np.asarray(jitted_gradient(x, cotangent))
    assert not np.any(found[:, ::3])
    assert np.array_equal(np.flatnonzero(np.isnan(found).any(-1)), [5])
    bits, clean = (np.delete(a, 5, 0).view(np.uint32) for a in (found, expected))
    np.testing.assert_array_equal(bits, clean)


def test_a_gradient_along_an_axis_that_may_be_empty_is_exported():
    def shifted(x):
        return gradient(x[:, 1:], x[:, 1:])

    (size,) = export.symbolic_shape("size")
    exported = export.export(jax.jit(shifted))(jax.ShapeDtypeStruct((200, size), jnp.float32))
    x = x32((200, 300))
    np.testing.assert_allclose(exported.call(x), jax.jit(shifted)(x), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_rows_with_nothing_to_see_and_what_is_masked_do_not_move(name):
    """Not where another row, or the rest of a row, is NaN either; in both modes."""
    x = np.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0], [1.0, np.nan, 3.0]], np.float32)
    where = np.array([[True, True, False], [False] * 3, [True, True, False]])
    op = functools.partial(getattr(jaxsoftmax, name), where=where, axis=-1)
    out, pull = jax.vjp(op, x)
    tangent = jax.jvp(op, (x,), (np.ones_like(x),))[1]
    (cotangent,) = pull(np.ones_like(out))
    for found in (cotangent, *([tangent] if tangent.ndim > 1 else [])):
        assert not np.any(found[~where])
        assert np.all(np.isnan(found[2, :2]))
    assert not np.any(tangent[1])
    assert np.all(np.isfinite(tangent[0]))


def test_only_a_large_gradient_on_one_device_is_computed_without_selects_first():
    def loops(x):
        return jax.jit(gradient).lower(x, x).as_text().count("stablehlo.while")

    x = jax.ShapeDtypeStruct((256, 128), jnp.float32)
    for platforms in (("cpu", "tpu"), ("cpu", "rocm")):  # which are one program
        exported = export.export(jax.jit(gradient), platforms=platforms)(x, x)
        assert "stablehlo.while" not in exported.mlir_module()
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices("cpu")[:2])
    sharded = jax.device_put(jnp.ones((256, 128)), jax.NamedSharding(mesh, jax.P("x")))
    on_a_cpu = int(jax.default_backend() == "cpu")
    assert [loops(jnp.ones((256, 128))), loops(jnp.ones((8, 128))), loops(sharded)] == [on_a_cpu, 0, 0]


def test_debug_nans_names_the_op():
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="softmax"):
        jaxsoftmax.softmax(jnp.full(3, -jnp.inf))


@NAMES
def test_no_tracer_leaks(name):
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda x: jnp.sum(getattr(jaxsoftmax, name)(x, axis=-1))))(x32((3, 5)))


@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_dtypes_of_derivatives(name):
    x = x32().astype(jnp.bfloat16)
    f = functools.partial(getattr(jaxsoftmax, name), dtype=jnp.float32, scale=0.5)
    y, pull = jax.vjp(f, x)
    (gradient,) = pull(y)
    assert (y.dtype, gradient.dtype) == (jnp.float32, jnp.bfloat16)
    y, tangent = jax.jvp(f, (x,), (x,))
    assert (y.dtype, tangent.dtype) == (jnp.float32, jnp.float32)
    assert jax.jit(jax.hessian(lambda x: jnp.sum(f(x) ** 2)))(x).dtype == jnp.bfloat16


@NAMES
def test_control_flow(name):
    f, x = functools.partial(getattr(jaxsoftmax, name), axis=-1), x32()
    truth, empty = getattr(oracle, name)(x, -1), np.zeros(jax.eval_shape(f, x).shape, np.float32)
    in_cond = jax.jit(lambda x: jax.lax.cond(x[0, 0] < 9, f, lambda x: empty, x))
    in_loop = jax.jit(lambda x: jax.lax.fori_loop(0, 3, lambda _, carry: f(x), empty))
    with jax.disable_jit():
        eager = f(x)
    for y in (in_cond(x), in_loop(x), eager):
        assert oracle.error(y, truth) <= 1


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("name", "platforms", "symbolic"),
    [
        pytest.param(name, platforms, symbolic, marks=cases.slow_unless((i + j + symbolic) % 2 == 0))  # each pair once
        for i, name in enumerate(cases.OPS)
        for j, platforms in enumerate([("cpu",), ("cuda",), ("cpu", "cuda"), ("cpu", "tpu", "cuda")])
        for symbolic in (False, True)
    ],
    ids=str,
)
def test_export(name, platforms, symbolic):
    f = functools.partial(getattr(jaxsoftmax, name), axis=-1)

    def both(x):
        y, pull = jax.vjp(f, x)
        return y, *pull(jnp.ones_like(y) if name == "logsumexp" else x)

    shape = export.symbolic_shape("rows, columns") if symbolic else SHAPE
    exported = export.export(jax.jit(both), platforms=platforms)(jax.ShapeDtypeStruct(shape, jnp.float32))
    assert exported.platforms == platforms
    if "cpu" in platforms:
        with jax.default_device(jax.devices("cpu")[0]):
            x = x32((5, 9) if symbolic else SHAPE)
            y, gradient = exported.call(x)
            assert oracle.error(y, getattr(oracle, name)(x, -1)) <= 1
            pulled = {"softmax": oracle.softmax_derivative, "log_softmax": oracle.log_softmax_cotangent}
            truth = pulled[name](x, x, -1) if name in pulled else oracle.logsumexp_cotangent(x, np.ones(x.shape[0]), -1)
            assert oracle.error(gradient, truth) <= 1


def test_a_scale_of_a_symbolic_number_of_rows_is_exported():
    rows, columns = export.symbolic_shape("rows, columns")
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((rows, 2, columns), (rows, 1)))
    exported = export.export(jax.jit(lambda x, scale: jaxsoftmax.softmax(x, scale=scale)), platforms=["cpu"])(x, scale)
    x, scale = x32((3, 2, 5)), np.float32([[0.5], [-1], [0]])
    with jax.default_device(jax.devices("cpu")[0]):
        assert oracle.error(exported.call(x, scale), oracle.softmax(x, scale=scale[..., None])) <= 1
    with pytest.raises(
        ValueError, match=r"scale must be a scalar, or broadcast to rows of shape \(rows, 2\), got shape \(columns,"
    ):
        jax.eval_shape(lambda x: jaxsoftmax.softmax(x, scale=x[0].T), jax.ShapeDtypeStruct((rows, 2, columns), jnp.float32))


@pytest.mark.usefixtures("x64")
def test_derivative_of_an_exported_function():
    f = jax.jit(lambda x: jnp.sum(jaxsoftmax.softmax(x) ** 2))
    exported = export.export(f)(jax.ShapeDtypeStruct(SHAPE, jnp.float64))
    oracle.assert_same_in_float64(jax.grad(exported.call)(x64()), jax.grad(f)(x64()))


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_check_grads(op):
    """Against central differences, which miss step^2 / 6 of the next two derivatives: 1e-9 here, as rounding does."""
    from jax.test_util import check_grads

    check_grads(getattr(jaxsoftmax, op), (x64(),), order=2, modes=["fwd", "rev"], rtol=1e-6, atol=1e-6, eps=1e-4)
