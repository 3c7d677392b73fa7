"""The bars that the newest run must clear, from `bars.toml`.

Each entry names the cells that it holds for, by `op`, `pass`, `dtype`, `shape` and `options`, each a string or a list of them,
or left out for any; and one limit:

    ratio_at_least           the speed of ours, bytes over time, as a share of that of `peer`
    time_at_most             the time of ours as a multiple of that of `peer`, or of ours in another cell
    time_per_block_at_most   likewise, the time for each block that has to be visited
    us_at_most               the time of ours in microseconds
    error_at_most            the error of ours

and `implementation` if ours must be one: a speed that another one reaches does not count.

The peer's row is that of the same cell; that of `copy` is the copy of the same dtype. Another cell is `than`, a table of what
it differs in, of the filters' names: `than = { options = "causal=1" }`.
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
AGAINST_CELL = ("time_at_most", "time_per_block_at_most")
LIMITS = (*AGAINST_PEER, "time_per_block_at_most", "us_at_most", "error_at_most")


@dataclass(frozen=True)
class Bar:
    """One entry: the values that each filter allows, None for any, and a limit; `than` is what another cell differs in."""

    filters: dict[str, tuple[str, ...] | None]
    limit: str
    value: float
    peer: str | None = None
    implementation: str | None = None
    than: dict[str, str] | None = None

    def holds_for(self, cell: Cell) -> bool:
        actual = _named(cell)
        return all(allowed is None or actual[name] in allowed for name, allowed in self.filters.items())

    def other(self, cell: Cell) -> tuple[str, ...]:
        """The cell with which a cell of ours is compared, as `Row.cell` has it."""
        return tuple((_named(cell) | (self.than or {})).values())

    def __str__(self) -> str:
        other = self.peer or (self.than and ", ".join(f"{name} {value!r}" for name, value in self.than.items()))
        return f"{self.limit} {self.value:g}" + (f" of {other}" if other else "")


def _named(cell: Cell) -> dict[str, str]:
    """What tells a cell from others, in the order of `FILTERS`."""
    return dict(zip(FILTERS, (cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options), strict=True))


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
    peer, implementation, than = (entry.pop(name, None) for name in ("peer", "implementation", "than"))
    if implementation not in (None, *IMPLEMENTATIONS):
        raise ValueError(f"{where}: implementation must be one of {', '.join(sorted(IMPLEMENTATIONS))}, got {implementation!r}")
    if len(entry) != 1 or not entry.keys() <= set(LIMITS):
        raise ValueError(f"{where}: needs one of {', '.join(LIMITS)} and nothing unknown, got {', '.join(entry) or 'none'}")
    ((limit, value),) = entry.items()
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise ValueError(f"{where}: {limit} must be a positive number, got {value!r}")
    if than is not None and (not isinstance(than, dict) or not than or not than.keys() <= set(FILTERS)):
        raise ValueError(f"{where}: than must be a table of {', '.join(FILTERS)}, got {than!r}")
    for name, given, limits in (("peer", peer, AGAINST_PEER), ("than", than, AGAINST_CELL)):
        if given is not None and limit not in limits:
            raise ValueError(f"{where}: {limit} takes no {name}")
    if limit in (*AGAINST_PEER, *AGAINST_CELL) and (peer is None) == (than is None):
        words = [name for name, limits in (("peer", AGAINST_PEER), ("than", AGAINST_CELL)) if limit in limits]
        raise ValueError(f"{where}: {limit} needs a {' or a '.join(words)}, and one only")
    return Bar(filters, limit, float(value), peer, implementation, than)


def misses(bars: Sequence[Bar], cells: Sequence[Cell], run: Sequence[Row]) -> tuple[int, list[Miss]]:
    """How many bars there are, one for each cell that an entry holds for, and those that the rows of one run miss."""
    held = [(bar, cell) for bar in bars for cell in cells if cell.op != "copy" and bar.holds_for(cell)]
    blocks = {tuple(_named(cell).values()): cell.blocks for cell in cells}
    found = [_miss(bar, cell, run, blocks) for bar, cell in held]
    return len(held), [miss for miss in found if miss is not None]


def is_ours(row: Row) -> bool:
    """Whether a row is of jaxsoftmax, not of a peer."""
    return IMPLEMENTATIONS.issuperset(row.implementation.split("+"))


def _miss(bar: Bar, cell: Cell, run: Sequence[Row], blocks: dict[tuple[str, ...], int]) -> Miss | None:
    key = tuple(_named(cell).values())
    ours = _ours(run, key)
    if ours is None:
        return Miss(cell.name, str(bar), "not measured")
    if bar.implementation not in (None, ours.implementation):
        return Miss(cell.name, str(bar), f"on {ours.implementation}, not on {bar.implementation}")
    if bar.limit == "us_at_most":
        return _beyond(bar, cell, ours.us, ours.us <= bar.value)
    if bar.limit == "error_at_most":
        return _beyond(bar, cell, ours.error, ours.error is not None and ours.error <= bar.value)
    if bar.than is not None:
        other = _ours(run, bar.other(cell))
        if other is None:
            return Miss(cell.name, str(bar), "the other not measured")
        found = ours.us / other.us
        if bar.limit == "time_per_block_at_most":
            found *= blocks[bar.other(cell)] / blocks[key]
        return _beyond(bar, cell, found, found <= bar.value)
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


def _ours(run: Sequence[Row], cell: tuple[str, ...]) -> Row | None:
    """The row of ours of a cell."""
    own = [row for row in run if row.cell == cell and is_ours(row)]
    return own[-1] if own else None


def _beyond(bar: Bar, cell: Cell, found: float | None, cleared: bool) -> Miss | None:
    return None if cleared else Miss(cell.name, str(bar), "no error" if found is None else f"{found:.4g}")


def table(found: Sequence[Miss]) -> str:
    """Misses as text, one a line."""
    lines = [("cell", "bar", "found"), *((miss.cell, miss.bar, miss.found) for miss in found)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip() for line in lines)
