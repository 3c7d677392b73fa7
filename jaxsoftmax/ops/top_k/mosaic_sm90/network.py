"""The k largest of many numbers, in decreasing order, by networks of comparisons: which numbers meet, whatever they are.

Functions are written out for every number, without branches: `Operations` makes what a kernel computes, or computes it. Lists
are merged by Batcher's odd-even merge, of which only what the first k results need is made. So the largest that is dropped
costs one operation more.

Source: K. E. Batcher 1968, "Sorting networks and their applications".
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Operations:
    """Of numbers that are ordered, one in each lane.

    Attributes:
      maximum, minimum: of two.
      tells_dropped: whether the largest number that is dropped is wanted.
    """

    maximum: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    tells_dropped: bool = True


@dataclass(frozen=True)
class Found:
    """Of a row, or of a part of it: its largest numbers in decreasing order, and the largest that was dropped.

    `dropped` is None where nothing was, or it is not wanted.
    """

    largest: list[Any]
    dropped: Any = None


def largest(ops: Operations, numbers: Iterable[Any], k: int) -> Found:
    """Of all numbers, which are made in their order, as late as they are needed."""
    found, waiting = Found([]), []
    for number in numbers:
        waiting.append(number)
        if len(waiting) == k:
            found, waiting = merged(ops, found, Found(in_order(ops, waiting)), k), []
    return merged(ops, found, Found(in_order(ops, waiting)), k)


def merged(ops: Operations, a: Found, b: Found, k: int) -> Found:
    """Of two lists."""
    found = _first(ops, a.largest, b.largest, k + ops.tells_dropped)
    dropped = [number for number in (a.dropped, b.dropped, *found[k:]) if number is not None]
    return Found(found[:k], functools.reduce(ops.maximum, dropped) if dropped else None)


def in_order(ops: Operations, numbers: Sequence[Any]) -> list[Any]:
    """All numbers, the largest first."""
    if len(numbers) < 2:
        return list(numbers)
    half = 1 << (len(numbers) - 1).bit_length() - 1
    return _first(ops, in_order(ops, numbers[:half]), in_order(ops, numbers[half:]), len(numbers))


def _first(ops, a, b, count):
    """The first `count` of two lists in decreasing order, or all.

    The entries at even places of both lists are merged, and so are those at odd places. Of these two lists each entry but the
    first has to be compared with one of the other alone.
    """
    if not a or not b or not count:
        return [*a, *b][:count]
    if len(a) == len(b) == 1:
        pair = ops.maximum(*a, *b), ops.minimum(*a, *b) if count > 1 else None
        return list(pair[:count])
    even, odd = _first(ops, a[::2], b[::2], count // 2 + 1), _first(ops, a[1::2], b[1::2], count // 2)
    found = even[:1]
    for i in range(1, max(len(even), len(odd) + 1)):
        met = [*even[i : i + 1], *odd[i - 1 : i]]
        if len(met) == 2:
            met = [ops.maximum(*met), ops.minimum(*met) if len(found) + 1 < count else None]
        found += met[: count - len(found)]
    return found
