"""`python -m jaxsoftmax`: the versions that are installed, the GPU, and the implementation that runs each op there."""

import ctypes
import importlib.metadata
import platform
import re
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

import jaxsoftmax
from jaxsoftmax._report import call

_COLUMNS = 100
_LABEL = 12  # columns of a label
# Wheels of CUDA that kernels, products and their timing need, as they are named without `nvidia-` and `-cu12`.
_WHEELS = ("cuda-runtime", "cuda-nvcc", "cuda-cupti", "cudnn", "cublas", "nccl")


def main(say: Callable[[str], None] = print, gpu: str | None = None) -> int:
    """Prints the report; `gpu` names a GPU, as `explain` takes it, in place of the one at hand. Returns the exit status."""
    say(report(gpu))
    return 0


def report(gpu: str | None = None) -> str:
    """Returns the report, in lines of at most 100 columns."""
    lines = [line for label, text in _installed() for line in _wrapped(label, text)]
    return "\n".join([*lines, "", *_choices(gpu)])


def _wrapped(label: str, text: str, indent: int = _LABEL) -> list[str]:
    first = f"{label:{indent}}"
    more = " " * indent
    return textwrap.wrap(
        text, _COLUMNS, initial_indent=first, subsequent_indent=more, break_long_words=True, break_on_hyphens=False
    ) or [first.rstrip()]


# What is installed.


def _installed() -> Iterator[tuple[str, str]]:
    plugins = [name for name in ("jax-cuda13-plugin", "jax-cuda12-plugin") if version(name)]
    yield "jaxsoftmax", jaxsoftmax.__version__
    yield "jax", ", ".join([version("jax") or "", *(f"{name} {version(name)}" for name in ("jaxlib", *plugins))])
    yield "CUDA", _cuda() or "no wheels of CUDA"
    yield "Triton", ", ".join(f"{name} {version(name) or 'not installed'}" for name in ("triton", "jax-triton"))
    yield "Python", f"{platform.python_version()}, {platform.platform()}"
    driver, gpus = nvidia()
    yield "driver", driver or "no NVIDIA driver"
    device = call.gpu()
    for index, known in enumerate(gpus):
        yield f"GPU {index}", str(known)
    if device is None:
        hint = "; `pip install 'jax[cuda13]'` has it see this GPU (cuda12 for older drivers)" if gpus and not plugins else ""
        yield "JAX uses", f"{jax.default_backend()}, not an NVIDIA GPU{hint}"
    else:
        yield "JAX uses", f"{device.device_kind}, compute capability {getattr(device, 'compute_capability', 'unknown')}"


def version(package: str) -> str | None:
    """Returns the version of a package, or None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda() -> str:
    versions: dict[str, str] = {}
    for distribution in importlib.metadata.distributions():
        name = re.fullmatch(r"nvidia-(.+?)(-cu\d+)?", (distribution.metadata["Name"] or "").lower())
        if name and name[1] in _WHEELS:
            versions[name[1]] = distribution.version
    return ", ".join(f"{name} {versions[name]}" for name in _WHEELS if name in versions)


@dataclass(frozen=True)
class Gpu:
    """A GPU as NVIDIA's driver describes it."""

    name: str
    capability: str
    mebibytes: int

    def __str__(self) -> str:
        return f"{self.name}, compute capability {self.capability}, {self.mebibytes / 1024:.0f} GiB"


def nvidia() -> tuple[str | None, list[Gpu]]:
    """Returns the driver's version, with the newest CUDA that it runs, and the GPUs: by NVML, or else by nvidia-smi."""
    try:
        return _by_nvml(ctypes.CDLL("libnvidia-ml.so.1"))
    except (OSError, AttributeError, RuntimeError):
        return _by_smi()


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def _by_nvml(nvml: Any) -> tuple[str, list[Gpu]]:
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
            handle, memory, major, minor = ctypes.c_void_p(), _Memory(), ctypes.c_int(), ctypes.c_int()
            ask("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
            ask("nvmlDeviceGetName", handle, text, ctypes.c_uint(96))
            ask("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
            ask("nvmlDeviceGetCudaComputeCapability", handle, ctypes.byref(major), ctypes.byref(minor))
            gpus.append(Gpu(text.value.decode(), f"{major.value}.{minor.value}", memory.total >> 20))
    finally:
        nvml.nvmlShutdown()
    return f"{driver}, which runs CUDA up to {number.value // 1000}.{number.value % 1000 // 10}", gpus


def _by_smi() -> tuple[str | None, list[Gpu]]:
    query = "--query-gpu=driver_version,name,compute_cap,memory.total"
    try:
        command = ["nvidia-smi", query, "--format=csv,noheader,nounits"]
        out = subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout
        lines = [[part.strip() for part in line.split(",")] for line in out.splitlines() if line.strip()]
        return (lines[0][0] if lines else None), [
            Gpu(name, capability, int(float(size))) for _, name, capability, size in lines
        ]
    except (OSError, ValueError, subprocess.SubprocessError):
        return None, []


# What runs.


def standard_calls() -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
    """Returns usual calls by name, with the types of their operands: one of each op, and three of attention."""

    def of(shape: tuple[int, ...], dtype: str = "bfloat16") -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    logits, labels = of((4096, 32768)), of((4096,), "int32")
    query = of((2, 4096, 16, 128))
    step, cache = of((8, 1, 32, 128)), of((8, 4096, 8, 128))
    pages, pages_of, lengths = of((2048, 16, 8, 128)), of((8, 256), "int32"), of((8,), "int32")
    attend = jaxsoftmax.dot_product_attention

    def gradients(q, k, v):
        return jax.grad(lambda q, k, v: jnp.sum(attend(q, k, v, is_causal=True).astype(jnp.float32)), (0, 1, 2))(q, k, v)

    return {
        "softmax": (jaxsoftmax.softmax, (logits,)),
        "log_softmax": (jaxsoftmax.log_softmax, (logits,)),
        "logsumexp": (lambda x: jaxsoftmax.logsumexp(x, -1), (logits,)),
        "cross_entropy": (jaxsoftmax.cross_entropy, (logits, labels)),
        "linear_cross_entropy": (jaxsoftmax.linear_cross_entropy, (of((4096, 2048)), of((2048, 32768)), labels)),
        "attention": (lambda q, k, v: attend(q, k, v, is_causal=True), (query,) * 3),
        "attention backward": (gradients, (query,) * 3),
        "attention decoding": (attend, (step, cache, cache)),
        "paged_attention": (jaxsoftmax.cache.paged_attention, (step, pages, pages, pages_of, lengths)),
        "top_k": (lambda x: jaxsoftmax.top_k(x, 50), (logits,)),
        "softmax_top_k": (lambda x: jaxsoftmax.softmax_top_k(x, 50), (logits,)),
        "categorical": (lambda x: jaxsoftmax.categorical(jax.random.key(0), x, top_p=0.9), (logits,)),
    }


def _choices(gpu: str | None) -> Iterator[str]:
    """Yields lines: each implementation that runs, the ops that it runs, and why none that is preferred runs them."""
    groups: dict[tuple[str, str | None, tuple[tuple[str, str], ...]], list[str]] = {}
    where = jax.default_backend()
    for name, (f, types) in standard_calls().items():
        try:
            explanation = jaxsoftmax.explain(f, *types, gpu=gpu)
        except ValueError:  # no such GPU
            raise
        except Exception as problem:  # whatever a compiler raises belongs into a report
            groups.setdefault(("raised", call.in_words(problem), ()), []).append(name)
            continue
        where = explanation.gpu or explanation.platform
        decision = explanation[-1]  # of a gradient the one behind the forward pass
        groups.setdefault((decision.implementation, decision.remark, decision.refusals), []).append(name)
    yield from _wrapped("", f"Standard calls in bfloat16 on {where} run on", 0)
    for (implementation, remark, refusals), names in groups.items():
        yield from _wrapped(f"  {implementation}", ", ".join(names))
        if remark is not None:
            yield from _wrapped("", remark)
        for other, reason in refusals:
            yield from _wrapped("", f"not {other}: {reason}")
