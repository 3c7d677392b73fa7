"""The k largest of many numbers, in decreasing order, by networks of comparisons: which numbers meet does not depend on them.

The functions write a comparison out for every number, without branches. `Comparators` makes what a kernel computes, or computes
it. Batcher's odd-even merge merges lists; only the part is made that the first k results depend on. To merge the 8 largest
numbers with 8 more takes 32 operations, and the largest number that is dropped takes one more. ptxas turns some pairs of
operations into one of three operands.

Source: K. E. Batcher 1968, "Sorting networks and their applications".
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Comparators:
    """The operations of a network: the larger of two numbers, one in each lane, and the smaller one."""

    maximum: Callable[[Any, Any], Any]
    minimum: Callable[[Any, Any], Any]
    tells_dropped: bool = True  # True if the largest number that is dropped is wanted


@dataclass(frozen=True)
class Largest:
    """The largest numbers of a row, or of a part of it, in decreasing order."""

    largest: list[Any]
    dropped: Any = None  # the largest number that was dropped; None if none was, or it is not wanted


def largest(comparators: Comparators, numbers: Iterable[Any], k: int) -> Largest:
    """Finds the k largest of all numbers, which are made in their order, as late as they are needed."""
    result, waiting = Largest([]), []
    for number in numbers:
        waiting.append(number)
        if len(waiting) == k:
            result, waiting = merge(comparators, result, Largest(in_order(comparators, waiting)), k), []
    return merge(comparators, result, Largest(in_order(comparators, waiting)), k)


def merge(comparators: Comparators, a: Largest, b: Largest, k: int) -> Largest:
    """Merges two lists, and drops all numbers except k."""
    result = _first(comparators, a.largest, b.largest, k + comparators.tells_dropped)
    dropped = [number for number in (a.dropped, b.dropped, *result[k:]) if number is not None]
    return Largest(result[:k], functools.reduce(comparators.maximum, dropped) if dropped else None)


def in_order(comparators: Comparators, numbers: Sequence[Any]) -> list[Any]:
    """Sorts all numbers, the largest first."""
    if len(numbers) < 2:
        return list(numbers)
    half = 1 << (len(numbers) - 1).bit_length() - 1
    return _first(comparators, in_order(comparators, numbers[:half]), in_order(comparators, numbers[half:]), len(numbers))


def _first(comparators, a, b, count):
    """Returns the first `count` numbers of two lists in decreasing order, or all.

    The entries at even places of both lists are merged, and so are those at odd places. Each entry of these two lists except
    the first has to be compared with one entry of the other list alone.
    """
    if not a or not b or not count:
        return [*a, *b][:count]
    if len(a) == len(b) == 1:
        pair = comparators.maximum(*a, *b), comparators.minimum(*a, *b) if count > 1 else None
        return list(pair[:count])
    even = _first(comparators, a[::2], b[::2], count // 2 + 1)
    odd = _first(comparators, a[1::2], b[1::2], count // 2)
    result = even[:1]
    for i in range(1, max(len(even), len(odd) + 1)):
        pair = [*even[i : i + 1], *odd[i - 1 : i]]
        if len(pair) == 2:
            pair = [comparators.maximum(*pair), comparators.minimum(*pair) if len(result) + 1 < count else None]
        result += pair[: count - len(result)]
    return result
