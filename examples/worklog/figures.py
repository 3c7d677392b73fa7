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
    "on_chip": plot.ORANGE,  # the library's, as in the other figures
    "jax.nn": "#0072b2",
    "torch": "#5c3310",
    "naive": "#444444",
    "separate": "#2222d8",
    "tree": "#a8477f",
    "fused": "#202124",
    "fused_kept": "#5560c8",
    "online_thread": "#007a5a",
    "online_lanes": "#4d7c0f",
    "online_wide": "#0f9980",
    "online_blocks": "#3f9142",
}
# The panels of the first figure: a title, the shape for each number of elements, and the lines. A line that would lie on
# another one is left out.
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

    with mpl.rc_context(plot.STYLE):
        figures = _times(measured), _roofline(measured)
        return [plot.save(figure, folder / name) for figure, name in zip(figures, FIGURES, strict=True)]


def _times(measured: Measured) -> Any:
    """Time against the number of elements: rows that the cache holds, rows that it does not, and one vector."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plot.WIDTH, 9.5), layout="constrained")
    panels = figure.subplots(3, sharex=True, sharey=True)
    for axis, (title, shape_of, names) in zip(panels, PANELS, strict=True):
        for name in names:
            times = {n: measured.time(name, shape) for n, shape in shape_of.items()}
            points = [(n, us) for n, us in times.items() if us is not None]
            if points:
                look = {"color": _COLOURS[name], "linewidth": 2.8 if name == "on_chip" else 1.4}
                axis.plot(*plot.transposed(points), **look, marker="o", markersize=3, label=shown(name))
        limit = [2 * size((1, n)) / (measured.copy_speed or 1) for n in SIZES]
        axis.plot(SIZES, limit, color=plot.GREY, linestyle="--", linewidth=1.2, label="2N, as a copy")
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES[::3])
        axis.set(yscale="log", ylabel="us")
        axis.set_title(title, pad=6)
    panels[0].set_ylim(0.5, None)
    panels[-1].set_xlabel("elements")
    note = "2N, as a copy: each element is read and written once, at the speed of a copy."
    return _finish(figure, panels, "Time of softmax by number of elements", measured, note)


def _roofline(measured: Measured) -> Any:
    """Operations a second against operations a byte: each rung at its own bytes, where it was measured first of the ladders."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(plot.WIDTH, 5), layout="constrained")
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
    notes = (
        f"Dashed: the speed of a copy. {PEAK / 1e12:.0f} TFLOP/s, the peak of float32, begin at",
        f"{PEAK / 1e9 / speed:.0f} operations a byte.",
    )
    return _finish(figure, [axis], "Operations of softmax a second, by operations a byte", measured, *notes)


def _finish(figure: Any, panels: Any, title: str, measured: Measured, *notes: str) -> Any:
    newest = measured.times[-1]
    return plot.finish(figure, panels, f"{title}, float32, {newest.gpu}", *notes, f"jax {newest.jax}.")


def _name_points(axis: Any, x: float, points: dict[str, tuple[float, str]]) -> None:
    """Names to the right of points that are above each other."""
    to_panel = axis.transScale + axis.transLimits
    places = {name: to_panel.transform((x, y)) for name, (y, _) in points.items()}
    for name, height in plot.spread({name: float(place[1]) for name, place in places.items()}, 0.04).items():
        y, colour = points[name]
        line = {"arrowstyle": "-", "color": colour, "linewidth": 0.6}
        at = places[name][0] + 0.03, height
        axis.annotate(name, (x, y), at, textcoords="axes fraction", color=colour, fontsize=8.5, va="center", arrowprops=line)
