"""The record that all strategies take: one device's shard of an attention, and how it runs operations on it."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.attention.context_parallel.cut import OF_BOTH, OF_KEYS, OF_QUERIES, SequenceCut, split_pieces
from jaxsoftmax.ops.attention.context_parallel.visible import Sequences, Window


@dataclass(frozen=True, eq=False)
class AttentionShard:
    """One device's shard of an attention, or of a derivative of it."""

    # Computes the results of `run(operation, operands, window, **options)` on this device, from operands by name.
    run: Callable[..., list[jax.Array]]
    operands: Mapping[str, jax.Array]  # masks and biases have this device's queries, and all keys
    sequences: Sequences
    scale: float
    # True if the user has cut the sequences, in a `shard_map`. It adds up what devices have of the derivative of an operand
    # that they share.
    is_manual: bool
    is_partial: bool  # the output is one of several that are merged, which is not rounded

    @property
    def n_batch_axes(self) -> int:
        """Number of axes of the batch: the axis at which pieces of an operand stand."""
        return self.operands["query"].ndim - 3

    @property
    def sum_dtype(self) -> Any:
        """Dtype of sums over keys."""
        return accumulator(self.operands["query"].dtype)

    def replacing(self, **operands: jax.Array) -> "AttentionShard":
        """Returns the shard with some operands replaced."""
        return replace(self, operands={**self.operands, **operands})

    def without(self, name: str) -> "AttentionShard":
        """Returns the shard without an operand."""
        return replace(self, operands={other: x for other, x in self.operands.items() if other != name})

    def in_pieces(self, name: str, n_pieces: int | None = None):
        """Returns an operand with an axis of pieces behind the batch: those of its cut, or `n_pieces`."""
        cut = self.sequences.keys if name in OF_KEYS else self.sequences.queries
        return split_pieces(name, self.operands[name], n_pieces or cut.n_pieces, self.n_batch_axes)

    def keys_in_pieces(self) -> dict[str, jax.Array]:
        """Returns all operands with an axis of keys, except masks and biases, in pieces."""
        return {name: self.in_pieces(name) for name in self.operands if name in OF_KEYS}

    def summed(self, name: str, x):
        """Adds up the derivative of an operand over the devices that share it, unless the user's `shard_map` does."""
        if self.is_manual:
            return x
        queries, keys = self.sequences.queries, self.sequences.keys
        own_axes = ()
        if name in OF_QUERIES or name in OF_BOTH:  # a bias that all queries share has an axis of queries too
            own_axes = queries.axes
        elif name in OF_KEYS:
            own_axes = keys.axes
        axes = tuple([axis for axis in dict.fromkeys((*queries.axes, *keys.axes)) if axis not in own_axes])
        return lax.psum(x.astype(self.sum_dtype), axes) if axes else x


def shard_of(
    runner: Callable[..., list[jax.Array]],
    operands: Mapping[str, jax.Array],
    *,
    cuts: Mapping[str, Any],
    window: Window,
    zigzag: int | None = None,
    is_manual: bool = False,
    is_partial: bool = False,
    **params: Any,
) -> AttentionShard:
    """Makes the record of a shard.

    Args:
      runner: `runner(operation, operands, **params)` computes the results of an operation on this device.
      operands: shards of the operands that are present, by name.
      cuts: a `Cut` for each of "queries" and "keys" that is sharded.
      window: window of the attention.
      zigzag: the `n` of the zigzag order of the sequences, or None.
      is_manual: see `AttentionShard`.
      is_partial: see `AttentionShard`.
      params: the other parameters of the operations, as `runner` takes them.
    """
    # The order of tokens does not matter where nothing depends on positions.
    has_functions = any(params.get(name) is not None for name in ("score_mod", "mask_mod"))
    has_order = window != (None, None) or has_functions or not {"seeds", "query_lengths", "key_lengths"}.isdisjoint(operands)

    def cut(name, operand):
        axes = cuts[name].over if name in cuts else ()
        devices = math.prod([lax.axis_size(axis) for axis in axes])
        return SequenceCut(axes if devices > 1 else (), devices, operands[operand].shape[-3], zigzag if has_order else None)

    # One function for all calls, so that parts of the same shapes are traced and lowered once.
    run = jax.jit(
        lambda operation, operands, window, **options: runner(operation, operands, window=window, **params, **options),
        static_argnums=(0, 2),
        static_argnames=("return_lse", "wanted", "is_partial"),
    )
    queries, keys = cut("queries", "query"), cut("keys", "key")
    if has_functions:
        numbers = {
            f"{name}_numbers": _numbers(c, operands["query"].ndim - 3) for name, c in (("query", queries), ("key", keys))
        }
        if "query_offset" in operands:
            numbers["query_numbers"] += operands["query_offset"][..., None]
        # Kinds of blocks are those of the whole sequence.
        operands = {name: x for name, x in operands.items() if name != "block_kinds"} | numbers
    sequences = Sequences(queries, keys, window, frozenset(operands))
    return AttentionShard(run, operands, sequences, params["scale"], is_manual, is_partial)


def _numbers(sequence: SequenceCut, n_batch_axes: int) -> jax.Array:
    """Returns the positions of this device's tokens, int32 `[*batch, length]`, for score and mask functions."""
    positions = sequence.starts(sequence.index)[:, None] + lax.iota(np.int32, sequence.piece_length)[None]
    return positions.reshape((1,) * n_batch_axes + (sequence.length,))


def without_sinks(shard: AttentionShard) -> AttentionShard:
    """Takes the sinks out of the operands, and broadcasts the queries to the batch of the sinks.

    Only one part of the keys takes the sinks. The results of the other parts need their batch all the same.
    """
    sinks, query, at = shard.operands.get("sinks"), shard.operands["query"], shard.n_batch_axes
    if sinks is None:
        return shard
    batch = jnp.broadcast_shapes(query.shape[:at], sinks.shape[:at])
    return shard.without("sinks").replacing(query=jnp.broadcast_to(query, (*batch, *query.shape[at:])))


def add_named(sums: Mapping[str, jax.Array], more: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Adds arrays to sums of the same names; a name without a sum starts one."""
    return {**sums, **{name: jnp.add(sums[name], x) if name in sums else x for name, x in more.items()}}
