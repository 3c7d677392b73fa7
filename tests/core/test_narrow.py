"""Operands of 16 bits and less: whatever an op computes on the way has the dtype of its arithmetic, which is float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import online

from ..support import cases, oracle
from ..support.meshes import make_mesh

pytestmark = pytest.mark.usefixtures("hollow_kernels", "x64")

ROWS, CLASSES = 8, 64
LABELS = np.arange(ROWS) * 7 % CLASSES
ALL = {"label_smoothing": 0.2, "z_loss": 1e-2, "logits_soft_cap": 30.0, "return_lse": True}
PAGES = "key_pages", "value_pages"
EIGHT = np.random.default_rng(2).integers(-127, 128, (2, 8, 16)).astype(np.int8)
OF_RESULTS = {"weights of the selected", "softmax", "attention", "pages", "scales", "scales of pages"}  # derivatives that are


def on_shards(f):
    """A function of a row's parts on two devices."""
    mesh = make_mesh(AxisType.Auto, (2,), ("data",))
    return jax.shard_map(f, mesh=mesh, in_specs=P(None, "data"), out_specs=P())


def probabilities(x):
    return jnp.zeros_like(x).at[:, 3:5].set(np.asarray(0.5, x.dtype))


def online_state(x):
    return online.merge(online.lift(x[:, :40]), online.push(online.identity(x.shape[:1], dtype=wide(x)), x[:, 40:]))


ce, top_k = jaxsoftmax.cross_entropy, functools.partial(jaxsoftmax.softmax_top_k, k=3, return_lse=True, scale=0.7)

# The ops by name, of logits of any dtype.
OF_ROWS = {
    "softmax": lambda x: jaxsoftmax.softmax(x, scale=0.7),
    "softmax, float32": lambda x: jaxsoftmax.softmax(x, dtype=wide(x)),
    "log_softmax": lambda x: jaxsoftmax.log_softmax(x, scale=0.7),
    "logsumexp": lambda x: jaxsoftmax.logsumexp(x, -1),
    "logsumexp with factors": lambda x: jaxsoftmax.logsumexp(x, -1, b=probabilities(x)),
    "logsumexp of parts": on_shards(functools.partial(jaxsoftmax.logsumexp, axis=-1, axis_name="data")),
    "classes": lambda x: ce(x, LABELS, return_lse=True),
    "probabilities": lambda x: ce(x, probabilities(x), return_lse=True),
    "one-hot": lambda x: ce(x, LABELS[:, None] == np.arange(CLASSES), return_lse=True),
    "classes, all options": lambda x: ce(x, LABELS, ignore_index=0, **ALL),
    "probabilities, all options": lambda x: ce(x, probabilities(x), where=np.arange(CLASSES)[None] < 60, **ALL),
    "probabilities of parts": on_shards(lambda x: ce(x, jnp.ones_like(x) / 64, axis_name="data")),
    "weights of all": top_k,
    "weights of the selected": functools.partial(top_k, normalize="selected"),
    "categorical": lambda x: jaxsoftmax.categorical(jax.random.key(0), x, temperature=0.7, return_log_prob=True),
    "online": lambda x: online.finish(online_state(x))[0],
}


def floating(f):
    """The results of a function that are floating."""
    return lambda x: jax.tree.map(lambda array: array if jnp.issubdtype(array.dtype, jnp.floating) else None, f(x))


def of_rows(x):
    """Results of the ops by name."""
    return {name: floating(f)(x) for name, f in OF_ROWS.items()}


def of_heads(x):
    """Those of attention, for queries, keys and values of any dtype that queries may have, one after the other."""
    query, key, value = x.reshape(3, 1, 8, 1, -1)
    pages, eight = (dict(zip(PAGES, array.reshape(2, 2, 4, 1, -1), strict=True)) for array in (jnp.stack([key, value]), EIGHT))
    table = {"page_table": np.array([[1, 0]]), "key_value_seq_lengths": np.array([7]), "return_lse": True}
    found = {
        "attention": jaxsoftmax.dot_product_attention(query, key, value, is_causal=True, return_residual=True),
        "pages": jaxsoftmax.cache.paged_attention(query, **pages, **table),
    }
    for name, shape in (("scales", (1,)), ("scales of pages", (2, 1))):
        scales = {"key_scale": np.full(shape, 0.0123, wide(x)), "value_scale": np.full(shape, 0.0321, wide(x))}
        found[name] = jaxsoftmax.cache.paged_attention(query, **eight, **scales, **table)
    return found


def with_tangents(f):
    """The results of a function, and their tangents."""
    return lambda x, t: {"value": f(x), "tangent": jax.jvp(f, (x,), (t,))[1]}


def cotangents_of_rows(x, t):
    """The cotangent of `x` for the results of each op, by its name."""
    found = {}
    for name, f in OF_ROWS.items():
        results, pull = jax.vjp(floating(f), x)
        found[name] = pull(jax.tree.map(lambda y: jnp.resize(t, y.shape).astype(y.dtype), results))
    return {"cotangent": found}


def of_linear(x, c):
    """The losses of a linear layer whose logits are `x` itself, and their gradient."""
    weight = jnp.eye(x.shape[1], dtype=x.dtype)
    loss, pull = jax.vjp(lambda x: jaxsoftmax.linear_cross_entropy(x, weight, LABELS, reduction="none", z_loss=0.1), x)
    return {"value": {"loss": loss}, "cotangent": {"hidden": pull(c[:, 0].astype(wide(x)))}}


def wide(x):
    return jnp.float64 if x.dtype == jnp.float64 else jnp.float32


jitted = functools.cache(jax.jit)  # its programs of float64 are compiled once, whatever dtypes they are the truth of
rows_with_tangents, heads_with_tangents = with_tangents(of_rows), with_tangents(of_heads)


def assert_rounded_once(f, x, narrow):
    """Fails unless the results of a function of two narrow arrays are those of float64, rounded to their dtypes once."""
    arrays = [array.astype(narrow) for array in (x, np.random.default_rng(1).standard_normal(x.shape))]
    found, exact = (jitted(f)(*given) for given in (arrays, [array.astype(np.float64) for array in arrays]))
    for what in found:
        for name, actual in found[what].items():
            saved = oracle.half_unit(narrow) if what != "value" and name in OF_RESULTS else 0.0
            for a, b in zip(*map(jax.tree.leaves, (actual, exact[what][name])), strict=True):
                size = np.max(np.abs(b), initial=1)
                truth = oracle.Truth(np.asarray(b), np.full(b.shape, (64 * oracle.EPS + 16 * saved) * size))
                assert oracle.error(a, truth) <= 1, (what, name)


@pytest.mark.parametrize("dtype", cases.quick("bfloat16", "float8_e4m3fn", slow=["float16", "float8_e5m2"]))
def test_results_are_rounded_once(dtype):
    narrow = jnp.dtype(dtype)
    x = np.random.default_rng(0).standard_normal((ROWS, CLASSES))
    assert_rounded_once(rows_with_tangents, 10 + x, narrow)
    if narrow.itemsize == 2:
        assert_rounded_once(heads_with_tangents, x[:6], narrow)
        assert_rounded_once(of_linear, x, narrow)


@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float16"]))
def test_cotangents_are_rounded_once(dtype):
    """Cotangents that come from two uses of an operand are added up before they are rounded."""
    x = np.random.default_rng(0).standard_normal((ROWS, CLASSES))
    x[np.arange(ROWS), LABELS] += 8  # whose two cotangents almost cancel
    assert_rounded_once(cotangents_of_rows, x, jnp.dtype(dtype))


def test_second_derivatives_of_capped_losses_are_rounded_once():
    x = 4 * np.random.default_rng(0).standard_normal((ROWS, CLASSES))

    def second(x, t):
        def loss(x):
            return jnp.sum(jaxsoftmax.cross_entropy(x, LABELS, logits_soft_cap=3.0))

        return {"cotangent": {"capped": jax.grad(lambda x: jnp.sum(jax.grad(loss)(x).astype(wide(x)) * t.astype(wide(x))))(x)}}

    narrow = jnp.dtype("bfloat16")
    arrays = [array.astype(narrow) for array in (x, np.random.default_rng(1).standard_normal(x.shape))]
    found, exact = (jax.jit(second)(*given)["cotangent"]["capped"] for given in (arrays, [a.astype(float) for a in arrays]))
    # Twice: the gradient is rounded, and so is its cotangent.
    budget = 2 * oracle.half_unit(narrow) * np.abs(exact) + 64 * oracle.EPS
    assert oracle.error(found, oracle.Truth(np.asarray(exact), np.asarray(budget))) <= 1


def test_cotangents_of_rows_that_are_broadcast_are_rounded_once():
    x = np.random.default_rng(0).standard_normal((1, CLASSES))
    labels = np.arange(1000) ** 2 % CLASSES

    def cotangent(x, t):
        return {"cotangent": {"rows": jax.grad(lambda x: jnp.mean(jaxsoftmax.cross_entropy(x, labels)))(x)}}

    assert_rounded_once(cotangent, x, jnp.dtype("bfloat16"))
