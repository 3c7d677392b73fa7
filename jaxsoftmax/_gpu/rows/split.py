"""Rows too long for a cluster: any blocks of the grid share them, through global memory, and never hang.

A row is cut into slices, a ticket each, in the order of rows. A block

1. takes a ticket, copies the slice to shared memory, and publishes its state;
2. takes the next ticket, and starts to copy that slice to a second stage of shared memory;
3. when all slices of the first ticket's row have published their states, merges them, all blocks in the same order, and
   computes its part of the results from what it holds; meanwhile the second slice arrives;
4. publishes the state of the second slice, and goes on with 2.

Rows of many slices are complete earlier, and waited for less, where 4 comes before 3 (see `Rows.publishes_first`).

Each element is read once, but of slices that a block helped with. Nothing says that all blocks run at a time: others may use
the GPU, a second one of these kernels too. So a block never waits while it holds a ticket that it has not published: where the
row of the first one is not complete, it publishes the second one, and only then waits. (It asks for a third one before 3, as
the answer takes a while, and publishes that before it waits again.) And it waits only for tickets that are taken: their blocks
run, and publish without waiting. Where tickets of its row are left, it helps after a while: it takes the next one, and
publishes its state without holding the slice, which it copies later, when a stage is free. Both compute the state alike, so
the bits of a row do not depend on who held what. One block alone would do all the work so.

Rows along another axis are shared in tiles of neighbours (see `columns`), which may have hundreds of slices. Whoever publishes
the last one of a group of slices merges their states, in the order of slices, and publishes that of the group: it waits for
nothing, as they are there. So each block reads the states of groups alone.

A row of which the blocks of the grid cannot hold all slices is read twice, by two kernels: the first one leaves states. Tiles
of longer rows are refused.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.columns import ColumnLayout, ColumnMemory, Columns
from jaxsoftmax._gpu.rows.layout import RowLayout
from jaxsoftmax._gpu.rows.memory import Memory
from jaxsoftmax._gpu.rows.tile import Tile
from jaxsoftmax.online import State

_PARTS = 2  # float32 numbers of a state
_PATIENCE = 20_000  # nanoseconds, longer than a row takes where all blocks run


def memory(layout: RowLayout | ColumnLayout) -> dict[str, Any]:
    """What a block needs of shared memory, beside its slices: an answer of one thread, and the tickets that it helped with."""
    return {"told": plgpu.SMEM((1,), jnp.int32), "helped": plgpu.SMEM((_room(layout),), jnp.int32)}


def states(layout: RowLayout | ColumnLayout, count: int) -> jax.ShapeDtypeStruct:
    """The states of all slices, in global memory, and those of groups of them where rows lie along another axis."""
    each = layout.blocks if isinstance(layout, RowLayout) else (layout.blocks + layout.groups) * layout.width
    return jax.ShapeDtypeStruct((_PARTS, count * each), jnp.float32)


def _room(layout):
    """For tickets that a block has helped with: those of a row, and one of the next, which it could not know to be of it."""
    return layout.blocks + 1


@dataclass(frozen=True)
class First(Tile):
    """A slice whose state is not published yet: what a body computes of the row with it does not matter."""

    found: list[jax.Array] = field(default_factory=list)

    def merge(self, state: State, scale=None) -> State:
        return State(*self._publish(*super().merge(state, scale)[:2]))

    def sum(self, values) -> jax.Array:
        return self._publish(super().sum(values))[0]

    def _publish(self, *parts):
        _once(self.found)
        self.found.extend(parts)
        return parts


@dataclass(frozen=True)
class Second(Tile):
    """A slice of a row that is complete: `parts` gives those of the states of all slices."""

    parts: Callable[[int, float], jax.Array] = field(kw_only=True)

    def lift(self, scores, scale=None) -> State:
        return self.merge_along(State(self.parts(0, -jnp.inf), self.parts(1, 0)), scale)

    def merge(self, state: State, scale=None) -> State:
        return state

    def sum(self, values) -> jax.Array:
        return jnp.sum(self.parts(0, 0))

    def store(self, results, backwards=True) -> None:
        """Backwards: the cache holds what a block has read last, where rows are read twice. Else no order matters."""
        super().store(results, backwards)


def _once(found):
    if found:
        raise NotImplementedError("split: a body may merge or sum once, as what follows would wait for other blocks")


@dataclass(frozen=True)
class FirstOfColumns(Columns):
    """`First` of rows along another axis: it finds a function that merges states, and the state."""

    found: list[Any] = field(default_factory=list)

    def _together(self, function, *parts):
        _once(self.found)
        self.found.extend([function, super()._together(function, *parts)])
        return self.found[1]


@dataclass(frozen=True)
class SecondOfColumns(Columns):
    """`Second` of rows along another axis: `states` of all groups, from the `first` on."""

    states: Any = field(kw_only=True)
    first: Any = field(kw_only=True)

    def lift(self, scores, scale=None) -> State:
        return State(*self._of_groups(functools.partial(self._merged, scale)))

    def merge(self, state: State, scale=None) -> State:
        return state

    def sum(self, values) -> jax.Array:
        return self._of_groups(self._added)[0]

    def _of_groups(self, function):
        groups = self.memory.layout.groups
        return self.of_states(function, self.states, self.first, jnp.int32(groups), groups)


@dataclass(frozen=True)
class Rows:
    """The rows of arrays, as the blocks of the grid share them.

    Attributes:
      layout: of a slice, and how many share a row.
      count: of rows.
      states: what `states` describes, in global memory.
      exchange, order: see `Tile`.
      shared: what `memory` describes.
      publishes_first: whether a block publishes a slice before it looks at the row of the one before. Rows are complete
        earlier then. Else it stores results while the slice arrives.
    """

    layout: Any
    count: int
    states: Any
    exchange: Any
    order: Any
    shared: dict[str, Any]
    publishes_first: bool

    def work(self, copy_in, fill_around, body, store) -> None:
        """Does tickets until none is left, with `copy_in(memory)` and `fill_around(memory)` of `Memory` for all operands.

        `body(tile, is_held)` gives results, and `store(tile, results)` stores them.
        """
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((1 + self.count * (1 + self._groups),)))
        blocks = self.layout.blocks
        arrivals = self._groups or blocks
        tickets, room = jnp.int32(self.count * blocks), jnp.int32(_room(self.layout))
        told = self.shared["told"]

        def publish(ticket, is_held, stage):
            tile = self._first(self._memory(ticket, stage, is_held))
            if is_held:
                ptx.await_copies()
                fill_around(tile.memory)  # not needed again where results are computed
            body(tile, is_held)
            self._announce(counters, ticket, tile)

        def finish(ticket, stage):
            tile = self._second(self._memory(ticket, stage))
            ptx.await_copies(but=1)  # those of the following ticket
            store(tile, body(tile, True))

        def taken():
            return ptx.tell(ptx.take_ticket(counters, of_block=True), told)

        def help_out(last):
            """Publishes one more ticket, which waits in line until it is finished."""
            ticket = taken()

            @pl.when(ticket < tickets)
            def _():
                publish(ticket, False, 0)
                ptx.store_scalar_of_block(self.shared["helped"], lax.rem(last, room), ticket)

            return last + (ticket < tickets).astype(jnp.int32)

        def start(ticket, stage):
            pl.when(ticket < tickets)(lambda: copy_in(self._memory(ticket, stage)))
            ptx.end_copies()  # where no ticket is left, too: `finish` counts

        def one(carry):
            """Finishes the ticket at hand if its row is complete, publishes the following one, and copies a third."""
            ticket, following, is_published, first, last, stage = carry
            row = lax.div(ticket, jnp.int32(blocks))

            def publish_following(is_published):
                pl.when(is_published == 0)(lambda: publish(following, True, stage))
                return yes

            def look():
                return ptx.is_complete(counters, row, arrivals, blocks, is_published, _PATIENCE, told)

            if self.publishes_first:
                is_published = publish_following(is_published)
            is_complete = lax.cond(ticket < 0, lambda: yes, look)
            takes = jnp.logical_and(is_complete == 1, first == last)  # before it stores results, as an answer takes a while
            taken_ahead = lax.cond(takes, lambda: ptx.take_ticket(counters, of_block=True), lambda: no)
            pl.when(jnp.logical_and(ticket >= 0, is_complete == 1))(lambda: finish(ticket, 1 - stage))
            if not self.publishes_first:
                publish_following(is_published)

            def renewed():
                """What the block has helped with comes first."""

                def helped():
                    return self.shared["helped"][lax.rem(first, room)], yes, first + 1

                def new():
                    ticket = ptx.tell(taken_ahead, told)
                    return ticket, (ticket >= tickets).astype(jnp.int32), first

                ticket, is_published, rest = lax.cond(first < last, helped, new)
                start(ticket, 1 - stage)
                return following, ticket, is_published, rest, last, 1 - stage

            def waited():
                return ticket, following, yes, first, lax.cond(is_published == 1, help_out, lambda last: last, last), stage

            return lax.cond(is_complete == 1, renewed, waited)

        no, none, yes = jnp.int32(0), jnp.int32(-1), jnp.int32(1)
        first = taken()
        start(first, no)
        is_left_out = (first >= tickets).astype(jnp.int32)
        lax.while_loop(lambda carry: carry[0] < tickets, one, (none, first, is_left_out, no, no, no))

    def _memory(self, ticket, stage, is_held=True) -> Memory:
        return _slice(self.layout if is_held else unheld(self.layout), self.count, ticket, stage)

    # How states are merged: of a row at once, with no groups of slices, or of those first.

    @property
    def _groups(self):
        return 0

    def _first(self, memory) -> Any:
        return First(memory, self.exchange, None, self.order)

    def _second(self, memory) -> Any:
        return Second(memory, self.exchange, None, self.order, parts=_of_row(self.states, memory))

    def _announce(self, counters, ticket, tile) -> None:
        ptx.publish(self.states, counters, ticket, tile.memory.row, tile.found)


@dataclass(frozen=True)
class Tiles(Rows):
    """`Rows` along another axis: a tile of neighbours takes the place of a row, and groups of slices arrive."""

    @property
    def _groups(self):
        return self.layout.groups

    def _first(self, memory) -> FirstOfColumns:
        return FirstOfColumns(memory, self.exchange, None, None)

    def _second(self, memory) -> SecondOfColumns:
        first = self._group_of(memory.row, jnp.int32(0))
        return SecondOfColumns(memory, self.exchange, None, None, states=self.states, first=first)

    def _group_of(self, row, group):
        """The place of the state of a group: after those of all slices."""
        return self.count * self.layout.blocks + row * self.layout.groups + group

    def _announce(self, counters, ticket, tile) -> None:
        layout, row, rank, told = self.layout, tile.memory.row, tile.memory.rank, self.shared["told"]
        function, found = tile.found or (None, [])
        tile.store_state(self.states, ticket, found)
        group = lax.div(rank, jnp.int32(layout.group))
        start = group * layout.group
        size = jnp.minimum(layout.group, layout.blocks - start)
        place = 1 + self.count + row * layout.groups + group
        arrived = ptx.add_one_of_block(counters, place, told)

        @pl.when(arrived == size - 1)
        def _():
            if found:
                merged = tile.of_states(function, self.states, ticket - rank + start, size, layout.group)
                tile.store_state(self.states, self._group_of(row, group), merged)
            ptx.add_one_of_block(counters, 1 + row, told)


def unheld(layout: Any) -> Any:
    """That of slices that are held nowhere, but read in order each time, as those are that blocks help with."""
    config = replace(layout.config, parked=False, unroll=1, grid=max(1, layout.config.grid))
    return RowLayout(layout.cols, config) if isinstance(layout, RowLayout) else ColumnLayout(layout.cols, layout.inner, config)


def _slice(layout, count, number, stage=0) -> Memory:
    blocks, kind = jnp.int32(layout.blocks), Memory if isinstance(layout, RowLayout) else ColumnMemory
    return kind(layout, lax.div(number, blocks), count, False, lax.rem(number, blocks), stage)


def _of_row(states, memory) -> Callable[[int, float], jax.Array]:
    """The `parts` of a `Second`."""
    first, count = memory.row * jnp.int32(memory.layout.blocks), memory.layout.blocks
    return lambda k, fill: ptx.load_line(states, k, first, count, fill)


def first_pass(layout, count, states, exchange, order, body) -> None:
    """Of rows that the grid cannot hold, each block stores the state of a slice; `body(tile)`."""
    number = lax.axis_index("block")
    tile = First(_slice(layout, count, number), exchange, None, order)
    body(tile)
    for k, part in enumerate(tile.found):
        ptx.store_by_first_thread(states, k * states.shape[1] + number, part)


def second_pass(layout, count, states, exchange, order, body, store) -> None:
    """Each block computes the results of a slice, from the last one on, as the cache still holds what was read last."""
    memory = _slice(layout, count, jnp.int32(states.shape[1] - 1) - lax.axis_index("block"))
    tile = Second(memory, exchange, None, order, parts=_of_row(states, memory))
    store(tile, body(tile))
