"""Cuts of a sequence: over devices into shards, and shards into pieces of neighbouring positions.

In the usual order a shard is one piece, a range of positions. In the zigzag order of `n` devices (`order.py`) it has two pieces
of equal length, an early one and a late one:

    positions    0  1  2  3  4  5  6  7     in eighths, with n = 4
    device 0     0                    7
    device 1        1              6
    device 2           2        5
    device 3              3  4

The axis of pieces stands behind the axes of the batch, so a kernel takes pieces as entries of a batch. An array that does not
vary along the sequence has size 1 along both axes.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax.ops.attention.context_parallel.order import n_granules, start_of
from jaxsoftmax.ops.attention.operands import AXES

# Operands and results with an axis of queries, of keys, and of both. Only the queries are cut of those that have both.
OF_QUERIES = frozenset(["query", "query_segments", "query_numbers", "out", "lse", "d_out", "d_lse", "d_query"])
OF_KEYS = frozenset(["key", "value", "key_segments", "key_numbers", "d_key", "d_value"])
OF_BOTH = frozenset(["bias", "mask", "d_bias"])

EVERYTHING = slice(None)


@dataclass(frozen=True)
class SequenceCut:
    """Says how a sequence is cut over devices, and the shard of each into pieces."""

    axes: tuple[str, ...]  # mesh axes that the sequence is sharded over; empty if every device has all of it
    devices: int  # along these axes
    length: int  # tokens in a shard
    zigzag: int | None  # the `n` of the zigzag order, or None for the usual order

    @property
    def n_pieces(self) -> int:
        """Number of pieces of a shard."""
        return n_granules(self.devices, self.zigzag) // self.devices

    @property
    def piece_length(self) -> int:
        """Number of tokens in a piece."""
        return self.length // self.n_pieces

    @property
    def index(self):
        """Number of this device along the mesh axes, an int32 scalar."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def starts(self, device, xp: Any = jnp):
        """Computes the first positions of a device's pieces, int32 `[pieces]`."""
        granule = device * self.n_pieces + xp.arange(self.n_pieces, dtype=np.int32)
        return self.piece_length * start_of(granule, n_granules(self.devices, self.zigzag), self.zigzag, xp.where)

    @functools.cached_property
    def all_starts(self) -> np.ndarray:
        """First positions of the pieces of all devices, int64 `[devices, pieces]`."""
        return self.starts(np.arange(self.devices)[:, None], np).astype(np.int64)

    def places(self, device):
        """Computes the first indices of a device's pieces in arrays of the whole sequence, int32 `[pieces]`."""
        return device * self.length + self.piece_length * jnp.arange(self.n_pieces, dtype=np.int32)


def sequence_axis(name: str, x) -> int:
    """Returns the axis of an operand or result along which it is cut. An axis of pieces stands before it."""
    axes = AXES[name]
    return x.ndim - len(axes) + axes.index("S" if name in OF_KEYS else "T")


def split_pieces(name: str, x, n_pieces: int, at: int):
    """Splits a shard of an operand or result into pieces, along a new axis `at`, of size 1 if they do not differ."""
    axis = sequence_axis(name, x)
    if x.shape[axis] == 1:
        return jnp.expand_dims(x, at)
    x = x.reshape(*x.shape[:axis], n_pieces, x.shape[axis] // n_pieces, *x.shape[axis + 1 :])
    return jnp.moveaxis(x, axis, at)


def join_pieces(name: str, x, at: int):
    """Joins the pieces of an operand or result, which lie along axis `at`: the inverse of `split_pieces`."""
    axis = sequence_axis(name, x)
    x = jnp.moveaxis(x, at, axis - 1)
    return x.reshape(*x.shape[: axis - 1], x.shape[axis - 1] * x.shape[axis], *x.shape[axis + 1 :])


def take_pieces(x, pieces: slice, at: int):
    """Returns some pieces of an array, which lie along axis `at`; all of it if they do not differ."""
    start, stop, _ = pieces.indices(x.shape[at])
    return x if pieces == EVERYTHING or x.shape[at] == 1 else lax.slice_in_dim(x, start, stop, axis=at)


def put_pieces(x, pieces: slice, part, at: int):
    """Replaces some pieces of an array, which has all of them, by those in `part`."""
    if pieces == EVERYTHING:
        return part
    start, _, _ = pieces.indices(x.shape[at])
    return lax.dynamic_update_slice_in_dim(x, part, start, at)


def pad_pieces(x, pieces: slice, n_pieces: int, at: int):
    """Returns an array of `n_pieces` pieces: `pieces` from `x`, and 0 for the others."""
    start, stop, _ = pieces.indices(n_pieces)
    widths = [(0, 0, 0)] * x.ndim
    widths[at] = (start, n_pieces - stop, 0)
    return x if stop - start == n_pieces else lax.pad(x, jnp.zeros((), x.dtype), widths)
