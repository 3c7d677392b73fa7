"""Cross-entropy for NVIDIA GPUs since Ampere, in Triton: softmax's kernel (`_triton/rows.py`) with labels.

Forward, the kernel computes the state of each row. XLA computes the losses from the states, together with what reads them.
Backward, the kernel computes the gradient from the state that was saved. If the cotangents are known with the logits, it
computes state and gradient together, and the gradient takes the place of the logits.

On Hopper Mosaic's kernels are preferred. The kernel was run on an H200. For other generations it is compiled, and tests compute
its values in Triton's interpreter.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax._triton import availability
from jaxsoftmax._triton.row_launch import RowFormula, TritonRowPlan, plan_rows
from jaxsoftmax.ops.cross_entropy import xla
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT, CROSS_ENTROPY_VJP
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem
from jaxsoftmax.ops.softmax.profit import slower_rows
from jaxsoftmax.ops.softmax.triton import refused

_GRADIENT = "a * p + b * onehot + c"


@dataclass(frozen=True)
class TritonLossPlan:
    """Runs a problem of cross-entropy by one kernel over rows."""

    problem: CrossEntropyProblem
    row_plan: TritonRowPlan  # of the kernel

    @property
    def remark(self) -> str | None:
        return self.row_plan.remark

    def describe(self) -> str:
        return self.row_plan.describe()

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        compute = _COMPUTE[self.problem.operation]
        return compute(self.row_plan, self.problem.params, dict.fromkeys(self.problem.operation.by_name) | operands)


def plan(problem: Problem, target: Target) -> TritonLossPlan | Refusal:
    """Plans a problem of cross-entropy."""
    operation, name, params = problem.operation, problem.operation.name, problem.params
    if not isinstance(problem, CrossEntropyProblem) or operation not in _COMPUTE:
        return Refusal(f"it has no kernel for {name}", lacks_kernel=True)
    if problem.has_entropy or "scale" in problem.operands:
        return Refusal("no kernel computes the entropy, or takes a scale")
    x, dtype = problem.operands["x"], jnp.dtype(params["dtype"])
    if (reason := refused(problem, [x.dtype, dtype])) is not None:
        return Refusal(reason)
    numbers = [jax.ShapeDtypeStruct(problem.rows.row_shape, jnp.float32)] * 3  # `m`, `d` and the sum of the scores
    replaces = False
    if operation is CROSS_ENTROPY:
        formula = RowFormula(name, "m, d", cap=params["soft_cap"], has_total=problem.has_total)
        results = numbers[: 2 + formula.has_total]
    elif operation is CROSS_ENTROPY_VJP:
        formula = RowFormula(name, _GRADIENT, "nothing", cap=params["soft_cap"])
        results, replaces = [jax.ShapeDtypeStruct(x.shape, dtype)], params.get("replaces", False) and x.dtype == dtype
    else:
        smoothing, z_loss = params["label_smoothing"], params["z_loss"]
        options = {"has_total": problem.has_total, "smoothing": smoothing, "z_loss": z_loss}
        formula = RowFormula(name, _GRADIENT, cap=params["soft_cap"], **options)
        results, replaces = [jax.ShapeDtypeStruct(x.shape, x.dtype), *numbers[: 2 + formula.has_total]], True
    loss = TritonLossPlan(problem, plan_rows(formula, problem.rows, problem.operands, results, target, replaces))
    reason = availability.refused_unless_forced(target) or slower_rows(problem, wins_if_wide=False)
    return loss if reason is None else Refusal(reason, loss)


def _losses(rows: TritonRowPlan, params: Mapping[str, Any], operands) -> list[jax.Array]:
    """Computes `nll`, `lse`, the sum of the scores if asked for, and the state `(m, d)` if asked for."""
    x, labels = operands["x"], operands["labels"]
    m, d, *total = rows.run(x=x, where=operands["where"])
    chosen = xla.chosen_score(x, labels, params["axes"], params["soft_cap"], m.dtype)
    return xla.results_of(labels, m, d, chosen, *total, dtype=params["dtype"], return_state=params["return_state"])


def _gradient(rows: TritonRowPlan, params: Mapping[str, Any], operands) -> list[jax.Array]:
    """Computes `(a * p + b * onehot(label) + c) * ds/dx`, in the memory of `x` if the plan replaces it."""
    del params
    zeros = jnp.zeros(operands["labels"].shape, jnp.float32)
    operands = operands | {name: zeros for name in "abc" if operands[name] is None}
    if not rows.replaces:
        return rows.run(**operands)
    # In a loop XLA must not fuse the kernel with slices that it reads or writes: it would forget that one operand is written in
    # place.
    names = ("x", "m", "d", "a", "b", "c", "labels")
    barred = lax.optimization_barrier(tuple([operands[name] for name in names]))
    (gradient,) = rows.run(**operands | dict(zip(names, barred, strict=True)))
    return [lax.optimization_barrier(gradient)]


def _losses_and_gradient(rows: TritonRowPlan, params: Mapping[str, Any], operands) -> list[jax.Array]:
    """Computes `t` times the derivative of the losses, `nll`, `lse`, and with smoothing the sum of the scores."""
    x, labels, axes, soft_cap = operands["x"], operands["labels"], params["axes"], params["soft_cap"]
    # The label's score is read before the gradient takes its place. The barriers keep XLA from fusing, as in `_gradient`.
    chosen = xla.chosen_score(x, labels, axes, soft_cap, jnp.float32)
    x, t, labels, chosen = lax.optimization_barrier((x, operands["t"], labels, chosen))
    gradient, m, d, *total = lax.optimization_barrier(tuple(rows.run(x=x, labels=labels, t=t)))
    return [gradient, *xla.results_of(labels, m, d, chosen, *total, dtype=params["dtype"])]


_COMPUTE = {CROSS_ENTROPY: _losses, CROSS_ENTROPY_VJP: _gradient, CROSS_ENTROPY_GRADIENT: _losses_and_gradient}
