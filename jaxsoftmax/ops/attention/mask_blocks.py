"""The blocks of scores that a mask function leaves empty, in part, or whole: computed before the kernels run.

The program of the function runs on whole blocks instead of pairs. A value that depends on queries alone, on keys alone, or on
`query_index - key_index` alone is computed at each of these positions, exactly; table loads are among these values. Where such
values meet, each becomes an interval, the smallest and the largest value of each block, and the program goes on with intervals.
No array has an element for each pair of a query and a key.

Values that are known while tracing are numpy arrays, and values that depend on operands are jax arrays. A mask of positions
alone thus costs nothing at run time. An interval holds every value that may occur, so that a block counts as empty or whole
only if it is. What an operation without a rule computes is unknown.
"""

import enum
import functools
import itertools
import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Literal

from jaxsoftmax.ops.attention.operands import AXES
from jaxsoftmax.ops.attention.score_functions import (
    TracedFunction,
    apply,
    inner_program,
    map_over_axes,
    needed_eqns,
    wide_tables,
)

EMPTY, PARTIAL, FULL = 0, 1, 2
BLOCK = 64  # queries, and keys, of a block of a `BlockMask`: those that a warpgroup multiplies at a time

# Pairs of blocks of all batch entries and heads, above which blocks are joined: their intervals would fill memory.
LARGEST_GRID = 2**22


def classify(
    function: TracedFunction, lengths: tuple[int, int], block_q: int, block_kv: int, *, has_offset: bool = False
) -> np.ndarray:
    """Finds while tracing which blocks a mask function leaves empty or whole, for all batch entries and heads together.

    Args:
      function: the mask function.
      lengths: numbers of queries and of keys.
      block_q: queries of a block. The last block may have fewer.
      block_kv: keys of a block.
      has_offset: True if an operand says where queries begin, or numbers tokens, so that positions are unknown.

    Returns:
      int8 `[query_blocks, key_blocks]`: `EMPTY` if no query of the block sees a key of the block, `FULL` if each query sees
      each key, and else `PARTIAL`, as also where this is not known.
    """
    if 0 in lengths:
        return np.zeros([-(-length // block) for length, block in zip(lengths, (block_q, block_kv), strict=True)], np.int8)
    return _classified(function, tuple(lengths), block_q, block_kv, has_offset)


@functools.lru_cache(64)
def _classified(function, lengths, block_q, block_kv, has_offset):
    grid = _Grid(lengths, (block_q, block_kv), 1)
    numbers = _Blocks(*(np.full((1, 1, 1), x, np.int32) for x in (0, np.iinfo(np.int32).max)))
    positions = (None, None) if has_offset else (grid.index(Axis.ROWS), grid.index(Axis.COLUMNS))
    blocks = _Evaluator(grid).result(function, [*[None] * len(function.tables), numbers, numbers, *positions])
    low, high = (np.broadcast_to(x, (1, *grid.counts))[0].astype(np.int8) for x in (blocks.low, blocks.high))
    result = low + high
    result.flags.writeable = False  # others get it from the cache
    return result


def counts(
    function: TracedFunction,
    lengths: tuple[int, int],
    block_q: int,
    block_kv: int,
    *,
    by_keys: bool = False,
    has_offset: bool = False,
) -> np.ndarray | None:
    """Counts the blocks that are not known to be empty while tracing.

    Args:
      function: the mask function.
      lengths: numbers of queries and of keys.
      block_q: queries of a block.
      block_kv: keys of a block.
      by_keys: True to count query blocks of each key block.
      has_offset: as `classify` takes it.

    Returns:
      `[query_blocks]`, or `[key_blocks]` with `by_keys`. Tables may hide more blocks. None if no block is known to be empty.
    """
    factor = _joined(lengths, block_q, block_kv)
    seen = classify(function, lengths, factor * block_q, factor * block_kv, has_offset=has_offset) != EMPTY
    if seen.all():
        return None
    rows, cols = (-(-length // block) for length, block in zip(lengths, (block_q, block_kv), strict=True))
    if by_keys:
        seen, rows, cols = seen.T, cols, rows
    sizes = np.minimum(factor, cols - factor * np.arange(seen.shape[1]))
    return np.repeat(seen @ sizes, factor)[:rows]


def find_block_spans(
    function: TracedFunction,
    operands: Mapping[str, Any],
    lengths: tuple[int, int],
    block_q: int,
    block_kv: int,
    *,
    by_keys: bool = False,
) -> jax.Array:
    """Finds the range of key blocks that each query block can see through a mask function.

    Args:
      function: the mask function.
      operands: the operands of attention, by name. Types suffice, with a `query`, if the function reads positions alone.
      lengths: numbers of queries and of keys.
      block_q: queries of a block.
      block_kv: keys of a block.
      by_keys: True to find the range of query blocks that can see each key block.

    Returns:
      The array that `key_blocks.find_segment_spans` returns, `[*batch, query_blocks, 4]`, with batch axes of size 1 where
      nothing depends on them. It holds for all heads. A constant if the function depends on nothing but positions.
    """
    batch_axes = operands["query"].ndim - 3
    names, factor = operands_of(function, operands), _joined_for(function, operands, lengths, block_q, block_kv)

    def run(operands):  # the program of an inner function: `custom_partitioning` takes no other constants
        sizes = factor * block_q, factor * block_kv
        seen, whole = mark_blocks(function, operands, lengths, *sizes, batch_axes)
        seen, whole = seen.any(-3), whole.all(-3)
        counts = _Grid(tuple(lengths), sizes, 1).counts
        if by_keys:
            seen, whole, counts = seen.swapaxes(-1, -2), whole.swapaxes(-1, -2), counts[::-1]
        return _spans(seen, whole, *counts)

    spans = jax.jit(lambda operands: jnp.asarray(run(operands)))({name: operands[name] for name in names})
    if factor == 1:
        return spans
    rows, cols = (-(-length // block) for length, block in zip(lengths, (block_q, block_kv), strict=True))
    if by_keys:
        rows, cols = cols, rows
    return jnp.repeat(jnp.minimum(factor * spans, cols), factor, -2)[..., :rows, :]


def find_window(function: TracedFunction, lengths: tuple[Any, Any]) -> tuple[int, int] | None:
    """Finds the window that a mask function shows to each query, if it is one: kernels need no function then.

    Args:
      function: the mask function.
      lengths: numbers of queries and of keys, from position 0 on.

    Returns:
      Numbers of keys before and after its own position that a query sees. None unless the function depends on `query_index -
      key_index` alone, and is true for a range of it that includes 0.
    """
    depends_on_more = function.tables or not function.used <= {"query_index", "key_index"}
    if depends_on_more or not all(isinstance(length, int) and 0 < length < 2**30 for length in lengths):
        return None
    if not _is_of_distance(function.program.jaxpr):
        return None
    return _find_window(function, lengths)


@functools.lru_cache(64)
def _find_window(function, lengths):
    queries, keys = lengths
    distances = np.arange(1 - keys, queries, dtype=np.int32)
    grid = _Grid((distances.size, 1), (1, 1), 1)  # of a pair for each distance
    positions = [_Points(Axis.ROWS, np.maximum(sign * distances, 0)[None]) for sign in (1, -1)]
    blocks = _Evaluator(grid).result(function, [None, None, *positions])
    low, high = (np.broadcast_to(x, (1, 1, distances.size, 1)).reshape(-1) for x in (blocks.low, blocks.high))
    if (low != high).any() or not low[keys - 1]:
        return None
    first, last = np.flatnonzero(low)[[0, -1]]
    is_range = low[first : last + 1].all()
    return (int(distances[last]), int(-distances[first])) if is_range else None


def _is_of_distance(jaxpr) -> bool:
    """Tells whether the results of a program of positions depend on `query_index - key_index` alone.

    Comparing `query_index + 1` and `key_index` depends on it, so sums of positions and numbers are followed. None of these
    wraps around: sequences have fewer than 2^30 tokens, as numbers are smaller.
    """
    *others, query, key = jaxpr.invars
    sums: dict[Any, tuple[int, int, int]] = {query: (1, 0, 0), key: (0, 1, 0)}  # factors of both, and the size of the rest
    of_distance = {*others, *jaxpr.constvars}

    def as_sum(v):
        if not isinstance(v, Literal):
            return sums.get(v)
        return (0, 0, abs(int(v.val))) if np.shape(v.val) == () and np.result_type(v.val) == np.int32 else None

    def is_of_distance(v):
        factors = (0, 0) if isinstance(v, Literal) or v in of_distance else sums.get(v, (1, 0))[:2]
        return factors[0] == -factors[1]

    for eqn in needed_eqns(jaxpr)[0]:
        name, terms = eqn.primitive.name, [term for v in eqn.invars if (term := as_sum(v)) is not None]
        if name in _SIGNS and len(terms) == len(eqn.invars):
            query_factor, key_factor = (sum(map(operator.mul, _SIGNS[name], (term[i] for term in terms))) for i in range(2))
            size = sum(term[2] for term in terms)
            if max(abs(query_factor), abs(key_factor)) > 1 or size >= 2**30:
                continue
            if name not in _COMPARISONS:
                sums[eqn.outvars[0]] = query_factor, key_factor, size
            elif query_factor == -key_factor:
                of_distance.add(eqn.outvars[0])
        elif all(map(is_of_distance, eqn.invars)):
            of_distance |= set(eqn.outvars)
    return all(map(is_of_distance, jaxpr.outvars))


def find_kinds(function: TracedFunction, operands: Mapping[str, Any], lengths: tuple[int, int], batch_axes: int) -> jax.Array:
    """Finds what a mask function leaves of blocks of `BLOCK` queries and keys, or of larger ones if there are too many.

    Arguments are those of `mark_blocks`.

    Returns:
      The operand `block_kinds`, int8 `[*batch, heads, query_blocks, key_blocks]`: `EMPTY`, `PARTIAL` or `FULL`.
    """
    block = BLOCK * _joined_for(function, operands, lengths, BLOCK, BLOCK)
    marks = mark_blocks(function, operands, lengths, block, block, batch_axes)
    seen, whole = (jnp.asarray(mark, np.int8) for mark in marks)
    kinds = seen + whole
    return jnp.broadcast_to(kinds, (*kinds.shape[:-2], *_Grid(lengths, (block, block), 1).counts))


def operands_of(function: TracedFunction, operands: Mapping[str, Any]) -> list[str]:
    """Lists the names of the operands that say which blocks a mask function shows."""
    if operands.get("block_kinds") is not None:
        return ["block_kinds"]
    names = [*function.table_names]
    names += [name for name, argument in (("entries", "batch"), ("head_numbers", "head")) if argument in function.used]
    return names + [name for name in ("query_offset", "query_numbers", "key_numbers") if operands.get(name) is not None]


def mark_blocks(
    function: TracedFunction,
    operands: Mapping[str, Any],
    lengths: tuple[int, int],
    block_q: int,
    block_kv: int,
    batch_axes: int,
) -> tuple[Any, Any]:
    """Marks the blocks that a mask function does not leave empty, and those that are whole.

    `operands` are those of `operands_of`, and `batch_axes` the number of batch axes.

    Returns:
      Two arrays of bool `[*batch, heads, query_blocks, key_blocks]`, with axes of size 1 where nothing varies. They are numpy
      arrays if they are known while tracing.
    """
    if operands.get("block_kinds") is not None:
        kinds = operands["block_kinds"]
        own = block_of_kinds(kinds.shape[-2:], tuple(lengths))
        for axis, length, block in zip((-2, -1), lengths, (block_q, block_kv), strict=True):
            kinds = _rejoined(kinds, own, axis, length, block)
        return kinds != EMPTY, kinds == FULL
    grid = _Grid(tuple(lengths), (block_q, block_kv), batch_axes + 1)
    blocks = _Evaluator(grid).result(function, _inputs(function, operands, grid))
    return blocks.high, blocks.low


def block_of_kinds(counts: tuple[int, ...], lengths: tuple[int, int]) -> int | None:
    """Returns how many queries, and keys, a block of kinds has, from the `counts` of blocks; None if no size fits."""
    block = BLOCK
    while (found := _Grid(lengths, (block, block), 1).counts) != counts and max(found) > 1:
        block *= 2
    return block if found == counts else None


def _rejoined(kinds, own, axis, length, block):
    """Returns the kinds of blocks of another size than `own` along an axis.

    A block that takes in parts of others has what all of these have.
    """
    first = block * np.arange(-(-length // block))
    start, stop = first // own, -(-np.minimum(first + block, length) // own)
    place = np.minimum(start[:, None] + np.arange(max(stop - start)), stop[:, None] - 1)  # [blocks, their parts]
    parts = jnp.take(kinds, place, kinds.ndim + axis, mode="clip")
    at = parts.ndim + axis  # behind an axis of the new blocks comes that of their parts
    is_same = (parts == FULL).all(at) | (parts == EMPTY).all(at)
    return jnp.where(is_same, parts.max(at), np.int8(PARTIAL))


def has_holes(
    function: TracedFunction,
    lengths: tuple[int, int],
    block_q: int,
    block_kv: int,
    *,
    by_keys: bool = False,
    has_offset: bool = False,
) -> bool:
    """Tells whether spans of blocks have holes that are known while tracing, empty blocks or a second run of whole ones.

    Arguments are those of `counts`.
    """
    kinds = classify(function, lengths, block_q, block_kv, has_offset=has_offset)
    kinds = kinds.T if by_keys else kinds
    seen, whole = kinds != EMPTY, kinds == FULL
    start, stop, first, last = np.moveaxis(np.asarray(_spans(seen, whole, *kinds.shape)), -1, 0)
    return bool(np.any((seen.sum(1) < stop - start) | (whole.sum(1) > last - first)))


def fits_grid(
    function: TracedFunction, types: Mapping[str, Any], lengths: tuple[int, int], block_q: int, block_kv: int
) -> bool:
    """Returns True if no blocks are joined for operands of these types, as there are at most `LARGEST_GRID`."""
    return _joined_for(function, types, lengths, block_q, block_kv) == 1


def _joined_for(function, operands, lengths, block_q, block_kv):
    """Returns how many blocks along both axes count as one for these operands, or their types."""
    names = operands_of(function, operands)
    batch = lax.broadcast_shapes(*(_batch_of(name, operands[name]) for name in names), ())
    heads = max(
        (operands[name].shape[0 - len(AXES[name])] for name in names if name in ("head_numbers", "block_kinds")), default=1
    )
    return _joined(lengths, block_q, block_kv, math.prod(batch) * heads)


def _batch_of(name, array):
    return array.shape[: len(array.shape) - len(AXES[name])]


def _joined(lengths, block_q, block_kv, number=1):
    """Returns how many blocks along both axes count as one, a power of two, so that a grid is not too large."""
    factor = 1
    while number * math.prod(counts := _Grid(lengths, (factor * block_q, factor * block_kv), 1).counts) > LARGEST_GRID:
        if max(counts) == 1:
            break
        factor *= 2
    return factor


def _inputs(function, operands, grid):
    """Returns the values of the program's inputs. Operands get the axes of `_Points`."""
    arrays = {name: jnp.asarray(x) for name, x in operands.items()}
    tables = [_Points(None, wide_tables([arrays[name]])[0][..., None, :]) for name in function.table_names]
    entries = _Points(None, arrays["entries"][..., None, None]) if "entries" in arrays else None
    heads = _Points(None, arrays["head_numbers"][..., None]) if "head_numbers" in arrays else None
    if "query_numbers" in arrays:
        sides = (Axis.ROWS, arrays["query_numbers"]), (Axis.COLUMNS, arrays["key_numbers"])
        positions = [_Points(axis, numbers[..., None, :]) for axis, numbers in sides]
    else:
        offset = arrays["query_offset"][..., None, None] if "query_offset" in arrays else None
        positions = [grid.index(Axis.ROWS, offset), grid.index(Axis.COLUMNS)]
    return [*tables, entries, heads, *positions]


def _line_of_table(eqn, arrays, axes):
    """Loads the elements of a table at all positions from 0 on as one slice; None if others are loaded.

    XLA fuses it with what reads it, and not a gather of single elements: of a mask of documents XLA makes 3 programs, not 5.
    """
    table, *indices = arrays
    if eqn.primitive.name != "dynamic_slice" or set(eqn.params["slice_sizes"]) != {1} or table.shape[axes - 1] != 1:
        return None
    sides = [side for side, x in enumerate(indices) if x.shape[axes - 1] > 1]
    if len(sides) != 1 or not isinstance(indices[sides[0]], np.ndarray):
        return None
    (side,) = sides
    count = indices[side].shape[-1]
    if count > table.shape[axes + side] or not np.array_equal(indices[side].ravel(), np.arange(count)):
        return None
    sizes = tuple(count if i == side else 1 for i in range(len(indices)))
    starts: list[Any] = [np.zeros((1,) * axes, x.dtype) if i == side else x for i, x in enumerate(indices)]
    line = map_over_axes(axes, lambda table, *starts: lax.dynamic_slice(table, list(starts), sizes), [table, *starts])
    return line.reshape(*line.shape[: axes - 1], count, *eqn.params["slice_sizes"])


def _spans(seen, whole, rows, cols):
    """Returns the spans of blocks that are marked as seen and as whole, `[..., rows, cols]` with axes of full size or 1."""
    xp = _module(seen, whole)
    shape = np.broadcast_shapes(seen.shape, whole.shape, (rows, cols))
    seen, whole = xp.broadcast_to(seen, shape), xp.broadcast_to(whole, shape)
    index = np.arange(cols, dtype=np.int32).reshape((1,) * (len(shape) - 1) + (cols,))
    follows = xp.pad(whole[..., :-1], [(0, 0)] * (len(shape) - 1) + [(1, 0)])  # the block before is whole
    none = np.int32(cols)
    # One reduction for all four: XLA makes a program of its own of each one that waits for another, and of stacking them.
    start, first, last = (xp.where(marks, index, none) for marks in (seen, whole, ~whole & follows))
    stop = xp.where(seen, ~index, np.int32(0))
    found = xp.min(xp.stack([start, stop, first, last], -2), -1)
    return xp.where(np.array([False, True, False, False]), -found, found)


class Axis(enum.Enum):
    """The indices that a value depends on, beside batch entries and heads. None stands for none of them."""

    ROWS = "query_index"
    COLUMNS = "key_index"
    DIAGONALS = "query_index - key_index"


@dataclass(frozen=True, eq=False)
class _Linear:
    """The number `rows * i + columns * j + constant` of query `i` and key `j`, int32. The constant depends on neither."""

    rows: int
    columns: int
    constant: Any

    @property
    def has_axis(self) -> bool:
        """Depends on one `Axis` alone, or on none."""
        return self.rows == 0 or self.columns in (0, -self.rows)

    @property
    def axis(self) -> Axis | None:
        """The axis that the number depends on, if it `has_axis`."""
        if self.columns == 0:
            return Axis.ROWS if self.rows else None
        return Axis.DIAGONALS if self.rows else Axis.COLUMNS


@dataclass(frozen=True, eq=False)
class _Points:
    """A value at each position along an axis, exactly.

    `array` is `[*batch, heads, positions, *shape]` for a value of shape `shape`, with axes of size 1 where nothing varies. It
    is a numpy array if it is known while tracing. `linear` and `bounds` say more about some values, for which blocks are then
    found in another way than from the array.
    """

    axis: Axis | None
    array: Any
    linear: _Linear | None = None
    bounds: "_Blocks | None" = None


@dataclass(frozen=True, eq=False)
class _Blocks:
    """The smallest and the largest value of each block, `[*batch, heads, query_blocks, key_blocks]`, with axes of size 1 too.

    The bounds of a bool say that it is true everywhere, and that it is true somewhere. Bounds of floats are float32, and NaN
    where nothing is known. An unknown integer has the bounds of its dtype.
    """

    low: Any
    high: Any


@dataclass(frozen=True)
class _Grid:
    """Queries and keys in blocks. `axes` is the number of axes in front of positions: those of the batch, and heads."""

    lengths: tuple[int, int]
    blocks: tuple[int, int]
    axes: int

    @property
    def counts(self) -> tuple[int, ...]:
        """Numbers of query blocks and of key blocks."""
        return tuple(-(-length // block) for length, block in zip(self.lengths, self.blocks, strict=True))

    @functools.cached_property
    def ends(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """The first and the last position of each block, int64, with the axes of `_Blocks`: of queries, then of keys."""
        result = []
        for side, (length, block, count) in enumerate(zip(self.lengths, self.blocks, self.counts, strict=True)):
            first = (block * np.arange(count)).reshape((1,) * self.axes + ((-1, 1), (1, -1))[side])
            result.append((first, np.minimum(first + block, length) - 1))
        return result

    def constant(self, value: Any) -> _Points | None:
        """Returns a value that is the same everywhere, if it is known while tracing."""
        if isinstance(value, jax.core.Tracer):
            return None
        value = np.asarray(value)
        return _Points(None, value.reshape((1,) * (self.axes + 1) + value.shape))

    def index(self, axis: Axis, offset: Any = None) -> _Points:
        """Returns the index of queries or of keys, behind an offset that has the axes of `_Points`."""
        offset = np.zeros((1,) * (self.axes + 1), np.int32) if offset is None else offset
        is_single = self.lengths[axis is Axis.COLUMNS] == 1
        rows, cols = (int(axis is side and not is_single) for side in (Axis.ROWS, Axis.COLUMNS))
        return self.points(_Linear(rows, cols, offset))

    def points(self, linear: _Linear) -> _Points:
        """Computes a number that `has_axis`, modulo 2^32 as int32 does."""
        queries, keys = self.lengths
        ranges = {None: (0, 1), Axis.ROWS: (0, queries), Axis.COLUMNS: (0, keys), Axis.DIAGONALS: (1 - keys, queries)}
        places = np.arange(*ranges[linear.axis], dtype=np.int64)
        terms = ((linear.rows or linear.columns) * places).astype(np.int32)
        return _Points(linear.axis, terms.reshape((1,) * self.axes + terms.shape) + linear.constant, linear)

    def extremes(self, points: _Points) -> _Blocks | None:
        """Finds the smallest and the largest value of each block; None for a value with several elements."""
        array, axes = points.array, self.axes
        if points.bounds is not None:
            return points.bounds
        if math.prod(array.shape[axes + 1 :]) != 1:
            return None
        array = array.reshape(array.shape[: axes + 1])
        is_linear = points.linear is not None and points.axis is not None
        if is_linear and (blocks := self._extremes_of(points.linear)) is not None:
            return blocks
        if array.shape[-1] == 1:
            low = high = array[..., None]
        elif points.axis is Axis.DIAGONALS:
            low, high = (self._over_windows(array, pick) for pick in ("minimum", "maximum"))
        else:
            side = 0 if points.axis is Axis.ROWS else 1
            xp, size = _module(array), self.blocks[side]
            padding = [(0, 0)] * axes + [(0, -array.shape[-1] % size)]
            array = xp.pad(array, padding, mode="edge").reshape(*array.shape[:-1], -1, size)
            low, high = (xp.expand_dims(x, axes + 1 - side) for x in (array.min(-1), array.max(-1)))
        return _bounded(array.dtype, low, high)

    def _extremes_of(self, linear):
        """Finds the extremes of a sum of indices from the ends of blocks; None if it may wrap around while tracing."""
        constant = linear.constant[..., None]
        lows, highs = ([constant], [constant]) if isinstance(constant, np.ndarray) else ([], [])
        for factor, ends in zip((linear.rows, linear.columns), self.ends, strict=True):
            if factor != 0:
                low, high = (factor * end for end in ends[:: 1 if factor > 0 else -1])
                lows, highs = [*lows, low], [*highs, high]
        if max(sum(max(-int(x.min()), 0) for x in lows), sum(max(int(x.max()), 0) for x in highs)) > np.iinfo(np.int32).max:
            return None
        bounds = (functools.reduce(np.add, [x.astype(np.int32) for x in terms]) for terms in (lows, highs))
        if isinstance(constant, np.ndarray):
            return _Blocks(*bounds)
        return _sum(np.dtype(np.int32), _Blocks(*bounds), _Blocks(constant, constant))

    def _over_windows(self, array, name: str):
        """Finds the smallest or the largest value on the diagonals of each block.

        Two windows of a power of two of diagonals cover those of a block. Values of windows follow from windows half as large.
        """
        xp = _module(array)
        pick: Any = getattr(xp, name)
        (first_query, last_query), (first_key, last_key) = self.ends
        start, stop = (x + self.lengths[1] for x in (first_query - last_key - 1, last_query - first_key))
        levels = np.frexp(stop - start)[1] - 1  # the logarithm of the largest power of two that is no larger
        result, size = None, 1
        for level in range(int(levels.max()) + 1):
            if level > 0:
                array, size = pick(array[..., :-size], array[..., size:]), 2 * size
            if (is_here := levels == level).any():
                ends = (np.where(is_here, x, 0).reshape(x.shape[-2:]) for x in (start, stop - size))
                values = pick(*(array[..., end if xp is np else end.astype(np.int32)] for end in ends))
                result = values if result is None else xp.where(is_here, values, result)
        return result


class _Evaluator:
    """Evaluates a program on blocks. A value is `_Points`, `_Blocks`, or None if nothing is known about it."""

    def __init__(self, grid: _Grid):
        self.grid = grid
        self.values: dict[Any, Any] = {}  # of variables
        self.origins: dict[Any, Any] = {}  # the operations that variables come from

    def result(self, function: TracedFunction, inputs: Sequence[Any]) -> _Blocks:
        """Returns the bounds of the result of a mask function."""
        program = function.program
        with np.errstate(all="ignore"):  # of integers that wrap around, and of NaN
            out = self._run(program.jaxpr, program.consts, inputs)[0]
            return self._blocks(out, np.dtype(bool))

    def _run(self, jaxpr, constants, arguments):
        self.values |= dict(zip(jaxpr.constvars, map(self.grid.constant, constants), strict=True))
        self.values |= dict(zip(jaxpr.invars, arguments, strict=True))
        for eqn in jaxpr.eqns:
            operands = [self._value(v) for v in eqn.invars]
            if (inner := inner_program(eqn)) is not None:
                results = self._run(*inner, operands)
            elif len(eqn.outvars) == 1:
                results = [self._operation(eqn, operands)]
            else:
                results = [None] * len(eqn.outvars)
            self.values |= dict(zip(eqn.outvars, results, strict=True))
            self.origins |= dict.fromkeys(eqn.outvars, eqn)
        return [self._value(v) for v in jaxpr.outvars]

    def _value(self, v):
        return self.grid.constant(v.val) if isinstance(v, Literal) else self.values[v]

    def _operation(self, eqn, operands):
        """Returns the result of an operation."""
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        if name in _OF_TYPES_ALONE or (name == "convert_element_type" and eqn.invars[0].aval.dtype == aval.dtype):
            return operands[0]
        if (linear := self._linear(name, operands)) is not None and linear.has_axis:
            return self.grid.points(linear)
        axes = {x.axis for x in operands if isinstance(x, _Points)} - {None}
        if all(isinstance(x, _Points) for x in operands) and len(axes) <= 1:
            array = self._on_points(eqn, [x.array for x in operands])
            if array is not None:
                bounds = self._on_blocks(eqn, operands) if _is_simple_order(name, operands) else None
                return _Points(next(iter(axes), None), array, bounds=bounds)
        if math.prod(aval.shape) != 1:
            return None
        if name == "dynamic_slice":
            return self._load(eqn, operands)
        return self._on_blocks(eqn, operands) if name in _RULES else None

    def _on_blocks(self, eqn, operands) -> _Blocks:
        """Applies the rule of an operation."""
        name, dtype = eqn.primitive.name, np.dtype(eqn.outvars[0].aval.dtype)
        blocks = [self._blocks(x, v.aval.dtype) for x, v in zip(operands, eqn.invars, strict=True)]
        result = _RULES[name](dtype, *blocks, **_options(eqn))
        if name == "and" and (division := self._corrected_division(eqn)) is not None:
            x, y = (self._blocks(self._value(v), v.aval.dtype) for v in division.invars)
            is_exact = (x.low >= 0) & (y.low > 0)
            return _Blocks(result.low & ~is_exact, result.high & ~is_exact)
        return result

    def _corrected_division(self, eqn):
        """Returns the remainder that an operation tests, if it decides whether `x // y` is less than `lax.div(x, y)`.

        `jnp` tests `(sign(x) != sign(y)) & (rem(x, y) != 0)`. Bounds alone do not show that both are not true at `x = 0`.
        """

        def origin(v, name):
            eqn = None if isinstance(v, Literal) else self.origins.get(v)
            return eqn if eqn is not None and eqn.primitive.name == name else None

        def is_same(v, w):
            return v.val == w.val if isinstance(v, Literal) and isinstance(w, Literal) else v is w

        signs, rest = (origin(v, "ne") for v in eqn.invars)
        if signs is None or rest is None or not isinstance(rest.invars[1], Literal) or rest.invars[1].val != 0:
            return None
        division = origin(rest.invars[0], "rem")
        terms: list[Any] = [origin(v, "sign") for v in signs.invars]
        if division is None or any(term is None for term in terms):
            return None
        return division if all(is_same(t.invars[0], v) for t, v in zip(terms, division.invars, strict=True)) else None

    def _blocks(self, value, dtype) -> _Blocks:
        """Returns a value of any kind as bounds."""
        blocks = self.grid.extremes(value) if isinstance(value, _Points) else value
        return _unknown(dtype, self.grid.axes + 2) if blocks is None else blocks

    def _linear(self, name, operands) -> _Linear | None:
        """Returns a sum of indices, if the operation makes one of others."""
        if name not in ("add", "sub", "mul", "neg"):
            return None
        terms: list[Any] = [self._as_linear(x) for x in operands]
        if any(term is None for term in terms) or not any(term.rows or term.columns for term in terms):
            return None
        if name in ("add", "sub"):
            factors = 1, (1 if name == "add" else -1)
        elif name == "neg":
            factors = (-1,)
        else:
            numbers = [x.constant for x in terms if not (x.rows or x.columns)]
            if not numbers or not isinstance(numbers[0], np.ndarray) or numbers[0].size != 1:
                return None
            terms, factors = [x for x in terms if x.rows or x.columns], (numbers[0].item(),)
        constants = [np.int32(factor) * term.constant for factor, term in zip(factors, terms, strict=True)]
        rows, cols = (sum(f * getattr(t, side) for f, t in zip(factors, terms, strict=True)) for side in ("rows", "columns"))
        if max(abs(rows), abs(cols)) >= 2**31:
            return None
        return _Linear(rows, cols, functools.reduce(lambda x, y: x + y, constants))

    def _as_linear(self, value):
        """Returns an index, or an int32 that depends on no index, as a sum of indices."""
        if not isinstance(value, _Points):
            return None
        is_number = value.axis is None and value.array.dtype == np.int32 and value.array.ndim == self.grid.axes + 1
        return _Linear(0, 0, value.array) if value.linear is None and is_number else value.linear

    def _on_points(self, eqn, arrays):
        """Applies an operation to values at positions. Returns None if it rounds, or if numpy does not know it.

        A kernel may round a float to its neighbour, which the bounds allow for.
        """
        name, aval = eqn.primitive.name, eqn.outvars[0].aval
        if jnp.issubdtype(aval.dtype, jnp.floating) and name not in _EXACT:
            return None
        axes = self.grid.axes + 1
        if not all(isinstance(x, np.ndarray) for x in arrays):
            if (line := _line_of_table(eqn, arrays, axes)) is not None:
                return line
            return map_over_axes(axes, lambda *operands: apply(eqn, operands)[0], arrays)
        if name in ("reshape", "squeeze", "broadcast_in_dim") and math.prod(aval.shape) == arrays[0][(0,) * axes].size:
            return arrays[0].reshape(*arrays[0].shape[:axes], *aval.shape)
        return _ON_NUMPY[name](np.dtype(aval.dtype), *arrays, **_options(eqn)) if name in _ON_NUMPY else None

    def _load(self, eqn, operands):
        """Loads the elements of a table that the few indices of each block select."""
        table, *indices = operands
        if not isinstance(table, _Points) or table.axis is not None or isinstance(table.array, np.ndarray):
            return None
        blocks = [self._blocks(x, v.aval.dtype) for x, v in zip(indices, eqn.invars[1:], strict=True)]
        sizes: list[int] = []
        for block in blocks:
            if block.low is block.high:  # one index for all of a block, such as that of the head
                sizes.append(1)
            elif isinstance(block.low, np.ndarray) and isinstance(block.high, np.ndarray):
                sizes.append(int(np.max(block.high.astype(np.int64) - block.low)) + 1)
            else:
                return None
        if math.prod(sizes) > _LARGEST_LOAD:
            return None
        array, axes, loaded = jnp.asarray(table.array), self.grid.axes + 2, []
        for steps in itertools.product(*map(range, sizes)):
            places = [
                x.low if size == 1 else np.minimum(x.low + x.low.dtype.type(step), x.high)
                for x, size, step in zip(blocks, sizes, steps, strict=True)
            ]
            operands = [jnp.expand_dims(array, axes - 1), *places]
            values = map_over_axes(axes, lambda *operands: apply(eqn, operands)[0], operands)
            loaded.append(values.reshape(values.shape[:axes]))
        return _bounded(array.dtype, *(functools.reduce(pick, loaded) for pick in (jnp.minimum, jnp.maximum)))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_SIGNS = {"add": (1, 1), "sub": (1, -1), "neg": (-1,)} | dict.fromkeys(_COMPARISONS, (1, -1))
_OF_TYPES_ALONE = ("pvary", "pcast", "reshard", "sharding_constraint", "copy", "copy_p")
# Operations on floats that do not round, or round in one way.
_EXACT = {"select_n", "max", "min", "neg", "abs", "clamp", "sign", "floor", "ceil", "round", "convert_element_type", "gather"}
_EXACT |= {"dynamic_slice", "slice", "squeeze", "reshape", "broadcast_in_dim", "concatenate", "reduce_max", "reduce_min"}
# Elements of a table that are loaded for each block.
_LARGEST_LOAD = 16


def _options(eqn):
    """Returns the parameters of an operation that rules read."""
    return {name: eqn.params[name] for name in ("y",) if name in eqn.params}


def _module(*arrays):
    """Returns numpy if all arrays are known while tracing, else `jax.numpy`."""
    return np if all(isinstance(x, np.ndarray | np.generic) for x in arrays) else jnp


def _is_simple_order(name, operands) -> bool:
    """Returns True for the order of an index and a number that depends on no index.

    Its bounds follow from those of the index. They cost less than the order at each position.
    """
    if name not in ("lt", "le", "gt", "ge"):
        return False
    x, y = operands if operands[0].axis is None else operands[::-1]
    if x.axis is not None or y.axis is None:
        return False
    return y.linear is not None or (_module(y.array) is np and _module(x.array) is not np)


def _limits(dtype) -> tuple[Any, Any]:
    """Returns the bounds of an unknown value of a dtype."""
    if jnp.issubdtype(dtype, jnp.floating):
        return np.float32(np.nan), np.float32(np.nan)
    if dtype.kind == "b":
        return np.False_, np.True_
    info = np.iinfo(dtype)
    return np.dtype(dtype).type(info.min), np.dtype(dtype).type(info.max)


def _unknown(dtype, ndim: int) -> _Blocks:
    """Returns the bounds of an unknown value."""
    return _Blocks(*(np.full((1,) * ndim, limit) for limit in _limits(dtype)))


def _except(is_unknown, dtype, low, high) -> _Blocks:
    """Returns bounds, except where a value is unknown."""
    xp = _module(is_unknown, low, high)
    return _Blocks(*(xp.where(is_unknown, limit, x) for limit, x in zip(_limits(dtype), (low, high), strict=True)))


def _bounded(dtype, low, high) -> _Blocks:
    """Returns exact bounds. Those of floats become float32, which rounds the ones of float64."""
    if not jnp.issubdtype(dtype, jnp.floating):
        return _Blocks(low, high)
    low, high = (x.astype(np.float32) for x in (low, high))
    if np.dtype(dtype).itemsize > 4:
        return _rounded(np.dtype(np.float32), low, high)
    return _except((low != low) | (high != high), dtype, low, high)


def _rounded(dtype, low, high) -> _Blocks:
    """Returns bounds of floats that an operation rounds, a few units in the last place apart; unknown if they may overflow."""
    info = jnp.finfo(dtype)
    eps, tiny, most = 8 * float(info.eps), float(info.tiny), min(float(info.max), float(np.finfo(np.float32).max))
    eps, tiny, most = (np.float32(x) for x in (eps, tiny, most * (1 - 2 * eps)))
    is_finite = (abs(low) < most) & (abs(high) < most)
    return _except(~is_finite, dtype, low - (eps * abs(low) + tiny), high + (eps * abs(high) + tiny))


# Rules: bounds of the result of an operation, from its dtype and the bounds of its operands.


def _corners(operation, x: _Blocks, y: _Blocks):
    """Returns the smallest and the largest result for bounds of two operands."""
    values = [operation(a, b) for a in (x.low, x.high) for b in (y.low, y.high)]
    xp = _module(*values)
    return functools.reduce(xp.minimum, values), functools.reduce(xp.maximum, values)


def _arithmetic(operation, dtype, x: _Blocks, y: _Blocks) -> _Blocks:
    """Returns the bounds of a sum, difference or product. Integers that may wrap around are unknown."""
    low, high = _corners(operation, x, y)
    if jnp.issubdtype(dtype, jnp.floating):
        return _rounded(dtype, low, high)
    least, most = (np.float32(x) for x in _limits(dtype))
    wide_low, wide_high = _corners(operation, *(_Blocks(*(b.astype(np.float32) for b in (z.low, z.high))) for z in (x, y)))
    share = np.float32(1 - 2**-20)  # for the rounding of float32
    return _except((wide_low < share * least) | (wide_high > share * most), dtype, low, high)


_sum = functools.partial(_arithmetic, lambda x, y: x + y)
_product = functools.partial(_arithmetic, lambda x, y: x * y)


def _difference(dtype, x, y):
    result = _arithmetic(lambda x, y: x - y, dtype, x, y)
    return _except(x.low < y.high, dtype, result.low, result.high) if _is_unsigned(dtype) else result


def _is_unsigned(dtype):
    return np.issubdtype(dtype, np.unsignedinteger)


def _negated(dtype, x):
    return _difference(dtype, _Blocks(*(np.zeros((), x.low.dtype),) * 2), x)


def _absolute(dtype, x):
    xp, zero = _module(x.low, x.high), np.zeros((), x.low.dtype)
    low = xp.where(x.low > zero, x.low, xp.where(x.high < zero, -x.high, zero))
    high = xp.maximum(abs(x.low), abs(x.high))
    if jnp.issubdtype(dtype, jnp.floating):
        return _bounded(dtype, xp.where(high == high, low, high), high)
    return x if _is_unsigned(dtype) else _except(x.low == _limits(dtype)[0], dtype, low, high)


def _power(dtype, x, y: int):
    """Returns the bounds of an integer power."""
    if y <= 0:
        return _unknown(dtype, x.low.ndim)
    result = size = x if y == 1 else _absolute(dtype, x)
    for _ in range(y - 2):
        result = _product(dtype, result, size)
    return result if y == 1 else _product(dtype, result, x if y % 2 else size)


def _divide(x, y):
    """Divides integers, towards 0."""
    if _module(x, y) is jnp:
        return lax.div(*jnp.broadcast_arrays(x, y))
    quotient = x // y  # towards negative numbers; the absolute value of the least integer would wrap around
    return quotient + ((quotient * y != x) & ((x < 0) != (y < 0)))


def _remainder(x, y):
    """Returns the remainder of a division of integers, with the sign of x."""
    return x - y * _divide(x, y)


def _quotient(dtype, x, y):
    has_zero = ~((y.low > 0) | (y.high < 0))
    y = _Blocks(*(_module(has_zero, b).where(has_zero, np.ones((), b.dtype), b) for b in (y.low, y.high)))
    if jnp.issubdtype(dtype, jnp.floating):
        result = _rounded(dtype, *_corners(lambda x, y: x / y, x, y))
    else:
        result = _Blocks(*_corners(_divide, x, y))
        if not _is_unsigned(dtype):
            has_zero = has_zero | ((x.low == _limits(dtype)[0]) & (y.low < 0))
    return _except(has_zero, dtype, result.low, result.high)


def _rest(dtype, x, y):
    if jnp.issubdtype(dtype, jnp.floating):
        return _unknown(dtype, x.low.ndim)
    xp, (least, _), zero = _module(x.low, x.high, y.low, y.high), _limits(dtype), np.zeros((), dtype)
    is_divisor = ((y.low > 0) | (y.high < 0)) & ((y.low != least) | _is_unsigned(dtype))
    divisor = xp.where(is_divisor, y.low, np.ones((), dtype))
    most = xp.maximum(abs(y.low), abs(y.high)) - np.ones((), dtype)
    low, high = xp.minimum(x.low, zero), xp.maximum(x.high, zero)
    if not _is_unsigned(dtype):
        low = xp.where(is_divisor, xp.maximum(low, -most), low)
    high = xp.where(is_divisor, xp.minimum(high, most), high)
    is_one_period = is_divisor & (y.low == y.high) & (_divide(x.low, divisor) == _divide(x.high, divisor))
    if not _is_unsigned(dtype):
        is_one_period = is_one_period & (x.low != least)
    ends = (_remainder(b, divisor) for b in (x.low, x.high))
    return _Blocks(*(xp.where(is_one_period, end, b) for end, b in zip(ends, (low, high), strict=True)))


def _shifted_right(dtype, x, y):
    is_allowed = (y.low >= 0) & (y.high < 8 * np.dtype(dtype).itemsize)
    amounts = _Blocks(*(_module(is_allowed, b).where(is_allowed, b, np.zeros((), b.dtype)) for b in (y.low, y.high)))
    return _except(~is_allowed, dtype, *_corners(lambda x, y: x >> y, x, amounts))


def _shifted_right_logically(dtype, x, y):
    result = _shifted_right(dtype, x, y)
    return _except(x.low < 0, dtype, result.low, result.high)


def _shifted_left(dtype, x, y):
    is_allowed = (y.low >= 0) & (y.high < 8 * np.dtype(dtype).itemsize - 1)
    one = np.ones((), dtype)
    powers = _Blocks(*(one << _module(is_allowed, b).where(is_allowed, b, np.zeros((), b.dtype)) for b in (y.low, y.high)))
    result = _product(dtype, x, powers)
    return _except(~is_allowed, dtype, result.low, result.high)


def _and(dtype, x, y):
    if dtype.kind == "b":
        return _Blocks(x.low & y.low, x.high & y.high)
    xp, (_, most), zero = _module(x.low, y.low), _limits(dtype), np.zeros((), dtype)
    first, second = (xp.where(z.low >= zero, z.high, most) for z in (x, y))
    return _except((x.low < zero) & (y.low < zero), dtype, xp.zeros_like(x.low + y.low), xp.minimum(first, second))


def _or(dtype, x, y):
    if dtype.kind == "b":
        return _Blocks(x.low | y.low, x.high | y.high)
    result = _sum(dtype, x, y)  # at most the sum, and at least the larger operand
    low = _module(x.low, y.low).maximum(x.low, y.low)
    return _except((x.low < 0) | (y.low < 0), dtype, low, result.high)


def _xor(dtype, x, y):
    if dtype.kind == "b":
        return _differ(dtype, x, y)
    result = _sum(dtype, x, y)
    return _except((x.low < 0) | (y.low < 0), dtype, _module(result.low).zeros_like(result.low), result.high)


def _less(x, y, or_equal: bool) -> _Blocks:
    """Returns the bounds of an order. NaN, which stands for unknown floats, makes no comparison true."""
    if or_equal:
        return _Blocks(x.high <= y.low, ~(x.low > y.high))
    return _Blocks(x.high < y.low, ~(x.low >= y.high))


def _same(_, x, y):
    return _Blocks(
        (x.low == x.high) & (y.low == y.high) & (x.low == y.low),
        ~((x.low > y.high) | (y.low > x.high)),
    )


def _differ(dtype, x, y):
    same = _same(dtype, x, y)
    return _Blocks(~same.high, ~same.low)


def _selected(dtype, which, *cases):
    xp = _module(which.low, which.high, *(bound for case in cases for bound in (case.low, case.high)))
    low, high = (
        functools.reduce(pick, bounds)
        for pick, bounds in zip((xp.minimum, xp.maximum), ([x.low for x in cases], [x.high for x in cases]), strict=True)
    )
    if which.low.dtype.kind == "b" and len(cases) == 2:
        low = xp.where(which.low, cases[1].low, xp.where(which.high, low, cases[0].low))
        high = xp.where(which.low, cases[1].high, xp.where(which.high, high, cases[0].high))
    return _Blocks(low, high)


def _clamped(_, least, x, most):
    xp = _module(*(bound for z in (least, x, most) for bound in (z.low, z.high)))
    return _Blocks(
        *(xp.minimum(xp.maximum(b, a), c) for a, b, c in zip(*((z.low, z.high) for z in (least, x, most)), strict=True))
    )


def _converted(dtype, x):
    """Returns the bounds of a value in another dtype. Values outside of an integer's range are unknown."""
    kind = np.dtype(x.low.dtype)
    if dtype.kind == "b":
        return _differ(dtype, x, _Blocks(*(np.zeros((), kind),) * 2))
    if jnp.issubdtype(dtype, jnp.floating):
        low, high = (b.astype(np.float32) for b in (x.low, x.high))
        return _Blocks(low, high) if kind.kind == "b" else _rounded(dtype, low, high)
    low, high = (b.astype(dtype) for b in (x.low, x.high))
    if kind.kind == "b":
        return _Blocks(low, high)
    info = np.iinfo(dtype)
    if kind == np.float32:
        fits = (x.low >= np.float32(info.min)) & (x.high <= np.float32(info.max * (1 - 2**-20)))
    else:
        least, most = max(info.min, np.iinfo(kind).min), min(info.max, np.iinfo(kind).max)
        fits = (x.low >= kind.type(least)) & (x.high <= kind.type(most))
    return _except(~fits, dtype, low, high)


def _monotone(name):
    """Returns the rule of an operation of numpy that keeps the order."""

    def rule(_, *operands):
        xp = _module(*(bound for x in operands for bound in (x.low, x.high)))
        return _Blocks(*(getattr(xp, name)(*bounds) for bounds in ([x.low for x in operands], [x.high for x in operands])))

    return rule


def _between(_, x):
    xp = _module(x.low, x.high)
    return _Blocks(xp.floor(x.low), xp.ceil(x.high))


_RULES: dict[str, Callable[..., _Blocks]] = {
    "add": _sum,
    "sub": _difference,
    "mul": _product,
    "neg": _negated,
    "abs": _absolute,
    "integer_pow": _power,
    "square": functools.partial(_power, y=2),
    "div": _quotient,
    "rem": _rest,
    "sign": _monotone("sign"),
    "max": _monotone("maximum"),
    "min": _monotone("minimum"),
    "floor": _monotone("floor"),
    "ceil": _monotone("ceil"),
    "round": _between,
    "clamp": _clamped,
    "shift_right_arithmetic": _shifted_right,
    "shift_right_logical": _shifted_right_logically,
    "shift_left": _shifted_left,
    "and": _and,
    "or": _or,
    "xor": _xor,
    "not": lambda _, x: _Blocks(~x.high, ~x.low),
    "lt": lambda _, x, y: _less(x, y, False),
    "le": lambda _, x, y: _less(x, y, True),
    "gt": lambda _, x, y: _less(y, x, False),
    "ge": lambda _, x, y: _less(y, x, True),
    "eq": _same,
    "ne": _differ,
    "select_n": _selected,
    "convert_element_type": _converted,
    "reshape": lambda _, x: x,
    "squeeze": lambda _, x: x,
    "broadcast_in_dim": lambda _, x: x,
}


# Operations on numpy arrays, which return None where numpy and XLA may differ.


def _divided_points(operation, dtype, x, y):
    if jnp.issubdtype(dtype, jnp.floating) or (y == 0).any() or (not _is_unsigned(dtype) and (x == np.iinfo(dtype).min).any()):
        return None
    return operation(x, y)


def _shifted_points(operation, dtype, x, y):
    bits = 8 * dtype.itemsize
    return operation(x, y) if ((y >= 0) & (y < bits)).all() else None


def _shifted_right_points(x, y):
    unsigned = np.dtype(f"uint{8 * x.dtype.itemsize}")
    return (x.astype(unsigned) >> y.astype(unsigned)).astype(x.dtype)


def _converted_points(dtype, x):
    if not jnp.issubdtype(x.dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.floating) or dtype.kind == "b":
        return x.astype(dtype)
    info = np.iinfo(dtype)
    return x.astype(dtype) if ((x >= info.min) & (x <= info.max * (1 - 2**-20))).all() else None


def _selected_points(_, which, *cases):
    return np.where(which, cases[1], cases[0]) if which.dtype.kind == "b" and len(cases) == 2 else None


def _power_points(_, x, y):
    return functools.reduce(np.multiply, [x] * y) if y > 0 else None


def _of_numpy(function):
    return lambda _, *operands: function(*operands)


_ON_NUMPY: dict[str, Callable[..., Any]] = {
    "add": _of_numpy(np.add),
    "sub": _of_numpy(np.subtract),
    "mul": _of_numpy(np.multiply),
    "neg": _of_numpy(np.negative),
    "abs": _of_numpy(np.abs),
    "integer_pow": _power_points,
    "square": _of_numpy(np.square),
    "div": functools.partial(_divided_points, _divide),
    "rem": functools.partial(_divided_points, _remainder),
    "sign": _of_numpy(np.sign),
    "max": _of_numpy(np.maximum),
    "min": _of_numpy(np.minimum),
    "floor": _of_numpy(np.floor),
    "ceil": _of_numpy(np.ceil),
    "clamp": lambda _, least, x, most: np.minimum(np.maximum(x, least), most),
    "shift_right_arithmetic": functools.partial(_shifted_points, np.right_shift),
    "shift_right_logical": functools.partial(_shifted_points, _shifted_right_points),
    "shift_left": functools.partial(_shifted_points, np.left_shift),
    "and": _of_numpy(np.bitwise_and),
    "or": _of_numpy(np.bitwise_or),
    "xor": _of_numpy(np.bitwise_xor),
    "not": _of_numpy(np.invert),
    "lt": _of_numpy(np.less),
    "le": _of_numpy(np.less_equal),
    "gt": _of_numpy(np.greater),
    "ge": _of_numpy(np.greater_equal),
    "eq": _of_numpy(np.equal),
    "ne": _of_numpy(np.not_equal),
    "select_n": _selected_points,
    "convert_element_type": _converted_points,
}
