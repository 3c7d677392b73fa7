"""Other operands than arrays of 16 bits in the forward kernel: keys and values in pages, float32, and 8 bits.

In float32 each element is split into the sum of two terms of bfloat16. If many rows see a key (`pays_to_split` in
`forward_plan`), XLA splits keys and values before the kernel, and TMA copies the terms; consumers split their queries once for
each tile. Otherwise producers load rows to registers, with 0 beyond the ends, so any length and head size is as good as
another, and store both terms: again for each tile, which takes longer than the products. The weights are split in registers,
and the output goes from registers to global memory.

TMA copies keys and values of 8 bits as they are, to slots of bytes, from where converters write to the slots that the tensor
cores read: e4m3 by way of float16, integers in the mantissa of a number that is subtracted. The scale of a head multiplies
scores and output, and nothing is lost; scales of pages multiply in the conversion, as a key block may have several, and
products are rounded. Shared memory is the limit: a key is written and read twice there, the second time as 16 bits. Two
converters each for keys and for values were no faster. The way around would be to have keys and values as left operands of the
products, from registers, which for values needs a transpose of bytes.
"""

import itertools
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.common import ROWS, SWIZZLED, GlobalOperand, pair_terms
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import ForwardSlots, TmaCopies
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import ForwardGeometry


def load_page_numbers(geometry: ForwardGeometry, operands: dict[str, GlobalOperand], tile, block) -> list[Any]:
    """Loads the numbers of the pages of a key block. Those behind the last key are the number of its page."""
    pages: Any = geometry.pages
    page, table, block_kv = jnp.int32(pages.size), operands["page_table"], geometry.config.block_kv
    first, last = lax.div(block * block_kv, page), jnp.maximum(tile.lengths[1] - 1, 0)
    places = [jnp.minimum(first + i, lax.div(last, page)) for i in range(pages.count_in_block(block_kv))]
    return [jnp.clip(table[tile.b, at], 0, pages.count - 1) for at in places]


@dataclass(frozen=True)
class PagedCopies(TmaCopies):
    """Copies keys and values from their pages, which a producer looks up a step before.

    It waits on one barrier for all pages of a key block. Behind the last key of a sequence it copies the last page again, so
    that no other page is read.
    """

    # Not for float32, whose copies are long too: ptxas spills 16 bytes more, and 1728 us become 1766 on an H100.
    IS_ONE_LOOP = True

    def look_up(self, tile, block):
        return load_page_numbers(self.geometry, self.operands, tile, block)

    def copy(self, name, slot, tile, first, rows, head, looked_up=()):
        if name == "query":
            super().copy(name, slot, tile, first, rows, head)
            return
        pages: Any = self.geometry.pages
        operand, rows = self.operands[f"{name}_pages"], min(pages.size, rows)
        start = lax.rem(first, jnp.int32(pages.size)) if rows < pages.size else 0
        entries = [operand.index(tile.b) * pages.count + number for number in looked_up]

        def copy_slab(columns, slab, full):
            for i, entry in enumerate(entries):
                source = operand.ref.at[entry].at[pl.ds(start, rows), head, columns]
                plgpu.copy_gmem_to_smem(source, slab.at[pl.ds(i * rows, rows)], full)

        self.fill(name, slot, tile, copy_slab)


@dataclass(frozen=True)
class TermSlots(ForwardSlots):
    """Slots of float32 operands, each split into the sum of two terms of bfloat16. They hold both in the place of slabs.

        high = bfloat16(x)    low = bfloat16(x - high)    x y = low y.high + high y.low + high y.high

    A product is three of theirs, in one float32 accumulator. It misses up to 2^-15 of the sum of its absolute terms (TF32:
    2^-10). A term that is infinite times one that is 0 is NaN, so an infinite operand gives NaN.
    """

    def slabs(self, letter, slot):
        """Lists the terms of a slot, the high one first. Those of queries that are in registers have no slot."""
        config = self.geometry.config
        return [self.memory[letter].at[slot, term] for term in range(config.slot_terms if letter == "q" else 2)]

    def take_queries(self, consumer, tile, first):
        """Waits until the queries of a consumer are there, or splits them if XLA split the keys.

        Returns the terms that the consumer has in registers. Two products of a step need not read the high term from shared
        memory then, for which the tensor cores would wait: a product of 64 queries and 64 keys reads both in equal amounts.
        With both terms in shared memory 4096 tokens take 2085 us, with one in registers 2051 us, with both 2056 us (heads of
        128, H100).
        """
        if not self.geometry.config.copies_terms:
            return super().take_queries(consumer, tile, first)
        shape = ROWS, self.geometry.sizes[0]
        high, low = wgmma.bfloat16_terms(load_rows(self.geometry, consumer.operands, "query", tile, tile.head, first, 0, shape))
        (slot,) = self.slabs("q", consumer.index)
        slot[...] = low
        plgpu.commit_smem()
        return [high]

    def multiply_values(self, o_acc, weights, step):
        stage = self.stage(step)
        plgpu.barrier_wait(self.memory["v_full"].at[stage])
        for p, v in self.pairs(weights, self.slabs("v", stage)):
            plgpu.wgmma(o_acc, p, v)

    def pairs(self, left, right):
        return pair_terms(left, right)

    def rounded(self, weights):
        return wgmma.bfloat16_terms(weights)


def load_rows(geometry: ForwardGeometry, operands: dict[str, GlobalOperand], name, tile, head, first, col, shape):
    """Loads rows of a head from `first` on, and columns from `col` on, of an operand that is a matrix of rows."""
    operand, (length, heads, _) = operands[name], geometry.query if name == "query" else geometry.key
    entry = operand.index(tile.b)
    if name == "query":
        entry, head, heads = geometry.rows.in_matrix(entry, head, heads)
    size = operand.ref.shape[1] // heads
    limits = length - first, size - col
    return wgmma.load_product(operand.ref, entry * length + first, head * size + col, limits, shape, varies=(True, True))


@dataclass(frozen=True)
class TermCopies(TmaCopies):
    """Splits queries, keys and values, and copies the terms to their slots. Operands are matrices of rows."""

    def copy(self, name, slot, tile, first, rows, head, looked_up=()):
        del looked_up
        letter, memory = name[0], self.slots.memory
        size = self.geometry.query[2] if name != "value" else self.geometry.value_size
        for row in range(0, rows, ROWS):
            for col in range(0, size, SWIZZLED):
                shape = ROWS, SWIZZLED
                piece = load_rows(self.geometry, self.operands, name, tile, head, first + row, col, shape)
                if row == col == 0:
                    plgpu.barrier_wait(memory[f"{letter}_empty"].at[slot])  # behind the first load, as loads take long
                for term, value in zip(self.slots.slabs(letter, slot), wgmma.bfloat16_terms(piece), strict=True):
                    term[row : row + ROWS, col : col + SWIZZLED] = value
        plgpu.commit_smem()
        plgpu.barrier_arrive(memory[f"{letter}_full"].at[slot])


@dataclass(frozen=True)
class SplitCopies(TmaCopies):
    """Copies the terms that XLA made of keys and values to their slots by TMA: see `split_terms`."""

    def copy(self, name, slot, tile, first, rows, head, looked_up=()):
        del looked_up
        letter, memory = name[0], self.slots.memory
        plgpu.barrier_wait(memory[f"{letter}_empty"].at[slot])
        for term, part in zip(self.slots.slabs(letter, slot), (name, f"{name}_low"), strict=True):
            operand = self.operands[part]
            source = operand.ref.at[operand.index(tile.b)].at[pl.ds(first, rows), head, pl.ds(0, term.shape[1])]
            plgpu.copy_gmem_to_smem(source, term, memory[f"{letter}_full"].at[slot])


@dataclass(frozen=True)
class ByteCopies(TmaCopies):
    """Copies keys and values of 8 bits to slots of bytes, from where they are converted."""

    @property
    def n_stages(self):
        return self.geometry.config.byte_stages

    def letter(self, name):
        return name[0] if name == "query" else f"{name[0]}_bytes"


@dataclass(frozen=True)
class PagedByteCopies(ByteCopies, PagedCopies):
    """Copies keys and values of 8 bits from their pages to slots of bytes."""


@dataclass(frozen=True)
class ByteConverter:
    """A warpgroup that converts the keys, or the values, of tiles: `name` is "key" or "value"."""

    geometry: ForwardGeometry
    operands: dict[str, GlobalOperand]
    slots: ForwardSlots
    name: str

    def __call__(self, tile, steps):
        """Converts the key blocks of a tile; returns the number of steps so far."""
        count = tile.high - tile.low if tile.is_empty is False else jnp.where(tile.is_empty, 0, tile.high - tile.low)
        page_scales: Any = self.operands.get(f"{self.name}_page_scale")  # consumers multiply by the scale of a head

        def look_up(i):
            if page_scales is None:
                return []
            return load_page_numbers(self.geometry, self.operands, tile, jnp.maximum(tile.high - 1 - i, 0))

        def load_scales(pages):
            return [page_scales[tile.b, number, tile.head] for number in pages]

        def convert_block(i, carry):
            pages, scales = carry
            following = look_up(i + 2), load_scales(pages)  # long before they are needed
            slot = self.slots.stage(steps + i)
            self._convert(slot, lax.rem(steps + i, jnp.int32(self.geometry.config.byte_stages)), scales)
            return following

        scales = load_scales(look_up(0))
        lax.fori_loop(0, count, convert_block, (look_up(1), scales))
        return steps + count

    def _convert(self, slot, byte_slot, scales):
        """Converts a key block. `scales` are int32 with the bits of a scale for each of equal parts of its keys."""
        letter, memory, rows = self.name[0], self.slots.memory, self.geometry.config.block_kv
        byte = f"{letter}_bytes"
        plgpu.barrier_wait(memory[f"{byte}_full"].at[byte_slot])
        is_float = self.geometry.bytes_dtype != "int8"
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
