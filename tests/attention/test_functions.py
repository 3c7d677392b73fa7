"""Score and mask functions on the Mosaic GPU kernel of attention: the evaluator, the forward kernel, and what is refused.

Without a GPU the evaluator runs in an emulator of MLIR and PTX, and the kernel in an interpreter, where `jax.vmap` stands for
the evaluator. Native tests run both together.
"""

import functools
import re
from dataclasses import replace

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu import wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention import key_blocks, primitive
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention.mosaic_sm90.common import LN2, LOG2E, ROWS, lay_out, lse_of_large, raised_lse
from jaxsoftmax.ops.attention.mosaic_sm90.decode import DecodePlan
from jaxsoftmax.ops.attention.mosaic_sm90.forward import ForwardPlan
from jaxsoftmax.ops.attention.mosaic_sm90.functions import Function, TileFunctions, factor_of_changed, reason_against
from jaxsoftmax.ops.attention.score_functions import functions_and_operands, wide_tables

from ..support import cases
from ..support.attention import interpreted, values
from ..support.attention.functions import KINDS, assert_close, expected_of, planned
from ..support.emulator import emulated

BATCH, HEADS, LENGTH = 2, 4, 384
RNG = np.random.default_rng(0)
DOCUMENTS = jnp.asarray(np.sort(RNG.integers(0, 5, LENGTH)), jnp.int32)
SLOPES = jnp.asarray([0.25, 0.125, 0.0625, 0.03125], jnp.bfloat16)
RELATIVE = jnp.asarray(RNG.standard_normal((HEADS, 2 * LENGTH - 1)), jnp.float32)
BUCKETS = jnp.asarray(RNG.standard_normal((32, HEADS)), jnp.float32)
OF_KEYS = jnp.asarray(RNG.standard_normal((BATCH, 1, LENGTH)), jnp.float16)
BYTES = jnp.asarray(RNG.integers(-128, 128, LENGTH), jnp.int8)
IS_OPEN = jnp.asarray(RNG.random(LENGTH) < 0.7)
PREFIX = jnp.asarray([100, 37], jnp.int32)
TEMPERATURES = jnp.asarray([0.5, 1.5, 2.0, 1.0], jnp.float32)
LEAST = float(np.finfo(np.float32).min)
# With a causal mask the first rows see no key that is shown.
IS_SHOWN = (IS_OPEN & (np.arange(LENGTH) >= 70)).astype(jnp.float32)
OF_BOTH = jnp.asarray(RNG.standard_normal((HEADS, LENGTH)), jnp.float32)


def bucket(query, key):
    """Returns T5's bucket of a distance."""
    distance = jnp.abs(query - key)
    far = jnp.log(jnp.maximum(distance, 1).astype(jnp.float32) / 8) / np.float32(np.log(128 / 8)) * 8
    near = jnp.where(distance < 8, distance, jnp.minimum(8 + far.astype(jnp.int32), 15))
    return near + 16 * (key > query).astype(jnp.int32)


MASKS = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: jnp.abs(q - k) < 70,
    "prefix": lambda b, h, q, k: (q >= k) | (k < PREFIX[b]),
    "documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
    "dilated": lambda b, h, q, k: ((q - k) % 4 == 0) & (q // 64 >= k // 64),
    "of heads": lambda b, h, q, k: (h % 2 == 0) | ~(k % 3 == 1),
    "open": lambda b, h, q, k: IS_OPEN.at[k + 300].get(mode="fill", fill_value=False) | (q >> 5 == k >> 5),
    "nothing": lambda b, h, q, k: (q < 0) & (k < 0),
    "everything": lambda b, h, q, k: (q >= 0) | (k >= 0),
    "rows": lambda b, h, q, k: (q % 2 == 1) ^ (q > 200),
    "hash": lambda b, h, q, k: (q * 1103515245 + k * 12345) % 7 < 3,
    "sizes of bytes": lambda b, h, q, k: IS_OPEN[jnp.abs(q.astype(jnp.int8)).astype(jnp.int32)] & (jnp.abs(BYTES[k]) > -1),
    "divided by 0": lambda b, h, q, k: (k // (q - q // 2 * 2) > 5) | ((q + k) % (k - k // 3 * 3) == 2),
    "shifted": lambda b, h, q, k: (1 << jnp.minimum(q - k, 20)) > 64,
}
SCORES = {
    "alibi": lambda s, b, h, q, k: s - SLOPES[h].astype(s.dtype) * jnp.abs(q - k).astype(s.dtype),
    "relative": lambda s, b, h, q, k: s + RELATIVE[h, q - k + LENGTH - 1].astype(s.dtype),
    "buckets": lambda s, b, h, q, k: s + BUCKETS[bucket(q, k), h].astype(s.dtype),
    "of keys": lambda s, b, h, q, k: s * OF_KEYS[b, 0, k].astype(s.dtype),
    "bytes": lambda s, b, h, q, k: s + BYTES[q].astype(s.dtype) / 64 - BYTES[k].astype(jnp.int32).astype(s.dtype) / 50,
    "cap": lambda s, b, h, q, k: 3 * jnp.tanh(s / 3),
    "gate": lambda s, b, h, q, k: jax.nn.silu(s) + jax.nn.softplus(s) + jnp.expm1(jnp.minimum(s, 1)),
    "hiding": lambda s, b, h, q, k: jnp.where(q >= k, s, -jnp.inf),
    "lowest": lambda s, b, h, q, k: jnp.where(q % 5 == 0, float(np.finfo(np.float32).min), s),
    "number": lambda s, b, h, q, k: jnp.zeros_like(s) + 1.5,
    "rounded": lambda s, b, h, q, k: (s.astype(jnp.bfloat16) * SLOPES[h]).astype(s.dtype),
    "powers": lambda s, b, h, q, k: jnp.sqrt(jnp.abs(s)) + s**3 * 1e-3 + jnp.abs(s) ** 0.7 + jnp.sign(s) * jnp.floor(s),
    "below a length": lambda s, b, h, q, k: jnp.where(k < LENGTH, s, -1e9),
    "one of two factors": lambda s, b, h, q, k: jnp.where(q < 100000, s, 0.5 * s),
    "a cap below a length": lambda s, b, h, q, k: jnp.where(k < 4096, 3 * jnp.tanh(s / 3), s),
    "slopes": lambda s, b, h, q, k: s - SLOPES[h].astype(s.dtype) * (q - k).astype(s.dtype),
    "causal slopes": lambda s, b, h, q, k: jnp.where(q >= k, s - SLOPES[h].astype(s.dtype) * (q - k).astype(s.dtype), -jnp.inf),
    "temperatures": lambda s, b, h, q, k: (
        s * TEMPERATURES[h].astype(s.dtype) + (k - q).astype(s.dtype) * -SLOPES[h].astype(s.dtype)
    ),
    "far": lambda s, b, h, q, k: s + ((q * 100003 - k).astype(jnp.float32) - (q * 100003).astype(jnp.float32)).astype(s.dtype),
    "divided": lambda s, b, h, q, k: (
        s / TEMPERATURES[h].astype(s.dtype) - SLOPES[h].astype(s.dtype) * (q - k).astype(s.dtype) / 3
    ),
    "lines": lambda s, b, h, q, k: (
        s + (SLOPES[h].astype(jnp.float32) - (OF_BOTH[h, q] - OF_BOTH[h, k] / 3) + OF_BOTH[h, k]).astype(s.dtype)
    ),
    "hidden by a number": lambda s, b, h, q, k: s + (1 - IS_SHOWN[k].astype(s.dtype)) * LEAST,
    "hidden by a product": lambda s, b, h, q, k: s + (q < k).astype(s.dtype) * LEAST,
    "steep": lambda s, b, h, q, k: s - SLOPES[h].astype(s.dtype) * 1e30 * jnp.abs(q - k).astype(s.dtype),
    "read twice": lambda s, b, h, q, k: jnp.where(
        (x := s - SLOPES[h].astype(s.dtype) * (q - k).astype(s.dtype)) > -9.5, x, -3.0
    ),
    "half of a hidden score": lambda s, b, h, q, k: 0.9 * jnp.where(q >= k, s, jnp.asarray(LEAST, s.dtype)),
    "hidden by the opposite": lambda s, b, h, q, k: -jnp.where(q >= k, -s, jnp.asarray(-LEAST, s.dtype)),
    "a tenth less": lambda s, b, h, q, k: jnp.where(q >= k, s, jnp.asarray(LEAST, s.dtype)) / 1.1,
    "hidden twice": lambda s, b, h, q, k: (
        s + (1 - IS_SHOWN[k].astype(s.dtype)) * (LEAST / 2) + (1 - IS_SHOWN[q].astype(s.dtype)) * (LEAST / 2)
    ),
    "wide": lambda s, b, h, q, k: s + 1 / (1 + q).astype(s.dtype) - jnp.log1p(k.astype(s.dtype)),
}
FUNCTIONS = {**{name: ("mask_mod", f) for name, f in MASKS.items()}, **{name: ("score_mod", f) for name, f in SCORES.items()}}


def traced(name, batch=(BATCH,), heads=HEADS, dtype=jnp.float32):
    """Returns a traced function, and the operands that it reads."""
    kind, user = FUNCTIONS[name]
    functions, operands = functions_and_operands("f", dtype, *[user if k == kind else None for k in KINDS], (*batch, heads))
    return functions[kind], operands


OF_BOUNDS = ("below a length", "one of two factors", "a cap below a length")  # of which a tile knows more than a plan


# The evaluator.


def on_tile(name, s, *, b, head, first, start, rows_are_queries=True, offset=None, numbers=None, queries=LENGTH, **more):
    """Returns what a kernel makes of a tile of scores; `numbers` of tokens are those of `query_numbers` and `key_numbers`."""
    kind, _ = FUNCTIONS[name]
    function, operands = traced(name)
    operands |= numbers or {}
    arrays, records = lay_out((BATCH,), operands)
    columns, scale = s.shape[1], 0.25  # a power of two: the kernel gets products that have the scores exactly
    types = {name: jax.ShapeDtypeStruct((BATCH, LENGTH, HEADS, 64), jnp.bfloat16) for name in ("query", "key")}
    types |= {name: jax.typeof(operand) for name, operand in operands.items()}
    factor = factor_of_changed(types, scale=scale, score_mod=function if kind == "score_mod" else None)

    def body(refs, out):
        there = {name: replace(record, ref=refs[name]) for name, record in records.items()}
        limits = tuple(map(jnp.int32, s.shape))
        scores = wgmma.load_product(refs["s"], 0, 0, limits, s.shape, varies=(True, True))
        at = {"b": jnp.int32(b), "head": jnp.int32(head), "first": jnp.int32(first), "rows_are_queries": rows_are_queries}
        at |= more | {"scale": scale, "changed_factor": factor} | ({} if offset is None else {"offset": jnp.int32(offset)})
        functions = TileFunctions({kind: Function.of(function)}, there, (queries, LENGTH), columns, **at)
        if kind == "score_mod":
            result = functions.changed(scores / scale, jnp.int32(start))
        else:
            result = functions.hidden(scores, jnp.int32(start))
        wgmma.store_product(out, 0, 0, limits, result)

    kernel = kernel_of(
        body,
        out_type=jax.ShapeDtypeStruct(s.shape, jnp.float32),
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="function_mosaic",
    )
    found = np.asarray(emulated(kernel, arrays | {"s": jnp.asarray(s)}, kernels=["function_mosaic"]))
    # The largest number stands for itself: products with powers of two stay finite.
    return np.where(np.abs(found) == np.finfo(np.float32).max, found, found * np.float32(factor or 1))


def expected_on_tile(
    name, s, *, b, head, first, start, rows_are_queries=True, offset=None, heads_per_query=1, from_the_last=False
):
    kind, _ = FUNCTIONS[name]
    function, operands = traced(name)
    rows, columns = (np.arange(size, dtype=np.int32) + at for size, at in zip(s.shape, (first, start), strict=True))
    query, key = (rows[:, None], columns[None]) if rows_are_queries else (columns[None], rows[:, None])
    query, head = query // heads_per_query, head * heads_per_query + query % heads_per_query
    query, key = (LENGTH - 1 - query, LENGTH - 1 - key) if from_the_last else (query, key)
    tables = [table.reshape(1, 1, -1) for table in wide_tables([operands[table] for table in function.table_names])]
    scores = [s] if function.takes_score else []
    arguments = [*scores, np.full((1, 1), b, np.int32), head, query + (offset or 0), key]
    result = function.on_arrays(tables, *map(jnp.asarray, arguments), axes=2)
    result = np.broadcast_to(result, s.shape)
    return np.where(result, s, -np.inf) if kind == "mask_mod" else result


@pytest.mark.parametrize("rows_are_queries", [True, False], ids=["queries", "keys"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_on_a_tile(name, rows_are_queries):
    s = (3 * np.random.default_rng(1).standard_normal((ROWS, 64))).astype(np.float32)
    at = {"b": 1, "head": 2, "first": 64, "start": 32, "rows_are_queries": rows_are_queries}
    actual, expected = on_tile(name, s, **at), expected_on_tile(name, s, **at)
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
    np.testing.assert_allclose(actual, expected, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize(
    "name",
    ["causal", "window", "relative", "buckets", "alibi", "documents", "hash", "shifted", "slopes", "far", *OF_BOUNDS],
)
@pytest.mark.parametrize(("first", "start"), [(0, 128), (320, 64)])
def test_functions_on_tiles_that_end_with_the_sequence(name, first, start):
    """No index of such tiles is out of bounds: none is moved, and the first one of a thread may be negative."""
    s = np.random.default_rng(1).standard_normal((ROWS, 64)).astype(np.float32)
    at = {"b": 1, "head": 0, "first": first, "start": start}
    actual, expected = on_tile(name, s, ends=(LENGTH, LENGTH), **at), expected_on_tile(name, s, **at)
    np.testing.assert_allclose(actual, expected, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["causal", "buckets", "open"])
@pytest.mark.parametrize("offset", [-100, 90])
def test_functions_with_an_offset(name, offset):
    """Indices may be negative, which count from the end, and beyond the end of tables."""
    s = np.random.default_rng(1).standard_normal((ROWS, 128)).astype(np.float32)
    at = {"b": 0, "head": 3, "first": 0, "start": 0, "offset": offset}
    np.testing.assert_array_equal(on_tile(name, s, **at), expected_on_tile(name, s, **at))


@pytest.mark.parametrize("name", ["documents", "alibi"])
@pytest.mark.parametrize("rows_are_queries", [True, False], ids=["queries", "keys"])
def test_functions_of_tokens_with_numbers(name, rows_are_queries):
    """Operands number the tokens of a sequence that devices share: here from the last to the first."""
    s = np.random.default_rng(1).standard_normal((ROWS, 64)).astype(np.float32)
    at = {"b": 1, "head": 3, "rows_are_queries": rows_are_queries}
    line = jnp.arange(LENGTH - 1, -1, -1, dtype=jnp.int32)[None]
    actual = on_tile(name, s, first=64, start=128, numbers={"query_numbers": line, "key_numbers": line}, **at)
    expected = expected_on_tile(name, s[::-1, ::-1], first=LENGTH - 128, start=LENGTH - 192, **at)[::-1, ::-1]
    np.testing.assert_allclose(actual, expected, rtol=4e-6, atol=1e-6)


FOLDED = ["alibi", "buckets", "relative", "of heads", "documents", "of keys"]


@pytest.mark.parametrize(
    ("name", "heads_per_query", "are_numbered"),
    [
        pytest.param(name, n, n == 3, marks=cases.slow_unless((i + n) % 3 == 0))
        for i, name in enumerate(FOLDED)
        for n in (2, 3, 4)
    ],
)
def test_functions_on_folded_rows(name, heads_per_query, are_numbered):
    """Heads and queries vary along rows, and so do the numbers of tokens that devices share."""
    s = np.random.default_rng(1).standard_normal((ROWS, 64)).astype(np.float32)
    at = {"b": 1, "head": int(heads_per_query == 2), "first": 64, "start": 32, "heads_per_query": heads_per_query}
    line = jnp.arange(LENGTH - 1, -1, -1, dtype=jnp.int32)[None]
    more = {"numbers": {"query_numbers": line, "key_numbers": line}} if are_numbered else {"offset": 90}
    actual = on_tile(name, s, **at, **more)
    expected = expected_on_tile(name, s, **at, offset=more.get("offset"), from_the_last=are_numbered)
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
    np.testing.assert_allclose(actual, expected, rtol=4e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["alibi", "buckets", "of heads", "causal"])
def test_functions_of_one_query(name):
    """Only the first rows are of a query. There are as many as heads."""
    s = np.random.default_rng(1).standard_normal((ROWS, 64)).astype(np.float32)
    at = {"b": 1, "head": 0, "first": 0, "start": 32, "offset": 70, "heads_per_query": HEADS}
    actual, expected = on_tile(name, s, **at, queries=1)[:HEADS], expected_on_tile(name, s, **at)[:HEADS]
    np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
    np.testing.assert_allclose(actual, expected, rtol=4e-6, atol=1e-6)


REFUSED = {
    "a sum": (lambda s, b, h, q, k: s + jnp.sum(RELATIVE[h]), "reduce_sum"),
    "erf": (lambda s, b, h, q, k: jax.lax.erf(s), "the operation erf"),
    "a loop": (lambda s, b, h, q, k: jax.lax.fori_loop(0, 3, lambda i, x: 2 * x, s), "the operation scan"),
    "a remainder": (lambda s, b, h, q, k: s % 2.0, "dtype float32"),
    "a sort": (lambda s, b, h, q, k: s + jnp.sort(BUCKETS[0])[h], "an array of several elements|sort"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_runs_is_refused(name):
    user, reason = REFUSED[name]
    functions, operands = functions_and_operands("f", jnp.float32, user, None, (BATCH, HEADS))
    given = values.arrays(length=LENGTH, keys=LENGTH, heads=HEADS, dtype="bfloat16") | operands
    types = {name: jax.typeof(jnp.asarray(x)) for name, x in given.items()}
    said = reason_against(Function.of(functions["score_mod"]), types)
    assert said is not None
    assert re.search(reason, said), said


# The forward kernel, interpreted.

SHAPES = {"batch": (BATCH,), "length": LENGTH, "keys": LENGTH, "heads": 2, "key_heads": 1}  # that tiles divide
SEGMENTS = {f"{name}_segment_ids": values.segments(LENGTH, i) for i, name in enumerate(("query", "key_value"))}
# Names of functions, what else there is, and options of the public function.
CALLS = {
    **{name: ((name,), None, {}) for name in FUNCTIONS},
    "both, and causal": (("alibi", "documents"), None, {"is_causal": True}),
    "with a soft cap": (("hiding", "window"), None, {"logits_soft_cap": 2.0}),
    "with lengths": (("relative", "dilated"), values.lengths_of([384, 65], [300, 129]), {}),
    "with segments": (("causal",), lambda: dict(SEGMENTS), {}),
    "with sinks": (("gate", "prefix"), lambda: {"sinks": values.random((2,), "bias")}, {}),
    "rows that a number hides": (("hidden by a number", "causal"), None, {}),
    "lowest rows, with sinks": (("lowest", "causal"), lambda: {"sinks": values.random((2,), "bias")}, {}),
    "with an offset": (("alibi", "causal"), lambda: {"query_offset": np.array([70, -20], np.int32)}, {}),
}
# What the stand-in of the evaluator does is all one: these differ in which key blocks are seen, and in what is hidden.
INTERPRETED = ["causal", "documents", "of heads", "nothing", "hiding", "lowest", "number", "temperatures", "steep"]
INTERPRETED += list(CALLS)[len(FUNCTIONS) :]
TARGET = replace(HOPPER, multiprocessors=1)


def given_for(name, **shapes):
    _, make, _ = CALLS[name]
    return values.arrays(**SHAPES | shapes) | ({} if make is None else make())


def mods(name):
    return {FUNCTIONS[each][0]: FUNCTIONS[each][1] for each in CALLS[name][0]}


def run(operands, params):
    out, lse = interpreted.attention(TARGET, operands, **params)
    return out, jnp.swapaxes(lse, -1, -2)


@pytest.mark.parametrize(
    ("name", "size", "dtype"),
    [
        pytest.param(name, *kind, marks=cases.slow_unless((place + step) % 6 == 0))
        for place, name in enumerate(INTERPRETED)
        for step, kind in enumerate([(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (64, "float16")])
    ],
)
def test_the_forward_kernel_interpreted(name, size, dtype):
    given, options = given_for(name, size=size, dtype=dtype), CALLS[name][2]
    assert_close(run(*planned(given, mods(name), options)), expected_of(given, mods(name), options), dtype)


def test_examples_with_tables_of_their_own():
    given = given_for("alibi", size=64, dtype="bfloat16")
    operands, params = planned(given, mods("alibi"), {})
    tables = jnp.stack([SLOPES, 3 * SLOPES])
    out, lse = run(operands | {"table_0": tables[:, None]}, params)
    for i, table in enumerate(tables):
        alone = {name: x[i] for name, x in given.items()}

        def score_mod(s, b, h, q, k, table=table):
            return s - table[h].astype(s.dtype) * jnp.abs(q - k).astype(s.dtype)

        expected = expected_of(alone, {"score_mod": score_mod}, {})
        assert_close((out[i], lse[i]), expected, "bfloat16")


def test_key_blocks_that_no_query_sees_are_not_read():
    given = given_for("causal", size=64, dtype="bfloat16")
    given = {name: np.array(x) for name, x in given.items()}
    functions = {"mask_mod": lambda b, h, q, k: (k >= 128) & (k < 256)}
    expected = expected_of(given, functions, {})
    for name in ("key", "value"):
        given[name][:, :128] = given[name][:, 256:] = np.nan
    assert_close(run(*planned(given, functions, {})), expected, "bfloat16")


# Plans.


def plan_of(functions, length=LENGTH, size=64, dtype="bfloat16", operation=primitive.ATTENTION, **options):
    given = values.arrays(**SHAPES | {"length": length}, size=size, dtype=dtype)
    operands, params = planned(given, functions, options)
    types = {name: jax.typeof(operand) for name, operand in operands.items()}
    return mosaic.plan(operation.problem(operation, types, params), TARGET)


def test_kernels_run_functions():
    for length, kind in ((1, DecodePlan), (LENGTH, ForwardPlan)):
        plan = plan_of({"mask_mod": MASKS["causal"], "score_mod": SCORES["cap"]}, length)
        assert type(plan) is kind
        assert "score_mod and mask_mod in registers" in plan.describe()


@pytest.mark.parametrize("name", SCORES)
def test_functions_that_are_sums_make_powers_of_two(name):
    """Their terms absorb the factor. A table with a number for each score does not, nor what bends scores."""
    natural = ("relative", "buckets", "gate", "rounded", "powers", "hidden by a product", "far")
    # Their terms might become infinite.
    natural += ("half of a hidden score", "a tenth less", "hidden twice", "lines", "divided", "wide")
    moderate = {"cap": 3.0, "hiding": 0.125}
    factor = None if name in natural else moderate.get(name, LN2)
    assert plan_of({"score_mod": SCORES[name]}).geometry.changed_factor == factor
    assert plan_of({"score_mod": SCORES[name]}, 1).geometry.changed_factor == factor
    assert LN2 * LOG2E == 1


def test_large_scores_have_weights_that_are_finite():
    """The log-sum-exp is rounded, so that it may be below all scores of a row."""
    rng = np.random.default_rng(0)
    powers = (np.exp2(rng.uniform(0, 127.9, 100000)) * rng.choice([-1, 1], 100000)).astype(np.float32)
    lse = np.asarray(raised_lse(jnp.asarray(powers) * np.float32(LN2)), np.float64)
    exponents = powers - np.float64(np.float32(lse) * np.float32(LOG2E))
    assert np.max(exponents) < 8 * LOG2E
    np.testing.assert_allclose(lse, powers * LN2, rtol=2e-6)
    small = abs(powers) < 1e7
    np.testing.assert_allclose(lse[small], powers[small] * LN2, rtol=2e-7)
    found = lse_of_large(jnp.asarray([LEAST * np.float32(LN2), -np.inf, np.inf], jnp.float32))
    np.testing.assert_array_equal(found, [LEAST, -np.inf, np.inf])


@pytest.mark.parametrize(("name", "factor"), [("cap", 3.0), ("gate", None), ("alibi", LN2)])
def test_the_factor_of_scores_makes_the_kernel(name, factor):
    """A soft cap as a function has the kernel of the soft cap: its factor is that of the exponents, and maxima are guessed.

    So are those of large scores that a function makes powers of two.
    """
    for size in (64, 128):
        plan = plan_of({"score_mod": SCORES[name]}, 1024, size)
        assert plan.geometry.unit == (LOG2E if factor is None else 1)
        assert plan.geometry.changed_factor == factor
        assert ("guessed maxima" in plan.describe()) == (name == "cap" or size == 128)


def test_an_operation_without_a_lowering_is_the_reason():
    plan = plan_of({"score_mod": REFUSED["erf"][0]})
    assert isinstance(plan, Refusal)
    assert plan.plan is None
    assert plan.reason == "kernels have no functions with the operation erf"


@pytest.mark.parametrize(("name", "of_tangents"), [("documents", "xla"), ("causal", "mosaic")])
def test_tangents_run_on_the_reference_unless_a_mask_is_a_window(name, of_tangents):
    given = values.arrays(**SHAPES, dtype="bfloat16")

    def tangent(given):
        attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic", mask_mod=MASKS[name])
        return jax.jvp(lambda query: attend(query, given["key"], given["value"]), (given["query"],), (given["query"],))

    decisions = {decision.primitive: decision for decision in explain(tangent, given, platform="cuda")}
    assert decisions["dot_product_attention"].implementation == "mosaic"
    assert decisions["dot_product_attention_jvp"].implementation == of_tangents


def test_blocks_of_queries_cost_what_a_mask_shows():
    def costs(functions, **options):
        return plan_of(functions, 1024, **options).geometry.costs()

    causal = costs({"mask_mod": MASKS["causal"]})
    assert causal == costs({"score_mod": SCORES["cap"]}, is_causal=True)
    assert costs({"mask_mod": MASKS["nothing"]}) == (1,) * len(causal)
    assert costs({"mask_mod": MASKS["window"]}, is_causal=True) < causal


def test_spans_of_segments_and_of_a_mask_intersect():
    rng = np.random.default_rng(0)
    seen, whole = rng.random((2, 2, 30, 9)) < 0.7, rng.random((2, 2, 30, 9)) < 0.5
    whole &= seen

    def spans(seen, whole):
        ends = np.asarray(key_blocks.find_ends(jnp.asarray(seen)))
        first = np.where(whole.any(-1), whole.argmax(-1), 9)
        behind = ~whole & (np.arange(9) > first[..., None])
        last = np.where(behind.any(-1), behind.argmax(-1), 9)
        return np.concatenate([ends, first[..., None], last[..., None]], -1)

    found = np.asarray(key_blocks.intersect_spans(*(jnp.asarray(spans(*pair)) for pair in zip(seen, whole, strict=True))))
    index = np.arange(9)
    inside = (index >= found[..., :1]) & (index < found[..., 1:2])
    assert np.all(inside | ~(seen[0] & seen[1]))
    full = (index >= found[..., 2:3]) & (index < found[..., 3:])
    assert np.all(~full | (whole[0] & whole[1]))


# On a GPU.


NATIVE = [(64, "bfloat16"), (128, "float16"), (256, "bfloat16"), (64, "float32"), (128, "bfloat16"), (128, "float32")]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "kind"), cases.in_turns(3, CALLS, NATIVE))
def test_native_values(name, kind):
    size, dtype = kind
    has_lengths = CALLS[name][1] is not None
    lengths = {} if has_lengths else {"length": 300, "keys": 301}
    given, options = given_for(name, size=size, dtype=dtype, **lengths), CALLS[name][2]

    @jax.jit
    def attend(given):
        return jaxsoftmax.dot_product_attention(
            **given, **mods(name), **options, implementation="mosaic", precision="high", return_residual=True
        )

    # Products of float32 are rounded to other numbers of 16 bits than those of float64.
    least = "bfloat16" if name == "rounded" else dtype
    assert_close(attend(given), expected_of(given, mods(name), options), least)
