"""Samples from rows on Hopper: a kernel that draws, and with filters one that looks at what was drawn, and one that redraws.

1. Elements are compared with the best so far, which is in shared memory. Noise is bounded by the upper half of its random bits,
   which come from a counter (see `noise`), on chip: eight halves from one evaluation. Eight elements of a thread are looked at
   together, by the largest of them and the least of their halves. Only where these allow that one is better four are, and then
   each alone; and where its own half allows it, too, all of its bits are made, and its noise.
2. With `top_p` the maximum of the row is found on the way, and what was drawn is looked at: the weights of all elements are
   added up, and those of what is before it in the order of `top_k`, in a second read. With `min_p` alone the maximum is found
   first, and says what is kept.
3. Where these sums say that it is not kept, the row is drawn again, among what is before it alone, until what is drawn is kept.
   That is exact: what is before a kept entry is kept, and a kept entry that is best among more is best among the kept ones.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.fused import fused, product
from jaxsoftmax._gpu.ptx import utils
from jaxsoftmax._gpu.rows.plan import RowPlan, Storage
from jaxsoftmax.ops.softmax import mosaic_sm90 as softmax_mosaic
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP
from jaxsoftmax.ops.softmax.problem import SoftmaxProblem
from jaxsoftmax.ops.top_k import noise
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import FLAG, start_of
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import Plan, Row, States, blocks_for, copied_of, launched, meet, plan_of, start
from jaxsoftmax.ops.top_k.mosaic_sm90.winner import Winner

_BLOCKS_THAT_REDRAW = 4  # of a row: few rows are
_BLOCKS_AT_A_TIME = 2  # of a multiprocessor, of the kernel that redraws, whose threads have up to 255 registers
_WINDOW = 16  # rows of a thread that looks which are rejected


def sample(target, x, of_rows, return_state):
    """The indices of samples `[rows]` of `x`, `[rows, cols]`, and the states `(m, d)` if asked for.

    `of_rows` has what is `[rows]`, or `[1]` for all, by name: `row`, `key0`, `key1`, and what is not None of `inverse`,
    `noise`, `top_p`, `min_p`.
    """
    if "top_p" in of_rows:
        plan = _drawing_plan(target, x, 1)
        drawn = {name: array for name, array in of_rows.items() if name not in ("top_p", "min_p")}
        index, m = _draw(plan, x, drawn, 1)
        of_rows = of_rows | {"m": m}
        rejected, d = _check(_reading_plan(target, x), x, index, of_rows)
        index = _redraw(target, x, rejected, index, of_rows)
        return [index, m, d] if return_state else [index]
    state = []
    if "min_p" in of_rows:  # with the maximum it is known what is kept
        inverse = jnp.broadcast_to(of_rows["inverse"], x.shape[:1])[:, None] if "inverse" in of_rows else None
        given = {"x": x} if inverse is None else {"x": x, "scale": inverse}
        types = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in given.items()}
        params = {"axes": (1,), "dtype": jnp.float32, "return_state": True}
        plan = softmax_mosaic.plan(SoftmaxProblem(LOGSUMEXP, types, params), target)
        plan = plan.plan if isinstance(plan, Refusal) else plan
        _, *state = plan.run(**given)
        state = [part[:, 0] for part in state]
        of_rows = of_rows | {"m": state[0]}
    parts = 2 if return_state and not state else 0
    found = _draw(_drawing_plan(target, x, parts), x, of_rows, parts)
    return found + state if return_state else found


def _drawing_layout(cols: int, vector: int) -> RowPlan:
    """A sweep has steps of `noise.STRIDE` elements, of which a thread has those that share random words.

    Where rows start inside of a line, threads join vectors of two steps.
    """
    return RowPlan(cols, vector, noise.STRIDE // vector, storage=Storage.NOWHERE, unroll=noise.HALVES, is_stored=False)


def _drawing_plan(target, x, parts: int) -> Plan:
    """A thread has two columns of a step, or four where it would need more than 64 registers with two.

    So all of 512 rows run at a time. `parts` are those of `_draw`.
    """
    rows, cols = x.shape
    layout = _drawing_layout(cols, 2)
    if parts > 1 or (parts and layout.is_joined):
        layout = _drawing_layout(cols, 4)
    return plan_of(target, layout, rows, parts > 1)


def _reading_plan(target, x) -> Plan:
    """A thread has few places, as it has two sums for each."""
    rows, cols = x.shape
    layout = RowPlan(cols, 4, 128, storage=Storage.NOWHERE, unroll=16 // x.dtype.itemsize, is_stored=False)
    return plan_of(target, layout, rows, True, copied_of(layout, x.dtype.itemsize))


def _draw(plan, x, of_rows, parts):
    """The samples, and with 1 for `parts` the maxima of rows, or with 2 their states `(m, d)`."""

    def kernel(x_ref, *refs):
        of_row, (index, *refs) = dict(zip(of_rows, refs, strict=False)), refs[len(of_rows) :]
        state_refs, (best, *scratch) = refs[:parts], refs[parts:]
        row = Row(plan, scratch)
        drawing = _Drawing(row, x_ref, of_row, best)
        states = States(row, scratch[-1], drawing.inverse) if parts else None
        if states is not None:
            states.clear()
        drawing.winner.clear()
        start(plan)
        meet(plan)

        def visit(number, steps, load, in_loop, carry):
            del number, in_loop
            loaded = load()
            tops = drawing.tops(loaded)
            if states is not None:
                carry = states.push(carry, list(map(drawing.held.converted, loaded)), tops[0])
            drawing.draw(steps, load, tops, drawing.min_p_keeps() if "min_p" in of_rows else None)
            return carry

        row.sweep(x_ref, drawing.held, visit, states, ahead=False)  # random words take long enough
        if states is not None and plan.blocks > 1:
            states.send()
        column = drawing.column()

        @pl.when(row.tile.memory.rank == 0)
        def _():
            row.tile.memory.store_row(index, column)
            if states is not None:
                for ref, value in zip(state_refs, states.merged(), strict=True):
                    row.tile.memory.store_row(ref, value)

    results = [jax.ShapeDtypeStruct((plan.rows,), jnp.int32)] + [jax.ShapeDtypeStruct((plan.rows,), jnp.float32)] * parts
    scratch = [Winner.scratch(plan.blocks)]
    return launched("categorical_mosaic", kernel, plan, x.dtype, results, scratch, parts)(x, *of_rows.values())


def _check(plan, x, index, of_rows):
    """Whether what was drawn is rejected, 1 or 0, and the sums of the weights of rows."""
    given = {name: of_rows[name] for name in ("top_p", "min_p", "inverse", "m") if name in of_rows}

    def kernel(x_ref, index, *refs):
        of_row, (rejected, d_ref, *scratch) = dict(zip(given, refs, strict=False)), refs[len(given) :]
        row = Row(plan, scratch)
        memory = row.tile.memory
        look = _Look(row, x_ref, of_row, scratch[-1])
        look.clear()
        start(plan)
        meet(plan)
        entry = look.at(index[memory.row])

        row.sweep(x_ref, look.held, functools.partial(look.visit, entry), look.states)
        is_rejected, d = look.result(entry)

        @pl.when(memory.rank == 0)
        def _():
            memory.store_row(rejected, is_rejected)
            memory.store_row(d_ref, d)

    results = [jax.ShapeDtypeStruct((plan.rows,), dtype) for dtype in (jnp.int32, jnp.float32)]
    return launched("categorical_check_mosaic", kernel, plan, x.dtype, results, [], 2)(x, index, *given.values())


def _redraw(target, x, rejected, index, of_rows):
    """The indices, drawn again where they are rejected: by as many clusters as run at a time, each of which takes its share."""
    rows, cols = x.shape
    layout = _drawing_layout(cols, 4)
    blocks = blocks_for(target, layout, 1, _BLOCKS_THAT_REDRAW)
    clusters = min(rows, _BLOCKS_AT_A_TIME * target.multiprocessors // blocks)
    plan = Plan(layout, blocks, rows, _BLOCKS_THAT_REDRAW, copied_of(layout, x.dtype.itemsize))

    def kernel(x_ref, rejected, index, *refs):
        of_row, (result, best, told, *scratch) = dict(zip(of_rows, refs, strict=False)), refs[len(of_rows) :]
        start(plan)
        cluster = lax.axis_index("block")
        rank = lax.axis_index("rank") if blocks > 1 else jnp.int32(0)
        first = (cluster * blocks + rank) * layout.threads
        _copy_accepted(rejected, index, result, rows, first, clusters * blocks * layout.threads)
        meet(plan)

        def redraw(which):
            row = Row(plan, scratch, which)
            drawing, look = _Drawing(row, x_ref, of_row, best), _Look(row, x_ref, of_row, scratch[-1])

            def again(given):
                _, column = given
                last = look.at(column)

                def visit(number, steps, load, in_loop, carry):
                    del number, in_loop
                    drawing.draw(steps, load, drawing.tops(load()), kept)
                    return carry

                kept = _Kept(_is_after, (last.value, last.column))
                if "min_p" in of_rows:
                    kept = _Kept(_is_after_and_min_p_keeps, (*kept.numbers, *drawing.min_p_keeps().numbers))

                drawing.winner.clear()
                look.clear()
                row.sweep(x_ref, drawing.held, visit, ahead=False)
                column = drawing.column()
                entry = look.at(column)
                row.sweep(x_ref, look.held, functools.partial(look.visit, entry), look.states)
                return look.result(entry)[0], column

            _, column = lax.while_loop(lambda given: given[0] != 0, again, (jnp.int32(1), index[which]))
            pl.when(rank == 0)(lambda: row.tile.memory.store_row(result, column))

        def take(given):
            number, window = given
            which = _rejected_of_window(rejected, told, rows, layout.threads, window, number)
            is_there = which >= 0
            pl.when(is_there)(lambda: redraw(which))
            return number + jnp.where(is_there, clusters, which + 1), window + jnp.where(is_there, 0, _WINDOW * layout.threads)

        lax.while_loop(lambda given: given[1] < rows, take, (cluster, jnp.int32(0)))

    scratch = [Winner.scratch(plan.blocks), plgpu.SMEM((layout.threads // ptx.WARP + 1,), jnp.int32)]
    results = [jax.ShapeDtypeStruct((rows,), jnp.int32)]
    launch = launched("categorical_again_mosaic", kernel, plan, x.dtype, results, scratch, 2, clusters)
    (found,) = launch(x, rejected, index, *of_rows.values())
    return found


def _copy_accepted(rejected, index, result, rows: int, first, step: int) -> None:
    """Stores the indices of rows that are not rejected. A thread has row `first` plus its number, and every `step` rows on."""

    def copy(rejected, index, result, first):
        first = arith.addi(first, utils.thread_idx())
        asm = (
            "{ .reg .pred is; .reg .b32 row, word; .reg .b64 at, place; mov.b32 row, $0;"
            f" next: setp.ge.u32 is, row, {rows}; @is bra end; mul.wide.u32 place, row, 4; add.u64 at, place, $1;"
            " ld.global.b32 word, [at]; setp.eq.u32 is, word, 0; add.u64 at, place, $2; @is ld.global.b32 word, [at];"
            f" add.u64 at, place, $3; @is st.global.b32 [at], word; add.u32 row, row, {step}; bra next;"
            " end: bar.warp.sync 0xffffffff; }"
        )
        places = map(ptx.address_of, (rejected, index, result))
        utils.inline_ptx(asm, first, *places, has_side_effects=True)

    ptx.emit(copy, (rejected, index, result), [first])


def _rejected_of_window(rejected, told, rows: int, threads: int, first, number) -> jax.Array:
    """The row that is the rejected one of this number, counted from 0, in the window of rows that begins with `first`.

    If the window has only n rejected rows, it is -1 - n. All threads of a block have the result; each looks at `_WINDOW` rows.
    """
    warps, own = threads // ptx.WARP, min(_WINDOW, -(-rows // threads))

    def find(rejected, told, first, number):
        load = "mul.wide.u32 at, row, 4; add.u64 at, at, $2; ld.global.b32 word, [at]; setp.ne.u32 is, word, 0;"
        scan = "".join(
            f" shfl.sync.up.b32 word|is, sum, {1 << bit}, 0, 0xffffffff; @is add.u32 sum, sum, word;" for bit in range(5)
        )
        sums = "".join(
            f" ld.shared.b32 word, [$3+{4 * warp}]; add.u32 total, total, word; setp.gt.u32 is, warp, {warp};"
            " @is add.u32 sum, sum, word;"
            for warp in range(warps)
        )
        asm = (
            "{ .reg .pred is; .reg .b32 first, end, row, count, sum, total, word, warp; .reg .b64 at; shr.u32 warp, $1, 5;"
            f" mad.lo.u32 first, $1, {own}, $4; add.u32 end, first, {own}; min.u32 end, end, {rows}; mov.b32 row, first;"
            " mov.b32 count, 0; mov.b32 total, 0;"
            f" next: setp.ge.u32 is, row, end; @is bra counted; {load} @is add.u32 count, count, 1; add.u32 row, row, 1;"
            " bra next;"
            f" counted: bar.warp.sync 0xffffffff; mov.b32 sum, count; {scan} and.b32 word, $1, 31; setp.eq.u32 is, word, 31;"
            f" shl.b32 word, warp, 2; add.u32 word, word, $3; @is st.shared.b32 [word], sum; setp.eq.u32 is, $1, 0;"
            f" @is st.shared.b32 [$3+{4 * warps}], -1; bar.sync 0; {sums} sub.u32 sum, sum, count; sub.u32 sum, $5, sum;"
            " setp.ge.u32 is, sum, count; @is bra done; mov.b32 row, first;"
            f" other: {load} @!is bra further; setp.eq.u32 is, sum, 0; @is bra found; sub.u32 sum, sum, 1;"
            f" further: add.u32 row, row, 1; bra other; found: st.shared.b32 [$3+{4 * warps}], row;"
            f" done: bar.warp.sync 0xffffffff; bar.sync 0; ld.shared.b32 $0, [$3+{4 * warps}]; setp.lt.s32 is, $0, 0;"
            " @is sub.u32 $0, $0, total; bar.sync 0; }"
        )
        operands = utils.thread_idx(), ptx.address_of(rejected), start_of(told), first, number
        return [utils.inline_ptx(asm, *operands, result_types=ptx.integer(32), has_side_effects=True, convergent=True)]

    return ptx.emit(find, (rejected, told), [first, number], results=FLAG)


def _of_row(ref, row):
    """The number of a row in an array that may have one for all."""
    return ref[0 if ref.shape == (1,) else row]


class _Drawing:
    """Draws from a row, or from what is kept of it."""

    def __init__(self, row: Row, x_ref, of_row, best):
        tile, layout = row.tile, row.plan.layout
        self.row, self.of_row = row, {name: _of_row(ref, tile.memory.row) for name, ref in of_row.items()}
        self.inverse, self.noise = self.of_row.get("inverse"), self.of_row.get("noise")
        self.held = tile.memory.read(x_ref, -jnp.inf, jnp.dtype(jnp.float32))
        self.width, self.layout = layout.threads * layout.vector, layout.layout
        self.place = tile.column(0)
        self.winner = Winner(best, layout.cols, row.plan.blocks)

    def column(self) -> jax.Array:
        """Of what was drawn, in all blocks of the cluster."""
        self.winner.share(self.row.tile.memory.rank)
        return self.winner.column()

    def min_p_keeps(self) -> "_Kept":
        """Returns the filter of `min_p`, for a row whose maximum is known."""
        inverse, least = [] if self.inverse is None else [self.inverse], self.of_row["min_p"]
        least = jnp.where(least == least, jnp.minimum(least, 1), -1)  # NaN keeps all
        return _Kept(_min_p_keeps, (self.of_row["m"], least, *inverse))

    def tops(self, loaded) -> tuple[jax.Array, list[jax.Array]]:
        """The maxima at each place, or NaN: of all steps, in float32, and of each group of steps, in the dtype of memory.

        The random halves of the first group are the lower ones of their words, and those of the second the upper ones.
        """
        larger = self.held.maximum if self.held.in_words else functools.partial(functools.reduce, jnp.maximum)
        groups = [larger(loaded[i : i + noise.WORDS]) for i in range(0, len(loaded), noise.WORDS)]
        return self.held.converted(larger(groups)), groups

    def draw(self, steps, load, tops, kept: "_Kept | None" = None) -> None:
        """Draws among the elements of a sweep that `kept` keeps, or among all; `tops` are their maxima.

        What is looked at alone is loaded again, from where it takes no registers.
        """
        winner, inverse = self.winner, [] if self.inverse is None else [self.inverse]

        def at_temperature(scores):
            return fused(_at_temperature, (kept is not None,), [scores, *inverse], self.layout)

        counter = [
            jnp.int32(steps[0] // noise.HALVES * noise.STRIDE),
            *(self.of_row[name] for name in ("row", "key0", "key1")),
        ]
        words = fused(_random_words, (0,), [self.place, *counter], self.layout)

        def compare(index):
            found, column = load(index), jnp.int32(steps[index] * self.width)
            operands = [found, words[index % noise.WORDS], self.place, column, *inverse, *(kept.numbers if kept else ())]
            options = index, kept and kept.test, len(inverse)
            score, upper, columns = fused(_scored, options, operands, self.layout)

            def push():
                operands = [score, upper, self.place, *counter, *([] if self.noise is None else [self.noise])]
                winner.push(fused(_total, (index,), operands, self.layout), columns, self.layout)

            pl.when(winner.may_win(score, upper, self.noise, self.layout) != 0)(push)

        top, groups = tops
        least = ptx.least_halves(words, self.layout)

        @pl.when(winner.may_win(at_temperature(top), jnp.minimum(*least), self.noise, self.layout) != 0)
        def _():
            for number, (group, upper) in enumerate(zip(groups, least, strict=False)):
                score = at_temperature(group)

                @pl.when(winner.may_win(score, upper, self.noise, self.layout) != 0)
                def _(number=number):
                    # A loop would lower a quarter less of the kernel that redraws, but a row drawn anew takes 4% longer.
                    for index in range(len(steps))[number * noise.WORDS :][: noise.WORDS]:
                        compare(index)


# What is computed for each element of a step, by functions that are `fused`.


def _along(number, like):
    return lax.broadcast_in_dim(number, like.shape, ())


@functools.partial(jax.jit, static_argnums=0)
def _random_words(more: int, place, first, row, key0, key1):
    block = (place + first).astype(jnp.uint32) + np.uint32(more)
    row, key0, key1 = (_along(number, place) for number in (row, key0, key1))
    return noise.words_of(block, row, key0, key1, product)


def _at_temperature(is_filtered: bool, scores, inverse=None):
    """Scores that are compared. If they overflow, those that a filter keeps are alike, but more than the others."""
    scores = scores.astype(jnp.float32)
    scores = scores if inverse is None else scores * _along(inverse, scores)
    return jnp.maximum(scores, jnp.finfo(jnp.float32).min) if is_filtered else scores


def _scored(index: int, test, temperatures: int, found, word, place, first, *numbers):
    """Returns the scores that are compared, the upper halves of the random words and the columns of one step of a sweep."""
    found, columns = found.astype(jnp.float32), place + _along(first, place)
    scores = _at_temperature(test is not None, found, *numbers[:temperatures])
    if test is not None:
        scores = jnp.where(test(found, columns, *numbers[temperatures:]), scores, -jnp.inf)
    return scores, noise.half_of(word, index), columns


def _total(index: int, score, upper, place, first, row, key0, key1, amplitude=None):
    """Returns the scores with noise of one step of a sweep."""
    words = _random_words(noise.LOWER, place, first, row, key0, key1)
    noise_of_columns = noise.gumbel(upper | noise.half(words, index) >> np.uint32(16))
    total = score + (noise_of_columns if amplitude is None else noise_of_columns * _along(amplitude, score))
    return jnp.where(total == total, total + 0, jnp.inf)  # NaN before all numbers, and -0 as 0


@dataclass(frozen=True)
class _Kept:
    """A filter of the elements to draw from.

    Attributes:
      test: a function of scores, columns and `numbers`.
      numbers: scalars.
    """

    test: Callable[..., jax.Array]
    numbers: tuple[Any, ...]


def _weights(x, m, inverse=None):
    return online.weights(x, _along(m, x), axis=(), scale=None if inverse is None else _along(inverse, x))


def _min_p_keeps(x, columns, m, least, inverse=None):
    del columns
    return _weights(x, m, inverse) >= _along(least, x)


def _is_after(x, columns, value, column):
    """Tells which elements come before an entry with this value in this column, where 0 and -0 are equal."""
    value, column = _along(value, x), _along(column, x)
    return jnp.logical_or(x > value, jnp.logical_and(x == value, columns < column))


def _is_after_and_min_p_keeps(x, columns, value, column, *of_row):
    return jnp.logical_and(_is_after(x, columns, value, column), _min_p_keeps(x, columns, *of_row))


def _is_after_at(x, place, first, value, column):
    """`_is_after` for the step that begins with the column `first`."""
    return _is_after(x, place + _along(first, x), value, column)


def _is_after_all_of(x, value, are_higher):
    """`_is_after` for columns that are all higher than the entry's if `are_higher`, a scalar, is true, else all lower.

    If the entry is -inf, elements of -inf at lower columns are not counted: they weigh nothing.
    """
    value, are_higher = _along(value, x), _along(are_higher, x)
    bits = lax.bitcast_convert_type(value, jnp.int32)
    next_bits = jnp.where(value == 0, jnp.int32(-(2**31) + 1), bits + jnp.where(value > 0, -1, 1))
    return x > jnp.where(are_higher, value, lax.bitcast_convert_type(next_bits, jnp.float32))


def _added(test, count: int, total, before, x, *numbers):
    """The sums of the weights of all elements, and of those before an entry, with those of a step more.

    Elements are before it for which `test(x, *numbers)` holds, of the first `count` numbers.
    """
    x = x.astype(jnp.float32)
    weight = _weights(x, *numbers[count:])
    counted = jnp.where(test(x, *numbers[:count]), weight, 0)
    return total + weight, before + counted


class _Look:
    """Looks at an entry of a row whose maximum is known: whether the filters reject it, and the sum of the row's weights."""

    def __init__(self, row: Row, x_ref, of_row, ref):
        tile, layout = row.tile, row.plan.layout
        self.row, self.x_ref = row, x_ref
        of_row = {name: _of_row(ref, tile.memory.row) for name, ref in of_row.items()}
        self.top_p, self.min_p = of_row["top_p"], of_row.get("min_p")
        self.held = tile.memory.read(x_ref, -jnp.inf, jnp.dtype(jnp.float32))
        self.width, self.layout, self.place = layout.threads * layout.vector, layout.layout, tile.column(0)
        self.states = States(row, ref, of_row.get("inverse"), of_row["m"])

    def clear(self) -> None:
        ptx.block_barrier()
        self.states.clear()
        ptx.block_barrier()

    def at(self, column) -> "_Entry":
        return _Entry(self.x_ref[self.row.tile.memory.row, column].astype(jnp.float32), column)

    def visit(self, entry: "_Entry", number, steps, load, in_loop, carry):
        """Adds the weights of a sweep's elements to the sums of all, and of what is before the entry."""
        del number

        of_weights = [self.states.m, *([] if self.states.size is None else [self.states.size])]

        def added(is_before, operands, carry):
            for index in range(len(steps)):
                carry = fused(_added, is_before, [*carry, load(index), *operands(index), *of_weights], self.layout)
            return carry

        def by_column(carry):
            def operands(index):
                return self.place, jnp.int32(steps[index] * self.width), entry.value, entry.column

            return added((_is_after_at, 4), operands, carry)

        if not in_loop:
            return by_column(carry)
        # Of whole sweeps, whose elements are in order, almost all lie on one side of the entry.
        first, end = steps[0] * self.width, (steps[-1] + 1) * self.width
        by_score = functools.partial(added, (_is_after_all_of, 2), lambda index: (entry.value, entry.column <= first))
        return lax.cond(jnp.logical_and(first < entry.column, entry.column < end), by_column, by_score, carry)

    def result(self, entry: "_Entry") -> tuple[jax.Array, jax.Array]:
        """1 if it is rejected, else 0, and the sum of weights, in all blocks of the cluster."""
        if self.row.plan.blocks > 1:
            self.states.send()
            ptx.cluster_barrier()
        d, before = self.states.merged()
        is_less = jnp.logical_and(self.top_p < 1, before > 0)
        rejected = jnp.logical_and(is_less, before >= self.top_p * d)
        if self.min_p is not None:
            is_light = online.weights(entry.value, self.states.m, axis=(), scale=self.states.size) < jnp.minimum(self.min_p, 1)
            rejected = jnp.logical_or(rejected, is_light)
        rejected = jnp.logical_and(rejected, d > 0)  # where nothing is to be seen, nothing is better
        return rejected.astype(jnp.int32), d


@dataclass(frozen=True)
class _Entry:
    """An entry of a row: its score and its column, scalars."""

    value: Any
    column: Any
