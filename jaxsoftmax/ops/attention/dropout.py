"""The attention weights that dropout keeps: a hash of a weight's position decides, so that no mask is stored.

The random bits of a weight depend only on the two seeds of its head and on the positions of its query and key. They are the
same for every implementation, order and block size, forward and backward. The seeds are an operand, drawn from the key before
anything is cut into shards or tiles, so that a cut changes no weight. The arithmetic is that of 32-bit integers, which also
runs in a Pallas kernel. The part of the hash that depends on the query alone is computed once for a row.

Source: the multipliers of C. Wellons' `lowbias32` (2018), which a search for the least bias of a 32-bit mixer gave.
"""

import jax
import jax.numpy as jnp
import numpy as np

# Odd numbers, so that multiplication permutes 32 bits: the golden ratio, and two numbers with other bits.
_ROW, _SECOND_ROW, _COL = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)
_FIRST, _SECOND = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
MULTIPLIERS = tuple(map(int, (_ROW, _SECOND_ROW, _COL, _FIRST, _SECOND)))  # for kernels that take them as constants


def keep(seed0: jax.Array, seed1: jax.Array, row: jax.Array, col: jax.Array, rate: float) -> jax.Array:
    """Decides whether dropout keeps each weight: False with probability `rate`.

    Args:
      seed0: uint32, one of the two seeds of the head; all four arrays broadcast together.
      seed1: uint32, the other.
      row: uint32, position of the query.
      col: uint32, position of the key.
      rate: concrete number in [0, 1).

    Returns:
      Boolean array in the shape to which the four arrays broadcast; True for a weight that is kept.
    """
    none = jnp.zeros_like(row)
    first = _mix(_mix(seed0 ^ (row * _ROW), none) ^ seed1, none)
    second = _mix(_mix(seed1 ^ (row * _SECOND_ROW), none) ^ seed0, none)
    # The second hash of the row enters half way. It separates two rows whose first hashes differ in the same bits as two
    # columns.
    return _mix(first ^ (col * _COL), second) >= np.uint32(dropped(rate))


def dropped(rate: float) -> int:
    """Returns the number of the 2^32 random words that drop a weight."""
    return min(round(rate * 2**32), 2**32 - 1)


def _mix(bits, between):
    """Permutes 32 bits so that each bit of the input changes each bit of the output half of the time.

    `between` is added before the last multiplication, which alone does not mix it well.
    """
    bits = (bits ^ (bits >> np.uint32(16))) * _FIRST
    bits = ((bits ^ (bits >> np.uint32(15))) + between) * _SECOND
    return bits ^ (bits >> np.uint32(16))
