"""How the rows of scores stand for queries, of one head or of all heads that share keys."""

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.operands import Arithmetic


@dataclass(frozen=True)
class HeadRows:
    """Rows of a query head: row `i` belongs to query `i`. Queries and output are `[entries, rows, heads, size]`."""

    @property
    def name(self) -> str:
        """Words for the rows of a tile."""
        return "queries"

    @property
    def box(self) -> int | None:
        """Number of rows that a box of TMA takes from each query; None if a box takes rows of one head."""
        return None

    def count_queries(self, n_rows: int) -> int:
        """Returns the number of queries that have these rows."""
        return n_rows

    def queries_from(self, first: Any, n_rows: int, arithmetic: Arithmetic) -> tuple[Any, int]:
        """Returns the first query that rows from `first` on belong to, and the number of queries that they may belong to."""
        del arithmetic
        return first, n_rows

    def query_of(self, row):
        """Returns the query that a row belongs to."""
        return row

    def at(self, rows, head):
        """Returns the indices of a slice of rows of a head in queries and output, between entry and columns."""
        return rows, head

    def in_matrix(self, entry, head, heads: int) -> tuple[Any, Any, int]:
        """Returns entry, head and number of heads of rows in a matrix `[entries * rows, heads * size]`."""
        return entry, head, heads

    def sinks(self, operand, tile, first, kernel):
        """Loads the sink of the rows, a scalar."""
        del first, kernel
        return operand[tile.b, tile.head].astype(jnp.float32)


@dataclass(frozen=True)
class FoldedRows(HeadRows):
    """Rows of all query heads that share a key head, so that a tile reads these keys once for all of them.

    Row `i` belongs to query `i // group`, and to head `i % group` of the group. Heads of a kernel with such rows are key heads.

    Attributes:
      group: number of query heads that share a key head.
      is_strided: True if queries and output are `[entries, queries, heads, size]` in memory. A box of TMA then takes `group`
        rows of each of several queries, which needs a group that divides the rows of a consumer. Otherwise they are
        `[entries, key heads, rows, size]`, and XLA transposes them.
    """

    group: int
    is_strided: bool = False

    @property
    def name(self) -> str:
        return f"rows of {self.group} heads"

    @property
    def box(self) -> int | None:
        return self.group if self.is_strided else None

    def count_queries(self, n_rows: int) -> int:
        return n_rows // self.group

    def queries_from(self, first: Any, n_rows: int, arithmetic: Arithmetic) -> tuple[Any, int]:
        return arithmetic.divide(first, self.group), (n_rows + self.group - 2) // self.group + 1

    def query_of(self, row):
        return lax.div(row, jnp.int32(self.group))

    def at(self, rows, head):
        if not self.is_strided:
            return head, rows
        return pl.ds(lax.div(rows.start, jnp.int32(self.group)), rows.size // self.group), pl.ds(head * self.group, self.group)

    def in_matrix(self, entry, head, heads: int) -> tuple[Any, Any, int]:
        """Returns the same in a matrix `[entries * heads * rows, size]`."""
        return entry * heads + head, 0, 1

    def sinks(self, operand, tile, first, kernel):
        """Loads the sinks of the rows. They belong to the first split alone: the others have no sink."""
        length, heads, _ = kernel.query
        start = (operand.index(tile.b) * heads + tile.head) * length + first
        shape = kernel.config.shape
        sinks = wgmma.load_product_rows(operand.ref, start, length - first, shape)
        return jnp.where(jnp.broadcast_to(tile.split, shape[:1]) == 0, sinks, -jnp.inf)
