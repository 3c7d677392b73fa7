"""The bars that the newest run must clear, from `bars.toml`.

Each entry names the cells that it holds for, by `op`, `pass`, `dtype`, `shape` and `options`, each a string or a list of them,
or left out for any; and one limit:

    ratio_at_least   the speed of ours, bytes over time, as a share of that of `peer`
    time_at_most     the time of ours as a multiple of that of `peer`
    us_at_most       the time of ours in microseconds
    error_at_most    the error of ours

and `implementation` if ours must be one: a speed that another one reaches does not count.

The peer's row is that of the same cell; that of `copy` is the copy of the same dtype.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cells import IMPLEMENTATIONS, Cell
from benchmarks.results import Row

FILE = Path(__file__).with_name("bars.toml")
FILTERS = ("op", "pass", "dtype", "shape", "options")
AGAINST_PEER = ("ratio_at_least", "time_at_most")
LIMITS = (*AGAINST_PEER, "us_at_most", "error_at_most")


@dataclass(frozen=True)
class Bar:
    """One entry: the values that each filter allows, None for any, and a limit."""

    filters: dict[str, tuple[str, ...] | None]
    limit: str
    value: float
    peer: str | None = None
    implementation: str | None = None

    def holds_for(self, cell: Cell) -> bool:
        actual = {
            "op": cell.op,
            "pass": cell.pass_,
            "dtype": cell.dtype,
            "shape": cell.shape_text,
            "options": cell.options,
        }
        return all(allowed is None or actual[name] in allowed for name, allowed in self.filters.items())

    def __str__(self) -> str:
        return f"{self.limit} {self.value:g}" + (f" of {self.peer}" if self.peer else "")


@dataclass(frozen=True)
class Miss:
    """A bar that a cell does not clear, and what was found instead."""

    cell: str
    bar: str
    found: str


def load(suite: str, path: Path = FILE) -> list[Bar]:
    """The bars of a suite.

    Raises:
      ValueError: an entry is not valid; with its number.
    """
    entries = tomllib.loads(path.read_text()).get(suite, [])
    return [_bar(f"{path.name}: [[{suite}]] number {number}", dict(entry)) for number, entry in enumerate(entries, start=1)]


def _bar(where: str, entry: dict[str, Any]) -> Bar:
    filters = {name: entry.pop(name, None) for name in FILTERS}
    filters = {name: (value,) if isinstance(value, str) else value and tuple(value) for name, value in filters.items()}
    peer, implementation = entry.pop("peer", None), entry.pop("implementation", None)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"{where}: implementation must be one of {', '.join(sorted(IMPLEMENTATIONS))}, got {implementation!r}")
    if len(entry) != 1 or not entry.keys() <= set(LIMITS):
        raise ValueError(f"{where}: needs one of {', '.join(LIMITS)} and nothing unknown, got {', '.join(entry) or 'none'}")
    ((limit, value),) = entry.items()
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{where}: {limit} must be a positive number, got {value!r}")
    if (limit in AGAINST_PEER) != (peer is not None):
        raise ValueError(f"{where}: {limit} {'needs a' if peer is None else 'takes no'} peer")
    return Bar(filters, limit, float(value), peer, implementation)


def misses(bars: Sequence[Bar], cells: Sequence[Cell], run: Sequence[Row]) -> tuple[int, list[Miss]]:
    """How many bars there are, one for each cell that an entry holds for, and those that the rows of one run miss."""
    held = [(bar, cell) for bar in bars for cell in cells if cell.op != "copy" and bar.holds_for(cell)]
    found = [_miss(bar, cell, run) for bar, cell in held]
    return len(held), [miss for miss in found if miss is not None]


def is_ours(row: Row) -> bool:
    """Whether a row is of jaxsoftmax, not of a peer."""
    return IMPLEMENTATIONS.issuperset(row.implementation.split("+"))


def _miss(bar: Bar, cell: Cell, run: Sequence[Row]) -> Miss | None:
    key = (cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options)
    own = [row for row in run if row.cell == key and is_ours(row)]
    if not own:
        return Miss(cell.name, str(bar), "not measured")
    ours = own[-1]
    if bar.implementation not in (None, ours.implementation):
        return Miss(cell.name, str(bar), f"on {ours.implementation}, not on {bar.implementation}")
    if bar.limit == "us_at_most":
        return _beyond(bar, cell, ours.us, ours.us <= bar.value)
    if bar.limit == "error_at_most":
        return _beyond(bar, cell, ours.error, ours.error is not None and ours.error <= bar.value)
    peers = [
        row
        for row in run
        if row.implementation == bar.peer
        and (row.cell == key or (bar.peer == "copy" and (row.op, row.dtype) == ("copy", cell.dtype)))
    ]
    if not peers:
        return Miss(cell.name, str(bar), f"{bar.peer} not measured")
    if bar.limit == "ratio_at_least":
        return _beyond(bar, cell, ours.speed / peers[-1].speed, ours.speed / peers[-1].speed >= bar.value)
    return _beyond(bar, cell, ours.us / peers[-1].us, ours.us / peers[-1].us <= bar.value)


def _beyond(bar: Bar, cell: Cell, found: float | None, cleared: bool) -> Miss | None:
    return None if cleared else Miss(cell.name, str(bar), "no error" if found is None else f"{found:.4g}")


def table(found: Sequence[Miss]) -> str:
    """Misses as text, one a line."""
    lines = [("cell", "bar", "found"), *((miss.cell, miss.bar, miss.found) for miss in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
