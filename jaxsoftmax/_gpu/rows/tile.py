"""What the body of a kernel sees of the rows that its block holds, and its words for what it computes from them."""

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.memory import Elements, Memory
from jaxsoftmax.online import State

# What is as large as the rows, as a function of a step (see `RowLayout`) to its elements: what is computed twice need not be
# held in registers meanwhile.
Steps = Callable[[Any], jax.Array]


# What is added up beside a state: a function of a step and of its scores.
Addends = Callable[[Any, jax.Array], jax.Array]


def each(function, *operands: Steps) -> Steps:
    """`function` of the operands' elements, step by step."""
    return lambda step: function(*(operand(step) for operand in operands))


@dataclass(frozen=True)
class Either:
    """A result that is `then` where a condition holds for the whole row, and `otherwise` elsewhere."""

    condition: jax.Array  # a scalar bool: there is one row in the block
    then: Steps
    otherwise: Steps


@dataclass(frozen=True)
class Tile:
    """The rows of a block.

    Attributes:
      memory: where they are.
      exchange: `[4, warps]` float32 in shared memory, where warps share a row: two values of each for two rounds.
      pushed: the barriers of what blocks of a cluster push to each other's `exchange`, or None.
      order: scratch where rows start inside of a line, of `RowLayout.order_shape`, or None.
      rounds: the numbers of the exchanges to come. Who writes in a round has read what was written in the one before: so what
        was written two rounds before was read by all.
    """

    memory: Memory
    exchange: Any
    pushed: Any
    order: Any
    rounds: Iterator[int] = field(default_factory=itertools.count)

    def along(self, row: jax.Array) -> jax.Array:
        """A value for each row, or one for all, along the row."""
        return lax.broadcast_in_dim(row, self.memory.layout.shape, (0,) if row.ndim else ())

    def column(self, step) -> jax.Array:
        """The column of each element: int32, and outside of the row, or of the block's slice, a number that is no column."""
        layout = self.memory.layout
        shares, width = layout.shape
        column = plgpu.broadcasted_iota(jnp.int32, layout.shape, 1, layout=layout.layout)
        first, size = jnp.int32(step), width  # of a step
        if layout.whole_block:
            share = plgpu.broadcasted_iota(jnp.int32, layout.shape, 0, layout=layout.layout)
            column += share * jnp.int32(width) + self.memory.group() * (shares * width)
            size = layout.threads * layout.vector
        if layout.shifted:  # what overflows here does not matter below the size of a line
            column -= (self.memory.row * layout.cols) & (layout.line - 1)
        if layout.joined:
            column = jnp.where(column >= 0, column, column + size)
        column += first * size
        if layout.blocks == 1:
            return column
        rank = self.memory.rank
        start = (rank * layout.slice_lines + jnp.minimum(rank, layout.longer_slices)) * layout.line
        length = (layout.slice_lines + (rank < layout.longer_slices).astype(jnp.int32)) * layout.line
        return jnp.where(jnp.logical_and(column >= 0, column < length), column + start, -1)

    def plus_at(self, values: Steps, columns: jax.Array, addends: jax.Array) -> Steps:
        """`values` with an addend more at one column of each row; at none, if the number is no column of the row."""
        return lambda step: self.memory.plus_at(step, values(step), columns, addends)

    def lift(self, scores: Steps, scale=None) -> State:
        """The states of what a warp holds of each row."""
        layout = self.memory.layout
        if not layout.config.unroll and not layout.shifted:
            return online.lift(map(scores, range(layout.steps)), scale=scale)
        if layout.config.parked or layout.config.grid or not layout.config.unroll:
            # What is held is cheap to read twice; what has a `grid` and is not held is `split.unheld`.
            m = self._maximum(self._top(scores))
            weights, alike = self.weights(m, scale)
            return State(m, self._sum(each(weights, scores)) * alike)
        return self._pushed(scores, scale)[0]

    def lift_and_sum(self, scores: Steps, addends: Addends) -> tuple[State, jax.Array]:
        """`lift`, and the sums of addends that are computed from a step and its scores: what is not held is read once."""
        layout = self.memory.layout
        if layout.config.parked or layout.config.grid or not layout.config.unroll:
            return self.lift(scores), self._sum(lambda step: addends(step, scores(step)))
        state, (sums,) = self._pushed(scores, None, addends)
        return state, sums

    def _pushed(self, scores, scale, *addends: Addends) -> tuple[State, list[jax.Array]]:
        """The states and sums of what a warp reads of each row, and does not hold."""

        def push(steps, m, d, *sums):
            size, state = None if scale is None else self.along(scale), State(m, d)
            if isinstance(scores, Elements) and scores.in_words:
                words = list(map(scores.load, steps))
                top, found = scores.maximum(words).astype(jnp.float32), list(map(scores.converted, words))
            else:
                top, found = None, list(map(scores, steps))
            state = online.push(state, found, axis=(), scale=size, top=top)
            more = [functools.reduce(jnp.add, map(of, steps, found), sum_) for of, sum_ in zip(addends, sums, strict=True)]
            return [*state[:2], *more]

        start = [self.accumulator(-jnp.inf), *(self.accumulator(0) for _ in ("d", *addends))]
        top, d, *sums = self._fold(push, start)
        m, d = self.of_warp(top, d, scale)[:2]
        return State(m, d), list(map(self.of_places, sums))

    def of_warp(self, m: jax.Array, d: jax.Array, scale=None) -> State:
        """The states of what a warp has pushed of each row to accumulators, `m` and `d` at each place of a step."""
        layout, top = self.memory.layout, self._maximum(m)
        product = operator.mul if layout.is_exact else _rounded(layout.layout)
        d = online.rescale(State(m, d), top, axis=1, scale=scale, product=product).d
        return State(top, self.of_places(d))

    def of_places(self, sums: jax.Array) -> jax.Array:
        """The sums of what a warp has at each place of a step, for `sum`."""
        return self._in_order(sums) if self.memory.layout.shifted else jnp.sum(sums, 1)

    def weights(self, m: jax.Array, scale=None) -> tuple[Callable[[jax.Array], jax.Array], Any]:
        """A function of scores to `online.weights` of them, but for a factor that is alike for all, and this factor.

        So the exponent takes one operation, `score * log2(e) - t`, where `t` is `m * log2(e)` as rounded, and the factor is
        2 to what that is off by, at most 64: weights below 2^-62 may count as 0 where `m` is beyond 2^27. Beyond 1.4e9 scores
        that differ do so by 128 at least, so that their weights are 0, in whatever unit.
        """
        layout, m = self.memory.layout, online.shift(m)
        if scale is not None or not (layout.config.unroll and (layout.config.parked or layout.config.grid)):
            return functools.partial(online.exponentials, m=m, scale=scale), 1
        unit = jnp.where(jnp.abs(m) < 1.4e9, jnp.float32(math.log2(math.e)), jnp.float32(1))
        t = m * unit
        off = ptx.fma(m, unit, -t, layout.row_layout if m.ndim else ptx.SPLAT)
        unit, t = (plgpu.layout_cast(self.along(row), layout.layout) for row in (unit, -t))
        return lambda scores: jnp.exp2(ptx.fma(scores, unit, t, layout.layout)), jnp.exp2(-off)

    def _top(self, scores: Steps) -> jax.Array:
        """The maximum at each place of a step."""
        if isinstance(scores, Elements) and scores.in_words:
            lowest = self.accumulator(-jnp.inf, scores.of)
            (top,) = self._fold(lambda steps, top: [scores.maximum([top, *map(scores.load, steps)])], [lowest])
            return top.astype(jnp.float32)
        lowest = self.accumulator(-jnp.inf)
        (top,) = self._fold(lambda steps, top: [functools.reduce(jnp.maximum, map(scores, steps), top)], [lowest])
        return top

    def merge(self, state: State, scale=None) -> State:
        """The states of the rows from those of what a warp holds."""
        if not self.memory.layout.whole_block:
            return state
        states = State(*self._exchanged(state.m, state.d))
        return self.merge_along(states, scale) if self.memory.layout.shifted else online.merge_along(states, 0, scale=scale)

    def merge_along(self, states: State, scale=None) -> State:
        """`online.merge_along` of states, `[n]` that each warp has, or `[4, n]`, a row for each, with bits alike in all lanes.

        Where rows start inside of a line, the lane of an element depends on where. So all lanes must have the same sum, and
        products are rounded before they are added: a lane else adds its own one unrounded to the rounded one of another.
        """
        # A warp may have the block's infinite maximum, and none of what weighs: 0 * inf would be NaN.
        has_none = jnp.logical_and(states.d == 0, states.m == jnp.inf)
        states = State(jnp.where(has_none, jnp.full_like(states.m, -jnp.inf), states.m), states.d)
        size = states.d.shape[-1]
        layout = ptx.replicated(size) if states.d.ndim == 1 else ptx.of_warps(size // ptx.WARP)
        return online.merge_along(states, -1, scale=scale, product=_rounded(layout))

    def sum(self, values: Steps | jax.Array) -> jax.Array:
        """The sums of the rows, of elements or of what a warp has summed up in `lift`."""
        sums = self._sum(values) if callable(values) else values
        return jnp.sum(self._exchanged(sums)[0]) if self.memory.layout.whole_block else sums

    def _sum(self, values: Steps) -> jax.Array:
        """The sums of what a warp holds of each row."""
        layout = self.memory.layout
        if layout.config.unroll or layout.shifted:
            # Products are added unrounded. From 0 on the first one is not, wherever the row starts.
            zeros = self.accumulator(0)
            (total,) = self._fold(lambda steps, total: [functools.reduce(jnp.add, map(values, steps), total)], [zeros])
        else:
            total = functools.reduce(jnp.add, map(values, range(layout.steps)))
        return self._in_order(total) if layout.shifted else jnp.sum(total, 1)

    def accumulator(self, value, dtype=jnp.float32) -> jax.Array:
        """A value for each element of a step, which a loop may carry."""
        layout = self.memory.layout
        return plgpu.layout_cast(jnp.full(layout.shape, value, dtype), layout.layout)

    def _in_order(self, sums: jax.Array) -> jax.Array:
        """The sums over the lanes of each warp of `sums`, one for each element of a step, where rows start inside of a line.

        Where in a line a row starts depends on which row it is. Its bits must not, so `sums` are put in the order of the row.
        """
        in_order = self.memory.sums_in_order(self.order, sums)
        return plgpu.layout_cast(jnp.sum(in_order, 1), self.memory.layout.row_layout)

    def _maximum(self, top: jax.Array) -> jax.Array:
        """What all weights of a warp are relative to: its own maximum, or the block's where rows start inside of a line.

        There the elements of a warp depend on where in the line the row starts; those of the block do not.
        """
        layout = self.memory.layout
        m = jnp.max(top, 1)
        if not layout.shifted:
            return m
        warps = ptx.WARPS * layout.warpgroups
        tops = self.order.at[pl.ds(layout.order_shape[0] - warps, warps)]
        tops[pl.ds(self.memory.group() * ptx.WARPS, ptx.WARPS)] = m
        ptx.block_barrier()
        m = jnp.max(plgpu.load(tops, layout=ptx.replicated(warps), optimized=False))
        return plgpu.layout_cast(jnp.broadcast_to(m, layout.shape[:1]), layout.row_layout)

    def store(self, results: Sequence[tuple[Any, Steps]], backwards: bool = False) -> None:
        """Stores results, each with where it goes, step by step."""
        put = self.memory.store
        # A fold that carries nothing from step to step.
        self._fold(
            lambda steps: [put(ref, i, of(i).astype(ref.dtype)) for i in steps for ref, of in results] and [], [], backwards
        )

    def _fold(self, function, start, backwards=False):
        """Folds `function(steps, *carry)` over all steps: at once, or in a loop, without those that load a part of a vector."""
        layout = self.memory.layout
        unroll, looped = layout.config.unroll, layout.looped_steps
        if not unroll:
            return function(range(layout.steps), *start)
        iterations = len(looped) // unroll

        def iteration(i, carry):
            if layout.config.parked:
                ptx.keep_loop()
            i = iterations - 1 - i if backwards else i
            return tuple(function([looped.start + i * unroll + k for k in range(unroll)], *carry))

        count = ptx.unknown(iterations) if layout.config.parked else iterations
        carry = lax.fori_loop(0, count, iteration, tuple(start)) if iterations else start
        rest = [step for step in range(layout.steps) if step not in looped[: iterations * unroll]]
        return function(rest, *carry) if rest else carry

    def _exchanged(self, *parts):
        """What all warps have that share the row."""
        layout = self.memory.layout
        group = self.memory.group()
        round_ = next(self.rounds)
        slots = [self.exchange.at[round_ % 2 * 2 + i] for i in range(len(parts))]
        if layout.cluster > 1:
            group = self.memory.rank * layout.warpgroups + group
            if round_ == 0:
                ptx.cluster_wait()
            for slot, part in zip(slots, parts, strict=True):
                ptx.push_to_cluster(slot, group * ptx.WARPS, part, layout.row_layout, layout.cluster, self.pushed, round_)
            ptx.await_pushes(self.pushed, round_, 4 * len(parts) * layout.warps)
        else:
            for slot, part in zip(slots, parts, strict=True):
                slot[pl.ds(group * ptx.WARPS, ptx.WARPS)] = part
            if layout.warpgroups > 1:
                ptx.block_barrier()
            else:
                plgpu.commit_smem()
        everywhere = ptx.replicated(layout.warps)
        return [plgpu.load(slot, layout=everywhere, optimized=False) for slot in slots]


def _rounded(layout: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product of arrays of this layout, which is rounded even where it is added to something."""
    return lambda a, b: ptx.fma(a, b, plgpu.layout_cast(jnp.zeros(a.shape, jnp.float32), layout), layout)
