"""Attention to a cache in pages, and how pages are written."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax.ops.attention.mosaic_sm90 import decode

from ..support import cases, kernels, oracle
from ..support.attention import oracle as attention_oracle
from ..support.attention import played
from ..support.attention.lowering import NAME, shaped
from ..support.attention.paged import FEATURES, attend, check, gathered, jitted, paged

quick = settings(max_examples=20, deadline=None, derandomize=True)


@pytest.mark.parametrize(
    ("feature", "dtype"),
    [
        pytest.param(feature, dtype, marks=cases.slow_unless((i + j) % 3 == 0))  # by default of a dtype in turn
        for i, feature in enumerate(FEATURES)
        for j, dtype in enumerate(cases.DTYPES)
    ],
)
def test_the_reference(feature, dtype):
    check(paged(dtype=dtype, size=16), feature, call=functools.partial(jitted, precision="highest"))


@pytest.mark.parametrize(
    "sizes",
    [
        {"batch": ()},
        {"batch": (2, 2)},
        {"page": 1},
        {"page": 5, "pages": 1},
        {"most": 1},
        {"length": 9, "key_heads": 8},
        {"value_size": 24},
        {"length": 0},
        {"most": 0},
    ],
    ids=str,
)
def test_sizes(sizes):
    check(paged(**{"dtype": "float32", "size": 16} | sizes), "causal", call=functools.partial(jitted, precision="highest"))


@pytest.mark.parametrize(
    ("feature", "page"), [*((feature, 16) for feature in FEATURES), *(("causal", page) for page in (8, 128, 256))]
)
def test_the_kernel_as_numpy_plays_it(feature, page, monkeypatch):
    plans = played.play(monkeypatch)
    check(paged(page=page, most=1 + 1000 // page), feature, "mosaic")
    (plan,) = plans
    assert plan.pages.size == page
    assert plan.pages.count_in_block(plan.config.block_kv) == max(1, plan.config.block_kv // page)
    assert plan.splits > 1


# Transformations.


def test_derivatives_are_those_of_gathered_keys():
    arrays = paged(dtype="float32", size=16)
    moving = {name: arrays.pop(name) for name in ("query", "key_pages", "value_pages")}

    def loss(moving):
        return jnp.sum(attend(**moving, **arrays, is_causal=True) ** 2)

    def gathered_loss(moving):
        given = gathered(moving | arrays | {name: np.zeros(moving[name].shape) for name in ("key_pages", "value_pages")})
        for name in ("key", "value"):
            pages = moving[f"{name}_pages"][np.clip(arrays["page_table"], 0, 39)]
            given[name] = pages.reshape(given[name].shape)
        offset = np.clip(arrays["key_value_seq_lengths"], 0, 320) - 2
        return jnp.sum(jaxsoftmax.dot_product_attention(**given, is_causal=True, query_offset=offset) ** 2)

    for derivative in (jax.grad, lambda f: lambda x: jax.jvp(f, (x,), (x,))):
        actual, expected = (jax.jit(derivative(f))(moving) for f in (loss, gathered_loss))
        for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "mapped", [("query", "page_table", "key_value_seq_lengths"), ("key_pages", "value_pages"), ("page_table",)], ids=str
)
def test_vmap(mapped):
    several = [paged(dtype="float32", size=16, seed=seed) for seed in range(3)]
    fixed = {name: array for name, array in several[0].items() if name not in mapped}
    stacked = {name: np.stack([arrays[name] for arrays in several]) for name in mapped}
    actual = jax.vmap(lambda own: attend(**fixed, **own, is_causal=True))(stacked)
    for arrays, one in zip(several, actual, strict=True):
        expected = attend(**fixed, **{name: arrays[name] for name in mapped}, is_causal=True)
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


def value_and_derivatives(given):
    moving = {name: given[name] for name in ("query", "key_pages", "value_pages")}
    fixed = {name: given[name] for name in ("page_table", "key_value_seq_lengths")}
    out, vjp = jax.vjp(lambda moving: attend(**moving, **fixed, is_causal=True), moving)
    return out, vjp(out)[0]


@functools.cache
def on_one_device():
    """Operands, and what `value_and_derivatives` of them gives."""
    arrays = paged(batch=(4,), dtype="float32", size=16)
    return arrays, jax.tree.map(np.asarray, jax.jit(value_and_derivatives)(arrays))


@pytest.mark.parametrize("sharded", ["heads", "batch"])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_values_and_derivatives_on_two_devices(kind, sharded):
    arrays, expected = on_one_device()
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    of_heads = {"query": P(None, None, "x"), "key_pages": P(None, None, "x"), "value_pages": P(None, None, "x")}
    of_batch = {"query": P("x"), "page_table": P("x"), "key_value_seq_lengths": P("x")}
    specs = dict.fromkeys(arrays, P()) | (of_heads if sharded == "heads" else of_batch)
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}

    with jax.set_mesh(mesh) if kind == AxisType.Explicit else contextlib.nullcontext():
        actual = jax.jit(value_and_derivatives)(placed)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize(
    "kinds", cases.quick((AxisType.Auto, AxisType.Explicit, AxisType.Auto), slow=[(AxisType.Explicit,) * 3])
)
def test_derivatives_in_a_shard_map_that_leaves_explicit_axes(kinds, check_vma):
    arrays, _ = on_one_device()

    def moved(function, query, values, *fixed):
        """The values, tangents, cotangents, and the transpose in values, which is linear."""
        out, tangent = jax.jvp(lambda *moving: function(*moving, *fixed), (query, values), (query, values))
        cotangents = jax.vjp(lambda *moving: function(*moving, *fixed), query, values)[1](out)
        return out, tangent, cotangents, jax.linear_transpose(lambda values: function(query, values, *fixed), values)(out)

    def attended(query, values, keys, table, lengths):
        return attend(query=query, value_pages=values, key_pages=keys, page_table=table, key_value_seq_lengths=lengths)

    operands = [arrays[name] for name in ("query", "value_pages", "key_pages", "page_table", "key_value_seq_lengths")]
    mesh = jax.make_mesh((2, 2, 2), ("rows", "heads", "others"), axis_types=kinds)
    with jax.set_mesh(mesh):
        of_heads = NamedSharding(mesh, P(None, None, "heads"))
        placed = [jax.device_put(each, of_heads) for each in operands[:3]] + operands[3:]
        specs = P("rows"), P(), P(), P("rows"), P("rows")
        mapped = jax.shard_map(attended, in_specs=specs, out_specs=P("rows"), axis_names={"rows"}, check_vma=check_vma)
        actual = jax.jit(functools.partial(moved, mapped))(*placed)
    expected = jax.jit(functools.partial(moved, attended))(*operands)
    for one, other in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_a_traced_scale():
    arrays = paged(dtype="float32", size=16)
    found, slope = jax.value_and_grad(lambda scale: jnp.sum(attend(**arrays, scale=scale)))(0.3)
    plus, minus = (float(jnp.sum(attend(**arrays, scale=0.3 + step))) for step in (1e-2, -1e-2))
    np.testing.assert_allclose(found, jnp.sum(attend(**arrays, scale=0.3)), rtol=1e-5)
    np.testing.assert_allclose(slope, (plus - minus) / 2e-2, rtol=5e-2)


def test_the_transpose_in_values():
    arrays = paged(dtype="float32", size=16)
    values = arrays.pop("value_pages")
    linear = functools.partial(lambda values: attend(value_pages=values, **arrays))
    out = linear(values)
    (pulled,) = jax.linear_transpose(linear, values)(out)
    np.testing.assert_allclose(jnp.vdot(pulled, values), jnp.vdot(out, out), rtol=1e-4)


# Lowered for CUDA.


def types(page=16, dtype="bfloat16", batch=2, length=1, heads=8, size=64, most=30, pages=100):
    of_pages = shaped(pages, page, 2, size, dtype=dtype)
    table, lengths = shaped(batch, most, dtype="int32"), shaped(batch, dtype="int32")
    return shaped(batch, length, heads, size, dtype=dtype), of_pages, of_pages, table, lengths


def lower(*types, **options):
    forced = functools.partial(attend, implementation="mosaic", is_causal=True, **options)
    return kernels.lowered_for_cuda(forced, *types, kernels=[NAME])


@pytest.mark.parametrize(
    ("page", "size", "heads"),
    [  # by default each page and each configuration once; rows that TMA clips, and whole ones, in turn
        pytest.param(page, size, heads, marks=cases.slow_unless(index % 5 == place and heads == (8, 16)[index % 2]))
        for index, page in enumerate(decode.PAGE_SIZES)
        for place, size in enumerate([64, 128, 192, 256, 80])
        for heads in (8, 16)
    ]
    + [(8, 512, 8)],
)
def test_pages_are_read_where_they_are(page, size, heads):
    assert "stablehlo.gather" not in lower(*types(page, heads=heads, size=size))


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("other", [{"page": 24}, {"dtype": "float32"}, {"length": 65}, {"size": 36}], ids=str)
def test_what_is_gathered_before(other):
    assert "stablehlo.gather" in lower(*types(**other))


@pytest.mark.usefixtures("hollow_kernels")
def test_what_runs():
    assert [d.implementation for d in explain(attend, *types(), platform="cuda")] == ["mosaic"]
    assert [d.primitive for d in explain(attend, *types(), platform="cuda")] == ["paged_attention"]
    (decision,) = explain(attend, *types(size=20), platform="cuda")
    assert decision.implementation == "mosaic"
    assert decision.plan.endswith("pages gathered before, head sizes padded before")


# Natively.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize(
    "sizes",
    [
        *({"page": page, "most": 1 + 700 // page} for page in decode.PAGE_SIZES),
        *({"size": size, "length": length} for size in (128, 256, 80, 512) for length in (1, 4)),
        {"heads": 16, "length": 4, "page": 32},
        {"heads": 2, "length": 1, "batch": (2, 30)},
        {"page": 24},
        {"size": 36},
        {"length": 40},
        {"dtype": "float16", "page": 8},
        {"dtype": "float32"},
    ],
    ids=str,
)
def test_native_values(sizes, feature):
    check(
        paged(**sizes),
        feature,
        "mosaic",
        call=functools.partial(jitted, implementation="mosaic"),
    )


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("page", [16, 256])
def test_native_what_is_behind_the_last_page_is_not_read(page):
    arrays = paged(page=page, most=1 + 700 // page, pages=100)
    lengths = np.array([page + 1, 3 * page, 1], np.int32)
    needed = {
        number for table, length in zip(arrays["page_table"], lengths, strict=True) for number in table[: -(-length // page)]
    }
    others = [number for number in range(100) if number not in np.clip(list(needed), 0, 99)]
    for name in ("key_pages", "value_pages"):
        arrays[name][others] = np.nan
    out = jax.jit(functools.partial(attend, implementation="mosaic"))(**arrays | {"key_value_seq_lengths": lengths})
    assert np.all(np.isfinite(np.asarray(out, np.float32)))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_native_pages_of_their_own_under_vmap():
    several = [paged(seed=seed) for seed in range(3)]
    stacked = {name: np.stack([arrays[name] for arrays in several]) for name in several[0]}
    forced = functools.partial(attend, implementation="mosaic", is_causal=True)
    actual = jax.jit(jax.vmap(lambda given: forced(**given)))(stacked)
    for arrays, one in zip(several, actual, strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float32), np.asarray(forced(**arrays), np.float32), rtol=2e-2, atol=2e-2)


# Writing.


SHAPES = [(5, 6, 4, 4), (1, 5, 4, 3), (2, 1, 2, 1), (3, 4, 0, 2), (4, 2, 1, 0)]  # a program each
jitted_update = jax.jit(jaxsoftmax.cache.update_pages)


@quick
@given(sizes=st.sampled_from(SHAPES), seed=st.integers(0, 999))
def test_tokens_are_written_where_they_are_read(sizes, seed):
    (page, pages, most, length), rng = sizes, np.random.default_rng(seed)
    keys, values = rng.standard_normal((pages, page, 2, 3)), rng.standard_normal((pages, page, 2, 4))
    table = rng.permutation(np.arange(-1, 3 * most + 2))[: 3 * most].reshape(3, most)  # each page in one sequence
    positions, expected = rng.integers(-2, most * page + 2, 3), (keys.astype(np.float32), values.astype(np.float32))
    key, value = (rng.standard_normal((3, length, 2, size)).astype(np.float32) for size in (3, 4))
    actual = jitted_update(*expected, key, value, table, positions)
    for b in range(3):
        for t in range(length):
            at = positions[b] + t
            if 0 <= at < most * page and 0 <= table[b, at // page] < pages:
                for array, new in zip(expected, (key, value), strict=True):
                    array[table[b, at // page], at % page] = new[b, t]
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_donated_pages_are_written_in_place():
    _, pages, _, table, lengths = types(dtype="float32")
    new = shaped(2, 1, 2, 64, dtype="float32")
    compiled = (
        jax.jit(jaxsoftmax.cache.update_pages, donate_argnums=(0, 1)).lower(pages, pages, new, new, table, lengths).compile()
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == 2 * pages.size * 4
    assert memory.temp_size_in_bytes < 2**16


def test_a_step_of_decoding_is_attention_to_all_tokens_so_far():
    rng = np.random.default_rng(0)
    query, key, value = rng.standard_normal((3, 2, 12, 2, 16)).astype(np.float32)
    pages = jnp.zeros((8, 4, 2, 16))
    table = np.array([[5, 0, 3], [2, 7, 1]])

    @jax.jit
    def step(pages, own):
        at, *own = own
        new = [array[:, None] for array in own]
        pages = jaxsoftmax.cache.update_pages(*pages, *new[1:], table, jnp.full(2, at))
        return pages, attend(new[0], *pages, table, jnp.full(2, at + 1), is_causal=True)[:, 0]

    along = [np.swapaxes(array, 0, 1) for array in (query, key, value)]
    _, found = jax.lax.scan(step, (pages, pages), (np.arange(12), *along))
    expected = attention_oracle.attention(query, key, value, is_causal=True)[0]
    assert oracle.error(np.swapaxes(found, 0, 1), expected) <= 1


# Arguments.

OF_KEYS = (40, 16, 2)
WRONG = {
    "pages of three axes": (
        {"key_pages": np.zeros((5, 4, 16))},
        ValueError,
        ["key_pages", "[pages, page, heads, size]", "(5, 4, 16)"],
    ),
    "no pages": ({"value_pages": np.zeros((0, 16, 2, 16))}, ValueError, ["value_pages", "none of them 0"]),
    "values of other pages": (
        {"value_pages": np.zeros((3, 16, 2, 16), np.float32)},
        ValueError,
        ["value_pages", "(3, 16, 2, 16)"],
    ),
    "pages of another dtype": (
        {name: np.zeros((40, 16, 2, 16), np.float16) for name in ("key_pages", "value_pages")},
        TypeError,
        ["key_pages", "dtype of query", "float16", "float32"],
    ),
    "another head size": (
        {name: np.zeros((40, 16, 2, 8), np.float32) for name in ("key_pages", "value_pages")},
        ValueError,
        ["key_pages", "head size", "(40, 16, 2, 8)"],
    ),
    "heads that do not divide": ({"query": np.zeros((3, 2, 7, 16), np.float32)}, ValueError, ["key_pages", "divides"]),
    "query of two axes": ({"query": np.zeros((7, 16), np.float32)}, ValueError, ["query", "[*batch, T, N, H]", "(7, 16)"]),
    "query without an axis of tokens": (
        {"query": np.zeros((3, 8, 16), np.float32)},
        ValueError,
        ["query must", "one token", "page_table [*batch, M]", "(3, 8, 16)", "(3, 20)"],
    ),
    "query of integers": ({"query": np.zeros((3, 2, 8, 16), int)}, TypeError, ["query", "floating"]),
    "table of floats": ({"page_table": np.zeros((3, 20))}, TypeError, ["page_table", "integers"]),
    "table of another batch": ({"page_table": np.zeros((2, 20), int)}, ValueError, ["page_table", "[*batch, M]", "(2, 20)"]),
    "lengths of another batch": (
        {"key_value_seq_lengths": np.zeros(2, int)},
        ValueError,
        ["key_value_seq_lengths", "[*batch]", "(2,)", "(3,)"],
    ),
    "mask of another length": ({"mask": np.zeros((2, 7), bool)}, ValueError, ["mask", "(2, 7)"]),
    "no such implementation": ({"implementation": "cuda"}, ValueError, ["implementation", "'mosaic'", "'cuda'"]),
    "a negative window": ({"local_window_size": -1}, ValueError, ["local_window_size", "-1"]),
    "one that cannot run": (  # on a GPU because of the head size
        {
            name: np.zeros((*shape, 129), np.float32)
            for name, shape in {"query": (3, 2, 8), "key_pages": OF_KEYS, "value_pages": OF_KEYS}.items()
        }
        | {"implementation": "mosaic"},
        NotImplementedError,
        ["paged_attention", "implementation='mosaic' cannot run"],
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_wrong_arguments_are_named(kind):
    wrong, error, words = WRONG[kind]
    with pytest.raises(error) as found:
        attend(**paged(dtype="float32", size=16) | wrong)
    assert all(word in str(found.value) for word in ["paged_attention", *words]), str(found.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"key": np.zeros((3, 1, 2, 8))}, ["key", "(3, 1, 2, 8)"]),
        ({"value": np.zeros((3, 2, 2, 16))}, ["value", "as many tokens"]),
        ({"positions": np.zeros(4, int)}, ["positions", "(4,)"]),
        ({"page_table": np.zeros(20, int)}, ["page_table", "(20,)"]),
        (
            {name: np.zeros((3, 2, 16)) for name in ("key", "value")},
            ["key must", "one token", "page_table [*batch, M]", "(3, 2, 16)", "(3, 20)"],
        ),
        (
            {"key_pages": np.zeros((40, 16, 2, 16), np.int8), "value_pages": np.zeros((40, 16, 2, 16), np.int8)},
            ["key_scale must be given", "int8", "got None"],
        ),
    ],
    ids=str,
)
def test_wrong_arguments_of_writing_are_named(wrong, words):
    new = np.zeros((3, 1, 2, 16))
    arrays = paged(dtype="float32", size=16)
    given = {name: arrays[name] for name in ("key_pages", "value_pages", "page_table")} | {
        "positions": arrays["key_value_seq_lengths"]
    }
    with pytest.raises(ValueError, match="update_pages") as found:
        jaxsoftmax.cache.update_pages(**given | {"key": new, "value": new} | wrong)
    assert all(word in str(found.value) for word in words), str(found.value)
