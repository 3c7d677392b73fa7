"""A clock that needs no GPU, for tests of functions that measure times."""

import time
from collections.abc import Callable


def wall_clock(run: Callable[[], None], calls: int) -> float:
    """Returns the microseconds of one call on the wall clock."""
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start) / calls
