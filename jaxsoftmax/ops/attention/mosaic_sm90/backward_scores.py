"""Weights of the backward kernel in registers, and derivatives of scores. Rows are keys, columns queries.

Weights are made anew from the log-sum-exp. Limits, segments and masks are looked at while the products run, as loads take long.
"""

from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.operands import ROWS
from jaxsoftmax.ops.attention.mosaic_sm90.scores import (
    COL_LAYOUT,
    LOG2E,
    ROW_LAYOUT,
    dropout_keeps,
    in_one_segment,
    tanh,
)


class BackwardScores:
    """Weights and derivatives for 64 keys, from `first` on, and one block of queries after the other.

    Attributes:
      is_banded: True if some block of queries has to be masked by lengths, the window or segments.
      kept_factor: factor of what dropout keeps.
    """

    def __init__(self, role, tile, first, *, needs_segments=True):
        self.kernel, self.operands, self.refs = role.kernel, role.operands, role.refs
        self.tile, self.first = tile, first
        kernel, names = role.kernel, role.kernel.names
        self.shape = ROWS, kernel.config.block_q
        has_lengths = not {"query_lengths", "key_lengths"}.isdisjoint(names)
        self.is_limited = kernel.window != (None, None) or kernel.is_ragged or has_lengths
        self.is_banded = self.is_limited or "query_segments" in names
        self.kept_factor = 1 / (1 - kernel.dropout_rate) if "seeds" in names else 1.0
        self.segments: Any = None
        if "key_segments" in names and needs_segments:
            ids, keys = self.operands["key_segments"], kernel.key[0]
            start = ids.index(tile.b) * keys + first
            self.segments = wgmma.load_product_rows(ids.ref, start, keys - first, self.shape)

    def load(self, at):
        """Loads what global memory has on the block of queries of a step: bias, mask and segments."""
        loaded = {}
        for name in ("bias", "mask"):
            if name in self.operands:
                operand = self.operands[name]
                place = self._place(operand, at)
                loaded[name] = wgmma.load_transposed(operand.ref, *place, self.shape, varies=operand.varies)
        if "query_segments" in self.operands:
            ids, queries, start = self.operands["query_segments"], self.kernel.query[0], at.block * self.shape[1]
            first = ids.index(self.tile.b) * queries + start
            loaded["segments"] = lax.cond(
                at.banded,
                lambda: wgmma.load_product_cols(ids.ref, first, queries - start, self.shape),
                lambda: plgpu.layout_cast(jnp.zeros(self.shape[1:], ids.ref.dtype), COL_LAYOUT),
            )
        return loaded

    def weights(self, s, lse, loaded, at):
        """Returns the weights of a block of queries, and the derivative of the soft cap, or None if there is none."""
        slope, factor = None, self.kernel.scale
        if self.kernel.soft_cap is not None:
            s = tanh(s * (self.kernel.scale / self.kernel.soft_cap))
            slope, factor = 1 - s * s, self.kernel.soft_cap
        if "bias" in loaded:
            bias = loaded["bias"].astype(jnp.float32)
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s * factor + bias)  # s may be NaN
        if "mask" in loaded:
            s = jnp.where(loaded["mask"] != 0, s, -jnp.inf)
        if "bias" in loaded:  # scores may be as large as `finfo.min`
            p = jnp.exp2((s - along_rows(lse, s.shape)) * LOG2E)
        else:
            s = s * (factor * LOG2E)
            p = jnp.exp2(s if self.kernel.is_seeded else s - along_rows(lse, s.shape))
        if self.is_banded:
            p = lax.cond(at.banded, lambda p: self._masked(p, loaded, at), lambda p: p, p)
        return p, slope

    def _masked(self, p, loaded, at):
        """Returns the weights of a block of queries, 0 where segments, the window or the lengths hide a key.

        On an H200 a branch here costs nothing. One that masks the scores, before the exponentials, costs up to 4 percent at
        head size 128.
        """
        if "segments" in loaded:
            p = in_one_segment(p, self.segments, loaded["segments"], hidden=0.0)
        return wgmma.band(p, *self._limits(at.block * self.shape[1]), hidden=0.0) if self.is_limited else p

    def kept(self, at):
        """Tells which weights dropout keeps; None if it keeps all."""
        if "seeds" not in self.operands:
            return None
        seeds, rate = self.operands["seeds"], self.kernel.dropout_rate
        return dropout_keeps(seeds, self.tile.b, at.head, self.first, at.block, self.shape, rate, is_transposed=True)

    def less_delta(self, dp, delta, kept):
        """Returns the derivatives of the weights that dropout keeps less `delta`, or less nothing if it is None."""
        if kept is not None:
            dp = where_kept(kept, dp * self.kept_factor)
        return dp if delta is None else dp - along_rows(delta, dp.shape)

    def derivatives(self, p, slope, dp, delta, kept, at):
        """Returns the derivatives of the products of keys and queries."""
        ds = p * self.less_delta(dp, delta, kept)
        self.add_to_bias(ds, at)
        return ds if slope is None else ds * slope

    def add_to_bias(self, ds, at) -> None:
        """Adds the derivatives of scores to that of the bias in global memory, if it is wanted.

        In float32, to an array of the bias's own shape: sums along axes along which the bias does not vary are made in
        registers first. Additions come in any order.
        """
        if self.kernel.adds_bias:
            operand = self.operands["bias"]
            wgmma.add_transposed(self.refs["dbias"], *self._place(operand, at), ds, varies=operand.varies)

    def _limits(self, start):
        """Returns the first and the last column that each row sees; None for no limit. Columns are queries from `start` on."""
        (left, right), (queries, keys) = self.kernel.window, self.tile.lengths
        position = self.first + lax.iota(jnp.int32, ROWS)
        start_at = start + self.tile.offset  # where windows count from
        low, high = None if right is None else position - (right + start_at), None
        if "query_lengths" in self.operands:
            high = plgpu.layout_cast(jnp.broadcast_to(queries - start - 1, (ROWS,)), ROW_LAYOUT)
        if left is not None:
            window_end = position + (left - start_at)
            high = window_end if high is None else jnp.minimum(high, window_end)
        if self.kernel.is_ragged or "key_lengths" in self.operands:
            high = jnp.where(position < keys, jnp.int32(self.shape[1] - 1) if high is None else high, -1)
        return low, high

    def _place(self, operand, at):
        """Returns row and column of the elements of a bias or mask for a block of queries, and their numbers."""
        start = at.block * self.shape[1]
        return (
            operand.row(self.tile.b, at.head, start),
            self.first if operand.varies[1] else 0,
            (self.kernel.query[0] - start, self.kernel.key[0] - self.first),
        )


def where_kept(kept, array):
    """Returns an array with 0 where dropout keeps nothing; `kept` is None if it keeps all."""
    return array if kept is None else jnp.where(kept, array, 0.0)


def along_rows(line, shape):
    """Returns a value for each column, in all rows."""
    return lax.broadcast_in_dim(line, shape, (1,))
