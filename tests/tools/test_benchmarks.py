"""The benchmarks: result files, bars, the command line, and that no speed is recorded of what is wrong."""

import contextlib
import dataclasses
import functools
import importlib.machinery
import itertools
import os
import pathlib
import random
import re
import subprocess
import sys
import threading
import time
import types
from collections.abc import Sequence
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from benchmarks import (
    attention,
    bars,
    check,
    cross_entropy,
    decoding,
    first_call,
    harness,
    host,
    linear_cross_entropy,
    linear_divergence,
    linear_log_probs,
    links,
    log_probs,
    nvml,
    plot,
    reference,
    results,
    sampler,
    score_functions,
    sharded,
    softmax,
    sustained,
    sweep,
    top_k,
)
from benchmarks.__main__ import SUITES, main
from benchmarks.cells import ONE, OURS, Contender, library
from benchmarks.clock import wall_clock
from jaxsoftmax.ops.cross_entropy import parts

from ..support import cases, kernels, oracle
from ..support.attention import oracle as attention_oracle

pytestmark = pytest.mark.usefixtures("hollow_kernels")

CELLS = {cell.name: cell for cell in softmax.cells()}
SWEEP = {cell.name: cell for cell in sweep.cells()}
ATTENTION = {cell.name: cell for cell in attention.cells()}
GRADIENTS = {cell.name: cell for cell in attention.gradient_cells()}
SUSTAINED = {cell.name: cell for cell in sustained.cells()}
COOL = {cell.name: cell for cell in sustained.cool_cells()}
DECODING = {cell.name: cell for cell in decoding.cells()}
LOSSES = {cell.name: cell for cell in cross_entropy.cells()}
LINEAR = {cell.name: cell for cell in linear_cross_entropy.cells()}
LINEAR_LOG_PROBS = {cell.name: cell for cell in linear_log_probs.cells()}
LINEAR_DIVERGENCE = {cell.name: cell for cell in linear_divergence.cells()}
TOP_K = {cell.name: cell for cell in top_k.cells()}
SAMPLER = {cell.name: cell for cell in sampler.cells()}
FIRST_CALLS = {cell.name: cell for cell in first_call.cells()}
REFERENCE = {cell.name: cell for cell in reference.cells()}
HOST = {cell.name: cell for cell in host.cells()}
SHARDED = {cell.name: cell for cell in sharded.cells()}
QUICK = harness.Effort(rounds=1, calls=1, cache=0)
GPU = "NVIDIA H200"
BOTH = "forward+backward"


def a_row(cell, implementation="mosaic", run="1", us=None, error=0.5):
    """A row that moves 4 bytes a nanosecond."""
    return results.Row(
        run=run,
        date="2026-11-20T12:00:00Z",
        gpu=GPU,
        jax="0.11.2",
        commit="abc1234",
        op=cell.op,
        pass_=cell.pass_,
        dtype=cell.dtype,
        shape=cell.shape_text,
        options=cell.options,
        implementation=implementation,
        us=us or max(round(cell.bytes / 4e6, 3), 1.0),
        bytes=cell.bytes,
        flops=cell.flops,
        copy_share=1.0,
        error=error,
    )


def a_full_run(cells=CELLS):
    """Rows of every cell and contender that no bar is missed by: JAX's take twice as long as ours, the others as long."""
    rows = []
    for cell in cells.values():
        for name in dict.fromkeys(contender.name for contender in cell.contenders):
            row = a_row(cell, "mosaic" if name == OURS else name)
            rows.append(dataclasses.replace(row, us=2 * row.us) if name in ("jax.nn", "optax") else row)
    return rows


def a_full_run_of_attention(cells=ATTENTION):
    """Likewise: ours computes 600 TFLOP/s, and the others a third of it or less."""
    rows = []
    for cell in cells.values():
        for at, name in enumerate(dict.fromkeys(contender.name for contender in cell.contenders)):
            us = cell.flops / 6e8 * (1 if name == OURS else 2.9 + 0.2 * at)
            rows.append(a_row(cell, "mosaic" if name == OURS else name, us=us))
    return rows


def a_full_run_of_linear():
    """Likewise: ours takes 1 ms, and has 0.1 GB of temporaries and an error of 0.25; the others take 0.95 ms or 2."""
    rows = []
    for cell in LINEAR.values():
        for name in dict.fromkeys(contender.name for contender in cell.contenders):
            us = {OURS: 1e3, "products": 950.0}.get(name, 2e3)
            row = a_row(cell, "mosaic" if name == OURS else name, us=us, error=0.25)
            rows.append(dataclasses.replace(row, temporaries=10**8 if name == OURS else 10**9))
    return rows


def a_full_run_of_linear_log_probs():
    """Likewise: ours takes as long as the products and 0.1 GB, Liger a tenth longer, the others twice as long and 4 GB."""
    rows = []
    for cell in LINEAR_LOG_PROBS.values():
        for contender in cell.contenders:
            us = {OURS: 1e3, "products": 1e3, "liger": 1.1e3}.get(contender.name, 2e3)
            row = a_row(cell, "mosaic" if contender.name == OURS else contender.name, us=us, error=0.25)
            rows.append(dataclasses.replace(row, temporaries=10**8 if contender.name == OURS else 4 * 10**9))
    return rows


def a_full_run_of_linear_divergence():
    """Likewise: ours takes as long as the products, Liger a tenth longer, and the others twice as long."""
    rows = []
    for cell in LINEAR_DIVERGENCE.values():
        for contender in cell.contenders:
            us = {OURS: 1e3, "products": 1e3, "liger": 1.1e3}.get(contender.name, 2e3)
            rows.append(a_row(cell, "mosaic" if contender.name == OURS else contender.name, us=us))
    return rows


def on_triton(rows):
    """The same rows, as a later run on Triton's kernels has them."""
    rows = [dataclasses.replace(row, run="on triton") for row in rows]
    return [dataclasses.replace(row, implementation="triton") if bars.is_ours(row) else row for row in rows]


def written(folder, rows, suite="softmax", implementation=None):
    path = results.path_for(folder, GPU, suite, implementation)
    results.append(path, *rows)
    return path


def name_of(row):
    return " ".join(filter(None, row.cell))


TINY = {cell.name: cell for cell in softmax.cells(2**14)}
ROWS = "softmax forward float32 32x512"


def tiny(pattern, **changes):
    """A cell on a few rows: that of this name, or the only one whose name has `pattern`."""
    (cell,) = [TINY[pattern]] if pattern in TINY else [cell for cell in TINY.values() if pattern in cell.name]
    return dataclasses.replace(cell, **changes)


def tiny_attention(options, dtype="bfloat16", pass_="forward"):
    """Attention on 512 tokens, the first cell of these options."""
    wanted = options, dtype, pass_
    cells = attention.gradient_cells if pass_ == BOTH else attention.cells
    return next(cell for cell in cells(512, 256) if (cell.options, cell.dtype, cell.pass_) == wanted)


def measured(*cells, **options):
    """A run of cells on whatever device there is, its rows, and what it says."""
    rows, lines = [], []
    run = harness.Run(GPU, "abc1234", rows.append, say=lines.append, **{"clock": wall_clock, "effort": QUICK, **options})
    run.measure(cells)
    return run, rows, "\n".join(lines)


# Result files.


def test_rows_are_appended_and_read_back(tmp_path):
    cell = CELLS["softmax forward float32 32768x4096"]
    first = [a_row(cell), a_row(cell, "sum", error=None)]
    second = [dataclasses.replace(a_row(cell, "jax.nn", run="2", us=123.457), copy_share=None)]
    path = written(tmp_path, first)
    before = path.read_bytes()
    assert written(tmp_path, second) == path == tmp_path / "h200" / "softmax.csv"
    assert path.read_bytes().startswith(before)
    assert results.read(path) == first + second


def test_columns():
    assert ",".join(results.COLUMNS) == (
        "run,date,gpu,jax,commit,op,pass,dtype,shape,options,implementation,us,bytes,flops,copy_share,error,temporaries,"
        "kernel_us,least_us,millijoules,sm_mhz"
    )


@pytest.mark.parametrize("missing", [results.COLUMNS[-count:] for count in range(1, 6)])
def test_a_file_without_the_newest_columns_is_read_and_appended_to(tmp_path, missing):
    cell = CELLS["softmax forward float32 32768x4096"]
    rows = [a_row(cell, run=run, error=error) for run, error in (("1", 0.5), ("2", None))]
    path = written(tmp_path, rows[:1])
    older = "".join(line.rsplit(",", len(missing))[0] + "\n" for line in path.read_text().splitlines())
    path.write_text(older)
    assert results.read(path) == rows[:1]
    written(tmp_path, rows[1:])
    assert path.read_text().startswith(older)
    assert len({line.count(",") for line in path.read_text().splitlines()}) == 1
    assert results.read(path) == rows
    with pytest.raises(ValueError, match=f"has no column for {', '.join(missing)}"):
        written(tmp_path, [dataclasses.replace(rows[0], **{missing[0]: 1})])
    assert results.read(path) == rows


@pytest.mark.parametrize(
    ("gpu", "folder"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm4-80gb"),
        ("NVIDIA GB200", "gb200"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "geforce-rtx-4090"),
        ("NVIDIA RTX 6000 Ada Generation", "rtx-6000-ada-generation"),
        ("NVIDIA GH200 480GB", "gh200-480gb"),
    ],
)
def test_folder_of_a_gpu(tmp_path, gpu, folder):
    assert results.path_for(tmp_path, gpu, "softmax") == tmp_path / folder / "softmax.csv"
    assert results.path_for(tmp_path, gpu, "softmax", "triton") == tmp_path / folder / "triton" / "softmax.csv"
    assert results.path_for(tmp_path, gpu, "sharded", devices=4) == tmp_path / f"{folder}x4" / "sharded.csv"


def test_a_file_that_ends_inside_a_row_is_refused(tmp_path):
    path = written(tmp_path, a_full_run()[:3])
    path.write_text(path.read_text()[:-5])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="the last row is not complete"):
        results.read(path)
    with pytest.raises(ValueError, match="the last row is not complete"):
        written(tmp_path, a_full_run()[:1])
    assert path.read_bytes() == before


@pytest.mark.parametrize(("old", "new", "match"), [("run,", "walk,", "columns"), (",mosaic,", ",mosaic,x", "line 2")])
def test_a_file_that_is_no_result_file_is_refused(tmp_path, old, new, match):
    path = written(tmp_path, [a_row(CELLS["softmax forward float32 32768x4096"])])
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(ValueError, match=match):
        results.read(path)


def test_a_run_cut_off_leaves_what_it_measured(tmp_path):
    def interrupted(*args):
        raise KeyboardInterrupt

    whole, cut = tiny("copy forward float32"), tiny(ROWS)
    path = results.path_for(tmp_path, GPU, "softmax")
    run = harness.Run(GPU, "abc", lambda row: results.append(path, row), clock=wall_clock, effort=QUICK, say=lambda line: None)
    with pytest.raises(KeyboardInterrupt):
        run.measure([whole, dataclasses.replace(cut, inputs=interrupted)])
    assert [row.op for row in results.read(path)] == ["copy"]


# Bars.


@pytest.mark.parametrize(
    ("suite", "cells"),
    [
        ("softmax", CELLS),
        ("softmax_sweep", SWEEP),
        ("attention", ATTENTION),
        ("attention_gradients", GRADIENTS),
        ("attention_sustained", SUSTAINED),
        ("attention_cool", COOL),
        ("decoding", DECODING),
        ("cross_entropy", LOSSES),
        ("linear_cross_entropy", LINEAR),
        ("linear_log_probs", LINEAR_LOG_PROBS),
        ("linear_divergence", LINEAR_DIVERGENCE),
        ("top_k", TOP_K),
        ("sampler", SAMPLER),
        ("first_call", FIRST_CALLS),
        ("sharded", SHARDED),
    ],
)
def test_every_bar_matches_cells(suite, cells):
    loaded = bars.load(suite)
    assert loaded
    for bar in loaded:
        held = [cell for cell in cells.values() if bar.holds_for(cell)]
        seen = {
            "op": {cell.op for cell in held},
            "pass": {cell.pass_ for cell in held},
            "dtype": {cell.dtype for cell in held},
            "shape": {cell.shape_text for cell in held},
            "options": {cell.options for cell in held},
        }
        assert held, bar
        for name, allowed in bar.filters.items():
            assert allowed is None or set(allowed) == seen[name], f"{bar}: {name}"
        assert not bar.if_measured or any(bar.peer in {c.name for c in cell.contenders} for cell in held), bar
        for cell in held:
            names = {contender.name for contender in cell.contenders} | {"copy"}
            assert bar.peer is None or bar.if_measured or bar.peer in names, f"{bar}: {cell.name}"
            other = " ".join(filter(None, bar.other(cell)))
            assert bar.than is None or (other in cells and other != cell.name), f"{bar}: {other}"


@pytest.mark.parametrize(
    ("entry", "match"),
    [
        ('op = "softmax"', "needs one of"),
        ("error_at_most = 1\ncols = [64]", "nothing unknown"),
        ("ratio_at_least = 0.9", "needs a peer"),
        ('error_at_most = 1\npeer = "copy"', "takes no peer"),
        ('error_at_most = "1"', "positive number"),
        ("time_at_most = 1", "needs a peer or a than"),
        ('time_at_most = 1\npeer = "copy"\nthan = { options = "" }', "one only"),
        ('time_per_block_at_most = 1\npeer = "copy"', "takes no peer"),
        ('ratio_at_least = 1\nthan = { options = "" }', "takes no than"),
        ("time_at_most = 1\nthan = { cols = 3 }", "than must be a table"),
        ('time_at_most = 1\nthan = "causal=1"', "than must be a table"),
        ("error_at_most = 1\ncolumns = 64", "columns must be the first and the last size"),
        ("error_at_most = 1\ncolumns = [64]", "columns must be the first and the last size"),
        ("error_at_most = 1\npercentile = 10", "of ratio_at_least"),
        ('ratio_at_least = 1\npeer = "copy"\npercentile = 100', "between 0 and 100"),
        ('ratio_at_least = 1\npeer = "copy"\nif_measured = 1', "if_measured must be true or false"),
        ("error_at_most = 1\nif_measured = true", "needs a peer"),
        ("millijoules_at_most = 1", "needs a peer"),
        ('memory_at_most = 1\nthan = { options = "" }', "takes no than"),
        ('scaling_at_least = 1\npeer = "copy"', "takes no peer"),
        ('error_at_most = 1\nmachines = "h200x2"', "machines must be names of folders"),
    ],
)
def test_bars_that_are_not_valid(tmp_path, entry, match):
    path = tmp_path / "bars.toml"
    path.write_text(f"[[softmax]]\n{entry}\n")
    with pytest.raises(ValueError, match=rf"\[\[softmax\]\] number 1.*{match}"):
        bars.load("softmax", path)


def in_rounds(changes):
    """Lists of changes, each of another cell, so that those of a list can be made at once; as few as there can be."""
    rounds = []
    for change in changes:
        at = sum(change[0] == earlier[0] for one in rounds for earlier in one)
        rounds[at:] = rounds[at:] or [[]]
        rounds[at].append(change)
    return rounds


def assert_found(folder, capsys, suite, rows, changes, apart=False):
    """Of rows that miss no bar, `--check` says so; where rows of cells and implementations are changed, it says what it found.

    Changes are made one by one if they are to be `apart`, as where cells are compared with each other.
    """
    written(folder / "right", rows, suite)
    assert main([suite, "--check", "--gpu", "h200", "--out", str(folder / "right")]) == 0
    assert " 0 of " in capsys.readouterr().out
    rounds = [[change] for change in changes] if apart else in_rounds(changes)
    for number, together in enumerate(rounds):
        of_rows = {(name, implementation): change for name, implementation, change, _ in together}
        changed = [dataclasses.replace(row, **of_rows.get((name_of(row), row.implementation), {})) for row in rows]
        written(folder / str(number), changed, suite)
        assert main([suite, "--check", "--gpu", "h200", "--out", str(folder / str(number))]) == 1
        lines = capsys.readouterr().out.splitlines()
        for name, _, change, found in together:
            said = [line for line in lines if line.startswith(f"{name} ")]
            assert any(line.endswith(f"  {found}") for line in said), (name, change, found, said)


# Cells, what is changed of a row, and what `--check` says that it finds there.
MISSED_SOFTMAX = [
    ("softmax forward float32 32768x4096", {"us": 1000.0}, "0.2684"),
    ("softmax forward float16 32x512", {"us": 2.08}, "1.04"),
    ("softmax forward bfloat16 16x131072", {"us": 2.6}, "0.6199"),
    ("softmax forward float32 8x50257x320 axis=1", {"us": 1000.0}, "0.2573"),
    ("logsumexp forward bfloat16 2670x50257", {"implementation": "xla"}, "on xla, not on mosaic"),
    ("softmax forward float32 32768x4096", {"error": 1.5}, "1.5"),
    ("softmax first_call float32 32768x4096", {"us": 3e6}, "3e+06"),
    ("logsumexp forward bfloat16 32768x4096", {"us": 100.0}, "0.6711"),
    ("softmax forward bfloat16 32768x4096 fused=1", {"implementation": "torch"}, "not measured"),
]


def test_check_fails(tmp_path, capsys):
    changes = [(name, "mosaic", change, found) for name, change, found in MISSED_SOFTMAX]
    assert_found(tmp_path, capsys, "softmax", a_full_run(), changes)


MISSED_ATTENTION = [
    ("4x4096x16x128 causal=1", {"us": 1300.0}, "1.092"),
    ("4x4096x64x128 kv_heads=8", {"us": 3800.0}, "1.037"),
    ("4x4096x16x128 mask=1x1xTxS", {"us": 1200.0}, "2.367"),
    ("1x16384x16x128 causal=1 documents=12", {"us": 300.0}, "1.329"),  # 1017 of 8256 blocks
    ("1x16384x16x128 causal=1 documents=12", {"us": 310.0}, "0.1692"),
    ("1x16384x16x128 causal=1 window=1024", {"us": 400.0}, "0.2183"),
    ("4x4097x16x128", {"us": 1100.0}, "1.201"),
    ("4x4096x16x128 mask=causal", {"us": 700.0}, "1.528"),
    ("jvp 1x16384x32x64", {"us": 13500.0}, "3.683"),
    ("jvp 4x4096x8x256 causal=1", {"implementation": "mosaic+xla"}, "on mosaic+xla, not on mosaic"),
    ("jvp 4x4096x16x128", {"error": 1.2}, "1.2"),
    ("4x4096x16x128 soft_cap=30", {"implementation": "xla"}, "on xla, not on mosaic"),
    ("4x4096x16x128 sinks=1", {"error": 1.1}, "1.1"),
    ("4x4096x64x128", {"op": "none"}, "the other not measured"),
    (f"{BOTH} 4x4096x16x128 causal=1", {"us": 5000.0}, "0.9941"),
    (f"{BOTH} 4x4096x8x256 causal=1 deterministic=1", {"us": 1750.0}, "1.091"),
    (f"{BOTH} 4x4096x16x128 bias=1xNxTxS", {"us": 10000.0}, "0.9941"),
    (f"{BOTH} 4x4096x64x128 causal=1 kv_heads=8", {"implementation": "mosaic+xla"}, "on mosaic+xla, not on mosaic"),
    (f"{BOTH} 32x512x16x128", {"op": "none"}, "not measured"),
]


@pytest.mark.parametrize("pass_", ["forward", BOTH])
def test_check_of_attention(tmp_path, capsys, pass_):
    suite, cells = ("attention", ATTENTION) if pass_ == "forward" else ("attention_gradients", GRADIENTS)
    changes = []
    for words, change, found in MISSED_ATTENTION:
        own = next((name for name in (BOTH, "jvp") if words.startswith(f"{name} ")), "forward")
        if (own == BOTH) == (pass_ == BOTH):
            changes.append((f"attention {own} bfloat16 {words.removeprefix(f'{own} ')}", "mosaic", change, found))
    assert changes
    assert_found(tmp_path, capsys, suite, a_full_run_of_attention(cells), changes, apart=True)


def a_full_run_of_sustained(cells=SUSTAINED):
    """Likewise: ours computes 600 TFLOP/s and takes 700 W; the others take 1.05 of its time and 1.1 of its energy."""
    rows = []
    for cell in cells.values():
        us = cell.flops / 6e8
        for name in (contender.name for contender in cell.contenders):
            row = a_row(cell, "mosaic" if name == OURS else name, us=us if name == OURS else 1.05 * us)
            rows.append(dataclasses.replace(row, millijoules=0.7 * us * (1 if name == OURS else 1.1)))
    return rows


MISSED_SUSTAINED = [
    ("forward bfloat16 4x4096x16x128", "mosaic", {"us": 970.0}, "0.9918"),
    ("forward bfloat16 4x4096x16x128", "mosaic", {"millijoules": 700.0}, "0.9922"),
    ("forward bfloat16 4x4096x16x128 causal=1 kv_heads=4", "mosaic", {"us": 480.0}, "1.002"),
    ("forward bfloat16 1x16384x8x256", "flash_attention_3", {"millijoules": None}, "no millijoules"),
    (f"{BOTH} bfloat16 4x4096x8x256 causal=1", "mosaic", {"us": 1660.0}, "1.014"),
    (f"{BOTH} bfloat16 4x4096x18x112 causal=1 held_out=1", "mosaic", {"error": 1.5}, "1.5"),
]
MISSED_COOL = [
    ("forward bfloat16 4x4096x16x128", "mosaic", {"us": 990.0}, "0.9718"),
    ("forward bfloat16 16x1024x32x64 causal=1", "cudnn", {"us": 115.0}, "1.004"),
    (f"{BOTH} bfloat16 4x4096x32x64", "mosaic", {"us": 3500.0}, "0.9621"),
    (f"{BOTH} bfloat16 8x2048x16x128 held_out=1 keys=10000", "mosaic", {"implementation": "xla"}, "on xla, not on mosaic"),
]


@pytest.mark.parametrize(
    ("suite", "cells", "missed"),
    [("attention_sustained", SUSTAINED, MISSED_SUSTAINED), ("attention_cool", COOL, MISSED_COOL)],
)
def test_check_of_sustained_and_cool_attention(tmp_path, capsys, suite, cells, missed):
    changes = [(f"attention {name}", *more) for name, *more in missed]
    rows = a_full_run_of_sustained(cells)
    assert_found(tmp_path, capsys, suite, rows, changes)
    without = [row for row in rows if row.implementation != "flash_attention_3"]
    written(tmp_path / "without", without, suite)
    assert main([suite, "--check", "--out", str(tmp_path / "without")]) == 0
    (count,) = re.findall(r", 0 of (\d+) bars missed", capsys.readouterr().out)
    assert int(count) == len(cells) + (4 if cells is COOL else 0)  # of errors, and beside cuDNN


MISSED_LOSSES = [
    ("forward bfloat16 8192x128256", "mosaic", {"us": 600.0}, "0.8756"),
    ("forward float32 8192x256000", "mosaic", {"us": 2300.0}, "0.9118"),
    (f"{BOTH} bfloat16 8192x151936", "mosaic", {"us": 2100.0}, "0.889"),
    (f"{BOTH} float32 8192x50257", "mosaic", {"us": 2100.0}, "0.8501"),
    (f"{BOTH} bfloat16 8192x32000", "quack", {"us": 350.0}, "1.123"),
    (f"{BOTH} bfloat16 8192x128256 z_loss=0.0001", "liger", {"us": 1500.0}, "1.051"),
    (f"{BOTH} bfloat16 8192x128256 label_smoothing=0.1", "mosaic", {"implementation": "xla"}, "on xla, not on mosaic"),
    ("forward bfloat16 8192x128003", "mosaic", {"error": 1.5}, "1.5"),
]


def test_check_of_cross_entropy(tmp_path, capsys):
    changes = [(f"cross_entropy {name}", *more) for name, *more in MISSED_LOSSES]
    assert_found(tmp_path, capsys, "cross_entropy", a_full_run(LOSSES), changes)


MISSED_LINEAR = [
    (f"{BOTH} bfloat16 8192x2048x32000", "mosaic", {"us": 1100.0}, "1.158"),
    (f"{BOTH} bfloat16 8192x4096x128256 class_axis=0", "mosaic", {"us": 1100.0}, "1.158"),
    ("forward bfloat16 16384x4096x128256", "mosaic", {"us": 1100.0}, "1.158"),
    (f"{BOTH} bfloat16 4096x4096x128256", "mosaic", {"temporaries": 7 * 10**8}, "7e+08"),
    ("forward bfloat16 4096x4096x128256", "mosaic", {"temporaries": 4 * 10**8}, "4e+08"),
    ("forward bfloat16 8192x4096x128256", "mosaic", {"temporaries": None}, "no temporaries"),
    (f"{BOTH} bfloat16 5000x3072x50257", "quack", {"us": 800.0}, "1.25"),
    (f"{BOTH} bfloat16 8192x4096x128256 weight=float32", "mosaic", {"error": 0.3}, "0.3"),
    (f"{BOTH} bfloat16 8192x2048x32000", "mosaic", {"implementation": "xla"}, "on xla, not on mosaic"),
]


def test_check_of_linear_cross_entropy(tmp_path, capsys):
    changes = [(f"linear_cross_entropy {name}", *more) for name, *more in MISSED_LINEAR]
    assert_found(tmp_path, capsys, "linear_cross_entropy", a_full_run_of_linear(), changes)


MISSED_LINEAR_LOG_PROBS = [
    ("linear_log_probs forward bfloat16 16384x4096x151936", "mosaic", {"us": 1030.0}, "1.03"),
    ("linear_log_probs forward bfloat16 5000x3072x50257", "products", {"us": 900.0}, "1.111"),
    ("linear_log_probs forward bfloat16 8192x2048x32000", "mosaic", {"implementation": "xla"}, "on xla, not on mosaic"),
    (f"linear_log_probs {BOTH} bfloat16 8192x4096x128256 class_axis=0 temperatures=1", "products", {"us": 950.0}, "1.053"),
    ("linear_log_probs forward bfloat16 8192x4096x128256 entropy=1", "mosaic", {"us": 1030.0}, "1.03"),
    ("linear_log_probs forward bfloat16 8192x4096x128256 class_axis=0 entropy=1", "mosaic", {"us": 1040.0}, "1.04"),
    (f"linear_log_probs {BOTH} bfloat16 8192x2048x32000 entropy=1 temperatures=1", "mosaic", {"us": 1030.0}, "1.03"),
    (
        f"linear_log_probs {BOTH} bfloat16 8192x4096x128256 class_axis=0 entropy=1 temperatures=1",
        "mosaic",
        {"us": 1040.0},
        "1.04",
    ),
    (f"linear_log_probs {BOTH} bfloat16 8192x2048x32000 entropy=1 temperatures=1", "mosaic", {"error": 0.3}, "0.3"),
    ("linear_log_probs forward bfloat16 5000x3072x50257 entropy=1", "liger", {"us": 950.0}, "1.053"),
    (f"linear_log_probs {BOTH} bfloat16 8192x2048x32000 temperature=0.75", "liger", {"us": 990.0}, "1.01"),
    (f"grpo {BOTH} bfloat16 32768x4096x151936", "liger", {"us": 800.0}, "1.25"),
    (f"grpo {BOTH} bfloat16 32768x4096x151936", "mosaic", {"error": 0.3}, "0.3"),
    (f"grpo {BOTH} bfloat16 32768x4096x151936", "mosaic", {"us": 1300.0}, "0.65"),
    (f"grpo {BOTH} bfloat16 32768x4096x151936 products=3", "mosaic", {"us": 1300.0}, "0.65"),
    (f"grpo {BOTH} bfloat16 32768x4096x151936", "mosaic", {"temporaries": 3 * 10**8}, "0.075"),
    (f"grpo {BOTH} bfloat16 32768x4096x151936", "jax.numpy", {"temporaries": None}, "no temporaries"),
    (f"grpo {BOTH} bfloat16 32768x4096x151936", "jax.numpy", {"implementation": "none"}, "jax.numpy not measured"),
]


def test_check_of_linear_log_probs(tmp_path, capsys):
    rows = a_full_run_of_linear_log_probs()
    assert_found(tmp_path, capsys, "linear_log_probs", rows, MISSED_LINEAR_LOG_PROBS, apart=True)


MISSED_LINEAR_DIVERGENCE = [
    (f"{BOTH} bfloat16 8192x2048x4096x128256 kind=forward_kl", "products", {"us": 600.0}, "1.667"),
    (f"{BOTH} bfloat16 5000x3072x2560x50257 kind=forward_kl reduction=none", "products", {"us": 900.0}, "1.111"),
    (f"{BOTH} bfloat16 8192x4096x4096x151936 kind=js", "liger", {"us": 900.0}, "1.111"),
    (f"{BOTH} bfloat16 8192x4096x4096x151936 kind=forward_kl", "mosaic", {"error": 1.5}, "1.5"),
]


def test_check_of_linear_divergence(tmp_path, capsys):
    changes = [(f"linear_divergence {name}", *more) for name, *more in MISSED_LINEAR_DIVERGENCE]
    assert_found(tmp_path, capsys, "linear_divergence", a_full_run_of_linear_divergence(), changes)


MISSED_TOP_K = [
    ("top_k forward float32 512x128256 k=50", {"us": 106.0}, "0.6195"),  # of which a read takes 65.7
    ("top_k forward bfloat16 512x50257 k=50", {"implementation": "xla"}, "on xla, not on mosaic"),
    ("top_k forward bfloat16 64x128256 k=50", {"us": 26.0}, "26"),
    ("top_k forward float32 1x128256 k=50", {"us": 13.0}, "13"),
    ("top_k forward float32 1x128256 k=1", {"us": 1.06}, "1.06"),
    ("top_k forward bfloat16 300x100003 k=50", {"error": 2.0}, "2"),
    ("softmax_top_k forward float32 512x50257 k=50", {"us": 30.0}, "1.166"),
    ("softmax_top_k forward bfloat16 512x50257 k=50", {"op": "none"}, "not measured"),
    ("softmax_top_k forward float32 1048576x64 k=8", {"us": 100.0}, "0.8389"),
    ("softmax_top_k backward bfloat16 262144x256 k=8 normalize=selected", {"us": 50.0}, "0.755"),
    ("softmax_top_k backward float32 262144x256 k=8", {"error": 1.5}, "1.5"),
    ("categorical forward float32 512x128256", {"us": 99.0}, "0.6633"),
    ("categorical forward bfloat16 512x50257 top_p=0.9", {"us": 40.0}, "0.3216"),
]


def test_check_of_top_k(tmp_path, capsys):
    changes = [(name, "mosaic", change, found) for name, change, found in MISSED_TOP_K]
    assert_found(tmp_path, capsys, "top_k", a_full_run(TOP_K), changes)


def test_check_of_the_sampler(tmp_path, capsys):
    of_tunix, of_levanter = (
        f"sampler_step forward {options}"
        for options in (
            "bfloat16 64x151936 as=tunix temperature=0.7 top_k=50 top_p=0.9",
            "float32 8x32000 as=levanter temperatures=1",
        )
    )
    rows = a_full_run(SAMPLER)
    rows = [row if bars.is_ours(row) or row.op == "copy" else dataclasses.replace(row, us=5.5 * row.us) for row in rows]
    changes = [
        (of_tunix, "tunix", {"us": 20.0}, "4.114"),
        (of_tunix, "mosaic", {"error": 1.5}, "1.5"),
        (of_levanter, "mosaic", {"us": 1.25}, "4.4"),
        (of_levanter, "mosaic", {"implementation": "xla"}, "on xla, not on mosaic"),
    ]
    assert_found(tmp_path, capsys, "sampler", rows, changes, apart=True)


def a_full_run_on_several(devices):
    """Likewise: on so many devices ours takes 1 ms, one device 0.95 as long as in all of them together, and the others 2 ms."""
    rows = []
    for cell in SHARDED.values():
        for name in dict.fromkeys(contender.name for contender in cell.contenders if cell.devices == devices):
            us = {OURS: 1e3, ONE: devices * 950.0}.get(name, 2e3)
            row = a_row(cell, "mosaic" if name == OURS else name, us=us)
            rows.append(dataclasses.replace(row, kernel_us=us / 2, temporaries=2**28))
    return rows


@pytest.mark.parametrize(
    ("devices", "name", "implementation", "change", "found"),
    [
        (2, "softmax forward float32 2048x131072 devices=2", ONE, {"us": 1500.0}, ["0.75"]),
        (4, f"softmax {BOTH} bfloat16 8192x131072 devices=4", "jax.nn", {"us": 1200.0}, ["1.2"]),
        (2, f"cross_entropy {BOTH} bfloat16 8192x128256 devices=2", ONE, {"us": 1600.0}, ["0.8"]),
        (4, f"linear_cross_entropy {BOTH} bfloat16 16384x4096x128256 class_axis=0 devices=4", ONE, {"us": 3200.0}, ["0.8"]),
        (4, "attention forward bfloat16 1x65536x16x128 causal=1 devices=4 permute=peer zigzag=4", ONE, {"us": 3200.0}, ["0.8"]),
        (2, f"attention {BOTH} bfloat16 1x32768x16x128 devices=2", ONE, {"op": "none"}, ["one device not measured"]),
        (2, f"attention {BOTH} bfloat16 1x32768x16x128 devices=2", "mosaic", {"op": "none"}, ["not measured"] * 2),
        (2, "attention forward bfloat16 1x32768x16x128 causal=1 devices=2", "mosaic", {"error": 2.0}, ["2"]),
        (
            2,
            "attention forward bfloat16 1x32768x16x128 devices=2 permute=peer",
            "mosaic",
            {"temporaries": 2**29},
            ["5.369e+08"],
        ),
    ],
)
def test_check_of_several_devices(tmp_path, capsys, devices, name, implementation, change, found):
    right = a_full_run_on_several(devices)
    wrong = [
        dataclasses.replace(row, **change) if (name_of(row), row.implementation) == (name, implementation) else row
        for row in right
    ]
    for out, rows, status in (("right", right, 0), ("wrong", wrong, 1)):
        results.append(results.path_for(tmp_path / out, GPU, "sharded", devices=devices), *rows)
        assert main(["sharded", "--check", "--out", str(tmp_path / out)]) == status
    passed, _, _, *missed = capsys.readouterr().out.splitlines()
    assert " 0 of " in passed
    assert [tuple(re.split("  +", line)[::2]) for line in missed] == [(name, words) for words in found]


def test_bars_are_for_machines(tmp_path, capsys):
    for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3"):
        for devices in (2, 4):
            rows = [row for row in a_full_run_on_several(devices) if row.implementation == "mosaic"]
            results.append(results.path_for(tmp_path, gpu, "sharded", devices=devices), *rows)
    assert main(["sharded", "--check", "--out", str(tmp_path)]) == 1
    found = re.findall(r"/([\w-]+)/sharded.csv: .*, (\d+) of (\d+) bars missed", capsys.readouterr().out)
    # Softmax has two for a cell, attention four with the flags, four without and four of memory; every cell has to be right.
    attention, memory, cells = 4, 4, len(SHARDED) // 2
    ratios = 2 * 8 + 1 + 2 + 2 * attention
    assert {folder: (int(missed), int(count)) for folder, missed, count in found} == {
        "h200x2": (ratios, ratios + memory + cells),
        "h200x4": (ratios, ratios + memory + cells),
        "h100-80gb-hbm3x2": (attention, attention + memory + cells),
        "h100-80gb-hbm3x4": (0, cells),
    }


NARROW = [cell.name for cell in SWEEP.values() if cell.name.startswith("logsumexp forward float32") and cell.shape[1] <= 2**15]


@pytest.fixture
def of_sweep(monkeypatch):
    """Leaves of the sweep the cells of an op and a pass, and gives them: the check of all takes a second."""

    def leave(op, pass_="forward"):
        cells = {name: cell for name, cell in SWEEP.items() if cell.op == "copy" or (cell.op, cell.pass_) == (op, pass_)}
        monkeypatch.setitem(SUITES, "softmax_sweep", lambda: list(cells.values()))
        return cells

    return leave


def check_of_sweep(folder, capsys, cells, slowed, **change):
    """What `--check` says of a run in which some cells of ours are slower, or changed otherwise."""
    rows = a_full_run(cells)
    for at, row in enumerate(rows):
        if name_of(row) in slowed and row.implementation == "mosaic":
            rows[at] = dataclasses.replace(row, **{"us": row.us / 0.94, **change})
    written(folder, rows, "softmax_sweep")
    status = main(["softmax_sweep", "--check", "--out", str(folder)])
    return status, capsys.readouterr().out


def test_a_percentile_is_of_all_cells_of_an_op_pass_and_dtype(tmp_path, capsys, of_sweep):
    cells = of_sweep("logsumexp")
    assert len(cells) == 2 + 2 * 64  # of two dtypes
    tenth = len(NARROW) // 10
    assert tenth == 4
    assert check_of_sweep(tmp_path / "few", capsys, cells, NARROW[:tenth])[0] == 0
    status, out = check_of_sweep(tmp_path / "many", capsys, cells, NARROW[-tenth - 1 :])
    assert status == 1
    (_, _, miss) = out.splitlines()
    assert miss.startswith(f"logsumexp forward float32, columns 64 to 32768, {len(NARROW)} cells ")
    assert miss.endswith("  ratio_at_least 0.95 of copy, percentile 10  0.94")


def test_a_percentile_needs_every_cell(tmp_path, capsys, of_sweep):
    cells = of_sweep("logsumexp")
    for folder, change, found in [
        ("none", {"op": "none"}, "not measured"),
        ("reference", {"implementation": "xla"}, "on xla, not on mosaic"),
    ]:
        status, out = check_of_sweep(tmp_path / folder, capsys, cells, NARROW[:1], **change)
        assert status == 1
        assert f"percentile 10  1 of {len(NARROW)} without a ratio, the first: {found}" in out
        assert any(line.startswith(NARROW[0]) and "0.93 of copy" in line and line.endswith(found) for line in out.splitlines())


def test_a_peer_that_need_not_be_installed(tmp_path, capsys, of_sweep):
    cells = of_sweep("softmax")

    def check_without(*left_out, **change):
        folder = tmp_path / "-".join(("out", *left_out, *change))
        rows = [row for row in a_full_run(cells) if row.implementation not in left_out]
        rows = [dataclasses.replace(row, **change) if row.implementation == "quack" else row for row in rows]
        written(folder, rows, "softmax_sweep")
        status = main(["softmax_sweep", "--check", "--out", str(folder)])
        missed, count = re.search(r"(\d+) of (\d+) bars missed", capsys.readouterr().out).groups()
        return status, int(missed), int(count)

    takes = sum("quack" in {c.name for c in cell.contenders} for cell in cells.values())
    assert takes == sum("quack" in {c.name for c in cell.contenders} for cell in SWEEP.values())
    assert 0 < takes < 128
    status, missed, count = check_without()
    assert (status, missed) == (0, 0)
    assert check_without("quack") == (0, 0, count - takes)
    assert check_without("jax.nn") == (1, len(cells) - 2, count)
    assert check_without(us=1.0) == (1, takes, count)


ON_TRITON = {
    "softmax": (
        a_full_run,
        [
            ("log_softmax backward bfloat16 131072x1024 mode=vjp", {"us": 230.0}, "0.8753"),
            ("logsumexp forward float32 524288x256", {"us": 150.0}, "0.8948"),
            ("softmax forward bfloat16 2670x50257", {"us": 240.0}, "1.118"),
            ("softmax forward float32 1024x512", {"us": 2.2}, "1.049"),
            ("softmax first_call float32 32768x4096", {"us": 4e6}, "4e+06"),
        ],
    ),
    "softmax_sweep": (
        lambda: a_full_run({name: cell for name, cell in SWEEP.items() if "forward" not in name or cell.op == "copy"}),
        [("softmax backward bfloat16 248551x540", {"us": 500.0}, "1.242")],
    ),
    "attention": (
        a_full_run_of_attention,
        [("attention forward bfloat16 4x4096x32x64 causal=1", {"us": 1500.0}, "1.191")],
    ),
    "attention_gradients": (
        lambda: a_full_run_of_attention(GRADIENTS),
        [(f"attention {BOTH} bfloat16 1x16384x16x128", {"implementation": "triton+xla"}, "on triton+xla, not on triton")],
    ),
    "first_call": (lambda: a_full_run(FIRST_CALLS), [("softmax first_call float32 32768x4096", {"us": 4e6}, "4e+06")]),
}


@pytest.mark.parametrize("suite", ON_TRITON)
def test_runs_on_triton_have_bars_of_their_own(tmp_path, capsys, monkeypatch, suite):
    make, changes = ON_TRITON[suite]
    rows, names = make(), {name for name, *_ in changes}
    measured = {row.cell for row in rows}
    cells = [cell for cell in SUITES[suite]() if (cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options) in measured]
    monkeypatch.setitem(SUITES, suite, lambda: cells)
    written(tmp_path, rows, suite)
    path = written(tmp_path, on_triton(rows), suite, "triton")
    assert path.parent.parent == tmp_path / "h200"
    assert main([suite, "--check", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("0 of ") == 2  # files
    again = [dataclasses.replace(row, run="again") for row in on_triton(rows) if row.op == "copy" or name_of(row) in names]
    of_names = {name: change for name, change, _ in changes}
    again = [dataclasses.replace(row, **(of_names.get(name_of(row), {}) if bars.is_ours(row) else {})) for row in again]
    written(tmp_path, again, suite, "triton")
    assert main([suite, "--check", "--gpu", "h200", "--out", str(tmp_path)]) == 1
    chosen, asked_for, _, *missed = capsys.readouterr().out.splitlines()
    assert " 0 of " in chosen  # rows of triton do not take the place of others
    assert str(path) in asked_for
    assert {line.split("  ")[0] for line in missed} == names
    for name, _, found in changes:
        assert any(line.startswith(f"{name}  ") and line.endswith(f"  {found}") for line in missed), (name, missed)
    assert main([suite, "--check", "--implementation", "triton", "--out", str(tmp_path)]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(missed)


def test_bars_of_triton_and_the_reference_are_for_runs_that_asked_for_them():
    for suite in SUITES:
        loaded = bars.load(suite)
        for implementation in ("mosaic", "triton", "xla"):
            assert {bar.implementation for bar in bars.of_file(loaded, implementation)} <= {implementation}
        chosen = bars.of_file(loaded, None, "h200x2")
        assert {bar.implementation for bar in chosen} <= {None, "mosaic"}
        asked_for = [bar for bar in loaded if bar.implementation in ("triton", "xla")]
        assert len(chosen) + len(asked_for) == len(loaded)
        found = [bars.of_file(loaded, name, "cpu-intel-r-xeon-r-processor") for name in ("triton", "xla")]
        assert sum(map(len, found)) == len(asked_for)


def test_what_triton_was_chosen_for_clears_no_bar_of_mosaic(tmp_path, capsys):
    written(tmp_path, on_triton(a_full_run()))
    assert main(["softmax", "--check", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "on triton, not on mosaic" in out
    assert "not on triton" not in out


def test_check_holds_every_result_file_to_its_bars(tmp_path, capsys):
    written(tmp_path, a_full_run())
    written(tmp_path, [row for row in a_full_run_of_attention() if row.implementation != "tokamax"], "attention")
    written(tmp_path, a_full_run_of_attention(GRADIENTS), "attention_gradients")
    assert main(["--check", "--out", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    for line, file in zip(lines, ("softmax.csv", "attention.csv", "attention_gradients.csv"), strict=True):
        assert file in line


def test_check_takes_what_was_measured_last_of_each_cell(tmp_path, capsys):
    cell = CELLS["softmax forward float32 32768x4096"]
    written(tmp_path, [*a_full_run(), a_row(cell, run="2", us=9e9)])
    assert main(["--check", "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "run 1 of abc1234, run 2 of abc1234" in out
    assert [line.split("  ")[0] for line in out.splitlines()[2:]] == [cell.name]
    rows = results.newest_of_each_cell(results.read(tmp_path / "h200" / "softmax.csv"))
    assert [row.implementation for row in rows if row.cell == rows[-1].cell] == ["mosaic"]  # no peer of the older run


def test_check_without_results(tmp_path, capsys):
    assert main(["--check", "--out", str(tmp_path)]) == 2
    assert main(["--check", "--gpu", "h100", "--out", str(tmp_path)]) == 2
    assert "--gpu" in capsys.readouterr().err


# The command line.


def test_list(capsys):
    assert main(["softmax", "--list", "--only", "^logsumexp forward bfloat16 32768x4096"]) == 0
    copy, logsumexp = capsys.readouterr().out.splitlines()
    assert copy.startswith("copy forward bfloat16")
    assert logsumexp.endswith(" ours, jax.nn, torch, sum")


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "suite"),
        (["attention_of_the_audience"], "suite"),
        (["softmax", "--only", "("], "--only"),
        (["softmax", "--only", "no such cell"], "--only"),
        (["softmax", "--peers", "jax.nn,numpy"], "--peers"),
        (["softmax", "--commit", "a b"], "--commit"),
        (["softmax", "--implementation", "cuda"], "--implementation"),
        (["softmax", "--list", "--implementation", "triton"], "--implementation"),
        (["softmax", "--gpu", "h200"], "--gpu"),
        (["--check", "--only", "softmax"], "--only"),
        (["--check", "--peers", "torch"], "--peers"),
        (["--check", "--plot"], "--plot"),
        (["softmax", "--self-test"], "suite"),
        (["softmax", "--wall-only"], "--wall-only"),
        (["attention", "--turn", "2"], "--turn"),
        (["attention_cool", "--turn", "2"], "--turn"),
        (["attention_sustained", "--turn", "0"], "--turn"),
        (["attention_sustained", "--pause", "1"], "--pause"),
        (["attention_cool", "--pause", "short"], "--pause"),
        (["attention_cool", "--list", "--pause", "1"], "--pause"),
        (["sharded", "--list", "--wall-only"], "--wall-only"),
    ],
)
def test_bad_arguments(arguments, named, capsys):
    try:
        status = main(arguments)
    except SystemExit as end:
        status = end.code
    assert status == 2
    assert f"argument {named}" in capsys.readouterr().err


def test_without_a_gpu_nothing_is_written(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    assert main(["softmax", "--out", str(tmp_path)]) == 2
    assert main(["--self-test"]) == 2
    assert "no GPU" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("status", [0, 3])
def test_without_an_energy_counter_the_suite_is_left_out(tmp_path, capsys, monkeypatch, status):
    def meter(ordinal):
        assert ordinal == 5
        if status:
            raise nvml.UnavailableError("NVML's nvmlDeviceGetTotalEnergyConsumption fails: Not Supported")
        return "meter"

    runs = []
    monkeypatch.setattr(harness, "gpu_name", lambda: GPU)
    monkeypatch.setattr(harness, "gpu_ordinal", lambda: 5)
    monkeypatch.setattr(nvml, "Meter", meter)
    run = types.SimpleNamespace(measure=lambda cells: None, problems=[], left_out=[])
    monkeypatch.setattr(harness, "Run", lambda *args, **options: runs.append(options) or run)
    options = ["--commit", "abc1234", "--out", str(tmp_path)]
    assert main(["attention_sustained", "--turn", "3", *options]) == (2 if status else 0)
    said = capsys.readouterr().err
    if status:
        assert not runs
        assert "attention_sustained is left out" in said
        assert "nvmlDeviceGetTotalEnergyConsumption fails: Not Supported" in said
    else:
        assert runs == [{"peers": None, "meter": "meter", "effort": sustained.effort(3.0)}]
    assert main(["attention_cool", *options]) == 0  # which needs no counter
    assert runs[-1] == {"peers": None, "effort": sustained.cool_effort(sustained.PAUSE)}


# Measuring.


@pytest.fixture(autouse=True)
def cleared(monkeypatch):
    """Notes where JAX's caches are to be cleared, and keeps what other tests have compiled."""
    times = []
    monkeypatch.setattr(jax, "clear_caches", lambda: times.append(len(times)))
    return times


@pytest.fixture(autouse=True)
def asked_for(monkeypatch):
    """Sets the implementation that ours runs on, for this test: a command line sets it for a process."""
    monkeypatch.setattr(library, "implementation", None)  # and back to it
    return functools.partial(setattr, library, "implementation")


def kinds(*suites):
    """A cell of each op, pass and options."""
    return {(c.op, c.pass_, c.options): c for suite in suites for c in suite.values() if c.op != "copy"}.values()


def test_all_cells_run_on_what_is_asked_for(asked_for):
    asked_for("mosaic")
    for cell in kinds(CELLS, ATTENTION, GRADIENTS, DECODING, LOSSES, LINEAR, LINEAR_LOG_PROBS, TOP_K):
        (ours,) = [contender for contender in cell.contenders if contender.name == OURS]
        inputs = jax.eval_shape(lambda key, cell=cell, ours=ours: ours.prepare(*cell.inputs(key, False)), jax.random.key(0))
        with pytest.raises(NotImplementedError, match="implementation='mosaic' cannot run: it runs on cuda, not on cpu"):
            jax.jit(ours.build()).lower(*inputs)


def test_what_is_asked_for_and_cannot_run_is_said_and_no_problem(asked_for):
    asked_for("mosaic")
    run, rows, said = measured(tiny(ROWS), peers=frozenset({"jax.nn"}))
    assert not run.problems
    assert [reason.split(":")[0] for reason in run.left_out] == [ROWS]
    assert "ours left out: NotImplementedError: softmax: implementation='mosaic' cannot run: it runs on cuda" in said
    assert [row.implementation for row in rows] == ["jax.nn"]
    asked_for("xla")
    run, rows, _ = measured(tiny(ROWS), peers=frozenset())
    assert not run.left_out
    assert [row.implementation for row in rows] == ["xla"]
    asked_for(None)
    forced = Contender(OURS, lambda: functools.partial(jaxsoftmax.softmax, implementation="mosaic"))
    assert measured(tiny(ROWS, contenders=(forced,)))[0].problems


def out_of_memory(*args, words="Out of memory while trying to allocate 8589934592 bytes."):
    raise jax.errors.JaxRuntimeError(f"RESOURCE_EXHAUSTED: {words}")


def test_cells_that_do_not_fit_are_left_out():
    cell = tiny(ROWS)
    large = dataclasses.replace(cell, inputs=out_of_memory, options="large")
    run, rows, said = measured(large, cell, peers=frozenset())
    assert not run.problems
    assert [row.options for row in rows] == [""]
    (reason,) = run.left_out
    assert reason.startswith(f"{large.name}: its inputs do not fit into memory, JaxRuntimeError: RESOURCE_EXHAUSTED")
    assert f"{reason}, left out" in said
    with pytest.raises(ZeroDivisionError):
        measured(dataclasses.replace(cell, inputs=lambda *args: 1 / 0))


@pytest.mark.parametrize("step", ["first", "timed"])
def test_calls_that_do_not_fit_are_left_out(step):
    cell = tiny(ROWS)
    if step == "first":
        cell = dataclasses.replace(cell, contenders=(Contender(OURS, lambda: out_of_memory), cell.contenders[1]))
    run, rows, _ = measured(cell, **({"clock": out_of_memory} if step == "timed" else {}))
    assert not run.problems
    assert [row.implementation for row in rows] == (["jax.nn"] if step == "first" else [])
    assert len(run.left_out) == 1
    too_large = functools.partial(out_of_memory, words="Shared memory size limit exceeded")
    assert measured(dataclasses.replace(cell, contenders=(Contender(OURS, lambda: too_large),)))[0].problems


@pytest.mark.parametrize("asked", [None, "xla"])
def test_a_run_says_what_it_wrote(tmp_path, capsys, monkeypatch, asked_for, asked):
    monkeypatch.setattr(harness, "gpu_name", lambda: "NVIDIA GeForce RTX 4090")
    monkeypatch.setattr(harness, "Run", functools.partial(harness.Run, clock=wall_clock, effort=QUICK))
    monkeypatch.setitem(SUITES, "softmax", lambda: [tiny(ROWS)])
    options = ["--commit", "abc1234", "--peers", "", "--out", str(tmp_path)]
    assert main(["softmax", *options, *(["--implementation", asked] if asked else [])]) == 0
    path = tmp_path / "geforce-rtx-4090" / (asked or "") / "softmax.csv"
    assert capsys.readouterr().out.splitlines()[-1] == f"appended to {path}, which may be sent as it is"
    assert [row.implementation for row in results.read(path)] == ["xla"]
    assert main(["softmax", *options, "--implementation", "mosaic"]) == 2
    out, err = capsys.readouterr()
    *_, reason, last = out.splitlines()
    assert reason.startswith(f"left out: {ROWS}: NotImplementedError: softmax: ")
    assert (last, err) == ("nothing was measured", "error: argument --implementation: mosaic ran nothing\n")
    assert list(tmp_path.rglob("*.csv")) == [path]


def test_a_peer_for_one_generation_of_gpus():
    cell = tiny(ROWS)
    peer = Contender("quack", lambda: jax.nn.softmax, capability=9)
    _, rows, said = measured(dataclasses.replace(cell, contenders=(peer,)))
    assert not rows
    assert "quack: for compute capability 9.x, not for none, left out" in said


def test_a_run_records_ours_and_peers_beside_the_copy():
    run, rows, said = measured(tiny("copy forward float32"), tiny(ROWS))
    assert not run.problems
    assert [row.op for row in rows] == ["copy", "softmax", "softmax"]
    copy, ours, peer = rows
    assert copy.copy_share == 1
    assert copy.error is None
    assert bars.is_ours(ours)
    assert 0 < ours.error <= 1
    assert peer.implementation == "jax.nn"
    assert peer.copy_share == pytest.approx(peer.speed / copy.speed)
    assert len({row.run for row in rows}) == 1
    assert "quack: not installed, left out" in said or "quack" in {row.implementation for row in rows}


@pytest.mark.parametrize("name", ["first_call float32 2x4096 grad=1", "logsumexp backward float32 16x1024", "fused=1"])
def test_cells_of_other_kinds_run(name, cleared):
    run, rows, _ = measured(tiny(name))
    assert not run.problems
    assert len(cleared) == ("first_call" in name)
    assert all(row.error <= 1 for row in rows if bars.is_ours(row))
    assert any(bars.is_ours(row) for row in rows)


@pytest.mark.parametrize(
    ("options", "pass_"),
    [
        ("causal=1 kv_heads=1", "forward"),
        pytest.param("causal=1 documents=12", "forward", marks=pytest.mark.slow),
        ("causal=1 deterministic=1", BOTH),
        ("causal=1", "jvp"),
    ],
)
def test_cells_of_attention_run(options, pass_):
    run, rows, _ = measured(tiny_attention(options, pass_=pass_), peers=frozenset())
    assert not run.problems
    (row,) = rows
    assert bars.is_ours(row)
    assert 0 < row.error <= 1
    assert row.flops > 0
    assert row.tflops == pytest.approx(row.flops / row.us / 1e6)
    assert row.copy_share is None


def tiny_decoding(**more):
    return decoding.cell_of(decoding.Step(3, 50, heads=4, key_heads=2, head_size=16, **more))


def test_cells_of_decoding_run():
    cell = tiny_decoding(cache="float8_e4m3fn", page=10)
    run, rows, _ = measured(cell, peers=frozenset())
    assert not run.problems
    (row,) = rows
    assert 0 < row.error <= 1
    assert row.bytes == cell.bytes


@pytest.mark.parametrize(
    "more",
    cases.quick(
        {},
        {"causal": True, "queries": 5},
        {"page": 10},
        {"prefix": 70},
        {"cache": "float8_e4m3fn", "page": 10},
        {"filled": 30},
        slow=[{"queries": 4}, {"ragged": True}, {"dtype": "float32"}, {"cache": "int8"}],
    ),
    ids=str,
)
def test_the_truth_of_decoding_tells_a_wrong_output(more):
    cell = tiny_decoding(**more)
    function, inputs = jax.jit(cell.contenders[0].build()), cell.inputs(jax.random.key(0), True)
    output = function(*inputs)
    assert 0 < check.errors(cell, cell.contenders[0], inputs, output)[0] <= 1
    query, *others = inputs
    longer = np.asarray(query) * np.asarray(1.1, query.dtype)
    assert check.errors(cell, cell.contenders[0], (longer, *others), output)[0] > 1
    ((_, fewer, part),) = cell.fewer(inputs, output)
    assert not np.any(np.isnan(part.astype(np.float32)))
    result = np.asarray(function(*fewer))
    assert not np.array_equal(result[1:], output[1:])
    np.testing.assert_array_equal(result[:1], part)


@pytest.mark.parametrize("options", ["value_size=128", "causal=1 window=32", "mask=causal", "bias=1xNxTxS", "key_lengths=1"])
def test_the_truth_of_attention(options):
    cell = tiny_attention(options)
    inputs = cell.inputs(jax.random.key(0), True)
    output = jax.jit(cell.contenders[0].build())(*inputs)
    ((actual, truth),) = cell.sample(inputs, output)
    assert oracle.error(actual, truth) <= 1
    query, *others = inputs
    assert check.errors(cell, cell.contenders[0], (query * 1.1, *others), output)[0] > 1


def test_the_truth_of_cross_attention():
    call = attention.Call(2, 64, 4, 64, keys=200)
    cell = attention.cell_of(call)
    query, key, value = inputs = cell.inputs(jax.random.key(0), True)
    function = jax.jit(cell.contenders[0].build())
    assert 0 < check.errors(cell, cell.contenders[0], inputs, function(*inputs))[0] <= 1
    last = jnp.arange(200)[:, None, None] < 199
    assert check.errors(cell, cell.contenders[0], inputs, function(query, key, jnp.where(last, value, 0)))[0] > 1
    with pytest.raises(ValueError, match="keys: must be None where positions matter"):
        dataclasses.replace(call, causal=True)


@pytest.mark.parametrize(
    "more",
    cases.every_other(
        [
            {},
            {"causal": True, "key_heads": 2},
            {"causal": True, "window": 32},
            {"causal": True, "extras": ("segments",)},
            {"extras": ("key_lengths",)},
            {"extras": ("causal_mask",)},
            {"causal": True, "extras": ("bias",)},
            {"keys": 200},
        ],
        1,
    ),
    ids=str,
)
def test_the_truth_of_gradients(more):
    call = attention.Call(2, 160, 4, 64, backward=True, **more)
    cell = attention.cell_of(call)
    *operands, dout = inputs = cell.inputs(jax.random.key(0), True)
    output = jax.jit(cell.contenders[0].build())(*inputs)
    pairs = cell.sample(inputs, output)
    assert len(pairs) == len(output) == 3 + ("bias" in call.extras)
    assert all(0 < oracle.error(*pair) <= 1 for pair in pairs)
    for wrong in range(len(output)):
        gradients = [gradient * (1.1 if at == wrong else 1) for at, gradient in enumerate(output)]
        assert check.errors(cell, cell.contenders[0], inputs, gradients)[0] > 1

    given = call.arguments(*operands[3:])
    truths = attention_oracle.cotangents(dout, np.zeros(dout.shape[:-1]), *operands[:3], **given)
    at, key_head = check.sampled(call.n_keys, ends=4, random=8), call.key_head(2)
    for (_, truth), name in zip(pairs[1:3], ("key", "value"), strict=True):
        value, budget = (array[-1, at, key_head] for array in (truths[name].value, truths[name].budget))
        assert np.all(np.abs(truth.value - value) <= 0.01 * budget)  # which is more than float32 misses
        np.testing.assert_allclose(truth.budget, budget, rtol=0.05)


@pytest.mark.parametrize("more", [{}, {"causal": True, "key_heads": 2}, {"extras": ("sinks",)}], ids=str)
def test_the_truth_of_tangents(more):
    call = attention.Call(2, 160, 4, 64, tangents=True, **more)
    cell = attention.cell_of(call)
    inputs = cell.inputs(jax.random.key(0), True)
    function = jax.jit(cell.contenders[0].build())
    output = function(*inputs)
    assert 0 < check.errors(cell, cell.contenders[0], inputs, output)[0] <= 1
    for wrong in range(2):
        other = [array * (1.1 if at == wrong else 1) for at, array in enumerate(output)]
        assert check.errors(cell, cell.contenders[0], inputs, other)[0] > 1
    for at in range(3):  # each tangent has its part
        moved = [0 * array if number == len(inputs) - 3 + at else array for number, array in enumerate(inputs)]
        assert check.errors(cell, cell.contenders[0], inputs, function(*moved))[0] > 1
    with pytest.raises(ValueError, match="tangents: must be False with backward"):
        dataclasses.replace(call, backward=True)


def test_bits_are_compared_where_they_must_be_the_same(monkeypatch):
    cell = tiny(ROWS)
    monkeypatch.setattr(check, "differing_bits", lambda *args, **kwargs: ["other bits"])
    assert measured(cell, peers=frozenset())[0].problems == [f"{cell.name}: other bits"]
    assert not measured(dataclasses.replace(cell, repeatable=False), peers=frozenset())[0].problems
    assert all(cell.repeatable for cell in ATTENTION.values())
    assert all(cell.repeatable == ("deterministic=1" in cell.options) for cell in GRADIENTS.values())


def test_each_way_to_share_rows_is_what_its_name_says():
    mesh = jax.make_mesh((4,), ("model",), axis_types=(jax.sharding.AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "model"))
    x = jax.ShapeDtypeStruct((32768, 2048), "bfloat16", sharding=sharding)  # a shape that the library leaves to the reference
    ran = {}
    for way in sharded.WAYS:
        with jax.set_mesh(mesh), sharded._made_to(way, contextlib.nullcontext):
            decisions = jaxsoftmax.explain(jaxsoftmax.softmax, x, platform="cuda")
        ran[way] = [(decision.primitive, decision.implementation) for decision in decisions]
    states = [("logsumexp", "mosaic"), ("logsumexp_vjp", "mosaic")]
    reference = [(name, "xla") for name, _ in states]
    assert ran == {"one kernel": [("softmax", "mosaic")], "states": states, "reference": reference}


@pytest.mark.parametrize(
    ("options", "pass_"),
    [("mask=1x1xTxS", "forward"), ("causal=1 documents=12", "forward"), ("sinks=1", "forward"), ("causal=1", "jvp")],
)
def test_calls_of_attention_with_fewer_queries(monkeypatch, options, pass_):
    monkeypatch.setattr(attention, "_FEW_QUERIES", 3)  # tiny calls have fewer than those that are compared
    monkeypatch.setattr(attention, "_FEW_LENGTH", 512)
    cell = tiny_attention(options, pass_=pass_)
    inputs = cell.inputs(jax.random.key(0), False)
    function = cell.contenders[0].build()
    ((words, fewer, parts),) = cell.fewer(inputs, function(*inputs))
    assert words == "3 queries"
    # Two float32 sums of as many terms are a few dozen roundings apart, and become one number of bfloat16 or its neighbour.
    for array, part in zip(jax.tree.leaves(function(*fewer)), jax.tree.leaves(parts), strict=True):
        np.testing.assert_allclose(oracle.to64(array), oracle.to64(part), rtol=2**-7, atol=64 * oracle.EPS)


def test_peers_of_attention():
    def names(name, dtype="bfloat16", pass_="forward"):
        cell = (ATTENTION | GRADIENTS)[f"attention {pass_} {dtype} {name}"]
        return list(dict.fromkeys(contender.name for contender in cell.contenders))

    assert names("4x4096x16x128 causal=1") == [OURS, "cudnn", "attention_mgpu", "flash_attention_3", "tokamax", "torch"]
    assert names("4x4096x64x128 kv_heads=8") == [OURS, "cudnn", "flash_attention_3", "tokamax", "torch"]
    assert names("4x4097x16x128") == [OURS, "cudnn", "flash_attention_3", "tokamax", "torch"]
    assert names("4x4096x16x128 mask=1x1xTxS") == [OURS, "cudnn"]
    assert names("1x16384x16x128 causal=1 documents=12") == [OURS]
    assert names("4x4096x16x128 sinks=1") == [OURS]
    assert names("4x4096x16x128 causal=1", "float32") == [OURS, "jax.nn", "jax.nn highest"]

    assert names("1x16384x16x128 causal=1 window=1024") == [OURS, "cudnn", "flash_attention_3"]
    assert names("1x16384x8x256", pass_="jvp") == [OURS, "jax.nn"]
    assert names("1x16384x16x128", pass_="jvp") == [OURS]  # whose scores would be 16 GiB in float32

    assert names("4x4096x16x128", pass_=BOTH) == [OURS, "cudnn", "attention_mgpu", "flash_attention_3", "torch"]
    assert names("4x4096x16x128 causal=1", pass_=BOTH) == [OURS, "cudnn", "flash_attention_3", "torch"]
    assert names("4x4096x64x128 causal=1 kv_heads=8", pass_=BOTH) == [OURS, "cudnn", "flash_attention_3", "torch"]
    assert names("4x4096x16x128 bias=1xNxTxS", pass_=BOTH) == [OURS, "cudnn"]
    assert names("1x16384x16x128 causal=1 documents=12", pass_=BOTH) == [OURS]
    assert names("4x4096x16x128 deterministic=1", pass_=BOTH) == [OURS]
    assert {tuple(c.name for c in cell.contenders) for cell in COOL.values()} == {(OURS, "cudnn", "flash_attention_3")}
    for cell in (ATTENTION | GRADIENTS).values():
        assert all(contender.alone == (contender.name == "cudnn") for contender in cell.contenders)


@pytest.mark.parametrize("pass_", ["forward", BOTH])
def test_flash_attention_3_is_a_peer_where_it_is_installed(monkeypatch, pass_):
    cell = tiny_attention("causal=1" if pass_ == "forward" else "causal=1 window=32", pass_=pass_)
    cell = dataclasses.replace(cell, contenders=tuple(c for c in cell.contenders if c.name == "flash_attention_3"))
    peers = frozenset({"flash_attention_3"})
    _, rows, said = measured(cell, peers=peers)
    assert not rows
    assert "dew_flash_attn: not installed, its flash_attention_3 left out" in said

    given = []

    def flash_mha(q, k, v, *, is_causal=False, window_size=None):
        given.append((q.shape, is_causal, window_size))
        return jaxsoftmax.dot_product_attention(q, k, v, is_causal=is_causal, local_window_size=window_size)

    module = types.ModuleType("dew_flash_attn")
    module.flash_mha = flash_mha
    module.__spec__ = importlib.machinery.ModuleSpec("dew_flash_attn", None)
    monkeypatch.setitem(sys.modules, "dew_flash_attn", module)
    _, rows, _ = measured(cell, peers=peers)
    assert {row.implementation for row in rows} == peers
    assert set(given) == {(cell.shape, True, None) if pass_ == "forward" else (cell.shape, False, (31, 0))}


@pytest.fixture
def shrunken():
    """The cell of a suite of several devices, a 64th as large, on four."""
    return lambda suite, name: next(cell for cell in suite.cells((4,), 64) if cell.name == name)


@pytest.mark.parametrize(
    ("name", "peers"),
    [
        ("softmax forward float32 32x2048 devices=4", {"jax.nn"}),
        (f"softmax {BOTH} bfloat16 128x2048 devices=4 mesh=auto", set()),
        (f"cross_entropy {BOTH} bfloat16 128x2004 devices=4", {"optax"}),
        (f"linear_cross_entropy {BOTH} bfloat16 256x64x2004 class_axis=0 devices=4", set()),
        (f"attention {BOTH} bfloat16 1x256x2x128 causal=1 devices=4 permute=peer zigzag=4", set()),
        *[
            pytest.param(f"attention {name}", set(), marks=pytest.mark.slow)
            for name in (
                "forward bfloat16 1x256x2x128 devices=4",
                f"{BOTH} bfloat16 1x256x2x128 causal=1 devices=4 zigzag=4",
                "forward bfloat16 1x1024x2x128 causal=1 devices=4 permute=peer zigzag=4",
                f"{BOTH} bfloat16 1x1024x2x128 causal=1 devices=4",
            )
        ],
    ],
)
def test_cells_of_several_devices_run(name, peers, shrunken, monkeypatch):
    kernels = []
    monkeypatch.setattr(sharded, "CALLS", 2)
    monkeypatch.setattr(harness, "mean_of_devices_us", lambda *args: kernels.append(args[2:]) or 80.0)
    cell = shrunken(sharded, name)
    run, rows, said = measured(cell, peers=frozenset(peers), clock=None)  # by the wall clock, and kernels as here
    assert not run.problems
    ours, one, *others = rows
    assert bars.is_ours(ours)
    assert one.implementation == ONE
    assert {row.implementation for row in others} == peers
    assert kernels == [(1, 4), (1, 1), (1, 4)][: len(rows)]  # calls, and the devices that they run on
    for row in (ours, one):
        assert 0 < row.error <= 1
        assert row.kernel_us == 80 / cell.calls
        assert (row.temporaries is None) == (cell.calls > 1)
    assert cell.calls == (2 if "softmax" in name or name.startswith("cross") or "1x256x2" in name else 1)
    assert f"{80 / cell.calls:.2f} in kernels" in said


def of_shared_rows(name, shrink):
    return next(cell for cell in sharded.row_cells((4,), shrink) if cell.name == f"{name} devices=4")


@pytest.mark.parametrize("op", cases.quick("softmax", slow=["logsumexp"]))
def test_rows_are_shared_in_each_way(op, monkeypatch):
    monkeypatch.setattr(sharded, "CALLS", 2)
    run, rows, _ = measured(of_shared_rows(f"{op} {BOTH} bfloat16 4x128", 64), peers=None)
    assert not run.problems
    assert [row.implementation for row in rows[1:]] == [*list(sharded.WAYS)[op == "logsumexp" :], "jax.nn"]


def test_each_way_to_share_rows_lowers_other_kernels():
    cell = of_shared_rows("softmax forward bfloat16 256x8192", 1)
    x, found = (
        jax.ShapeDtypeStruct(
            cell.shape, cell.dtype, sharding=jax.NamedSharding(sharded.mesh_of(4, "explicit"), sharded.COLUMNS)
        ),
        {},
    )
    for contender in cell.contenders[1:-1]:
        with contender.context():
            text = jax.jit(contender.build()).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        found[contender.name] = set(kernels.kernel_names(text))
    assert found == {
        "one kernel": {"softmax_forward_mosaic"},
        "states": {"logsumexp_forward_mosaic", "logsumexp_vjp_mosaic"},
        "reference": set(),
    }


def test_a_cell_of_several_devices_tells_a_wrong_output(shrunken):
    cell = shrunken(sharded, f"softmax {BOTH} float32 32x2048 devices=4")
    inputs, ours = cell.inputs(jax.random.key(0), True), cell.contenders[0]
    with ours.context():
        first, last = jax.jit(ours.build())(*ours.prepare(*inputs))
    assert check.errors(cell, ours, inputs, (first, last))[0] <= 1
    assert first[0].sharding.spec == sharded.COLUMNS
    swapped = jax.tree.map(lambda array: jnp.roll(sharded.whole(array), 512, 1), first)
    assert check.errors(cell, ours, inputs, (swapped, last))[0] > 1


def test_kernel_times_that_cannot_be_had_are_left_out(shrunken, monkeypatch):
    def fails(*args):
        raise RuntimeError("2 calls ran 3 kernels")

    monkeypatch.setattr(harness, "mean_of_devices_us", fails)
    cell = shrunken(sharded, "softmax forward float32 32x2048 devices=4")
    _, rows, said = measured(cell, peers=frozenset(), clock=None)
    assert [row.kernel_us for row in rows] == [None, None]
    assert said.count("kernel times left out: RuntimeError: 2 calls ran 3 kernels") == 1


@pytest.mark.parametrize(
    "name",
    [
        "ppermute forward float32 256 devices=4 size=64KiB",
        "psum forward float32 256 devices=4 size=64KiB",
        "all_gather forward float32 256 devices=4 size=64KiB",
        "overlap forward bfloat16 524288x128x128 devices=4 of=both",
    ],
)
def test_links(name, shrunken, monkeypatch):
    monkeypatch.setattr(links, "CALLS", 2)
    run, rows, _ = measured(shrunken(links, name), peers=None)
    assert not run.left_out
    assert [row.implementation for row in rows] == ["exchange", "latency hiding"][: 1 + name.startswith("overlap")]
    assert all(row.error <= 1 for row in rows)
    sent = {"ppermute": 1, "psum": 1.5, "all_gather": 3, "overlap": 2**21 / 1024}[name.split()[0]]
    assert rows[0].bytes == sent * 1024


def test_suites_of_several_devices_take_all_there_are(tmp_path, capsys, monkeypatch, asked_for, shrunken):
    del asked_for  # it sets back what `main` sets
    name = "softmax forward float32 32x2048 devices=4"
    monkeypatch.setattr(harness, "gpu_name", lambda: GPU)
    monkeypatch.setattr(harness, "Run", functools.partial(harness.Run, effort=QUICK))
    monkeypatch.setitem(SUITES, "sharded", lambda: [shrunken(sharded, name)])
    options = ["sharded", "--wall-only", "--commit", "abc1234", "--peers", "", "--out", str(tmp_path)]
    assert main(options) == 2
    assert f"none of these cells is for {jax.device_count()} GPUs" in capsys.readouterr().err
    monkeypatch.setattr(harness, "device_count", lambda: 4)
    assert main(options) == 0
    rows = results.read(tmp_path / "h200x4" / "sharded.csv")
    assert [(name_of(row), row.implementation, row.kernel_us) for row in rows] == [(name, "xla", None), (name, ONE, None)]


def test_names_at_the_ends_of_lines_do_not_touch():
    heights = {"a": 0.5, "b": 0.51, "c": 0.52, "d": 0.9, "e": 0.0}
    found = plot.spread(heights, 0.1)
    assert sorted(found, key=lambda name: found[name]) == ["e", "a", "b", "c", "d"]
    assert (found["d"], found["e"]) == (0.9, 0.0)
    assert (found["a"], found["b"], found["c"]) == pytest.approx((0.41, 0.51, 0.61))
    assert plot.spread({"a": 0.98, "b": 0.99}, 0.1) == pytest.approx({"a": 0.9, "b": 1.0})  # none is above the panel


def test_operands_of_the_attention_of_pallas():
    cell = tiny_attention("causal=1")
    peer = next(contender for contender in cell.contenders if contender.name == "attention_mgpu")
    query, *others = peer.prepare(*cell.inputs(jax.random.key(0), False))
    output = jaxsoftmax.dot_product_attention(query, *others, scale=1.0, is_causal=True)
    assert query.dtype == jnp.float16  # which is all that it takes
    assert check.errors(cell, peer, cell.inputs(jax.random.key(0), False), output)[1] < 0.01


def test_the_widths_of_the_sweep_are_what_was_drawn():
    generator, drawn = random.Random(18), set()
    while len(drawn) < 64:
        step = (1, 2, 4, 8, 16)[len(drawn) % 5]
        cols = int(64 * 2 ** (14 * generator.random())) // step * step
        cols += step * (step < 16 and cols // step % 2 == 0)
        if cols & (cols - 1):
            drawn.add(cols)
    assert sorted(drawn) == list(sweep.WIDTHS)


def test_cells_of_the_sweep():
    kinds = {(cell.op, cell.pass_, cell.dtype) for cell in SWEEP.values()}
    assert len(kinds) == 2 + 6
    assert len(SWEEP) == 2 + 6 * 64
    for cell in list(SWEEP.values())[2:]:
        names = [contender.name for contender in cell.contenders]
        vectors = cell.shape[1] * (4 if cell.dtype == "float32" else 2) % 16 == 0 and cell.shape[1] <= 2**18
        quack = ["quack"] if vectors and (cell.op, cell.pass_) == ("softmax", "forward") else []
        assert names == [OURS, "jax.nn", *quack]
        assert 0.99 * 2**27 < np.prod(cell.shape) <= 2**27


def test_the_sweep_records_the_reference_where_it_runs(monkeypatch):
    monkeypatch.setattr(check, "_fewer", None)  # which compiles kernels anew, and must not be called
    monkeypatch.setattr(harness, "_implementation", lambda *args: "mosaic")
    assert [cell.shape for cell in sweep.cells(2**14)[2:5]] == [(237, 69)] * 3
    run, rows, _ = measured(*sweep.cells(2**14)[2:5], peers=frozenset())
    assert not run.problems
    assert [row.implementation for row in rows] == ["mosaic"] * 3
    monkeypatch.undo()
    run, rows, _ = measured(*sweep.cells(2**14)[2:5], peers=frozenset())
    assert not run.problems
    assert [row.implementation for row in rows] == ["xla"] * 3


@pytest.mark.parametrize("name", ["softmax forward bfloat16 64x2x512 axis=1", "softmax forward float32 16x128"])
def test_cells_along_another_axis_and_of_few_rows_run(name):
    run, rows, _ = measured(tiny(name))
    assert not run.problems
    assert {row.implementation for row in rows} >= {"xla", "jax.nn"}
    assert all(0 < row.error <= 1 for row in rows if bars.is_ours(row))


def test_the_truth_along_another_axis():
    (cell,) = [cell for cell in softmax.cells(2**20) if cell.name == "softmax forward float32 8x392x320 axis=1"]
    inputs = cell.inputs(jax.random.key(0), True)
    assert inputs[0].shape == cell.shape
    assert check.errors(cell, cell.contenders[0], inputs, jax.nn.softmax(*inputs, axis=1))[1] < 1e-5
    assert check.errors(cell, cell.contenders[0], inputs, jax.nn.softmax(*inputs, axis=2))[0] > 1
    ((_, fewer, part),) = cell.fewer(inputs, jaxsoftmax.softmax(*inputs, axis=1))
    np.testing.assert_allclose(jaxsoftmax.softmax(*fewer, axis=1), part, rtol=1e-5)


def test_cells_of_cross_entropy():
    copies, cells = list(LOSSES.values())[:2], list(LOSSES.values())[2:]
    assert [cell.name for cell in copies] == ["copy forward float32 32768x4096", "copy forward bfloat16 32768x4096"]
    assert len(cells) == 2 * (5 + 6) + 4
    for cell in cells:
        passes = 3 if cell.pass_ == BOTH else 1
        assert cell.bytes == passes * 8192 * cell.shape[1] * (4 if cell.dtype == "float32" else 2)
        names = list(dict.fromkeys(contender.name for contender in cell.contenders))
        if cell.options:
            assert names == [OURS, "liger"]  # the only one that has them all
        else:
            assert names == [OURS, "optax", "torch", "quack", "liger", *(["sum"] if passes == 1 else [])]


def tiny_losses(name):
    """The cell of cross-entropy on three rows."""
    return {cell.name.removeprefix("cross_entropy "): cell for cell in cross_entropy.cells(3)}[name]


@pytest.mark.parametrize(
    "name", cases.quick("forward float32 3x50257", f"{BOTH} bfloat16 3x50257", slow=[f"{BOTH} float32 3x32000"])
)
def test_cells_of_cross_entropy_run(name):
    run, rows, _ = measured(tiny_losses(name))
    assert not run.problems
    assert {row.implementation for row in rows} >= {"optax", *(["sum"] if "+" not in name else [])}
    (ours,) = [row for row in rows if bars.is_ours(row)]
    assert 0 < ours.error <= 1


def test_cells_of_log_probs():
    cells = log_probs.cells()
    assert [cell.name for cell in cells[:2]] == ["copy forward float32 32768x4096", "copy forward bfloat16 32768x4096"]
    divided = [cell for cell in cells if cell.options == "divided=1"]
    assert len(cells) == 2 + 3 * 2 * (2 * 4 + 1 + 2 * 4) + 6 * 5 * 2 + 4 * 2
    for cell in divided:
        peer = "jax.random" if cell.op == "categorical" else "jax.nn"
        assert [contender.name for contender in cell.contenders] == [OURS, peer, "undivided"]
    for cell in cells[2 : -len(divided)]:
        passes = 3 if cell.pass_ == BOTH else 1
        if cell.op in ("kl", "js"):
            passes = {"": 2, "by=p": 5, "by=q": 5, "by=pq": 6}[cell.options]
        assert cell.bytes == passes * cell.shape[0] * cell.shape[1] * (4 if cell.dtype == "float32" else 2)
        names = list(dict.fromkeys(contender.name for contender in cell.contenders))
        assert names == [OURS, "jax.numpy", *(["sum"] if cell.name.startswith("entropy forward ") else [])]


TINY_LOG_PROBS = {cell.name: cell for cell in log_probs.cells(((6, 301),)) if cell.op != "copy"}


@pytest.mark.parametrize(
    "name",
    cases.quick(
        f"entropy {BOTH} bfloat16 6x301",
        f"log_probs {BOTH} float32 6x301 entropy=1 scales=1",
        f"ppo {BOTH} float32 6x301",
        f"kl {BOTH} bfloat16 6x301 by=pq",
        f"js {BOTH} bfloat16 6x301 by=pq",
        "log_softmax forward bfloat16 6x301 divided=1",
        f"cross_entropy {BOTH} bfloat16 6x301 divided=1",
        slow=[
            "entropy forward bfloat16 6x301 divided=1",
            f"cross_entropy {BOTH} float32 6x301 divided=1",
            "categorical forward bfloat16 6x301 divided=1",
            *(f"log_probs forward bfloat16 6x301 entropy=1{scale}" for scale in ("", " scale=0.7", " scales=1")),
            "kl forward float32 6x301",
            "js forward float32 6x301",
            f"kl {BOTH} float32 6x301 by=q",
        ],
    ),
)
def test_cells_of_log_probs_run(name):
    run, rows, _ = measured(TINY_LOG_PROBS[name])
    assert not run.problems
    assert {row.implementation for row in rows} >= {"xla", TINY_LOG_PROBS[name].contenders[1].name}
    (ours,) = [row for row in rows if bars.is_ours(row)]
    assert 0 < ours.error <= 1


@pytest.mark.parametrize(
    "name",
    [
        "forward bfloat16 3x50257",
        f"{BOTH} float32 3x50257",
        *(f"{BOTH} bfloat16 3x128256 {options}" for options in ("label_smoothing=0.1", "logits_soft_cap=30", "z_loss=0.0001")),
    ],
)
def test_the_truth_of_cross_entropy(name):
    cell = tiny_losses(name)
    (ours, *_), (logits, labels) = cell.contenders, cell.inputs(jax.random.key(0), False)
    function = jax.jit(ours.build())
    output = function(logits, labels)
    assert 0 < check.errors(cell, ours, (logits, labels), output)[0] <= 1
    assert check.errors(cell, ours, (logits, labels), function(logits, (labels + 1) % cell.shape[1]))[0] > 1
    leaves, tree = jax.tree.flatten(output)
    assert [leaf.shape for leaf in leaves] == [labels.shape, logits.shape][: len(leaves)]
    for wrong in range(len(leaves)):
        changed = jax.tree.unflatten(tree, [leaf * (1.02 if at == wrong else 1) for at, leaf in enumerate(leaves)])
        assert check.errors(cell, ours, (logits, labels), changed)[0] > 1
    torch_ = next(contender for contender in cell.contenders if contender.framework == "torch")
    assert 0 < check.errors(cell, torch_, (logits, labels), leaves[-1:])[0] <= 1  # the losses, or the gradient alone


def test_cells_of_linear_cross_entropy():
    both = [cell for cell in LINEAR.values() if cell.pass_ == BOTH]
    forward = [cell for cell in LINEAR.values() if cell.pass_ == "forward"]
    assert [cell.shape for cell in forward] == [cell.shape for cell in both[:6]]
    assert [cell.shape for cell in both[:4]] == list(linear_cross_entropy.SHAPES)
    every = [OURS, "products", "optax", "quack", "liger", "liger"]  # two of its functions
    for cell in (*forward, *both[:7]):
        assert [contender.name for contender in cell.contenders] == every
    assert [contender.name for contender in both[7].contenders] == every[:3]
    assert [cell.shape[2] for cell in both[8:]] == [262144, 131072, 65536, 32768, 16384, 8192]
    assert all([contender.name for contender in cell.contenders] == [OURS, "optax"] for cell in both[8:])
    for cell in LINEAR.values():
        tokens, size, vocabulary = cell.shape
        passes = 3 if cell.pass_ == BOTH else 1
        assert cell.flops == passes * 2 * tokens * size * vocabulary
        assert cell.bytes == min(passes, 2) * 2 * size * (tokens + vocabulary * (2 if "float32" in cell.options else 1))


def tiny_linear(name):
    """The cell of cross-entropy of a linear layer on a 64th of tokens, hidden size and vocabulary."""
    return {cell.name.removeprefix("linear_cross_entropy "): cell for cell in linear_cross_entropy.cells(64)}[name]


@pytest.mark.parametrize(
    "name",
    cases.quick(
        "forward bfloat16 128x32x500",
        f"{BOTH} bfloat16 128x64x2004 class_axis=0",
        slow=[f"{BOTH} bfloat16 78x48x785", f"{BOTH} bfloat16 128x64x2004 weight=float32"],
    ),
)
def test_cells_of_linear_cross_entropy_run(name):
    run, rows, said = measured(tiny_linear(name), clock=None)  # by the wall clock
    assert not run.problems
    ours, products, optax = rows
    assert bars.is_ours(ours)
    assert [products.implementation, optax.implementation] == ["products", "optax"]
    assert 0 < ours.error < 0.275
    assert products.error is None
    assert ours.temporaries > 0
    assert optax.temporaries > 0
    assert f"{ours.temporaries / 1e6:.1f}" in said


@pytest.mark.parametrize("name", ["forward bfloat16 128x32x500", f"{BOTH} bfloat16 128x32x500"])
def test_the_truth_of_linear_cross_entropy(name, monkeypatch):
    cell = tiny_linear(name)
    ours, inputs = cell.contenders[0], cell.inputs(jax.random.key(0), True)
    output = jax.jit(ours.build())(*inputs)
    pairs = cell.sample(inputs, output)
    assert all(oracle.error(*pair) < 0.275 for pair in pairs)
    monkeypatch.setattr(linear_cross_entropy, "_ROWS", 50)  # and so several times
    for (actual, truth), (expected, other) in zip(cell.sample(inputs, output), pairs, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
        np.testing.assert_allclose([truth.value, truth.budget], [other.value, other.budget], rtol=1e-9)
    leaves, tree = jax.tree.flatten(output)
    assert len(leaves) == len(pairs) == (3 if "+" in name else 1)
    for wrong in range(len(leaves)):
        changed = jax.tree.unflatten(tree, [leaf * (1.1 if at == wrong else 1) for at, leaf in enumerate(leaves)])
        assert check.errors(cell, ours, inputs, changed)[0] > 1
    for wrong in range(1, len(leaves)):  # of one token, or of one class
        leaf = leaves[wrong].at[(-1,) if wrong == 1 else (slice(None), -1)].multiply(0)
        assert check.errors(cell, ours, inputs, [*leaves[:wrong], leaf, *leaves[wrong + 1 :]])[0] > 1


def test_the_error_of_whole_logits_is_a_quarter_and_sums_in_the_dtype_add_to_it(monkeypatch):
    cell = tiny_linear(f"{BOTH} bfloat16 256x64x2004")
    inputs = cell.inputs(jax.random.key(0), False)

    def whole(hidden, weight, labels):
        logits = (hidden.astype(jnp.float32) @ weight.astype(jnp.float32)).astype(jnp.bfloat16)
        return jnp.mean(jaxsoftmax.cross_entropy(logits, labels))

    def errors(function):
        return [oracle.error(*pair) for pair in cell.sample(inputs, function(*inputs))]

    assert errors(jax.jit(jax.value_and_grad(whole, (0, 1))))[1:] == pytest.approx([0.25, 0.25], rel=0.05)
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 128 * 2004 * 2)
    in_parts = errors(jax.jit(cell.contenders[0].build()))
    assert in_parts[1] == pytest.approx(0.25, rel=0.05)
    assert 0.3 < in_parts[2] < 0.4


def test_cells_of_linear_log_probs():
    *cells, grpo, with_loss = LINEAR_LOG_PROBS.values()
    layers = [*linear_log_probs.SHAPES, linear_log_probs.SHAPES[0]]
    of_jax = ["jax.numpy", "jax.numpy bfloat16"]
    for passes, of_pass, words, peers in (
        (1, cells[:10], "", [*of_jax, "liger"]),
        (4, cells[10:20], "temperatures=1", of_jax),
        (4, cells[20:], "temperature=0.75", ["liger"]),
    ):
        assert [cell.shape for cell in of_pass] == [shape for shape in layers for _ in range(2)][: len(of_pass)]
        axis = "class_axis=0" if len(of_pass) == 10 else ""
        assert [cell.options for cell in of_pass[-2:]] == [
            " ".join(filter(None, (axis, entropy, words))) for entropy in ("", "entropy=1")
        ]
        for cell in of_pass:
            triton = ["liger triton"] * (passes == 1 and "entropy" not in cell.options)
            assert [contender.name for contender in cell.contenders] == [OURS, "products", *peers, *triton]
            assert cell.flops == passes * 2 * np.prod(cell.shape)
            assert cell.bytes == min(passes, 2) * 2 * cell.shape[1] * (cell.shape[0] + cell.shape[2])
    assert len(cells) == 28
    for cell, products, options in ((grpo, 4, ""), (with_loss, 3, "products=3")):
        assert (cell.shape, cell.options) == ((32768, 4096, 151936), options)
        assert cell.flops == products * 2 * np.prod(cell.shape)
        assert [contender.name for contender in cell.contenders] == [OURS, *of_jax, "liger"]


TINY_LINEAR_LOG_PROBS = {cell.name: cell for cell in linear_log_probs.cells(64)}


@pytest.mark.parametrize(
    "name",
    cases.quick(
        "linear_log_probs forward bfloat16 128x32x500",
        f"linear_log_probs {BOTH} bfloat16 128x64x2004 class_axis=0 entropy=1 temperatures=1",
        f"linear_log_probs {BOTH} bfloat16 128x32x500 temperature=0.75",
        f"grpo {BOTH} bfloat16 512x64x2374",
        f"grpo {BOTH} bfloat16 512x64x2374 products=3",
        slow=[
            "linear_log_probs forward bfloat16 78x48x785 entropy=1",
            f"linear_log_probs {BOTH} bfloat16 78x48x785 temperatures=1",
        ],
    ),
)
def test_cells_of_linear_log_probs_run(name):
    cell = TINY_LINEAR_LOG_PROBS[name]
    run, rows, _ = measured(cell)
    assert not run.problems
    ours, *others = rows
    assert bars.is_ours(ours)
    peers = [contender.name for contender in cell.contenders[1:] if contender.framework == "jax"]
    assert [row.implementation for row in others] == peers
    assert 0 < ours.error < 0.275
    assert [row.error is None for row in others] == [row.implementation == "products" for row in others]
    assert ours.temporaries > 0


@pytest.mark.parametrize(
    "name",
    [
        "linear_log_probs forward bfloat16 128x32x500 entropy=1",
        f"linear_log_probs {BOTH} bfloat16 128x32x500 entropy=1 temperatures=1",
        f"linear_log_probs {BOTH} bfloat16 128x32x500 entropy=1 temperature=0.75",
        f"grpo {BOTH} bfloat16 512x64x2374",
        f"grpo {BOTH} bfloat16 512x64x2374 products=3",
    ],
)
def test_the_truth_of_linear_log_probs(name, monkeypatch):
    cell = TINY_LINEAR_LOG_PROBS[name]
    hurtful = cell.op != "grpo"  # whose ratios are then far off with whole logits, too
    ours, inputs = cell.contenders[0], cell.inputs(jax.random.key(0), hurtful)
    output = jax.jit(ours.build())(*inputs)
    pairs = cell.sample(inputs, output)
    assert all(oracle.error(*pair) < 0.275 for pair in pairs)
    monkeypatch.setattr(linear_cross_entropy, "_ROWS", 200 if cell.op == "grpo" else 50)  # and so several times
    for (actual, truth), (expected, other) in zip(cell.sample(inputs, output), pairs, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
        np.testing.assert_allclose(truth.value, other.value, rtol=1e-9)
        np.testing.assert_allclose(truth.budget, other.budget, rtol=1e-9)
    leaves, tree = jax.tree.flatten(output)
    assert len(leaves) == len(pairs) == (2 if cell.pass_ == "forward" else 3 if cell.op == "grpo" else 4)
    for wrong in range(len(leaves)):
        changed = jax.tree.unflatten(tree, [leaf * (1.1 if at == wrong else 1) for at, leaf in enumerate(leaves)])
        assert check.errors(cell, ours, inputs, changed)[0] > 1
    for wrong, leaf in enumerate(leaves):
        if leaf.ndim == 0:
            continue
        is_of_weight = wrong == 3 or (cell.op == "grpo" and wrong == 2)
        counts = np.any(np.asarray(leaf, np.float32).reshape(len(leaf), -1) != 0, 1)  # not all tokens do in GRPO
        at = (slice(None), -1) if is_of_weight else (int(np.argmax(counts)),)
        changed = [*leaves[:wrong], leaf.at[at].multiply(0), *leaves[wrong + 1 :]]  # of one token, or of one class
        assert check.errors(cell, ours, inputs, jax.tree.unflatten(tree, changed))[0] > 1


def test_log_probabilities_of_rounded_logits_are_wrong_and_gradients_are_not():
    cell = TINY_LINEAR_LOG_PROBS[f"linear_log_probs {BOTH} bfloat16 256x64x2374 entropy=1 temperatures=1"]
    hidden, weight, tokens, temperature, *cotangents = inputs = cell.inputs(jax.random.key(0), False)

    @jax.jit
    def whole(hidden, weight):
        logits = (hidden.astype(jnp.float32) @ weight.astype(jnp.float32)).astype(jnp.bfloat16)
        return jaxsoftmax.log_probs(jax.lax.optimization_barrier(logits), tokens, scale=1 / temperature, return_entropy=True)

    results, pull = jax.vjp(whole, hidden, weight)
    log_p, _, *gradients = [oracle.error(*pair) for pair in cell.sample(inputs, (results, pull(tuple(cotangents))))]
    assert log_p > 10
    assert gradients == pytest.approx([0.25, 0.25], rel=0.15)


def test_logits_are_multiplied_twice_in_the_products_of_log_probs():
    cell = TINY_LINEAR_LOG_PROBS[f"linear_log_probs {BOTH} bfloat16 128x32x500 temperatures=1"]
    products = next(contender for contender in cell.contenders if contender.name == "products")
    given = products.prepare(*cell.inputs(jax.random.key(0), False))
    again, (logits, gradients) = jax.jit(products.build())(*given)
    assert np.array_equal(again, logits)
    assert [gradient.shape for gradient in gradients] == [(128, 32), (32, 500)]
    program = jax.jit(products.build()).lower(*given).compile().as_text()
    assert len(re.findall(r" (?:dot|custom-call)\(", program)) == 4


class Tensor:
    """Stands for a tensor of torch: a function `of` the hidden states and the weight."""

    def __init__(self, of):
        self.of = of

    def requires_grad_(self, flag):
        self.requires_grad = flag
        return self

    def long(self):
        return self

    def detach(self):
        return self


def of_tensors(function):
    """A function of tensors, or numbers, that makes a tensor."""

    def made(*operands, **options):
        return Tensor(lambda *at: function(*(x.of(*at) if isinstance(x, Tensor) else x for x in operands), **options))

    return made


Tensor.T = property(of_tensors(jnp.transpose))
Tensor.sum = of_tensors(jnp.sum)
Tensor.__neg__ = of_tensors(jnp.negative)
Tensor.__sub__ = of_tensors(jnp.subtract)
Tensor.__mul__ = of_tensors(jnp.multiply)


def a_torch(*leaves):
    """Torch, as far as peers use it, if `leaves` are the hidden states and the weight."""

    def grad(results, arrays, cotangents=None):
        assert all(array.of(*leaves) is leaf for array, leaf in zip(arrays, leaves, strict=True))
        results = results if isinstance(results, Sequence) else [results]
        _, pull = jax.vjp(lambda *at: [result.of(*at) for result in results], *leaves)
        found = pull([1.0] if cotangents is None else [cotangent.of(*leaves) for cotangent in cotangents])
        return [Tensor(lambda *at, x=x: x) for x in found]

    functions = {name: of_tensors(getattr(jnp, name)) for name in ("exp", "minimum", "clip")}
    return types.SimpleNamespace(autograd=types.SimpleNamespace(grad=grad), **functions)


@pytest.mark.parametrize(
    ("name", "peer", "options"),
    [
        ("linear_log_probs forward bfloat16 128x32x500", "liger triton", {"reduction": "none"}),
        ("linear_log_probs forward bfloat16 128x32x500", "liger", {"temperature": 1.0, "return_entropy": False}),
        (
            "linear_log_probs forward bfloat16 128x64x2004 class_axis=0 entropy=1",
            "liger",
            {"temperature": 1.0, "return_entropy": True},
        ),
        *(
            (
                f"linear_log_probs {BOTH} bfloat16 128x32x500 {words}temperature=0.75",
                "liger",
                {"temperature": 0.75, "return_entropy": bool(words)},
            )
            for words in ("", "entropy=1 ")
        ),
        (f"grpo {BOTH} bfloat16 512x64x2374", "liger", {}),
    ],
)
def test_liger_is_a_peer_of_log_probs_where_it_is_installed(name, peer, options, monkeypatch):
    """Its functions are here those of JAX."""
    cell, given = TINY_LINEAR_LOG_PROBS[name], []
    (contender,) = [contender for contender in cell.contenders if contender.name == peer]
    inputs = cell.inputs(jax.random.key(0), False)
    leaves = inputs[0], inputs[1] if "class_axis=0" in name else inputs[1].T

    def to_torch(hidden, weight, *others):
        assert np.array_equal(weight, leaves[1])
        return Tensor(lambda h, w: h), Tensor(lambda h, w: w), *(Tensor(lambda *at, x=x: x) for x in others)

    def losses(hidden, weight, tokens, **options):
        assert hidden.requires_grad == weight.requires_grad == (cell.pass_ == BOTH)
        given.append(options)
        temperature = options.get("temperature", 1.0)
        results = [
            of_tensors(
                lambda *arrays, at=at: jaxsoftmax.linear_log_probs(
                    *arrays, class_axis=0, temperature=temperature, return_entropy=True
                )[at]
            )(hidden, weight, tokens)
            for at in range(2)
        ]
        return (-results[0], results[1]) if options.get("return_entropy") else -results[0]

    cute, triton = types.ModuleType("cute"), types.ModuleType("triton")
    cute.LigerFusedLinearScaledCrossEntropyFunction = types.SimpleNamespace(apply=losses)
    triton.liger_fused_linear_cross_entropy = losses
    monkeypatch.setitem(sys.modules, "liger_kernel.ops.fused_linear_scaled_cross_entropy", cute)
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", triton)
    monkeypatch.setattr(linear_log_probs, "torch", lambda: a_torch(*leaves))
    monkeypatch.setattr(linear_log_probs, "to_torch", to_torch)
    monkeypatch.setenv("LIGER_SCALED_CE_SM90_VALIDATE_TARGETS", "1")  # which is set back afterwards
    output = contender.build()(*contender.prepare(*inputs))
    output = jax.tree.map(lambda tensor: tensor.of(*leaves), output)
    assert check.errors(cell, contender, inputs, output)[0] < 0.3
    assert given == [options]
    assert os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] == ("1" if "triton" in peer else "0")


def test_cells_of_linear_divergence():
    cells = list(LINEAR_DIVERGENCE.values())
    assert [cell.shape for cell in cells] == [shape for shape in linear_divergence.SHAPES for _ in range(3)]
    assert [cell.options for cell in cells[:3]] == ["kind=forward_kl", "kind=js", "kind=forward_kl reduction=none"]
    for cell in cells:
        tokens, size, of_teacher, vocabulary = cell.shape
        is_mean = "reduction" not in cell.options
        assert [contender.name for contender in cell.contenders] == [OURS, "products", "jax.numpy", *["liger"] * is_mean]
        products = [size, of_teacher, size, size, *([] if is_mean else [size, of_teacher])]
        assert cell.flops == 2 * tokens * vocabulary * sum(products)
        assert cell.bytes == 2 * (2 * size + of_teacher) * (tokens + vocabulary)


TINY_LINEAR_DIVERGENCE = {cell.options: cell for cell in linear_divergence.cells(64)[3:6]}


@pytest.mark.parametrize("options", TINY_LINEAR_DIVERGENCE)
def test_cells_of_linear_divergence_run(options):
    cell = TINY_LINEAR_DIVERGENCE[options]
    run, rows, _ = measured(cell)
    assert not run.problems
    assert [row.implementation for row in rows] == ["xla", "products", "jax.numpy"]
    assert all(0 < row.error < 0.275 for row in rows if row.implementation != "products")


@pytest.mark.parametrize("options", TINY_LINEAR_DIVERGENCE)
def test_the_truth_of_linear_divergence(options, monkeypatch):
    cell = TINY_LINEAR_DIVERGENCE[options]
    ours, inputs = cell.contenders[0], cell.inputs(jax.random.key(0), True)
    output = jax.jit(ours.build())(*inputs)
    pairs = cell.sample(inputs, output)
    assert all(oracle.error(*pair) < 0.275 for pair in pairs)
    monkeypatch.setattr(linear_cross_entropy, "_ROWS", 50)  # and so several times
    for (actual, truth), (expected, other) in zip(cell.sample(inputs, output), pairs, strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-12)
        np.testing.assert_allclose(truth.value, other.value, rtol=1e-9)
        np.testing.assert_allclose(truth.budget, other.budget, rtol=1e-9)
    leaves, tree = jax.tree.flatten(output)
    assert len(leaves) == len(pairs) == 3
    for wrong, leaf in enumerate(leaves):
        parts = [leaf * 1.2]  # of large logits, which are rounded by up to 0.25
        if leaf.ndim:  # of one token, or of one class
            parts.append(leaf.at[(slice(None), -1) if wrong == 2 else (0,)].multiply(0))
        for part in parts:
            changed = jax.tree.unflatten(tree, [*leaves[:wrong], part, *leaves[wrong + 1 :]])
            assert check.errors(cell, ours, inputs, changed)[0] > 1


@pytest.mark.parametrize("options", ["kind=forward_kl", "kind=js"])
def test_gradients_of_a_divergence_of_rounded_logits_have_an_error_of_a_quarter(options):
    cell = TINY_LINEAR_DIVERGENCE[options]
    hidden, weight, *teacher, _ = inputs = cell.inputs(jax.random.key(0), False)

    def rounded(hidden, weight):
        logits = hidden.astype(jnp.float32) @ weight.astype(jnp.float32)
        return jax.lax.optimization_barrier(logits.astype(jnp.bfloat16))  # else XLA would not round

    def whole(hidden, weight):
        divergence = jaxsoftmax.js_divergence if options == "kind=js" else jaxsoftmax.kl_divergence
        return jnp.mean(divergence(rounded(*teacher), rounded(hidden, weight)))

    output = jax.jit(jax.value_and_grad(whole, (0, 1)))(hidden, weight)
    _, *gradients = [oracle.error(*pair) for pair in cell.sample(inputs, output)]
    assert gradients == pytest.approx([0.25, 0.25], rel=0.15)


def test_logits_are_multiplied_twice_in_the_products_of_divergences_of_rows():
    for options, count in (("kind=js", 4), ("kind=forward_kl reduction=none", 6)):
        cell = TINY_LINEAR_DIVERGENCE[options]
        products = next(contender for contender in cell.contenders if contender.name == "products")
        given = products.prepare(*cell.inputs(jax.random.key(0), False))
        program = jax.jit(products.build()).lower(*given).compile().as_text()
        assert len(re.findall(r" (?:dot|custom-call)\(", program)) == count


@pytest.mark.parametrize(("options", "share"), [("kind=forward_kl", 0.0), ("kind=js", 0.5)])
def test_liger_is_a_peer_of_divergences_where_it_is_installed(options, share, monkeypatch):
    """Its function is here one of JAX."""
    cell = TINY_LINEAR_DIVERGENCE[options]
    (contender,) = [contender for contender in cell.contenders if contender.name == "liger"]
    inputs = cell.inputs(jax.random.key(0), False)
    leaves = inputs[0], inputs[1].T

    def to_torch(hidden, weight, *others):
        assert np.array_equal(weight, leaves[1])
        return Tensor(lambda h, w: h), Tensor(lambda h, w: w), *others

    def loss(hidden, weight, teacher_hidden, teacher_weight, *, jsd_beta):
        assert hidden.requires_grad
        assert weight.requires_grad
        assert jsd_beta == share
        kind = "js" if jsd_beta else "forward_kl"
        mean = functools.partial(jaxsoftmax.linear_divergence, kind=kind, reduction="mean")
        return of_tensors(lambda h, w: mean(h, w.T, teacher_hidden, teacher_weight.T))(hidden, weight)

    module = types.ModuleType("functional")
    module.liger_fused_linear_jsd = loss
    monkeypatch.setitem(sys.modules, "liger_kernel.transformers.functional", module)
    monkeypatch.setattr(linear_divergence, "torch", lambda: a_torch(*leaves))
    monkeypatch.setattr(linear_divergence, "to_torch", to_torch)
    output = contender.build()(*contender.prepare(*inputs))
    output = jax.tree.map(lambda tensor: tensor.of(*leaves), output)
    assert check.errors(cell, contender, inputs, output)[0] < 0.3


def test_cells_of_top_k():
    copies, cells = list(TOP_K.values())[:2], list(TOP_K.values())[2:]
    assert [cell.name for cell in copies] == ["copy forward float32 32768x4096", "copy forward bfloat16 32768x4096"]
    assert [sum(cell.op == op for cell in cells) for op in ("top_k", "softmax_top_k", "categorical")] == [29, 24, 32]
    names = {cell.name: list(dict.fromkeys(contender.name for contender in cell.contenders)) for cell in cells}
    assert names["top_k forward bfloat16 1x50257 k=50"] == [OURS, "jax", "torch", "flashinfer"]
    assert names["top_k forward bfloat16 64x128256 k=1"] == [OURS, "jax", "torch", "flashinfer", "argmax"]
    assert names["softmax_top_k backward float32 262144x256 k=8"] == [OURS, "jax", "torch", "scatter"]
    assert names["categorical forward float32 1x128256"] == [OURS, "jax", "flashinfer"]
    assert names["categorical forward bfloat16 512x50257 top_k=50"] == [OURS, "jax", "flashinfer"]
    assert names["categorical forward float32 512x128256 min_p=0.1"] == [OURS, "flashinfer"]

    def of_router(pass_, options="k=8"):
        return TOP_K[f"softmax_top_k {pass_} bfloat16 1048576x64 {options}"].bytes / 2**20

    for cell in cells:
        if cell.op != "softmax_top_k" or "k=50" in cell.options:
            assert cell.bytes == np.prod(cell.shape) * (4 if cell.dtype == "float32" else 2)  # one read
    assert of_router("forward") == of_router("forward", "k=8 normalize=selected") == 2 * 64 + 8 * (2 + 4)
    assert of_router("backward") == 2 * 64 + 8 * (2 + 4) + 2 * 64
    assert of_router("backward", "k=8 normalize=selected") == 8 * (2 + 2 + 4) + 2 * 64


SAMPLERS = {
    "": ("sampling_from_logits",),
    " top_k=50": ("top_k_sampling_from_probs", 50),
    " top_p=0.9": ("top_p_sampling_from_probs", 0.9),
    " min_p=0.1": ("min_p_sampling_from_probs", 0.1),
}
TINY_TOP_K = {cell.name: cell for cell in top_k.cells(170)}


@pytest.mark.parametrize(
    "name",
    cases.quick(
        "top_k forward bfloat16 3x50257 k=50",
        "softmax_top_k forward bfloat16 1542x256 k=8 normalize=selected",
        "softmax_top_k backward float32 1542x256 k=8",
        "categorical forward float32 3x50257 top_p=0.9",
        slow=[
            "top_k forward float32 3x128256 k=1",
            "softmax_top_k forward float32 3x50257 k=50",
            "softmax_top_k backward bfloat16 6168x64 k=8 normalize=selected",
            "categorical forward float32 3x50257",
            "categorical forward bfloat16 3x50257 top_k=50",
        ],
    ),
)
def test_cells_of_top_k_run(name):
    cell = TINY_TOP_K[name]
    run, rows, said = measured(cell)
    assert not run.problems
    peers = {contender.name for contender in cell.contenders if contender.framework == "jax"} - {OURS}
    assert {row.implementation for row in rows} == {"xla", *peers}, said
    (ours,) = [row for row in rows if bars.is_ours(row)]
    assert ours.error == 0 if cell.op in ("top_k", "categorical") else 0 < ours.error <= 1


@pytest.mark.parametrize(
    "name",
    [
        "top_k forward bfloat16 3x50257 k=50",
        "softmax_top_k forward float32 1542x256 k=8",
        "softmax_top_k forward bfloat16 1542x256 k=8 normalize=selected",
    ],
)
def test_the_truth_of_top_k(name):
    cell = TINY_TOP_K[name]
    ours, jax_, *_ = cell.contenders
    inputs = cell.inputs(jax.random.key(0), True)
    values, indices = jax.jit(ours.build())(*inputs)

    def errors(contender, *output):
        return check.errors(cell, contender, inputs, output)

    assert errors(ours, values, indices)[0] <= 1
    assert errors(jax_, values, indices)[0] <= 1
    assert errors(ours, values, indices.at[-1, -1].add(1))[0] > 1  # one of a row
    assert errors(ours, values[:, ::-1], indices)[0] > 1
    for wrong in ((values * 1.5, indices), (values, (indices + 1) % cell.shape[1])):
        assert errors(ours, *wrong)[0] > 1
        assert errors(jax_, *wrong)[1] > 0.1


def test_peers_of_top_k_may_choose_among_equal_entries():
    def errors(name, output):
        cell = TINY_TOP_K[name]
        inputs = jnp.zeros(cell.shape, cell.dtype), *cell.inputs(jax.random.key(0), False)[1:]
        return [check.errors(cell, contender, inputs, output(*inputs))[0] for contender in cell.contenders[:2]]

    def last(x):
        return x[:, -50:], jnp.broadcast_to(jnp.arange(50257 - 50, 50257), (3, 50))

    def of_last(x, cotangent):
        return jax.vjp(lambda x: jax.nn.softmax(x)[:, -8:], x)[1](cotangent)[0]

    ours, peer = errors("top_k forward float32 3x50257 k=50", last)
    assert ours > 1
    assert peer == 0
    ours, peer = errors("softmax_top_k backward float32 1542x256 k=8", of_last)
    assert ours > 1
    assert peer <= 1


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        pytest.param(dtype, options, marks=cases.slow_unless((dtype == "float32") == (options == "k=8")))
        for dtype in ("float32", "bfloat16")
        for options in ("k=8", "k=8 normalize=selected")
    ],
)
def test_the_truth_of_the_gradient_of_a_router(dtype, options):
    cell = TINY_TOP_K[f"softmax_top_k backward {dtype} 6168x64 {options}"]
    for hurtful in (False, True):
        inputs = cell.inputs(jax.random.key(0), hurtful)
        for contender in cell.contenders[:2]:
            gradient = jax.jit(contender.build())(*contender.prepare(*inputs))
            assert 0 < check.errors(cell, contender, inputs, gradient)[0] <= (1 if contender.name == OURS else np.inf)
            assert check.errors(cell, contender, inputs, 1.1 * gradient)[0] > 1
            one = gradient.at[0, jnp.argmax(jnp.abs(gradient[0]))].multiply(0)
            assert check.errors(cell, contender, inputs, one)[0] > 1


@pytest.mark.parametrize("options", cases.quick("", " top_p=0.9", slow=[" top_k=50", " min_p=0.1"]))
def test_one_sample_in_200_may_be_another(options):
    cell = {cell.name: cell for cell in top_k.cells(64)}[f"categorical forward float32 8x50257{options}"]
    logits, key = cell.inputs(jax.random.key(0), False)
    logits = logits.ravel()[:400_000].reshape(400, 1000)
    ours, *peers = cell.contenders
    samples = jax.jit(ours.build())(logits, key)

    def errors(contender, samples):
        return check.errors(cell, contender, (logits, key), samples)

    assert errors(ours, samples)[0] == 0
    assert errors(ours, samples.at[7].add(1))[0] == 0.5
    assert errors(ours, samples.at[:3].add(1))[0] == 1.5
    for peer in peers:
        assert errors(peer, (samples + 1) % 1000) == (0, 0)
        for wrong in (-1, 1000):
            assert errors(peer, samples.at[7].set(wrong))[1] > 0.1


def test_flashinfer_is_a_peer_where_it_is_installed(monkeypatch):
    """Its functions are here those of JAX."""
    given = []

    def sampler(name, logits, *options):
        given.append((name, logits.shape, *options))
        return jnp.argmax(logits, -1)

    def top_k_(x, k, sorted):
        assert sorted
        return jax.lax.top_k(x, k)

    modules = {name: types.ModuleType(name) for name in ("flashinfer", "flashinfer.sampling")}
    modules["flashinfer"].top_k = top_k_
    modules["flashinfer.sampling"].softmax = jax.nn.softmax
    for name in ("sampling_from_logits", *(f"{name}_sampling_from_probs" for name in ("top_k", "top_p", "min_p"))):
        setattr(modules["flashinfer.sampling"], name, functools.partial(sampler, name))
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("top_k forward float32 3x50257 k=50", *(f"categorical forward float32 3x50257{o}" for o in SAMPLERS)):
        cell = TINY_TOP_K[name]
        peer = next(contender for contender in cell.contenders if contender.name == "flashinfer")
        inputs = cell.inputs(jax.random.key(0), False)
        assert check.errors(cell, peer, inputs, peer.build()(inputs[0])) == (0, 0)
    assert given == [(name, (3, 50257), *options) for name, *options in SAMPLERS.values()]


def test_cells_of_the_sampler():
    copies, cells = list(SAMPLER.values())[:2], list(SAMPLER.values())[2:]
    assert [cell.name for cell in copies] == ["copy forward float32 32768x4096", "copy forward bfloat16 32768x4096"]
    assert len(cells) == 2 * 3 * 4 * 2
    for cell in cells:
        (library,) = (word.removeprefix("as=") for word in cell.options.split() if word.startswith("as="))
        assert [contender.name for contender in cell.contenders] == [OURS, library]
        assert cell.bytes == np.prod(cell.shape) * (4 if cell.dtype == "float32" else 2)  # one read


STEPS = {"tunix": "as=tunix temperature=0.7 top_k=50 top_p=0.9", "levanter": "as=levanter temperatures=1"}
TINY_SAMPLER = {cell.name: cell for cell in sampler.cells(((6, 301),)) if cell.op != "copy"}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("library", STEPS)
def test_cells_of_the_sampler_run(library, dtype):
    run, rows, _ = measured(TINY_SAMPLER[f"sampler_step forward {dtype} 6x301 {STEPS[library]}"])
    assert not run.problems
    assert {row.implementation for row in rows} == {"xla", library}
    (ours,) = [row for row in rows if bars.is_ours(row)]
    assert 0 < ours.error <= 1


@pytest.mark.parametrize("library", STEPS)
def test_the_truth_of_the_sampler(library):
    cell = TINY_SAMPLER[f"sampler_step forward float32 6x301 {STEPS[library]}"]
    ours, theirs = cell.contenders
    inputs = cell.inputs(jax.random.key(0), False)
    for contender in (ours, theirs):
        tokens, log_p = jax.jit(contender.build())(*inputs)

        def errors(tokens, log_p, contender=contender):
            return check.errors(cell, contender, inputs, (tokens, log_p))

        assert errors(tokens, log_p)[0] <= (1 if contender is ours else 5)
        assert errors(tokens, log_p)[1] < 1e-6
        assert errors(tokens, log_p + 1e-3)[0] > 5
        assert errors(tokens, 1.2 * log_p)[1] > 0.1
        assert errors(tokens.at[2].set(301), log_p)[1] > 0.1
        assert errors(tokens.at[-1].set(-1), log_p)[1] > 0.1
        if library == "tunix":  # the least of a row is not among those that are kept
            least = jnp.argmin(inputs[0], -1)
            of_least = jnp.take_along_axis(jax.nn.log_softmax(inputs[0] / 0.7), least[:, None], -1)[:, 0]
            assert errors(least, of_least)[1] > 0.1
    other = jax.jit(ours.build())(*inputs[:-1], cell.inputs(jax.random.key(1), False)[-1])
    assert check.errors(cell, ours, inputs, other)[0] > 1  # those of another key
    assert check.errors(cell, theirs, inputs, other)[1] < 1e-6


@pytest.mark.slow
@pytest.mark.parametrize(
    "cells",
    [
        [*attention.cells(1024, 256), *attention.gradient_cells(1024, 256)],
        cross_entropy.cells(4),
        linear_cross_entropy.cells(64),
        linear_log_probs.cells(64),
        linear_divergence.cells(64),
        top_k.cells(128),
    ],
    ids=["attention", "cross_entropy", "linear_cross_entropy", "linear_log_probs", "linear_divergence", "top_k"],
)
def test_every_cell_of_a_suite_runs(cells):
    run, rows, _ = measured(*cells, peers=frozenset())
    assert not run.problems
    assert {row.cell for row in rows} == {(cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options) for cell in cells}


@pytest.mark.slow
def test_every_cell_runs():
    cells = softmax.cells(2**16)
    run, rows, said = measured(*cells)
    assert not run.problems
    assert {
        (row.op, row.pass_, row.dtype, row.shape, row.options) for row in rows if bars.is_ours(row) or row.op == "copy"
    } == {(cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options) for cell in cells}
    assert not [line for line in said.splitlines() if "left out" in line and "not installed" not in line]


WRONG = {
    "values": (lambda x: jaxsoftmax.softmax(x) * 1.01, "times the budget"),
    "shape": (lambda x: jaxsoftmax.softmax(x)[:, :-1], "AssertionError"),
    "extremes": (lambda x: jnp.exp(x) / jnp.sum(jnp.exp(x), -1, keepdims=True), "times the budget"),
    "raises": (lambda x: jaxsoftmax.softmax(x, implementation="none"), "ValueError"),
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_result_is_not_recorded(kind):
    wrong, reason = WRONG[kind]
    cell = tiny(ROWS)
    run, rows, said = measured(dataclasses.replace(cell, contenders=(Contender(OURS, lambda: wrong), cell.contenders[1])))
    assert [row.implementation for row in rows] == ["jax.nn"]
    (problem,) = run.problems
    assert problem.startswith(cell.name)
    assert reason in problem
    assert problem.split(": ", 1)[1] in said


def test_a_peer_is_left_out_only_if_grossly_wrong():
    peers = (
        Contender("torch", lambda: lambda x: jax.nn.softmax(x) * 1.01),
        Contender("quack", lambda: lambda x: jax.nn.softmax(x) * 1.5),
    )
    run, rows, said = measured(tiny(ROWS, contenders=peers))
    assert not run.problems
    assert [row.implementation for row in rows] == ["torch"]
    assert rows[0].error > 1
    assert "quack left out: its relative error is 0.5" in said


def test_contenders_are_built_at_the_same_time_but_for_those_that_must_be_alone():
    both, building, seen = threading.Barrier(2, timeout=60), [], {}

    def build(name):
        building.append(name)
        if name != "cudnn":
            both.wait()
        seen[name] = set(building)
        if name != "cudnn":
            both.wait()
        building.remove(name)
        return jax.nn.softmax

    names = ("torch", "cudnn", "quack")
    peers = tuple(Contender(name, lambda name=name: build(name), alone=name == "cudnn") for name in names)
    _, rows, _ = measured(tiny(ROWS, contenders=peers))
    assert seen == {"torch": {"torch", "quack"}, "quack": {"torch", "quack"}, "cudnn": {"cudnn"}}
    assert {row.implementation for row in rows} == set(names)


def test_inputs_that_hurt():
    cell = tiny("log_softmax forward float32 16x1024")
    (plain,), (hurtful,) = (cell.inputs(jax.random.key(0), hurts) for hurts in (False, True))
    assert np.all(np.abs(plain) < 40)
    assert np.std(np.mean(plain, -1)) > 1  # each row has an offset
    np.testing.assert_allclose(np.mean(hurtful[::3] == 1e3), 0.02, atol=0.01)
    assert np.all(hurtful[1::3] > 9e3)
    np.testing.assert_allclose(np.mean(np.isneginf(hurtful[2::3])), 0.3, atol=0.03)
    assert np.all(np.isfinite(hurtful[:, 0]))


def test_a_derivative_alone_is_traced_once():
    cell, traces = tiny("log_softmax backward bfloat16 4x4096 mode=vjp"), itertools.count()
    build = cell.contenders[0].build()

    def counted(*arguments):
        next(traces)
        return build(*arguments)

    function = jax.jit(counted)
    for hurtful in (False, True):
        function(*cell.contenders[0].prepare(*cell.inputs(jax.random.key(0), hurtful)))
    assert next(traces) == 1


@pytest.mark.parametrize(("rows", "cols", "count"), [(10**6, 4096, 104), (10**6, 32768, 31), (128, 2**20, 3), (1, 2**24, 1)])
def test_fewer_long_rows_are_compared_and_both_ends_always(rows, cols, count):
    found = check.sampled_of(rows, cols)
    assert len(found) == count
    assert {0, rows - 1} <= set(found.tolist())


def test_other_bits_are_found():
    cell = tiny(ROWS)
    inputs = cell.inputs(jax.random.key(0), False)
    contender = cell.contenders[0]
    calls = itertools.count()

    def found(function, kernels=True):
        return check.differing_bits(cell, contender, function, inputs, function(*inputs), kernels=kernels)

    assert found(lambda x: 2 * x) == []
    assert found(lambda x: 0 * x / 0) == []  # NaN is the same as NaN
    assert "a second call gives other bits" in found(lambda x: x + next(calls))
    assert found(lambda x: x + int(x.shape[0] == 3)) == ["rows have other bits where there are only 3"]
    assert found(lambda x: x + int(x.shape[0] == 3), kernels=False) == []


def test_times_are_medians_of_interleaved_rounds_and_the_fastest_variant_counts():
    def variant(name, factor):
        return Contender(name, lambda: lambda x: x * jnp.asarray(factor, x.dtype))

    order = []
    times = {1.0: iter([5.0, 9.0, 4.0]), 1.001: iter([3.0, 100.0, 1.0]), 1.002: iter([7.0, 7.0, 7.0])}

    def clock(function, arguments, calls, framework):
        factor = round(float(function(jnp.ones(1, "float32"))[0]), 3)
        order.append(factor)
        assert (calls, len(arguments), framework) == (10, 1, "jax")
        return next(times[factor])

    cell = tiny("copy forward float32", contenders=(variant("copy", 1.0), variant("copy", 1.001), variant("sum", 1.002)))
    _, rows, _ = measured(cell, clock=clock, effort=harness.Effort(rounds=3, cache=0))
    assert order == [1.0, 1.001, 1.002] * 3
    assert [(row.implementation, row.us) for row in rows] == [("copy", 3.0), ("sum", 7.0)]


def test_under_load_turns_after_the_warm_up_count_and_a_call_takes_power_times_time(monkeypatch):
    class Meter:
        def during(self, turn):
            us = turn()
            return us, nvml.Load(watts=us / 2, sm_mhz=1000 + us)

    seconds, order = [], []
    times = {1.0: iter([900.0, 600.0, 400.0]), 1.002: iter([1.0, 500.0, 700.0])}

    def clock(function, arguments, calls, framework):
        order.append(round(float(function(jnp.ones(1, "float32"))[0]), 3))
        return next(times[order[-1]])

    monkeypatch.setattr(harness, "loaded_clock", lambda turn: seconds.append(turn) or clock)
    contenders = tuple(
        Contender(name, lambda factor=factor: lambda x: x * jnp.asarray(factor, x.dtype))
        for name, factor in (("copy", 1.0), ("sum", 1.002))
    )
    cell = tiny("copy forward float32", contenders=contenders)
    _, rows, said = measured(cell, clock=None, effort=sustained.effort(2.0), meter=Meter())
    assert order == [1.0, 1.002] * 3
    assert set(seconds) == {2.0}
    # 300 W for 600 us are 180 mJ, and 200 W for 400 us 80 mJ.
    assert [(row.implementation, row.us, row.millijoules, row.sm_mhz) for row in rows] == [
        ("copy", 500.0, pytest.approx(130.0), 1500.0),
        ("sum", 600.0, pytest.approx(185.0), 1600.0),
    ]
    assert ", 130.0 mJ at 1500 MHz" in said


def test_a_cool_gpu_rests_before_each_of_15_launches(monkeypatch):
    order = []

    def clock(function, arguments, calls, framework):
        assert (calls, len(arguments)) == (1, 1)
        order.append("launch")
        return float(len(order))

    monkeypatch.setattr(harness.time, "sleep", order.append)
    cell = tiny("copy forward float16", contenders=(Contender("copy", lambda: jnp.copy),))
    _, (row,), _ = measured(cell, clock=clock, effort=sustained.cool_effort(0.5))
    assert order == [0.5, "launch"] * 15
    assert (row.us, row.millijoules, row.sm_mhz) == (16.0, None, None)


def test_cells_are_entered_ahead_and_timed_one_after_the_other():
    events = []

    def watched(cell):
        def inputs(key, hurtful):
            events.append(("inputs", cell.name))
            return cell.inputs(key, hurtful)

        return dataclasses.replace(cell, inputs=inputs)

    def clock(function, arguments, calls, framework):
        events.append(("time", None))
        return 1.0

    names = ["softmax forward float16 32x512", "softmax forward float32 32x512", "softmax forward bfloat16 32x512"]
    _, rows, _ = measured(*(watched(tiny(name)) for name in names), clock=clock, effort=dataclasses.replace(QUICK, ahead=2))
    assert list(dict.fromkeys(row.dtype for row in rows)) == ["float16", "float32", "bfloat16"]
    first_timed = events.index(("time", None))
    entered = {name for kind, name in events[:first_timed] if kind == "inputs"}
    assert entered == set(names[:2])
    assert ("inputs", names[2]) in events[first_timed:]


def test_nothing_else_is_built_beside_a_contender_that_is_built_alone():
    building, met = [], []

    def watched(contender, alone):
        def build():
            building.append(alone)
            time.sleep(0.05)
            met.append(sorted(building))
            building.remove(alone)
            return contender.build()

        return dataclasses.replace(contender, alone=alone, build=build)

    def cell_of(name):
        cell = tiny(name, contenders=tuple(c for c in tiny(name).contenders if c.name in (OURS, "jax.nn")))
        return dataclasses.replace(cell, contenders=tuple(watched(c, alone=c.name != OURS) for c in cell.contenders))

    cells = [cell_of(f"softmax forward {dtype} 32x512") for dtype in ("float16", "float32")]
    _, rows, _ = measured(*cells, effort=dataclasses.replace(QUICK, ahead=2))
    assert len(rows) == 4
    assert [beside for beside in met if True in beside] == [[True], [True]]


def test_buffers_rotate_where_they_would_fit_in_cache():
    seen = []

    def clock(function, arguments, calls, framework):
        seen.append((calls, len({np.asarray(x).tobytes() for (x,) in arguments})))
        return 1.0

    measured(tiny("softmax forward float16 32x512"), clock=clock, effort=harness.Effort(rounds=1), peers=frozenset())
    assert seen == [(64, 64)]
    assert harness.Effort().buffers(CELLS["softmax forward float32 32768x4096"]) == 1


def test_peers_can_be_chosen():
    _, rows, _ = measured(tiny(ROWS), peers=frozenset({"torch"}))
    assert "jax.nn" not in {row.implementation for row in rows}


@pytest.mark.parametrize(
    ("name", "bytes_per_element"),
    [
        ("copy forward bfloat16 32768x4096", 4),
        ("softmax forward float32 32768x4096", 8),
        ("log_softmax forward bfloat16 32768x4096", 4),
        ("logsumexp forward float32 32768x4096", 4),
        ("logsumexp backward bfloat16 32768x4096 mode=vjp", 4),
        ("softmax backward float32 32768x4096", 12),
        ("log_softmax backward bfloat16 32768x4096 mode=jvp", 6),
        ("log_softmax forward+backward float32 32768x4096", 20),
        ("softmax forward float32 16384x8192 where=full", 9),
        ("softmax forward bfloat16 4x8x2048x2048 where=1x1xTxS", 4),
        ("softmax forward bfloat16 32768x4096 out=float32 scale=0.125", 6),
        ("softmax forward bfloat16 32768x4096 fused=1", 4),
        ("softmax forward bfloat16 64x4096x512 axis=1", 4),
        ("softmax backward float32 128x1048576", 12),
        ("softmax first_call float32 32768x4096", 0),
    ],
)
def test_bytes(name, bytes_per_element):
    assert CELLS[name].bytes == bytes_per_element * 2**27


@pytest.mark.parametrize(
    ("make", "cells"),
    [
        (softmax.cells, CELLS),
        (sweep.cells, SWEEP),
        (attention.cells, ATTENTION),
        (attention.gradient_cells, GRADIENTS),
        (sustained.cells, SUSTAINED),
        (sustained.cool_cells, COOL),
        (cross_entropy.cells, LOSSES),
        (linear_cross_entropy.cells, LINEAR),
        (linear_log_probs.cells, LINEAR_LOG_PROBS),
        (linear_divergence.cells, LINEAR_DIVERGENCE),
        (top_k.cells, TOP_K),
        (sampler.cells, SAMPLER),
        (sharded.cells, SHARDED),
        (sharded.row_cells, {cell.name: cell for cell in sharded.row_cells()}),
        (links.cells, {cell.name: cell for cell in links.cells()}),
    ],
)
def test_cells_have_names_of_their_own_and_options_in_order(make, cells):
    assert len(cells) == len(make())
    for cell in cells.values():
        assert cell.options.split() == sorted(cell.options.split())


def test_flops_bytes_and_blocks_of_attention():
    def of(name, pass_="forward"):
        return (ATTENTION | GRADIENTS)[f"attention {pass_} bfloat16 {name}"]

    whole = 4 * 16 * 16384**2 * 128
    assert of("1x16384x16x128").flops == whole
    assert of("1x16384x16x128 causal=1").flops == whole // 2
    assert of("32x512x32x64").flops == 4 * 32 * 32 * 512**2 * 64
    assert of("4x4096x64x128 kv_heads=8").flops == 4 * 4 * 64 * 4096**2 * 128
    assert of("4x4096x16x128 mask=1x1xTxS").flops == whole // 4
    assert of("4x4096x16x128 mask=causal").flops == of("4x4096x16x128 causal=1").flops
    assert of("4x4096x16x128 mask=causal", BOTH).flops == of("4x4096x16x128 causal=1", BOTH).flops
    assert of("4x4096x10x192 value_size=128").flops == 2 * 4 * 10 * 4096**2 * (192 + 128)
    window = sum(min(position + 1, 1024) for position in range(16384))
    assert of("1x16384x16x128 causal=1 window=1024").flops == 4 * 16 * 128 * window
    lengths = np.bincount(attention.documents(16384)).astype(int)
    assert (len(lengths), lengths.sum()) == (12, 16384)
    assert of("1x16384x16x128 causal=1 documents=12").flops == 4 * 16 * 128 * sum(n * (n + 1) // 2 for n in lengths)
    assert of("4x4096x16x128 key_lengths=1").flops == 4 * 16 * 128 * 4096 * (4096 + 3413 + 2730 + 2048)
    for name in ("1x16384x16x128", "4x4096x8x256 causal=1", "1x16384x16x128 causal=1 documents=12"):
        assert of(name, BOTH).flops == 3.5 * of(name).flops
    assert of("1x16384x16x128 causal=1", "jvp").flops == 3.5 * of("1x16384x16x128 causal=1").flops

    cross = SUSTAINED["attention forward bfloat16 8x2048x16x128 held_out=1 keys=10000"]
    assert cross.flops == 4 * 8 * 16 * 2048 * 10000 * 128
    assert cross.bytes == 2 * 8 * 16 * 128 * (2 * 2048 + 2 * 10000)
    assert cross.blocks == 8 * 16 * 79

    array = 2 * 16384 * 2048
    assert of("1x16384x16x128").bytes == 4 * array
    assert of("4x4096x64x128 kv_heads=8").bytes == 4 * (2 * array + 2 * array // 8)
    assert of("4x4096x16x128 mask=1x1xTxS").bytes == 4 * array + 4096**2
    assert of("4x4096x16x128 bias=1xNxTxS").bytes == 4 * array + 2 * 16 * 4096**2
    assert of("1x16384x16x128", BOTH).bytes == of("1x16384x16x128", "jvp").bytes == 12 * array
    assert of("4x4096x16x128 bias=1xNxTxS", BOTH).bytes == 12 * array + 3 * 2 * 16 * 4096**2

    assert of("1x16384x16x128").blocks == 128**2
    assert of("1x16384x16x128 causal=1").blocks == 128 * 129 // 2
    assert of("1x16384x16x128 causal=1 window=1024").blocks == 36 + 120 * 9
    ends = np.cumsum(lengths)
    low = [(ends - lengths)[ends > 128 * block][0] // 128 for block in range(128)]
    assert of("1x16384x16x128 causal=1 documents=12").blocks == sum(block + 1 - low[block] for block in range(128))


def test_the_reference_is_measured_on_a_cpu_beside_its_counterpart(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(reference, "ON_A_CPU", harness.Effort(rounds=2, calls=1, cache=0, turn=1e-4))
    asked = [
        "reference",
        "--only",
        "^logsumexp forward float32 4096x64$|^cross_entropy .*backward bfloat16 4096x10$|^log_softmax first_call float32 .*4$",
        "--commit",
        "abc",
        "--out",
        str(tmp_path),
    ]
    assert main(asked) == 0
    (path,) = tmp_path.glob("cpu*/xla/reference.csv")
    rows = results.read(path)
    assert len(rows) == 3 * 2  # of each cell two contenders
    assert {row.implementation for row in rows} == {"xla", "jax.nn", "optax"}
    assert all(row.least_us <= row.us and row.temporaries is not None for row in rows)
    assert "0.0" in capsys.readouterr().out


def test_every_op_of_the_reference_has_a_counterpart_of_its_precision():
    for cell in REFERENCE.values():
        ours, other, *more = [contender.name for contender in cell.contenders]
        assert ours == OURS
        assert other in ("jax.nn", "optax", "jax")
        in_float32 = cell.op == "attention" and cell.dtype == "float32" and cell.pass_ != "first_call"
        assert more == ["jax.nn highest"] * in_float32
    assert len({cell.shape for cell in REFERENCE.values()}) >= 40
    assert len(REFERENCE) == len(reference.cells())


@pytest.mark.parametrize(("us", "least_us", "missed"), [(2.0, 1.0, False), (1.0, 1.2, True)])
def test_the_reference_is_held_to_the_fastest_rounds(us, least_us, missed):
    cell = REFERENCE["softmax forward float32 512x1024"]
    ours, other = (dataclasses.replace(a_row(cell, name, us=1.0), least_us=1.0) for name in ("xla", "jax.nn"))
    held = bars.of_file(bars.load("reference"), "xla")
    _, found = bars.misses(held, [cell], [dataclasses.replace(ours, us=us, least_us=least_us), other])
    assert bool(found) == missed


GRADIENT = "attention first_call bfloat16 4x4096x16x128 causal=1 grad=1"


@pytest.mark.parametrize(("lower", "whole", "missed"), [(1.2, 3.9, 0), (1.4, 3.9, 1), (1.2, 4.1, 1)])
def test_first_calls_are_measured_in_processes_and_held_to_bars(tmp_path, capsys, lower, whole, missed):
    calls = []

    def call(program, contender, *, runs, cache=None, before=""):
        assert runs
        calls.append((program, contender, cache is not None, before))
        slow = program == "attention forward+backward bfloat16 4x4096x16x128 causal=1" and contender == OURS and not cache
        times = {"lower": lower if slow else 0.3, "compile": 2.0, "first_call": whole if slow else 1.0, "lower_again": 0.2}
        return times | {"implementation": "mosaic" if contender == OURS else contender, "misses": 0}

    rows = []
    assert first_call.measure(first_call.cells(), GPU, "abc1234", rows.append, call=call, say=lambda line: None) == []
    peers = [(program, contender) for program, contender, *_ in dict.fromkeys(calls) if contender != OURS]
    assert [contender for _, contender in peers] == ["jax.nn", "cudnn", "cudnn"]
    gradients, first = peers[-1][0], next(iter(first_call.programs()))
    assert [one[2:] for one in calls if one[0] == gradients][-4:] == [(True, first), *[(True, "")] * 3]
    assert len(calls) == (len(first_call.programs()) + 3) * first_call.REPEATS + 4
    assert {name_of(row) for row in rows} == set(FIRST_CALLS)
    assert next(row.us for row in rows if name_of(row) == GRADIENT) == 1e6 * whole
    written(tmp_path, rows, "first_call")
    assert main(["first_call", "--check", "--out", str(tmp_path)]) == (1 if missed else 0)
    assert f"{missed} of " in capsys.readouterr().out


def test_what_a_cache_should_hold_is_not_recorded_if_it_was_compiled():
    (cell,) = [cell for cell in first_call.cells() if cell.pass_ == first_call.CACHED]

    def call(program, contender, **options):
        return {"first_call": 1.0, "implementation": "mosaic", "misses": 1}

    (problem,) = first_call.measure([cell], GPU, "abc", pytest.fail, call=call, say=lambda line: None)
    assert problem.endswith("cached: 3 programs were compiled that a process before had compiled")


def test_without_a_gpu_first_calls_are_lowered_alone(tmp_path, capsys):
    calls = []

    def call(program, contender, *, runs):
        calls.append((contender, runs))
        return {"lower": 0.3, "lower_again": 0.2, "implementation": "mosaic", "misses": 0}

    rows, cells = [], first_call.on("cpu", first_call.cells())
    assert {cell.pass_ for cell in cells} == {"lower", "lower_again"}
    assert first_call.measure(cells, "cpu", "abc1234", rows.append, call=call, say=lambda line: None) == []
    assert set(calls) == {(OURS, False)}
    results.append(results.path_for(tmp_path, "cpu", "first_call"), *rows)
    assert main(["first_call", "--check", "--out", str(tmp_path)]) == 0
    assert "0 of " in capsys.readouterr().out


def test_a_first_call_of_ours_that_fails_is_a_problem():
    def call(program, contender, **options):
        raise subprocess.CalledProcessError(1, program)

    found = first_call.measure(first_call.cells(), GPU, "abc", lambda row: None, call=call, say=lambda line: None)
    assert list(dict.fromkeys(problem.split(":")[0] for problem in found)) == list(first_call.programs())


def test_a_first_call_that_was_asked_for_and_cannot_run_is_no_problem(monkeypatch, capsys, asked_for):
    one = tiny(ROWS)
    monkeypatch.setattr(first_call, "programs", lambda: {one.name: one})
    cells = [first_call._cell(one, pass_) for pass_ in first_call.PASSES]
    commands, said = [], []

    def run(command, **options):
        commands.append(command)
        first_call.main(*command[3:])
        return types.SimpleNamespace(stdout=capsys.readouterr().out)

    monkeypatch.setattr(subprocess, "run", run)
    asked_for("mosaic")
    assert first_call.measure(cells, GPU, "abc", pytest.fail, peers=frozenset(), say=said.append) == []
    assert {tuple(command[4:]) for command in commands} == {(OURS, "--runs", "--implementation", "mosaic")}
    assert said
    assert all("ours left out: softmax: implementation='mosaic' cannot run: it runs on cuda" in line for line in said)
    asked_for("xla")
    rows = []
    assert first_call.measure(cells, GPU, "abc", rows.append, peers=frozenset(), say=said.append) == []
    assert {row.implementation for row in rows} == {"xla"}


def test_the_passes_of_a_first_call():
    cell = tiny(ROWS)
    found = first_call.seconds(cell, cell.contenders[0], runs=True)
    assert set(found) == set(first_call.PASSES)
    assert min(found.values()) > 0
    assert found["first_call"] >= found["lower"] + found["compile"]


def test_each_program_of_first_calls_takes_its_inputs_in_batches_of_any_size():
    for program in first_call.programs().values():
        for contender in program.contenders[:1]:
            small, large = (first_call._types(program, contender, times) for times in (1, 2))
            batched = len(small) - program.shared
            assert [kind.shape[0] for kind in large[:batched]] == [2 * kind.shape[0] for kind in small[:batched]]
            assert large[batched:] == small[batched:]
            jax.eval_shape(contender.build(), *large)


@pytest.mark.parametrize(("seconds", "ratio", "missed"), [(0.29, 1.4, 0), (0.31, 1.4, 1), (0.29, 1.6, 4)])
def test_imports_and_eager_calls_are_measured_and_held_to_bars(tmp_path, capsys, seconds, ratio, missed):
    rows, imports = [], iter([9.0, *[seconds] * (host.PROCESSES - 2), 0.1])
    options = {"effort": QUICK, "importing": lambda: {OURS: next(imports), "jax": 0.6}, "say": lambda line: None}
    assert host.measure(host.cells(), GPU, "abc1234", rows.append, **options) == ([], [])
    assert {name_of(row) for row in rows} == set(HOST)
    assert [(row.implementation, row.us) for row in rows[:2]] == [(OURS, 1e6 * seconds), ("jax", 0.6e6)]
    assert all(0 < row.error <= 1 and bars.is_ours(row) == (row.implementation == "xla") for row in rows[2:])
    times = [row.us if row.pass_ == "import" else ratio if bars.is_ours(row) else 1.0 for row in rows]
    written(tmp_path, [dataclasses.replace(row, us=us) for row, us in zip(rows, times, strict=True)], "host")
    assert main(["host", "--check", "--out", str(tmp_path)]) == (1 if missed else 0)
    assert f"{missed} of 5 bars missed" in capsys.readouterr().out


def test_eager_calls_are_not_jitted():
    seen, cell = [], HOST["softmax eager float32 4x16"]

    def watched(x):
        seen.append(isinstance(x, jax.core.Tracer))
        return jax.nn.softmax(x)

    run, rows, _ = measured(dataclasses.replace(cell, contenders=(cell.contenders[0], Contender("jax.nn", lambda: watched))))
    assert not run.problems
    assert [row.temporaries for row in rows] == [None, None]
    assert seen
    assert not any(seen)


def test_imports_take_time():
    found = host.import_seconds()
    assert set(found) == {OURS, "jax"}
    assert min(found.values()) > 0


def test_an_import_is_of_no_implementation(asked_for):
    asked_for("xla")
    assert host.measure([HOST["jaxsoftmax import"]], GPU, "abc", pytest.fail, importing=pytest.fail) == ([], [])


def test_imports_and_eager_calls_have_the_folder_of_the_processor(tmp_path, monkeypatch):
    monkeypatch.setattr(harness, "gpu_name", lambda: None)
    assert main(["host", "--only", "softmax eager .*16$", "--peers", "jax.nn", "--commit", "abc", "--out", str(tmp_path)]) == 0
    (path,) = tmp_path.glob("cpu*/host.csv")
    assert [row.implementation for row in results.read(path)] == ["xla", "jax.nn"] * 2


def test_plots_of_runs_on_triton_do_not_replace_others(tmp_path, capsys):
    rows = a_full_run({name: cell for name, cell in CELLS.items() if name.startswith(("copy", "softmax forward float32"))})
    chosen = written(tmp_path, rows).with_name("softmax_forward.svg")
    assert main(["--plot", "--out", str(tmp_path)]) == 0
    before = chosen.read_bytes()
    asked_for = written(tmp_path, [dataclasses.replace(row, us=3 * row.us) for row in on_triton(rows)], implementation="triton")
    asked_for = asked_for.with_name(chosen.name)
    capsys.readouterr()
    assert main(["--plot", "--out", str(tmp_path)]) == 0
    folders = {chosen.parent, asked_for.parent}
    assert {path.parent for path in map(pathlib.Path, capsys.readouterr().out.split())} == folders
    assert chosen.read_bytes() == before != asked_for.read_bytes()
    assert main(["--plot", "--implementation", "triton", "--out", str(tmp_path)]) == 0
    assert {path.parent for path in map(pathlib.Path, capsys.readouterr().out.split())} == {asked_for.parent}


TWICE = f"2.00{plot.TIMES}"  # ours over the fastest of the others


def drawn_words(path):
    """What a figure says, each text of it."""
    return ["".join(text.itertext()) for text in ElementTree.parse(path).iter("{http://www.w3.org/2000/svg}text")]


def test_figures_are_drawn_and_name_the_library_and_what_marks_mean(tmp_path, capsys):
    drawn_ops = ("copy forward", "softmax forward", "logsumexp forward")
    written(tmp_path, a_full_run({name: cell for name, cell in CELLS.items() if name.startswith(drawn_ops)}))
    written(tmp_path, a_full_run_of_attention(), "attention")
    assert main(["--plot", "--out", str(tmp_path)]) == 0
    drawn = sorted((tmp_path / "h200").glob("*.svg"))
    assert [str(path) for path in drawn] == sorted(capsys.readouterr().out.split())
    assert all(path.read_text().startswith("<?xml") for path in drawn)
    softmax_, attention_ = (drawn_words(tmp_path / "h200" / f"{name}_forward.svg") for name in ("softmax", "attention"))
    for words in (softmax_, attention_):
        assert "jaxsoftmax" in words
        assert not {"mosaic", "ours"} & set(words)
        assert not any("abc1234" in word for word in words)
    assert {"a copy", "jax.nn (XLA)", "torch.compile", "GB/s read and written", f"1.00{plot.TIMES}"} <= set(softmax_)
    assert "Speed of softmax forward, float32 and bfloat16, NVIDIA H200" in softmax_
    assert {"torch SDPA", "jax.nn (cuDNN)", "FlashAttention-3", "TFLOP/s", "head size 64, causal"} <= set(attention_)
    assert "Speed of attention forward, bfloat16, NVIDIA H200" in attention_


def test_plot_of_the_sweep(tmp_path, capsys):
    drawn = written(tmp_path, a_full_run(SWEEP), "softmax_sweep").with_suffix(".svg")
    assert main(["--plot", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(drawn)]
    words = drawn_words(drawn)
    assert {"jaxsoftmax", "jax.nn (XLA)", "quack", "a copy", "64", "1M", "columns of a row"} <= set(words)
    assert {"softmax forward, bfloat16", "softmax forward, float32", "speed / speed of a copy"} <= set(words)


def test_arrays_of_a_few_rows_are_not_drawn(tmp_path):
    written(tmp_path, a_full_run({name: cell for name, cell in CELLS.items() if cell.shape[0] <= 64}))
    assert main(["--plot", "--out", str(tmp_path)]) == 0
    assert not list(tmp_path.glob("*/*.svg"))


def test_plot_of_a_suite_and_a_gpu(tmp_path, capsys):
    written(tmp_path, a_full_run_of_attention(), "attention")
    drawn = written(tmp_path, a_full_run_of_attention(GRADIENTS), "attention_gradients")
    drawn = drawn.with_name("attention_forward_backward.svg")
    assert main(["attention_gradients", "--plot", "--gpu", "h200", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(drawn)]
    assert drawn.read_text().startswith("<?xml")


def test_plots_of_attention_under_load_do_not_take_the_place_of_others(tmp_path, capsys):
    written(tmp_path, a_full_run_of_attention(SUSTAINED), "attention_sustained")
    assert main(["--plot", "--out", str(tmp_path)]) == 0
    assert not capsys.readouterr().out
    assert not list((tmp_path / "h200").glob("*.svg"))
    written(tmp_path, a_full_run_of_attention(), "attention")
    assert main(["attention", "--plot", "--out", str(tmp_path)]) == 0
    assert "attention_forward.svg" in capsys.readouterr().out


def test_plot_of_linear_cross_entropy(tmp_path, capsys):
    drawn = written(tmp_path, a_full_run_of_linear(), "linear_cross_entropy").with_suffix(".svg")
    assert main(["--plot", "--out", str(tmp_path)]) == 0
    assert capsys.readouterr().out.split() == [str(drawn)]
    words = drawn_words(drawn)
    assert {"jaxsoftmax", "optax (XLA)", "8K", "256K", "time, ms", "memory beyond inputs and outputs, GB"} <= set(words)
    assert {"classes (vocabulary)", "linear_cross_entropy with gradients, bfloat16, NVIDIA H200"} <= set(words)
    assert {TWICE, f"10.0{plot.TIMES}"} <= set(words)
    assert any("8192 tokens, hidden size 4096." in word for word in words)
    assert not {"products", "quack"} & set(words)


# Score and mask functions.


def test_block_masks_are_what_pairs_say():
    call = attention.Call(2, 160, 4, 64, dtype="float32", extras=("segments",))
    run, rows, said = measured(score_functions.mask_cell(call), peers=frozenset({"attention"}))
    assert not run.problems, said
    assert [row.implementation for row in rows] == ["xla", "attention"]
    assert all(row.error is not None and row.error <= 1 for row in rows)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("name", score_functions.FUNCTIONS)
def test_functions_compute_what_is_measured_beside_them(name, backward):
    options = score_functions.FUNCTIONS[name].options
    call = attention.Call(
        2, 160, 4, 64, dtype="float32", backward=backward, **options | ({"window": 40} if "window" in options else {})
    )
    cell = score_functions.cell_of(name, call)
    peers = frozenset({"arguments", "plain", "bias", "causal", "with_block_mask"})
    run, rows, said = measured(cell, peers=peers)
    assert not run.problems, said
    assert len(rows) == 2 + (name == "documents")
    assert all(row.error is not None and row.error <= 1 for row in rows if row.implementation == "xla")
