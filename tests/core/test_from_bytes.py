"""The PTX that converts bytes, run by NumPy: it gives every number of 8 bits as it is, or times a scale and rounded."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax._gpu import wgmma

WORDS = np.arange(256, dtype=np.uint32) * 0x01010101 + np.uint32(0x00030201)  # each byte in each place, beside others


def as_numbers(words, dtype):
    """Two numbers of 16 bits in each word, the first one in the low half."""
    return np.ascontiguousarray(words).view(np.uint16).view(jnp.dtype(dtype)).reshape(-1, 2)


def as_words(numbers, dtype):
    return np.ascontiguousarray(numbers.astype(jnp.dtype(dtype))).view(np.uint32).ravel()


def picked(low, high, selector):
    """`prmt`: four of the eight bytes of two words."""
    every = [low >> 8 * i & 0xFF for i in range(4)] + [high >> 8 * i & 0xFF for i in range(4)]
    return sum(every[selector >> 4 * i & 0xF].astype(np.uint32) << np.uint32(8 * i) for i in range(4))


def run(code, word, scale):
    """What `$0` holds in the end, of words in `$1` and the bits of a scale in `$2`."""
    held = {"$1": word, "$2": np.broadcast_to(np.float32(scale).view(np.uint32), word.shape)}

    def value(name):
        if name in held:
            return held[name]
        number = int(name[2:], 16) if name.startswith("0f") else int(name, 0)
        return np.broadcast_to(np.uint32(number), word.shape)

    def as_float(name):
        return np.ascontiguousarray(value(name)).view(np.float32)

    kinds = {"f16x2": "float16", "bf16x2": "bfloat16"}
    for statement in filter(None, map(str.strip, code.strip(" {}").split(";"))):
        if statement.startswith(".reg"):
            continue
        op, rest = statement.split(maxsplit=1)
        match = re.fullmatch(r"\{(\w+), (\w+)\}, (\S+)", rest)
        into, *args = [match[1], match[2], match[3]] if match else [part.strip() for part in rest.split(",")]
        if match:
            whole = value(args[1])
            held[into], held[args[0]] = whole & 0xFFFF, whole >> 16
        elif op == "mov.b32":
            held[into] = value(args[0])
        elif op in ("xor.b32", "and.b32"):
            held[into] = (np.bitwise_xor if op.startswith("xor") else np.bitwise_and)(*map(value, args))
        elif op == "prmt.b32":
            held[into] = picked(value(args[0]), value(args[1]), int(args[2], 0))
        elif op in ("sub.f32", "mul.f32"):
            left, right = map(as_float, args)
            held[into] = (left - right if op.startswith("sub") else left * right).view(np.uint32)
        elif op.startswith("sub."):
            dtype = kinds[op.removeprefix("sub.")]
            left, right = (as_numbers(value(arg), dtype).astype(np.float32) for arg in args)
            held[into] = as_words(left - right, dtype)
        elif op == "cvt.rn.f16x2.e4m3x2":
            pair = np.stack([value(args[0]) & 0xFF, value(args[0]) >> 8], 1).astype(np.uint8)
            held[into] = as_words(pair.view(jnp.float8_e4m3fn).astype(np.float32), "float16")
        elif op == "cvt.f32.f16":
            held[into] = value(args[0]).astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
        elif op in ("cvt.rn.f16x2.f32", "cvt.rn.bf16x2.f32"):  # the first source is the high half
            held[into] = as_words(np.stack([as_float(args[1]), as_float(args[0])], 1), kinds[op.split(".")[2]])
        else:
            raise AssertionError(f"no such operation here: {statement}")
    return held["$0"]


@pytest.mark.parametrize("scale", [None, 0.013])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", ["int8", "float8_e4m3fn"])
def test_every_byte_is_converted(kind, dtype, scale):
    numbers = WORDS.view(np.uint8).view(jnp.dtype(kind)).reshape(-1, 4).astype(np.float32)
    expected = (numbers * np.float32(1 if scale is None else scale)).astype(jnp.dtype(dtype)).astype(np.float32)
    assert np.isnan(numbers).any() == (kind == "float8_e4m3fn")
    code = wgmma._widen(dtype, is_float=kind != "int8", is_scaled=scale is not None)
    for half, own in enumerate(code):
        found = as_numbers(run(own, WORDS, 1 if scale is None else scale), dtype).astype(np.float32)
        np.testing.assert_array_equal(found, expected[:, 2 * half : 2 * half + 2])
    if scale is None:  # nothing is lost
        np.testing.assert_array_equal(expected, numbers)
