"""Score and mask functions on a tile of scores, in the registers of a warpgroup.

A traced function is a program of scalars. Here it runs on a tile: its arguments are one number for a head, one for each row,
one for each column, or one for each score. Each operation is computed in the smallest of these kinds, once for its inputs, and
repeated over the tile where kinds meet. What follows from constants, or from positions that are not negative, is known while
lowering: `key // 64` is a shift.

All of it is one operation of the kernel, in MLIR, so that Mosaic has no layouts to infer. Tables stay in global memory. Loads
that belong to the head or to the rows are done once for a tile (`TileFunctions`), others where the scores are.

Floats have 32 bits in registers, and are rounded to 16 bits after each operation whose result has 16. A quotient is exact to
the last bit unless it depends on scores: others may become indices.
"""

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu import fused, wgmma
from jaxsoftmax._gpu.emit import SPLAT, address_of, constant, emit, integer
from jaxsoftmax.ops.attention.mosaic_sm90.common import LAYOUT, LOG2E, ROW_LAYOUT, ROWS, GlobalOperand
from jaxsoftmax.ops.attention.score_functions import POSITIONS, TracedFunction, inner_program, needed_eqns

# Kinds of values, as bits: what varies along rows, and along columns. A tile varies along both.
NUMBER, ROW, COLUMN, TILE = range(4)
# Columns that are evaluated at a time: values of columns need no registers after theirs. A kernel with both functions and head
# size 64 spills 728 bytes so, and 824 with all columns at once.
_STEP = 32
EVERY, NATURAL = (-math.inf, math.inf), (0, math.inf)  # bounds
NUMBERS = ("entries", "head_numbers", "query_numbers", "key_numbers")  # operands that number the arguments `POSITIONS`


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
      bounds: the least and the largest number that an element may be. Those of floats are infinite unless all elements are
        finite, where products of queries and keys are.
      line: how registers follow from one number of a thread, or None.
      of_score: True if it depends on scores.
      of_difference: True for a tile whose elements depend on the row less the column alone.
      factor: number by which registers have to be multiplied. Factors that follow one another are one multiplication so.
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
        made: dict[tuple[int, ...], Any] = {}
        for offsets in self.offsets(kind, pairs):
            if offsets not in made:
                made[offsets] = self._register(offsets)
        return [made[offsets] for offsets in self.offsets(kind, pairs)]

    def _register(self, offsets: tuple[int, ...]) -> Any:
        start = vector.broadcast(ir.VectorType.get((len(offsets),), integer(32)), self.start)
        above = utils.c(offsets[0], start.type) if len(offsets) == 1 else wgmma.constants([offsets])[0]
        return arith.addi(start, above)


@dataclass(frozen=True)
class View:
    """A part of a table: element `i` is at `offset + sum(i * strides)` of the flat table.

    `table` is its number, or None for a table whose elements are the numbers from 0 on.
    """

    table: int | None
    dtype: np.dtype  # of the table in memory
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: Value
    inside: Value | None = None  # false where the index is out of bounds, and elements are `fill`
    fill: Any = None


@dataclass(frozen=True)
class Indices:
    """An array of several indices, which only a gather takes."""

    values: tuple[Value, ...]


def _known(value: Any, dtype: Any) -> Value:
    number = np.asarray(value).reshape(()).astype(dtype)
    is_integer = jnp.issubdtype(dtype, jnp.integer)
    exact = int(number) if is_integer else float(number)
    return Value(NUMBER, np.dtype(dtype), None, number, bounds=(exact, exact) if is_integer or np.isfinite(number) else EVERY)


_INDEX, _BOOL = np.dtype(np.int32), np.dtype(bool)


class Evaluation:
    """Runs programs on a tile.

    Values without registers are only described, and so is what follows from them. An evaluation without tables makes no MLIR:
    it finds out what is unsupported, and which loads there are.
    """

    def __init__(self, columns: int, tables: Sequence[Any] | None = None, loaded: Mapping[int, Value] | None = None):
        """Starts an evaluation.

        Args:
          columns: number of columns of the tile.
          tables: for each table of the programs its address in global memory, an int64 MLIR value. None to describe values.
          loaded: results of loads, by their numbers in the order of evaluation.
        """
        self.columns, self.tables = columns, tables
        self.loaded = {} if loaded is None else dict(loaded)
        self.loads: list[Value] = []  # results of all loads so far

    # Programs.

    def run(self, program: ClosedJaxpr, arguments: Sequence[Any]) -> list[Value]:
        """Returns the results of a program, for arguments that are `Value` or `View`."""
        return [self.number(x) for x in self._run(program.jaxpr, [_literal(c) for c in program.consts], arguments)]

    def _run(self, jaxpr, constants, arguments):
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= zip(jaxpr.invars, arguments, strict=True)

        def read(atom):
            return _literal(atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in needed_eqns(jaxpr)[0]:
            name, operands = eqn.primitive.name, [read(v) for v in eqn.invars]
            if (inner := inner_program(eqn)) is not None:
                program, consts = inner
                results = self._run(program, [_literal(c) for c in consts], operands)
            elif name in _MOVES:
                results = [self._moved(eqn, *operands)]
            elif name in _OPERATIONS:
                (out,) = eqn.outvars
                _check_dtype(out.aval.dtype)
                results = [self._computed(name, eqn.params, out.aval, [self.number(x) for x in operands])]
            else:
                raise UnsupportedError(f"the operation {name}")
            values |= zip(eqn.outvars, results, strict=True)
        return [read(v) for v in jaxpr.outvars]

    def _computed(self, name, params, aval, operands) -> Value:
        if aval.size != 1:
            raise UnsupportedError(f"{name} of several elements")
        dtype = np.dtype(aval.dtype)
        if name in _FOLDS and all(x.known is not None for x in operands):
            with np.errstate(all="ignore"):
                return _known(_FOLDS[name](*(x.known for x in operands)), dtype)
        result = _OPERATIONS[name](self, operands, params, dtype)
        return replace(result, dtype=dtype)

    # Tables.

    def _moved(self, eqn, operand, *others):
        """Returns a part of a table, or of a number itself."""
        (out,), name, params = eqn.outvars, eqn.primitive.name, eqn.params
        shape = out.aval.shape
        if name == "concatenate":
            return Indices(tuple(self.number(x) for x in (operand, *others)))
        if isinstance(operand, Value):
            if out.aval.size != 1:
                raise UnsupportedError(f"{name} to several elements")
            return operand  # an array of one element is a number
        if not isinstance(operand, View):
            raise UnsupportedError(f"{name} of indices")
        view = operand
        if name == "reshape":
            if view.strides != _strides(view.shape) and out.aval.size != 1:
                raise UnsupportedError("a reshape of a part of a table")
            view = replace(view, shape=shape, strides=_strides(shape))
        elif name == "squeeze":
            kept = [i for i in range(len(view.shape)) if i not in params["dimensions"]]
            view = replace(view, shape=shape, strides=tuple(view.strides[i] for i in kept))
        elif name == "slice":
            start = sum(a * b for a, b in zip(params["start_indices"], view.strides, strict=True))
            steps = params["strides"] or (1,) * len(shape)
            strides = tuple(a * b for a, b in zip(view.strides, steps, strict=True))
            view = replace(view, shape=shape, strides=strides, offset=self.plus(view.offset, _known(start, _INDEX)))
        elif name == "dynamic_slice":
            view = self._sliced(view, [self.number(x) for x in others], range(len(view.shape)), shape)
        elif name == "gather":
            view = self._gathered(view, others[0], params, shape)
        else:
            raise UnsupportedError(f"{name} of a table")
        return self.number(view) if out.aval.size == 1 else view

    def _sliced(self, view, starts, axes, sizes) -> View:
        """Returns a slice of a table from `starts` on, along `axes`, moved inside of the table."""
        offset = view.offset
        for start, axis in zip(starts, axes, strict=True):
            last = view.shape[axis] - sizes[axis]
            offset = self.plus(offset, self.times(self.clamped(start, last), view.strides[axis]))
        return replace(view, shape=tuple(sizes), offset=offset)

    def _gathered(self, view, indices, params, shape) -> View:
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        starts = list(indices.values) if isinstance(indices, Indices) else [self.number(indices)]
        axes = numbers.start_index_map
        if len(starts) != len(axes) or numbers.operand_batching_dims:
            raise UnsupportedError("a gather of several elements")
        inside, fill = None, None
        if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            for start, axis in zip(starts, axes, strict=True):
                last = _known(view.shape[axis] - sizes[axis], _INDEX)
                is_in = self.compute("and", self.compute("ge", start, _known(0, start.dtype)), self.compute("le", start, last))
                inside = is_in if inside is None else self.compute("and", inside, is_in)
            fill = params["fill_value"]
        starts = [self.converted(start, _INDEX) for start in starts]
        sliced = self._sliced(view, starts, axes, sizes)
        kept = [i for i in range(len(view.shape)) if i not in numbers.collapsed_slice_dims]
        strides = tuple(view.strides[i] for i in kept)
        sliced = replace(sliced, shape=tuple(sizes[i] for i in kept), strides=strides)
        if sliced.shape != tuple(shape) and int(np.prod(shape)) != 1:
            raise UnsupportedError("a gather of several elements")
        return sliced if inside is None else replace(sliced, inside=inside, fill=fill)

    def number(self, x) -> Value:
        """Returns a value; loads the element of a table that a view of one element is."""
        if isinstance(x, Value):
            return x
        if not isinstance(x, View) or int(np.prod(x.shape)) != 1:
            raise UnsupportedError("an array of several elements")
        loaded = self.load(x)
        if x.inside is None or (x.inside.known is not None and x.inside.known):
            return loaded
        fill = x.fill
        if fill is None:
            info = None if loaded.dtype.kind in "fb" else np.iinfo(loaded.dtype)
            fill = np.nan if info is None else info.min if info.min else info.max
        return self.compute("select_n", x.inside, _known(fill, loaded.dtype), loaded)

    def load(self, view: View) -> Value:
        """Loads an element of a table. A float of 16 bits comes as float32."""
        index, dtype = view.offset, np.dtype(view.dtype)
        if view.table is None:
            return replace(index, dtype=dtype)
        wide = np.dtype(np.float32) if jnp.issubdtype(dtype, jnp.floating) else dtype
        result = self.loaded.get(len(self.loads))
        if result is None:
            registers = None
            if self.tables is not None and self._is_there(index):
                registers = self._elements(self.tables[view.table], dtype, index)
            result = Value(index.kind, wide, registers, of_score=index.of_score, of_difference=index.of_difference)
        self.loads.append(result)
        return result

    def _elements(self, address, dtype, index: Value) -> list[Any]:
        """Loads the elements of a line of numbers in memory. Those of equal numbers in a thread are loaded once."""
        kind = utils.dtype_to_ir_type(np.dtype(np.int8) if dtype == _BOOL else dtype)
        if index.line is None:
            places: list[Any] = self.registers(index, index.kind)
            keys, load = list(map(id, places)), functools.partial(_each, functools.partial(wgmma.load_at, address, kind))
        else:
            places = keys = index.line.offsets(index.kind, self.columns // 8)
            read = functools.cache(functools.partial(wgmma.load_at, address, kind, index.line.start))

            def load(offsets):
                elements = [read(offset) for offset in offsets]
                return vector.from_elements(ir.VectorType.get((len(offsets),), elements[0].type), elements)

        made: dict[Any, Any] = {}
        for key, place in zip(keys, places, strict=True):
            if key not in made:
                made[key] = self._widened(load(place), dtype)
        return [made[key] for key in keys]

    @staticmethod
    def _widened(register, dtype):
        """Returns what was loaded as the type that registers have for a dtype."""
        if dtype == _BOOL:
            return arith.cmpi(arith.CmpIPredicate.ne, register, utils.c(0, register.type))
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2:
            return arith.extf(_typed(register.type, ir.F32Type.get()), register)
        return register

    # Values.

    def _is_there(self, *values: Value) -> bool:
        return self.tables is not None and all(x.registers is not None or x.known is not None for x in values)

    def registers(self, value: Value, kind: int) -> list[Any]:
        """Returns the registers of a value of this kind, or of a smaller one: two of rows, or a vector for 8 columns."""
        own = value.registers
        if own is None:
            own = [_number(value.known)]
        if np.float32(value.factor) != 1:
            own = [arith.mulf(r, utils.c(value.factor, r.type), fastmath=_contracted()) for r in own]
        if value.kind == kind:
            return list(own)
        pairs = self.columns // 8
        if value.kind == NUMBER:
            (number,) = own
            vectors = ir.VectorType.get((1 if kind == ROW else 2,), number.type)
            return [vector.broadcast(vectors, number)] * {ROW: 2, COLUMN: pairs, TILE: 2 * pairs}[kind]
        if value.kind == ROW:
            wide = [vector.broadcast(ir.VectorType.get((2,), r.type.element_type), _element(r, 0)) for r in own]
            return wide * pairs
        return list(itertools.chain.from_iterable((register, register) for register in own))

    def apply(self, function: Callable[..., Any], dtype: Any, *values: Value, **more: Any) -> Value:
        """Applies a function of MLIR values to the registers of values."""
        kind = functools.reduce(int.__or__, (x.kind for x in values))
        flags: dict[str, Any] = {"of_score": any(x.of_score for x in values)} | more
        flags |= {"of_difference": kind == TILE and all(x.of_difference for x in values if x.kind != NUMBER)}
        described: Value = replace(Value(kind, np.dtype(dtype)), **flags)
        if not self._is_there(*values):
            return described
        columns = [self.registers(x, kind) for x in values]
        done: dict[Any, Any] = {}  # rows are repeated over the tile: equal operands have one result
        results = []
        for registers in zip(*columns, strict=True):
            key = tuple(map(id, registers))
            if key not in done:
                done[key] = (function(*registers), registers)
            results.append(done[key][0])
        return replace(described, registers=results)

    def compute(self, name: str, *operands: Value, dtype: Any = None, **params: Any) -> Value:
        """Computes an operation by its name in programs."""
        dtype = dtype or (bool if name in _COMPARISONS else operands[-1].dtype)
        return self._computed(name, params, jax.ShapeDtypeStruct((), dtype), list(operands))

    def described(self) -> "Evaluation":
        """Returns an evaluation of the same tile that makes no MLIR."""
        return Evaluation(self.columns)

    def line(self, value: Value) -> Line | None:
        """Returns how an integer follows from a number of the thread, or None."""
        if value.line is not None or value.kind != NUMBER or value.dtype != _INDEX or not self._is_there(value):
            return value.line
        return Line(self.registers(value, NUMBER)[0]) if value.known is None else Line(constant(0), int(value.known))

    def on_line(self, line: Line, like: Value) -> Value:
        """Returns the value of a line."""
        is_difference = line.row_step == -line.column_step
        registers = line.registers(like.kind, self.columns // 8)
        return replace(like, registers=registers, line=line, of_difference=is_difference and like.kind == TILE)

    def converted(self, value: Value, dtype: Any) -> Value:
        return value if value.dtype == dtype else self.compute("convert_element_type", value, dtype=dtype)

    def plus(self, a: Value, b: Value) -> Value:
        """Adds parts of an index, which are not negative."""
        if a.known is not None and a.known == 0:
            return b
        if b.known is not None and b.known == 0:
            return a
        return _natural(self.compute("add", a, b))

    def times(self, a: Value, factor: int) -> Value:
        return a if factor == 1 else _natural(self.compute("mul", a, _known(factor, a.dtype)))

    def clamped(self, index: Value, last: int) -> Value:
        """Returns an index moved to `[0, last]`, int32."""
        if last == 0:
            return _known(0, _INDEX)
        least, most = _known(0, index.dtype), _known(min(last, np.iinfo(index.dtype).max), index.dtype)
        return _natural(self.converted(self.compute("min", self.compute("max", index, least), most), _INDEX))

    def composed(self, function: Callable[..., Any], *values: Value) -> Value:
        """Runs a function of `jax.numpy` on values of one dtype."""
        (result,) = self.run(_composition(function, len(values)), list(values))
        return result

    def rounded(self, value: Value, dtype: Any) -> Value:
        """Rounds float32 to a float of 16 bits, which stays in 32."""
        if jnp.dtype(dtype).itemsize != 2:
            return replace(value, dtype=np.dtype(dtype))

        def rounded(x):
            return arith.extf(x.type, arith.truncf(_typed(x.type, utils.dtype_to_ir_type(np.dtype(dtype))), x))

        return self.apply(rounded, dtype, value)


@functools.cache
def _composition(function, count) -> ClosedJaxpr:
    with jax.enable_x64(False):
        return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), jnp.float32)] * count)


def _literal(value) -> Value:
    if np.size(value) != 1:
        raise UnsupportedError("a constant of several elements")
    dtype = jnp.result_type(value)
    _check_dtype(dtype)
    return _known(value, dtype)


def _check_dtype(dtype):
    kinds = (jnp.bool_, jnp.int8, jnp.int16, jnp.int32, jnp.uint8, jnp.uint16, jnp.uint32)
    if not any(dtype == kind for kind in (*kinds, jnp.float16, jnp.bfloat16, jnp.float32)):
        raise UnsupportedError(f"numbers of dtype {jnp.dtype(dtype).name}")


def _strides(shape) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))


def _is_float(dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


# MLIR.


def _type_of(dtype):
    """Returns the type of an element in registers."""
    if _is_float(dtype):
        return ir.F32Type.get()
    return integer(1) if dtype == _BOOL else integer(8 * np.dtype(dtype).itemsize)


def _typed(like, element):
    """Returns the type `element`, or a vector of it where `like` is one."""
    return ir.VectorType.get(like.shape, element) if isinstance(like, ir.VectorType) else element


def _number(known):
    """Makes an MLIR constant of a number that is known."""
    if _is_float(known.dtype):
        return utils.c(float(known), ir.F32Type.get())
    bits = known if known.dtype == _BOOL else known.view(f"i{known.dtype.itemsize}")
    return utils.c(int(bits), _type_of(known.dtype))


def _element(register, place):
    return llvm.extractelement(register, constant(place)) if isinstance(register.type, ir.VectorType) else register


def _each(function, *registers):
    """Applies a function of MLIR scalars to each element of registers."""
    kind = registers[0].type
    if not isinstance(kind, ir.VectorType):
        return function(*registers)
    elements = [function(*(_element(r, place) for r in registers)) for place in range(kind.shape[0])]
    return vector.from_elements(ir.VectorType.get(kind.shape, elements[0].type), elements)


def _ptx(instruction: str):
    """Returns an operation of float32 that is one instruction."""

    def scalar(*operands):
        names = ", ".join(f"${k}" for k in range(len(operands) + 1))
        f32 = ir.F32Type.get()
        return llvm.inline_asm(f32, list(operands), f"{instruction} {names};", "=f" + ",f" * len(operands))

    return functools.partial(_each, scalar)


def _contracted():
    """Returns the flag of operations of which LLVM may make multiply-adds."""
    return arith.FastMathFlags.contract


# Bounds.

_MODERATE = 1e30


def _natural(value: Value) -> Value:
    """Returns a value that is known to have no negative element."""
    low, high = value.bounds
    return replace(value, bounds=(max(low, 0), high))


def _within(bounds, dtype) -> tuple[float, float]:
    """Returns bounds of a result, or those of its dtype where it may wrap around or be infinite."""
    if dtype == _BOOL:
        return EVERY
    if _is_float(dtype):
        return bounds if max(map(abs, bounds)) < _MODERATE else EVERY
    info = np.iinfo(dtype)
    fits = info.min <= bounds[0] and bounds[1] <= info.max
    return bounds if fits else NATURAL if dtype.kind == "u" else EVERY


def _bounds_of_sum(a, b):
    return a[0] + b[0], a[1] + b[1]


def _bounds_of_difference(a, b):
    return a[0] - b[1], a[1] - b[0]


def _bounds_of_product(a, b):
    products = [x * y if x and y else 0 for x in a for y in b]
    return min(products), max(products)


# Operations: functions of an evaluation, values, parameters and the dtype of the result.


def _elementwise(of_floats=None, of_signed=None, of_unsigned=None, of_bools=None, bounds=None, keeps_natural=False):
    """Makes an operation of functions of MLIR, by the dtype of the operands. Without one for signed integers there is none.

    `bounds` returns those of a result from those of the operands. With `keeps_natural` it is not negative if no operand is, and
    `of_unsigned` serves then.
    """

    def operation(evaluation, operands, params, dtype):
        kind = operands[-1].dtype
        are_natural = all(x.is_natural for x in operands)
        if _is_float(kind):
            function = of_floats
            if function in _CONTRACTED and any(x.of_score for x in operands):  # others may become indices
                function = functools.partial(function, fastmath=_contracted())
        elif kind == _BOOL:
            function = of_bools
        else:
            is_unsigned = kind.kind == "u" or (are_natural and keeps_natural)
            function = of_unsigned if is_unsigned and of_unsigned is not None else of_signed
        if function is None:
            raise UnsupportedError(f"an operation of dtype {kind.name}")
        limits = NATURAL if are_natural and keeps_natural else EVERY
        if bounds is not None:
            limits = _within(bounds(*(x.bounds for x in operands)), np.dtype(dtype))
        result = evaluation.apply(function, dtype, *operands, bounds=limits)
        return evaluation.rounded(result, dtype) if _is_float(dtype) else result

    return operation


_CONTRACTED = (arith.addf, arith.subf, arith.mulf)


def _summed(sign):
    """Makes an addition, or with -1 a subtraction. Lines stay lines."""
    functions = (arith.addf, arith.addi) if sign > 0 else (arith.subf, arith.subi)
    operation = _elementwise(*functions, bounds=_bounds_of_sum if sign > 0 else _bounds_of_difference)

    def add(evaluation, operands, params, dtype):
        lines = [evaluation.line(x) for x in operands]
        if None in lines or not any(x.line for x in operands):
            return operation(evaluation, operands, params, dtype)
        return evaluation.on_line(lines[0].plus(lines[1], sign), operation(evaluation.described(), operands, params, dtype))

    return add


def _multiplied(evaluation, operands, params, dtype):
    """Multiplies. A factor of scores that is known waits for the next one; a line stays a line."""
    for x, y in (operands, operands[::-1]):
        if y.known is None:
            continue
        if x.of_score and dtype == np.float32 and 1e-30 < abs(factor := x.factor * float(y.known)) < 1e30:
            return replace(x, factor=factor, bounds=_within(_bounds_of_product(x.bounds, y.bounds), dtype))
        if x.line is not None:
            described = _PRODUCT(evaluation.described(), operands, params, dtype)
            return evaluation.on_line(x.line.times(int(y.known)), described)
    return _PRODUCT(evaluation, operands, params, dtype)


_PRODUCT = _elementwise(arith.mulf, arith.muli, bounds=_bounds_of_product)


def _compared(name, of_floats, of_signed, of_unsigned):
    ordered, signed, unsigned = (
        functools.partial(arith.cmpf, getattr(arith.CmpFPredicate, of_floats)),
        functools.partial(arith.cmpi, getattr(arith.CmpIPredicate, of_signed)),
        functools.partial(arith.cmpi, getattr(arith.CmpIPredicate, of_unsigned)),
    )
    operation = _elementwise(ordered, signed, unsigned, unsigned)

    def compare(evaluation, operands, params, dtype):
        (a_low, a_high), (b_low, b_high) = (x.bounds for x in operands)
        answers = {  # whether it is so for all numbers within bounds, and for none: indexing asks whether an index is below 0
            "ge": (a_low >= b_high, a_high < b_low),
            "gt": (a_low > b_high, a_high <= b_low),
            "le": (a_high <= b_low, a_low > b_high),
            "lt": (a_high < b_low, a_low >= b_high),
        }
        if name in answers and not _is_float(operands[0].dtype) and any(answers[name]):
            return _known(answers[name][0], bool)
        if all(x.line is not None and x.kind != TILE for x in operands) and operands[0].kind != operands[1].kind:
            difference = evaluation.compute("sub", *operands)
            if difference.bounds != EVERY:  # it does not wrap around, and has fewer different elements
                operands = [difference, _known(0, _INDEX)]
        return operation(evaluation, operands, params, dtype)

    return compare


def _divided(evaluation, operands, params, dtype):
    a, b = operands
    if not _is_float(dtype):
        return _elementwise(None, arith.divsi, arith.divui, keeps_natural=True)(evaluation, operands, params, dtype)
    if b.known is not None and np.frexp(np.float32(b.known))[0] == 0.5 and 1e-30 < abs(b.known) < 1e30:
        result = evaluation.compute("mul", a, _known(1 / np.float32(b.known), dtype))
    elif not (a.of_score or b.of_score):
        result = evaluation.apply(arith.divf, dtype, a, b)
    elif b.known is not None and 1e-30 < abs(b.known) < 1e30:
        result = evaluation.compute("mul", a, _known(np.float32(1) / np.float32(b.known), np.float32), dtype=np.float32)
    else:
        result = evaluation.apply(_ptx("div.full.f32"), dtype, a, b)
    return evaluation.rounded(result, dtype)


def _selected(evaluation, operands, params, dtype):
    if len(operands) != 3 or operands[0].dtype != _BOOL:
        raise UnsupportedError("a selection among several cases")
    test, no, yes = operands
    if test.known is not None:
        return yes if test.known else no
    flags: dict[str, Any] = {"bounds": (min(no.bounds[0], yes.bounds[0]), max(no.bounds[1], yes.bounds[1]))}
    for x, y in ((no, yes), (yes, no)):
        if x.factor > 0 and y.known is not None and (y.known == 0 or np.isinf(y.known)):  # which a factor does not change
            flags |= {"factor": x.factor, "is_moderate": x.is_moderate and y.known <= 0}
            no, yes = replace(no, factor=1.0), replace(yes, factor=1.0)
            break
    return evaluation.apply(lambda p, a, b: arith.select(p, b, a), dtype, test, no, yes, **flags)


def _converted(evaluation, operands, params, dtype):
    (x,), apply = operands, evaluation.apply
    old, new = x.dtype, np.dtype(dtype)
    if old == new:
        return x
    element = functools.partial(_type_of, new)
    if new == _BOOL:
        return evaluation.compute("ne", x, _known(0, old))
    if _is_float(new):
        if _is_float(old):
            narrower = new.itemsize == 2
            return evaluation.rounded(x, new) if narrower else x
        convert = arith.sitofp if old.kind == "i" else arith.uitofp
        result = apply(lambda r: convert(_typed(r.type, element()), r), new, x, bounds=_within(x.bounds, new))
        return evaluation.rounded(result, new)
    if _is_float(old):
        convert = arith.fptosi if new.kind == "i" else arith.fptoui
        if new.itemsize < 4:
            info = np.iinfo(new)
            x = evaluation.compute("clamp", _known(info.min, old), x, _known(info.max, old))
        return apply(lambda r: convert(_typed(r.type, element()), r), new, x)
    if new.itemsize == old.itemsize and old != _BOOL:
        known = None if x.known is None else x.known.astype(new)
        return replace(x, dtype=new, line=None, bounds=_within(x.bounds, new), known=known)
    convert = arith.trunci if new.itemsize < old.itemsize else arith.extsi if old.kind == "i" else arith.extui
    own = (0, 1) if old == _BOOL else (max(x.bounds[0], np.iinfo(old).min), min(x.bounds[1], np.iinfo(old).max))
    return apply(lambda r: convert(_typed(r.type, element()), r), new, x, bounds=_within(own, new))


def _magnitude(evaluation, operands, params, dtype):
    (x,) = operands
    if x.is_natural or x.dtype.kind == "u":
        return x
    return _natural(_elementwise(_ptx("abs.f32"), math_dialect.absi)(evaluation, operands, params, dtype))


def _negated(evaluation, operands, params, dtype):
    (x,) = operands
    if x.of_score and dtype == np.float32:
        return replace(x, factor=-x.factor, bounds=_bounds_of_difference((0, 0), x.bounds))
    if not _is_float(dtype):
        return evaluation.compute("sub", _known(0, dtype), x)
    return _elementwise(arith.negf)(evaluation, operands, params, dtype)


def _sign(evaluation, operands, params, dtype):
    (x,), zero = operands, _known(0, operands[0].dtype)
    is_above = evaluation.converted(evaluation.compute("gt", x, zero), dtype)
    if x.is_natural or dtype.kind == "u":
        return _natural(is_above)
    result = evaluation.compute("sub", is_above, evaluation.converted(evaluation.compute("lt", x, zero), dtype))
    return evaluation.compute("select_n", evaluation.compute("ne", x, x), result, x) if _is_float(dtype) else result


def _inverted(evaluation, operands, params, dtype):
    ones = 1 if dtype == _BOOL else -1
    return evaluation.apply(lambda x: arith.xori(x, utils.c(ones, x.type)), dtype, *operands)


def _power(evaluation, operands, params, dtype):
    (x,), y = operands, params["y"]
    if y == 0:
        return _known(1, dtype)
    factor, result, rest = x, None, abs(y)
    while rest:
        if rest & 1:
            result = factor if result is None else evaluation.compute("mul", result, factor)
        rest >>= 1
        factor = evaluation.compute("mul", factor, factor) if rest else factor
    return result if y > 0 else evaluation.compute("div", _known(1, dtype), result)


def _shifted(function, natural=False):
    """Makes a shift, which gives 0, or the sign, where it is by all bits or more."""

    def shift(evaluation, operands, params, dtype):
        x, by = operands
        bits = 8 * x.dtype.itemsize
        is_arithmetic = function is arith.shrsi
        if by.known is None or not 0 <= by.known < bits:
            most = _known(bits - 1, by.dtype)
            unsigned = np.dtype(f"u{by.dtype.itemsize}")
            as_unsigned = replace(by, dtype=unsigned, known=None if by.known is None else by.known.astype(unsigned))
            is_far = evaluation.compute("gt", as_unsigned, _known(bits - 1, unsigned))
            near = evaluation.apply(function, dtype, x, evaluation.compute("select_n", is_far, by, most))
            return near if is_arithmetic else evaluation.compute("select_n", is_far, near, _known(0, dtype))
        return evaluation.apply(function, dtype, x, by, bounds=NATURAL if natural and x.is_natural else EVERY)

    return shift


def _anded(evaluation, operands, params, dtype):
    a, b = operands
    if dtype == _BOOL:
        for x, y in ((a, b), (b, a)):
            if x.known is not None:
                return y if x.known else x
    highs = [x.bounds[1] for x in operands if x.is_natural]
    return evaluation.apply(arith.andi, dtype, a, b, bounds=(0, min(highs)) if highs else EVERY)


def _ored(evaluation, operands, params, dtype):
    a, b = operands
    if dtype == _BOOL:
        for x, y in ((a, b), (b, a)):
            if x.known is not None:
                return x if x.known else y
    return evaluation.apply(arith.ori, dtype, a, b, bounds=NATURAL if a.is_natural and b.is_natural else EVERY)


def _extreme(choose, of_floats, of_signed, of_unsigned):
    """Makes the larger of two numbers, with `max` to choose bounds, or the smaller one."""
    operation = _elementwise(_ptx(of_floats), of_signed, of_unsigned, keeps_natural=True)

    def extreme(evaluation, operands, params, dtype):
        for x, y in (operands, operands[::-1]) if not _is_float(dtype) else ():
            if x.bounds[0] >= y.bounds[1]:  # nothing is to be chosen
                return x if choose is max else y
        lows, highs = zip(*(x.bounds for x in operands), strict=True)
        return replace(operation(evaluation, operands, params, dtype), bounds=(choose(lows), choose(highs)))

    return extreme


def _clamped(evaluation, operands, params, dtype):
    low, x, high = operands
    return evaluation.compute("min", evaluation.compute("max", x, low), high)


def _composite(function, exact=None, is_bounded=False):
    """Makes an operation of a function of `jax.numpy` in float32.

    `exact`, of MLIR, takes its place where no score is in it. With `is_bounded` results are at most 1.
    """

    def operation(evaluation, operands, params, dtype):
        if params.get("accuracy") is not None:
            raise UnsupportedError("an accuracy that is asked for")
        operands = [evaluation.converted(x, np.float32) for x in operands]
        if exact is not None and not any(x.of_score for x in operands):
            result = evaluation.apply(exact, np.float32, *operands)
        else:
            result = evaluation.composed(function, *operands)
        result = replace(evaluation.rounded(result, dtype), is_moderate=is_bounded)
        is_finite = is_bounded and all(x.is_moderate or x.bounds != EVERY for x in operands)
        return replace(result, bounds=(-1, 1)) if is_finite else result

    return operation


def _unary(function, exact=None):
    """Makes an operation of one float. `exact` takes the place of `function` where no score is in it."""

    def operation(evaluation, operands, params, dtype):
        if params.get("accuracy") is not None:
            raise UnsupportedError("an accuracy that is asked for")
        (x,) = operands
        used = function if exact is None or x.of_score else exact
        return evaluation.rounded(evaluation.apply(used, dtype, x), dtype)

    return operation


def _round(evaluation, operands, params, dtype):
    is_even = params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return _unary(math_dialect.roundeven if is_even else math_dialect.round)(evaluation, operands, {}, dtype)


def _exp(x):
    return jnp.exp2(x * LOG2E)


def _log(x):
    return lax.log2(x) * np.float32(1 / LOG2E) if hasattr(lax, "log2") else jnp.log(x)


def _log1p(x):
    whole = 1 + x
    ratio = jnp.log(whole) * (x / jnp.where(whole == 1, 1.0, whole - 1))
    return jnp.where((whole == 1) | (x == jnp.inf), x, ratio)


def _expm1(x):
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return jnp.where(jnp.abs(x) < 0.1, series, jnp.exp(x) - 1)


def _logistic(x):
    return fused.reciprocal(1 + jnp.exp2(x * -LOG2E))


def _raised(x, y):
    size = jnp.exp2(y * (jnp.log(jnp.abs(x)) * LOG2E))
    half = y * 0.5
    is_whole, is_odd = jnp.floor(y) == y, jnp.floor(half) != half
    below = jnp.where(is_whole, jnp.where(is_odd, -size, size), jnp.nan)
    return jnp.where((y == 0) | (x == 1), 1.0, jnp.where(x < 0, below, size))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
_MOVES = ("reshape", "squeeze", "slice", "dynamic_slice", "gather", "broadcast_in_dim", "concatenate", "expand_dims")
_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _summed(1),
    "add_any": _summed(1),
    "sub": _summed(-1),
    "mul": _multiplied,
    "div": _divided,
    "rem": _elementwise(None, arith.remsi, arith.remui, keeps_natural=True),
    "neg": _negated,
    "abs": _magnitude,
    "sign": _sign,
    "max": _extreme(max, "max.NaN.f32", arith.maxsi, arith.maxui),
    "min": _extreme(min, "min.NaN.f32", arith.minsi, arith.minui),
    "clamp": _clamped,
    "eq": _compared("eq", "OEQ", "eq", "eq"),
    "ne": _compared("ne", "UNE", "ne", "ne"),
    "lt": _compared("lt", "OLT", "slt", "ult"),
    "le": _compared("le", "OLE", "sle", "ule"),
    "gt": _compared("gt", "OGT", "sgt", "ugt"),
    "ge": _compared("ge", "OGE", "sge", "uge"),
    "and": _anded,
    "or": _ored,
    "xor": _elementwise(None, arith.xori, arith.xori, arith.xori),
    "not": _inverted,
    "shift_left": _shifted(arith.shli),
    "shift_right_logical": _shifted(arith.shrui, natural=True),
    "shift_right_arithmetic": _shifted(arith.shrsi, natural=True),
    "select_n": _selected,
    "convert_element_type": _converted,
    "copy": lambda evaluation, operands, params, dtype: operands[0],
    "stop_gradient": lambda evaluation, operands, params, dtype: operands[0],
    "copy_p": lambda evaluation, operands, params, dtype: operands[0],
    "integer_pow": _power,
    "square": lambda evaluation, operands, params, dtype: evaluation.compute("mul", *operands, *operands),
    "one_minus_square": _composite(lambda x: (1 + x) * (1 - x)),
    "is_finite": lambda evaluation, operands, params, dtype: evaluation.compute(
        "lt", evaluation.compute("abs", *operands), _known(np.inf, operands[0].dtype)
    ),
    "floor": _unary(math_dialect.floor),
    "ceil": _unary(math_dialect.ceil),
    "round": _round,
    "exp2": _unary(_ptx("ex2.approx.ftz.f32")),
    "exp": _composite(_exp, exact=math_dialect.exp),
    "log2": _unary(_ptx("lg2.approx.f32"), exact=math_dialect.log2),
    "log": _composite(_log, exact=math_dialect.log),
    "log1p": _composite(_log1p),
    "expm1": _composite(_expm1),
    "tanh": _composite(fused.tanh, is_bounded=True),
    "logistic": _composite(_logistic, is_bounded=True),
    "pow": _composite(_raised),
    "sqrt": _unary(_ptx("sqrt.approx.f32"), exact=math_dialect.sqrt),
    "rsqrt": _unary(_ptx("rsqrt.approx.f32")),
    "approximate_reciprocal": _unary(_ptx("rcp.approx.ftz.f32")),
}


def _quotient(a, b):
    if _is_float(np.asarray(a).dtype):
        return np.divide(a, b)
    quotient = abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1) if b != 0 else -1
    return np.int64(quotient)  # which wraps around in fewer bits


_FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": lambda a, b: np.fmod(a, b) if b != 0 or _is_float(np.asarray(a).dtype) else a,
    "floor": np.floor,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": lambda x: ~x,
    "select_n": lambda test, no, yes: yes if test else no,
    "convert_element_type": lambda x: x,
}


# Functions of a kernel.


@dataclass(frozen=True)
class Function:
    """A program of a score or mask function, as a kernel runs it: the function itself, or its value and slope.

    Attributes:
      program: takes what `TracedFunction.program` takes.
      tables: names of the operands that are its tables.
      takes_score: True if it takes a score before `POSITIONS`.
      used: names of the arguments that it reads.
      gradient: operand to which the derivatives by a table are added, or None. The program is then that of a `TableLoad`.
    """

    program: ClosedJaxpr
    tables: tuple[str, ...]
    takes_score: bool
    used: frozenset[str]
    gradient: str | None = None

    @classmethod
    def of(cls, function: TracedFunction, program: ClosedJaxpr | None = None) -> "Function":
        """Returns a function, or another program of its arguments."""
        return cls(program or function.program, function.table_names, function.takes_score, function.used)

    @property
    def operands(self) -> tuple[str, ...]:
        """Names of the operands that it reads where they are present."""
        numbers = (name for name, argument in zip(NUMBERS, POSITIONS, strict=True) if argument in self.used)
        return (*self.tables, *numbers, *([] if self.gradient is None else [self.gradient]))


def reason_against(function: Function, types: Mapping[str, Any]) -> str | None:
    """Returns why kernels do not run a function of operands of these types, or None."""
    try:
        _described(function, types, 64)
    except UnsupportedError as problem:
        return f"kernels have no functions with {problem}"
    return None


def factor_of_changed(
    types: Mapping[str, Any], *, scale: float, score_mod: TracedFunction | None = None, **options: Any
) -> float | None:
    """Returns the factor of what `TileFunctions.changed` returns, or None for 1 where scores may be large.

    Args:
      types: types of the operands by name.
      scale: factor of the products.
      score_mod: the score function, or None.
      options: other options of `AttentionProblem`.
    """
    if score_mod is None:
        return None
    try:
        return _without_factor(_described(Function.of(score_mod), types, ROWS, scale)[0][0])[1]
    except UnsupportedError:  # `reason_against` says why
        return None


def is_finite(function: Function, types: Mapping[str, Any]) -> bool:
    """Tells whether the results of a function of operands of these types are finite where products of queries and keys are."""
    try:
        return all(result.bounds != EVERY for result in _described(function, types, ROWS)[0])
    except UnsupportedError:
        return False


def loads_tiles(function: Function, types: Mapping[str, Any]) -> bool:
    """Returns True if a function of operands of these types reads an element of a table for each score."""
    try:
        return any(load.kind == TILE for load in _described(function, types, 64)[1])
    except UnsupportedError:
        return False


def _described(
    function: Function, types: Mapping[str, Any], columns: int, scale: float = 1.0
) -> tuple[list[Value], list[Value]]:
    """Describes the results, and all loads, of a function of operands of these types."""
    dtypes = {name: types[name].dtype for name in function.operands if name in types}
    for dtype in dtypes.values():
        _check_dtype(dtype)
    if any(types[name].shape[-1] >= 2**31 for name in dtypes):
        raise UnsupportedError("tables of 2**31 elements or more")
    evaluation = Evaluation(columns)
    row, column = (Value(kind, _INDEX, bounds=NATURAL) for kind in (ROW, COLUMN))
    has_offset = "query_offset" in types
    lengths = types["query"].shape[-3], types["key"].shape[-3]
    # It makes no difference to loads and operations which of both the rows are, except to their kinds.
    arguments = _arguments(function, evaluation, dtypes, row, column, lengths, has_offset, score=_score(scale))
    return evaluation.run(function.program, arguments), evaluation.loads


def _arguments(function, evaluation, dtypes, query, key, lengths, offset, head=None, score=None) -> list[Any]:
    """Returns the arguments of a program: views of tables, the score, and positions.

    Args:
      function: the function.
      evaluation: evaluation that will run its program.
      dtypes: dtypes of its operands that are present, by name, in the order of the addresses of tables.
      query: indices of queries, without an offset.
      key: indices of keys.
      lengths: numbers of queries and keys.
      offset: position of query 0, a value, or a bool: whether there will be one.
      head: number of the head, in the kernel, or None if it is only known that there will be one.
      score: scores, or None likewise.
    """
    places, number = list(dtypes), Value(NUMBER, _INDEX, bounds=NATURAL)
    zero = _known(0, _INDEX)

    def view(name, shape, start=zero):
        return View(places.index(name), dtypes[name], shape, _strides(shape), start)

    arguments: list[Any] = []
    for name, variable in zip(function.tables, function.program.jaxpr.invars, strict=False):
        arguments.append(view(name, variable.aval.shape))
    if function.gradient is not None:
        shape = function.program.jaxpr.invars[len(function.tables)].aval.shape
        arguments.append(View(None, _INDEX, shape, _strides(shape), zero))
    if function.takes_score:
        arguments.append(score or _score(1.0))
    position = query
    if offset is not False:
        added = number if offset is True else offset
        position = evaluation.compute("add", query, added)
    others = {"batch": zero, "head": head or number, "query_index": position, "key_index": key}
    starts = {"entries": zero, "head_numbers": head or number}
    starts |= {
        "query_numbers": evaluation.clamped(query, lengths[0] - 1),
        "key_numbers": evaluation.clamped(key, lengths[1] - 1),
    }
    for name, argument in zip(NUMBERS, POSITIONS, strict=True):
        if name in dtypes:
            others[argument] = evaluation.number(view(name, (1,), starts[name]))
    return [*arguments, *(others[name] for name in POSITIONS)]


def _score(factor: float) -> Value:
    """Describes scores, which are products of queries and keys times a factor."""
    return Value(TILE, np.dtype(np.float32), of_score=True, factor=factor, is_moderate=True)


def _without_factor(changed: Value) -> tuple[Value, float | None]:
    """Takes the factor from what a score function returns. None stands for 1 where scores may be large."""
    return (replace(changed, factor=1.0), changed.factor) if changed.is_moderate and changed.factor > 0 else (changed, None)


class TileFunctions:
    """Score and mask functions on the rows of a tile, one block of columns after the other.

    Rows are queries and columns keys, or the other way round.
    """

    def __init__(
        self,
        functions: Mapping[str, Function],
        operands: Mapping[str, GlobalOperand],
        lengths: tuple[int, int],
        columns: int,
        *,
        b,
        head,
        first,
        offset=None,
        rows_are_queries: bool = True,
        heads_per_query: int = 1,
        scale: float = 1.0,
        ends: tuple[float, float] = (math.inf, math.inf),
    ):
        """Loads what belongs to the head and to the rows.

        Args:
          functions: functions by name.
          operands: operands of the kernel by name.
          lengths: numbers of queries and keys.
          columns: columns of a block.
          b: batch entry.
          head: number of the query head; of the key head where rows of several heads are folded.
          first: index of the first row.
          offset: position of query 0, or None for 0.
          rows_are_queries: True if rows are queries, False if they are keys.
          heads_per_query: query heads that have a row of each query, folded as `FoldedRows` says.
          scale: factor of the products that are handed over as scores.
          ends: index behind the last row and the last column of all tiles.
        """
        self.scale, self.bounds = scale, tuple((0, end - 1) for end in ends)
        self.functions, self.operands, self.lengths, self.columns = functions, operands, lengths, columns
        self.b, self.head, self.first, self.offset, self.rows_are_queries = b, head, first, offset, rows_are_queries
        self.heads_per_query = heads_per_query
        self._loaded = {name: self._load(function) for name, function in functions.items()}

    def changed(self, s: jax.Array, start) -> jax.Array:
        """Returns what the score function makes of products from column `start` on, except for its `result_factor`."""
        (changed,) = self.results("score_mod", s, start)
        return changed

    def hidden(self, s: jax.Array, start, hidden: float = -jnp.inf, name: str = "mask_mod") -> jax.Array:
        """Returns scores or weights from column `start` on, with `hidden` where the mask function hides the key."""

        def select(evaluation, results, score):
            (seen,), score = results, replace(score, factor=1.0)
            return [evaluation.compute("select_n", seen, _known(hidden, np.float32), score)]

        (result,) = self._run(name, s, start, select, 1)
        return result

    def results(self, name: str, s: jax.Array, start) -> list[jax.Array]:
        """Returns all results of a function, float32 tiles. The first one is that of `changed`."""
        count = len(self.functions[name].program.jaxpr.outvars)

        def results(evaluation, results, score):
            return [_without_factor(results[0])[0], *results[1:]]

        return self._run(name, s, start, results, count)

    def add(self, name: str, values: jax.Array, start) -> None:
        """Adds derivatives to that of a table, in float32, in any order.

        Args:
          name: name of a function with a `gradient`.
          values: derivatives by the results of the score function, from column `start` on. The program may have a factor.
          start: first column.
        """
        function = self.functions[name]
        address = self._present(function).index(str(function.gradient))

        def add(evaluation, results, values):
            (place, *factors), values = results, replace(values, factor=1.0)
            for factor in factors:
                if factor.known is None or factor.known != 1:
                    product, zero = evaluation.compute("mul", values, factor), _known(0, np.float32)
                    values = evaluation.compute("select_n", evaluation.compute("eq", values, zero), product, zero)
            places, elements = evaluation.registers(place, place.kind), evaluation.registers(values, TILE)
            varies = bool(place.kind & ROW), bool(place.kind & COLUMN)
            wgmma.add_at(evaluation.tables[address], places, elements, varies=varies, along_diagonals=place.of_difference)
            return []

        self._evaluate(function, values, start, self._loaded[name], add, None)

    def factor(self, name: str) -> float | None:
        """Returns what `factor_of_changed` returns for a function."""
        (changed, *_), _ = self._described(self.functions[name])
        return _without_factor(changed)[1]

    def _present(self, function):
        return [name for name in function.operands if name in self.operands]

    def _described(self, function) -> tuple[list[Value], list[Value]]:
        rows, columns = (Value(k, _INDEX, bounds=b) for k, b in zip((ROW, COLUMN), self.bounds, strict=True))
        evaluation = Evaluation(self.columns)
        arguments = self._arguments(function, evaluation, rows, columns, score=_score(self.scale))
        return evaluation.run(function.program, arguments), evaluation.loads

    def _arguments(self, function, evaluation, rows, columns, offset=None, head=None, score=None):
        dtypes = {name: jnp.dtype(self.operands[name].ref.dtype) for name in self._present(function)}
        query, key = (rows, columns) if self.rows_are_queries else (columns, rows)
        offset = (self.offset is not None) if offset is None else offset
        if (count := self.heads_per_query) > 1:  # each row has a head of its own
            first = evaluation.times(head or Value(NUMBER, _INDEX, bounds=NATURAL), count)
            query, place = (evaluation.compute(name, rows, _known(count, _INDEX)) for name in ("div", "rem"))
            head = evaluation.plus(first, place)
        if self.rows_are_queries and self.lengths[0] == 1:  # other rows are of no query: what heads share is computed once
            query = _known(0, _INDEX)
        return _arguments(function, evaluation, dtypes, query, key, self.lengths, offset, head, score)

    def _load(self, function) -> dict[int, tuple[Value, Any]]:
        """Loads what belongs to the head and to the rows: by number of the load its description and its array, of 32 bits."""
        _, loads = self._described(function)
        wanted = {i: load for i, load in enumerate(loads) if load.kind in (NUMBER, ROW)}
        if not wanted:
            return {}

        def load(evaluation, results, score):
            return [_widest(evaluation, evaluation.loads[i]) for i in wanted]

        kinds = []
        for value in wanted.values():
            shape, layout = ((), SPLAT) if value.kind == NUMBER else ((ROWS,), ROW_LAYOUT)
            kinds.append(plgpu.ShapeDtypeStruct(shape, _wide(value.dtype), layout=layout))
        arrays = self._evaluate(function, None, None, {}, load, kinds)
        return {i: (value, array) for (i, value), array in zip(wanted.items(), arrays, strict=True)}

    def _run(self, name, s, start, finish, count):
        kinds = [plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=LAYOUT)] * count
        return self._evaluate(self.functions[name], s, start, self._loaded[name], finish, kinds)

    def _evaluate(self, function, s, start, loaded, finish, kinds):
        """Runs a function in registers, and what `finish` does with its results.

        Args:
          function: the function.
          s: scores, or None: then columns and scores are only described.
          start: first column, or None likewise.
          loaded: what `_load` returned.
          finish: function of an evaluation, results and scores that returns values.
          kinds: types of the arrays that are made of these values, or None for none.
        """
        names = self._present(function)
        records = [self.operands[name] for name in names]
        offset = [] if self.offset is None else [self.offset]
        scalars = [self.first, 0 if start is None else start, self.head, *(record.index(self.b) for record in records), *offset]
        arrays = [] if s is None else [(s, LAYOUT)]
        arrays += [(array, SPLAT if value.kind == NUMBER else ROW_LAYOUT) for value, array in loaded.values()]
        sizes = [int(np.prod(record.ref.shape[1:])) * record.ref.dtype.itemsize for record in records]

        def make(*operands):
            refs, operands = operands[: len(names)], operands[len(names) :]
            (first, begin, head, *numbers), arrays = operands[: len(scalars)], list(operands[len(scalars) :])
            entries, offsets = numbers[: len(names)], numbers[len(names) :]
            tables = [_entry(*each) for each in zip(refs, entries, sizes, strict=True)]
            score: Any = None if s is None else arrays.pop(0)
            taken = {
                i: _taken(value, array.registers.flat) for (i, (value, _)), array in zip(loaded.items(), arrays, strict=True)
            }
            position = Value(NUMBER, _INDEX, [offsets[0]]) if offsets else None
            number = Value(NUMBER, _INDEX, [head], bounds=NATURAL)
            rows, columns = (
                replace(value, bounds=bounds)
                for value, bounds in zip(_positions(self.columns, first, begin), self.bounds, strict=True)
            )
            line, own_columns = columns.line or Line(begin), columns.registers or ()
            wanted = [NUMBER if not k.shape else ROW if len(k.shape) == 1 else TILE for k in kinds or ()]

            def evaluate(pairs):
                """Returns the registers of results for some of the pairs of columns of a thread."""
                evaluation = Evaluation(8 * len(pairs), tables, taken)
                value, own = _score(self.scale), replace(columns, registers=None, line=None)
                if s is not None:
                    own = replace(columns, registers=own_columns[pairs.start : pairs.stop], line=line.behind(8 * pairs.start))
                    value = replace(value, registers=list(score.registers.flat)[2 * pairs.start : 2 * pairs.stop])
                arguments = self._arguments(function, evaluation, rows, own, position, number, value)
                results = finish(evaluation, evaluation.run(function.program, arguments), value)
                return [evaluation.registers(result, kind) for result, kind in zip(results, wanted, strict=True)]

            pairs = self.columns // 8
            step = pairs if s is None or kinds is None else math.gcd(pairs, _STEP // 8)
            parts = [evaluate(range(pair, pair + step)) for pair in range(0, pairs, step)]
            return [list(itertools.chain.from_iterable(each)) for each in zip(*parts, strict=True)]

        refs = tuple(record.ref for record in records)
        return emit(make, refs, scalars, arrays, kinds)


def _wide(dtype) -> Any:
    return jnp.float32 if _is_float(dtype) else jnp.int32


def _widest(evaluation, value: Value) -> Value:
    """Returns a value as an array of 32 bits holds it."""
    return value if _is_float(value.dtype) else evaluation.converted(value, _INDEX)


def _taken(value: Value, registers) -> Value:
    """Returns a value from an array of 32 bits."""
    registers = list(registers)
    if not _is_float(value.dtype) and value.dtype.itemsize < 4:
        registers = [arith.trunci(_typed(register.type, _type_of(value.dtype)), register) for register in registers]
    return replace(value, registers=registers)


def _entry(ref, entry, size):
    """Returns the address of a batch entry's part of an operand: `size` bytes for each."""
    i64 = integer(64)
    return arith.addi(address_of(ref), arith.muli(arith.extui(i64, entry), utils.c(size, i64)))


def _positions(columns: int, first, start) -> tuple[Value, Value]:
    """Returns the indices of a thread's rows and columns, from `first` and `start` on."""
    row, col = wgmma.product_position()
    rows, cols = Line(arith.addi(first, row), row_step=1), Line(arith.addi(start, col), column_step=1)
    pairs = columns // 8
    return (
        Value(ROW, _INDEX, rows.registers(ROW, pairs), line=rows),
        Value(COLUMN, _INDEX, cols.registers(COLUMN, pairs), line=cols),
    )
