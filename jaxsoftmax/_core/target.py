"""The target of lowering: one record, made in `lower` and handed down, so that no plan and no kernel asks a device."""

import contextlib
import re
from collections.abc import Generator
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any

import jax

from jaxsoftmax._core import arguments


@dataclass(frozen=True)
class Target:
    """The platform and GPU that a program is lowered for."""

    platform: str  # "cpu", "cuda", "rocm" or "tpu"
    compute_capability: tuple[int, int] | None = None  # of the GPU, such as `(9, 0)` for Hopper; None elsewhere than on "cuda"
    multiprocessors: int = 0  # of the GPU, or a common number for this capability if `name` is None
    shared_memory: int = 0  # largest number of bytes that one block of threads can have
    name: str | None = None  # of the GPU; None for any GPU of this capability, however few multiprocessors it has

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform
        capability = f"compute capability {'.'.join(map(str, self.compute_capability))}"
        if self.name is None:
            gpus = [gpu.upper() for gpu, (its_capability, _) in GPUS.items() if its_capability == self.compute_capability]
            return f"any GPU of {capability}" + (f" ({', '.join(gpus)})" if gpus else "")
        return f"{self.name} ({capability}, {self.multiprocessors} multiprocessors)"


@dataclass(frozen=True)
class Machine:
    """The devices that XLA runs a reference on."""

    devices: int  # over which XLA may shard the operands
    target: Target | None = None  # of each device; None if the program is for several platforms


ONE_DEVICE = Machine(1)
CPU = Target("cpu")


# KiB of shared memory that a block can have, by compute capability. Source: CUDA C++ Programming Guide, table of technical
# specifications.
_SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
_LEAST_SHARED_MEMORY = 48

# GPUs by the names that `explain` takes: compute capability and multiprocessors. Source: NVIDIA's architecture whitepapers.
GPUS = {
    "a100": ((8, 0), 108),
    "l4": ((8, 9), 58),
    "l40s": ((8, 9), 142),
    "rtx3090": ((8, 6), 82),
    "rtx4090": ((8, 9), 128),
    "h100": ((9, 0), 132),
    "h200": ((9, 0), 132),
    "gh200": ((9, 0), 132),
    "b200": ((10, 0), 148),
    "rtx5090": ((12, 0), 170),
}


def of_capability(capability: tuple[int, int], multiprocessors: int | None = None, name: str | None = None) -> Target:
    """Returns the target of a GPU. Without a number of multiprocessors it has those of the first such GPU in `GPUS`."""
    if multiprocessors is None:
        multiprocessors = next((count for its_capability, count in GPUS.values() if its_capability == capability), 0)
    shared = _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY) << 10
    return Target("cuda", capability, multiprocessors, shared, name)


# The target if JAX sees no GPU, so that programs lower ahead of time on any host. An H100 or H200 has 132 multiprocessors;
# other GPUs of this capability have as few as 78.
ANY_HOPPER = of_capability((9, 0))
HOPPER = replace(ANY_HOPPER, name="H100")

_of_context: ContextVar[Target | None] = ContextVar("jaxsoftmax_target", default=None)


@contextlib.contextmanager
def lowering_for(target: Target) -> Generator[None, None, None]:
    """Makes programs for CUDA lower for `target`, and not for the GPU at hand, inside the context."""
    token = _of_context.set(target)
    try:
        yield
    finally:
        _of_context.reset(token)


def target_for(platform: str) -> Target:
    """Returns the target for a platform. On CUDA it is the one of the context, else the first GPU, else any Hopper."""
    if platform != "cuda":
        return Target(platform)
    if (target := _of_context.get()) is not None:
        return target
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return ANY_HOPPER
    major, minor = map(int, device.compute_capability.split("."))
    return of_capability((major, minor), device.core_count, device.device_kind)


def named(function: str, value: Any) -> Target:
    """Returns the target for the argument `gpu` of a function: a name in `GPUS`, or a compute capability."""
    if isinstance(value, str):
        text = value.lower().replace(" ", "")
        if text in GPUS:
            return of_capability(*GPUS[text], name=text.upper())
        if numbers := re.fullmatch(r"(\d+)\.(\d+)", text):
            return of_capability((int(numbers[1]), int(numbers[2])))
    elif isinstance(value, tuple | list) and len(value) == 2:
        major, minor = (arguments.integer(function, f"gpu[{k}]", number) for k, number in enumerate(value))
        if major > 0 and minor >= 0:
            return of_capability((major, minor))
    allowed = f'{", ".join(GPUS)} or a compute capability such as "8.0" or (8, 0)'
    raise ValueError(f"{function}: gpu must be one of {allowed}, got {arguments.shown(value)}")
