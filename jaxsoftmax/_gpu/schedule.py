"""Hands tiles to blocks of threads, from a table that is made while lowering, or by tickets while the kernel runs.

A kernel whose blocks of threads are persistent cuts its work into tiles, more than there are blocks. Where it is known how long
each tile takes, a table says which tiles each block works through: they are handed out one by one to the block that is free
first. Where operands decide that, a block that is done takes a ticket from a counter in global memory, which stands for a tile.
Its producer warpgroup takes the ticket and tells the other warpgroups through shared memory.

Tiles that all take equally long end at different times if the number of blocks does not divide theirs. The last tiles may be
cut then: several blocks share the steps of a tile, each with a slice of it (`schedule_cut`).

While persistent blocks run, a kernel that becomes ready finds no multiprocessor until all tiles are done, even if its stream
has priority, as NCCL's has. Where a collective may become ready beside a kernel, its blocks therefore come in waves: those of
the first waves end after a few tiles, and the GPU gives their multiprocessors to the stream with priority first.

Blocks that wait for each other take tickets in order of arrival (`BlockTiles.counter`), and never hang if each only waits for
what is done for smaller tickets. A ticket is given only to a block that runs, which then runs until it is done, and takes its
next ticket after all before. Take the unfinished tile with the smallest ticket: its block has finished the tiles it had before,
waits for nobody, and goes on, whichever blocks the GPU starts first. A program may therefore run on a GPU with fewer
multiprocessors than it was lowered for, under MPS, or beside another.
"""

import bisect
import functools
import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import tickets

MAX_SCHEDULED = 2**17  # tiles, above which the order of a table would gain little and take long to find
L2 = 24 << 20  # bytes of operands that tiles may share at a time
TILE_COST = 1.5  # steps that starting and ending a tile takes
MOST_UNBALANCED = 1.02  # time of the block that ends last over the mean, above which tiles of more heads come together
# NCCL's kernel becomes ready at about the time when the kernel of a ring's step does. If the step's kernel has all
# multiprocessors, NCCL's kernel on the other GPU waits for its peer until the step is done, and occupies
# multiprocessors there.
MOST_WAVES = 4  # waves of blocks of threads: a kernel that is ready within the first seven tiles gets multiprocessors


def order(costs: tuple[int, ...], heads: int, n_heads_at_once: int) -> np.ndarray:
    """Returns the order in which tiles are handed out: long ones before short ones, for `n_heads_at_once` heads at a time.

    Tile `head * len(costs) + i` takes `costs[i]` steps. Tiles of one head come together, so that they read its keys from the L2
    cache. If `n_heads_at_once` does not divide the heads, the first ones are fewer: as the last ones they would have too few
    short tiles to end with. With 100 causal heads of 32 tiles, eight at a time, the last of 132 blocks ends 0.1 percent after
    the mean, and would end 3.0 percent after it: 583 us, and 638 us (4 x 4096 causal tokens, 25 heads of 128, H200).
    """
    long_first, head = np.argsort(-np.asarray(costs), stable=True), np.arange(heads)
    tiles = np.add.outer(long_first, head * len(costs))
    groups = np.broadcast_to((head + -heads % n_heads_at_once) // n_heads_at_once, tiles.shape)
    return tiles.ravel()[np.argsort(groups, None, stable=True)].astype(np.int32)


def schedule(costs: tuple[int, ...], heads: int, n_heads_at_once: int, blocks: int) -> np.ndarray:
    """Returns the tiles of each block of threads, int32 `[blocks, most + 2]`: their number, the tiles, and what is never used.

    Tiles are handed out one by one, in their order, to the block that is free first.
    """
    return _schedule_and_imbalance(costs, heads, n_heads_at_once, blocks)[0]


@functools.lru_cache(maxsize=256)
def _schedule_and_imbalance(costs: tuple[int, ...], heads: int, n_heads_at_once: int, blocks: int) -> tuple[np.ndarray, float]:
    """Returns `schedule`, and the time at which the last block ends over the mean of all blocks."""
    queue = [(0.0, block) for block in range(blocks)]
    tiles: list[list[int]] = [[] for _ in range(blocks)]
    for tile in order(costs, heads, n_heads_at_once).tolist():
        free, block = queue[0]
        tiles[block].append(tile)
        heapq.heapreplace(queue, (free + costs[tile % len(costs)] + TILE_COST, block))
    table = np.zeros((blocks, 2 + max(map(len, tiles))), np.int32)
    for row, numbers in zip(table, tiles, strict=True):
        row[0], row[1 : 1 + len(numbers)] = len(numbers), numbers
    ends = [free for free, _ in queue]
    return table, max(ends) * blocks / sum(ends)


def _balanced(costs: tuple[int, ...], heads: int, n_heads_at_once: int, blocks: int) -> int:
    """Doubles `n_heads_at_once` until all blocks end at about the same time, or as evenly as tiles of more heads can.

    Two query heads to a key head, 4 x 4096 causal tokens, backward: the last of 132 blocks ends 11 percent after the mean with
    the tiles of two key heads at a time, and 0.1 percent with those of four.
    """
    imbalances: dict[int, float] = {}
    while n_heads_at_once < 2 * heads:
        imbalance = imbalances[n_heads_at_once] = _schedule_and_imbalance(costs, heads, n_heads_at_once, blocks)[1]
        if imbalance <= MOST_UNBALANCED:
            return n_heads_at_once
        n_heads_at_once *= 2
    # Fewer heads find more of their keys in the L2 cache.
    even = (n for n, imbalance in imbalances.items() if imbalance <= 1.005 * min(imbalances.values()))
    return next(even, n_heads_at_once)


@functools.lru_cache(maxsize=256)
def schedule_cut(steps: int, tiles: int, cut: int, blocks: int) -> tuple[np.ndarray, float]:
    """Deals whole tiles, which take `steps` steps each, then slices of the last `cut` tiles, so that all blocks end together.

    The steps of the tiles that are cut are a line. Each block gets a section of it, which it works through in slices, as a
    slice has steps of one tile.

    Returns:
      The table, and the time at which the last block ends. A row has the number of whole tiles and slices of a block of
      threads, then its whole tiles, and for each slice `tiles` plus the place in the line where it starts. `tiles` plus the
      place where the last slice ends follows, then padding.
    """
    line, whole = cut * steps, [list(range(block, tiles - cut, blocks)) for block in range(blocks)]

    def deal(end: float) -> tuple[list[list[int]], int]:
        """Returns the places where sections and their slices start and end, if no block works after `end`."""
        sections, place = [], 0
        for tiles_of_block in whole:
            room, section = end - len(tiles_of_block) * (steps + TILE_COST), [place]
            while place < line and room >= TILE_COST + 1:
                count = min(int(room - TILE_COST), steps - place % steps)
                place, room = place + count, room - count - TILE_COST
                section.append(place)
            sections.append(section)
        return sections, place

    tile = steps + TILE_COST
    halves = range(int(2 * len(whole[0]) * tile), int(2 * (len(whole[0]) + cut) * tile) + 1)  # until the first block has it all
    end = halves[bisect.bisect_left(halves, line, key=lambda half: deal(half / 2)[1])] / 2
    sections = deal(end)[0]
    rows = [[*whole[block], *(tiles + place for place in section)] for block, section in enumerate(sections)]
    table = np.zeros((blocks, 1 + max(map(len, rows))), np.int32)
    for entries, row in zip(table, rows, strict=True):
        entries[0], entries[1 : 1 + len(row)] = len(row) - 1, row
    return table, end


@dataclass(frozen=True)
class TiledGeometry:
    """The tiles that the work of a kernel is cut into.

    Subclasses say what the methods return, and call `_derive` when they are made.
    """

    multiprocessors: int
    n_tiles: int = field(init=False)
    blocks_per_tile: int = field(init=False)  # blocks of threads that share a tile: 1, or more, which form a cluster
    n_blocks: int = field(init=False)  # blocks of threads, or clusters, of a wave
    by_ticket: bool = field(init=False)  # blocks of threads take tickets for tiles, as operands decide how long a tile takes
    n_cut: int = field(init=False)  # tiles, the last ones, whose steps several blocks of threads share: see `schedule_cut`

    def _derive(self, n_tiles: int, blocks_per_tile: int = 1, n_cut: int = 0, **others: Any) -> None:
        """Sets the attributes that follow from the others. `blocks_per_tile` is the number of blocks that share a tile."""
        derived = others | {"n_tiles": n_tiles, "blocks_per_tile": blocks_per_tile, "n_cut": n_cut}
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        object.__setattr__(self, "n_blocks", self.blocks_at_once if n_cut else min(self.blocks_at_once, n_tiles))

    @property
    def alternates(self) -> bool:
        """True if a block of threads works through the steps of its tiles in one direction and in the other by turns."""
        return False

    @property
    def blocks_at_once(self) -> int:
        """Number of blocks of threads, or clusters, that the GPU runs at a time."""
        return max(1, self.multiprocessors // self.blocks_per_tile)

    def costs(self) -> tuple[int, ...]:
        """Counts the steps of each of the tiles of a head."""
        raise NotImplementedError

    def n_heads_at_once(self, costs: tuple[int, ...]) -> int:
        """Returns the number of heads whose tiles are handed out together."""
        raise NotImplementedError

    def scratch(self) -> dict[str, Any]:
        """Describes the arrays and barriers in the shared memory of a block of threads."""
        raise NotImplementedError

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block of threads."""
        return bytes_of(self.scratch())


def table(geometry: TiledGeometry) -> jax.Array | None:
    """Makes the table of tiles of each block of threads, or by ticket the order of tiles; None if there are very many.

    It is a constant of an inner function, as custom_partitioning takes no others.
    """
    if geometry.n_tiles > MAX_SCHEDULED:
        return None
    costs = geometry.costs()
    heads, n_heads_at_once = geometry.n_tiles // len(costs), _n_heads_at_once(geometry, costs)
    if geometry.n_cut:
        numbers = schedule_cut(costs[0], geometry.n_tiles, geometry.n_cut, geometry.n_blocks)[0]
    elif geometry.by_ticket:
        numbers = order(costs, heads, n_heads_at_once)
    else:
        numbers = schedule(costs, heads, n_heads_at_once, geometry.n_blocks)
    return jax.jit(lambda: jnp.asarray(numbers))()


def duration(geometry: TiledGeometry) -> float:
    """Estimates the steps after which the last block of threads ends, if no tiles are cut."""
    costs = geometry.costs()
    heads = geometry.n_tiles // len(costs)
    imbalance = _schedule_and_imbalance(costs, heads, _n_heads_at_once(geometry, costs), geometry.n_blocks)[1]
    return imbalance * heads * (sum(costs) + TILE_COST * len(costs)) / geometry.n_blocks


def _n_heads_at_once(geometry: TiledGeometry, costs: tuple[int, ...]) -> int:
    """Returns the number of heads whose tiles are handed out together, so that all blocks of threads end together."""
    at_once = geometry.n_heads_at_once(costs)
    if geometry.by_ticket or len(set(costs)) == 1:  # the order of equal tiles does not change when blocks end
        return at_once
    return _balanced(costs, geometry.n_tiles // len(costs), at_once, geometry.n_blocks)


def waves(geometry: TiledGeometry) -> int:
    """Returns the number of waves of blocks of threads that leaves each block of the last wave a tile on average."""
    return min(MOST_WAVES, (geometry.n_tiles // geometry.n_blocks).bit_length()) if geometry.by_ticket else 1


def share(wave: Any, waves: int, most: Any) -> Any:
    """Returns the number of tiles that a block of a wave takes at most, int32: 1, 2, 4, and `most` in the last wave."""
    return jnp.where(wave < waves - 1, lax.shift_left(jnp.int32(1), wave), jnp.int32(most)) if waves > 1 else most


_ALIGNMENT, _BARRIER = 1024, 8  # bytes in shared memory


def bytes_of(scratch: Mapping[str, Any]) -> int:
    """Returns the bytes of shared memory that Mosaic gives to these arrays and barriers, beside none for reductions.

    Each array starts at a multiple of 1 KiB. Barriers are behind the arrays.
    """
    total = 0
    for memory in scratch.values():
        if isinstance(memory, plgpu.Barrier | plgpu.ClusterBarrier):
            total += _BARRIER * int(np.prod(memory.num_barriers))  # a number, or numbers along axes
        else:
            total += pl.cdiv(math.prod(memory.shape) * jnp.dtype(memory.dtype).itemsize, _ALIGNMENT) * _ALIGNMENT
    return total


_STAGES = 2  # stages in shared memory for the number and the facts of a tile, and for a ticket


def ticket_memory(words: int, listeners: int, *, in_order: bool = False) -> dict[str, Any]:
    """Describes the shared memory of a block that works by tickets.

    Args:
      words: number of int32 that say what a tile is.
      listeners: number of warpgroups, or warps, that are told.
      in_order: True if tickets are taken in order of arrival, by one warp.
    """
    memory = {} if in_order else {"ticket_full": plgpu.Barrier()}
    return memory | {
        # Tickets are behind the facts: each array takes 1 KiB.
        "tile": plgpu.SMEM((2 * _STAGES, words), jnp.int32),
        "tile_full": plgpu.Barrier(num_barriers=_STAGES),
        "tile_empty": plgpu.Barrier(num_arrivals=listeners, num_barriers=_STAGES),
    }


def ticket_counter():
    """Returns the number of tickets that were taken so far, in global memory for all blocks. It is 0 when the kernel starts."""
    return pl.get_global(plgpu.SemaphoreType.REGULAR((1,)))


def most_on_arrival(n_tiles: int, n_blocks: int) -> int:
    """Returns the number of tiles that a block works through at most in order of arrival: it takes no ticket then, and ends.

    It is four times the average number of tiles of a block, so that some blocks can have many short ones.
    """
    return 4 * pl.cdiv(n_tiles, n_blocks)


@dataclass(frozen=True)
class BlockTiles:
    """The tiles of a kernel, as one block of threads gets them."""

    geometry: TiledGeometry
    block: Any  # number of this block of threads
    table: Any  # of `schedule` or `schedule_cut`, or with tickets of `order`; None to go by number
    memory: dict[str, Any]  # with what `ticket_memory` describes if the block works by tickets
    tile: Callable[..., Any]  # makes a tile from its number and facts
    last_first: bool = False  # tiles that go by number start with the last one
    counter: Any = None  # `ticket_counter()` if all tickets are taken in order of arrival, by the producer's first warp alone
    waves: int = 1  # waves of blocks, with tickets
    rank: Any = None  # number of this block in a cluster of two that works on the same tiles; None without
    barriers: Any = None  # `sync.BARRIERS_OF_PEERS` barriers of `sync.prepare_exchange`, if there is a rank

    def each(self, work, look_up=None) -> None:
        """Does `steps = work(tile(number, ...), steps)` for the tiles of the block, in a warpgroup; `steps` starts with 0.

        By tickets, the producer warpgroup passes `look_up`, a function of the number that loads the facts, int32 scalars, from
        global memory. The other warpgroups are told. Without tickets there are no facts, with two exceptions, passed by name:
        if tiles are cut, `following` is the next entry, and if directions alternate, `ordinal` is the tile's number among those
        of the block.
        """
        if "tile" not in self.memory:
            self._each_scheduled(work)
        elif look_up is not None and self.counter is not None:
            self._each_on_arrival(work, look_up)
        elif look_up is not None:
            self._each_taken(work, look_up)
        else:
            self._each_told(work)

    def _each_scheduled(self, work):
        """Works through the tiles that the table says, or through every `n_blocks`-th one."""
        table, block, blocks = self.table, self.block, self.geometry.n_blocks
        count = lax.div(self.geometry.n_tiles - 1 - block, jnp.int32(blocks)) + 1 if table is None else table[block, 0]

        def number(i):
            return self._number_of(block + i * blocks) if table is None else table[block, i + 1]

        def one(i, carry):
            current, steps = carry
            following = number(i + 1)  # long before it is needed
            facts = {"following": following} if self.geometry.n_cut else {"ordinal": i} if self.geometry.alternates else {}
            return following, work(self.tile(current, **facts), steps)

        lax.fori_loop(0, count, one, (number(0), jnp.int32(0)))

    def _number_of(self, ticket):
        """Returns the number of the tile that a ticket stands for."""
        if self.table is not None:
            return self.table[ticket]
        return self.geometry.n_tiles - 1 - ticket if self.last_first else ticket

    def _each_taken(self, work, look_up):
        """Works by tickets: a block of the first wave starts with the ticket of its number, and takes another when free."""
        if self.geometry.n_tiles <= self.geometry.n_blocks:
            # There is no next ticket, and no counter, which XLA would set to 0 by a copy each time.
            values = [number := self._number_of(self.block), *look_up(number)]
            self._say(jnp.int32(0), values)
            work(self.tile(*values), jnp.int32(0))
            self._say(jnp.int32(1), [jnp.int32(-1)])
            return
        counter, memory, ticket = ticket_counter(), self.memory, self.block

        def take(i):
            place = _STAGES + lax.rem(i, jnp.int32(_STAGES))
            tickets.store_scalars(memory["tile"], place, [tickets.take_ticket(counter)])
            plgpu.barrier_arrive(memory["ticket_full"])
            plgpu.barrier_wait(memory["ticket_full"])
            return memory["tile"][place, 0] + self.geometry.n_blocks

        def take_next(i):
            return self._with_peer(first + i, take)

        def one(carry):
            i, ticket, steps = carry
            number = self._number_of(ticket)
            values = [number, *look_up(number)]
            self._say(i, values)
            steps = work(self.tile(*values), steps)
            # Not before the work: blocks would have tiles waiting while others, which are done, find none.
            following = take_next(i) if self.waves == 1 else self._next(i + 1, lambda: take_next(i), self.geometry.n_tiles)
            return i + 1, following, steps

        first = jnp.int32(0)  # number of the ticket that the loop takes first
        if self.waves > 1:
            first = jnp.where(self.block < self.geometry.n_blocks, 0, 1)
            ticket = lax.cond(first == 0, lambda: self.block, lambda: self._with_peer(jnp.int32(0), take))
        self._while_there_are(one, ticket)

    def _with_peer(self, number, take):
        """Returns `take(number)`; in a cluster the first block takes the ticket, and sends it to the other one."""
        if self.rank is None:
            return take(number)

        def take_and_send():
            tickets.await_received(self.barriers, number)
            ticket = take(number)  # all warps of a warpgroup meet there
            tickets.send_to_peer(self.memory["tile"], _STAGES, ticket, self.barriers, number)
            return ticket

        def receive():
            ticket = tickets.receive_from_peer(self.memory["tile"], _STAGES, self.barriers, number)
            if self.counter is None:  # until all warps have read it
                plgpu.barrier_arrive(self.memory["ticket_full"])
                plgpu.barrier_wait(self.memory["ticket_full"])
            tickets.say_received(self.barriers, number)
            return ticket

        return lax.cond(self.rank == 0, take_and_send, receive)

    def _next(self, i, take, most):
        """Returns the next ticket of a block that has done `i` tiles, or one that ends it if it has had its share."""
        wave = lax.div(self.block, jnp.int32(self.geometry.n_blocks))
        return lax.cond(i < share(wave, self.waves, most), take, lambda: jnp.int32(self.geometry.n_tiles))

    def _each_on_arrival(self, work, look_up):
        """Works by tickets in order of arrival: also the first one is of the counter."""
        most = most_on_arrival(self.geometry.n_tiles, self.geometry.n_blocks)

        def take(i):
            return self._with_peer(i, lambda i: tickets.of_first_lane(tickets.take_ticket(self.counter)))

        def one(carry):
            i, ticket, steps = carry
            number = self._number_of(ticket)
            values = [number, *look_up(number)]
            self._say(i, values)
            steps = work(self.tile(*values), steps)
            # Not before the work: a small ticket, for which others wait, would go to a block that is busy for long.
            return i + 1, self._next(i + 1, lambda: take(i + 1), most), steps

        self._while_there_are(one, take(jnp.int32(0)))

    def _while_there_are(self, one, first):
        """Does `i, ticket, steps = one((i, ticket, steps))` while there is a tile for the ticket, which is `first` at first."""
        count, *_ = self._while(lambda carry: carry[1] < self.geometry.n_tiles, one, (jnp.int32(0), first, jnp.int32(0)))
        self._say(count, [jnp.int32(-1)])

    def _while(self, condition, body, carry):
        """Does `lax.while_loop`, in order of arrival by a loop with a constant end: single warps have no other."""
        if self.counter is None:
            return lax.while_loop(condition, body, carry)

        def step(_, carry):
            return lax.cond(condition(carry), body, lambda carry: carry, carry)

        return lax.fori_loop(0, most_on_arrival(self.geometry.n_tiles, self.geometry.n_blocks), step, carry)

    def _say(self, i, values):
        """Tells the other warpgroups the number and the facts of tile `i` of this block; a number of -1 ends them."""
        stage = lax.rem(i, jnp.int32(_STAGES))
        plgpu.barrier_wait(self.memory["tile_empty"].at[stage])
        tickets.store_scalars(self.memory["tile"], stage, values)
        plgpu.barrier_arrive(self.memory["tile_full"].at[stage])

    def _each_told(self, work):
        """Works through the tiles that the producer warpgroup tells of."""
        memory = self.memory

        def hear(i):
            stage = lax.rem(i, jnp.int32(_STAGES))
            plgpu.barrier_wait(memory["tile_full"].at[stage])
            if self.counter is None:
                values = [memory["tile"][stage, k] for k in range(memory["tile"].shape[1])]
            else:
                values = tickets.load_scalars(memory["tile"], stage)
            plgpu.barrier_arrive(memory["tile_empty"].at[stage])
            return values

        def one(carry):
            i, values, steps = carry
            steps = work(self.tile(*values), steps)
            return i + 1, hear(i + 1), steps

        for stage in range(_STAGES):
            plgpu.barrier_arrive(memory["tile_empty"].at[stage])
        self._while(lambda carry: carry[1][0] >= 0, one, (jnp.int32(0), hear(jnp.int32(0)), jnp.int32(0)))
