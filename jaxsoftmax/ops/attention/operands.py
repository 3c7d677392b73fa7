"""What the operands and results of attention are, the axes that they have behind those of the batch, states, and cotangents."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.operation import Operand

# A letter for each axis: query heads N, key heads K, queries T, keys S, head size H (that of values may differ), 4 for the two
# words of a seed and the positions of the first query and key, pages P of so many keys each, and M for the pages of a sequence.
_OPERANDS = {"query": "TNH", "key": "SKH", "value": "SKH", "bias": "NTS", "mask": "NTS", "query_lengths": "", "key_lengths": ""}
_OPERANDS |= {"query_offset": "", "query_segments": "T", "key_segments": "S", "sinks": "N", "seeds": "N4"}
_OPERANDS |= {"key_scale": "K", "value_scale": "K"}
_RESULTS = {"out": "TNH", "lse": "NT"}
_PAGED = {"key_pages": "PSKH", "value_pages": "PSKH", "page_table": "M", "key_page_scale": "PK", "value_page_scale": "PK"}


_NAMES = {"N": "heads", "K": "heads", "T": "queries", "S": "keys"}


def _records(axes_of: dict[str, str]) -> tuple[Operand, ...]:
    """Heads and sequences may be sharded, but keys not of masks and biases, whose queries may be; nor pages."""

    def name_of(axis, axes):
        return None if axis == "S" and axes in ("NTS", "PSKH") else _NAMES.get(axis)

    return tuple(Operand(name, tuple(name_of(axis, axes) for axis in axes)) for name, axes in axes_of.items())


OPERANDS, RESULTS = _records(_OPERANDS), _records(_RESULTS)
_OTHERS = ("bias", "mask", "key_lengths", "query_offset", "sinks", "key_scale", "value_scale")
PAGED_OPERANDS = _records({name: (_OPERANDS | _PAGED)[name] for name in ("query", *_PAGED, *_OTHERS)})

# The operands that have tangents and cotangents, those tangents, and the cotangents of the results.
MOVING = {operand.name: operand for operand in OPERANDS if operand.name in ("query", "key", "value", "bias", "sinks")}
TANGENTS = tuple(operand.called(f"d_{name}") for name, operand in MOVING.items())
COTANGENTS = tuple(result.called(f"d_{result.name}") for result in RESULTS)

AXES = _OPERANDS | _RESULTS
AXES |= {f"d_{name}": AXES[name] for name in (*MOVING, *_RESULTS)} | _PAGED


def batch_of(arrays) -> tuple[int, ...]:
    """The batch that operands and results, or their types, have together, of those that are there."""
    there = [(name, array) for name, array in arrays.items() if array is not None]
    return lax.broadcast_shapes(*(array.shape[: array.ndim - len(AXES[name])] for name, array in there))


def paged(given):
    """The operands of paged attention that are there, and what else is given, both by name."""
    names = {operand.name for operand in PAGED_OPERANDS}
    operands = {name: array for name, array in given.items() if name in names and array is not None}
    return operands, {name: option for name, option in given.items() if name not in names}


def without_pages(given, dtype=None):
    """Operands in which keys and values follow each other in the order of a page table, as dot_product_attention takes them.

    Numbers of pages are clipped to those that there are. `dtype` is that of `dequantised`.
    """
    table, found = given["page_table"], {name: array for name, array in given.items() if name not in _PAGED}
    for name in ("key", "value"):
        keys = _at_pages(given[f"{name}_pages"], table)
        if f"{name}_page_scale" in given:
            keys = _times(keys, _at_pages(given[f"{name}_page_scale"], table), dtype or given["query"].dtype)
        found[name] = keys.reshape(*keys.shape[:-4], -1, *keys.shape[-2:])
    has_page_scales = {"key_page_scale", "value_page_scale"} & set(given)
    return dequantised(found, dtype) if has_page_scales else found


def _at_pages(array, table):
    """Gathers the pages of a table, `[*batch, M, ...]`, from `[*batch, pages, ...]`, whose batch axes may have size 1."""
    *batch, count = array.shape[: table.ndim]
    first = count * lax.iota(jnp.int32, math.prod(batch)).reshape(*batch, 1)  # of the pages of a batch entry
    return array.reshape(-1, *array.shape[table.ndim :])[jnp.clip(table, 0, count - 1) + first]


def dequantised(given, dtype=None):
    """Operands of which none is of 8 bits: keys and values times their scales, in a dtype, None for that of the queries."""
    found = {name: array for name, array in given.items() if name not in ("key_scale", "value_scale")}
    for name in ("key", "value"):
        if given.get(f"{name}_scale") is not None:
            found[name] = _times(given[name], given[f"{name}_scale"], dtype or given["query"].dtype)
    return found


def _times(array, scale, dtype):
    """Keys or values of 8 bits, `[..., keys, heads, size]`, times the scales `[..., heads]`, rounded to a dtype."""
    array, scale = array.astype(scale.dtype), scale[..., None, :, None]
    product = array * scale
    # The derivatives of what is not finite are 0: it may belong to keys that no query sees, whose cotangents are 0.
    is_finite = jnp.isfinite(lax.stop_gradient(product))
    known = jnp.where(is_finite, array, 0) * jnp.where(is_finite, scale, 0)
    return jnp.where(is_finite, known, lax.stop_gradient(product)).astype(dtype)


def types_without_pages(types):
    """The types of `without_pages`, of the types of operands, of which some may be None."""
    there = {name: kind for name, kind in types.items() if kind is not None}
    return dict.fromkeys(types) | jax.eval_shape(
        without_pages, {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in there.items()}
    )


def state_of(out, lse, dtype) -> Any:
    """The state of queries of which out and lse are known."""
    lse = jnp.swapaxes(lse, -1, -2)
    return online.State(lse, jnp.where(lse == -jnp.inf, 0, 1).astype(dtype), out.astype(dtype))


def merged(one, other):
    """Out and lse of all keys, from those of two parts of them; out in the dtype of lse."""
    state: Any = online.finish(online.merge(*[state_of(out, lse, lse.dtype) for out, lse in (one, other)]))
    return state.o, jnp.swapaxes(state.m, -1, -2)


def cotangents_of_rows(given, out, lse, d_out, d_lse, window):
    """The cotangent of out, and delta: 0 for rows that see nothing, whose cotangents may be NaN, or infinite."""
    delta = jnp.zeros(lse.shape, jnp.float32)
    if d_out is None:
        d_out = jnp.zeros_like(out)
    else:
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1).mT
    left, empty = window[0], None
    of_operands = {"bias", "mask", "query_lengths", "key_lengths", "query_segments", "query_offset"} & set(given)
    if of_operands or (left is not None and given["query"].shape[-3] > given["key"].shape[-3] + left):
        empty = alone = lse == -jnp.inf
        if "sinks" in given:
            sink = given["sinks"].astype(jnp.float32)[..., None]
            # Kernels make it a power of two and back, in float16 with 13 taken off: at most one `eps` of the size was seen.
            # With those 13 each step of a ring rounds anew: 64 steps make 13 `eps`.
            size, steps = (jnp.abs(sink) + 16, 16) if out.dtype == jnp.float16 else (jnp.abs(sink) + 1, 2)
            is_sink = (lse == sink) | (jnp.abs(lse - sink) <= steps * jnp.finfo(jnp.float32).eps * size)
            alone |= is_sink & jnp.all(out == 0, -1).mT
        d_out, delta = jnp.where(alone.mT[..., None], 0, d_out), jnp.where(alone, 0, delta)
    if d_lse is not None:
        delta -= d_lse if empty is None else jnp.where(empty, 0, d_lse)
    return d_out, delta


def cotangents_of_sinks(sinks, lse, delta) -> jax.Array:
    """The cotangents of the sinks: they are keys without a value."""
    weight = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks.astype(jnp.float32)[..., None] - lse))
    return -jnp.sum(weight * delta, -1)
