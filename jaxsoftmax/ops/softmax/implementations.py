"""The implementations of softmax, log_softmax and logsumexp, by name and GPU generation.

A module loads while the first program that it may run is lowered.
"""

from jaxsoftmax._core.operation import Kernels, Op


def _mosaic_sm90():
    from jaxsoftmax.ops.softmax import mosaic_sm90

    return mosaic_sm90


def _triton():
    from jaxsoftmax.ops.softmax import triton

    return triton


def _reference():
    from jaxsoftmax.ops.softmax import xla

    return xla


def _across_devices():
    from jaxsoftmax.ops.softmax import across_devices

    return across_devices.RULES


SOFTMAX_FAMILY = Op(
    "softmax",
    kernels={
        "mosaic": Kernels({9: _mosaic_sm90}, takes_factor=True),
        "triton": Kernels(dict.fromkeys((8, 9, 10, 12), _triton)),
    },
    reference=_reference,
    across_devices=_across_devices,
)
