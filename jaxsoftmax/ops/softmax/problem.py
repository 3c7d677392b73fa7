"""Problems of the softmax family: rows of scores, and of what is as large as they are."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.row_problem import RowProblem, is_along

_SUMS = ("softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp", "logsumexp_jvp")
_OF_ROWS = ("logsumexp", "logsumexp_jvp")  # whose results are numbers of rows


@dataclass(frozen=True, eq=False)
class SoftmaxProblem(Problem):
    """A problem of softmax, log_softmax, logsumexp or one of their derivatives."""

    @property
    def name(self) -> str:
        return self.operation.name

    @property
    def dtype(self) -> np.dtype:
        """Dtype of the result."""
        return jnp.dtype(self.params["dtype"])

    @functools.cached_property
    def whole(self) -> list[Any]:
        """Types of the operands that are as large as the rows."""
        names = "x", "y", *(() if self.name == "logsumexp_vjp" else ("t",))
        return [self.operands[name] for name in names if name in self.operands]

    @functools.cached_property
    def rows(self) -> RowProblem:
        """The rows, and what a kernel reads and writes of them."""
        return RowProblem(
            self.whole[0].shape,
            tuple(self.params["axes"]),
            read=tuple(operand.dtype.itemsize for operand in self.whole),
            written=() if self.name in _OF_ROWS else (self.dtype.itemsize,),
            has_mask=is_along(self.operands.get("where"), self.params["axes"]),
            needs_end=self.name != "softmax_jacobian" and "scale" in self.operands,
            reduces="nothing" if self.name == "logsumexp_vjp" else "sum" if self.name in _SUMS else "state",
            n_exchanges=0 if self.name == "logsumexp_vjp" else 1,
            exponentiates_twice=self.name == "log_softmax",
        )
