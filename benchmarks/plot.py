"""Draws result files: bandwidth against columns, and accuracy beside it; for attention arithmetic against sequence length."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars import is_ours
from benchmarks.results import Row

FIGURES = (("softmax", "forward"), ("softmax", "backward"), ("log_softmax", "forward"), ("logsumexp", "forward"))

GREY = "#80868f"  # readable on white and on black, as are the others
_COLOURS = {
    "mosaic": "#e8590c",
    "triton": "#c2255c",
    "xla": "#0c9c7c",
    "jax.nn": "#3b82f6",
    "torch": "#2f9e44",
    "torch.compile": "#a855f7",
    "quack": "#d19a00",
    "sum": GREY,
    "copy": GREY,
    "cudnn": "#3b82f6",
    "attention_mgpu": "#a855f7",
    "tokamax": "#d19a00",
}
_CAUSAL = {"": "not causal", "causal=1": "causal"}
STYLE = {
    "font.size": 9,
    "text.color": GREY,
    "axes.edgecolor": GREY,
    "axes.labelcolor": GREY,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "grid.alpha": 0.25,
    "grid.color": GREY,
    "grid.linewidth": 0.6,
    "xtick.color": GREY,
    "ytick.color": GREY,
    "svg.hashsalt": "jaxsoftmax",
}


def draw(run: Sequence[Row], folder: Path) -> list[Path]:
    """Draws the figures for which the run has rows, as `<op>_<pass>.svg` in `folder`, `_` for `+`; returns their paths."""
    paths = []
    for op, pass_ in FIGURES:
        rows = [row for row in run if (row.op, row.pass_, row.options) == (op, pass_, "") and _large(row)]
        dtypes = [dtype for dtype in ("float32", "bfloat16") if any(row.dtype == dtype for row in rows)]
        if dtypes:
            copies = {row.dtype: row for row in run if row.op == "copy"}
            paths.append(_figure(folder / f"{op}_{pass_}.svg", op, pass_, rows, dtypes, copies))
    for pass_ in ("forward", "forward+backward"):
        rows = [row for row in run if (row.op, row.pass_, row.dtype) == ("attention", pass_, "bfloat16")]
        rows = _of_one_size([row for row in rows if row.options in _CAUSAL and _is_power(_length(row))])
        if rows:
            paths.append(_figure_of_attention(folder / f"attention_{pass_.replace('+', '_')}.svg", rows))
    return paths


def _length(row: Row) -> int:
    return int(row.shape.split("x")[1])


def _head_size(row: Row) -> int:
    return int(row.shape.split("x")[3])


def _of_one_size(rows: list[Row]) -> list[Row]:
    """The rows whose hidden size is the one that has the most."""
    hidden = [int(row.shape.split("x")[2]) * _head_size(row) for row in rows]
    return [row for row, own in zip(rows, hidden, strict=True) if own == max(hidden, key=hidden.count)]


def _figure_of_attention(path: Path, rows: list[Row]) -> Path:
    """A panel for each head size, a row of panels for causal attention and one for the other."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    head_sizes, kinds = sorted({_head_size(row) for row in rows}), [kind for kind in _CAUSAL if _any(rows, kind)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(0.6 + 3.4 * len(head_sizes), 0.9 + 2.7 * len(kinds)), layout="constrained")
        panels = figure.subplots(len(kinds), len(head_sizes), squeeze=False, sharex=True, sharey="row")
        for kind, line in zip(kinds, panels, strict=True):
            line[0].set_ylabel("TFLOP/s")
            for head_size, axis in zip(head_sizes, line, strict=True):
                own = [row for row in rows if row.options == kind and _head_size(row) == head_size]
                _lines(axis, own, _length, lambda row: row.tflops)
                axis.set(title=f"head size {head_size}, {_CAUSAL[kind]}")
                axis.minorticks_off()
            line[0].set_ylim(0, None)  # of all, when all are drawn
        for axis in panels[-1]:
            axis.set_xlabel("sequence length")
        _legend(figure, panels)
        newest = rows[-1]
        figure.suptitle(f"attention {newest.pass_}, {newest.dtype}, {newest.gpu}, jax {newest.jax}, {newest.commit}")
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return path


def _any(rows: list[Row], options: str) -> bool:
    return any(row.options == options for row in rows)


def _large(row: Row) -> bool:
    """Whether a row is of the size at which columns are compared, and not one of the small arrays."""
    return row.bytes >= 2**27


def _columns(row: Row) -> int:
    return int(row.shape.rsplit("x", 1)[1])


def _figure(path: Path, op: str, pass_: str, rows: list[Row], dtypes: list[str], copies: dict[str, Row]) -> Path:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9, 0.5 + 2.9 * len(dtypes)), layout="constrained")
        panels = figure.subplots(len(dtypes), 2, squeeze=False, sharex=True)
        for (speed, accuracy), dtype in zip(panels, dtypes, strict=True):
            _panel(speed, accuracy, [row for row in rows if row.dtype == dtype])
            speed.set(title=dtype, ylabel="GB/s", ylim=(0, None))
            accuracy.set(title=dtype, ylabel="largest error / budget", yscale="log")
            if dtype in copies:
                speed.axhline(copies[dtype].speed / 1e3, color=GREY, linestyle="--", linewidth=1.2, label="copy")
            accuracy.axhline(1, color=GREY, linestyle="--", linewidth=1.2, label="budget")
            low, high = accuracy.get_ylim()
            accuracy.set_ylim(min(low, 0.1), max(high, 10))
        for axis in panels.flat:
            axis.minorticks_off()
        for axis in panels[-1]:
            axis.set_xlabel("columns")
        _legend(figure, panels, {"copy": None, "budget": "copy, budget"})
        newest = rows[-1]
        figure.suptitle(f"{op} {pass_}, {newest.gpu}, jax {newest.jax}, {newest.commit}")
        figure.savefig(path, transparent=True, metadata={"Date": None})
    return path


def _legend(figure: Any, panels: Any, words: dict[str, str | None] | None = None) -> None:
    """One for all panels; `words` are other labels for some, None for those that have no entry."""
    entries: dict[str, Any] = {}
    for axis in panels.flat:
        for handle, label in zip(*axis.get_legend_handles_labels(), strict=True):
            entries.setdefault(label, handle)
    entries = {label: entries[label] for label in sorted(entries, key=lambda label: label in (words or {}))}
    named = [((words or {}).get(label, label), handle) for label, handle in entries.items()]
    labels, handles = zip(*((label, handle) for label, handle in named if label is not None), strict=True)
    figure.legend(handles, labels, loc="outside lower center", ncols=len(labels), frameon=False)


def _panel(speed: Any, accuracy: Any, rows: list[Row]) -> None:
    for axis, what in ((speed, lambda row: row.speed / 1e3), (accuracy, lambda row: row.error)):
        _lines(axis, rows, _columns, what)


def _lines(axis: Any, rows: list[Row], size: Callable[[Row], int], what: Callable[[Row], float | None]) -> None:
    """A line for each implementation through the powers of two; other sizes are hollow marks beside it."""
    by_name = {name: [row for row in rows if row.implementation == name] for name in {row.implementation for row in rows}}
    for name in sorted(by_name, key=lambda name: list(_COLOURS).index(_main(name))):
        ours = is_ours(by_name[name][0])
        look = {"color": _COLOURS[_main(name)], "marker": "o", "markersize": 4, "zorder": 3 if ours else 2}
        values = ((size(row), what(row)) for row in by_name[name])
        points = sorted((at, value) for at, value in values if value is not None and 0 < value < float("inf"))
        line = [point for point in points if _is_power(point[0])]
        odd = [point for point in points if not _is_power(point[0])]
        axis.plot(*transposed(line), **look, label=name, linewidth=2.2 if ours else 1.2)
        axis.plot(*transposed(odd), **look, linestyle="", markerfacecolor="none")
    powers = sorted({size(row) for row in rows if _is_power(size(row))})
    axis.set_xscale("log", base=2)
    axis.set_xticks(powers, [f"{count // 1024}K" if count >= 1024 else str(count) for count in powers])


def _main(implementation: str) -> str:
    return implementation.split("+")[0]


def _is_power(count: int) -> bool:
    return count & (count - 1) == 0


def transposed(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
