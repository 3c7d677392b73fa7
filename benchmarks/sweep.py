"""The cells of softmax over widths that nobody chose: how fast a row is that no table and no test has in mind.

Forward, the Jacobian product of softmax, and logsumexp, of 2^27 elements each. There are many cells, so peers are few, and the
bits of calls with a few rows, for each of which a kernel is compiled anew, are left to the tests.
"""

from collections.abc import Iterator
from dataclasses import replace

from benchmarks.cells import Cell
from benchmarks.softmax import DTYPES, ELEMENTS, copy_cell, forward_cell, jacobian_cell, logsumexp_cell, shape_of, without

# Drawn once, log-uniformly from 64 to 2^20, and never again. With `random.Random(18)`, `int(64 * 2 ** (14 * random()))` is
# rounded down to a multiple of 1, 2, 4, 8 or 16, in turn, and of the first four up to the next one where that is an even
# multiple. Powers of two, and widths that are there already, are drawn anew.
# fmt: off
WIDTHS = (
    69, 136, 151, 172, 195, 264, 270, 284, 302, 371, 440, 453, 462, 476, 540, 622,
    644, 736, 840, 1152, 1200, 1490, 1644, 1730, 3323, 4432, 5468, 6578, 6730, 6770, 7392, 7731,
    10618, 11417, 11824, 12493, 12656, 17040, 19312, 20289, 21608, 28872, 29239, 34544, 39238, 44684, 45910, 48816,
    49928, 52729, 59656, 74216, 79992, 132936, 168476, 189976, 192892, 213080, 285520, 306492, 439348, 496468, 609133, 828138,
)
# fmt: on


def cells(elements: int = ELEMENTS) -> list[Cell]:
    """All cells: copies, with which the others are compared, and those of each dtype and width."""
    measured = [_quick(cell) for dtype in DTYPES for cols in WIDTHS for cell in _cells_of(dtype, shape_of(elements, cols))]
    return [*(copy_cell(dtype, elements) for dtype in DTYPES), *measured]


def _cells_of(dtype: str, shape: tuple[int, int]) -> Iterator[Cell]:
    yield forward_cell("softmax", dtype, shape)
    yield jacobian_cell(dtype, shape)
    yield logsumexp_cell(dtype, shape)


def _quick(cell: Cell) -> Cell:
    return replace(without(cell, "torch", "torch.compile", "sum"), fewer=lambda inputs, output: [])
