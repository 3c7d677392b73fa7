"""Rows too long for a cluster: any blocks of the grid share them, through global memory, and never hang.

A row is cut into slices, a ticket each, in the order of rows. A block

1. takes a ticket, copies the slice to shared memory, and publishes its state;
2. takes the next ticket, and starts to copy that slice to a second place;
3. when all slices of the first ticket's row have published their states, merges them, all blocks in the same order, and
   computes its part of the results from what it holds; meanwhile the second slice arrives, and its state is published.

Each element is read once, but of slices that a block helped with. Nothing says that all blocks run at a time: others may use
the GPU, a second one of these kernels too. So a block never waits while it holds a ticket that it has not published: where the
row of the first one is not complete, it publishes the second one, and only then waits. And it waits only for tickets that are
taken: their blocks run, and publish without waiting. Where tickets of its row are left, it helps after a while: it takes the
next one, and publishes its state without holding the slice, which it reads again when that row is complete. Both compute the
state alike, so the bits of a row do not depend on who held what. One block alone would do all the work so.

A row of which the blocks of the grid cannot hold all slices is read twice, by two kernels: the first one leaves states.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.layout import RowLayout
from jaxsoftmax._gpu.rows.memory import Memory
from jaxsoftmax._gpu.rows.tile import Tile
from jaxsoftmax.online import State

_PARTS = 2  # float32 numbers of a state
_PATIENCE = 20_000  # nanoseconds, longer than a row takes where all blocks run


def memory(layout: RowLayout) -> dict[str, Any]:
    """What a block needs of shared memory, beside its slices: an answer of one thread, and the tickets that it helped with."""
    return {"told": plgpu.SMEM((1,), jnp.int32), "helped": plgpu.SMEM((_room(layout),), jnp.int32)}


def states(layout: RowLayout, count: int) -> jax.ShapeDtypeStruct:
    """The states of all slices, in global memory."""
    return jax.ShapeDtypeStruct((_PARTS, count * layout.blocks), jnp.float32)


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
        if self.found:
            raise NotImplementedError("split: a body may merge or sum once, as what follows would wait for other blocks")
        self.found.extend(parts)
        return parts


@dataclass(frozen=True)
class Second(Tile):
    """A slice of a row that is complete: `parts` gives those of the states of all slices."""

    parts: Callable[[int, float], jax.Array] = field(kw_only=True)

    def lift(self, scores, scale=None) -> State:
        return online.merge_along(State(self.parts(0, -jnp.inf), self.parts(1, 0)), 0, scale=scale)

    def merge(self, state: State, scale=None) -> State:
        return state

    def sum(self, values) -> jax.Array:
        return jnp.sum(self.parts(0, 0))


@dataclass(frozen=True)
class Rows:
    """The rows of arrays, as the blocks of the grid share them.

    Attributes:
      layout: of a slice, and how many share a row.
      count: of rows.
      states: what `states` describes, in global memory.
      exchange, order: see `Tile`.
      shared: what `memory` describes.
    """

    layout: RowLayout
    count: int
    states: Any
    exchange: Any
    order: Any
    shared: dict[str, Any]

    def work(self, copy_in, body, store) -> None:
        """Does tickets until none is left: `copy_in(memory)`, `body(tile, is_held)` and `store(tile, results)`."""
        counters = pl.get_global(plgpu.SemaphoreType.REGULAR((1 + self.count,)))
        tickets, room = jnp.int32(self.count * self.layout.blocks), jnp.int32(_room(self.layout))

        def publish(ticket, is_held, slot):
            tile = First(self._memory(ticket, is_held, slot), self.exchange, None, self.order)
            if is_held:
                ptx.await_copies()
            body(tile, is_held)
            ptx.publish(self.states, counters, ticket, tile.memory.row, tile.found)

        def finish(ticket, is_held, slot):
            memory = self._memory(ticket, is_held, slot)
            tile = Second(memory, self.exchange, None, self.order, parts=_of_row(self.states, memory))
            store(tile, body(tile, is_held))

        def help_out(last):
            """Publishes one more ticket, which waits in line until it is finished."""
            ticket = ptx.take_ticket_of_block(counters, self.shared["told"])

            @pl.when(ticket < tickets)
            def _():
                publish(ticket, False, 0)
                ptx.store_scalar_of_block(self.shared["helped"], lax.rem(last, room), ticket)

            return last + (ticket < tickets).astype(jnp.int32)

        def renewed(carry):
            """The ticket after the one at hand: one that the block has helped with, else a new one, which it starts to copy."""
            *own, _, _, _, first, last, slot = carry

            def helped():
                return self.shared["helped"][lax.rem(first, room)], jnp.int32(0), jnp.int32(1), first + 1

            def taken():
                ticket = ptx.take_ticket_of_block(counters, self.shared["told"])
                pl.when(ticket < tickets)(lambda: copy_in(self._memory(ticket, True, slot)))
                return ticket, jnp.int32(1), (ticket >= tickets).astype(jnp.int32), first

            ticket, is_held, is_published, first = lax.cond(first < last, helped, taken)
            return *own, ticket, is_held, is_published, first, last, slot

        def one(carry):
            """Looks whether the row of the ticket at hand is complete. While its results are stored the next slice arrives."""
            is_new, *carry = carry
            carry = lax.cond(is_new == 1, renewed, lambda carry: carry, tuple(carry))
            ticket, is_held, following, following_is_held, is_published, first, last, slot = carry
            row = lax.div(ticket, jnp.int32(self.layout.blocks))

            def look():
                return ptx.is_complete(counters, row, self.layout.blocks, is_published, _PATIENCE, self.shared["told"])

            is_complete = lax.cond(ticket < 0, lambda: jnp.int32(1), look)
            to_finish = jnp.logical_and(ticket >= 0, is_complete == 1)
            pl.when(jnp.logical_and(to_finish, is_held == 1))(lambda: finish(ticket, True, 1 - slot))
            pl.when(jnp.logical_and(to_finish, is_held == 0))(lambda: finish(ticket, False, 0))
            pl.when(is_published == 0)(lambda: publish(following, True, slot))
            waits = jnp.logical_and(is_complete == 0, is_published == 1)
            last = lax.cond(waits, help_out, lambda last: last, last)

            def passed():
                return following, following_is_held, 1 - slot

            ticket, is_held, slot = lax.cond(is_complete == 1, passed, lambda: (ticket, is_held, slot))
            return is_complete, ticket, is_held, following, following_is_held, jnp.int32(1), first, last, slot

        no, none, yes = jnp.int32(0), jnp.int32(-1), jnp.int32(1)
        lax.while_loop(lambda carry: carry[1] < tickets, one, (yes, none, no, none, no, yes, no, no, no))

    def _memory(self, ticket, is_held, slot) -> Memory:
        return _slice(self.layout if is_held else unheld(self.layout), self.count, ticket, slot)


def unheld(layout: RowLayout) -> RowLayout:
    """That of slices that are held nowhere, but read in order each time, as those are that blocks help with."""
    return RowLayout(layout.cols, replace(layout.config, parked=False, unroll=1, grid=max(1, layout.config.grid)))


def _slice(layout, count, number, slot=0) -> Memory:
    blocks = jnp.int32(layout.blocks)
    return Memory(layout, lax.div(number, blocks), count, False, lax.rem(number, blocks), slot)


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
    """Each block computes the results of a slice, from the last one on: the cache still holds what was read last."""
    memory = _slice(layout, count, jnp.int32(states.shape[1] - 1) - lax.axis_index("block"))
    tile = Second(memory, exchange, None, order, parts=_of_row(states, memory))
    store(tile, body(tile))
