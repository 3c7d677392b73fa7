"""The tables of docs/worklog.md."""

import functools
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from examples.worklog import common, published
from examples.worklog.common import (
    ATTENTION,
    HALVES,
    HUGE,
    LONG,
    MEDIUM,
    OF_A_WRITE_UP,
    OF_ONE_VECTOR,
    OF_TOP_K,
    PEERS,
    REFERENCE,
    SHORT,
    SMALL,
    TOP_K_BASE,
    TOP_K_SHAPES,
    VECTOR,
    WAYS_OF_ATTENTION,
    Shape,
    size,
    text,
)
from examples.worklog.counters import Counted
from examples.worklog.measured import Measured


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; the first column is of words, the others of figures."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    written = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    return re.sub(r"`(\w+)`", lambda name: f"`{common.shown(name[1])}`", written)


def _figure(value: float | None, form: str = ".2f", unit: str = "") -> str:
    return "-" if value is None else f"{value:{form}}{unit}"


def _us(value: float | None) -> str:
    return _figure(value, ".0f" if value and value >= 1000 else ".1f" if value and value >= 10 else ".2f")


def _quotient(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _times(value: float | None) -> str:
    return _figure(value, ".2f" if value and value >= 0.1 else ".2g", "x")


def _names(name: str) -> str:
    shown = common.shown(name)
    return f"`{name}`" if shown == name else f"`{name}`, below `{shown}`"


def _table_of_rungs(_: Measured) -> str:
    rows = ([r.number, _names(r.name), r.title, str(r.reads), str(r.writes), r.teaches] for r in common.ladder().RUNGS)
    return "\n".join(
        [
            "| rung | name | what it is | reads | writes | what it teaches |",
            "|---|---|---|---:|---:|---|",
            *(f"| {' | '.join(row)} |" for row in rows),
        ]
    )


def _table_of_run(measured: Measured) -> str:
    """What the tables were measured on."""
    files = (("times", measured.times), ("bytes", measured.counted), ("cpu", measured.serial))
    keys, rows = ("gpu", "jax", "commit", "run"), []
    for name, measured_rows in files:
        runs: dict[tuple[str, ...], dict[str, None]] = {}  # and their ops, in order
        for row in measured_rows:
            ops = runs.setdefault(tuple([getattr(row, key) for key in keys]), {})
            ops |= {row.op: None} if row.op != "copy" else {}
        rows += [[name, ", ".join(ops), *run] for run, ops in runs.items()]
    return table(("part", "op", "GPU", "JAX", "commit", "run"), rows)


def _ladder(shape: Shape, measured: Measured) -> str:
    rungs = {rung.name: rung for rung in common.ladder().RUNGS}
    reference = rungs.get(REFERENCE)
    rows = []
    for name, rung in rungs.items():
        if (us := measured.time(name, shape)) is None:
            continue
        times = _quotient(us, measured.time(REFERENCE, shape))
        passes, others = rung.passes(shape[1], "float32"), reference and reference.passes(shape[1], "float32")
        speed, share = rung.bytes(*shape, "float32") / us / 1e3, _figure(measured.share(rung, shape))
        words = f"{rung.number} `{name}`", f"{passes}N"
        rows.append([*words, _us(us), f"{speed:.0f}", share, _times(_quotient(passes, others)), _times(times)])
    for name in PEERS:
        if (us := measured.time(name, shape)) is not None:
            rows.append([name, "-", _us(us), "-", "-", "-", _times(_quotient(us, measured.time(REFERENCE, shape)))])
    if measured.copy_speed and rows:
        us = 2 * size(shape) / measured.copy_speed
        rows.append(["the copy's speed", "2N", _us(us), f"{measured.copy_speed / 1e3:.0f}", "1.00", "-", "-"])
    header = ("rung", "passes", "us", "GB/s", "share of its roofline")
    return table((*header, f"bytes / `{REFERENCE}`", f"time / `{REFERENCE}`"), rows)


def _table_of_vector(measured: Measured) -> str:
    rows = []
    for name in (*OF_ONE_VECTOR, *PEERS, "cudnn"):
        us, (kernel, ms) = measured.time(name, VECTOR), published.VECTOR.get(name, ("-", None))
        if us or (rows and ms):  # what was published alone comes below what was measured
            where = published.VECTOR_GPU if ms else "-"
            rows.append([f"`{name}`", _figure(us and us / 1e3, ".4f"), kernel, _figure(ms), where])
    return table(("1 x 16777216, float32", "ms", "published: kernel", "published: ms", "published on"), rows)


def _table_of_halves(measured: Measured) -> str:
    names = ("naive", "online_thread", "fused", "online_lanes", "online_wide", "on_chip", *PEERS)
    rows = []
    for shape in HALVES:
        times = {name: measured.time(name, shape, "float16") for name in names}
        if any(times.values()):
            cells = [f"{_us(us)} ({_times(_quotient(times['naive'], us))})" if us else "-" for us in times.values()]
            *others, speed_up = published.HALVES[shape]
            others = [*(f"{ms:.4f}" for ms in others), speed_up, published.HALVES_GPU]
            rows.append([f"{shape[0]} x {shape[1]}", *cells, *others])
    columns = [f"`{name}`" for name in names]
    others = ("published: ms, naive, 5N", "fused, 3N", 'online, its "2N"', "online over naive", "published on")
    return table(("float16, us (speed-up over `naive`)", *columns, *others), rows)


def _table_of_small(measured: Measured) -> str:
    rows, naive_us = [], measured.time("naive", SMALL)
    for name in (*(rung.name for rung in common.ladder().RUNGS), *PEERS):
        if us := measured.time(name, SMALL):
            elements = np.prod(SMALL) / us / 1e3
            rows.append([f"`{name}`", _us(us), f"{elements:.1f}", _times(_quotient(naive_us, us))])
    return table(("1024 x 512, float32", "latency, us", "throughput, 10^9 elements/s", "speed-up over `naive`"), rows)


def _table_of_the_guide(measured: Measured) -> str:
    """The rungs that make the passes of the guide's two kernels."""
    rungs = {rung.name: rung for rung in common.ladder().RUNGS if rung.name in ("fused", "online_wide")}
    times = {name: measured.time(name, SMALL) for name in rungs}
    ours = {
        "throughput, GB/s": [_figure(_quotient(2 * size(SMALL) / 1e3, us), ".0f") for us in times.values()],
        "latency, us": [_us(us) for us in times.values()],
        "memory reads": [f"{rung.reads}N" for rung in rungs.values()],
    }
    found = published.GUIDE.items() if any(times.values()) else ()
    rows = [[name, *ours[name], *metric, published.GUIDE_GPU] for name, metric in found]
    columns = [f"`{name}`" for name in rungs]
    return table(("1024 x 512, float32", *columns, "published: naive", "optimised", "improvement", "published on"), rows)


def _table_of_cpu(measured: Measured) -> str:
    rows = []
    for row in measured.serial:
        shape = tuple(map(int, row.shape.split("x")))
        options = dict(word.split("=", 1) for word in row.options.split())
        safe_us = next((r.us for r in measured.serial if (r.shape, r.implementation) == (row.shape, "safe")), None)
        on_gpu = measured.time("on_chip", shape)
        theirs = published.CORE.get(row.implementation) if shape == SMALL else None
        last = _figure(_quotient(row.us, on_gpu), ".0f", "x"), theirs or "-", published.CORE_GPU if theirs else "-"
        where = f"{options['cores']} of {options['cpu'].replace('_', ' ')}"
        of_safe = _times(_quotient(row.us, safe_us))
        rows.append([f"`{row.implementation}`, {row.shape}", where, _us(row.us), of_safe, _us(on_gpu), *last])
    header = "float32", "cores", "us", "time / safe", "`on_chip` on the GPU, us", "this / GPU"
    return table((*header, "published: core / GPU", "published on"), rows)


def _megabytes(value: float) -> str:
    return f"{value / 1e6:.0f}"


def _cells_of_bytes(one: Counted) -> list[str]:
    figures = (one.predicted, one.dram, one.dram_read, one.dram_write, one.requested)
    return [*map(_megabytes, figures), f"{one.dram / one.predicted:.2f}", f"{one.requested / one.predicted:.2f}"]


_BYTES = ("predicted, MB", "DRAM, MB", "read", "written", "requested, MB", "DRAM / predicted", "requested / predicted")


def _bytes(shape: Shape, measured: Measured) -> str:
    rows = []
    for rung in common.ladder().RUNGS:
        if one := measured.bytes(rung.name, shape):
            words = f"{rung.number} `{rung.name}`", f"{rung.passes(shape[1], 'float32')}N"
            rows.append([*words, *_cells_of_bytes(one)])
    return table(("rung", "passes", *_BYTES), rows)


def _table_of_attention(measured: Measured) -> str:
    rows = []
    for name in WAYS_OF_ATTENTION:
        us = measured.time(name, ATTENTION.shape, ATTENTION.dtype, "attention")
        one = measured.bytes(name, ATTENTION.shape, "attention")
        if us or one:
            rows.append([f"`{name}`", _us(us), *(_cells_of_bytes(one) if one else ["-"] * len(_BYTES))])
    return table((f"{text(ATTENTION.shape)}, {ATTENTION.dtype}", "us", *_BYTES), rows)


def _table_of_accesses(measured: Measured) -> str:
    rows = []
    for rung in common.ladder().RUNGS:
        if (paper := published.PAPERS_RUNGS.get(rung.name)) is None:
            continue
        one, shape = measured.bytes(rung.name, HUGE), LONG
        us, safe_us = measured.time(rung.name, shape), measured.time("fused", shape)
        if one or us:
            counted = _figure(one.requested / size(HUGE) if one else None)
            others = [of.get(paper, "-") for of in (published.PAPERS_ACCESSES, published.PAPERS_SPEED_UP)]
            ours = str(rung.passes(HUGE[1], "float32")), counted, _times(_quotient(safe_us, us))
            where = "-" if set(others) == {"-"} else published.PAPERS_GPU
            rows.append([f"{paper} (`{rung.name}`)", *ours, *others, where])
    header = "accesses an element", "predicted", "requested, counted", "speed-up over safe"
    return table((*header, f"{published.PAPER}: accesses", "speed-up over safe", "published on"), rows)


def _table_of_top_k(measured: Measured) -> str:
    """The paper's three ways, and then two steps that end in another search."""
    op, rows, ladder = "softmax_top_k", [], common.ladder()
    base_us = measured.time(TOP_K_BASE, MEDIUM, op=op)
    ways = {way.name: (_name_of_way(way), way.passes(MEDIUM[1], "float32")) for way in ladder.WITH_TOP_K}
    steps = {rung.name: rung.passes(MEDIUM[1], "float32") + 1 for rung in ladder.RUNGS}
    names = *ways, *OF_TOP_K, *PEERS
    found = {name: (measured.time(name, MEDIUM, op=op), measured.bytes(name, MEDIUM, op)) for name in names}
    is_measured = any(map(any, found.values()))
    for name, (us, one) in found.items():
        if not (us or one or (is_measured and name in ways)):  # what was published stands beside what was measured
            continue
        search = "torch.topk" if name == "torch" else "lax.top_k"
        words, predicted = ways.get(name, (f"`{name}`, then `{search}`", steps.get(name)))
        alone = measured.time("fused" if name == TOP_K_BASE else name, MEDIUM)
        moved = [_megabytes(figure) for figure in (one.predicted, one.dram)] if one else ["-", "-"]
        ours = str(predicted or "-"), _figure(one.requested / size(MEDIUM) if one else None), *moved
        theirs = (*published.PAPERS_TOP_K[name], published.PAPERS_GPU) if name in ways else ("-", "-", "-")
        rows.append([words, *ours, _us(us), _us(alone), _times(_quotient(base_us, us)), *theirs])
    header = "4096 x 32768, float32", "accesses, predicted", "requested, counted", "predicted, MB", "DRAM, MB", "us"
    others = "softmax alone, us", "speed-up", f"{published.PAPER}: accesses", "speed-up", "published on"
    return table((*header, *others), rows)


def _table_of_top_k_by_size(measured: Measured) -> str:
    """The same three ways at the paper's batches, for vectors of many lengths."""
    op, rows, ways = "softmax_top_k", [], common.ladder().WITH_TOP_K
    for shape in TOP_K_SHAPES:
        times = {way.name: measured.time(way.name, shape, op=op) for way in ways}
        counts = [measured.bytes(way.name, shape, op) for way in ways]
        if any(times.values()) or any(counts):
            base_us = times[TOP_K_BASE]
            cells = [f"{_us(us)} ({_times(_quotient(base_us, us))})" if us else "-" for us in times.values()]
            accesses = [_figure(one.requested / size(shape) if one else None) for one in counts]
            speed_up = published.PAPERS_TOP_K["online_top_k"][1]
            rows.append([f"{shape[0]} x {shape[1]}", *cells, *accesses, speed_up, published.PAPERS_GPU])
    first, *others = (_name_of_way(way) for way in ways)
    counted = f"accesses, counted: {first}", *others
    return table(("float32, us (speed-up)", first, *others, *counted, f"{published.PAPER}: online fused", "published on"), rows)


def _name_of_way(way: Any) -> str:
    own = {"safe_then_top_k": "`fused`, then `jaxsoftmax.top_k`", "online_top_k": "`jaxsoftmax.softmax_top_k`"}
    return own.get(way.name, f"`{way.name}`")


def _table_of_write_up(measured: Measured) -> str:
    rows = []
    for name in (*(rung.name for rung in common.ladder().RUNGS), *PEERS):
        if us := measured.time(name, OF_A_WRITE_UP):
            theirs = published.ROWS.get(name)
            rows.append([f"`{name}`", f"{us / 1e3:.4f}", _figure(theirs), published.ROWS_GPU if theirs else "-"])
    return table(("1024 x 32768, float32", "ms", "published: ms", "published on"), rows)


TABLES: dict[str, Callable[[Measured], str]] = {
    "rungs": _table_of_rungs,
    "run": _table_of_run,
    "ladder long": functools.partial(_ladder, LONG),
    "ladder medium": functools.partial(_ladder, MEDIUM),
    "ladder short": functools.partial(_ladder, SHORT),
    "vector": _table_of_vector,
    "half": _table_of_halves,
    "small": _table_of_small,
    "guide": _table_of_the_guide,
    "write-up": _table_of_write_up,
    "cpu": _table_of_cpu,
    "bytes huge": functools.partial(_bytes, HUGE),
    "bytes medium": functools.partial(_bytes, MEDIUM),
    "bytes short": functools.partial(_bytes, SHORT),
    "attention": _table_of_attention,
    "accesses": _table_of_accesses,
    "top-k": _table_of_top_k,
    "top-k by size": _table_of_top_k_by_size,
}
_MARKED = re.compile(r"(<!-- table: (?P<name>[^>]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str, measured: Measured) -> str:
    """The page with its tables filled.

    Raises:
      ValueError: it has another table than there is, or lacks one.
    """
    found = [match["name"] for match in _MARKED.finditer(page)]
    if sorted(found) != sorted(TABLES):
        raise ValueError(f"the page's tables are {', '.join(found)}; they must be {', '.join(TABLES)}")
    return _MARKED.sub(lambda match: f"{match[1]}{TABLES[match['name']](measured)}\n{match[3]}", page)
