"""What the body of a kernel sees of the rows that its block holds, and its words for what it computes from them."""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
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
      exchange: `[4, warps]` float32 in shared memory, where warps share a row: two values of each for two rounds.
      pushed: the barriers of what blocks of a cluster push to each other's `exchange`, or None.
      rounds: the numbers of the exchanges to come. Who writes in a round has read what was written in the one before: so what
        was written two rounds before was read by all.
    """

    memory: Memory
    exchange: Any
    pushed: Any
    rounds: Iterator[int] = field(default_factory=itertools.count)

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
            first = ((first * layout.blocks + self.memory.rank) * layout.warpgroups + self.memory.group()) * shares
        first *= width
        if layout.shifted:  # what overflows here does not matter below the size of a line
            first -= (self.memory.row * layout.cols) & (layout.line - 1)
        return column + first

    def lift(self, scores: Steps, scale=None) -> State:
        """The states of what a warp holds of each row."""
        layout = self.memory.layout
        if not layout.config.unroll:
            return online.lift(map(scores, range(layout.steps)), scale=scale)
        if layout.config.parked or layout.config.grid:  # to read twice costs less than a maximum over lanes in each iteration
            lowest = plgpu.layout_cast(jnp.full(layout.shape, -jnp.inf, jnp.float32), layout.layout)
            (top,) = self._fold(lambda steps, top: [functools.reduce(jnp.maximum, map(scores, steps), top)], [lowest])
            m = jnp.max(top, 1)
            return State(m, self._sum(each(lambda s: online.weights(s, m, scale=scale), scores)))
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
        sums = self._sum(values)
        return jnp.sum(self._exchanged(sums)[0]) if self.memory.layout.whole_block else sums

    def _sum(self, values: Steps) -> jax.Array:
        """The sums of what a warp holds of each row."""
        layout = self.memory.layout
        if layout.config.unroll:
            zeros = plgpu.layout_cast(jnp.zeros(layout.shape, jnp.float32), layout.layout)
            (total,) = self._fold(lambda steps, total: [functools.reduce(jnp.add, map(values, steps), total)], [zeros])
        else:
            total = functools.reduce(jnp.add, map(values, range(layout.steps)))
        return jnp.sum(total, 1)

    def store(self, results: Sequence[tuple[Any, Steps]]) -> None:
        """Stores results, each with where it goes, step by step."""
        stores = self.memory.store
        self._fold(lambda steps: [stores(ref, i, of(i).astype(ref.dtype)) for i in steps for ref, of in results][:0], [])

    def _fold(self, function, start):
        """Folds `function(steps, *carry)` over all steps: at once, or in a loop, without those that load a part of a vector."""
        layout = self.memory.layout
        unroll, looped = layout.config.unroll, layout.looped_steps
        if not unroll:
            return function(range(layout.steps), *start)
        iterations = len(looped) // unroll

        def iteration(i, carry):
            if layout.config.parked:
                ptx.keep_loop()
            return tuple(function([looped.start + i * unroll + k for k in range(unroll)], *carry))

        carry = lax.fori_loop(0, iterations, iteration, tuple(start)) if iterations else start
        rest = [step for step in range(layout.steps) if step not in looped[: iterations * unroll]]
        return function(rest, *carry) if rest else carry

    def _exchanged(self, *parts):
        """What all warps have that share the row."""
        layout = self.memory.layout
        group = self.memory.group()
        round_ = next(self.rounds)
        slots = [self.exchange.at[round_ % 2 * 2 + i] for i in range(len(parts))]
        if layout.cluster > 1:
            group = self.memory.rank * layout.warpgroups + group
            if round_ == 0:
                ptx.cluster_wait()
            for slot, part in zip(slots, parts, strict=True):
                ptx.push_to_cluster(slot, group * ptx.WARPS, part, layout.row_layout, layout.cluster, self.pushed, round_)
            ptx.await_pushes(self.pushed, round_, 4 * len(parts) * layout.warps)
        else:
            for slot, part in zip(slots, parts, strict=True):
                slot[pl.ds(group * ptx.WARPS, ptx.WARPS)] = part
            if layout.warpgroups > 1:
                ptx.block_barrier()
            else:
                plgpu.commit_smem()
        everywhere = ptx.replicated(layout.warps)
        return [plgpu.load(slot, layout=everywhere, optimized=False) for slot in slots]
