"""Elementwise functions as one operation of a kernel: their layout is stated, so Mosaic has nothing to infer for each step.

To lower an operation of `jax.numpy` in a kernel takes Pallas half a millisecond, most of it for the inference of layouts. Here
the function is traced by itself, and each of its operations is what Mosaic's own lowering makes of it: machine code and bits
are the same.
"""

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.extend as jex
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu.emit import SPLAT, constant, emit, fragmented, integer, widened_register


def fused(function: Callable[..., Any], static: tuple[Any, ...], arrays: Sequence[jax.Array], layout: Any) -> Any:
    """Computes `function(*static, *arrays)`.

    Args:
      function: elementwise function of arrays of one shape and of scalars. It returns an array of that shape, or a tuple of
        them, and uses nothing except its arguments: it is traced once in a process for each of their types.
      static: its first arguments, which are hashable.
      arrays: its other arguments: arrays in `layout`, and scalars.
      layout: layout of the arrays and of the results.
    """
    types = tuple(jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type) for a in map(jnp.asarray, arrays))
    traced, shapes = _traced(function, static, types)
    kinds = [plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout) for a in jax.tree.leaves(shapes)]

    def make(*operands):
        return [array.registers.flat for array in _run(traced.jaxpr, traced.consts, operands, layout.to_mgpu())]

    results = emit(make, arrays=[(a, layout if a.ndim else SPLAT) for a in arrays], results=kinds)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


@functools.cache
def _traced(function, static, types):
    return jax.make_jaxpr(functools.partial(function, *static), return_shape=True)(*types)


def product(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low words of the products of a uint32 array and a number, in a function that is `fused`."""
    return tuple(_product.bind(a, factor=b))


_product = jex.core.Primitive("wide_product")
_product.multiple_results = True
_product.def_abstract_eval(lambda a, *, factor: [a, a])


def _wide_product(array, *, factor):
    def halves(register):
        is_vector = isinstance(register.type, ir.VectorType)
        wide = ir.VectorType.get(register.type.shape, integer(64)) if is_vector else integer(64)
        whole = arith.muli(arith.extui(wide, register), utils.c(factor, wide))
        return [arith.trunci(register.type, part) for part in (arith.shrui(whole, utils.c(32, wide)), whole)]

    registers = zip(*map(halves, array.registers.flat), strict=True)
    return [fragmented(list(part), array.layout, array.shape, False) for part in registers]


def reciprocal(a: jax.Array) -> jax.Array:
    """Returns `1 / a` of float32 to within one unit in the last place, in a function that is `fused`.

    A division takes six instructions more.
    """
    return _reciprocal.bind(a)


_reciprocal = jex.core.Primitive("approximate_reciprocal")
_reciprocal.def_abstract_eval(lambda a: a)


def _reciprocals(array):
    registers = []
    for register in array.registers.flat:
        for place in range(register.type.shape[0]):
            value = llvm.extractelement(register, constant(place))
            value = utils.inline_ptx("rcp.approx.ftz.f32 $0, $1;", value, result_types=value.type)
            register = llvm.insertelement(register, value, constant(place))
        registers.append(register)
    return fragmented(registers, array.layout, array.shape, None)


def tanh(x: jax.Array) -> jax.Array:
    """Returns `tanh` to float32's rounding, which the hardware's is not, in a function that is `fused`.

    Source: the polynomial for small arguments is that of S. Moshier's Cephes library, `tanhf`.
    """
    square = x * x
    series = functools.reduce(lambda sum, c: sum * square + c, _TANH[1:], _TANH[0])
    large = 1 - 2 * reciprocal(1 + jnp.exp2(x * (2 * math.log2(math.e))))
    return jnp.where(jnp.abs(x) < 0.625, x + x * square * series, large)


_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)


def _run(jaxpr, constants, operands, layout) -> list[Any]:
    """Computes the results of a traced function, as arrays of Mosaic GPU."""
    values = dict(zip(jaxpr.constvars, map(_constant, constants), strict=True))
    values |= zip(jaxpr.invars, operands, strict=True)

    def read(atom):
        return _constant(atom.val) if hasattr(atom, "val") else values[atom]

    for equation in jaxpr.eqns:
        operands, params = list(map(read, equation.invars)), equation.params
        if equation.primitive.name in ("jit", "pjit", "closed_call"):
            results = _run(params["jaxpr"].jaxpr, params["jaxpr"].consts, operands, layout)
        elif equation.primitive.name == "broadcast_in_dim":
            results = [_whole(operands[0], params["shape"], layout)]
        elif equation.primitive is _product:
            results = _wide_product(*operands, **params)
        else:
            results = [_OPERATIONS[equation.primitive.name](*operands, **params)]
        values |= zip(equation.outvars, results, strict=True)
    return list(map(read, jaxpr.outvars))


def _constant(value):
    """Makes an array of Mosaic GPU without axes of a number."""
    dtype = jnp.result_type(value)
    return _splat(utils.c(np.asarray(value).item(), utils.dtype_to_ir_type(dtype)), (), dtype)


def _splat(value, shape, dtype):
    return fragmented([value], plgpu.Layout.WG_SPLAT(shape).to_mgpu(), shape, utils.is_signed(dtype))


def _whole(number, shape, layout):
    """Makes an array whose elements all are one number."""
    return type(number).splat(number.registers.item(), shape, layout, is_signed=number.is_signed)


def _converted(array, *, new_dtype, **params):
    if array.mlir_dtype == ir.BF16Type.get() and new_dtype == jnp.float32 and array.layout.vector_length % 2 == 0:
        return fragmented(list(map(widened_register, array.registers.flat)), array.layout, array.shape, None)
    return array.astype(utils.dtype_to_ir_type(new_dtype), is_signed=utils.is_signed(new_dtype))


def _bits(array, *, new_dtype):
    return array.bitcast(utils.dtype_to_ir_type(new_dtype), output_is_signed=utils.is_signed(new_dtype))


def _selected(condition, no, yes):
    """Selects elements; makes an array of a number for all first, because Mosaic takes the sign of integers from `yes`."""
    some = next((a for a in (condition, no) if a.registers.size > 1 or a.layout != yes.layout), None)
    if some is not None and len(some.shape) and yes.registers.ndim < some.registers.ndim:
        yes = type(yes).splat(yes.registers.item(), some.shape, some.layout, is_signed=yes.is_signed)
    return condition.select(yes, no)


def _plain(operation: Callable[..., Any]) -> Callable[..., Any]:
    """Makes an operation ignore its parameters, which say nothing that its operands do not."""
    return lambda *operands, **params: operation(*operands)


_OPERATIONS: dict[str, Callable[..., Any]] = {
    "convert_element_type": _converted,
    "bitcast_convert_type": _bits,
    "select_n": _plain(_selected),
    "exp": _plain(lambda a: a.exp(approx=True)),
    "exp2": _plain(lambda a: a.exp2(approx=True)),
    "approximate_reciprocal": _plain(_reciprocals),
    "div": _plain(operator.truediv),
    "log": _plain(lambda a: a.log(approx=True)),
    "abs": _plain(lambda a: a.abs()),
    "neg": _plain(operator.neg),
    "max": _plain(lambda a, b: a.max(b)),
    "min": _plain(lambda a, b: a.min(b)),
    "shift_left": _plain(operator.lshift),
    "shift_right_logical": _plain(operator.rshift),
    **{name: _plain(getattr(operator, name)) for name in ("add", "sub", "mul", "lt", "le", "gt", "ge", "eq", "ne", "xor")},
    "and": _plain(operator.and_),
    "or": _plain(operator.or_),
}
