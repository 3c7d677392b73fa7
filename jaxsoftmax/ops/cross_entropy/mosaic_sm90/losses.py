"""Cross-entropy of rows of logits on Hopper, for rows up to those that the grid holds.

The kernels are those of softmax (`ops/softmax/mosaic_sm90`), with labels.

1. Forward, the state of each row is computed as for logsumexp, of capped scores if there is a cap. What belongs to a row, the
   label's logit among it, is left to XLA, which computes it together with what reads the loss.
2. Backward, each element gets `(a * p + b * onehot(label) + c) * ds/dx`. Blocks need nothing of each other.
3. If the cotangents are known with the logits, rows are held as for softmax, and the gradient replaces them.

So the logits are read once forward, and read and written once backward, or read and written once in all; a mask is read as
bytes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import fused, rows
from jaxsoftmax._gpu.rows.kernel import Inside, Mask, PerRow, RowKernel, Whole
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.plans_sm90 import plan_rows
from jaxsoftmax._gpu.rows.tile import each
from jaxsoftmax.ops.cross_entropy import xla
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT, CROSS_ENTROPY_VJP
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem
from jaxsoftmax.ops.softmax.mosaic_sm90 import apply_mask, refused_rows, select, weights_of_state
from jaxsoftmax.ops.softmax.profit import slower_rows


@dataclass(frozen=True)
class LossPlan:
    """Runs a problem of cross-entropy by one kernel over rows."""

    problem: CrossEntropyProblem
    row_plan: RowPlan | ColumnPlan  # how rows are distributed over threads
    remark = None

    def describe(self) -> str:
        return self.row_plan.describe()

    def run(self, **operands: jax.Array | None) -> Any:
        arrays = dict.fromkeys(self.problem.operation.by_name) | operands
        return _RUN[self.problem.operation](self, **arrays)


def plan(problem: CrossEntropyProblem, target: Target) -> LossPlan | Refusal:
    """Plans a problem of cross-entropy."""
    if problem.operation not in _RUN:
        return Refusal(f"it has no kernel for {problem.operation.name}", lacks_kernel=True)
    if problem.devices:
        return Refusal("it does not merge over devices")
    dtypes = [problem.operands["x"].dtype]
    if problem.operation is not CROSS_ENTROPY_GRADIENT:
        dtypes.append(jnp.dtype(problem.params["dtype"]))
    if (reason := refused_rows(dtypes, problem.operands.get("where"), problem.rows)) is not None:
        return Refusal(reason)
    row_plan = plan_rows(problem.rows, target)
    if isinstance(row_plan, Refusal):
        return row_plan
    if problem.has_total and row_plan.persistent_blocks:  # blocks tell each other one state of a row, and no sum
        return Refusal(
            f"no kernel computes the sum of the scores, which smoothing needs, for rows of {problem.rows.cols} entries"
        )
    reason = slower_rows(problem, wins_if_wide=False)
    return LossPlan(problem, row_plan) if reason is None else Refusal(reason, LossPlan(problem, row_plan))


def _cross_entropy(plan: LossPlan, x, labels, where):
    """Computes `nll`, `lse`, the sum of the scores if it is asked for, and the state `(m, d)` if it is asked for."""
    params = plan.problem.params
    soft_cap, return_total = params["soft_cap"], params["return_total"]

    def body(tile, x, inside, where):
        def score_or_0(step, scores):
            for seen in filter(None, (inside, where)):
                scores = select(seen(step), scores, 0)
            return scores

        scores = _scores(tile, x, inside, where, soft_cap)
        local, sums = tile.lift_and_sum(scores, score_or_0) if return_total else (tile.lift(scores), None)
        state = tile.merge(local)
        return [online.shift(state.m), state.d, *([tile.sum(sums, exchange=1)] if return_total else [])]

    per_row = [jnp.float32] * (2 + return_total)
    m, d, *total = _launch(plan, "cross_entropy_forward", body, x, where, {}, per_row=per_row)
    chosen = xla.chosen_score(x, labels, params["axes"], soft_cap, m.dtype)
    return xla.results_of(labels, m, d, chosen, *total, dtype=params["dtype"], return_state=params["return_state"])


def _cross_entropy_vjp(plan: LossPlan, x, where, **of_rows):
    """Computes `(a * p + b * onehot(label) + c) * ds/dx`, in the memory of `x` if it `replaces` that."""
    params = plan.problem.params
    soft_cap = params["soft_cap"]

    def body(tile, x, m, d, labels, inside, where, **numbers):
        weights = None
        if numbers["a"] is not None:
            scores = _scores(tile, x, inside, None, soft_cap)
            weights = weights_of_state(tile, scores, m, d, None, where, None, factor=numbers["a"])
        return [_gradient(tile, x, weights, numbers, labels, where, soft_cap)]

    replaced = "x" if params.get("replaces", False) and x.dtype == params["dtype"] else None
    if replaced:  # in a loop XLA must not fuse the kernel: see `_cross_entropy_gradient`
        x, *arrays = lax.optimization_barrier((x, *of_rows.values()))
        of_rows = dict(zip(of_rows, arrays, strict=True))
    of_rows = {name: None if array is None else PerRow(array) for name, array in of_rows.items()}
    (gradient,) = _launch(plan, "cross_entropy_vjp", body, x, where, of_rows, replaced=replaced)
    return lax.optimization_barrier(gradient) if replaced else gradient


def _cross_entropy_gradient(plan: LossPlan, x, labels, t):
    """Computes `t` times the derivative of the losses, `nll`, `lse` and with smoothing the sum of the scores."""
    params = plan.problem.params
    axes, soft_cap, label_smoothing = params["axes"], params["soft_cap"], params["label_smoothing"]

    def body(tile, x, t, labels, inside, where):
        scores = _scores(tile, x, inside, where, soft_cap)
        local = tile.lift(scores)
        m, d = tile.merge(local)[:2]
        numbers = xla.factors(t, online.shift(m) + jnp.log(d), label_smoothing, params["z_loss"], classes)
        of_score, alike = tile.weights(local.m)
        factor = numbers["a"] * online.weights(local.m, m, axis=()) * alike / (d + (m - m))  # NaN if the maximum is infinite
        along = tile.along(factor)
        weights = each(lambda s: of_score(s) * along, scores)
        gradient = _gradient(tile, x, weights, numbers, labels, where, soft_cap)
        total = [tile.sum(apply_mask(inside, scores, 0), exchange=1)] if label_smoothing else []
        return [gradient, online.shift(m), d, *total]

    # The label's score is read before the gradient takes its place. In a loop XLA must not fuse the kernel with slices that it
    # reads or writes: it would forget that one operand is written in place.
    chosen = xla.chosen_score(x, labels, axes, soft_cap, jnp.float32)
    x, t, labels, chosen = lax.optimization_barrier((x, t, labels, chosen))
    classes, per_row = x.shape[axes[0]], [jnp.float32] * (2 + (label_smoothing > 0))
    of_rows = {"t": PerRow(t), "labels": PerRow(labels)}
    results = _launch(plan, "cross_entropy_gradient", body, x, None, of_rows, per_row=per_row, replaced="x")
    gradient, m, d, *total = lax.optimization_barrier(results)
    return [gradient, *xla.results_of(labels, m, d, chosen, *total, dtype=params["dtype"])]


_RUN = {
    CROSS_ENTROPY: _cross_entropy,
    CROSS_ENTROPY_VJP: _cross_entropy_vjp,
    CROSS_ENTROPY_GRADIENT: _cross_entropy_gradient,
}


def _launch(plan: LossPlan, name: str, body, x, where, of_rows, per_row=(), replaced=None) -> list[jax.Array]:
    problem = plan.problem
    operands = {"x": Whole(x, -jnp.inf, jnp.float32), **of_rows}
    operands["inside"] = Inside() if problem.rows.needs_end else None
    operands["where"] = None if where is None else Mask(where)
    kernel = RowKernel(f"{name}_mosaic", body, operands, problem.rows, problem.written, per_row, replaced)
    return rows.launch(kernel, plan.row_plan)


def _scores(tile, x, inside, where, soft_cap):
    """Returns the scores, and `-inf` where there are none; a cap is finite beyond the end, too."""
    if soft_cap is not None:
        x = apply_mask(inside, tile.each_fused(_capped, (soft_cap,), x), -jnp.inf)
    return apply_mask(where, x, -jnp.inf)


def _gradient(tile, x, weights, numbers, labels, where, soft_cap):
    """Returns `(a * p + b * onehot(label) + c) * ds/dx`, from `weights`, which are `a * p`, and numbers that may be None."""
    parts, (a, b, c) = [], (numbers[name] for name in "abc")
    if a is not None:
        counts = tile.along(a) != 0
        parts.append(each(lambda weight: select(counts, weight, 0), weights))
    if c is not None:
        along_c = tile.along(c)
        parts.append(apply_mask(where, lambda step: along_c, 0))
    total = each(lambda *parts: functools.reduce(jnp.add, parts), *parts)
    if b is not None:
        total = tile.plus_at(total, labels, b)
    if soft_cap is None:
        return total
    return tile.each_fused(_sloped, (soft_cap,), total, x)


def _capped(soft_cap, x):
    return soft_cap * fused.tanh(x / soft_cap)


def _sloped(soft_cap, total, x):
    bent = fused.tanh(x / soft_cap)
    return jnp.where(total != 0, total * (1 - bent * bent), 0)
