"""Problems of the softmax family: rows of scores and of arrays that are as large."""

import functools
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.row_problem import RowProblem, RowwiseProblem, is_along


@dataclass(frozen=True, eq=False)
class SoftmaxProblem(RowwiseProblem):
    """A problem of softmax, log_softmax, logsumexp or one of their derivatives."""

    reduces: Literal["state", "sum", "nothing"] = "state"  # see `RowProblem`, also for the last field
    writes_rows: bool = True  # True if a result is as large as the rows; else it is one number for each row
    keeps_scores: bool = False

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Dtype of the result."""
        return jnp.dtype(self.params["dtype"])

    @functools.cached_property
    def whole(self) -> list[Any]:
        """Types of the operands that are as large as the rows."""
        names = "x", "y", *(() if self.reduces == "nothing" else ("t",))
        return [self.operands[name] for name in names if name in self.operands]

    @functools.cached_property
    def rows(self) -> RowProblem:
        axes = self.params["axes"]
        return RowProblem(
            self.whole[0].shape,
            tuple(axes),
            read=tuple(operand.dtype.itemsize for operand in self.whole),
            written=(self.dtype.itemsize,) if self.writes_rows else (),
            has_mask=is_along(self.operands.get("where"), axes),
            needs_end=self.operands.keys() >= {"x", "scale"} or self.is_product,
            reduces=self.reduces,
            n_exchanges=0 if self.reduces == "nothing" else 1,
            keeps_scores=self.keeps_scores,
        )
