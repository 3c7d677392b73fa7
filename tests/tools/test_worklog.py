"""The benchmark of the softmax worklog: what is measured, counted bytes, tables, figures, and the page's claims."""

import dataclasses
import itertools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import check, harness, results
from benchmarks.clock import wall_clock
from examples.worklog import __main__ as command
from examples.worklog import cells, claims, common, counters, figures, published, serial, softmax_worklog, tables
from examples.worklog.counters import Counted
from examples.worklog.measured import Measured

from ..support import kernels, oracle

pytestmark = pytest.mark.usefixtures("hollow_kernels")

QUICK = harness.Effort(rounds=1, calls=1, cache=0)
GPU = "NVIDIA H200"
COPY = 4e6  # bytes a microsecond, of the rows made up here
REAL = {rung.name: rung for rung in common.ladder().RUNGS}
WITH_TOP_K = {way.name: way for way in common.ladder().WITH_TOP_K}


def a_row(name, shape, us, op="softmax", dtype="float32", **changes):
    """Nothing that was measured."""
    columns = {
        "run": "1",
        "date": "2026-11-20T12:00:00Z",
        "gpu": GPU,
        "jax": "0.11.2",
        "commit": "abc1234",
        "op": op,
        "pass_": "forward",
        "dtype": dtype,
        "shape": common.text(shape),
        "options": "",
        "implementation": name,
        "us": us,
        "bytes": 2 * common.size(shape, dtype),
        "flops": 0,
        "copy_share": None,
        "error": None,
    }
    return results.Row(**(columns | changes))


def time_of(rung, shape, share=0.9, dtype="float32"):
    return rung.bytes(*shape, dtype) / COPY / share


def a_count(name, shape, predicted, part=1.0, op="softmax", dtype="float32"):
    stamp = {"run": "1", "date": "2026-11-20T12:00:00Z", "gpu": GPU, "jax": "0.11.2", "commit": "abc1234"}
    half = round(part * predicted / 2)
    numbers = {"kernels": 1, "predicted": predicted, "dram_read": half, "dram_write": half}
    requested = {"requested_read": predicted // 2, "requested_write": predicted // 2}
    return Counted(**stamp, op=op, dtype=dtype, shape=common.text(shape), implementation=name, **numbers, **requested)


def a_full_run():
    """Every rung at 0.9 of its roofline, and as many bytes as predicted: no claim is missed."""
    shape = (32768, 4096)
    times = [a_row("copy", shape, 2 * common.size(shape) / COPY, op="copy")]
    counted, serial = [], []
    for shape, dtype in ((cell.shape, cell.dtype) for cell in cells.cells() if cell.op == "softmax"):
        rungs = [rung for rung in REAL.values() if common.takes(rung, shape, dtype)]
        times += [a_row(rung.name, shape, time_of(rung, shape, dtype=dtype), dtype=dtype) for rung in rungs]
        times += [a_row(name, shape, 2 * common.size(shape, dtype) / COPY, dtype=dtype) for name in common.PEERS]
    for name in (*common.OF_TOP_K, *common.PEERS):
        times.append(a_row(name, common.MEDIUM, 1000.0, op="softmax_top_k"))
    for way, shape in itertools.product(WITH_TOP_K.values(), (common.MEDIUM, *common.TOP_K_SHAPES)):
        times.append(a_row(way.name, shape, time_of(way, shape), op="softmax_top_k"))
    for name in common.WAYS_OF_ATTENTION:
        times.append(a_row(name, common.ATTENTION.shape, 1000.0, op="attention", dtype="bfloat16"))
    for case in counters.cases():
        counted.append(a_count(case.implementation, case.shape, case.predicted, op=case.op, dtype=case.dtype))
    for name, us in (("naive", 100.0), ("safe", 200.0), ("online", 800.0), ("jax.nn", 150.0)):
        serial.append(a_row(name, common.SMALL, us, options="cores=1 cpu=Some_CPU"))
    return Measured(times, counted, serial)


@pytest.fixture(scope="module")
def full():
    with kernels.hollow():  # where a fixture of each test comes too late
        return a_full_run()


@pytest.fixture
def page(tmp_path):
    path = tmp_path / "page.md"
    path.write_text(command.PAGE.read_text())
    return path


def changed(measured, change):
    """The same with each row of times and bytes passed through `change`, which gives a row, or None to leave it out."""

    def some(rows):
        return [row for row in map(change, rows) if row is not None]

    return Measured(some(measured.times), some(measured.counted), measured.serial)


def a_rung(name, function, number="5", reads=2, writes=1, slow="", refuses=None):
    return SimpleNamespace(
        name=name,
        number=number,
        title=name,
        teaches="nothing",
        softmax=function,
        reads=reads,
        writes=writes,
        slow=slow,
        unsupported=lambda rows, cols, dtype: refuses,
        bytes=lambda rows, cols, dtype: (reads + writes) * rows * cols * jnp.dtype(dtype).itemsize,
    )


def stand_in(monkeypatch, *rungs, **more):
    monkeypatch.setattr(common, "ladder", lambda: SimpleNamespace(RUNGS=rungs, **more))


# What is measured.


def test_rungs_that_are_named_here_are_rungs():
    assert set(published.PAPERS_TOP_K) == set(WITH_TOP_K)
    assert common.TOP_K_BASE in WITH_TOP_K
    named = {*common.OF_ONE_VECTOR, *common.OF_TOP_K, *published.PAPERS_RUNGS, common.REFERENCE}
    assert named <= set(REAL)
    assert set(published.ROWS) <= {*REAL, *common.PEERS}
    assert set(common.NUMBERS_COUNTED) <= {rung.number for rung in REAL.values()}


@pytest.mark.usefixtures("hollow_kernels")
def test_cells_have_names_of_their_own_and_sizes_of_the_figure():
    softmax_worklog.unsupported_on_chip.cache_clear()
    made = cells.cells()
    assert len({cell.name for cell in made}) == len(made)
    assert made[0].op == "copy"
    shapes = {cell.shape for cell in made if (cell.op, cell.dtype) == ("softmax", "float32")}
    assert {math.prod(shape) for shape in shapes if shape[1] == common.ROW} >= set(common.SIZES)
    assert {shape[1] for shape in shapes if shape[0] == 1} == set(common.SIZES)
    assert (min(common.SIZES), max(common.SIZES)) == (2**10, 2**28)
    of_the_library = {cell.shape for cell in made if "on_chip" in [contender.name for contender in cell.contenders]}
    assert of_the_library >= {shape for shape in shapes if shape[1] <= softmax_worklog.ON_CHIP[4]}
    assert not any(shape[1] > softmax_worklog.ON_CHIP[4] for shape in of_the_library)
    assert {cell.shape for cell in made if cell.dtype == "float16"} == set(common.HALVES)
    of_top_k = {cell.shape: [c.name for c in cell.contenders] for cell in made if cell.op == "softmax_top_k"}
    assert of_top_k.pop(common.MEDIUM) == [*WITH_TOP_K, *common.OF_TOP_K, *common.PEERS]
    assert of_top_k == {shape: list(WITH_TOP_K) for shape in common.TOP_K_SHAPES}


def test_a_rung_that_refuses_a_shape_is_not_measured_there(monkeypatch):
    stand_in(monkeypatch, a_rung("takes", serial.safe), a_rung("refuses", serial.safe, refuses="too long"))
    names = [contender.name for contender in cells._cell("float32", (4, 512)).contenders]
    assert names == ["takes", *common.PEERS]


def measured_here(cell):
    """The rows of a run on the CPU, without torch."""
    rows, said = [], []
    cell = dataclasses.replace(cell, contenders=tuple(c for c in cell.contenders if c.framework == "jax"))
    run = harness.Run(GPU, "abc1234", rows.append, clock=wall_clock, effort=QUICK, say=said.append)
    run.measure([cell])
    assert not run.problems
    return {row.implementation: row for row in rows}, "\n".join(said)


def test_rungs_are_measured_and_compared_with_the_truth(monkeypatch):
    wrong = a_rung("wrong", lambda x: serial.safe(x) * 1.5)
    stand_in(monkeypatch, a_rung("safe", serial.safe), a_rung("naive", serial.naive), wrong)
    rows, said = measured_here(cells._cell("float32", (8, 512)))
    assert set(rows) == {"safe", "naive", "jax.nn"}
    assert "wrong left out" in said
    assert rows["safe"].error <= 1
    assert rows["naive"].error == math.inf  # with scores near 10000
    assert rows["safe"].bytes == 2 * 8 * 512 * 4


def largest(x, order=1):
    weights = serial.safe(x)
    columns = jnp.argsort(-order * weights, axis=1, stable=True)[:, : common.K].astype(jnp.int32)
    return jnp.take_along_axis(weights, columns, axis=1), columns


def test_top_k_is_measured_behind_softmax_and_with_it(monkeypatch):
    def elsewhere(x):
        weights, columns = largest(x)
        return weights, columns.at[:, 0].set(jnp.argmin(x, axis=1).astype(jnp.int32))

    ways = {"right": largest, "wrong": lambda x: largest(x, -1), "elsewhere": elsewhere}
    rungs = a_rung("fused", serial.safe), a_rung("on_chip", lambda x: x)
    stand_in(monkeypatch, *rungs, WITH_TOP_K=[a_rung(name, function) for name, function in ways.items()])
    rows, said = measured_here(cells._cell_of_top_k((8, 512), in_steps=True))
    assert set(rows) == {"right", "fused", "jax.nn"}
    assert "on_chip left out" in said
    assert "wrong left out" in said
    assert "elsewhere left out" in said
    assert rows["right"].error <= 1
    assert rows["right"].bytes == 8 * 512 * 4
    assert set(measured_here(cells._cell_of_top_k((8, 512)))[0]) == {"right"}


def test_ways_of_top_k_are_measured():
    """As a GPU's are, but with kernels interpreted, which needs the thread of the test."""
    cell = cells._cell_of_top_k((6, 1024))
    assert [contender.name for contender in cell.contenders] == list(WITH_TOP_K)
    for contender, hurtful in itertools.product(cell.contenders, (False, True)):
        inputs = cell.inputs(jax.random.key(0), hurtful)
        with common.ladder().interpreted_without_gpu():
            output = jax.block_until_ready(jax.jit(contender.build())(*inputs))
        error, relative = check.errors(cell, contender, inputs, output)
        assert error <= 1
        assert relative < 1e-5


@pytest.mark.parametrize("x", [[1000.0, 1001.0, 1002.0], [0.0, 500.0, 1000.0]])
def test_what_the_page_says_of_overflow(x):
    row = next(line for line in command.PAGE.read_text().splitlines() if line.startswith(f"| `[{x[0]:.0f}, {x[1]:.0f}"))
    _, said_naive, said_safe = ([float(word) for word in text.split(",")] for text in re.findall(r"`\[(.*?)\]`", row))
    x = jnp.asarray([x], jnp.float32)
    np.testing.assert_array_equal(serial.naive(x)[0], said_naive)
    np.testing.assert_allclose(serial.safe(x)[0], said_safe, rtol=0, atol=5e-5)  # half a unit of the last digit


# The serial comparison.


@pytest.mark.parametrize("name", serial.SERIAL)
def test_serial_functions_are_softmax(name):
    x = 3 * jax.random.normal(jax.random.key(0), (4, 300))
    truth = oracle.softmax(x)
    one_by_one = x.shape[1] * oracle.EPS * truth.value  # a sum of that many terms, one after another
    assert oracle.error(jax.jit(serial.SERIAL[name])(x), oracle.Truth(truth.value, truth.budget + one_by_one)) <= 1


def test_serial_times_are_printed_and_recorded(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(serial, "SERIAL_SHAPES", ((2, 64),))
    chosen = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda process, cores: chosen.append(cores))
    serial.run_serial(one_core=True, repeats=1)
    serial.run_serial(one_core=False, repeats=1)
    assert chosen == [{min(os.sched_getaffinity(0))}]
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["implementation"] for line in lines] == ["naive", "safe", "online", "jax.nn"]
    monkeypatch.setattr(common, "child", lambda name, environment: lines[:3] if name == "serial" else lines[3:])
    assert serial.time_serial(tmp_path / "worklog_cpu.csv", GPU, "abc1234") == []
    rows = Measured.read(tmp_path).serial
    assert [(row.implementation, row.shape, row.bytes) for row in rows][2:] == [
        ("online", "2x64", 1024),
        ("jax.nn", "2x64", 1024),
    ]


# Counted bytes.

HEADER = ["ID", "Process ID", "Kernel Name", "Block Size", "Section Name", "Metric Name", "Metric Unit", "Metric Value"]


def a_log(*kernels):
    """What Nsight Compute writes of kernels, each a name and the values of the four metrics, or None for a mark."""
    lines = ["==PROF== Connected to process 12", ",".join(f'"{name}"' for name in HEADER)]
    for at, (name, values) in enumerate(kernels):
        for (metric, _), value in zip(counters.METRICS.values(), values or ["1,024"] * 4, strict=True):
            lines.append(f'"{at}","12","{name}","(128, 1, 1)","Command line profiler metrics","{metric}","byte","{value}"')
    return "\n".join(lines)


BEFORE, BEHIND = ("wrapped_cosine", None), ("wrapped_tanh", None)


def test_kernels_between_marks_are_added_up():
    log = a_log(
        ("autotuned_gemm", None),
        BEFORE,
        ("worklog_tree_max", ["4,096", "0", "128", "1"]),
        ("worklog_tree_divide", ["4,096", "2,048", "128", "64"]),
        BEHIND,
        BEFORE,
        BEHIND,
    )
    two, none = counters.parse(log)
    assert two == {"kernels": 2, "dram_read": 8192, "dram_write": 2048, "requested_read": 8192, "requested_write": 2080}
    assert set(none.values()) == {0}


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded", "LibraryNotLoaded"),
        ("", "no table"),
        (a_log(BEFORE, BEFORE), "a mark is missing after case 0"),
        (a_log(BEFORE, BEHIND, BEHIND), "a mark is missing before case 2"),
        (a_log(BEFORE, ("worklog_fused", None)), "the last mark is missing"),
        (a_log(BEFORE, ("worklog_fused", None), BEHIND).replace("dram__bytes_read", "other"), "no dram__bytes_read.sum"),
    ],
)
def test_logs_that_cannot_be_read(log, reason):
    with pytest.raises(ValueError, match=reason):
        counters.parse(log)


def test_cases_run_once_each_and_one_that_does_not_compile_is_said(monkeypatch, capsys):
    def refuses(x):
        raise NotImplementedError("not here")

    cases = [
        counters.Case("softmax", "float32", (2, 512), "safe", 12288, serial.safe),
        counters.Case("softmax", "float32", (2, 512), "refuses", 12288, refuses),
        counters.Case("attention", "bfloat16", (1, 4, 1, 8), "sum", 64, lambda q, k, v: q + k + v, inputs=3),
    ]
    monkeypatch.setattr(counters, "cases", lambda: cases)
    counters.run_cases()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["problem"] for line in lines] == [None, "NotImplementedError: not here", None]
    assert lines[2]["shape"] == "1x4x1x8"
    counters.run_cases("attention")
    (line,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert line == lines[2]


def a_child(log, *lines):
    """In place of a process under Nsight Compute."""

    def child(name, environment, wrapper, arguments):
        assert not arguments
        if log is not None:
            with open(wrapper[wrapper.index("--log-file") + 1], "w") as file:
                file.write(log)
        return list(lines)

    return child


def a_line(name, problem=None):
    line = {"op": "softmax", "dtype": "float32", "implementation": name, "predicted": 100, "shape": "2x512"}
    return line | {"problem": problem}


def test_counted_bytes_are_recorded_and_read_back(monkeypatch, tmp_path):
    log = a_log(BEFORE, ("worklog_fused", ["60", "40", "2", "1"]), BEHIND, BEFORE, BEHIND)
    monkeypatch.setattr(common, "child", a_child(log, a_line("fused"), a_line("tree", "no memory")))
    path = tmp_path / "worklog_bytes.csv"
    for _ in range(2):
        assert counters.count(path, GPU, "abc1234") == ["bytes: softmax 2x512 tree: no memory"]
    one = Measured.read(tmp_path).counted
    assert [(c.implementation, c.kernels, c.dram, c.requested, c.predicted) for c in one] == [("fused", 1, 100, 96, 100)]
    assert len(path.read_text().splitlines()) == 3
    path.write_text(path.read_text().replace(",60,", ",sixty,"))
    with pytest.raises(ValueError, match="line 2"):
        results.read(path, Counted)
    path.write_text(path.read_text().rstrip())
    with pytest.raises(ValueError, match="not complete"):
        results.read(path, Counted)


@pytest.mark.parametrize(("log", "reason"), [("", "no table"), (None, "No such file"), (a_log(BEFORE, BEHIND), "2 cases ran")])
def test_what_cannot_be_counted_is_said_and_not_recorded(monkeypatch, tmp_path, log, reason):
    monkeypatch.setattr(common, "child", a_child(log, a_line("fused"), a_line("tree")))
    (problem,) = counters.count(tmp_path / "worklog_bytes.csv", GPU, "abc1234")
    assert reason in problem
    assert not list(tmp_path.iterdir())


def test_cases_are_predicted_by_their_rungs():
    cases = {(case.op, case.shape, case.implementation): case.predicted for case in counters.cases()}
    assert cases["softmax", common.HUGE, "fused"] == 4 * 4 * 2**27
    assert cases["softmax", common.MEDIUM, "on_chip"] == 2 * 4 * 2**27
    assert ("softmax", common.HUGE, "on_chip") not in cases  # the library has no kernel for it
    assert cases["softmax_top_k", common.MEDIUM, "fused"] == 5 * 4 * 2**27
    for shape in (common.MEDIUM, *common.TOP_K_SHAPES):
        found = [cases["softmax_top_k", shape, name] for name in ("safe_then_top_k", "safe_top_k", "online_top_k")]
        assert found == [accesses * 4 * math.prod(shape) for accesses in (5, 2, 1)]
    assert cases["attention", common.ATTENTION.shape, "attention_fused"] == 4 * 2 * math.prod(common.ATTENTION.shape)


# The page.


def test_the_page_is_what_the_result_files_say():
    assert claims.misses(Measured.read(results.FOLDER / "h200"), command.PAGE) == []


def test_tables_without_measurements_are_headers():
    nothing = Measured([], [], [])
    for name, make in tables.TABLES.items():
        lines = make(nothing).splitlines()
        assert len(lines) == (2 + len(REAL) if name == "rungs" else 2), name


def cells_of(line):
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_tables_are_filled(full):
    for name, make in tables.TABLES.items():
        lines = [cells_of(line) for line in make(full).splitlines()]
        assert len(lines) > 2, name
        assert len({len(line) for line in lines}) == 1, name


def test_the_table_of_a_ladder(full):
    lines = [cells_of(line) for line in tables.TABLES["ladder long"](full).splitlines()]
    fused = next(line for line in lines if line[0] == "4 `fused`")
    us = 4 * 4 * 2**27 / COPY / 0.9
    assert fused[1:] == ["4N", f"{us:.1f}", f"{COPY * 0.9 / 1e3:.0f}", "0.90", "1.33x", "1.33x"]
    assert lines[-1][:2] == ["the copy's speed", "2N"]


def test_tables_of_top_k(full):
    lines = {line[0]: line for line in map(cells_of, tables.TABLES["top-k"](full).splitlines())}
    us = time_of(WITH_TOP_K["online_top_k"], common.MEDIUM)
    assert lines["`jaxsoftmax.softmax_top_k`"][1:8] == ["1", "1.00", "537", "537", f"{us:.1f}", "-", "5.00x"]
    assert lines["`fused`, then `jaxsoftmax.top_k`"][1:4] == ["5", "5.00", "2684"]
    lines = [cells_of(line) for line in tables.TABLES["top-k by size"](full).splitlines()[2:]]
    assert [line[0] for line in lines] == [f"{rows} x {cols}" for rows, cols in common.TOP_K_SHAPES]
    times = [time_of(way, common.TOP_K_SHAPES[0]) for way in WITH_TOP_K.values()]
    speed_ups = "1.00x", "2.50x", "5.00x"
    assert lines[0][1:4] == [f"{tables._us(us)} ({text})" for us, text in zip(times, speed_ups, strict=True)]


def test_what_is_not_measured_of_top_k_has_no_figures(full):
    """In the first table what was published stands beside the two steps that are measured; the second has no line."""
    few = changed(full, lambda row: None if row.implementation in WITH_TOP_K else row)
    lines = {line[0]: line for line in map(cells_of, tables.TABLES["top-k"](few).splitlines())}
    assert lines["`safe_top_k`"][1:] == ["2", *["-"] * 6, "2", "-", "Tesla V100"]
    assert lines["`fused`, then `lax.top_k`"][7] == "-"
    assert len(tables.TABLES["top-k by size"](few).splitlines()) == 2


# Of each table that has some, lines and what is quoted at their end.
PUBLISHED = {
    "write-up": {"`online_thread`": ["88.15", "GTX 1050 Ti"], "`fused`": ["-", "-"]},
    "vector": {
        "`online_blocks`": ["kernel 3, hierarchical (m, d)", "1.88", "RTX 3060 class, 336 GB/s"],
        "`cudnn`": ["-", "cuDNN, accurate", "30.87", "RTX 3060 class, 336 GB/s"],
        "`online_wide`": ["-", "-", "-"],
    },
    "half": {"64 x 8192": ["3.1366", "1.9745", "1.6136", "1.94x", "Tesla T4"]},
    "guide": {"throughput, GB/s": ["180", "720", "4x", "a GPU that is not named"]},
    "cpu": {"`online`, 1024x512": ["70x", "a GPU that is not named"], "`safe`, 1024x512": ["-", "-"]},
    "accesses": {"online (`online_wide`)": ["3", "up to 1.3x", "Tesla V100"], "naive (`naive`)": ["-", "-", "-"]},
    "top-k": {
        "`fused`, then `jaxsoftmax.top_k`": ["1.00x", "5", "the base", "Tesla V100"],
        "`safe_top_k`": ["2.50x", "2", "-", "Tesla V100"],
        "`jaxsoftmax.softmax_top_k`": ["5.00x", "1", "up to 5x", "Tesla V100"],
        "`jaxsoftmax`, then `lax.top_k`": ["-", "-", "-"],
        "`torch`, then `torch.topk`": ["-", "-", "-"],
    },
    "top-k by size": {"4000 x 32768": ["5.00", "2.00", "1.00", "up to 5x", "Tesla V100"]},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures_have_columns_and_a_gpu_of_their_own(full, name):
    header, _, *lines = [cells_of(line) for line in tables.TABLES[name](full).splitlines()]
    assert header[-1] == "published on"
    found = {line[0]: line for line in lines}
    for first, quoted in PUBLISHED[name].items():
        assert found[first][-len(quoted) :] == quoted


def test_the_shapes_of_published_figures_are_measured():
    assert tuple(published.HALVES) == common.HALVES
    assert set(published.VECTOR) - {"cudnn"} <= {*common.OF_ONE_VECTOR, *common.PEERS}


def test_the_page_is_written_and_drawn(full, page, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder = tmp_path / "h200"
    results.append(folder / "worklog.csv", *full.times)
    results.append(folder / "worklog_cpu.csv", *full.serial)
    counted = map(dataclasses.astuple, full.counted)
    results.append_lines(folder / "worklog_bytes.csv", results.columns_of(Counted), counted)
    options = ["--results", str(tmp_path), "--page", str(page)]
    assert command.main(["check", *options]) == 1
    assert "is not what the result files say" in capsys.readouterr().out
    assert command.main(["page", "check", *options]) == 0
    assert "0 claims missed" in capsys.readouterr().out
    written = page.read_text()
    assert "| 4 `fused` | 4N |" in written
    drawn = [folder / name for name in figures.FIGURES]
    assert all(figure.read_text().rstrip().endswith("</svg>") for figure in drawn)
    assert all(f"results/h200/{figure.name})" in written for figure in drawn)


@pytest.mark.parametrize("part", ["page", "check"])
def test_without_result_files_the_page_stays(part, page, tmp_path, capsys):
    before = page.read_text()
    assert command.main([part, "--results", str(tmp_path), "--gpu", "b200", "--page", str(page)]) == 2
    assert "b200 has no result file" in capsys.readouterr().err
    assert page.read_text() == before


def test_what_a_profiler_says_is_said(monkeypatch, tmp_path):
    def child(name, environment, wrapper, arguments):
        assert not arguments
        Path(wrapper[wrapper.index("--log-file") + 1]).write_text("==PROF== 1\n==ERROR== ERR_NVGPUCTRPERM\n")
        raise subprocess.CalledProcessError(1, "ncu")

    monkeypatch.setattr(common, "child", child)
    (problem,) = counters.count(tmp_path / "worklog_bytes.csv", GPU, "abc1234")
    assert "ERR_NVGPUCTRPERM" in problem
    assert not list(tmp_path.iterdir())


def test_a_page_with_other_tables_is_refused(page, capsys):
    page.write_text(page.read_text().replace("<!-- table: half -->", "<!-- table: quarter -->"))
    assert command.main(["page", "--page", str(page)]) == 2
    assert "quarter" in capsys.readouterr().err


# Claims.


def found_in(measured, page):
    return [miss for miss in claims.misses(measured, page) if page.name not in miss]


def test_no_claim_is_missed(full, page):
    assert found_in(full, page) == []


LONG = common.text(common.LONG)


@pytest.mark.parametrize(
    ("which", "change", "expected"),
    [
        (("separate", LONG), {"us": 1.2}, "separate 1024x131072: 0.750 of its roofline"),
        (("online_thread", LONG), {"us": 10.0}, None),
        (("fused", LONG), None, None),  # the next ladder counts
        (("fused", "8x16777216"), None, "fused 8x16777216: no bytes counted"),
        (("on_chip", "8x16777216"), {"dram_read": 1.3}, None),  # of which the library has no kernel any more
        (("on_chip", LONG), {"us": 0.8}, "naive / on_chip 1024x131072: times 1.875, bytes 1.500"),
        (("on_chip", "1x16777216"), {"us": 1.2}, None),
        (("fused", "8x16777216"), {"dram_read": 1.3}, "fused 8x16777216: 1.150 of the predicted bytes of memory"),
        (("on_chip", "4096x32768"), {"dram_write": 0.7}, "on_chip 4096x32768: 0.850 of the predicted"),
        (("on_chip", "131072x1024"), {"dram_write": 0.7}, None),
        (("tree", "8x16777216"), {"dram_read": 1.3}, None),  # of which the page claims nothing
        (("online_wide", LONG), {"us": 0.8}, "fused / online_wide 1024x131072: times 1.667, bytes 1.333"),
        (("on_chip", "4096x32768"), {"us": 0.8}, "naive / on_chip 4096x32768: times 1.875, bytes 1.500"),
        (("tree", "1x16777216"), {"us": 1.2}, "tree 1x16777216: 0.750 of its roofline"),
        (("online_top_k", "4096x32768"), {"dram_read": 1.3}, "online_top_k 4096x32768: 1.150 of the predicted bytes"),
        (("safe_top_k", "4096x32768"), {"dram_write": 0.7}, "safe_top_k 4096x32768: 0.850 of the predicted bytes"),
        (("online_top_k", "10x2048"), {"dram_read": 1.3}, None),
    ],
)
def test_a_miss_is_found(full, page, which, change, expected):
    def altered(row):
        if (row.implementation, row.shape) != which or not (change is None or hasattr(row, next(iter(change)))):
            return row
        if change is None:
            return None
        return dataclasses.replace(row, **{key: type(getattr(row, key))(getattr(row, key) * by) for key, by in change.items()})

    found = found_in(changed(full, altered), page)
    if expected is None:
        assert found == []
    else:
        assert any(miss.startswith(expected) for miss in found)
    assert {miss.split()[0].rstrip(":") for miss in found} <= {*REAL, *WITH_TOP_K}


def test_a_rung_without_times_is_a_miss(full, page):
    found = found_in(changed(full, lambda row: None if row.implementation == "tree" else row), page)
    assert found == ["tree: no time"]


def test_top_k_that_is_timed_and_not_counted_is_a_miss(full, page):
    few = Measured(full.times, [one for one in full.counted if one.implementation != "online_top_k"], full.serial)
    assert found_in(few, page) == [f"online_top_k {common.text(common.MEDIUM)}: no bytes counted"]
    timed = [row for row in full.times if row.implementation != "online_top_k"]
    assert found_in(Measured(timed, few.counted, full.serial), page) == []
    none = [one for one in full.counted if one.implementation not in WITH_TOP_K]
    assert found_in(Measured(full.times, none, full.serial), page) == []


def test_an_op_that_was_measured_alone_leaves_the_others_as_they_were(full, tmp_path):
    again = [dataclasses.replace(row, run="2", us=2 * row.us) for row in full.times if row.op in ("copy", "softmax_top_k")]
    results.append(tmp_path / "worklog.csv", *full.times, *again)
    found = Measured.read(tmp_path).times
    assert {(row.op, row.run) for row in found} == {
        ("copy", "1"),
        ("softmax", "1"),
        ("softmax_top_k", "2"),
        ("attention", "1"),
    }
    table = tables.TABLES["run"](Measured(found, [], []))
    assert [line.split(" | ")[1] for line in table.splitlines()[2:]] == ["softmax, attention", "softmax_top_k"]


# The command line.


@pytest.mark.parametrize("arguments", [["time"], ["page", "--results"], ["--child", "other"], ["--of", "h200"]])
def test_bad_arguments(arguments, capsys):
    with pytest.raises(SystemExit) as end:
        command.main(arguments)
    assert end.value.code == 2
    assert "usage" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["times"], ["bytes", "page"], ["times", "cpu"]])
def test_without_a_gpu_nothing_is_written(arguments, tmp_path, page, capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    before = page.read_text()
    assert command.main([*arguments, "--results", str(tmp_path / "results"), "--page", str(page)]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not (tmp_path / "results").exists()
    assert page.read_text() == before


def test_the_part_of_the_cpu_needs_no_gpu(monkeypatch, tmp_path, page, capsys):
    monkeypatch.setattr(harness, "gpu_name", lambda: None)
    called = []
    monkeypatch.setattr(serial, "time_serial", lambda path, gpu, commit: called.append((path, gpu)) or [])
    assert command.main(["cpu", "--results", str(tmp_path), "--page", str(page), "--commit", "abc1234"]) == 0
    assert called == [(tmp_path / "cpu" / "worklog_cpu.csv", "cpu")]
    assert str(called[0][0]) in capsys.readouterr().out


def test_all_parts_run_in_order(monkeypatch, tmp_path, page, capsys):
    called = []
    monkeypatch.setattr(harness, "gpu_name", lambda: GPU)
    monkeypatch.setattr(harness.Run, "measure", lambda run, cells: called.append({cell.op for cell in cells}))
    monkeypatch.setattr(counters, "count", lambda path, gpu, commit, op: called.append((path.name, op)) or ["bytes: no ncu"])
    monkeypatch.setattr(serial, "time_serial", lambda path, gpu, commit: called.append(path.name) or [])
    options = ["--results", str(tmp_path), "--page", str(page), "--commit", "abc1234"]
    assert command.main(options) == 1
    assert called == [{"copy", *command.OPS}, ("worklog_bytes.csv", None), "worklog_cpu.csv"]
    said = capsys.readouterr()
    assert "not recorded: bytes: no ncu" in said.err
    assert "naive: no time" in said.out
    called.clear()
    assert command.main(["times", "bytes", "--op", "softmax_top_k", *options]) == 1
    assert called == [{"copy", "softmax_top_k"}, ("worklog_bytes.csv", "softmax_top_k")]


@pytest.mark.slow
def test_the_command_starts_and_its_children_too(tmp_path):
    """The processes of the serial times, as they are started on a machine with a GPU."""
    run = subprocess.run([sys.executable, "-m", "examples.worklog", "--help"], cwd=common.ROOT, capture_output=True, text=True)
    assert run.returncode == 0
    assert "page check" in run.stdout
    assert serial.time_serial(tmp_path / "worklog_cpu.csv", GPU, "abc1234") == []
    rows = Measured.read(tmp_path).serial
    assert {row.implementation for row in rows} == {"naive", "safe", "online", "jax.nn"}
    assert {row.options.split()[0] for row in rows if row.implementation != "jax.nn"} == {"cores=1"}


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(4, 1024), (1, 65536)])
def test_rungs_are_timed_on_a_gpu(shape):
    """All that take the shape, without those peers that are not there."""
    rows = []
    run = harness.Run(GPU, "abc1234", rows.append, effort=QUICK)
    run.measure([cells._cell("float32", shape)])
    names = {row.implementation for row in rows}
    assert names >= {rung.name for rung in REAL.values() if common.takes(rung, shape)}
    assert all(row.error <= 1 for row in rows if row.implementation == "fused")
    rows.clear()
    run.measure([cells._cell_of_top_k(shape, in_steps=True)])
    assert {row.implementation for row in rows if row.error <= 1} >= {*WITH_TOP_K, "fused", "jax.nn"}
