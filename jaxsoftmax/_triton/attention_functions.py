"""Score and mask functions in Triton kernels of attention: runs a `TileProgram` on a tile of scores.

The steps of a program are calls of the functions below, made while Triton compiles a kernel, or interprets it. A value is a
number or has one of the shapes `[rows, 1]`, `[1, columns]` and `[rows, columns]`: it is computed once for all scores that it
serves. Floats are float32; a step `rounded` follows where a program has 16 bits. Integers have their own width, and values are
those of JAX where Triton leaves them open, as in a division by 0.

Functions of scores are approximate in the last places, as `exp` of a GPU is. What does not depend on scores may become an
index: its quotients, roots and logarithms are as exact as those of XLA.
"""

from typing import Any

import triton
import triton.language as tl

from jaxsoftmax._triton import functions
from jaxsoftmax._triton.attention_program import TileProgram

LOG2E = functions.LOG2E
_DTYPES = {"bool": tl.int1, "int8": tl.int8, "int16": tl.int16, "int32": tl.int32, "float32": tl.float32}
_DTYPES |= {"uint8": tl.uint8, "uint16": tl.uint16, "uint32": tl.uint32, "float16": tl.float16, "bfloat16": tl.bfloat16}


def _unwrapped(constant: Any) -> Any:
    return getattr(constant, "value", constant)


def run(PROGRAM, LAUNCH, words, b, inputs, _semantic=None, _generator=None) -> tuple[Any, ...]:
    """Returns the results of a program.

    Args:
      PROGRAM: a `TileProgram`, a constant.
      LAUNCH: the `AttentionLaunch`, a constant.
      words: pointer to the words.
      b: number of the batch entry.
      inputs: a tuple of the score, if the program takes it, and the positions.
      _semantic: what Triton's compiler passes to builtin functions. The interpreter passes None.
      _generator: likewise.
    """
    program: TileProgram = _unwrapped(PROGRAM)
    launch = _unwrapped(LAUNCH)
    values = list(inputs)
    for step in program.steps:
        operands, options = [values[i] for i in step.operands], [_DTYPES.get(x, x) for x in step.options]
        if step.name == "load":
            name, dtype = options
            operands = [words, b, *operands]
            options = [dict(launch.starts)[name], dict(launch.dims)[name], dtype]
        elif step.name == "number" and isinstance(options[0], str):
            options[0] = float.fromhex(options[0])
        function = OPERATIONS[step.name]
        if _generator is None:
            values.append(function.fn(*operands, *options))
        else:
            values.append(_generator.call_JitFunction(function, [*operands, *map(tl.constexpr, options)], {}))
    return tuple(values[i] for i in program.results)


setattr(run, tl.core.TRITON_BUILTIN, True)  # Triton then calls it while it compiles, with the last two arguments


@triton.jit
def add_at(words, place, values, seen):
    """Adds values of a tile to float32 words, in any order, where they are `seen`. A place below 0 is none.

    Values that have a place in common are summed first where their shape says so.
    """
    values = tl.where(seen & (place >= 0), values, 0.0)
    if len(place.shape) == 0:
        tl.atomic_add(words + place, tl.sum(values), mask=place >= 0, sem="relaxed")
    elif place.shape[0] == 1:
        tl.atomic_add(words + place, tl.sum(values, 0)[None, :], mask=place >= 0, sem="relaxed")
    elif place.shape[1] == 1:
        tl.atomic_add(words + place, tl.sum(values, 1)[:, None], mask=place >= 0, sem="relaxed")
    else:
        tl.atomic_add(words + place, values, mask=values != 0, sem="relaxed")


# Numbers, and elements of tables.


@triton.jit
def _number(VALUE: tl.constexpr, DTYPE: tl.constexpr):
    return tl.full([], VALUE, DTYPE)


@triton.jit
def load_word(words, b, index, START: tl.constexpr, DIMS: tl.constexpr, DTYPE: tl.constexpr):
    """Loads elements of an operand by their numbers in its part of a batch entry."""
    word = tl.load(words + (START + functions.offset(b, DIMS, 0)) + index)
    if tl.float32 == DTYPE:
        return word.to(tl.float32, bitcast=True)
    elif tl.int1 == DTYPE:
        return word != 0
    else:
        return word.to(DTYPE)


# Arithmetic.


@triton.jit
def _add(x, y):
    return tl.add(x, y, sanitize_overflow=False)


@triton.jit
def _subtract(x, y):
    return tl.sub(x, y, sanitize_overflow=False)


@triton.jit
def _multiply(x, y):
    return tl.mul(x, y, sanitize_overflow=False)


@triton.jit
def _divide(x, y):
    return x / y


@triton.jit
def _divide_exactly(x, y):
    return tl.div_rn(x, y)


@triton.jit
def _quotient(x, y):
    """Divides integers towards 0. The quotient by 0 has all bits set, and that of the least integer by -1 wraps around."""
    result = x // _safe_divisor(y)
    if tl.constexpr(y.dtype.is_int_signed()):
        result = tl.where(y == -1, tl.mul(x, y, sanitize_overflow=False), result)
    return tl.where(y == 0, tl.full([], -1, tl.int32).to(y.dtype), result)


@triton.jit
def _remainder(x, y):
    """Returns the remainder of `_quotient`, with the sign of `x`: `x` for 0."""
    return tl.where(y == 0, x, x % _safe_divisor(y))


@triton.jit
def _safe_divisor(y):
    """Returns a divisor with 1 in place of 0 and of -1, by which a division may be undefined."""
    one = tl.full([], 1, y.dtype)
    if tl.constexpr(y.dtype.is_int_signed()):
        return tl.where((y == 0) | (y == -1), one, y)
    else:
        return tl.where(y == 0, one, y)


@triton.jit
def _absolute(x):
    return tl.abs(x)


@triton.jit
def _maximum(x, y):
    return tl.maximum(x, y, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _minimum(x, y):
    return tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL)


# Comparisons, bits and choices.


@triton.jit
def _equal(x, y):
    return x == y


@triton.jit
def _not_equal(x, y):
    return x != y


@triton.jit
def _less(x, y):
    return x < y


@triton.jit
def _less_equal(x, y):
    return x <= y


@triton.jit
def _bit_and(x, y):
    return x & y


@triton.jit
def _bit_or(x, y):
    return x | y


@triton.jit
def _bit_xor(x, y):
    return x ^ y


@triton.jit
def _shift_left(x, y):
    return x << y


@triton.jit
def _shift_right(x, y):
    """Shifts bits to the right. The sign of a signed integer comes in."""
    return x >> y


@triton.jit
def _select(test, no, yes):
    return tl.where(test, yes, no)


# Types.


@triton.jit
def _converted(x, DTYPE: tl.constexpr):
    return x.to(DTYPE)


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """Rounds float32 to 16 bits, which stay in 32."""
    return x.to(DTYPE).to(tl.float32)


@triton.jit
def _truncated(x, DTYPE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Truncates floats to integers. Larger ones become the largest integer, smaller ones the smallest, and NaN 0."""
    # Bounds are floats: the largest integer and 1 is one, and the least integer.
    inside = (x > LEAST - 1.0) & (x < MOST + 1.0) if MOST < 2**24 else (x >= LEAST * 1.0) & (x < MOST + 1.0)
    result = tl.where(inside, x, 0.0).to(DTYPE)
    result = tl.where(x >= MOST + 1.0, tl.full([], MOST, DTYPE), result)
    return tl.where(x <= LEAST - 1.0, tl.full([], LEAST, DTYPE), result)


# Functions of float32.


@triton.jit
def _floor(x):
    return tl.floor(x)


@triton.jit
def _ceil(x):
    return tl.ceil(x)


@triton.jit
def _round(x, TO_EVEN: tl.constexpr):
    """Rounds to the nearest integer: halves to even ones, or away from 0."""
    size = tl.abs(x)
    whole = tl.floor(size)
    rest = size - whole
    if TO_EVEN:
        is_odd = tl.floor(whole * 0.5) != whole * 0.5
        up = (rest > 0.5) | ((rest == 0.5) & is_odd)
    else:
        up = rest >= 0.5
    whole += tl.where(up, 1.0, 0.0)
    return tl.where(x < 0, -whole, tl.where(size < 8388608.0, whole, x))


@triton.jit
def _exp(x):
    return tl.exp(x)


@triton.jit
def _exp2(x):
    return tl.exp2(x)


@triton.jit
def _log(x):
    return tl.log(x)


@triton.jit
def _log2(x):
    return tl.log2(x)


@triton.jit
def _log1p(x):
    whole = 1 + x
    ratio = tl.log(whole) * (x / tl.where(whole == 1, 1.0, whole - 1))
    return tl.where((whole == 1) | (x == float("inf")), x, ratio)


@triton.jit
def _expm1(x):
    series = x * (1 + x * (1 / 2 + x * (1 / 6 + x * (1 / 24 + x * (1 / 120)))))
    return tl.where(tl.abs(x) < 0.1, series, tl.exp(x) - 1)


@triton.jit
def _logistic(x):
    return 1 / (1 + tl.exp2(x * -LOG2E))


@triton.jit
def _sqrt(x):
    return tl.sqrt_rn(x)


@triton.jit
def _rsqrt(x):
    return tl.rsqrt(x)


@triton.jit
def _power(x, y):
    """Raises floats to a power, a float or an integer."""
    exponent = y.to(tl.float32)
    size = tl.exp2(exponent * tl.log2(tl.abs(x)))
    size = tl.where(tl.abs(x) == 1, 1.0, size)
    if tl.constexpr(y.dtype.is_floating()):
        half = exponent * 0.5
        is_whole, is_odd = tl.floor(exponent) == exponent, tl.floor(half) != half
    else:
        is_whole, is_odd = y == y, (y & 1) != 0
    below = tl.where(is_whole, tl.where(is_odd, -size, size), float("nan"))
    return tl.where((exponent == 0) | (x == 1), 1.0, tl.where(x < 0, below, size))


OPERATIONS = {
    "number": _number,
    "load": load_word,
    "add": _add,
    "subtract": _subtract,
    "multiply": _multiply,
    "divide": _divide,
    "divide_exactly": _divide_exactly,
    "quotient": _quotient,
    "remainder": _remainder,
    "absolute": _absolute,
    "maximum": _maximum,
    "minimum": _minimum,
    "equal": _equal,
    "not_equal": _not_equal,
    "less": _less,
    "less_equal": _less_equal,
    "and": _bit_and,
    "or": _bit_or,
    "xor": _bit_xor,
    "shift_left": _shift_left,
    "shift_right": _shift_right,
    "select": _select,
    "converted": _converted,
    "rounded": _rounded,
    "truncated": _truncated,
    "floor": _floor,
    "ceil": _ceil,
    "round": _round,
    "exp": _exp,
    "exp2": _exp2,
    "log": _log,
    "log2": _log2,
    "log1p": _log1p,
    "expm1": _expm1,
    "tanh": functions.tanh,
    "logistic": _logistic,
    "sqrt": _sqrt,
    "rsqrt": _rsqrt,
    "power": _power,
}
