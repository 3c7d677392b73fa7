"""Samples from rows on Hopper: a kernel that draws, and with filters one that looks at what was drawn, and one that redraws.

1. Elements are compared with the best so far, which is in shared memory. Noise is bounded by the upper half of its random bits,
   which come from a counter (see `noise`), on chip: eight halves from one evaluation.
2. With `top_p` the maximum of the row is found on the way. A second kernel reads the row again, adds up the weights of all
   elements, and those of what comes before the drawn one in the order of `top_k`. If these are less than the share, the drawn
   entry is kept: it was the best among more entries than are kept. With `top_p=0.9` nine rows of ten are done after two reads.
3. Else a third kernel draws the row again, among what comes before the drawn entry alone, until what is drawn is kept. That is
   exact: what comes before a kept entry is kept, and a kept entry that is best among more is best among the kept ones.

`min_p` alone is a threshold once the maximum is known, which softmax's kernel finds first. A pass that looks at an entry and
draws the next one at once made the third kernel slower: 41 to 71 us in place of 24 to 36.

Each kernel reads an element once, in 4 bytes or 2, and an index is written for each row.
"""

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP
from jaxsoftmax.ops.top_k import noise
from jaxsoftmax.ops.top_k.mosaic_sm90.drawing import Drawing
from jaxsoftmax.ops.top_k.mosaic_sm90.redrawing import Inspection, RedrawPlan
from jaxsoftmax.ops.top_k.mosaic_sm90.softmax_plans import plan_softmax
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import (
    SliceStates,
    SweepPlan,
    SweptRow,
    arrive,
    await_cluster,
    row_plan_of,
    scratch_bytes,
    swept,
)
from jaxsoftmax.ops.top_k.mosaic_sm90.winner import Winner
from jaxsoftmax.ops.top_k.problem import TopKProblem

_OF_ROWS = (
    "row",
    "key0",
    "key1",
    "inverse",
    "noise",
    "top_p",
    "min_p",
)  # operands with one number for each row, or one for all
_MAX_REDRAW_BLOCKS = 4  # that share a row which is drawn again: few rows are
_REDRAW_BLOCKS_AT_A_TIME = 2  # of a multiprocessor, as threads of that kernel have up to 255 registers


@dataclass(frozen=True)
class SamplingPlan:
    """Runs `categorical`.

    Attributes:
      problem: the problem.
      draw: how the kernel that draws reads rows.
      parts: parts of the state that this kernel finds: none, the maximum, or both.
      check: how the kernel reads rows that looks at what was drawn; None without `top_p`.
      redraw: plan of the kernel that draws again; None without `top_p`.
      state: plan of softmax's kernel that finds the state first, for `min_p` alone, or None.
    """

    problem: TopKProblem
    draw: SweepPlan
    parts: int
    check: SweepPlan | None = None
    redraw: RedrawPlan | None = None
    state: Plan | None = None
    remark = None

    def describe(self) -> str:
        steps = [self.draw.describe()]
        steps += ["samples are checked, and drawn again if rejected"] if self.check is not None else []
        steps += ["maxima are found first"] if self.state is not None else []
        return "; ".join(steps)

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block, of the kernel that takes most."""
        dtype = self.problem.operands["x"].dtype
        scratches = [[Winner.scratch(self.draw.blocks), *self.draw.scratch(dtype, self.parts)]]
        scratches += [[*self.check.scratch(dtype, 2)]] if self.check is not None else []
        scratches += [self.redraw.scratch(dtype)] if self.redraw is not None else []
        return max(map(scratch_bytes, scratches))

    def run(self, **operands: Any) -> list[jax.Array]:
        """Returns the indices of samples, and the state `(m, d)` of `inverse * x` if it is asked for."""
        problem, shape = self.problem, (*self.problem.batch, 1)
        x = jnp.broadcast_to(operands["x"], (*problem.batch, problem.cols)).reshape(-1, problem.cols)
        of_rows = {
            name: (array if array.size == 1 else jnp.broadcast_to(array, shape)).reshape(-1)
            for name in _OF_ROWS
            if (array := operands.get(name)) is not None
        }
        return [a.reshape(shape) for a in self._sample(x, of_rows)]

    def _sample(self, x, of_rows) -> list[jax.Array]:
        """Runs the kernels, on `x` of `[rows, cols]` and operands of `[rows]`, or of `[1]` for all."""
        if self.check is not None and self.redraw is not None:
            index, m = _draw(self, x, {name: array for name, array in of_rows.items() if name not in ("top_p", "min_p")})
            of_rows = of_rows | {"m": m}
            rejected, d = _check(self.check, x, index, of_rows)
            index = self.redraw.run(x, rejected, index, of_rows)
            return [index, m, d] if self.problem.needs_state else [index]
        state = []
        if self.state is not None:
            inverse = jnp.broadcast_to(of_rows["inverse"], x.shape[:1])[:, None] if "inverse" in of_rows else None
            state = [part[:, 0] for part in self.state.run(x=x, scale=inverse)[1:]]
            of_rows = of_rows | {"m": state[0]}
        results = _draw(self, x, of_rows)
        return results + state if self.problem.needs_state else results


def plan_sampling(problem: TopKProblem, target: Target) -> SamplingPlan | Refusal:
    """Plans `categorical`."""
    rows, cols, x = problem.rows, problem.cols, problem.operands["x"]
    if "top_p" in problem.operands:
        check, redraw = plan_check(rows, cols, x.dtype.itemsize, target), plan_redraw(rows, cols, x.dtype.itemsize, target)
        return SamplingPlan(problem, plan_draw(rows, cols, 1, target), 1, check, redraw)
    if "min_p" not in problem.operands:
        parts = 2 if problem.needs_state else 0
        return SamplingPlan(problem, plan_draw(rows, cols, parts, target), parts)
    types = {"x": jax.ShapeDtypeStruct((rows, cols), x.dtype)}
    if "inverse" in problem.operands:
        types["scale"] = jax.ShapeDtypeStruct((rows, 1), problem.operands["inverse"].dtype)
    state = plan_softmax(LOGSUMEXP, problem, target, types, axes=(1,), dtype=jnp.float32, return_state=True)
    if isinstance(state, Refusal):
        if state.plan is None:
            return state
        state = state.plan  # its speed does not decide
    return SamplingPlan(problem, plan_draw(rows, cols, 0, target), 0, state=state)


def _plan_noise(rows: int, cols: int, vector: int) -> SweepPlan:
    """Plans sweeps whose steps have `noise.STRIDE` elements, so that a thread has the eight that share random words.

    If rows start inside of a cache line, threads join vectors of two steps.
    """
    return SweepPlan(row_plan_of(cols, vector, noise.STRIDE // vector, noise.HALVES), rows)


def plan_draw(rows: int, cols: int, parts: int, target: Target) -> SweepPlan:
    """Plans the kernel that draws and finds `parts` parts of a state.

    A thread has two columns of a step, so that 32 warps share a multiprocessor, and all of 512 rows run at a time. It has four
    if it would need more than 64 registers with two.
    """
    plan = _plan_noise(rows, cols, 2)
    if parts > 1 or (parts and plan.row_plan.is_joined):
        plan = _plan_noise(rows, cols, 4)
    return plan.distributed(target, has_states=parts > 1)


def plan_check(rows: int, cols: int, itemsize: int, target: Target) -> SweepPlan:
    """Plans the kernel that looks at what was drawn. A thread has few places, as it has two sums for each."""
    sweeps = SweepPlan(row_plan_of(cols, 4, 128, 16 // itemsize), rows)
    return sweeps.copying(itemsize).distributed(target, has_states=True)


def plan_redraw(rows: int, cols: int, itemsize: int, target: Target) -> RedrawPlan:
    """Plans the kernel that draws again: as many clusters as run at a time share the rejected rows.

    In a try with a cluster of eight blocks for each row, 13 to 16 us went into the clusters that had nothing to do.
    """
    sweeps = _plan_noise(rows, cols, 4).copying(itemsize)
    blocks = sweeps.blocks_for(target, 1, _MAX_REDRAW_BLOCKS)
    clusters = min(rows, _REDRAW_BLOCKS_AT_A_TIME * target.multiprocessors // blocks)
    return RedrawPlan(replace(sweeps, blocks=blocks, slices=_MAX_REDRAW_BLOCKS), clusters)


def _draw(plan: SamplingPlan, x, of_rows) -> list[jax.Array]:
    """Runs the kernel that draws: samples, and with 1 for `parts` the maxima of rows, or with 2 their states `(m, d)`."""
    sweeps, parts = plan.draw, plan.parts

    def kernel(x_ref, *refs):
        of_row, (index, *refs) = dict(zip(of_rows, refs, strict=False)), refs[len(of_rows) :]
        state_refs, (best, *scratch) = refs[:parts], refs[parts:]
        row = SweptRow(sweeps, scratch)
        drawing = Drawing(row, x_ref, of_row, best)
        states = SliceStates(row, scratch[-1], drawing.inverse) if parts else None
        if states is not None:
            states.clear()
        drawing.winner.clear()
        arrive(sweeps)
        await_cluster(sweeps)

        def visit(sweep, carry):
            loaded = sweep.load()
            tops = drawing.tops(loaded)
            if states is not None:
                carry = states.push(carry, list(map(drawing.elements.converted, loaded)), tops[0])
            drawing.draw(sweep, tops, drawing.min_p_filter() if "min_p" in of_rows else None)
            return carry

        row.sweep(x_ref, drawing.elements, visit, states, is_ahead=False)  # random words take long enough
        if states is not None and sweeps.blocks > 1:
            states.send()
        column = drawing.column()

        @pl.when(row.memory.rank == 0)
        def _():
            row.memory.store_row(index, column)
            if states is not None:
                for ref, value in zip(state_refs, states.merge(), strict=True):
                    row.memory.store_row(ref, value)

    results = [jax.ShapeDtypeStruct((sweeps.rows,), dtype) for dtype in (jnp.int32, *[jnp.float32] * parts)]
    scratch = [Winner.scratch(sweeps.blocks), *sweeps.scratch(x.dtype, parts)]
    return swept("categorical_mosaic", kernel, sweeps, results, scratch)(x, *of_rows.values())


def _check(sweeps: SweepPlan, x, index, of_rows) -> list[jax.Array]:
    """Runs the kernel that looks at what was drawn: 1 for a row that is rejected, else 0, and the sums of weights."""
    operands = {name: of_rows[name] for name in ("top_p", "min_p", "inverse", "m") if name in of_rows}

    def kernel(x_ref, index, *refs):
        of_row, (rejected, d_ref, *scratch) = dict(zip(operands, refs, strict=False)), refs[len(operands) :]
        row = SweptRow(sweeps, scratch)
        inspection = Inspection(row, x_ref, of_row, scratch[-1])
        inspection.clear()
        arrive(sweeps)
        await_cluster(sweeps)
        entry = inspection.entry(index[row.memory.row])
        row.sweep(x_ref, inspection.elements, functools.partial(inspection.visit, entry), inspection.states)
        is_rejected, d = inspection.result(entry)

        @pl.when(row.memory.rank == 0)
        def _():
            row.memory.store_row(rejected, is_rejected)
            row.memory.store_row(d_ref, d)

    results = [jax.ShapeDtypeStruct((sweeps.rows,), dtype) for dtype in (jnp.int32, jnp.float32)]
    scratch: Any = sweeps.scratch(x.dtype, 2)
    return swept("categorical_check_mosaic", kernel, sweeps, results, scratch)(x, index, *operands.values())
