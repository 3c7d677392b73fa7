"""The reference: the divergence of two softmaxes and its derivatives in plain `jax.numpy`, on every platform.

`primitive.py` describes the operands, the parameters and the results.
"""

import functools
import math

import jax
import jax.numpy as jnp

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.implementation import ReferencePlan
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.softmax.xla import saved_exponent, select, state_of, sum_along, weights_of_state


def kl_divergence(x, y, where, scale, y_scale, counts, *, axes, dtype, return_state=False):
    """Computes the divergence, and with `return_state` the states of both rows and `sums` between them."""
    acc = accumulator(x.dtype, y.dtype, dtype)
    m, d = state_of(x, where, scale, axes, acc)
    y_m, y_d = state_of(y, where, y_scale, axes, acc)
    exponent, difference = _exponents(x, y, m, y_m, where, scale, y_scale)
    sums = sum_along(jnp.exp(exponent) * difference, axes)
    return results_of(m, d, sums, y_m, y_d, counts, dtype=dtype, return_state=return_state)


def kl_divergence_jvp(x, y, m, d, y_m, y_d, t, y_t, where, scale, y_scale, *, axes, dtype, of_scores=False):
    """Computes `sum(p * ((u - v) * t - y_t))`, `sum(p * t)` and `sum(q * y_t)` from tangents that may be None."""
    p = weights_of_state(x, m, d, where, scale)
    numbers = [jnp.zeros_like(d)] * 3
    if t is not None:
        _, difference = _exponents(x, y, m, y_m, where, scale, y_scale)
        weighted = p * select(p != 0, _moved(t, m, scale, of_scores), 0)
        numbers[:2] = [sum_along(weighted * difference, axes), sum_along(weighted, axes)]
    if y_t is not None:
        q, moved = weights_of_state(y, y_m, y_d, where, y_scale), _moved(y_t, m, y_scale, of_scores)
        numbers[0] -= sum_along(p * select(p != 0, moved, 0), axes)
        numbers[2] = sum_along(q * select(q != 0, moved, 0), axes)
    return [number.astype(dtype) for number in numbers]


def kl_divergence_vjp(x, y, m, d, y_m, y_d, a, b, c, where, scale, y_scale, *, axes, dtype, y_dtype, by, of_scores=False):
    """Computes `(a * (u - v) + b) * p * ds/dx` and `(c * q - a * p) * dt/dy`. A number that is None counts as 0."""
    del axes  # the states hold the sums over rows
    a, b, c = (jnp.zeros_like(d) if number is None else number.astype(d.dtype) for number in (a, b, c))
    p, gradients = weights_of_state(x, m, d, where, scale), {}
    if "x" in by:
        _, difference = _exponents(x, y, m, y_m, where, scale, y_scale)
        gradient = p * select(p != 0, a * difference + b, 0)
        gradients["x"] = _moved(gradient, m, scale, of_scores).astype(dtype)
    if "y" in by:
        gradient = c * weights_of_state(y, y_m, y_d, where, y_scale) - a * p
        gradients["y"] = _moved(gradient, m, y_scale, of_scores).astype(y_dtype)
    return [gradients[name] for name in by]


def results_of(m, d, sums, y_m, y_d, counts, *, dtype, return_state):
    """Computes the results of `kl_divergence` from states and sums of rows; 0 for rows that do not count."""
    if counts is not None:
        m, sums, y_m = (jnp.where(counts, number, 0) for number in (m, sums, y_m))
        d, y_d = jnp.where(counts, d, 1), jnp.where(counts, y_d, 1)
    is_state = (d > 0) & (d < jnp.inf) & (y_d > 0) & (y_d < jnp.inf)
    # The logarithm of the quotient is near 0 where the sums are near each other, as the divergence is.
    divergence = jnp.where(is_state, jnp.maximum(sums / d + jnp.log(y_d / d), 0), jnp.nan).astype(dtype)
    return [divergence, m, d, sums, y_m, y_d] if return_state else [divergence]


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def sum_of_mixture(weight, axes, first, second, where):
    """Computes the Jensen-Shannon divergence of rows, or its part that their entries on this device add.

    `first` and `second` are the logits, their state `(m, d)` and their scale. A derivative computes the entries again, so that
    none of them is kept.
    """
    logs = []
    for x, m, d, scale in (first, second):
        logs.append(saved_exponent(select(where, x, 0), m, scale) - jnp.log(d))
    p, q = (select(where, jnp.exp(log), 0) for log in logs)
    if weight in (0, 1):
        return sum_along(0 * (p + q), axes)
    # Where one of them is 0, the mixture is the share of the other. The difference would be infinite, or NaN.
    are_finite = jnp.isfinite(logs[0]) & jnp.isfinite(logs[1])
    distance = jnp.where(are_finite, logs[1], 0) - jnp.where(are_finite, logs[0], 0)
    log_w, log_v = math.log(weight), math.log1p(-weight)
    of_p = jnp.where(are_finite, -jnp.logaddexp(log_w, log_v + distance), -log_w)
    of_q = jnp.where(are_finite, -jnp.logaddexp(log_w - distance, log_v), -log_v)
    return sum_along(weight * p * of_p + (1 - weight) * q * of_q, axes)


def _exponents(x, y, m, y_m, where, scale, y_scale):
    """Returns `u`, `-inf` where it is masked, and `u - v`, 0 where the exponential of `u` is 0."""
    exponent = saved_exponent(select(where, x, 0), m, scale)
    has_weight = jnp.exp(exponent) > 0
    has_weight = has_weight if where is None else has_weight & where
    difference = select(has_weight, exponent - saved_exponent(select(where, y, 0), y_m, y_scale), 0)
    return select(where, exponent, -jnp.inf), difference


def _moved(t, m, scale, of_scores):
    """Multiplies a tangent or a cotangent by the derivative of the scores, unless it is one of the scores."""
    t = t.astype(m.dtype)
    return t if of_scores or scale is None else t * scale.astype(m.dtype)


_FUNCTIONS = {
    "kl_divergence": kl_divergence,
    "kl_divergence_jvp": kl_divergence_jvp,
    "kl_divergence_vjp": kl_divergence_vjp,
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
