"""The implementations of cross-entropy, by name and GPU generation.

A module loads while the first program that it may run is lowered.
"""

from jaxsoftmax._core.operation import Kernels, Op


def _mosaic_sm90():
    from jaxsoftmax.ops.cross_entropy import mosaic_sm90

    return mosaic_sm90


def _triton():
    from jaxsoftmax.ops.cross_entropy import triton

    return triton


def _reference():
    from jaxsoftmax.ops.cross_entropy import xla

    return xla


def _across_devices():
    from jaxsoftmax.ops.cross_entropy import across_devices

    return across_devices.RULES


CROSS_ENTROPY_FAMILY = Op(
    "cross_entropy",
    kernels={
        "mosaic": Kernels({9: _mosaic_sm90}, takes_factor=True),
        "triton": Kernels(dict.fromkeys((8, 9, 10, 12), _triton)),
    },
    reference=_reference,
    across_devices=_across_devices,
)
