"""The truth in float64, by NumPy on the CPU, and the error that a result may have.

The truth is the exact result for the operands, after they were rounded to their dtype. A result may differ from it by

    (8 + 3 * |s - max|) * 2^-24 * terms + 2^-126   and, in a 16-bit dtype, by half a unit in its last place more,

where `terms` is the sum of the absolute values of the terms of a sum; for softmax, whose terms are positive, the result itself.
The first part allows a few roundings, and an exponential whose argument was rounded once; the second lets results flush to
zero. `error` is the largest fraction of this budget that a result uses. A result with a fraction above 1 is wrong.
"""

from dataclasses import dataclass

import jax.numpy as jnp
import ml_dtypes
import numpy as np

EPS = 2.0**-24
TINY = 2.0**-126


@dataclass
class Truth:
    """A float64 value, and the absolute error that a float32 computation of it may have."""

    value: np.ndarray
    budget: np.ndarray


def to64(array) -> np.ndarray:
    """Returns an array of any dtype in float64, or complex128."""
    array = np.asarray(array)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _axes(axis, ndim):
    return tuple(range(ndim)) if axis is None else tuple(a % ndim for a in np.atleast_1d(axis))


@dataclass
class Rows:
    """Rows of scores, their maximum, denominator and softmax; `axes` are kept with size 1."""

    scores: np.ndarray
    where: np.ndarray
    m: np.ndarray
    d: np.ndarray
    y: np.ndarray
    axes: tuple[int, ...]

    def sum(self, terms: np.ndarray) -> np.ndarray:
        return np.sum(terms, self.axes, keepdims=True)

    @property
    def distance(self) -> np.ndarray:
        """|s - max|, and 0 for an entry without weight, whose exponent is not rounded."""
        with np.errstate(invalid="ignore"):
            return np.where(self.y > 0, np.abs(self.scores - self.m), 0.0)


def rows(x, axis=-1, where=None, scale=None) -> Rows:
    """Computes the softmax of rows with its intermediate results."""
    x = to64(x)
    where = np.ones(x.shape, bool) if where is None else np.asarray(where)
    x, where = np.broadcast_arrays(x, where)
    axes = _axes(axis, x.ndim)
    with np.errstate(all="ignore"):
        scores = np.where(where, x if scale is None else x * np.float64(scale), -np.inf)
        m = np.max(scores, axes, keepdims=True, initial=-np.inf)
        weights = np.exp(scores - m)
        d = np.sum(weights, axes, keepdims=True, where=where)
        y = np.where(where, weights / d, 0.0)
    return Rows(scores, where, m, d, y, axes)


def softmax(x, axis=-1, where=None, scale=None) -> Truth:
    r = rows(x, axis, where, scale)
    return Truth(r.y, (8 + 3 * r.distance) * EPS * r.y + TINY)


def log_softmax(x, axis=-1, where=None, scale=None) -> Truth:
    r = rows(x, axis, where, scale)
    with np.errstate(all="ignore"):
        shifted, log_d = r.scores - r.m, np.log(r.d)
        value = np.where(r.where, shifted - log_d, -np.inf)
        # The difference itself is rounded, and d errs by a few roundings relative to itself.
        terms = np.where(np.isfinite(value), np.abs(shifted) + np.abs(log_d) + 1, 0.0)
    return Truth(value, 8 * EPS * terms + TINY)


def logsumexp(x, axis=None, where=None, scale=None, *, keepdims=False) -> Truth:
    r = rows(x, axis, where, scale)
    with np.errstate(all="ignore"):
        infinite = np.isinf(r.m)
        value = np.where(infinite, r.m, r.m + np.log(r.d))
        terms = np.where(infinite, 0.0, np.abs(r.m) + np.abs(np.log(r.d)) + 1)
    budget = 8 * EPS * terms + TINY
    return Truth(value, budget) if keepdims else Truth(np.squeeze(value, r.axes), np.squeeze(budget, r.axes))


def softmax_derivative(x, t, axis=-1, where=None, scale=None, saved=np.float32) -> Truth:
    """Computes `scale * y * (t - sum(y * t))`, the tangent and the cotangent, for a `y` that was saved in the dtype `saved`."""
    r = rows(x, axis, where, scale)
    t = np.where(r.y > 0, to64(t), 0.0)
    factor = 1.0 if scale is None else np.float64(scale)
    value = factor * r.y * (t - r.sum(r.y * t))
    unit = (8 + 3 * r.distance) * EPS + half_unit(saved)
    error_of_y = unit * r.y + _half_subnormal(saved)
    terms = error_of_y * (np.abs(t) + r.sum(r.y * np.abs(t))) + r.y * r.sum(error_of_y * np.abs(t))
    return Truth(value, np.abs(factor) * terms + TINY)


def log_softmax_tangent(x, t, axis=-1, where=None, scale=None) -> Truth:
    r = rows(x, axis, where, scale)
    t = _seen(r, t, scale)
    unit = (8 + 3 * r.distance) * EPS
    value = np.where(r.where, t - r.sum(r.y * t), 0.0)
    return Truth(value, np.where(r.where, 4 * EPS * np.abs(t) + r.sum(unit * r.y * np.abs(t)), 0.0) + TINY)


def log_softmax_cotangent(x, c, axis=-1, where=None, scale=None) -> Truth:
    r = rows(x, axis, where, scale)
    c = _seen(r, c, scale)
    unit = (8 + 3 * r.distance) * EPS
    value = np.where(r.where, c - r.y * r.sum(c), 0.0)
    return Truth(value, np.where(r.where, 4 * EPS * np.abs(c) + unit * r.y * r.sum(np.abs(c)), 0.0) + TINY)


def logsumexp_cotangent(x, c, axis=None, where=None, scale=None) -> Truth:
    r = rows(x, axis, where, scale)
    c = np.expand_dims(to64(c), r.axes) * (1.0 if scale is None else np.float64(scale))
    return Truth(r.y * c, (8 + 3 * r.distance) * EPS * r.y * np.abs(c) + TINY * np.maximum(1, np.abs(c)))  # y may be flushed


def _seen(r: Rows, t, scale):
    return np.where(r.where, to64(t), 0.0) * (1.0 if scale is None else np.float64(scale))


def half_unit(dtype) -> float:
    """Returns half a unit in the last place, relative; 0 for float32 and float64, whose rounding is in the budget."""
    dtype = jnp.dtype(dtype)
    return 0.0 if dtype.itemsize >= 4 else float(ml_dtypes.finfo(dtype).eps) / 2


def error(actual, truth: Truth) -> float:
    """Returns the largest fraction of the budget that `actual` uses; infinite if it is NaN or infinite and should not be."""
    dtype = np.asarray(actual).dtype
    with np.errstate(over="ignore"):
        rounded = to64(truth.value.astype(dtype))
    value = np.where(np.isinf(rounded), rounded, truth.value)  # a number that the dtype cannot hold is infinite
    actual = to64(actual)
    assert actual.shape == value.shape, f"shape {actual.shape}, should be {value.shape}"
    if actual.size == 0:
        return 0.0
    # Half a unit of a 16-bit result: relative to its magnitude, and absolute below the smallest normal number.
    with np.errstate(all="ignore"):
        budget = truth.budget + half_unit(dtype) * np.maximum(np.abs(value), _smallest_normal(dtype))
        same = (actual == value) | (np.isnan(actual) & np.isnan(value))
        fraction = np.where(same, 0.0, np.abs(actual - value) / budget)
    return float(np.max(np.where(np.isnan(fraction), np.inf, fraction)))


def _half_subnormal(dtype) -> float:
    """Returns the largest number that is rounded to zero, or flushed to zero in float32's range of exponents."""
    return 2.0**-25 if jnp.dtype(dtype) == jnp.float16 else TINY


def _smallest_normal(dtype) -> float:
    return 0.0 if dtype.itemsize >= 4 else float(ml_dtypes.finfo(dtype).smallest_normal)
