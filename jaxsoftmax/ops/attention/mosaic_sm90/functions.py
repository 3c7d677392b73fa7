"""Score and mask functions of a kernel: what it reads of them, and how they run on its tiles.

A traced function is a program of scalars, which runs on a tile of scores in registers (`tile_evaluation`). All of it is one
operation of the kernel, in MLIR, so that Mosaic has no layouts to infer. Tables stay in global memory. Loads that belong to the
head or to the rows are done once for a tile (`TileFunctions`), others where the scores are.
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr
from jaxlib.mlir.dialects import arith

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu import wgmma
from jaxsoftmax._gpu.emit import SPLAT, address_of, emit, integer
from jaxsoftmax.ops.attention.mosaic_sm90.common import LAYOUT, LN2, LOG2E, ROW_LAYOUT, ROWS, GlobalOperand
from jaxsoftmax.ops.attention.mosaic_sm90.tile_evaluation import Evaluation, View, strides_of
from jaxsoftmax.ops.attention.mosaic_sm90.tile_values import (
    COLUMN,
    INDEX,
    NATURAL,
    NUMBER,
    ROW,
    TILE,
    Line,
    UnsupportedError,
    Value,
    check_dtype,
    is_float,
    known_value,
    register_type,
    typed,
)
from jaxsoftmax.ops.attention.score_functions import POSITIONS, TracedFunction

# Columns that are evaluated at a time: values of columns need no registers after theirs. A kernel with both functions and head
# size 64 spills 728 bytes so, and 824 with all columns at once.
_STEP = 32
NUMBERS = ("entries", "head_numbers", "query_numbers", "key_numbers")  # operands that number the arguments `POSITIONS`


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
    """Returns the number that turns results of `TileFunctions.changed` into scores. None stands for 1 where these may be large.

    It is `LN2` where scores may be large and the function takes the logarithm of e for its base: in `score - slope * distance`
    the factors of scores and the slope are multiplied by it. A weight is then a sum and `exp2`, and not a sum, a product and
    `exp2` for each score; sums with the largest score are exact.

    Args:
      types: types of the operands by name.
      scale: factor of the products.
      score_mod: the score function, or None.
      options: other options of `AttentionProblem`.
    """
    if score_mod is None:
        return None
    try:
        (changed,), evaluation = _described(Function.of(score_mod), types, ROWS, scale)
        if changed.is_moderate and changed.factor > 0:
            return changed.factor
        if "bias" in types or options.get("soft_cap") is not None:  # which take scores
            return None
        _, evaluation = _described(Function.of(score_mod), types, ROWS, scale, LOG2E)
        return LN2 if evaluation.tile_products == 0 else None
    except UnsupportedError:  # `reason_against` says why
        return None


def is_finite(function: Function, types: Mapping[str, Any]) -> bool:
    """Tells whether the results of a function of operands of these types are finite where products of queries and keys are."""
    try:
        return all(result.is_finite for result in _described(function, types, ROWS)[0])
    except UnsupportedError:
        return False


def loads_tiles(function: Function, types: Mapping[str, Any]) -> bool:
    """Returns True if a function of operands of these types reads an element of a table for each score."""
    try:
        return any(load.kind == TILE for load in _described(function, types, 64)[1].loads)
    except UnsupportedError:
        return False


def _described(
    function: Function, types: Mapping[str, Any], columns: int, scale: float = 1.0, factor: float = 1.0
) -> tuple[list[Value], Evaluation]:
    """Describes the results of a function of operands of these types, times a factor. Returns the evaluation as well."""
    dtypes = {name: types[name].dtype for name in function.operands if name in types}
    for dtype in dtypes.values():
        check_dtype(dtype)
    if any(types[name].shape[-1] >= 2**31 for name in dtypes):
        raise UnsupportedError("tables of 2**31 elements or more")
    evaluation = Evaluation(columns)
    row, column = (Value(kind, INDEX, bounds=NATURAL) for kind in (ROW, COLUMN))
    has_offset = "query_offset" in types
    lengths = types["query"].shape[-3], types["key"].shape[-3]
    # It makes no difference to loads and operations which of both the rows are, except to their kinds.
    arguments = _arguments(function, evaluation, dtypes, row, column, lengths, has_offset, score=_score(scale))
    return evaluation.run(function.program, arguments, factor), evaluation


def _arguments(function, evaluation, dtypes, query, key, lengths, offset, head=None, score=None, entry=None) -> list[Any]:
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
      entry: number of the batch entry, or None to load it where it is present.
    """
    places, number = list(dtypes), Value(NUMBER, INDEX, bounds=NATURAL)
    zero = known_value(0, INDEX)

    def view(name, shape, start=zero):
        return View(places.index(name), dtypes[name], shape, strides_of(shape), start)

    arguments: list[Any] = []
    for name, variable in zip(function.tables, function.program.jaxpr.invars, strict=False):
        arguments.append(view(name, variable.aval.shape))
    if function.gradient is not None:
        shape = function.program.jaxpr.invars[len(function.tables)].aval.shape
        arguments.append(View(None, INDEX, shape, strides_of(shape), zero))
    if function.takes_score:
        arguments.append(score or _score(1.0))
    position = query
    if offset is not False:
        added = number if offset is True else offset
        position = evaluation.compute("add", query, added)
    others = {"batch": entry or zero, "head": head or number, "query_index": position, "key_index": key}
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
        entry=None,
        rows_are_queries: bool = True,
        heads_per_query: int = 1,
        scale: float = 1.0,
        changed_factor: float | None = None,
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
          entry: number of the batch entry, or None to load it.
          rows_are_queries: True if rows are queries, False if they are keys.
          heads_per_query: query heads that have a row of each query, folded as `FoldedRows` says.
          scale: factor of the products that are handed over as scores.
          changed_factor: what `factor_of_changed` returned for the score function.
          ends: index behind the last row and the last column of all tiles.
        """
        self.scale, self.changed_factor, self.bounds = scale, changed_factor, tuple((0, end - 1) for end in ends)
        self.functions, self.operands, self.lengths, self.columns = functions, operands, lengths, columns
        self.b, self.head, self.first, self.offset, self.rows_are_queries = b, head, first, offset, rows_are_queries
        self.heads_per_query, self.entry = heads_per_query, entry
        self._loaded = {name: self._load(function) for name, function in functions.items()}

    def changed(self, s: jax.Array, start) -> jax.Array:
        """Returns what the score function makes of products from column `start` on, divided by `changed_factor`."""
        (changed,) = self.results("score_mod", s, start)
        return changed

    def hidden(self, s: jax.Array, start, hidden: float = -jnp.inf, name: str = "mask_mod") -> jax.Array:
        """Returns scores or weights from column `start` on, with `hidden` where the mask function hides the key."""

        def select(evaluation, results, score):
            (seen,), score = results, replace(score, factor=1.0)
            return [evaluation.compute("select_n", seen, known_value(hidden, np.float32), score)]

        (result,) = self._run(name, s, start, select, 1)
        return result

    def results(self, name: str, s: jax.Array, start) -> list[jax.Array]:
        """Returns all results of a function, float32 tiles. The first one is that of `changed`."""
        count = len(self.functions[name].program.jaxpr.outvars)

        return self._run(name, s, start, lambda evaluation, results, score: results, count, 1 / (self.changed_factor or 1))

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
                    product, zero = evaluation.compute("mul", values, factor), known_value(0, np.float32)
                    values = evaluation.compute("select_n", evaluation.compute("eq", values, zero), product, zero)
            places, elements = evaluation.registers(place, place.kind), evaluation.registers(values, TILE)
            varies = bool(place.kind & ROW), bool(place.kind & COLUMN)
            wgmma.add_at(evaluation.tables[address], places, elements, varies=varies, along_diagonals=place.of_difference)
            return []

        self._evaluate(function, values, start, self._loaded[name], add, None)

    def _present(self, function):
        known = set() if self.entry is None else {"entries"}
        return [name for name in function.operands if name in self.operands and name not in known]

    def _described(self, function) -> tuple[list[Value], list[Value]]:
        rows, columns = (Value(k, INDEX, bounds=b) for k, b in zip((ROW, COLUMN), self.bounds, strict=True))
        evaluation = Evaluation(self.columns)
        arguments = self._arguments(function, evaluation, rows, columns, score=_score(self.scale))
        return evaluation.run(function.program, arguments), evaluation.loads

    def _arguments(self, function, evaluation, rows, columns, offset=None, head=None, score=None, entry=None):
        dtypes = {name: jnp.dtype(self.operands[name].ref.dtype) for name in self._present(function)}
        query, key = (rows, columns) if self.rows_are_queries else (columns, rows)
        if self.entry is not None and entry is None:  # it is only known that there will be one
            entry = Value(NUMBER, INDEX)
        offset = (self.offset is not None) if offset is None else offset
        if (count := self.heads_per_query) > 1:  # each row has a head of its own
            first = evaluation.times(head or Value(NUMBER, INDEX, bounds=NATURAL), count)
            query, place = (evaluation.compute(name, rows, known_value(count, INDEX)) for name in ("div", "rem"))
            head = evaluation.plus(first, place)
        if self.rows_are_queries and self.lengths[0] == 1:  # other rows are of no query: what heads share is computed once
            query = known_value(0, INDEX)
        return _arguments(function, evaluation, dtypes, query, key, self.lengths, offset, head, score, entry)

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

    def _run(self, name, s, start, finish, count, factor=1.0):
        kinds = [plgpu.ShapeDtypeStruct(s.shape, jnp.float32, layout=LAYOUT)] * count
        return self._evaluate(self.functions[name], s, start, self._loaded[name], finish, kinds, factor)

    def _evaluate(self, function, s, start, loaded, finish, kinds, factor=1.0):
        """Runs a function in registers, and what `finish` does with its results.

        Args:
          function: the function.
          s: scores, or None: then columns and scores are only described.
          start: first column, or None likewise.
          loaded: what `_load` returned.
          finish: function of an evaluation, results and scores that returns values.
          kinds: types of the arrays that are made of these values, or None for none.
          factor: factor of the first result.
        """
        names = self._present(function)
        records = [self.operands[name] for name in names]
        offset = [] if self.offset is None else [self.offset]
        entry = [] if self.entry is None else [self.entry]
        scalars = [self.first, 0 if start is None else start, self.head, *(record.index(self.b) for record in records)]
        scalars += [*entry, *offset]
        arrays = [] if s is None else [(s, LAYOUT)]
        arrays += [(array, SPLAT if value.kind == NUMBER else ROW_LAYOUT) for value, array in loaded.values()]
        sizes = [int(np.prod(record.ref.shape[1:])) * record.ref.dtype.itemsize for record in records]

        def make(*operands):
            refs, operands = operands[: len(names)], operands[len(names) :]
            (first, begin, head, *numbers), arrays = operands[: len(scalars)], list(operands[len(scalars) :])
            entries, offsets = numbers[: len(names)], list(numbers[len(names) :])
            tables = [_entry(*each) for each in zip(refs, entries, sizes, strict=True)]
            score: Any = None if s is None else arrays.pop(0)
            taken = {
                i: _taken(value, array.registers.flat) for (i, (value, _)), array in zip(loaded.items(), arrays, strict=True)
            }
            known = Value(NUMBER, INDEX, [offsets.pop(0)]) if entry else None
            position = Value(NUMBER, INDEX, [offsets[0]]) if offsets else None
            number = Value(NUMBER, INDEX, [head], bounds=NATURAL)
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
                arguments = self._arguments(function, evaluation, rows, own, position, number, value, known)
                results = finish(evaluation, evaluation.run(function.program, arguments, factor), value)
                return [evaluation.registers(result, kind) for result, kind in zip(results, wanted, strict=True)]

            pairs = self.columns // 8
            step = pairs if s is None or kinds is None else math.gcd(pairs, _STEP // 8)
            parts = [evaluate(range(pair, pair + step)) for pair in range(0, pairs, step)]
            return [list(itertools.chain.from_iterable(each)) for each in zip(*parts, strict=True)]

        refs = tuple(record.ref for record in records)
        return emit(make, refs, scalars, arrays, kinds)


def _wide(dtype) -> Any:
    return jnp.float32 if is_float(dtype) else jnp.int32


def _widest(evaluation, value: Value) -> Value:
    """Returns a value as an array of 32 bits holds it."""
    return value if is_float(value.dtype) else evaluation.converted(value, INDEX)


def _taken(value: Value, registers) -> Value:
    """Returns a value from an array of 32 bits."""
    registers = list(registers)
    if not is_float(value.dtype) and value.dtype.itemsize < 4:
        registers = [arith.trunci(typed(register.type, register_type(value.dtype)), register) for register in registers]
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
        Value(ROW, INDEX, rows.registers(ROW, pairs), line=rows),
        Value(COLUMN, INDEX, cols.registers(COLUMN, pairs), line=cols),
    )
