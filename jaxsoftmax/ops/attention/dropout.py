"""Which attention weights dropout keeps: a hash of their place, so that nothing is stored and every tile finds its own.

The random bits of a weight depend on two seeds of its head and on the positions of its query and key alone. They are the same
whichever implementation computes them, in whichever order and blocks, forward and backward. Everything is 32-bit integer
arithmetic that also runs in a Pallas kernel. What depends on the query alone is hashed once for a row.

Source: the multipliers are those of C. Wellons' `lowbias32` (2018), found by search for the least bias of a 32-bit mixer.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Odd, so that multiplication permutes 32 bits: the golden ratio, and two more that are unlike it.
_ROW, _SECOND_ROW, _COL = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)


def keep(seed0: jax.Array, seed1: jax.Array, row: jax.Array, col: jax.Array, rate: float) -> jax.Array:
    """Whether dropout keeps a weight: false with probability `rate`.

    Args:
      seed0: uint32, one of the two seeds of the head; all four arrays broadcast together.
      seed1: uint32, the other.
      row: uint32, position of the query.
      col: uint32, position of the key.
      rate: in [0, 1), static.

    Returns:
      A boolean array of the shape to which all broadcast.
    """
    none = jnp.zeros_like(row)
    first = _mix(_mix(seed0 ^ (row * _ROW), none) ^ seed1, none)
    second = _mix(_mix(seed1 ^ (row * _SECOND_ROW), none) ^ seed0, none)
    # A second hash of the row goes in half way: rows whose first hashes differ by what two columns differ by go apart there.
    return _mix(first ^ (col * _COL), second) >= np.uint32(dropped(rate))


def dropped(rate: float) -> int:
    """How many of 2^32 random words drop a weight."""
    return min(round(rate * 2**32), 2**32 - 1)


def _mix(bits, between):
    """A permutation of 32 bits in which every bit of the input changes every bit of the output half of the time.

    What is `between` is added before the last multiplication: for itself it is not mixed well.
    """
    bits = (bits ^ (bits >> np.uint32(16))) * _FIRST
    bits = ((bits ^ (bits >> np.uint32(15))) + between) * _SECOND
    return bits ^ (bits >> np.uint32(16))
