"""Block masks: what a mask function leaves of each block of scores, found once for several calls of attention.

Without one, each call of attention finds the blocks again, before its kernel runs: see `mask_blocks`.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core import arguments
from jaxsoftmax.ops.attention import mask_blocks, score_functions

_NAME = "block_mask"


@functools.partial(jax.tree_util.register_dataclass, data_fields=["kinds", "arrays"], meta_fields=["function", "lengths"])
@dataclass(frozen=True, eq=False)
class BlockMask:
    """A mask function, and what it leaves of each block of queries and keys.

    `block_mask` makes it, and `dot_product_attention` takes it as `mask_mod`. It is a pytree of arrays: jitted functions may
    take, donate and return it, and `jax.device_put` shards it. In a `jax.vmap` or `jax.shard_map` that maps its arrays, make it
    inside.

    Attributes:
      kinds: int8 `[*batch, heads, query_blocks, key_blocks]`, 0 for a block where no query sees a key, 2 where each query sees
        each key, and 1 for all others. There are no batch axes if the function reads no `batch`, and `heads` is 1 if it reads
        no `head`. Blocks have 64 queries and 64 keys, or a power of two times as many in long sequences.
      arrays: arrays that the function closes over.
      function: the traced function.
      lengths: numbers of queries and keys.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> seen = jnp.array([100, 40])  # keys that each sequence has
      >>> mask = jaxsoftmax.block_mask(lambda b, h, q, k: k < seen[b], 128, batch=2)
      >>> print(mask.kinds[:, 0, 0])
      [[2 1]
       [1 0]]
      >>> [leaf.shape for leaf in jax.tree.leaves(mask)]
      [(2, 1, 2, 2), (2,)]
    """

    kinds: jax.Array
    arrays: tuple[jax.Array, ...]
    function: Any
    lengths: tuple[int, int]


def block_mask(
    mask_mod: Callable[..., Any],
    query_length: int,
    key_length: int | None = None,
    *,
    batch: int | tuple[int, ...] | None = None,
    heads: int | None = None,
) -> BlockMask:
    """Finds which blocks of scores a mask function shows, for several calls of `dot_product_attention`.

    Attention finds these blocks by itself, before its kernel runs. If they depend on arrays, such as the documents of tokens,
    a block mask does this work once for all layers, and once for forward and backward. Masks of positions alone are found while
    tracing, and need no block mask. It has no effect on results.

    Args:
      mask_mod: function `mask_mod(batch, head, query_index, key_index)` that returns a bool, as `dot_product_attention` takes
        it.
      query_length: number of queries, T.
      key_length: number of keys, S. None for T.
      batch: sizes of the batch axes. Needed if the function reads `batch`.
      heads: number of query heads. Needed if the function reads `head`.

    Returns:
      A `BlockMask`. Pass it as `mask_mod`. With `query_offset`, or where devices share a sequence, attention takes its function
      alone.

    Raises:
      TypeError: `mask_mod` is no function of four scalars that returns a bool, or a size is no integer.
      ValueError: a size is less than 1 or not below 2^30, or one that the function needs is missing; the function has side
        effects, or closes over an array that devices share.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> documents = jnp.repeat(jnp.arange(4), 64)[None]
      >>> def same_document(batch, head, query_index, key_index):
      ...     return documents[batch, query_index] == documents[batch, key_index]
      >>> mask = jaxsoftmax.block_mask(same_document, 256, batch=1)
      >>> print(mask.kinds[0, 0])
      [[2 0 0 0]
       [0 2 0 0]
       [0 0 2 0]
       [0 0 0 2]]
      >>> x = jax.random.normal(jax.random.key(0), (1, 256, 2, 64))
      >>> jaxsoftmax.dot_product_attention(x, x, x, mask_mod=mask).shape
      (1, 256, 2, 64)
    """
    lengths = _size("query_length", query_length), _size("key_length", query_length if key_length is None else key_length)
    sizes = () if batch is None else batch if isinstance(batch, tuple | list) else (batch,)
    sizes = tuple(_size("batch", size) for size in sizes)
    n_heads = 1 if heads is None else _size("heads", heads)
    closure = score_functions.trace(_NAME, "mask_mod", mask_mod)
    for name, argument, given in (("batch", "batch", batch), ("head", "heads", heads)):
        if name in closure.function.used and given is None:
            raise ValueError(f"{_NAME}: {argument} must be given, as mask_mod reads {name}, got None")
    used = closure.function.used
    sizes, n_heads = (sizes if "batch" in used else ()), (n_heads if "head" in used else 1)
    operands = {
        name: score_functions.as_table(array, len(sizes) + 1)
        for name, array in zip(closure.function.table_names, closure.arrays, strict=True)
    }
    operands |= score_functions.numbers_of(used, sizes, n_heads)
    kinds = mask_blocks.find_kinds(closure.function, operands, lengths, len(sizes))
    kinds = jnp.broadcast_to(kinds, (*sizes, n_heads, *kinds.shape[-2:]))
    return BlockMask(kinds, tuple(map(jnp.asarray, closure.arrays)), closure.function, lengths)


def kinds_for(name: str, mask: BlockMask, batch: tuple[int, ...], heads: int, lengths: tuple[Any, Any]) -> dict[str, jax.Array]:
    """Returns the operand of attention that says what the function of a mask leaves of blocks, unless tracing tells it.

    Args:
      name: the public function, for errors.
      mask: the block mask.
      batch: batch axes of the attention.
      heads: its number of query heads.
      lengths: its numbers of queries and keys.

    Raises:
      ValueError: the mask was made for another batch, other heads or other lengths, or it has parts of its arrays.
    """
    function, used = mask.function, mask.function.used
    if tuple(lengths) != mask.lengths:
        raise ValueError(
            f"{name}: mask_mod must be a BlockMask for {lengths[0]} queries and {lengths[1]} keys, got one for"
            f" {mask.lengths[0]} and {mask.lengths[1]}"
        )
    wanted = (batch if "batch" in used else ()), (heads if "head" in used else 1)
    *own_batch, own_heads = mask.kinds.shape[:-2]
    if (tuple(own_batch), own_heads) != wanted:
        raise ValueError(
            f"{name}: mask_mod must be a BlockMask for batch axes {wanted[0]} and {wanted[1]} heads, got one for"
            f" {tuple(own_batch)} and {own_heads}"
        )
    block = mask_blocks.block_of_kinds(mask.kinds.shape[-2:], mask.lengths)
    if mask.kinds.dtype != jnp.int8 or block is None:
        raise ValueError(f"{name}: mask_mod must be a BlockMask as block_mask makes it, got kinds {jax.typeof(mask.kinds)}")
    for array, aval in zip(mask.arrays, function.program.in_avals, strict=False):
        if array.size != aval.size:
            raise ValueError(
                f"{name}: mask_mod must be a BlockMask with its whole arrays, got {array.size} elements of {aval.size}; in a"
                " jax.vmap or jax.shard_map that maps them, make the mask inside"
            )
    if not (function.tables or used & {"batch", "head"}):  # of positions alone: kernels find its blocks while they are traced
        return {}
    return {"block_kinds": mask.kinds.reshape(*(own_batch or [1] * len(batch)), own_heads, *mask.kinds.shape[-2:])}


def _size(name, value) -> int:
    size = arguments.integer(_NAME, name, value)
    if not 1 <= size < 2**30:
        raise ValueError(f"{_NAME}: {name} must be at least 1 and below 2^30, got {arguments.shown(size)}")
    return size
