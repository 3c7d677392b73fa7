"""Problems of cross-entropy: rows of logits, and their gradient."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxsoftmax._core.row_problem import RowProblem, RowwiseProblem, is_along


@dataclass(frozen=True, eq=False)
class CrossEntropyProblem(RowwiseProblem):
    """A problem of cross_entropy, or of a primitive that its gradient needs."""

    @functools.cached_property
    def has_total(self) -> bool:
        """True if the sum of the scores of each row is a result, as smoothing needs it."""
        return self.params.get("return_total", False) or self.params.get("label_smoothing", 0) > 0

    @functools.cached_property
    def has_entropy(self) -> bool:
        """True if the entropy of each row is a result, or has a part in the gradient."""
        return self.params.get("return_entropy", False) or "e" in self.operands

    @functools.cached_property
    def written(self) -> list[Any]:
        """Dtypes of the results that are as large as the logits."""
        dtypes = {"cross_entropy_vjp": self.params["dtype"], "cross_entropy_gradient": self.operands["x"].dtype}
        return [jnp.dtype(dtypes[self.operation.name])] if self.operation.name in dtypes else []

    @functools.cached_property
    def rows(self) -> RowProblem:
        x, axes, needs_nothing = self.operands["x"], self.params["axes"], self.operation.name == "cross_entropy_vjp"
        has_direction = "scale" in self.operands and not needs_nothing  # -inf beyond the end may be the largest score
        return RowProblem(
            x.shape,
            tuple(axes),
            read=(x.dtype.itemsize,),
            written=tuple(dtype.itemsize for dtype in self.written),
            has_mask=is_along(self.operands.get("where"), axes),
            needs_end=self.params["soft_cap"] is not None or self.is_product or self.has_total or has_direction,
            reduces="nothing" if needs_nothing else "exponents" if self.has_entropy else "state",
            n_exchanges=0 if needs_nothing else 1 + self.has_total,
            exchanged=3 if self.has_entropy and not needs_nothing else 2,
        )
