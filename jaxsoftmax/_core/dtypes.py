"""Which dtype the library computes in."""

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike


def accumulator(*dtypes: DTypeLike) -> np.dtype:
    """The dtype of the arithmetic inside an op: float32, or the widest float64 or complex dtype among the given ones.

    Unlike `jnp.promote_types`, it does not depend on `jax_numpy_dtype_promotion`.
    """
    found = [jnp.dtype(d) for d in dtypes]
    wide = any(d in (np.dtype(np.float64), np.dtype(np.complex128)) for d in found)
    if any(d.kind == "c" for d in found):
        return np.dtype(np.complex128 if wide else np.complex64)
    return np.dtype(np.float64 if wide else np.float32)
