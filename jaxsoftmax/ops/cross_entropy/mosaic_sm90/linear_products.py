"""The products that turn the gradient of logits of a linear layer into those of its weight and its hidden states.

For one block of classes after another they read the weight where it stands, and write its gradient to its place. XLA would copy
a block of each. The sums of a tile are those of `jax.lax.dot_general`, to the bit (H200, jax 0.11.2).
"""

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
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


def write_weight(array, g, hidden, first, *, class_axis: int, blocks: int) -> jax.Array:
    """Writes the gradient of a block of classes to its place in that of the weight, rounded once.

    Args:
      array: the gradient of the weight, in 16 bits or float32.
      g: gradients of the logits `[rows, classes of the block]`; rows of whole tiles.
      hidden: hidden states `[rows, H]`.
      first: `[1]`, int32, the first class of the block in units of `matmul.DEPTH`.
      class_axis: axis of the weight that has the classes.
      blocks: number of blocks of threads.
    """

    def store(place, sums, others, results, staging):
        (first,), (array,), (stage,) = others, results, staging
        places = [place.row * matmul.ROWS, place.column * matmul.COLUMNS]
        places[class_axis] += first[0] * matmul.DEPTH
        _store(sums, stage, array, *places)

    operands = (hidden, g) if class_axis == 1 else (g, hidden)
    options = {"along": (0, 0), "blocks": blocks, "name": "linear_weight_gradient_mosaic", "stage": _stage_of(array.dtype)}
    return matmul.multiply(store, *operands, [first], in_place=array, **options)[0]


def add_hidden(total, g, weight, window: matmul.Window | None, *, class_axis: int, blocks: int) -> jax.Array:
    """Adds the share of a block of classes to the gradient of hidden states, a total `[rows, H]` in float32.

    Args:
      total: the gradient of hidden states.
      g: gradients of the logits `[rows, classes of the block]`; rows of whole tiles.
      weight: the weight, in the dtype of `g`.
      window: the classes of the block; None if the weight has those alone.
      class_axis: axis of the weight that has the classes.
      blocks: number of blocks of threads.
    """

    def store(place, sums, others, results, staging):
        (array,), (stage,) = results, staging
        del others
        _store(sums, stage, array, place.row * matmul.ROWS, place.column * matmul.COLUMNS, reduction_op="add")

    options = {"along": (1, class_axis), "blocks": blocks, "name": "linear_hidden_gradient_mosaic"}
    return matmul.multiply(store, g, weight, [], in_place=total, window=window, stage=_stage_of(total.dtype), **options)[0]


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
