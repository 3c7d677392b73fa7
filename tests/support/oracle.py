"""The truth in float64 and its budget, which `python -m jaxsoftmax --check` shares, and a comparison of float64 results."""

import jax
import numpy as np

from jaxsoftmax._report.truth import *  # noqa: F403
from jaxsoftmax._report.truth import EPS, TINY, Truth, rows, to64


def denominator(x, axis=-1, where=None, scale=None) -> Truth:
    """Returns the truth of the sum of the weights, the `d` of a state. A weight errs as in softmax. `axis` keeps size 1."""
    r = rows(x, axis, where, scale)
    return Truth(r.d, r.d * r.sum((8 + 3 * r.distance) * EPS * r.y) + TINY)


def logsumexp_tangent(x, t, axis=None, where=None, scale=None) -> Truth:
    """Returns the truth of the tangent of logsumexp: the mean of `scale * t` by the weights."""
    r = rows(x, axis, where, scale)
    t = np.where(r.where, to64(t), 0.0) * (1.0 if scale is None else np.float64(scale))
    unit = (8 + 3 * r.distance) * EPS
    return Truth(np.squeeze(r.sum(r.y * t), r.axes), np.squeeze(r.sum(unit * r.y * np.abs(t)), r.axes) + TINY)


def assert_same_in_float64(actual, expected) -> None:
    """Fails unless two float64 computations of one value, trees of arrays, differ in no more than rounding.

    Each step errs by 2^-53 of its terms. 2^-30 of the largest value, or of 1 where terms of that size cancel, leaves room for a
    thousand steps on terms that are a thousand times what they add up to, and is far less than what a wrong term makes.
    """

    def check(actual, expected):
        actual, expected = np.asarray(actual), np.asarray(expected)
        assert actual.dtype == expected.dtype
        assert actual.dtype in (np.float64, np.complex128)
        largest = np.max(np.abs(expected), initial=1, where=np.isfinite(expected))
        np.testing.assert_allclose(actual, expected, rtol=0, atol=2.0**-30 * largest)

    jax.tree.map(check, actual, expected)
