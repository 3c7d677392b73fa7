"""How a block loads and stores its rows: with Pallas where they end with its steps, else in PTX.

Pallas loads and stores whole tiles of an array. Rows may have any length and number, and any alignment that follows from them.
Loads give `fill` beyond the end, and stores leave out what lies there: nothing outside of the array is touched.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxsoftmax._core import compat
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import WARP, WARPS, Vector, both, compare, constant, i64, utils


@dataclass(frozen=True)
class Elements:
    """What is as large as the rows, as a function of a step to its elements in `dtype`.

    Attributes:
      load: the elements of a step as they are in memory.
      of: dtype in memory.
      dtype: of the elements.
      layout: of a step.
    """

    load: Callable[[Any], jax.Array]
    of: Any
    dtype: Any
    layout: Any

    def __call__(self, step) -> jax.Array:
        return self.converted(self.load(step))

    def converted(self, found: jax.Array) -> jax.Array:
        if self.of == jnp.bfloat16 and self.dtype == jnp.float32 and self.in_words:
            return ptx.widened(found, self.layout.layout)
        return found.astype(self.dtype)

    @property
    def in_words(self) -> bool:
        """Whether a thread has two elements in each word."""
        return self.of.itemsize == 2 and self.layout.vector % 2 == 0

    def maximum(self, found: Iterable[jax.Array]) -> jax.Array:
        """The maximum at each place of several steps, all in the dtype of memory, which must be `in_words`."""
        return functools.reduce(functools.partial(ptx.maximum, layout=self.layout.layout), found)


@dataclass(frozen=True)
class Memory:
    """The rows of a block in memory.

    Attributes:
      layout: how the block's threads hold them, a `RowLayout`, or what a subclass wants.
      row: the first of them, a scalar int32.
      count: rows of the arrays.
      exact: whether arrays of so many rows end where a block's rows do, and rows with a step of all threads.
      rank: the number of the block among those that share the row, a scalar int32.
      stage: the number of the one in which the block holds them, a scalar int32.
    """

    layout: Any
    row: Any
    count: int
    exact: bool
    rank: Any = 0
    stage: Any = 0

    @property
    def place(self) -> list[Any]:
        return [self.row, self.rank]

    def sums_in_order(self, scratch, values: jax.Array) -> jax.Array:
        """Of the accumulators of a step's elements, `values`, the sums of as many as a vector has: `[4, 32]`, one a thread.

        Sums are of vectors that are counted from the first element of the slice, while a thread's vectors start where memory is
        aligned, up to a line before it. A thread's vector so has the end of one such sum and the start of the next. The thread
        before hands on what it has of the first one, and that goes on from there. Then each sum moves to the thread of its
        number, both through `scratch` of `RowLayout.order_shape`. In the threads before the slice's start are the last sums.
        """
        layout = self.layout

        def move(scratch, row, values):
            threads, size = constant(layout.threads), constant(layout.vector)
            before = self._before(row)
            inside = arith.remui(before, size)  # elements of a vector before the boundary
            (register,) = values.registers.flat
            zero = arith.constant(register.type.element_type, 0.0)

            def add(total, kind, boundary):
                for q in range(layout.vector):
                    value = llvm.extractelement(register, constant(q))
                    if boundary is not None:
                        value = arith.select(compare(kind, constant(q), boundary), value, zero)
                    total = arith.addf(total, value)
                return total

            def exchanged(value, first, distance):
                """Of the thread so many further."""
                at = arith.addi(utils.thread_idx(), constant(first * layout.threads))
                asm = "st.shared.f32 [$0], $1; bar.sync 0;"
                address = ptx.shared_address(scratch, arith.muli(at, constant(4)))
                utils.inline_ptx(asm, address, value, has_side_effects=True, convergent=True)
                other = arith.remui(arith.addi(utils.thread_idx(), distance), threads)
                other = arith.addi(other, constant(first * layout.threads))
                address = ptx.shared_address(scratch, arith.muli(other, constant(4)))
                kind = register.type.element_type
                return utils.inline_ptx("ld.shared.f32 $0, [$1];", address, result_types=kind, has_side_effects=True)

            vectors = arith.divui(before, size)
            if layout.whole_vectors:
                utils.inline_ptx("bar.sync 0;", has_side_effects=True, convergent=True)  # others may still read earlier sums
                total = exchanged(add(zero, None, None), 0, vectors)
            else:
                head = exchanged(add(zero, "uge", inside), 0, arith.subi(threads, constant(1)))
                total = exchanged(add(head, "ult", inside), 1, arith.addi(vectors, constant(1)))
            return [vector.broadcast(ir.VectorType.get((1,), total.type), total)]

        kind = plgpu.ShapeDtypeStruct((WARPS, WARP), jnp.float32, layout=ptx.of_threads())
        return ptx.emit(move, scratch, [self.row], [(values, layout.layout)], kind)

    def group(self):
        """The number of the warpgroup in its block."""
        return lax.axis_index("warpgroup") if self.layout.warpgroups > 1 else jnp.int32(0)

    def copy_in(self, refs, slots, fills) -> None:
        """Starts copies of rows to `slots` in shared memory, each thread its own vectors, and fills those outside.

        Vectors of which a part is of the row bring their other elements along, until `fill_around`.
        """

        def copy(copies):
            for own, *where, _, last in copies:
                own.among_others(last).copy(*where)
            for own, *where, last in copies:  # as a thread waits for what it loads of the array's last vector
                own.among_others(last).copy_rest(*where)

        self._each_copy(copy, refs, slots, fills)

    def fill_around(self, refs, slots, fills) -> None:
        """Once copies have arrived, sets what they brought along that is not of the row."""

        def fill(copies):
            for own, *where, _ in copies:
                own.fill_around(*where)

        if self.layout.shifted and not self.layout.whole_vectors:
            self._each_copy(fill, refs, slots, fills)

    def _each_copy(self, function, refs, slots, fills):
        """`function` gets for each of a thread's vectors itself, a register's type, where it goes, the fill, and the end."""
        layout = self.layout

        def make(*given):
            *given, row, rank, stage = given
            copies = []
            for ref, slot, fill in zip(given[: len(refs)], given[len(refs) :], fills, strict=True):
                itemsize = utils.bytewidth(ref.type.element_type)
                register = layout.layout.to_mgpu().registers_element_type(ref.type.element_type)
                (start,) = self._starts(ref, (row, rank), itemsize)
                size = layout.vector * itemsize
                last = arith.addi(ptx.address_of(ref), i64(math.prod(ref.type.shape) * itemsize - size))
                place = arith.addi(utils.thread_idx(), arith.muli(stage, constant(layout.steps * layout.threads)))
                target = ptx.shared_address(slot, arith.muli(place, constant(size)))
                for step in range(layout.steps):
                    own = self._vector(step, start, itemsize)
                    copies.append((own, register, target, step * layout.threads * size, fill, last))
            function(copies)

        fills = [filled(fill, ref.dtype) for ref, fill in zip(refs, fills, strict=True)]
        ptx.emit(make, (*refs, *slots), [*self.place, self.stage])

    def read(self, ref, fill, dtype) -> Elements:
        """What is as large as the rows, held nowhere, where there is a loop over steps."""

        def load(step):
            return self._load_joined(ref, fill, step) if self.layout.joined else self._load(ref, ref.dtype, fill, step=step)[0]

        return Elements(load, ref.dtype, dtype, self.layout)

    def hold(self, ref, fill, slot, dtype) -> Callable[[Any], jax.Array]:
        """What is as large as the rows, as a function of a step that converts it to `dtype`.

        It is held in registers, in `slot` unless that is None, or in a kernel with a loop nowhere but in memory.
        """
        layout = self.layout
        load = functools.partial(plgpu.load, layout=layout.layout, optimized=False)
        held = functools.partial(Elements, of=ref.dtype, dtype=dtype, layout=layout)
        if slot is not None:
            return held(lambda step: load(slot.at[self._entry(step)]))
        if self.exact:
            if layout.config.unroll:
                return lambda step: load(self._at(ref, step)).astype(dtype)
            exact = [load(self._at(ref, step)) for step in range(layout.steps)]
            return lambda step: exact[step].astype(dtype)
        if not layout.config.unroll:
            return held(self._load(ref, ref.dtype, fill).__getitem__)
        return self.read(ref, fill, dtype)

    def _entry(self, step):
        """The number of what the warpgroup has in a step, in a slot."""
        return (self.stage * self.layout.steps + step) * self.layout.warpgroups + self.group()

    def load_mask(self, ref, source) -> Callable[[int], jax.Array]:
        """A mask as a function of a step: bool.

        `source` is `Problem.indexed` of a mask that repeats; None for one as large as the rows.
        """
        if self.layout.config.unroll:
            return lambda step: self._load(ref, jnp.dtype(jnp.int8), 0, source, step)[0] != 0
        loaded = self._load(ref, jnp.dtype(jnp.int8), 0, source)
        return lambda step: loaded[step] != 0

    def store(self, ref, step, values: jax.Array) -> None:
        """Stores what is computed in a step."""
        if self.exact:
            compat.store(self._at(ref, step), values)
            return
        itemsize = values.dtype.itemsize

        def store(ref, row, rank, *given):
            *at, values = given
            starts = self._starts(ref, (row, rank), itemsize)
            for register, start in zip(values.registers.flat, starts, strict=True):
                self._vector(at[0] if at else step, start, itemsize).store(register)

        scalars = self.place if isinstance(step, int) else [*self.place, step]
        ptx.emit(store, ref, scalars, [(values, self.layout.layout)])

    def inside(self) -> Callable[[int], jax.Array] | None:
        """Whether elements are of a row, as a function of a step: bool; None if all are."""
        if self.layout.whole_steps == range(self.layout.steps):
            return None
        if self.layout.joined:
            return lambda step: self._inside_joined(step) != 0
        if self.layout.config.unroll:
            return lambda step: self._load(None, jnp.dtype(jnp.int8), 0, step=step)[0] != 0
        flags = self._load(None, jnp.dtype(jnp.int8), 0)
        return lambda step: flags[step] != 0

    def load_row(self, ref) -> jax.Array:
        """A value for each row of the block; one value where it has one row. 0 for rows that are not there."""
        layout, itemsize = self.layout, ref.dtype.itemsize
        if layout.whole_block:
            return ref[self.row]
        if self.exact:
            return plgpu.load(ref.at[pl.ds(self.row, layout.rows)], layout=layout.row_layout, optimized=False)

        def load(ref, row):
            register = layout.row_layout.to_mgpu().registers_element_type(ref.type.element_type)
            return [entry.load(register) for entry in self._row_entries(ref, row, itemsize)]

        kind = plgpu.ShapeDtypeStruct((layout.rows,), ref.dtype, layout=layout.row_layout)
        return ptx.emit(load, ref, [self.row], results=kind)

    def store_row(self, ref, values: jax.Array) -> None:
        """Stores a value for each row of the block."""
        layout, itemsize = self.layout, values.dtype.itemsize
        if layout.whole_block and self.exact:
            ref[self.row] = values
            return
        if layout.whole_block:
            ptx.store_by_first_thread(ref, self.row, values)
            return
        if self.exact:
            compat.store(ref.at[pl.ds(self.row, layout.rows)], values)
            return

        def store(ref, row, values):
            first = compare("eq", arith.remui(utils.thread_idx(), constant(layout.lanes)), constant(0))
            for register, entry in zip(values.registers.flat, self._row_entries(ref, row, itemsize), strict=True):
                Vector(entry.address, 0, itemsize, both(first, entry.inside)).store(register)

        ptx.emit(store, ref, [self.row], [(values, layout.row_layout)])

    def plus_at(self, step, values: jax.Array, columns: jax.Array, addends: jax.Array) -> jax.Array:
        """`values` of a step with an addend more at one column of each row, an int32; none, if it is no column of the row."""
        layout = self.layout

        def add(row, rank, step, values, columns, addends):
            places = self.places((row, rank), step)
            registers = zip(values.registers.flat, places, columns.registers.flat, addends.registers.flat, strict=True)
            return [ptx.plus_where(register, *own) for register, *own in registers]

        of_rows = layout.row_layout if columns.ndim else ptx.SPLAT
        given = [(values, layout.layout), (columns, of_rows), (addends, of_rows)]
        kind = plgpu.ShapeDtypeStruct(layout.shape, jnp.float32, layout=layout.layout)
        return ptx.emit(add, None, [*self.place, step], given, results=kind)

    def columns(self, step) -> jax.Array:
        """The columns of the elements of a step, int32."""

        def make(row, rank, step):
            kind, vectors = ir.VectorType.get((self.layout.vector,), ptx.integer(32)), []
            for places in self.places((row, rank), step):
                found = llvm.mlir_undef(kind)
                for q, (first, offset) in enumerate(places):
                    found = llvm.insertelement(found, arith.addi(first, constant(offset)), constant(q))
                vectors.append(found)
            return vectors

        kind = plgpu.ShapeDtypeStruct(self.layout.shape, jnp.int32, layout=self.layout.layout)
        return ptx.emit(make, None, [*self.place, step], results=kind)

    def places(self, place, step) -> Iterator[list[tuple[Any, int]]]:
        """For each of this thread's rows the columns of its elements in a step, each the sum of an int32 and a number."""
        layout = self.layout
        for _, first, *_ in self._starts(None, place, 1):
            if layout.blocks > 1:
                first = arith.addi(first, self._slice_start(place[1]))
            first = arith.addi(first, arith.muli(step, constant(layout.threads * layout.vector)))
            yield [(first, q) for q in range(layout.vector)]

    def _slice_start(self, rank):
        layout = self.layout
        lines = arith.addi(arith.muli(rank, constant(layout.slice_lines)), arith.minsi(rank, constant(layout.longer_slices)))
        return arith.muli(lines, constant(layout.line))

    def _at(self, ref, step):
        """What the warpgroup has in a step of an array."""
        layout = self.layout
        if layout.whole_block:
            return ref.at[(self.row * layout.steps + step) * layout.warpgroups + self.group()]
        width = layout.shape[1]
        return ref.at[pl.ds(self.row, layout.rows), pl.ds(step * width, width)]

    def _load(self, ref, dtype, fill, source=None, step=None) -> list[jax.Array]:
        """An array for each step from `ref`, `[*, cols]` in global memory, or without `ref` of which elements are of a row.

        `dtype` is int8 for bool. With `step`, an int or in a loop a scalar int32, one array.
        """
        layout = self.layout
        fill = filled(fill, dtype)

        def load(*given):
            *refs, row, rank = given[: (ref is not None) + 2]
            register = layout.layout.to_mgpu().registers_element_type(utils.dtype_to_ir_type(dtype))
            starts = list(self._starts(refs[0] if refs else None, (row, rank), dtype.itemsize, source))
            policy = None
            if source is not None:  # other blocks load it too: the L2 cache should rather keep it than what passes through
                asm = "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;"
                policy = utils.inline_ptx(asm, result_types=ptx.integer(64))

            # Rows that repeat are not aligned as those of the scores.
            singly = source is not None and not layout.whole_vectors

            def held(step, start, whole=False):
                held = self._vector(step, start, dtype.itemsize, whole, singly)
                return held.load(register, fill, policy) if refs else held.touched(register)

            if step is None:
                return [[held(i, start) for start in starts] for i in range(layout.steps)]
            if isinstance(step, int):
                return [[held(step, start) for start in starts]]
            return [[held(given[-1], start, layout.looped_steps == layout.whole_steps) for start in starts]]

        kind = plgpu.ShapeDtypeStruct(layout.shape, dtype, layout=layout.layout)
        scalars = self.place if step is None or isinstance(step, int) else [*self.place, step]
        return ptx.emit(load, ref, scalars, results=[kind] * (layout.steps if step is None else 1))

    def _load_joined(self, ref, fill, step) -> jax.Array:
        """What threads have of a step, where elements before the slice's start are those of the next step, at the same place.

        So each step has as many elements of the slice. In a loop a vector before the slice is loaded as it is: it lies in the
        array, which starts with a line.
        """
        layout, bits, itemsize = self.layout, filled(fill, ref.dtype), ref.dtype.itemsize

        def load(ref, row, rank, *steps):
            register = layout.layout.to_mgpu().registers_element_type(ref.type.element_type)
            (start,) = self._starts(ref, (row, rank), itemsize)
            following = arith.addi(steps[0], constant(1)) if steps else step + 1
            own, further = (
                self._vector(k, start, itemsize, bool(steps)).load(register, bits)
                for k in (steps[0] if steps else step, following)
            )
            return [self._joined(row, own, further)]

        kind = plgpu.ShapeDtypeStruct(layout.shape, ref.dtype, layout=layout.layout)
        return ptx.emit(load, ref, [*self.place, *([] if isinstance(step, int) else [step])], results=kind)

    def _joined(self, row, own, further):
        """A thread's vector of a step, `own`, with elements of its next step, `further`, in place of those before the row."""
        words = ptx.words_of(own.type)
        each = self.layout.vector // words.shape[0]  # elements of a word
        first = arith.subi(arith.muli(utils.thread_idx(), constant(self.layout.vector)), self._before(row))
        joined = llvm.mlir_undef(words)
        for k in range(words.shape[0]):
            kept = constant(0)
            for q in range(each):
                inside = compare("sge", arith.addi(first, constant(k * each + q)), constant(0))
                ones = constant(-1) if each == 1 else constant(0xFFFF << 16 * q)
                kept = arith.ori(kept, arith.select(inside, ones, constant(0)))
            a, b = (llvm.extractelement(vector.bitcast(words, part), constant(k)) for part in (own, further))
            word = arith.ori(arith.andi(a, kept), arith.andi(b, arith.xori(kept, constant(-1))))
            joined = llvm.insertelement(joined, word, constant(k))
        return vector.bitcast(own.type, joined)

    def _inside_joined(self, step) -> jax.Array:
        """Which elements that threads have of a step, as `_load_joined` gives them, are of the row: int8. In a loop all are."""
        layout = self.layout
        width = layout.threads * layout.vector

        def make(row, rank):
            register = layout.layout.to_mgpu().registers_element_type(ptx.integer(8))
            if not isinstance(step, int):
                return [utils.c(1, register)]
            ((_, first, _, length),) = self._starts(None, (row, rank), 1)
            flags = utils.c(0, register)
            for q in range(layout.vector):
                element = arith.addi(first, constant(q))
                is_later = compare("slt", element, constant(0))
                element = arith.addi(element, arith.select(is_later, constant(width), constant(0)))
                inside = compare("ult", arith.addi(element, constant(step * width)), length)
                flags = llvm.insertelement(flags, arith.extui(register.element_type, inside), constant(q))
            return [flags]

        kind = plgpu.ShapeDtypeStruct(layout.shape, jnp.int8, layout=layout.layout)
        return ptx.emit(make, None, self.place, results=kind)

    def _starts(self, ref, place, itemsize, source=None) -> Iterator[tuple[Any, ...]]:
        """Where a thread's vectors start, for each of its rows.

        The address, the element of the slice there, whether it is a row at all, and the elements of the slice.
        """
        layout = self.layout
        position = utils.thread_idx() if layout.whole_block else arith.remui(utils.thread_idx(), constant(layout.lanes))
        element = first = arith.muli(position, constant(layout.vector))
        length = constant(layout.cols)
        if layout.blocks > 1:
            slice_start = self._slice_start(place[1])
            is_longer = arith.extui(length.type, compare("slt", place[1], constant(layout.longer_slices)))
            own_lines = arith.addi(is_longer, constant(layout.slice_lines))
            first = arith.addi(first, slice_start)
            left = arith.maxsi(arith.subi(length, slice_start), constant(0))
            length = arith.minsi(left, arith.muli(own_lines, constant(layout.line)))
        for own_row, inside in self._own_rows(place[0]):
            array_row = own_row if source is None else placed(source[0], own_row, layout.cols)
            start, in_slice = arith.addi(arith.muli(i64(array_row), i64(layout.cols)), i64(first)), element
            if layout.shifted:
                before = self._before(own_row)
                start = arith.subi(start, i64(before))
                in_slice = arith.subi(element, before)
            base = i64(0) if ref is None else ptx.address_of(ref)
            yield arith.addi(base, arith.muli(start, i64(itemsize))), in_slice, inside, length

    def _before(self, row):
        """How many elements before a row its first line starts, int32."""
        line = self.layout.line  # a power of two, so what overflows does not matter
        return arith.remui(arith.muli(row, constant(self.layout.cols % line)), constant(line))

    def _vector(self, step, start, itemsize, whole=False, singly=False):
        """The vector that a thread has in a step: an int, or int32 in a loop.

        `whole` says that all threads have whole vectors then, `singly` that elements are touched one by one.
        """
        layout = self.layout
        address, first, inside, length = start
        width = layout.threads * layout.vector
        if isinstance(step, int):
            made = functools.partial(Vector, address, step * width * itemsize, itemsize)
            whole = whole or step in layout.whole_steps
            first = arith.addi(first, constant(step * width))
        else:
            further = arith.muli(step, constant(width))
            made = functools.partial(Vector, arith.addi(address, arith.muli(i64(further), i64(itemsize))), 0, itemsize)
            first = arith.addi(first, further)

        def own():
            return [compare("ult", arith.addi(first, constant(q)), length) for q in range(layout.vector)]

        if singly:
            return made(None, utils.c(1, ptx.integer(1)), own)
        if whole:
            return made(inside)
        if not layout.shifted:
            return made(both(inside, compare("slt", first, length)))
        last = constant(layout.vector - 1)
        most = arith.maxsi(arith.subi(length, last), constant(0))
        complete = compare("ult", first, most)  # what is negative counts as large
        if layout.whole_vectors:
            return made(complete)
        touched = compare("ult", arith.addi(first, last), arith.addi(length, last))
        return made(complete, arith.xori(complete, touched), own)

    def _row_entries(self, ref, row, itemsize):
        for own_row, inside in self._own_rows(row):
            yield Vector(arith.addi(ptx.address_of(ref), arith.muli(i64(own_row), i64(itemsize))), 0, itemsize, inside)

    def _own_rows(self, row):
        """The rows of which this thread holds elements, and whether they are there, None if always."""
        layout = self.layout
        if layout.whole_block:
            yield row, None
            return
        own = arith.addi(row, arith.divui(utils.thread_idx(), constant(layout.lanes)))
        for i in range(layout.repeats):
            here = arith.addi(own, constant(i * WARPS * (WARP // layout.lanes)))
            yield here, (None if self.count % layout.rows == 0 else compare("ult", here, constant(self.count)))


@dataclass(frozen=True)
class Ring:
    """Steps of a loop on their way from global memory: a thread copies its own vectors to shared memory, and reads them there.

    So no other thread has to be waited for. What was read of a slot must have been used before the slot is copied to again.

    Attributes:
      memory: of the block.
      ref: what is read.
      slots: `[size * threads * vector]` of its dtype, in shared memory. Vectors must have 4, 8 or 16 bytes.
      size: steps that it holds.
    """

    memory: Memory
    ref: Any
    slots: Any
    size: int

    def copy(self, first, count: int, left) -> None:
        """Starts a group of copies: of `count` steps from `first` on if `left` is more than 0, else of none."""
        layout, itemsize = self.memory.layout, self.ref.dtype.itemsize

        def copy(ref, slots, row, rank, first, left):
            register = layout.layout.to_mgpu().registers_element_type(ref.type.element_type)
            (begin,) = self.memory._starts(ref, (row, rank), itemsize)
            slot = arith.remui(first, constant(self.size))
            with utils.when(compare("sgt", left, constant(0))):
                for k in range(count):
                    step = self.memory._vector(arith.addi(first, constant(k)), begin, itemsize, whole=True)
                    step.copy(register, self._place(slots, slot, k), 0)

        ptx.emit(copy, (self.ref, self.slots), [*self.memory.place, first, left])
        ptx.end_copies()

    def load(self, first, count: int) -> list[jax.Array]:
        """What threads have of so many steps, as `Memory.read` gives it, once their copies have arrived."""
        layout = self.memory.layout

        def load(slots, row, rank, first):
            register = layout.layout.to_mgpu().registers_element_type(slots.type.element_type)
            words, slot = ptx.words_of(register), arith.remui(first, constant(self.size))
            found = []
            for k in range(count + layout.joined):
                loaded = ptx.load_words(self._place(slots, slot, k), 0, None, words, space="shared")
                found.append(vector.bitcast(register, loaded))
            if layout.joined:
                found = [self.memory._joined(row, *pair) for pair in itertools.pairwise(found)]
            return [[register] for register in found]

        kind = plgpu.ShapeDtypeStruct(layout.shape, self.ref.dtype, layout=layout.layout)
        return ptx.emit(load, self.slots, [*self.memory.place, first], results=[kind] * count)

    def _place(self, slots, slot, k: int):
        """Where the thread's vector of the step is that is `k` further than one in this slot."""
        layout = self.memory.layout
        size = layout.vector * utils.bytewidth(slots.type.element_type)
        slot = arith.addi(slot, constant(k))
        slot = arith.select(compare("uge", slot, constant(self.size)), arith.subi(slot, constant(self.size)), slot)
        place = arith.addi(arith.muli(slot, constant(layout.threads)), utils.thread_idx())
        return ptx.shared_address(slots, arith.muli(place, constant(size)))


def filled(fill, dtype) -> int:
    """A word of 32 bits that is filled with this value."""
    return int.from_bytes(np.full(4 // dtype.itemsize, fill, dtype).tobytes(), "little")


def placed(triples: Sequence[int], index, size: int = 1):
    """The place in an array for an index, an int32 MLIR value, by the triples of `problem.indexed`; in units of `size`."""
    total = constant(0)
    for divisor, modulus, stride in itertools.batched(triples, 3):
        part = arith.divui(index, constant(divisor))
        if modulus:
            part = arith.remui(part, constant(modulus))
        total = arith.addi(total, arith.muli(part, constant(stride // size)))
    return total
