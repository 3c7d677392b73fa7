"""The zigzag order of a sequence, in which devices that share it have equal work under a causal mask."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments


def zigzag(x: ArrayLike, n: int, axis: int = 0) -> jax.Array:
    """A sequence in the order in which `n` devices have equal work in causal attention.

    Under a causal mask late queries see more keys than early ones. So a sequence is cut into `2 n` blocks, of which device `i`
    gets `i` and `2 n - 1 - i`. Tokens, targets, positions and segments take the order before they are cut over devices, and
    `dot_product_attention` is told so by its argument of this name; layers that look at single tokens need not know.

    Args:
      x: an array of any dtype, whose size along `axis` is a multiple of `2 n`.
      n: over how many devices the sequence is to be cut.
      axis: that of the sequence.

    Returns:
      An array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is no array, `n` or `axis` no integer.
      ValueError: `n` is less than 1, `x` has no such axis, or its size is no multiple of `2 n`.

    Example:
      >>> import jax.numpy as jnp
      >>> zigzag(jnp.arange(8), 2)
      Array([0, 1, 6, 7, 2, 3, 4, 5], dtype=int32)
    """
    x, n, axis = _checked("zigzag", x, n, axis)
    return reordered(x, n, axis)


def unzigzag(x: ArrayLike, n: int, axis: int = 0) -> jax.Array:
    """The inverse of `zigzag`, with the same arguments: a sequence in its own order, of one that is ordered for `n` devices."""
    x, n, axis = _checked("unzigzag", x, n, axis)
    return ordered(x, n, axis)


def reordered(x: Any, n: int, axis: int) -> Any:
    """`zigzag` of an array as it is."""
    early, late = jnp.split(x.reshape(*x.shape[:axis], 2 * n, -1, *x.shape[axis + 1 :]), 2, axis)
    return jnp.stack([early, jnp.flip(late, axis)], axis + 1).reshape(x.shape)


def ordered(x: Any, n: int, axis: int) -> Any:
    """`unzigzag` of an array as it is."""
    early, late = jnp.split(x.reshape(*x.shape[:axis], n, 2, -1, *x.shape[axis + 1 :]), 2, axis + 1)
    return jnp.concatenate([early, jnp.flip(late, axis)], axis).reshape(x.shape)


def granules(devices: int, n: int | None) -> int:
    """Into how many equal parts a sequence is cut so that no part is on two devices or in two blocks."""
    return devices if n is None else math.lcm(devices, 2 * n)


def start_of(granule: Any, count: int, n: int | None, where: Any) -> Any:
    """The number, in the sequence's own order, of one of `count` such parts: an integer or an array of them."""
    if n is None:
        return granule
    of_block = count // (2 * n)
    block, within = granule // of_block, granule % of_block
    return where(block % 2 == 0, block // 2, 2 * n - 1 - block // 2) * of_block + within


def position_of(place: Any, length: int, n: int) -> Any:
    """The position of what is at a place of a sequence of this length that is in zigzag order."""
    return start_of(place, length, n, jnp.where)


def check(function: str, name: str, n: Any) -> int:
    """`n` as an integer above 0; raises in the name of a public function and its argument otherwise."""
    if (number := arguments.integer(function, name, n, "an int")) < 1:
        raise ValueError(f"{function}: {name} must be at least 1, got {number}")
    return number


def _checked(function, x, n, axis):
    x, n, axis = arguments.array(function, "x", x), check(function, "n", n), arguments.integer(function, "axis", axis, "an int")
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(f"{function}: axis must be one of the {x.ndim} of x, got {arguments.shown(axis)}")
    if x.shape[axis] % (2 * n):
        raise ValueError(f"{function}: x must have a multiple of 2 n = {2 * n} along axis {axis}, got shape {x.shape}")
    return x, n, axis % x.ndim
