"""The kernels of the largest entries and of samples, emulated: as Mosaic has lowered them, with their PTX, on any machine."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

from ..support import cases, oracle
from ..support.emulator import emulated
from ..support.emulator.machine import Machine
from ..support.top_k.cases import inputs, weights_of
from ..support.top_k.oracle import bits
from ..support.top_k.oracle import top_k as truth

LONG, SHORT, SHORT_GRADIENT = "top_k_mosaic", "top_k_of_short_rows_mosaic", "softmax_top_k_vjp_of_short_rows_mosaic"
DRAWN, CHECKED, AGAIN = "categorical_mosaic", "categorical_check_mosaic", "categorical_again_mosaic"


def hurtful(cols, dtype, rows=2, kinds=None):
    """Rows of each kind of input, one below another."""
    arrays = inputs((rows, cols), dtype)
    return np.concatenate([arrays[kind] for kind in arrays if kinds is None or kind in kinds])


def assert_the_largest(found, x, k, where=None):
    """The values and indices are those of `lax.top_k`, to the bits."""
    values, indices = truth(x, k, where=where)
    np.testing.assert_array_equal(found[1], indices)
    np.testing.assert_array_equal(bits(found[0]), bits(values))


# Rows of any length. Those of 8192 columns have few threads; 50257 are ragged, and of few rows several blocks have one.


def in_turn(dtypes, others):
    """Returns cases of a dtype and something else. By default each dtype has its turn."""
    return [
        pytest.param(dtype, *other, marks=cases.slow_unless(i == j % len(dtypes)))
        for i, dtype in enumerate(dtypes)
        for j, other in enumerate(others)
    ]


@pytest.mark.parametrize(
    ("dtype", "cols", "k"),
    in_turn(
        ("float32", "bfloat16", "int32", "float16", "uint32", "int8"),
        [(641, 641), (9001, 50), (1000, 20), (4097, 7), (1, 1), (640, 640)],
    ),
)
def test_the_largest_entries(dtype, cols, k):
    x = hurtful(cols, dtype, rows=1)
    f = functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic")
    assert_the_largest(emulated(f, x, kernels=[LONG]), x, k)


@pytest.mark.parametrize(
    ("cols", "k", "dtype"), [(50257, 50, "bfloat16"), pytest.param(20001, 1024, "float32", marks=pytest.mark.slow)]
)
def test_the_largest_entries_of_rows_that_blocks_share(cols, k, dtype):
    x = hurtful(cols, dtype, rows=1, kinds=("increasing", "special"))
    f = functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic")
    assert_the_largest(emulated(f, x, kernels=[LONG]), x, k)


@pytest.mark.parametrize(("dtype", "k"), in_turn(("float32", "bfloat16"), [(300,), (4,)]))
def test_lists_that_fill_up(dtype, k):
    """Sweeps in which all is above the bound, or nothing, or much is alike: one warp bisects short lists, and all long ones."""
    rng, cols = np.random.default_rng(1), 9001
    normal = rng.standard_normal((7, cols)).astype(np.float32)
    x = np.stack([
        np.arange(cols, dtype=np.float32),
        -np.arange(cols, dtype=np.float32),
        np.repeat(np.arange(1 + cols // 3000, dtype=np.float32), 3000)[:cols],
        np.where(rng.random(cols) < 0.999, -np.inf, normal[0]),
        np.round(normal[1]),
        np.where(rng.random(cols) < 0.01, np.float32(np.nan), normal[2]),
        np.full(cols, -1, np.int32).view(np.float32),
    ]).astype(jnp.dtype(dtype))  # fmt: skip
    f = functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic")
    assert_the_largest(emulated(f, x, kernels=[LONG]), x, k)


@pytest.mark.parametrize(("dtype", "shape"), in_turn(("bfloat16", "float32", "int32"), [((9, 3000),), ((1, 3000),), ((9, 1),)]))
def test_the_largest_entries_of_masked_rows(dtype, shape):
    x = hurtful(3000, dtype, rows=3)[:9]
    where = np.random.default_rng(3).random(shape) < 0.3
    f = functools.partial(jaxsoftmax.top_k, k=9, implementation="mosaic")
    assert_the_largest(emulated(lambda x, where: f(x, where=where), x, where, kernels=[LONG]), x, 9, where)


WEIGHED = ("normal", "wide", "outliers", "offset of 1e4", "ties", "some -inf", "equal")


@pytest.mark.parametrize(
    ("case", "scale", "normalize"), in_turn([(3000, "float32"), (33001, "bfloat16")], [(-0.5, "selected"), (None, "all")])
)
def test_the_largest_weights(case, scale, normalize):
    """The state comes along, of rows that have one slice or several, in one block or two."""
    cols, dtype = case
    x = hurtful(cols, dtype, rows=1, kinds=WEIGHED if cols == 3000 else WEIGHED[:3])
    f = functools.partial(jaxsoftmax.softmax_top_k, k=8, scale=scale, normalize=normalize, return_lse=True)
    weights, indices, lse = emulated(functools.partial(f, implementation="mosaic"), x, kernels=[LONG])
    expected, at, of_rows = weights_of(x, 8, normalize, scale)
    np.testing.assert_array_equal(indices, at)
    assert oracle.error(np.asarray(weights), expected) <= 1
    assert oracle.error(np.asarray(lse), of_rows) <= 1


@pytest.mark.parametrize(("dtype", "cols"), in_turn(("bfloat16", "float32"), [(33001,)]))
def test_bits_of_a_row_do_not_depend_on_the_others(dtype, cols):
    """However many blocks share a row, and wherever in a line it starts."""
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((2, cols)), dtype)
    f = functools.partial(jaxsoftmax.softmax_top_k, k=20, return_lse=True, implementation="mosaic")
    few = emulated(f, x, kernels=[LONG])
    many = emulated(f, x[jnp.array([1, 1, 0, 1])], kernels=[LONG], multiprocessors=1)
    for a, b in zip(few, many, strict=True):
        np.testing.assert_array_equal(bits(a)[[1, 1, 0, 1]], bits(b))


# Short rows.

COLS = [(64, 8), (264, 8), (8, 2), (100, 1), (300, 5), (512, 16), (64, 7), (16, 16), (40, 8)]


def short_inputs(cols, dtype, rows=40):
    """Rows that a lane cannot order by the bits that it keeps, too, and pairs whose order is not that of their columns."""
    rng, shape = np.random.default_rng(1), (rows, cols)
    normal = rng.standard_normal(shape).astype(np.float32)
    signs = np.where(rng.random(shape) < 0.5, np.float32(np.nan), -np.float32(np.nan))
    more = [
        normal,
        1 + rng.integers(0, 40, shape).astype(np.float32) * 2**-22,
        rng.integers(0, 4, shape).astype(np.float32),
        np.where(rng.random(shape) < 0.01, signs, normal),
        np.where(rng.random(shape) < 0.9, -np.inf, normal),
    ]
    found = [hurtful(cols, dtype)]
    if jnp.dtype(dtype).kind not in "iu":
        found += [np.asarray(array, jnp.dtype(dtype)) for array in more]
    return np.concatenate(found)


@pytest.mark.parametrize(("dtype", "cols", "k"), in_turn(("float32", "bfloat16", "int32", "float16", "uint32"), COLS))
def test_the_largest_entries_of_short_rows(dtype, cols, k):
    x = short_inputs(cols, dtype, rows=40 if cols < 200 else 12)
    f = functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic")
    is_short = cols * x.dtype.itemsize % 16 == 0
    assert_the_largest(emulated(f, x, kernels=[SHORT if is_short else LONG]), x, k)


@pytest.mark.parametrize(("cols", "k"), [(8, 8), (64, 8), (264, 8), (300, 5)])
@pytest.mark.parametrize("dtype", cases.quick("float32", "bfloat16", "uint32", slow=["float16", "int32"]))
def test_few_short_rows_are_searched_again(dtype, cols, k):
    """Lanes that are not sure ask their warp, which finds whatever they have lost: by a ballot, the only one."""
    rng, rows, unsure = np.random.default_rng(0), 200, []
    shape = (rows, cols - cols % (16 // jnp.dtype(dtype).itemsize))
    x = rng.standard_normal(shape) if jnp.dtype(dtype).kind not in "iu" else rng.integers(0, 2**32, shape, np.uint32)
    x[rows // 2 :] = np.minimum(x[rows // 2 :], -x[rows // 2 :])
    x = x.astype(jnp.dtype(dtype))
    vote = Machine.vote

    def noted(machine, kind, values):
        unsure.append(np.unique(machine.now[np.flatnonzero(values)]) if kind == "ballot" else [])
        return vote(machine, kind, values)

    f = functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic")
    with mock.patch.object(Machine, "vote", noted):
        assert_the_largest(emulated(f, x, kernels=[SHORT]), x, k)
    assert unsure
    assert sum(map(len, unsure)) <= 0.1 * rows


@pytest.mark.parametrize(
    ("dtypes", "cols", "k", "normalize"),
    in_turn(
        [("float32", None), ("bfloat16", "float32"), ("bfloat16", None), ("float16", None)],
        [
            (64, 8, "all"),
            (264, 5, "selected"),
            (8, 2, "all"),
            (512, 16, "selected"),
            (1024, 8, "all"),
            (64, 8, "selected"),
            (264, 5, "all"),
        ],
    ),
)
def test_weights_of_rows_and_their_gradients(dtypes, cols, k, normalize):
    """The second dtype is what the logits are cast to, as a router's are: gradients are rounded to what they were before."""
    (dtype, wide), options = dtypes, {"normalize": normalize, "return_lse": True, "implementation": "mosaic"}
    x = hurtful(cols, dtype, rows=4 if cols <= 512 else 1, kinds=WEIGHED)
    rng = np.random.default_rng(0)
    c = np.asarray(rng.standard_normal((len(x), k)), jnp.dtype(wide or dtype))
    b = rng.standard_normal(len(x)).astype(np.float32)

    def both(x, c, b):
        def weights(x):
            weights, indices, lse = jaxsoftmax.softmax_top_k(x if wide is None else x.astype(wide), k, **options)
            return (weights, lse), indices

        found, pull, indices = jax.vjp(weights, x, has_aux=True)
        return *found, indices, pull((c, b))[0]

    names = [SHORT, SHORT_GRADIENT] if cols <= 512 else [LONG, "logsumexp_vjp_mosaic"]
    weights, lse, indices, gradient = map(np.asarray, emulated(both, x, c, b, kernels=names))
    expected, at, of_rows = weights_of(x, k, normalize)
    np.testing.assert_array_equal(indices, at)
    assert oracle.error(weights, expected) <= 1
    assert oracle.error(lse, of_rows) <= 1
    t, where = np.zeros(x.shape), None
    np.put_along_axis(t, at, oracle.to64(c), -1)
    if normalize == "selected":
        where = np.zeros(x.shape, bool)
        np.put_along_axis(where, at, True, -1)
    of_weights, p, size = oracle.softmax_derivative(x, t, where=where, saved=dtype), oracle.softmax(x), np.abs(oracle.to64(b))
    value = of_weights.value + p.value * oracle.to64(b)[:, None]
    budget = of_weights.budget + (p.budget + oracle.half_unit(dtype) * p.value) * size[:, None]
    assert oracle.error(gradient, oracle.Truth(value, budget)) <= 1


@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float32", "float16"]))
def test_short_rows_without_a_distribution_have_the_gradients_of_the_reference(dtype, normalize):
    x = hurtful(64, dtype)
    c = np.random.default_rng(0).standard_normal((len(x), 8)).astype(dtype)

    def gradient(x, c, implementation="mosaic"):
        options = {"normalize": normalize, "implementation": implementation}
        return jax.vjp(lambda x: jaxsoftmax.softmax_top_k(x, 8, **options)[0], x)[1](c)[0]

    found = np.asarray(emulated(gradient, x, c, kernels=[SHORT, SHORT_GRADIENT]))
    expected = np.asarray(jax.jit(functools.partial(gradient, implementation="xla"))(x, c))
    np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
    tolerance = 1e-5 if dtype == "float32" else 4 * oracle.half_unit(dtype)
    np.testing.assert_allclose(*map(oracle.to64, (found, expected)), rtol=tolerance, atol=tolerance)


# Samples. The reference makes the same noise.


def drawn(x, names, seed=3, multiprocessors=132, **options):
    """The results of `categorical` by the kernels and by the reference."""
    f = functools.partial(jaxsoftmax.categorical, **options)
    key = jax.random.key(seed)
    found = emulated(functools.partial(f, implementation="mosaic"), key, x, kernels=names, multiprocessors=multiprocessors)
    expected = jax.jit(functools.partial(f, implementation="xla"))(key, x)
    return found, expected


def rows_that_hurt(cols):
    """Returns rows with nothing to see, or that overflow at the temperature: no search may go on without end."""
    normal = np.random.default_rng(0).standard_normal(cols).astype(np.float32)
    rows = [np.full(cols, -np.inf), np.full(cols, 0.5), -3.4e38 + 1e37 * np.abs(normal), 3e38 * np.sign(normal), 1e-3 * normal]
    rows += [np.where(np.arange(cols) == cols - 1, 0.0, -np.inf), np.where(np.arange(cols) % 2, 0.0, -0.0)]
    rows += [3 * normal, normal]
    return np.stack(rows).astype(np.float32)


FILTERS = {
    "none": ({}, [DRAWN]),
    "temperature": ({"temperature": 0.5}, [DRAWN]),
    "temperature of 0": ({"temperature": 0.0}, [DRAWN]),
    "top_p": ({"temperature": 0.5, "top_p": 0.9}, [DRAWN, CHECKED, AGAIN]),
    "both": ({"top_p": 0.3, "min_p": 0.2}, [DRAWN, CHECKED, AGAIN]),
    "hot": ({"temperature": 2.0, "top_p": 0.7, "min_p": 1.0}, [DRAWN, CHECKED, AGAIN]),
    "min_p": ({"min_p": 0.5}, ["logsumexp_forward_mosaic", DRAWN]),
    "top_k": ({"top_k": 2, "top_p": 0.4}, [LONG]),
}


@pytest.mark.parametrize("cols", cases.quick(70, slow=[3, 5003]))
@pytest.mark.parametrize(
    "kind", cases.quick("none", "min_p", "top_k", slow=["both", "temperature", "temperature of 0", "top_p", "hot"])
)
def test_samples_of_rows_that_hurt_are_those_of_the_reference(kind, cols):
    options, names = FILTERS[kind]
    found, expected = drawn(rows_that_hurt(cols), names, **options)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("cols", cases.quick(5003, slow=[3, 70]))
def test_samples_are_those_of_the_reference_with_filters_of_each_row(cols):
    filters = np.array(
        [(0.5, 0.9, 0), (1, 0.3, 0.2), (2, 0.7, 1), (1, 1.2, 0.5), (0, 0.5, -0.5), (1, np.nan, np.nan)], np.float32
    )
    x = rows_that_hurt(cols)
    temperature, top_p, min_p = (jnp.asarray(np.repeat(part, len(x))) for part in filters.T)
    options = {"temperature": temperature, "top_p": top_p, "min_p": min_p}
    found, expected = drawn(np.tile(x, (len(filters), 1)), [DRAWN, CHECKED, AGAIN], **options)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float32"]))
def test_one_kernel_sorts_rows_at_temperatures_of_their_own_and_sums_their_weights(dtype):
    x = np.asarray(3 * np.random.default_rng(0).standard_normal((5, 5003)), jnp.dtype(dtype))
    options = {"temperature": np.float32([0.5, 1, 0, 2, 0.1]), "top_k": 20, "top_p": 0.9, "return_log_prob": True}
    (index, log_prob), expected = drawn(x, [LONG], **options)
    np.testing.assert_array_equal(index, expected[0])
    np.testing.assert_allclose(log_prob, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float32"]))
def test_rows_that_are_drawn_again_are_those_of_the_reference(dtype):
    """Many are with a small `top_p`, more than run at a time, and more than a block counts at a time."""
    x = np.asarray(2 * np.random.default_rng(0).standard_normal((40, 300)), jnp.dtype(dtype))
    found, expected = drawn(x, [DRAWN, CHECKED, AGAIN], top_p=0.2, multiprocessors=2)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("dtype", "options"), in_turn(("float32", "bfloat16"), [({"top_p": 0.9, "temperature": 0.7},)]))
def test_samples_of_rows_that_blocks_share_and_their_probabilities(dtype, options):
    x = np.asarray(3 * np.random.default_rng(0).standard_normal((2, 20001)), jnp.dtype(dtype))
    (index, log_prob), expected = drawn(x, [DRAWN, CHECKED, AGAIN], return_log_prob=True, **options)
    np.testing.assert_array_equal(index, expected[0])
    np.testing.assert_allclose(log_prob, expected[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cols", [70, 5003])
@pytest.mark.parametrize(("dtype", "divides"), [("bfloat16", True), ("float32", False)])
def test_samples_behind_a_factor_are_those_of_the_reference(dtype, divides, cols):
    """A negative factor turns the order round; the last two make rows of NaN and rows that differ in nothing."""
    numbers = np.float32([0.7, -1.3, 4, -0.01, np.nan, np.inf if divides else 0])[:, None]
    x = (3 * np.random.default_rng(0).standard_normal((len(numbers), cols))).astype(jnp.dtype(dtype))
    x[0, 3:9], x[1, 3:9] = -np.inf, np.inf

    def both(implementation, x):
        wide = x.astype(jnp.float32)
        f = functools.partial(jaxsoftmax.categorical, jax.random.key(3), implementation=implementation)
        scores = wide / numbers if divides else wide * numbers
        return f(scores), *f(scores, temperature=0.5, return_log_prob=True)

    found = emulated(functools.partial(both, "mosaic"), x, kernels=[DRAWN, DRAWN])
    expected = jax.jit(functools.partial(both, "xla"))(x)
    for actual, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(actual, other, rtol=1e-5, atol=1e-5)


def test_samples_of_a_quotient_of_16_bits_are_those_of_the_exact_one():
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((6, 5003)), jnp.bfloat16)
    numbers = jnp.asarray([0.7, 0.3, 1.7, 2.2, 5, 0.9], jnp.bfloat16)[:, None]
    draw = functools.partial(jaxsoftmax.categorical, jax.random.key(3))
    found = emulated(lambda x: draw(x / numbers, implementation="mosaic"), x, kernels=[DRAWN])
    np.testing.assert_array_equal(found, draw(x.astype(jnp.float32) / numbers.astype(jnp.float32), implementation="xla"))
