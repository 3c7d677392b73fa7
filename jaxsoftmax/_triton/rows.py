"""A Triton kernel for the softmax family and cross-entropy: rows of any length, along any axis.

An array is `[outer, cols, inner]`, and a row is what lies along `cols`. A program has a tile `[rows, columns]`, in float32:

1. It loads the tile and lifts it to a state of each row: `(m, d)` of the scores, with their sum where that is asked for; or for
   a derivative its sum along the row.
2. The results are computed from the tile and the state, and stored.

Of rows that are somewhat longer than a tile a program goes through the tiles twice, the second time from the last, as those are
still in the cache. Longer rows are cut into slices, each of which is a program, and the kernel runs twice: once for the states
of the slices, which each program of the second run merges. Neither depends on how many rows there are, so a row always has the
same bits; and no product is added unrounded, which would depend on the lane (`call.call(fuses=False)`). Reads and writes for
each element are those of `ops/softmax/mosaic_sm90.py`, except that rows longer than a tile are read twice where results are as
large and need a state or a sum.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jaxsoftmax._triton import addresses, functions, online

INF = tl.constexpr(float("inf"))


def _name(kernel):
    """The name of a compiled kernel, which profiles show."""
    call = kernel.constants["CALL"]
    return f"{call.map}{'_states' if call.step == 'states' else ''}_triton"


class Rows(NamedTuple):
    """The rows of a tile: which exist, where they start in arrays and in the mask, their saved state and their scale."""

    exists: Any
    base: Any
    seen_base: Any
    m: Any
    d: Any
    scale: Any


class Operands(NamedTuple):
    """The arrays that have something for each element: the scores, or softmax; a tangent or cotangent; the mask."""

    x: Any
    t: Any
    where: Any


# Where things are.


@triton.jit
def _rows_of(block, CALL: tl.constexpr):
    """The outer and the inner index of each row of a block, and whether there is such a row.

    Where `inner` is short, rows are numbered through; else a block is neighbours of one outer index.
    """
    lanes = tl.arange(0, CALL.block_rows)
    if CALL.inner < 16:
        row = block * CALL.block_rows + lanes
        outer, inner, exists = row // CALL.inner, row % CALL.inner, row < CALL.outer * CALL.inner
    else:
        across: tl.constexpr = (CALL.inner + CALL.block_rows - 1) // CALL.block_rows
        inner = block % across * CALL.block_rows + lanes
        outer, exists = block // across + lanes * 0, inner < CALL.inner
    return outer, inner, exists


@triton.jit
def _at(pointer, base, start, columns, CALL: tl.constexpr):
    """Where the elements of a tile are that starts at a column. Only its start needs 64 bits; the rest is the same for all."""
    if CALL.block_cols * CALL.inner >= 2**31:
        columns = columns.to(tl.int64)
    return (pointer + (base + tl.cast(start, tl.int64) * CALL.inner))[:, None] + (columns * CALL.inner)[None, :]


# What is computed of a tile.


@triton.jit
def _terms(of, rows, start, columns, BOUNDED: tl.constexpr, CALL: tl.constexpr):
    """What a map sums along a row and computes its results from, two tiles; which entries are seen, and which exist.

    They are the scores, and those without the mask; softmax and its tangent; or the weights of the saved state, and their
    tangent or the scores. What is not needed of them the compiler leaves out, with its loads. Tiles are BOUNDED where columns
    may be none.
    """
    cols = (start + columns)[None, :]
    ROWS: tl.constexpr = CALL.block_rows
    COLS: tl.constexpr = CALL.block_cols
    inside = tl.broadcast_to(rows.exists[:, None], [ROWS, COLS])
    if BOUNDED:
        inside = inside & (cols < CALL.cols)
    seen = inside
    if CALL.where is not None:
        WHERE: tl.constexpr = CALL.where
        if CALL.wide:
            cols = cols.to(tl.int64)
        seen_at = rows.seen_base[:, None] + addresses.offset(cols, WHERE, 1)
        seen = tl.load(of.where + seen_at, mask=inside, other=0).to(tl.int1)
    x_at, t_at = _at(of.x, rows.base, start, columns, CALL), _at(of.t, rows.base, start, columns, CALL)
    if CALL.map == "softmax_jacobian":
        first = tl.load(x_at, mask=inside, other=0).to(tl.float32)
        second = first
    else:
        first = tl.load(x_at, mask=inside, other=-INF).to(tl.float32)
        if CALL.scale is not None:
            sign = tl.where(rows.scale > 0, 1.0, tl.where(rows.scale < 0, -1.0, rows.scale))
            first = tl.where(inside, first * sign[:, None], -INF)
        if CALL.cap is not None:
            first = tl.where(inside, CALL.cap * functions.tanh(first / CALL.cap), -INF)
        second = first
        if CALL.where is not None:
            first = tl.where(seen, first, -INF)
        if CALL.reduces != "state":
            d = rows.d
            if CALL.where is not None:
                d = tl.where(d != 0, d, 1.0)  # a row with nothing to see
            first = online.weights(first, rows.m[:, None], tl.abs(rows.scale)[:, None]) * (1.0 / d)[:, None]
    if CALL.map == "softmax_jacobian" or CALL.map == "logsumexp_jvp":
        second = tl.load(t_at, mask=inside, other=0).to(tl.float32)
        second = tl.where(first != 0, second, 0.0)
    elif CALL.map == "log_softmax_jvp" or CALL.map == "log_softmax_vjp":
        second = tl.load(t_at, mask=inside, other=0).to(tl.float32)
        if CALL.where is not None:
            second = tl.where(seen, second, 0.0)
    if CALL.rescales:
        second = second * rows.scale[:, None]
    return first, second, seen, inside


@triton.jit
def _summed(first, second, seen, CALL: tl.constexpr):
    """What is summed along the rows of a tile: the terms of a derivative, or the scores."""
    if CALL.reduces == "state":
        return tl.where(seen, first, 0.0)
    elif CALL.map == "log_softmax_vjp":
        return second
    elif CALL.map == "log_softmax_jvp":
        return first * tl.where(first != 0, second, 0.0)
    else:
        return first * second


@triton.jit
def _lift(first, second, seen, scale, CALL: tl.constexpr):
    """The state of a tile, and the sum of the scores; of a derivative the sum is the `d` of a state whose `m` is 0."""
    if CALL.reduces == "state":
        m, d = online.lift(first, tl.abs(scale))
    else:
        d = tl.sum(_summed(first, second, seen, CALL), 1)
        m = tl.zeros_like(d)
    total = d
    if CALL.total:
        total = tl.sum(_summed(first, second, seen, CALL), 1)
    return m, d, total


@triton.jit
def _push(m, d, sums, of, rows, start, columns, BOUNDED: tl.constexpr, CALL: tl.constexpr):
    """The state with one more tile, or what is summed, place by place."""
    first, second, seen, _ = _terms(of, rows, start, columns, BOUNDED, CALL)
    if CALL.reduces == "state":
        m, d = online.push(m, d, first, tl.abs(rows.scale))
    if CALL.reduces == "sum" or CALL.total:
        sums += _summed(first, second, seen, CALL)
    return m, d, sums


@triton.jit
def _state_of_slice(k, of, rows, columns, CALL: tl.constexpr):
    """The state of the `k`-th slice of each row, and the sum of its scores, tile by tile."""
    ROWS: tl.constexpr = CALL.block_rows
    COLS: tl.constexpr = CALL.block_cols
    d, sums = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    m = d
    if CALL.reduces == "state":
        m = d - INF
    whole: tl.constexpr = CALL.cols // CALL.block_cols * CALL.block_cols
    for start in range(k * CALL.slice, tl.minimum((k + 1) * CALL.slice, whole), CALL.block_cols):
        m, d, sums = _push(m, d, sums, of, rows, start, columns, False, CALL)
    if CALL.cols > whole:
        is_last = k == whole // CALL.slice
        if is_last:
            m, d, sums = _push(m, d, sums, of, rows, whole, columns, True, CALL)
    total = d
    if CALL.reduces == "sum" or CALL.total:
        total = tl.sum(sums, 1)
    if CALL.reduces == "sum":
        d = total
    return m, d, total


@triton.jit
def _finished(m, d, CALL: tl.constexpr):
    """The state of a whole row as results have it: log-sum-exp needs `m` finite, the others NaN where it is not.

    `cross_entropy_gradient` needs one for what belongs to a row, and the other for its result.
    """
    if CALL.map == "logsumexp" or CALL.map == "cross_entropy":
        m = online.shift(m)
    elif CALL.map != "cross_entropy_gradient":
        if CALL.where is not None and CALL.map == "log_softmax":
            m = tl.where(m != -INF, m, 0.0)
        d += m - m
    return m, d


@triton.jit
def _store(out, first, second, seen, inside, m, d, of_row, rows, start, columns, CALL: tl.constexpr):
    """Stores the results of a tile, which follow from the state of its rows, or from their sums."""
    if CALL.map == "softmax":
        result = online.weights(first, m[:, None], tl.abs(rows.scale)[:, None]) * (1.0 / d)[:, None]
    elif CALL.map == "log_softmax":
        result = (first - m[:, None]) * tl.abs(rows.scale)[:, None] - tl.log(d)[:, None]
    elif CALL.map == "softmax_jacobian":
        result = tl.where(first != 0, first * (second - d[:, None]), 0.0)
    elif CALL.map == "log_softmax_jvp":
        result = second - d[:, None]
    elif CALL.map == "log_softmax_vjp":
        result = second - first * d[:, None]
    elif CALL.map == "cross_entropy_vjp":
        result = _of_logits(first, second, (start + columns)[None, :], seen, of_row, CALL)
    elif CALL.map == "cross_entropy_gradient":
        p = online.weights(first, m[:, None], tl.abs(rows.scale)[:, None]) * (1.0 / (d + (m - m)))[:, None]
        result = _of_logits(p, second, (start + columns)[None, :], seen, of_row, CALL)
    else:
        result = first * d[:, None]  # of logsumexp_vjp, with the cotangents of the rows
    if CALL.where is not None and CALL.map != "cross_entropy_vjp":
        result = tl.where(seen, result, -INF if CALL.map == "log_softmax" else 0.0)
    tl.store(_at(out, rows.base, start, columns, CALL), result, mask=inside)


@triton.jit
def _of_logits(p, scores, cols, seen, of_row, CALL: tl.constexpr):
    """`(a * p + b * onehot(label) + c) * ds/dx`; where the numbers of a row are 0 nothing of it has an effect."""
    a, b, c, label = of_row
    total = tl.where(a[:, None] != 0, a[:, None] * p, 0.0) + tl.where(seen, c[:, None], 0.0)
    total += tl.where(cols == label[:, None], b[:, None], 0.0)
    if CALL.cap is not None:
        bent = scores / CALL.cap
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
    CALL: tl.constexpr,
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
      CALL: a `Call` of `ops/softmax/triton.py`.
    """
    if out is None:  # it takes the place of `x`
        out = x
    IS_WHOLE: tl.constexpr = CALL.map != "logsumexp" and CALL.map != "logsumexp_jvp" and CALL.map != "cross_entropy"
    program = tl.program_id(0)
    part = program % CALL.programs
    outer, inner, exists = _rows_of(program // CALL.programs, CALL)
    row = outer * CALL.inner + inner
    base = outer.to(tl.int64) * (CALL.cols * CALL.inner) + inner
    columns = tl.arange(0, CALL.block_cols)

    # What each row has.
    seen_base = base
    if CALL.where is not None:
        WHERE: tl.constexpr = CALL.where
        outer_in_mask = outer
        if CALL.wide:
            outer_in_mask = outer.to(tl.int64)
        seen_base = addresses.offset(outer_in_mask, WHERE, 0) + addresses.offset(inner, WHERE, 2)
    ROWS: tl.constexpr = CALL.block_rows
    factor = tl.full([ROWS], 1.0, tl.float32)
    if CALL.scale is not None:
        SCALE: tl.constexpr = CALL.scale
        scale_at = addresses.offset(outer, SCALE, 0) + addresses.offset(inner, SCALE, 1)
        factor = tl.load(scale + scale_at, mask=exists, other=1).to(tl.float32)
    saved_m, saved_d = factor, factor
    if CALL.reduces != "state" and CALL.map != "softmax_jacobian":
        saved_m = tl.load(m + row, mask=exists, other=0)
        saved_d = tl.load(d + row, mask=exists, other=1)
    mine = Rows(exists, base, seen_base, saved_m, saved_d, factor)
    of = Operands(x, t, where)

    if CALL.step == "states":
        state_m, state_d, total = _state_of_slice(part, of, mine, columns, CALL)
        at = row.to(tl.int64) * CALL.count + part
        tl.store(out + at, state_m, mask=exists)
        tl.store(out_m + at, state_d, mask=exists)
        if CALL.total:
            tl.store(out_d + at, total, mask=exists)
    else:
        # Of a row that is longer than a tile the compiler leaves this out.
        first, second, seen, inside = _terms(of, mine, 0, columns, True, CALL)
        state_m, state_d, total = factor, factor, factor
        if CALL.map == "logsumexp_vjp":
            state_d = tl.load(t + row, mask=exists, other=0).to(tl.float32)
        elif CALL.reduces != "nothing":
            if CALL.step == "finish":
                state_m, state_d, total = _merged(slices_m, slices_d, slices_total, mine, row, CALL)
            elif CALL.block_cols >= CALL.cols:
                state_m, state_d, total = _lift(first, second, seen, factor, CALL)
            else:
                state_m, state_d, total = _state_of_slice(0, of, mine, columns, CALL)
            state_m, state_d = _finished(state_m, state_d, CALL)
        if IS_WHOLE:
            of_row = _of_row(row, exists, state_m, state_d, t, a, b, c, labels, CALL)
            if CALL.block_cols >= CALL.cols:
                _store(out, first, second, seen, inside, state_m, state_d, of_row, mine, 0, columns, CALL)
            else:
                low, whole = 0, CALL.cols // CALL.block_cols
                if CALL.programs > 1:
                    low = part * (CALL.slice // CALL.block_cols)
                    whole = tl.minimum(low + CALL.slice // CALL.block_cols, whole)
                if CALL.cols % CALL.block_cols != 0:
                    is_last = part == CALL.programs - 1
                    if is_last:
                        last: tl.constexpr = CALL.cols // CALL.block_cols * CALL.block_cols
                        first, second, seen, inside = _terms(of, mine, last, columns, True, CALL)
                        _store(out, first, second, seen, inside, state_m, state_d, of_row, mine, last, columns, CALL)
                for k in range(0, whole - low):
                    start = (whole - 1 - k) * CALL.block_cols
                    first, second, seen, inside = _terms(of, mine, start, columns, False, CALL)
                    _store(out, first, second, seen, inside, state_m, state_d, of_row, mine, start, columns, CALL)
        stores = tl.where(part == 0, exists, False)
        if CALL.map == "logsumexp":
            tl.store(out + row, state_m * tl.abs(factor) + tl.log(state_d), mask=stores)
        elif CALL.map == "logsumexp_jvp":
            tl.store(out + row, state_d, mask=stores)
        elif CALL.map == "cross_entropy":
            _store_state(row, stores, state_m, state_d, total, out, out_m, out_d)
        if CALL.map != "cross_entropy" and out_m is not None:
            if CALL.map == "cross_entropy_gradient":
                state_m = online.shift(state_m)
            _store_state(row, stores, state_m, state_d, total, out_m, out_d, out_total)


@triton.jit
def _merged(slices_m, slices_d, slices_total, rows, row, CALL: tl.constexpr):
    """The state of rows, and the sum of their scores, from those of their slices."""
    index = tl.arange(0, CALL.slices)[None, :]
    given, place = rows.exists[:, None] & (index < CALL.count), row.to(tl.int64)[:, None] * CALL.count + index
    states_d = tl.load(slices_d + place, mask=given, other=0)
    m, d = online.merge_along(tl.load(slices_m + place, mask=given, other=-INF), states_d, tl.abs(rows.scale))
    total = d
    if CALL.total:
        total = tl.sum(tl.load(slices_total + place, mask=given, other=0), 1)
    if CALL.block_rows == 1:
        # As numbers: of a vector of one the compiler makes a whole tile in the layout of the states, and converts that.
        m, d = tl.full([1], tl.max(m, 0), tl.float32), tl.full([1], tl.sum(d, 0), tl.float32)
        total = tl.full([1], tl.sum(total, 0), tl.float32)
    return m, d, total


@triton.jit
def _of_row(row, exists, m, d, t, a, b, c, labels, CALL: tl.constexpr):
    """What the derivative of cross-entropy needs of each row: the numbers `a`, `b` and `c`, and the label."""
    label = row
    of_row_a, of_row_b, of_row_c = d, d, d
    if CALL.map == "cross_entropy_vjp" or CALL.map == "cross_entropy_gradient":
        label = tl.load(labels + row, mask=exists, other=-1)
    if CALL.map == "cross_entropy_vjp":
        of_row_a = tl.load(a + row, mask=exists, other=0).to(tl.float32)
        of_row_b = tl.load(b + row, mask=exists, other=0).to(tl.float32)
        of_row_c = tl.load(c + row, mask=exists, other=0).to(tl.float32)
    elif CALL.map == "cross_entropy_gradient":
        factor = tl.load(t + row, mask=exists, other=0).to(tl.float32)
        lse = online.shift(m) + tl.log(d)
        of_row_a = factor
        if CALL.z_loss != 0:
            of_row_a = tl.where(factor != 0, factor * (1 + 2 * CALL.z_loss * lse), 0.0)
        of_row_b = (CALL.smoothing - 1) * factor
        of_row_c = tl.zeros_like(factor)
        if CALL.smoothing != 0:
            of_row_c = (-CALL.smoothing / CALL.cols) * factor
    return of_row_a, of_row_b, of_row_c, label


@triton.jit
def _store_state(row, exists, m, d, total, out_m, out_d, out_total):
    """Stores the state of each row, and the sum of its scores if there is a place for it."""
    tl.store(out_m + row, m, mask=exists)
    tl.store(out_d + row, d, mask=exists)
    if out_total is not None:
        tl.store(out_total + row, total, mask=exists)
