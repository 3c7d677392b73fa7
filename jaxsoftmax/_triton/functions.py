"""Functions that the Triton kernels share: one of float32 numbers that Triton lacks, and places in broadcast operands."""

import triton
import triton.language as tl

from jaxsoftmax._triton import online

LOG2E = online.LOG2E


@triton.jit
def tanh(x):
    """Computes `tanh` to the rounding of float32. The instruction of the hardware is less exact.

    Source: the polynomial for small arguments is that of S. Moshier's Cephes library, `tanhf`.
    """
    square = x * x
    series = (-5.70498872745e-3 * square + 2.06390887954e-2) * square - 5.37397155531e-2
    series = (series * square + 1.33314422036e-1) * square - 3.33332819422e-1
    return tl.where(tl.abs(x) < 0.625, x + x * square * series, 1 - 2 / (1 + tl.exp2(x * (2 * LOG2E))))


@triton.jit
def offset(index, DIMS: tl.constexpr, AXIS: tl.constexpr):
    """Computes the place of an index of an axis in an operand that may have size 1 there; see `row_problem.indexed`.

    DIMS has, for each axis, triples of divisor, size or 0, and stride. They are constants: a GPU divides by them with a product
    and a shift.
    """
    total = index * 0
    for k in tl.static_range(0, len(DIMS[AXIS]), 3):
        part = index // DIMS[AXIS][k]
        if DIMS[AXIS][k + 1] != 0:
            part = part % DIMS[AXIS][k + 1]
        total += part * DIMS[AXIS][k + 2]
    return total
