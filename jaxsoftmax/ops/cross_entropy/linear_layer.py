"""Functions of linear layers share this: checks of arguments, and losses of the rows that each device has."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax._core import arguments, sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy import linear
from jaxsoftmax.ops.cross_entropy.api import broadcast_to, countable, index_of
from jaxsoftmax.ops.cross_entropy.loss import Head
from jaxsoftmax.ops.cross_entropy.xla import NO_ROW
from jaxsoftmax.ops.softmax.api import row_scale

TEACHER = "teacher_"  # in front of the names of a second layer's operands
_OF_LAYER = ("hidden", "weight", "bias")


def linear_layer(function: str, hidden, weight, class_axis, prefix: str = "") -> tuple[jax.Array, jax.Array, int]:
    """Checks the operands of a linear layer. Returns them, and the axis of the classes: 0 or 1."""
    named = ((f"{prefix}hidden", hidden), (f"{prefix}weight", weight))
    hidden, weight = (arguments.array(function, *each, "floating") for each in named)
    if hidden.dtype.itemsize < 2:
        raise TypeError(f"{function}: {prefix}hidden must have 16 bits or more, such as bfloat16, got {hidden.dtype}")
    class_axis = arguments.integer(function, f"{prefix}class_axis", class_axis)
    if class_axis not in (-2, -1, 0, 1):
        what = arguments.shown(class_axis)
        raise ValueError(f"{function}: {prefix}class_axis must be -2, -1, 0 or 1, got {what}")
    axis = class_axis % 2
    if hidden.ndim < 1 or weight.ndim != 2 or weight.shape[1 - axis] != hidden.shape[-1]:
        shape, got = "[H, classes]" if axis else "[classes, H]", f"{weight.shape} and {hidden.shape}"
        raise ValueError(f"{function}: {prefix}weight must be {shape} for {prefix}hidden [*rows, H], got shapes {got}")
    return hidden, weight, axis


def more_operands(
    function: str, rows: tuple[int, ...], classes: int, kind, *, sample_weight, temperature, **biases
) -> dict[str, jax.Array]:
    """Checks operands that may be None, and returns the others by name; the inverse of a temperature is the `scale`."""
    operands = {
        name: broadcast_to(name, arguments.array(function, name, bias, "floating"), (classes,), function)
        for name, bias in biases.items()
        if bias is not None
    }
    if temperature is not None:
        operands["scale"] = inverse_of_temperatures(function, temperature, rows, kind)
    if sample_weight is not None:
        sample_weight = arguments.array(function, "sample_weight", sample_weight)
        if jnp.issubdtype(sample_weight.dtype, jnp.complexfloating):
            raise TypeError(f"{function}: sample_weight must be real, got {sample_weight.dtype}")
        operands["sample_weight"] = broadcast_to("sample_weight", sample_weight, rows, function).astype(kind)
    return operands


def inverse_of_temperatures(function: str, temperature, rows: tuple[int, ...], kind) -> jax.Array:
    """Returns the inverse of temperatures, `[*rows]`; NaN for those that are not larger than 0."""
    if isinstance(temperature, int | float | np.generic | np.ndarray):  # others may be traced, or are no numbers
        numbers = np.asarray(temperature)
        is_real = numbers.dtype.kind in "fiu" or numbers.dtype == jnp.bfloat16
        least = jnp.finfo(kind).tiny
        if is_real and not np.all(numbers >= least):
            what = f"{least:.3g} or more in {kind}, got {arguments.shown(temperature)}"
            raise ValueError(f"{function}: temperature must be larger than 0, {what}")
    temperature = row_scale(function, temperature, (*rows, 1), (len(rows),), kind, name="temperature")
    temperature = jnp.broadcast_to(jnp.squeeze(jnp.asarray(temperature), len(rows)), rows)
    most = 1 / float(jnp.finfo(kind).tiny)  # a larger temperature has the inverse 0, and 0 times an infinite score is NaN
    return jnp.where(temperature > 0, 1 / jnp.minimum(jnp.where(temperature > 0, temperature, 1), most), jnp.nan)


def dtype_of_logits(function: str, logits_dtype, dtype) -> str:
    """Checks the dtype of logits for hidden states of a dtype: that one, or that of the arithmetic. Returns its name."""
    allowed = [jnp.dtype(dtype).name, jnp.dtype(accumulator(dtype)).name]
    try:
        name = jnp.dtype(logits_dtype).name
    except TypeError:
        name = None
    if name not in allowed:
        what = name or arguments.shown(logits_dtype)
        raise ValueError(f"{function}: logits_dtype must be {' or '.join(dict.fromkeys(allowed))} for this hidden, got {what}")
    return name


def precision_of_products() -> str:
    """Returns the precision of the caller's context. Rules and references multiply when that context may have ended."""
    return jax.config.jax_default_matmul_precision or "default"


def reduced_losses(
    function: str,
    head: Head,
    operands: Mapping[str, jax.Array],
    reduction: str,
    flags: Sequence[bool] = (),
    keeps: Callable[[jax.Array], jax.Array] | None = None,
) -> list[jax.Array]:
    """Computes losses, reduced over the rows, and other results of rows, on the shards that devices have.

    Args:
      function: name of the public function, for errors.
      head: the loss; its `axis_name` has the mesh axes that the caller names.
      operands: those of the layers, and of rows: `labels`, `scale`, `sample_weight`, and what the head takes, each only if
        there is one.
      reduction: "mean", "sum" or "none".
      flags: for each of the other results, whether to return it.
      keeps: marks the labels of rows that count; None if all do.
    """
    labels, axes = operands.get("labels"), {}
    for prefix, axis in zip(("", TEACHER), head.class_axes, strict=False):
        of_weight = (None, "classes") if axis else ("classes", None)
        axes |= {f"{prefix}hidden": (None,), f"{prefix}weight": of_weight, f"{prefix}bias": ("classes",)}
    if labels is not None and jnp.issubdtype(labels.dtype, jnp.floating):
        axes["labels"] = ("classes",)
    classes, ndim = operands["weight"].shape[head.class_axes[0]], operands["hidden"].ndim - 1
    local = functools.partial(_local_losses, function, head, list(operands), classes, reduction, flags, keeps)
    ndims = [ndim if reduction == "none" else 0, *[ndim] * sum(flags)]
    names = [axes.get(operand, ()) for operand in operands]
    return sharding.on_shards(local, list(operands.values()), names, "classes", ndims, head.axis_name)


def _local_losses(function, head, names, classes, reduction, flags, keeps, row_axes, class_axes, *arrays) -> list[jax.Array]:
    """Computes the results of `reduced_losses`: those of this device's rows, and the sum over the rows of all devices.

    `classes` is the number of classes on all devices that `row_axes` and `class_axes` span: the mesh axes over which rows are
    sharded, and over which classes are sharded, except `head.axis_name`.
    """
    all_classes = countable(function, classes * lax.axis_size(head.axis_name))
    head = replace(head, axis_name=(*head.axis_name, *class_axes))
    operands = dict(zip(names, arrays, strict=True))
    prefixes = [prefix for prefix in ("", TEACHER) if f"{prefix}hidden" in operands]
    layers = [{name: operands.pop(prefix + name) for name in _OF_LAYER if prefix + name in operands} for prefix in prefixes]
    hidden, labels, counts = layers[0]["hidden"], operands.get("labels"), None
    is_partial = "sample_weight" in operands or keeps is not None
    ones = jnp.sum(lax.stop_gradient(hidden)[..., :0], -1, dtype=accumulator(hidden.dtype)) + 1  # sharded as the rows are
    rows, factors = ones.shape, operands.pop("sample_weight", ones)
    if labels is not None and jnp.issubdtype(labels.dtype, jnp.integer):
        operands["labels"] = index_of(labels, all_classes)
        factors = factors if keeps is None else jnp.where(keeps(labels), factors, 0)
    if is_partial:  # what rows hold that do not count must not be in gradients: 0 * NaN is NaN
        counts = factors != 0
        others = {"labels": NO_ROW if operands.get("labels", factors).dtype == jnp.int32 else 0, "scale": 1}
        operands = {name: _where(counts, each, others.get(name, 0)) for name, each in operands.items()}
        layers = [layer | {"hidden": _where(counts, layer["hidden"], 0)} for layer in layers]
    if reduction == "mean":
        total = lax.psum(jnp.sum(factors), row_axes)
        factors = factors / jnp.where(total != 0, total, 1)
    if counts is not None:
        factors = jnp.where(counts, factors, 0)  # what a row of weight 0 holds is no derivative by its weight

    def flat(array):
        return array.reshape(math.prod(rows), *array.shape[len(rows) :])

    layers = tuple([layer | {"hidden": flat(layer["hidden"])} for layer in layers])
    of_rows = {name: flat(each) for name, each in operands.items()}
    # Small gradients are 0 in float16, unless they are computed with the cotangent, which is a loss scale.
    if reduction != "none" and hidden.dtype != jnp.float16:
        loss, others = linear.weighted_sum(head, layers, of_rows, flat(factors))
    else:
        losses, *others = head.of_rows(layers, of_rows)
        losses = factors * losses.reshape(rows)
        loss = losses if reduction == "none" else jnp.sum(losses)
    others = [other.reshape(rows) for other, flag in zip(others, flags, strict=False) if flag]
    if counts is not None:
        others = [jnp.where(counts, other, 0) for other in others]
    axes_of_loss = head.axis_name if reduction == "none" else (*row_axes, *head.axis_name)
    return [lax.psum(loss, axes_of_loss), *(lax.psum(other, head.axis_name) for other in others)]


def _where(counts, array, otherwise):
    """Replaces what rows hold that do not count."""
    return jnp.where(counts.reshape(*counts.shape, *(1,) * (array.ndim - counts.ndim)), array, otherwise)
