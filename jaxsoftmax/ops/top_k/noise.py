"""Gumbel noise of samples, by a counter: the noise of a column of a row depends on a key, the row and the column alone.

It is the same with every implementation, order of computation and number of devices, and nothing is stored. All arithmetic has
32 bits, except a product. A Pallas kernel passes a product of its own: `multiply(a, b)` of a uint32 array and a number below
2^32 gives the high and the low 32 bits.

The noise of a column follows from a word of 32 random bits. The upper half alone bounds the noise, which is enough for almost
all columns of a row. One evaluation of Philox gives the upper halves of eight columns that are `STRIDE` apart, so that
neighbouring columns belong to neighbouring threads, whatever the row's alignment. Another evaluation gives the lower halves.
The counter is (block, row, key), where column c is in block (c // (8 * STRIDE)) * STRIDE + c % STRIDE. Philox's own key is
constant: what its first rounds make of the row and the key is computed once for a row.

Source: Salmon, Moraes, Dror and Shaw 2011, "Parallel random numbers: as easy as 1, 2, 3". 7 rounds of their Philox4x32 are the
fewest that pass all tests of BigCrush; 10, which most libraries take, leave a margin that samples do not need, and made
sampling take a seventh longer.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

STRIDE = 512  # columns between two that share an evaluation
WORDS = 4  # of an evaluation
HALVES = 2 * WORDS
LOWER = 2**31  # is added to a block for the lower halves

_MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
_WEYL = 0x9E3779B9, 0xBB67AE85  # the golden ratio and sqrt(3) - 1, which the key grows by
_ROUNDS = 7
_MASK = 2**32 - 1

# uint32 words, arrays or numbers, and a function that multiplies two.
Words = tuple[Any, ...]
Multiply = Callable[[jax.Array, int], tuple[jax.Array, jax.Array]]


def multiply(a: jax.Array, b: int) -> tuple[jax.Array, jax.Array]:
    """Returns the high and the low 32 bits of a product, which has 64 bits even if JAX computes in 32."""
    with jax.enable_x64(True):
        product = a.astype(jnp.uint64) * np.uint64(b)
        return (product >> np.uint64(32)).astype(jnp.uint32), product.astype(jnp.uint32)


def philox(counter: Words, key: Words, multiply: Multiply = multiply) -> Words:
    """Returns four random words for a counter of four words and a key of two, each an array of uint32 or an int."""
    words, key = tuple(map(_word, counter)), tuple(map(_word, key))
    for step in range(_ROUNDS):
        if step:
            key = tuple([_sum(word, increment) for word, increment in zip(key, _WEYL, strict=True)])
        (high0, low0), (high2, low2) = (
            _product(word, factor, multiply) for word, factor in zip(words[::2], _MULTIPLIERS, strict=True)
        )
        words = high2 ^ words[1] ^ key[0], low2, high0 ^ words[3] ^ key[1], low0
    return words


def _word(word):
    return np.uint32(word) if isinstance(word, int) else word


def _sum(word, increment):
    if isinstance(word, np.uint32):  # NumPy would warn that the sum overflows
        return np.uint32((int(word) + increment) & _MASK)
    return word + np.uint32(increment)


def _product(word, factor, multiply):
    if isinstance(word, np.uint32):
        product = int(word) * factor
        return np.uint32(product >> 32), np.uint32(product & _MASK)
    return multiply(word, factor)


def gumbel(bits: jax.Array) -> jax.Array:
    """Computes Gumbel noise in float32 of random words: `-log(-log(1 - v))` with `v = (bits + 0.5) / 2^32`.

    v is near 0 where the noise is large and decides. There float32 has all 32 bits of a word, so that the noise reaches 22.9 in
    steps as fine as elsewhere. (Uniform numbers that are equally spaced, 2^-23 apart, end at 16.) It is finite.
    """
    v = (bits.astype(jnp.float32) + np.float32(0.5)) * np.float32(2**-32)
    series = v * (1 + v * (np.float32(1 / 2) + v * np.float32(1 / 3)))
    # v may be rounded to 1, and where it is small 1 - v has lost what it is.
    exponential = jnp.where(v < np.float32(2**-8), series, -jnp.log(jnp.maximum(1 - v, np.float32(2**-25))))
    return -jnp.log(exponential)


def words_of(block: Any, row: Any, key0: Any, key1: Any, multiply: Multiply = multiply) -> Words:
    """Returns the words whose halves are the upper ones of the columns of a block, or the lower ones for `block + LOWER`."""
    return philox((block, row, key0, key1), (0, 0), multiply)


def half(words: Words, index: int) -> jax.Array:
    """Returns one of the `HALVES` of words, as the upper half of a word."""
    return half_of(words[index % WORDS], index)


def half_of(word: jax.Array, index: int) -> jax.Array:
    """Returns the half of this number from the word that has it, as the upper half of a word."""
    return word << np.uint32(16) if index < WORDS else word & np.uint32(0xFFFF0000)


def _halves(block, row, key0, key1):
    """Returns a word of random bits for each of the columns of blocks, in their order."""
    upper, lower = in_memory(tuple([words_of(block + np.uint32(more), row, key0, key1) for more in (0, LOWER)]))
    return [half(upper, index) | half(lower, index) >> np.uint32(16) for index in range(HALVES)]


def gumbel_at(key0: jax.Array, key1: jax.Array, row: jax.Array, columns: jax.Array) -> jax.Array:
    """Computes the noise of some columns, by two evaluations for each. Arguments are integers that broadcast."""
    columns = columns.astype(jnp.uint32)
    block = columns // np.uint32(HALVES * STRIDE) * np.uint32(STRIDE) + columns % np.uint32(STRIDE)
    chosen = columns // np.uint32(STRIDE) % np.uint32(HALVES)
    bits, *others = _halves(block, row, key0, key1)
    for index, other in enumerate(others, 1):
        bits = jnp.where(chosen == np.uint32(index), other, bits)
    return gumbel(bits)


def gumbel_rows(key0: jax.Array, key1: jax.Array, row: jax.Array, size: int) -> jax.Array:
    """Computes the noise of all columns, `[*batch, size]`, for arguments that broadcast to `[*batch, 1]`."""
    if not isinstance(size, int):  # symbolic
        column = lax.broadcasted_iota(jnp.uint32, (*(1,) * (row.ndim - 1), size), row.ndim - 1)
        return gumbel_at(key0, key1, row, column)
    groups, width = -(-size // (HALVES * STRIDE)), min(size, STRIDE)
    index = lax.broadcasted_iota(jnp.uint32, (*(1,) * (row.ndim - 1), groups, width), row.ndim - 1)
    block = index * np.uint32(STRIDE) + lax.broadcasted_iota(jnp.uint32, index.shape, row.ndim)
    key0, key1, row = (array[..., None] for array in (key0, key1, row))
    halves = _halves(block, row, key0, key1)[: -(-size // STRIDE)]  # a group with few columns has only the first ones
    bits = jnp.stack(halves, -2)
    return gumbel(in_memory(bits.reshape(*bits.shape[:-3], -1)[..., :size]))


def in_memory(arrays: Any) -> Any:
    """Makes XLA write arrays to memory on a CPU, before it computes with them.

    It would fuse Philox with what reads its words, and evaluate it again for each of the eight columns that share a word. The
    noise of 64 x 50257 then takes 156 ms on two cores, and 8.5 ms if words and then bits are written (`jax.random.gumbel` 17
    ms).
    """
    return lax.platform_dependent(arrays, cpu=lax.optimization_barrier, default=lambda arrays: arrays)
