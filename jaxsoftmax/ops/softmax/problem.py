"""Problems of the softmax family: rows of scores and of arrays that are as large."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.row_problem import RowProblem, RowwiseProblem, is_along

_SUMS = ("softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp", "logsumexp_jvp")
_OF_ROWS = ("logsumexp", "logsumexp_jvp")  # whose results are numbers of rows


@dataclass(frozen=True, eq=False)
class SoftmaxProblem(RowwiseProblem):
    """A problem of softmax, log_softmax, logsumexp or one of their derivatives."""

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Dtype of the result."""
        return jnp.dtype(self.params["dtype"])

    @functools.cached_property
    def whole(self) -> list[Any]:
        """Types of the operands that are as large as the rows."""
        names = "x", "y", *(() if self.operation.name == "logsumexp_vjp" else ("t",))
        return [self.operands[name] for name in names if name in self.operands]

    @functools.cached_property
    def rows(self) -> RowProblem:
        name, axes = self.operation.name, self.params["axes"]
        return RowProblem(
            self.whole[0].shape,
            tuple(axes),
            read=tuple(operand.dtype.itemsize for operand in self.whole),
            written=() if name in _OF_ROWS else (self.dtype.itemsize,),
            has_mask=is_along(self.operands.get("where"), axes),
            needs_end=name != "softmax_jacobian" and "scale" in self.operands,
            reduces="nothing" if name == "logsumexp_vjp" else "sum" if name in _SUMS else "state",
            n_exchanges=0 if name == "logsumexp_vjp" else 1,
            keeps_scores=name == "log_softmax",
        )
