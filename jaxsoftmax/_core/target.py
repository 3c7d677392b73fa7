"""What a kernel is made for: a record that dispatch makes and hands down, so that nothing below it asks a device."""

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
    """The platform and GPU that a program is lowered for.

    Attributes:
      platform: "cpu", "cuda", "rocm" or "tpu".
      compute_capability: of the GPUs, `(9, 0)` for Hopper; None on other platforms than CUDA.
      multiprocessors: of a GPU; of any GPU with this capability where it is not known, a common number.
      shared_memory: bytes that a block of threads can have.
      name: the GPU's name; None where any GPU with this capability is meant, however few multiprocessors it has.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    shared_memory: int = 0
    name: str | None = None

    def __str__(self) -> str:
        if self.compute_capability is None:
            return self.platform
        capability = f"compute capability {'.'.join(map(str, self.compute_capability))}"
        if self.name is None:
            known = [name.upper() for name, (own, _) in GPUS.items() if own == self.compute_capability]
            return f"any GPU of {capability}" + (f" ({', '.join(known)})" if known else "")
        return f"{self.name} ({capability}, {self.multiprocessors} multiprocessors)"


@dataclass(frozen=True)
class Machine:
    """The devices that XLA runs a reference on.

    Attributes:
      devices: over how many XLA may shard its operands.
      target: of each; None if it is not known.
    """

    devices: int
    target: Target | None = None


ONE_DEVICE = Machine(1)
CPU = Target("cpu")


# Bytes of shared memory that a block can have, by compute capability. Source: CUDA C++ Programming Guide, table of technical
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
    """The target of a GPU. Without a number of multiprocessors it is the one of the first of `GPUS` with this capability."""
    if multiprocessors is None:
        multiprocessors = next((count for own, count in GPUS.values() if own == capability), 0)
    shared = _SHARED_MEMORY.get(capability, _LEAST_SHARED_MEMORY) << 10
    return Target("cuda", capability, multiprocessors, shared, name)


# What is lowered for where JAX sees no GPU: any Hopper. An H100 or H200 has 132 multiprocessors, and others as few as 78.
ANY_HOPPER = of_capability((9, 0))
HOPPER = replace(ANY_HOPPER, name="H100")

_of_context: ContextVar[Target | None] = ContextVar("jaxsoftmax_target", default=None)


@contextlib.contextmanager
def lowering_for(target: Target) -> Generator[None, None, None]:
    """A context in which programs for CUDA are lowered for `target`, and not for the GPU at hand."""
    token = _of_context.set(target)
    try:
        yield
    finally:
        _of_context.reset(token)


def target_for(platform: str) -> Target:
    """The target of lowering for a platform: that of the context, else the GPU at hand, else any Hopper."""
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
    """The target for the argument `gpu` of a function: a name among `GPUS`, or a compute capability."""
    if isinstance(value, str):
        known = value.lower().replace(" ", "")
        if known in GPUS:
            return of_capability(*GPUS[known], name=known.upper())
        if numbers := re.fullmatch(r"(\d+)\.(\d+)", known):
            return of_capability((int(numbers[1]), int(numbers[2])))
    elif isinstance(value, tuple | list) and len(value) == 2:
        major, minor = (arguments.integer(function, f"gpu[{k}]", number) for k, number in enumerate(value))
        if major > 0 and minor >= 0:
            return of_capability((major, minor))
    allowed = f'{", ".join(GPUS)} or a compute capability such as "8.0" or (8, 0)'
    raise ValueError(f"{function}: gpu must be one of {allowed}, got {arguments.shown(value)}")
