"""Naive, safe and online softmax on one CPU core, and jax.nn on all."""

import json
import os
import platform
import re
import statistics
import subprocess
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import results
from benchmarks.results import Row
from examples.worklog import common
from examples.worklog.common import SMALL, Shape, size, text


def naive(x):
    """No maximum; XLA writes the exponentials out."""
    weights = jnp.exp(x)
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def safe(x):
    """The maximum first; XLA writes the exponentials out, which a library's kernel computes with the maximum on the way."""
    weights = jnp.exp(x - jnp.max(x, axis=-1, keepdims=True))
    return weights / jnp.sum(weights, axis=-1, keepdims=True)


def online(x):
    """Two passes: the recurrence of maximum and sum in one loop, then the quotient.

    The recurrence is a reduction of pairs, which XLA compiles into a loop over a row that holds both in registers. A loop of
    JAX would start a kernel for each element, and one over columns would compute many rows at once: neither is serial code.
    """

    def merge(a, b):
        state = common.ladder().State
        return tuple(common.ladder().merge(state(*a), state(*b)))

    lowest, zero = np.finfo(np.float32).min, np.float32(0)
    m, d = lax.reduce((x, jnp.ones_like(x)), (lowest, zero), merge, (x.ndim - 1,))
    return jnp.exp(x - m[..., None]) / d[..., None]


SERIAL = {"naive": naive, "safe": safe, "online": online}
SERIAL_SHAPES: tuple[Shape, ...] = (SMALL, (1, 2**20))


def run_serial(*, one_core: bool, repeats: int = 50) -> None:
    """Times on the CPU, on the wall clock: the three functions on one core, `jax.nn` on all."""
    if one_core:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})  # before XLA starts its threads
    functions = SERIAL if one_core else {"jax.nn": jax.nn.softmax}
    options = f"cores={len(os.sched_getaffinity(0))} cpu={_cpu().replace(' ', '_')}"
    for shape in SERIAL_SHAPES:
        x = jax.device_put(np.random.default_rng(0).standard_normal(shape, np.float32))
        for name, function in functions.items():
            compiled = jax.jit(function).lower(x).compile()
            times = []
            for _ in range(repeats):
                start = time.perf_counter()
                jax.block_until_ready(compiled(x))
                times.append(1e6 * (time.perf_counter() - start))
            row = {"shape": text(shape), "options": options, "implementation": name, "us": statistics.median(times)}
            print(json.dumps(row), flush=True)


def _cpu() -> str:
    try:
        found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1].strip() if found else platform.machine()


def time_serial(path: Path, gpu: str, commit: str) -> list[str]:
    """Times the serial functions in processes of their own, where JAX sees the CPU alone; returns what went wrong."""
    flags = {"XLA_FLAGS": common.flags("--xla_cpu_multi_thread_eigen=false")}
    environments = {"serial": {"JAX_PLATFORMS": "cpu"} | flags, "parallel": {"JAX_PLATFORMS": "cpu"}}
    try:
        printed = [line for name, environment in environments.items() for line in common.child(name, environment)]
    except subprocess.CalledProcessError as problem:
        return [f"cpu: {problem}"]
    shared = common.origin(gpu, commit)
    shared |= {"op": "softmax", "pass_": "forward", "dtype": "float32", "flops": 0, "copy_share": None, "error": None}
    rows = [Row(**shared, **line, bytes=2 * size([int(n) for n in line["shape"].split("x")])) for line in printed]
    results.append(path, *rows)
    return []
