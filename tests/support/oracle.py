"""The truth in float64 and its budget, which `python -m jaxsoftmax --check` shares, and a comparison of float64 results."""

import jax
import numpy as np

from jaxsoftmax._report.truth import *  # noqa: F403


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
