"""The reference: cross-entropy and its derivatives in plain `jax.numpy`, on every platform; see `primitive.py`."""

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

NO_CLASS, NO_ROW = -1, -2  # what labels say of a row without a label among its classes, and of one that does not count


def cross_entropy(x, labels, where, *, axes, dtype, soft_cap, return_total, return_state):
    """`nll`, `lse`, the sum of the scores if asked for, and the state `(m, d)` if asked for."""
    acc = accumulator(x.dtype, dtype)
    scores = x if soft_cap is None else capped(x.astype(acc), soft_cap)
    sums = [chosen_score(x, labels, axes, soft_cap, acc)]
    if return_total:
        sums.append(sum_along(select(where, scores.astype(acc), 0), axes))
    return results_of(labels, *state_of(scores, where, None, axes, acc), *sums, dtype=dtype, return_state=return_state)


def cross_entropy_jvp(x, m, d, t, labels, where, *, axes, dtype, soft_cap, return_total):
    """`sum(p * u)`, `u[label]`, and the sum of `u` if asked for, where `u = t * ds/dx`."""
    counts = labels != NO_ROW
    x, m, d = _of_counting(counts, x, m, d, labels, where, axes)
    u = select(jnp.zeros_like(x, bool) | counts, t.astype(m.dtype), 0) * slope(x, soft_cap)
    p = weights_of_state(capped(x, soft_cap), m, d, where, None)
    sums = [sum_along(p * select(p != 0, u, 0), axes), _at(u, labels, axes, 0)]
    if return_total:
        sums.append(sum_along(select(where, u, 0), axes))
    return [total.astype(dtype) for total in sums]


def cross_entropy_vjp(x, m, d, a, b, c, labels, where, *, axes, dtype, soft_cap, replaces=False):
    """`(a * p + b * onehot(label) + c) * ds/dx`. Where all three are 0, what the row holds has no effect."""
    del replaces  # XLA sees for itself that nothing else reads `x`
    acc = m.dtype
    x = x.astype(acc)  # once: cotangents of narrow logits would be rounded before they are added up
    counts = labels != NO_ROW
    counts &= functools.reduce(jnp.logical_or, [part != 0 for part in (a, b, c) if part is not None])
    a, b, c = (None if part is None else part.astype(acc) for part in (a, b, c))

    def of_scores(x, where, b=None):
        """The results for scores of rows, and with `b` for those of their labels, which count where `where` is false, too."""
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

    whole = of_scores(x, where)
    if b is None:
        return whole
    if soft_cap is None and whole.dtype == acc:  # which rounds once, and gathers no scores
        return _put(whole, labels, b, axes, adds=True)
    own_where = None if where is None else _at(jnp.zeros_like(x, jnp.int32) + where.astype(jnp.int32), labels, axes, 0) != 0
    return _put(whole, labels, of_scores(_at(x, labels, axes, 0), own_where, b), axes)


def _weighted(a, counts, x, m, d, where, soft_cap):
    """`a * p`, and 0 where `a` is 0, whatever the row holds.

    What does not count is cleared before the exponential. Behind it LLVM makes a branch of a select, and the loop scalar: the
    gradient of `[64, 50257]` in float32 takes 8.0 ms so, 3.4 with optax.
    """
    counts &= a != 0
    seen = jnp.zeros_like(x, bool) | counts
    seen = seen if where is None else seen & where
    d = select(counts, d, 1) if where is None else select(counts & (d != 0), d, 1)
    exponent = capped(select(seen, x, 0), soft_cap) - select(counts, m, 0)
    return a / d * jnp.exp(select(where, exponent, -jnp.inf))


def cross_entropy_gradient(x, labels, t, *, axes, dtype, soft_cap, label_smoothing, z_loss):
    """`t` times the derivative of the losses, `nll`, `lse` and with smoothing the sum of the scores."""

    def forward(operands, **params):
        return cross_entropy(**operands, where=None, **params)

    def backward(operands, **params):
        return [cross_entropy_vjp(**operands, where=None, **params)]

    classes = x.shape[axes[0]]
    params = {"axes": axes, "dtype": dtype, "soft_cap": soft_cap, "label_smoothing": label_smoothing, "z_loss": z_loss}
    return composed(forward, backward, {"x": x, "labels": labels, "t": t}, classes=classes, **params)


def composed(forward, backward, operands, *, axes, dtype, label_smoothing, z_loss, classes, **params):
    """What `cross_entropy_gradient` gives, by `cross_entropy` and its vjp, of operands by name."""
    x, labels, t = (operands[name] for name in ("x", "labels", "t"))
    options = {"axes": axes, "return_total": label_smoothing > 0, "return_state": True}
    nll, lse, *total, m, d = forward({"x": x, "labels": labels}, dtype=dtype, **options, **params)
    of_rows = {"m": m, "d": d, **factors(t, lse, label_smoothing, z_loss, classes)}
    (gradient,) = backward({"x": x, "labels": labels, **of_rows}, axes=axes, dtype=x.dtype, **params)
    return [gradient, nll, lse, *total]


def linear_cross_entropy(hidden, weight, labels, *, head, machine=ONE_DEVICE):
    """`head.numbers`. Examples of a batch that share the weight are rows of one, unless they may be sharded."""

    def by_parts(hidden, weight, labels):
        return linear.numbers_by_parts(head, hidden, weight, None, labels)

    if machine.devices == 1 and math.prod(weight.shape[:-2]) == 1:
        return linear.of_batch(by_parts, hidden, weight, labels)
    weight = jnp.broadcast_to(weight, (*labels.shape[:-1], *weight.shape[-2:]))
    for _ in labels.shape[:-1]:
        by_parts = jax.vmap(by_parts)
    return by_parts(hidden, weight, labels)


def results_of(labels, m, d, chosen, *total, dtype, return_state=False):
    """Computes the results of `cross_entropy` from states and labels' scores: 0 for rows that do not count."""
    counts = labels != NO_ROW
    m, chosen, *total = (jnp.where(counts, number, 0) for number in (m, chosen, *total))
    d = jnp.where(counts, d, 1)
    log_d = jnp.log(d)
    found = [number.astype(dtype) for number in (log_d - (chosen - m), m + log_d, *total)]
    return [*found, m, d] if return_state else found


def _of_counting(counts, x, m, d, labels, where, axes):
    """Casts rows to the dtype of their state, and clears what does not count: NaN there would show in derivatives."""
    is_seen = jnp.zeros_like(x, bool) | counts  # sharded as x
    if where is not None:
        is_seen &= where | _is_at(x, labels, axes)
    return select(is_seen, x.astype(m.dtype), 0), select(counts, m, 0), select(counts, d, 1)


def tangent_of_sum(d, mean):
    """The tangent of `d`, for the mean of the tangents of the scores.

    A row that holds NaN or +inf has it in that mean already. Its `d` counts as 0, as the row may be one that does not count.
    """
    return jnp.where((d > 0) & (d < jnp.inf), d, 0) * mean


def factors(t, lse, label_smoothing, z_loss, classes):
    """The `a`, `b` and `c` of `cross_entropy_vjp` that give `t` times the derivative of the losses."""
    return {
        "a": select(t != 0, t * (1 + 2 * z_loss * lse), 0) if z_loss else t,  # lse may be infinite where t is 0
        "b": (label_smoothing - 1) * t,
        "c": -label_smoothing / max(classes, 1) * t if label_smoothing else None,
    }


def chosen_score(x, labels, axes, soft_cap, dtype):
    """The scores of the labels, `[*rows, 1]` in `dtype`: NaN where a label is no class."""
    return capped(_at(x, labels, axes, jnp.nan).astype(dtype), soft_cap)


def capped(x, soft_cap):
    """The scores."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def slope(x, soft_cap):
    """`ds/dx`."""
    return jnp.ones((), x.dtype) if soft_cap is None else 1 - jnp.tanh(x / soft_cap) ** 2


def _at(values, labels, axes, otherwise):
    """The values at the labels, and `otherwise` of those that are none of the row."""
    (axis,) = axes
    size = values.shape[axis]
    if size == 0 or any(jax.typeof(values).sharding.spec[axis : axis + 1]):  # along explicit mesh axes JAX does not gather
        found = sum_along(select(_is_at(values, labels, axes), values, 0), axes)
    else:
        found = jnp.take_along_axis(values, jnp.clip(labels, 0, size - 1), axis, mode="promise_in_bounds")
    return jnp.where((labels >= 0) & (labels < size), found, otherwise)


def _put(values, labels, own, axes, adds=False):
    """Puts a number of each row at its label, if that is one of the row, or adds it there.

    A comparison of every place with the label takes as long on a CPU as all else of a gradient.
    """
    (axis,) = axes
    size = values.shape[axis]
    is_symbolic = not all(isinstance(size, int) for size in values.shape)
    if size == 0 or is_symbolic or any(jax.typeof(values).sharding.spec):  # along explicit mesh axes JAX does not scatter
        return jnp.where(_is_at(values, labels, axes), values + own if adds else own, values)
    index = jnp.where((labels >= 0) & (labels < size), labels, size)  # outside, where nothing is put
    rows = tuple([a for a in range(values.ndim) if a != axis])
    places = lax.ScatterDimensionNumbers((), (axis,), (axis,), operand_batching_dims=rows, scatter_indices_batching_dims=rows)
    drop = lax.GatherScatterMode.FILL_OR_DROP
    scatter = lax.scatter_add if adds else lax.scatter
    return scatter(values, index[..., None], own.astype(values.dtype), places, unique_indices=True, mode=drop)


def _is_at(values, place, axes):
    """Which element of each row is at that place, sharded as the values are."""
    return jnp.zeros_like(values, jnp.int32) + lax.broadcasted_iota(jnp.int32, values.shape, axes[0]) == place


_FUNCTIONS = {
    function.__name__: function
    for function in (cross_entropy, cross_entropy_jvp, cross_entropy_vjp, cross_entropy_gradient, linear_cross_entropy)
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
