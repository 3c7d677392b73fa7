"""The largest entries of rows, bit for bit, and their softmax weights against float64."""

import functools
import inspect

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import explain

from ..support import cases, oracle
from ..support.top_k.cases import inputs, plain_softmax_top_k, taken, weights_of
from ..support.top_k.oracle import bits
from ..support.top_k.oracle import top_k as truth

IMPLEMENTATIONS = cases.implementations("top_k")
FLOATS = ("float32", "bfloat16", "float16")
OTHER_INTEGERS = ("int8", "int16", "uint8", "uint16", "uint32")
SHAPES = [((3, 1), 1), ((2, 7), 7), ((5, 127), 1), ((4, 1000), 8), ((3, 1025), 100), ((2, 4097), 64), ((70,), 70)]
FINITE = ("normal", "wide", "outliers", "offset of 1e4", "equal", "ties")


def assert_same(actual, expected, message=None):
    """Fails unless values have the same bits, except NaN, whose sign alone counts, and indices are the same."""
    for one, other in zip(actual, expected, strict=True):
        one, other = np.asarray(one), np.asarray(other)
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.dtype.kind not in "iu":
            both = np.isnan(one.astype(np.float64)) & np.isnan(other.astype(np.float64))
            np.testing.assert_array_equal(np.signbit(one), np.signbit(other), message)
            one, other = (np.where(both, np.ones_like(bits(array)), bits(array)) for array in (one, other))
        np.testing.assert_array_equal(one, other, message)


@pytest.mark.parametrize("dtype", FLOATS)
def test_the_truth_is_the_order_of_lax(dtype):
    with jax.default_device(jax.devices("cpu")[0]):
        for kind, x in inputs((4, 100), dtype).items():
            assert_same(jax.lax.top_k(x, 100), truth(x, 100), kind)


@pytest.mark.parametrize(("shape", "k"), SHAPES, ids=cases.ident)
@pytest.mark.parametrize("dtype", cases.quick("float32", "bfloat16", "int32", slow=["float16", *OTHER_INTEGERS]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_largest_entries(implementation, dtype, shape, k):
    f = jax.jit(functools.partial(jaxsoftmax.top_k, k=k, implementation=implementation))
    arrays = inputs(shape, dtype)
    cases.assert_ran(implementation, f, next(iter(arrays.values())))
    for kind, x in arrays.items():
        assert_same(f(x), truth(x, k), kind)


FLOATS_OF_8_BITS = [name for name in dir(ml_dtypes) if name.startswith("float8_")]


@pytest.mark.parametrize("dtype", [*FLOATS_OF_8_BITS, "bfloat16", "float16", "float32", "int8", "uint8"])
def test_all_bits_are_those_of_lax(dtype):
    """Also those of NaN and of zeros, beside all other numbers of 8 bits."""
    dtype, rng = jnp.dtype(dtype), np.random.default_rng(0)
    patterns = np.arange(256, dtype=np.uint8)
    if dtype.itemsize > 1:  # infinity and what is next to it, zeros, and some that are most often NaN or a number
        unsigned, top = np.dtype(f"u{dtype.itemsize}"), 1 << (8 * dtype.itemsize - 1)
        infinity = int(np.asarray(np.inf, dtype).view(unsigned))
        patterns = np.array([sign | more for sign in (0, top) for more in (0, 1, infinity, infinity + 1, top - 1)], unsigned)
        patterns = np.concatenate([patterns, infinity | rng.integers(0, 2 * top, 20, unsigned, endpoint=False)])
    pairs = np.stack([np.repeat(patterns, len(patterns)), np.tile(patterns, len(patterns))], 1)
    x = np.concatenate([pairs, rng.choice(patterns, (len(pairs), 1))], 1).view(dtype)
    find = functools.partial(jaxsoftmax.top_k, implementation="xla")
    results = jax.jit(lambda x: [(find(x, k), jax.lax.top_k(x, k)) for k in (1, 2, 3)])(x)
    for k, ((values, indices), expected) in enumerate(results, 1):
        np.testing.assert_array_equal(bits(np.asarray(values)), bits(np.asarray(expected[0])), f"k = {k}")
        np.testing.assert_array_equal(indices, expected[1], f"k = {k}")


@pytest.mark.parametrize(("columns", "k"), [(50257, 1), (50257, 256), (128256, 8), (128256, 1024), (1 << 20, 50)])
@pytest.mark.parametrize("dtype", cases.quick("float32", slow=["bfloat16"]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_the_largest_entries_of_long_rows(implementation, dtype, columns, k):
    f = jax.jit(functools.partial(jaxsoftmax.top_k, k=k, implementation=implementation))
    arrays = inputs((3, columns), dtype)
    cases.assert_ran(implementation, f, arrays["normal"])
    for kind in ("normal", "ties", "special", "increasing", "equal"):
        assert_same(f(arrays[kind]), truth(arrays[kind], k), kind)


@pytest.mark.parametrize("mask", [(4, 3, 33), (1, 1, 33), (4, 1, 1), (33,), ()], ids=cases.ident)
@pytest.mark.parametrize("dtype", ["float32", "int32", "int8", *cases.quick(slow=["bfloat16", "uint8"])])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_where(implementation, dtype, mask):
    where = np.random.default_rng(1).random(mask) < 0.5
    if len(mask) == 3 and mask[0] > 1:
        where[1] = False  # rows with nothing to see
    f = jax.jit(functools.partial(jaxsoftmax.top_k, k=20, implementation=implementation))
    arrays = inputs((4, 3, 33), dtype)
    cases.assert_ran(implementation, lambda x: f(x, where=where), next(iter(arrays.values())))
    for kind, x in arrays.items():
        assert_same(f(x, where=where), truth(x, 20, where=where), kind)


@pytest.mark.parametrize(("shape", "axis"), [((5, 70, 6), 1), ((70, 4), 0), ((2, 35, 3, 4), -3)], ids=cases.ident)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_other_axes(implementation, shape, axis):
    f = jax.jit(functools.partial(jaxsoftmax.top_k, k=9, axis=axis, implementation=implementation))
    arrays = inputs(shape, "float32")
    cases.assert_ran(implementation, f, arrays["normal"])
    assert_same(f(arrays["special"]), truth(arrays["special"], 9, axis))
    weights, indices = jaxsoftmax.softmax_top_k(arrays["normal"], 9, axis=axis, implementation=implementation)
    assert_same([indices], [truth(arrays["normal"], 9, axis)[1]])
    expected = taken(oracle.softmax(arrays["normal"], axis), indices, axis)
    assert oracle.error(weights, expected) <= 1


def test_x_broadcasts_against_where():
    x, where = np.float32([3, 1, 2]), np.array([[True, True, True], [False, True, True]])
    values, indices = jaxsoftmax.top_k(x, 2, where=where)
    np.testing.assert_array_equal(values, [[3, 2], [2, 1]])
    np.testing.assert_array_equal(indices, [[0, 2], [2, 1]])


@pytest.mark.parametrize("shape", [(0, 5), (5, 0), (3, 5), (5,)], ids=cases.ident)
def test_nothing_is_found(shape):
    x, rows = np.ones(shape, np.float32), shape[:-1]
    values, indices = jaxsoftmax.top_k(x, 0)
    assert (values.shape, values.dtype, indices.shape, indices.dtype) == ((*rows, 0), jnp.float32, (*rows, 0), jnp.int32)
    weights, indices, lse = jaxsoftmax.softmax_top_k(x, 0, return_lse=True)
    assert (weights.shape, indices.shape) == ((*rows, 0), (*rows, 0))
    np.testing.assert_array_equal(lse, jaxsoftmax.logsumexp(x, -1))
    if shape[0] == 0:
        assert jaxsoftmax.top_k(x, 2)[0].shape == (0, 2)
        assert jaxsoftmax.softmax_top_k(x, 2)[1].shape == (0, 2)


def test_dtypes_without_infinity_and_wide_ones(x64):
    x = jnp.array([-448, 1, 2, jnp.nan], jnp.float8_e4m3fn)
    values, indices = jaxsoftmax.top_k(x, 4, where=np.array([True, False, True, False]))
    np.testing.assert_array_equal(values.astype(np.float32), [2, -448, -448, -448])
    np.testing.assert_array_equal(indices, [2, 0, 1, 3])
    for dtype in ("float64", "int64", "uint64"):
        wide = inputs((3, 50), dtype)
        f = jax.jit(functools.partial(jaxsoftmax.top_k, k=50))
        for kind, x in wide.items():
            assert_same(f(x), truth(x, 50), kind)


@pytest.mark.parametrize(("shape", "k"), [((5, 127), 2), ((2, 4097), 64)], ids=cases.ident)
@pytest.mark.parametrize("scale", [None, -2.0, *cases.quick(slow=[0.3])])
@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize("dtype", cases.quick("float32", "bfloat16", slow=["float16"]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_are_within_the_budget(implementation, dtype, normalize, scale, shape, k):
    options = {"k": k, "scale": scale, "normalize": normalize, "return_lse": True, "implementation": implementation}
    f, arrays = jax.jit(functools.partial(jaxsoftmax.softmax_top_k, **options)), inputs(shape, dtype)
    cases.assert_ran(implementation, f, arrays["normal"])
    for kind in (*FINITE, "some -inf"):
        weights, indices, lse = f(arrays[kind])
        assert (weights.dtype, indices.dtype, lse.dtype, lse.shape) == (jnp.dtype(dtype), jnp.int32, jnp.float32, shape[:-1])
        if kind == "some -inf" and scale is not None and scale < 0:
            is_infinite = np.isinf(arrays[kind]).any(-1, keepdims=True)  # +inf among the scores
            np.testing.assert_array_equal(np.isnan(weights), np.broadcast_to(is_infinite, weights.shape))
            continue
        expected = weights_of(arrays[kind], k, normalize, scale)
        assert_same([indices], [expected[1]], kind)
        assert oracle.error(weights, expected[0]) <= 1, kind
        assert oracle.error(lse, expected[2]) <= 1, kind


@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_of_a_scale_of_each_row(implementation, dtype, normalize):
    shape, axis = (3, 300, 4), 1
    where = np.random.default_rng(1).random(shape) < 0.7
    options = {"k": 7, "axis": axis, "normalize": normalize, "return_lse": True, "implementation": implementation}
    f, arrays = jax.jit(functools.partial(jaxsoftmax.softmax_top_k, **options)), inputs(shape, dtype)
    whole = np.resize(np.float32([0.5, -2.0, 0.0, 1.0, -0.3]), (3, 4))
    cases.assert_ran(implementation, lambda x, scale: f(x, scale=scale), arrays["normal"], whole)
    for kind, scale, mask in (("normal", whole, None), ("wide", whole[0], where), ("ties", whole[:, :1], where)):
        x = np.moveaxis(arrays[kind], axis, -1)
        hidden = None if mask is None else np.moveaxis(mask, axis, -1)
        expected = weights_of(x, 7, normalize, np.broadcast_to(scale, whole.shape), hidden)
        weights, indices, lse = f(arrays[kind], scale=scale, where=mask)
        assert_same([np.moveaxis(indices, axis, -1)], [expected[1]], kind)
        assert oracle.error(np.moveaxis(np.asarray(weights), axis, -1), expected[0]) <= 1, kind
        assert oracle.error(lse, expected[2]) <= 1, kind


@pytest.mark.parametrize("mask", [(4, 3, 33), (1, 1, 33), (4, 1, 1), (33,)], ids=cases.ident)
@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_weights_of_what_takes_part(implementation, normalize, mask):
    where = np.random.default_rng(1).random(mask) < 0.5
    if len(mask) == 3 and mask[0] > 1:
        where[1] = False
    x = inputs((4, 3, 33), "float32")["normal"]
    hidden = np.where(where, x, np.random.default_rng(0).choice(np.float32([np.nan, -np.nan, np.inf, 5]), x.shape))
    options = {"k": 20, "where": where, "normalize": normalize, "return_lse": True, "implementation": implementation}
    f = jax.jit(functools.partial(jaxsoftmax.softmax_top_k, **options))
    cases.assert_ran(implementation, f, x)
    weights, indices, lse = f(hidden)
    expected = weights_of(x, 20, normalize, where=where)
    assert_same([indices], [expected[1]])
    assert oracle.error(weights, expected[0]) <= 1
    assert oracle.error(lse, expected[2]) <= 1
    if len(mask) == 3 and mask[0] > 1:
        np.testing.assert_array_equal(weights[1], 0)
        np.testing.assert_array_equal(lse[1], -np.inf)


@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize("scale", cases.quick(None, slow=[0.5]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_rows_that_are_no_distribution(implementation, scale, normalize):
    inf, nan = np.inf, np.nan
    x = np.float32([[-inf] * 4, [0, inf, 1, -inf], [0, nan, 1, 2], [1, 2, 3, -inf]])
    options = {"scale": scale, "normalize": normalize, "return_lse": True, "implementation": implementation}
    f = jax.jit(functools.partial(jaxsoftmax.softmax_top_k, k=2, **options))
    cases.assert_ran(implementation, f, x)
    weights, indices, lse = f(x)
    np.testing.assert_array_equal(np.isnan(weights), [[True] * 2] * 3 + [[False] * 2])
    np.testing.assert_array_equal(indices, [[0, 1], [1, 2], [1, 3], [2, 1]])
    np.testing.assert_array_equal(lse[:3], [-inf, inf, nan])
    where = np.array([True, False, True, True])  # of the rows of -inf, too, not all is masked
    weights, indices, _ = f(x, where=where)
    np.testing.assert_array_equal(np.isnan(weights), [[True, False], [False] * 2, [False] * 2, [False] * 2])
    np.testing.assert_array_equal(weights[0, 1], 0)


@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize("dtype", cases.quick("float32", "bfloat16", slow=["float16"]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_are_those_of_float64(implementation, dtype, normalize):
    x = inputs((4, 300), dtype)["wide"]
    where = np.random.default_rng(1).random(x.shape) < 0.7
    c = np.random.default_rng(2).standard_normal((4, 6))

    def loss(x, scale, f):
        weights, _, lse = f(x, 6, scale=scale, where=where, normalize=normalize, return_lse=True)
        return jnp.sum(weights.astype(c.dtype) * c.astype(weights.dtype).astype(c.dtype)) + jnp.sum(lse).astype(c.dtype)

    ours = functools.partial(jaxsoftmax.softmax_top_k, implementation=implementation)
    with jax.enable_x64(True):
        plain = jax.jit(jax.grad(functools.partial(loss, f=plain_softmax_top_k), (0, 1)))
        expected = plain(x.astype(np.float64), np.float64(0.25))
    c = c.astype(np.float32)
    f = jax.jit(jax.grad(functools.partial(loss, f=ours), (0, 1)))
    cases.assert_ran(implementation, f, x, np.float32(0.25))
    actual = f(x, np.float32(0.25))
    assert (actual[0].dtype, actual[1].dtype) == (jnp.dtype(dtype), jnp.float32)
    unit = 2e-5 if dtype == "float32" else 4 * oracle.half_unit(dtype)
    for one, other in zip(actual, expected, strict=True):
        largest = np.max(np.abs(other))
        np.testing.assert_allclose(oracle.to64(one), other, rtol=unit, atol=unit * largest)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_explain_names_the_implementation(implementation):
    x = np.ones((4, 1000), np.float32)
    f = functools.partial(jaxsoftmax.softmax_top_k, k=4, implementation=implementation)
    cases.assert_ran(implementation, f, x)
    (decision,) = explain(f, x)
    assert (decision.primitive, decision.implementation) == ("softmax_top_k", implementation)


def test_sizes_that_are_symbolic_or_too_large_for_an_index():
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b"), jnp.float32)
    large = jax.ShapeDtypeStruct((1, 2**31 + 1), jnp.float32)
    for name in ("top_k", "softmax_top_k"):
        f = getattr(jaxsoftmax, name)
        with pytest.raises(ValueError, match=f"^{name}: k must be from 0 to b, .* got 3: .* constraint 'b >= 3'"):
            jax.eval_shape(lambda x, f=f: f(x, 3), x)
        with pytest.raises(TypeError, match=f"^{name}: k must be a concrete integer, got b"):
            jax.eval_shape(lambda x, f=f: f(x, x.shape[1]), x)
        with pytest.raises(ValueError, match=f"^{name}: .* must have at most 2147483648 entries along axis"):
            jax.eval_shape(lambda x, f=f: f(x, 3), large)
        known = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b", constraints=["b >= 3"]), jnp.float32)
        exported = jax.export.export(jax.jit(lambda x, f=f: f(x, 3)[1]), platforms=["cpu"])(known)
        assert exported.call(np.zeros((2, 4), np.float32)).shape == (2, 3)
    sample = functools.partial(jaxsoftmax.categorical, jax.random.key(0))
    with pytest.raises(TypeError, match=r"^categorical: top_k must be a concrete integer, got b"):
        jax.eval_shape(lambda x: sample(x, top_k=x.shape[1]), x)
    with pytest.raises(ValueError, match=r"^categorical: logits must have at most 2147483648 entries along axis"):
        jax.eval_shape(sample, large)
    assert jax.eval_shape(lambda x: sample(x, temperature=x.shape[1]), x).shape == x.shape[:1]


X = np.zeros((2, 3), np.float32)
WRONG = [
    ({"operand": X > 0}, TypeError, "top_k: operand must be floating or integer, got bool"),
    ({"operand": X.astype(np.complex64)}, TypeError, "top_k: operand must be floating or integer, got complex64"),
    ({"operand": np.float32(1), "k": 0}, ValueError, "top_k: axis -1 is out of range for operand with 0 dimensions"),
    ({"k": 4}, ValueError, "top_k: k must be from 0 to 3, the size of axis, got 4"),
    ({"k": -1}, ValueError, "top_k: k must be from 0 to 3"),
    ({"k": True}, TypeError, "top_k: k must be a concrete integer, got True"),
    ({"k": 1.0}, TypeError, "top_k: k must be a concrete integer, got 1.0"),
    ({"axis": 2}, ValueError, "top_k: axis 2 is out of range for operand with 2 dimensions, allowed are -2 to 1"),
    ({"axis": None}, TypeError, "top_k: axis must be a concrete integer, got None"),
    ({"where": X}, TypeError, "top_k: where must be boolean, got float32"),
    ({"where": np.ones(2, bool)}, ValueError, "top_k: where must broadcast with operand, got shapes"),
    ({"implementation": "fast"}, ValueError, "top_k: implementation must be None or one of"),
    ({"normalize": "none"}, ValueError, "softmax_top_k: normalize must be 'all' or 'selected', got 'none'"),
    ({"scale": X}, ValueError, "softmax_top_k: scale must be a scalar, or broadcast to rows of shape (2,), got shape (2, 3)"),
    ({"scale": X[0]}, ValueError, "softmax_top_k: scale must be a scalar, or broadcast to rows of shape (2,), got shape (3,)"),
    ({"scale": X[:, 0] > 0}, TypeError, "softmax_top_k: scale must be a real number, or one for each row, got bool"),
    ({"return_lse": 1}, TypeError, "softmax_top_k: return_lse must be True or False, got 1"),
    ({"logits": X > 0}, TypeError, "softmax_top_k: logits must be floating or integer, got bool"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=lambda value: cases.ident(value)[:40])
def test_wrong_arguments(arguments, error, message):
    function = getattr(jaxsoftmax, message.partition(":")[0])
    given = {next(iter(inspect.signature(function).parameters)): X, "k": 2} | arguments
    with pytest.raises(error) as raised:
        function(**given)
    assert str(raised.value).startswith(message)
