"""The style of all figures: the name of each line stands at its end, and numbers above a panel compare ours with the others.

A number says how many times as fast jaxsoftmax is as the fastest alternative. Colours differ for colour-blind readers.
"""

import io
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.bars import is_ours
from benchmarks.results import Row

OURS = "jaxsoftmax"  # the library's name in every figure
WIDTH = 7.3  # inches, 700 pixels: the width at which a README shows a figure
ORANGE, GREY, INK = "#d55e00", "#5f6368", "#202124"
NUMBERS = "Orange numbers: how many times as fast jaxsoftmax is as the fastest alternative."
EARLIER = "* measured in an earlier run."
A_COPY = "a copy"
TIMES = "\N{MULTIPLICATION SIGN}"

# At least 31 apart in CIELAB, ours and any two of one figure, for readers without red or green cones too.
_BLUE, _GREEN, _BROWN, _INDIGO = "#0072b2", "#0f9980", "#5c3310", "#2222d8"
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
    "torch": ("torch", _BROWN, "v"),
    "attention torch": ("torch SDPA", _BROWN, "v"),
    "torch.compile": ("torch.compile", _INDIGO, "P"),
    "tokamax": ("tokamax", _INDIGO, "X"),
    "quack": ("quack", INK, "X"),
}
_LINE_OF_TEXT = 11.5  # points from a name to the one below it
OF_OURS: dict[str, Any] = {"color": ORANGE, "fontsize": 7.5, "weight": "bold"}  # numbers beside what is ours
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


def save(figure: Any, path: Path) -> Path:
    """Writes the same bytes for the same figure, coordinates with two decimals; returns the path."""
    figure.savefig(text := io.StringIO(), format="svg", metadata={"Date": None})
    path.write_text(_LONG_COORDINATE.sub(r"\1", text.getvalue()))
    return path


def panels_of(rows: int, columns: int, height: float, *, sharey: Any = "row") -> tuple[Any, Any]:
    """A figure of the width of a page, and its panels, `height` inches each."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 0.8 + height * rows), layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, sharex=True, sharey=sharey)


def draw_lines(
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
            values.setdefault(key_of(row), {})[size(row)] = found
    for key in sorted(values, key=list(LOOKS).index, reverse=True):  # ours last, above the others
        name, colour, marker = LOOKS[key]
        look = {"color": colour, "marker": marker, "markersize": 5 if key == OURS else 4}
        points = sorted(values[key].items())
        line, others = ([(x, y) for x, y in points if is_power(x) == power] for power in (True, False))
        label = name + star(key, rows)
        axis.plot(*transposed(line), **look, linewidth=2.8 if key == OURS else 1.4, label=label if line else None)
        look |= {"markerfacecolor": "none", "markeredgewidth": 0.8} if line else {"markersize": 3, "label": label}
        axis.plot(*transposed(others), **look, linestyle="")
    for name, level in (levels or {}).items():
        axis.axhline(level, color=GREY, linestyle="--", linewidth=1.2, label=name)
    powers = sorted({x for points in values.values() for x in points if is_power(x)})
    bits = [power.bit_length() for power in powers]
    powers = [power for power, own in zip(powers, bits, strict=True) if (own - bits[0]) % ((bits[-1] - bits[0]) // 6 + 1) == 0]
    axis.set_xscale("log", base=2)
    axis.set_xticks(powers, [short(power) for power in powers])
    axis.minorticks_off()
    if better is not None:
        for x, ratio in ratios_of(values, better).items():
            if x in powers:
                place = {"transform": axis.get_xaxis_transform(), "ha": "center", "va": "bottom"}
                axis.text(x, 1.02, times(ratio), **place, **OF_OURS)
    return values


def from_zero(axis: Any) -> None:
    """Lets the axis and those that share it begin at zero, with room for marks at the top, when all is drawn."""
    axis.set_ylim(0, 1.04 * axis.get_ylim()[1])


def ratios_of(values: dict[str, dict[int, float]], better: Callable[..., float]) -> dict[int, float]:
    """Returns ours over the best of the others at each size that both have: above 1, ours is better."""
    ratios = {}
    for x, ours in values.get(OURS, {}).items():
        others = [points[x] for key, points in values.items() if key != OURS and x in points]
        if others:
            ratios[x] = ours / max(others) if better is max else min(others) / ours
    return ratios


def times(ratio: float) -> str:
    return f"{ratio:.2f}{TIMES}" if ratio < 9.995 else f"{ratio:.1f}{TIMES}"


def label_ends(panels: Any) -> None:
    """Writes the label of each line to the right of its panel, as near to the line's end as the others allow.

    The limits of the panels are final. A thin line leads from the end of the line to the name.
    """
    names: list[dict[Any, Any]] = [{} for _ in panels]
    for axis, own in zip(panels, names, strict=True):
        for line in axis.get_lines():
            if not line.get_label().startswith("_"):
                own[line] = _name(axis, line)
    panels[0].figure.draw_without_rendering()  # which gives the panels their places
    for axis, own in zip(panels, names, strict=True):
        to_panel = axis.transAxes.inverted()
        for line, name in own.items():
            name.xy = tuple(to_panel.transform(line.get_transform().transform(line.get_xydata()[-1])))
        gap = _LINE_OF_TEXT / 72 * axis.figure.dpi / axis.bbox.height
        heights = spread({line.get_label(): name.xy[1] for line, name in own.items()}, gap)
        for line, name in own.items():
            name.xyann = name.xyann[0], heights[line.get_label()]


def _name(axis: Any, line: Any) -> Any:
    """The name of a line and the thin line that leads to it, to the right of the panel; heights are not yet known."""
    leader = {"arrowstyle": "-", "color": line.get_color(), "linewidth": 0.7, "alpha": 0.7, "shrinkA": 1, "shrinkB": 3}
    places = {"xycoords": "axes fraction", "textcoords": "axes fraction", "annotation_clip": False, "va": "center"}
    look = {"color": line.get_color(), "fontsize": 8.5, "weight": "bold" if line.get_label() == OURS else "normal"}
    return axis.annotate(line.get_label(), (1, 1), (1.06, 0.5), arrowprops=leader, **places, **look)


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
    label_ends(panels)
    return figure


def finish_rows(figure: Any, panels: Any, title: str, rows: list[Row], *notes: str) -> Any:
    """Likewise, with the notes that the rows need."""
    has_star = any(star(key_of(row), rows) for row in rows)
    sizes = {
        size
        for axis in panels
        for line in axis.get_lines()
        if line.get_markerfacecolor() == "none"
        for size in line.get_xdata()
    }
    more = ["Hollow marks: widths that are no power of two."] * bool(sizes) + [EARLIER] * has_star
    return finish(figure, panels, f"{title}, {rows[0].gpu}", *notes, *more, f"jax {max(row.jax for row in rows)}.")


def key_of(row: Row) -> str:
    """The key of a row's contender in `LOOKS`."""
    own = f"{row.op} {row.implementation}"
    return OURS if is_ours(row) else own if own in LOOKS else row.implementation


def star(key: str, rows: list[Row]) -> str:
    """A star if a contender's rows are of other runs than ours."""
    runs = {row.cell: row.run for row in rows if is_ours(row)}
    return " *" * any(row.run != runs.get(row.cell, row.run) for row in rows if key_of(row) == key)


def shape_of(row: Row) -> list[int]:
    return list(map(int, row.shape.split("x")))


def columns_of(row: Row) -> int:
    return shape_of(row)[-1]


def is_power(count: int) -> bool:
    return count & (count - 1) == 0


def short(count: int) -> str:
    """A power of two as 512, 32K or 1M."""
    units = [(2**20, "M"), (2**10, "K")]
    return next((f"{count // unit}{letter}" for unit, letter in units if count >= unit), str(count))


def transposed(points: list[tuple[int, float]]) -> tuple[list[int], list[float]]:
    return [x for x, _ in points], [y for _, y in points]
