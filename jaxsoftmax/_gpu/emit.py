"""MLIR and PTX inside Pallas kernels: `emit`, values and addresses, layouts of registers, vectors in memory, arithmetic."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, scf, vector
from jaxlib.mlir.dialects import math as math_dialect

from jaxsoftmax._core import compat
from jaxsoftmax._core.compat import utils

WARP = 32  # lanes
WARPS = 4  # of a warpgroup
SPLAT = plgpu.Layout.WG_SPLAT(())
integer = ir.IntegerType.get_signless
fragmented = compat.fragmented_array
SCALAR = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)


def emit(
    make: Callable[..., Any], ref: Any = None, scalars: Sequence[Any] = (), arrays: Sequence[Any] = (), results: Any = None
) -> Any:
    """Puts MLIR and PTX into a kernel.

    Args:
      make: function of `ref`, or of several, of the MLIR values of `scalars`, and of `arrays` of Mosaic GPU. It returns the
        registers of each result.
      ref: a reference to shared or global memory, several in a tuple, or None.
      scalars: int32 scalars.
      arrays: pairs of an array and its layout.
      results: `plgpu.ShapeDtypeStruct`, one or a list.
    """
    refs = ref if isinstance(ref, tuple) else () if ref is None else (ref,)
    types = (*(plgpu.RefType() for _ in refs), *(SPLAT for _ in scalars), *(layout for _, layout in arrays))
    first, last = len(refs), len(refs) + len(scalars)

    @plgpu.inline_mgpu(arg_types=types, return_type=results)
    def inline(_, *operands):
        values = (scalar.registers.item() for scalar in operands[first:last])
        made = make(*operands[:first], *values, *operands[last:])
        if results is None:
            return None
        made, kinds = (made, results) if isinstance(results, list) else ([made], [results])
        arrays = [
            fragmented(registers, kind.layout.to_mgpu(), kind.shape, utils.is_signed(kind.dtype))
            for registers, kind in zip(made, kinds, strict=True)
        ]
        return arrays if isinstance(results, list) else arrays[0]

    return inline(*refs, *map(_int32, scalars), *(array for array, _ in arrays))


def _int32(number):
    return number if isinstance(number, jax.Array) and number.dtype == jnp.int32 else jnp.int32(number)


def keep_loop() -> None:
    """Keeps ptxas from unrolling the loop around, which would take registers that more blocks could have."""
    instruct('.pragma "nounroll";')


def unknown(value: int) -> jax.Array:
    """Returns `value`, int32, in a form that compilers cannot fold: they do not unroll a loop of this many steps."""
    asm = f"mov.b32 $0, {value};"
    return emit(lambda: [utils.inline_ptx(asm, result_types=integer(32), has_side_effects=True)], results=SCALAR)


def always() -> jax.Array:
    """Returns True, in a form that ptxas cannot fold: code behind a branch on it is scheduled by itself."""
    asm = "mov.u32 $0, %nsmid;"  # the number of multiprocessors
    return emit(lambda: [utils.inline_ptx(asm, result_types=integer(32), has_side_effects=True)], results=SCALAR) > 0


def instruct(ptx: str, *scalars) -> None:
    emit(lambda *values: utils.inline_ptx(ptx, *values, has_side_effects=True, convergent=True), None, scalars)


def thread():
    """Returns the index of a thread in its warpgroup."""
    return arith.remui(utils.thread_idx(), constant(WARPS * WARP))


def address_of(ref):
    return llvm.ptrtoint(integer(64), utils.memref_ptr(ref))


def shared_word_address(ref, index):
    """Returns the address of `ref[index]`, of int32, in shared memory."""
    return shared_address(ref, arith.muli(index, constant(4 * ref.type.shape[1])))


def shared_address(ref, offset):
    """Returns the address of the byte `offset`, an int32 MLIR value, of an array in shared memory."""
    return arith.addi(llvm.ptrtoint(integer(32), utils.memref_ptr(ref)), offset)


def constant(value: int) -> Any:
    """Returns an int32 MLIR constant."""
    return utils.c(value, integer(32))


def i64(value):
    return utils.c(value, integer(64)) if isinstance(value, int) else arith.extui(integer(64), value)


def compare(kind: str, a, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, b)


def both(a, b):
    return b if a is None else a if b is None else arith.andi(a, b)


@functools.cache
def tiled(tiles, warp_dims, lane_dims, vector_dim=-1) -> Any:
    """Returns a tiled layout in the canonical form in which Mosaic GPU compares layouts."""
    layout = compat.tiled_layout(plgpu.Tiling(tiles), warp_dims, lane_dims, vector_dim)
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


@functools.cache
def replicated(size: int) -> Any:
    """Returns the layout of `size` values, a power of two, that every warp holds: one in a lane, or a vector of more."""
    copies = max(1, WARP // size)
    lanes = (-2,) if copies == 1 else (plgpu.Replicated(copies), -2)
    return tiled(((size,), (max(1, size // WARP),)), (plgpu.Replicated(WARPS),), lanes)


def of_warps(each: int) -> Any:
    """Returns the layout of `[4, 32 * each]` values: each lane of a warpgroup's four warps has `each` of a row."""
    return tiled(((WARPS, WARP * each), (1, WARP * each), (each,)), (-5,), (-3, -2))


@functools.cache
def of_threads() -> Any:
    """Returns the layout of a value for each thread of a warpgroup, `[4, 32]`."""
    return tiled(((WARPS, WARP), (1, WARP), (1,)), (-5,), (-3, -2))


def gather(kind, itemsize, addresses, offsets, inside, bits=0, policy=None, space="global"):
    """Loads a vector of type `kind` element by element from several addresses, with `bits` for each that is not inside."""
    one = ir.VectorType.get((1,), integer(8 * itemsize))
    gathered = llvm.mlir_undef(ir.VectorType.get((len(inside),), one.element_type))
    for q, (address, offset, is_inside) in enumerate(zip(addresses, offsets, inside, strict=True)):
        loaded = load_words(address, offset, is_inside, one, bits, policy, space)
        gathered = llvm.insertelement(gathered, llvm.extractelement(loaded, constant(0)), constant(q))
    return vector.bitcast(kind, gathered)


@dataclass(frozen=True)
class Vector:
    """Consecutive elements in global memory that fill a register."""

    address: ir.Value  # int64
    offset: int  # bytes from the address to the first element, which become a part of the instruction
    itemsize: int  # bytes of an element
    inside: ir.Value | None  # True to touch all elements; None for always
    partial: ir.Value | None = None  # True to touch a part of them; None for never
    inside_each: Callable[[], Sequence[Any]] = tuple  # makes a flag for each element, True if it is of that part

    def load(self, register, bits=0, policy=None):
        """Loads a register of type `register`, with `bits` in each word that is not to be touched."""
        words = words_of(register)
        if self.partial is None:
            return vector.bitcast(register, load_words(self.address, self.offset, self.inside, words, bits, policy))
        branch: Any = scf.IfOp(self.partial, [words], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            inside = self.inside_each()
            addresses, offsets = [self.address] * len(inside), self._offsets(len(inside))
            scf.yield_([gather(words, self.itemsize, addresses, offsets, inside, bits, policy)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([load_words(self.address, self.offset, self.inside, words, bits, policy)])
        return vector.bitcast(register, branch.results[0])

    def among_others(self, last):
        """Returns this vector, touched as a whole if a part is to be touched and it starts at or before the address `last`."""
        if self.partial is None:
            return self
        whole: Any = self.inside  # not None, if a part may be to be touched
        start = arith.addi(self.address, i64(self.offset))
        whole = arith.ori(whole, arith.andi(self.partial, compare("ule", start, last)))
        return replace(self, inside=whole, partial=arith.andi(self.partial, compare("ugt", start, last)))

    def fill_around(self, register, target, offset, bits):
        """Sets the elements to `bits` that were copied along with a part."""
        if self.partial is None:
            return
        words = words_of(register)
        with utils.when(self.partial):
            elements = vector.bitcast(register, load_words(target, offset, None, words, space="shared"))
            fill = vector.bitcast(register, vector.broadcast(words, constant(bits)))
            for q, is_inside in enumerate(self.inside_each()):
                value = arith.select(is_inside, *(llvm.extractelement(part, constant(q)) for part in (elements, fill)))
                elements = llvm.insertelement(elements, value, constant(q))
            store_words(target, offset, None, vector.bitcast(words, elements), "shared")

    def copy(self, register, target, offset):
        """Starts a copy to `target + offset` in shared memory, an int32 and a constant, if all of it is to be touched.

        It arrives after `await_copies`, in the thread that copied it.
        """
        if (size := self._size(register)) >= 4:
            ptx = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0+{offset}], [$1+{self.offset}], {size};"
            utils.inline_ptx(ptx, target, self.address, predicate=self.inside, has_side_effects=True)

    def copy_rest(self, register, target, offset, bits):
        """Stores the elements that `copy` leaves: a part that is to be touched, with `bits` around it."""
        is_left: Any = contextlib.nullcontext()
        if self._size(register) >= 4:
            if self.inside is None:
                return
            is_left = utils.when(arith.xori(self.inside, utils.c(1, integer(1))))
        with is_left:
            words = vector.bitcast(words_of(register), self.load(register, bits))
            store_words(target, offset, None, words, "shared")

    def _size(self, register):
        return math.prod(register.shape) * self.itemsize

    def touched(self, register):
        """Returns a register of int8: 1 for the elements that are to be touched, 0 for the others."""
        ones, zeros = utils.c(1, register), utils.c(0, register)
        if self.partial is not None:
            for q, is_inside in enumerate(self.inside_each()):
                zeros = llvm.insertelement(zeros, arith.extui(register.element_type, is_inside), constant(q))
            return zeros
        return ones if self.inside is None else arith.select(self.inside, ones, zeros)

    def store(self, register):
        """Stores a register."""
        store_words(self.address, self.offset, self.inside, vector.bitcast(words_of(register.type), register))
        if self.partial is None:
            return
        with utils.when(self.partial):
            kind, inside = integer(8 * self.itemsize), self.inside_each()
            values = vector.bitcast(ir.VectorType.get((len(inside),), kind), register)
            for q, (offset, is_inside) in enumerate(zip(self._offsets(len(inside)), inside, strict=True)):
                one = llvm.mlir_undef(ir.VectorType.get((1,), kind))
                one = llvm.insertelement(one, llvm.extractelement(values, constant(q)), constant(0))
                store_words(self.address, offset, is_inside, one)

    def _offsets(self, count):
        return [self.offset + q * self.itemsize for q in range(count)]


def load_words(address, offset, inside, words, bits=0, policy=None, space="global"):
    """Loads a vector of type `words`, or `bits` in each word if it is not inside; `policy` is the L2 cache's."""
    word = words.element_type
    register = integer(max(16, word.width))  # PTX has no registers of 8 bits
    loaded = llvm.mlir_undef(words)
    for first in range(0, words.shape[0], 4):
        count = min(4, words.shape[0] - first)
        results = [f"${k}" for k in range(count)]
        operands, hint, use = [address], "", ""
        if policy is not None:
            operands.append(policy)
            hint, use = "L2::cache_hint.", f", ${count + 1}"
        place = offset + first * word.width // 8
        ptx = f"ld.{space}.{hint}{operand_list(word, results)}, [${count}+{place}]{use};"
        if inside is not None:
            fills = " ".join(f"mov.b{register.width} {result}, {bits % 2**register.width};" for result in results)
            ptx = f"{fills} @${count + len(operands)} {ptx}"
            operands.append(inside)
        values = utils.inline_ptx(ptx, *operands, result_types=[register] * count, has_side_effects=True)
        for k, value in enumerate(values, first):
            value = value if register == word else arith.trunci(word, value)
            loaded = llvm.insertelement(loaded, value, constant(k))
    return loaded


def store_words(address, offset, inside, words, space="global"):
    """Stores a vector of words to global memory, or to another state space of PTX."""
    word = words.type.element_type
    for first in range(0, words.type.shape[0], 4):
        count = min(4, words.type.shape[0] - first)
        values = [llvm.extractelement(words, constant(first + k)) for k in range(count)]
        kind, names = operand_list(word, [f"${k + 1}" for k in range(count)]).split(" ", 1)
        ptx = f"st.{space}.{kind} [$0+{offset + first * word.width // 8}], {names};"
        utils.inline_ptx(ptx, address, *values, predicate=inside, has_side_effects=True)


def words_of(register):
    """Returns the type in which PTX moves a vector of type `register`: words of 32 bits, or one of 16 or 8."""
    bits = math.prod(register.shape) * utils.bitwidth(register.element_type)
    width = min(32, bits)
    return ir.VectorType.get((bits // width,), integer(width))


def operand_list(word, names: list[str]) -> str:
    """Returns the type and the operands of a load or store of several words: `v4.b32 {$0, $1, $2, $3}`."""
    kind = f"b{word.width}"
    return f"{kind} {names[0]}" if len(names) == 1 else f"v{len(names)}.{kind} {{{', '.join(names)}}}"


# Arithmetic on arrays of Mosaic GPU by instructions that neither Pallas nor MLIR makes.

_MAXIMUM = {"float32": "NaN.f32", "bfloat16": "NaN.bf16x2", "float16": "NaN.f16x2", "int32": "s32", "uint32": "u32"}


def widened(values: jax.Array, layout: Any) -> jax.Array:
    """Converts bfloat16 to float32 by one operation for each value; `arith.extf` takes two for the second of a word."""
    kind = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=layout)
    return emit(lambda values: list(map(widened_register, values.registers.flat)), arrays=[(values, layout)], results=kind)


def widened_register(register):
    """Converts a vector of bfloat16, of an even size, to float32."""
    words = vector.bitcast(words_of(register.type), register)
    bits = llvm.mlir_undef(ir.VectorType.get((2 * words.type.shape[0],), integer(32)))
    for k in range(words.type.shape[0]):
        word = llvm.extractelement(words, constant(k))
        for q, half in enumerate((arith.shli(word, constant(16)), arith.andi(word, constant(-(2**16))))):
            bits = llvm.insertelement(bits, half, constant(2 * k + q))
    return vector.bitcast(ir.VectorType.get(register.type.shape, ir.F32Type.get()), bits)


def maximum(a: jax.Array, b: jax.Array, layout: Any) -> jax.Array:
    """Computes the maximum of 16-bit floats, or NaN, two by each operation."""

    def larger(*arrays):
        registers = []
        for pair in zip(*(array.registers.flat for array in arrays), strict=True):
            words, others = (vector.bitcast(words_of(register.type), register) for register in pair)
            for k in range(words.type.shape[0]):
                word = larger_of_words(a.dtype, *(llvm.extractelement(part, constant(k)) for part in (words, others)))
                words = llvm.insertelement(words, word, constant(k))
            registers.append(vector.bitcast(pair[0].type, words))
        return registers

    return emit(larger, None, (), [(a, layout), (b, layout)], plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout))


def power_of_two_over(values: jax.Array, exponent: int, layout: Any) -> jax.Array:
    """Returns the power of two by which each float32 gets the exponent `exponent`, or the nearest one that float32 has."""

    def powers(values):
        for register in values.registers.flat:
            kind = integer(32)
            if _is_vector(register):
                kind = ir.VectorType.get(register.type.shape, kind)

            def number(value, kind=kind):
                return utils.c(value, kind)

            biased = arith.andi(arith.shrui(arith.bitcast(kind, register), number(23)), number(255))
            power = arith.maxsi(arith.minsi(arith.subi(number(2 * 127 + exponent), biased), number(254)), number(1))
            yield arith.bitcast(register.type, arith.shli(power, number(23)))

    kind = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=layout)
    return emit(lambda values: list(powers(values)), arrays=[(values, layout)], results=kind)


def folded_registers(function: Callable[[Any, Any], Any], values: jax.Array, layout: Any) -> jax.Array:
    """Folds the elements of each vector of a thread by a function of MLIR; all elements of the vector become the result."""

    def folded(register):
        elements = [_element(register, q) for q in range(register.type.shape[0])]
        return vector.broadcast(register.type, functools.reduce(function, elements))

    kind = plgpu.ShapeDtypeStruct(values.shape, values.dtype, layout=layout)
    return emit(lambda values: list(map(folded, values.registers.flat)), arrays=[(values, layout)], results=kind)


def larger_of_words(dtype: Any, a, b):
    """Computes the larger elements of two words; of floats NaN of sign 0 where one is NaN."""
    return utils.inline_ptx(f"max.{_MAXIMUM[jnp.dtype(dtype).name]} $0, $1, $2;", a, b, result_types=integer(32))


def fma(a: jax.Array, b: jax.Array, c: jax.Array, layout: Any) -> jax.Array:
    """Computes `a * b + c` of float32 arrays, rounded once."""

    def multiply_add(*arrays):
        return [math_dialect.fma(*registers) for registers in zip(*(array.registers.flat for array in arrays), strict=True)]

    kind = plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout)
    return emit(multiply_add, None, (), [(a, layout), (b, layout), (c, layout)], kind)


def plus_where(register, places, place, addend):
    """Adds `addend` to the elements of an MLIR vector of float32 whose `places`, an int32 plus a number, are `place`.

    `place` and `addend` are one for all, or one for each element.
    """
    is_one = all(math.prod(ir.VectorType(value.type).shape) == 1 for value in (place, addend) if _is_vector(value))
    if not is_one or len({first for first, _ in places}) > 1:
        return _plus_where(register, places, place, addend)
    # Few vectors have the place. A jump takes three instructions, the additions two for each element: a gradient of 8192 x
    # 151936 bfloat16 logits is 2% faster (H200).
    start, most = places[0][0], max(offset for _, offset in places)
    has_place = compare("ule", arith.subi(_element(place, 0), start), constant(most))
    branch: Any = scf.IfOp(has_place, [register.type], has_else=True)
    with ir.InsertionPoint(branch.then_block):
        scf.yield_([_plus_where(register, places, place, addend)])
    with ir.InsertionPoint(branch.else_block):
        scf.yield_([register])
    return branch.results[0]


def _plus_where(register, places, place, addend):
    # An addition with a predicate is one instruction, where a selection would be another.
    total = llvm.mlir_undef(register.type)
    for q, (first, offset) in enumerate(places):
        at, more = (_element(value, q) for value in (place, addend))
        value = llvm.extractelement(register, constant(q))
        asm = f"{{ .reg .pred here; setp.eq.s32 here, $2, {offset}; mov.b32 $0, $1; @here add.f32 $0, $1, $3; }}"
        value = utils.inline_ptx(asm, value, arith.subi(at, first), more, result_types=value.type)
        total = llvm.insertelement(total, value, constant(q))
    return total


def _element(value, q: int):
    """Returns the q-th element of a vector, or its only one; a value that is no vector itself."""
    return llvm.extractelement(value, constant(q if value.type.shape[0] > 1 else 0)) if _is_vector(value) else value


def _is_vector(value) -> bool:
    return isinstance(value.type, ir.VectorType)


def before_row(first, step, width: int):
    """Returns the elements between a thread's first one in a step, at column `first`, and the row's start; negative inside."""
    return arith.subi(arith.muli(step, constant(width)), first)


def least_halves(words: Sequence[jax.Array], layout: Any) -> list[jax.Array]:
    """Computes the least lower and the least upper 16-bit half of uint32 arrays at each place, as upper halves of words."""

    def find(*arrays):
        (kind,) = {array.registers.item().type for array in arrays}
        lower, upper = llvm.mlir_undef(kind), llvm.mlir_undef(kind)
        for q in range(kind.shape[0]):
            least, *others = [llvm.extractelement(array.registers.item(), constant(q)) for array in arrays]
            for other in others:  # two halves in an operation
                least = utils.inline_ptx("min.u16x2 $0, $1, $2;", least, other, result_types=integer(32))
            lower = llvm.insertelement(lower, arith.shli(least, constant(16)), constant(q))
            upper = llvm.insertelement(upper, arith.andi(least, constant(-(2**16))), constant(q))
        return [[lower], [upper]]

    kind = plgpu.ShapeDtypeStruct(words[0].shape, jnp.uint32, layout=layout)
    return emit(find, arrays=[(word, layout) for word in words], results=[kind] * 2)
