"""What the kernels of attention have in common: what they compute, and how they address operands in global memory."""

import operator
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import schedule
from jaxsoftmax.ops.attention.operands import AXES, batch_of

ROWS = 64  # rows of a product of the tensor cores, which a warpgroup holds
SWIZZLED = 64  # columns of 16 bits that a swizzled tile of shared memory has: 128 bytes


class Arithmetic(NamedTuple):
    """Operations that count blocks, on integers that are not negative: numbers of Python, or arrays in a kernel."""

    divide: Callable[..., Any]
    minimum: Callable[..., Any]
    maximum: Callable[..., Any]
    where: Callable[..., Any]


HOST = Arithmetic(operator.floordiv, min, max, lambda test, a, b: a if test else b)
KERNEL = Arithmetic(lambda a, b: lax.div(jnp.int32(a), jnp.int32(b)), jnp.minimum, jnp.maximum, jnp.where)


@dataclass(frozen=True)
class AttentionKernel:
    """A kernel of attention for one problem: what it computes, and how its work is cut into tiles.

    Attributes:
      batch: sizes of the batch axes that the operands have together.
      query: T, N and H: rows of scores of a head, heads, and head size.
      key: S, K and H: keys, key heads, and head size.
      dtype: dtype of the queries.
      names: names of the operands that are present, and of the tables that XLA makes of them for the kernel.
      scale: factor of the products of queries and keys.
      window: numbers of keys before and after its own position that a query sees; None for a side without a limit.
      soft_cap: bound of the scores, or None.
      dropout_rate: share of the weights that dropout drops.
      multiprocessors: number of blocks of threads that run at a time.
      config: how a block of threads works.
      n_tiles: number of tiles.
      n_blocks: number of blocks of threads of a wave. Each works through several tiles.
      by_ticket: True if blocks of threads take tickets for tiles, because operands decide how long a tile takes.
    """

    batch: tuple[int, ...]
    query: tuple[int, int, int]
    key: tuple[int, int, int]
    dtype: Any
    names: frozenset[str]
    scale: float
    window: tuple[int | None, int | None]
    soft_cap: float | None
    dropout_rate: float
    multiprocessors: int
    config: Any

    # Subclasses say what follows from the others.
    n_tiles: int = field(init=False)
    n_blocks: int = field(init=False)
    by_ticket: bool = field(init=False)

    def _derive(self, n_tiles: int, **others: Any) -> None:
        """Sets the attributes that follow from the others."""
        derived = others | {"n_tiles": n_tiles, "n_blocks": min(self.multiprocessors, n_tiles)}
        for name, value in derived.items():
            object.__setattr__(self, name, value)

    def costs(self) -> tuple[int, ...]:
        """Counts the steps of each of the tiles of a head."""
        raise NotImplementedError

    def group(self, costs: tuple[int, ...]) -> int:
        """Returns the number of heads whose tiles are handed out together."""
        raise NotImplementedError

    def scratch(self) -> dict[str, Any]:
        """Describes the arrays and barriers in the shared memory of a block of threads."""
        raise NotImplementedError

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block of threads."""
        return schedule.bytes_of(self.scratch())


def shapes_of(types: Mapping[str, Any], target: Target) -> dict[str, Any]:
    """Returns the attributes of an `AttentionKernel` that follow from the types of the operands and from the GPU."""
    operands = {name: kind for name, kind in types.items() if name in AXES}
    shapes: dict[str, Any] = {name: types[name].shape[-3:] for name in ("query", "key")}
    shapes |= {"batch": batch_of(operands), "dtype": types["query"].dtype, "names": frozenset(types)}
    return shapes | {"multiprocessors": target.multiprocessors}


@dataclass(frozen=True)
class GlobalOperand:
    """An operand in global memory, as kernels address it.

    Attributes:
      index: function from the index of a batch entry to the index in the operand, which may have size 1 along batch axes.
      heads: number of heads of a mask or bias; 1 if it is the same for all.
      rows: number of its queries; 1 if it is the same for all.
      ref: the operand, `[entries, ...]`. Masks and biases are rows, `[entries * heads * rows, cols]`; segments are one line.
    """

    index: Callable[[Any], Any]
    heads: int = 1
    rows: int = 1
    ref: Any = None

    def __getitem__(self, at):
        """Loads an element. The first index is that of the batch entry."""
        b, *rest = at if isinstance(at, tuple) else (at,)
        return self.ref[(self.index(b), *rest)]

    @property
    def varies(self) -> tuple[bool, bool]:
        """True for each of queries and keys along which a mask or bias varies."""
        return self.rows > 1, self.ref.shape[1] > 1

    def row(self, b, head, query):
        """Returns the row of a mask or bias that belongs to a query."""
        entry = self.index(b) * self.heads + (head if self.heads > 1 else 0)
        return entry * self.rows + (query if self.rows > 1 else 0)


def laid_out(
    batch: tuple[int, ...], operands: Mapping[str, jax.Array]
) -> tuple[OrderedDict[str, jax.Array], dict[str, GlobalOperand]]:
    """Reshapes operands as kernels address them. Tables that XLA makes of operands are `[*batch, blocks, numbers]`."""
    arrays, records = OrderedDict(), {}
    for name, array in operands.items():
        batch_axes = array.ndim - (len(AXES[name]) if name in AXES else 2)
        sizes = array.shape[batch_axes:]
        if name in ("bias", "mask"):
            shape, heads_and_rows = (-1, sizes[-1]), sizes[:2]
        else:
            shape, heads_and_rows = ((-1,) if name.endswith("_segments") else (-1, *sizes)), ()
        arrays[name] = array.reshape(shape)
        records[name] = GlobalOperand(batch_index(batch, array.shape[:batch_axes]), *heads_and_rows)
    return arrays, records


def batch_index(batch: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """Returns a function from the index of a batch entry to the index in an operand whose batch axes have `shape`."""
    shape = (1,) * (len(batch) - len(shape)) + tuple(shape)
    if shape == batch:
        return lambda b: b

    def index(b):
        total, stride, below = jnp.int32(0), 1, 1
        for size, own in zip(reversed(batch), reversed(shape), strict=True):
            if own != 1:
                total += lax.rem(lax.div(b, jnp.int32(below)), jnp.int32(size)) * stride
            stride, below = stride * own, below * size
        return total

    return index
