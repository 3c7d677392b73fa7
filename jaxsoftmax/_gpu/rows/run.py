"""Kernels over the rows of arrays on Hopper: how a row is spread over threads and held there, for any op.

A kernel has a body: a function of a `Tile`, some rows, that computes results from operands. Operands and results that are as
large as the rows are functions of a turn (see `RowTile`) that give its elements, so that what is computed twice need
not be kept in registers meanwhile.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.layout import RowTile
from jaxsoftmax.online import State


@dataclass(frozen=True)
class Config:
    """How the rows of an array are spread over threads, and held there.

    Attributes:
      vector, threads, repeats, blocks: as in `RowTile`.
      parked: whether rows are held in shared memory, not in registers, of which a thread then needs few.
      unroll: turns of a thread in an iteration of a loop; 0 for no loop but code for each turn. With a loop rows come by bulk
        copies if they are parked, else from global memory with each pass. Only where rows end with a turn, and without a mask.
    """

    vector: int
    threads: int
    repeats: int = 1
    blocks: int = 1
    parked: bool = False
    unroll: int = 0


def rows_and_cols(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, int]:
    """How many rows an array has, and of how many elements, where rows lie along `axes`."""
    cols = math.prod(shape[axis] for axis in axes)
    return (math.prod(shape) // cols if cols else 0), cols


def each(function, *operands):
    """`function` of the operands' elements, turn by turn."""
    return lambda turn: function(*(operand(turn) for operand in operands))


def constant(value):
    """The same for each turn."""
    return lambda turn: value


everything = constant(None)  # instead of a mask


@dataclass(frozen=True)
class Either:
    """A result that is one function of a turn where a condition holds for the whole row, and another one elsewhere."""

    condition: Any  # a scalar bool
    then: Callable[..., Any]
    otherwise: Callable[..., Any]


@dataclass(frozen=True)
class Tile:
    """What the body of a kernel asks of the rows that its block holds."""

    layout: RowTile
    unroll: int
    scratch: Any  # [2, warps] float32 in shared memory, where warps share a row
    barriers: list[Any]  # of the bulk copies that are under way, of each operand one for each turn
    inside: Callable[..., Any]  # a function of a turn: whether its elements are of a row, None if all are

    def along(self, row):
        """A value for each row, or one for all, along the row."""
        return lax.broadcast_in_dim(row, self.layout.shape, (0,) if row.ndim else ())

    def lift(self, scores, scale) -> State:
        """The states of what a warp holds of each row."""
        if not self.unroll:
            return online.lift(map(scores, range(self.layout.turns)), scale=scale)
        identity = online.identity(self.layout.shape[:1])
        start = [plgpu.layout_cast(part, self.layout.row_layout) for part in (identity.m, identity.d)]

        def push(turns, *state):
            return online.push(State(*state), map(scores, turns), scale=scale)[:2]

        return State(*self._fold(push, start))

    def sum(self, values):
        """The sums of the rows."""
        if self.unroll:
            zeros = plgpu.layout_cast(jnp.zeros(self.layout.shape, jnp.float32), self.layout.layout)
            (total,) = self._fold(lambda turns, total: [functools.reduce(jnp.add, map(values, turns), total)], [zeros])
        else:
            total = functools.reduce(jnp.add, map(values, range(self.layout.turns)))
        sums = jnp.sum(total, 1)
        return jnp.sum(self._exchange(sums)[0]) if self.layout.whole_block else sums

    def merge(self, state: State, scale) -> State:
        """The states of the rows from those of what a warp holds."""
        if not self.layout.whole_block:
            return state
        return online.merge_along(State(*self._exchange(state.m, state.d)), 0, scale=scale)

    def each_turn(self, step):
        """Calls `step` with each turn."""
        if not self.unroll:
            for turn in range(self.layout.turns):
                step(turn)
        else:
            self._fold(lambda turns: [step(turn) for turn in turns][:0], [])

    def _fold(self, step, start):
        """Folds `step(turns, *carry)` over all turns in a loop. The first loop waits for the copies of each turn."""
        arriving = list(self.barriers)
        self.barriers.clear()

        def iteration(i, carry):
            turns = [i * self.unroll + k for k in range(self.unroll)]
            for barrier in arriving:
                for turn in turns:
                    plgpu.barrier_wait(barrier.at[turn])
            return tuple(step(turns, *carry))

        return lax.fori_loop(0, self.layout.turns // self.unroll, iteration, tuple(start))

    def _exchange(self, *parts):
        """What all warps have that share the row."""
        tile = self.layout
        group = _group(tile)
        if tile.blocks > 1:
            group = lax.axis_index("rank") * tile.warpgroups + group
            ptx.cluster_wait()
            for i, part in enumerate(parts):
                ptx.push_to_cluster(self.scratch.at[i], group * ptx.WARPS, part, tile.row_layout, tile.blocks)
            ptx.cluster_barrier()
        else:
            for i, part in enumerate(parts):
                self.scratch[i, pl.ds(group * ptx.WARPS, ptx.WARPS)] = part
            if tile.warpgroups > 1:
                ptx.block_barrier()
            else:
                plgpu.commit_smem()
        layout = ptx.replicated(tile.warps)
        return [plgpu.load(self.scratch.at[i], layout=layout, optimized=False) for i in range(len(parts))]


def run(
    name: str,
    body: Callable[..., list[Any]],
    config: Callable[[int, int, bool, bool], Config],
    axes: Sequence[int],
    operands: Sequence[jax.Array],
    where: jax.Array | None,
    scale: jax.Array | None,
    dtypes: Sequence[Any],
    *,
    fills: Sequence[float] = (),
    row_operands: Sequence[jax.Array] = (),
    row_dtypes: Sequence[Any] = (),
) -> list[jax.Array]:
    """Runs a kernel on the rows of arrays.

    Args:
      name: of the kernel.
      body: gets a `Tile`, the operands, the row operands, the mask (`everything` if there is none) and the scale (or None), in
        float32; gives the results, those that are whole first.
      config: the configuration for a number of columns, the bytes of the widest element, whether there is a mask along the
        columns, and whether it has fewer rows.
      axes: the axes of a row, the last ones that have not size 1.
      operands: whole arrays.
      where: a mask that broadcasts with them, or None; along `axes` it is whole or has size 1.
      scale: factors that broadcast with their rows, or None.
      dtypes: of the results that are whole, one at most.
      fills: what each operand holds beyond the end of a row.
      row_operands: with size 1 along `axes`.
      row_dtypes: of the results that have size 1 along `axes`.
    """
    shape = operands[0].shape
    row_shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    count, cols = rows_and_cols(shape, axes)
    dtypes, row_dtypes = [jnp.dtype(dtype) for dtype in dtypes], [jnp.dtype(dtype) for dtype in row_dtypes]
    row_operands = [operand.reshape(count) for operand in row_operands]

    def of_rows(operand):
        return jnp.broadcast_to(operand, row_shape).reshape(count).astype(jnp.float32)

    masks, mask_row, masks_of_rows = [], None, []
    if where is not None and math.prod(where.shape[axis] for axis in axes) == 1:
        masks_of_rows = [of_rows(where)]
    elif where is not None:
        masks = [where.reshape(-1, cols)]
        mask_row = None if where.shape == shape else _row_of_mask(shape, where.shape, axes)
    scales = [] if scale is None else [scale.reshape(1) if scale.size == 1 else of_rows(scale)]

    widest = max(dtype.itemsize for dtype in [*(operand.dtype for operand in operands), *dtypes])
    way = config(cols, widest, bool(masks), mask_row is not None)
    layout = RowTile(cols, way.vector, way.threads, way.repeats, way.blocks)
    exact = layout.exact(count)
    slots = [plgpu.SMEM((layout.turns * layout.warpgroups, *layout.shape), a.dtype) for a in operands if way.parked]
    barriers = [plgpu.Barrier(num_barriers=layout.turns) for _ in slots if way.unroll]
    scratch = [plgpu.SMEM((2, layout.warps), jnp.float32)] if layout.whole_block else []

    def kernel(*refs):
        remaining = iter(refs)
        given, mask_refs, row_mask_refs, row_refs, scale_refs, out_refs, row_out_refs, slot_refs, barrier_refs, scratch_refs = (
            list(itertools.islice(remaining, len(group)))
            for group in (operands, masks, masks_of_rows, row_operands, scales, dtypes, row_dtypes, slots, barriers, scratch)
        )
        memory = _Memory(layout, lax.axis_index("block") * jnp.int32(layout.rows), count, exact, bool(way.unroll))
        if layout.blocks > 1:
            ptx.cluster_arrive()
        for ref, slot, barrier in zip(given, slot_refs, barrier_refs, strict=False):
            memory.copy_in(ref, slot, barrier)
        sources = [
            memory.source(ref, operand.dtype, fill, slot)
            for ref, operand, fill, slot in zip(given, operands, fills, slot_refs or itertools.repeat(None), strict=False)
        ]
        values = [memory.load_row(ref) for ref in row_refs]
        inside = everything if exact or not scales else _nonzero(layout.inside(memory.row, count))
        tile = Tile(layout, way.unroll, scratch_refs[0] if scratch else None, barrier_refs, inside)
        seen = everything
        for ref in mask_refs:
            byte, shared = jnp.dtype(jnp.int8), mask_row is not None
            seen = _nonzero(layout.load(ref, memory.row, count, dtype=byte, source_row=mask_row, kept=shared))
        for ref in row_mask_refs:
            seen = constant(tile.along(memory.load_row(ref)) != 0)
        factor = [ref[0] if ref.shape == (1,) else memory.load_row(ref) for ref in scale_refs] or [None]
        results = body(tile, *sources, *values, seen, *factor)
        for ref, dtype, result in zip(out_refs, dtypes, results, strict=False):

            def store(result, ref=ref, dtype=dtype):
                tile.each_turn(lambda turn: memory.store(ref, turn, result(turn).astype(dtype)))

            if isinstance(result, Either):
                pl.when(result.condition)(functools.partial(store, result.then))
                pl.when(~result.condition)(functools.partial(store, result.otherwise))
            else:
                store(result)
        for ref, dtype, result in zip(row_out_refs, row_dtypes, results[len(dtypes) :], strict=True):
            memory.store_row(ref, result.astype(dtype))

    whole = layout.view(count) if exact else (count, cols)
    out_type = [jax.ShapeDtypeStruct(whole, dtype) for dtype in dtypes]
    out_type += [jax.ShapeDtypeStruct((count,), dtype) for dtype in row_dtypes]
    options: dict[str, Any] = {}
    if layout.warpgroups > 1:
        options |= {"num_threads": layout.warpgroups, "thread_name": "warpgroup"}
    if layout.blocks > 1:
        options |= {"cluster": (layout.blocks,), "cluster_names": ("rank",)}
    results = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(pl.cdiv(count, layout.rows),),
        grid_names=("block",),
        scratch_types=slots + barriers + scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **options,
    )(*(operand.reshape(whole) for operand in operands), *masks, *masks_of_rows, *row_operands, *scales)
    shapes = [shape] * len(dtypes) + [row_shape] * len(row_dtypes)
    return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]


def _nonzero(values):
    return each(lambda values: values != 0, values.__getitem__)


@dataclass(frozen=True)
class _Memory:
    """How a block reads and writes its rows, which start at `row` of `count`: by Pallas where tiles end with the arrays."""

    layout: RowTile
    row: Any
    count: int
    exact: bool
    looped: bool

    def source(self, ref, dtype, fill, slot):
        """A whole operand as a function of a turn, in float32, from where it is held: in registers, or in `slot`."""
        turns = range(self.layout.turns)

        def own(turn):
            return slot.at[turn * self.layout.warpgroups + _group(self.layout)]

        if self.looped:
            return lambda turn: self._load(self._at(ref, turn) if slot is None else own(turn)).astype(jnp.float32)
        if self.exact:
            held = [self._load(self._at(ref, turn)) for turn in turns]
        else:
            held = self.layout.load(ref, self.row, self.count, dtype=dtype, fill=fill)
        if slot is None:
            return lambda turn: held[turn].astype(jnp.float32)
        for turn in turns:
            own(turn)[...] = held[turn]
        return lambda turn: self._load(own(turn)).astype(jnp.float32)

    def copy_in(self, ref, slot, barrier):
        """Starts the copies of a row to shared memory, one for each turn of the block."""
        groups = self.layout.warpgroups

        def start():
            for turn in range(self.layout.turns):
                source = ref.at[pl.ds(self._first(turn), groups)]
                target = slot.at[pl.ds(turn * groups, groups)]
                plgpu.copy_gmem_to_smem(source, target, barrier.at[turn], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

        if groups > 1:
            pl.when(_group(self.layout) == 0)(start)
        else:
            start()

    def store(self, ref, turn, values):
        """Stores what is computed in a turn."""
        if self.exact:
            compat.store(self._at(ref, turn), values)
        else:
            self.layout.store(ref, self.row, self.count, turn, values)

    def load_row(self, ref):
        """What belongs to the rows of the block, in float32: one value where it has one row."""
        layout = self.layout
        if layout.whole_block:
            value = ref[self.row]
        elif self.exact:
            value = plgpu.load(ref.at[pl.ds(self.row, layout.rows)], layout=layout.row_layout, optimized=False)
        else:
            value = layout.load_row(ref, self.row, self.count, dtype=ref.dtype)
        return value.astype(jnp.float32)

    def store_row(self, ref, values):
        """Stores what belongs to the rows of the block."""
        if self.layout.whole_block:
            ref[self.row] = values
        elif self.exact:
            compat.store(ref.at[pl.ds(self.row, self.layout.rows)], values)
        else:
            self.layout.store_row(ref, self.row, self.count, values)

    def _load(self, ref):
        return plgpu.load(ref, layout=self.layout.layout, optimized=False)

    def _at(self, ref, turn):
        """What the warpgroup has with a turn, of an array in the form of `RowTile.view`."""
        if self.layout.whole_block:
            return ref.at[self._first(turn) + _group(self.layout)]
        width = self.layout.shape[1]
        return ref.at[pl.ds(self.row, self.layout.rows), pl.ds(turn * width, width)]

    def _first(self, turn):
        """The first entry that the block has with a turn, of an array in that form."""
        rank = lax.axis_index("rank") if self.layout.blocks > 1 else jnp.int32(0)
        return ((self.row * self.layout.turns + turn) * self.layout.blocks + rank) * self.layout.warpgroups


def _group(layout: RowTile):
    return lax.axis_index("warpgroup") if layout.warpgroups > 1 else jnp.int32(0)


def _row_of_mask(shape, where_shape, axes):
    """The row of a mask for a row of the scores, as a function of an int32 MLIR value: where it has size 1, it repeats."""
    parts: list[
        list[int]
    ] = []  # from the last axis: rows of the scores between entries, entries, rows of the mask between them
    between, stride = 1, 1
    for axis in reversed(range(len(shape))):
        if axis in axes or shape[axis] == 1:
            continue
        if where_shape[axis] != 1:
            if parts and parts[-1][0] * parts[-1][1] == between:
                parts[-1][1] *= shape[axis]
            else:
                parts.append([between, shape[axis], stride])
            stride *= shape[axis]
        between *= shape[axis]

    def source_row(row):
        total = ptx.constant(0)
        for divisor, modulus, stride in parts:
            index = arith.divui(row, ptx.constant(divisor))
            if divisor * modulus != between:
                index = arith.remui(index, ptx.constant(modulus))
            total = arith.addi(total, arith.muli(index, ptx.constant(stride)))
        return total

    return source_row
