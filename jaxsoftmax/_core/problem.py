"""What an implementation plans: one call of an operation, from types and parameters alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsoftmax._core.target import ONE_DEVICE, Machine

if TYPE_CHECKING:
    from jaxsoftmax._core.operation import Operation


# Names of operands for a number of each row in front of the scores; a call has at most one: see `Operation.factor_of`.
FACTORS = ("factor", "divisor")


@dataclass(frozen=True, eq=False)
class Problem:
    """One call of an operation: what is to be computed, from types and parameters alone.

    `operands` and `params` are by name. An operand that the program casts to float32 has its type from before the cast. The
    operand that a factor belongs to has its type from before the product: see `Operation.factor_of`.
    """

    operation: "Operation"
    operands: Mapping[str, Any]  # types of the operands that are present
    params: Mapping[str, Any]
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)  # of operands after such casts; others are not cast
    fused: frozenset[str] = frozenset()  # operands that XLA would compute with the reference, without writing them to memory
    devices: tuple[tuple[str, int], ...] = ()  # mesh axes, with sizes, over which the kernel itself has to merge rows
    machine: Machine = ONE_DEVICE  # on which XLA would run the reference

    @property
    def is_cast(self) -> bool:
        """True if the program casts an operand to float32 before the call."""
        return any(self.operands[name].dtype != dtype for name, dtype in self.dtypes.items())

    @property
    def is_product(self) -> bool:
        """True if the scores are a product with a factor of rows."""
        return not self.operands.keys().isdisjoint(FACTORS)

    @property
    def is_rounded_product(self) -> bool:
        """True if the program rounds such a product to 16 bits. Kernels round it to float32."""
        return self.is_product and self.operands["x"].dtype.itemsize == 2 and "x" not in self.dtypes

    @property
    def is_symbolic(self) -> bool:
        """True if a size is known only when the program runs."""
        return any(not isinstance(size, int) for operand in self.operands.values() for size in operand.shape)
