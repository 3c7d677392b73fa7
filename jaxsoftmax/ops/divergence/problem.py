"""Problems of divergences: rows of two arrays of logits, and their gradients."""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from jaxsoftmax._core.row_problem import RowProblem, RowwiseProblem, is_along


@dataclass(frozen=True, eq=False)
class DivergenceProblem(RowwiseProblem):
    """A problem of kl_divergence, or of a primitive that its gradient needs."""

    @functools.cached_property
    def written(self) -> list[Any]:
        """Dtypes of the results that are as large as the logits."""
        dtypes = {"x": self.params["dtype"], "y": self.params.get("y_dtype")}
        return [jnp.dtype(dtypes[name]) for name in self.params.get("by", "")]

    @functools.cached_property
    def rows(self) -> RowProblem:
        x, y, axes, needs_nothing = self.operands["x"], self.operands["y"], self.params["axes"], bool(self.written)
        return RowProblem(
            x.shape,
            tuple(axes),
            read=(x.dtype.itemsize, y.dtype.itemsize),
            written=tuple(dtype.itemsize for dtype in self.written),
            has_mask=is_along(self.operands.get("where"), axes),
            needs_end=not self.operands.keys().isdisjoint(("scale", "y_scale")),
            reduces="nothing" if needs_nothing else "exponents",
            n_exchanges=0 if needs_nothing else 1,
            exchanged=2 if needs_nothing else 5,
        )
