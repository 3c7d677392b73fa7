"""Short rows in shared memory, for kernels in which each lane of a warp, or a few lanes, have a row: memory and arithmetic.

A warp copies 32 rows to shared memory, 16 or 8 where rows are long. Its lanes copy vectors in the order of global memory, so
that they touch neighbouring bytes. A lane then goes through its row alone, or every second or fourth vector of it. Rows are
padded so that lanes which touch one place of different rows meet in no bank.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax._gpu.emit import (
    WARP,
    WARPS,
    address_of,
    both,
    compare,
    constant,
    i64,
    integer,
    load_words,
    shared_address,
    store_words,
    utils,
)

MAX_COLS = 512  # of a row
MAX_K = 16  # entries of a row that are wanted
VECTOR = 16  # bytes
_MAX_BLOCK_BYTES = 64 * 1024  # so that three blocks fit on a multiprocessor


def serves(cols: int, itemsize: int) -> bool:
    """Tells whether rows are short enough, and consist of whole vectors."""
    return cols <= MAX_COLS and cols * itemsize % VECTOR == 0


@dataclass(frozen=True)
class StagedRows:
    """Distributes the rows of an array over warps and lanes, and says where a warp keeps its rows."""

    rows: int
    cols: int
    itemsize: int
    rows_per_warp: int  # a power of two from 8 to 32
    min_row_bytes: int = 0  # bytes for each row that the place of a warp has at least

    @functools.cached_property
    def vectors(self) -> int:
        """Vectors of a row."""
        return self.cols * self.itemsize // VECTOR

    @functools.cached_property
    def lanes(self) -> int:
        """Lanes that share a row."""
        return WARP // self.rows_per_warp

    @functools.cached_property
    def lane_bits(self) -> list[int]:
        """Distances of the exchanges between the lanes that share a row."""
        return [1 << i for i in range(self.lanes.bit_length() - 1)]

    @functools.cached_property
    def stride(self) -> int:
        """Bytes from one row to the next: `lanes` times an odd number of vectors, so that lanes meet in no bank."""
        return VECTOR * (self.vectors + (self.lanes - self.vectors) % (2 * self.lanes))

    @functools.cached_property
    def warp_bytes(self) -> int:
        """Bytes of shared memory that a warp has for its rows."""
        return self.rows_per_warp * max(self.stride, self.min_row_bytes)

    @property
    def block_bytes(self) -> int:
        """Bytes of shared memory that a block has for its rows."""
        return WARPS * self.warp_bytes

    @property
    def blocks(self) -> int:
        """Blocks of the grid."""
        return -(-self.rows // (self.rows_per_warp * WARPS))

    def describe(self) -> str:
        return f"{self.rows_per_warp} rows a warp, {self.lanes} {'lanes' if self.lanes > 1 else 'lane'} a row"


def rows_per_warp(row_bytes: int) -> int:
    """Returns the most rows of a warp with which the rows of a block's four warps fit into shared memory several times."""
    return next((count for count in (32, 16) if WARPS * count * row_bytes <= _MAX_BLOCK_BYTES), 8)


class WarpRows:
    """The rows of a warp in a kernel. Attributes other than `plan` are MLIR values, int32; addresses are in shared memory."""

    def __init__(self, plan: StagedRows, shared, block):
        self.plan, thread = plan, utils.thread_idx()
        warp = arith.divui(thread, constant(WARP))
        self.lane = arith.remui(thread, constant(WARP))
        # Number of the warp's first row, and its address.
        self.first = arith.muli(arith.addi(arith.muli(block, constant(WARPS)), warp), constant(plan.rows_per_warp))
        self.start = shared_address(shared, arith.muli(warp, constant(plan.warp_bytes)))
        # This lane's row in the warp, the lane's number among the lanes that share the row, and the row's address.
        self.row = arith.divui(self.lane, constant(plan.lanes))
        self.part = arith.remui(self.lane, constant(plan.lanes))
        self.row_start = arith.addi(self.start, arith.muli(self.row, constant(plan.stride)))
        # Address of the lane's first vector. Its others are `lanes` vectors apart.
        self.vector = arith.addi(self.row_start, arith.muli(self.part, constant(VECTOR)))
        # Number of the warp's rows that exist, not positive behind the last one; None if it is always all.
        self.valid: Any = None
        if plan.rows % (plan.rows_per_warp * WARPS):
            self.valid = arith.minsi(arith.subi(constant(plan.rows), self.first), constant(plan.rows_per_warp))

    @property
    def is_valid(self):
        """True if this lane's row exists; None if it always does."""
        return None if self.valid is None else compare("slt", self.row, self.valid)

    def address(self, ref, row_bytes: int):
        """Returns the address, int64, of the warp's first row in an array in global memory, of rows of `row_bytes`."""
        return arith.addi(address_of(ref), arith.muli(i64(self.first), i64(row_bytes)))

    # Between global and shared memory.

    def fetch(self, ref) -> None:
        """Starts to copy the rows of an array to shared memory."""
        self._copy(ref, is_fetched=True)

    def await_rows(self) -> None:
        """Waits until all lanes have what the warp fetches."""
        utils.inline_ptx("cp.async.wait_all;", has_side_effects=True, convergent=True)
        utils.warp_barrier()

    def store(self, ref) -> None:
        """Copies the rows in shared memory to an array."""
        self._copy(ref, is_fetched=False)

    def _copy(self, ref, is_fetched: bool) -> None:
        """Copies rows from global to shared memory, or back: the lanes copy vectors in the order of global memory."""
        plan, words = self.plan, words_type(4, 32)
        row_vectors, count = plan.vectors, plan.rows_per_warp * plan.vectors
        in_global = arith.addi(self.address(ref, row_vectors * VECTOR), i64(arith.muli(self.lane, constant(VECTOR))))
        for first in range(0, count, WARP):
            vector, inside = arith.addi(self.lane, constant(first)), None
            if self.valid is not None:
                inside = compare("slt", vector, arith.muli(self.valid, constant(row_vectors)))
            elif first + WARP > count:
                inside = compare("slt", vector, constant(count))
            # Constants that instructions hold are apart from addresses: `offset` from the lane's first vector.
            if row_vectors * VECTOR == plan.stride:  # rows follow each other in shared memory, too
                row, column, offset = constant(0), self.lane, first * VECTOR
            elif WARP % row_vectors == 0:
                row, column = (operation(self.lane, constant(row_vectors)) for operation in (arith.divui, arith.remui))
                offset = first // row_vectors * plan.stride
            elif row_vectors % WARP == 0:
                row, column = constant(0), self.lane
                offset = first // row_vectors * plan.stride + first % row_vectors * VECTOR
            else:
                row, column = (operation(vector, constant(row_vectors)) for operation in (arith.divui, arith.remui))
                offset = 0
            in_shared = arith.addi(arith.muli(row, constant(plan.stride)), arith.muli(column, constant(VECTOR)))
            in_shared = arith.addi(self.start, in_shared)
            if is_fetched:
                asm = f"cp.async.cg.shared.global [$0+{offset}], [$1+{first * VECTOR}], {VECTOR};"
                utils.inline_ptx(asm, in_shared, in_global, predicate=inside, has_side_effects=True)
            else:
                store_words(in_global, first * VECTOR, inside, load_words(in_shared, offset, inside, words, space="shared"))

    def store_packed(self, ref, row_bytes: int, offset: int) -> None:
        """Copies to an array what the warp has in its place in shared memory, `row_bytes` for each row without gaps.

        It starts `offset` bytes behind the start of the place. `row_bytes` is a multiple of an element's bytes.
        """
        plan, lanes, vector = self.plan, arith.muli(self.lane, constant(VECTOR)), words_type(4, 32)
        source, target = arith.addi(self.start, lanes), arith.addi(self.address(ref, row_bytes), i64(lanes))
        count = plan.rows_per_warp * row_bytes // VECTOR
        total, end = None, constant(count)
        if self.valid is not None:
            total = arith.muli(self.valid, constant(row_bytes))
            end = arith.divsi(total, constant(VECTOR))
        for first in range(0, count, WARP):
            inside = None
            if total is not None or first + WARP > count:
                inside = compare("slt", arith.addi(self.lane, constant(first)), end)
            words = load_words(source, offset + first * VECTOR, inside, vector, space="shared")
            store_words(target, first * VECTOR, inside, words)
        if total is not None and row_bytes % VECTOR:  # less than a vector, of the last rows
            width = utils.bytewidth(ref.type.element_type)
            place = arith.addi(arith.muli(end, constant(VECTOR)), arith.muli(self.lane, constant(width)))
            inside = both(compare("sge", end, constant(0)), compare("slt", place, total))
            words = load_words(arith.addi(self.start, place), offset, inside, words_type(1, 8 * width), space="shared")
            store_words(arith.addi(self.address(ref, row_bytes), i64(place)), 0, inside, words)

    # This lane's row in shared memory.

    def has_vector(self, first: int):
        """True if this lane has a vector among those from number `first` of the row on, one for each lane; None if it does."""
        left = self.plan.vectors - first
        return None if left >= self.plan.lanes else compare("ult", self.part, constant(left))

    def load_vector(self, first: int, inside, fill: int = 0):
        """Loads this lane's vector among those from number `first` on as four words, those of `fill` if it is not `inside`."""
        return load_words(self.vector, first * VECTOR, inside, words_type(4, 32), fill, space="shared")

    def load_floats(self, dtype, first: int, inside, fill: int = 0):
        """Loads the elements of the same vector as float32."""
        vector = self.load_vector(first, inside, fill)
        if dtype.itemsize == 4:
            return [arith.bitcast(ir.F32Type.get(), llvm.extractelement(vector, constant(q))) for q in range(4)]
        return [value for q in range(4) for value in widen(dtype, llvm.extractelement(vector, constant(q)))]


def words_type(count: int, bits: int):
    """Returns the type of a vector of words."""
    return ir.VectorType.get((count,), integer(bits))


def store_to_shared(address, words, inside, offset=0) -> None:
    """Stores words to shared memory from an address on, the most at a time by which their number is divisible."""
    width, at_once = words[0].type.width, next(n for n in (4, 2, 1) if len(words) % n == 0)
    kind = words_type(at_once, width)
    for start in range(0, len(words), at_once):
        vector = llvm.mlir_undef(kind)
        for q in range(at_once):
            vector = llvm.insertelement(vector, words[start + q], constant(q))
        store_words(address, offset + start * width // 8, inside, vector, "shared")


# Float32 numbers of a lane, as MLIR values: what `online` is for arrays.

_LOG2E = math.log2(math.e)


def shift(m):
    """Computes `online.shift`: 0 for what is infinite, or NaN."""
    text = "abs.f32 size, $1; setp.lt.f32 is, size, 0f7F800000; selp.f32 $0, $1, 0f00000000, is;"
    return utils.inline_ptx(f"{{ .reg .pred is; .reg .f32 size; {text} }}", m, result_types=m.type)


def exponential(x):
    """Computes exp(x)."""
    scaled = arith.mulf(x, arith.constant(x.type, _LOG2E))
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", scaled, result_types=x.type)


def normalizer(d):
    """Computes the factor 1 / d of weights whose sum is `d`: NaN if the sum is infinite."""
    text = "setp.lt.f32 is, $1, 0f7F800000; selp.f32 $0, $1, 0f7FFFFFFF, is;"
    return reciprocal(utils.inline_ptx(f"{{ .reg .pred is; {text} }}", d, result_types=d.type))


def reciprocal(d):
    """Computes 1 / d."""
    return utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", d, result_types=d.type)


def sum_of(values):
    """Adds up by halves, so that few numbers are rounded one after another."""
    half = len(values) // 2
    return values[0] if not half else arith.addf(sum_of(values[:half]), sum_of(values[half:]))


def widen(dtype, word):
    """Returns the elements of a word as float32."""
    if dtype.itemsize == 4:
        return [as_float(dtype, word)]
    if dtype == jnp.float16:
        return [as_float(dtype, half) for half in (word, arith.shrui(word, constant(16)))]
    return [as_float(dtype, half) for half in (arith.shli(word, constant(16)), arith.andi(word, constant(-(2**16))))]


def as_float(dtype, bits):
    """Returns the float32 of the bits of an element: of float16 in the lower half of a word, of bfloat16 in the upper half."""
    if dtype != jnp.float16:
        return arith.bitcast(ir.F32Type.get(), bits)
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return utils.inline_ptx(text, bits, result_types=ir.F32Type.get())


def floats_above(dtype, words):
    """Returns the float32 of elements, the bits of 16-bit ones in the upper halves of words."""
    return [as_float(dtype, arith.shrui(bits, constant(16)) if dtype == jnp.float16 else bits) for bits in words]


def narrow(values, kind):
    """Returns the bits of float32 values in another type; of an even number of 16-bit values, two in a word."""
    if utils.bitwidth(kind) == 32:
        return [arith.bitcast(integer(32), value) for value in values]
    if len(values) % 2:
        return [arith.bitcast(integer(16), arith.truncf(kind, value)) for value in values]
    text = f"cvt.rn.{'bf16x2' if kind == ir.BF16Type.get() else 'f16x2'}.f32 $0, $2, $1;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [utils.inline_ptx(text, *pair, result_types=integer(32)) for pair in pairs]
