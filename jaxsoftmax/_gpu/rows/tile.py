"""What the body of a kernel sees of the rows that its block holds, and its words for what it computes from them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.memory import Memory
from jaxsoftmax.online import State

# What is as large as the rows, as a function of a step (see `RowLayout`) to its elements: what is computed twice need not be
# held in registers meanwhile.
Steps = Callable[[Any], jax.Array]


def each(function, *operands: Steps) -> Steps:
    """`function` of the operands' elements, step by step."""
    return lambda step: function(*(operand(step) for operand in operands))


@dataclass(frozen=True)
class Either:
    """A result that is `then` where a condition holds for the whole row, and `otherwise` elsewhere."""

    condition: jax.Array  # a scalar bool: there is one row in the block
    then: Steps
    otherwise: Steps


@dataclass(frozen=True)
class Tile:
    """The rows of a block.

    Attributes:
      memory: where they are.
      exchange: `[2, warps]` float32 in shared memory, where warps share a row.
      barriers: of the bulk copies that are under way, of each operand one for each step.
    """

    memory: Memory
    exchange: Any
    barriers: list[Any]

    def along(self, row: jax.Array) -> jax.Array:
        """A value for each row, or one for all, along the row."""
        return lax.broadcast_in_dim(row, self.memory.layout.shape, (0,) if row.ndim else ())

    def column(self, step) -> jax.Array:
        """The column of each element: int32, negative before the row, and at least its length behind it."""
        layout = self.memory.layout
        shares, width = layout.shape
        column = plgpu.broadcasted_iota(jnp.int32, layout.shape, 1, layout=layout.layout)
        first = jnp.int32(step)
        if layout.whole_block:
            share = plgpu.broadcasted_iota(jnp.int32, layout.shape, 0, layout=layout.layout)
            column += share * jnp.int32(width)
            rank = lax.axis_index("rank") if layout.blocks > 1 else jnp.int32(0)
            first = ((first * layout.blocks + rank) * layout.warpgroups + self.memory.group()) * shares
        first *= width
        if not layout.aligned:  # what overflows here does not matter below the size of a vector
            first -= (self.memory.row * layout.cols) & (layout.vector - 1)
        return column + first

    def lift(self, scores: Steps, scale=None) -> State:
        """The states of what a warp holds of each row."""
        layout = self.memory.layout
        if not layout.config.unroll:
            return online.lift(map(scores, range(layout.steps)), scale=scale)
        identity = online.identity(layout.shape[:1])
        start = [plgpu.layout_cast(part, layout.row_layout) for part in (identity.m, identity.d)]

        def push(steps, *state):
            return online.push(State(*state), map(scores, steps), scale=scale)[:2]

        return State(*self._fold(push, start))

    def merge(self, state: State, scale=None) -> State:
        """The states of the rows from those of what a warp holds."""
        if not self.memory.layout.whole_block:
            return state
        return online.merge_along(State(*self._exchanged(state.m, state.d)), 0, scale=scale)

    def sum(self, values: Steps) -> jax.Array:
        """The sums of the rows."""
        layout = self.memory.layout
        if layout.config.unroll:
            zeros = plgpu.layout_cast(jnp.zeros(layout.shape, jnp.float32), layout.layout)
            (total,) = self._fold(lambda steps, total: [functools.reduce(jnp.add, map(values, steps), total)], [zeros])
        else:
            total = functools.reduce(jnp.add, map(values, range(layout.steps)))
        sums = jnp.sum(total, 1)
        return jnp.sum(self._exchanged(sums)[0]) if layout.whole_block else sums

    def store(self, results: Sequence[tuple[Any, Steps]]) -> None:
        """Stores results, each with where it goes, step by step."""
        stores = self.memory.store
        self._fold(lambda steps: [stores(ref, i, of(i).astype(ref.dtype)) for i in steps for ref, of in results][:0], [])

    def _fold(self, function, start):
        """Folds `function(steps, *carry)` over all steps: at once, or in a loop, the first of which waits for the copies."""
        layout, arriving = self.memory.layout, list(self.barriers)
        unroll = layout.config.unroll
        if not unroll:
            return function(range(layout.steps), *start)
        self.barriers.clear()

        def iteration(i, carry):
            steps = [i * unroll + k for k in range(unroll)]
            for barrier in arriving:
                for step in steps:
                    plgpu.barrier_wait(barrier.at[step])
            return tuple(function(steps, *carry))

        return lax.fori_loop(0, layout.steps // unroll, iteration, tuple(start))

    def _exchanged(self, *parts):
        """What all warps have that share the row."""
        layout = self.memory.layout
        group = self.memory.group()
        if layout.blocks > 1:
            group = lax.axis_index("rank") * layout.warpgroups + group
            ptx.cluster_wait()
            for i, part in enumerate(parts):
                ptx.push_to_cluster(self.exchange.at[i], group * ptx.WARPS, part, layout.row_layout, layout.blocks)
            ptx.cluster_barrier()
        else:
            for i, part in enumerate(parts):
                self.exchange[i, pl.ds(group * ptx.WARPS, ptx.WARPS)] = part
            if layout.warpgroups > 1:
                ptx.block_barrier()
            else:
                plgpu.commit_smem()
        everywhere = ptx.replicated(layout.warps)
        return [plgpu.load(self.exchange.at[i], layout=everywhere, optimized=False) for i in range(len(parts))]
