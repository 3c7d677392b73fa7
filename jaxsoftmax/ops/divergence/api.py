"""Divergences of two softmaxes: how far the distribution of one array of logits is from that of another."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.cross_entropy.api import aligned_mask, class_axes, count_classes
from jaxsoftmax.ops.divergence.across_devices import js_divergence_of_parts, kl_divergence_of_parts
from jaxsoftmax.ops.divergence.implementations import DIVERGENCE_FAMILY
from jaxsoftmax.ops.divergence.primitive import JS_DIVERGENCE, KL_DIVERGENCE
from jaxsoftmax.ops.softmax.api import row_scale


def kl_divergence(
    p_logits: ArrayLike,
    q_logits: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    p_scale: ArrayLike | None = None,
    q_scale: ArrayLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes the Kullback-Leibler divergence of two softmaxes along `axis`, in nats.

    With `p = softmax(p_scale * p_logits)` and `q = softmax(q_scale * q_logits)`, the divergence is `sum(p * log(p / q))`. An
    entry where `p` is 0 adds nothing to the divergence or to a derivative, whatever `q` is there. An entry where `q` is 0 and
    `p` is not makes the divergence infinite, and its derivatives with respect to `p_logits` NaN. `p` counts as 0 where its
    weight is below the least number of the arithmetic, relative to the largest weight of the row. A kernel, or a device, may
    ask for the largest weight of its part of the row instead, so that weights near that least number may count.

    The arithmetic is float32, or float64 if one of the two arrays is float64. On NVIDIA Hopper GPUs a kernel reads each array
    once. The gradient reads each once more, and writes one or two arrays, those that are asked for. The divergence can be
    differentiated with respect to both arrays and both scales, any number of times, in forward and reverse mode.

    The terms have both signs. So the absolute error is a few roundings of the mean absolute scores, relative to their maxima,
    also where the divergence is near 0. Rounding below 0 is cut off, and derivatives do not depend on that.

    Args:
      p_logits: floating array of any shape, the logits of the distribution by which the mean is taken: those of the teacher,
        in distillation.
      q_logits: floating array of the shape of `p_logits`, the logits of the other distribution. The dtypes may differ.
      axis: axis or axes of the softmaxes; -1 by default. None stands for all axes.
      where: boolean mask, or None (the default). A mask without `axis` selects rows: the divergence of the others is 0. A
        mask with another number of axes broadcasts against the logits and selects the entries that take part.
      p_scale: real scalar that multiplies `p_logits`, such as the inverse of a temperature, or array that broadcasts to the
        shape of `p_logits` without `axis`, one number for each row; None (the default) for 1. It may be traced.
      q_scale: the same for `q_logits`.
      axis_name: name or names of the mesh axes over which `axis` is sharded, for calls inside a `shard_map`; None (the
        default) if `axis` is not sharded there. One all-gather exchanges five numbers of each row.
      implementation: name of the implementation that must run: "mosaic" or "xla". None (the default) takes the best one for
        the platform, shape and dtype.

    Returns:
      Array in the shape of `p_logits` without `axis`, float32, or float64 if one of the two arrays is float64. A row where
      either array holds NaN or `+inf`, or nothing except `-inf`, gives NaN, as in `softmax`. A row in which nothing takes
      part gives 0. Rows whose divergence is NaN or infinite may have NaN gradients even for a cotangent of 0: a mask that is
      passed as `where` leaves rows out, a mask that multiplies the result does not.

    Raises:
      TypeError: `p_logits` or `q_logits` are not floating, `where` is not boolean, `axis` is not made of integers, a scale is
        not real, or `axis_name` is not made of strings.
      ValueError: the shapes of the arrays differ, the shape of `where` or of a scale does not fit them, `axis` is empty, out
        of range or names an axis twice, a scale is too large for the arithmetic, there are more entries along `axis` than
        int32 can count, `axis_name` is not a mesh axis of a `shard_map` around the call, or there is no `implementation` of
        this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> teacher, student = jax.random.normal(jax.random.key(0), (2, 4, 100))
      >>> log_p, log_q = jax.nn.log_softmax(teacher / 2), jax.nn.log_softmax(student / 2)
      >>> expected = jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)
      >>> divergence = jaxsoftmax.kl_divergence(teacher, student, p_scale=0.5, q_scale=0.5)
      >>> bool(jnp.allclose(divergence, expected, atol=1e-5))
      True

      Equal softmaxes have none, and a class that only `q` leaves out makes it infinite:

      >>> p, q = jnp.array([0.0, 1.0]), jnp.array([[1.0, 2.0], [0.0, -jnp.inf]])
      >>> print(jaxsoftmax.kl_divergence(jnp.stack([p, p]), q))
      [ 0. inf]

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the sums in one pass.
    """
    call = _Call.of("kl_divergence", p_logits, q_logits, axis, where, p_scale, q_scale, axis_name, implementation)
    if call.is_empty:
        return call.zeros()
    if call.axis_name:
        results = kl_divergence_of_parts(call.axis_name, call.params, *call.operands.values())
    else:
        results = bind(KL_DIVERGENCE, call.operands, return_state=False, **call.params)
    return jnp.squeeze(results[0], call.axes)


def js_divergence(
    p_logits: ArrayLike,
    q_logits: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    weight: float = 0.5,
    p_scale: ArrayLike | None = None,
    q_scale: ArrayLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes the Jensen-Shannon divergence of two softmaxes along `axis`, in nats.

    With `p` and `q` as in `kl_divergence` and the mixture `m = weight * p + (1 - weight) * q`, the divergence is `weight *
    KL(p, m) + (1 - weight) * KL(q, m)`. It is at most the entropy of the weights: log(2) for equal ones. An entry where `p` or
    `q` is 0 adds a finite number, so that the divergence is never infinite.

    The arithmetic is float32, or float64 if one of the two arrays is float64. On NVIDIA Hopper GPUs a kernel reads each array
    once, if a cluster of blocks holds both rows: up to 131,072 entries, or 409,600 if both arrays have 16 bits. For longer rows
    kernels compute the log-sum-exps, and another one reads both arrays again. The gradient reads each array once more, and
    writes one or two arrays, those that are asked for. The divergence can be differentiated with respect to both arrays and
    both scales, any number of times, in forward and reverse mode.

    The roundings of scores cancel, so that the absolute error is a few roundings of 1, and less on the reference where the
    divergence is near 0. Equal softmaxes from equal logits have exactly 0. Rounding below 0 is cut off, and derivatives do not
    depend on that.

    Args:
      p_logits: floating array of any shape, the logits of one distribution.
      q_logits: floating array of the shape of `p_logits`, the logits of the other distribution. The dtypes may differ.
      axis: axis or axes of the softmaxes; -1 by default. None stands for all axes.
      where: boolean mask, or None (the default). A mask without `axis` selects rows: the divergence of the others is 0. A
        mask with another number of axes broadcasts against the logits and selects the entries that take part.
      weight: share of `p` in the mixture, a concrete number from 0 to 1; 0.5 by default. With 0 and 1 the divergence is 0.
        Under `jit` each weight is a program of its own.
      p_scale: real scalar that multiplies `p_logits`, such as the inverse of a temperature, or array that broadcasts to the
        shape of `p_logits` without `axis`, one number for each row; None (the default) for 1. It may be traced.
      q_scale: the same for `q_logits`.
      axis_name: name or names of the mesh axes over which `axis` is sharded, for calls inside a `shard_map`; None (the
        default) if `axis` is not sharded there. Two all-gathers and one sum exchange two numbers of each row. Each array is
        then read twice forward.
      implementation: name of the implementation that must run: "mosaic" or "xla". None (the default) takes the best one for
        the platform, shape and dtype.

    Returns:
      Array in the shape of `p_logits` without `axis`, float32, or float64 if one of the two arrays is float64. A row where
      either array holds NaN or `+inf`, or nothing except `-inf`, gives NaN, as in `softmax`, and NaN gradients. A row in
      which nothing takes part gives 0.

    Raises:
      TypeError: `p_logits` or `q_logits` are not floating, `where` is not boolean, `axis` is not made of integers, `weight` is
        not a concrete real number, a scale is not real, or `axis_name` is not made of strings.
      ValueError: the shapes of the arrays differ, the shape of `where` or of a scale does not fit them, `axis` is empty, out
        of range or names an axis twice, `weight` is not from 0 to 1, a scale is too large for the arithmetic, there are more
        entries along `axis` than int32 can count, `axis_name` is not a mesh axis of a `shard_map` around the call, or there is
        no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> x, y = jax.random.normal(jax.random.key(0), (2, 4, 100))
      >>> p, q = jax.nn.softmax(x), jax.nn.softmax(y)
      >>> m = (p + q) / 2
      >>> expected = jnp.sum(p * jnp.log(p / m) + q * jnp.log(q / m), axis=-1) / 2
      >>> bool(jnp.allclose(jaxsoftmax.js_divergence(x, y), expected, atol=1e-5))
      True

      Softmaxes that share no class are as far apart as they can be:

      >>> x, y = jnp.array([0.0, 0.0, -jnp.inf]), jnp.array([-jnp.inf, -jnp.inf, 0.0])
      >>> print(jnp.exp(jaxsoftmax.js_divergence(x, y)))
      2.0

    Source: Lin 1991, Divergence measures based on the Shannon entropy.
    """
    name = "js_divergence"
    weight = arguments.number(name, "weight", weight)
    if not 0 <= weight <= 1:
        raise ValueError(f"{name}: weight must be from 0 to 1, got {weight}")
    call = _Call.of(name, p_logits, q_logits, axis, where, p_scale, q_scale, axis_name, implementation)
    if call.is_empty:
        return call.zeros()
    is_mixture = 0 < weight < 1
    weight = weight if is_mixture else 0.5
    params = call.params | {"weight": weight}
    if call.axis_name:
        divergence, *_ = js_divergence_of_parts(call.axis_name, params, *call.operands.values())
    else:
        (divergence,) = bind(JS_DIVERGENCE, call.operands, return_state=False, **params)
    divergence = divergence if is_mixture else 0 * divergence  # NaN stays NaN
    return jnp.squeeze(divergence, call.axes)


@dataclass(frozen=True)
class _Call:
    """The checked arguments of a divergence. Masks, scales and what counts have as many axes as the logits."""

    x: jax.Array
    y: jax.Array
    where: jax.Array | None
    scale: Any  # of `x`, size 1 along the axes; None for 1
    y_scale: Any
    axes: tuple[int, ...]
    axis_name: tuple[str, ...]  # mesh axes over which devices share the rows inside of a `shard_map`
    params: dict[str, Any]  # of primitives
    is_empty: bool  # True if rows have no entries
    counts: jax.Array | None  # True for rows in which something takes part; None if all are

    @classmethod
    def of(cls, name, p_logits, q_logits, axis, where, p_scale, q_scale, axis_name, implementation) -> "_Call":
        check_implementation(DIVERGENCE_FAMILY, name, implementation)
        x, y = (arguments.array(name, *each, "floating") for each in (("p_logits", p_logits), ("q_logits", q_logits)))
        if x.shape != y.shape:
            raise ValueError(f"{name}: p_logits and q_logits must have the same shape, got {x.shape} and {y.shape}")
        axes, names = tuple(sorted(class_axes(name, axis, x.ndim))), arguments.axis_names(name, axis_name)
        kind, pairs = accumulator(x.dtype, y.dtype), (("p_scale", p_scale), ("q_scale", q_scale))
        scale, y_scale = (None if own is None else row_scale(name, own, x.shape, axes, kind, of) for of, own in pairs)
        if where is not None:
            where = aligned_mask(name, arguments.array(name, "where", where, "boolean"), x.shape, axes)
        classes, _ = count_classes(name, where, x.shape, axes, names)
        is_empty = isinstance(classes, int) and classes == 0
        counts = None if where is None else jnp.expand_dims(classes != 0, axes)
        params = {"axes": axes, "dtype": kind, "implementation": implementation}
        return cls(x, y, where, scale, y_scale, axes, names, params, is_empty, counts)

    def zeros(self) -> jax.Array:
        """Returns the divergence of rows without entries."""
        return jnp.zeros([size for axis, size in enumerate(self.x.shape) if axis not in self.axes], self.params["dtype"])

    @property
    def operands(self) -> dict[str, Any]:
        """The operands of the primitives, in their order."""
        names = ("x", "y", "where", "scale", "y_scale", "counts")
        return {name: getattr(self, name) for name in names}
