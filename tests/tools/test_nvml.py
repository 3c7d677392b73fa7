"""The energy and the clocks of turns, and calls back to back."""

import ctypes
import functools
import itertools
import time
import types

import pytest

from benchmarks import clock, nvml

NOT_SUPPORTED = 3


def samples(watts, update, seconds, interval=0.005):
    """Readings of a counter that is updated every `update` seconds, on a GPU of constant power."""
    times = [at * interval for at in range(round(seconds / interval) + 1)]
    return [nvml.Sample(at, int(watts * 1000 * update) * int(at / update + 1e-9), 1500 + (at > 1.5)) for at in times]


@pytest.mark.parametrize("update", [0.02, 0.1, 0.33])
def test_power_is_that_between_the_updates_of_the_counter(update):
    taken = samples(700, update, seconds=2.2)
    load = nvml.load_of(taken)
    assert load == nvml.Load(pytest.approx(700, rel=0.01), 1500)
    if update > 0.1:  # where two readings, before and after, do not tell it
        assert (taken[-1].millijoules - taken[0].millijoules) / 2200 < 0.97 * 700


@pytest.mark.parametrize("seconds", [0.05, 0.15])
def test_a_turn_with_less_than_two_updates_is_refused(seconds):
    with pytest.raises(RuntimeError, match=r"updated [01] times in a turn.*--turn must be longer"):
        nvml.load_of(samples(700, 0.1, seconds))


class Nvml:
    """Stands for the library: the counter moves with each reading, by a joule."""

    def __init__(self, fails=None, after=0):
        """The function `fails` does so, `after` it was called so often."""
        self.fails, self.after, self.readings, self.addresses = fails, after, 0, []

    def __getattr__(self, name):
        return functools.partial(self._call, name)

    def _call(self, name, *arguments):
        if name == "nvmlErrorString":
            return {NOT_SUPPORTED: b"Not Supported"}[arguments[0]]
        device = getattr(arguments[0], "value", None) if arguments else None
        if name == "nvmlDeviceGetHandleByPciBusId_v2":
            self.addresses.append(arguments[0])
            arguments[1]._obj.value = 17
        elif name == "nvmlDeviceGetTotalEnergyConsumption":
            assert device == 17
            self.readings += 1
            arguments[1]._obj.value = 1000 * self.readings
        elif name == "nvmlDeviceGetClockInfo":
            assert (device, arguments[1].value) == (17, 1)
            arguments[2]._obj.value = 1485
        else:
            assert name == "nvmlInit_v2"
        self.after -= name == self.fails
        return NOT_SUPPORTED if name == self.fails and self.after < 0 else 0


def cuda(status=0):
    """Stands for the driver: a GPU has the address of its number."""

    def address_of(address, length, ordinal):
        assert length == len(address)
        address.value = f"0000:{ordinal:02X}:00.0".encode()
        return status

    return types.SimpleNamespace(cuInit=lambda flags: flags, cuDeviceGetPCIBusId=address_of)


def test_a_meter_reads_the_gpu_of_this_process_all_through_a_turn(monkeypatch):
    library = Nvml()
    meter = nvml.Meter(10, nvml=library, cuda=cuda())
    assert library.addresses == [b"0000:0A:00.0"]
    ticks = itertools.count()
    monkeypatch.setattr(nvml, "time", types.SimpleNamespace(perf_counter=lambda: next(ticks) / 500))
    monkeypatch.setattr(nvml, "_INTERVAL", 1e-4)

    def turn():
        while library.readings < 20:
            time.sleep(1e-4)
        return 480.0

    # A joule every 2 ms.
    assert meter.during(turn) == (480.0, nvml.Load(pytest.approx(500), 1485))
    readings = library.readings
    time.sleep(0.01)
    assert library.readings == readings


def test_a_meter_tells_what_a_turn_or_nvml_raises(monkeypatch):
    monkeypatch.setattr(nvml, "_INTERVAL", 1e-4)

    def fails():
        raise MemoryError("no memory")

    with pytest.raises(MemoryError, match="no memory"):
        nvml.Meter(nvml=Nvml(), cuda=cuda()).during(fails)
    later = nvml.Meter(nvml=Nvml("nvmlDeviceGetTotalEnergyConsumption", after=1), cuda=cuda())
    with pytest.raises(nvml.UnavailableError, match="nvmlDeviceGetTotalEnergyConsumption fails: Not Supported"):
        later.during(lambda: time.sleep(0.01) or 1.0)


@pytest.mark.parametrize(
    "name",
    ["nvmlInit_v2", "nvmlDeviceGetHandleByPciBusId_v2", "nvmlDeviceGetTotalEnergyConsumption", "nvmlDeviceGetClockInfo"],
)
def test_what_nvml_lacks_is_named(name):
    with pytest.raises(nvml.UnavailableError, match=f"NVML's {name} fails: Not Supported"):
        nvml.Meter(nvml=Nvml(name), cuda=cuda())


def test_missing_libraries_and_gpus_are_named(monkeypatch):
    with pytest.raises(nvml.UnavailableError, match="address of its GPU 0: error 101"):
        nvml.Meter(nvml=Nvml(), cuda=cuda(status=101))

    def missing(name):
        raise OSError("cannot open shared object file")

    monkeypatch.setattr(nvml, "ctypes", types.SimpleNamespace(CDLL=missing, c_char_p=ctypes.c_char_p))
    with pytest.raises(nvml.UnavailableError, match=r"libnvidia-ml.so.1 cannot be loaded: cannot open"):
        nvml.Meter()


class Queue:
    """Stands for JAX and time: a call takes 1 ms of the GPU, and a dispatch 0.1 ms of the host."""

    def __init__(self):
        self.now, self.busy_until, self.in_flight, self.most, self.idle = 0.0, 0.0, 0, 0, 0.0

    def perf_counter(self):
        return self.now

    def call(self, argument):
        self.now += 1e-4
        self.idle += max(0.0, self.now - self.busy_until) if self.busy_until else 0.0
        self.busy_until = max(self.now, self.busy_until) + 1e-3
        self.in_flight += 1
        self.most = max(self.most, self.in_flight)
        return self.busy_until, argument

    def block_until_ready(self, results):
        results = results if isinstance(results, list) else [results]
        self.in_flight -= len(results)
        self.now = max(self.now, *(end for end, _ in results))


@pytest.mark.parametrize(("seconds", "calls", "expected"), [(0.5, 1, 517), (0.001, 100, 100)])
def test_under_load_the_queue_is_never_empty(monkeypatch, seconds, calls, expected):
    queue = Queue()
    monkeypatch.setattr(clock, "time", queue)
    monkeypatch.setattr(clock, "jax", queue)
    us = clock.loaded_clock(seconds)(queue.call, [("a",), ("b",)], calls, "jax")
    assert queue.in_flight == 0
    assert queue.most == clock._AHEAD + 1
    assert queue.idle == 0
    count = round(queue.now * 1e6 / us)
    assert count == pytest.approx(expected, abs=2)
    assert us == pytest.approx(1000 + 100 / count)  # and what the first dispatch takes
    assert queue.now >= seconds


def test_only_jax_is_timed_under_load():
    with pytest.raises(RuntimeError, match="not those of torch"):
        clock.loaded_clock(1.0)(lambda: None, [()], 1, "torch")
