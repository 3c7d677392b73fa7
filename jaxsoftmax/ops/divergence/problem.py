"""Problems of divergences: rows of two arrays of logits, and their gradients."""

import functools
from dataclasses import dataclass
from typing import Any, ClassVar

import jax.numpy as jnp

from jaxsoftmax._core.row_problem import RowProblem, RowwiseProblem, is_along


@dataclass(frozen=True, eq=False)
class DivergenceProblem(RowwiseProblem):
    """A problem of kl_divergence, or of a primitive that its gradient needs."""

    n_exchanges: ClassVar[int] = 1
    exchanged: ClassVar[int] = 5
    is_read_again: ClassVar[bool] = False
    fits_registers: ClassVar[bool] = True

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
            n_exchanges=0 if needs_nothing else self.n_exchanges,
            exchanged=2 if needs_nothing else self.exchanged,
            is_read_again=self.is_read_again and not needs_nothing,
            fits_registers=self.fits_registers,
        )


@dataclass(frozen=True, eq=False)
class MixtureProblem(DivergenceProblem):
    """A problem of js_divergence, or of a primitive that its gradient needs.

    Its sums need the states of whole rows.
    """

    n_exchanges: ClassVar[int] = 2
    exchanged: ClassVar[int] = 4
    is_read_again: ClassVar[bool] = True
    # Rows of 4096 to 8192 entries would take 180 to 255 registers. In shared memory they take up to 100.
    fits_registers: ClassVar[bool] = False
