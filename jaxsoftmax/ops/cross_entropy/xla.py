"""The reference: cross-entropy and its derivatives in plain `jax.numpy`, on every platform.

`primitive.py` describes the operands, the parameters and the results.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.implementation import ReferencePlan
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import ONE_DEVICE, Target
from jaxsoftmax.ops.cross_entropy import linear
from jaxsoftmax.ops.softmax.xla import select, state_of, sum_along, weights_of_state

NO_CLASS, NO_ROW = -1, -2  # the label of a row whose label is none of its classes, and of a row that does not count


def cross_entropy(x, labels, where, *, axes, dtype, soft_cap, return_total, return_state):
    """Computes `nll`, `lse`, with `return_total` the sum of the scores, and with `return_state` the state `(m, d)`."""
    acc = accumulator(x.dtype, dtype)
    scores = x if soft_cap is None else capped(x.astype(acc), soft_cap)
    sums = [chosen_score(x, labels, axes, soft_cap, acc)]
    if return_total:
        sums.append(sum_along(select(where, scores.astype(acc), 0), axes))
    return results_of(labels, *state_of(scores, where, None, axes, acc), *sums, dtype=dtype, return_state=return_state)


def cross_entropy_jvp(x, m, d, t, labels, where, *, axes, dtype, soft_cap, return_total):
    """Computes `sum(p * u)`, `u[label]` and with `return_total` the sum of `u`, where `u = t * ds/dx`."""
    counts = labels != NO_ROW
    x, m, d = _of_counting(counts, x, m, d, labels, where, axes)
    u = select(jnp.zeros_like(x, bool) | counts, t.astype(m.dtype), 0) * slope(x, soft_cap)
    p = weights_of_state(capped(x, soft_cap), m, d, where, None)
    sums = [sum_along(p * select(p != 0, u, 0), axes), _at(u, labels, axes, 0)]
    if return_total:
        sums.append(sum_along(select(where, u, 0), axes))
    return [total.astype(dtype) for total in sums]


def cross_entropy_vjp(x, m, d, a, b, c, labels, where, *, axes, dtype, soft_cap, replaces=False):
    """Computes `(a * p + b * onehot(label) + c) * ds/dx`. A row where all three numbers are 0 may hold anything.

    A number that is None counts as 0.
    """
    del replaces  # XLA sees by itself whether the gradient can take the memory of `x`
    acc = m.dtype
    x = x.astype(acc)  # once: cotangents of narrow logits would be rounded before they are added up
    counts = labels != NO_ROW
    counts &= functools.reduce(jnp.logical_or, [part != 0 for part in (a, b, c) if part is not None])
    a, b, c = (None if part is None else part.astype(acc) for part in (a, b, c))

    def gradient_at(x, where, b=None):
        """Computes the gradient at some entries of rows: at all of them, or with `b` at the labels.

        A label's entry counts even if `where` masks it.
        """
        total = jnp.zeros_like(x, acc) if b is None else jnp.zeros_like(x, acc) + b
        if a is not None:
            total += _weighted(a, counts, x, m, d, where, soft_cap)
        if c is not None:
            total += select(where, jnp.zeros_like(x, acc) + c, 0)
        if soft_cap is not None:
            seen = counts if where is None or b is not None else counts & where
            bare = select(jnp.zeros_like(x, bool) | seen, x, 0)
            total = select(total != 0, total * slope(bare, soft_cap), 0)
        return total.astype(dtype)

    gradient = gradient_at(x, where)
    if b is None:
        return gradient
    if soft_cap is None and gradient.dtype == acc:  # adding `b` rounds once, and gathers no scores
        return _put(gradient, labels, b, axes, adds=True)
    seen = None if where is None else _at(jnp.zeros_like(x, jnp.int32) + where.astype(jnp.int32), labels, axes, 0) != 0
    return _put(gradient, labels, gradient_at(_at(x, labels, axes, 0), seen, b), axes)


def _weighted(a, counts, x, m, d, where, soft_cap):
    """Computes `a * p`; 0 where `a` is 0, whatever the row holds.

    Entries that do not count are cleared before the exponential. With a select behind it, LLVM branches, and the loop is
    scalar: the gradient of `[64, 50257]` in float32 then takes 8.0 ms, where optax takes 3.4.
    """
    counts &= a != 0
    seen = jnp.zeros_like(x, bool) | counts
    seen = seen if where is None else seen & where
    d = select(counts, d, 1) if where is None else select(counts & (d != 0), d, 1)
    exponent = capped(select(seen, x, 0), soft_cap) - select(counts, m, 0)
    return a / d * jnp.exp(select(where, exponent, -jnp.inf))


def cross_entropy_gradient(x, labels, t, *, axes, dtype, soft_cap, label_smoothing, z_loss):
    """Computes `t` times the derivative of the losses, then `nll`, `lse`, and with smoothing the sum of the scores."""

    def forward(operands, **params):
        return cross_entropy(**operands, where=None, **params)

    def backward(operands, **params):
        return [cross_entropy_vjp(**operands, where=None, **params)]

    classes = x.shape[axes[0]]
    params = {"axes": axes, "dtype": dtype, "soft_cap": soft_cap, "label_smoothing": label_smoothing, "z_loss": z_loss}
    return composed(forward, backward, {"x": x, "labels": labels, "t": t}, classes=classes, **params)


def composed(forward, backward, operands, *, axes, dtype, label_smoothing, z_loss, classes, **params):
    """Computes the results of `cross_entropy_gradient` from those of `cross_entropy` and its vjp.

    These are computed by `forward(operands, **params)` and `backward(operands, **params)`. `classes` is the number of classes
    on all devices, `params` are the other parameters of both operations.
    """
    x, labels, t = (operands[name] for name in ("x", "labels", "t"))
    options = {"axes": axes, "return_total": label_smoothing > 0, "return_state": True}
    nll, lse, *total, m, d = forward({"x": x, "labels": labels}, dtype=dtype, **options, **params)
    of_rows = {"m": m, "d": d, **factors(t, lse, label_smoothing, z_loss, classes)}
    (gradient,) = backward({"x": x, "labels": labels, **of_rows}, axes=axes, dtype=x.dtype, **params)
    return [gradient, nll, lse, *total]


def linear_cross_entropy(hidden, weight, labels, *, head, machine=ONE_DEVICE):
    """Computes `head.terms` of all rows."""

    def by_parts(hidden, weight, labels):
        return linear.terms_by_parts(head, hidden, weight, None, labels)

    # Examples of a batch that share the weight count as rows of one example, unless devices may share the batch.
    if machine.devices == 1 and math.prod(weight.shape[:-2]) == 1:
        return linear.of_batch(by_parts, hidden, weight, labels)
    weight = jnp.broadcast_to(weight, (*labels.shape[:-1], *weight.shape[-2:]))
    for _ in labels.shape[:-1]:
        by_parts = jax.vmap(by_parts)
    return by_parts(hidden, weight, labels)


def results_of(labels, m, d, chosen, *total, dtype, return_state=False):
    """Computes the results of `cross_entropy` from states and the scores of labels; 0 for rows that do not count."""
    counts = labels != NO_ROW
    m, chosen, *total = (jnp.where(counts, number, 0) for number in (m, chosen, *total))
    d = jnp.where(counts, d, 1)
    log_d = jnp.log(d)
    results = [number.astype(dtype) for number in (log_d - (chosen - m), m + log_d, *total)]
    return [*results, m, d] if return_state else results


def _of_counting(counts, x, m, d, labels, where, axes):
    """Casts rows to the dtype of their state, and clears entries that do not count: NaN there would show in derivatives."""
    is_seen = jnp.zeros_like(x, bool) | counts  # sharded as x
    if where is not None:
        is_seen &= where | _is_at(x, labels, axes)
    return select(is_seen, x.astype(m.dtype), 0), select(counts, m, 0), select(counts, d, 1)


def tangent_of_sum(d, mean):
    """Computes the tangent of `d` from the mean of the tangents of the scores.

    A `d` that is NaN or infinite counts as 0: either the mean is NaN already, or the row does not count.
    """
    return jnp.where((d > 0) & (d < jnp.inf), d, 0) * mean


def factors(t, lse, label_smoothing, z_loss, classes):
    """Computes the `a`, `b` and `c` for which `cross_entropy_vjp` returns `t` times the derivative of the losses."""
    return {
        "a": select(t != 0, t * (1 + 2 * z_loss * lse), 0) if z_loss else t,  # lse may be infinite where t is 0
        "b": (label_smoothing - 1) * t,
        "c": -label_smoothing / max(classes, 1) * t if label_smoothing else None,
    }


def chosen_score(x, labels, axes, soft_cap, dtype):
    """Computes the scores of the labels, `[*rows, 1]` in `dtype`; NaN for a label that is no class."""
    return capped(_at(x, labels, axes, jnp.nan).astype(dtype), soft_cap)


def capped(x, soft_cap):
    """Computes the scores of logits `x`."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def slope(x, soft_cap):
    """Computes `ds/dx`, the derivative of the scores."""
    return jnp.ones((), x.dtype) if soft_cap is None else 1 - jnp.tanh(x / soft_cap) ** 2


def _at(values, labels, axes, otherwise):
    """Returns the values at the labels, or `otherwise` where a label is no entry of the row."""
    (axis,) = axes
    size = values.shape[axis]
    if size == 0 or any(jax.typeof(values).sharding.spec[axis : axis + 1]):  # along explicit mesh axes JAX does not gather
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
    "linear_cross_entropy": linear_cross_entropy,
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
