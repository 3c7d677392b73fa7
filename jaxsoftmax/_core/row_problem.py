"""Rows of arrays: what a kernel over them has to compute, from shapes and dtypes alone."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from jaxsoftmax._core.problem import Problem


@dataclass(frozen=True)
class RowProblem:
    """Rows of arrays of one shape, which kernels see as `[outer, cols, inner]`, with rows along `cols`.

    Axes of size 1 count nowhere: rows along axes 1 and 3 of `[4, 65536, 8, 1]` are `[4, 65536, 8]`.

    The fields after `keeps_scores` follow from those before.
    """

    shape: tuple[int, ...]  # of the arrays
    axes: tuple[int, ...]  # of a row
    read: tuple[int, ...] = ()  # bytes of an element of each operand that is as large as the rows
    written: tuple[int, ...] = ()  # bytes of an element of each result that is as large as the rows
    has_mask: bool = False  # True if there is a mask along the columns
    needs_end: bool = False  # True if the kernel must know which elements lie beyond the end of a row
    # What a result needs of its whole row; "exponents" are the state and the sum of weights times their exponents.
    reduces: Literal["state", "exponents", "sum", "nothing"] = "state"
    n_exchanges: int = 1  # number of times that the kernel merges or sums over the warps of a row
    exchanged: int = 2  # most numbers that a warp tells the others of each row at one time
    is_read_again: bool = False  # True if sums over the elements need the states of whole rows
    fits_registers: bool = True  # False if threads that hold long rows in registers need so many that few blocks run at a time
    keeps_scores: bool = False  # True if results are made of the scores, which then stay beside their exponentials

    members: tuple[range, range, range] = field(init=False)  # axes of the arrays that form `outer`, `cols` and `inner`
    outer: int = field(init=False)
    cols: int = field(init=False)
    inner: int = field(init=False)
    widest: int = field(init=False)  # bytes of the widest element
    is_masked: bool = field(init=False)  # True if a kernel leaves out some elements that it loads

    def __post_init__(self):
        shape, ndim = self.shape, len(self.shape)
        along = [axis for axis in self.axes if shape[axis] != 1]
        first, end = (min(along), max(along) + 1) if along else (ndim, ndim)
        vars(self).update(
            members=(range(first), range(first, end), range(end, ndim)),
            outer=math.prod(shape[:first]),
            cols=entries(shape, self.axes),
            inner=math.prod(shape[end:]),
            widest=max((*self.read, *self.written), default=0),
            is_masked=self.has_mask or self.needs_end,
        )

    @property
    def n_rows(self) -> int:
        return self.outer * self.inner

    @functools.cached_property
    def row_shape(self) -> tuple[int, ...]:
        """Shape of an array with one entry for each row."""
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.shape))

    def indexed(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Calls `indexed` for each of `outer`, `cols` and `inner`."""
        return tuple(indexed(shape, self.shape, members) for members in self.members)

    def refused(self, most_rows: int) -> str | None:
        """Says why no kernel sees these rows as `[outer, cols, inner]`, or returns None if one can."""
        if any(axis not in self.axes and self.shape[axis] != 1 for axis in self.members[1]):
            return f"the axes must be neighbours, got axes {self.axes} of shape {self.shape}"
        if not 1 <= self.cols < 2**30:
            return f"a row must have from 1 to {2**30 - 1} entries, got {self.cols}"
        if not 1 <= self.outer * self.inner <= most_rows:
            return f"there must be from 1 to {most_rows} rows, got {self.outer * self.inner}"
        return None


@dataclass(frozen=True, eq=False)
class RowwiseProblem(Problem):
    """A problem over the rows of arrays."""

    @functools.cached_property
    def rows(self) -> RowProblem:
        """The rows, and what a kernel reads and writes of them."""
        raise NotImplementedError


def entries(shape: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """Returns the number of entries of an array along these axes."""
    return math.prod(shape[axis] for axis in axes)


def is_along(array, axes: tuple[int, ...]) -> bool:
    """Tells whether an array, or None, has several entries along the axes of a row."""
    return array is not None and entries(array.shape, axes) != 1


def indexed(shape: Sequence[int], whole: Sequence[int], members: Iterable[int]) -> tuple[int, ...]:
    """Returns the arithmetic that turns an index along merged axes into an offset in an array that may have size 1 there.

    Args:
      shape: shape of the array, which has the size of `whole` or 1 along each axis.
      whole: shape of the rows.
      members: neighbouring axes, which the index counts through as if they were one.

    Returns:
      Triples `divisor, modulus, stride`, one behind the other. The offset is the sum over them of
      `index // divisor % modulus * stride`; a modulus of 0 takes no remainder. Neighbouring axes that are whole share a triple.
    """
    triples, divisor, is_open = [], 1, False
    for axis in reversed([*members]):
        if whole[axis] == 1:
            continue
        if shape[axis] != 1:
            if is_open:
                triples[-1][1] *= whole[axis]
            else:
                triples.append([divisor, whole[axis], math.prod(shape[axis + 1 :])])
        is_open = shape[axis] != 1
        divisor *= whole[axis]
    if triples and triples[-1][0] * triples[-1][1] == divisor:
        triples[-1][1] = 0
    return tuple([number for triple in triples for number in triple])
