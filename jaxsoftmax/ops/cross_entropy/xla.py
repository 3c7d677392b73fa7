"""The reference: cross-entropy and its derivatives in plain `jax.numpy`, on every platform.

`primitive.py` describes the operands, the parameters and the results.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.implementation import ReferencePlan
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.cross_entropy import linear_gradient, linear_terms
from jaxsoftmax.ops.softmax.xla import (
    lse_of,
    saved_exponent,
    select,
    state_of,
    sum_along,
    sum_of_exponents,
    weights_of_state,
)
from jaxsoftmax.ops.softmax.xla import scores_tangent as scaled_tangent

NO_CLASS, NO_ROW = -1, -2  # the label of a row whose label is none of its classes, and of a row that does not count


def cross_entropy(
    x, labels, where, scale=None, *, axes, dtype, soft_cap, return_total=False, return_entropy=False, return_state=False
):
    """Computes `nll`, `lse`, and what the parameters ask for: the sum of the scores, the entropy, and the state `(m, d)`."""
    acc = accumulator(x.dtype, dtype)
    bent = x if soft_cap is None else capped(x.astype(acc), soft_cap)
    m, d = state_of(bent, where, scale, axes, acc)
    sums = [chosen_score(x, labels, axes, soft_cap, acc)]
    if return_total:
        sums.append(_times(sum_along(select(where, bent.astype(acc), 0), axes), scale))
    if return_entropy:
        sums.append(sum_of_exponents(bent, m, where, scale, axes))
    options = {"dtype": dtype, "return_entropy": return_entropy, "return_state": return_state}
    return results_of(labels, m, d, *sums, scale=scale, **options)


def cross_entropy_jvp(
    x, m, d, t, labels, where, scale, *, axes, dtype, soft_cap, return_total=False, return_entropy=False, of_scores=False
):
    """Computes `sum(p * u)`, `u[label]`, and what the parameters ask for: the sum of `u`, and `sum(p * z * u)`.

    Here `u = t * ds/dx`, or `t` itself if it is `of_scores`, and `z = s - max s`.
    """
    counts = labels != NO_ROW
    x, m, d = _of_counting(counts, x, m, d, labels, where, axes)
    u = select(jnp.zeros_like(x, bool) | counts, t.astype(m.dtype), 0)
    if not of_scores:
        u = _times(u * slope(x, soft_cap), scale)
    bent = capped(x, soft_cap)
    p = weights_of_state(bent, m, d, where, scale)
    weighted = p * select(p != 0, u, 0)
    sums = [sum_along(weighted, axes), entry_at(u, labels, axes, 0)]
    if return_total:
        sums.append(sum_along(select(where, u, 0), axes))
    if return_entropy:
        sums.append(sum_along(weighted * online.bounded(saved_exponent(bent, m, scale)), axes))
    return [total.astype(dtype) for total in sums]


def cross_entropy_vjp(x, m, d, a, b, c, e, labels, where, scale, *, axes, dtype, soft_cap, of_scores=False, replaces=False):
    """Computes `(a * p + b * onehot(label) + c + e * p * z) * ds/dx`, with `z = s - max s`; with `of_scores` without `ds/dx`.

    A row where all four numbers are 0 may hold anything. A number that is None counts as 0.
    """
    del replaces  # XLA sees by itself whether the gradient can take the memory of `x`
    acc = m.dtype
    x = x.astype(acc)  # once: cotangents of narrow logits would be rounded before they are added up
    counts = labels != NO_ROW
    counts &= functools.reduce(jnp.logical_or, [part != 0 for part in (a, b, c, e) if part is not None])
    a, b, c, e = (None if part is None else part.astype(acc) for part in (a, b, c, e))

    def gradient_at(x, where, b=None):
        """Computes the gradient at some entries of rows: at all of them, or with `b` at the labels.

        A label's entry counts even if `where` masks it.
        """
        total = jnp.zeros_like(x, acc) if b is None else jnp.zeros_like(x, acc) + b
        if a is not None or e is not None:
            total += _weighted(a, e, counts, x, m, d, where, scale, soft_cap)
        if c is not None:
            total += select(where, jnp.zeros_like(x, acc) + c, 0)
        if soft_cap is not None and not of_scores:
            seen = counts if where is None or b is not None else counts & where
            bare = select(jnp.zeros_like(x, bool) | seen, x, 0)
            total = select(total != 0, total * slope(bare, soft_cap), 0)
        return (total if of_scores else _times(total, scale)).astype(dtype)

    gradient = gradient_at(x, where)
    if b is None:
        return gradient
    if soft_cap is None and gradient.dtype == acc:  # adding `b` rounds once, and gathers no scores
        return _put(gradient, labels, b if of_scores else _times(b, scale), axes, adds=True)
    seen = None if where is None else entry_at(jnp.zeros_like(x, jnp.int32) + where.astype(jnp.int32), labels, axes, 0) != 0
    return _put(gradient, labels, gradient_at(entry_at(x, labels, axes, 0), seen, b), axes)


def _weighted(a, e, counts, x, m, d, where, scale, soft_cap):
    """Computes `(a + e * z) * p`, of numbers that may be None; 0 where both are 0, whatever the row holds.

    Entries that do not count are cleared before the exponential. With a select behind it, LLVM branches, and the loop is
    scalar: the gradient of `[64, 50257]` in float32 then takes 8.0 ms, where optax takes 3.4.
    """
    counts &= functools.reduce(jnp.logical_or, [part != 0 for part in (a, e) if part is not None])
    seen = jnp.zeros_like(x, bool) | counts
    seen = seen if where is None else seen & where
    d = select(counts, d, 1) if where is None else select(counts & (d != 0), d, 1)
    exponent = saved_exponent(capped(select(seen, x, 0), soft_cap), select(counts, m, 0), scale)
    exponent = select(where, exponent, -jnp.inf)
    factor = 0 if a is None else a / d
    if e is not None:
        factor += e / d * online.bounded(exponent)
    return factor * jnp.exp(exponent)


def cross_entropy_gradient(x, labels, t, *, axes, dtype, soft_cap, label_smoothing, z_loss):
    """Computes `t` times the derivative of the losses, then `nll`, `lse`, and with smoothing the sum of the scores."""

    def forward(operands, **params):
        return cross_entropy(**operands, where=None, **params)

    def backward(operands, **params):
        return [cross_entropy_vjp(**operands, e=None, where=None, **params)]

    classes = x.shape[axes[0]]
    params = {"axes": axes, "dtype": dtype, "soft_cap": soft_cap, "label_smoothing": label_smoothing, "z_loss": z_loss}
    return composed(forward, backward, {"x": x, "labels": labels, "t": t}, classes=classes, **params)


def composed(
    forward,
    backward,
    operands,
    *,
    axes,
    dtype,
    label_smoothing,
    z_loss,
    classes,
    gradient_dtype=None,
    return_entropy=False,
    by_nll=None,
    **params,
):
    """Computes the results of `cross_entropy_gradient` from those of `cross_entropy` and its vjp.

    These are computed by `forward(operands, **params)` and `backward(operands, **params)`. `classes` is the number of classes
    on all devices, `params` are the other parameters of both operations. In addition operands may have a scale, the gradient
    may have a dtype of its own, and the entropy may be the last result. `by_nll(t, nll)` computes the cotangents of the
    losses, which are `t` without it.
    """
    t, shared = operands["t"], {name: operands.get(name) for name in ("x", "labels", "scale")}
    options = {"axes": axes, "return_total": label_smoothing > 0, "return_entropy": return_entropy, "return_state": True}
    nll, lse, *sums, m, d = forward(shared, dtype=dtype, **options, **params)
    t = t if by_nll is None else by_nll(t, nll)
    of_rows = {"m": m, "d": d, **factors(t, lse, label_smoothing, z_loss, classes)}
    gradient_dtype = operands["x"].dtype if gradient_dtype is None else gradient_dtype
    (gradient,) = backward({**shared, **of_rows}, axes=axes, dtype=gradient_dtype, **params)
    return [gradient, nll, lse, *sums]


def results_of(labels, m, d, chosen, *sums, dtype, scale=None, return_entropy=False, return_state=False):
    """Computes the results of `cross_entropy` from states and sums of rows; 0 for rows that do not count.

    The sums are, each if it is asked for, the sum of the scores and with `return_entropy` last `sum(exp(z) * z)`. The scores of
    labels, `chosen`, are not scaled.
    """
    counts = labels != NO_ROW
    m, chosen, *sums = (jnp.where(counts, number, 0) for number in (m, chosen, *sums))
    d = jnp.where(counts, d, 1)
    log_d = jnp.log(d)
    if return_entropy:  # a sum of two numbers that are not negative
        sums[-1] = log_d - sums[-1] / d
    above = chosen - m if scale is None else saved_exponent(chosen, m, scale)
    results = [number.astype(dtype) for number in (log_d - above, lse_of(m, d, lax.stop_gradient(scale)), *sums)]
    return [*results, m, d] if return_state else results


def mean_of(entropy, d):
    """Computes `sum(p * z)`, with `z = s - max s`, from the entropy and the saved sum."""
    counts = d > 0
    return jnp.where(counts, jnp.log(jnp.where(counts, d, 1)) - jnp.where(counts, entropy, 0), 0)


def _of_counting(counts, x, m, d, labels, where, axes):
    """Casts rows to the dtype of their state, and clears entries that do not count: NaN there would show in derivatives."""
    is_seen = jnp.zeros_like(x, bool) | counts  # sharded as x
    if where is not None:
        is_seen &= where | _is_at(x, labels, axes)
    return select(is_seen, x.astype(m.dtype), 0), select(counts, m, 0), select(counts, d, 1)


def factors(t, lse, label_smoothing, z_loss, classes):
    """Computes the `a`, `b` and `c` for which `cross_entropy_vjp` returns `t` times the derivative of the losses."""
    return {
        "a": select(t != 0, t * (1 + 2 * z_loss * lse), 0) if z_loss else t,  # lse may be infinite where t is 0
        "b": (label_smoothing - 1) * t,
        "c": -label_smoothing / max(classes, 1) * t if label_smoothing else None,
    }


def chosen_score(x, labels, axes, soft_cap, dtype, factor=None, divisor=None):
    """Computes the scores of the labels before a scale, `[*rows, 1]` in `dtype`; NaN for a label that is no class.

    The scores are those of `x * factor`, or of `x / divisor` as kernels compute it: times the reciprocal.
    """
    chosen = entry_at(x, labels, axes, jnp.nan).astype(dtype)
    factor = factor if divisor is None else 1 / divisor
    return capped(chosen if factor is None else chosen * factor, soft_cap)


def capped(x, soft_cap):
    """Computes the scores of logits `x` before a scale."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def scores_tangent(x, scale, dx, dscale, soft_cap):
    """Computes the tangent of the scores from those of `x`, which may be None, and of `scale`."""
    if soft_cap is None:
        return scaled_tangent(x, scale, dx, dscale)
    x = x.astype(scale.dtype)
    dx = None if dx is None else dx.astype(scale.dtype) * slope(x, soft_cap)
    return scaled_tangent(capped(x, soft_cap), scale, dx, dscale)


def _times(values, scale):
    return values if scale is None else values * scale.astype(values.dtype)


def slope(x, soft_cap):
    """Computes the derivative of `capped`."""
    return jnp.ones((), x.dtype) if soft_cap is None else 1 - jnp.tanh(x / soft_cap) ** 2


def entry_at(values, labels, axes, otherwise):
    """Returns the values at the labels, or `otherwise` where a label is no entry of the row."""
    (axis,) = axes
    size = values.shape[axis]
    if size == 0:
        chosen = sum_along(values, axes)  # zeros
    elif any(jax.typeof(values).sharding.spec[axis : axis + 1]):  # along explicit mesh axes JAX does not gather
        chosen = sum_along(select(_is_at(values, labels, axes), values, 0), axes)
    else:
        chosen = jnp.take_along_axis(values, jnp.clip(labels, 0, size - 1), axis, mode="promise_in_bounds")
    return jnp.where((labels >= 0) & (labels < size), chosen, otherwise)


def _put(values, labels, numbers, axes, adds=False):
    """Replaces the entry at each row's label by a number, or adds the number; a label that is no entry changes nothing.

    A scatter does it: comparing every place with the label takes a CPU as long as the rest of a gradient.
    """
    (axis,) = axes
    size = values.shape[axis]
    is_symbolic = not all(isinstance(size, int) for size in values.shape)
    if size == 0 or is_symbolic or any(jax.typeof(values).sharding.spec):  # along explicit mesh axes JAX does not scatter
        return jnp.where(_is_at(values, labels, axes), values + numbers if adds else numbers, values)
    index = jnp.where((labels >= 0) & (labels < size), labels, size)  # `size` is outside: such an update is dropped
    rows = tuple([a for a in range(values.ndim) if a != axis])
    places = lax.ScatterDimensionNumbers((), (axis,), (axis,), operand_batching_dims=rows, scatter_indices_batching_dims=rows)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    scatter = lax.scatter_add if adds else lax.scatter
    return scatter(values, index[..., None], numbers.astype(values.dtype), places, unique_indices=True, mode=drop)


def _is_at(values, index, axes):
    """Marks the entry of each row at an index. The marks are sharded as the values are."""
    return jnp.zeros_like(values, jnp.int32) + lax.broadcasted_iota(jnp.int32, values.shape, axes[0]) == index


_FUNCTIONS = {
    "cross_entropy": cross_entropy,
    "cross_entropy_jvp": cross_entropy_jvp,
    "cross_entropy_vjp": cross_entropy_vjp,
    "cross_entropy_gradient": cross_entropy_gradient,
    "linear_log_probs": linear_terms.terms,
    "linear_log_probs_jvp": linear_terms.tangents,
    "linear_log_probs_vjp": linear_terms.gradients,
    "linear_cross_entropy_gradient": linear_gradient.reference,
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
