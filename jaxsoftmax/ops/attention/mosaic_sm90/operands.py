"""What kernels of attention are called with: what is static, and operands in global memory, as kernels address them."""

import operator
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import schedule
from jaxsoftmax.ops.attention.operands import AXES, batch_of


class Arithmetic(NamedTuple):
    """The operations by which a plan counts blocks, on integers that are not negative: Python's numbers, or arrays."""

    divide: Callable[..., Any]
    minimum: Callable[..., Any]
    maximum: Callable[..., Any]
    where: Callable[..., Any]


HOST = Arithmetic(operator.floordiv, min, max, lambda test, a, b: a if test else b)
KERNEL = Arithmetic(lambda a, b: lax.div(jnp.int32(a), jnp.int32(b)), jnp.minimum, jnp.maximum, jnp.where)


@dataclass
class Call:
    """The static part of a call. The plan of a kernel adds what follows from it, and how tiles are handed out.

    Attributes:
      batch: all of it.
      query: lengths and sizes T, N and H.
      key: the same S, K and H.
      names: of the operands that are there.
      config: the kernel's `Config`.
    """

    batch: tuple[int, ...]
    query: tuple[int, int, int]
    key: tuple[int, int, int]
    names: frozenset[str]
    config: Any
    scale: float
    window: tuple[int | None, int | None]
    soft_cap: float | None
    dropout_rate: float

    def scratch(self, dtype: Any) -> dict[str, Any]:
        """Describes the arrays and barriers in shared memory, of a call whose queries have this dtype."""
        raise NotImplementedError

    def does_not_fit(self, dtype: Any, target: Target) -> str | None:
        """Returns why a block of threads cannot have its shared memory, in words, or None."""
        needed = schedule.bytes_of(self.scratch(dtype))
        if needed <= target.shared_memory:
            return None
        sizes = f"head sizes {self.query[2]} and {self.key[2]}"
        return f"a block for {sizes} needs {needed} bytes of shared memory, and has up to {target.shared_memory}"


def static_of(given) -> dict[str, Any]:
    """What the operands that are there say of a `Call`."""
    shapes = {name: given[name].shape[-3:] for name in ("query", "key")}
    operands = {name: operand for name, operand in given.items() if name in AXES}
    return shapes | {"batch": batch_of(operands), "names": frozenset(given)}


@dataclass(frozen=True)
class Operand:
    """An operand in global memory.

    Attributes:
      index: from the number of a batch entry to that of the operand's entry.
      heads: of a mask or bias, 1 if it is the same for all.
      rows: the same for its queries.
      ref: the operand, `[entries, ...]`; masks and biases are rows, `[entries * heads * rows, cols]`, segments one line.
    """

    index: Callable[[Any], Any]
    heads: int = 1
    rows: int = 1
    ref: Any = None

    def __getitem__(self, at):
        """An element: of the entry for a batch entry, which comes first."""
        b, *rest = at if isinstance(at, tuple) else (at,)
        return self.ref[(self.index(b), *rest)]

    @property
    def varies(self) -> tuple[bool, bool]:
        """Whether a mask or bias varies along queries and keys."""
        return self.rows > 1, self.ref.shape[1] > 1

    def row(self, b, head, query):
        """The row of a mask or bias for a query."""
        entry = self.index(b) * self.heads + (head if self.heads > 1 else 0)
        return entry * self.rows + (query if self.rows > 1 else 0)


def laid_out(batch: tuple[int, ...], given) -> tuple[OrderedDict[str, jax.Array], dict[str, Operand]]:
    """Operands as kernels address them, and how. What is made of operands, such as `ranges`, is `[*batch, blocks, numbers]`."""
    arrays, operands = OrderedDict(), {}
    for name, array in given.items():
        batch_axes = array.ndim - (len(AXES[name]) if name in AXES else 2)
        own = array.shape[batch_axes:]
        if name in ("bias", "mask"):
            shape, heads_and_rows = (-1, own[-1]), own[:2]
        else:
            shape, heads_and_rows = ((-1,) if name.endswith("_segments") else (-1, *own)), ()
        arrays[name] = array.reshape(shape)
        operands[name] = Operand(batch_index(batch, array.shape[:batch_axes]), *heads_and_rows)
    return arrays, operands


def batch_index(batch: tuple[int, ...], shape: tuple[int, ...]) -> Callable[[Any], Any]:
    """A function from the index of a batch entry to that in an operand with size 1 along some axes of the batch."""
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
