"""What a kernel is made for: a record that dispatch makes and hands down, so that nothing below it asks a device."""

from dataclasses import dataclass

import jax


@dataclass(frozen=True)
class Target:
    """What is lowered for.

    Attributes:
      platform: "cpu", "cuda", "rocm" or "tpu".
      compute_capability: of the GPUs, `(9, 0)` for Hopper; None but on CUDA.
      multiprocessors: of a GPU.
      shared_memory: bytes that a block of threads can have.
    """

    platform: str
    compute_capability: tuple[int, int] | None = None
    multiprocessors: int = 0
    shared_memory: int = 0


# Bytes of shared memory that a block can have, by compute capability. Source: CUDA C++ Programming Guide, table of technical
# specifications.
_SHARED_MEMORY = {(8, 0): 163, (8, 6): 99, (8, 7): 163, (8, 9): 99, (9, 0): 227, (10, 0): 227, (10, 3): 227, (12, 0): 99}
_LEAST_SHARED_MEMORY = 48

# What is lowered for where no GPU is at hand: an H100 or H200.
HOPPER = Target("cuda", (9, 0), 132, _SHARED_MEMORY[9, 0] << 10)


def target_for(platform: str) -> Target:
    """The target of lowering for a platform: the GPU at hand, else Hopper."""
    if platform != "cuda":
        return Target(platform)
    try:
        device = jax.devices("cuda")[0]
    except RuntimeError:
        return HOPPER
    major, minor = map(int, device.compute_capability.split("."))
    shared = _SHARED_MEMORY.get((major, minor), _LEAST_SHARED_MEMORY) << 10
    return Target(platform, (major, minor), device.core_count, shared)
