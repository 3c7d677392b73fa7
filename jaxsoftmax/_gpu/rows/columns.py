"""Rows along an axis that is not the last: of an array `[outer, cols, inner]` a block has some neighbouring rows, a tile.

A tile is as wide as a line of the cache, so that a warp reads whole lines of several elements of its rows. Nothing is
transposed.

1. Every thread loads its vectors, of neighbouring rows, at its places along the rows: by asynchronous copies into shared
   memory, or when a step needs them.
2. Each thread has the states of its vector's rows. They merge over the lanes of a warp by shuffles, over warps through shared
   memory, over the blocks of a cluster by stores to each other's shared memory.
3. Every thread computes the results of its vectors, and stores them.

Each element is read once and written once.
"""

import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._gpu import sync
from jaxsoftmax._gpu.emit import (
    WARP,
    WARPS,
    Vector,
    address_of,
    both,
    compare,
    constant,
    emit,
    gather,
    i64,
    load_words,
    shared_address,
    unknown,
    utils,
    words_of,
)
from jaxsoftmax._gpu.rows.memory import Elements, Memory, Steps, filled, placed
from jaxsoftmax._gpu.rows.plan import ColumnPlan
from jaxsoftmax._gpu.rows.tile import LOWEST, Pairs, Tile
from jaxsoftmax.online import State

_AT_ONCE = 8  # the most turns of `ColumnTile._fold_turns` that are no loop


class ColumnStart(NamedTuple):
    """The place where the vectors of a thread start in the first step. Values are of MLIR, except `apart`."""

    address: Any
    along: Any  # the place along the rows
    exists: Any  # True if there are such rows; None if always
    apart: int  # elements between neighbours along the rows
    places: list[Any] | None  # of a mask that repeats within a vector: places of its elements from the address, or one for all


@dataclass(frozen=True)
class ColumnMemory(Memory):
    """A tile of rows along another axis; `row` is the number of the tile among all of `[outer, tiles]`."""

    plan: ColumnPlan

    def hold(self, ref, fill, slot, dtype) -> Steps:
        plan, itemsize = self.plan, ref.dtype.itemsize
        held = functools.partial(Elements, of=ref.dtype, dtype=dtype, plan=plan)
        if slot is None:
            return held(lambda step: self._load(ref, ref.dtype, fill, step=step)[0])

        def load(slot, step):
            register = plan.layout.to_mgpu().registers_element_type(slot.type.element_type)
            place = arith.addi(utils.thread_idx(), arith.muli(step, constant(plan.threads)))
            address = shared_address(slot, arith.muli(place, constant(plan.vector * itemsize)))
            return [vector.bitcast(register, load_words(address, 0, None, words_of(register), space="shared"))]

        kind = plgpu.ShapeDtypeStruct(plan.shape, ref.dtype, layout=plan.layout)
        return held(lambda step: emit(load, slot, [self.stage * plan.steps + step], results=kind))

    def load_row(self, ref) -> jax.Array:
        plan = self.plan

        def load(ref, *place):
            register = plan.row_layout.to_mgpu().registers_element_type(ref.type.element_type)
            return [self._of_row(ref, place)[0].load(register)]

        kind = plgpu.ShapeDtypeStruct(plan.shape[:1], ref.dtype, layout=plan.row_layout)
        return emit(load, ref, self.place, results=kind)

    def store_row(self, ref, values: jax.Array) -> None:
        def store(ref, row, rank, values):
            entry, first = self._of_row(ref, (row, rank))
            Vector(entry.address, 0, entry.itemsize, both(entry.inside, first)).store(values.registers.flat[0])

        emit(store, ref, self.place, [(values, self.plan.row_layout)])

    def _of_row(self, ref, place):
        """Returns the vector of a thread's rows in `ref`, `[outer * inner]`, and whether the thread is their first one."""
        plan, itemsize = self.plan, utils.bytewidth(ref.type.element_type)
        outer, col, place_along, inside = self._own(place)
        start = arith.addi(arith.muli(i64(outer), i64(plan.inner)), i64(col))
        address = arith.addi(address_of(ref), arith.muli(start, i64(itemsize)))
        return Vector(address, 0, itemsize, inside), compare("eq", place_along, constant(0))

    def places(self, place, step):
        _, _, along, _ = self._own(place)
        along = arith.addi(along, arith.muli(step, constant(self.plan.height)))
        yield [(along, 0)] * self.plan.vector

    def _own(self, place):
        """Returns this thread's index of `outer`, its first of `inner`, its place along its rows, and whether these exist."""
        plan, (row, rank) = self.plan, place
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        along = arith.divui(utils.thread_idx(), constant(plan.lanes))
        along = arith.addi(along, arith.muli(rank, constant(plan.apart)))
        col = arith.addi(
            arith.muli(arith.remui(row, constant(plan.tiles)), constant(plan.width)),
            arith.muli(arith.remui(lane, constant(plan.lanes)), constant(plan.vector)),
        )
        inside = None if plan.inner % plan.width == 0 else compare("ult", col, constant(plan.inner))
        return arith.divui(row, constant(plan.tiles)), col, along, inside

    def _starts(self, ref, place, itemsize, source=None) -> Iterator[ColumnStart]:
        """Yields where the vectors of a thread start in the first step."""
        plan = self.plan
        outer, col, along, inside = self._own(place)
        apart, places = plan.inner, None
        if source is not None:
            (_, _, apart), across = source[1:]  # whole along the rows
            outer = placed(source[0], outer, plan.cols * apart)
            count = places_of_vector(across, plan.vector)
            if count is not None:
                places = [placed(across, arith.addi(col, constant(q))) for q in range(count)]
            col = placed(across, col) if count is None else constant(0)
        entry = arith.addi(arith.muli(i64(outer), i64(plan.cols)), i64(along))
        start = arith.addi(arith.muli(entry, i64(apart)), i64(col))
        base = i64(0) if ref is None else address_of(ref)
        yield ColumnStart(arith.addi(base, arith.muli(start, i64(itemsize))), along, inside, apart, places)

    def _vector(self, step, start: ColumnStart, itemsize, whole=False, singly=False) -> Vector:
        plan = self.plan
        address, along, exists, apart, places = start
        further, offset = plan.height * apart * itemsize, 0  # bytes of a step
        if isinstance(step, int) and step * further < 2**31:  # then it is a part of the instruction
            offset = step * further
        else:
            address = arith.addi(address, arith.muli(i64(constant(step) if isinstance(step, int) else step), i64(further)))
        if isinstance(step, int):
            whole = whole or step in plan.whole_steps
            step = constant(step)
        if not whole:
            along = arith.addi(along, arith.muli(step, constant(plan.height)))
            exists = both(exists, compare("slt", along, constant(plan.cols)))
        if places is not None:
            return _Repeated(address, offset, itemsize, exists, places=places)
        return Vector(address, offset, itemsize, exists)


def places_of_vector(triples: Sequence[int], vector: int) -> int | None:
    """Counts the places in a mask that repeats, for a vector of neighbouring rows: see `row_problem.indexed`.

    Returns:
      None if the places are neighbours, 1 if all rows have the same place, else `vector`.
    """
    if all(divisor % vector == 0 for divisor in triples[::3]):
        return 1
    (divisor, modulus, stride), *others = itertools.batched(triples, 3)
    are_neighbours = (divisor, stride) == (1, 1) and modulus % vector == 0
    return None if are_neighbours and all(divisor % vector == 0 for divisor, _, _ in others) else vector


@dataclass(frozen=True)
class _Repeated(Vector):
    """The bytes of a register, which are not neighbours in global memory."""

    places: Sequence[ir.Value] = ()  # of the bytes from `address` on, int32, one for each byte or one for all of them

    def load(self, register, bits=0, policy=None):
        """Loads a register of type `register`, with `bits` in each word that is not to be touched."""
        count = len(self.places)
        kind = ir.VectorType.get((count,), register.element_type)
        addresses = [arith.addi(self.address, i64(place)) for place in self.places]
        loaded = gather(kind, 1, addresses, [self.offset] * count, [self.inside] * count, bits, policy)
        if count == 1:
            return vector.broadcast(register, llvm.extractelement(loaded, constant(0)))
        return loaded


@dataclass(frozen=True)
class ColumnTile(Tile):
    """A tile of rows along another axis: `merge` and `sum` give a value for each row, once for each warp of a warpgroup."""

    memory: ColumnMemory

    def merge(self, state: State, scale=None, exchange: int = 0) -> State:
        return State(*self._exchange(exchange, functools.partial(self._merge_states, scale), state.m, state.d))

    def merge_with_exponents(self, state: State, sums: jax.Array, scale=None) -> tuple[State, jax.Array]:
        m, d, sums = self._exchange(0, functools.partial(self._merge_with_exponents, scale), *state[:2], sums)
        return State(m, d), sums

    def sum(self, values: Steps | jax.Array, exchange: int = 0) -> jax.Array:
        sums = self._sum(values) if callable(values) else values
        return self._exchange(exchange, self._add_sums, sums)[0]

    def sum_both(self, pairs: Pairs, exchange: int = 0) -> list[jax.Array]:
        return self._exchange(exchange, self._add_both, *self._sums(pairs))

    def merge_both(self, state: State, other: State, scale=None, other_scale=None, exchange: int = 0) -> tuple[State, State]:
        function = functools.partial(self._merge_both, scale, other_scale)
        m, d, other_m, other_d = self._exchange(exchange, function, *state[:2], *other[:2])
        return State(m, d), State(other_m, other_d)

    def merge_differences(
        self, state: State, other: State, sums: jax.Array, scale=None, other_scale=None, exchange: int = 0
    ) -> tuple[State, State, jax.Array]:
        function = functools.partial(self._merge_differences, scale, other_scale)
        m, d, other_m, other_d, sums = self._exchange(exchange, function, *state[:2], *other[:2], sums)
        return State(m, d), State(other_m, other_d), sums

    def _exchange(self, number: int, function, *parts):
        """Merges some values of each row over all warps of the block, and then over all blocks of the cluster.

        `function` is `_merge_states`, `_merge_both`, `_merge_with_exponents`, `_merge_differences`, `_add_sums` or `_add_both`.
        Exchanges take turns with two buffers, as those of `RowTile`.
        """
        plan = self.memory.plan
        slots = self.places_of_exchange(number, len(parts))
        width = WARPS * plan.width
        for slot, part in zip(slots, parts, strict=True):
            compat.store(slot.at[pl.ds(self.memory.warpgroup() * width, width)], part)
        sync.block_barrier()
        parts = function(plan.warps, *(functools.partial(self._load_kth, slot, 0, plan.warps) for slot in slots))
        if plan.cluster == 1:
            return parts
        if number == 0:
            sync.cluster_wait()  # until the other blocks run, whose shared memory this one stores to
        for slot, part in zip(slots, parts, strict=True):
            sync.send_rows_to_cluster(slot, plan.warps + self.memory.rank, part, plan, self.arrivals, number)
        sync.await_exchange(self.arrivals, number, 4 * len(parts) * plan.blocks * plan.width)
        return function(plan.blocks, *(functools.partial(self._load_kth, slot, plan.warps, plan.blocks) for slot in slots))

    # Merges `count` values of each row, one for each warp or block. The lanes that hold a row take the values in turns;
    # shuffles merge the lanes. Values are functions of the turn, and of a fill where there is none.

    def _merge_states(self, scale, count, maxima, sums):
        maxima, sums = self._by_turn(count, maxima, -jnp.inf), self._by_turn(count, sums, 0)
        m = jnp.max(self._fold_turns(count, jnp.maximum, maxima, -jnp.inf), 1)

        def rescaled(k):
            return online.rescale(State(maxima(k), sums(k)), m, axis=1, scale=scale).d

        return m, jnp.sum(self._fold_turns(count, jnp.add, rescaled, 0), 1)

    def _merge_with_exponents(self, scale, count, maxima, *sums):
        maxima, (d, exponents) = self._by_turn(count, maxima, -jnp.inf), (self._by_turn(count, part, 0) for part in sums)
        m = jnp.max(self._fold_turns(count, jnp.maximum, maxima, -jnp.inf), 1)
        shifted, size = self.along(online.shift(m)), None if scale is None else self.along(scale)

        def lowered(part, k):
            return online.lower_exponents(maxima(k), d(k), exponents(k), shifted, scale=size)[part]

        of_rows = (self._fold_turns(count, jnp.add, functools.partial(lowered, part), 0) for part in range(2))
        return m, *(jnp.sum(part, 1) for part in of_rows)

    def _merge_both(self, scale, other_scale, count, maxima, d, other_maxima, other_d):
        return *self._merge_states(scale, count, maxima, d), *self._merge_states(other_scale, count, other_maxima, other_d)

    def _merge_differences(self, scale, other_scale, count, maxima, d, other_maxima, other_d, sums):
        states = self._merge_both(scale, other_scale, count, maxima, d, other_maxima, other_d)
        m, other_m = self.along(states[0]), self.along(states[2])
        size, other_size = (None if each is None else self.along(each) for each in (scale, other_scale))
        pairs = ((maxima, LOWEST), (d, 0), (sums, 0), (other_maxima, LOWEST), (other_d, 0))
        maxima, d, sums, other_maxima, other_d = (self._by_turn(count, load, fill) for load, fill in pairs)

        def lowered(k):
            given = maxima(k), d(k), sums(k), other_maxima(k), other_d(k)
            return online.lower_differences(*given, m, other_m, scale=size, other_scale=other_size)[1]

        return *states, jnp.sum(self._fold_turns(count, jnp.add, lowered, 0), 1)

    def _add_sums(self, count, sums, _=None):
        return [jnp.sum(self._fold_turns(count, jnp.add, self._by_turn(count, sums, 0), 0), 1)]

    def _add_both(self, count, *sums):
        return [self._add_sums(count, part)[0] for part in sums]

    def _turns(self, count) -> int:
        """Returns the number of turns in which the places of a warp take one value each, for all `count` values."""
        return -(-count * self.memory.plan.lanes // WARP)

    def _by_turn(self, count, load, fill) -> Callable[[Any], jax.Array]:
        """Returns the values that places take as a function of the turn. If turns are few, they are loaded here, at once."""
        turns = self._turns(count)
        if turns > _AT_ONCE:
            return lambda k: load(k, fill)
        return [load(k, fill) for k in range(turns)].__getitem__

    def _fold_turns(self, count, function, values, start) -> jax.Array:
        """Folds the values of all turns at each place."""
        turns = self._turns(count)
        if turns <= _AT_ONCE:
            return functools.reduce(function, map(values, range(turns)), self.accumulator(start))
        return lax.fori_loop(0, unknown(turns), lambda k, total: function(total, values(k)), self.accumulator(start))

    def _load_kth(self, slot, start, count, k, fill, space="shared"):
        """Loads the values that places take in turn k, of `count` in `slot` from the `start`-th on; `space` may be global."""
        plan = self.memory.plan

        def load(slot, start, count, k):
            lane = arith.remui(utils.thread_idx(), constant(WARP))
            index = arith.addi(arith.muli(k, constant(WARP // plan.lanes)), arith.divui(lane, constant(plan.lanes)))
            first = arith.muli(arith.remui(lane, constant(plan.lanes)), constant(plan.vector))
            inside, bits = compare("ult", index, count), filled(fill, jnp.dtype(jnp.float32))
            index = arith.addi(start, index)
            if space == "shared":
                place = arith.addi(arith.muli(index, constant(plan.width)), first)
                address = shared_address(slot, arith.muli(place, constant(4)))
            else:
                address = self._address_of_state(slot, index, first)
            register = plan.layout.to_mgpu().registers_element_type(slot.type.element_type)
            words = words_of(register)
            return [vector.bitcast(register, load_words(address, 0, inside, words, bits, space=space))]

        kind = plgpu.ShapeDtypeStruct(plan.shape, jnp.float32, layout=plan.layout)
        return emit(load, slot, [start, count, k], results=kind)

    # States in global memory, for tiles that the grid shares.

    def merge_states(self, function, states, first, count, most):
        """Merges `count` states in global memory, an int32 of at most `most`, from the `first` on."""
        return function(
            most, *(functools.partial(self._load_kth, part, first, count, space="global") for part in _parts(states))
        )

    def store_state(self, states, number, values) -> None:
        """Stores values of the tile's rows, those of a state, to global memory."""

        def store(*operands):
            *refs, number = operands[: len(values) + 1]
            first = arith.muli(utils.thread_idx(), constant(self.memory.plan.vector))
            is_first = compare("ult", utils.thread_idx(), constant(self.memory.plan.lanes))
            for ref, value in zip(refs, operands[len(refs) + 1 :], strict=True):
                Vector(self._address_of_state(ref, number, first), 0, 4, is_first).store(value.registers.flat[0])

        rows = [(value, self.memory.plan.row_layout) for value in values]
        emit(store, tuple(_parts(states)[: len(values)]), [number], rows)

    def _address_of_state(self, ref, number, first):
        place = arith.addi(arith.muli(i64(number), i64(self.memory.plan.width)), i64(first))
        return arith.addi(address_of(ref), arith.muli(place, i64(4)))


def _parts(states):
    return [states.at[k] for k in range(states.shape[0])]
