"""How a block draws from a row by the Gumbel-max trick: it computes noise only for elements that may be the best so far.

The best entry so far is in shared memory. An entry (see `keys`) is larger than another if its score is, or if the scores are
equal and its column is the lower one.

Eight elements of a thread, whose random bits come from one evaluation of Philox, are looked at together: by the largest of
them, and the least of the upper halves of their random words. One exponential tells if one of them may exceed the best so far.
If so four are looked at, and then each alone; and if its own half allows it, too, all of its bits are made, and its noise. That
takes seven instructions an element, where a word and an exponential for each took thirty. Early in a row one of them often may,
which is why short rows take longer for their length.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax import online
from jaxsoftmax._gpu import sync
from jaxsoftmax._gpu.emit import SCALAR, SPLAT, compare, constant, emit, i64, integer, least_halves, utils
from jaxsoftmax._gpu.fused import fused, product
from jaxsoftmax.ops.top_k import noise
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import start_of
from jaxsoftmax.ops.top_k.mosaic_sm90.keys import BITS_OF_KEY, KEY, EntryFormat
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import Sweep, SweptRow

# The best entry so far.


@dataclass(frozen=True)
class Winner:
    """The largest of the scores of a row, as an entry in shared memory."""

    best: Any  # of the type `scratch`: the entry of the block, and the entries of all blocks of the cluster
    cols: int  # of a row
    blocks: int  # of the cluster

    @staticmethod
    def scratch(blocks: int) -> Any:
        """Returns the type of `best`."""
        return plgpu.SMEM((2 + 2 * blocks,), jnp.int32)

    @functools.cached_property
    def format(self) -> EntryFormat:
        return EntryFormat(self.cols)

    def clear(self) -> None:
        """Sets it to what is less than all scores that may be drawn: -inf in the first column."""
        entry = 0x007FFFFF << self.format.bits | self.format.last

        def clear(best):
            asm, is_first = f"st.shared.b64 [$0], {entry};", compare("eq", utils.thread_idx(), constant(0))
            utils.inline_ptx(asm, start_of(best), predicate=is_first, has_side_effects=True)

        sync.block_barrier()
        emit(clear, self.best)
        sync.block_barrier()

    def may_win(self, scores: jax.Array, words: jax.Array, noise: jax.Array | None, layout) -> jax.Array:
        """Tells whether a score with noise may be larger than the entry, in any thread of the warp: an int32, 0 if not.

        `words` are the random ones, or less than these. Noise is at most `-log(v)`, with `v` the word as a fraction of 2^32. So
        `v` must not exceed the exponential of the difference between the scores: one operation of the special function unit,
        where the noise takes three. A sum that rounds to the entry's score may win by its column. `noise` is a factor of the
        noise, or None for 1.
        """

        def test(best, score, word, *factor):
            score, word = (array.registers.item() for array in (score, word))
            bits = self.format.bits
            asm = f"{{ .reg .b64 entry; ld.shared.u64 entry, [$1]; shr.u64 entry, entry, {bits}; cvt.u32.u64 $0, entry; }}"
            key = utils.inline_ptx(asm, start_of(best), result_types=integer(32), has_side_effects=True)
            least, unit = _limits(key, factor[0].registers.item() if factor else None)
            flag: Any = constant(0)
            for q in range(score.type.shape[0]):
                operands = (llvm.extractelement(part, constant(q)) for part in (score, word))
                flag = utils.inline_ptx(_MAY_WIN, *operands, least, unit, flag, result_types=integer(32))
            asm = "{ .reg .pred any; setp.ne.u32 any, $1, 0; vote.sync.any.pred any, any, 0xffffffff; selp.u32 $0, 1, 0, any; }"
            return [utils.inline_ptx(asm, flag, result_types=integer(32), has_side_effects=True, convergent=True)]

        arrays = [(scores, layout), (words, layout)] + ([] if noise is None else [(noise, SPLAT)])
        return emit(test, self.best, (), arrays, SCALAR)

    def push(self, scores: jax.Array, columns: jax.Array, layout) -> None:
        """Offers elements of each thread. After a barrier all threads see the entry."""

        def push(best, scores, columns):
            scores, columns = (array.registers.item() for array in (scores, columns))
            largest: Any = i64(0)
            for q in range(scores.type.shape[0]):
                score, column = (llvm.extractelement(part, constant(q)) for part in (scores, columns))
                asm = _ENTRY.format(bits=self.format.bits, last=self.format.last)
                entry = utils.inline_ptx(asm, arith.bitcast(integer(32), score), column, result_types=integer(64))
                largest = arith.maxui(largest, entry)
            asm = _PUSH_LARGEST.format(bits=self.format.bits, last=self.format.last)
            utils.inline_ptx(asm, start_of(best), largest, utils.thread_idx(), has_side_effects=True, convergent=True)

        emit(push, self.best, (), [(scores, layout), (columns, layout)])

    def share(self, rank) -> None:
        """Makes the entries of all blocks known to each, once they are final. The cluster must have started."""
        sync.block_barrier()
        if self.blocks == 1:
            return
        stores = " ".join(
            f"mapa.shared::cluster.u32 there, place, {other}; @is st.shared::cluster.b64 [there+8], entry;"
            for other in range(self.blocks)
        )
        asm = (
            "{ .reg .pred is; .reg .b32 place, there; .reg .b64 entry; setp.eq.u32 is, $1, 0; ld.shared.u64 entry, [$0];"
            f" shl.b32 place, $2, 3; add.u32 place, place, $0; {stores} }}"
        )

        def share(best, rank):
            utils.inline_ptx(asm, start_of(best), utils.thread_idx(), rank, has_side_effects=True)

        emit(share, self.best, [rank])
        sync.cluster_barrier()

    def column(self) -> jax.Array:
        """Returns the column of the best entry of all blocks, in all threads, after `share`."""
        loads = " ".join(
            f"ld.shared.u64 other, [$1+{8 + 8 * rank}]; max.u64 entry, entry, other;" for rank in range(self.blocks)
        )
        last = self.format.last
        asm = (
            f"{{ .reg .b64 entry, other; ld.shared.u64 entry, [$1]; {loads if self.blocks > 1 else ''}"
            f" cvt.u32.u64 $0, entry; and.b32 $0, $0, {last}; sub.u32 $0, {last}, $0; }}"
        )

        def load(best):
            return [utils.inline_ptx(asm, start_of(best), result_types=integer(32), has_side_effects=True)]

        return emit(load, self.best, results=SCALAR)


def _limits(key, factor):
    """Returns the score of a key, rounded down, and log2(e) over the factor of the noise: `$3` and `$4` of `_MAY_WIN`."""
    bits = utils.inline_ptx(BITS_OF_KEY, key, result_types=integer(32))
    asm = "{ .reg .f32 size; abs.f32 size, $1; fma.rn.f32 $0, size, 0fB4000000, $1; }"  # less by 2^-23 of it
    score = arith.bitcast(ir.F32Type.get(), bits)
    score = utils.inline_ptx(asm, score, result_types=score.type)
    unit = utils.c(math.log2(math.e), score.type)
    if factor is not None:
        unit = arith.divf(unit, arith.maximumf(factor, utils.c(1e-30, unit.type)))
    return score, unit


# $0: the entry of a float32 $1 in column $2; a column behind the row counts as the last one.
_ENTRY = (
    "{{ .reg .b32 key, word; .reg .b64 place; mov.b32 key, $1;"
    + KEY["float32"]
    + " cvt.u64.u32 $0, key; shl.b64 $0, $0, {bits};"
    " min.u32 word, $2, {last}; sub.u32 word, {last}, word; cvt.u64.u32 place, word; add.u64 $0, $0, place; }}"
)

# $0: $5, or 1 if the score $1 may exceed $3 with the random word $2.
_MAY_WIN = (
    "{ .reg .pred is; .reg .b32 word; .reg .f32 most;"
    " shr.u32 word, $2, 9; or.b32 word, word, 0x3f800000;"  # 1 + v, with v rounded down to 23 bits
    " sub.f32 most, $1, $3; fma.rn.f32 most, most, $4, 0f3C23D70A;"  # ($1 - $3) * $4, increased by 0.01 as it is rounded
    " ex2.approx.ftz.f32 most, most; add.f32 most, most, 0f3F800000;"  # 1 + the largest v with which the score wins
    " setp.leu.f32 is, word, most; mov.b32 $0, $5; @is mov.b32 $0, 1; }"
)

# The largest $1 of a warp goes to the entry at $0, by its first thread; $2 is the thread.
_PUSH_LARGEST = (
    "{{ .reg .pred is; .reg .b32 key, rest, word; .reg .b64 entry, more; shr.u64 entry, $1, {bits}; cvt.u32.u64 key, entry;"
    " redux.sync.max.u32 word, key, 0xffffffff; setp.eq.u32 is, key, word;"  # the largest key
    " cvt.u32.u64 rest, $1; and.b32 rest, rest, {last}; selp.u32 rest, rest, 0, is;"
    " redux.sync.max.u32 rest, rest, 0xffffffff;"  # and of entries with this key the first column
    " cvt.u64.u32 entry, word; shl.b64 entry, entry, {bits}; cvt.u64.u32 more, rest; add.u64 entry, entry, more;"
    " and.b32 word, $2, 31; setp.eq.u32 is, word, 0; @is red.shared.max.u64 [$0], entry; }}"
)


# Drawing.


def number_of_row(ref, row):
    """Loads the number of a row from an array that may have one for all."""
    return ref[0 if ref.shape == (1,) else row]


@dataclass(frozen=True)
class Filter:
    """A filter of the elements to draw from."""

    test: Callable[..., jax.Array]  # function of scores, columns and `numbers` to what is kept
    numbers: tuple[Any, ...]  # scalars


class Drawing:
    """Draws from a row, or from what is kept of it."""

    def __init__(self, row: SweptRow, x_ref, of_row, best):
        row_plan = row.plan.row_plan
        self.row, self.of_row = row, {name: number_of_row(ref, row.memory.row) for name, ref in of_row.items()}
        self.inverse, self.noise = self.of_row.get("inverse"), self.of_row.get("noise")  # None for 1
        self.elements = row.memory.read(x_ref, -jnp.inf, jnp.dtype(jnp.float32))
        self.factor = self.of_row.get("factor", 1 / self.of_row["divisor"] if "divisor" in self.of_row else None)
        # Products are in float32 as soon as they are loaded.
        self.scores = self.elements if self.factor is None else replace(self.elements, of=self.elements.dtype)
        self.step_cols, self.layout = row_plan.step_cols, row_plan.layout
        self.place = row.tile.column(0)
        self.winner = Winner(best, row_plan.cols, row.plan.blocks)

    def column(self) -> jax.Array:
        """Returns the column that was drawn, in all blocks of the cluster."""
        self.winner.share(self.row.memory.rank)
        return self.winner.column()

    def min_p_filter(self) -> Filter:
        """Returns the filter of `min_p`, for a row whose maximum is known."""
        inverse, least = [] if self.inverse is None else [self.inverse], self.of_row["min_p"]
        least = jnp.where(least == least, jnp.minimum(least, 1), -1)  # NaN keeps all
        return Filter(_min_p_keeps, (self.of_row["m"], least, *inverse))

    def multiplied(self, sweep: Sweep) -> Sweep:
        """Returns the sweep with elements that are multiplied as they are loaded, if there is a factor."""
        factor = self.factor
        if factor is None:
            return sweep
        inside = None if sweep.is_whole else self.row.memory.inside()  # beyond the end they are -inf

        def product(step, elements):
            scores = self.elements.converted(elements) * factor
            seen = None if inside is None else inside(step)
            return scores if seen is None else jnp.where(seen, scores, jnp.full_like(scores, -jnp.inf))

        def load(index=None):
            if index is not None:
                return product(sweep.steps[index], sweep.load(index))
            return list(map(product, sweep.steps, sweep.load()))

        return replace(sweep, load=load)

    def tops(self, loaded) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the maxima at each place, or NaN: of all steps, in float32, and of each group of steps, as in memory.

        The random halves of the first group are the lower ones of their words, and those of the second the upper ones.
        """
        larger = self.scores.maximum if self.scores.in_words else functools.partial(functools.reduce, jnp.maximum)
        groups = [larger(loaded[i : i + noise.WORDS]) for i in range(0, len(loaded), noise.WORDS)]
        return self.scores.converted(larger(groups)), groups

    def draw(self, sweep: Sweep, tops, kept: Filter | None = None) -> None:
        """Draws among the elements of a sweep that `kept` keeps, or among all; `tops` are their maxima.

        What is looked at alone is loaded again, from where it takes no registers.
        """
        step_noise = _SweepNoise(self, sweep, kept)
        top, groups = tops
        least = least_halves(step_noise.words, self.layout)

        @pl.when(step_noise.may_win(step_noise.at_temperature(top), jnp.minimum(*least)))
        def _():
            for number, (group, upper) in enumerate(zip(groups, least, strict=False)):
                score = step_noise.at_temperature(group)

                @pl.when(step_noise.may_win(score, upper))
                def _(number=number):
                    # A loop would lower a quarter less of the kernel that redraws, but a row drawn anew takes 4% longer.
                    for index in range(len(sweep.steps))[number * noise.WORDS :][: noise.WORDS]:
                        step_noise.draw_step(index)


class _SweepNoise:
    """The random words of a sweep, and the comparison of its elements with the winner."""

    def __init__(self, drawing: Drawing, sweep: Sweep, kept: Filter | None):
        self.drawing, self.sweep, self.kept, self.layout = drawing, sweep, kept, drawing.layout
        self.inverse = [] if drawing.inverse is None else [drawing.inverse]
        self.counter = [
            jnp.int32(sweep.steps[0] // noise.HALVES * noise.STRIDE),
            *(drawing.of_row[name] for name in ("row", "key0", "key1")),
        ]
        self.words = fused(_random_words, (0,), [drawing.place, *self.counter], self.layout)

    def at_temperature(self, scores) -> jax.Array:
        return fused(_at_temperature, (self.kept is not None,), [scores, *self.inverse], self.layout)

    def may_win(self, scores, words):
        """Tells whether a score may be larger than the winner, with random words that are no less than these."""
        return self.drawing.winner.may_win(scores, words, self.drawing.noise, self.layout) != 0

    def draw_step(self, index: int) -> None:
        """Draws among the elements of one step of the sweep."""
        drawing, kept = self.drawing, self.kept
        elements, column = self.sweep.load(index), jnp.int32(self.sweep.steps[index] * drawing.step_cols)
        operands = [elements, self.words[index % noise.WORDS], drawing.place, column, *self.inverse]
        options = index, kept and kept.test, len(self.inverse)
        score, upper, columns = fused(_scored, options, [*operands, *(kept.numbers if kept else ())], self.layout)

        def push():
            factor = [] if drawing.noise is None else [drawing.noise]
            total = fused(_total, (index,), [score, upper, drawing.place, *self.counter, *factor], self.layout)
            drawing.winner.push(total, columns, self.layout)

        pl.when(self.may_win(score, upper))(push)


# What is computed for each element of a step. A function that is `fused` is one operation of the kernel: to lower an operation
# of `jax.numpy` takes Pallas half a millisecond. The three kernels with `top_p` have 1052 operations so, in place of 5387.


def along(number, like):
    """Broadcasts a scalar to the shape of an array."""
    return lax.broadcast_in_dim(number, like.shape, ())


@functools.partial(jax.jit, static_argnums=0)
def _random_words(more: int, place, first, row, key0, key1):
    block = (place + first).astype(jnp.uint32) + np.uint32(more)
    row, key0, key1 = (along(number, place) for number in (row, key0, key1))
    return noise.words_of(block, row, key0, key1, product)


def _at_temperature(is_filtered: bool, scores, inverse=None):
    """Returns the scores that are compared. If they overflow, those that a filter keeps are alike, but more than the others."""
    scores = scores.astype(jnp.float32)
    scores = scores if inverse is None else scores * along(inverse, scores)
    return jnp.maximum(scores, jnp.finfo(jnp.float32).min) if is_filtered else scores


def _scored(index: int, test, temperatures: int, elements, word, place, first, *numbers):
    """Returns the scores that are compared, the upper halves of the random words and the columns of one step of a sweep."""
    elements, columns = elements.astype(jnp.float32), place + along(first, place)
    scores = _at_temperature(test is not None, elements, *numbers[:temperatures])
    if test is not None:
        scores = jnp.where(test(elements, columns, *numbers[temperatures:]), scores, -jnp.inf)
    return scores, noise.half_of(word, index), columns


def _total(index: int, score, upper, place, *numbers):
    """Returns the scores with noise of one step of a sweep; `numbers` are the counter, and a factor of the noise or nothing."""
    counter, factor = numbers[:4], numbers[4:]
    words = _random_words(noise.LOWER, place, *counter)
    noise_of_columns = noise.gumbel(upper | noise.half(words, index) >> np.uint32(16))
    total = score + (noise_of_columns * along(factor[0], score) if factor else noise_of_columns)
    return jnp.where(total == total, total + 0, jnp.inf)  # NaN before all numbers, and -0 as 0


def weights(x, m, inverse=None):
    """Computes the weights of scores in a row of maximum `m`."""
    return online.weights(x, along(m, x), axis=(), scale=None if inverse is None else along(inverse, x))


def _min_p_keeps(x, columns, m, least, inverse=None):
    del columns
    return weights(x, m, inverse) >= along(least, x)


def is_before(x, columns, value, column):
    """Tells which elements come before an entry with this value in this column, where 0 and -0 are equal."""
    value, column = along(value, x), along(column, x)
    return jnp.logical_or(x > value, jnp.logical_and(x == value, columns < column))


def _is_before_and_min_p_keeps(x, columns, value, column, *of_row):
    return jnp.logical_and(is_before(x, columns, value, column), _min_p_keeps(x, columns, *of_row))


def before_filter(value, column, min_p: Filter | None) -> Filter:
    """Returns the filter that keeps what comes before an entry, and what `min_p` keeps of that."""
    if min_p is None:
        return Filter(is_before, (value, column))
    return Filter(_is_before_and_min_p_keeps, (value, column, *min_p.numbers))
