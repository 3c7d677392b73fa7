"""Rows of all query heads that share keys: a tile reads these keys once for all of them.

TMA copies a box of queries, heads and columns to rows that follow one another, and the output back, if the group of heads
divides 64. Otherwise, and in float32, XLA transposes both.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import HeadRows
from jaxsoftmax.ops.attention.mosaic_sm90.operands import ROWS, Arithmetic


@dataclass(frozen=True)
class FoldedRows(HeadRows):
    """Rows of all query heads that share a key head.

    Row `i` belongs to query `i // group`, and to head `i % group` of the group. Heads of a kernel with such rows are key heads.

    Attributes:
      group: number of query heads that share a key head.
      box: `group` if queries and output are `[entries, queries, heads, size]` in memory. None if XLA transposes them to
        `[entries, key heads, rows, size]`.
    """

    def queries_from(self, first: Any, n_rows: int, arithmetic: Arithmetic) -> tuple[Any, int]:
        return arithmetic.divide(first, self.group), (n_rows + self.group - 2) // self.group + 1

    def query_of(self, row):
        return lax.div(row, jnp.int32(self.group))

    def at(self, rows, head):
        if self.box is None:
            return head, rows
        return pl.ds(lax.div(rows.start, jnp.int32(self.group)), rows.size // self.group), pl.ds(head * self.group, self.group)

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of queries, or the output, as a matrix of rows: `[entries * heads * rows, size]`."""
        return math.prod(shape[:-1]), shape[-1]

    def in_matrix(self, entry, head, heads: int) -> tuple[Any, Any, int]:
        return entry * heads + head, 0, 1

    def sinks(self, operand, tile, first, kernel):
        """Loads the sinks of the rows. They belong to the first split alone: the others have no sink."""
        length, heads, _ = kernel.query
        start = (operand.index(tile.b) * heads + tile.head) * length + first
        sinks = wgmma.load_product_rows(operand.ref, start, length - first, (ROWS, kernel.config.block_kv))
        return jnp.where(jnp.broadcast_to(tile.split, (ROWS,)) == 0, sinks, -jnp.inf)
