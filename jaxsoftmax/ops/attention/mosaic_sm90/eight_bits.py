"""Keys and values of 8 bits: two more warpgroups of the forward kernel convert them to the dtype of the queries.

TMA copies them as they are, to slots of bytes, from where the converters write to the slots that the tensor cores read: e4m3 by
way of float16, integers in the mantissa of a number that is subtracted. The scale of a head multiplies scores and output, and
nothing is lost; scales of pages multiply in the conversion, as a key block may have several, and products are rounded.

Shared memory is what limits it: a key is written and read twice there, the second time as 16 bits. Two converters each for keys
and for values were no faster. The way around would be to have keys and values as left operands of the products, from registers,
which for values needs a transpose of bytes.
"""

import itertools
from dataclasses import dataclass

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import ForwardSlots
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import ForwardKernel
from jaxsoftmax.ops.attention.mosaic_sm90.operands import ROWS, SWIZZLED, GlobalOperand
from jaxsoftmax.ops.attention.mosaic_sm90.pages import page_numbers


def empty_byte_slots(slots: ForwardSlots, consumer) -> None:
    """Says that all slots of bytes are empty, in the first consumer."""
    for stage in range(slots.kernel.config.byte_stages):

        @pl.when(consumer == 0)
        def _(stage=stage):
            for letter in "kv":
                plgpu.barrier_arrive(slots.memory[f"{letter}_bytes_empty"].at[stage])


@dataclass(frozen=True)
class ByteConverter:
    """A warpgroup that converts the keys, or the values, of tiles.

    Attributes:
      kernel: how the kernel runs.
      operands: its operands by name.
      slots: slots of bytes, and of the elements that they are converted to.
      name: "key" or "value".
    """

    kernel: ForwardKernel
    operands: dict[str, GlobalOperand]
    slots: ForwardSlots
    name: str

    def __call__(self, tile, steps):
        """Converts the key blocks of a tile; returns the number of steps so far."""
        count = tile.high - tile.low if tile.is_empty is None else jnp.where(tile.is_empty, 0, tile.high - tile.low)

        def pages_of(i):
            has_scales = f"{self.name}_page_scale" in self.operands
            return page_numbers(self.kernel, self.operands, tile, jnp.maximum(tile.high - 1 - i, 0)) if has_scales else []

        def convert_block(i, carry):
            pages, scales = carry
            following = pages_of(i + 2), self._scales(tile, pages)  # long before they are needed
            slot = self.slots.stage(steps + i)
            self._convert(slot, lax.rem(steps + i, jnp.int32(self.kernel.config.byte_stages)), scales)
            return following

        scales = self._scales(tile, pages_of(0))
        lax.fori_loop(0, count, convert_block, (pages_of(1), scales))
        return steps + count

    def _convert(self, slot, byte_slot, scales):
        """Converts a key block. `scales` are int32 with the bits of a scale for each of equal parts of its keys."""
        letter, memory, rows = self.name[0], self.slots.memory, self.kernel.config.block_kv
        byte = f"{letter}_bytes"
        plgpu.barrier_wait(memory[f"{byte}_full"].at[byte_slot])
        is_float = self.kernel.bytes_dtype != "int8"
        slabs = zip(self.slots.slabs(byte, byte_slot), self.slots.slabs(letter, slot), strict=True)
        for i, (source, target) in enumerate(slabs):
            width = min(target.shape[1], 2 * SWIZZLED)  # each store takes two barriers, whatever its size
            for row, col in itertools.product(range(0, rows, ROWS), range(0, target.shape[1], width)):
                at = slice(row, row + ROWS), slice(col, col + width)
                first, last = (edge * len(scales) // rows for edge in (row, row + ROWS))
                piece = plgpu.load(source.at[at], layout=wgmma.BYTES_LAYOUT)
                piece_scales = scales[first : max(last, first + 1)]
                piece = wgmma.from_bytes(piece, target.dtype, is_float=is_float, scales=piece_scales)
                if i == row == col == 0:
                    plgpu.barrier_wait(memory[f"{letter}_empty"].at[slot])
                target[at] = piece
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory[f"{letter}_full"].at[slot])
        plgpu.barrier_arrive(memory[f"{byte}_empty"].at[byte_slot])

    def _scales(self, tile, pages):
        """Loads the scales of pages; there are none for those of a head, by which consumers multiply."""
        return [self.operands[f"{self.name}_page_scale"][tile.b, number, tile.head] for number in pages]
