"""Online softmax in Triton: the twin of `jaxsoftmax.online`, to which a test holds it.

A state is a pair `m, d`, the maximum of the scores and the sum of `exp(score - m)`, of each row of a tile `[rows, columns]`.
`size`, `[rows]`, is the `scale` of `jaxsoftmax.online`; the compiler leaves out a constant 1. Scores are float32.
"""

import math

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def shift(m):
    """What to subtract from scores whose maximum is `m`: 0 for an infinite one, where `m - m` would be NaN."""
    return tl.where(tl.abs(m) < INF, m, 0.0)


@triton.jit
def weights(scores, m, size):
    """`exp(size * (scores - m))`, 0 for a score of `-inf`; the shapes of `m` and `size` broadcast with the scores'."""
    exponent = scores - shift(m)
    # By `exp2`, as `exp` takes three instructions more for results below 1e-38. And 0 * -inf would be NaN.
    return tl.exp2(tl.where(exponent == -INF, exponent, exponent * (size * LOG2E)))


@triton.jit
def lift(scores, size):
    """The state of each row of a tile."""
    m = tl.max(scores, 1)
    return known(m, tl.sum(weights(scores, m[:, None], size[:, None]), 1))


@triton.jit
def push(m, d, scores, size):
    """`merge` of a state and `lift(scores)`, with one rescaling instead of two."""
    top = tl.maximum(m, tl.max(scores, 1))
    return known(top, d * weights(m, top, size) + tl.sum(weights(scores, top[:, None], size[:, None]), 1))


@triton.jit
def merge(m, d, other_m, other_d, size):
    """The state of the scores of both."""
    top = tl.maximum(m, other_m)
    return known(top, d * weights(m, top, size) + other_d * weights(other_m, top, size))


@triton.jit
def merge_along(m, d, size):
    """The state of all scores of the states in a tile `[rows, states]`, for each row."""
    top = tl.max(m, 1)
    return known(top, tl.sum(d * weights(m, top[:, None], size[:, None]), 1))


@triton.jit
def known(m, d):
    """A state whose `m` is NaN if its `d` is: maxima leave NaN out."""
    return tl.where(d == d, m, d), d


@triton.jit
def push_log2(m, d, scores, SCALE_LOG2: tl.constexpr, HEADROOM: tl.constexpr, UNIT: tl.constexpr):
    """`push` in powers of two, for kernels that sum the values themselves: the state, the factor for sums, and weights."""
    top = tl.maximum(m, tl.max(scores, 1) * SCALE_LOG2 - HEADROOM / UNIT)
    shifted = shift(top)
    factor = tl.exp2((m - shifted) * UNIT)
    weight = tl.exp2((scores * SCALE_LOG2 - shifted[:, None]) * UNIT)
    return top, d * factor + tl.sum(weight, 1), factor, weight


@triton.jit
def lift_log2(score, HEADROOM: tl.constexpr, UNIT: tl.constexpr):
    """The state of one score, in natural units, as `push_log2` has it."""
    return score * (LOG2E / UNIT) - HEADROOM / UNIT, tl.zeros_like(score) + 2.0**HEADROOM


@triton.jit
def lse_log2(m, d, UNIT: tl.constexpr):
    """The log-sum-exp, in natural units, of a state of `push_log2`."""
    return m * (UNIT / LOG2E) + tl.log2(d) * (1 / LOG2E)
