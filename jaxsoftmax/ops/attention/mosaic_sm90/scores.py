"""What segments, soft cap and dropout do to a block of scores in registers, with queries as rows or with keys as rows.

The forward kernel has queries as rows, the backward kernel keys: products of the tensor cores are S = Q K' and S' = K Q'.
"""

import math

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu import fused
from jaxsoftmax.ops.attention import dropout

LOG2E = math.log2(math.e)
LAYOUT = plgpu.Layout.WGMMA
ROW_LAYOUT, COL_LAYOUT = LAYOUT.reduce(1), LAYOUT.reduce(0)


def in_one_segment(s, row_ids, col_ids, hidden=-jnp.inf):
    """Returns scores or weights, with `hidden` for queries and keys of different segments."""
    same = lax.broadcast_in_dim(row_ids, s.shape, (0,)) == lax.broadcast_in_dim(col_ids, s.shape, (1,))
    return jnp.where(same, s, hidden)


def dropout_keeps(seeds, b, head, first, block, shape, rate, *, is_transposed=False):
    """Tells which weights dropout keeps, of rows from `first` on and a block of columns.

    Rows are queries and columns keys unless transposed. `seeds` are two words and the positions of the first query and key.
    """
    query_start, key_start = (seeds[b, head, i] for i in (2, 3))
    origins = (key_start, query_start) if is_transposed else (query_start, key_start)
    starts = origins[0] + jnp.uint32(first), origins[1] + jnp.uint32(block * shape[1])
    positions = [start + plgpu.broadcasted_iota(jnp.uint32, shape, axis, layout=LAYOUT) for axis, start in enumerate(starts)]
    row, col = reversed(positions) if is_transposed else positions
    first_word, second_word = (jnp.broadcast_to(seeds[b, head, i], shape) for i in range(2))
    return dropout.keep(first_word, second_word, row, col, rate)


def tanh(x):
    """Returns `tanh` of scores."""
    return fused.fused(fused.tanh, (), [x], LAYOUT)
