"""Score and mask functions for Triton's kernels of attention: their programs, and the words that kernels read of operands.

A traced function becomes a `TileProgram`, whose operations are few and of one kind each. A part of a table is the number of its
first element, which the program computes. A kernel loads an element where something else than a part is made of it.

Kernels have one pointer for all that functions read. XLA lays tables and numbers out as words of 32 bits, one operand after the
other, before a kernel runs. This costs what reading them once does, and nothing for one operand of 32 bits alone.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal

from jaxsoftmax._triton.attention_program import ProgramStep, TileProgram
from jaxsoftmax.ops.attention.operands import TABLES
from jaxsoftmax.ops.attention.score_derivatives import TableLoad, reads_elements, with_loads, with_slope
from jaxsoftmax.ops.attention.score_functions import POSITIONS, TracedFunction, inner_program, needed_eqns

INDEX, BOOL, FLOAT = np.dtype(np.int32), np.dtype(bool), np.dtype(np.float32)
_DTYPES = ("bool", "int8", "int16", "int32", "uint8", "uint16", "uint32", "float16", "bfloat16", "float32")
# Operands that functions read, beside scores and positions.
WORDS = (*TABLES, "entries", "head_numbers", "query_numbers", "key_numbers")


class UnsupportedFunctionError(Exception):
    """Says which part of a function Triton's kernels do not have."""


def reason_against(
    functions: Mapping[str, TracedFunction], types: Mapping[str, Any], tables: Sequence[str] | None
) -> str | None:
    """Returns why kernels do not run score and mask functions of operands of these types, or None.

    Args:
      functions: traced functions by the names of the parameters.
      types: types of the operands by name.
      tables: names of the tables whose cotangents are wanted, or None in a forward pass, which needs no derivative.
    """
    if tables and not reads_elements(functions["score_mod"], tuple(tables)):
        return "derivatives of arrays that score_mod reads have no kernel where it reads several elements of an array at once"
    try:
        for name in WORDS:
            if name in types:
                _check_dtype(types[name].dtype)
        if count_words(types) >= 2**31:
            raise UnsupportedFunctionError("2**31 elements of arrays or more")
        programs_of(functions, tables)
    except UnsupportedFunctionError as problem:
        return f"kernels have no functions with {problem}"
    return None


# Words.


def starts_of(operands: Mapping[str, Any]) -> tuple[tuple[str, int], ...]:
    """Returns the first words of the operands that functions read, by name."""
    starts, end = [], 0
    for name in WORDS:
        if operands.get(name) is not None:
            starts.append((name, end))
            end += math.prod(operands[name].shape)
    return tuple(starts)


def words_of(operands: Mapping[str, jax.Array]) -> jax.Array:
    """Returns the words of the operands that functions read, int32 `[words]`."""
    words = [_as_words(operands[name]) for name in WORDS if operands.get(name) is not None]
    return jnp.concatenate(words)


def count_words(operands: Mapping[str, Any]) -> int:
    """Returns the number of words of the operands that functions read."""
    return sum(math.prod(operands[name].shape) for name in WORDS if operands.get(name) is not None)


def arrays_of(words: jax.Array, operands: Mapping[str, Any], names: Sequence[str]) -> dict[str, jax.Array]:
    """Returns the parts of words that belong to those of the operands that are tables and among `names`, in their shapes."""
    parts = {}
    for name, start in starts_of(operands):
        if name in names:
            shape = operands[name].shape
            parts[name] = words[start : start + math.prod(shape)].reshape(shape)
    return parts


def _as_words(array):
    if jnp.issubdtype(array.dtype, jnp.floating):
        array = lax.bitcast_convert_type(array.astype(FLOAT), INDEX)
    elif array.dtype == jnp.uint32:
        array = lax.bitcast_convert_type(array, INDEX)
    return array.astype(INDEX).reshape(-1)


# Programs.


@dataclass(frozen=True)
class FunctionPrograms:
    """The programs of score and mask functions that a kernel runs.

    Attributes:
      score_mod: program of the score function, or None. In a backward kernel it has derivatives, see `program_of_derivatives`.
      mask_mod: program of the mask function, or None.
      loads: names of the tables of the loads by which there are derivatives.
    """

    score_mod: TileProgram | None = None
    mask_mod: TileProgram | None = None
    loads: tuple[str, ...] = ()

    @property
    def bytes_of_score(self) -> int:
        """Number of bytes that the programs load for each score."""
        return sum(4 * program.n_tile_loads for program in (self.score_mod, self.mask_mod) if program is not None)


def programs_of(functions: Mapping[str, TracedFunction], tables: Sequence[str] | None) -> FunctionPrograms:
    """Returns the programs of functions by name; `tables` are those of `reason_against`."""
    score_mod, mask_mod = functions.get("score_mod"), functions.get("mask_mod")
    mask = None if mask_mod is None else program_of(mask_mod)
    if score_mod is None:
        return FunctionPrograms(None, mask)
    if tables is None:
        return FunctionPrograms(program_of(score_mod), mask)
    program, loads = program_of_derivatives(score_mod, tuple(tables))
    return FunctionPrograms(program, mask, loads)


@functools.lru_cache(maxsize=256)
def program_of(function: TracedFunction) -> TileProgram:
    """Returns the program of a function. Its inputs are the score, if it takes it, and the positions."""
    translation = _Translation(function)
    (result,) = translation.run(function.program, translation.inputs())
    return translation.program([result])


@functools.lru_cache(maxsize=256)
def program_of_derivatives(function: TracedFunction, tables: tuple[str, ...] = ()) -> tuple[TileProgram, tuple[str, ...]]:
    """Returns the program of a score function and its derivatives.

    Its results are the result of the function, the derivative by the score, and for each load of one of the `tables` the place
    of the element, below 0 for none, and the derivative by it.

    Returns:
      The program, and the name of the table of each load.
    """
    translation, loads = _Translation(function), ()
    if tables:
        program, loads = with_loads(function, tables)
    else:
        program = with_slope(function)
    inputs = translation.inputs()
    result, slope, *of_score = translation.run(program, inputs)
    results = [result, slope]
    for load in loads:
        at = len(function.tables)
        place, *factor = translation.run(load.program, [*inputs[:at], _numbers_of(function, load), *inputs[at:]])
        results += [place, of_score.pop(0) if load.is_of_score else factor[0]]
    return translation.program(results), tuple(load.name for load in loads)


def _numbers_of(function: TracedFunction, load: TableLoad) -> "_View":
    """Returns the table of the numbers from 0 on that stands for the table of a load."""
    aval: Any = function.program.in_avals[function.table_names.index(load.name)]
    shape = aval.shape
    return _View(None, INDEX, shape, _strides_of(shape))


@dataclass(frozen=True)
class _Value:
    """A value of a program: its number, its dtype, and what it depends on."""

    number: int
    dtype: np.dtype
    inputs: frozenset[str] = frozenset()

    @property
    def of_score(self) -> bool:
        return "score" in self.inputs

    @property
    def is_tile(self) -> bool:
        """True if it differs from score to score."""
        return self.of_score or self.inputs >= {"query_index", "key_index"}


@dataclass(frozen=True)
class _View:
    """A part of a table.

    Attributes:
      table: name of the operand, or None for the numbers of its elements.
      dtype: dtype in the program.
      shape: shape of the part.
      strides: distances of elements along its axes.
      offset: number of the first element; None for 0.
      inside: whether it is inside of the table, or None if it is.
      fill: what an element is outside.
    """

    table: str | None
    dtype: np.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: _Value | None = None
    inside: _Value | None = None
    fill: Any = None


class _Translation:
    """Translates programs of scalars to the steps of one program. Equal steps are one."""

    def __init__(self, function: TracedFunction):
        self._function = function
        self._names = ("score",) * function.takes_score + POSITIONS
        self._steps: dict[ProgramStep, int] = {}
        self._n_tile_loads = 0

    def inputs(self) -> list[Any]:
        """Returns views of the function's tables, the score if it takes it, and the positions."""
        function, inputs = self._function, []
        types: list[Any] = list(function.program.in_avals)
        for name, aval in zip(function.table_names, types, strict=False):
            inputs.append(_View(name, np.dtype(aval.dtype), aval.shape, _strides_of(aval.shape)))
        dtypes = [np.dtype(aval.dtype) for aval in types[len(inputs) :]]
        for number, dtype in enumerate(dtypes):
            _check_dtype(dtype)
            inputs.append(_Value(number, dtype, frozenset(self._names[number : number + 1])))
        return inputs

    def program(self, results: Sequence[_Value]) -> TileProgram:
        """Returns the program of all steps so far, with these results."""
        return TileProgram(tuple(self._steps), tuple(result.number for result in results), self._n_tile_loads)

    def run(self, program: ClosedJaxpr, arguments: Sequence[Any]) -> list[_Value]:
        """Adds the steps of a program; returns its results. Arguments are values and views."""
        return [self.number(x) for x in self._run(program.jaxpr, [self._literal(c) for c in program.consts], arguments)]

    def _run(self, jaxpr, constants, arguments):
        values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
        values |= zip(jaxpr.invars, arguments, strict=True)

        def read(atom):
            return self._literal(atom.val) if isinstance(atom, Literal) else values[atom]

        for eqn in needed_eqns(jaxpr)[0]:
            name, operands = eqn.primitive.name, [read(v) for v in eqn.invars]
            if (inner := inner_program(eqn)) is not None:
                program, consts = inner
                results = self._run(program, [self._literal(c) for c in consts], operands)
            elif name in _MOVES:
                results = [self._moved(eqn, *operands)]
            elif name in _OPERATIONS:
                (out,) = eqn.outvars
                if out.aval.size != 1:
                    raise UnsupportedFunctionError(f"{name} of several elements")
                results = [self.compute(name, *map(self.number, operands), dtype=out.aval.dtype, **eqn.params)]
            else:
                raise UnsupportedFunctionError(f"the operation {name}")
            values |= zip(eqn.outvars, results, strict=True)
        return [read(v) for v in jaxpr.outvars]

    # Steps.

    def step(self, name: str, dtype: Any, *operands: _Value, options: tuple[Any, ...] = ()) -> _Value:
        """Adds a step."""
        step = ProgramStep(name, tuple(x.number for x in operands), options)
        result = _Value(
            self._steps.setdefault(step, len(self._names) + len(self._steps)),
            np.dtype(dtype),
            frozenset().union(*(x.inputs for x in operands)),
        )
        is_new = result.number == len(self._names) + len(self._steps) - 1
        self._n_tile_loads += is_new and name == "load" and result.is_tile
        return result

    def compute(self, name: str, *operands: _Value, dtype: Any = None, **params: Any) -> _Value:
        """Adds the steps of an operation of JAX. Its result has the dtype of the last operand unless there is another."""
        dtype = np.dtype(dtype or (BOOL if name in _COMPARISONS else operands[-1].dtype))
        _check_dtype(dtype)
        return _OPERATIONS[name](self, operands, params, dtype)

    def known(self, value: Any, dtype: Any) -> _Value:
        """Adds a number."""
        dtype = np.dtype(dtype)
        _check_dtype(dtype)
        wide = FLOAT if _is_float(dtype) else dtype
        # A float as text: NaN is not equal to NaN, and 0 to -0.
        option = float(value).hex() if _is_float(dtype) else bool(value) if dtype == BOOL else int(value)
        return self.step("number", dtype, options=(option, wide.name))

    def rounded(self, value: _Value) -> _Value:
        """Rounds a float to the dtype that it stands for."""
        narrow = _is_float(value.dtype) and value.dtype.itemsize == 2
        return self.step("rounded", value.dtype, value, options=(value.dtype.name,)) if narrow else value

    def converted(self, value: _Value, dtype: Any) -> _Value:
        return value if value.dtype == dtype else self.compute("convert_element_type", value, dtype=dtype)

    def _literal(self, value) -> _Value:
        if np.size(value) != 1:
            raise UnsupportedFunctionError("a constant of several elements")
        return self.known(np.asarray(value).reshape(())[()], jnp.result_type(value))

    # Tables.

    def _moved(self, eqn, operand, *others):
        """Returns a part of a table, or of a number itself. Indices of a gather are a tuple of numbers."""
        (out,), name, params = eqn.outvars, eqn.primitive.name, eqn.params
        shape, is_one = out.aval.shape, out.aval.size == 1
        if name == "concatenate":
            return tuple(map(self.number, (operand, *others)))
        if isinstance(operand, _Value):
            if not is_one:
                raise UnsupportedFunctionError(f"{name} to several elements")
            return operand  # an array of one element is a number
        if not isinstance(operand, _View):
            raise UnsupportedFunctionError(f"{name} of indices")
        if name == "reshape":
            if operand.strides != _strides_of(operand.shape) and not is_one:
                raise UnsupportedFunctionError("a reshape of a part of a table")
            view = replace(operand, shape=shape, strides=_strides_of(shape))
        elif name == "squeeze":
            kept = [i for i in range(len(operand.shape)) if i not in params["dimensions"]]
            view = replace(operand, shape=shape, strides=tuple(operand.strides[i] for i in kept))
        elif name == "slice":
            start = sum(a * b for a, b in zip(params["start_indices"], operand.strides, strict=True))
            steps = params["strides"] or (1,) * len(shape)
            strides = tuple(a * b for a, b in zip(operand.strides, steps, strict=True))
            view = replace(operand, shape=shape, strides=strides, offset=self._plus(operand.offset, self.known(start, INDEX)))
        elif name == "dynamic_slice":
            view = self._sliced(operand, [self.number(x) for x in others], range(len(operand.shape)), shape)
        elif name == "gather":
            view = self._gathered(operand, others[0], params, shape)
        else:
            raise UnsupportedFunctionError(f"{name} of a table")
        return self.number(view) if is_one else view

    def _sliced(self, view: _View, starts, axes, sizes) -> _View:
        """Returns a slice of a table from `starts` on, along `axes`, moved inside of the table."""
        offset = view.offset
        for start, axis in zip(starts, axes, strict=True):
            last = view.shape[axis] - sizes[axis]
            if last > 0:
                inside = self._clamped(start, last)
                offset = self._plus(offset, self.compute("mul", inside, self.known(view.strides[axis], INDEX)))
        return replace(view, shape=tuple(sizes), offset=offset)

    def _gathered(self, view: _View, indices, params, shape) -> _View:
        numbers, sizes = params["dimension_numbers"], params["slice_sizes"]
        starts = list(indices) if isinstance(indices, tuple) else [self.number(indices)]
        axes = numbers.start_index_map
        if len(starts) != len(axes) or numbers.operand_batching_dims:
            raise UnsupportedFunctionError("a gather of several elements")
        inside = None
        if params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
            for start, axis in zip(starts, axes, strict=True):
                last = min(view.shape[axis] - sizes[axis], np.iinfo(start.dtype).max)
                low, high = (self.known(bound, start.dtype) for bound in (0, last))
                is_in = self.compute("and", self.compute("ge", start, low), self.compute("le", start, high))
                inside = is_in if inside is None else self.compute("and", inside, is_in)
        sliced = self._sliced(view, starts, axes, sizes)
        kept = [i for i in range(len(view.shape)) if i not in numbers.collapsed_slice_dims]
        part = tuple(sizes[i] for i in kept)
        if part != tuple(shape) and math.prod(shape) != 1:
            raise UnsupportedFunctionError("a gather of several elements")
        strides = tuple(view.strides[i] for i in kept)
        return replace(sliced, shape=part, strides=strides, inside=inside, fill=params["fill_value"])

    def number(self, x) -> _Value:
        """Returns a value; loads the element of a table that a view of one element is."""
        if isinstance(x, _Value):
            return x
        if not isinstance(x, _View) or math.prod(x.shape) != 1:
            raise UnsupportedFunctionError("an array of several elements")
        offset = self.known(0, INDEX) if x.offset is None else x.offset
        element = offset if x.table is None else self.step("load", x.dtype, offset, options=(x.table, x.dtype.name))
        if x.inside is None:
            return element
        fill = x.fill
        if fill is None:
            info = None if _is_float(x.dtype) or x.dtype == BOOL else np.iinfo(x.dtype)
            fill = (np.nan if _is_float(x.dtype) else True) if info is None else info.min or info.max
        return self.compute("select_n", x.inside, self.known(fill, x.dtype), element)

    def _plus(self, a: _Value | None, b: _Value) -> _Value:
        return b if a is None else self.compute("add", a, b)

    def _clamped(self, index: _Value, last: int) -> _Value:
        """Returns an index moved to `[0, last]`, int32."""
        least, most = (self.known(bound, index.dtype) for bound in (0, min(last, np.iinfo(index.dtype).max)))
        return self.converted(self.compute("min", self.compute("max", index, least), most), INDEX)


def _strides_of(shape) -> tuple[int, ...]:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def _check_dtype(dtype) -> None:
    if np.dtype(dtype).name not in _DTYPES:
        raise UnsupportedFunctionError(f"numbers of dtype {np.dtype(dtype).name}")


def _is_float(dtype) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


# Operations, by the names of their primitives. They take a translation, values, the parameters and the dtype of the result.


def _step(of_numbers, of_floats=True, of_bools=None):
    """Makes an operation of one step, by the dtype of the last operand.

    Args:
      of_numbers: step of integers and floats.
      of_floats: True if floats have it.
      of_bools: step of bools, or None.
    """

    def operation(translation, operands, params, dtype):
        kind = operands[-1].dtype
        name = of_bools if kind == BOOL else of_numbers if of_floats or not _is_float(kind) else None
        if name is None:
            raise UnsupportedFunctionError(f"an operation of dtype {kind.name}")
        return translation.rounded(translation.step(name, dtype, *operands))

    return operation


def _reversed(name):
    return lambda translation, operands, params, dtype: translation.compute(name, *operands[::-1])


def _divided(translation, operands, params, dtype):
    if not _is_float(dtype):
        return translation.step("quotient", dtype, *operands)
    name = "divide" if any(x.of_score for x in operands) else "divide_exactly"
    return translation.rounded(translation.step(name, dtype, *operands))


def _negated(translation, operands, params, dtype):
    (x,) = operands
    if _is_float(dtype):  # 0 - 0 is no -0
        return translation.step("multiply", dtype, x, translation.known(-1, dtype))
    return translation.step("subtract", dtype, translation.known(0, dtype), x)


def _magnitude(translation, operands, params, dtype):
    (x,) = operands
    if _is_float(dtype):
        return translation.step("absolute", dtype, x)
    if dtype.kind == "u":
        return x
    is_below = translation.compute("lt", x, translation.known(0, dtype))
    return translation.compute("select_n", is_below, x, translation.compute("neg", x))  # that of the least integer is itself


def _sign(translation, operands, params, dtype):
    (x,) = operands
    zero, one = (translation.known(value, dtype) for value in (0, 1))
    is_above, is_below = translation.compute("gt", x, zero), translation.compute("lt", x, zero)
    result = translation.compute("select_n", is_above, x if _is_float(dtype) else zero, one)  # NaN and -0 stay
    return result if dtype.kind == "u" else translation.compute("select_n", is_below, result, translation.known(-1, dtype))


def _ordered(name):
    """Makes a comparison. Bools are compared as integers."""

    def operation(translation, operands, params, dtype):
        if operands[0].dtype == BOOL:
            operands = [translation.converted(x, INDEX) for x in operands]
        return translation.step(name, dtype, *operands)

    return operation


def _inverted(translation, operands, params, dtype):
    (x,) = operands
    ones = True if dtype == BOOL else np.iinfo(dtype).max if dtype.kind == "u" else -1
    return translation.step("xor", dtype, x, translation.known(ones, dtype))


def _shifted(name, is_arithmetic=False):
    """Makes a shift, which gives 0, or the sign, where it is by all bits or more."""

    def operation(translation, operands, params, dtype):
        x, by = operands
        bits, unsigned = 8 * dtype.itemsize, np.dtype(f"uint{8 * dtype.itemsize}")
        by = translation.converted(by, unsigned)
        most = translation.known(bits - 1, unsigned)
        near = translation.converted(translation.compute("min", by, most), dtype)
        if is_arithmetic:
            return translation.step(name, dtype, x, near)
        shifted = translation.step(name, unsigned, translation.converted(x, unsigned), translation.converted(near, unsigned))
        result = translation.compute("select_n", translation.compute("gt", by, most), shifted, translation.known(0, unsigned))
        return translation.converted(result, dtype)

    return operation


def _selected(translation, operands, params, dtype):
    if len(operands) != 3 or operands[0].dtype != BOOL:
        raise UnsupportedFunctionError("a selection among several cases")
    return translation.step("select", dtype, *operands)


def _clamped(translation, operands, params, dtype):
    low, x, high = operands
    return translation.compute("min", translation.compute("max", x, low), high)


def _converted(translation, operands, params, dtype):
    (x,), old = operands, operands[0].dtype
    if old == dtype:
        return x
    if dtype == BOOL:
        return translation.compute("ne", x, translation.known(0, old))
    if _is_float(dtype):
        wide = x if _is_float(old) else translation.step("converted", dtype, x, options=("float32",))
        return translation.rounded(replace(wide, dtype=dtype))
    if _is_float(old):
        info = np.iinfo(dtype)
        return translation.step("truncated", dtype, x, options=(dtype.name, int(info.min), int(info.max)))
    return translation.step("converted", dtype, x, options=(dtype.name,))


def _power(translation, operands, params, dtype):
    (x,), y = operands, params["y"]
    factor, result, rest = x, translation.known(1, dtype), abs(y)
    while rest:
        if rest & 1:
            result = translation.compute("mul", result, factor)
        rest >>= 1
        factor = translation.compute("mul", factor, factor) if rest else factor
    return result if y >= 0 else translation.compute("div", translation.known(1, dtype), result)


def _function(name, *options):
    """Makes an operation of floats, computed in float32."""

    def operation(translation, operands, params, dtype):
        if params.get("accuracy") is not None:
            raise UnsupportedFunctionError("an accuracy that is asked for")
        if not _is_float(dtype):
            raise UnsupportedFunctionError(f"an operation of dtype {dtype.name}")
        return translation.rounded(translation.step(name, dtype, *operands, options=options))

    return operation


def _round(translation, operands, params, dtype):
    is_even = params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return translation.step("round", dtype, *operands, options=(is_even,))


def _is_finite(translation, operands, params, dtype):
    (x,) = operands
    return translation.compute("lt", translation.compute("abs", x), translation.known(np.inf, x.dtype))


_COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge", "is_finite")
_MOVES = ("reshape", "squeeze", "slice", "dynamic_slice", "gather", "broadcast_in_dim", "concatenate", "expand_dims")
_OPERATIONS: dict[str, Callable[..., _Value]] = {
    **dict.fromkeys(("add", "add_any"), _step("add")),
    "sub": _step("subtract"),
    "mul": _step("multiply"),
    "div": _divided,
    "rem": _step("remainder", of_floats=False),
    "neg": _negated,
    "abs": _magnitude,
    "sign": _sign,
    "max": _step("maximum", of_bools="or"),
    "min": _step("minimum", of_bools="and"),
    "clamp": _clamped,
    "eq": _ordered("equal"),
    "ne": _ordered("not_equal"),
    "lt": _ordered("less"),
    "le": _ordered("less_equal"),
    "gt": _reversed("lt"),
    "ge": _reversed("le"),
    "and": _step("and", of_floats=False, of_bools="and"),
    "or": _step("or", of_floats=False, of_bools="or"),
    "xor": _step("xor", of_floats=False, of_bools="xor"),
    "not": _inverted,
    "shift_left": _shifted("shift_left"),
    "shift_right_logical": _shifted("shift_right"),
    "shift_right_arithmetic": _shifted("shift_right", is_arithmetic=True),
    "select_n": _selected,
    "convert_element_type": _converted,
    **dict.fromkeys(("copy", "copy_p", "stop_gradient"), lambda translation, operands, params, dtype: operands[0]),
    "integer_pow": _power,
    "square": lambda translation, operands, params, dtype: translation.compute("mul", *operands, *operands),
    "is_finite": _is_finite,
    "floor": _function("floor"),
    "ceil": _function("ceil"),
    "round": _round,
    "pow": _function("power"),
    **{name: _function(name) for name in ("exp", "exp2", "log", "log2", "log1p", "expm1", "tanh", "logistic", "sqrt", "rsqrt")},
}
