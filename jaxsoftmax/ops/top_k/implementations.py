"""The implementations of top-k and sampling, by name and GPU generation.

A module loads while the first program that it may run is lowered.
"""

from jaxsoftmax._core.operation import Kernels, Op


def _mosaic_sm90():
    from jaxsoftmax.ops.top_k import mosaic_sm90

    return mosaic_sm90


def _reference():
    from jaxsoftmax.ops.top_k import xla

    return xla


TOP_K_FAMILY = Op("top_k", kernels={"mosaic": Kernels({9: _mosaic_sm90}, takes_factor=True)}, reference=_reference)
