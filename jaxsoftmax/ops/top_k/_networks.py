"""The k largest numbers of many short rows, by networks of comparisons: which numbers meet, whatever they are.

A group of lanes shares as many rows as it has lanes. Of each row a lane sorts its own elements and drops all but the k largest.
Then lanes exchange lists in pairs, each keeping half of the rows, and merge, until each has one row, whose list is sorted.

All functions are written out for every element, without branches: `Operations` makes what a kernel computes, or computes it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operations:
    """Of unsigned numbers, one in each lane.

    Attributes:
      maximum, minimum: of two.
      select: `select(bit, a, b)`: a in lanes whose index has this bit, b in others.
      exchange: `exchange(a, bit)`: what the lane has whose index differs in this bit.
      tells_dropped: whether the largest number that is dropped is wanted.
    """

    maximum: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    select: Callable[[int, Any, Any], Any]
    exchange: Callable[[Any, int], Any]
    tells_dropped: bool = True


@dataclass(frozen=True)
class Found:
    """Of a row, or of a part of it: its largest numbers in decreasing order, and the largest that was dropped.

    `dropped` is None where nothing was, or it is not wanted.
    """

    largest: list[Any]
    dropped: Any = None


def largest_of_rows(ops: Operations, rows: Sequence[Callable[[], list[Any]]], k: int) -> Found:
    """For each lane of a group the row of its index, of `rows`, which make a lane's elements; they are as many as the lanes.

    `k` is a power of two. Rows are made in their order, as late as they are needed.
    """
    if len(rows) == 1:
        return _largest(ops, rows[0](), k)
    half = len(rows) // 2
    return _exchanged(ops, largest_of_rows(ops, rows[:half], k), largest_of_rows(ops, rows[half:], k), half, k)


def _largest(ops, elements, k):
    """Of one lane's elements."""
    size = min(k, 1 << (len(elements) - 1).bit_length())
    parts = [Found(_sorted(ops, elements[start : start + size])) for start in range(0, len(elements), size)]
    return functools.reduce(lambda a, b: _merged(ops, a, b, k), parts)


def _exchanged(ops, first, second, bit, k):
    """Lanes whose index has the bit keep the second row, and get what the others have of it; these keep the first one."""

    def pairs(a, b):
        """What is kept, and what is received of the other lane."""
        return ops.select(bit, b, a), ops.exchange(ops.select(bit, a, b), bit)

    kept, received = zip(*map(pairs, first.largest, second.largest), strict=True)
    dropped = (None, None)
    if first.dropped is not None:
        dropped = pairs(first.dropped, second.dropped)
    return _merged(ops, Found(list(kept), dropped[0]), Found(list(received), dropped[1]), k)


def _merged(ops, a, b, k):
    """The k largest of two, of each of which there are as many, or of the second one fewer."""
    dropped = [part.dropped for part in (a, b) if part.dropped is not None]
    if len(a.largest) + len(b.largest) <= k:  # of as many
        together = [*a.largest, *reversed(b.largest)]
    else:  # the least of one beside the largest of the other, of which the larger ones are a bitonic sequence
        pairs = list(zip(reversed(a.largest), b.largest, strict=False))
        dropped += [ops.minimum(*pair) for pair in pairs] if ops.tells_dropped else []
        together = [*a.largest[: len(a.largest) - len(pairs)], *reversed([ops.maximum(*pair) for pair in pairs])]
    largest = _bitonic(ops, together)
    return Found(largest, _fold(ops.maximum, dropped))


def _fold(function, values):
    """As a tree: what is folded first does not wait for what is folded last."""
    values = list(values)
    while len(values) > 1:
        values = [function(*values[i : i + 2]) if i + 1 < len(values) else values[i] for i in range(0, len(values), 2)]
    return values[0] if values else None


def _bitonic(ops, values):
    """In decreasing order, of a bitonic sequence whose length is a power of two."""
    values, distance = list(values), len(values) // 2
    while distance:
        for i in range(len(values)):
            if not i & distance:
                _compare(ops, values, i, i + distance)
        distance //= 2
    return values


def _sorted(ops, values):
    """In decreasing order, by Batcher's odd-even merges, for any length.

    Source: K. E. Batcher 1968, "Sorting networks and their applications".
    """
    values, count = list(values), len(values)
    p = 1
    while p < count:
        distance = p
        while distance:
            for start in range(distance % p, count - distance, 2 * distance):
                for i in range(start, min(start + distance, count - distance)):
                    if i // (2 * p) == (i + distance) // (2 * p):
                        _compare(ops, values, i, i + distance)
            distance //= 2
        p *= 2
    return values


def _compare(ops, values, i, j):
    values[i], values[j] = ops.maximum(values[i], values[j]), ops.minimum(values[i], values[j])
