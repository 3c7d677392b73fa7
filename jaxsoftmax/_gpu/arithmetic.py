"""Arithmetic on arrays of Mosaic GPU by instructions that neither Pallas nor MLIR makes."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector
from jaxlib.mlir.dialects import math as math_dialect

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu.emit import constant, emit, integer, words_of

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

    def larger(given, other):
        registers = []
        for pair in zip(given.registers.flat, other.registers.flat, strict=True):
            own, others = (vector.bitcast(words_of(register.type), register) for register in pair)
            for k in range(own.type.shape[0]):
                word = larger_of_words(a.dtype, *(llvm.extractelement(part, constant(k)) for part in (own, others)))
                own = llvm.insertelement(own, word, constant(k))
            registers.append(vector.bitcast(pair[0].type, own))
        return registers

    return emit(larger, None, (), [(a, layout), (b, layout)], plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout))


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

    `place` and `addend` are one for all, or one for each element. An addition with a predicate is one instruction,
    where a selection would be another.
    """
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
    if not isinstance(value.type, ir.VectorType):
        return value
    return llvm.extractelement(value, constant(q if value.type.shape[0] > 1 else 0))


def before_row(first, step, width: int):
    """Returns the elements between a thread's first one in a step, at column `first`, and the row's start; negative inside."""
    return arith.subi(arith.muli(step, constant(width)), first)


def product(a: jax.Array, b: int, layout: Any) -> tuple[jax.Array, jax.Array]:
    """Computes the high and the low words of the products of a uint32 array and a number."""

    def multiply(a):
        (register,) = a.registers.flat
        wide = ir.VectorType.get(register.type.shape, integer(64))
        whole = arith.muli(arith.extui(wide, register), utils.c(b, wide))
        high = arith.shrui(whole, utils.c(32, wide))
        return [[arith.trunci(register.type, part)] for part in (high, whole)]

    kind = plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout)
    return tuple(emit(multiply, arrays=[(a, layout)], results=[kind, kind]))


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
