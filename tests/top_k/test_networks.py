"""The networks that find the largest numbers, computed by NumPy, for many rows of numbers at a time."""

import numpy as np
import pytest

from jaxsoftmax.ops.top_k.mosaic_sm90 import network

COMPARATORS = network.Comparators(np.maximum, np.minimum)


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 16, 20, 33, 64])
@pytest.mark.parametrize("k", [1, 2, 3, 5, 8, 11, 16])
def test_the_largest_are_found_in_order(k, count):
    rows = np.random.default_rng(count).permuted(np.tile(np.arange(count), (200, 1)), axis=1)
    found = network.largest(COMPARATORS, iter(rows.T), k)
    expected = -np.sort(-rows, 1)
    np.testing.assert_array_equal(np.stack(found.largest, 1), expected[:, :k])
    assert (found.dropped is None) == (count <= k)
    if found.dropped is not None:
        np.testing.assert_array_equal(found.dropped, expected[:, k])


@pytest.mark.parametrize("sizes", [(1, 1), (8, 7), (3, 8), (0, 4), (16, 16), (1, 8)], ids=str)
def test_lists_of_zeros_and_ones_are_merged(sizes):
    """A network that puts all lists of zeros and ones in order does so with any."""
    for ones in np.ndindex(sizes[0] + 1, sizes[1] + 1):
        a, b = ([1] * of + [0] * (size - of) for of, size in zip(ones, sizes, strict=True))
        for k in range(1, sum(sizes) + 1):
            found = network.merge(COMPARATORS, network.Largest(a), network.Largest(b), k)
            expected = sorted(a + b, reverse=True)
            assert found.largest == expected[:k]
            assert found.dropped == (expected[k] if k < len(expected) else None)


def test_nothing_is_computed_that_is_not_needed():
    """Operations for the 8 largest of 32 numbers: 19 comparisons for each of four lists of 8, and 32 operations for a merge."""

    class Counted:
        operations = 0

        def __call__(self, a, b):
            self.operations += 1
            return max(a, b) if self.is_maximum else min(a, b)

        def __init__(self, is_maximum):
            self.is_maximum = is_maximum

    def count(tells_dropped):
        maximum, minimum = Counted(True), Counted(False)
        network.largest(network.Comparators(maximum, minimum, tells_dropped), range(32), 8)
        return maximum.operations + minimum.operations

    assert count(False) == 4 * 2 * 19 + 3 * 32
    assert count(True) == count(False) + 3 + 2
