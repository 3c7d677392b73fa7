"""Bars from `bars.toml`, which the newest row of each cell must clear.

Each entry names the cells that it holds for, by `op`, `pass`, `dtype`, `shape` and `options`, each a string or a list of them,
or left out for any; and one limit:

    ratio_at_least           the speed of ours, bytes over time, as a share of that of `peer`
    time_at_most             the time of ours as a multiple of that of `peer`, or of ours in another cell
    time_per_block_at_most   likewise, the time for each block that has to be visited
    us_at_most               the time of ours in microseconds
    error_at_most            the error of ours
    millijoules_at_most      the energy of a call of ours as a multiple of that of `peer`
    memory_at_most           the temporaries of ours, as below, as a multiple of those of `peer`
    temporaries_at_most      bytes that ours takes beyond inputs and outputs
    scaling_at_least         of n devices: the time of ours on one device, over n times its time on all

and `implementation` if ours must be one: a speed that another one reaches does not count. Bars of `triton` and `xla` are for
runs that asked for them, as another one is preferred on the GPU that the bars are for; the others are for what the library
chooses (see `of_file`). More may be said of it:

    columns       the first and the last size of the last axis that it holds for, such as [64, 32768]
    percentile    with `ratio_at_least`: of the cells of an op, pass and dtype at most so many percent may be below
    if_measured   of a peer that need not be installed: it holds for the cells that the peer has a row of
    machines      the folders that it holds for, such as ["h200x2", "h200x4"]

The peer's row is that of the same cell; that of `copy` is the copy of the same dtype. Another cell is `than`, a table of what
it differs in, of the filters' names: `than = { options = "causal=1" }`.
"""

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.cells import IMPLEMENTATIONS, ONE, OURS, Cell
from benchmarks.results import Row

FILE = Path(__file__).with_name("bars.toml")
FILTERS = ("op", "pass", "dtype", "shape", "options")
AGAINST_PEER = ("ratio_at_least", "time_at_most", "millijoules_at_most", "memory_at_most")
AGAINST_CELL = ("time_at_most", "time_per_block_at_most")
SCALING = "scaling_at_least"
LIMITS = (*AGAINST_PEER, "time_per_block_at_most", "us_at_most", "error_at_most", "temporaries_at_most", SCALING)
AT_LEAST = ("ratio_at_least", SCALING)


@dataclass(frozen=True)
class Bar:
    """One entry: the values that each filter allows, None for any, and a limit; `than` is what another cell differs in."""

    filters: dict[str, tuple[str, ...] | None]
    limit: str
    value: float
    peer: str | None = None
    implementation: str | None = None
    than: dict[str, str] | None = None
    columns: tuple[int, int] | None = None
    percentile: float | None = None
    if_measured: bool = False
    machines: tuple[str, ...] | None = None

    def holds_for(self, cell: Cell) -> bool:
        if self.columns is not None and not self.columns[0] <= cell.shape[-1] <= self.columns[1]:
            return False
        actual = _named(cell)
        return all(allowed is None or actual[name] in allowed for name, allowed in self.filters.items())

    def is_cleared_by(self, found: float) -> bool:
        return found >= self.value if self.limit in AT_LEAST else found <= self.value

    def other(self, cell: Cell) -> tuple[str, ...]:
        """The cell with which a cell of ours is compared, as `Row.cell` has it."""
        return tuple((_named(cell) | (self.than or {})).values())

    def __str__(self) -> str:
        other = self.peer or (self.than and ", ".join(f"{name} {value!r}" for name, value in self.than.items()))
        words = f"{self.limit} {self.value:g}" + (f" of {other}" if other else "")
        return words if self.percentile is None else f"{words}, percentile {self.percentile:g}"


def _named(cell: Cell) -> dict[str, str]:
    """Names what tells a cell from others, in the order of `FILTERS`."""
    return dict(zip(FILTERS, (cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options), strict=True))


def _key(cell: Cell) -> tuple[str, ...]:
    """A cell as `Row.cell` has it."""
    return tuple(_named(cell).values())


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


def of_file(bars: Sequence[Bar], implementation: str | None, machine: str | None = None) -> list[Bar]:
    """Selects the bars of a result file: of runs that asked for an implementation, or for none, on a machine."""
    bars = [bar for bar in bars if bar.machines is None or machine in bar.machines]
    if implementation is None:
        return [bar for bar in bars if bar.implementation not in ("triton", "xla")]
    return [bar for bar in bars if bar.implementation == implementation]


def _bar(where: str, entry: dict[str, Any]) -> Bar:
    filters = {name: entry.pop(name, None) for name in FILTERS}
    filters = {name: (value,) if isinstance(value, str) else value and tuple(value) for name, value in filters.items()}
    peer, implementation, than = (entry.pop(name, None) for name in ("peer", "implementation", "than"))
    columns, percentile = entry.pop("columns", None), entry.pop("percentile", None)
    if_measured, machines = entry.pop("if_measured", False), entry.pop("machines", None)
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"{where}: implementation must be one of {', '.join(sorted(IMPLEMENTATIONS))}, got {implementation!r}")
    if len(entry) != 1 or not entry.keys() <= set(LIMITS):
        raise ValueError(f"{where}: needs one of {', '.join(LIMITS)} and nothing unknown, got {', '.join(entry) or 'none'}")
    ((limit, value),) = entry.items()
    if not _is_number(value) or value <= 0:
        raise ValueError(f"{where}: {limit} must be a positive number, got {value!r}")
    if than is not None and (not isinstance(than, dict) or not than or not than.keys() <= set(FILTERS)):
        raise ValueError(f"{where}: than must be a table of {', '.join(FILTERS)}, got {than!r}")
    for name, given, limits in (("peer", peer, AGAINST_PEER), ("than", than, AGAINST_CELL)):
        if given is not None and limit not in limits:
            raise ValueError(f"{where}: {limit} takes no {name}")
    if limit in (*AGAINST_PEER, *AGAINST_CELL) and (peer is None) == (than is None):
        words = [name for name, limits in (("peer", AGAINST_PEER), ("than", AGAINST_CELL)) if limit in limits]
        raise ValueError(f"{where}: {limit} needs a {' or a '.join(words)}, and one only")
    if columns is not None and not (isinstance(columns, list) and list(map(type, columns)) == [int, int]):
        raise ValueError(f"{where}: columns must be the first and the last size, got {columns!r}")
    if percentile is not None and (limit != "ratio_at_least" or not _is_number(percentile) or not 0 < percentile < 100):
        raise ValueError(f"{where}: percentile must be between 0 and 100, and of ratio_at_least, got {percentile!r} of {limit}")
    if not isinstance(if_measured, bool) or (if_measured and peer is None):
        raise ValueError(f"{where}: if_measured must be true or false, and needs a peer, got {if_measured!r}")
    if machines is not None and not (isinstance(machines, list) and machines and set(map(type, machines)) == {str}):
        raise ValueError(f"{where}: machines must be names of folders, got {machines!r}")
    machines = None if machines is None else tuple(map(str, machines))
    columns = None if columns is None else (int(columns[0]), int(columns[1]))
    peer = ONE if limit == SCALING else peer
    return Bar(filters, limit, float(value), peer, implementation, than, columns, percentile, if_measured, machines)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def misses(bars: Sequence[Bar], cells: Sequence[Cell], run: Sequence[Row]) -> tuple[int, list[Miss]]:
    """Counts the bars, and finds those that rows miss; only rows of one run are compared with each other.

    An entry is a bar for each cell that it holds for; with a percentile, for each op, pass and dtype. Cells for another number
    of devices than those of the rows do not count.
    """
    rows = _Rows(run)
    counts = {cell.devices for cell in cells if _key(cell) in rows.cells}
    cells = [cell for cell in cells if not counts or cell.devices in counts]
    blocks = {_key(cell): cell.blocks for cell in cells}
    count, missed = 0, []
    for bar in bars:
        held = [cell for cell in cells if cell.op != "copy" and bar.holds_for(cell)]
        if bar.if_measured:
            held = [cell for cell in held if rows.peer(bar, cell) is not None]
        found = [(cell.name, _found(bar, cell, rows, blocks)) for cell in held]
        if bar.percentile is not None:
            found = _percentiles(bar.percentile, bar.columns, held, [value for _, value in found])
        count += len(found)
        missed += [
            Miss(name, str(bar), value if isinstance(value, str) else f"{value:.4g}")
            for name, value in found
            if isinstance(value, str) or not bar.is_cleared_by(value)
        ]
    return count, missed


def is_ours(row: Row) -> bool:
    """Tells if a row is of jaxsoftmax, not of a peer."""
    return row.implementation == OURS or IMPLEMENTATIONS.issuperset(row.implementation.split("+"))


class _Rows:
    """The rows of a run by what is asked for: those of a file times its bars are too many to look through for each bar."""

    def __init__(self, run: Sequence[Row]):
        self.cells = {row.cell for row in run}
        self.ours = {row.cell: row for row in run if is_ours(row)}
        self._peers: dict[tuple[Any, ...], list[Row]] = {}
        for row in run:
            is_copy = (row.op, row.implementation) == ("copy", "copy")
            self._peers.setdefault(("copy", row.dtype) if is_copy else (row.implementation, *row.cell), []).append(row)

    def peer(self, bar: Bar, cell: Cell) -> Row | None:
        """The row of a bar's peer that a cell is compared with, of the run of ours."""
        key = _key(cell)
        ours = self.ours.get(key)
        rows = self._peers.get(("copy", cell.dtype) if bar.peer == "copy" else (bar.peer, *key), [])
        return next((row for row in reversed(rows) if ours is None or row.run == ours.run), None)


def _found(bar: Bar, cell: Cell, rows: _Rows, blocks: dict[tuple[str, ...], int]) -> float | str:
    """Computes the value that a bar limits, or says in words why there is none."""
    key = _key(cell)
    ours = rows.ours.get(key)
    if ours is None:
        return "not measured"
    if bar.implementation not in (None, ours.implementation):
        return f"on {ours.implementation}, not on {bar.implementation}"
    if bar.limit == "us_at_most":
        return ours.us
    if bar.limit == "error_at_most":
        return "no error" if ours.error is None else ours.error
    if bar.limit == "temporaries_at_most":
        return "no temporaries" if ours.temporaries is None else ours.temporaries
    if bar.than is not None:
        other = rows.ours.get(bar.other(cell))
        if other is None or other.run != ours.run:
            return "the other not measured"
        found = ours.us / other.us
        return found * blocks[bar.other(cell)] / blocks[key] if bar.limit == "time_per_block_at_most" else found
    peer = rows.peer(bar, cell)
    if peer is None:
        return f"{bar.peer} not measured"
    if bar.limit == SCALING:
        return peer.us / (cell.devices * ours.us)
    if bar.limit == "millijoules_at_most":
        if ours.millijoules is None or peer.millijoules is None:
            return "no millijoules"
        return ours.millijoules / peer.millijoules
    if bar.limit == "memory_at_most":
        if ours.temporaries is None or not peer.temporaries:
            return "no temporaries"
        return ours.temporaries / peer.temporaries
    return ours.speed / peer.speed if bar.limit == "ratio_at_least" else ours.fastest_us / peer.fastest_us


def _percentiles(
    percentile: float, columns: tuple[int, int] | None, cells: Sequence[Cell], found: Sequence[float | str]
) -> list[tuple[str, float | str]]:
    """Computes the percentile of each op, pass and dtype, and names the cells behind it."""
    groups: dict[str, list[float | str]] = {}
    for cell, value in zip(cells, found, strict=True):
        groups.setdefault(f"{cell.op} {cell.pass_} {cell.dtype}", []).append(value)
    of = "" if columns is None else ", columns {} to {}".format(*columns)
    return [(f"{name}{of}, {len(values)} cells", _of_percentile(percentile, values)) for name, values in groups.items()]


def _of_percentile(percentile: float, found: Sequence[float | str]) -> float | str:
    """The value that at most `percentile` percent are below, or why there is none: each cell has to have one."""
    without = [value for value in found if isinstance(value, str)]
    if without:
        return f"{len(without)} of {len(found)} without a ratio, the first: {without[0]}"
    values = sorted(value for value in found if not isinstance(value, str))
    return values[int(len(values) * percentile / 100)]


def table(found: Sequence[Miss]) -> str:
    """Misses as text, one a line."""
    lines = [("cell", "bar", "found"), *((miss.cell, miss.bar, miss.found) for miss in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
