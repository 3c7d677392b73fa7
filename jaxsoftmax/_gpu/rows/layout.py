"""Which thread of a block holds which elements of which rows, and how it loads and stores them.

Pallas loads and stores whole tiles of an array. The rows of a softmax may have any length and number, and any alignment that
follows from them. Loads give `fill` beyond the end, and stores leave out what lies there: nothing outside is touched.
"""

import functools
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu.ptx import (
    SPLAT,
    WARP,
    WARPS,
    Start,
    Vector,
    address_of,
    both,
    compare,
    constant,
    fragmented,
    i64,
    tiled,
)


@dataclass(frozen=True)
class RowTile:
    """How the threads of a block, or of a cluster of blocks, hold rows of an array.

    A row of `cols` elements is cut into vectors. The threads that share a row take turns: thread p has the vectors p, p +
    `sharers`, and so on. Up to 32 threads are lanes of a warp, and a block is one warpgroup with many rows; else they are all
    threads of a block, or of a cluster, which has one row. With each turn a warpgroup holds one more array of `shape`: part of
    its rows, or of the shares that its four warps have of one.

    Vectors start where the array is aligned to them. If `vector` does not divide `cols`, that is up to `vector - 1` elements
    before the row; the first and the last vector of the row then hold `fill` where they are not of the row.

    Attributes:
      cols: elements of a row.
      vector: consecutive elements that a thread loads at once, a power of two. One row a block, or a divisor of `cols`.
      threads: threads of a block that share a row, a power of two to 32, or a multiple of 128.
      repeats: rows of a block for each group of threads; 1 where the block has one row.
      blocks: blocks of a cluster that share a row; 1 where a block has many rows.
    """

    cols: int
    vector: int
    threads: int
    repeats: int = 1
    blocks: int = 1

    @property
    def whole_block(self) -> bool:
        """Whether all of the block shares one row."""
        return self.threads > WARP

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block."""
        return max(1, self.threads // (WARP * WARPS))

    @property
    def lanes(self) -> int:
        """Lanes of a warp that share a row."""
        return min(self.threads, WARP)

    @property
    def sharers(self) -> int:
        """Threads that share a row, in all blocks."""
        return self.threads * self.blocks

    @property
    def warps(self) -> int:
        """Warps that share a row of a whole block, in all blocks."""
        return WARPS * self.warpgroups * self.blocks

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 1 if self.whole_block else WARPS * (WARP // self.lanes) * self.repeats

    @property
    def aligned(self) -> bool:
        """Whether rows start where vectors do."""
        return self.cols % self.vector == 0

    @property
    def turns(self) -> int:
        """Vectors of a row that a thread holds, the last of which may lie beyond the end."""
        touched = self.cols // self.vector + (0 if self.aligned else 2)
        return -(-touched // self.sharers)

    @property
    def shape(self) -> tuple[int, int]:
        """What a warpgroup holds with each turn: rows, or warps, by elements."""
        return (WARPS if self.whole_block else self.rows), self.lanes * self.vector

    @cached_property
    def layout(self) -> Any:
        """Where the elements of `shape` are: in vectors, a row in lanes of one warp."""
        rows = WARP // self.lanes
        width = self.lanes * self.vector
        return tiled(((WARPS * rows, width), (rows, width), (self.vector,)), (-5,), (-3, -2))

    @cached_property
    def row_layout(self) -> Any:
        """The layout of a value for each of the rows, or warps, in every lane that shares it."""
        return self.layout.reduce(1)

    def exact(self, rows: int) -> bool:
        """Whether arrays of `rows` rows end where a tile does."""
        return rows % self.rows == 0 and self.cols == self.turns * self.vector * self.sharers

    def view(self, rows: int) -> tuple[int, ...]:
        """The shape of an array that ends where a tile does: what a warpgroup has with a turn is an entry, or a slice."""
        return (rows * self.turns * self.blocks * self.warpgroups, *self.shape) if self.whole_block else (rows, self.cols)

    def load(self, ref, row, rows: int, *, dtype, fill: float = 0, source_row=None, kept: bool = False) -> list[jax.Array]:
        """The tile of `ref`, `[*, cols]` in global memory, whose first row is `row`: `turns` arrays of `shape` and `dtype`.

        Args:
          ref: the array. A bool one is loaded as int8.
          row: scalar int32.
          rows: how many rows the tiles cover in all. Those at and after it are `fill`.
          dtype: of what is loaded.
          fill: what lies beyond the end.
          source_row: None, or a function of a row, an int32 MLIR value, to the row of `ref` that is loaded for it. The vectors
            must be aligned then.
          kept: whether the L2 cache should rather keep this than what else passes through it, as other blocks load it too.
        """
        kind = plgpu.ShapeDtypeStruct(self.shape, dtype, layout=self.layout)

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT), return_type=[kind] * self.turns)
        def load(_, ref, row):
            layout = self.layout.to_mgpu()
            register = layout.registers_element_type(utils.dtype_to_ir_type(dtype))
            bits = int.from_bytes(np.full(4 // dtype.itemsize, fill, dtype).tobytes(), "little")  # of a word
            starts = list(self._starts(ref, row.registers.item(), rows, dtype.itemsize, source_row))
            is_signed = True if jnp.issubdtype(dtype, jnp.integer) else None
            policy = None
            if kept:
                i64 = ir.IntegerType.get_signless(64)
                policy = utils.inline_ptx("createpolicy.fractional.L2::evict_last.b64 $0, 1.0;", result_types=i64)
            arrays = []
            for turn in range(self.turns):
                registers = [self._vector(turn, start).load(register, bits, policy) for start in starts]
                arrays.append(fragmented(registers, layout, self.shape, is_signed))
            return arrays

        return load(ref, row)

    def store(self, ref, row, rows: int, turn: int, values: jax.Array) -> None:
        """Stores the array of one turn to the rows of `ref` from `row` on that are below `rows`."""
        itemsize = values.dtype.itemsize

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, self.layout))
        def store(_, ref, row, values):
            starts = self._starts(ref, row.registers.item(), rows, itemsize)
            for register, start in zip(values.registers.reshape(-1), starts, strict=True):
                self._vector(turn, start).store(register)

        store(ref, row, values)

    def inside(self, row, rows: int) -> list[jax.Array]:
        """For each turn, whether each element is one of a row: int8, 1 or 0."""
        kind = plgpu.ShapeDtypeStruct(self.shape, jnp.int8, layout=self.layout)

        @plgpu.inline_mgpu(arg_types=(SPLAT,), return_type=[kind] * self.turns)
        def inside(_, row):
            layout = self.layout.to_mgpu()
            register = layout.registers_element_type(ir.IntegerType.get_signless(8))
            starts = list(self._starts(None, row.registers.item(), rows, 1))
            return [
                fragmented([self._vector(turn, start).touched(register) for start in starts], layout, self.shape, True)
                for turn in range(self.turns)
            ]

        return inside(row)

    def load_row(self, ref, row, rows: int, *, dtype) -> jax.Array:
        """A value for each of the tile's rows from `ref`, `[rows]` of `dtype`; 0 for those at and after `rows`."""
        shape = self.shape[:1]

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), SPLAT),
            return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=self.row_layout),
        )
        def load(_, ref, row):
            layout = self.row_layout.to_mgpu()
            register = layout.registers_element_type(utils.dtype_to_ir_type(dtype))
            entries = self._row_entries(ref, row.registers.item(), rows, dtype.itemsize)
            return fragmented([entry.load(register, 0) for entry in entries], layout, shape, None)

        return load(ref, row)

    def store_row(self, ref, row, rows: int, values: jax.Array) -> None:
        """Stores a value for each of the tile's rows that are below `rows` to `ref`, `[rows]`."""
        itemsize = values.dtype.itemsize

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SPLAT, self.row_layout))
        def store(_, ref, row, values):
            first = compare("eq", arith.remui(utils.thread_idx(), constant(self.lanes)), constant(0))
            entries = self._row_entries(ref, row.registers.item(), rows, itemsize)
            for register, entry in zip(values.registers.reshape(-1), entries, strict=True):
                Vector(entry.address, 0, itemsize, both(first, entry.inside)).store(register)

        store(ref, row, values)

    def _starts(self, ref, row, rows, itemsize, source_row=None):
        """Where this thread's vectors of each of its rows start."""
        position = utils.thread_idx() if self.whole_block else arith.remui(utils.thread_idx(), constant(self.lanes))
        if self.blocks > 1:
            rank = utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=ir.IntegerType.get_signless(32))
            position = arith.addi(position, arith.muli(rank, constant(self.threads)))
        element = arith.muli(position, constant(self.vector))
        for own_row, inside in self._own_rows(row, rows):
            array_row = own_row if source_row is None else source_row(own_row)
            start = arith.addi(arith.muli(i64(array_row), i64(self.cols)), i64(element))
            in_row = element
            if not self.aligned:
                before = arith.remui(start, i64(self.vector))
                start = arith.subi(start, before)
                in_row = arith.subi(element, arith.trunci(element.type, before))
            base = i64(0) if ref is None else address_of(ref)
            yield Start(arith.addi(base, arith.muli(start, i64(itemsize))), in_row, itemsize, inside)

    def _vector(self, turn, start):
        """The vector that a thread has with this turn."""
        skipped = turn * self.sharers * self.vector
        offset = skipped * start.itemsize
        ends_inside = skipped + self.sharers * self.vector <= self.cols  # for all threads
        if self.aligned:
            inside = start.inside
            if not ends_inside:
                inside = both(inside, compare("slt", start.element, constant(self.cols - skipped)))
            return Vector(start.address, offset, start.itemsize, inside)
        if turn > 0 and ends_inside:
            return Vector(start.address, offset, start.itemsize, None)
        elements = [arith.addi(start.element, constant(skipped + q)) for q in range(self.vector)]
        own = [both(compare("sge", element, constant(0)), compare("slt", element, constant(self.cols))) for element in elements]
        whole = both(own[0], own[-1])
        partial = arith.xori(whole, functools.reduce(arith.ori, own))
        return Vector(start.address, offset, start.itemsize, whole, partial, own)

    def _row_entries(self, ref, row, rows, itemsize):
        for own_row, inside in self._own_rows(row, rows):
            yield Vector(arith.addi(address_of(ref), arith.muli(i64(own_row), i64(itemsize))), 0, itemsize, inside)

    def _own_rows(self, row, rows):
        """The rows of which this thread holds elements, and whether they are below `rows`, None if always."""
        if self.whole_block:
            yield row, None
            return
        own = arith.addi(row, arith.divui(utils.thread_idx(), constant(self.lanes)))
        for i in range(self.repeats):
            here = arith.addi(own, constant(i * WARPS * (WARP // self.lanes)))
            yield here, (None if rows % self.rows == 0 else compare("ult", here, constant(rows)))
