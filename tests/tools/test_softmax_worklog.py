"""The worklog's rungs: right where they must be, or wrong; lowered for CUDA, interpreted on any machine, run on Hopper."""

import ast
import contextlib
import functools
import os
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import online
from jaxsoftmax._core.implementation import Refusal

from ..support import cases, kernels, oracle
from ..support.attention import oracle as attention_oracle
from ..support.softmax import plans

SCRIPT = Path(__file__).parents[2] / "examples" / "worklog" / "softmax_worklog.py"
DTYPES = ("float32", "bfloat16", "float16")
# What each rung moves, and the kernels that it launches where many blocks share a row, by their last words.
LADDER = {
    "naive": ("1", 2, 1, ["sum_write"]),
    "separate": ("2", 3, 2, ["max", "exp_sum", "divide"]),
    "tree": ("3", 4, 2, ["max_leaves", "max_root", "exp", "sum_leaves", "sum_root", "divide"]),
    "fused": ("4", 3, 1, ["max_sum_write"]),
    "fused_kept": ("4", 2, 1, ["max_write"]),
    "online_thread": ("5", 2, 1, ["rows"]),
    "online_lanes": ("5", 2, 1, ["row"]),
    "online_wide": ("5", 2, 1, ["row"]),
    "online_blocks": ("6", 2, 1, ["states", "merge_write"]),
    "on_chip": ("7", 1, 1, []),
}
# Of softmax with top-k: reads and writes, and the kernels before those of the library.
WITH_TOP_K = {
    "safe_then_top_k": (4, 1, ["worklog_fused_max_sum_write"]),
    "safe_top_k": (2, 0, ["worklog_safe_top_k_max_search"]),
    "online_top_k": (1, 0, []),
}
SAFE = [name for name in LADDER if name not in ("naive", "on_chip")]

LOWERED = [
    (1024, 131072, "float32"),
    (8, 2**24, "float32"),
    (1, 2**24, "float32"),
    (32, 512, "float16"),
    (64, 8192, "float16"),
    (1024, 512, "float32"),
    (4096, 32768, "float32"),
    (128, 2**20, "float32"),
]
LOWERED_SLOWLY = [
    *((rows, cols, "float16") for rows in (32, 64) for cols in (512, 1024, 2048, 4096, 8192)),
    *((7, cols, dtype) for cols in (512, 1536, 512 * 35, 512 * 131, 16384) for dtype in DTYPES),
    (1024, 131072, "bfloat16"),
    (1, 2**20, "float16"),
    (2**19, 512, "float32"),
    (2**15, 2**13, "float32"),
]


def rung_of(example, name):
    return next(rung for rung in example.RUNGS if rung.name == name)


def hurtful(cols, dtype):
    """Rows that are not uniformly random, eight of them, whose softmax is a number in at least one place."""
    rng = np.random.default_rng(cols)
    normal = rng.standard_normal((8, cols))
    normal[1, rng.random(cols) < 0.02] = 1e3
    normal[2] = 0.3
    normal[3, rng.random(cols) < 0.3] = -np.inf
    normal[4] = np.linspace(-20, 20, cols)  # the maximum comes last
    normal[5] += 1e4
    normal[6, :-1] = -np.inf  # all blocks but the last see nothing
    normal[7] *= 30
    return normal.astype(jnp.dtype(dtype))


def assert_right(actual, x, budgets=1.0):
    assert actual.dtype == x.dtype
    assert actual.shape == x.shape
    assert oracle.error(actual, oracle.softmax(x)) <= budgets


@pytest.fixture
def short_steps(example, monkeypatch):
    """Steps and shares are short, so that small rows have several."""
    monkeypatch.setattr(example, "HELD", 8)
    monkeypatch.setattr(example, "REGISTERS", 16)
    monkeypatch.setattr(example, "SHARE", 1024)


def interpreted(example, name, x):
    rung = rung_of(example, name)
    assert rung.unsupported(*x.shape, x.dtype) is None
    return kernels.interpreted(jax.jit(lambda x: rung.softmax(x)), x)  # a new function: nothing traced before counts


def test_rungs_are_the_ladder(example):
    assert {r.name: (r.number, r.reads, r.writes) for r in example.RUNGS} == {n: row[:3] for n, row in LADDER.items()}
    for rung in example.RUNGS:
        assert rung.passes(512, "float32") == rung.reads + rung.writes
        assert rung.title
        assert rung.teaches
        assert "\n" not in rung.teaches
    assert [rung.name for rung in example.RUNGS if rung.slow] == ["online_thread"]
    ways = {way.name: (way.number, way.reads, way.writes) for way in example.WITH_TOP_K}
    assert ways == {name: ("9", *row[:2]) for name, row in WITH_TOP_K.items()}


def test_predicted_bytes(example):
    for rung in example.RUNGS:
        assert rung.bytes(3, 512, "float32") == rung.passes(512, "float32") * 4 * 3 * 512
    found = {rung.name: rung.bytes(3, 512, "bfloat16") / (3 * 512) for rung in example.RUNGS}
    assert found == {n: 2 * sum(row[1:3]) + {"separate": 4, "tree": 6}.get(n, 0) for n, row in LADDER.items()}


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_librarys_rung_is_predicted_at_every_width(example, dtype):
    """One read and one write, up to the longest rows that the library has a kernel for."""
    itemsize, rung = jnp.dtype(dtype).itemsize, rung_of(example, "on_chip")
    for cols in range(example.TILE, example.MAX_COLS + 1, example.TILE):
        has_kernel = not isinstance(plans.rows_of("softmax", cols, itemsize), Refusal)
        assert (rung.passes(cols, dtype) == 2) == has_kernel, cols


# Interpreted.


def with_rows_that_are_not_numbers(x):
    """The same, and below it rows of nothing but `-inf`, with `+inf`, with NaN, and one beside them that is not touched."""
    rows = np.random.default_rng(0).standard_normal((4, x.shape[1])).astype(x.dtype)
    rows[0], rows[1, 7], rows[2, -200] = -np.inf, np.inf, np.nan
    return np.concatenate([x, rows])


def assert_right_and_nan(y, x):
    """Right in every row, and NaN where JAX has it, in all but the last of those that were added."""
    y = np.asarray(y)
    assert np.isnan(y[-4:-1]).all()
    numbers = np.r_[: len(x) - 4, len(x) - 1]
    assert_right(y[numbers], x[numbers])


@pytest.mark.parametrize("name", cases.every_other(SAFE))
def test_right_in_every_row(example, short_steps, name):
    """Several steps a row, and a last one that is shorter; one block of eight threads where each has a row."""
    x = hurtful(512, "float32")[[1, 3, 4, 6]] if name == "online_thread" else hurtful(2560, "float32")
    x = with_rows_that_are_not_numbers(x)
    assert_right_and_nan(interpreted(example, name, x), x)


@pytest.mark.parametrize("name", cases.every_other(SAFE, 1))
def test_right_in_sixteen_bits(example, short_steps, name):
    x = with_rows_that_are_not_numbers(hurtful(512 if name == "online_thread" else 2048, "bfloat16"))
    assert_right_and_nan(interpreted(example, name, x), x)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [512, 1024, 1536, 4096])
@pytest.mark.parametrize("name", SAFE)
def test_right_for_more_columns(example, name, cols, dtype):
    x = hurtful(cols, dtype)
    # The recurrence as it is printed rounds its sum once a column, where the budget is that of a tree: found 1.5 of it in 1024
    # columns and 3.0 in 4096, if the maximum grows with each.
    assert_right(interpreted(example, name, x), x, cols / 512 if name == "online_thread" else 1)


@pytest.mark.parametrize("shares", [3, 131, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2, 35, 64, 128))])
@pytest.mark.parametrize("name", ["tree", "online_blocks"])
def test_right_for_any_number_of_shares(example, monkeypatch, name, shares):
    monkeypatch.setattr(example, "SHARE", example.TILE)
    x = hurtful(512 * shares, "float32")[4:5]
    with kernels.hollow():
        text = kernels.lowered_for_cuda(rung_of(example, name).softmax, x)
    assert len(kernels.kernel_names(text)) == (2 if name == "online_blocks" else 4 if shares == 1 else 6)
    if shares < 100:
        assert_right(interpreted(example, name, x), x)


@pytest.mark.parametrize("rows", cases.quick(3, slow=[1, 6]))
def test_any_number_of_rows(example, rows):
    x = hurtful(512, "float32")[:rows]
    for name in ("separate", "online_wide", "online_blocks"):
        assert_right(interpreted(example, name, x), x)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [1, 2, 64, 96, 256])
def test_any_number_of_rows_for_threads(example, rows):
    x = jax.random.normal(jax.random.key(rows), (rows, 512))
    assert_right(interpreted(example, "online_thread", x), x)


@pytest.mark.parametrize("name", cases.quick(slow=SAFE))
def test_nan_where_jax_has_it(example, name):
    x = with_rows_that_are_not_numbers(hurtful(512, "float32")[:1])
    assert_right_and_nan(interpreted(example, name, x), x)


def test_naive_is_nan_where_exp_is_infinite(example):
    """And 0 elsewhere."""
    x = with_rows_that_are_not_numbers(hurtful(512, "float32")[:1])
    y = np.asarray(interpreted(example, "naive", x))
    assert np.isnan(y[2, 7])
    np.testing.assert_array_equal(np.delete(y[2], 7), 0)
    assert np.isnan(y[[1, 3]]).all()
    assert_right(y[[0, 4]], x[[0, 4]])


# Naive: right, or wrong exactly where it must be.


@pytest.mark.parametrize("dtype", DTYPES)
def test_naive_is_right_without_overflow(example, short_steps, dtype):
    x = np.random.default_rng(1).standard_normal((2, 2048)).astype(jnp.dtype(dtype))
    x[0, 100:300] = -np.inf
    assert_right(interpreted(example, "naive", x), x)


NAN = np.nan


OVERFLOWS = [
    ([1000, 1001, 1002], [NAN, NAN, NAN]),
    ([0, 500, 1000], [0, NAN, NAN]),  # exp(500) is no float32; in float64 it would be one
    ([0, 80, 100], [0, 0, NAN]),
    ([88.5, 88.5, 0], [0, 0, 0]),  # each exponential is a number, and their sum is not
    ([87, 0, 0], [1, 0, 0]),
    ([-1000, -1001, -1002], [NAN, NAN, NAN]),
]


def test_naive_is_wrong_exactly_where_it_must_be(example):
    x = np.concatenate([example.padded(scores) for scores, _ in OVERFLOWS])
    few = (8 + 3 * 100) * oracle.EPS  # roundings of an exponential, and exp(-87) is as good as 0
    for (scores, expected), row in zip(OVERFLOWS, interpreted(example, "naive", x), strict=True):
        for found in (row[: len(scores)], example.naive_in_words(scores)):
            np.testing.assert_allclose(found, expected, rtol=few, atol=1e-37, err_msg=str(scores))
    assert_right(interpreted(example, "fused", x), x)


def test_float16_does_not_overflow_sooner(example):
    """Arithmetic is float32: exp(60) is no float16."""
    x = example.padded([60, 59, 0]).astype(jnp.float16)
    y = np.asarray(interpreted(example, "naive", x)).astype(np.float64)
    np.testing.assert_allclose(y[0, :3], [0.7310586, 0.2689414, 0], rtol=2.0**-10, atol=2.0**-24)  # units of float16


# Lowered for CUDA.


def lower(example, name, rows, cols, dtype):
    """Lowers a rung, or makes sure that it says why not."""
    rung = rung_of(example, name)
    x = jax.ShapeDtypeStruct((rows, cols), dtype)
    if reason := rung.unsupported(rows, cols, jnp.dtype(dtype)):
        assert str(cols) in reason or cols > 32768, reason
        assert name in ("fused_kept", "online_thread", "on_chip"), reason
        return None
    found = kernels.kernel_names(kernels.lowered_for_cuda(rung.softmax, x))
    if name == "on_chip":
        assert found == ["softmax_forward_mosaic"]
        return found
    expected = [f"worklog_{name}_{step}" for step in LADDER[name][3]]
    if cols <= 1024:  # of one share a row there is nothing to reduce
        expected = [kernel for kernel in expected if not kernel.endswith("root") or kernel in found]
    assert found == expected
    return found


@pytest.mark.parametrize("name", cases.every_other(LADDER))
def test_lowers_for_cuda(example, name):
    for case in LOWERED[2:4]:  # kernels for other long rows differ in how often they loop, and these have the most code
        lower(example, name, *case)


@pytest.mark.slow
@pytest.mark.parametrize("name", LADDER)
def test_more_shapes_lower_for_cuda(example, name):
    for case in LOWERED + LOWERED_SLOWLY:
        lower(example, name, *case)


@pytest.mark.usefixtures("hollow_kernels")
def test_rungs_are_served_where_the_page_shows_them(example):
    """What is refused, of what is measured."""
    refused = {
        (name, rows, cols)
        for name in LADDER
        for rows, cols, dtype in LOWERED
        if rung_of(example, name).unsupported(rows, cols, jnp.dtype(dtype))
    }
    most = {"fused_kept": (16384, 16384), "online_thread": (2**20, 2**20), "on_chip": (example.ON_CHIP[2], example.ON_CHIP[4])}
    assert refused == {
        (name, rows, cols)
        for name, limits in most.items()
        for rows, cols, dtype in LOWERED
        if cols > limits[dtype == "float32"]
    }


# What is refused.


@pytest.mark.parametrize("name", [name for name in LADDER if name != "on_chip"])
def test_unsupported_says_why(example, name):
    refuses = rung_of(example, name).unsupported
    assert refuses(4, 512, jnp.dtype("float32")) is None
    for cols in (0, 100, 513, 2**25):
        assert re.search(rf"cols must be .*, got {cols}$", refuses(4, cols, jnp.dtype("float32")))
    assert "got float64" in refuses(4, 512, jnp.dtype("float64"))
    assert "got int32" in refuses(4, 512, jnp.dtype("int32"))
    assert refuses(0, 512, jnp.dtype("float32")) == "there must be rows, got 0"


def test_kept_rows_fit_registers(example):
    assert rung_of(example, "fused_kept").unsupported(1, 16384, jnp.dtype("float32")) is None
    assert "at most 16384" in rung_of(example, "fused_kept").unsupported(1, 16896, jnp.dtype("float32"))
    assert "at most 1048576" in rung_of(example, "online_thread").unsupported(1, 2**21, jnp.dtype("float32"))


def test_on_chip_gives_the_librarys_reason(example):
    refuses = rung_of(example, "on_chip").unsupported
    assert refuses(4, 2**23, jnp.dtype("bfloat16")) is None
    assert "slices, more than two thirds of the 1056 that the grid holds" in refuses(4, 2**25, jnp.dtype("bfloat16"))
    assert "must be among float32, bfloat16, float16, got float8_e5m2" in refuses(4, 4096, jnp.dtype("float8_e5m2"))
    assert "from 1 to 1073741823 entries, got 1073741824" in refuses(4, 2**30, jnp.dtype("float32"))


# The library's public names, and no others.


def names_of_the_library(tree):
    """What follows `jaxsoftmax` in imports and in attributes, without what those have."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (name.name.removeprefix("jaxsoftmax") for name in names if name.name.startswith("jaxsoftmax"))
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("jaxsoftmax"):
                yield from (module.removeprefix("jaxsoftmax") + "." + name.name for name in names)
            case ast.Attribute(value=ast.Name(id="jaxsoftmax"), attr=name):
                yield "." + name


def test_only_public_names_are_used():
    tree = ast.parse(SCRIPT.read_text())
    found = {name for name in names_of_the_library(tree) if name}
    assert found == {".softmax", ".dot_product_attention", ".explain", ".top_k", ".softmax_top_k"}
    assert found <= {"." + name for name in jaxsoftmax.__all__}
    own = {"_check_canonical", "__name__", "__version__"}  # the first is the one way to write a layout down in any form
    for node in ast.walk(tree):
        name = node.attr if isinstance(node, ast.Attribute) else node.arg if isinstance(node, ast.keyword) else None
        assert not (name or "").startswith("_") or name in own, name
        if isinstance(node, ast.ImportFrom):
            assert "._" not in node.module


def test_merge_and_push(example):
    """The state of a row, of any parts of it, and of none: the textbook's rules are those of the library."""
    x = jax.random.normal(jax.random.key(0), (3, 16)) * jnp.float32(10)
    none = example.State(jnp.full(3, example.LOWEST), jnp.zeros(3))
    parts = jnp.split(x, 4, axis=1)
    states = [functools.reduce(lambda state, score: example.push(state, [score]), part.T, none) for part in parts]
    states.append(example.push(none, list(x.T)))
    m, d = functools.reduce(example.merge, states[:4])
    for state in (example.State(m, d), states[4]):
        assert oracle.error(state.m + jnp.log(state.d), oracle.logsumexp(x, 1)) <= 1
    whole = functools.reduce(online.merge, (online.lift(part) for part in parts))
    for state in (example.State(m, d), states[4]):
        np.testing.assert_array_equal(state.m, whole.m)
        np.testing.assert_allclose(state.d, whole.d, rtol=32 * oracle.EPS)  # 20 roundings of a sum of weights, and of its parts
    for state in (example.merge(none, none), example.push(none, [jnp.full(3, -jnp.inf)])):
        np.testing.assert_array_equal(state.d, 0)


# Attention.


def qkv(shape, dtype):
    return [jax.random.normal(key, shape).astype(dtype) for key in jax.random.split(jax.random.key(5), 3)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_agrees_with_float64(example, dtype):
    operands = qkv((2, 48, 3, 16), dtype)
    exact = attention_oracle.attention(*operands)[0].value
    for way in (example.attention_written, example.attention_fused):
        with jax.default_matmul_precision("highest"):
            actual = jax.jit(way)(*operands)
        assert actual.dtype == dtype
        # Weights in 16 bits, which are added up, and the rounding of the result.
        difference = np.abs(np.asarray(actual).astype(np.float64) - exact).max()
        assert difference <= 4 * float(jnp.finfo(dtype).eps) * np.abs(np.asarray(operands[2]).astype(np.float64)).max()
        assert 0 < example.attention_error(actual, *operands) < 8 * float(jnp.finfo(dtype).eps)


def test_attention_bytes(example):
    found = example.attention_bytes((2, 128, 3, 16), "bfloat16")
    assert found["attention_fused"] == 4 * 2 * 128 * 3 * 16 * 2
    assert found["attention_written"] - found["attention_fused"] == 2 * 3 * 128 * 128 * 2 * (4 + 2)


def test_attention_lowers_for_cuda(example):
    operands = [jax.ShapeDtypeStruct((2, 1024, 8, 128), "bfloat16")] * 3
    with kernels.hollow():
        ways = example.attention_written, example.attention_fused
        written, fused = (kernels.kernel_names(kernels.lowered_for_cuda(way, *operands)) for way in ways)
    assert len(fused) == 1
    assert fused[0].startswith("attention_forward")
    assert not any(name.startswith("attention") for name in written)


# Softmax with top-k.


def with_top_k(example, name, x):
    """Weights and columns; kernels are interpreted, and the library's reference runs in place of its own."""
    way = next(way for way in example.WITH_TOP_K if way.name == name)
    run = jax.jit(lambda x: way.softmax(x))  # a new function: nothing traced before counts
    if name == "online_top_k":
        return run(x)
    return kernels.interpreted(run, x)


def assert_largest(weights, columns, x):
    """The weights are the largest of each row in float64, in order, and stand at their columns."""
    truth = oracle.softmax(x)
    order = np.argsort(-truth.value, axis=1, kind="stable")[:, :5]
    value, budget = (np.take_along_axis(array, order, axis=1) for array in (truth.value, truth.budget))
    assert weights.dtype == x.dtype
    assert columns.dtype == jnp.int32
    assert oracle.error(weights, oracle.Truth(value, budget)) <= 1
    at = np.asarray(columns)
    assert all(len(set(row)) == 5 for row in at.tolist())
    there = np.take_along_axis(truth.value, at, axis=1)
    # Of two weights that are rounded to the same, either may come first.
    half_unit = 0 if x.dtype == jnp.float32 else float(jnp.finfo(x.dtype).eps) / 2
    np.testing.assert_array_less(np.abs(there - value), 2 * (budget + half_unit * value) + 2.0**-24)
    return order


@pytest.mark.parametrize("name", WITH_TOP_K)
def test_top_k_is_right_in_every_row(example, short_steps, name):
    """In the last three no rounding makes scores equal; one lane has all of a row's largest, in rising order, another none."""
    x = np.random.default_rng(0).permuted(np.tile(np.linspace(-8, 8, 2560, dtype=np.float32), (3, 1)), axis=1)
    x[1, 3::512] = np.arange(10, 15)
    x[2] = np.linspace(8, -8, 2560)
    x = np.concatenate([hurtful(2560, "float32"), x])
    weights, columns = (np.asarray(array) for array in with_top_k(example, name, x))
    order = assert_largest(weights, columns, x)
    np.testing.assert_array_equal(columns[-3:], order[-3:])
    np.testing.assert_array_equal(columns[-2], [2051, 1539, 1027, 515, 3])


@pytest.mark.parametrize("name", WITH_TOP_K)
def test_equal_scores_come_in_the_order_of_their_columns_and_rows_may_be_no_numbers(example, name):
    x = np.zeros((6, 1024), np.float32)
    x[0, [700, 5, 900]] = 1
    x[1, 1:] = -np.inf
    x[2], x[3, 7], x[4, 300] = -np.inf, np.inf, np.nan
    weights, columns = with_top_k(example, name, x)
    np.testing.assert_array_equal(columns[:2], [[5, 700, 900, 0, 1], [0, 1, 2, 3, 4]])
    assert np.isnan(weights[2:5]).all()
    np.testing.assert_allclose(weights[5], 1 / 1024, rtol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", cases.every_other(WITH_TOP_K))
def test_top_k_in_sixteen_bits(example, name, dtype):
    x = hurtful(1536, dtype)
    assert_largest(*with_top_k(example, name, x), x)


def test_top_k_lowers_for_cuda(example):
    """To as many kernels as are counted: the library's reads each row once."""
    for way in example.WITH_TOP_K:
        for shape in ((4096, 32768), (4000, 2048), (10, 131072)):
            # Kernels for more columns differ in how often they loop.
            with contextlib.nullcontext() if shape[1] == 2048 else kernels.hollow():
                text = kernels.lowered_for_cuda(way.softmax, jax.ShapeDtypeStruct(shape, "float32"))
            found = kernels.kernel_names(text)
            own = WITH_TOP_K[way.name][2]
            assert found[: len(own)] == own
            rest = found[len(own) :]
            assert len(rest) == (way.name != "safe_top_k")
            assert all(name.startswith("top_k") and name.endswith("_mosaic") for name in rest), rest


# The script.


def test_error_of_top_k_is_that_of_its_worst_row(example):
    x = jnp.asarray(hurtful(512, "float32"))
    weights, columns = jaxsoftmax.softmax_top_k(x, 5)
    assert example.top_k_error(weights, columns, x) <= 1
    assert example.top_k_error(weights.at[3, 4].multiply(1.01), columns, x) > 1
    assert example.top_k_error(weights.at[3, 4].set(jnp.nan), columns, x) == np.inf
    assert example.top_k_error(weights, columns.at[3, 0].set(columns[3, 1]), x) == np.inf
    assert example.top_k_error(weights, columns.at[3, 0].set(512), x) == np.inf
    smallest = int(jnp.argmin(x[4]))
    assert example.top_k_error(weights, columns.at[4, 4].set(smallest), x) > 1


def test_error_is_that_of_the_oracle(example):
    for dtype in DTYPES:
        x = hurtful(512, dtype)
        y = np.asarray(jax.nn.softmax(x.astype(jnp.float32)))
        y = (y * np.where(np.arange(512) == 5, np.float32(1.01), np.float32(1))).astype(jnp.dtype(dtype))
        np.testing.assert_allclose(example.softmax_error(y, x), oracle.error(y, oracle.softmax(x)), rtol=1e-9)
        y[3, 5] = np.nan
        assert example.softmax_error(y, x) == np.inf


def test_every_rung_in_small_form(example, capsys):
    assert example.main(["--rows", "2", "--cols", "512"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    printed = captured.out.splitlines()
    assert printed[0].startswith("softmax of 2 x 512 float32 on ")
    lines = {line.split()[0]: line for line in printed[2 : 2 + len(LADDER)]}
    assert list(lines) == list(LADDER)
    for rung in example.RUNGS:
        words = lines[rung.name].split()
        assert int(words[1]) == rung.passes(512, "float32")
        assert 0 < float(words[2]) <= 1
        assert lines[rung.name].endswith(rung.teaches)
    assert "  [1000, 1001, 1002] gives [nan, nan, nan], not [0.09003, 0.2447, 0.6652]" in printed
    assert "  [0, 500, 1000] gives [0, nan, nan], not [0, 0, 1]" in printed
    assert [line.split()[0] for line in printed if line.startswith("attention_")] == ["attention_written", "attention_fused"]
    assert printed[-5] == "softmax and the 5 largest of each row"
    for line, (name, (reads, writes, _)) in zip(printed[-3:], WITH_TOP_K.items(), strict=True):
        words = line.split()
        assert (words[0], int(words[1])) == (name, reads + writes)
        assert 0 < float(words[2]) <= 1


def test_some_rungs_and_a_refusal(example, capsys):
    assert example.main(["--rows=1", "--cols=16896", "--dtype=bfloat16", "--only=online_blocks,fused_kept"]) == 0
    first, second = capsys.readouterr().out.splitlines()[2:]
    assert first.split()[:3] == ["fused_kept", "3", "-"]
    assert "not served: cols must be at most 16384" in first
    assert second.split()[0] == "online_blocks"


def test_a_wrong_rung_is_said(example, capsys, monkeypatch):
    monkeypatch.setattr(example, "softmax_error", lambda *_: 1.5)
    assert example.main(["--rows=1", "--cols=512", "--only=fused"]) == 1
    assert "a rung is wrong" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "named"),
    [
        *[("--rows", value, f"argument --rows: {value!r} is not a positive integer") for value in ("0", "-1", "x", "1.5", "")],
        ("--rows", str(2**31), f"argument --rows: must be less than {2**31}, got {2**31}"),
        ("--cols", "x", "argument --cols: 'x' is not a positive integer"),
        ("--cols", "1000", "argument --cols: cols must be a multiple of 512, a vector of 8 or 16 bytes for each thread, up to"),
        ("--cols", str(2**25), f"got {2**25}"),
        ("--dtype", "float64", "argument --dtype: invalid choice: 'float64' (choose from"),
        ("--only", "fused,torch", "argument --only: 'torch' is not one of naive, separate, "),
        ("--only", "", "argument --only: '' is not one of"),
        ("--seed", "-1", "argument --seed: '-1' is not an integer from 0 to 4294967295"),
        ("--unknown", "1", "--unknown"),
    ],
)
def test_bad_options_are_refused(example, capsys, option, value, named):
    assert example.main([f"{option}={value}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    assert line.startswith("softmax_worklog.py: error: ")
    assert named in line


@pytest.mark.slow
def test_default_run():
    path = os.pathsep.join([str(SCRIPT.parents[1]), os.environ.get("PYTHONPATH", "")])  # the package may not be installed
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, SCRIPT], env=env, capture_output=True, text=True, timeout=600, check=False)
    assert (done.returncode, done.stderr) == (0, "")


# On a GPU.


GRID = [
    (1, 512), (5, 512), (1024, 512), (3, 1536), (32, 8192), (64, 4096), (7, 16384), (300, 32768),
    (100, 512 * 131), (1024, 131072), (16, 2**20), (1, 2**24), (9, 2**24),
]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", LADDER)
def test_right_on_a_gpu(example, name, dtype):
    rung = rung_of(example, name)
    for rows, cols in GRID:
        if rung.unsupported(rows, cols, jnp.dtype(dtype)):
            continue
        x = jax.random.normal(jax.random.key(cols), (rows, cols)).astype(dtype)
        if name != "naive":
            x = x.at[:, cols // 3].set(30).at[-1].multiply(jnp.asarray(20, dtype)).at[0, : cols // 2].set(-jnp.inf)
        assert example.softmax_error(jax.jit(rung.softmax)(x), x) <= 1, (rows, cols)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", SAFE)
def test_hurtful_rows_on_a_gpu(example, name):
    for cols, dtype in ((512, "float32"), (16384, "float32"), (1536, "bfloat16"), (16384, "float16")):
        x = hurtful(cols, dtype)
        y = jax.jit(rung_of(example, name).softmax)(x)
        if name == "online_thread":  # each new maximum of the row that rises rounds its sum twice
            truth = oracle.softmax(x[4:5]).value
            epsilon = float(jnp.finfo(dtype).eps) / 2 + (128 + 2 * cols) * 2.0**-24
            np.testing.assert_allclose(np.asarray(y[4:5], np.float64), truth, rtol=epsilon, atol=float(jnp.finfo(dtype).tiny))
            x, y = (jnp.delete(array, 4, axis=0) for array in (x, y))
        assert_right(y, x)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", WITH_TOP_K)
def test_top_k_on_a_gpu(example, name, dtype):
    way = next(way for way in example.WITH_TOP_K if way.name == name)
    for rows, cols in GRID:
        x = jax.random.normal(jax.random.key(cols), (rows, cols)).astype(dtype)
        x = x.at[:, cols // 3].set(30).at[-1].multiply(jnp.asarray(20, dtype)).at[0, : cols // 2].set(-jnp.inf)
        assert example.top_k_error(*jax.jit(way.softmax)(x), x) <= 1, (rows, cols)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", SAFE)
def test_more_than_2_to_the_31_elements_on_a_gpu(example, name):
    rows, cols = (2**31 // 512 + 384, 512) if name in ("fused_kept", "online_thread") else (2**31 // 2**17 + 128, 2**17)
    x = jnp.zeros((rows, cols), jnp.bfloat16).at[-1, -1].set(1)
    y = jax.jit(rung_of(example, name).softmax)(x)
    assert_right(y[jnp.asarray([0, rows - 1])], x[jnp.asarray([0, rows - 1])])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_the_script_on_a_gpu(example, capsys):
    assert example.main(["--rows", "1024", "--cols", "8192"]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert "ms" in printed[1]
    assert all(float(line.split()[3]) > 0 for line in printed[2 : 2 + len(LADDER)])
