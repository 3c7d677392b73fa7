"""Triton kernels of attention: forward, and two for its derivatives.

    forward           a block of queries:  S = Q K'   o, m, d <- the state with exp(S - m) and V   out = o / d, lse
    backward_keys     a block of keys:     P' = exp(K Q' - lse)   dS' = P' (V dO' - delta)   dV += P' dO   dK += dS' Q
    backward_queries  a block of queries:  P and dS again, dQ += dS K, and the bias's derivative is dS

A program has one block of a head of a batch entry, and visits the blocks of the other side that it sees: first those that all
of its rows see whole, which need no mask, then the rest. Two kernels for the derivatives make seven products where one would
make five, but a program adds up its own results, so they have the same bits run after run. Only the derivative of a bias that
is broadcast is added to global memory, in any order. Forward reads Q once, and K and V once for each block of queries; the
other two read the other side once for each block. A head takes `4 T S H`, `8 T S H` and `6 T S H` operations.

Source: Dao 2023, arXiv:2307.08691.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jaxsoftmax._triton import attention_functions, functions, online

INF = online.INF
PRECISION = tl.constexpr("tf32x3")  # products of float32 are made of three of TF32; those of 16 bits are exact


def _name(kernel):
    """Returns the name of a compiled kernel, which profiles show."""
    return f"attention_{kernel.constants['LAUNCH'].kernel}_triton"


class AttentionPointers(NamedTuple):
    """Pointers to operands, whole ones or those of a head of a batch entry. Pointers of absent operands are never read."""

    query: Any
    key: Any
    value: Any
    bias: Any
    mask: Any
    query_lengths: Any
    key_lengths: Any
    query_offset: Any
    query_segments: Any
    key_segments: Any
    seeds: Any
    d_out: Any
    lse: Any
    delta: Any
    words: Any  # what score and mask functions read, see `attention_program`: whole
    place: Any  # a `FunctionPlace`, or None for whole operands


class FunctionPlace(NamedTuple):
    """The batch entry and the head for which a score or mask function runs."""

    b: Any  # batch entry
    entry: Any  # number of the batch entry, as the function gets it
    head: Any  # number of the head, as the function gets it


class VisitedBlocks(NamedTuple):
    """The blocks of the other side that a program visits, and the ones among them that all of its rows see whole."""

    low: Any
    high: Any  # behind the last one
    whole_low: Any
    whole_high: Any


class VisibleRows(NamedTuple):
    """The rows of both sides that a program may see."""

    queries: Any  # their number
    keys: Any
    end: Any  # row of the other side from which on no row of the program sees anything
    offset: Any  # position of the first query
    shift: Any  # number to add to rows of the program to compare them with rows of the other side


class ProgramBlock(NamedTuple):
    """The block of a program: pointers of its head, numbers of its rows, and what they may see."""

    at: Any
    lines: Any
    visible: Any


class QueryTiles(NamedTuple):
    """Tiles of a block of queries, and numbers of its rows, from which the derivatives follow."""

    q: Any
    d_o: Any
    lse: Any
    delta: Any


# Where operands are.


@triton.constexpr_function
def _dims(launch, name):
    """Returns the places of an operand by batch entry, head, row and column, see `functions.offset`; None if it is absent."""
    return dict(launch.dims).get(name)


@triton.constexpr_function
def _word(launch, name):
    """Returns the first word of an operand that functions read; None if it is absent."""
    return dict(launch.starts).get(name)


@triton.constexpr_function
def _size(launch, name):
    """Returns the head size of an operand."""
    return launch.sizes.value_size if name in ("value", "out", "d_out", "d_value") else launch.sizes.size


@triton.constexpr_function
def _width(launch, name):
    """Returns the head size of tiles of an operand."""
    return launch.sizes.value_width if name in ("value", "out", "d_out", "d_value") else launch.sizes.width


@triton.jit
def _start(pointer, NAME: tl.constexpr, b, head, LAUNCH: tl.constexpr):
    """Returns the pointer to the part of an operand that belongs to a head of a batch entry."""
    if _dims(LAUNCH, NAME) is None:
        return pointer
    else:
        return pointer + (functions.offset(b, _dims(LAUNCH, NAME), 0) + functions.offset(head, _dims(LAUNCH, NAME), 1))


@triton.jit
def _of_head(whole, b, head, LAUNCH: tl.constexpr):
    """Returns the pointers to the operands of a query head of a batch entry."""
    key_head = head // LAUNCH.sizes.groups
    return AttentionPointers(
        _start(whole.query, "query", b, head, LAUNCH),
        _start(whole.key, "key", b, key_head, LAUNCH),
        _start(whole.value, "value", b, key_head, LAUNCH),
        _start(whole.bias, "bias", b, head, LAUNCH),
        _start(whole.mask, "mask", b, head, LAUNCH),
        _start(whole.query_lengths, "query_lengths", b, head, LAUNCH),
        _start(whole.key_lengths, "key_lengths", b, head, LAUNCH),
        _start(whole.query_offset, "query_offset", b, head, LAUNCH),
        _start(whole.query_segments, "query_segments", b, head, LAUNCH),
        _start(whole.key_segments, "key_segments", b, head, LAUNCH),
        _start(whole.seeds, "seeds", b, head, LAUNCH),
        _start(whole.d_out, "d_out", b, head, LAUNCH),
        _start(whole.lse, "lse", b, head, LAUNCH),
        _start(whole.delta, "delta", b, head, LAUNCH),
        whole.words,
        FunctionPlace(
            b,
            _number("entries", whole.words, b, head, 0, LAUNCH),
            _number("head_numbers", whole.words, b, head, head, LAUNCH),
        ),
    )


@triton.jit
def _number(NAME: tl.constexpr, words, b, head, absent, LAUNCH: tl.constexpr):
    """Returns the number of a batch entry or head that is among the words, or `absent` if it is not."""
    if _word(LAUNCH, NAME) is None:
        return (head * 0 + absent).to(tl.int32)
    else:
        index = functions.offset(head, _dims(LAUNCH, NAME), 1)
        return attention_functions.load_word(words, b, index, _word(LAUNCH, NAME), _dims(LAUNCH, NAME), tl.int32)


@triton.jit
def _program(LAUNCH: tl.constexpr):
    """Returns the batch entry, head and block of a program.

    Programs with neighbouring numbers run at the same time: the blocks of a few heads, which read the same keys from the L2
    cache. Blocks that take longest start first.
    """
    at_once: tl.constexpr = LAUNCH.blocks * LAUNCH.heads_at_once
    several, place = tl.program_id(0) // at_once, tl.program_id(0) % at_once
    heads = tl.minimum(LAUNCH.pairs - several * LAUNCH.heads_at_once, LAUNCH.heads_at_once)
    block, pair = place // heads, (several * LAUNCH.heads_at_once + place % heads).to(tl.int64)
    if LAUNCH.after is not None:
        block = LAUNCH.blocks - 1 - block
    return pair // LAUNCH.own_heads, pair % LAUNCH.own_heads, block


@triton.jit
def _visible(at, block, LAUNCH: tl.constexpr):
    """Returns the rows that a block of queries, or of keys, may see."""
    queries, keys = block * 0 + LAUNCH.sizes.queries, block * 0 + LAUNCH.sizes.keys
    if _dims(LAUNCH, "query_lengths") is not None:
        queries = tl.minimum(queries, tl.load(at.query_lengths))
    if _dims(LAUNCH, "key_lengths") is not None:
        keys = tl.minimum(keys, tl.load(at.key_lengths))
    offset = block * 0
    if _dims(LAUNCH, "query_offset") is not None:
        offset += tl.load(at.query_offset)
    if LAUNCH.by_keys:
        n_rows, end, shift = keys, queries, -offset
    else:
        n_rows, end, shift = queries, keys, offset
    if LAUNCH.after is not None:
        end = tl.minimum(end, tl.maximum(tl.minimum((block + 1) * LAUNCH.own_block, n_rows) + shift + LAUNCH.after, 0))
    return VisibleRows(queries, keys, end, offset, shift)


@triton.jit
def _visited(spans, b, block, visible, LAUNCH: tl.constexpr):
    """Returns the blocks that a block visits: a row sees `before` positions before its own, and `after` behind it.

    What segments and masks leave to visit is a table, `spans`, of the first and last block, and of those that are seen whole.
    """
    n_rows, n_other = visible.queries, visible.keys
    if LAUNCH.by_keys:
        n_rows, n_other = n_other, n_rows
    OWN: tl.constexpr = LAUNCH.own_block
    OTHER: tl.constexpr = LAUNCH.other_block
    first = block * OWN
    low, high, whole_low, whole_high = first * 0, (visible.end + OTHER - 1) // OTHER, first * 0, n_other // OTHER
    position = first + visible.shift
    if LAUNCH.before is not None:
        low = tl.maximum(position - LAUNCH.before, 0) // OTHER
        whole_low = (tl.maximum(position + (OWN - 1) - LAUNCH.before, 0) + (OTHER - 1)) // OTHER
    if LAUNCH.after is not None:
        whole_high = tl.minimum(whole_high, tl.maximum(position + (LAUNCH.after + 1), 0) // OTHER)
    if LAUNCH.own_vary:
        high = tl.where(first < n_rows, high, 0)
        whole_high = tl.where(first + OWN <= n_rows, whole_high, 0)
    if _dims(LAUNCH, "spans") is not None:
        at = _start(spans, "spans", b, 0, LAUNCH) + functions.offset(block, _dims(LAUNCH, "spans"), 2)
        low, high = tl.maximum(low, tl.load(at)), tl.minimum(high, tl.load(at + 1))
        whole_low, whole_high = tl.maximum(whole_low, tl.load(at + 2)), tl.minimum(whole_high, tl.load(at + 3))
    high = tl.maximum(high, low)
    if LAUNCH.masks_one_block:
        # The compiler would make no loop of the one block, and ptxas then spills up to 64 KB (float16, heads of 128, 8.0). It
        # does not know that the grid has one axis.
        high += tl.program_id(1)
    if LAUNCH.some_whole:
        whole_low = tl.minimum(tl.maximum(whole_low, low), high)
        whole_high = tl.minimum(tl.maximum(whole_high, whole_low), high)
    else:
        whole_low, whole_high = low, low
    return VisitedBlocks(low, high, whole_low, whole_high)


@triton.jit
def _masked(i, visited):
    """Returns the `i`-th of the blocks that not all rows see whole."""
    block = visited.low + i
    return tl.where(block < visited.whole_low, block, block + (visited.whole_high - visited.whole_low))


@triton.jit
def _tile_at(pointer, NAME: tl.constexpr, first, ROWS: tl.constexpr, LAUNCH: tl.constexpr):
    """Computes the addresses of a tile. Only its start needs 64 bits, and the rest is the same for all tiles."""
    start = pointer + functions.offset(first.to(tl.int64), _dims(LAUNCH, NAME), 2)
    row, col = tl.arange(0, ROWS), tl.arange(0, _width(LAUNCH, NAME))
    return start + (functions.offset(row, _dims(LAUNCH, NAME), 2)[:, None] + col[None, :])


@triton.jit
def _load(pointer, NAME: tl.constexpr, first, ROWS: tl.constexpr, end, BOUNDED: tl.constexpr, LAUNCH: tl.constexpr):
    """Loads rows of an operand from the first on.

    Columns that pad the head size are 0, and with BOUNDED rows from `end` on: they may hold NaN, as no row of the program sees
    them.
    """
    at = _tile_at(pointer, NAME, first, ROWS, LAUNCH)
    row, col = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, _width(LAUNCH, NAME))[None, :]
    IS_PADDED: tl.constexpr = _size(LAUNCH, NAME) < _width(LAUNCH, NAME)
    if BOUNDED and IS_PADDED:
        return tl.load(at, mask=(row < end) & (col < _size(LAUNCH, NAME)), other=0)
    elif BOUNDED:
        return tl.load(at, mask=row < end, other=0)
    elif IS_PADDED:
        return tl.load(at, mask=col < _size(LAUNCH, NAME), other=0)
    else:
        return tl.load(at)


@triton.jit
def _store(pointer, NAME: tl.constexpr, first, ROWS: tl.constexpr, end, tile, LAUNCH: tl.constexpr):
    """Stores the rows of a tile that are before `end`."""
    row, col = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, _width(LAUNCH, NAME))[None, :]
    tl.store(_tile_at(pointer, NAME, first, ROWS, LAUNCH), tile, mask=(row < end) & (col < _size(LAUNCH, NAME)))


# Scores. Rows are queries and columns keys: of shapes `[queries, 1]` and `[1, keys]`, or the other way round.


@triton.jit
def _scores(product, at, rows, cols, visible, MASKED: tl.constexpr, LAUNCH: tl.constexpr):
    """Computes scores in the unit of `online.push_log2`, `-inf` where hidden, and what derivatives are made of.

    Returns:
      The scores, the derivative of the soft cap, and the results of the score function. The latter are anything without one.
    """
    scores, slope, changed = product, product, (product,)
    if LAUNCH.score_mod is not None:
        query, key = _positions(at, rows, cols, visible, LAUNCH)
        inputs = (product * LAUNCH.scores.scale, at.place.entry, at.place.head, query, key)
        changed = attention_functions.run(LAUNCH.score_mod, LAUNCH, at.words, at.place.b, inputs)
        scores = tl.broadcast_to(changed[0], product.shape)
    if LAUNCH.scores.soft_cap is not None:
        capped = functions.tanh(scores * LAUNCH.scores.scale_in_cap)
        slope = 1 - capped * capped
        if LAUNCH.score_mod is not None:
            scores = tl.where(scores == -INF, -INF, capped)
        else:
            scores = capped
    if LAUNCH.scores.unit != 1:
        scores = scores * LAUNCH.scores.factor
    if MASKED:
        hidden = _hidden(at, rows, cols, visible, LAUNCH)
        if _dims(LAUNCH, "bias") is not None:
            bias = _load_scores(at.bias, "bias", rows, cols, LAUNCH).to(tl.float32)
            hidden = hidden | (bias == -INF)
            scores += bias
        scores = tl.where(hidden, -INF, scores)
    return scores, slope, changed


@triton.jit
def _positions(at, rows, cols, visible, LAUNCH: tl.constexpr):
    """Returns the positions of queries and keys, as score and mask functions get them."""
    query, key = (rows + visible.offset).to(tl.int32), cols
    if _word(LAUNCH, "query_numbers") is not None:
        query = _token_numbers("query_numbers", at, tl.minimum(rows, LAUNCH.sizes.queries - 1), LAUNCH)
    if _word(LAUNCH, "key_numbers") is not None:
        key = _token_numbers("key_numbers", at, tl.minimum(cols, LAUNCH.sizes.keys - 1), LAUNCH)
    return query, key


@triton.jit
def _token_numbers(NAME: tl.constexpr, at, lines, LAUNCH: tl.constexpr):
    """Loads the numbers of the tokens of a sequence that devices share."""
    index = functions.offset(lines, _dims(LAUNCH, NAME), 2)
    return attention_functions.load_word(at.words, at.place.b, index, _word(LAUNCH, NAME), _dims(LAUNCH, NAME), tl.int32)


@triton.jit
def _hidden(at, rows, cols, visible, LAUNCH: tl.constexpr):
    """Tells which keys queries do not see. A bias may hide more."""
    end = rows * 0 + visible.keys
    positions = rows + visible.offset
    if LAUNCH.right is not None:
        end = tl.minimum(end, positions + (LAUNCH.right + 1))
    # A row that is no query must see nothing: it may hold NaN, as may keys, and 0 * NaN is NaN.
    if LAUNCH.sizes.queries % LAUNCH.tiling.block_q != 0 or _dims(LAUNCH, "query_lengths") is not None:
        end = tl.where(rows < visible.queries, end, 0)
    hidden = cols >= end
    if LAUNCH.left is not None:
        hidden = hidden | (cols < positions - LAUNCH.left)
    if _dims(LAUNCH, "query_segments") is not None:
        segments = tl.load(at.query_segments + rows, mask=rows < LAUNCH.sizes.queries, other=0)
        hidden = hidden | (segments != tl.load(at.key_segments + cols, mask=cols < LAUNCH.sizes.keys, other=0))
    if _dims(LAUNCH, "mask") is not None:
        hidden = hidden | (_load_scores(at.mask, "mask", rows, cols, LAUNCH).to(tl.int1) == 0)
    if LAUNCH.mask_mod is not None:
        query, key = _positions(at, rows, cols, visible, LAUNCH)
        inputs = (at.place.entry, at.place.head, query, key)
        seen = attention_functions.run(LAUNCH.mask_mod, LAUNCH, at.words, at.place.b, inputs)
        hidden = hidden | (seen[0] == 0)
    return hidden


@triton.jit
def _load_scores(pointer, NAME: tl.constexpr, rows, cols, LAUNCH: tl.constexpr):
    """Loads the part of a bias or mask that belongs to scores; it may have size 1 along rows and columns."""
    at = pointer + functions.offset(rows.to(tl.int64), _dims(LAUNCH, NAME), 2) + functions.offset(cols, _dims(LAUNCH, NAME), 3)
    return tl.load(at, mask=(rows < LAUNCH.sizes.queries) & (cols < LAUNCH.sizes.keys), other=0)


@triton.jit
def keep(seed0, seed1, row, col, DROPOUT: tl.constexpr):
    """Tells whether dropout keeps a weight: the twin of `ops.attention.dropout.keep`. All operands are uint32.

    DROPOUT is a `WeightDropout`.
    """
    ROW: tl.constexpr = DROPOUT.multipliers[0]
    SECOND_ROW: tl.constexpr = DROPOUT.multipliers[1]
    COL: tl.constexpr = DROPOUT.multipliers[2]
    first = _mix(_mix(seed0 ^ (row * ROW), 0, DROPOUT) ^ seed1, 0, DROPOUT)
    second = _mix(_mix(seed1 ^ (row * SECOND_ROW), 0, DROPOUT) ^ seed0, 0, DROPOUT)
    return _mix(first ^ (col * COL), second, DROPOUT) >= DROPOUT.dropped


@triton.jit
def _mix(bits, between, DROPOUT: tl.constexpr):
    """Mixes 32 bits, in which every bit of the input changes every bit of the output half of the time."""
    FIRST: tl.constexpr = DROPOUT.multipliers[3]
    SECOND: tl.constexpr = DROPOUT.multipliers[4]
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = ((bits ^ (bits >> 15)) + between) * SECOND
    return bits ^ (bits >> 16)


@triton.jit
def _kept(tile, at, rows, cols, LAUNCH: tl.constexpr):
    """Returns a tile of weights or derivatives, with 0 for those that dropout drops."""
    if LAUNCH.dropout is None:
        return tile
    else:
        row, col = rows.to(tl.uint32) + tl.load(at.seeds + 2), cols.to(tl.uint32) + tl.load(at.seeds + 3)
        DROPOUT: tl.constexpr = LAUNCH.dropout
        kept = keep(tl.load(at.seeds), tl.load(at.seeds + 1), row, col, DROPOUT)
        return tl.where(kept, tile, 0.0)


@triton.jit
def _clean(tile, scores, MASKED: tl.constexpr, LAUNCH: tl.constexpr):
    """Returns a tile with rows of 0 where no score of a masked tile is left: they may hold NaN, and are multiplied with 0."""
    if MASKED and LAUNCH.hides:
        return tl.where((tl.max(scores, 0) != -INF)[:, None], tile, 0.0).to(tile.dtype)
    else:
        return tile


# Forward.


@triton.jit(repr=_name)
def attention_forward(
    query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds, words,
    spans, sinks, out, lse, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Computes attention of a block of queries, and its log-sum-exp.

    Operands are those of the primitive, spans as `key_blocks.find_spans` makes them; LAUNCH is an `AttentionLaunch`.
    """
    b, head, block = _program(LAUNCH)
    whole = AttentionPointers(
        query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds,
        query, query, query, words, None,
    )  # fmt: skip
    at = _of_head(whole, b, head, LAUNCH)
    visible = _visible(at, block, LAUNCH)
    visited = _visited(spans, b, block, visible, LAUNCH)
    first = block * LAUNCH.tiling.block_q
    rows = first + tl.arange(0, LAUNCH.tiling.block_q)
    q = _load(at.query, "query", first, LAUNCH.tiling.block_q, LAUNCH.sizes.queries, True, LAUNCH)
    ROWS: tl.constexpr = LAUNCH.tiling.block_q
    COLS: tl.constexpr = LAUNCH.sizes.value_width
    program = ProgramBlock(at, rows, visible)
    m, d, o = tl.full([ROWS], -INF, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    sink = 0.0
    if _dims(LAUNCH, "sinks") is not None:
        sink = tl.load(_start(sinks, "sinks", b, head, LAUNCH)).to(tl.float32)
        m, d = online.lift_log2(d + sink, LAUNCH.scores.headroom, LAUNCH.scores.unit)
    if LAUNCH.some_whole:
        for i in range(visited.whole_low, visited.whole_high):
            m, d, o = _push(m, d, o, q, program, i, False, LAUNCH)
    if LAUNCH.some_masked:
        for i in range(0, visited.high - visited.low - (visited.whole_high - visited.whole_low)):
            m, d, o = _push(m, d, o, q, program, _masked(i, visited), True, LAUNCH)
    o *= tl.where(d == 0, 0.0, LAUNCH.kept / d)[:, None]
    _store(_start(out, "out", b, head, LAUNCH), "out", first, LAUNCH.tiling.block_q, LAUNCH.sizes.queries, o, LAUNCH)
    lse_of_rows = online.lse_log2(m, d, LAUNCH.scores.unit)
    if _dims(LAUNCH, "sinks") is not None:  # the sink is not rounded if a row sees nothing else
        sink_m, sink_d = online.lift_log2(d * 0 + sink, LAUNCH.scores.headroom, LAUNCH.scores.unit)
        lse_of_rows = tl.where((m == sink_m) & (d == sink_d), sink, lse_of_rows)
    tl.store(_start(lse, "lse", b, head, LAUNCH) + rows, lse_of_rows, mask=rows < LAUNCH.sizes.queries)


@triton.jit
def _push(m, d, o, q, program, block, MASKED: tl.constexpr, LAUNCH: tl.constexpr):
    """Pushes one more block of keys to the state of queries."""
    at, rows, end = program.at, program.lines, program.visible.end
    first = block * LAUNCH.tiling.block_kv
    cols = first + tl.arange(0, LAUNCH.tiling.block_kv)
    k = _load(at.key, "key", first, LAUNCH.tiling.block_kv, end, MASKED, LAUNCH)
    v = _load(at.value, "value", first, LAUNCH.tiling.block_kv, end, MASKED, LAUNCH)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores, _, _ = _scores(product, at, rows[:, None], cols[None, :], program.visible, MASKED, LAUNCH)
    m, d, factor, weight = online.push_log2(m, d, scores, LAUNCH.scores.scale_log2, LAUNCH.scores.headroom, LAUNCH.scores.unit)
    weight = _kept(weight, at, rows[:, None], cols[None, :], LAUNCH)
    o = tl.dot(weight.to(v.dtype), _clean(v, scores, MASKED, LAUNCH), o * factor[:, None], input_precision=PRECISION)
    return m, d, o


# Backward. The log-sum-exp is in powers of two, and `+inf` for a query that sees nothing: all of its weights are 0.


@triton.jit(repr=_name)
def attention_backward_keys(
    query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds, words,
    spans, d_out, lse, delta, d_key, d_value, d_words, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Computes the derivatives of a block of keys and their values, by all query heads that share them.

    Adds to those of tables that a score function reads if they are wanted, in float32 words which are 0 before.
    """
    b, key_head, block = _program(LAUNCH)
    whole = AttentionPointers(
        query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds,
        d_out, lse, delta, words, None,
    )  # fmt: skip
    at = _of_head(whole, b, key_head * LAUNCH.sizes.groups, LAUNCH)
    visible = _visible(at, block, LAUNCH)
    visited = _visited(spans, b, block, visible, LAUNCH)
    first = block * LAUNCH.tiling.block_kv
    cols = first + tl.arange(0, LAUNCH.tiling.block_kv)
    k = _load(at.key, "key", first, LAUNCH.tiling.block_kv, LAUNCH.sizes.keys, True, LAUNCH)
    v = _load(at.value, "value", first, LAUNCH.tiling.block_kv, LAUNCH.sizes.keys, True, LAUNCH)
    dk, dv = tl.zeros(k.shape, tl.float32), tl.zeros(v.shape, tl.float32)
    n_whole = visited.whole_high - visited.whole_low
    if LAUNCH.some_whole:
        for i in range(0, LAUNCH.sizes.groups * n_whole):
            group, place = _divided(i, n_whole)
            at_group = _of_head(whole, b, key_head * LAUNCH.sizes.groups + group, LAUNCH)
            program = ProgramBlock(at_group, cols, visible)
            dk, dv = _add_queries(dk, dv, k, v, program, d_words, visited.whole_low + place, False, LAUNCH)
    if LAUNCH.some_masked:
        n_masked = visited.high - visited.low - n_whole
        for i in range(0, LAUNCH.sizes.groups * n_masked):
            group, place = _divided(i, n_masked)
            at_group = _of_head(whole, b, key_head * LAUNCH.sizes.groups + group, LAUNCH)
            program = ProgramBlock(at_group, cols, visible)
            dk, dv = _add_queries(dk, dv, k, v, program, d_words, _masked(place, visited), True, LAUNCH)
    at_key, at_value = _start(d_key, "d_key", b, key_head, LAUNCH), _start(d_value, "d_value", b, key_head, LAUNCH)
    _store(at_key, "d_key", first, LAUNCH.tiling.block_kv, LAUNCH.sizes.keys, dk * LAUNCH.scores.scale, LAUNCH)
    _store(at_value, "d_value", first, LAUNCH.tiling.block_kv, LAUNCH.sizes.keys, dv * LAUNCH.kept, LAUNCH)


@triton.jit
def _divided(i, count):
    """Returns quotient and remainder of the index of a loop that runs a multiple of `count` times.

    Loads of the first iterations are issued before the loop, whether it runs or not. A division by 0 there would let LLVM
    assume that it does.
    """
    count = tl.maximum(count, 1)
    return i // count, i % count


@triton.jit
def _add_queries(dk, dv, k, v, program, d_words, block, MASKED: tl.constexpr, LAUNCH: tl.constexpr):
    """Adds the share of one block of queries of a head to the derivatives of keys and values."""
    at, cols, end = program.at, program.lines, program.visible.end
    first = block * LAUNCH.tiling.block_q
    rows = first + tl.arange(0, LAUNCH.tiling.block_q)
    q = _load(at.query, "query", first, LAUNCH.tiling.block_q, end, MASKED, LAUNCH)
    d_o = _load(at.d_out, "d_out", first, LAUNCH.tiling.block_q, end, MASKED, LAUNCH)
    lse = tl.load(at.lse + rows, mask=rows < end, other=INF)
    delta = tl.load(at.delta + rows, mask=rows < end, other=0)
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    scores, slope, changed = _scores(product, at, rows[None, :], cols[:, None], program.visible, MASKED, LAUNCH)
    weight = tl.exp2((scores * LAUNCH.scores.scale_log2 - lse[None, :]) * LAUNCH.scores.unit)
    dv = tl.dot(_kept(weight, at, rows[None, :], cols[:, None], LAUNCH).to(v.dtype), d_o, dv, input_precision=PRECISION)
    dp = _kept(tl.dot(v, tl.trans(d_o), input_precision=PRECISION) * LAUNCH.kept, at, rows[None, :], cols[:, None], LAUNCH)
    _, dc, dx = _derivatives(scores, slope, changed, weight, dp, delta[None, :], MASKED, LAUNCH)
    if d_words is not None:
        seen = (rows[None, :] < program.visible.queries) & (cols[:, None] < program.visible.keys)
        _add_to_tables(d_words, at, changed, dc, seen, LAUNCH)
    dk = tl.dot(dx.to(k.dtype), _clean(q, scores, MASKED, LAUNCH), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _derivatives(scores, slope, changed, weight, dp, delta, MASKED: tl.constexpr, LAUNCH: tl.constexpr):
    """Returns the derivatives of scores, from those of their weights, and what follows from them.

    These are the derivatives of the score function's results, and of products without the scale.
    """
    ds = weight * (dp - delta)
    dc = ds
    if LAUNCH.scores.soft_cap is not None:
        dc = ds * slope
    dx = dc
    if LAUNCH.score_mod is not None:
        dx = dc * changed[1]
    if MASKED or LAUNCH.score_mod is not None:  # hidden elements, and their derivatives, may be NaN
        hidden = scores == -INF
        ds, dc, dx = tl.where(hidden, 0.0, ds), tl.where(hidden, 0.0, dc), tl.where(hidden, 0.0, dx)
    return ds, dc, dx


@triton.jit
def _add_to_tables(d_words, at, changed, dc, seen, LAUNCH: tl.constexpr):
    """Adds to derivatives of tables, from those of the score function's results."""
    for i in tl.static_range(len(LAUNCH.loads)):
        NAME: tl.constexpr = LAUNCH.loads[i]
        start = _word(LAUNCH, NAME) + functions.offset(at.place.b, _dims(LAUNCH, NAME), 0)
        place, factor = changed[2 + 2 * i], changed[3 + 2 * i]
        values = tl.where(dc == 0, 0.0, dc * factor)  # the factor may be NaN where a key is hidden
        attention_functions.add_at(d_words + start, place, values, seen)


@triton.jit(repr=_name)
def attention_backward_queries(
    query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds, words,
    spans, d_out, lse, delta, d_query, d_bias, LAUNCH: tl.constexpr,
):  # fmt: skip
    """Computes the derivatives of a block of queries, and those of biases if they are wanted: they are 0 before."""
    b, head, block = _program(LAUNCH)
    whole = AttentionPointers(
        query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds,
        d_out, lse, delta, words, None,
    )  # fmt: skip
    at = _of_head(whole, b, head, LAUNCH)
    visible = _visible(at, block, LAUNCH)
    visited = _visited(spans, b, block, visible, LAUNCH)
    first = block * LAUNCH.tiling.block_q
    rows = first + tl.arange(0, LAUNCH.tiling.block_q)
    q = _load(at.query, "query", first, LAUNCH.tiling.block_q, LAUNCH.sizes.queries, True, LAUNCH)
    d_o = _load(at.d_out, "d_out", first, LAUNCH.tiling.block_q, LAUNCH.sizes.queries, True, LAUNCH)
    lse = tl.load(at.lse + rows, mask=rows < LAUNCH.sizes.queries, other=INF)
    delta = tl.load(at.delta + rows, mask=rows < LAUNCH.sizes.queries, other=0)
    if d_bias is not None:
        d_bias = _start(d_bias, "bias", b, head, LAUNCH)
    tiles, program = QueryTiles(q, d_o, lse, delta), ProgramBlock(at, rows, visible)
    dq = tl.zeros(q.shape, tl.float32)
    if LAUNCH.some_whole:
        for i in range(visited.whole_low, visited.whole_high):
            dq = _add_keys(dq, tiles, program, d_bias, i, False, LAUNCH)
    if LAUNCH.some_masked:
        for i in range(0, visited.high - visited.low - (visited.whole_high - visited.whole_low)):
            dq = _add_keys(dq, tiles, program, d_bias, _masked(i, visited), True, LAUNCH)
    at_query = _start(d_query, "d_query", b, head, LAUNCH)
    _store(at_query, "d_query", first, LAUNCH.tiling.block_q, LAUNCH.sizes.queries, dq * LAUNCH.query_scale, LAUNCH)


@triton.jit
def _add_keys(dq, tiles, program, d_bias, block, MASKED: tl.constexpr, LAUNCH: tl.constexpr):
    """Adds the share of one block of keys to the derivatives of queries."""
    at, end = program.at, program.visible.end
    first = block * LAUNCH.tiling.block_kv
    rows, cols = program.lines[:, None], (first + tl.arange(0, LAUNCH.tiling.block_kv))[None, :]
    k = _load(at.key, "key", first, LAUNCH.tiling.block_kv, end, MASKED, LAUNCH)
    v = _load(at.value, "value", first, LAUNCH.tiling.block_kv, end, MASKED, LAUNCH)
    product = tl.dot(tiles.q, tl.trans(k), input_precision=PRECISION)
    scores, slope, changed = _scores(product, at, rows, cols, program.visible, MASKED, LAUNCH)
    weight = tl.exp2((scores * LAUNCH.scores.scale_log2 - tiles.lse[:, None]) * LAUNCH.scores.unit)
    dp = _kept(tl.dot(tiles.d_o, tl.trans(v), input_precision=PRECISION) * LAUNCH.kept, at, rows, cols, LAUNCH)
    ds, _, dx = _derivatives(scores, slope, changed, weight, dp, tiles.delta[:, None], MASKED, LAUNCH)
    if d_bias is not None:
        _add_to_bias(d_bias, ds, rows, cols, LAUNCH)
    return tl.dot(dx.to(k.dtype), _clean(k, scores, MASKED, LAUNCH), dq, input_precision=PRECISION)


@triton.jit
def _add_to_bias(d_bias, ds, rows, cols, LAUNCH: tl.constexpr):
    """Stores the derivatives of scores as those of a bias, or adds them if the bias is broadcast."""
    if len(_dims(LAUNCH, "bias")[2]) == 0:
        ds, rows = tl.sum(ds, 0)[None, :], tl.min(rows, 0)[None, :]
    if len(_dims(LAUNCH, "bias")[3]) == 0:
        ds, cols = tl.sum(ds, 1)[:, None], tl.min(cols, 1)[:, None]
    at = (
        d_bias
        + functions.offset(rows.to(tl.int64), _dims(LAUNCH, "bias"), 2)
        + functions.offset(cols, _dims(LAUNCH, "bias"), 3)
    )
    inside = (rows < LAUNCH.sizes.queries) & (cols < LAUNCH.sizes.keys)
    if LAUNCH.bias_is_whole:
        tl.store(at, ds, mask=inside)
    else:
        tl.atomic_add(at, ds, mask=inside, sem="relaxed")
