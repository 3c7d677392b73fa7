"""Score and mask functions: each variant equals the same thing written out, with all derivatives, however it is transformed."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
import jaxsoftmax.flax
from jaxsoftmax import dot_product_attention, explain
from jaxsoftmax.ops.attention import score_functions, xla
from jaxsoftmax.ops.attention.operands import MAX_TABLES

from ..support import oracle
from ..support.attention.variants import VARIANTS, Sizes, written_out

X64 = pytest.mark.usefixtures("x64")


@pytest.fixture
def tiles(monkeypatch):
    """Cuts the scores into many tiles."""
    monkeypatch.setattr(xla, "ONE_TILE", 0)
    monkeypatch.setattr(xla, "BLOCK", (8, 16))


def operands(rng, sizes: Sizes, key_heads=2, dtype=np.float64):
    shapes = (sizes.batch, sizes.queries, sizes.heads, 8), (sizes.batch, sizes.keys, key_heads, 8)
    return [jnp.asarray(rng.standard_normal(shape), dtype) for shape in (*shapes, shapes[1])]


def loss(out, lse):
    return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(jnp.where(lse == -jnp.inf, 0, lse)))


def both_ways(variant):
    """Returns attention as a function of the moving arrays and the operands: by functions, and written out."""

    def by_functions(moving, *arrays):
        fixed = {name: jnp.asarray(x) for name, x in variant.arrays.items() if name not in moving}
        functions = variant.functions(fixed | moving)
        return dot_product_attention(*arrays, **functions, return_residual=True)

    return by_functions, lambda moving, *arrays: written_out(variant, variant.arrays | moving, *arrays)


def made(name, seed=0, sizes=None, dtype=np.float64):
    """Returns a variant, its moving arrays, and query, key and value."""
    rng = np.random.default_rng([seed, *name.encode()])
    sizes = sizes or Sizes(*(int(n) for n in rng.integers((1, 1, 1), (3, 40, 60))), 4)
    variant = VARIANTS[name](rng, sizes)
    key_heads = int(rng.choice([n for n in (1, 2, 4) if sizes.heads % n == 0]))
    return variant, {n: jnp.asarray(x, dtype) for n, x in variant.moving.items()}, operands(rng, sizes, key_heads, dtype)


@X64
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(1, 8))])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_equals_the_same_written_out(name, seed):
    variant, moving, arrays = made(name, seed)
    ours, written = both_ways(variant)
    oracle.assert_same_in_float64(jax.jit(ours)(moving, *arrays), jax.jit(written)(moving, *arrays))
    actual, expected = (
        jax.jit(jax.grad(lambda *args, f=f: loss(*f(*args)), argnums=range(4)))(moving, *arrays) for f in (ours, written)
    )
    oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.usefixtures("tiles")
@pytest.mark.parametrize("name", VARIANTS)
def test_tiles_get_the_numbers_of_their_queries_and_keys(name):
    variant, moving, arrays = made(name, sizes=Sizes(2, 37, 45, 2))
    ours, written = both_ways(variant)
    actual, expected = (
        jax.jit(jax.value_and_grad(lambda *args, f=f: loss(*f(*args)), argnums=range(4)))(moving, *arrays)
        for f in (ours, written)
    )
    oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.parametrize("name", ["relative", "gated", "soft_documents", "temperature"])
def test_tangents_and_second_derivatives(name):
    variant, moving, arrays = made(name, sizes=Sizes(2, 5, 6, 2))
    pairs = [lambda moving, *arrays, f=f: loss(*f(moving, *arrays)) for f in both_ways(variant)]
    args = moving, *arrays
    rng = np.random.default_rng(0)
    tangents = jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), args)
    for derive in (
        lambda f: jax.jvp(f, args, tangents)[1],
        lambda f: jax.linearize(f, *args)[1](*tangents),
        lambda f: jax.jvp(jax.grad(f), args, tangents)[1],  # forward over reverse
        lambda f: jax.grad(lambda *args: jax.jvp(f, args, tangents)[1])(*args),  # reverse over forward
        lambda f: jax.grad(lambda *args: sum(map(jnp.vdot, *map(jax.tree.leaves, (jax.grad(f)(*args), moving)))))(*args),
    ):
        oracle.assert_same_in_float64(*(jax.jit(lambda f=f, derive=derive: derive(f))() for f in pairs))


MAPPED = [{"table"}, {"query"}, {"value"}, {"table", "query"}, {"key", "value"}, {"table", "query", "key", "value"}]


@X64
@pytest.mark.parametrize("mapped", MAPPED, ids=lambda names: "+".join(sorted(names)))
def test_vmap_of_each_operand_alone_keeps_the_numbers_of_batch_entries(mapped):
    rng, sizes = np.random.default_rng(0), Sizes(2, 6, 7, 2)
    names = ("table", "query", "key", "value")
    arrays = dict(zip(names, (jnp.asarray(rng.standard_normal((2, 2, 7))), *operands(rng, sizes)), strict=True))
    arrays |= {name: jnp.stack([arrays[name], 2 * arrays[name] + 1, -arrays[name]]) for name in mapped}

    def f(table, query, key, value):
        def score_mod(score, batch, head, query_index, key_index):
            return score + table[batch, head, key_index] * (query_index + 1).astype(score.dtype)

        return dot_product_attention(query, key, value, score_mod=score_mod, mask_mod=lambda b, h, q, k: k <= q + b)

    def total(*arrays):
        return jnp.sum(jnp.sin(f(*arrays)))

    values = list(arrays.values())
    for g in (f, jax.grad(total, argnums=range(4)), lambda *args: jax.jvp(total, args, args)[1]):
        over = jax.vmap(g, in_axes=[0 if name in mapped else None for name in names])
        each = [g(*(arrays[name][i] if name in mapped else arrays[name] for name in names)) for i in range(3)]
        oracle.assert_same_in_float64(jax.jit(over)(*values), jax.tree.map(lambda *x: jnp.stack(x), *each))


SAME = {  # functions, and the arguments that mean the same
    "causal": (lambda ids, bias: {"mask_mod": lambda b, h, q, k: k <= q}, lambda ids, bias: {"is_causal": True}),
    "offset": (
        lambda ids, bias: {"mask_mod": lambda b, h, q, k: k <= q, "query_offset": jnp.array([3, -4])},
        lambda ids, bias: {"is_causal": True, "query_offset": jnp.array([3, -4])},
    ),
    "window": (
        lambda ids, bias: {"mask_mod": lambda b, h, q, k: (k >= q - 5) & (k <= q + 2)},
        lambda ids, bias: {"local_window_size": (5, 2)},
    ),
    "segments": (
        lambda ids, bias: {"mask_mod": lambda b, h, q, k: ids[b, q] == ids[b, k]},
        lambda ids, bias: {"query_segment_ids": ids, "key_value_segment_ids": ids},
    ),
    "lengths": (
        lambda ids, bias: {"mask_mod": lambda b, h, q, k: (q < 9) & (k < 6 + b)},
        lambda ids, bias: {"query_seq_lengths": jnp.array([9, 9]), "key_value_seq_lengths": jnp.array([6, 7])},
    ),
    "soft cap": (
        lambda ids, bias: {"score_mod": lambda s, b, h, q, k: 0.7 * jnp.tanh(s / 0.7)},
        lambda ids, bias: {"logits_soft_cap": 0.7},
    ),
    "bias": (
        lambda ids, bias: {"score_mod": lambda s, b, h, q, k: s + bias[h, q, k]},
        lambda ids, bias: {"bias": bias},
    ),
    "before the cap and the bias": (
        lambda ids, bias: {"score_mod": lambda s, b, h, q, k: 3 * s, "logits_soft_cap": 0.7, "bias": bias, "scale": 0.25},
        lambda ids, bias: {"logits_soft_cap": 0.7, "bias": bias, "scale": 0.75},
    ),
}


@X64
@pytest.mark.parametrize("name", SAME)
def test_arguments_are_functions_too(name):
    rng, sizes = np.random.default_rng(0), Sizes(2, 13, 13, 4)
    arrays, bias = operands(rng, sizes), jnp.asarray(rng.standard_normal((4, 13, 13)))
    ids = jnp.asarray(np.sort(rng.integers(0, 3, (2, 13)), 1), jnp.int32)

    def total(of, bias, *arrays):
        return loss(*dot_product_attention(*arrays, **of(ids, bias), return_residual=True))

    grads = [jax.jit(jax.value_and_grad(functools.partial(total, of), argnums=range(4)))(bias, *arrays) for of in SAME[name]]
    oracle.assert_same_in_float64(*grads)


@X64
def test_a_key_that_a_function_hides_stays_hidden_behind_the_cap():
    arrays = operands(np.random.default_rng(0), Sizes(2, 13, 13, 4))

    def total(options, *arrays):
        return loss(*dot_product_attention(*arrays, logits_soft_cap=0.7, return_residual=True, **options))

    hiding = {"score_mod": lambda s, b, h, q, k: jnp.where(k < q, s, -jnp.inf)}
    masked = {"mask_mod": lambda b, h, q, k: k < q}
    grads = [jax.value_and_grad(functools.partial(total, options), argnums=range(3))(*arrays) for options in (hiding, masked)]
    oracle.assert_same_in_float64(*grads)


@X64
def test_a_table_before_the_cap_by_reverse_and_forward_mode():
    """The cap bends what the function returns, and with it the derivatives of its tables."""
    arrays, table = operands(np.random.default_rng(0), Sizes(2, 5, 6, 4)), jnp.linspace(-1.0, 1.0, 4)

    def by_function(table):
        out = dot_product_attention(*arrays, score_mod=lambda s, b, h, q, k: s + table[h] * s * s, logits_soft_cap=0.7)
        return jnp.sum(jnp.sin(out))

    def written(table):
        key, value = (jnp.repeat(x, 2, 2) for x in arrays[1:])
        s = jnp.einsum("btnh,bsnh->bnts", arrays[0], key) / np.sqrt(8)
        s = 0.7 * jnp.tanh((s + table[None, :, None, None] * s * s) / 0.7)
        return jnp.sum(jnp.sin(jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(s, -1), value)))

    oracle.assert_same_in_float64(jax.grad(by_function)(table), jax.grad(written)(table))
    oracle.assert_same_in_float64(jax.jacfwd(by_function)(table), jax.jacfwd(written)(table))  # tangents of tables are mapped


@X64
def test_functions_count_beside_every_other_option():
    rng, sizes = np.random.default_rng(0), Sizes(2, 12, 12, 4)
    arrays = operands(rng, sizes)
    options = {"is_causal": True, "query_segment_ids": jnp.asarray(np.sort(rng.integers(0, 3, (2, 12)), 1))}
    options |= {"mask": jnp.asarray(rng.random((2, 4, 12, 12)) < 0.8), "sinks": jnp.asarray(rng.standard_normal(4))}
    options |= {"dropout_rate": 0.3, "dropout_rng": jax.random.key(0), "fully_masked_rows": "mean"}
    sees = jnp.asarray(rng.random((12, 12)) < 0.7)
    both = options | {"mask": options["mask"] & sees[None, None]}
    scaled = dot_product_attention(*arrays, **both, scale=0.5, return_residual=True)
    functions = {"score_mod": lambda s, b, h, q, k: s / 2, "mask_mod": lambda b, h, q, k: sees[q, k]}
    oracle.assert_same_in_float64(
        dot_product_attention(*arrays, **options, **functions, scale=1.0, return_residual=True), scaled
    )


def test_cotangents_of_tables_of_16_bits_add_up_in_float32():
    """Each of 4096 scores adds to one of two numbers: in bfloat16 a sum would lose what is below 2^-8 of it."""
    table = jnp.ones(2, jnp.bfloat16)
    query, key, value = operands(np.random.default_rng(0), Sizes(1, 64, 64, 1), 1, np.float32)

    def total(table, cast):
        return jnp.sum(
            dot_product_attention(query, key, value, score_mod=lambda s, b, h, q, k: s * cast(table[(q + k) % 2])) * value
        )

    actual = jax.grad(total)(table, lambda x: x.astype(jnp.float32))
    expected = jax.grad(total)(table.astype(jnp.float32), lambda x: x)
    assert actual.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.float32(actual), expected, rtol=2**-8)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32])
def test_narrow_operands_get_scores_of_float32(dtype):
    variant, moving, arrays = made("relative", sizes=Sizes(2, 20, 24, 2), dtype=np.float32)
    ours, written = both_ways(variant)
    narrow = [array.astype(dtype) for array in arrays]
    out, lse = jax.jit(ours)(moving, *narrow)
    assert (out.dtype, lse.dtype) == (dtype, jnp.float32)
    expected = written(moving, *(array.astype(jnp.float32) for array in narrow))
    np.testing.assert_allclose(np.float32(out), expected[0], atol=4 * float(jnp.finfo(dtype).eps))


# What is traced.


def types_of(function):
    """Returns what the primitive of a call has as parameters and operands."""
    query = jnp.ones((2, 4, 2, 8))
    jaxpr = jax.make_jaxpr(lambda query: dot_product_attention(query, query, query, **function))(query)
    (eqn,) = [eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name == "dot_product_attention"]
    return eqn.params, eqn.params["names"]


def test_operands_are_what_functions_read():
    table, unused = jnp.arange(3.0), jnp.arange(4.0)
    assert types_of({"mask_mod": lambda b, h, q, k: k <= q})[1] == ("query", "key", "value")
    assert types_of({"mask_mod": lambda b, h, q, k: k <= q + b})[1] == ("query", "key", "value", "entries")

    def score_mod(s, b, h, q, k):
        _ = unused[q]  # what no result needs is no operand
        return s + table[h]

    params, names = types_of({"score_mod": score_mod, "mask_mod": lambda b, h, q, k: table[q] > 1})
    assert names == ("query", "key", "value", "head_numbers", "table_0")  # both functions read one table
    assert params["score_mod"].used == {"score", "head"}
    assert params["mask_mod"].used == {"query_index"}


def test_equal_functions_are_equal_parameters():
    """Layers of a model trace functions of their own, and share a kernel."""

    def function(cap):
        return {"score_mod": lambda s, b, h, q, k: cap * jnp.tanh(s / cap)}

    first, second, other = (types_of(function(cap))[0]["score_mod"] for cap in (2.0, 2.0, 3.0))
    assert first == second != other
    assert hash(first) == hash(second)


@pytest.mark.parametrize("kind", ["jit", "custom_jvp", "cond"])
def test_functions_that_differ_in_arrays_inside_differ(kind):
    """The text of a program shows no array that an inner function closes over."""

    def function(table):
        def look_up(score, key_index):
            return score + table[key_index]

        inner = {
            "jit": jax.jit(look_up),
            "custom_jvp": jax.custom_jvp(look_up),
            "cond": lambda s, k: jax.lax.cond(s > 0, look_up, lambda s, k: 2 * look_up(s, k), s, k),
        }[kind]
        if kind == "custom_jvp":
            inner.defjvp(lambda primals, tangents: (look_up(*primals), tangents[0]))
        return lambda s, b, h, q, k: inner(s, k)

    query, key, value = operands(np.random.default_rng(0), Sizes(1, 5, 6, 2), dtype=np.float32)
    table = jnp.arange(6.0)
    for factor in (1.0, -3.0):
        actual = dot_product_attention(query, key, value, score_mod=function(factor * table))
        if kind != "cond":
            expected = dot_product_attention(query, key, value, bias=factor * table[None, None, None])
        else:
            with jax.disable_jit():
                scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.float32(np.sqrt(8))
                own = scores + factor * table[None, None, None]
                weights = jax.nn.softmax(jnp.where(scores > 0, own, 2 * own), -1)
                expected = jnp.einsum("bnts,bsnh->btnh", weights, value)
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)


def test_explain_says_what_runs():
    query = jax.ShapeDtypeStruct((1, 4096, 8, 128), jnp.bfloat16)
    slopes = jax.ShapeDtypeStruct((8,), jnp.float32)

    def text(score_mod):
        def f(query, slopes):
            return dot_product_attention(query, query, query, score_mod=functools.partial(score_mod, slopes))

        return str(explain(f, query, slopes, gpu="h100"))

    assert "score_mod in registers" in text(lambda slopes, s, b, h, q, k: s * slopes[h])
    refused = text(lambda slopes, s, b, h, q, k: s * jnp.sum(slopes))
    assert "-> xla" in refused
    assert "kernels have no functions with the operation reduce_sum" in refused


@pytest.mark.usefixtures("tiles")
def test_a_long_sequence_has_no_matrix_of_scores_in_memory():
    array = jax.ShapeDtypeStruct((1, 1024, 1, 8), jnp.float32)
    table = jax.ShapeDtypeStruct((2047,), jnp.float32)

    def total(table, query, key, value):
        def score_mod(s, b, h, q, k):
            return s + table[q - k + 1023]

        return jnp.sum(dot_product_attention(query, key, value, score_mod=score_mod, mask_mod=lambda b, h, q, k: k <= q))

    for f in (total, jax.grad(total, argnums=range(4))):
        compiled = jax.jit(f).lower(table, array, array, array).compile()
        assert compiled.memory_analysis().temp_size_in_bytes < 1024 * 1024


# Transformations, devices, modules.


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@X64
def test_a_batch_and_heads_that_are_sharded_keep_their_numbers(kind):
    rng, sizes = np.random.default_rng(0), Sizes(4, 6, 7, 4)
    arrays, table = operands(rng, sizes), jnp.asarray(rng.standard_normal((4, 4, 7)))

    def total(table, query, key, value):
        def score_mod(score, batch, head, query_index, key_index):
            return score + table[batch, head, key_index]

        out = dot_product_attention(query, key, value, score_mod=score_mod, mask_mod=lambda b, h, q, k: (k <= q + b) | (h == 2))
        return jnp.sum(jnp.sin(out))

    both = jax.value_and_grad(total, argnums=range(4))
    expected = jax.jit(both)(table, *arrays)
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(kind, kind), devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, P("b", None, "n"))) for array in arrays]
        actual = jax.jit(both)(jax.device_put(table, NamedSharding(mesh, P())), *placed)
    oracle.assert_same_in_float64(jax.tree.map(np.asarray, actual), jax.tree.map(np.asarray, expected))


def test_checkpoint_scan_and_export():
    rng = np.random.default_rng(0)
    query, key, value = operands(rng, Sizes(2, 6, 6, 2), dtype=np.float32)
    slopes = jnp.asarray(rng.standard_normal((3, 2)), jnp.float32)

    def layer(query, slopes):
        def score_mod(s, b, h, q, k):
            return s + slopes[h] * (q - k).astype(s.dtype)

        return dot_product_attention(query, key, value, score_mod=score_mod)

    def total(slopes, layer):
        return jnp.sum(jax.lax.scan(lambda x, slopes: (layer(x, slopes), None), query, slopes)[0] ** 2)

    expected = jax.grad(total)(slopes, layer)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda s: total(s, jax.checkpoint(layer))))(slopes), expected, rtol=1e-5)
    (size,) = jax.export.symbolic_shape("n")
    exported = jax.export.export(jax.jit(layer))(
        jax.ShapeDtypeStruct((2, size, 2, 8), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.float32)
    )
    np.testing.assert_allclose(exported.call(query, slopes[0]), layer(query, slopes[0]), rtol=1e-5)


def test_modules_of_flax_take_functions():
    from flax import nnx

    slopes = jnp.array([0.5, 0.25])
    functions = {"score_mod": lambda s, b, h, q, k: s - slopes[h] * (q - k).astype(s.dtype)}
    functions["mask_mod"] = lambda b, h, q, k: k <= q
    of_functions = functools.partial(jaxsoftmax.flax.attention_fn, **functions)
    attention = nnx.MultiHeadAttention(2, in_features=16, attention_fn=of_functions, decode=False, rngs=nnx.Rngs(0))
    inputs = jax.random.normal(jax.random.key(0), (2, 8, 16))
    bias = -slopes[:, None, None] * jnp.float32(np.arange(8)[:, None] - np.arange(8))[None]
    of_arrays = functools.partial(jaxsoftmax.flax.attention_fn, bias=bias)
    plain = nnx.MultiHeadAttention(2, in_features=16, attention_fn=of_arrays, decode=False, rngs=nnx.Rngs(0))
    np.testing.assert_allclose(attention(inputs), plain(inputs, is_causal=True), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="score_mod must be None where weights are sown"):
        attention(inputs, sow_weights=True)


# Bad input.


def fails(error, match, score_mod=None, mask_mod=None):
    query = jnp.ones((1, 4, 2, 8))
    with pytest.raises(error, match=match):
        dot_product_attention(query, query, query, score_mod=score_mod, mask_mod=mask_mod)


def test_errors_name_the_function_and_its_line():
    def short(score, batch, head):
        return score

    here = re.escape(f"short ({__file__}:{short.__code__.co_firstlineno})")
    signature = r"score_mod\(score, batch, head, query_index, key_index\)"
    fails(TypeError, rf"score_mod must be a function {signature}, got .*{here}", short)
    fails(TypeError, r"mask_mod must be None, a BlockMask or a function mask_mod\(batch, .*, got int", mask_mod=3)
    fails(TypeError, "score_mod must return a scalar of dtype float32, the dtype of scores, got int32", lambda s, b, h, q, k: q)
    fails(TypeError, r"score_mod must return a scalar .*, got float32\[1\]", lambda s, b, h, q, k: s[None])
    fails(TypeError, "score_mod must return a scalar .*, got tuple", lambda s, b, h, q, k: (s, s))
    fails(TypeError, "mask_mod must return a scalar of dtype bool, got int32", mask_mod=lambda b, h, q, k: q)

    array = np.arange(4.0, dtype=np.float32)
    fails(TypeError, "score_mod must work on traced scalars, got .*lambda", lambda s, b, h, q, k: s + array[q])
    fails(TypeError, "mask_mod must work on traced scalars, got .*lambda", mask_mod=lambda b, h, q, k: 0 <= q - k < 3)

    def prints(score, batch, head, query_index, key_index):
        jax.debug.print("{}", score)
        return score

    fails(ValueError, "score_mod must have no side effects, got .*prints", prints)
    random = jax.random.key(0)
    fails(TypeError, "score_mod must close over arrays of real numbers", lambda s, b, h, q, k: s + jax.random.uniform(random))
    empty = jnp.zeros((0, 2))
    match = r"mask_mod must close over arrays with elements, got shape \(0, 2\)"
    fails(ValueError, match, mask_mod=lambda b, h, q, k: empty.sum() > 0)
    tables = [jnp.arange(i + 2.0) for i in range(MAX_TABLES + 1)]
    fails(ValueError, f"at most {MAX_TABLES} arrays", lambda s, b, h, q, k: s + sum(table[q] for table in tables))


def test_an_array_that_devices_share_is_refused():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:2])
    with jax.set_mesh(mesh):
        table = jax.device_put(jnp.arange(4.0), NamedSharding(mesh, P("x")))
        fails(ValueError, "score_mod must close over arrays that every device has whole", lambda s, b, h, q, k: s + table.sum())


def test_a_function_may_be_what_no_kernel_can_run():
    """A matrix product, and a loop whose end depends on an argument, run on the reference."""
    weights = jnp.asarray(np.random.default_rng(0).standard_normal((3, 3)), jnp.float32)

    def score_mod(s, b, h, q, k):
        vector = jnp.stack([s, q.astype(s.dtype), k.astype(s.dtype)])
        total = jax.lax.fori_loop(0, k % 3, lambda i, x: 0.5 * x, s)
        return total + 0.01 * (weights @ vector).sum()

    query, key, value = operands(np.random.default_rng(0), Sizes(1, 5, 6, 2), dtype=np.float32)
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(8)
    q, k = np.arange(5)[:, None], np.arange(6)
    sums = weights.sum(0)
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        scores = scores * np.float32(0.5 ** (k % 3)) + 0.01 * (sums[0] * scores + sums[1] * q + sums[2] * k)
    expected = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, -1), value)
    np.testing.assert_allclose(dot_product_attention(query, key, value, score_mod=score_mod), expected, atol=1e-5)


def test_a_function_inside_may_have_derivatives_of_its_own():
    @jax.custom_vjp
    def cap(x):
        return jnp.tanh(x)

    cap.defvjp(lambda x: (jnp.tanh(x), x), lambda x, c: (3 * c,))  # not the true derivative
    query, key, value = operands(np.random.default_rng(0), Sizes(1, 5, 6, 2), dtype=np.float32)

    def total(query, score_mod):
        return jnp.sum(dot_product_attention(query, key, value, score_mod=score_mod) ** 2)

    actual = jax.grad(total)(query, lambda s, b, h, q, k: cap(s))
    expected = jax.grad(total)(query, lambda s, b, h, q, k: 3 * s - jax.lax.stop_gradient(3 * s - jnp.tanh(s)))
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_numbers_out_of_range_are_clamped():
    table = jnp.arange(4.0)
    query, key, value = operands(np.random.default_rng(0), Sizes(1, 5, 6, 2), dtype=np.float32)
    actual = dot_product_attention(query, key, value, score_mod=lambda s, b, h, q, k: s + table[k + 2])
    expected = dot_product_attention(query, key, value, bias=table[np.minimum(np.arange(6) + 2, 3)][None, None])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


def test_programs_have_no_calls_and_nothing_that_is_not_read():
    table = jnp.arange(4.0)

    def score_mod(s, b, h, q, k):
        jnp.sum(table)  # not read
        return jnp.where(q > k, jax.nn.relu(s), table[h % 4])

    traced = types_of({"score_mod": score_mod})[0]["score_mod"]
    names = {eqn.primitive.name for eqn in traced.program.jaxpr.eqns}
    assert not names & {"jit", "pjit", "reduce_sum"}
    assert score_functions.POSITIONS == ("batch", "head", "query_index", "key_index")
