"""Makes operations JAX primitives: bound to operands by name, batched, differentiated and transposed.

Operands that are None are left out of a primitive; its parameter `names` lists those that are present. Every primitive has the
parameter `implementation`, the name of the one that must run or None. If all operands have the same axes, the parameter `axes`
names the axes of a row. `lower` lowers primitives.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxsoftmax._core import compat, lower, sharding
from jaxsoftmax._core.operation import OnShards, Operation

# Each operation has two primitives of one name. The first needs devices while it is lowered, because XLA may cut its operands:
# types on automatic mesh axes, or on no mesh, do not say how. The second is for operands whose types say it.
_primitives: dict[Operation, tuple[Primitive, Primitive]] = {}

Operands = dict[str, Any]


def define(operation: Operation) -> Operation:
    """Makes the primitives of an operation, and gives them their rules."""
    _primitives[operation] = Primitive(operation.name), Primitive(operation.name)
    for primitive in _primitives[operation]:
        primitive.multiple_results = True
        primitive.def_abstract_eval(functools.partial(_types, operation))
        # An eager call runs as one of JAX does: `apply_primitive` compiles it once for each set of parameters and
        # types, also under `jax.disable_jit` and `jax.debug_nans`.
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        batching.primitive_batchers[primitive] = functools.partial(_batch, operation)
        # The rule names no platform: in JAX 0.11 and 0.12 a rule that is not cacheable and has a version for one platform
        # fails if the program is for several.
        mlir.register_lowering(primitive, functools.partial(lower.lower, operation), cacheable=False)
    # JAX refuses to lower a primitive that needs devices for an `AbstractMesh`. An op with a reference alone
    # needs none, unless the reference runs on shards.
    if operation.op.kernels or operation.on_shards is OnShards.EVERYTHING:
        compat.require_devices(_primitives[operation][0])
    if operation.linear:
        set_jvp(operation, functools.partial(_jvp_of_linear, operation))
    return operation


def bind(operation: Operation, operands: Operands, **params: Any) -> list[Any]:
    """Computes the results of an operation from operands by name; absent ones may be None."""
    names = tuple([name for name in operation.by_name if operands.get(name) is not None])
    arrays, is_settled = sharding.alike(operation, names, [operands[name] for name in names])
    needing_devices, deviceless = _primitives[operation]
    return (deviceless if is_settled else needing_devices).bind(*arrays, names=names, **params)


def set_jvp(operation: Operation, rule: Callable[..., Any]) -> None:
    """Gives an operation its jvp rule.

    Args:
      operation: the operation.
      rule: `rule(operands, tangents, **params)` returns the results and their tangents, None for zero. It gets operands and
        tangents by name, without tangents that are zero.
    """

    def jvp(primals, tangents, *, names, **params):
        pairs = zip(names, primals, tangents, strict=True)
        nonzero = {name: sharding.placed_as(t, primal) for name, primal, t in pairs if type(t) is not ad.Zero}
        results, tangents_out = rule(dict(zip(names, primals, strict=True)), nonzero, **params)
        return results, [_zero(result) if t is None else t for result, t in zip(results, tangents_out, strict=True)]

    for primitive in _primitives[operation]:
        ad.primitive_jvps[primitive] = jvp


def set_transpose(operation: Operation, rule: Callable[..., Operands]) -> None:
    """Gives an operation its transpose rule.

    Args:
      operation: the operation.
      rule: `rule(cotangents, operands, types, **params)` returns the cotangents of the operands that are not known, by name. It
        gets the cotangents of the results, None for zero, the known operands by name, and the types of the others.
    """

    def transpose(cotangents, *operands, names, **params):
        named = dict(zip(names, operands, strict=True))
        types = {name: operand.aval for name, operand in named.items() if ad.is_undefined_primal(operand)}
        cotangents, results = [None if type(c) is ad.Zero else c for c in cotangents], {}
        if any(c is not None for c in cotangents):
            known = {name: operand for name, operand in named.items() if name not in types}
            results = rule(cotangents, known, types, **params)
        return [results.get(name) for name in names]

    for primitive in _primitives[operation]:
        ad.primitive_transposes[primitive] = transpose


def _types(operation: Operation, *avals, names, **params):
    """Returns the types of the results, sharded over explicit axes as the operands are."""
    types = operation.types(dict(zip(names, avals, strict=True)), **params)
    return sharding.typed_alike(operation, names, types, avals, **params)


def _batch(operation: Operation, operands, dims, *, names, **params):
    """Adds a batch axis: in front, or, if all operands have the same axes, where the first batched operand has it.

    Kernels need the axes of a row to be neighbours: a batch axis that stands between them is moved in front of them.
    Operands that are not batched get size 1 there, if they may have it.
    """
    at, size = next((dim, operand.shape[dim]) for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    if operation.is_aligned:
        axes = params["axes"]
        if axes and axes == tuple(range(axes[0], axes[-1] + 1)) and at <= axes[-1]:
            at = min(at, axes[0])
        params["axes"] = tuple(axis + (axis >= at) for axis in axes)
    else:
        at = 0
    whole = operation.whole_in_batch(**params)

    def batched(name, operand, dim):
        if dim is not None:
            return jnp.moveaxis(operand, dim, at)
        operand = jnp.expand_dims(operand, at)
        if operation.by_name[name].may_be_one and name not in whole:
            return operand
        return jnp.broadcast_to(operand, (*operand.shape[:at], size, *operand.shape[at + 1 :]))

    results = bind(operation, {name: batched(name, *pair) for name, *pair in zip(names, operands, dims, strict=True)}, **params)
    return results, [at] * len(results)


def summed_to(array: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Adds up an array along the axes in which this shape has size 1, such as those that the examples of a batch share."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and array.shape[axis] != 1)
    return jnp.sum(array, axes, keepdims=True, dtype=array.dtype) if axes else array


def jvp_as_reference(operation: Operation, operands, tangents, **params):
    """Differentiates an operation as its reference; a rule for `set_jvp`."""
    results = bind(operation, operands, **params)
    types = [jax.typeof(result) for result in results]

    def reference(moving):
        return lower.on_reference(operation, operands | moving, types, **params)

    return results, jax.jvp(reference, ({name: operands[name] for name in tangents},), (tangents,))[1]


def _jvp_of_linear(operation: Operation, operands, tangents, **params):
    """Differentiates an operation that is linear in some operands: in the others, as its reference."""
    linear = {name: t for name, t in tangents.items() if name in operation.linear}
    others = {name: t for name, t in tangents.items() if name not in operation.linear}
    if others:
        results, tangents_out = jvp_as_reference(operation, operands, others, **params)
    else:
        results, tangents_out = bind(operation, operands, **params), []
    if linear:
        moved = bind(operation, operands | {name: linear.get(name) for name in operation.linear}, **params)
        tangents_out = [ad.add_tangents(*pair) for pair in zip(moved, tangents_out, strict=True)] if others else moved
    return results, tangents_out


def _zero(primal) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())
