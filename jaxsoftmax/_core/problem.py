"""What an implementation plans: one call of an operation, from types and parameters alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxsoftmax._core.target import ONE_DEVICE, Machine

if TYPE_CHECKING:
    from jaxsoftmax._core.operation import Operation


@dataclass(frozen=True, eq=False)
class Problem:
    """One call of an operation: what is to be computed, from types and parameters alone.

    Attributes:
      operation: the operation.
      operands: types of the operands that are present, by name. An operand that the program casts to float32 has its type from
        before the cast.
      params: parameters of the operation, by name.
      dtypes: dtypes of the operands after such casts, by name; those that are missing are not cast.
      fused: names of the operands that XLA would compute together with the reference, without writing them to memory.
      devices: names and sizes of the mesh axes whose devices share the rows, if the kernel itself has to merge over them.
      machine: the devices that XLA would run the reference on.
    """

    operation: "Operation"
    operands: Mapping[str, Any]
    params: Mapping[str, Any]
    dtypes: Mapping[str, np.dtype] = field(default_factory=dict)
    fused: frozenset[str] = frozenset()
    devices: tuple[tuple[str, int], ...] = ()
    machine: Machine = ONE_DEVICE

    @property
    def is_cast(self) -> bool:
        """True if the program casts an operand to float32 before the call."""
        return any(self.operands[name].dtype != dtype for name, dtype in self.dtypes.items())

    @property
    def is_symbolic(self) -> bool:
        """True if a size is known only when the program runs."""
        return any(not isinstance(size, int) for operand in self.operands.values() for size in operand.shape)
