"""All-gather: each device receives all keys and values, and attends to them once.

1. One collective brings the keys of all devices, and the order of zigzag is undone.
2. Each device attends to all keys with the offset of its queries: for each piece of queries, if the shard has two.
3. Backward, a reduce-scatter adds up the derivatives of the keys in float32, and gives each device its own.

Each of `n` devices receives `n - 1` times the bytes of its keys and values, which nothing hides, and has all of them in memory.
It is one kernel and one collective: best where a step of a ring takes less time than the keys that it sends. It serves each
order of the tokens, and queries and keys that are sharded over different mesh axes. Where only queries are sharded, nothing is
sent; the derivatives of keys then add up over devices once.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.context_parallel import attend, cut
from jaxsoftmax.ops.attention.context_parallel.attend import KeyShard
from jaxsoftmax.ops.attention.context_parallel.cut import EVERYTHING, OF_BOTH, OF_KEYS
from jaxsoftmax.ops.attention.context_parallel.order import from_zigzag, to_zigzag
from jaxsoftmax.ops.attention.context_parallel.shard import AttentionShard, add_named
from jaxsoftmax.ops.attention.context_parallel.visible import AttentionPart


def attention(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[out, lse]`."""
    shard, keys = _gathered(shard)
    options = {"return_lse": True, "is_partial": shard.is_partial}
    out, lse = attend.attend(shard, primitive.ATTENTION, _whole(shard), keys, **options)
    return [cut.join_pieces("out", out, shard.n_batch_axes), cut.join_pieces("lse", lse, shard.n_batch_axes)]


def tangents(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[dout, dlse]`."""
    d_sinks = shard.operands.get("d_sinks")
    shard, keys = _gathered(shard.without("d_sinks"))
    return attend.finish_tangents(shard, *attend.add_tangents(shard, None, keys, [_whole(shard)], d_sinks))


def cotangents(shard: AttentionShard, wanted: Sequence[str]) -> list[jax.Array]:
    """Computes the cotangents of the operands `wanted`."""
    shard = attend.before_cotangents(shard)
    sums = attend.zero_cotangents(shard, wanted)
    shard, keys = _gathered(shard)
    sums, of_keys = attend.add_cotangents(shard, wanted, sums, keys, [_whole(shard)])
    sums = add_named(sums, {name: _scattered(shard, x) for name, x in of_keys.items()})
    order = shard.sequences.keys.zigzag

    def in_order(name):
        x = sums[name]
        return to_zigzag(x, order, x.ndim - 1) if name == "bias" and order and x.shape[-1] > 1 else x

    return [attend.finish_cotangent(shard, name, in_order(name)) for name in wanted]


def _whole(shard) -> AttentionPart:
    return AttentionPart(EVERYTHING, EVERYTHING, shard.sequences.window)


def _gathered(shard) -> tuple[AttentionShard, KeyShard]:
    """Gathers the keys of all devices in the usual order, and returns the shard with masks and biases in that order too."""
    keys, of_both, sequence = {}, {}, shard.sequences.keys
    for name, x in shard.operands.items():
        if name in OF_KEYS:
            axis = cut.sequence_axis(name, x)
            x = lax.all_gather(x, sequence.axes, axis=axis, tiled=True) if sequence.axes else x
            x = from_zigzag(x, sequence.zigzag, axis) if sequence.zigzag else x
            keys[name] = jnp.expand_dims(x, shard.n_batch_axes)
        elif name in OF_BOTH and sequence.zigzag and x.shape[-1] > 1:
            of_both[name] = from_zigzag(x, sequence.zigzag, x.ndim - 1)
    return shard.replacing(**of_both), KeyShard(keys, None)


def _scattered(shard, x):
    """Adds up derivatives of all keys over devices, and returns this device's own.

    If all devices have all keys, their sum is left to `AttentionShard.summed`.
    """
    axis, sequence = shard.n_batch_axes + 1, shard.sequences.keys
    x = to_zigzag(x, sequence.zigzag, axis) if sequence.zigzag else x
    return lax.psum_scatter(x, sequence.axes, scatter_dimension=axis, tiled=True) if sequence.axes else x
