"""How a map becomes a JAX primitive: bound to operands by name, batched, differentiated, transposed.

Operands that are None are left out of the primitive, whose parameter `names` says which are there. Every primitive has the
parameter `implementation` too, a forced one or None. One whose operands have the same axes has `axes`, those of the softmax.
`lower` says how it is lowered.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxsoftmax._core import lower, sharding
from jaxsoftmax._core.operation import Operation

# Of each map two primitives of one name. The first needs devices while it is lowered, as XLA may cut its operands: types on
# automatic mesh axes, or on no mesh, do not say how. The second is for operands whose types say it.
_primitives: dict[Operation, tuple[Primitive, Primitive]] = {}

Operands = dict[str, Any]


def define(this: Operation) -> Operation:
    """Makes primitives of a map, for which `dispatch` finds the implementation while they are lowered."""
    _primitives[this] = Primitive(this.name), Primitive(this.name)
    for primitive in _primitives[this]:
        primitive.multiple_results = True
        primitive.def_abstract_eval(functools.partial(_types, this))
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        batching.primitive_batchers[primitive] = functools.partial(_batch, this)
        lower.register(this, primitive)
    lower.require_devices(this, _primitives[this][0])
    if this.linear:
        set_jvp(this, functools.partial(_jvp_of_linear, this))
    return this


def bind(this: Operation, operands: Operands, **params: Any) -> list[Any]:
    """The results of a map for operands by name, of which some may be None."""
    names = tuple([name for name in this.by_name if operands.get(name) is not None])
    given, is_settled = sharding.alike(this, names, [operands[name] for name in names])
    needing_devices, deviceless = _primitives[this]
    return (deviceless if is_settled else needing_devices).bind(*given, names=names, **params)


def set_jvp(this: Operation, rule: Callable[..., Any]) -> None:
    """Gives a map its jvp rule.

    Args:
      this: the map.
      rule: `rule(operands, tangents, **params)`, of both by name and without tangents that are zero, returns the results and
        their tangents, None for zero.
    """

    def jvp(primals, tangents, *, names, **params):
        pairs = zip(names, primals, tangents, strict=True)
        nonzero = {name: sharding.placed_as(t, primal) for name, primal, t in pairs if type(t) is not ad.Zero}
        results, tangents_out = rule(dict(zip(names, primals, strict=True)), nonzero, **params)
        return results, [_zero(result) if t is None else t for result, t in zip(results, tangents_out, strict=True)]

    for primitive in _primitives[this]:
        ad.primitive_jvps[primitive] = jvp


def set_transpose(this: Operation, rule: Callable[..., Operands]) -> None:
    """Gives a map its transpose rule.

    Args:
      this: the map.
      rule: `rule(cotangents, operands, types, **params)`, of the cotangents of the results, None for zero, of the operands by
        name that are known, and of the types of the others, returns cotangents of those, by name.
    """

    def transpose(cotangents, *operands, names, **params):
        given = dict(zip(names, operands, strict=True))
        types = {name: operand.aval for name, operand in given.items() if ad.is_undefined_primal(operand)}
        cotangents, found = [None if type(c) is ad.Zero else c for c in cotangents], {}
        if any(c is not None for c in cotangents):
            known = {name: operand for name, operand in given.items() if name not in types}
            found = rule(cotangents, known, types, **params)
        return [found.get(name) for name in names]

    for primitive in _primitives[this]:
        ad.primitive_transposes[primitive] = transpose


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def reverse_only(message: str, x: jax.Array) -> jax.Array:
    """Returns `x`. A tangent of it raises TypeError with this message, unless reverse mode transposes it."""
    del message
    return x


@reverse_only.defjvp
def _reverse_only_jvp(message, primals, tangents):
    return primals[0], _tangent.bind(tangents[0], message=message)


_tangent = Primitive("reverse_only")  # which cannot be computed
_tangent.def_abstract_eval(lambda t, *, message: t)
ad.deflinear2(_tangent, lambda cotangent, t, *, message: [cotangent])
batching.primitive_batchers[_tangent] = lambda ts, dims, *, message: (_tangent.bind(*ts, message=message), dims[0])


@_tangent.def_impl
def _no_tangent(*_, message: str):
    raise TypeError(message)


mlir.register_lowering(_tangent, _no_tangent)


def _types(this: Operation, *avals, names, **params):
    """The types of the results, sharded over explicit axes as the operands are."""
    types = this.types(dict(zip(names, avals, strict=True)), **params)
    return sharding.typed_alike(this, names, types, avals, **params)


def _batch(this: Operation, operands, dims, *, names, **params):
    """Adds a batch axis: in front, or where the first batched operand has it if all have the same axes.

    Kernels need the axes of the softmax to be neighbours: a batch axis that stands between them is moved in front of them.
    What is not batched gets size 1 there, if it may have that, and if its cotangent is not wanted.
    """
    at, size = next((dim, operand.shape[dim]) for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    if this.is_aligned:
        axes = params["axes"]
        if axes and axes == tuple(range(axes[0], axes[-1] + 1)) and at <= axes[-1]:
            at = min(at, axes[0])
        params["axes"] = tuple(axis + (axis >= at) for axis in axes)
    else:
        at = 0
    whole = this.whole_in_batch(**params)

    def batched(name, operand, dim):
        if dim is not None:
            return jnp.moveaxis(operand, dim, at)
        operand = jnp.expand_dims(operand, at)
        if this.by_name[name].may_be_one and name not in whole:
            return operand
        return jnp.broadcast_to(operand, (*operand.shape[:at], size, *operand.shape[at + 1 :]))

    given = {name: batched(name, *pair) for name, *pair in zip(names, operands, dims, strict=True)}
    results = bind(this, given, **params)
    return results, [at] * len(results)


def _jvp_of_linear(this: Operation, operands, tangents, **params):
    """The jvp rule of a map that is linear in some operands. Its derivative in others is that of the reference."""
    results = bind(this, operands, **params)
    tangents_out: list[Any] = [None] * len(results)
    if any(name in tangents for name in this.linear):
        tangents_out = bind(this, operands | {name: tangents.get(name) for name in this.linear}, **params)
    if others := {name: t for name, t in tangents.items() if name not in this.linear}:
        types = [jax.typeof(result) for result in results]

        def reference(primals):
            return lower.on_reference(this, operands | primals, types, **params)

        more = jax.jvp(reference, ({name: operands[name] for name in others},), (others,))[1]
        tangents_out = [b if a is None else ad.add_tangents(a, b) for a, b in zip(tangents_out, more, strict=True)]
    return results, tangents_out


def _zero(primal) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())
