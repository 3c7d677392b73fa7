"""The gradient of the largest softmax weights of many short rows on Hopper.

A warp copies its rows to shared memory, and then a lane, or a few, have a row:

1. A lane loads what belongs to its row: indices, cotangents, the state, and weights if they were saved; else it computes them
   from the elements at the indices. From these follows the mean of the cotangents, which all elements of the row need.
2. If the whole row was normalized, the gradient of each element takes its place, as if its weight were not wanted; else 0 does.
3. The gradients at the indices are stored on top, one after another, so that nothing is compared with indices. The rows are
   copied to global memory.

An element is read once and written once, or only written if selected weights alone have cotangents. For each row k indices and
cotangents are read, and k weights or the state.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax._gpu.emit import compare, constant, emit, i64, integer, load_words, utils
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.top_k.mosaic_sm90 import warp_rows
from jaxsoftmax.ops.top_k.mosaic_sm90.warp_rows import VECTOR, StagedRows, WarpRows, words_type
from jaxsoftmax.ops.top_k.problem import TopKProblem


@dataclass(frozen=True)
class ShortGradientPlan:
    """Runs `softmax_top_k_vjp` of short rows."""

    staged: StagedRows  # rows of the gradient
    staged_x: StagedRows  # rows of `x`, in the place of the gradient's if elements have one size
    batch: tuple[int, ...]  # sizes of the axes in front of the rows
    k: int  # entries of a row that have cotangents
    names: tuple[str, ...]  # of the operands that the kernel reads, in its order
    dtype: np.dtype  # of the gradient
    x_dtype: np.dtype | None  # None if `x` is not read
    remark = None

    def describe(self) -> str:
        return f"{self.staged.describe()}, {self.k} entries replaced"

    @property
    def places(self) -> list[int]:
        """Bytes of shared memory of a block for each array that does not share the place of another one."""
        return [staged.block_bytes for staged in dict.fromkeys((self.staged, self.staged_x))]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory of a block."""
        return sum(self.places)

    def run(self, **operands: Any) -> list[jax.Array]:
        """Returns the gradient."""
        cols = self.staged.cols
        shapes = {name: (-1, cols) if name == "x" else (-1,) for name in self.names}
        gradient = kernel_of(
            functools.partial(_kernel, self),
            out_type=jax.ShapeDtypeStruct((self.staged.rows, cols), self.dtype),
            grid=(self.staged.blocks,),
            grid_names=("block",),
            scratch_types=[plgpu.SMEM((size // 4,), jnp.int32) for size in self.places],
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="softmax_top_k_vjp_of_short_rows_mosaic",
        )(*[operands[name].reshape(shape) for name, shape in shapes.items()])
        return [gradient.reshape(*self.batch, cols)]


def _read(problem: TopKProblem) -> list[str]:
    """Lists the operands that the gradient depends on, in the order of the kernel."""
    unread = ("x", "m", "d") if problem.ignores_rows else ()
    names = ("indices", "c", "b", "m", "d", "weights", "x")
    return [name for name in names if name in problem.operands and name not in unread]


def serves(problem: TopKProblem) -> bool:
    """Tells whether the kernel serves a gradient: of whole vectors, without mask and scale, for small k."""
    if not problem.is_plain or "c" not in problem.operands or problem.k > warp_rows.MAX_K:
        return False
    sizes = [problem.dtype.itemsize] + ([problem.operands["x"].dtype.itemsize] if "x" in problem.operands else [])
    return all(warp_rows.serves(problem.cols, size) for size in sizes) and sizes[-1] <= problem.dtype.itemsize


def plan_short_gradient(problem: TopKProblem) -> ShortGradientPlan:
    """Plans a gradient that the kernel serves."""
    cols, dtype, names = problem.cols, problem.dtype, _read(problem)
    x_dtype = problem.operands["x"].dtype if "x" in names else None
    itemsizes = {dtype.itemsize} | ({x_dtype.itemsize} if x_dtype is not None else set())
    rows_per_warp = warp_rows.rows_per_warp(cols * sum(itemsizes))
    staged = StagedRows(problem.rows, cols, dtype.itemsize, rows_per_warp)
    staged_x = staged if x_dtype is None else StagedRows(problem.rows, cols, x_dtype.itemsize, rows_per_warp)
    return ShortGradientPlan(staged, staged_x, problem.batch, problem.k, tuple(names), dtype, x_dtype)


def _kernel(plan, *refs):
    emit(functools.partial(_emit, plan), refs, [lax.axis_index("block")])


def _emit(plan: ShortGradientPlan, *refs):
    """Computes the gradients of the rows of a warp."""
    operands, (out, *shared, block) = dict(zip(plan.names, refs, strict=False)), refs[len(plan.names) :]
    warp, warp_x = WarpRows(plan.staged, shared[0], block), WarpRows(plan.staged_x, shared[-1], block)
    if "x" in operands:
        warp_x.fetch(operands["x"])
    columns = _load_row(warp, operands["indices"], plan.k)
    entries = {name: _load_floats(warp, operands[name], plan.k) for name in ("c", "weights") if name in operands}
    numbers = {name: _load_floats(warp, operands[name], 1)[0] for name in ("b", "m", "d") if name in operands}
    if "x" in operands:
        warp_x.await_rows()
    wanted, factor, m = _gradients(plan, warp_x, columns, **entries, **numbers)
    if plan.staged.lanes > 1:
        utils.warp_barrier()  # the elements at the indices are read before they are replaced
    for first in range(0, plan.staged_x.vectors, plan.staged_x.lanes):
        _replace(plan, warp, warp_x, first, factor, m)
    if plan.staged.lanes > 1:
        utils.warp_barrier()
    is_first = compare("eq", warp.part, constant(0)) if plan.staged.lanes > 1 else None
    for column, value in zip(columns, wanted, strict=True):
        address = arith.addi(warp.row_start, arith.muli(column, constant(plan.staged.itemsize)))
        warp_rows.store_to_shared(address, warp_rows.narrow([value], utils.dtype_to_ir_type(plan.dtype)), is_first)
    utils.warp_barrier()
    warp.store(out)


# What is computed.


def _gradients(plan, warp_x, columns, c, weights=None, b=None, m=None, d=None):
    """Returns the gradients of the elements at the indices, and what the others have in common: a factor, and `m`.

    The others have the gradient `factor * exp(x - m)`, or 0 if the factor is None.
    """
    if weights is not None:
        wanted = _gradients_of_selected(weights, c)
        if b is None:
            return wanted, None, None
        m, inverse = warp_rows.shift(m), warp_rows.reciprocal(d)
        more = [arith.mulf(weight, b) for weight in _weights(plan, warp_x, columns, m, inverse)]
        return [arith.addf(*pair) for pair in zip(wanted, more, strict=True)], arith.mulf(b, inverse), m
    m, inverse = warp_rows.shift(m), warp_rows.normalizer(d)
    weights = _weights(plan, warp_x, columns, m, inverse)
    c = _where_weighed(weights, c)
    common = arith.subf(_zero() if b is None else b, _sum_of_products(weights, c))
    wanted = [arith.mulf(weight, arith.addf(one, common)) for weight, one in zip(weights, c, strict=True)]
    return wanted, arith.mulf(common, inverse), m


def _gradients_of_selected(weights, c):
    """Returns the gradients of the elements at the indices if these alone are normalized."""
    c = _where_weighed(weights, c)
    mean = _sum_of_products(weights, c)
    wanted = [arith.mulf(weight, arith.subf(one, mean)) for weight, one in zip(weights, c, strict=True)]
    return _where_weighed(weights, wanted)


def _weights(plan, warp_x, columns, m, inverse):
    """Computes the weights, in the whole row, of the elements in these columns."""
    values = [_element(plan, warp_x, column) for column in columns]
    return [arith.mulf(warp_rows.exponential(arith.subf(value, m)), inverse) for value in values]


def _where_weighed(weights, values):
    """Returns the values, 0 where a weight is 0."""
    has_weight = [arith.cmpf(arith.CmpFPredicate.UNE, weight, _zero()) for weight in weights]
    return [arith.select(has, value, _zero()) for has, value in zip(has_weight, values, strict=True)]


def _sum_of_products(weights, values):
    return functools.reduce(arith.addf, [arith.mulf(*pair) for pair in zip(weights, values, strict=True)])


def _zero() -> Any:
    return arith.constant(ir.F32Type.get(), 0.0)


def _replace(plan, warp, warp_x, first: int, factor, m) -> None:
    """Stores the gradients of the elements of a lane's vector, `factor * exp(x - m)`, or 0."""
    has_vector, offset = warp_x.has_vector(first), first * VECTOR
    if factor is None:
        warp_rows.store_to_shared(warp.vector, [constant(0)] * 4, has_vector, offset)
        return
    values = warp_x.load_floats(plan.x_dtype, first, has_vector)
    values = [arith.mulf(warp_rows.exponential(arith.subf(value, m)), factor) for value in values]
    words = warp_rows.narrow(values, utils.dtype_to_ir_type(plan.dtype))
    n_vectors = len(words) // 4  # more than one if the gradient is wider than `x`
    start = warp.vector
    if n_vectors > 1:
        start = arith.addi(warp.row_start, arith.muli(warp.part, constant(n_vectors * VECTOR)))
    for number in range(n_vectors):
        part = words[4 * number : 4 * number + 4]
        warp_rows.store_to_shared(start, part, has_vector, n_vectors * offset + number * VECTOR)


# Operands.


def _element(plan, warp_x, column):
    """Loads the element of a lane's row in this column, as float32."""
    size = plan.staged_x.itemsize
    address = arith.addi(warp_x.row_start, arith.muli(column, constant(size)))
    word = llvm.extractelement(load_words(address, 0, None, words_type(1, 8 * size), space="shared"), constant(0))
    return warp_rows.widen(plan.x_dtype, word if size == 4 else arith.extui(integer(32), word))[0]


def _load_row(warp, ref, count: int):
    """Loads the `count` elements that an array `[rows * count]` has of a lane's row, as their bits: int32, or int16."""
    width = utils.bitwidth(ref.type.element_type)
    row_bytes = count * width // 8
    address = arith.addi(warp.address(ref, row_bytes), i64(arith.muli(warp.row, constant(row_bytes))))
    word = 32 if count * width % 32 == 0 else width
    words = count * width // word
    at_once = next(n for n in (4, 2, 1) if words % n == 0)
    bits = []
    for first in range(0, words, at_once):
        loaded = load_words(address, first * word // 8, warp.is_valid, words_type(at_once, word))
        bits += [llvm.extractelement(loaded, constant(q)) for q in range(at_once)]
    if word > width:
        halves = [(word, arith.shrui(word, constant(16))) for word in bits]
        bits = [arith.trunci(integer(16), half) for pair in halves for half in pair]
    return bits


def _load_floats(warp, ref, count: int):
    """Loads the same as float32."""
    kind = ref.type.element_type
    values = [arith.bitcast(kind, bits) for bits in _load_row(warp, ref, count)]
    return [value if value.type == ir.F32Type.get() else arith.extf(ir.F32Type.get(), value) for value in values]
