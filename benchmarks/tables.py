"""Writes the tables of docs/performance.md that compare attention with its peers, from the result files.

python -m benchmarks.tables    fills every place of the document anew

A place is `<!-- table: FOLDER KIND -->`, a table of a kind for a folder of results, and `<!-- end of table -->`. A place stays
empty if its figures were not measured, and a peer that was not measured has no column. Kinds:

    forward     TFLOP/s of the suite `attention`
    gradients   likewise of `attention_gradients`
    beside      the speed of ours divided by that of FlashAttention-3 in both
    load        TFLOP/s beside FlashAttention-3 in `attention_sustained` and `attention_cool`, and the energy of a call
    functions   times of `score_functions`, and the speed divided by that of calls without functions and of FlexAttention
"""

import itertools
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from benchmarks import results, sustained
from benchmarks.attention import HEAD_SIZES, HIDDEN, TOKENS
from benchmarks.bars import is_ours
from benchmarks.results import Row
from benchmarks.score_functions import FUNCTIONS
from benchmarks.score_functions import LENGTHS as FUNCTION_LENGTHS

DOCUMENT = Path(__file__).parents[1] / "docs" / "performance.md"
OURS, FLASH, FLEX = "jaxsoftmax", "flash_attention_3", "flex_attention"
NAMES = {OURS: OURS, FLASH: "FlashAttention-3", "cudnn": "cuDNN", "attention_mgpu": "Pallas", "torch": "torch"}
LENGTHS = (512, 4096, 16384)
CAUSAL = {"": "no", "causal=1": "yes"}
PASSES = ("forward", "forward+backward")

_PLACE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n\n)(.*?)(<!-- end of table -->)", re.DOTALL)
type _Cells = dict[tuple[str, ...], dict[str, Row]]


def filled(text: str, folder: Path = results.FOLDER) -> str:
    """Returns a document with the newest tables of the result files in its places.

    Raises:
      ValueError: a place names no kind of table.
    """

    def fill(place: re.Match[str]) -> str:
        start, machine, kind, _, end = place.groups()
        if kind not in KINDS:
            raise ValueError(f"{start.strip()}: the kind must be one of {', '.join(KINDS)}")
        table = KINDS[kind](folder / machine)
        return start + (f"{table}\n\n" if table else "") + end

    return _PLACE.sub(fill, text)


def _speeds(path: Path, pass_: str) -> str:
    """Makes a table with a row for each head size and length, and columns of each contender without and with causal masks."""
    cells = _cells(path)
    sizes = [(head_size, length) for head_size in HEAD_SIZES for length in LENGTHS]
    columns = [
        (options, name)
        for options in CAUSAL
        for name in NAMES
        if any(name in cells.get(_cell(pass_, *size, options), {}) for size in sizes)
    ]
    if not columns:
        return ""
    heads = [("causal: " if (options, name) == ("causal=1", OURS) else "") + NAMES[name] for options, name in columns]
    lines = [
        [str(head_size) if length == LENGTHS[0] else "", str(length)]
        + [_joined([_tflops(cells, _cell(pass_, head_size, length, options), name)], 0) for options, name in columns]
        for head_size, length in sizes
    ]
    return _markdown(["head size", "length", *heads], lines)


def _beside(folder: Path) -> str:
    """Makes a table of ratios, those of all lengths in one entry."""
    cells = _cells(folder / "attention.csv") | _cells(folder / "attention_gradients.csv")
    if not _has_flash(cells):
        return ""
    lines = []
    for head_size in HEAD_SIZES:
        for options, words in CAUSAL.items():
            own = [[_cell(pass_, head_size, length, options) for length in LENGTHS] for pass_ in PASSES]
            lines.append([f"{head_size}, {words}", *(_joined([_over_flash(cells, cell) for cell in part], 2) for part in own)])
    return _markdown(["head size, causal", "forward", "forward and backward"], lines)


def _load(folder: Path) -> str:
    """Makes a table of long turns and of single calls, the figures of all lengths in one entry."""
    long_turns, single = (_cells(folder / f"attention_{suite}.csv") for suite in ("sustained", "cool"))
    if not _has_flash(long_turns | single):
        return ""
    grouped = {f"causal=1 kv_heads={HIDDEN // 128 // sustained.GROUP}": f"yes, {sustained.GROUP} query heads a key head"}
    kinds = [(pass_, head_size) for pass_ in PASSES for head_size in HEAD_SIZES]
    lines = []
    for pass_, head_size in kinds:
        for options, words in (CAUSAL | (grouped if head_size == 128 else {})).items():
            own = [_cell(pass_, head_size, length, options) for length in sustained.LENGTHS]
            energies = _joined([_over_flash(long_turns, cell, lambda row: row.millijoules) for cell in own], 3)
            figures = [*_beside_flash(long_turns, own), energies, *_beside_flash(single, own)]
            lines.append([f"{pass_.replace('+', ' and ')}, {head_size}, {words}", *figures])
    peer = [NAMES[FLASH], "ratio"]
    heads = ["pass, head size, causal", f"sustained: {OURS}", *peer, "energy, ratio", f"cool: {OURS}", *peer]
    (gpu,) = {row.gpu for rows in (long_turns | single).values() for row in rows.values()}
    lengths = " and ".join(map(str, sustained.LENGTHS))
    caption = f"{gpu}, lengths {lengths}: TFLOP/s, and figures of {OURS} divided by those of {NAMES[FLASH]}."
    return f"{caption}\n\n{_markdown(heads, lines)}"


def _functions(folder: Path) -> str:
    """Makes a table with a row for each function, pass and length."""
    cells, lines = _cells(folder / "score_functions.csv"), []
    for name, pass_, length in itertools.product(FUNCTIONS, PASSES, FUNCTION_LENGTHS):
        shape = str(_cell(pass_, 128, length, "")[3])
        wanted = "attention", pass_, shape
        found = [
            rows for cell, rows in cells.items() if (*cell[:2], cell[3]) == wanted and f"functions={name}" in cell[4].split()
        ]
        rows = found[0] if found else {}
        if OURS not in rows:
            continue
        beside = next((other for other in ("arguments", "plain", "bias", "causal") if other in rows), None)
        ratios = [_joined([rows[other].us / rows[OURS].us if other in rows else None], 2) for other in (beside, FLEX)]
        words = [name.replace("_", " "), pass_.replace("+", " and "), str(length), f"{rows[OURS].us:.0f}"]
        lines.append([*words, f"{beside or '-'}: {ratios[0]}", ratios[1]])
    return _markdown(["function", "pass", "length", "us", "over the call", "over FlexAttention"], lines) if lines else ""


KINDS: dict[str, Callable[[Path], str]] = {
    "forward": lambda folder: _speeds(folder / "attention.csv", "forward"),
    "gradients": lambda folder: _speeds(folder / "attention_gradients.csv", "forward+backward"),
    "beside": _beside,
    "load": _load,
    "functions": _functions,
}


def _cells(path: Path) -> _Cells:
    """Maps each cell of a result file to the rows of its newest run by contender; nothing if there is no such file."""
    cells: _Cells = {}
    for row in results.newest_of_each_cell(results.read(path)) if path.exists() else []:
        cells.setdefault(row.cell, {})[OURS if is_ours(row) else row.implementation] = row
    return cells


def _cell(pass_: str, head_size: int, length: int, options: str) -> tuple[str, ...]:
    shape = TOKENS // length, length, HIDDEN // head_size, head_size
    return "attention", pass_, "bfloat16", "x".join(map(str, shape)), options


def _has_flash(cells: _Cells) -> bool:
    return any(FLASH in rows for rows in cells.values())


def _tflops(cells: _Cells, cell: tuple[str, ...], name: str) -> float | None:
    row = cells.get(cell, {}).get(name)
    return None if row is None else row.tflops


def _over_flash(
    cells: _Cells, cell: tuple[str, ...], figure: Callable[[Row], float | None] = lambda row: row.tflops
) -> float | None:
    """A figure of ours, by default the speed, divided by that of FlashAttention-3; None if one was not measured."""
    rows = cells.get(cell, {})
    ours, flash = (figure(rows[name]) if name in rows else None for name in (OURS, FLASH))
    return None if ours is None or flash is None else ours / flash


def _beside_flash(cells: _Cells, own: Sequence[tuple[str, ...]]) -> list[str]:
    """Lists the entries of some cells: TFLOP/s of ours and of FlashAttention-3, and the ratio."""
    speeds = [_joined([_tflops(cells, cell, name) for cell in own], 0) for name in (OURS, FLASH)]
    return [*speeds, _joined([_over_flash(cells, cell) for cell in own], 3)]


def _joined(figures: Iterable[float | None], digits: int) -> str:
    return ", ".join("-" if figure is None else f"{figure:.{digits}f}" for figure in figures)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    first, *others = ("|" + "".join(f" {entry} |" if entry else " |" for entry in line) for line in (heads, *lines))
    return "\n".join([first, "|" + "---|" * len(heads), *others])


def main() -> int:
    """Fills the places of the document; returns the exit status."""
    DOCUMENT.write_text(filled(DOCUMENT.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
