"""Online softmax in Triton: the twin of `jaxsoftmax.online`, since Pallas and Triton share no functions. A test compares both.

A state is a pair `m, d` for each row of a tile `[rows, columns]`: the maximum of the scores, and the sum of `exp(score - m)`.
`size`, `[rows]`, is the `scale` of `jaxsoftmax.online`; the compiler leaves out a constant 1. Scores are float32.
"""

import math

import triton
import triton.language as tl

INF = tl.constexpr(float("inf"))
LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def shift(m):
    """Returns what to subtract from scores whose maximum is `m`: 0 for an infinite `m`, where `m - m` would be NaN."""
    return tl.where(tl.abs(m) < INF, m, 0.0)


@triton.jit
def weights(scores, m, size):
    """Computes `exp(size * (scores - m))`, 0 for a score of `-inf`; the shapes of `m` and `size` broadcast with the scores'."""
    exponent = scores - shift(m)
    # `exp` scales results below 1e-38, in three more instructions; `exp2` flushes them to 0. And 0 * -inf would be NaN.
    return tl.exp2(tl.where(exponent == -INF, exponent, exponent * (size * LOG2E)))


@triton.jit
def lift(scores, size):
    """Computes the state of each row of a tile."""
    m = tl.max(scores, 1)
    return spread_nan(m, tl.sum(weights(scores, m[:, None], size[:, None]), 1))


@triton.jit
def push(m, d, scores, size):
    """Merges a state with `lift(scores)`, with one rescaling instead of two."""
    top = tl.maximum(m, tl.max(scores, 1))
    return spread_nan(top, d * weights(m, top, size) + tl.sum(weights(scores, top[:, None], size[:, None]), 1))


@triton.jit
def merge(m, d, other_m, other_d, size):
    """Computes the state of the scores of two states."""
    top = tl.maximum(m, other_m)
    return spread_nan(top, d * weights(m, top, size) + other_d * weights(other_m, top, size))


@triton.jit
def merge_along(m, d, size):
    """Computes the state of all scores of the states in a tile `[rows, states]`, for each row."""
    top = tl.max(m, 1)
    return spread_nan(top, tl.sum(d * weights(m, top[:, None], size[:, None]), 1))


@triton.jit
def spread_nan(m, d):
    """Returns a state whose `m` is NaN if its `d` is: maxima leave NaN out."""
    return tl.where(d == d, m, d), d


@triton.jit
def push_log2(m, d, scores, SCALE_LOG2: tl.constexpr, HEADROOM: tl.constexpr, UNIT: tl.constexpr):
    """Pushes scores to a state in powers of two: returns the state, the factor for sums, and the weights.

    It serves kernels that sum the values themselves.
    """
    top = tl.maximum(m, tl.max(scores, 1) * SCALE_LOG2 - HEADROOM / UNIT)
    shifted = shift(top)
    factor = tl.exp2((m - shifted) * UNIT)
    weight = tl.exp2((scores * SCALE_LOG2 - shifted[:, None]) * UNIT)
    return top, d * factor + tl.sum(weight, 1), factor, weight


@triton.jit
def lift_log2(score, HEADROOM: tl.constexpr, UNIT: tl.constexpr):
    """Computes the state of one score, in natural units, as `push_log2` has it."""
    return score * (LOG2E / UNIT) - HEADROOM / UNIT, tl.zeros_like(score) + 2.0**HEADROOM


@triton.jit
def lse_log2(m, d, UNIT: tl.constexpr):
    """Computes the log-sum-exp, in natural units, of a state of `push_log2`."""
    return m * (UNIT / LOG2E) + tl.log2(d) * (1 / LOG2E)
