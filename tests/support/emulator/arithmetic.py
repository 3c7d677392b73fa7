"""Operations of MLIR and PTX on NumPy arrays. Integers are unsigned; a view of them has a sign."""

import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

BFLOAT16 = np.dtype(jnp.bfloat16)
_LEAST = np.float32(2.0**-126)
_NAN = np.uint32(0x7FFFFFFF)


def unsigned(width: int) -> Any:
    """Returns the dtype of integers of this number of bits."""
    return np.dtype(bool) if width == 1 else np.dtype(f"u{width // 8}")


def signed(values: Any) -> Any:
    return values.view(f"i{values.dtype.itemsize}") if values.dtype.kind == "u" else values


@functools.cache
def of_signed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the operation on signed integers, whose result is bits or bools."""

    def run(*values):
        found = function(*map(signed, values))
        return found.view(f"u{found.dtype.itemsize}") if found.dtype.kind == "i" else found

    return run


@functools.cache
def viewed(dtype: Any) -> Callable[..., Any]:
    return lambda values: values.view(dtype)


@functools.cache
def converted(dtype: Any) -> Callable[..., Any]:
    return lambda values: values.astype(dtype)


@functools.cache
def extended(width: int) -> Callable[..., Any]:
    """Converts integers to more or fewer bits, with their sign."""
    return lambda values: (
        (-(values.astype(np.int64))).astype(f"i{width // 8}").view(f"u{width // 8}")
        if values.dtype == bool
        else signed(values).astype(f"i{width // 8}").view(f"u{width // 8}")
    )


@functools.cache
def from_signed(dtype: Any) -> Callable[..., Any]:
    return lambda values: signed(values).astype(dtype)


@functools.cache
def to_signed(dtype: Any) -> Callable[..., Any]:
    return lambda values: values.astype(f"i{dtype.itemsize}").view(dtype)


def same(value: Any) -> Any:
    return value


def same_of_all(*values: Any) -> Any:
    return values


def divide_up(a: Any, b: Any) -> Any:
    return a // b + (a % b != 0).astype(a.dtype)


def divide_signed(a: Any, b: Any) -> Any:
    a, b = signed(a), signed(b)
    found = np.abs(a) // np.abs(b) * np.sign(a) * np.sign(b)
    return found.astype(a.dtype).view(f"u{a.dtype.itemsize}")


def remainder_signed(a: Any, b: Any) -> Any:
    a, b = signed(a), signed(b)
    return np.fmod(a, b).view(f"u{a.dtype.itemsize}")


def shift_left(a: Any, b: Any) -> Any:
    """Shifts bits. The result is 0 if all bits are shifted out."""
    return np.left_shift(a, np.asarray(b).astype(a.dtype))


def shift_right(a: Any, b: Any) -> Any:
    return np.right_shift(a, np.asarray(b).astype(a.dtype))


def shift_right_signed(a: Any, b: Any) -> Any:
    most = 8 * a.dtype.itemsize - 1
    found = np.right_shift(signed(a), np.minimum(b, b.dtype.type(most)).astype(f"i{a.dtype.itemsize}"))
    return found.view(a.dtype)


def maximum(a: Any, b: Any) -> Any:
    """Returns the larger of two floats, with -0 less than 0, or one and the same NaN."""
    return _extreme(np.maximum, np.bitwise_and, a, b)


def minimum(a: Any, b: Any) -> Any:
    return _extreme(np.minimum, np.bitwise_or, a, b)


def _extreme(choose, of_zeros, a, b):
    found = choose(a, b)
    word = f"u{found.dtype.itemsize}"
    words = np.where(a == b, of_zeros(a.view(word), b.view(word)), found.view(word))
    return np.where(found != found, words.dtype.type(0x7FFFFFFF >> (32 - 8 * words.dtype.itemsize)), words).view(found.dtype)


def number_maximum(a: Any, b: Any) -> Any:
    """Returns the larger of two floats, or the one that is not NaN."""
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, maximum(a, b)))


def number_minimum(a: Any, b: Any) -> Any:
    return np.where(np.isnan(a), b, np.where(np.isnan(b), a, minimum(a, b)))


def fma(a: Any, b: Any, c: Any) -> Any:
    """Multiplies and adds in float64, and rounds once."""
    return (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(a.dtype)


def product_towards_zero(a: Any, b: Any) -> Any:
    """Multiplies, and rounds towards zero: a product of finite numbers is finite."""
    product = a.astype(np.float64) * b.astype(np.float64)
    rounded = product.astype(a.dtype)
    return np.where(np.abs(rounded) > np.abs(product), np.nextafter(rounded, a.dtype.type(0)), rounded)


def flushed(values: Any) -> Any:
    return np.where(np.abs(values) < _LEAST, np.copysign(np.float32(0), values), values)


@functools.cache
def approximate(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of float32 in which subnormal operands and results are 0."""
    return lambda values: flushed(function(flushed(values)).astype(np.float32))


def reciprocal(values: Any) -> Any:
    return np.float32(1) / values


def select(condition: Any, yes: Any, no: Any) -> Any:
    return np.where(condition, yes, no)


def is_unordered(a: Any, b: Any) -> Any:
    return np.isnan(a) | np.isnan(b)


def is_ordered(a: Any, b: Any) -> Any:
    return ~is_unordered(a, b)


@functools.cache
def or_unordered(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda a, b: function(a, b) | is_unordered(a, b)


def not_equal_ordered(a: Any, b: Any) -> Any:
    return np.not_equal(a, b) & is_ordered(a, b)


COMPARISONS = {"eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}


def halves(word: Any, dtype: Any) -> tuple[Any, Any]:
    """Returns the lower and the upper half of words of 32 bits."""
    word = np.asarray(word)
    lower, upper = (word & np.uint32(0xFFFF)).astype(np.uint16), (word >> np.uint32(16)).astype(np.uint16)
    return lower.view(dtype), upper.view(dtype)


def whole(lower: Any, upper: Any) -> Any:
    """Joins two halves to words."""
    lower, upper = (np.asarray(half).view(np.uint16).astype(np.uint32) for half in (lower, upper))
    return lower | upper << np.uint32(16)


@functools.cache
def part_of(number: int, width: int) -> Callable[..., Any]:
    """Returns a function that takes the part `number` of numbers, in parts of `width` bits, counted from the lowest."""
    dtype = unsigned(width)
    return lambda values: (values >> values.dtype.type(number * width)).astype(dtype)


@functools.cache
def joined(width: int) -> Callable[..., Any]:
    """Returns a function that joins parts, the lowest first, to numbers of `width` bits."""
    dtype = unsigned(width)

    def run(*parts):
        each = width // len(parts)
        return functools.reduce(np.bitwise_or, (part.astype(dtype) << dtype.type(each * k) for k, part in enumerate(parts)))

    return run


def permuted(a: Any, b: Any, choice: Any) -> Any:
    """Computes `prmt`: selects bytes of two words, or their signs."""
    pool = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    found = np.uint32(0)
    for k in range(4):
        which = choice >> np.uint32(4 * k) & np.uint32(0xF)
        byte = (pool >> ((which & np.uint32(7)).astype(np.uint64) * np.uint64(8)) & np.uint64(0xFF)).astype(np.uint32)
        sign = np.where(byte >> np.uint32(7) != 0, np.uint32(0xFF), np.uint32(0))
        found = found | np.where(which & np.uint32(8), sign, byte).astype(np.uint32) << np.uint32(8 * k)
    return found


def first_bit(values: Any) -> Any:
    """Returns the number of the highest bit that is set, or all ones."""
    _, exponent = np.frexp(values.astype(np.float64))
    return np.where(values == 0, np.uint32(0xFFFFFFFF), (exponent - 1).astype(np.uint32))
