"""Derivatives of score functions, as programs of scalars for kernels of gradients.

The slope is the derivative of the result by the score. A cotangent of a table is a sum over all that a score function reads of
it: a kernel adds the derivative by an element to the place of the element.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal, jaxpr_as_fun

from jaxsoftmax._core import sharding
from jaxsoftmax.ops.attention.score_functions import LOADS, TracedFunction, apply, inner_program, needed_eqns


@functools.lru_cache(maxsize=64)
def with_slope(function: TracedFunction) -> ClosedJaxpr:
    """Returns the program of the result of a score function and of its derivative by the score.

    It has no calls inside at all. A derivative that is a number is a literal. Where the result is `-inf`, and the weight is 0,
    the derivative may be anything.
    """
    at = len(function.tables)  # of the score among the inputs

    def run(*args):
        def of_score(score):
            return jaxpr_as_fun(function.program)(*args[:at], score, *args[at + 1 :])[0]

        one = np.ones((), args[at].dtype)
        if function.has_custom_vjp:  # which forward mode refuses
            result, pull = jax.vjp(of_score, args[at])
            return result, *pull(one)
        return jax.jvp(of_score, (args[at],), (one,))

    return _without_hidden(_simplified(jax.make_jaxpr(run), function.program.in_avals))


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


def reads_elements(function: TracedFunction, names: tuple[str, ...]) -> bool:
    """Returns True if a score function reads the tables `names` element by element."""
    return all(leaf.aval.size == 1 for leaf in _find_leaves(function.program.jaxpr, _origins(function, names)))


def _origins(function, names) -> dict[Any, int]:
    """Returns the numbers of the tables `names` among those of a function, by variable."""
    variables = zip(function.program.jaxpr.invars, function.table_names, strict=False)
    return {v: i for i, (v, name) in enumerate(variables) if name in names}


@functools.lru_cache(maxsize=64)
def with_loads(function: TracedFunction, names: tuple[str, ...]) -> tuple[ClosedJaxpr, tuple[TableLoad, ...]]:
    """Returns a program of derivatives by what a score function reads of the tables `names`, and the loads.

    The function `reads_elements` of these tables. The program returns the results of `with_slope`, then the derivatives of the
    result by loads that depend on the score.
    """
    jaxpr, at = function.program.jaxpr, len(function.tables)
    origins = _origins(function, names)
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
        aval: Any = function.program.in_avals[origins[leaf]]
        table = jax.ShapeDtypeStruct(aval.shape, np.int32)
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
    for eqn in needed_eqns(jaxpr)[0]:
        is_load = eqn.primitive.name in LOADS
        leaves += [v for v in eqn.invars[is_load:] if not isinstance(v, Literal) and v in origins and v not in leaves]
        if is_load and eqn.invars[0] in origins:
            origins[eqn.outvars[0]] = origins[eqn.invars[0]]
    leaves += [v for v in jaxpr.outvars if not isinstance(v, Literal) and v in origins]
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
    eqns = needed_eqns(jaxpr if wanted is None else jaxpr.replace(outvars=[wanted]))[0]
    for eqn in eqns:
        is_load = eqn.primitive.name in LOADS
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
    return ClosedJaxpr(jaxpr.replace(eqns=needed_eqns(jaxpr)[0]), closed.consts)


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
    for eqn in needed_eqns(jaxpr)[0]:
        operands = [v.val if isinstance(v, Literal) else values[v] for v in eqn.invars]
        if (inner := inner_program(eqn)) is not None:
            results = _folded(*inner, operands, known)
        else:
            key = eqn.primitive, str(eqn.params), *(_identity(x) for x in operands)
            if key not in known:
                known[key] = [*_folded_operation(eqn, operands), operands]  # operands stay alive, so that no other has their id
            results = known[key][:-1]
        values |= dict(zip(eqn.outvars, results, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in jaxpr.outvars]


def _identity(value: Any) -> Any:
    """Returns the type and the bits of a number, or the identity of another value."""
    return (type(value), np.asarray(value).dtype, np.asarray(value).tobytes()) if _is_number(value) else id(value)


def _folded_operation(eqn: Any, operands: list[Any]) -> list[Any]:
    """Returns the results of an operation, simplified."""
    name = eqn.primitive.name
    if all(map(_is_number, operands)):
        with jax.ensure_compile_time_eval():
            return [np.asarray(x)[()] for x in apply(eqn, operands)]
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
    return apply(eqn, operands)


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
    return with_results(closed, [jaxpr.outvars[0], slope])


def _is_number(value: Any) -> bool:
    """Returns True for a scalar that is known while tracing."""
    return isinstance(value, np.generic | bool | int | float) or (isinstance(value, np.ndarray) and value.ndim == 0)
