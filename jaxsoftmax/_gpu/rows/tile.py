"""Reductions over the rows that a block holds: from threads to warps, to blocks, to clusters.

The body of a kernel gets a tile, and its operands as functions of a step to the elements of that step. It lifts scores to the
states of warps, merges these to states of rows, and computes results from the elements and the states.
"""

import functools
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir.dialects import arith

from jaxsoftmax import online
from jaxsoftmax._gpu import fused, sync
from jaxsoftmax._gpu.emit import (
    SPLAT,
    WARP,
    WARPS,
    always,
    fma,
    folded_registers,
    keep_loop,
    of_warps,
    power_of_two_over,
    replicated,
    unknown,
)
from jaxsoftmax._gpu.rows.memory import Elements, Memory, RowMemory, Steps
from jaxsoftmax._gpu.rows.plan import Storage
from jaxsoftmax.online import State

_LN2, _LOG2E = math.log(2), math.log2(math.e)

# Numbers that are added up beside a state: a function of a step and of its scores.
Addends = Callable[[Any, jax.Array], jax.Array]

# A function of a step to two numbers for each element.
Pairs = Callable[[Any], tuple[jax.Array, jax.Array]]

LOWEST = float(np.finfo(np.float32).min)
_WEIGHTLESS = 140  # a distance to the largest score at which a weight is 0
_FAR = 1e30  # bfloat16 scores beyond this size differ by more than `_WEIGHTLESS`, or are equal


def each(function, *operands: Steps) -> Steps:
    """Applies a function to the operands' elements, step by step."""
    return lambda step: function(*(operand(step) for operand in operands))


def together(function, count: int, *operands: Steps) -> list[Steps]:
    """Applies a function with `count` results to the operands' elements, once for each step."""
    last: list[Any] = [None, None]  # step and its results

    def at(index, step):
        if last[0] is not step:
            last[:] = step, function(*(operand(step) for operand in operands))
        return last[1][index]

    return [functools.partial(at, index) for index in range(count)]


@dataclass(frozen=True)
class Either:
    """A result that depends on a condition of the whole row, with code of its own for both cases."""

    condition: jax.Array  # scalar bool; there is one row in the block
    then: Steps
    otherwise: Steps


@dataclass(frozen=True)
class Tile:
    """The rows of a block, for any distribution of rows over threads.

    A subclass turns states and sums of warps into states and sums of rows (`merge`, `sum`).
    """

    memory: Memory
    exchange: Any  # float32 in shared memory of the plan's `exchange_shape`, or None if no warps share a row
    arrivals: Any  # barriers for the stores of a cluster's blocks to each other's `exchange`, or None
    order: Any = None  # float32 in shared memory of `RowPlan.order_shape`, or None

    @property
    def allows_either(self) -> bool:
        """True if results may be `Either`."""
        return self.memory.plan.allows_either

    def each_fused(self, function, static: tuple[Any, ...], *operands: Steps) -> Steps:
        """Applies an elementwise function to static arguments and the operands' elements, step by step: see `fused`."""
        layout = self.memory.plan.layout
        return each(lambda *elements: fused.fused(function, static, elements, layout), *operands)

    def along(self, row: jax.Array) -> jax.Array:
        """Broadcasts a value for each row, or one for all, along the row."""
        return lax.broadcast_in_dim(row, self.memory.plan.shape, (0,) if row.ndim else ())

    def column(self, step) -> jax.Array:
        """Returns the column of each element, int32."""
        return self.memory.columns(step)

    def plus_at(self, values: Steps, columns: jax.Array, addends: jax.Array) -> Steps:
        """Adds an addend to `values` at one column of each row; to none if the number is no column of the row."""
        return lambda step: self.memory.plus_at(step, values(step), columns, addends)

    def accumulator(self, value, dtype=jnp.float32) -> jax.Array:
        """Returns a value for each element of a step, which a loop may carry."""
        plan = self.memory.plan
        return plgpu.layout_cast(jnp.full(plan.shape, value, dtype), plan.layout)

    # Warps.

    def lift(self, scores: Steps, scale=None) -> State:
        """Computes the states of the scores that a warp holds of each row."""
        plan = self.memory.plan
        if plan.storage == Storage.REGISTERS and not plan.is_shifted and scale is None:
            return online.lift(map(scores, range(plan.steps)))
        if plan.storage == Storage.NOWHERE:
            return self._push(scores, scale)[0]
        m = self._maximum(self._top(scores))  # elements that are held are cheap to read twice
        weights, alike = self.weights(m, scale)
        return State(m, self._sum(each(weights, scores)) * alike)

    def lift_and_sum(self, scores: Steps, addends: Addends, scale=None) -> tuple[State, jax.Array]:
        """Computes `lift`, and for `sum` the sums of addends; elements that are not held are read once."""
        if self.memory.plan.storage != Storage.NOWHERE:
            return self.lift(scores, scale), self._sum(lambda step: addends(step, scores(step)))
        state, (sums,) = self._push(scores, scale, addends)
        return state, sums

    def lift_both(self, scores: Steps, others: Steps, scale=None, other_scale=None) -> tuple[State, State]:
        """Computes `lift` of scores and of other scores, all held. Maxima are finite, or `inf`."""
        maxima = self._maxima(self._top(scores), self._top(others))
        (weights, alike), (other_weights, other_alike) = map(self.weights, maxima, (scale, other_scale))
        d, other_d = self._sums(lambda step: (weights(scores(step)), other_weights(others(step))))
        return State(maxima[0], d * alike), State(maxima[1], other_d * other_alike)

    def lift_with_exponents(self, scores: Steps, scale=None) -> tuple[State, jax.Array]:
        """Computes `lift`, and for `merge_with_exponents` the sums of weights times their exponents; scores are read once.

        An exponent is `scale * (score - m)`, and a weight the exponential of it. Exponents are computed in base 2, and where
        scores are read in a loop a thread has one maximum. (That saves a seventh of the instructions for bfloat16, 257 instead
        of 296 for 32 scores, and a third with a scale; they count as much as bytes there.)
        """
        plan, layout = self.memory.plan, self.memory.plan.layout

        def add(elements, exponents, d, sums):
            for score in elements:
                exponent = exponents(score)
                weight = jnp.exp2(exponent)
                d, sums = d + weight, sums + weight * exponent
            return d, sums

        lowered = functools.partial(online.lower_by, product=self._product, exponential=jnp.exp2)

        if plan.storage != Storage.NOWHERE:
            m = self._maximum(self._top(scores))
            exponents, error = self.exponents(m, scale)
            raised = self._raised(scores, m) if scale is None else None

            def finite_exponents(score):
                return exponents(score) if raised is not None else online.bounded(exponents(score))

            held = scores if raised is None else raised
            zeros = [self.accumulator(0), self.accumulator(0)]
            d, sums = self._fold(lambda steps, *sums: add(map(held, steps), finite_exponents, *sums), zeros)
            d, sums = online.without_error_log2(self.of_places(d), self.of_places(sums), error, _rounded(plan.row_layout))
            sums = sums if raised is None else jnp.where(m < -_FAR, 0, sums)
            return State(m, d), sums * _LN2

        size = None if scale is None else self.along(scale)

        def push(steps, m, error, d, sums):
            loaded, converted, top = self._loaded(scores, steps)
            m, error = map(self._alike, (m, error))
            top = jnp.maximum(m, self._of_thread(top))
            shifted = online.shift(top)
            base = _Base2.of(shifted, size, layout)
            d, sums = lowered(d, sums, (m - shifted) * base.size + (base.error - error))

            def exponents(score):
                return online.bounded(fma(score, base.unit, -base.start, layout))

            def add_some(loaded, d, sums):
                return add(map(converted, loaded), exponents, d, sums)

            return [top, base.error, *self._in_pieces(add_some, loaded, _size_of_piece(scores), (d, sums))]

        zeros = [self.accumulator(0) for _ in range(3)]
        m, error, d, sums = self._fold(push, [self.accumulator(-jnp.inf), *zeros])
        m, error = map(self._alike, (m, error))
        top = self._maximum(m)
        d, sums = online.without_error_log2(d, sums, error, _rounded(layout))
        d, sums = lowered(d, sums, (m - self.along(online.shift(top))) * _size_log2(size))
        return State(top, self.of_places(d)), self.of_places(sums) * _LN2

    def _raised(self, scores: Steps, m: jax.Array) -> Elements | None:
        """Raises bfloat16 scores that weigh nothing relative to `m`, so that their exponents are finite; None for other dtypes.

        Two are raised by one operation. Where `m` is below `-_FAR`, some may stay `-inf`. Scores that differ are then so far
        apart that all except the largest weigh nothing, and the sum of weights times exponents is 0.
        """
        if not (isinstance(scores, Elements) and scores.in_words and scores.of == jnp.bfloat16):
            return None
        least = online.shift(m) - _WEIGHTLESS
        least = (least - jnp.abs(least) * 2.0**-7).astype(scores.of)  # rounded down
        least = plgpu.layout_cast(self.along(least), self.memory.plan.layout)
        return replace(scores, load=lambda step: scores.maximum([scores.load(step), least]))

    def lift_differences(self, scores: Steps, others: Steps, scale=None, other_scale=None) -> tuple[State, State, jax.Array]:
        """Computes `lift` of scores and of other scores, and the sums of weights times differences of exponents.

        `merge_differences` takes all of it. Both are read once. Maxima are finite, and a sum is NaN where a score is `+inf`.
        """
        plan = self.memory.plan
        size, other_size = (None if each is None else self.along(each) for each in (scale, other_scale))
        lower = functools.partial(online.lower_differences, scale=size, other_scale=other_size, product=self._product)

        def add(pairs, m, other_m, d, sums, other_d):
            for score, other in pairs:
                exponent = online.exponents(score, m, axis=(), scale=size)
                other_exponent = online.exponents(other, other_m, axis=(), scale=other_size)
                weight = jnp.exp(exponent)
                sums = sums + weight * jnp.where(weight > 0, exponent - other_exponent, 0)
                d, other_d = d + weight, other_d + jnp.exp(other_exponent)
            return d, sums, other_d

        def push(steps, m, other_m, d, sums, other_d):
            loaded, converted, top = self._loaded(scores, steps)
            other_loaded, other_converted, other_top = self._loaded(others, steps)
            tops = jnp.maximum(m, top), jnp.maximum(other_m, other_top)

            def add_some(pairs, *carry):
                return add([(converted(score), other_converted(other)) for score, other in pairs], *tops, *carry)

            pairs, size = list(zip(loaded, other_loaded, strict=True)), min(map(_size_of_piece, (scores, others)))
            return [*tops, *self._in_pieces(add_some, pairs, size, lower(m, d, sums, other_m, other_d, *tops))]

        zeros, lowest = ([self.accumulator(start) for _ in range(count)] for start, count in ((0, 3), (LOWEST, 2)))
        if plan.storage != Storage.NOWHERE:
            m, other_m = self._maxima(self._top(scores), self._top(others))
            tops = self.along(m), self.along(other_m)
            d, sums, other_d = self._fold(
                lambda steps, *sums: add(zip(map(scores, steps), map(others, steps), strict=True), *tops, *sums), zeros
            )
        else:
            top, other_top, d, sums, other_d = self._fold(push, [*lowest, *zeros])
            m, other_m = self._maxima(top, other_top)
            d, sums, other_d = lower(top, d, sums, other_top, other_d, self.along(m), self.along(other_m))
        d, sums, other_d = map(self.of_places, (d, sums, other_d))
        return State(m, d), State(other_m, other_d), sums

    def weights(self, m: jax.Array, scale=None) -> tuple[Callable[[jax.Array], jax.Array], Any]:
        """Returns a function of scores to `online.weights` of them, up to a factor that is alike for all, and this factor.

        The factor is at most 64. Where the largest score is beyond 2^27, weights below 2^-62 may count as 0.
        """
        if scale is None and self.memory.plan.storage != Storage.SHARED:
            return functools.partial(online.exponentials, m=online.shift(m)), 1
        # A kernel in 16 bits keeps up with memory at up to 27 operations for each element, and at 15 if latencies count
        # (Hopper). A softmax in shared memory takes 11. It took 16 before this multiply-add, two maxima in one operation, and
        # bfloat16 that is widened by a shift or a mask.
        exponents, error = self.exponents(m, scale)
        return lambda scores: jnp.exp2(exponents(scores)), jnp.exp2(-error)

    def exponents(self, m: jax.Array, scale=None) -> tuple[Callable[[jax.Array], jax.Array], jax.Array]:
        """Returns a function of scores to `scale * log2(e) * (score - m)` and an error that is alike for all, and the error.

        Such an exponent, in base 2, takes one multiply-add: see `_Base2`. `scale` may be negative.
        """
        layout, m = self.memory.plan.layout, online.shift(m)
        base = _Base2.of(m, scale, self.memory.plan.row_layout if m.ndim else SPLAT)
        unit, start = (plgpu.layout_cast(self.along(row), layout) for row in (base.unit, -base.start))
        return lambda scores: fma(scores, unit, start, layout), base.error

    def _push(self, scores, scale, *addends: Addends) -> tuple[State, list[jax.Array]]:
        """Computes the states and sums of rows that a warp reads and does not hold."""

        def push(steps, m, d, *sums):
            size, state = None if scale is None else self.along(scale), State(m, d)
            loaded, converted, top = self._loaded(scores, steps)
            elements = list(map(converted, loaded))
            state = online.push(state, elements, axis=(), scale=size, top=top)
            more = [functools.reduce(jnp.add, map(of, steps, elements), sum_) for of, sum_ in zip(addends, sums, strict=True)]
            return [*state[:2], *more]

        start = [self.accumulator(-jnp.inf), *(self.accumulator(0) for _ in ("d", *addends))]
        top, d, *sums = self._fold(push, start)
        m, d = self.of_warp(top, d, scale)[:2]
        return State(m, d), list(map(self.of_places, sums))

    def _loaded(self, scores: Steps, steps) -> tuple[list[jax.Array], Callable[[jax.Array], jax.Array], jax.Array]:
        """Returns scores of some steps as they were loaded, what converts them, and their maximum at each place of a step."""
        if isinstance(scores, Elements) and scores.in_words:
            words = list(map(scores.load, steps))
            return words, scores.converted, scores.maximum(words).astype(jnp.float32)
        elements = list(map(scores, steps))
        return elements, lambda elements: elements, functools.reduce(jnp.maximum, elements)

    def of_warp(self, m: jax.Array, d: jax.Array, scale=None) -> State:
        """Computes the states of a warp from accumulators that were pushed to, `m` and `d` at each place of a step."""
        top = self._maximum(m)
        return State(top, self.of_places(online.rescale(State(m, d), top, axis=1, scale=scale, product=self._product).d))

    def of_places(self, sums: jax.Array) -> jax.Array:
        """Sums over the lanes of a warp, for `sum`."""
        return jnp.sum(sums, 1)

    def _of_thread(self, top: jax.Array) -> jax.Array:
        """Returns at each place a maximum for all places of the thread that belong to the same row."""
        return top

    def _alike(self, values: jax.Array) -> jax.Array:
        """Tells the compiler that what a loop carries is alike at the places of `_of_thread`."""
        return values

    def _maximum(self, top: jax.Array) -> jax.Array:
        """Computes the maximum to which the weights of a warp are relative."""
        return jnp.max(top, 1)

    def _maxima(self, *tops: jax.Array) -> list[jax.Array]:
        """Computes `_maximum` of several rows, the lowest number instead of `-inf`."""
        return [jnp.maximum(self._maximum(top), LOWEST) for top in tops]

    @property
    def _product(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        plan = self.memory.plan
        return operator.mul if plan.is_exact else _rounded(plan.layout)

    def _top(self, scores: Steps) -> jax.Array:
        """Computes the maximum over steps at each place of a step."""
        if isinstance(scores, Elements) and scores.in_words:
            lowest = self.accumulator(-jnp.inf, scores.of)
            (top,) = self._fold(lambda steps, top: [scores.maximum([top, *map(scores.load, steps)])], [lowest])
            return top.astype(jnp.float32)
        lowest = self.accumulator(-jnp.inf)
        (top,) = self._fold(lambda steps, top: [functools.reduce(jnp.maximum, map(scores, steps), top)], [lowest])
        return top

    def _sum(self, values: Steps) -> jax.Array:
        """Sums the values that a warp holds of each row."""
        plan = self.memory.plan
        if plan.storage != Storage.REGISTERS or plan.is_shifted:
            # LLVM adds one of two products unrounded, and which one depends on where the row starts. A sum that starts
            # with 0 rounds the first product always.
            zeros = self.accumulator(0)
            (total,) = self._fold(lambda steps, total: [functools.reduce(jnp.add, map(values, steps), total)], [zeros])
        else:
            total = functools.reduce(jnp.add, map(values, range(plan.steps)))
        return self.of_places(total)

    def _sums(self, pairs: Pairs) -> list[jax.Array]:
        """Sums both numbers of the pairs over the elements of a row that a warp holds."""
        zeros = [self.accumulator(0), self.accumulator(0)]

        def add(steps, *totals):
            for step in steps:
                totals = [total + value for total, value in zip(totals, pairs(step), strict=True)]
            return totals

        return list(map(self.of_places, self._fold(add, zeros)))

    # Rows.

    def merge(self, state: State, scale=None, exchange: int = 0) -> State:
        """Merges the states of warps to those of the rows, in the exchange of this number: 0 in a body's first, and so on."""
        raise NotImplementedError

    def merge_with_exponents(self, state: State, sums: jax.Array, scale=None) -> tuple[State, jax.Array]:
        """Merges the states and sums of `lift_with_exponents` to those of the rows, in the one exchange of a body."""
        raise NotImplementedError

    def sum(self, values: Steps | jax.Array, exchange: int = 0) -> jax.Array:
        """Sums the rows, from elements or from the sums of warps of `lift_and_sum`, in the exchange of this number."""
        raise NotImplementedError

    def merge_differences(
        self, state: State, other: State, sums: jax.Array, scale=None, other_scale=None, exchange: int = 0
    ) -> tuple[State, State, jax.Array]:
        """Merges what `lift_differences` returns to that of the rows, in the exchange of this number."""
        raise NotImplementedError

    def merge_both(self, state: State, other: State, scale=None, other_scale=None, exchange: int = 0) -> tuple[State, State]:
        """Computes `merge` of both states that `lift_both` returns, in the exchange of this number."""
        raise NotImplementedError

    def sum_both(self, pairs: Pairs, exchange: int = 0) -> list[jax.Array]:
        """Sums both numbers of the pairs over the elements of the rows, in the exchange of this number."""
        raise NotImplementedError

    def places_of_exchange(self, number: int, count: int) -> list[Any]:
        """Returns where warps put `count` values each in the exchange of this number: exchanges take turns with two buffers."""
        most = self.memory.plan.exchanged
        if count > most:
            raise AssertionError(f"warps exchange up to {most} values at one time, and not {count}")
        return [self.exchange.at[number % 2 * most + i] for i in range(count)]

    # Steps.

    def store(self, results: Sequence[tuple[Any, Steps]]) -> None:
        """Stores results, each with its destination, step by step."""
        put = self.memory.store
        # A fold that carries nothing from step to step.
        self._fold(lambda steps: [put(ref, i, of(i).astype(ref.dtype)) for i in steps for ref, of in results] and [], [])

    def _fold(self, function, start):
        """Folds `function(steps, *carry)` over all steps: at once, or in a loop and the steps that it leaves out."""
        plan = self.memory.plan
        if plan.storage == Storage.REGISTERS:
            return self._in_pieces(function, range(plan.steps), plan.unroll or plan.steps, tuple(start))
        looped, unroll = plan.looped_steps, plan.unroll
        iterations = len(looped) // unroll

        def iteration(i, carry):
            if plan.storage == Storage.SHARED:
                # ptxas would keep the row in registers if it unrolled the loop, and Pallas cannot limit their number.
                keep_loop()
            return tuple(function([looped.start + i * unroll + k for k in range(unroll)], *carry))

        # An unknown number of iterations keeps the compiler from writing out a loop over shared memory.
        count = unknown(iterations) if plan.storage == Storage.SHARED else iterations
        carry = lax.fori_loop(0, count, iteration, tuple(start)) if iterations else start
        rest = [step for step in range(plan.steps) if step not in looped[: iterations * unroll]]
        return function(rest, *carry) if rest else carry

    def _in_pieces(self, function, items: Sequence[Any], size: int, carry):
        """Folds `function(some items, *carry)`, with straight code of its own for each `size` items.

        ptxas would otherwise widen all elements of 16 bits before it uses the first. With fewer registers more blocks run at a
        time. Times of log_probs with entropies, bfloat16 (H200, wall clock): 65536 x 4096, one warp a row, 157 us with 198
        registers, and 137 us with 111 in pieces of two vectors; 16384 x 50257 in a loop 421 us with 96 registers, 380 us with
        58 in pieces of one vector, and 425 us with 88 in pieces of four.
        """
        if len(items) <= size:
            return function(items, *carry)
        for first in range(0, len(items), size):
            some = items[first : first + size]
            carry = lax.cond(always(), lambda some=some, carry=carry: tuple(function(some, *carry)), lambda carry=carry: carry)
        return carry


@dataclass(frozen=True)
class RowTile(Tile):
    """Rows along the last axis: several in a warp, or one that warps, and blocks of a cluster, share."""

    memory: RowMemory

    def column(self, step) -> jax.Array:
        """Returns the column of each element, int32; outside the row, or the block's slice, a number that is no column."""
        plan = self.memory.plan
        shares, width = plan.shape
        column = plgpu.broadcasted_iota(jnp.int32, plan.shape, 1, layout=plan.layout)
        first, size = jnp.int32(step), width  # of a step
        if plan.takes_block:
            share = plgpu.broadcasted_iota(jnp.int32, plan.shape, 0, layout=plan.layout)
            column += share * jnp.int32(width) + self.memory.warpgroup() * (shares * width)
            size = plan.threads * plan.vector
        if plan.is_shifted:  # what overflows here does not matter below the size of a line
            column -= (self.memory.row * plan.cols) & (plan.line - 1)
        if plan.is_joined:
            column = jnp.where(column >= 0, column, column + size)
        column += first * size
        if plan.blocks == 1:
            return column
        rank = self.memory.rank
        start = (rank * plan.slice_lines + jnp.minimum(rank, plan.n_longer_slices)) * plan.line
        length = (plan.slice_lines + (rank < plan.n_longer_slices).astype(jnp.int32)) * plan.line
        return jnp.where(jnp.logical_and(column >= 0, column < length), column + start, -1)

    def merge(self, state: State, scale=None, exchange: int = 0) -> State:
        plan = self.memory.plan
        if not plan.takes_block:
            return state
        return self._merged(State(*self._exchange(exchange, state.m, state.d)), scale)

    def _merged(self, states: State, scale=None) -> State:
        """Merges the states of all warps."""
        is_shifted = self.memory.plan.is_shifted
        return self.merge_along(states, scale) if is_shifted else online.merge_along(states, 0, scale=scale)

    def merge_differences(
        self, state: State, other: State, sums: jax.Array, scale=None, other_scale=None, exchange: int = 0
    ) -> tuple[State, State, jax.Array]:
        if not self.memory.plan.takes_block:
            return state, other, sums
        maxima, d, other_maxima, other_d, sums = self._exchange(exchange, *state[:2], *other[:2], sums)
        merged, other_merged = self._merged(State(maxima, d), scale), self._merged(State(other_maxima, other_d), other_scale)
        scales = {"scale": scale, "other_scale": other_scale}
        _, sums, _ = online.lower_differences(maxima, d, sums, other_maxima, other_d, merged.m, other_merged.m, **scales)
        return merged, other_merged, jnp.sum(sums)

    def merge_both(self, state: State, other: State, scale=None, other_scale=None, exchange: int = 0) -> tuple[State, State]:
        if not self.memory.plan.takes_block:
            return state, other
        maxima, d, other_maxima, other_d = self._exchange(exchange, *state[:2], *other[:2])
        return self._merged(State(maxima, d), scale), self._merged(State(other_maxima, other_d), other_scale)

    def merge_along(self, states: State, scale=None) -> State:
        """Computes `online.merge_along` of states, `[n]` that each warp has, or `[4, n]`, a row for each, alike in all lanes.

        If rows start inside a line, the lane of an element depends on where. So all lanes must have the same sum, and products
        are rounded before they are added: a lane would otherwise add its own one unrounded to the rounded one of another.
        """
        size = states.d.shape[-1]
        layout = replicated(size) if states.d.ndim == 1 else of_warps(size // WARP)
        states = State(_maxima_that_weigh(*states[:2]), states.d)
        return online.merge_along(states, -1, scale=scale, product=_rounded(layout))

    def merge_with_exponents(self, state: State, sums: jax.Array, scale=None) -> tuple[State, jax.Array]:
        plan = self.memory.plan
        if not plan.takes_block:
            return state, sums
        m, d, sums = self._exchange(0, *state[:2], sums)
        m = _maxima_that_weigh(m, d)
        top = jnp.max(m)
        d, sums = online.lower_exponents(m, d, sums, online.shift(top), scale=scale, product=_rounded(replicated(plan.warps)))
        return State(top, jnp.sum(d)), jnp.sum(sums)

    def sum(self, values: Steps | jax.Array, exchange: int = 0) -> jax.Array:
        sums = self._sum(values) if callable(values) else values
        return jnp.sum(self._exchange(exchange, sums)[0]) if self.memory.plan.takes_block else sums

    def sum_both(self, pairs: Pairs, exchange: int = 0) -> list[jax.Array]:
        sums = self._sums(pairs)
        return list(map(jnp.sum, self._exchange(exchange, *sums))) if self.memory.plan.takes_block else sums

    def of_places(self, sums: jax.Array) -> jax.Array:
        """Sums over the lanes of each warp.

        Where in a line a row starts depends on the number of the row. Its bits must not, so sums are put in the order of the
        row.
        """
        if not self.memory.plan.is_shifted:
            return jnp.sum(sums, 1)
        in_order = self.memory.sums_in_order(self.order, sums)
        return plgpu.layout_cast(jnp.sum(in_order, 1), self.memory.plan.row_layout)

    def _of_thread(self, top: jax.Array) -> jax.Array:
        return folded_registers(arith.maximumf, top, self.memory.plan.layout)

    def _alike(self, values: jax.Array) -> jax.Array:
        return folded_registers(lambda first, _: first, values, self.memory.plan.layout)

    def _maximum(self, top: jax.Array) -> jax.Array:
        """Computes the maximum of a warp, or of the block if rows start inside a line.

        The elements of a warp then depend on where in the line the row starts; those of the block do not.
        """
        plan, m = self.memory.plan, jnp.max(top, 1)
        if not plan.is_shifted:
            return m
        warps = WARPS * plan.warpgroups
        tops = self.order.at[pl.ds(plan.order_shape[0] - warps, warps)]
        tops[pl.ds(self.memory.warpgroup() * WARPS, WARPS)] = m
        sync.block_barrier()
        m = jnp.max(plgpu.load(tops, layout=replicated(warps), optimized=False))
        return plgpu.layout_cast(jnp.broadcast_to(m, plan.shape[:1]), plan.row_layout)

    def _maxima(self, *tops: jax.Array) -> list[jax.Array]:
        maxima = super()._maxima(tops[0])
        for top in tops[1:]:
            if self.memory.plan.is_shifted:
                sync.block_barrier()  # other warps may still read the maxima before
            maxima += super()._maxima(top)
        return maxima

    def _exchange(self, number: int, *parts):
        """Exchanges some values of each warp through shared memory, in a block or a cluster: returns those of all warps.

        Exchanges take turns with two buffers. A warp that writes in one exchange has read what was written in the one before;
        so all warps have read what was written two before.
        """
        plan, warpgroup = self.memory.plan, self.memory.warpgroup()
        slots = self.places_of_exchange(number, len(parts))
        if plan.cluster > 1:
            warpgroup = self.memory.rank * plan.warpgroups + warpgroup
            if number == 0:
                sync.cluster_wait()  # until the other blocks run, whose shared memory this one stores to
            for slot, part in zip(slots, parts, strict=True):
                sync.send_to_cluster(slot, warpgroup * WARPS, part, plan.row_layout, plan.cluster, self.arrivals, number)
            sync.await_exchange(self.arrivals, number, 4 * len(parts) * plan.warps)
        else:
            for slot, part in zip(slots, parts, strict=True):
                slot[pl.ds(warpgroup * WARPS, WARPS)] = part
            if plan.warpgroups > 1:
                sync.block_barrier()
            else:
                plgpu.commit_smem()
        everywhere = replicated(plan.warps)
        return [plgpu.load(slot, layout=everywhere, optimized=False) for slot in slots]


def _size_of_piece(scores: Steps) -> int:
    """Returns the steps of an iteration that share a piece of code: one, if elements are widened as they are used, or all."""
    return 1 if isinstance(scores, Elements) and scores.in_words else sys.maxsize


class _Base2(NamedTuple):
    """Makes exponents in base 2 of scores, `score * unit - start`, each by one multiply-add.

    The unit is `scale * log2(e)`, and `start` is `m * unit`, rounded. So an exponent is that relative to `m`, plus an error
    that is alike for all. The error is the exponent of `m` itself.

    Where `start` would be beyond 2e9, two scores that differ do so by at least 119, and the weight of the smaller one is 0, or
    as good as 0, in any unit that keeps them so far apart. The unit then is a power of two, or 1, so that `start` is exact, and
    finite. A scale that is not finite gives NaN.
    """

    size: jax.Array  # `scale * log2(e)`
    unit: jax.Array
    start: jax.Array
    error: jax.Array  # `m * unit - start`, at most 64

    @classmethod
    def of(cls, m: jax.Array, scale: jax.Array | None, layout: Any) -> "_Base2":
        """Returns the base of scores relative to `m`, finite, with a `scale` that is a number, None, or in the shape of `m`."""
        size = _size_log2(scale)
        is_far, other = jnp.abs(m * size) >= 2e9, jnp.float32(1)
        if scale is not None:
            other = jnp.sign(scale) * power_of_two_over(m, 36, layout) + (scale - scale)
        unit = jnp.where(is_far, other, size)
        start = m * unit
        return cls(size, unit, start, fma(m, unit, -start, layout))


def _size_log2(scale: jax.Array | None) -> jax.Array:
    """Returns the factor of scores in base 2."""
    return jnp.float32(_LOG2E) if scale is None else scale * jnp.float32(_LOG2E)


def _maxima_that_weigh(m: jax.Array, d: jax.Array) -> jax.Array:
    """Returns maxima of warps, `-inf` for a warp that has the block's infinite maximum and no weight: 0 * inf would be NaN."""
    return jnp.where(jnp.logical_and(d == 0, m == jnp.inf), jnp.full_like(m, -jnp.inf), m)


def _rounded(layout: Any) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Returns a product of arrays of this layout that is rounded even where it is added to something."""
    return lambda a, b: fma(a, b, plgpu.layout_cast(jnp.zeros(a.shape, jnp.float32), layout), layout)
