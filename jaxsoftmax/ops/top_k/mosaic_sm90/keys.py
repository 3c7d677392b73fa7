"""Keys of values, in PTX: unsigned numbers of 32 bits that are ordered as `lax.top_k` orders the values.

Floats are ordered by sign and size, all bit patterns of them, with -0 before 0: NaN of sign 1 comes first and NaN of sign 0
last. The bits of a 16-bit float are the upper half of a word, and so is its key, until it is shifted down.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np


def kernel_dtype(dtype: Any) -> np.dtype:
    """Returns the dtype in which kernels load elements: int32 for narrower integers."""
    dtype = jnp.dtype(dtype)
    return np.dtype(np.int32) if jnp.issubdtype(dtype, jnp.integer) and dtype.itemsize < 4 else dtype


# PTX that turns the bits of a value in the register `key` into its key, with the help of `word`.
KEY = {
    "float32": " shr.s32 word, key, 31; or.b32 word, word, 0x80000000; xor.b32 key, key, word;",
    "int32": " xor.b32 key, key, 0x80000000;",
    "uint32": "",
}


def _float_of_key(bits: str, key: str) -> str:
    """Returns PTX that computes in the register `bits` the bits of the float32 with this key."""
    return f" shr.s32 word, {key}, 31; not.b32 word, word; or.b32 word, word, 0x80000000; xor.b32 {bits}, {key}, word;"


# PTX that turns the key in the register `key` back into the bits of its value.
VALUE = {"float32": _float_of_key("key", "key"), "int32": " xor.b32 key, key, 0x80000000;", "uint32": ""}

# $0: the bits of the float32 with the key $1.
BITS_OF_KEY = "{ .reg .b32 word;" + _float_of_key("$0", "$1") + " }"


@dataclass(frozen=True)
class EntryFormat:
    """Layout of an entry, a number of 64 bits: the key of a value above, and below how far its column is from `last`.

    So entries differ, and of equal values the entry of the lower column is larger. 0 is no entry.
    """

    cols: int  # of a row

    @functools.cached_property
    def bits(self) -> int:
        """Number of low bits that hold the column, with room for bounds below the lowest entry of a key."""
        return self.cols.bit_length()

    @functools.cached_property
    def last(self) -> int:
        """Highest number of a column that the low bits can hold."""
        return 2**self.bits - 1
