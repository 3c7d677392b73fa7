"""Rows that are read in sweeps of a few thousand elements, each once, by a block or by the blocks of a cluster.

With the state `(m, d)` of a row its scores are lifted while they are at hand. Each slice of a row has a state of its own,
however many blocks share it, so that bits do not depend on the number of rows.
"""

import functools
import math
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
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax._gpu.rows.memory import Elements, Ring, RowMemory
from jaxsoftmax._gpu.rows.plan import RowPlan
from jaxsoftmax._gpu.rows.tile import RowTile
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
      copied: sweeps that are on their way to shared memory at a time; 0 where they are loaded to registers.
    """

    layout: RowPlan
    blocks: int
    rows: int
    slices: int
    copied: int = 0

    @property
    def ring(self) -> int:
        """Steps in shared memory, if any are copied: threads that join vectors need one of the next sweep, too."""
        return self.copied * self.layout.unroll + self.layout.is_joined


def sweeps_of(layout: RowPlan) -> int:
    """How many sweeps the loop over a row has."""
    return len(layout.looped_steps) // layout.unroll


def copied_of(layout: RowPlan, itemsize: int) -> int:
    """How many sweeps to copy at a time: of elements of 16 bits registers hold too few bytes that are on their way."""
    return min(2, sweeps_of(layout)) if itemsize == 2 else 0


def plan_of(target, layout: RowPlan, rows: int, is_lifted: bool, copied: int = 0) -> Plan:
    """That of rows in such a layout; `is_lifted` says whether each slice has a state."""
    slices, sweeps = MOST_BLOCKS, sweeps_of(layout)
    while is_lifted and slices > 1 and slices * _SWEEPS_OF_SLICE > sweeps:
        slices //= 2
    return Plan(layout, blocks_for(target, layout, rows, slices), rows, slices, copied)


def blocks_for(target, layout: RowPlan, rows: int, most: int) -> int:
    """Of a cluster for each row: more where rows are too few for all multiprocessors, as far as each has a sweep."""
    blocks, sweeps = 1, sweeps_of(layout)
    while blocks < most and 2 * blocks * rows <= 4 * target.multiprocessors and 2 * blocks <= sweeps:
        blocks *= 2
    return blocks


def launched(name, kernel, plan, dtype, results, scratch, parts: int = 0, grid: int | None = None):
    """A kernel with a block, or a cluster, for each row; it gets results, `scratch`, and what `Row` and `States` need.

    Rows are of this dtype. `parts` are those of `States`, 0 where there are none. `grid` says how many there are if not that.
    """
    layout = plan.layout
    warps = ptx.WARPS * layout.warpgroups
    order = plgpu.SMEM(layout.order_shape, jnp.float32) if layout.order_shape and parts > 1 else None
    held = parts * (1 + (plan.blocks > 1))  # what the block has, and what all of its cluster have
    states = plgpu.SMEM((held, plan.slices * warps), jnp.float32) if parts else None
    slots = plgpu.SMEM((plan.ring * layout.threads * layout.vector,), dtype) if plan.copied else None
    options: dict[str, Any] = {}
    if layout.warpgroups > 1:
        options |= {"num_threads": layout.warpgroups, "thread_name": "warpgroup"}
    if plan.blocks > 1:
        options |= {"cluster": (plan.blocks,), "cluster_names": ("rank",)}
    return kernel_of(
        kernel,
        out_type=results,
        grid=(plan.rows if grid is None else grid,),
        grid_names=("block",),
        scratch_types=(*scratch, slots, order, states),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **options,
    )


def start(plan: Plan) -> None:
    """Says that the block has started, to those of its cluster."""
    if plan.blocks > 1:
        ptx.arrive_in_cluster()


def meet(plan: Plan) -> None:
    """Waits until all blocks of the cluster have started."""
    if plan.blocks > 1:
        ptx.cluster_wait()


class Row:
    """The row of a block, or its part of it.

    Attributes:
      tile: what sums up over the block.
    """

    def __init__(self, plan: Plan, scratch, row=None):
        self.plan = plan
        row = lax.axis_index("block") if row is None else row
        slots, order, _ = scratch
        rank = lax.axis_index("rank") if plan.blocks > 1 else jnp.int32(0)
        memory = RowMemory(plan.layout, row, plan.rows, False, rank)
        self.tile, self.slots = RowTile(memory, None, None, order), slots

    def weights(self, scores, m, size):
        """Of an array of scores in the row, whose maximum is `m`; `size` is their scale, or None."""
        along = self.tile.along
        return online.weights(scores, along(m), axis=(), scale=None if size is None else along(size))

    def sweep(self, ref, held: Elements, visit, states: "States | None" = None, ahead: bool = True) -> None:
        """Folds `visit(number, steps, load, in_loop, carry)` over all steps of the row's part, some in each sweep.

        The sweeps of a loop are in order, and have whole vectors; each block has as many slices of them. What is left, and is
        loaded in part, goes to the last one that has some.

        Args:
          ref: the array of the row.
          held: what gives the elements of a step.
          visit: gets the number of the sweep in this block, from 0 (an int where there is no loop before it); its steps; a
            function that gives what they load, or what one of them does; whether it is one of the loop; and the carry, and
            returns the next one.
          states: whose carry it is, started and stored in each slice; None for an empty one.
          ahead: whether what the next sweep takes is loaded to registers before a sweep is visited, where nothing is copied to
            shared memory. Else other warps have to have enough to do meanwhile, and threads need fewer registers.
        """
        layout, blocks, rank = self.plan.layout, self.plan.blocks, self.tile.memory.rank
        unroll, looped = layout.unroll, layout.looped_steps
        count, copied = sweeps_of(layout), self.plan.copied
        ring: Any = Ring(self.tile.memory, ref, self.slots, self.plan.ring) if copied else None
        rest = [step for step in range(layout.steps) if step not in looped[: count * unroll]]
        of_slice = max(1, -(-count // self.plan.slices))
        own = of_slice * self.plan.slices // blocks  # sweeps of a block, of the last ones fewer
        carry = () if states is None else states.start()

        def first_of(i):
            return looped.start + i * unroll

        def steps_of(i):
            first = first_of(i)
            return [first, *(first + k for k in range(1, unroll))]

        def loaded(steps, index=None):
            return [held.load(step) for step in steps] if index is None else held.load(steps[index])

        def from_registers(here, index=None):
            return here if index is None else here[index]

        def from_ring(steps, index=None):
            return ring.load(steps[0], unroll) if index is None else ring.load(steps[index], 1)[0]

        swept: Any = 0  # sweeps of the loop
        if count:
            first = rank * jnp.int32(own)
            stop = jnp.minimum(first + own, count)
            swept = stop - first

            def copy(i, more: int = 0):
                ring.copy(first_of(i) + (layout.is_joined - more), unroll + more, stop - i)

            def sweep(i, carry):
                (following, carry), steps = carry, steps_of(i)
                if ring is not None:
                    ptx.await_copies(copied - 1)
                    carry = visit(i - first, steps, functools.partial(from_ring, steps), True, carry)
                    copy(i + copied)
                elif ahead:
                    here = following
                    following = loaded(steps_of(jnp.minimum(i + 1, stop - 1)))  # the last again, from a cache
                    carry = visit(i - first, steps, functools.partial(from_registers, here), True, carry)
                else:
                    carry = visit(i - first, steps, functools.partial(loaded, steps), True, carry)
                if states is not None and states.has_sums:
                    is_last = (i + 1) % of_slice == 0
                    is_last = jnp.logical_and(is_last, i + 1 != count) if rest else jnp.logical_or(is_last, i + 1 == count)
                    carry = states.end(is_last, i // of_slice, carry)
                return following, carry

            for k in range(copied):
                copy(first + k, more=layout.is_joined if k == 0 else 0)
            initial = loaded(steps_of(jnp.minimum(first, count - 1))) if ahead and ring is None else []
            _, carry = lax.fori_loop(first, stop, sweep, (initial, carry))
            if states is not None and not states.has_sums:
                states.store(rank * (self.plan.slices // blocks), carry)

        def finish(carry):
            visits = [rest[i : i + unroll] for i in range(0, len(rest), unroll)]
            all_loaded = list(map(loaded, visits))  # before the first is visited, as each takes long to arrive
            for number, (steps, here) in enumerate(zip(visits, all_loaded, strict=True)):
                carry = visit(swept + number, steps, functools.partial(from_registers, here), False, carry)
            if states is not None:
                last = max(0, count - 1) // of_slice if states.has_sums else rank * (self.plan.slices // blocks)
                states.store(last, carry)

        if rest and blocks == 1:
            finish(carry)
        elif rest:
            pl.when(rank == (count - 1) // own)(lambda: finish(carry))


class States:
    """Maxima, and sums of weights, of the slices of a row, in shared memory, of each warp.

    A carry has at each place of a step the maximum `m`, and the sum `d` of the weights if there is room for it; or where the
    row's `m` is known, as many sums as there is room for. Maxima alone do not depend on the order: a block has one.
    """

    def __init__(self, row: Row, ref, size, m: Any = None):
        self.row, self.ref, self.size, self.m = row, ref, size, m
        self.parts = ref.shape[0] // (1 + (row.plan.blocks > 1))
        self.warps = ref.shape[1] // row.plan.slices
        self.has_sums = m is not None or self.parts > 1  # which depend on the order

    def clear(self) -> None:
        for part in range(self.parts):
            ptx.fill_shared(self.ref.at[part], -math.inf if self._is_maximum(part) else 0.0, self.ref.shape[1])

    def _is_maximum(self, part: int) -> bool:
        return self.m is None and part == 0

    def start(self):
        return tuple([self.row.tile.accumulator(-jnp.inf if self._is_maximum(part) else 0) for part in range(self.parts)])

    def push(self, carry, scores, top):
        """Adds scores, whose maximum at each place is `top`; of these `m` alone needs nothing else."""
        if not self.has_sums:
            return (jnp.maximum(carry[0], top),)
        size = None if self.size is None else self.row.tile.along(self.size)
        state = online.push(State(*carry), scores, axis=(), scale=size, top=top)
        return state.m, state.d

    def weights(self, scores):
        """Of an array of scores, where `m` is known."""
        return self.row.weights(scores, self.m, self.size)

    def end(self, is_last, number, carry):
        """Stores what belongs to a slice if this is its last sweep, and starts anew."""
        pl.when(is_last)(lambda: self.store(number, carry))
        return tuple(choose(is_last, new, old) for new, old in zip(self.start(), carry, strict=True))

    def store(self, number, carry) -> None:
        tile = self.row.tile
        if self.m is not None:
            found = [tile.of_places(sum_) for sum_ in carry]
        elif not self.has_sums:
            found = [jnp.max(carry[0], 1)]
        else:
            m, d = carry
            found = tile.of_warp(m, d, self.size)[:2]
        place = number * self.warps + tile.memory.group() * ptx.WARPS
        for part, values in enumerate(found):
            compat.store(self.ref.at[part].at[pl.ds(place, ptx.WARPS)], values)

    def send(self) -> None:
        """Copies those of this block to all of the cluster, which have them after a barrier of it."""
        count = self.ref.shape[1] // self.row.plan.blocks
        for part in range(self.parts):
            own, gathered = self.ref.at[part], self.ref.at[self.parts + part]
            ptx.copy_to_cluster(own, gathered, self.row.tile.memory.rank * count, count, self.row.plan.blocks)

    def merged(self) -> list[jax.Array]:
        """Those of the row: `m`, 0 where it is infinite, and sums."""
        ptx.block_barrier()
        layout, first = ptx.replicated(self.ref.shape[1]), self.ref.shape[0] - self.parts
        found = [plgpu.load(self.ref.at[first + part], layout=layout, optimized=False) for part in range(self.parts)]
        if self.m is not None:
            return [jnp.sum(sum_) for sum_ in found]
        if not self.has_sums:
            return [online.shift(jnp.max(found[0]))]
        state = self.row.tile.merge_along(State(*found), self.size)
        return [online.shift(state.m), state.d]


def choose(condition, a, b):
    """One of two arrays, by a scalar."""
    return jnp.where(lax.broadcast_in_dim(condition, a.shape, ()), a, b)
