"""Rows that are read in sweeps of a few thousand elements, each once, by a block or by the blocks of a cluster.

With the state `(m, d)` of a row its scores are lifted while they are at hand. Each slice of a row has a state of its own,
however many blocks share it, so that bits do not depend on the number of rows.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.layout import RowLayout
from jaxsoftmax._gpu.rows.memory import Memory
from jaxsoftmax._gpu.rows.tile import Tile
from jaxsoftmax.online import State

MOST_BLOCKS = 8  # that share a row
_SWEEPS_OF_SLICE = 6  # at least, of a row with a state: the end of a slice takes as long as one or two


@dataclass(frozen=True)
class Plan:
    """How rows are spread over blocks.

    Attributes:
      layout: of a row in a block.
      blocks: of a cluster, which share a row.
      rows: of the array.
      slices: of a row, a multiple of `blocks`.
    """

    layout: RowLayout
    blocks: int
    rows: int
    slices: int


def plan_of(target, layout: RowLayout, rows: int, is_lifted: bool) -> Plan:
    """That of rows in such a layout; `is_lifted` says whether each slice has a state."""
    slices, sweeps = MOST_BLOCKS, len(layout.looped_steps) // layout.config.unroll
    while is_lifted and slices > 1 and slices * _SWEEPS_OF_SLICE > sweeps:
        slices //= 2
    return Plan(layout, blocks_for(target, layout, rows, slices), rows, slices)


def blocks_for(target, layout: RowLayout, rows: int, most: int) -> int:
    """Of a cluster for each row: more where rows are too few for all multiprocessors, as far as each has a sweep."""
    blocks, sweeps = 1, len(layout.looped_steps) // layout.config.unroll
    while blocks < most and 2 * blocks * rows <= 4 * target.multiprocessors and 2 * blocks <= sweeps:
        blocks *= 2
    return blocks


def launched(name, kernel, plan, results, scratch, sums: int = 0):
    """A kernel with a block, or a cluster, for each row; it gets results, `scratch`, and what `Row` and `States` need.

    `sums` are those of `States`, 0 where there are none.
    """
    layout = plan.layout
    warps = ptx.WARPS * layout.warpgroups
    exchange = plgpu.SMEM(layout.exchange_shape, jnp.float32)
    order = plgpu.SMEM(layout.order_shape, jnp.float32) if layout.order_shape else None
    states = plgpu.SMEM((1 + sums, plan.slices * warps), jnp.float32) if sums else None
    options: dict[str, Any] = {}
    if layout.warpgroups > 1:
        options |= {"num_threads": layout.warpgroups, "thread_name": "warpgroup"}
    if plan.blocks > 1:
        options |= {"cluster": (plan.blocks,), "cluster_names": ("rank",)}
    return plgpu.kernel(
        kernel,
        out_type=results,
        grid=(plan.rows,),
        grid_names=("block",),
        scratch_types=(*scratch, exchange, order, states),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **options,
    )


class Row:
    """The row of a block, or its part of it.

    Attributes:
      tile: what sums up over the block.
    """

    def __init__(self, plan: Plan, scratch):
        self.plan = plan
        exchange, order, _ = scratch
        rank = lax.axis_index("rank") if plan.blocks > 1 else jnp.int32(0)
        memory = Memory(plan.layout, lax.axis_index("block"), plan.rows, False, rank)
        self.tile = Tile(memory, exchange, None, order)

    def start(self) -> None:
        if self.plan.blocks > 1:
            ptx.arrive_in_cluster()

    def meet(self) -> None:
        """Waits until all blocks of the cluster have started."""
        if self.plan.blocks > 1:
            ptx.cluster_wait()

    def sweep(self, load: Callable[[Any], jax.Array], visit, states: "States | None" = None, ahead: bool = True) -> None:
        """Folds `visit(number, steps, load, in_loop, carry)` over all steps of the row's part, some in each sweep.

        The sweeps of a loop are in order, and have whole vectors; each block has as many slices of them. What is left, and is
        loaded in part, goes to the last one that has some.

        Args:
          load: gives what a thread has of a step.
          visit: gets the number of the sweep in this block, from 0 (an int where there is no loop before it); its steps; a
            function that gives what they load; whether it is one of the loop; and the carry, and returns the next one.
          states: whose carry it is, started and stored in each slice; None for an empty one.
          ahead: whether what the next sweep takes is loaded before a sweep is visited. Else other warps have to have enough to
            do meanwhile, and threads need fewer registers.
        """
        layout, blocks, rank = self.plan.layout, self.plan.blocks, self.tile.memory.rank
        unroll, looped = layout.config.unroll, layout.looped_steps
        count = len(looped) // unroll
        rest = [step for step in range(layout.steps) if step not in looped[: count * unroll]]
        of_slice = max(1, -(-count // self.plan.slices))
        own = of_slice * self.plan.slices // blocks  # sweeps of a block, of the last ones fewer
        carry = () if states is None else states.start()

        def steps_of(i):
            return [looped.start + i * unroll + k for k in range(unroll)]

        def loaded(steps):
            return [load(step) for step in steps]

        swept: Any = 0  # sweeps of the loop
        if count:
            first = rank * jnp.int32(own)
            stop = jnp.minimum(first + own, count)
            swept = stop - first

            def sweep(i, carry):
                held, carry = carry
                if ahead:
                    following = loaded(steps_of(jnp.minimum(i + 1, stop - 1)))  # the last again, from a cache
                    carry = visit(i - first, steps_of(i), lambda: held, True, carry)
                else:
                    following = []
                    carry = visit(i - first, steps_of(i), lambda: loaded(steps_of(i)), True, carry)
                if states is not None:
                    is_last = (i + 1) % of_slice == 0
                    is_last = jnp.logical_and(is_last, i + 1 != count) if rest else jnp.logical_or(is_last, i + 1 == count)
                    carry = states.end(is_last, i // of_slice, carry)
                return following, carry

            initial = loaded(steps_of(jnp.minimum(first, count - 1))) if ahead else []
            _, carry = lax.fori_loop(first, stop, sweep, (initial, carry))

        def finish(carry):
            for i in range(0, len(rest), unroll):
                steps = rest[i : i + unroll]
                carry = visit(swept + i // unroll, steps, functools.partial(loaded, steps), False, carry)
            if states is not None:
                states.store(max(0, count - 1) // of_slice, carry)

        if rest and blocks == 1:
            finish(carry)
        elif rest:
            pl.when(rank == (count - 1) // own)(lambda: finish(carry))


class States:
    """The states of the slices of a row, in shared memory, of each warp; with `more`, a second sum of weights beside each.

    A carry is `m`, `d` and that sum at each place of a step.
    """

    def __init__(self, row: Row, ref, size, more: bool = False):
        self.row, self.ref, self.size, self.more = row, ref, size, more
        self.warps = ref.shape[1] // row.plan.slices

    def clear(self) -> None:
        for part in range(2 + self.more):
            ptx.fill_shared(self.ref.at[part], 0.0 if part else -math.inf, self.ref.shape[1])

    def start(self):
        tile = self.row.tile
        return tile.accumulator(-jnp.inf), *(tile.accumulator(0) for _ in range(1 + self.more))

    def push(self, carry, scores, top, counts=()):
        """Adds scores, whose maximum at each place is `top`; with `more`, `counts` says what of each the second sum has."""
        size = None if self.size is None else self.row.tile.along(self.size)
        m, d, *more = carry
        state = online.push(State(m, d), scores, axis=(), scale=size, top=top)
        for sum_ in more:
            weights = [online.weights(x, state.m, axis=(), scale=size) for x in scores]
            counted = [jnp.where(*pair, 0) for pair in zip(counts, weights, strict=True)]
            more = [functools.reduce(jnp.add, counted, online.rescale(State(m, sum_), state.m, scale=size).d)]
        return state.m, state.d, *more

    def end(self, is_last, number, carry):
        """Stores the state of a slice if this is its last sweep, and starts a new one."""
        pl.when(is_last)(lambda: self.store(number, carry))
        return tuple(choose(is_last, new, old) for new, old in zip(self.start(), carry, strict=True))

    def store(self, number, carry) -> None:
        tile, (m, *sums) = self.row.tile, carry
        found = [tile.of_warp(m, sum_, self.size) for sum_ in sums]
        place = number * self.warps + tile.memory.group() * ptx.WARPS
        for part, values in enumerate([found[0].m, *(state.d for state in found)]):
            compat.store(self.ref.at[part].at[pl.ds(place, ptx.WARPS)], values)

    def send(self) -> None:
        """Copies the states of this block to all of the cluster, which have them after a barrier of it."""
        count = self.ref.shape[1] // self.row.plan.blocks
        for part in range(2 + self.more):
            ptx.copy_to_cluster(self.ref.at[part], self.row.tile.memory.rank * count, count, self.row.plan.blocks)

    def merged(self) -> list[jax.Array]:
        """The state of the row, and the second sum."""
        ptx.block_barrier()
        layout = ptx.replicated(self.ref.shape[1])
        m, *sums = [plgpu.load(self.ref.at[part], layout=layout, optimized=False) for part in range(2 + self.more)]
        found = [self.row.tile.merge_along(State(m, sum_), self.size) for sum_ in sums]
        return [online.shift(found[0].m), *(state.d for state in found)]


def choose(condition, a, b):
    """One of two arrays, by a scalar."""
    return jnp.where(lax.broadcast_in_dim(condition, a.shape, ()), a, b)
