"""Attention to keys and values of 8 bits with scales, and how they are made."""

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

from ..support import cases, kernels
from ..support.attention import paged as paging
from ..support.attention import played, values
from ..support.attention.lowering import NAME, shaped

BYTES = ("int8", "float8_e4m3fn")
quick = settings(max_examples=50, deadline=None, derandomize=True)


def scales_of(shape, seed):
    """Scales by which standard normals in about the range of 8 bits are again about standard."""
    return (2.0 ** np.random.default_rng(seed).uniform(-9, -6, shape)).astype(np.float32)


def in_bytes(shape, dtype, seed):
    """Numbers of 8 bits, all that there are among them but NaN."""
    bits = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    array = bits.view(jnp.dtype(dtype))
    return np.where(np.isnan(array.astype(np.float32)), np.zeros_like(array), array)


def quantised(batch=(2,), keys=700, key_heads=2, size=64, value_size=None, kind="int8", per_entry=False, seed=0, **more):
    """The operands of `dot_product_attention`."""
    arrays = values.arrays(batch=batch, keys=keys, key_heads=key_heads, size=size, seed=seed, **more)
    for i, (name, own) in enumerate((("key", size), ("value", value_size or size))):
        arrays[name] = in_bytes((*batch, keys, key_heads, own), kind, seed + i)
        arrays[f"{name}_scale"] = scales_of((*batch, key_heads) if per_entry else (key_heads,), seed + i)
    return arrays


def plain(arrays):
    """The same call with the keys and values that they stand for, in float64."""
    found = dict(arrays)
    for name in ("key", "value"):
        found[name] = arrays[name].astype(np.float64) * found.pop(f"{name}_scale")[..., None, :, None]
    return found


def paged(kind="int8", of_pages=False, **sizes):
    """The operands of `paged_attention`."""
    arrays = paging.paged(**sizes)
    for seed, name in enumerate(("key", "value")):
        pages = arrays[f"{name}_pages"].shape
        arrays[f"{name}_pages"] = in_bytes(pages, kind, seed)
        arrays[f"{name}_scale"] = scales_of((pages[0], pages[2]) if of_pages else (pages[2],), seed)
    return arrays


def plain_pages(arrays):
    """Likewise, with pages; products with their own scales are rounded to the dtype of the queries."""
    found = dict(arrays)
    for name in ("key", "value"):
        scale, pages = found.pop(f"{name}_scale"), arrays[f"{name}_pages"]
        if scale.ndim == 1:
            found[f"{name}_pages"] = pages.astype(np.float64) * scale[:, None]
        else:
            found[f"{name}_pages"] = (pages.astype(np.float32) * scale[:, None, :, None]).astype(arrays["query"].dtype)
    return found


OPTIONS = {
    "plain": ({}, {}),
    "causal": ({"query_offset": np.array([690, 130], np.int32)}, {"is_causal": True}),
    "window": ({"query_offset": np.array([690, 30], np.int32)}, {"local_window_size": (200, 5)}),
    "lengths": ({"key_value_seq_lengths": np.array([0, 631], np.int32)}, {}),
    "bias": ({"bias": values.random((4, 3, 700), "bias")}, {"logits_soft_cap": 9.0}),
    "mask": ({"mask": values.random((2, 1, 3, 700))}, {}),
    "sinks": ({"sinks": values.random((4,), "bias")}, {}),
}


def check(arrays, feature, name="xla", *, is_rounded=False, **forced):
    """Holds a call to float64, of the keys and values that its own stand for, which may be rounded first."""
    more, options = OPTIONS[feature]
    expected = plain(arrays)
    for which in ("key", "value") if is_rounded else ():
        expected[which] = expected[which].astype(np.float32).astype(arrays["query"].dtype)
    results = jax.jit(functools.partial(jaxsoftmax.dot_product_attention, **options, **forced, return_residual=True))(
        **arrays, **more
    )
    values.assert_right(name, results, expected | more, options)


@pytest.mark.parametrize(
    ("feature", "dtype", "kind"),
    [
        # By default of a dtype and of a kind in turn.
        pytest.param(feature, dtype, kind, marks=cases.slow_unless((i + j) % 3 == (i + k) % 2 == 0))
        for i, feature in enumerate(OPTIONS)
        for j, dtype in enumerate(cases.DTYPES)
        for k, kind in enumerate(BYTES)
    ],
)
def test_the_reference(feature, dtype, kind):
    check(quantised(length=3, dtype=dtype, kind=kind, per_entry=feature == "plain"), feature, precision="highest")


@pytest.mark.parametrize(
    ("feature", "kind", "of_pages"),
    [
        # By default of a kind and of either scales in turn.
        pytest.param(feature, kind, of_pages, marks=cases.slow_unless((i + j) % 2 == (i // 2 + of_pages) % 2 == 0))
        for i, feature in enumerate(paging.FEATURES)
        for j, kind in enumerate(BYTES)
        for of_pages in (False, True)
    ],
)
def test_the_reference_in_pages(feature, kind, of_pages):
    check_pages(paged(kind, of_pages, dtype="float32", size=16), feature, precision="highest")


def check_pages(arrays, feature, name="xla", **forced):
    def call(**more):
        own = {name: more[name] for name in more if name not in arrays}
        return paging.jitted(**arrays, **own, **forced)

    paging.check(plain_pages(arrays), feature, name, call=call)


@pytest.mark.parametrize(
    ("feature", "kind", "per_entry"),
    [
        # By default of a kind and of either scales in turn.
        pytest.param(feature, kind, per_entry, marks=cases.slow_unless((i + j) % 2 == (i // 2 + per_entry) % 2 == 0))
        for i, feature in enumerate(OPTIONS)
        for j, kind in enumerate(BYTES)
        for per_entry in (False, True)
    ],
)
def test_the_kernel_as_numpy_plays_it(feature, kind, per_entry, monkeypatch):
    plans = played.play(monkeypatch)
    arrays = quantised(length=3, dtype="bfloat16", kind=kind, per_entry=per_entry)
    more, options = OPTIONS[feature]
    results = jax.jit(functools.partial(jaxsoftmax.dot_product_attention, **options, return_residual=True))(**arrays, **more)
    values.assert_right("mosaic", results, plain(arrays) | more, options)
    assert [plan.bytes_dtype for plan in plans] == [kind]


@pytest.mark.parametrize("of_pages", [False, True])
@pytest.mark.parametrize("page", [8, 16, 256])
def test_the_kernel_with_pages_as_numpy_plays_it(page, of_pages, monkeypatch):
    plans = played.play(monkeypatch)
    check_pages(paged(of_pages=of_pages, page=page, most=1 + 1000 // page), "causal", "mosaic")
    assert [plan.pages.size for plan in plans] == [page]


# Derivatives and transformations: those of the keys and values that 8 bits stand for.


@pytest.mark.parametrize("in_pages", [False, True])
def test_derivatives(in_pages):
    arrays = paged("float8_e4m3fn", True, dtype="float32", size=16) if in_pages else quantised(length=3, size=16)
    attend = jaxsoftmax.cache.paged_attention if in_pages else jaxsoftmax.dot_product_attention
    moving = {name: arrays.pop(name) for name in ("query", "key_scale", "value_scale")}

    def loss(moving):
        return jnp.sum(attend(**moving, **arrays) ** 2)

    def plain_loss(moving):
        found = dict(arrays) | {"query": moving["query"]}
        for name in ("key", "value"):
            scale = moving[f"{name}_scale"]
            which = f"{name}_pages" if in_pages else name
            scale = scale[:, None, :, None] if in_pages else scale[None, None, :, None]
            found[which] = arrays[which].astype("float32") * scale
        return jnp.sum(attend(**found) ** 2)

    @jax.jit
    def derivatives(moving):
        return [(jax.grad(f)(moving), jax.jvp(f, (moving,), (moving,))) for f in (loss, plain_loss)]

    (actual, tangents), (expected, expected_tangents) = derivatives(moving)
    for name in moving:
        size = np.max(np.abs(expected[name]))
        np.testing.assert_allclose(actual[name], expected[name], rtol=1e-4, atol=1e-5 * size)
    np.testing.assert_allclose(tangents, expected_tangents, rtol=1e-4)


@pytest.mark.parametrize("in_pages", [False, True])
def test_scales_do_not_know_a_nan_in_keys_that_nobody_sees(in_pages):
    query = values.random((1, 3, 4, 16), "bias")
    stored, scale = in_bytes((3, 4, 2, 16), "float8_e4m3fn", 0), scales_of((3, 2) if in_pages else 2, 0)

    @jax.jit
    def attend(stored, *scales):
        given = {"key_scale": scales[0], "value_scale": scales[1]}
        if in_pages:
            return jaxsoftmax.cache.paged_attention(query, stored, stored, np.array([[0, 1, 2]]), np.array([8]), **given)
        keys = stored.reshape(1, 12, 2, 16)
        return jaxsoftmax.dot_product_attention(query, keys, keys, key_value_seq_lengths=np.array([8]), **given)

    spoilt = stored.copy()
    spoilt[2] = np.nan
    gradient = jax.grad(lambda *args: jnp.sum(jnp.sin(attend(*args))), (1, 2))
    for one, other in zip(gradient(spoilt, scale, scale), gradient(stored, scale, scale), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_transpose_in_values():
    arrays = quantised(length=3, size=16, kind="float8_e4m3fn")
    arrays["value_scale"] = np.full(2, 10, np.float32)  # else cotangents of the values are too small for 8 bits
    values = arrays.pop("value")
    linear = lambda values: jaxsoftmax.dot_product_attention(value=values, **arrays)  # noqa: E731
    out = linear(values)
    (pulled,) = jax.linear_transpose(linear, values)(jnp.ones_like(out))
    assert pulled.dtype == values.dtype
    product = np.vdot(*(np.asarray(array).astype(np.float64) for array in (pulled, values)))
    np.testing.assert_allclose(product, np.sum(np.asarray(out, np.float64)), rtol=0.05)  # the cotangent is rounded to 3 bits


def test_the_transpose_in_scales_of_values():
    arrays = quantised(length=3, size=16)
    scale = arrays.pop("value_scale")
    linear = lambda scale: jaxsoftmax.dot_product_attention(value_scale=scale, **arrays)  # noqa: E731
    out = linear(scale)
    (pulled,) = jax.linear_transpose(linear, scale)(out)
    np.testing.assert_allclose(np.vdot(pulled, scale), np.vdot(out, out), rtol=1e-5)


@pytest.mark.parametrize(
    "mapped", [("query",), ("key", "value"), ("key_scale", "value_scale"), ("query", "key_scale")], ids=str
)
def test_vmap(mapped):
    several = [quantised(length=3, size=16, seed=seed) for seed in range(3)]
    fixed = {name: array for name, array in several[0].items() if name not in mapped}
    stacked = {name: np.stack([arrays[name] for arrays in several]) for name in mapped}
    actual = jax.vmap(lambda own: jaxsoftmax.dot_product_attention(**fixed, **own))(stacked)
    for arrays, one in zip(several, actual, strict=True):
        expected = jaxsoftmax.dot_product_attention(**fixed, **{name: arrays[name] for name in mapped})
        np.testing.assert_allclose(one, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("sizes", "options"),
    [
        ({"batch": ()}, {}),
        ({"keys": 0}, {}),
        ({"batch": (0,)}, {}),
        ({"dtype": "bfloat16", "length": 65}, {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}),
    ],
    ids=str,
)
def test_other_calls_are_those_of_what_bytes_stand_for(sizes, options):
    arrays = quantised(**{"length": 3, "size": 16} | sizes)
    rounded = {name: np.asarray(array, arrays["query"].dtype) for name, array in plain(arrays).items()}
    actual, expected = (jaxsoftmax.dot_product_attention(**given, **options) for given in (arrays, rounded))
    np.testing.assert_allclose(actual.astype(np.float32), expected.astype(np.float32), rtol=0.05, atol=0.05)


@pytest.mark.usefixtures("x64")
def test_float64_queries():
    arrays = quantised(length=3, size=16, dtype="float64")
    expected = jaxsoftmax.dot_product_attention(**plain(arrays))
    np.testing.assert_allclose(jaxsoftmax.dot_product_attention(**arrays), expected, rtol=1e-9)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_rows_that_see_nothing_may_give_the_mean_and_others_are_as_they_were(kind):
    arrays = quantised(length=3, size=16, dtype="bfloat16", key_heads=4) | {"mask": np.arange(3)[:, None] != np.zeros(700)}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    specs = {
        name: P("x") for name in ("query", "key", "value", "value_scale")
    }  # which is of heads, and the others of the batch
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs.get(name, P()))) for name, array in arrays.items()}
    with jax.set_mesh(mesh):
        zero, mean = (
            jax.jit(functools.partial(jaxsoftmax.dot_product_attention, fully_masked_rows=rows))(**placed)
            for rows in ("zero", "mean")
        )
    np.testing.assert_array_equal(mean[:, 1:], zero[:, 1:])
    np.testing.assert_allclose(mean[:, 0].astype(np.float32), plain(arrays)["value"].mean(1), rtol=0.01, atol=0.01)


@pytest.mark.parametrize("in_pages", [False, True])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_heads_over_two_devices(kind, in_pages):
    arrays = paged(of_pages=True, dtype="float32", size=16) if in_pages else quantised(length=3, size=16, per_entry=True)
    attend = jaxsoftmax.cache.paged_attention if in_pages else jaxsoftmax.dot_product_attention
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    heads = {"query": 2, "key": 2, "value": 2, "key_pages": 2, "value_pages": 2, "key_scale": 1, "value_scale": 1}
    specs = {name: P(*[None] * heads[name], "x") if name in heads else P() for name in arrays}
    placed = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
    with jax.set_mesh(mesh):
        actual = jax.jit(lambda given: attend(**given))(placed)
    np.testing.assert_allclose(actual, attend(**arrays), rtol=1e-5, atol=1e-5)


# What runs.


@pytest.mark.parametrize(
    ("size", "value_size", "kind", "per_entry"),
    [
        # Each size by default with a kind and scales in turn, and each kind with either of the scales.
        pytest.param(*sizes, kind, per_entry, marks=cases.slow_unless((i + j) % 2 == 0 and (i // 2 + k) % 2 == 0))
        for i, sizes in enumerate([(64, 64), (128, 128), (256, 256), (192, 128), (80, 48)])
        for j, kind in enumerate(BYTES)
        for k, per_entry in enumerate((False, True))
    ],
)
def test_bytes_are_read_as_they_are(size, value_size, kind, per_entry):
    attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic")
    scale = shaped(*((2,) if per_entry else ()), 2, dtype="float32")
    of_keys = [shaped(2, 4096, 2, own, dtype=kind) for own in (size, value_size)]
    lower = lambda q, k, v, a, b: attend(q, k, v, key_scale=a, value_scale=b)  # noqa: E731
    text = kernels.lowered_for_cuda(lower, shaped(2, 1, 8, size), *of_keys, scale, scale, kernels=[NAME])
    for own in (size, value_size):
        assert f"x4096x2x{own}xbf16" not in text
        assert f"x4096x2x{own}xf32" not in text


@pytest.mark.parametrize(
    ("page", "of_pages"),
    [
        # By default in turn, of a block with many pages, with one and with a part of one: the others differ in a number alone.
        pytest.param(page, of_pages, marks=cases.slow_unless(page in (8, 128, 256) and i % 2 == of_pages))
        for i, page in enumerate(decode.PAGE_SIZES)
        for of_pages in (False, True)
    ],
)
def test_bytes_in_pages_are_read_as_they_are(page, of_pages):
    attend = functools.partial(jaxsoftmax.cache.paged_attention, implementation="mosaic")
    pages, scale = shaped(100, page, 2, 64, dtype="int8"), shaped(*((100,) if of_pages else ()), 2, dtype="float32")
    table, lengths = shaped(2, 30, dtype="int32"), shaped(2, dtype="int32")
    lower = lambda q, k, v, t, n, a, b: attend(q, k, v, t, n, key_scale=a, value_scale=b)  # noqa: E731
    text = kernels.lowered_for_cuda(lower, shaped(2, 1, 8, 64), pages, pages, table, lengths, scale, scale, kernels=[NAME])
    assert "stablehlo.gather" not in text
    assert f"x{page}x2x64xbf16" not in text
    assert f"x{page}x2x64xf32" not in text


# Operands that are mapped: pages without their scales, and scales without their pages.
MIXED = [("key_pages", "value_scale"), ("value_pages", "key_scale", "page_table")]


def mapped_over(names, **sizes):
    """The operands of `paged_attention`, those of these names for two entries, and the axes of all for `jax.vmap`."""
    one, other = (paged(of_pages=True, most=4, seed=seed, **sizes) for seed in (0, 1))
    given = {name: np.stack([array, other[name]]) if name in names else array for name, array in one.items()}
    return given, {name: 0 if name in names else None for name in given}


@pytest.mark.usefixtures("hollow_kernels")
def test_pages_and_scales_that_are_not_mapped_alike_are_read_as_they_are():
    given, axes = mapped_over(MIXED[0])
    attend = functools.partial(jaxsoftmax.cache.paged_attention, implementation="mosaic")
    text = kernels.lowered_for_cuda(jax.vmap(lambda own: attend(**own), in_axes=(axes,)), given, kernels=[NAME])
    assert "stablehlo.gather" not in text


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("length", "size", "dtype"), [(65, 64, "bfloat16"), (1, 24, "bfloat16"), (1, 64, "float32"), (1, 512, "bfloat16")], ids=str
)
def test_what_is_multiplied_before(length, size, dtype):
    lower = lambda q, k, v: jaxsoftmax.dot_product_attention(q, k, v, implementation="mosaic")  # noqa: E731
    bytes_ = shaped(2, 4096, 2, size, dtype="int8")
    text = kernels.lowered_for_cuda(lower, shaped(2, length, 8, size, dtype=dtype), bytes_, bytes_)
    assert f"x4096x2x{size}x{'f32' if dtype == 'float32' else 'bf16'}" in text


@pytest.mark.usefixtures("hollow_kernels")
def test_the_kernel_and_the_reference_take_them():
    types = shaped(2, 1, 8, 64), shaped(2, 4096, 2, 64, dtype="int8"), shaped(2, 4096, 2, 64, dtype="int8")
    for name in ("mosaic", "xla"):
        forced = functools.partial(jaxsoftmax.dot_product_attention, implementation=name)
        assert [d.implementation for d in explain(forced, *types, platform="cuda")] == [name]


# Natively.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("feature", OPTIONS)
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize(
    "sizes", [{}, {"size": 128}, {"size": 256}, {"size": 80, "value_size": 48, "per_entry": True}], ids=str
)
def test_native_values(sizes, dtype, kind, feature):
    check(quantised(length=3, kind=kind, dtype=dtype, **sizes), feature, "mosaic", implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("of_pages", [False, True])
@pytest.mark.parametrize("kind", BYTES)
@pytest.mark.parametrize("page", decode.PAGE_SIZES)
@pytest.mark.parametrize("size", [64, 128])
def test_native_values_in_pages(page, kind, of_pages, size):
    arrays = paged(kind, of_pages, page=page, size=size, most=1 + 700 // page)
    check_pages(arrays, "causal", "mosaic", implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("sizes", "is_rounded"),
    [
        ({"length": 1}, False),
        ({"length": 40}, False),
        ({"length": 65}, True),  # many rows: XLA converts keys and values to bfloat16 before
        ({"length": 16, "heads": 15, "key_heads": 3, "size": 256, "keys": 1024}, False),  # copied, and in place
        ({"length": 16, "heads": 12, "key_heads": 3, "size": 256, "keys": 1024}, False),
        ({"length": 1, "size": 192, "value_size": 256}, False),
        ({"length": 1, "size": 36, "value_size": 20}, True),  # XLA converts and pads
        ({"length": 1, "size": 512}, True),  # XLA converts
        ({"keys": 1}, False),
        ({"keys": 20001, "batch": (1,)}, False),
        ({"batch": (9, 11), "keys": 200}, False),
    ],
    ids=str,
)
def test_native_shapes(sizes, is_rounded):
    arrays = quantised(**{"length": 3} | sizes, dtype="bfloat16")
    check(arrays, "plain", "mosaic", is_rounded=is_rounded, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("names", MIXED, ids=str)
@pytest.mark.parametrize("length", [2, 70])
def test_native_pages_and_scales_that_are_not_mapped_alike(names, length):
    given, axes = mapped_over(names, length=length)
    attend = jax.jit(functools.partial(jaxsoftmax.cache.paged_attention, implementation="mosaic"))
    found = jax.jit(jax.vmap(lambda own: attend(**own), in_axes=(axes,)))(given)
    for i, one in enumerate(found):
        expected = attend(**{name: a if axes[name] is None else a[i] for name, a in given.items()})
        np.testing.assert_allclose(one.astype(jnp.float32), expected.astype(jnp.float32), rtol=2e-2, atol=2e-2)


# How they are made.


@quick
@given(kind=st.sampled_from(BYTES), seed=st.integers(0, 99), size=st.floats(1e-4, 1e4))
def test_quantised_numbers_are_the_nearest(kind, seed, size):
    x = (size * np.random.default_rng(seed).standard_normal((5, 3, 16))).astype(np.float32)
    top = 127 if kind == "int8" else 448
    scale = np.max(np.abs(x), (0, 2)) / top
    found = np.asarray(jax.jit(jaxsoftmax.cache.quantize, static_argnums=2)(x, scale, kind))
    assert found.dtype == jnp.dtype(kind)
    error = np.abs(found.astype(np.float64) * scale[:, None] - x)
    step = scale[:, None] if kind == "int8" else np.maximum(np.abs(x) / 8, scale[:, None] * 2.0**-9)
    assert np.all(error <= 0.5001 * step)


@pytest.mark.parametrize("kind", BYTES)
def test_quantised_numbers_saturate(kind):
    top = 127 if kind == "int8" else 448
    found = jaxsoftmax.cache.quantize(np.array([[1e9, -1e9, 1.0, np.inf]], np.float32), np.float32(1), kind)
    np.testing.assert_array_equal(found.astype(jnp.float32), [[top, -top, 1, top]])
    nan = np.asarray(jaxsoftmax.cache.quantize(np.full((1, 1), np.nan, np.float32), np.float32(1), kind), np.float32)
    assert nan == 0 if kind == "int8" else np.isnan(nan)
    assert np.all(
        np.asarray(jaxsoftmax.cache.quantize(np.zeros((2, 3), np.float32), np.zeros(2, np.float32), kind), np.float32) == 0
    )


@pytest.mark.parametrize("of_pages", [False, True])
@pytest.mark.parametrize("kind", BYTES)
def test_pages_are_written_in_bytes(kind, of_pages):
    rng = np.random.default_rng(0)
    new = [rng.standard_normal((2, 3, 2, size)).astype(np.float32) for size in (16, 8)]
    pages = [jnp.zeros((6, 4, 2, size), kind) for size in (16, 8)]
    scales = [scales_of((6, 2) if of_pages else (2,), seed) for seed in range(2)]
    table, positions = np.array([[4, 1], [0, 9]]), np.array([2, 3])
    found = jax.jit(jaxsoftmax.cache.update_pages)(*pages, *new, table, positions, key_scale=scales[0], value_scale=scales[1])
    for array, before, scale, written in zip(new, pages, scales, found, strict=True):
        expected = np.array(before)
        for b, at, number, slot in ((0, 0, 4, 2), (0, 1, 4, 3), (0, 2, 1, 0), (1, 0, 0, 3)):  # page 9 does not exist
            own = scale[number] if of_pages else scale
            expected[number, slot] = jaxsoftmax.cache.quantize(array[b, at], own, kind)
        np.testing.assert_array_equal(written.astype(jnp.float32), expected.astype(np.float32))


# Errors.


def bad(**more):
    arrays = quantised(length=3, size=16) | more
    return lambda: jaxsoftmax.dot_product_attention(**arrays)


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (bad(key=np.zeros((2, 700, 2, 16), np.int16)), TypeError, ["key must", "int8", "float8_e4m3fn", "got int16"]),
        (bad(key=np.zeros((2, 700, 2, 16), np.float16)), TypeError, ["key must", "query", "int8", "got float16 and float32"]),
        (bad(key=np.zeros((2, 700, 2, 16), np.float32)), TypeError, ["value must", "key", "got int8 and float32"]),
        (bad(value=in_bytes((2, 700, 2, 16), "float8_e4m3fn", 0)), TypeError, ["value must", "got float8_e4m3fn and int8"]),
        (bad(key_scale=np.ones(3, np.float32)), ValueError, ["key_scale", "(2,)", "(2, 2)", "(3,)"]),
        (bad(value_scale=np.ones(2, np.int32)), TypeError, ["value_scale", "floating", "int32"]),
        (lambda: bad(**values.arrays(length=3))(), TypeError, ["key_scale", "int8", "float8_e4m3fn", "float32"]),
        (lambda: jaxsoftmax.cache.quantize(np.ones((2, 3)), np.ones(3), "int8"), ValueError, ["scale", "(2,)", "(3,)"]),
        (lambda: jaxsoftmax.cache.quantize(np.float32(1), np.float32(1), "int8"), ValueError, ["x must", "()"]),
        (lambda: jaxsoftmax.cache.quantize(np.ones((2, 3)), np.ones(2), "int16"), TypeError, ["dtype", "int8", "int16"]),
        (lambda: jaxsoftmax.cache.quantize(np.ones((2, 3), int), np.ones(2), "int8"), TypeError, ["x", "floating", "int"]),
        (
            lambda: jaxsoftmax.cache.paged_attention(**paged(size=16) | {"key_scale": np.ones((3, 2), np.float32)}),
            ValueError,
            ["key_scale", "(2,)", "(40, 2)", "(3, 2)"],
        ),
    ],
)
def test_errors_name_the_argument(call, error, words):
    with pytest.raises(error) as caught:
        call()
    for word in words:
        assert word in str(caught.value)
