"""Operations of programs on a tile, by the names of their primitives.

An operation takes an evaluation, values, the parameters of the primitive, and the dtype of the result. It is computed in the
smallest kind that its operands have together: see `tile_evaluation`.

Floats have 32 bits in registers, and are rounded to 16 bits after each operation whose result has 16. Sums, products,
quotients, roots and logarithms that do not depend on scores are exact to the last bit, as they may become indices. Others may
be multiply-adds and approximations of a few units in the last place.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import math as math_dialect

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu import fused
from jaxsoftmax.ops.attention.mosaic_sm90.common import LOG2E
from jaxsoftmax.ops.attention.mosaic_sm90.tile_values import (
    BOOL,
    EVERY,
    INDEX,
    NATURAL,
    NUMBER,
    TILE,
    UnsupportedError,
    as_natural,
    contracted,
    is_float,
    known_value,
    ptx_operation,
    register_type,
    typed,
    within,
)


def _bounds_of_sum(a, b):
    return a[0] + b[0], a[1] + b[1]


def _bounds_of_difference(a, b):
    return a[0] - b[1], a[1] - b[0]


def _bounds_of_product(a, b):
    products = [x * y if x and y else 0 for x in a for y in b]
    return min(products), max(products)


def _elementwise(of_floats=None, of_signed=None, of_unsigned=None, of_bools=None, bounds=None, keeps_natural=False):
    """Makes an operation of functions of MLIR, by the dtype of the operands. Without one for signed integers there is none.

    `bounds` returns those of a result from those of the operands. With `keeps_natural` it is not negative if no operand is, and
    `of_unsigned` serves then.
    """

    def operation(evaluation, operands, params, dtype):
        kind = operands[-1].dtype
        are_natural = all(x.is_natural for x in operands)
        if is_float(kind):
            function = of_floats
            if function in _CONTRACTED and any(x.of_score for x in operands):  # others may become indices
                function = functools.partial(function, fastmath=contracted())
        elif kind == BOOL:
            function = of_bools
        else:
            is_unsigned = kind.kind == "u" or (are_natural and keeps_natural)
            function = of_unsigned if is_unsigned and of_unsigned is not None else of_signed
        if function is None:
            raise UnsupportedError(f"an operation of dtype {kind.name}")
        limits = NATURAL if are_natural and keeps_natural else EVERY
        if bounds is not None:
            limits = within(bounds(*(x.bounds for x in operands)), np.dtype(dtype))
        result = evaluation.apply(function, dtype, *operands, bounds=limits)
        return evaluation.rounded(result, dtype) if is_float(dtype) else result

    return operation


_CONTRACTED = (arith.addf, arith.subf, arith.mulf)


def _summed(sign):
    """Makes an addition, or with -1 a subtraction. Lines stay lines."""
    functions = (arith.addf, arith.addi) if sign > 0 else (arith.subf, arith.subi)
    operation = _elementwise(*functions, bounds=_bounds_of_sum if sign > 0 else _bounds_of_difference)

    def add(evaluation, operands, params, dtype):
        lines = [evaluation.line(x) for x in operands]
        if None in lines or not any(x.line for x in operands):
            return operation(evaluation, operands, params, dtype)
        return evaluation.on_line(lines[0].plus(lines[1], sign), operation(evaluation.described(), operands, params, dtype))

    return add


def _multiplied(evaluation, operands, params, dtype):
    """Multiplies. A factor of scores that is known waits for the next one; a line stays a line."""
    for x, y in (operands, operands[::-1]):
        if y.known is None:
            continue
        if x.of_score and dtype == np.float32 and 1e-30 < abs(factor := x.factor * float(y.known)) < 1e30:
            return replace(x, factor=factor, bounds=within(_bounds_of_product(x.bounds, y.bounds), dtype))
        if x.line is not None:
            described = _PRODUCT(evaluation.described(), operands, params, dtype)
            return evaluation.on_line(x.line.times(int(y.known)), described)
    return _PRODUCT(evaluation, operands, params, dtype)


_PRODUCT = _elementwise(arith.mulf, arith.muli, bounds=_bounds_of_product)


def _compared(name, of_floats, of_signed, of_unsigned):
    ordered, signed, unsigned = (
        functools.partial(arith.cmpf, getattr(arith.CmpFPredicate, of_floats)),
        functools.partial(arith.cmpi, getattr(arith.CmpIPredicate, of_signed)),
        functools.partial(arith.cmpi, getattr(arith.CmpIPredicate, of_unsigned)),
    )
    operation = _elementwise(ordered, signed, unsigned, unsigned)

    def compare(evaluation, operands, params, dtype):
        (a_low, a_high), (b_low, b_high) = (x.bounds for x in operands)
        answers = {  # whether it is so for all numbers within bounds, and for none: indexing asks whether an index is below 0
            "ge": (a_low >= b_high, a_high < b_low),
            "gt": (a_low > b_high, a_high <= b_low),
            "le": (a_high <= b_low, a_low > b_high),
            "lt": (a_high < b_low, a_low >= b_high),
        }
        if name in answers and not is_float(operands[0].dtype) and any(answers[name]):
            return known_value(answers[name][0], bool)
        if all(x.line is not None and x.kind != TILE for x in operands) and operands[0].kind != operands[1].kind:
            difference = evaluation.compute("sub", *operands)
            if difference.bounds != EVERY:  # it does not wrap around, and has fewer different elements
                operands = [difference, known_value(0, INDEX)]
        return operation(evaluation, operands, params, dtype)

    return compare


def _of_divisor(of_signed, of_unsigned, by_zero):
    """Makes a division of integers, or its rest. `by_zero` returns the result for the divisor 0, as XLA defines it."""
    operation = _elementwise(None, of_signed, of_unsigned, keeps_natural=True)

    def divide(evaluation, operands, params, dtype):
        a, b = operands
        if is_float(dtype) or not b.bounds[0] <= 0 <= b.bounds[1]:
            return operation(evaluation, operands, params, dtype)
        is_zero = evaluation.compute("eq", b, known_value(0, dtype))
        result = operation(evaluation, [a, evaluation.compute("select_n", is_zero, b, known_value(1, dtype))], params, dtype)
        return evaluation.compute("select_n", is_zero, result, by_zero(a))

    return divide


_QUOTIENT = _of_divisor(arith.divsi, arith.divui, lambda a: known_value(np.array(-1).astype(a.dtype), a.dtype))
_REST = _of_divisor(arith.remsi, arith.remui, lambda a: a)


def _divided(evaluation, operands, params, dtype):
    a, b = operands
    if not is_float(dtype):
        return _QUOTIENT(evaluation, operands, params, dtype)
    is_exact = b.known is not None and np.frexp(np.float32(b.known))[0] == 0.5  # the reciprocal is
    if is_exact and 1e-30 < abs(b.known) < 1e30:
        result = evaluation.compute("mul", a, known_value(1 / np.float32(b.known), np.float32), dtype=np.float32)
    elif not (a.of_score or b.of_score):
        result = evaluation.apply(arith.divf, dtype, a, b)
    elif b.known is not None and 1e-30 < abs(b.known) < 1e30:
        result = evaluation.compute("mul", a, known_value(np.float32(1) / np.float32(b.known), np.float32), dtype=np.float32)
    else:
        result = evaluation.apply(ptx_operation("div.full.f32"), dtype, a, b)
    return evaluation.rounded(result, dtype)


def _selected(evaluation, operands, params, dtype):
    if len(operands) != 3 or operands[0].dtype != BOOL:
        raise UnsupportedError("a selection among several cases")
    test, no, yes = operands
    if test.known is not None:
        return yes if test.known else no
    flags: dict[str, Any] = {"bounds": (min(no.bounds[0], yes.bounds[0]), max(no.bounds[1], yes.bounds[1]))}
    for x, y in ((no, yes), (yes, no)):
        if x.factor > 0 and y.known is not None and (y.known == 0 or np.isinf(y.known)):  # which a factor does not change
            flags |= {"factor": x.factor, "is_moderate": x.is_moderate and y.known <= 0}
            no, yes = replace(no, factor=1.0), replace(yes, factor=1.0)
            break
    return evaluation.apply(lambda p, a, b: arith.select(p, b, a), dtype, test, no, yes, **flags)


def _converted(evaluation, operands, params, dtype):
    (x,), apply = operands, evaluation.apply
    old, new = x.dtype, np.dtype(dtype)
    if old == new:
        return x
    element = functools.partial(register_type, new)
    if new == BOOL:
        return evaluation.compute("ne", x, known_value(0, old))
    if is_float(new):
        if is_float(old):
            narrower = new.itemsize == 2
            return evaluation.rounded(x, new) if narrower else x
        if x.line is not None and x.registers is not None and x.kind != NUMBER and new == np.float32:
            pairs = evaluation.columns // 8
            span = max(map(abs, x.bounds)) + max(abs(offset) for pair in x.line.offsets(x.kind, pairs) for offset in pair)
            if span < 2**24:  # one sum for each number, not an integer sum and a conversion, which take twice as long each
                registers = x.line.float_registers(x.kind, pairs)
                return replace(x, dtype=new, registers=registers, line=None, bounds=within(x.bounds, new))
        convert = arith.sitofp if old.kind == "i" else arith.uitofp
        result = apply(lambda r: convert(typed(r.type, element()), r), new, x, bounds=within(_known_bounds(x), new))
        return evaluation.rounded(result, new)
    if is_float(old):
        convert = arith.fptosi if new.kind == "i" else arith.fptoui
        if new.itemsize < 4:
            info = np.iinfo(new)
            x = evaluation.compute("clamp", known_value(info.min, old), x, known_value(info.max, old))
        return apply(lambda r: convert(typed(r.type, element()), r), new, x)
    if new.itemsize == old.itemsize and old != BOOL:
        known = None if x.known is None else x.known.astype(new)
        return replace(x, dtype=new, line=None, bounds=within(x.bounds, new), known=known)
    convert = arith.trunci if new.itemsize < old.itemsize else arith.extsi if old.kind == "i" else arith.extui
    return apply(lambda r: convert(typed(r.type, element()), r), new, x, bounds=within(_known_bounds(x), new))


def _known_bounds(x):
    """Returns the bounds of an integer or a bool within those of its dtype."""
    return (0, 1) if x.dtype == BOOL else (max(x.bounds[0], np.iinfo(x.dtype).min), min(x.bounds[1], np.iinfo(x.dtype).max))


def _magnitude(evaluation, operands, params, dtype):
    (x,) = operands
    if x.is_natural or x.dtype.kind == "u":
        return x
    result = _elementwise(ptx_operation("abs.f32"), math_dialect.absi)(evaluation, operands, params, dtype)
    low, high = x.bounds
    is_safe = x.is_finite if is_float(dtype) else low > np.iinfo(dtype).min  # the least integer has no opposite
    return replace(result, bounds=(0, max(-low, high))) if is_safe else result


def _negated(evaluation, operands, params, dtype):
    (x,) = operands
    if x.of_score and dtype == np.float32:
        return replace(x, factor=-x.factor, bounds=_bounds_of_difference((0, 0), x.bounds))
    if not is_float(dtype):
        return evaluation.compute("sub", known_value(0, dtype), x)
    return _elementwise(arith.negf)(evaluation, operands, params, dtype)


def _sign(evaluation, operands, params, dtype):
    (x,), zero = operands, known_value(0, operands[0].dtype)
    is_above = evaluation.converted(evaluation.compute("gt", x, zero), dtype)
    if x.is_natural or dtype.kind == "u":
        return as_natural(is_above)
    result = evaluation.compute("sub", is_above, evaluation.converted(evaluation.compute("lt", x, zero), dtype))
    return evaluation.compute("select_n", evaluation.compute("ne", x, x), result, x) if is_float(dtype) else result


def _inverted(evaluation, operands, params, dtype):
    ones = 1 if dtype == BOOL else -1
    return evaluation.apply(lambda x: arith.xori(x, utils.c(ones, x.type)), dtype, *operands)


def _power(evaluation, operands, params, dtype):
    (x,), y = operands, params["y"]
    if y == 0:
        return known_value(1, dtype)
    factor, result, rest = x, None, abs(y)
    while rest:
        if rest & 1:
            result = factor if result is None else evaluation.compute("mul", result, factor)
        rest >>= 1
        factor = evaluation.compute("mul", factor, factor) if rest else factor
    return result if y > 0 else evaluation.compute("div", known_value(1, dtype), result)


def _shifted(function, natural=False):
    """Makes a shift, which gives 0, or the sign, where it is by all bits or more."""

    def shift(evaluation, operands, params, dtype):
        x, by = operands
        bits = 8 * x.dtype.itemsize
        is_arithmetic = function is arith.shrsi
        if by.known is None or not 0 <= by.known < bits:
            most = known_value(bits - 1, by.dtype)
            unsigned = np.dtype(f"u{by.dtype.itemsize}")
            known = None if by.known is None else by.known.astype(unsigned)
            as_unsigned = replace(by, dtype=unsigned, known=known, line=None, bounds=within(by.bounds, unsigned))
            is_far = evaluation.compute("gt", as_unsigned, known_value(bits - 1, unsigned))
            near = evaluation.apply(function, dtype, x, evaluation.compute("select_n", is_far, by, most))
            return near if is_arithmetic else evaluation.compute("select_n", is_far, near, known_value(0, dtype))
        return evaluation.apply(function, dtype, x, by, bounds=NATURAL if natural and x.is_natural else EVERY)

    return shift


def _anded(evaluation, operands, params, dtype):
    a, b = operands
    if dtype == BOOL:
        for x, y in ((a, b), (b, a)):
            if x.known is not None:
                return y if x.known else x
    highs = [x.bounds[1] for x in operands if x.is_natural]
    return evaluation.apply(arith.andi, dtype, a, b, bounds=(0, min(highs)) if highs else EVERY)


def _ored(evaluation, operands, params, dtype):
    a, b = operands
    if dtype == BOOL:
        for x, y in ((a, b), (b, a)):
            if x.known is not None:
                return x if x.known else y
    return evaluation.apply(arith.ori, dtype, a, b, bounds=NATURAL if a.is_natural and b.is_natural else EVERY)


def _extreme(choose, of_floats, of_signed, of_unsigned):
    """Makes the larger of two numbers, with `max` to choose bounds, or the smaller one."""
    operation = _elementwise(ptx_operation(of_floats), of_signed, of_unsigned, keeps_natural=True)

    def extreme(evaluation, operands, params, dtype):
        for x, y in (operands, operands[::-1]) if not is_float(dtype) else ():
            if x.bounds[0] >= y.bounds[1]:  # nothing is to be chosen
                return x if choose is max else y
        result = operation(evaluation, operands, params, dtype)
        if is_float(dtype) and not all(x.is_finite for x in operands):  # NaN is the result of both
            return result
        lows, highs = zip(*(x.bounds for x in operands), strict=True)
        return replace(result, bounds=(choose(lows), choose(highs)))

    return extreme


def _clamped(evaluation, operands, params, dtype):
    low, x, high = operands
    return evaluation.compute("min", evaluation.compute("max", x, low), high)


def _composite(function, exact=None, is_bounded=False):
    """Makes an operation of a function of `jax.numpy` in float32.

    `exact`, of MLIR, takes its place where no score is in it. With `is_bounded` results are at most 1.
    """

    def operation(evaluation, operands, params, dtype):
        if params.get("accuracy") is not None:
            raise UnsupportedError("an accuracy that is asked for")
        operands = [evaluation.converted(x, np.float32) for x in operands]
        if exact is not None and not any(x.of_score for x in operands):
            result = evaluation.apply(exact, np.float32, *operands)
        else:
            result = evaluation.composed(function, *operands)
        result = replace(evaluation.rounded(result, dtype), is_moderate=is_bounded)
        is_finite = is_bounded and all(x.is_moderate or x.is_finite for x in operands)
        return replace(result, bounds=(-1, 1)) if is_finite else result

    return operation


def _unary(function, exact=None):
    """Makes an operation of one float. `exact` takes the place of `function` where no score is in it."""

    def operation(evaluation, operands, params, dtype):
        if params.get("accuracy") is not None:
            raise UnsupportedError("an accuracy that is asked for")
        (x,) = operands
        used = function if exact is None or x.of_score else exact
        return evaluation.rounded(evaluation.apply(used, dtype, x), dtype)

    return operation


def _round(evaluation, operands, params, dtype):
    is_even = params["rounding_method"] == lax.RoundingMethod.TO_NEAREST_EVEN
    return _unary(math_dialect.roundeven if is_even else math_dialect.round)(evaluation, operands, {}, dtype)


def _exp(x):
    return jnp.exp2(x * LOG2E)


def _log(x):
    return lax.log2(x) * np.float32(1 / LOG2E) if hasattr(lax, "log2") else jnp.log(x)


def _log1p(x):
    whole = 1 + x
    ratio = jnp.log(whole) * (x / jnp.where(whole == 1, 1.0, whole - 1))
    return jnp.where((whole == 1) | (x == jnp.inf), x, ratio)


def _expm1(x):
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return jnp.where(jnp.abs(x) < 0.1, series, jnp.exp(x) - 1)


def _logistic(x):
    return fused.reciprocal(1 + jnp.exp2(x * -LOG2E))


def _raised(x, y):
    size = jnp.exp2(y * (jnp.log(jnp.abs(x)) * LOG2E))
    half = y * 0.5
    is_whole, is_odd = jnp.floor(y) == y, jnp.floor(half) != half
    below = jnp.where(is_whole, jnp.where(is_odd, -size, size), jnp.nan)
    return jnp.where((y == 0) | (x == 1), 1.0, jnp.where(x < 0, below, size))


COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")
MOVES = ("reshape", "squeeze", "slice", "dynamic_slice", "gather", "broadcast_in_dim", "concatenate", "expand_dims")
OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": _summed(1),
    "add_any": _summed(1),
    "sub": _summed(-1),
    "mul": _multiplied,
    "div": _divided,
    "rem": _REST,
    "neg": _negated,
    "abs": _magnitude,
    "sign": _sign,
    "max": _extreme(max, "max.NaN.f32", arith.maxsi, arith.maxui),
    "min": _extreme(min, "min.NaN.f32", arith.minsi, arith.minui),
    "clamp": _clamped,
    "eq": _compared("eq", "OEQ", "eq", "eq"),
    "ne": _compared("ne", "UNE", "ne", "ne"),
    "lt": _compared("lt", "OLT", "slt", "ult"),
    "le": _compared("le", "OLE", "sle", "ule"),
    "gt": _compared("gt", "OGT", "sgt", "ugt"),
    "ge": _compared("ge", "OGE", "sge", "uge"),
    "and": _anded,
    "or": _ored,
    "xor": _elementwise(None, arith.xori, arith.xori, arith.xori),
    "not": _inverted,
    "shift_left": _shifted(arith.shli),
    "shift_right_logical": _shifted(arith.shrui, natural=True),
    "shift_right_arithmetic": _shifted(arith.shrsi, natural=True),
    "select_n": _selected,
    "convert_element_type": _converted,
    **dict.fromkeys(("copy", "copy_p", "stop_gradient"), lambda evaluation, operands, params, dtype: operands[0]),
    "integer_pow": _power,
    "square": lambda evaluation, operands, params, dtype: evaluation.compute("mul", *operands, *operands),
    "one_minus_square": _composite(lambda x: (1 + x) * (1 - x)),
    "is_finite": lambda evaluation, operands, params, dtype: evaluation.compute(
        "lt", evaluation.compute("abs", *operands), known_value(np.inf, operands[0].dtype)
    ),
    "floor": _unary(math_dialect.floor),
    "ceil": _unary(math_dialect.ceil),
    "round": _round,
    "exp2": _unary(ptx_operation("ex2.approx.ftz.f32")),
    "exp": _composite(_exp, exact=math_dialect.exp),
    "log2": _unary(ptx_operation("lg2.approx.f32"), exact=math_dialect.log2),
    "log": _composite(_log, exact=math_dialect.log),
    "log1p": _composite(_log1p),
    "expm1": _composite(_expm1),
    "tanh": _composite(fused.tanh, is_bounded=True),
    "logistic": _composite(_logistic, is_bounded=True),
    "pow": _composite(_raised),
    "sqrt": _unary(ptx_operation("sqrt.approx.f32"), exact=math_dialect.sqrt),
    "rsqrt": _unary(ptx_operation("rsqrt.approx.f32")),
    "approximate_reciprocal": _unary(ptx_operation("rcp.approx.ftz.f32")),
}


def _quotient(a, b):
    if is_float(np.asarray(a).dtype):
        return np.divide(a, b)
    quotient = abs(int(a)) // abs(int(b)) * (1 if (a < 0) == (b < 0) else -1) if b != 0 else -1
    return np.int64(quotient)  # which wraps around in fewer bits


FOLDS: dict[str, Callable[..., Any]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": _quotient,
    "rem": lambda a, b: np.fmod(a, b) if b != 0 or is_float(np.asarray(a).dtype) else a,
    "floor": np.floor,
    "neg": np.negative,
    "abs": np.abs,
    "sign": np.sign,
    "max": np.maximum,
    "min": np.minimum,
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "not": lambda x: ~x,
    "select_n": lambda test, no, yes: yes if test else no,
    "convert_element_type": lambda x: x,
}
