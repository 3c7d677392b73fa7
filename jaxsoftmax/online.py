"""Online softmax as a monoid: states of scores that merge in any order.

A `State` represents a set of scores:

    m = max(scores),   d = sum(exp(scores - m)),   o = sum(exp(scores - m) * values)

`o` is present only if the scores carry values, as in attention. Softmax needs nothing except this state: its
denominator is `d` once the maximum is `m`, the log-sum-exp is `m + log(d)`, and attention's output is `o / d`. To
merge two states, both are rescaled to the larger maximum and added:

    m = max(a.m, b.m),   d = a.d * exp(a.m - m) + b.d * exp(b.m - m),   o in the same way.

This `merge` is associative and commutative. Its neutral element is `identity`, the state of no scores: `(-inf, 0, 0)`.
The scores of a row may therefore be cut anywhere and merged in any order, at any level: between lanes, warps, blocks,
key blocks of attention, splits of a long row, or devices. A row is read once, because the sum so far can be rescaled
when the maximum grows.

    state = identity(shape)            no scores yet
    state = push(state, block)         one more block of scores; equals merge(state, lift(block))
    state = merge(state, other)        another split of the same rows
    state = finish(state)              (log-sum-exp, 1, the weighted mean of the values)

Infinite scores obey the same laws. A set in which every score is `-inf` has the state `(-inf, 0, 0)` of the identity.
A set that holds `+inf` has `m = d = +inf`. A NaN score makes the state NaN.

All functions are plain `jax.numpy` on whole blocks, in float32 or float64. They run wherever `jax.numpy` runs: in
`jit`, in a Pallas kernel, in `lax.reduce`, in `shard_map`.

With `scale`, which must not be negative, the scores are `scale * x` for the array `x` that is passed. Then `m` is the
maximum of `x`, before scaling, and `d` is the sum of `exp(scale * (x - m))`. This keeps differences of large scores
that `scale * x` would lose to rounding. `finish` takes states that were made without `scale`.

A finished state is a state of the same scores with `d = 1`. Attention over a prefix that many requests share can
therefore be computed once, kept as `(lse, o)`, and merged with the attention over each request's suffix.

Examples:
  >>> import jax
  >>> import jax.numpy as jnp
  >>> from jaxsoftmax.online import finish, lift, merge
  >>> keys = jax.random.split(jax.random.key(0), 5)
  >>> query = jax.random.normal(keys[0], (4, 8))  # four requests, head size 8
  >>> prefix_k, prefix_v = jax.random.normal(keys[1], (2, 32, 8))  # 32 shared tokens
  >>> suffix_k, suffix_v = jax.random.normal(keys[2], (2, 4, 5, 8))  # five tokens for each request
  >>> shared = finish(lift(query @ prefix_k.T, prefix_v))  # once
  >>> scores = jnp.einsum("rh,rkh->rk", query, suffix_k)[:, None]
  >>> suffix = lift(scores, suffix_v)  # rows [4, 1], values [4, 1, 8]
  >>> suffix = jax.tree.map(lambda a: a[:, 0], suffix)
  >>> output = finish(merge(shared, suffix)).o
  >>> k = jnp.concatenate([jnp.broadcast_to(prefix_k, (4, 32, 8)), suffix_k], axis=1)
  >>> v = jnp.concatenate([jnp.broadcast_to(prefix_v, (4, 32, 8)), suffix_v], axis=1)
  >>> whole = jnp.einsum("rk,rkh->rh", jax.nn.softmax(jnp.einsum("rh,rkh->rk", query, k)), v)
  >>> bool(jnp.allclose(output, whole, atol=1e-2))  # a GPU may multiply in TF32
  True

Source: M. Milakov, N. Gimelshein, "Online normalizer calculation for softmax", 2018, arXiv:1805.02867, section 3.1.
"""

import functools
import math
import operator
from collections.abc import Callable, Iterable
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import arguments
from jaxsoftmax._core.dtypes import accumulator

__all__ = [
    "State",
    "correct_log2",
    "finish",
    "guess_log2",
    "identity",
    "lift",
    "lift_log2",
    "lse_log2",
    "merge",
    "merge_along",
    "push",
    "push_log2",
    "weights",
]

Scores = jax.Array | Iterable[jax.Array]
Axis = int | tuple[int, ...]
Product = Callable[[jax.Array, jax.Array], jax.Array]

_LOG2E = math.log2(math.e)
_LEAST_EXPONENT = -1000.0  # the exponential of any number below it is 0, also in float64


class State(NamedTuple):
    """Represents a set of scores for each row: their maximum and their sums relative to it.

    `lift` makes a state of scores, `merge` joins two states, and `finish` gives the results. A state is a pytree.

    Attributes:
      m: maximum of the scores, `[*rows]`, float32 or float64.
      d: sum of `exp(score - m)`, `[*rows]`, in the dtype of `m`.
      o: sum of `exp(score - m) * value`, `[*rows, value_size]`, in the dtype of `m`. None if the scores carry no values.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> state = online.lift(jnp.log(jnp.array([[1.0, 2.0, 5.0]])))
      >>> print(jnp.round(jnp.exp(state.m), 3), jnp.round(state.d, 3), state.o)
      [5.] [1.6] None
    """

    m: jax.Array
    d: jax.Array
    o: jax.Array | None = None


def identity(rows: tuple[int, ...], value_size: int | None = None, dtype: jax.typing.DTypeLike = jnp.float32) -> State:
    """Returns the state of no scores: `m = -inf`, `d = 0` and `o = 0`.

    Args:
      rows: shape of the rows.
      value_size: size of the values that the scores carry. None (the default) for scores without values.
      dtype: dtype of the state, float32 by default, or float64.

    Returns:
      `State` with `m` and `d` of shape `[*rows]`, and `o` of shape `[*rows, value_size]` or None.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> print(online.identity((2,), value_size=3).o.shape)
      (2, 3)
      >>> state = online.lift(jnp.array([[1.0, 2.0], [3.0, 4.0]], jnp.float32))
      >>> merged = online.merge(online.identity((2,)), state)
      >>> print(bool(jnp.all(merged.m == state.m)), bool(jnp.all(merged.d == state.d)))
      True True
    """
    o = None if value_size is None else jnp.zeros((*rows, value_size), dtype)
    return State(jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), o)


def lift(scores: Scores, values: jax.Array | None = None, *, axis: Axis = -1, scale: jax.Array | None = None) -> State:
    """Makes the state of one block of scores.

    Args:
      scores: floating array `[*rows, block]`, or an iterable of several such arrays of one shape. Arrays of 16 bits or
        less are converted to float32. A score of `-inf` counts as absent. If the scores carry no values, the block may lie
        along another axis or along several axes.
      values: array `[*batch, block, value_size]` for scores in one array `[*batch, queries, block]`. None (the default)
        for scores without values.
      axis: axis or axes of `scores` that hold the block; -1 by default, and the last axis if there are values. With `()`,
        the block consists of the several arrays in `scores`.
      scale: scalar or array `[*rows]` that multiplies the scores, not negative; None (the default) for 1.

    Returns:
      `State` with the shape of `scores` without `axis`, float32, or float64 if the scores are float64.

    Raises:
      ValueError: `values` come with several arrays of scores, or with an `axis` that is not the last one.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 100))
      >>> state = online.lift(scores)
      >>> bool(jnp.allclose(state.m + jnp.log(state.d), jax.nn.logsumexp(scores, axis=-1), atol=1e-5))
      True
      >>> values = jax.random.normal(jax.random.key(1), (100, 8))
      >>> print(jax.tree.map(jnp.shape, online.lift(scores, values)))
      State(m=(4,), d=(4,), o=(4, 8))

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
    """
    parts, m = _parts_and_max(scores, axis)
    return State(m, *_sums(parts, values, m, axis, scale))


def push(
    state: State,
    scores: Scores,
    values: jax.Array | None = None,
    *,
    axis: Axis = -1,
    scale: jax.Array | None = None,
    top: jax.Array | None = None,
) -> State:
    """Adds a block of scores to a state.

    The result equals `merge(state, lift(scores, values))`, with one rescaling instead of two. It is the step of a loop
    over blocks.

    Args:
      state: `State` of the scores so far.
      scores: floating array `[*rows, block]`, or an iterable of several such arrays of one shape. Arrays of 16 bits or
        less are converted to float32. A score of `-inf` counts as absent. If the scores carry no values, the block may lie
        along another axis or along several axes.
      values: array `[*batch, block, value_size]` for scores in one array `[*batch, queries, block]`. None (the default)
        for scores without values.
      axis: axis or axes of `scores` that hold the block; -1 by default, and the last axis if there are values. With `()`,
        the block consists of the several arrays in `scores`.
      scale: scalar or array `[*rows]` that multiplies the scores, not negative; None (the default) for 1. It must be the
        same for all blocks.
      top: maximum of the block, `[*rows]`, if the caller knows it; None (the default) to compute it. It must not be less
        than the maximum.

    Returns:
      `State` of the earlier scores and the block, in the shape of `state`.

    Raises:
      TypeError: `state` is not a `State`.
      ValueError: `values` come with several arrays of scores, or with an `axis` that is not the last one; or only one of
        `state` and `scores` carries values.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 100), jnp.float32)
      >>> state = online.identity((4,))
      >>> for block in jnp.split(scores, 4, axis=1):
      ...     state = online.push(state, block)
      >>> bool(jnp.allclose(online.finish(state).m, jax.nn.logsumexp(scores, axis=-1), atol=1e-5))
      True

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
    """
    _check("push", state=state)
    parts, m = _parts_and_max(scores, axis, top)
    m = jnp.maximum(state.m, m)
    d, o = _sums(parts, values, m, axis, scale)
    old = rescale(state, m, scale=scale)
    return State(m, old.d + d, _added(old.o, o))


def merge(a: State, b: State, *, scale: jax.Array | None = None) -> State:
    """Merges two states: returns the state of the scores of both.

    Both states are rescaled to the larger maximum and added. The operation is associative and commutative, and `identity`
    is its neutral element.

    Args:
      a: `State` of some scores.
      b: `State` of other scores of the same rows.
      scale: scalar or array `[*rows]` that multiplied the scores of both states, not negative; None (the default) for 1.

    Returns:
      `State` in the shape of `a` and `b`.

    Raises:
      TypeError: `a` or `b` is not a `State`.
      ValueError: only one of the two states carries values.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 100))
      >>> left, right = online.lift(scores[:, :30]), online.lift(scores[:, 30:])
      >>> merged = online.finish(online.merge(left, right))
      >>> bool(jnp.allclose(merged.m, jax.nn.logsumexp(scores, axis=-1), atol=1e-5))
      True

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
    """
    _check("merge", a=a, b=b)
    m = jnp.maximum(a.m, b.m)
    a, b = rescale(a, m, scale=scale), rescale(b, m, scale=scale)
    return State(m, a.d + b.d, _added(a.o, b.o))


def push_log2(
    state: State,
    scores: jax.Array,
    scale_log2: float,
    *,
    axis: int = -1,
    slack: float = 0,
    headroom: float = 0,
    unit: float = 1,
) -> tuple[State, jax.Array, jax.Array]:
    """Adds a block of scores to a state in powers of two, for kernels that sum the values themselves.

    With `s = unit * scale_log2 * scores`, a weight is `2**(s - unit * m)`. So a score in natural units is `s * log(2)`,
    and the `m` of the state is in units of `unit * log(2)`. With `unit` 1, a multiply-add and an `exp2` give a weight, and
    the rounding of `m`, up to `|m| * 2**-24`, is the same in all weights. That rounding must be small compared with 128,
    the largest exponent of float32. With `scale_log2` 1 and another unit `m` is not rounded, at the cost of one more
    operation.

    Args:
      state: `State` with `m` and `d`.
      scores: floating array `[*rows, block]`, with the block along `axis`.
      scale_log2: positive factor of the scores.
      axis: axis of `scores` that holds the block; -1 by default.
      slack: amount by which scores may exceed the `m` of the state before `m` follows, in units of `log(2)`; 0 by default.
        When `m` follows, it becomes the maximum of the block. At any time it is at most `slack` below the maximum, so
        weights are at most `2**slack`, and most factors are 1.
      headroom: amount by which `m` stays below the maximum when it follows, in units of `log(2)`; 0 by default. Weights
        are then at most `2**(slack + headroom)`, so that float16 holds small weights with more bits.
      unit: unit of `m`; 1 by default.

    Returns:
      A triple: the `State` that includes the block, the factor `[*rows]` that rescales earlier sums of values, and the
      weights of the block `[*rows, block]`.

    Examples:
      >>> import math
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 100), jnp.float32)
      >>> values = jax.random.normal(jax.random.key(1), (100, 8), jnp.float32)
      >>> state, total = online.identity((4,)), jnp.zeros((4, 8), jnp.float32)
      >>> for block in (slice(0, 50), slice(50, 100)):
      ...     state, factor, weights = online.push_log2(state, scores[:, block], math.log2(math.e))
      ...     total = total * factor[:, None] + jnp.matmul(weights, values[block], precision="highest")
      >>> expected = jnp.matmul(jax.nn.softmax(scores), values, precision="highest")
      >>> bool(jnp.allclose(total / state.d[:, None], expected, atol=1e-5))
      True
    """
    scores = _wide(scores)
    m = jnp.max(scores, axis, initial=-jnp.inf) * scale_log2 - headroom / unit
    m = jnp.maximum(state.m, m) if slack == 0 else jnp.where(m > state.m + slack / unit, m, state.m)
    shifted = shift(m)
    factor = jnp.exp2((state.m - shifted) * unit)
    weight = _weights_log2(scores, shifted, scale_log2, axis, unit)
    return State(m, rescale_sum(state.d, factor) + jnp.sum(weight, axis)), factor, weight


def guess_log2(
    m: jax.Array, scores: jax.Array, scale_log2: float, *, parts: int = 1, unit: float = 1
) -> tuple[jax.Array, jax.Array]:
    """Computes the weights of a block of scores on the guess that `m` need not follow.

    `push_log2` needs the maximum of the block before it computes a weight. A guess computes each weight from its score alone.
    The sums of the weights tell whether it was right, and `correct_log2` repeats the rows in which it was wrong.

    Args:
      m: `m` of a state of `push_log2`, `[*rows]`.
      scores: floating array `[*rows, block]`.
      scale_log2: positive factor of the scores.
      parts: number of sums of each row, a divisor of the block; 1 by default. The sum `i` is that of the weights `i`,
        `i + parts`, `i + 2 * parts` and so on, so that threads which share a row need not add up over each other.
      unit: `unit` of the calls that made `m`; 1 by default.

    Returns:
      A pair: the sums `[*rows, parts]`, and the weights `[*rows, block]`. Where `m` is `-inf` a weight is 0 or infinite.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> m, scores = jnp.array([0.0, 0.0]), jnp.array([[1.0, 2.0], [3.0, 200.0]])
      >>> sums, weights = online.guess_log2(m, scores, 1.0)
      >>> print(sums[:, 0], weights[0])
      [ 6. inf] [2. 4.]
    """
    scores = _wide(scores)
    # A row that has seen no score compares with the lowest number: its first score makes an infinite weight, -inf makes 0.
    m = jnp.maximum(m, -jnp.finfo(m.dtype).max)
    return _sums_and_weights(scores, m, scale_log2, parts, unit)


def correct_log2(
    m: jax.Array, scores: jax.Array, scale_log2: float, sums: jax.Array, *, slack: float, lead: float = 0, unit: float = 1
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes the weights of a block again in the rows in which `guess_log2` was wrong.

    A guess was wrong if a sum of the row exceeds `2**slack` or is NaN. `m` follows there: it becomes the maximum of the block,
    and `lead` more. Scores that go on growing are then not corrected in each block. The other rows keep their `m`, sums and
    weights. So a row does not depend on other rows, and without a wrong guess the call may be left out.

    Args:
      m: `m` that was passed to `guess_log2`, `[*rows]`.
      scores: floating array `[*rows, block]`.
      scale_log2: positive factor of the scores.
      sums: sums that `guess_log2` returned, `[*rows, parts]`.
      slack: amount by which sums may exceed 1 before `m` follows, in units of `log(2)`.
      lead: amount by which `m` exceeds the maximum when it follows, in units of `log(2)`; 0 by default. Weights are then at
        most `2**-lead`. In float32 a weight is lost if it is less than `2**(lead - 126)` of the largest.
      unit: `unit` of the calls that made `m`; 1 by default.

    Returns:
      `m` after the block, the factor `[*rows]` that rescales earlier sums, the sums `[*rows, parts]`, and the weights
      `[*rows, block]`. The factor is 1 where `m` does not follow.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = 30 * jax.random.normal(jax.random.key(0), (4, 100), jnp.float32)
      >>> state, _, _ = online.push_log2(online.identity((4,)), scores[:, :50], 1.0)
      >>> sums, weights = online.guess_log2(state.m, scores[:, 50:], 1.0)
      >>> m, factor, sums, weights = online.correct_log2(state.m, scores[:, 50:], 1.0, sums, slack=24)
      >>> d = state.d * factor + sums[:, 0]
      >>> bool(jnp.allclose(m + jnp.log2(d), jnp.log2(jnp.sum(jnp.exp2(scores), 1)), atol=1e-5))
      True
    """
    scores = _wide(scores)
    is_right = jnp.max(sums, -1) <= 2.0**slack  # NaN is not
    following = jnp.where(is_right, m, jnp.maximum(m, jnp.max(scores, -1) * scale_log2 + lead / unit))
    # Not `shift`, which makes a factor of 0 or infinity for an `m` that is infinite and stays so.
    factor = jnp.exp2((finite(m) - finite(following)) * unit)
    return following, factor, *_sums_and_weights(scores, finite(following), scale_log2, sums.shape[-1], unit)


def _sums_and_weights(scores, m, scale_log2, parts, unit):
    """Returns the sums of every `parts`-th weight of the last axis, and the weights."""
    weight = _weights_log2(scores, m, scale_log2, -1, unit)
    return functools.reduce(operator.add, [weight[..., i : i + parts] for i in range(0, weight.shape[-1], parts)]), weight


def _weights_log2(scores, m, scale_log2, axis, unit):
    """Returns the weights of scores for a finite `m`."""
    return jnp.exp2((scores * scale_log2 - _along(m, scores, axis)) * unit)


def rescale_sum(d: jax.Array, factor: jax.Array) -> jax.Array:
    """Rescales a sum of weights, the `d` of a state or a part of it, to the `m` after a block, as `push_log2` does."""
    return d * factor


def lift_log2(score: jax.Array, *, headroom: float = 0, unit: float = 1) -> State:
    """Makes the state of one score for each row, as `push_log2` represents it.

    An attention sink is such a score.

    Args:
      score: floating array `[*rows]`, in natural units.
      headroom: `headroom` of the calls of `push_log2` that follow; 0 by default.
      unit: `unit` of the calls of `push_log2` that follow; 1 by default.

    Returns:
      `State` with `m` and `d` of shape `[*rows]`, in the dtype of `score`.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> score = jnp.array([0.5, -2.0])
      >>> state = online.lift_log2(score)
      >>> bool(jnp.allclose(online.lse_log2(state), score))
      True
    """
    return State(score * (_LOG2E / unit) - headroom / unit, jnp.full(score.shape, 2**headroom, score.dtype))


def lse_log2(state: State, *, unit: float = 1) -> jax.Array:
    """Returns the log-sum-exp of a state of `push_log2`, in natural units.

    The result is `log(2) * (unit * m + log2(d))`.

    Args:
      state: `State` of `push_log2` or `lift_log2`.
      unit: `unit` of the calls that made the state; 1 by default.

    Returns:
      Array `[*rows]` in the dtype of the state.

    Examples:
      >>> import math
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 100), jnp.float32)
      >>> state, _, _ = online.push_log2(online.identity((4,)), scores, math.log2(math.e))
      >>> bool(jnp.allclose(online.lse_log2(state), jax.nn.logsumexp(scores, axis=-1), atol=1e-5))
      True
    """
    return unit / _LOG2E * state.m + jnp.log2(state.d) * (1 / _LOG2E)


def merge_along(states: State, axis: int, *, scale: jax.Array | None = None, product: Product = operator.mul) -> State:
    """Merges states that are stacked along an axis.

    Args:
      states: `State` without values whose `m` and `d` have an additional axis, along which states are stacked.
      axis: that axis of `m` and `d`.
      scale: scalar or array, in the shape of the result, that multiplied the scores of all states, not negative; None (the
        default) for 1.
      product: function that multiplies two arrays of the shape of `d`, for kernels that control the rounding;
        `operator.mul` by default.

    Returns:
      `State` of all scores, in the shape of `states` without `axis`.

    Raises:
      TypeError: `states` is not a `State`.
      ValueError: `states` carry values.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 5, 20))
      >>> state = online.merge_along(online.lift(scores), axis=1)
      >>> bool(jnp.allclose(online.finish(state).m, jax.nn.logsumexp(scores, axis=(1, 2)), atol=1e-5))
      True

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
    """
    _check("merge_along", states=states)
    if states.o is not None:
        raise ValueError("online: merge_along takes states without values")
    m = jnp.max(states.m, axis, initial=-jnp.inf)
    return State(m, jnp.sum(product(states.d, weights(states.m, m, axis=axis, scale=scale)), axis))


def finish(state: State) -> State:
    """Returns the log-sum-exp of a state, and the mean of the values with softmax weights.

    The result is a state of the same scores with `d = 1`, so it can be merged with other states.

    Args:
      state: `State` made without `scale`.

    Returns:
      `State` in the shape of `state`: `m` is the log-sum-exp, `d` is 1, and `o` is the weighted mean of the values, or
      None. A row without scores, or with every score `-inf`, has the log-sum-exp `-inf` and the mean 0.

    Raises:
      TypeError: `state` is not a `State`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 100))
      >>> values = jax.random.normal(jax.random.key(1), (100, 8))
      >>> mean = online.finish(online.lift(scores, values)).o
      >>> expected = jnp.matmul(jax.nn.softmax(scores), values, precision="highest")
      >>> bool(jnp.allclose(mean, expected, atol=1e-5))
      True
    """
    _check("finish", state=state)
    o = state.o
    if o is not None:
        o = o / _over_values(jnp.where(state.d == 0, 1, state.d), o)
    return State(state.m + jnp.log(state.d), jnp.ones_like(state.d), o)


def weights(scores: jax.Array, m: jax.Array, *, axis: Axis = -1, scale: jax.Array | None = None) -> jax.Array:
    """Computes `exp(scale * (scores - m))`, which each score adds to the `d` of a state with the maximum `m`.

    Divided by `d`, the result is the softmax of the scores.

    Args:
      scores: floating array `[*rows, block]`, with the block along `axis`.
      m: maximum of each row, `[*rows]`, or a scalar. An infinite maximum counts as 0.
      axis: axis or axes of `scores` that hold the block; -1 by default.
      scale: scalar or array `[*rows]`, not negative; None (the default) for 1.

    Returns:
      Array in the shape of `scores`. It is 0 where the score is `-inf`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import online
      >>> scores = jax.random.normal(jax.random.key(0), (4, 100))
      >>> state = online.lift(scores)
      >>> softmax = online.weights(scores, state.m) / state.d[:, None]
      >>> bool(jnp.allclose(softmax, jax.nn.softmax(scores), atol=1e-6))
      True
    """
    return exponentials(scores, shift(m), axis=axis, scale=scale)


def exponentials(scores: jax.Array, m: jax.Array, *, axis: Axis = -1, scale: jax.Array | None = None) -> jax.Array:
    """Computes `weights` for an `m` that `shift` has made finite, which several blocks of scores share."""
    return jnp.exp(exponents(scores, m, axis=axis, scale=scale))


def exponents(scores: jax.Array, m: jax.Array, *, axis: Axis = -1, scale: jax.Array | None = None) -> jax.Array:
    """Computes the logarithms of `weights` for a finite `m`."""
    exponent = scores - _along(m, scores, axis)
    if scale is None:
        return exponent
    scaled = exponent * _along(scale, scores, axis).astype(exponent.dtype)
    return jnp.where(exponent == -jnp.inf, exponent, scaled)  # 0 * -inf would be NaN


def bounded(exponent: jax.Array) -> jax.Array:
    """Returns exponents that are finite where the weight is 0, so that their product with the weight is 0."""
    return jnp.maximum(exponent, _LEAST_EXPONENT)


def lower_exponents(
    m: jax.Array,
    d: jax.Array,
    sums: jax.Array,
    lower: jax.Array,
    *,
    scale: jax.Array | None = None,
    product: Product = operator.mul,
) -> tuple[jax.Array, jax.Array]:
    """Returns `d`, and sums of weights times their exponents, relative to a finite maximum instead of `m`.

    An exponent grows by the distance of the maxima, so that the second sum needs the first one.

    Args:
      m: maxima of states.
      d: `d` of the states.
      sums: sums of weights times `bounded` exponents, in the shape of `m`.
      lower: the finite maximum, not less than `m`: one for all, or in the shape of `m`.
      scale: as in `push`, likewise.
      product: product of two arrays.
    """
    return lower_by(d, sums, exponents(m, lower, axis=(), scale=scale), product=product)


def lower_by(
    d: jax.Array,
    sums: jax.Array,
    step: jax.Array,
    *,
    product: Product = operator.mul,
    exponential: Callable[[jax.Array], jax.Array] = jnp.exp,
) -> tuple[jax.Array, jax.Array]:
    """Computes `lower_exponents` where the new maximum makes exponents grow by `step`, which is not positive.

    Exponents, and the step, may be in another base than `e`: that of `exponential`.
    """
    step = bounded(step)
    factor = exponential(step)
    return product(d, factor), product(sums + d * step, factor)


def without_error_log2(d: jax.Array, sums: jax.Array, error: jax.Array, product: Product) -> tuple[jax.Array, jax.Array]:
    """Returns `d`, and sums of weights times their exponents in base 2, without an error that all exponents have.

    The error is the exponent of the largest score. That exponent is then 0, and the weight 1, exactly.
    """
    largest = jnp.exp2(error)
    return 1 + (d - largest) / largest, (sums - product(error, d)) / largest


def lower_differences(
    m: jax.Array,
    d: jax.Array,
    sums: jax.Array,
    other_m: jax.Array,
    other_d: jax.Array,
    lower: jax.Array,
    other_lower: jax.Array,
    *,
    scale: jax.Array | None = None,
    other_scale: jax.Array | None = None,
    product: Product = operator.mul,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `d`, sums of weights times differences of exponents, and `d` of the other scores, relative to other maxima.

    A difference is the exponent of the weight less that of the same entry of other scores. All maxima are finite: `finite`
    makes them so, and a state of no scores has any. If the other scores are all `-inf`, the sum is infinite, or 0 because there
    are no weights.

    Args:
      m: maxima of states.
      d: `d` of the states.
      sums: sums of weights times differences, in the shape of `m`.
      other_m: maxima of the other scores.
      other_d: `d` of the other scores.
      lower: the maximum that replaces `m`, not less: one for all, or in the shape of `m`.
      other_lower: the maximum that replaces `other_m`, likewise.
      scale: as in `push`, likewise.
      other_scale: the same for the other scores.
      product: product of two arrays.
    """
    step, other_step = exponents(m, lower, axis=(), scale=scale), exponents(other_m, other_lower, axis=(), scale=other_scale)
    factor = jnp.exp(step)
    d = product(d, factor)
    sums = jnp.where(d > 0, product(sums, factor) + d * (step - other_step), 0)  # without weight the terms may be NaN
    return d, sums, product(other_d, jnp.exp(other_step))


def _along(row: jax.Array, like: jax.Array, axis: Axis) -> jax.Array:
    """Repeats a number of each row, or one number for all rows, along `axis`."""
    axes = axis if isinstance(axis, tuple) else (operator.index(axis),)
    rows = tuple([a for a in range(like.ndim) if a not in axes and a - like.ndim not in axes])
    return lax.broadcast_in_dim(row, like.shape, rows if row.ndim else ())


def _wide(scores: jax.Array) -> jax.Array:
    """Casts scores to the dtype of the arithmetic."""
    return scores.astype(accumulator(scores.dtype))


def _check(function: str, **states: object) -> None:
    for name, state in states.items():
        if not isinstance(state, State):
            hint = "lift(scores) makes one of scores"
            raise TypeError(f"online.{function}: {name} must be a State, got {arguments.shown(state)}; {hint}")


def _parts_and_max(scores: Scores, axis: Axis, top: jax.Array | None = None) -> tuple[list[jax.Array], jax.Array]:
    """Returns the arrays of the scores, and the maximum of each row over all of them, which is `top` if the caller knows it."""
    parts = [_wide(part) for part in ([cast(jax.Array, scores)] if hasattr(scores, "ndim") else scores)]
    if top is not None:
        return parts, top
    m = functools.reduce(jnp.maximum, parts)
    return parts, m if axis == () else jnp.max(m, axis, initial=-jnp.inf)


def _sums(parts: list[jax.Array], values: jax.Array | None, m: jax.Array, axis: Axis, scale: jax.Array | None):
    """Computes the sums of the weights, and of the values with these weights."""
    last = parts[0].ndim - 1
    if values is not None and (len(parts) > 1 or axis not in (-1, last, (-1,), (last,))):
        raise ValueError(f"online: with values the block must be the last axis of one array of scores, got axis {axis}")
    shifted = shift(m)
    weight = functools.reduce(jnp.add, (exponentials(part, shifted, axis=axis, scale=scale) for part in parts))
    d = weight if axis == () else jnp.sum(weight, axis)
    if values is None:
        return d, None
    return d, jnp.matmul(
        weight, values.astype(weight.dtype), precision=lax.Precision.HIGHEST, preferred_element_type=weight.dtype
    )


def rescale(
    state: State, m: jax.Array, *, axis: Axis = (), scale: jax.Array | None = None, product: Product = operator.mul
) -> State:
    """Returns the state of the same scores relative to `m`, which must not be less than their maximum.

    States along `axis` share one `m`. `product` multiplies two arrays of the shape of `d`, for kernels that control the
    rounding.
    """
    factor = weights(state.m, m, axis=axis, scale=scale)
    return State(m, product(state.d, factor), None if state.o is None else state.o * _over_values(factor, state.o))


def _added(a: jax.Array | None, b: jax.Array | None) -> jax.Array | None:
    if a is None and b is None:
        return None
    if a is None or b is None:
        raise ValueError("online: of two states that are merged, both or neither must carry values")
    return a + b


def shift(m: jax.Array) -> jax.Array:
    """Returns the number to subtract from scores whose maximum is `m`: 0 for an infinite `m`, as `m - m` would be NaN."""
    return jnp.where(jnp.abs(m) < jnp.inf, m, 0)  # a kernel cannot reshard, as `zeros_like` does under a mesh


def finite(m: jax.Array) -> jax.Array:
    """Returns a finite maximum of a row, to subtract as `shift`, by operations that XLA:CPU fuses: it does not fuse a select.

    The largest number stands for infinity. An infinite score less that number is infinite.
    """
    most = jnp.finfo(m.dtype).max.astype(m.dtype)
    return -jnp.maximum(-jnp.maximum(m, -most), -most)


def _over_values(row: jax.Array, o: jax.Array) -> jax.Array:
    """Repeats a number of each row for each of the row's values."""
    return lax.broadcast_in_dim(row, o.shape, tuple(range(row.ndim)))
