"""Declares ops: their operands and results, from which batching, sharding and derivatives derive, and what implements them."""

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from jaxsoftmax._core.problem import FACTORS, Problem

# The names of the last axes of an array, for sharding.
Axes = tuple[str | None, ...]


@dataclass(frozen=True, eq=False)
class Kernels:
    """Says where an implementation with kernels runs, so that its modules load only there.

    Functions load the modules of GPU generations, by the major number of the compute capability. A platform without generations
    has its module under 0.
    """

    generations: Mapping[int, Callable[[], Any]]
    platforms: tuple[str, ...] = ("cuda",)
    takes_factor: bool = False  # True if they take one of `FACTORS`


@dataclass(frozen=True, eq=False)
class Op:
    """A family of operations that have the same implementations."""

    name: str  # of the folder in `ops`
    kernels: dict[str, Kernels]  # implementations with kernels by name, the preferred one first
    reference: Callable[[], Any]  # loads the module of the reference, which is called "xla" and runs everywhere
    # Loads the rules for operations whose rows, or sequences, devices share; None if devices never share any.
    across_devices: Callable[[], Mapping["Operation", Callable[..., Any]]] | None = None

    @property
    def implementations(self) -> tuple[str, ...]:
        """The names that the argument `implementation` takes."""
        return (*self.kernels, "xla")


class OnShards(enum.Enum):
    """Parts of an implementation that run on shards where XLA may cut the operands."""

    NOTHING = enum.auto()  # kernels need one device or a shard_map over all mesh axes; XLA partitions the reference
    KERNELS = enum.auto()  # XLA partitions the reference
    EVERYTHING = enum.auto()  # the reference too, because XLA would gather the batch


@dataclass(frozen=True)
class Operand:
    """Describes an operand or a result of an operation.

    `axes` names the last axes, behind those of the batch. Axes of one name are sharded alike; an axis named None is whole on
    every device. If all operands of the operation have the same axes, none is named here: an axis is named by its position.

    If an operand `is_scores`, it is as large as the scores. Kernels get it as it was before a cast to float32, and problems say
    whether XLA would keep it out of memory.
    """

    name: str  # of the argument by which implementations get it
    axes: Axes = ()
    is_scores: bool = False
    may_be_one: bool = True  # True if it may have size 1 along an axis of the batch along which other operands are larger

    def called(self, name: str) -> "Operand":
        """Returns the same operand under another name, for a tangent or a cotangent."""
        return replace(self, name=name)


@dataclass(frozen=True, eq=False)
class Operation:
    """Describes one primitive: an op, or one of its derivatives.

    Attributes:
      op: the family, which names the implementations.
      name: name of the primitive.
      operands: the operands in their order. Any operand except the first may be absent.
      types: `types(operands, **params)` returns shapes and dtypes of the results, from the operands by name.
      results: `results(**params)` describes the results; None if they have the axes of the operands.
      linear: names of the operands in which the operation is linear, all of them together.
      problem: makes the problem of a call, of `Problem` or a subclass.
      on_shards: the parts of an implementation that run on shards where XLA may cut the operands.
      knows_machine: True if the reference takes `machine`, the devices that XLA runs it on.
      joined: names of the axes along which devices merge their parts, by the rule in `op.across_devices`. If all operands
        have the same axes, the parameter `axes` names them.
      is_reordered: `is_reordered(**params)` tells whether operands are in an order that only the rule in `op.across_devices`
        undoes, also on one device.
      depends_on_cuts: `depends_on_cuts(**params)` tells whether a parameter is an error where no axis of `joined` is sharded.
      factor_of: name of an operand of scores. If it is computed as a product with one number for each row, or as a quotient by
        one, kernels may get it as it was before, and the number as an operand `factor` or `divisor`. The number is float32 and
        has size 1 along the rows. "" for none.
      whole_in_batch: `whole_in_batch(**params)` names operands that never have size 1 along an axis of the batch.
    """

    op: Op
    name: str
    operands: tuple[Operand, ...]
    types: Callable[..., Sequence[Any]]
    results: Callable[..., Sequence[Operand]] | None = None
    linear: tuple[str, ...] = ()
    problem: Callable[..., Any] = Problem
    on_shards: OnShards = OnShards.KERNELS
    knows_machine: bool = False
    joined: tuple[str, ...] = ()
    is_reordered: Callable[..., bool] = lambda **params: False
    depends_on_cuts: Callable[..., bool] = lambda **params: False
    whole_in_batch: Callable[..., Sequence[str]] = lambda **params: ()
    factor_of: str = ""

    # These follow from the others: operands by name, and whether operands and results all have the same axes.
    by_name: dict[str, Operand] = field(init=False)
    is_aligned: bool = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "by_name", {operand.name: operand for operand in self.operands})
        object.__setattr__(self, "is_aligned", self.results is None)

    def axes(self, names: Sequence[str], n_results: int, **params: Any) -> tuple[list[Axes], list[Axes]]:
        """Lists the names of the axes of the operands `names`, and of the results."""
        out: list[Axes] = [()] * n_results
        if self.results is not None:
            out = [result.axes for result in self.results(**params)]
        own = [self.factor_of if name in FACTORS else name for name in names]  # a factor has the axes of its scores
        return [() if self.is_aligned else self.by_name[name].axes for name in own], out

    def row_axes(self, ndim: int, **params: Any) -> tuple[int, ...]:
        """Returns the axes of a row in the operand of `ndim` axes that has a factor."""
        if self.is_aligned:
            return params["axes"]
        names = self.by_name[self.factor_of].axes
        return tuple([ndim - len(names) + at for at, name in enumerate(names) if name is None])

    def multiplied(self, operands: Mapping[str, Any]) -> dict[str, Any]:
        """Returns operands by name without their factor: multiplies, or divides, what it belongs to, in float32."""
        operands = dict(operands)
        factor, divisor = (operands.pop(name, None) for name in FACTORS)
        if factor is not None:
            operands[self.factor_of] = operands[self.factor_of].astype(factor.dtype) * factor
        if divisor is not None:
            operands[self.factor_of] = operands[self.factor_of].astype(divisor.dtype) / divisor
        return operands
