"""Power and clocks of the GPU that JAX runs on, as NVML tells them.

The energy counter stands still between its updates, so that two readings, before and after a turn, would miss up to an interval
at each end: millijoules of equal turns of two seconds differed by 5% on an H100. Instead a thread reads the counter all the
time. Power is the energy between the first and the last update of the turn, divided by the time between them.
"""

import ctypes
import itertools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

_SM_CLOCK = 1  # NVML_CLOCK_SM
_LENGTH_OF_BUS_ID = 32  # characters at most, and more than libcuda writes
_INTERVAL = 0.005  # seconds between samples: a fraction of the time between two updates of the counter


class UnavailableError(Exception):
    """NVML, or a counter of it, is missing."""


@dataclass(frozen=True)
class Sample:
    """A reading: when, on the clock of the process, the energy since the driver was loaded, and the clock."""

    seconds: float
    millijoules: int
    sm_mhz: int


@dataclass(frozen=True)
class Load:
    """Mean power of the GPU in a turn, and the median clock of its multiprocessors."""

    watts: float
    sm_mhz: float


class Meter:
    """Measures the load of one GPU.

    Raises:
      UnavailableError: there is no NVML, or it has no energy counter or clock for this GPU.
    """

    def __init__(self, ordinal: int = 0, *, nvml: Any = None, cuda: Any = None):
        """`ordinal` is the number that CUDA gives the GPU in this process; `nvml` and `cuda` are the driver's two libraries."""
        self._nvml = nvml or _library("libnvidia-ml.so.1")
        self._ask("nvmlInit_v2")
        self._device = ctypes.c_void_p()
        bus_id = _bus_id(cuda or _library("libcuda.so.1"), ordinal)
        self._ask("nvmlDeviceGetHandleByPciBusId_v2", bus_id, ctypes.byref(self._device))
        self.sample()

    def during(self, turn: Callable[[], float]) -> tuple[float, Load]:
        """Runs a turn. Returns its result, and the load while it ran.

        Raises:
          RuntimeError: the turn was too short for two updates of the energy counter.
        """
        samples: list[Sample] = []
        is_over = threading.Event()

        def read() -> None:
            while not is_over.is_set():
                samples.append(self.sample())
                is_over.wait(_INTERVAL)

        with ThreadPoolExecutor(1) as pool:
            reading = pool.submit(read)
            try:
                result = turn()
            finally:
                is_over.set()
            reading.result()  # raises what it raised
        return result, load_of(samples)

    def sample(self) -> Sample:
        """Reads both counters."""
        energy, clock = ctypes.c_ulonglong(), ctypes.c_uint()
        self._ask("nvmlDeviceGetTotalEnergyConsumption", self._device, ctypes.byref(energy))
        seconds = time.perf_counter()
        self._ask("nvmlDeviceGetClockInfo", self._device, ctypes.c_int(_SM_CLOCK), ctypes.byref(clock))
        return Sample(seconds, energy.value, clock.value)

    def _ask(self, name: str, *arguments: Any) -> None:
        status = getattr(self._nvml, name)(*arguments)
        if status:
            self._nvml.nvmlErrorString.restype = ctypes.c_char_p
            raise UnavailableError(f"NVML's {name} fails: {self._nvml.nvmlErrorString(status).decode()}")


def load_of(samples: Sequence[Sample]) -> Load:
    """Computes the load from the samples of a turn.

    Raises:
      RuntimeError: the energy counter was updated less than twice.
    """
    updates = [sample for before, sample in itertools.pairwise(samples) if sample.millijoules != before.millijoules]
    if len(updates) < 2:
        raise RuntimeError(f"the energy counter was updated {len(updates)} times in a turn, not twice: --turn must be longer")
    first, last = updates[0], updates[-1]
    watts = (last.millijoules - first.millijoules) / 1e3 / (last.seconds - first.seconds)
    return Load(watts, statistics.median(sample.sm_mhz for sample in samples))


def _library(name: str) -> Any:
    try:
        return ctypes.CDLL(name)
    except OSError as problem:
        raise UnavailableError(f"{name} cannot be loaded: {problem}") from None


def _bus_id(cuda: Any, ordinal: int) -> bytes:
    """Asks CUDA for the PCI address of a GPU: NVML counts GPUs in another order, and those that this process does not see."""
    bus_id = ctypes.create_string_buffer(_LENGTH_OF_BUS_ID)
    status = cuda.cuInit(0) or cuda.cuDeviceGetPCIBusId(bus_id, _LENGTH_OF_BUS_ID, ordinal)
    if status:
        raise UnavailableError(f"CUDA does not tell the address of its GPU {ordinal}: error {status}")
    return bus_id.value
