"""Addresses of operands that may have size 1 along axes along which other operands have more; see `row_problem.indexed`."""

import triton
import triton.language as tl


@triton.jit
def offset(index, DIMS: tl.constexpr, AXIS: tl.constexpr):
    """Computes the place of an index of an axis in a broadcast operand, from triples of divisor, size or 0, and stride.

    Divisors and sizes are constants: a GPU divides by them with a product and a shift.
    """
    total = index * 0
    for k in tl.static_range(0, len(DIMS[AXIS]), 3):
        part = index // DIMS[AXIS][k]
        if DIMS[AXIS][k + 1] != 0:
            part = part % DIMS[AXIS][k + 1]
        total += part * DIMS[AXIS][k + 2]
    return total
