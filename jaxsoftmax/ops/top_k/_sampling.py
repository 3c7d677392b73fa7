"""Samples from rows on Hopper: a kernel that draws, and with filters one that looks at what was drawn, and one that redraws.

1. Elements are compared with the best so far, which is in shared memory. Noise is bounded by the upper half of its random bits,
   which come from a counter (see `_noise`), on chip: eight halves from one evaluation. Eight elements of a thread are looked at
   together, by the largest of them and the least of their halves. Only where these allow that one is better each is looked at
   alone, and where its own half allows it, too, all of its bits are made, and its noise.
2. With `top_p` what was drawn is looked at: the weights of what is before it in the order of `top_k` are added up, together
   with the state of the row, in a second read. With `min_p` alone the maximum is found first, and says what is kept.
3. Where that sum says that it is not kept, the row is drawn again, among what is before it alone, until what is drawn is kept.
   That is exact: what is before a kept entry is kept, and a kept entry that is best among more is best among the kept ones.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.layout import Config, RowLayout
from jaxsoftmax.ops.softmax.mosaic import logsumexp
from jaxsoftmax.ops.top_k import _noise
from jaxsoftmax.ops.top_k._sweeps import Plan, Row, States, blocks_for, launched, plan_of
from jaxsoftmax.ops.top_k._winner import Winner

_BLOCKS_THAT_REDRAW = 4  # of a row: few rows are


def sample(target, x, of_rows, return_state):
    """The indices of samples `[rows]` of `x`, `[rows, cols]`, and the states `(m, d)` if asked for.

    `of_rows` has what is `[rows]` by name: `row`, `key0`, `key1`, and what is not None of `inverse`, `noise`, `top_p`, `min_p`.
    """
    plan = _drawing_plan(target, x, return_state and not {"top_p", "min_p"} & of_rows.keys())
    if "top_p" in of_rows:
        looked_at = {name: of_rows[name] for name in ("top_p", "min_p", "inverse") if name in of_rows}
        drawn = {name: array for name, array in of_rows.items() if name not in ("top_p", "min_p")}
        (index,) = _draw(plan, x, drawn, False)
        rejected, m, d = _check(_reading_plan(target, x), x, index, looked_at)
        blocks = blocks_for(target, plan.layout, 1, _BLOCKS_THAT_REDRAW)
        again = Plan(plan.layout, blocks, plan.rows, slices=_BLOCKS_THAT_REDRAW)
        index = _redraw(again, x, rejected, index, of_rows | {"m": m})
    elif "min_p" in of_rows:  # with the maximum it is known what is kept
        inverse = of_rows["inverse"][:, None] if "inverse" in of_rows else None
        _, m, d = logsumexp(x, None, inverse, axes=(1,), dtype=jnp.float32, return_state=True, target=target)
        (index,) = _draw(plan, x, of_rows | {"m": m[:, 0]}, False)
    else:
        return _draw(plan, x, of_rows, return_state)
    return [index, m.reshape(-1), d.reshape(-1)] if return_state else [index]


def _drawing_plan(target, x, is_lifted) -> Plan:
    """A sweep has steps of `_noise.STRIDE` elements, of which a thread has those that share random words.

    Where rows start inside of a line, threads join vectors of two steps.
    """
    rows, cols = x.shape
    vector = 4
    layout = RowLayout(cols, Config(vector, _noise.STRIDE // vector, unroll=_noise.HALVES), stored=False)
    return plan_of(target, layout, rows, is_lifted)


def _reading_plan(target, x) -> Plan:
    """A thread has few places, as it has three numbers for each."""
    rows, cols = x.shape
    layout = RowLayout(cols, Config(4, 128, unroll=16 // x.dtype.itemsize), stored=False)
    return plan_of(target, layout, rows, True)


def _draw(plan, x, of_rows, return_state):
    def kernel(x_ref, *refs):
        of_row, (index, *refs) = dict(zip(of_rows, refs, strict=False)), refs[len(of_rows) :]
        state_refs, (best, *scratch) = refs[: 2 * return_state], refs[2 * return_state :]
        row = Row(plan, scratch)
        drawing = _Drawing(row, x_ref, of_row, best)
        states = States(row, scratch[-1], drawing.size) if return_state else None
        if states is not None:
            states.clear()
        drawing.clear()
        row.start()
        row.meet()
        drawing.draw(states, drawing.min_p_keeps if "min_p" in of_rows else None)
        if states is not None and plan.blocks > 1:
            states.send()
        column = drawing.column()

        @pl.when(row.tile.memory.rank == 0)
        def _():
            row.tile.memory.store_row(index, column)
            if states is not None:
                for ref, value in zip(state_refs, states.merged(), strict=True):
                    row.tile.memory.store_row(ref, value)

    results = [jax.ShapeDtypeStruct((plan.rows,), jnp.int32)] + [jax.ShapeDtypeStruct((plan.rows,), jnp.float32)] * (
        2 * return_state
    )
    scratch = [Winner.scratch(plan.blocks)]
    return launched("categorical_mosaic", kernel, plan, results, scratch, int(return_state))(x, *of_rows.values())


def _check(plan, x, index, filters):
    """Whether what was drawn is rejected, 1 or 0, and the states of rows."""

    def kernel(x_ref, index, *refs):
        of_row, (rejected, m_ref, d_ref, *scratch) = dict(zip(filters, refs, strict=False)), refs[len(filters) :]
        row = Row(plan, scratch)
        memory = row.tile.memory
        look = _Look(row, x_ref, of_row, scratch[-1])
        is_rejected, m, d = look(index[memory.row])

        @pl.when(memory.rank == 0)
        def _():
            memory.store_row(rejected, is_rejected)
            memory.store_row(m_ref, m)
            memory.store_row(d_ref, d)

    results = [jax.ShapeDtypeStruct((plan.rows,), dtype) for dtype in (jnp.int32, jnp.float32, jnp.float32)]
    return launched("categorical_check_mosaic", kernel, plan, results, [], 2)(x, index, *filters.values())


def _redraw(plan, x, rejected, index, of_rows):
    """The indices, drawn again where they are rejected."""

    def kernel(x_ref, rejected, index, *refs):
        of_row, (result, best, *scratch) = dict(zip(of_rows, refs, strict=False)), refs[len(of_rows) :]
        row = Row(plan, scratch)
        memory = row.tile.memory
        first = index[memory.row]

        @pl.when(rejected[memory.row] == 0)
        def _():
            memory.store_row(result, first)

        @pl.when(rejected[memory.row] != 0)
        def _():
            drawing, look = _Drawing(row, x_ref, of_row, best), _Look(row, x_ref, of_row, scratch[-1])
            row.start()
            row.meet()

            def again(given):
                _, column = given
                before = look.before(column)
                drawing.clear()
                drawing.draw(kept=lambda x, columns: jnp.logical_and(before(x, columns), drawing.min_p_keeps(x, columns)))
                column = drawing.column()
                return look(column)[0], column

            _, column = lax.while_loop(lambda given: given[0] != 0, again, (jnp.int32(1), first))
            pl.when(memory.rank == 0)(lambda: memory.store_row(result, column))

    scratch = [Winner.scratch(plan.blocks)]
    results = [jax.ShapeDtypeStruct((plan.rows,), jnp.int32)]
    (found,) = launched("categorical_again_mosaic", kernel, plan, results, scratch, 2)(x, rejected, index, *of_rows.values())
    return found


class _Drawing:
    """Draws from a row, or from what is kept of it."""

    def __init__(self, row: Row, x_ref, of_row, best):
        tile, layout = row.tile, row.plan.layout
        self.row, self.of_row = row, {name: ref[tile.memory.row] for name, ref in of_row.items()}
        self.size, self.noise = self.of_row.get("inverse"), self.of_row.get("noise")
        self.held = tile.memory.read(x_ref, -jnp.inf, jnp.dtype(jnp.float32))
        self.width, self.layout = layout.threads * layout.vector, layout.layout
        self.place = tile.column(0)
        self.winner = Winner(best, layout.cols, row.plan.blocks)

    def clear(self) -> None:
        self.winner.clear()

    def column(self) -> jax.Array:
        """Of what was drawn, in all blocks of the cluster."""
        self.winner.share(self.row.tile.memory.rank)
        return self.winner.column()

    def min_p_keeps(self, x, columns) -> jax.Array:
        """Whether `min_p`, if there is one, keeps what is of these scores, of a row whose maximum is known."""
        along = self.row.tile.along
        if "min_p" not in self.of_row:
            return columns >= 0
        size = None if self.size is None else along(self.size)
        weights, least = online.weights(x, along(self.of_row["m"]), axis=(), scale=size), self.of_row["min_p"]
        least = jnp.where(least == least, jnp.minimum(least, 1), -1)  # NaN keeps all
        return weights >= along(least)

    def draw(self, states: States | None = None, kept=None) -> None:
        """Draws among those for which `kept(scores, columns)` holds, or among all, and lifts them if there are `states`."""
        winner, lowest = self.winner, self.row.tile.accumulator(-jnp.inf)

        def at_temperature(scores, is_kept=None):
            scores = scores if self.size is None else scores * self.row.tile.along(self.size)
            if kept is None:
                return scores
            # Those that are kept may overflow: then they are alike, but more than the others.
            scores = jnp.maximum(scores, self.row.tile.along(jnp.float32(jnp.finfo(jnp.float32).min)))
            return scores if is_kept is None else jnp.where(is_kept, scores, lowest)

        def visit(number, steps, load, in_loop, carry):
            del number, in_loop
            loaded = load()
            top = self._top(loaded)
            if states is not None:
                carry = states.push(carry, list(map(self.held.converted, loaded)), top)
            words = self._words(steps[0])

            def compare(index):
                found, columns = self.held.converted(loaded[index]), self.place + steps[index] * self.width
                score = at_temperature(found, None if kept is None else kept(found, columns))
                upper = _noise.half(words, index)

                def push():
                    lower = _noise.half(self._words(steps[0], _noise.LOWER), index)
                    noise = _noise.gumbel(upper | lower >> np.uint32(16))
                    total = score + (noise if self.noise is None else noise * self.row.tile.along(self.noise))
                    total = jnp.where(total == total, total + 0, -lowest)  # NaN before all numbers, and -0 as 0
                    winner.push(total, columns, self.layout)

                pl.when(winner.may_win(score, upper, self.noise, self.layout) != 0)(push)

            upper = ptx.least_half(words, self.layout)

            @pl.when(winner.may_win(at_temperature(top), upper, self.noise, self.layout) != 0)
            def _():
                for index in range(len(loaded)):
                    compare(index)

            return carry

        self.row.sweep(self.held.load, visit, states, ahead=False)  # random words take long enough

    def _top(self, loaded):
        """The maximum of the steps' elements at each place, or NaN."""
        if self.held.in_words:
            return self.held.converted(self.held.maximum(loaded))
        return functools.reduce(jnp.maximum, map(self.held.converted, loaded))

    def _words(self, step, more=0):
        """The random words of a sweep, whose first step is this one, a multiple of their halves."""
        block = (self.place + step // _noise.HALVES * _noise.STRIDE).astype(jnp.uint32) + np.uint32(more)
        of_row = (self.row.tile.along(self.of_row[name]) for name in ("row", "key0", "key1"))
        row, key0, key1 = (plgpu.layout_cast(array, self.layout) for array in of_row)
        return _noise.words_of(block, row, key0, key1, functools.partial(ptx.product, layout=self.layout))


class _Look:
    """Looks at an entry of a row: whether the filters reject it, and the state of the row, in all blocks of the cluster."""

    def __init__(self, row: Row, x_ref, of_row, ref):
        tile, layout = row.tile, row.plan.layout
        self.row, self.x_ref = row, x_ref
        of_row = {name: of_row[name][tile.memory.row] for name in ("top_p", "min_p", "inverse") if name in of_row}
        self.top_p, self.min_p, self.size = (of_row.get(name) for name in ("top_p", "min_p", "inverse"))
        self.held = tile.memory.read(x_ref, -jnp.inf, jnp.dtype(jnp.float32))
        self.width, self.place = layout.threads * layout.vector, tile.column(0)
        self.states = States(row, ref, self.size, more=True)

    def __call__(self, column) -> tuple[jax.Array, jax.Array, jax.Array]:
        """1 if it is rejected, else 0, and the state."""
        value, before = self._value(column), self.before(column)
        ptx.block_barrier()
        self.states.clear()
        if self.row.plan.blocks > 1:  # or another block might send its states before
            ptx.cluster_barrier()

        def visit(number, steps, load, in_loop, carry):
            del number, in_loop
            found = list(map(self.held.converted, load()))
            counts = [before(x, self.place + step * self.width) for x, step in zip(found, steps, strict=True)]
            return self.states.push(carry, found, functools.reduce(jnp.maximum, found), counts)

        self.row.sweep(self.held.load, visit, self.states)
        if self.row.plan.blocks > 1:
            self.states.send()
            ptx.cluster_barrier()
        m, d, ahead = self.states.merged()
        rejected = jnp.bool_(False)
        if self.min_p is not None:
            rejected = online.weights(value, m, axis=(), scale=self.size) < jnp.minimum(self.min_p, 1)
        if self.top_p is not None:
            is_less = jnp.logical_and(self.top_p < 1, ahead > 0)
            rejected = jnp.logical_or(rejected, jnp.logical_and(is_less, ahead >= self.top_p * d))
        rejected = jnp.logical_and(rejected, d > 0)  # where nothing is to be seen, nothing is better
        return rejected.astype(jnp.int32), m, d

    def _value(self, column):
        return self.x_ref[self.row.tile.memory.row, column].astype(jnp.float32)

    def before(self, column):
        """Whether scores at some columns are before that of this column, where 0 and -0 are equal: a function of both."""
        along = self.row.tile.along
        value, column = along(self._value(column)), along(column)
        return lambda x, columns: jnp.logical_or(x > value, jnp.logical_and(x == value, columns < column))
