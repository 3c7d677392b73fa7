"""Attention as JAX primitives.

    dot_product_attention      out, and with `return_lse` lse
    dot_product_attention_jvp  tangents of out and lse, from the operands, out, lse and the tangents of `MOVING`
    dot_product_attention_vjp  cotangents of the `wanted` operands, from the operands, out, lse and the cotangents of both
    paged_attention            the first, with keys and values in pages

The jvp is linear in the tangents, and the vjp is its transpose. So every implementation saves the same arrays: the operands,
out and lse; out and lse under the names `SAVED_NAMES`, for the policies of `jax.checkpoint`. A policy that saves both names
leaves nothing for which attention would run again. The derivatives of jvp and vjp by other operands than (co)tangents are those
of the reference.

All operands have the same number of batch axes in front, each of size 1 if an operand does not vary along it. A tangent may be
None, for zero, and so may one of the two cotangents.

All primitives have the parameters `scale`, `window`, `soft_cap`, `dropout_rate`, `precision`, `implementation` and
`deterministic_gradients` (True if derivatives must have the same bits run after run). The first has `return_lse`, and
`is_partial`, True if out is one of several that are merged: it is not rounded then. The vjp has `wanted`, the names of the
operands whose cotangents it returns.

Keys and values of 8 bits come with `key_scale` and `value_scale`, float32, one number for each head. Derivatives multiply keys
and values by the scales first, so that jvp and vjp have no such operands.

`paged_attention` takes `key_pages` and `value_pages`, `[pages, keys, heads, size]`, and `page_table`, the numbers of the pages
of a sequence in their order. It may have a scale for each page and head, `[pages, heads]`. It has no dropout, no lengths of
queries and no segments. Its derivatives gather keys and values, and are those of `dot_product_attention`.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.interpreters import ad

from jaxsoftmax._core import lower, sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import OnShards, Operation
from jaxsoftmax._core.primitive import bind, define, set_jvp, set_transpose, summed_to
from jaxsoftmax.ops.attention.implementations import ATTENTION_FAMILY
from jaxsoftmax.ops.attention.operands import (
    COTANGENTS,
    MOVING,
    OPERANDS,
    PAGED_OPERANDS,
    RESULTS,
    TABLES,
    TANGENTS,
    AttentionProblem,
    batch_of,
    dequantised,
    without_pages,
)

# The names of out and lse where derivatives save them.
SAVED_NAMES = ("jaxsoftmax_attention_out", "jaxsoftmax_attention_lse")


def _types(operands, *, return_lse=True, is_partial=False, **params):
    """Returns the types of out and lse, or of their tangents."""
    del params
    query, value = operands["query"], operands["value"] if "value" in operands else operands["value_pages"]
    batch, (*_, length, heads, _) = batch_of(operands), query.shape
    dtype = accumulator(query.dtype) if is_partial else query.dtype
    out = jax.ShapeDtypeStruct((*batch, length, heads, value.shape[-1]), dtype)
    return [out, jax.ShapeDtypeStruct((*batch, heads, length), accumulator(query.dtype))][: 2 if return_lse else 1]


_SEQUENCES: dict[str, Any] = {
    "problem": AttentionProblem,
    "joined": ("queries", "keys"),
    "on_shards": OnShards.EVERYTHING,
    "knows_machine": True,
    "is_reordered": lambda zigzag=None, **params: zigzag is not None,
    "depends_on_cuts": lambda strategy=None, **params: strategy is not None,
}
ATTENTION = define(
    Operation(
        ATTENTION_FAMILY,
        "dot_product_attention",
        OPERANDS,
        _types,
        lambda return_lse, **params: RESULTS[: 2 if return_lse else 1],
        **_SEQUENCES,
    )
)
ATTENTION_JVP = define(
    Operation(
        ATTENTION_FAMILY,
        "dot_product_attention_jvp",
        (*OPERANDS, *RESULTS, *TANGENTS),
        _types,
        lambda **params: RESULTS,
        linear=tuple(tangent.name for tangent in TANGENTS),
        **_SEQUENCES,
    )
)
ATTENTION_VJP = define(
    Operation(
        ATTENTION_FAMILY,
        "dot_product_attention_vjp",
        (*OPERANDS, *RESULTS, *COTANGENTS),
        lambda operands, wanted, **params: [operands[name] for name in wanted],
        lambda wanted, **params: [MOVING[name] for name in wanted],
        linear=tuple(cotangent.name for cotangent in COTANGENTS),
        whole_in_batch=lambda wanted, **params: wanted,
        **_SEQUENCES,
    )
)
PAGED = define(
    Operation(
        ATTENTION_FAMILY,
        "paged_attention",
        PAGED_OPERANDS,
        _types,
        lambda return_lse, **params: RESULTS[: 2 if return_lse else 1],
        problem=AttentionProblem,
        knows_machine=True,
    )
)


def _is_of_bytes(operands):
    """Returns True if keys or values have 8 bits, and so a scale."""
    return not {"key_scale", "value_scale"}.isdisjoint(operands)


def _attention_jvp(operands, tangents, *, return_lse, **params):
    score_mod = params.get("score_mod")
    read = () if score_mod is None else score_mod.table_names
    tangents = {name: t for name, t in tangents.items() if name not in TABLES or name in read}  # a mask has no derivative
    if not tangents:
        results = bind(ATTENTION, operands, return_lse=return_lse, **params)
        return results, [None] * len(results)
    if _is_of_bytes(operands):
        attend = functools.partial(bind, ATTENTION, return_lse=return_lse, **params)
        return _jvp_of(lambda operands: attend(dequantised(operands)), operands, tangents)
    results = bind(ATTENTION, operands, return_lse=True, **params)
    params.pop("is_partial", None)  # derivatives have no such parameter
    # The results are the named arrays too: if another rule saved an unnamed one, attention would run again for that.
    results = [checkpoint_name(result, name) for result, name in zip(results, SAVED_NAMES, strict=True)]
    out, lse = results
    saved = operands | {"out": out.astype(operands["query"].dtype), "lse": lse}
    tangents_out = bind(ATTENTION_JVP, saved | {f"d_{name}": t for name, t in tangents.items()}, **params)
    tangents_out[0] = tangents_out[0].astype(out.dtype)
    return (results, tangents_out) if return_lse else (results[:1], tangents_out[:1])


def _attention_transpose(cotangents, operands, types, *, return_lse, **params):
    """Computes the cotangent of the values or of their scale: attention is linear in nothing else."""
    if set(types) not in ({"value"}, {"value_scale"}):
        raise NotImplementedError(
            f"dot_product_attention: it is linear in value or value_scale alone, and not in {' and '.join(types)}"
        )
    if _is_of_bytes(operands | types):
        attend = functools.partial(bind, ATTENTION, return_lse=return_lse, **params)
        return _transpose_of(lambda operands: attend(dequantised(operands)), cotangents, operands, types)
    operands = operands | {"value": jnp.zeros(types["value"].shape, types["value"].dtype)}
    params.pop("is_partial", None)
    out, lse = bind(ATTENTION, operands, return_lse=True, **params)
    d_out = None if cotangents[0] is None else cotangents[0].astype(out.dtype)
    (d_value,) = bind(ATTENTION_VJP, operands | {"out": out, "lse": lse, "d_out": d_out}, wanted=("value",), **params)
    return {"value": d_value}


def _jvp_transpose(cotangents, operands, types, **params):
    """Computes the cotangents of the tangents from those of dout and dlse."""
    wanted = tuple(name for name in MOVING if f"d_{name}" in types)
    operands = dict(operands)
    for name in wanted:  # a tangent may be batched although its operand is not
        shape = lax.broadcast_shapes(types[f"d_{name}"].shape, operands[name].shape)
        if shape != operands[name].shape:
            operands[name] = jnp.broadcast_to(operands[name], shape)
    operands |= dict(zip(("d_out", "d_lse"), cotangents, strict=True))
    results = bind(ATTENTION_VJP, operands, wanted=wanted, **params)
    return {f"d_{name}": summed_to(x, types[f"d_{name}"].shape) for name, x in zip(wanted, results, strict=True)}


def _vjp_transpose(cotangents, operands, types, *, wanted, **params):
    """Computes the cotangents of dout and dlse from those of the wanted cotangents."""
    tangents = {f"d_{name}": cotangent for name, cotangent in zip(wanted, cotangents, strict=True)}
    results = dict(zip(("d_out", "d_lse"), bind(ATTENTION_JVP, operands | tangents, **params), strict=True))
    return {name: summed_to(results[name], kind.shape) for name, kind in types.items()}


def _gathered(operands, params):
    """Computes `paged_attention` from gathered keys and values; on explicit mesh axes by the reference."""
    types = [jax.typeof(operand) for operand in operands.values()]
    if not any(map(sharding.has_explicit_axes, types)):
        return bind(ATTENTION, without_pages(operands), dropout_rate=0.0, **params)
    results = sharding.types_of_results(lambda operands: bind(PAGED, operands, **params), operands)
    return jax.tree.leaves(lower.on_reference(PAGED, operands, results, **params))


def _paged_jvp(operands, tangents, **params):
    return _jvp_of(functools.partial(_gathered, params=params), operands, tangents)


def _paged_transpose(cotangents, operands, types, **params):
    """Computes the cotangent of the pages of values: attention is linear in no other pages."""
    if set(types) != {"value_pages"}:
        raise NotImplementedError(f"paged_attention: it is linear in value_pages alone, and not in {' and '.join(types)}")
    return _transpose_of(functools.partial(_gathered, params=params), cotangents, operands, types)


def _jvp_of(f, operands, tangents):
    """Computes the results and tangents of `f`, a function of operands by name."""
    moving = {name: operands[name] for name in tangents}
    return jax.jvp(lambda moving: f(operands | moving), (moving,), (tangents,))


def _transpose_of(f, cotangents, operands, types):
    """Computes the cotangents of operands of these types by transposing `f`, a function of operands by name."""
    zeros = {name: ad.Zero(kind).instantiate() for name, kind in types.items()}  # sharded, and varying, as the types say
    results, pull = jax.vjp(lambda moving: f(operands | moving), zeros)
    return pull([jnp.zeros_like(r) if c is None else c for c, r in zip(cotangents, results, strict=True)])[0]


set_jvp(ATTENTION, _attention_jvp)
set_jvp(PAGED, _paged_jvp)
set_transpose(PAGED, _paged_transpose)
set_transpose(ATTENTION, _attention_transpose)
set_transpose(ATTENTION_JVP, _jvp_transpose)
set_transpose(ATTENTION_VJP, _vjp_transpose)
