"""What the kernels of attention share: the order in which tiles are handed out, operands of a batch, `tanh`."""

import functools
import heapq
import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import products, ptx
from jaxsoftmax.ops.attention._operands import RANKS

_LOG2E = math.log2(math.e)

# How many axes come behind those of the batch.
TRAILING = RANKS | {"ranges": 2, "seen": 2, "spans": 2}


def batch_of(given):
    """The batch that operands, or their types, have together."""
    return lax.broadcast_shapes(*(operand.shape[: operand.ndim - TRAILING[name]] for name, operand in given.items()))


def sms(*, least: bool = False) -> int:
    """Multiprocessors of the GPU at hand, else of an H100 or H200, or if `least` of an H20, which has the fewest."""
    try:
        return jax.devices("cuda")[0].core_count
    except (RuntimeError, AttributeError):
        return 78 if least else 132


MAX_SCHEDULED = 2**17  # tiles, above which the order of a table would gain little and take long to find
L2 = 24 << 20  # bytes of operands that tiles may share at a time
TILE_COST = 1.5  # of starting and ending a tile, in steps


def order(costs: tuple[int, ...], heads: int, group: int) -> np.ndarray:
    """In which order tiles are handed out: long ones before short ones, for `group` heads at a time.

    Tile `head * len(costs) + i` takes `costs[i]` steps.
    """
    long_first, head = np.argsort(-np.asarray(costs), stable=True), np.arange(heads)
    tiles = np.add.outer(long_first, head * len(costs))
    groups = np.broadcast_to(head // group, tiles.shape)
    return tiles.ravel()[np.argsort(groups, None, stable=True)].astype(np.int32)


@functools.lru_cache(maxsize=256)
def schedule(costs: tuple[int, ...], heads: int, group: int, blocks: int) -> np.ndarray:
    """Which tiles each block of threads works through, `[blocks, most + 2]`: how many, their numbers, and what is never used.

    Tiles are handed out one by one, in their order, to whoever is free first.
    """
    queue = [(0.0, block) for block in range(blocks)]
    tiles: list[list[int]] = [[] for _ in range(blocks)]
    for tile in order(costs, heads, group).tolist():
        free, block = queue[0]
        tiles[block].append(tile)
        heapq.heapreplace(queue, (free + costs[tile % len(costs)] + TILE_COST, block))
    table = np.zeros((blocks, 2 + max(map(len, tiles))), np.int32)
    for row, own in zip(table, tiles, strict=True):
        row[0], row[1 : 1 + len(own)] = len(own), own
    return table


def each_tile(work, table, tiles: int, number_of, block, blocks: int) -> None:
    """Does `steps = work(number, steps)` for the tiles of a block of threads, in the order of `schedule`.

    Where there is no table, a block has every `blocks`-th ticket, and for a ticket the tile `number_of(ticket)`.
    """
    count = lax.div(tiles - 1 - block, jnp.int32(blocks)) + 1 if table is None else table[block, 0]

    def number(i):
        return number_of(block + i * blocks) if table is None else table[block, i + 1]

    def one(i, carry):
        own, steps = carry
        following = number(i + 1)  # long before it is needed
        return following, work(own, steps)

    lax.fori_loop(0, count, one, (number(0), jnp.int32(0)))


_SLOTS = 2  # for what is said of a tile


def ticket_memory(words: int, listeners: int) -> dict[str, Any]:
    """Shared memory of a block of threads that takes one tile after another, and says so many words to so many others."""
    return {
        "ticket": plgpu.SMEM((_SLOTS, 1), jnp.int32),
        "ticket_full": plgpu.Barrier(),
        "tile": plgpu.SMEM((_SLOTS, words), jnp.int32),
        "tile_full": plgpu.Barrier(num_barriers=_SLOTS),
        "tile_empty": plgpu.Barrier(num_arrivals=listeners, num_barriers=_SLOTS),
    }


def each_tile_taken(work, look_up, memory, tiles: int, block, blocks: int) -> None:
    """Does `steps = work(look_up(ticket), steps)` for one tile after another, and says to the others what it takes.

    For the warpgroup that copies. First each of the blocks has the ticket of its own number; then whoever is free takes the
    next one. `look_up` gives what is said of a ticket's tile, its number first.
    """
    counter = pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))

    def say(i, values):
        slot = lax.rem(i, jnp.int32(_SLOTS))
        plgpu.barrier_wait(memory["tile_empty"].at[slot])
        ptx.store_scalars(memory["tile"], slot, values)
        plgpu.barrier_arrive(memory["tile_full"].at[slot])

    def one(carry):
        i, ticket, steps = carry
        values = look_up(ticket)
        say(i, values)
        following = ptx.take_ticket(counter)  # long before it is needed, which is when it is stored
        steps = work(values, steps)
        slot = lax.rem(i, jnp.int32(_SLOTS))
        ptx.store_scalars(memory["ticket"], slot, [following])
        plgpu.barrier_arrive(memory["ticket_full"])
        plgpu.barrier_wait(memory["ticket_full"])
        return i + 1, memory["ticket"][slot, 0] + blocks, steps

    count, *_ = lax.while_loop(lambda carry: carry[1] < tiles, one, (jnp.int32(0), block, jnp.int32(0)))
    say(count, [jnp.int32(-1)])


def each_tile_told(work, memory) -> None:
    """The same for the others: does `steps = work(values, steps)`."""

    def hear(i):
        slot = lax.rem(i, jnp.int32(_SLOTS))
        plgpu.barrier_wait(memory["tile_full"].at[slot])
        values = [memory["tile"][slot, k] for k in range(memory["tile"].shape[1])]
        plgpu.barrier_arrive(memory["tile_empty"].at[slot])
        return values

    def one(carry):
        i, values, steps = carry
        steps = work(values, steps)
        return i + 1, hear(i + 1), steps

    for slot in range(_SLOTS):
        plgpu.barrier_arrive(memory["tile_empty"].at[slot])
    lax.while_loop(lambda carry: carry[1][0] >= 0, one, (jnp.int32(0), hear(jnp.int32(0)), jnp.int32(0)))


def up(size: int, multiple: int) -> int:
    return pl.cdiv(size, multiple) * multiple


def _extremes(segments, block):
    """The least and the largest id of each block of a sequence."""
    *batch, length = segments.shape
    padding = [(0, 0)] * len(batch) + [(0, -length % block)]
    blocked = jnp.pad(segments, padding, mode="edge").reshape(*batch, -1, block)
    return jnp.min(blocked, -1), jnp.max(blocked, -1)


def batch_index(batch, shape):
    """A function from the index of a batch entry to that in an operand with size 1 along some axes of the batch."""
    shape = (1,) * (len(batch) - len(shape)) + tuple(shape)

    def index(b):
        if shape == batch:
            return b
        total, stride, below = jnp.int32(0), 1, 1
        for size, own in zip(reversed(batch), reversed(shape), strict=True):
            if own != 1:
                total += lax.rem(lax.div(b, jnp.int32(below)), jnp.int32(size)) * stride
            stride, below = stride * own, below * size
        return total

    return index


def flat(name, array):
    """A mask or bias as rows, segments as one line: as `products` loads them."""
    if name in ("bias", "mask"):
        return array.reshape(-1, array.shape[-1])
    return array.reshape(-1) if name in ("query_segments", "key_segments") else array


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


def seen(mask, lengths: tuple[int, int], block_q: int, block_kv: int) -> jax.Array | None:
    """Whether a mask lets any query of a block see any key of a block, `[*batch, blocks_q, blocks_kv]`, the same for all heads.

    None for a mask that is not: to read it once more would cost about as much as it may save.
    """
    *batch, heads, rows, cols = mask.shape
    if heads != 1:
        return None
    own = [(block if size > 1 else 1) for size, block in ((rows, block_q), (cols, block_kv))]
    padding = [(0, 0)] * len(batch) + [(0, -size % block) for size, block in zip((rows, cols), own, strict=True)]
    padded = jnp.pad(mask.reshape(*batch, rows, cols).astype(bool), padding)
    shape = [number for size, block in zip(padded.shape[-2:], own, strict=True) for number in (size // block, block)]
    blocks = [pl.cdiv(length, block) for length, block in zip(lengths, (block_q, block_kv), strict=True)]
    return jnp.broadcast_to(jnp.any(padded.reshape(*batch, *shape), (-3, -1)), (*batch, *blocks))


def ends(there):
    """From where to where there are any along the last axis: int32 `[..., 2]`; where there are none, to is before from."""
    index = lax.broadcasted_iota(jnp.int32, there.shape, there.ndim - 1)
    low, high = jnp.min(jnp.where(there, index, there.shape[-1]), -1), jnp.max(jnp.where(there, index + 1, 0), -1)
    return jnp.stack([low, high], -1)


def tanh(x):
    """`tanh` to float32's rounding, which the hardware's is not.

    Source: the polynomial for small arguments is that of S. Moshier's Cephes library, `tanhf`.
    """
    square = x * x
    series = functools.reduce(lambda sum, c: sum * square + c, _TANH[1:], _TANH[0])
    large = 1 - 2 * products.reciprocal(1 + jnp.exp2(x * (2 * _LOG2E)))
    return jnp.where(jnp.abs(x) < 0.625, x + x * square * series, large)


_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
