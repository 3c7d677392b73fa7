"""What the operands and results of a map are, written down once: batching, sharding and dispatch derive from it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

# The names of the last axes of an array, for sharding.
Axes = tuple[str | None, ...]


@dataclass(frozen=True)
class Operand:
    """One operand, or result.

    Attributes:
      name: by which implementations get it.
      axes: the names of its last axes, behind those of the batch. Axes of one name are sharded alike; those named None are
        whole on every device. Empty in a map whose operands all have the same axes: there an axis is named by its position.
      is_scores: whether it is as large as the scores. Kernels get it as it was before a cast to float32, and dispatch is told
        where XLA would not write it to memory.
      may_be_one: whether it may have size 1 along an axis of the batch along which others have more.
    """

    name: str
    axes: Axes = ()
    is_scores: bool = False
    may_be_one: bool = True

    def called(self, name: str) -> "Operand":
        """The same with another name: a tangent or a cotangent."""
        return replace(self, name=name)


@dataclass(frozen=True, eq=False)
class Operation:
    """What becomes a primitive: an op, or one of its derivatives.

    Attributes:
      op: the folder of `ops` in which its implementations are.
      name: of the primitive, and of the function in each implementation.
      operands: in their order; any but the first may be absent.
      types: `types(operands, **params)`, the shapes and dtypes of the results, from the operands by name.
      results: `results(**params)`, what the results are; None where they have the axes of the operands.
      linear: the names of the operands in which it is linear, all together.
      is_uncut: whether kernels run only on one device or inside a shard_map over all mesh axes. Elsewhere the reference runs,
        and XLA shards it.
      is_cut: whether the reference too runs on shards, as kernels do: of a map for which XLA would gather the batch.
      knows_machine: whether the reference gets a `machine`, on which XLA runs it.
      joined: the names of axes along which devices merge what they have, by the function of the map's name in the op's
        `across_devices`. Where operands all have the same axes they are those of the parameter `axes`.
    """

    op: str
    name: str
    operands: tuple[Operand, ...]
    types: Callable[..., Sequence[Any]]
    results: Callable[..., Sequence[Operand]] | None = None
    linear: tuple[str, ...] = ()
    is_uncut: bool = False
    is_cut: bool = False
    knows_machine: bool = False
    joined: tuple[str, ...] = ()

    # What derives from these: the operands by their names, and whether they and the results all have the same axes.
    by_name: dict[str, Operand] = field(init=False)
    is_aligned: bool = field(init=False)

    def __post_init__(self):
        object.__setattr__(self, "by_name", {operand.name: operand for operand in self.operands})
        object.__setattr__(self, "is_aligned", self.results is None)

    def axes(self, names: Sequence[str], results: int, **params: Any) -> tuple[list[Axes], list[Axes]]:
        """The names of the axes of the operands of these names, and of the results, which are so many."""
        out: list[Axes] = [()] * results
        if self.results is not None:
            out = [result.axes for result in self.results(**params)]
        return [self.by_name[name].axes for name in names], out
