"""The truth of top-k and samples, which `python -m jaxsoftmax --check` shares, and a comparison of results with it."""

import jax
import numpy as np

from jaxsoftmax._report.truth.top_k import *  # noqa: F403
from jaxsoftmax._report.truth.top_k import filtered

from .. import oracle


def bits(array) -> np.ndarray:
    """Returns the bits of numbers of any dtype, which tell apart NaN and zeros of both signs."""
    array = np.asarray(array)
    return array.view(f"u{array.dtype.itemsize}")


def probabilities(x, **options) -> np.ndarray:
    """Returns the distribution of rows that `filtered` leaves of the softmax."""
    weights = filtered(x, **options).weights
    return weights / weights.sum(-1, keepdims=True)


def assert_same(actual, expected) -> None:
    """Fails unless two trees have the same indices, and numbers that differ in no more than rounding in float64."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    for one, other in pairs:
        if np.asarray(one).dtype == np.int32:
            np.testing.assert_array_equal(one, other)
    numbers = [pair for pair in pairs if np.asarray(pair[0]).dtype != np.int32]
    oracle.assert_same_in_float64([one for one, _ in numbers], [other for _, other in numbers])
