"""The Mosaic GPU kernel of attention, without a GPU: lowered for CUDA, and what settles its work against brute force.

What it computes is tested natively, in `test_attention.py`.
"""

import functools
import itertools
import math
import re
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental.mosaic.gpu import core
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType

from jaxsoftmax import explain
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu import schedule, wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention import dropout, key_blocks, primitive
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention.mosaic_sm90 import common, forward, forward_plan
from jaxsoftmax.ops.attention.mosaic_sm90.backward import BackwardPlan
from jaxsoftmax.ops.attention.mosaic_sm90.common import HOST, ROWS, GlobalOperand, batch_index, split_terms
from jaxsoftmax.ops.attention.mosaic_sm90.forward_formats import TermSlots, load_page_numbers
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import ForwardScores
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import (
    FoldedRows,
    ForwardConfig,
    ForwardGeometry,
    ForwardTiles,
    Pages,
    forward_config,
    sizes_on_chip,
)
from jaxsoftmax.ops.attention.mosaic_sm90.standalone import standalone_attention

from ..support import cases, kernels, oracle, xla_cuda
from ..support.attention import interpreted, values
from ..support.attention import oracle as attention_oracle
from ..support.attention.lowering import (
    CHOICES,
    EVERYTHING,
    FEATURES,
    LARGE_SIZES,
    LENGTHS,
    NAME,
    REFUSALS,
    SIZES,
    SPEC,
    a_mask,
    assert_registers_fit,
    attend,
    brute_force,
    compiled,
    forced,
    lengths,
    lower,
    operands,
    shaped,
    sharded,
    window_sees,
    with_features,
)
from ..support.emulator import emulated

# Lowered for CUDA. A feature is what it adds to operands, by batch, heads and lengths, and options.

SIZES_OF_FLOAT32 = [(64, 64), (128, 128), (8, 8), (80, 72), (64, 128), (128, 16)]


# Of each feature one program by default, which it shares with three others; the slow ones have one feature each.
SEVERAL = [
    ("causal", "soft cap", "mask", "bias of heads"),
    ("window", "lengths", "segments", "mask of keys"),
    ("window before", "sinks", "mask of queries", "bias"),
    ("window after", "dropout", "mask of one", "bias of 16 bits"),
]


def test_every_feature_is_in_one_program():
    assert sorted(itertools.chain(*SEVERAL)) == sorted(FEATURES)


@pytest.mark.parametrize(
    ("features", "lengths"),
    [(names, [*LENGTHS][index % 2]) for index, names in enumerate(SEVERAL)]
    + [pytest.param((feature,), each, marks=pytest.mark.slow) for feature in FEATURES for each in LENGTHS],
    ids=lambda value: value if isinstance(value, str) else " + ".join(value),
)
def test_every_feature_lowers_for_cuda(features, lengths):
    index = list(FEATURES).index(features[0]) + list(LENGTHS).index(lengths)  # in turn with every configuration
    given, options = with_features(features, SIZES[index % 5], LENGTHS[lengths], mosaic.DTYPES[index % 2])
    lower(given, **options)


@pytest.mark.parametrize(
    "features",
    [*SEVERAL[:2], *(pytest.param((feature,), marks=pytest.mark.slow) for feature in FEATURES)],
    ids=" + ".join,
)
@pytest.mark.parametrize("least", [1, 10**9], ids=["split before", "split in the kernel"])
def test_every_feature_lowers_for_cuda_in_float32(features, least, monkeypatch):
    monkeypatch.setattr(forward_plan, "LEAST_ROWS_TO_SPLIT", least)
    index = list(FEATURES).index(features[0])
    given, options = with_features(features, SIZES_OF_FLOAT32[index % 3], [*LENGTHS.values()][index % 2], "float32")
    lower(given, **options)
    (decision,) = explain(lambda given: forced(**given, **options), given, platform="cuda")
    assert ("split before" in decision.plan) == (least == 1)


@pytest.mark.parametrize(
    ("dtype", "index", "sizes", "features"),
    [
        # By default those with everything that have it neither below nor, in part, with some features above.
        pytest.param(dtype, index, sizes, features, marks=cases.slow_unless(features and index in own))
        for dtype, every, own in (("bfloat16", [*SIZES, *LARGE_SIZES], (2, 10, 14)), ("float32", SIZES_OF_FLOAT32, ()))
        for index, sizes in enumerate(every)
        for features in ((), EVERYTHING)
    ],
    ids=lambda value: ("everything" if value else "nothing") if value in ((), EVERYTHING) else str(value),
)
def test_every_configuration_lowers_for_cuda(dtype, index, sizes, features):
    lengths = list(LENGTHS.values())[(index + bool(features)) % 2]
    given, options = with_features(features, sizes, lengths, dtype)
    lower(given, **options)


@pytest.mark.parametrize("dtype", mosaic.DTYPES)
def test_every_configuration_is_that_of_a_size_that_is_lowered(dtype):
    every = range(8, mosaic.MAX_HEAD_SIZE[dtype] + 1, 8)
    windows = ((None, None), (None, 0))
    lowered = SIZES_OF_FLOAT32 if dtype == "float32" else [*SIZES, *LARGE_SIZES]

    def configs(pairs):
        options = [{"guesses": dtype == "bfloat16"}, {"copies_terms": dtype == "float32"}]
        return {forward_config(*pair, window, dtype, **more) for pair in pairs for window in windows for more in options}

    assert configs(itertools.product(every, every)) == configs(lowered)


@pytest.mark.parametrize(
    ("size", "tail"),
    [(8, 0), (32, 0), (64, 0), (72, 16), (80, 16), (88, 32), (96, 32), (104, 0), (128, 0), (144, 16), (224, 32), (256, 0)],
)
def test_the_last_slab_of_a_head_is_as_narrow_as_its_columns_allow(size, tail):
    geometry = make_plan(primitive.ATTENTION, operands((), 640, 999, 2, 2, size)).geometry
    wide = size - size % 64 if tail else -(-size // 64) * 64
    assert (geometry.tails, geometry.sizes) == ((tail, tail), (wide + tail, wide + tail))
    assert ("columns" in geometry.describe()) == (tail > 0)


@pytest.mark.parametrize(
    ("sizes", "on_chip", "widths"),
    [
        ((32, 32), (32, 32), (32, 32)),
        ((64, 96), (64, 96), (64, 32)),
        ((160, 160), (160, 160), (32, 32)),
        ((192, 128), (192, 128), (64, 64)),
        ((192, 160), (192, 192), (64, 64)),  # the output takes the place of the queries
        ((80, 96), (80, 96), (64, 64)),  # slabs with a tail
        ((112, 112), (128, 128), (64, 64)),
    ],
)
def test_heads_of_a_multiple_of_32_have_whole_tiles(sizes, on_chip, widths):
    def geometry_of(keys):
        return make_plan(primitive.ATTENTION, operands((), 640, keys, 2, 2, *sizes)).geometry

    geometry = geometry_of(1000)
    assert (geometry.sizes, geometry.widths) == (on_chip, widths)
    assert geometry.is_ragged == (on_chip != sizes or any(geometry.tails))
    assert geometry.widths == (64, 64) or geometry.n_products == 1
    assert geometry_of(999).widths == (64, 64)  # TMA has to clip slabs


OTHERS = [operands((), 640, 999, 2, 2, 80, dtype="float32"), *(operands((), 3, 999, 8, n, 80) for n in (2, 8))]


@pytest.mark.parametrize("given", OTHERS)
def test_only_many_rows_of_16_bits_have_a_tail(given):
    assert make_plan(primitive.ATTENTION, given).geometry.tails == (0, 0)


def test_heads_whose_output_takes_the_place_of_queries_have_equal_tails():
    def tails(size, value_size):
        types = operands((), 640, 999, 2, 2, size) | {"value": operands((), 640, 999, 2, 2, value_size)["value"]}
        return make_plan(primitive.ATTENTION, types).geometry.tails

    assert tails(80, 96) == (16, 32)  # with room of its own
    assert tails(160, 160) == (32, 32)
    assert tails(160, 144) == tails(160, 192) == (0, 0)


@pytest.mark.parametrize("dtype", mosaic.DTYPES)
def test_the_registers_of_every_configuration_fit(dtype):
    every = range(8, mosaic.MAX_HEAD_SIZE[dtype] + 1, 8)
    for sizes in itertools.product(every, every):
        size, value_size = sizes_on_chip(*sizes)
        for copies_terms in (False, True):
            config = forward_config(*sizes, dtype=dtype, copies_terms=copies_terms)
            assert (config.has_terms, config.copies_terms) == (dtype == "float32", dtype == "float32" and copies_terms)
            assert config.own_output or size >= value_size  # the output is in the place of the queries
            assert_registers_fit(config)


@pytest.mark.parametrize(
    ("length", "heads", "window", "expected"),
    [
        (640, 1, (None, None), True),
        (639, 1, (None, None), False),
        (160, 4, (None, None), True),
        (1279, 1, (None, 0), False),
        (1280, 1, (None, 0), True),
        (1280, 1, (0, None), True),
        (9999, 1, (600, 38), False),
        (9999, 1, (600, 39), True),
        (9999, 8, (1000, 0), True),
    ],
)
def test_keys_that_many_rows_see_are_split_before(length, heads, window, expected):
    given = operands((), length, 9999, heads, 1, 128, dtype="float32")
    plan = make_plan(primitive.ATTENTION, given, window=window)
    assert plan.geometry.config.copies_terms == expected
    in_16_bits = make_plan(primitive.ATTENTION, operands((), length, 9999, heads, 1, 128), window=window)
    assert not in_16_bits.geometry.config.copies_terms


@pytest.mark.parametrize("is_jitted", [False, True])
def test_terms_of_float32(is_jitted):
    x = np.random.default_rng(0).standard_normal((2, 13, 3, 50)).astype(np.float32)
    x[0, 0, 0, :6] = 0, 2.0**-140, 3.38e38, 3.4e38, np.inf, np.nan
    of_64 = functools.partial(split_terms, size=64)
    terms = (jax.jit(of_64) if is_jitted else of_64)(x)
    assert [(term.shape, term.dtype) for term in terms] == [((2, 16, 3, 64), jnp.bfloat16)] * 2
    high, low = (oracle.to64(term) for term in terms)
    with np.errstate(invalid="ignore"):  # infinity and minus infinity
        kept = (high + low)[:, :13, :, :50]
    assert np.all(np.isnan(kept[0, 0, 0, 3:6]))  # no bfloat16 is as large as 3.4e38
    kept[0, 0, 0, 3:6] = x[0, 0, 0, 3:6] = 0
    np.testing.assert_allclose(kept, x, rtol=2**-17, atol=2**-133)
    assert np.count_nonzero(low) > 0.9 * x.size
    for term in (high, low):
        assert not term[:, 13:].any()
        assert not term[..., 50:].any()


def test_products_of_terms():
    rng = np.random.default_rng(0)
    left, right = (rng.standard_normal((8, 1, 64)).astype(np.float32) for _ in range(2))
    of_left, of_right = ([oracle.to64(term)[:, 0] for term in split_terms(x, 64)] for x in (left, right))
    total = sum(a @ b.T for a, b in common.pair_terms(of_left, of_right))
    left, right = (oracle.to64(x)[:, 0] for x in (left, right))
    error = np.abs(total - left @ right.T) / (np.abs(left) @ np.abs(right).T)
    assert np.all(error <= attention_oracle.THREE_PRODUCTS)
    assert common.pair_terms([1], [2]) == [(1, 2)]


@pytest.mark.parametrize("size", [64, 50])
def test_consumers_split_their_queries(size, monkeypatch):
    """Both terms of 128 rows of a head, one from a slot; rows and columns beyond the ends are 0."""
    monkeypatch.setattr(forward_plan, "LEAST_ROWS_TO_SPLIT", 1)
    shape = 2, 200, 3, size
    plan = make_plan(primitive.ATTENTION, operands((2,), 200, 2048, 3, 3, size, dtype="float32"), window=(None, None))
    assert plan.geometry.config.copies_terms
    tile = SimpleNamespace(b=1, head=2)

    def body(query, *results, **memory):
        index = lax.axis_index("wg")
        consumer = SimpleNamespace(index=index, operands={"query": GlobalOperand(batch_index((2,), (2,)), ref=query)})
        slots = TermSlots(plan.geometry, memory)
        terms = slots.take_queries(consumer, tile, 128 + index * ROWS)
        assert len(terms) == 1
        terms += [plgpu.load(slot, layout=plgpu.Layout.WGMMA, optimized=False) for slot in slots.slabs("q", index)]
        for result, term in zip(results, terms, strict=True):
            wgmma.store_product(result, index * ROWS, 0, (ROWS, 64), term)

    def split(query):
        options = {"num_threads": 2, "thread_name": "wg", "kernel_name": "split_mosaic"}
        types = [jax.ShapeDtypeStruct((2 * ROWS, 64), jnp.bfloat16)] * 2
        return kernel_of(body, out_type=types, scratch_types={"q": plan.geometry.scratch()["q"]}, **options)(query)

    query = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    found = emulated(split, query.reshape(400, 3 * size), kernels=["split_mosaic"])
    rows = np.pad(query[1, 128:, 2], ((0, 56), (0, 0)))
    for term, expected in zip(found, split_terms(jnp.asarray(rows[:, None]), 64), strict=True):
        np.testing.assert_array_equal(term, expected[:, 0])


def test_xla_splits_in_one_program_and_keeps_the_low_term():
    xla_cuda.skip_unless_it_compiles()
    hlo = xla_cuda.compiled(functools.partial(split_terms, size=64), shaped(2, 300, 4, 50, dtype="float32"))
    assert len(re.findall(r" fusion\(", hlo)) == 1
    assert "reduce-precision" in hlo


# Shared memory.

NO_OPTIONS = {"window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "precision": None}
NO_OPTIONS |= {"deterministic_gradients": False, "scale": 1.0}
OF_TILES = {"query_lengths": (2,), "key_lengths": (2,), "query_segments": (2, 300), "key_segments": (2, 301)}
OF_TILES |= {"query_offset": (2,), "mask": (2, 1, 300, 301)}


def make_plan(operation, types, target=HOPPER, **params):
    return mosaic.plan(operation.problem(operation, types, NO_OPTIONS | params), target)


def with_shared_memory(shared_memory=HOPPER.shared_memory):
    """Gives plans for pairs of head sizes on chip and numbers of queries, with all that tiles depend on."""
    target = replace(HOPPER, shared_memory=shared_memory)
    for dtype in mosaic.DTYPES[::2]:
        sizes = range(64, mosaic.MAX_HEAD_SIZE[dtype] + 1, 64)
        for size, value_size, heads in itertools.product(sizes, sizes, (2, 4, 6)):
            for length, is_bytes in ((300, False), (16, False), (16, dtype != "float32"), (64, False)):
                given = operands((2,), length, 301, heads, 2, size, value_size, dtype)
                if is_bytes:
                    given |= {name: shaped(*given[name].shape, dtype="int8") for name in ("key", "value")}
                    given |= dict.fromkeys(("key_scale", "value_scale"), shaped(2, 2, dtype="float32"))
                given |= {
                    name: shaped(*shape[:1], *(length if n == 300 else n for n in shape[1:]), dtype="int32")
                    for name, shape in OF_TILES.items()
                }
                yield make_plan(primitive.ATTENTION, given, target)
                if length == 300 and dtype != "float32":
                    given |= {"bias": shaped(2, heads, 300, 301)}
                    for wanted, is_deterministic in ((("query",), True), (("query", "bias"), False)):
                        params = {"deterministic_gradients": is_deterministic, "soft_cap": 2.0, "wanted": wanted}
                        yield make_plan(primitive.ATTENTION_VJP, given, target, **params)


def test_every_configuration_fits_into_shared_memory():
    for plan in with_shared_memory():
        is_refused = isinstance(plan, Refusal) and plan.lacks_kernel  # gradients of large heads
        assert is_refused or plan.geometry.shared_memory <= HOPPER.shared_memory


STAGED = [(64, "bfloat16", True), (192, "float16", True), (256, "bfloat16", True)]
STAGED += [(512, "bfloat16", False), (128, "float32", False), (128, "int8", False)]


@pytest.mark.parametrize(("size", "dtype", "is_staged"), STAGED)
def test_segments_are_staged_beside_keys_that_tma_copies_whole(size, dtype, is_staged):
    length = 16 if dtype == "int8" else 512  # more queries would have 8 bits converted before the kernel
    given = operands((2,), length, 512, 2, 2, size, dtype="bfloat16" if dtype == "int8" else dtype)
    if dtype == "int8":
        given |= {name: shaped(*given[name].shape, dtype="int8") for name in ("key", "value")}
        given |= dict.fromkeys(("key_scale", "value_scale"), shaped(2, 2, dtype="float32"))
    geometry = make_plan(primitive.ATTENTION, given, window=(None, 0)).geometry
    assert not geometry.stages_segments
    given |= {"query_segments": shaped(2, length, dtype="int32"), "key_segments": shaped(2, 512, dtype="int32")}
    geometry = make_plan(primitive.ATTENTION, given, window=(None, 0)).geometry
    assert geometry.stages_segments == is_staged == ("k_segments" in geometry.scratch())
    assert geometry.shared_memory <= HOPPER.shared_memory


def test_what_does_not_fit_into_shared_memory_is_refused():
    plans = with_shared_memory(200 << 10)
    refusals = [plan for plan in plans if isinstance(plan, Refusal) and not plan.lacks_kernel]
    assert refusals
    assert all(refusal.reason.startswith("a block for head sizes ") for refusal in refusals)
    assert not any(refusal.plan for refusal in refusals)


# Named barriers: Mosaic has those from 1 on, one for each warpgroup, and kernels those from 8 on.


@pytest.mark.parametrize(
    ("names", "sizes", "lengths", "kind"),
    [
        (EVERYTHING, (128, 128), (300, 301), "forward"),
        (("lengths",), (192, 256), (256, 256), "forward"),
        (("lengths",), (512, 512), (256, 256), "forward"),
        (("causal", "segments", "mask of keys"), (80, 64), (16, 1024), "int8"),
        (EVERYTHING, (64, 64), (300, 301), "float32"),
        pytest.param(("lengths",), (128, 64), (40, 300), "float32", marks=pytest.mark.slow),
        pytest.param(("causal", "lengths"), (128, 128), (256, 256), "forward", marks=pytest.mark.slow),
        (("causal", "lengths", "sinks"), (64, 64), (128, 128), "deterministic"),
        (("causal",), (256, 256), (256, 256), "gradient"),
        pytest.param(("lengths",), (256, 192), (256, 256), "forward", marks=pytest.mark.slow),
        (("causal",), (128, 128), (256, 256), "gradient of float32"),
        pytest.param(EVERYTHING, (64, 64), (300, 301), "gradient of float32", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, (256, 256), (300, 301), "gradient", marks=pytest.mark.slow),
        pytest.param(EVERYTHING, (128, 128), (300, 301), "gradient", marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_plans_know_how_much_shared_memory_mosaic_takes_and_it_leaves_the_named_barriers_from_8_on(
    names, sizes, lengths, kind, monkeypatch
):
    planned, taken, depth = [], [], 0
    bytes_of, tree_size = schedule.bytes_of, core._smem_tree_size

    def noted(scratch):
        planned.append(bytes_of(scratch))
        return planned[-1]

    def counted(buffers):
        nonlocal depth
        depth += 1
        size = tree_size(buffers)
        depth -= 1
        taken.extend([] if depth else [size])
        return size

    monkeypatch.setattr(schedule, "bytes_of", noted)
    monkeypatch.setattr(core, "_smem_tree_size", counted)
    given, options = with_features(names, sizes, lengths, "float32" if "float32" in kind else "bfloat16")
    if kind == "int8":
        given |= {name: shaped(*given[name].shape, dtype="int8") for name in ("key", "value")}
        given |= dict.fromkeys(("key_scale", "value_scale"), shaped(2, dtype="float32"))

    def call(moving, given):
        return forced(**given, **moving, **options, deterministic_gradients=kind == "deterministic").astype(jnp.float32).sum()

    moving = {name: given.pop(name) for name in ("query", "key", "value", "bias") if name in given}
    is_gradient = kind.startswith(("gradient", "deterministic"))
    found = kernels.with_modules(jax.grad(call) if is_gradient else call, moving, given, see=kernels.named_barriers)
    assert len(planned) == len(found) == 1 + is_gradient
    assert taken == planned
    assert max(planned) <= HOPPER.shared_memory
    for barriers in found:
        assert all(8 <= numbers.start < numbers.stop <= 16 or numbers.stop <= 8 for numbers, _ in barriers)
        assert all(numbers.start >= 8 for numbers, threads in barriers if threads == 256)
    assert any(threads == 256 for barriers in found for _, threads in barriers) == (is_gradient or sizes == (128, 128))


@pytest.mark.parametrize(
    "given",
    [
        pytest.param(operands(batch=(), length=1), marks=pytest.mark.slow),
        pytest.param(operands(batch=(2, 3), heads=6, key_heads=1, keys=1), marks=pytest.mark.slow),
        operands(length=4097, keys=63, dtype="float16"),
        operands(batch=(), length=1, keys=1, heads=6, key_heads=1, dtype="float32"),
        pytest.param(operands(batch=(2, 3), length=4097, keys=4097, dtype="float32"), marks=pytest.mark.slow),
    ],
    ids=["no batch, one query", "two batch axes, one key", "many queries", "one float32 key", "many float32 queries"],
)
def test_shapes_lower_for_cuda(given):
    lower(given, is_causal=True)


@pytest.mark.usefixtures("hollow_kernels")
def test_each_call_is_one_kernel():
    given = operands(length=64, keys=64)
    both = kernels.lowered_for_cuda(
        lambda given: forced(**given) + attend(**given, is_causal=True), given, kernels=[NAME, NAME]
    )
    kernels.assert_ran(both, "mosaic")
    batched = {name: shaped(3, *a.shape) for name, a in given.items()}
    kernels.lowered_for_cuda(jax.vmap(lambda given: forced(**given)), batched, kernels=[NAME])
    scanned = lambda given: jax.lax.map(lambda given: forced(**given), given)  # noqa: E731
    kernels.lowered_for_cuda(scanned, batched, kernels=[NAME])


@pytest.mark.usefixtures("hollow_kernels")
def test_the_program_holds_no_scores_and_no_mask_that_was_not_given():
    size_of = {"query": 2 * 1024 * 4 * 64}
    features = ["lengths", "segments", "sinks", "mask of keys", "causal"]
    for more in (["bias of heads"], ["mask of queries"]):
        given, options = with_features([*features[:3], *features[4:], *more], (64, 64), (1024, 1024))
        given |= {"mask": shaped(2, 1, 1, 1024, dtype=bool)} if "mask" not in given else {}
        text = lower(given, **options)
        shapes = re.findall(r"tensor<((?:\d+x)+)", text)
        assert max(math.prod(map(int, shape.split("x")[:-1])) for shape in shapes) == size_of["query"]


# Which implementation runs, and why.


@CHOICES
@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_served_is_said_in_words(kind):
    given, options, words = REFUSALS[kind]

    def call(given, **more):
        return attend(**given, **options, **more)

    (decision,) = explain(call, given, platform="cuda")
    assert decision.implementation == "xla"
    assert re.search(words, dict(decision.refusals)["mosaic"])
    with pytest.raises(NotImplementedError, match=words):
        explain(functools.partial(call, implementation="mosaic"), given, platform="cuda")


@CHOICES
def test_rows_count_with_the_batch_of_every_operand():
    given = operands(batch=(), length=2**14, heads=2)
    lengths = shaped(2**16, dtype="int32")
    found = explain(
        lambda given, lengths: jax.vmap(lambda own: attend(**given, key_value_seq_lengths=own))(lengths),
        given,
        lengths,
        platform="cuda",
    )
    assert "2147483648" in dict(found[0].refusals)["mosaic"]


@CHOICES
def test_segments_of_64_bits_are_refused():
    with jax.enable_x64(True):
        given = operands() | {"query_segment_ids": shaped(2, 300, dtype="int64")}
        (decision,) = explain(lambda given: attend(**given), given, platform="cuda")
    assert dict(decision.refusals)["mosaic"] == "segment ids must have at most 32 bits, got int64"


@pytest.mark.usefixtures("hollow_kernels")
def test_the_limits_themselves_are_served():
    for size, value_size in ((1, 1), (512, 512), (1, 512)):
        given = operands((1,), 16, 1, 1, 1, size, value_size, dtype="float16")
        kernels.assert_ran(explain(lambda given: attend(**given, scale=1e-3), given, platform="cuda"), "mosaic")
    given = operands((1,), 2, 1, 1, 1, 128, 128, dtype="float32")
    kernels.assert_ran(explain(lambda given: attend(**given), given, platform="cuda"), "mosaic")


@CHOICES
@pytest.mark.parametrize(("length", "key_heads"), [(1, 4), (4, 1)])
def test_few_queries_run_on_the_kernel_in_float32_too(length, key_heads):
    for dtype in ("bfloat16", "float32"):
        given = operands((2,), length, 300, 4, key_heads, dtype=dtype)
        kernels.assert_ran(explain(lambda given: attend(**given), given, platform="cuda"), "mosaic")


@CHOICES
@pytest.mark.parametrize("name", ["bias", "key_value_seq_lengths"])
def test_a_map_over_nothing_has_no_kernel(name):
    given = operands(batch=())
    mapped = {"bias": shaped(0, 4, 300, 300), "key_value_seq_lengths": shaped(0, dtype="int32")}[name]
    found = explain(lambda given, of: jax.vmap(lambda one: attend(**given, **{name: one}))(of), given, mapped, platform="cuda")
    kernels.assert_ran(found, "xla")
    assert "in a batch of (0,)" in str(found[0])


ALGORITHM = lax.DotAlgorithm(np.float32, np.float32, np.float32)


PRECISE = ["highest", "float32", lax.Precision.HIGHEST, ("high", "highest"), "F32_F32_F32", "BF16_BF16_F32_X6", ALGORITHM]
PRECISE += [lax.DotAlgorithmPreset.F64_F64_F64, lax.DotAlgorithmPreset.TF32_TF32_F32_X3]
NOT_PRECISE = [None, "default", "high", "bfloat16", "tensorfloat32", lax.Precision.HIGH, ("high", "default")]
NOT_PRECISE += ["BF16_BF16_F32_X3", lax.DotAlgorithmPreset.TF32_TF32_F32, lax.DotAlgorithmPreset.DEFAULT]


@CHOICES
@pytest.mark.parametrize("precision", [*PRECISE, *NOT_PRECISE], ids=str)
def test_precision_says_whether_float32_has_a_kernel(precision):
    given = [operands(dtype=dtype) for dtype in ("float32", "bfloat16")]
    found = explain(lambda given: [attend(**own, precision=precision) for own in given], given, platform="cuda")
    assert [decision.implementation for decision in found] == ["xla" if precision in PRECISE else "mosaic", "mosaic"]


@CHOICES
def test_the_default_precision_is_that_of_the_context():
    given = operands(dtype="float32")
    f = jax.jit(lambda given: attend(**given))
    for _ in range(2):  # also where it is cached
        kernels.assert_ran(explain(f, given, platform="cuda"), "mosaic")
        with jax.default_matmul_precision("highest"):
            kernels.assert_ran(explain(f, given, platform="cuda"), "xla")
        with jax.default_matmul_precision("BF16_BF16_F32_X3"):
            kernels.assert_ran(explain(f, given, platform="cuda"), "mosaic")


@CHOICES
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_refused(capability):
    (decision,) = explain(lambda given: attend(**given), operands(), gpu=capability)
    assert dict(decision.refusals)["mosaic"] == f"it needs compute capability 9.x, got cuda {capability}"
    assert decision.implementation != "mosaic"


def test_elsewhere_it_is_refused():
    (decision,) = explain(lambda given: attend(**given), operands(), platform="cpu")
    assert dict(decision.refusals)["mosaic"] == "it runs on cuda, not on cpu"


# Meshes.


ON_MESH = operands((8,), 64, 64, 4, 2, 64)


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("devices", [True, False], ids=["devices", "abstract"])
def test_explicit_axes_lower_to_a_kernel_for_shards(devices):
    kinds = (AxisType.Explicit,) * 2
    if devices:
        mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=jax.devices("cpu"))
    else:
        mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=kinds)
    with jax.set_mesh(mesh) if devices else jax.sharding.use_abstract_mesh(mesh):
        shards = sharded(ON_MESH, mesh, SPEC)
        text = lower(shards, is_causal=True)
        assert "tensor<2x64x2x64xbf16>" in text  # of a batch of 8 and 4 heads
        (decision,) = explain(lambda given: attend(**given), shards, platform="cuda")
        assert decision.implementation == "mosaic"
        assert decision.operands == ("bfloat16[2,64,2,64]", "bfloat16[2,64,1,64]", "bfloat16[2,64,1,64]")


@pytest.mark.usefixtures("hollow_kernels")
def test_automatic_axes_leave_it_to_the_compiler_which_shards_a_kernel_gets():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu"))
    with jax.set_mesh(mesh):
        shards = sharded(ON_MESH, mesh, SPEC)
        (decision,) = explain(lambda given: attend(**given), shards, platform="cuda")
        assert decision.implementation == "mosaic"
        assert decision.operands[0] == "bfloat16[8,64,4,64]"
        text = kernels.lowered_for_cuda(lambda given: forced(**given), shards, kernels=[])
        assert "CustomSPMDPartitioning" in text
        mapped = jax.shard_map(lambda given: forced(**given), in_specs=(SPEC,), out_specs=SPEC)
        assert "tensor<2x64x2x64xbf16>" in kernels.lowered_for_cuda(mapped, shards, kernels=[NAME])


# The table of schedule.

costs = st.lists(st.integers(1, 40), min_size=1, max_size=12).map(tuple)


@brute_force
@given(costs, st.integers(1, 9), st.integers(1, 4), st.integers(1, 140))
def test_a_table_hands_out_each_tile_once_and_no_block_works_much_longer(costs, heads, group, threads):
    count = heads * len(costs)
    threads = min(threads, count)
    table = schedule.schedule(costs, heads, group, threads)
    counts = table[:, 0]
    assert table.dtype == np.int32
    assert table.shape == (threads, 2 + counts.max())
    own = [row[1 : 1 + row[0]] for row in table]
    np.testing.assert_array_equal(np.sort(np.concatenate(own)), np.arange(count))
    cost = np.asarray(costs) + schedule.TILE_COST
    loads = [cost[numbers % len(costs)].sum() for numbers in own]
    assert max(loads) <= np.mean(loads) + cost.max()
    assert counts.min() >= 1  # what a block reads first is a tile's


@brute_force
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 20), st.integers(1, 140))
def test_blocks_that_share_tiles_end_together(steps, whole, cut, blocks):
    tiles = whole + cut
    table, end = schedule.schedule_cut(steps, tiles, cut, blocks)
    assert table.dtype == np.int32
    found, loads = [], []
    for count, *items in table.tolist():
        loads.append(0)
        for item, following in itertools.pairwise(items[: count + 1]):
            place, stop = (item * steps, (item + 1) * steps) if item < tiles else (item - tiles, following - tiles)
            place, stop = (place, stop) if item < tiles else (place + whole * steps, stop + whole * steps)
            assert 0 < stop - place <= steps
            assert place // steps == (stop - 1) // steps < tiles
            assert (item < tiles) == (place // steps < whole)
            found += range(place, stop)
            loads[-1] += stop - place + schedule.TILE_COST
    np.testing.assert_array_equal(np.sort(found), np.arange(tiles * steps))
    assert max(loads) <= end
    longest = -(-whole // blocks) * (steps + schedule.TILE_COST)
    assert end == longest or end <= np.mean(loads) + schedule.TILE_COST + 3  # half a step less leaves none room for a slice


def test_tiles_of_three_heads_of_4096_tokens_let_blocks_end_together():
    costs = (64,) * 32  # 4 x 4096 tokens, 16 heads of 128
    assert last_over_mean(costs, 64, 1, 132) > 1.03
    table, end = schedule.schedule_cut(64, 2048, 96, 132)
    assert end < 1.002 * 2048 * (64 + schedule.TILE_COST) / 132
    assert max(table[:, 0]) < 20  # few slices, each of which starts and ends


def assert_long_ones_come_first(numbers):
    pairs = [(number // 4 // 2, -(number % 4)) for number in numbers]  # a group of heads after another
    assert pairs == sorted(pairs)


def test_long_tiles_come_first():
    for row in schedule.schedule((1, 2, 3, 4), 6, 2, 5):
        assert_long_ones_come_first(row[1 : 1 + row[0]])
    order = schedule.order((1, 2, 3, 4), 6, 2)
    assert_long_ones_come_first(order)
    assert order.dtype == np.int32
    np.testing.assert_array_equal(np.sort(order), np.arange(24))


def last_over_mean(costs, heads, group, blocks):
    ends = []
    for count, *numbers in schedule.schedule(costs, heads, group, blocks).tolist():
        ends.append(sum(costs[number % len(costs)] + schedule.TILE_COST for number in numbers[:count]))
    return max(ends) / np.mean(ends)


@brute_force
@given(costs, st.integers(1, 9), st.sampled_from([1, 2, 4, 8]), st.integers(1, 140))
def test_tiles_of_as_few_heads_come_together_as_let_blocks_end_evenly(costs, heads, group, blocks):
    blocks = min(blocks, heads * len(costs))
    found = schedule._balanced(costs, heads, group, blocks)
    choices = [group * 2**i for i in range(8) if i == 0 or group * 2**i < 2 * heads]
    ends = {choice: last_over_mean(costs, heads, choice, blocks) for choice in choices}
    assert found in choices
    most = max(schedule.MOST_UNBALANCED, 1.005 * min(ends.values()))
    assert ends[found] <= most * (1 + 1e-9) or group >= 2 * heads
    assert all(ends[choice] > schedule.MOST_UNBALANCED - 1e-9 for choice in choices if choice < found)


def test_grouped_heads_of_causal_attention_end_evenly_backward():
    costs = tuple(8 * (32 - i) for i in range(32))  # 4096 tokens, four query heads to a key head
    assert last_over_mean(costs, 16, 1, 132) > 1.27
    assert schedule._balanced(costs, 16, 1, 132) == 4
    assert last_over_mean(costs, 16, 4, 132) < 1.002


@pytest.mark.parametrize("heads", [20, 36, 60, 84, 100, 116, 148])
def test_heads_of_causal_attention_that_groups_do_not_divide_end_evenly(heads):
    costs = tuple(2 * (32 - i) for i in range(32))  # 4096 tokens
    assert schedule._balanced(costs, heads, 8, 132) == 8
    assert last_over_mean(costs, heads, 8, 132) < 1.01
    groups = [number // 32 for number in schedule.order(costs, heads, 8).tolist()]
    assert set(groups[: heads % 8 * 32]) == set(range(heads % 8))


def table_shapes(given, **options):
    """The shapes of the tables of tiles in a program."""
    return re.findall(r"stablehlo.constant dense<.*> : tensor<(\w+)xi32>", lower(given, **options))


@pytest.mark.usefixtures("hollow_kernels")
def test_more_tiles_than_a_table_may_have_go_without_one(monkeypatch):
    given = operands((2,), 1000, 1000, 2, 2)  # 4 heads of 6 blocks of 192 queries
    monkeypatch.setattr(schedule, "MAX_SCHEDULED", 24)
    lengths = np.array([1000, 10], np.int32)
    with kernels.target(multiprocessors=10):
        assert table_shapes(given) == ["10x5"]
        assert table_shapes(given, key_value_seq_lengths=lengths)[-1] == "24"
        monkeypatch.setattr(schedule, "MAX_SCHEDULED", 23)
        assert table_shapes(given) == []
        assert "24" not in table_shapes(given, key_value_seq_lengths=lengths)


@pytest.mark.usefixtures("hollow_kernels")
def test_very_many_tiles_lower_for_cuda():
    assert table_shapes(operands((2**17 + 1,), 64, 64, 1, 1)) == []


# Which key blocks a tile visits.


def plan_of(length, keys, window, config, batch=(2,), names=(), **more):
    shapes = {"batch": batch, "query": (length, 4, 64), "key": (keys, 2, 64), "value_size": 64}
    options = {"scale": 0.125, "window": window, "soft_cap": None, "dropout_rate": 0.0, "multiprocessors": 132}
    return ForwardGeometry(**shapes, **options, dtype=jnp.dtype(jnp.bfloat16), names=frozenset(names), config=config, **more)


sides = st.none() | st.integers(0, 40) | st.integers(0, 700)
CONFIGS = [ForwardConfig(1, 64, 2), ForwardConfig(3, 128, 2), ForwardConfig(2, 96, 2)]
configs = st.sampled_from(CONFIGS)
# Queries, keys, and blocks of them: few, for what is compiled for each.
problems = st.sampled_from([*zip((1, 450, 333), (300, 700, 97), CONFIGS, strict=True)])


def blocks_of(scores, plan, reduce, rows=None):
    """Reduces the scores of each block of queries, or of `rows` rows, and each key block.

    Rows and keys beyond the last do not change a result.
    """
    rows, cols = rows or plan.block_q, plan.config.block_kv
    length, keys = scores.shape
    padded = np.pad(scores, [(0, -length % rows), (0, -keys % cols)], constant_values=reduce is np.all)
    return reduce(padded.reshape(-(-length // rows), rows, -(-keys // cols), cols), (1, 3))


@brute_force
@given(lengths, lengths, st.tuples(sides, sides), configs)
def test_costs_count_the_key_blocks_that_any_query_sees(length, keys, window, config):
    plan = plan_of(length, keys, window, config)
    seen = blocks_of(window_sees(length, keys, window), plan, np.any)
    assert plan.costs() == tuple(np.maximum(seen.sum(1), 1))
    for block, row in enumerate(seen):
        low, high = plan.seen((length, keys), block * plan.block_q, plan.block_q, HOST)
        if row.any():
            np.testing.assert_array_equal(np.flatnonzero(row), np.arange(low, high))
        else:
            assert high - low <= 1


jitted_ranges = jax.jit(key_blocks.find_segment_spans, static_argnames=("block_q", "block_kv"))


def ranges_of(plan, query_segments, key_segments):
    return jitted_ranges(query_segments, key_segments, block_q=plan.block_q, block_kv=plan.config.block_kv)


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def shown_by(mask, lengths, block_q, block_kv):
    seen = key_blocks.mark_visible(mask, lengths, block_q, block_kv)
    return seen, key_blocks.measure_mask(mask, lengths, block_q, block_kv), key_blocks.find_ends(seen)


@compiled
@given(problems, st.data())
def test_blocks_that_a_mask_shows(problem, data):
    length, keys, config = problem
    plan = plan_of(length, keys, (None, None), config)
    mask = a_mask(data, length, keys)
    batched = mask[*[None] * config.consumers]  # any number of axes
    seen, reach, ends = map(np.asarray, shown_by(batched, (length, keys), plan.block_q, config.block_kv))
    assert seen.shape == (*batched.shape[:-3], plan.blocks_q, plan.blocks_kv)
    expected = blocks_of(np.broadcast_to(mask, (length, keys)), plan, np.any)
    np.testing.assert_array_equal(seen.reshape(expected.shape), expected)
    reach = -(-reach.reshape(-1, 2) // config.block_kv)
    for row, (low, high), own in zip(expected, ends.reshape(-1, 2), reach, strict=True):
        there = np.flatnonzero(row)
        assert (low, high) == ((there[0], there[-1] + 1) if there.size else (plan.blocks_kv, 0))
        assert (plan.blocks_kv - own[0], own[1]) == (low, high)


def test_masks_of_heads_are_read_once():
    assert key_blocks.mark_visible(np.ones((1, 2, 8, 8), bool), (8, 8), 128, 128) is None
    assert key_blocks.mark_visible(np.ones((2, 1, 8, 8), bool), (8, 8), 128, 128) is not None


def tiles_of(plan, arrays):
    """The tiles of a kernel whose operands are arrays in place of refs."""
    return ForwardTiles(plan, {name: GlobalOperand(lambda b: b, ref=jnp.asarray(array)) for name, array in arrays.items()})


offsets = st.integers(-50, 750)


@settings(compiled, max_examples=6)
@given(lengths, lengths, st.tuples(sides, sides), configs, st.data())
def test_steps_hold_all_that_a_query_sees_and_are_masked_where_one_does_not(length, keys, window, config, data):
    plan, arrays, offset = plan_of(length, keys, window, config, (1,)), {}, 0
    if data.draw(st.booleans()):
        offset = data.draw(offsets)
        arrays["query_offset"] = np.asarray([offset], np.int32)
    seen = window_sees(length, keys, window, offset)
    if data.draw(st.booleans()):
        arrays["query_lengths"] = np.asarray([data.draw(st.integers(0, length))], np.int32)
        seen[arrays["query_lengths"][0] :] = False
    if data.draw(st.booleans()):
        arrays["key_lengths"] = np.asarray([data.draw(st.integers(0, keys))], np.int32)
        seen[:, arrays["key_lengths"][0] :] = False
    if data.draw(st.booleans()):
        sizes = data.draw(st.lists(st.integers(1, 300), min_size=1, max_size=6))
        ids = np.pad(np.repeat(np.arange(len(sizes), dtype=np.int32), sizes), (0, 700), constant_values=len(sizes))
        arrays["ranges"] = ranges_of(plan, ids[None, :length], ids[None, :keys])
        seen &= ids[:length, None] == ids[None, :keys]
    if data.draw(st.booleans()):
        mask = a_mask(data, length, keys)
        arrays["mask_reach"] = key_blocks.measure_mask(mask[None, None], (length, keys), plan.block_q, config.block_kv)
        # What a mask hides within a block is hidden in every step, banded or not.
        shown = blocks_of(np.broadcast_to(mask, seen.shape), plan, np.any, ROWS)
    else:
        shown = True
    any_seen, all_seen = (blocks_of(seen, plan, reduce, ROWS) for reduce in (np.any, np.all))
    if keys % config.block_kv:
        all_seen[:, -1] = False  # beyond the end there is nothing to see
    any_seen &= shown
    tiles, is_banded = tiles_of(replace(plan, names=frozenset(arrays)), arrays), []

    @jax.jit
    @jax.vmap
    def steps_of(block, warpgroup):
        first = block * plan.block_q + warpgroup * ROWS
        tile = tiles.tile(block, *tiles.look_up(block))
        assert tile.is_empty is False
        low, high = tiles.seen(tile.lengths, tile.offset, first, ROWS)
        high = jnp.clip(high, tile.low + 1, tile.high)
        low = jnp.clip(low, tile.low, high - 1)
        is_banded.append(ForwardScores(tiles.geometry, tiles.operands, tile, first, None).is_banded)
        return tile.low, tile.high, low, high, *tiles.seen_whole(tile, first, ROWS)

    groups = range(plan.blocks_q * config.consumers)
    found = steps_of(*(jnp.asarray(a, jnp.int32) for a in np.divmod(groups, config.consumers)))
    for group in groups[: len(any_seen)]:
        bounds = (int(np.broadcast_to(own, len(groups))[group]) for own in found)
        tile_low, tile_high, low, high, whole_from, whole_to = bounds
        assert 0 <= tile_low <= low < high <= tile_high <= plan.blocks_kv
        assert set(np.flatnonzero(any_seen[group])) <= set(range(low, high))
        whole = range(whole_from, whole_to) if is_banded[0] else range(low, high)
        assert all(all_seen[group, block] for block in range(low, high) if block in whole)


EDGES = [(None, 62), (None, 63), (None, 126), (0, 64), (62, None), (63, None), (64, 0), (127, None)]


@pytest.mark.parametrize("offset", [0, -1])
@pytest.mark.parametrize("window", EDGES, ids=str)
def test_blocks_at_the_edges_of_a_window_are_visited_and_masked(window, offset):
    """One block more where a query sees one key more, with blocks of 64 queries and of 64 keys."""
    plan = replace(plan_of(192, 320, window, ForwardConfig(1, 64, 2), (1,)), names=frozenset({"query_offset"}))
    tiles = tiles_of(plan, {"query_offset": np.array([offset], np.int32)})
    seen = window_sees(192, 320, window, offset)
    any_seen, all_seen = (blocks_of(seen, plan, reduce, ROWS) for reduce in (np.any, np.all))
    tile = tiles.tile(jnp.int32(0), jnp.int32(offset))
    for group in range(3):
        rows = jnp.int32(group * ROWS), ROWS
        found = map(int, (*tiles.seen(tile.lengths, tile.offset, *rows), *tiles.seen_whole(tile, *rows)))
        for (low, high), expected in zip(itertools.batched(found, 2), (any_seen[group], all_seen[group]), strict=True):
            np.testing.assert_array_equal([low <= block < high for block in range(plan.blocks_kv)], expected)


@settings(compiled, max_examples=6)
@given(st.integers(1, 16), st.integers(1, 4), lengths, st.tuples(sides, sides), st.integers(1, 12), st.data())
def test_splits_hold_each_key_block_that_a_row_of_any_head_sees_once(queries, group, keys, window, most_splits, data):
    config = ForwardConfig(1, 64, 2)
    size = math.ceil(math.ceil(keys / 64) / most_splits)  # key blocks of a split
    splits = math.ceil(math.ceil(keys / 64) / size)
    arrays, offset = {}, data.draw(offsets)
    arrays["query_offset"] = np.asarray([offset], np.int32)
    arrays["query_lengths"] = np.asarray([data.draw(st.integers(0, queries))], np.int32)
    arrays["key_lengths"] = np.asarray([data.draw(st.integers(0, keys))], np.int32)
    seen = window_sees(queries, keys, window, offset)
    seen[arrays["query_lengths"][0] :], seen[:, arrays["key_lengths"][0] :] = False, False
    if has_sinks := data.draw(st.booleans()):
        arrays["sinks"] = np.zeros((1, 4 * queries), np.float32)
    plan = plan_of(queries * group, keys, window, config, (1,), arrays, rows=FoldedRows(group), splits=splits)
    any_seen, all_seen = (blocks_of(np.repeat(seen, group, 0), plan, reduce)[0] for reduce in (np.any, np.all))
    if keys % 64:
        all_seen[-1] = False
    tiles, positions = tiles_of(plan, arrays), []

    @jax.jit
    @jax.vmap
    def steps_of(number):
        tile = tiles.tile(number, *tiles.look_up(number))
        high = tile.high if tile.is_empty is False else jnp.where(tile.is_empty, tile.low, tile.high)
        scores = ForwardScores(plan, tiles.operands, tile, jnp.int32(0), None)
        positions.append(scores.is_banded)
        whole = tiles.seen_whole(tile, jnp.int32(0), ROWS)
        return tile.b, tile.head, tile.split, tile.low, high, *whole, scores.last_key

    heads = plan.query[1]
    found = zip(*map(np.asarray, steps_of(jnp.arange(heads * splits))), strict=True)
    assert plan.n_tiles == heads * splits == heads * len(plan.costs())
    parts: list[list[range]] = [[] for _ in range(heads)]
    for number, (b, head, split, low, high, whole_from, whole_to, last_key) in enumerate(found):
        assert (b, head, split) == (0, *divmod(number, splits))
        assert 0 <= low <= high <= plan.blocks_kv
        assert low < high or (splits > 1 and not (has_sinks and split == 0))
        parts[head].append(range(low, high))
        assert all(all_seen[block] for block in range(low, high) if whole_from <= block < whole_to)
        np.testing.assert_array_equal(last_key[: queries * group], np.repeat(last_key[: queries * group : group], group))
    for own in parts:
        blocks = [block for part in own for block in part]
        assert blocks == list(range(min(blocks, default=0), max(blocks, default=-1) + 1))
        assert set(np.flatnonzero(any_seen)) <= set(blocks)
        assert max(map(len, own)) <= max(1, math.ceil(len(blocks) / splits))
    assert positions[0]


@pytest.mark.parametrize(("splits", "names"), [(1, ()), (3, ()), (3, ("key_lengths",))])
@pytest.mark.parametrize("value_size", [512, 264, 320])
def test_tiles_of_large_values_have_each_column_of_each_row_once(value_size, splits, names):
    arrays = {name: np.full(2, 500, np.int32) for name in names}
    plan = plan_of(300, 500, (None, None), forward_config(512, value_size), names=arrays)
    plan = replace(plan, splits=splits, value_size=value_size)
    entries, heads, halves = 2, 4, 2
    assert plan.n_tiles == entries * heads * halves * len(plan.costs()) == entries * heads * halves * plan.blocks_q * splits
    tiles, seen = tiles_of(plan, arrays), np.zeros((entries, heads, plan.blocks_q, splits, value_size), int)
    for number in range(plan.n_tiles):
        tile = tiles.tile(jnp.int32(number), *tiles.look_up(jnp.int32(number)))
        column = int(tile.column)
        seen[tile.b, tile.head, tile.block, tile.split, column : column + plan.sizes[1]] += 1
    assert np.all(seen == 1)


@pytest.mark.parametrize("page", [8, 16, 64, 256])
def test_the_pages_of_a_key_block(page):
    """Of sequences of no key, fewer than none, some, and more than the table has pages for; the last block sticks out of it."""
    rng = np.random.default_rng(0)
    most, found = -(-200 // page), np.array([0, -(2**31), 1, page, page + 1, 200, 2**31 - 1], np.int32)
    table = rng.integers(-3, 12, (len(found), most)).astype(np.int32)
    more = {"query": (4, 2, 64), "rows": FoldedRows(4), "pages": Pages(page, 9)}
    plan = plan_of(4, most * page, (None, None), ForwardConfig(1, 128, 2), (len(found),), {"key_lengths", "page_table"})
    plan = replace(plan, **more)
    tiles = tiles_of(plan, {"key_lengths": found, "page_table": table})
    for b, length in enumerate(np.clip(found, 0, most * page)):
        tile = tiles.tile(jnp.int32(2 * b), *tiles.look_up(jnp.int32(2 * b)))
        assert int(tile.lengths[1]) == length
        last = max(int(length) - 1, 0) // page
        for block in range(plan.blocks_kv):
            places = [min(block * 128 // page + i, last) for i in range(max(1, 128 // page))]
            numbers = list(map(int, load_page_numbers(plan, tiles.operands, tile, block)))
            assert numbers == [np.clip(table[b, at], 0, 8) for at in places]


@compiled
@given(problems, st.integers(1, 9), st.booleans(), st.integers(0, 99))
def test_ranges_hold_every_key_block_of_a_common_segment(problem, count, is_sorted, seed):
    length, keys, config = problem
    plan, rng = plan_of(length, keys, (None, None), config), np.random.default_rng(seed)
    ids = [rng.integers(-2, count, (2, size)).astype(np.int32) for size in (length, keys)]
    query_ids, key_ids = [np.sort(own, -1) for own in ids] if is_sorted else ids
    ranges = np.asarray(ranges_of(plan, query_ids, key_ids))
    assert (ranges.shape, ranges.dtype) == ((2, plan.blocks_q, 4), np.int32)
    for b in range(2):
        pairs = query_ids[b][:, None] == key_ids[b][None, :]
        rows = zip(blocks_of(pairs, plan, np.any), blocks_of(pairs, plan, np.all), ranges[b], strict=True)
        for some, every, (low, high, whole_from, whole_to) in rows:
            assert set(np.flatnonzero(some)) <= set(range(low, high))
            assert set(range(whole_from, whole_to)) <= set(np.flatnonzero(every))


@compiled
@given(problems, st.lists(st.integers(1, 300), min_size=1, max_size=6))
def test_ranges_of_sorted_segments_end_at_blocks_with_a_common_one(problem, sizes):
    """Where each segment has queries and keys, nothing else is visited at either end."""
    length, keys, config = problem
    plan = plan_of(length, keys, (None, None), config)
    ids = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    ids = np.pad(ids, (0, 700), constant_values=len(sizes))
    query_ids, key_ids = ids[:length], ids[:keys]
    ranges = np.asarray(ranges_of(plan, query_ids[None], key_ids[None]))[0]
    same = blocks_of(query_ids[:, None] == key_ids[None, :], plan, np.any)
    every = blocks_of(query_ids[:, None] == key_ids[None, :], plan, np.all)
    for some, all_, (low, high, whole_from, whole_to) in zip(same, every, ranges, strict=True):
        if some.any():
            assert some[low]
            assert some[high - 1]
        else:
            assert low >= high
        if all_.any():
            assert (whole_from, whole_to) == (np.flatnonzero(all_)[0], np.flatnonzero(all_)[-1] + 1)
        else:
            assert whole_from >= whole_to


@pytest.mark.parametrize("batch", [(), (5,), (2, 3), (2, 3, 4), (1, 3)], ids=str)
def test_the_index_of_a_batch_entry_in_an_operand_that_is_not_whole(batch):
    for own in itertools.product(*((1, size) for size in batch)):
        for shape in {own, own[1:] if own[:1] == (1,) else own}:
            expected = np.broadcast_to(np.arange(math.prod(shape)).reshape(shape), batch).reshape(-1)
            index = batch_index(batch, shape)
            actual = [int(index(jnp.int32(b))) for b in range(math.prod(batch))]
            np.testing.assert_array_equal(actual, expected)


# What is done to scores in registers, either way round.


@pytest.mark.parametrize("is_transposed", [False, True])
def test_dropout_of_a_block_is_that_of_its_places(is_transposed, monkeypatch):
    monkeypatch.setattr(plgpu, "broadcasted_iota", lambda dtype, shape, axis, layout: lax.broadcasted_iota(dtype, shape, axis))
    seeds = np.random.default_rng(0).integers(0, 2**32, (2, 3, 4), np.uint32)
    shape, (first, block) = (64, 16), (128, 5)
    found = common.dropout_keeps(jnp.asarray(seeds), 1, 2, first, block, shape, 0.5, is_transposed=is_transposed)
    rows, cols = (
        np.uint32(start) + np.arange(size, dtype=np.uint32)
        for start, size in zip((first, block * shape[1]), shape, strict=True)
    )
    queries, keys = (cols[None], rows[:, None]) if is_transposed else (rows[:, None], cols[None])
    expected = dropout.keep(*seeds[1, 2, :2], queries + seeds[1, 2, 2], keys + seeds[1, 2, 3], 0.5)
    np.testing.assert_array_equal(found, expected)


def test_what_other_segments_have_is_hidden():
    s, rows, cols = np.ones((3, 4), np.float32), np.array([0, 1, 2], np.int32), np.array([1, 1, 0, 5], np.int32)
    np.testing.assert_array_equal(common.in_one_segment(s, rows, cols) > 0, rows[:, None] == cols)
    np.testing.assert_array_equal(common.in_one_segment(s, rows, cols, hidden=0), rows[:, None] == cols)


# The interpreter.

WHY_NOT = {
    "ping-pong": "warpgroups hand the tensor cores over to each other in PTX",
    "rows": "the log-sum-exp is stored in PTX, as there may be any number of rows",
}


@pytest.mark.parametrize("kind", WHY_NOT)
def test_what_the_interpreter_refuses_it_still_refuses(kind):
    config = replace(forward_config(64, 64), ping_pong=kind == "ping-pong")
    array = np.ones((1, 64, 1, 64), jnp.bfloat16)
    plan = make_plan(primitive.ATTENTION, dict.fromkeys(("query", "key", "value"), jax.typeof(array)), dropout_rate=0.5)
    plan = forward.ForwardPlan(replace(plan.geometry, config=config, dropout_rate=0.0))  # many queries, not few
    with pytest.raises(ValueError, match="does not support `inline_mgpu`"):
        kernels.interpreted(lambda array: plan.run(query=array, key=array, value=array), array)


SQUARE = {"batch": (2,), "length": 384, "keys": 384, "heads": 2, "key_heads": 1}  # that tiles of 128 and of 192 divide
INTERPRETED = {
    "plain": values.case(SQUARE),
    "causal": values.case(SQUARE, is_causal=True),
    "window": values.case(SQUARE, local_window_size=(70, 30)),
    "segments, causal": values.case(
        SQUARE, lambda: {f"{name}_segment_ids": values.segments(384, 0) for name in ("query", "key_value")}, is_causal=True
    ),
    "segments shuffled": values.case(
        SQUARE, lambda: {f"{name}_segment_ids": values.ids(384, i, "shuffled") for i, name in enumerate(("query", "key_value"))}
    ),
    "segments that entries share": values.case(
        SQUARE, lambda: {f"{name}_segment_ids": values.segments(384, 0, (1,)) for name in ("query", "key_value")}
    ),
    "lengths": values.case(SQUARE, values.lengths_of([384, 65], [300, 129]), is_causal=True),
    "soft cap": values.case(SQUARE, logits_soft_cap=3.0),
    "sinks": values.case(SQUARE, lambda: {"sinks": values.random((2,), "bias")}, is_causal=True),
}


@pytest.mark.parametrize("multiprocessors", [1, 3])
@pytest.mark.parametrize(
    ("kind", "size", "dtype"),
    [
        pytest.param(kind, size, dtype, marks=cases.slow_unless((place + step) % 3 == 0))
        for place, kind in enumerate(INTERPRETED)
        for step, (size, dtype) in enumerate([(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float16")])
    ],
)
def test_interpreted_values(kind, size, dtype, multiprocessors):
    check_interpreted(kind, size, size, dtype, multiprocessors)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param(kind, sizes, marks=cases.slow_unless(sizes[0] == sizes[1] and (place + step) % 3 == 0))
        for place, kind in enumerate(INTERPRETED)
        for step, sizes in enumerate([(80, 80), (88, 88), (152, 152), (80, 96), (88, 64), (64, 80), (216, 216)])
    ],
    ids=str,
)
def test_interpreted_values_of_heads_with_a_tail(kind, sizes):
    check_interpreted(kind, *sizes, "bfloat16", 1)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        pytest.param(kind, sizes, marks=cases.slow_unless((place + step) % 6 == 0))
        for place, kind in enumerate(INTERPRETED)
        for step, sizes in enumerate([(96, 96), (160, 160), (224, 224), (32, 32), (64, 96), (96, 64)])
    ],
    ids=str,
)
def test_interpreted_values_of_heads_of_a_multiple_of_32(kind, sizes):
    check_interpreted(kind, *sizes, "bfloat16", 1)


def check_interpreted(kind, size, value_size, dtype, multiprocessors):
    given, options = INTERPRETED[kind](dtype)
    given |= values.arrays(**SQUARE, size=size, value_size=value_size, dtype=dtype)
    window = options.get("local_window_size", (None, 0 if options.get("is_causal") else None))
    params = NO_OPTIONS | {"window": window, "soft_cap": options.get("logits_soft_cap"), "scale": size**-0.5}
    out, lse = interpreted.attention(replace(HOPPER, multiprocessors=multiprocessors), interpreted.named(given), **params)
    values.assert_right("mosaic", (out, jnp.swapaxes(lse, -1, -2)), given, options)


# The kernels without the primitive.


@pytest.mark.usefixtures("hollow_kernels")
def test_standalone_attention_is_the_kernels_in_both_directions():
    given = operands()

    def call(query, key, value):
        return standalone_attention(query, key, value, 0.125, (None, 0))

    def pull(query, key, value):
        out, vjp = jax.vjp(call, query, key, value)
        return vjp(out)

    text = kernels.lowered_for_cuda(pull, *given.values())
    assert sorted(kernels.kernel_names(text)) == ["attention_backward_mosaic", NAME]
    jaxpr = str(jax.make_jaxpr(call)(*given.values()))
    assert "custom_vjp_call" in jaxpr
    assert "dot_product_attention" not in jaxpr


PARTS = [("bfloat16", 64, 64), ("bfloat16", 128, 128), ("float16", 72, 40), ("bfloat16", 256, 200), ("float32", 64, 64)]
PARTS += [("bfloat16", 80, 96), ("bfloat16", 192, 128)]
PARTS += [("bfloat16", 36, 50), ("float32", 36, 33), ("bfloat16", 512, 512), ("bfloat16", 320, 300)]


def of_parts(query, keys, vectors):
    run = functools.partial(values.run_planned, mosaic, primitive.ATTENTION, HOPPER)
    options = {"scale": 0.1, "window": (None, None), "soft_cap": None, "dropout_rate": 0.0}
    found = (None, None)
    for i, (key, value) in enumerate(zip(keys, vectors, strict=True)):
        part = {"query": query, "key": key, "value": value, "query_offset": jnp.zeros(query.shape[:1], jnp.int32)}
        part |= {"initial_out": found[0], "initial_lse": found[1]}
        found = run(part, **options, is_partial=i + 1 < len(keys))
    return found


@pytest.mark.parametrize(
    ("dtype", "size", "value_size"), [pytest.param(*p, marks=[] if p is PARTS[1] else pytest.mark.slow) for p in PARTS]
)
def test_rows_that_go_on_from_other_keys_lower_for_cuda(dtype, size, value_size):
    keys, values = [shaped(2, 77, 2, size, dtype=dtype)] * 3, [shaped(2, 77, 2, value_size, dtype=dtype)] * 3
    kernels.lowered_for_cuda(of_parts, shaped(2, 130, 4, size, dtype=dtype), keys, values, kernels=[NAME] * 3)


@pytest.mark.parametrize("length", [130, 1])
def test_plans_of_steps_of_a_ring_follow_from_types_alone(length):
    given = {name: jax.typeof(array) for name, array in values.arrays(length=length, dtype=jnp.bfloat16).items()}
    batch, _, heads, size = given["query"].shape
    out, lse = jax.typeof(jnp.zeros((batch, length, heads, size))), jax.typeof(jnp.zeros((batch, heads, length)))
    forward_plans, backward_plans = (
        [make_plan(operation, given | initial, is_partial=True, wanted=("query", "key")) for _ in range(2)]
        for operation, initial in (
            (primitive.ATTENTION, {"initial_out": out, "initial_lse": lse}),
            (primitive.ATTENTION_VJP, {"initial_d_query": out}),
        )
    )
    for kind, (plan, same) in ((forward.ForwardPlan, forward_plans), (BackwardPlan, backward_plans)):
        assert type(plan) is kind
        assert plan == same
        assert hash(plan) == hash(same)


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(("length", "expected"), [(4096, [True, True]), (1, [False])])
def test_steps_before_the_last_come_in_waves_but_not_those_that_fold_queries(length, expected, monkeypatch):
    found, waves = [], schedule.waves
    monkeypatch.setattr(schedule, "waves", lambda *args: found.append(waves(*args)) or found[-1])
    keys = [shaped(2, 256, 4, 64)] * 3
    kernels.lowered_for_cuda(of_parts, shaped(2, length, 8, 64), keys, keys, kernels=[NAME] * 3)
    assert [count > 1 for count in found] == expected  # of one query only the first step folds


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("multiprocessors", [132, 2])  # two, which have many tiles by ticket, get waves of blocks of threads
@pytest.mark.parametrize("soft_cap", [None, 5.0])
@pytest.mark.parametrize(("dtype", "size", "value_size"), PARTS)
def test_rows_that_go_on_from_other_keys_are_within_the_budget_of_all(dtype, size, value_size, soft_cap, multiprocessors):
    given = values.arrays(length=130, keys=231, size=size, value_size=value_size, dtype=dtype)
    wanted = ("query", "key", "value") if max(size, value_size) <= 256 else ()
    target, has_offset = replace(HOPPER, multiprocessors=multiprocessors), multiprocessors == 2
    values.check_parts("mosaic", mosaic, given, soft_cap, wanted=wanted, has_offset=has_offset, target=target)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("multiprocessors", [132, 2])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (128, 128), (36, 33)])
def test_rows_go_on_from_other_keys_that_are_split_before(size, value_size, multiprocessors, monkeypatch):
    monkeypatch.setattr(forward_plan, "LEAST_ROWS_TO_SPLIT", 1)
    given = values.arrays(length=130, keys=231, size=size, value_size=value_size)
    target, has_offset = replace(HOPPER, multiprocessors=multiprocessors), multiprocessors == 2
    values.check_parts("mosaic", mosaic, given, None, has_offset=has_offset, target=target)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [{}, {"window": (None, 0)}, {"soft_cap": 5.0}], ids=str)
def test_standalone_attention_has_the_values_of_the_op(options):
    rng = np.random.default_rng(0)
    given = {name: jnp.asarray(rng.standard_normal(a.shape), a.dtype) for name, a in operands().items()}

    def pull(f):
        return jax.jit(lambda given: jax.vjp(lambda given: f(**given), given))(given)

    alone, vjp_alone = pull(functools.partial(standalone_attention, scale=0.125, **options))
    names = {"window": "local_window_size", "soft_cap": "logits_soft_cap"}
    renamed = {names[name]: option for name, option in options.items()}
    out, vjp = pull(functools.partial(forced, scale=0.125, **renamed))
    np.testing.assert_array_equal(alone, out)
    dout, dlse = np.asarray(out), np.zeros(out.shape[:-1])
    arrays = [np.asarray(given[name]) for name in ("query", "key", "value")]
    truths = attention_oracle.cotangents(dout, dlse, *arrays, scale=0.125, **renamed, tight=True)
    for pulled in (vjp_alone(out)[0], vjp(out)[0]):
        for name, cotangent in pulled.items():
            assert oracle.error(cotangent, truths[name]) <= 1, name
