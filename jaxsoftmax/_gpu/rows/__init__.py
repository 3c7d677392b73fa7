"""Kernels over the rows of arrays, for any distribution of rows over threads.

A `RowKernel` says what is read, computed and returned, a plan (`plan`) how rows are distributed. There is a launcher for each
way: short rows through shared memory (`staged`), rows in a warp, a block or a cluster (`block`), rows that blocks of the grid
share (`grid`). `block` and `grid` take rows along another axis too, in tiles (`columns`).
"""

import jax

from jaxsoftmax._gpu.rows import block, grid, staged
from jaxsoftmax._gpu.rows.kernel import RowKernel
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.staged import StagedPlan


def launch(kernel: RowKernel, plan: RowPlan | ColumnPlan) -> list[jax.Array]:
    """Runs a kernel by the launcher of the plan's way; returns the whole results, and then those with a value for each row."""
    if plan.persistent_blocks:
        return grid.launch(kernel, plan)
    return staged.launch(kernel, plan) if isinstance(plan, StagedPlan) else block.launch(kernel, plan)
