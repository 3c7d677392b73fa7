"""The reference: every primitive of the softmax family in plain `jax.numpy`, on every platform.

It defines the right results, to which tests hold the other implementations, and it runs where no kernel does. The arithmetic is
float32, or float64 or complex if the operands are. `primitive.py` describes the operands and parameters.

The scores are `s = scale * x`. The state of a row is `m = max(sign(scale) * x)` and `d = sum(exp(s - max s))`. Scores are never
in memory: `x * scale` would be rounded before the maximum is subtracted, and large scores would lose their differences.

XLA:CPU compiles products, sums, maxima, exponentials and arithmetic to one vectorised loop (`ynn_fusion` in a compiled
program), but no select, comparison or minimum; `online.finite` and `softmax_jacobian` avoid them there. On a GPU XLA fuses
selects too. `python -m benchmarks reference` compares the references with `jax.nn` and optax.

`axis_name` names the mesh axes over which `axes` are sharded; `across_devices` passes it.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.entrywise import entrywise
from jaxsoftmax._core.implementation import ReferencePlan
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import CPU, ONE_DEVICE, Machine, Target


def softmax(x, where, scale, *, axes, dtype):
    """Computes `exp(s - max s) / sum(exp(s - max s))`."""
    acc = accumulator(x.dtype, dtype)
    m = _max(x, where, scale, axes, acc)
    weights = jnp.exp(_exponent(_directed(x, where, scale, acc) - m, where, scale))
    # XLA's partitioner reduces `m` and this sum over a sharded axis: two all-reduces, and no all-gather.
    y = weights / sum_along(weights, axes)
    return select(where, y, 0).astype(dtype)


def log_softmax(x, where, scale, *, axes, dtype, return_state):
    """Computes `(s - max s) - log d`, and with `return_state` the state `(m, d)`."""
    acc = accumulator(x.dtype, dtype)
    m = _max(x, where, scale, axes, acc)
    if where is not None:  # else the state of a masked row would have d = NaN
        m = select(m != -jnp.inf, m, 0)
    exponent = _exponent(_directed(x, where, scale, acc) - m, where, scale)
    d = sum_along(jnp.exp(exponent), axes)
    out = select(where, exponent - jnp.log(d), -jnp.inf).astype(dtype)
    return [out, m, d] if return_state else [out]


def logsumexp(x, where, scale, *, axes, dtype, return_state):
    """Computes `max s + log d`, and with `return_state` the state `(m, d)`."""
    m, d = state_of(x, where, scale, axes, accumulator(x.dtype, dtype))
    lse = lse_of(m, d, scale).astype(dtype)
    return [lse, m, d] if return_state else [lse]


def softmax_jacobian(y, t, scale, *, axes, dtype, axis_name=(), machine=ONE_DEVICE):
    """Computes `scale * y * (t - sum(y * t))`, the tangent and the cotangent of softmax: its Jacobian is symmetric.

    Where `y` is 0, the result is 0, whatever `t` holds.
    """
    acc = accumulator(y.dtype, t.dtype, dtype)

    def cast_operands():  # called once more inside the loop of `_finite_or`, as a loop would keep its operands in memory
        return y.astype(acc), _scaled(t.astype(acc), scale)

    def selecting(counts):
        """Computes the result with the terms, and the results, that do not count set to 0."""
        weights, scaled = cast_operands()
        scaled = select(counts(scaled), scaled, 0)
        result = weights * (scaled - sum_along(weights * scaled, axes, axis_name))
        return select(counts(result), result, 0).astype(dtype)

    # Several devices would have to exchange the flag of `_finite_or`, and on a GPU its loop would make the host wait. For a
    # small gradient the loop gains nothing, and the first call would take 1.4 times as long.
    is_on_one_cpu = machine == Machine(1, CPU) and not axis_name
    is_large = all(isinstance(size, int) for size in y.shape) and y.size >= 2**14
    if not (is_on_one_cpu and is_large):
        return selecting(lambda _: y != 0)
    weights, scaled = cast_operands()
    half = scaled * 0.5  # the difference of two halves is finite, so that 0 times it is 0
    result = 2 * weights * (half - sum_along(weights * half, axes))
    return _finite_or(result.astype(dtype), axes, lambda: selecting(lambda values: (y != 0) | jnp.isfinite(values)))


def _finite_or(result, axes, recompute):
    """Returns `result` if the first number of every row is finite, else `recompute()`.

    If the sum of a row is not finite, neither is its first number. XLA:CPU compiles a computation without selects to one
    vectorised loop: `[64, 12, 128, 128]` in float32 with its gradient takes 0.8 of the time of `jax.nn`, and with selects the
    same time. A while loop runs `recompute` once or never, and does not copy the result, as a branch would.
    """
    first = lax.slice(result, [0] * result.ndim, [1 if axis in axes else size for axis, size in enumerate(result.shape)])
    state = (~jnp.all(jnp.isfinite(first)), result)
    return lax.while_loop(lambda state: state[0], lambda state: (jnp.zeros_like(state[0]), recompute()), state)[1]


def log_softmax_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, axis_name=()):
    """Computes `t - sum(p * t)` with `p = exp(s - m) / d`; `t` is the tangent of the scores, or of `x` with `scale_tangent`."""
    p, t = weights_of_state(x, m, d, where, scale), _tangent(select(where, t, 0), m, scale, scale_tangent)
    # A tangent whose weight is 0 has no effect on other entries, even if it is NaN.
    return select(where, t - sum_along(p * select(p != 0, t, 0), axes, axis_name), 0).astype(dtype)


def log_softmax_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, axis_name=()):
    """Computes `t - p * sum(t)` from a cotangent `t`: the transpose of `log_softmax_jvp`."""
    weights, d = _weights_and_sum(x, m, d, where, scale)
    t = _tangent(select(where, t, 0), m, scale, scale_tangent)
    return select(where, t - weights * (sum_along(t, axes, axis_name) / d), 0).astype(dtype)


def logsumexp_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent):
    """Computes `sum(p * t)`, the tangent of log-sum-exp."""
    p = weights_of_state(x, m, d, where, scale)
    return sum_along(p * _tangent(select(p != 0, t, 0), m, scale, scale_tangent), axes).astype(dtype)


def logsumexp_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent):
    """Computes `p * t` from a cotangent `t`: the transpose of `logsumexp_jvp`."""
    del axes  # the state holds the sum over the row
    weights, d = _weights_and_sum(x, m, d, where, scale)
    return select(where, weights * (_tangent(t, m, scale, scale_tangent) / d), 0).astype(dtype)


def scores_tangent(x, scale, dx, dscale):
    """Computes the tangent of `scale * x`. Either of `dx` and `dscale` may be None, and an infinite score has the tangent 0."""
    parts = []
    if dx is not None:
        parts.append(_scaled(dx if scale is None else dx.astype(accumulator(dx.dtype, scale.dtype)), scale))
    if dscale is not None:
        acc = accumulator(x.dtype, dscale.dtype)
        parts.append(dscale.astype(acc) * select(jnp.isfinite(x), x, 0).astype(acc))
    return sum(parts[1:], start=parts[0])


@entrywise(lambda out, primals, tangents: scores_tangent(*primals, *tangents).astype(out.dtype))
def scores(x, scale) -> jax.Array:
    """Computes `scale * x`, whose tangent is that of `scores_tangent`."""
    return _scaled(x, scale)


def state_of(x, where, scale, axes, acc):
    """Returns the state `(m, d)` of rows in the dtype `acc`, with a finite `m`."""
    m = online.finite(_max(x, where, scale, axes, acc))
    return m, sum_along(jnp.exp(_exponent(_directed(x, where, scale, acc) - m, where, scale)), axes)


def sum_of_exponents(x, m, where, scale, axes) -> jax.Array:
    """Computes `sum(exp(z) * z)`, where `z = s - max s` from the saved maximum; an entry of weight 0 adds 0."""
    exponent = _exponent(_directed(x, where, scale, m.dtype) - m, where, scale)
    return sum_along(jnp.exp(exponent) * online.bounded(exponent), axes)


def lse_of(m, d, scale) -> jax.Array:
    """Computes the log-sum-exp of a state."""
    return _exponent(m, None, scale) + jnp.log(d)


def _directed(x, where, scale, acc) -> jax.Array:
    """Returns `sign(scale) * x`, which grows as the scores do, and `-inf` for masked entries."""
    x = x.astype(acc)
    return select(where, x if scale is None else x * jnp.sign(scale).astype(acc), -jnp.inf)


def _exponent(shifted, where, scale) -> jax.Array:
    """Computes `s - max s` from `_directed` entries, shifted by their maximum."""
    return select(where, _scaled(shifted, None if scale is None else jnp.abs(scale)), -jnp.inf)


def saved_exponent(x, m, scale) -> jax.Array:
    """Computes `s - max s` with the saved maximum, which counts as a constant.

    If the maximum is infinite, the saved sum is NaN, and the weights are too. The forward pass computes the same exponent, so
    that XLA computes it once.
    """
    m = lax.stop_gradient(m)
    return x.astype(m.dtype) - m if scale is None else _scaled_exponent(x, m, scale)


def _tangent_of_exponent(out, primals, tangents):
    (x, _, scale), (dx, _, dscale) = primals, tangents
    return scores_tangent(x, scale, dx, dscale).astype(out.dtype)


@entrywise(_tangent_of_exponent)
def _scaled_exponent(x, m, scale):
    """Computes `saved_exponent`. The tangent is that of the scores alone, though the maximum depends on the scale."""
    return _exponent(_directed(x, None, scale, m.dtype) - m, None, scale)


def tangent_of_sum(d, mean):
    """Computes the tangent of `d` from the mean of the tangents of the scores.

    A `d` that is NaN or infinite counts as 0: either the mean is NaN already, or the row does not count.
    """
    return jnp.where((d > 0) & (d < jnp.inf), d, 0) * mean


def weights_of_state(x, m, d, where, scale) -> jax.Array:
    """Computes the softmax weights from the saved state."""
    weights, d = _weights_and_sum(x, m, d, where, scale)
    return weights / d


def _weights_and_sum(x, m, d, where, scale):
    """Returns the softmax weights times `d`, and `d`: it costs less to divide a row's factor by `d` than to divide weights."""
    if where is not None:
        d = select(d != 0, d, 1)  # a masked row
    return jnp.exp(select(where, saved_exponent(select(where, x, 0), m, scale), -jnp.inf)), d


def _tangent(t, m, scale, scale_tangent) -> jax.Array:
    t = t.astype(m.dtype)
    return _scaled(t, scale) if scale_tangent else t


def _scaled(values, scale):
    return values if scale is None else values * scale.astype(values.dtype)


def _max(x, where, scale, axes, acc):
    """Returns the maxima of `_directed` entries along rows.

    16-bit numbers are compared without a cast: XLA would write the float32 ones to memory, as a maximum and a sum read them.
    """
    narrow = x.dtype in (jnp.float16, jnp.bfloat16)
    return jnp.max(_directed(x, where, scale, x.dtype if narrow else acc), axes, keepdims=True, initial=-jnp.inf).astype(acc)


def sum_along(values, axes, axis_name=()):
    """Sums along axes, which keep size 1, and over mesh axes."""
    total = jnp.sum(values, axes, keepdims=True)
    return lax.psum(total, axis_name) if axis_name else total


def select(where, values, otherwise):
    """Returns `values` where `where` is true, or everywhere if it is None, and `otherwise` elsewhere."""
    if where is None:
        return values
    other = lax.full_like(values, otherwise)
    return (lax.select if where.shape == values.shape else jnp.where)(where, values, other)


_FUNCTIONS = {
    "softmax": softmax,
    "log_softmax": log_softmax,
    "logsumexp": logsumexp,
    "softmax_jacobian": softmax_jacobian,
    "log_softmax_jvp": log_softmax_jvp,
    "log_softmax_vjp": log_softmax_vjp,
    "logsumexp_jvp": logsumexp_jvp,
    "logsumexp_vjp": logsumexp_vjp,
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
