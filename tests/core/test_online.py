"""The laws of the monoid, against float64, on any split of a row."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax.online import State, identity

from ..support import oracle

# How far a sum of weights may be off, relative to itself. A weight at a distance x from the maximum errs by (8 + 3 x)
# roundings, and there are at most about a hundred of exp(-x): 20 roundings of the sum, and a few of each state in it.
SUM = 32 * oracle.EPS

# Rounding of a log-sum-exp of scores up to 64: that of the sum, and of a few numbers as large as the result.
LSE = 4 * 64 * oracle.EPS

# In powers of two, of products of scores and scales up to 256: a few roundings of one. What it is in an exponent is relative
# in a weight.
EXPONENT = 8 * 256 * oracle.EPS


def compiled(f):
    """A function as one program, without which each operation of each example would be called apart."""
    static = ("axis", "slack", "headroom", "unit", "parts")
    return jax.jit(f, static_argnames=[name for name in static if name in inspect.signature(f).parameters])


correct_log2, guess_log2, finish, merge, merge_along, lift, push, weights, lift_log2, lse_log2, push_log2 = map(
    compiled,
    (
        online.correct_log2,
        online.guess_log2,
        online.finish,
        online.merge,
        online.merge_along,
        online.lift,
        online.push,
        online.weights,
        online.lift_log2,
        online.lse_log2,
        online.push_log2,
    ),
)

laws = settings(max_examples=50, deadline=None, derandomize=True)

finite = st.floats(-(2.0**127), 2.0**127, width=32, allow_subnormal=False) | st.floats(
    -100, 100, width=32, allow_subnormal=False
)
scores = st.one_of(finite, finite, st.just(-np.inf))


def blocks(elements=scores, max_size=12):
    """Blocks of scores of two rows, with values of size 3."""
    sizes = [n for n in (0, 1, 5, 12, 40) if n <= max_size]  # few, as each is compiled anew
    return st.sampled_from(sizes).flatmap(
        lambda n: st.tuples(
            hnp.arrays(np.float32, (2, n), elements=elements),
            hnp.arrays(np.float32, (n, 3), elements=st.floats(-10, 10, width=32)),
        )
    )


def truth(scores, values):
    """(m, d, o) in float64."""
    scores, values = np.asarray(scores, np.float64), np.asarray(values, np.float64)
    m = np.max(scores, -1, initial=-np.inf)
    with np.errstate(all="ignore"):
        weights = np.exp(scores - np.where(np.isfinite(m), m, 0)[:, None])
        return m, weights.sum(-1), weights @ values


def assert_is(state: State, m, d, o=None):
    np.testing.assert_array_equal(state.m, np.asarray(m, np.float32))
    np.testing.assert_allclose(state.d, d, rtol=SUM, atol=oracle.TINY)
    if state.o is not None:
        largest = np.maximum(d, 1e-30)[:, None] * 10  # values are at most 10
        np.testing.assert_allclose(state.o / largest, o / largest, rtol=0, atol=2 * SUM)


def assert_same(a: State, b: State):
    assert_is(a, *(np.asarray(leaf, np.float64) for leaf in b))


def joined(*parts):
    return np.concatenate([p[0] for p in parts], 1), np.concatenate([p[1] for p in parts], 0)


@laws
@given(blocks())
def test_lift_is_the_state_of_its_scores(block):
    assert_is(lift(*block), *truth(*block))


@laws
@given(blocks())
def test_identity_is_neutral(block):
    state = lift(*block)
    nothing = identity((2,), 3)
    for merged in (merge(state, nothing), merge(nothing, state)):
        jax.tree.map(np.testing.assert_array_equal, merged, state)
    assert_is(merge(nothing, nothing), *truth(np.zeros((2, 0)), np.zeros((0, 3))))


@laws
@given(blocks(), blocks())
def test_merge_is_commutative_bit_for_bit(a, b):
    jax.tree.map(np.testing.assert_array_equal, merge(lift(*a), lift(*b)), merge(lift(*b), lift(*a)))


@laws
@given(blocks(), blocks(), blocks())
def test_merge_is_associative(a, b, c):
    left, right = merge(merge(lift(*a), lift(*b)), lift(*c)), merge(lift(*a), merge(lift(*b), lift(*c)))
    assert_same(left, right)
    assert_is(left, *truth(*joined(a, b, c)))


@laws
@given(blocks(), blocks())
def test_push_equals_merge_with_the_lifted_block(a, b):
    assert_same(push(lift(*a), *b), merge(lift(*a), lift(*b)))


@laws
@given(blocks(max_size=40), st.lists(st.integers(0, 40), max_size=5), st.randoms(use_true_random=False))
def test_any_split_in_any_order_gives_the_state_of_the_row(block, cuts, random):
    cuts = sorted(min(cut, block[0].shape[1]) for cut in cuts)
    parts = list(zip(np.split(block[0], cuts, 1), np.split(block[1], cuts, 0), strict=True))
    random.shuffle(parts)
    pushed = identity((2,), 3)
    for part in parts:
        pushed = push(pushed, *part)
    assert_is(pushed, *truth(*block))
    states = [lift(*part) for part in parts]
    while len(states) > 1:  # as a tree, as lanes and warps merge
        states = [merge(*pair) for pair in zip(states[::2], states[1::2], strict=False)] + states[len(states) // 2 * 2 :]
    assert_is(states[0], *truth(*block))


@laws
@given(blocks(st.floats(-50, 50, width=32) | st.just(-np.inf)), blocks(st.floats(-50, 50, width=32) | st.just(-np.inf)))
def test_a_finished_state_is_a_state(a, b):
    m, d, o = truth(*joined(a, b))
    with np.errstate(divide="ignore"):
        lse, mean = np.where(d > 0, m + np.log(d), -np.inf), o / np.where(d > 0, d, 1)[:, None]
    whole = finish(merge(lift(*a), lift(*b)))
    for state in (whole, finish(merge(finish(lift(*a)), lift(*b))), finish(merge(finish(lift(*a)), finish(lift(*b))))):
        np.testing.assert_allclose(state.m, lse, rtol=0, atol=LSE)
        np.testing.assert_array_equal(state.d, 1)
        np.testing.assert_allclose(state.o, mean, rtol=0, atol=10 * 2 * LSE)  # values to 10, weighed by two of those
        jax.tree.map(np.testing.assert_array_equal, finish(state), state)


@laws
@given(blocks(st.sampled_from([np.inf, -np.inf, 3e38, -3e38, 0.0, 1.0])), blocks(st.sampled_from([np.inf, -np.inf, 2.0])))
def test_infinite_scores_obey_the_laws(a, b):
    a, b, both = a[0], b[0], np.concatenate([a[0], b[0]], 1)
    state, m = merge(lift(a), lift(b)), np.max(both, -1, initial=-np.inf)
    assert_is(state, m, truth(both, np.zeros((both.shape[1], 3)))[1])
    assert_is(push(lift(a), b), m, np.asarray(state.d, np.float64))
    np.testing.assert_array_equal(np.isposinf(finish(state).m), np.isposinf(m))
    np.testing.assert_array_equal(np.isneginf(finish(state).m), np.isneginf(m))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_finite_maxima_weigh_scores_as_shift_does(dtype):
    """Where maxima are infinite, too, for scores that are not close to the largest numbers."""
    with jax.enable_x64(True):
        scores = jnp.asarray([[1, 2, -jnp.inf], [-jnp.inf] * 3, [jnp.inf, 2, -jnp.inf], [jnp.nan, 1, 2]], dtype)
        m = jnp.max(scores, 1, keepdims=True)
        found, expected = (jnp.exp(scores - of(m)) for of in (online.finite, online.shift))
        assert online.finite(m).dtype == dtype
        np.testing.assert_array_equal(found[:2], expected[:2])
        assert found[2].tolist() == [jnp.inf, 0, 0]  # of which the sum is infinite, as that of the others is
        assert jnp.all(jnp.isnan(found[3]))
        most = jnp.finfo(dtype).max
        np.testing.assert_array_equal(online.finite(jnp.asarray([most, -most, 0], dtype)), [most, -most, 0])


def test_nan_stays_nan():
    state = lift(jnp.array([[1.0, jnp.nan]]))
    for other in (identity((1,)), lift(jnp.array([[jnp.inf]])), lift(jnp.array([[-jnp.inf]]))):
        assert np.isnan(merge(state, other).d).all()
        assert np.isnan(finish(merge(other, state)).m).all()


def test_values_ride_along_in_both_states_or_neither():
    with pytest.raises(ValueError, match="both or neither"):
        merge(identity((2,)), identity((2,), 3))
    with pytest.raises(ValueError, match="both or neither"):
        push(identity((2,), 3), jnp.zeros((2, 4)))


def test_several_axes():
    x = np.random.default_rng(0).standard_normal((3, 4, 5)).astype(np.float32)
    state = lift(x, axis=(0, -1))
    flat = np.moveaxis(x, 1, 0).reshape(4, 15)
    np.testing.assert_array_equal(state.m, flat.max(1))
    assert_is(state, *truth(flat, np.zeros((15, 3)))[:2])


def parts(elements=scores, size=5):
    """Several arrays of scores of two rows, of one shape."""
    one = hnp.arrays(np.float32, (2, size), elements=elements)
    return st.lists(one, min_size=1, max_size=3)


@laws
@given(parts(), blocks())
def test_several_parts_are_one_block(several, before):
    whole = np.concatenate(several, 1)
    m, d, _ = truth(whole, np.zeros((whole.shape[1], 3)))
    for given_parts in (several, tuple(several)):
        assert_is(lift(given_parts), m, d)
    state = lift(before[0])
    assert_same(push(state, several), push(state, whole))
    assert_same(push(state, tuple(several)), merge(state, lift(whole)))
    stacked = lift([part[:, :, None] for part in several], axis=(1, 2))
    assert_is(stacked, m, d)


@laws
@given(st.lists(blocks(), min_size=0, max_size=6), st.booleans())
def test_merge_along_equals_folding_merge(several, first):
    states = [lift(block) for block, _ in several]
    folded = identity((2,))
    for state in states:
        folded = merge(folded, state)
    axis = 0 if first else 1
    stacked = [
        np.stack([state[i] for state in states], axis) if states else np.zeros((0, 2)[:: 1 if first else -1]) for i in (0, 1)
    ]
    stacked = State(*(jnp.asarray(leaf, jnp.float32) for leaf in stacked))
    assert_same(merge_along(stacked, axis), folded)
    assert_same(merge_along(stacked, axis - 2), folded)


def test_parts_may_come_one_by_one():
    x = np.random.default_rng(0).standard_normal((2, 8)).astype(np.float32)
    parts = np.split(x, 4, 1)
    assert_same(online.lift(iter(parts)), lift(x))
    assert_same(online.push(lift(x), iter(parts)), push(lift(x), x))


def test_merge_along_takes_no_values():
    with pytest.raises(ValueError, match="merge_along takes states without values"):
        merge_along(identity((3, 2), 4), 0)


def test_several_parts_carry_no_values():
    with pytest.raises(ValueError, match="with values the block must be the last axis of one array"):
        lift([jnp.zeros((2, 3)), jnp.zeros((2, 3))], jnp.zeros((6, 4)))


def scaled_truth(scores, scale):
    """(m, d) in float64: the maximum before scaling, and the sum of `exp(scale * (scores - m))` of scores above -inf."""
    scores, scale = np.asarray(scores, np.float64), np.asarray(scale, np.float64).reshape(-1, 1)
    m = np.max(scores, -1, initial=-np.inf)
    with np.errstate(all="ignore"):
        distance = scores - np.where(np.isfinite(m), m, 0)[:, None]
        return m, np.sum(np.where(np.isneginf(scores), 0, np.exp(scale * distance)), -1)


SCALES = [0.0, 0.125, 1.0, 3.5, np.array([0.0, 0.25], np.float32), np.array([2.0, 1e-3], np.float32)]
near = st.floats(-50, 50, width=32, allow_subnormal=False) | st.just(-np.inf)
far = st.floats(-8, 8, width=16).map(lambda x: np.float32(1e6 + x))  # 1e6 itself is a float32, and so are its neighbours


@laws
@given(parts(near) | parts(far | st.just(-np.inf)), parts(near), st.sampled_from(SCALES))
def test_scaled_states_are_those_of_scaled_scores(several, others, scale):
    size = jnp.asarray(scale, jnp.float32)
    whole, other = np.concatenate(several, 1), np.concatenate(others, 1)
    expected, both = scaled_truth(whole, scale), scaled_truth(np.concatenate([whole, other], 1), scale)
    state, added = lift(whole, scale=size), lift(other, scale=size)
    assert_is(state, *expected)
    assert_is(lift(several, scale=size), *expected)
    assert_is(push(identity((2,)), several, scale=size), *expected)
    assert_is(push(state, others, scale=size), *both)
    assert_is(merge(state, added, scale=size), *both)
    nothing = identity((2,))
    jax.tree.map(np.testing.assert_array_equal, merge(nothing, state, scale=size), state)
    stacked = State(*(jnp.stack(leaves) for leaves in zip(state[:2], added[:2], nothing[:2], strict=True)))
    assert_is(merge_along(stacked, 0, scale=size), *both)


def test_scaled_states_of_every_part_merge_along_another_axis():
    x = 10 * np.random.default_rng(0).standard_normal((2, 6, 8)).astype(np.float32)
    scale = jnp.asarray([0.5, 0.0], jnp.float32)
    states = lift(x, scale=jnp.repeat(scale[:, None], 6, 1))
    m, d = scaled_truth(x.reshape(2, 48), scale)
    assert_is(merge_along(states, 1, scale=scale), m, d)


@pytest.mark.parametrize("scale", [0.125, 0.1])
def test_large_scores_keep_their_differences_when_scaled(scale):
    x, scale = (1e6 + np.arange(-8, 8) / 16).astype(np.float32)[None], np.float32(scale)
    if scale == np.float32(0.1):  # not a power of two: scaled first, the scores are rounded
        rounded = np.exp(x * scale - np.max(x * scale)).sum()
        assert abs(rounded / scaled_truth(x, scale)[1][0] - 1) > 1e-4
    m, d = scaled_truth(x, scale)
    first, second = lift(x[:, :5], scale=scale), lift(x[:, 5:], scale=scale)
    stacked = State(jnp.stack([first.m, second.m]), jnp.stack([first.d, second.d]))
    for state in (
        lift(x, scale=scale),
        push(first, x[:, 5:], scale=scale),
        merge(first, second, scale=scale),
        merge_along(stacked, 0, scale=scale),
    ):
        np.testing.assert_array_equal(state.m, m)
        np.testing.assert_allclose(state.d, d, rtol=SUM)


def test_scale_zero_counts_the_scores_that_are_there():
    x = np.array([[-np.inf, 3, 1e6, -3e38], [-np.inf] * 4], np.float32)
    zero = jnp.zeros(())
    for state in (lift(x, scale=zero), push(lift(x[:, :1], scale=zero), x[:, 1:], scale=zero)):
        np.testing.assert_array_equal(state.m, [1e6, -np.inf])
        np.testing.assert_array_equal(state.d, [3, 0])
    merged = merge(lift(x[:, :2], scale=zero), lift(x[:, 2:], scale=zero), scale=zero)
    np.testing.assert_array_equal(merged.d, [3, 0])


def test_values_ride_along_with_a_scale():
    rng = np.random.default_rng(0)
    x, values = 10 * rng.standard_normal((2, 12)).astype(np.float32), rng.standard_normal((12, 3)).astype(np.float32)
    scale = jnp.asarray([0.5, 2.0], jnp.float32)
    expected = truth(np.asarray(x, np.float64) * np.asarray(scale, np.float64)[:, None], values)
    for state in (
        lift(x, values, scale=scale),
        push(lift(x[:, :5], values[:5], scale=scale), x[:, 5:], values[5:], scale=scale),
        merge(lift(x[:, 5:], values[5:], scale=scale), lift(x[:, :5], values[:5], scale=scale), scale=scale),
    ):
        assert_is(State(*state), x.max(1), *expected[1:])


@laws
@given(blocks(near), st.sampled_from([None, *SCALES]))
def test_weights_are_what_a_score_adds(block, scale):
    x, _ = block
    size = None if scale is None else jnp.asarray(scale, jnp.float32)
    state = lift(x, scale=size)
    weight = weights(x, state.m, scale=size)
    assert weight.shape == x.shape
    np.testing.assert_array_equal(np.asarray(weight)[np.isneginf(x)], 0)
    np.testing.assert_allclose(np.asarray(weight, np.float64).sum(-1), state.d, rtol=SUM)
    with np.errstate(invalid="ignore"):
        factor = 1.0 if scale is None else np.asarray(scale, np.float64).reshape(-1, 1)
        m = np.where(np.isfinite(state.m), state.m, 0).astype(np.float64)[:, None]
        distance = np.where(np.isneginf(x), 0, x - m) * factor
        expected = np.where(np.isneginf(x), 0, np.exp(distance))
    assert oracle.error(weight, oracle.Truth(expected, (8 + 3 * np.abs(distance)) * oracle.EPS * expected + oracle.TINY)) <= 1
    # Not the same bits: exp may differ by the last one between a vector and its remainder.
    np.testing.assert_allclose(weights(x.T, state.m, axis=0, scale=size), weight.T, rtol=8 * oracle.EPS)


LOG2E = np.log2(np.e)


def pushed_log2(state, several, scale, slack=0, **more):
    """The state with several blocks, and the weights of each by the `m` that the last one leaves."""
    found = []
    for part in several:
        state, factor, weight = push_log2(state, part, scale * LOG2E / more.get("unit", 1), slack=slack, **more)
        found = [earlier * np.asarray(factor)[:, None] for earlier in found] + [np.asarray(weight)]
    return state, found


def lse_of_log2(state):
    with np.errstate(divide="ignore"):
        return (np.asarray(state.m, np.float64) + np.log2(np.asarray(state.d, np.float64))) / LOG2E


@laws
@given(parts(near), st.sampled_from([0.125, 1.0, 3.5]), st.sampled_from([0, 8]))
def test_push_in_powers_of_two_is_push(several, scale, slack):
    state, found = pushed_log2(identity((2,)), several, scale, slack)
    whole = np.concatenate(several, 1)
    m, d = scaled_truth(whole, scale)
    expected = push(identity((2,)), several, scale=jnp.float32(scale))
    most = m * scale * LOG2E
    if slack == 0:
        np.testing.assert_allclose(state.m, most, rtol=4 * oracle.EPS, atol=oracle.TINY)  # XLA may flush what is subnormal
        np.testing.assert_allclose(state.d, expected.d, rtol=EXPONENT)
    assert np.all(state.m <= most + EXPONENT)
    assert np.all(np.isneginf(most) | (np.asarray(state.m) >= most - slack - EXPONENT))
    assert all(np.all(weight <= 2.0**slack * (1 + EXPONENT)) for weight in found)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse_of_log2(state), scale * m + np.log(d), rtol=0, atol=EXPONENT)
    weight = np.concatenate(found, 1)
    np.testing.assert_array_equal(weight[np.isneginf(whole)], 0)
    np.testing.assert_allclose(weight.sum(1), state.d, rtol=SUM)  # what is summed of values has the same scale
    np.testing.assert_allclose(
        weight / np.where(state.d == 0, 1, state.d)[:, None], softmax(whole, scale), rtol=0, atol=EXPONENT
    )


@laws
@given(
    parts(near), st.sampled_from([0.125, 1.0]), st.sampled_from([0, 2]), st.sampled_from([0, 13]), st.sampled_from([1, LOG2E])
)
def test_push_in_powers_of_two_with_headroom_and_another_unit(several, scale, slack, headroom, unit):
    state, found = pushed_log2(identity((2,)), several, scale, slack, headroom=headroom, unit=unit)
    whole = np.concatenate(several, 1)
    m, d = scaled_truth(whole, scale)
    assert all(np.all(weight <= 2.0 ** (slack + headroom) * (1 + EXPONENT)) for weight in found)
    with np.errstate(divide="ignore"):
        lse = np.asarray(state.m, np.float64) * unit / LOG2E + np.log(np.asarray(state.d, np.float64))
        np.testing.assert_allclose(lse, scale * m + np.log(d), rtol=0, atol=EXPONENT)
    weight = np.concatenate(found, 1)
    np.testing.assert_allclose(
        weight / np.where(state.d == 0, 1, state.d)[:, None], softmax(whole, scale), rtol=0, atol=EXPONENT
    )
    if slack == 0:
        largest = np.where(m == -np.inf, 0, 2.0**headroom)
        np.testing.assert_allclose(weight.max(1, initial=0), largest, rtol=EXPONENT)


@pytest.mark.parametrize("unit", [1.0, float(np.log2(np.e)), 0.25])
def test_a_maximum_follows_where_scores_exceed_it_by_more_than_the_slack(unit):
    """In units of log(2), whatever that of the maximum is; up to there nothing is rescaled."""
    state = online.State(jnp.zeros(3), jnp.ones(3))
    scores = jnp.array([7.75, 8.25, -3.0]) / unit
    found, factor, weight = online.push_log2(state, scores[:, None], 1.0, slack=8, unit=unit)
    np.testing.assert_allclose(found.m, [0, 8.25 / unit, 0])
    np.testing.assert_allclose(factor, [1, 2**-8.25, 1], rtol=1e-6)
    np.testing.assert_allclose(weight[:, 0], [2**7.75, 1, 2**-3], rtol=1e-6)


def guessed_log2(m, d, several, scale, slack, n_parts, unit=1, lead=0):
    """`m`, the parts of `d`, and the weights by the last `m`, of blocks whose weights are guessed, and corrected if need be."""
    found, options = [], {"unit": unit}
    for part in several:
        part = np.pad(part, [(0, 0), (0, -part.shape[1] % n_parts)], constant_values=-np.inf)
        sums, weight = guess_log2(m, part, scale * LOG2E / unit, parts=n_parts, **options)
        factor = np.ones(2, np.float32)
        if not np.all(np.asarray(sums) <= 2.0**slack):
            m, factor, sums, weight = correct_log2(m, part, scale * LOG2E / unit, sums, slack=slack, lead=lead, **options)
        d = d * factor[:, None] + sums
        found = [earlier * np.asarray(factor)[:, None] for earlier in found] + [np.asarray(weight)]
    return m, d, found


@laws
@given(
    parts(near),
    st.sampled_from([0.125, 1.0, 3.5]),
    st.sampled_from([0, 8, 24]),
    st.sampled_from([1, 4]),
    st.sampled_from([1, LOG2E]),
    st.sampled_from([0, 40, 80]),
)
def test_guesses_are_corrected_to_the_softmax(several, scale, slack, n_parts, unit, lead):
    """Those of the first block are wrong where it has a score."""
    m, d, found = guessed_log2(jnp.full(2, -jnp.inf), jnp.zeros((2, n_parts)), several, scale, slack, n_parts, unit, lead)
    whole = np.concatenate(
        [np.pad(part, [(0, 0), (0, -part.shape[1] % n_parts)], constant_values=-np.inf) for part in several], 1
    )
    most, expected = scaled_truth(whole, scale)
    assert d.shape == (2, n_parts)
    d = np.asarray(d, np.float64).sum(1)
    with np.errstate(divide="ignore"):
        lse = np.asarray(m, np.float64) * unit / LOG2E + np.log(d)
        np.testing.assert_allclose(lse, scale * most + np.log(expected), rtol=0, atol=EXPONENT)
    assert all(np.all(weight <= 2.0**slack * (1 + EXPONENT)) for weight in found)
    weight = np.concatenate(found, 1)
    np.testing.assert_array_equal(weight[np.isneginf(whole)], 0)
    np.testing.assert_allclose(weight / np.where(d == 0, 1, d)[:, None], softmax(whole, scale), rtol=0, atol=EXPONENT)


@pytest.mark.parametrize("lead", [0, 40])
@pytest.mark.parametrize("unit", [1.0, float(np.log2(np.e)), 0.25])
def test_a_maximum_follows_where_a_sum_of_guessed_weights_exceeds_the_slack(unit, lead):
    """Its parts do not add up: each of them may be `2**slack`. Other rows keep their bits."""
    m = jnp.array([0.0, 0.0, 0.0, -jnp.inf])
    scores = np.float32([[7, 7, 6.9, 6.9], [7, 7, 7.1, 6.9], [-3, -4, -5, -6], [-jnp.inf] * 4]) / unit
    sums, weight = online.guess_log2(m, scores, 1.0, parts=2, unit=unit)
    np.testing.assert_allclose(sums, np.exp2(scores[:, :2] * unit) + np.exp2(scores[:, 2:] * unit), rtol=1e-5)
    found, factor, corrected_sums, corrected = online.correct_log2(m, scores, 1.0, sums, slack=8, lead=lead, unit=unit)
    np.testing.assert_allclose(found, [0, (7.1 + lead) / unit, 0, -np.inf], rtol=1e-6)
    np.testing.assert_allclose(factor, [1, 2 ** -(7.1 + lead), 1, 1], rtol=1e-5)
    np.testing.assert_allclose(corrected[1], np.exp2(np.subtract([-0.1, -0.1, 0, -0.2], lead)), rtol=1e-5)
    for guessed, result in ((weight, corrected), (sums, corrected_sums)):
        np.testing.assert_array_equal(np.delete(result, 1, 0), np.delete(guessed, 1, 0))


@pytest.mark.parametrize("score", [np.inf, np.nan])
@pytest.mark.parametrize("before", [-np.inf, 0.5, np.inf, np.nan])
def test_guesses_of_scores_that_are_not_finite(before, score):
    """Sums of weights that are all 0 do not become NaN where another one is infinite."""
    m, d = jnp.full(2, before), jnp.array([[0.0, 0.0 if np.isneginf(before) else before]] * 2)
    calm, odd = np.float32([[1, -2], [-3, 0.25]]), np.float32([[1, -2], [-3, score]])
    expected = [before if np.isnan(before) or before == np.inf else 0.0] * 2  # 0: anything finite
    for block in (calm, odd, calm):
        m, d, _ = guessed_log2(m, d, [block], 1.0, 8, 2)
        if block is odd and not np.isnan(expected[1]):
            expected[1] = score
        for found in (m, d.sum(1)):
            np.testing.assert_array_equal(np.where(np.isfinite(found), 0, found), expected)


@laws
@given(parts(near), st.sampled_from([0, 13]), st.sampled_from([1, LOG2E]))
def test_one_score_is_lifted_and_lse_given_in_natural_units(several, headroom, unit):
    first, *_ = several
    score, more = first[:, 0], {"headroom": headroom, "unit": unit}
    lifted = lift_log2(score, **more)
    np.testing.assert_array_equal(lifted.d, 2**headroom)
    np.testing.assert_allclose(lse_log2(lifted, unit=unit), score, rtol=0, atol=EXPONENT)
    state, _ = pushed_log2(lifted, several, 1.0, **more)
    m, d = scaled_truth(np.concatenate([score[:, None], *several], 1), 1.0)
    with np.errstate(divide="ignore"):
        np.testing.assert_allclose(lse_log2(state, unit=unit), m + np.log(d), rtol=0, atol=EXPONENT)


def test_the_largest_finite_scores_are_weighed_alike_in_another_unit():
    least = np.finfo(np.float32).min
    state, _, weight = push_log2(
        identity((2,)), np.float32([[least] * 4, [least, least, -np.inf, 1]]), 1.0, slack=8, unit=LOG2E
    )
    np.testing.assert_array_equal(weight, [[1, 1, 1, 1], [0, 0, 0, 1]])
    np.testing.assert_array_equal(state.m, np.float32([least, 1]))
    np.testing.assert_array_equal(state.d, [4, 1])


def softmax(scores, scale):
    m, d = scaled_truth(scores, scale)
    distance = np.asarray(scores, np.float64) - np.where(np.isfinite(m), m, 0)[:, None]
    return np.exp(scale * distance) / np.where(d > 0, d, 1)[:, None]


@pytest.mark.parametrize("slack", [0, 8])
def test_push_in_powers_of_two_of_nothing(slack):
    nothing = np.full((2, 3), -np.inf, np.float32)
    state, factor, weight = push_log2(identity((2,)), nothing, 0.5, slack=slack)
    np.testing.assert_array_equal(state.m, -np.inf)
    for zeros in (state.d, factor, weight):
        np.testing.assert_array_equal(zeros, 0)
    before, *_ = push_log2(identity((2,)), np.float32([[1, 2], [-3, 5]]), 0.5)
    state, factor, weight = push_log2(before, nothing, 0.5, slack=slack)
    jax.tree.map(np.testing.assert_array_equal, state, before)
    np.testing.assert_array_equal(factor, 1)
    np.testing.assert_array_equal(weight, 0)


@laws
@given(parts(near), st.sampled_from([0.125, 1.0]), st.floats(-30, 30, width=32) | st.just(-np.inf), st.sampled_from([0, 8]))
def test_push_in_powers_of_two_onto_a_sink(several, scale, sink, slack):
    """A sink is a score that is not scaled, and of a value that counts as 0."""
    sinks = np.full(2, sink, np.float32)
    state, found = pushed_log2(State(jnp.asarray(sinks * LOG2E, jnp.float32), jnp.ones(2)), several, scale, slack)
    whole = np.concatenate(several, 1)
    m, d, _ = truth(np.concatenate([np.float64(scale) * whole, sinks[:, None]], 1), np.zeros((whole.shape[1] + 1, 3)))
    with np.errstate(divide="ignore"):
        lse = m + np.log(d)
    there = np.isfinite(lse)  # else it is left to those who divide by d that it may be anything
    np.testing.assert_allclose(lse_of_log2(state)[there], lse[there], rtol=0, atol=EXPONENT)
    assert np.all(np.isneginf(state.m[~there]))
    weight = np.concatenate(found, 1) / np.where(state.d == 0, 1, state.d)[:, None]
    with np.errstate(invalid="ignore"):
        expected = np.where(there[:, None], np.exp(scale * whole.astype(np.float64) - lse[:, None]), 0)
    np.testing.assert_allclose(weight, expected, rtol=0, atol=EXPONENT)


def test_push_in_powers_of_two_along_another_axis():
    x = np.random.default_rng(0).standard_normal((2, 5)).astype(np.float32)
    expected, actual = push_log2(identity((2,)), x, 0.7), push_log2(identity((2,)), x.T, 0.7, axis=0)
    np.testing.assert_array_equal(actual[0].m, expected[0].m)
    np.testing.assert_allclose(actual[0].d, expected[0].d, rtol=SUM)
    np.testing.assert_array_equal(actual[2].T, expected[2])


def test_large_scores_keep_their_differences_in_powers_of_two():
    """The rounding of the maximum is in all weights, the sum and `m` alike, and so not in what is divided by the sum."""
    x = (1e4 + np.arange(-8, 8) / 16).astype(np.float32)[None]
    state, _, weight = push_log2(identity((1,)), x, LOG2E)
    few = 4 * 1e4 * LOG2E * oracle.EPS  # roundings of a score in powers of two
    np.testing.assert_allclose(weight / state.d[:, None], softmax(x, 1.0), rtol=few)
    np.testing.assert_allclose(lse_of_log2(state), scaled_truth(x, 1.0)[0] + np.log(scaled_truth(x, 1.0)[1]), rtol=0, atol=few)


def test_in_lax_reduce_scan_and_vmap():
    x = jnp.asarray(10 * np.random.default_rng(0).standard_normal((6, 64)), jnp.float32)
    expected = oracle.logsumexp(x, -1)
    m, d = lax.reduce(
        (x, jnp.ones_like(x)),
        tuple(identity(()))[:2],
        lambda a, b: tuple(merge(State(*a), State(*b)))[:2],
        (1,),
    )
    assert oracle.error(m + jnp.log(d), expected) <= 1
    scanned, _ = lax.scan(lambda s, block: (push(s, block), None), identity((6,)), x.reshape(6, 8, 8).swapaxes(0, 1))
    assert oracle.error(finish(scanned).m, expected) <= 1
    assert oracle.error(jax.vmap(lambda row: finish(lift(row)).m)(x), expected) <= 1


def test_over_devices():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((4, 64)), jnp.float32)
    mesh = jax.make_mesh((8,), ("d",), devices=jax.devices("cpu"))

    def local(block):
        states = lax.all_gather(lift(block), "d")
        total, _ = lax.scan(lambda total, state: (merge(total, state), None), identity((4,)), states)
        return finish(total).m

    over_devices = jax.shard_map(local, mesh=mesh, in_specs=jax.P(None, "d"), out_specs=jax.P(), check_vma=False)
    with jax.set_mesh(mesh):
        lse = jax.jit(over_devices)(jax.device_put(x, jax.P(None, "d")))
    assert oracle.error(lse, oracle.logsumexp(x, -1)) <= 1


@pytest.mark.parametrize("function", [online.merge, online.push])
def test_scores_that_are_no_state_are_refused(function):
    x = np.zeros((2, 3), np.float32)
    with pytest.raises(TypeError, match=rf"online\.{function.__name__}: \w+ must be a State, got an array of shape \(2, 3\)"):
        function(x, x)
