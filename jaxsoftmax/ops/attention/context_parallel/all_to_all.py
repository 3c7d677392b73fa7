"""All-to-all: each device receives the whole sequence for some of the heads, and attends to it once (Ulysses).

1. Devices trade parts of the sequence for heads: of `n` devices each gets all tokens of `1/n` of the query and key heads.
2. Each device runs attention as if nothing were sharded.
3. The results are traded back.

A device sends `(n - 1) / n` of its queries, keys and values, and then of its output; nothing hides either. A causal mask is
balanced in the tokens' own order: all devices have the whole sequence. Operands without heads, such as segments, and masks with
one head for all, are gathered.

The same functions undo a zigzag order where sequences are not sharded, and then send nothing.

Source: Jacobs et al. 2023, arXiv:2309.14509.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.operation import Operation
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.context_parallel.cut import OF_BOTH
from jaxsoftmax.ops.attention.context_parallel.order import from_zigzag, to_zigzag
from jaxsoftmax.ops.attention.context_parallel.shard import AttentionShard
from jaxsoftmax.ops.attention.operands import AXES, TABLES


def attention(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[out, lse]`."""
    return _on_whole_sequences(shard, primitive.ATTENTION, ("out", "lse"), return_lse=True, is_partial=shard.is_partial)


def tangents(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[dout, dlse]`."""
    return _on_whole_sequences(shard, primitive.ATTENTION_JVP, ("out", "lse"))


def cotangents(shard: AttentionShard, wanted: Sequence[str]) -> list[jax.Array]:
    """Computes the cotangents of the operands `wanted`."""
    results = _on_whole_sequences(shard, primitive.ATTENTION_VJP, wanted, wanted=wanted)
    return [shard.summed(name, x).astype(x.dtype) for name, x in zip(wanted, results, strict=True)]


def _on_whole_sequences(shard, operation: Operation, results: Sequence[str], **options: Any) -> list[jax.Array]:
    """Runs an operation on whole sequences in the usual order, for some of the heads if the sequences are sharded."""
    operands = {name: _to_heads(shard, name, x) for name, x in shard.operands.items()}
    arrays = shard.run(operation, operands, shard.sequences.window, **options)
    return [_from_heads(shard, name, x) for name, x in zip(results, arrays, strict=True)]


def _head_and_sequence(shard, name, x) -> tuple[int | None, int | None]:
    """Returns the axis of heads of an operand or result, and the sharded axis of its sequence; None for one that it lacks."""
    axes = dict(zip(AXES[name], range(x.ndim - len(AXES[name]), x.ndim), strict=True))
    head, sequence = (next((axes[letter] for letter in letters if letter in axes), None) for letters in ("NK", "TS"))
    if name in OF_BOTH:  # size 1 is no axis to trade
        head, sequence = (None if shard.operands[name].shape[axis] == 1 else axis for axis in (head, sequence))
    if name.removeprefix("d_") in TABLES:
        return None, None
    return head, sequence


def _to_heads(shard, name, x):
    """Returns an operand with its whole sequence in the usual order, for this device's heads."""
    queries, (head, sequence) = shard.sequences.queries, _head_and_sequence(shard, name, x)
    if queries.axes and sequence is not None and head is not None:
        x = lax.all_to_all(x, queries.axes, split_axis=head, concat_axis=sequence, tiled=True)
    elif queries.axes and sequence is not None:
        x = lax.all_gather(x, queries.axes, axis=sequence, tiled=True)
    elif queries.axes and head is not None:
        size = x.shape[head] // queries.devices
        x = lax.dynamic_slice_in_dim(x, queries.index * size, size, head)
    if (order := queries.zigzag) is not None:
        x = x if sequence is None else from_zigzag(x, order, sequence)
        x = from_zigzag(x, order, x.ndim - 1) if name in OF_BOTH and x.shape[-1] > 1 else x
    return x


def _from_heads(shard, name, x):
    """Returns a result, or the cotangent of an operand, for this device's part of the sequence and all heads."""
    queries, (head, sequence) = shard.sequences.queries, _head_and_sequence(shard, name, x)
    if (order := queries.zigzag) is not None:
        x = x if sequence is None else to_zigzag(x, order, sequence)
        x = to_zigzag(x, order, x.ndim - 1) if name in OF_BOTH and x.shape[-1] > 1 else x
    if not queries.axes:
        return x
    if head is not None and sequence is not None:
        return lax.all_to_all(x, queries.axes, split_axis=sequence, concat_axis=head, tiled=True)
    if sequence is not None:  # each device has the sum over its heads
        return lax.psum_scatter(x.astype(shard.sum_dtype), queries.axes, scatter_dimension=sequence, tiled=True)
    if head is not None:
        shape = (*x.shape[:head], x.shape[head] * queries.devices, *x.shape[head + 1 :])
        start = queries.index * x.shape[head]
        return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, head)
    return x
