"""Attention's operands as types, by feature, and functions that lower them for CUDA."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

from .. import kernels

attend = jaxsoftmax.dot_product_attention
forced = functools.partial(attend, implementation="mosaic")

NAME = "attention_forward_mosaic"
brute_force = settings(max_examples=60, deadline=None, derandomize=True)
compiled = settings(max_examples=10, deadline=None, derandomize=True)  # anew for each example


def shaped(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


def operands(batch=(2,), length=300, keys=300, heads=4, key_heads=2, size=64, value_size=None, dtype="bfloat16"):
    return {
        "query": shaped(*batch, length, heads, size, dtype=dtype),
        "key": shaped(*batch, keys, key_heads, size, dtype=dtype),
        "value": shaped(*batch, keys, key_heads, value_size or size, dtype=dtype),
    }


def lower(given, names=(NAME,), **options):
    return kernels.lowered_for_cuda(lambda given: forced(**given, **options, return_residual=True), given, kernels=list(names))


B, N = 2, 4
FEATURES = {
    "causal": ({}, {"is_causal": True}),
    "window": ({}, {"local_window_size": (100, 30)}),
    "window before": ({}, {"local_window_size": (200, None)}),
    "window after": ({}, {"local_window_size": (None, 0)}),
    "lengths": (
        {
            "query_seq_lengths": lambda t, s: shaped(B, dtype="int32"),
            "key_value_seq_lengths": lambda t, s: shaped(B, dtype="int32"),
        },
        {},
    ),
    "segments": (
        {
            "query_segment_ids": lambda t, s: shaped(B, t, dtype="int32"),
            "key_value_segment_ids": lambda t, s: shaped(B, s, dtype="int32"),
        },
        {},
    ),
    "soft cap": ({}, {"logits_soft_cap": 30.0}),
    "sinks": ({"sinks": lambda t, s: shaped(N, dtype="float32")}, {}),
    "mask": ({"mask": lambda t, s: shaped(B, N, t, s, dtype=bool)}, {}),
    "mask of keys": ({"mask": lambda t, s: shaped(B, 1, 1, s, dtype=bool)}, {}),
    "mask of queries": ({"mask": lambda t, s: shaped(1, N, t, 1, dtype=bool)}, {}),
    "mask of one": ({"mask": lambda t, s: shaped(dtype=bool)}, {}),
    "bias": ({"bias": lambda t, s: shaped(1, N, t, s, dtype="float32")}, {}),
    "bias of 16 bits": ({"bias": lambda t, s: shaped(B, 1, t, s)}, {}),
    "bias of heads": ({"bias": lambda t, s: shaped(N, 1, 1, dtype="float16")}, {}),
    "dropout": ({"dropout_rng": lambda t, s: shaped(2, dtype="uint32")}, {"dropout_rate": 0.2}),
}
EVERYTHING = ("window", "lengths", "segments", "soft cap", "sinks", "mask", "bias", "dropout")
# Head sizes of keys and values that have every configuration, and sizes that are padded.
SIZES = [(64, 64), (128, 128), (192, 192), (256, 256), (192, 128), (128, 256), (8, 8), (80, 72), (64, 128), (248, 16)]
SIZES += [(80, 96), (84, 50), (112, 80)]  # in slabs; with numbers that are no multiples of 8
# The same, whose columns come in halves: they have no gradients on kernels.
LARGE_SIZES = [(512, 512), (440, 440), (64, 512), (256, 512), (512, 128)]


LENGTHS = {"exact": (384, 512), "ragged": (300, 301)}


def with_features(names, sizes, lengths, dtype="bfloat16"):
    given, options = operands((B,), *lengths, N, 2, *sizes, dtype=dtype), {}
    for name in names:
        more, own = FEATURES[name]
        given |= {key: make(*lengths) for key, make in more.items()}
        options |= own
    return given, options


def assert_registers_fit(config):
    """Fails unless the registers with which a block starts are enough: a kernel would wait for more for ever."""
    producers, (less, more) = config.producers + config.converters, config.registers
    warpgroups = producers + config.consumers
    start = min(240, 65536 // (128 * warpgroups) // 8 * 8)
    assert producers * less + config.consumers * more <= warpgroups * start, config
    assert less % 8 == more % 8 == 0


CHOICES = pytest.mark.usefixtures("choices")


REFUSALS = {
    "float32, head size 136": (operands(size=136, dtype="float32"), {}, "head size .* from 1 to 128, got 136 in float32"),
    "float32, value size 256": (operands(value_size=256, dtype="float32"), {}, "value size .* to 128, got 256 in float32"),
    "float32, more precise": (operands(dtype="float32"), {"precision": "highest"}, "of bfloat16, and precision asks for more"),
    "head size 513": (operands(size=513), {}, "head size must be from 1 to 512, got 513 in bfloat16"),
    "value size 513": (operands(value_size=513), {}, "value size must be from 1 to 512, got 513 in bfloat16"),
    "no queries": (operands(length=0), {}, r"there must be queries and keys, got shapes \(2, 0, 4, 64\) and \(2, 300, 2, 64\)"),
    "no keys": (operands(keys=0), {}, r"there must be queries and keys, got shapes .* and \(2, 0, 2, 64\)"),
    "no batch": (operands(batch=(0,)), {}, r"there must be queries and keys, got shapes \(0, 300, 4, 64\) and"),
    "too many rows": (
        operands(batch=(2**16,), length=2**14, heads=2),
        {},
        "there must be fewer than 2147418112 rows of scores",
    ),
    "no scale": (operands(), {"scale": 0}, r"scale must be a normal number above 0 in float32, got 0\.0"),
    "negative scale": (operands(), {"scale": -0.5}, r"scale must be a normal number above 0 in float32, got -0\.5"),
    "tiny scale": (operands(), {"scale": 1e-40}, "scale must be a normal number above 0 in float32, got 1e-40"),
    "bias of float8": (
        operands() | {"bias": shaped(300, 300, dtype="float8_e4m3fn")},
        {},
        "bias must be of dtype .*, got float8",
    ),
    "sinks of float8": (operands() | {"sinks": shaped(4, dtype="float8_e4m3fn")}, {}, "sinks must be of dtype .*, got float8"),
    "too many keys": (
        operands(batch=(2**16,), length=1, keys=2**15, heads=2, key_heads=1),
        {},
        r"fewer than 2147418112 rows of scores, and keys, got 131072 and 2147483648",
    ),
}


def sharded(given, mesh, spec):
    return {name: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, spec)) for name, a in given.items()}


SPEC = P("data", None, "model")


lengths = st.integers(1, 700)


def window_sees(length, keys, window, offset=0):
    rows, cols = np.arange(length)[:, None] + offset, np.arange(keys)[None, :]
    left, right = window
    seen = np.ones((length, keys), bool)
    seen &= True if left is None else cols >= rows - left
    return seen & (True if right is None else cols <= rows + right)


def a_mask(data, length, keys):
    """Returns a mask: a rectangle, its part on one side of the diagonal, or a few pairs; it may be the same for all queries."""
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    shape = data.draw(st.sampled_from([(length, keys), (1, keys), (length, 1)]))
    rows, cols = (np.sort(rng.integers(0, size + 1, 2)) for size in shape)
    row, col = np.ogrid[: shape[0], : shape[1]]
    rectangle = (rows[0] <= row) & (row < rows[1]) & (cols[0] <= col) & (col < cols[1])
    return [rectangle, rectangle & (row >= col), rng.random(shape) < 2 / max(shape)][data.draw(st.integers(0, 2))]
