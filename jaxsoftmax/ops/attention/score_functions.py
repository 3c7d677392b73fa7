"""Score and mask functions of attention: traced once into programs of scalars, which implementations run on tiles.

`score_mod(score, batch, head, query_index, key_index)` changes a score, `mask_mod(batch, head, query_index, key_index)` says
whether a query sees a key. Arrays that they close over become operands, `table_0` and so on: `[*batch, 1, entries]`, flat, with
batch axes of size 1 unless a `vmap` gives each example its own. The operands `entries`, `[*batch]`, and `head_numbers`, `[N]`,
number batch entries and heads, so that a device which has some of them knows which. Where devices share a sequence,
`query_numbers` and `key_numbers` do so for tokens.

A traced function has no calls inside and nothing that its result does not need. It takes tables of float16 and bfloat16 as
float32, and rounds what it reads: their cotangents then add up in float32.
"""

import functools
import inspect
import itertools
import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.attention.operands import MAX_TABLES, table_name

POSITIONS = ("batch", "head", "query_index", "key_index")  # the arguments of both functions, behind the score
_OWN_DERIVATIVES = ("custom_jvp_call", "custom_vjp_call")  # calls of functions with derivatives of their own
# The parameter of calls that is the program they run.
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr"} | dict.fromkeys(("closed_call", "core_call", *_OWN_DERIVATIVES), "call_jaxpr")
LOADS = ("gather", "dynamic_slice", "squeeze", "reshape", "slice")  # operations that only move elements of their first operand
_distinct = itertools.count()  # numbers of programs that equal no other one
_OF_TYPES_ALONE = ("pvary", "pcast", "reshard", "sharding_constraint")  # operations that change no value


@dataclass(frozen=True, eq=False)
class TracedFunction:
    """A function of scalars, as a parameter of primitives.

    Attributes:
      program: the traced function. It takes flat tables, then the score if it `takes_score`, then `POSITIONS`.
      tables: the numbers of its tables among the operands.
      shapes: the shapes of these tables before they were made flat.
      takes_score: True for a score function.
      used: names of the arguments that it reads.
      text: the program as text. Functions with equal texts and tables are equal, so that equal layers share a kernel. A program
        with arrays inside, which no text shows, has a number in it.
    """

    program: ClosedJaxpr
    tables: tuple[int, ...]
    takes_score: bool
    used: frozenset[str]
    text: str = field(repr=False)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedFunction) and (self.text, self.tables) == (other.text, other.tables)

    def __hash__(self) -> int:
        return hash((self.text, self.tables))

    def __str__(self) -> str:
        return f"a function of {', '.join(name for name in ('score', *POSITIONS) if name in self.used) or 'nothing'}"

    @property
    def has_custom_vjp(self) -> bool:
        """True if a function inside has derivatives of its own in reverse mode alone."""
        return "custom_vjp_call" in self.text

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the operands that are its tables."""
        return tuple(map(table_name, self.tables))

    def on_arrays(self, tables: Sequence[jax.Array], *arguments: jax.Array, axes: int) -> jax.Array:
        """Runs the function on arrays.

        Args:
          tables: its tables in their order, float32 in place of 16 bits, with `axes` leading axes each and then the flat table.
          arguments: the arguments in their order, with `axes` axes each.
          axes: number of leading axes. Each has its full size or size 1.

        Returns:
          An array with `axes` axes, of size 1 where nothing that the function reads varies.
        """
        return map_over_axes(axes, lambda *args: jnp.asarray(jaxpr_as_fun(self.program)(*args)[0]), [*tables, *arguments])


def map_over_axes(axes: int, function: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
    """Maps a function over the leading axes of arrays, except where all of them have size 1."""
    if axes == 0:
        return function(*arrays)
    inner = functools.partial(_inner, axes - 1, function)
    vary = [array.shape[0] != 1 for array in arrays]
    rest = [array if varies else array[0] for array, varies in zip(arrays, vary, strict=True)]
    if not any(vary):
        return inner(*rest)[None]
    return jax.vmap(inner, in_axes=tuple(0 if varies else None for varies in vary))(*rest)


def _inner(axes, function, *arrays):
    return map_over_axes(axes, function, arrays)


@dataclass(frozen=True, eq=False)
class Closure:
    """A traced function with the arrays that it closes over: its table `i` is `arrays[i]`."""

    function: TracedFunction
    arrays: tuple[Any, ...]


def functions_and_operands(
    function: str,
    dtype: Any,
    score_mod: Callable[..., Any] | None,
    mask_mod: Callable[..., Any] | Closure | None,
    shape: tuple[int, ...],
) -> tuple[dict[str, TracedFunction], dict[str, jax.Array]]:
    """Traces score and mask functions of the user.

    Args:
      function: the public function, for errors.
      dtype: of the scores.
      score_mod: the user's function, or None.
      mask_mod: the user's function, traced or not, or None.
      shape: sizes of the batch axes, and the number of heads.

    Returns:
      The traced functions that are not None, by the names of the parameters, and the operands that they read, by name.

    Raises:
      TypeError: a function is none, has another signature, returns another type, or closes over what is no array of numbers.
      ValueError: a function has side effects, or closes over an array that devices share, or over more than `MAX_TABLES`.
    """
    functions: dict[str, TracedFunction] = {}
    constants: list[Any] = []
    for name, user, score_dtype in (("score_mod", score_mod, dtype), ("mask_mod", mask_mod, None)):
        if user is None:
            continue
        closure = user if isinstance(user, Closure) else trace(function, name, user, score_dtype)
        numbers = []
        for array in closure.arrays:
            known = next((i for i, other in enumerate(constants) if other is array), len(constants))
            constants += [array] if known == len(constants) else []
            numbers.append(known)
        if len(constants) > MAX_TABLES:
            raise ValueError(
                f"{function}: {name} must close over at most {MAX_TABLES} arrays, together with the other function, got"
                f" {len(constants)} with {'a BlockMask' if isinstance(user, Closure) else _where(user)}"
            )
        functions[name] = replace(closure.function, tables=tuple(numbers))
    *batch, heads = shape
    used: set[str] = set().union(*(traced.used for traced in functions.values()))
    operands = {table_name(i): as_table(constant, len(shape)) for i, constant in enumerate(constants)}
    return functions, operands | numbers_of(used, tuple(batch), heads)


def as_table(array: Any, axes: int) -> jax.Array:
    """Returns an array as an operand that is a table: flat, with `axes` axes of size 1 in front."""
    return jnp.asarray(array).reshape((1,) * axes + (-1,))


def numbers_of(used: Collection[str], batch: tuple[int, ...], heads: int) -> dict[str, jax.Array]:
    """Returns the operands that number batch entries and heads, for functions that read the arguments `used`."""
    operands = {}

    # XLA would make an iota in a program of its own, before each kernel: 2 of 188 us (4 x 4096 tokens of 12 documents, H200).
    def count(number, shape):
        return jnp.asarray((np if isinstance(number, int) else jnp).arange(number, dtype=np.int32)).reshape(shape)

    if "batch" in used:
        operands["entries"] = count(math.prod(batch), batch)  # their number may be symbolic
    if "head" in used:
        operands["head_numbers"] = count(heads, (1,) * len(batch) + (heads,))
    return operands


def trace(function: str, name: str, user: Callable[..., Any], score_dtype: Any = None) -> Closure:
    """Traces a score or mask function of the user.

    Args:
      function: the public function, for errors.
      name: the parameter of the public function, likewise.
      user: the user's function.
      score_dtype: dtype of the scores, or None for a mask function.

    Raises:
      TypeError, ValueError: as `functions_and_operands`.
    """
    return _cleaned(function, name, user, _traced(function, name, user, score_dtype), score_dtype)


def _traced(function, name, user, score_dtype) -> ClosedJaxpr:
    """Traces a function of the user, and checks its signature, its result and its effects."""
    arguments = (("score",) if score_dtype is not None else ()) + POSITIONS
    expected = f"{name}({', '.join(arguments)})"
    if not callable(user):
        others = {"block_mask": "", "dot_product_attention": "None, a BlockMask or "}
        others = others.get(function, "None or ") if name == "mask_mod" else "None or "
        raise TypeError(f"{function}: {name} must be {others}a function {expected}, got {type(user).__name__}")
    try:
        inspect.signature(user).bind(*arguments)
    except TypeError as problem:
        raise TypeError(f"{function}: {name} must be a function {expected}, got {_where(user)}: {problem}") from None
    except ValueError:  # it has no signature that Python knows
        pass
    try:
        closed, out = jax.make_jaxpr(user, return_shape=True)(*_argument_types(score_dtype))
    except (jax.errors.TracerArrayConversionError, jax.errors.ConcretizationTypeError) as problem:
        raise TypeError(
            f"{function}: {name} must work on traced scalars, got {_where(user)}, which needs their values; jnp.where and &"
            " take the place of if and of and, jnp.asarray(array)[index] that of an index into a NumPy array"
        ) from problem
    kind, wanted = (
        (bool, "bool") if score_dtype is None else (score_dtype, f"{np.dtype(score_dtype).name}, the dtype of scores")
    )
    if not hasattr(out, "shape") or out.shape != () or out.dtype != kind:
        got = f"{out.dtype}{list(out.shape)}" if hasattr(out, "shape") else type(out).__name__
        raise TypeError(f"{function}: {name} must return a scalar of dtype {wanted}, got {got} from {_where(user)}")
    if closed.effects:
        raise ValueError(f"{function}: {name} must have no side effects, got {closed.effects} from {_where(user)}")
    # Arrays that inner calls close over become constants of the whole.
    return jax.make_jaxpr(lambda *args: _inlined(closed.jaxpr, closed.consts, args))(*_argument_types(score_dtype))


def _argument_types(score_dtype) -> list[Any]:
    """Lists the types of the arguments of a score function, or with None of a mask function."""
    scores = [] if score_dtype is None else [jax.ShapeDtypeStruct((), score_dtype)]
    return scores + [jax.ShapeDtypeStruct((), np.int32)] * len(POSITIONS)


def _cleaned(function, name, user, closed: ClosedJaxpr, score_dtype) -> Closure:
    """Makes the arrays that a traced function closes over tables, and writes its calls out."""
    live = _live_constants(closed)
    arrays = tuple(closed.consts[i] for i in live)
    if len(arrays) > MAX_TABLES:
        raise ValueError(
            f"{function}: {name} must close over at most {MAX_TABLES} arrays, got {len(arrays)} with {_where(user)}"
        )
    for array in arrays:
        _check_table(function, name, user, array)
    tables = [(jnp.shape(array), jnp.result_type(array)) for array in arrays]

    def clean(*args):
        flat, arguments = args[: len(live)], args[len(live) :]
        wide = {i: (table.reshape(shape), dtype) for i, table, (shape, dtype) in zip(live, flat, tables, strict=True)}
        constants = [wide.get(i) for i in range(len(closed.consts))]
        return _rounded(_evaluate(closed.jaxpr, constants, [(argument, None) for argument in arguments])[0])

    types = [jax.ShapeDtypeStruct((math.prod(shape),), _wide(dtype)) for shape, dtype in tables]
    types += _argument_types(score_dtype)
    with sharding.on_no_mesh():
        program = jax.make_jaxpr(clean)(*types)
    takes_score = score_dtype is not None
    names = (("score",) if takes_score else ()) + POSITIONS
    read = {v for eqn in program.jaxpr.eqns for v in eqn.invars if not isinstance(v, Literal)}
    read |= {v for v in program.jaxpr.outvars if not isinstance(v, Literal)}
    used = [n for n, v in zip(names, program.jaxpr.invars[len(live) :], strict=True) if v in read]
    text = str(program)
    if program.consts or _holds_arrays(program.jaxpr):
        text += f" {next(_distinct)}"
    return Closure(TracedFunction(program, tuple(range(len(live))), takes_score, frozenset(used), text), arrays)


def _holds_arrays(jaxpr: Any) -> bool:
    """Returns True if programs inside of operations close over arrays."""
    params = itertools.chain.from_iterable(eqn.params.values() for eqn in jaxpr.eqns)
    inner = itertools.chain.from_iterable(x if isinstance(x, tuple | list) else (x,) for x in params)
    programs = [x for x in inner if hasattr(x, "eqns") or hasattr(x, "jaxpr")]
    return any(getattr(x, "consts", ()) or _holds_arrays(getattr(x, "jaxpr", x)) for x in programs)


def _check_table(function, name, user, constant):
    """Checks an array that a function closes over."""
    aval = jax.typeof(constant)
    is_number = any(jnp.issubdtype(aval.dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_))
    if not is_number:
        raise TypeError(
            f"{function}: {name} must close over arrays of real numbers or bools, got {aval.dtype}{list(aval.shape)}"
            f" in {_where(user)}"
        )
    if 0 in aval.shape:
        raise ValueError(f"{function}: {name} must close over arrays with elements, got shape {aval.shape} in {_where(user)}")
    if sharding.has_explicit_axes(aval) and any(axis is not None for axis in aval.sharding.spec):
        raise ValueError(
            f"{function}: {name} must close over arrays that every device has whole, got one that is sharded as"
            f" {aval.sharding.spec} in {_where(user)}"
        )


def _where(user: Callable[..., Any]) -> str:
    """Names a function of the user, with its file and line where they are known."""
    inner = user
    while isinstance(inner, functools.partial):
        inner = inner.func
    inner = inspect.unwrap(inner)
    code = getattr(inner, "__code__", None)
    name = getattr(inner, "__qualname__", type(inner).__name__)
    return name if code is None else f"{name} ({code.co_filename}:{code.co_firstlineno})"


def _wide(dtype: Any) -> Any:
    """Returns the dtype in which a program takes a table: float32 in place of 16 bits and less."""
    return accumulator(dtype) if jnp.issubdtype(dtype, jnp.floating) else dtype


def wide_tables(tables: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns tables as programs take them."""
    return [table.astype(_wide(table.dtype)) for table in tables]


def _live_constants(closed: ClosedJaxpr) -> list[int]:
    """Lists the constants that the result needs."""
    live = needed_eqns(closed.jaxpr)[1]
    return [i for i, v in enumerate(closed.jaxpr.constvars) if v in live]


def needed_eqns(jaxpr: Jaxpr) -> tuple[list[Any], set[Any]]:
    """Lists the equations that the results need, and the variables that these read."""
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in live for v in eqn.outvars):
            eqns.append(eqn)
            live |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return eqns[::-1], live


def _inlined(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a program with its calls written out, except those with a derivative of their own."""
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))
    for eqn in needed_eqns(jaxpr)[0]:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if eqn.primitive.name not in _OWN_DERIVATIVES and (inner := inner_program(eqn)) is not None:
            results = _inlined(*inner, operands)
        else:
            results = apply(eqn, operands)
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a program whose tables are wide.

    Values are pairs of an array and the dtype that it stands for, None for its own. Elements of a wide table are rounded once
    something else than a load reads them.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def pair(v):
        return (v.val, None) if isinstance(v, Literal) else values[v]

    for eqn in needed_eqns(jaxpr)[0]:
        name, pairs = eqn.primitive.name, [pair(v) for v in eqn.invars]
        if name in _OF_TYPES_ALONE:
            results = pairs
        elif name in LOADS:
            (first, dtype), *others = pairs
            results = [(x, dtype) for x in apply(eqn, [first, *(_rounded(p) for p in others)])]
        else:
            results = [(x, None) for x in apply(eqn, [_rounded(p) for p in pairs])]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [pair(v) for v in jaxpr.outvars]


def _rounded(value):
    """Returns the array of a pair in the dtype that it stands for."""
    array, dtype = value
    return array if dtype is None or array.dtype == dtype else array.astype(dtype)


def inner_program(eqn: Any) -> tuple[Jaxpr, Sequence[Any]] | None:
    """Returns the program that an equation calls, and its constants, or None if it is no call."""
    if (attribute := _CALLS.get(eqn.primitive.name)) is None:
        return None
    inner = eqn.params[attribute]
    return getattr(inner, "jaxpr", inner), getattr(inner, "consts", ())


def apply(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Applies the operation of an equation to arrays."""
    results = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]
