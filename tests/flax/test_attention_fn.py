"""`jaxsoftmax.flax` in the attention modules of linen and nnx: what they compute with it and with Flax's own attention."""

import functools
import inspect
import math
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax.flax import attention_fn, attention_fn_with_rope
from jaxsoftmax.ops.attention.primitive import SAVED_NAMES

from ..support import cases, kernels, oracle

pytestmark = pytest.mark.usefixtures("hollow_kernels")

BATCH, LENGTH, KEYS, WIDTH, HEADS = 2, 12, 9, 16, 4


# The two APIs, of which each gives a module as a function of its parameters: `layer(attention_fn, **options)` is a pair of the
# parameters and of `f(params, *inputs, **call)`, in which `dropout` is a key. With `sow_weights`, it returns what was sown too.
# `own` is Flax's own attention.


def normal(*shape, seed=0, dtype="float32"):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def filled(abstract):
    """Parameters of these types, biases too: of a size that makes some weights stand out."""
    return jax.tree.map(lambda a: jnp.asarray(normal(*a.shape, seed=a.ndim) / 2, a.dtype), abstract)


@functools.cache
def linen_layer(attention_fn, **options):
    options = {"num_heads": HEADS, "qkv_features": 2 * WIDTH} | options
    module = linen.MultiHeadDotProductAttention(attention_fn=attention_fn, **options)
    one = jnp.zeros((1, 1, WIDTH), options.get("param_dtype", jnp.float32))
    init = functools.partial(module.init, deterministic=True)

    def f(params, *inputs, dropout=None, **call):
        rngs = {} if dropout is None else {"rngs": {"dropout": dropout}}
        collections = {"mutable": ["intermediates"]} if "sow_weights" in call else {}
        return module.apply({"params": params}, *inputs, **rngs, **collections, **call)

    return filled(jax.eval_shape(init, jax.random.key(0), one)["params"]), f


@functools.cache
def nnx_layer(attention_fn, **options):
    options = {"num_heads": HEADS, "qkv_features": 2 * WIDTH, "decode": False, "keep_rngs": False} | options
    make = functools.partial(nnx.MultiHeadAttention, in_features=WIDTH, attention_fn=attention_fn, **options)
    graph, params = nnx.split(nnx.eval_shape(lambda: make(rngs=nnx.Rngs(0))), nnx.Param)

    def f(params, *inputs, dropout=None, **call):
        rngs = {} if dropout is None else {"rngs": nnx.Rngs(dropout=dropout)}
        run = nnx.MultiHeadAttention.__call__
        if "sow_weights" in call:
            run = nnx.capture(nnx.Intermediate)(run)
        return run(nnx.merge(graph, params), *inputs, **rngs, **call)

    return filled(params), f


APIS = {
    "linen": SimpleNamespace(layer=linen_layer, own=linen.dot_product_attention),
    "nnx": SimpleNamespace(layer=nnx_layer, own=nnx.dot_product_attention),
}
BOTH = pytest.mark.parametrize("api", APIS.values(), ids=APIS)


def loss_of(f, rows=None, **call):
    """A scalar in which every element of the output counts, of those `rows` that are given; and the output."""

    def loss(*args):
        out = f(*args, **call)
        factors = ((np.arange(out.size) * 7 % 11 - 5) / 4).reshape(out.shape).astype(out.dtype)  # exact in 16 bits
        return jnp.sum(out * (factors if rows is None else np.where(rows, factors, np.zeros_like(factors)))), out

    return loss


def results_of(layers, inputs, rows=None, **call):
    """Of each layer the output, and the gradients in all parameters and inputs; computed in one program."""
    functions = [f for _, f in layers]

    @jax.jit
    def each(*arguments):
        own = [jax.grad(loss_of(f, rows, **call), range(1 + len(inputs)), has_aux=True) for f in functions]
        return [gradient(*of_one)[::-1] for gradient, of_one in zip(own, arguments, strict=True)]

    return each(*[(params, *map(jnp.asarray, inputs)) for params, _ in layers])


def assert_same(actual, expected):
    """Equal up to a few dozen roundings, those of sums of as many terms, of the largest number of the tree."""
    actual, expected = (jax.tree.leaves(tree) for tree in (actual, expected))
    largest = max(np.max(np.abs(leaf)) for leaf in expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=64 * oracle.EPS * largest)


def ops(f, *args, platform="cpu"):
    return [(d.primitive, d.implementation) for d in explain(f, *args, platform=platform)]


# Masks.


def padding(lengths, size, left=False, batch=(BATCH,)):
    """Which of `size` positions hold tokens, `[*batch, size]`, as floats."""
    held = np.arange(size) < np.reshape(lengths, (*batch, 1))
    return (held[..., ::-1] if left else held).astype(np.float32)


RIGHT, LEFT = padding([12, 7], LENGTH), padding([5, 12], LENGTH, left=True)
CAUSAL = linen.make_causal_mask(np.ones((BATCH, LENGTH)))
KEYS_OF_LEFT = linen.make_attention_mask(np.ones((BATCH, LENGTH), np.float32), LEFT)
INPUTS = (normal(BATCH, LENGTH, WIDTH),)


def of_two_batch_axes():
    mask = linen.make_attention_mask(np.ones((2, 3, 5), np.float32), padding([5, 4, 3, 2, 1, 5], 5, batch=(2, 3)))
    return {"inputs": (normal(2, 3, 5, WIDTH),), "mask": linen.combine_masks(linen.make_causal_mask(np.ones((2, 3, 5))), mask)}


CROSS = (normal(BATCH, LENGTH, WIDTH), normal(BATCH, KEYS, WIDTH, seed=1), normal(BATCH, KEYS, WIDTH, seed=2))
CASES = {
    "no mask": {},
    "causal": {"mask": CAUSAL},
    "causal, bools": {"mask": linen.make_causal_mask(np.ones((BATCH, LENGTH)), dtype=bool)},
    "padding right": {"mask": linen.make_attention_mask(np.ones((BATCH, LENGTH), np.float32), RIGHT)},
    "padding left": {"mask": KEYS_OF_LEFT},
    "of integers": {"mask": np.asarray(KEYS_OF_LEFT, np.int32)},
    "causal and padding": {"mask": linen.combine_masks(CAUSAL, linen.make_attention_mask(RIGHT[..., :1] + 0 * RIGHT, RIGHT))},
    "each head": {"mask": (np.random.default_rng(0).random((BATCH, HEADS, LENGTH, LENGTH)) < 0.5) | np.eye(LENGTH, dtype=bool)},
    "cross": {"inputs": CROSS, "mask": linen.make_attention_mask(np.ones((BATCH, LENGTH)), padding([4, 9], KEYS))},
    "one sequence": {"inputs": (INPUTS[0][0],), "mask": CAUSAL[0]},
    "two batch axes": of_two_batch_axes(),
}
OF_NNX = {
    "is_causal": {"is_causal": True},
    "is_causal and causal": {"is_causal": True, "mask": CAUSAL},
    "is_causal and padding": {"is_causal": True, "mask": linen.make_attention_mask(np.ones((BATCH, LENGTH)), RIGHT)},
    "is_causal, many queries": {"is_causal": True, "inputs": CROSS},
    "grouped heads": {"mask": KEYS_OF_LEFT, "options": {"num_kv_heads": 2}},
    "one key head": {"is_causal": True, "options": {"num_kv_heads": 1}},
}


# Of what is in turn, one of the two APIs by default: what they pass on is the same.


@pytest.mark.parametrize(
    ("api", "case"),
    [
        pytest.param(api, case, id=f"{name}, {kind}", marks=cases.slow_unless((i + j) % 2 == 0))
        for i, (name, api) in enumerate(APIS.items())
        for j, (kind, case) in enumerate(CASES.items())
    ]
    + [
        pytest.param(APIS["nnx"], case, id=f"nnx, {kind}", marks=pytest.mark.slow if kind == "is_causal and causal" else [])
        for kind, case in OF_NNX.items()
    ],
)
def test_output_and_gradients_are_those_of_flax(api, case):
    call, inputs = {"mask": None} | case, case.get("inputs", INPUTS)
    options = {name: call.pop(name) for name in ("inputs", "options") if name in call}.get("options", {})
    layer, own = (api.layer(fn, **options) for fn in (attention_fn, api.own))
    assert_same(*results_of([layer, own], inputs, **call))
    assert ops(functools.partial(layer[1], **call), layer[0], *inputs) == [("dot_product_attention", "xla")]


def test_linen_takes_is_causal_from_a_partial():
    (params, f), (_, plain) = linen_layer(functools.partial(attention_fn, is_causal=True)), linen_layer(attention_fn)
    every = jax.jit(lambda *args: (plain(*args, mask=CAUSAL), f(*args), f(*args, mask=CAUSAL)))
    expected, *found = every(params, *INPUTS)
    for out in found:
        assert_same(out, expected)


@BOTH
def test_rows_without_a_key_give_zero_where_flax_averages(api):
    mask = linen.combine_masks(CAUSAL, KEYS_OF_LEFT)  # the first queries of the padded sequence see nothing
    seeing = np.any(mask, (1, 3))[..., None]
    assert not seeing.all()
    q, k, v = normal(3, BATCH, LENGTH, HEADS, 8)
    empty = np.broadcast_to(~seeing[..., None], q.shape)
    np.testing.assert_array_equal(jax.jit(attention_fn)(q, k, v, mask=mask)[empty], 0)
    averages = np.broadcast_to(np.mean(v, 1, keepdims=True), v.shape)
    few = 2 * LENGTH * oracle.EPS * np.max(np.abs(v))  # roundings of either sum
    np.testing.assert_allclose(jax.jit(api.own)(q, k, v, mask=mask)[empty], averages[empty], rtol=0, atol=few)

    layers = [api.layer(fn, use_bias=False) for fn in (attention_fn, api.own)]
    ours, theirs = results_of(layers, INPUTS, rows=seeing, mask=mask)
    np.testing.assert_array_equal(ours[0][np.broadcast_to(~seeing, ours[0].shape)], 0)
    assert_same(np.where(seeing, ours[0], 0), np.where(seeing, theirs[0], 0))
    assert_same(ours[1], theirs[1])


PADDED = {
    "right": {"mask": linen.make_attention_mask(RIGHT, RIGHT)},
    "left, causal": {"mask": linen.combine_masks(CAUSAL, linen.make_attention_mask(LEFT, LEFT))},
    "right, sown": {"mask": linen.make_attention_mask(RIGHT, RIGHT), "sow_weights": True},
}
MEANS = functools.partial(attention_fn, fully_masked_rows="mean")


@pytest.mark.parametrize(
    ("api", "options", "call", "dtype"),
    [
        pytest.param(api, {}, call, dtype, id=f"{name}, {kind}, {dtype}", marks=cases.slow_unless((i + j + k) % 2 == 0))
        for i, (name, api) in enumerate(APIS.items())
        for j, (kind, call) in enumerate(PADDED.items())
        for k, dtype in enumerate(("float32", "bfloat16"))
    ]
    + [
        pytest.param(APIS["nnx"], {"num_kv_heads": 2}, {"is_causal": True, "mask": KEYS_OF_LEFT}, "float32", id="grouped heads")
    ],
)
def test_a_model_with_padded_rows_in_its_loss_is_that_of_flax(api, options, call, dtype):
    def results(dtype, *functions):
        layers = [api.layer(fn, param_dtype=dtype, **options) for fn in functions]
        inputs = (INPUTS[0].astype(dtype),)
        if "sow_weights" not in call:
            return results_of(layers, inputs, **call)
        each = jax.jit(lambda inputs, *params: [f(own, *inputs, **call) for own, (_, f) in zip(params, layers, strict=True)])
        return [(out, jax.tree.leaves(sown)) for out, sown in each(inputs, *[params for params, _ in layers])]

    if dtype == "float32":
        assert_same(*results(dtype, MEANS, api.own))
        return
    (ours,), (exact,) = results(dtype, MEANS), results("float32", api.own)
    for mine, truth in zip(*map(jax.tree.leaves, (ours, exact)), strict=True):
        assert mine.dtype == dtype
        largest = max(np.max(np.abs(leaf)) for leaf in jax.tree.leaves(exact))
        np.testing.assert_allclose(np.asarray(mine, np.float32), truth, rtol=0, atol=2**-5 * largest)


@pytest.mark.parametrize("rate", [0.0, 0.4])
def test_einsums_get_equal_weights_of_rows_without_a_key(rate):
    def layer(attention, **einsums):
        return linen_layer(attention, dropout_rate=rate, **einsums)

    call = PADDED["right"] | ({} if rate == 0 else {"deterministic": False, "dropout": jax.random.key(3)})
    einsums = {f"{name}_einsum_cls": lambda: jnp.einsum for name in ("qk_attn_weights", "attn_weights_value")}
    assert_same(*results_of([layer(MEANS, **more) for more in (einsums, {})], INPUTS, **call))


@pytest.mark.parametrize("rows", ["zero", "mean"])
def test_einsums_get_weights_of_rows_whose_keys_a_bias_hides(rows):
    q, k, v = normal(3, BATCH, LENGTH, HEADS, 8)
    bias = np.where(np.arange(LENGTH)[:, None] == 2, -np.inf, normal(LENGTH, LENGTH)).astype(np.float32)[None, None]
    einsums = dict.fromkeys(("qk_attn_weights_einsum", "attn_weights_value_einsum"), jnp.einsum)
    call = functools.partial(attention_fn, q, k, v, bias, deterministic=True, fully_masked_rows=rows)
    assert_same(call(**einsums), call())
    assert np.all(np.isfinite(call()))


@BOTH
@pytest.mark.parametrize(
    "more", [{}, {"broadcast_dropout": False, "dropout_rate": 0.5, "dropout_rng": jax.random.key(1)}], ids=str
)
def test_a_bias_is_that_of_flax(api, more):
    q, k, v = normal(3, BATCH, LENGTH, HEADS, 8)
    bias, more = normal(HEADS, LENGTH, LENGTH, seed=1)[None], more | {"deterministic": True}

    def layer(attention):
        return q, lambda q, k, v, bias: attention(q, k, v, bias, CAUSAL, **more)

    assert_same(*results_of([layer(attention_fn), layer(api.own)], (k, v, bias)))


# What each passes.


@BOTH
def test_every_argument_of_flax_is_there(api):
    """Linen passes what the signature names and leaves out the rest in silence; nnx passes everything."""
    ours, theirs = (inspect.signature(f).parameters for f in (attention_fn, api.own))
    assert set(theirs) <= set(ours)
    for name in set(theirs) & set(ours) - {"promote_dtype"}:
        assert ours[name].default == theirs[name].default, name


@pytest.mark.parametrize(
    ("api", "dtype"),
    [
        pytest.param(api, dtype, id=f"{name}, {dtype}", marks=cases.slow_unless((i + j) % 2 == 0))
        for i, (name, api) in enumerate(APIS.items())
        for j, dtype in enumerate(("bfloat16", "float16"))
    ],
)
def test_narrow_dtypes_err_no_more_than_flax(api, dtype):
    """The truth is Flax's own attention in float64, of the rounded parameters and inputs."""
    call = {"mask": CASES["causal and padding"]["mask"], "deterministic": True}
    inputs = (normal(BATCH, LENGTH, WIDTH, dtype=dtype),)
    # With a rate above 0, nnx leaves out `jax.nn`, which multiplies no 16 bits on a CPU.
    layers = [api.layer(fn, param_dtype=dtype, dropout_rate=0.5) for fn in (attention_fn, api.own)]
    ours, theirs = results_of(layers, inputs, **call)
    with jax.enable_x64(True):
        params = jax.tree.map(lambda a: np.asarray(a, "float64"), layers[1][0])
        (truth,) = results_of([(params, layers[1][1])], (inputs[0].astype("float64"),), **call)
    assert ours[0].dtype == dtype
    for a, b, exact in zip(*map(jax.tree.leaves, (ours, theirs, truth)), strict=True):
        mine, others = (np.linalg.norm(np.asarray(x, np.float64) - np.asarray(exact)) for x in (a, b))
        assert mine <= 1.05 * others  # less here in fact: Flax rounds scores and weights


@pytest.mark.usefixtures("choices")
@BOTH
def test_dtype_and_precision_are_those_of_the_call(api):
    params, f = api.layer(attention_fn, dtype=jnp.bfloat16)
    (decision,) = explain(f, params, *INPUTS, platform="cuda")
    assert decision.implementation == "mosaic"
    assert all(operand.startswith("bfloat16[") for operand in decision.operands)
    assert f(params, *INPUTS).dtype == jnp.bfloat16
    for precision, expected in ((None, "mosaic"), ("highest", "xla"), (jax.lax.Precision.HIGHEST, "xla")):
        params, f = api.layer(attention_fn, precision=precision)
        (decision,) = explain(f, params, *INPUTS, platform="cuda")
        assert decision.implementation == expected, precision
    assert "precision asks for more" in decision.refusals[0][1]


@pytest.mark.usefixtures("standard_promotion")
def test_operands_are_promoted_as_flax_does():
    q, k, v = normal(3, 1, 5, 2, 8)
    half = attention_fn(q, k, v, dtype=jnp.float16)
    assert half.dtype == jnp.float16
    np.testing.assert_array_equal(half, attention_fn(*(x.astype(np.float16) for x in (q, k, v))))
    assert attention_fn(q, k.astype(np.float16), v.astype(jnp.bfloat16)).dtype == np.float32
    integers = [np.ones((1, 5, 2, 8), np.int32)] * 3
    assert attention_fn(*integers).dtype == linen.dot_product_attention(*integers).dtype == np.float32
    given = []

    def promote(arrays, *, dtype):
        given.append((len(arrays), dtype))
        return tuple(jnp.asarray(array, jnp.bfloat16) for array in arrays)

    assert attention_fn(q, k, v, promote_dtype=promote).dtype == jnp.bfloat16
    assert given == [(3, None)]


@pytest.mark.usefixtures("standard_promotion")  # Flax multiplies weights and values of two dtypes
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("force", [False, True])
def test_softmax_in_float32_gives_the_dtypes_of_flax(force, dtype):
    found = []
    for attention in (attention_fn, linen.dot_product_attention):
        params, f = linen_layer(attention, param_dtype=dtype, force_fp32_for_softmax=force)
        each = [functools.partial(f, mask=CAUSAL, **sow) for sow in ({}, {"sow_weights": True})]
        alone, both = (jax.eval_shape(one, params, INPUTS[0].astype(dtype)) for one in each)
        found.append([array.dtype for array in jax.tree.leaves((alone, both))])
    assert found[0] == found[1]
    assert set(found[0]) == {np.dtype(np.float32 if force else jnp.dtype(dtype))}


@BOTH
def test_deterministic_says_nothing_of_gradients(api, monkeypatch):
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    params, f = api.layer(attention_fn, dropout_rate=0.5)
    jaxpr = str(jax.make_jaxpr(functools.partial(f, deterministic=True))(params, *INPUTS))
    assert "deterministic_gradients=False" in jaxpr
    assert "deterministic_gradients=True" not in jaxpr


# Dropout. With the unit matrix as values, the output is the weights.

UNIT = np.broadcast_to(np.eye(64, dtype=np.float32)[:, None], (3, 64, 2, 64))
Q, K = normal(2, 3, 64, 2, 64) / 3


@pytest.mark.parametrize("rate", [0.2, 0.7])
@pytest.mark.parametrize("attention", [attention_fn, *(api.own for api in APIS.values())], ids=["ours", *APIS])
def test_dropout_drops_its_part_and_is_broadcast_as_in_flax(attention, rate):
    key = jax.random.key(0)

    @jax.jit
    def every(query, keys, value, key):
        attend = functools.partial(attention, query, keys, value)
        both = [attend(dropout_rate=rate, dropout_rng=key, broadcast_dropout=broadcast) for broadcast in (True, False)]
        return attend(), *both

    whole, *of_each = (np.swapaxes(np.asarray(out), 1, 2) for out in every(Q, K, UNIT, key))  # [batch, heads, queries, keys]
    for broadcast, dropped in zip((True, False), of_each, strict=True):
        kept = dropped != 0
        few = 2 * (8 + 3 * 16) * oracle.EPS  # roundings of two weights, of scores that are less than 16 apart
        np.testing.assert_allclose(dropped[kept], whole[kept] / (1 - rate), rtol=few)
        same = np.mean(kept == kept[:1, :1], (2, 3))
        if broadcast:
            np.testing.assert_array_equal(same, 1)
            kept = kept[:1, :1]
        else:  # as likely as two that have nothing in common
            chance = rate**2 + (1 - rate) ** 2
            assert np.all(np.abs(same.ravel()[1:] - chance) < 5 * np.sqrt(chance * (1 - chance) / 64**2))
        assert abs(np.mean(~kept) - rate) < 5 * np.sqrt(rate * (1 - rate) / kept.size)


@pytest.mark.parametrize("broadcast", [True, False])
def test_the_mean_of_dropout_is_attention(broadcast):
    def f(key):
        return attention_fn(Q, K, UNIT, dropout_rate=0.5, dropout_rng=key, broadcast_dropout=broadcast)

    many = np.asarray(jax.jit(jax.vmap(f))(jax.random.split(jax.random.key(0), 64)))
    deviation = np.max(np.std(many, 0), initial=0) / np.sqrt(64)
    np.testing.assert_allclose(np.mean(many, 0), attention_fn(Q, K, UNIT), atol=6 * deviation)


@BOTH
def test_dropout_of_a_module_comes_from_its_key(api):
    params, f = api.layer(attention_fn, dropout_rate=0.4)
    f = functools.partial(f, mask=CAUSAL)
    with_key = jax.jit(lambda key: f(params, *INPUTS, deterministic=False, dropout=key))
    first, again, other = (with_key(jax.random.key(seed)) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)
    plain = functools.partial(api.layer(attention_fn)[1], mask=CAUSAL)
    none, expected = (jax.jit(one)(params, *INPUTS) for one in (functools.partial(f, deterministic=True), plain))
    np.testing.assert_array_equal(none, expected)
    assert np.any(first != none)
    gradient = jax.grad(loss_of(f, deterministic=False, dropout=jax.random.key(1)), has_aux=True)
    assert ops(gradient, params, *INPUTS) == [("dot_product_attention", "xla"), ("dot_product_attention_vjp", "xla")]


# Weights that are sown, and einsums of the caller's own.


@BOTH
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_are_sown_as_by_flax_and_change_nothing(api, dtype):
    mask = linen.combine_masks(CAUSAL, KEYS_OF_LEFT)
    more = {"mask": mask, "deterministic": False, "dropout": jax.random.key(1)}
    (params, f), (_, own) = (api.layer(fn, dropout_rate=0.3, dtype=dtype) for fn in (attention_fn, api.own))
    every = [functools.partial(g, sow_weights=True, **more) for g in (f, own)] + [functools.partial(f, **more)]
    (out, ours), (_, theirs), alone = jax.jit(lambda *args: [g(*args) for g in every])(params, *INPUTS)
    np.testing.assert_array_equal(out, alone)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    (ours,), (theirs,) = jax.tree.leaves(ours), jax.tree.leaves(theirs)
    assert ours.dtype == theirs.dtype == dtype
    assert ours.shape == theirs.shape == (BATCH, HEADS, LENGTH, LENGTH)
    seeing = np.any(mask, 3, keepdims=True)
    expected = np.where(seeing, np.asarray(theirs, np.float32), 0)
    # Weights are at most 1 / 0.7, a few roundings of it apart; in bfloat16 Flax rounds scores to 2^-8 of them, and so weights.
    few = 32 * oracle.EPS if dtype == "float32" else 2**-6
    np.testing.assert_allclose(np.asarray(ours, np.float32), expected, rtol=0, atol=few)


def test_weights_of_grouped_heads_and_is_causal_are_sown():
    (params, f), (_, own) = (nnx_layer(fn, num_kv_heads=2) for fn in (attention_fn, nnx.dot_product_attention))
    call = {"mask": CASES["padding right"]["mask"], "is_causal": True, "sow_weights": True}
    assert_same(*jax.jit(lambda *args: [g(*args, **call) for g in (f, own)])(params, *INPUTS))


@BOTH
def test_weights_that_are_sown_have_gradients(api):
    def gradient(f, params):
        def squares(params):
            _, sown = f(params, *INPUTS, mask=CAUSAL, sow_weights=True)
            return sum(jnp.sum(weights**2) for weights in jax.tree.leaves(sown))

        return jax.grad(squares)(params)

    (params, f), (_, own) = (api.layer(fn) for fn in (attention_fn, api.own))
    assert_same(*jax.jit(lambda params: [gradient(g, params) for g in (f, own)])(params))


@pytest.mark.parametrize("rate", [0.0, 0.4])
@pytest.mark.parametrize("broadcast", [True, False])
def test_einsums_of_linen_get_what_flax_gives_them_and_the_same_weights_are_dropped(rate, broadcast):
    given = {attention_fn: [], linen.dot_product_attention: []}

    def layer(attention, **options):
        def einsum(equation, *operands):
            given[attention].append((equation, *operands))
            return jnp.einsum(equation, *operands)

        options = {f"{name}_einsum_cls": lambda: einsum for name in ("qk_attn_weights", "attn_weights_value")} | options
        return linen_layer(attention, dropout_rate=rate, broadcast_dropout=broadcast, **options)

    (params, f), (_, own) = map(layer, given)
    call = {"mask": CASES["causal and padding"]["mask"], "deterministic": False, "dropout": jax.random.key(3)}
    for recorded in given.values():
        recorded.clear()  # what initialization gave
    _, kernel = linen_layer(attention_fn, dropout_rate=rate, broadcast_dropout=broadcast)

    @jax.jit
    def every(*args):
        outs = [g(*args, **call) for g in (f, own, kernel)]
        return outs, [[operands for _, *operands in recorded] for recorded in given.values()]

    (out, expected, alone), operands = every(params, *INPUTS)
    equations, of_flax = ([equation for equation, *_ in recorded] for recorded in given.values())
    assert equations == of_flax
    for ours, theirs in zip(*operands, strict=True):
        assert_same(ours if rate == 0 else ours[1:], theirs if rate == 0 else theirs[1:])
    assert_same(out, alone)
    if rate == 0:
        assert_same(out, expected)
    assert [name for name, _ in ops(functools.partial(f, **call), params, *INPUTS)] == ["softmax"]


# Decoding.

TOKENS, VOCABULARY = 16, 23
EMBEDDING = normal(VOCABULARY, WIDTH, seed=5)
HELD = padding([TOKENS, TOKENS - 3], TOKENS, left=True) != 0  # the second sequence begins with three tokens of padding
PROMPT = 6


def linen_steps(attention):
    """A function of embedded tokens `[batch, 1, width]` that goes through the cache."""
    options = {"num_heads": HEADS, "attention_fn": attention, "decode": True}
    module = linen.MultiHeadDotProductAttention(**options)
    variables = jax.jit(module.init)(jax.random.key(0), np.zeros((BATCH, TOKENS, WIDTH), np.float32))

    @jax.jit
    def apply(cache, x):
        variables_of_step = {"params": variables["params"], "cache": cache}
        return module.apply(variables_of_step, x, mask=HELD[:, None, None], mutable=["cache"])

    cache = variables["cache"]

    def step(x):
        nonlocal cache
        out, state = apply(cache, x)
        cache = state["cache"]
        return out

    whole = linen.MultiHeadDotProductAttention(**options | {"decode": False})
    return step, jax.jit(lambda x, mask: whole.apply({"params": variables["params"]}, x, mask=mask))


def nnx_steps(attention):
    module = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention, num_kv_heads=2, decode=True, rngs=nnx.Rngs(0))
    module.init_cache((BATCH, TOKENS, WIDTH))
    # With `is_causal`, which nnx does not pass on where it decodes.
    apply = nnx.jit(lambda module, x: module(x, mask=HELD[:, None, None], is_causal=True))
    return functools.partial(apply, module), lambda x, mask: module(x, mask=mask, decode=False)


@pytest.mark.parametrize(
    ("steps", "own"), [(linen_steps, linen.dot_product_attention), (nnx_steps, nnx.dot_product_attention)], ids=APIS
)
def test_decoding_gives_what_flax_gives_for_its_tokens(steps, own):
    """Ours is fed the tokens that Flax's own attention chose: of its own choice two that are as likely may be another one."""

    def decode(attention, tokens=None):
        """The tokens, the prompt first, and the outputs, one after another; and the module without a cache."""
        chosen = np.random.default_rng(0).integers(0, VOCABULARY, (BATCH, TOKENS)) if tokens is None else tokens
        step, whole = steps(attention)
        outs = []
        for position in range(TOKENS):
            out = np.asarray(step(EMBEDDING[chosen[:, position, None]]))
            if tokens is None and PROMPT <= position + 1 < TOKENS:
                chosen[:, position + 1] = np.argmax(out[:, 0] @ EMBEDDING.T, -1)
            outs.append(out)
        return chosen, np.concatenate(outs, 1), whole

    tokens, expected, _ = decode(own)
    _, out, whole = decode(attention_fn, tokens)
    seen = HELD[..., None]  # padding sees nothing, or itself
    assert_same(np.where(seen, out, 0), np.where(seen, expected, 0))
    mask = linen.make_causal_mask(HELD, dtype=bool) & HELD[:, None, None]
    assert_same(np.where(seen, whole(EMBEDDING[tokens], mask), 0), np.where(seen, out, 0))


# Transformations.


@BOTH
def test_vmap_is_a_batch(api):
    params, f = api.layer(attention_fn)
    call = lambda x, mask: f(params, x, mask=mask)  # noqa: E731
    assert_same(*jax.jit(lambda *args: (jax.vmap(call)(*args), call(*args)))(INPUTS[0], CAUSAL))


POLICY = jax.checkpoint_policies.save_only_these_names(*SAVED_NAMES)


class LinenBlock(linen.Module):
    attention: Any

    @linen.compact
    def __call__(self, x, _):
        return x + linen.MultiHeadDotProductAttention(HEADS, attention_fn=self.attention)(x, mask=CAUSAL), None


class NnxBlock(nnx.Module):
    def __init__(self, attention, rngs):
        self.attention = nnx.MultiHeadAttention(HEADS, WIDTH, attention_fn=attention, decode=False, rngs=rngs)

    def __call__(self, x):
        return x + self.attention(x, mask=CAUSAL)


def of_a_stack(abstract):
    """Parameters of three layers: what they add to the stream is no larger than what enters it."""
    return jax.tree.map(lambda a: a / 2, filled(abstract))


def linen_stack(attention):
    block = linen.remat(LinenBlock, policy=POLICY, prevent_cse=False)
    stack = linen.scan(block, {"params": 0}, split_rngs={"params": True}, length=3)(attention)
    params = of_a_stack(jax.eval_shape(stack.init, jax.random.key(0), *INPUTS, None))
    return params, lambda params, x: stack.apply(params, x, None)[0]


def nnx_stack(attention):
    make = nnx.split_rngs(splits=3)(nnx.vmap(lambda rngs: NnxBlock(attention, rngs)))
    graph, params = nnx.split(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
    block = nnx.remat(lambda block, x: block(x), policy=POLICY, prevent_cse=False)
    stack = nnx.jit(nnx.scan(block, in_axes=(0, nnx.Carry), out_axes=nnx.Carry))
    return of_a_stack(params), lambda params, x: stack(nnx.merge(graph, params), x)


@pytest.mark.parametrize(
    ("stack", "own"), [(linen_stack, linen.dot_product_attention), (nnx_stack, nnx.dot_product_attention)], ids=APIS
)
def test_layers_in_a_scan_whose_checkpoints_save_out_and_lse(stack, own):
    params, f = stack(attention_fn)
    assert_same(*results_of([(params, f), stack(own)], INPUTS))
    gradient = jax.grad(loss_of(f), has_aux=True)
    assert ops(gradient, params, *INPUTS) == [("dot_product_attention", "xla"), ("dot_product_attention_vjp", "xla")]


def test_a_causal_model_keeps_nothing_of_the_size_of_its_mask():
    params, f = nnx_layer(attention_fn)
    inputs = (normal(1, 200, WIDTH),)

    def kept(**call):
        residuals = jax.eval_shape(lambda *args: jax.vjp(lambda *args: f(*args, **call), *args)[1], params, *inputs)
        return max(leaf.size for leaf in jax.tree.leaves(residuals))

    assert kept(is_causal=True) < 200**2 <= kept(mask=np.tril(np.ones((1, 1, 200, 200))))


# Sharding.

SHARDED = {
    "plain": {},
    "dropout": {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0)},
    "sown": {"module": SimpleNamespace(sow=lambda *_: None)},
    "einsums": {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum},
}
SHARDED["einsums and dropout"] = SHARDED["einsums"] | SHARDED["dropout"]


@pytest.mark.parametrize("kind", SHARDED)
@pytest.mark.parametrize("key_heads", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("axis_type", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit], ids=str)
def test_batch_and_heads_stay_sharded(axis_type, key_heads, kind):
    mesh = jax.make_mesh((2, 2), ("data", "model"), axis_types=(axis_type,) * 2, devices=jax.devices("cpu")[:4])
    arrays = [normal(4, LENGTH, heads, 8, seed=seed) for seed, heads in enumerate((4, key_heads, key_heads))]
    mask = np.broadcast_to(CAUSAL[:1], (4, 1, LENGTH, LENGTH))
    f = jax.jit(functools.partial(attention_fn, **SHARDED[kind]))
    expected = f(*arrays, mask=mask)
    with jax.set_mesh(mesh):
        sharding = NamedSharding(mesh, P("data", None, "model"))
        found = f(*(jax.device_put(a, sharding) for a in arrays), mask=jax.device_put(mask, NamedSharding(mesh, P("data"))))
    assert tuple(found.sharding.spec)[:3] == ("data", None, "model")
    few = 2 * (8 + LENGTH) * oracle.EPS  # roundings of either sum, of values and weights that are divided by 0.7
    np.testing.assert_allclose(found, expected, rtol=0, atol=few * np.max(np.abs(arrays[2])) / 0.7)


# Rotated positions.


@pytest.mark.filterwarnings("ignore:'.value' access:DeprecationWarning")
@pytest.mark.parametrize(
    "options", [pytest.param({}, marks=pytest.mark.slow), {"embedding_size": 8, "max_seq_len": 20}], ids=str
)
def test_rope_is_that_of_flax(options):
    rope = nnx.RoPE(**options)
    functions = attention_fn_with_rope, nnx.dot_product_attention_with_rope
    assert_same(*results_of([nnx_layer(functools.partial(fn, rope=rope)) for fn in functions], INPUTS, is_causal=True))


@pytest.mark.parametrize("batch", [(), (1,), (BATCH,)])
def test_rope_takes_positions(batch):
    """Those of a sequence may start anywhere: only differences count."""
    params, f = nnx_layer(functools.partial(attention_fn_with_rope, rope=nnx.RoPE()))
    positions = np.arange(LENGTH) + np.arange(5, 5 + math.prod(batch)).reshape(*batch, 1)
    every = jax.jit(lambda *args: [f(*args, **call) for call in ({}, *({"input_positions": i * positions} for i in (1, 3)))])
    expected, found, far = every(params, *INPUTS)
    assert_same(found, expected)
    assert np.max(np.abs(far - expected)) > 1e-3


def test_rope_may_change_the_head_size():
    assert attention_fn_with_rope(ARRAY, ARRAY, ARRAY, rope=lambda x: x[:, :4]).shape == ARRAY.shape


def test_a_sharded_batch_may_share_positions():
    mesh = jax.make_mesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Explicit,))
    whole = np.random.default_rng(0).standard_normal(ARRAY.shape, np.float32)
    attend = functools.partial(attention_fn_with_rope, rope=nnx.RoPE(), input_positions=np.arange(ARRAY.shape[-3]))
    with jax.set_mesh(mesh):
        array = jax.device_put(whole, jax.P("data"))
        found = jax.jit(attend)(array, array, array)
    assert found.sharding.spec[0] == "data"
    assert_same(np.asarray(found), attend(whole, whole, whole))


def test_rope_names_bad_arguments():
    bad = functools.partial(attention_fn_with_rope, rope=nnx.RoPE())
    with pytest.raises(ValueError, match=r"input_positions must broadcast to \(2, 6\), as query has, got shape \(5,\)"):
        bad(ARRAY, ARRAY, ARRAY, input_positions=np.arange(5))
    with pytest.raises(ValueError, match=r"query must have at least 3 axes, got shape \(4, 8\)"):
        bad(ARRAY[0, 0], ARRAY, ARRAY)
    with pytest.raises(TypeError, match="key must be an array of numbers, got list"):
        bad(ARRAY, [1.0], ARRAY)


# Which implementation runs.

DROPPED = {"deterministic": False, "dropout": jax.random.key(0)}
ON_CUDA = {
    "linen, causal, dropout": ("linen", {"dropout_rate": 0.1}, {"mask": CAUSAL} | DROPPED),
    "nnx, causal": ("nnx", {}, {"mask": CAUSAL}),
    "nnx, is_causal, grouped heads": ("nnx", {"num_kv_heads": 2}, {"mask": CAUSAL, "is_causal": True}),
}


def gradient_on_cuda(kind):
    """The gradient of a layer's loss, and the layer's parameters."""
    api, options, call = ON_CUDA[kind]
    params, f = APIS[api].layer(attention_fn, dtype=jnp.bfloat16, **options)
    return jax.grad(loss_of(f, **call), has_aux=True), params


@pytest.mark.usefixtures("choices")
@pytest.mark.parametrize("kind", ON_CUDA)
def test_kernels_are_chosen_on_cuda(kind):
    gradient, params = gradient_on_cuda(kind)
    expected = [("dot_product_attention", "mosaic"), ("dot_product_attention_vjp", "mosaic")]
    assert ops(gradient, params, *INPUTS, platform="cuda") == expected


def test_kernels_are_lowered_for_cuda():
    gradient, params = gradient_on_cuda(next(iter(ON_CUDA)))
    kernels.lowered_for_cuda(gradient, params, *INPUTS, kernels=["attention_forward_mosaic", "attention_backward_mosaic"])


LONG = 300
NATIVE = {
    "causal": lambda: {"mask": linen.make_causal_mask(np.ones((BATCH, LONG)))},
    "padding left": lambda: {"mask": linen.make_attention_mask(np.ones((BATCH, LONG)), padding([5, 260], LONG, left=True))},
    "no mask": lambda: {"mask": None},
    "dropout": lambda: {"mask": linen.make_causal_mask(np.ones((BATCH, LONG)))} | DROPPED,
}


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu", "standard_promotion")  # Flax multiplies weights and values of two dtypes
@BOTH
@pytest.mark.parametrize("kind", NATIVE)
@pytest.mark.parametrize("size", [64, 128])
def test_native_kernels_err_about_as_little_as_flax(api, kind, size):
    """The truth of either is in float32, with products in float32 and dropout of the same weights: of ours, the reference."""
    call = NATIVE[kind]()
    inputs = (normal(BATCH, LONG, WIDTH, dtype="bfloat16"),)
    options = {"param_dtype": "bfloat16", "qkv_features": HEADS * size, "dropout_rate": 0.3 if kind == "dropout" else 0.0}
    params, f = api.layer(attention_fn, **options)
    gradient = jax.grad(loss_of(f, **call), has_aux=True)
    expected = [("dot_product_attention", "mosaic"), ("dot_product_attention_vjp", "mosaic")]
    assert ops(gradient, params, *inputs, platform=None) == expected

    def errors(layer):
        (rounded,) = results_of([layer], inputs, **call)
        assert rounded[0].dtype == "bfloat16"
        widened = jax.tree.map(lambda a: a.astype("float32"), layer[0]), layer[1]
        with jax.default_matmul_precision("highest"):  # no kernel takes it
            (exact,) = results_of([widened], (inputs[0].astype("float32"),), **call)
        rounded, exact = ([np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(tree)] for tree in (rounded, exact))
        return [(np.linalg.norm(a - b), np.linalg.norm(b)) for a, b in zip(rounded, exact, strict=True)]

    ours, theirs = errors((params, f)), errors(api.layer(api.own, **options))
    # A bias of keys changes nothing: its gradient is what rounding leaves.
    least = 2**-8 * max(norm for _, norm in ours)
    for (mine, _), (others, _) in zip(ours, theirs, strict=True):
        assert mine <= max(2 * others, least)


# Imports and errors.


def test_flax_is_imported_with_the_module_only():
    code = "import sys, jaxsoftmax; assert 'flax' not in sys.modules; import jaxsoftmax.flax; assert 'flax' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.filterwarnings("ignore:SelfAttention will be deprecated:DeprecationWarning")
def test_self_attention_takes_it_too():
    module = linen.SelfAttention(HEADS, attention_fn=attention_fn)
    out, params = module.init_with_output(jax.random.key(0), *INPUTS, mask=CAUSAL)
    assert_same(out, module.clone(attention_fn=linen.dot_product_attention).apply(params, *INPUTS, mask=CAUSAL))


ARRAY = np.zeros((2, 6, 4, 8), np.float32)
EINSUMS = {"qk_attn_weights_einsum": jnp.einsum, "attn_weights_value_einsum": jnp.einsum}
BAD = {
    "query is a list": ({"query": [1.0]}, TypeError, ["query", "array", "list"]),
    "value is None": ({"value": None}, TypeError, ["value", "array", "NoneType"]),
    "key of other heads": ({"key": ARRAY[:, :, :3], "value": ARRAY[:, :, :3]}, ValueError, ["query", "4 and 3 heads"]),
    "complex operands": ({"dtype": "complex64"}, TypeError, ["attention_fn: dtype", "float64", "got complex64"]),
    "complex queries": ({"query": ARRAY.astype(np.complex64)}, TypeError, ["attention_fn: query must be real", "complex64"]),
    "complex values": ({"value": ARRAY.astype(np.complex64)}, TypeError, ["attention_fn: value must be real", "complex64"]),
    "a product of two arrays": (
        {"einsum_dot_general": jax.lax.dot_general},
        ValueError,
        ["attention_fn: einsum_dot_general must be None", "qk_attn_weights_einsum and attn_weights_value_einsum"],
    ),
    "dtype of 8 bits": ({"dtype": jnp.float8_e4m3fn}, TypeError, ["attention_fn: dtype", "float16", "got float8_e4m3fn"]),
    "no dtype": ({"dtype": "half of it"}, TypeError, ["attention_fn: dtype", "float16", "half of it"]),
    "promotion by a number": ({"promote_dtype": 3}, TypeError, ["attention_fn: promote_dtype", "function", "3"]),
    "einsums are numbers": (
        {"qk_attn_weights_einsum": 3, "attn_weights_value_einsum": 3},
        TypeError,
        ["attention_fn: qk_attn_weights_einsum", "function", "3"],
    ),
    "mask is a list": ({"mask": [True]}, TypeError, ["mask", "array", "list"]),
    "mask of text": ({"mask": jax.random.key(0)}, TypeError, ["mask", "numbers", "key"]),
    "mask of another shape": ({"mask": np.ones((2, 4, 6, 5))}, ValueError, ["mask", "(2, 4, 6, 5)", "(2, 4, 6, 6)"]),
    "the same, with einsums": ({"mask": np.ones((2, 4, 6, 5))} | EINSUMS, ValueError, ["mask", "(2, 4, 6, 5)"]),
    "bias of integers": ({"bias": np.ones((6, 6), np.int32)}, TypeError, ["bias", "floating", "int32"]),
    "deterministic is None": ({"deterministic": None}, TypeError, ["deterministic", "True or False", "None"]),
    "dropout without a key": ({"dropout_rate": 0.1}, ValueError, ["dropout_rng", "key", "None"]),
    "dropout of everything": ({"dropout_rate": 1.0}, ValueError, ["dropout_rate", "[0, 1)", "1.0"]),
    "broadcast is a number": ({"broadcast_dropout": 1}, TypeError, ["broadcast_dropout", "True or False", "1"]),
    "force is a number": ({"force_fp32_for_softmax": 1}, TypeError, ["force_fp32_for_softmax", "True or False", "1"]),
    "causal is None": ({"is_causal": None}, TypeError, ["is_causal", "True or False", "None"]),
    "module is text": ({"module": "m"}, TypeError, ["module", "linen or nnx", "str"]),
    "one einsum": (
        {"qk_attn_weights_einsum": jnp.einsum},
        ValueError,
        ["qk_attn_weights_einsum must come with attn_weights_value_einsum"],
    ),
    "the other einsum": (
        {"attn_weights_value_einsum": jnp.einsum},
        ValueError,
        ["attn_weights_value_einsum must come with qk_attn_weights_einsum"],
    ),
    "einsums and precision": ({"precision": "highest"} | EINSUMS, ValueError, ["precision", "einsums", "'highest'"]),
    "precision": ({"precision": "exact"}, ValueError, ["precision", "jax.lax.dot", "'exact'"]),
}


def test_flags_may_be_arrays():
    options = {"dropout_rate": 0.5, "dropout_rng": jax.random.key(0)}
    np.testing.assert_array_equal(
        attention_fn(ARRAY, ARRAY, ARRAY, deterministic=jnp.bool_(True), is_causal=jnp.bool_(True), **options),
        attention_fn(ARRAY, ARRAY, ARRAY, deterministic=True, is_causal=True, **options),
    )
    with pytest.raises(TypeError, match="deterministic must be True or False"):
        jax.jit(lambda flag: attention_fn(ARRAY, ARRAY, ARRAY, deterministic=flag, **options))(True)


@pytest.mark.parametrize("kind", BAD)
def test_bad_arguments_are_named(kind):
    wrong, error, words = BAD[kind]
    with pytest.raises(error) as raised:
        attention_fn(**{"query": ARRAY, "key": ARRAY, "value": ARRAY} | wrong)
    for word in words:
        assert word in str(raised.value)


# Sequences that are sharded.


def test_a_sharded_sequence_in_zigzag_order_gives_what_a_whole_one_does(standard_promotion):
    """In a `shard_map`, where the layer says so, and on a mesh whose axes say so themselves."""
    x, n = normal(BATCH, 16, WIDTH), 2
    mesh = jax.make_mesh((n,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices("cpu")[:n])

    fn = functools.partial(attention_fn_with_rope, rope=nnx.RoPE(), is_causal=True)
    params, whole = linen_layer(fn)
    expected = jax.jit(whole)(params, x)

    def layer(x, positions, axis_name=None):
        parallel = jaxsoftmax.ContextParallel("ring", zigzag=n, axis_name=axis_name)
        own = functools.partial(fn, input_positions=positions, parallel=parallel)
        module = linen.MultiHeadDotProductAttention(attention_fn=own, num_heads=HEADS, qkv_features=2 * WIDTH)
        return module.apply({"params": params}, x, deterministic=True)

    on_shard = functools.partial(layer, axis_name="x")
    ordered = jaxsoftmax.zigzag(x, n, 1), jaxsoftmax.zigzag(np.arange(16), n)
    mapped = jax.jit(jax.shard_map(on_shard, mesh=mesh, in_specs=(P(None, "x"), P("x")), out_specs=P(None, "x")))
    assert_close = functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5)
    undone = jax.jit(lambda x: jaxsoftmax.unzigzag(x, n, 1))
    assert_close(undone(np.asarray(mapped(*ordered))), expected)
    with jax.set_mesh(mesh):
        shards = jax.device_put(ordered[0], NamedSharding(mesh, P(None, "x")))
        found = jax.jit(layer)(shards, ordered[1])
    assert_close(undone(np.asarray(found)), expected)


ORDER = jaxsoftmax.ContextParallel(zigzag=2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda x: attention_fn(x, x, x, parallel=ORDER, module=SimpleNamespace(sow=print)),
            "attention_fn: parallel must have no zigzag where weights are in memory, got 2",
        ),
        (
            lambda x: attention_fn_with_rope(x, x, x, parallel=ORDER, rope=lambda x: x),
            "attention_fn_with_rope: parallel must have no zigzag without input_positions, got 2",
        ),
    ],
)
def test_what_knows_no_order_refuses_it(call, words):
    with pytest.raises(ValueError, match=words):
        call(normal(1, 8, 2, 4))
