"""Zigzag order of a sequence: devices that share the sequence have equal work under a causal mask."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments


def zigzag(x: ArrayLike, n: int, axis: int = 0) -> jax.Array:
    """Reorders a sequence so that `n` devices have equal work in causal attention.

    Under a causal mask late queries see more keys than early ones. The sequence is therefore cut into `2 * n` blocks, and
    device `i` gets the blocks `i` and `2 * n - 1 - i`, an early and a late one.

    Apply the order to tokens, targets, positions and segment ids before they are sharded. Tell attention about it with
    `dot_product_attention(..., parallel=jaxsoftmax.ContextParallel(zigzag=n))`. Layers that treat each token separately
    need no change. `unzigzag` restores the original order.

    Args:
      x: array of any dtype. Its size along `axis` is a multiple of `2 * n`.
      n: number of devices that share the sequence.
      axis: axis of the sequence; 0 by default.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not an array of numbers, or `n` or `axis` is not an integer.
      ValueError: `n` is less than 1, `x` has no such axis, or its size along `axis` is not a multiple of `2 * n`.

    Examples:
      Eight tokens for two devices. The first device gets the first four results:

      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> print(jaxsoftmax.zigzag(jnp.arange(8), 2))
      [0 1 6 7 2 3 4 5]
      >>> batch = jnp.arange(32).reshape(2, 16)
      >>> print(jaxsoftmax.zigzag(batch, 4, axis=1)[0])
      [ 0  1 14 15  2  3 12 13  4  5 10 11  6  7  8  9]
    """
    x, n, axis = _checked("zigzag", x, n, axis)
    return to_zigzag(x, n, axis)


def unzigzag(x: ArrayLike, n: int, axis: int = 0) -> jax.Array:
    """Restores the original order of a sequence that `zigzag` reordered for `n` devices.

    `unzigzag(zigzag(x, n, axis), n, axis)` equals `x`.

    Args:
      x: array of any dtype in zigzag order. Its size along `axis` is a multiple of `2 * n`.
      n: number of devices that share the sequence, as passed to `zigzag`.
      axis: axis of the sequence; 0 by default.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      TypeError: `x` is not an array of numbers, or `n` or `axis` is not an integer.
      ValueError: `n` is less than 1, `x` has no such axis, or its size along `axis` is not a multiple of `2 * n`.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> print(jaxsoftmax.unzigzag(jnp.array([0, 1, 6, 7, 2, 3, 4, 5]), 2))
      [0 1 2 3 4 5 6 7]
      >>> tokens = jnp.arange(24).reshape(2, 12)
      >>> bool(jnp.all(jaxsoftmax.unzigzag(jaxsoftmax.zigzag(tokens, 3, axis=1), 3, axis=1) == tokens))
      True
    """
    x, n, axis = _checked("unzigzag", x, n, axis)
    return from_zigzag(x, n, axis)


def to_zigzag(x: Any, n: int, axis: int) -> Any:
    """Reorders an array as `zigzag` does, without checks."""
    early, late = jnp.split(x.reshape(*x.shape[:axis], 2 * n, -1, *x.shape[axis + 1 :]), 2, axis)
    return jnp.stack([early, jnp.flip(late, axis)], axis + 1).reshape(x.shape)


def from_zigzag(x: Any, n: int, axis: int) -> Any:
    """Restores the order of an array as `unzigzag` does, without checks."""
    early, late = jnp.split(x.reshape(*x.shape[:axis], n, 2, -1, *x.shape[axis + 1 :]), 2, axis + 1)
    return jnp.concatenate([early, jnp.flip(late, axis)], axis).reshape(x.shape)


def n_granules(devices: int, n: int | None) -> int:
    """Counts the fewest equal parts of a sequence such that no part is on two devices, or in two blocks of the zigzag order."""
    return devices if n is None else math.lcm(devices, 2 * n)


def start_of(granule: Any, count: int, n: int | None, where: Any) -> Any:
    """Computes which granule of the usual order stands at a granule of the zigzag order.

    Args:
      granule: number of the granule, an integer or an array of them.
      count: number of granules of the sequence.
      n: the `n` of `zigzag`, or None for the usual order.
      where: `where` of the library that `granule` is an array of.
    """
    if n is None:
        return granule
    of_block = count // (2 * n)
    block, within = granule // of_block, granule % of_block
    return where(block % 2 == 0, block // 2, 2 * n - 1 - block // 2) * of_block + within


def position_of(place: Any, length: int, n: int) -> Any:
    """Computes the position, in the usual order, of the token at a place of a sequence of this length in zigzag order."""
    return start_of(place, length, n, jnp.where)


def check(function: str, name: str, n: Any) -> int:
    """Returns `n` as an integer above 0; raises in the name of a public function and its argument otherwise."""
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
