"""The implementations of divergences, by name and GPU generation.

A module loads while the first program that it may run is lowered.
"""

from jaxsoftmax._core.operation import Kernels, Op


def _mosaic_sm90():
    from jaxsoftmax.ops.divergence import mosaic_sm90

    return mosaic_sm90


def _reference():
    from jaxsoftmax.ops.divergence import xla

    return xla


def _across_devices():
    from jaxsoftmax.ops.divergence import across_devices

    return across_devices.RULES


DIVERGENCE_FAMILY = Op(
    "divergence",
    kernels={"mosaic": Kernels({9: _mosaic_sm90})},
    reference=_reference,
    across_devices=_across_devices,
)
