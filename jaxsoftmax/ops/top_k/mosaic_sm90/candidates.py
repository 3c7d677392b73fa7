"""The best entries of a row so far, as a list in the shared memory of a block: offered, cut to the k best, sorted, stored.

An entry is a number of 64 bits: above, the value's key, which is ordered as `lax.top_k` orders values; in the lowest bits how
far the column is from the last one that these bits hold. So entries differ, and of equal values that of the lower column is
larger. 0 is no entry. The list has a bound below which nothing is taken. Whatever is offered above it is appended, by an
addition to a counter. When the list is long, the bound is raised to the k-th largest entry, and what is below it dropped. The
bound is found by bisection: each step counts how many entries are no less than the middle. One warp does, or all if the list is
longer than it can hold.

Warps need not offer at the same time: a warp is up to one sweep ahead of others. They tell each other by an mbarrier, of which
each sweep is a phase, and by the number of the sweep after which the list was long.

All functions are for all threads of a block. In PTX, as Pallas has neither atomic additions nor barriers that count.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import SPLAT, WARP, Vector, compare, constant, i64, integer, utils
from jaxsoftmax._gpu.rows.plan import RowPlan

# A scalar int32 of a kernel.
FLAG = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)
HEAD = 12  # words of `Candidates.head`


@dataclass(frozen=True)
class Places:
    """Where the elements of a few steps are in their row.

    Attributes:
      columns: makes, of the MLIR values of `scalars`, for each step the column of a thread's first element, and for all of them
        how many of its elements are of the next step, at the same place: all int32.
      scalars: int32.
      in_order: whether all are columns of the row, and higher than those of steps before: then what has the bound's value is
        below it. Else what is no column of the row is not taken.
    """

    columns: Callable[..., tuple[Sequence[Any], Any]]
    scalars: Sequence[Any]
    in_order: bool


@dataclass(frozen=True)
class Candidates:
    """The list of a block.

    Attributes:
      entries: `[2 * size]` int32 in shared memory, two for each entry.
      head: `[HEAD]` int32 in shared memory: how many there are, the largest key of a long list, the bound, two numbers of a
        bisection, the mbarrier, and after which even and which odd sweep the list was long, counted from 1.
      k: how many are wanted.
      limit: the list is cut once it is longer. There is room for as many more as are offered at a time.
      layout: of the row in the block.
      dtype: of the values: float32, int32 or uint32.
      of: the dtype that they have in memory: the same, or of float32 a narrower one.
    """

    entries: Any
    head: Any
    k: int
    limit: int
    layout: RowPlan
    dtype: Any
    of: Any

    @property
    def bits(self) -> int:
        """Of an entry for the column, so many that some are left for entries below those of the lowest key."""
        return self.layout.cols.bit_length()

    @property
    def threads(self) -> int:
        return self.layout.threads

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def width(self) -> int:
        """Elements of a step."""
        return self.threads * self.layout.vector

    @property
    def is_half(self) -> bool:
        return self.of.itemsize == 2

    @property
    def _key(self) -> str:
        """PTX that makes `key` of the bits in it."""
        return KEY[self.dtype.name] + (" shr.u32 key, key, 16;" if self.is_half else "")

    def clear(self) -> None:
        """Makes the list empty, with no bound."""
        self._run(
            "setp.eq.u32 is, {thread}, 0; @is st.shared.v4.b32 [{head}], {{0, 0, 0, 0}};"
            f" @is st.shared.v2.b32 [{{head}}+40], {{{{0, 0}}}}; @is mbarrier.init.shared::cta.b64 [{{head}}+32], {self.warps};"
            " bar.sync 0;"
        )

    def is_long(self, number) -> jax.Array:
        """Whether the list is to be cut before the sweep of this number: 1 or 0, an int32 alike in all threads.

        A warp waits until all have offered what they have of the sweep before. Its first lane reads the flag, and a vote tells
        the others. The same lane arrives at the mbarrier in `offer`, so that no warp stores the flag anew before it was read.
        """
        asm = (
            "{ .reg .pred is, first; .reg .b32 word, lane; mov.b32 $0, 0; setp.eq.u32 is, $2, 0; @is bra.uni end;"
            " sub.u32 word, $2, 1; and.b32 word, word, 1;"
            " again: mbarrier.try_wait.parity.shared::cta.b64 is, [$1+32], word; @!is bra again; mov.u32 lane, %laneid;"
            " setp.eq.u32 first, lane, 0; shl.b32 word, word, 2; add.u32 word, word, $1; @first ld.shared.b32 word, [word+40];"
            " setp.eq.and.u32 is, word, $2, first; vote.sync.any.pred is, is, 0xffffffff; selp.b32 $0, 1, 0, is; end: }"
        )

        def wait(head, number):
            operands = start_of(head), number
            return [utils.inline_ptx(asm, *operands, result_types=integer(32), has_side_effects=True, convergent=True)]

        return ptx.emit(wait, self.head, [number], results=FLAG)

    def offer(self, number, values: Sequence[jax.Array], top: jax.Array, places: Places) -> None:
        """Appends what is above the bound, in the sweep of this number. Who calls has asked `is_long` before, and cut the list.

        Args:
          number: a scalar int32, from 0.
          values: of a few steps, in the dtype of memory.
          top: the maximum of them at each place, or NaN.
          places: where they are.
        """

        def make(entries, head, *given):
            number, *given = given
            larger = functools.partial(ptx.larger_of_words, self.of)
            *arrays, top = [list(array.registers.flat) for array in given[len(places.scalars) :]]
            # Of the lowest key that may be above it; 0 where there is no bound.
            more = 2**self.bits - 1 if places.in_order else 0
            asm = f"add.u64 key, $0, {more}; shr.u64 key, key, {self.bits}; min.u64 key, key, {2**32 - 1}; cvt.u32.u64 $1, key;"
            asm = f"{{ .reg .b64 key; ld.shared.u64 $0, [$2+8]; {asm} }}"
            kinds = [integer(64), integer(32)]
            bound, key = utils.inline_ptx(asm, start_of(head), result_types=kinds, has_side_effects=True)
            least = self._bits_of(key)
            largest = functools.reduce(larger, [word for register in top for word in _words(register)])
            may_be_above = compare("ne", self._no_less([largest], least), constant(0))
            branch: Any = scf.IfOp(may_be_above, [integer(32)], has_else=True)
            with ir.InsertionPoint(branch.then_block):
                firsts, following = places.columns(*given[: len(places.scalars)])
                words = [word for array in arrays for word in _words(array[0])]
                flags = self._no_less(words, least)
                operands = *words, *firsts, following, flags, bound, start_of(head), start_of(entries)
                asm = self._append(len(words), len(arrays), places.in_order)
                scf.yield_([utils.inline_ptx(asm, *operands, result_types=integer(32), has_side_effects=True)])
            with ir.InsertionPoint(branch.else_block):
                scf.yield_([constant(0)])
            asm = (
                f"{{ .reg .pred is, first; .reg .b32 word, place; setp.gt.u32 is, $1, {self.limit};"
                f" vote.sync.any.pred is, is, 0xffffffff; and.b32 word, $3, {WARP - 1}; setp.eq.u32 first, word, 0;"
                " and.pred is, is, first; and.b32 place, $2, 1; shl.b32 place, place, 2; add.u32 place, place, $0;"
                " add.u32 word, $2, 1; @is st.shared.b32 [place+40], word; bar.warp.sync 0xffffffff;"
                " @first mbarrier.arrive.shared::cta.b64 _, [$0+32]; }"
            )
            operands = start_of(head), branch.results[0], number, utils.thread_idx()
            utils.inline_ptx(asm, *operands, has_side_effects=True, convergent=True)

        arrays = [(array, self.layout.layout) for array in (*values, top)]
        ptx.emit(make, (self.entries, self.head), [number, *places.scalars], arrays)

    def _no_less(self, words, least):
        """A bit for each element of words, in their order: 0 only where it is less than one with the bits `least`."""
        kind = {"float32": "geu.f32", "bfloat16": "geu.bf16x2", "float16": "geu.f16x2", "int32": "ge.s32", "uint32": "ge.u32"}
        flags: Any = constant(0)
        for index, word in enumerate(words):
            if self.is_half:
                bits = f"@is or.b32 $0, $0, {1 << 2 * index}; @more or.b32 $0, $0, {2 << 2 * index};"
            else:
                bits = f"@is or.b32 $0, $0, {1 << index};"
            found = "is|more" if self.is_half else "is"
            asm = f"{{ .reg .pred is, more; mov.b32 $0, $3; setp.{kind[self.of.name]} {found}, $1, $2; {bits} }}"
            flags = utils.inline_ptx(asm, word, least, flags, result_types=integer(32))
        return flags

    def _bits_of(self, key):
        """The bits of the value of a key, of a 16-bit one twice in a word."""
        if self.dtype != jnp.float32:
            return arith.xori(key, constant(-(2**31))) if self.dtype == jnp.int32 else key
        key = arith.shli(key, constant(16)) if self.is_half else key
        bits = utils.inline_ptx(BITS_OF_KEY, key, result_types=integer(32))
        if not self.is_half:
            return bits
        high = arith.andi(bits, constant(-(2**16)))
        return arith.ori(high, arith.shrui(high, constant(16)))

    def _append(self, words: int, steps: int, in_order: bool) -> str:
        """PTX that appends the elements that are flagged and above the bound, one after another, as they are few.

        $0 is the length of the list after that, or 0. The other operands are the words, the column of each step's first
        element, how many of its elements are of the next step, the flags, the bound, and where `head` and `entries` are.
        """
        names = iter(range(1, 1 + words + steps + 5))
        values, firsts = ([f"${next(names)}" for _ in range(count)] for count in (words, steps))
        following, flags, bound, head, entries = (f"${name}" for name in names)
        half, vector_ = int(self.is_half), self.layout.vector
        value = _chosen("key", values, half)
        first = _chosen("column", firsts, vector_.bit_length() - 1)
        if half:
            value += " and.b32 word, q, 1; setp.eq.u32 is, word, 0; @is shl.b32 key, key, 16; and.b32 key, key, 0xffff0000;"
        inside = "" if in_order else f" setp.lt.and.u32 is, column, {self.layout.cols}, is;"
        return (
            "{ .reg .pred is, bit<5>; .reg .b32 flags, q, word, key, column, key<16>, column<16>; .reg .b64 entry, place;"
            f" mov.b32 $0, 0; mov.b32 flags, {flags}; setp.eq.u32 is, flags, 0; @is bra end;"
            " next: bfind.u32 q, flags; mov.b32 word, 1; shl.b32 word, word, q; xor.b32 flags, flags, word;"
            f" {_BITS_OF_Q} {value} {self._key} {first} and.b32 word, q, {vector_ - 1}; add.u32 column, column, word;"
            f" setp.gt.s32 is, {following}, word; @is add.u32 column, column, {self.width};"
            f" sub.u32 word, {2**self.bits - 1}, column; cvt.u64.u32 place, word; mul.wide.u32 entry, key, {2**self.bits};"
            f" add.u64 entry, entry, place; setp.gt.u64 is, entry, {bound};{inside}"
            f" @is atom.shared.add.u32 word, [{head}], 1; @is add.u32 $0, word, 1; @is shl.b32 word, word, 3;"
            f" @is add.u32 word, word, {entries}; @is st.shared.b64 [word], entry;"
            " setp.ne.u32 is, flags, 0; @is bra next; end: }"
        )

    def bound_from(self, values: Sequence[jax.Array]) -> None:
        """Sets the bound, of an empty list, so that at least k of what is to be offered, if there are so many, are above it.

        It is below the k-th largest of the maxima of groups: the elements of a thread, or as many parts of them as it takes to
        have twice as many groups as are wanted. Groups with NaN do not count, whose order the maximum does not keep, and
        neither do those of nothing but -inf, which may be beyond the row.
        """
        parts, larger = self.parts_of(len(values)), functools.partial(ptx.larger_of_words, self.of)

        def make(entries, _, *arrays):
            for part in range(parts):
                words = [word for array in arrays[part::parts] for word in _words(array.registers.item())]
                largest = functools.reduce(larger, words)
                place = arith.addi(utils.thread_idx(), constant(part * self.threads))
                address = ptx.shared_address(entries, arith.muli(place, constant(8)))
                utils.inline_ptx(self._store_group, address, largest, has_side_effects=True)

        ptx.emit(make, (self.entries, self.head), (), [(array, self.layout.layout) for array in values])
        self._run("bar.sync 0;" + _BISECT + _SET_BOUND, n=parts * self.threads, enough=2**self.bits)

    @property
    def _store_group(self) -> str:
        """PTX that stores to $0 the lowest entry of the key of the largest element of a word, $1, or 0."""
        halves = ("shl.b32 key, $1, 16;", "and.b32 key, $1, 0xffff0000;") if self.is_half else ("mov.b32 key, $1;",)
        text = "{ .reg .pred is; .reg .b32 key, word, most; .reg .b64 entry; mov.b32 most, 0;"
        for half in halves:
            text += half + self._key
            if self.dtype == jnp.float32:  # keys between those of the infinities
                bits = int.from_bytes(np.asarray(np.inf, self.of).tobytes(), "little")
                lowest, count = 2 ** (8 * self.of.itemsize - 1) - bits, 2 * bits
                text += f" sub.u32 word, key, {lowest}; setp.lt.u32 is, word, {count}; selp.b32 key, key, 0, is;"
            text += " max.u32 most, most, key;"
        return text + f" mul.wide.u32 entry, most, {2**self.bits}; st.shared.b64 [$0], entry; }}"

    def parts_of(self, count: int) -> int:
        """Of how many parts of its arrays, which are so many, a thread takes the maxima; 0 where they are too few groups."""
        parts = 1
        while parts * self.threads < 2 * self.k:
            parts *= 2
        return parts if parts <= count else 0

    def cut(self) -> None:
        """Drops all but the k largest, in any order, and raises the bound; does nothing where there are no more."""
        self._run("bar.sync 0; ld.shared.u32 n, [{head}]; setp.le.u32 is, n, {k}; @is bra.uni end;" + _BISECT + _KEEP, n=None)

    def cut_to(self, count: int) -> None:
        """The same of a list of `count` entries, at least k of them above the bound, where those that are 0 are none."""
        self._run(_BISECT + _KEEP, n=count)

    def send(self, gathered, rank) -> None:
        """Copies the list, which was cut, to `gathered[rank * k :]` of the first block of the cluster, with 0 for none."""
        self._run(_SEND, gathered, rank=rank)

    def store(self, row, refs: Sequence[Any], sign=None) -> None:
        """Stores the k values, times `sign` where that is not None, and columns in order to a row of two arrays `[rows * k]`.

        There are so many. A thread has an entry, or a few, and counts how many of all are larger.
        """
        # Four entries are read at a time.
        self._run(
            "bar.sync 0; setp.lt.u32 is, {thread}, 4; shl.b32 place, {thread}, 3; add.u32 place, place, {entries};"
            " @is st.shared.u64 [place+8*{k}], 0; bar.sync 0;"
        )

        def make(values, indices, entries, row, *sign):
            start = ptx.shared_address(entries, constant(0))
            base = arith.muli(i64(row), i64(self.k))
            for first in range(0, self.k, self.threads):
                place = arith.addi(utils.thread_idx(), constant(first))
                inside = compare("ult", place, constant(self.k))
                own = arith.select(inside, place, constant(0))
                kinds, asm = [integer(32)] * 3, _RANK.format(size=32 * -(-self.k // 4), bits=self.bits, last=2**self.bits - 1)
                rank, column, key = utils.inline_ptx(asm, own, start, result_types=kinds, has_side_effects=True)
                value = self._value(key)
                if sign:
                    value = arith.mulf(value, sign[0].registers.item())
                for ref, stored in ((values, _cast(value, values.type.element_type)), (indices, column)):
                    size = utils.bytewidth(ref.type.element_type)
                    address = arith.addi(ptx.address_of(ref), arith.muli(arith.addi(base, i64(rank)), i64(size)))
                    one = vector.broadcast(ir.VectorType.get((1,), stored.type), stored)
                    Vector(address, 0, size, inside).store(one)

        ptx.emit(make, (*refs, self.entries), [row], [] if sign is None else [(sign, SPLAT)])

    def _run(self, asm: str, *refs, n: int | None = None, rank=None, enough: int = 1):
        """Runs PTX for all threads, with the names that the texts below use; a bisection ends with a gap of `enough`."""
        names = "entries", "head", "thread", "gathered", "rank"

        def make(*given):
            operands = [ptx.shared_address(ref, constant(0)) for ref in given[: 2 + len(refs)]]
            operands.insert(2, utils.thread_idx())
            operands += given[2 + len(refs) :]
            named = {name: f"${i}" for i, name in enumerate(names)}
            start = "" if n is None else f"mov.u32 n, {n};"
            text = asm.format(**named, k=self.k, threads=self.threads, bits=self.bits, enough=enough, last=2**self.bits - 1)
            utils.inline_ptx(f"{{ {_REGISTERS} {start} {text} end: }}", *operands, has_side_effects=True, convergent=True)

        ptx.emit(make, (self.entries, self.head, *refs), [] if rank is None else [rank])

    def _value(self, key):
        """The value of a key, in `dtype`."""
        bits = self._bits_of(key)
        if self.dtype != jnp.float32:
            return bits
        if not self.is_half:
            return arith.bitcast(ir.F32Type.get(), bits)
        half = arith.bitcast(utils.dtype_to_ir_type(self.of), arith.trunci(integer(16), bits))
        return arith.extf(ir.F32Type.get(), half)


def start_of(ref):
    """The address of an array in shared memory."""
    return ptx.shared_address(ref, constant(0))


def _words(register):
    """The words of a vector."""
    words = vector.bitcast(ptx.words_of(register.type), register)
    return [llvm.extractelement(words, constant(q)) for q in range(words.type.shape[0])]


def _cast(value, kind):
    """A float32 or 32-bit integer value in the type of a result, of which it is one; with its sign where it is NaN, too."""
    if value.type == kind:
        return value
    if isinstance(kind, ir.IntegerType):
        return arith.trunci(kind, value)
    half, bits = integer(16), arith.bitcast(integer(32), value)
    sign = arith.trunci(half, arith.shrui(arith.andi(bits, constant(-(2**31))), constant(16)))
    return arith.bitcast(kind, arith.ori(arith.bitcast(half, arith.truncf(kind, value)), sign))


# The key of an element from its bits. Floats are ordered by sign and size, all of them, with -0 before 0. 16-bit floats are the
# upper halves of words, and so are their keys until they are shifted down.
KEY = {
    "float32": " shr.s32 word, key, 31; or.b32 word, word, 0x80000000; xor.b32 key, key, word;",
    "int32": " xor.b32 key, key, 0x80000000;",
    "uint32": "",
}
# $0: the bits of the float32 of key $1.
BITS_OF_KEY = (
    "{ .reg .b32 word; shr.s32 word, $1, 31; not.b32 word, word; or.b32 word, word, 0x80000000; xor.b32 $0, $1, word; }"
)

# `bit0` to `bit4`: those of the number `q`.
_BITS_OF_Q = "".join(f" and.b32 word, q, {1 << bit}; setp.ne.u32 bit{bit}, word, 0;" for bit in range(5))


def _chosen(name: str, values: Sequence[str], first_bit: int) -> str:
    """PTX of `name`: the value whose number is in the bits of `q` from the first one on."""
    text, values, bit = "", list(values), first_bit
    while len(values) > 1:
        for i in range(0, len(values) - 1, 2):
            text += f" selp.b32 {name}{i // 2}, {values[i + 1]}, {values[i]}, bit{bit};"
            values[i] = f"{name}{i // 2}"
        values, bit = values[::2], bit + 1
    return text + f" mov.b32 {name}, {values[0]};"


_IN_A_WARP = 16  # entries of each lane, of lists that one warp bisects

_REGISTERS = (
    ".reg .pred is, more; .reg .b32 n, total, base, index, count, place, word, most, least, reached, beyond, wanted;"
    " .reg .b64 low, high, middle, gap, entry;"
    f" .reg .b32 value<{_IN_A_WARP}>;"
)


def _of_lane(text: str) -> str:
    """PTX for each entry of a lane, where the second half of them is skipped if there is none."""
    half = _IN_A_WARP // 2
    first, second = ("".join(text.replace("#", str(q)) for q in part) for part in (range(half), range(half, _IN_A_WARP)))
    return f"{first} setp.le.u32 is, n, {WARP * half}; @is bra.uni {{skip}}; {second} {{skip}}:"


def _bisect_in_warp(name: str) -> str:
    """`place`: the largest number from `place` to `most` to which `wanted` values are equal or larger, at least or exactly.

    `reached` is how many are, or what it was where that is the first number, and `beyond` how many are larger than `most`.
    """
    counted = _of_lane(" setp.ge.u32 is, value#, word; @is add.u32 total, total, 1;").format(skip=f"{name}_counted")
    return (
        f" {name}: setp.ge.u32 is, place, most; @is bra.uni {name}_found; sub.u32 word, most, place; shr.u32 word, word, 1;"
        f" sub.u32 word, most, word; mov.u32 total, 0; {counted} redux.sync.add.u32 total, total, 0xffffffff;"
        " setp.ge.u32 more, total, wanted; @more mov.u32 place, word; @more mov.u32 reached, total;"
        " @!more sub.u32 most, word, 1; @!more mov.u32 beyond, total;"
        f" setp.ne.u32 is, total, wanted; @is bra.uni {name}; {name}_found:"
    )


def _largest_in_warp(name: str) -> str:
    """`most`: the largest value."""
    largest = _of_lane(" max.u32 most, most, value#;").format(skip=name)
    return f" mov.u32 most, 0; {largest} redux.sync.max.u32 most, most, 0xffffffff;"


# The lower number of two, `low`, to which at least k of the n entries are equal or larger, or exactly k; it is more than the
# bound, and `enough` further, or one where it is of exactly k, there are fewer. A short list is bisected by one warp, the keys
# first and then the rest of those that have the k-th one, and a long one by all threads.
_BISECT = (
    f" setp.gt.u32 is, n, {WARP * _IN_A_WARP}; @is bra.uni long; setp.ge.u32 is, {{thread}}, {WARP}; @is bra.uni told;"
    " shl.b32 base, {thread}, 3; add.u32 base, base, {entries}; mov.u32 least, 0xffffffff;"
    + "".join(
        f" add.u32 index, {{thread}}, {WARP * q}; setp.lt.u32 is, index, n; mov.u64 entry, 0;"
        f" @is ld.shared.u64 entry, [base+{8 * WARP * q}]; shr.u64 entry, entry, {{bits}}; cvt.u32.u64 value{q}, entry;"
        f" @is min.u32 least, least, value{q};"
        for q in range(_IN_A_WARP)
    )
    + _largest_in_warp("largest_key")
    + " ld.shared.u64 low, [{head}+8]; add.u64 low, low, 1; shr.u64 entry, low, {bits}; cvt.u32.u64 place, entry;"
    " redux.sync.min.u32 least, least, 0xffffffff; max.u32 place, place, least;"
    " mov.u32 reached, n; mov.u32 beyond, 0; mov.u32 wanted, {k};"
    + _bisect_in_warp("keys")
    + " cvt.u64.u32 entry, place; shl.b64 entry, entry, {bits}; max.u64 low, low, entry; add.u64 high, low, {enough};"
    " setp.eq.u32 is, reached, {k}; @is bra.uni tell; setp.ne.u32 is, {enough}, 1; @is bra.uni tell;"
    " sub.u32 wanted, {k}, beyond;"
    + "".join(
        f" add.u32 index, {{thread}}, {WARP * q}; setp.lt.u32 is, index, n; mov.u64 middle, 0;"
        f" @is ld.shared.u64 middle, [base+{8 * WARP * q}]; shr.u64 gap, middle, {{bits}}; cvt.u32.u64 count, gap;"
        f" cvt.u32.u64 word, middle; and.b32 word, word, {{last}}; setp.eq.u32 is, count, place;"
        f" selp.u32 value{q}, word, 0, is;"
        for q in range(_IN_A_WARP)
    )
    + _largest_in_warp("largest_rest")
    + " mov.u32 place, 0;"
    + _bisect_in_warp("rests")
    + " cvt.u64.u32 middle, place; add.u64 low, entry, middle; add.u64 high, low, 1;"
    " tell: setp.eq.u32 is, {thread}, 0; @is st.shared.v2.u64 [{head}+16], {{low, high}};"
    " told: bar.sync 0; ld.shared.v2.u64 {{low, high}}, [{head}+16]; bra.uni found;"
    " long: mov.u64 entry, 0; mov.u32 index, {thread}; setp.ge.u32 is, index, n; @is bra largest;"
    " following: shl.b32 place, index, 3; add.u32 place, place, {entries}; ld.shared.u64 middle, [place];"
    " max.u64 entry, entry, middle; add.u32 index, index, {threads}; setp.lt.u32 is, index, n; @is bra following;"
    " largest: shr.u64 entry, entry, {bits}; cvt.u32.u64 total, entry;"
    " redux.sync.max.u32 total, total, 0xffffffff; and.b32 word, {thread}, 31; setp.eq.u32 is, word, 0;"
    " @is red.shared.max.u32 [{head}+4], total; bar.sync 0;"
    " ld.shared.u32 total, [{head}+4]; cvt.u64.u32 high, total; add.u64 high, high, 1; shl.b64 high, high, {bits};"
    " ld.shared.u64 low, [{head}+8]; add.u64 low, low, 1;"
    " search: sub.u64 gap, high, low; setp.le.u64 is, gap, {enough}; @is bra.uni found;"
    " shr.u64 gap, gap, 1; add.u64 middle, low, gap; mov.u32 total, 0; mov.u32 base, 0; mov.u32 index, {thread};"
    " counting: setp.lt.u32 is, index, n; mov.u64 entry, 0; shl.b32 place, index, 3; add.u32 place, place, {entries};"
    " @is ld.shared.u64 entry, [place]; setp.ge.u64 is, entry, middle; bar.red.popc.u32 count, 0, is;"
    " add.u32 total, total, count; add.u32 index, index, {threads}; add.u32 base, base, {threads};"
    " setp.lt.u32 is, base, n; @is bra.uni counting;"
    " setp.ge.u32 more, total, {k}; @more mov.u64 low, middle; @!more mov.u64 high, middle;"
    " setp.ne.u32 is, total, {k}; @is bra.uni search;"
    " found:"
)

# Below all that have the key of `low`; 0 is below all entries.
_SET_BOUND = (
    " shr.u64 gap, low, {bits}; shl.b64 gap, gap, {bits}; setp.ne.u64 is, gap, 0; @is sub.u64 gap, gap, 1;"
    " setp.eq.u32 is, {thread}, 0; bar.sync 0;"
    " @is st.shared.u32 [{head}+4], 0; @is st.shared.u64 [{head}+8], gap; bar.sync 0;"
)

# Moves what is no less than `low` to the front. What a round of the threads moves goes to places that were read before.
_KEEP = (
    " sub.u64 gap, low, 1; setp.eq.u32 is, {thread}, 0; bar.sync 0;"
    " @is st.shared.v2.u32 [{head}], {{0, 0}}; @is st.shared.u64 [{head}+8], gap; mov.u32 base, 0; mov.u32 index, {thread};"
    " moving: setp.lt.u32 is, index, n; mov.u64 entry, 0; shl.b32 place, index, 3; add.u32 place, place, {entries};"
    " @is ld.shared.u64 entry, [place]; bar.sync 0; setp.ge.u64 is, entry, low;"
    " @is atom.shared.add.u32 place, [{head}], 1; @is shl.b32 place, place, 3; @is add.u32 place, place, {entries};"
    " @is st.shared.b64 [place], entry; add.u32 index, index, {threads}; add.u32 base, base, {threads};"
    " setp.lt.u32 is, base, n; @is bra.uni moving; bar.sync 0;"
)

# To the first block of the cluster.
_SEND = (
    " ld.shared.u32 n, [{head}]; mov.u32 index, {thread}; mul.lo.u32 total, {rank}, {k}; mov.u32 base, 0;"
    " sending: setp.lt.u32 is, index, n; mov.u64 entry, 0; shl.b32 place, index, 3; add.u32 place, place, {entries};"
    " @is ld.shared.u64 entry, [place]; add.u32 place, total, index; shl.b32 place, place, 3; add.u32 place, place, {gathered};"
    " mapa.shared::cluster.u32 place, place, 0; setp.lt.u32 is, index, {k}; @is st.shared::cluster.b64 [place], entry;"
    " add.u32 index, index, {threads}; add.u32 base, base, {threads}; setp.lt.u32 is, base, {k}; @is bra.uni sending;"
    " barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
)

# Of entry number $3 of those at $4: how many are larger, $0, its column, $1, and its key, $2.
_RANK = (
    "{{ .reg .pred is; .reg .b32 place, end; .reg .b64 own, a, b, c, d; shl.b32 place, $3, 3; add.u32 place, place, $4;"
    " ld.shared.u64 own, [place]; shr.u64 a, own, {bits}; cvt.u32.u64 $2, a;"
    " cvt.u32.u64 $1, own; and.b32 $1, $1, {last}; sub.u32 $1, {last}, $1;"
    " mov.u32 $0, 0; mov.u32 place, $4; add.u32 end, place, {size};"
    " next: ld.shared.v2.u64 {{a, b}}, [place]; ld.shared.v2.u64 {{c, d}}, [place+16]; add.u32 place, place, 32;"
    " setp.gt.u64 is, a, own; @is add.u32 $0, $0, 1; setp.gt.u64 is, b, own; @is add.u32 $0, $0, 1;"
    " setp.gt.u64 is, c, own; @is add.u32 $0, $0, 1; setp.gt.u64 is, d, own; @is add.u32 $0, $0, 1;"
    " setp.lt.u32 is, place, end; @is bra.uni next; }}"
)
