"""Samples: their noise word by word, their distribution by chi-squared tests, and the laws that filters obey."""

import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from scipy import stats

import jaxsoftmax
from jaxsoftmax.ops.top_k import noise

from ..support import cases
from ..support.top_k import oracle
from ..support.top_k.oracle import filtered, probabilities

IMPLEMENTATIONS = cases.implementations("top_k")
KEY = jax.random.key(7)
WORDS = np.asarray(jax.random.bits(KEY, (2,), np.uint32))

# Counter, key and result. Source: the known answers of Random123, kat_vectors.
ALL = 0xFFFFFFFF
KNOWN = {  # of Random123, with 7 rounds
    "zeros": ((0,) * 4, (0, 0), (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48)),
    "ones": ((ALL,) * 4, (ALL, ALL), (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662)),
    "pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
    ),
}


@pytest.mark.parametrize("promotion", ["strict", "standard"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("name", KNOWN)
def test_philox_gives_known_answers(name, wide, promotion):
    counter, key, expected = KNOWN[name]
    assert [int(word) for word in oracle.philox(counter, key)] == list(expected)
    assert [int(word) for word in noise.philox(counter, key)] == list(expected)  # of ints
    with jax.enable_x64(wide), jax.numpy_dtype_promotion(promotion):
        words = jax.jit(noise.philox)(tuple(map(np.uint32, counter)), tuple(map(np.uint32, key)))
        assert all(word.dtype == jnp.uint32 for word in words)
    assert [int(word) for word in words] == list(expected)


def test_a_kernel_may_multiply_by_its_own():
    def multiply(a, b):
        product = np.asarray(a, np.uint64) * np.uint64(b)
        return (product >> np.uint64(32)).astype(np.uint32), product.astype(np.uint32)

    given = np.random.default_rng(0).integers(0, 2**32, (6, 1000), np.uint32)
    ours, theirs = (noise.philox(tuple(given[:4]), tuple(given[4:]), by) for by in (noise.multiply, multiply))
    np.testing.assert_array_equal(ours, theirs)


def test_noise_is_as_precise_where_it_is_large():
    ends = [0, 1, 2, 3, 1000, 2**24 - 1, 2**24, 2**24 + 1, 2**31, 2**32 - 2**20]
    words = np.concatenate([np.array(ends, np.uint32), np.random.default_rng(0).integers(0, 2**32, 10000, np.uint32)])
    actual, expected = np.asarray(jax.jit(noise.gumbel)(words)), oracle.gumbel(words)
    assert actual.dtype == np.float32
    odds = np.exp(actual.astype(np.float64) - expected)  # how much more likely it makes an entry
    np.testing.assert_allclose(odds[words < 2**31], 1, rtol=2e-5)
    np.testing.assert_allclose(odds, 1, rtol=1e-3)
    small = np.arange(1, 2**12, dtype=np.uint32)
    assert (np.diff(jax.jit(noise.gumbel)(small)) < 0).all()
    last = noise.gumbel(np.uint32([2**32 - 1, 2**32 - 2]))
    assert jnp.isfinite(last).all()
    assert (last < -2.8).all()


@pytest.mark.parametrize("size", [1, 512, 513, 4097, *cases.quick(slow=[7, 4095, 4096, 9000])])
def test_noise_of_rows_is_that_of_each_column(size):
    rows = np.array([0, 1, 5, 2**32 - 1], np.uint32)[:, None]
    keys = [np.full((1, 1), word) for word in WORDS]
    columns = np.arange(size, dtype=np.int32)[None]
    whole = jax.jit(noise.gumbel_rows, static_argnums=3)(*keys, rows, size)
    np.testing.assert_array_equal(whole, jax.jit(noise.gumbel_at)(*keys, rows, columns))
    np.testing.assert_allclose(whole, oracle.noise(WORDS, rows, columns), atol=1e-3)


OPTIONS = {
    "plain": {},
    "temperature": {"temperature": 0.6},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 10},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.05},
    "top_k and top_p": {"top_k": 12, "top_p": 0.9, "temperature": 1.5},
    "all": {"top_k": 30, "top_p": 0.95, "min_p": 0.02, "temperature": 0.8},
    "top_p and min_p": {"top_p": 0.95, "min_p": 0.02, "temperature": 2.0},
}
COMBINED = ("temperature", "hot", "min_p", "top_k and top_p", "all", "top_p and min_p")  # have each alone in them
DRAWS = 1 << 18


def logits_of(n, dtype="float32", seed=1):
    return np.asarray(1.5 * np.random.default_rng(seed).standard_normal(n), jnp.dtype(dtype))


def p_value(counts, probabilities):
    """Returns the probability of such counts, or ones that fit less, by a chi-squared test; 0 if the impossible was drawn.

    Entries that are expected less than 10 times are taken together, with the rarest of the others.
    """
    possible = probabilities > 0
    if counts[~possible].any():
        return 0.0
    by_rarity = np.argsort(probabilities)[np.sum(~possible) :]
    counts, expected = counts[by_rarity], counts.sum() * probabilities[by_rarity]
    first = np.searchsorted(expected, 10)
    if first > 0:
        starts = [0, *range(first + 1, expected.size)]
        counts, expected = np.add.reduceat(counts, starts), np.add.reduceat(expected, starts)
    return stats.chisquare(counts, expected, sum_check=False).pvalue if counts.size > 1 else 1.0


def biased(probabilities):
    """The same with 1% of the mass moved from the likeliest entry to the next."""
    first, second = np.argsort(-probabilities)[:2]
    moved = probabilities.copy()
    moved[first] -= 0.01
    moved[second] += 0.01
    return moved


def of_options(*names, **more):
    """Samples with each of `OPTIONS`, or of those of these names, in one program, where their noise is made once."""

    def run(key, x):
        return {name: jaxsoftmax.categorical(key, x, **OPTIONS[name], **more) for name in names or OPTIONS}

    return jax.jit(run)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("optimised")  # runs in a fifth of the time
def test_samples_have_the_distribution(implementation):
    names = COMBINED if implementation == "xla" else ()  # of a kernel, all
    x, f = logits_of(40), of_options(*names, shape=(DRAWS,), implementation=implementation)
    cases.assert_ran(implementation, f, KEY, x)
    for name, samples in f(KEY, x).items():
        counts, expected = np.bincount(samples, minlength=40), probabilities(x, **OPTIONS[name])
        assert p_value(counts, expected) > 1e-3, name
        assert p_value(counts, biased(expected)) < 1e-6, name  # a bias of 1% would be seen


@pytest.mark.parametrize("options", ["plain", *cases.quick(slow=["top_p"]), "top_k and top_p"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("optimised")  # runs in a fifth of the time
def test_samples_of_a_vocabulary_have_the_distribution(implementation, options):
    """Samples fall in 50 bins of about the same mass, over columns that follow each other."""
    n, draws, options = 50257, 1 << (9 if implementation == "xla" else 10), {**OPTIONS[options]}
    options |= {"top_k": 1000} if "top_k" in options else {}
    x = logits_of(n)
    f = jax.jit(functools.partial(jaxsoftmax.categorical, shape=(draws,), implementation=implementation, **options))
    cases.assert_ran(implementation, f, KEY, x)
    expected = probabilities(x, **options)
    bins = np.minimum(50 * (np.cumsum(expected) - expected), 49).astype(int)
    counts = np.bincount(bins[f(KEY, x)], minlength=50)
    assert p_value(counts, np.bincount(bins, expected, 50)) > 1e-3


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.usefixtures("optimised")  # runs in a fifth of the time
def test_options_of_rows(implementation):
    """Each row has its own temperature and filters."""
    x = np.stack([logits_of(64, seed=seed) for seed in range(5)])
    options = {
        "temperature": np.float32([0.5, 1, 2, 0, 1]),
        "top_k": np.int32([3, 0, 20, 5, 64]),
        "top_p": np.float32([1, 0.7, 0.9, 0.5, 0]),
        "min_p": np.float32([0, 0.1, 0.05, 1, 0]),
    }
    for names in (["temperature"], ["top_k"], ["temperature", "top_p"], list(options)):
        chosen = {name: options[name] for name in names}
        f = jax.jit(functools.partial(jaxsoftmax.categorical, shape=(1 << 13, 5), implementation=implementation, **chosen))
        if "top_k" not in chosen:
            cases.assert_ran(implementation, f, KEY, x)
        samples = np.asarray(f(KEY, x))
        for row in range(5):
            of_row = {name: option[row] for name, option in chosen.items()}
            if of_row.get("temperature") == 0:
                np.testing.assert_array_equal(samples[:, row], np.argmax(x[row]))
                continue
            counts, expected = np.bincount(samples[:, row], minlength=64), probabilities(x[row], **of_row)
            assert p_value(counts, expected) > 1e-3, (names, row)


def test_samples_are_independent_of_their_neighbours():
    """Each pair of classes comes as often as it should in pairs of samples: along rows, of two keys, of two rows."""
    x = logits_of(8)
    expected = np.outer(*2 * [probabilities(x)]).ravel()
    draw = jax.jit(functools.partial(jaxsoftmax.categorical, shape=(DRAWS // 2,)))
    one, other = (np.asarray(draw(key, x)) for key in (KEY, jax.random.fold_in(KEY, 1)))
    for first, second in ((one[::2], one[1::2]), (one[:-1024:3], one[1024::3]), (one, other)):
        size = min(first.size, second.size)
        counts = np.bincount(8 * first[:size] + second[:size], minlength=64)
        assert p_value(counts, expected) > 1e-3


@pytest.mark.usefixtures("optimised")  # runs in a fifth of the time
def test_columns_that_share_an_evaluation_are_independent():
    words = np.asarray(
        jax.jit(noise.gumbel_rows, static_argnums=3)(*WORDS.reshape(2, 1, 1), np.arange(4000, dtype=np.uint32)[:, None], 4099)
    )
    others = (1, 2, 512, 1024, 1536, 2048, 3072, 4096)
    first, *rest = np.exp(-np.exp(-words[:, [0, *others]].T.astype(np.float64)))
    for other, column in zip(others, rest, strict=True):
        assert abs(np.corrcoef(first, column)[0, 1]) < 4 / np.sqrt(4000), other
    assert stats.kstest(np.exp(-np.exp(-words[:100].ravel().astype(np.float64))), "uniform").pvalue > 1e-3


@functools.cache
def noise_of(batch, n):
    """The noise of samples of rows of `n` columns, by NumPy."""
    return oracle.noise(WORDS, np.arange(np.prod(batch)).reshape(*batch, 1), np.arange(n))


def whole_truth(x, shape, options):
    """The samples by NumPy, and which of them rounding does not decide."""
    n, batch = x.shape[-1], shape
    keep = filtered(np.broadcast_to(x, (*batch, n)), **options)
    noise = noise_of(batch, n)
    temperature = np.broadcast_to(options.get("temperature", 1.0), batch)[..., None]
    with np.errstate(divide="ignore", invalid="ignore"):
        scores = np.asarray(x, np.float64) / np.where(temperature > 0, temperature, 1) + np.where(temperature > 0, noise, 0)
    scores = np.where(keep.weights > 0, scores, -np.inf)
    ordered = np.sort(scores, -1)
    is_certain = (ordered[..., -1] - ordered[..., -2] > 1e-3) & ~keep.doubtful.any(-1)
    return np.argmax(scores, -1), is_certain


@pytest.mark.parametrize("n", [*cases.quick(slow=[2, 100]), 5000, pytest.param(50257, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", cases.quick("float32", slow=["bfloat16", "float16"]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_samples_are_those_of_the_definition(implementation, dtype, n):
    x, f = logits_of((3, n), dtype), of_options(shape=(20, 3), implementation=implementation)
    cases.assert_ran(implementation, f, KEY, x)
    for name, samples in f(KEY, x).items():
        expected, is_certain = whole_truth(x, (20, 3), OPTIONS[name])
        assert is_certain.mean() > 0.5 or n > 1000, name
        np.testing.assert_array_equal(np.asarray(samples)[is_certain], expected[is_certain], name)


def test_ways_to_the_same_sample():
    """Found and sorted, or all sorted, or nothing: what is drawn does not depend on how."""
    x, counts = logits_of((3, 3000)), np.array([5, 1500, 0])
    ways = {"few": 5, "of rows": counts, "many": 2000, "all": None}

    @jax.jit
    def draw(x, traced):
        options = ways | {"traced": traced}
        return {way: jaxsoftmax.categorical(KEY, x, top_k=top_k, top_p=0.9) for way, top_k in options.items()}

    found = draw(x, counts)
    for way, top_k in (ways | {"traced": counts}).items():
        options = {"top_p": 0.9} | ({} if top_k is None else {"top_k": top_k})
        expected, is_certain = whole_truth(x, (3,), options)
        assert is_certain.any(), way
        np.testing.assert_array_equal(np.asarray(found[way])[is_certain], expected[is_certain], way)
    # Rows that keep few entries are drawn as without the others.
    assert draw(x, np.array([5, 1000, 1]))["traced"][0] == found["traced"][0]


# Without subnormal numbers, which XLA takes for 0 on a CPU.
_NUMBERS = st.floats(-30, 30, width=32, allow_subnormal=False)
ROWS = st.lists(st.one_of(_NUMBERS, st.sampled_from([-np.inf, 0.0, -0.0, 1.0, 1.0])), min_size=6, max_size=6).map(np.float32)
LAWS = settings(max_examples=40, deadline=None)


@functools.cache
def compiled(*names):
    """Samples of one row are drawn with options that are all traced."""
    return jax.jit(lambda key, x, *values: jaxsoftmax.categorical(key, x, shape=(32,), **dict(zip(names, values, strict=True))))


@LAWS
@given(
    x=ROWS,
    seed=st.integers(0, 2**31),
    temperature=st.floats(0.0625, 4, width=32),
    top_k=st.integers(-1, 8),
    top_p=st.floats(0, 1, width=32),
    min_p=st.floats(-0.5, 1, width=32),
)
def test_a_sample_is_one_of_those_that_are_kept(x, seed, temperature, top_k, top_p, min_p):
    options = {"temperature": np.float32(temperature), "top_k": np.int32(top_k)}
    options |= {"top_p": np.float32(top_p), "min_p": np.float32(min_p)}
    samples = np.asarray(compiled(*options)(jax.random.key(seed), x, *options.values()))
    if (x == -np.inf).all():
        np.testing.assert_array_equal(samples, 0)
        return
    keep = filtered(x, **options)
    assert (keep.weights[samples] + keep.doubtful[samples] > 0).all()
    assert np.isfinite(x[samples]).all()


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_zeros_are_equal_in_the_order_of_top_p(implementation):
    x = jnp.tile(np.float32([-1, -0.0, 0.0, -0.0, 0.0]), (50, 1))
    f = functools.partial(jaxsoftmax.categorical, top_p=0.4, implementation=implementation)
    cases.assert_ran(implementation, f, KEY, x)
    assert set(np.asarray(jax.jit(f)(KEY, x))) == {1, 2}


@LAWS
@given(x=ROWS, seed=st.integers(0, 2**31))
def test_a_temperature_of_0_and_a_single_entry_are_the_argmax(x, seed):
    key = jax.random.key(seed)
    np.testing.assert_array_equal(compiled("temperature")(key, x, np.float32(0)), np.argmax(x))
    np.testing.assert_array_equal(greedy(key, x), np.argmax(x))
    np.testing.assert_array_equal(compiled("top_p")(key, x, np.float32(0)), np.argmax(x))
    largest = oracle.top_k(x, 1)[1].item()  # +0 is above -0
    np.testing.assert_array_equal(compiled("top_k")(key, x, np.int32(1)), largest)
    np.testing.assert_array_equal(first(key, x), largest)


greedy = jax.jit(functools.partial(jaxsoftmax.categorical, temperature=0.0, top_k=3, top_p=0.5, shape=(32,)))
first = jax.jit(functools.partial(jaxsoftmax.categorical, top_k=1, shape=(32,)))


@settings(max_examples=60, deadline=None)
@given(
    batch=st.lists(st.integers(1, 3), max_size=3).map(tuple),
    prefix=st.one_of(st.none(), st.lists(st.integers(0, 3), max_size=2).map(tuple)),
    widened=st.lists(st.booleans(), min_size=3, max_size=3),
    data=st.data(),
)
def test_shapes_are_those_of_jax_random(batch, prefix, widened, data):
    axis = data.draw(st.integers(-len(batch) - 1, len(batch)))
    at = axis % (len(batch) + 1)
    shape = None
    if prefix is not None:
        shape = (*prefix, *(4 if wider else size for size, wider in zip(batch, widened, strict=False)))
    logits = jax.ShapeDtypeStruct((*batch[:at], 5, *batch[at:]), np.float32)
    results = []
    for f in (jaxsoftmax.categorical, jax.random.categorical):
        try:
            results.append(jax.eval_shape(lambda x, f=f: f(KEY, x, axis=axis, shape=shape), logits).shape)
        except ValueError:
            results.append(None)
    assert results[0] == results[1]


@pytest.mark.parametrize("dtype", cases.quick("float32", "float8_e4m3fn", slow=["bfloat16", "float16", "int8"]))
def test_what_may_not_be_drawn_is_not(dtype):
    x = jnp.asarray(logits_of((4, 40)), dtype)
    where = np.random.default_rng(0).random((4, 40)) < 0.3
    where[2] = False
    f = of_options("plain", "all", "top_p and min_p", shape=(50, 4), return_log_prob=True, where=where)
    for name, found in f(KEY, x).items():
        samples, log_prob = map(np.asarray, found)
        assert where[np.array([0, 1, 3]), samples[:, [0, 1, 3]]].all(), name
        np.testing.assert_array_equal(samples[:, 2], 0, name)
        np.testing.assert_array_equal(log_prob[:, 2], -np.inf, name)
        assert np.isfinite(log_prob[:, [0, 1, 3]]).all(), name


@pytest.mark.parametrize("shape", cases.quick((7, 3), slow=[None]))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_log_probabilities(implementation, shape):
    temperatures = np.float32([0.5, 0, 2])
    x, each = 1e4 + logits_of((3, 200)), [{}, {"top_k": 9}, {"top_p": 0.9}, {"temperature": temperatures}]
    each += [{"top_k": 9, "temperature": temperatures}]
    if shape is not None:
        each += [{"top_k": 9, "temperature": np.linspace(0.5, 2, 7, dtype=np.float32)[:, None]}]  # several for each row
    draw = functools.partial(jaxsoftmax.categorical, shape=shape, return_log_prob=True, implementation=implementation)
    f = jax.jit(lambda key, x: [draw(key, x, **options) for options in each])
    cases.assert_ran(implementation, f, KEY, x)
    for options, (samples, log_prob) in zip(each, f(KEY, x), strict=True):
        assert (samples.dtype, log_prob.dtype, log_prob.shape) == (jnp.int32, jnp.float32, shape or (3,)), options
        temperature = np.broadcast_to(np.float64(options.get("temperature", 1.0)), samples.shape)
        hot = np.where(temperature > 0, temperature, 1)
        scores = (x.astype(np.float64) - x.max(-1, keepdims=True)) / hot[..., None]
        chances = scores - np.log(np.sum(np.exp(scores), -1, keepdims=True))
        expected = np.where(temperature > 0, np.take_along_axis(chances, np.asarray(samples)[..., None], -1)[..., 0], 0)
        np.testing.assert_allclose(log_prob, expected, rtol=1e-5, atol=2e-6, err_msg=str(options))


def test_keys_and_axes():
    x = logits_of((6, 3, 5))
    raw = jax.random.key_data(KEY)

    @jax.jit
    def draw(key, other, raw, x):
        same = [jaxsoftmax.categorical(raw, x), jaxsoftmax.categorical(key, jnp.moveaxis(x, -1, 0), axis=0)]
        empty = jaxsoftmax.categorical(key, x, shape=(0, 6, 3)), jaxsoftmax.categorical(key, x[:0], return_log_prob=True)[1]
        more = jaxsoftmax.categorical(key, x[0, 0], temperature=np.ones(4, np.float32))
        return jaxsoftmax.categorical(key, x), same, jaxsoftmax.categorical(other, x), empty, more

    samples, same, other, empty, more = draw(KEY, jax.random.key(8), raw, x)
    for one in (*same, jaxsoftmax.categorical(KEY, x)):
        np.testing.assert_array_equal(samples, one)
    assert (samples != other).any()
    assert [array.shape for array in empty] == [(0, 6, 3), (0, 3)]
    assert more.shape == (4,)


def assert_nothing_is_left_out(*options):
    """Fails unless samples with each of the options are those without."""
    x = logits_of((2, 30))
    expected, *found = jax.jit(lambda x: [jaxsoftmax.categorical(KEY, x, **each) for each in ({}, *options)])(x)
    for each, samples in zip(options, found, strict=True):
        np.testing.assert_array_equal(samples, expected, str(each))


def test_filters_that_leave_nothing_out():
    assert_nothing_is_left_out({"top_k": 2**40}, {"top_k": np.array([2**40] * 2)}, {"top_p": 1.0}, {"min_p": -3})


def test_nan_keeps_all():
    each = (np.nan, [np.nan] * 2, np.float32(np.nan), jnp.asarray(np.full(2, np.nan, np.float32)))
    of_one = [{name: nan} for nan in each for name in ("top_p", "min_p")]
    assert_nothing_is_left_out(*of_one, {"top_p": np.nan, "min_p": np.nan, "top_k": 30})


def test_a_traced_temperature_that_is_none_takes_the_largest():
    x = logits_of((2, 30))

    def draw(x, temperature):
        return jaxsoftmax.categorical(KEY, x, temperature=temperature, top_p=0.9, return_log_prob=True)

    gradient = jax.grad(lambda *given: jnp.sum(draw(*given)[1]), (0, 1))
    both = jax.jit(lambda *given: (draw(*given), gradient(*given)))
    for temperature in (-1.0, -np.inf, np.nan, 0.0, 1e-30):
        (index, log_prob), gradients = both(x, np.float32(temperature))
        np.testing.assert_array_equal(index, np.argmax(x, -1), str(temperature))
        for zeros in (log_prob, *gradients):
            np.testing.assert_array_equal(zeros, np.zeros_like(zeros), str(temperature))


def test_what_is_traced_is_taken_to_the_nearest_limit():
    x, f = logits_of((2, 30)), jax.jit(lambda **options: jaxsoftmax.categorical(KEY, x, **options))
    for options, limits in (
        ({"top_p": 1.5}, {"top_p": 1.0}),
        ({"top_p": -1.0}, {"top_p": 0.0}),
        ({"min_p": 7.0}, {"min_p": 1.0}),
    ):
        np.testing.assert_array_equal(f(**options), jaxsoftmax.categorical(KEY, x, **limits), str(options))


def test_arguments_in_the_places_of_jax():
    x = logits_of((30, 2))
    np.testing.assert_array_equal(jaxsoftmax.categorical(KEY, x, 0, (5, 2)), jaxsoftmax.categorical(KEY, x.T, shape=(5, 2)))
    names = [list(inspect.signature(f).parameters)[:4] for f in (jaxsoftmax.categorical, jax.random.categorical)]
    assert names[0] == names[1] == ["key", "logits", "axis", "shape"]


@pytest.mark.parametrize("is_jitted", [False, True])
def test_samples_are_sharded_as_asked(is_jitted):
    mesh = jax.make_mesh((4,), ("rows",), axis_types=(AxisType.Explicit,))
    x, options = logits_of((8, 30)), {"top_p": 0.9, "return_log_prob": True}
    expected = jaxsoftmax.categorical(KEY, x, **options)
    with jax.set_mesh(mesh):
        f = functools.partial(jaxsoftmax.categorical, KEY, out_sharding=P("rows"), **options)
        samples = (jax.jit(f) if is_jitted else f)(x)
    for array, other in zip(samples, expected, strict=True):
        assert array.sharding.spec == P("rows")
        np.testing.assert_allclose(array, other, rtol=1e-6)


def test_extreme_temperatures():
    x = np.float32([[5, 10, -np.inf, 7], [-1e4, -1e5, 1e4, 9e3]])
    temperatures = 1e-30, 1e-45, 1e-300, np.float32(1e-30), 1e30, 1e300, np.inf
    draw = functools.partial(jaxsoftmax.categorical, shape=(200, 2))
    found = jax.jit(lambda x: [draw(KEY, x, temperature=temperature) for temperature in temperatures])(x)
    for temperature, samples in zip(temperatures, map(np.asarray, found), strict=True):
        assert (np.isfinite(x[np.arange(2), samples])).all(), temperature
        if temperature < 1:
            np.testing.assert_array_equal(samples, np.broadcast_to([1, 2], (200, 2)), str(temperature))
        else:
            assert all(np.unique(samples[:, row]).size > 2 for row in range(2)), temperature


X = np.zeros((2, 3), np.float32)
WRONG = [
    ({"key": 0}, TypeError, "key must be a key of jax.random, got int"),
    ({"key": np.zeros((2, 2), np.uint32)}, ValueError, "key must be one key, got shape (2, 2)"),
    ({"logits": X > 0}, TypeError, "logits must be floating or integer, got bool"),
    ({"logits": X[:, :0]}, ValueError, "logits must have an entry along axis"),
    ({"axis": 2}, ValueError, "axis 2 is out of range"),
    ({"shape": 3}, TypeError, "shape must be a sequence of concrete integers or None, got 3"),
    ({"shape": (3,)}, ValueError, "logits without axis must broadcast to shape (3,), got (2,)"),
    ({"shape": (-1, 2)}, ValueError, "shape must have no negative size"),
    ({"temperature": -1}, ValueError, "temperature must be 0 or more, got -1"),
    ({"temperature": float("nan")}, ValueError, "temperature must be 0 or more, got nan"),
    ({"temperature": [1.0, -2.0]}, ValueError, "temperature must be 0 or more"),
    ({"temperature": np.ones(3)}, ValueError, "temperature must broadcast to the shape of samples (2,), got (3,)"),
    ({"temperature": 1j}, TypeError, "temperature must be floating or integer, got complex64"),
    ({"temperature": np.ones(3), "shape": (2,)}, ValueError, "temperature must broadcast to shape (2,), got (3,)"),
    ({"top_k": 0}, ValueError, "top_k must be 1 or more, got 0"),
    ({"top_k": 2.0}, TypeError, "top_k must be a concrete integer, got 2.0"),
    ({"top_k": True}, TypeError, "top_k must be a concrete integer, got True"),
    ({"top_k": np.ones(2)}, TypeError, "top_k must be integers, got float32"),
    ({"top_p": -0.1}, ValueError, "top_p must be from 0 to 1, got -0.1"),
    ({"top_p": 1.5}, ValueError, "top_p must be from 0 to 1, got 1.5"),
    ({"top_p": [0.5, 2]}, ValueError, "top_p must be from 0 to 1"),
    ({"temperature": np.float32([1, np.nan])}, ValueError, "temperature must be 0 or more"),
    ({"top_k": [1, np.nan]}, TypeError, "top_k must be integers, got float32"),
    ({"out_sharding": "rows"}, TypeError, "out_sharding must be None, a NamedSharding"),
    ({"out_sharding": P("rows")}, ValueError, "out_sharding does not fit"),
    ({"top_p": "all"}, TypeError, "top_p must be an array of numbers, got str"),
    ({"min_p": 1.5}, ValueError, "min_p must be 1 or less, got 1.5"),
    ({"where": X}, TypeError, "where must be boolean, got float32"),
    ({"return_log_prob": None}, TypeError, "return_log_prob must be True or False, got None"),
    ({"implementation": "fast"}, ValueError, "implementation must be None or one of"),
]


@pytest.mark.parametrize(("arguments", "error", "message"), WRONG, ids=lambda value: cases.ident(value)[:40])
def test_wrong_arguments(arguments, error, message):
    with pytest.raises(error) as raised:
        jaxsoftmax.categorical(**{"key": KEY, "logits": X} | arguments)
    assert str(raised.value).startswith(f"categorical: {message}"), raised.value
