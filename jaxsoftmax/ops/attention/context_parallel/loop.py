"""Repetition of one step: written out if it is short, a loop if there are many devices."""

import functools

from jax import lax

MOST_UNROLLED = 16  # steps that are written out; each traces and lowers a kernel call


def repeat(step, start: int, stop: int, carry):
    """Repeats `carry = step(i, carry)` for `i` in `range(start, stop)`, in a loop if there are `MOST_UNROLLED` or more.

    The body of the loop has two steps, which swap their buffers, so that XLA copies none.
    """
    if stop - start < MOST_UNROLLED:
        return functools.reduce(lambda carry, i: step(i, carry), range(start, stop), carry)
    return lax.fori_loop(start, stop, step, carry, unroll=2)
