"""Score and mask functions in Triton's kernels, interpreted on the CPU; `test_triton_functions.py` runs this file in a process.

As `triton_interpreted.py` does, it runs kernels in blocks that are small enough for several of each kind.
"""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

import jaxsoftmax
from jaxsoftmax._triton import attention as kernels_of_attention
from jaxsoftmax._triton import attention_functions, attention_launch
from jaxsoftmax.ops.attention import triton_functions
from jaxsoftmax.ops.attention.operands import AXES
from jaxsoftmax.ops.attention.score_functions import functions_and_operands, wide_tables

from ..support import cases, kernels, triton_kernels
from ..support.attention import values
from ..support.attention.functions import KINDS
from ..support.attention.triton_variants import CALLS, alibi, causal, check_call, check_variant
from ..support.attention.variants import VARIANTS, Sizes

pytestmark = [pytest.mark.filterwarnings("ignore::RuntimeWarning")]

ran = []  # the kernels that ran, by name
forced = functools.partial(jaxsoftmax.dot_product_attention, implementation="triton", precision="high", return_residual=True)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Kernels run where a custom call would be made for a GPU, in blocks of 16 queries and 32 keys."""
    run = triton_kernels.run

    def recorded(kernel, operands, results, **options):
        ran.append(options["LAUNCH"].kernel)
        return run(kernel, operands, results, **options)

    def run_in_jax(kernel, operands, results, **options):
        return jax.pure_callback(lambda *given: tuple(recorded(kernel, given, results, **options)), tuple(results), *operands)

    triton_kernels.interpret(monkeypatch, run_in_jax)
    monkeypatch.setattr(attention_launch, "tiling_for", lambda *args: attention_launch.AttentionTiling(16, 32, 4, 1))
    ran.clear()
    with kernels.target(triton_kernels.target_of((8, 0)), interpreted=True), kernels.anew():
        yield


# Functions on a tile.

LENGTH, HEADS = 64, 4
RNG = np.random.default_rng(0)
WORDS = jnp.asarray(RNG.integers(-(2**31), 2**31, LENGTH), jnp.int32)
NATURALS = jnp.asarray(RNG.integers(0, 2**32, LENGTH, np.uint32))
BYTES = jnp.asarray([-128, -1, 0, 1, 127] * 13, jnp.int8)[:LENGTH]
SMALL = jnp.asarray([-3, -2, -1, 0, 1, 2, 3, 100], jnp.int32)
LEAST = jnp.asarray([-(2**31), -(2**31) + 1, 2**31 - 1, 7, -7, 0, 1, -1], jnp.int32)
SHORT = jnp.asarray(RNG.standard_normal(LENGTH), jnp.bfloat16)
HALF = jnp.asarray(RNG.standard_normal((2, 1, LENGTH)), jnp.float16)
OPEN = jnp.asarray(RNG.random(LENGTH) < 0.5)
SPECIAL = jnp.asarray([np.nan, np.inf, -np.inf, -0.0, 0.5, -2.5, 3e9, -3e9, 1.5, 2.5, -0.49999997, 300.0], jnp.float32)
GRID = jnp.asarray(RNG.standard_normal((3, 5, HEADS)), jnp.float32)


def special(k):
    return SPECIAL[k % 12]


def as_score(x):
    return x.astype(jnp.float32)


ON_TILES = {
    "quotients": lambda b, h, q, k: LEAST[q % 8] // SMALL[k % 8] > 3,
    "quotients towards 0": lambda s, b, h, q, k: as_score(jax.lax.div(LEAST[q % 8], SMALL[k % 8])),
    "remainders": lambda s, b, h, q, k: as_score(jax.lax.rem(LEAST[q % 8], SMALL[k % 8])),
    "remainders with the sign of the divisor": lambda s, b, h, q, k: as_score(LEAST[q % 8] % SMALL[k % 8]),
    "unsigned": lambda s, b, h, q, k: as_score(NATURALS[q] // (NATURALS[k] >> 20)) + as_score(NATURALS[q] % NATURALS[k]),
    "unsigned order": lambda b, h, q, k: (NATURALS[q] > NATURALS[k]) | (jnp.maximum(NATURALS[q], 5) == 5),
    "bytes": lambda s, b, h, q, k: as_score(BYTES[q] * BYTES[k]) + as_score(jnp.abs(BYTES[k])) + as_score(-BYTES[q]),
    "quotients of bytes": lambda s, b, h, q, k: as_score(jax.lax.div(BYTES[q], BYTES[k])),
    "shifts": lambda s, b, h, q, k: as_score(WORDS[q] >> SMALL[k % 8]) + as_score(WORDS[q] << SMALL[k % 8]),
    "logical shifts": lambda s, b, h, q, k: as_score(jax.lax.shift_right_logical(WORDS[q], SMALL[k % 8])),
    "shifts of unsigned": lambda s, b, h, q, k: as_score(NATURALS[q] >> (NATURALS[k] % 40)),
    "bits": lambda s, b, h, q, k: as_score((WORDS[q] & WORDS[k]) ^ (~WORDS[q] | 5)),
    "bools": lambda b, h, q, k: (OPEN[q] ^ OPEN[k]) & ~(OPEN[q] < OPEN[k]) | (jnp.maximum(OPEN[q], k > 3) == (h > 1)),
    "float to int": lambda s, b, h, q, k: as_score(special(k).astype(jnp.int32) // 2) + as_score((40 * s).astype(jnp.int8)),
    "float to unsigned": lambda s, b, h, q, k: as_score(special(k).astype(jnp.uint32) // 2),
    "float to bytes": lambda s, b, h, q, k: as_score(special(k).astype(jnp.uint8)) + as_score(special(k).astype(jnp.int16)),
    "extremes of NaN": lambda s, b, h, q, k: jnp.maximum(s, special(k)) + jnp.minimum(special(k), special(q)),
    "comparisons of NaN": lambda b, h, q, k: (
        (special(q) < special(k)) ^ (special(q) >= special(k)) | (special(q) != special(k))
    ),
    "clamped": lambda s, b, h, q, k: jnp.clip(special(k), -2.0, 2.0) + jax.lax.clamp(-1.0, s, 1.0),
    "signs": lambda s, b, h, q, k: jnp.sign(special(k)) + as_score(jnp.sign(k - q)) + jnp.sign(s),
    "rounded": lambda s, b, h, q, k: jnp.round(special(k)) + jnp.floor(s) - jnp.ceil(s) + jnp.trunc(special(q)),
    "rounded away": lambda s, b, h, q, k: jax.lax.round(special(k) + 2 * s),
    "finite": lambda b, h, q, k: jnp.isfinite(special(k)) | jnp.isnan(special(q)),
    "powers": lambda s, b, h, q, k: special(k) ** 3 + jax.lax.pow(special(k) - 1, SMALL[q % 8]) + jnp.abs(s) ** -0.7 + s**-2,
    "powers of floats": lambda s, b, h, q, k: jnp.power(as_score(q - k), as_score(SMALL[q % 8])),
    "exponentials": lambda s, b, h, q, k: jnp.exp(s) + jnp.exp2(s) + jnp.expm1(s / 16) + jax.nn.sigmoid(special(k)),
    "logarithms": lambda s, b, h, q, k: jnp.log(as_score(k)) + jnp.log2(as_score(q + 1)) + jnp.log1p(s * s / 64),
    "roots": lambda s, b, h, q, k: jnp.sqrt(special(k)) + jax.lax.rsqrt(as_score(q + 1)) + jnp.tanh(s) + jnp.square(s),
    "bfloat16": lambda s, b, h, q, k: as_score(SHORT[q] * SHORT[k] + s.astype(jnp.bfloat16)),
    "float16": lambda s, b, h, q, k: as_score(HALF[b, 0, k] + jnp.float16(0.1) * q.astype(jnp.float16)),
    "tables": lambda s, b, h, q, k: s + GRID[q % 3, k % 5, h] + GRID[-1, k % 5 - 5, 0] + GRID.reshape(15, HEADS)[q % 15, 1],
    "out of bounds": lambda s, b, h, q, k: s + GRID[q, k - 60, h - 2],
    "filled": lambda s, b, h, q, k: GRID.at[q % 5, k % 7 - 1, h].get(mode="fill", fill_value=7.0) + s,
    "filled with NaN": lambda s, b, h, q, k: as_score(WORDS.at[q + k].get(mode="fill")) + SPECIAL.at[k].get(mode="fill"),
    "filled bytes": lambda s, b, h, q, k: (
        as_score(BYTES.at[q + k].get(mode="fill")) + as_score(NATURALS.at[2 * k].get(mode="fill"))
    ),
    "sliced": lambda s, b, h, q, k: s + jax.lax.dynamic_slice(GRID, (q, 1, h), (1, 1, 1))[0, 0, 0] + GRID[::2, 1:][1, k % 4, 3],
    "own derivatives": lambda s, b, h, q, k: jax.nn.relu(s) + jax.nn.gelu(s),
}


@triton.jit
def on_tile(words, score, out, LAUNCH: tl.constexpr, PROGRAM: tl.constexpr, TAKES: tl.constexpr, TRANSPOSED: tl.constexpr):
    line, other = tl.arange(0, 64)[:, None], tl.arange(0, 64)[None, :]
    at = line * 64 + other
    query, key = line, other
    if TRANSPOSED:
        query, key = other, line
        at = other * 64 + line
    b, entry, head = tl.program_id(0) + 1, tl.program_id(0) + 1, tl.program_id(0) + 2
    inputs = (tl.load(score + at), entry, head, query, key) if TAKES else (entry, head, query, key)
    results = attention_functions.run(PROGRAM, LAUNCH, words, b, inputs)
    tl.store(out + at, results[0].to(tl.float32))


@pytest.mark.parametrize(("name", "is_transposed"), cases.in_turns(2, ON_TILES, [False, True]))
def test_functions_on_a_tile(name, is_transposed):
    user = ON_TILES[name]
    takes_score = "s" in user.__code__.co_varnames[:1]
    kind = "score_mod" if takes_score else "mask_mod"
    functions, operands = functions_and_operands("f", jnp.float32, *(user if k == kind else None for k in KINDS), (2, HEADS))
    function = functions[kind]
    tables = {name: operands[name] for name in function.table_names}
    dims = [(n, attention_launch.index_dims(AXES[n], x.shape, (2,), {})) for n, x in tables.items()]
    launch = SimpleNamespace(starts=triton_functions.starts_of(tables), dims=tuple(dims))
    words = np.asarray(triton_functions.words_of(tables)) if tables else np.zeros(1, np.int32)
    s = (3 * np.random.default_rng(1).standard_normal((64, 64))).astype(np.float32)
    constants = {"LAUNCH": launch, "PROGRAM": triton_functions.program_of(function)}
    constants |= {"TAKES": takes_score, "TRANSPOSED": is_transposed}
    result = [jax.ShapeDtypeStruct((64, 64), np.float32)]
    (actual,) = triton_kernels.run(on_tile, [words, s], result, programs=1, **constants)
    query, key = np.arange(64, dtype=np.int32)[:, None], np.arange(64, dtype=np.int32)[None]
    numbers = [jnp.full((1, 1), number, jnp.int32) for number in (1, 2)]
    arguments = [*([s] if takes_score else []), *numbers, query, key]
    wide = [table.reshape(1, 1, -1) for table in wide_tables(list(tables.values()))]
    expected = np.broadcast_to(np.asarray(function.on_arrays(wide, *map(jnp.asarray, arguments), axes=2)), s.shape)
    np.testing.assert_allclose(actual, expected.astype(np.float32), rtol=4e-6, atol=1e-6)


# Whole calls.


@pytest.mark.parametrize(("index", "name"), [*enumerate(VARIANTS)])
def test_a_variant_and_its_derivatives_equal_the_same_written_out(index, name):
    check_variant(name, Sizes(2, 37, 53, 2), key_heads=1 + index % 2, dtype=cases.DTYPES[index % 3])
    assert sorted(ran) == ["backward_keys", "backward_queries", "forward"]


@pytest.mark.parametrize(("index", "name"), [*enumerate(CALLS)])
def test_functions_together_with_other_arguments(index, name):
    check_call(name, cases.DTYPES[index % 3])
    assert sorted(ran) == ["backward_keys", "backward_queries", "forward"]


def test_examples_with_tables_of_their_own():
    given = {name: jnp.asarray(x) for name, x in values.arrays(batch=(3,), length=20, heads=2).items()}
    tables = jnp.asarray(RNG.standard_normal((3, 2)), jnp.float32)

    def loss(implementation, table, given):
        def score_mod(s, b, h, q, k):
            return s - table[h] * jnp.abs(q - k).astype(s.dtype)

        options = {"score_mod": score_mod, "mask_mod": lambda b, h, q, k: k <= q + b}
        out = jaxsoftmax.dot_product_attention(
            **given, **options, implementation=implementation, precision="highest" if implementation == "xla" else "high"
        )
        return jnp.sum(jnp.sin(out))

    actual, expected = (
        jax.jit(jax.vmap(jax.grad(functools.partial(loss, i), (0, 1))))(tables, given) for i in ("triton", "xla")
    )
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected)
    assert sorted(ran) == ["backward_keys", "backward_queries", "forward"]


def test_the_derivative_by_an_array_that_the_mask_alone_reads_is_0():
    given = {name: jnp.asarray(x) for name, x in values.arrays(batch=(), length=20, keys=20).items()}
    arrays = jnp.asarray(RNG.standard_normal(20), jnp.float32), jnp.ones(4)

    def loss(of_mask, of_scores, has_scores):
        score_mod = (lambda s, b, h, q, k: s * of_scores[h]) if has_scores else None
        return jnp.sum(forced(**given, score_mod=score_mod, mask_mod=lambda b, h, q, k: of_mask[q] >= of_mask[k])[0])

    for has_scores in (False, True):
        of_mask, of_scores = jax.jit(jax.grad(functools.partial(loss, has_scores=has_scores), (0, 1)))(*arrays)
        assert not of_mask.any()
        assert of_scores.any() == has_scores
    assert [kernel for kernel in ran if kernel != "forward"] == ["backward_keys"]  # only the second call needs a kernel


def test_a_block_mask_hides_what_its_function_hides():
    """Blocks of the mask are larger than those of kernels, and may show more."""
    given = {name: jnp.asarray(x) for name, x in values.arrays(length=70, keys=150, heads=2).items()}
    ids = jnp.asarray(np.repeat(np.arange(3, dtype=np.int32), 50))

    def mask_mod(batch, head, query, key):
        return (ids[query] == ids[key]) & ((batch == 0) | (key % 3 > 0))

    mask = jaxsoftmax.block_mask(mask_mod, 70, 150, batch=2)
    dout = np.random.default_rng(0).standard_normal(given["query"].shape).astype(np.float32)
    run = jax.jit(lambda given, mask: pulled(functools.partial(forced, mask_mod=mask), given, dout))
    actual, expected = (run(given, each) for each in (mask, jax.tree_util.Partial(mask_mod)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def test_keys_in_pages():
    rng = np.random.default_rng(0)
    query, pages = (rng.standard_normal(shape).astype(np.float32) for shape in ((2, 3, 4, 16), (5, 8, 2, 16)))
    given = query, pages, pages, np.array([[3, 0, 9, 1], [2, 2, -1, 4]]), np.array([29, 7])
    attend = functools.partial(jaxsoftmax.cache.paged_attention, score_mod=alibi, mask_mod=causal)
    actual = jax.jit(functools.partial(attend, implementation="triton"))(*given)
    np.testing.assert_allclose(actual, attend(*given, implementation="xla"), rtol=1e-4, atol=1e-4)
    assert ran == ["forward"]


def test_what_is_not_seen_may_hold_nan():
    given = {name: np.array(x) for name, x in values.arrays(length=37, dtype="bfloat16").items()}

    def is_hidden(b, h, q, k):
        return (q < 30) & ((k < 20) | (k > 50))

    f = jax.jit(lambda given, dout: pulled(functools.partial(forced, score_mod=alibi, mask_mod=is_hidden), given, dout))
    dout = np.random.default_rng(0).standard_normal(given["query"].shape).astype(jnp.bfloat16)
    expected = f(given, dout)
    given["query"][:, 30:] = given["key"][:, 20:51] = given["value"][:, 20:51] = dout[:, 30:] = np.nan
    actual = f(given, dout)
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert all(np.isfinite(x.astype(np.float32)).all() for x in actual)


def pulled(f, given, dout):
    (out, _), pull = jax.vjp(lambda given: f(**given), given)
    (found,) = pull((dout, np.zeros(given["query"].shape[:1] + given["query"].shape[2:0:-1], np.float32).swapaxes(1, 2)))
    return [out, *found.values()]


def test_blocks_that_a_mask_function_hides_are_not_visited(monkeypatch):
    """Whole blocks run no mask function."""
    visited, masked = [], []
    push, hidden = kernels_of_attention._push, kernels_of_attention._hidden
    monkeypatch.setattr(kernels_of_attention, "_push", lambda *args: [visited.append(1), push(*args)][1])
    monkeypatch.setattr(kernels_of_attention, "_hidden", lambda *args: [masked.append(1), hidden(*args)][1])
    monkeypatch.setattr(attention_launch, "tiling_for", lambda *args: attention_launch.AttentionTiling(16, 16, 4, 1))
    ids = jnp.asarray(np.repeat(np.arange(4, dtype=np.int32), 16))
    given = values.arrays(batch=(1,), length=64, keys=64, heads=1, key_heads=1)
    for mask_mod, n_visited, n_masked in (
        (lambda b, h, q, k: (q >= k) & (h > -1), 1 + 2 + 3 + 4, 4),
        (lambda b, h, q, k: ids[q] == ids[k], 4, 0),
        (lambda b, h, q, k: (q // 16 >= k // 16) & (b < 9), 1 + 2 + 3 + 4, 0),
        (lambda b, h, q, k: (k >= 48) | (k == q), 4 + 3 + 2 + 1, 1 + 2 + 3),
    ):
        visited.clear(), masked.clear()
        jax.block_until_ready(jax.jit(lambda mask_mod=mask_mod: forced(**given, mask_mod=mask_mod))())
        assert (len(visited), len(masked)) == (n_visited, n_masked)
