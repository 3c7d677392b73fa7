"""Attention as a JAX primitive, with its derivatives.

`attention` returns out and lse. Its tangent is a second primitive, `attention_jvp`, which takes the operands, out, lse and the
tangents of `xla.MOVING`, and is linear in the tangents; the transpose of that is a third, `attention_vjp`, which takes the
cotangents of out and lse instead. So the operands, out and lse are what is saved, for every implementation; out and lse under
the names `SAVED_NAMES`, for the policies of `jax.checkpoint`. Derivatives of the two linear maps, in anything but the
(co)tangents, are those of the reference.

Operands are in the order `xla.OPERANDS`, with shapes as in `xla`. All have the same number of batch axes in front, each of
size 1 where an operand does not vary along it. Any of the tangents may be None, for zero, and so may one of the cotangents. The
parameter `wanted` of `attention_vjp` says which cotangents it returns. Parameters of all are `scale`, `window`, `soft_cap`,
`dropout_rate`, `precision`, `deterministic` and `implementation`. `deterministic` says whether derivatives must have the same
bits run after run.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad, batching

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind, define, set_rule, unpack
from jaxsoftmax.ops.attention import xla
from jaxsoftmax.ops.attention.xla import MOVING, OPERANDS, summed_to

# What out and lse are called where derivatives save them.
SAVED_NAMES = ("jaxsoftmax_attention_out", "jaxsoftmax_attention_lse")

_RESULTS = ("out", "lse")
_COUNT = len(OPERANDS)
_SAVED = _COUNT + len(_RESULTS)
_MOVING = [OPERANDS.index(name) for name in MOVING]

# The names of the axes behind the batch, for sharding: heads may be, lengths and head sizes are whole on every device.
_NAMES = dict.fromkeys(("query", "key", "value", "out"), (None, "heads", None))
_NAMES |= dict.fromkeys(("bias", "mask"), ("heads", None, None)) | dict.fromkeys(("query_lengths", "key_lengths"), ())
_NAMES |= dict.fromkeys(("query_segments", "key_segments"), (None,)) | {"sinks": ("heads",)}
_NAMES |= dict.fromkeys(("lse", "seeds"), ("heads", None))

# What operands are, by primitive, and results.
_OPERANDS = {
    "attention": OPERANDS,
    "attention_jvp": (*OPERANDS, *_RESULTS, *MOVING),
    "attention_vjp": (*OPERANDS, *_RESULTS, *_RESULTS),
}


def attention(*operands, **params):
    """Binds attention to operands, of which some may be None: `[out, lse]`."""
    return bind(attention_p, *operands, **params)


def _results(wanted=None):
    """What the results are: cotangents of those wanted, where that is a parameter."""
    return _RESULTS if wanted is None else [name for name, want in zip(MOVING, wanted, strict=True) if want]


def _names(primitive, *, present, wanted=None, **params):
    """The names of the axes of what is there of the operands, and of the results."""
    del params
    there = [_NAMES[name] for name, is_there in zip(_OPERANDS[primitive], present, strict=True) if is_there]
    return there, [_NAMES[name] for name in _results(wanted)]


def _batch_of(name, array):
    return array.shape[: array.ndim - len(_NAMES[name])]


def _types(primitive, *avals, present, wanted=None, **params):
    """The types of the results."""
    given = dict(zip(OPERANDS, unpack(present, avals)[:_COUNT], strict=True))
    if wanted is None:
        query, names = given["query"], [name for name, there in zip(_OPERANDS[primitive], present, strict=True) if there]
        batch = lax.broadcast_shapes(*map(_batch_of, names, avals))
        length, heads, _ = query.shape[-3:]
        out = jax.ShapeDtypeStruct((*batch, length, heads, given["value"].shape[-1]), query.dtype)
        types = [out, jax.ShapeDtypeStruct((*batch, heads, length), accumulator(query.dtype))]
    else:
        types = [given[name] for name in _results(wanted)]
    names_in, names_out = _names(primitive, present=present, wanted=wanted)
    return sharding.typed_alike(types, avals, names_out, names_in)


def _batch(primitive, name, operands, dims, *, present, wanted=None, **params):
    """Adds a batch axis in front, of size 1 in operands that are not batched; of its whole size where a cotangent is wanted."""
    size = next(operand.shape[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None)
    whole = {OPERANDS.index(moving) for moving in (() if wanted is None else _results(wanted))}

    def aligned(index, operand, dim):
        if operand is None:
            return None
        if dim is not None:
            return jnp.moveaxis(operand, dim, 0)
        return jnp.broadcast_to(operand[None], (size if index in whole else 1, *operand.shape))

    given = zip(unpack(present, operands), unpack(present, dims), strict=True)
    operands = [aligned(index, operand, dim) for index, (operand, dim) in enumerate(given)]
    results = bind(primitive, *operands, **params, **({} if wanted is None else {"wanted": wanted}))
    return results, [0] * len(results)


def _attention_jvp(primals, tangents, *, present, **params):
    operands, tangents = unpack(present, primals), unpack(present, tangents)
    results = attention(*operands, **params)
    moves = [_none_if_zero(tangents[index]) for index in _MOVING]
    if all(move is None for move in moves):
        return results, [_zero(result) for result in results]
    # The results are the named ones too: attention would run again for an unnamed one that something else has to save.
    results = [checkpoint_name(result, name) for result, name in zip(results, SAVED_NAMES, strict=True)]
    return results, bind(attention_jvp_p, *operands, *results, *moves, **params)


def _map_jvp(primitive, name, primals, tangents, *, present, **params):
    """The jvp rule of a map that is linear in its operands behind those that are saved."""
    operands, tangents = unpack(present, primals), [_none_if_zero(t) for t in unpack(present, tangents)]
    results = bind(primitive, *operands, **params)
    parts = [_zero(result) for result in results]
    if any(t is not None for t in tangents[_SAVED:]):
        parts = _added(parts, bind(primitive, *operands[:_SAVED], *tangents[_SAVED:], **params))
    if moving := [index for index, t in enumerate(tangents[:_SAVED]) if t is not None]:
        values, moves = [operands[index] for index in moving], [tangents[index] for index in moving]
        function = functools.partial(_reference, name, operands, moving, results, params)
        parts = _added(parts, jax.jvp(function, values, moves)[1])
    return results, parts


def _reference(name, operands, moving, results, params, *values):
    """The reference of a primitive as a function of some of its operands, on shards where types say how those are sharded."""
    replaced = dict(zip(moving, values, strict=True))
    operands = [replaced.get(index, operand) for index, operand in enumerate(operands)]
    present = tuple(operand is not None for operand in operands)
    options = {key: value for key, value in params.items() if key != "implementation"}

    def function(*given, axis_name=()):
        del axis_name
        return getattr(xla, name)(*unpack(present, given), **options)

    given = [operand for operand in operands if operand is not None]
    types = [jax.typeof(operand) for operand in given]
    if sharding.explicit_mesh(types) is not None:
        names = _names(name, present=present, **params)
        on_shards = sharding.on_explicit_axes(function, types, [jax.typeof(r) for r in results], *names)
        return jax.tree.leaves(on_shards(*given))
    return function(*given)


def _jvp_transpose(cotangents, *operands, present, **params):
    """From the cotangents of dout and dlse, those of the tangents."""
    operands = unpack(present, operands)
    types = [operand.aval if ad.is_undefined_primal(operand) else None for operand in operands[_SAVED:]]
    wanted, cotangents = tuple(kind is not None for kind in types), [_none_if_zero(c) for c in cotangents]
    results: list[Any] = [None] * len(operands)
    if any(c is not None for c in cotangents):
        saved = operands[:_SAVED]
        for index, kind in zip(_MOVING, types, strict=True):  # a tangent may be batched where what it belongs to is not
            if kind is not None and (shape := lax.broadcast_shapes(kind.shape, saved[index].shape)) != saved[index].shape:
                saved[index] = jnp.broadcast_to(saved[index], shape)
        found = iter(bind(attention_vjp_p, *saved, *cotangents, wanted=wanted, **params))
        results[_SAVED:] = [None if kind is None else summed_to(next(found), kind.shape) for kind in types]
    return [result for result, there in zip(results, present, strict=True) if there]


def _vjp_transpose(cotangents, *operands, present, wanted, **params):
    """From the cotangents of what is wanted, those of dout and dlse."""
    operands, cotangents = unpack(present, operands), [_none_if_zero(c) for c in cotangents]
    types = [operand.aval if ad.is_undefined_primal(operand) else None for operand in operands[_SAVED:]]
    results: list[Any] = [None] * len(operands)
    if any(c is not None for c in cotangents):
        found = bind(attention_jvp_p, *operands[:_SAVED], *unpack(wanted, cotangents), **params)
        pairs = zip(types, found, strict=True)
        results[_SAVED:] = [None if kind is None else summed_to(result, kind.shape) for kind, result in pairs]
    return [result for result, there in zip(results, present, strict=True) if there]


def _none_if_zero(tangent):
    return None if type(tangent) is ad.Zero else tangent


def _zero(primal) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _added(left, right):
    return [ad.add_tangents(a, b) for a, b in zip(left, right, strict=True)]


def _define(name):
    types, names = functools.partial(_types, name), functools.partial(_names, name)
    p = define("attention", name, types, multiple_results=True, names=names)
    set_rule(batching.primitive_batchers, p, functools.partial(_batch, p, name))
    return p


def _define_map(name, transpose):
    p = _define(name)
    set_rule(ad.primitive_jvps, p, functools.partial(_map_jvp, p, name))
    set_rule(ad.primitive_transposes, p, transpose)
    return p


attention_p = _define("attention")
set_rule(ad.primitive_jvps, attention_p, _attention_jvp)
attention_jvp_p = _define_map("attention_jvp", _jvp_transpose)
attention_vjp_p = _define_map("attention_vjp", _vjp_transpose)
