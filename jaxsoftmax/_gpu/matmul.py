"""Products of two 16-bit matrices on Hopper, whose tiles an epilogue gets in registers, as sums in float32.

Blocks of threads multiply tiles of 128 rows by 256 columns: one warpgroup copies operands to shared memory, and two others, the
consumers, multiply 64 rows each. If the number of tiles along the rows is even, blocks are in clusters of two, which have the
same columns and other rows: each copies one half of the columns' operand for both, so that the L2 cache is read a third less.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu.kernel import kernel_of, tile_transforms, written_in_place

CONSUMERS = 2
ROWS, COLUMNS = 64, 256  # the tile of a consumer
TILE_ROWS = CONSUMERS * ROWS
DEPTH, STAGES = 64, 4  # shared memory: the depth of a stage, and stages
LAYOUT = plgpu.Layout.WGMMA
_SIDE_BY_SIDE = 16  # tiles of rows that blocks go over before the next columns: both operands stay in the L2 cache


class Window(NamedTuple):
    """Describes the part of the second operand that is multiplied."""

    axis: int
    start: jax.Array  # `[1]`, int32, in units of `DEPTH`
    size: int


class Place(NamedTuple):
    """Says where the tile of a consumer is: its number along the rows, and along the columns."""

    row: Any
    column: Any


def multiply(
    epilogue: Callable[..., None],
    a: jax.Array,
    b: jax.Array,
    others: Sequence[jax.Array],
    *,
    along: tuple[int, int],
    blocks: int,
    name: str,
    out_type: Sequence[jax.ShapeDtypeStruct] = (),
    in_place: jax.Array | None = None,
    window: Window | None = None,
    stage: jax.ShapeDtypeStruct | None = None,
) -> list[jax.Array]:
    """Multiplies two matrices, and runs `epilogue` on each tile of each consumer.

    Operands must be in whole units of copies to shared memory: 8 along the first axis, 64 along the second. What tiles have
    beyond the end of an operand is 0, and what they store beyond the end of an array is left out.

    Args:
      epilogue: `epilogue(place, sums, others, results, staging)` stores what results have of a tile, whose sums
        `[ROWS, COLUMNS]` are in registers. The others and the results are references.
      a: the matrix that gives rows.
      b: the matrix that gives columns.
      others: what else the epilogue reads.
      along: axis of each matrix along which they are multiplied.
      blocks: number of blocks of threads.
      name: name of the kernel.
      out_type: types of the results.
      in_place: an array that the epilogue writes parts of. It is the only result then.
      window: the part of `b` that is multiplied; None for all of it.
      stage: type of the shared memory that each consumer has for what it stores, in place of a stage; None for none.
    """
    axis = None if window is None else window.axis
    rows, depth = a.shape[1 - along[0]], a.shape[along[0]]
    columns = b.shape[1 - along[1]] if window is None or axis == along[1] else window.size
    tiles = pl.cdiv(rows, TILE_ROWS), pl.cdiv(columns, COLUMNS)
    is_paired, stages, starts = tiles[0] % 2 == 0, STAGES - (stage is not None), [] if window is None else [window.start]
    slots = [(TILE_ROWS, DEPTH), (DEPTH, COLUMNS)]
    slots = [slot if along[i] == 1 - i else slot[::-1] for i, slot in enumerate(slots)]
    empty = functools.partial(plgpu.ClusterBarrier, collective_axes=("rank",)) if is_paired else plgpu.Barrier
    run = kernel_of(
        functools.partial(
            _kernel,
            epilogue=epilogue,
            along=along,
            axis=axis,
            counts=(len(starts), len(others)),
            n_results=len(out_type) + (in_place is not None),
            tiles=tiles,
            steps=pl.cdiv(depth, DEPTH),
            is_paired=is_paired,
        ),
        out_type=out_type,
        grid=(max(blocks // 2, 1) if is_paired else blocks,),
        grid_names=("block",),
        cluster=(2,) if is_paired else (),
        cluster_names=("rank",) if is_paired else (),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[
            *(plgpu.SMEM((stages, *slot), a.dtype, transforms=tile_transforms(a.dtype)) for slot in slots),
            plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            empty(num_arrivals=CONSUMERS, num_barriers=stages),
            *(
                []
                if stage is None
                else [plgpu.SMEM((CONSUMERS, *stage.shape), stage.dtype, transforms=tile_transforms(stage.dtype))]
            ),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
    )
    if in_place is None:
        return run(a, b, *starts, *others)
    return [written_in_place(run, in_place, a, b, *starts, *others)]


def _kernel(a, b, *refs, epilogue, along, axis, counts, n_results, tiles, steps, is_paired):
    """Multiplies tile by tile. `counts` has the number of starts of a window, and that of arrays that the epilogue reads."""
    starts, refs = refs[: counts[0]], refs[counts[0] :]
    others, results, slots = refs[: counts[1]], refs[counts[1] :][:n_results], refs[counts[1] + n_results :]
    slots, staging = slots[:4], slots[4:]  # stages of both operands; barriers: full, and empty again
    side, rank = (2, lax.axis_index("rank")) if is_paired else (1, 0)
    warpgroup = lax.axis_index("warpgroup")

    def each_tile(body):
        pairs = tiles[0] // side, tiles[1]

        @plgpu.nd_loop((math.prod(pairs),), collective_axes="block", init_carry=jnp.int32(0))
        def end(info, carry):  # how many steps were before: barriers count on from tile to tile
            (place,) = info.index
            row, column = plgpu.planar_snake(place, pairs, 0, _SIDE_BY_SIDE // side)
            body(row * side + rank, column, carry)
            return carry + steps

        return end

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(40, action="decrease")
        first = [0, 0]
        for start in starts:
            first[axis] = start[0] * DEPTH
        _produce(a, b, slots, along, first, steps, each_tile, is_paired)

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(232, action="increase")
        empty = slots[-1]
        for at in range(empty.shape[0]):
            plgpu.barrier_arrive(empty.at[at])

        def compute(row, column, before):
            place = Place(row * CONSUMERS + warpgroup, column)
            sums = _multiply(slots, warpgroup, steps, along, before)
            epilogue(place, sums, others, results, [stage.at[warpgroup] for stage in staging])

        each_tile(compute)
        if staging:
            plgpu.wait_smem_to_gmem(0)


def _stage(step, slots):
    return lax.rem(step, jnp.int32(slots.shape[0]))


def _produce(a, b, slots, along, first, steps, each_tile, is_paired):
    """Copies operands to shared memory; those of `b` from `first` on."""
    a_slots, b_slots, full, empty = slots

    def copy(row, column, before):
        rows, columns = pl.ds(row * TILE_ROWS, TILE_ROWS), pl.ds(first[1 - along[1]] + column * COLUMNS, COLUMNS)

        @pl.loop(0, steps)
        def _(k):
            at = _stage(before + k, a_slots)
            of_a, of_b = pl.ds(k * DEPTH, DEPTH), pl.ds(first[along[1]] + k * DEPTH, DEPTH)
            plgpu.barrier_wait(empty.at[at])
            plgpu.copy_gmem_to_smem(a.at[rows, of_a] if along[0] == 1 else a.at[of_a, rows], a_slots.at[at], full.at[at])
            part = b.at[columns, of_b] if along[1] == 1 else b.at[of_b, columns]
            plgpu.copy_gmem_to_smem(part, b_slots.at[at], full.at[at], collective_axes="rank" if is_paired else None)

    end = each_tile(copy)

    @pl.loop(0, a_slots.shape[0])  # a barrier may not go while others arrive there
    def _(k):
        plgpu.barrier_wait(empty.at[_stage(end + k, a_slots)])


def _multiply(slots, warpgroup, steps, along, before):
    """Multiplies the rows of a consumer by a tile of columns, whose first step is the number `before`."""
    a_slots, b_slots, full, empty = slots
    rows = pl.ds(warpgroup * ROWS, ROWS)

    def multiply(product):
        @pl.loop(0, steps)
        def _(k):
            at = _stage(before + k, a_slots)
            plgpu.barrier_wait(full.at[at])
            own, part = a_slots.at[at, rows] if along[0] == 1 else a_slots.at[at, :, rows].transpose((1, 0)), b_slots.at[at]
            plgpu.wgmma(product, own, part.transpose((1, 0)) if along[1] == 1 else part)
            plgpu.wgmma_wait(1)  # the step before has ended
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[_stage(before + k - 1, a_slots)]))

        return product[...]

    product = pl.run_scoped(multiply, plgpu.ACC((ROWS, COLUMNS), jnp.float32))
    plgpu.barrier_arrive(empty.at[_stage(before + steps - 1, a_slots)])
    return product
