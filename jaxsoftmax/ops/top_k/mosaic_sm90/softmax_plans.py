"""Plans of softmax's kernels over whole rows, which top-k and samples use for the state and for gradients."""

from typing import Any

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.softmax import mosaic_sm90 as softmax_mosaic
from jaxsoftmax.ops.softmax.problem import SoftmaxProblem
from jaxsoftmax.ops.top_k.problem import TopKProblem

_OPERANDS = ("x", "where", "scale")  # on which a plan depends; those of rows, such as `m`, do not matter


def plan_softmax(
    operation: Operation, problem: TopKProblem, target: Target, types: dict[str, Any] | None = None, **params: Any
) -> Plan | Refusal:
    """Plans an operation of the softmax family on rows of a problem.

    Args:
      operation: the operation.
      problem: the problem of top-k or of samples.
      target: the target.
      types: types of the operands; None for the scores of `problem`.
      **params: parameters of the operation.
    """
    types = {name: problem.operands[name] for name in _OPERANDS if name in problem.operands} if types is None else types
    dtypes = {name: dtype for name, dtype in problem.dtypes.items() if name in types}
    part = SoftmaxProblem(operation, types, params, dtypes, problem.fused & set(types))
    return softmax_mosaic.plan(part, target)
