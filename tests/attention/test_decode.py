"""Attention with few queries on Hopper, without a GPU: how operands are folded, keys split and states merged.

The kernel is `forward`'s, and here it is played by NumPy. Natively it is run by `test_values.py`, for all features.
"""

import dataclasses
import functools
import itertools
import math
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsoftmax
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.mosaic_sm90 import decode
from jaxsoftmax.ops.attention.mosaic_sm90.common import HOST, ROWS
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import FoldedRows, ForwardGeometry

from ..support import cases, kernels
from ..support.attention import lowering, values
from ..support.attention.played import play

brute_force = settings(max_examples=200, deadline=None, derandomize=True)
FEW = [name for name in values.IN_SHAPES if name.startswith("few") and name not in ("few, 65 rows", "few, dropout")]
MASKS, BIASES, SHAPES = ([name for name in FEW if name.startswith(f"few, {kind}")] for kind in ("mask", "bias (", "sizes"))
# By default a mask and a bias, of shapes of their own, in a program, and every other pair of head sizes.
TOGETHER = [*zip(MASKS, reversed(BIASES), strict=True)]
ALONE = [pytest.param((name,), marks=cases.slow_unless(name not in MASKS + BIASES + SHAPES[1::2])) for name in FEW]

# Of many keys or many rows, as NumPy plays the kernel: in heads of fewer elements.
IN_SHAPES = values.IN_SHAPES | {
    "few, many tiles": values.case(values.FEW | {"batch": (9, 11), "keys": 200, "size": 8}),
    "few, longer": values.case(values.FEW | {"length": 1, "keys": 20001, "batch": (1,), "key_heads": 1, "size": 8}),
}


@pytest.fixture
def plans(monkeypatch):
    return play(monkeypatch)


@pytest.mark.parametrize("names", [*ALONE, *TOGETHER], ids=" + ".join)
def test_folded_operands_and_merged_states_are_attention(plans, names):
    given, options = {}, {}
    for name in names:
        more, own = IN_SHAPES[name]("bfloat16")
        given, options = given | more, options | own
    moving, fixed = values.split(given)
    results = jax.jit(values.function(options, fixed))(moving)
    values.assert_right("mosaic", results, given, options)
    (plan,) = plans
    assert len(plan.costs()) == plan.blocks_q * plan.splits
    heads, key_heads = given["query"].shape[-2], given["key"].shape[-2]
    assert plan.query[:2] == (given["query"].shape[-3] * heads // key_heads, key_heads)
    assert plan.splits > 1 or given["key"].shape[-3] <= plan.config.block_kv or "few, many tiles" in names


def test_a_query_that_sees_nothing_in_any_split_gives_0(plans):
    given = values.arrays(length=1, keys=700, size=64, dtype="bfloat16") | {"key_value_seq_lengths": np.array([0, 700])}
    out, lse = jax.jit(functools.partial(jaxsoftmax.dot_product_attention, return_residual=True))(**given)
    assert plans[0].splits > 1
    assert not np.any(np.asarray(out[0], np.float32))
    assert np.all(lse[0] == -np.inf)
    assert np.all(np.isfinite(lse[1]))


# How many splits.

CALLS = st.integers(1, 3000), st.integers(1, 5000), st.sampled_from([1, 78, 114, 132]), st.booleans()


@brute_force
@given(*CALLS)
def test_splits_are_alike_and_none_is_empty(tiles, blocks, multiprocessors, is_ragged):
    splits = decode.splits_for(tiles, blocks, multiprocessors, is_ragged)
    size = math.ceil(blocks / splits)
    assert 1 <= splits <= decode.MAX_SPLITS
    assert (splits - 1) * size < blocks <= splits * size


@brute_force
@given(low=st.integers(0, 40), count=st.integers(-9, 300), splits=st.integers(1, 64))
def test_parts_of_splits_follow_each_other(low, count, splits):
    plan = types.SimpleNamespace(splits=splits)
    parts = [ForwardGeometry.part(plan, low, low + count, split, HOST) for split in range(splits)]
    assert [block for own in parts for block in range(*own)] == list(range(low, low + count))
    assert max((end - start for start, end in parts)) <= max(0, math.ceil(count / splits))


@brute_force
@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 700), st.integers(-9, 400), st.integers(0, 300))
def test_spans_of_folded_rows_hold_all_key_blocks_that_their_queries_see(queries, group, keys, offset, left):
    kernel = plan_of(lowering.operands((1,), queries, keys, group, 1), window=(left, 0)).geometry
    seen = np.repeat(lowering.window_sees(queries, keys, (left, 0), offset), group, 0)
    for first in range(0, queries * group, kernel.block_q):
        rows = kernel.rows.queries_from(first, kernel.block_q, HOST)
        low, high = kernel.seen((queries, keys), *rows, HOST, offset)
        columns = np.flatnonzero(seen[first : first + kernel.block_q].any(0)) // kernel.config.block_kv
        assert set(columns) <= set(range(low, high))


@pytest.mark.parametrize(
    ("tiles", "keys", "splits"),
    [
        (8, 4096, 16),
        (8, 32768, 16),
        (8, 131072, 16),
        (256, 4096, 1),
        (1024, 4096, 1),
        (1, 32768, 64),
        (132, 32768, 1),
        (8, 128, 1),
    ],
)
def test_splits_of_common_calls(tiles, keys, splits):
    assert decode.splits_for(tiles, keys // 128, 132, False) == splits


# Lowered for CUDA.

SIZES = [(64, 64), (128, 128), (256, 256), (192, 128), (80, 72)]
NAMES = [name for name in lowering.FEATURES if name != "dropout"]


# By default three or four features in a program.
SEVERAL = [tuple(NAMES[i::4]) for i in range(4)]


@pytest.mark.parametrize(
    ("index", "names"),
    [*enumerate(SEVERAL), *(pytest.param(i, (name,), marks=pytest.mark.slow) for i, name in enumerate(NAMES))],
    ids=lambda value: str(value) if isinstance(value, int) else " + ".join(value),
)
def test_every_feature_lowers_for_cuda(index, names):
    lengths = [(1, 4096), (3, 301), (60, 400)][(index // 3 + 2 * index) % 3]
    dtype = ["bfloat16", "float16", "float32"][index % 3]
    sizes = SIZES[index % 2] if dtype == "float32" else SIZES[index % 5]
    given, options = lowering.with_features(names, sizes, lengths, dtype)
    lowering.lower(given, **options)


@pytest.mark.parametrize("length", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [*(pytest.param(own, "bfloat16", marks=cases.slow_unless(own in SIZES[2::2])) for own in SIZES), (SIZES[1], "float32")],
    ids=str,
)
def test_everything_at_once_lowers_for_cuda(sizes, dtype, length):
    names = [name for name in lowering.EVERYTHING if name != "dropout"]
    given, options = lowering.with_features(names, sizes, (length, 301), dtype)
    lowering.lower(given | {"query_offset": lowering.shaped(2, dtype="int32")}, **options)


@pytest.mark.parametrize(
    ("length", "is_each_lowered"), [(1, False), *(pytest.param(length, True, marks=pytest.mark.slow) for length in (1, 50, 64))]
)
def test_every_configuration_is_lowered_and_fits(length, is_each_lowered):
    """Lowers one of each dtype by default. The test above lowers each of them with features."""
    every = {8, 16, 64, 80, 128, 192, 256}
    for dtype, most in (("bfloat16", 256), ("float32", 128)):
        found = {}
        for sizes in itertools.product(*[sorted(size for size in every if size <= most)] * 2):
            found[decode.decode_config(*sizes, dtype, 2 * length, (None, None))] = sizes  # two heads share a key head
        for index, (config, sizes) in enumerate(found.items()):
            lowering.assert_registers_fit(config)
            if index and not is_each_lowered:
                continue
            given, _ = lowering.with_features([], sizes, (length, 4096), dtype)
            text = lowering.lower(given)
            assert "attention_forward_mosaic" in text, config


SLABS = range(64, 257, 64)


@pytest.mark.parametrize(("size", "value_size"), [*itertools.product(SLABS, SLABS)])
def test_configurations_for_bytes_fit_into_shared_memory_and_registers(size, value_size):
    config = decode.decode_config(size, value_size, "bfloat16", 4, (None, None), is_bytes=True)
    lowering.assert_registers_fit(config)
    of_key = config.block_kv * (2 * config.stages + config.byte_stages)
    queries = 2 * ROWS * (size + (value_size if config.own_output else 0))
    assert of_key * (size + value_size) + queries <= 222 * 1024  # tickets, barriers and alignment take a few KiB
    assert config.own_output or size == value_size


@pytest.mark.parametrize("size", SLABS)
def test_configurations_for_pages_have_enough_registers(size):
    for rows in (4, 100, 150):
        config = decode.decode_config(size, size, "bfloat16", rows, (None, None))
        lowering.assert_registers_fit(dataclasses.replace(config, registers=decode.REGISTERS_WITH_PAGES[config.consumers]))


def merged_operands(batch, keys=4096):
    return [lowering.shaped(batch, *shape) for shape in ((1, 8, 128), (keys, 2, 128), (keys, 2, 128))]


@pytest.mark.usefixtures("hollow_kernels")
def test_one_kernel_runs_and_xla_merges_the_states():
    attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic")
    few, many = (kernels.lowered_for_cuda(attend, *merged_operands(batch)) for batch in (1, 66))
    assert [kernels.kernel_names(text) for text in (few, many)] == [[lowering.NAME]] * 2
    assert "exponential" in few
    assert "exponential" not in many


@pytest.mark.parametrize(("batch", "has_counter"), [(2, False), (66, False), (100, True)])
def test_blocks_with_a_tile_each_count_no_tickets(batch, has_counter):
    def attend(*operands):
        *operands, lengths = operands
        return jaxsoftmax.dot_product_attention(*operands, key_value_seq_lengths=lengths, implementation="mosaic")

    text = kernels.lowered_for_cuda(attend, *merged_operands(batch), lowering.shaped(batch, dtype="int32"))
    (call,) = [line for line in text.splitlines() if "custom_call @mosaic_gpu" in line]
    assert ("tensor<1xi32>" in call.split("} : (")[-1]) == has_counter


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("heads", "dtype", "is_strided"),
    [(8, "bfloat16", True), (12, "bfloat16", False), (2, "float16", True), (8, "float32", False)],
)
def test_several_queries_and_their_output_are_copied_as_they_are_where_groups_allow_it(heads, dtype, is_strided):
    attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic")
    operands = [lowering.shaped(66, *shape, dtype=dtype) for shape in ((4, heads, 128), (4096, 2, 128), (4096, 2, 128))]
    text = kernels.lowered_for_cuda(attend, *operands, kernels=[lowering.NAME])
    transposed = [line for line in text.splitlines() if "stablehlo.transpose" in line and "x128x" in line]
    assert len(transposed) == (0 if is_strided else 2)


def plan_of(operands, **params):
    params = {"scale": 0.125, "window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "precision": None} | params
    return mosaic.plan(primitive.ATTENTION.problem(primitive.ATTENTION, operands, params), HOPPER)


@pytest.mark.parametrize(
    ("length", "heads", "rate", "is_few"),
    [(64, 2, 0.0, True), (65, 2, 0.0, False), (64, 16, 0.0, True), (1, 2, 0.5, False)],
)
def test_which_kernel_a_call_goes_to(length, heads, rate, is_few):
    seeds = {"seeds": lowering.shaped(2, heads, 4, dtype="uint32")} if rate else {}
    plan = plan_of(lowering.operands(length=length, heads=heads) | seeds, dropout_rate=rate)
    assert isinstance(plan, decode.DecodePlan) == is_few
    assert isinstance(plan.geometry.rows, FoldedRows) == is_few


@pytest.mark.parametrize(
    ("key_heads", "size", "dtype", "more", "is_refused"),
    [
        (8, 36, "bfloat16", {}, True),
        (4, 36, "bfloat16", {}, False),  # two rows
        (8, 40, "bfloat16", {}, False),
        (8, 36, "float32", {}, False),
        (8, 33, "float32", {}, True),
        (
            8,
            36,
            "bfloat16",
            {"value": lowering.shaped(2, 300, 8, 36, dtype="int8"), "value_scale": lowering.shaped(2, 8)},
            False,
        ),
    ],
)
def test_one_row_does_not_pay_for_padding_keys(key_heads, size, dtype, more, is_refused):
    operands = lowering.operands(length=1, keys=300, heads=8, key_heads=key_heads, size=size, dtype=dtype)
    plan = plan_of(operands | more)
    assert isinstance(plan, Refusal) == is_refused
    if is_refused:
        assert plan.reason == f"padding head sizes {size} and {size} takes longer than the reference takes for one row"
        plan = plan.plan  # where the user asks for it
    multiple = 2 if dtype == "float32" else 8
    assert plan.describe().endswith("head sizes padded before") == (size % multiple > 0)
    assert plan.geometry.query[2] == plan.geometry.key[2] == plan.geometry.value_size == -(-size // multiple) * multiple


def test_plans_of_few_queries_have_as_many_costs_as_splits():
    operands = lowering.operands((2,), length=3, keys=1000, heads=8, key_heads=2)
    kernel = plan_of(operands, window=(None, 0)).geometry
    assert (kernel.query, kernel.rows, kernel.splits) == ((12, 2, 64), FoldedRows(4, box=4), 8)
    assert kernel.costs() == (1,) * 8
    kernel = dataclasses.replace(kernel, splits=4)
    assert kernel.costs() == (1, 1, 1, 1)
    assert dataclasses.replace(kernel, window=(None, None)).costs() == (2,) * 4
    assert kernel.n_tiles == 2 * 2 * 4


def test_plans_say_how_kernels_run():
    words = "tiles of 64 rows of 4 heads by 128 keys, 3 stages, 1 consumer warpgroup, 8 splits"
    assert plan_of(lowering.operands((2,), length=3, keys=1000, heads=8, key_heads=2)).describe() == words
    words = "tiles of 128 queries by 64 keys, 1 stage, 2 consumer warpgroups, 1 split, each half of the values in its own tiles"
    assert plan_of(lowering.operands((2,), size=512)).describe() == words


# Natively.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("splits", [None, 1, 5])
def test_native_bits_of_a_sequence_do_not_depend_on_the_others(splits, monkeypatch):
    if splits:
        monkeypatch.setattr(decode, "splits_for", lambda *args: splits)
    shapes = [(5, 2, 8, 128), (5, 3000, 2, 128), (5, 3000, 2, 128)]
    attend = jax.jit(functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic", is_causal=True))

    def given(seed):
        rng = np.random.default_rng(seed)
        arrays = [jnp.asarray(rng.standard_normal(shape), jnp.bfloat16) for shape in shapes]
        return arrays, rng.integers(0, 3001, 5), rng.integers(0, 3001, 5)

    (arrays, lengths, offset), (others, *of_others) = given(1), given(2)
    own = attend(*arrays, key_value_seq_lengths=lengths, query_offset=offset)
    for place in range(5):
        mixed = [other.at[place].set(array[place]) for array, other in zip(arrays, others, strict=True)]
        for mine, other in zip((lengths, offset), of_others, strict=True):
            other[place] = mine[place]
        found = attend(*mixed, key_value_seq_lengths=of_others[0], query_offset=of_others[1])
        np.testing.assert_array_equal(found[place], own[place])
