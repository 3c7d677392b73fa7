"""Float32 numbers of a lane, as MLIR values, in kernels that are written with them: what `online` is for arrays."""

import math

import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith

from jaxsoftmax._gpu.ptx import constant, integer, utils

_LOG2E = math.log2(math.e)


def shifted(m):
    """What `online.shift` is: 0 for what is infinite, or NaN."""
    text = "abs.f32 size, $1; setp.lt.f32 is, size, 0f7F800000; selp.f32 $0, $1, 0f00000000, is;"
    return utils.inline_ptx(f"{{ .reg .pred is; .reg .f32 size; {text} }}", m, result_types=m.type)


def exponential(x):
    scaled = arith.mulf(x, arith.constant(x.type, _LOG2E))
    return utils.inline_ptx("ex2.approx.ftz.f32 $0, $1;", scaled, result_types=x.type)


def inverse_of(d):
    """What weights are multiplied with, of rows whose sum of weights is `d`: NaN where that is infinite."""
    text = "setp.lt.f32 is, $1, 0f7F800000; selp.f32 $0, $1, 0f7FFFFFFF, is;"
    return reciprocal(utils.inline_ptx(f"{{ .reg .pred is; {text} }}", d, result_types=d.type))


def reciprocal(d):
    return utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", d, result_types=d.type)


def widened(dtype, word):
    """The elements of a word as float32."""
    if dtype.itemsize == 4:
        return [as_float(word, dtype)]
    if dtype == jnp.float16:
        return [as_float(half, dtype) for half in (word, arith.shrui(word, constant(16)))]
    return [as_float(half, dtype) for half in (arith.shli(word, constant(16)), arith.andi(word, constant(-(2**16))))]


def as_float(bits, dtype):
    """Of a float16 those in the lower half, of others all."""
    if dtype != jnp.float16:
        return arith.bitcast(ir.F32Type.get(), bits)
    text = "{ .reg .b16 low, high; mov.b32 {low, high}, $1; cvt.f32.f16 $0, low; }"
    return utils.inline_ptx(text, bits, result_types=ir.F32Type.get())


def narrowed(values, kind):
    """The bits of float32 values in another type of floats: of two values in a word, if that has 16 bits and they are even."""
    if utils.bitwidth(kind) == 32:
        return [arith.bitcast(integer(32), value) for value in values]
    if len(values) % 2:
        return [arith.bitcast(integer(16), arith.truncf(kind, value)) for value in values]
    text = f"cvt.rn.{'bf16x2' if kind == ir.BF16Type.get() else 'f16x2'}.f32 $0, $2, $1;"
    pairs = zip(values[::2], values[1::2], strict=True)
    return [utils.inline_ptx(text, *pair, result_types=integer(32)) for pair in pairs]


def sum_of(values):
    """Added up by halves, so that few are rounded one after another."""
    half = len(values) // 2
    return values[0] if not half else arith.addf(sum_of(values[:half]), sum_of(values[half:]))
