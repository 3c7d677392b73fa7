"""Samples from rows on Hopper: a kernel that draws, and with filters one that looks at what was drawn, and one that redraws.

1. Each element is compared with the best so far, which is in shared memory. Only where a bound of its noise allows that it is
   better, the noise itself is computed. The random bits come from a counter (see `_noise`), on chip.
2. With `top_p` what was drawn is looked at: the weights of what is before it in the order of `top_k` are added up, together
   with the state of the row, in a second read. With `min_p` alone the maximum is found first, and says what is kept.
3. Where that sum says that it is not kept, the row is drawn again, among what is before it alone, until what is drawn is kept.
   That is exact: what is before a kept entry is kept, and a kept entry that is best among more is best among the kept ones.
"""

import functools

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.layout import Config, RowLayout
from jaxsoftmax.ops.softmax.mosaic import logsumexp
from jaxsoftmax.ops.top_k import _noise
from jaxsoftmax.ops.top_k._sweeps import Plan, Row, States, blocks_for, launched
from jaxsoftmax.ops.top_k._winner import Winner

_BLOCKS_THAT_REDRAW = 4  # of a row: few rows are


def sample(target, x, of_rows, return_state):
    """The indices of samples `[rows]` of `x`, `[rows, cols]`, and the states `(m, d)` if asked for.

    `of_rows` has what is `[rows]` by name: `row`, `key0`, `key1`, and what is not None of `inverse`, `noise`, `top_p`, `min_p`.
    """
    plan = _drawing_plan(target, x)
    if "top_p" in of_rows:
        looked_at = {name: of_rows[name] for name in ("top_p", "min_p", "inverse") if name in of_rows}
        drawn = {name: array for name, array in of_rows.items() if name not in ("top_p", "min_p")}
        (index,) = _draw(plan, x, drawn, False)
        rejected, m, d = _check(_reading_plan(target, x), x, index, looked_at)
        again = Plan(plan.layout, blocks_for(target, plan.layout, 1, _BLOCKS_THAT_REDRAW), plan.rows)
        index = _redraw(again, x, rejected, index, of_rows | {"m": m})
    elif "min_p" in of_rows:  # with the maximum it is known what is kept
        inverse = of_rows["inverse"][:, None] if "inverse" in of_rows else None
        _, m, d = logsumexp(x, None, inverse, axes=(1,), dtype=jnp.float32, return_state=True, target=target)
        (index,) = _draw(plan, x, of_rows | {"m": m[:, 0]}, False)
    else:
        return _draw(plan, x, of_rows, return_state)
    return [index, m.reshape(-1), d.reshape(-1)] if return_state else [index]


def _drawing_plan(target, x) -> Plan:
    """A sweep has four steps of `_noise.STRIDE` elements, of which a thread has those that share random words.

    Where rows start inside of a line, threads join vectors of two steps.
    """
    rows, cols = x.shape
    vector = 4
    layout = RowLayout(cols, Config(vector, _noise.STRIDE // vector, unroll=_noise.WORDS), stored=False)
    return Plan(layout, blocks_for(target, layout, rows), rows)


def _reading_plan(target, x) -> Plan:
    rows, cols = x.shape
    layout = RowLayout(cols, Config(16 // x.dtype.itemsize, 128, unroll=4), stored=False)
    return Plan(layout, blocks_for(target, layout, rows), rows)


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
        tile, size, winner = self.row.tile, self.size, self.winner
        lowest = tile.accumulator(-jnp.inf)

        def visit(steps, loaded, is_first, in_loop, carry):
            del is_first, in_loop
            found = list(map(self.held.converted, loaded))
            if states is not None:
                carry = states.push(carry, found, functools.reduce(jnp.maximum, found))
            at = [self.place + step * self.width for step in steps]
            scores = found if size is None else [x * tile.along(size) for x in found]
            if kept is not None:  # whose scores may overflow: then they are alike, but more than those of the others
                least = tile.along(jnp.float32(jnp.finfo(jnp.float32).min))
                scores = [
                    jnp.where(kept(x, columns), jnp.maximum(score, least), lowest)
                    for x, columns, score in zip(found, at, scores, strict=True)
                ]
            words = self._random_words(steps[0])[: len(scores)]

            def compare():
                top, column = lowest, at[0]
                for score, word, columns in zip(scores, words, at, strict=True):
                    noise = _noise.gumbel(word)
                    score += noise if self.noise is None else noise * tile.along(self.noise)
                    score = jnp.where(score == score, score + 0, -lowest)  # NaN before all numbers, and -0 as 0
                    is_more = score > top
                    top, column = jnp.where(is_more, score, top), jnp.where(is_more, columns, column)
                winner.push(top, column, self.layout)

            pl.when(winner.may_win(scores, words, self.noise, self.layout) != 0)(compare)
            return carry

        self.row.sweep(self.held.load, visit, states)

    def _random_words(self, step):
        """Those of four steps, of which the first one is at a multiple of four."""
        block = (self.place + step // _noise.WORDS * _noise.STRIDE).astype(jnp.uint32)
        # Made anew in each sweep, or the compiler would hold the keys of all rounds in registers.
        row, key0, key1 = [self.row.tile.along(ptx.opaque(self.of_row[name])) for name in ("row", "key0", "key1")]
        return _noise.philox((block, row, 0, 0), (key0, key1), functools.partial(ptx.product, layout=self.layout))


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

        def visit(steps, loaded, is_first, in_loop, carry):
            del is_first, in_loop
            found = list(map(self.held.converted, loaded))
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
        """Whether scores at some columns are before that of this column in the order of `top_k`: a function of both."""
        along = self.row.tile.along
        value, column = along(self._value(column)), along(column)
        return lambda x, columns: jnp.logical_or(x > value, jnp.logical_and(x == value, columns < column))
