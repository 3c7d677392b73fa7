"""`python -m jaxsoftmax`: the versions that are installed, the GPU, and the implementation that runs each op there."""

import contextlib
import ctypes
import importlib.metadata
import os
import platform
import re
import textwrap
from collections.abc import Iterator
from typing import Any

import jaxsoftmax
from jaxsoftmax._report import call, cases

_COLUMNS = 100
_LABEL = 12  # columns of a label
# Wheels of CUDA that kernels, products and their timing need, as they are named without `nvidia-`, `cuda-` and `-cu12`.
_WHEELS = ("runtime", "nvcc", "cupti", "cudnn", "cublas", "nccl")


def report(gpu: str | None = None) -> str:
    """Returns the report, in lines of at most 100 columns, except that of a platform that JAX cannot use.

    `gpu` names a GPU, as `explain` takes it, in place of the one at hand.

    Raises:
      ValueError: there is no such GPU.
    """
    backend, problem = call.backend()
    choices = _choices(gpu) if backend else [problem]
    return "\n".join([*(line for label, text in _installed(backend) for line in _wrapped(label, text)), *choices])


def _wrapped(label: str, text: str) -> list[str]:
    more = " " * _LABEL
    return textwrap.wrap(text, _COLUMNS, initial_indent=f"{label:{_LABEL}}", subsequent_indent=more, break_on_hyphens=False)


# What is installed.


def _installed(backend: str | None) -> Iterator[tuple[str, str]]:
    plugins = [name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if version(name)]
    versions = (f"{name} {version(name) or 'not installed'}" for name in ("jax", "jaxlib", *plugins))
    yield "jaxsoftmax", ", ".join([jaxsoftmax.__version__, *versions])
    yield "CUDA", _cuda() or "no wheels of CUDA"
    yield "Triton", ", ".join(f"{name} {version(name) or 'not installed'}" for name in ("triton", "jax-triton"))
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    driver, gpus = nvidia()
    device = call.gpu() if backend else None
    yield "driver", driver if device or not backend else f"{driver}; JAX uses {backend}"
    named = [index.strip() for index in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if index.strip()]
    visible = [int(index) if index.isdigit() else -1 for index in named]  # -1: one that is named by its UUID
    same = [index for index, (name, _) in enumerate(gpus) if device is not None and name == device.device_kind]
    default = next((index for index in visible or same if index in same), None)
    for index, (name, properties) in enumerate(gpus):
        yield f"GPU {index}", f"{name}, {properties}{', the default device of JAX' if index == default else ''}"
    if device is not None and default is None:
        yield "JAX uses", f"{device.device_kind}, compute capability {getattr(device, 'compute_capability', 'unknown')}"
    if gpus and not plugins:
        yield "", "`pip install 'jax[cuda13]'` has JAX see this GPU (cuda12 for older drivers)"


def version(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> str:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.fullmatch(r"nvidia-(?:cuda-)?(.+?)(-cu\d+)?", (distribution.metadata["Name"] or "").lower())
        if name and name[1] in _WHEELS:
            versions[name[1]] = distribution.version
    return ", ".join(f"{name} {versions[name]}" for name in _WHEELS if name in versions)


def nvidia() -> tuple[str, list[tuple[str, str]]]:
    """Returns the driver's version, with the newest CUDA that it runs, and the name and properties of each GPU."""
    try:
        return _by_nvml(ctypes.CDLL("libnvidia-ml.so.1"))  # which every driver brings
    except (OSError, AttributeError, RuntimeError):
        return "no NVIDIA driver", []


def _by_nvml(nvml: Any) -> tuple[str, list[tuple[str, str]]]:
    """Asks the library of the driver. Source: NVML API reference."""

    def ask(function: str, *args: Any) -> None:
        if status := getattr(nvml, function)(*args):
            raise RuntimeError(f"{function}: {status}")

    ask("nvmlInit_v2")
    try:
        text, number, count = ctypes.create_string_buffer(96), ctypes.c_int(), ctypes.c_uint()
        ask("nvmlSystemGetDriverVersion", text, ctypes.c_uint(96))
        driver = text.value.decode()
        ask("nvmlSystemGetCudaDriverVersion_v2", ctypes.byref(number))
        ask("nvmlDeviceGetCount_v2", ctypes.byref(count))
        gpus = []
        for index in range(count.value):
            handle, major, minor = ctypes.c_void_p(), ctypes.c_int(), ctypes.c_int()
            memory = (ctypes.c_ulonglong * 3)()  # in all, free and used, in bytes
            ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            ask("nvmlDeviceGetName", handle, text, ctypes.c_uint(96))
            ask("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            properties = f"compute capability {major.value}.{minor.value}"
            with contextlib.suppress(RuntimeError):  # GPUs that share the host's memory, and slices of GPUs, may not say
                ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
                properties += f", {memory[0] / 2**30:.0f} GiB"
            gpus.append((text.value.decode(), properties))
    finally:
        nvml.nvmlShutdown()
    return f"{driver}, which runs CUDA up to {number.value // 1000}.{number.value % 1000 // 10}", gpus


# What runs.


def standard_calls() -> dict[str, cases.Case]:
    """Returns the first case in bfloat16 of each public function, and of decoding, by name."""
    narrow = [case for case in reversed(cases.all_cases()) if case.dtype == "bfloat16"]
    calls = {"decoding" if case.what.startswith("decoding") else case.op: case for case in narrow}
    return dict(reversed(calls.items()))


def _choices(gpu: str | None) -> Iterator[str]:
    """Yields lines: each implementation that runs, the ops that it runs, and why none that is preferred runs them."""
    names_of: dict[tuple[str, str | None, frozenset[str]], list[str]] = {}
    refused_by: dict[str, dict[str, None]] = {}  # the implementations, by the reason
    where = gpu or ""
    try:
        calls = standard_calls()
    except Exception as problem:  # a GPU whose memory is full, say
        yield f"No call could be prepared: {call.in_words(problem)}"
        return
    for name, case in calls.items():
        try:
            explanation = jaxsoftmax.explain(case.build(None), case.inputs(), gpu=gpu)
        except Exception as problem:  # whatever a compiler raises belongs into a report
            names_of.setdefault(("raised", call.in_words(problem), frozenset()), []).append(name)
            continue
        where = explanation.gpu or explanation.platform
        for index, decision in enumerate(explanation):
            reasons = frozenset(reason for _, reason in decision.refusals)
            names = names_of.setdefault((decision.implementation, decision.remark, reasons), [])
            label = f"{name} backward" if index else name
            if name not in names and label not in names:  # a derivative that runs as the forward pass does needs no name
                names.append(label)
            for other, reason in decision.refusals:
                refused_by.setdefault(reason, {})[other] = None
    yield from textwrap.wrap(f"On {where} calls in bfloat16 run on", _COLUMNS)
    for (implementation, remark, reasons), names in names_of.items():
        yield from _wrapped(f"  {implementation}", ", ".join(names))
        if remark is not None:
            yield from _wrapped("", remark)
        for reason, others in refused_by.items():
            if reason in reasons:
                yield from _wrapped("", f"not {' or '.join(others)}: {reason}")
