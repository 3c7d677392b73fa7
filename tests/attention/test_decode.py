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
from jaxsoftmax._gpu.target import HOPPER
from jaxsoftmax.ops.attention import api
from jaxsoftmax.ops.attention.mosaic import decode, forward
from jaxsoftmax.ops.attention.mosaic.forward_plan import Plan
from jaxsoftmax.ops.attention.mosaic.operands import HOST
from jaxsoftmax.ops.attention.mosaic.scores import LOG2E

from .. import kernels
from . import test_mosaic_forward as lowering
from . import test_values as values

pytestmark = pytest.mark.usefixtures("compiled_quickly_all")

brute_force = settings(max_examples=200, deadline=None, derandomize=True)
FEW = [name for name in values.IN_SHAPES if name.startswith("few") and name not in ("few, 65 rows", "few, dropout")]


def played(plan, given, target):
    """What the kernel gives, as `Plan` says it."""
    del target
    named = {name: np.asarray(array) for name, array in given.items()}

    def whole(name, *axes):
        """An operand of the whole batch, with these axes of the scores `[entries, heads, rows, keys]`."""
        array = named[name]
        own = array.shape[array.ndim - len(axes) :] if axes else ()
        array = np.broadcast_to(array, (*plan.batch, *own)).reshape(-1, *own)
        return np.expand_dims(array, [axis for axis in (1, 2, 3) if axis not in axes]) if len(axes) < 3 else array

    (rows, heads, _), keys = plan.query, plan.key[0]
    if plan.page:
        table = np.clip(whole("page_table", 3), 0, plan.pages - 1)[:, 0, 0]
        for name in ("key", "value"):
            pages = named[f"{name}_pages"]
            own = np.broadcast_to(pages, (*plan.batch, *pages.shape[-4:])).reshape(-1, *pages.shape[-4:])
            named[name] = np.stack([entry[numbers] for entry, numbers in zip(own, table, strict=True)])
            named[name] = named[name].reshape(*plan.batch, -1, *pages.shape[-2:])
    for name in ("key", "value") if plan.bytes_dtype else ():
        named[name] = of_bytes(plan, named, name)
    query, key, value = (whole(name, 1, 2, 3).astype(np.float64) for name in ("query", "key", "value"))
    if plan.is_strided:
        query = query.reshape(*query.shape[:2], heads, plan.head_group, -1).swapaxes(1, 2).reshape(len(query), heads, rows, -1)
    scores = plan.scale * np.einsum("bkrh,bskh->bkrs", query, key)
    if plan.soft_cap is not None:
        scores = plan.soft_cap * np.tanh(scores / plan.soft_cap)
    own, cols, (left, right) = np.arange(rows)[:, None] // plan.head_group, np.arange(keys), plan.window
    at = own + (whole("query_offset") if "query_offset" in named else 0)
    seen = np.ones(scores.shape, bool)
    seen &= True if left is None else cols >= at - left
    seen &= True if right is None else cols <= at + right
    seen &= own < whole("query_lengths") if "query_lengths" in named else True
    seen &= cols < whole("key_lengths") if "key_lengths" in named else True
    if "query_segments" in named:
        seen &= whole("query_segments", 2) == whole("key_segments", 3)
    seen &= whole("mask", 1, 2, 3) if "mask" in named else True
    if "bias" in named:
        scores = scores + whole("bias", 1, 2, 3).astype(np.float64)
    scores, states = np.where(seen, scores, -np.inf), []

    def numbers(name, most):
        own = np.clip(whole(name), 0, most) if name in named else np.full((1, 1, 1, 1), most)
        return np.broadcast_to(own, (len(scores), 1, 1, 1)).ravel().tolist()

    facts = numbers("query_lengths", plan.queries), numbers("key_lengths", keys)
    offsets = np.broadcast_to(whole("query_offset") if "query_offset" in named else 0, (len(scores), 1, 1, 1)).ravel().tolist()
    visited = [plan.seen(lengths, 0, plan.queries, HOST, at) for *lengths, at in zip(*facts, offsets, strict=True)]
    for split in range(plan.splits):
        parts = np.array([plan.part(*entry, split, HOST) for entry in visited]).reshape(-1, 2) * plan.config.block_kv
        first, last = (parts[:, side].reshape(-1, 1, 1, 1) for side in range(2))
        part = np.where((cols >= first) & (cols < last), scores, -np.inf)
        sink = np.full((1, heads, rows, 1), -np.inf)
        if split == 0 and "sinks" in named:
            sink = whole("sinks", 1).reshape(-1, heads, rows, 1).astype(np.float64)
        m = np.maximum(np.max(part, -1, keepdims=True), sink)
        top = np.where(m == -np.inf, 0, m)
        weights, d = np.exp(part - top), np.sum(np.exp(part - top), -1, keepdims=True) + np.exp(sink - top)
        o = np.einsum("bkrs,bskh->bkrh", weights, value)
        states.append((np.where(d == 0, np.nan if plan.splits > 1 else 0, o), m[..., 0], d[..., 0]))
    o, m, d = (np.stack(parts, 2) for parts in zip(*states, strict=True))
    if plan.splits > 1:
        return [jnp.asarray(array, jnp.float32) for array in (o, m * (LOG2E / plan.unit), d)]
    with np.errstate(divide="ignore"):
        lse = m + np.log(d)
    o = (o / np.where(d == 0, 1, d)[..., None])[:, :, 0]
    if plan.is_strided:
        o = (
            o.reshape(*o.shape[:2], plan.queries, plan.head_group, -1)
            .swapaxes(1, 2)
            .reshape(len(o), plan.queries, -1, o.shape[-1])
        )
    return [jnp.asarray(o, given["query"].dtype), jnp.asarray(lse, jnp.float32)]


def of_bytes(plan, named, name):
    """Keys or values of 8 bits as the kernel multiplies them, `[*batch, keys, heads, size]`, from what has the same bits."""
    array = named[name].view(jnp.dtype(plan.bytes_dtype)).astype(np.float32)
    if (scale := named.get(f"{name}_page_scale")) is None:
        return array.astype(np.float64) * named[f"{name}_scale"][..., None, :, None]
    numbers = np.clip(named["page_table"], 0, plan.pages - 1)
    entries = np.broadcast_to(scale.view(np.float32), (*plan.batch, *scale.shape[-2:]))
    scale = np.repeat(np.take_along_axis(entries, numbers[..., None], -2), plan.page, -2)
    return (array * scale[..., None]).astype(named["query"].dtype)


def play(monkeypatch, **more):
    """The plans of calls of attention, which all go to `decode`, with NumPy in the place of the kernel; `more` are options."""
    found = []

    def run(plan, given, target, is_partial):
        found.append(plan)
        return played(plan, given, target)

    def bind(_, operands, *, return_lse, precision, deterministic, implementation, **options):
        del return_lse, precision, deterministic, implementation
        return decode.attention(operands, target=HOPPER, **options, **more)

    monkeypatch.setattr(forward, "run", run)
    monkeypatch.setattr(api, "bind", bind)
    return found


@pytest.fixture
def plans(monkeypatch):
    return play(monkeypatch)


@pytest.mark.parametrize("feature", FEW)
def test_folded_operands_and_merged_states_are_attention(plans, feature):
    given, options = values.IN_SHAPES[feature]("bfloat16")
    moving, fixed = values.split(given)
    results = values.function(options, fixed)(moving)
    values.assert_right("mosaic", results, given, options)
    (plan,) = plans
    assert len(plan.costs()) == plan.blocks_q * plan.splits
    heads, key_heads = given["query"].shape[-2], given["key"].shape[-2]
    assert plan.query[:2] == (given["query"].shape[-3] * heads // key_heads, key_heads)
    assert plan.splits > 1 or given["key"].shape[-3] <= plan.config.block_kv or feature == "few, many tiles"


def test_a_query_that_sees_nothing_in_any_split_gives_0(plans):
    given = values.arrays(length=1, keys=700, size=64, dtype="bfloat16") | {"key_value_seq_lengths": np.array([0, 700])}
    out, lse = jaxsoftmax.dot_product_attention(**given, return_residual=True)
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
    parts = [Plan.part(plan, low, low + count, split, HOST) for split in range(splits)]
    assert [block for own in parts for block in range(*own)] == list(range(low, low + count))
    assert max((end - start for start, end in parts)) <= max(0, math.ceil(count / splits))


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


@pytest.mark.parametrize("index", range(len(NAMES)), ids=lambda index: NAMES[index])
def test_every_feature_lowers_for_cuda(index):
    lengths, dtype = [(1, 4096), (3, 301), (60, 400)][index // 2 % 3], ["bfloat16", "float16", "float32"][index % 3]
    sizes = SIZES[index % 2] if dtype == "float32" else SIZES[index % 5]
    given, options = lowering.with_features([NAMES[index]], sizes, lengths, dtype)
    lowering.lower(given, **options)


@pytest.mark.parametrize("length", [3, pytest.param(50, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("sizes", "dtype"), [*((own, "bfloat16") for own in SIZES), (SIZES[1], "float32")], ids=str)
def test_everything_at_once_lowers_for_cuda(sizes, dtype, length):
    names = [name for name in lowering.EVERYTHING if name != "dropout"]
    given, options = lowering.with_features(names, sizes, (length, 301), dtype)
    lowering.lower(given | {"query_offset": lowering.shaped(2, dtype="int32")}, **options)


@pytest.mark.parametrize("length", [1, pytest.param(50, marks=pytest.mark.slow), pytest.param(64, marks=pytest.mark.slow)])
def test_every_configuration_is_lowered_and_fits(length):
    every = {8, 16, 64, 80, 128, 192, 256}
    for dtype, most in (("bfloat16", 256), ("float32", 128)):
        found = {}
        for sizes in itertools.product(*[sorted(size for size in every if size <= most)] * 2):
            found[decode.config_for(*sizes, dtype, 2 * length, (None, None))] = sizes  # two heads share a key head
        for config, sizes in found.items():
            lowering.assert_registers_fit(config)
            given, _ = lowering.with_features([], sizes, (length, 4096), dtype)
            text = lowering.lower(given)
            assert "attention_forward_mosaic" in text, config


SLABS = range(64, 257, 64)


@pytest.mark.parametrize(("size", "value_size"), [*itertools.product(SLABS, SLABS)])
def test_configurations_for_bytes_fit_into_shared_memory_and_registers(size, value_size):
    config = decode.config_for(size, value_size, "bfloat16", 4, (None, None), is_bytes=True)
    lowering.assert_registers_fit(config)
    of_key = config.block_kv * (2 * config.stages + config.byte_stages)
    queries = 2 * decode.ROWS * (size + (value_size if config.own_output else 0))
    assert of_key * (size + value_size) + queries <= 222 * 1024  # tickets, barriers and alignment take a few KiB
    assert config.own_output or size == value_size


@pytest.mark.parametrize("size", SLABS)
def test_configurations_for_pages_have_enough_registers(size):
    for rows in (4, 100, 150):
        config = decode.config_for(size, size, "bfloat16", rows, (None, None))
        lowering.assert_registers_fit(dataclasses.replace(config, registers=decode.REGISTERS_WITH_PAGES[config.consumers]))


def merged_operands(batch, keys=4096):
    return [lowering.shaped(batch, *shape) for shape in ((1, 8, 128), (keys, 2, 128), (keys, 2, 128))]


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


@pytest.mark.parametrize(
    ("length", "heads", "rate", "is_few"),
    [(64, 2, 0.0, True), (65, 2, 0.0, False), (64, 16, 0.0, True), (1, 2, 0.5, False)],
)
def test_which_kernel_a_call_goes_to(length, heads, rate, is_few, monkeypatch):
    found = []
    monkeypatch.setattr(
        decode, "attention", lambda *args, **options: found.append(decode) or forward.attention(*args, **options)
    )
    given = lowering.operands(length=length, heads=heads) | {"dropout_rng": lowering.shaped(2, dtype="uint32")}
    lowering.lower(given, dropout_rate=rate)
    assert bool(found) == is_few


def test_plans_of_few_queries_have_as_many_costs_as_splits():
    static = {"batch": (2,), "query": (12, 2, 64), "key": (1000, 2, 64), "names": frozenset(), "value_size": 64}
    options = {"scale": 1.0, "window": (None, 0), "soft_cap": None, "dropout_rate": 0.0}
    plan = Plan(**static, **options, config=decode.config_for(64, 64, jnp.bfloat16, 12, (None, 0)), head_group=4, splits=4)
    assert plan.costs() == (1, 1, 1, 1)
    assert Plan(**static, **options | {"window": (None, None)}, config=plan.config, head_group=4, splits=4).costs() == (2,) * 4
    assert plan.count == 2 * 2 * 4


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
