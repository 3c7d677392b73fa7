"""The products that turn the gradient of logits of a linear layer into those of its weight and its hidden states.

They read the weight where it stands, and write its gradient to its place, or add to what is there. XLA would copy a block of
classes of each. The sums of a tile are those of `jax.lax.dot_general`, to the bit (H200, jax 0.11.2).
"""

from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu import matmul

# The least share of the time that blocks of threads must have a tile. 10240 rows and 2560 units are 800 tiles for 132 blocks, a
# share of 0.87. The gradient of the hidden states took 1.05 ms for 12288 classes, and XLA, which has other tiles, 0.94 ms. With
# 8192 rows and 4096 units, a share of 0.97, it took 2.40 and 2.42 ms for 24576 classes (H200).
_LEAST_OCCUPANCY = 0.9
_CHUNK = 64  # columns of float32 that a consumer stores at a time


def fills(shape: tuple[int, int], blocks: int) -> bool:
    """Tells whether the tiles of a product of this shape are enough for all blocks of threads most of the time."""
    tiles = pl.cdiv(shape[0], matmul.TILE_ROWS) * pl.cdiv(shape[1], matmul.COLUMNS)
    return tiles / (pl.cdiv(tiles, blocks) * blocks) >= _LEAST_OCCUPANCY


def to_weight(array, g, hidden, *, class_axis: int, blocks: int, is_added: bool = False, first=None) -> jax.Array:
    """Writes the gradient of a weight to an array, or adds it, rounded once.

    Args:
      array: the gradient of the weight, in 16 bits or float32.
      g: gradients of the logits `[rows, classes]`; rows of whole tiles.
      hidden: hidden states `[rows, H]`.
      class_axis: axis of the array that has the classes.
      blocks: number of blocks of threads.
      is_added: True to add to what the array has.
      first: `[1]`, int32, the first class of `g` in units of `matmul.DEPTH`; None for 0.
    """
    first = jnp.zeros(1, jnp.int32) if first is None else first
    is_fetched = is_added and array.dtype.itemsize == 2

    def places(place, others):
        found = [place.row * matmul.ROWS, place.column * matmul.COLUMNS]
        found[class_axis] += others[0][0] * matmul.DEPTH
        return found

    def fetch(place, others, results, stage, barrier):
        (array,), (row, column) = results, places(place, others)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
        part = array.at[pl.ds(row, matmul.ROWS), pl.ds(column, matmul.COLUMNS)]
        plgpu.copy_gmem_to_smem(part, stage.at[0], barrier)

    def store(place, sums, others, results, staging):
        (array,), (stage, *barriers) = results, staging
        if is_fetched:
            plgpu.barrier_wait(*barriers)
            sums += plgpu.load(stage.at[0], layout=matmul.LAYOUT).astype(sums.dtype)
        options = {"reduction_op": "add"} if is_added and not is_fetched else {}
        _store(sums, stage, array, *places(place, others), **options)

    operands = (hidden, g) if class_axis == 1 else (g, hidden)
    options = {"along": (0, 0), "blocks": blocks, "name": "linear_weight_gradient_mosaic", "stage": _stage_of(array.dtype)}
    return matmul.multiply(store, *operands, [first], in_place=array, fetch=fetch if is_fetched else None, **options)[0]


def to_hidden(g, weight, *, class_axis: int, blocks: int, total=None, window: matmul.Window | None = None) -> jax.Array:
    """Computes the gradient of hidden states `[rows, H]`, in the dtype of the operands, or adds it to a total in float32.

    Args:
      g: gradients of the logits `[rows, classes]`; rows of whole tiles.
      weight: the weight.
      class_axis: axis of the weight that has the classes.
      blocks: number of blocks of threads.
      total: float32 array `[rows, H]` that is added to in place; None for a new array.
      window: the classes of `g`; None for all of the weight.
    """

    def store(place, sums, others, results, staging):
        (array,), (stage,) = results, staging
        del others
        options: dict[str, Any] = {} if total is None else {"reduction_op": "add"}
        _store(sums, stage, array, place.row * matmul.ROWS, place.column * matmul.COLUMNS, **options)

    new = jax.ShapeDtypeStruct((len(g), weight.shape[1 - class_axis]), g.dtype)
    options: dict[str, Any] = {"out_type": [new]} if total is None else {"in_place": total}
    options |= {"along": (1, class_axis), "blocks": blocks, "name": "linear_hidden_gradient_mosaic", "window": window}
    return matmul.multiply(store, g, weight, [], stage=_stage_of((new if total is None else total).dtype), **options)[0]


def _stage_of(dtype) -> jax.ShapeDtypeStruct:
    """Returns the type of the shared memory of a consumer: a tile in 16 bits, or two chunks of float32."""
    shape = (2, matmul.ROWS, _CHUNK) if dtype.itemsize == 4 else (1, matmul.ROWS, matmul.COLUMNS)
    return jax.ShapeDtypeStruct(shape, dtype)


def _store(sums, stage, array, row, column, **options):
    """Stores a tile at its place in an array, by way of shared memory, in chunks."""
    slots, _, columns = stage.shape
    for i, first in enumerate(range(0, matmul.COLUMNS, columns)):
        slot = stage.at[i % slots]
        plgpu.wait_smem_to_gmem(slots - 1, wait_read_only=True)  # what was in the slot has left
        part = sums if columns == matmul.COLUMNS else lax.slice(sums, (0, first), (len(sums), first + columns))
        slot[...] = part.astype(slot.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slot, array.at[pl.ds(row, matmul.ROWS), pl.ds(column + first, columns)], **options)
