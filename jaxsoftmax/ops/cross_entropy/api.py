"""Cross-entropy, with the arguments and values of optax's functions of labels that are classes, or probabilities."""

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
from jaxsoftmax._core.primitive import bind, reverse_only
from jaxsoftmax.ops.cross_entropy import _devices, _linear, _shards
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.cross_entropy.xla import NO_CLASS, NO_ROW, capped
from jaxsoftmax.ops.softmax._devices import logsumexp_of_parts
from jaxsoftmax.ops.softmax.api import sorted_axes
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP
from jaxsoftmax.ops.softmax.xla import select

_NAME = "cross_entropy"


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    *,
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
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    *,
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
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    *,
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
      labels: `[*rows]`, integers: the class of each row. Rows of `logits` broadcast along axes of size 1. Or, floating, how
        likely each class is: they broadcast against `logits`, and `logits` against them; what is 0 adds nothing, where the
        logit is `-inf` too. Or, boolean or integers in the shape of `logits`, one-hot.
      axis: that of the classes in `logits`, or several: a label counts in `logits[axis]`, flattened in the order of `axis`.
      where: boolean: the rows that take part, where it has as many axes as there are of rows, as in optax; else, broadcast
        against `logits`, the classes that do.
      label_smoothing: the share, from 0 to 1, of the labels that is spread evenly over the classes that take part.
      z_loss: a number from 0 on; `z_loss * logsumexp(s)**2` is added.
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
        `ignore_index` comes with labels that are no classes, or there is no such `implementation`.
      NotImplementedError: `implementation` cannot run this call; with the reason.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the log-sum-exp.
    """
    dispatch.check_implementation(_NAME, _NAME, implementation)
    (return_lse,) = arguments.flags(_NAME, return_lse=return_lse)
    logits = arguments.array(_NAME, "logits", logits, "floating")
    labels = arguments.array(_NAME, "labels", labels)
    where = None if where is None else arguments.array(_NAME, "where", where, "boolean")
    kind = accumulator(logits.dtype)
    smoothing, z_loss, soft_cap = _options(_NAME, kind, label_smoothing, z_loss, logits_soft_cap)
    axes, axis_name = _in_order(axis, logits.ndim), arguments.axis_names(_NAME, axis_name)
    params = {"dtype": kind, "soft_cap": soft_cap, "return_total": smoothing > 0, "implementation": implementation}
    if _are_classes(labels, logits.shape, axes):
        found, there, counts = _of_classes(logits, labels, where, axes, axis_name, ignore_index, return_lse, params)
    else:
        if ignore_index is not None:
            what = arguments.shown(ignore_index)
            raise ValueError(f"{_NAME}: ignore_index must be None where labels are floating or one-hot, got {what}")
        found, there = _of_probabilities(logits, labels, where, axes, axis_name, **params)
        counts = None if where is None else there != 0
    # Rows that do not count are taken out before anything is computed from their log-sum-exp, which may be infinite.
    parts = found if counts is None else [jnp.where(counts, part, 0) for part in found]
    loss = _loss(*parts, smoothing=smoothing, z_loss=z_loss, classes=jnp.maximum(jnp.asarray(there, kind), 1))
    return (loss, found[1]) if return_lse else loss


def _are_classes(labels: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Tells labels that are the classes of rows from those that are weights of classes, for logits of this shape."""
    if jnp.issubdtype(labels.dtype, jnp.floating):
        return False
    is_integer = jnp.issubdtype(labels.dtype, jnp.integer)
    if not is_integer and labels.dtype != np.bool_:
        raise TypeError(f"{_NAME}: labels must be integers, boolean or floating, got {labels.dtype}")
    if is_integer and labels.ndim < len(shape):
        return True
    if labels.shape != shape:
        rows = tuple([size for axis, size in enumerate(shape) if axis not in axes])
        allowed = f"classes of shape {rows}, or one-hot" if is_integer else "one-hot"
        raise ValueError(f"{_NAME}: {labels.dtype} labels must be {allowed} in the shape {shape} of logits, got {labels.shape}")
    return False


def _of_classes(logits, labels, where, axes, axis_name, ignore_index, return_lse, params):
    """Binds the primitive for integer labels; counts the classes that take part in each row, and says which rows count."""
    logits = _of_as_many_rows(logits, labels, axes, params["dtype"])
    rows = tuple([size for axis, size in enumerate(logits.shape) if axis not in axes])
    labels = _broadcast("labels", labels, rows)
    if where is not None:
        where = _mask(where, logits.shape, axes)
        where = _flat(jnp.broadcast_to(where, logits.shape) if len(axes) > 1 else where, axes)
    logits, at = _flat(logits, axes), axes[0] if len(axes) == 1 else len(rows)
    there, classes = _there(where, logits.shape, (at,), axis_name)
    counts = None if where is None else there != 0
    if ignore_index is not None:
        is_label = _differs(labels, ignore_index)
        counts = is_label if counts is None else counts & is_label
    index = _index(labels, classes)
    if counts is not None:  # the log-sum-exp that is returned is that of a row with any label
        index = jnp.where(counts, index, 0 if return_lse else NO_ROW)
    operands, params = {"x": logits, "labels": jnp.expand_dims(index, at), "where": where}, {"axes": (at,), **params}
    if axis_name:
        found = _shards.cross_entropy(axis_name, params, *operands.values())[:-2]
    else:
        found = bind(CROSS_ENTROPY, operands, return_state=False, **params)
    return [jnp.squeeze(part, at) for part in found], there, counts


def _of_as_many_rows(logits, labels, axes, dtype):
    """Broadcasts axes of size 1 of the rows of logits to the sizes that labels have there, as optax does.

    Logits that are broadcast have the dtype of the arithmetic, in which their gradient adds up.
    """
    others = [axis for axis in range(logits.ndim) if axis not in axes]
    rows = tuple([logits.shape[axis] for axis in others])
    try:
        sizes = dict(zip(others, lax.broadcast_shapes(rows, labels.shape), strict=True))
    except ValueError:
        raise ValueError(f"{_NAME}: labels must broadcast with rows of shape {rows}, got {labels.shape}") from None
    shape = tuple([sizes.get(axis, size) for axis, size in enumerate(logits.shape)])
    return logits if shape == logits.shape else jnp.broadcast_to(logits.astype(dtype), shape)


def _of_probabilities(logits, labels, where, axes, axis_name, *, dtype, soft_cap, return_total, implementation):
    """Binds the primitive for labels that are weights of classes; counts the classes that take part in each row."""
    ndim = max(logits.ndim, labels.ndim)
    axes = tuple(sorted(axis - logits.ndim + ndim for axis in axes))
    logits, labels = (lax.expand_dims(array, range(ndim - array.ndim)) for array in (logits, labels.astype(dtype)))
    try:
        shape = lax.broadcast_shapes(logits.shape, labels.shape)
    except ValueError:
        what = f"got shapes {labels.shape} and {logits.shape}"
        raise ValueError(f"{_NAME}: floating labels must broadcast with logits, {what}") from None
    if where is not None:
        where = _mask(where, shape, axes)
        logits = jnp.broadcast_to(logits, lax.broadcast_shapes(logits.shape, where.shape))
    logits = logits.astype(dtype)  # once: cotangents of narrow logits would be rounded before they are added up
    scores = capped(select(where, logits, 0), soft_cap)
    params = {"axes": axes, "dtype": dtype, "implementation": implementation}
    lse = _log_sum_exp(axis_name, params, logits if soft_cap is None else scores, where)
    labels, nll = select(where, labels, 0), lse - scores
    counts = (labels != 0) | jnp.isfinite(nll)  # 0 * inf would be NaN
    sums = [jnp.sum(labels * jnp.where(counts, nll, 0), axes)]
    if return_total:
        sums.append(jnp.sum(select(where, scores, 0), axes))
    nll, *total = lax.psum(sums, axis_name) if axis_name else sums
    there, _ = _there(where, logits.shape, axes, axis_name)
    found = [nll, lax.squeeze(lse, axes), *total]
    *found, there = (jnp.broadcast_to(part, nll.shape) for part in (*found, there))
    return found, there


def _log_sum_exp(axis_name, params, x, where):
    """The log-sum-exp of rows in the dtype of the arithmetic, the axes kept, over all devices that share the classes."""
    if axis_name:
        return logsumexp_of_parts(axis_name, params, x, where)
    return bind(LOGSUMEXP, {"x": x, "where": where}, return_state=False, **params)[0]


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
    sample_weight: ArrayLike | None = None,
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
      sample_weight: `[*rows]`, real: how much each row counts. One of 0 may hold anything; its loss is 0 and has no derivative.
      reduction: "mean" for the sum of the losses times `sample_weight` over the sum of `sample_weight`, both without rows of
        `ignore_index`, and 0 where nothing counts; "sum"; or "none" for `[*rows]` losses times `sample_weight`.
      class_axis: the axis of `weight` that has the classes.
      label_smoothing: as for `cross_entropy`, and so are those that follow.
      z_loss: a number from 0 on.
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
    class_axis = arguments.integer(name, "class_axis", class_axis)
    if class_axis not in (-2, -1, 0, 1):
        raise ValueError(f"{name}: class_axis must be -2, -1, 0 or 1, got {arguments.shown(class_axis)}")
    axis = class_axis % 2
    if hidden.ndim < 1 or weight.ndim != 2 or weight.shape[1 - axis] != hidden.shape[-1]:
        shape = "[H, classes]" if axis else "[classes, H]"
        raise ValueError(f"{name}: weight must be {shape} for hidden [*rows, H], got shapes {weight.shape} and {hidden.shape}")
    if not isinstance(reduction, str) or reduction not in ("mean", "sum", "none"):
        raise ValueError(f"{name}: reduction must be 'mean', 'sum' or 'none', got {arguments.shown(reduction)}")
    rows, kind, classes = hidden.shape[:-1], accumulator(hidden.dtype), weight.shape[axis]
    options = _options(name, kind, label_smoothing, z_loss, logits_soft_cap)
    labels = _broadcast("labels", labels, rows, name)
    given = {"hidden": hidden, "weight": weight, "labels": labels}
    if bias is not None:
        given["bias"] = _broadcast("bias", arguments.array(name, "bias", bias, "floating"), (classes,), name)
    if sample_weight is not None:
        sample_weight = arguments.array(name, "sample_weight", sample_weight)
        if jnp.issubdtype(sample_weight.dtype, jnp.complexfloating):
            raise TypeError(f"{name}: sample_weight must be real, got {sample_weight.dtype}")
        given["sample_weight"] = _broadcast("sample_weight", sample_weight, rows, name).astype(kind)
    axis_name = arguments.axis_names(name, axis_name)

    def loss(of_rows, of_classes, *operands):
        """The losses of this device's rows, or their sum over the devices that share the rows."""
        shared = (*axis_name, *of_classes)
        head = _Head(axis, *options, implementation, shared)
        all_classes = _countable(name, classes * lax.axis_size(axis_name))
        here = dict(zip(given, operands, strict=True))
        hidden, weight, labels, bias = here["hidden"], here["weight"], here["labels"], here.get("bias")
        factors = here.get("sample_weight", jnp.ones_like(labels, kind))
        index = _index(labels, all_classes)
        if ignore_index is not None:
            factors = jnp.where(_differs(labels, ignore_index, name), factors, 0)
        if ignore_index is not None or sample_weight is not None:
            index = jnp.where(factors != 0, index, NO_ROW)
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
    operands = [operand if operand is labels else reverse_only(_linear.REVERSE_ONLY, operand) for operand in given.values()]
    return sharding.on_shards(loss, operands, names, "classes", len(rows) if reduction == "none" else 0)


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
        """The labels as this device counts its classes: `classes` is their number."""
        return _devices.own(labels, classes, self._over(classes)[1]) if self.axis_name else labels

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
            numbers = _devices.joined(numbers, labels, numbers[0].dtype, self._over(classes))
        return self.loss(numbers, classes)

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
        return self.loss([jnp.squeeze(part, 1) for part in found], classes), gradient

    def loss(self, found: Sequence[jax.Array], classes: int) -> jax.Array:
        """The losses, from what the primitive gives of rows; 0 on all devices except the first."""
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


def _options(function, kind, label_smoothing, z_loss, logits_soft_cap) -> tuple[float, float, float | None]:
    """Options of a loss as concrete numbers, for arithmetic of this dtype."""
    smoothing, factor = (
        arguments.number(function, name, value) for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss))
    )
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{function}: label_smoothing must be from 0 to 1, got {smoothing}")
    if not 0 <= factor <= float(jnp.finfo(kind).max):
        raise ValueError(f"{function}: z_loss must be 0 or more and finite in {jnp.finfo(kind).dtype}, got {factor}")
    return smoothing, factor, None if logits_soft_cap is None else arguments.soft_cap(function, logits_soft_cap, kind)


def _index(labels: jax.Array, classes: int) -> jax.Array:
    """The labels as int32, `NO_CLASS` for those that are no class."""
    # A narrow dtype may not hold how many classes there are.
    wide = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    return jnp.where((wide >= 0) & (wide < classes), wide.astype(jnp.int32), NO_CLASS)


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


def _countable(function: str, classes: Any) -> Any:
    """Returns the number of classes on all devices, unless int32 does not hold it."""
    most = np.iinfo(np.int32).max
    if isinstance(classes, int) and classes > most:
        raise ValueError(f"{function}: there must be at most {most} classes, got {classes}")
    return classes


def _there(where, shape, axes, axis_name) -> tuple[Any, Any]:
    """Counts the classes that take part in each row of logits of this shape, and all of them, over all devices.

    Where a mask is of rows, the first is at least one.
    """
    here = math.prod([shape[axis] for axis in axes])
    classes = _countable(_NAME, here * lax.axis_size(axis_name))
    if where is None:
        return classes, classes
    is_of_rows = all(where.shape[axis] == 1 for axis in axes)
    if is_of_rows and (not isinstance(here, int) or here != 1):  # a device may have one class
        return jnp.where(lax.squeeze(where, axes), jnp.maximum(jnp.asarray(classes, jnp.int32), 1), 0), classes
    whole = [size if axis in axes else where.shape[axis] for axis, size in enumerate(shape)]
    count = jnp.sum(jnp.broadcast_to(where, whole), axes, dtype=jnp.int32)
    return lax.psum(count, axis_name) if axis_name else count, classes


def _mask(where: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """A mask of rows, or else of classes, with as many axes as this shape, with which it broadcasts."""
    rows = tuple([size for axis, size in enumerate(shape) if axis not in axes])
    if where.ndim == len(rows):
        of_classes = (1,) * len(axes) + where.shape
        return lax.expand_dims(_broadcast("where", where, rows, hint=f"; a mask of classes is {of_classes}"), sorted(axes))
    _broadcast("where", where, shape)
    return lax.expand_dims(where, range(len(shape) - where.ndim))


def _in_order(axis: Any, ndim: int) -> tuple[int, ...]:
    """The axes of the classes as they were given, counted from 0."""
    axes = sorted_axes(_NAME, axis, ndim)
    if not axes:
        raise ValueError(f"{_NAME}: axis must name an axis of logits, got {arguments.shown(axis)} for {ndim} dimensions")
    return axes if len(axes) == 1 or axis is None else tuple([operator.index(a) % ndim for a in axis])


def _broadcast(name: str, array: jax.Array, shape: tuple[int, ...], function: str = _NAME, hint: str = "") -> jax.Array:
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{function}: {name} must broadcast to shape {shape}, got {array.shape}{hint}") from None


def _flat(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """The array with one axis of classes: several are moved to the end and flattened, in their order."""
    if len(axes) == 1:
        return array
    moved = jnp.moveaxis(array, axes, range(-len(axes), 0))
    return moved.reshape(*moved.shape[: -len(axes)], -1)
