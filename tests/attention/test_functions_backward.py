"""The Mosaic GPU kernel of attention's derivatives with score and mask functions, against the reference."""

import functools
import itertools
from dataclasses import replace
from threading import Lock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import jaxsoftmax
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu import sync, wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import primitive, score_derivatives, score_functions, xla
from jaxsoftmax.ops.attention.mosaic_sm90.common import HOST, LN2, ROWS, lay_out, raised_lse
from jaxsoftmax.ops.attention.mosaic_sm90.functions import Function, TileFunctions, factor_of_changed

from ..core import compiled
from ..support import cases, kernels, xla_cuda
from ..support.attention import interpreted, lowering
from ..support.attention import values as forward
from ..support.attention.gradients import cotangents_like
from ..support.emulator import emulated

pytestmark = pytest.mark.usefixtures("native")
attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="xla", precision="highest")

# Functions, and what they close over.

HEADS = 2
RNG = np.random.default_rng(0)
SLOPES = jnp.asarray([0.25, 0.0625], jnp.float32)
DOCUMENTS = jnp.asarray(np.sort(RNG.integers(0, 5, 512)), jnp.int32)
POSITION_BIAS = jnp.asarray(RNG.standard_normal((HEADS, 1023)), jnp.float32)
IS_SHOWN = jnp.asarray(RNG.random(512) < 0.7, jnp.float32).at[0].set(1.0)
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


def tempered(score, batch, head, query, key):
    return jnp.where(query >= key, score * (2 * SLOPES[head]) + SLOPES[head] * (key - query).astype(jnp.float32), -jnp.inf)


def shown(score, batch, head, query, key):  # which hides by a finite number
    return score + (1 - IS_SHOWN[key]) * float(jnp.finfo(jnp.float32).min)


def quick(every, some):
    """Returns parameters; all except `some` are slow."""
    return [pytest.param(value, marks=[] if value in some else pytest.mark.slow) for value in every]


SCORES = {f.__name__: f for f in (alibi, relative, cap, gate, scaled, hiding, steep, growing, tempered, shown)}
MASKS = {f.__name__: f for f in (causal, window, documents, heads)}


# The slope.


def test_the_slope_is_that_of_a_function_with_a_derivative_of_its_own():
    """Forward mode refuses such a function, and planning must not fail for it where the reference runs."""

    @jax.custom_vjp
    def capped(x):
        return jnp.tanh(x)

    capped.defvjp(lambda x: (jnp.tanh(x), x), lambda x, c: (3 * c,))  # not the true derivative
    user = lambda s, b, h, q, k: capped(s)  # noqa: E731
    traced, _ = score_functions.functions_and_operands("f", jnp.float32, user, None, (1, 1))
    assert score_derivatives.with_slope(traced["score_mod"]).jaxpr.outvars[1].val == 3


@pytest.mark.parametrize("name", SCORES)
def test_the_slope_is_the_derivative_by_the_score(name):
    function = SCORES[name]
    traced, operands = score_functions.functions_and_operands("f", jnp.float32, function, None, (2, HEADS))
    program, traced = score_derivatives.with_slope(traced["score_mod"]), traced["score_mod"]
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
    assert score_derivatives.with_slope(traced["score_mod"]).jaxpr.outvars[1].val == number


# Derivatives by elements of tables.

N_PLACES = 128
SMALL = jnp.asarray(RNG.standard_normal((HEADS, 2 * N_PLACES - 1)), jnp.float32)
LINE = jnp.asarray(RNG.standard_normal(N_PLACES), jnp.float32)


def reading(line, small):
    """Returns score functions that read a line of numbers, and a table of each head."""
    return {
        "head": lambda s, b, h, q, k: s - line[h] * jnp.abs(q - k).astype(jnp.float32),
        "query": lambda s, b, h, q, k: s + line[q] * line[q],
        "key": lambda s, b, h, q, k: s + 2 * line[k],
        "both": lambda s, b, h, q, k: s + small[h, q - k + N_PLACES - 1],
        "score": lambda s, b, h, q, k: s * small[h, 0] + jnp.tanh(s * line[k]) * line[q],
        "out of bounds": lambda s, b, h, q, k: s + line.at[q - k + 20].get(mode="fill", fill_value=0.0),
        "clipped": lambda s, b, h, q, k: s + line[jnp.clip(jnp.abs(q - k), 0, 9)],
        "hiding": lambda s, b, h, q, k: jnp.where(q >= k, s + line[q - k], -jnp.inf),
    }


TABLES = reading(LINE, SMALL)


def with_loads(name):
    functions, operands = score_functions.functions_and_operands("f", jnp.float32, TABLES[name], None, (1, HEADS))
    function = functions["score_mod"]
    return function, operands, *score_derivatives.with_loads(function, function.table_names)


@pytest.mark.parametrize("name", TABLES)
def test_derivatives_by_elements_of_tables(name):
    function, operands, program, loads = with_loads(name)
    tables = [operands[table].reshape(-1) for table in function.table_names]
    numbers = [jnp.arange(table.size, dtype=jnp.int32) for table in tables]
    for query, key in ((5, 3), (64, 2), (100, 99)):
        arguments = [jnp.float32(0.7), *(jnp.int32(i) for i in (0, 1, query, key))]
        expected = jax.grad(lambda tables, at=arguments: jaxpr_as_fun(function.program)(*tables, *at)[0])(tables)
        actual = [np.zeros_like(table) for table in tables]
        of_score = iter(jaxpr_as_fun(program)(*tables, *arguments)[2:])
        for load in loads:
            number = function.table_names.index(load.name)
            place, *factor = jaxpr_as_fun(load.program)(*tables, numbers[number], *arguments)
            if place >= 0:
                actual[number][place] += next(of_score) if load.is_of_score else factor[0]
        for a, b in zip(actual, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5)


def added(name, values, *, head, first, start, rows_are_queries):
    """Returns what a kernel adds to the derivatives of tables for a tile, without factors that depend on scores."""
    function, operands, _, loads = with_loads(name)
    operands = operands | {f"d_{table}": jnp.zeros(operands[table].shape, jnp.float32) for table in function.table_names}
    arrays, records = lay_out((1,), operands)
    columns, names = values.shape[1], function.table_names
    sizes = [operands[table].size for table in names]
    width = -(-max(sizes) // 8) * 8

    def body(refs, out):
        there = {name: replace(record, ref=refs[name]) for name, record in records.items()}
        limits = tuple(map(jnp.int32, values.shape))
        tile = wgmma.load_product(refs["values"], 0, 0, limits, values.shape, varies=(True, True))
        functions = {
            str(i): replace(Function.of(function, load.program), gradient=f"d_{load.name}") for i, load in enumerate(loads)
        }
        at = {"b": jnp.int32(0), "head": jnp.int32(head), "first": jnp.int32(first), "rows_are_queries": rows_are_queries}
        run = TileFunctions(functions, there, (N_PLACES, N_PLACES), columns, **at)
        for i in functions:
            run.add(i, tile, jnp.int32(start))
        sync.warpgroup_barrier()
        for i, (table, size) in enumerate(zip(names, sizes, strict=True)):
            line = wgmma.load_product(
                refs[f"d_{table}"], 0, 0, (jnp.int32(1), jnp.int32(size)), (ROWS, width), varies=(True, True)
            )
            wgmma.store_product(out, i, 0, (jnp.int32(1), jnp.int32(width)), line)

    kernel = kernel_of(
        body,
        out_type=jax.ShapeDtypeStruct((len(names), width), jnp.float32),
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="function_mosaic",
    )
    found = np.asarray(emulated(kernel, arrays | {"values": jnp.asarray(values)}, kernels=["function_mosaic"]))
    return [line[:size] for line, size in zip(found, sizes, strict=True)]


@pytest.mark.parametrize("rows_are_queries", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize("name", TABLES)
def test_derivatives_are_added_at_their_places(name, rows_are_queries):
    values = np.random.default_rng(1).standard_normal((ROWS, 64)).astype(np.float32)
    function, operands, _, loads = with_loads(name)
    head, first, start = 1, 64, 32
    actual = added(name, values, head=head, first=first, start=start, rows_are_queries=rows_are_queries)
    tables = [operands[table].reshape(-1) for table in function.table_names]
    expected = [np.zeros(table.shape, np.float32) for table in tables]
    rows, columns = (np.arange(size, dtype=np.int32) + at for size, at in zip(values.shape, (first, start), strict=True))
    query, key = (rows[:, None], columns[None]) if rows_are_queries else (columns[None], rows[:, None])
    query, key = (np.broadcast_to(x, values.shape).ravel() for x in (query, key))
    for load in loads:
        number = function.table_names.index(load.name)
        run = functools.partial(jaxpr_as_fun(load.program), *tables, jnp.arange(tables[number].size, dtype=jnp.int32))
        run = jax.vmap(functools.partial(run, jnp.float32(0), jnp.int32(0), jnp.int32(head)))
        place, *factor = (np.asarray(x) for x in run(query, key))
        moved = values.ravel() * (factor[0] if factor else 1)
        np.add.at(expected[number], place[place >= 0], moved[place >= 0])
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4)


# Interpreted.

SQUARE = {"batch": (), "length": 256, "keys": 256, "heads": HEADS, "key_heads": 1}
TOLERANCES = {"bfloat16": 2.0**-6, "float16": 2.0**-8, "float32": 2.0**-13}


def calls(given, score_mod, mask_mod, dtype, **options):
    """Returns names of moving operands, operands and parameters of the primitive, and the reference's cotangents."""
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


def bias():
    return {"bias": forward.random((HEADS, 256, 256), "bias")}


LONG = {"length": 512, "keys": 512}
INTERPRETED = [  # score and mask function, head size, dtype, and arguments of `check_interpreted`
    ("alibi", "causal", 64, "bfloat16", {}),
    ("cap", "documents", 64, "float32", {"deterministic": True} | LONG),
    ("gate", None, 128, "float16", {"key_heads": 2}),
    ("steep", "window", 128, "float32", {}),
    (None, "documents", 128, "bfloat16", {"make": offset(100), "keys": 512}),
    ("scaled", "heads", 64, "float16", {"make": lengths(130, 200), "options": {"logits_soft_cap": 4.0}}),
    ("growing", "causal", 64, "bfloat16", {"options": {"is_causal": True}}),
    ("gate", "causal", 128, "float32", {"make": bias}),
    ("scaled", None, 64, "bfloat16", {"make": bias, "deterministic": True}),
    ("scaled", None, 64, "float32", {}),
    ("tempered", "heads", 128, "bfloat16", {}),
    ("shown", "causal", 64, "float16", {}),
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
    target = replace(HOPPER, multiprocessors=1)
    found = interpreted.cotangents(target, operands, **params, deterministic_gradients=deterministic)
    check(given, dict(zip(params["wanted"], found, strict=True)), expected, dtype)


def check(given, found, expected, dtype, factor=1):
    """Compares cotangents. `factor` is that of the tolerance."""
    for name, actual in found.items():
        assert actual.dtype == given[name].dtype
        actual, truth = (np.asarray(x, np.float64) for x in (actual, expected[name]))
        assert np.all(np.isfinite(actual)), name
        assert np.max(np.abs(actual - truth)) <= factor * TOLERANCES[dtype] * max(1, np.max(np.abs(truth))), name


class Additions:
    """Stands for additions to global memory, which the interpreter does not make of one thread at a time."""

    def __init__(self, operands):
        self.sums, self.lock = {f"d_{name}": np.zeros(a.shape[-1]) for name, a in operands.items() if "table" in name}, Lock()

    def add(self, tile, name, values, start):
        function = tile.functions[name]
        number = function.tables.index(function.gradient[2:])
        size = function.program.in_avals[len(function.tables)].shape[0]
        rows, columns = (first + jax.lax.iota(jnp.int32, n) for first, n in zip((tile.first, start), values.shape, strict=True))
        tables = [tile.operands[name].ref[0] for name in function.tables]
        run = functools.partial(jaxpr_as_fun(function.program), *score_functions.wide_tables(tables), jnp.arange(size))

        def of_pair(key, query):
            return run(jnp.float32(0), *(jnp.asarray(i, jnp.int32) for i in (0, tile.head, query, key)))

        place, *factors = jax.vmap(jax.vmap(of_pair, (None, 0)), (0, None))(rows, columns)
        for factor in factors:
            values = values * factor
        assert size == tile.operands[function.tables[number]].ref.shape[-1]
        jax.debug.callback(functools.partial(self.put, function.gradient), place, values)

    def put(self, name, place, values):
        place, values = np.asarray(place), np.asarray(values, np.float64)
        with self.lock:
            np.add.at(self.sums[name], place[place >= 0], values[place >= 0])


@pytest.mark.parametrize(
    "call",
    [
        ("head", 64, "bfloat16", 1, 5.0),
        ("score", 128, "float16", 2, 5.0),
        ("hiding", 64, "float32", 1, 5.0),
        ("head", 64, "float32", 1, None),
        ("key", 64, "float32", 2, None),
    ],
)
def test_interpreted_cotangents_of_tables(call, monkeypatch):
    name, size, dtype, key_heads, cap = call
    given = forward.arrays(**SQUARE | {"length": 128, "keys": 128, "key_heads": key_heads}, size=size, dtype=dtype)
    operands, params, _ = calls(given, TABLES[name], None, dtype, logits_soft_cap=cap)
    tables = [name for name in operands if name.startswith("table")]
    params |= {"wanted": (*params["wanted"], *tables), "deterministic_gradients": False}
    everything = {operand.name: operands.get(operand.name) for operand in primitive.ATTENTION_VJP.operands} | params
    expected = dict(zip(params["wanted"], xla.dot_product_attention_vjp(**everything), strict=True))
    additions = Additions(operands)
    monkeypatch.setattr(TileFunctions, "add", lambda *args: additions.add(*args))
    found = interpreted.cotangents(replace(HOPPER, multiprocessors=1), operands, **params)
    found = dict(zip(params["wanted"], found, strict=True))
    jax.effects_barrier()
    for table in tables:
        assert found[table].shape == operands[table].shape
        found[table] = jnp.asarray(additions.sums[f"d_{table}"], jnp.float32).reshape(operands[table].shape)
    check(operands, found, expected, dtype, factor=4 if cap is None else 1)  # without a cap sums of 100 times distances cancel


@pytest.mark.parametrize("least", [-1e9, -1e30, float(jnp.finfo(jnp.float32).min)])
def test_rows_whose_keys_finite_numbers_hide_have_finite_cotangents(least):
    """Such a row is padding, and has no cotangent. Its weights, from rounded sums, must be finite."""

    def score_mod(score, batch, head, query, key):
        return jnp.where(key >= 40, score, least) + 0.3 * key.astype(jnp.float32)

    given = forward.arrays(**SQUARE, size=64, dtype="bfloat16")
    functions, tables = score_functions.functions_and_operands("f", jnp.float32, score_mod, None, (HEADS,))
    params = {"window": (None, 0), "soft_cap": None, "scale": 0.125, "dropout_rate": 0.0, "precision": "high"} | functions
    params |= {"deterministic_gradients": False}
    operands, target = interpreted.named(given) | tables, replace(HOPPER, multiprocessors=1)
    out, lse = interpreted.attention(target, operands, **params)
    (d_out,) = cotangents_like((out,))
    if least > -1e38:  # no score is far above it, however it was rounded
        low = np.asarray(lse)[np.asarray(lse) < -1e8]
        assert low.size == 40 * HEADS
        np.testing.assert_allclose(low, least, rtol=2e-7)
        assert np.all(raised_lse(low) > least * (1 - 2.0**-22))
    results = {"out": out, "lse": lse, "d_out": jnp.asarray(d_out).at[:40].set(0)}
    found = interpreted.cotangents(target, operands | results, **params, wanted=("query", "key", "value"))
    for cotangent in found:
        assert np.all(np.isfinite(np.asarray(cotangent, np.float32)))


@pytest.mark.parametrize("name", ["scaled", "tempered", "alibi"])
def test_slopes_are_natural_beside_results_in_powers_of_two(name):
    functions, operands = score_functions.functions_and_operands("f", jnp.float32, SCORES[name], None, (1, HEADS))
    function, columns, scale = functions["score_mod"], 64, 0.25
    arrays, records = lay_out((1,), operands)
    s = 4 * np.random.default_rng(1).standard_normal((ROWS, columns)).astype(np.float32)
    program = score_derivatives.with_slope(function)
    types = {name: jax.ShapeDtypeStruct((1, 512, HEADS, 64), jnp.bfloat16) for name in ("query", "key")}
    types |= {name: jax.typeof(operand) for name, operand in operands.items()}
    assert factor_of_changed(types, scale=scale, score_mod=function) == LN2

    def body(refs, out):
        there = {name: replace(record, ref=refs[name]) for name, record in records.items()}
        limits = tuple(map(jnp.int32, s.shape))
        tile = wgmma.load_product(refs["s"], 0, 0, limits, s.shape, varies=(True, True))
        at = {"b": jnp.int32(0), "head": jnp.int32(1), "first": jnp.int32(64), "rows_are_queries": False}
        run = TileFunctions(
            {"score_mod": Function.of(function, program)}, there, (512, 512), columns, **at, scale=scale, changed_factor=LN2
        )
        for i, result in enumerate(run.results("score_mod", tile, jnp.int32(192))):
            wgmma.store_product(out, i * ROWS, 0, (jnp.int32(ROWS), jnp.int32(columns)), result)

    kernel = kernel_of(
        body,
        out_type=jax.ShapeDtypeStruct((2 * ROWS, columns), jnp.float32),
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="function_mosaic",
    )
    found = np.split(np.asarray(emulated(kernel, arrays | {"s": jnp.asarray(s)}, kernels=["function_mosaic"])), 2)
    key, query = np.arange(64, 64 + ROWS)[:, None], np.arange(192, 192 + columns)[None]
    program = functools.partial(jaxpr_as_fun(program), *(operands[table].reshape(-1) for table in function.table_names))
    places = (np.broadcast_to(x, s.shape).ravel().astype(np.int32) for x in (query, key))
    run = jax.vmap(lambda score, query, key: program(score, jnp.int32(0), jnp.int32(1), query, key))
    result, slope = (np.asarray(x).reshape(s.shape) for x in run(s.ravel() * scale, *places))
    np.testing.assert_allclose(found[0] * LN2, result, rtol=2e-6, atol=1e-6)
    np.testing.assert_allclose(found[1], slope, rtol=1e-6)


# Compiled by ptxas.


def planned(score, mask, size, dtype, key_heads=HEADS, length=512, keys=512, **more):
    """Returns what is planned for cotangents, and the types of the operands."""
    shapes = {"query": (length, HEADS, size), "key": (keys, key_heads, size), "value": (keys, key_heads, size)}
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
WITH_TABLES = [("alibi", None, 64, "bfloat16"), ("relative", "causal", 128, "bfloat16"), ("scaled", None, 64, "float32")]
EVERY_COMPILED = [
    (score, mask, size, dtype)
    for score, mask in [*((name, None) for name in SCORES), *((None, name) for name in MASKS), ("cap", "documents")]
    for size, dtype in [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float32"), (128, "float32")]
]


@pytest.mark.parametrize("call", quick([*COMPILED, *EVERY_COMPILED], COMPILED), ids=str)
def test_kernels_compile(call):
    check_compiled(call)


def check_compiled(call, **more):
    xla_cuda.skip_unless_it_compiles()
    plan, types = planned(*call, **more)
    assert not isinstance(plan, Refusal)
    for row in compiled.compile_case(compiled.Case(str(call), (), lambda operands: plan.run(**operands), types)):
        assert not row.error
        assert not row.notes  # ptxas lets no products wait for each other


@pytest.mark.parametrize("score", ["alibi", "hiding"])
def test_kernels_with_few_queries_in_the_last_block_compile(score):
    """Mosaic GPU once found no layout for the number of queries."""
    check_compiled((score, None, 64, "bfloat16"), length=100)


@pytest.mark.parametrize("call", quick(WITH_TABLES, WITH_TABLES[:1]), ids=str)
def test_kernels_with_cotangents_of_tables_compile(call):
    check_compiled(call, wanted=("query", "key", "value", "table_0"))


@pytest.mark.parametrize("is_mapped", quick([False, True], [True]))
def test_gradients_lower_for_cuda(is_mapped):
    """Compares a public call, with a gradient for a table that all examples share or one for each."""
    given = lowering.operands(length=N_PLACES, keys=N_PLACES, heads=HEADS)
    shapes = {"line": LINE.shape, "small": SMALL.shape}
    given |= {name: lowering.shaped(*([2] * is_mapped), *shape, dtype="float32") for name, shape in shapes.items()}

    def total(moving):
        moving = dict(moving)
        score_mod = reading(moving.pop("line"), moving.pop("small"))["score"]
        return jnp.sum(lowering.forced(**moving, score_mod=score_mod, mask_mod=causal).astype(jnp.float32))

    gradient = jax.grad(lambda given: jnp.sum(jax.vmap(total)(given)) if is_mapped else total(given))
    kernels.lowered_for_cuda(gradient, given, kernels=["attention_forward_mosaic", "attention_backward_mosaic"])


@pytest.mark.parametrize(
    ("score", "mask", "queries"),
    [("alibi", "causal", 128), (None, "documents", 128), ("hiding", None, 128), ("cap", None, 64), ("relative", None, 64)],
)
def test_steps_have_fewer_queries_where_functions_need_registers(score, mask, queries):
    assert planned(score, mask, 64, "bfloat16")[0].geometry.config.block_q == queries


def test_queries_behind_the_last_are_masked_where_a_score_function_may_make_them_large():
    for score, whole in (("growing", 2), (None, 3)):
        geometry = planned(score, None if score else "causal", 64, "bfloat16", length=300)[0].geometry
        assert geometry.blocks_q == 3
        assert geometry.span(0, HOST)[3] == whole


# What is refused.


@pytest.mark.parametrize(
    ("size", "dtype", "deterministic", "words"),
    [
        (256, "bfloat16", False, "these head sizes"),
        (128, "float32", False, "these head sizes"),
        (64, "float32", True, "any order"),
    ],
)
def test_derivatives_of_tables_are_left_to_the_reference(size, dtype, deterministic, words):
    more = {"deterministic_gradients": deterministic, "wanted": ("query", "table_0")}
    plan, _ = planned("relative", None, size, dtype, **more)
    assert isinstance(plan, Refusal)
    assert plan.lacks_kernel
    assert words in plan.reason


# Native.

NATIVE = [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32"), (96, "bfloat16")]


def reference(f, moving, dtype):
    """Returns cotangents of output and log-sum-exp, and what the reference makes of them on a CPU, which compiles it sooner."""
    with jax.default_device(jax.devices("cpu")[0]):
        moving = {name: jnp.asarray(np.asarray(array), jnp.float32) for name, array in moving.items()}
        (out, lse), pull = jax.vjp(f, moving)
        dout, dlse = cotangents_like((out.astype(dtype), lse))
        dlse = np.where(lse == -np.inf, 0, dlse)
        (expected,) = pull((dout.astype(jnp.float32), dlse))
        return (np.asarray(dout), dlse), jax.tree.map(np.asarray, expected)


def test_arrays_that_the_mask_alone_reads_have_no_derivative():
    """That of others is computed by the kernel nevertheless."""
    given = {name: jnp.asarray(x) for name, x in forward.arrays(**SQUARE, size=64, dtype="bfloat16").items()}

    def loss(given, heights, slope):
        def mask_mod(b, h, q, k):
            return heights[q % 4] > heights[k % 4] - 1

        out = jaxsoftmax.dot_product_attention(**given, mask_mod=mask_mod, score_mod=lambda s, b, h, q, k: s * slope)
        return jnp.sum(out.astype(jnp.float32))

    heights = jnp.arange(4, dtype=jnp.float32)
    found = jax.grad(loss, (0, 1, 2))(given, heights, jnp.float32(0.5))
    assert not found[1].any()
    assert all(np.any(np.asarray(x)) for x in (*found[0].values(), found[2]))
    decisions = jaxsoftmax.explain(jax.grad(loss, (0, 1, 2)), given, heights, jnp.float32(0.5), platform="cuda")
    assert [decision.implementation for decision in decisions] == ["mosaic"] * 2
    assert not jax.grad(loss, 1)(given, heights, jnp.float32(0.5)).any()


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("functions", "kind", "key_heads"),
    cases.in_turns(5, [*((name, "causal") for name in SCORES), *((None, name) for name in MASKS)], NATIVE, [1, 2]),
)
def test_native_cotangents(functions, kind, key_heads):
    (score, mask), (size, dtype) = functions, kind
    shapes = {"batch": (2,), "length": 300, "keys": 333, "heads": HEADS, "key_heads": key_heads}
    given = forward.arrays(**shapes, size=size, dtype=dtype)
    more = {"score_mod": SCORES.get(score), "mask_mod": MASKS.get(mask), "return_residual": True}
    safe = more | ({"score_mod": without_nan} if score == "steep" else {})
    cotangents, expected = reference(lambda moving: attend(**moving, **safe), given, dtype)
    forced = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic")
    _, pull = jax.vjp(jax.jit(lambda moving: forced(**moving, **more)), {name: jnp.asarray(a) for name, a in given.items()})
    check(given, pull(jax.tree.map(jnp.asarray, cotangents))[0], expected, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind", "key_heads"), cases.in_turns(3, TABLES, [kind for kind in NATIVE if kind[0] < 256], [1, 2])
)
def test_native_cotangents_of_tables(name, kind, key_heads):
    size, dtype = kind
    shapes = {"batch": (2,), "length": 100, "keys": N_PLACES, "heads": HEADS, "key_heads": key_heads}
    given = {name: jnp.asarray(a) for name, a in forward.arrays(**shapes, size=size, dtype=dtype).items()}
    given |= {"line": LINE, "small": SMALL}

    def run(attend, moving):
        moving = dict(moving)
        score_mod = reading(moving.pop("line"), moving.pop("small"))[name]
        return attend(**moving, score_mod=score_mod, return_residual=True)

    cotangents, expected = reference(functools.partial(run, attend), given, dtype)
    forced = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic")
    _, pull = jax.vjp(jax.jit(functools.partial(run, forced)), given)
    # The derivative by a slope sums those of scores times distances, up to 127, whose errors do not cancel as they do. What all
    # keys of a query add sums those of its scores, which cancel, and leave the rounding of the output.
    factor = 2 if name in ("head", "query") else 1
    check(given, pull(jax.tree.map(jnp.asarray, cotangents))[0], expected, dtype, factor)
