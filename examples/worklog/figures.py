"""The figures of docs/worklog.md."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import plot
from examples.worklog import common
from examples.worklog.cells import rows_of
from examples.worklog.common import LONG_ROW, OF_VECTORS, OPERATIONS, PEAK, PEERS, ROW, SIZES, size
from examples.worklog.measured import Measured

FIGURES = ("worklog_time.svg", "worklog_roofline.svg")
_COLOURS = ("#e8590c", "#c2255c", "#0c9c7c", "#3b82f6", "#2f9e44", "#a855f7", "#d19a00", "#0891b2", "#8d6e63", "#65a30d")


def _looks() -> dict[str, dict[str, Any]]:
    """A colour for each rung; peers are grey."""
    rungs = {
        rung.name: {"color": colour} for rung, colour in zip(common.ladder().RUNGS, itertools.cycle(_COLOURS), strict=False)
    }
    peers = {"jax.nn": {"color": plot.GREY, "linestyle": "-."}, "torch": {"color": plot.GREY, "linestyle": ":"}}
    return rungs | peers


def draw(measured: Measured, folder: Path) -> list[Path]:
    """Draws both figures into a folder, if there are times; returns their paths."""
    if not measured.times or measured.copy_speed is None:
        return []
    import matplotlib as mpl
    from matplotlib.figure import Figure

    newest, paths = measured.times[-1], [folder / name for name in FIGURES]
    for path, panels_of in zip(paths, (_draw_times, _draw_roofline), strict=True):
        with mpl.rc_context(plot.STYLE):
            figure = Figure(figsize=(10, 4.6), layout="constrained")
            _legend(figure, panels_of(figure, measured))
            figure.suptitle(f"softmax, float32, {newest.gpu}, jax {newest.jax}, {newest.commit}")
            figure.savefig(path, transparent=True, metadata={"Date": None})
    return paths


def _legend(figure: Any, panels: Any) -> None:
    """One for all panels, in rows."""
    found = [axis.get_legend_handles_labels() for axis in panels]
    entries = {label: handle for handles, labels in found for handle, label in zip(handles, labels, strict=True)}
    figure.legend(entries.values(), entries, loc="outside lower center", ncols=5, frameon=False)


def _draw_times(figure: Any, measured: Measured) -> Any:
    """Time against the number of elements: rows that the cache holds, rows that it does not, and one vector."""
    panels = figure.subplots(1, 3, sharex=True, sharey=True)
    shapes = rows_of(ROW), rows_of(LONG_ROW), {count: (1, count) for count in SIZES}
    names = tuple(_looks()), tuple(_looks()), (*OF_VECTORS, *PEERS)
    titles = f"rows of {ROW}", f"rows of {LONG_ROW}", "one vector"
    for axis, shape_of, chosen, title in zip(panels, shapes, names, titles, strict=True):
        for name in chosen:
            times = {n: measured.time(name, shape) for n, shape in shape_of.items()}
            points = [(n, us) for n, us in times.items() if us is not None]
            if points:
                axis.plot(*plot.transposed(points), **_looks()[name], label=name, marker="o", markersize=3, linewidth=1.2)
        limit = [2 * size((1, n)) / (measured.copy_speed or 1) for n in SIZES]
        axis.plot(SIZES, limit, color=plot.GREY, linestyle="--", linewidth=1.2, label="2N bytes at the copy's speed")
        axis.set_xscale("log", base=2)
        axis.set_xticks(SIZES[::3])
        axis.set(yscale="log", xlabel="elements", title=title)
    panels[0].set_ylabel("us")
    return panels


def _draw_roofline(figure: Any, measured: Measured) -> Any:
    """Operations a second against operations a byte: each rung at its own bytes, where it was measured first of the ladders."""
    axis = figure.subplots()
    speed = (measured.copy_speed or 1) * 1e6
    intensities = np.array([0.1, PEAK / speed, 100])
    roof, label = np.minimum(PEAK, speed * intensities) / 1e9, "the copy's speed, peak of float32"
    axis.plot(intensities, roof, color=plot.GREY, label=label)
    for rung in common.ladder().RUNGS:
        if (shape := measured.first_timed(rung)) is not None:
            us = measured.time(rung.name, shape) or 0
            operations = OPERATIONS * np.prod(shape)
            x, y = operations / rung.bytes(*shape, "float32"), operations / us / 1e3
            axis.plot([x], [y], **_looks()[rung.name], marker="o", linestyle="", label=rung.name)
    axis.axvline(OPERATIONS / 8, color=plot.GREY, linestyle=":", linewidth=1.2, label="5 operations for 8 bytes")
    axis.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="10^9 operations/s")
    return np.array([axis])
