"""Kernels over the rows of arrays, for any distribution of rows over threads.

A `RowKernel` says what is read, computed and returned, a plan (`plan`) how rows are distributed. There is a launcher for each
way: short rows through shared memory (`in_warp`), rows in a warp, a block or a cluster (`block`), rows that blocks of the grid
share (`grid`). `block` and `grid` take rows along another axis too, in tiles (`columns`).
"""

import jax

from jaxsoftmax._gpu.rows import block, grid, in_warp
from jaxsoftmax._gpu.rows.in_warp import StagedPlan
from jaxsoftmax._gpu.rows.kernel import RowKernel
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan


def launch(kernel: RowKernel, plan: RowPlan | ColumnPlan) -> list[jax.Array]:
    """Runs a kernel by the launcher of the plan's way; returns the whole results, and then those with a value for each row."""
    if plan.persistent_blocks:
        return grid.launch(kernel, plan)
    return in_warp.launch(kernel, plan) if isinstance(plan, StagedPlan) else block.launch(kernel, plan)
