"""Divergences of two linear layers' softmaxes, as losses of distillation, without the logits of either layer in memory."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxsoftmax._core import arguments
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy.linear_layer import (
    TEACHER,
    dtype_of_logits,
    linear_layer,
    more_operands,
    precision_of_products,
    reduced_losses,
)
from jaxsoftmax.ops.cross_entropy.loss import Head
from jaxsoftmax.ops.cross_entropy.xla import capped
from jaxsoftmax.ops.divergence.api import js_divergence, kl_divergence
from jaxsoftmax.ops.divergence.implementations import DIVERGENCE_FAMILY
from jaxsoftmax.ops.softmax.api import logsumexp

_NAME = "linear_divergence"
_KINDS = ("forward_kl", "reverse_kl", "js", "tv")


def linear_divergence(
    hidden: ArrayLike,
    weight: ArrayLike,
    teacher_hidden: ArrayLike,
    teacher_weight: ArrayLike,
    *,
    kind: Literal["forward_kl", "reverse_kl", "js", "tv"] = "forward_kl",
    js_weight: float = 0.5,
    bias: ArrayLike | None = None,
    teacher_bias: ArrayLike | None = None,
    sample_weight: ArrayLike | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    class_axis: int = -1,
    teacher_class_axis: int | None = None,
    logits_soft_cap: float | None = None,
    temperature: ArrayLike | None = None,
    logits_dtype: DTypeLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes a divergence of a teacher's softmax and a student's, without the logits of all rows in memory at once.

    The teacher is `p = softmax(teacher_hidden @ teacher_weight / temperature)`, and the student is `q = softmax(hidden @ weight
    / temperature)`, over the same classes. The hidden sizes may differ. The divergence of a row, in nats, is

        "forward_kl"   sum(p * log(p / q)), the loss of distillation
        "reverse_kl"   sum(q * log(q / p))
        "js"           js_weight * KL(p, m) + (1 - js_weight) * KL(q, m), with m = js_weight * p + (1 - js_weight) * q
        "tv"           sum(abs(p - q)) / 2, the total variation

    The function has no counterpart in `jax.nn` or optax. It can be differentiated with respect to all floating arguments, any
    number of times, in forward and reverse mode. Only the products of gradients that are asked for are made: for a loss that
    is differentiated by `hidden` and `weight` alone, the teacher is a constant, and costs one product.

    Args:
      hidden: floating array `[*rows, H]` of 16 bits or more, the input of the student's last layer.
      weight: floating array `[H, classes]`, as the kernel of a Flax dense layer, or `[classes, H]` with `class_axis=0`, as an
        embedding. It is cast to the dtype of `hidden`. Its gradient is summed over parts in the dtype of `weight`.
      teacher_hidden: floating array `[*rows, H of the teacher]`, in the dtype of `hidden`.
      teacher_weight: the teacher's weight, with as many classes.
      kind: the divergence, one of the four; "forward_kl" by default.
      js_weight: share of the teacher in the mixture of "js", a concrete number from 0 to 1; 0.5 by default. With 0 and 1 the
        divergence is 0: take the two of Kullback and Leibler, which are its limits over the share.
      bias: floating array that broadcasts to `[classes]`; None (the default) for no bias.
      teacher_bias: the same for the teacher.
      sample_weight: real array that broadcasts to `[*rows]`, the weight of each row; None (the default) for 1. A row of weight
        0, such as padding, may hold anything: it has no influence on values or derivatives.
      reduction: "mean" (the default) divides the sum of the weighted divergences by the sum of `sample_weight`, and gives 0 if
        no row counts. "sum" gives the sum, and "none" the weighted divergence of each row.
      class_axis: axis of `weight` that has the classes; -1 by default.
      teacher_class_axis: axis of `teacher_weight` that has the classes; None (the default) for `class_axis`.
      logits_soft_cap: the scores of both are `logits_soft_cap * tanh(logits / logits_soft_cap)` over the temperature; a
        concrete positive number. None (the default) for no cap.
      temperature: real number or array that broadcasts to `[*rows]`, larger than 0; None (the default) for 1. It may be
        traced. The divergence is not multiplied by its square, as some losses of distillation are.
      logits_dtype: dtype that logits are rounded to: float32 (None, the default) for sums that are not rounded, or the dtype
        of `hidden`, which takes half the memory and time for logits. float64 if `hidden` is float64.
      axis_name: name or names of the mesh axes over which the classes of both weights and biases are sharded, for calls inside
        a `shard_map`; None (the default) if they are not sharded there. All other arguments are the same on all devices of
        these axes.
      implementation: name of the implementation that must run: "mosaic" or "xla". None (the default) takes the best one for
        the platform, shape and dtype.

    Returns:
      A scalar for `reduction` "mean" and "sum", an array `[*rows]` for "none"; float32, or float64 if `hidden` is float64.

    Raises:
      TypeError: `hidden`, `weight`, `bias` or one of the teacher's is not floating, `hidden` has fewer than 16 bits,
        `sample_weight` or `temperature` is not real, an axis of classes is not a concrete integer, `js_weight` or
        `logits_soft_cap` is not a concrete real number, or `axis_name` is not made of strings.
      ValueError: the shapes do not fit each other, the two hidden states differ in their dtype, `bias`, `temperature` or
        `sample_weight` does not broadcast, `kind` or `reduction` is none of those above, `js_weight` or `logits_soft_cap` is
        out of range, a concrete `temperature` is not larger than 0, `logits_dtype` is neither of the two, there are more
        classes than int32 can count, `axis_name` is not a mesh axis of a `shard_map` around the call, or there is no
        `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> keys = jax.random.split(jax.random.key(0), 4)
      >>> hidden, teacher_hidden = jax.random.normal(keys[0], (8, 16)), jax.random.normal(keys[1], (8, 32))
      >>> weight, teacher_weight = jax.random.normal(keys[2], (16, 100)), jax.random.normal(keys[3], (32, 100))
      >>> def loss(hidden, weight):
      ...     return jaxsoftmax.linear_divergence(hidden, weight, teacher_hidden, teacher_weight, temperature=2.0)
      >>> with jax.default_matmul_precision("highest"):
      ...     value, gradients = jax.value_and_grad(loss, argnums=(0, 1))(hidden, weight)
      ...     log_p = jax.nn.log_softmax(teacher_hidden @ teacher_weight / 2)
      ...     log_q = jax.nn.log_softmax(hidden @ weight / 2)
      >>> bool(jnp.allclose(value, jnp.mean(jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)), rtol=1e-4))
      True
      >>> print([gradient.shape for gradient in gradients])
      [(8, 16), (16, 100)]

    Memory and work: the logits of a part of both layers take 1 GiB, for a "mean" or "sum" together with their gradients. With
    `reduction` "mean" or "sum" the gradients are computed together with the divergences, part by part: four products for those
    of the student. With "none", and in float16, the backward pass computes both logits once more. That makes six products, in
    the same memory. Weights in `sample_weight` therefore cost less than weights behind "none". Under `vmap` examples that
    share both layers take the memory of one call, and the products of "none", also for a "mean" or "sum".

    On NVIDIA Hopper GPUs the kernels of `kl_divergence` and `js_divergence` read the logits of a part; total variation has a
    kernel for the two log-sum-exps alone.

    Sharded classes: each device multiplies by its parts of both weights, and neither weights nor logits are gathered.

    Source: Hinton, Vinyals and Dean 2015, arXiv:1503.02531; Agarwal et al. 2024, arXiv:2306.13649, for the other divergences.
    """
    check_implementation(DIVERGENCE_FAMILY, _NAME, implementation)
    arguments.check_choice(_NAME, "kind", kind, *_KINDS)
    arguments.check_choice(_NAME, "reduction", reduction, "mean", "sum", "none")
    js_weight = arguments.number(_NAME, "js_weight", js_weight)
    if not 0 <= js_weight <= 1:
        raise ValueError(f"{_NAME}: js_weight must be from 0 to 1, got {js_weight}")
    hidden, weight, axis = linear_layer(_NAME, hidden, weight, class_axis)
    teacher_class_axis = class_axis if teacher_class_axis is None else teacher_class_axis
    teacher_hidden, teacher_weight, its_axis = linear_layer(_NAME, teacher_hidden, teacher_weight, teacher_class_axis, TEACHER)
    rows, kind_of_sums, classes = hidden.shape[:-1], accumulator(hidden.dtype), weight.shape[axis]
    if teacher_hidden.shape[:-1] != rows or teacher_hidden.dtype != hidden.dtype:
        got = f"{teacher_hidden.dtype}{list(teacher_hidden.shape)} and {hidden.dtype}{list(hidden.shape)}"
        raise ValueError(f"{_NAME}: teacher_hidden must have the rows and the dtype of hidden, got {got}")
    if teacher_weight.shape[its_axis] != classes:
        raise ValueError(f"{_NAME}: teacher_weight must have {classes} classes, got {teacher_weight.shape[its_axis]}")
    soft_cap = None if logits_soft_cap is None else arguments.soft_cap(_NAME, logits_soft_cap, kind_of_sums)
    operands = {"hidden": hidden, "weight": weight, "teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    more = {"bias": bias, "teacher_bias": teacher_bias, "sample_weight": sample_weight, "temperature": temperature}
    operands |= more_operands(_NAME, rows, classes, kind_of_sums, **more)
    dtype = dtype_of_logits(_NAME, kind_of_sums if logits_dtype is None else logits_dtype, hidden.dtype)
    names = arguments.axis_names(_NAME, axis_name)
    head = DivergenceHead((axis, its_axis), dtype, soft_cap, implementation, precision_of_products(), names, kind, js_weight)
    return reduced_losses(_NAME, head, operands, reduction)[0]


@dataclass(frozen=True)
class DivergenceHead(Head):
    """The divergence of a student, the first layer, and a teacher, the second one. The only results are the divergences."""

    kind: str = "forward_kl"
    js_weight: float = 0.5

    def results(self, logits: Sequence[jax.Array], rows: dict[str, jax.Array]) -> list[jax.Array]:
        """Computes the divergences from the logits of this device's classes."""
        student, teacher = (capped(x, self.logits_soft_cap) for x in logits)
        scale = rows.get("scale")
        options = {"axis_name": self.axis_name or None, "implementation": self.implementation}
        scales = {"p_scale": scale, "q_scale": scale}
        if self.kind == "forward_kl":
            divergence = kl_divergence(teacher, student, **scales, **options)
        elif self.kind == "reverse_kl":
            divergence = kl_divergence(student, teacher, **scales, **options)
        elif self.kind == "js":
            divergence = js_divergence(teacher, student, weight=self.js_weight, **scales, **options)
        else:
            p, q = (_softmax(x, scale, **options) for x in (teacher, student))
            total = jnp.sum(jnp.abs(p - q), -1) / 2
            divergence = lax.psum(total, self.axis_name) if self.axis_name else total
        return [self.share(divergence)]


def _softmax(x, scale, **options) -> jax.Array:
    """Computes a softmax that the arithmetic does not round to the dtype of the logits."""
    x = x.astype(accumulator(x.dtype))
    lse = logsumexp(x, -1, scale=scale, keepdims=True, **options)
    if scale is not None:  # what a bias of -inf excludes has no derivative by the scale: 0 * inf is NaN
        excluded = x == -jnp.inf
        x = jnp.where(excluded, x, jnp.where(excluded, 0, x) * scale[:, None])
    return jnp.exp(x - lse)
