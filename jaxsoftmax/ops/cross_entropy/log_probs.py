"""Log-probabilities of chosen classes, and entropies: the results of cross-entropy that policies need."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.cross_entropy.across_devices import local_labels
from jaxsoftmax.ops.cross_entropy.api import ClassRows, class_axes, index_of, terms_from_classes
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.xla import capped, entry_at
from jaxsoftmax.ops.softmax.xla import saved_exponent

if TYPE_CHECKING:
    from jaxsoftmax.ops.options import LogProbOptions


def entropy(
    logits: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Computes the entropy of `softmax(scale * logits)` along `axis`, in nats.

    With `s = scale * logits`, `p = softmax(s)` and `d = sum(exp(s - max(s)))`, the entropy is `log(d) + sum(p * (max(s) -
    s))`. Neither term is negative, so that nothing cancels. A weight of 0 adds nothing to the entropy or to a derivative.

    The arithmetic is float32, or float64 if `logits` are float64. On NVIDIA Hopper GPUs a kernel reads the logits once, and
    its gradient reads and writes them once. The entropy can be differentiated with respect to `logits` and `scale`, any
    number of times, in forward and reverse mode.

    Args:
      logits: floating array of any shape.
      axis: axis or axes of the softmax; -1 by default. None stands for all axes.
      where: boolean mask, or None (the default). A mask without `axis` selects rows: the entropy of the others is 0. A mask
        with another number of axes broadcasts against `logits` and selects the entries that take part.
      scale: real scalar that multiplies `logits`, such as the inverse of a temperature, or array that broadcasts to the
        shape of `logits` without `axis`, one number for each row; None (the default) for 1. It may be traced.
      axis_name: name or names of the mesh axes over which `axis` is sharded, for calls inside a `shard_map`; None (the
        default) if `axis` is not sharded there. One all-gather exchanges three numbers of each row.
      implementation: name of the implementation that must run: "mosaic" or "xla", as "triton" computes no entropy. None (the
        default) takes the best one for the platform, shape and dtype.

    Returns:
      Array in the shape of `logits` without `axis`, float32, or float64 if `logits` are float64. A row that holds NaN or
      `+inf`, or nothing except `-inf`, gives NaN, as in `softmax`. A row in which nothing takes part gives 0.

    Raises:
      TypeError: `logits` are not floating, `where` is not boolean, `axis` is not made of integers, `scale` is not real, or
        `axis_name` is not made of strings.
      ValueError: the shape of `where` or `scale` does not fit `logits`, `axis` is empty, out of range or names an axis
        twice, `scale` is too large for the arithmetic, there are more entries along `axis` than int32 can count,
        `axis_name` is not a mesh axis of a `shard_map` around the call, or there is no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> logits = jax.random.normal(jax.random.key(0), (4, 100))
      >>> p = jax.nn.softmax(logits)
      >>> bool(jnp.allclose(jaxsoftmax.entropy(logits), -jnp.sum(p * jnp.log(p), axis=-1), atol=1e-5))
      True

      Equal logits have the largest entropy, and a single one has none:

      >>> print(jnp.exp(jaxsoftmax.entropy(jnp.array([[0.0, 0.0, 0.0, 0.0], [5.0, -jnp.inf, -jnp.inf, -jnp.inf]]))))
      [4. 1.]

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the sum in one pass.
    """
    logits, where, axes, names, params = _checked("entropy", logits, axis, where, axis_name, implementation)
    rows = tuple([size for position, size in enumerate(logits.shape) if position not in axes])
    of_classes = ClassRows.of("entropy", logits, where, scale, axes, params["dtype"])
    (_, _, result), classes, counts = terms_from_classes(
        "entropy", of_classes, jnp.zeros(rows, jnp.int32), names, params | {"return_entropy": True}
    )
    if counts is None and isinstance(classes, int) and classes == 0:
        return jnp.zeros_like(result)
    return result if counts is None else jnp.where(counts, result, 0)


@overload
def log_probs(
    logits: ArrayLike,
    ids: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    return_entropy: Literal[False] = False,
    return_lse: Literal[False] = False,
    **options: "Unpack[LogProbOptions]",
) -> jax.Array: ...


@overload
def log_probs(
    logits: ArrayLike,
    ids: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    return_entropy: bool = False,
    return_lse: bool = False,
    **options: "Unpack[LogProbOptions]",
) -> jax.Array | tuple[jax.Array, ...]: ...


def log_probs(
    logits: ArrayLike,
    ids: ArrayLike,
    axis: int | Sequence[int] | None = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    return_entropy: bool = False,
    return_lse: bool = False,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, ...]:
    """Computes the log-probabilities of chosen classes, and the entropy of each row from the same read.

    The scores `s` are the logits, or `logits_soft_cap * tanh(logits / logits_soft_cap)`, times `scale`. The result is
    `log_softmax(s)[ids]`, without an array as large as the logits.

    The arithmetic is float32, or float64 if `logits` are float64. On NVIDIA Hopper GPUs a kernel reads the logits once. The
    gradient of all results together reads and writes them once, if there is one id for each row. The results can be
    differentiated with respect to `logits` and `scale`, any number of times, in forward and reverse mode.

    Args:
      logits: floating array `[*rows, classes]`, with the classes along `axis`.
      ids: integers, the classes that were chosen: `[*rows]`, one for each row, or `[*rows, n]`, several for each row. The
        gradient for several ids takes four more passes over the logits.
      axis: axis of the classes in `logits`; -1 by default. It may name several axes, or be None for all. An id then is an
        index into `logits[axis]`, flattened in the order of `axis`.
      where: boolean mask, or None (the default). A mask with as many axes as `[*rows]` selects the rows that take part. A
        mask with another number of axes broadcasts against `logits` and selects the classes that take part.
      scale: real scalar that multiplies the scores, such as the inverse of a temperature, or array that broadcasts to
        `[*rows]`, one number for each row; None (the default) for 1. It may be traced. That of a temperature of 0 is infinite,
        and gives NaN: leave rows that were not sampled out by `where`.
      logits_soft_cap: limit of the absolute value of scores before `scale`, a concrete positive number; None (the default)
        for no cap.
      return_entropy: True to return the entropy of each row too, in nats; False by default.
      return_lse: True to return `logsumexp(s)` of each row too; False by default.
      axis_name: name or names of the mesh axes over which the classes are sharded, for calls inside a `shard_map`; None
        (the default) if the classes are not sharded there. `ids` then count the classes of all devices, and are the same on
        all devices, as the results are.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype.

    Returns:
      Log-probabilities in the shape of `ids`, float32, or float64 if `logits` are float64. With `return_entropy` or
      `return_lse` the result is a tuple: the log-probabilities, the entropies `[*rows]`, and the log-sum-exp `[*rows]`, those
      that are asked for. An id that is not the index of a class gives NaN, with the gradient of the log-sum-exp alone, and
      one that `where` hides gives `-inf`. In a row that holds `+inf` the log-probability of `+inf` is NaN, that of other
      scores `-inf`, and the entropy NaN. A row in which `where` leaves nothing gives 0 for its log-probabilities, whatever its
      ids are, and for its entropy.

    Raises:
      TypeError: `logits` are not floating, `ids` are not integers, `where` is not boolean, `axis` is not made of integers,
        `scale` is not real, `logits_soft_cap` is not a concrete real number, `return_entropy` or `return_lse` is not True or
        False, or `axis_name` is not made of strings.
      ValueError: the shape of `ids`, `where` or `scale` does not fit `logits`, `axis` is empty, out of range or names an
        axis twice, `scale` or `logits_soft_cap` is out of range, there are more classes than int32 can count, `axis_name`
        is not a mesh axis of a `shard_map` around the call, or there is no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> logits = jax.random.normal(jax.random.key(0), (2, 3, 100))
      >>> tokens = jax.random.randint(jax.random.key(1), (2, 3), 0, 100)
      >>> log_p, entropy = jaxsoftmax.log_probs(logits, tokens, scale=1 / 0.8, return_entropy=True)
      >>> expected = jnp.take_along_axis(jax.nn.log_softmax(logits / 0.8), tokens[..., None], axis=-1)[..., 0]
      >>> bool(jnp.allclose(log_p, expected, atol=1e-5))
      True

      The loss of PPO from logits, with a bonus for the entropy:

      >>> def loss(logits, old_log_p, advantages):
      ...     log_p, entropy = jaxsoftmax.log_probs(logits, tokens, return_entropy=True)
      ...     ratio = jnp.exp(log_p - old_log_p)
      ...     clipped = jnp.clip(ratio, 0.8, 1.2)
      ...     return -jnp.mean(jnp.minimum(ratio * advantages, clipped * advantages) + 0.01 * entropy)
      >>> print(jax.grad(loss)(logits, log_p, jnp.ones((2, 3))).shape)
      (2, 3, 100)

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the log-sum-exp.
    """
    name = "log_probs"
    return_entropy, return_lse = arguments.flags(name, return_entropy=return_entropy, return_lse=return_lse)
    logits, where, axes, names, params = _checked(name, logits, axis, where, axis_name, implementation)
    if logits_soft_cap is not None:
        params["soft_cap"] = arguments.soft_cap(name, logits_soft_cap, params["dtype"])
    ids = arguments.array(name, "ids", ids)
    if not jnp.issubdtype(ids.dtype, jnp.integer):
        raise TypeError(f"{name}: ids must be integers, got {ids.dtype}")
    rows = tuple([size for position, size in enumerate(logits.shape) if position not in axes])
    if ids.shape[: len(rows)] != rows or ids.ndim > len(rows) + 1:
        raise ValueError(f"{name}: ids must have the shape {rows} of rows, or that and one axis more, got {ids.shape}")
    of_classes, several = ClassRows.of(name, logits, where, scale, axes, params["dtype"]), ids.ndim > len(rows)
    params["return_entropy"] = return_entropy
    # For several ids the primitive gives the state alone: its `nll` is that of one label, and is not used.
    labels = jnp.zeros(rows, jnp.int32) if several else ids
    (nll, lse, *others), _, counts = terms_from_classes(name, of_classes, labels, names, params, return_state=several)
    candidates = ids if several else jnp.expand_dims(ids, -1)
    if several:
        m, d = (jnp.expand_dims(part, -1) for part in others[-2:])
        scores = capped(_at(of_classes.logits, candidates, of_classes.axis, names, jnp.nan).astype(m.dtype), params["soft_cap"])
        of_rows = None if of_classes.scale is None else jnp.expand_dims(jnp.squeeze(of_classes.scale, of_classes.axis), -1)
        log_p = saved_exponent(scores, m, of_rows) - jnp.log(d)
    else:
        log_p = jnp.expand_dims(-nll, -1)
    if of_classes.where is not None and where is not None and where.ndim != len(rows):
        seen = jnp.broadcast_to(of_classes.where, of_classes.logits.shape).astype(jnp.int32)
        log_p = jnp.where(_at(seen, candidates, of_classes.axis, names, 1) != 0, log_p, -jnp.inf)
    if counts is not None:
        log_p = jnp.where(jnp.expand_dims(counts, -1), log_p, 0)
        lse = jnp.where(counts, lse, -jnp.inf)
    entropies = others[:1] if return_entropy else []
    results = [log_p if several else jnp.squeeze(log_p, -1), *entropies, *([lse] if return_lse else [])]
    return results[0] if len(results) == 1 else tuple(results)


def _checked(function, logits, axis, where, axis_name, implementation):
    """Checks arguments that both functions have. Returns logits, mask, axes of the classes, mesh axes, and parameters."""
    check_implementation(CROSS_ENTROPY_FAMILY, function, implementation)
    logits = arguments.array(function, "logits", logits, "floating")
    where = None if where is None else arguments.array(function, "where", where, "boolean")
    axes, names = class_axes(function, axis, logits.ndim), arguments.axis_names(function, axis_name)
    params: dict[str, Any] = {"dtype": accumulator(logits.dtype), "soft_cap": None, "return_total": False}
    params["implementation"] = implementation
    return logits, where, axes, names, params


def _at(values, ids, axis, names, otherwise):
    """Returns the entries of rows along an axis at `ids`, `[*rows, n]`, and `otherwise` where an id is no class.

    `names` are mesh axes over which devices share the classes.
    """
    if ids.shape[-1] == 0:
        return jnp.zeros(ids.shape, values.dtype)
    size = values.shape[axis]
    cut = Cut.of_part(names, size)
    index = index_of(ids, cut.size if names else size)
    own = local_labels(index, size, {0: cut}) if names else index

    def entries(own):
        return jnp.squeeze(entry_at(values, jnp.expand_dims(own, axis), (axis,), 0), axis)

    taken = jax.vmap(entries, -1, -1)(own)
    taken = lax.psum(taken, names) if names else taken
    return jnp.where(index >= 0, taken, jnp.asarray(otherwise, taken.dtype))
