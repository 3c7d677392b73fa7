"""How a block draws from a row by the Gumbel-max trick: it computes noise only for elements that may be the best so far.

Eight elements of a thread, whose random bits come from one evaluation of Philox, are looked at together: by the largest of
them, and the least of the upper halves of their random words. One exponential tells if one of them may exceed the best so far.
If so four are looked at, and then each alone; and if its own half allows it, too, all of its bits are made, and its noise. That
takes seven instructions an element, where a word and an exponential for each took thirty. Early in a row one of them often may,
which is why short rows take longer for their length.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu.emit import least_halves
from jaxsoftmax._gpu.fused import fused, product
from jaxsoftmax.ops.top_k import noise
from jaxsoftmax.ops.top_k.mosaic_sm90.sweeps import Sweep, SweptRow
from jaxsoftmax.ops.top_k.mosaic_sm90.winner import Winner


def number_of_row(ref, row):
    """Loads the number of a row from an array that may have one for all."""
    return ref[0 if ref.shape == (1,) else row]


@dataclass(frozen=True)
class Filter:
    """A filter of the elements to draw from.

    Attributes:
      test: function of scores, columns and `numbers` to what is kept.
      numbers: scalars.
    """

    test: Callable[..., jax.Array]
    numbers: tuple[Any, ...]


class Drawing:
    """Draws from a row, or from what is kept of it.

    Attributes:
      inverse: 1 / temperature, or None for 1.
      noise: factor of the noise, or None for 1.
      elements: what loads the elements of a step.
      winner: the best entry so far.
    """

    def __init__(self, row: SweptRow, x_ref, of_row, best):
        row_plan = row.plan.row_plan
        self.row, self.of_row = row, {name: number_of_row(ref, row.memory.row) for name, ref in of_row.items()}
        self.inverse, self.noise = self.of_row.get("inverse"), self.of_row.get("noise")
        self.elements = row.memory.read(x_ref, -jnp.inf, jnp.dtype(jnp.float32))
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

    def tops(self, loaded) -> tuple[jax.Array, list[jax.Array]]:
        """Returns the maxima at each place, or NaN: of all steps, in float32, and of each group of steps, as in memory.

        The random halves of the first group are the lower ones of their words, and those of the second the upper ones.
        """
        larger = self.elements.maximum if self.elements.in_words else functools.partial(functools.reduce, jnp.maximum)
        groups = [larger(loaded[i : i + noise.WORDS]) for i in range(0, len(loaded), noise.WORDS)]
        return self.elements.converted(larger(groups)), groups

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
