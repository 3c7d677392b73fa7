"""The decoding kernel in NumPy, computed as its plan says."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax import cache
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention import api
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention.mosaic_sm90 import decode, forward
from jaxsoftmax.ops.attention.mosaic_sm90.common import HOST, LOG2E


def played(plan, given):
    """Computes what the kernel of a plan does."""
    group, pages = plan.rows.heads_per_query, plan.pages
    named = {name: np.asarray(array) for name, array in given.items()}

    def whole(name, *axes):
        """An operand of the whole batch, with these axes of the scores `[entries, heads, rows, keys]`."""
        array = named[name]
        own = array.shape[array.ndim - len(axes) :] if axes else ()
        array = np.broadcast_to(array, (*plan.batch, *own)).reshape(-1, *own)
        return np.expand_dims(array, [axis for axis in (1, 2, 3) if axis not in axes]) if len(axes) < 3 else array

    (rows, heads, _), keys = plan.query, plan.key[0]
    if pages is not None:
        table = np.clip(whole("page_table", 3), 0, pages.count - 1)[:, 0, 0]
        for name in ("key", "value"):
            stored = named[f"{name}_pages"]
            own = np.broadcast_to(stored, (*plan.batch, *stored.shape[-4:])).reshape(-1, *stored.shape[-4:])
            named[name] = np.stack([entry[numbers] for entry, numbers in zip(own, table, strict=True)])
            named[name] = named[name].reshape(*plan.batch, -1, *stored.shape[-2:])
    for name in ("key", "value") if plan.bytes_dtype else ():
        named[name] = of_bytes(plan, named, name)
    query, key, value = (whole(name, 1, 2, 3).astype(np.float64) for name in ("query", "key", "value"))
    if plan.rows.box is not None:
        query = query.reshape(*query.shape[:2], heads, group, -1).swapaxes(1, 2).reshape(len(query), heads, rows, -1)
    scores = plan.scale * (query @ key.transpose(0, 2, 3, 1))
    if plan.soft_cap is not None:
        scores = plan.soft_cap * np.tanh(scores / plan.soft_cap)
    own, cols, (left, right) = np.arange(rows)[:, None] // group, np.arange(keys), plan.window
    at = own + (whole("query_offset") if "query_offset" in named else 0)
    seen = np.ones(scores.shape, bool)
    seen &= True if left is None else cols >= at - left
    seen &= True if right is None else cols <= at + right
    seen &= own < whole("query_lengths") if "query_lengths" in named else True
    seen &= cols < whole("key_lengths") if "key_lengths" in named else True
    if "query_segments" in named:
        seen &= whole("query_segments", 2) == whole("key_segments", 3)
    seen &= whole("mask", 1, 2, 3) if "mask" in named else True
    if "bias" in named:
        scores = scores + whole("bias", 1, 2, 3).astype(np.float64)
    scores, states = np.where(seen, scores, -np.inf), []

    def numbers(name, most):
        own = np.clip(whole(name), 0, most) if name in named else np.full((1, 1, 1, 1), most)
        return np.broadcast_to(own, (len(scores), 1, 1, 1)).ravel().tolist()

    facts = numbers("query_lengths", plan.queries), numbers("key_lengths", keys)
    offsets = np.broadcast_to(whole("query_offset") if "query_offset" in named else 0, (len(scores), 1, 1, 1)).ravel().tolist()
    visited = [plan.seen(lengths, 0, plan.queries, HOST, at) for *lengths, at in zip(*facts, offsets, strict=True)]
    for split in range(plan.splits):
        parts = np.array([plan.part(*entry, split, HOST) for entry in visited]).reshape(-1, 2) * plan.config.block_kv
        first, last = (parts[:, side].reshape(-1, 1, 1, 1) for side in range(2))
        some = slice(low := np.min(first, initial=keys), max(low, np.max(last, initial=0)))  # the keys of any entry
        part = np.where((cols >= first) & (cols < last), scores, -np.inf)[..., some]
        sink = np.full((1, heads, rows, 1), -np.inf)
        if split == 0 and "sinks" in named:
            sink = whole("sinks", 1).reshape(-1, heads, rows, 1).astype(np.float64)
        m = np.maximum(np.max(part, -1, keepdims=True, initial=-np.inf), sink)
        top = np.where(m == -np.inf, 0, m)
        weights, d = np.exp(part - top), np.sum(np.exp(part - top), -1, keepdims=True) + np.exp(sink - top)
        o = weights @ value[:, some].swapaxes(1, 2)
        states.append((np.where(d == 0, np.nan if plan.splits > 1 else 0, o), m[..., 0], d[..., 0]))
    o, m, d = (np.stack(parts, 2) for parts in zip(*states, strict=True))
    if plan.splits > 1:
        return [np.asarray(array, np.float32) for array in (o, m * (LOG2E / plan.unit), d)]
    with np.errstate(divide="ignore"):
        lse = m + np.log(d)
    o = (o / np.where(d == 0, 1, d)[..., None])[:, :, 0]
    if plan.rows.box is not None:
        o = o.reshape(*o.shape[:2], plan.queries, group, -1).swapaxes(1, 2).reshape(len(o), plan.queries, -1, o.shape[-1])
    return [np.asarray(o, given["query"].dtype), np.asarray(lse, np.float32)]


def types_of(plan, dtype):
    """The types of what `played` gives."""
    (rows, heads, _), size = plan.query, plan.value_size
    own = math.prod(plan.batch), heads, plan.splits, rows
    if plan.splits > 1:
        return [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*own, size), own, own)]
    shape = (
        (own[0], plan.queries, heads * plan.rows.heads_per_query, size)
        if plan.rows.box is not None
        else (own[0], heads, rows, size)
    )
    return [jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(own, jnp.float32)]


def of_bytes(plan, named, name):
    """Keys or values of 8 bits as the kernel multiplies them, `[*batch, keys, heads, size]`, from what has the same bits."""
    array = named[name].view(jnp.dtype(plan.bytes_dtype)).astype(np.float32)
    if (scale := named.get(f"{name}_page_scale")) is None:
        return array.astype(np.float64) * named[f"{name}_scale"][..., None, :, None]
    numbers = np.clip(named["page_table"], 0, plan.pages.count - 1)
    entries = np.broadcast_to(scale.view(np.float32), (*plan.batch, *scale.shape[-2:]))
    scale = np.repeat(np.take_along_axis(entries, numbers[..., None], -2), plan.pages.size, -2)
    return (array * scale[..., None]).astype(named["query"].dtype)


def play(monkeypatch):
    """Lists the kernels of calls of attention, all of few queries, with NumPy in the place of the kernel."""
    kernels = []

    def launch(kernel, operands, is_partial, is_ordered):
        del is_partial, is_ordered
        kernels.append(kernel)
        return jax.pure_callback(functools.partial(played, kernel), types_of(kernel, operands["query"].dtype), dict(operands))

    def bind(operation, operands, *, implementation, **params):
        del implementation
        types = {name: jax.typeof(operand) for name, operand in operands.items()}
        plan = mosaic.plan(operation.problem(operation, types, params), HOPPER)
        plan = plan.plan if isinstance(plan, Refusal) else plan  # as where the user asks for it
        assert isinstance(plan, decode.DecodePlan), plan
        return plan.run(**operands)

    monkeypatch.setattr(forward, "launch", launch)
    for module in (api, cache):
        monkeypatch.setattr(module, "bind", bind)
    return kernels
