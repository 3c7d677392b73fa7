"""The cross-entropy of a linear layer's logits, which are never all in memory."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from jaxsoftmax._core import arguments
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy.api import broadcast_to, cross_entropy, differs, loss_options
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.linear_layer import (
    dtype_of_logits,
    linear_layer,
    more_operands,
    precision_of_products,
    reduced_losses,
)
from jaxsoftmax.ops.cross_entropy.log_probs import entropy
from jaxsoftmax.ops.cross_entropy.loss import Head, LossHead
from jaxsoftmax.ops.cross_entropy.xla import capped

if TYPE_CHECKING:
    from jaxsoftmax.ops.options import LinearLossOptions

_NAME = "linear_cross_entropy"


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    return_entropy: Literal[False] = False,
    **options: "Unpack[LinearLossOptions]",
) -> jax.Array: ...


@overload
def linear_cross_entropy(
    hidden: ArrayLike,
    weight: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = False,
    return_entropy: bool = False,
    **options: "Unpack[LinearLossOptions]",
) -> jax.Array | tuple[jax.Array, ...]: ...


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
    temperature: ArrayLike | None = None,
    logits_dtype: DTypeLike | None = None,
    ignore_index: int | None = None,
    return_lse: bool = False,
    return_entropy: bool = False,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Computes the cross-entropy of `hidden @ weight + bias` without the logits of all rows in memory at once.

    The result equals `cross_entropy(hidden @ weight + bias, labels, scale=1 / temperature)`, reduced over the rows. The
    products are made for a part of the rows at a time, so the memory for logits is bounded. The function has no counterpart
    in `jax.nn` or optax. All results can be differentiated with respect to all floating arguments, any number of times, in
    forward and reverse mode.

    Args:
      hidden: floating array `[*rows, H]` of 16 bits or more, the input of the last layer.
      weight: floating array `[H, classes]`, as the kernel of a Flax dense layer, or `[classes, H]` with `class_axis=0`, as
        an embedding. It is cast to the dtype of `hidden`. Its gradient is summed over parts in the dtype of `weight`;
        float32 loses the least precision.
      labels: integers that broadcast to `[*rows]`, the class of each row; or floating, the weight of each class, which
        broadcast to `[*rows, classes]`. Those are an array as large as logits, which is written out if they broadcast, and
        copied if rows are in several parts. For the softmax of a teacher's layer see `linear_divergence`.
      bias: floating array that broadcasts to `[classes]`; None (the default) for no bias.
      sample_weight: real array that broadcasts to `[*rows]`, the weight of each row's loss; None (the default) for 1. A
        row of weight 0 may hold anything: its loss is 0 and has no derivative.
      reduction: "mean" (the default) divides the sum of the weighted losses by the sum of `sample_weight`, both without
        rows of `ignore_index`, and gives 0 if no row counts. "sum" gives the sum of the weighted losses. "none" gives the
        weighted loss of each row. Inside a `shard_map` the mean is that of the rows of one device: for the mean over all,
        divide a `psum` of sums by a `psum` of the weights.
      class_axis: axis of `weight` that has the classes; -1 by default.
      label_smoothing: share `a` of the label that is spread evenly over all classes; a concrete number from 0 (the default)
        to 1. The weights of classes are `(1 - a) * label + a / classes`, as those of `optax.smooth_labels`.
      z_loss: factor of the term `z_loss * logsumexp(s)**2` that is added to the loss of a row with scores `s`; a concrete
        number, 0 (the default) or more.
      logits_soft_cap: the scores are `logits_soft_cap * tanh(logits / logits_soft_cap)`; a concrete positive number. None
        (the default) for no cap.
      temperature: real number or array that broadcasts to `[*rows]`, larger than 0, which divides the scores; None (the
        default) for 1. It may be traced. In a JAX array a temperature that is not larger than 0 gives NaN.
      logits_dtype: dtype that logits in memory are rounded to: that of `hidden` (None, the default), or float32 for sums that
        are not rounded; float64 if `hidden` is float64. Rounding to bfloat16 changes the loss of a row by about 1e-2. Kernels
        that multiply round no logits, and neither do calls with integer labels that are not differentiated. Where no kernel
        multiplies, such a call therefore returns a loss that differs by the rounding from that of a differentiated call.
      ignore_index: label of the rows that do not count, such as padding; a concrete integer. Their loss and gradient are
        0. None (the default) ignores no label. Only for integer labels.
      return_lse: True to return `logsumexp(s)` of each row too; False by default.
      return_entropy: True to return the entropy of the softmax of each row too, in nats; False by default.
      axis_name: name or names of the mesh axes over which the classes of `weight` and `bias` are sharded, for calls inside
        a `shard_map`; None (the default) if they are not sharded there. All other arguments are the same on all devices of
        these axes, and labels count the classes of all devices.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype.

    Returns:
      A scalar for `reduction` "mean" and "sum", an array `[*rows]` for "none"; float32, or float64 if `hidden` is float64.
      With `return_lse` or `return_entropy` the result is a tuple: the loss, and then the log-sum-exp and the entropy
      `[*rows]`, those that are asked for. The log-sum-exp comes before the entropy, unlike in `linear_log_probs`. They are
      not weighted; rows that do not count have 0. A label that is not the index of a class gives NaN.

    Raises:
      TypeError: `hidden`, `weight` or `bias` is not floating, `hidden` has fewer than 16 bits, `labels` are neither integers
        nor floating, `sample_weight` or `temperature` is not real, `class_axis` or `ignore_index` is not a concrete integer,
        `label_smoothing`, `z_loss` or `logits_soft_cap` is not a concrete real number, `return_lse` or `return_entropy` is not
        True or False, or `axis_name` is not made of strings.
      ValueError: the shapes of `hidden` and `weight` do not fit each other, `labels`, `bias`, `temperature` or
        `sample_weight` does not broadcast, `class_axis` is not an axis of `weight`, `reduction` is not one of the three,
        `label_smoothing`, `z_loss` or `logits_soft_cap` is out of range, a concrete `temperature` is not larger than 0,
        `logits_dtype` is neither of the two, `ignore_index` comes with floating labels, there are more classes than int32
        can count, `axis_name` is not a mesh axis of a `shard_map` around the call, or there is no `implementation` of this
        name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> hidden = jax.random.normal(keys[0], (2, 8, 16))
      >>> weight = jax.random.normal(keys[1], (16, 100))
      >>> labels = jax.random.randint(keys[2], (2, 8), 0, 100)
      >>> def loss(hidden, weight):
      ...     return jaxsoftmax.linear_cross_entropy(hidden, weight, labels)
      >>> with jax.default_matmul_precision("highest"):
      ...     value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
      ...     expected = jnp.mean(jaxsoftmax.cross_entropy(hidden @ weight, labels))
      >>> bool(jnp.allclose(value, expected, rtol=1e-5))
      True
      >>> print([gradient.shape for gradient in gradients])
      [(2, 8, 16), (16, 100)]

      An embedding has the classes first: `linear_cross_entropy(hidden, embedding, labels, class_axis=0)`.

    Memory and work: what is in memory beside operands and results, and the matrix products of a call with the gradients of
    `hidden` and `weight`:

    | form | products | logits in memory | the weight's gradient |
    |---|---|---|---|
    | "mean" or "sum", integer or floating labels | 3 | 512 MiB | rounded for each part, in the dtype of `weight` |
    | the same, `return_lse` or `return_entropy` differentiated | 7, 6 for floating labels | 512 MiB | as above, twice |
    | "none", or any reduction of float16 `hidden`; integer labels | 4 | 384 to 768 MiB, with gradients | rounded once |
    | the same, floating labels | 4 | 512 MiB, and the labels twice more | rounded for each part |

    With `reduction` "mean" or "sum" the gradients are computed together with the losses, for a part of the rows at a time, and
    replace the logits in memory; with float32 logits they stand beside them. If rows are weighted by what is known before the
    call, `sample_weight` with "sum" takes three products where weights behind "none" take four. Frozen arrays cost no product.
    With "none" and integer labels the results are those of `linear_log_probs`: logits are sums in float32 that are not rounded,
    whatever `logits_dtype` says. With a bias the float32 sums of a part count toward its size.

    On explicit mesh axes, and in a `shard_map`, a part is taken from each device's rows. In programs for symbolic shapes all
    rows are one part.

    Under `vmap` the rows of examples that share the weight and the bias are those of one call, and take its memory. Gradients
    of a "mean" or "sum" of such examples take the products of "none", since the cotangents of the examples differ. Three kinds
    of examples have parts of their own, which are in memory at once: those with weights, those that are differentiated inside
    the `vmap`, and those that devices share, unless that is in a `shard_map` around the `vmap`.

    On NVIDIA Hopper GPUs kernels multiply for integer labels and `hidden` of 16 bits, without `label_smoothing`. On several
    devices they run inside a `shard_map` over all mesh axes, or if all mesh axes are explicit. Under `vmap` they run if the
    examples share the weight and the bias, and are not differentiated inside the `vmap`.

    - With `reduction="none"`, in float16, and without gradients no logits are in memory. The kernel needs 12 bytes for each
      row and 256 classes instead. It copies a weight of another dtype, in pieces of 256 MiB. It also copies a weight whose `H`
      is not a multiple of 64, or whose number of classes is not a multiple of 64 (8 with `class_axis=0`).
    - A differentiated "mean" or "sum" of bfloat16 stores weights of scores in place of logits, and takes the three products of
      the table. If `H` or the number of classes is not a multiple of 64, it takes the four of "none", with their memory and
      their rounding: XLA's products of such a weight are three times as slow.

    Sharded classes: each device multiplies by its part of the weight, and neither weights nor logits are gathered. One
    collective for each part merges the states of the rows, or one in all without gradients. The gradient of `hidden` is
    summed over devices once. On automatic mesh axes XLA decides, and may sum it for each part.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the log-sum-exp.
    """
    check_implementation(CROSS_ENTROPY_FAMILY, _NAME, implementation)
    arguments.check_choice(_NAME, "reduction", reduction, "mean", "sum", "none")
    flags = arguments.flags(_NAME, return_lse=return_lse, return_entropy=return_entropy)
    hidden, weight, axis = linear_layer(_NAME, hidden, weight, class_axis)
    labels = arguments.array(_NAME, "labels", labels)
    if not any(jnp.issubdtype(labels.dtype, kind) for kind in (jnp.integer, jnp.floating)):
        raise TypeError(f"{_NAME}: labels must be integers or floating, got {labels.dtype}")
    rows, kind, classes = hidden.shape[:-1], accumulator(hidden.dtype), weight.shape[axis]
    options = loss_options(_NAME, kind, label_smoothing, z_loss, logits_soft_cap)
    are_classes, keeps = not jnp.issubdtype(labels.dtype, jnp.floating), None
    if are_classes:
        labels = broadcast_to("labels", labels, rows, _NAME)
        if ignore_index is not None:
            keeps = functools.partial(differs, ignore_index=ignore_index, function=_NAME)
            keeps(jnp.zeros(0, labels.dtype))  # checks it here, not on shards
    else:
        hint = "; floating labels are weights of classes, and labels that are classes must be integers"
        labels = broadcast_to("labels", labels, (*rows, classes), _NAME, hint)
        if ignore_index is not None:
            what = arguments.shown(ignore_index)
            raise ValueError(f"{_NAME}: ignore_index must be None where labels are floating, got {what}")
    more = {"bias": bias, "sample_weight": sample_weight, "temperature": temperature}
    operands = {"hidden": hidden, "weight": weight, "labels": labels} | more_operands(_NAME, rows, classes, kind, **more)
    dtype = dtype_of_logits(_NAME, hidden.dtype if logits_dtype is None else logits_dtype, hidden.dtype)
    of_labels = LossHead if are_classes else ProbabilitiesHead
    names = arguments.axis_names(_NAME, axis_name)
    head = of_labels((axis,), dtype, options[2], implementation, precision_of_products(), names, *options[:2], flags[1])
    loss, *others = reduced_losses(_NAME, head, operands, reduction, flags, keeps)
    return (loss, *others) if others else loss


@dataclass(frozen=True)
class ProbabilitiesHead(Head):
    """The cross-entropy of labels that are weights of classes, `[rows, classes]`. Its results are those of `LossHead`."""

    label_smoothing: float = 0.0
    z_loss: float = 0.0
    return_entropy: bool = False

    def results(self, logits: Sequence[jax.Array], rows: dict[str, jax.Array]) -> list[jax.Array]:
        """Computes the results from the logits of this device's classes, and labels of them."""
        (x,) = logits
        options = {"scale": rows.get("scale"), "axis_name": self.axis_name or None, "implementation": self.implementation}
        of_loss = {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss, "logits_soft_cap": self.logits_soft_cap}
        results = cross_entropy(x, rows["labels"], return_lse=True, **of_loss, **options)
        if self.return_entropy:
            results = (*results, entropy(capped(x, self.logits_soft_cap), **options))
        return list(map(self.share, results))
