"""The operands, results and problems of attention: axes behind the batch, pages, 8 bits, states, cotangents of rows."""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.operation import Operand
from jaxsoftmax._core.problem import Problem

# A letter stands for an axis: query heads N, key heads K, queries T, keys S, head size H (values may have another one), the
# four numbers of `seeds` 4 (two words, and the positions of the first query and key), pages P, each with a number S of keys,
# the pages of a sequence M, and the elements of a table E, whose axis N always has size 1.
_OPERANDS = {"query": "TNH", "key": "SKH", "value": "SKH", "bias": "NTS", "mask": "NTS", "query_lengths": "", "key_lengths": ""}
_OPERANDS |= {"query_offset": "", "query_segments": "T", "key_segments": "S", "sinks": "N", "seeds": "N4"}
_OPERANDS |= {"key_scale": "K", "value_scale": "K"}
# What score and mask functions read beside scores: see `score_functions.py`. `block_kinds` says what a mask function leaves of
# blocks U of queries and V of keys: see `block_masks.py`.
MAX_TABLES = 16


def table_name(number: int) -> str:
    """Returns the name of an operand that is a table of a score or mask function."""
    return f"table_{number}"


TABLES = tuple(map(table_name, range(MAX_TABLES)))
_OPERANDS |= {"entries": "", "head_numbers": "N", "query_numbers": "T", "key_numbers": "S", "block_kinds": "NUV"}
_OPERANDS |= dict.fromkeys(TABLES, "NE")
_RESULTS = {"out": "TNH", "lse": "NT"}
_PAGED = {"key_pages": "PSKH", "value_pages": "PSKH", "page_table": "M", "key_page_scale": "PK", "value_page_scale": "PK"}


_NAMES = {"N": "heads", "K": "heads", "T": "queries", "S": "keys"}


def _records(axes_of: dict[str, str]) -> tuple[Operand, ...]:
    """Returns the records of operands, from the letters of their axes.

    Heads and sequences may be sharded. Pages may not, nor the keys of masks and biases, whose queries may.
    """

    def name_of(axis, axes):
        return None if axis == "S" and axes in ("NTS", "PSKH") else _NAMES.get(axis)

    return tuple(Operand(name, tuple(name_of(axis, axes) for axis in axes)) for name, axes in axes_of.items())


OPERANDS, RESULTS = _records(_OPERANDS), _records(_RESULTS)
_OTHERS = ("bias", "mask", "key_lengths", "query_offset", "sinks", "key_scale", "value_scale")
_OTHERS += ("entries", "head_numbers", *TABLES)
PAGED_OPERANDS = _records({name: (_OPERANDS | _PAGED)[name] for name in ("query", *_PAGED, *_OTHERS)})

# The operands that have tangents and cotangents, those tangents, and the cotangents of the results.
_MOVING = ("query", "key", "value", "bias", "sinks", *TABLES)
MOVING = {operand.name: operand for operand in OPERANDS if operand.name in _MOVING}
TANGENTS = tuple(operand.called(f"d_{name}") for name, operand in MOVING.items())
COTANGENTS = tuple(result.called(f"d_{result.name}") for result in RESULTS)

# Results for other keys, with which an implementation merges its own, and the sum of cotangents of queries from other keys, to
# which it adds. A step of a ring passes them to implementations; the primitives have no such operands.
INITIAL_RESULTS, INITIAL_D_QUERY = ("initial_out", "initial_lse"), "initial_d_query"

AXES = _OPERANDS | _RESULTS
AXES |= {f"d_{name}": AXES[name] for name in (*MOVING, *_RESULTS)} | _PAGED


def batch_of(arrays) -> tuple[int, ...]:
    """Returns the shape to which the batches of operands and results broadcast, from arrays or types; None is absent."""
    present = [(name, array) for name, array in arrays.items() if array is not None]
    return lax.broadcast_shapes(*(array.shape[: array.ndim - len(AXES[name])] for name, array in present))


def paged(arguments):
    """Splits arguments of paged attention into the operands that are present and the parameters, both by name."""
    names = {operand.name for operand in PAGED_OPERANDS}
    operands = {name: array for name, array in arguments.items() if name in names and array is not None}
    return operands, {name: option for name, option in arguments.items() if name not in names}


def without_pages(operands, dtype=None):
    """Gathers keys and values in the order of the page table, and returns the operands that `dot_product_attention` takes.

    Numbers of pages are clipped to the existing pages. If pages have scales, keys and values are `dequantised` in `dtype`.
    """
    table, gathered = operands["page_table"], {name: array for name, array in operands.items() if name not in _PAGED}
    for name in ("key", "value"):
        keys = _at_pages(operands[f"{name}_pages"], table)
        if f"{name}_page_scale" in operands:
            keys = _times(keys, _at_pages(operands[f"{name}_page_scale"], table), dtype or operands["query"].dtype)
        gathered[name] = keys.reshape(*keys.shape[:-4], -1, *keys.shape[-2:])
    has_page_scales = {"key_page_scale", "value_page_scale"} & set(operands)
    return dequantised(gathered, dtype) if has_page_scales else gathered


def _at_pages(array, table):
    """Gathers the pages of a table, `[*batch, M, ...]`, from `[*batch, pages, ...]`, whose batch axes may have size 1."""
    *batch, count = array.shape[: table.ndim]
    first = count * lax.iota(jnp.int32, math.prod(batch)).reshape(*batch, 1)  # index of the first page of each batch entry
    return array.reshape(-1, *array.shape[table.ndim :])[jnp.clip(table, 0, count - 1) + first]


def dequantised(operands, dtype=None):
    """Multiplies keys and values of 8 bits by their scales, in `dtype`; None stands for the dtype of the queries."""
    wide = {name: array for name, array in operands.items() if name not in ("key_scale", "value_scale")}
    for name in ("key", "value"):
        if operands.get(f"{name}_scale") is not None:
            wide[name] = _times(operands[name], operands[f"{name}_scale"], dtype or operands["query"].dtype)
    return wide


def _times(array, scale, dtype):
    """Multiplies keys or values of 8 bits, `[..., keys, heads, size]`, by scales `[..., heads]`, and rounds to a dtype."""
    array, scale = array.astype(scale.dtype), scale[..., None, :, None]
    product = array * scale
    # A product that is not finite has the derivative 0: it may belong to a key that no query sees, whose cotangent is 0.
    is_finite = jnp.isfinite(lax.stop_gradient(product))
    finite = jnp.where(is_finite, array, 0) * jnp.where(is_finite, scale, 0)
    return jnp.where(is_finite, finite, lax.stop_gradient(product)).astype(dtype)


def types_without_pages(types):
    """Returns the types of the operands that `without_pages` returns for operands of these types; None is absent."""
    present = {name: jax.ShapeDtypeStruct(kind.shape, kind.dtype) for name, kind in types.items() if kind is not None}
    return dict.fromkeys(types) | jax.eval_shape(without_pages, present)


@dataclass(frozen=True, eq=False)
class AttentionProblem(Problem):
    """One call of attention, of attention with pages, or of a derivative of attention."""

    @functools.cached_property
    def types(self) -> Mapping[str, Any]:
        """Types of the operands of attention that are present, by name. Pages count as the keys and values gathered from them.

        Results, tangents and cotangents, which derivatives have as operands too, are not among them.
        """
        types = types_without_pages(self.operands) if "page_table" in self.operands else self.operands
        return {operand.name: types[operand.name] for operand in OPERANDS if operand.name in types}

    @property
    def batch(self) -> tuple[int, ...]:
        """Sizes of the batch axes that the operands have together, tangents and results too."""
        return batch_of({name: kind for name, kind in self.operands.items() if name in AXES})

    @property
    def dtype(self) -> Any:
        """Dtype of the queries."""
        return self.types["query"].dtype

    @property
    def functions(self) -> dict[str, Any]:
        """The traced score and mask functions, by the names of the parameters."""
        return {name: self.params[name] for name in ("score_mod", "mask_mod") if self.params.get(name) is not None}

    @property
    def options(self) -> dict[str, Any]:
        """Parameters that say what the scores and weights are: `scale`, `window`, `soft_cap`, `dropout_rate`, and functions."""
        names = ("scale", "window", "soft_cap", "dropout_rate")
        return {"dropout_rate": 0.0} | {name: self.params[name] for name in names if name in self.params} | self.functions


def state_of(out, lse, dtype) -> Any:
    """Returns the state of queries from out and lse."""
    lse = jnp.swapaxes(lse, -1, -2)
    return online.State(lse, jnp.where(lse == -jnp.inf, 0, 1).astype(dtype), out.astype(dtype))


def merged(one, other):
    """Merges `(out, lse)` of some keys with `(out, lse)` of others; out gets the dtype of lse."""
    state: Any = online.finish(online.merge(*[state_of(out, lse, lse.dtype) for out, lse in (one, other)]))
    return state.o, jnp.swapaxes(state.m, -1, -2)


def cotangents_of_rows(operands, out, lse, d_out, d_lse, window, *, has_functions=False):
    """Returns the cotangent of out, and `delta = sum(out * d_out) - d_lse`.

    Both are 0 for queries that see no key: the caller's cotangents may be NaN or infinite there. `has_functions` says that a
    score or mask function may hide keys.
    """
    delta = jnp.zeros(lse.shape, jnp.float32)
    if d_out is None:
        d_out = jnp.zeros_like(out)
    else:
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1).mT
    left, empty = window[0], None
    hiding = {"bias", "mask", "query_lengths", "key_lengths", "query_segments", "query_offset"} & set(operands)
    if hiding or has_functions or (left is not None and operands["query"].shape[-3] > operands["key"].shape[-3] + left):
        empty = sees_no_key = lse == -jnp.inf
        if "sinks" in operands:
            sink = operands["sinks"].astype(jnp.float32)[..., None]
            # A query that sees nothing except the sink has the lse of the sink. Kernels convert the sink to powers of two and
            # back, less 13 in float16: one `eps` of the size is the largest error that was measured. With the 13 each step of a
            # ring rounds once more: 64 steps make 13 `eps`.
            size, steps = (jnp.abs(sink) + 16, 16) if out.dtype == jnp.float16 else (jnp.abs(sink) + 1, 2)
            is_sink = (lse == sink) | (jnp.abs(lse - sink) <= steps * jnp.finfo(jnp.float32).eps * size)
            sees_no_key |= is_sink & jnp.all(out == 0, -1).mT
        d_out, delta = jnp.where(sees_no_key.mT[..., None], 0, d_out), jnp.where(sees_no_key, 0, delta)
    if d_lse is not None:
        delta -= d_lse if empty is None else jnp.where(empty, 0, d_lse)
    return d_out, delta


def cotangents_of_sinks(sinks, lse, delta) -> jax.Array:
    """Computes the cotangents of the sinks, which act as keys without a value."""
    weight = weights_of_sinks(sinks, lse)
    return -jnp.sum(weight * delta, -1)


def weights_of_sinks(sinks, lse) -> jax.Array:
    """Computes the weights of the sinks, `[*batch, N, T]`: 0 where a query sees neither a key nor a sink."""
    return jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks.astype(jnp.float32)[..., None] - lse))
