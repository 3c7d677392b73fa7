"""Attention as JAX primitives.

`dot_product_attention` returns out and, where it is asked for, lse. Its tangent is `dot_product_attention_jvp`, which takes the
operands, out, lse and the tangents of `MOVING`, and is linear in the tangents; the transpose of that is
`dot_product_attention_vjp`, which takes the cotangents of out and lse instead. So the operands, out and lse are what is saved,
for every implementation; out and lse under the names `SAVED_NAMES`, for the policies of `jax.checkpoint`. Derivatives of both
linear maps, in anything but the (co)tangents, are those of the reference.

All operands have the same number of batch axes in front, each of size 1 where an operand does not vary along it. Any of the
tangents may be None, for zero, and so may one of the cotangents. Parameters of all are `scale`, `window`, `soft_cap`,
`dropout_rate`, `precision`, `deterministic_gradients` (True if derivatives must have the same bits run after run) and
`implementation`; of the first `return_lse` and `is_partial` (True if out, which is one of several that are merged, is not
rounded; False if it is absent), of the last `wanted`: the names of the operands whose cotangents it returns.

Keys and values may have 8 bits; then `key_scale` and `value_scale` are there too, of their heads, float32. Where attention is
differentiated they are multiplied first. `dot_product_attention_jvp` and the others do not have them.

`paged_attention` is the first with keys and values in pages, `[pages, keys, heads, size]`, and with `page_table`, the numbers
of the pages of a sequence in their order. Scales may be those of pages, `[pages, heads]`. It has no dropout, lengths of queries
or segments. Where it is differentiated, keys and values are gathered, and it is the first.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from jaxsoftmax._core import lower, sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.primitive import bind, define, set_jvp, set_transpose
from jaxsoftmax.ops.attention.implementations import ATTENTION_FAMILY
from jaxsoftmax.ops.attention.operands import (
    COTANGENTS,
    MOVING,
    OPERANDS,
    PAGED_OPERANDS,
    RESULTS,
    TANGENTS,
    batch_of,
    dequantised,
    without_pages,
)
from jaxsoftmax.ops.attention.problem import AttentionProblem
from jaxsoftmax.ops.attention.xla import summed_to

# What out and lse are called where derivatives save them.
SAVED_NAMES = ("jaxsoftmax_attention_out", "jaxsoftmax_attention_lse")


def _types(operands, *, return_lse=True, is_partial=False, **params):
    """The types of out and lse, or of their tangents."""
    del params
    query, value = operands["query"], operands["value"] if "value" in operands else operands["value_pages"]
    batch, (*_, length, heads, _) = batch_of(operands), query.shape
    dtype = accumulator(query.dtype) if is_partial else query.dtype
    out = jax.ShapeDtypeStruct((*batch, length, heads, value.shape[-1]), dtype)
    return [out, jax.ShapeDtypeStruct((*batch, heads, length), accumulator(query.dtype))][: 2 if return_lse else 1]


_SEQUENCES: dict[str, Any] = {
    "problem": AttentionProblem,
    "joined": ("queries", "keys"),
    "is_cut": True,
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
    """Whether there are scales, of keys or values of 8 bits."""
    return not {"key_scale", "value_scale"}.isdisjoint(operands)


def _attention_jvp(operands, tangents, *, return_lse, **params):
    if _is_of_bytes(operands):
        return _jvp_of(lambda given: bind(ATTENTION, dequantised(given), return_lse=return_lse, **params), operands, tangents)
    results = bind(ATTENTION, operands, return_lse=True, **params)
    params.pop("is_partial", None)  # derivatives have no such parameter
    # The results are the named ones too: attention would run again for an unnamed one that something else has to save.
    results = [checkpoint_name(result, name) for result, name in zip(results, SAVED_NAMES, strict=True)]
    out, lse = results
    saved = operands | {"out": out.astype(operands["query"].dtype), "lse": lse}
    tangents_out = bind(ATTENTION_JVP, saved | {f"d_{name}": t for name, t in tangents.items()}, **params)
    tangents_out[0] = tangents_out[0].astype(out.dtype)
    return (results, tangents_out) if return_lse else (results[:1], tangents_out[:1])


def _attention_transpose(cotangents, operands, types, *, return_lse, **params):
    """The transpose of attention in the values, in which alone it is linear."""
    if set(types) not in ({"value"}, {"value_scale"}):
        raise NotImplementedError(
            f"dot_product_attention: it is linear in value or value_scale alone, and not in {' and '.join(types)}"
        )
    if _is_of_bytes(operands | types):
        attend = functools.partial(bind, ATTENTION, return_lse=return_lse, **params)
        return _transpose_of(lambda given: attend(dequantised(given)), cotangents, operands, types)
    operands = operands | {"value": jnp.zeros(types["value"].shape, types["value"].dtype)}
    params.pop("is_partial", None)
    out, lse = bind(ATTENTION, operands, return_lse=True, **params)
    d_out = None if cotangents[0] is None else cotangents[0].astype(out.dtype)
    (d_value,) = bind(ATTENTION_VJP, operands | {"out": out, "lse": lse, "d_out": d_out}, wanted=("value",), **params)
    return {"value": d_value}


def _jvp_transpose(cotangents, operands, types, **params):
    """From the cotangents of dout and dlse, those of the tangents."""
    wanted = tuple(name for name in MOVING if f"d_{name}" in types)
    given = dict(operands)
    for name in wanted:  # a tangent may be batched where what it belongs to is not
        shape = lax.broadcast_shapes(types[f"d_{name}"].shape, given[name].shape)
        if shape != given[name].shape:
            given[name] = jnp.broadcast_to(given[name], shape)
    given |= dict(zip(("d_out", "d_lse"), cotangents, strict=True))
    found = bind(ATTENTION_VJP, given, wanted=wanted, **params)
    return {f"d_{name}": summed_to(x, types[f"d_{name}"].shape) for name, x in zip(wanted, found, strict=True)}


def _vjp_transpose(cotangents, operands, types, *, wanted, **params):
    """From the cotangents of what is wanted, those of dout and dlse."""
    tangents = {f"d_{name}": cotangent for name, cotangent in zip(wanted, cotangents, strict=True)}
    found = dict(zip(("d_out", "d_lse"), bind(ATTENTION_JVP, operands | tangents, **params), strict=True))
    return {name: summed_to(found[name], kind.shape) for name, kind in types.items()}


def _gathered(operands, params):
    """`paged_attention` as a function that gathers pages: on explicit mesh axes that of the reference."""
    types = [jax.typeof(operand) for operand in operands.values()]
    if not any(map(sharding.has_explicit_axes, types)):
        return bind(ATTENTION, without_pages(operands), dropout_rate=0.0, **params)
    results = [jax.typeof(result) for result in jax.eval_shape(lambda: bind(PAGED, operands, **params))]
    return jax.tree.leaves(lower.on_reference(PAGED, operands, results, **params))


def _paged_jvp(operands, tangents, **params):
    return _jvp_of(functools.partial(_gathered, params=params), operands, tangents)


def _paged_transpose(cotangents, operands, types, **params):
    """The transpose in the pages of values, in which alone it is linear."""
    if set(types) != {"value_pages"}:
        raise NotImplementedError(f"paged_attention: it is linear in value_pages alone, and not in {' and '.join(types)}")
    return _transpose_of(functools.partial(_gathered, params=params), cotangents, operands, types)


def _jvp_of(f, operands, tangents):
    """The results and tangents of a function of the operands, by name."""
    moving = {name: operands[name] for name in tangents}
    return jax.jvp(lambda moving: f(operands | moving), (moving,), (tangents,))


def _transpose_of(f, cotangents, operands, types):
    """The transpose of a function of the operands, by name, in those of these types."""
    zeros = {name: jnp.zeros(kind.shape, kind.dtype) for name, kind in types.items()}
    results, pull = jax.vjp(lambda moving: f(operands | moving), zeros)
    return pull([jnp.zeros_like(r) if c is None else c for c, r in zip(cotangents, results, strict=True)])[0]


set_jvp(ATTENTION, _attention_jvp)
set_jvp(PAGED, _paged_jvp)
set_transpose(PAGED, _paged_transpose)
set_transpose(ATTENTION, _attention_transpose)
set_transpose(ATTENTION_JVP, _jvp_transpose)
set_transpose(ATTENTION_VJP, _vjp_transpose)
