"""Kernels of Mosaic GPU, all built in one way."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu

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
