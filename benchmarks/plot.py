"""Draws result files as SVG: the name of each line stands at its end, and numbers above it compare it with the others.

A number says how many times as fast jaxsoftmax is as the fastest alternative. A peer that the newest run left out is drawn from
the last run that measured it, with a star at its name.
"""

import io
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks.bars import is_ours
from benchmarks.cells import YARDSTICKS
from benchmarks.results import Row, newest_of_each_cell

Figures = Iterator[tuple[str, Any]]  # names of files without their ending, and figures

OURS = "jaxsoftmax"  # the library's name in every figure
WIDTH = 7.3  # inches, 700 pixels: the width at which a README shows a figure
ORANGE, GREY, INK = "#d55e00", "#5f6368", "#202124"
NUMBERS = "Orange numbers: how many times as fast jaxsoftmax is as the fastest alternative."
EARLIER = "* measured in an earlier run."
A_COPY = "a copy"
TIMES = "\N{MULTIPLICATION SIGN}"

_BLUE, _GREEN, _PINK, _PURPLE, _OLIVE = "#0072b2", "#007a5a", "#a8477f", "#7b5ea7", "#7a6400"
LOOKS = {  # the name of each contender in plain words, its colour, and its marker
    OURS: (OURS, ORANGE, "o"),
    "jax.nn": ("jax.nn (XLA)", _BLUE, "s"),
    "optax": ("optax (XLA)", _BLUE, "s"),
    "jax": ("jax.lax (XLA)", _BLUE, "s"),
    "attention_mgpu": ("JAX Pallas", _BLUE, "s"),
    "cudnn": ("jax.nn (cuDNN)", _GREEN, "^"),
    "liger": ("Liger (Triton)", _GREEN, "^"),
    "flashinfer": ("FlashInfer", _GREEN, "^"),
    "flash_attention_3": ("FlashAttention-3", INK, "D"),
    "torch": ("torch", _PINK, "v"),
    "attention torch": ("torch SDPA", _PINK, "v"),
    "torch.compile": ("torch.compile", _PURPLE, "P"),
    "tokamax": ("tokamax", _OLIVE, "X"),
    "quack": ("quack", _OLIVE, "X"),
}
STYLE = {
    "font.size": 9,
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica"],
    "text.color": INK,
    "axes.titlesize": 9.5,
    "axes.titlelocation": "left",
    "axes.titlepad": 18,  # below it are the numbers
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e3e5e8",
    "grid.linewidth": 0.7,
    "xtick.color": INK,
    "ytick.color": INK,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "savefig.facecolor": "white",  # on dark pages too
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": OURS,
}

_LONG_COORDINATE = re.compile(r"(\.\d\d)\d+(?=[\s\",)])")  # of an attribute: text ends with "<"


def draw(rows: Sequence[Row], folder: Path, *, sweep: bool = False) -> list[Path]:
    """Draws the figures that the rows of a result file suffice for, as `<name>.svg` in `folder`; returns their paths."""
    import matplotlib as mpl

    with mpl.rc_context(STYLE):
        drawn = (figures_of_sweep if sweep else figures)(rows)
        return [save(figure, folder / f"{name}.svg") for name, figure in drawn]


def save(figure: Any, path: Path) -> Path:
    """Writes the same bytes for the same figure, coordinates with two decimals; returns the path."""
    figure.savefig(text := io.StringIO(), format="svg", metadata={"Date": None})
    path.write_text(_LONG_COORDINATE.sub(r"\1", text.getvalue()))
    return path


def figures(rows: Sequence[Row]) -> Figures:
    """Yields the figures of a result file that is no sweep."""
    rows = _newest(rows)
    yield from _figures_of_rows(rows)
    for pass_ in ("forward", "forward+backward"):
        yield from _figures_of_attention(pass_, [row for row in rows if (row.op, row.pass_) == ("attention", pass_)])
    yield from _figures_of_memory([row for row in rows if row.op == "linear_cross_entropy"])
    for bars in BARS:
        yield from _figures_of_bars(bars, rows)


def _newest(rows: Sequence[Row]) -> list[Row]:
    """The newest rows of each cell, and below them the newest of each peer that the newest run left out."""
    newest = newest_of_each_cell(list(rows))
    cells = {row.cell for row in newest if row.op != "copy"}
    known = {(row.cell, row.implementation) for row in newest}
    for row in reversed(rows):
        if row.cell in cells and not is_ours(row) and (row.cell, row.implementation) not in known:
            known.add((row.cell, row.implementation))
            newest.append(row)
    return [row for row in newest if row.implementation not in YARDSTICKS or row.op == "copy"]


# What is drawn.


def _figures_of_rows(rows: list[Row]) -> Figures:
    """Speed, and for softmax forward error too, against the columns of arrays of 2^27 elements; a panel for each dtype."""
    copies = {row.dtype: row.speed / 1e3 for row in rows if row.op == "copy"}
    for op, pass_ in (("softmax", "forward"), ("softmax", "backward"), ("log_softmax", "forward"), ("logsumexp", "forward")):
        own = [row for row in rows if (row.op, row.pass_, row.options) == (op, pass_, "") and prod(_shape(row)) > 2**26]
        dtypes = [dtype for dtype in ("float32", "bfloat16") if any(row.dtype == dtype for row in own)]
        if all(map(is_ours, own)):
            continue
        words = f"{op} {pass_}, {' and '.join(dtypes)}"
        figure, (panels,) = _panels(1, len(dtypes), 2.9)
        for dtype, axis in zip(dtypes, panels, strict=True):
            level = {A_COPY: copies[dtype]} if dtype in copies else {}
            _lines(axis, [row for row in own if row.dtype == dtype], _columns, lambda row: row.speed / 1e3, level)
            axis.set(title=dtype, xlabel="columns of a row")
        panels[0].set_ylabel("GB/s read and written")
        _from_zero(panels[0])
        yield f"{op}_{pass_}", _finish(figure, panels, f"Speed of {words}", own, NUMBERS)
        if (op, pass_) != ("softmax", "forward"):
            continue
        figure, (panels,) = _panels(1, len(dtypes), 2.5)
        for dtype, axis in zip(dtypes, panels, strict=True):
            axis.set_yscale("log")
            _lines(axis, [row for row in own if row.dtype == dtype], _columns, lambda row: row.error, {"allowed": 1}, None)
            axis.set(title=dtype, xlabel="columns of a row", ylim=(0.1, 100))
        panels[0].set_ylabel("largest error / allowed error")
        panels[0].yaxis.set_major_formatter("{x:g}")
        yield f"{op}_{pass_}_error", _finish(figure, panels, f"Error of {words}", own)


def _figures_of_attention(pass_: str, rows: list[Row]) -> Figures:
    """TFLOP/s against the sequence length: a row of panels for each head size, a column for causal masks and one for none."""
    kinds = {"": "", "causal=1": ", causal"}
    rows = [row for row in rows if row.dtype == "bfloat16" and row.options in kinds and _is_power(_shape(row)[1])]
    hidden = [_shape(row)[2] * _shape(row)[3] for row in rows]
    rows = [row for row, size in zip(rows, hidden, strict=True) if size == max(hidden, key=hidden.count)]
    if not rows:
        return
    head_sizes = sorted({_shape(row)[3] for row in rows})
    options = [option for option in kinds if any(row.options == option for row in rows)]
    figure, panels = _panels(len(head_sizes), len(options), 2.1)
    for head_size, line in zip(head_sizes, panels, strict=True):
        for option, axis in zip(options, line, strict=True):
            own = [row for row in rows if (row.options, _shape(row)[3]) == (option, head_size)]
            _lines(axis, own, lambda row: _shape(row)[1], lambda row: row.tflops)
            axis.set_title(f"head size {head_size}{kinds[option]}")
        line[0].set_ylabel("TFLOP/s")
        _from_zero(line[0])
    for axis in panels[-1]:
        axis.set_xlabel("sequence length")
    notes = [NUMBERS]
    if any(row.implementation == "attention_mgpu" for row in rows):
        notes.append("JAX Pallas runs in float16.")
    title = f"Speed of attention {pass_.replace('+', ' and ')}, bfloat16"
    yield f"attention_{pass_.replace('+', '_')}", _finish(figure, list(panels.flat), title, rows, *notes)


def _figures_of_memory(rows: list[Row]) -> Figures:
    """Time and memory of a linear layer's loss and gradients against the vocabulary."""
    rows = [row for row in rows if row.pass_ == "forward+backward" and not row.options and _is_power(_columns(row))]
    if not rows:
        return
    from matplotlib.ticker import LogLocator

    figure, (panels,) = _panels(1, 2, 2.9, sharey=False)
    values: dict[str, Callable[[Row], float | None]] = {
        "time, ms": lambda row: row.us / 1e3,
        "memory beyond inputs and outputs, GB": lambda row: row.temporaries and row.temporaries / 1e9,
    }
    for (label, value), axis in zip(values.items(), panels, strict=True):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        _lines(axis, rows, _columns, value, better=min)
        axis.set(title=label, xlabel="classes (vocabulary)")
    tokens, size, _ = _shape(rows[0])
    title = f"linear_cross_entropy with gradients, {rows[0].dtype}"
    notes = f"{tokens} tokens, hidden size {size}.", "Orange numbers: optax's time or memory divided by that of jaxsoftmax."
    yield "linear_cross_entropy", _finish(figure, panels, title, rows, *notes)


@dataclass(frozen=True)
class Bars:
    """A figure of bars. `cases` maps what says which cell it is, in `op pass dtype shape options`, to a heading."""

    name: str
    title: str
    unit: str
    value: Callable[[Row], float]
    better: Callable[..., float]
    cases: dict[str, str]
    notes: tuple[str, ...] = ()


def _us(row: Row) -> float:
    return row.us


BARS = (
    Bars(
        "decoding",
        "Speed of decoding, bfloat16",
        "GB/s of keys and values read",
        lambda row: row.speed / 1e3,
        max,
        {
            "decoding forward bfloat16 1x1x32x128 keys=4096 kv_heads=8": "1 sequence, 4096 keys",
            "decoding forward bfloat16 1x1x32x128 keys=131072 kv_heads=8": "1 sequence, 131072 keys",
            "decoding forward bfloat16 32x1x32x128 keys=4096 kv_heads=8": "32 sequences, 4096 keys",
            "decoding forward bfloat16 32x1x32x128 keys=32768 kv_heads=8": "32 sequences, 32768 keys",
            "decoding forward bfloat16 32x4x32x128 keys=4096 kv_heads=8": "32 sequences, 4096 keys, 4 queries at a time",
            "decoding forward bfloat16 32x1x32x256 keys=4096 kv_heads=8": "32 sequences, 4096 keys, head size 256",
        },
        ("32 query heads share 8 key heads; the head size is 128 unless a heading says otherwise.",),
    ),
    Bars(
        "cross_entropy",
        "Time of cross_entropy with its gradient, bfloat16",
        "ms",
        lambda row: row.us / 1e3,
        min,
        {
            f"cross_entropy forward+backward bfloat16 8192x{classes}": f"8192 rows of {classes} classes"
            for classes in (32000, 50257, 128256, 256000)
        },
    ),
    Bars(
        "top_k",
        "Time of top_k and categorical, float32",
        "us",
        _us,
        min,
        {
            "top_k forward float32 1x128256 k=50": "the 50 largest entries, 1 row",
            "top_k forward float32 64x128256 k=50": "the 50 largest entries, 64 rows",
            "top_k forward float32 512x128256 k=50": "the 50 largest entries, 512 rows",
            "categorical forward float32 512x128256": "a sample, 512 rows",
            "categorical forward float32 512x128256 top_k=50": "a sample with top_k=50, 512 rows",
            "categorical forward float32 512x128256 top_p=0.9": "a sample with top_p=0.9, 512 rows",
        },
        ("A row has 128256 columns. FlashInfer's samplers with top_k or top_p include the softmax that they need.",),
    ),
)


def _figures_of_bars(bars: Bars, rows: list[Row]) -> Figures:
    """A group of bars for each case, if every case was measured beside a peer."""
    groups = {case: [row for row in rows if " ".join(filter(None, row.cell)) == case] for case in bars.cases}
    if not all(any(map(is_ours, group)) and len(group) > 1 for group in groups.values()):
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 1.0 + 0.2 * sum(len(group) + 1.3 for group in groups.values())), layout="constrained")
    axis, at, ticks = figure.subplots(), 0.0, {}
    for case, group in groups.items():
        axis.annotate(bars.cases[case], (0, at), (4, 0), textcoords="offset points", va="center", weight="bold")
        values = {_key(row): bars.value(row) for row in group}
        (ratio,) = _ratios({key: {0: value} for key, value in values.items()}, bars.better).values()
        for key in sorted(values, key=list(LOOKS).index):
            at += 1
            name, colour, _ = LOOKS[key]
            axis.barh(at, values[key], 0.8, color=colour)
            number = f"{values[key]:#.3g}" if values[key] < 99.5 else f"{values[key]:.0f}"
            text = axis.annotate(number, (values[key], at), (4, 0), textcoords="offset points", va="center", fontsize=8)
            if key == OURS:
                axis.annotate(_times(ratio), (1, 0.5), (8, 0), text, "offset points", va="center", **_OF_OURS)
            ticks[at] = name + _star(key, group), colour
        at += 1.3
    axis.set_yticks(list(ticks), [name for name, _ in ticks.values()])
    for label, (name, colour) in zip(axis.get_yticklabels(), ticks.values(), strict=True):
        label.set(color=colour, weight="bold" if name == OURS else "normal")
    axis.tick_params(axis="y", length=0)
    axis.set(ylim=(at - 0.5, -0.7), xlabel=bars.unit)
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.2)
    drawn = [row for group in groups.values() for row in group]
    yield bars.name, _finish(figure, [axis], f"{bars.title}", drawn, *bars.notes, NUMBERS)


def figures_of_sweep(rows: Sequence[Row]) -> Figures:
    """Yields the share of a copy's speed at each width that was drawn: a row of panels for each op, a column for each dtype."""
    rows = [row for row in _newest(rows) if row.op != "copy" and row.copy_share is not None]
    ops = list(dict.fromkeys((row.op, row.pass_) for row in rows if not is_ours(row)))
    rows = [row for row in rows if (row.op, row.pass_) in ops]
    if not rows:
        return
    dtypes = sorted({row.dtype for row in rows}, reverse=True)
    figure, panels = _panels(len(ops), len(dtypes), 2.4)
    for (op, pass_), line in zip(ops, panels, strict=True):
        for dtype, axis in zip(dtypes, line, strict=True):
            own = [row for row in rows if (row.op, row.pass_, row.dtype) == (op, pass_, dtype)]
            ratios = _ratios(_lines(axis, own, _columns, lambda row: row.copy_share, {A_COPY: 1}, None), max).values()
            axis.set_title(f"{op} {pass_}, {dtype}")
            words = f"{_times(min(ratios))} to {_times(max(ratios))}" if ratios else ""
            axis.text(0, 1.02, words, transform=axis.transAxes, va="bottom", **_OF_OURS)
        line[0].set_ylabel("speed / speed of a copy")
        _from_zero(line[0])
    for axis in panels[-1]:
        axis.set_xlabel("columns of a row")
        axis.set_xticks([2**power for power in range(6, 21, 2)], [_short(2**power) for power in range(6, 21, 2)])
    title = f"Speed at {len({_columns(row) for row in rows})} random widths"
    yield "softmax_sweep", _finish(figure, list(panels.flat), title, rows, NUMBERS)


# How it is drawn.


def _panels(rows: int, columns: int, height: float, *, sharey: Any = "row") -> tuple[Any, Any]:
    """A figure of the width of a page, and its panels, `height` inches each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8 + height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)


def _lines(
    axis: Any,
    rows: list[Row],
    size: Callable[[Row], int],
    value: Callable[[Row], float | None],
    levels: dict[str, float] | None = None,
    better: Callable[..., float] | None = max,
) -> dict[str, dict[int, float]]:
    """Draws a line for each contender through the powers of two, and hollow marks for other sizes; without powers, marks alone.

    `levels` are the heights of dashed lines, by name. With `better`, `max` or `min`, numbers above the panel compare ours with
    the best of the others. Returns the values that are drawn, by the key of a contender and by size.
    """
    values: dict[str, dict[int, float]] = {}
    for row in rows:
        if found := value(row):
            values.setdefault(_key(row), {})[size(row)] = found
    for key in sorted(values, key=list(LOOKS).index, reverse=True):  # ours last, above the others
        name, colour, marker = LOOKS[key]
        look = {"color": colour, "marker": marker, "markersize": 5 if key == OURS else 4}
        points = sorted(values[key].items())
        line, others = ([(x, y) for x, y in points if _is_power(x) == power] for power in (True, False))
        label = name + _star(key, rows)
        axis.plot(*transposed(line), **look, linewidth=2.8 if key == OURS else 1.4, label=label if line else None)
        look |= {"markerfacecolor": "none", "markeredgewidth": 0.8} if line else {"markersize": 3, "label": label}
        axis.plot(*transposed(others), **look, linestyle="")
    for name, level in (levels or {}).items():
        axis.axhline(level, color=GREY, linestyle="--", linewidth=1.2, label=name)
    powers = sorted({x for points in values.values() for x in points if _is_power(x)})
    bits = [power.bit_length() for power in powers]
    powers = [power for power, own in zip(powers, bits, strict=True) if (own - bits[0]) % ((bits[-1] - bits[0]) // 6 + 1) == 0]
    axis.set_xscale("log", base=2)
    axis.set_xticks(powers, [_short(power) for power in powers])
    axis.minorticks_off()
    if better is not None:
        for x, ratio in _ratios(values, better).items():
            if x in powers:
                place = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom"}
                axis.text(x, 1.02, _times(ratio), **place, **_OF_OURS)
    return values


def _from_zero(axis: Any) -> None:
    """Lets the axis and those that share it begin at zero, with room for marks at the top, when all is drawn."""
    axis.set_ylim(0, 1.04 * axis.get_ylim()[1])


_OF_OURS: dict[str, Any] = {"color": ORANGE, "fontsize": 7.5, "weight": "bold"}


def _ratios(values: dict[str, dict[int, float]], better: Callable[..., float]) -> dict[int, float]:
    """How many times as good ours is as the best of the others at each size, where both are known."""
    ratios = {}
    for x, ours in values.get(OURS, {}).items():
        others = [points[x] for key, points in values.items() if key != OURS and x in points]
        if others:
            ratios[x] = ours / max(others) if better is max else min(others) / ours
    return ratios


def _times(ratio: float) -> str:
    return f"{ratio:.2f}{TIMES}" if ratio < 9.995 else f"{ratio:.1f}{TIMES}"


def label_ends(axis: Any) -> None:
    """Writes the label of each line to the right of the panel, as near to the line's end as the others allow.

    The limits of the panel are final. A thin line leads from the end of the line to the name.
    """
    lines = [line for line in axis.get_lines() if not line.get_label().startswith("_")]
    names = {}
    for line in lines:
        own = {"color": line.get_color(), "va": "center", "fontsize": 8.5}
        leader = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7, "alpha": 0.7, "shrinkA": 1, "shrinkB": 3}
        own["weight"] = "bold" if line.get_label() == OURS else "normal"
        places = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False}
        names[line.get_label()] = axis.annotate(line.get_label(), (1, 1), (1.06, 0.5), arrowprops=leader, **places, **own)
    axis.figure.draw_without_rendering()  # which gives the panels their places
    for line in lines:
        end = line.get_transform().transform(line.get_xydata()[-1])
        names[line.get_label()].xy = tuple(axis.transAxes.inverted().transform(end))
    gap = 11.5 / 72 * axis.figure.dpi / axis.bbox.height
    for label, height in spread({label: name.xy[1] for label, name in names.items()}, gap).items():
        names[label].xyann = names[label].xyann[0], height


def spread(heights: dict[str, float], gap: float) -> dict[str, float]:
    """Heights at least `gap` apart and at most 1, in the same order; those that would touch are centred on their mean."""
    groups: list[tuple[list[str], float]] = []
    for name in sorted(heights, key=lambda name: heights[name]):
        names, mean = [name], heights[name]
        while groups and mean - gap * (len(names) - 1) / 2 - gap < groups[-1][1] + gap * (len(groups[-1][0]) - 1) / 2:
            below, of_below = groups.pop()
            mean = (of_below * len(below) + mean * len(names)) / (len(below) + len(names))
            names = below + names
        groups.append((names, mean))
    placed = {name: mean + gap * (at - (len(names) - 1) / 2) for names, mean in groups for at, name in enumerate(names)}
    ceiling = 1.0
    for name in reversed(placed):
        placed[name] = min(placed[name], ceiling)
        ceiling = placed[name] - gap
    return placed


def finish(figure: Any, panels: Any, title: str, *notes: str) -> Any:
    """Names the lines of all panels, and writes the title and the notes; returns the figure."""
    figure.suptitle(title, x=0.01, ha="left", fontsize=10.5, weight="bold")
    figure.supxlabel(textwrap.fill(" ".join(notes), 120), x=0.01, ha="left", fontsize=8, color=GREY)
    for axis in panels:
        label_ends(axis)
    return figure


def _finish(figure: Any, panels: Any, title: str, rows: list[Row], *notes: str) -> Any:
    """Likewise, with the notes that the rows need."""
    has_star = any(_star(_key(row), rows) for row in rows)
    sizes = {
        size
        for axis in panels
        for line in axis.get_lines()
        if line.get_markerfacecolor() == "none"
        for size in line.get_xdata()
    }
    more = ["Hollow marks: widths that are no power of two."] * bool(sizes) + [EARLIER] * has_star
    return finish(figure, panels, f"{title}, {rows[0].gpu}", *notes, *more, f"jax {max(row.jax for row in rows)}.")


def _key(row: Row) -> str:
    """The key of a row's contender in `LOOKS`."""
    own = f"{row.op} {row.implementation}"
    return OURS if is_ours(row) else own if own in LOOKS else row.implementation


def _star(key: str, rows: list[Row]) -> str:
    """A star if a contender's rows are of other runs than ours."""
    runs = {row.cell: row.run for row in rows if is_ours(row)}
    return " *" * any(row.run != runs.get(row.cell, row.run) for row in rows if _key(row) == key)


def _shape(row: Row) -> list[int]:
    return list(map(int, row.shape.split("x")))


def _columns(row: Row) -> int:
    return _shape(row)[-1]


def _is_power(count: int) -> bool:
    return count & (count - 1) == 0


def _short(count: int) -> str:
    """A power of two as 512, 32K or 1M."""
    units = [(2**20, "M"), (2**10, "K")]
    return next((f"{count // unit}{letter}" for unit, letter in units if count >= unit), str(count))


def transposed(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
