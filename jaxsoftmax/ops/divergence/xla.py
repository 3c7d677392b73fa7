"""The reference: divergences of two softmaxes and their derivatives in plain `jax.numpy`, on every platform.

`primitive.py` describes the operands, the parameters and the results.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.entrywise import entrywise
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


def js_divergence(x, y, where, scale, y_scale, counts, *, axes, dtype, weight, return_state=False):
    """Computes the divergence, and with `return_state` the states of both rows and both divergences from the mixture."""
    acc = accumulator(x.dtype, y.dtype, dtype)
    states = *state_of(x, where, scale, axes, acc), *state_of(y, where, y_scale, axes, acc)
    operands = {"x": x, "y": y, "where": where, "scale": scale, "y_scale": y_scale}
    return results_of_states(states, operands, counts, axes=axes, dtype=dtype, weight=weight, return_state=return_state)


def js_divergence_jvp(x, y, m, d, y_m, y_d, t, y_t, where, scale, y_scale, *, axes, dtype, weight, of_scores=False):
    """Computes `sum(w * p * f * t + (1 - w) * q * g * y_t)`, `sum(p * t)` and `sum(q * y_t)`; tangents may be None."""
    p, q, *logs = _shares(weight, x, y, m, d, y_m, y_d, where, scale, y_scale)
    numbers = [jnp.zeros_like(d)] * 3
    for k, own, log, tangent, factor in ((1, p, weight * logs[0], t, scale), (2, q, (1 - weight) * logs[1], y_t, y_scale)):
        if tangent is not None:
            weighted = own * select(own != 0, _moved(tangent, m, factor, of_scores), 0)
            numbers[0], numbers[k] = numbers[0] + sum_along(weighted * log, axes), sum_along(weighted, axes)
    return [number.astype(dtype) for number in numbers]


def js_divergence_vjp(
    x, y, m, d, y_m, y_d, a, b, c, where, scale, y_scale, *, axes, dtype, y_dtype, by, weight, of_scores=False
):
    """Computes `(a * w * f + b) * p * ds/dx` and `(a * (1 - w) * g + c) * q * dt/dy`. A number that is None counts as 0."""
    del axes  # the states hold the sums over rows
    a, b, c = (jnp.zeros_like(d) if number is None else number.astype(d.dtype) for number in (a, b, c))
    p, q, of_p, of_q = _shares(weight, x, y, m, d, y_m, y_d, where, scale, y_scale)
    gradients = {
        "x": _moved((a * weight * of_p + b) * p, m, scale, of_scores).astype(dtype),
        "y": _moved((a * (1 - weight) * of_q + c) * q, m, y_scale, of_scores).astype(y_dtype),
    }
    return [gradients[name] for name in by]


def results_of_states(states, operands, counts, *, axes, dtype, weight, return_state=False, axis_name=()):
    """Computes the results of `js_divergence` from the states of rows, and from `operands` that are read for it.

    If devices along `axis_name` share the rows, each has the operands of its part.
    """
    m, d, y_m, y_d = states if counts is None else _counted(counts, states[::2], states[1::2])
    sums, y_sums = sums_of_mixture(weight, axes, operands | {"m": m, "d": d, "y_m": y_m, "y_d": y_d})
    if axis_name:
        sums, y_sums = lax.psum((sums, y_sums), axis_name)
    return results_of_mixture(m, d, y_m, y_d, sums, y_sums, None, dtype=dtype, weight=weight, return_state=return_state)


def results_of_mixture(m, d, y_m, y_d, sums, y_sums, counts, *, dtype, weight, return_state):
    """Computes the results of `js_divergence` from states and sums of rows; 0 for rows that do not count."""
    if counts is not None:
        m, d, y_m, y_d = _counted(counts, (m, y_m), (d, y_d))
        sums, y_sums = (jnp.where(counts, number, 0) for number in (sums, y_sums))
    is_state = (d > 0) & (d < jnp.inf) & (y_d > 0) & (y_d < jnp.inf)
    sums, y_sums = (jnp.where(is_state, number, jnp.nan) for number in (sums, y_sums))
    divergence = jnp.maximum(weight * sums + (1 - weight) * y_sums, 0).astype(dtype)
    return [divergence, m, d, y_m, y_d, sums, y_sums] if return_state else [divergence]


def _counted(counts, maxima, sums):
    """Returns states `(m, d)`, one behind the other, with 0 and 1 for rows that do not count."""
    pairs = zip(maxima, sums, strict=True)
    return [jnp.where(counts, number, k) for pair in pairs for k, number in enumerate(pair)]


@functools.partial(jax.checkpoint, static_argnums=(0, 1))
def sums_of_mixture(weight, axes, operands):
    """Computes `sum(p * f)` and `sum(q * g)` of rows, or the part of them that the entries on this device add.

    `operands` are both arrays and states, the mask and the scales, by name. A derivative computes the entries again, so that
    none of them is kept.
    """
    p, q, of_p, of_q = _shares(weight, **dict.fromkeys(("where", "scale", "y_scale")) | operands)
    return [sum_along(p * of_p, axes), sum_along(q * of_q, axes)]


def _shares(weight, x, y, m, d, y_m, y_d, where, scale, y_scale):
    """Returns `p` and `q`, 0 where they are masked, and the logarithms of their quotients by the mixture, finite everywhere."""
    logs = []
    for own, maximum, total, factor in ((x, m, d, scale), (y, y_m, y_d, y_scale)):
        logs.append(online.bounded(saved_exponent(select(where, own, 0), maximum, factor) - jnp.log(total)))
    p, q = (select(where, jnp.exp(log), 0) for log in logs)
    return p, q, *_logs_of_quotients(logs[1] - logs[0], weight=weight)


def shares_of_mixture(weight):
    """Returns the shares of `p` and `q` in the mixture, 1 together, so that equal weights give 0.

    The logarithm of a share that float32 cannot hold would be infinite: each share is at least 2^-100.
    """
    share = max(min(weight, 1 - weight), 2.0**-100)
    return (share, 1 - share) if weight < 0.5 else (1 - share, share)


def _tangents_of_quotients(results, primals, tangents, weight):
    del primals
    (of_p, of_q), (t,) = results, tangents
    return -(1 - weight) * jnp.exp(of_q) * t, weight * jnp.exp(of_p) * t


@entrywise(_tangents_of_quotients)
def _logs_of_quotients(distance, weight):
    """Computes `log(p / r)` and `log(q / r)` from `log(q / p)`. Both are near 0 where that is, without cancellation."""
    shares = shares_of_mixture(weight)
    greater, lesser = (jnp.where(distance < 0, *pair).astype(distance.dtype) for pair in (shares, shares[::-1]))
    part = greater + lesser * jnp.exp(-jnp.abs(distance))  # of the mixture in the greater one
    above = -jnp.where(part > 0.5, jnp.log1p(lesser * jnp.expm1(-jnp.abs(distance))), jnp.log(part))
    return above - jnp.maximum(distance, 0), above + jnp.minimum(distance, 0)


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
    "js_divergence": js_divergence,
    "js_divergence_jvp": js_divergence_jvp,
    "js_divergence_vjp": js_divergence_vjp,
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
