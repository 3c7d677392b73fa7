"""The dtype of the arithmetic inside an op."""

import functools

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


@functools.cache
def accumulator(*dtypes: DTypeLike) -> np.dtype:
    """Returns float32, or the widest float64 or complex dtype among `dtypes`.

    The result does not depend on `jax_numpy_dtype_promotion`, as the one of `jnp.promote_types` does.
    """
    kinds = [jnp.dtype(dtype) for dtype in dtypes]
    wide = any(kind in (np.dtype(np.float64), np.dtype(np.complex128)) for kind in kinds)
    if any(kind.kind == "c" for kind in kinds):
        return np.dtype(np.complex128 if wide else np.complex64)
    return np.dtype(np.float64 if wide else np.float32)
