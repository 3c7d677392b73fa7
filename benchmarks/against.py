"""Two checkouts beside each other: ours of this one and ours of another, by turns on the same machine.

Each has a process of its own, which lives for the whole run. Both processes have the cells, the truth and the clocks of this
checkout, and only `jaxsoftmax` from their own. In a round each of them has a turn while the other waits. The next round begins
with the other one, so that a drift of the clocks hits both alike.

A process answers questions, one JSON object a line: it enters a cell, which is to build it and to check its values, and then
takes turns.
"""

import contextlib
import csv
import hashlib
import importlib
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, astuple, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from benchmarks import harness
from benchmarks.cells import Cell, library
from benchmarks.harness import ROOT, Effort, Entrant, Run

SLOWER, FASTER = 1.02, 0.98  # a cell is one of these if the ratios of all rounds are beyond
_MEMORY = "0.45"  # of the GPU, at most, for each process: what one has taken it does not give back
_START = """
import importlib.util
import sys
here, own, setting = sys.argv[1:]
sys.path.insert(0, own)
import jaxsoftmax
sys.path[0] = here
folder = here + "/jaxsoftmax/_report"  # which holds the truth and the clock: both processes have those of this checkout
spec = importlib.util.spec_from_file_location(
    "jaxsoftmax._report", folder + "/__init__.py", submodule_search_locations=[folder]
)
sys.modules[spec.name] = jaxsoftmax._report = importlib.util.module_from_spec(spec)
spec.loader.exec_module(jaxsoftmax._report)
from benchmarks import against
against.work(setting)
"""
_HEADER = f"{'cell':64} {'here us':>10} {'there us':>10} {'ratio':>7} {'least':>7} {'largest':>7} {'bits':>6} implementation"


@dataclass(frozen=True)
class Row:
    """A cell in both checkouts.

    Attributes:
      cell: its name.
      here_us, there_us: the medians of rounds, in microseconds.
      ratio: the first of them by the second.
      least, largest: of the ratios of single rounds.
      bits: whether outputs are the `same` or `differ`; `-` where they differ, and may do so from call to call.
      implementation_here, implementation_there: what ran.
      commit_here, commit_there: `unknown` where git does not tell.
      gpu, jax: the GPU's name, and the version of JAX.
    """

    cell: str
    here_us: float
    there_us: float
    ratio: float
    least: float
    largest: float
    bits: str
    implementation_here: str
    implementation_there: str
    commit_here: str
    commit_there: str
    gpu: str
    jax: str

    @property
    def spread(self) -> str:
        """The ratio and its range in words."""
        return f"{self.ratio:.3f} ({self.least:.3f} to {self.largest:.3f})"

    def __str__(self) -> str:
        ran = " / ".join(dict.fromkeys((self.implementation_here, self.implementation_there)))
        ratios = f"{self.ratio:7.3f} {self.least:7.3f} {self.largest:7.3f}"
        return f"{self.cell:64} {self.here_us:10.2f} {self.there_us:10.2f} {ratios} {self.bits:>6} {ran}"


COLUMNS = tuple(column.name for column in fields(Row))


@dataclass
class Comparison:
    """Result of a comparison: rows, cells that were left out with reasons, and if ours is wrong or fails in this checkout."""

    rows: list[Row] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    is_wrong_here: bool = False

    def summary(self) -> str:
        """The geometric mean, the cells that are slower or faster in every round, and those left out."""
        lines = [f"{len(self.rows)} cells, {len(self.left_out)} left out"]
        if self.rows:
            lines[0] += f"; geometric mean of the ratios {statistics.geometric_mean(row.ratio for row in self.rows):.3f}"
            slower = [row for row in self.rows if row.least > SLOWER]
            faster = [row for row in self.rows if row.largest < FASTER]
            lines += [f"slower here, above {SLOWER} in every round: {len(slower)}", *map(_line, slower)]
            lines += [f"faster here, below {FASTER} in every round: {len(faster)}", *map(_line, faster)]
        return "\n".join([*lines, *(f"left out: {reason}" for reason in self.left_out)])


def _line(row: Row) -> str:
    return f"  {row.cell}: {row.spread}"


def ratios(here: Sequence[float], there: Sequence[float]) -> tuple[float, float, float]:
    """The ratio of the medians of times, and the least and the largest ratio of a round."""
    rounds = [one / other for one, other in zip(here, there, strict=True)]
    return statistics.median(here) / statistics.median(there), min(rounds), max(rounds)


def compare(
    suite: Callable[[], list[Cell]],
    cells: Iterable[Cell],
    there: Path,
    gpu: str,
    effort: Effort,
    *,
    implementation: str | None = None,
    path: Path | None = None,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> Comparison:
    """Measures cells of a suite here and in the checkout `there`; each row is said, and written to `path`, once it is found.

    Raises:
      OSError: `path` exists or cannot be written.
      ValueError: a checkout's package cannot be imported, or the suite's cells with it.
    """
    found = Comparison()
    setting = json.dumps([suite.__module__, suite.__qualname__, asdict(effort), implementation])
    with contextlib.ExitStack() as stack:
        write = _no_file
        if path is not None:
            file = stack.enter_context(path.open("x", buffering=1))
            write = csv.writer(file, lineterminator="\n").writerow
        write(COLUMNS)
        sides = [stack.enter_context(Side(name, root, setting)) for name, root in (("here", ROOT), ("there", there))]
        for side in sides:
            say(f"{side.name}: {side.root}, commit {side.commit}")
        say(f"on {gpu}, jax {jax.__version__}\n{_HEADER}")
        for cell in cells:
            try:
                row = _row(cell, sides, gpu, effort)
            except _LeftOutError as reason:
                found.left_out.append(f"{cell.name}: {reason}")
                found.is_wrong_here |= reason.is_wrong_here
                say(f"{found.left_out[-1]}, left out")
                continue
            found.rows.append(row)
            write([f"{value:.4f}" if isinstance(value, float) else value for value in astuple(row)])
            say(str(row))
    return found


def _no_file(row: Iterable[Any]) -> None:
    pass


class _LeftOutError(Exception):
    """Reason to leave a cell out. It also says if ours is wrong in this checkout."""

    def __init__(self, reason: str, is_wrong_here: bool):
        super().__init__(reason)
        self.is_wrong_here = is_wrong_here


def _row(cell: Cell, sides: Sequence["Side"], gpu: str, effort: Effort) -> Row:
    # On several devices collectives of one process would wait for those of the other.
    here, there = _answers(sides, "enter", at_once=cell.devices == 1, cell=cell.name, program=cell.program)
    times: dict[Side, list[float]] = {side: [] for side in sides}
    for _ in range(1 + effort.warm_ups):
        _answers(sides, "turn")
    for at in range(effort.rounds):
        order = sides[:: -1 if at % 2 else 1]
        for side, answer in zip(order, _answers(order, "turn"), strict=True):
            times[side].append(answer["us"])
    ratio, least, largest = ratios(*times.values())
    return Row(
        cell=cell.name,
        here_us=statistics.median(times[sides[0]]),
        there_us=statistics.median(times[sides[1]]),
        ratio=ratio,
        least=least,
        largest=largest,
        bits="same" if here["bits"] == there["bits"] else "differ" if cell.repeatable else "-",
        implementation_here=here["implementation"],
        implementation_there=there["implementation"],
        commit_here=sides[0].commit,
        commit_there=sides[1].commit,
        gpu=gpu,
        jax=jax.__version__,
    )


def _answers(sides: Sequence["Side"], step: str, *, at_once: bool = False, **more: Any) -> list[dict[str, Any]]:
    """The answers of both; the second one is asked when the first has answered, unless they are asked `at_once`.

    Raises:
      _LeftOutError: one of them cannot, or both.
    """
    found = []
    for side in sides if at_once else ():
        side.ask(step, **more)
    for side in sides:
        if not at_once:
            side.ask(step, **more)
        found.append(side.answer())
    failed = [(side.name, answer) for side, answer in zip(sides, found, strict=True) if "left_out" in answer]
    if failed:
        reasons = "; ".join(f"{name}, {answer['left_out']}" for name, answer in failed)
        raise _LeftOutError(reasons, any(name == "here" and answer["is_wrong"] for name, answer in failed))
    return found


class Side:
    """A checkout, and the process that measures it; one that ends is started again with the next question."""

    def __init__(self, name: str, root: Path, setting: str):
        self.name, self.root, self.commit = name, root, harness.commit(root) or "unknown"
        self._command = [sys.executable, "-c", _START, str(ROOT), str(root), setting]
        self._process = self._started()
        self._is_ready = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self._end()

    def _started(self) -> subprocess.Popen[str]:
        memory = {"XLA_PYTHON_CLIENT_PREALLOCATE": "false", "XLA_PYTHON_CLIENT_MEM_FRACTION": _MEMORY}
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen(self._command, env=os.environ | memory, text=True, **pipes)

    def _end(self) -> int:
        """Closes what the process reads from, so that it ends; returns its status."""
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()
        return self._process.returncode

    def _read(self) -> str:
        assert self._process.stdout
        return self._process.stdout.readline()

    def ask(self, step: str, **more: Any) -> None:
        """Puts a question.

        Raises:
          ValueError: the process ended while it started.
        """
        if self._process.returncode is not None:
            self._process, self._is_ready = self._started(), False
        if not self._is_ready and not self._read():
            raise ValueError(f"argument --against: the process for {self.root} ended with status {self._end()} as it started")
        self._is_ready = True
        with contextlib.suppress(BrokenPipeError):  # it ended, as `answer` finds
            print(json.dumps({"step": step} | more), file=self._process.stdin, flush=True)

    def answer(self) -> dict[str, Any]:
        """The answer to the last question; that the cell is left out, if the process ended."""
        line = self._read()
        return json.loads(line) if line else {"left_out": f"its process ended with status {self._end()}", "is_wrong": True}


def work(setting: str) -> None:
    """Answers questions as long as there are any, in the process of a checkout."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print must not come between answers
    module, function, effort, library.implementation = json.loads(setting)
    suite = getattr(importlib.import_module(module), function)
    worker = _Worker(suite(), Effort(**effort))
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.answer(**json.loads(line))), file=answers, flush=True)


class _Worker:
    """Ours in a process: at most one cell at a time is entered."""

    def __init__(self, cells: Iterable[Cell], effort: Effort):
        self._cells = {cell.name: cell for cell in cells}
        self._run = Run("", "", lambda row: None, effort=effort, say=lambda line: None)
        self._entered: tuple[Cell, Entrant] | None = None

    def answer(self, step: str, **more: Any) -> dict[str, Any]:
        found = self._enter(**more) if step == "enter" else self._turn()
        return self._why_not() if found is None else found

    def _enter(self, cell: str, program: bool) -> dict[str, Any] | None:
        self._entered = None  # whose memory is needed
        entered = replace(self._cells[cell], program=program)
        entrant = self._run.ours(entered)
        if entrant is None:
            return None
        self._entered = entered, entrant
        return {"implementation": entrant.implementation, "bits": _digest(entrant.function(*entrant.arguments[0]))}

    def _turn(self) -> dict[str, Any] | None:
        assert self._entered
        cell, entrant = self._entered
        if not self._run.take_turn(cell, entrant):
            return None
        return {"us": entrant.times[-1] / cell.calls if entrant.times else None}

    def _why_not(self) -> dict[str, Any]:
        assert self._run.problems or self._run.left_out
        is_wrong, (reason, *_) = bool(self._run.problems), [*self._run.problems, *self._run.left_out]
        self._run.problems.clear()
        self._run.left_out.clear()
        return {"left_out": reason.partition(": ")[2], "is_wrong": is_wrong}


def _digest(output: Any) -> str:
    """A name for the bits of all arrays of an output."""
    digest = hashlib.sha256()
    for array in map(np.asarray, jax.tree.leaves(output)):
        digest.update(f"{array.dtype} {array.shape}".encode())
        digest.update(np.ascontiguousarray(array).view(np.uint8).data)
    return digest.hexdigest()
