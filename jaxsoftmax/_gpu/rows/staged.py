"""Short rows through shared memory: the rows of a block are neighbours, and so one part of the array.

1. This part is copied to shared memory by vectors of 16 bytes, wherever in a row they start, so that rows of any length are
   read and written as fast as long ones.
2. Each thread takes the elements of its rows into registers, by words of up to 4 bytes: one by one if need be.
3. The rows are reduced inside warps, as those that are loaded to registers directly (`block`).
4. Results go to shared memory, over an operand of their dtype if there is one, and are copied out by vectors.

Each element is read and written once.
"""

import functools
import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

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
    integer,
    load_words,
    shared_address,
    store_words,
    utils,
)
from jaxsoftmax._gpu.rows.kernel import RowKernel, Scratch
from jaxsoftmax._gpu.rows.memory import RowMemory, Steps, filled
from jaxsoftmax._gpu.rows.plan import RowPlan
from jaxsoftmax._gpu.rows.tile import RowTile

_COPIED = 16  # bytes of a vector that is copied
_THREADS = WARPS * WARP
_AT_ONCE = 4  # vectors that a thread takes out of shared memory before it stores them


@dataclass(frozen=True)
class StagedPlan(RowPlan):
    """Distributes short rows over the threads of a block, through shared memory.

    Rows are in registers, as in any `RowPlan` inside a warp, but other elements of other rows. A row is cut into words, and
    lane p has the words p, p + `lanes`, and so on. Its words of one step form one vector, so that a body is written out for few
    steps. Groups of lanes touch different rows at once. If those start in the same banks of shared memory, lanes wait for each
    other; rows that are further apart may not, and so the rows of neighbouring groups are `apart`.
    """

    itemsize: int = 4  # bytes of the widest element

    def describe(self) -> str:
        return f"{self.block_rows} rows a block, {self.threads} lanes a row, in registers through shared memory"

    @property
    def word(self) -> int:
        """Elements of a word, a divisor of the columns."""
        return math.gcd(self.cols, self.vector, 4 // self.itemsize)

    @property
    def words(self) -> int:
        """Words of a vector."""
        return self.vector // self.word

    @property
    def groups(self) -> int:
        """Groups of lanes in a warp; the lanes of a group share a row."""
        return WARP // self.lanes

    @functools.cached_property
    def apart(self) -> int:
        """Rows from the row of one group of lanes to that of the next group."""
        rows = self.block_rows // self.groups
        return min((k for k in range(1, rows + 1) if rows % k == 0), key=self.wavefronts)

    @property
    def size(self) -> int:
        """Elements of the rows of a block."""
        return self.block_rows * self.cols

    @property
    def slot_shape(self) -> tuple[int, ...]:
        return (self.slot_elements,)

    @property
    def slot_elements(self) -> int:
        """Elements of the shared memory for the rows, which may start a vector before them and end a vector behind them."""
        return self.size + _COPIED

    def wavefronts(self, apart: int) -> int:
        """Counts the accesses to shared memory by which a warp touches a word of each lane, if its rows are this far apart."""
        lanes = range(WARP)
        elements = [lane // self.lanes * apart * self.cols + lane % self.lanes * self.word for lane in lanes]
        return max(Counter(word % 32 for word in {element * self.itemsize // 4 for element in elements}).values())


def launch(kernel: RowKernel, plan: StagedPlan) -> list[jax.Array]:
    """Runs a kernel on short rows, some of them in each block."""
    n_rows, free = kernel.problem.outer, {name: array.dtype for name, array in kernel.whole_arrays.items()}
    # A result goes through the slot of an operand of its dtype: each thread writes what it alone has read.
    shared: list[str | None] = []
    for dtype in map(jnp.dtype, kernel.whole):
        shared.append(next((name for name, own in free.items() if own == dtype), None))
        free.pop(str(shared[-1]), None)

    def run(*refs):
        operands, results, scratch = kernel.split(refs)
        slots = dict(zip(kernel.whole_arrays, scratch.slots, strict=False))
        memory = StagedMemory(plan, lax.axis_index("block") * jnp.int32(plan.block_rows), n_rows)
        memory.copy_in([operands[name] for name in slots], list(slots.values()), [])
        others = iter(scratch.slots[len(slots) :])
        targets = [next(others) if name is None else slots[name] for name in shared]
        tile = StagedTile(memory, scratch.exchange, scratch.arrivals, scratch.order)
        values = kernel.load(tile, operands, slots, rows_last=True)  # last, because copies are waited for then
        kernel.store(tile, [*targets, *results[len(targets) :]], kernel.body(tile, **values))
        if targets:
            memory.copy_out(targets, results[: len(targets)])

    in_slots = [array.dtype for array in kernel.whole_arrays.values()]
    in_slots += [dtype for dtype, name in zip(kernel.whole, shared, strict=True) if name is None]
    scratch = Scratch([plgpu.SMEM(plan.slot_shape, dtype) for dtype in in_slots])
    is_sequential, blocks = kernel.may_start_inside_a_vector, pl.cdiv(n_rows, plan.block_rows)
    return kernel.call(run, plan, plan.view(n_rows), scratch, blocks=blocks, is_sequential=is_sequential)


@dataclass(frozen=True)
class StagedMemory(RowMemory):
    """Short rows of a block: operands and results as large as the rows are in slots in shared memory."""

    plan: StagedPlan

    def copy_in(self, refs, slots, fills) -> None:
        del fills  # rows end where others start: `hold` fills

        def copy(*operands):
            *operands, row = operands
            for ref, slot in zip(operands[: len(refs)], operands[len(refs) :], strict=True):
                _RowsOfBlock(self, ref, slot, row).copy_in()

        emit(copy, (*refs, *slots), [self.row])

    def copy_out(self, slots, refs) -> None:
        """Copies results from `slots` to where they belong, once all threads have stored theirs."""
        sync.block_barrier()

        def copy(*operands):
            *operands, row = operands
            for slot, ref in zip(operands[: len(refs)], operands[len(refs) :], strict=True):
                _RowsOfBlock(self, ref, slot, row).copy_out()

        emit(copy, (*slots, *refs), [self.row])

    def hold(self, ref, fill, slot, dtype) -> Steps:
        plan, bits = self.plan, filled(fill, ref.dtype)
        sync.await_copies()
        sync.block_barrier()  # threads read what others have copied

        def load(slot, row):
            register = plan.layout.to_mgpu().registers_element_type(slot.type.element_type)
            size = plan.word * utils.bytewidth(slot.type.element_type)

            def at(address, offsets, inside):
                return gather(register, size, [address] * plan.words, offsets, inside, bits, space="shared")

            return [[at(*place) for place in self._places(slot, row, i)] for i in range(plan.steps)]

        kind = plgpu.ShapeDtypeStruct(plan.shape, ref.dtype, layout=plan.layout)
        held = emit(load, slot, [self.row], results=[kind] * plan.steps)
        return lambda step: held[step].astype(dtype)

    def store(self, ref, step, values: jax.Array) -> None:
        """Stores what is computed in a step, to `ref` in shared memory."""
        plan = self.plan

        def store(slot, row, values):
            kind = integer(8 * plan.word * utils.bytewidth(slot.type.element_type))
            word = ir.VectorType.get((1,), kind)
            places = self._places(slot, row, step)
            for register, (address, offsets, inside) in zip(values.registers.flat, places, strict=True):
                words = vector.bitcast(ir.VectorType.get((plan.words,), kind), register)
                for k, (offset, is_inside) in enumerate(zip(offsets, inside, strict=True)):
                    value = vector.broadcast(word, llvm.extractelement(words, constant(k)))
                    store_words(address, offset, is_inside, value, "shared")

        emit(store, ref, [self.row], [(values, plan.layout)])

    # No plan for masks along the columns has such rows.

    def load_mask(self, ref, source):
        raise NotImplementedError("staged: masks along the columns are not read this way")

    def flags(self) -> Steps:
        return lambda step: self.columns(step) < self.plan.cols

    def _places(self, slot, row, step):
        """Yields for each row of this thread its words in a step: an address, offsets from it, whether each is in the row."""
        plan, itemsize = self.plan, utils.bytewidth(slot.type.element_type)
        first = arith.muli(arith.remui(utils.thread_idx(), constant(plan.lanes)), constant(plan.word))
        before, apart = self.before(row, itemsize), plan.lanes * plan.word
        # Words count from the start of the row: an element has the same lane and place wherever its row starts in
        # memory, and so a row always has the same bits.
        offsets = [(step * plan.words + k) * apart for k in range(plan.words)]
        whole = [offset + apart <= plan.cols for offset in offsets]
        ends = [constant(max(0, plan.cols - offset)) for offset in offsets]
        inside = [None if every else compare("ult", first, end) for every, end in zip(whole, ends, strict=True)]
        for local in self._local_rows():
            start = arith.addi(arith.addi(arith.muli(local, constant(plan.cols)), first), before)
            address = shared_address(slot, arith.muli(start, constant(itemsize)))
            yield address, [offset * itemsize for offset in offsets], inside

    def places(self, place, step):
        plan = self.plan
        lane = arith.remui(utils.thread_idx(), constant(plan.lanes))
        word = arith.addi(lane, arith.muli(step, constant(plan.words * plan.lanes)))
        first = arith.muli(word, constant(plan.word))
        for _ in range(plan.rows_per_lanes):
            yield [(first, q // plan.word * plan.lanes * plan.word + q % plan.word) for q in range(plan.vector)]

    def before(self, row, itemsize):
        """Returns the number of elements between the start of the vector that is copied first and the first row."""
        width = _COPIED // itemsize
        if self.plan.size % width == 0:
            return constant(0)
        first = arith.muli(row, constant(self.plan.cols))  # what overflows does not matter to the remainder
        return arith.andi(first, constant(width - 1))

    def _local_rows(self):
        """Yields the rows of this thread, counted from the first row of the block."""
        plan, each = self.plan, constant(self.plan.apart)
        group = arith.divui(arith.remui(utils.thread_idx(), constant(WARP)), constant(plan.lanes))
        for i in range(plan.rows_per_lanes):
            number = arith.addi(arith.divui(utils.thread_idx(), constant(WARP)), constant(i * WARPS))
            group_here = arith.addi(group, arith.muli(arith.divui(number, each), constant(plan.groups)))
            yield arith.addi(arith.remui(number, each), arith.muli(group_here, each))

    def _own_rows(self, row):
        for local in self._local_rows():
            here = arith.addi(row, local)
            yield here, (None if self.count % self.plan.block_rows == 0 else compare("ult", here, constant(self.count)))


@dataclass(frozen=True)
class StagedTile(RowTile):
    """Short rows of a block, whose lanes have other columns than those of a `RowTile`."""

    def column(self, step) -> jax.Array:
        return self.memory.columns(step)


class _RowsOfBlock:
    """The rows of a block in an array and in a slot, by vectors that start where vectors of the array do."""

    def __init__(self, memory, ref, slot, row):
        plan, self.kind = memory.plan, ref.type.element_type
        self.itemsize = utils.bytewidth(self.kind)
        self.width = _COPIED // self.itemsize  # elements of a vector
        # Rows are ragged if they may start or end inside a vector where the array does not end; the array is whole if it
        # consists of whole vectors. Rows are exact if every block has all of its rows, and these consist of whole vectors.
        self.ragged, self.whole = plan.size % self.width != 0, memory.count * plan.cols % self.width == 0
        self.exact = memory.count % plan.block_rows == 0 and not self.ragged
        self.vectors = -(-(plan.size + (self.width - 1) * self.ragged) // self.width)  # that the rows touch, at most
        self.before = memory.before(row, self.itemsize)  # elements of the first vector that lie before the rows
        start = arith.muli(i64(row), i64(plan.cols))
        left = arith.minui(arith.subi(i64(memory.count * plan.cols), start), i64(plan.size + self.width))
        left = arith.trunci(integer(32), left)
        # The ends of the rows and of the array, from the start of the first vector; the latter is at most a vector further.
        self.end = arith.addi(self.before, arith.minui(left, constant(plan.size)))
        self.left = arith.addi(self.before, left)
        start = arith.subi(start, i64(self.before))
        self.address = arith.addi(address_of(ref), arith.muli(start, i64(self.itemsize)))
        self.target = shared_address(slot, constant(0))

    def copy_in(self):
        """Starts copies of all vectors that the rows touch, with neighbours' elements, but nothing outside the array."""
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
            loaded = [load_words(target, offset, inside, words, space="shared") for offset, inside in some]
            for (offset, inside), value in zip(some, loaded, strict=True):
                store_words(address, offset, inside, value)
        if self.ragged:
            self._copy_elements(constant(0), "shared")
        if self.ragged or not self.whole:
            self._copy_elements(last, "shared")

    def _inside(self, first, last) -> Iterator[tuple[int, Any]]:
        """Yields the offsets of this thread's vectors, and whether each is one from `first` to before `last`."""
        for k in range(0, self.vectors, _THREADS):
            number, inside = arith.addi(utils.thread_idx(), constant(k)), None
            if not self.exact or k + _THREADS > self.vectors:
                inside = compare("ult", number, last)
            if first is not None and k == 0:
                inside = both(inside, compare("uge", number, first))
            yield k * _COPIED, inside

    def _of_thread(self, size):
        """Returns the addresses of this thread's first vector, or with the size of an element of its first element."""
        offset = arith.muli(utils.thread_idx(), size)
        return arith.addi(self.address, i64(offset)), arith.addi(self.target, offset)

    def _copy_elements(self, number, source):
        """Copies the elements of the vector `number` that are of the rows, from global to shared memory or back."""
        start = arith.muli(number, constant(self.width))
        place = arith.addi(start, utils.thread_idx())
        inside = both(compare("ult", utils.thread_idx(), constant(self.width)), compare("ult", place, self.end))
        inside = both(inside, compare("uge", place, self.before))
        address, target = self._of_thread(constant(self.itemsize))
        start = arith.muli(start, constant(self.itemsize))
        address, target = arith.addi(address, i64(start)), arith.addi(target, start)
        word = ir.VectorType.get((1,), integer(8 * self.itemsize))
        if source == "global":
            store_words(target, 0, inside, load_words(address, 0, inside, word), space="shared")
        else:
            store_words(address, 0, inside, load_words(target, 0, inside, word, space="shared"))
