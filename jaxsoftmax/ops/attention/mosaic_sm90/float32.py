"""Operands of float32 in the forward kernel: each is split into the sum of two terms of bfloat16.

    high = bfloat16(x)    low = bfloat16(x - high)    x y = low y.high + high y.low + high y.high

A product is three of theirs, in one float32 accumulator. It misses up to 2^-15 of the sum of its absolute terms (TF32: 2^-10).
A term that is infinite times one that is 0 is NaN, so an infinite operand gives NaN.

TMA cannot split: producers load rows to registers, with 0 beyond the ends, so any length and head size is as good as another,
and store both terms. The weights are split in registers, and the output goes from registers to global memory.
"""

from dataclasses import dataclass

import jax.experimental.pallas.mosaic_gpu as plgpu

from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import ForwardSlots, TmaCopies
from jaxsoftmax.ops.attention.mosaic_sm90.operands import ROWS, SWIZZLED


@dataclass(frozen=True)
class TermSlots(ForwardSlots):
    """Slots that hold both terms of an operand in the place of slabs of columns."""

    def slabs(self, letter, slot):
        """Lists the terms of a slot, the high one first."""
        return [self.memory[letter].at[slot, term] for term in range(2)]

    def multiply_values(self, o_acc, weights, step):
        stage = self.stage(step)
        plgpu.barrier_wait(self.memory["v_full"].at[stage])
        for p, v in self.pairs(weights, self.slabs("v", stage)):
            plgpu.wgmma(o_acc, p, v)

    def pairs(self, left, right):
        """Pairs terms that are multiplied, the smallest products first. The product of both low terms is left out."""
        return zip((left[1], left[0], left[0]), (right[0], right[1], right[0]), strict=True)

    def rounded(self, weights):
        return wgmma.bfloat16_terms(weights)


@dataclass(frozen=True)
class TermCopies(TmaCopies):
    """Copies the terms of queries, keys and values to their slots by way of registers. Operands are matrices of rows."""

    def copy(self, name, slot, tile, first, rows, head, looked_up=()):
        del looked_up
        operand, letter, memory = self.operands[name], name[0], self.slots.memory
        length, heads, _ = self.kernel.query if name == "query" else self.kernel.key
        entry = operand.index(tile.b)
        if name == "query":
            entry, head, heads = self.kernel.rows.in_matrix(entry, head, heads)
        size = operand.ref.shape[1] // heads
        for row in range(0, rows, ROWS):
            for col in range(0, size, SWIZZLED):
                limits = length - first - row, size - col
                start = entry * length + first + row
                shape = ROWS, SWIZZLED
                piece = wgmma.load_product(operand.ref, start, head * size + col, limits, shape, varies=(True, True))
                if row == col == 0:
                    plgpu.barrier_wait(memory[f"{letter}_empty"].at[slot])  # behind the first load, as loads take long
                for term, value in zip(self.slots.slabs(letter, slot), wgmma.bfloat16_terms(piece), strict=True):
                    term[row : row + ROWS, col : col + SWIZZLED] = value
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory[f"{letter}_full"].at[slot])
