"""A Triton kernel for the softmax family and cross-entropy: rows of any length, along any axis.

An array is `[outer, cols, inner]`, and a row is what lies along `cols`. A program has a tile `[rows, columns]`, in float32:

1. It loads the tile and lifts it to a state of each row: `(m, d)` of the scores, with their sum where that is asked for; or for
   a derivative its sum along the row.
2. A row longer than a tile is gone through in a loop, slice by slice, and the states of the slices are merged.
3. The results are computed from the tile and the state, and stored. Of a longer row the tiles are loaded again, the last first,
   as those are still in the cache.

Where there are too few rows for the GPU, each slice is a program, and the kernel runs twice: once for the states of the slices,
once for what follows. The bits are the same. Reads and writes for each element are those of `ops/softmax/mosaic.py`, but that
rows longer than a tile are read twice.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

import triton
import triton.language as tl

from jaxsoftmax._triton import addresses, functions, online

INF = tl.constexpr(float("inf"))


def _name(kernel):
    """The name of a compiled kernel, which profiles show."""
    step = "_states" if kernel.constants.get("STEP") == "states" else ""
    return f"{kernel.constants.get('MAP', 'rows')}{step}_triton"


# Where things are.


@triton.jit
def _rows_of(block, OUTER: tl.constexpr, INNER: tl.constexpr, BLOCK_ROWS: tl.constexpr, WIDE: tl.constexpr):
    """The outer and the inner index of each row of a block, and whether there is such a row.

    Where `inner` is short, rows are numbered through; else a block is neighbours of one outer index.
    """
    lanes = tl.arange(0, BLOCK_ROWS)
    if WIDE:
        block = block.to(tl.int64)
    if INNER < 16:
        row = block * BLOCK_ROWS + lanes
        outer, inner, exists = row // INNER, row % INNER, row < OUTER * INNER
    else:
        across: tl.constexpr = (INNER + BLOCK_ROWS - 1) // BLOCK_ROWS
        inner = block % across * BLOCK_ROWS + lanes
        outer, exists = block // across + lanes * 0, inner < INNER
    return outer, inner, exists


# What is computed of a tile.


@triton.jit
def _terms(
    cols,
    exists,
    base,
    seen_base,
    x,
    t,
    where,
    m,
    d,
    scale,
    MAP: tl.constexpr,
    REDUCES: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    WHERE: tl.constexpr,
    SCALED: tl.constexpr,
    RESCALES: tl.constexpr,
    CAP: tl.constexpr,
):
    """What a map sums along a row and computes its results from, two tiles; which entries are seen, which exist, and where.

    They are the scores, and those without the mask; softmax and its tangent; or the weights of the saved state, and their
    tangent or the scores. What is not needed of them the compiler leaves out, with its loads.
    """
    inside = exists[:, None] & (cols < COLS)[None, :]
    at = base[:, None] + (cols * INNER)[None, :]
    seen = inside
    if WHERE is not None:
        seen_at = seen_base[:, None] + addresses.offset(cols, WHERE, 1)[None, :]
        seen = tl.load(where + seen_at, mask=inside, other=0).to(tl.int1)
    if MAP == "softmax_jacobian":
        first = tl.load(x + at, mask=inside, other=0).to(tl.float32)
        second = first
    else:
        first = tl.load(x + at, mask=inside, other=-INF).to(tl.float32)
        if SCALED:
            sign = tl.where(scale > 0, 1.0, tl.where(scale < 0, -1.0, scale))
            first = tl.where(inside, first * sign[:, None], -INF)
        if CAP is not None:
            first = tl.where(inside, CAP * functions.tanh(first / CAP), -INF)
        second = first
        if WHERE is not None:
            first = tl.where(seen, first, -INF)
        if REDUCES != "state":
            if WHERE is not None:
                d = tl.where(d != 0, d, 1.0)  # a row with nothing to see
            first = online.weights(first, m[:, None], tl.abs(scale)[:, None]) * (1.0 / d)[:, None]
    if MAP == "softmax_jacobian" or MAP == "logsumexp_jvp":
        second = tl.load(t + at, mask=inside, other=0).to(tl.float32)
        second = tl.where(first != 0, second, 0.0)
    elif MAP == "log_softmax_jvp" or MAP == "log_softmax_vjp":
        second = tl.load(t + at, mask=inside, other=0).to(tl.float32)
        if WHERE is not None:
            second = tl.where(seen, second, 0.0)
    if RESCALES:
        second = second * scale[:, None]
    return first, second, seen, inside, at


@triton.jit
def _sum(first, second, MAP: tl.constexpr):
    """What a derivative sums along the rows of a tile."""
    if MAP == "log_softmax_vjp":
        terms = second
    elif MAP == "log_softmax_jvp":
        terms = first * tl.where(first != 0, second, 0.0)
    else:
        terms = first * second
    return tl.sum(terms, 1)


@triton.jit
def _push(m, d, total, first, second, seen, scale, MAP: tl.constexpr, REDUCES: tl.constexpr, TOTAL: tl.constexpr):
    """The state with one more tile, and the sum of the scores; of a derivative the sum is the `d` of a state whose `m` is 0."""
    if REDUCES == "state":
        m, d = online.push(m, d, first, tl.abs(scale))
    else:
        d += _sum(first, second, MAP)
    if TOTAL:
        total += tl.sum(tl.where(seen, first, 0.0), 1)
    return m, d, total


@triton.jit
def _lift(first, second, seen, scale, MAP: tl.constexpr, REDUCES: tl.constexpr, TOTAL: tl.constexpr):
    """The state of a tile, and the sum of the scores."""
    if REDUCES == "state":
        m, d = online.lift(first, tl.abs(scale))
    else:
        d = _sum(first, second, MAP)
        m = tl.zeros_like(d)
    total = d
    if TOTAL:
        total = tl.sum(tl.where(seen, first, 0.0), 1)
    return m, d, total


@triton.jit
def _finished(m, d, MAP: tl.constexpr, MASKED: tl.constexpr):
    """The state of a whole row as results have it: log-sum-exp needs `m` finite, the others NaN where it is not.

    `cross_entropy_gradient` needs one for what belongs to a row, and the other for its result.
    """
    if MAP == "logsumexp" or MAP == "cross_entropy":
        m = online.shift(m)
    elif MAP != "cross_entropy_gradient":
        if MASKED and MAP == "log_softmax":
            m = tl.where(m != -INF, m, 0.0)
        d += m - m
    return m, d


@triton.jit
def _result(first, second, cols, seen, m, d, scale, of_row, MAP: tl.constexpr, MASKED: tl.constexpr, CAP: tl.constexpr):
    """What is stored of a tile, from the state of its rows, or from their sums."""
    if MAP == "softmax":
        result = online.weights(first, m[:, None], tl.abs(scale)[:, None]) * (1.0 / d)[:, None]
    elif MAP == "log_softmax":
        result = (first - m[:, None]) * tl.abs(scale)[:, None] - tl.log(d)[:, None]
    elif MAP == "softmax_jacobian":
        result = tl.where(first != 0, first * (second - d[:, None]), 0.0)
    elif MAP == "log_softmax_jvp":
        result = second - d[:, None]
    elif MAP == "log_softmax_vjp":
        result = second - first * d[:, None]
    elif MAP == "cross_entropy_vjp":
        result = _of_logits(first, second, cols, seen, of_row, CAP)
    elif MAP == "cross_entropy_gradient":
        p = online.weights(first, m[:, None], tl.abs(scale)[:, None]) * (1.0 / (d + (m - m)))[:, None]
        result = _of_logits(p, second, cols, seen, of_row, CAP)
    else:
        result = first * d[:, None]  # of logsumexp_vjp, with the cotangents of the rows
    if MASKED and MAP != "cross_entropy_vjp":
        result = tl.where(seen, result, -INF if MAP == "log_softmax" else 0.0)
    return result


@triton.jit
def _of_logits(p, scores, cols, seen, of_row, CAP: tl.constexpr):
    """`(a * p + b * onehot(label) + c) * ds/dx`; where the numbers of a row are 0 nothing of it has an effect."""
    a, b, c, label = of_row
    total = tl.where(a[:, None] != 0, a[:, None] * p, 0.0) + tl.where(seen, c[:, None], 0.0)
    total += tl.where(cols[None, :] == label[:, None], b[:, None], 0.0)
    if CAP is not None:
        bent = scores / CAP
        total = tl.where(total != 0, total * (1.0 - bent * bent), 0.0)
    return total


# The kernel.


@triton.jit(repr=_name)
def rows(
    x,
    t,
    m,
    d,
    where,
    scale,
    a,
    b,
    c,
    labels,
    slices_m,
    slices_d,
    slices_total,
    out,
    out_m,
    out_d,
    out_total,
    MAP: tl.constexpr,
    REDUCES: tl.constexpr,
    STEP: tl.constexpr,
    OUTER: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
    RESCALES: tl.constexpr,
    CAP: tl.constexpr,
    TOTAL: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A map of the softmax family or of cross-entropy.

    Args:
      x: the scores, or softmax. What follows and a map has not got is any array.
      t: a tangent or cotangent; of `logsumexp_vjp` and `cross_entropy_gradient` one number for each row.
      m: the saved state, of each row.
      d: likewise.
      where: the mask.
      scale: of the scores.
      a: one of the numbers of each row that `cross_entropy_vjp` has.
      b: likewise.
      c: likewise.
      labels: of cross-entropy.
      slices_m: for the step "finish" the states of the slices, `[rows, slices]`.
      slices_d: likewise.
      slices_total: likewise, the sums of the scores.
      out: the result. Where that is a state, of `cross_entropy` or of the slices for the step "states", this is its `m`, and
        `d` and the sum of the scores follow.
      out_m: the state of each row, or None.
      out_d: likewise.
      out_total: the sum of the scores of each row, or None.
      MAP: the name of the primitive.
      REDUCES: what of a row is needed for the result: the "state" of its scores, the "sum" that a derivative has, or "nothing".
      STEP: "all"; or, in two runs, "states" and "finish".
      OUTER: the size of the first of the three axes of `x`.
      COLS: of the second.
      INNER: of the third.
      WHERE: None, or for each of the three axes where the mask has what belongs to an index, as `addresses.offset` says.
      SCALE: None, or the same for the scale, of the first and the last axis.
      RESCALES: whether tangents are multiplied with the scale.
      CAP: None, or the bound of `CAP * tanh(x / CAP)`.
      TOTAL: whether the sum of the scores is wanted.
      SMOOTHING: of the labels, for `cross_entropy_gradient`.
      Z_LOSS: likewise.
      BLOCK_ROWS: rows of a tile.
      BLOCK_COLS: columns of a tile.
      SLICE: columns of a slice, a multiple of `BLOCK_COLS`, where rows are longer than a tile.
      SLICES: a power of two that is no less than the number of slices.
      PROGRAMS: how many programs share the rows of a tile: 1, or as many as there are slices.
      WIDE: whether offsets need 64 bits.
    """
    if out is None:  # it takes the place of `x`
        out = x
    MASKED: tl.constexpr = WHERE is not None
    SCALED: tl.constexpr = SCALE is not None
    IS_WHOLE: tl.constexpr = MAP != "logsumexp" and MAP != "logsumexp_jvp" and MAP != "cross_entropy"
    COUNT: tl.constexpr = (COLS + SLICE - 1) // SLICE
    program = tl.program_id(0)
    part = program % PROGRAMS
    outer, inner, exists = _rows_of(program // PROGRAMS, OUTER, INNER, BLOCK_ROWS, WIDE)
    row = outer * INNER + inner
    base = outer * (COLS * INNER) + inner
    columns = tl.arange(0, BLOCK_COLS)
    if WIDE:
        columns = columns.to(tl.int64)

    # What each row has.
    seen_base = base
    if MASKED:
        seen_base = addresses.offset(outer, WHERE, 0) + addresses.offset(inner, WHERE, 2)
    factor = tl.full([BLOCK_ROWS], 1.0, tl.float32)
    if SCALED:
        scale_at = addresses.offset(outer, SCALE, 0) + addresses.offset(inner, SCALE, 1)
        factor = tl.load(scale + scale_at, mask=exists, other=1).to(tl.float32)
    saved_m, saved_d = factor, factor
    if REDUCES != "state" and MAP != "softmax_jacobian":
        saved_m = tl.load(m + row, mask=exists, other=0)
        saved_d = tl.load(d + row, mask=exists, other=1)

    if STEP == "states":
        state_m, state_d, total = _state_of_slice(
            part, exists, base, seen_base, columns, x, t, where, saved_m, saved_d, factor,
            MAP, REDUCES, COLS, INNER, WHERE, SCALED, RESCALES, CAP, TOTAL, BLOCK_ROWS, BLOCK_COLS, SLICE,
        )  # fmt: skip
        tl.store(out + (row * COUNT + part), state_m, mask=exists)
        tl.store(out_m + (row * COUNT + part), state_d, mask=exists)
        if TOTAL:
            tl.store(out_d + (row * COUNT + part), total, mask=exists)
    else:
        # Of a row that is longer than a tile the compiler leaves this out.
        first, second, seen, inside, at = _terms(
            columns, exists, base, seen_base, x, t, where, saved_m, saved_d, factor,
            MAP, REDUCES, COLS, INNER, WHERE, SCALED, RESCALES, CAP,
        )  # fmt: skip
        state_m, state_d, total = factor, factor, factor
        if MAP == "logsumexp_vjp":
            state_d = tl.load(t + row, mask=exists, other=0).to(tl.float32)
        elif REDUCES != "nothing":
            if BLOCK_COLS >= COLS:
                state_m, state_d, total = _lift(first, second, seen, factor, MAP, REDUCES, TOTAL)
            else:
                index = tl.arange(0, SLICES)[None, :]
                if STEP == "finish":
                    given, place = exists[:, None] & (index < COUNT), row[:, None] * COUNT + index
                    states_m = tl.load(slices_m + place, mask=given, other=-INF)
                    states_d = tl.load(slices_d + place, mask=given, other=0)
                    totals = states_d
                    if TOTAL:
                        totals = tl.load(slices_total + place, mask=given, other=0)
                else:
                    states_d = tl.zeros([BLOCK_ROWS, SLICES], tl.float32)
                    states_m, totals = states_d - INF, states_d
                    for k in range(COUNT):
                        slice_m, slice_d, slice_total = _state_of_slice(
                            k, exists, base, seen_base, columns, x, t, where, saved_m, saved_d, factor,
                            MAP, REDUCES, COLS, INNER, WHERE, SCALED, RESCALES, CAP, TOTAL, BLOCK_ROWS, BLOCK_COLS, SLICE,
                        )  # fmt: skip
                        states_m = tl.where(index == k, slice_m[:, None], states_m)
                        states_d = tl.where(index == k, slice_d[:, None], states_d)
                        if TOTAL:
                            totals = tl.where(index == k, slice_total[:, None], totals)
                state_m, state_d = online.merge_along(states_m, states_d, tl.abs(factor))
                total = tl.sum(totals, 1)
            state_m, state_d = _finished(state_m, state_d, MAP, MASKED)
        if IS_WHOLE:
            of_row = _of_row(row, exists, state_m, state_d, t, a, b, c, labels, MAP, COLS, SMOOTHING, Z_LOSS)
            if BLOCK_COLS >= COLS:
                result = _result(first, second, columns, seen, state_m, state_d, factor, of_row, MAP, MASKED, CAP)
                tl.store(out + at, result, mask=inside)
            else:
                WIDTH: tl.constexpr = COLS if PROGRAMS == 1 else SLICE
                TILES: tl.constexpr = (WIDTH + BLOCK_COLS - 1) // BLOCK_COLS
                for k in range(TILES):
                    cols = columns + (part * WIDTH + (TILES - 1 - k) * BLOCK_COLS)
                    first, second, seen, inside, at = _terms(
                        cols, exists, base, seen_base, x, t, where, saved_m, saved_d, factor,
                        MAP, REDUCES, COLS, INNER, WHERE, SCALED, RESCALES, CAP,
                    )  # fmt: skip
                    result = _result(first, second, cols, seen, state_m, state_d, factor, of_row, MAP, MASKED, CAP)
                    tl.store(out + at, result, mask=inside)
        stores = tl.where(part == 0, exists, False)
        if MAP == "logsumexp":
            tl.store(out + row, state_m * tl.abs(factor) + tl.log(state_d), mask=stores)
        elif MAP == "logsumexp_jvp":
            tl.store(out + row, state_d, mask=stores)
        elif MAP == "cross_entropy":
            _store_state(row, stores, state_m, state_d, total, out, out_m, out_d)
        if MAP != "cross_entropy" and out_m is not None:
            if MAP == "cross_entropy_gradient":
                state_m = online.shift(state_m)
            _store_state(row, stores, state_m, state_d, total, out_m, out_d, out_total)


@triton.jit
def _state_of_slice(
    k,
    exists,
    base,
    seen_base,
    columns,
    x,
    t,
    where,
    m,
    d,
    scale,
    MAP: tl.constexpr,
    REDUCES: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    WHERE: tl.constexpr,
    SCALED: tl.constexpr,
    RESCALES: tl.constexpr,
    CAP: tl.constexpr,
    TOTAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """The state of the `k`-th slice of each row, and the sum of its scores, tile by tile."""
    state_d = tl.zeros([BLOCK_ROWS], tl.float32)
    state_m, total = state_d, state_d
    if REDUCES == "state":
        state_m = state_d - INF
    for start in range(0, tl.minimum(SLICE, COLS - k * SLICE), BLOCK_COLS):
        first, second, seen, _, _ = _terms(
            columns + (k * SLICE + start), exists, base, seen_base, x, t, where, m, d, scale,
            MAP, REDUCES, COLS, INNER, WHERE, SCALED, RESCALES, CAP,
        )  # fmt: skip
        state_m, state_d, total = _push(state_m, state_d, total, first, second, seen, scale, MAP, REDUCES, TOTAL)
    return state_m, state_d, total


@triton.jit
def _of_row(
    row,
    exists,
    m,
    d,
    t,
    a,
    b,
    c,
    labels,
    MAP: tl.constexpr,
    COLS: tl.constexpr,
    SMOOTHING: tl.constexpr,
    Z_LOSS: tl.constexpr,
):
    """What the derivative of cross-entropy needs of each row: the numbers `a`, `b` and `c`, and the label."""
    label = row
    of_row_a, of_row_b, of_row_c = d, d, d
    if MAP == "cross_entropy_vjp" or MAP == "cross_entropy_gradient":
        label = tl.load(labels + row, mask=exists, other=-1)
    if MAP == "cross_entropy_vjp":
        of_row_a = tl.load(a + row, mask=exists, other=0).to(tl.float32)
        of_row_b = tl.load(b + row, mask=exists, other=0).to(tl.float32)
        of_row_c = tl.load(c + row, mask=exists, other=0).to(tl.float32)
    elif MAP == "cross_entropy_gradient":
        factor = tl.load(t + row, mask=exists, other=0).to(tl.float32)
        lse = online.shift(m) + tl.log(d)
        of_row_a = factor
        if Z_LOSS != 0:
            of_row_a = tl.where(factor != 0, factor * (1 + 2 * Z_LOSS * lse), 0.0)
        of_row_b = (SMOOTHING - 1) * factor
        of_row_c = tl.zeros_like(factor)
        if SMOOTHING != 0:
            of_row_c = (-SMOOTHING / COLS) * factor
    return of_row_a, of_row_b, of_row_c, label


@triton.jit
def _store_state(row, exists, m, d, total, out_m, out_d, out_total):
    """Stores the state of each row, and the sum of its scores if there is a place for it."""
    tl.store(out_m + row, m, mask=exists)
    tl.store(out_d + row, d, mask=exists)
    if out_total is not None:
        tl.store(out_total + row, total, mask=exists)
