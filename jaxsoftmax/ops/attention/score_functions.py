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
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.attention.operands import MAX_TABLES, table_name

POSITIONS = ("batch", "head", "query_index", "key_index")  # the arguments of both functions, behind the score
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr", "custom_jvp_call": None}
_LOADS = ("gather", "dynamic_slice", "squeeze", "reshape", "slice")  # operations that only move elements of their first operand
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
      text: the program as text. Functions with equal texts and tables are equal, so that equal layers share a kernel.
    """

    program: ClosedJaxpr
    tables: tuple[int, ...]
    takes_score: bool
    used: frozenset[str]
    text: str

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TracedFunction) and (self.text, self.tables) == (other.text, other.tables)

    def __hash__(self) -> int:
        return hash((self.text, self.tables))

    def __str__(self) -> str:
        return f"a function of {', '.join(name for name in ('score', *POSITIONS) if name in self.used) or 'nothing'}"

    @property
    def has_custom_vjp(self) -> bool:
        """True if a function inside has derivatives of its own in reverse mode alone."""
        return any(eqn.primitive.name == "custom_vjp_call" for eqn in self.program.jaxpr.eqns)

    @property
    def table_names(self) -> tuple[str, ...]:
        """Names of the operands that are its tables."""
        return tuple(map(table_name, self.tables))

    @functools.cached_property
    def with_slope(self) -> ClosedJaxpr:
        """Returns the program of the result of a score function and of its derivative by the score.

        It has no calls inside at all. A derivative that is a number is a literal. Where the result is `-inf`, and the weight is
        0, the derivative may be anything.
        """
        at = len(self.tables)  # of the score among the inputs

        def run(*args):
            def of_score(score):
                return jaxpr_as_fun(self.program)(*args[:at], score, *args[at + 1 :])[0]

            return jax.jvp(of_score, (args[at],), (np.ones((), args[at].dtype),))

        return _without_hidden(_simplified(jax.make_jaxpr(run), self.program.in_avals))

    def with_loads(self, names: tuple[str, ...]) -> tuple[ClosedJaxpr, tuple["TableLoad", ...]]:
        """Returns a program of derivatives by what a score function reads of the tables `names`, and the loads.

        The program returns what `with_slope` does, then the derivatives of the result by loads that depend on the score.

        Raises:
          NotImplementedError: the function does not read these tables element by element.
        """
        return _derive_loads(self, names)

    def on_arrays(self, tables: Sequence[jax.Array], *arguments: jax.Array, axes: int) -> jax.Array:
        """Runs the function on arrays.

        Args:
          tables: its tables in their order, float32 in place of 16 bits, with `axes` leading axes each and then the flat table.
          arguments: the arguments in their order, with `axes` axes each.
          axes: number of leading axes. Each has its full size or size 1.

        Returns:
          An array with `axes` axes, of size 1 where nothing that the function reads varies.
        """
        return _over_axes(axes, lambda *args: jaxpr_as_fun(self.program)(*args)[0], [*tables, *arguments])


@dataclass(frozen=True)
class TableLoad:
    """A place in a score function that reads an element of a table whose cotangent is wanted.

    Attributes:
      name: the operand that is the table.
      program: takes what the function takes, with an int32 table of the numbers from 0 on behind its tables. It returns the
        number of the element, below 0 for none, and the derivative of the result by it if that does not depend on the score.
      is_of_score: True if it does. The program that comes with the loads then returns it.
    """

    name: str
    program: ClosedJaxpr
    is_of_score: bool


@functools.lru_cache(maxsize=64)
def _derive_loads(function: TracedFunction, names: tuple[str, ...]) -> tuple[ClosedJaxpr, tuple[TableLoad, ...]]:
    jaxpr, at = function.program.jaxpr, len(function.tables)
    origins = {v: i for i, (v, name) in enumerate(zip(jaxpr.invars, function.table_names, strict=False)) if name in names}
    leaves = _find_leaves(jaxpr, origins)

    def derive(*args):
        values = _with_moves(jaxpr, function.program.consts, args, origins)
        found = [values[leaf] for leaf in leaves]

        def run(score, *elements):
            now = (*args[:at], score, *args[at + 1 :])
            return _with_moves(jaxpr, function.program.consts, now, origins, dict(zip(leaves, elements, strict=True)))[None]

        result, pull = jax.vjp(run, args[at], *found)
        return result, *(x.reshape(()) for x in pull(np.ones((), result.dtype)))

    whole = _simplified(jax.make_jaxpr(derive), function.program.in_avals)
    result, slope, *factors = whole.jaxpr.outvars
    moving = _reached(whole.jaxpr, whole.jaxpr.invars[at])
    loads, of_score = [], []
    for leaf, factor in zip(leaves, factors, strict=True):
        if isinstance(factor, Literal) and factor.val == 0:
            continue
        is_of_score = not isinstance(factor, Literal) and factor in moving
        place = functools.partial(_place, function, leaf, origins, None if is_of_score else with_results(whole, [factor]))
        table = jax.ShapeDtypeStruct(jaxpr.invars[origins[leaf]].aval.shape, np.int32)
        types = [*function.program.in_avals[:at], table, *function.program.in_avals[at:]]
        loads.append(TableLoad(function.table_names[origins[leaf]], _simplified(jax.make_jaxpr(place), types), is_of_score))
        of_score += [factor] * is_of_score
    return with_results(whole, [result, slope, *of_score]), tuple(loads)


def _place(function, leaf, origins, factor: ClosedJaxpr | None, *args):
    """Returns the place of a load in its table, below 0 for none; and the derivative by it, if a program has that."""
    at, (number, constants) = len(function.tables), (origins[leaf], function.program.consts)
    operands = (*args[:at], *args[at + 1 :])
    numbered = (*operands[:number], args[at], *operands[number + 1 :])
    path = {v: i for v, i in origins.items() if i == number}
    place = _with_moves(function.program.jaxpr, constants, numbered, path, wanted=leaf)[leaf].reshape(())
    return place if factor is None else (place, *jaxpr_as_fun(factor)(*operands))


def _find_leaves(jaxpr: Jaxpr, origins: dict[Any, int]) -> list[Any]:
    """Lists the elements of tables that a program computes with. Adds to `origins` the tables that parts are parts of."""
    leaves = []
    for eqn in _live_eqns(jaxpr)[0]:
        is_load = eqn.primitive.name in _LOADS
        leaves += [v for v in eqn.invars[is_load:] if not isinstance(v, Literal) and v in origins and v not in leaves]
        if is_load and eqn.invars[0] in origins:
            origins[eqn.outvars[0]] = origins[eqn.invars[0]]
    leaves += [v for v in jaxpr.outvars if not isinstance(v, Literal) and v in origins]
    if any(leaf.aval.size != 1 for leaf in leaves):
        raise NotImplementedError("several elements of an array at once")
    return leaves


def _with_moves(jaxpr, constants, arguments, origins, elements=None, wanted=None) -> dict[Any, Any]:
    """Evaluates a program; returns its values by variable, and its result by None.

    `elements` stand for the parts of tables that it computes with. If a part is `wanted`, nothing else is computed, and the
    tables that `origins` names are int32, with -1 where a load is out of bounds.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(
        zip(jaxpr.invars, arguments, strict=True)
    )
    elements = elements or {}
    eqns = _live_eqns(jaxpr if wanted is None else jaxpr.replace(outvars=[wanted]))[0]
    for eqn in eqns:
        is_load = eqn.primitive.name in _LOADS
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars[:is_load]]
        operands += [v.val if isinstance(v, Literal) else elements.get(v, values[v]) for v in eqn.invars[is_load:]]
        params = dict(eqn.primitive.get_bind_params(eqn.params))
        if wanted is not None and "fill_value" in params and eqn.invars[0] in origins:
            params["fill_value"] = -1
        results = eqn.primitive.bind(*operands, **params)
        values |= zip(eqn.outvars, results if eqn.primitive.multiple_results else [results], strict=True)
    if wanted is None:
        (out,) = jaxpr.outvars
        values[None] = out.val if isinstance(out, Literal) else elements.get(out, values[out])
    return values


def _reached(jaxpr: Jaxpr, start: Any) -> set[Any]:
    """Returns the variables of a program that depend on one of them."""
    reached = {start}
    for eqn in jaxpr.eqns:
        if not reached.isdisjoint(v for v in eqn.invars if not isinstance(v, Literal)):
            reached |= set(eqn.outvars)
    return reached


def with_results(closed: ClosedJaxpr, results: Sequence[Any]) -> ClosedJaxpr:
    """Returns a program with other variables as its results."""
    jaxpr = closed.jaxpr.replace(outvars=list(results))
    return ClosedJaxpr(jaxpr.replace(eqns=_live_eqns(jaxpr)[0]), closed.consts)


def _over_axes(axes: int, function: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> jax.Array:
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
    return _over_axes(axes, function, arrays)


def functions_and_operands(
    function: str, dtype: Any, score_mod: Callable[..., Any] | None, mask_mod: Callable[..., Any] | None, shape: tuple[int, ...]
) -> tuple[dict[str, TracedFunction], dict[str, jax.Array]]:
    """Traces score and mask functions of the user.

    Args:
      function: the public function, for errors.
      dtype: of the scores.
      score_mod: the user's function, or None.
      mask_mod: the user's function, or None.
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
        if user is not None:
            closed = _traced(function, name, user, score_dtype)
            functions[name] = _cleaned(function, name, user, closed, constants, score_dtype)
    *batch, heads = shape
    used: set[str] = set().union(*(traced.used for traced in functions.values()))
    operands = {table_name(i): jnp.asarray(c).reshape((1,) * len(shape) + (-1,)) for i, c in enumerate(constants)}
    if "batch" in used:
        operands["entries"] = jnp.arange(math.prod(batch), dtype=np.int32).reshape(batch)  # their number may be symbolic
    if "head" in used:
        operands["head_numbers"] = lax.iota(np.int32, heads).reshape((1,) * len(batch) + (heads,))
    return functions, operands


def _traced(function, name, user, score_dtype) -> ClosedJaxpr:
    """Traces a function of the user, and checks its signature, its result and its effects."""
    arguments = (("score",) if score_dtype is not None else ()) + POSITIONS
    expected = f"{name}({', '.join(arguments)})"
    if not callable(user):
        raise TypeError(f"{function}: {name} must be None or a function {expected}, got {type(user).__name__}")
    try:
        inspect.signature(user).bind(*arguments)
    except TypeError as problem:
        raise TypeError(f"{function}: {name} must be a function {expected}, got {_where(user)}: {problem}") from None
    except ValueError:  # it has no signature that Python knows
        pass
    closed, out = jax.make_jaxpr(user, return_shape=True)(*_argument_types(score_dtype))
    kind, wanted = (
        (bool, "bool") if score_dtype is None else (score_dtype, f"{np.dtype(score_dtype).name}, the dtype of scores")
    )
    if not hasattr(out, "shape") or out.shape != () or out.dtype != kind:
        got = f"{out.dtype}{list(out.shape)}" if hasattr(out, "shape") else type(out).__name__
        raise TypeError(f"{function}: {name} must return a scalar of dtype {wanted}, got {got} from {_where(user)}")
    if closed.effects:
        raise ValueError(f"{function}: {name} must have no side effects, got {closed.effects} from {_where(user)}")
    return closed


def _argument_types(score_dtype) -> list[Any]:
    """Lists the types of the arguments of a score function, or with None of a mask function."""
    scores = [] if score_dtype is None else [jax.ShapeDtypeStruct((), score_dtype)]
    return scores + [jax.ShapeDtypeStruct((), np.int32)] * len(POSITIONS)


def _cleaned(function, name, user, closed: ClosedJaxpr, constants: list[Any], score_dtype) -> TracedFunction:
    """Makes the arrays that a traced function closes over tables, and writes its calls out.

    Appends arrays that are not among `constants` yet.
    """
    live = _live_constants(closed)
    numbers: dict[int, int] = {}
    for index in live:
        constant = closed.consts[index]
        _check_table(function, name, user, constant)
        known = next((i for i, other in enumerate(constants) if other is constant), None)
        if known is None:
            known = len(constants)
            constants.append(constant)
        numbers[index] = known
    if len(constants) > MAX_TABLES:
        raise ValueError(
            f"{function}: {name} must close over at most {MAX_TABLES} arrays, together with the other function, got"
            f" {len(constants)} with {_where(user)}"
        )
    tables = [(jnp.shape(closed.consts[i]), jnp.result_type(closed.consts[i])) for i in live]

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
    return TracedFunction(program, tuple(numbers[i] for i in live), takes_score, frozenset(used), str(program))


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
    live = _live_eqns(closed.jaxpr)[1]
    return [i for i, v in enumerate(closed.jaxpr.constvars) if v in live]


def _live_eqns(jaxpr: Jaxpr) -> tuple[list[Any], set[Any]]:
    """Lists the equations that the results need, and the variables that these read."""
    live = {v for v in jaxpr.outvars if not isinstance(v, Literal)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if any(v in live for v in eqn.outvars):
            eqns.append(eqn)
            live |= {v for v in eqn.invars if not isinstance(v, Literal)}
    return eqns[::-1], live


def _evaluate(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any]) -> list[Any]:
    """Evaluates a program whose tables are wide.

    Values are pairs of an array and the dtype that it stands for, None for its own. Elements of a wide table are rounded once
    something else than a load reads them.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True))
    values |= dict(zip(jaxpr.invars, arguments, strict=True))

    def pair(v):
        return (v.val, None) if isinstance(v, Literal) else values[v]

    for eqn in _live_eqns(jaxpr)[0]:
        name, pairs = eqn.primitive.name, [pair(v) for v in eqn.invars]
        if name in _OF_TYPES_ALONE:
            results = pairs
        elif name in _CALLS:
            inner = eqn.params[_CALLS[name] or "call_jaxpr"]
            if name == "custom_jvp_call":  # its own derivative may be what keeps NaN out
                results = [(x, None) for x in _bound(eqn, [_rounded(p) for p in pairs])]
            else:
                inner_constants = [(c, None) for c in getattr(inner, "consts", ())]
                results = _evaluate(getattr(inner, "jaxpr", inner), inner_constants, pairs)
        elif name in _LOADS:
            (first, dtype), *others = pairs
            results = [(x, dtype) for x in _bound(eqn, [first, *(_rounded(p) for p in others)])]
        else:
            results = [(x, None) for x in _bound(eqn, [_rounded(p) for p in pairs])]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [pair(v) for v in jaxpr.outvars]


def _rounded(value):
    """Returns the array of a pair in the dtype that it stands for."""
    array, dtype = value
    return array if dtype is None or array.dtype == dtype else array.astype(dtype)


def _bound(eqn: Any, arrays: Sequence[Any]) -> list[Any]:
    """Applies the operation of an equation to arrays."""
    results = eqn.primitive.bind(*arrays, **eqn.primitive.get_bind_params(eqn.params))
    return list(results) if eqn.primitive.multiple_results else [results]


def _simplified(trace: Callable[..., ClosedJaxpr], types: Sequence[Any]) -> ClosedJaxpr:
    """Traces a function of inputs of these types, and removes calls, factors of 1 and what is computed twice.

    The rules of derivatives leave them.
    """
    types = [jax.ShapeDtypeStruct(kind.shape, kind.dtype) for kind in types]
    with sharding.on_no_mesh():
        closed = trace(*types)
        return jax.make_jaxpr(lambda *args: _folded(closed.jaxpr, closed.consts, args, {}))(*types)


def _folded(jaxpr: Jaxpr, constants: Sequence[Any], arguments: Sequence[Any], known: dict[Any, list[Any]]) -> list[Any]:
    """Evaluates a program. Numbers that do not depend on its arguments are computed, and become literals.

    `known` has the results of operations so far, by the operation and the identities of its operands.
    """
    values: dict[Any, Any] = dict(zip(jaxpr.constvars, constants, strict=True)) | dict(
        zip(jaxpr.invars, arguments, strict=True)
    )
    for eqn in _live_eqns(jaxpr)[0]:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if (attribute := _CALLS.get(eqn.primitive.name, "")) != "":
            inner = eqn.params[attribute or "call_jaxpr"]
            results = _folded(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands, known)
        else:
            key = eqn.primitive, str(eqn.params), *(np.asarray(x).tobytes() if _is_number(x) else id(x) for x in operands)
            if key not in known:
                known[key] = [*_folded_operation(eqn, operands), operands]  # operands stay alive, so that no other has their id
            results = known[key][:-1]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _folded_operation(eqn: Any, operands: list[Any]) -> list[Any]:
    """Returns the results of an operation, simplified."""
    name = eqn.primitive.name
    if all(map(_is_number, operands)):
        with jax.ensure_compile_time_eval():
            return [np.asarray(x)[()] for x in _bound(eqn, operands)]
    if name == "add_any":
        return [lax.add(*operands)]
    if name == "one_minus_square":
        return [1 - operands[0] * operands[0]]
    if name == "mul":
        for one, other in (operands, operands[::-1]):
            if _is_number(one) and abs(one) == 1:
                return [other if one == 1 else lax.neg(other)]
    if name == "select_n" and all(map(_is_number, operands[1:])) and len({float(x) for x in operands[1:]}) == 1:
        return [operands[1]]
    return _bound(eqn, operands)


def _without_hidden(closed: ClosedJaxpr) -> ClosedJaxpr:
    """Returns a program of a result and its slope without the selection of slopes of 0 where the result is `-inf`."""
    jaxpr = closed.jaxpr
    makers = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars if eqn.primitive.name == "select_n"}
    result, slope = jaxpr.outvars

    def is_all(value, number):
        return isinstance(value, Literal) and value.val == number

    while not isinstance(result, Literal) and not isinstance(slope, Literal) and {result, slope} <= set(makers):
        (condition, *results), (other, *slopes) = makers[result].invars, makers[slope].invars
        hidden = [
            i for i, pair in enumerate(zip(results, slopes, strict=True)) if is_all(pair[0], -np.inf) and is_all(pair[1], 0)
        ]
        if condition is not other or len(results) != 2 or len(hidden) != 1:
            break
        result, slope = results[1 - hidden[0]], slopes[1 - hidden[0]]
    jaxpr = jaxpr.replace(outvars=[jaxpr.outvars[0], slope])
    return ClosedJaxpr(jaxpr.replace(eqns=_live_eqns(jaxpr)[0]), closed.consts)


def _is_number(value: Any) -> bool:
    """Returns True for a scalar that is known while tracing."""
    return isinstance(value, np.generic | bool | int | float) or (isinstance(value, np.ndarray) and value.ndim == 0)
