"""The result files: `<folder>/<gpu>/<suite>.csv`, one row a measurement, new runs below old ones.

Runs on an implementation that was asked for have files of their own, `<folder>/<gpu>/<implementation>/<suite>.csv`: their rows
do not take the place of those that say what the library chooses.
"""

import csv
import datetime
import io
import itertools
import os
import re
import uuid
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, fields
from pathlib import Path
from types import UnionType
from typing import Any

FOLDER = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Origin:
    """Where a row of a result file comes from.

    Attributes:
      run: one for all that one process measured; only rows of one run are compared.
      date: when it was measured, UTC.
      gpu, jax, commit: the GPU's name, the version of JAX, the commit of jaxsoftmax.
    """

    run: str
    date: str
    gpu: str
    jax: str
    commit: str


@dataclass(frozen=True)
class Row(Origin):
    """One measurement.

    Attributes:
      op, pass_, dtype, shape, options: what was measured. `pass_`, in the file `pass`, is `forward`, `backward`,
        `forward+backward`, or `first_call`: to trace, compile and run a fresh jit, on the wall clock. Suites may have more.
      implementation: what ran, ours or a peer; `ours` of an import, which runs none.
      us: microseconds; of all kernels of a call, the median of five rounds; of programs, and on several devices, on the wall
        clock.
      bytes: those that have to be read and written; 0 where they do not matter.
      flops: the arithmetic, where that is the limit; 0 where it is not counted.
      copy_share: `bytes / us` as a share of that of the run's copy of the same dtype; None where there is none.
      error: the largest fraction of the error budget used; None for yardsticks.
      temporaries: bytes beyond inputs and outputs, on one device; None where they are not measured, and in older files,
        without the column.
      kernel_us: on several devices, microseconds that kernels run, the mean over devices; likewise None elsewhere.
      least_us: on a machine that others may use too, the microseconds of the fastest round; likewise None elsewhere.
    """

    op: str
    pass_: str
    dtype: str
    shape: str
    options: str
    implementation: str
    us: float
    bytes: int
    flops: int
    copy_share: float | None
    error: float | None
    temporaries: int | None = None
    kernel_us: float | None = None
    least_us: float | None = None

    @property
    def speed(self) -> float:
        """Bytes a microsecond."""
        return self.bytes / self.us

    @property
    def tflops(self) -> float:
        """10^12 operations a second."""
        return self.flops / self.us / 1e6

    @property
    def fastest_us(self) -> float:
        """`least_us` where it is measured, else `us`."""
        return self.us if self.least_us is None else self.least_us

    @property
    def cell(self) -> tuple[str, ...]:
        return self.op, self.pass_, self.dtype, self.shape, self.options


def columns_of(kind: type[Origin]) -> tuple[str, ...]:
    """The columns of a file of such rows."""
    return tuple(field.name.rstrip("_") for field in fields(kind))


COLUMNS = columns_of(Row)
_OF_NEWER_FILES = ("temporaries", "kernel_us", "least_us")  # the last columns, of which a file may lack some at the end


def new_run() -> str:
    """A name for a run that begins now."""
    return f"{datetime.datetime.now(datetime.UTC):%Y%m%dT%H%M%S}-{uuid.uuid4().hex[:6]}"


def now() -> str:
    """The date of a row."""
    return f"{datetime.datetime.now(datetime.UTC):%Y-%m-%dT%H:%M:%SZ}"


def path_for(folder: Path, gpu: str, suite: str, implementation: str | None = None, devices: int = 1) -> Path:
    """The result file of a suite on GPUs of this name: 'NVIDIA H200' is `h200`, and two of them are `h200x2`."""
    own = re.sub(r"[^a-z0-9]+", "-", gpu.lower().removeprefix("nvidia")).strip("-")
    return folder / (own if devices == 1 else f"{own}x{devices}") / (implementation or "") / f"{suite}.csv"


def append(path: Path, *rows: Row) -> None:
    """Adds rows, all or none, in one write.

    Raises:
      ValueError: the file has other columns, or ends inside a row.
    """
    append_lines(path, COLUMNS, map(_format, rows))


def append_lines(path: Path, columns: Sequence[str], lines: Iterable[Sequence[Any]]) -> None:
    """`append` to a file of these columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    own = check(path, columns) if path.exists() else ()
    header = [] if own else [columns]
    text, lines = io.StringIO(), list(lines)
    if own and any(itertools.chain.from_iterable(line[len(own) :] for line in lines)):
        raise ValueError(f"{path}: has no column for {', '.join(columns[len(own) :])}")
    csv.writer(text, lineterminator="\n").writerows([*header, *(line[: len(own or columns)] for line in lines)])
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, text.getvalue().encode())
    finally:
        os.close(file)


def read[R: Origin](path: Path, kind: type[R] = Row) -> list[R]:
    """All rows of a kind, the oldest first.

    Raises:
      ValueError: the file has other columns, ends inside a row, or holds a row that cannot be read; with its line.
    """
    columns = columns_of(kind)
    check(path, columns)
    with path.open(newline="") as file:
        lines = ([record.get(name, "") for name in columns] for record in csv.DictReader(file))
        return [_parse(path, number, kind, line) for number, line in enumerate(lines, 2)]


def newest_of_each_cell(rows: list[Row]) -> list[Row]:
    """Of each cell the rows of the run that measured it last, which may have been of a part; and the copies of these runs."""
    last = {row.cell: row.run for row in rows if row.op != "copy"}
    runs = set(last.values())
    return [row for row in rows if (row.run in runs if row.op == "copy" else row.run == last[row.cell])]


def check(path: Path, columns: Sequence[str]) -> Sequence[str]:
    """The columns of the file, none if it is empty; raises if it is no result file of these columns."""
    text = path.read_text()
    own = text.splitlines()[0].split(",") if text else []
    missing = columns[len(own) :]
    if text and (own != list(columns[: len(own)]) or not set(missing) <= set(_OF_NEWER_FILES)):
        raise ValueError(f"{path}: the columns must be {','.join(columns)}")
    if text and not text.endswith("\n"):
        raise ValueError(f"{path}: the last row is not complete; complete or remove it")
    return own


def _format(row: Row) -> list[str]:
    *names, us, bytes_, flops, copy_share, error, temporaries, kernel_us, least_us = astuple(row)
    return [
        *names,
        f"{us:.3f}",
        str(bytes_),
        str(flops),
        "" if copy_share is None else f"{copy_share:.4f}",
        "" if error is None else f"{error:.4g}",
        "" if temporaries is None else str(temporaries),
        "" if kernel_us is None else f"{kernel_us:.3f}",
        "" if least_us is None else f"{least_us:.3f}",
    ]


def _parse[R: Origin](path: Path, line: int, kind: type[R], cells: list[str]) -> R:
    try:
        return kind(*(_value(field.type, cell) for field, cell in zip(fields(kind), cells, strict=True)))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{path}, line {line}: {problem}") from None


def _value(kind: Any, cell: str) -> Any:
    if isinstance(kind, UnionType):  # with None
        return kind.__args__[0](cell) if cell else None
    return kind(cell)
