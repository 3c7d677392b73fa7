"""Short rows in shared memory, for kernels in which a warp has some rows for itself, and each of them a lane or a few.

Vectors are copied as they follow each other in global memory, by all lanes. In shared memory rows are as far apart as it takes
for lanes that touch the same place of different rows to meet in no bank.
"""

from dataclasses import dataclass
from typing import Any

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import WARP, WARPS, both, compare, constant, i64, integer, utils

MOST_COLS = 512  # of a row
MOST = 16  # entries of a row that are found
VECTOR = 16  # bytes
_SHARED = 64 * 1024  # bytes that the rows of a block take at most


def serves(cols: int, itemsize: int) -> bool:
    """Whether rows are short enough, and consist of whole vectors."""
    return cols <= MOST_COLS and cols * itemsize % VECTOR == 0


def rows_of_warp(bytes_of_row: int) -> int:
    """So many that those of the four warps of a block fit into shared memory several times."""
    return next((count for count in (32, 16) if WARPS * count * bytes_of_row <= _SHARED), 8)


@dataclass(frozen=True)
class Plan:
    """How the rows of an array are spread over warps and lanes.

    Attributes:
      rows: of the array.
      cols: of a row.
      itemsize: bytes of an element.
      of_warp: rows of a warp.
      more: bytes for each row that fit into the place of its warp at least.
    """

    rows: int
    cols: int
    itemsize: int
    of_warp: int
    more: int = 0

    @property
    def size(self) -> int:
        """Elements of a vector."""
        return VECTOR // self.itemsize

    @property
    def vectors(self) -> int:
        """Of a row."""
        return self.cols // self.size

    @property
    def lanes(self) -> int:
        """That have a row together."""
        return WARP // self.of_warp

    @property
    def stride(self) -> int:
        """Bytes from one row to the next: `lanes` times an odd number of vectors."""
        return VECTOR * (self.vectors + (self.lanes - self.vectors) % (2 * self.lanes))

    @property
    def bytes(self) -> int:
        """Of a warp."""
        return self.of_warp * max(self.stride, self.more)

    @property
    def blocks(self) -> int:
        return -(-self.rows // (self.of_warp * WARPS))


class Warp:
    """A warp's rows, as MLIR values, which are int32 but for those said otherwise.

    Attributes:
      lane: of this thread.
      first: the first row.
      row: which of the warp's rows this lane has.
      part: which of the lanes that have it this is.
      start: where the first row is in shared memory.
      own: where the row of this lane is there.
      vector: where the first of this lane's vectors of it is. The others are `lanes` vectors apart.
      valid: how many rows are there, negative behind the last one; None where it is always all.
    """

    def __init__(self, plan: Plan, shared, block):
        self.plan, thread = plan, utils.thread_idx()
        warp = arith.divui(thread, constant(WARP))
        self.lane = arith.remui(thread, constant(WARP))
        self.first = arith.muli(arith.addi(arith.muli(block, constant(WARPS)), warp), constant(plan.of_warp))
        self.start = ptx.shared_address(shared, arith.muli(warp, constant(plan.bytes)))
        self.row = arith.divui(self.lane, constant(plan.lanes))
        self.part = arith.remui(self.lane, constant(plan.lanes))
        self.own = arith.addi(self.start, arith.muli(self.row, constant(plan.stride)))
        self.vector = arith.addi(self.own, arith.muli(self.part, constant(VECTOR)))
        self.valid: Any = None
        if plan.rows % (plan.of_warp * WARPS):
            self.valid = arith.minsi(arith.subi(constant(plan.rows), self.first), constant(plan.of_warp))

    @property
    def is_there(self):
        """Whether this lane has a row; None for always."""
        return None if self.valid is None else compare("slt", self.row, self.valid)

    def address(self, ref, size: int):
        """Where the first row is in global memory, of an array that has `size` bytes for each: int64."""
        return arith.addi(ptx.address_of(ref), arith.muli(i64(self.first), i64(size)))

    def vectors(self):
        """The vectors of a lane's row: their bytes from the first one on, and whether they are there, None for always."""
        plan = self.plan
        for number in range(0, plan.vectors, plan.lanes):
            left = plan.vectors - number
            yield number * VECTOR, None if left >= plan.lanes else compare("ult", self.part, constant(left))

    def fetch(self, ref) -> None:
        """Copies the rows of an array to shared memory, where they are after `arrived`."""
        source = arith.addi(self.address(ref, self.plan.vectors * VECTOR), i64(arith.muli(self.lane, constant(VECTOR))))
        for start, target, offset, inside in self._copies():
            asm = f"cp.async.cg.shared.global [$0+{offset}], [$1+{start}], {VECTOR};"
            utils.inline_ptx(asm, target, source, predicate=inside, has_side_effects=True)

    def arrived(self) -> None:
        """Waits for what was copied, by all lanes."""
        utils.inline_ptx("cp.async.wait_all;", has_side_effects=True, convergent=True)
        utils.warp_barrier()

    def store(self, ref) -> None:
        """Copies the rows in shared memory to an array."""
        target = arith.addi(self.address(ref, self.plan.vectors * VECTOR), i64(arith.muli(self.lane, constant(VECTOR))))
        for start, source, offset, inside in self._copies():
            ptx.store_words(target, start, inside, ptx.load_words(source, offset, inside, vector_of(4, 32), space="shared"))

    def store_packed(self, ref, size: int, offset: int) -> None:
        """Copies to an array what is in the warp's place in shared memory, `size` bytes for each row, without gaps.

        It starts `offset` bytes behind the start of the place, and `size` is a multiple of that of an element.
        """
        plan, lanes = self.plan, arith.muli(self.lane, constant(VECTOR))
        source, target = arith.addi(self.start, lanes), arith.addi(self.address(ref, size), i64(lanes))
        count, total, end = plan.of_warp * size // VECTOR, None, constant(plan.of_warp * size // VECTOR)
        if self.valid is not None:
            total = arith.muli(self.valid, constant(size))
            end = arith.divsi(total, constant(VECTOR))
        for first in range(0, count, WARP):
            inside = None
            if total is not None or first + WARP > count:
                inside = compare("slt", arith.addi(self.lane, constant(first)), end)
            words = ptx.load_words(source, offset + first * VECTOR, inside, vector_of(4, 32), space="shared")
            ptx.store_words(target, first * VECTOR, inside, words)
        if total is not None and size % VECTOR:  # less than a vector, of the last rows
            width = utils.bytewidth(ref.type.element_type)
            place = arith.addi(arith.muli(end, constant(VECTOR)), arith.muli(self.lane, constant(width)))
            inside = both(compare("sge", end, constant(0)), compare("slt", place, total))
            one = vector_of(1, 8 * width)
            words = ptx.load_words(arith.addi(self.start, place), offset, inside, one, space="shared")
            ptx.store_words(arith.addi(self.address(ref, size), i64(place)), 0, inside, words)

    def _copies(self):
        """The vectors that this lane copies, of all rows of the warp.

        Of each its byte in global memory, behind that of the lane's first one; an address in shared memory, and bytes from
        there; and whether it is there, None for always. Bytes are constants.
        """
        plan = self.plan
        of_row, count = plan.vectors, plan.of_warp * plan.vectors
        for first in range(0, count, WARP):
            own, inside = arith.addi(self.lane, constant(first)), None
            if self.valid is not None:
                inside = compare("slt", own, arith.muli(self.valid, constant(of_row)))
            elif first + WARP > count:
                inside = compare("slt", own, constant(count))
            if of_row * VECTOR == plan.stride:  # rows follow each other here, too
                row, column, offset = constant(0), self.lane, first * VECTOR
            elif WARP % of_row == 0:
                row, column = (operation(self.lane, constant(of_row)) for operation in (arith.divui, arith.remui))
                offset = first // of_row * plan.stride
            elif of_row % WARP == 0:
                row, column, offset = constant(0), self.lane, first // of_row * plan.stride + first % of_row * VECTOR
            else:
                row, column = (operation(own, constant(of_row)) for operation in (arith.divui, arith.remui))
                offset = 0
            address = arith.addi(arith.muli(row, constant(plan.stride)), arith.muli(column, constant(VECTOR)))
            yield first * VECTOR, arith.addi(self.start, address), offset, inside


def vector_of(count: int, bits: int):
    """The type of so many words."""
    return ir.VectorType.get((count,), integer(bits))


def store_all(address, words, inside, offset=0):
    """Stores words to shared memory from an address on, as many at a time as their number allows."""
    width, at_once = words[0].type.width, next(n for n in (4, 2, 1) if len(words) % n == 0)
    for start in range(0, len(words), at_once):
        together = llvm.mlir_undef(vector_of(at_once, width))
        for q in range(at_once):
            together = llvm.insertelement(together, words[start + q], constant(q))
        ptx.store_words(address, offset + start * width // 8, inside, together, "shared")
