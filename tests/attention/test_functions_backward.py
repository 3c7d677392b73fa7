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

from ..core import compiled
from ..support import xla_cuda
from ..support.attention import interpreted
from ..support.attention import values as forward
from ..support.attention.gradients import cotangents_like

pytestmark = pytest.mark.usefixtures("native")
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


def steep(score, batch, head, query, key):  # whose slope is NaN where it hides
    return jnp.log(jnp.where(query >= key, 1 + score * score, 0))


def without_nan(score, batch, head, query, key):  # the same for the reference, which would return NaN
    return jnp.where(query >= key, jnp.log(1 + score * score), -jnp.inf)


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
        score = without_nan if score_mod is steep else score_mod
        return attend(**moving, **fixed, **options, score_mod=score, mask_mod=mask_mod, return_residual=True)

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


def lengths(*numbers):
    return lambda: {"query_seq_lengths": np.int32(numbers[0]), "key_value_seq_lengths": np.int32(numbers[1])}


def offset(number):
    return lambda: {"query_offset": np.int32(number)}


LONG = {"length": 512, "keys": 512}
INTERPRETED = [  # score and mask function, head size, dtype, and arguments of `check_interpreted`
    ("alibi", "causal", 64, "bfloat16", {}),
    ("cap", "documents", 64, "float32", {"deterministic": True} | LONG),
    ("gate", None, 128, "float16", {"key_heads": 2}),
    ("steep", "window", 128, "float32", {}),
    (None, "documents", 128, "bfloat16", {"make": offset(100), "keys": 512}),
    ("scaled", "heads", 64, "float16", {"make": lengths(130, 200), "options": {"logits_soft_cap": 4.0}}),
    ("growing", "causal", 64, "bfloat16", {"options": {"is_causal": True}}),
]
SLOW = [
    (score, mask, size, dtype, {"deterministic": deterministic})
    for score, mask in [*((name, "causal") for name in SCORES), *((None, name) for name in MASKS), ("hiding", None)]
    for size, dtype in [(64, "float32"), (128, "float32"), (64, "bfloat16"), (128, "bfloat16")]
    for deterministic in (False, True)
]


@pytest.mark.parametrize(
    "call", [*INTERPRETED, *(pytest.param(call, marks=pytest.mark.slow) for call in SLOW)], ids=lambda call: str(call[:4])
)
def test_interpreted_cotangents(call):
    check_interpreted(*call[:4], **call[4])


def check_interpreted(score, mask, size, dtype, make=None, deterministic=False, options=None, **shapes):
    given = forward.arrays(**SQUARE | shapes, size=size, dtype=dtype) | ({} if make is None else make())
    operands, params, expected = calls(given, SCORES.get(score), MASKS.get(mask), dtype, **(options or {}))
    target = dataclasses.replace(HOPPER, multiprocessors=1)
    found = interpreted.cotangents(target, operands, **params, deterministic_gradients=deterministic)
    check(given, dict(zip(params["wanted"], found, strict=True)), expected, dtype)


def check(given, found, expected, dtype):
    for name, actual in found.items():
        assert actual.dtype == given[name].dtype
        actual, truth = (np.asarray(x, np.float64) for x in (actual, expected[name]))
        assert np.all(np.isfinite(actual)), name
        assert np.max(np.abs(actual - truth)) <= TOLERANCES[dtype] * max(1, np.max(np.abs(truth))), name


# Compiled by ptxas.


def planned(score, mask, size, dtype, key_heads=HEADS, length=512, **more):
    """Returns what is planned for cotangents, and the types of the operands."""
    shapes = {"query": (length, HEADS, size), "key": (length, key_heads, size), "value": (length, key_heads, size)}
    shapes |= {"out": shapes["query"], "d_out": shapes["query"]}
    types = {name: jax.ShapeDtypeStruct((2, *shape), jnp.dtype(dtype)) for name, shape in shapes.items()}
    types["lse"] = jax.ShapeDtypeStruct((2, HEADS, length), jnp.float32)
    functions, operands = score_functions.functions_and_operands(
        "attention", jnp.float32, SCORES.get(score), MASKS.get(mask), (2, HEADS)
    )
    types |= {name: jax.typeof(operand) for name, operand in operands.items()}
    params = {"scale": 0.125, "window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "precision": None} | functions
    params |= {"deterministic_gradients": False, "wanted": ("query", "key", "value")} | more
    return mosaic.plan(primitive.ATTENTION_VJP.problem(primitive.ATTENTION_VJP, types, params), HOPPER), types


COMPILED = [("alibi", "causal", 64, "bfloat16"), ("gate", "documents", 256, "bfloat16"), ("relative", "heads", 128, "float32")]
EVERY_COMPILED = [
    (score, mask, size, dtype)
    for score, mask in [*((name, None) for name in SCORES), *((None, name) for name in MASKS), ("cap", "documents")]
    for size, dtype in [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32"), (128, "float32")]
]


@pytest.mark.parametrize("call", [*COMPILED, *(pytest.param(call, marks=pytest.mark.slow) for call in EVERY_COMPILED)], ids=str)
def test_kernels_compile(call):
    if isinstance(reason := xla_cuda.sharding(), str):
        pytest.skip(reason)
    plan, types = planned(*call)
    for row in compiled.compile_case(compiled.Case(str(call), (), lambda operands: plan.plan.run(**operands), types)):
        assert not row.error
        assert not row.notes  # ptxas lets no products wait for each other


# What is refused.


def test_kernels_with_functions_run_where_they_are_asked_for():
    plan, _ = planned("cap", "causal", 64, "bfloat16")
    assert isinstance(plan, Refusal)
    assert plan.plan is not None


def test_derivatives_of_tables_are_left_to_the_reference():
    plan, _ = planned("relative", None, 64, "bfloat16", wanted=("query", "table_0"))
    assert isinstance(plan, Refusal)
    assert plan.lacks_kernel
    assert "arrays that score_mod reads" in plan.reason


# Native.

NATIVE = [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32"), (96, "bfloat16")]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("size", "dtype"), [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32"), (96, "bfloat16")]
)
@pytest.mark.parametrize(("score", "mask"), [*((name, "causal") for name in SCORES), *((None, name) for name in MASKS)])
@pytest.mark.parametrize("key_heads", [1, 2])
def test_native_cotangents(score, mask, size, dtype, key_heads):
    shapes = {"batch": (2,), "length": 300, "keys": 333, "heads": HEADS, "key_heads": key_heads}
    given = forward.arrays(**shapes, size=size, dtype=dtype)
    more = {"score_mod": SCORES.get(score), "mask_mod": MASKS.get(mask), "return_residual": True}
    wide = {name: jnp.asarray(array, jnp.float32) for name, array in given.items()}
    safe = more | ({"score_mod": without_nan} if score == "steep" else {})
    (out, lse), pull = jax.vjp(lambda moving: attend(**moving, **safe), wide)
    dout, dlse = cotangents_like((out.astype(dtype), lse))
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
    (expected,) = pull((dout.astype(jnp.float32), dlse))
    forced = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic")
    _, pull = jax.vjp(jax.jit(lambda moving: forced(**moving, **more)), {name: jnp.asarray(a) for name, a in given.items()})
    check(given, pull((dout, dlse))[0], expected, dtype)
