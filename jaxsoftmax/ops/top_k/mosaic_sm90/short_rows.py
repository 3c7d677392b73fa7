"""The k largest entries of many short rows on Hopper, such as the experts of a router, and their softmax weights.

A warp copies its rows to shared memory, and then a lane, or a few, search a row of it:

1. The larger element of each pair becomes a number of 32 bits: its key above, all bits of it in 16-bit floats, and its column
   below. A `network` finds the k largest of these numbers.
2. The k largest elements are among the pairs of these numbers. The other elements of the pairs are looked up in shared memory,
   put in order, and merged with the first ones.
3. With the state of a row, `m` is the first value, and `d` is summed up in another pass over shared memory.

The last bits of 32-bit elements are missing in their numbers. Where these might decide, and where NaN is in a row, the warp
searches the row again, one entry after another, which takes long and is seldom needed.

An element is read once, in 4 bytes or 2, and k values and indices of each row are written. Besides memory, comparisons and
logic limit the kernel: a multiprocessor does 64 at a time. For the 8 largest of 64 elements it takes 32 to make pairs (16 in 16
bits), 96 to make numbers of them (64), 253 for the network (248), and about 250 for the rest: 600 in place of 1000 without
pairs.
"""

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm

from jaxsoftmax._gpu.emit import (
    WARP,
    both,
    compare,
    constant,
    emit,
    i64,
    integer,
    larger_of_words,
    load_words,
    store_words,
    utils,
)
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.top_k.mosaic_sm90 import network, warp_rows
from jaxsoftmax.ops.top_k.mosaic_sm90.keys import KEY, VALUE, kernel_dtype
from jaxsoftmax.ops.top_k.mosaic_sm90.network import Largest
from jaxsoftmax.ops.top_k.mosaic_sm90.warp_rows import StagedRows, WarpRows, words_type
from jaxsoftmax.ops.top_k.problem import TopKProblem

_LOWEST = -(2**31)


@dataclass(frozen=True)
class ShortRowsPlan:
    """Runs `top_k` or `softmax_top_k` of short rows."""

    staged: StagedRows
    batch: tuple[int, ...]  # sizes of the axes in front of the rows
    k: int
    dtype: np.dtype  # in which elements are loaded
    out_dtype: np.dtype  # of the values or weights
    normalize: str | None  # "all" or "selected", the entries over which weights are normalized; None for values
    return_state: bool
    remark = None

    def describe(self) -> str:
        return f"{self.staged.describe()}, a network for the {self.k} largest"

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block."""
        return self.staged.block_bytes

    def run(self, **operands: Any) -> list[jax.Array]:
        """Returns the values or weights, the indices, and the state if it is asked for."""
        rows, dtype = self.staged.rows, self.out_dtype if self.is_float else self.dtype
        results = [jax.ShapeDtypeStruct((rows * self.k,), kind) for kind in (dtype, jnp.int32)]
        results += [jax.ShapeDtypeStruct((rows,), jnp.float32)] * (2 * self.return_state)
        arrays = kernel_of(
            functools.partial(_kernel, self),
            out_type=results,
            grid=(self.staged.blocks,),
            grid_names=("block",),
            scratch_types=[plgpu.SMEM((self.staged.block_bytes // 4,), jnp.int32)],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="top_k_of_short_rows_mosaic",
        )(operands["x"].astype(self.dtype).reshape(-1, self.staged.cols))
        values, *others = [a.reshape(*self.batch, -1) for a in arrays]
        return [values.astype(self.out_dtype), *others]

    @functools.cached_property
    def is_half(self) -> bool:
        return self.dtype.itemsize == 2

    @functools.cached_property
    def is_float(self) -> bool:
        return jnp.issubdtype(self.dtype, jnp.floating)

    @functools.cached_property
    def bits(self) -> int:
        """Number of low bits of a number, which hold the column."""
        return 16 if self.is_half else (self.staged.cols - 1).bit_length()

    @functools.cached_property
    def last(self) -> int:
        """Column from which the others are counted, so that of equal elements the first one is the largest."""
        return 2**self.bits - 1

    @functools.cached_property
    def comparators(self) -> network.Comparators:
        return network.Comparators(arith.maxsi, arith.minsi, tells_dropped=not self.is_half)


def serves(problem: TopKProblem) -> bool:
    """Tells whether the kernel serves `top_k` or `softmax_top_k`: of whole vectors, without mask and scale, for small k."""
    itemsize = kernel_dtype(problem.operands["x"].dtype).itemsize
    is_float = jnp.issubdtype(problem.operands["x"].dtype, jnp.floating)
    if not problem.is_plain or problem.k > warp_rows.MAX_K or (problem.params["return_state"] and not is_float):
        return False
    return warp_rows.serves(problem.cols, itemsize)


def plan_short_rows(problem: TopKProblem) -> ShortRowsPlan:
    """Plans `top_k` or `softmax_top_k` of rows that the kernel serves."""
    dtype, k = kernel_dtype(problem.operands["x"].dtype), problem.k
    out_itemsize = (problem.dtype if jnp.issubdtype(dtype, jnp.floating) else dtype).itemsize
    rows_per_warp = warp_rows.rows_per_warp(problem.cols * dtype.itemsize)
    staged = StagedRows(problem.rows, problem.cols, dtype.itemsize, rows_per_warp, min_row_bytes=k * (4 + out_itemsize))
    normalize, return_state = problem.params.get("normalize"), problem.params["return_state"]
    return ShortRowsPlan(staged, problem.batch, k, dtype, problem.dtype, normalize, return_state)


def _kernel(plan, x, *refs):
    emit(functools.partial(_emit, plan), (x, *refs), [lax.axis_index("block")])


def _emit(plan: ShortRowsPlan, x, values, indices, *refs):
    """Searches the rows of a warp."""
    *state_refs, shared, block = refs
    warp = WarpRows(plan.staged, shared, block)
    warp.fetch(x)
    warp.await_rows()
    numbers, is_unsure = _search(plan, warp)
    bits, columns = _confirm(plan, warp, numbers, is_unsure)
    state = None
    if plan.normalize == "all" or plan.return_state:
        state = _state_of_row(plan, warp, warp_rows.floats_above(plan.dtype, bits[:1])[0])
    results = _results(plan, values.type.element_type, bits, state)
    utils.warp_barrier()  # rows are not needed any more: results take their place in shared memory
    is_first = compare("eq", warp.part, constant(0)) if plan.staged.lanes > 1 else None
    _store_entries(plan, warp, is_first, (values, indices), (results, columns))
    if plan.return_state and state is not None:
        _store_state(warp, is_first, state_refs, state)


# The search.


def _search(plan, warp):
    """Returns the numbers of the k largest elements of a lane's row in decreasing order, and whether they may be others."""
    comparators, k = plan.comparators, plan.k
    pairs = _largest_pairs(plan, warp)
    winners, losers = map(list, zip(*[_elements(plan, warp, number) for number in pairs.largest], strict=True))
    if plan.is_half and len(winners) == k and 2 * k < plan.staged.cols:
        winners[-1] = _first_of_equal(warp, pairs.largest[-1], winners[-1])
    if plan.is_half:  # so may two neighbours have to change places
        for first in (0, 1):
            for i in range(first, len(winners) - 1, 2):
                pair = winners[i : i + 2]
                winners[i : i + 2] = comparators.maximum(*pair), comparators.minimum(*pair)
    # The other element of the k-th pair comes after k elements: the winners.
    last = losers.pop() if len(winners) == k else None
    dropped = [number for number in (pairs.dropped, last) if number is not None] if comparators.tells_dropped else []
    dropped = functools.reduce(comparators.maximum, dropped) if dropped else None
    result = network.merge(comparators, Largest(winners, dropped), Largest(network.in_order(comparators, losers)), k)
    is_unsure = None
    if plan.is_float:  # NaN in a row was made the largest of all
        infinity = 0x7C000000 if plan.dtype == jnp.float16 else 0x7F800000
        is_unsure = compare("sgt", pairs.largest[0], constant(infinity | plan.last))
    if result.dropped is not None:
        is_alike = compare("ult", arith.xori(result.largest[-1], result.dropped), constant(2**plan.bits))
        is_unsure = is_alike if is_unsure is None else arith.ori(is_unsure, is_alike)
    return result.largest, is_unsure


def _largest_pairs(plan, warp) -> Largest:
    """Finds the numbers of the k pairs with the largest maxima, by each lane in its part of the row and then by all of them."""
    comparators, k = plan.comparators, plan.k
    pairs = network.largest(comparators, _numbers_of_pairs(plan, warp), k)
    if plan.staged.lanes > 1:
        part = arith.muli(warp.part, constant(warp_rows.VECTOR // plan.dtype.itemsize))
        pairs = Largest([arith.xori(number, part) for number in pairs.largest], pairs.dropped)
    for bit in plan.staged.lane_bits:
        dropped = None if pairs.dropped is None else _from_lane(pairs.dropped, bit)
        others = Largest([_from_lane(number, bit) for number in pairs.largest], dropped)
        pairs = network.merge(comparators, pairs, others, k)
    return pairs


def _numbers_of_pairs(plan, warp) -> Iterator[Any]:
    """Yields the numbers of the pairs of a lane's vectors, without what tells the lanes of a row apart."""
    itemsize = plan.dtype.itemsize
    for first in range(0, plan.staged.vectors, plan.staged.lanes):
        has_vector = warp.has_vector(first)
        loaded = warp.load_vector(first, None)
        words = [llvm.extractelement(loaded, constant(q)) for q in range(4)]
        for q in (0, 2):
            pair, column = words[q : q + 2], (first * warp_rows.VECTOR + 4 * q) // itemsize
            numbers = _numbers_of_halves(plan, pair, column) if plan.is_half else [_number(plan, pair, plan.last ^ column)]
            for number in numbers:
                yield number if has_vector is None else arith.select(has_vector, number, constant(_LOWEST))


def _numbers_of_halves(plan, words, column: int):
    """Returns the numbers, signed, of two pairs of 16-bit elements in two words, which start with this column."""
    larger = larger_of_words(plan.dtype, *words)
    places = [constant(plan.last ^ (column + q)) for q in (0, 1)]
    signs = utils.inline_ptx("prmt.b32 $0, $1, $1, 0xbb99;", larger, result_types=integer(32))  # 0xFFFF in each negative half
    keys = arith.xori(larger, arith.andi(signs, constant(0x7FFF7FFF)))
    low = arith.ori(arith.shli(keys, constant(16)), places[0])
    return [low, arith.ori(arith.andi(keys, constant(-(2**16))), places[1])]


def _number(plan, words, place):
    """Returns the number, signed, of the larger of 32-bit elements, or of a single one, with the bits of `place` below."""
    word, mask = functools.reduce(functools.partial(larger_of_words, plan.dtype), words), -(2**plan.bits)
    place = constant(place) if isinstance(place, int) else place
    number = arith.ori(arith.andi(word, constant(mask)), place)
    if plan.dtype == jnp.uint32:
        return arith.xori(number, constant(_LOWEST))
    if plan.dtype == jnp.int32:
        return number
    return arith.xori(number, arith.andi(arith.shrsi(word, constant(31)), constant(mask & 0x7FFFFFFF)))


def _elements(plan, warp, number):
    """Returns the numbers of both elements of the pair that has this number, the larger one first."""
    pair, mask = words_type(2, 32), constant(plan.last)
    column = arith.xori(arith.andi(number, mask), mask)
    if plan.is_half:
        first, second = _halves_of_pair(warp, column, number)
        second = arith.xori(second, constant(2))
    else:
        address = arith.addi(warp.row_start, arith.shli(column, constant(2)))
        loaded = load_words(address, 0, None, pair, space="shared")
        place = arith.andi(number, mask)
        first = _number(plan, [llvm.extractelement(loaded, constant(0))], place)
        second = arith.xori(_number(plan, [llvm.extractelement(loaded, constant(1))], place), constant(1))
    return arith.maxsi(first, second), arith.minsi(first, second)


# PTX that loads the two 16-bit elements of a pair, two columns apart, and puts both halves of `word` in order, as signed
# integers.
_LOAD_PAIR = " ld.shared.b16 a, [{address}]; ld.shared.b16 b, [{address}+4]; mov.b32 word, {{a, b}};"
_IN_ORDER = " prmt.b32 signs, word, word, 0xbb99; and.b32 signs, signs, 0x7fff7fff; xor.b32 word, word, signs;"


def _halves_of_pair(warp, column, number):
    """Returns the keys of the two 16-bit elements of a pair, each above the low half of `number`."""
    address = arith.addi(warp.row_start, arith.shli(column, constant(1)))
    text = (
        "{ .reg .b16 a, b; .reg .b32 word, signs;"
        + _LOAD_PAIR.format(address="$2")
        + _IN_ORDER
        + " prmt.b32 $0, word, $3, 0x1054;"  # the lower half of `word` above the lower half of `number`
        " prmt.b32 $1, word, $3, 0x3254; }"  # its upper half above the same
    )
    return utils.inline_ptx(text, address, number, result_types=[integer(32)] * 2, has_side_effects=True)


def _first_of_equal(warp, number, winner):
    """Returns the k-th of the first elements of pairs, if `winner` is the first element of the k-th pair, `number`.

    In 16 bits pairs are columns 0 and 2, or 1 and 3, of each four, as these are at one place of two words. The first pair of
    four comes before the second one if their maxima are equal, and so may column 2 come before column 1.
    """
    mask = constant(0xFFFF)
    column = arith.ori(arith.xori(arith.andi(number, mask), mask), constant(1))  # of the second pair of the four
    address = arith.addi(warp.row_start, arith.shli(column, constant(1)))
    text = (
        "{ .reg .b16 a, b; .reg .b32 word, signs, own, other, even; .reg .pred is, more;"
        + _LOAD_PAIR.format(address="$1")
        + _IN_ORDER
        + " xor.b32 even, $2, 1;"  # the place of column 1, and of column 3
        " prmt.b32 own, word, even, 0x1054; prmt.b32 other, word, even, 0x3254;"
        " max.s32 other, other, own;"  # the larger element of the second pair
        " or.b32 word, $3, 0xffff; setp.le.s32 is, other, word;"  # is no larger than the winner of the first pair
        " and.b32 even, $2, 1; setp.ne.and.u32 is, even, 0, is;"  # and `number` belongs to the first pair
        " mov.b32 $0, $3; @is max.s32 $0, $3, own; }"
    )
    return utils.inline_ptx(text, address, number, winner, result_types=integer(32), has_side_effects=True)


def _from_lane(value, bit: int):
    """Returns the value of the lane whose index differs in this bit."""
    return nvvm.shfl_sync(constant(-1), value, constant(bit), constant(WARP - 1), nvvm.ShflKind.bfly)


# Confirmation, by another search where it is needed.


def _confirm(plan, warp, numbers, is_unsure):
    """Returns the bits of the elements, of 16-bit ones in the upper half of words, and their columns.

    For k = 8 the other search is needed for one row in 7000 of 64 normal numbers in float32, and one in 900 of 256.
    """
    mask = constant(plan.last)
    columns = [arith.xori(arith.andi(number, mask), mask) for number in numbers]
    if plan.is_half:
        bits = []
        for number in numbers:
            above = arith.andi(number, constant(-(2**16)))
            bits.append(arith.xori(above, arith.andi(arith.shrsi(number, constant(31)), constant(0x7FFF0000))))
    else:
        bits, word = [], words_type(1, 32)
        for column in columns:
            address = arith.addi(warp.row_start, arith.shli(column, constant(2)))
            bits.append(llvm.extractelement(load_words(address, 0, None, word, space="shared"), constant(0)))
        for a, b in itertools.pairwise(bits):
            is_wrong = _is_less(plan, a, b)
            is_unsure = is_wrong if is_unsure is None else arith.ori(is_unsure, is_wrong)
    if is_unsure is None:  # one column, or k is all columns: nothing was dropped
        return bits, columns
    return _search_again(plan, warp, bits, columns, both(is_unsure, warp.is_valid))


def _is_less(plan, a, b):
    """Tells whether one element, as bits, is less than another; neither is NaN, and 0 and -0 are equal."""
    if plan.is_float:
        return arith.cmpf(arith.CmpFPredicate.OLT, *(arith.bitcast(ir.F32Type.get(), value) for value in (a, b)))
    return compare("slt" if plan.dtype == jnp.int32 else "ult", a, b)


def _search_again(plan, warp, bits, columns, is_unsure):
    """Searches the rows of lanes that are unsure, one after another, by all lanes of the warp.

    The k entries of a row are found one by one: each is the largest of those that come after the one before.
    """
    k, kind = plan.k, "float32" if plan.is_float else plan.dtype.name
    operands = [*bits, *columns, warp.row_start, warp.lane, arith.extui(integer(32), is_unsure)]
    names = {name: f"${4 * k + i}" for i, name in enumerate(("row_start", "lane", "unsure"))}
    names |= {"key": KEY[kind], "value": VALUE[kind], "cols": plan.staged.cols, "size": plan.dtype.itemsize}
    names["load"] = "ld.shared.u16 key, [place]; shl.b32 key, key, 16;" if plan.is_half else "ld.shared.b32 key, [place];"
    text = "".join(f" mov.b32 ${i}, ${2 * k + i};" for i in range(2 * k)) + _NEXT_ROW.format(**names)
    text += "".join(_NEXT_ENTRY.format(number=i, bits=f"${i}", column=f"${k + i}", **names) for i in range(k))
    results = utils.inline_ptx(
        f"{{ {_REGISTERS}{text} bra next; done: }}",
        *operands,
        result_types=[integer(32)] * (2 * k),
        has_side_effects=True,
        convergent=True,
    )
    return results[:k], results[k:]


_REGISTERS = ".reg .pred is, more; .reg .b32 todo, who, row, place, at, key, word, before, last, best, found; .reg .b32 top;"
_NEXT_ROW = (
    " setp.ne.u32 is, {unsure}, 0; vote.sync.ballot.b32 todo, is, 0xffffffff;"  # a bit for each lane that is unsure
    " next: setp.eq.u32 is, todo, 0; @is bra done;"
    " bfind.u32 who, todo; shfl.sync.idx.b32 row, {row_start}, who, 31, 0xffffffff;"  # the highest of them, and its row
    " mov.b32 word, 1; shl.b32 word, word, who; xor.b32 todo, todo, word;"
    " mov.b32 before, 0xffffffff; mov.b32 last, 0xffffffff;"  # key and column of the entry before: there is none
)
_NEXT_ENTRY = (
    " mov.b32 best, 0; mov.b32 found, 0x7fffffff;"  # the lane's best key, and its column: none
    " mov.b32 at, {lane}; mad.lo.u32 place, at, {size}, row;"  # a lane has every 32nd column
    ' element{number}: .pragma "nounroll"; setp.ge.s32 is, at, {cols}; @is bra end{number}; {load}{key}'
    " setp.gt.s32 more, at, last; setp.eq.and.u32 more, key, before, more;"  # as large as the one before, and behind it
    " setp.lt.or.u32 more, key, before, more;"  # or less
    " setp.eq.s32 is, found, 0x7fffffff; setp.gt.or.u32 is, key, best, is; and.pred is, is, more;"
    " @is mov.b32 best, key; @is mov.b32 found, at;"
    " add.s32 at, at, 32; add.u32 place, place, 32*{size}; bra element{number};"
    " end{number}: redux.sync.max.u32 top, best, 0xffffffff;"  # the best key of the warp
    " setp.ne.u32 is, best, top; @is mov.b32 found, 0x7fffffff;"
    " redux.sync.min.u32 last, found, 0xffffffff;"  # and the first column that has it
    " mov.b32 before, top; mov.b32 key, top;{value}"
    " setp.eq.u32 is, {lane}, who; @is mov.b32 {bits}, key; @is mov.b32 {column}, last;"  # by the lane that was unsure
)


# The state, weights and results.


def _state_of_row(plan, warp, largest):
    """Computes the state `(m, d)` of a lane's row, whose largest entry is this one, or some entry if NaN is in the row.

    The maximum is known, so nothing is rescaled. The pass takes units that would be idle: it has no comparisons.
    """
    m = warp_rows.shift(largest)
    sums: list[Any] = [None] * 4
    fill = 0xFF800000 if plan.dtype.itemsize == 4 else {"bfloat16": 0xFF80FF80, "float16": 0xFC00FC00}[plan.dtype.name]
    for number, first in enumerate(range(0, plan.staged.vectors, plan.staged.lanes)):
        values, at = warp.load_floats(plan.dtype, first, warp.has_vector(first), fill), number % 4
        total = warp_rows.sum_of([warp_rows.exponential(arith.subf(value, m)) for value in values])
        sums[at] = total if sums[at] is None else arith.addf(sums[at], total)
    d = warp_rows.sum_of([partial for partial in sums if partial is not None])
    for bit in plan.staged.lane_bits:
        d = arith.addf(d, _from_lane(d, bit))
    return m, d


def _results(plan, kind, bits, state):
    """Returns the words of weights, or of values, in a type of MLIR."""
    if plan.normalize is not None:
        return warp_rows.narrow(_weights(plan, warp_rows.floats_above(plan.dtype, bits), state), kind)
    if not plan.is_half:
        return bits
    if utils.bitwidth(kind) == 32:  # float32 of a narrower one
        return warp_rows.narrow(warp_rows.floats_above(plan.dtype, bits), kind)
    halves = [arith.trunci(integer(16), arith.shrui(b, constant(16))) for b in bits]
    if len(halves) % 2:
        return halves
    pairs = zip(halves[::2], halves[1::2], strict=True)
    return [utils.inline_ptx("mov.b32 $0, {$1, $2};", *pair, result_types=integer(32)) for pair in pairs]


def _weights(plan, values, state):
    """Computes the weights of the values."""
    m = state[0] if plan.normalize == "all" else warp_rows.shift(values[0])
    weights = [warp_rows.exponential(arith.subf(value, m)) for value in values]
    d = state[1] if plan.normalize == "all" else functools.reduce(arith.addf, weights)
    factor = warp_rows.normalizer(d)
    return [arith.mulf(weight, factor) for weight in weights]


def _store_entries(plan, warp, is_first, refs, results) -> None:
    """Stores the k values and indices of rows through the place of the warp, so that lanes write neighbouring bytes.

    `is_first` is true in one lane of each row, which has the results of it, or None if each row has one lane.
    """
    sizes = [plan.k * utils.bytewidth(ref.type.element_type) for ref in refs]
    offsets = [0, plan.staged.rows_per_warp * sizes[0]]
    for words, size, offset in zip(results, sizes, offsets, strict=True):
        warp_rows.store_to_shared(arith.addi(warp.start, arith.muli(warp.row, constant(size))), words, is_first, offset)
    utils.warp_barrier()
    for ref, size, offset in zip(refs, sizes, offsets, strict=True):
        warp.store_packed(ref, size, offset)


def _store_state(warp, is_first, refs, state) -> None:
    """Stores the states of rows."""
    for ref, value in zip(refs, state, strict=True):
        address = arith.addi(warp.address(ref, 4), i64(arith.muli(warp.row, constant(4))))
        word = llvm.insertelement(llvm.mlir_undef(words_type(1, 32)), arith.bitcast(integer(32), value), constant(0))
        store_words(address, 0, both(is_first, warp.is_valid), word)
