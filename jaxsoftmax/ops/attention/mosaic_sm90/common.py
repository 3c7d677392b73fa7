"""What the kernels of attention have in common: the problem, operands in global memory, and operations on scores.

The forward kernel has queries as rows of a product, the backward kernel keys: S = Q K' and S' = K Q'.
"""

import math
import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import fused, schedule
from jaxsoftmax.ops.attention import dropout
from jaxsoftmax.ops.attention.operands import AXES, batch_of

LOG2E = math.log2(math.e)
LN2 = 1 / LOG2E  # the product of both is 1
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT, COL_LAYOUT = LAYOUT.reduce(1), LAYOUT.reduce(0)
ROWS = 64  # rows of a product of the tensor cores, which a warpgroup holds
SWIZZLED = 64  # columns of 16 bits that a swizzled tile of shared memory has: 128 bytes
NARROW = 32  # columns of a tile with a swizzle of 64 bytes


class Arithmetic(NamedTuple):
    """Operations that count blocks, on integers that are not negative: numbers of Python, or arrays in a kernel."""

    divide: Callable[..., Any]
    minimum: Callable[..., Any]
    maximum: Callable[..., Any]
    where: Callable[..., Any]


HOST = Arithmetic(operator.floordiv, min, max, lambda test, a, b: a if test else b)
KERNEL = Arithmetic(lambda a, b: lax.div(jnp.int32(a), jnp.int32(b)), jnp.minimum, jnp.maximum, jnp.where)


@dataclass(frozen=True)
class AttentionGeometry(schedule.TiledGeometry):
    """Sizes and options of attention as a kernel computes it for one problem, and the tiles that its work is cut into."""

    batch: tuple[int, ...]  # sizes of the batch axes that the operands have together
    query: tuple[int, int, int]  # T, N and H: rows of scores of a head, heads, and head size
    key: tuple[int, int, int]  # S, K and H: keys, key heads, and head size
    dtype: Any  # of the queries
    names: frozenset[str]  # of the operands that are present, and of the tables that XLA makes of them for the kernel
    scale: float
    window: tuple[int | None, int | None]  # numbers of keys before and after its own position that a query sees, None for all
    soft_cap: float | None
    dropout_rate: float
    score_mod: Any = field(default=None, kw_only=True)  # traced function that changes scores, or None
    mask_mod: Any = field(default=None, kw_only=True)  # traced function that hides keys, or None
    # Number that turns what the score function leaves in registers into scores. None where it leaves scores, which may be as
    # large as `finfo.min`. With `LN2` they may be so, too: see `factor_of_changed`.
    changed_factor: float | None = field(default=None, kw_only=True)
    has_lists: bool = field(default=False, kw_only=True)  # tiles visit lists of blocks, which have no holes: see `lists`

    @property
    def score_factor(self) -> float | None:
        """Factor of scores before a soft cap, as they are in registers, or None where they may be as large as `finfo.min`."""
        return self.scale if self.score_mod is None else self.changed_factor

    @property
    def has_large_powers(self) -> bool:
        """True if scores are powers of two in registers, and may be as large as `finfo.min`."""
        return self.score_mod is not None and self.changed_factor == LN2


def shapes_of(types: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Returns the attributes of an `AttentionGeometry` that follow from the types of the operands and from the GPU."""
    operands = {name: kind for name, kind in types.items() if name in AXES}
    shapes: dict[str, Any] = {name: types[name].shape[-3:] for name in ("query", "key")}
    shapes |= {"batch": batch_of(operands), "dtype": types["query"].dtype, "names": frozenset(types)}
    return shapes | {"multiprocessors": target.multiprocessors}


@dataclass(frozen=True)
class GlobalOperand:
    """An operand in global memory, as kernels address it."""

    index: Callable[[Any], Any]  # from the index of a batch entry to the one in the operand, whose batch axes may have size 1
    heads: int = 1  # of a mask or bias; 1 if it is the same for all
    rows: int = 1  # its queries; 1 if it is the same for all
    # From the index of a batch entry to the number of those before it that have the same index in the operand.
    sharers_before: Callable[[Any], Any] = lambda b: 0
    ref: Any = None  # `[entries, ...]`; masks and biases are `[entries * heads * rows, cols]`, segments are lines

    def __getitem__(self, at):
        """Loads an element. The first index is that of the batch entry."""
        b, *rest = at if isinstance(at, tuple) else (at,)
        return self.ref[(self.index(b), *rest)]

    @property
    def varies(self) -> tuple[bool, bool]:
        """True for each of queries and keys along which a mask or bias varies."""
        return self.rows > 1, self.ref.shape[1] > 1

    def part_of_line(self, b, start, length) -> tuple[Any, Any, Any]:
        """Returns the operand, the place of element `start` of an entry's line of a length, and how many elements follow."""
        return self.ref, self.index(b) * length + start, length - start

    def entry(self, b, head):
        """Returns the number of the matrix of a mask or bias that belongs to a head."""
        return self.index(b) * self.heads + (head if self.heads > 1 else 0)

    def row(self, b, head, query):
        """Returns the row of a mask or bias that belongs to a query."""
        return self.entry(b, head) * self.rows + (query if self.rows > 1 else 0)


def lay_out(
    batch: tuple[int, ...], operands: Mapping[str, jax.Array]
) -> tuple[OrderedDict[str, jax.Array], dict[str, GlobalOperand]]:
    """Reshapes operands as kernels address them. Tables that XLA makes of operands are `[*batch, blocks, numbers]`."""
    arrays, records = OrderedDict(), {}
    for name, array in operands.items():
        if name == "block_kinds":  # XLA alone reads it
            continue
        batch_axes = array.ndim - (len(AXES[name]) if name in AXES else 2)
        sizes = array.shape[batch_axes:]
        if AXES.get(name) == "NTS":
            shape, heads_and_rows = (-1, sizes[-1]), sizes[:2]
        elif AXES.get(name) == "NE":  # a table of a score or mask function
            shape, heads_and_rows = (-1, sizes[-1]), ()
        else:
            shape, heads_and_rows = ((-1,) if name.endswith("_segments") else (-1, *sizes)), ()
        arrays[name] = array.reshape(shape)
        records[name] = record(batch, array.shape[:batch_axes], *heads_and_rows)
    return arrays, records


def of_operand(name: str, pair: Sequence[Any]) -> Any:
    """Returns the first of a pair for queries "q" and keys "k", the second for values "v", output "o" and cotangents "do"."""
    return pair[0 if name[0] in "qk" else 1]


def tail_of(size: int) -> int:
    """Returns the columns of a head size's last slab if it is narrower than `SWIZZLED`, or 0 if all slabs are as wide.

    A tail has 16 or 32 columns, as products take them with a swizzle of 32 or 64 bytes.
    """
    rest = size % SWIZZLED
    if size < SWIZZLED or not 0 < rest <= 32:
        return 0
    return 16 if rest <= 16 else 32


def in_two_views(shape: tuple[int, ...], tiled_shape: tuple[int, ...], dtype: Any) -> Any:
    """Describes slabs of columns in shared memory under two names, which have the same bytes.

    TMA copies a slab without tiles, which clips it at any row and column. The tensor cores read tiles.
    """
    columns = shape[-1]
    swizzle = plgpu.SwizzleTransform(columns * jnp.dtype(dtype).itemsize)
    tiled = plgpu.SMEM(tiled_shape, dtype, transforms=(plgpu.TilingTransform((8, columns)), swizzle))
    return plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(swizzle,)), tiled)


def views_of(slabs: Any) -> tuple[Any, Any]:
    """Returns both names of slabs: as TMA copies them, and as the tensor cores read them."""
    untiled, tiled = slabs
    return untiled, tiled


def pad_segments(segments: jax.Array) -> jax.Array:
    """Pads segment ids, int32 `[*batch, length]`, to lines `[entries, multiple of 4]`: TMA takes multiples of 16 bytes."""
    lines = segments.reshape(-1, segments.shape[-1])
    more = -lines.shape[1] % 4
    return jnp.pad(lines, ((0, 0), (0, more))) if more else lines


def record(batch: tuple[int, ...], shape: tuple[int, ...], *heads_and_rows: int) -> GlobalOperand:
    """Returns the record of an operand whose batch axes have `shape`."""
    shape = (1,) * (len(batch) - len(shape)) + tuple(shape)
    shared = tuple(size if own == 1 else 1 for size, own in zip(batch, shape, strict=True))
    return GlobalOperand(batch_index(batch, shape), *heads_and_rows, sharers_before=batch_index(batch, shared))


def batch_index(batch: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Returns a function from the index of a batch entry to the index in an operand whose batch axes have `shape`."""
    shape = (1,) * (len(batch) - len(shape)) + tuple(shape)
    if shape == batch:
        return lambda b: b

    def index(b):
        total, stride, below = jnp.int32(0), 1, 1
        for size, own in zip(reversed(batch), reversed(shape), strict=True):
            if own != 1:
                total += lax.rem(lax.div(b, jnp.int32(below)), jnp.int32(size)) * stride
            stride, below = stride * own, below * size
        return total

    return index


def split_terms(array: jax.Array, size: int) -> tuple[jax.Array, jax.Array]:
    """Splits a float32 operand `[..., rows, heads, head size]` into two terms of bfloat16, with `size` columns.

    TMA copies whole tiles of 8 rows: there are more rows, all 0, if their number is no multiple of 8. XLA computes both terms
    in one kernel.
    """
    rest = [(0, -array.shape[-3] % 8), (0, 0), (0, size - array.shape[-1])]
    array = jnp.pad(array, [(0, 0)] * (array.ndim - 3) + rest)
    # Not two casts, which XLA takes for the number that was cast: the low term would be 0.
    high = lax.reduce_precision(array, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (array - high).astype(jnp.bfloat16)


def pair_terms(left: Sequence[Any], right: Sequence[Any]) -> list[tuple[Any, Any]]:
    """Pairs terms of two operands that are multiplied, the smallest products first.

    An operand of 16 bits is one term. An operand of float32 is two, the high one first, and the product of both low terms is
    left out.
    """
    if len(left) == 1:
        return [(left[0], right[0])]
    return list(zip((left[1], left[0], left[0]), (right[0], right[1], right[0]), strict=True))


def hidden_zero(step, use: int):
    """Returns 0 in a form that the compiler cannot fold, a different one for each use.

    It then recomputes addresses instead of keeping them in registers. Tracing cannot compare an index with an array's end.
    """
    return lax.shift_right_arithmetic(step, jnp.int32(31 - use))


def in_one_segment(s, row_ids, col_ids, hidden=-jnp.inf):
    """Returns scores or weights, with `hidden` for queries and keys of different segments."""
    same = lax.broadcast_in_dim(row_ids, s.shape, (0,)) == lax.broadcast_in_dim(col_ids, s.shape, (1,))
    return jnp.where(same, s, hidden)


def dropout_keeps(seeds, b, head, first, block, shape, rate, *, is_transposed=False):
    """Tells which weights dropout keeps, of rows from `first` on and a block of columns.

    Rows are queries and columns keys unless transposed. `seeds` are two words and the positions of the first query and key.
    """
    query_start, key_start = (seeds[b, head, i] for i in (2, 3))
    origins = (key_start, query_start) if is_transposed else (query_start, key_start)
    starts = origins[0] + jnp.uint32(first), origins[1] + jnp.uint32(block * shape[1])
    positions = [start + plgpu.broadcasted_iota(jnp.uint32, shape, axis, layout=LAYOUT) for axis, start in enumerate(starts)]
    row, col = reversed(positions) if is_transposed else positions
    first_word, second_word = (jnp.broadcast_to(seeds[b, head, i], shape) for i in range(2))
    return dropout.keep(first_word, second_word, row, col, rate)


def lse_of_large(lse):
    """Returns the log-sum-exp of scores that may be large, from one that was computed in powers of two.

    What comes of the least power of two is `finfo.min`, the score of keys that are hidden by a finite number.
    """
    least = float(jnp.finfo(jnp.float32).min)
    return jnp.where((lse > -jnp.inf) & (lse < 0.69 * least), least, lse)


def raised_lse(lse):
    """Returns the log-sum-exp of scores that may be large, for derivatives.

    Its rounding may put it below the scores, by much if it is large. It is raised by its rounding less 8 then: weights of
    derivatives are at most `exp(8)`, where they would be infinite in a row whose keys all have scores of -1e9.
    """
    return jnp.maximum(lse, jnp.maximum(lse * (1 + 2.0**-21), lse * (1 - 2.0**-21)) - 8)


def tanh(x):
    """Returns `tanh` of scores."""
    return fused.fused(fused.tanh, (), [x], LAYOUT)
