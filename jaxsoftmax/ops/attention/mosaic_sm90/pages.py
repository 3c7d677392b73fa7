"""Keys and values in pages: a key block is copied page by page, from where the page table says.

A producer looks the numbers of the pages up a step before, clips them to those that there are, and waits on one barrier for all
of them. Behind the last key of a sequence it copies the last page again, so that no other page is read.
"""

from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import TmaCopies
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import ForwardKernel
from jaxsoftmax.ops.attention.mosaic_sm90.operands import GlobalOperand


def page_numbers(kernel: ForwardKernel, operands: dict[str, GlobalOperand], tile, block) -> list[Any]:
    """Loads the numbers of the pages of a key block. Those behind the last key are the number of its page."""
    pages: Any = kernel.pages
    page, table, block_kv = jnp.int32(pages.size), operands["page_table"], kernel.config.block_kv
    first, last = lax.div(block * block_kv, page), jnp.maximum(tile.lengths[1] - 1, 0)
    places = [jnp.minimum(first + i, lax.div(last, page)) for i in range(pages.of_block(block_kv))]
    return [jnp.clip(table[tile.b, at], 0, pages.count - 1) for at in places]


@dataclass(frozen=True)
class PagedCopies(TmaCopies):
    """Copies keys and values from their pages."""

    def look_up(self, tile, block):
        """Loads the numbers of the pages of a key block."""
        return page_numbers(self.kernel, self.operands, tile, block)

    def copy(self, name, slot, tile, first, rows, head, looked_up=()):
        if name == "query":
            super().copy(name, slot, tile, first, rows, head)
            return
        pages: Any = self.kernel.pages
        operand, letter, memory = self.operands[f"{name}_pages"], self.letter(name), self.slots.memory
        plgpu.barrier_wait(memory[f"{letter}_empty"].at[slot])
        full, rows = memory[f"{letter}_full"].at[slot], min(pages.size, rows)
        start = lax.rem(first, jnp.int32(pages.size)) if rows < pages.size else 0
        entries = [operand.index(tile.b) * pages.count + number for number in looked_up]

        def copy_slab(columns, slab):
            for i, entry in enumerate(entries):
                source = operand.ref.at[entry].at[pl.ds(start, rows), head, columns]
                plgpu.copy_gmem_to_smem(source, slab.at[pl.ds(i * rows, rows)], full)

        self.slots.copy_slabs(letter, slot, copy_slab)
