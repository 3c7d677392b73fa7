"""Which blocks of keys matter to a block of queries, from segments and masks: computed before the kernels run."""

import jax
import jax.numpy as jnp
from jax import lax


def spans(given, lengths: tuple[int, int], block_q: int, block_kv: int, *, by_keys: bool = False) -> jax.Array | None:
    """What `ranges` says, of segments and of a mask that is the same for all heads; of neither None.

    `by_keys` which blocks of queries matter to each block of keys. With a mask no block is one that all see whole.
    """
    found = None
    if "query_segments" in given:
        both = [("query_segments", block_q), ("key_segments", block_kv)]
        (own, own_block), (other, other_block) = reversed(both) if by_keys else both
        found = ranges(given[own], given[other], own_block, other_block)
    if "mask" in given and (shown := seen(given["mask"], lengths, block_q, block_kv)) is not None:
        limits = ends(shown.mT if by_keys else shown)
        limits = jnp.concatenate([limits, jnp.zeros_like(limits)], -1)
        if found is None:
            return limits
        return jnp.stack(
            [jnp.maximum(found[..., 0], limits[..., 0]), *(jnp.minimum(found, limits)[..., i] for i in (1, 2, 3))], -1
        )
    return found


def ranges(query_segments, key_segments, block_q: int, block_kv: int) -> jax.Array:
    """Which key blocks matter to each block of queries, int32 `[*batch, blocks_q, 4]`.

    From and to where one may have a key of their segments, and from and to where all are of the one segment that there is.
    """
    q_low, q_high = _extremes(query_segments, block_q)
    k_low, k_high = _extremes(key_segments, block_kv)
    blocks_kv = k_low.shape[-1]
    meet = (k_low[..., None, :] <= q_high[..., None]) & (k_high[..., None, :] >= q_low[..., None])
    index = lax.broadcasted_iota(jnp.int32, meet.shape, meet.ndim - 1)
    one = (k_low == k_high)[..., None, :] & (q_low == q_high)[..., None]
    whole = meet & one
    first = jnp.min(jnp.where(whole, index, blocks_kv), -1)
    behind = jnp.min(jnp.where(~whole & (index > first[..., None]), index, blocks_kv), -1)
    return jnp.concatenate([ends(meet), first[..., None], behind[..., None]], -1)


def _extremes(segments, block):
    """The least and the largest id of each block of a sequence."""
    *batch, length = segments.shape
    padding = [(0, 0)] * len(batch) + [(0, -length % block)]
    blocked = jnp.pad(segments, padding, mode="edge").reshape(*batch, -1, block)
    return jnp.min(blocked, -1), jnp.max(blocked, -1)


def is_shared(mask) -> bool:
    """Whether a mask is the same for all heads."""
    return mask.shape[-3] == 1


def seen(mask, lengths: tuple[int, int], block_q: int, block_kv: int) -> jax.Array | None:
    """Whether a mask lets any query of a block see any key of a block, `[*batch, blocks_q, blocks_kv]`, the same for all heads.

    None for a mask that differs between heads: to read it once more would cost about as much as it may save.
    """
    *batch, _, rows, cols = mask.shape
    if not is_shared(mask):
        return None
    own = [(block if size > 1 else 1) for size, block in ((rows, block_q), (cols, block_kv))]
    padding = [(0, 0)] * len(batch) + [(0, -size % block) for size, block in zip((rows, cols), own, strict=True)]
    padded = jnp.pad(mask.reshape(*batch, rows, cols).astype(bool), padding)
    shape = [number for size, block in zip(padded.shape[-2:], own, strict=True) for number in (size // block, block)]
    blocks = [-(-length // block) for length, block in zip(lengths, (block_q, block_kv), strict=True)]
    return jnp.broadcast_to(jnp.any(padded.reshape(*batch, *shape), (-3, -1)), (*batch, *blocks))


def ends(there):
    """From where to where there are any along the last axis: int32 `[..., 2]`; where there are none, to is before from."""
    reach = _reach(there, there.shape[-1])
    return jnp.where(_is_first(reach.shape), there.shape[-1] - reach, reach)


def mask_reach(mask, lengths: tuple[int, int], block_q: int, block_kv: int) -> jax.Array | None:
    """From the first key that a mask shows to the end of the last block, and from the start to the last key that it shows.

    Both are numbers of keys: int32 `[*batch, blocks_q, 2]`, 0 where a mask shows none, and None where `seen` is. The mask of a
    cache has one row, which a single reduction goes through key by key. Other masks are reduced to blocks first. The kernel
    divides the numbers by the size of a block, because XLA would run a division as a program of its own.
    """
    *batch, _, rows, keys = mask.shape
    end = -(-lengths[1] // block_kv) * block_kv
    if is_shared(mask) and (rows, keys) == (1, lengths[1]):
        return jnp.broadcast_to(_reach(mask.reshape(*batch, 1, keys), end), (*batch, -(-lengths[0] // block_q), 2))
    shown = seen(mask, lengths, block_q, block_kv)
    return None if shown is None else _reach(shown, end, block_kv)


def _reach(there, end: int, size: int = 1):
    """How far it is from the first that is there to `end`, and from 0 to the last, where each has length `size`."""
    shape = 2, there.shape[-1]
    index = size * lax.broadcasted_iota(jnp.int32, shape, 1)
    return jnp.max(jnp.where(there[..., None, :], jnp.where(_is_first(shape, 0), end - index, index + size), 0), -1)


def _is_first(shape, axis=-1):
    """Which numbers are the first of two along an axis. XLA would make a concatenation a program of its own."""
    return lax.broadcasted_iota(jnp.int32, shape, axis % len(shape)) == 0
