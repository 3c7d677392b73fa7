"""Rows too long for a cluster: blocks of the grid share them, through global memory, and never hang.

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

Rows and tiles that the blocks of the grid cannot hold are refused.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu import sync, tickets
from jaxsoftmax._gpu.rows.columns import ColumnMemory, ColumnTile
from jaxsoftmax._gpu.rows.kernel import RowKernel, scratch_of
from jaxsoftmax._gpu.rows.memory import Memory, RowMemory, Steps
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.tile import RowTile, Tile
from jaxsoftmax.online import State

_PATIENCE = 20_000  # nanoseconds, longer than a row takes if all blocks run


def launch(kernel: RowKernel, plan: RowPlan | ColumnPlan) -> list[jax.Array]:
    """Runs a kernel on rows, or on tiles of rows along another axis, that the blocks of the grid share."""
    count, states = plan.count(kernel.problem.outer), []
    if isinstance(plan, ColumnPlan):  # of all slices, and of groups of them
        states = [jax.ShapeDtypeStruct((2, count * (plan.blocks + plan.groups) * plan.width), jnp.float32)]

    def run(*refs):
        operands, results, scratch = kernel.split(refs)
        slots = dict(zip(kernel.whole_arrays, scratch.slots, strict=False))
        copies = [operands[name] for name in slots], list(slots.values()), kernel.fills(list(slots))
        if states:
            slices: Slices = ColumnSlices(plan, count, scratch.exchange, None, scratch.answer, states=results.pop())
        else:
            slices = Slices(plan, count, scratch.exchange, scratch.order, scratch.answer, Devices(kernel.devices))
        slices.work(
            lambda memory: memory.copy_in(*copies),
            lambda memory: memory.fill_around(*copies),
            lambda tile: kernel.body(tile, **kernel.load(tile, operands, slots)),
            lambda tile, made: kernel.store(tile, results, made),
        )

    in_slots = [array.dtype for array in kernel.whole_arrays.values()]
    view, blocks = plan.view(kernel.problem.outer), min(plan.persistent_blocks, count * plan.blocks)
    # The examples of a vmap would share tickets.
    return kernel.call(run, plan, view, scratch_of(plan, in_slots), blocks=blocks, is_sequential=True, states=states)


# A body runs twice on a slice: first for what the slice tells the others, then, when the row is complete, for the results.


@dataclass(frozen=True)
class UnpublishedSlice(RowTile):
    """A slice whose state is not published yet: it notes the state, or sum, of the slice, and the body's results do not matter.

    Two zeros would stand for a state that does not exist yet. No state is that: its sum is 0 only if its maximum is -inf.
    """

    published: list[jax.Array] = field(default_factory=list)

    def merge(self, state: State, scale=None, exchange: int = 0) -> State:
        return State(*self._note(*super().merge(state, scale, exchange)[:2]))

    def sum(self, values: Steps | jax.Array, exchange: int = 0) -> jax.Array:
        return self._note(super().sum(values, exchange), jnp.float32(1))[0]  # 1, because a sum may be 0

    def _note(self, *parts):
        _check_once(self.published)
        self.published.extend(parts)
        return parts

    @property
    def pair(self) -> list[jax.Array]:
        """The pair that the slice publishes; of a body that neither merges nor sums, only that the slice is there."""
        return self.published or [jnp.float32(1)] * 2


@dataclass(frozen=True)
class CompleteSlice(RowTile):
    """A slice of a complete row: `lift` and `sum` give the state and the sum of the row, from those of all slices."""

    states: State = field(kw_only=True)  # of all slices; each thread of the block has some

    def lift(self, scores, scale=None) -> State:
        return super().merge(self.merge_along(self.states, scale), scale, exchange=1)  # 0 was that of the unpublished slice

    def merge(self, state: State, scale=None, exchange: int = 0) -> State:
        return state

    def sum(self, values: Steps | jax.Array, exchange: int = 0) -> jax.Array:
        sums = jnp.sum(jnp.where(self.states.d != 0, self.states.m, 0), 1)
        return jnp.sum(self._exchange(1, sums)[0])


@dataclass(frozen=True)
class UnpublishedColumns(ColumnTile):
    """An `UnpublishedSlice` of a tile: it notes the function that merges, and the state."""

    published: list[Any] = field(default_factory=list)

    def _exchange(self, number: int, function, *parts):
        _check_once(self.published)
        self.published.extend([function, super()._exchange(number, function, *parts)])
        return self.published[1]


@dataclass(frozen=True)
class CompleteColumns(ColumnTile):
    """A `CompleteSlice` of a tile."""

    states: Any = field(kw_only=True)  # of slices and of groups of them, in global memory
    first: Any = field(kw_only=True)  # number of the state of the tile's first group

    def lift(self, scores, scale=None) -> State:
        return State(*self._merge_groups(functools.partial(self._merge_states, scale)))

    def merge(self, state: State, scale=None, exchange: int = 0) -> State:
        return state

    def sum(self, values: Steps | jax.Array, exchange: int = 0) -> jax.Array:
        return self._merge_groups(self._add_sums)[0]

    def _merge_groups(self, function):
        groups = self.memory.plan.groups
        return self.merge_states(function, self.states, self.first, jnp.int32(groups), groups)


def _check_once(published):
    if published:
        raise NotImplementedError("grid: a body may merge or sum once, because what follows would wait for other blocks")


@dataclass(frozen=True)
class Devices:
    """The devices that share rows."""

    axes: tuple[tuple[str, int], ...] = ()  # names of the mesh axes, and the devices along each; empty if rows are whole

    @property
    def count(self) -> int:
        return math.prod(size for _, size in self.axes)

    def rank(self):
        """Returns the number of this device, in a kernel."""
        rank = jnp.int32(0)
        for axis, size in self.axes:
            rank = rank * size + lax.axis_index(axis)
        return rank

    def others(self, ref) -> list[Any]:
        """Lists `ref`, an operand of a kernel, on each other device."""
        rank, refs = self.rank(), []
        for distance in range(1, self.count):
            place: Any = {}
            number = lax.rem(rank + distance, jnp.int32(self.count))
            for axis, size in reversed(self.axes):
                place[axis], number = lax.rem(number, jnp.int32(size)), lax.div(number, jnp.int32(size))
            refs.append(plgpu.remote_ref(ref, place))
        return refs


class Turn(NamedTuple):
    """A block's state between two turns of its loop, scalars of int32 and bool."""

    ticket: Any  # the ticket at hand, published, in stage `1 - stage`; -1 if there is none
    following: Any  # the following ticket, in stage `stage`
    is_published: Any  # True if the following ticket is published
    is_late: Any  # True if the row of the ticket at hand was not complete in time
    last: Any  # the ticket that was put back last, -1 if there is none
    stage: Any  # of the following ticket


_NONE = -1


@dataclass(frozen=True)
class Slices:
    """The slices of rows along the last axis, which blocks of the grid take by tickets."""

    plan: Any
    count: int  # number of rows
    exchange: Any  # see `Tile`
    order: Any  # see `Tile`
    answer: Any  # an int32 in shared memory for an answer that one thread got
    devices: Devices = Devices()  # that share each row

    def work(self, copy_in, fill_around, body, store) -> None:
        """Does tickets until none is left.

        Args:
          copy_in: `copy_in(memory)` starts the copies of all operands to shared memory.
          fill_around: `fill_around(memory)` fills what copies brought along.
          body: `body(tile)` returns the results.
          store: `store(tile, results)` stores them.
        """
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((self._n_counters + self.n_tickets,)))
        worker = _Worker(self, counters, copy_in, fill_around, body, store)
        none, no = jnp.int32(_NONE), jnp.bool_(False)
        first, stage = worker.take(), jnp.int32(0)
        worker.start(first, stage)
        start = Turn(none, first, first >= jnp.int32(self.n_tickets), no, none, stage)
        lax.while_loop(lambda turn: turn[0] < jnp.int32(self.n_tickets), worker.turn, start)

    @property
    def n_tickets(self) -> int:
        return self.count * self.plan.blocks

    def memory(self, ticket, stage) -> Memory:
        """Returns the slice of a ticket."""
        blocks = jnp.int32(self.plan.blocks)
        memory_of: Any = ColumnMemory if isinstance(self.plan, ColumnPlan) else RowMemory
        return memory_of(self.plan, lax.div(ticket, blocks), self.count, False, lax.rem(ticket, blocks), stage)

    # Blocks tell each other the states of a row at once, in pairs of numbers that are 0 before.

    @property
    def _n_counters(self) -> int:
        """Number of counters and pairs: the next ticket, a spare one, and two numbers for each slice."""
        return 2 + 2 * self.count * self._n_slices

    @property
    def _n_slices(self) -> int:
        """Number of slices of a row, on all devices."""
        return self.plan.blocks * self.devices.count

    @property
    def _scope(self) -> str:
        return "gpu" if self.devices.count == 1 else "sys"

    def look(self, counters, ticket) -> tuple[jax.Array, Any]:
        """Waits for the row of a ticket.

        Returns:
          True if the row is complete or there is no ticket yet; and the states of its slices, if it is.
        """
        blocks, slices = self.plan.blocks, self._n_slices
        row = lax.div(ticket, jnp.int32(blocks))
        count = jnp.where(ticket < 0, 0, slices)
        end, index = (row + 1) * blocks, 2 + 2 * row * slices
        complete, *parts = tickets.await_pairs(counters, index, count, slices, self.plan.threads, end, _PATIENCE, self._scope)
        return complete == 1, State(*parts)

    def unpublished(self, memory) -> Any:
        """Returns a slice for the body's first run."""
        return UnpublishedSlice(memory, self.exchange, None, self.order)

    def complete(self, memory, states) -> Tile:
        """Returns a slice for the body's second run."""
        return CompleteSlice(memory, self.exchange, None, self.order, states=states)

    def publish(self, counters, ticket, tile) -> None:
        """Tells all blocks, on all devices, the pair of a slice."""
        blocks, pair, place = jnp.int32(self.plan.blocks), tile.pair, ticket
        if self.devices.count > 1:
            place = lax.div(ticket, blocks) * self._n_slices + self.devices.rank() * blocks + lax.rem(ticket, blocks)
        for ref in [*self.devices.others(counters), counters]:
            tickets.publish_pair(ref, 2 + 2 * place, pair, self._scope)


@dataclass(frozen=True)
class ColumnSlices(Slices):
    """The slices of tiles of rows along another axis; they arrive in groups."""

    states: Any = None  # of slices, and of groups of them, in global memory

    @property
    def _n_counters(self) -> int:
        """Number of counters: the next ticket, groups that arrived of each tile, slices that arrived of each group."""
        return 1 + self.count * (1 + self.plan.groups)

    def look(self, counters, ticket) -> tuple[jax.Array, Any]:
        plan = self.plan
        row = lax.div(ticket, jnp.int32(plan.blocks))

        def look():
            return tickets.await_row(counters, row, plan.groups, plan.blocks, _PATIENCE, self.answer)

        return lax.cond(ticket < 0, lambda: jnp.int32(1), look) == 1, None

    def unpublished(self, memory) -> UnpublishedColumns:
        return UnpublishedColumns(memory, self.exchange, None)

    def complete(self, memory, states) -> CompleteColumns:
        first = self._group_of(memory.row, jnp.int32(0))
        return CompleteColumns(memory, self.exchange, None, states=self.states, first=first)

    def publish(self, counters, ticket, tile) -> None:
        plan, row, rank = self.plan, tile.memory.row, tile.memory.rank
        function, state = tile.published or (None, [])
        tile.store_state(self.states, ticket, state)
        group = lax.div(rank, jnp.int32(plan.group))
        start = group * plan.group
        size = jnp.minimum(plan.group, plan.blocks - start)
        place = 1 + self.count + row * plan.groups + group
        arrived = tickets.add_one_of_block(counters, place, self.answer)

        @pl.when(arrived == size - 1)
        def _():
            if state:
                merged = tile.merge_states(function, self.states, ticket - rank + start, size, plan.group)
                tile.store_state(self.states, self._group_of(row, group), merged)
            tickets.add_one_of_block(counters, 1 + row, self.answer)

    def _group_of(self, row, group):
        """Returns the number of the state of a group: after those of all slices."""
        return self.count * self.plan.blocks + row * self.plan.groups + group


@dataclass(frozen=True)
class _Worker:
    """The loop of a block: see the head of this file.

    Behind the counters and pairs in global memory are the links of tickets that were put back, each to the one before.
    """

    slices: Slices
    counters: Any
    copy_in: Callable[..., Any]  # see `Slices.work`, also for what follows
    fill_around: Callable[..., Any]
    body: Callable[..., Any]
    store: Callable[..., Any]

    def turn(self, turn) -> Turn:
        """Takes a new ticket in place of the one at hand if that is late, else goes on."""
        turn = Turn(*turn)
        return lax.cond(turn.is_late, lambda: self.put_back(turn), lambda: self.go_on(turn))

    def take(self):
        """Takes the next ticket."""
        return tickets.tell(tickets.take_ticket(self.counters, of_block=True), self.slices.answer)

    def start(self, ticket, stage):
        """Starts the copies of a ticket's slice to a stage of shared memory."""
        is_left = ticket < jnp.int32(self.slices.n_tickets)
        pl.when(is_left)(lambda: self.copy_in(self.slices.memory(ticket, stage)))
        sync.end_copies()  # also if no ticket is left, because groups of copies are counted

    def publish(self, ticket, stage):
        """Publishes the state of a ticket's slice."""
        tile = self.slices.unpublished(self.slices.memory(ticket, stage))
        sync.await_copies()
        self.fill_around(tile.memory)  # not needed again where results are computed
        self.body(tile)
        self.slices.publish(self.counters, ticket, tile)

    def finish(self, ticket, stage, states):
        """Computes and stores the results of a ticket's slice."""
        tile = self.slices.complete(self.slices.memory(ticket, stage), states)
        sync.await_copies(but=1)  # those of the following ticket
        self.store(tile, self.body(tile))

    def put_back(self, turn: Turn) -> Turn:
        """Puts back the ticket at hand, if there is another to take.

        Both tickets are published. No copy to the stage of the one at hand is under way: if tickets of its row are left, a new
        one was published since, which waits for all copies.
        """
        ticket, following, _, _, last, stage = turn
        no, yes = jnp.bool_(False), jnp.bool_(True)
        new = self.take()
        self.start(new, 1 - stage)

        def replaced():
            tickets.store_by_first_thread(self.counters, self.slices._n_counters + ticket, last)
            return Turn(following, new, no, no, ticket, 1 - stage)

        is_left = new < jnp.int32(self.slices.n_tickets)
        return lax.cond(is_left, replaced, lambda: Turn(ticket, following, yes, no, last, stage))

    def go_on(self, turn: Turn) -> Turn:
        """Publishes the following ticket, and finishes the one at hand if its row is complete."""
        ticket, following, is_published, _, last, stage = turn
        no, yes, n_tickets = jnp.bool_(False), jnp.bool_(True), jnp.int32(self.slices.n_tickets)
        pl.when(jnp.logical_not(is_published))(lambda: self.publish(following, stage))
        is_complete, states = self.slices.look(self.counters, ticket)
        # A new ticket is asked for before results are stored, because an answer takes a while.
        takes = jnp.logical_and(is_complete, last < 0)
        asked = lax.cond(takes, lambda: tickets.take_ticket(self.counters, of_block=True), lambda: jnp.int32(0))
        pl.when(jnp.logical_and(ticket >= 0, is_complete))(lambda: self.finish(ticket, 1 - stage, states))

        def finished():
            def again():
                return last, yes, tickets.load_int(self.counters, self.slices._n_counters + last)

            def fresh():
                ticket = tickets.tell(asked, self.slices.answer)
                return ticket, ticket >= n_tickets, jnp.int32(_NONE)

            ticket, is_published, rest = lax.cond(last >= 0, again, fresh)
            self.start(ticket, 1 - stage)
            return Turn(following, ticket, is_published, no, rest, 1 - stage)

        return lax.cond(is_complete, finished, lambda: Turn(ticket, following, yes, yes, last, stage))
