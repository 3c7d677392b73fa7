"""What XLA would compute together with the consumer of an array, read off the operations that produce it while lowering.

XLA fuses elementwise producers into its own softmax. A kernel sees arrays in memory only: what it is given has to be written
first, unless it was there anyway, as an argument or as the result of a matrix product or of another kernel.

`tests/core/test_fusion.py` holds what is known of XLA here against programs that it compiles for an H200. A function's own
arguments end the search: whoever calls a jitted function computes them out of sight.
"""

import math
from typing import Any

from jax.interpreters import mlir

_NARROW = {"bf16": "bfloat16", "f16": "float16"}

# Operations, of the dialects `stablehlo` and `chlo`, that XLA fuses with what reads their result.
_FUSED = frozenset(
    "abs acos acosh add and asin asinh atan atan2 atanh broadcast_in_dim cbrt ceil clamp compare complex convert cosh cosine"  # noqa: SIM905
    " count_leading_zeros digamma divide erf erf_inv erfc exponential exponential_minus_one floor imag iota is_finite lgamma"
    " log log_plus_one logistic maximum minimum multiply negate not or popcnt power real reduce_precision remainder"
    " round_nearest_afz round_nearest_even rsqrt select shift_left shift_right_arithmetic shift_right_logical sign sine sinh"
    " slice sqrt square subtract tan tanh xor".split()
)

# What is elementwise in the result of these, XLA computes there, before it is written; but not these, nor casts to a wider
# dtype, nor what comes after them.
_WITH_EPILOGUE = frozenset(("dot_general", "reduce"))
_NO_EPILOGUE = frozenset(("broadcast_in_dim", "select", "slice"))

# These move data and compute nothing, so that a cast may as well come after them.
_MOVES = frozenset(
    ("sdy.sharding_constraint", "stablehlo.broadcast_in_dim", "stablehlo.reshape", "stablehlo.slice", "stablehlo.transpose")
)


def widened_from(value: mlir.ir.Value) -> mlir.ir.Value | None:
    """The float16 or bfloat16 value of which `value` is a cast to float32, or None.

    Where the result of the cast was reshaped, transposed, cut, broadcast or resharded, the same is done to what was cast.
    """
    operation = _operation(value)
    if operation is None:
        return None
    if operation.name == "stablehlo.convert":
        source = operation.operands[0]
        return source if str(_element(value)) == "f32" and narrow_dtype(source) else None
    if operation.name in _MOVES and (source := widened_from(operation.operands[0])) is not None:
        attributes = {name: operation.attributes[name] for name in operation.attributes}
        moved = mlir.ir.RankedTensorType.get(_shaped(value).shape, _element(source))
        return mlir.ir.Operation.create(operation.name, [moved], [source], attributes).result
    return None


def narrow_dtype(value: mlir.ir.Value) -> str | None:
    """The name of the dtype of `value` if it is float16 or bfloat16."""
    return _NARROW.get(str(_element(value)))


def is_fused(value: mlir.ir.Value, functions: mlir.ir.SymbolTable | None) -> bool:
    """Whether XLA would compute `value` together with what reads it, so that it never is in memory.

    Args:
      value: the operand of an operation that is lowered.
      functions: where callees are found, if they are: `jnp.where`, `jax.nn.relu` and others are jitted functions.
    """
    operation, calls = _producer(value, functions, (), _keeps_rows)
    return _kind(operation) in _FUSED and not _is_epilogue(operation, functions, calls)


def _is_epilogue(operation, functions, calls) -> bool:
    """Whether `operation` is elementwise in the result of a matrix product or a reduction, which XLA makes it a part of."""
    found, seen = [(operation, calls)], set()
    while found:
        operation, calls = found.pop()
        kind = _kind(operation)
        if kind in _WITH_EPILOGUE:
            return True
        if kind in _FUSED - _NO_EPILOGUE and not _widens(operation) and (operation, calls) not in seen:
            seen.add((operation, calls))
            found += [_producer(operand, functions, calls) for operand in operation.operands]
    return False


def _producer(value, functions, calls, passes=lambda operation: True) -> tuple[Any, tuple[Any, ...]]:
    """The operation that computes `value`, None for an argument, and the calls in whose callees it is, the outermost first.

    What is free is passed, where `passes` says so.
    """
    while True:
        operation = _operation(value)
        if operation is None and calls:
            value, calls = calls[-1].operands[value.arg_number], calls[:-1]
        elif functions is not None and operation is not None and operation.name == "func.call":
            *_, end = functions[operation.attributes["callee"].value].regions[0].blocks[0]
            value, calls = end.operands[value.result_number], (*calls, operation)
        elif operation is not None and _is_free(operation) and passes(operation):
            value = operation.operands[0]
        elif operation is not None and (factor := _beside_one(operation)) is not None:
            value = factor
        else:
            return operation, calls


def _beside_one(operation) -> Any:
    """What is multiplied with 1, a product that XLA leaves out, or None: the cotangent of a sum is all ones."""
    if operation.name != "stablehlo.multiply":
        return None
    left, right = operation.operands
    return left if _is_one(right) else right if _is_one(left) else None


def _is_one(value) -> bool:
    """Whether all elements are the constant 1."""
    operation = _operation(value)
    while operation is not None and operation.name in _MOVES | {"stablehlo.convert"}:
        operation = _operation(operation.operands[0])
    if operation is None or operation.name != "stablehlo.constant" or _is_complex(operation):
        return False
    values = mlir.ir.DenseElementsAttr(operation.attributes["value"])
    return values.is_splat and str(values.get_splat_value()).split(" : ")[0] == "1.000000e+00"


def _is_complex(operation) -> bool:
    """Says whether the result has complex numbers, whose constants MLIR hands to Python as no array."""
    return isinstance(_shaped(operation.results[0]).element_type, mlir.ir.ComplexType)


def _is_free(operation) -> bool:
    """Whether the result is the operand, in another shape at most."""
    if operation.name in ("stablehlo.reshape", "sdy.sharding_constraint"):
        return True
    return operation.name == "stablehlo.broadcast_in_dim" and _size(operation.results[0]) == _size(operation.operands[0])


def _keeps_rows(operation) -> bool:
    """Says whether the last axis keeps its length; where it does not, XLA's softmax reads the result from memory."""
    before, after = (
        [size for size in _shaped(value).shape if size != 1] for value in (operation.operands[0], operation.results[0])
    )
    return before[-1:] == after[-1:]


def _widens(operation) -> bool:
    return operation.name == "stablehlo.convert" and narrow_dtype(operation.results[0]) is None


def _kind(operation) -> str | None:
    dialect, _, kind = ("" if operation is None else operation.name).partition(".")
    return kind if dialect in ("stablehlo", "chlo") else None


def _operation(value) -> Any:
    """The operation that produces `value`; None for an argument of a function or of a block."""
    return None if isinstance(value.owner, mlir.ir.Block) else value.owner.operation


def _shaped(value):
    return mlir.ir.RankedTensorType(value.type)


def _element(value):
    return _shaped(value).element_type


def _size(value) -> int:
    return math.prod(_shaped(value).shape)
