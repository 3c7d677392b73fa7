"""Tells what XLA would compute together with the consumer of an array, from the operations that produce it while lowering.

XLA fuses elementwise producers into its own softmax. A kernel behind a custom call sees arrays in memory only, so that its
operand has to be written first, unless it is in memory anyway: as an argument or a constant, or as the result of a matrix
product, reduction, transpose, concatenation, gather, loop or another kernel.

`tests/core/test_fusion.py` compares this with programs that XLA compiles for an H200 (JAX 0.11.2). Two things are out of sight:
the caller of a jitted function, whose arguments count as arrays in memory (`jax.jit(softmax)(x * 2)`), and readers of an
operand that are lowered later, for which XLA may write it anyway.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jax.interpreters import mlir

_NARROW = {"bf16": "bfloat16", "f16": "float16"}

# Operations that XLA fuses with what reads their result.
_ELEMENTWISE = """
    abs acos acosh add and asin asinh atan atan2 atanh broadcast_in_dim cbrt ceil clamp compare complex convert cosh cosine
    count_leading_zeros digamma divide erf erf_inv erfc exponential exponential_minus_one floor imag iota is_finite lgamma log
    log_plus_one logistic maximum minimum multiply negate not or popcnt power real reduce_precision remainder
    round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine sinh
    slice sqrt square subtract tan tanh xor
"""
_FUSED = frozenset(f"{dialect}.{kind}" for dialect in ("stablehlo", "chlo") for kind in _ELEMENTWISE.split())

# XLA computes what is elementwise in the result of these (a scale, a bias, an activation) with them, before it writes the
# result. It stops at the operations in _NO_EPILOGUE, and at a cast to a wider dtype.
_WITH_EPILOGUE = frozenset(("stablehlo.dot_general", "stablehlo.reduce"))
_NO_EPILOGUE = frozenset(("stablehlo.broadcast_in_dim", "stablehlo.select", "stablehlo.slice"))

# Operations that read their operands in memory, and the first letters of the custom calls that are kernels. A matrix product
# may compute what is elementwise in its operands.
_IN_MEMORY = frozenset(("chlo.top_k", "stablehlo.optimization_barrier", "stablehlo.sort", "stablehlo.while"))
_KERNELS = ("mosaic_gpu", "triton")

# These move data and compute nothing, so that a cast may as well come after them.
_MOVES = frozenset(
    ("sdy.sharding_constraint", "stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.slice", "stablehlo.transpose")
)


def widened_from(value: mlir.ir.Value) -> mlir.ir.Value | None:
    """Returns the float16 or bfloat16 value that `value` is a cast of to float32, or None.

    If the result of the cast was reshaped, transposed, sliced, broadcast or resharded, the same is done to the narrow value.
    The cast is exact, and kernels compute in float32 anyway: they read half the bytes, and no cast is written.
    """
    operation = _definition(value)
    if operation is None:
        return None
    if operation.name == "stablehlo.convert":
        source = operation.operands[0]
        return source if _dtype(value) == "f32" and narrow_dtype(source) else None
    if operation.name in _MOVES and (source := widened_from(operation.operands[0])) is not None:
        return _emit_move(operation, source)
    return None


@dataclass(frozen=True)
class Scaled:
    """The two factors of a product that is an operand of scores."""

    source: mlir.ir.Value  # as large as the product; as it was before a cast to float32
    factor: mlir.ir.Value  # float32, of as many axes, and of size 1 along the axes of a row
    divides: bool = False  # True if the value is `source / factor`


def scaled_from(value: mlir.ir.Value, axes: Sequence[int]) -> Scaled | None:
    """Returns the two sides of the product, or quotient, that `value` is, if one side is constant along `axes`, else None.

    The arithmetic is that of float32, bfloat16 or float16. A quotient keeps its divisor, so that no operation of XLA comes
    before a kernel: the reciprocal of each row took 1.1 us (H200). The last one of several products alone is undone. One factor
    instead of two would give other scores than the gradient has, which may run on the reference. If the product was reshaped,
    transposed, sliced or resharded, the same is done to the source.
    """
    if (scaled := _split_product(value, axes)) is not None:
        return scaled
    operation = _definition(value)
    if operation is None or operation.name not in _MOVES - {"stablehlo.broadcast_in_dim"}:
        return None
    product = operation.operands[0]
    is_in_place = operation.name == "sdy.sharding_constraint"
    scaled = scaled_from(product, axes if is_in_place else range(_type(product).rank))
    if scaled is None:
        return None
    factor = scaled.factor if is_in_place else _emit_number(scaled.factor, value)
    return Scaled(_emit_move(operation, scaled.source), factor, scaled.divides)


def _split_product(value, axes) -> Scaled | None:
    """Returns the two sides of `value` if it is itself such a product or quotient, else None."""
    operation = _definition(value)
    if operation is None or _dtype(value) not in ("f32", *_NARROW):
        return None
    if operation.name not in ("stablehlo.multiply", "stablehlo.divide"):
        return None
    is_quotient = operation.name == "stablehlo.divide"
    source, other = operation.operands
    number = _constant_along(other, axes)
    if number is None and not is_quotient:
        other, source = source, other
        number = _constant_along(other, axes)
    if number is None:
        return None
    factor = _emit("stablehlo.convert", _type(number).shape, "f32", number)
    return Scaled(widened_from(source) or source, factor, divides=is_quotient)


def _constant_along(value, axes) -> mlir.ir.Value | None:
    """Returns `value` with size 1 along `axes` if it is known to be constant along them, else None.

    The result may have size 1 along other axes too.
    """
    operation, shape = _definition(value), _type(value).shape
    if operation is None:
        return None
    if operation.name == "sdy.sharding_constraint":
        return _constant_along(operation.operands[0], axes)
    if operation.name == "stablehlo.convert" and (number := _constant_along(operation.operands[0], axes)) is not None:
        return _emit("stablehlo.convert", _type(number).shape, _dtype(value), number)
    if operation.name == "stablehlo.constant":
        values = mlir.ir.DenseElementsAttr(operation.attributes["value"])
        if not values.is_splat:
            return None
        one = mlir.ir.RankedTensorType.get([1] * len(shape), _type(value).element_type)
        splat = mlir.ir.DenseElementsAttr.get_splat(one, values.get_splat_value())
        return mlir.ir.Operation.create("stablehlo.constant", [one], [], {"value": splat}).result
    if operation.name != "stablehlo.broadcast_in_dim":
        return None
    number, sizes = operation.operands[0], [1] * len(shape)
    dims = mlir.ir.DenseI64ArrayAttr(operation.attributes["broadcast_dimensions"])
    for axis, size in zip(dims, _type(number).shape, strict=True):
        sizes[axis] = size
    if any(sizes[axis] != 1 for axis in axes):
        return None
    return _emit("stablehlo.reshape", sizes, _dtype(value), number)


def one_hot_from(value: mlir.ir.Value, axes: Sequence[int], functions: mlir.ir.SymbolTable | None) -> mlir.ir.Value | None:
    """Returns `value` as a comparison with an index, if it is a scatter of one number to each row of zeros, else None.

    It is the cotangent of `take_along_axis(y, ids)`, or of `y[id]` in a `vmap`. XLA writes a scatter, and fuses a comparison.
    In both an index outside of the row adds nothing.
    """
    (operation, calls), shape = _producer(value, functions, ()), _type(value).shape
    if operation is None or operation.name != "stablehlo.scatter" or len(operation.operands) != 3 or len(axes) != 1:
        return None
    if [each.name for each in operation.regions[0].blocks[0]] != _SUM:
        return None
    if not _type(value).has_static_shape or _type(operation.results[0]).shape != shape:  # reshaped, rows may be others
        return None
    numbers = str(operation.attributes["scatter_dimension_numbers"])
    lists = {name: [*map(int, entries.split(", "))] for name, entries in _LIST.findall(numbers)}
    others = [at for at in range(len(shape)) if at != axes[0]]
    if lists.get("input_batching_dims", []) != others or lists.get("scatter_dims_to_operand_dims") != [*axes]:
        return None
    of_indices = lists.get("scatter_indices_batching_dims", [])
    zeros, *places_and_numbers = operation.operands
    outer = [_outside(operand, calls) for operand in places_and_numbers]
    is_one_each = all(each is not None and math.prod(_type(each).shape) * shape[axes[0]] == math.prod(shape) for each in outer)
    if not is_one_each or of_indices != sorted(of_indices) or not _is_splat(zeros, 0):
        return None
    return _emit_one_hot(value, axes[0], *outer)


_SUM = ["stablehlo.add", "stablehlo.return"]  # what a scatter does with a number that is there

# Lists of numbers in the text of an attribute.
_LIST = re.compile(r"(\w+) = \[([\d, ]+)\]")


def _outside(value, calls) -> mlir.ir.Value | None:
    """Returns the value that functions get from outside of all `calls`, or None if they compute it."""
    for call in reversed(calls):
        if _definition(value) is not None:
            return None
        value = call.operands[value.arg_number]
    return value


def narrow_dtype(value: mlir.ir.Value) -> str | None:
    """Returns the name of the dtype of `value` if it is float16 or bfloat16, else None."""
    return _NARROW.get(_dtype(value))


def is_fused(value: mlir.ir.Value, functions: mlir.ir.SymbolTable | None) -> bool:
    """Tells whether XLA would compute `value` together with its reader, so that it never is in memory.

    Args:
      value: the operand of an operation that is lowered.
      functions: the functions of the module by name, or None: `jnp.where`, `jax.nn.relu` and others are jitted functions.
    """
    operation, calls = _producer(value, functions, (), keeps_rows=True)
    return operation is not None and operation.name in _FUSED and not _is_epilogue(operation, functions, calls)


def is_written(value: mlir.ir.Value, functions: mlir.ir.SymbolTable | None) -> bool:
    """Tells whether XLA writes `value` anyway, for a reader that was lowered before. Arguments are those of `is_fused`."""
    while True:
        if _is_read_in_memory(value, functions):
            return True
        operation = _definition(value)
        if operation is None or not _is_reshape(operation):
            return False
        value = operation.operands[0]


def _is_read_in_memory(value, functions) -> bool:
    """Tells whether an operation reads `value` in memory, possibly in another shape, or in a function that is called."""
    for use in value.uses:
        reader = use.owner
        if reader.name in _IN_MEMORY:
            return True
        if reader.name == "stablehlo.custom_call":
            if reader.attributes["call_target_name"].value.startswith(_KERNELS):
                return True
        elif reader.name == "func.call" and functions is not None:
            (body,) = functions[reader.attributes["callee"].value].regions[0]
            if _is_read_in_memory(body.arguments[use.operand_number], functions):
                return True
        elif _is_reshape(reader) and _is_read_in_memory(reader.results[0], functions):
            return True
    return False


def _is_epilogue(operation, functions, calls) -> bool:
    """Tells whether `operation` is elementwise in the result of a matrix product or a reduction, which then computes it."""
    pending, seen = [(operation, calls)], set()
    while pending:
        operation, calls = pending.pop()
        if operation is None or (operation, calls) in seen:
            continue
        if operation.name in _WITH_EPILOGUE:
            return True
        widens = operation.name == "stablehlo.convert" and narrow_dtype(operation.results[0]) is None
        if operation.name in _FUSED - _NO_EPILOGUE and not widens:
            seen.add((operation, calls))
            pending += [_producer(operand, functions, calls) for operand in operation.operands]
    return False


def _producer(value, functions, calls, keeps_rows=False) -> tuple[Any, tuple[Any, ...]]:
    """Returns the operation that computes `value`, None for an argument, and the calls around it, the outermost first.

    It looks through calls of functions, and through reshapes and products with 1, for which XLA computes nothing. With
    `keeps_rows` it stops at a reshape that changes the length of the last axis: XLA's softmax reads its result from memory.
    """
    while True:
        operation = _definition(value)
        if operation is None:
            if not calls:
                return None, calls
            value, calls = calls[-1].operands[value.arg_number], calls[:-1]
        elif operation.name == "func.call" and functions is not None:
            *_, end = functions[operation.attributes["callee"].value].regions[0].blocks[0]
            value, calls = end.operands[value.result_number], (*calls, operation)
        elif _is_reshape(operation) and (not keeps_rows or _row_length(operation.operands[0]) == _row_length(value)):
            value = operation.operands[0]
        elif (factor := _beside_one(operation)) is not None:
            value = factor
        else:
            return operation, calls


def _is_reshape(operation) -> bool:
    """Tells whether the result is the operand, possibly in another shape."""
    if operation.name in ("stablehlo.reshape", "sdy.sharding_constraint"):
        return True
    if operation.name != "stablehlo.broadcast_in_dim":
        return False
    return math.prod(_type(operation.results[0]).shape) == math.prod(_type(operation.operands[0]).shape)


def _row_length(value) -> int | None:
    """Returns the size of the last axis that is longer than 1."""
    return next((size for size in reversed(_type(value).shape) if size != 1), None)


def _beside_one(operation) -> Any:
    """Returns the other factor of a product with 1, which XLA leaves out, or None. The cotangent of a sum is all ones."""
    if operation.name != "stablehlo.multiply":
        return None
    left, right = operation.operands
    return left if _is_one(right) else right if _is_one(left) else None


def _is_one(value) -> bool:
    """Tells whether all elements are the constant 1."""
    return _is_splat(value, 1)


def _is_splat(value, number: int) -> bool:
    """Tells whether all elements are a constant, 0 or 1."""
    operation = _definition(value)
    while operation is not None and operation.name in _MOVES | {"stablehlo.convert"}:
        operation = _definition(operation.operands[0])
    if operation is None or operation.name != "stablehlo.constant":
        return False
    if isinstance(_type(operation.results[0]).element_type, mlir.ir.ComplexType):  # MLIR hands Python no array of these
        return False
    values = mlir.ir.DenseElementsAttr(operation.attributes["value"])
    return values.is_splat and str(values.get_splat_value()).split(" : ")[0] == f"{number}.000000e+00"


def _definition(value) -> Any:
    """Returns the operation that produces `value`, or None for an argument of a function or of a block."""
    return None if isinstance(value.owner, mlir.ir.Block) else value.owner.operation


def _type(value):
    return mlir.ir.RankedTensorType(value.type)


def _dtype(value) -> str:
    return str(_type(value).element_type)


# Operations that are emitted beside the one that is lowered. XLA leaves out those that nothing uses.


def _emit(name: str, shape: Sequence[int], dtype: str, *operands: Any, **attributes: Any) -> mlir.ir.Value:
    """Emits an operation with one result of this shape and dtype."""
    result = mlir.ir.RankedTensorType.get(shape, mlir.ir.Type.parse(dtype))
    return mlir.ir.Operation.create(name, [result], operands, attributes).result


def _emit_move(operation, source) -> mlir.ir.Value:
    """Emits the operation, one of _MOVES, on `source` in place of its operand."""
    attributes = {name: operation.attributes[name] for name in operation.attributes}
    return _emit(operation.name, _type(operation.results[0]).shape, _dtype(source), source, **attributes)


def _emit_number(value, beside) -> mlir.ir.Value:
    """Emits the one element of `value` with as many axes as `beside` has."""
    return _emit("stablehlo.reshape", [1] * _type(beside).rank, _dtype(value), value)


def _emit_one_hot(like, axis: int, places, numbers) -> mlir.ir.Value:
    """Emits an array of zeros like `like`, with a number of each row at its place along `axis`."""
    shape = _type(like).shape
    of_rows = [1 if at == axis else size for at, size in enumerate(shape)]
    dims = mlir.ir.DenseI64ArrayAttr.get([*range(len(shape))])

    def broadcast(array):
        reshaped = _emit("stablehlo.reshape", of_rows, _dtype(array), array)
        return _emit("stablehlo.broadcast_in_dim", shape, _dtype(array), reshaped, broadcast_dimensions=dims)

    if mlir.ir.IntegerType(_type(places).element_type).width < 32:  # it may not count the columns
        places = _emit("stablehlo.convert", _type(places).shape, "i32", places)
    dimension = mlir.ir.IntegerAttr.get(mlir.ir.IntegerType.get_signless(64), axis)
    columns = _emit("stablehlo.iota", shape, _dtype(places), iota_dimension=dimension)
    equal = mlir.ir.Attribute.parse("#stablehlo<comparison_direction EQ>")
    is_there = _emit("stablehlo.compare", shape, "i1", columns, broadcast(places), comparison_direction=equal)
    zero = mlir.ir.DenseElementsAttr.get_splat(like.type, mlir.ir.FloatAttr.get(_type(like).element_type, 0.0))
    zeros = _emit("stablehlo.constant", shape, _dtype(like), value=zero)
    return _emit("stablehlo.select", shape, _dtype(like), is_there, broadcast(numbers), zeros)
