"""Products of the tensor cores as threads hold them: loads, stores, masks, and arithmetic that Pallas lacks.

A product is a matrix of 64 rows in the registers of a warpgroup. A thread holds pairs of its elements: those of row
`16 * warp + lane / 4` and of the row 8 below, from column `2 * (lane % 4)` on in steps of 8. A register is a pair, and the
registers of both rows come one after the other.
"""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu.emit import (
    SCALAR,
    WARP,
    WARPS,
    Vector,
    address_of,
    both,
    compare,
    constant,
    emit,
    fragmented,
    gather,
    i64,
    integer,
    load_words,
    shared_address,
    thread,
    tiled,
    words_of,
)

# A register has four elements of a row, from column `4 * (lane % 4)` on in steps of 16. Rows are those of a product.
BYTES_LAYOUT = plgpu.Layout.WGMMA_8BIT
_PRODUCT = plgpu.Layout.WGMMA
_PRODUCT_ROWS = _PRODUCT.reduce(1)
# Two words that each thread has for itself: four threads have the same place in an array of rows.
_THREAD_WORDS = plgpu.ShapeDtypeStruct((64,), jnp.uint32, layout=_PRODUCT_ROWS)
_THREAD_SUMS = plgpu.ShapeDtypeStruct((64,), jnp.float32, layout=_PRODUCT_ROWS)  # a sum of each thread for each of its rows
_PRODUCT_COLS = _PRODUCT.reduce(0)
THREADS_OF_ROW = 4  # threads that hold a row of a product
# The layout of a product whose registers have one element each.
_SINGLE = tiled(((64, 8), (16, 8), (8, 8), (2,), (1,)), (-8,), (-4, -3))
_kind = functools.partial(plgpu.ShapeDtypeStruct, layout=_PRODUCT)


def band(scores: jax.Array, low: jax.Array | None, high: jax.Array | None, hidden: float = -math.inf) -> jax.Array:
    """Hides a product in each row before column `low` and after column `high`, int32 of the rows or None for no limit."""
    tests = (arith.CmpIPredicate.sle, low), (arith.CmpIPredicate.sge, high)
    limits = {test: limit for test, limit in tests if limit is not None}

    @plgpu.inline_mgpu(
        arg_types=(_PRODUCT, *(_PRODUCT_ROWS for _ in limits)),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_PRODUCT),
    )
    def mask(_, scores, *rows):
        _, col = product_position()
        kind = ir.VectorType.get((2,), integer(32))
        ends = [[vector.broadcast(kind, arith.subi(scalar(x), col)) for x in row.registers.flat] for row in rows]
        columns = constants([(8 * index, 8 * index + 1) for index in range(scores.shape[1] // 8)])

        def seen(below, pair):
            inside = [arith.cmpi(test, end[below], columns[pair]) for test, end in zip(limits, ends, strict=True)]
            return functools.reduce(arith.andi, inside)

        return _only(scores, seen, hidden)

    return mask(scores, *limits.values())


def _only(scores, seen, hidden=-math.inf):
    """Returns a product with `hidden` in the elements for which `seen(below, pair)`, a vector of two, is false.

    `below` is 1 for elements of the row 8 below a thread's first one, and `pair` counts the thread's pairs of columns.
    """
    registers = list(scores.registers.flat)
    hidden = utils.c(hidden, registers[0].type)
    registers = [arith.select(seen(index % 2, index // 2), register, hidden) for index, register in enumerate(registers)]
    return fragmented(registers, scores.layout, scores.shape, None)


def scale_rows(product: jax.Array, factor: jax.Array) -> jax.Array:
    """Multiplies each row of a product by its factor. Warps whose factors are all 1 skip it."""

    def scale(product, factor):
        factors = [scalar(register) for register in factor.registers.flat]
        one = utils.c(1.0, product.mlir_dtype)
        differs = [arith.cmpf(arith.CmpFPredicate.UNE, value, one) for value in factors]
        needed = nvvm.vote_sync(constant(2**WARP - 1), functools.reduce(arith.ori, differs), "any")
        registers = list(product.registers.flat)
        branch: Any = scf.IfOp(needed, [register.type for register in registers], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            wide = [vector.broadcast(registers[0].type, value) for value in factors]
            scf.yield_([arith.mulf(register, wide[index % 2]) for index, register in enumerate(registers)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_(registers)
        return list(branch.results)

    return emit(scale, arrays=[(product, _PRODUCT), (factor, _PRODUCT_ROWS)], results=_kind(product.shape, product.dtype))


def split_pairs(product: jax.Array) -> jax.Array:
    """Returns a product in registers of one element each, which may be stored to a transposed array in shared memory."""

    def split(product):
        one = ir.VectorType.get((1,), product.mlir_dtype)
        elements = [llvm.extractelement(register, constant(e)) for register in product.registers.flat for e in range(2)]
        return [vector.broadcast(one, element) for element in elements]

    kind = plgpu.ShapeDtypeStruct(product.shape, product.dtype, layout=_SINGLE)
    return emit(split, arrays=[(product, _PRODUCT)], results=kind)


def join_columns(left: jax.Array, right: jax.Array) -> jax.Array:
    """Puts the columns of one product behind those of another one of the same dtype, without an instruction."""

    def join(*products):
        return [register for product in products for register in product.registers.flat]

    shape = left.shape[0], left.shape[1] + right.shape[1]
    return emit(join, arrays=[(left, _PRODUCT), (right, _PRODUCT)], results=_kind(shape, left.dtype))


def sum_in_threads(product: jax.Array) -> jax.Array:
    """Adds up, in each row, the elements that a thread holds. Four threads have sums of their own in the place of one row's."""

    def add(product):
        registers, sums = product.registers.flat, []
        for below in range(2):
            elements = [llvm.extractelement(register, constant(e)) for register in registers[below::2] for e in range(2)]
            sums.append(functools.reduce(arith.addf, elements))
        return _as_thread_words(sums)[0]

    return emit(add, arrays=[(product, _PRODUCT)], results=_THREAD_SUMS)


def sum_over_threads(sums: jax.Array) -> jax.Array:
    """Returns the sum of each row from the sums that its four threads have."""

    def add(sums):
        return _as_thread_words([_summed_over_lanes(scalar(register), (1, 2)) for register in sums.registers.flat])[0]

    return emit(add, arrays=[(sums, _PRODUCT_ROWS)], results=_THREAD_SUMS)


def any_above(product: jax.Array, limit: float, barrier: Any = None) -> jax.Array:
    """Tells whether an element of a product is above `limit` or NaN: 1 or 0, a scalar int32.

    Each warp looks at its own rows, and warps may go different ways then. With `barrier`, the number of a named barrier, the
    warps of the warpgroup meet there and look at all rows.
    """

    def vote(*barrier_and_product):
        *barrier, product = barrier_and_product
        elements = [llvm.extractelement(register, constant(e)) for register in product.registers.flat for e in range(2)]
        largest = functools.reduce(arith.maximumf, elements)
        is_above = arith.cmpf(arith.CmpFPredicate.UGT, largest, utils.c(limit, largest.type))
        if not barrier:
            return [arith.extui(integer(32), nvvm.vote_sync(constant(2**WARP - 1), is_above, "any"))]
        asm = "{ .reg .pred own, any; setp.ne.u32 own, $1, 0;"
        asm += f" bar.red.or.pred any, $2, {WARPS * WARP}, own; selp.u32 $0, 1, 0, any; }}"
        own = arith.extui(integer(32), is_above)
        return [utils.inline_ptx(asm, own, *barrier, result_types=integer(32), has_side_effects=True, convergent=True)]

    return emit(vote, scalars=[] if barrier is None else [barrier], arrays=[(product, _PRODUCT)], results=SCALAR)


def bfloat16_terms(product: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Splits a float32 product into two terms of bfloat16: what it is rounded to, and what is missing then.

    Two elements are converted at a time. ptxas converts single ones in the unit of exponentials, at a quarter of the rate.
    """

    def split(product):
        i32, f32 = integer(32), ir.F32Type.get()
        register_type, one = ir.VectorType.get((2,), ir.BF16Type.get()), ir.VectorType.get((1,), i32)
        first, second, half, upper = constants((0, 1, 16, -(2**16)))

        def rounded(pair):
            return utils.inline_ptx("cvt.rn.bf16x2.f32 $0, $1, $2;", pair[1], pair[0], result_types=i32)

        terms: tuple[list[Any], list[Any]] = [], []
        for register in product.registers.flat:
            pair = [llvm.extractelement(register, place) for place in (first, second)]
            high = rounded(pair)
            parts = arith.shli(high, half), arith.andi(high, upper)
            missing = [arith.subf(value, arith.bitcast(f32, bits)) for value, bits in zip(pair, parts, strict=True)]
            for term, word in zip(terms, (high, rounded(missing)), strict=True):
                term.append(vector.bitcast(register_type, vector.broadcast(one, word)))
        return terms

    return tuple(emit(split, arrays=[(product, _PRODUCT)], results=[_kind(product.shape, jnp.bfloat16)] * 2))


def from_bytes(piece: jax.Array, dtype, *, is_float: bool, scales: Sequence[Any] = ()) -> jax.Array:
    """Converts 64 rows of 8 bits to a dtype of 16 bits, exactly; or multiplies them by scales in float32, and rounds then.

    Args:
      piece: int8 `[64, cols]` in `BYTES_LAYOUT`, cols a multiple of 16.
      dtype: dtype of the result, which has the layout of `piece`.
      is_float: True if `piece` has the bits of float8_e4m3fn.
      scales: scalars int32, the bits of float32 numbers, one for each of 1, 2, 4 or 8 equal parts of the rows.
    """
    i32, code = integer(32), _widen(jnp.dtype(dtype).name, is_float=is_float, is_scaled=bool(scales))

    def convert(*bits_and_piece):
        *bits, piece = bits_and_piece
        # A thread has 4 elements each of rows `16 * warp + lane / 4` and 8 below, which say whose scale is theirs.
        row, row_bits = product_position()[0], []
        for below in range(2):
            at, selected = arith.addi(row, constant(8 * below)), bits[0] if bits else constant(0)
            for part, part_bits in enumerate(bits[1:], 1):
                is_behind = arith.cmpi(arith.CmpIPredicate.sge, at, constant(64 // len(bits) * part))
                selected = arith.select(is_behind, part_bits, selected)
            row_bits.append(selected)
        out_type, words = ir.VectorType.get((4,), utils.dtype_to_ir_type(jnp.dtype(dtype))), ir.VectorType.get((2,), i32)
        registers = []
        for index, register in enumerate(piece.registers.flat):
            word = vector.extract(vector.bitcast(ir.VectorType.get((1,), i32), register), [], [0])
            pairs: list[Any] = [llvm.inline_asm(i32, [word, row_bits[index % 2]], half, "=r,r,r") for half in code]
            registers.append(vector.bitcast(out_type, vector.from_elements(words, pairs)))
        return registers

    kind = plgpu.ShapeDtypeStruct(piece.shape, dtype, layout=BYTES_LAYOUT)
    return emit(convert, scalars=scales, arrays=[(piece, BYTES_LAYOUT)], results=kind)


def _widen(dtype: str, *, is_float: bool, is_scaled: bool) -> list[str]:
    """Returns PTX that widens the first two of four bytes, in `$1`, and PTX for the last two; a scale is in `$2`.

    Integers are put into the last bits of a number that is large enough, which is subtracted then: the unit that converts them
    has a quarter of the rate. bfloat16 has place for 7 of the 8 bits behind the byte 0x43, which makes 128 + b of them. The
    first bit, that of the sign, falls on the last bit of the exponent: with it, and without the 7, the number is 256, not 128.
    The difference of both is therefore b, or b - 128.
    """
    name, codes = {"bfloat16": "bf16", "float16": "f16"}[dtype], []
    for first in (0, 2):
        if is_float:
            code, is_done = f"cvt.rn.f16x2.e4m3x2 pair, w{first};", name == "f16" and not is_scaled
            code += "" if is_done else "mov.b32 {h0, h1}, pair; cvt.f32.f16 f0, h0; cvt.f32.f16 f1, h1;"
        elif is_scaled:
            code, is_done = "xor.b32 rest, $1, 0x80808080;", False
            for i in range(2):
                code += f"prmt.b32 pair, rest, 0x4b000000, {0x7540 + first + i};"
                code += f"mov.b32 f{i}, pair; sub.f32 f{i}, f{i}, 0f4b000080;"
        else:
            bytes_, is_done = 0x4140 + 0x101 * first, True
            code = f"xor.b32 rest, $1, 0x80808080; prmt.b32 pair, rest, 0x64, {bytes_};"
            code += "mov.b32 rest, 0x64806480; sub.f16x2 pair, pair, rest;"
            if name == "bf16":
                code = f"prmt.b32 pair, $1, 0x43, {bytes_}; and.b32 rest, pair, 0xff80ff80; and.b32 pair, pair, 0xff7fff7f;"
                code += "sub.bf16x2 pair, pair, rest;"
        if is_scaled:
            code += "mul.f32 f0, f0, $2; mul.f32 f1, f1, $2;"
        if not is_done:
            code += f"cvt.rn.{name}x2.f32 pair, f1, f0;"
        registers = ".reg .b32 pair, rest; .reg .b16 w0, w2, h0, h1; .reg .f32 f0, f1;"
        codes.append(f"{{ {registers} mov.b32 {{w0, w2}}, $1; {code} mov.b32 $0, pair; }}")
    return codes


def load_product(ref, row, col, limits, shape: tuple[int, int], *, varies: tuple[bool, bool], transposed=False) -> jax.Array:
    """Loads a tile of an array in global memory as a product holds it: 0 beyond the limits, int8 if it is bool.

    Args:
      ref: the array, `[rows, cols]`.
      row: scalar int32, the first row.
      col: scalar int32, the first column, an even one unless `transposed`.
      limits: scalars int32, numbers of rows and columns of the array from there on.
      shape: shape of the product.
      varies: True for each of rows and columns along which the array varies; if not, the first one stands for all.
      transposed: True if rows of the product are columns of `ref`.
    """
    dtype = jnp.int8 if ref.dtype == bool else ref.dtype
    itemsize = ref.dtype.itemsize

    def load(ref, *scalars):
        register = _PRODUCT.to_mgpu().registers_element_type(utils.dtype_to_ir_type(dtype))
        registers = []
        for pair in _pairs(ref, scalars, shape[1], itemsize, varies, transposed):
            if varies[1] and not transposed and ref.type.shape[1] % 2 == 0:
                address, offset, inside = pair[0]
                registers.append(Vector(address, offset, itemsize, inside).load(register))
            else:
                registers.append(gather(register, itemsize, *zip(*pair, strict=True)))
        return registers

    return emit(load, ref, (row, col, *limits), results=_kind(shape, dtype))


load_transposed = functools.partial(load_product, transposed=True)


def store_product(ref, row, col, limits, values: jax.Array) -> None:
    """Stores a product to a tile of `ref`, `[rows, cols]` in global memory, within limits as those of `load_product`.

    The columns of `ref`, the first one and the limit of columns are even.
    """
    itemsize = values.dtype.itemsize

    def store(ref, *scalars_and_values):
        *scalars, values = scalars_and_values
        pairs = _pairs(ref, scalars, values.shape[1], itemsize)
        for register, ((address, offset, inside), _) in zip(values.registers.flat, pairs, strict=True):
            Vector(address, offset, itemsize, inside).store(register)

    emit(store, ref, (row, col, *limits), [(values, _PRODUCT)])


def _pairs(ref, scalars, count, itemsize, varies=(True, True), transposed=False):
    """Returns an iterator of the places of both elements of each pair of a thread, in `count` columns.

    A place is an address, bytes from there, and true if the element is inside the limits. If `transposed`, the rows of the
    product are columns of `ref`. Both limits hold, also along what does not vary.
    """
    first, limits = scalars[:2], scalars[2:]
    row, col = product_position()
    width = ref.type.shape[1]
    down, along = (1, 0) if transposed else (0, 1)  # which axes of `ref` rows and columns of the product are
    limit = arith.subi(limits[along], col)
    inside, addresses = [], []
    for below in (0, 8):
        product_row = arith.addi(row, constant(below))
        inside.append(compare("slt", product_row, limits[down]))
        at = (col, product_row) if transposed else (product_row, col)
        entry = arith.muli(i64(arith.addi(first[0], at[0]) if varies[0] else first[0]), i64(width))
        if varies[1]:
            entry = arith.addi(entry, i64(arith.addi(first[1], at[1])))
        addresses.append(arith.addi(address_of(ref), arith.muli(entry, i64(itemsize))))
    step = itemsize * (width, 1)[along] if varies[along] else 0
    return (
        [(address, at * step, both(is_row, compare("sgt", limit, constant(at)))) for at in (column, column + 1)]
        for column in range(0, count, 8)
        for address, is_row in zip(addresses, inside, strict=True)
    )


def add_transposed(ref, row, col, limits, values: jax.Array, *, varies: tuple[bool, bool]) -> None:
    """Adds a product of float32 to a tile of `ref`, in global memory, transposed: one element each, in any order.

    Arguments are those of `load_transposed`; along what does not vary values are summed.
    """

    def add(ref, *scalars_and_values):
        *scalars, values = scalars_and_values
        pairs = list(_pairs(ref, scalars, values.shape[1], 4, varies, transposed=True))
        elements = [[llvm.extractelement(register, constant(e)) for e in range(2)] for register in values.registers.flat]
        lane = arith.remui(thread(), constant(WARP))
        # Rows of the product are columns of `ref`: 8 lanes have 8 of them, and each lane two.
        if not varies[1]:
            pairs, halves = pairs[::2], zip(elements[::2], elements[1::2], strict=True)
            sums = ([arith.addf(a, b) for a, b in zip(*two, strict=True)] for two in halves)
            elements = [[_summed_over_lanes(value, (4, 8, 16)) for value in pair] for pair in sums]
        # Its columns are rows of `ref`: 4 lanes have them, and each a quarter.
        if not varies[0]:
            count = 1 if not varies[1] else 2
            sums = [functools.reduce(arith.addf, itertools.chain(*elements[k::count])) for k in range(count)]
            pairs, elements = [[pair[0]] for pair in pairs[:count]], [[_summed_over_lanes(value, (1, 2))] for value in sums]
        mine = None
        if not varies[1]:
            mine = compare("ult", lane, constant(4 if varies[0] else 1))
        elif not varies[0]:
            mine = compare("eq", arith.remui(lane, constant(4)), constant(0))
        for places, numbers in zip(pairs, elements, strict=True):
            for (address, offset, inside), value in zip(places, numbers, strict=True):
                inside = inside if mine is None else both(inside, mine)
                utils.inline_ptx(f"@$2 red.global.add.f32 [$0+{offset}], $1;", address, value, inside, has_side_effects=True)

    emit(add, ref, (row, col, *limits), [(values, _PRODUCT)])


def _summed_over_lanes(value, steps):
    """Returns the sum of a float32 over the lanes whose numbers differ in these bits, in each of them."""
    every = constant(-1)
    for step in steps:
        bits = nvvm.shfl_sync(every, arith.bitcast(integer(32), value), constant(step), constant(WARP - 1), nvvm.ShflKind.bfly)
        value = arith.addf(value, arith.bitcast(value.type, bits))
    return value


def load_mask(ref, row, col, limits, shape: tuple[int, int], *, varies: tuple[bool, bool]) -> list[jax.Array]:
    """Loads a tile of a mask. The four threads that hold the same two rows of a product share the work.

    Words have 32 columns. The words of one row come first, then the words of the row 8 below: `2 * shape[1] / 32` in all. Each
    thread loads every fourth word, in vectors as long as `ref` allows.

    Arguments are those of `load_product`. `ref` is bool, `col` a multiple of 32, and a tile has 64 or 128 columns.

    Returns:
      The words of each thread, for `pack_mask`: bytes, or bits if they had to come one by one or two by two. They are 0 beyond
      the limits of what varies.
    """
    count = shape[1] // 32
    step = math.gcd(ref.shape[1], 16) if varies[1] else 1
    arrays = count // 2 * 8 // 2 if step >= 4 else 1

    def load(ref, first_row, first_col, rows, cols):
        own_row, own_col = product_position()
        member = arith.divui(own_col, constant(2))  # of the four

        def load_word(place):
            """Loads word `place`, an int32 MLIR value below `2 * count`: as words of 4 bytes, or as one of 32 bits."""
            here = arith.addi(own_row, arith.muli(arith.divui(place, constant(count)), constant(8)))
            inside = compare("slt", here, rows)
            entry = arith.muli(i64(arith.addi(first_row, here) if varies[0] else first_row), i64(ref.type.shape[1]))
            address = arith.addi(address_of(ref), entry)
            if not varies[1]:
                value = load_words(address, 0, inside, ir.VectorType.get((1,), integer(8)))
                return [arith.muli(arith.extui(integer(32), llvm.extractelement(value, constant(0))), constant(-1))]
            start = arith.muli(arith.remui(place, constant(count)), constant(32))
            address = arith.addi(address, i64(arith.addi(first_col, start)))
            words, limit, pieces = words_of(ir.VectorType.get((step,), integer(8))), arith.subi(cols, start), []
            for offset in range(0, 32, step):
                is_inside = both(inside, compare("sgt", limit, constant(offset)))
                loaded = load_words(address, offset, is_inside, words)
                pieces += [llvm.extractelement(loaded, constant(k)) for k in range(loaded.type.shape[0])]
            return pieces if step >= 4 else [_bits([arith.extui(integer(32), piece) for piece in pieces], step)]

        return _as_thread_words([word for k in range(count // 2) for word in load_word(arith.addi(member, constant(4 * k)))])

    return emit(load, ref, (row, col, *limits), results=[_THREAD_WORDS] * arrays)


def pack_mask(loaded: Sequence[jax.Array], shape: tuple[int, int]) -> jax.Array:
    """Packs what `load_mask` loaded to bits: one or two words that each thread has for the others, for `select_bits`."""
    if len(loaded) == 1:
        return loaded[0]

    def pack(*loaded):
        words = [scalar(register) for array in loaded for register in array.registers.flat]
        (packed,) = _as_thread_words([_bits(words[k : k + 8], 4) for k in range(0, len(words), 8)])
        return packed

    return emit(pack, arrays=[(array, _PRODUCT_ROWS) for array in loaded], results=_THREAD_WORDS)


def _bits(words, step):
    """Packs 32 bytes that are 0 or 1 to bits, from the lowest on. Each word has `step` of them in its lowest bytes."""
    groups = [constant(0)] * 4  # of 8 bits
    for k, word in enumerate(words):
        group, first = divmod(k * step, 8)
        places = [1 << (first + e) for e in range(step)] + [0] * (4 - step)
        weights = constant(int.from_bytes(places, "little", signed=True))
        asm = "dp4a.u32.u32 $0, $1, $2, $3;"
        groups[group] = utils.inline_ptx(asm, word, weights, groups[group], result_types=integer(32))
    return functools.reduce(arith.ori, (arith.shli(group, constant(8 * g)) for g, group in enumerate(groups)))


def _as_thread_words(words):
    """Returns words of a thread as registers of arrays like `_THREAD_WORDS`, which have two each."""
    kind = _PRODUCT_ROWS.to_mgpu().registers_element_type(words[0].type)
    words = [vector.broadcast(kind, word) for word in [*words, *[constant(0)] * (len(words) % 2)]]
    return [words[k : k + 2] for k in range(0, len(words), 2)]


def select_bits(scores: jax.Array, packed: jax.Array) -> jax.Array:
    """Returns a product with `-inf` where the mask that `pack_mask` packed has no bit."""

    @plgpu.inline_mgpu(
        arg_types=(_PRODUCT, _PRODUCT_ROWS),
        return_type=plgpu.ShapeDtypeStruct(scores.shape, scores.dtype, layout=_PRODUCT),
    )
    def select(_, scores, packed):
        _, col = product_position()
        count = scores.shape[1] // 32
        words = [scalar(register) for register in packed.registers.flat]
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        first = arith.subi(lane, arith.divui(col, constant(2)))  # of the four that share rows
        every, kind = constant(-1), nvvm.ShflKind.idx

        def word(place):
            giver = arith.addi(first, constant(place % 4))
            return arith.shrui(nvvm.shfl_sync(every, words[place // 4], giver, constant(WARP - 1), kind), col)

        twice = functools.partial(vector.broadcast, ir.VectorType.get((2,), integer(32)))
        shifted = [[twice(word(below * count + which)) for below in range(2)] for which in range(count)]
        *bits, zeros = constants([*((1 << 8 * byte, 2 << 8 * byte) for byte in range(4)), (0, 0)])

        def seen(below, pair):
            return arith.cmpi(arith.CmpIPredicate.ne, arith.andi(shifted[pair // 4][below], bits[pair % 4]), zeros)

        return _only(scores, seen)

    return select(scores, packed)


def _load_line(ref, first, limit, shape: tuple[int, int], *, axis: int) -> jax.Array:
    """Loads a value for each row, or column, of a product of `shape` from a line: from `first` on, and 0 from `limit` on."""
    layout, itemsize = (_PRODUCT_ROWS, _PRODUCT_COLS)[axis], ref.dtype.itemsize

    def load(ref, first, limit):
        register: Any = layout.to_mgpu().registers_element_type(ref.type.element_type)
        position = product_position()[axis]
        start = arith.addi(i64(first), i64(position))
        address = arith.addi(address_of(ref), arith.muli(start, i64(itemsize)))
        left = arith.subi(limit, position)
        registers = []
        for index in range(shape[1] // 8 if axis else 2):
            places = [index * 8 + e for e in range(register.shape[0])]
            inside = [compare("sgt", left, constant(place)) for place in places]
            offsets = [place * itemsize for place in places]
            registers.append(gather(register, itemsize, [address] * len(places), offsets, inside))
        return registers

    return emit(load, ref, (first, limit), results=plgpu.ShapeDtypeStruct((shape[axis],), ref.dtype, layout=layout))


load_product_rows, load_product_cols = (functools.partial(_load_line, axis=axis) for axis in (0, 1))


def load_along_rows(ref, shape: tuple[int, int]) -> jax.Array:
    """Loads a product of `shape` whose rows are all the line `ref`, float32 `[shape[1]]` in shared memory.

    A thread loads each pair twice, once for each of its rows. The registers are then those in which a sum of products starts,
    and need not be moved.
    """

    def load(ref):
        _, col = product_position()
        words, floats = (ir.VectorType.get((2,), kind) for kind in (integer(32), ir.F32Type.get()))
        address = shared_address(ref, arith.muli(col, constant(4)))
        columns = itertools.chain.from_iterable((column, column) for column in range(0, shape[1], 8))
        return [vector.bitcast(floats, load_words(address, 4 * column, None, words, space="shared")) for column in columns]

    return emit(load, ref, results=_kind(shape, jnp.float32))


def store_product_rows(ref, first, limit, values: jax.Array) -> None:
    """Stores a value for each row of a product to `ref`, one-dimensional, from `first` on, for the first `limit` rows."""
    itemsize = values.dtype.itemsize

    def store(ref, first, limit, values):
        row, col = product_position()
        start = arith.addi(i64(first), i64(row))
        address = arith.addi(address_of(ref), arith.muli(start, i64(itemsize)))
        left = arith.subi(limit, row)
        for index, register in enumerate(values.registers.flat):
            inside = both(compare("eq", col, constant(0)), compare("sgt", left, constant(index * 8)))
            Vector(address, index * 8 * itemsize, itemsize, inside).store(register)

    emit(store, ref, (first, limit), [(values, _PRODUCT_ROWS)])


def load_at(address, kind, index, offset: int = 0):
    """Loads an element of an MLIR type from a line in global memory that the kernel does not write.

    Compilers may leave the load out, share it with another one, or move it out of a loop.

    Args:
      address: int64, the address of the line.
      kind: type of its elements: 8, 16 or 32 bits.
      index: int32, may be negative.
      offset: the element is number `index + offset`, which is not negative.
    """
    bits = utils.bitwidth(kind)
    place = arith.addi(address, arith.muli(arith.extsi(integer(64), index), i64(bits // 8)))
    register = integer(max(16, bits))  # PTX has no registers of 8 bits
    word = utils.inline_ptx(f"ld.global.nc.b{bits} $0, [$1+{offset * bits // 8}];", place, result_types=register)
    word = word if register.width == bits else arith.trunci(integer(bits), word)
    return word if word.type == kind else arith.bitcast(kind, word)


def add_at(address, places, elements, *, varies: tuple[bool, bool], along_diagonals: bool = False) -> None:
    """Adds the elements of a product to those of a line of float32 in global memory, in any order.

    Elements of one place are summed in registers first.

    Args:
      address: int64, the address of the line.
      places: registers of the places of the elements, int32, below 0 for none: of all of them, of a thread's two rows, of each
        pair of its columns, or of each pair of the product.
      elements: registers of the product.
      varies: True for each of rows and columns along which places vary.
      along_diagonals: True if places depend on the row less the column alone.
    """
    pairs = [[llvm.extractelement(register, constant(e)) for e in range(2)] for register in elements]
    lane, mine = arith.remui(thread(), constant(WARP)), None
    rows = pairs[::2], pairs[1::2]

    def total(values, steps):
        return _summed_over_lanes(functools.reduce(arith.addf, values), steps)

    if along_diagonals:
        wanted = _summed_along_diagonals(places, elements, lane)
        mine = compare("eq", arith.remui(lane, constant(4)), constant(0))
    elif varies == (True, True):
        wanted = [
            (llvm.extractelement(r, constant(e)), pair[e]) for r, pair in zip(places, pairs, strict=True) for e in range(2)
        ]
    elif varies == (True, False):  # 4 lanes have a row
        wanted = [(scalar(r), total(itertools.chain(*row), (1, 2))) for r, row in zip(places, rows, strict=True)]
        mine = compare("eq", arith.remui(lane, constant(4)), constant(0))
    elif varies == (False, True):  # 8 lanes have a column
        wanted = [
            (llvm.extractelement(r, constant(e)), total((above[e], below[e]), (4, 8, 16)))
            for r, above, below in zip(places, *rows, strict=True)
            for e in range(2)
        ]
        mine = compare("ult", lane, constant(4))
    else:
        wanted = [(places[0], total(itertools.chain(*pairs), (1, 2, 4, 8, 16)))]
        mine = compare("eq", lane, constant(0))
    zero = utils.c(0.0, ir.F32Type.get())
    for place, value in wanted:
        inside = both(compare("sge", place, constant(0)), arith.cmpf(arith.CmpFPredicate.UNE, value, zero))
        inside = inside if mine is None else both(inside, mine)
        at = arith.addi(address, arith.muli(i64(place), i64(4)))
        utils.inline_ptx("@$2 red.global.add.f32 [$0], $1;", at, value, inside, has_side_effects=True)


def _summed_along_diagonals(places, elements, lane) -> list[tuple[Any, Any]]:
    """Sums the elements of a product along its diagonals, over the lanes of a warp.

    A lane has rows `r + 8 * i` and columns `8 * p + 2 * c + e` with `r, c = divmod(lane, 4)`, so its elements with equal
    `p - i` and `e` are on one diagonal. The sum of a diagonal goes to the lane with `c` 0 that has an element on it with `e` 0.

    Args:
      places: registers of the places of the elements, equal on a diagonal.
      elements: registers of the product.
      lane: number of the lane.

    Returns:
      Place and sum of each diagonal of a lane. Only those of lanes with `c` 0 count.
    """
    pairs = len(elements) // 2
    diagonals: list[Any] = [None] * (pairs + 1)  # of `p - i` from -1 on
    place_of = list(diagonals)
    for p, i in itertools.product(range(pairs), range(2)):
        at, element = p - i + 1, elements[2 * p + i]
        diagonals[at] = element if diagonals[at] is None else arith.addf(diagonals[at], element)
        place_of[at] = places[2 * p + i]
    zero, every, last = utils.c(0.0, ir.F32Type.get()), constant(-1), constant(WARP - 1)
    row = arith.divui(lane, constant(4))

    def from_lane(value, giver):
        bits = value if value.type == integer(32) else arith.bitcast(integer(32), value)
        return arith.bitcast(value.type, nvvm.shfl_sync(every, bits, giver, last, nvvm.ShflKind.idx))

    def shifted(values, columns, of_column):
        """Returns the values of the lane that has the same diagonal `columns` further on, from the row as much below.

        That row may be one of the next eight, whose lanes have it on the diagonal before.
        """
        giver = arith.andi(arith.addi(lane, constant(4 * columns + of_column)), last)
        wraps = compare("ult", row, constant(columns))
        return [from_lane(arith.select(wraps, b, v), giver) for b, v in zip([zero, *values[:-1]], values, strict=True)]

    def parts(registers, e):
        return [llvm.extractelement(register, constant(e)) for register in registers]

    sums, others = ([*parts(diagonals, e), zero] for e in range(2))
    sums = list(map(arith.addf, sums, shifted(others, 1, 0)))
    for columns in (2, 4):
        sums = list(map(arith.addf, sums, shifted(sums, columns, columns // 2)))
    # No lane has an element with `c` and `e` 0 on the last diagonal. Its elements start at another lane's row 0.
    back = arith.subi(constant(8), row)
    giver, corner = arith.divui(back, constant(2)), places[-2:-1]  # of its last columns and its first row
    even, odd = (from_lane(parts(corner, e)[0], giver) for e in range(2))
    is_even = compare("eq", arith.remui(back, constant(2)), constant(0))
    return list(zip([*parts(place_of, 0), arith.select(is_even, even, odd)], sums, strict=True))


def scalar(register):
    """Returns the element of a register that has one."""
    return llvm.extractelement(register, *constants([0])) if isinstance(register.type, ir.VectorType) else register


def product_position():
    """Returns row and column of a thread's first element."""
    thread, lane, row, quad, pair = constants((WARPS * WARP, WARP, 16, 4, 2))
    thread = arith.remui(utils.thread_idx(), thread)
    warp, lane = arith.divui(thread, lane), arith.remui(thread, lane)
    return arith.addi(arith.muli(warp, row), arith.divui(lane, quad)), arith.muli(arith.remui(lane, quad), pair)


def constants(values):
    """Makes int32 constants of MLIR, once for all registers that need them: a scalar for a number, a vector for two."""
    i32, vector_of_two = integer(32), ir.VectorType.get((2,), integer(32))
    return [
        utils.c(value, i32)
        if isinstance(value, int)
        else arith.constant(vector_of_two, ir.DenseElementsAttr.get(np.array(value, np.int32), type=vector_of_two))
        for value in values
    ]
