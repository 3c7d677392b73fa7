"""Problems of cross-entropy on Hopper, from shapes and dtypes alone, and their plans."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import HOPPER, Target
from jaxsoftmax.ops.cross_entropy import mosaic_sm90 as mosaic
from jaxsoftmax.ops.cross_entropy import primitive
from jaxsoftmax.ops.cross_entropy.linear_gradient import LINEAR_CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.cross_entropy.linear_terms import LINEAR_LOG_PROBS, LINEAR_LOG_PROBS_VJP
from jaxsoftmax.ops.cross_entropy.loss import LossHead
from jaxsoftmax.ops.cross_entropy.mosaic_sm90.linear_gradient import LinearGradientPlan
from jaxsoftmax.ops.cross_entropy.mosaic_sm90.linear_loss import LinearLossPlan
from jaxsoftmax.ops.cross_entropy.mosaic_sm90.losses import LossPlan
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem

# Parameters of each operation, as they are by default.
PARAMS: dict[str, dict[str, Any]] = {
    "cross_entropy": {"return_total": False, "return_state": False},
    "cross_entropy_vjp": {},
    "cross_entropy_gradient": {"label_smoothing": 0.0, "z_loss": 0.0},
}


def operands_of(name: str, shape, dtype, *, axis=-1, mask=None) -> dict[str, Any]:
    """Returns types of the operands of an operation by name, without a scale and what entropies need."""
    row = tuple(1 if place == axis % len(shape) else size for place, size in enumerate(shape))
    kinds = {"x": (shape, dtype), "labels": (row, "int32"), "where": None if mask is None else (mask, "bool")}
    kinds |= {"scale": None, "e": None}
    kinds = {own.name: kinds.get(own.name, (row, "float32")) for own in operation_of(name).operands}
    return {own: jax.ShapeDtypeStruct(*kind) for own, kind in kinds.items() if kind is not None}


def operation_of(name: str):
    return getattr(primitive, name.upper())


def problem_of(name: str, operands: Mapping[str, Any], *, axis=-1, dtype="float32", **params) -> CrossEntropyProblem:
    """Returns the problem of an operation for operands of these types."""
    params = {"axes": (axis % len(operands["x"].shape),), "dtype": jnp.dtype(dtype), "soft_cap": None} | PARAMS[name] | params
    return CrossEntropyProblem(operation_of(name), dict(operands), params)


def linear_problem_of(head, operands: Mapping[str, Any], **params) -> Problem:
    """Returns the problem of the log-probabilities or the losses of a linear layer, or of gradients, for such operands."""
    operation = LINEAR_LOG_PROBS_VJP if "wrt" in params else LINEAR_LOG_PROBS
    operation = LINEAR_CROSS_ENTROPY_GRADIENT if isinstance(head, LossHead) else operation
    return Problem(operation, dict(operands), {"head": head, **params})


def plan_of(problem: Problem, target: Target = HOPPER) -> LossPlan | LinearLossPlan | LinearGradientPlan | Refusal:
    """Plans a problem as if the user had asked for the kernel: also where the reference should be faster."""
    plan = mosaic.plan(problem, target)
    return plan.plan if isinstance(plan, Refusal) and plan.plan is not None else plan


def run(problem_of, operands: Mapping[str, Any], target: Target = HOPPER) -> Any:
    """Runs the kernel of the problem that `problem_of` returns for the types of the operands."""
    plan = plan_of(problem_of(jax.tree.map(jax.typeof, dict(operands))), target)
    assert not isinstance(plan, Refusal), plan.reason
    return plan.run(**operands)
