"""A Triton kernel for the softmax family and cross-entropy: rows of any length, along any axis.

An array is `[outer, cols, inner]`, and a row lies along `cols`. A program has a tile `[rows, columns]`, in float32:

1. It loads the tile and reduces each row: to a state `(m, d)` of the scores, with their sum if that is asked for, or to the sum
   of a derivative.
2. It computes the results from the tile and the state, and stores them.

A program goes through rows of two tiles twice, the second time from the last tile, which is still in the cache. Longer rows are
cut into slices, one for each program, and the kernel runs twice: once for the states of the slices, which each program of the
second run merges. The number of rows decides neither, so a row always has the same bits.

A kernel reads each operand once and writes each result once, a mask in its own shape; rows longer than a tile are read twice if
their results are as large and need a state or a sum. The constants of a launch, a `RowLaunch`, choose what is computed.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from jaxsoftmax._triton import functions, online

INF = tl.constexpr(float("inf"))


def _name(kernel):
    """Returns the name of a compiled kernel, which profiles show."""
    launch = kernel.constants["LAUNCH"]
    return f"{launch.formula.name}{'_states' if launch.step == 'states' else ''}_triton"


class ProgramRows(NamedTuple):
    """The rows of a program, with a number for each."""

    exists: Any  # False for rows beyond the last one
    row: Any
    base: Any  # place of the first element in arrays that are as large as the rows
    columns: Any  # the columns of a tile, from its first one on
    mask_base: Any  # place of the first element in the mask
    m: Any  # of the saved state
    d: Any
    scale: Any


class RowPointers(NamedTuple):
    """Pointers to arrays with an element for each score: scores or weights, tangents or cotangents, and the mask."""

    x: Any
    t: Any
    where: Any


class LossPointers(NamedTuple):
    """Pointers to one number for each row that the gradient of a loss needs: its factor, or `a`, `b` and `c`, and the label."""

    t: Any
    a: Any
    b: Any
    c: Any
    labels: Any


class RowState(NamedTuple):
    """State of each row or slice, and the sum of its scores, or pointers to these.

    The sum of a derivative is the `d` of a state whose `m` is 0.
    """

    m: Any
    d: Any
    total: Any


class Terms(NamedTuple):
    """A tile as results need it."""

    entries: Any  # scores, `-inf` where the mask hides them; weights `p` if the state is known
    others: Any  # tangents if there are any; else scores without the mask
    seen: Any  # True where there is an element that the mask shows
    inside: Any  # True where there is an element


# Where rows and elements are.


@triton.jit
def _rows_of(block, scale, m, d, LAUNCH: tl.constexpr):
    """Finds the rows of a block, and loads what belongs to each.

    If `inner` is short, rows are numbered through; else a block is neighbours of one outer index.
    """
    FORMULA: tl.constexpr = LAUNCH.formula
    lanes = tl.arange(0, LAUNCH.tiling.rows)
    if LAUNCH.inner < 16:
        row = block * LAUNCH.tiling.rows + lanes
        outer, inner, exists = row // LAUNCH.inner, row % LAUNCH.inner, row < LAUNCH.outer * LAUNCH.inner
    else:
        across: tl.constexpr = (LAUNCH.inner + LAUNCH.tiling.rows - 1) // LAUNCH.tiling.rows
        inner = block % across * LAUNCH.tiling.rows + lanes
        outer, exists = block // across + lanes * 0, inner < LAUNCH.inner
    row = outer * LAUNCH.inner + inner
    base = outer.to(tl.int64) * (LAUNCH.cols * LAUNCH.inner) + inner
    columns = tl.arange(0, LAUNCH.tiling.cols)
    mask_base = base
    if LAUNCH.where is not None:
        WHERE: tl.constexpr = LAUNCH.where
        outer_in_mask = outer
        if LAUNCH.is_wide:
            outer_in_mask = outer.to(tl.int64)
        mask_base = functions.offset(outer_in_mask, WHERE, 0) + functions.offset(inner, WHERE, 2)
    ROWS: tl.constexpr = LAUNCH.tiling.rows
    factor = tl.full([ROWS], 1.0, tl.float32)
    if LAUNCH.scale is not None:
        SCALE: tl.constexpr = LAUNCH.scale
        scale_at = functions.offset(outer, SCALE, 0) + functions.offset(inner, SCALE, 1)
        factor = tl.load(scale + scale_at, mask=exists, other=1).to(tl.float32)
    saved_m, saved_d = factor, factor
    if FORMULA.reduces != "state" and FORMULA.operand == "x":
        saved_m = tl.load(m + row, mask=exists, other=0)
        saved_d = tl.load(d + row, mask=exists, other=1)
    return ProgramRows(exists, row, base, columns, mask_base, saved_m, saved_d, factor)


@triton.jit
def _at(pointer, rows, start, LAUNCH: tl.constexpr):
    """Computes the addresses of the elements of a tile that starts at a column.

    Only its start needs 64 bits, and the rest is the same for all tiles. With full tiles that have no mask this takes 48
    registers in place of 80, and has 1.4 times the speed at 50257 columns.
    """
    columns = rows.columns
    if LAUNCH.tiling.cols * LAUNCH.inner >= 2**31:
        columns = columns.to(tl.int64)
    return (pointer + (rows.base + tl.cast(start, tl.int64) * LAUNCH.inner))[:, None] + (columns * LAUNCH.inner)[None, :]


# What is computed of a tile.


@triton.jit
def _terms(arrays, rows, start, BOUNDED: tl.constexpr, LAUNCH: tl.constexpr):
    """Loads a tile. The compiler leaves out the terms that results do not need, with their loads.

    A tile is BOUNDED if some of its columns may lie beyond the end of a row.
    """
    FORMULA: tl.constexpr = LAUNCH.formula
    cols = (start + rows.columns)[None, :]
    ROWS: tl.constexpr = LAUNCH.tiling.rows
    COLS: tl.constexpr = LAUNCH.tiling.cols
    inside = tl.broadcast_to(rows.exists[:, None], [ROWS, COLS])
    if BOUNDED:
        inside = inside & (cols < LAUNCH.cols)
    seen = inside
    if LAUNCH.where is not None:
        WHERE: tl.constexpr = LAUNCH.where
        if LAUNCH.is_wide:
            cols = cols.to(tl.int64)
        mask_at = rows.mask_base[:, None] + functions.offset(cols, WHERE, 1)
        seen = tl.load(arrays.where + mask_at, mask=inside, other=0).to(tl.int1)
    x_at, t_at = _at(arrays.x, rows, start, LAUNCH), _at(arrays.t, rows, start, LAUNCH)
    if FORMULA.operand == "y":
        entries = tl.load(x_at, mask=inside, other=0).to(tl.float32)
        others = entries
    else:
        others = tl.load(x_at, mask=inside, other=-INF).to(tl.float32)
        if LAUNCH.scale is not None:
            sign = tl.where(rows.scale > 0, 1.0, tl.where(rows.scale < 0, -1.0, rows.scale))
            others = tl.where(inside, others * sign[:, None], -INF)
        if FORMULA.cap is not None:
            others = tl.where(inside, FORMULA.cap * functions.tanh(others / FORMULA.cap), -INF)
        entries = others
        if LAUNCH.where is not None:
            entries = tl.where(seen, entries, -INF)
        if FORMULA.reduces != "state":
            d = rows.d
            if LAUNCH.where is not None:
                d = tl.where(d != 0, d, 1.0)  # a row with nothing to see
            entries = online.weights(entries, rows.m[:, None], tl.abs(rows.scale)[:, None]) * (1.0 / d)[:, None]
    if FORMULA.tangent == "weighted":
        others = tl.load(t_at, mask=inside, other=0).to(tl.float32)
        others = tl.where(entries != 0, others, 0.0)
    elif FORMULA.tangent == "seen":
        others = tl.load(t_at, mask=inside, other=0).to(tl.float32)
        if LAUNCH.where is not None:
            others = tl.where(seen, others, 0.0)
    if FORMULA.rescales:
        others = others * rows.scale[:, None]
    return Terms(entries, others, seen, inside)


@triton.jit
def _summands(terms, FORMULA: tl.constexpr):
    """Returns the terms of the sum along a row: those of a derivative, or the scores."""
    if FORMULA.reduces == "state":
        return tl.where(terms.seen, terms.entries, 0.0)
    elif FORMULA.summand == "t":
        return terms.others
    elif FORMULA.tangent == "seen":  # a tangent whose weight is 0 may be NaN
        return terms.entries * tl.where(terms.entries != 0, terms.others, 0.0)
    else:
        return terms.entries * terms.others


@triton.jit
def _lift(terms, scale, FORMULA: tl.constexpr):
    """Computes the state of each row of a tile, and the sum of its scores."""
    if FORMULA.reduces == "state":
        m, d = online.lift(terms.entries, tl.abs(scale))
    else:
        d = tl.sum(_summands(terms, FORMULA), 1)
        m = tl.zeros_like(d)
    total = d
    if FORMULA.has_total:
        total = tl.sum(_summands(terms, FORMULA), 1)
    return m, d, total


@triton.jit
def _push(m, d, sums, arrays, rows, start, BOUNDED: tl.constexpr, LAUNCH: tl.constexpr):
    """Merges one more tile into the state, and adds its terms to the sums, place by place."""
    FORMULA: tl.constexpr = LAUNCH.formula
    terms = _terms(arrays, rows, start, BOUNDED, LAUNCH)
    if FORMULA.reduces == "state":
        m, d = online.push(m, d, terms.entries, tl.abs(rows.scale))
    if FORMULA.reduces == "sum" or FORMULA.has_total:
        sums += _summands(terms, FORMULA)
    return m, d, sums


@triton.jit
def _state_of_slice(k, arrays, rows, LAUNCH: tl.constexpr):
    """Computes the state of the `k`-th slice of each row, and the sum of its scores, tile by tile."""
    FORMULA: tl.constexpr = LAUNCH.formula
    ROWS: tl.constexpr = LAUNCH.tiling.rows
    COLS: tl.constexpr = LAUNCH.tiling.cols
    SLICE: tl.constexpr = LAUNCH.tiling.slice
    d, sums = tl.zeros([ROWS], tl.float32), tl.zeros([ROWS, COLS], tl.float32)
    m = d
    if FORMULA.reduces == "state":
        m = d - INF
    whole: tl.constexpr = LAUNCH.cols // COLS * COLS
    for start in range(k * SLICE, tl.minimum((k + 1) * SLICE, whole), COLS):
        m, d, sums = _push(m, d, sums, arrays, rows, start, False, LAUNCH)
    if LAUNCH.cols > whole:
        is_last = k == whole // SLICE
        if is_last:
            m, d, sums = _push(m, d, sums, arrays, rows, whole, True, LAUNCH)
    total = d
    if FORMULA.reduces == "sum" or FORMULA.has_total:
        total = tl.sum(sums, 1)
    if FORMULA.reduces == "sum":
        d = total
    return m, d, total


# What is computed of whole rows.


@triton.jit
def _merged_slices(slices, rows, LAUNCH: tl.constexpr):
    """Merges the states of the slices of each row, and adds up the sums of their scores."""
    index = tl.arange(0, LAUNCH.n_slices_padded)[None, :]
    exists, at = rows.exists[:, None] & (index < LAUNCH.n_slices), rows.row.to(tl.int64)[:, None] * LAUNCH.n_slices + index
    d_of_slices = tl.load(slices.d + at, mask=exists, other=0)
    m, d = online.merge_along(tl.load(slices.m + at, mask=exists, other=-INF), d_of_slices, tl.abs(rows.scale))
    total = d
    if LAUNCH.formula.has_total:
        total = tl.sum(tl.load(slices.total + at, mask=exists, other=0), 1)
    if LAUNCH.tiling.rows == 1:
        # The state of one row is made a number before it meets a tile. Left a vector of one, it was broadcast in the layout of
        # the merged states, and the tile converted to it through shared memory, with 63 barriers: 4 rows of 131072 took 45 us
        # in place of 4.
        m, d = tl.full([1], tl.max(m, 0), tl.float32), tl.full([1], tl.sum(d, 0), tl.float32)
        total = tl.full([1], tl.sum(total, 0), tl.float32)
    return m, d, total


@triton.jit
def _finished(m, d, LAUNCH: tl.constexpr):
    """Returns the state of a whole row as results need it.

    The log-sum-exp needs a finite `m`. The others are NaN if it is not finite. The gradient of a loss needs both: one for the
    numbers of its rows, and the other for its result.
    """
    RESULT: tl.constexpr = LAUNCH.formula.result
    if RESULT == "m + log d" or RESULT == "m, d":
        m = online.shift(m)
    elif RESULT != "a * p + b * onehot + c":
        if LAUNCH.where is not None and RESULT == "log p":
            m = tl.where(m != -INF, m, 0.0)
        d += m - m
    return m, d


@triton.jit
def _loss_factors(rows, state, pointers, LAUNCH: tl.constexpr):
    """Returns `a`, `b`, `c` and the label of each row, from which the gradient of a loss follows.

    If the state of the row was saved, they are operands. Else they follow from the state and the loss.
    """
    FORMULA: tl.constexpr = LAUNCH.formula
    label = rows.row
    a, b, c = state.d, state.d, state.d
    if FORMULA.result == "a * p + b * onehot + c":
        label = tl.load(pointers.labels + rows.row, mask=rows.exists, other=-1)
        if FORMULA.reduces == "nothing":
            a = tl.load(pointers.a + rows.row, mask=rows.exists, other=0).to(tl.float32)
            b = tl.load(pointers.b + rows.row, mask=rows.exists, other=0).to(tl.float32)
            c = tl.load(pointers.c + rows.row, mask=rows.exists, other=0).to(tl.float32)
        else:
            factor = tl.load(pointers.t + rows.row, mask=rows.exists, other=0).to(tl.float32)
            lse = online.shift(state.m) + tl.log(state.d)
            a = factor
            if FORMULA.z_loss != 0:
                a = tl.where(factor != 0, factor * (1 + 2 * FORMULA.z_loss * lse), 0.0)
            b = (FORMULA.smoothing - 1) * factor
            c = tl.zeros_like(factor)
            if FORMULA.smoothing != 0:
                c = (-FORMULA.smoothing / LAUNCH.cols) * factor
    return a, b, c, label


# What is stored.


@triton.jit
def _store_tile(out, terms, state, factors, rows, start, LAUNCH: tl.constexpr):
    """Stores the results of a tile, which follow from the state of its rows, or from their sums."""
    FORMULA: tl.constexpr = LAUNCH.formula
    RESULT: tl.constexpr = FORMULA.result
    m, d = state.m, state.d
    if RESULT == "p":
        result = online.weights(terms.entries, m[:, None], tl.abs(rows.scale)[:, None]) * (1.0 / d)[:, None]
    elif RESULT == "log p":
        result = (terms.entries - m[:, None]) * tl.abs(rows.scale)[:, None] - tl.log(d)[:, None]
    elif RESULT == "p * (t - sum)":
        result = tl.where(terms.entries != 0, terms.entries * (terms.others - d[:, None]), 0.0)
    elif RESULT == "t - sum":
        result = terms.others - d[:, None]
    elif RESULT == "t - p * sum":
        result = terms.others - terms.entries * d[:, None]
    elif RESULT == "p * t":
        result = terms.entries * d[:, None]  # `d` holds the cotangents of the rows
    else:
        p = terms.entries
        if FORMULA.reduces == "state":
            p = online.weights(p, m[:, None], tl.abs(rows.scale)[:, None]) * (1.0 / (d + (m - m)))[:, None]
        result = _loss_gradient(p, terms, (start + rows.columns)[None, :], factors, FORMULA)
    if LAUNCH.where is not None and RESULT != "a * p + b * onehot + c":
        result = tl.where(terms.seen, result, -INF if RESULT == "log p" else 0.0)
    tl.store(_at(out, rows, start, LAUNCH), result, mask=terms.inside)


@triton.jit
def _loss_gradient(p, terms, cols, factors, FORMULA: tl.constexpr):
    """Computes `(a * p + b * onehot(label) + c) * ds/dx`. A row whose `a`, `b` and `c` are 0 has no effect, even with NaN."""
    a, b, c, label = factors
    result = tl.where(a[:, None] != 0, a[:, None] * p, 0.0) + tl.where(terms.seen, c[:, None], 0.0)
    result += tl.where(cols == label[:, None], b[:, None], 0.0)
    if FORMULA.cap is not None:
        bent = terms.others / FORMULA.cap
        result = tl.where(result != 0, result * (1.0 - bent * bent), 0.0)
    return result


@triton.jit
def _store_tiles(out, arrays, state, factors, rows, part, LAUNCH: tl.constexpr):
    """Stores the results of rows longer than a tile, or of the program's slice of them, from the last tile on."""
    COLS: tl.constexpr = LAUNCH.tiling.cols
    SLICE: tl.constexpr = LAUNCH.tiling.slice
    low, whole = 0, LAUNCH.cols // COLS
    if LAUNCH.programs > 1:
        low = part * (SLICE // COLS)
        whole = tl.minimum(low + SLICE // COLS, whole)
    if LAUNCH.cols % COLS != 0:
        is_last = part == LAUNCH.programs - 1
        if is_last:
            last: tl.constexpr = LAUNCH.cols // COLS * COLS
            terms = _terms(arrays, rows, last, True, LAUNCH)
            _store_tile(out, terms, state, factors, rows, last, LAUNCH)
    for k in range(0, whole - low):
        start = (whole - 1 - k) * COLS
        terms_of_tile = _terms(arrays, rows, start, False, LAUNCH)
        _store_tile(out, terms_of_tile, state, factors, rows, start, LAUNCH)


@triton.jit
def _store_state(row, exists, state, pointers):
    """Stores the state of each row, and the sum of its scores if there is a place for it."""
    tl.store(pointers.m + row, state.m, mask=exists)
    tl.store(pointers.d + row, state.d, mask=exists)
    if pointers.total is not None:
        tl.store(pointers.total + row, state.total, mask=exists)


@triton.jit
def _store_numbers(out, states_out, state, rows, part, LAUNCH: tl.constexpr):
    """Stores the results that are one number for each row, from the first of the programs that share the rows."""
    RESULT: tl.constexpr = LAUNCH.formula.result
    stores = tl.where(part == 0, rows.exists, False)
    if RESULT == "m + log d":
        tl.store(out + rows.row, state.m * tl.abs(rows.scale) + tl.log(state.d), mask=stores)
    elif RESULT == "sum":
        tl.store(out + rows.row, state.d, mask=stores)
    elif RESULT == "m, d":
        _store_state(rows.row, stores, state, RowState(out, states_out.m, states_out.d))
    if RESULT != "m, d" and states_out.m is not None:
        m = state.m
        if RESULT == "a * p + b * onehot + c":
            m = online.shift(m)
        _store_state(rows.row, stores, RowState(m, state.d, state.total), states_out)


# The kernel.


@triton.jit(repr=_name)
def rows(
    x, t, m, d, where, scale, a, b, c, labels, slices_m, slices_d, slices_total, out, out_m, out_d, out_total,
    LAUNCH: tl.constexpr,
):  # fmt: skip
    """Computes the formula of LAUNCH, a `RowLaunch`. An operand that the formula does not have is any array.

    `x` holds scores or weights. `t` holds tangents or cotangents; for "p * t", and for the gradient of a loss from its state,
    one number for each row. `m` and `d` are the saved state of each row, and `a`, `b`, `c` its numbers for the gradient of a
    loss from a saved state. For the step "finish" the states of the slices, and sums of their scores, are `[rows, slices]`.

    `out` is the result. If that is a state, as in the step "states", it is its `m`, and `d` and the sum of the scores follow.
    Else the others are the state of each row, and the sum of its scores, or None.
    """
    FORMULA: tl.constexpr = LAUNCH.formula
    if out is None:  # it takes the place of `x`
        out = x
    program = tl.program_id(0)
    part = program % LAUNCH.programs
    block = _rows_of(program // LAUNCH.programs, scale, m, d, LAUNCH)
    arrays = RowPointers(x, t, where)
    if LAUNCH.step == "states":
        state_m, state_d, total = _state_of_slice(part, arrays, block, LAUNCH)
        at = block.row.to(tl.int64) * LAUNCH.n_slices + part
        tl.store(out + at, state_m, mask=block.exists)
        tl.store(out_m + at, state_d, mask=block.exists)
        if FORMULA.has_total:
            tl.store(out_d + at, total, mask=block.exists)
    else:
        # The compiler leaves this out if rows are longer than a tile.
        terms = _terms(arrays, block, 0, True, LAUNCH)
        state_m, state_d, total = block.scale, block.scale, block.scale
        if FORMULA.result == "p * t":
            state_d = tl.load(t + block.row, mask=block.exists, other=0).to(tl.float32)
            if FORMULA.rescales:
                state_d = state_d * block.scale
        elif FORMULA.reduces != "nothing":
            if LAUNCH.step == "finish":
                state_m, state_d, total = _merged_slices(RowState(slices_m, slices_d, slices_total), block, LAUNCH)
            elif LAUNCH.is_one_tile:
                state_m, state_d, total = _lift(terms, block.scale, FORMULA)
            else:
                state_m, state_d, total = _state_of_slice(0, arrays, block, LAUNCH)
            state_m, state_d = _finished(state_m, state_d, LAUNCH)
        state = RowState(state_m, state_d, total)
        if not FORMULA.is_of_rows:
            factors = _loss_factors(block, state, LossPointers(t, a, b, c, labels), LAUNCH)
            if LAUNCH.is_one_tile:
                _store_tile(out, terms, state, factors, block, 0, LAUNCH)
            else:
                _store_tiles(out, arrays, state, factors, block, part, LAUNCH)
        _store_numbers(out, RowState(out_m, out_d, out_total), state, block, part, LAUNCH)
