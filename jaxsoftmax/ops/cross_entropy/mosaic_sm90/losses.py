"""Cross-entropy of rows of logits on Hopper, for rows up to those that the grid holds.

The kernels are those of softmax (`ops/softmax/mosaic_sm90`), with labels.

1. Forward, the state of each row is computed as for logsumexp, of capped scores if there is a cap. What belongs to a row, the
   label's logit among it, is left to XLA, which computes it together with what reads the loss.
2. Backward, each element gets `(a * p + b * onehot(label) + c + e * p * z) * ds/dx`. Blocks need nothing of each other.
3. If the cotangents are known with the logits, rows are held as for softmax, and the gradient replaces them.

So the logits are read once forward, and read and written once backward, or read and written once in all; a mask is read as
bytes.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.problem import FACTORS
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import fused, rows
from jaxsoftmax._gpu.rows.kernel import Inside, Mask, PerRow, RowKernel, Whole
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.plans_sm90 import plan_rows
from jaxsoftmax._gpu.rows.tile import each
from jaxsoftmax.ops.cross_entropy import xla
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT, CROSS_ENTROPY_VJP
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem
from jaxsoftmax.ops.softmax.mosaic_sm90 import (
    apply_mask,
    directed,
    factor_operand,
    multiplied,
    refused_product,
    refused_rows,
    select,
    undirected,
    weights_of_state,
)
from jaxsoftmax.ops.softmax.profit import multiplied_behind, slower_rows


@dataclass(frozen=True)
class LossPlan:
    """Runs a problem of cross-entropy by one kernel over rows."""

    problem: CrossEntropyProblem
    row_plan: RowPlan | ColumnPlan  # how rows are distributed over threads
    remark = None

    def describe(self) -> str:
        return self.row_plan.describe() + (", times a factor" if self.problem.is_product else "")

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
    reason = refused_rows(dtypes, problem.operands.get("where"), problem.rows) or refused_product(problem)
    if reason is not None:
        return Refusal(reason)
    row_plan = plan_rows(problem.rows, target)
    if isinstance(row_plan, Refusal):
        return row_plan
    if row_plan.persistent_blocks and (problem.has_entropy or problem.has_total):  # blocks tell each other a state, and no sum
        sums = "the entropy" if problem.has_entropy else "the sum of the scores, which smoothing needs,"
        return Refusal(f"no kernel computes {sums} for rows of {problem.rows.cols} entries")
    if problem.has_entropy and problem.has_total:
        return Refusal("no kernel computes both the entropy and the sum of the scores")
    reason = slower_rows(problem, wins_if_wide=False) or _slower_if_product(problem)
    return LossPlan(problem, row_plan) if reason is None else Refusal(reason, LossPlan(problem, row_plan))


def _slower_if_product(problem: CrossEntropyProblem) -> str | None:
    """Checks for a gradient behind a factor that XLA computes in one pass.

    If labels have a part in it, the reference writes the gradient, and adds to it at the labels, before XLA multiplies it. It
    then passes over memory as often as a kernel and the product behind it. Not measured.
    """
    is_one_pass = problem.operation is CROSS_ENTROPY_VJP and "b" not in problem.operands
    return multiplied_behind(problem) if problem.is_product and is_one_pass else None


def _cross_entropy(plan: LossPlan, x, labels, where, scale, **factors):
    """Computes `nll`, `lse`, and what is asked for: the sum of the scores, the entropy, and the state `(m, d)`."""
    problem, params = plan.problem, plan.problem.params
    soft_cap, return_total = params["soft_cap"], problem.has_total

    def body(tile, x, inside, where, scale):
        def score_or_0(step, scores):
            for seen in filter(None, (inside, where)):
                scores = select(seen(step), scores, 0)
            return scores

        scores, size = directed(tile, _scores(tile, x, inside, None, soft_cap), inside, where, scale)
        if problem.has_entropy:
            state, *sums = tile.merge_with_exponents(*tile.lift_with_exponents(scores, size), size)
        elif return_total:
            local, total = tile.lift_and_sum(scores, score_or_0, size)
            state, sums = tile.merge(local, size), [tile.sum(total, exchange=1)]
        else:
            state, sums = tile.merge(tile.lift(scores, size), size), []
        return [online.shift(state.m), state.d, *sums]

    per_row = [jnp.float32] * (2 + return_total + problem.has_entropy)
    m, d, *sums = _launch(plan, "cross_entropy_forward", body, x, where, scale, {}, per_row=per_row, **factors)
    if return_total and scale is not None:
        sums[0] *= jnp.abs(scale)
    chosen = xla.chosen_score(x, labels, params["axes"], soft_cap, m.dtype, **factors)
    options = {"dtype": params["dtype"], "return_state": params["return_state"], "return_entropy": problem.has_entropy}
    return xla.results_of(labels, m, d, chosen, *sums, scale=scale, **options)


def _cross_entropy_vjp(plan: LossPlan, x, where, scale, **of_rows):
    """Computes `(a * p + b * onehot(label) + c + e * p * z) * ds/dx`, in the memory of `x` if it `replaces` that."""
    params = plan.problem.params
    soft_cap, of_scores = params["soft_cap"], params.get("of_scores", False)

    def body(tile, x, m, d, labels, inside, where, scale, **numbers):
        del inside  # what is computed beyond the end of a row is not stored
        counts = [tile.along(numbers[name]) != 0 for name in "ae" if numbers[name] is not None]
        if not of_scores and scale is not None:
            numbers = {name: None if number is None else number * scale for name, number in numbers.items()}
        weights = None
        if counts:
            scores = _scores(tile, x, None, None, soft_cap)
            weighted, counts = _weighted(tile, scores, m, d, where, scale, numbers), functools.reduce(jnp.logical_or, counts)
            weights = each(lambda weight: select(counts, weight, 0), weighted)
        return [_gradient(tile, x, weights, numbers, labels, where, None if of_scores else soft_cap)]

    factors = {name: of_rows.pop(name) for name in FACTORS if name in of_rows}
    replaced = "x" if params.get("replaces", False) and x.dtype == params["dtype"] else None
    if replaced:  # in a loop XLA must not fuse the kernel: see `_cross_entropy_gradient`
        x, *arrays = lax.optimization_barrier((x, *of_rows.values()))
        of_rows = dict(zip(of_rows, arrays, strict=True))
    of_rows = {name: None if array is None else PerRow(array) for name, array in of_rows.items()}
    (gradient,) = _launch(plan, "cross_entropy_vjp", body, x, where, scale, of_rows, replaced=replaced, **factors)
    return lax.optimization_barrier(gradient) if replaced else gradient


def _weighted(tile, scores, m, d, where, scale, numbers):
    """Computes `(a + e * z) * p`, with `z = s - max s`, from the saved state. Either `a` or `e` may be None."""
    a, e = numbers["a"], numbers["e"]
    if e is None:
        return weights_of_state(tile, scores, m, d, None, where, scale, factor=a)
    d = d if where is None else jnp.where(d != 0, d, 1)  # of a row with nothing to see
    exponents, error = tile.exponents(undirected(m, scale), scale)
    factor = jnp.exp2(-error) / d
    slope = e * factor * math.log(2)
    start = tile.along((0 if a is None else a * factor) - slope * error)
    slope = tile.along(slope)

    def weigh(score):
        exponent = exponents(score)
        return (start + slope * online.bounded(exponent)) * jnp.exp2(exponent)

    return apply_mask(where, each(weigh, scores), 0)


def _cross_entropy_gradient(plan: LossPlan, x, labels, t):
    """Computes `t` times the derivative of the losses, `nll`, `lse` and with smoothing the sum of the scores."""
    params = plan.problem.params
    axes, soft_cap, label_smoothing = params["axes"], params["soft_cap"], params["label_smoothing"]

    def body(tile, x, t, labels, inside, where, scale):
        del scale
        scores = _scores(tile, x, inside, where, soft_cap)
        local = tile.lift(scores)
        m, d = tile.merge(local)[:2]
        numbers = xla.factors(t, online.shift(m) + jnp.log(d), label_smoothing, params["z_loss"], classes)
        of_score, alike = tile.weights(local.m)
        factor = numbers["a"] * online.weights(local.m, m, axis=()) * alike / (d + (m - m))  # NaN if the maximum is infinite
        along, counts = tile.along(factor), tile.along(numbers["a"]) != 0
        weights = each(lambda s: select(counts, of_score(s) * along, 0), scores)
        gradient = _gradient(tile, x, weights, numbers, labels, where, soft_cap)
        total = [tile.sum(apply_mask(inside, scores, 0), exchange=1)] if label_smoothing else []
        return [gradient, online.shift(m), d, *total]

    # The label's score is read before the gradient takes its place. In a loop XLA must not fuse the kernel with slices that it
    # reads or writes: it would forget that one operand is written in place.
    chosen = xla.chosen_score(x, labels, axes, soft_cap, jnp.float32)
    x, t, labels, chosen = lax.optimization_barrier((x, t, labels, chosen))
    classes, per_row = x.shape[axes[0]], [jnp.float32] * (2 + (label_smoothing > 0))
    of_rows = {"t": PerRow(t), "labels": PerRow(labels)}
    results = _launch(plan, "cross_entropy_gradient", body, x, None, None, of_rows, per_row=per_row, replaced="x")
    gradient, m, d, *total = lax.optimization_barrier(results)
    return [gradient, *xla.results_of(labels, m, d, chosen, *total, dtype=params["dtype"])]


_RUN = {
    CROSS_ENTROPY: _cross_entropy,
    CROSS_ENTROPY_VJP: _cross_entropy_vjp,
    CROSS_ENTROPY_GRADIENT: _cross_entropy_gradient,
}


def _launch(plan: LossPlan, name: str, body, x, where, scale, of_rows, per_row=(), replaced=None, **factors) -> list[jax.Array]:
    problem = plan.problem
    operands = {"x": Whole(x, -jnp.inf, jnp.float32), **of_rows}
    operands["inside"] = Inside() if problem.rows.needs_end else None
    operands["where"] = None if where is None else Mask(where)
    operands["scale"] = factor_operand(scale)
    kernel = RowKernel(f"{name}_mosaic", body, operands, problem.rows, problem.written, per_row, replaced)
    return rows.launch(multiplied(kernel, **factors), plan.row_plan)


def _scores(tile, x, inside, where, soft_cap):
    """Returns the scores, and `-inf` where there are none; a cap is finite beyond the end, too."""
    if soft_cap is not None:
        x = apply_mask(inside, tile.each_fused(_capped, (soft_cap,), x), -jnp.inf)
    return apply_mask(where, x, -jnp.inf)


def _gradient(tile, x, weights, numbers, labels, where, soft_cap):
    """Returns `(weights + b * onehot(label) + c) * ds/dx`, with weights and numbers that may be None, before a scale."""
    parts, (b, c) = [] if weights is None else [weights], (numbers[name] for name in "bc")
    if c is not None:
        along_c = tile.along(c)
        parts.append(apply_mask(where, lambda step: along_c, 0))
    total = each(lambda *parts: functools.reduce(jnp.add, parts), *parts)
    if b is not None:
        total = tile.plus_at(total, labels, b)
    return total if soft_cap is None else tile.each_fused(_sloped, (soft_cap,), total, x)


def _capped(soft_cap, x):
    return soft_cap * fused.tanh(x / soft_cap)


def _sloped(soft_cap, total, x):
    bent = fused.tanh(x / soft_cap)
    return jnp.where(total != 0, total * (1 - bent * bent), 0)
