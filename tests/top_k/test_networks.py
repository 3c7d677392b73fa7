"""The networks that find the largest numbers of short rows, computed by NumPy, a number for each of 32 lanes."""

import numpy as np
import pytest

from jaxsoftmax.ops.top_k import _networks

LANES = np.arange(32)
OPERATIONS = _networks.Operations(
    np.maximum,
    np.minimum,
    lambda bit, a, b: np.where(LANES & bit, a, b),
    lambda a, bit: a[LANES ^ bit],
)


@pytest.mark.parametrize(
    ("cols", "k", "lanes"),
    [(64, 8, 4), (64, 8, 1), (64, 1, 4), (60, 8, 4), (8, 2, 2), (8, 8, 2), (8, 16, 2), (256, 8, 16), (512, 16, 32), (40, 4, 2)],
)
def test_each_lane_has_the_largest_of_its_row(cols, k, lanes):
    rows = np.random.default_rng(cols).permutation(32 * cols).reshape(32, cols) + 1
    padded = np.zeros((32, -(-cols // lanes) * lanes), int)
    padded[:, :cols] = rows

    def elements(number):
        """What each lane has of the row of its group with this number."""
        of_group = LANES // lanes * lanes + number
        return [padded[of_group, column + LANES % lanes] for column in range(0, padded.shape[1], lanes)]

    found = _networks.largest_of_rows(OPERATIONS, [lambda n=n: elements(n) for n in range(lanes)], k)
    expected = -np.sort(-rows, 1)
    largest = np.stack(found.largest, 1)
    np.testing.assert_array_equal(largest[:, : min(k, cols)], expected[:, :k])
    if cols > largest.shape[1]:
        np.testing.assert_array_equal(found.dropped, expected[:, largest.shape[1]])
