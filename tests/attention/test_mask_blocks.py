"""The blocks that mask functions leave empty, in part or whole, against all of their pairs."""

import re
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, note, settings
from hypothesis import strategies as st
from jax import lax

import jaxsoftmax
from jaxsoftmax.ops.attention import key_blocks, mask_blocks, xla
from jaxsoftmax.ops.attention.mask_blocks import EMPTY, FULL, PARTIAL
from jaxsoftmax.ops.attention.score_functions import functions_and_operands, wide_tables

from ..support import xla_cuda

BATCH, HEADS = 2, 3
RNG = np.random.default_rng(0)


def traced(mask):
    """Returns a traced mask function and its operands."""
    functions, operands = functions_and_operands("test", jnp.float32, None, mask, (BATCH, HEADS))
    return functions["mask_mod"], operands


def pairs(function, operands, lengths):
    """Returns what a mask function shows, `[batch, heads, queries, keys]`."""
    tables = [wide_tables([operands[name]])[0][..., None, None, :] for name in function.table_names]
    ones = jnp.zeros((1, 1, 1, 1), jnp.int32)
    rows, cols = (jnp.arange(n, dtype=jnp.int32) for n in lengths)
    rows, cols = rows[None, None, :, None], cols[None, None, None]
    if "query_offset" in operands:
        rows += operands["query_offset"][:, None, None, None]
    if "query_numbers" in operands:
        rows, cols = operands["query_numbers"][:, None, :, None], operands["key_numbers"][:, None, None]
    entries = operands["entries"][:, None, None, None] if "entries" in operands else ones
    heads = operands["head_numbers"][..., None, None] if "head_numbers" in operands else ones
    seen = function.on_arrays(tables, entries, heads, rows, cols, axes=4)
    return np.broadcast_to(seen, (BATCH, HEADS, *lengths))


def kinds(seen, blocks):
    """Returns the kinds of the blocks of pairs, `[..., query_blocks, key_blocks]`."""
    *_, queries, keys = seen.shape
    parts = [
        [seen[..., i : i + blocks[0], j : j + blocks[1]] for j in range(0, keys, blocks[1])]
        for i in range(0, queries, blocks[0])
    ]
    some, every = (np.array([[test(x, (-1, -2)) for x in row] for row in parts]) for test in (np.any, np.all))
    return np.moveaxis(some.astype(np.int8) + every, (0, 1), (-2, -1))


def spans(kinds):
    """Returns the spans of blocks of these kinds, as `key_blocks.find_segment_spans` does."""
    result = np.zeros((*kinds.shape[:-1], 4), np.int32)
    for at in np.ndindex(kinds.shape[:-1]):
        seen, whole, n = np.flatnonzero(kinds[at] != EMPTY), np.flatnonzero(kinds[at] == FULL), kinds.shape[-1]
        result[at][:2] = (seen[0], seen[-1] + 1) if len(seen) else (n, 0)
        first = whole[0] if len(whole) else n
        others = [i for i in range(first + 1, n) if kinds[at][i] != FULL]
        result[at][2:] = first, others[0] if others else n
    return result


def of_all_heads(kinds):
    """Returns the kinds of blocks for all heads together, `[batch, query_blocks, key_blocks]`."""
    return np.where((kinds == FULL).all(1), FULL, np.where((kinds == EMPTY).all(1), EMPTY, PARTIAL)).astype(np.int8)


def find_spans(function, operands, lengths, blocks, **options):
    operands = operands | {"query": jax.ShapeDtypeStruct((BATCH, lengths[0], HEADS, 8), jnp.float32)}
    return np.asarray(mask_blocks.find_block_spans(function, operands, lengths, *blocks, **options))


# What a mask of positions shows is known exactly.

POSITIONS = {
    "everything": lambda b, h, q, k: q >= 0,
    "nothing": lambda b, h, q, k: q < 0,
    "causal": lambda b, h, q, k: q >= k,
    "strictly causal": lambda b, h, q, k: k < q,
    "from the end": lambda b, h, q, k: q + 13 >= k,
    "window": lambda b, h, q, k: jnp.abs(q - k) < 20,
    "two sides": lambda b, h, q, k: (q - k <= 30) & (k - q <= 9),
    "prefix": lambda b, h, q, k: (q >= k) | (k < 21),
    "dilated": lambda b, h, q, k: (q - k) % 24 == 0,
    "dilated by a shift": lambda b, h, q, k: ((k - q) & 15) == 0,
    "blocks": lambda b, h, q, k: q // 24 == k // 24,
    "blocks by a shift": lambda b, h, q, k: q >> 5 == k >> 5,
    "causal blocks": lambda b, h, q, k: q // 24 >= k // 24,
    "distance in blocks": lambda b, h, q, k: (q - k) // 16 == 1,
    "sinks": lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < 17)),
    "clamped": lambda b, h, q, k: jnp.clip(q, 10, 50) >= k,
    "clamped distance": lambda b, h, q, k: jnp.clip(q - k, -8, 8) > -8,
    "where": lambda b, h, q, k: jnp.where(q < 32, k < 32, q >= k),
    "not": lambda b, h, q, k: ~(q >= k) ^ (k < 8),
    "a column": lambda b, h, q, k: k == 40,
    "a row": lambda b, h, q, k: q == 33,
    "unsigned": lambda b, h, q, k: q.astype(jnp.uint32) >= k.astype(jnp.uint32),
    "around": lambda b, h, q, k: (q - k).astype(jnp.uint32) < 20,
    "a power": lambda b, h, q, k: (q - k) ** 2 <= 100,
    "floats": lambda b, h, q, k: q.astype(jnp.float32) >= k.astype(jnp.float32),
    "a multiple": lambda b, h, q, k: 2 * q + 5 >= 3 * k,
    "a multiple over a number": lambda b, h, q, k: (2 * q + k) // 48 == 0,
    "large numbers": lambda b, h, q, k: q * 2**20 + 2**30 > k,
}
GRIDS = [
    ((70, 90), (16, 32)),
    ((96, 96), (16, 16)),
    ((90, 70), (32, 8)),
    ((1, 80), (16, 16)),
    ((80, 1), (16, 16)),
    ((5, 6), (8, 8)),
]


@pytest.mark.parametrize(("lengths", "blocks"), GRIDS)
@pytest.mark.parametrize("name", POSITIONS)
def test_masks_of_positions_are_known_exactly(name, lengths, blocks):
    function, operands = traced(POSITIONS[name])
    expected = kinds(pairs(function, operands, lengths), blocks)[0, 0]
    result = mask_blocks.classify(function, lengths, *blocks)
    assert result.dtype == np.int8
    np.testing.assert_array_equal(result, expected)
    counts = mask_blocks.counts(function, lengths, *blocks)
    if (expected == EMPTY).any():
        np.testing.assert_array_equal(counts, (expected != EMPTY).sum(1))
        by_keys = mask_blocks.counts(function, lengths, *blocks, by_keys=True)
        np.testing.assert_array_equal(by_keys, (expected != EMPTY).sum(0))
    else:
        assert counts is None
    for by_keys in (False, True):
        result = find_spans(function, operands, lengths, blocks, by_keys=by_keys)
        np.testing.assert_array_equal(result, spans(expected.T if by_keys else expected)[None])


# No mask counts as empty or whole where it is not. Random masks are made of the arguments and a few tables.


@st.composite
def masks(draw, with_tables=True):
    """Draws a mask function."""
    tables = {
        "numbers": jnp.asarray(np.sort(np.random.default_rng(0).integers(0, 6, 200)), jnp.int32),
        "distances": jnp.asarray(np.arange(64) // 7, jnp.int8),
        "of heads": jnp.asarray([3, 17, 40], jnp.int32),
        "of entries": jnp.asarray([25, 60], jnp.int32),
        "floats": jnp.asarray(np.linspace(-3, 40, 150), jnp.bfloat16),
        "of blocks": jnp.asarray(np.tri(16, 16, dtype=np.int32)),
    }
    numbers = st.integers(-40, 40) | st.sampled_from([2**15, 2**30, 2**31 - 1, -(2**31)])

    def integer(depth):
        kind = draw(st.integers(0, 13 if depth else 2))
        if kind == 0:
            return draw(st.sampled_from([lambda b, h, q, k: q, lambda b, h, q, k: k, lambda b, h, q, k: q - k]))
        if kind == 1:
            number = draw(numbers)
            return lambda b, h, q, k: jnp.int32(number)
        if kind == 2:
            return draw(st.sampled_from([lambda b, h, q, k: b, lambda b, h, q, k: h])) if with_tables else integer(0)
        x, number = integer(depth - 1), draw(st.integers(1, 40))
        if kind == 3:
            return lambda *args: x(*args) // jnp.int32(number)
        if kind == 4:
            return lambda *args: x(*args) % jnp.int32(number)
        if kind == 5:
            return lambda *args: lax.rem(x(*args), jnp.int32(-number))
        if kind == 6:
            return lambda *args: draw_function(x(*args))
        if kind == 7:
            return lambda *args: x(*args) >> jnp.int32(number % 7)
        if kind == 8 and with_tables:
            name = draw(st.sampled_from(["numbers", "distances", "of heads", "of entries"]))
            return lambda *args: tables[name][x(*args)].astype(jnp.int32)
        y = integer(depth - 1)
        if kind == 9 and with_tables:
            return lambda *args: tables["of blocks"][x(*args) // 8, y(*args) // 8]
        operation = draw(st.sampled_from([jnp.add, jnp.subtract, jnp.multiply, jnp.minimum, jnp.maximum, jnp.bitwise_and]))
        if kind == 10:
            test = boolean(depth - 1)
            return lambda *args: jnp.where(test(*args), x(*args), y(*args))
        return lambda *args: operation(x(*args), y(*args))

    draw_function = draw(st.sampled_from([jnp.abs, jnp.negative, jnp.sign, jnp.square, jnp.invert]))

    def boolean(depth):
        kind = draw(st.integers(0, 9))
        if kind < 4 and depth:
            x, y = boolean(depth - 1), boolean(depth - 1)
            operation = [jnp.logical_and, jnp.logical_or, jnp.logical_xor, lambda x, y: ~x & y][kind]
            return lambda *args: operation(x(*args), y(*args))
        compare = draw(st.sampled_from([jnp.less, jnp.less_equal, jnp.greater, jnp.greater_equal, jnp.equal, jnp.not_equal]))
        x, y = integer(depth), integer(depth)
        if kind == 4:
            factor = draw(st.sampled_from([0.5, -1.5, 3.0]))
            return lambda *args: compare(x(*args).astype(jnp.float32) * factor, y(*args).astype(jnp.float32))
        if kind == 5 and with_tables:
            return lambda *args: compare(tables["floats"][x(*args)], y(*args).astype(jnp.bfloat16))
        return lambda *args: compare(x(*args), y(*args))

    return boolean(2)


# Masks that are windows.


def shown_by(window, lengths):
    """Returns what a window shows."""
    distances = np.arange(lengths[0])[:, None] - np.arange(lengths[1])
    return (distances <= window[0]) & (-distances <= window[1])


WINDOWS = {
    "causal": (95, 0),
    "window": (19, 19),
    "two sides": (30, 9),
    "a power": (10, 10),
    "clamped distance": (95, 7),
    "around": (19, 0),
    "from the end": (95, 13),
}


@pytest.mark.parametrize("name", POSITIONS)
def test_masks_that_are_windows(name):
    function, _ = traced(POSITIONS[name])
    assert mask_blocks.find_window(function, (96, 96)) == WINDOWS.get(name)


@pytest.mark.parametrize("sequence", [(70, 90), (90, 70), (1, 80), (80, 1)])
@pytest.mark.parametrize("name", WINDOWS)
def test_windows_of_sequences_of_two_lengths(name, sequence):
    function, operands = traced(POSITIONS[name])
    window = mask_blocks.find_window(function, sequence)
    np.testing.assert_array_equal(shown_by(window, sequence), pairs(function, operands, sequence)[0, 0])


NO_WINDOWS = {
    "around the end": lambda b, h, q, k: q + (2**31 - 1) >= k,
    "around the end by steps": lambda b, h, q, k: q + 2**30 + 2**30 >= k,
    "twice": lambda b, h, q, k: q + q >= k + k,
    "behind": lambda b, h, q, k: q - k > 5,
    "a head": lambda b, h, q, k: (q >= k) | (h == 1),
    "of bytes": lambda b, h, q, k: q.astype(jnp.int8) >= k.astype(jnp.int8),
    "a table": lambda b, h, q, k: jnp.asarray([True, False])[q - k],
    "floats of a distance": lambda b, h, q, k: (q - k).astype(jnp.float32) / 3 < 4,
}


@pytest.mark.parametrize("name", NO_WINDOWS)
def test_masks_that_are_not_known_to_be_windows(name):
    function, _ = traced(NO_WINDOWS[name])
    assert mask_blocks.find_window(function, (96, 96)) is None


@settings(max_examples=60, deadline=None)
@given(masks(with_tables=False), st.sampled_from(GRIDS))
def test_no_mask_is_taken_for_another_window(mask, grid):
    lengths, _ = grid
    function, operands = traced(mask)
    note(function.text)
    window = mask_blocks.find_window(function, lengths)
    if window is not None:
        np.testing.assert_array_equal(shown_by(window, lengths), pairs(function, operands, lengths)[0, 0])


def test_a_mask_that_is_a_window_runs_as_one():
    query = jax.ShapeDtypeStruct((2, 96, 3, 64), jnp.bfloat16)

    def lowered(**options):
        attend = jax.jit(lambda *operands: jaxsoftmax.dot_product_attention(*operands, **options))
        return attend.lower(query, query, query).as_text()

    assert lowered(mask_mod=POSITIONS["causal"]) == lowered(is_causal=True)
    both = lowered(mask_mod=POSITIONS["two sides"], is_causal=True, local_window_size=(50, 20))
    assert both == lowered(local_window_size=(30, 0))
    assert lowered(mask_mod=POSITIONS["causal"], query_offset=3) != lowered(is_causal=True, query_offset=3)


@settings(max_examples=30, deadline=None)
@given(masks(with_tables=False), st.sampled_from(GRIDS))
def test_masks_of_positions_are_never_wrong(mask, grid):
    lengths, blocks = grid
    function, operands = traced(mask)
    note(function.text)
    expected = kinds(pairs(function, operands, lengths), blocks)[0, 0]
    result = mask_blocks.classify(function, lengths, *blocks)
    np.testing.assert_array_equal(result[result != PARTIAL], expected[result != PARTIAL])


@settings(max_examples=8, deadline=None)
@given(masks(), st.sampled_from(GRIDS), st.sampled_from(["", "offset", "numbers"]), st.booleans())
def test_masks_of_tables_are_never_wrong(mask, grid, positions, by_keys):
    lengths, blocks = grid
    function, operands = traced(mask)
    note(function.text)
    if positions == "offset":
        operands["query_offset"] = jnp.asarray([7, 40], jnp.int32)
    if positions == "numbers":
        draws = np.random.default_rng(1)
        for name, length in zip(("query_numbers", "key_numbers"), lengths, strict=True):
            operands[name] = jnp.asarray(np.sort(draws.integers(0, 150, (BATCH, length)), -1), jnp.int32)
    every = kinds(pairs(function, operands, lengths), blocks)
    assume(len(np.unique(every)) > 1)
    expected = of_all_heads(every)
    known = mask_blocks.classify(function, lengths, *blocks, has_offset=positions != "")
    assert np.all((known == PARTIAL) | (known == expected))
    expected = expected.mT if by_keys else expected
    result = find_spans(function, operands, lengths, blocks, by_keys=by_keys)
    result = np.broadcast_to(result, (*expected.shape[:-1], 4))
    start, stop, first, last = (result[..., i : i + 1] for i in range(4))
    index = np.arange(expected.shape[-1])
    assert np.all((expected == EMPTY)[(index < start) | (index >= stop)])
    assert np.all((expected == FULL)[(index >= first) & (index < last)])


# What tables and operands hide is known exactly where it follows from intervals.

DOCUMENTS = np.stack([np.repeat(np.arange(5), [10, 30, 3, 40, 13]), np.repeat(np.arange(3), [32, 32, 32])])


@pytest.mark.parametrize("by_keys", [False, True])
def test_documents_are_segments(by_keys):
    ids = jnp.asarray(DOCUMENTS, jnp.int32)
    function, operands = traced(lambda b, h, q, k: ids[b, q] == ids[b, k])
    result = find_spans(function, operands, (96, 96), (16, 32), by_keys=by_keys)
    expected = key_blocks.find_segment_spans(ids, ids, *((32, 16) if by_keys else (16, 32)))
    np.testing.assert_array_equal(result, expected)


def test_spans_of_documents_are_three_programs():
    """XLA has the extremes of the ids, the spans, and their signs: loads from the table are part of the first."""
    xla_cuda.skip_unless_it_compiles()
    ids = jnp.zeros((BATCH, 4096), jnp.int32)
    function, operands = traced(lambda b, h, q, k: ids[b, q] == ids[b, k])
    names = list(operands)

    def run(*arrays):
        query = jax.ShapeDtypeStruct((BATCH, 4096, HEADS, 64), jnp.bfloat16)
        operands = dict(zip(names, arrays, strict=True)) | {"query": query}
        return mask_blocks.find_block_spans(function, operands, (4096, 4096), 128, 128)

    text = xla_cuda.compiled(run, *map(jax.typeof, operands.values()))
    assert len(re.findall(r" (?:fusion|gather|reduce|copy|concatenate)\(", text[text.index("ENTRY") :])) == 3


TABLES = {
    "causal documents": lambda b, h, q, k: (jnp.asarray(DOCUMENTS)[b, q] == jnp.asarray(DOCUMENTS)[b, k]) & (q >= k),
    "lengths": lambda b, h, q, k: k < jnp.array([33, 50], jnp.int32)[b],
    "windows of heads": lambda b, h, q, k: q - k < jnp.array([5, 20, 30], jnp.int32)[h],
    "powers of heads": lambda b, h, q, k: q - k < 2 ** (h + 1),
    "distances": lambda b, h, q, k: jnp.asarray(np.arange(96) < 40)[jnp.abs(q - k)],
    "blocks": lambda b, h, q, k: jnp.asarray(np.eye(6, dtype=bool))[q // 16, k // 16],
    "heads and blocks": lambda b, h, q, k: jnp.asarray(RNG.random((HEADS, 6, 6)) < 0.4)[h, q // 16, k // 16],
    "entries and blocks": lambda b, h, q, k: jnp.asarray(RNG.random((BATCH, 6, 6)) < 0.4)[b, q // 16, k // 16],
    "small blocks": lambda b, h, q, k: jnp.asarray(np.tri(12, dtype=bool))[q // 8, k // 8],
    "other tokens": lambda b, h, q, k: jnp.asarray(DOCUMENTS)[b, jnp.minimum(q + 20, 95)] == jnp.asarray(DOCUMENTS)[b, 95 - k],
    "flags": lambda b, h, q, k: jnp.asarray(np.arange(96) // 20 % 2 == 0)[k],
    "nothing that varies": lambda b, h, q, k: (jnp.asarray(DOCUMENTS)[b, q] >= 0) & (q >= k),
}


# Which elements of a table a block selects behind an offset is not known while tracing.
KNOWN = [(name, None) for name in TABLES]
KNOWN += [(name, offset) for name in TABLES if not name.endswith("blocks") for offset in ([0, 5], [20, 16])]


@pytest.mark.parametrize(("name", "offset"), KNOWN)
def test_masks_of_tables_are_known_exactly(name, offset):
    lengths, blocks = (70, 96), (16, 16)
    function, operands = traced(TABLES[name])
    if offset is not None:
        operands["query_offset"] = jnp.asarray(offset, jnp.int32)
    expected = of_all_heads(kinds(pairs(function, operands, lengths), blocks))
    for by_keys in (False, True):
        result = find_spans(function, operands, lengths, blocks, by_keys=by_keys)
        wanted = spans(expected.mT if by_keys else expected)
        np.testing.assert_array_equal(np.broadcast_to(result, wanted.shape), wanted)


@pytest.mark.parametrize("name", ["causal documents", "windows of heads", "lengths"])
def test_batches_have_several_axes(name):
    function, operands = traced(TABLES[name])
    expected = find_spans(function, operands, (96, 96), (16, 16))
    operands = {name: x[None] for name, x in operands.items()}
    operands["query"] = jax.ShapeDtypeStruct((1, BATCH, 96, HEADS, 8), jnp.float32)
    result = mask_blocks.find_block_spans(function, operands, (96, 96), 16, 16)
    np.testing.assert_array_equal(result, expected[None])


@pytest.mark.parametrize("name", ["causal documents", "distances"])
def test_examples_of_a_map_have_their_own_tables(name):
    function, operands = traced(TABLES[name])
    table = function.table_names[0]
    other = jnp.roll(operands[table], 11, -1)
    both = operands | {table: jnp.concatenate([operands[table], other])}
    results = [find_spans(function, operands | {table: x}, (96, 96), (16, 16)) for x in (operands[table], other)]
    expected = np.stack([np.broadcast_to(x, (BATCH, 6, 4))[i] for i, x in enumerate(results)])
    np.testing.assert_array_equal(find_spans(function, both, (96, 96), (16, 16)), expected)


def test_tables_leave_what_positions_hide():
    function, _ = traced(TABLES["causal documents"])
    causal, _ = traced(POSITIONS["causal"])
    result, whole = (mask_blocks.classify(f, (96, 96), 16, 16) for f in (function, causal))
    np.testing.assert_array_equal(result, np.minimum(whole, PARTIAL))
    np.testing.assert_array_equal(mask_blocks.counts(function, (96, 96), 16, 16), np.arange(1, 7))
    assert mask_blocks.counts(function, (96, 96), 16, 16, has_offset=True) is None


def test_many_blocks_are_joined(monkeypatch):
    lengths, blocks = (90, 83), (4, 8)
    function, operands = traced(POSITIONS["window"])
    expected = kinds(pairs(function, operands, lengths), blocks)[0, 0]
    monkeypatch.setattr(mask_blocks, "LARGEST_GRID", 40)
    for by_keys in (False, True):
        of_rows = expected.T if by_keys else expected
        result = find_spans(function, operands, lengths, blocks, by_keys=by_keys)[0]
        counts = mask_blocks.counts(function, lengths, *blocks, by_keys=by_keys)
        assert (result.shape, counts.shape) == ((*of_rows.shape[:1], 4), of_rows.shape[:1])
        index = np.arange(of_rows.shape[1])
        within = (index >= result[:, :1]) & (index < result[:, 1:2])
        assert np.all(within[of_rows != EMPTY])
        assert not within.all()
        assert np.all(((of_rows != EMPTY).sum(1) <= counts) & (counts <= of_rows.shape[1]))
        assert np.all(of_rows[(index >= result[:, 2:3]) & (index < result[:, 3:])] == FULL)


@pytest.mark.parametrize("name", ["sinks", "dilated", "where"])
def test_long_sequences_take_little_time(name):
    def run(block):
        function, _ = traced(POSITIONS[name])
        start = time.perf_counter()
        mask_blocks.classify(function, (16384, 16384), block, 128)
        return time.perf_counter() - start

    assert min(run(block) for block in (128, 112, 96)) < 0.05


def test_masks_of_positions_are_constants():
    function, operands = traced(POSITIONS["sinks"])
    query = jax.ShapeDtypeStruct((BATCH, 96, HEADS, 8), jnp.float32)
    run = jax.jit(lambda: mask_blocks.find_block_spans(function, {"query": query}, (96, 96), 16, 16))
    assert not operands
    assert "compare" not in run.lower().as_text()


@pytest.mark.parametrize("lengths", [(0, 40), (40, 0)])
def test_no_queries_or_keys_have_no_blocks(lengths):
    function, _ = traced(POSITIONS["causal"])
    assert mask_blocks.classify(function, lengths, 16, 16).size == 0


# The reference leaves out tiles that are empty.


@pytest.mark.parametrize("name", ["sinks", "blocks", "nothing", "prefix"])
def test_reference_leaves_out_tiles(name, monkeypatch):
    monkeypatch.setattr(xla, "ONE_TILE", 0)
    monkeypatch.setattr(xla, "BLOCK", (16, 8))
    draws = np.random.default_rng(0)
    query, key, value = (jnp.asarray(draws.normal(size=(BATCH, 40, HEADS, 4)), jnp.float32) for _ in range(3))
    tiles = []
    visible = xla._TiledAttention._visible
    monkeypatch.setattr(xla._TiledAttention, "_visible", lambda self, block: tiles.append(visible(self, block)) or tiles[-1])

    def loss(mask, **options):
        def run(*operands):
            out = jaxsoftmax.dot_product_attention(*operands, implementation="xla", **options, **mask)
            return jnp.sum(out * value), out

        return jax.value_and_grad(run, (0, 1, 2), has_aux=True)(query, key, value)

    result = loss({"mask_mod": POSITIONS[name]})
    function, operands = traced(POSITIONS[name])
    seen = pairs(function, operands, (40, 40))
    np.testing.assert_array_equal(tiles[-1], kinds(seen, (16, 8))[0, 0] != EMPTY)
    assert not tiles[-1].all()
    expected = loss({"mask": jnp.asarray(seen)})
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), result, expected)
