"""The gradient of the largest softmax weights of many short rows on Hopper.

A warp copies its rows to shared memory, and then a lane, or a few, have a row:

1. A lane loads what belongs to its row: indices, cotangents, weights if they were saved, the state. The weights are else those
   of the elements at the indices. With them it knows what the row's elements have in common, the mean of the cotangents.
2. Where the whole row was normalized, each element gives way to its own gradient, but for what was found. Else all are 0.
3. What was found is put in its place, and the rows are copied to global memory.

So of each element as many bytes are read and written as it has, or only written where weights are those of the selected; and of
each row k indices, cotangents, and weights or the state are read.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax._gpu.ptx import WARPS, compare, constant, i64, integer, utils
from jaxsoftmax.ops.top_k.mosaic_sm90 import staged
from jaxsoftmax.ops.top_k.mosaic_sm90.floats import exponential, inverse_of, narrowed, reciprocal, shifted, widened
from jaxsoftmax.ops.top_k.mosaic_sm90.staged import VECTOR, Plan, Warp, store_all, vector_of


def serves(cols: int, itemsize: int, k: int, of_x: int | None) -> bool:
    """Whether there is a kernel for gradients of that size; `of_x` is that of the elements of `x`, None where there is none."""
    sizes = [itemsize] if of_x is None else [itemsize, of_x]
    return k <= staged.MOST and all(staged.serves(cols, size) for size in sizes) and sizes[-1] <= itemsize


def gradient(indices, c, b, x, m, d, weights, *, cols: int, dtype: Any) -> jax.Array:
    """`[rows, cols]`: what `xla.softmax_top_k_vjp` gives without mask and scale, of rows that are one after another.

    `c` and `indices` are `[rows, k]`, as `weights` if they were saved; `b`, `m` and `d` are `[rows, 1]`. `x` is `[rows, cols]`,
    or None where only selected weights have cotangents.
    """
    (rows, k), out = indices.shape, jnp.dtype(dtype)
    sizes = [cols * out.itemsize]
    if x is not None and x.dtype.itemsize != out.itemsize:  # which has a place of its own
        sizes.append(cols * x.dtype.itemsize)
    plan = Plan(rows, cols, out.itemsize, staged.rows_of_warp(sum(sizes)))
    of_x = plan if x is None else Plan(rows, cols, x.dtype.itemsize, plan.of_warp)
    given = {"indices": indices, "c": c, "b": b, "m": m, "d": d, "weights": weights}
    given = {name: array.reshape(-1) for name, array in given.items() if array is not None}
    if x is not None:
        given["x"] = x
    call = _Call(plan, of_x, k, tuple(given), out, None if x is None else jnp.dtype(x.dtype))
    places = [plan.bytes] if of_x == plan else [plan.bytes, of_x.bytes]
    return kernel_of(
        functools.partial(_kernel, call),
        out_type=jax.ShapeDtypeStruct((rows, cols), dtype),
        grid=(plan.blocks,),
        grid_names=("block",),
        scratch_types=[plgpu.SMEM((WARPS * size // 4,), jnp.int32) for size in places],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="softmax_top_k_vjp_of_short_rows_mosaic",
    )(*given.values())


@dataclass(frozen=True)
class _Call:
    """What is computed.

    Attributes:
      plan: of the gradient.
      of_x: of `x`, the same if both take turns in one place.
      k: entries of a row.
      names: of what is given.
      out: the dtype of the gradient.
      of: that of `x`, or None.
    """

    plan: Plan
    of_x: Plan
    k: int
    names: tuple[str, ...]
    out: Any
    of: Any


def _kernel(call, *refs):
    ptx.emit(functools.partial(_emit, call), refs, [lax.axis_index("block")])


def _emit(call, *refs):
    *refs, block = refs
    given, (out, *shared) = dict(zip(call.names, refs, strict=False)), refs[len(call.names) :]
    warp, of_x = Warp(call.plan, shared[0], block), Warp(call.of_x, shared[-1], block)
    if "x" in given:
        of_x.fetch(given["x"])
    columns = _of_row(warp, given["indices"], call.k)
    parts = {name: _floats_of_row(warp, given[name], call.k) for name in ("c", "weights") if name in given}
    parts |= {name: _floats_of_row(warp, given[name], 1)[0] for name in ("b", "m", "d") if name in given}
    if "x" in given:
        of_x.arrived()
    found, common, m = _of_found(call, of_x, columns, **parts)
    if call.plan.lanes > 1:
        utils.warp_barrier()  # what was found is read before it is replaced
    for offset, is_there in of_x.vectors():
        _replace(call, warp, of_x, offset, is_there, common, m)
    if call.plan.lanes > 1:
        utils.warp_barrier()
    is_first = compare("eq", warp.part, constant(0)) if call.plan.lanes > 1 else None
    for column, value in zip(columns, found, strict=True):
        address = arith.addi(warp.own, arith.muli(column, constant(call.plan.itemsize)))
        store_all(address, narrowed([value], utils.dtype_to_ir_type(call.out)), is_first)
    utils.warp_barrier()
    warp.store(out)


def _of_found(call, of_x, columns, c, weights=None, b=None, m=None, d=None):
    """The gradients of the elements that were found; and for the others the factor of the exponential, or None, and `m`."""
    if weights is not None:
        found = _of_selected(weights, c)
        if b is None:
            return found, None, None
        m, inverse = shifted(m), reciprocal(d)
        more = [arith.mulf(chance, b) for chance in _chances(call, of_x, columns, m, inverse)]
        return [arith.addf(*pair) for pair in zip(found, more, strict=True)], arith.mulf(b, inverse), m
    m, inverse = shifted(m), inverse_of(d)
    weights = _chances(call, of_x, columns, m, inverse)
    c = _where_weighed(weights, c)
    common = arith.subf(_zero() if b is None else b, _sum_of_products(weights, c))
    found = [arith.mulf(weight, arith.addf(one, common)) for weight, one in zip(weights, c, strict=True)]
    return found, arith.mulf(common, inverse), m


def _of_selected(weights, c):
    """The gradients of what was found where only that is normalized."""
    c = _where_weighed(weights, c)
    mean = _sum_of_products(weights, c)
    found = [arith.mulf(weight, arith.subf(one, mean)) for weight, one in zip(weights, c, strict=True)]
    return _where_weighed(weights, found)


def _chances(call, of_x, columns, m, inverse):
    """The weights in the whole row of the elements in these columns."""
    values = [_element(call, of_x, column) for column in columns]
    return [arith.mulf(exponential(arith.subf(value, m)), inverse) for value in values]


def _where_weighed(weights, values):
    """0 where a weight is."""
    has_weight = [arith.cmpf(arith.CmpFPredicate.UNE, weight, _zero()) for weight in weights]
    return [arith.select(has, value, _zero()) for has, value in zip(has_weight, values, strict=True)]


def _sum_of_products(weights, values):
    return functools.reduce(arith.addf, [arith.mulf(*pair) for pair in zip(weights, values, strict=True)])


def _zero() -> Any:
    return arith.constant(ir.F32Type.get(), 0.0)


def _replace(call, warp, of_x, offset, is_there, common, m):
    """Stores the gradients of a vector's elements as if none of them was found, or 0."""
    if common is None:
        store_all(warp.vector, [constant(0)] * 4, is_there, offset)
        return
    loaded = ptx.load_words(of_x.vector, offset, is_there, vector_of(4, 32), space="shared")
    values = [value for q in range(4) for value in widened(call.of, llvm.extractelement(loaded, constant(q)))]
    values = [arith.mulf(exponential(arith.subf(value, m)), common) for value in values]
    words = narrowed(values, utils.dtype_to_ir_type(call.out))
    wider = len(words) // 4  # of x, by which its vectors become more
    address = warp.vector if wider == 1 else arith.addi(warp.own, arith.muli(warp.part, constant(wider * VECTOR)))
    for half in range(wider):
        store_all(address, words[4 * half : 4 * half + 4], is_there, wider * offset + half * VECTOR)


def _element(call, of_x, column):
    """The element of a lane's row in this column, as float32."""
    size = call.of_x.itemsize
    address = arith.addi(of_x.own, arith.muli(column, constant(size)))
    loaded = llvm.extractelement(ptx.load_words(address, 0, None, vector_of(1, 8 * size), space="shared"), constant(0))
    return widened(call.of, loaded if size == 4 else arith.extui(integer(32), loaded))[0]


def _of_row(warp, ref, count):
    """The `count` elements that an array `[rows * count]` has of a lane's row, as their bits: int32, or int16."""
    width = utils.bitwidth(ref.type.element_type)
    address = arith.addi(warp.address(ref, count * width // 8), i64(arith.muli(warp.row, constant(count * width // 8))))
    word = 32 if count * width % 32 == 0 else width
    words = count * width // word
    at_once = next(n for n in (4, 2, 1) if words % n == 0)
    found = []
    for first in range(0, words, at_once):
        loaded = ptx.load_words(address, first * word // 8, warp.is_there, vector_of(at_once, word))
        found += [llvm.extractelement(loaded, constant(q)) for q in range(at_once)]
    if word > width:
        halves = [(word, arith.shrui(word, constant(16))) for word in found]
        found = [arith.trunci(integer(16), half) for pair in halves for half in pair]
    return found


def _floats_of_row(warp, ref, count):
    """The same as float32."""
    kind = ref.type.element_type
    as_kind = [arith.bitcast(kind, bits) for bits in _of_row(warp, ref, count)]
    return [value if value.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), value) for value in as_kind]
