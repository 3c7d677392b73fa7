"""The k largest entries of many short rows on Hopper, such as the experts of a router, and their softmax weights.

A warp copies its rows to shared memory, and then a lane, or a few, search a row of it:

1. The larger one of each pair of elements is made a number of 32 bits: above, the leading bits of what orders it, all of them
   of 16-bit floats; in the lowest bits how far its column is from the last one. The k largest of these go through `network`.
2. The k largest elements are among the pairs that were found. Their other elements are looked up in shared memory, ordered, and
   merged with the first ones.
3. With the state of a row, `m` is the value that was found first, and `d` is summed up in another pass over shared memory.

Of 32-bit elements the last bits are missing. Where these might decide, and where NaN is in a row, a warp searches the row in
another way, which takes long and is seldom needed.

So of each element 4 bytes are read, or 2, and of each row k values and indices are written. What limits the kernel beside that
are comparisons and logic, of which a multiprocessor does 64 at a time. For the 8 largest of 64 these are, for a row, 32 to make
pairs (16 in 16 bits), 96 to make numbers of them (64), 253 for the network (248), and about 250 for the rest.
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax._gpu.ptx import WARP, WARPS, both, compare, constant, i64, integer, utils
from jaxsoftmax.ops.top_k.mosaic_sm90 import network, staged
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import KEY
from jaxsoftmax.ops.top_k.mosaic_sm90.floats import as_float, exponential, inverse_of, narrowed, shifted, sum_of, widened
from jaxsoftmax.ops.top_k.mosaic_sm90.staged import Plan, Warp, store_all, vector_of

_LOWEST = -(2**31)


def serves(cols: int, itemsize: int, k: int) -> bool:
    """Whether there is a kernel for rows of so many elements of that size."""
    return staged.serves(cols, itemsize) and k <= staged.MOST


def top_k(x: jax.Array, k: int, dtype: Any, normalize: str | None = None, return_state: bool = False) -> list[jax.Array]:
    """The k largest values of each row of `[rows, cols]`, or with `normalize` their weights, in `dtype`, and their columns.

    With `return_state` the state `(m, d)` of the rows, too.
    """
    rows, cols = x.shape
    wanted = jnp.dtype(dtype).itemsize
    of_row = cols * x.dtype.itemsize
    plan = Plan(rows, cols, x.dtype.itemsize, staged.rows_of_warp(of_row), more=k * (4 + wanted))
    call = _Call(plan, k, jnp.dtype(x.dtype), normalize, return_state)
    results = [jax.ShapeDtypeStruct((rows * k,), dtype), jax.ShapeDtypeStruct((rows * k,), jnp.int32)]
    results += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * (2 * return_state)
    return kernel_of(
        functools.partial(_kernel, call),
        out_type=results,
        grid=(plan.blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((WARPS * plan.bytes // 4,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="top_k_of_short_rows_mosaic",
    )(x)


@dataclass(frozen=True)
class _Call:
    """What is computed.

    Attributes:
      plan: how.
      k: entries of a row.
      of: the dtype of elements.
      normalize: over what weights are normalized, or None where values are wanted.
      return_state: whether the state of rows is wanted.
    """

    plan: Plan
    k: int
    of: Any
    normalize: str | None
    return_state: bool

    @property
    def is_half(self) -> bool:
        return self.plan.itemsize == 2

    @property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.of, jnp.floating)

    @property
    def bits(self) -> int:
        """Of a number for the column."""
        return 16 if self.is_half else (self.plan.cols - 1).bit_length()

    @property
    def last(self) -> int:
        """The column from which the others are counted."""
        return 2**self.bits - 1

    @property
    def ops(self) -> network.Operations:
        return network.Operations(arith.maxsi, arith.minsi, tells_dropped=not self.is_half)


def _kernel(call, x, *refs):
    ptx.emit(functools.partial(_emit, call), (x, *refs), [lax.axis_index("block")])


def _emit(call, x, values, indices, *refs):
    (*state_refs, shared), block = refs[:-1], refs[-1]
    warp = Warp(call.plan, shared, block)
    warp.fetch(x)
    warp.arrived()
    entries, is_unsure = _found(call, warp)
    bits, columns = _sure(call, warp, entries, is_unsure)
    state = None
    if call.normalize == "all" or call.return_state:
        state = _state_of_row(call, warp, _float(call, bits[0]))
    kind = values.type.element_type
    if call.normalize is not None:
        found = narrowed(_weights(call, [_float(call, b) for b in bits], state), kind)
    elif not call.is_half:
        found = bits
    elif utils.bitwidth(kind) == 32:  # float32 of a narrower one
        found = [arith.bitcast(integer(32), _float(call, b)) for b in bits]
    else:
        found = paired([arith.trunci(integer(16), arith.shrui(b, constant(16))) for b in bits])
    utils.warp_barrier()  # rows are not needed any more
    is_first = compare("eq", warp.part, constant(0)) if call.plan.lanes > 1 else None
    sizes = [call.k * utils.bytewidth(ref.type.element_type) for ref in (values, indices)]
    offsets = [0, call.plan.of_warp * sizes[0]]
    for words, size, offset in zip((found, columns), sizes, offsets, strict=True):
        store_all(arith.addi(warp.start, arith.muli(warp.row, constant(size))), words, is_first, offset)
    utils.warp_barrier()
    for ref, size, offset in zip((values, indices), sizes, offsets, strict=True):
        warp.store_packed(ref, size, offset)
    if call.return_state and state is not None:
        for ref, value in zip(state_refs, state, strict=True):
            address = arith.addi(warp.address(ref, 4), i64(arith.muli(warp.row, constant(4))))
            word = llvm.insertelement(llvm.mlir_undef(vector_of(1, 32)), arith.bitcast(integer(32), value), constant(0))
            ptx.store_words(address, 0, both(is_first, warp.is_there), word)


# The search.


def _found(call, warp):
    """The k largest elements of a lane's row, as numbers in decreasing order, and whether they may be others."""
    ops, k = call.ops, call.k
    found = network.largest(ops, _pairs(call, warp), k)
    if call.plan.lanes > 1:
        part = arith.muli(warp.part, constant(call.plan.size))
        found = network.Found([arith.xori(e, part) for e in found.largest], found.dropped)
    for bit in [1 << i for i in range(call.plan.lanes.bit_length() - 1)]:
        dropped = None if found.dropped is None else _of_other(found.dropped, bit)
        found = network.merged(ops, found, network.Found([_of_other(e, bit) for e in found.largest], dropped), k)
    winners, losers = zip(*[_elements(call, warp, e) for e in found.largest], strict=True)
    winners, losers = list(winners), list(losers)
    if call.is_half and len(winners) == k and 2 * k < call.plan.cols:
        winners[-1] = _first_of_equal(warp, found.largest[-1], winners[-1])
    if call.is_half:  # and so may two neighbours have to change places
        for first in (0, 1):
            for i in range(first, len(winners) - 1, 2):
                pair = winners[i : i + 2]
                winners[i : i + 2] = ops.maximum(*pair), ops.minimum(*pair)
    # The other element of the k-th pair is behind the k elements that were found first.
    last = losers.pop() if len(winners) == k else None
    dropped = [e for e in (found.dropped, last) if e is not None] if ops.tells_dropped else []
    dropped = functools.reduce(ops.maximum, dropped) if dropped else None
    largest = network.merged(ops, network.Found(winners, dropped), network.Found(network.in_order(ops, losers)), k)
    is_unsure = None
    if call.is_float:  # NaN in a row was made the largest of all
        infinity = 0x7C000000 if call.of == jnp.float16 else 0x7F800000
        is_unsure = compare("sgt", found.largest[0], constant(infinity | call.last))
    if largest.dropped is not None:
        alike = compare("ult", arith.xori(largest.largest[-1], largest.dropped), constant(2**call.bits))
        is_unsure = alike if is_unsure is None else arith.ori(is_unsure, alike)
    return largest.largest, is_unsure


def _pairs(call, warp):
    """The numbers of the pairs of a lane's vectors, without what tells the lanes of a row apart."""
    plan = call.plan
    for offset, is_there in warp.vectors():
        loaded = ptx.load_words(warp.vector, offset, None, vector_of(4, 32), space="shared")
        words = [llvm.extractelement(loaded, constant(q)) for q in range(4)]
        for q in (0, 2):
            column = (offset + 4 * q) // plan.itemsize
            for entry in _numbers(call, ptx.larger_of_words(call.of, words[q], words[q + 1]), column):
                yield entry if is_there is None else arith.select(is_there, entry, constant(_LOWEST))


def _numbers(call, word, column):
    """Of the elements of a word, in columns from a constant one on, the numbers that are in their order."""
    places = [constant(call.last ^ (column + q)) for q in range(4 // call.plan.itemsize)]
    if call.is_half:
        word = _in_order(word)
        return [_low(word, places[0]), arith.ori(arith.andi(word, constant(-(2**16))), places[1])]
    return [_number(call, word, places[0])]


def _number(call, word, place):
    """Of a 32-bit element."""
    mask = -(2**call.bits)
    number = arith.ori(arith.andi(word, constant(mask)), place)
    if call.of == jnp.uint32:
        return arith.xori(number, constant(_LOWEST))
    if call.of == jnp.int32:
        return number
    return arith.xori(number, arith.andi(arith.shrsi(word, constant(31)), constant(mask & 0x7FFFFFFF)))


def _in_order(word):
    """Two 16-bit floats as signed integers in their order."""
    signs = _asm("prmt.b32 $0, $1, $1, 0xbb99;", word)
    return arith.xori(word, arith.andi(signs, constant(0x7FFF7FFF)))


def _low(word, place):
    """The lower half of a word above, and that of another one below."""
    return arith.ori(arith.shli(word, constant(16)), place)


def _elements(call, warp, entry):
    """The numbers of both elements of the pair that this number stands for, the larger one first."""
    mask = constant(call.last)
    column = arith.xori(arith.andi(entry, mask), mask)
    if call.is_half:
        address = arith.addi(warp.own, arith.shli(column, constant(1)))
        text = (
            "{ .reg .b16 a, b; .reg .b32 word, signs; ld.shared.b16 a, [$2]; ld.shared.b16 b, [$2+4]; mov.b32 word, {a, b};"
            f"{_IN_ORDER} prmt.b32 $0, word, $3, 0x1054; prmt.b32 $1, word, $3, 0x3254; }}"
        )
        kinds = [integer(32)] * 2
        first, second = utils.inline_ptx(text, address, entry, result_types=kinds, has_side_effects=True)
        second = arith.xori(second, constant(2))
    else:
        address = arith.addi(warp.own, arith.shli(column, constant(2)))
        loaded = ptx.load_words(address, 0, None, vector_of(2, 32), space="shared")
        place = arith.andi(entry, mask)
        first = _number(call, llvm.extractelement(loaded, constant(0)), place)
        second = arith.xori(_number(call, llvm.extractelement(loaded, constant(1)), place), constant(1))
    return arith.maxsi(first, second), arith.minsi(first, second)


def _first_of_equal(warp, entry, winner):
    """The element that is the k-th one among the first elements of pairs, if `winner` is that of the k-th pair, `entry`.

    In 16 bits pairs are columns 0 and 2, or 1 and 3, of each four. The first pair of four comes before the second one, if
    their maxima are equal, and so may 2 come before 1.
    """
    mask = constant(0xFFFF)
    column = arith.ori(arith.xori(arith.andi(entry, mask), mask), constant(1))
    address = arith.addi(warp.own, arith.shli(column, constant(1)))
    text = (
        "{ .reg .b16 a, b; .reg .b32 word, signs, own, other, even; .reg .pred is, more;"
        " ld.shared.b16 a, [$1]; ld.shared.b16 b, [$1+4]; mov.b32 word, {a, b};"
        f"{_IN_ORDER} xor.b32 even, $2, 1; prmt.b32 own, word, even, 0x1054; prmt.b32 other, word, even, 0x3254;"
        " max.s32 other, other, own; or.b32 word, $3, 0xffff; setp.le.s32 is, other, word; and.b32 even, $2, 1;"
        " setp.ne.and.u32 is, even, 0, is; mov.b32 $0, $3; @is max.s32 $0, $3, own; }"
    )
    return utils.inline_ptx(text, address, entry, winner, result_types=integer(32), has_side_effects=True)


_IN_ORDER = " prmt.b32 signs, word, word, 0xbb99; and.b32 signs, signs, 0x7fff7fff; xor.b32 word, word, signs;"


def _of_other(value, bit):
    """What the lane has whose index differs in this bit."""
    return nvvm.shfl_sync(constant(-1), value, constant(bit), constant(WARP - 1), nvvm.ShflKind.bfly)


# What was found.


def _sure(call, warp, entries, is_unsure):
    """The bits of the elements, of 16-bit ones in the upper half of words, and their columns, of which none is another."""
    mask = constant(call.last)
    columns = [arith.xori(arith.andi(entry, mask), mask) for entry in entries]
    if call.is_half:
        bits = []
        for entry in entries:
            above = arith.andi(entry, constant(-(2**16)))
            bits.append(arith.xori(above, arith.andi(arith.shrsi(entry, constant(31)), constant(0x7FFF0000))))
    else:
        bits = [_word_at(warp, column) for column in columns]
        for a, b in itertools.pairwise(bits):
            wrong = _is_less(call, a, b)
            is_unsure = wrong if is_unsure is None else arith.ori(is_unsure, wrong)
    if is_unsure is None:  # of one entry that nothing is left of
        return bits, columns
    k, kind = call.k, "float32" if call.is_float else call.of.name
    unsure = arith.extui(integer(32), both(is_unsure, warp.is_there))
    operands = [*bits, *columns, warp.own, warp.lane, unsure]
    names = {name: f"${4 * k + i}" for i, name in enumerate(("own", "lane", "unsure"))}
    names |= {"key": KEY[kind], "value": _VALUE[kind], "cols": call.plan.cols, "size": call.plan.itemsize}
    names["load"] = "ld.shared.u16 key, [place]; shl.b32 key, key, 16;" if call.is_half else "ld.shared.b32 key, [place];"
    text = "".join(f" mov.b32 ${i}, ${2 * k + i};" for i in range(2 * k)) + _BEGIN.format(**names)
    text += "".join(_PASS.format(number=i, bits=f"${i}", column=f"${k + i}", **names) for i in range(k))
    found = utils.inline_ptx(
        f"{{ {_REGISTERS}{text} bra next; done: }}",
        *operands,
        result_types=[integer(32)] * (2 * k),
        has_side_effects=True,
        convergent=True,
    )
    return found[:k], found[k:]


def _word_at(warp, column):
    address = arith.addi(warp.own, arith.shli(column, constant(2)))
    return llvm.extractelement(ptx.load_words(address, 0, None, vector_of(1, 32), space="shared"), constant(0))


def _is_less(call, a, b):
    """Whether one element, as bits, is less than another; neither is NaN, and of two zeros none is."""
    if call.is_float:
        return arith.cmpf(arith.CmpFPredicate.OLT, *(arith.bitcast(ir.F32Type.get(), value) for value in (a, b)))
    return compare("slt" if call.of == jnp.int32 else "ult", a, b)


# Rows in which a lane is unsure, one after another, by all lanes of the warp, k times each: the largest entry that comes after
# the one before.
_REGISTERS = ".reg .pred is, more; .reg .b32 todo, who, row, place, at, key, word, before, last, best, found; .reg .b32 top;"
_BEGIN = (
    " setp.ne.u32 is, {unsure}, 0; vote.sync.ballot.b32 todo, is, 0xffffffff;"
    " next: setp.eq.u32 is, todo, 0; @is bra done; bfind.u32 who, todo;"
    " shfl.sync.idx.b32 row, {own}, who, 31, 0xffffffff; mov.b32 word, 1; shl.b32 word, word, who; xor.b32 todo, todo, word;"
    " mov.b32 before, 0xffffffff; mov.b32 last, 0xffffffff;"
)
_PASS = (
    " mov.b32 best, 0; mov.b32 found, 0x7fffffff; mov.b32 at, {lane}; mad.lo.u32 place, at, {size}, row;"
    ' element{number}: .pragma "nounroll"; setp.ge.s32 is, at, {cols}; @is bra end{number}; {load}{key}'
    " setp.gt.s32 more, at, last; setp.eq.and.u32 more, key, before, more; setp.lt.or.u32 more, key, before, more;"
    " setp.eq.s32 is, found, 0x7fffffff; setp.gt.or.u32 is, key, best, is; and.pred is, is, more;"
    " @is mov.b32 best, key; @is mov.b32 found, at; add.s32 at, at, 32; add.u32 place, place, 32*{size};"
    " bra element{number}; end{number}: redux.sync.max.u32 top, best, 0xffffffff;"
    " setp.ne.u32 is, best, top; @is mov.b32 found, 0x7fffffff; redux.sync.min.u32 last, found, 0xffffffff;"
    " mov.b32 before, top; mov.b32 key, top;{value} setp.eq.u32 is, {lane}, who; @is mov.b32 {bits}, key;"
    " @is mov.b32 {column}, last;"
)
_VALUE = {  # the bits of what has this key
    "float32": " shr.s32 word, key, 31; not.b32 word, word; or.b32 word, word, 0x80000000; xor.b32 key, key, word;",
    "int32": " xor.b32 key, key, 0x80000000;",
    "uint32": "",
}


# The state, and weights.


def _state_of_row(call, warp, largest):
    """The state `(m, d)` of a lane's row, whose largest entry is this one, or some entry where NaN is in the row."""
    m = shifted(largest)
    sums: list[Any] = [None] * 4
    fill = 0xFF800000 if call.plan.itemsize == 4 else {"bfloat16": 0xFF80FF80, "float16": 0xFC00FC00}[call.of.name]
    for number, (offset, is_there) in enumerate(warp.vectors()):
        loaded = ptx.load_words(warp.vector, offset, is_there, vector_of(4, 32), fill, space="shared")
        values = [value for q in range(4) for value in widened(call.of, llvm.extractelement(loaded, constant(q)))]
        total, at = sum_of([exponential(arith.subf(value, m)) for value in values]), number % 4
        sums[at] = total if sums[at] is None else arith.addf(sums[at], total)
    d = sum_of([sum_ for sum_ in sums if sum_ is not None])
    for bit in [1 << i for i in range(call.plan.lanes.bit_length() - 1)]:
        d = arith.addf(d, _of_other(d, bit))
    return m, d


def _weights(call, values, state):
    """The weights of the values that were found."""
    m = state[0] if call.normalize == "all" else shifted(values[0])
    weights = [exponential(arith.subf(value, m)) for value in values]
    d = state[1] if call.normalize == "all" else functools.reduce(arith.addf, weights)
    inverse = inverse_of(d)
    return [arith.mulf(weight, inverse) for weight in weights]


def _float(call, bits):
    """The float32 of an element whose bits these are, of a 16-bit one in the upper half."""
    return as_float(arith.shrui(bits, constant(16)) if call.of == jnp.float16 else bits, call.of)


def paired(halves):
    """Words of 16 bits, by two in one of 32 bits if they are even."""
    if len(halves) % 2:
        return halves
    return [_asm("mov.b32 $0, {$1, $2};", *pair) for pair in zip(halves[::2], halves[1::2], strict=True)]


def _asm(text, *operands):
    return utils.inline_ptx(text, *operands, result_types=integer(32))
