"""Attention on Triton: how work is spread over programs, and the launch of the kernels in `attention.py`."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import numpy as np

from jaxsoftmax._core.row_problem import indexed
from jaxsoftmax._core.target import Target
from jaxsoftmax._triton import custom_call
from jaxsoftmax._triton.attention_program import TileProgram

KernelName = Literal["forward", "backward_keys", "backward_queries"]
Window = tuple[int | None, int | None]
Dims = tuple[tuple[int, ...], ...]

LOG2E = math.log2(math.e)


# Tiles.


@dataclass(frozen=True)
class AttentionTiling:
    """The tiles of a program, and its threads."""

    block_q: int  # queries of a tile, a power of two
    block_kv: int  # keys of a tile, a power of two
    warps: int
    stages: int  # tiles of the other side, which the program visits one after the other, that are in shared memory at once

    def describe(self) -> str:
        stages = f"{self.stages} stage{'s' * (self.stages > 1)}"
        return f"tiles of {self.block_q} queries x {self.block_kv} keys, {self.warps} warps, {stages}"


# Tilings by kernel and bytes of an element, for each head size of a tile: for GPUs whose tensor cores read shared memory
# (Hopper, and Blackwell for servers), and for GPUs whose tensor cores read registers, which then have to hold more. ptxas says
# that these spill little or nothing.
_TILINGS = {
    ("forward", 2): {
        64: (AttentionTiling(64, 64, 4, 3), AttentionTiling(128, 64, 4, 3)),
        128: (AttentionTiling(64, 64, 4, 3), AttentionTiling(128, 64, 8, 3)),
        256: (AttentionTiling(128, 64, 8, 2), AttentionTiling(64, 32, 4, 2)),
        512: (AttentionTiling(32, 32, 8, 1), AttentionTiling(32, 32, 8, 1)),
    },
    ("forward", 4): {
        64: (AttentionTiling(64, 32, 4, 2), AttentionTiling(64, 32, 4, 2)),
        128: (AttentionTiling(32, 32, 4, 2), AttentionTiling(32, 32, 4, 2)),
    },
    ("backward_keys", 2): {
        64: (AttentionTiling(64, 64, 4, 3), AttentionTiling(64, 64, 4, 2)),
        128: (AttentionTiling(64, 64, 4, 2), AttentionTiling(64, 64, 8, 2)),
        256: (AttentionTiling(32, 64, 8, 2), AttentionTiling(32, 64, 8, 1)),
    },
    ("backward_keys", 4): {
        64: (AttentionTiling(32, 32, 4, 1), AttentionTiling(32, 32, 4, 1)),
        128: (AttentionTiling(32, 16, 8, 1), AttentionTiling(32, 16, 8, 1)),
    },
    ("backward_queries", 2): {
        64: (AttentionTiling(64, 64, 4, 2), AttentionTiling(64, 64, 4, 2)),
        128: (AttentionTiling(64, 64, 4, 2), AttentionTiling(64, 64, 4, 2)),
        256: (AttentionTiling(64, 32, 8, 2), AttentionTiling(64, 32, 8, 1)),
    },
    ("backward_queries", 4): {
        64: (AttentionTiling(32, 32, 4, 1), AttentionTiling(32, 32, 4, 1)),
        128: (AttentionTiling(32, 16, 8, 1), AttentionTiling(32, 16, 8, 1)),
    },
}
_LEAST = 16  # keys of the smallest tile that tensor cores take
_READ_SHARED_MEMORY = (9, 10)  # major compute capabilities of the GPUs whose tensor cores read shared memory


def tiling_for(
    kernel: KernelName,
    itemsize: int,
    widths: tuple[int, int],
    target: Target,
    score_bytes: int = 0,
    has_score_mod: bool = False,
) -> AttentionTiling | None:
    """Returns the tiling of a kernel for tiles of these head sizes, or None if its smallest tiles do not fit.

    If shared memory is short, as the 99 KiB of 8.6, 8.9 and 12.0 are, there are fewer stages, then fewer keys. A bias, a mask
    and what functions load, of `score_bytes` bytes for each score, have tiles too, in shared memory and registers: the others
    shrink then. With a score function more warps share the derivatives of keys.
    """
    if target.compute_capability is None:
        raise AssertionError(f"Triton compiles for GPUs, not for {target}")
    table = _TILINGS[kernel, itemsize]
    from_shared, from_registers = table[min(size for size in table if size >= max(widths))]
    tiling = from_shared if target.compute_capability[0] in _READ_SHARED_MEMORY else from_registers
    if score_bytes:
        most = (64, 32) if kernel != "backward_keys" else (32, 64)
        tiling = replace(tiling, block_q=min(tiling.block_q, most[0]), block_kv=min(tiling.block_kv, most[1]))
    elif has_score_mod and kernel == "backward_keys" and itemsize == 2:
        # The derivative of the function is one more array. With 4 warps ptxas spills 2840 bytes of a gate, with 8 752 bytes
        # (float16, heads of 128, 9.0).
        tiling = replace(tiling, warps=8)
    while shared_bytes(kernel, tiling, itemsize, widths, score_bytes) > target.shared_memory:
        if tiling.stages > 1:
            tiling = replace(tiling, stages=tiling.stages - 1)
        elif tiling.block_kv > _LEAST:
            tiling = replace(tiling, block_kv=tiling.block_kv // 2)
        else:
            return None
    return tiling


def shared_bytes(
    kernel: KernelName, tiling: AttentionTiling, itemsize: int, widths: tuple[int, int], score_bytes: int = 0
) -> int:
    """Estimates the shared memory of a program: its own tiles, those that it visits, and some that change their layout."""
    rows, visited, both = tiling.block_q, tiling.block_kv, sum(widths)
    held_bytes, extra = itemsize * both * rows, 3 if itemsize == 4 else 0
    if kernel == "forward":
        held_bytes, extra = itemsize * widths[0] * rows, 0
    elif kernel == "backward_keys":
        rows, visited, held_bytes, extra = visited, rows, itemsize * both * visited, max(extra, 1)
    visited_bytes = tiling.stages * visited * (itemsize * both + rows * score_bytes)
    return held_bytes + visited_bytes + itemsize * extra * max(widths) * visited


# Constants of kernels.


@dataclass(frozen=True)
class AttentionSizes:
    """The sizes of an attention problem."""

    entries: int  # of the batch
    queries: int
    keys: int
    heads: int  # of queries
    key_heads: int
    size: int  # head size of queries and keys
    value_size: int
    itemsize: int

    @property
    def groups(self) -> int:
        """Number of query heads that share a key head."""
        return self.heads // self.key_heads

    @property
    def width(self) -> int:
        """Head size of tiles of queries and keys: any head size is padded to a power of two by predicates of loads."""
        return _padded(self.size)

    @property
    def value_width(self) -> int:
        """Head size of tiles of values."""
        return _padded(self.value_size)

    @property
    def widths(self) -> tuple[int, int]:
        return self.width, self.value_width


def _padded(size: int) -> int:
    return max(16, 1 << (size - 1).bit_length())


@dataclass(frozen=True)
class ScoreScale:
    """Turns products of queries and keys to scores, as `online.push_log2` takes them."""

    scale: float
    soft_cap: float | None  # bound of scores `soft_cap * tanh(score / soft_cap)`
    has_bias: bool
    headroom: float  # see `online.push_log2`
    is_changed: bool = False  # True if a score function stands between the scale and the soft cap

    @property
    def factor(self) -> float:
        """Factor of the products, of the score function's results, or of the tanh."""
        if self.soft_cap is not None:
            return self.soft_cap
        return 1.0 if self.is_changed else self.scale

    @property
    def scale_in_cap(self) -> float | None:
        """Factor in the tanh of the soft cap; None without one."""
        return None if self.soft_cap is None else (1.0 if self.is_changed else self.scale) / self.soft_cap

    @property
    def unit(self) -> float:
        """Unit of the scores, see `online.push_log2`; with 1 the factor is multiplied while the exponent is computed.

        A score with a bias, or of a function, may be as large as `finfo.min`, and must not be rounded with a factor.
        """
        return 1.0 if not (self.has_bias or self.is_changed) and self.factor > np.finfo(np.float32).tiny else LOG2E

    @property
    def scale_log2(self) -> float:
        return self.factor * LOG2E if self.unit == 1 else 1.0


@dataclass(frozen=True)
class WeightDropout:
    """Dropout of attention weights: the constants of its hash."""

    dropped: int  # number of random words, of 2^32, that drop a weight
    multipliers: tuple[int, ...]  # of a row, of a row in the second hash, of a column, and the first and second of the mixer


_L2 = 24 << 20  # bytes of the other side that programs may share at a time


@dataclass(frozen=True)
class AttentionLaunch:
    """The constants of a launch of a kernel of attention."""

    kernel: KernelName
    tiling: AttentionTiling
    sizes: AttentionSizes
    window: Window  # number of keys that a query sees before its own position and behind it; None for all
    scores: ScoreScale
    dropout: WeightDropout | None
    kept: float  # factor of the weights that dropout keeps
    is_partial: bool  # True if derivatives of queries are parts of sums, which are multiplied with the scale later
    bias_is_whole: bool  # True if each score has a bias of its own
    dims: tuple[tuple[str, Dims], ...]  # of the operands and results that are present, by name: see `index_dims`
    score_mod: TileProgram | None = None  # in backward kernels its second result is the derivative by the score
    mask_mod: TileProgram | None = None
    starts: tuple[tuple[str, int], ...] = ()  # first words of the operands that functions read, by name
    # Tables of loads, to whose derivatives `backward_keys` adds. Each load has two more results of the score function: the
    # place of the element, below 0 for none, and the derivative by it.
    loads: tuple[str, ...] = ()

    def has(self, *names: str) -> bool:
        """Tells whether one of these operands is present."""
        return not {name for name, _ in self.dims}.isdisjoint(names)

    @property
    def left(self) -> int | None:
        return self.window[0]

    @property
    def right(self) -> int | None:
        return self.window[1]

    @property
    def query_scale(self) -> float:
        """Factor of the derivatives of queries."""
        return 1.0 if self.is_partial else self.scores.scale

    # A program has a block of its own side, keys or queries, and visits blocks of the other side.

    @property
    def by_keys(self) -> bool:
        """True if a program has a block of keys."""
        return self.kernel == "backward_keys"

    @property
    def own_block(self) -> int:
        """Rows of a block of the own side."""
        return self.tiling.block_kv if self.by_keys else self.tiling.block_q

    @property
    def other_block(self) -> int:
        """Rows of a block of the other side."""
        return self.tiling.block_q if self.by_keys else self.tiling.block_kv

    @property
    def before(self) -> int | None:
        """Number of positions that a row of the own side sees before its own."""
        return self.window[1 if self.by_keys else 0]

    @property
    def after(self) -> int | None:
        """Number of positions that a row of the own side sees behind its own."""
        return self.window[0 if self.by_keys else 1]

    # The grid.

    @property
    def own_heads(self) -> int:
        """Number of heads of the own side."""
        return self.sizes.key_heads if self.by_keys else self.sizes.heads

    @property
    def pairs(self) -> int:
        """Number of batch entries times heads."""
        return self.sizes.entries * self.own_heads

    @property
    def blocks(self) -> int:
        """Number of blocks of a head."""
        return -(-(self.sizes.keys if self.by_keys else self.sizes.queries) // self.own_block)

    @property
    def heads_at_once(self) -> int:
        """Number of heads whose blocks run at the same time. With a window, blocks take long and short: they fill the gaps."""
        if self.window == (None, None):
            return 1
        sizes = self.sizes
        rows, heads = (sizes.queries, sizes.heads) if self.by_keys else (sizes.keys, sizes.key_heads)
        bytes_of_head = sizes.itemsize * rows * (sizes.size + sizes.value_size) * heads // self.own_heads
        return max(1, min(8, _L2 // bytes_of_head))

    # What may be hidden.

    @property
    def some_whole(self) -> bool:
        """True if there may be blocks that all rows see whole."""
        return not self.has("mask", "bias")

    @property
    def some_masked(self) -> bool:
        """True if there may be other blocks."""
        return not self.some_whole or self._is_ragged or self._hides_blocks

    @property
    def masks_one_block(self) -> bool:
        """True if all rows see all blocks whole, except the last one, which is not full."""
        return self.some_whole and self._is_ragged and not self._hides_blocks

    @property
    def _is_ragged(self) -> bool:
        """True if the last block of the other side is not full."""
        return (self.sizes.queries if self.by_keys else self.sizes.keys) % self.other_block != 0

    @property
    def _hides_blocks(self) -> bool:
        """True if which blocks are seen, or seen whole, depends on the rows or on operands."""
        has_operands = self.has("query_lengths", "key_lengths", "query_segments")
        return has_operands or self.window != (None, None) or self.mask_mod is not None

    @property
    def own_vary(self) -> bool:
        """True if an operand says how many rows there are of the own side."""
        return self.has("key_lengths" if self.by_keys else "query_lengths")

    @property
    def hides(self) -> bool:
        """True if an operand or a function may hide keys between others that are seen."""
        return self.has("mask", "bias", "query_segments") or self.mask_mod is not None


def index_dims(axes: str, shape: tuple[int, ...], batch: tuple[int, ...], sizes: Mapping[str, int]) -> Dims:
    """Returns the places of an operand or result by batch entry, head, row and column; see `row_problem.indexed`.

    Args:
      axes: a letter for each axis behind those of the batch: N and K for heads, T, S and B for rows and columns, others for
        axes that a row or column contains.
      shape: shape of the array, whose axes may have size 1.
      batch: shape of the batch.
      sizes: sizes of the axes that are whole, by their letters.
    """
    named = zip(axes, shape[len(shape) - len(axes) :], strict=True)
    whole = (*batch, *(sizes.get(letter, size) for letter, size in named))
    shape = (1,) * (len(whole) - len(shape)) + tuple(shape)
    at = len(batch)
    heads = [at + i for i, letter in enumerate(axes) if letter in "NK"]
    lines = [at + i for i, letter in enumerate(axes) if letter in "BTS"]
    return tuple([indexed(shape, whole, members) for members in (range(at), heads, lines[:1], lines[1:])])


# Pointers of the kernels in their order: of all of them, and of each.
POINTERS = (
    "query", "key", "value", "bias", "mask", "query_lengths", "key_lengths", "query_offset", "query_segments", "key_segments",
    "seeds", "words", "spans",
)  # fmt: skip
_OWN_POINTERS = {"forward": ("sinks",), **dict.fromkeys(("backward_keys", "backward_queries"), ("d_out", "lse", "delta"))}
_LAST_RESULTS = {"backward_keys": "d_words", "backward_queries": "d_bias"}  # results that need not be wanted


def launch_attention(
    launch: AttentionLaunch, operands: Mapping[str, jax.Array], results: Mapping[str, Any], target: Target
) -> list[jax.Array]:
    """Runs a kernel of attention on operands by name; `results` are types by name."""
    from jaxsoftmax._triton import attention as kernels  # it imports Triton

    names = (*POINTERS, *_OWN_POINTERS[launch.kernel])
    last = _LAST_RESULTS.get(launch.kernel)
    absent: dict[str, Any] = {} if last is None or last in results else {last: None}
    return custom_call.launch(
        getattr(kernels, f"attention_{launch.kernel}"),
        [operands.get(name, operands["query"]) for name in names],  # an absent operand is not read
        list(results.values()),
        programs=launch.pairs * launch.blocks,
        warps=launch.tiling.warps,
        stages=launch.tiling.stages,
        zeroed=() if last is None or absent else (len(results) - 1,),  # kernels add to it
        target=target,
        LAUNCH=launch,
        **absent,
    )
