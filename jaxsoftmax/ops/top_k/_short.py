"""The k largest entries of many short rows on Hopper, such as the experts of a router: each row is read once, by a few lanes.

A warp has 32 rows. A number of 32 bits stands for an element: above, the leading bits of its key (see `_candidates`), all of
them of 16-bit floats; in the lowest bits how far its column is from the last one. These go through `_networks`, after which
each lane has a row's k largest, and the largest that was dropped. Of 32-bit elements the last bits of the key are missing: the
found ones are loaded again, from a cache, and a row in which missing bits might decide is searched by its lane alone.

So of each element 4 bytes are read, or 2, and of each row k values and indices are written.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import WARP, WARPS, both, compare, constant, i64, integer, utils
from jaxsoftmax.ops.top_k import _networks
from jaxsoftmax.ops.top_k._candidates import BITS_OF_KEY, KEY

MOST_COLS, MOST = 512, 16  # columns of a row, and entries that are found of it
_OF_A_LANE = 16  # elements of a row


def serves(cols: int, itemsize: int, k: int) -> bool:
    """Whether rows are short enough, and consist of whole vectors."""
    return cols <= MOST_COLS and k <= MOST and cols % (16 // itemsize) == 0


def top_k(x: jax.Array, k: int, dtype: Any) -> list[jax.Array]:
    """The k largest values of each row of `[rows, cols]`, and their columns."""
    rows, cols = x.shape
    kernel = functools.partial(_kernel, rows=rows, cols=cols, k=k, of=jnp.dtype(x.dtype))
    return plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct((rows * k,), dtype), jax.ShapeDtypeStruct((rows * k,), jnp.int32)],
        grid=(-(-rows // (WARP * WARPS)),),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="top_k_of_short_rows_mosaic",
    )(x)


def _kernel(x, values, indices, *, rows, cols, k, of):
    ptx.emit(functools.partial(_emit, rows=rows, cols=cols, k=k, of=of), (x, values, indices), [lax.axis_index("block")])


def _emit(x, values, indices, block, *, rows, cols, k, of):
    itemsize = of.itemsize
    size = 16 // itemsize  # of a vector
    lanes = min(WARP, 1 << max(1, cols // max(_OF_A_LANE, size)).bit_length() - 1)
    each = -(-cols // (lanes * size))  # vectors of a lane
    shift = 16 if itemsize == 2 else cols.bit_length()
    last = 2**shift - 1
    kind = "float32" if jnp.issubdtype(of, jnp.floating) else of.name
    lane = arith.remui(utils.thread_idx(), constant(WARP))
    own = arith.addi(arith.muli(block, constant(WARP * WARPS)), utils.thread_idx())  # the row that this lane has in the end
    inside = None if rows % (WARP * WARPS) == 0 else compare("ult", own, constant(rows))
    first = arith.muli(arith.remui(lane, constant(lanes)), constant(size))  # column
    group = arith.subi(own, arith.remui(lane, constant(lanes)))  # its first row
    start = arith.addi(arith.muli(i64(group), i64(cols)), i64(first))
    address = arith.addi(ptx.address_of(x), arith.muli(start, i64(itemsize)))
    from_last = arith.subi(constant(last), first)
    words = ir.VectorType.get((4,), integer(32))

    def loaded(number):
        """The vectors of a lane of the row of its group that has this number, and which of them are there, None for all."""
        is_row = None if inside is None else compare("ult", arith.addi(group, constant(number)), constant(rows))
        found = []
        for column in range(0, each * lanes * size, lanes * size):
            is_whole = column + lanes * size <= cols
            is_there = is_row if is_whole else both(is_row, compare("ult", first, constant(cols - column)))
            found.append((ptx.load_words(address, (number * cols + column) * itemsize, is_there, words), is_there))
        return found

    following = [loaded(0)]

    def row(number):
        """The elements of a lane, of the row of its group that has this number; the next row is loaded before they are used."""
        (vectors,) = following
        following[:] = [loaded(number + 1)] if number + 1 < lanes else []
        utils.warp_barrier()  # else the compiler would load all rows at once, which takes too many registers
        found = []
        for j, (vector_, is_there) in enumerate(vectors):
            for q in range(size):
                word = llvm.extractelement(vector_, constant(q * itemsize // 4))
                text, place = _element(kind, itemsize, q % (4 // itemsize), shift), constant(-(j * lanes * size + q))
                element = utils.inline_ptx(text, word, from_last, place, result_types=integer(32))
                found.append(element if is_there is None else arith.select(is_there, element, constant(0)))
        return found

    bits = {1 << i: compare("ne", arith.andi(lane, constant(1 << i)), constant(0)) for i in range(5)}
    ops = _networks.Operations(
        arith.maxui,
        arith.minui,
        lambda bit, a, b: arith.select(bits[bit], a, b),
        lambda a, bit: nvvm.shfl_sync(constant(-1), a, constant(bit), constant(WARP - 1), nvvm.ShflKind.bfly),
        tells_dropped=itemsize == 4,
    )
    makers = [functools.partial(row, number) for number in range(lanes)]
    found = _networks.largest_of_rows(ops, makers, 1 << (k - 1).bit_length())
    more = found.largest[k:] + ([] if found.dropped is None else [found.dropped])
    columns = [arith.subi(constant(last), arith.andi(entry, constant(last))) for entry in found.largest[:k]]
    with contextlib.nullcontext() if inside is None else utils.when(inside):
        _finish(x, values, indices, own, found.largest[:k], more[:1], columns, cols=cols, shift=shift, kind=kind, of=of)


def _finish(x, values, indices, own, entries, following, columns, *, cols, shift, kind, of):
    """Stores the entries of a lane's row, once their order is sure; `following` is the largest that is not among them."""
    k, itemsize = len(entries), of.itemsize
    base = arith.addi(ptx.address_of(x), arith.muli(arith.muli(i64(own), i64(cols)), i64(itemsize)))
    out = [
        arith.addi(ptx.address_of(ref), arith.muli(i64(own), i64(k * utils.bytewidth(ref.type.element_type))))
        for ref in (values, indices)
    ]
    if itemsize == 2:
        bits = [utils.inline_ptx(BITS_OF_KEY, entry, result_types=integer(32)) for entry in entries]
        bits = [arith.shrui(b, constant(16)) for b in bits]
        _store(out, values, bits, columns, of)
        return
    one = ir.VectorType.get((1,), integer(32))
    bits = []
    for column in columns:
        address = arith.addi(base, arith.muli(i64(column), i64(4)))
        bits.append(llvm.extractelement(ptx.load_words(address, 0, None, one), constant(0)))
    text = f"{{ .reg .b32 word, key; mov.b32 key, $1;{KEY[kind]} mov.b32 $0, key; }}"
    keys = [utils.inline_ptx(text, b, result_types=integer(32)) for b in bits]
    unsure: Any = constant(0)
    for a, b, key_a, key_b in zip(entries, entries[1:], keys, keys[1:], strict=False):
        alike = compare("eq", arith.shrui(a, constant(shift)), arith.shrui(b, constant(shift)))
        wrong = arith.andi(alike, compare("ult", key_a, key_b))
        unsure = arith.ori(unsure, arith.extui(integer(32), wrong))
    for entry in following:
        alike = compare("eq", arith.shrui(entry, constant(shift)), arith.shrui(entries[-1], constant(shift)))
        unsure = arith.ori(unsure, arith.extui(integer(32), alike))
    _store(out, values, bits, columns, of)
    with utils.when(compare("ne", unsure, constant(0))):
        text = _SEARCH.format(cols=cols, k=k, key=KEY[kind], bits=cols.bit_length(), last=2 ** cols.bit_length() - 1)
        utils.inline_ptx(text, base, *out, has_side_effects=True)


def _store(out, values, bits, columns, of):
    """Stores the bits of values, which are `of` this dtype, and columns, four at a time where they are that many."""
    kind = values.type.element_type
    width = utils.bitwidth(kind)
    if of.itemsize == 2 and width == 32:  # float32 of a narrower one
        half = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
        text = "shl.b32 $0, $1, 16;" if of == jnp.bfloat16 else half
        bits = [utils.inline_ptx(text, b, result_types=integer(32)) for b in bits]
    if width == 16:
        bits = [arith.trunci(integer(16), b) for b in bits]
    for address, found in zip(out, (bits, columns), strict=True):
        size = found[0].type.width // 8
        at_once = next(n for n in (4, 2, 1) if len(found) % n == 0)
        for start in range(0, len(found), at_once):
            words = llvm.mlir_undef(ir.VectorType.get((at_once,), found[0].type))
            for q in range(at_once):
                words = llvm.insertelement(words, found[start + q], constant(q))
            ptx.store_words(address, start * size, None, words)


def _element(kind: str, itemsize: int, half: int, shift: int) -> str:
    """PTX of $0, what stands for the element that is in $1, where $2 + $3 is how far its column is from the last one."""
    bits = "mov.b32 key, $1;" if itemsize == 4 else ("shl.b32 key, $1, 16;" if half == 0 else "and.b32 key, $1, 0xffff0000;")
    mask = 2**32 - 2**shift
    return (
        f"{{ .reg .b32 word, key; {bits}{KEY[kind]} and.b32 key, key, {mask}; add.u32 word, $2, $3; add.u32 $0, key, word; }}"
    )


# Searches a row of words at $0 for its k largest, one after another, and stores their words at $1 and columns at $2.
_SEARCH = (
    "{{ .reg .pred is; .reg .b32 key, word, column, rest, left; .reg .b64 place, entry, best, before, values, indices, more;"
    " mov.b64 before, 0x7fffffffffffffff; mov.b64 values, $1; mov.b64 indices, $2; mov.u32 left, {k};"
    " next: mov.b64 best, 0; mov.u32 column, 0; mov.b64 place, $0;"
    ' element: .pragma "nounroll"; ld.global.b32 key, [place];{key} cvt.u64.u32 entry, key; shl.b64 entry, entry, {bits};'
    " sub.u32 rest, {last}, column; cvt.u64.u32 more, rest; add.u64 entry, entry, more;"
    " setp.lt.u64 is, entry, before; setp.gt.and.u64 is, entry, best, is; @is mov.b64 best, entry;"
    " add.u64 place, place, 4; add.u32 column, column, 1; setp.lt.u32 is, column, {cols}; @is bra element;"
    " mov.b64 before, best; cvt.u32.u64 rest, best; and.b32 rest, rest, {last}; sub.u32 column, {last}, rest;"
    " mul.wide.u32 more, column, 4; add.u64 place, $0, more; ld.global.b32 word, [place];"
    " st.global.b32 [values], word; st.global.b32 [indices], column;"
    " add.u64 values, values, 4; add.u64 indices, indices, 4; sub.u32 left, left, 1; setp.ne.u32 is, left, 0; @is bra next; }}"
)
