"""Short rows through shared memory: those of a block are neighbours, and so one piece of the array.

The piece is copied to shared memory by vectors of 16 bytes, wherever in a row they start, so that rows of any length are read
and written as fast as long ones. From there each thread takes the elements of its rows into registers, by words of up to 4
bytes: one by one if need be. Results go to shared memory too, over an operand of their dtype if they can, and are copied out.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import WARP, WARPS, Vector, both, compare, constant, i64, integer, utils
from jaxsoftmax._gpu.rows.layout import Config, RowLayout
from jaxsoftmax._gpu.rows.memory import Memory, filled
from jaxsoftmax._gpu.rows.tile import Tile

_COPIED = 16  # bytes at once
_THREADS = WARPS * WARP
_AT_ONCE = 4  # vectors that a thread takes out of shared memory before it stores them


class FlatLayout(RowLayout):
    """How the threads of a block hold the rows of a piece: as any rows inside a warp, but for which elements and rows they are.

    A row is cut into words, and lane p has the words p, p + `lanes`, and so on. What it has of them in a step is one vector, so
    that a body is written out for few steps. Lanes that do not share a row touch different rows at once. Where those start in
    the same banks of shared memory, lanes wait for each other, which rows that are further apart may not.

    Attributes:
      itemsize: bytes of the widest element.
      word: elements of a word, a divisor of the columns.
      words: of a vector.
      groups: of the lanes of a warp that share a row.
      apart: rows from that of a group of lanes to that of the next group.
      piece: elements of the rows of a block.
      slot_elements: of what holds a piece, which may start a vector before it and end a vector behind it.
    """

    def __init__(self, cols: int, config: Config, itemsize: int):
        super().__init__(cols, config)
        self.itemsize = itemsize
        self.word = math.gcd(cols, self.vector, 4 // itemsize)
        self.words = self.vector // self.word
        self.groups = WARP // self.lanes
        each = self.rows // self.groups
        self.apart = min((k for k in range(1, each + 1) if each % k == 0), key=self.wavefronts)
        self.piece = self.rows * cols
        self.slot_elements = self.piece + _COPIED

    def wavefronts(self, apart: int) -> int:
        """How often a warp must touch shared memory for a word of each lane, where its rows are so many `apart`."""
        lanes = range(WARP)
        elements = [lane // self.lanes * apart * self.cols + lane % self.lanes * self.word for lane in lanes]
        return max(Counter(word % 32 for word in {element * self.itemsize // 4 for element in elements}).values())


@dataclass(frozen=True)
class FlatMemory(Memory):
    """The rows of a block in memory: what is as large as they are is in slots in shared memory."""

    def copy_in(self, refs, slots, fills) -> None:
        del fills  # rows end where others start: `hold` fills

        def copy(*given):
            *given, row = given
            for ref, slot in zip(given[: len(refs)], given[len(refs) :], strict=True):
                _Piece(self, ref, slot, row).copy_in()

        ptx.emit(copy, (*refs, *slots), [self.row])

    def copy_out(self, slots, refs) -> None:
        """Copies results from `slots` to where they belong, once all threads have stored theirs."""
        ptx.block_barrier()

        def copy(*given):
            *given, row = given
            for slot, ref in zip(given[: len(refs)], given[len(refs) :], strict=True):
                _Piece(self, ref, slot, row).copy_out()

        ptx.emit(copy, (*slots, *refs), [self.row])

    def hold(self, ref, fill, slot, dtype) -> Callable[[Any], jax.Array]:
        layout, bits = self.layout, filled(fill, ref.dtype)
        ptx.await_copies()
        ptx.block_barrier()  # threads read what others have copied

        def load(slot, row, *step):
            register = layout.layout.to_mgpu().registers_element_type(slot.type.element_type)
            size = layout.word * utils.bytewidth(slot.type.element_type)

            def at(address, offsets, inside):
                return ptx.gather(register, size, [address] * layout.words, offsets, inside, bits, space="shared")

            return [[at(*place) for place in self._places(slot, row, i)] for i in step or range(layout.steps)]

        kind = plgpu.ShapeDtypeStruct(layout.shape, ref.dtype, layout=layout.layout)
        if layout.config.unroll:
            return lambda step: ptx.emit(load, slot, [self.row, step], results=[kind])[0].astype(dtype)
        held = ptx.emit(load, slot, [self.row], results=[kind] * layout.steps)
        return lambda step: held[step].astype(dtype)

    def store(self, ref, step, values: jax.Array) -> None:
        """Stores what is computed in a step, to `ref` in shared memory."""
        layout = self.layout

        def store(slot, row, *given):
            *at, values = given
            kind = integer(8 * layout.word * utils.bytewidth(slot.type.element_type))
            word = ir.VectorType.get((1,), kind)
            places = self._places(slot, row, at[0] if at else step)
            for register, (address, offsets, inside) in zip(values.registers.flat, places, strict=True):
                words = vector.bitcast(ir.VectorType.get((layout.words,), kind), register)
                for k, (offset, own) in enumerate(zip(offsets, inside, strict=True)):
                    value = vector.broadcast(word, llvm.extractelement(words, constant(k)))
                    ptx.store_words(address, offset, own, value, "shared")

        scalars = [self.row] if isinstance(step, int) else [self.row, step]
        ptx.emit(store, ref, scalars, [(values, layout.layout)])

    # `config_for` does not choose this layout for masks along the columns, nor for scales, which ask for `inside`.

    def load_mask(self, ref, source):
        raise NotImplementedError("flat: masks along the columns are not read this way yet")

    def inside(self):
        raise NotImplementedError("flat: what is beyond the end of a row is not told yet")

    def _places(self, slot, row, step):
        """For each row of this thread its words in a step: an address, offsets from there, and whether each is of the row."""
        layout, itemsize = self.layout, utils.bytewidth(slot.type.element_type)
        own = arith.muli(arith.remui(utils.thread_idx(), constant(layout.lanes)), constant(layout.word))
        before, apart = self.before(row, itemsize), layout.lanes * layout.word
        first = 0
        if isinstance(step, int):
            first = step * layout.words * apart
        else:
            own = arith.addi(own, arith.muli(step, constant(layout.words * apart)))
        offsets = [first + k * apart for k in range(layout.words)]
        whole = [isinstance(step, int) and offset + apart <= layout.cols for offset in offsets]
        ends = [constant(max(0, layout.cols - offset)) for offset in offsets]
        inside = [None if every else compare("ult", own, end) for every, end in zip(whole, ends, strict=True)]
        for local in self._local_rows():
            start = arith.addi(arith.addi(arith.muli(local, constant(layout.cols)), own), before)
            address = ptx.shared_address(slot, arith.muli(start, constant(itemsize)))
            yield address, [offset * itemsize for offset in offsets], inside

    def places(self, place, step):
        layout = self.layout
        lane = arith.remui(utils.thread_idx(), constant(layout.lanes))
        word = arith.addi(lane, arith.muli(step, constant(layout.words * layout.lanes)))
        first = arith.muli(word, constant(layout.word))
        for _ in range(layout.repeats):
            yield [(first, q // layout.word * layout.lanes * layout.word + q % layout.word) for q in range(layout.vector)]

    def before(self, row, itemsize):
        """Elements between the vector that is copied first and the first row."""
        width = _COPIED // itemsize
        if self.layout.piece % width == 0:
            return constant(0)
        first = arith.muli(row, constant(self.layout.cols))  # what overflows does not matter to the remainder
        return arith.andi(first, constant(width - 1))

    def _local_rows(self):
        """The rows of this thread, from the first of the block."""
        layout, each = self.layout, constant(self.layout.apart)
        group = arith.divui(arith.remui(utils.thread_idx(), constant(WARP)), constant(layout.lanes))
        for i in range(layout.repeats):
            number = arith.addi(arith.divui(utils.thread_idx(), constant(WARP)), constant(i * WARPS))
            group_here = arith.addi(group, arith.muli(arith.divui(number, each), constant(layout.groups)))
            yield arith.addi(arith.remui(number, each), arith.muli(group_here, each))

    def _own_rows(self, row):
        for local in self._local_rows():
            here = arith.addi(row, local)
            yield here, (None if self.count % self.layout.rows == 0 else compare("ult", here, constant(self.count)))


@dataclass(frozen=True)
class Flat(Tile):
    """The rows of a block."""

    def column(self, step) -> jax.Array:
        return self.memory.columns(step)


class _Piece:
    """The rows of a block in an array, and in a slot, by vectors that start where those of the array do.

    Attributes:
      kind, itemsize: the type of an element, and its bytes.
      width: elements of a vector.
      ragged: whether a piece may start or end inside a vector where the array does not end.
      whole: whether the array consists of whole vectors.
      before: elements of the first vector that are not of the piece.
      end: where it ends, from the start of the first vector.
      left: where the array ends, or whole vectors that the piece touches.
      address, target: of this thread's first vector in the array, and of the slot.
    """

    def __init__(self, memory, ref, slot, row):
        layout, self.kind = memory.layout, ref.type.element_type
        self.itemsize = utils.bytewidth(self.kind)
        self.width = _COPIED // self.itemsize
        self.ragged, self.whole = layout.piece % self.width != 0, memory.count * layout.cols % self.width == 0
        self.exact = memory.count % layout.rows == 0 and not self.ragged
        self.vectors = -(-(layout.piece + (self.width - 1) * self.ragged) // self.width)
        self.before = memory.before(row, self.itemsize)
        start = arith.muli(i64(row), i64(layout.cols))
        left = arith.minui(arith.subi(i64(memory.count * layout.cols), start), i64(layout.piece + self.width))
        left = arith.trunci(integer(32), left)
        self.end = arith.addi(self.before, arith.minui(left, constant(layout.piece)))
        self.left = arith.addi(self.before, left)
        start = arith.subi(start, i64(self.before))
        self.address = arith.addi(ptx.address_of(ref), arith.muli(start, i64(self.itemsize)))
        self.target = ptx.shared_address(slot, constant(0))

    def copy_in(self):
        """Starts copies of all that the piece touches: neighbours' elements too, but nothing outside of the array."""
        last = arith.ceildivui(self.end, constant(self.width))
        if not self.whole:
            last = arith.minui(last, arith.divui(self.left, constant(self.width)))
        register = ir.VectorType.get((self.width,), self.kind)
        address, target = self._of_thread(constant(_COPIED))
        for offset, inside in self._inside(None, last):
            Vector(address, offset, self.itemsize, inside).copy(register, target, offset)
        if not self.whole:  # the last vector of the array
            self._copy_elements(last, "global")

    def copy_out(self):
        """Copies results of the rows, and nothing else."""
        first = arith.ceildivui(self.before, constant(self.width)) if self.ragged else None
        last = arith.divui(self.end, constant(self.width))
        address, target = self._of_thread(constant(_COPIED))
        words = ir.VectorType.get((_COPIED // 4,), integer(32))
        vectors = list(self._inside(first, last))
        for k in range(0, len(vectors), _AT_ONCE):
            some = vectors[k : k + _AT_ONCE]
            found = [ptx.load_words(target, offset, inside, words, space="shared") for offset, inside in some]
            for (offset, inside), value in zip(some, found, strict=True):
                ptx.store_words(address, offset, inside, value)
        if self.ragged:
            self._copy_elements(constant(0), "shared")
        if self.ragged or not self.whole:
            self._copy_elements(last, "shared")

    def _inside(self, first, last) -> Iterator[tuple[int, Any]]:
        """This thread's vectors: their offsets, and whether they are among those from `first` to before `last`."""
        for k in range(0, self.vectors, _THREADS):
            number, inside = arith.addi(utils.thread_idx(), constant(k)), None
            if not self.exact or k + _THREADS > self.vectors:
                inside = compare("ult", number, last)
            if first is not None and k == 0:
                inside = both(inside, compare("uge", number, first))
            yield k * _COPIED, inside

    def _of_thread(self, size):
        """Where this thread's first vector is, or with the size of an element its first element."""
        offset = arith.muli(utils.thread_idx(), size)
        return arith.addi(self.address, i64(offset)), arith.addi(self.target, offset)

    def _copy_elements(self, number, source):
        """Copies what of a vector, by its number, is of the piece, from global memory, or from shared memory to there."""
        start = arith.muli(number, constant(self.width))
        place = arith.addi(start, utils.thread_idx())
        inside = both(compare("ult", utils.thread_idx(), constant(self.width)), compare("ult", place, self.end))
        inside = both(inside, compare("uge", place, self.before))
        address, target = self._of_thread(constant(self.itemsize))
        start = arith.muli(start, constant(self.itemsize))
        address, target = arith.addi(address, i64(start)), arith.addi(target, start)
        word = ir.VectorType.get((1,), integer(8 * self.itemsize))
        if source == "global":
            ptx.store_words(target, 0, inside, ptx.load_words(address, 0, inside, word), space="shared")
        else:
            ptx.store_words(address, 0, inside, ptx.load_words(target, 0, inside, word, space="shared"))
