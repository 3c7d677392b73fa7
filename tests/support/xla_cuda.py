"""XLA's programs for CUDA, compiled with or without a GPU, and the operations that they fuse."""

import functools
import importlib.util
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies

# What XLA has to know of an H200: facts of the GPU, not of a machine.
H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 151397597184
  cuda_compute_capability { major: 9 minor: 0 }
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H200"
"""


@functools.cache
def sharding() -> jax.sharding.Sharding | str:
    """Returns the sharding of arrays on a GPU, which may exist only for the compiler, or the reason why there is none."""
    if jax.default_backend() == "gpu":
        return jax.sharding.SingleDeviceSharding(jax.devices("gpu")[0])
    if importlib.util.find_spec("jax_plugins") is None:
        return "needs a GPU, or jax's plugin for CUDA, which compiles without one"
    try:
        topology = topologies.get_topology_desc(platform="cuda", topology="1x1x1", target_config=H200)
    except NotImplementedError as error:  # the plugin of another platform, or one without the libraries that it loads
        return f"needs a GPU, or jax's plugin for CUDA: {error}"
    return jax.sharding.SingleDeviceSharding(topology.devices[0])


def skip_unless_it_compiles() -> None:
    """Skips a test that compiles for a GPU where neither a GPU is there nor JAX's plugin, which compiles without one."""
    if isinstance(reason := sharding(), str):
        pytest.skip(reason)


def skip_unless_it_compiles_for_absent_gpus() -> None:
    """Skips a test that compiles a program for several GPUs and does not run it. Native tests run it if there are GPUs."""
    skip_unless_it_compiles()
    if jax.default_backend() == "gpu":
        pytest.skip("the compiler sees the GPUs that are there")


def mesh(sizes: tuple[int, ...], names: tuple[str, ...]) -> jax.sharding.Mesh:
    """Returns a mesh of GPUs that exist only for the compiler. `sharding` says why there may be none."""
    topology = f"1x1x{math.prod(sizes)}"
    devices = topologies.get_topology_desc(platform="cuda", topology=topology, target_config=H200).devices
    return jax.sharding.Mesh(np.array(devices).reshape(sizes), names)


def compiled(f, *operands) -> str:
    """Returns the optimised HLO of `f` for CUDA, for arrays of these types."""
    given = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding()) for x in operands]
    return jax.jit(f, out_shardings=sharding()).lower(*given).compile().as_text()


# The scope, in a program, of the softmax that is looked at; and what hands scores on as they are.
SCOPE = "softmax_under_test"
_MOVES = ("bitcast", "convert", "copy", "reshape", "transpose")

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (\w+)\[([\d,]*)\]\S* ([a-z][a-z\-]*)\(([^)]*)\)")


@dataclass(frozen=True)
class Instruction:
    """One line of HLO whose result is an array."""

    dtype: str
    size: int
    opcode: str
    operands: list[str]
    line: str


def computations(hlo: str) -> list[dict[str, Instruction]]:
    """Returns the computations of a program, each a mapping from names to instructions."""
    found: list[dict[str, Instruction]] = []
    for line in hlo.splitlines():
        if _COMPUTATION.match(line):
            found.append({})
        elif match := _INSTRUCTION.match(line):
            name, dtype, shape, opcode, operands = match.groups()
            size = math.prod(int(n) for n in shape.split(",") if n)
            found[-1][name] = Instruction(dtype, size, opcode, re.findall(r"%([\w.\-]+)", operands), line)
    return found


def sources(hlo: str) -> Iterator[Instruction]:
    """Yields the operand of the maximum of the softmax inside `SCOPE`, before moves and casts. A parameter is in memory."""
    for instructions in computations(hlo):
        for found in instructions.values():
            if found.opcode == "reduce" and f"{SCOPE}/reduce_max" in found.line:
                found = instructions[found.operands[0]]
                while found.opcode in _MOVES:
                    found = instructions[found.operands[0]]
                yield found


def is_fused(scores: Callable[..., jax.Array], *operands: jax.ShapeDtypeStruct) -> bool | None:
    """Tells whether XLA computes `scores(*operands)` together with their softmax, and never writes them as they are.

    None if XLA needs no maximum over that number of elements, as for constants.
    """

    def softmax_of(*operands):
        x = scores(*operands)
        with jax.named_scope(SCOPE):
            return jax.nn.softmax(x)

    found = list(sources(compiled(softmax_of, *operands)))
    whole = jax.eval_shape(scores, *operands)
    return all(each.opcode != "parameter" or not is_like(each, whole) for each in found) if found else None


_HLO_NAMES = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}


def is_like(instruction: Instruction, array: Any) -> bool:
    """Tells whether an instruction has the dtype and the number of elements of `array`."""
    return (instruction.dtype, instruction.size) == (_HLO_NAMES[array.dtype.name], array.size)
