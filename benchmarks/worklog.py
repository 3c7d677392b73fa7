"""Measures the rungs of examples/softmax_worklog.py, and writes the tables and figures of docs/worklog.md.

python -m benchmarks.worklog              all parts, in the order below
python -m benchmarks.worklog times        run times of rungs and peers, of softmax with top-k and of attention
python -m benchmarks.worklog bytes        bytes that they move, by the GPU's counters, which Nsight Compute reads
python -m benchmarks.worklog cpu          naive, safe and online softmax on one CPU core, and jax.nn on all
python -m benchmarks.worklog page check   tables and figures from the result files; the page's claims. Neither needs a GPU

Result files are worklog.csv, worklog_bytes.csv and worklog_cpu.csv; the newest run of each counts. In the first and the last,
`bytes` counts one read and one write whatever a rung moves: its own bytes are those that the example predicts.
"""

import argparse
import csv
import dataclasses
import functools
import importlib
import itertools
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import attention, harness, plot, results, softmax
from benchmarks.cells import Cell, Contender, torch
from benchmarks.check import sampled
from benchmarks.results import Origin, Row
from tests import oracle

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "worklog.md"
PARTS = ("times", "bytes", "cpu", "page", "check")
MEASURING = frozenset({"times", "bytes", "cpu"})

Shape = tuple[int, int]

LONG: Shape = (1024, 131072)  # 512 KB a row: those in flight do not fit the cache, and a second read is one of memory
ON_CHIP: Shape = (4096, 32768)  # the longest rows that the library keeps on chip
SHORT: Shape = (131072, 1024)  # rows that the cache still holds when they are read again
LADDERS = (LONG, ON_CHIP, SHORT)
HUGE: Shape = (8, 2**24)
COUNTED = (HUGE, ON_CHIP, SHORT)
FROM_MEMORY = (HUGE, ON_CHIP)  # where a second read is one of memory
VECTOR: Shape = (1, 2**24)
OF_A_WRITE_UP: Shape = (1024, 32768)
SMALL: Shape = (1024, 512)
HALVES = tuple(itertools.product((32, 64), (512, 1024, 2048, 4096, 8192)))
SIZES = tuple(2**n for n in range(10, 29, 2))
ROW = 1024  # of the figure, whose first rows the cache holds when they are read again, and whose longer ones it does not
LONG_ROW = 131072

PEERS = ("jax.nn", "torch")
OF_VECTORS = ("tree", "online_blocks")  # the rungs that spread one row over the whole GPU
OF_ONE_VECTOR = (*OF_VECTORS, "fused", "online_wide")
REFERENCE = "online_wide"  # with which the other rungs' times and bytes are compared
NUMBERS_COUNTED = frozenset("2457")  # of the rungs whose bytes are held to their predictions

K = 5
OF_TOP_K = ("naive", "fused", "online_wide", "on_chip")
ATTENTION = attention.Call(batch=4, length=4096, heads=16, head_size=128)
WAYS_OF_ATTENTION = ("attention_written", "attention_fused")

OPERATIONS = 5  # an element: compare, subtract, exponentiate, add, divide
PEAK = 67e12  # float32 operations a second, of the GPU's data sheet

EFFORT = harness.Effort(calls=3)
AT_LEAST = 0.8  # of a rung's own roofline
RATIO_WITHIN = 0.15
BYTES_WITHIN = 0.1


@functools.cache
def ladder() -> Any:
    """The example, as a module."""
    sys.path.append(str(ROOT / "examples"))
    return importlib.import_module("softmax_worklog")


def takes(rung: Any, shape: Shape, dtype: str = "float32") -> bool:
    return rung.unsupported(*shape, jnp.dtype(dtype)) is None


def text(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


def size(shape: Sequence[int], dtype: str = "float32") -> int:
    return int(np.prod(shape)) * jnp.dtype(dtype).itemsize


# Times.


def cells(elements: int = softmax.ELEMENTS) -> list[Cell]:
    """All that is timed; the copy comes first, with which the others are compared."""
    of_rows = [*LADDERS, OF_A_WRITE_UP, SMALL, *_rows_of(ROW).values(), *_rows_of(LONG_ROW).values()]
    vectors = [(1, count) for count in SIZES if (1, count) not in of_rows]
    return [
        softmax.copy_cell("float32", elements),
        *(_cell("float32", shape) for shape in of_rows),
        *(_cell("float32", shape, OF_ONE_VECTOR if shape == VECTOR else OF_VECTORS) for shape in vectors),
        *(_cell("float16", shape) for shape in HALVES),
        _cell_of_top_k(ON_CHIP),
        dataclasses.replace(attention.cell_of(ATTENTION), contenders=tuple(map(_way, WAYS_OF_ATTENTION))),
    ]


def _rows_of(cols: int) -> dict[int, Shape]:
    """The figure's sizes that have whole rows of so many columns."""
    return {count: (count // cols, cols) for count in SIZES if count >= cols}


def _way(name: str) -> Contender:
    return Contender(name, lambda: getattr(ladder(), name))


def _cell(dtype: str, shape: Shape, names: Sequence[str] | None = None) -> Cell:
    """Softmax along the rows of an array, by the rungs of these names, None for all, and the peers."""
    rungs = [rung for rung in ladder().RUNGS if takes(rung, shape, dtype) and (names is None or rung.name in names)]
    return Cell(
        "softmax",
        "forward",
        dtype,
        shape,
        "",
        2 * size(shape, dtype),
        softmax.one_array(shape, dtype),
        (
            *(Contender(rung.name, lambda rung=rung: rung.softmax) for rung in rungs),
            Contender("jax.nn", lambda: jax.nn.softmax),
            softmax.of_torch("softmax"),
        ),
        lambda x: [oracle.softmax(x)],
        sample=_sample,
    )


@jax.jit
def _states(x):
    """Maximum and sum of every row; sums of float64 on the device, as no row of millions is brought to the host."""
    m = jnp.max(x, axis=1, keepdims=True).astype(jnp.float64)
    return m, jnp.sum(jnp.exp(x.astype(jnp.float64) - m), axis=1, keepdims=True)


@jax.jit
def _part(array, rows, cols):
    return array[rows[:, None], cols[None, :]]


def _sample(inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Some columns of some rows, the first and the last ones among them, and the truth of them."""
    at = tuple(map(sampled, output.shape))
    with jax.enable_x64(True):
        m, d = (np.asarray(state)[at[0]] for state in _states(inputs[0]))
    scores = oracle.to64(_part(inputs[0], *at))
    y = np.exp(scores - m) / d
    rows = oracle.Rows(scores, np.ones(y.shape, bool), m, d, y, (1,))
    truth = oracle.Truth(y, (8 + 3 * rows.distance) * oracle.EPS * y + oracle.TINY)
    return [(np.asarray(_part(output, *at)), truth)]


def _top_k_of(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Any]:
    return lambda x: lax.top_k(function(x), K)


def _cell_of_top_k(shape: Shape) -> Cell:
    """Softmax, and the largest of its values in a second step: the unfused way that the paper compares with."""
    rungs = [rung for rung in ladder().RUNGS if rung.name in OF_TOP_K and takes(rung, shape)]
    return Cell(
        "softmax_top_k",
        "forward",
        "float32",
        shape,
        f"k={K}",
        size(shape),
        softmax.one_array(shape, "float32"),
        (
            *(Contender(rung.name, lambda rung=rung: _top_k_of(rung.softmax)) for rung in rungs),
            Contender("jax.nn", lambda: _top_k_of(jax.nn.softmax)),
            softmax.torch_contender("torch", lambda: lambda x: torch().topk(torch().softmax(x, -1), K).values),
        ),
        lambda x: [oracle.softmax(x)],
        sample=_sample_of_top_k,
    )


def _sample_of_top_k(inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    values = jax.tree.leaves(output)[0]
    at = sampled(values.shape[0])
    truth = oracle.softmax(np.asarray(inputs[0][jnp.asarray(at)]))
    order = np.argsort(-truth.value, axis=1)[:, :K]
    largest = oracle.Truth(*(np.take_along_axis(array, order, axis=1) for array in (truth.value, truth.budget)))
    return [(np.asarray(values)[at], largest)]


# Bytes, counted.


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
    rungs = ladder().RUNGS
    for shape in COUNTED:
        for rung in rungs:
            if takes(rung, shape):
                yield Case("softmax", "float32", shape, rung.name, rung.bytes(*shape, "float32"), rung.softmax)
    for rung in rungs:
        if rung.name in OF_TOP_K and takes(rung, ON_CHIP):
            predicted = rung.bytes(*ON_CHIP, "float32") + size(ON_CHIP)
            yield Case("softmax_top_k", "float32", ON_CHIP, rung.name, predicted, _top_k_of(rung.softmax))
    predictions = ladder().attention_bytes(ATTENTION.shape, jnp.dtype(ATTENTION.dtype))
    for name in WAYS_OF_ATTENTION:
        function = getattr(ladder(), name)
        yield Case("attention", ATTENTION.dtype, ATTENTION.shape, name, predictions[name], function, inputs=3)


def run_cases() -> None:
    """Runs every case once between its two marks, and prints a line for each; Nsight Compute watches."""
    before, behind = (jax.jit(function).lower(jnp.float32(1)).compile() for function in (jnp.cos, jnp.tanh))
    one = jax.device_put(np.float32(1))
    for case in cases():
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


def count(path: Path, gpu: str, commit: str) -> list[str]:
    """Counts the bytes of all cases in a process of their own; returns what could not be counted."""
    ncu = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        metrics = ",".join(metric for metric, _ in METRICS.values())
        options = ["--clock-control", "none", "--csv", "--print-units", "base", "--metrics", metrics, "--log-file", str(log)]
        # Buffers of their own: of a pool, all would be saved and restored around each kernel that is replayed.
        environment = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
        environment |= {"XLA_FLAGS": _flags("--xla_gpu_enable_command_buffer=")}  # a kernel at a time, not graphs of them
        try:
            printed = _child("cases", environment, [ncu, *options])
            groups = parse(log.read_text())
        except subprocess.CalledProcessError as problem:
            said = re.findall(r"^==ERROR== .*", log.read_text(), re.MULTILINE) if log.exists() else []
            return [f"bytes: {' '.join([str(problem), *said])}"]
        except (OSError, ValueError) as problem:
            return [f"bytes: {problem}"]
    if len(groups) != len(printed):
        return [f"bytes: {len(printed)} cases ran, and ncu saw {len(groups)}"]
    origin, problems, found = _origin(gpu, commit), [], []
    for line, group in zip(printed, groups, strict=True):
        columns: dict[str, Any] = {**origin, **line, **group}
        if (problem := columns.pop("problem")) is None:
            found.append(Counted(**columns))
        else:
            problems.append(f"bytes: {line['op']} {line['shape']} {line['implementation']}: {problem}")
    results.append_lines(path, results.columns_of(Counted), map(dataclasses.astuple, found))
    return problems


def _flags(more: str) -> str:
    return f"{os.environ.get('XLA_FLAGS', '')} {more}".strip()


def _child(name: str, environment: dict[str, str], wrapper: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What this module prints in a process of its own, a line of JSON a case."""
    command = [*wrapper, sys.executable, "-m", "benchmarks.worklog", "--child", name]
    run = subprocess.run(command, cwd=ROOT, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith("{")]


def _origin(gpu: str, commit: str) -> dict[str, Any]:
    return dataclasses.asdict(Origin(results.new_run(), results.now(), gpu, jax.__version__, commit))


def read_counted(path: Path) -> list[Counted]:
    """The newest run of a file of counted bytes.

    Raises:
      ValueError: the file has other columns, ends inside a row, or holds a row that cannot be read; with its line.
    """
    results.check(path, results.columns_of(Counted))
    kinds: dict[str, Any] = {field.name: field.type for field in dataclasses.fields(Counted)}
    found = []
    with path.open(newline="") as file:
        for line, record in enumerate(csv.DictReader(file), start=2):
            try:
                found.append(Counted(**{name: kinds[name](value) for name, value in record.items()}))
            except (KeyError, TypeError, ValueError) as problem:
                raise ValueError(f"{path}, line {line}: {problem}") from None
    return [one for one in found if one.run == found[-1].run]


# The serial comparison.


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
        state = ladder().State
        return tuple(ladder().merge(state(*a), state(*b)))

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
    flags = {"XLA_FLAGS": _flags("--xla_cpu_multi_thread_eigen=false")}
    environments = {"serial": {"JAX_PLATFORMS": "cpu"} | flags, "parallel": {"JAX_PLATFORMS": "cpu"}}
    try:
        printed = [line for name, environment in environments.items() for line in _child(name, environment)]
    except subprocess.CalledProcessError as problem:
        return [f"cpu: {problem}"]
    common = _origin(gpu, commit)
    common |= {"op": "softmax", "pass_": "forward", "dtype": "float32", "flops": 0, "copy_share": None, "error": None}
    rows = [Row(**common, **line, bytes=2 * size([int(n) for n in line["shape"].split("x")])) for line in printed]
    results.append(path, *rows)
    return []


CHILDREN = {
    "cases": run_cases,
    "serial": functools.partial(run_serial, one_core=True),
    "parallel": functools.partial(run_serial, one_core=False),
}


# What was measured.


@dataclass(frozen=True)
class Measured:
    """The newest runs of the three result files, empty where there is none."""

    times: list[Row]
    counted: list[Counted]
    serial: list[Row]

    @classmethod
    def read(cls, folder: Path) -> "Measured":
        def rows(name: str) -> list[Row]:
            path = folder / f"{name}.csv"
            found = results.read(path) if path.exists() else []
            return results.newest(found) if found else []

        counted = folder / "worklog_bytes.csv"
        return cls(rows("worklog"), read_counted(counted) if counted.exists() else [], rows("worklog_cpu"))

    def time(self, name: str, shape: Sequence[int], dtype: str = "float32", op: str = "softmax") -> float | None:
        """Microseconds, or None."""
        key = op, dtype, text(shape), name
        return next((r.us for r in self.times if (r.op, r.dtype, r.shape, r.implementation) == key), None)

    def bytes(self, name: str, shape: Sequence[int], op: str = "softmax") -> Counted | None:
        key = op, text(shape), name
        return next((one for one in self.counted if (one.op, one.shape, one.implementation) == key), None)

    @property
    def copy_speed(self) -> float | None:
        """Bytes a microsecond of the copy."""
        return next((row.speed for row in self.times if row.op == "copy"), None)

    def share(self, rung: Any, shape: Shape) -> float | None:
        """Of a rung's own roofline: its predicted bytes over its time, as a share of the copy's speed."""
        us, copy_speed = self.time(rung.name, shape), self.copy_speed
        return rung.bytes(*shape, "float32") / us / copy_speed if us and copy_speed else None


# The page.


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; the first column is of words, the others of figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _figure(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _us(value: float | None) -> str:
    return _figure(value, ".0f" if value and value >= 1000 else ".1f" if value and value >= 10 else ".2f")


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _times(value: float | None) -> str:
    return _figure(value, ".2f" if value and value >= 0.1 else ".2g", "x")


def _table_of_rungs(_: Measured) -> str:
    rows = ([r.number, f"`{r.name}`", r.title, str(r.reads), str(r.writes), r.teaches] for r in ladder().RUNGS)
    return "\n".join(
        [
            "| rung | name | what it is | reads | writes | what it teaches |",
            "|---|---|---|---:|---:|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def _table_of_run(measured: Measured) -> str:
    """What the tables were measured on."""
    files = (("times", measured.times), ("bytes", measured.counted), ("cpu", measured.serial))
    rows = [[name, *(getattr(run[0], key) for key in ("gpu", "jax", "commit", "run"))] for name, run in files if run]
    return table(("part", "GPU", "JAX", "commit", "run"), rows)


def _ladder(shape: Shape, measured: Measured) -> str:
    rungs = {rung.name: rung for rung in ladder().RUNGS}
    reference = rungs.get(REFERENCE)
    rows = []
    for name, rung in rungs.items():
        if (us := measured.time(name, shape)) is None:
            continue
        times = _quotient(us, measured.time(REFERENCE, shape))
        passes = _quotient(rung.passes, reference and reference.passes)
        speed, share = rung.bytes(*shape, "float32") / us / 1e3, _figure(measured.share(rung, shape))
        words = f"{rung.number} `{name}`", f"{rung.passes}N"
        rows.append([*words, _us(us), f"{speed:.0f}", share, _times(passes), _times(times)])
    for name in PEERS:
        if (us := measured.time(name, shape)) is not None:
            rows.append([name, "-", _us(us), "-", "-", "-", _times(_quotient(us, measured.time(REFERENCE, shape)))])
    if measured.copy_speed and rows:
        us = 2 * size(shape) / measured.copy_speed
        rows.append(["the copy's speed", "2N", _us(us), f"{measured.copy_speed / 1e3:.0f}", "1.00", "-", "-"])
    header = ("rung", "bytes", "us", "GB/s of these bytes", "of its roofline")
    return table((*header, f"bytes, of `{REFERENCE}`'s", f"time, of `{REFERENCE}`'s"), rows)


def _table_of_vector(measured: Measured) -> str:
    found = [name for name in (*OF_ONE_VECTOR, *PEERS) if measured.time(name, VECTOR) is not None]
    rows = [[f"`{name}`", _figure((measured.time(name, VECTOR) or 0) / 1e3, ".4f")] for name in found]
    return table(("1 x 16777216, float32", "ms"), rows)


def _table_of_halves(measured: Measured) -> str:
    names = ("naive", "online_thread", "fused", "online_lanes", "online_wide", "on_chip", *PEERS)
    rows = []
    for shape in HALVES:
        times = {name: measured.time(name, shape, "float16") for name in names}
        if any(times.values()):
            cells = [f"{_us(us)} ({_times(_quotient(times['naive'], us))})" if us else "-" for us in times.values()]
            rows.append([f"{shape[0]} x {shape[1]}", *cells])
    columns = [f"`{name}`" for name in names]
    return table(("float16, us (speed-up over `naive`)", *columns), rows)


def _table_of_small(measured: Measured) -> str:
    rows, naive_us = [], measured.time("naive", SMALL)
    for name in (*(rung.name for rung in ladder().RUNGS), *PEERS):
        if us := measured.time(name, SMALL):
            elements = np.prod(SMALL) / us / 1e3
            rows.append([f"`{name}`", _us(us), f"{elements:.1f}", _times(_quotient(naive_us, us))])
    return table(("1024 x 512, float32", "latency, us", "throughput, 10^9 elements/s", "speed-up over `naive`"), rows)


def _table_of_cpu(measured: Measured) -> str:
    rows = []
    for row in measured.serial:
        shape = tuple(map(int, row.shape.split("x")))
        options = dict(word.split("=", 1) for word in row.options.split())
        safe_us = next((r.us for r in measured.serial if (r.shape, r.implementation) == (row.shape, "safe")), None)
        on_gpu = _us(measured.time("on_chip", shape))
        where = f"{options['cores']} of {options['cpu'].replace('_', ' ')}"
        rows.append([f"`{row.implementation}`, {row.shape}", where, _us(row.us), _times(_quotient(row.us, safe_us)), on_gpu])
    return table(("float32", "cores", "us", "of safe's time", "`on_chip` on the GPU, us"), rows)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.0f}"


def _cells_of_bytes(one: Counted) -> list[str]:
    figures = (one.predicted, one.dram, one.dram_read, one.dram_write, one.requested)
    return [*map(_megabytes, figures), f"{one.dram / one.predicted:.2f}", f"{one.requested / one.predicted:.2f}"]


_BYTES = ("predicted, MB", "DRAM, MB", "read", "written", "requested, MB", "DRAM / predicted", "requested / predicted")


def _bytes(shape: Shape, measured: Measured) -> str:
    found = ((rung, measured.bytes(rung.name, shape)) for rung in ladder().RUNGS)
    rows = [[f"{rung.number} `{rung.name}`", f"{rung.passes}N", *_cells_of_bytes(one)] for rung, one in found if one]
    return table(("rung", "passes", *_BYTES), rows)


def _table_of_attention(measured: Measured) -> str:
    rows = []
    for name in WAYS_OF_ATTENTION:
        us = measured.time(name, ATTENTION.shape, ATTENTION.dtype, "attention")
        one = measured.bytes(name, ATTENTION.shape, "attention")
        if us or one:
            rows.append([f"`{name}`", _us(us), *(_cells_of_bytes(one) if one else ["-"] * len(_BYTES))])
    return table((f"{text(ATTENTION.shape)}, {ATTENTION.dtype}", "us", *_BYTES), rows)


# Of the paper's abstract, which names no GPU.
PAPER = "arXiv:1805.02867"
PAPERS_RUNGS = {"naive": "naive", "fused": "safe", "online_wide": "online"}


def _table_of_accesses(measured: Measured) -> str:
    rows = []
    for rung in ladder().RUNGS:
        if (paper := PAPERS_RUNGS.get(rung.name)) is None:
            continue
        one, shape = measured.bytes(rung.name, HUGE), LONG
        us, safe_us = measured.time(rung.name, shape), measured.time("fused", shape)
        if one or us:
            counted = _figure(one.requested / size(HUGE) if one else None)
            published = "up to 1.3x" if paper == "online" else "-"
            rows.append([f"{paper} (`{rung.name}`)", str(rung.passes), counted, _times(_quotient(safe_us, us)), published])
    return table(("accesses an element", "predicted", "requested, counted", "speed-up over safe", f"in {PAPER}"), rows)


def _table_of_top_k(measured: Measured) -> str:
    rows, op = [], "softmax_top_k"
    passes = {rung.name: rung.passes for rung in ladder().RUNGS}
    for name in (*OF_TOP_K, *PEERS):
        us, one = measured.time(name, ON_CHIP, op=op), measured.bytes(name, ON_CHIP, op)
        if us or one:
            predicted = str(passes[name] + 1) if name in passes else "-"
            counted, alone = one.requested / size(ON_CHIP) if one else None, measured.time(name, ON_CHIP)
            rows.append([f"`{name}`, then top {K}", predicted, _figure(counted), _us(us), _us(alone)])
    return table(("4096 x 32768, float32", "accesses, predicted", "requested, counted", "us", "softmax alone, us"), rows)


# The second kernel of Maharshi Pandya's worklog and PyTorch as its text gives them, and its last kernel as its plot does.
WRITE_UP = "GTX 1050 Ti"
OF_WRITE_UP = {"online_thread": 88.15, "online_wide": 4.11, "torch": 7.226}


def _table_of_write_up(measured: Measured) -> str:
    rows = []
    for name in (*(rung.name for rung in ladder().RUNGS), *PEERS):
        if us := measured.time(name, OF_A_WRITE_UP):
            published = OF_WRITE_UP.get(name)
            rows.append([f"`{name}`", f"{us / 1e3:.4f}", _figure(published), WRITE_UP if published else "-"])
    return table(("1024 x 32768, float32", "ms", "published ms", "on"), rows)


TABLES: dict[str, Callable[[Measured], str]] = {
    "rungs": _table_of_rungs,
    "run": _table_of_run,
    "ladder long": functools.partial(_ladder, LONG),
    "ladder on chip": functools.partial(_ladder, ON_CHIP),
    "ladder short": functools.partial(_ladder, SHORT),
    "vector": _table_of_vector,
    "half": _table_of_halves,
    "small": _table_of_small,
    "write-up": _table_of_write_up,
    "cpu": _table_of_cpu,
    "bytes huge": functools.partial(_bytes, HUGE),
    "bytes on chip": functools.partial(_bytes, ON_CHIP),
    "bytes short": functools.partial(_bytes, SHORT),
    "attention": _table_of_attention,
    "accesses": _table_of_accesses,
    "top-k": _table_of_top_k,
}
_MARKED = re.compile(r"(<!-- table: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str, measured: Measured) -> str:
    """The page with its tables filled.

    Raises:
      ValueError: it has another table than there is, or lacks one.
    """
    found = [match["name"] for match in _MARKED.finditer(page)]
    if sorted(found) != sorted(TABLES):
        raise ValueError(f"the page's tables are {', '.join(found)}; they must be {', '.join(TABLES)}")
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match['name']](measured)}\n{match[3]}", page)


# Figures.

FIGURES = ("worklog_time.svg", "worklog_roofline.svg")
_COLOURS = ("#e8590c", "#c2255c", "#0c9c7c", "#3b82f6", "#2f9e44", "#a855f7", "#d19a00", "#0891b2", "#8d6e63", "#65a30d")


def _looks() -> dict[str, dict[str, Any]]:
    """A colour for each rung; peers are grey."""
    rungs = {rung.name: {"color": colour} for rung, colour in zip(ladder().RUNGS, itertools.cycle(_COLOURS), strict=False)}
    peers = {"jax.nn": {"color": plot.GREY, "linestyle": "-."}, "torch": {"color": plot.GREY, "linestyle": ":"}}
    return rungs | peers


def draw(measured: Measured, folder: Path) -> list[Path]:
    """Draws both figures into a folder, if there are times; returns their paths."""
    if not measured.times or measured.copy_speed is None:
        return []
    import matplotlib as mpl
    from matplotlib.figure import Figure

    newest, paths = measured.times[-1], [folder / name for name in FIGURES]
    for path, panels_of in zip(paths, (_draw_times, _draw_roofline), strict=True):
        with mpl.rc_context(plot.STYLE):
            figure = Figure(figsize=(10, 4.6), layout="constrained")
            _legend(figure, panels_of(figure, measured))
            figure.suptitle(f"softmax, float32, {newest.gpu}, jax {newest.jax}, {newest.commit}")
            figure.savefig(path, transparent=True, metadata={"Date": None})
    return paths


def _legend(figure: Any, panels: Any) -> None:
    """One for all panels, in rows."""
    found = [axis.get_legend_handles_labels() for axis in panels]
    entries = {label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)}
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=5, frameon=False)


def _draw_times(figure: Any, measured: Measured) -> Any:
    """Time against the number of elements: rows that the cache holds, rows that it does not, and one vector."""
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    shapes = _rows_of(ROW), _rows_of(LONG_ROW), {count: (1, count) for count in SIZES}
    names = tuple(_looks()), tuple(_looks()), (*OF_VECTORS, *PEERS)
    titles = f"rows of {ROW}", f"rows of {LONG_ROW}", "one vector"
    for axis, shape_of, chosen, title in zip(panels, shapes, names, titles, strict=True):
        for name in chosen:
            times = {n: measured.time(name, shape) for n, shape in shape_of.items()}
            points = [(n, us) for n, us in times.items() if us is not None]
            if points:
                axis.plot(*plot.transposed(points), **_looks()[name], label=name, marker="o", markersize=3, linewidth=1.2)
        limit = [2 * size((1, n)) / (measured.copy_speed or 1) for n in SIZES]
        axis.plot(SIZES, limit, color=plot.GREY, linestyle="--", linewidth=1.2, label="2N bytes at the copy's speed")
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES[::3])
        axis.set(yscale="log", xlabel="elements", title=title)
    panels[0].set_ylabel("us")
    return panels


def _draw_roofline(figure: Any, measured: Measured) -> Any:
    """Operations a second against operations a byte: each rung at its own bytes, where it was measured first of the ladders."""
    axis = figure.subplots()
    speed = (measured.copy_speed or 1) * 1e6
    intensities = np.array([0.1, PEAK / speed, 100])
    roof, label = np.minimum(PEAK, speed * intensities) / 1e9, "the copy's speed, peak of float32"
    axis.plot(intensities, roof, color=plot.GREY, label=label)
    for rung in ladder().RUNGS:
        if (shape := _first_timed(rung, measured)) is not None:
            us = measured.time(rung.name, shape) or 0
            operations = OPERATIONS * np.prod(shape)
            x, y = operations / rung.bytes(*shape, "float32"), operations / us / 1e3
            axis.plot([x], [y], **_looks()[rung.name], marker="o", linestyle="", label=rung.name)
    axis.axvline(OPERATIONS / 8, color=plot.GREY, linestyle=":", linewidth=1.2, label="5 operations for 8 bytes")
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="10^9 operations/s")
    return np.array([axis])


# Claims.


def _first_timed(rung: Any, measured: Measured) -> Shape | None:
    """The first shape of the ladders, or the vector, at which a rung was timed."""
    return next((shape for shape in (*LADDERS, VECTOR) if measured.time(rung.name, shape) is not None), None)


def misses(measured: Measured, page: Path) -> list[str]:
    """The claims that do not hold, in words."""
    return [*_slow_rungs(measured), *_wrong_ratios(measured), *_wrong_bytes(measured), *_stale(measured, page)]


def _slow_rungs(measured: Measured) -> Iterator[str]:
    """Where rungs are held to their roofline: the first of the ladders that they are on, and for two of them the vector."""
    for rung in ladder().RUNGS:
        if (first := _first_timed(rung, measured)) is None:
            yield f"{rung.name}: no time"
            continue
        for shape in dict.fromkeys((first, *([VECTOR] if rung.name in OF_VECTORS else []))):
            if not rung.slow and (share := measured.share(rung, shape) or 0) < AT_LEAST:
                yield f"{rung.name} {text(shape)}: {share:.3f} of its roofline, less than {AT_LEAST}"


def _wrong_ratios(measured: Measured) -> Iterator[str]:
    """Of rungs that memory bounds: two times are as their bytes."""
    for shape in (LONG, ON_CHIP):
        found = ((rung, measured.time(rung.name, shape)) for rung in ladder().RUNGS if not rung.slow)
        bound = [(rung, us) for rung, us in found if us is not None]
        for (a, us_of_a), (b, us_of_b) in itertools.combinations(bound, 2):
            times, passes = us_of_a / us_of_b, a.passes / b.passes
            if abs(times / passes - 1) > RATIO_WITHIN:
                yield f"{a.name} / {b.name} {text(shape)}: times {times:.3f}, bytes {passes:.3f}"


def _wrong_bytes(measured: Measured) -> Iterator[str]:
    for rung in (rung for rung in ladder().RUNGS if rung.number in NUMBERS_COUNTED):
        shape = next((shape for shape in FROM_MEMORY if takes(rung, shape)), None)
        if shape is None:  # its rows are so short that the cache serves every second read
            continue
        if (one := measured.bytes(rung.name, shape)) is None:
            yield f"{rung.name} {text(shape)}: no bytes counted"
        elif abs(one.dram / one.predicted - 1) > BYTES_WITHIN:
            yield f"{rung.name} {one.shape}: {one.dram / one.predicted:.3f} of the predicted bytes of memory"


def _stale(measured: Measured, page: Path) -> Iterator[str]:
    written = page.read_text()
    if rendered(written, measured) != written:
        yield f"{page.name} is not what the result files say: run the part `page`"


# The command line.


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 if a claim is missed or a part fails, 2 for what cannot be done."""
    options = _parser().parse_args(argv)
    if options.child:
        CHILDREN[options.child]()
        return 0
    chosen = [part for part in PARTS if part in options.parts or not options.parts]
    try:
        return _run(options, chosen)
    except (OSError, ValueError) as problem:
        return _fail(str(problem))


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m benchmarks.worklog", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", type=_part_of_all, metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="DIR", help="default: benchmarks/results")
    parser.add_argument("--gpu", metavar="NAME", help="the folder that the page is of; default: what was measured, or h200")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/worklog.md")
    parser.add_argument("--commit", metavar="HASH", help="the commit that is measured, where git cannot tell")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    return parser


def _part_of_all(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PARTS)}")
    return name


def _run(options: argparse.Namespace, chosen: Sequence[str]) -> int:
    problems, folder = [], options.results / (options.gpu or "h200")
    if MEASURING.intersection(chosen):
        gpu, commit = harness.gpu_name(), options.commit or harness.commit()
        if gpu is None:
            return _fail("JAX sees no GPU, and there is nothing to measure without one; choose page or check")
        if commit is None:
            return _fail("argument --commit: needed, as this is no git checkout")
        path = functools.partial(results.path_for, options.results, gpu)
        folder = folder if options.gpu else path("worklog").parent
        if "times" in chosen:
            run = harness.Run(gpu, commit, functools.partial(results.append, path("worklog")), effort=EFFORT)
            run.measure(cells())
            problems += run.problems
        if "bytes" in chosen:
            problems += count(path("worklog_bytes"), gpu, commit)
        if "cpu" in chosen:
            problems += time_serial(path("worklog_cpu"), gpu, commit)
    for problem in problems:
        print(f"not recorded: {problem}", file=sys.stderr)
    measured = Measured.read(folder)
    if not (measured.times or measured.counted or measured.serial or MEASURING.intersection(chosen)):
        return _fail(f"{folder} has no result file of the worklog")
    if "page" in chosen:
        options.page.write_text(rendered(options.page.read_text(), measured))
        print(options.page)
        try:
            print(*draw(measured, folder), sep="\n")
        except ImportError as problem:
            problems.append(f"no figures: {problem}")
            print(problems[-1], file=sys.stderr)
    if "check" in chosen:
        missed = misses(measured, options.page)
        print("\n".join([f"{len(missed)} claims missed", *missed]))
        problems += missed
    return 1 if problems else 0


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
