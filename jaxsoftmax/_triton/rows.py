"""A Triton kernel for the softmax family: rows of any length, along any axis.

An array is `[outer, cols, inner]`, and a row is what lies along `cols`. A program has a tile `[rows, columns]`, in float32:

1. It loads the tile and lifts it to a state of each row: `(m, d)` of the scores, or for a derivative its sum along the row.
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

from jaxsoftmax._triton import addresses, online

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
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    WHERE: tl.constexpr,
    SCALED: tl.constexpr,
    RESCALES: tl.constexpr,
):
    """What a map sums along a row and computes its results from, two tiles; which entries are seen, which exist, and where.

    They are the scores twice; softmax and its tangent; or the weights of the saved state and their tangent. What is not needed
    of them the compiler leaves out, with its loads.
    """
    inside = exists[:, None] & (cols < COLS)[None, :]
    at = base[:, None] + (cols * INNER)[None, :]
    seen = inside
    if WHERE is not None:
        seen_at = seen_base[:, None] + addresses.offset(cols, WHERE, 1)[None, :]
        seen = tl.load(where + seen_at, mask=inside, other=0).to(tl.int1)
    if MAP == "softmax_jacobian":
        first = tl.load(x + at, mask=inside, other=0).to(tl.float32)
    else:
        first = tl.load(x + at, mask=inside, other=-INF).to(tl.float32)
        if SCALED:
            sign = tl.where(scale > 0, 1.0, tl.where(scale < 0, -1.0, scale))
            first = tl.where(inside, first * sign[:, None], -INF)
        if WHERE is not None:
            first = tl.where(seen, first, -INF)
        if MAP != "softmax" and MAP != "log_softmax" and MAP != "logsumexp":
            if WHERE is not None:
                d = tl.where(d != 0, d, 1.0)  # a row with nothing to see
            first = online.weights(first, m[:, None], tl.abs(scale)[:, None]) * (1.0 / d)[:, None]
    second = first
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
def _push(m, d, first, second, scale, MAP: tl.constexpr):
    """The state with one more tile; of a derivative the sum, which is the `d` of a state whose `m` is 0."""
    if MAP == "softmax" or MAP == "log_softmax" or MAP == "logsumexp":
        m, d = online.push(m, d, first, tl.abs(scale))
    else:
        d += _sum(first, second, MAP)
    return m, d


@triton.jit
def _lift(first, second, scale, MAP: tl.constexpr):
    """The state of a tile."""
    if MAP == "softmax" or MAP == "log_softmax" or MAP == "logsumexp":
        m, d = online.lift(first, tl.abs(scale))
    else:
        d = _sum(first, second, MAP)
        m = tl.zeros_like(d)
    return m, d


@triton.jit
def _finished(m, d, MAP: tl.constexpr, MASKED: tl.constexpr):
    """The state of a whole row as results have it: log-sum-exp needs `m` finite, the others NaN where it is not."""
    if MAP == "logsumexp":
        m = online.shift(m)
    else:
        if MASKED and MAP == "log_softmax":
            m = tl.where(m != -INF, m, 0.0)
        d += m - m
    return m, d


@triton.jit
def _result(first, second, seen, m, d, scale, MAP: tl.constexpr, MASKED: tl.constexpr):
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
    else:
        result = first * d[:, None]  # of logsumexp_vjp, with the cotangents of the rows
    if MASKED:
        result = tl.where(seen, result, -INF if MAP == "log_softmax" else 0.0)
    return result


# The kernel.


@triton.jit(repr=_name)
def rows(
    x,
    t,
    m,
    d,
    where,
    scale,
    slices_m,
    slices_d,
    out,
    out_m,
    out_d,
    MAP: tl.constexpr,
    STEP: tl.constexpr,
    OUTER: tl.constexpr,
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    WHERE: tl.constexpr,
    SCALE: tl.constexpr,
    RESCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SLICE: tl.constexpr,
    SLICES: tl.constexpr,
    PROGRAMS: tl.constexpr,
    WIDE: tl.constexpr,
):
    """A map of the softmax family.

    Args:
      x: the scores, or softmax. What follows is `x` once more where a map has not got it.
      t: a tangent or cotangent.
      m: the saved state, of each row.
      d: likewise.
      where: the mask.
      scale: of the scores.
      slices_m: for the step "finish" the states of the slices, `[rows, slices]`.
      slices_d: likewise.
      out: the result; for the step "states" the `m` of the slices.
      out_m: the state of each row, or None; for the step "states" the `d` of the slices.
      out_d: likewise; for the step "states" None.
      MAP: the name of the primitive.
      STEP: "all"; or, in two runs, "states" and "finish".
      OUTER: the size of the first of the three axes of `x`.
      COLS: of the second.
      INNER: of the third.
      WHERE: None, or for each of the three axes where the mask has what belongs to an index, as `addresses.offset` says.
      SCALE: None, or the same for the scale, of the first and the last axis.
      RESCALES: whether tangents are multiplied with the scale.
      BLOCK_ROWS: rows of a tile.
      BLOCK_COLS: columns of a tile.
      SLICE: columns of a slice, a multiple of `BLOCK_COLS`, where rows are longer than a tile.
      SLICES: a power of two that is no less than the number of slices.
      PROGRAMS: how many programs share the rows of a tile: 1, or as many as there are slices.
      WIDE: whether offsets need 64 bits.
    """
    MASKED: tl.constexpr = WHERE is not None
    SCALED: tl.constexpr = SCALE is not None
    IS_FORWARD: tl.constexpr = MAP == "softmax" or MAP == "log_softmax" or MAP == "logsumexp"
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
    if not IS_FORWARD and MAP != "softmax_jacobian":
        saved_m = tl.load(m + row, mask=exists, other=0)
        saved_d = tl.load(d + row, mask=exists, other=1)

    if STEP == "states":
        state_m, state_d = _state_of_slice(
            part, exists, base, seen_base, columns, x, t, where, saved_m, saved_d, factor,
            MAP, COLS, INNER, WHERE, SCALED, RESCALES, BLOCK_ROWS, BLOCK_COLS, SLICE,
        )  # fmt: skip
        tl.store(out + (row * COUNT + part), state_m, mask=exists)
        tl.store(out_m + (row * COUNT + part), state_d, mask=exists)
    elif BLOCK_COLS >= COLS:
        first, second, seen, inside, at = _terms(
            columns, exists, base, seen_base, x, t, where, saved_m, saved_d, factor, MAP, COLS, INNER, WHERE, SCALED, RESCALES
        )
        if MAP == "logsumexp_vjp":
            state_m, state_d = factor, tl.load(t + row, mask=exists, other=0).to(tl.float32)
        else:
            state_m, state_d = _lift(first, second, factor, MAP)
            state_m, state_d = _finished(state_m, state_d, MAP, MASKED)
        if MAP != "logsumexp" and MAP != "logsumexp_jvp":
            tl.store(out + at, _result(first, second, seen, state_m, state_d, factor, MAP, MASKED), mask=inside)
        _store_rows(row, exists, state_m, state_d, factor, out, out_m, out_d, MAP)
    else:
        if MAP == "logsumexp_vjp":
            state_m, state_d = factor, tl.load(t + row, mask=exists, other=0).to(tl.float32)
        else:
            index = tl.arange(0, SLICES)[None, :]
            if STEP == "finish":
                given = exists[:, None] & (index < COUNT)
                states_m = tl.load(slices_m + (row[:, None] * COUNT + index), mask=given, other=-INF)
                states_d = tl.load(slices_d + (row[:, None] * COUNT + index), mask=given, other=0)
            else:
                states_m = tl.full([BLOCK_ROWS, SLICES], -INF, tl.float32)
                states_d = tl.zeros([BLOCK_ROWS, SLICES], tl.float32)
                for k in range(COUNT):
                    slice_m, slice_d = _state_of_slice(
                        k, exists, base, seen_base, columns, x, t, where, saved_m, saved_d, factor,
                        MAP, COLS, INNER, WHERE, SCALED, RESCALES, BLOCK_ROWS, BLOCK_COLS, SLICE,
                    )  # fmt: skip
                    states_m = tl.where(index == k, slice_m[:, None], states_m)
                    states_d = tl.where(index == k, slice_d[:, None], states_d)
            state_m, state_d = online.merge_along(states_m, states_d, tl.abs(factor))
            state_m, state_d = _finished(state_m, state_d, MAP, MASKED)
        if MAP != "logsumexp" and MAP != "logsumexp_jvp":
            WIDTH: tl.constexpr = COLS if PROGRAMS == 1 else SLICE
            TILES: tl.constexpr = (WIDTH + BLOCK_COLS - 1) // BLOCK_COLS
            for k in range(TILES):
                first, second, seen, inside, at = _terms(
                    columns + (part * WIDTH + (TILES - 1 - k) * BLOCK_COLS), exists, base, seen_base, x, t, where, saved_m,
                    saved_d, factor, MAP, COLS, INNER, WHERE, SCALED, RESCALES,
                )  # fmt: skip
                tl.store(out + at, _result(first, second, seen, state_m, state_d, factor, MAP, MASKED), mask=inside)
        _store_rows(row, exists & (part == 0), state_m, state_d, factor, out, out_m, out_d, MAP)


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
    COLS: tl.constexpr,
    INNER: tl.constexpr,
    WHERE: tl.constexpr,
    SCALED: tl.constexpr,
    RESCALES: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
    SLICE: tl.constexpr,
):
    """The state of the `k`-th slice of each row, tile by tile."""
    state_d = tl.zeros([BLOCK_ROWS], tl.float32)
    if MAP == "softmax" or MAP == "log_softmax" or MAP == "logsumexp":
        state_m = state_d - INF
    else:
        state_m = state_d
    for start in range(0, tl.minimum(SLICE, COLS - k * SLICE), BLOCK_COLS):
        first, second, _, _, _ = _terms(
            columns + (k * SLICE + start), exists, base, seen_base, x, t, where, m, d, scale,
            MAP, COLS, INNER, WHERE, SCALED, RESCALES,
        )  # fmt: skip
        state_m, state_d = _push(state_m, state_d, first, second, scale, MAP)
    return state_m, state_d


@triton.jit
def _store_rows(row, exists, m, d, scale, out, out_m, out_d, MAP: tl.constexpr):
    """Stores what is one number for each row: a result, and the state."""
    if MAP == "logsumexp":
        tl.store(out + row, m * tl.abs(scale) + tl.log(d), mask=exists)
    if MAP == "logsumexp_jvp":
        tl.store(out + row, d, mask=exists)
    if out_m is not None:
        tl.store(out_m + row, m, mask=exists)
        tl.store(out_d + row, d, mask=exists)
