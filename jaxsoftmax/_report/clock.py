"""The time that kernels run on the GPU, as CUPTI reports it for every kernel of the process. Launches and gaps do not count."""

from collections.abc import Callable

from jaxsoftmax._core import compat


def kernels_us(run: Callable[[], None], calls: int, *, detach: bool = False) -> float | None:
    """Returns the microseconds of kernels in one of the `calls` calls that `run` makes and waits for.

    Returns None if CUPTI sees no kernel; a plain memory copy is none. With `detach` CUPTI leaves the process afterwards, as it
    makes launches slower.

    Raises:
      ImportError: this jaxlib has no CUPTI.
      RuntimeError: the calls ran different numbers of kernels.
    """
    cupti = compat.cupti()
    cupti._cupti_init()
    try:
        run()
    finally:
        kernels = cupti._cupti_get_timings(detach)
    if len(kernels) % calls:
        raise RuntimeError(f"{calls} calls ran {len(kernels)} kernels: not the same number each")
    return 1e3 * sum(milliseconds for _, milliseconds in kernels) / calls if kernels else None
