"""The softmax family for NVIDIA GPUs since Ampere, in Triton: the equation of each operation, which `_triton/rows.py` computes.

On Hopper Mosaic's kernels are preferred. The kernel was run on an H200. For other generations it is compiled, and tests compute
its values in Triton's interpreter.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.row_problem import RowwiseProblem, is_along
from jaxsoftmax._core.target import Target
from jaxsoftmax._triton import availability
from jaxsoftmax._triton.row_launch import MOST_ROWS, RowFormula, TritonRowPlan, plan_rows
from jaxsoftmax.ops.softmax.primitive import (
    LOG_SOFTMAX,
    LOG_SOFTMAX_JVP,
    LOG_SOFTMAX_VJP,
    LOGSUMEXP,
    LOGSUMEXP_JVP,
    LOGSUMEXP_VJP,
    SOFTMAX,
    SOFTMAX_JACOBIAN,
)
from jaxsoftmax.ops.softmax.problem import SoftmaxProblem
from jaxsoftmax.ops.softmax.profit import slower_softmax

DTYPES = ("float32", "bfloat16", "float16")

# The scale of softmax_jacobian multiplies the tangent. The parameter `scale_tangent` tells whether the other derivatives do so.
_FORMULAS = {
    SOFTMAX: RowFormula("softmax", "p"),
    LOG_SOFTMAX: RowFormula("log_softmax", "log p"),
    LOGSUMEXP: RowFormula("logsumexp", "m + log d"),
    SOFTMAX_JACOBIAN: RowFormula("softmax_jacobian", "p * (t - sum)", "sum", operand="y", tangent="weighted", rescales=True),
    LOG_SOFTMAX_JVP: RowFormula("log_softmax_jvp", "t - sum", "sum", tangent="seen"),
    LOG_SOFTMAX_VJP: RowFormula("log_softmax_vjp", "t - p * sum", "sum", summand="t", tangent="seen"),
    LOGSUMEXP_JVP: RowFormula("logsumexp_jvp", "sum", "sum", tangent="weighted"),
    LOGSUMEXP_VJP: RowFormula("logsumexp_vjp", "p * t", "nothing"),
}


def plan(problem: SoftmaxProblem, target: Target) -> TritonRowPlan | Refusal:
    """Plans a problem of the softmax family."""
    operands, params = problem.operands, problem.params
    dtypes = [operand.dtype for operand in operands.values()] + [problem.dtype]
    if (reason := refused(problem, dtypes, operands.get("scale"))) is not None:
        return Refusal(reason)
    formula = _FORMULAS[problem.operation]
    formula = replace(formula, rescales=params.get("scale_tangent", formula.rescales))
    results = problem.operation.types(operands, **params)
    rows = plan_rows(formula, problem.rows, operands, results, target)
    reason = availability.refused_unless_forced(target) or slower_softmax(problem)
    return rows if reason is None else Refusal(reason, rows)


def refused(problem: RowwiseProblem, dtypes: Iterable[Any], scale: Any = None) -> str | None:
    """Says why the kernel cannot run on rows with operands and results of these dtypes, or returns None."""
    if problem.devices:
        return "it does not merge over devices"
    if (reason := availability.missing()) is not None:
        return reason
    for name in [dtype.name for dtype in dtypes if dtype.name != "bool"]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    if (reason := problem.rows.refused(MOST_ROWS)) is not None:
        return reason
    axes = problem.params["axes"]
    if is_along(scale, axes):
        return f"scale must be one number for each row, got shape {scale.shape} for axes {axes}"
    return None
