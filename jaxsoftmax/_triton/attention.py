"""Triton kernels of attention: forward, and two that make its derivatives.

    forward           a block of queries:  S = Q K'   o, m, d <- the state with exp(S - m) and V   out = o / d, lse
    backward_keys     a block of keys:     P' = exp(K Q' - lse)   dS' = P' (V dO' - delta)   dV += P' dO   dK += dS' Q
    backward_queries  a block of queries:  P and dS again, dQ += dS K, and the bias's derivative is dS

A program has one block of a head of a batch entry, and goes through the blocks of the other side of which it sees something:
first those that all of its rows see whole, which are not masked, then the rest. Each adds up its own results, so they have the
same bits run after run; only the derivative of a bias that is broadcast is added in any order. Forward reads Q once and K and V
once for each block of queries; the other two read what passes by once for each block. `4 T S H`, `8 T S H` and `6 T S H`
operations a head. Source: Dao 2023, arXiv:2307.08691.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jaxsoftmax._triton import addresses, functions, online
from jaxsoftmax.ops.attention import dropout

INF = online.INF
PRECISION = tl.constexpr("tf32x3")  # of products of float32; those of 16 bits are exact


def _name(kernel):
    """The name of a compiled kernel, which profiles show."""
    return f"attention_{kernel.constants['CALL'].kernel}_triton"


class Operands(NamedTuple):
    """Where operands start, in whole or for a head of a batch entry. What is absent is something else, and not read."""

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


class Span(NamedTuple):
    """Which blocks of the other side a program visits, and those of them of which all of its rows see all."""

    low: Any
    high: Any
    whole_from: Any
    whole_to: Any


class Limits(NamedTuple):
    """How many queries and keys there are, and from where on no row of a program sees anything of the other side.

    `offset` is the position of the first query, and `shift` what is added to rows of a program to compare them with the others.
    """

    queries: Any
    keys: Any
    end: Any
    offset: Any
    shift: Any


# Where things are.


@triton.constexpr_function
def _dims(call, name):
    """How an operand is indexed by batch entry, head, row and column: see `addresses.offset`; None for one that is absent."""
    return dict(call.dims).get(name)


@triton.constexpr_function
def _size(call, name):
    """The head size of an operand."""
    return call.value_size if name in ("value", "out", "d_out", "d_value") else call.size


@triton.constexpr_function
def _width(call, name):
    """The head size of tiles of an operand."""
    return call.value_width if name in ("value", "out", "d_out", "d_value") else call.width


@triton.jit
def _start(pointer, NAME: tl.constexpr, b, head, CALL: tl.constexpr):
    """Where an operand has what belongs to a head of a batch entry."""
    if _dims(CALL, NAME) is None:
        return pointer
    else:
        return pointer + (addresses.offset(b, _dims(CALL, NAME), 0) + addresses.offset(head, _dims(CALL, NAME), 1))


@triton.jit
def _started(given, b, head, CALL: tl.constexpr):
    """The operands of a query head of a batch entry."""
    key_head = head // CALL.groups
    return Operands(
        _start(given.query, "query", b, head, CALL),
        _start(given.key, "key", b, key_head, CALL),
        _start(given.value, "value", b, key_head, CALL),
        _start(given.bias, "bias", b, head, CALL),
        _start(given.mask, "mask", b, head, CALL),
        _start(given.query_lengths, "query_lengths", b, head, CALL),
        _start(given.key_lengths, "key_lengths", b, head, CALL),
        _start(given.query_offset, "query_offset", b, head, CALL),
        _start(given.query_segments, "query_segments", b, head, CALL),
        _start(given.key_segments, "key_segments", b, head, CALL),
        _start(given.seeds, "seeds", b, head, CALL),
        _start(given.d_out, "d_out", b, head, CALL),
        _start(given.lse, "lse", b, head, CALL),
        _start(given.delta, "delta", b, head, CALL),
    )


@triton.jit
def _program(CALL: tl.constexpr):
    """Batch entry, head and block of a program.

    Programs with neighbouring numbers run at the same time: the blocks of a few heads, which read the same keys from the L2
    cache, those that take longest first.
    """
    at_once: tl.constexpr = CALL.blocks * CALL.together
    several, place = tl.program_id(0) // at_once, tl.program_id(0) % at_once
    heads = tl.minimum(CALL.pairs - several * CALL.together, CALL.together)
    block, pair = place // heads, (several * CALL.together + place % heads).to(tl.int64)
    if CALL.last_first:
        block = CALL.blocks - 1 - block
    return pair // CALL.own_heads, pair % CALL.own_heads, block


@triton.jit
def _limits(at, block, CALL: tl.constexpr):
    """The limits of a block of queries, or of keys."""
    queries, keys = block * 0 + CALL.queries, block * 0 + CALL.keys
    if _dims(CALL, "query_lengths") is not None:
        queries = tl.minimum(queries, tl.load(at.query_lengths))
    if _dims(CALL, "key_lengths") is not None:
        keys = tl.minimum(keys, tl.load(at.key_lengths))
    offset = block * 0
    if _dims(CALL, "query_offset") is not None:
        offset += tl.load(at.query_offset)
    if CALL.by_keys:
        own, end, shift = keys, queries, -offset
    else:
        own, end, shift = queries, keys, offset
    if CALL.after is not None:
        end = tl.minimum(end, tl.maximum(tl.minimum((block + 1) * CALL.own_block, own) + shift + CALL.after, 0))
    return Limits(queries, keys, end, offset, shift)


@triton.jit
def _span(spans, b, block, limits, CALL: tl.constexpr):
    """Which blocks of the other side a block visits: a row sees `before` positions before its own, and `after` behind."""
    own, other = limits.queries, limits.keys
    if CALL.by_keys:
        own, other = other, own
    OWN: tl.constexpr = CALL.own_block
    OTHER: tl.constexpr = CALL.other_block
    first = block * OWN
    low, high, whole_from, whole_to = first * 0, (limits.end + OTHER - 1) // OTHER, first * 0, other // OTHER
    position = first + limits.shift
    if CALL.before is not None:
        low = tl.maximum(position - CALL.before, 0) // OTHER
        whole_from = (tl.maximum(position + (OWN - 1) - CALL.before, 0) + (OTHER - 1)) // OTHER
    if CALL.after is not None:
        whole_to = tl.minimum(whole_to, tl.maximum(position + (CALL.after + 1), 0) // OTHER)
    if CALL.own_vary:
        high = tl.where(first < own, high, 0)
        whole_to = tl.where(first + OWN <= own, whole_to, 0)
    if _dims(CALL, "spans") is not None:
        at = _start(spans, "spans", b, 0, CALL) + addresses.offset(block, _dims(CALL, "spans"), 2)
        low, high = tl.maximum(low, tl.load(at)), tl.minimum(high, tl.load(at + 1))
        whole_from, whole_to = tl.maximum(whole_from, tl.load(at + 2)), tl.minimum(whole_to, tl.load(at + 3))
    high = tl.maximum(high, low)
    if CALL.some_whole:
        whole_from = tl.minimum(tl.maximum(whole_from, low), high)
        whole_to = tl.minimum(tl.maximum(whole_to, whole_from), high)
    else:
        whole_from, whole_to = low, low
    return Span(low, high, whole_from, whole_to)


@triton.jit
def _masked(i, span):
    """The `i`-th of the blocks that not all see whole."""
    block = span.low + i
    return tl.where(block < span.whole_from, block, block + (span.whole_to - span.whole_from))


@triton.jit
def _tile_at(pointer, NAME: tl.constexpr, first, ROWS: tl.constexpr, CALL: tl.constexpr):
    """Where the elements of a tile are. Only its start needs 64 bits, and the rest is the same for all tiles."""
    start = pointer + addresses.offset(first.to(tl.int64), _dims(CALL, NAME), 2)
    row, col = tl.arange(0, ROWS), tl.arange(0, _width(CALL, NAME))
    return start + (addresses.offset(row, _dims(CALL, NAME), 2)[:, None] + col[None, :])


@triton.jit
def _load(pointer, NAME: tl.constexpr, first, ROWS: tl.constexpr, end, BOUNDED: tl.constexpr, CALL: tl.constexpr):
    """Rows of an operand from the first on: 0 in columns that are none and, where rows are bounded, in those from `end` on."""
    at = _tile_at(pointer, NAME, first, ROWS, CALL)
    row, col = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, _width(CALL, NAME))[None, :]
    IS_PADDED: tl.constexpr = _size(CALL, NAME) < _width(CALL, NAME)
    if BOUNDED and IS_PADDED:
        return tl.load(at, mask=(row < end) & (col < _size(CALL, NAME)), other=0)
    elif BOUNDED:
        return tl.load(at, mask=row < end, other=0)
    elif IS_PADDED:
        return tl.load(at, mask=col < _size(CALL, NAME), other=0)
    else:
        return tl.load(at)


@triton.jit
def _store(pointer, NAME: tl.constexpr, first, ROWS: tl.constexpr, end, tile, CALL: tl.constexpr):
    """Stores the rows of a tile that are before `end`."""
    row, col = (first + tl.arange(0, ROWS))[:, None], tl.arange(0, _width(CALL, NAME))[None, :]
    tl.store(_tile_at(pointer, NAME, first, ROWS, CALL), tile, mask=(row < end) & (col < _size(CALL, NAME)))


# Scores. Rows are queries and columns keys: of shapes `[queries, 1]` and `[1, keys]`, or the other way round.


@triton.jit
def _scores(product, at, rows, cols, limits, MASKED: tl.constexpr, CALL: tl.constexpr):
    """Scores, `-inf` where not seen, in units that `online.push_log2` takes, and their derivative by `scale * product`."""
    scores, slope = product, product
    if CALL.soft_cap is not None:
        scores = functions.tanh(product * (CALL.scale / CALL.soft_cap))
        slope = 1 - scores * scores
    if CALL.unit != 1:
        scores = scores * CALL.factor
    if MASKED:
        hidden = _hidden(at, rows, cols, limits, CALL)
        if _dims(CALL, "bias") is not None:
            bias = _of_scores(at.bias, "bias", rows, cols, CALL).to(tl.float32)
            hidden = hidden | (bias == -INF)
            scores += bias
        scores = tl.where(hidden, -INF, scores)
    return scores, slope


@triton.jit
def _hidden(at, rows, cols, limits, CALL: tl.constexpr):
    """Which keys queries do not see, but for what a bias hides."""
    end = rows * 0 + limits.keys
    positions = rows + limits.offset
    if CALL.right is not None:
        end = tl.minimum(end, positions + (CALL.right + 1))
    if CALL.queries % CALL.block_q != 0 or _dims(CALL, "query_lengths") is not None:  # keys may hold NaN: 0 * NaN is NaN
        end = tl.where(rows < limits.queries, end, 0)
    hidden = cols >= end
    if CALL.left is not None:
        hidden = hidden | (cols < positions - CALL.left)
    if _dims(CALL, "query_segments") is not None:
        own = tl.load(at.query_segments + rows, mask=rows < CALL.queries, other=0)
        hidden = hidden | (own != tl.load(at.key_segments + cols, mask=cols < CALL.keys, other=0))
    if _dims(CALL, "mask") is not None:
        hidden = hidden | (_of_scores(at.mask, "mask", rows, cols, CALL).to(tl.int1) == 0)
    return hidden


@triton.jit
def _of_scores(pointer, NAME: tl.constexpr, rows, cols, CALL: tl.constexpr):
    """What belongs to scores of a bias or mask, which may have size 1 along rows and columns."""
    at = pointer + addresses.offset(rows.to(tl.int64), _dims(CALL, NAME), 2) + addresses.offset(cols, _dims(CALL, NAME), 3)
    return tl.load(at, mask=(rows < CALL.queries) & (cols < CALL.keys), other=0)


ROW, SECOND_ROW, COL = (tl.constexpr(int(n)) for n in (dropout._ROW, dropout._SECOND_ROW, dropout._COL))
FIRST, SECOND = tl.constexpr(int(dropout._FIRST)), tl.constexpr(int(dropout._SECOND))


@triton.jit
def keep(seed0, seed1, row, col, DROPPED: tl.constexpr):
    """The twin of `dropout.keep`: whether dropout keeps a weight; all are uint32, and so many of 2^32 are dropped."""
    first = _mix(_mix(seed0 ^ (row * ROW), 0) ^ seed1, 0)
    second = _mix(_mix(seed1 ^ (row * SECOND_ROW), 0) ^ seed0, 0)
    return _mix(first ^ (col * COL), second) >= DROPPED


@triton.jit
def _mix(bits, between):
    bits = (bits ^ (bits >> 16)) * FIRST
    bits = ((bits ^ (bits >> 15)) + between) * SECOND
    return bits ^ (bits >> 16)


@triton.jit
def _kept(tile, at, rows, cols, CALL: tl.constexpr):
    """A tile of weights or derivatives, with 0 for those that dropout drops."""
    if CALL.dropped is None:
        return tile
    else:
        row, col = rows.to(tl.uint32) + tl.load(at.seeds + 2), cols.to(tl.uint32) + tl.load(at.seeds + 3)
        kept = keep(tl.load(at.seeds), tl.load(at.seeds + 1), row, col, CALL.dropped)
        return tl.where(kept, tile, 0.0)


@triton.jit
def _clean(tile, scores, MASKED: tl.constexpr, CALL: tl.constexpr):
    """A tile, of whose rows those are 0 that belong to no score: they may hold NaN, and are multiplied with 0."""
    if MASKED and CALL.hides:
        return tl.where((tl.max(scores, 0) != -INF)[:, None], tile, 0.0).to(tile.dtype)
    else:
        return tile


# Forward.


@triton.jit(repr=_name)
def attention_forward(
    query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds, spans,
    sinks, out, lse, CALL: tl.constexpr,
):  # fmt: skip
    """Attention of a block of queries, and its log-sum-exp.

    Operands are those of the primitive, spans as `key_blocks.spans` makes them; CALL is a `Call` of `ops/attention/triton.py`.
    """
    b, head, block = _program(CALL)
    given = Operands(
        query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds,
        query, query, query,
    )  # fmt: skip
    at = _started(given, b, head, CALL)
    limits = _limits(at, block, CALL)
    span = _span(spans, b, block, limits, CALL)
    first = block * CALL.block_q
    rows = first + tl.arange(0, CALL.block_q)
    q = _load(at.query, "query", first, CALL.block_q, CALL.queries, True, CALL)
    ROWS: tl.constexpr = CALL.block_q
    COLS: tl.constexpr = CALL.value_width
    m, d, o = tl.full([ROWS], -INF, tl.float32), tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    sink = 0.0
    if _dims(CALL, "sinks") is not None:
        sink = tl.load(_start(sinks, "sinks", b, head, CALL)).to(tl.float32)
        m, d = online.lift_log2(d + sink, CALL.headroom, CALL.unit)
    if CALL.some_whole:
        for i in range(span.whole_from, span.whole_to):
            m, d, o = _push(m, d, o, q, at, rows, i, limits, False, CALL)
    if CALL.some_masked:
        for i in range(0, span.high - span.low - (span.whole_to - span.whole_from)):
            m, d, o = _push(m, d, o, q, at, rows, _masked(i, span), limits, True, CALL)
    o *= tl.where(d == 0, 0.0, CALL.kept / d)[:, None]
    _store(_start(out, "out", b, head, CALL), "out", first, CALL.block_q, CALL.queries, o, CALL)
    found = online.lse_log2(m, d, CALL.unit)
    if _dims(CALL, "sinks") is not None:  # not rounded where a row sees nothing else
        own_m, own_d = online.lift_log2(d * 0 + sink, CALL.headroom, CALL.unit)
        found = tl.where((m == own_m) & (d == own_d), sink, found)
    tl.store(_start(lse, "lse", b, head, CALL) + rows, found, mask=rows < CALL.queries)


@triton.jit
def _push(m, d, o, q, at, rows, block, limits, MASKED: tl.constexpr, CALL: tl.constexpr):
    """The state of queries with one more block of keys."""
    first = block * CALL.block_kv
    cols = first + tl.arange(0, CALL.block_kv)
    k = _load(at.key, "key", first, CALL.block_kv, limits.end, MASKED, CALL)
    v = _load(at.value, "value", first, CALL.block_kv, limits.end, MASKED, CALL)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores, _ = _scores(product, at, rows[:, None], cols[None, :], limits, MASKED, CALL)
    m, d, factor, weight = online.push_log2(m, d, scores, CALL.scale_log2, CALL.headroom, CALL.unit)
    weight = _kept(weight, at, rows[:, None], cols[None, :], CALL)
    o = tl.dot(weight.to(v.dtype), _clean(v, scores, MASKED, CALL), o * factor[:, None], input_precision=PRECISION)
    return m, d, o


# Backward. The log-sum-exp is in powers of two, and `+inf` for a query that sees nothing: all of its weights are 0.


@triton.jit(repr=_name)
def attention_backward_keys(
    query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds, spans,
    d_out, lse, delta, d_key, d_value, CALL: tl.constexpr,
):  # fmt: skip
    """The derivatives of a block of keys and their values, by all query heads that share them."""
    b, key_head, block = _program(CALL)
    given = Operands(
        query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds,
        d_out, lse, delta,
    )  # fmt: skip
    at = _started(given, b, key_head * CALL.groups, CALL)
    limits = _limits(at, block, CALL)
    span = _span(spans, b, block, limits, CALL)
    first = block * CALL.block_kv
    cols = first + tl.arange(0, CALL.block_kv)
    k = _load(at.key, "key", first, CALL.block_kv, CALL.keys, True, CALL)
    v = _load(at.value, "value", first, CALL.block_kv, CALL.keys, True, CALL)
    dk, dv = tl.zeros(k.shape, tl.float32), tl.zeros(v.shape, tl.float32)
    whole = span.whole_to - span.whole_from
    if CALL.some_whole:
        for i in range(0, CALL.groups * whole):
            group, place = _divided(i, whole)
            here = _started(given, b, key_head * CALL.groups + group, CALL)
            dk, dv = _add_queries(dk, dv, k, v, here, cols, span.whole_from + place, limits, False, CALL)
    if CALL.some_masked:
        rest = span.high - span.low - whole
        for i in range(0, CALL.groups * rest):
            group, place = _divided(i, rest)
            here = _started(given, b, key_head * CALL.groups + group, CALL)
            dk, dv = _add_queries(dk, dv, k, v, here, cols, _masked(place, span), limits, True, CALL)
    at_key, at_value = _start(d_key, "d_key", b, key_head, CALL), _start(d_value, "d_value", b, key_head, CALL)
    _store(at_key, "d_key", first, CALL.block_kv, CALL.keys, dk * CALL.scale, CALL)
    _store(at_value, "d_value", first, CALL.block_kv, CALL.keys, dv * CALL.kept, CALL)


@triton.jit
def _divided(i, count):
    """The quotient and the remainder of the index of a loop that runs a multiple of `count` times.

    Loads of the first iterations are issued before the loop, whether it runs or not. A division by 0 there would let LLVM
    assume that it does.
    """
    count = tl.maximum(count, 1)
    return i // count, i % count


@triton.jit
def _add_queries(dk, dv, k, v, at, cols, block, limits, MASKED: tl.constexpr, CALL: tl.constexpr):
    """The derivatives of keys and values with what one block of queries of a head adds."""
    first = block * CALL.block_q
    rows = first + tl.arange(0, CALL.block_q)
    q = _load(at.query, "query", first, CALL.block_q, limits.end, MASKED, CALL)
    d_o = _load(at.d_out, "d_out", first, CALL.block_q, limits.end, MASKED, CALL)
    lse = tl.load(at.lse + rows, mask=rows < limits.end, other=INF)
    delta = tl.load(at.delta + rows, mask=rows < limits.end, other=0)
    product = tl.dot(k, tl.trans(q), input_precision=PRECISION)
    scores, slope = _scores(product, at, rows[None, :], cols[:, None], limits, MASKED, CALL)
    weight = tl.exp2((scores * CALL.scale_log2 - lse[None, :]) * CALL.unit)
    dv = tl.dot(_kept(weight, at, rows[None, :], cols[:, None], CALL).to(v.dtype), d_o, dv, input_precision=PRECISION)
    dp = _kept(tl.dot(v, tl.trans(d_o), input_precision=PRECISION) * CALL.kept, at, rows[None, :], cols[:, None], CALL)
    _, dx = _derivatives(scores, slope, weight, dp, delta[None, :], MASKED, CALL)
    dk = tl.dot(dx.to(k.dtype), _clean(q, scores, MASKED, CALL), dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _derivatives(scores, slope, weight, dp, delta, MASKED: tl.constexpr, CALL: tl.constexpr):
    """Those of scores, by those of their weights, and those of products but for the scale."""
    ds = weight * (dp - delta)
    dx = ds
    if CALL.soft_cap is not None:
        dx = ds * slope
    if MASKED:  # what is not seen may hold NaN
        ds, dx = tl.where(scores == -INF, 0.0, ds), tl.where(scores == -INF, 0.0, dx)
    return ds, dx


@triton.jit(repr=_name)
def attention_backward_queries(
    query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds, spans,
    d_out, lse, delta, d_query, d_bias, CALL: tl.constexpr,
):  # fmt: skip
    """The derivatives of a block of queries and, if they are wanted, of biases: those that no program visits are 0 before."""
    b, head, block = _program(CALL)
    given = Operands(
        query, key, value, bias, mask, query_lengths, key_lengths, query_offset, query_segments, key_segments, seeds,
        d_out, lse, delta,
    )  # fmt: skip
    at = _started(given, b, head, CALL)
    limits = _limits(at, block, CALL)
    span = _span(spans, b, block, limits, CALL)
    first = block * CALL.block_q
    rows = first + tl.arange(0, CALL.block_q)
    q = _load(at.query, "query", first, CALL.block_q, CALL.queries, True, CALL)
    d_o = _load(at.d_out, "d_out", first, CALL.block_q, CALL.queries, True, CALL)
    lse = tl.load(at.lse + rows, mask=rows < CALL.queries, other=INF)
    delta = tl.load(at.delta + rows, mask=rows < CALL.queries, other=0)
    if d_bias is not None:
        d_bias = _start(d_bias, "bias", b, head, CALL)
    dq = tl.zeros(q.shape, tl.float32)
    if CALL.some_whole:
        for i in range(span.whole_from, span.whole_to):
            dq = _add_keys(dq, q, d_o, lse, delta, at, d_bias, rows, i, limits, False, CALL)
    if CALL.some_masked:
        for i in range(0, span.high - span.low - (span.whole_to - span.whole_from)):
            dq = _add_keys(dq, q, d_o, lse, delta, at, d_bias, rows, _masked(i, span), limits, True, CALL)
    _store(_start(d_query, "d_query", b, head, CALL), "d_query", first, CALL.block_q, CALL.queries, dq * CALL.query_scale, CALL)


@triton.jit
def _add_keys(dq, q, d_o, lse, delta, at, d_bias, rows, block, limits, MASKED: tl.constexpr, CALL: tl.constexpr):
    """The derivatives of queries with what one block of keys adds."""
    first = block * CALL.block_kv
    rows, cols = rows[:, None], (first + tl.arange(0, CALL.block_kv))[None, :]
    k = _load(at.key, "key", first, CALL.block_kv, limits.end, MASKED, CALL)
    v = _load(at.value, "value", first, CALL.block_kv, limits.end, MASKED, CALL)
    product = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    scores, slope = _scores(product, at, rows, cols, limits, MASKED, CALL)
    weight = tl.exp2((scores * CALL.scale_log2 - lse[:, None]) * CALL.unit)
    dp = _kept(tl.dot(d_o, tl.trans(v), input_precision=PRECISION) * CALL.kept, at, rows, cols, CALL)
    ds, dx = _derivatives(scores, slope, weight, dp, delta[:, None], MASKED, CALL)
    if d_bias is not None:
        _add_to_bias(d_bias, ds, rows, cols, CALL)
    return tl.dot(dx.to(k.dtype), _clean(k, scores, MASKED, CALL), dq, input_precision=PRECISION)


@triton.jit
def _add_to_bias(d_bias, ds, rows, cols, CALL: tl.constexpr):
    """Stores the derivatives of scores as those of a bias; of one that is broadcast adds them."""
    if len(_dims(CALL, "bias")[2]) == 0:
        ds, rows = tl.sum(ds, 0)[None, :], tl.min(rows, 0)[None, :]
    if len(_dims(CALL, "bias")[3]) == 0:
        ds, cols = tl.sum(ds, 1)[:, None], tl.min(cols, 1)[:, None]
    at = d_bias + addresses.offset(rows.to(tl.int64), _dims(CALL, "bias"), 2) + addresses.offset(cols, _dims(CALL, "bias"), 3)
    inside = (rows < CALL.queries) & (cols < CALL.keys)
    if CALL.bias_is_whole:
        tl.store(at, ds, mask=inside)
    else:
        tl.atomic_add(at, ds, mask=inside, sem="relaxed")
