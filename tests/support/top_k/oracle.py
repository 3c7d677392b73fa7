"""The truth of top-k and samples, which `python -m jaxsoftmax --check` shares, and a comparison of results with it."""

import jax
import numpy as np

from jaxsoftmax._report.truth.top_k import *  # noqa: F403

from .. import oracle


def assert_same(actual, expected) -> None:
    """Fails unless two trees have the same indices, and numbers that differ in no more than rounding in float64."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True))
    for one, other in pairs:
        if np.asarray(one).dtype == np.int32:
            np.testing.assert_array_equal(one, other)
    numbers = [pair for pair in pairs if np.asarray(pair[0]).dtype != np.int32]
    oracle.assert_same_in_float64([one for one, _ in numbers], [other for _, other in numbers])
