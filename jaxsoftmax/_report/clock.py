"""The time that kernels run on the GPU, as CUPTI reports it for every kernel of the process. Launches and gaps do not count."""

from collections.abc import Callable
from typing import Any


def kernels_us(cupti: Any, run: Callable[[], None], calls: int, *, detach: bool = False) -> float | None:
    """Returns the microseconds of kernels in one of the `calls` calls that `run` makes and waits for.

    `cupti` is the module of jaxlib that asks CUPTI. Returns None if it sees no kernel; a plain memory copy is none. With
    `detach` CUPTI leaves the process afterwards, as it makes launches slower.

    Raises:
      RuntimeError: the calls ran different numbers of kernels.
    """
    cupti._cupti_init()
    try:
        run()
    finally:
        kernels = cupti._cupti_get_timings(detach)
    if len(kernels) % calls:
        raise RuntimeError(f"{calls} calls ran {len(kernels)} kernels: not the same number each")
    return 1e3 * sum(milliseconds for _, milliseconds in kernels) / calls if kernels else None
