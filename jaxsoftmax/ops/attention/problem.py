"""What implementations of attention plan: one call, from types and parameters alone."""

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxsoftmax._core.problem import Problem
from jaxsoftmax.ops.attention.operands import OPERANDS, batch_of, types_without_pages


@dataclass(frozen=True, eq=False)
class AttentionProblem(Problem):
    """One call of attention, of attention with pages, or of a derivative of attention."""

    @functools.cached_property
    def types(self) -> Mapping[str, Any]:
        """Types of the operands of attention that are present, by name. Pages count as the keys and values gathered from them.

        Results, tangents and cotangents, which derivatives have as operands too, are not among them.
        """
        types = types_without_pages(self.operands) if "page_table" in self.operands else self.operands
        return {operand.name: types[operand.name] for operand in OPERANDS if operand.name in types}

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes that the operands have together."""
        return batch_of(self.types)

    @property
    def dtype(self) -> Any:
        """Dtype of the queries."""
        return self.types["query"].dtype

    @property
    def options(self) -> dict[str, Any]:
        """Parameters that say what the scores and weights are: `scale`, `window`, `soft_cap` and `dropout_rate`."""
        return {"dropout_rate": 0.0} | {
            name: self.params[name] for name in ("scale", "window", "soft_cap", "dropout_rate") if name in self.params
        }
