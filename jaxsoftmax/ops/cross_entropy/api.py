"""Cross-entropy, with the first arguments and the values of `optax.softmax_cross_entropy_with_integer_labels`."""

import math
import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments, dispatch
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY
from jaxsoftmax.ops.cross_entropy.xla import capped
from jaxsoftmax.ops.softmax.api import logsumexp, sorted_axes

_NAME = "cross_entropy"


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
    return_lse: Literal[False] = False,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
    return_lse: Literal[True],
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
    return_lse: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The loss `logsumexp(s) - s[label]` of each row of `logits`, where `s` are its scores: the logits, or capped ones.

    Arithmetic is float32, or float64 where `logits` are; the gradient has the dtype of `logits`. It may be differentiated any
    number of times, in both modes. On Hopper the logits are read once forward, and read and written once backward.

    Args:
      logits: `[*rows, classes]`, floating, the classes along `axis`.
      labels: `[*rows]`, integers: the class of each row. Or, floating, in the shape of `logits`: how likely each class is; what
        is 0 adds nothing, whatever the logit.
      axis: that of the classes, or several: then a label counts in `logits[axis]`, flattened in the order of `axis`.
      where: boolean, broadcast against `logits`: the classes that take part. Or `[*rows]`: the rows that do.
      label_smoothing: the share, from 0 to 1, of the labels that is spread evenly over the classes that take part.
      z_loss: a number; `z_loss * logsumexp(s)**2` is added.
      logits_soft_cap: a concrete positive number: the scores are `cap * tanh(logits / cap)`. None for no cap.
      ignore_index: the label of rows that do not count, such as padding: their loss and gradient are 0, whatever they hold.
      return_lse: whether to return `logsumexp(s)` too.
      implementation: None for the best one for this platform, shape and dtype; or the name of the one that must run.

    Returns:
      The losses, `[*rows]`, float32 or float64; with `return_lse` a pair of them and the log-sum-exp of each row. A label that
      is none of the classes gives NaN, a negative one too. A row of which nothing takes part has loss 0.

    Raises:
      TypeError: an argument is not of a type named here.
      ValueError: the shape of `labels` or `where` does not fit, `axis` is out of range or repeated, a number is out of range,
        `ignore_index` comes with floating labels, or there is no such `implementation`.
      NotImplementedError: `implementation` cannot run this call; with the reason.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the log-sum-exp.
    """
    dispatch.check_implementation(_NAME, _NAME, implementation)
    (return_lse,) = arguments.flags(_NAME, return_lse=return_lse)
    logits = arguments.array(_NAME, "logits", logits, "floating")
    labels = arguments.array(_NAME, "labels", labels)
    where = None if where is None else arguments.array(_NAME, "where", where, "boolean")
    are_classes, kind = jnp.issubdtype(labels.dtype, jnp.integer), accumulator(logits.dtype)
    if not are_classes and not jnp.issubdtype(labels.dtype, jnp.floating):
        raise TypeError(f"{_NAME}: labels must be integers or floating, got {labels.dtype}")
    if ignore_index is not None and not are_classes:
        raise ValueError(f"{_NAME}: ignore_index must be None where labels are floating, got {arguments.shown(ignore_index)}")
    smoothing, z_loss = _number("label_smoothing", label_smoothing, 0, 1), _number("z_loss", z_loss)
    soft_cap = arguments.soft_cap(_NAME, logits_soft_cap, kind)
    axes = _in_order(axis, logits.ndim)
    rows = tuple([size for at, size in enumerate(logits.shape) if at not in axes])
    labels = _broadcast("labels", labels, rows if are_classes else logits.shape)
    if where is not None:
        where = lax.expand_dims(where, sorted(axes)) if where.ndim == len(rows) else where
        whole = _broadcast("where", where, logits.shape)
        where = whole if len(axes) > 1 else lax.expand_dims(where, range(logits.ndim - where.ndim))
        where = _flat(where, axes)
    logits, labels = _flat(logits, axes), labels if are_classes else _flat(labels, axes)
    at = axes[0] if len(axes) == 1 else logits.ndim - 1

    if are_classes:
        index = jnp.where((labels >= 0) & (labels < logits.shape[at]), labels, -1).astype(jnp.int32)
        operands = {"x": logits, "labels": jnp.expand_dims(index, at), "where": where}
        params = {"axes": (at,), "dtype": kind, "soft_cap": soft_cap, "implementation": implementation}
        found = bind(CROSS_ENTROPY, operands, return_total=smoothing > 0, return_state=False, **params)
        found = [jnp.squeeze(result, at) for result in found]
    else:
        scores = capped(logits.astype(kind), soft_cap)
        lse = logsumexp(scores if soft_cap else logits, at, where=where, implementation=implementation).astype(kind)
        labels = labels if where is None else jnp.where(where, labels, 0)
        terms = labels.astype(kind) * (jnp.expand_dims(lse, at) - scores)
        found = [jnp.sum(jnp.where(labels != 0, terms, 0), at), lse, jnp.sum(scores, at, where=where)]
    counts = None if where is None else jnp.any(where, at)
    if ignore_index is not None:
        is_label = _differs(labels, ignore_index)
        counts = is_label if counts is None else counts & is_label
    # Rows that do not count are taken out before anything is computed from their log-sum-exp, which may be infinite.
    loss, lse, *total = found if counts is None else [jnp.where(counts, part, 0) for part in found]
    if smoothing:
        loss = (1 - smoothing) * loss + smoothing * (lse - total[0] / _classes(logits, where, at, kind))
    if z_loss:
        loss += z_loss * lse * lse
    return (loss, found[1]) if return_lse else loss


def _number(name: str, value: Any, least: float = -math.inf, most: float = math.inf) -> float:
    number = arguments.number(_NAME, name, value)
    if not (least <= number <= most and math.isfinite(number)):
        allowed = "finite" if least == -math.inf else f"from {least} to {most}"
        raise ValueError(f"{_NAME}: {name} must be {allowed}, got {number}")
    return number


def _differs(labels: jax.Array, ignore_index: Any) -> jax.Array:
    try:
        if isinstance(ignore_index, bool):
            raise TypeError
        index = operator.index(ignore_index)
    except TypeError:
        what = arguments.shown(ignore_index)
        raise TypeError(f"{_NAME}: ignore_index must be a concrete integer or None, got {what}") from None
    limits = jnp.iinfo(labels.dtype)
    return labels != index if limits.min <= index <= limits.max else jnp.full(labels.shape, True)


def _classes(logits: jax.Array, where: jax.Array | None, at: int, kind: Any) -> jax.Array | float:
    """How many classes of each row take part, and 1 for none."""
    if where is None:
        return float(max(1, logits.shape[at]))
    if where.shape[at] == 1:
        return jnp.where(jnp.squeeze(where, at), jnp.asarray(logits.shape[at], kind), 1)
    return jnp.maximum(jnp.sum(where, at, dtype=kind), 1)


def _in_order(axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes of the classes as they were given, counted from 0."""
    axes = sorted_axes(_NAME, axis, ndim)
    if not axes:
        raise ValueError(f"{_NAME}: axis must name an axis of logits, got {arguments.shown(axis)} for {ndim} dimensions")
    return axes if len(axes) == 1 or axis is None else tuple([operator.index(a) % ndim for a in axis])


def _broadcast(name: str, array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{_NAME}: {name} must broadcast to shape {shape}, got {array.shape}") from None


def _flat(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The array with one axis of classes: several are moved to the end and flattened, in their order."""
    if len(axes) == 1:
        return array
    moved = jnp.moveaxis(array, axes, range(-len(axes), 0))
    return moved.reshape(*moved.shape[: -len(axes)], -1)
