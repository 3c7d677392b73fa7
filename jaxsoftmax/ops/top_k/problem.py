"""Problems of top-k and of sampling: rows along the last axis, from types and parameters alone."""

import functools
import math
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.problem import Problem


@dataclass(frozen=True, eq=False)
class TopKProblem(Problem):
    """A problem of `top_k`, of `softmax_top_k` and its derivatives, or of `categorical`."""

    with_batch: str = "x"  # name of the operand that has the batch axes of the results

    @functools.cached_property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the axes in front of the rows of the results."""
        return self.operands[self.with_batch].shape[:-1]

    @functools.cached_property
    def rows(self) -> int:
        """Number of rows of the results."""
        return math.prod(self.batch)

    @functools.cached_property
    def cols(self) -> int:
        """Elements of a row of scores, or of their gradient."""
        return self.params["size"] if "size" in self.params else self.operands["x"].shape[-1]

    @functools.cached_property
    def k(self) -> int:
        """Entries of a row that are wanted."""
        return self.params["k"] if "k" in self.params else self.operands["indices"].shape[-1]

    @functools.cached_property
    def dtype(self) -> np.dtype:
        """Dtype of the values, of the weights or of the gradient."""
        return jnp.dtype(self.params["dtype"])

    @functools.cached_property
    def is_plain(self) -> bool:
        """True if scores are the elements of `x`: there is neither a mask nor a scale."""
        return self.operands.keys().isdisjoint(("where", "scale"))

    @functools.cached_property
    def needs_state(self) -> bool:
        """True if the kernel has to find the state `(m, d)` of whole rows."""
        return self.params["return_state"] or self.params.get("normalize") == "all"

    @functools.cached_property
    def ignores_rows(self) -> bool:
        """True if a gradient is that of selected weights alone, which needs nothing of whole rows."""
        return self.params["normalize"] == "selected" and "b" not in self.operands
