"""Loads and stores of a block's rows: by Pallas if rows end with its steps, else by PTX.

Pallas loads and stores whole tiles of an array. Rows may have any length, any number, and any alignment that follows from
these. Loads give `fill` beyond the end, and stores leave out what lies there: nothing outside the array is touched.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxsoftmax._core import compat
from jaxsoftmax._gpu import sync, tickets
from jaxsoftmax._gpu.emit import (
    SPLAT,
    WARP,
    WARPS,
    Vector,
    address_of,
    both,
    compare,
    constant,
    emit,
    i64,
    integer,
    load_words,
    maximum,
    of_threads,
    plus_where,
    shared_address,
    utils,
    widened,
    words_of,
)
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage

# Values that are as large as the rows: a function of a step to the elements of that step. What is computed from it twice need
# not stay in registers meanwhile.
Steps = Callable[[Any], jax.Array]


@dataclass(frozen=True)
class Elements:
    """An operand as large as the rows, as a function of a step to its elements in `dtype`."""

    load: Steps  # to elements as they are in memory
    of: Any  # dtype in memory
    dtype: Any
    plan: RowPlan | ColumnPlan

    def __call__(self, step) -> jax.Array:
        return self.converted(self.load(step))

    @functools.cached_property
    def converted(self) -> Callable[[jax.Array], jax.Array]:
        """Converts elements from the dtype in memory."""
        if self.of == jnp.bfloat16 and self.dtype == jnp.float32 and self.in_words:
            return functools.partial(widened, layout=self.plan.layout)
        return lambda elements: elements.astype(self.dtype)

    @functools.cached_property
    def in_words(self) -> bool:
        """True if a thread has two elements in each word."""
        return self.of.itemsize == 2 and self.plan.vector % 2 == 0

    def maximum(self, steps: Iterable[jax.Array]) -> jax.Array:
        """Computes the maximum at each place over steps, in the dtype in memory; only if elements are `in_words`."""
        return functools.reduce(functools.partial(maximum, layout=self.plan.layout), steps)


@dataclass(frozen=True)
class Memory:
    """The rows of a block in memory, for any distribution of rows over threads.

    A subclass says where the vectors of a thread start (`_starts`), which vector it has in a step (`_vector`), and which
    columns the elements of that vector have (`places`). `row`, `rank` and `stage` are scalars, int32.
    """

    plan: RowPlan | ColumnPlan
    row: Any  # number of the first row, or of the tile of rows
    count: int  # rows, or tiles, of the arrays
    exact: bool = False  # Pallas can load and store the rows
    rank: Any = 0  # number of the block among those that share the row
    stage: Any = 0  # number of the stage of shared memory that holds the rows

    @functools.cached_property
    def place(self) -> list[Any]:
        return [self.row, self.rank]

    def warpgroup(self):
        """Returns the number of the warpgroup in its block."""
        return lax.axis_index("warpgroup") if self.plan.warpgroups > 1 else jnp.int32(0)

    def _starts(self, ref, place, itemsize, source=None) -> Iterator[Any]:
        raise NotImplementedError

    def _vector(self, step, start, itemsize, whole=False, singly=False) -> Vector:
        raise NotImplementedError

    def places(self, place, step) -> Iterator[list[tuple[Any, int]]]:
        """Yields for each of this thread's rows the columns of its elements in a step, each as an int32 and a number to add."""
        raise NotImplementedError

    def hold(self, ref, fill, slot, dtype) -> Steps:
        """Loads an operand as large as the rows, as a function of a step to its elements in `dtype`.

        `slot` is the shared memory that it was copied to, or None. Rows in registers are loaded here, at once.
        """
        raise NotImplementedError

    def load_row(self, ref) -> jax.Array:
        """Loads a value for each row of the block; one value if it has one row. It is 0 for rows that do not exist."""
        raise NotImplementedError

    def store_row(self, ref, values: jax.Array) -> None:
        """Stores a value for each row of the block."""
        raise NotImplementedError

    # From global to shared memory.

    def copy_in(self, refs, slots, fills) -> None:
        """Starts copies of the rows to `slots` in shared memory, each thread its own vectors, and fills those outside.

        A vector that lies partly in the row brings its other elements along, until `fill_around`.
        """

        def copy(copies):
            for own_vector, *where, _, last in copies:
                own_vector.among_others(last).copy(*where)
            # These are last, because a thread waits for what it loads of the array's last vector.
            for own_vector, *where, last in copies:
                own_vector.among_others(last).copy_rest(*where)

        self._each_copy(copy, refs, slots, fills)

    def fill_around(self, refs, slots, fills) -> None:
        """Fills the elements outside the row that copies brought along, after the copies have arrived."""
        del refs, slots, fills

    def _each_copy(self, function, refs, slots, fills):
        """Calls `function` with the thread's vectors, each with its register's type, destination, fill, and the array's end."""
        plan = self.plan

        def make(*operands):
            *operands, row, rank, stage = operands
            copies = []
            for ref, slot, fill in zip(operands[: len(refs)], operands[len(refs) :], fills, strict=True):
                itemsize = utils.bytewidth(ref.type.element_type)
                register = plan.layout.to_mgpu().registers_element_type(ref.type.element_type)
                (start,) = self._starts(ref, (row, rank), itemsize)
                size = plan.vector * itemsize
                last = arith.addi(address_of(ref), i64(math.prod(ref.type.shape) * itemsize - size))
                place = arith.addi(utils.thread_idx(), arith.muli(stage, constant(plan.steps * plan.threads)))
                target = shared_address(slot, arith.muli(place, constant(size)))
                for step in range(plan.steps):
                    own_vector = self._vector(step, start, itemsize)
                    copies.append((own_vector, register, target, step * plan.threads * size, fill, last))
            function(copies)

        fills = [filled(fill, ref.dtype) for ref, fill in zip(refs, fills, strict=True)]
        emit(make, (*refs, *slots), [*self.place, self.stage])

    # From memory to registers, and back.

    def load_mask(self, ref, source) -> Steps:
        """Loads a mask, as a function of a step to bools; without `ref`, flags of the elements that are of a row.

        `source` is `RowProblem.indexed` of a mask that repeats along axes of the rows; None for one as large as the rows.
        """
        if self.plan.storage != Storage.REGISTERS:
            return lambda step: self._load(ref, jnp.dtype(jnp.int8), 0, source, step)[0] != 0
        loaded = self._load(ref, jnp.dtype(jnp.int8), 0, source)
        return lambda step: loaded[step] != 0

    def inside(self) -> Callable[[Any], jax.Array | None] | None:
        """Returns a function of a step that tells which elements are of a row, or None for a step whose elements all are.

        Returns None instead of the function if all elements are.
        """
        plan = self.plan
        if plan.whole_steps == range(plan.steps):
            return None
        flags = self.flags()
        if plan.storage != Storage.REGISTERS:  # the number of a step in a loop is not known
            return flags
        return lambda step: None if step in plan.whole_steps else flags(step)

    def flags(self) -> Steps:
        """Computes which elements are of a row, for `inside`."""
        return self.load_mask(None, None)

    def store(self, ref, step, values: jax.Array) -> None:
        """Stores the results of a step."""
        itemsize = values.dtype.itemsize

        def store(ref, row, rank, *operands):
            *at, values = operands
            starts = self._starts(ref, (row, rank), itemsize)
            for register, start in zip(values.registers.flat, starts, strict=True):
                self._vector(at[0] if at else step, start, itemsize).store(register)

        scalars = self.place if isinstance(step, int) else [*self.place, step]
        emit(store, ref, scalars, [(values, self.plan.layout)])

    def _load(self, ref, dtype, fill, source=None, step=None) -> list[jax.Array]:
        """Loads an array for each step from `ref` in global memory; without `ref`, flags of the elements that are of a row.

        `dtype` is int8 for bool. With `step`, an int or a scalar int32 in a loop, one array.
        """
        plan = self.plan
        fill = filled(fill, dtype)

        def load(*operands):
            *refs, row, rank = operands[: (ref is not None) + 2]
            register = plan.layout.to_mgpu().registers_element_type(utils.dtype_to_ir_type(dtype))
            starts = list(self._starts(refs[0] if refs else None, (row, rank), dtype.itemsize, source))
            policy = None
            if source is not None:  # other blocks load it too: the L2 cache should rather keep it than what passes through
                asm = "createpolicy.fractional.L2::evict_last.b64 $0, 1.0;"
                policy = utils.inline_ptx(asm, result_types=integer(64))

            # Rows that repeat are not aligned as the rows of the scores are.
            singly = source is not None and not plan.has_whole_vectors

            def load_vector(step, start, whole=False):
                own_vector = self._vector(step, start, dtype.itemsize, whole, singly)
                return own_vector.load(register, fill, policy) if refs else own_vector.touched(register)

            if step is None:
                return [[load_vector(i, start) for start in starts] for i in range(plan.steps)]
            if isinstance(step, int):
                return [[load_vector(step, start) for start in starts]]
            is_whole = plan.looped_steps == plan.whole_steps
            return [[load_vector(operands[-1], start, is_whole) for start in starts]]

        kind = plgpu.ShapeDtypeStruct(plan.shape, dtype, layout=plan.layout)
        scalars = self.place if step is None or isinstance(step, int) else [*self.place, step]
        return emit(load, ref, scalars, results=[kind] * (plan.steps if step is None else 1))

    # Columns.

    def plus_at(self, step, values: jax.Array, columns: jax.Array, addends: jax.Array) -> jax.Array:
        """Adds an addend to the values of a step at one column of each row, an int32; to none if it is no column of the row."""
        plan = self.plan

        def add(row, rank, step, values, columns, addends):
            places = self.places((row, rank), step)
            registers = zip(values.registers.flat, places, columns.registers.flat, addends.registers.flat, strict=True)
            return [plus_where(*operands) for operands in registers]

        of_rows = plan.row_layout if columns.ndim else SPLAT
        arrays = [(values, plan.layout), (columns, of_rows), (addends, of_rows)]
        kind = plgpu.ShapeDtypeStruct(plan.shape, jnp.float32, layout=plan.layout)
        return emit(add, None, [*self.place, step], arrays, results=kind)

    def columns(self, step) -> jax.Array:
        """Returns the columns of the elements of a step, int32."""

        def make(row, rank, step):
            kind, vectors = ir.VectorType.get((self.plan.vector,), integer(32)), []
            for places in self.places((row, rank), step):
                columns = llvm.mlir_undef(kind)
                for q, (first, offset) in enumerate(places):
                    columns = llvm.insertelement(columns, arith.addi(first, constant(offset)), constant(q))
                vectors.append(columns)
            return vectors

        kind = plgpu.ShapeDtypeStruct(self.plan.shape, jnp.int32, layout=self.plan.layout)
        return emit(make, None, [*self.place, step], results=kind)


class RowStart(NamedTuple):
    """The place where a thread's vectors of a row start. Values are of MLIR."""

    address: Any
    element: Any  # the number, in the slice, of the element at the address
    exists: Any  # True if there is such a row; None if always
    length: Any  # elements of the slice


@dataclass(frozen=True)
class RowMemory(Memory):
    """Rows along the last axis, of a `RowPlan`."""

    plan: RowPlan

    def fill_around(self, refs, slots, fills) -> None:
        def fill(copies):
            for own_vector, *where, _ in copies:
                own_vector.fill_around(*where)

        # Neighbours that came along at both ends are filled, so that a loop over the row needs no predicates.
        if self.plan.is_shifted and not self.plan.has_whole_vectors:
            self._each_copy(fill, refs, slots, fills)

    def hold(self, ref, fill, slot, dtype) -> Steps:
        plan = self.plan
        load = functools.partial(plgpu.load, layout=plan.layout, optimized=False)
        held = functools.partial(Elements, of=ref.dtype, dtype=dtype, plan=plan)
        if slot is not None:
            return held(lambda step: load(slot.at[self._entry(step)]))
        if self.exact:

            def at(step):
                return load(self._at(ref, step))

            if plan.storage == Storage.REGISTERS:
                at = list(map(at, range(plan.steps))).__getitem__
            # Two elements by each operation: a log-sum-exp of bfloat16 is 2 to 3% faster, a gradient of 8192 columns 3% slower.
            return (lambda step: at(step).astype(dtype)) if plan.is_stored else held(at)
        if plan.storage == Storage.REGISTERS:
            return held(self._load(ref, ref.dtype, fill).__getitem__)
        return self.read(ref, fill, dtype)

    def read(self, ref, fill, dtype) -> Elements:
        """Reads an operand as large as the rows from global memory, whenever a step of it is asked for."""
        if self.plan.is_joined:
            return Elements(functools.partial(self._load_joined, ref, fill), ref.dtype, dtype, self.plan)
        return Elements(lambda step: self._load(ref, ref.dtype, fill, step=step)[0], ref.dtype, dtype, self.plan)

    def flags(self) -> Steps:
        if self.plan.is_joined:
            return lambda step: self._inside_joined(step) != 0
        return super().flags()

    def store(self, ref, step, values: jax.Array) -> None:
        if self.exact:
            compat.store(self._at(ref, step), values)
        else:
            super().store(ref, step, values)

    def load_row(self, ref) -> jax.Array:
        plan, itemsize = self.plan, ref.dtype.itemsize
        if plan.takes_block:
            return ref[self.row]
        if self.exact:
            return plgpu.load(ref.at[pl.ds(self.row, plan.block_rows)], layout=plan.row_layout, optimized=False)

        def load(ref, row):
            register = plan.row_layout.to_mgpu().registers_element_type(ref.type.element_type)
            return [entry.load(register) for entry in self._row_entries(ref, row, itemsize)]

        kind = plgpu.ShapeDtypeStruct((plan.block_rows,), ref.dtype, layout=plan.row_layout)
        return emit(load, ref, [self.row], results=kind)

    def store_row(self, ref, values: jax.Array) -> None:
        plan, itemsize = self.plan, values.dtype.itemsize
        if plan.takes_block and self.exact:
            ref[self.row] = values
            return
        if plan.takes_block:
            tickets.store_by_first_thread(ref, self.row, values)
            return
        if self.exact:
            compat.store(ref.at[pl.ds(self.row, plan.block_rows)], values)
            return

        def store(ref, row, values):
            first = compare("eq", arith.remui(utils.thread_idx(), constant(plan.lanes)), constant(0))
            for register, entry in zip(values.registers.flat, self._row_entries(ref, row, itemsize), strict=True):
                Vector(entry.address, 0, itemsize, both(first, entry.inside)).store(register)

        emit(store, ref, [self.row], [(values, plan.row_layout)])

    def places(self, place, step) -> Iterator[list[tuple[Any, int]]]:
        plan = self.plan
        for start in self._starts(None, place, 1):
            first = start.element
            if plan.blocks > 1:
                first = arith.addi(first, self._slice_start(place[1]))
            first = arith.addi(first, arith.muli(step, constant(plan.threads * plan.vector)))
            yield [(first, q) for q in range(plan.vector)]

    # Where rows and slices start.

    def _at(self, ref, step):
        """Returns the part of an array that the warpgroup has in a step."""
        plan = self.plan
        if plan.takes_block:
            return ref.at[(self.row * plan.steps + step) * plan.warpgroups + self.warpgroup()]
        width = plan.shape[1]
        return ref.at[pl.ds(self.row, plan.block_rows), pl.ds(step * width, width)]

    def _entry(self, step):
        """Returns the number, in a slot of shared memory, of the warpgroup's part of a step."""
        return (self.stage * self.plan.steps + step) * self.plan.warpgroups + self.warpgroup()

    def _slice_start(self, rank):
        plan = self.plan
        lines = arith.addi(arith.muli(rank, constant(plan.slice_lines)), arith.minsi(rank, constant(plan.n_longer_slices)))
        return arith.muli(lines, constant(plan.line))

    def _starts(self, ref, place, itemsize, source=None) -> Iterator[RowStart]:
        """Yields for each of a thread's rows where its vectors start."""
        plan = self.plan
        position = utils.thread_idx() if plan.takes_block else arith.remui(utils.thread_idx(), constant(plan.lanes))
        element = first = arith.muli(position, constant(plan.vector))
        length = constant(plan.cols)
        if plan.blocks > 1:
            slice_start = self._slice_start(place[1])
            is_longer = arith.extui(length.type, compare("slt", place[1], constant(plan.n_longer_slices)))
            own_lines = arith.addi(is_longer, constant(plan.slice_lines))
            first = arith.addi(first, slice_start)
            left = arith.maxsi(arith.subi(length, slice_start), constant(0))
            length = arith.minsi(left, arith.muli(own_lines, constant(plan.line)))
        for own_row, inside in [(place[0], None)] if plan.takes_block else self._own_rows(place[0]):
            array_row = own_row if source is None else placed(source[0], own_row, plan.cols)
            start, in_slice = arith.addi(arith.muli(i64(array_row), i64(plan.cols)), i64(first)), element
            if plan.is_shifted:
                before = self._before(own_row)
                start = arith.subi(start, i64(before))
                in_slice = arith.subi(element, before)
            base = i64(0) if ref is None else address_of(ref)
            yield RowStart(arith.addi(base, arith.muli(start, i64(itemsize))), in_slice, inside, length)

    def _before(self, row):
        """Returns the number of elements from the start of its first line to a row, int32."""
        line = self.plan.line  # a power of two, so what overflows does not matter
        return arith.remui(arith.muli(row, constant(self.plan.cols % line)), constant(line))

    def _vector(self, step, start: RowStart, itemsize, whole=False, singly=False) -> Vector:
        """Returns the vector that a thread has in a step, an int or an int32 in a loop.

        `whole` says that all threads have whole vectors then, `singly` that elements are touched one by one.
        """
        plan = self.plan
        address, first, exists, length = start
        if isinstance(step, int):
            made = functools.partial(Vector, address, step * plan.step_cols * itemsize, itemsize)
            whole = whole or step in plan.whole_steps
            first = arith.addi(first, constant(step * plan.step_cols))
        else:
            further = arith.muli(step, constant(plan.step_cols))
            made = functools.partial(Vector, arith.addi(address, arith.muli(i64(further), i64(itemsize))), 0, itemsize)
            first = arith.addi(first, further)

        def inside_each():
            return [compare("ult", arith.addi(first, constant(q)), length) for q in range(plan.vector)]

        if singly:
            return made(None, utils.c(1, integer(1)), inside_each)
        if whole:
            return made(exists)
        if not plan.is_shifted:
            return made(both(exists, compare("slt", first, length)))
        last = constant(plan.vector - 1)
        most = arith.maxsi(arith.subi(length, last), constant(0))
        complete = compare("ult", first, most)  # a negative number counts as a large one
        if plan.has_whole_vectors:
            return made(complete)
        touched = compare("ult", arith.addi(first, last), arith.addi(length, last))
        return made(complete, arith.xori(complete, touched), inside_each)

    def _row_entries(self, ref, row, itemsize):
        for own_row, inside in self._own_rows(row):
            yield Vector(arith.addi(address_of(ref), arith.muli(i64(own_row), i64(itemsize))), 0, itemsize, inside)

    def _own_rows(self, row):
        """Yields the rows inside a warp whose elements this thread holds, and whether each row exists, None if always."""
        plan = self.plan
        first = arith.addi(row, arith.divui(utils.thread_idx(), constant(plan.lanes)))
        for i in range(plan.rows_per_lanes):
            here = arith.addi(first, constant(i * WARPS * (WARP // plan.lanes)))
            yield here, (None if self.count % plan.block_rows == 0 else compare("ult", here, constant(self.count)))

    # Rows that start inside a line: steps of a loop, and sums, in the order of the row.

    def _load_joined(self, ref, fill, step) -> jax.Array:
        """Loads a step whose elements before the slice's start are replaced by those of the next step at the same place.

        So each step has equally many elements of the slice. In a loop a vector before the slice is loaded as it is: it lies in
        the array, which starts with a line.
        """
        plan, bits, itemsize = self.plan, filled(fill, ref.dtype), ref.dtype.itemsize

        def load(ref, row, rank, *steps):
            register = plan.layout.to_mgpu().registers_element_type(ref.type.element_type)
            (start,) = self._starts(ref, (row, rank), itemsize)
            following = arith.addi(steps[0], constant(1)) if steps else step + 1
            current, further = (
                self._vector(k, start, itemsize, bool(steps)).load(register, bits)
                for k in (steps[0] if steps else step, following)
            )
            return [self.join(row, current, further)]

        kind = plgpu.ShapeDtypeStruct(plan.shape, ref.dtype, layout=plan.layout)
        return emit(load, ref, [*self.place, *([] if isinstance(step, int) else [step])], results=kind)

    def join(self, row, current, further):
        """Returns a thread's vector of a step, `current`, whose elements before the row are replaced by those of `further`."""
        words = words_of(current.type)
        per_word = self.plan.vector // words.shape[0]  # elements
        first = arith.subi(arith.muli(utils.thread_idx(), constant(self.plan.vector)), self._before(row))
        joined = llvm.mlir_undef(words)
        for k in range(words.shape[0]):
            kept = constant(0)
            for q in range(per_word):
                inside = compare("sge", arith.addi(first, constant(k * per_word + q)), constant(0))
                ones = constant(-1) if per_word == 1 else constant(0xFFFF << 16 * q)
                kept = arith.ori(kept, arith.select(inside, ones, constant(0)))
            a, b = (llvm.extractelement(vector.bitcast(words, part), constant(k)) for part in (current, further))
            word = arith.ori(arith.andi(a, kept), arith.andi(b, arith.xori(kept, constant(-1))))
            joined = llvm.insertelement(joined, word, constant(k))
        return vector.bitcast(current.type, joined)

    def _inside_joined(self, step) -> jax.Array:
        """Flags the elements of a step, as `_load_joined` gives them, that are of the row: int8. In a loop all are."""
        plan = self.plan

        def make(row, rank):
            register = plan.layout.to_mgpu().registers_element_type(integer(8))
            if not isinstance(step, int):
                return [utils.c(1, register)]
            (start,) = self._starts(None, (row, rank), 1)
            flags = utils.c(0, register)
            for q in range(plan.vector):
                element = arith.addi(start.element, constant(q))
                is_later = compare("slt", element, constant(0))
                element = arith.addi(element, arith.select(is_later, constant(plan.step_cols), constant(0)))
                inside = compare("ult", arith.addi(element, constant(step * plan.step_cols)), start.length)
                flags = llvm.insertelement(flags, arith.extui(register.element_type, inside), constant(q))
            return [flags]

        kind = plgpu.ShapeDtypeStruct(plan.shape, jnp.int8, layout=plan.layout)
        return emit(make, None, self.place, results=kind)

    def sums_in_order(self, scratch, values: jax.Array) -> jax.Array:
        """Sums `values`, accumulators of a step's elements, by vectors in the order of the slice: `[4, 32]`, one a thread.

        The sums are of vectors that are counted from the first element of the slice, while a thread's vectors start where
        memory is aligned, up to a line before it. So a thread's vector has the end of one such sum and the start of the next.
        The thread before hands on its part of the first one, and that sum goes on from there. Then each sum moves to the thread
        of its number. Both ways lead through `scratch`, of `RowPlan.order_shape`. Threads before the slice's start get the last
        sums.
        """
        plan = self.plan

        def move(scratch, row, values):
            threads, size = constant(plan.threads), constant(plan.vector)
            before = self._before(row)
            inside = arith.remui(before, size)  # elements of a vector before the boundary between two sums
            (register,) = values.registers.flat
            zero = arith.constant(register.type.element_type, 0.0)

            def add(total, kind, boundary):
                for q in range(plan.vector):
                    value = llvm.extractelement(register, constant(q))
                    if boundary is not None:
                        value = arith.select(compare(kind, constant(q), boundary), value, zero)
                    total = arith.addf(total, value)
                return total

            def exchange(value, first, distance):
                """Returns the value of the thread that is `distance` further, through the part `first` of the scratch."""
                at = arith.addi(utils.thread_idx(), constant(first * plan.threads))
                asm = "st.shared.f32 [$0], $1; bar.sync 0;"
                address = shared_address(scratch, arith.muli(at, constant(4)))
                utils.inline_ptx(asm, address, value, has_side_effects=True, convergent=True)
                other = arith.remui(arith.addi(utils.thread_idx(), distance), threads)
                other = arith.addi(other, constant(first * plan.threads))
                address = shared_address(scratch, arith.muli(other, constant(4)))
                kind = register.type.element_type
                return utils.inline_ptx("ld.shared.f32 $0, [$1];", address, result_types=kind, has_side_effects=True)

            vectors = arith.divui(before, size)
            if plan.has_whole_vectors:
                utils.inline_ptx("bar.sync 0;", has_side_effects=True, convergent=True)  # others may still read earlier sums
                total = exchange(add(zero, None, None), 0, vectors)
            else:
                head = exchange(add(zero, "uge", inside), 0, arith.subi(threads, constant(1)))
                total = exchange(add(head, "ult", inside), 1, arith.addi(vectors, constant(1)))
            return [vector.broadcast(ir.VectorType.get((1,), total.type), total)]

        kind = plgpu.ShapeDtypeStruct((WARPS, WARP), jnp.float32, layout=of_threads())
        return emit(move, scratch, [self.row], [(values, plan.layout)], kind)


@dataclass(frozen=True)
class CopyRing:
    """Steps of a loop on their way from global memory: a thread copies its own vectors to shared memory, and reads them there.

    So it waits for no other thread. What was read of a slot must have been used before the slot is copied to again.
    """

    memory: RowMemory
    ref: Any  # array that is read
    slots: Any  # `[size * threads * vector]` of its dtype, in shared memory; vectors must have 4, 8 or 16 bytes
    size: int  # number of steps that it holds

    def copy(self, first, count: int, left) -> None:
        """Starts a group of copies: of `count` steps from `first` on if `left` is more than 0, else of none."""
        plan, itemsize = self.memory.plan, self.ref.dtype.itemsize

        def copy(ref, slots, row, rank, first, left):
            register = plan.layout.to_mgpu().registers_element_type(ref.type.element_type)
            (begin,) = self.memory._starts(ref, (row, rank), itemsize)
            slot = arith.remui(first, constant(self.size))
            with utils.when(compare("sgt", left, constant(0))):
                for k in range(count):
                    step = self.memory._vector(arith.addi(first, constant(k)), begin, itemsize, whole=True)
                    step.copy(register, self._place(slots, slot, k), 0)

        emit(copy, (self.ref, self.slots), [*self.memory.place, first, left])
        sync.end_copies()

    def load(self, first, count: int) -> list[jax.Array]:
        """Loads `count` steps, as `RowMemory.read` gives them, once their copies have arrived."""
        plan = self.memory.plan

        def load(slots, row, rank, first):
            register = plan.layout.to_mgpu().registers_element_type(slots.type.element_type)
            words, slot = words_of(register), arith.remui(first, constant(self.size))
            vectors = []
            for k in range(count + plan.is_joined):
                loaded = load_words(self._place(slots, slot, k), 0, None, words, space="shared")
                vectors.append(vector.bitcast(register, loaded))
            if plan.is_joined:
                vectors = [self.memory.join(row, *pair) for pair in itertools.pairwise(vectors)]
            return [[register] for register in vectors]

        kind = plgpu.ShapeDtypeStruct(plan.shape, self.ref.dtype, layout=plan.layout)
        return emit(load, self.slots, [*self.memory.place, first], results=[kind] * count)

    def _place(self, slots, slot, k: int):
        """Returns the place of the thread's vector of the step that is `k` further than the step in this slot."""
        plan = self.memory.plan
        size = plan.vector * utils.bytewidth(slots.type.element_type)
        slot = arith.addi(slot, constant(k))
        slot = arith.select(compare("uge", slot, constant(self.size)), arith.subi(slot, constant(self.size)), slot)
        place = arith.addi(arith.muli(slot, constant(plan.threads)), utils.thread_idx())
        return shared_address(slots, arith.muli(place, constant(size)))


def filled(fill, dtype) -> int:
    """Returns a word of 32 bits that is filled with this value."""
    return int.from_bytes(np.full(4 // dtype.itemsize, fill, dtype).tobytes(), "little")


def placed(triples: Sequence[int], index, size: int = 1):
    """Returns the place in an array, in units of `size`, for an index, by the triples of `row_problem.indexed`; MLIR values."""
    total = constant(0)
    for divisor, modulus, stride in itertools.batched(triples, 3):
        part = arith.divui(index, constant(divisor))
        if modulus:
            part = arith.remui(part, constant(modulus))
        total = arith.addi(total, arith.muli(part, constant(stride // size)))
    return total
