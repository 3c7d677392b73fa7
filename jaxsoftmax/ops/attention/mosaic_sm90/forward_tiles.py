"""Tiles of the forward kernel: which rows and keys they are of, and which key blocks their rows see."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import FACTS, ForwardKernel
from jaxsoftmax.ops.attention.mosaic_sm90.operands import KERNEL, GlobalOperand


@dataclass(frozen=True)
class ForwardTile:
    """A tile of the forward kernel, as its warpgroups know it.

    Attributes:
      b: index of the batch entry.
      head: index of the head.
      block: number of the block of rows.
      split: number of the split of the keys.
      lengths: numbers of queries and keys of the batch entry.
      offset: position of query 0.
      ranges: by segments, the first key block that some query may see, the one behind the last, and the same for the key blocks
        that all queries see. Empty if there are no segments.
      low: first key block that the tile goes to.
      high: key block behind the last; there is at least one.
      is_empty: True if it is of a split that has no key block which a row sees, and goes nowhere. None if there is one split.
    """

    b: Any
    head: Any
    block: Any
    split: Any
    lengths: list[Any]
    offset: Any
    ranges: list[Any]
    low: Any
    high: Any
    is_empty: Any

    def unless_empty(self, work) -> None:
        """Does `work()` unless the tile goes nowhere."""
        if self.is_empty is None:
            work()
        else:
            pl.when(~self.is_empty)(work)

    def after(self, steps):
        """Returns the number of steps of all tiles of the block of threads so far, after `steps` before this one."""
        if self.is_empty is None:
            return steps + self.high - self.low
        return jnp.where(self.is_empty, steps, steps + self.high - self.low)


@dataclass(frozen=True)
class ForwardTiles:
    """The tiles of the forward kernel, by number."""

    kernel: ForwardKernel
    operands: dict[str, GlobalOperand]

    def look_up(self, number) -> list[Any]:
        """Loads what operands say of a tile: those of its `FACTS` that there are."""
        b, _, block, _ = self._coordinates(number)
        facts = []
        for name, count in FACTS.items():
            if name in self.operands:
                operand = self.operands[name]
                facts += [operand[b]] if count == 1 else [operand[b, block, i] for i in range(count)]
        return facts

    def tile(self, number, *facts) -> ForwardTile:
        """Returns a tile with the facts that were looked up."""
        kernel, facts, lengths = self.kernel, list(facts), []
        b, head, block, split = self._coordinates(number)
        for name, size in (("query_lengths", kernel.queries), ("key_lengths", kernel.key[0])):
            lengths.append(jnp.clip(facts.pop(0), 0, size) if name in self.operands else jnp.int32(size))
        offset = facts.pop(0) if "query_offset" in self.operands else 0
        ranges = facts[:4] if "ranges" in self.operands else []
        shown = []
        if "mask_reach" in self.operands:
            size = jnp.int32(kernel.config.block_kv)
            to_end, from_start = (lax.div(keys + size - 1, size) for keys in facts[-2:])
            shown = [kernel.blocks_kv - to_end, from_start]
        low, high = self.seen(lengths, offset, block * kernel.block_q, kernel.block_q)
        for start, end in (limits[:2] for limits in (ranges, shown) if limits):
            low, high = jnp.maximum(low, start), jnp.minimum(high, end)
        if kernel.splits > 1:
            low, high = kernel.part(low, high, split, KERNEL)
        is_empty = None if kernel.splits == 1 else high <= low
        if is_empty is not None and "sinks" in self.operands:
            is_empty &= split > 0  # the first one starts with the sinks
        low = jnp.clip(low, 0, kernel.blocks_kv - 1)
        high = jnp.clip(high, low + 1, kernel.blocks_kv)
        return ForwardTile(b, head, block, split, lengths, offset, ranges, low, high, is_empty)

    def _coordinates(self, number):
        """Returns batch entry, head, block of rows, and split of the keys of a tile."""
        kernel = self.kernel
        heads, splits = jnp.int32(kernel.query[1]), jnp.int32(kernel.splits)
        blocks = jnp.int32(kernel.blocks_q * kernel.splits)
        pair, part = lax.div(number, blocks), lax.rem(number, blocks)
        block, split = (part, jnp.int32(0)) if kernel.splits == 1 else (lax.div(part, splits), lax.rem(part, splits))
        return lax.div(pair, heads), lax.rem(pair, heads), block, split

    def seen(self, lengths, offset, first, rows):
        """Returns the key blocks that some of the rows from `first` on see: see `ForwardKernel.seen`."""
        kernel = self.kernel
        limits = kernel.seen(lengths, *kernel.rows.queries_from(first, rows, KERNEL), KERNEL, offset)
        return tuple(map(jnp.int32, limits))

    def seen_whole(self, tile, first, rows):
        """Returns the first of the key blocks whose keys all these rows see, and the one behind the last.

        The end may be before the start.
        """
        kernel, (queries, keys), (left, right) = self.kernel, tile.lengths, self.kernel.window
        size = jnp.int32(kernel.config.block_kv)
        first, rows = kernel.rows.queries_from(first, rows, KERNEL)
        low, high, position = jnp.int32(0), lax.div(keys, size), first + tile.offset
        if left is not None:
            low = lax.div(jnp.maximum(position + rows - 1 - left, 0) + size - 1, size)
        if right is not None:
            high = jnp.minimum(high, lax.div(jnp.maximum(position + right + 1, 0), size))
        if "query_lengths" in self.operands:
            high = jnp.where(first + rows <= queries, high, 0)
        if tile.ranges:
            low, high = jnp.maximum(low, tile.ranges[2]), jnp.minimum(high, tile.ranges[3])
        return low, high
