"""Cross-entropy, with the first arguments and the values of `optax.softmax_cross_entropy_with_integer_labels`."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments, dispatch, sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operands import Map
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.cross_entropy import _devices, _linear, _shards
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT
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
    axis_name: str | Sequence[str] | None = None,
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
    axis_name: str | Sequence[str] | None = None,
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
    axis_name: str | Sequence[str] | None = None,
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
      where: boolean: the rows that take part, where it has as many axes as there are of rows, as in optax; else, broadcast
        against `logits`, the classes that do.
      label_smoothing: the share, from 0 to 1, of the labels that is spread evenly over the classes that take part.
      z_loss: a number; `z_loss * logsumexp(s)**2` is added.
      logits_soft_cap: a concrete positive number: the scores are `cap * tanh(logits / cap)`. None for no cap.
      ignore_index: the label of rows that do not count, such as padding: their loss and gradient are 0, whatever they hold.
      return_lse: whether to return `logsumexp(s)` too.
      axis_name: in a `shard_map`, the mesh axis or axes over which the classes are sharded, several in the order in which they
        are: a vocabulary-parallel loss. `logits` then have `classes / devices` of the classes (of several axes, the first is
        sharded), and so has what has their shape. Labels number the classes of all devices; they and the losses are the same
        on all of them. One all-gather has the states of rows, and where `where` masks classes an all-reduce how many are left.
        Where the map does not check what varies (`check_vma=False`), a derivative that is taken inside is that of the sum over
        devices, as of `lax.psum`.
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
    soft_cap = None if logits_soft_cap is None else arguments.soft_cap(_NAME, logits_soft_cap, kind)
    axes, axis_name = _in_order(axis, logits.ndim), arguments.axis_names(_NAME, axis_name)
    rows = tuple([size for at, size in enumerate(logits.shape) if at not in axes])
    if not are_classes and labels.shape != logits.shape:
        raise ValueError(f"{_NAME}: floating labels must have the shape {logits.shape} of logits, got {labels.shape}")
    labels = _broadcast("labels", labels, rows) if are_classes else labels
    if where is not None:
        if where.ndim == len(rows):
            where = lax.expand_dims(_broadcast("where", where, rows), sorted(axes))
        whole = _broadcast("where", where, logits.shape)
        where = whole if len(axes) > 1 else lax.expand_dims(where, range(logits.ndim - where.ndim))
        where = _flat(where, axes)
    logits, labels = _flat(logits, axes), labels if are_classes else _flat(labels, axes)
    at = axes[0] if len(axes) == 1 else logits.ndim - 1

    classes = logits.shape[at] * lax.axis_size(axis_name) if axis_name else logits.shape[at]
    if are_classes:
        index = jnp.expand_dims(_index(labels, classes, -1), at)
        params = {"axes": (at,), "dtype": kind, "soft_cap": soft_cap, "implementation": implementation}
        found = _losses(axis_name, params | {"return_total": smoothing > 0}, logits, index, where)
        found = [jnp.squeeze(result, at) for result in found]
    else:
        scores = capped(logits.astype(kind), soft_cap)
        lse = _logsumexp(axis_name, scores if soft_cap else logits, at, where, implementation).astype(kind)
        labels = labels if where is None else jnp.where(where, labels, 0)
        terms = labels.astype(kind) * jnp.where(labels != 0, jnp.expand_dims(lse, at) - scores, 0)
        sums = [jnp.sum(terms, at), *([jnp.sum(scores, at, where=where)] if smoothing else [])]
        nll, *total = lax.psum(sums, axis_name) if axis_name else sums
        found = [nll, lse, *total]
    there = None if where is None else _there(where, logits, at, classes, axis_name)
    counts = None if there is None else there != 0
    if ignore_index is not None:
        is_label = _differs(labels, ignore_index)
        counts = is_label if counts is None else counts & is_label
    # Rows that do not count are taken out before anything is computed from their log-sum-exp, which may be infinite.
    parts = found if counts is None else [jnp.where(counts, part, 0) for part in found]
    those = jnp.asarray(classes if there is None else there, kind)
    loss = _loss(*parts, smoothing=smoothing, z_loss=z_loss, classes=jnp.maximum(those, 1))
    return (loss, found[1]) if return_lse else loss


def _losses(axis_name, params, logits, labels, where):
    """What the primitive gives, over all devices if they share the classes."""
    if axis_name:
        return _shards.cross_entropy(axis_name, params, logits, labels, where)[:-2]
    return bind(CROSS_ENTROPY, {"x": logits, "labels": labels, "where": where}, return_state=False, **params)


def _logsumexp(axis_name, scores, at, where, implementation):
    if not axis_name:
        return logsumexp(scores, at, where=where, implementation=implementation)
    params = {"axes": (at,), "dtype": accumulator(scores.dtype), "soft_cap": None, "implementation": implementation}
    of_none = jnp.full([1 if axis == at else size for axis, size in enumerate(scores.shape)], -1, jnp.int32)
    return jnp.squeeze(_losses(axis_name, params | {"return_total": False}, scores, of_none, where)[1], at)


def _loss(nll, lse, total=None, *, smoothing, z_loss, classes):
    """The losses of rows from what the primitive gives."""
    loss = (1 - smoothing) * nll + smoothing * (lse - total / classes) if smoothing else nll
    return loss + z_loss * lse * lse if z_loss else loss


def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    weights: ArrayLike | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    class_axis: int = -1,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logits_soft_cap: float | None = None,
    ignore_index: int | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """`cross_entropy(hidden @ weight + bias, labels)`, without the logits of all rows in memory at a time.

    Logits are made for a part of the rows, 256 MiB of them, or 512 MiB with gradients, which take their place. (On explicit
    mesh axes, and in a `shard_map`, for a part of each device's rows.) They have the dtype of `hidden`, as sums in float32 that
    are rounded once; with a bias those sums are in memory too, and count. Of a mean or a sum the gradients are made with the
    losses, part by part, and take three products of matrices in all; with `reduction="none"`, and in float16, they take a
    fourth. There is no forward mode. Under `vmap` each example has parts of its own, all of which are in memory, but for losses
    on one device of examples that share the weight. In programs for symbolic shapes all rows are one part.

    The losses of `reduction="none"`, of float16, and of a mean or a sum that is not differentiated come from a kernel on
    Hopper, which has no logits in memory (12 bytes for each row and 256 classes in place of them), and does not round them. It
    takes `hidden` of 16 bits, and no bias, smoothing or cap. It copies a weight of another dtype, and one up to 256 MiB whose H
    is no multiple of 64, or its number of classes none of 64, or with `class_axis=0` of 8. On several devices it runs inside a
    `shard_map` over all mesh axes, or where all of them are explicit.

    Classes may be sharded over devices: a vocabulary-parallel loss. Each multiplies by its part of the weight, which is not
    gathered and neither are logits. Devices merge the states of rows by one collective for each part, or one in all without
    gradients, and add up the gradient of `hidden` once. (On automatic mesh axes that is left to XLA, for each part.)

    Args:
      hidden: `[*rows, H]`, floating, of 16 bits or more: what the last layer gets.
      weight: `[H, classes]`, as the kernel of a dense layer of Flax, or with `class_axis=0` `[classes, H]`, as an embedding. It
        is cast to the dtype of `hidden`; its gradient adds up over parts in its own dtype, of which float32 loses least.
      labels: `[*rows]`, integers: the class of each row.
      bias: `[classes]`, or None.
      weights: `[*rows]`, real: how much each row counts. One of 0 may hold anything; its loss is 0 and has no derivative.
      reduction: "mean" for the sum of the losses times `weights` over the sum of `weights`, both without rows of
        `ignore_index`, and 0 where nothing counts; "sum"; or "none" for `[*rows]` losses times `weights`.
      class_axis: the axis of `weight` that has the classes.
      label_smoothing: as for `cross_entropy`, and so are those that follow.
      z_loss: a number.
      logits_soft_cap: a concrete positive number, or None.
      ignore_index: a label, or None.
      axis_name: as for `cross_entropy`, in a `shard_map`: the mesh axes over which the classes of `weight` and `bias` are
        sharded. All else is the same on all devices of these.
      implementation: a name, or None.

    Returns:
      The loss, or losses, in float32, or float64 where `hidden` is.

    Raises what `cross_entropy` does, and ValueError where shapes do not fit each other or `reduction` is none of the three.
    """
    name = "linear_cross_entropy"
    dispatch.check_implementation(_NAME, name, implementation)
    hidden, weight = (arguments.array(name, *given, "floating") for given in (("hidden", hidden), ("weight", weight)))
    if hidden.dtype.itemsize < 2:
        raise TypeError(f"{name}: hidden must have 16 bits or more, as logits have its dtype, got {hidden.dtype}")
    labels = arguments.array(name, "labels", labels, "integers")
    if isinstance(class_axis, bool) or not isinstance(class_axis, int) or class_axis not in (-2, -1, 0, 1):
        raise ValueError(f"{name}: class_axis must be -2, -1, 0 or 1, got {arguments.shown(class_axis)}")
    axis = class_axis % 2
    if hidden.ndim < 1 or weight.ndim != 2 or weight.shape[1 - axis] != hidden.shape[-1]:
        shape = "[H, classes]" if axis else "[classes, H]"
        raise ValueError(f"{name}: weight must be {shape} for hidden [*rows, H], got shapes {weight.shape} and {hidden.shape}")
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {arguments.shown(reduction)}")
    rows, kind, classes = hidden.shape[:-1], accumulator(hidden.dtype), weight.shape[axis]
    soft_cap = None if logits_soft_cap is None else arguments.soft_cap(name, logits_soft_cap, kind)
    options = _number("label_smoothing", label_smoothing, 0, 1, name), _number("z_loss", z_loss, function=name), soft_cap
    given = {"hidden": hidden, "weight": weight, "labels": _broadcast("labels", labels, rows, name)}
    if bias is not None:
        given["bias"] = _broadcast("bias", arguments.array(name, "bias", bias, "floating"), (classes,), name)
    if weights is not None:
        weights = arguments.array(name, "weights", weights)
        if jnp.issubdtype(weights.dtype, jnp.complexfloating):
            raise TypeError(f"{name}: weights must be real, got {weights.dtype}")
        given["weights"] = _broadcast("weights", weights, rows, name).astype(kind)
    axis_name = arguments.axis_names(name, axis_name)

    def loss(of_rows, of_classes, *operands):
        """The losses of this device's rows, or their sum over the devices that share the rows."""
        shared = (*axis_name, *of_classes)
        head, all_classes = _Head(axis, *options, implementation, shared), classes * lax.axis_size(axis_name)
        here = dict(zip(given, operands, strict=True))
        hidden, weight, labels, bias = here["hidden"], here["weight"], here["labels"], here.get("bias")
        factors = here.get("weights", jnp.ones_like(labels, kind))
        index = _index(labels, all_classes, all_classes)
        if ignore_index is not None:
            factors = jnp.where(_differs(labels, ignore_index, name), factors, 0)
        if ignore_index is not None or weights is not None:
            index = jnp.where(factors != 0, index, _OF_NO_ROW)
            hidden = jnp.where(jnp.expand_dims(factors != 0, -1), hidden, 0)  # 0 * NaN would be in the gradient of the weight
        if reduction == "mean":
            count = lax.psum(jnp.sum(factors), of_rows)
            factors = factors / jnp.where(count != 0, count, 1)
        hidden = hidden.reshape(math.prod(hidden.shape[:-1]), hidden.shape[-1])
        index, factors = index.reshape(-1), factors.reshape(-1)
        # Small gradients are 0 in float16, unless they are made with the cotangent, a loss scale.
        if reduction != "none" and hidden.dtype != jnp.float16:
            total = _linear.weighted_sum(head, hidden, weight, bias, index, factors)
        else:
            losses = factors * _linear.losses(head, hidden, weight, bias, index)
            if reduction == "none":
                return lax.psum(losses.reshape(labels.shape), shared)
            total = jnp.sum(losses)
        return lax.psum(total, (*of_rows, *shared))

    axes = {"hidden": (None,), "weight": (None, "classes") if axis else ("classes", None), "bias": ("classes",)}
    names = [axes.get(operand, ()) for operand in given]
    return sharding.on_shards(loss, list(given.values()), names, "classes", len(rows) if reduction == "none" else 0)


_OF_NO_ROW = -1  # the label of rows that do not count; a label that is no class becomes the number of classes


@dataclass(frozen=True)
class _Head:
    """What `_linear` computes of the products, hashed by its values, so that equal calls are compiled once."""

    class_axis: int
    label_smoothing: float
    z_loss: float
    logits_soft_cap: float | None
    implementation: str | None
    axis_name: tuple[str, ...] = ()

    def own(self, labels: jax.Array, classes: int) -> jax.Array:
        """The labels as this device counts its classes, which are so many, and -1 for those of other devices."""
        if not self.axis_name:
            return labels
        place = labels - lax.axis_index(self.axis_name) * classes
        return jnp.where((place >= 0) & (place < classes), place, -1)

    def numbers(self, logits: jax.Array, own: jax.Array) -> list[jax.Array]:
        params = {"axes": (1,), "dtype": accumulator(logits.dtype), "soft_cap": self.logits_soft_cap}
        params |= {"return_total": self.label_smoothing > 0}
        operands = {"x": logits, "labels": own[:, None]}
        if self.axis_name:
            found = _devices.part(self._run, **operands, where=None, **params)
        else:
            found = self._run(CROSS_ENTROPY, operands, return_state=False, **params)
        return [jnp.squeeze(number, 1) for number in found]

    def losses(self, numbers: Sequence[jax.Array], labels: jax.Array, classes: int) -> jax.Array:
        if self.axis_name:
            numbers = _devices.joined(numbers, labels, numbers[0].dtype, self._over(classes))[:-2]
        return self.loss(numbers, labels, classes)

    def losses_and_gradient(self, logits: jax.Array, labels: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The losses, and the derivative of the sum of `factors` times them, in the memory of the logits."""
        operands = {"x": logits, "labels": labels[:, None], "t": factors[:, None]}
        params = {"axes": (1,), "dtype": factors.dtype, "soft_cap": self.logits_soft_cap}
        params |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        classes = logits.shape[1]
        if self.axis_name:
            gradient, *found = _devices.cross_entropy_gradient(self._run, **operands, over=self._over(classes), **params)
        else:
            gradient, *found = self._run(CROSS_ENTROPY_GRADIENT, operands, **params)
        return self.loss([jnp.squeeze(part, 1) for part in found], labels, classes), gradient

    def loss(self, found: Sequence[jax.Array], labels: jax.Array, classes: int) -> jax.Array:
        """From the `nll`, the log-sum-exp and with smoothing the sum of the scores of rows; 0 on all devices but the first."""
        found = [jnp.where(labels != _OF_NO_ROW, part, 0) for part in found]
        classes = max(classes, 1) * lax.axis_size(self.axis_name)
        loss = _loss(*found, smoothing=self.label_smoothing, z_loss=self.z_loss, classes=classes)
        return jnp.where(lax.axis_index(self.axis_name) == 0, loss, 0) if self.axis_name else loss

    def _run(self, this: Map, operands: dict[str, Any], **params: Any) -> list[jax.Array]:
        return bind(this, operands, implementation=self.implementation, **params)

    def _over(self, classes: int) -> dict[int, sharding.Cut]:
        return {1: sharding.Cut.of_part(self.axis_name, classes)}

    @property
    def is_plain(self) -> bool:
        return self.label_smoothing == 0 and self.logits_soft_cap is None


def _number(name: str, value: Any, least: float = -math.inf, most: float = math.inf, function: str = _NAME) -> float:
    number = arguments.number(function, name, value)
    if not (least <= number <= most and math.isfinite(number)):
        allowed = "finite" if least == -math.inf else f"from {least} to {most}"
        raise ValueError(f"{function}: {name} must be {allowed}, got {number}")
    return number


def _index(labels: jax.Array, classes: int, otherwise: int) -> jax.Array:
    """The labels as int32, and `otherwise` for those that are no class."""
    # A narrow dtype may not hold how many classes there are.
    wide = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    return jnp.where((wide >= 0) & (wide < classes), wide.astype(jnp.int32), otherwise)


def _differs(labels: jax.Array, ignore_index: Any, function: str = _NAME) -> jax.Array:
    try:
        if isinstance(ignore_index, bool):
            raise TypeError
        index = operator.index(ignore_index)
    except TypeError:
        what = arguments.shown(ignore_index)
        raise TypeError(f"{function}: ignore_index must be a concrete integer or None, got {what}") from None
    limits = jnp.iinfo(labels.dtype)
    if not limits.min <= index <= limits.max:
        return jnp.full(labels.shape, True)
    return labels != jnp.asarray(np.asarray(index, labels.dtype))


def _there(where: jax.Array, logits: jax.Array, at: int, classes: int, axis_name: tuple[str, ...]) -> jax.Array:
    """How many classes of each row take part, on all devices; where a mask is of rows, one at least."""
    if where.shape[at] != logits.shape[at]:
        return jnp.where(jnp.squeeze(where, at), jnp.maximum(jnp.asarray(classes, jnp.int32), 1), 0)
    count = jnp.sum(where, at, dtype=jnp.int32)
    return lax.psum(count, axis_name) if axis_name else count


def _in_order(axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes of the classes as they were given, counted from 0."""
    axes = sorted_axes(_NAME, axis, ndim)
    if not axes:
        raise ValueError(f"{_NAME}: axis must name an axis of logits, got {arguments.shown(axis)} for {ndim} dimensions")
    return axes if len(axes) == 1 or axis is None else tuple([operator.index(a) % ndim for a in axis])


def _broadcast(name: str, array: jax.Array, shape: tuple[int, ...], function: str = _NAME) -> jax.Array:
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{function}: {name} must broadcast to shape {shape}, got {array.shape}") from None


def _flat(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The array with one axis of classes: several are moved to the end and flattened, in their order."""
    if len(axes) == 1:
        return array
    moved = jnp.moveaxis(array, axes, range(-len(axes), 0))
    return moved.reshape(*moved.shape[: -len(axes)], -1)
