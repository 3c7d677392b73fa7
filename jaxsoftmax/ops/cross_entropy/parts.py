"""Sums and results of rows that are computed for a part of the rows at a time, so that memory for their logits is bounded.

With n parts a part has every n-th row, not neighbours: if rows are sharded, each device has some of every part.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import sharding

# Bytes of the logits of a part. With gradients parts are fewer, as each reads and writes the gradient of the weight.
MOST_WITH_GRADIENT = 2**29
MOST = 2**28
_TILE = 128  # rows of one tile of tensor cores


def product(a: jax.Array, b: jax.Array, axis_of_a: int, axis_of_b: int, dtype) -> jax.Array:
    """Multiplies two matrices along an axis of each."""
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=dtype)


def by_parts(
    function, most: int, bytes_of_row: Any, arrays: list[jax.Array], *, is_first_apart: bool = False
) -> tuple[Any, list[jax.Array]]:
    """Folds a function over parts of the rows.

    Args:
      function: `function(sums, *parts of the arrays)` returns the new sums, and results `[rows of the part, ...]`. The sums
        that it gets first are None if there is one part, or if the first of several is apart, else zeros.
      most: bytes that the logits of a part take, approximately.
      bytes_of_row: bytes that those of a row take.
      arrays: arrays whose first axis has the rows.
      is_first_apart: True to compute the first of three or more parts in front of the loop over the others, which saves the
        zeros, and adding to them. On automatic axes of several devices that would add up the gradient of the weight over the
        devices twice.

    Returns:
      The sums, and the results of all rows. The last rows of parts may be zeros, whose results are left out. Symbolic sizes
      make one part.
    """
    rows = arrays[0].shape[0]
    rows_of_part, parts = sizes(rows, bytes_of_row, most)
    if parts == 1:
        return function(None, *arrays)

    def interleaved(array):
        padded = jnp.pad(array, ((0, parts * rows_of_part - rows), *((0, 0) for _ in array.shape[1:])))
        return padded.reshape(rows_of_part, parts, *array.shape[1:])

    def step(carry, i):
        sums, results = carry
        sums, new = function(sums, *(lax.dynamic_index_in_dim(array, i, 1, keepdims=False) for array in in_parts))
        return (sums, [lax.dynamic_update_index_in_dim(a, b, i, 1) for a, b in zip(results, new, strict=True)]), None

    in_parts = list(map(interleaved, arrays))
    # A loop over one part is no loop to XLA, which then has the gradient of the weight in memory twice.
    is_first_apart &= parts > 2
    first = [array[:, 0] for array in in_parts]
    sums, found = function(None, *first) if is_first_apart else jax.eval_shape(function, None, *first)
    results = [jax.ShapeDtypeStruct((rows_of_part, parts, *kind.shape[1:]), kind.dtype) for kind in found]
    leaves, tree = jax.tree.flatten(results if is_first_apart else (sums, results))
    zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    carry = jax.tree.unflatten(tree, sharding.vary_alike([in_parts[0], *zeros])[1:])
    if is_first_apart:
        carry = sums, [array.at[:, 0].set(each) for array, each in zip(carry, found, strict=True)]
    (sums, results), _ = lax.scan(step, carry, jnp.arange(int(is_first_apart), parts))
    return sums, [array.reshape(parts * rows_of_part, *array.shape[2:])[:rows] for array in results]


def sizes(rows: Any, bytes_of_row: Any, most: int) -> tuple[Any, int]:
    """Returns the rows of a part, and the number of parts: the least that fits, or up to a third more with fewer zeros."""
    if not (isinstance(rows, int) and isinstance(bytes_of_row, int)):
        return rows, 1
    tiles, least = -(-rows // _TILE), -(-rows * bytes_of_row // most)
    if min(least, tiles) <= 1:
        return rows, 1
    tiles_of_part = (-(-tiles // parts) for parts in range(least, least + least // 3 + 1))
    size = min(tiles_of_part, key=lambda size: -tiles % size)
    return size * _TILE, -(-tiles // size)
