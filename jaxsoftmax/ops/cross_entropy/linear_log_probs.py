"""Log-probabilities and entropies of a linear layer, whose logits are never all in memory."""

import functools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments, sharding
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy.api import broadcast_to, countable, index_of
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.linear_layer import linear_layer, more_operands, precision_of_products
from jaxsoftmax.ops.cross_entropy.linear_results import results_of_rows
from jaxsoftmax.ops.cross_entropy.loss import LogProbHead
from jaxsoftmax.ops.cross_entropy.xla import NO_ROW
from jaxsoftmax.ops.softmax.across_devices import alike_on_all

if TYPE_CHECKING:
    from jaxsoftmax.ops.options import LinearLogProbOptions

_NAME = "linear_log_probs"


@overload
def linear_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    tokens: ArrayLike,
    *,
    return_entropy: Literal[False] = False,
    return_lse: Literal[False] = False,
    **options: "Unpack[LinearLogProbOptions]",
) -> jax.Array: ...


@overload
def linear_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    tokens: ArrayLike,
    *,
    return_entropy: bool = False,
    return_lse: bool = False,
    **options: "Unpack[LinearLogProbOptions]",
) -> jax.Array | tuple[jax.Array, ...]: ...


def linear_log_probs(
    hidden: ArrayLike,
    weight: ArrayLike,
    tokens: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    class_axis: int = -1,
    logits_soft_cap: float | None = None,
    where: ArrayLike | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Computes log-probabilities of tokens from `hidden @ weight + bias`, without the logits of all rows in memory at once.

    With `x = hidden @ weight + bias`, the scores are `s = x / temperature`, or `logits_soft_cap * tanh(x / logits_soft_cap) /
    temperature`. The result is `log_softmax(s)[tokens]`, and what trainers of policies need beside it: the entropy and the
    log-sum-exp. Logits are sums in float32 that are not rounded, or in float64.

    The results can be differentiated with respect to `hidden`, `weight`, `bias` and `temperature`, any number of times, in
    forward and reverse mode. One backward pass serves the cotangents of all results.

    Args:
      hidden: floating array `[*rows, H]` of 16 bits or more, the input of the last layer.
      weight: floating array `[H, classes]`, as the kernel of a Flax dense layer, or `[classes, H]` with `class_axis=0`, as
        an embedding. It has the dtype of `hidden`, or a wider one, and is cast to that of `hidden`.
      tokens: integers, the classes that were chosen: `[*rows]`, one for each row, or `[*rows, n]`, several for each row.
      bias: floating array that broadcasts to `[classes]`; None (the default) for no bias.
      temperature: real number or array that broadcasts to `[*rows]`, larger than 0; None (the default) for 1. It may be
        traced. In a JAX array a temperature that is not larger than 0 gives NaN, and makes gradients of `weight` NaN: leave
        rows that `categorical` did not draw out by `where`.
      class_axis: axis of `weight` that has the classes; -1 by default.
      logits_soft_cap: limit of the absolute value of scores before the temperature, a concrete positive number; None (the
        default) for no cap.
      where: boolean mask that broadcasts to `[*rows]`, True for rows that take part; None (the default) for all. What the
        others hold, such as padding, has no influence on values or derivatives.
      return_entropy: True to return the entropy of each row too, in nats; False by default.
      return_lse: True to return `logsumexp(s)` of each row too; False by default.
      axis_name: name or names of the mesh axes over which the classes of `weight` and `bias` are sharded, for calls inside
        a `shard_map`; None (the default) if they are not sharded there. All other arguments are the same on all devices of
        these axes, and tokens count the classes of all devices.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype.

    Returns:
      Log-probabilities in the shape of `tokens`, float32, or float64 if `hidden` is float64. With `return_entropy` or
      `return_lse` the result is a tuple: the log-probabilities, the entropies `[*rows]`, and the log-sum-exp `[*rows]`, those
      that are asked for. A token that is not the index of a class gives NaN, with the gradient of the log-sum-exp alone. A row
      that does not take part gives 0, and `-inf` for its log-sum-exp.

    Raises:
      TypeError: `hidden`, `weight` or `bias` is not floating, `hidden` has fewer than 16 bits, `tokens` are not integers,
        `temperature` is not real, `where` is not boolean, `class_axis` is not a concrete integer, `logits_soft_cap` is not a
        concrete real number, `return_entropy` or `return_lse` is not True or False, or `axis_name` is not made of strings.
      ValueError: the shapes of `hidden`, `weight` and `tokens` do not fit each other, `weight` is narrower than `hidden`,
        `bias`, `temperature` or `where` does not broadcast, a concrete `temperature` is not larger than 0, `class_axis` is not
        an axis of `weight`, `logits_soft_cap` is out of range, there are more classes than int32 can count, `axis_name` is not
        a mesh axis of a `shard_map` around the call, or there is no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> hidden = jax.random.normal(keys[0], (2, 8, 16))
      >>> weight = jax.random.normal(keys[1], (16, 100))
      >>> tokens = jax.random.randint(keys[2], (2, 8), 0, 100)
      >>> with jax.default_matmul_precision("highest"):
      ...     log_p, entropy = jaxsoftmax.linear_log_probs(hidden, weight, tokens, temperature=0.8, return_entropy=True)
      ...     expected = jaxsoftmax.log_probs(hidden @ weight, tokens, scale=1 / 0.8)
      >>> bool(jnp.allclose(log_p, expected, rtol=1e-4, atol=1e-4))
      True

      The loss of a policy gradient, whose advantages are known:

      >>> def loss(hidden, weight, old_log_p, advantages):
      ...     log_p, entropy = jaxsoftmax.linear_log_probs(hidden, weight, tokens, temperature=0.8, return_entropy=True)
      ...     return -jnp.mean(jnp.exp(log_p - old_log_p) * advantages + 0.01 * entropy)
      >>> gradients = jax.grad(loss, argnums=(0, 1))(hidden, weight, log_p, jnp.ones((2, 8)))
      >>> print([gradient.shape for gradient in gradients])
      [(2, 8, 16), (16, 100)]

    Memory and work: the results take one matrix product, for a part of the rows at a time, and their gradients three more,
    for a block of the classes at a time. The logits of a part take 256 MiB, and those of a block and their gradient up to
    768 MiB. The gradient of `hidden` is summed in float32 over blocks, in 4 bytes for each entry, and that of `weight` is
    one product for each block, which is rounded once. On automatic mesh axes of several devices gradients are computed for
    a part of the rows at a time, and that of `weight` is summed over parts in its dtype. Gradients compute the logits again,
    which may be rounded otherwise: where scores are beyond 10^4, gradients are less precise than those of whole logits.
    Under `vmap` examples that share the weight are rows of one call. For several tokens in a row the logits of all of them
    come from the same product.

    On NVIDIA Hopper GPUs a kernel computes the results without logits in memory, if `hidden` has 16 bits and each row has
    one token. Another one computes the gradient of logits. If there are several blocks, `H` and the number of classes are
    multiples of 64, and there are up to 49152 rows, kernels multiply this gradient, too, and copy no block of a `weight` in
    16 bits. Otherwise, or if their tiles are too few for the GPU, XLA multiplies it. Without such kernels others read the
    float32 logits of a part or block.

    Sharded classes: each device multiplies by its part of the weight, and neither weights nor logits are gathered. One
    collective merges the states of the rows.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the log-sum-exp.
    """
    check_implementation(CROSS_ENTROPY_FAMILY, _NAME, implementation)
    flags = arguments.flags(_NAME, return_entropy=return_entropy, return_lse=return_lse)
    hidden, weight, axis = linear_layer(_NAME, hidden, weight, class_axis)
    tokens = arguments.array(_NAME, "tokens", tokens, "integers")
    if weight.dtype != hidden.dtype and weight.dtype.itemsize <= hidden.dtype.itemsize:
        raise ValueError(f"{_NAME}: weight must have the dtype of hidden, {hidden.dtype}, or a wider one, got {weight.dtype}")
    rows, kind, classes = hidden.shape[:-1], accumulator(hidden.dtype), weight.shape[axis]
    if tokens.shape[: len(rows)] != rows or tokens.ndim > len(rows) + 1:
        raise ValueError(f"{_NAME}: tokens must have the shape {rows} of rows, or that and one axis more, got {tokens.shape}")
    cap = None if logits_soft_cap is None else arguments.soft_cap(_NAME, logits_soft_cap, kind)
    operands = {"hidden": hidden, "weight": weight, "labels": tokens}
    names: dict[str, tuple[str | None, ...]] = {
        "hidden": (None,),
        "weight": (None, "classes") if axis else ("classes", None),
        "labels": (None,) * (tokens.ndim - len(rows)),
        "bias": ("classes",),
    }
    operands |= more_operands(_NAME, rows, classes, kind, bias=bias, temperature=temperature, sample_weight=None)
    if where is not None:
        operands["where"] = broadcast_to("where", arguments.array(_NAME, "where", where, "boolean"), rows, _NAME)
    head = LogProbHead(axis, cap, implementation, precision_of_products())
    mesh_axes = arguments.axis_names(_NAME, axis_name)
    function = functools.partial(_stacked, list(operands), head, mesh_axes, classes, flags)
    shape = [names.get(name, ()) for name in operands]
    results = sharding.on_shards(function, list(operands.values()), shape, "classes", len(rows), mesh_axes)
    n = math.prod(tokens.shape[len(rows) :])
    log_p = results[..., :n] if tokens.ndim > len(rows) else results[..., 0]
    others = [results[..., at] for at in range(-sum(flags), 0)]
    return (log_p, *others) if others else log_p


def _stacked(names, head, axis_name, classes, flags, row_axes, class_axes, *arrays) -> jax.Array:
    """Computes log-probabilities, and the entropy and the log-sum-exp if `flags` ask for them: `[*rows, n and more]`.

    Args:
      names: names of the arrays.
      head: the log-probabilities behind the layer.
      axis_name: the mesh axes that the caller names.
      classes: number of classes on all devices that `class_axes` span.
      flags: whether to return the entropy, and the log-sum-exp.
      row_axes: mesh axes over which rows are sharded.
      class_axes: mesh axes over which classes are sharded, except `axis_name`.
      *arrays: the parts of the operands that this device has.
    """
    del row_axes
    all_classes = countable(_NAME, classes * lax.axis_size(axis_name))
    operands = dict(zip(names, arrays, strict=True))
    hidden, labels, counts = operands["hidden"], operands["labels"], operands.pop("where", None)
    rows = hidden.shape[:-1]
    labels = index_of(labels if labels.ndim > len(rows) else labels[..., None], all_classes)
    if labels.shape[-1] == 0:  # the state needs no label, and the primitive one
        labels = jnp.zeros((*rows, 1), jnp.int32)
    if counts is not None:
        labels = jnp.where(counts[..., None], labels, NO_ROW)
        operands["hidden"] = jnp.where(counts[..., None], hidden, 0)  # 0 * NaN would be in the gradient of the weight
        if "scale" in operands:
            operands["scale"] = jnp.where(counts, operands["scale"], 1)
    operands["labels"] = labels
    of_rows = ("hidden", "labels", "scale")
    flat = {
        name: each.reshape(math.prod(rows), *each.shape[len(rows) :]) if name in of_rows else each
        for name, each in operands.items()
    }
    return_entropy, return_lse = flags
    asked = ("return_entropy",) if return_entropy else ()
    log_p, lse, *others = results_of_rows(head, (*axis_name, *class_axes), asked, flat)
    results = [log_p, *([others[0][:, None]] if return_entropy else []), *([lse[:, None]] if return_lse else [])]
    if counts is not None:  # here, not in `results_of_rows`: a cotangent of NaN there would be in the gradient of the weight
        constants = [0.0] * (1 + return_entropy) + [-jnp.inf] * return_lse
        results = [jnp.where(counts.reshape(-1, 1), *pair) for pair in zip(results, constants, strict=True)]
    stacked = alike_on_all((*axis_name, *class_axes), jnp.concatenate(results, 1))
    return stacked.reshape(*rows, stacked.shape[1])
