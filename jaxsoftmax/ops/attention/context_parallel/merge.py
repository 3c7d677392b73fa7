"""Merge: devices share the keys and have the same queries. Each attends to its own keys, and the states of all devices merge.

1. Each device attends to its keys, in a call for each piece of them, and merges the states of its pieces.
2. One collective brings the states `(lse, out)` of all devices: `n - 1` times the bytes of a row of queries in float32, and one
   number more. Where rows are many, one reduction finds the maximum and one adds up instead.
3. Every device merges the states in the same order.

This is a decoding step whose cache is sharded: it sends nothing that grows with the number of keys.

Where a `shard_map` of the user shards the keys, a sum over devices does step 2: by its type the result is the same on all
devices, and its transpose is right whether `check_vma` checks that or not. There `api.py` calls the rule around the primitive.
In the primitive the cotangent of the output, which all devices have, could be a whole one or a part of one.
"""

import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax import online
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.context_parallel import attend, cut
from jaxsoftmax.ops.attention.context_parallel.attend import KeyShard
from jaxsoftmax.ops.attention.context_parallel.cut import EVERYTHING
from jaxsoftmax.ops.attention.context_parallel.shard import AttentionShard, add_named, without_sinks
from jaxsoftmax.ops.attention.context_parallel.visible import AttentionPart
from jaxsoftmax.ops.attention.operands import state_of

MOST_GATHERED_NUMBERS = 2**22  # numbers in the outputs of all devices, above which states are summed and not gathered


def attention(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[out, lse]`."""
    at, sinks, query = shard.n_batch_axes, shard.operands.get("sinks"), shard.operands["query"]
    shard = without_sinks(shard)
    keys, options = _own_keys(shard), {"return_lse": True, "is_partial": True}
    results = [attend.attend(shard, primitive.ATTENTION, part, keys, **options) for part in _parts(shard)]
    states = [state_of(out, lse, shard.sum_dtype) for out, lse in results]
    state = _merged_over_devices(shard, functools.reduce(online.merge, states))
    if sinks is not None:  # keys without a value, which all devices have
        m = jnp.broadcast_to(jnp.expand_dims(sinks, (at, at + 1)).astype(shard.sum_dtype), state.m.shape)
        state = online.merge(state, online.State(m, jnp.ones_like(m), jnp.zeros_like(cast(jax.Array, state.o))))
    state: Any = online.finish(state)
    out, lse = state.o if shard.is_partial else state.o.astype(query.dtype), jnp.swapaxes(state.m, -1, -2)
    return [cut.join_pieces("out", out, at), cut.join_pieces("lse", lse, at)]


def tangents(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[dout, dlse]`."""
    axes, d_sinks = shard.sequences.keys.axes, shard.operands.get("d_sinks")
    shard = shard.without("d_sinks")
    if d_sinks is not None:  # which count once
        d_sinks = jnp.where(shard.sequences.keys.index == 0, d_sinks, 0)
    out, lse = attend.add_tangents(shard, None, _own_keys(shard), _parts(shard), d_sinks)
    return attend.finish_tangents(shard, *lax.psum((out, lse), axes))


def cotangents(shard: AttentionShard, wanted: Sequence[str]) -> list[jax.Array]:
    """Computes the cotangents of the operands `wanted`."""
    shard = attend.before_cotangents(shard)
    sums = attend.zero_cotangents(shard, wanted)
    sums, of_keys = attend.add_cotangents(shard, wanted, sums, _own_keys(shard), _parts(shard))
    sums = add_named(sums, of_keys)

    def counted_once(name):  # every device has the cotangent of the sinks
        return jnp.where(shard.sequences.keys.index == 0, sums[name], 0) if name == "sinks" else sums[name]

    return [attend.finish_cotangent(shard, name, counted_once(name)) for name in wanted]


def _own_keys(shard) -> KeyShard:
    return KeyShard(shard.keys_in_pieces(), shard.sequences.keys.index)


def _parts(shard) -> list[AttentionPart]:
    pieces = [slice(piece, piece + 1) for piece in range(shard.sequences.keys.n_pieces)]
    return [AttentionPart(EVERYTHING, piece, shard.sequences.window) for piece in pieces]


def _merged_over_devices(shard, state) -> online.State:
    """Merges the states of all devices, by one collective unless there are many rows."""
    keys, finished = shard.sequences.keys, online.finish(state)
    m, o = finished.m, cast(jax.Array, finished.o)
    if keys.devices * o.size > MOST_GATHERED_NUMBERS:
        top = lax.pmax(lax.stop_gradient(m), keys.axes)
        return online.State(top, *lax.psum(online.rescale(finished, top)[1:], keys.axes))
    both = jnp.concatenate([o, m[..., None]], -1)
    if shard.is_manual:
        is_own = lax.iota(np.int32, keys.devices).reshape(-1, *(1,) * both.ndim) == keys.index
        both = lax.psum(jnp.where(is_own, both[None], 0), keys.axes)
    else:
        both = lax.all_gather(both, keys.axes)
    o, m = jnp.split(both, [o.shape[-1]], -1)

    def state_of_device(i):
        return state_of(o[i], jnp.swapaxes(m[i, ..., 0], -1, -2), shard.sum_dtype)

    return attend.repeat(lambda i, state: online.merge(state, state_of_device(i)), 1, keys.devices, state_of_device(0))
