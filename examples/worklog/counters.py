"""The bytes that every rung moves, by the GPU's counters, which Nsight Compute reads."""

import csv
import dataclasses
import functools
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks import results
from benchmarks.results import Origin
from examples.worklog import common
from examples.worklog.cells import top_k_of
from examples.worklog.common import ATTENTION, COUNTED, MEDIUM, OF_TOP_K, TOP_K_SHAPES, WAYS_OF_ATTENTION, size, takes, text


@dataclass(frozen=True)
class Counted(Origin):
    """The bytes that all kernels of one call move.

    Attributes:
      op, dtype, shape, implementation: as in `results.Row`.
      kernels: how many kernels ran.
      predicted: the bytes of the passes over the array, or arrays.
      dram_read, dram_write: bytes that memory gives and takes.
      requested_read, requested_write: bytes that multiprocessors ask of the L2 cache, where their own does not have them, or
        send to it.
    """

    op: str
    dtype: str
    shape: str
    implementation: str
    kernels: int
    predicted: int
    dram_read: int
    dram_write: int
    requested_read: int
    requested_write: int

    @property
    def dram(self) -> int:
        return self.dram_read + self.dram_write

    @property
    def requested(self) -> int:
        return self.requested_read + self.requested_write


# The L2 cache of this GPU has two halves, and what one asks of the other would count twice, but for `srcunit_tex`.
METRICS = {
    "dram_read": ("dram__bytes_read.sum", 1),
    "dram_write": ("dram__bytes_write.sum", 1),
    "requested_read": ("lts__t_sectors_srcunit_tex_op_read.sum", 32),
    "requested_write": ("lts__t_sectors_srcunit_tex_op_write.sum", 32),
}
MARKS = ("cosine", "tanh")  # kernels before and behind a case, which calls neither function


@dataclass(frozen=True)
class Case:
    """One call whose bytes are counted."""

    op: str
    dtype: str
    shape: tuple[int, ...]
    implementation: str
    predicted: int
    function: Callable[..., Any]
    inputs: int = 1


def cases() -> Iterator[Case]:
    """What is counted."""
    rungs = common.ladder().RUNGS
    for shape in COUNTED:
        for rung in rungs:
            if takes(rung, shape):
                yield Case("softmax", "float32", shape, rung.name, rung.bytes(*shape, "float32"), rung.softmax)
    for rung in rungs:
        if rung.name in OF_TOP_K and takes(rung, MEDIUM):
            predicted = rung.bytes(*MEDIUM, "float32") + size(MEDIUM)
            yield Case("softmax_top_k", "float32", MEDIUM, rung.name, predicted, top_k_of(rung.softmax))
    for shape in (MEDIUM, *TOP_K_SHAPES):
        for way in common.ladder().WITH_TOP_K:
            if takes(way, shape):
                yield Case("softmax_top_k", "float32", shape, way.name, way.bytes(*shape, "float32"), way.softmax)
    predictions = common.ladder().attention_bytes(ATTENTION.shape, jnp.dtype(ATTENTION.dtype))
    for name in WAYS_OF_ATTENTION:
        function = getattr(common.ladder(), name)
        yield Case("attention", ATTENTION.dtype, ATTENTION.shape, name, predictions[name], function, inputs=3)


def run_cases(op: str | None = None) -> None:
    """Runs every case, or those of one op, once between its two marks, and prints a line for each; Nsight Compute watches."""
    before, behind = (jax.jit(function).lower(jnp.float32(1)).compile() for function in (jnp.cos, jnp.tanh))
    one = jax.device_put(np.float32(1))
    for case in cases():
        if op not in (None, case.op):
            continue
        arrays = [_on_device(case.shape, case.dtype, seed) for seed in range(case.inputs)]
        line: dict[str, Any] = {name: getattr(case, name) for name in ("op", "dtype", "implementation", "predicted")}
        problem = None
        try:
            function = jax.jit(case.function).lower(*arrays).compile()
        except Exception as failed:  # whatever a compiler raises is the reason to leave the case out
            problem, function = f"{type(failed).__name__}: {failed}".splitlines()[0][:200], None
        jax.block_until_ready(before(one))
        if function is not None:
            jax.block_until_ready(function(*arrays))
        jax.block_until_ready(behind(one))
        print(json.dumps({**line, "shape": text(case.shape), "problem": problem}), flush=True)


@functools.lru_cache(maxsize=3)
def _on_device(shape: tuple[int, ...], dtype: str, seed: int) -> jax.Array:
    """An array made by the host, so that no kernel makes it."""
    some = np.random.default_rng(seed).standard_normal(2**16, np.float32).astype(dtype)
    return jax.block_until_ready(jax.device_put(np.resize(some, shape)))


def parse(log: str) -> list[dict[str, int]]:
    """The sums of each case's kernels, from the CSV of Nsight Compute.

    Raises:
      ValueError: it is no such CSV, or its marks do not pair.
    """
    lines = log.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), None)
    if start is None:
        said = " ".join(line for line in lines if line.startswith("==ERROR==")) or "no table in what it wrote"
        raise ValueError(f"ncu: {said}")
    kernels: dict[str, tuple[str, dict[str, float]]] = {}
    for record in csv.DictReader(lines[start:]):
        _, metrics = kernels.setdefault(record["ID"], (record["Kernel Name"], {}))
        metrics[record["Metric Name"]] = float(record["Metric Value"].replace(",", ""))
    groups, group = [], None
    for name, metrics in kernels.values():
        if MARKS[0] in name:
            if group is not None:
                raise ValueError(f"ncu: a mark is missing after case {len(groups)}")
            group = dict.fromkeys(("kernels", *METRICS), 0)
        elif MARKS[1] in name:
            if group is None:
                raise ValueError(f"ncu: a mark is missing before case {len(groups) + 1}")
            groups.append(group)
            group = None
        elif group is not None:
            group["kernels"] += 1
            for field, (metric, unit) in METRICS.items():
                if metric not in metrics:
                    raise ValueError(f"ncu: no {metric} of {name}")
                group[field] += round(unit * metrics[metric])
    if group is not None:
        raise ValueError("ncu: the last mark is missing")
    return groups


def count(path: Path, gpu: str, commit: str, op: str | None = None) -> list[str]:
    """Counts the bytes of all cases, or of those of one op, in a process of their own; returns what could not be counted."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        metrics = ",".join(metric for metric, _ in METRICS.values())
        options = ["--clock-control", "none", "--csv", "--print-units", "base", "--metrics", metrics, "--log-file", str(log)]
        # Buffers of their own: of a pool, all would be saved and restored around each kernel that is replayed.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        environment |= {"XLA_FLAGS": common.flags("--xla_gpu_enable_command_buffer=")}  # a kernel at a time, not graphs of them
        try:
            printed = common.child("cases", environment, [ncu, *options], ["--op", op] if op else [])
            groups = parse(log.read_text())
        except subprocess.CalledProcessError as problem:
            said = re.findall(r"^==ERROR== .*", log.read_text(), re.MULTILINE) if log.exists() else []
            return [f"bytes: {' '.join([str(problem), *said])}"]
        except (OSError, ValueError) as problem:
            return [f"bytes: {problem}"]
    if len(groups) != len(printed):
        return [f"bytes: {len(printed)} cases ran, and ncu saw {len(groups)}"]
    origin, problems, found = common.origin(gpu, commit), [], []
    for line, group in zip(printed, groups, strict=True):
        columns: dict[str, Any] = {**origin, **line, **group}
        if (problem := columns.pop("problem")) is None:
            found.append(Counted(**columns))
        else:
            problems.append(f"bytes: {line['op']} {line['shape']} {line['implementation']}: {problem}")
    results.append_lines(path, results.columns_of(Counted), map(dataclasses.astuple, found))
    return problems
