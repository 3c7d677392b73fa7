"""Packing of arrays into one array of each dtype, which one collective sends.

XLA's scheduler lets one collective at a time run beside kernels, and would wait for a second one. Up to a number of bytes XLA
combines several arrays into one collective. Larger ones are packed before they are sent: that is a copy of 64 us, where the
collective takes 540 us (keys and values of 134 MB). Slices of the packed array that arrives are no copies in the forward pass.
Segments have a dtype of their own, and are small.
"""

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from jaxsoftmax._core import compat

_COMBINED_BYTES = 30 << 20  # bytes that XLA sends by one collective, unless XLA_FLAGS has another number


def are_sent_together(arrays: dict[str, jax.Array]) -> bool:
    """Tells whether XLA sends these arrays by one collective. It is unknown, so False, if their sizes are symbolic."""
    most = compat.xla_flags().get("xla_gpu_collective_permute_combine_threshold_bytes", _COMBINED_BYTES)
    size = sum(x.nbytes for x in arrays.values())
    return isinstance(size, int) and size <= int(most)


def packed(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Packs arrays by name into flat arrays by the name of their dtype.

    It returns the arrays as they are if automatic mesh axes may shard them too: flat arrays have no axes that such a sharding
    fits, and XLA would gather them.
    """
    mesh = jax.typeof(next(iter(arrays.values()))).sharding.mesh
    if any(kind == AxisType.Auto and mesh.shape[axis] > 1 for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)):
        return arrays
    flat = {}
    for name in sorted(arrays):
        flat.setdefault(arrays[name].dtype.name, []).append(arrays[name].ravel())
    return {dtype: jnp.concatenate(parts) for dtype, parts in flat.items()}


def unpacked(arrays: dict[str, jax.Array], like: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Undoes `packed`: returns arrays with the names and shapes of `like`. Arrays that are not packed stay as they are."""
    if arrays.keys() == like.keys():
        return arrays
    result, starts = {}, dict.fromkeys(arrays, 0)
    for name in sorted(like):
        dtype, shape, size = like[name].dtype.name, like[name].shape, like[name].size
        result[name] = arrays[dtype][starts[dtype] :][:size].reshape(shape)
        starts[dtype] += size
    return result
