"""Describes the rows that a kernel reduces, from shapes and dtypes alone."""

import functools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

# True if there is a mask along the columns, "end" if the kernel must know what is beyond the end of a row.
Masked = Literal[False, True, "end"]


@dataclass(frozen=True)
class RowProblem:
    """Rows of arrays of one shape, which kernels see as `[outer, cols, inner]`. A row runs along `cols`.

    Axes of size 1 do not count: for rows along axes 1 and 3, an array of `[4, 65536, 8, 1]` is `[4, 65536, 8]`.

    Attributes:
      shape: shape of the arrays.
      axes: axes of a row.
      read: bytes of one element, for each operand that is as large as the rows.
      written: bytes of one element, for each result that is as large as the rows.
      has_mask: True if there is a mask along the columns.
      needs_end: True if the kernel must know what is beyond the end of a row.
    """

    shape: tuple[int, ...]
    axes: tuple[int, ...]
    read: tuple[int, ...] = ()
    written: tuple[int, ...] = ()
    has_mask: bool = False
    needs_end: bool = False

    @functools.cached_property
    def members(self) -> tuple[range, range, range]:
        """The axes of the arrays that make up `outer`, `cols` and `inner`."""
        long_axes = [axis for axis in self.axes if self.shape[axis] != 1]
        first, end = (min(long_axes), max(long_axes) + 1) if long_axes else (len(self.shape), len(self.shape))
        return range(first), range(first, end), range(end, len(self.shape))

    @functools.cached_property
    def outer(self) -> int:
        return math.prod(self.shape[axis] for axis in self.members[0])

    @functools.cached_property
    def cols(self) -> int:
        return entries(self.shape, self.axes)

    @functools.cached_property
    def inner(self) -> int:
        return math.prod(self.shape[axis] for axis in self.members[2])

    @property
    def rows(self) -> int:
        return self.outer * self.inner

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of an array with one entry for each row."""
        return tuple(1 if axis in self.axes else size for axis, size in enumerate(self.shape))

    @property
    def widest(self) -> int:
        """Bytes of the widest element."""
        return max((*self.read, *self.written))

    @property
    def masked(self) -> Masked:
        return True if self.has_mask else "end" if self.needs_end else False

    def indexed(self, shape: Sequence[int]) -> tuple[tuple[int, ...], ...]:
        """Returns the triples of the function `indexed` for each of `outer`, `cols` and `inner`."""
        return tuple(indexed(shape, self.shape, members) for members in self.members)

    def unsupported(self, most_rows: int) -> str | None:
        """Returns the reason, in words, why kernels cannot see these rows as `[outer, cols, inner]`, or None."""
        if any(axis not in self.axes and self.shape[axis] != 1 for axis in self.members[1]):
            return f"the axes must be neighbours, got axes {self.axes} of shape {self.shape}"
        if not 1 <= self.cols < 2**30:
            return f"a row must have from 1 to {2**30 - 1} entries, got {self.cols}"
        if not 1 <= self.rows <= most_rows:
            return f"there must be from 1 to {most_rows} rows, got {self.rows}"
        return None


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
