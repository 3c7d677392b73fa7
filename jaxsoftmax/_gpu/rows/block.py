"""Rows in warps, a block, or a cluster of blocks; or tiles of rows along another axis (`columns`) in a block or a cluster.

1. Every thread loads its vectors of the block's rows, its one row or its slice of one: into registers, or by asynchronous
   copies into shared memory. Rows that are read once only are loaded when a step needs them.
2. The body reduces them: over the elements of a thread, the lanes of a warp (shuffles), the warps of a block (shared memory),
   the blocks of a cluster (stores to each other's shared memory).
3. Every thread computes the results of its vectors from what it kept, and stores them.

Each element is read once and written once.
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu import sync
from jaxsoftmax._gpu.rows.columns import ColumnMemory, ColumnTile
from jaxsoftmax._gpu.rows.kernel import RowKernel, Scratch, scratch_of
from jaxsoftmax._gpu.rows.memory import RowMemory
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage
from jaxsoftmax._gpu.rows.tile import RowTile


def launch(kernel: RowKernel, plan: RowPlan | ColumnPlan) -> list[jax.Array]:
    """Runs a kernel on rows that a warp, a block or a cluster shares, or on tiles of them."""
    is_columns = isinstance(plan, ColumnPlan)
    memory_of: Any = ColumnMemory if is_columns else RowMemory
    tile_of: Any = ColumnTile if is_columns else RowTile
    count, view = plan.count(kernel.problem.outer), plan.view(kernel.problem.outer)
    exact = plan.is_exact and count % plan.block_rows == 0
    if exact and plan.takes_block:  # for each row the parts that a warpgroup holds in one step
        view = (count * plan.steps * plan.blocks * plan.warpgroups, *plan.shape)

    def run(*refs):
        operands, results, scratch = kernel.split(refs)
        slots = dict(zip(kernel.whole_arrays, scratch.slots, strict=False))
        rank = lax.axis_index("rank") if plan.cluster > 1 else jnp.int32(0)
        memory = memory_of(plan, lax.axis_index("block") * jnp.int32(plan.block_rows), count, exact, rank)
        tile = tile_of(memory, scratch.exchange, scratch.arrivals, scratch.order)
        if plan.cluster > 1:
            sync.prepare_exchange(scratch.arrivals)
        if slots:
            copies = [operands[name] for name in slots], list(slots.values()), kernel.fills(list(slots))
            memory.copy_in(*copies)
            sync.await_copies()
            memory.fill_around(*copies)
        kernel.store(tile, results, kernel.body(tile, **kernel.load(tile, operands, slots)))
        if plan.cluster > 1 and kernel.problem.n_exchanges == 0:  # only an exchange waits for the other blocks
            sync.cluster_wait()

    in_slots = [array.dtype for array in kernel.whole_arrays.values() if plan.storage == Storage.SHARED]
    scratch = scratch_of(plan, in_slots) if plan.takes_block else Scratch([])
    is_sequential = plan.is_shifted and kernel.may_start_inside_a_vector
    return kernel.call(run, plan, view, scratch, blocks=pl.cdiv(count, plan.block_rows), is_sequential=is_sequential)
