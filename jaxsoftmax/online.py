"""Online softmax as a monoid.

A `State` stands for a set of scores that have been seen:

    m = max(scores),   d = sum(exp(scores - m)),   o = sum(exp(scores - m) * values)

(`o` only where values ride along, as in attention.) Softmax needs nothing but this state: its denominator is `d` once the
maximum is `m`, log-sum-exp is `m + log(d)`, and attention's output is `o / d`. Two sets are joined by rescaling both states to
the larger maximum and adding:

    m = max(a.m, b.m),   d = a.d * exp(a.m - m) + b.d * exp(b.m - m),   o likewise.

This `merge` is associative and commutative, and `identity`, the state of no scores, is `(-inf, 0, 0)`. So the scores of a row
may be cut anywhere and merged in any order, at any level: between lanes, warps, blocks, key blocks of attention, splits of a
huge row, or devices. A row is read once, as the sum so far can be rescaled when the maximum grows.

    state = identity(shape)            no scores yet
    state = push(state, block)         one more block of scores; equals merge(state, lift(block))
    state = merge(state, other)        another split of the same rows
    state = finish(state)              (log-sum-exp, 1, the weighted mean of the values)

A finished state is again a state, of the same scores, with `d = 1`. Attention over a prefix that many requests share can
therefore be computed once, kept as `(lse, o)`, and merged with the attention over each request's own suffix:

>>> import jax, jax.numpy as jnp
>>> keys = jax.random.split(jax.random.key(0), 5)
>>> query = jax.random.normal(keys[0], (4, 8))  # four requests, head size 8
>>> prefix_k, prefix_v = jax.random.normal(keys[1], (2, 32, 8))  # 32 shared tokens
>>> suffix_k, suffix_v = jax.random.normal(keys[2], (2, 4, 5, 8))  # five tokens for each request
>>> shared = finish(lift(query @ prefix_k.T, prefix_v))  # once
>>> own = lift(jnp.einsum("rh,rkh->rk", query, suffix_k)[:, None], suffix_v)  # rows [4, 1], values [4, 1, 8]
>>> own = jax.tree.map(lambda a: a[:, 0], own)
>>> output = finish(merge(shared, own)).o
>>> k = jnp.concatenate([jnp.broadcast_to(prefix_k, (4, 32, 8)), suffix_k], axis=1)
>>> v = jnp.concatenate([jnp.broadcast_to(prefix_v, (4, 32, 8)), suffix_v], axis=1)
>>> whole = jnp.einsum("rk,rkh->rh", jax.nn.softmax(jnp.einsum("rh,rkh->rk", query, k)), v)
>>> bool(jnp.allclose(output, whole, atol=1e-2))  # a GPU may multiply in TF32
True

Infinite scores obey the laws too: a set of nothing but `-inf` has the state `(-inf, 0, 0)` of the identity, one that holds
`+inf` has `m = d = +inf`. A NaN score makes the state NaN. Everything here is plain `jax.numpy` on whole blocks and runs in
float32 or float64 wherever that does: in `jit`, in a Pallas kernel, in `lax.reduce`, in `shard_map`.

With `scale`, which must not be negative, the scores are `scale` times what is given: `m` is the maximum before scaling, and
`d` the sum of `exp(scale * (given - m))`. That is exact where `scale * given` would lose the differences of large scores.
`finish` takes states without a `scale`.

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
    "finish",
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


class State(NamedTuple):
    """The scores of each row seen so far.

    Attributes:
      m: maximum of the scores, `[*rows]`.
      d: sum of `exp(score - m)`, `[*rows]`.
      o: sum of `exp(score - m) * value`, `[*rows, value_size]`, or None where no values ride along.
    """

    m: jax.Array
    d: jax.Array
    o: jax.Array | None = None


def identity(rows: tuple[int, ...], value_size: int | None = None, dtype: jax.typing.DTypeLike = jnp.float32) -> State:
    """The state of no scores at all, for an array of rows; with `value_size`, for scores that carry values."""
    o = None if value_size is None else jnp.zeros((*rows, value_size), dtype)
    return State(jnp.full(rows, -jnp.inf, dtype), jnp.zeros(rows, dtype), o)


def lift(scores: Scores, values: jax.Array | None = None, *, axis: Axis = -1, scale: jax.Array | None = None) -> State:
    """The state of one block of scores.

    Args:
      scores: `[*rows, block]`, floating, or several such arrays of one shape. Those of 16 bits or less become float32. Scores
        of `-inf` are scores that are not there. The block may lie along other axes, or several, when no values ride along.
      values: None or `[*batch, block, value_size]`, where `[*batch, queries]` are the scores' rows; for one array of scores.
      axis: the axis or axes of `scores` that are the block; the last, if there are values. `()` where several arrays are it.
      scale: None, a scalar or `[*rows]`, not negative.

    Returns:
      A `State` with the scores' shape without `axis`.
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
    """`merge(state, lift(scores, values))`, with one rescaling instead of two: the step of a hot loop.

    `top` is the maximum of the block, `[*rows]`, where that is known; it must not be less.
    """
    _check("push", state=state)
    parts, m = _parts_and_max(scores, axis, top)
    m = jnp.maximum(state.m, m)
    d, o = _sums(parts, values, m, axis, scale)
    old = rescale(state, m, scale=scale)
    return State(m, old.d + d, _added(old.o, o))


def merge(a: State, b: State, *, scale: jax.Array | None = None) -> State:
    """The state of the scores of both: associative, commutative, and with `identity` as its neutral element."""
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
    """`push` in powers of two, for kernels that sum the values themselves.

    Scores are `unit * scale_log2 * scores * log(2)`, and the `m` of the state is in units of `unit * log(2)`. With a unit of 1
    a multiply-add and an `exp2` give a weight, and the rounding of `m`, up to `|m| * 2^-24`, is in all weights alike: it has
    to be small against 128. With `scale_log2` 1 and another unit `m` is not rounded, for one operation more.

    Args:
      state: with `m` and `d`.
      scores: `[*rows, block]`.
      scale_log2: positive.
      axis: the axis of `scores` that is the block.
      slack: by how much scores may exceed the `m` of the state, in units of `log(2)`, before it follows: then `m` is their
        maximum, or up to `slack` less. Weights are at most `2**slack`, and most factors 1.
      headroom: by how much `m` is less than the maximum when it follows, in units of `log(2)`. Weights are at most
        `2**(slack + headroom)`: float16 holds small ones with more bits then.
      unit: of `m`.

    Returns:
      The state with the block, the factor for what was summed before, and the weights of the block, `[*rows, block]`.
    """
    scores = _wide(scores)
    m = jnp.max(scores, axis, initial=-jnp.inf) * scale_log2 - headroom / unit
    m = jnp.maximum(state.m, m) if slack == 0 else jnp.where(m > state.m + slack / unit, m, state.m)
    shifted = shift(m)
    factor = jnp.exp2((state.m - shifted) * unit)
    weight = jnp.exp2((scores * scale_log2 - _along(shifted, scores, axis)) * unit)
    return State(m, state.d * factor + jnp.sum(weight, axis)), factor, weight


def lift_log2(score: jax.Array, *, headroom: float = 0, unit: float = 1) -> State:
    """The state of one score, in natural units, as `push_log2` has it with this headroom and unit."""
    return State(score * (_LOG2E / unit) - headroom / unit, jnp.full(score.shape, 2**headroom, score.dtype))


def lse_log2(state: State, *, unit: float = 1) -> jax.Array:
    """The log-sum-exp, in natural units, of a state of `push_log2` with this unit."""
    return unit / _LOG2E * state.m + jnp.log2(state.d) * (1 / _LOG2E)


def merge_along(states: State, axis: int, *, scale: jax.Array | None = None, product: Product = operator.mul) -> State:
    """The state of all scores of the states that are stacked along `axis` of the rows; no values may ride along.

    `product` is that of `rescale`.
    """
    _check("merge_along", states=states)
    if states.o is not None:
        raise ValueError("online: merge_along takes states without values")
    m = jnp.max(states.m, axis, initial=-jnp.inf)
    return State(m, jnp.sum(product(states.d, weights(states.m, m, axis=axis, scale=scale)), axis))


def finish(state: State) -> State:
    """`(log-sum-exp, 1, the mean of the values weighted with softmax)`: a state of the same scores.

    Rows without a score, or with none above `-inf`, get `-inf` and a mean of zero.
    """
    _check("finish", state=state)
    o = state.o
    if o is not None:
        o = o / _over_values(jnp.where(state.d == 0, 1, state.d), o)
    return State(state.m + jnp.log(state.d), jnp.ones_like(state.d), o)


def weights(scores: jax.Array, m: jax.Array, *, axis: Axis = -1, scale: jax.Array | None = None) -> jax.Array:
    """`exp(scale * (scores - m))`: what each score adds to `d` of a state whose maximum is `m`; 0 for a score of `-inf`."""
    return exponentials(scores, shift(m), axis=axis, scale=scale)


def exponentials(scores: jax.Array, m: jax.Array, *, axis: Axis = -1, scale: jax.Array | None = None) -> jax.Array:
    """`weights` for an `m` that `shift` has made finite, once for several blocks of scores."""
    exponent = scores - _along(m, scores, axis)
    if scale is not None:  # 0 * -inf would be NaN
        scaled = exponent * _along(scale, scores, axis).astype(exponent.dtype)
        exponent = jnp.where(exponent == -jnp.inf, exponent, scaled)
    return jnp.exp(exponent)


def _along(row: jax.Array, like: jax.Array, axis: Axis) -> jax.Array:
    """A figure for each row, or one for all, repeated along `axis`."""
    axes = axis if isinstance(axis, tuple) else (operator.index(axis),)
    rows = tuple([a for a in range(like.ndim) if a not in axes and a - like.ndim not in axes])
    return lax.broadcast_in_dim(row, like.shape, rows if row.ndim else ())


def _wide(scores: jax.Array) -> jax.Array:
    """The scores in the dtype of the arithmetic."""
    return scores.astype(accumulator(scores.dtype))


def _check(function: str, **states: object) -> None:
    for name, state in states.items():
        if not isinstance(state, State):
            what = "lift(scores) makes one of scores"
            raise TypeError(f"online.{function}: {name} must be a State, got {arguments.shown(state)}; {what}")


def _parts_and_max(scores: Scores, axis: Axis, top: jax.Array | None = None) -> tuple[list[jax.Array], jax.Array]:
    """The arrays of the scores, and the maximum of each row over all of them: `top` if that is known."""
    parts = [_wide(part) for part in ([cast(jax.Array, scores)] if hasattr(scores, "ndim") else scores)]
    if top is not None:
        return parts, top
    m = functools.reduce(jnp.maximum, parts)
    return parts, m if axis == () else jnp.max(m, axis, initial=-jnp.inf)


def _sums(parts: list[jax.Array], values: jax.Array | None, m: jax.Array, axis: Axis, scale: jax.Array | None):
    """The sums of the weights and of the values with these weights."""
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
    """The same scores, relative to a maximum `m` that is at least their own; one for all states along `axis`.

    `product` multiplies two arrays of the shape of `d`, for kernels that must say how it is rounded.
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
    """What to subtract from scores whose maximum is `m`: 0 for an infinite one, where `m - m` would be NaN."""
    return jnp.where(jnp.abs(m) < jnp.inf, m, 0)  # not `zeros_like`, which reshards under a mesh: no kernel can


def finite(m: jax.Array) -> jax.Array:
    """Makes the maximum of a row finite, to be subtracted as `shift` is, in operations that XLA fuses, so without a select.

    The largest number stands for infinity: infinity less that is infinity.
    """
    most = jnp.finfo(m.dtype).max.astype(m.dtype)
    return -jnp.maximum(-jnp.maximum(m, -most), -most)


def _over_values(row: jax.Array, o: jax.Array) -> jax.Array:
    """A figure for each row, repeated for each of its values."""
    return lax.broadcast_in_dim(row, o.shape, tuple(range(row.ndim)))
