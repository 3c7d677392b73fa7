"""Scores and weights of the forward kernel in registers, from the products of queries and keys.

A score is multiplied by `scale * log2(e)` and the maximum subtracted in one multiply-add. Key blocks that all rows see are not
masked. In the others the column of each score, which is a constant, is compared with the limits of its row.

Masks and biases are read from global memory in their own shape: a bias by each thread for its scores; a mask, a step before it
is needed, in vectors by the four threads that share rows, which make bits of it and exchange those.
"""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import ForwardKernel
from jaxsoftmax.ops.attention.mosaic_sm90.forward_tiles import ForwardTile
from jaxsoftmax.ops.attention.mosaic_sm90.operands import ROWS, GlobalOperand
from jaxsoftmax.ops.attention.mosaic_sm90.scores import LOG2E, dropout_keeps, in_one_segment, tanh

# Powers of two by which a maximum grows before sums are rescaled, and by which it stays below the largest score. Warps in which
# no maximum grows skip the multiplication of their sums. Nothing is lost by either: the same maximum is in all weights and in
# the log-sum-exp. Weights are at most 2 to the power of their sum. float16 holds up to 2^15, and loses bits below 2^-14.
_SLACK_AND_HEADROOM = {"bfloat16": (8, 0), "float16": (2, 13), "float32": (8, 0)}


class ForwardScores:
    """Scores and weights of the rows of a tile that a consumer has, from `first` on, one key block after the other.

    Attributes:
      push: `online.push_log2` with the units of these scores.
      unit: unit of `m` in states, see `online.push_log2`.
      headroom: power of two by which `m` stays below the largest score.
      is_banded: True if some key block has to be masked by lengths, the window or segments.
      first_key: int32 of the rows, the first key that each sees; None if no window limits it.
      last_key: int32 of the rows, the last key that each sees; None unless `is_banded`.
      value_scale: factor of the sums of values if values have 8 bits with a scale for each head, else None.
    """

    def __init__(self, kernel: ForwardKernel, operands: dict[str, GlobalOperand], tile: ForwardTile, first):
        self.kernel, self.operands, self.tile, self.first = kernel, operands, tile, first
        self.shape, self.unit = (ROWS, kernel.config.block_kv), kernel.unit
        slack, self.headroom = _SLACK_AND_HEADROOM[kernel.dtype.name]
        self.factor = kernel.scale if kernel.soft_cap is None else kernel.soft_cap
        scale_log2 = LOG2E * self.factor if self.unit == 1 else 1.0
        options = {"scale_log2": scale_log2, "slack": slack, "headroom": self.headroom, "unit": self.unit}
        self.push = functools.partial(online.push_log2, **options)
        left, right = kernel.window
        has_limits = not {"ranges", "query_lengths", "key_lengths"}.isdisjoint(kernel.names)
        is_ragged = kernel.key[0] % self.shape[1] != 0
        self.is_banded = left is not None or right is not None or is_ragged or has_limits
        scales = (operands.get(f"{name}_scale") for name in ("key", "value"))
        self.key_scale, self.value_scale = (None if scale is None else scale[tile.b, tile.head] for scale in scales)
        self.first_key: Any = None
        self.last_key: Any = None
        if self.is_banded:
            position = kernel.rows.query_of(first + lax.iota(jnp.int32, ROWS))
            last_key = jnp.where(position < tile.lengths[0], tile.lengths[1] - 1, -1)
            position += tile.offset
            self.first_key = None if left is None else position - left
            self.last_key = last_key if right is None else jnp.minimum(last_key, position + right)
        self.segments: Any = None
        if "query_segments" in operands:
            ids, queries = operands["query_segments"], kernel.query[0]
            start = ids.index(tile.b) * queries + first
            self.segments = wgmma.load_product_rows(ids.ref, start, queries - first, self.shape)

    def masked(self, s, mask, block, *, banded):
        """Returns the scores of a key block from its products, `-inf` for keys that are not seen.

        Values are multiplied by weights of 0 there, so that NaN in values of a key block that is visited shows.

        Args:
          s: the products.
          mask: what `packed` returns for the key block.
          block: number of the key block.
          banded: True, or an array, if lengths, the window or segments hide some of its keys from some row.
        """
        if self.key_scale is not None:
            s = s * self.key_scale
        if self.kernel.soft_cap is not None:
            s = tanh(s * (self.kernel.scale / self.kernel.soft_cap))
        if "bias" in self.operands:
            s = s * self.factor
            bias = self._tile_of("bias", block, wgmma.load_product).astype(jnp.float32)
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s + bias)  # s may be NaN
        if "mask" in self.operands:
            s = wgmma.select_bits(s, mask)
        if not self.is_banded:
            return s
        return self._banded(s, block) if banded is True else lax.cond(banded, lambda s: self._banded(s, block), lambda s: s, s)

    def _banded(self, s, block):
        """Returns the scores of a key block, `-inf` where segments, the window or the lengths hide the key."""
        start = block * self.shape[1]
        if self.tile.ranges:
            _, _, whole_from, whole_to = self.tile.ranges
            several = (block < whole_from) | (block >= whole_to)
            s = lax.cond(several, lambda s: self._in_one_segment(s, start), lambda s: s, s)
        return wgmma.band(s, None if self.first_key is None else self.first_key - start, self.last_key - start)

    def _in_one_segment(self, s, start):
        """Returns the scores of the keys from `start` on, `-inf` for keys of another segment."""
        ids, keys = self.operands["key_segments"], self.kernel.key[0]
        key_ids = wgmma.load_product_cols(ids.ref, ids.index(self.tile.b) * keys + start, keys - start, self.shape)
        return in_one_segment(s, self.segments, key_ids)

    def kept(self, weights, block):
        """Returns the weights of a key block that dropout keeps, and 0 for the others."""
        rate = self.kernel.dropout_rate
        if not rate:
            return weights
        tile, seeds = self.tile, self.operands["seeds"]
        return jnp.where(dropout_keeps(seeds, tile.b, tile.head, self.first, block, self.shape, rate), weights, 0.0)

    def load_mask(self, block, is_there):
        """Loads the mask of a key block if the block is there: a step before it is needed, as loads take long."""
        return self._tile_of("mask", block, wgmma.load_mask, is_there) if "mask" in self.operands else []

    def packed(self, loaded):
        """Returns what `load_mask` loaded in bits."""
        return wgmma.pack_mask(loaded, self.shape) if loaded else []

    def _tile_of(self, name, block, load, is_there=True):
        """Loads the elements of a bias or mask that belong to the scores of a key block, none if it is not there."""
        operand = self.operands[name]
        row = operand.row(self.tile.b, self.tile.head, self.first)
        start = block * self.shape[1]
        limits = jnp.where(is_there, self.kernel.query[0] - self.first, 0), self.kernel.key[0] - start
        return load(operand.ref, row, start, limits, self.shape, varies=operand.varies)
