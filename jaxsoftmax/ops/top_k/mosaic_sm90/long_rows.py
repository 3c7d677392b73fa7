"""The k largest entries of rows of any length on Hopper, their softmax weights, and the gradient of these.

1. A block, or the blocks of a cluster, go through a row in sweeps of a few thousand elements. What is above a bound goes to a
   list in shared memory (see `candidates`). The first bound comes from the first sweep: the k-th largest of the maxima of its
   threads.
2. Whenever the list is long it is cut to the k largest entries, and the bound raised.
3. The blocks of a cluster send their lists to the first one, which cuts them to one list, sorts and stores it.

If softmax needs the state `(m, d)` of the row, the scores are pushed to it while they are at hand. XLA makes weights of the k
values, in 1.2 us: with a division (`div.rn`) the kernel has a call in it, and ptxas then no longer knows that warps are
converged (512 rows of 128256 took 87 us in place of 71).

Each element is read once, in 4 bytes or 2, and only the k entries are written.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 4, for softmax and top-k in one pass.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu.emit import before_row, constant
from jaxsoftmax.ops.softmax import mosaic_sm90 as softmax
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP, LOGSUMEXP_VJP
from jaxsoftmax.ops.top_k import xla
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import Candidates, StepColumns
from jaxsoftmax.ops.top_k.mosaic_sm90.keys import kernel_dtype
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import (
    SliceStates,
    Sweep,
    SweepPlan,
    SweptRow,
    arrive,
    await_cluster,
    choose,
    row_plan_of,
    scratch_bytes,
    swept,
)
from jaxsoftmax.ops.top_k.problem import TopKProblem


@dataclass(frozen=True)
class LongRowsPlan:
    """Runs `top_k` or `softmax_top_k` of rows of any length."""

    problem: TopKProblem
    sweeps: SweepPlan
    is_ahead: bool  # True if the next sweep is loaded to registers before a sweep is visited
    state: Plan | None = None  # of softmax's kernel that finds the state; None if this kernel does or nothing needs it
    remark = None

    def describe(self) -> str:
        separate = "" if self.state is None else "; the state by a kernel of its own"
        return f"{self.sweeps.describe()}, a list of up to {self.limit} entries{separate}"

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Dtype in which `x` is loaded."""
        return kernel_dtype(self.problem.operands["x"].dtype)

    @functools.cached_property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    @functools.cached_property
    def score_dtype(self) -> np.dtype:
        """Dtype in which scores are compared if a scale turns or a mask hides them: float32, or an integer dtype of 32 bits."""
        return np.dtype(np.float32) if self.is_float else self.dtype

    @functools.cached_property
    def fill(self) -> float:
        """A number that counts as less than all scores."""
        return -jnp.inf if self.is_float else jnp.iinfo(self.problem.dtype).min

    @functools.cached_property
    def limit(self) -> int:
        """Length from which on a list is cut."""
        return max(256, 2 * self.problem.k)

    @functools.cached_property
    def parts(self) -> int:
        """Parts of the state that this kernel finds."""
        return 2 if self.problem.needs_state and self.state is None else 0

    @functools.cached_property
    def scratch(self) -> list[Any]:
        """Types of the arrays in shared memory."""
        lists = Candidates.scratch(self.problem.k, self.limit, self.sweeps)
        return [*lists, *self.sweeps.scratch(self.dtype, self.parts)]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block."""
        return scratch_bytes(self.scratch)

    def run(self, **operands: Any) -> list[jax.Array]:
        """Returns the values or weights, the indices, and the state if it is asked for."""
        problem, x = self.problem, operands["x"].astype(self.dtype)
        where, scale = operands.get("where"), operands.get("scale")
        results = self._find(x, where, scale)
        if self.state is not None:
            results += self.state.run(x=x, where=where, scale=scale)[1:]
        if problem.operation.name == "softmax_top_k":
            results = xla.weighed(results, where, scale, problem.params["normalize"], problem.dtype)
        return results[: 2 + 2 * problem.params["return_state"]]

    def _find(self, x, where, scale) -> list[jax.Array]:
        """Runs the kernel: the values, indices, and the state if this kernel finds it."""
        problem, rows, cols, k = self.problem, self.problem.rows, self.problem.cols, self.problem.k
        of_rows = {"scale": scale, "where": where} if where is None or where.shape[-1] == 1 else {"scale": scale}
        operands = {
            name: jnp.broadcast_to(array, (*problem.batch, 1)).reshape(rows).astype(jnp.float32)
            for name, array in of_rows.items()
            if array is not None
        }
        source = None  # how a mask that repeats is indexed
        if where is not None and "where" not in operands:
            operands["where"] = where.reshape(-1, cols)
            source = None if where.shape == x.shape else RowProblem(x.shape, (x.ndim - 1,)).indexed(where.shape)
        # Values are those of `x`: weights are computed from them.
        dtype = x.dtype if problem.operation.name == "softmax_top_k" else problem.dtype
        results = [jax.ShapeDtypeStruct((rows * k,), dtype if self.is_float else self.dtype)]
        results += [jax.ShapeDtypeStruct((rows * k,), jnp.int32)]
        results += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * self.parts
        kernel = functools.partial(_kernel, self, tuple(operands), source)
        launch = swept("top_k_mosaic", kernel, self.sweeps, results, self.scratch)
        values, indices, *state = [a.reshape(*problem.batch, -1) for a in launch(x.reshape(rows, cols), *operands.values())]
        return [values.astype(dtype), indices, *state]


def plan_long_rows(problem: TopKProblem, target: Target) -> LongRowsPlan | Refusal:
    """Plans `top_k` or `softmax_top_k` of rows of any length."""
    state, has_state = None, problem.needs_state
    if has_state and "where" in problem.operands:  # softmax's kernel skips what is masked
        state, has_state = plan_state(problem, target, _types_of_scores(problem)), False
        if isinstance(state, Refusal):
            return state
    sweeps = plan_sweeps(problem.rows, problem.cols, kernel_dtype(problem.operands["x"].dtype).itemsize, target, has_state)
    # 512 rows are four blocks on each of 128 multiprocessors, with up to 64 registers a thread, or 128 if blocks have 128
    # threads. To load ahead takes more, unless there are so few blocks.
    is_ahead = has_state or problem.rows * sweeps.blocks <= target.multiprocessors
    return LongRowsPlan(problem, sweeps, is_ahead, state)


def plan_sweeps(rows: int, cols: int, itemsize: int, target: Target, has_state: bool) -> SweepPlan:
    """Plans sweeps of 2048 or 4096 elements, by fewer threads if rows are short, or if a thread has a state for each place.

    With a state a thread has few places, and bits depend on the order of a row's elements: if rows start inside of a cache
    line, threads join vectors of two steps. Such rows are not copied to shared memory, which would then hold three blocks, not
    four.
    """
    vector, threads, unroll = 16 // itemsize, 256, itemsize
    if has_state:
        vector, threads, unroll = 4, 128, 16 // itemsize
    elif cols <= 8192:
        threads, unroll = 128, 4
    sweeps = SweepPlan(row_plan_of(cols, vector, threads, unroll, is_stored=not has_state), rows)
    return (sweeps if has_state else sweeps.copying(itemsize)).distributed(target, has_state)


# Softmax's kernels over whole rows, for the state and for gradients.


def plan_state(problem: TopKProblem, target: Target, types: dict[str, Any]) -> Plan | Refusal:
    """Plans the state of rows of these types of `x`, `where` and `scale`. The speed of softmax's kernel does not decide."""
    state = _plan_softmax(LOGSUMEXP, problem, target, types, dtype=jnp.float32, return_state=True)
    return state.plan if isinstance(state, Refusal) and state.plan is not None else state


def _types_of_scores(problem: TopKProblem) -> dict[str, Any]:
    return {name: problem.operands[name] for name in ("x", "where", "scale") if name in problem.operands}


def _plan_softmax(
    operation: Operation, problem: TopKProblem, target: Target, types: dict[str, Any], **params: Any
) -> Plan | Refusal:
    """Plans an operation of the softmax family on scores of these types; operands of rows, such as `m`, do not matter."""
    params["axes"] = (types["x"].ndim - 1,)
    dtypes = {name: dtype for name, dtype in problem.dtypes.items() if name in types}
    return softmax.plan(operation.problem(operation, types, params, dtypes, problem.fused & set(types)), target)


# The kernel.


def _kernel(plan: LongRowsPlan, names, source, x_ref, *refs) -> None:
    """Finds the k largest entries of a row, or of a block's slices of it."""
    operands, refs = dict(zip(names, refs, strict=False)), refs[len(names) :]
    (values, indices, *state_refs), refs = refs[: 2 + plan.parts], refs[2 + plan.parts :]
    entries, head, gathered, *scratch = refs
    row = SweptRow(plan.sweeps, scratch)
    search = _Search(plan, row, x_ref, operands, source)
    states = None
    if plan.parts:
        states = SliceStates(row, scratch[-1], None if search.sign is None else jnp.abs(search.sign))
        states.clear()
    arrive(plan.sweeps)
    candidates = search.list_in(entries, head)
    candidates.clear()
    row.sweep(x_ref, search.elements, functools.partial(search.visit, candidates, states), states, plan.is_ahead)
    candidates.cut()
    if plan.sweeps.blocks > 1:  # the first block gets what all blocks have
        await_cluster(plan.sweeps)
        if states is not None:
            states.send()
        candidates.send(gathered, row.memory.rank)

    @pl.when(row.memory.rank == 0)
    def _():
        best = candidates
        if plan.sweeps.blocks > 1:
            best = search.list_in(gathered, head)
            best.cut_to(plan.sweeps.blocks * plan.problem.k)
        back_to_values = None if search.sign is None else jnp.where(search.sign < 0, -1.0, 1.0)
        best.store(row.memory.row, (values, indices), back_to_values)
        if states is not None:
            for ref, value in zip(state_refs, states.merge(), strict=True):
                row.memory.store_row(ref, value)


class _Search:
    """The search of a block in its row, or in its slices of one."""

    def __init__(self, plan: LongRowsPlan, row: SweptRow, x_ref, operands, source):
        self.plan, self.row, self.is_plain = plan, row, plan.problem.is_plain
        self.elements = row.memory.read(x_ref, plan.fill, plan.score_dtype)
        self.sign = operands["scale"][row.memory.row] if "scale" in operands else None  # a number with the sign of the scale
        self.seen = _mask(row.tile, operands["where"], source) if "where" in operands else None

    def list_in(self, entries, head) -> Candidates:
        """Returns a list in shared memory."""
        plan = self.plan
        memory_dtype = plan.dtype if self.is_plain else plan.score_dtype
        return Candidates(entries, head, plan.problem.k, plan.limit, plan.sweeps.row_plan, plan.score_dtype, memory_dtype)

    def visit(self, candidates: Candidates, states: SliceStates | None, sweep: Sweep, carry):
        """Offers the elements of a sweep to the list, and pushes them to the state if it is asked for."""
        elements = self.elements
        pl.when(candidates.is_long(sweep.number) != 0)(candidates.cut)
        loaded = sweep.load()
        arrays = loaded if self.is_plain else self._directed(sweep, loaded)
        scalars = [self.row.memory.row, *map(jnp.int32, sweep.steps)]
        columns = StepColumns(functools.partial(_first_columns, self.row), scalars, sweep.is_whole)
        if (sweep.is_whole or isinstance(sweep.number, int)) and candidates.parts_of(len(arrays)):
            pl.when(jnp.equal(sweep.number, 0))(lambda: candidates.bound_from(arrays))
        in_words = self.is_plain and elements.in_words
        top = elements.maximum(arrays) if in_words else functools.reduce(jnp.maximum, arrays)
        candidates.offer(sweep.number, arrays, top, columns)
        if states is None:
            return carry
        scores = list(map(elements.converted, loaded)) if self.is_plain else arrays
        return states.push(carry, scores, top.astype(jnp.float32))

    def _directed(self, sweep: Sweep, loaded):
        """Returns what is put in order: `x` turned round if the scale is negative, without what is masked."""
        arrays = list(map(self.elements.converted, loaded))
        if self.sign is not None:
            arrays = [choose(self.sign < 0, -a, a) for a in arrays]
        is_turned_beyond = self.sign is not None and not sweep.is_whole  # -inf beyond the end may be +inf
        for is_there in filter(None, (self.seen, self.row.memory.inside() if is_turned_beyond else None)):
            arrays = [softmax.select(is_there(step), a, self.plan.fill) for step, a in zip(sweep.steps, arrays, strict=True)]
        return arrays


def _mask(tile, ref, source):
    """Returns the mask as a function of a step: of each element, or one number for each row."""
    if ref.ndim > 1:
        return tile.memory.load_mask(ref, source)
    seen = tile.along(tile.memory.load_row(ref)) != 0
    return lambda step: seen


def _first_columns(swept_row: SweptRow, row, *steps):
    """Makes what `StepColumns.make` does, as MLIR values. A column is negative before the row."""
    row_plan, firsts = swept_row.plan.row_plan, []
    for step in steps:
        (((first, _), *_),) = swept_row.memory.places((row, 0), step)
        firsts.append(first)
    return firsts, before_row(firsts[0], steps[0], row_plan.step_cols) if row_plan.is_joined else constant(0)


# The gradient.


@dataclass(frozen=True)
class LongGradientPlan:
    """Runs `softmax_top_k_vjp` of rows that are normalized as a whole: the gradient at the indices is put in its place last."""

    problem: TopKProblem
    whole: Plan  # of softmax's kernel that computes the part of the gradient that all elements of a row have
    remark = None

    def describe(self) -> str:
        how = self.whole.describe()
        return f"whole rows by the kernel of logsumexp_vjp, the entries by XLA's scatter{how and f'; {how}'}"

    def run(self, **operands: Any) -> list[jax.Array]:
        """Returns the gradient."""
        params = self.problem.params
        indices, c, b, x, m, d, weights, where, scale = map(operands.get, self.problem.operation.by_name)
        at_indices, common = xla.parts_of_vjp(indices, c, b, x, m, d, weights, where, scale, params["normalize"])
        (total,) = jax.tree.leaves(self.whole.run(x=x, m=m, d=d, t=common, where=where, scale=scale))
        if at_indices is None:
            return [total]
        at_indices = at_indices + xla.common_at_indices(indices, common, x, m, d, where, scale)
        if params["scale_tangent"] and scale is not None:
            at_indices = at_indices * scale.astype(at_indices.dtype)
        return [xla.scattered(lax.scatter, total, indices, at_indices)]


def plan_long_gradient(problem: TopKProblem, target: Target) -> LongGradientPlan | Refusal:
    """Plans `softmax_top_k_vjp` of rows that are normalized as a whole."""
    params = {"dtype": problem.dtype, "scale_tangent": problem.params["scale_tangent"]}
    whole = _plan_softmax(LOGSUMEXP_VJP, problem, target, _types_of_scores(problem), **params)
    if not isinstance(whole, Refusal):
        return LongGradientPlan(problem, whole)
    return whole if whole.plan is None else Refusal(whole.reason, LongGradientPlan(problem, whole.plan))
