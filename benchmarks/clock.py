"""How long a call takes: the kernels of it on the GPU, whole programs on the wall clock, or calls back to back under load.

Functions of JAX and of torch are timed alike, by CUPTI, which reports the run time of every kernel in the process, so that
neither launches nor gaps count. It does not report plain memory copies: torch's `copy_`, and whatever else of torch it should
not see, is timed by CUDA events around a CUDA graph of the same calls, and a function of JAX that runs no kernel is refused.
"""

import collections
import importlib
import itertools
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax

from benchmarks.cells import torch
from jaxsoftmax._report.clock import kernels_us

Arguments = Sequence[tuple[Any, ...]]

_AHEAD = 16  # calls in flight under load: milliseconds of work, whose outputs are held


class Clock(Protocol):
    """Times `calls` calls of `function`, each with the next of `arguments`, in microseconds a call."""

    def __call__(self, function: Callable[..., Any], arguments: Arguments, calls: int, framework: str) -> float: ...


def kernel_clock(function: Callable[..., Any], arguments: Arguments, calls: int, framework: str) -> float:
    """A `Clock` of the GPU's kernels.

    Raises:
      RuntimeError: the calls ran no kernels, or not the same number each.
    """
    us = cupti_us(function, arguments, calls, framework)
    if us is not None:
        return us
    if framework == "jax":
        raise RuntimeError("it runs no kernel (a plain memory copy is none)")
    return graph_us(function, arguments, calls)


def wall_clock(function: Callable[..., Any], arguments: Arguments, calls: int, framework: str) -> float:
    """A `Clock` of whole programs, with copies and gaps between kernels. It needs no GPU, as tests of the harness do not."""
    start = time.perf_counter()
    _run(function, arguments, calls, framework)
    return 1e6 * (time.perf_counter() - start) / calls


def loaded_clock(seconds: float) -> Clock:
    """Returns a `Clock` of calls back to back, by the wall clock of at least `seconds` seconds and at least `calls` calls.

    It dispatches calls ahead and waits for the oldest of them, so that the GPU always has the next one.
    """

    def clock(function: Callable[..., Any], arguments: Arguments, calls: int, framework: str) -> float:
        if framework != "jax":  # another framework would have to wait for all calls in flight
            raise RuntimeError(f"only functions of JAX are timed under load, not those of {framework}")
        in_flight: collections.deque[Any] = collections.deque()
        start = time.perf_counter()
        for count, args in enumerate(itertools.cycle(arguments), start=1):
            in_flight.append(function(*args))
            if len(in_flight) > _AHEAD:
                jax.block_until_ready(in_flight.popleft())
            if count >= calls and time.perf_counter() - start >= seconds:
                break
        jax.block_until_ready(list(in_flight))  # a deque is a leaf to JAX, which it would not wait for
        return 1e6 * (time.perf_counter() - start) / count

    return clock


def mean_of_devices_us(function: Callable[..., Any], arguments: Arguments, calls: int, devices: int) -> float:
    """Microseconds that the kernels of a call on several devices run: the mean over devices.

    CUPTI's harness does not tell on which device a kernel ran, so that the longest of the devices is not known. A kernel that
    waits for other devices, as those of collectives do, counts while it waits. CUPTI is detached afterwards: it makes launches
    slower, which the wall clock sees.

    Raises:
      RuntimeError: the calls ran no kernels, or not the same number each.
    """
    us = cupti_us(function, arguments, calls, "jax", detach=True)
    if us is None:
        raise RuntimeError("CUPTI sees no kernel")
    return us / devices


def cupti_us(
    function: Callable[..., Any], arguments: Arguments, calls: int, framework: str, *, detach: bool = False
) -> float | None:
    """Microseconds a call by CUPTI, which the test harness of Mosaic GPU brings along; None if it sees no kernel."""
    cupti = importlib.import_module("jax.experimental.mosaic.gpu.profiler").mosaic_gpu_lib._mosaic_gpu_ext
    synchronize(framework)
    return kernels_us(cupti, lambda: _run(function, arguments, calls, framework), calls, detach=detach)


def graph_us(function: Callable[..., Any], arguments: Arguments, calls: int) -> float:
    """Microseconds a call by CUDA events around a CUDA graph of all calls."""
    graph = torch().cuda.CUDAGraph()
    torch().cuda.synchronize()
    with torch().cuda.graph(graph, capture_error_mode="thread_local"):
        for args in itertools.islice(itertools.cycle(arguments), calls):
            function(*args)
    graph.replay()
    start, end = torch().cuda.Event(enable_timing=True), torch().cuda.Event(enable_timing=True)
    start.record()
    graph.replay()
    end.record()
    torch().cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / calls


def synchronize(framework: str, result: Any = None) -> None:
    """Waits for `result` of JAX, or for all that torch has under way."""
    if framework == "torch":
        torch().cuda.synchronize()
    else:
        jax.block_until_ready(result)


def _run(function, arguments, calls, framework) -> None:
    result = None
    for args in itertools.islice(itertools.cycle(arguments), calls):
        result = function(*args)
    synchronize(framework, result)


def self_test() -> str:
    """Both ways to time, side by side, on passes of torch and JAX over 1 GiB."""
    source = torch().ones(2**28, device="cuda")
    target = torch().empty_like(source)
    array = jax.numpy.ones(2**28, jax.numpy.float32)
    scale = jax.jit(lambda x: x * 1.5)
    contenders = {
        "torch copy_": (lambda: target.copy_(source), "torch"),
        "torch mul": (lambda: torch().mul(source, 1.5, out=target), "torch"),
        "jax x * 1.5": (lambda: scale(array), "jax"),
    }
    lines = [f"{'1 GiB read, 1 GiB written':26} {'CUPTI, us':>12} {'CUDA events, us':>16}"]
    for name, (function, framework) in contenders.items():
        synchronize(framework, function())
        by_cupti = [cupti_us(function, [()], 10, framework) for _ in range(5)]
        seen = [us for us in by_cupti if us is not None]
        cupti = f"{statistics.median(seen):.1f}" if seen else "not seen"
        events = "-"
        if framework == "torch":
            events = f"{statistics.median(graph_us(function, [()], 10) for _ in range(5)):.1f}"
        lines.append(f"{name:26} {cupti:>12} {events:>16}")
    return "\n".join(lines)
