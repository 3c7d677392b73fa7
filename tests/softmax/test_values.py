"""Values, edge cases and first derivatives of softmax, log_softmax and logsumexp, against float64 and against jax.nn."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsoftmax

from ..support import cases, oracle

TRUTH = {"softmax": oracle.softmax, "log_softmax": oracle.log_softmax, "logsumexp": oracle.logsumexp}


def op(name, implementation=None, **kwargs):
    return functools.partial(getattr(jaxsoftmax, name), implementation=implementation, **kwargs)


def of_jax_nn(name):
    """The function of jax.nn, which promotes integers implicitly."""
    return jax.numpy_dtype_promotion("standard")(getattr(jax.nn, name))


def in_turn(names, *others):
    """Cases of each implementation, op and others. Of the reference each two occur by default, of kernels all cases."""
    found = []
    for implementation, name in itertools.product(cases.IMPLEMENTATIONS, names):
        for places in itertools.product(*(range(len(values)) for values in others)):
            is_needed = implementation.values != ("xla",) or (names.index(name) + sum(places)) % 2 == 0
            values = [values[place] for values, place in zip(others, places, strict=True)]
            marks = [*implementation.marks, *cases.slow_unless(is_needed)]
            found.append(pytest.param(*implementation.values, name, *values, marks=marks))
    return found


@pytest.mark.parametrize(
    ("implementation", "name", "dtype", "case"), in_turn(cases.OPS, ["float32", "bfloat16"], cases.SHAPES), ids=cases.ident
)
def test_values_of_every_input_are_within_the_budget(implementation, name, dtype, case):
    check_values(implementation, name, dtype, *case)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "axis"), cases.SHAPES, ids=cases.ident)
@pytest.mark.parametrize("name", cases.OPS)
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_values_of_every_input_in_float16_are_within_the_budget(implementation, name, shape, axis):
    check_values(implementation, name, "float16", shape, axis)


def check_values(implementation, name, dtype, shape, axis):
    f = jax.jit(op(name, implementation, axis=axis))
    arrays = cases.inputs(shape, dtype)
    cases.assert_ran(implementation, f, arrays["normal"])
    for kind, x in arrays.items():
        y = f(x)
        assert y.dtype == x.dtype
        assert oracle.error(y, TRUTH[name](x, axis)) <= 1, kind


@pytest.mark.parametrize(
    ("implementation", "name", "dtypes", "scale"),
    in_turn(
        ["softmax", "log_softmax"],
        [("float32", "float32"), ("bfloat16", "float32"), ("float32", "bfloat16")],
        [0.125, -3.0, 0.0, 1e3],
    ),
    ids=cases.ident,
)
def test_scale_and_result_dtype(implementation, name, dtypes, scale):
    dtype, result = dtypes
    f = jax.jit(op(name, implementation, scale=scale, dtype=result))
    arrays = cases.inputs((4, 257), dtype)
    cases.assert_ran(implementation, f, arrays["normal"])
    kinds = ["normal", "wide", "offset of 1e4", "offset of 1e6", "equal"] + (["some -inf"] if scale > 0 else [])
    if name == "softmax":  # a logarithm that fits float32 only after scaling is -inf
        kinds.append("extremes")
    for kind in kinds:
        y = f(arrays[kind])
        assert y.dtype == jnp.dtype(result)
        assert oracle.error(y, TRUTH[name](arrays[kind], -1, scale=scale)) <= 1, kind


# Shapes of operands, axes, and shapes of the scale, one number for each row or for several of them.
SCALES_OF_ROWS = [
    ((6, 257), -1, (6,)),
    ((6, 257), 0, (257,)),
    ((2, 3, 5, 33), 2, (2, 3, 33)),
    ((2, 3, 5, 33), 2, (3, 1)),
    ((4, 3, 5, 33), (1, -1), (4, 5)),
    ((4, 3, 5, 33), (-1, 0, 2), (3,)),
    ((3, 4), (), (3, 4)),
]
FACTORS = np.float32([0.5, -3.0, 0.0, 1.0, 40.0])


@pytest.mark.parametrize(
    ("implementation", "case", "name", "dtype"),
    cases.crossed("softmax", SCALES_OF_ROWS, cases.OPS, cases.DTYPES),
    ids=cases.ident,
)
def test_scale_of_each_row(implementation, case, name, dtype):
    """One program takes numbers of every sign and 0; -inf times a number below 0 is +inf, and times 0 NaN."""
    shape, axis, of_rows = case
    scale = np.resize(FACTORS, of_rows)
    where = np.random.default_rng(3).random(shape) < 0.7
    f = jax.jit(lambda x, scale, where: op(name, implementation, axis=axis, scale=scale)(x, where=where))
    whole, arrays = scale_beside(shape, axis, scale), cases.inputs(shape, dtype)
    cases.assert_ran(implementation, f, arrays["normal"], scale, where)
    for kind, mask in (("normal", None), ("wide", where), ("offset of 1e4", where), ("some -inf", None), ("equal", where)):
        x = arrays[kind]
        truth = TRUTH[name](x, axis, mask, whole)
        if mask is not None:
            x = np.where(mask, x, np.asarray(np.nan, x.dtype))
        assert oracle.error(f(x, scale, mask), truth) <= 1, kind


def scale_beside(shape, axis, scale):
    """Returns the scale of rows with an axis for each one of the operand, as NumPy broadcasts it."""
    axes = tuple(np.arange(len(shape))[list(np.atleast_1d(np.int_(axis)))])
    rows = [size for place, size in enumerate(shape) if place not in axes]
    return np.expand_dims(np.broadcast_to(scale, rows), axes)


WHERE_SHAPES = [
    ((2, 3, 4, 33), (2, 3, 4, 33)),
    ((2, 3, 4, 33), (1, 1, 4, 33)),
    ((2, 3, 4, 33), (2, 1, 1, 33)),
    ((2, 3, 4, 33), (4, 1)),
    ((2, 3, 4, 33), (33,)),
    ((2, 3, 4, 33), ()),
    ((33,), (4, 33)),  # x is broadcast
    ((5, 1, 33), (4, 1)),  # both are
]


@pytest.mark.parametrize(("shape", "mask_shape"), WHERE_SHAPES, ids=cases.ident)
@pytest.mark.parametrize("dtype", cases.quick("float32", slow=["bfloat16"]))
@pytest.mark.parametrize("name", cases.OPS)
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_where(implementation, name, dtype, shape, mask_shape):
    rng = np.random.default_rng(0)
    where = rng.random(mask_shape) < 0.5
    if where.ndim == 4:
        where[0, 0, 0] = False  # a row with nothing to see
    f = jax.jit(lambda x, where: op(name, implementation, axis=-1)(x, where=where))
    arrays = cases.inputs(shape, dtype)
    cases.assert_ran(implementation, f, arrays["normal"], where)
    for kind in ("normal", "offset of 1e4", "some -inf", "extremes"):
        x = arrays[kind].copy()
        truth = TRUTH[name](x, -1, where)
        if where.shape == x.shape:
            x[~where] = np.nan  # what is masked may hold anything
        assert oracle.error(f(x, where), truth) <= 1, kind
    nothing = np.zeros_like(where)
    expected = {"softmax": 0.0, "log_softmax": -np.inf, "logsumexp": -np.inf}[name]
    np.testing.assert_array_equal(oracle.to64(f(arrays["one NaN"], nothing)), expected)


@pytest.mark.parametrize("dtype", cases.quick("float32", "bfloat16", slow=["float16"]))
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("name", "scale"),
    [
        ("softmax", None),
        ("softmax", 0.3),
        ("softmax", "of rows"),
        ("log_softmax", None),
        ("log_softmax", 0.3),
        ("log_softmax", "of rows"),
        ("logsumexp", None),
        ("logsumexp", "of rows"),
    ],
    ids=cases.ident,
)
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_tangents_and_cotangents_are_within_the_budget(implementation, name, scale, masked, dtype):
    rng = np.random.default_rng(1)
    shape = (6, 130)
    where = rng.random(shape) < 0.6 if masked else None
    factor = np.float32([0.3, -0.3, 0.0, 1.0, 2.0, -1.0]) if scale == "of rows" else scale
    scale = factor if np.ndim(factor) == 0 else factor[:, None]
    f = op(name, implementation, axis=-1, where=where, scale=factor)
    derivatives = jax.jit(lambda x, t, c: (jax.jvp(f, (x,), (t,))[1], jax.vjp(f, x)[1](c)[0]))
    t = rng.standard_normal(shape).astype(jnp.dtype(dtype))
    c = t[:, 0] if name == "logsumexp" else t
    arrays = cases.inputs(shape, dtype)
    cases.assert_ran(implementation, derivatives, arrays["normal"], t, c)
    for kind in ("normal", "wide", "offset of 1e4", "outliers", "equal", *(["some -inf"] if np.ndim(factor) == 0 else [])):
        x = arrays[kind]
        if name == "softmax":
            forward = backward = oracle.softmax_derivative(x, t, -1, where, scale, saved=dtype)
        elif name == "log_softmax":
            forward = oracle.log_softmax_tangent(x, t, -1, where, scale)
            backward = oracle.log_softmax_cotangent(x, t, -1, where, scale)
        else:
            forward = oracle.logsumexp_tangent(x, t, -1, where, scale)
            backward = oracle.logsumexp_cotangent(x, c, -1, where, scale)
        if where is not None:
            x, t_in = np.where(where, x, np.asarray(np.nan, x.dtype)), np.where(where, t, np.asarray(np.nan, t.dtype))
        else:
            t_in = t
        tangent, cotangent = derivatives(x, t_in, c if name == "logsumexp" else t_in)
        assert oracle.error(tangent, forward) <= 1, kind
        assert oracle.error(cotangent, backward) <= 1, kind


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", cases.OPS)
def test_gradient_of_scale(name):
    x, weights = (np.random.default_rng(seed).standard_normal((4, 33)) for seed in (2, 3))
    x[0, 3], weights[0, 3] = -np.inf, 0

    def loss(f, x, scale):
        y = f(x, scale)
        return jnp.sum(jnp.where(jnp.isfinite(y), weights[(..., 0) if name == "logsumexp" else ...] * y, 0))

    def theirs(x, scale):
        return getattr(jax.nn, name)(x * (scale[:, None] if scale.ndim else scale), axis=-1)

    ours = functools.partial(loss, lambda x, scale: getattr(jaxsoftmax, name)(x, -1, scale=scale))
    finite, theirs = np.where(np.isfinite(x), x, -1e30), functools.partial(loss, theirs)
    both = jax.jit(lambda x, finite, scale: (jax.grad(ours, (0, 1))(x, scale), jax.grad(theirs, (0, 1))(finite, scale)))
    for scale in (np.float64(0.7), np.float64(2.0), np.array([0.7, 2.0, 0.0, -1.5])):
        oracle.assert_same_in_float64(*both(x, finite, scale))


EDGES = {
    "all -inf": np.array([[-np.inf, -np.inf], [0.0, 1.0]], np.float32),
    "+inf": np.array([[np.inf, 1.0], [0.0, 1.0]], np.float32),
    "-inf and +inf": np.array([[np.inf, -np.inf]], np.float32),
    "NaN": np.array([[np.nan, 1.0], [2.0, 3.0]], np.float32),
    "one column": np.array([[5.0], [-np.inf], [np.nan]], np.float32),
    "no rows": np.zeros((0, 3), np.float32),
    "no columns": np.zeros((3, 0), np.float32),
    "int8": np.array([[1, 2, 3]], np.int8),
    "int32": np.array([[1, 2, 3]], np.int32),
    "uint8": np.array([[3, 3, 3]], np.uint8),
    "float16": np.array([[1, 2, 3]], np.float16),
    "complex": np.array([[1 + 2j, 0.5 - 1j]], np.complex64),
}


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # jax.nn casts -inf to integers
@pytest.mark.parametrize(
    ("name", "edge"),
    [
        pytest.param(name, edge, marks=cases.slow_unless((i + j) % 2 == 0))  # each edge case with one op or two, in turn
        for i, name in enumerate(cases.OPS)
        for j, edge in enumerate(EDGES)
    ],
)
def test_edge_cases_are_those_of_jax_nn(name, edge):
    x, axes = EDGES[edge], (-1, 0, None, (0, 1), ())
    both = jax.jit(lambda x: [(getattr(jaxsoftmax, name)(x, axis), of_jax_nn(name)(x, axis)) for axis in axes])
    for axis, (actual, expected) in zip(axes, both(x), strict=True):
        assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), axis
        if edge == "complex":  # (8 + 3 * |s - max|) roundings of either part, by ours and by theirs
            largest = np.max(np.abs(expected), initial=1)
            np.testing.assert_allclose(actual, expected, rtol=0, atol=4 * (8 + 3 * 4) * oracle.EPS * largest)
        else:
            assert_like_jax_nn(actual, expected, TRUTH[name](x, axis))


def assert_like_jax_nn(actual, expected, truth):
    """Fails unless what is NaN or infinite is so in both, and the rest within the budget."""
    ours, theirs = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_array_equal(np.where(np.isfinite(ours), 0, ours), np.where(np.isfinite(theirs), 0, theirs))
    assert oracle.error(actual, truth) <= 1


@pytest.mark.parametrize("name", cases.OPS)
def test_edge_cases_of_where_are_those_of_jax_nn(name):
    x = np.array([[1.0, -np.inf, np.nan], [-np.inf, -np.inf, np.inf], [np.nan, 2.0, 3.0]], np.float32)
    axes, ours, theirs = (-1, 0, None), getattr(jaxsoftmax, name), getattr(jax.nn, name)
    whole = jax.jit(lambda x, where: [(ours(x, axis, where=where), theirs(x, axis, where=where)) for axis in axes])
    for mask in (x > 0, ~np.isnan(x), np.zeros_like(x, bool), np.array([[True], [False], [True]]), np.array(False)):
        where = np.broadcast_to(mask, x.shape)  # jax.nn raises on rank promotion
        for axis, (actual, expected) in zip(axes, whole(x, where), strict=True):
            assert_like_jax_nn(actual, expected, TRUTH[name](x, axis, where))


def test_scalars_and_numbers():
    assert jaxsoftmax.softmax(3.0, axis=None) == 1
    assert jaxsoftmax.log_softmax(3, axis=()) == 0
    assert jaxsoftmax.logsumexp(3) == 3
    assert jaxsoftmax.logsumexp(np.array([True, False])).dtype == jnp.float32
    assert oracle.error(jaxsoftmax.logsumexp(np.array([True, False])), oracle.logsumexp(np.array([1, 0]))) <= 1


def test_integers_do_not_wrap():
    x = np.array([-100, 100, 127], np.int8)
    assert oracle.error(jaxsoftmax.softmax(x), oracle.softmax(x)) <= 1


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
@pytest.mark.parametrize("name", cases.OPS)
def test_float8_is_computed_in_float32(name, dtype):
    x = np.random.default_rng(0).standard_normal((4, 16)).astype(jnp.dtype(dtype))
    y = getattr(jaxsoftmax, name)(x, axis=-1)
    assert y.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(y, jax.jit(lambda x: getattr(jax.nn, name)(x.astype(jnp.float32), axis=-1).astype(dtype))(x))


@pytest.mark.filterwarnings("ignore:invalid value encountered in cast")  # jax.nn casts -inf to integers
@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", cases.OPS)
def test_float64_is_computed_in_float64(name):
    x = 1e3 + np.random.default_rng(0).standard_normal((4, 1000))
    t = np.random.default_rng(1).standard_normal((4, 1000))
    f = op(name, axis=-1)
    y = f(x)
    assert y.dtype == np.float64
    oracle.assert_same_in_float64(y, TRUTH[name](x, -1).value)
    truth = {"softmax": oracle.softmax_derivative, "log_softmax": oracle.log_softmax_tangent}
    expected = truth.get(name, oracle.logsumexp_tangent)(x, t, -1).value
    oracle.assert_same_in_float64(jax.jvp(f, (x,), (t,))[1], expected)
    assert getattr(jaxsoftmax, name)(np.arange(3)).dtype == of_jax_nn(name)(np.arange(3)).dtype


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_float64_result_of_float32(name):
    x = np.random.default_rng(0).standard_normal((4, 100)).astype(np.float32)
    f = op(name, dtype=np.float64, scale=1.5)
    oracle.assert_same_in_float64(f(x), TRUTH[name](x, -1, scale=1.5).value)
    (gradient,) = jax.vjp(f, x)[1](x.astype(np.float64))
    assert gradient.dtype == np.float32


@pytest.mark.usefixtures("x64")
def test_logsumexp_with_factors_and_sign():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 4, 33))
    where = rng.random((4, 33)) < 0.7
    for options in (
        {"axis": -1},
        {"axis": 0, "keepdims": True},
        {"axis": None, "return_sign": True},
        {"axis": -1, "where": where},
    ):
        actual, expected = jaxsoftmax.logsumexp(a, b=b, **options), jax.nn.logsumexp(a, b=b, **options)
        oracle.assert_same_in_float64(actual, expected)
    actual, expected = (module.logsumexp(a, return_sign=True) for module in (jaxsoftmax, jax.nn))
    oracle.assert_same_in_float64(actual, expected)
    half = jaxsoftmax.logsumexp(a.astype(np.float16), axis=-1, b=np.float16(2))
    assert half.dtype == np.float16
    truth = oracle.logsumexp(a.astype(np.float16), -1)
    assert oracle.error(half, oracle.Truth(truth.value + np.log(2), truth.budget + 8 * oracle.EPS)) <= 1


@pytest.mark.usefixtures("x64")
def test_scale_of_logsumexp_with_factors_and_sign():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 4, 3, 5))
    where, scale = rng.random((4, 3, 5)) < 0.7, np.array([0.7, 0.0, -2.0])
    a[0, 0, 0], b[0, 0, 0], where[0, 0, 0] = -np.inf, 2.0, True
    hidden, options = np.where(where, a, np.nan), {"axis": (0, 2), "return_sign": True}

    def total(f):
        return lambda a, scale: jnp.sum(f(a, scale)[0] * jnp.arange(1.0, 4))

    def ours(a, scale):
        return jaxsoftmax.logsumexp(a, b=b, where=where, scale=scale, **options)

    def theirs(a, scale):
        return jax.nn.logsumexp(jnp.where(where, a, 0) * scale[None, :, None], b=b, where=where, **options)

    fs = [lambda a, scale, f=f: (f(a, scale), jax.grad(total(f), (0, 1))(a, scale)) for f in (ours, theirs)]
    oracle.assert_same_in_float64(jax.jit(fs[0])(hidden, scale), jax.jit(fs[1])(np.maximum(a, -1e30), scale))
    narrow = a[1].astype(np.float16)
    half = jaxsoftmax.logsumexp(narrow, -1, np.float16(2), scale=scale)  # the product is not rounded
    assert half.dtype == np.float16
    truth = oracle.logsumexp(narrow, -1, scale=scale[:, None])
    assert oracle.error(half, oracle.Truth(truth.value + np.log(2), truth.budget + 8 * oracle.EPS)) <= 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8", "complex64", "bool"])
def test_dtypes_of_logsumexp_with_factors_are_those_of_jax_nn(dtype):
    factors = None, 2.0, 2, np.float32(2), np.ones(3, np.int32), np.ones(3, np.complex64)

    def theirs(a, factor):
        factor = factor[None] if np.ndim(factor) == 1 else factor  # jax.nn raises on rank promotion
        return of_jax_nn("logsumexp")(a, axis=-1, b=factor, return_sign=True)

    def both(a):
        return [(jaxsoftmax.logsumexp(a, axis=-1, b=b, return_sign=True), theirs(a, b)) for b in factors]

    for factor, (actual, expected) in zip(factors, jax.jit(both)(np.ones((2, 3), jnp.dtype(dtype))), strict=True):
        assert [x.dtype for x in actual] == [x.dtype for x in expected], factor
        few = 4 * float(jnp.finfo(actual[0].dtype).eps)  # each is rounded a few times, jax.nn's in its own dtype
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=few, atol=0, err_msg=repr(factor))


@pytest.mark.parametrize("name", cases.OPS)
def test_narrow_integers_become_floating(name):
    for dtype in (jnp.int4, jnp.uint4):
        y = getattr(jaxsoftmax, name)(jnp.asarray([0, 3, 7], dtype), axis=-1)
        assert oracle.error(y, TRUTH[name](np.array([0.0, 3.0, 7.0]), -1)) <= 1


@pytest.mark.parametrize("name", cases.OPS)
@pytest.mark.parametrize("implementation", cases.IMPLEMENTATIONS)
def test_bits_repeat_and_do_not_depend_on_other_rows(implementation, name):
    x = cases.inputs((64, 1000), "float32")["wide"]
    f = op(name, implementation, axis=-1)
    cases.assert_ran(implementation, f, x)
    y = np.asarray(f(x))
    np.testing.assert_array_equal(y, f(x))
    if implementation == "xla":
        return  # XLA sums in an order that depends on how many rows there are, for jax.nn as well
    np.testing.assert_array_equal(y[5:12], f(x[5:12]))
    np.testing.assert_array_equal(y[5:6], f(x[5:6]))


@st.composite
def calls(draw):
    shape = tuple(draw(st.lists(st.integers(0, 9), min_size=0, max_size=4)))
    axes = draw(st.sets(st.integers(0, len(shape) - 1))) if shape else set()
    axis = draw(st.sampled_from([None, tuple(axes), tuple(a - len(shape) for a in axes)]))
    mask = draw(st.none() | st.just([d if draw(st.booleans()) else 1 for d in shape]))
    scale = draw(st.none() | st.sampled_from([0.5, -2.0, 1.0]))
    return shape, axis, mask, scale, draw(st.sampled_from(cases.DTYPES)), draw(st.sampled_from(cases.DTYPES))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(call=calls(), name=st.sampled_from(cases.OPS), seed=st.integers(0, 2**16))
def test_random_combinations_of_features(call, name, seed):
    shape, axis, mask, scale, dtype, result = call
    rng = np.random.default_rng(seed)
    x = (3 * rng.standard_normal(shape)).astype(jnp.dtype(dtype))
    where = None if mask is None else rng.random(mask) < 0.6
    if name == "logsumexp":
        options, truth, result = {"scale": scale}, oracle.logsumexp(x, axis, where, scale), dtype
    else:
        options, truth = {"scale": scale, "dtype": result}, TRUTH[name](x, axis, where, scale)
    y = jax.jit(lambda x, where: getattr(jaxsoftmax, name)(x, axis, where=where, **options))(x, where)
    assert y.dtype == jnp.dtype(result)
    assert oracle.error(y, truth) <= 1


both_softmaxes = jax.jit(lambda x: (jaxsoftmax.softmax(x), jaxsoftmax.log_softmax(x)))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    columns=st.sampled_from([1, 2, 3, 8, 31, 33, 300]),  # few, as each is compiled anew
    shift=st.floats(-1e4, 1e4),
    spread=st.floats(0, 50),
    seed=st.integers(0, 2**16),
)
def test_laws_of_softmax(columns, shift, spread, seed):
    x = (shift + spread * np.random.default_rng(seed).standard_normal((2, columns))).astype(np.float32)
    y, log_y = both_softmaxes(x)
    y, truth = np.asarray(y, np.float64), oracle.softmax(x)
    assert np.all(np.abs(y.sum(-1) - 1) <= truth.budget.sum(-1))
    assert np.all((y >= 0) & (y <= 1))
    np.testing.assert_array_equal(x.max(-1), np.take_along_axis(x, np.argmax(y, -1)[:, None], -1)[:, 0])
    order = np.random.default_rng(seed).permutation(columns)
    assert oracle.error(np.asarray(both_softmaxes(x[:, order])[0])[:, np.argsort(order)], truth) <= 1
    assert oracle.error(log_y, oracle.log_softmax(x)) <= 1


def test_a_scale_that_float32_does_not_hold_is_refused():
    with pytest.raises(ValueError, match=r"^softmax: scale must be finite in float32, got 1e\+300$"):
        jaxsoftmax.softmax(np.ones(3, np.float32), scale=1e300)
