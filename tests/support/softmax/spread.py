"""Forces each way in which Triton's kernels spread rows over programs on small rows."""

import numpy as np

from jaxsoftmax._core.target import Target
from jaxsoftmax._triton import row_launch

from .. import cases

LITTLE = {
    "_NARROW": 0,
    "_SEVERAL": {1: 1, 2: 1},
    "_WHOLE": dict.fromkeys(row_launch._WHOLE, 64),
    "_TWICE": 128,
    "_WARPS_OF_TWO": {"state": 2, "sum": 2},
    "_SIDE_BY_SIDE": 4,
    "_WHOLE_SIDE_BY_SIDE": 64,
    "_LONG_SIDE_BY_SIDE": (64, 2),
}
SLICES = {"_WARPS_OF_TWO": {}, "_LONG": dict.fromkeys(row_launch._LONG, (64, 2, 2)), "_SLICES": {"along": 6, "across": 16}}
ROWS = {"tiles": {}, "twice": LITTLE, "slices": LITTLE | SLICES}  # how rows are spread: thresholds


def spreading(way, monkeypatch):
    """Sets thresholds such that all rows are spread in one way, and returns the target for it."""
    for name, value in ROWS[way].items():
        monkeypatch.setattr(row_launch, name, value)
    return Target("cuda", (8, 0), 108, 163 << 10)


def stacked(shape, dtype, kinds=None):
    """Returns inputs of some kinds, or of all, along one more axis in front."""
    arrays = cases.inputs(shape, dtype)
    return np.stack([arrays[kind] for kind in kinds or arrays])
