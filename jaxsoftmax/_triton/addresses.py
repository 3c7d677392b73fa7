"""Where Triton kernels find operands that may have size 1 where others have more; `problem.indexed` says how."""

import triton
import triton.language as tl


@triton.jit
def offset(index, DIMS: tl.constexpr, AXIS: tl.constexpr):
    """Where a broadcast operand has what belongs to an index of an axis, of triples of divisor, size or 0, and stride."""
    total = index * 0
    for k in tl.static_range(0, len(DIMS[AXIS]), 3):
        part = index // DIMS[AXIS][k]
        if DIMS[AXIS][k + 1] != 0:
            part = part % DIMS[AXIS][k + 1]
        total += part * DIMS[AXIS][k + 2]
    return total
