"""Values of a program on a tile of scores: one number, one for each row or column, or one for each score.

A value says what is known of it while lowering, and has the registers of a thread in MLIR once they are made.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu import wgmma
from jaxsoftmax._gpu.emit import constant, integer

# Kinds of values, as bits: what varies along rows, and along columns. A tile varies along both.
NUMBER, ROW, COLUMN, TILE = range(4)
EVERY, NATURAL = (-math.inf, math.inf), (0, math.inf)  # bounds
INDEX, BOOL = np.dtype(np.int32), np.dtype(bool)


class UnsupportedError(Exception):
    """Says which part of a function the kernels do not have."""


@dataclass(frozen=True)
class Value:
    """A value of a program on a tile.

    Attributes:
      kind: `NUMBER`, `ROW`, `COLUMN` or `TILE`.
      dtype: dtype in the program.
      registers: MLIR values of a thread, or None if it is only known that there will be some.
      known: the number, if it is known while lowering.
      bounds: the least and the largest number that an element may be. Those of floats are `EVERY` unless all elements are
        finite, where products of queries and keys are.
      line: how registers follow from one number of a thread, or None.
      of_score: True if it depends on scores.
      of_difference: True for a tile whose elements depend on the row less the column alone.
      factor: number by which registers have to be multiplied; bounds are those of the product. Factors that follow one another
        are one multiplication so.
      is_moderate: True if it stays far below the largest float32 where products of queries and keys do.
    """

    kind: int
    dtype: np.dtype
    registers: Sequence[Any] | None = None
    known: Any = None
    bounds: tuple[float, float] = EVERY
    line: "Line | None" = None
    of_score: bool = False
    of_difference: bool = False
    factor: float = 1.0
    is_moderate: bool = False

    @property
    def is_finite(self) -> bool:
        """True if all elements are finite where products of queries and keys are."""
        return max(map(abs, self.bounds)) < math.inf

    @property
    def is_natural(self) -> bool:
        """True if no element is negative."""
        return self.bounds[0] >= 0


@dataclass(frozen=True)
class Line:
    """Integers of a tile that are `start + offset + row_step * row + column_step * column`.

    Rows and columns count from a thread's first. A thread then has few different numbers, and computes what follows from equal
    ones once: with `query - key`, 34 of 64 in a tile with 128 columns.
    """

    start: Any  # int32, an MLIR value
    offset: int = 0
    row_step: int = 0
    column_step: int = 0

    def behind(self, columns: int) -> "Line":
        """Returns the line from a later column on."""
        return replace(self, offset=self.offset + columns * self.column_step)

    def plus(self, other: "Line", sign: int) -> "Line":
        """Adds another line, or subtracts it."""
        start = (arith.addi if sign > 0 else arith.subi)(self.start, other.start)
        steps = (a + sign * b for a, b in zip(self._numbers, other._numbers, strict=True))
        return Line(start, *steps)

    def times(self, factor: int) -> "Line":
        return Line(arith.muli(self.start, constant(factor)), *(factor * number for number in self._numbers))

    @property
    def _numbers(self) -> tuple[int, int, int]:
        return self.offset, self.row_step, self.column_step

    def offsets(self, kind: int, pairs: int) -> list[tuple[int, ...]]:
        """Lists for each register of a value of this kind what its elements are above `start`."""
        rows = [8 * self.row_step * i for i in range(2 if kind & ROW else 1)]
        columns = [8 * self.column_step * p for p in range(pairs if kind & COLUMN else 1)]
        steps = (0, self.column_step) if kind & COLUMN else (0,)
        return [tuple(self.offset + c + r + step for step in steps) for c in columns for r in rows]

    def registers(self, kind: int, pairs: int) -> list[Any]:
        """Returns the registers of a value of this kind. Equal ones are the same object."""
        return list(map(functools.cache(self._register), self.offsets(kind, pairs)))

    def float_registers(self, kind: int, pairs: int) -> list[Any]:
        """Returns the registers of a value of this kind as float32, for numbers that these are exact for."""
        start = arith.sitofp(ir.F32Type.get(), self.start)

        def register(offsets):
            numbers = [utils.c(float(offset), start.type) for offset in offsets]
            above = vector.from_elements(ir.VectorType.get((len(offsets),), start.type), numbers)
            return arith.addf(vector.broadcast(above.type, start), above)

        return list(map(functools.cache(register), self.offsets(kind, pairs)))

    def _register(self, offsets: tuple[int, ...]) -> Any:
        offsets = tuple((offset + 2**31) % 2**32 - 2**31 for offset in offsets)  # as int32 wraps around
        start = vector.broadcast(ir.VectorType.get((len(offsets),), integer(32)), self.start)
        above = utils.c(offsets[0], start.type) if len(offsets) == 1 else wgmma.constants([offsets])[0]
        return arith.addi(start, above)


def known_value(value: Any, dtype: Any) -> Value:
    number = np.asarray(value).reshape(()).astype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    exact = int(number) if is_integer else float(number)
    return Value(NUMBER, np.dtype(dtype), None, number, bounds=(exact, exact) if is_integer or np.isfinite(number) else EVERY)


def check_dtype(dtype):
    kinds = (jnp.bool_, jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32)
    if not any(dtype == kind for kind in (*kinds, jnp.float16, jnp.bfloat16, jnp.float32)):
        raise UnsupportedError(f"numbers of dtype {jnp.dtype(dtype).name}")


def is_float(dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


# MLIR.


def register_type(dtype):
    """Returns the type of an element in registers."""
    if is_float(dtype):
        return ir.F32Type.get()
    return integer(1) if dtype == BOOL else integer(8 * np.dtype(dtype).itemsize)


def typed(like, element):
    """Returns the type `element`, or a vector of it where `like` is one."""
    return ir.VectorType.get(like.shape, element) if isinstance(like, ir.VectorType) else element


def constant_of(known):
    """Makes an MLIR constant of a number that is known."""
    if is_float(known.dtype):
        return utils.c(float(known), ir.F32Type.get())
    bits = known if known.dtype == BOOL else known.view(f"i{known.dtype.itemsize}")
    return utils.c(int(bits), register_type(known.dtype))


def element_of(register, place):
    return llvm.extractelement(register, constant(place)) if isinstance(register.type, ir.VectorType) else register


def on_each(function, *registers):
    """Applies a function of MLIR scalars to each element of registers."""
    kind = registers[0].type
    if not isinstance(kind, ir.VectorType):
        return function(*registers)
    elements = [function(*(element_of(r, place) for r in registers)) for place in range(kind.shape[0])]
    return vector.from_elements(ir.VectorType.get(kind.shape, elements[0].type), elements)


def ptx_operation(instruction: str):
    """Returns an operation of float32 that is one instruction."""

    def scalar(*operands):
        names = ", ".join(f"${k}" for k in range(len(operands) + 1))
        f32 = ir.F32Type.get()
        return llvm.inline_asm(f32, list(operands), f"{instruction} {names};", "=f" + ",f" * len(operands))

    return functools.partial(on_each, scalar)


def contracted():
    """Returns the flag that lets LLVM join products and sums in multiply-adds."""
    return arith.FastMathFlags.contract


# Bounds.

MODERATE = 1e30


def as_natural(value: Value) -> Value:
    """Returns a value that is known to have no negative element."""
    low, high = value.bounds
    return replace(value, bounds=(max(low, 0), high))


def within(bounds, dtype) -> tuple[float, float]:
    """Returns bounds of a result, or those of its dtype where it may wrap around or be infinite."""
    if dtype == BOOL:
        return EVERY
    if is_float(dtype):
        return bounds if max(map(abs, bounds)) < MODERATE else EVERY
    info = np.iinfo(dtype)
    fits = info.min <= bounds[0] and bounds[1] <= info.max
    return bounds if fits else NATURAL if dtype.kind == "u" else EVERY
