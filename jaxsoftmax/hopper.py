"""The few building blocks that Pallas on Mosaic GPU lacks, in PTX, each once.

Pallas loads and stores whole tiles of an array. The rows of a softmax may have any length and number, and any alignment that
follows from them. `RowTile` says which thread of a block holds which elements of which rows, for arrays that end inside it:
loads give `fill` beyond the end, and stores leave out what lies there. Nothing outside of an array is touched. Functions of
products do the same for scores as the tensor cores leave them in registers.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

WARP = 32
WARPS = 4  # of a warpgroup

_SPLAT = plgpu.Layout.WG_SPLAT(())


def block_barrier() -> None:
    """Waits for all warpgroups of the block; what they wrote to shared memory is then visible."""
    _barrier("bar.sync 0;")


def cluster_arrive() -> None:
    """Says that this block has started, without waiting: first half of what must precede `push_to_cluster`."""
    _barrier("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait() -> None:
    """Waits until all blocks of the cluster have arrived: their shared memory is there from then on."""
    _barrier("barrier.cluster.wait.aligned;")


def cluster_barrier() -> None:
    """Waits for all blocks of the cluster; what they wrote to shared memory, also to that of others, is then visible."""
    _barrier("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def _barrier(ptx: str) -> None:
    @plgpu.inline_mgpu()
    def barrier(_):
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    barrier()


def push_to_cluster(ref, index, values: jax.Array, layout: Any, blocks: int) -> None:
    """Stores a float32 of each warp to `ref[index + warp]` in the shared memory of all blocks of the cluster.

    Args:
      ref: one-dimensional, in shared memory, at the same address in all blocks.
      index: scalar int32, where this warpgroup's four values go.
      values: `[4]`, one for each warp of the warpgroup.
      layout: of `values`, in every lane of the warp.
      blocks: of the cluster, at most 16; one lane stores to each.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, layout))
    def push(_, ref, index, values):
        i32 = ir.IntegerType.get_signless(32)
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        warp = arith.remui(arith.divui(utils.thread_idx(), constant(WARP)), constant(WARPS))
        entry = arith.muli(arith.addi(index.registers.item(), warp), constant(4))
        here = arith.addi(llvm.ptrtoint(i32, utils.memref_ptr(ref)), entry)
        rank = arith.remui(lane, constant(blocks))
        there = utils.inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", here, rank, result_types=i32)
        value = llvm.extractelement(values.registers.flat[0], constant(0))
        one_each = _compare("ult", lane, constant(blocks))
        utils.inline_ptx("st.shared::cluster.f32 [$0], $1;", there, value, predicate=one_each, has_side_effects=True)

    push(ref, index, values)


def take_turn(barrier) -> None:
    """Waits until another warpgroup passes the turn of `barrier`, the number of one of the hardware's 16, on to this one."""
    _turn("sync", barrier)


def pass_turn(barrier) -> None:
    """Passes the turn of `barrier` on to the warpgroup that waits for it, or will."""
    _turn("arrive", barrier)


def _turn(kind: str, barrier) -> None:
    @plgpu.inline_mgpu(arg_types=(_SPLAT,))
    def turn(_, barrier):
        threads = 2 * WARPS * WARP  # of the one that passes and the one that takes
        utils.inline_ptx(f"bar.{kind} $0, {threads};", barrier.registers.item(), has_side_effects=True, convergent=True)

    turn(jnp.int32(barrier))


def meet(barrier: int, warpgroups: int) -> None:
    """Waits for other warpgroups at `barrier`, the number of one of the hardware's 16.

    What they wrote to shared memory is then visible, to tensor cores and bulk copies too.
    """
    _barrier(f"fence.proxy.async.shared::cta; bar.sync {barrier}, {warpgroups * WARPS * WARP};")


def await_count(ref, index, count) -> None:
    """Waits until `ref[index]`, int32 in global memory, is `count`; all that came before its `add_one` is then done."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, _SPLAT))
    def wait(_, ref, index, count):
        ptx = (
            "{ .reg .pred differs; .reg .u32 found; again: ld.acquire.gpu.global.u32 found, [$0];"
            " setp.ne.u32 differs, found, $1; @differs bra again; } fence.proxy.async.global;"
        )
        operands = _entry(ref, index), count.registers.item()
        utils.inline_ptx(ptx, *operands, has_side_effects=True, convergent=True)

    wait(ref, jnp.int32(index), jnp.int32(count))


def add_one(ref, index) -> None:
    """Adds 1 to `ref[index]`, int32 in global memory, after what the warp did before, which has waited for its bulk copies."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT))
    def add(_, ref, index):
        utils.warp_barrier()
        ptx = (
            "{ .reg .pred first; setp.eq.u32 first, $1, 0; fence.proxy.async.global;"
            " @first red.release.gpu.global.add.u32 [$0], 1; }"
        )
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        utils.inline_ptx(ptx, _entry(ref, index), lane, has_side_effects=True)

    add(ref, jnp.int32(index))


def _entry(ref, index):
    """The address of an int32 entry of a line in global memory."""
    return arith.addi(_address(ref), arith.muli(_i64(index.registers.item()), _i64(4)))


def take_ticket(counter) -> jax.Array:
    """Adds 1 to the first entry of `counter`, int32 in global memory, by the first thread of the warpgroup.

    Returns:
      What the entry was, in that thread alone; others hold 0. `store_scalars` tells them.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=_SPLAT))
    def take(_, counter):
        i32 = ir.IntegerType.get_signless(32)
        ptx = "{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }"
        ticket = utils.inline_ptx(ptx, _address(counter), _thread(), result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(ticket, (), is_signed=True)

    return take(counter)


def store_scalars(ref, index, values: Sequence[jax.Array]) -> None:
    """Stores int32 scalars to the first entries of `ref[index]`, in shared memory; one thread of the warpgroup does."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, *(_SPLAT,) * len(values)))
    def store(_, ref, index, *values):
        address = _shared_address(ref, index, ref.type.shape[1])
        with utils.when(_compare("eq", _thread(), constant(0))):
            for k, value in enumerate(values):
                utils.inline_ptx(f"st.shared.u32 [$0+{4 * k}], $1;", address, value.registers.item(), has_side_effects=True)

    store(ref, jnp.int32(index), *values)


def _thread():
    """The index of a thread in its warpgroup."""
    return arith.remui(utils.thread_idx(), constant(WARPS * WARP))


def _shared_address(ref, index, words: int):
    """Where `index` times as many words from the start of `ref` are in shared memory."""
    base = llvm.ptrtoint(ir.IntegerType.get_signless(32), utils.memref_ptr(ref))
    return arith.addi(base, arith.muli(index.registers.item(), constant(4 * words)))


def tiled(tiles, warp_dims, lane_dims) -> Any:
    """A tiled layout whose last axis is the vector, in the canonical form that Mosaic GPU compares layouts in."""
    layout = mgpu.TiledLayout(plgpu.Tiling(tiles), warp_dims, lane_dims, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def replicated(size: int) -> Any:
    """The layout of a few values, a power of two and at most 32, all of which each warp holds."""
    copies = WARP // size
    lanes = (-2,) if copies == 1 else (plgpu.Replicated(copies), -2)
    return tiled(((size,), (1,)), (plgpu.Replicated(WARPS),), lanes)


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

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT), return_type=[kind] * self.turns)
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
                arrays.append(_array(registers, layout, self.shape, is_signed))
            return arrays

        return load(ref, row)

    def store(self, ref, row, rows: int, turn: int, values: jax.Array) -> None:
        """Stores the array of one turn to the rows of `ref` from `row` on that are below `rows`."""
        itemsize = values.dtype.itemsize

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, self.layout))
        def store(_, ref, row, values):
            starts = self._starts(ref, row.registers.item(), rows, itemsize)
            for register, start in zip(values.registers.reshape(-1), starts, strict=True):
                self._vector(turn, start).store(register)

        store(ref, row, values)

    def inside(self, row, rows: int) -> list[jax.Array]:
        """For each turn, whether each element is one of a row: int8, 1 or 0."""
        kind = plgpu.ShapeDtypeStruct(self.shape, jnp.int8, layout=self.layout)

        @plgpu.inline_mgpu(arg_types=(_SPLAT,), return_type=[kind] * self.turns)
        def inside(_, row):
            layout = self.layout.to_mgpu()
            register = layout.registers_element_type(ir.IntegerType.get_signless(8))
            starts = list(self._starts(None, row.registers.item(), rows, 1))
            return [
                _array([self._vector(turn, start).touched(register) for start in starts], layout, self.shape, True)
                for turn in range(self.turns)
            ]

        return inside(row)

    def load_row(self, ref, row, rows: int, *, dtype) -> jax.Array:
        """A value for each of the tile's rows from `ref`, `[rows]` of `dtype`; 0 for those at and after `rows`."""
        shape = self.shape[:1]

        @plgpu.inline_mgpu(
            arg_types=(plgpu.RefType(), _SPLAT),
            return_type=plgpu.ShapeDtypeStruct(shape, dtype, layout=self.row_layout),
        )
        def load(_, ref, row):
            layout = self.row_layout.to_mgpu()
            register = layout.registers_element_type(utils.dtype_to_ir_type(dtype))
            entries = self._row_entries(ref, row.registers.item(), rows, dtype.itemsize)
            return _array([entry.load(register, 0) for entry in entries], layout, shape, None)

        return load(ref, row)

    def store_row(self, ref, row, rows: int, values: jax.Array) -> None:
        """Stores a value for each of the tile's rows that are below `rows` to `ref`, `[rows]`."""
        itemsize = values.dtype.itemsize

        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, self.row_layout))
        def store(_, ref, row, values):
            first = _compare("eq", arith.remui(utils.thread_idx(), constant(self.lanes)), constant(0))
            entries = self._row_entries(ref, row.registers.item(), rows, itemsize)
            for register, entry in zip(values.registers.reshape(-1), entries, strict=True):
                _Vector(entry.address, 0, itemsize, _both(first, entry.inside)).store(register)

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
            start = arith.addi(arith.muli(_i64(array_row), _i64(self.cols)), _i64(element))
            in_row = element
            if not self.aligned:
                before = arith.remui(start, _i64(self.vector))
                start = arith.subi(start, before)
                in_row = arith.subi(element, arith.trunci(element.type, before))
            base = _i64(0) if ref is None else _address(ref)
            yield _Start(arith.addi(base, arith.muli(start, _i64(itemsize))), in_row, itemsize, inside)

    def _vector(self, turn, start):
        """The vector that a thread has with this turn."""
        skipped = turn * self.sharers * self.vector
        offset = skipped * start.itemsize
        ends_inside = skipped + self.sharers * self.vector <= self.cols  # for all threads
        if self.aligned:
            inside = start.inside
            if not ends_inside:
                inside = _both(inside, _compare("slt", start.element, constant(self.cols - skipped)))
            return _Vector(start.address, offset, start.itemsize, inside)
        if turn > 0 and ends_inside:
            return _Vector(start.address, offset, start.itemsize, None)
        elements = [arith.addi(start.element, constant(skipped + q)) for q in range(self.vector)]
        own = [
            _both(_compare("sge", element, constant(0)), _compare("slt", element, constant(self.cols))) for element in elements
        ]
        whole = _both(own[0], own[-1])
        partial = arith.xori(whole, functools.reduce(arith.ori, own))
        return _Vector(start.address, offset, start.itemsize, whole, partial, own)

    def _row_entries(self, ref, row, rows, itemsize):
        for own_row, inside in self._own_rows(row, rows):
            yield _Vector(arith.addi(_address(ref), arith.muli(_i64(own_row), _i64(itemsize))), 0, itemsize, inside)

    def _own_rows(self, row, rows):
        """The rows of which this thread holds elements, and whether they are below `rows`, None if always."""
        if self.whole_block:
            yield row, None
            return
        own = arith.addi(row, arith.divui(utils.thread_idx(), constant(self.lanes)))
        for i in range(self.repeats):
            here = arith.addi(own, constant(i * WARPS * (WARP // self.lanes)))
            yield here, (None if rows % self.rows == 0 else _compare("ult", here, constant(rows)))


# Products of matrices. A thread holds pairs of elements: of row `16 * warp + lane / 4` and 8 below, from column
# `2 * (lane % 4)` on in steps of 8. A register is a pair, those of both rows one after the other.

_PRODUCT = plgpu.Layout.WGMMA
_PRODUCT_ROWS = _PRODUCT.reduce(1)
_OWN_WORDS = plgpu.ShapeDtypeStruct((64,), jnp.uint32, layout=_PRODUCT_ROWS)  # two that are each thread's own
_PRODUCT_COLS = _PRODUCT.reduce(0)


def band(scores: jax.Array, low: jax.Array | None, high: jax.Array) -> jax.Array:
    """A product with `-inf` in each row before column `low` and after column `high`, which are int32 of the rows."""

    @plgpu.inline_mgpu(
        arg_types=(_PRODUCT, *(_PRODUCT_ROWS,) * (1 if low is None else 2)),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_PRODUCT),
    )
    def band(_, scores, *limits):
        _, col = _product_position()
        limits = [[arith.subi(_scalar(limit), col) for limit in rows.registers.flat] for rows in limits]

        def seen(below, skipped):
            inside = _compare("sge", limits[0][below], constant(skipped))
            return inside if len(limits) == 1 else _both(inside, _compare("sle", limits[1][below], constant(skipped)))

        return _only(scores, seen)

    return band(scores, high) if low is None else band(scores, high, low)


def _only(scores, seen):
    """A product with `-inf` where not `seen(below, skipped)`.

    `below` is 1 for elements of the row 8 below a thread's first one, and `skipped` is how many columns behind its they are.
    """
    minus_infinity = utils.c(-math.inf, scores.mlir_dtype)
    registers = []
    for index, register in enumerate(scores.registers.flat):
        for e in range(2):
            inside, value = seen(index % 2, index // 2 * 8 + e), llvm.extractelement(register, constant(e))
            register = llvm.insertelement(register, arith.select(inside, value, minus_infinity), constant(e))
        registers.append(register)
    return _array(registers, scores.layout, scores.shape, None)


def scale_rows(product: jax.Array, factor: jax.Array) -> jax.Array:
    """A product with each row multiplied with its factor, by the warps that have a factor other than 1."""

    @plgpu.inline_mgpu(
        arg_types=(_PRODUCT, _PRODUCT_ROWS),
        return_type=plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=_PRODUCT),
    )
    def scale(_, product, factor):
        factors = [_scalar(register) for register in factor.registers.flat]
        one = utils.c(1.0, product.mlir_dtype)
        differs = [arith.cmpf(arith.CmpFPredicate.UNE, value, one) for value in factors]
        everyone: Any = constant(2**WARP - 1)
        needed = nvvm.vote_sync(everyone, functools.reduce(arith.ori, differs), "any")
        registers = list(product.registers.flat)
        branch: Any = scf.IfOp(needed, [register.type for register in registers], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            wide = [vector.broadcast(registers[0].type, value) for value in factors]
            scf.yield_([arith.mulf(register, wide[index % 2]) for index, register in enumerate(registers)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(registers)
        return _array(list(branch.results), product.layout, product.shape, None)

    return scale(product, factor)


def reciprocal(product: jax.Array) -> jax.Array:
    """`1 / product` of float32 to within one unit in the last place: a division takes six instructions more."""

    @plgpu.inline_mgpu(arg_types=(_PRODUCT,), return_type=plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=_PRODUCT))
    def invert(_, product):
        registers, f32 = [], ir.F32Type.get()
        for register in product.registers.flat:
            for e in range(2):
                value = llvm.extractelement(register, constant(e))
                value = utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", value, result_types=f32)
                register = llvm.insertelement(register, value, constant(e))
            registers.append(register)
        return _array(registers, product.layout, product.shape, None)

    return invert(product)


def bfloat16_terms(product: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two terms of a float32 product in bfloat16: what it is rounded to, and what is missing then.

    Two elements are converted at a time. ptxas converts single ones in the unit of exponentials, at a quarter of the rate.
    """
    kind = plgpu.ShapeDtypeStruct(product.shape, jnp.bfloat16, layout=_PRODUCT)

    @plgpu.inline_mgpu(arg_types=(_PRODUCT,), return_type=[kind, kind])
    def split(_, product):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        register_type = ir.VectorType.get((2,), ir.BF16Type.get())
        one = ir.VectorType.get((1,), i32)

        def rounded(pair):
            return utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", pair[1], pair[0], result_types=i32)

        terms: tuple[list[Any], list[Any]] = [], []
        for register in product.registers.flat:
            pair = [llvm.extractelement(register, constant(e)) for e in range(2)]
            high = rounded(pair)
            kept = arith.shli(high, constant(16)), arith.andi(high, constant(-(2**16)))
            missing = [arith.subf(value, arith.bitcast(f32, bits)) for value, bits in zip(pair, kept, strict=True)]
            for term, word in zip(terms, (high, rounded(missing)), strict=True):
                term.append(vector.bitcast(register_type, vector.broadcast(one, word)))
        return [_array(registers, product.layout, product.shape, None) for registers in terms]

    return tuple(split(product))


def load_product(ref, row, col, limits, shape: tuple[int, int], *, varies: tuple[bool, bool]) -> jax.Array:
    """A tile of `ref`, `[rows, cols]` in global memory, as a product holds it: 0 beyond the limits.

    Args:
      ref: the array, floating.
      row: scalar int32, the first row.
      col: scalar int32, the first column, an even one.
      limits: scalars int32, how many rows and columns from there on are there.
      shape: of the tile.
      varies: whether the array varies along rows and columns; if not, the first one stands for all.
    """
    itemsize = ref.dtype.itemsize

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), *(_SPLAT,) * 4),
        return_type=plgpu.ShapeDtypeStruct(shape, ref.dtype, layout=_PRODUCT),
    )
    def load(_, ref, *scalars):
        layout = _PRODUCT.to_mgpu()
        register = layout.registers_element_type(ref.type.element_type)
        registers = []
        for pair in _pairs(ref, scalars, shape[1], itemsize, varies):
            if varies[1] and ref.type.shape[1] % 2 == 0:
                address, offset, inside = pair[0]
                registers.append(_Vector(address, offset, itemsize, inside).load(register, 0))
            else:
                registers.append(_gather(register, *zip(*pair, strict=True)))
        return _array(registers, layout, shape, None)

    return load(ref, *(jnp.int32(scalar) for scalar in (row, col, *limits)))


def store_product(ref, row, col, limits, values: jax.Array) -> None:
    """Stores a product to a tile of `ref`, `[rows, cols]` in global memory, within limits as those of `load_product`.

    The columns of `ref`, the first one and the limit of columns are even.
    """
    itemsize = values.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(_SPLAT,) * 4, _PRODUCT))
    def store(_, ref, *scalars_and_values):
        *scalars, values = scalars_and_values
        pairs = _pairs(ref, scalars, values.shape[1], itemsize)
        for register, ((address, offset, inside), _) in zip(values.registers.flat, pairs, strict=True):
            _Vector(address, offset, itemsize, inside).store(register)

    store(ref, *(jnp.int32(scalar) for scalar in (row, col, *limits)), values)


def _pairs(ref, scalars, count, itemsize, varies=(True, True), transposed=False):
    """Where both elements of each pair of a thread are, in `count` columns: an address, bytes from there, and whether inside.

    If `transposed`, the rows of the product are columns of `ref`. Both limits hold, also along what does not vary.
    """
    first, limits = ([scalar.registers.item() for scalar in axes] for axes in (scalars[:2], scalars[2:]))
    row, col = _product_position()
    width = ref.type.shape[1]
    down, along = (1, 0) if transposed else (0, 1)  # which axes of `ref` rows and columns of the product are
    limit = arith.subi(limits[along], col)
    inside, addresses = [], []
    for below in (0, 8):
        own = arith.addi(row, constant(below))
        inside.append(_compare("slt", own, limits[down]))
        at = (col, own) if transposed else (own, col)
        entry = arith.muli(_i64(arith.addi(first[0], at[0]) if varies[0] else first[0]), _i64(width))
        if varies[1]:
            entry = arith.addi(entry, _i64(arith.addi(first[1], at[1])))
        addresses.append(arith.addi(_address(ref), arith.muli(entry, _i64(itemsize))))
    step = itemsize * (width, 1)[along] if varies[along] else 0
    for index in range(count // 8 * 2):
        columns = range(index // 2 * 8, index // 2 * 8 + 2)
        own = [_both(inside[index % 2], _compare("sgt", limit, constant(column))) for column in columns]
        yield [(addresses[index % 2], column * step, is_own) for column, is_own in zip(columns, own, strict=True)]


def load_transposed(ref, row, col, limits, shape: tuple[int, int], *, varies: tuple[bool, bool]) -> jax.Array:
    """A tile of `ref` as `load_product` loads it, transposed, and as int8 if it is bool; `shape` is that of the product."""
    is_bool, itemsize = ref.dtype == bool, ref.dtype.itemsize
    kind = plgpu.ShapeDtypeStruct(shape, jnp.int8 if is_bool else ref.dtype, layout=_PRODUCT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(_SPLAT,) * 4), return_type=kind)
    def load(_, ref, *scalars):
        layout = _PRODUCT.to_mgpu()
        element = ir.IntegerType.get_signless(8) if is_bool else ref.type.element_type
        register, registers = layout.registers_element_type(element), []
        for pair in _pairs(ref, scalars, shape[1], itemsize, varies, transposed=True):
            registers.append(_gather(register, *zip(*pair, strict=True)))
        return _array(registers, layout, shape, True if is_bool else None)

    return load(ref, *(jnp.int32(scalar) for scalar in (row, col, *limits)))


def add_transposed(ref, row, col, limits, values: jax.Array, *, varies: tuple[bool, bool]) -> None:
    """Adds a product of float32 to a tile of `ref`, in global memory, transposed: one element each, in any order.

    Args:
      ref: the array, float32, in which the tile is as for `load_transposed`.
      row: scalar int32, the first row.
      col: scalar int32, the first column.
      limits: scalars int32, how many rows and columns from there on are there: values beyond are 0, or not added.
      values: the product.
      varies: whether the array varies along rows and columns; along the others values are summed.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(_SPLAT,) * 4, _PRODUCT))
    def add(_, ref, *scalars_and_values):
        *scalars, values = scalars_and_values
        pairs = list(_pairs(ref, scalars, values.shape[1], 4, varies, transposed=True))
        elements = [[llvm.extractelement(register, constant(e)) for e in range(2)] for register in values.registers.flat]
        lane = arith.remui(_thread(), constant(WARP))
        # Rows of the product are columns of `ref`: 8 lanes have 8 of them, and each lane two.
        if not varies[1]:
            pairs, halves = pairs[::2], zip(elements[::2], elements[1::2], strict=True)
            sums = ([arith.addf(a, b) for a, b in zip(*two, strict=True)] for two in halves)
            elements = [[_summed_over_lanes(value, (4, 8, 16)) for value in pair] for pair in sums]
        # Its columns are rows of `ref`: 4 lanes have them, and each a quarter.
        if not varies[0]:
            count = 1 if not varies[1] else 2
            sums = [
                functools.reduce(arith.addf, [value for pair in elements[k::count] for value in pair]) for k in range(count)
            ]
            pairs, elements = [[pair[0]] for pair in pairs[:count]], [[_summed_over_lanes(value, (1, 2))] for value in sums]
        mine = None
        if not varies[1]:
            mine = _compare("ult", lane, constant(4 if varies[0] else 1))
        elif not varies[0]:
            mine = _compare("eq", arith.remui(lane, constant(4)), constant(0))
        for places, numbers in zip(pairs, elements, strict=True):
            for (address, offset, inside), value in zip(places, numbers, strict=True):
                inside = inside if mine is None else _both(inside, mine)
                utils.inline_ptx(f"@$2 red.global.add.f32 [$0+{offset}], $1;", address, value, inside, has_side_effects=True)

    add(ref, *(jnp.int32(scalar) for scalar in (row, col, *limits)), values)


def _summed_over_lanes(value, steps):
    """The sum of a float32 of lanes whose numbers differ in these bits, in each."""
    i32, every = ir.IntegerType.get_signless(32), constant(-1)
    for step in steps:
        bits = nvvm.shfl_sync(every, arith.bitcast(i32, value), constant(step), constant(WARP - 1), nvvm.ShflKind.bfly)
        value = arith.addf(value, arith.bitcast(value.type, bits))
    return value


def load_mask(ref, row, col, limits, shape: tuple[int, int], *, varies: tuple[bool, bool]) -> list[jax.Array]:
    """Loads a tile of a mask. The four threads that hold the same rows of a product share the work.

    Of `2 * shape[1] / 32` words of 32 columns, those of a row before those of the row 8 below, each thread loads every fourth,
    in vectors as long as `ref` allows.

    Args:
      ref: `[rows, cols]` in global memory, bool.
      row: scalar int32, the first row.
      col: scalar int32, the first column, a multiple of 32.
      limits: scalars int32, how many rows and columns from there on are there.
      shape: of the tile, of 64 or 128 columns.
      varies: whether the mask varies along rows and columns; if not, the first one stands for all.

    Returns:
      What each thread has loaded, for `pack_mask`: bytes, or bits if they had to come one by one or two by two. They are 0
      beyond the limits of what varies.
    """
    count = shape[1] // 32
    step = math.gcd(ref.shape[1], 16) if varies[1] else 1
    arrays = count // 2 * 8 // 2 if step >= 4 else 1

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(_SPLAT,) * 4), return_type=[_OWN_WORDS] * arrays)
    def load(_, ref, *scalars):
        i32 = ir.IntegerType.get_signless(32)
        first_row, first_col, rows, cols = (scalar.registers.item() for scalar in scalars)
        own_row, own_col = _product_position()
        member = arith.divui(own_col, constant(2))  # of the four

        def load_word(place):
            """The words of 4 bytes, or the one of 32 bits, of the word `place`, an int32 MLIR value below `2 * count`."""
            here = arith.addi(own_row, arith.muli(arith.divui(place, constant(count)), constant(8)))
            inside = _compare("slt", here, rows)
            entry = arith.muli(_i64(arith.addi(first_row, here) if varies[0] else first_row), _i64(ref.type.shape[1]))
            address = arith.addi(_address(ref), entry)
            if not varies[1]:
                value = _load(address, 0, inside, ir.VectorType.get((1,), ir.IntegerType.get_signless(8)), 0, None)
                return [arith.muli(arith.extui(i32, llvm.extractelement(value, constant(0))), constant(-1))]
            start = arith.muli(arith.remui(place, constant(count)), constant(32))
            address = arith.addi(address, _i64(arith.addi(first_col, start)))
            vector_of, limit, found = ir.VectorType.get((step,), ir.IntegerType.get_signless(8)), arith.subi(cols, start), []
            for offset in range(0, 32, step):
                own = _both(inside, _compare("sgt", limit, constant(offset)))
                loaded = _load(address, offset, own, _words(vector_of), 0, None)
                found += [llvm.extractelement(loaded, constant(k)) for k in range(loaded.type.shape[0])]
            return found if step >= 4 else [_bits([arith.extui(i32, part) for part in found], step)]

        words = [word for k in range(count // 2) for word in load_word(arith.addi(member, constant(4 * k)))]
        return _own_words(words)

    return load(ref, *(jnp.int32(scalar) for scalar in (row, col, *limits)))


def pack_mask(loaded: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Bits of what `load_mask` loaded: one or two words that each thread has for the others, for `select_bits`."""
    if len(loaded) == 1:
        return loaded[0]

    @plgpu.inline_mgpu(arg_types=(_PRODUCT_ROWS,) * len(loaded), return_type=_OWN_WORDS)
    def pack(_, *loaded):
        words = [_scalar(register) for array in loaded for register in array.registers.flat]
        (packed,) = _own_words([_bits(words[k : k + 8], 4) for k in range(0, len(words), 8)])
        return packed

    return pack(*loaded)


def _bits(words, step):
    """The bits of 32 bytes that are 0 or 1, from the lowest on, of which each word has `step` in its lowest bytes."""
    i32, groups = ir.IntegerType.get_signless(32), [constant(0)] * 4  # of 8 bits
    for k, word in enumerate(words):
        group, first = divmod(k * step, 8)
        places = [1 << (first + e) for e in range(step)] + [0] * (4 - step)
        weights = constant(int.from_bytes(places, "little", signed=True))
        ptx = "dp4a.u32.u32 $0, $1, $2, $3;"
        groups[group] = utils.inline_ptx(ptx, word, weights, groups[group], result_types=i32)
    return functools.reduce(arith.ori, (arith.shli(group, constant(8 * g)) for g, group in enumerate(groups)))


def _own_words(words):
    """Words of a thread's own as arrays of two."""
    layout = _PRODUCT_ROWS.to_mgpu()
    kind = layout.registers_element_type(ir.IntegerType.get_signless(32))
    words = [vector.broadcast(kind, word) for word in [*words, *[constant(0)] * (len(words) % 2)]]
    return [_array(words[k : k + 2], layout, _OWN_WORDS.shape, False) for k in range(0, len(words), 2)]


def select_bits(scores: jax.Array, packed: jax.Array) -> jax.Array:
    """A product with `-inf` where the mask that `pack_mask` packed has no bit."""

    @plgpu.inline_mgpu(
        arg_types=(_PRODUCT, _PRODUCT_ROWS),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_PRODUCT),
    )
    def select(_, scores, packed):
        _, col = _product_position()
        count = scores.shape[1] // 32
        own = [_scalar(register) for register in packed.registers.flat]
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        first = arith.subi(lane, arith.divui(col, constant(2)))  # of the four that share rows
        every, kind = constant(-1), nvvm.ShflKind.idx

        def word(place):
            giver = arith.addi(first, constant(place % 4))
            return arith.shrui(nvvm.shfl_sync(every, own[place // 4], giver, constant(WARP - 1), kind), col)

        shifted = [[word(below * count + which) for below in range(2)] for which in range(count)]

        def seen(below, skipped):
            which, bit = divmod(skipped, 32)
            return _compare("ne", arith.andi(shifted[which][below], constant(1 << bit)), constant(0))

        return _only(scores, seen)

    return select(scores, packed)


def load_product_rows(ref, first, limit, shape: tuple[int, int]) -> jax.Array:
    """Values of the rows of a product of `shape` from `ref`, one-dimensional int32, from `first` on; 0 from `limit` on."""
    return _load_line(ref, first, limit, shape[0], _PRODUCT_ROWS, 0)


def load_product_cols(ref, first, limit, shape: tuple[int, int]) -> jax.Array:
    """The same for its columns."""
    return _load_line(ref, first, limit, shape[1], _PRODUCT_COLS, 1)


def _load_line(ref, first, limit, size, layout, axis):
    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), _SPLAT, _SPLAT),
        return_type=plgpu.ShapeDtypeStruct((size,), ref.dtype, layout=layout),
    )
    def load(_, ref, first, limit):
        kind = layout.to_mgpu()
        register = kind.registers_element_type(ref.type.element_type)
        own, itemsize = _product_position()[axis], utils.bytewidth(ref.type.element_type)
        start = arith.addi(_i64(first.registers.item()), _i64(own))
        address = arith.addi(_address(ref), arith.muli(start, _i64(itemsize)))
        left = arith.subi(limit.registers.item(), own)
        registers = []
        for index in range(size // 8 if axis else 2):
            places = [index * 8 + e for e in range(register.shape[0])]
            inside = [_compare("sgt", left, constant(place)) for place in places]
            registers.append(_gather(register, [address] * len(places), [place * itemsize for place in places], inside))
        return _array(registers, kind, (size,), True)

    return load(ref, jnp.int32(first), jnp.int32(limit))


def store_product_rows(ref, first, limit, values: jax.Array) -> None:
    """Stores a value for each row of a product to `ref`, one-dimensional, from `first` on, for the first `limit` rows."""
    itemsize = values.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _SPLAT, _SPLAT, _PRODUCT_ROWS))
    def store(_, ref, first, limit, values):
        row, col = _product_position()
        start = arith.addi(_i64(first.registers.item()), _i64(row))
        address = arith.addi(_address(ref), arith.muli(start, _i64(itemsize)))
        left = arith.subi(limit.registers.item(), row)
        for index, register in enumerate(values.registers.flat):
            inside = _both(_compare("eq", col, constant(0)), _compare("sgt", left, constant(index * 8)))
            _Vector(address, index * 8 * itemsize, itemsize, inside).store(register)

    store(ref, jnp.int32(first), jnp.int32(limit), values)


def _product_position():
    """The row and column of a thread's first element."""
    warp, lane = arith.divui(_thread(), constant(WARP)), arith.remui(_thread(), constant(WARP))
    row = arith.addi(arith.muli(warp, constant(16)), arith.divui(lane, constant(4)))
    return row, arith.muli(arith.remui(lane, constant(4)), constant(2))


def _gather(register, addresses, offsets, inside):
    """A register of elements from several places, 0 where one is not inside."""
    bits = utils.bitwidth(register.element_type)
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(bits))
    gathered = llvm.mlir_undef(ir.VectorType.get((len(addresses),), one.element_type))
    for q, (address, offset, own) in enumerate(zip(addresses, offsets, inside, strict=True)):
        loaded = _load(address, offset, own, one, 0, None)
        gathered = llvm.insertelement(gathered, llvm.extractelement(loaded, constant(0)), constant(q))
    return vector.bitcast(register, gathered)


def _scalar(register):
    """The element of a register that has one."""
    return llvm.extractelement(register, constant(0)) if isinstance(register.type, ir.VectorType) else register


@dataclass(frozen=True)
class _Start:
    """Where a thread's vectors of one row start: an address, the element of the row there, and whether it is a row at all."""

    address: ir.Value
    element: ir.Value
    itemsize: int
    inside: ir.Value | None


@dataclass(frozen=True)
class _Vector:
    """Consecutive elements in global memory, those of a register.

    Attributes:
      address: an int64 MLIR value.
      offset: bytes from there to the first element, a constant that becomes a part of the instruction.
      itemsize: bytes of an element.
      inside: whether to touch all of it; None if always.
      partial: whether to touch a part of it; None if never.
      own: for each element, whether it is of that part.
    """

    address: ir.Value
    offset: int
    itemsize: int
    inside: ir.Value | None
    partial: ir.Value | None = None
    own: Sequence[Any] = ()

    def load(self, register, bits, policy=None):
        """A register of type `register`, with `bits` in each of its words where nothing is to be touched."""
        words = _words(register)
        if self.partial is None:
            return vector.bitcast(register, _load(self.address, self.offset, self.inside, words, bits, policy))
        branch: Any = scf.IfOp(self.partial, [words], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            elements = ir.VectorType.get((len(self.own),), ir.IntegerType.get_signless(8 * self.itemsize))
            loaded = llvm.mlir_undef(elements)
            for q, own in enumerate(self.own):
                one = ir.VectorType.get((1,), elements.element_type)
                element = _load(self.address, self.offset + q * self.itemsize, own, one, bits, policy)
                loaded = llvm.insertelement(loaded, llvm.extractelement(element, constant(0)), constant(q))
            scf.yield_([vector.bitcast(words, loaded)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([_load(self.address, self.offset, self.inside, words, bits, policy)])
        return vector.bitcast(register, branch.results[0])

    def touched(self, register):
        """A register of int8: 1 for the elements that are to be touched, 0 for the others."""
        ones, zeros = utils.c(1, register), utils.c(0, register)
        if self.partial is not None:
            for q, own in enumerate(self.own):
                one = arith.extui(register.element_type, own)
                zeros = llvm.insertelement(zeros, one, constant(q))
            return zeros
        return ones if self.inside is None else arith.select(self.inside, ones, zeros)

    def store(self, register):
        """Stores a register."""
        _store(self.address, self.offset, self.inside, vector.bitcast(_words(register.type), register))
        if self.partial is None:
            return
        with utils.when(self.partial):
            elements = ir.VectorType.get((len(self.own),), ir.IntegerType.get_signless(8 * self.itemsize))
            values = vector.bitcast(elements, register)
            for q, own in enumerate(self.own):
                one = llvm.mlir_undef(ir.VectorType.get((1,), elements.element_type))
                one = llvm.insertelement(one, llvm.extractelement(values, constant(q)), constant(0))
                _store(self.address, self.offset + q * self.itemsize, own, one)


def _load(address, offset, inside, words, bits, policy):
    """A vector `words` from global memory, or `bits` in each word; `policy` is the L2 cache's, None for the usual one."""
    count, word = words.shape[0], words.element_type
    held = _held(word)
    results = [f"${k}" for k in range(count)]
    operands, hint, use = [address], "", ""
    if policy is not None:
        operands.append(policy)
        hint, use = "L2::cache_hint.", f", ${count + 1}"
    ptx = f"ld.global.{hint}{_list(word, results)}, [${count}+{offset}]{use};"
    if inside is not None:
        fills = " ".join(f"mov.b{held.width} {result}, {bits % 2**held.width};" for result in results)
        ptx = f"{fills} @${count + len(operands)} {ptx}"
        operands.append(inside)
    loaded = llvm.mlir_undef(words)
    for k, value in enumerate(utils.inline_ptx(ptx, *operands, result_types=[held] * count, has_side_effects=True)):
        value = value if held == word else arith.trunci(word, value)
        loaded = llvm.insertelement(loaded, value, constant(k))
    return loaded


def _store(address, offset, inside, words):
    """Stores a vector of words to global memory."""
    count = words.type.shape[0]
    values = [llvm.extractelement(words, constant(k)) for k in range(count)]
    kind, names = _list(words.type.element_type, [f"${k + 1}" for k in range(count)]).split(" ", 1)
    utils.inline_ptx(f"st.global.{kind} [$0+{offset}], {names};", address, *values, predicate=inside, has_side_effects=True)


def _words(register):
    """The type in which PTX moves a vector of type `register`: words of 32 bits, or one of 16 or 8."""
    bits = math.prod(register.shape) * utils.bitwidth(register.element_type)
    width = min(32, bits)
    return ir.VectorType.get((bits // width,), ir.IntegerType.get_signless(width))


def _array(registers, layout, shape, is_signed):
    """A Mosaic GPU array of these registers."""
    array = np.empty(len(registers), object)
    array[:] = registers
    array = array.reshape(layout.registers_shape(shape))
    return mgpu.FragmentedArray(_registers=array, _layout=layout, _is_signed=is_signed)


def _held(word):
    """The type of the PTX register that holds a word: there is none of 8 bits."""
    return ir.IntegerType.get_signless(max(16, word.width))


def _list(word, names: list[str]) -> str:
    """The type and the operands of a load or store of several words: `v4.b32 {$0, $1, $2, $3}`."""
    kind = f"b{word.width}"
    return f"{kind} {names[0]}" if len(names) == 1 else f"v{len(names)}.{kind} {{{', '.join(names)}}}"


def _address(ref):
    return llvm.ptrtoint(ir.IntegerType.get_signless(64), utils.memref_ptr(ref))


def constant(value: int) -> Any:
    """An int32 MLIR constant."""
    return utils.c(value, ir.IntegerType.get_signless(32))


def _i64(value):
    kind = ir.IntegerType.get_signless(64)
    return utils.c(value, kind) if isinstance(value, int) else arith.extui(kind, value)


def _compare(kind: str, a, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, b)


def _both(a, b):
    return b if a is None else a if b is None else arith.andi(a, b)
