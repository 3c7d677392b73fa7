"""Rows that are read in sweeps of a few thousand elements, each once, by a block or by the blocks of a cluster.

A row is cut into slices, each of whole sweeps, which the blocks of a cluster share evenly. A state of the row, or sums of
weights, are kept for each slice and merged in one order, so that their bits depend on the row alone, and not on how many rows
there are. What is not a whole sweep comes last, in the block that has the last sweep.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import sync
from jaxsoftmax._gpu.emit import WARPS, replicated
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax._gpu.rows.memory import CopyRing, Elements, RowMemory
from jaxsoftmax._gpu.rows.plan import RowPlan, Storage
from jaxsoftmax._gpu.rows.tile import RowTile
from jaxsoftmax.online import State

_MAX_BLOCKS = 8  # that share a row
_MIN_SWEEPS_OF_SLICE = 6  # of a row with states: the end of a slice takes as long as one or two sweeps


@dataclass(frozen=True)
class SweepPlan:
    """Distributes the rows of an array over blocks, which read them in sweeps.

    A step is a vector of every thread of a block. The steps of an iteration of the loop of `row_plan` are a sweep.
    """

    row_plan: RowPlan
    rows: int
    blocks: int = 1  # of a cluster, which share a row
    slices: int = _MAX_BLOCKS  # of a row, a multiple of `blocks`
    copied: int = 0  # sweeps that are on their way to shared memory at a time. 0 if sweeps are loaded to registers

    def describe(self) -> str:
        share = f"a cluster of {self.blocks} blocks a row" if self.blocks > 1 else "a block a row"
        through = f", {self.copied} sweeps ahead in shared memory" if self.copied else ""
        return f"{share}, {self.row_plan.threads} threads a block, sweeps of {self.sweep_cols} elements{through}"

    def distributed(self, target: Target, has_states: bool) -> "SweepPlan":
        """Returns the plan with slices, whose number depends on the length of a row alone, and with blocks."""
        slices = _MAX_BLOCKS
        while has_states and slices > 1 and slices * _MIN_SWEEPS_OF_SLICE > self.sweeps:
            slices //= 2
        return replace(self, slices=slices, blocks=self.blocks_for(target, self.rows, slices))

    def blocks_for(self, target: Target, rows: int, most: int) -> int:
        """Returns the blocks of a cluster: more than one if rows are too few for all multiprocessors, each with a sweep."""
        blocks = 1
        while blocks < most and 2 * blocks * rows <= 4 * target.multiprocessors and 2 * blocks <= self.sweeps:
            blocks *= 2
        return blocks

    def copying(self, itemsize: int) -> "SweepPlan":
        """Returns the plan with copies to shared memory if registers hold too few bytes that are on their way: in 16 bits.

        A thread reads in shared memory what it copied itself, and waits for nobody: 512 rows of 128256 in bfloat16 took 39 us
        in place of 45. To bring rows to the L2 cache ahead of time (`cp.async.bulk.prefetch`) made all slower, float32 by a
        fifth.
        """
        return replace(self, copied=min(2, self.sweeps)) if itemsize == 2 else self

    @functools.cached_property
    def sweep_cols(self) -> int:
        """Elements of a sweep."""
        return self.row_plan.step_cols * self.row_plan.unroll

    @functools.cached_property
    def sweeps(self) -> int:
        """Whole sweeps of a row, which a loop goes over."""
        return len(self.row_plan.looped_steps) // self.row_plan.unroll

    @functools.cached_property
    def rest(self) -> list[int]:
        """Steps that are not of whole sweeps."""
        looped = self.row_plan.looped_steps[: self.sweeps * self.row_plan.unroll]
        return [step for step in range(self.row_plan.steps) if step not in looped]

    @functools.cached_property
    def slice_sweeps(self) -> int:
        """Sweeps of a slice; the last slices may have fewer."""
        return max(1, -(-self.sweeps // self.slices))

    @functools.cached_property
    def block_sweeps(self) -> int:
        """Sweeps of a block; the last blocks may have fewer."""
        return self.slice_sweeps * self.slices // self.blocks

    @functools.cached_property
    def ring_steps(self) -> int:
        """Steps that shared memory holds if sweeps are copied: threads that join vectors need one of the next sweep, too."""
        return self.copied * self.row_plan.unroll + self.row_plan.is_joined

    def scratch(self, dtype: Any, parts: int) -> tuple[Any, Any, Any]:
        """Returns the types of the arrays in shared memory that `SweptRow` and `SliceStates` have, for rows of this dtype.

        `parts` is the number of parts of a state; 0 if there are none.
        """
        row_plan = self.row_plan
        slots = plgpu.SMEM((self.ring_steps * row_plan.step_cols,), dtype) if self.copied else None
        order = plgpu.SMEM(row_plan.order_shape, jnp.float32) if row_plan.order_shape and parts > 1 else None
        arrays = parts * (1 + (self.blocks > 1))  # of the block, and of all blocks of its cluster
        states = plgpu.SMEM((arrays, self.slices * row_plan.warps), jnp.float32) if parts else None
        return slots, order, states


def row_plan_of(cols: int, vector: int, threads: int, unroll: int, is_stored: bool = False) -> RowPlan:
    """Returns the plan of rows that are read in sweeps of `unroll` steps.

    Unless `is_stored`, the order in which a thread has elements does not depend on where in a cache line the row starts: it
    joins vectors of two steps.
    """
    return RowPlan(cols, vector, threads, storage=Storage.NOWHERE, unroll=unroll, is_stored=is_stored)


def swept(name: str, kernel: Callable[..., None], plan: SweepPlan, results, scratch, clusters: int | None = None):
    """Returns a kernel with a block, or a cluster, for each row, or with `clusters` of them."""
    options: dict[str, Any] = {}
    if plan.row_plan.warpgroups > 1:
        options |= {"num_threads": plan.row_plan.warpgroups, "thread_name": "warpgroup"}
    if plan.blocks > 1:
        options |= {"cluster": (plan.blocks,), "cluster_names": ("rank",)}
    return kernel_of(
        kernel,
        out_type=results,
        grid=(plan.rows if clusters is None else clusters,),
        grid_names=("block",),
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **options,
    )


def scratch_bytes(types: Sequence[Any]) -> int:
    """Returns the bytes of shared memory of such scratch types; None is an array that is not needed."""
    return sum(math.prod(kind.shape) * jnp.dtype(kind.dtype).itemsize for kind in types if kind is not None)


def arrive(plan: SweepPlan) -> None:
    """Tells the other blocks of the cluster that this one has started."""
    if plan.blocks > 1:
        sync.arrive_in_cluster()


def await_cluster(plan: SweepPlan) -> None:
    """Waits until all blocks of the cluster have started: their shared memory exists from then on."""
    if plan.blocks > 1:
        sync.cluster_wait()


@dataclass(frozen=True)
class Sweep:
    """Elements of a few thousand columns that a block visits at a time."""

    number: Any  # of the sweep in this block, from 0; an int if there is no loop before it
    steps: Sequence[Any]
    load: Callable[..., Any]  # loads all steps, or with an index one of them
    is_whole: bool  # True if it is one of the loop: all elements are columns of the row, higher than those of sweeps before


class SweptRow:
    """The row of a block, or the part of it that the block has: `memory` loads and stores, `tile` reduces over the block."""

    def __init__(self, plan: SweepPlan, scratch, row=None):
        self.plan = plan
        row = lax.axis_index("block") if row is None else row
        slots, order, _ = scratch
        rank = lax.axis_index("rank") if plan.blocks > 1 else jnp.int32(0)
        self.memory = RowMemory(plan.row_plan, row, plan.rows, False, rank)
        self.tile, self.slots = RowTile(self.memory, None, None, order), slots

    def sweep(self, ref, elements: Elements, visit, states: "SliceStates | None" = None, is_ahead: bool = True) -> None:
        """Visits the block's part of the row, in order.

        Args:
          ref: array of the row in global memory.
          elements: what loads the elements of a step.
          visit: function of a `Sweep` and a carry to the next carry.
          states: states whose carry it is; they are started and stored for each slice. None for an empty carry.
          is_ahead: True if the next sweep is loaded to registers before a sweep is visited, if no sweeps are copied. Else other
            warps have to have enough to do meanwhile, and threads need fewer registers.
        """
        carry = () if states is None else states.start()
        sweeping = _Sweeping(self, ref, elements, visit, states, is_ahead)
        n_visited: Any = 0
        if self.plan.sweeps:
            n_visited, carry = sweeping.visit_whole_sweeps(carry)
        if self.plan.rest and self.plan.blocks == 1:
            sweeping.visit_rest(n_visited, carry)
        elif self.plan.rest:
            is_last = self.memory.rank == (self.plan.sweeps - 1) // self.plan.block_sweeps
            pl.when(is_last)(lambda: sweeping.visit_rest(n_visited, carry))


class _Sweeping:
    """A pass over the block's part of a row. Attributes are the arguments of `SweptRow.sweep`, and a ring of copied steps."""

    def __init__(self, row: SweptRow, ref, elements, visit, states, is_ahead):
        plan = row.plan
        self.row, self.plan, self.elements, self.visit, self.states = row, plan, elements, visit, states
        self.ring: Any = CopyRing(row.memory, ref, row.slots, plan.ring_steps) if plan.copied else None
        self.is_ahead = is_ahead and self.ring is None

    def visit_whole_sweeps(self, carry) -> tuple[Any, Any]:
        """Visits the whole sweeps in a loop; returns their number, and the carry."""
        plan, rank = self.plan, self.row.memory.rank
        first = rank * jnp.int32(plan.block_sweeps)
        stop = jnp.minimum(first + plan.block_sweeps, plan.sweeps)
        n_visited = stop - first
        for k in range(plan.copied):
            self._copy(first + k, stop, n_more=plan.row_plan.is_joined if k == 0 else 0)
        ahead = self._load(self._steps(jnp.minimum(first, plan.sweeps - 1))) if self.is_ahead else []

        def iteration(i, loop_carry):
            (ahead, carry), steps = loop_carry, self._steps(i)
            if self.ring is not None:
                sync.await_copies(plan.copied - 1)
                load = functools.partial(self._from_ring, steps)
            elif self.is_ahead:
                load = functools.partial(_from_registers, ahead)
                ahead = self._load(self._steps(jnp.minimum(i + 1, stop - 1)))  # the last one again, from a cache
            else:
                load = functools.partial(self._load, steps)
            carry = self.visit(Sweep(i - first, steps, load, True), carry)
            if self.ring is not None:
                self._copy(i + plan.copied, stop)
            return ahead, self._end_slice(i, carry)

        _, carry = lax.fori_loop(first, stop, iteration, (ahead, carry))
        if self.states is not None and not self.states.has_sums:
            self.states.store(rank * (plan.slices // plan.blocks), carry)
        return n_visited, carry

    def visit_rest(self, n_visited, carry) -> None:
        """Visits what is not a whole sweep."""
        plan, unroll = self.plan, self.plan.row_plan.unroll
        visits = [plan.rest[i : i + unroll] for i in range(0, len(plan.rest), unroll)]
        all_loaded = list(map(self._load, visits))  # before the first visit, as each load takes long to arrive
        for number, (steps, loaded) in enumerate(zip(visits, all_loaded, strict=True)):
            carry = self.visit(Sweep(n_visited + number, steps, functools.partial(_from_registers, loaded), False), carry)
        if self.states is not None:
            last = max(0, plan.sweeps - 1) // plan.slice_sweeps
            self.states.store(last if self.states.has_sums else self.row.memory.rank * (plan.slices // plan.blocks), carry)

    def _end_slice(self, i, carry):
        """Stores the sums of a slice after its last sweep, unless the rest is of it too, and starts anew."""
        if self.states is None or not self.states.has_sums:
            return carry
        is_last, count = (i + 1) % self.plan.slice_sweeps == 0, self.plan.sweeps
        is_last = jnp.logical_and(is_last, i + 1 != count) if self.plan.rest else jnp.logical_or(is_last, i + 1 == count)
        return self.states.end(is_last, i // self.plan.slice_sweeps, carry)

    def _first_step(self, i):
        return self.plan.row_plan.looped_steps.start + i * self.plan.row_plan.unroll

    def _steps(self, i):
        first = self._first_step(i)
        return [first, *(first + k for k in range(1, self.plan.row_plan.unroll))]

    def _load(self, steps, index=None):
        return [self.elements.load(step) for step in steps] if index is None else self.elements.load(steps[index])

    def _copy(self, i, stop, n_more: int = 0) -> None:
        """Starts to copy the steps of sweep `i`, if it is before `stop`; `n_more` steps more where the first of all starts."""
        row_plan = self.plan.row_plan
        self.ring.copy(self._first_step(i) + (row_plan.is_joined - n_more), row_plan.unroll + n_more, stop - i)

    def _from_ring(self, steps, index=None):
        return self.ring.load(steps[0], self.plan.row_plan.unroll) if index is None else self.ring.load(steps[index], 1)[0]


def _from_registers(loaded, index=None):
    return loaded if index is None else loaded[index]


class SliceStates:
    """Maxima, and sums of weights, of the slices of a row, in shared memory, of each warp.

    A carry has at each place of a step the maximum `m`, and the sum `d` of the weights if `ref` has room for it; or, if the
    row's `m` is known, a sum for each part that `ref` has room for. Sums depend on the order of their addends, so every slice
    has its own. A maximum does not: without sums a block has one.
    """

    def __init__(self, row: SweptRow, ref, scale, m: Any = None):
        self.row, self.ref = row, ref  # in shared memory, of `SweepPlan.scratch`
        self.scale, self.m = scale, m  # None for a scale of 1, and for a maximum that is not known
        self.parts = ref.shape[0] // (1 + (row.plan.blocks > 1))  # of a carry
        self.has_sums = m is not None or self.parts > 1

    def clear(self) -> None:
        """Sets all to the state of nothing."""
        for part in range(self.parts):
            sync.fill_shared(self.ref.at[part], -math.inf if self._is_maximum(part) else 0.0, self.ref.shape[1])

    def _is_maximum(self, part: int) -> bool:
        return self.m is None and part == 0

    def start(self):
        """Returns the carry of nothing."""
        return tuple([self.row.tile.accumulator(-jnp.inf if self._is_maximum(part) else 0) for part in range(self.parts)])

    def push(self, carry, scores, top):
        """Adds scores, whose maximum at each place is `top`, to a carry; `m` alone needs nothing else."""
        if not self.has_sums:
            return (jnp.maximum(carry[0], top),)
        scale = None if self.scale is None else self.row.tile.along(self.scale)
        state = online.push(State(*carry), scores, axis=(), scale=scale, top=top)
        return state.m, state.d

    def end(self, is_last, number, carry):
        """Stores what belongs to slice `number` if this is its last sweep, and starts anew."""
        pl.when(is_last)(lambda: self.store(number, carry))
        return tuple(choose(is_last, new, old) for new, old in zip(self.start(), carry, strict=True))

    def store(self, number, carry) -> None:
        """Stores a carry as that of slice `number`."""
        tile = self.row.tile
        if self.m is not None:
            parts = [tile.of_places(total) for total in carry]
        elif not self.has_sums:
            parts = [jnp.max(carry[0], 1)]
        else:
            m, d = carry
            parts = tile.of_warp(m, d, self.scale)[:2]
        place = number * self.row.plan.row_plan.warps + tile.memory.warpgroup() * WARPS
        for part, values in enumerate(parts):
            compat.store(self.ref.at[part].at[pl.ds(place, WARPS)], values)

    def send(self) -> None:
        """Copies the states of this block to all blocks of the cluster, which have them after a barrier of it."""
        count = self.ref.shape[1] // self.row.plan.blocks
        for part in range(self.parts):
            source, target = self.ref.at[part], self.ref.at[self.parts + part]
            sync.copy_to_cluster(source, target, self.row.memory.rank * count, count, self.row.plan.blocks)

    def merge(self) -> list[jax.Array]:
        """Returns the parts of the row: `m`, 0 if it is infinite, and sums."""
        sync.block_barrier()
        layout, first = replicated(self.ref.shape[1]), self.ref.shape[0] - self.parts
        parts = [plgpu.load(self.ref.at[first + part], layout=layout, optimized=False) for part in range(self.parts)]
        if self.m is not None:
            return [jnp.sum(total) for total in parts]
        if not self.has_sums:
            return [online.shift(jnp.max(parts[0]))]
        state = self.row.tile.merge_along(State(*parts), self.scale)
        return [online.shift(state.m), state.d]


def choose(condition, a, b):
    """Returns one of two arrays, by a scalar."""
    return jnp.where(lax.broadcast_in_dim(condition, a.shape, ()), a, b)
