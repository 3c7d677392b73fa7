"""Score and mask functions with few queries on the Mosaic GPU kernel of attention: folded rows, splits, and pages.

`test_functions.py` has the evaluator on folded rows. Here the kernel runs in an interpreter, as it does there.
"""

import contextlib
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.mosaic_sm90 import decode
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import make_tables
from jaxsoftmax.ops.attention.score_functions import functions_and_operands

from ..core import compiled
from ..support import cases, kernels, xla_cuda
from ..support.attention import interpreted, lowering, values
from ..support.attention.functions import NO_OPTIONS, assert_close, expected_of, planned
from ..support.attention.paged import gathered, paged

KEYS, CACHED = 512, np.array([400, 130], np.int32)  # keys, and those before the queries of each of two sequences
RNG = np.random.default_rng(0)
SLOPES = jnp.asarray(0.25 / (1 + np.arange(16)), jnp.bfloat16)
IDS = jnp.asarray(np.sort(RNG.integers(0, 5, KEYS)), jnp.int32)
SHIFTS = jnp.asarray(RNG.standard_normal((16, 64)), jnp.float32)
ANCESTORS = jnp.asarray(np.tril(RNG.random((16, 16)) < 0.5) | np.eye(16, dtype=bool))
STARTS = jnp.asarray(CACHED)
paged_attend = jaxsoftmax.cache.paged_attention


def tree(batch, head, query, key):
    """Shows a draft token the cache and its ancestors: queries and keys count from the first token of the cache."""
    query, key = query - STARTS[batch], key - STARTS[batch]
    return (key < 0) | (ANCESTORS[query, jnp.maximum(key, 0)] & (key <= query))


CALLS = {
    "causal": {"mask_mod": lambda b, h, q, k: q >= k},
    "alibi": {"score_mod": lambda s, b, h, q, k: s - SLOPES[h].astype(s.dtype) * jnp.abs(q - k).astype(s.dtype)},
    "tree": {"mask_mod": tree},
    "documents": {"mask_mod": lambda b, h, q, k: (IDS[q] == IDS[k]) & (q >= k)},
    "window": {"mask_mod": lambda b, h, q, k: jnp.abs(q - k) < 70},
    "one split": {"mask_mod": lambda b, h, q, k: (k >= 128) & (k < 250)},
    "heads": {"mask_mod": lambda b, h, q, k: (h % 2 == 0) | (k % 3 == 1)},
    "nothing": {"mask_mod": lambda b, h, q, k: (q < 0) & (k < 0)},
    "queries and heads": {"score_mod": lambda s, b, h, q, k: s + SHIFTS[h, q % 64].astype(s.dtype) * (k % 7).astype(s.dtype)},
    "hiding": {"score_mod": lambda s, b, h, q, k: jnp.where((k + h) % 5 <= b, s, -jnp.inf)},
}
CALLS["both"] = CALLS["alibi"] | CALLS["tree"]
COUNTS = [(length, group) for length in (1, 4, 16) for group in (1, 4, 8)]  # of queries, and of the heads that share keys
interpreted_alike = functools.partial(interpreted.attention, HOPPER)


def given_for(length, group, dtype="bfloat16", **more):
    shapes = {"batch": (2,), "length": length, "keys": KEYS, "heads": 2 * group, "key_heads": 2, "size": 64}
    return values.arrays(**shapes | more, dtype=dtype) | {"query_offset": CACHED}


def run(operands, params, **more):
    out, lse = interpreted_alike(operands, **params, **more)
    return out, jnp.swapaxes(lse, -1, -2)


def with_splits(monkeypatch, splits):
    monkeypatch.setattr(decode, "splits_for", lambda *args: splits)


@pytest.mark.parametrize(
    ("name", "length", "group"),
    [
        pytest.param(name, *count, marks=cases.slow_unless((i + 2 * j) % 9 == 0))
        for i, name in enumerate(CALLS)
        for j, count in enumerate(COUNTS)
    ],
)
def test_the_kernel_interpreted(name, length, group, monkeypatch):
    with_splits(monkeypatch, 1 + (length + group) % 3)
    given = given_for(length, group)
    assert_close(run(*planned(given, CALLS[name], {})), expected_of(given, CALLS[name], {}), "bfloat16")


def test_examples_with_tables_of_their_own(monkeypatch):
    """Under `jax.vmap` a table may have an example axis."""
    with_splits(monkeypatch, 2)
    given = given_for(4, 4)
    operands, params = planned(given, CALLS["alibi"], {})
    tables = jnp.stack([SLOPES, 3 * SLOPES])
    out, lse = run(operands | {"table_0": tables[:, None]}, params)
    for i, table in enumerate(tables):
        alone = {name: x[i] for name, x in given.items()}

        def score_mod(s, b, h, q, k, table=table):
            return s - table[h].astype(s.dtype) * jnp.abs(q - k).astype(s.dtype)

        assert_close((out[i], lse[i]), expected_of(alone, {"score_mod": score_mod}, {}), "bfloat16")


@pytest.mark.parametrize("splits", [1, 2])
def test_key_blocks_that_no_query_sees_are_not_read(splits, monkeypatch):
    with_splits(monkeypatch, splits)
    given = {name: np.array(x) for name, x in given_for(4, 4).items()}
    expected = expected_of(given, CALLS["one split"], {})
    for name in ("key", "value"):
        given[name][:, :128] = given[name][:, 256:] = np.nan
    assert_close(run(*planned(given, CALLS["one split"], {})), expected, "bfloat16")


def test_bits_of_a_sequence_do_not_depend_on_the_others(monkeypatch):
    """Sequences decide by what they see where their own splits begin."""
    with_splits(monkeypatch, 3)
    given = given_for(4, 4)
    operands, params = planned(given, CALLS["tree"], {})
    own = run(operands, params)
    changed = given | {"query": 1 - given["query"], "key": given["key"] + 1, "query_offset": np.array([400, 7], np.int32)}
    changed = {name: np.concatenate([given[name][:1], changed[name][1:]]) for name in given}
    others, _ = planned(changed, CALLS["tree"], {})
    for one, other in zip(own, run(others, params), strict=True):
        np.testing.assert_array_equal(one[0], other[0])
        assert not np.array_equal(one[1], other[1])


@pytest.mark.parametrize("page", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_pages_interpreted(page, monkeypatch):
    """Keys have their position in the sequence, wherever their pages are."""
    with_splits(monkeypatch, 2)
    arrays = paged(batch=(2,), length=4, page=page, most=KEYS // page, pages=40)
    arrays["key_value_seq_lengths"] = CACHED + 4
    given = gathered(arrays, query_offset=CACHED)
    functions, operands = functions_and_operands("f", jnp.float32, CALLS["both"]["score_mod"], tree, (2, 8))
    names = {"query": "query", "page_table": "page_table", "key_value_seq_lengths": "key_lengths"}
    operands |= {name: jnp.asarray(arrays[of]) for of, name in names.items()} | {"query_offset": jnp.asarray(CACHED)}
    operands |= {name: jnp.asarray(arrays[name])[None] for name in ("key_pages", "value_pages")}
    params = NO_OPTIONS | {"window": (None, None), "soft_cap": None, "scale": 0.125} | functions
    found = run(operands, params, operation=primitive.PAGED)
    assert_close(found, expected_of(given, CALLS["both"], {}), "bfloat16")


# Plans.


def plan_of(functions, length, group, dtype="bfloat16", **more):
    given = given_for(length, group, dtype, **more)
    operands, params = planned(given, functions, {})
    types = {name: jax.typeof(operand) for name, operand in operands.items()}
    plan: Any = mosaic.plan(primitive.ATTENTION.problem(primitive.ATTENTION, types, params), HOPPER)
    return plan, operands


def test_plans_of_few_queries():
    plan, _ = plan_of(CALLS["both"], 4, 4, keys=4096)
    assert type(plan) is decode.DecodePlan
    assert plan.describe().startswith("tiles of 64 rows of 4 heads by 128 keys, 3 stages, 1 consumer warpgroup, 32 splits")
    assert plan.describe().endswith("score_mod and mask_mod in registers")
    assert plan.geometry.costs() == (1,) * 32
    plan, _ = plan_of(CALLS["alibi"], 65, 4)
    assert type(plan) is not decode.DecodePlan


@pytest.mark.parametrize("name", ["causal", "tree", "documents", "window", "one split", "nothing"])
@pytest.mark.parametrize(("length", "group"), [(1, 8), (16, 3), (64, 5), (64, 8)])
def test_spans_of_folded_rows(name, length, group):
    """Each block of rows visits all key blocks that the function shows to one of its rows, and masks those hidden in part."""
    plan, operands = plan_of(CALLS[name], length, group)
    geometry = plan.geometry
    ranges = np.broadcast_to(make_tables(geometry, operands)["ranges"], (2, geometry.blocks_q, 4))
    places = jnp.arange(length)[:, None], jnp.arange(KEYS)[None]
    for b in range(2):
        seen = np.asarray(CALLS[name]["mask_mod"](b, 0, places[0] + CACHED[b], places[1]))
        blocks = np.repeat(np.broadcast_to(seen, (length, KEYS)), group, 0).reshape(
            length * group, -1, geometry.config.block_kv
        )
        for block, (start, stop, whole_from, whole_to) in enumerate(ranges[b]):
            rows = blocks[block * geometry.block_q :][: geometry.block_q]
            shown, index = rows.any((0, 2)), np.arange(blocks.shape[1])
            assert np.all(~shown | ((start <= index) & (index < stop)))
            assert np.all(rows.all((0, 2))[whole_from:whole_to])
    if name == "one split":
        assert np.all(ranges[..., :2] == (1, 2))


# Pages, on the reference, and lowered for CUDA.


def last(arrays, length):
    return arrays["key_value_seq_lengths"] - length


@pytest.mark.parametrize("name", ["alibi", "window", "tree"])
def test_functions_with_pages(name):
    """Queries are the last tokens, unless an offset says otherwise."""
    arrays = paged(batch=(2,), length=4, dtype="float32", size=16)
    arrays["key_value_seq_lengths"] = CACHED % 300 + 4
    out, lse = paged_attend(**arrays, **CALLS[name], return_lse=True)
    expected = expected_of(gathered(arrays, query_offset=last(arrays, 4)), CALLS[name], {})
    assert_close((out, lse), expected, "float32")
    offset = {"query_offset": np.array([40, 7], np.int32)}
    out, lse = paged_attend(**arrays, **offset, **CALLS[name], return_lse=True)
    assert_close((out, lse), expected_of(gathered(arrays, **offset), CALLS[name], {}), "float32")


def test_derivatives_and_maps_with_pages():
    arrays = paged(batch=(2,), length=4, dtype="float32", size=16)
    arrays["key_value_seq_lengths"] = CACHED % 300 + 4

    def loss(attend, given, table):
        def score_mod(s, b, h, q, k):
            return s + table[h, (q - k) % 64] * (b + 1).astype(s.dtype)

        return jnp.sum(attend(**given, score_mod=score_mod) ** 2)

    of_pages = functools.partial(loss, paged_attend, arrays)
    dense = functools.partial(loss, jaxsoftmax.dot_product_attention, gathered(arrays, query_offset=last(arrays, 4)))
    found, expected = (jax.value_and_grad(f)(SHIFTS) for f in (of_pages, dense))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4), found, expected)
    several = jnp.stack([SHIFTS, 2 * SHIFTS])
    np.testing.assert_allclose(jax.vmap(of_pages)(several), [of_pages(table) for table in several], rtol=1e-5)


@pytest.mark.parametrize("sharded", ["heads", "batch"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_pages_on_two_devices(kind, sharded):
    """Heads and batch entries have their numbers in the whole arrays."""
    arrays = paged(batch=(2,), length=4, dtype="float32", size=16)
    arrays["key_value_seq_lengths"] = CACHED % 300 + 4
    attend = jax.jit(functools.partial(paged_attend, **CALLS["both"]))
    expected = attend(**arrays)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    of_heads = {"query": P(None, None, "x"), "key_pages": P(None, None, "x"), "value_pages": P(None, None, "x")}
    of_batch = {"query": P("x"), "page_table": P("x"), "key_value_seq_lengths": P("x")}
    specs = dict.fromkeys(arrays, P()) | (of_heads if sharded == "heads" else of_batch)
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        np.testing.assert_allclose(attend(**placed), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("byte", [None, "int8"])
@pytest.mark.parametrize(("length", "group", "page"), [(1, 8, 16), (4, 4, 64), (16, 3, 256)])
def test_pages_are_read_where_they_are(length, group, page, byte):
    of_pages = lowering.shaped(100, page, 2, 64, dtype=byte or "bfloat16")
    types = {"query": lowering.shaped(2, length, 2 * group, 64), "key_pages": of_pages, "value_pages": of_pages}
    types |= {"page_table": lowering.shaped(2, 512 // page, dtype="int32")}
    types |= {"key_value_seq_lengths": lowering.shaped(2, dtype="int32")}
    types |= {f"{name}_scale": lowering.shaped(2, dtype="float32") for name in ("key", "value") if byte}
    forced = functools.partial(paged_attend, implementation="mosaic", **CALLS["alibi"], **CALLS["causal"])
    text = kernels.lowered_for_cuda(lambda types: forced(**types), types, kernels=[lowering.NAME])
    assert "stablehlo.gather" not in text
    (decision,) = jaxsoftmax.explain(lambda types: forced(**types), types, platform="cuda")
    assert f"pages of {page} keys" in decision.plan
    assert decision.plan.endswith("score_mod and mask_mod in registers")


# Compiled by ptxas.

COMPILED = [("score function", "one", 128, None), ("both functions", "few in place", 64, None)]
EVERY_COMPILED = [
    (feature, kind, size, byte)
    for feature in ("score function", "mask function", "both functions")
    for kind in ("one", "few in place", "few", "few of 3 tiles")
    for size in (64, 128, 256)
    for byte in (None, "int8")
]


@pytest.mark.parametrize(
    "call", cases.quick(*COMPILED, slow=[call for call in EVERY_COMPILED if call not in COMPILED]), ids=str
)
def test_kernels_compile(call):
    xla_cuda.skip_unless_it_compiles()
    feature, kind, size, byte = call
    (case,) = compiled._forward("bfloat16", size, size, feature, kind, compiled.QUERIES[kind], byte)
    for row in compiled.compile_case(case):
        assert not row.error
        assert not row.notes


# Natively.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("name", "counts", "kind"),
    cases.in_turns(13, CALLS, COUNTS, [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32")]),
)
def test_native_values(name, counts, kind):
    (length, group), (size, dtype) = counts, kind
    given = given_for(length, group, dtype, size=size)

    @jax.jit
    def attend(given):
        options = {"implementation": "mosaic", "precision": "high", "return_residual": True}
        return jaxsoftmax.dot_product_attention(**given, **CALLS[name], **options)

    assert_close(attend(given), expected_of(given, CALLS[name], {}), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "page", "byte"), cases.in_turns(7, CALLS, [8, 64, 256], [None, "int8", "float8_e4m3fn"]))
def test_native_values_of_pages(name, page, byte):
    arrays = paged(batch=(2,), length=4, page=page, most=KEYS // page)
    arrays["key_value_seq_lengths"], scales = CACHED + 4, {}
    for kind in ("key", "value") if byte else ():
        scales[f"{kind}_scale"] = np.array([0.03, 0.05], np.float32)
        pages = jaxsoftmax.cache.quantize(arrays[f"{kind}_pages"], scales[f"{kind}_scale"], byte)
        arrays[f"{kind}_pages"] = np.asarray(pages)
    wide = gathered(arrays, query_offset=CACHED)
    for kind in ("key", "value") if byte else ():
        wide[kind] = wide[kind].astype(np.float64) * scales[f"{kind}_scale"][:, None]
    attend = jax.jit(functools.partial(paged_attend, **CALLS[name], implementation="mosaic", return_lse=True))
    assert_close(attend(**arrays, **scales), expected_of(wide, CALLS[name], {}), "bfloat16")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("splits", [None, 1, 3])
def test_native_bits_of_a_sequence_do_not_depend_on_the_others(splits, monkeypatch):
    if splits:
        with_splits(monkeypatch, splits)
    attend = jax.jit(functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic", **CALLS["both"]))
    given = given_for(4, 4)
    changed = given | {"query": 1 - given["query"], "key": given["key"] + 1, "query_offset": np.array([400, 7], np.int32)}
    mixed = {name: np.concatenate([given[name][:1], changed[name][1:]]) for name in given}
    np.testing.assert_array_equal(attend(**given)[0], attend(**mixed)[0])
