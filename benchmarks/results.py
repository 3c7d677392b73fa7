"""The result files: `<folder>/<gpu>/<suite>.csv`, one row a measurement, new runs below old ones.

Runs on an implementation that was asked for have files of their own, `<folder>/<gpu>/<implementation>/<suite>.csv`: their rows
do not take the place of those that say what the library chooses.
"""

import csv
import io
import itertools
import os
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from types import UnionType
from typing import Any

from jaxsoftmax._report.rows import COLUMNS, Origin, Row, columns_of, formatted, machine, new_run, now

__all__ = ["COLUMNS", "FOLDER", "Origin", "Row", "append", "append_lines", "check", "columns_of", "machine", "new_run"]
__all__ += ["newest_of_each_cell", "now", "path_for", "read"]

FOLDER = Path(__file__).parent / "results"


# The last columns, of which a file may lack some at the end.
_OF_NEWER_FILES = ("temporaries", "kernel_us", "least_us", "millijoules", "sm_mhz")


def path_for(folder: Path, gpu: str, suite: str, implementation: str | None = None, devices: int = 1) -> Path:
    """The result file of a suite on GPUs of this name: 'NVIDIA H200' is `h200`, and two of them are `h200x2`."""
    own = machine(gpu)
    return folder / (own if devices == 1 else f"{own}x{devices}") / (implementation or "") / f"{suite}.csv"


def append(path: Path, *rows: Row) -> None:
    """Adds rows, all or none, in one write.

    Raises:
      ValueError: the file has other columns, or ends inside a row.
    """
    append_lines(path, COLUMNS, map(formatted, rows))


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
    """Returns the rows of each cell's newest run, which may have measured a part of the suite, and the copies of these runs."""
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


def _parse[R: Origin](path: Path, line: int, kind: type[R], cells: list[str]) -> R:
    try:
        return kind(*(_value(field.type, cell) for field, cell in zip(fields(kind), cells, strict=True)))
    except (TypeError, ValueError) as problem:
        raise ValueError(f"{path}, line {line}: {problem}") from None


def _value(kind: Any, cell: str) -> Any:
    if isinstance(kind, UnionType):  # with None
        return kind.__args__[0](cell) if cell else None
    return kind(cell)
