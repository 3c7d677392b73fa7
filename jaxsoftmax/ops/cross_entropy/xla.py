"""The reference: cross-entropy and its derivatives in plain `jax.numpy`, on every platform. `primitive.py` says what they are.

`axis_name` names the mesh axes over which the row is sharded, inside a `shard_map` or its like.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy import _linear
from jaxsoftmax.ops.softmax.xla import select, state_of, sum_along, weights_of_state


def cross_entropy(x, labels, where, *, axes, dtype, soft_cap, return_total, return_state):
    """`nll`, `lse`, the sum of the scores if asked for, and the state `(m, d)` if asked for."""
    scores = capped(x.astype(accumulator(x.dtype, dtype)), soft_cap)
    sums = [chosen_score(x, labels, axes, soft_cap, scores.dtype)]
    if return_total:
        sums.append(sum_along(select(where, scores, 0), axes))
    m, d = state_of(scores, where, None, axes)
    found = losses_of(m, d, *sums, dtype=dtype)
    return [*found, m, d] if return_state else found


def cross_entropy_jvp(x, m, d, t, labels, where, *, axes, dtype, soft_cap, return_total, axis_name=()):
    """`sum(p * u)`, `u[label]`, and the sum of `u` if asked for, where `u = t * ds/dx`."""
    x, u = x.astype(m.dtype), t.astype(m.dtype) * slope(x.astype(m.dtype), soft_cap)
    p = weights_of_state(capped(x, soft_cap), m, d, where, None)
    sums = [sum_along(p * select(p != 0, u, 0), axes), _at(u, labels, axes, 0, axis_name)]
    if return_total:
        sums.append(sum_along(select(where, u, 0), axes))
    return [total.astype(dtype) for total in (lax.psum(jnp.stack(sums), axis_name) if axis_name else sums)]


def cross_entropy_vjp(x, m, d, a, b, c, labels, where, *, axes, dtype, soft_cap):
    """`(a * p + b * onehot(label) + c) * ds/dx`. In rows of which all three are 0, what `x` holds has no effect."""
    x = x.astype(m.dtype)
    total = jnp.zeros_like(x)
    a, b, c = (None if part is None else part.astype(x.dtype) + total for part in (a, b, c))  # sharded as x
    if a is not None:
        p = weights_of_state(capped(x, soft_cap), m, d, where, None)
        total += select(a != 0, a * p, 0)
    if b is not None:
        total += select(_is_at(x, labels, axes), b, 0)
    if c is not None:
        total += select(where, c, 0)
    if soft_cap is not None:
        total = select(total != 0, total * slope(x, soft_cap), 0)
    return total.astype(dtype)


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


def linear_cross_entropy(hidden, weight, labels, *, head, devices=1):
    """The losses of a linear layer. Examples of a batch that share the weight are rows of one, unless they may be sharded."""

    def by_parts(hidden, weight, labels):
        return _linear.losses_by_parts(head, hidden, weight, None, labels)

    if devices == 1 and math.prod(weight.shape[:-2]) == 1:
        return [_linear.of_batch(by_parts, hidden, weight, labels)]
    weight = jnp.broadcast_to(weight, (*labels.shape[:-1], *weight.shape[-2:]))
    for _ in labels.shape[:-1]:
        by_parts = jax.vmap(by_parts)
    return [by_parts(hidden, weight, labels)]


def losses_of(m, d, chosen, *total, dtype):
    """`nll`, `lse` and what follows, of the states of rows and the scores of their labels."""
    log_d = jnp.log(d)
    return [number.astype(dtype) for number in (log_d - (chosen - m), m + log_d, *total)]


def factors(t, lse, label_smoothing, z_loss, classes):
    """The `a`, `b` and `c` of `cross_entropy_vjp` that give `t` times the derivative of the losses."""
    return {
        "a": select(t != 0, t * (1 + 2 * z_loss * lse), 0) if z_loss else t,  # lse may be infinite where t is 0
        "b": (label_smoothing - 1) * t,
        "c": -label_smoothing / max(classes, 1) * t if label_smoothing else None,
    }


def chosen_score(x, labels, axes, soft_cap, dtype, axis_name=()):
    """The scores of the labels, `[*rows, 1]` in `dtype`: 0 of those that another device has, and NaN of those that are none."""
    return capped(_at(x, labels, axes, jnp.nan, axis_name).astype(dtype), soft_cap)


def capped(x, soft_cap):
    """The scores."""
    return x if soft_cap is None else soft_cap * jnp.tanh(x / soft_cap)


def slope(x, soft_cap):
    """`ds/dx`."""
    return jnp.ones((), x.dtype) if soft_cap is None else 1 - jnp.tanh(x / soft_cap) ** 2


def _at(values, labels, axes, otherwise, axis_name):
    """The values at the labels: 0 of those that another device has, and `otherwise` of those that are none of the row."""
    (axis,) = axes
    size = values.shape[axis]
    place = _local(labels, size, axis_name)
    if size == 0 or any(jax.typeof(values).sharding.spec[axis : axis + 1]):  # along explicit mesh axes JAX does not gather
        found = sum_along(select(_is_at(values, place, axes), values, 0), axes)
    else:
        found = jnp.take_along_axis(values, jnp.clip(place, 0, size - 1), axis, mode="promise_in_bounds")
        found = select((place >= 0) & (place < size), found, 0)
    return jnp.where((labels >= 0) & (labels < _classes(values, axes, axis_name)), found, otherwise)


def _is_at(values, place, axes):
    """Which element of each row is at that place, sharded as the values are."""
    return jnp.zeros_like(values, jnp.int32) + lax.broadcasted_iota(jnp.int32, values.shape, axes[0]) == place


def _local(labels, size, axis_name):
    """The labels from the first element on that this device has of the row, of which each has `size`."""
    return labels - lax.axis_index(axis_name) * size if axis_name else labels


def _classes(values, axes, axis_name):
    """How many elements a row has, on all devices."""
    return values.shape[axes[0]] * (lax.axis_size(axis_name) if axis_name else 1)
