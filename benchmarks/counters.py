"""Reads hardware counters of one call of attention by Nsight Compute (`ncu`), for ours and its peers side by side.

python -m benchmarks.counters --list                     print the cells, and measure nothing
python -m benchmarks.counters --only '4x4096x16x128 causal=1$' --only ' forward '
                                                         all patterns must match, and one cell must be left
python -m benchmarks.counters --only ... --contenders ours,cudnn

Each contender has a process under `ncu`, which makes a few calls to warm up and then counts those kernels that one more call
runs. The clocks are left as they are. Cycles compare kernels whatever the clocks are; `attention_cool` and
`attention_sustained` of `python -m benchmarks` say how long calls take. Kernels of a call are added up where a sum means
something.
"""

import argparse
import csv
import ctypes
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from benchmarks import harness, sustained
from benchmarks.cells import OURS, Cell

WARM_UPS = 5  # calls before the one that counts
_STALLS = (
    *("long_scoreboard", "short_scoreboard", "wait", "barrier", "gmma", "sleeping", "math_pipe_throttle", "mio_throttle"),
    *("membar", "branch_resolve", "dispatch_stall", "no_instruction", "not_selected"),
)
# What `ncu` is asked for, and what it is. Those that it does not know on a GPU are left out.
METRICS = {
    "gpu__time_duration.sum": "time, ns",
    "sm__cycles_elapsed.max": "cycles of a multiprocessor",
    "sm__inst_executed.sum": "instructions of warps",
    "sm__inst_executed_pipe_tensor_op_gmma.sum": "of them wgmma",
    "sm__inst_executed_pipe_alu.sum": "of them ALU",
    "sm__inst_executed_pipe_fma.sum": "of them FMA",
    "sm__inst_executed_pipe_xu.sum": "of them XU",
    "sm__pipe_tensor_op_gmma_cycles_active.avg.pct_of_peak_sustained_elapsed": "wgmma pipe busy, %",
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": "tensor cores busy, %",
    "lts__t_sectors_op_read.sum": "L2 sectors read",
    "l1tex__data_bank_conflicts_pipe_lsu.sum": "bank conflicts",
    **{
        f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio": f"warps stalled an issue: {name}"
        for name in _STALLS
    },
}
_ADDED_UP = (".sum", ".max")  # the ends of metrics whose sum over kernels means something


@dataclass
class Kernel:
    """One kernel of a call, and what each metric says of it."""

    name: str
    values: dict[str, float] = field(default_factory=dict)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    options = _parser().parse_args(argv)
    cells = [cell for cell in sustained.cool_cells() if all(pattern.search(cell.name) for pattern in options.only)]
    if options.list:
        print("\n".join(cell.name for cell in cells))
        return 0
    try:
        cell = _only(cells)
        if options.launch is not None:
            launch(cell, options.launch)
            return 0
        print(table(_measured(cell, options)))
    except (ValueError, OSError, RuntimeError) as problem:
        print(f"error: {problem}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m benchmarks.counters", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--list", action="store_true", help="print the cells that match, and measure nothing")
    parser.add_argument(
        "--only", type=re.compile, action="append", default=[], metavar="REGEX", help="matched in the name of the cell"
    )
    parser.add_argument(
        "--contenders", default=f"{OURS},flash_attention_3", metavar="A,B", help="default: ours,flash_attention_3"
    )
    parser.add_argument("--ncu", default="ncu", metavar="PATH", help="the program; default: that of the PATH")
    parser.add_argument("--launch", metavar="NAME", help="make the calls of this contender that ncu looks at")
    return parser


def _only(cells: Sequence[Cell]) -> Cell:
    if len(cells) != 1:
        names = ", ".join(cell.name for cell in cells[:5])
        raise ValueError(f"argument --only: must leave one cell, leaves {len(cells)}{': ' * bool(names)}{names}; see --list")
    return cells[0]


def _measured(cell: Cell, options: argparse.Namespace) -> dict[str, list[Kernel]]:
    """Maps contenders to the kernels of a call. Those that are not installed are left out, and named."""
    names = [name.strip() for name in options.contenders.split(",")]
    contenders = {contender.name: contender for contender in cell.contenders}
    if unknown := [name for name in names if name not in contenders]:
        raise ValueError(f"argument --contenders: no {', '.join(unknown)}; choose from {', '.join(contenders)}")
    if shutil.which(options.ncu) is None:
        raise ValueError(f"argument --ncu: there is no program {options.ncu!r}")
    metrics, result = known_metrics(options.ncu), {}
    for name in names:
        if (missing := contenders[name].missing()) is not None:
            print(f"{missing}, its {name} left out")
            continue
        only = f"--only=^{re.escape(cell.name)}$"
        result[name] = kernels_of([sys.executable, "-m", "benchmarks.counters", only, "--launch", name], options.ncu, metrics)
    return result


def launch(cell: Cell, name: str) -> None:
    """Calls a contender, and tells the profiler which of the calls counts."""
    if harness.gpu_name() is None:
        raise ValueError("JAX sees no GPU, and there is nothing to count without one")
    (contender,) = [contender for contender in cell.contenders if contender.name == name]
    arguments = contender.prepare(*cell.inputs(jax.random.key(0), False))
    function = jax.jit(contender.build())
    for _ in range(WARM_UPS):
        jax.block_until_ready(function(*arguments))
    cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
    _ask(cuda, "cuDevicePrimaryCtxRetain", ctypes.byref(context), harness.gpu_ordinal())  # that of JAX
    _ask(cuda, "cuCtxSetCurrent", context)
    _ask(cuda, "cuProfilerStart")
    jax.block_until_ready(function(*arguments))
    _ask(cuda, "cuProfilerStop")


def _ask(cuda: Any, name: str, *arguments: Any) -> None:
    status = getattr(cuda, name)(*arguments)
    if status:
        raise RuntimeError(f"CUDA's {name} fails: error {status}")


def known_metrics(ncu: str) -> list[str]:
    """Asks `ncu` which of `METRICS` this GPU has; all, if it names none of them."""
    answer = subprocess.run([ncu, "--query-metrics"], capture_output=True, text=True, check=False)
    named = {line.split()[0] for line in answer.stdout.splitlines() if line.strip()}
    return [metric for metric in METRICS if _base(metric) in named] or list(METRICS)


def kernels_of(command: Sequence[str], ncu: str, metrics: Sequence[str]) -> list[Kernel]:
    """Runs a command under `ncu`, and again without the metrics that it does not find.

    Raises:
      RuntimeError: it counts nothing; with what it says.
    """
    while True:
        log, said = _run(command, ncu, metrics)
        kernels = parse(log)
        if kernels:
            return kernels
        errors = "\n".join(line for line in (log + said).splitlines() if "==ERROR==" in line)
        found = [metric for metric in metrics if not re.search(rf"\b{_base(metric)}\b", errors)]
        if not found or len(found) == len(metrics):
            raise RuntimeError(f"{ncu} counts nothing:\n{(log + said)[-2000:]}")
        metrics = found


def _run(command: Sequence[str], ncu: str, metrics: Sequence[str]) -> tuple[str, str]:
    """Returns what `ncu` wrote, and what it and the command printed."""
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log.csv"
        options = ["--csv", "--page", "details", "--print-units", "base", "--clock-control", "none"]
        options += ["--profile-from-start", "off", "--log-file", str(log), "--metrics", ",".join(metrics)]
        # ncu saves what a kernel may write before it runs it again, which would be most of the GPU's memory.
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
        answer = subprocess.run(
            [ncu, *options, *command], capture_output=True, text=True, check=False, cwd=harness.ROOT, env=os.environ | memory
        )
        return log.read_text() if log.exists() else "", answer.stdout + answer.stderr


def _base(metric: str) -> str:
    """The name of a counter without what is made of it."""
    return metric.partition(".")[0]


def parse(text: str) -> list[Kernel]:
    """Reads the kernels, in order, from CSV with a line for each kernel and metric; lines before its header are others'."""
    lines = text.splitlines()
    start = next((at for at, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    kernels: dict[str, Kernel] = {}
    for row in csv.DictReader(line for line in lines[start:] if line.startswith('"')):
        kernel = kernels.setdefault(row["ID"], Kernel(short(row["Kernel Name"])))
        value = row["Metric Value"].replace(",", "")
        if re.fullmatch(r"-?[\d.]+(e[+-]?\d+)?", value):  # n/a where it could not be counted
            kernel.values[row["Metric Name"]] = float(value)
    return list(kernels.values())


def short(name: str) -> str:
    """Shortens a kernel's name to a class that a template names, such as `FlashAttnFwdSm90`, or to that of the function."""
    function = re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-1].split()[-1]
    named = re.search(r"<.*?\b([A-Z]\w{3,})", name)
    return named[1] if named else function


def table(measured: dict[str, list[Kernel]]) -> str:
    """Writes metrics of all kernels side by side; of several kernels of a contender, their sums too."""
    columns = [(name, kernel) for name, kernels in measured.items() for kernel in _with_sum(kernels)]
    rows = [["", *(name for name, _ in columns)], ["", *(kernel.name for _, kernel in columns)]]
    for metric, words in METRICS.items():
        if any(metric in kernel.values for _, kernel in columns):
            rows.append([words, *(_number(kernel.values.get(metric)) for _, kernel in columns)])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        row[:] = [row[0].ljust(widths[0]), *(text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True))]
    return "\n".join(map("  ".join, rows))


def _with_sum(kernels: Sequence[Kernel]) -> Sequence[Kernel]:
    if len(kernels) < 2:
        return kernels
    common = [metric for metric in METRICS if metric.endswith(_ADDED_UP) and all(metric in kernel.values for kernel in kernels)]
    return [*kernels, Kernel("all", {metric: sum(kernel.values[metric] for kernel in kernels) for metric in common})]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.2f}"


if __name__ == "__main__":
    sys.exit(main())
