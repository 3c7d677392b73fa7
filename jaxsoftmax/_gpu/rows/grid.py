"""Rows too long for a cluster: any blocks of the grid share them, through global memory, and never hang.

A row is cut into slices, a ticket each, in the order of rows. A block

1. takes a ticket, copies the slice to shared memory, and publishes its state;
2. takes the next ticket, and copies that slice to a second stage of shared memory;
3. publishes the state of the second slice, so that its row is complete early;
4. when all slices of the first ticket's row have published their states, merges them, all blocks in the same order, computes
   its part of the results from what it holds, and goes on with 2.

Each element is read once then. Nothing says that all blocks run at a time: others may use the GPU, a second one of these
kernels too. So a block never waits while it holds a ticket that it has not published. (It asks for a third one before it
computes results, as the answer takes a while, and publishes that before it waits again.) And it waits only for tickets that
are taken: their blocks run, and publish without waiting. Where tickets of the row are left after a while, it puts back the
ticket at hand, whose state is published, and takes a new one in its place. When it has finished a ticket it copies again what
it has put back, the last one first, before it takes new ones. So one block alone would do all the work. States do not depend
on who computes them, nor when, and so the bits of a row do not.

The states of a row's slices are pairs of numbers in memory that was 0, each stored and loaded at once: whoever sees a pair has
it, with no counter and no fence between. Each thread of a block looks for some of them, and loads again what was not there.

Rows along another axis are shared in tiles of neighbours (see `columns`), which may have hundreds of slices. Whoever publishes
the last one of a group of slices merges their states, in the order of slices, and publishes that of the group: it waits for
nothing, as they are there. So each block reads the states of groups alone.

Several devices may share rows: each has a part of every row, and tickets of its own for the slices of its parts. A block
stores the state of its slice on every device, and waits for the states of all slices of a row, which arrive on its own. This
cannot hang either. Take the first row that is not complete. On a device where all its tickets are taken, their blocks publish
without waiting. On one where tickets of it are left, blocks wait for no later row, as tickets are taken in order, and take
those that are left. XLA starts the kernel on no device before all devices have come to it: the memory that others store to is
there then, and 0.

A row that fills more than two thirds of what the blocks can hold is read twice, by two kernels: the first one leaves states.
Tiles that they cannot hold are refused.
"""

import functools
import itertools
import math
from collections.abc import Iterator
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


def states(layout: RowLayout | ColumnLayout, count: int) -> jax.ShapeDtypeStruct:
    """The states of all slices, in global memory, and those of groups of them where rows lie along another axis."""
    if isinstance(layout, RowLayout):
        return jax.ShapeDtypeStruct((_PARTS * count * layout.blocks,), jnp.int32)
    return jax.ShapeDtypeStruct((_PARTS, count * (layout.blocks + layout.groups) * layout.width), jnp.float32)


@dataclass(frozen=True)
class First(Tile):
    """A slice whose state is not published yet: what a body computes of the row with it does not matter.

    Two zeros would stand for a state that is not there yet. No state is that: its sum is 0 only where its maximum is -inf.
    """

    found: list[jax.Array] = field(default_factory=list)

    def merge(self, state: State, scale=None) -> State:
        return State(*self._publish(*super().merge(state, scale)[:2]))

    def sum(self, values) -> jax.Array:
        return self._publish(super().sum(values), jnp.float32(1))[0]  # 1, as a sum may be 0

    def _publish(self, *parts):
        _once(self.found)
        self.found.extend(parts)
        return parts


@dataclass(frozen=True)
class Second(Tile):
    """A slice of a row that is complete: `states` are those of all slices, of which each thread of the block has some."""

    states: State = field(kw_only=True)
    rounds: Iterator[int] = field(default_factory=lambda: itertools.count(1))  # after that of a `First`

    def lift(self, scores, scale=None) -> State:
        return super().merge(self.merge_along(self.states, scale), scale)

    def merge(self, state: State, scale=None) -> State:
        return state

    def sum(self, values) -> jax.Array:
        sums = jnp.sum(jnp.where(self.states.d != 0, self.states.m, 0), 1)
        return jnp.sum(self._exchanged(sums)[0])

    def store(self, results, backwards=True) -> None:
        """Backwards: the cache holds what a block has read last, where rows are read twice. Else no order matters."""
        super().store(results, backwards)


def _found(tile: First) -> list[jax.Array]:
    """The pair that a slice publishes: of a body that merges and sums nothing, that it is there."""
    return tile.found or [jnp.float32(1)] * 2


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
class Devices:
    """The devices that share rows: those along axes of the mesh.

    Attributes:
      axes: the names of the axes, and how many devices there are along each; none where rows are whole.
    """

    axes: tuple[tuple[str, int], ...] = ()

    @property
    def count(self) -> int:
        return math.prod(size for _, size in self.axes)

    def rank(self):
        """The number of this device, in a kernel."""
        rank = jnp.int32(0)
        for axis, size in self.axes:
            rank = rank * size + lax.axis_index(axis)
        return rank

    def others(self, ref) -> list[Any]:
        """`ref`, an operand of a kernel, of each other device."""
        rank, found = self.rank(), []
        for distance in range(1, self.count):
            place: Any = {}
            number = lax.rem(rank + distance, jnp.int32(self.count))
            for axis, size in reversed(self.axes):
                place[axis], number = lax.rem(number, jnp.int32(size)), lax.div(number, jnp.int32(size))
            found.append(plgpu.remote_ref(ref, place))
        return found


@dataclass(frozen=True)
class Rows:
    """The rows of arrays, as the blocks of the grid share them.

    Attributes:
      layout: of a slice, and how many share a row.
      count: of rows.
      states: of `Tiles`, what `states` describes, in global memory; else None.
      exchange, order: see `Tile`.
      told: an int32 in shared memory, an answer that one thread got.
      devices: that share each row.
    """

    layout: Any
    count: int
    states: Any
    exchange: Any
    order: Any
    told: Any
    devices: Devices = Devices()

    def work(self, copy_in, fill_around, body, store) -> None:
        """Does tickets until none is left, with `copy_in(memory)` and `fill_around(memory)` of `Memory` for all operands.

        `body(tile)` gives results, and `store(tile, results)` stores them.
        """
        tickets = jnp.int32(self.count * self.layout.blocks)
        links = self._counters  # of each ticket that is put back, to the one that was before
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((links + self.count * self.layout.blocks,)))

        def publish(ticket, stage):
            tile = self._first(self._memory(ticket, stage))
            ptx.await_copies()
            fill_around(tile.memory)  # not needed again where results are computed
            body(tile)
            self._announce(counters, ticket, tile)

        def finish(ticket, stage, states):
            tile = self._second(self._memory(ticket, stage), states)
            ptx.await_copies(but=1)  # those of the following ticket
            store(tile, body(tile))

        def taken():
            return ptx.tell(ptx.take_ticket(counters, of_block=True), self.told)

        def start(ticket, stage):
            pl.when(ticket < tickets)(lambda: copy_in(self._memory(ticket, stage)))
            ptx.end_copies()  # where no ticket is left, too, as they are counted

        def put_back(ticket, following, last, stage):
            """Puts back the ticket at hand, if there is another to take.

            Both are published. No copy to its stage is under way: where tickets of its row are left, a new one was published
            since, which waits for all copies.
            """
            new = taken()
            start(new, 1 - stage)

            def replaced():
                ptx.store_by_first_thread(counters, links + ticket, last)
                return following, new, no, no, ticket, 1 - stage

            return lax.cond(new < tickets, replaced, lambda: (ticket, following, yes, no, last, stage))

        def go_on(ticket, following, is_published, last, stage):
            """Publishes the following ticket, and finishes the one at hand if its row is complete."""
            pl.when(jnp.logical_not(is_published))(lambda: publish(following, stage))
            is_complete, states = self._look(counters, ticket)
            # A new ticket is taken before results are stored, as an answer takes a while.
            takes = jnp.logical_and(is_complete, last < 0)
            taken_ahead = lax.cond(takes, lambda: ptx.take_ticket(counters, of_block=True), lambda: jnp.int32(0))
            pl.when(jnp.logical_and(ticket >= 0, is_complete))(lambda: finish(ticket, 1 - stage, states))

            def finished():
                def again():
                    return last, yes, ptx.load_int(counters, links + last)

                def fresh():
                    ticket = ptx.tell(taken_ahead, self.told)
                    return ticket, ticket >= tickets, none

                ticket, is_published, rest = lax.cond(last >= 0, again, fresh)
                start(ticket, 1 - stage)
                return following, ticket, is_published, no, rest, 1 - stage

            return lax.cond(is_complete, finished, lambda: (ticket, following, yes, yes, last, stage))

        def one(carry):
            # The ticket at hand, published, in stage `1 - stage`, or -1; the following one, in `stage`, and whether that is
            # published; whether the row of the one at hand is late; the ticket that was put back last, or -1.
            ticket, following, is_published, is_late, last, stage = carry
            late = functools.partial(put_back, ticket, following, last, stage)
            return lax.cond(is_late, late, lambda: go_on(ticket, following, is_published, last, stage))

        none, no, yes = jnp.int32(-1), jnp.bool_(False), jnp.bool_(True)
        first, stage = taken(), jnp.int32(0)
        start(first, stage)
        lax.while_loop(lambda carry: carry[0] < tickets, one, (none, first, first >= tickets, no, none, stage))

    def _memory(self, ticket, stage) -> Memory:
        return _slice(self.layout, self.count, ticket, stage)

    # How blocks tell each other the states: of a row at once, in pairs that are 0 before, or of groups of slices first.

    @property
    def _counters(self):
        return 2 + 2 * self.count * self._slices

    @property
    def _slices(self):
        """Of a row, on all devices."""
        return self.layout.blocks * self.devices.count

    @property
    def _scope(self):
        return "gpu" if self.devices.count == 1 else "sys"

    def _look(self, counters, ticket) -> tuple[jax.Array, Any]:
        """Waits for the row of a ticket. Whether it is complete, or there is no ticket yet, and its states if it is."""
        blocks, slices = self.layout.blocks, self._slices
        row = lax.div(ticket, jnp.int32(blocks))
        count = jnp.where(ticket < 0, 0, slices)
        end, index = (row + 1) * blocks, 2 + 2 * row * slices
        complete, *found = ptx.await_pairs(counters, index, count, slices, self.layout.threads, end, _PATIENCE, self._scope)
        return complete == 1, State(*found)

    def _first(self, memory) -> Any:
        return First(memory, self.exchange, None, self.order)

    def _second(self, memory, states) -> Any:
        return Second(memory, self.exchange, None, self.order, states=states)

    def _announce(self, counters, ticket, tile) -> None:
        blocks, found, place = jnp.int32(self.layout.blocks), _found(tile), ticket
        if self.devices.count > 1:
            place = lax.div(ticket, blocks) * self._slices + self.devices.rank() * blocks + lax.rem(ticket, blocks)
        for there in [*self.devices.others(counters), counters]:
            ptx.publish_pair(there, 2 + 2 * place, found, self._scope)


@dataclass(frozen=True)
class Tiles(Rows):
    """`Rows` along another axis: a tile of neighbours takes the place of a row, and groups of slices arrive."""

    @property
    def _counters(self):
        return 1 + self.count * (1 + self.layout.groups)

    def _look(self, counters, ticket) -> tuple[jax.Array, Any]:
        layout = self.layout
        row = lax.div(ticket, jnp.int32(layout.blocks))

        def look():
            return ptx.await_row(counters, row, layout.groups, layout.blocks, _PATIENCE, self.told)

        return lax.cond(ticket < 0, lambda: jnp.int32(1), look) == 1, None

    def _first(self, memory) -> FirstOfColumns:
        return FirstOfColumns(memory, self.exchange, None, None)

    def _second(self, memory, states) -> SecondOfColumns:
        first = self._group_of(memory.row, jnp.int32(0))
        return SecondOfColumns(memory, self.exchange, None, None, states=self.states, first=first)

    def _group_of(self, row, group):
        """The place of the state of a group: after those of all slices."""
        return self.count * self.layout.blocks + row * self.layout.groups + group

    def _announce(self, counters, ticket, tile) -> None:
        layout, row, rank = self.layout, tile.memory.row, tile.memory.rank
        function, found = tile.found or (None, [])
        tile.store_state(self.states, ticket, found)
        group = lax.div(rank, jnp.int32(layout.group))
        start = group * layout.group
        size = jnp.minimum(layout.group, layout.blocks - start)
        place = 1 + self.count + row * layout.groups + group
        arrived = ptx.add_one_of_block(counters, place, self.told)

        @pl.when(arrived == size - 1)
        def _():
            if found:
                merged = tile.of_states(function, self.states, ticket - rank + start, size, layout.group)
                tile.store_state(self.states, self._group_of(row, group), merged)
            ptx.add_one_of_block(counters, 1 + row, self.told)


def unheld(layout: RowLayout) -> RowLayout:
    """That of slices that are held nowhere. With `grid` they are read once for the maximum, and then for the sum.

    So no bit of the sum depends on where in a line a row starts, which decides what a thread reads first.
    """
    return RowLayout(layout.cols, replace(layout.config, unroll=1, grid=1))


def _slice(layout, count, number, stage=0) -> Memory:
    blocks, kind = jnp.int32(layout.blocks), Memory if isinstance(layout, RowLayout) else ColumnMemory
    return kind(layout, lax.div(number, blocks), count, False, lax.rem(number, blocks), stage)


def first_pass(layout, count, states, exchange, order, body) -> None:
    """Of rows that the grid cannot hold, each block stores the state of a slice; `body(tile)`."""
    number = lax.axis_index("block")
    tile = First(_slice(layout, count, number), exchange, None, order)
    body(tile)
    ptx.publish_pair(states, 2 * number, _found(tile))


def second_pass(layout, count, states, exchange, order, body, store) -> None:
    """Each block computes the results of a slice, from the last one on, as the cache still holds what was read last."""
    memory = _slice(layout, count, jnp.int32(count * layout.blocks - 1) - lax.axis_index("block"))
    index, blocks = 2 * memory.row * jnp.int32(layout.blocks), layout.blocks
    _, *parts = ptx.await_pairs(states, index, blocks, blocks, layout.threads, 0, 0)  # they are all there
    tile = Second(memory, exchange, None, order, states=State(*parts))
    store(tile, body(tile))
