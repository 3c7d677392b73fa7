"""The blocks that tiles visit where a mask function leaves holes: a list for each tile, which XLA makes before the kernel.

A span says enough of most masks: a kernel visits and masks the holes inside. A list has the visible blocks alone. It is a row
of int32 in global memory: the number of blocks, then an entry `2 * block + is_partial` for each, from the last block to the
first, as kernels visit them. A producer loads an entry a step before it copies the block. A consumer loads it when its step
starts, and needs it when the scores are multiplied.

The mask function, the window and lengths decide what is in a list. Masks and segments have spans.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax.ops.attention import mask_blocks
from jaxsoftmax.ops.attention.mosaic_sm90.common import GlobalOperand
from jaxsoftmax.ops.attention.mosaic_sm90.functions import Function, loads_tiles

# The entry behind the last one: block 0, which is masked. A tile of the forward kernel visits it if its list is empty, as it
# visits at least one block.
_HIDDEN = 1
_MORE = 2  # number of such entries, as a producer looks ahead
OPERANDS_OF_POSITIONS = {"query_offset", "query_numbers"}  # operands by which positions are not known while tracing
_HAVE_SPANS = {"mask", "query_segments"}


def pays_to_list(mask_mod: Any, types: Mapping[str, Any], block_q: int, block_kv: int, *, by_keys: bool = False) -> bool:
    """Tells whether tiles should visit lists of blocks, for a mask function or None, and for operands of these types.

    They should if holes are known while tracing, or if the function reads an element of a table for each score: such a table
    may say which blocks are visible. So may a `BlockMask`. Other functions of tables compare documents, positions or lengths,
    and usually leave no holes. Spans then say as much, without a load in each step: 12 documents in 16384 tokens take 398 us
    with spans and 405 us with lists, with gradients 1669 us and 1687 us (H200).
    """
    if mask_mod is None or not _HAVE_SPANS.isdisjoint(types):
        return False
    lengths, blocks = (types["query"].shape[-3], types["key"].shape[-3]), (block_q, block_kv)
    if not mask_blocks.fits_grid(mask_mod, types, lengths, *blocks):
        return False
    has_offset = not OPERANDS_OF_POSITIONS.isdisjoint(types)
    has_holes = mask_blocks.has_holes(mask_mod, lengths, *blocks, by_keys=by_keys, has_offset=has_offset)
    return has_holes or "block_kinds" in types or loads_tiles(Function.of(mask_mod), types)


def list_blocks(
    mask_mod: Any,
    operands: Mapping[str, Any],
    lengths: tuple[int, int],
    blocks: tuple[int, int],
    window: tuple[int | None, int | None],
    *,
    by_keys: bool = False,
    sharers: int = 1,
    heads_per_list: int = 1,
) -> jax.Array:
    """Lists the key blocks that each query block of each head visits.

    Args:
      mask_mod: the mask function.
      operands: the operands of attention, by name.
      lengths: numbers of queries and of keys.
      blocks: queries of a block, and keys of a block.
      window: numbers of keys before and after its own position that a query sees.
      by_keys: True to list the query blocks that each key block visits.
      sharers: number of neighbouring blocks that visit what any of them sees.
      heads_per_list: number of neighbouring heads that visit what any of them sees.

    Returns:
      int32 `[*batch, rows, 1 + n]`, with batch axes of size 1 where nothing depends on them. Each query block has a row. If the
      mask depends on the head, each group of heads has such rows, one group after the other: see `load`. A constant if nothing
      but positions hides keys.
    """
    batch_axes = operands["query"].ndim - 3
    names = [*mask_blocks.operands_of(mask_mod, operands), *({"query_lengths", "key_lengths"} & operands.keys())]

    def run(operands):  # the program of an inner function: `custom_partitioning` takes no other constants
        marks = mask_blocks.mark_blocks(mask_mod, operands, lengths, *blocks, batch_axes)
        limits = _mark_limits(operands, lengths, blocks, window, batch_axes)
        seen, whole = (mark & limit for mark, limit in zip(marks, limits, strict=True))
        if (heads := seen.shape[-3]) > 1:
            groups = *seen.shape[:-3], heads // heads_per_list, heads_per_list, *seen.shape[-2:]
            seen, whole = seen.reshape(groups).any(-3), whole.reshape(groups).all(-3)
        if by_keys:
            seen, whole = seen.swapaxes(-1, -2), whole.swapaxes(-1, -2)
        rows = _listed(share(seen, sharers), _in_whole_tiles(whole, sharers))
        return jnp.asarray(rows.reshape(*rows.shape[:-3], -1, rows.shape[-1]))

    return jax.jit(run)({name: operands[name] for name in sorted(names)})


def share(seen, sharers: int):
    """Marks the blocks, along the last axis, that any of `sharers` rows which follow one another sees."""
    seen = _in_whole_tiles(seen, sharers)
    tiles = seen.reshape(*seen.shape[:-2], -1, sharers, seen.shape[-1]).any(-2, keepdims=True)
    return tiles.repeat(sharers, -2).reshape(seen.shape)


def _in_whole_tiles(marks, sharers):
    """Adds rows without marks until `sharers` divides their number."""
    more = [(0, 0)] * (marks.ndim - 2) + [(0, -marks.shape[-2] % sharers), (0, 0)]
    return marks if sharers == 1 else (np if isinstance(marks, np.ndarray) else jnp).pad(marks, more)


def _mark_limits(operands, lengths, blocks, window, batch_axes):
    """Marks the blocks where window and lengths let some query see some key, and those where all queries see all keys.

    A block that reaches behind the last query or key is not whole.
    """
    (left, right), ends = window, []
    for axis, (length, block) in enumerate(zip(lengths, blocks, strict=True)):
        shape = (1,) * (batch_axes + 1) + ((-1, 1), (1, -1))[axis]
        ends.append((block * np.arange(-(-length // block), dtype=np.int32)).reshape(shape))
    queries, keys = (
        jnp.clip(operands[name][..., None, None, None], 0, size) if name in operands else np.int32(size)
        for name, size in zip(("query_lengths", "key_lengths"), lengths, strict=True)
    )
    offset = operands["query_offset"][..., None, None, None] if "query_offset" in operands else np.int32(0)
    (first, key), (last, last_key) = ends, (x + np.int32(block - 1) for x, block in zip(ends, blocks, strict=True))
    seen, whole = (first < queries) & (key < keys), (last < queries) & (last_key < keys)
    if left is not None:
        seen, whole = seen & (last_key >= first + offset - left), whole & (key >= last + offset - left)
    if right is not None:
        xp = np if isinstance(queries, np.integer) else jnp
        seen = seen & (key <= xp.minimum(last, queries - 1) + offset + right)
        whole = whole & (last_key <= first + offset + right)
    return seen, whole


def _listed(seen, whole):
    """Lists the blocks that are marked as seen along the last axis. A list of numpy arrays is as long as its longest row."""
    xp: Any = np if isinstance(seen, np.ndarray) and isinstance(whole, np.ndarray) else jnp
    count = seen.sum(-1, keepdims=True, dtype=np.int32)
    first = 2 * np.arange(seen.shape[-1], dtype=np.int32).reshape((1,) * (seen.ndim - 1) + (-1,))
    entries = xp.where(seen, xp.where(whole, first, first + 1), np.int32(-1))
    entries = xp.flip(xp.sort(entries, -1), -1)
    if xp is np:
        entries = entries[..., : max(count.max(), 1)]
    entries = xp.where(entries < 0, np.int32(_HIDDEN), entries)
    more = xp.full((*count.shape[:-1], _MORE), _HIDDEN, np.int32)
    return xp.concatenate([count, entries, more], -1)


def visited(lists: jax.Array, n_blocks: int) -> jax.Array:
    """Marks which of `n_blocks` blocks are in each list, `[..., n_blocks]`."""
    blocks = block_of(lists[..., 1:])
    blocks = jnp.where(lax.broadcasted_iota(jnp.int32, blocks.shape, blocks.ndim - 1) < lists[..., :1], blocks, -1)
    every = jnp.arange(n_blocks, dtype=jnp.int32).reshape(*(1,) * (blocks.ndim - 1), -1, 1)
    return jnp.any(blocks[..., None, :] == every, -1)


def load(lists: GlobalOperand, n_blocks: int, b: Any, group: Any, block: Any, i: Any) -> Any:
    """Loads number `i` of the list of a block: how many entries it has, then these.

    Args:
      lists: what `list_blocks` returned.
      n_blocks: number of blocks, each with a list.
      b: batch entry.
      group: number of the group of heads.
      block: number of the block.
      i: place in the list.
    """
    has_groups = lists.ref.shape[1] > n_blocks
    return lists[b, group * n_blocks + block if has_groups else block, i]


def load_entry(lists: GlobalOperand, n_blocks: int, b: Any, group: Any, block: Any, i: Any) -> Any:
    """Loads entry `i` of the list of a block. Arguments are those of `load`."""
    return load(lists, n_blocks, b, group, block, 1 + i)


def block_of(entry):
    """Returns the block of an entry."""
    return lax.shift_right_arithmetic(entry, jnp.full_like(entry, 1))


def is_partial(entry):
    """Returns True if something hides keys in the block of an entry."""
    return lax.rem(entry, jnp.int32(2)) != 0
