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
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.problem import FACTORS
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import sync
from jaxsoftmax._gpu.emit import SCALAR, WARP, address_of, emit, integer, utils
from jaxsoftmax._gpu.fused import fused
from jaxsoftmax.ops.top_k import noise
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import start_of
from jaxsoftmax.ops.top_k.mosaic_sm90.drawing import Drawing, Winner, along, before_filter, is_before, number_of_row, weights
from jaxsoftmax.ops.top_k.mosaic_sm90.long_rows import plan_state
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import (
    SliceStates,
    Sweep,
    SweepPlan,
    SweptRow,
    arrive,
    await_cluster,
    row_plan_of,
    scratch_bytes,
    swept,
)
from jaxsoftmax.ops.top_k.problem import TopKProblem

# Operands of one number for each row, or for all.
_OF_ROWS = ("row", "key0", "key1", "inverse", "noise", "top_p", "min_p", *FACTORS)
_MAX_REDRAW_BLOCKS = 4  # that share a row which is drawn again: few rows are
_REDRAW_BLOCKS_AT_A_TIME = 2  # of a multiprocessor, as threads of that kernel have up to 255 registers
_WINDOW = 16  # rows of a thread that looks which are rejected


@dataclass(frozen=True)
class RedrawPlan:
    """Draws rejected rows again, each until what is drawn is kept."""

    sweeps: SweepPlan
    clusters: int  # which share the rejected rows

    def scratch(self, dtype: Any) -> list[Any]:
        """Returns the types of the arrays in shared memory, for rows of this dtype."""
        counts = plgpu.SMEM((self.sweeps.row_plan.threads // WARP + 1,), jnp.int32)
        return [Winner.scratch(self.sweeps.blocks), counts, *self.sweeps.scratch(dtype, 2)]

    def run(self, x, rejected, index, of_rows) -> jax.Array:
        """Returns the indices, drawn again where `rejected` is not 0."""
        names = tuple(of_rows)
        results = [jax.ShapeDtypeStruct((self.sweeps.rows,), jnp.int32)]
        kernel = functools.partial(_redraw, self, names)
        launch = swept("categorical_again_mosaic", kernel, self.sweeps, results, self.scratch(x.dtype), self.clusters)
        (result,) = launch(x, rejected, index, *of_rows.values())
        return result


@dataclass(frozen=True)
class SamplingPlan:
    """Runs `categorical`."""

    problem: TopKProblem
    draw: SweepPlan  # of the kernel that draws
    parts: int  # of the state that this kernel finds: none, the maximum, or both
    check: SweepPlan | None = None  # of the kernel that looks at what was drawn, with `top_p`
    redraw: RedrawPlan | None = None  # with `top_p`
    state: Plan | None = None  # of softmax's kernel that finds the state first, for `min_p` alone
    remark = None

    def describe(self) -> str:
        steps = [self.draw.describe()]
        steps += ["samples are checked, and drawn again if rejected"] if self.check is not None else []
        steps += ["maxima are found first"] if self.state is not None else []
        return "; ".join(steps) + (", times a factor" if self.problem.is_product else "")

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
    state = plan_state(problem, target, types)
    if isinstance(state, Refusal):
        return state
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


# The kernel that draws.


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
            sweep = drawing.multiplied(sweep)
            loaded = sweep.load()
            tops = drawing.tops(loaded)
            if states is not None:
                carry = states.push(carry, list(map(drawing.scores.converted, loaded)), tops[0])
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


# The kernel that looks at what was drawn.


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


class _Entry(NamedTuple):
    """A score of a row and its column, both scalars."""

    value: Any
    column: Any


class Inspection:
    """Looks at an entry of a row whose maximum is known: whether the filters reject it, and the sum of the row's weights.

    It adds up the weights of all elements, and of those that come before the entry. Nothing is rescaled, and columns are
    compared only in the sweep that has the entry.
    """

    def __init__(self, row: SweptRow, x_ref, of_row, ref):
        self.row, self.x_ref = row, x_ref
        of_row = {name: number_of_row(ref, row.memory.row) for name, ref in of_row.items()}
        self.top_p, self.min_p = of_row["top_p"], of_row.get("min_p")
        self.elements = row.memory.read(x_ref, -jnp.inf, jnp.dtype(jnp.float32))
        row_plan = row.plan.row_plan
        self.step_cols, self.layout, self.place = row_plan.step_cols, row_plan.layout, row.tile.column(0)
        self.states = SliceStates(row, ref, of_row.get("inverse"), of_row["m"])

    def clear(self) -> None:
        """Sets the sums to 0."""
        sync.block_barrier()
        self.states.clear()
        sync.block_barrier()

    def entry(self, column) -> _Entry:
        """Loads the entry in this column."""
        return _Entry(self.x_ref[self.row.memory.row, column].astype(jnp.float32), column)

    def visit(self, entry: _Entry, sweep: Sweep, carry):
        """Adds the weights of a sweep's elements to the sums of all elements, and of those that come before the entry."""
        steps, step_cols = sweep.steps, self.step_cols
        of_weights = [self.states.m, *([] if self.states.scale is None else [self.states.scale])]

        def added(test, operands, carry):
            for index in range(len(steps)):
                carry = fused(_added, test, [*carry, sweep.load(index), *operands(index), *of_weights], self.layout)
            return carry

        def by_column(carry):
            def operands(index):
                return self.place, jnp.int32(steps[index] * step_cols), entry.value, entry.column

            return added((_is_before_at, 4), operands, carry)

        if not sweep.is_whole:
            return by_column(carry)
        # Almost all whole sweeps, whose elements are in order, lie on one side of the entry.
        first, end = steps[0] * step_cols, (steps[-1] + 1) * step_cols
        by_score = functools.partial(added, (_is_before_beside, 2), lambda index: (entry.value, entry.column <= first))
        return lax.cond(jnp.logical_and(first < entry.column, entry.column < end), by_column, by_score, carry)

    def result(self, entry: _Entry) -> tuple[jax.Array, jax.Array]:
        """Returns 1 if the entry is rejected, else 0, and the sum of weights, in all blocks of the cluster."""
        if self.row.plan.blocks > 1:
            self.states.send()
            sync.cluster_barrier()
        d, before = self.states.merge()
        is_less = jnp.logical_and(self.top_p < 1, before > 0)
        rejected = jnp.logical_and(is_less, before >= self.top_p * d)
        if self.min_p is not None:
            weight = online.weights(entry.value, self.states.m, axis=(), scale=self.states.scale)
            rejected = jnp.logical_or(rejected, weight < jnp.minimum(self.min_p, 1))
        rejected = jnp.logical_and(rejected, d > 0)  # if nothing is to be seen, nothing is better
        return rejected.astype(jnp.int32), d


def _is_before_at(x, place, first, value, column):
    """Tells the same as `is_before`, for the step that begins with the column `first`."""
    return is_before(x, place + along(first, x), value, column)


def _is_before_beside(x, value, are_higher):
    """Tells the same as `is_before` for columns that are all higher than the entry's if `are_higher`, a scalar, else all lower.

    If the entry is -inf, elements of -inf at lower columns are not counted: they weigh nothing.
    """
    value, are_higher = along(value, x), along(are_higher, x)
    # At lower columns equal elements come before the entry, too: all that exceed the next lower number.
    bits = lax.bitcast_convert_type(value, jnp.int32)
    next_bits = jnp.where(value == 0, jnp.int32(-(2**31) + 1), bits + jnp.where(value > 0, -1, 1))
    return x > jnp.where(are_higher, value, lax.bitcast_convert_type(next_bits, jnp.float32))


def _added(test, count: int, total, before, x, *numbers):
    """Adds the weights of a step to the sums of all elements, and of those before an entry.

    Elements are before it for which `test(x, *numbers)` holds, of the first `count` numbers.
    """
    x = x.astype(jnp.float32)
    weight = weights(x, *numbers[count:])
    counted = jnp.where(test(x, *numbers[:count]), weight, 0)
    return total + weight, before + counted


# The kernel that draws again.


def _redraw(plan: RedrawPlan, names, x_ref, rejected, index, *refs) -> None:
    """Copies the indices that are kept, and takes every `clusters`-th rejected row to draw it again."""
    sweeps, of_row = plan.sweeps, dict(zip(names, refs, strict=False))
    result, best, counts, *scratch = refs[len(names) :]
    threads, blocks, clusters = sweeps.row_plan.threads, sweeps.blocks, plan.clusters
    arrive(sweeps)
    cluster = lax.axis_index("block")
    rank = lax.axis_index("rank") if blocks > 1 else jnp.int32(0)
    first = (cluster * blocks + rank) * threads
    _copy_kept(rejected, index, result, sweeps.rows, first, clusters * blocks * threads)
    await_cluster(sweeps)

    def redraw(which):
        row = SweptRow(sweeps, scratch, which)
        column = _draw_until_kept(row, x_ref, index, of_row, (best, scratch[-1]))
        pl.when(rank == 0)(lambda: row.memory.store_row(result, column))

    def take(state):
        """Takes the rejected row of this number in a window of rows, or goes to the next window."""
        number, window = state
        which = _rejected_of_window(rejected, counts, sweeps, window, number)
        is_there = which >= 0
        pl.when(is_there)(lambda: redraw(which))
        return number + jnp.where(is_there, clusters, which + 1), window + jnp.where(is_there, 0, _WINDOW * threads)

    lax.while_loop(lambda state: state[1] < sweeps.rows, take, (cluster, jnp.int32(0)))


def _draw_until_kept(row: SweptRow, x_ref, index, of_row, scratch) -> jax.Array:
    """Draws among what comes before the row's entry in `index`, which was rejected, until the filters keep what is drawn."""
    best, sums = scratch
    drawing, inspection = Drawing(row, x_ref, of_row, best), Inspection(row, x_ref, of_row, sums)

    def draw(state):
        last = inspection.entry(state[1])
        kept = before_filter(last.value, last.column, drawing.min_p_filter() if "min_p" in of_row else None)

        def visit(sweep, carry):
            drawing.draw(sweep, drawing.tops(sweep.load()), kept)
            return carry

        drawing.winner.clear()
        inspection.clear()
        row.sweep(x_ref, drawing.elements, visit, is_ahead=False)
        column = drawing.column()
        entry = inspection.entry(column)
        row.sweep(x_ref, inspection.elements, functools.partial(inspection.visit, entry), inspection.states)
        return inspection.result(entry)[0], column

    return lax.while_loop(lambda state: state[0] != 0, draw, (jnp.int32(1), index[row.memory.row]))[1]


def _copy_kept(rejected, index, result, rows: int, first, step: int) -> None:
    """Stores the indices of rows that are not rejected. A thread has row `first` plus its number, and every `step` rows on."""

    def copy(rejected, index, result, first):
        first = arith.addi(first, utils.thread_idx())
        asm = (
            "{ .reg .pred is; .reg .b32 row, word; .reg .b64 at, place; mov.b32 row, $0;"
            f" next: setp.ge.u32 is, row, {rows}; @is bra end; mul.wide.u32 place, row, 4; add.u64 at, place, $1;"
            " ld.global.b32 word, [at]; setp.eq.u32 is, word, 0;"  # not rejected
            " add.u64 at, place, $2; @is ld.global.b32 word, [at];"
            f" add.u64 at, place, $3; @is st.global.b32 [at], word; add.u32 row, row, {step}; bra next;"
            " end: bar.warp.sync 0xffffffff; }"
        )
        places = map(address_of, (rejected, index, result))
        utils.inline_ptx(asm, first, *places, has_side_effects=True)

    emit(copy, (rejected, index, result), [first])


def _rejected_of_window(rejected, counts, sweeps: SweepPlan, first, number) -> jax.Array:
    """Returns the row that is the rejected one of this number, counted from 0, in the window of rows that begins with `first`.

    If the window has only n rejected rows, it is -1 - n. All threads of a block have the result; each looks at `_WINDOW` rows.
    """
    threads = sweeps.row_plan.threads
    warps, width = threads // WARP, min(_WINDOW, -(-sweeps.rows // threads))
    answer = 4 * warps  # place of the result in shared memory, behind the counts of warps
    load = "mul.wide.u32 at, row, 4; add.u64 at, at, $2; ld.global.b32 word, [at]; setp.ne.u32 is, word, 0;"
    # `sum`: the rejected rows of this thread and of the threads before it in the warp.
    scan = "".join(
        f" shfl.sync.up.b32 word|is, sum, {1 << bit}, 0, 0xffffffff; @is add.u32 sum, sum, word;" for bit in range(5)
    )
    # `total`: the rejected rows of all warps; `sum`: with the ones of the warps before this one.
    sums = "".join(
        f" ld.shared.b32 word, [$3+{4 * warp}]; add.u32 total, total, word; setp.gt.u32 is, warp, {warp};"
        " @is add.u32 sum, sum, word;"
        for warp in range(warps)
    )
    asm = (
        "{ .reg .pred is; .reg .b32 first, end, row, count, sum, total, word, warp; .reg .b64 at; shr.u32 warp, $1, 5;"
        # A thread has the rows from `first` to `end`, and counts those that are rejected.
        f" mad.lo.u32 first, $1, {width}, $4; add.u32 end, first, {width}; min.u32 end, end, {sweeps.rows}; mov.b32 row, first;"
        " mov.b32 count, 0; mov.b32 total, 0;"
        f" next: setp.ge.u32 is, row, end; @is bra counted; {load} @is add.u32 count, count, 1; add.u32 row, row, 1;"
        " bra next;"
        f" counted: bar.warp.sync 0xffffffff; mov.b32 sum, count; {scan}"
        # The last lane tells the count of its warp; the first thread sets the result to -1.
        " and.b32 word, $1, 31; setp.eq.u32 is, word, 31;"
        " shl.b32 word, warp, 2; add.u32 word, word, $3; @is st.shared.b32 [word], sum; setp.eq.u32 is, $1, 0;"
        f" @is st.shared.b32 [$3+{answer}], -1; bar.sync 0; {sums}"
        # The number of the row among those of this thread; the thread that has it looks it up.
        " sub.u32 sum, sum, count; sub.u32 sum, $5, sum;"
        " setp.ge.u32 is, sum, count; @is bra done; mov.b32 row, first;"
        f" other: {load} @!is bra further; setp.eq.u32 is, sum, 0; @is bra found; sub.u32 sum, sum, 1;"
        f" further: add.u32 row, row, 1; bra other; found: st.shared.b32 [$3+{answer}], row;"
        # If no thread has it, the result is -1 less the number of all rejected rows.
        f" done: bar.warp.sync 0xffffffff; bar.sync 0; ld.shared.b32 $0, [$3+{answer}]; setp.lt.s32 is, $0, 0;"
        " @is sub.u32 $0, $0, total; bar.sync 0; }"
    )

    def find(rejected, counts, first, number):
        operands = utils.thread_idx(), address_of(rejected), start_of(counts), first, number
        return [utils.inline_ptx(asm, *operands, result_types=integer(32), has_side_effects=True, convergent=True)]

    return emit(find, (rejected, counts), [first, number], results=SCALAR)
