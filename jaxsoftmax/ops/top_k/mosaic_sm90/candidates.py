"""The best entries of a row so far, as a list in the shared memory of a block: offered, cut to the k best, sorted, stored.

The list has a bound below which nothing is taken. What is offered above the bound is appended, by an addition to a counter.
When the list is long, the bound is raised to the k-th largest entry, and the entries below it are dropped. Bisection finds the
bound: each step counts the entries that are no less than the middle. One warp does, or all if the list is longer than it can
hold. An entry (see `keys`) is a key and a column, so no two are equal, and ties, NaN and -0 are no cases of their own.
500 of 128256 normal numbers enter the list for k = 50, and it is cut three times; of equal numbers only the first sweep does.

Warps do not wait for each other in each sweep: a warp is up to one sweep ahead of others. They tell each other by an mbarrier,
whose phases are the sweeps, and by the number of the sweep after which the list was long: each warp reads it before the next
sweep, and all cut at one point. With a barrier of the block in each sweep, 40% of the time went into waiting there (512 rows of
50257, bfloat16).

All functions are for all threads of a block. They are in PTX, as Pallas has neither atomic additions nor barriers that count.
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

from jaxsoftmax._gpu.emit import (
    SCALAR,
    SPLAT,
    WARP,
    Vector,
    address_of,
    compare,
    constant,
    emit,
    i64,
    integer,
    larger_of_words,
    shared_address,
    utils,
    words_of,
)
from jaxsoftmax._gpu.rows.plan import RowPlan
from jaxsoftmax.ops.top_k.mosaic_sm90.keys import BITS_OF_KEY, KEY, EntryFormat
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import SweepPlan

_HEAD_WORDS = 12  # of `Candidates.head`


@dataclass(frozen=True)
class StepColumns:
    """Columns of the elements of a few steps."""

    # Function of the MLIR values of `scalars`, int32, to the column of a thread's first element in each step, and the number of
    # its elements that are of the next step, at the same place.
    make: Callable[..., tuple[Sequence[Any], Any]]
    scalars: Sequence[Any]
    # True if all are columns of the row, and higher than those of steps before: then what has the bound's value is below it.
    # Else what is no column of the row is not taken.
    in_order: bool


@dataclass(frozen=True)
class Candidates:
    """The list of a block."""

    entries: Any  # `[2 * size]` int32 in shared memory, two for each entry
    # int32 in shared memory: the length of the list, the largest key of a long list, the bound, two numbers of a bisection, the
    # mbarrier, and after which even and which odd sweep the list was long, counted from 1.
    head: Any
    k: int  # number of entries that are wanted
    limit: int  # the list is cut once it is longer. It has room for as many more as are offered at a time
    row_plan: RowPlan
    dtype: Any  # of the values: float32, int32 or uint32
    memory_dtype: Any  # the same, or for float32 a narrower one

    @staticmethod
    def scratch(k: int, limit: int, plan: SweepPlan) -> list[Any]:
        """Returns the types of `entries`, of `head`, and of the list that blocks of a cluster send to, or None."""
        # A sweep is offered at a time, and 4 entries are read at a time. A kilobyte more, and three blocks have room on a
        # multiprocessor in place of four: rows of 50257 took 31 us in place of 22.
        sizes = [limit + plan.sweep_cols + 4] + ([plan.blocks * k + 4] if plan.blocks > 1 else [])
        entries, *gathered = [plgpu.SMEM((2 * size,), jnp.int32) for size in sizes]
        return [entries, plgpu.SMEM((_HEAD_WORDS,), jnp.int32), *(gathered or [None])]

    @functools.cached_property
    def format(self) -> EntryFormat:
        return EntryFormat(self.row_plan.cols)

    @functools.cached_property
    def threads(self) -> int:
        return self.row_plan.threads

    @functools.cached_property
    def is_half(self) -> bool:
        return self.memory_dtype.itemsize == 2

    @functools.cached_property
    def _key(self) -> str:
        """PTX that makes `key` of the bits in it."""
        return KEY[self.dtype.name] + (" shr.u32 key, key, 16;" if self.is_half else "")

    def clear(self) -> None:
        """Makes the list empty, with no bound."""
        self._run(
            "setp.eq.u32 is, {thread}, 0; @is st.shared.v4.b32 [{head}], {{0, 0, 0, 0}};"  # length, largest key, bound
            " @is st.shared.v2.b32 [{head}+40], {{0, 0}};"  # no sweep after which the list was long
            f" @is mbarrier.init.shared::cta.b64 [{{head}}+32], {self.threads // WARP}; bar.sync 0;"  # each warp arrives
        )

    def is_long(self, number) -> jax.Array:
        """Tells whether the list is to be cut before the sweep of this number: 1 or 0, an int32 alike in all threads.

        A warp waits until all have offered what they have of the sweep before. Its first lane reads the flag, and a vote tells
        the others. The same lane arrives at the mbarrier in `offer`, so that no warp stores the flag anew before it was read.
        """
        asm = (
            "{ .reg .pred is, first; .reg .b32 word, lane; mov.b32 $0, 0;"
            " setp.eq.u32 is, $2, 0; @is bra.uni end;"  # no sweep came before
            " sub.u32 word, $2, 1; and.b32 word, word, 1;"  # parity of the sweep before
            " again: mbarrier.try_wait.parity.shared::cta.b64 is, [$1+32], word; @!is bra again;"
            " mov.u32 lane, %laneid; setp.eq.u32 first, lane, 0;"
            " shl.b32 word, word, 2; add.u32 word, word, $1; @first ld.shared.b32 word, [word+40];"
            " setp.eq.and.u32 is, word, $2, first;"  # the list was long after the sweep before, counted from 1
            " vote.sync.any.pred is, is, 0xffffffff; selp.b32 $0, 1, 0, is; end: }"
        )

        def wait(head, number):
            operands = start_of(head), number
            return [utils.inline_ptx(asm, *operands, result_types=integer(32), has_side_effects=True, convergent=True)]

        return emit(wait, self.head, [number], results=SCALAR)

    def offer(self, number, values: Sequence[jax.Array], top: jax.Array, columns: StepColumns) -> None:
        """Appends what is above the bound, in the sweep of this number. The caller has asked `is_long`, and cut the list.

        Elements enter one by one: a comparison gives a bit for each element of a thread, and a loop takes the bits that are
        set. Written out for every element, in place of the loop, bfloat16 took a quarter longer: all warps had ten times as
        many instructions to go through as one in two needs.

        Args:
          number: scalar int32, from 0.
          values: elements of a few steps, in the dtype of memory.
          top: their maximum at each place, or NaN.
          columns: their columns.
        """
        n_scalars = len(columns.scalars)

        def make(entries, head, number, *operands):
            scalars = operands[:n_scalars]
            *arrays, top = [list(array.registers.flat) for array in operands[n_scalars:]]
            bound, least = self._load_bound(head, columns.in_order)
            larger = functools.partial(larger_of_words, self.memory_dtype)
            largest = functools.reduce(larger, _words(top))
            may_be_above = compare("ne", self._no_less([largest], least), constant(0))
            branch: Any = scf.IfOp(may_be_above, [integer(32)], has_else=True)
            with ir.InsertionPoint(branch.then_block):
                firsts, n_following = columns.make(*scalars)
                words = _words([array[0] for array in arrays])
                flags = self._no_less(words, least)
                addresses = [shared_address(ref, constant(0)) for ref in (head, entries)]
                inputs = *words, *firsts, n_following, flags, bound, *addresses
                asm = self._append(len(words), len(arrays), columns.in_order)
                scf.yield_([utils.inline_ptx(asm, *inputs, result_types=integer(32), has_side_effects=True)])
            with ir.InsertionPoint(branch.else_block):
                scf.yield_([constant(0)])
            self._tell_length(head, branch.results[0], number)

        arrays = [(array, self.row_plan.layout) for array in (*values, top)]
        emit(make, (self.entries, self.head), [number, *columns.scalars], arrays)

    def _load_bound(self, head, in_order: bool):
        """Returns the bound, and the bits of the lowest value that may be above it; of 0 if there is no bound."""
        more = self.format.last if in_order else 0  # in order the next key is the least: equal values are below the bound
        asm = (
            "{ .reg .b64 key; ld.shared.u64 $0, [$2+8];"
            f" add.u64 key, $0, {more}; shr.u64 key, key, {self.format.bits};"
            f" min.u64 key, key, {2**32 - 1}; cvt.u32.u64 $1, key; }}"
        )
        bound, key = utils.inline_ptx(asm, start_of(head), result_types=[integer(64), integer(32)], has_side_effects=True)
        return bound, self._bits_of(key)

    def _tell_length(self, head, length, number) -> None:
        """Notes the sweep if a lane of the warp has made the list too long, and says that the warp has offered what it has."""
        asm = (
            f"{{ .reg .pred is, first; .reg .b32 word, place; setp.gt.u32 is, $1, {self.limit};"
            f" vote.sync.any.pred is, is, 0xffffffff; and.b32 word, $3, {WARP - 1}; setp.eq.u32 first, word, 0;"
            " and.pred is, is, first; and.b32 place, $2, 1; shl.b32 place, place, 2; add.u32 place, place, $0;"
            " add.u32 word, $2, 1; @is st.shared.b32 [place+40], word;"  # of even sweeps in one place, of odd ones in another
            " bar.warp.sync 0xffffffff; @first mbarrier.arrive.shared::cta.b64 _, [$0+32]; }"
        )
        operands = start_of(head), length, number, utils.thread_idx()
        utils.inline_ptx(asm, *operands, has_side_effects=True, convergent=True)

    def _no_less(self, words, least):
        """Returns a bit for each element of words, in their order: 0 only if it is less than a value with the bits `least`."""
        kind = _NO_LESS[self.memory_dtype.name]
        flags: Any = constant(0)
        for index, word in enumerate(words):
            if self.is_half:
                bits = f"@is or.b32 $0, $0, {1 << 2 * index}; @more or.b32 $0, $0, {2 << 2 * index};"
            else:
                bits = f"@is or.b32 $0, $0, {1 << index};"
            results = "is|more" if self.is_half else "is"
            asm = f"{{ .reg .pred is, more; mov.b32 $0, $3; setp.{kind} {results}, $1, $2; {bits} }}"
            flags = utils.inline_ptx(asm, word, least, flags, result_types=integer(32))
        return flags

    def _bits_of(self, key):
        """Returns the bits of the value of a key, of a 16-bit one twice in a word."""
        if self.dtype != jnp.float32:
            return arith.xori(key, constant(-(2**31))) if self.dtype == jnp.int32 else key
        key = arith.shli(key, constant(16)) if self.is_half else key
        bits = utils.inline_ptx(BITS_OF_KEY, key, result_types=integer(32))
        if not self.is_half:
            return bits
        high = arith.andi(bits, constant(-(2**16)))
        return arith.ori(high, arith.shrui(high, constant(16)))

    def _append(self, words: int, steps: int, in_order: bool) -> str:
        """Returns PTX that appends the elements that are flagged and above the bound, one after another, as they are few.

        $0 is the length of the list after that, or 0. The other operands are the words, the column of each step's first
        element, the number of its elements that are of the next step, the flags, the bound, and the addresses of `head` and
        `entries`.
        """
        names = iter(range(1, 1 + words + steps + 5))
        values, firsts = ([f"${next(names)}" for _ in range(count)] for count in (words, steps))
        n_following, flags, bound, head, entries = (f"${name}" for name in names)
        half, vector_ = int(self.is_half), self.row_plan.vector
        value = _choose("key", values, half)
        first = _choose("column", firsts, vector_.bit_length() - 1)
        if half:
            value += " and.b32 word, q, 1; setp.eq.u32 is, word, 0; @is shl.b32 key, key, 16; and.b32 key, key, 0xffff0000;"
        is_column = "" if in_order else f" setp.lt.and.u32 is, column, {self.row_plan.cols}, is;"  # what is negative is large
        bits, last = self.format.bits, self.format.last
        return (
            "{ .reg .pred is, bit<5>; .reg .b32 flags, q, word, key, column, key<16>, column<16>; .reg .b64 entry, place;"
            f" mov.b32 $0, 0; mov.b32 flags, {flags}; setp.eq.u32 is, flags, 0; @is bra end;"
            # Element q is the highest one that is flagged; its flag is taken back.
            " next: bfind.u32 q, flags; mov.b32 word, 1; shl.b32 word, word, q; xor.b32 flags, flags, word;"
            f" {_BITS_OF_Q} {value} {self._key} {first}"
            # Its column: the first one of its step in this thread, and its place in the vector.
            f" and.b32 word, q, {vector_ - 1}; add.u32 column, column, word;"
            # If the thread joins vectors, the elements in front are of the next step, at the same place.
            f" setp.gt.s32 is, {n_following}, word; @is add.u32 column, column, {self.row_plan.step_cols};"
            # Its entry: the key above, and below how far the column is from the last one.
            f" sub.u32 word, {last}, column; cvt.u64.u32 place, word;"
            f" mul.wide.u32 entry, key, {2**bits}; add.u64 entry, entry, place;"
            f" setp.gt.u64 is, entry, {bound};{is_column}"
            # It goes to the end of the list, whose length counts on in shared memory.
            f" @is atom.shared.add.u32 word, [{head}], 1; @is add.u32 $0, word, 1;"
            f" @is shl.b32 word, word, 3; @is add.u32 word, word, {entries}; @is st.shared.b64 [word], entry;"
            " setp.ne.u32 is, flags, 0; @is bra next; end: }"
        )

    def bound_from(self, values: Sequence[jax.Array]) -> None:
        """Sets the bound of an empty list so that at least k of the elements that are to be offered are above it, if k exist.

        The bound is below the k-th largest of the maxima of groups. A group is the elements of a thread, or a part of them:
        there are at least twice as many groups as entries are wanted. Groups with NaN do not count, as the maximum does not
        keep the order of NaN, and neither do groups of -inf alone, which may be beyond the row.
        """
        parts, larger = self.parts_of(len(values)), functools.partial(larger_of_words, self.memory_dtype)

        def make(entries, _, *arrays):
            for part in range(parts):
                largest = functools.reduce(larger, _words([array.registers.item() for array in arrays[part::parts]]))
                place = arith.addi(utils.thread_idx(), constant(part * self.threads))
                address = shared_address(entries, arith.muli(place, constant(8)))
                utils.inline_ptx(self._store_group, address, largest, has_side_effects=True)

        emit(make, (self.entries, self.head), (), [(array, self.row_plan.layout) for array in values])
        self._run("bar.sync 0;" + _BISECT + _SET_BOUND, n=parts * self.threads, enough=2**self.format.bits)

    @property
    def _store_group(self) -> str:
        """PTX that stores to $0 the lowest entry of the key of the largest element of a word, $1, or 0."""
        halves = ("shl.b32 key, $1, 16;", "and.b32 key, $1, 0xffff0000;") if self.is_half else ("mov.b32 key, $1;",)
        text = "{ .reg .pred is; .reg .b32 key, word, most; .reg .b64 entry; mov.b32 most, 0;"
        for half in halves:
            text += half + self._key
            if self.dtype == jnp.float32:  # keys between those of the infinities, and of no others
                bits = int.from_bytes(np.asarray(np.inf, self.memory_dtype).tobytes(), "little")
                lowest, count = 2 ** (8 * self.memory_dtype.itemsize - 1) - bits, 2 * bits
                text += f" sub.u32 word, key, {lowest}; setp.lt.u32 is, word, {count}; selp.b32 key, key, 0, is;"
            text += " max.u32 most, most, key;"
        return text + f" mul.wide.u32 entry, most, {2**self.format.bits}; st.shared.b64 [$0], entry; }}"

    def parts_of(self, count: int) -> int:
        """Returns the number of parts of `count` arrays whose maxima a thread takes; 0 if these are too few groups."""
        parts = 1
        while parts * self.threads < 2 * self.k:
            parts *= 2
        return parts if parts <= count else 0

    def cut(self) -> None:
        """Drops all entries except the k largest, in any order, and raises the bound; does nothing if there are no more."""
        self._run("bar.sync 0; ld.shared.u32 n, [{head}]; setp.le.u32 is, n, {k}; @is bra.uni end;" + _BISECT + _KEEP, n=None)

    def cut_to(self, count: int) -> None:
        """The same for a list of `count` entries, at least k of them above the bound; some may be 0, which is none."""
        self._run(_BISECT + _KEEP, n=count)

    def send(self, gathered, rank) -> None:
        """Copies the list, which was cut, to `gathered[rank * k :]` of the first block of the cluster, with 0 for none."""
        self._run(_SEND, gathered, rank=rank)

    def store(self, row, refs: Sequence[Any], sign=None) -> None:
        """Stores the k values, times `sign` unless that is None, and columns in order to a row of two arrays `[rows * k]`.

        The list has k entries. A thread has one of them, or a few, and counts how many of all are larger.
        """
        # Four entries are read at a time: behind the last one are some of 0.
        self._run(
            "bar.sync 0; setp.lt.u32 is, {thread}, 4; shl.b32 place, {thread}, 3; add.u32 place, place, {entries};"
            " @is st.shared.u64 [place+8*{k}], 0; bar.sync 0;"
        )

        def make(values, indices, entries, row, *sign):
            start = start_of(entries)
            base = arith.muli(i64(row), i64(self.k))
            for first in range(0, self.k, self.threads):
                place = arith.addi(utils.thread_idx(), constant(first))
                inside = compare("ult", place, constant(self.k))
                number = arith.select(inside, place, constant(0))
                asm = _RANK.format(size=32 * -(-self.k // 4), bits=self.format.bits, last=self.format.last)
                results = utils.inline_ptx(asm, number, start, result_types=[integer(32)] * 3, has_side_effects=True)
                rank, column, key = results
                value = self._value(key)
                if sign:
                    value = arith.mulf(value, sign[0].registers.item())
                for ref, stored in ((values, _cast(value, values.type.element_type)), (indices, column)):
                    size = utils.bytewidth(ref.type.element_type)
                    address = arith.addi(address_of(ref), arith.muli(arith.addi(base, i64(rank)), i64(size)))
                    one = vector.broadcast(ir.VectorType.get((1,), stored.type), stored)
                    Vector(address, 0, size, inside).store(one)

        emit(make, (*refs, self.entries), [row], [] if sign is None else [(sign, SPLAT)])

    def _run(self, asm: str, *refs, n: int | None = None, rank=None, enough: int = 1):
        """Runs PTX for all threads, with the names that the texts below use; a bisection ends with a gap of `enough`."""
        names = "entries", "head", "thread", "gathered", "rank"

        def make(*operands):
            entries, head, *others = [shared_address(ref, constant(0)) for ref in operands[: 2 + len(refs)]]
            operands = entries, head, utils.thread_idx(), *others, *operands[2 + len(refs) :]
            placed = {name: f"${i}" for i, name in enumerate(names)}
            start = "" if n is None else f"mov.u32 n, {n};"
            sizes = {"bits": self.format.bits, "last": self.format.last, "k": self.k, "threads": self.threads}
            text = asm.format(**placed, **sizes, enough=enough)
            utils.inline_ptx(f"{{ {_REGISTERS} {start} {text} end: }}", *operands, has_side_effects=True, convergent=True)

        emit(make, (self.entries, self.head, *refs), [] if rank is None else [rank])

    def _value(self, key):
        """Returns the value of a key, in `dtype`."""
        bits = self._bits_of(key)
        if self.dtype != jnp.float32:
            return bits
        if not self.is_half:
            return arith.bitcast(ir.F32Type.get(), bits)
        half = arith.bitcast(utils.dtype_to_ir_type(self.memory_dtype), arith.trunci(integer(16), bits))
        return arith.extf(ir.F32Type.get(), half)


# Comparison of PTX that is false only if an element is less: also for NaN it is true.
_NO_LESS = {"float32": "geu.f32", "bfloat16": "geu.bf16x2", "float16": "geu.f16x2", "int32": "ge.s32", "uint32": "ge.u32"}


def start_of(ref):
    """Returns the address of an array in shared memory."""
    return shared_address(ref, constant(0))


def _words(registers):
    """Returns the words of vectors, one after another."""
    result = []
    for register in registers:
        words = vector.bitcast(words_of(register.type), register)
        result += [llvm.extractelement(words, constant(q)) for q in range(words.type.shape[0])]
    return result


def _cast(value, kind):
    """Casts a float32 or a 32-bit integer to the type of a result, which has this value; NaN keeps its sign."""
    if value.type == kind:
        return value
    if isinstance(kind, ir.IntegerType):
        return arith.trunci(kind, value)
    half, bits = integer(16), arith.bitcast(integer(32), value)
    sign = arith.trunci(half, arith.shrui(arith.andi(bits, constant(-(2**31))), constant(16)))
    return arith.bitcast(kind, arith.ori(arith.bitcast(half, arith.truncf(kind, value)), sign))


# `bit0` to `bit4`: those of the number `q`.
_BITS_OF_Q = "".join(f" and.b32 word, q, {1 << bit}; setp.ne.u32 bit{bit}, word, 0;" for bit in range(5))


def _choose(name: str, values: Sequence[str], first_bit: int) -> str:
    """Returns PTX of `name`: the value whose number is in the bits of `q` from the first one on."""
    text, values, bit = "", list(values), first_bit
    while len(values) > 1:
        for i in range(0, len(values) - 1, 2):
            text += f" selp.b32 {name}{i // 2}, {values[i + 1]}, {values[i]}, bit{bit};"
            values[i] = f"{name}{i // 2}"
        values, bit = values[::2], bit + 1
    return text + f" mov.b32 {name}, {values[0]};"


# The texts of `_run`. Names in braces are its operands, `thread` is the number of the thread in its block.

_IN_A_WARP = 16  # entries of each lane, of lists that one warp bisects: 512

_REGISTERS = (
    ".reg .pred is, more; .reg .b32 n, total, base, index, count, place, word, most, least, reached, beyond, wanted;"
    " .reg .b64 low, high, middle, gap, entry;"
    f" .reg .b32 value<{_IN_A_WARP}>;"
)


def _of_lane(text: str) -> str:
    """Returns PTX for each entry of a lane, where the second half of them is skipped if there is none."""
    half = _IN_A_WARP // 2
    first, second = ("".join(text.replace("#", str(q)) for q in part) for part in (range(half), range(half, _IN_A_WARP)))
    return f"{first} setp.le.u32 is, n, {WARP * half}; @is bra.uni {{skip}}; {second} {{skip}}:"


def _bisect_in_warp(name: str) -> str:
    """Returns PTX of `place`: the largest number from `place` to `most` to which `wanted` values are equal or larger.

    `wanted` is the least number of such values, and the search ends early if it is met exactly. `reached` is their number, or
    what it was if `place` is the first number, and `beyond` the number of values that are larger than `most`.
    """
    counted = _of_lane(" setp.ge.u32 is, value#, word; @is add.u32 total, total, 1;").format(skip=f"{name}_counted")
    return (
        f" {name}: setp.ge.u32 is, place, most; @is bra.uni {name}_found;"
        " sub.u32 word, most, place; shr.u32 word, word, 1; sub.u32 word, most, word;"  # the middle, rounded up
        f" mov.u32 total, 0; {counted} redux.sync.add.u32 total, total, 0xffffffff;"  # values that are no less
        " setp.ge.u32 more, total, wanted;"
        " @more mov.u32 place, word; @more mov.u32 reached, total;"
        " @!more sub.u32 most, word, 1; @!more mov.u32 beyond, total;"
        f" setp.ne.u32 is, total, wanted; @is bra.uni {name}; {name}_found:"
    )


def _largest_in_warp(name: str) -> str:
    """Returns PTX of `most`: the largest value."""
    largest = _of_lane(" max.u32 most, most, value#;").format(skip=name)
    return f" mov.u32 most, 0; {largest} redux.sync.max.u32 most, most, 0xffffffff;"


def _load_keys() -> str:
    """Returns PTX that loads the keys of a lane's entries to `value0` and so on, 0 for none, and the smallest to `least`."""
    return "".join(
        f" add.u32 index, {{thread}}, {WARP * q}; setp.lt.u32 is, index, n; mov.u64 entry, 0;"
        f" @is ld.shared.u64 entry, [base+{8 * WARP * q}]; shr.u64 entry, entry, {{bits}}; cvt.u32.u64 value{q}, entry;"
        f" @is min.u32 least, least, value{q};"
        for q in range(_IN_A_WARP)
    )


def _load_rests() -> str:
    """Returns PTX that loads the low bits of a lane's entries whose key is `place`, and 0 for the others."""
    return "".join(
        f" add.u32 index, {{thread}}, {WARP * q}; setp.lt.u32 is, index, n; mov.u64 middle, 0;"
        f" @is ld.shared.u64 middle, [base+{8 * WARP * q}]; shr.u64 gap, middle, {{bits}}; cvt.u32.u64 count, gap;"
        f" cvt.u32.u64 word, middle; and.b32 word, word, {{last}}; setp.eq.u32 is, count, place;"
        f" selp.u32 value{q}, word, 0, is;"
        for q in range(_IN_A_WARP)
    )


# By the first warp, of a short list: it holds the keys in registers, and the others wait, so that blocks beside this one have
# the multiprocessor. Columns are bisected only if the k-th key is there more than once, as in bfloat16.
_BISECT_BY_A_WARP = (
    f" setp.ge.u32 is, {{thread}}, {WARP}; @is bra.uni told;"
    " shl.b32 base, {thread}, 3; add.u32 base, base, {entries}; mov.u32 least, 0xffffffff;"
    + _load_keys()
    + _largest_in_warp("largest_key")
    # `place` starts with the key that follows the bound, or with the smallest key.
    + " ld.shared.u64 low, [{head}+8]; add.u64 low, low, 1; shr.u64 entry, low, {bits}; cvt.u32.u64 place, entry;"
    " redux.sync.min.u32 least, least, 0xffffffff; max.u32 place, place, least;"
    " mov.u32 reached, n; mov.u32 beyond, 0; mov.u32 wanted, {k};"
    + _bisect_in_warp("keys")
    + " cvt.u64.u32 entry, place; shl.b64 entry, entry, {bits}; max.u64 low, low, entry; add.u64 high, low, {enough};"
    # Done if exactly k entries have this key or a larger one, or if the key is all that is asked for.
    " setp.eq.u32 is, reached, {k}; @is bra.uni tell; setp.ne.u32 is, {enough}, 1; @is bra.uni tell;"
    " sub.u32 wanted, {k}, beyond;"
    + _load_rests()
    + _largest_in_warp("largest_rest")
    + " mov.u32 place, 0;"
    + _bisect_in_warp("rests")
    + " cvt.u64.u32 middle, place; add.u64 low, entry, middle; add.u64 high, low, 1;"
    " tell: setp.eq.u32 is, {thread}, 0; @is st.shared.v2.u64 [{head}+16], {{low, high}};"
    " told: bar.sync 0; ld.shared.v2.u64 {{low, high}}, [{head}+16]; bra.uni found;"
)

# By all threads, of a long list.
_BISECT_BY_ALL = (
    # The largest key, from which `high` follows.
    " long: mov.u64 entry, 0; mov.u32 index, {thread}; setp.ge.u32 is, index, n; @is bra largest;"
    " following: shl.b32 place, index, 3; add.u32 place, place, {entries}; ld.shared.u64 middle, [place];"
    " max.u64 entry, entry, middle; add.u32 index, index, {threads}; setp.lt.u32 is, index, n; @is bra following;"
    " largest: shr.u64 entry, entry, {bits}; cvt.u32.u64 total, entry;"
    " redux.sync.max.u32 total, total, 0xffffffff; and.b32 word, {thread}, 31; setp.eq.u32 is, word, 0;"
    " @is red.shared.max.u32 [{head}+4], total; bar.sync 0;"
    " ld.shared.u32 total, [{head}+4]; cvt.u64.u32 high, total; add.u64 high, high, 1; shl.b64 high, high, {bits};"
    # `low` starts behind the bound.
    " ld.shared.u64 low, [{head}+8]; add.u64 low, low, 1;"
    " search: sub.u64 gap, high, low; setp.le.u64 is, gap, {enough}; @is bra.uni found;"
    " shr.u64 gap, gap, 1; add.u64 middle, low, gap; mov.u32 total, 0; mov.u32 base, 0; mov.u32 index, {thread};"
    # Entries that are no less than the middle, counted by the barrier.
    " counting: setp.lt.u32 is, index, n; mov.u64 entry, 0; shl.b32 place, index, 3; add.u32 place, place, {entries};"
    " @is ld.shared.u64 entry, [place]; setp.ge.u64 is, entry, middle; bar.red.popc.u32 count, 0, is;"
    " add.u32 total, total, count; add.u32 index, index, {threads}; add.u32 base, base, {threads};"
    " setp.lt.u32 is, base, n; @is bra.uni counting;"
    " setp.ge.u32 more, total, {k}; @more mov.u64 low, middle; @!more mov.u64 high, middle;"
    " setp.ne.u32 is, total, {k}; @is bra.uni search;"
)

# The lower number of two, `low`, to which at least k of the n entries are equal or larger, or exactly k; it is more than the
# bound, and `enough` further, or one where it is of exactly k, there are fewer.
_BISECT = f" setp.gt.u32 is, n, {WARP * _IN_A_WARP}; @is bra.uni long;" + _BISECT_BY_A_WARP + _BISECT_BY_ALL + " found:"

# Below all entries that have the key of `low`; 0 is below all entries.
_SET_BOUND = (
    " shr.u64 gap, low, {bits}; shl.b64 gap, gap, {bits}; setp.ne.u64 is, gap, 0; @is sub.u64 gap, gap, 1;"
    " setp.eq.u32 is, {thread}, 0; bar.sync 0;"
    " @is st.shared.u32 [{head}+4], 0; @is st.shared.u64 [{head}+8], gap; bar.sync 0;"
)

# Moves what is no less than `low` to the front. What a round of the threads moves goes to places that were read before.
_KEEP = (
    # The list is empty, its largest key unknown, and its bound below `low`.
    " sub.u64 gap, low, 1; setp.eq.u32 is, {thread}, 0; bar.sync 0;"
    " @is st.shared.v2.u32 [{head}], {{0, 0}}; @is st.shared.u64 [{head}+8], gap; mov.u32 base, 0; mov.u32 index, {thread};"
    # A round: each thread loads an entry, all wait, and those that are kept are appended.
    " moving: setp.lt.u32 is, index, n; mov.u64 entry, 0; shl.b32 place, index, 3; add.u32 place, place, {entries};"
    " @is ld.shared.u64 entry, [place]; bar.sync 0; setp.ge.u64 is, entry, low;"
    " @is atom.shared.add.u32 place, [{head}], 1; @is shl.b32 place, place, 3; @is add.u32 place, place, {entries};"
    " @is st.shared.b64 [place], entry; add.u32 index, index, {threads}; add.u32 base, base, {threads};"
    " setp.lt.u32 is, base, n; @is bra.uni moving; bar.sync 0;"
)

# To the first block of the cluster: places from `rank * k` on, by each thread one and every `threads` further, up to k.
_SEND = (
    " ld.shared.u32 n, [{head}]; mov.u32 index, {thread}; mul.lo.u32 total, {rank}, {k}; mov.u32 base, 0;"
    " sending: setp.lt.u32 is, index, n; mov.u64 entry, 0; shl.b32 place, index, 3; add.u32 place, place, {entries};"
    " @is ld.shared.u64 entry, [place];"
    " add.u32 place, total, index; shl.b32 place, place, 3; add.u32 place, place, {gathered};"
    " mapa.shared::cluster.u32 place, place, 0; setp.lt.u32 is, index, {k}; @is st.shared::cluster.b64 [place], entry;"
    " add.u32 index, index, {threads}; add.u32 base, base, {threads}; setp.lt.u32 is, base, {k}; @is bra.uni sending;"
    " barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;"
)

# Entry number $3 of those at $4: the number of larger ones, $0, its column, $1, and its key, $2.
_RANK = (
    "{{ .reg .pred is; .reg .b32 place, end; .reg .b64 own, a, b, c, d; shl.b32 place, $3, 3; add.u32 place, place, $4;"
    " ld.shared.u64 own, [place]; shr.u64 a, own, {bits}; cvt.u32.u64 $2, a;"
    " cvt.u32.u64 $1, own; and.b32 $1, $1, {last}; sub.u32 $1, {last}, $1;"
    " mov.u32 $0, 0; mov.u32 place, $4; add.u32 end, place, {size};"
    # Four entries at a time.
    " next: ld.shared.v2.u64 {{a, b}}, [place]; ld.shared.v2.u64 {{c, d}}, [place+16]; add.u32 place, place, 32;"
    " setp.gt.u64 is, a, own; @is add.u32 $0, $0, 1; setp.gt.u64 is, b, own; @is add.u32 $0, $0, 1;"
    " setp.gt.u64 is, c, own; @is add.u32 $0, $0, 1; setp.gt.u64 is, d, own; @is add.u32 $0, $0, 1;"
    " setp.lt.u32 is, place, end; @is bra.uni next; }}"
)
