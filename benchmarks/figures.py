"""The figures of the result files.

A peer that the newest run left out is drawn from the last run that measured it, with a star at its name.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.bars import is_ours
from benchmarks.cells import YARDSTICKS
from benchmarks.results import Row, newest_of_each_cell

SUITES = (  # those with figures
    *("softmax", "softmax_sweep", "attention", "attention_gradients", "decoding"),
    *("cross_entropy", "linear_cross_entropy", "top_k"),
)
Figures = Iterator[tuple[str, Any]]  # names of files without their ending, and figures


def draw(rows: Sequence[Row], folder: Path, *, sweep: bool = False) -> list[Path]:
    """Draws the figures that the rows of a result file suffice for, as `<name>.svg` in `folder`; returns their paths."""
    import matplotlib as mpl

    with mpl.rc_context(plot.STYLE):
        drawn = (figures_of_sweep if sweep else figures)(rows)
        return [plot.save(figure, folder / f"{name}.svg") for name, figure in drawn]


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


def _figures_of_rows(rows: list[Row]) -> Figures:
    """Speed, and for softmax forward error too, against the columns of arrays of 2^27 elements; a panel for each dtype."""
    copies = {row.dtype: row.speed / 1e3 for row in rows if row.op == "copy"}
    for op, pass_ in (("softmax", "forward"), ("softmax", "backward"), ("log_softmax", "forward"), ("logsumexp", "forward")):
        own = [row for row in rows if (row.op, row.pass_, row.options) == (op, pass_, "") and prod(plot.shape_of(row)) > 2**26]
        dtypes = [dtype for dtype in ("float32", "bfloat16") if any(row.dtype == dtype for row in own)]
        if all(map(is_ours, own)):
            continue
        words = f"{op} {pass_}, {' and '.join(dtypes)}"
        figure, (panels,) = plot.panels_of(1, len(dtypes), 2.9)
        for dtype, axis in zip(dtypes, panels, strict=True):
            level = {plot.A_COPY: copies[dtype]} if dtype in copies else {}
            plot.draw_lines(
                axis, [row for row in own if row.dtype == dtype], plot.columns_of, lambda row: row.speed / 1e3, level
            )
            axis.set(title=dtype, xlabel="columns of a row")
        panels[0].set_ylabel("GB/s read and written")
        plot.from_zero(panels[0])
        yield f"{op}_{pass_}", plot.finish_rows(figure, panels, f"Speed of {words}", own, plot.NUMBERS)
        if (op, pass_) != ("softmax", "forward"):
            continue
        figure, (panels,) = plot.panels_of(1, len(dtypes), 2.5)
        for dtype, axis in zip(dtypes, panels, strict=True):
            axis.set_yscale("log")
            plot.draw_lines(
                axis, [row for row in own if row.dtype == dtype], plot.columns_of, lambda row: row.error, {"allowed": 1}, None
            )
            axis.set(title=dtype, xlabel="columns of a row", ylim=(0.1, 100))
        panels[0].set_ylabel("largest error / allowed error")
        panels[0].yaxis.set_major_formatter("{x:g}")
        yield f"{op}_{pass_}_error", plot.finish_rows(figure, panels, f"Error of {words}", own)


def _figures_of_attention(pass_: str, rows: list[Row]) -> Figures:
    """TFLOP/s against the sequence length: a row of panels for each head size, a column for causal masks and one for none."""
    kinds = {"": "", "causal=1": ", causal"}
    rows = [row for row in rows if row.dtype == "bfloat16" and row.options in kinds and plot.is_power(plot.shape_of(row)[1])]
    hidden = [plot.shape_of(row)[2] * plot.shape_of(row)[3] for row in rows]
    rows = [row for row, size in zip(rows, hidden, strict=True) if size == max(hidden, key=hidden.count)]
    if all(map(is_ours, rows)):
        return
    head_sizes = sorted({plot.shape_of(row)[3] for row in rows})
    options = [option for option in kinds if any(row.options == option for row in rows)]
    figure, panels = plot.panels_of(len(head_sizes), len(options), 2.1)
    for head_size, line in zip(head_sizes, panels, strict=True):
        for option, axis in zip(options, line, strict=True):
            own = [row for row in rows if (row.options, plot.shape_of(row)[3]) == (option, head_size)]
            plot.draw_lines(axis, own, lambda row: plot.shape_of(row)[1], lambda row: row.tflops)
            axis.set_title(f"head size {head_size}{kinds[option]}")
        line[0].set_ylabel("TFLOP/s")
        plot.from_zero(line[0])
    for axis in panels[-1]:
        axis.set_xlabel("sequence length")
    notes = [plot.NUMBERS]
    if any(row.implementation == "attention_mgpu" for row in rows):
        notes.append("JAX Pallas runs in float16.")
    if {row.cell for row in rows} - {row.cell for row in rows if is_ours(row)}:
        notes.append("Where a number is missing, jaxsoftmax was not measured.")
    title = f"Speed of attention {pass_.replace('+', ' and ')}, bfloat16"
    yield f"attention_{pass_.replace('+', '_')}", plot.finish_rows(figure, list(panels.flat), title, rows, *notes)


def _figures_of_memory(rows: list[Row]) -> Figures:
    """Time and memory of a linear layer's loss and gradients against the vocabulary."""
    rows = [row for row in rows if row.pass_ == "forward+backward" and not row.options and plot.is_power(plot.columns_of(row))]
    if all(map(is_ours, rows)):
        return
    from matplotlib.ticker import LogLocator

    figure, (panels,) = plot.panels_of(1, 2, 2.9, sharey=False)
    values: dict[str, Callable[[Row], float | None]] = {
        "time, ms": lambda row: row.us / 1e3,
        "memory beyond inputs and outputs, GB": lambda row: row.temporaries and row.temporaries / 1e9,
    }
    for (label, value), axis in zip(values.items(), panels, strict=True):
        axis.set_yscale("log")
        axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axis.yaxis.set_major_formatter("{x:g}")
        plot.draw_lines(axis, rows, plot.columns_of, value, better=min)
        axis.set(title=label, xlabel="classes (vocabulary)")
    tokens, size, _ = plot.shape_of(rows[0])
    title = f"linear_cross_entropy with gradients, {rows[0].dtype}"
    notes = (
        f"{tokens} tokens, hidden size {size}.",
        "Orange numbers: the least time or memory of an alternative, divided by that of jaxsoftmax.",
    )
    yield "linear_cross_entropy", plot.finish_rows(figure, panels, title, rows, *notes)


@dataclass(frozen=True)
class Bars:
    """A figure of bars. `cases` maps a cell, as `op pass dtype shape options`, to its heading."""

    name: str
    title: str
    unit: str
    value: Callable[[Row], float]
    better: Callable[..., float]
    cases: dict[str, str]
    notes: tuple[str, ...] = ()


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
        lambda row: row.us,
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

    figure = Figure(figsize=(plot.WIDTH, 1.0 + 0.2 * sum(len(group) + 1.3 for group in groups.values())), layout="constrained")
    axis, at, ticks = figure.subplots(), 0.0, {}
    for case, group in groups.items():
        axis.annotate(bars.cases[case], (0, at), (4, 0), textcoords="offset points", va="center", weight="bold")
        values = {plot.key_of(row): bars.value(row) for row in group}
        (ratio,) = plot.ratios_of({key: {0: value} for key, value in values.items()}, bars.better).values()
        for key in sorted(values, key=list(plot.LOOKS).index):
            at += 1
            name, colour, _ = plot.LOOKS[key]
            axis.barh(at, values[key], 0.8, color=colour)
            number = f"{values[key]:#.3g}" if values[key] < 99.5 else f"{values[key]:.0f}"
            text = axis.annotate(number, (values[key], at), (4, 0), textcoords="offset points", va="center", fontsize=8)
            if key == plot.OURS:
                axis.annotate(plot.times(ratio), (1, 0.5), (8, 0), text, "offset points", va="center", **plot.OF_OURS)
            ticks[at] = name + plot.star(key, group), colour
        at += 1.3
    axis.set_yticks(list(ticks), [name for name, _ in ticks.values()])
    for label, (name, colour) in zip(axis.get_yticklabels(), ticks.values(), strict=True):
        label.set(color=colour, weight="bold" if name == plot.OURS else "normal")
    axis.tick_params(axis="y", length=0)
    axis.set(ylim=(at - 0.5, -0.7), xlabel=bars.unit)
    axis.grid(visible=False, axis="y")
    axis.margins(x=0.2)
    drawn = [row for group in groups.values() for row in group]
    yield bars.name, plot.finish_rows(figure, [axis], bars.title, drawn, *bars.notes, plot.NUMBERS)


def figures_of_sweep(rows: Sequence[Row]) -> Figures:
    """Yields the share of a copy's speed at each width that was drawn: a row of panels for each op, a column for each dtype."""
    rows = [row for row in _newest(rows) if row.op != "copy" and row.copy_share is not None]
    ops = list(dict.fromkeys((row.op, row.pass_) for row in rows if not is_ours(row)))
    rows = [row for row in rows if (row.op, row.pass_) in ops]
    if not rows:
        return
    dtypes = sorted({row.dtype for row in rows}, reverse=True)
    figure, panels = plot.panels_of(len(ops), len(dtypes), 2.4)
    for (op, pass_), line in zip(ops, panels, strict=True):
        for dtype, axis in zip(dtypes, line, strict=True):
            own = [row for row in rows if (row.op, row.pass_, row.dtype) == (op, pass_, dtype)]
            ratios = plot.ratios_of(
                plot.draw_lines(axis, own, plot.columns_of, lambda row: row.copy_share, {plot.A_COPY: 1}, None), max
            ).values()
            axis.set_title(f"{op} {pass_}, {dtype}")
            words = f"{plot.times(min(ratios))} to {plot.times(max(ratios))}" if ratios else ""
            axis.text(0, 1.02, words, transform=axis.transAxes, va="bottom", **plot.OF_OURS)
        line[0].set_ylabel("speed / speed of a copy")
        plot.from_zero(line[0])
    for axis in panels[-1]:
        axis.set_xlabel("columns of a row")
        axis.set_xticks([2**power for power in range(6, 21, 2)], [plot.short(2**power) for power in range(6, 21, 2)])
    title = f"Speed of softmax at {len({plot.columns_of(row) for row in rows})} random widths"
    yield "softmax_sweep", plot.finish_rows(figure, list(panels.flat), title, rows, plot.NUMBERS)
