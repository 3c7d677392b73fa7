"""Cross-entropy on Hopper: kernels over rows of logits (`losses`), and over tiles of a linear layer.

Those of a layer compute terms of rows (`linear_loss`), their derivatives (`linear_blocks`), or losses together with gradients
(`linear_gradient`).
"""

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.cross_entropy.linear_gradient import LINEAR_CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.cross_entropy.linear_terms import LINEAR_LOG_PROBS, LINEAR_LOG_PROBS_VJP
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import linear_blocks, linear_gradient, linear_loss, losses
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem


def plan(problem: Problem, target: Target) -> Plan | Refusal:
    """Plans a problem of cross-entropy."""
    if isinstance(problem, CrossEntropyProblem):
        return losses.plan(problem, target)
    of_operation = {
        LINEAR_LOG_PROBS: linear_loss.plan,
        LINEAR_LOG_PROBS_VJP: linear_blocks.plan,
        LINEAR_CROSS_ENTROPY_GRADIENT: linear_gradient.plan,
    }
    if problem.operation not in of_operation:
        return Refusal(f"it has no kernel for {problem.operation.name}", lacks_kernel=True)
    return of_operation[problem.operation](problem, target)
