"""What docs/worklog.md claims, held to what was measured."""

import itertools
from collections.abc import Iterator
from pathlib import Path

from examples.worklog import common
from examples.worklog.common import FROM_MEMORY, LONG, MEDIUM, NUMBERS_COUNTED, OF_VECTORS, VECTOR, takes, text
from examples.worklog.measured import Measured
from examples.worklog.tables import rendered

AT_LEAST = 0.8  # of a rung's own roofline
RATIO_WITHIN = 0.15
BYTES_WITHIN = 0.1


def misses(measured: Measured, page: Path) -> list[str]:
    """The claims that do not hold, in words."""
    return [*_slow_rungs(measured), *_wrong_ratios(measured), *_wrong_bytes(measured), *_stale(measured, page)]


def _slow_rungs(measured: Measured) -> Iterator[str]:
    """Where rungs are held to their roofline: the first of the ladders that they are on, and for some of them the vector."""
    for rung in common.ladder().RUNGS:
        if (first := measured.first_timed(rung)) is None:
            yield f"{rung.name}: no time"
            continue
        is_of_vectors = rung.name in OF_VECTORS and takes(rung, VECTOR)
        for shape in dict.fromkeys((first, *([VECTOR] if is_of_vectors else []))):
            if not rung.slow and (share := measured.share(rung, shape) or 0) < AT_LEAST:
                yield f"{rung.name} {text(shape)}: {share:.3f} of its roofline, less than {AT_LEAST}"


def _wrong_ratios(measured: Measured) -> Iterator[str]:
    """Of rungs that memory bounds: two times are as their bytes."""
    for shape in (LONG, MEDIUM):
        found = ((rung, measured.time(rung.name, shape)) for rung in common.ladder().RUNGS if not rung.slow)
        bound = [(rung, us) for rung, us in found if us is not None]
        for (a, us_of_a), (b, us_of_b) in itertools.combinations(bound, 2):
            times, moved = us_of_a / us_of_b, a.bytes(*shape, "float32") / b.bytes(*shape, "float32")
            if abs(times / moved - 1) > RATIO_WITHIN:
                yield f"{a.name} / {b.name} {text(shape)}: times {times:.3f}, bytes {moved:.3f}"


def _wrong_bytes(measured: Measured) -> Iterator[str]:
    counted = (rung for rung in common.ladder().RUNGS if rung.number in NUMBERS_COUNTED)
    for rung, shape in itertools.product(counted, FROM_MEMORY):
        if not takes(rung, shape):
            continue
        if (one := measured.bytes(rung.name, shape)) is None:
            yield f"{rung.name} {text(shape)}: no bytes counted"
        elif abs(one.dram / one.predicted - 1) > BYTES_WITHIN:
            yield f"{rung.name} {one.shape}: {one.dram / one.predicted:.3f} of the predicted bytes of memory"
    ways = {way.name: measured.bytes(way.name, MEDIUM, "softmax_top_k") for way in common.ladder().WITH_TOP_K}
    for name, one in ways.items():
        is_timed = measured.time(name, MEDIUM, op="softmax_top_k") is not None
        if one is None and is_timed and any(ways.values()):  # else the page says for all that they were not counted
            yield f"{name} {text(MEDIUM)}: no bytes counted"
        elif one and abs(one.dram / one.predicted - 1) > BYTES_WITHIN:
            yield f"{name} {one.shape}: {one.dram / one.predicted:.3f} of the predicted bytes of memory"


def _stale(measured: Measured, page: Path) -> Iterator[str]:
    written = page.read_text()
    if rendered(written, measured) != written:
        yield f"{page.name} is not what the result files say: run the part `page`"
