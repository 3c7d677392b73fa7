"""Draws result files: bandwidth against columns, and accuracy beside it.

For attention arithmetic against sequence length; for cross-entropy of a linear layer time and memory against the vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.bars import is_ours
from benchmarks.results import Row

FIGURES = (("softmax", "forward"), ("softmax", "backward"), ("log_softmax", "forward"), ("logsumexp", "forward"))

Ends = dict[str, tuple[float, str]]  # of lines: the height of the last point, and the colour, by name

OURS = "jaxsoftmax"  # the library's name in every figure
A_COPY = "a copy as it was measured, which is no limit"  # what is in a cache, or is read alone, may be faster
GREY = "#80868f"  # readable on white and on black, as are the others
_COLOURS = {
    OURS: "#e8590c",
    "jax.nn": "#3b82f6",
    "torch": "#2f9e44",
    "torch.compile": "#a855f7",
    "quack": "#d19a00",
    "optax": "#3b82f6",
    "sum": GREY,
    "copy": GREY,
    "cudnn": "#3b82f6",
    "attention_mgpu": "#a855f7",
    "tokamax": "#d19a00",
    "flash_attention_3": "#0891b2",
}
_NAMES = {"cudnn": "jax.nn (cuDNN)", "attention_mgpu": "JAX's Pallas kernel", "flash_attention_3": "FlashAttention-3"}
_NAMES_OF_ATTENTION = {**_NAMES, "torch": "torch (flash attention)"}
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
    "svg.hashsalt": OURS,
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
    rows = [row for row in run if row.op == "linear_cross_entropy" and _is_power(_columns(row))]
    if rows:
        paths.append(_figure_of_memory(folder / "linear_cross_entropy.svg", rows))
    return paths


def draw_sweep(run: Sequence[Row], folder: Path) -> list[Path]:
    """Draws the share of a copy over the columns, as `softmax_sweep.svg` in `folder`; returns its path, none without rows."""
    rows = [row for row in run if row.op != "copy" and row.copy_share is not None]
    return [_figure_of_sweep(folder / "softmax_sweep.svg", rows)] if rows else []


def _length(row: Row) -> int:
    return int(row.shape.split("x")[1])


def _head_size(row: Row) -> int:
    return int(row.shape.split("x")[3])


def _columns(row: Row) -> int:
    return int(row.shape.rsplit("x", 1)[1])


def _of_one_size(rows: list[Row]) -> list[Row]:
    """The rows whose hidden size is the one that has the most."""
    hidden = [int(row.shape.split("x")[2]) * _head_size(row) for row in rows]
    return [row for row, own in zip(rows, hidden, strict=True) if own == max(hidden, key=hidden.count)]


def _large(row: Row) -> bool:
    """Whether a row is of the size at which columns are compared, 2^27 elements, and not of a smaller array."""
    return math.prod(map(int, row.shape.split("x"))) > 2**26


def _is_power(count: int) -> bool:
    return count & (count - 1) == 0


def _figure_of_attention(path: Path, rows: list[Row]) -> Path:
    """A panel for each head size, a row of panels for causal attention and one for the other."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    head_sizes = sorted({_head_size(row) for row in rows})
    kinds = [kind for kind in _CAUSAL if any(row.options == kind for row in rows)]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.8 + 3.1 * len(head_sizes), 0.9 + 2.7 * len(kinds)), layout="constrained")
        panels = figure.subplots(len(kinds), len(head_sizes), squeeze=False, sharex=True, sharey="row")
        for kind, line in zip(kinds, panels, strict=True):
            line[0].set_ylabel("TFLOP/s")
            lasts = []
            for head_size, axis in zip(head_sizes, line, strict=True):
                own = [row for row in rows if row.options == kind and _head_size(row) == head_size]
                lasts.append(_lines(axis, own, _length, lambda row: row.tflops, _NAMES_OF_ATTENTION))
                axis.set(title=f"head size {head_size}, {_CAUSAL[kind]}")
                axis.minorticks_off()
            line[0].set_ylim(0, None)  # of all, when all are drawn
            label_ends(line[-1], lasts[-1])
        for axis in panels[-1]:
            axis.set_xlabel("sequence length")
        counted = ", causal counted as half" if "causal=1" in kinds else ""
        _finish(figure, path, f"attention {rows[-1].pass_}, {rows[-1].dtype}{counted}", rows[-1], panels)
    return path


def _figure_of_memory(path: Path, rows: list[Row]) -> Path:
    """A panel of time and one of memory against the vocabulary."""
    import matplotlib as mpl
    from matplotlib.figure import Figure
    from matplotlib.ticker import LogLocator

    kinds: dict[str, Callable[[Row], float | None]] = {
        "time, ms": lambda row: row.us / 1e3,
        "temporary memory, GB": lambda row: row.temporaries and row.temporaries / 1e9,
    }
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 3.7), layout="constrained")
        panels = figure.subplots(1, 2, squeeze=False)
        for axis, (label, what) in zip(panels.flat, kinds.items(), strict=True):
            lasts = _lines(axis, rows, _columns, what, _NAMES)
            axis.set(xlabel="vocabulary", ylabel=label, yscale="log")
            axis.minorticks_off()
            axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            axis.yaxis.set_major_formatter("{x:g}")
            label_ends(axis, lasts)
        tokens, size, _ = rows[-1].shape.split("x")
        _finish(figure, path, f"loss and gradients of {tokens} tokens, hidden size {size}, {rows[-1].dtype}", rows[-1], panels)
    return path


def _figure(path: Path, op: str, pass_: str, rows: list[Row], dtypes: list[str], copies: dict[str, Row]) -> Path:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(10, 0.8 + 2.9 * len(dtypes)), layout="constrained")
        panels = figure.subplots(len(dtypes), 2, squeeze=False, sharex=True)
        for (speed, accuracy), dtype in zip(panels, dtypes, strict=True):
            own = [row for row in rows if row.dtype == dtype]
            lasts = _lines(speed, own, _columns, lambda row: row.speed / 1e3, _NAMES)
            speed.set(title=dtype, ylabel="GB/s", ylim=(0, None))
            if dtype in copies:
                lasts["copy"] = _level(speed, copies[dtype].speed / 1e3)
            label_ends(speed, lasts)
            lasts = _lines(accuracy, own, _columns, lambda row: row.error, _NAMES)
            accuracy.set(title=dtype, ylabel="largest error / budget", yscale="log")
            lasts["budget"] = _level(accuracy, 1)
            low, high = accuracy.get_ylim()
            accuracy.set_ylim(min(low, 0.1), max(high, 10))
            label_ends(accuracy, lasts)
        for axis in panels.flat:
            axis.minorticks_off()
        for axis in panels[-1]:
            axis.set_xlabel("columns")
        _finish(figure, path, f"{op} {pass_}", rows[-1], panels, f"{A_COPY}, and the budget of the error")
    return path


def _figure_of_sweep(path: Path, rows: list[Row]) -> Path:
    """A panel for each op, a row of panels for each dtype."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    ops = list(dict.fromkeys((row.op, row.pass_) for row in rows))
    dtypes = list(dict.fromkeys(row.dtype for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(1.8 + 3.1 * len(ops), 0.9 + 2.7 * len(dtypes)), layout="constrained")
        panels = figure.subplots(len(dtypes), len(ops), squeeze=False, sharex=True, sharey=True)
        for dtype, line in zip(dtypes, panels, strict=True):
            line[0].set_ylabel("share of a copy")
            lasts: Ends = {}
            for (op, pass_), axis in zip(ops, line, strict=True):
                lasts |= _dots(axis, [row for row in rows if (row.op, row.pass_, row.dtype) == (op, pass_, dtype)])
                axis.set_title(f"{op} {pass_}, {dtype}")
            line[0].set_ylim(0, None)  # of all, when all are drawn
            label_ends(line[-1], lasts)
        for axis in panels[-1]:
            axis.set_xlabel("columns")
        _finish(figure, path, "widths drawn at random", rows[-1], panels, A_COPY)
    return path


def _dots(axis: Any, rows: list[Row]) -> Ends:
    """A mark for each width, and the copy. Returns what `_lines` does."""
    by_name: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        by_name.setdefault(OURS if is_ours(row) else row.implementation, []).append((_columns(row), row.copy_share or 0.0))
    lasts: Ends = {}
    for name, points in by_name.items():
        look = {"color": _COLOURS[name], "marker": "o", "markersize": 4 if name == OURS else 2.5, "linestyle": ""}
        axis.plot(*transposed(sorted(points)), **look, zorder=3 if name == OURS else 2)
        lasts[name] = max(points)[1], _COLOURS[name]
    lasts["copy"] = _level(axis, 1)
    axis.set_xscale("log", base=2)
    ticks = [2**power for power in range(6, 21, 2)]
    axis.set_xticks(ticks, [_short(count) for count in ticks])
    axis.minorticks_off()
    return lasts


def _finish(figure: Any, path: Path, title: str, newest: Row, panels: Any, dashed: str = "") -> None:
    """Says what marks mean and what was measured, and writes the file."""
    legend(figure, panels, dashed)
    figure.suptitle(f"{title}, {newest.gpu}, jax {newest.jax}")
    figure.savefig(path, transparent=True, metadata={"Date": None})


def legend(figure: Any, panels: Any, dashed: str) -> None:
    """Says what each mark means, and dashed lines, once for all panels: lines have their names at their ends."""
    from matplotlib.lines import Line2D

    lines = [line for axis in panels.flat for line in axis.get_lines() if len(line.get_xdata())]
    hollow = any(line.get_marker() == "o" and not _filled(line) for line in lines)
    look: dict[str, Any] = {"color": GREY, "linestyle": "", "marker": "o", "markersize": 4}
    marks = {
        "measured, a power of two" if hollow else "measured": (Line2D([], [], **look), any(map(_filled, lines))),
        "measured, another length": (Line2D([], [], **look, markerfacecolor="none"), hollow),
        dashed: (Line2D([], [], color=GREY, linestyle="--", linewidth=1.2), bool(dashed)),
    }
    entries = {label: handle for label, (handle, wanted) in marks.items() if wanted}
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=len(entries), frameon=False)


def _filled(line: Any) -> bool:
    return line.get_marker() == "o" and line.get_markerfacecolor() != "none"


def _level(axis: Any, value: float) -> tuple[float, str]:
    """A dashed line across a panel; its height and its colour."""
    axis.axhline(value, color=GREY, linestyle="--", linewidth=1.2)
    return value, GREY


def _lines(
    axis: Any,
    rows: list[Row],
    size: Callable[[Row], int],
    what: Callable[[Row], float | None],
    names: dict[str, str],
) -> Ends:
    """A line for each implementation through the powers of two; other sizes are hollow marks beside it.

    Returns the height at which each ends, and its colour, by its name.
    """
    by_name: dict[str, list[Row]] = {}
    for row in rows:
        by_name.setdefault(OURS if is_ours(row) else row.implementation, []).append(row)
    lasts: Ends = {}
    for name in sorted(by_name, key=list(_COLOURS).index):
        ours = name == OURS
        look = {"color": _COLOURS[name], "marker": "o", "markersize": 4, "zorder": 3 if ours else 2}
        values = ((size(row), what(row)) for row in by_name[name])
        points = sorted((at, value) for at, value in values if value is not None and 0 < value < float("inf"))
        line = [point for point in points if _is_power(point[0])]
        axis.plot(*transposed(line), **look, linewidth=2.2 if ours else 1.2)
        odd = [point for point in points if not _is_power(point[0])]
        axis.plot(*transposed(odd), **look, linestyle="", markerfacecolor="none")
        if line:
            lasts[names.get(name, name)] = line[-1][1], _COLOURS[name]
    powers = sorted({size(row) for row in rows if _is_power(size(row))})
    if len(powers) > 11:  # their labels would touch
        powers = [power for power in powers if power.bit_length() % 2]
    axis.set_xscale("log", base=2)
    axis.set_xticks(powers, [_short(count) for count in powers])
    return lasts


def _short(count: int) -> str:
    """A power of two as 512, 32K or 1M."""
    units = [(2**20, "M"), (2**10, "K")]
    return next((f"{count // unit}{letter}" for unit, letter in units if count >= unit), str(count))


def label_ends(axis: Any, lasts: Ends, gap: float = 0.085) -> None:
    """Names at the right edge of a panel, each as near to the end of its line as the others allow; limits are final."""
    to_panel, right = axis.transScale + axis.transLimits, axis.get_xlim()[1]
    heights = {name: float(to_panel.transform((right, y))[1]) for name, (y, _) in lasts.items()}
    for name, at in spread(heights, gap).items():
        axis.text(1.02, at, name, color=lasts[name][1], transform=axis.transAxes, va="center", fontsize=8)


def spread(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Heights at least `gap` apart, in the same order; those that would touch are centred on their mean."""
    groups: list[tuple[list[str], float]] = []
    for name in sorted(heights, key=lambda name: heights[name]):
        names, mean = [name], heights[name]
        while groups and mean - gap * (len(names) - 1) / 2 - gap < groups[-1][1] + gap * (len(groups[-1][0]) - 1) / 2:
            below, of_below = groups.pop()
            mean = (of_below * len(below) + mean * len(names)) / (len(below) + len(names))
            names = below + names
        groups.append((names, mean))
    return {name: mean + gap * (at - (len(names) - 1) / 2) for names, mean in groups for at, name in enumerate(names)}


def transposed(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
