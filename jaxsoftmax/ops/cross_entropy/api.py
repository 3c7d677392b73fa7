"""Cross-entropy losses, with the arguments and values of optax: of logits, or of a linear layer's inputs and weight."""

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.cross_entropy import across_devices
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.loss import combined
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY
from jaxsoftmax.ops.cross_entropy.xla import NO_CLASS, NO_ROW, capped
from jaxsoftmax.ops.softmax.across_devices import logsumexp_of_parts
from jaxsoftmax.ops.softmax.api import row_scale, sorted_axes
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP
from jaxsoftmax.ops.softmax.xla import scores as scaled_scores
from jaxsoftmax.ops.softmax.xla import select

if TYPE_CHECKING:
    from jaxsoftmax.ops.options import LossOptions

_NAME = "cross_entropy"


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: "Unpack[LossOptions]",
) -> jax.Array: ...


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    axis: int | Sequence[int] = -1,
    where: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: "Unpack[LossOptions]",
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
    scale: ArrayLike | None = None,
    ignore_index: int | None = None,
    return_lse: bool = False,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes the cross-entropy loss of each row of `logits`.

    The scores `s` are the logits, or `logits_soft_cap * tanh(logits / logits_soft_cap)`, times `scale`. The loss of a row is
    `nll = logsumexp(s) - s[label]`, or `sum(label * (logsumexp(s) - s))` for labels that are probabilities. Two options
    change it, with `lse = logsumexp(s)`:

        (1 - label_smoothing) * nll + label_smoothing * (lse - mean(s)) + z_loss * lse**2

    The function replaces `optax.softmax_cross_entropy_with_integer_labels`, and `optax.softmax_cross_entropy` for labels
    that are probabilities. In addition it takes label smoothing, a z-loss, a soft cap and labels to ignore.

    The arithmetic is float32, or float64 if `logits` are float64. The gradient has the dtype of `logits`. On NVIDIA Hopper
    GPUs the forward pass reads the logits once, and the backward pass reads and writes them once. The loss can be
    differentiated any number of times, in forward and reverse mode.

    Args:
      logits: floating array `[*rows, classes]`, with the classes along `axis`.
      labels: one of three kinds of labels.

        - Integers `[*rows]`: the class of each row. Rows of `logits` broadcast along axes of size 1.
        - Floating: the probability of each class. Labels broadcast against `logits`, and `logits` against labels. A
          probability of 0 adds nothing to the loss, even if the logit is `-inf`.
        - Boolean or integers in the shape of `logits`: one-hot labels.
      axis: axis of the classes in `logits`; -1 by default. It may name several axes, or be None for all. A label then is
        an index into `logits[axis]`, flattened in the order of `axis`.
      where: boolean mask, or None (the default). A mask with as many axes as `[*rows]` selects the rows that take part, as
        in optax. A mask with another number of axes broadcasts against `logits` and selects the classes that take part.
      label_smoothing: share of the label's probability that is spread evenly over the classes that take part; a concrete
        number from 0 (the default) to 1.
      z_loss: factor of the term `z_loss * logsumexp(s)**2` that is added to the loss; a concrete number, 0 (the default)
        or more.
      logits_soft_cap: limit of the absolute value of scores, a concrete positive number; None (the default) for no cap.
      scale: real scalar that multiplies the scores, such as the inverse of a temperature, or array that broadcasts to
        `[*rows]`, one number for each row; None (the default) for 1. It may be traced, and has a derivative.
      ignore_index: label of the rows that do not count, such as padding; a concrete integer. Their loss and gradient are
        0, whatever their logits hold. None (the default) ignores no label. Only for integer labels `[*rows]`.
      return_lse: True to return `logsumexp(s)` too; False by default.
      axis_name: name or names of the mesh axes over which the classes are sharded, for calls inside a `shard_map`; None
        (the default) if the classes are not sharded there. The loss is then vocabulary-parallel, as described below.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype.

    Returns:
      Losses `[*rows]`, float32, or float64 if `logits` are float64. With `return_lse` the result is a pair: the losses,
      and the log-sum-exp of each row in the same shape and dtype. A label that is not the index of a class, such as a
      negative one, gives NaN. A row in which nothing takes part has loss 0.

    Raises:
      TypeError: `logits` are not floating, `labels` are not integers, boolean or floating, `where` is not boolean, `axis`
        is not made of integers, `label_smoothing`, `z_loss` or `logits_soft_cap` is not a concrete real number, `scale` is
        not real, `ignore_index` is not a concrete integer, `return_lse` is not True or False, or `axis_name` is not made
        of strings.
      ValueError: the shape of `labels`, `where` or `scale` does not fit `logits`, `axis` is empty, out of range or names
        an axis twice, `label_smoothing`, `z_loss` or `logits_soft_cap` is out of range, `ignore_index` comes with labels
        that are probabilities or one-hot, there are more classes than int32 can count, `axis_name` is not a mesh axis of a
        `shard_map` around the call, or there is no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> import optax
      >>> logits = jax.random.normal(jax.random.key(0), (4, 100))
      >>> labels = jnp.array([3, 14, 15, 92])
      >>> losses = jaxsoftmax.cross_entropy(logits, labels)
      >>> expected = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
      >>> bool(jnp.allclose(losses, expected, atol=1e-5))
      True

      Padding has the label -100 here. Its loss and its gradient are 0:

      >>> def loss(logits):
      ...     labels = jnp.array([3, 14, -100, -100])
      ...     losses = jaxsoftmax.cross_entropy(logits, labels, ignore_index=-100, z_loss=1e-4)
      ...     return jnp.sum(losses) / 2
      >>> gradient = jax.grad(loss)(logits)
      >>> print(gradient.shape, jnp.any(gradient != 0, axis=-1))
      (4, 100) [ True  True False False]

    With `axis_name`, each device passes `classes / devices` of the classes in `logits`, and in every array that has the
    shape of `logits`. Mesh axes come in the order in which they shard the classes. If `axis` names several axes, the first
    of them is sharded. Integer labels count the classes of all devices. Labels and losses are the same on all devices. One
    all-gather exchanges the states of the rows. If `where` masks classes, an all-reduce counts the classes that take part.
    In a `shard_map` with `check_vma=False`, a derivative that is taken inside the map is the derivative of the sum over
    devices, as for `lax.psum`.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the log-sum-exp.
    """
    check_implementation(CROSS_ENTROPY_FAMILY, _NAME, implementation)
    (return_lse,) = arguments.flags(_NAME, return_lse=return_lse)
    logits = arguments.array(_NAME, "logits", logits, "floating")
    labels = arguments.array(_NAME, "labels", labels)
    where = None if where is None else arguments.array(_NAME, "where", where, "boolean")
    kind = accumulator(logits.dtype)
    smoothing, z_loss, soft_cap = loss_options(_NAME, kind, label_smoothing, z_loss, logits_soft_cap)
    axes, axis_name = class_axes(_NAME, axis, logits.ndim), arguments.axis_names(_NAME, axis_name)
    params = {"dtype": kind, "soft_cap": soft_cap, "return_total": smoothing > 0, "implementation": implementation}
    if _are_classes(labels, logits.shape, axes):
        logits = _with_rows_of(labels, logits, axes, kind)
        labels = broadcast_to("labels", labels, tuple([n for place, n in enumerate(logits.shape) if place not in axes]))
        rows = ClassRows.of(_NAME, logits, where, scale, axes, kind)
        options = {"ignore_index": ignore_index, "counts_all": return_lse}
        terms, classes, counts = terms_from_classes(_NAME, rows, labels, axis_name, params, **options)
    else:
        if ignore_index is not None:
            what = arguments.shown(ignore_index)
            raise ValueError(f"{_NAME}: ignore_index must be None where labels are floating or one-hot, got {what}")
        terms, classes = _terms_from_probabilities(logits, labels, where, scale, axes, axis_name, params)
        counts = None if where is None else classes != 0
    # Rows that do not count become 0 before anything is computed from their log-sum-exp, which may be infinite.
    counted = terms if counts is None else [jnp.where(counts, term, 0) for term in terms]
    classes = jnp.maximum(jnp.asarray(classes, kind), 1)
    loss = combined(*counted, label_smoothing=smoothing, z_loss=z_loss, classes=classes)
    return (loss, terms[1]) if return_lse else loss


def _are_classes(labels: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Returns True for labels that are the classes of rows, False for weights of classes, for logits of this shape."""
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


@dataclass(frozen=True)
class ClassRows:
    """Rows of logits with the classes along one axis: what the primitive takes."""

    logits: jax.Array
    where: jax.Array | None  # with as many axes as the logits
    scale: Any  # with as many axes, and size 1 along the classes; None for 1
    axis: int  # of the classes

    @classmethod
    def of(cls, function: str, logits, where, scale, axes: tuple[int, ...], dtype) -> "ClassRows":
        """Returns rows of `[*rows, classes]`, a mask of rows or of classes, and a scale that broadcasts to `[*rows]`."""
        axis = axes[0] if len(axes) == 1 else logits.ndim - len(axes)
        if where is not None:
            where = aligned_mask(function, where, logits.shape, axes)
            where = flattened(jnp.broadcast_to(where, logits.shape) if len(axes) > 1 else where, axes)
        if scale is not None:
            of_rows = row_scale(function, scale, logits.shape, tuple(sorted(axes)), dtype)
            scale = of_rows if len(axes) == 1 else flattened(jnp.asarray(of_rows), axes)
        return cls(flattened(logits, axes), where, scale, axis)


def terms_from_classes(
    function, rows: ClassRows, labels, axis_name, params, *, ignore_index=None, counts_all=False, return_state=False
):
    """Computes the terms of rows for labels that are classes, by the primitive.

    Args:
      function: name of the public function, for errors.
      rows: logits, mask and scale.
      labels: integers `[*rows]`.
      axis_name: mesh axes over which devices share the classes inside of a `shard_map`.
      params: parameters of the primitive except `axes` and `return_state`.
      ignore_index: label of rows that do not count, or None.
      counts_all: True to compute the terms of rows that do not count too, for any label.
      return_state: True to return the state of rows too.

    Returns:
      The terms (`nll`, `lse`, and what `params` ask for; with `return_state` the state last), the number of classes that take
      part in each row, and True for each row that counts; None if all rows do.
    """
    axis = rows.axis
    classes, all_classes = count_classes(function, rows.where, rows.logits.shape, (axis,), axis_name)
    counts = None if rows.where is None else classes != 0
    if ignore_index is not None:
        is_label = differs(labels, ignore_index)
        counts = is_label if counts is None else counts & is_label
    index = index_of(labels, all_classes)
    if counts is not None:  # with any label of the row, the primitive computes the log-sum-exp that is returned
        index = jnp.where(counts, index, 0 if counts_all else NO_ROW)
    operands = {"x": rows.logits, "labels": jnp.expand_dims(index, axis), "where": rows.where, "scale": rows.scale}
    params = {"axes": (axis,), **params}
    if axis_name:
        terms = across_devices.cross_entropy_of_parts(axis_name, params, *operands.values())
        terms = terms if return_state else terms[:-2]
    else:
        terms = bind(CROSS_ENTROPY, operands, return_state=return_state, **params)
    return [jnp.squeeze(term, axis) for term in terms], classes, counts


def _with_rows_of(labels, logits, axes, dtype):
    """Broadcasts axes of size 1 of the rows of logits to the sizes that labels have there, as optax does.

    Logits that are broadcast get the dtype of the arithmetic, in which their gradient accumulates.
    """
    others = [axis for axis in range(logits.ndim) if axis not in axes]
    rows = tuple([logits.shape[axis] for axis in others])
    try:
        sizes = dict(zip(others, lax.broadcast_shapes(rows, labels.shape), strict=True))
    except ValueError:
        raise ValueError(f"{_NAME}: labels must broadcast with rows of shape {rows}, got {labels.shape}") from None
    shape = tuple([sizes.get(axis, size) for axis, size in enumerate(logits.shape)])
    return logits if shape == logits.shape else jnp.broadcast_to(logits.astype(dtype), shape)


def _terms_from_probabilities(logits, labels, where, scale, axes, axis_name, params):
    """Computes the terms of the losses for labels that are weights of classes, and the number of classes that take part.

    The terms are those of `terms_from_classes`.
    """
    dtype, soft_cap = params["dtype"], params["soft_cap"]
    ndim = max(logits.ndim, labels.ndim)
    axes = tuple(sorted(axis - logits.ndim + ndim for axis in axes))
    logits, labels = (lax.expand_dims(array, range(ndim - array.ndim)) for array in (logits, labels.astype(dtype)))
    try:
        shape = lax.broadcast_shapes(logits.shape, labels.shape)
    except ValueError:
        what = f"got shapes {labels.shape} and {logits.shape}"
        raise ValueError(f"{_NAME}: floating labels must broadcast with logits, {what}") from None
    if where is not None:
        where = aligned_mask(_NAME, where, shape, axes)
        logits = jnp.broadcast_to(logits, lax.broadcast_shapes(logits.shape, where.shape))
    logits = logits.astype(dtype)  # once: cotangents of narrow logits would be rounded before they are added up
    bent = capped(select(where, logits, 0), soft_cap)
    scale = None if scale is None else row_scale(_NAME, scale, shape, axes, dtype)
    scores = bent if scale is None else scaled_scores(bent, scale)
    x = logits if soft_cap is None else bent
    lse_params = {"axes": axes, "dtype": dtype, "implementation": params["implementation"]}
    if axis_name:
        lse = logsumexp_of_parts(axis_name, lse_params, x, where, scale)
    else:
        (lse,) = bind(LOGSUMEXP, {"x": x, "where": where, "scale": scale}, return_state=False, **lse_params)
    labels, nll = select(where, labels, 0), lse - scores
    counts = (labels != 0) | jnp.isfinite(nll)  # 0 * inf would be NaN
    sums = [jnp.sum(labels * jnp.where(counts, nll, 0), axes)]
    if params["return_total"]:
        sums.append(jnp.sum(select(where, scores, 0), axes))
    nll, *total = lax.psum(sums, axis_name) if axis_name else sums
    classes, _ = count_classes(_NAME, where, logits.shape, axes, axis_name)
    terms = [nll, lax.squeeze(lse, axes), *total]
    *terms, classes = (jnp.broadcast_to(term, nll.shape) for term in (*terms, classes))
    return terms, classes


def loss_options(function, kind, label_smoothing, z_loss, logits_soft_cap) -> tuple[float, float, float | None]:
    """Returns options of a loss as concrete numbers, checked for arithmetic of this dtype."""
    smoothing, factor = (
        arguments.number(function, name, value) for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss))
    )
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{function}: label_smoothing must be from 0 to 1, got {smoothing}")
    if not 0 <= factor <= float(jnp.finfo(kind).max):
        raise ValueError(f"{function}: z_loss must be 0 or more and finite in {jnp.finfo(kind).dtype}, got {factor}")
    return smoothing, factor, None if logits_soft_cap is None else arguments.soft_cap(function, logits_soft_cap, kind)


def index_of(labels: jax.Array, classes: int) -> jax.Array:
    """Returns the labels as int32, `NO_CLASS` for those that are no class."""
    # A narrow dtype may not hold the number of classes.
    wide = labels.astype(jnp.int32) if labels.dtype.itemsize < 4 else labels
    return jnp.where((wide >= 0) & (wide < classes), wide.astype(jnp.int32), NO_CLASS)


def differs(labels: jax.Array, ignore_index: Any, function: str = _NAME) -> jax.Array:
    """Returns `labels != ignore_index`, also if the dtype of the labels does not hold `ignore_index`."""
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


def countable(function: str, classes: Any) -> Any:
    """Returns the number of classes on all devices. Raises ValueError if int32 does not hold it."""
    most = np.iinfo(np.int32).max
    if isinstance(classes, int) and classes > most:
        raise ValueError(f"{function}: there must be at most {most} classes, got {classes}")
    return classes


def count_classes(function, where, shape, axes, axis_name) -> tuple[Any, Any]:
    """Counts the classes that take part in each row of logits of this shape, and all classes, over all devices.

    With a mask of rows the first number is 0, or at least 1.
    """
    n_local = math.prod([shape[axis] for axis in axes])
    classes = countable(function, n_local * lax.axis_size(axis_name))
    if where is None:
        return classes, classes
    is_of_rows = all(where.shape[axis] == 1 for axis in axes)
    if is_of_rows and (not isinstance(n_local, int) or n_local != 1):  # a device may have one class
        return jnp.where(lax.squeeze(where, axes), jnp.maximum(jnp.asarray(classes, jnp.int32), 1), 0), classes
    whole = [size if axis in axes else where.shape[axis] for axis, size in enumerate(shape)]
    count = jnp.sum(jnp.broadcast_to(where, whole), axes, dtype=jnp.int32)
    return lax.psum(count, axis_name) if axis_name else count, classes


def aligned_mask(function: str, where: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """Returns a mask of rows, or else of classes, with as many axes as `shape`; it broadcasts to that shape."""
    rows = tuple([size for axis, size in enumerate(shape) if axis not in axes])
    if where.ndim == len(rows):
        mask_of_classes = (1,) * len(axes) + where.shape
        hint = f"; a mask of classes is {mask_of_classes}"
        return lax.expand_dims(broadcast_to("where", where, rows, function, hint), sorted(axes))
    broadcast_to("where", where, shape, function)
    return lax.expand_dims(where, range(len(shape) - where.ndim))


def class_axes(function: str, axis: Any, ndim: int) -> tuple[int, ...]:
    """Returns the axes of the classes in the order of `axis`, counted from 0."""
    axes = sorted_axes(function, axis, ndim)
    if not axes:
        raise ValueError(f"{function}: axis must name an axis of logits, got {arguments.shown(axis)} for {ndim} dimensions")
    return axes if len(axes) == 1 or axis is None else tuple([operator.index(a) % ndim for a in axis])


def broadcast_to(name: str, array: jax.Array, shape: tuple[int, ...], function: str = _NAME, hint: str = "") -> jax.Array:
    try:
        return jnp.broadcast_to(array, shape)
    except ValueError:
        raise ValueError(f"{function}: {name} must broadcast to shape {shape}, got {array.shape}{hint}") from None


def flattened(array: jax.Array, axes: tuple[int, ...]) -> jax.Array:
    """Returns the array with one axis of classes: several axes move to the end and are flattened, in their order."""
    if len(axes) == 1:
        return array
    moved = jnp.moveaxis(array, axes, range(-len(axes), 0))
    return moved.reshape(*moved.shape[: -len(axes)], math.prod(moved.shape[-len(axes) :]))
