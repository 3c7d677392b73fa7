"""Cross-entropy on Hopper: kernels over rows of logits (`losses`), and over tiles of a linear layer.

Those of a layer compute terms of rows and derivatives (`linear_loss`), or losses together with gradients (`linear_gradient`).
"""

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.cross_entropy.linear_gradient import LINEAR_CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import linear_gradient, linear_loss, losses
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem


def plan(problem: Problem, target: Target) -> Plan | Refusal:
    """Plans a problem of cross-entropy."""
    if isinstance(problem, CrossEntropyProblem):
        return losses.plan(problem, target)
    if problem.operation is LINEAR_CROSS_ENTROPY_GRADIENT:
        return linear_gradient.plan(problem, target)
    return linear_loss.plan(problem, target)
