"""How a block loads and stores its rows: with Pallas where they end with its steps, else in PTX.

Pallas loads and stores whole tiles of an array. Rows may have any length and number, and any alignment that follows from them.
Loads give `fill` beyond the end, and stores leave out what lies there: nothing outside is touched.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith

from jaxsoftmax._core import compat
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import WARP, WARPS, Vector, both, compare, constant, i64, utils
from jaxsoftmax._gpu.rows.layout import RowLayout


@dataclass(frozen=True)
class Memory:
    """The rows of a block in memory.

    Attributes:
      layout: how the block's threads hold them.
      row: the first of them, a scalar int32.
      count: rows of the arrays.
      exact: whether arrays of so many rows end where a block's rows do, and rows with a step of all threads.
    """

    layout: RowLayout
    row: Any
    count: int
    exact: bool

    def group(self):
        """The number of the warpgroup in its block."""
        return lax.axis_index("warpgroup") if self.layout.warpgroups > 1 else jnp.int32(0)

    def copy_in(self, ref, slot, barrier) -> None:
        """Starts the copies of a row to shared memory, one for each step of the block."""
        groups = self.layout.warpgroups

        def start():
            for step in range(self.layout.steps):
                source, target = self._at(ref, step, groups), slot.at[pl.ds(step * groups, groups)]
                plgpu.copy_gmem_to_smem(source, target, barrier.at[step], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        if groups > 1:
            pl.when(self.group() == 0)(start)
        else:
            start()

    def hold(self, ref, fill, slot, dtype) -> Callable[[Any], jax.Array]:
        """What is as large as the rows, as a function of a step that converts it to `dtype`.

        It is held in registers, in `slot` unless that is None, or in a kernel with a loop nowhere but in memory.
        """
        layout = self.layout
        load = functools.partial(plgpu.load, layout=layout.layout, optimized=False)
        if layout.config.unroll and slot is None:
            return lambda step: load(self._at(ref, step)).astype(dtype)
        if not layout.config.unroll:
            steps = range(layout.steps)
            held = [load(self._at(ref, step)) for step in steps] if self.exact else self._load(ref, ref.dtype, fill)
            if slot is None:
                return lambda step: held[step].astype(dtype)
            for step in steps:
                slot.at[step * layout.warpgroups + self.group()][...] = held[step]
        return lambda step: load(slot.at[step * layout.warpgroups + self.group()]).astype(dtype)

    def load_mask(self, ref, source_row) -> Callable[[int], jax.Array]:
        """A mask as a function of a step: bool.

        With `source_row`, a function of a row, an int32 MLIR value, to the row of the mask, the rows of the mask repeat, which
        vectors must be aligned for.
        """
        loaded = self._load(ref, jnp.dtype(jnp.int8), 0, source_row)
        return lambda step: loaded[step] != 0

    def store(self, ref, step, values: jax.Array) -> None:
        """Stores what is computed in a step."""
        if self.exact:
            compat.store(self._at(ref, step), values)
            return
        itemsize = values.dtype.itemsize

        def store(ref, row, values):
            starts = self._starts(ref, row, itemsize)
            for register, start in zip(values.registers.flat, starts, strict=True):
                self._vector(step, start, itemsize).store(register)

        ptx.emit(store, ref, [self.row], [(values, self.layout.layout)])

    def inside(self) -> Callable[[int], jax.Array] | None:
        """Whether elements are of a row, as a function of a step: bool; None if all are."""
        if self.exact:
            return None
        flags = self._load(None, jnp.dtype(jnp.int8), 0)
        return lambda step: flags[step] != 0

    def load_row(self, ref) -> jax.Array:
        """A value for each row of the block; one value where it has one row. 0 for rows that are not there."""
        layout, itemsize = self.layout, ref.dtype.itemsize
        if layout.whole_block:
            return ref[self.row]
        if self.exact:
            return plgpu.load(ref.at[pl.ds(self.row, layout.rows)], layout=layout.row_layout, optimized=False)

        def load(ref, row):
            register = layout.row_layout.to_mgpu().registers_element_type(ref.type.element_type)
            return [entry.load(register) for entry in self._row_entries(ref, row, itemsize)]

        kind = plgpu.ShapeDtypeStruct((layout.rows,), ref.dtype, layout=layout.row_layout)
        return ptx.emit(load, ref, [self.row], results=kind)

    def store_row(self, ref, values: jax.Array) -> None:
        """Stores a value for each row of the block."""
        layout, itemsize = self.layout, values.dtype.itemsize
        if layout.whole_block:
            ref[self.row] = values
            return
        if self.exact:
            compat.store(ref.at[pl.ds(self.row, layout.rows)], values)
            return

        def store(ref, row, values):
            first = compare("eq", arith.remui(utils.thread_idx(), constant(layout.lanes)), constant(0))
            for register, entry in zip(values.registers.flat, self._row_entries(ref, row, itemsize), strict=True):
                Vector(entry.address, 0, itemsize, both(first, entry.inside)).store(register)

        ptx.emit(store, ref, [self.row], [(values, layout.row_layout)])

    def _at(self, ref, step, entries=None):
        """What the warpgroup has in a step of an array, or so many entries of it that the block has."""
        layout = self.layout
        if not layout.whole_block:
            width = layout.shape[1]
            return ref.at[pl.ds(self.row, layout.rows), pl.ds(step * width, width)]
        rank = lax.axis_index("rank") if layout.blocks > 1 else jnp.int32(0)
        first = ((self.row * layout.steps + step) * layout.blocks + rank) * layout.warpgroups
        return ref.at[first + self.group() if entries is None else pl.ds(first, entries)]

    def _load(self, ref, dtype, fill, source_row=None) -> list[jax.Array]:
        """An array for each step from `ref`, `[*, cols]` in global memory, or without `ref` of which elements are of a row.

        `dtype` is int8 for bool.
        """
        layout = self.layout
        fill = int.from_bytes(np.full(4 // dtype.itemsize, fill, dtype).tobytes(), "little")  # of a word

        def load(*ref_and_row):
            *refs, row = ref_and_row
            register = layout.layout.to_mgpu().registers_element_type(utils.dtype_to_ir_type(dtype))
            starts = list(self._starts(refs[0] if refs else None, row, dtype.itemsize, source_row))
            policy = None
            if source_row is not None:  # other blocks load it too: the L2 cache should rather keep it than what passes through
                asm = "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;"
                policy = utils.inline_ptx(asm, result_types=ptx.integer(64))

            def held(vector):
                return vector.load(register, fill, policy) if refs else vector.touched(register)

            steps = range(layout.steps)
            return [[held(self._vector(step, start, dtype.itemsize)) for start in starts] for step in steps]

        kind = plgpu.ShapeDtypeStruct(layout.shape, dtype, layout=layout.layout)
        return ptx.emit(load, ref, [self.row], results=[kind] * layout.steps)

    def _starts(self, ref, row, itemsize, source_row=None):
        """Of each row of this thread the address where its vectors start, the element there, and whether it is a row at all."""
        layout = self.layout
        position = utils.thread_idx() if layout.whole_block else arith.remui(utils.thread_idx(), constant(layout.lanes))
        if layout.blocks > 1:
            rank = utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=ptx.integer(32))
            position = arith.addi(position, arith.muli(rank, constant(layout.threads)))
        element = arith.muli(position, constant(layout.vector))
        for own_row, inside in self._own_rows(row):
            array_row = own_row if source_row is None else source_row(own_row)
            start = arith.addi(arith.muli(i64(array_row), i64(layout.cols)), i64(element))
            in_row = element
            if not layout.aligned:
                before = arith.remui(start, i64(layout.vector))
                start = arith.subi(start, before)
                in_row = arith.subi(element, arith.trunci(element.type, before))
            base = i64(0) if ref is None else ptx.address_of(ref)
            yield arith.addi(base, arith.muli(start, i64(itemsize))), in_row, inside

    def _vector(self, step, start, itemsize):
        """The vector that a thread has in a step."""
        layout = self.layout
        address, first, inside = start
        skipped = step * layout.sharers * layout.vector
        ends_inside = skipped + layout.sharers * layout.vector <= layout.cols  # for all threads
        vector = functools.partial(Vector, address, skipped * itemsize, itemsize)
        if layout.aligned:
            return vector(inside if ends_inside else both(inside, compare("slt", first, constant(layout.cols - skipped))))
        if step > 0 and ends_inside:
            return vector(None)
        elements = [arith.addi(first, constant(skipped + q)) for q in range(layout.vector)]
        own = [both(compare("sge", place, constant(0)), compare("slt", place, constant(layout.cols))) for place in elements]
        whole = both(own[0], own[-1])
        return vector(whole, arith.xori(whole, functools.reduce(arith.ori, own)), own)

    def _row_entries(self, ref, row, itemsize):
        for own_row, inside in self._own_rows(row):
            yield Vector(arith.addi(ptx.address_of(ref), arith.muli(i64(own_row), i64(itemsize))), 0, itemsize, inside)

    def _own_rows(self, row):
        """The rows of which this thread holds elements, and whether they are there, None if always."""
        layout = self.layout
        if layout.whole_block:
            yield row, None
            return
        own = arith.addi(row, arith.divui(utils.thread_idx(), constant(layout.lanes)))
        for i in range(layout.repeats):
            here = arith.addi(own, constant(i * WARPS * (WARP // layout.lanes)))
            yield here, (None if self.count % layout.rows == 0 else compare("ult", here, constant(self.count)))


def row_of_mask(shape: Sequence[int], mask_shape: Sequence[int], axes: Sequence[int]) -> Callable[[Any], Any]:
    """The row of a mask for a row of the scores, as a function of an int32 MLIR value: where it has size 1, it repeats."""
    # From the last axis: rows of the scores between entries, entries, rows of the mask between them.
    parts: list[list[int]] = []
    between, stride = 1, 1
    for axis in reversed(range(len(shape))):
        if axis in axes or shape[axis] == 1:
            continue
        if mask_shape[axis] != 1:
            if parts and parts[-1][0] * parts[-1][1] == between:
                parts[-1][1] *= shape[axis]
            else:
                parts.append([between, shape[axis], stride])
            stride *= shape[axis]
        between *= shape[axis]

    def source_row(row):
        total = constant(0)
        for divisor, modulus, stride in parts:
            index = arith.divui(row, constant(divisor))
            if divisor * modulus != between:
                index = arith.remui(index, constant(modulus))
            total = arith.addi(total, arith.muli(index, constant(stride)))
        return total

    return source_row
