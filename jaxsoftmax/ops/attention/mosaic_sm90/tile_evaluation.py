"""Runs programs of scalars on a tile of scores, in the registers of a warpgroup.

The arguments of a program are one number for a head, one for each row, one for each column, or one for each score. Each
operation is computed in the smallest of these kinds, once for its inputs, and repeated over the tile where kinds meet. What
follows from constants, or from the bounds of positions, is known while lowering: `key // 64` is a shift. Equal registers have
equal results, so that what depends on `query - key` alone is computed once for the elements of a thread on a diagonal.
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, vector

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu import wgmma
from jaxsoftmax._gpu.emit import constant
from jaxsoftmax.ops.attention.mosaic_sm90.tile_operations import COMPARISONS, FOLDS, MOVES, OPERATIONS
from jaxsoftmax.ops.attention.mosaic_sm90.tile_values import (
    BOOL,
    COLUMN,
    EVERY,
    INDEX,
    MODERATE,
    NUMBER,
    ROW,
    TILE,
    Line,
    UnsupportedError,
    Value,
    as_natural,
    check_dtype,
    constant_of,
    contracted,
    element_of,
    known_value,
    on_each,
    ptx_operation,
    typed,
)
from jaxsoftmax.ops.attention.score_functions import inner_program, needed_eqns


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
        self.tile_products = 0  # products of tiles that `_multiplied` has made, which are an operation for each score

    # Programs.

    def run(self, program: ClosedJaxpr, arguments: Sequence[Any], factor: float = 1.0) -> list[Value]:
        """Returns the results of a program, for arguments that are `Value` or `View`; the first one times `factor`."""
        jaxpr = program.jaxpr
        values = self._run(jaxpr, [literal_value(c) for c in program.consts], arguments)
        results = [self.number(_read(v, values)) for v in jaxpr.outvars]
        if factor != 1:
            makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
            results[0] = self._multiplied(jaxpr.outvars[0], factor, values, makers)
        return results

    def _run(self, jaxpr, constants, arguments) -> dict[Any, Any]:
        """Returns the values of a program by variable."""
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= zip(jaxpr.invars, arguments, strict=True)
        for eqn in needed_eqns(jaxpr)[0]:
            name, operands = eqn.primitive.name, [_read(v, values) for v in eqn.invars]
            if (inner := inner_program(eqn)) is not None:
                program, consts = inner
                inside = self._run(program, [literal_value(c) for c in consts], operands)
                results = [_read(v, inside) for v in program.outvars]
            elif name in MOVES:
                results = [self._moved(eqn, *operands)]
            elif name in OPERATIONS:
                (out,) = eqn.outvars
                check_dtype(out.aval.dtype)
                results = [self._computed(name, eqn.params, out.aval, [self.number(x) for x in operands])]
            else:
                raise UnsupportedError(f"the operation {name}")
            values |= zip(eqn.outvars, results, strict=True)
        return values

    def _multiplied(self, atom, factor: float, values, makers) -> Value:
        """Returns a value of a program times a number. The product is made where it costs least.

        Sums and selections pass the number on to all terms, and products to one factor. Other operations read these values
        without it. `tile_products` counts the terms that absorb nothing. Terms that might become infinite are among them:
        products with a large factor, and sums of two large terms.

        Args:
          atom: the variable, or a literal.
          factor: the number.
          values: values by variable.
          makers: equations by the variables that they make.
        """
        value = self.number(_read(atom, values))
        if _takes_factors(value):
            return replace(value, factor=value.factor * factor, bounds=EVERY)
        eqn: Any = None if isinstance(atom, Literal) else makers.get(atom)
        name = "" if eqn is None or value.dtype != np.float32 else eqn.primitive.name
        operands = [self.number(_read(v, values)) for v in eqn.invars] if name == "mul" or name in _TERMS else []
        absorbing: Sequence[int] = ()
        if name == "mul":
            # A tile with 128 columns has 64 elements in a thread. A number takes 1 product, rows take 2 and columns 32.
            costs = sorted((x.kind if not _takes_factors(x) else -1, i) for i, x in enumerate(operands) if not _is_huge(x))
            fits = [i for kind, i in costs if kind < value.kind and not self._is_large(eqn.invars[1 - i], values, makers)]
            absorbing = fits[:1]
        elif value.kind == TILE and name in _TERMS:
            large = sum(self._is_large(eqn.invars[i], values, makers) for i in _TERMS[name])
            most = {"select_n": 2, "neg": 1, "div": 0}.get(name, 1)
            absorbing = _TERMS[name] if large <= most else ()
        for i in absorbing:
            operands[i] = self._multiplied(eqn.invars[i], factor, values, makers)
        if absorbing:
            return self.compute(name, *operands, dtype=np.float32)
        self.tile_products += value.kind == TILE
        return self._product(value, factor)

    def _is_large(self, atom, values, makers) -> bool:
        """Tells whether a value of a program may be so large, but finite, that another factor makes it infinite.

        Elements of tables may be. A number that is multiplied with scores is taken for a temperature, which is not.
        """
        value = self.number(_read(atom, values))
        if value.known is not None:
            return bool(MODERATE <= abs(value.known) < np.inf)
        if value.is_moderate or value.is_finite:
            return False
        eqn: Any = makers.get(atom)
        name = "" if eqn is None else eqn.primitive.name
        if name == "mul" and value.of_score:
            parts = [v for v in eqn.invars if (x := self.number(_read(v, values))).of_score or x.known is not None]
        elif name == "div" and value.of_score:
            parts = eqn.invars[:1]
        elif name in _TERMS and name != "div":
            parts = [eqn.invars[i] for i in _TERMS[name]]
        else:
            return True
        return any(self._is_large(v, values, makers) for v in parts)

    def _product(self, value: Value, factor: float) -> Value:
        """Returns a value times a number, finite where the value is: a key that `finfo.min` hides has a finite score."""
        if value.known is not None:
            most = np.float64(np.inf if np.isinf(value.known) else np.finfo(np.float32).max)
            return known_value(np.clip(np.float64(value.known) * factor, -most, most), np.float32)
        # Rounding towards zero ends at the largest number, and saves a comparison.
        return self.apply(ptx_operation("mul.rz.f32"), np.float32, value, known_value(factor, np.float32))

    def _computed(self, name, params, aval, operands) -> Value:
        if aval.size != 1:
            raise UnsupportedError(f"{name} of several elements")
        dtype = np.dtype(aval.dtype)
        if name in FOLDS and all(x.known is not None for x in operands):
            with np.errstate(all="ignore"):
                return known_value(FOLDS[name](*(x.known for x in operands)), dtype)
        result = OPERATIONS[name](self, operands, params, dtype)
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
            if view.strides != strides_of(view.shape) and out.aval.size != 1:
                raise UnsupportedError("a reshape of a part of a table")
            view = replace(view, shape=shape, strides=strides_of(shape))
        elif name == "squeeze":
            kept = [i for i in range(len(view.shape)) if i not in params["dimensions"]]
            view = replace(view, shape=shape, strides=tuple(view.strides[i] for i in kept))
        elif name == "slice":
            start = sum(a * b for a, b in zip(params["start_indices"], view.strides, strict=True))
            steps = params["strides"] or (1,) * len(shape)
            strides = tuple(a * b for a, b in zip(view.strides, steps, strict=True))
            view = replace(view, shape=shape, strides=strides, offset=self.plus(view.offset, known_value(start, INDEX)))
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
                last = known_value(view.shape[axis] - sizes[axis], INDEX)
                is_in = self.compute(
                    "and", self.compute("ge", start, known_value(0, start.dtype)), self.compute("le", start, last)
                )
                inside = is_in if inside is None else self.compute("and", inside, is_in)
            fill = params["fill_value"]
        starts = [self.converted(start, INDEX) for start in starts]
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
        return self.compute("select_n", x.inside, known_value(fill, loaded.dtype), loaded)

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
        kind = utils.dtype_to_ir_type(np.dtype(np.int8) if dtype == BOOL else dtype)
        line = index.line if index.is_finite and index.bounds[0] >= 0 else None  # others may wrap around
        if line is None:
            places: list[Any] = self.registers(index, index.kind)
            keys, load = list(map(id, places)), functools.partial(on_each, functools.partial(wgmma.load_at, address, kind))
        else:
            places = keys = line.offsets(index.kind, self.columns // 8)
            read = functools.cache(functools.partial(wgmma.load_at, address, kind, line.start))

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
        if dtype == BOOL:
            return arith.cmpi(arith.CmpIPredicate.ne, register, utils.c(0, register.type))
        if jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 2:
            return arith.extf(typed(register.type, ir.F32Type.get()), register)
        return register

    # Values.

    def _is_there(self, *values: Value) -> bool:
        return self.tables is not None and all(x.registers is not None or x.known is not None for x in values)

    def registers(self, value: Value, kind: int) -> list[Any]:
        """Returns the registers of a value of this kind, or of a smaller one: two of rows, or a vector for 8 columns."""
        own = value.registers
        if own is None:
            own = [constant_of(value.known)]
        if np.float32(value.factor) != 1:
            own = [arith.mulf(r, utils.c(value.factor, r.type), fastmath=contracted()) for r in own]
        if value.kind == kind:
            return list(own)
        pairs = self.columns // 8
        if value.kind == NUMBER:
            (number,) = own
            vectors = ir.VectorType.get((1 if kind == ROW else 2,), number.type)
            return [vector.broadcast(vectors, number)] * {ROW: 2, COLUMN: pairs, TILE: 2 * pairs}[kind]
        if value.kind == ROW:
            wide = [vector.broadcast(ir.VectorType.get((2,), r.type.element_type), element_of(r, 0)) for r in own]
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
        dtype = dtype or (bool if name in COMPARISONS else operands[-1].dtype)
        return self._computed(name, params, jax.ShapeDtypeStruct((), dtype), list(operands))

    def described(self) -> "Evaluation":
        """Returns an evaluation of the same tile that makes no MLIR."""
        return Evaluation(self.columns)

    def line(self, value: Value) -> Line | None:
        """Returns how an integer follows from a number of the thread, or None."""
        if value.line is not None or value.kind != NUMBER or value.dtype != INDEX or not self._is_there(value):
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
        return as_natural(self.compute("add", a, b))

    def times(self, a: Value, factor: int) -> Value:
        return a if factor == 1 else as_natural(self.compute("mul", a, known_value(factor, a.dtype)))

    def clamped(self, index: Value, last: int) -> Value:
        """Returns an index moved to `[0, last]`, int32."""
        if last == 0:
            return known_value(0, INDEX)
        least, most = known_value(0, index.dtype), known_value(min(last, np.iinfo(index.dtype).max), index.dtype)
        return as_natural(self.converted(self.compute("min", self.compute("max", index, least), most), INDEX))

    def composed(self, function: Callable[..., Any], *values: Value) -> Value:
        """Runs a function of `jax.numpy` on values of one dtype."""
        (result,) = self.run(_composition(function, len(values)), list(values))
        return result

    def rounded(self, value: Value, dtype: Any) -> Value:
        """Rounds float32 to a float of 16 bits, which stays in 32."""
        if jnp.dtype(dtype).itemsize != 2:
            return replace(value, dtype=np.dtype(dtype))

        def rounded(x):
            return arith.extf(x.type, arith.truncf(typed(x.type, utils.dtype_to_ir_type(np.dtype(dtype))), x))

        return self.apply(rounded, dtype, value)


@functools.cache
def _composition(function, count) -> ClosedJaxpr:
    with jax.enable_x64(False):
        return jax.make_jaxpr(function)(*[jax.ShapeDtypeStruct((), jnp.float32)] * count)


# Operations which a number multiplies if it multiplies these operands.
_TERMS = {"add": (0, 1), "add_any": (0, 1), "sub": (0, 1), "neg": (0,), "select_n": (1, 2), "div": (0,)}


def _takes_factors(value: Value) -> bool:
    """Tells whether registers of a value, which is a multiple of scores, are multiplied by a number in any case."""
    return value.of_score and value.dtype == np.float32 and value.is_moderate


def _is_huge(value: Value) -> bool:
    """Tells whether a value is a number which another factor might make infinite."""
    return value.known is not None and not abs(value.known) < MODERATE


def _read(atom, values) -> Any:
    return literal_value(atom.val) if isinstance(atom, Literal) else values[atom]


def literal_value(value) -> Value:
    if np.size(value) != 1:
        raise UnsupportedError("a constant of several elements")
    dtype = jnp.result_type(value)
    check_dtype(dtype)
    return known_value(value, dtype)


def strides_of(shape) -> tuple[int, ...]:
    return tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
