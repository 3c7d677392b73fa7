"""Puts each of `faults.FAULTS` into a copy of the library, and runs the tests there that cover it: one of them must fail.

    python -m tests.mutants [--only REGEX] [--check] [--csv FILE] [--jobs N] [--timeout S]

A fault is one line that is wrong: a sign, a bound, a mask that is missing, operands that are swapped. A test that passes with
it tests less than it seems to. Each fault names the tests that should fail, as few as catch it, so that it takes seconds. A
line says by which one it was caught; or

    SURVIVED       all tests passed
    no test ran    none was selected, or pytest itself failed
    timeout        they ran for longer than S seconds; that counts as caught where the fault makes a loop endless
    left out       all were skipped, as they need a GPU, or Triton, and the fault says so

and the exit status is 1 if there is a fault that was neither caught nor left out. With `--check` nothing is put into the copy,
and tests must pass. Python is the one that runs this: faults in Triton kernels need one that has jax-triton.

The file of `--csv` has a line for each fault. Lines of faults that did not run, or were left out, stay as they are: so
`caught.csv` holds what one Python found and what another did. `test_faults.py` says whether it is of the faults there are.
"""

import argparse
import contextlib
import csv
import functools
import importlib.util
import os
import queue
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path

from .faults import FAULTS, Fault

ROOT = Path(__file__).parents[2]
COPIED = ("jaxsoftmax", "tests", "benchmarks", "examples", "docs", "pyproject.toml", "README.md", "CHANGELOG.md")
UNCAUGHT = ("SURVIVED", "no test ran", "timeout", "failed")


@dataclass
class Line:
    """The outcome of a fault: a line of the file. `test` is the first one that failed."""

    name: str
    path: str
    before: str
    after: str
    outcome: str
    test: str = ""
    seconds: float = 0

    def __str__(self) -> str:
        return f"{self.name}: {self.outcome}{f' by {self.test}' if self.test else ''} ({self.seconds:.0f} s)"


def put_in(fault: Fault, root: Path) -> None:
    """Puts a fault into a copy of the repository."""
    path = root / fault.path
    text = path.read_text()
    assert text.count(fault.before) == 1, f"{fault.name}: {fault.path} has {text.count(fault.before)} of {fault.before!r}"
    path.write_text(text.replace(fault.before, fault.after))


class Copies:
    """Makes a copy of the repository for each job. They share bytecode, which sources with another time do not get."""

    def __init__(self, folder: Path, count: int):
        self.bytecode, self.free = folder / "bytecode", queue.SimpleQueue()
        for number in range(count):
            self.free.put(folder / str(number))

    @contextlib.contextmanager
    def taken(self) -> Iterator[Path]:
        """A copy that nobody else has, made anew."""
        root = self.free.get()
        try:
            shutil.rmtree(root, ignore_errors=True)
            root.mkdir(parents=True)
            for name in COPIED:
                copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy2
                copy(ROOT / name, root / name)
            yield root
        finally:
            self.free.put(root)


def run(copies: Copies, tests: str, timeout: float, fault: Fault | None = None, triton: bool = False) -> tuple[str, str]:
    """Runs pytest in a copy of the repository, with a fault or as it is. Returns the outcome and the first test that failed."""
    plugins = ("no:cacheprovider", "no:xdist", "tests.mutants.unshrunk")
    command = [sys.executable, "-m", "pytest", "-x", "-q", *(f"-p{plugin}" for plugin in plugins), *shlex.split(tests)]
    env = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    env |= {"PYTHONPYCACHEPREFIX": str(copies.bytecode), "JAX_PLATFORMS": env.get("JAX_PLATFORMS", "cpu")}
    env |= {"TRITON_INTERPRET": "1"} if triton else {}
    with copies.taken() as root:
        if fault is not None:
            put_in(fault, root)
        env["PYTHONPATH"] = str(root)
        try:
            done = subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            return ("caught", "timeout") if fault is not None and fault.is_endless else ("timeout", "")
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
    if done.returncode in (1, 2) and failed:
        return "caught", failed[1]
    if done.returncode:
        print(done.stdout[-2000:], done.stderr[-2000:], sep="\n", file=sys.stderr)
        return "no test ran", ""
    if not re.search(r"\b\d+ passed", done.stdout):
        is_expected = fault is None or fault.gpu or fault.triton
        return ("left out" if is_expected and " skipped" in done.stdout else "no test ran"), ""
    return "SURVIVED", ""


def is_seen(fault: Fault) -> bool:
    """Tells whether the tests of a fault may run here. Tests for a GPU skip themselves; tests of Triton fail without it."""
    return not fault.triton or importlib.util.find_spec("jax_triton") is not None


def of_fault(copies: Copies, timeout: float, fault: Fault) -> Line:
    """Puts one in, and says what became of it."""
    start = time.perf_counter()
    outcome, test = run(copies, fault.tests, timeout, fault, fault.triton) if is_seen(fault) else ("left out", "")
    line = Line(fault.name, fault.path, fault.before, fault.after, outcome, test, round(time.perf_counter() - start, 1))
    print(line, flush=True)
    return line


def of_tests(copies: Copies, timeout: float, fault: Fault) -> Line:
    """Runs the tests of one in a copy as it is."""
    start, tests = time.perf_counter(), fault.tests
    outcome, test = run(copies, tests, timeout, triton=fault.triton) if is_seen(fault) else ("left out", "")
    outcome = {"SURVIVED": "passed", "caught": "failed"}.get(outcome, outcome)
    line = Line(tests, "", "", "", outcome, test, round(time.perf_counter() - start, 1))
    print(line, flush=True)
    return line


def table(path: Path) -> dict[str, Line]:
    """The lines of a file, by the names of the faults; none where there is no file."""
    if not path.exists():
        return {}
    with path.open(newline="") as file:
        return {row["name"]: Line(**row | {"seconds": float(row["seconds"])}) for row in csv.DictReader(file)}


def write(path: Path, new: list[Line]) -> None:
    """Writes a file anew, in the order of the faults: the new lines, and those that it had for the other faults."""
    lines = table(path) | {line.name: line for line in new if line.outcome != "left out"}
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Line)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(vars(lines[fault.name]) for fault in FAULTS if fault.name in lines)


def main() -> int:
    """Does what the command line asks for, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression: faults whose name or path has a match")
    parser.add_argument("--check", action="store_true", help="run the tests without faults")
    parser.add_argument("--csv", type=Path, help="the file with a line for each fault")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--timeout", type=float, default=300, help="seconds for the tests of a fault")
    arguments = parser.parse_args()
    faults = [fault for fault in FAULTS if re.search(arguments.only, f"{fault.name} {fault.path}")]
    work = list({fault.tests: fault for fault in faults}.values()) if arguments.check else faults
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies = Copies(Path(folder), arguments.jobs)
        lines = list(pool.map(functools.partial(of_tests if arguments.check else of_fault, copies, arguments.timeout), work))
    if arguments.csv is not None and not arguments.check:
        write(arguments.csv, lines)
    uncaught = [line for line in lines if line.outcome in UNCAUGHT]
    left_out = sum(line.outcome == "left out" for line in lines)
    what = "tests failed" if arguments.check else "faults were not caught"
    print(
        f"{len(uncaught)} of {len(lines)} {what}, {left_out} left out, in {time.perf_counter() - start:.0f} s",
        *uncaught,
        sep="\n",
    )
    return int(bool(uncaught))


if __name__ == "__main__":
    sys.exit(main())
