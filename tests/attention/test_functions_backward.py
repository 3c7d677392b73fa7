"""The Mosaic GPU kernel of attention's derivatives with score and mask functions, against the reference."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jaxsoftmax
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import primitive, score_functions

from ..support.attention import interpreted
from ..support.attention import values as forward
from ..support.attention.gradients import cotangents_like

attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="xla", precision="highest")

# Functions, and what they close over.

HEADS = 2
RNG = np.random.default_rng(0)
SLOPES = jnp.asarray([0.25, 0.0625], jnp.float32)
DOCUMENTS = jnp.asarray(np.sort(RNG.integers(0, 5, 512)), jnp.int32)
POSITION_BIAS = jnp.asarray(RNG.standard_normal((HEADS, 1023)), jnp.float32)
GATES = jnp.asarray(RNG.standard_normal(512), jnp.bfloat16)


def causal(batch, head, query, key):
    return query >= key


def window(batch, head, query, key):
    return jnp.abs(query - key) < 90


def documents(batch, head, query, key):
    return (DOCUMENTS[query] == DOCUMENTS[key]) & (query >= key)


def heads(batch, head, query, key):
    return (head == 0) | (key % 3 == 0)


def alibi(score, batch, head, query, key):
    return score - SLOPES[head] * jnp.abs(query - key).astype(jnp.float32)


def relative(score, batch, head, query, key):
    return score + POSITION_BIAS[head, query - key + 511]


def cap(score, batch, head, query, key):
    return 3 * jnp.tanh(score / 3)


def gate(score, batch, head, query, key):
    return score * jax.nn.sigmoid(score)


def scaled(score, batch, head, query, key):
    return score * GATES[query].astype(jnp.float32) * 0.5


def hiding(score, batch, head, query, key):
    return jnp.where(query >= key, score, -jnp.inf)


def steep(score, batch, head, query, key):  # whose slope is infinite or NaN where it hides
    return jnp.where(score > 0, jnp.log(score), -jnp.inf)


def growing(score, batch, head, query, key):  # which makes large scores of the zeros behind the last query
    return score + query.astype(jnp.float32) * 2.0


SCORES = {f.__name__: f for f in (alibi, relative, cap, gate, scaled, hiding, steep, growing)}
MASKS = {f.__name__: f for f in (causal, window, documents, heads)}


# The slope.


@pytest.mark.parametrize("name", SCORES)
def test_the_slope_is_the_derivative_by_the_score(name):
    function = SCORES[name]
    traced, operands = score_functions.functions_and_operands("f", jnp.float32, function, None, (2, HEADS))
    program, traced = traced["score_mod"].with_slope, traced["score_mod"]
    assert not {eqn.primitive.name for eqn in program.eqns} & {"jit", "custom_jvp_call", "add_any", "one_minus_square"}
    tables = score_functions.wide_tables([operands[table].reshape(-1) for table in traced.table_names])
    for score, query, key in itertools.product((0.7, -1.5), (3, 400), (5, 200)):
        position = [jnp.int32(i) for i in (1, 1, query, key)]
        result, slope = jaxpr_as_fun(program)(*tables, jnp.float32(score), *position)
        expected = jax.jvp(lambda score, at=position: function(score, *at), (jnp.float32(score),), (jnp.float32(1),))
        expected = expected[0], expected[1] if expected[0] > -np.inf else slope
        np.testing.assert_allclose([result, slope], expected, rtol=1e-6)


@pytest.mark.parametrize(("name", "number"), [("alibi", 1), ("relative", 1), ("hiding", 1), ("growing", 1)])
def test_a_slope_that_is_a_number_is_a_literal(name, number):
    traced, _ = score_functions.functions_and_operands("f", jnp.float32, SCORES[name], None, (2, HEADS))
    assert traced["score_mod"].with_slope.jaxpr.outvars[1].val == number


# Interpreted.

SQUARE = {"batch": (), "length": 256, "keys": 256, "heads": HEADS, "key_heads": 1}
TOLERANCES = {"bfloat16": 2.0**-6, "float16": 2.0**-8, "float32": 2.0**-13}


def calls(given, score_mod, mask_mod, dtype, **options):
    """Returns names of what moves, operands and parameters of the primitive of cotangents, and the reference's cotangents."""
    moving, fixed = forward.split(given)

    def f(moving):
        return attend(**moving, **fixed, **options, score_mod=score_mod, mask_mod=mask_mod, return_residual=True)

    wide = {name: jnp.asarray(array, jnp.float32) for name, array in moving.items()}
    (out, lse), pull = jax.vjp(f, wide)
    dout, dlse = cotangents_like((out.astype(dtype), lse))
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
    (expected,) = pull((dout.astype(jnp.float32), dlse))
    shape = (*given["query"].shape[:-3], given["query"].shape[-2])
    functions, operands = score_functions.functions_and_operands("attention", jnp.float32, score_mod, mask_mod, shape)
    results = {"out": out.astype(dtype), "lse": jnp.swapaxes(lse, -1, -2), "d_out": dout, "d_lse": jnp.swapaxes(dlse, -1, -2)}
    params = {"scale": given["query"].shape[-1] ** -0.5, "window": (None, 0 if options.get("is_causal") else None)}
    params |= {"dropout_rate": 0.0, "soft_cap": options.get("logits_soft_cap"), "precision": "high"} | functions
    operands = interpreted.named(given | results) | operands
    return operands, params | {"wanted": tuple(moving)}, expected


def check_interpreted(score, mask, size, dtype, make=None, deterministic=False, options=None, **shapes):
    given = forward.arrays(**SQUARE | shapes, size=size, dtype=dtype) | ({} if make is None else make())
    score_mod, mask_mod = SCORES.get(score), MASKS.get(mask)
    operands, params, expected = calls(given, score_mod, mask_mod, dtype, **(options or {}))
    target = dataclasses.replace(HOPPER, multiprocessors=1)
    found = interpreted.cotangents(target, operands, **params, deterministic_gradients=deterministic)
    for name, actual in zip(params["wanted"], found, strict=True):
        assert actual.dtype == given[name].dtype
        assert_close(name, actual, expected[name], TOLERANCES[dtype])


def assert_close(name, actual, expected, tolerance):
    actual, expected = (np.asarray(x, np.float64) for x in (actual, expected))
    assert np.all(np.isfinite(actual)), name
    assert np.max(np.abs(actual - expected)) <= tolerance * max(1, np.max(np.abs(expected))), name
