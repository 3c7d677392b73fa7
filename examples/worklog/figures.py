"""The figures of docs/worklog.md."""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plot
from examples.worklog import common
from examples.worklog.cells import rows_of
from examples.worklog.common import LONG_ROW, OPERATIONS, PEAK, ROW, SIZES, Shape, shown, size
from examples.worklog.measured import Measured

FIGURES = ("worklog_time.svg", "worklog_roofline.svg")
_COLOURS = {
    "on_chip": "#e8590c",  # the library's, as in the other figures
    "jax.nn": "#3b82f6",
    "torch": "#2f9e44",
    "naive": "#c2255c",
    "separate": "#d19a00",
    "tree": "#8d6e63",
    "fused": "#a855f7",
    "fused_kept": "#7c83fd",
    "online_thread": "#0c9c7c",
    "online_lanes": "#65a30d",
    "online_wide": "#0891b2",
    "online_blocks": "#db6fb0",
}
# The panels of the first figure: a title, the shape of so many elements, and the lines, which stand for those that lie on them.
PANELS: tuple[tuple[str, dict[int, Shape], tuple[str, ...]], ...] = (
    (f"rows of {ROW}", rows_of(ROW), ("separate", "fused", "online_thread", "on_chip", "jax.nn")),
    (f"rows of {LONG_ROW}", rows_of(LONG_ROW), ("separate", "tree", "fused", "online_wide", "on_chip", "jax.nn")),
    ("one vector", {count: (1, count) for count in SIZES}, ("tree", "online_blocks", "on_chip", "jax.nn", "torch")),
)


def draw(measured: Measured, folder: Path) -> list[Path]:
    """Draws both figures into a folder, if there are times; returns their paths."""
    if not measured.times or measured.copy_speed is None:
        return []
    import matplotlib as mpl
    from matplotlib.figure import Figure

    newest, paths = measured.times[-1], [folder / name for name in FIGURES]
    for path, panels_of, height in zip(paths, (_draw_times, _draw_roofline), (4.4, 5.0), strict=True):
        with mpl.rc_context(plot.STYLE):
            figure = Figure(figsize=(12 if panels_of is _draw_times else 9, height), layout="constrained")
            panels = panels_of(figure, measured)
            plot.legend(figure, panels, plot.A_COPY)
            figure.suptitle(f"softmax, float32, {newest.gpu}, jax {newest.jax}")
            figure.savefig(path, transparent=True, metadata={"Date": None})
    return paths


def _draw_times(figure: Any, measured: Measured) -> Any:
    """Time against the number of elements: rows that the cache holds, rows that it does not, and one vector."""
    panels, lasts = figure.subplots(1, 3, sharex=True, sharey=True), []
    for axis, (title, shape_of, names) in zip(panels, PANELS, strict=True):
        ends: plot.Ends = {}
        for name in names:
            times = {n: measured.time(name, shape) for n, shape in shape_of.items()}
            points = [(n, us) for n, us in times.items() if us is not None]
            if points:
                look = {"color": _COLOURS[name], "linewidth": 2.2 if name == "on_chip" else 1.2}
                axis.plot(*plot.transposed(points), **look, marker="o", markersize=3)
                ends[shown(name)] = points[-1][1], _COLOURS[name]
        limit = [2 * size((1, n)) / (measured.copy_speed or 1) for n in SIZES]
        axis.plot(SIZES, limit, color=plot.GREY, linestyle="--", linewidth=1.2)
        ends["2N, as a copy"] = limit[-1], plot.GREY
        lasts.append(ends)
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES[::3])
        axis.set(yscale="log", xlabel="elements", title=title)
    panels[0].set_ylim(0.5, None)
    for axis, ends in zip(panels, lasts, strict=True):  # when the limits that all share are final
        plot.label_ends(axis, ends, gap=0.055)
    panels[0].set_ylabel("us")
    return panels


def _draw_roofline(figure: Any, measured: Measured) -> Any:
    """Operations a second against operations a byte: each rung at its own bytes, where it was measured first of the ladders."""
    axis, points = figure.subplots(), {}
    for rung in common.ladder().RUNGS:
        if (shape := measured.first_timed(rung)) is not None:
            us = measured.time(rung.name, shape) or 0
            operations = OPERATIONS * np.prod(shape)
            points[rung.name] = float(operations / rung.bytes(*shape, "float32")), float(operations / us / 1e3)
    speed = (measured.copy_speed or 1) / 1e3  # 10^9 bytes a second, as the axis has 10^9 operations
    edges = 0.75 * min(x for x, _ in points.values()), 1.2 * max(x for x, _ in points.values())
    axis.plot(edges, [speed * x for x in edges], color=plot.GREY, linestyle="--", linewidth=1.2)
    axis.set(
        xlabel="operations a byte", ylabel="10^9 operations/s", xlim=edges, ylim=(-0.04 * speed * edges[1], speed * edges[1])
    )
    for name, (x, y) in points.items():
        axis.plot([x], [y], color=_COLOURS[name], marker="o", linestyle="")
    ticks = sorted({x for x, _ in points.values()})
    axis.set_xticks(ticks, [f"{x:.3g}\n{OPERATIONS / 4 / x:.0f}N" for x in ticks])
    for x in ticks:
        _name_points(axis, x, {shown(name): (y, _COLOURS[name]) for name, (own, y) in points.items() if own == x})
    words = f"the peak of float32, {PEAK / 1e12:.0f} TFLOP/s, begins at {PEAK / 1e9 / speed:.0f}"
    axis.text(0.02, 0.96, f"{words} operations a byte", transform=axis.transAxes, va="top", fontsize=8)
    return np.array([axis])


def _name_points(axis: Any, x: float, points: dict[str, tuple[float, str]]) -> None:
    """Names to the right of points that are above each other."""
    to_panel = axis.transScale + axis.transLimits
    places = {name: to_panel.transform((x, y)) for name, (y, _) in points.items()}
    for name, height in plot.spread({name: float(place[1]) for name, place in places.items()}, 0.04).items():
        y, colour = points[name]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6}
        at = places[name][0] + 0.03, height
        axis.annotate(name, (x, y), at, textcoords="axes fraction", color=colour, fontsize=8, va="center", arrowprops=line)
