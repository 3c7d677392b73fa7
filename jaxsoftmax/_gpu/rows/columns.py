"""Rows along an axis that is not the last: of an array `[outer, cols, inner]` a block has some rows that are neighbours.

They are as many as a line of the cache holds, so that a warp reads whole lines of several elements of its rows. Each thread has
the states of its vector's rows. They merge over the lanes of a warp by shuffles, over warps through shared memory, and over the
blocks of a cluster, or of the grid, as those of rows along the last axis do. Nothing is transposed.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import WARP, WARPS, Vector, both, compare, constant, i64, utils
from jaxsoftmax._gpu.rows.layout import Config
from jaxsoftmax._gpu.rows.memory import Elements, Memory, filled, placed
from jaxsoftmax._gpu.rows.tile import Tile
from jaxsoftmax.online import State

_AT_ONCE = 8  # the most turns of `Columns._over` that are no loop


class ColumnLayout:
    """How the threads of a block, or of a cluster of blocks, hold rows along `cols` of an array `[outer, cols, inner]`.

    In a step a thread has a vector of `inner` in one of `height` places along the rows, which all threads share. Blocks of the
    grid share them in slices, one below another, as what they hold at a time should be close together.

    Attributes:
      cols, inner, config, vector, threads, blocks, cluster, warpgroups: as the array and the `Config` say.
      width: rows of a block.
      tiles: blocks, or clusters, for all of `inner`.
      warps: of a block.
      apart: places along the rows between those of a block and of the next one.
      group, groups: blocks of the grid whose states are merged first, a power of two, and such groups of a tile.
      steps, whole_steps, looped_steps, stages, slot_elements, exchange_shape, scratch_size: see `RowLayout`.
      shape: what a warpgroup holds in a step: `width` rows for each of its warps, by places.
      layout, row_layout: where the elements of `shape`, and a value for each of its rows, are.
    """

    whole_block = True  # its warps share rows
    whole_vectors = True
    branches = False
    is_exact = False
    shifted = False
    joined = False
    order_shape = None
    is_read_twice = False
    rows = 1  # tiles of a block

    def __init__(self, cols: int, inner: int, config: Config):
        self.cols, self.inner, self.config = cols, inner, config
        self.vector, self.threads, self.blocks = config.vector, config.threads, config.blocks
        self.cluster = 1 if config.grid else self.blocks
        self.lanes = config.lanes
        self.warpgroups = self.threads // (WARP * WARPS)
        self.width = self.lanes * self.vector
        self.tiles = -(-inner // self.width)
        self.warps = WARPS * self.warpgroups
        self.exchange_shape = (4, (self.warps + (self.cluster if self.cluster > 1 else 0)) * self.width)
        self.scratch_size = 4 * math.prod(self.exchange_shape)
        height = self.threads // self.lanes
        self.steps = -(-cols // (height * self.blocks))
        self.height, self.apart = (height, height * self.steps) if config.grid else (height * self.blocks, height)
        whole = cols // (height * self.blocks)
        self.whole_steps = range(whole) if cols == whole * height * self.blocks or not config.grid else range(0)
        self.looped_steps = range(self.steps)
        self.stages = 2 if config.grid else 1
        self.slot_elements = self.stages * self.steps * self.threads * self.vector
        self.group = 1 << max(4, self.blocks.bit_length() // 2)
        self.groups = -(-self.blocks // self.group)
        self.shape = (WARPS * self.width, WARP // self.lanes)
        tiles = (self.shape, (self.width, self.shape[1]), (self.vector, 1))
        self.layout = ptx.tiled(tiles, (-6,), (-3, -4), -2)
        self.row_layout = self.layout.reduce(1)


@dataclass(frozen=True)
class ColumnMemory(Memory):
    """The rows of a block in memory, one tile of them: `row` is its number among all of `[outer, tiles]`."""

    def hold(self, ref, fill, slot, dtype) -> Callable[[Any], jax.Array]:
        layout, itemsize = self.layout, ref.dtype.itemsize
        held = functools.partial(Elements, of=ref.dtype, dtype=dtype, layout=layout)
        if slot is None:
            return held(lambda step: self._load(ref, ref.dtype, fill, step=step)[0])

        def load(slot, step):
            register = layout.layout.to_mgpu().registers_element_type(slot.type.element_type)
            place = arith.addi(utils.thread_idx(), arith.muli(step, constant(layout.threads)))
            address = ptx.shared_address(slot, arith.muli(place, constant(layout.vector * itemsize)))
            return [vector.bitcast(register, ptx.load_words(address, 0, None, ptx.words_of(register), space="shared"))]

        kind = plgpu.ShapeDtypeStruct(layout.shape, ref.dtype, layout=layout.layout)
        return held(lambda step: ptx.emit(load, slot, [self.stage * layout.steps + step], results=kind))

    def load_row(self, ref) -> jax.Array:
        layout = self.layout

        def load(ref, *place):
            register = layout.row_layout.to_mgpu().registers_element_type(ref.type.element_type)
            return [self._of_row(ref, place)[0].load(register)]

        kind = plgpu.ShapeDtypeStruct(layout.shape[:1], ref.dtype, layout=layout.row_layout)
        return ptx.emit(load, ref, self.place, results=kind)

    def store_row(self, ref, values: jax.Array) -> None:
        def store(ref, row, rank, values):
            entry, first = self._of_row(ref, (row, rank))
            Vector(entry.address, 0, entry.itemsize, both(entry.inside, first)).store(values.registers.flat[0])

        ptx.emit(store, ref, self.place, [(values, self.layout.row_layout)])

    def _of_row(self, ref, place):
        """A value for each of a thread's rows, in `ref`, `[outer * inner]`, and whether no thread before has them."""
        layout, itemsize = self.layout, utils.bytewidth(ref.type.element_type)
        outer, col, place_along, inside = self._own(place)
        start = arith.addi(arith.muli(i64(outer), i64(layout.inner)), i64(col))
        address = arith.addi(ptx.address_of(ref), arith.muli(start, i64(itemsize)))
        return Vector(address, 0, itemsize, inside), compare("eq", place_along, constant(0))

    def places(self, place, step):
        _, _, along, _ = self._own(place)
        along = arith.addi(along, arith.muli(step, constant(self.layout.height)))
        yield [(along, 0)] * self.layout.vector

    def _own(self, place):
        """Of this thread: the entry of `outer`, the first of `inner`, the place along the rows, whether it is there at all."""
        layout, (row, rank) = self.layout, place
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        along = arith.divui(utils.thread_idx(), constant(layout.lanes))
        along = arith.addi(along, arith.muli(rank, constant(layout.apart)))
        col = arith.addi(
            arith.muli(arith.remui(row, constant(layout.tiles)), constant(layout.width)),
            arith.muli(arith.remui(lane, constant(layout.lanes)), constant(layout.vector)),
        )
        inside = None if layout.inner % layout.width == 0 else compare("ult", col, constant(layout.inner))
        return arith.divui(row, constant(layout.tiles)), col, along, inside

    def _starts(self, ref, place, itemsize, source=None):
        """Returns where the vectors of a thread start in the first step.

        The address, the place along the rows, whether the rows are there at all, elements between neighbours along the rows,
        and of a mask that repeats within a vector, from that address, the places of its elements or the one of all.
        """
        layout = self.layout
        outer, col, along, inside = self._own(place)
        apart, places = layout.inner, None
        if source is not None:
            (_, _, apart), across = source[1:]  # whole along the rows
            outer = placed(source[0], outer, layout.cols * apart)
            count = places_of_vector(across, layout.vector)
            if count is not None:
                places = [placed(across, arith.addi(col, constant(q))) for q in range(count)]
            col = placed(across, col) if count is None else constant(0)
        entry = arith.addi(arith.muli(i64(outer), i64(layout.cols)), i64(along))
        start = arith.addi(arith.muli(entry, i64(apart)), i64(col))
        base = i64(0) if ref is None else ptx.address_of(ref)
        yield arith.addi(base, arith.muli(start, i64(itemsize))), along, inside, apart, places

    def _vector(self, step, start, itemsize, whole=False, singly=False):
        layout = self.layout
        address, along, inside, apart, places = start
        further, offset = layout.height * apart * itemsize, 0  # bytes of a step
        if isinstance(step, int) and step * further < 2**31:  # then it is a part of the instruction
            offset = step * further
        else:
            address = arith.addi(address, arith.muli(i64(constant(step) if isinstance(step, int) else step), i64(further)))
        if isinstance(step, int):
            whole = whole or step in layout.whole_steps
            step = constant(step)
        if not whole:
            along = arith.addi(along, arith.muli(step, constant(layout.height)))
            inside = both(inside, compare("slt", along, constant(layout.cols)))
        if places is not None:
            return _Repeated(address, offset, itemsize, inside, places=places)
        return Vector(address, offset, itemsize, inside)


def places_of_vector(triples: Sequence[int], vector: int) -> int | None:
    """Counts the places in a mask that repeats, for a vector of rows side by side: see `problem.indexed`.

    Returns:
      None where they are neighbours, 1 where all have the same place, else `vector`.
    """
    if all(divisor % vector == 0 for divisor in triples[::3]):
        return 1
    (divisor, modulus, stride), *others = itertools.batched(triples, 3)
    are_neighbours = (divisor, stride) == (1, 1) and modulus % vector == 0
    return None if are_neighbours and all(divisor % vector == 0 for divisor, _, _ in others) else vector


@dataclass(frozen=True)
class _Repeated(Vector):
    """Bytes in global memory, those of a register, that are not neighbours.

    Attributes:
      places: where they are from `address` on, int32 MLIR values, one for each byte or one for all of them.
    """

    places: Sequence[ir.Value] = ()

    def load(self, register, bits=0, policy=None):
        """A register of type `register`, with `bits` in each word where nothing is to be touched."""
        count = len(self.places)
        kind = ir.VectorType.get((count,), register.element_type)
        addresses = [arith.addi(self.address, i64(place)) for place in self.places]
        loaded = ptx.gather(kind, 1, addresses, [self.offset] * count, [self.inside] * count, bits, policy)
        if count == 1:
            return vector.broadcast(register, llvm.extractelement(loaded, constant(0)))
        return loaded


@dataclass(frozen=True)
class Columns(Tile):
    """The rows of a block: `merge` and `sum` give a value for each of them, once for each warp of a warpgroup."""

    def column(self, step) -> jax.Array:
        return self.memory.columns(step)

    def merge(self, state: State, scale=None) -> State:
        return State(*self._together(functools.partial(self._merged, scale), state.m, state.d))

    def sum(self, values) -> jax.Array:
        return self._together(self._added, self._sum(values) if callable(values) else values)[0]

    def _merged(self, scale, count, maxima, sums):
        maxima, sums = self._loaded(count, maxima, -jnp.inf), self._loaded(count, sums, 0)
        m = jnp.max(self._over(count, jnp.maximum, maxima, -jnp.inf), 1)

        def rescaled(k):
            return online.rescale(State(maxima(k), sums(k)), m, axis=1, scale=scale).d

        return m, jnp.sum(self._over(count, jnp.add, rescaled, 0), 1)

    def _added(self, count, sums, _=None):
        return [jnp.sum(self._over(count, jnp.add, self._loaded(count, sums, 0), 0), 1)]

    def _iterations(self, count) -> int:
        """In how many turns each place along the rows takes one of what `count` warps, or blocks, have."""
        return -(-count * self.memory.layout.lanes // WARP)

    def _loaded(self, count, of, fill) -> Callable[[Any], jax.Array]:
        """What a place takes in each turn, as a function of the turn. Of few turns it is loaded here, at once."""
        iterations = self._iterations(count)
        if iterations > _AT_ONCE:
            return lambda k: of(k, fill)
        return [of(k, fill) for k in range(iterations)].__getitem__

    def _over(self, count, function, of, start) -> jax.Array:
        """Folds what `count` warps, or blocks, have: each place along the rows takes the k-th of its own, one after another."""
        iterations = self._iterations(count)
        if iterations <= _AT_ONCE:
            return functools.reduce(function, map(of, range(iterations)), self.accumulator(start))
        return lax.fori_loop(0, ptx.unknown(iterations), lambda k, total: function(total, of(k)), self.accumulator(start))

    def _together(self, function, *parts):
        """`function` of what all warps of the block have, and then of what it gives in all blocks of the cluster.

        It gets how many there are, and functions: what the k-th one of each place has, or a fill if there is none.
        """
        layout = self.memory.layout
        round_ = next(self.rounds)
        slots = [self.exchange.at[round_ % 2 * 2 + i] for i in range(len(parts))]
        own = ptx.WARPS * layout.width
        for slot, part in zip(slots, parts, strict=True):
            compat.store(slot.at[pl.ds(self.memory.group() * own, own)], part)
        ptx.block_barrier()
        parts = function(layout.warps, *(functools.partial(self._of, slot, 0, layout.warps) for slot in slots))
        if layout.cluster == 1:
            return parts
        if round_ == 0:
            ptx.cluster_wait()
        for slot, part in zip(slots, parts, strict=True):
            ptx.push_rows_to_cluster(slot, layout.warps + self.memory.rank, part, layout, self.pushed, round_)
        ptx.await_pushes(self.pushed, round_, 4 * len(parts) * layout.blocks * layout.width)
        return function(layout.blocks, *(functools.partial(self._of, slot, layout.warps, layout.blocks) for slot in slots))

    def _of(self, slot, start, count, k, fill, space="shared"):
        """What the k-th of each place has, of `count` in `slot` from the `start`-th on; it may be in global memory."""
        layout = self.memory.layout

        def load(slot, start, count, k):
            lane = arith.remui(utils.thread_idx(), constant(WARP))
            index = arith.addi(arith.muli(k, constant(WARP // layout.lanes)), arith.divui(lane, constant(layout.lanes)))
            own = arith.muli(arith.remui(lane, constant(layout.lanes)), constant(layout.vector))
            inside, bits = compare("ult", index, count), filled(fill, jnp.dtype(jnp.float32))
            index = arith.addi(start, index)
            if space == "shared":
                place = arith.addi(arith.muli(index, constant(layout.width)), own)
                address = ptx.shared_address(slot, arith.muli(place, constant(4)))
            else:
                address = self._address_of_state(slot, index, own)
            register = layout.layout.to_mgpu().registers_element_type(slot.type.element_type)
            words = ptx.words_of(register)
            return [vector.bitcast(register, ptx.load_words(address, 0, inside, words, bits, space=space))]

        kind = plgpu.ShapeDtypeStruct(layout.shape, jnp.float32, layout=layout.layout)
        return ptx.emit(load, slot, [start, count, k], results=kind)

    def of_states(self, function, states, first, count, most):
        """`function`, as `_together` takes it, of so many states in global memory from the `first` on; `count` is an int32."""
        return function(most, *(functools.partial(self._of, part, first, count, space="global") for part in _parts(states)))

    def store_state(self, states, number, values) -> None:
        """Stores `values` for the rows of the block, those of a state, to global memory."""

        def store(*given):
            *refs, number = given[: len(values) + 1]
            own = arith.muli(utils.thread_idx(), constant(self.memory.layout.vector))
            first = compare("ult", utils.thread_idx(), constant(self.memory.layout.lanes))
            for ref, value in zip(refs, given[len(refs) + 1 :], strict=True):
                Vector(self._address_of_state(ref, number, own), 0, 4, first).store(value.registers.flat[0])

        ptx.emit(store, tuple(_parts(states)[: len(values)]), [number], [(v, self.memory.layout.row_layout) for v in values])

    def _address_of_state(self, ref, number, own):
        place = arith.addi(arith.muli(i64(number), i64(self.memory.layout.width)), i64(own))
        return arith.addi(ptx.address_of(ref), arith.muli(place, i64(4)))


def _parts(states):
    return [states.at[k] for k in range(states.shape[0])]
