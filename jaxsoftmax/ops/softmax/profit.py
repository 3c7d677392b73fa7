"""Reasons why XLA should compute rows faster than a kernel, whichever kernel it is. All figures are from an H200.

Problems are those of the softmax family or of cross-entropy, which have `rows` and the parameter `dtype`. Each function returns
a reason in words, or None.
"""

import jax.numpy as jnp

from jaxsoftmax._core.row_problem import RowwiseProblem
from jaxsoftmax.ops.softmax.primitive import LOG_SOFTMAX, LOG_SOFTMAX_VJP, LOGSUMEXP_VJP, SOFTMAX

# Columns of the longest rows at which XLA's fused forward is faster, by the bytes of an element. XLA computes longer rows more
# slowly: at 32768 columns softmax(x * c + b) takes as long either way in float32 (260 us). In bfloat16 the kernel is faster:
# 149 to 168 us, and 147 to 212 us at 16384 columns.
FUSED_COLS = {4: 16384, 2: 8192}


def slower_softmax(problem: RowwiseProblem) -> str | None:
    """Checks a problem of the softmax family for all reasons."""
    is_forward = problem.operation in (SOFTMAX, LOG_SOFTMAX)
    reason = slower_rows(problem, wins_if_wide=is_forward, checks_cast=problem.operation == SOFTMAX)
    return slower_if_product(problem) if reason is None else reason


def slower_rows(problem: RowwiseProblem, *, wins_if_wide: bool, checks_cast: bool = False) -> str | None:
    """Checks for the reasons below: see `slower_if_fused` for `wins_if_wide`."""
    reason = slower_shape(problem) or slower_if_fused(problem, wins_if_wide=wins_if_wide)
    return slower_if_cast(problem) if reason is None and checks_cast else reason


def slower_shape(problem: RowwiseProblem) -> str | None:
    """Checks for rows of one entry, and for short rows with few others beside them."""
    rows = problem.rows
    if rows.cols == 1:
        return "XLA computes rows of one entry element by element"
    # Kernels take 1774 us for [2^20, 16, 8] in float32 and 3795 us in bfloat16, and XLA 579 and 368 us.
    if 1 < rows.inner < 16 and rows.cols * rows.inner <= 256:
        return "XLA is faster at rows that are short and have few others beside them"
    return None


def slower_if_fused(problem: RowwiseProblem, *, wins_if_wide: bool) -> str | None:
    """Checks for an operand that XLA computes together with the reference, and then does not write to memory.

    With 2^26 elements in 4096 columns softmax(x * c + b) takes 150 us with XLA in float32, and 257 us if the operand is written
    for a kernel; in bfloat16 79 and 146 us.

    Args:
      problem: the problem.
      wins_if_wide: True if the kernel is faster nevertheless at wide rows. This holds for softmax and log_softmax; the
        derivatives and logsumexp are left to XLA at any width.
    """
    if problem.fused and not (wins_if_wide and is_wide(problem)):
        return f"XLA computes {problem.operation.name} together with what produces its operand, which then is never in memory"
    return None


def slower_if_cast(problem: RowwiseProblem) -> str | None:
    """Checks for a cast to float32 before softmax, which mostly has one back behind it.

    What reads a result is not known while lowering, and XLA may fuse that too. Other readers, such as dropout or a product, are
    not guessed.
    """
    if problem.is_cast and jnp.dtype(problem.params["dtype"]) == jnp.float32 and not is_wide(problem):
        return "XLA fuses the cast of its operand, and one back that may follow; with dtype= the kernel casts both"
    return None


def slower_if_product(problem: RowwiseProblem) -> str | None:
    """Checks for a factor in front of the scores, which kernels take in, where one follows behind the result.

    The cotangent of a product is multiplied by the factor too. XLA does so while it computes the cotangent. Behind a kernel it
    would read and write the cotangent once more: two of five passes over memory, where XLA needs four at most. Not measured.
    """
    return multiplied_behind(problem) if problem.is_product and problem.operation in (LOG_SOFTMAX_VJP, LOGSUMEXP_VJP) else None


def multiplied_behind(problem: RowwiseProblem) -> str:
    """Says that XLA applies the factor to a cotangent that it computes anyway."""
    return f"XLA multiplies the result of {problem.operation.name} by the factor of its operand before it is in memory"


def is_wide(problem: RowwiseProblem) -> bool:
    """Tells whether rows are so long that XLA's fused forward is no faster than a kernel that reads its operand."""
    return problem.rows.cols > FUSED_COLS[max(problem.rows.read[0], jnp.dtype(problem.params["dtype"]).itemsize)]
