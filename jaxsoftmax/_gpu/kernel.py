"""Kernels of Mosaic GPU, all built in one way."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import compat


def kernel_of(body: Callable[..., None], **options: Any) -> Callable[..., Any]:
    """Returns `plgpu.kernel` of a body, traced in 32 bits even under `jax_enable_x64`, and lowered to the same text everywhere.

    Otherwise numbers of Python would become float64 and int64: loops would count in two registers, and a number that PTX takes
    in 32 bits would not lower. So the flag does not change what a kernel computes.
    """

    @functools.wraps(body)
    def in_32_bits(*refs, **scratch):
        with jax.enable_x64(False):
            compat.standardize_text()
            return body(*refs, **scratch)

    compat.infer_layouts_sooner()
    return plgpu.kernel(in_32_bits, **options)


def tile_transforms(dtype: Any) -> tuple[Any, ...]:
    """Returns the transforms of an array in shared memory that tensor cores read."""
    return plgpu.TilingTransform((8, 128 // jnp.dtype(dtype).itemsize)), plgpu.SwizzleTransform(128)


def written_in_place(run: Callable[..., Any], array: jax.Array, *others: jax.Array) -> jax.Array:
    """Runs a kernel without results, which writes to its last operand, and returns that.

    In a loop XLA must not fuse the kernel with what it reads: it would forget that one operand is written in place. What XLA
    itself computes from each entry of an array takes memory of its own (JAX 0.11.2).
    """
    before, *read = lax.optimization_barrier((array, *others))
    (written,) = pl.run_state(lambda refs: run(*read, *refs))([before])
    return lax.optimization_barrier(written)


def unwritten(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Returns an array whose memory holds anything, the result of a kernel that writes nothing."""
    return kernel_of(lambda array: None, out_type=jax.ShapeDtypeStruct(shape, dtype), kernel_name="unwritten_mosaic")()
