"""The divergence of two softmaxes on Hopper, for rows up to those that a cluster holds.

1. Forward, blocks read both rows and lift them to their states `(m, d)` and `(y_m, y_d)`, and to the sum of the weights of the
   first times the differences of the exponents. Both sums are relative to both maxima. Where rows are read in a loop, they are
   rescaled as a maximum grows. Warps tell each other all five numbers at one time.
2. Backward, each element gets `(a * (u - v) + b) * p` for the first array, and `c * q - a * p` for the second one, from the
   saved states. Blocks need nothing of each other.

So each array is read once forward. Backward each is read once, and one or two gradients are written once.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the states.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import rows
from jaxsoftmax._gpu.rows.kernel import Inside, Mask, PerRow, RowKernel, RowOperand, Whole
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.plans_sm90 import plan_rows
from jaxsoftmax._gpu.rows.tile import together
from jaxsoftmax.ops.divergence import xla
from jaxsoftmax.ops.divergence.primitive import KL_DIVERGENCE, KL_DIVERGENCE_VJP
from jaxsoftmax.ops.divergence.problem import DivergenceProblem
from jaxsoftmax.ops.softmax.mosaic_sm90 import directed, factor_operand, refused_rows
from jaxsoftmax.ops.softmax.profit import slower_rows


@dataclass(frozen=True)
class DivergencePlan:
    """Runs a problem of divergences by one kernel over rows."""

    problem: DivergenceProblem
    row_plan: RowPlan | ColumnPlan  # how rows are distributed over threads
    remark = None

    def describe(self) -> str:
        return self.row_plan.describe()

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        arrays = dict.fromkeys(self.problem.operation.by_name) | operands
        return _RUN[self.problem.operation](self, **arrays)


def plan(problem: DivergenceProblem, target: Target) -> DivergencePlan | Refusal:
    """Plans a problem of divergences."""
    if problem.operation not in _RUN:
        return Refusal(f"it has no kernel for {problem.operation.name}", lacks_kernel=True)
    if problem.devices:
        return Refusal("it does not merge over devices")
    dtypes = [problem.operands["x"].dtype, problem.operands["y"].dtype, *problem.written]
    if (reason := refused_rows(dtypes, problem.operands.get("where"), problem.rows)) is not None:
        return Refusal(reason)
    row_plan = plan_rows(problem.rows, target)
    if isinstance(row_plan, Refusal):
        return row_plan
    if row_plan.persistent_blocks:  # blocks tell each other one state of a row
        return Refusal(f"no kernel computes the divergence for rows of {problem.rows.cols} entries")
    reason = slower_rows(problem, wins_if_wide=False)
    return DivergencePlan(problem, row_plan) if reason is None else Refusal(reason, DivergencePlan(problem, row_plan))


def _kl_divergence(plan: DivergencePlan, x, y, where, scale, y_scale, counts):
    """Computes the divergence, and if asked for the states of both rows and the sums between them."""

    def body(tile, x, y, inside, where, scale, y_scale):
        (scores, size), (others, y_size) = _directed(tile, x, y, inside, where, scale, y_scale)
        local = tile.lift_differences(scores, others, size, y_size)
        state, other, sums = tile.merge_differences(*local, size, y_size)
        return [state.m, state.d, sums, other.m, other.d]

    params = plan.problem.params
    m, d, sums, y_m, y_d = _launch(plan, "kl_divergence_forward", body, (x, y, where, scale, y_scale), {}, [jnp.float32] * 5)
    return xla.results_of(m, d, sums, y_m, y_d, counts, dtype=params["dtype"], return_state=params["return_state"])


def _kl_divergence_vjp(plan: DivergencePlan, x, y, where, scale, y_scale, m, d, y_m, y_d, **numbers):
    """Computes `(a * (u - v) + b) * p * ds/dx` and `(c * q - a * p) * dt/dy`, those that are asked for."""
    by, of_scores = plan.problem.params["by"], plan.problem.params.get("of_scores", False)

    def body(tile, x, y, m, d, y_m, y_d, a, b, c, inside, where, scale, y_scale):
        if where is not None:  # rows with nothing to see
            d, y_d = jnp.where(d != 0, d, 1), jnp.where(y_d != 0, y_d, 1)
        (scores, size), (others, y_size) = _directed(tile, x, y, inside, where, scale, y_scale)
        size, y_size = (None if of is None else tile.along(of) for of in (size, y_size))
        m, y_m = tile.along(m), tile.along(y_m)

        def factor(number, total, slope):
            return tile.along(number / total if slope is None or of_scores else number / total * slope)

        of_difference, of_weight = factor(a, d, scale), factor(b, d, scale)
        of_other, of_less = factor(c, y_d, y_scale), factor(a, d, y_scale)
        nothing = tile.along(0 / d)  # NaN in a row of nothing except -inf

        def gradients(score, other):
            u = online.exponents(score, m, axis=(), scale=size)
            v = online.exponents(other, y_m, axis=(), scale=y_size)
            weight, found = jnp.exp(u), {}
            if "x" in by:
                slope = of_difference * (u - v) + of_weight
                found["x"] = weight * jnp.where(weight != 0, slope, nothing)
            if "y" in by:
                found["y"] = of_other * jnp.exp(v) - of_less * weight
            return [found[name] for name in by]

        return together(gradients, len(by), scores, others)

    of_rows = {"m": m, "d": d, "y_m": y_m, "y_d": y_d}
    of_rows |= {name: jnp.zeros_like(d) if number is None else number for name, number in numbers.items()}
    of_rows = {name: PerRow(array, jnp.float32) for name, array in of_rows.items()}
    return _launch(plan, "kl_divergence_vjp", body, (x, y, where, scale, y_scale), of_rows)


_RUN = {KL_DIVERGENCE: _kl_divergence, KL_DIVERGENCE_VJP: _kl_divergence_vjp}


def _directed(tile, x, y, inside, where, scale, y_scale):
    """Returns the `directed` scores of both arrays, each with the magnitude of its scale."""
    return directed(tile, x, inside, where, scale), directed(tile, y, inside, where, y_scale)


def _launch(plan: DivergencePlan, name: str, body, operands, of_rows, per_row=()) -> list[jax.Array]:
    problem, (x, y, where, scale, y_scale) = plan.problem, operands
    arrays: dict[str, RowOperand | None] = {of: Whole(array, -jnp.inf, jnp.float32) for of, array in (("x", x), ("y", y))}
    arrays |= of_rows
    arrays["inside"] = Inside() if problem.rows.needs_end else None
    arrays["where"] = None if where is None else Mask(where)
    arrays |= {"scale": factor_operand(scale), "y_scale": factor_operand(y_scale)}
    kernel = RowKernel(f"{name}_mosaic", body, arrays, problem.rows, problem.written, per_row)
    return rows.launch(kernel, plan.row_plan)
