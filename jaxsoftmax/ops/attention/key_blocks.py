"""The blocks of keys that each block of queries can see, from segments and masks: computed before the kernels run."""

import jax
import jax.numpy as jnp
from jax import lax


def find_spans(operands, lengths: tuple[int, int], block_q: int, block_kv: int, *, by_keys: bool = False) -> jax.Array | None:
    """Finds the range of key blocks that each query block can see, from segments and from a mask that all heads share.

    Args:
      operands: the operands of attention, by name.
      lengths: numbers of queries and of keys.
      block_q: queries of a block.
      block_kv: keys of a block.
      by_keys: True to find the range of query blocks that can see each key block.

    Returns:
      The array that `find_segment_spans` returns, or None if there are neither segments nor such a mask. With a mask no block
      counts as visible entirely.
    """
    limits = None
    if "query_segments" in operands:
        sides = [("query_segments", block_q), ("key_segments", block_kv)]
        (rows, row_block), (cols, col_block) = reversed(sides) if by_keys else sides
        limits = find_segment_spans(operands[rows], operands[cols], row_block, col_block)
    if "mask" in operands and (visible := mark_visible(operands["mask"], lengths, block_q, block_kv)) is not None:
        mask_limits = find_ends(visible.mT if by_keys else visible)
        mask_limits = jnp.concatenate([mask_limits, jnp.zeros_like(mask_limits)], -1)
        if limits is None:
            return mask_limits
        starts = jnp.maximum(limits[..., 0], mask_limits[..., 0])
        return jnp.stack([starts, *(jnp.minimum(limits, mask_limits)[..., i] for i in (1, 2, 3))], -1)
    return limits


def find_segment_spans(query_segments, key_segments, block_q: int, block_kv: int) -> jax.Array:
    """Finds the range of key blocks whose segments each query block can see.

    A query block may see a key block if the ranges of their segment ids overlap. If both hold one and the same id, all of
    their pairs are visible, and a kernel needs no mask.

    Returns:
      int32 `[*batch, query_blocks, 4]`: `(start, stop)` of the key blocks that may be visible, then `(start, stop)` of the
      first run of key blocks that are visible entirely. An empty range has `stop <= start`.
    """
    q_low, q_high = _find_extremes(query_segments, block_q)
    k_low, k_high = _find_extremes(key_segments, block_kv)
    blocks_kv = k_low.shape[-1]
    overlap = (k_low[..., None, :] <= q_high[..., None]) & (k_high[..., None, :] >= q_low[..., None])
    index = lax.broadcasted_iota(jnp.int32, overlap.shape, overlap.ndim - 1)
    have_one_id = (k_low == k_high)[..., None, :] & (q_low == q_high)[..., None]
    is_whole = overlap & have_one_id
    start = jnp.min(jnp.where(is_whole, index, blocks_kv), -1)
    stop = jnp.min(jnp.where(~is_whole & (index > start[..., None]), index, blocks_kv), -1)
    return jnp.concatenate([find_ends(overlap), start[..., None], stop[..., None]], -1)


def intersect_spans(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the spans of blocks that are visible by two conditions, from those by each: see `find_segment_spans`."""
    starts, stops = jnp.maximum(a, b), jnp.minimum(a, b)
    return jnp.stack([starts[..., 0], stops[..., 1], starts[..., 2], stops[..., 3]], -1)


def _find_extremes(segments, block):
    """Returns the smallest and the largest id of each block of a sequence."""
    *batch, length = segments.shape
    padding = [(0, 0)] * len(batch) + [(0, -length % block)]
    blocked = jnp.pad(segments, padding, mode="edge").reshape(*batch, -1, block)
    return jnp.min(blocked, -1), jnp.max(blocked, -1)


def is_shared(mask) -> bool:
    """Returns True if all heads have the same mask."""
    return mask.shape[-3] == 1


def mark_visible(mask, lengths: tuple[int, int], block_q: int, block_kv: int) -> jax.Array | None:
    """Marks the pairs of a query block and a key block where a mask shows at least one key to one query.

    Returns:
      Boolean `[*batch, query_blocks, key_blocks]`, the same for all heads. None for a mask that differs between heads: to read
      it once more would cost about the time that it may save.
    """
    *batch, _, rows, cols = mask.shape
    if not is_shared(mask):
        return None
    blocks = [(block if size > 1 else 1) for size, block in ((rows, block_q), (cols, block_kv))]
    padding = [(0, 0)] * len(batch) + [(0, -size % block) for size, block in zip((rows, cols), blocks, strict=True)]
    padded = jnp.pad(mask.reshape(*batch, rows, cols).astype(bool), padding)
    shape = [number for size, block in zip(padded.shape[-2:], blocks, strict=True) for number in (size // block, block)]
    counts = [-(-length // block) for length, block in zip(lengths, (block_q, block_kv), strict=True)]
    return jnp.broadcast_to(jnp.any(padded.reshape(*batch, *shape), (-3, -1)), (*batch, *counts))


def find_ends(visible):
    """Returns `(start, stop)` of the True entries along the last axis, int32 `[..., 2]`; `(n, 0)` if there are none."""
    reach = _measure_reach(visible, visible.shape[-1])
    return jnp.where(_is_first(reach.shape), visible.shape[-1] - reach, reach)


def measure_mask(mask, lengths: tuple[int, int], block_q: int, block_kv: int) -> jax.Array | None:
    """Measures the keys that a mask shows to each query block from both ends of the keys.

    Returns:
      int32 `[*batch, query_blocks, 2]`: the number of keys from the first visible key to the end of the last block, and from
      the start to the last visible key; both are 0 if the mask shows none. None for a mask that differs between heads.

    The mask of a cache has one row, which a single reduction goes through key by key. Other masks are reduced to blocks first.
    The kernel divides the numbers by the size of a block, because XLA would run a division as a program of its own.
    """
    *batch, _, rows, keys = mask.shape
    end = -(-lengths[1] // block_kv) * block_kv
    if is_shared(mask) and (rows, keys) == (1, lengths[1]):
        return jnp.broadcast_to(_measure_reach(mask.reshape(*batch, 1, keys), end), (*batch, -(-lengths[0] // block_q), 2))
    visible = mark_visible(mask, lengths, block_q, block_kv)
    return None if visible is None else _measure_reach(visible, end, block_kv)


def _measure_reach(visible, end: int, size: int = 1):
    """Measures the distance from the first True entry to `end`, and from 0 to the last one. An entry has the length `size`."""
    shape = 2, visible.shape[-1]
    index = size * lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.max(jnp.where(visible[..., None, :], jnp.where(_is_first(shape, 0), end - index, index + size), 0), -1)


def _is_first(shape, axis=-1):
    """Marks the first of the two entries along an axis. XLA would run a concatenation as a program of its own."""
    return lax.broadcasted_iota(jnp.int32, shape, axis % len(shape)) == 0
