"""Attention on Hopper, forward: a block of queries keeps the state of its rows and pushes the keys block by block.

A block of threads is persistent: one producer warpgroup, or two, and two or three consumers, each for 64 queries of a tile,
which is a block of queries of one head. Producers copy keys and values by TMA into stages in shared memory, from the last key
block that a query of the tile sees to the first. Consumers have the scores of a key block in registers, and its weights, from
where the second product takes them: it runs while the scores of the next key block are computed. They hand the tensor cores
over to each other (ping-pong), so that one multiplies while another exponentiates. Key blocks that all queries see are not
masked. Tiles come in an order by which keys and values stay in the L2 cache and all blocks end at about the same time.

Reads Q once and writes O and lse once; reads K and V, mostly from L2, once for each tile: `4 * T * S * H` operations a head.
Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, section 3.

A float32 operand is split into the sum of two of bfloat16, and a product is three of theirs: all but that of the low terms.
Producers split them, in registers; the output goes from registers to global memory.

Keys and values of 8 bits are copied as they are, and two more warpgroups convert them, once for all query heads of a tile.
"""

import functools
import itertools
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax import online
from jaxsoftmax._gpu import ptx, schedule, wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.online import State
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import FACTS, ForwardKernel, tables
from jaxsoftmax.ops.attention.mosaic_sm90.operands import KERNEL, ROWS, SWIZZLED, GlobalOperand, laid_out
from jaxsoftmax.ops.attention.mosaic_sm90.rows import FoldedRows
from jaxsoftmax.ops.attention.mosaic_sm90.scores import LOG2E, dropout_keeps, of_own_segment, tanh
from jaxsoftmax.ops.attention.operands import OPERANDS, PAGED_OPERANDS, dequantised, without_pages

# By how much, in powers of two, a maximum grows before sums are rescaled, and how far it stays below the largest score: weights
# are at most 2 to the power of their sum, which float16 holds up to 2^15, and loses bits of below 2^-14.
_SLACK_AND_HEADROOM = {"bfloat16": (8, 0), "float16": (2, 13), "float32": (8, 0)}
_PING_PONG = 8  # the first of the named barriers for it, one for each consumer; Mosaic GPU uses the ones before


@dataclass(frozen=True)
class ForwardPlan:
    """Attention by the forward kernel.

    Attributes:
      kernel: how the kernel runs.
      prepare: functions of the operands by name, which XLA computes before the kernel.
      n_results: 1 for the output alone, 2 for the output and the log-sum-exp.
      is_partial: True if the output, which is one of several that are merged, stays in float32.
      onto: output and log-sum-exp of other keys, arrays, from which rows start. None if they start from nothing.
    """

    kernel: ForwardKernel
    prepare: tuple[Callable[..., Any], ...] = ()
    n_results: int = 2
    is_partial: bool = False
    onto: Any = None
    remark = None

    def describe(self) -> str:
        return ", ".join([self.kernel.describe(), *(_PREPARED[function] for function in self.prepare)])

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        """Computes `[output, log-sum-exp]`, or the output alone, as `xla.dot_product_attention` does."""
        return self.attend(self.prepared(operands))[: self.n_results]

    def prepared(self, operands: Mapping[str, jax.Array | None]) -> dict[str, jax.Array]:
        """Returns the operands of the kernel in their order."""
        present: Any = {name: operand for name, operand in operands.items() if operand is not None}
        for function in self.prepare:
            present = function(present)
        order = PAGED_OPERANDS if "page_table" in present else OPERANDS
        return {operand.name: present[operand.name] for operand in order if operand.name in present}

    def attend(self, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Computes `[output, log-sum-exp]`."""
        kernel = self.kernel
        # Beside a step of a ring a collective may run.
        waves = schedule.waves(kernel) if self.is_partial else 1
        out, lse = launch(kernel, operands, schedule.table(kernel), self.is_partial, self.onto, waves)
        (length, heads, _), batch = kernel.query, kernel.batch
        return [out.reshape(*batch, length, heads, kernel.value_size), lse.reshape(*batch, heads, length)]


_PREPARED = {without_pages: "pages gathered before", dequantised: "8 bits converted before"}


def launch(kernel: ForwardKernel, operands, table=None, is_partial=False, onto=None, waves=1) -> list[jax.Array]:
    """Runs the kernel.

    Args:
      kernel: how it runs.
      operands: its operands by name.
      table: the table of tiles, see `schedule.table`.
      is_partial: True for an output in float32.
      onto: output and log-sum-exp of other keys, from which rows start, or None.
      waves: number of waves of blocks of threads.

    Returns:
      The output `[entries, rows, heads, size]`, or as `kernel.rows` says, and the log-sum-exp of the rows; of splits `o`, `m`
      and `d`, see `ForwardKernel`.
    """
    (length, heads, _), count, config = kernel.query, math.prod(kernel.batch), kernel.config
    refs, records = laid_out(kernel.batch, {**operands, **tables(kernel, operands)})
    if kernel.pages is not None:
        for name in ("key_pages", "value_pages"):
            refs[name] = refs[name].reshape(-1, *refs[name].shape[2:])
    out_shape, dtype = (count, *refs["query"].shape[1:-1], kernel.value_size), refs["query"].dtype
    is_folded = isinstance(kernel.rows, FoldedRows)
    if config.split:
        for name in ("query", "key", "value"):
            refs[name] = refs[name].reshape(-1, math.prod(refs[name].shape[2 + (is_folded and name == "query") :]))
    if onto is not None:
        refs["onto_out"], refs["onto_lse"] = onto[0].reshape(count * length, heads * kernel.value_size), onto[1].ravel()
    if config.split or is_partial:
        dtype = jnp.dtype(jnp.float32)
        out_shape = (count * heads * length, kernel.value_size) if is_folded else (count * length, heads * kernel.value_size)
    numbers_type = jax.ShapeDtypeStruct((count * heads * kernel.splits * length,), jnp.float32)
    numbers = {"lse": numbers_type}
    if kernel.splits > 1:
        out_shape, dtype, numbers = (
            (*numbers_type.shape, kernel.value_size),
            jnp.float32,
            {"m": numbers_type, "d": numbers_type},
        )
    if table is not None:
        refs["table"] = table
    results = kernel_of(
        functools.partial(_kernel, kernel, records, waves),
        out_type=OrderedDict(out=jax.ShapeDtypeStruct(out_shape, dtype), **numbers),
        grid=(waves * kernel.n_blocks,),
        grid_names=("block",),
        num_threads=config.consumers + config.producers + config.converters,
        thread_name="warpgroup",
        scratch_types=kernel.scratch(),
        # Reductions are along rows, which are inside of warps, and need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name="attention_forward_mosaic",
    )(refs)
    return [results[name] for name in ("out", *numbers)]


def _kernel(plan, operands, waves, refs, results, **memory):
    """What the warpgroups of a block of threads do."""
    operands = {name: replace(operand, ref=refs[name]) for name, operand in operands.items()}
    onto = (refs["onto_out"], refs["onto_lse"]) if "onto_out" in refs else None
    tile = _Tile(plan, operands, results, memory, onto)
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    # The last block of queries may see the most keys.
    own_tiles = schedule.Tiles(
        plan.n_tiles, plan.n_blocks, block, refs.get("table"), memory, tile.place, last_first=True, waves=waves
    )
    (less, more), config = plan.config.registers, plan.config

    producers = [functools.partial(tile.produce, letters) for letters in {1: ["kqv"], 2: ["kq", "v"]}[config.producers]]
    producers += [functools.partial(tile.convert, letter) for letter in "kv"[: config.converters]]
    for i, work in enumerate(producers):

        @pl.when(warpgroup == config.consumers + i)
        def _(i=i, work=work):
            plgpu.set_max_registers(less, action="decrease")
            own_tiles.each(work, None if i else tile.look_up)

    @pl.when(warpgroup < config.consumers)
    def _():
        plgpu.set_max_registers(more, action="increase")
        tile.start(warpgroup)
        own_tiles.each(functools.partial(tile.consume, warpgroup))
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Place:
    """Where a tile is, how many queries and keys there are, and between which key blocks segments and a mask show any."""

    b: Any
    head: Any
    block: Any
    split: Any
    lengths: list[Any]
    offset: Any
    ranges: list[Any]
    shown: list[Any]


@dataclass(frozen=True)
class _Tile:
    """What is done for a tile. The key blocks of all tiles are counted through: step `i` uses stage `i % stages`."""

    plan: Any
    operands: dict[str, GlobalOperand]
    results: dict[str, Any]
    memory: dict[str, Any]
    onto: Any = None  # out and lse of other keys

    def look_up(self, number) -> list[Any]:
        """What operands say of a tile: its lengths and ranges, as far as there are any."""
        b, _, block, _ = self._coordinates(number)
        found = []
        for name, count in FACTS.items():
            if name in self.operands:
                own = self.operands[name]
                found += [own[b]] if count == 1 else [own[b, block, i] for i in range(count)]
        return found

    def place(self, number, *found) -> _Place:
        """The place of a tile, with what was looked up."""
        b, head, block, split = self._coordinates(number)
        found, lengths = list(found), []
        for name, size in (("query_lengths", self.plan.queries), ("key_lengths", self.plan.key[0])):
            lengths.append(jnp.clip(found.pop(0), 0, size) if name in self.operands else jnp.int32(size))
        offset = found.pop(0) if "query_offset" in self.operands else 0
        ranges = found[:4] if "ranges" in self.operands else []
        shown = []
        if "mask_reach" in self.operands:
            size = jnp.int32(self.plan.config.block_kv)
            to_end, from_start = (lax.div(keys + size - 1, size) for keys in found[-2:])
            shown = [self.plan.blocks_kv - to_end, from_start]
        return _Place(b, head, block, split, lengths, offset, ranges, shown)

    def _coordinates(self, number):
        """Batch entry, head, block of queries, and split of the keys of a tile."""
        heads, splits = jnp.int32(self.plan.query[1]), jnp.int32(self.plan.splits)
        blocks = jnp.int32(self.plan.blocks_q * self.plan.splits)
        pair, part = lax.div(number, blocks), lax.rem(number, blocks)
        block, split = (part, jnp.int32(0)) if self.plan.splits == 1 else (lax.div(part, splits), lax.rem(part, splits))
        return lax.div(pair, heads), lax.rem(pair, heads), block, split

    def key_blocks(self, place):
        """From and to which key block a tile goes, at least one; and whether it is of a split without any, and goes nowhere."""
        low, high = self.seen(place, place.block * self.plan.config.block_q, self.plan.config.block_q)
        for start, end in (limits[:2] for limits in (place.ranges, place.shown) if limits):
            low, high = jnp.maximum(low, start), jnp.minimum(high, end)
        if self.plan.splits > 1:
            low, high = self.plan.part(low, high, place.split, KERNEL)
        is_empty = None if self.plan.splits == 1 else high <= low
        if is_empty is not None and "sinks" in self.operands:
            is_empty &= place.split > 0  # the first one starts with the sinks
        low = jnp.clip(low, 0, self.plan.blocks_kv - 1)
        return low, jnp.clip(high, low + 1, self.plan.blocks_kv), is_empty

    def seen(self, place, first, rows):
        """What `Plan.seen` says for the queries of rows."""
        limits = self.plan.seen(place.lengths, *self.plan.rows.queries_from(first, rows, KERNEL), KERNEL, place.offset)
        return tuple(map(jnp.int32, limits))

    def seen_whole(self, place, first, rows):
        """What `Plan.seen` says, for key blocks of which all of these queries see every key; to may be before from."""
        queries, keys = place.lengths
        size = jnp.int32(self.plan.config.block_kv)
        left, right = self.plan.window
        first, rows = self.plan.rows.queries_from(first, rows, KERNEL)
        low, high, position = jnp.int32(0), lax.div(keys, size), first + place.offset
        if left is not None:
            low = lax.div(jnp.maximum(position + rows - 1 - left, 0) + size - 1, size)
        if right is not None:
            high = jnp.minimum(high, lax.div(jnp.maximum(position + right + 1, 0), size))
        if "query_lengths" in self.operands:
            high = jnp.where(first + rows <= queries, high, 0)
        if place.ranges:
            low, high = jnp.maximum(low, place.ranges[2]), jnp.minimum(high, place.ranges[3])
        return low, high

    def stage(self, step):
        return lax.rem(step, jnp.int32(self.plan.config.stages))

    def byte_stage(self, step):
        return lax.rem(step, jnp.int32(self.plan.config.byte_stages))

    def copied(self, name):
        """The name of the shared memory that an operand is copied to: that for bytes where it has 8 bits."""
        letter = name[0]
        return f"{letter}_bytes" if self.plan.config.byte_stages and letter in "kv" else letter

    def copy_parts(self, letter, slot, copy):
        """Does `copy(columns, part)` for each part of a slot."""
        if not self.plan.is_ragged:
            copy(slice(None), self.memory[letter].at[slot])
            return
        copied, _ = self.memory[letter]

        @pl.loop(0, copied.shape[1])  # columns behind the last one are clipped, if it is not known while tracing that there are
        def _(part):
            copy(pl.ds(part * SWIZZLED, SWIZZLED), copied.at[slot, part])

    def parts(self, letter, slot):
        """The parts of a slot as the tensor cores take them, or the terms of what is split."""
        if self.plan.config.split:
            return [self.memory[letter].at[slot, term] for term in range(2)]
        if not self.plan.is_ragged:
            return [self.memory[letter].at[slot]]
        _, tiled = self.memory[letter]
        return [tiled.at[slot, part] for part in range(tiled.shape[1])]

    # Producers.

    def produce(self, letters, place, steps):
        """Copies what a tile needs of these, the last key block first; gives how many steps there have been."""
        low, high, is_empty = self.key_blocks(place)
        if is_empty is None:
            self._produce(letters, place, steps, low, high)
            return steps + high - low
        pl.when(~is_empty)(lambda: self._produce(letters, place, steps, low, high))
        return jnp.where(is_empty, steps, steps + high - low)

    def _produce(self, letters, place, steps, low, high):
        """Copies the queries of a tile, and its key blocks from `high - 1` down to `low`."""
        key_head = lax.div(place.head, jnp.int32(self.plan.query[1] // self.plan.key[1]))
        copy = self._split if self.plan.config.split else self._copy
        size, count = self.plan.config.block_kv, high - low

        def copy_block(name, i, pages):
            stage = self.byte_stage(steps + i) if self.plan.config.byte_stages else self.stage(steps + i)
            first = (high - 1 - i) * size
            if pages:
                self._copy_pages(name, stage, place.b, pages, first, key_head)
            else:
                copy(name, stage, place.b, first, size, key_head)

        def copy_queries():
            for consumer in range(self.plan.config.consumers):
                copy("query", consumer, place.b, place.block * self.plan.config.block_q + consumer * ROWS, ROWS, place.head)

        def copy_step(i, before, has_keys=True, has_queries=False, has_values=True):
            """Copies keys `i`, the queries behind the first of them, and values `i - 1`, whose pages were loaded before."""
            pages = self._pages(place, jnp.maximum(high - 1 - i, 0))
            if "k" in letters:
                _when(has_keys, lambda: copy_block("key", i, pages))
            if "q" in letters:
                _when(has_queries, copy_queries)
            if "v" in letters:
                _when(has_values, lambda: copy_block("value", i - 1, before))
            return pages

        if self.plan.pages is not None:  # the code of a copy is long: it is there once, and lowered once
            # Not for float32, whose copies are long too: ptxas spills 16 bytes more, and 1728 us become 1766 on an H100.
            none = [jnp.int32(0)] * self.plan.pages.of_block(self.plan.config.block_kv)
            lax.fori_loop(0, count + 1, lambda i, before: copy_step(i, before, i < count, i == 0, i > 0), none)
            return
        copy_step(0, [], has_queries=True, has_values=False)
        lax.fori_loop(1, count, copy_step, [])
        copy_step(count, [], has_keys=False)

    def _pages(self, place, block):
        """The numbers of the pages of a key block, behind the last key that of the last; none where there are no pages."""
        pages, table = self.plan.pages, self.operands.get("page_table")
        if table is None:
            return []
        first, last = lax.div(block * self.plan.config.block_kv, jnp.int32(pages.size)), jnp.maximum(place.lengths[1] - 1, 0)
        places = [
            jnp.minimum(first + i, lax.div(last, jnp.int32(pages.size)))
            for i in range(pages.of_block(self.plan.config.block_kv))
        ]
        return [jnp.clip(table[place.b, at], 0, pages.count - 1) for at in places]

    def _copy(self, name, slot, b, first, rows, head):
        """Copies rows of an operand to a slot by TMA, once it is empty."""
        own, letter = self.operands[name], self.copied(name)
        plgpu.barrier_wait(self.memory[f"{letter}_empty"].at[slot])
        full = self.memory[f"{letter}_full"].at[slot]

        def copy_part(cols, part):
            at = self.at(name, pl.ds(first, rows), head)
            plgpu.copy_gmem_to_smem(own.ref.at[own.index(b)].at[*at, cols], part, full)

        self.copy_parts(letter, slot, copy_part)

    def _copy_pages(self, name, slot, b, pages, first, head):
        """Copies the keys of a key block, of which `first` is the first, to a slot from their pages."""
        own, letter = self.operands[f"{name}_pages"], self.copied(name)
        plgpu.barrier_wait(self.memory[f"{letter}_empty"].at[slot])
        full, rows = self.memory[f"{letter}_full"].at[slot], min(self.plan.pages.size, self.plan.config.block_kv)
        start = lax.rem(first, jnp.int32(self.plan.pages.size)) if rows < self.plan.pages.size else 0
        entries = [own.index(b) * self.plan.pages.count + number for number in pages]

        def copy_part(cols, part):
            for i, entry in enumerate(entries):
                into = part.at[pl.ds(i * rows, rows)]
                plgpu.copy_gmem_to_smem(own.ref.at[entry].at[pl.ds(start, rows), head, cols], into, full)

        self.copy_parts(letter, slot, copy_part)

    def at(self, name, rows, head):
        """How rows of a head are addressed: those of all heads that share keys, or of keys."""
        return self.plan.rows.at(rows, head) if name in ("query", "out") else (rows, head)

    def _split(self, name, slot, b, first, rows, head):
        """The same for float32, of which the terms go to shared memory by way of registers, 0 beyond the ends."""
        own, letter = self.operands[name], name[0]
        length, heads, _ = self.plan.query if name == "query" else self.plan.key
        entry, size = own.index(b), own.ref.shape[1] // heads
        if isinstance(self.plan.rows, FoldedRows) and name == "query":
            entry, head, size = entry * heads + head, 0, own.ref.shape[1]
        for row in range(0, rows, ROWS):
            for col in range(0, size, SWIZZLED):
                limits = length - first - row, size - col
                start = entry * length + first + row
                shape = ROWS, SWIZZLED
                piece = wgmma.load_product(own.ref, start, head * size + col, limits, shape, varies=(True, True))
                if row == col == 0:
                    plgpu.barrier_wait(self.memory[f"{letter}_empty"].at[slot])  # behind the first load, as loads take long
                for part, term in zip(self.parts(letter, slot), wgmma.bfloat16_terms(piece), strict=True):
                    part[row : row + ROWS, col : col + SWIZZLED] = term
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory[f"{letter}_full"].at[slot])

    # Converters.

    def convert(self, letter, place, steps):
        """Converts keys or values of a tile to the dtype of the queries; gives how many steps there have been."""
        low, high, is_empty = self.key_blocks(place)
        count, name = high - low if is_empty is None else jnp.where(is_empty, 0, high - low), {"k": "key", "v": "value"}[letter]

        def pages_of(i):
            has_scales = f"{name}_page_scale" in self.operands
            return self._pages(place, jnp.maximum(high - 1 - i, 0)) if has_scales else []

        def convert_block(i, carry):
            pages, scales = carry
            following = pages_of(i + 2), self._scales(name, place, pages)  # long before they are needed
            self._convert_block(letter, self.stage(steps + i), self.byte_stage(steps + i), scales)
            return following

        scales = self._scales(name, place, pages_of(0))
        lax.fori_loop(0, count, convert_block, (pages_of(1), scales))
        return steps + count

    def _convert_block(self, letter, slot, byte_slot, scales):
        """Converts keys or values, with the bits of a scale for each of so many equal parts of them."""
        byte, rows = f"{letter}_bytes", self.plan.config.block_kv
        plgpu.barrier_wait(self.memory[f"{byte}_full"].at[byte_slot])
        is_float = self.plan.bytes_dtype != "int8"
        for i, (source, into) in enumerate(zip(self.parts(byte, byte_slot), self.parts(letter, slot), strict=True)):
            width = min(into.shape[1], 2 * SWIZZLED)  # each store takes two barriers, whatever its size
            for row, col in itertools.product(range(0, rows, ROWS), range(0, into.shape[1], width)):
                at = slice(row, row + ROWS), slice(col, col + width)
                first, last = (edge * len(scales) // rows for edge in (row, row + ROWS))
                piece = plgpu.load(source.at[at], layout=wgmma.BYTES_LAYOUT)
                own = scales[first : max(last, first + 1)]
                piece = wgmma.from_bytes(piece, into.dtype, is_float=is_float, scales=own)
                if i == row == col == 0:
                    plgpu.barrier_wait(self.memory[f"{letter}_empty"].at[slot])
                into[at] = piece
        plgpu.commit_smem()
        plgpu.barrier_arrive(self.memory[f"{letter}_full"].at[slot])
        plgpu.barrier_arrive(self.memory[f"{byte}_empty"].at[byte_slot])

    def _scales(self, name, place, pages):
        """The bits of the scales of a key block, if they are those of its pages; consumers multiply with that of a head."""
        return [self.operands[f"{name}_page_scale"][place.b, number, place.head] for number in pages]

    # Consumers.

    def start(self, consumer):
        """Says that all of shared memory is empty, and that the first consumer has the tensor cores first."""
        for stage in range(self.plan.config.byte_stages):
            pl.when(consumer == 0)(functools.partial(self._leave_bytes, stage))
        for stage in range(self.plan.config.stages):
            plgpu.barrier_arrive(self.memory["k_empty"].at[stage])
            plgpu.barrier_arrive(self.memory["v_empty"].at[stage])
        plgpu.barrier_arrive(self.memory["q_empty"].at[consumer])
        if self.plan.config.ping_pong:
            pl.when(consumer == self.plan.config.consumers - 1)(lambda: ptx.named_barrier_arrive(jnp.int32(_PING_PONG)))

    def _leave_bytes(self, stage):
        for letter in "kv":
            plgpu.barrier_arrive(self.memory[f"{letter}_bytes_empty"].at[stage])

    def consume(self, consumer, place, steps):
        """Computes the rows of a consumer; gives how many steps there have been."""
        low, high, is_empty = self.key_blocks(place)
        first = place.block * self.plan.config.block_q + consumer * ROWS
        if is_empty is None:
            self._consume(consumer, place, first, steps, low, high)
            return steps + high - low
        pl.when(is_empty)(lambda: self._store_nothing(place, first))
        pl.when(~is_empty)(lambda: self._consume(consumer, place, first, steps, low, high))
        return jnp.where(is_empty, steps, steps + high - low)

    def row(self, place, first):
        """The number of a row among those of all splits."""
        (length, heads, _), splits = self.plan.query, self.plan.splits
        return ((place.b * heads + place.head) * splits + place.split) * length + first

    def store_rows(self, place, first, **numbers):
        """Stores a number of each of the rows from `first` on, to results by name."""
        for name, values in numbers.items():
            limit = self.plan.query[0] - first
            wgmma.store_product_rows(self.results[name], self.row(place, first), limit, values)

    def _store_nothing(self, place, first):
        """Stores the state of no scores, but for the sums of values, which do not count then."""
        nothing = online.identity(())
        is_row = lax.iota(jnp.int32, ROWS) >= 0  # always: Mosaic GPU finds no layout for constants
        self.store_rows(place, first, m=jnp.where(is_row, nothing.m, 0.0), d=jnp.where(is_row, nothing.d, 1.0))

    def _consume(self, consumer, place, first, steps, tile_low, tile_high):
        """Computes the rows from `first` on, of the key blocks that the tile goes to."""
        # Of the rows, which may be less than of the tile.
        low, high = self.seen(place, first, ROWS)
        high = jnp.clip(high, tile_low + 1, tile_high)
        low = jnp.clip(low, tile_low, high - 1)
        count, end = high - low, steps + tile_high - tile_low
        rows = _Rows(self, consumer, place, first, high, count)
        lax.fori_loop(steps, steps + tile_high - high, rows.skip, None)
        steps = steps + tile_high - high
        pl.run_scoped(functools.partial(rows.attend, steps), plgpu.ACC((ROWS, self.plan.sizes[1]), jnp.float32))
        lax.fori_loop(steps + count, end, rows.skip, None)


class _Rows:
    """The 64 queries of a consumer, from `first` on: `count` key blocks, from `high - 1` down."""

    def __init__(self, tile, consumer, place, first, high, count):
        self.tile, self.plan, self.config, self.memory = tile, tile.plan, tile.plan.config, tile.memory
        self.operands, self.results = tile.operands, tile.results
        self.consumer, self.place, self.first, self.high, self.count = consumer, place, first, high, count
        self.dtype, self.shape = self.operands["query"].ref.dtype, (ROWS, self.config.block_kv)
        slack, self.headroom = _SLACK_AND_HEADROOM[self.dtype.name]
        # Scores with a bias may be as large as `finfo.min`: their maximum must not be rounded when it is scaled.
        self.factor = self.plan.scale if self.plan.soft_cap is None else self.plan.soft_cap
        self.unit, scale_log2 = self.plan.unit, LOG2E * self.factor if self.plan.unit == 1 else 1.0
        options = {"scale_log2": scale_log2, "slack": slack, "headroom": self.headroom, "unit": self.unit}
        self._push = functools.partial(online.push_log2, **options)
        left, right = self.plan.window
        of_operands = "ranges" in self.operands or {"query_lengths", "key_lengths"} & self.plan.names
        self.has_high = right is not None or self.plan.key[0] % self.config.block_kv != 0 or bool(of_operands)
        self.has_low = left is not None or "ranges" in self.operands
        self.is_banded = self.has_high or self.has_low
        own = {name: self.operands.get(f"{name}_scale") for name in ("key", "value")}
        self.scales = {name: scale[place.b, place.head] for name, scale in own.items() if scale is not None}
        self.first_key = self.last_key = None
        if self.is_banded:
            position = first + lax.iota(jnp.int32, ROWS)
            position = self.plan.rows.query_of(position)
            last_key = jnp.where(position < place.lengths[0], place.lengths[1] - 1, -1)
            position += place.offset
            self.first_key = None if left is None else position - left
            self.last_key = last_key if right is None else jnp.minimum(last_key, position + right)
        self.segments: Any = None
        if "query_segments" in self.operands:
            own, queries = self.operands["query_segments"], self.plan.query[0]
            base = own.index(place.b) * queries + first
            self.segments = wgmma.load_product_rows(own.ref, base, queries - first, self.shape)

    def skip(self, step, _):
        """Leaves a key block to the other consumers."""
        stage = self.tile.stage(step)
        self._wait_for_keys(step)
        self._take_tensor_cores()
        self._pass_tensor_cores()
        plgpu.barrier_arrive(self.memory["k_empty"].at[stage])
        plgpu.barrier_wait(self.memory["v_full"].at[stage])
        plgpu.barrier_arrive(self.memory["v_empty"].at[stage])

    def attend(self, steps, o_acc):
        """Pushes the key blocks and stores the rows; the first key block is that of step `steps`."""
        memory, stage = self.memory, self.tile.stage
        start, o = self._start()
        plgpu.barrier_wait(memory["q_full"].at[self.consumer])
        s, masks = pl.run_scoped(functools.partial(self._multiply_first, steps), plgpu.ACC(self.shape, jnp.float32))
        plgpu.barrier_arrive(memory["k_empty"].at[stage(steps)])
        mask, following = (self._packed(mask) for mask in masks)
        s = self._scores(s, mask, self.high - 1, banded=True)
        state, factor, weights = self._push(start, s)
        if o is not None:
            o_acc[...] = wgmma.scale_rows(o, factor)
        pl.when(self.count > 1)(lambda: self._wait_for_keys(steps + 1))
        carry = (state.m, state.d, self._rounded(self._kept(weights, self.high - 1)), following)
        whole = self.tile.seen_whole(self.place, self.first, ROWS) if self.is_banded else None
        m, d, weights, _ = lax.fori_loop(1, self.count, functools.partial(self._step, whole, steps, o_acc), carry)
        if self.config.own_output:
            plgpu.barrier_arrive(memory["q_empty"].at[self.consumer])
        last = steps + self.count - 1
        self._multiply_values(o_acc, weights, last)
        o = o_acc[...]
        plgpu.barrier_arrive(memory["v_empty"].at[stage(last)])
        self._store(State(m, d, o))

    def _multiply_first(self, steps, s_acc):
        """The first key block's product, and the masks of the first two."""
        self._wait_for_keys(steps)
        self._take_tensor_cores()
        self._multiply_keys(s_acc, steps)
        self._pass_tensor_cores()
        masks = [self._mask(self.high - 1 - i, i < self.count) for i in range(2)]
        return s_acc[...], masks

    def _step(self, whole, steps, o_acc, i, carry):
        """Pushes key block `i`, while the values of the one before are multiplied.

        `whole` is from and to where all queries see all keys, None if that is everywhere. Masking the others is a branch in the
        step: a loop for each kind of step would run as fast and take longer to compile.
        """
        m, d, weights, mask = carry
        block = self.high - 1 - i
        banded = False if whole is None else (block < whole[0]) | (block >= whole[1])
        memory, stage = self.memory, self.tile.stage

        def multiply(s_acc):
            self._take_tensor_cores()
            self._multiply_keys(s_acc, steps + i)
            self._multiply_values(o_acc, weights, steps + i - 1)
            self._pass_tensor_cores()
            following = self._mask(self.high - 2 - i, i + 1 < self.count)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=self.plan.n_products), following

        s, following = pl.run_scoped(multiply, plgpu.ACC(self.shape, jnp.float32))
        plgpu.barrier_arrive(memory["k_empty"].at[stage(steps + i)])
        s = self._scores(s, mask, block, banded=banded)
        state, factor, own = self._push(State(m, d), s)
        own = self._kept(own, block)
        (m, d, _), factor, own = lax.optimization_barrier((state, factor, own))
        # A branch between the weights and the wait: without one ptxas computes them after it, and nothing overlaps.
        pl.when(i + 1 < self.count)(lambda: self._wait_for_keys(steps + i + 1))
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        plgpu.barrier_arrive(memory["v_empty"].at[stage(steps + i - 1)])
        o_acc[...] = wgmma.scale_rows(o, factor)
        return m, d, self._rounded(own), self._packed(following)

    # Products.

    def _wait_for_keys(self, step):
        plgpu.barrier_wait(self.memory["k_full"].at[self.tile.stage(step)])

    def _take_tensor_cores(self):
        """Waits until the consumer before hands the tensor cores over."""
        if self.config.ping_pong:
            ptx.named_barrier_sync(_PING_PONG + self.consumer)

    def _pass_tensor_cores(self):
        """Hands them over to the next consumer."""
        if self.config.ping_pong:
            following = lax.rem(self.consumer + 1, jnp.int32(self.config.consumers))
            ptx.named_barrier_arrive(_PING_PONG + following)

    def _multiply_keys(self, s_acc, step):
        pairs = _pairs_of_terms if self.config.split else functools.partial(zip, strict=True)
        for q, k in pairs(self.tile.parts("q", self.consumer), self.tile.parts("k", self.tile.stage(step))):
            plgpu.wgmma(s_acc, q, k.T)

    def _multiply_values(self, o_acc, weights, step):
        plgpu.barrier_wait(self.memory["v_full"].at[self.tile.stage(step)])
        values = self.tile.parts("v", self.tile.stage(step))
        if self.config.split:
            for term, v in _pairs_of_terms(weights, values):
                plgpu.wgmma(o_acc, term, v)
            return
        width = self.plan.value_width
        if width < values[0].shape[1]:
            values = [v.at[:, pl.ds(start, width)] for v in values for start in range(0, v.shape[1], width)]
        for i, v in enumerate(values):
            plgpu.wgmma(o_acc.at[:, i * width : (i + 1) * width], weights, v)

    def _rounded(self, weights):
        return wgmma.bfloat16_terms(weights) if self.config.split else weights.astype(self.dtype)

    # Scores and weights.

    def _start(self):
        """The state before the first key, that of `onto` or of the sink if there is one, and its sums of values or None."""
        state, o = online.identity(()), None
        if self.tile.onto is not None:
            (length, _, _), size, (out, lse) = self.plan.query, self.plan.value_size, self.tile.onto
            place, left = (self.place.b * length + self.first, self.place.head * size), length - self.first
            o = wgmma.load_product(out, *place, (left, size), (ROWS, self.plan.sizes[1]), varies=(True, True))
            lse = wgmma.load_product_rows(lse, self.tile.row(self.place, self.first), left, self.shape)
            state = online.lift_log2(lse, headroom=self.headroom, unit=self.unit)
            o = o * ((1 - self.plan.dropout_rate) * 2.0**self.headroom)
        elif "sinks" in self.operands:
            state = online.lift_log2(self._sinks(), headroom=self.headroom, unit=self.unit)
        return State(*(jnp.broadcast_to(part, (ROWS,)) for part in (state.m, state.d))), o

    def _sinks(self):
        """The sinks of the rows, or the one of all; that of the first split alone."""
        return self.plan.rows.sinks(self.operands["sinks"], self.place, self.first, self.plan)

    def _scores(self, s, mask, block, *, banded):
        """The scores of a key block, `-inf` for keys that are not seen; `mask` is what `_packed` gives of its."""
        if "key" in self.scales:
            s = s * self.scales["key"]
        if self.plan.soft_cap is not None:
            s = tanh(s * (self.plan.scale / self.plan.soft_cap))
        if "bias" in self.operands:
            s = s * self.factor
            bias = self._tile_of("bias", block, wgmma.load_product).astype(jnp.float32)
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s + bias)  # s may be NaN
        if "mask" in self.operands:
            s = wgmma.select_bits(s, mask)
        if not self.is_banded:
            return s
        return self._banded(s, block) if banded is True else lax.cond(banded, lambda s: self._banded(s, block), lambda s: s, s)

    def _banded(self, s, block):
        """The scores of a key block, `-inf` where segments, the window or the lengths hide the key."""
        start = block * self.shape[1]
        if self.place.ranges:
            _, _, whole_from, whole_to = self.place.ranges
            several = (block < whole_from) | (block >= whole_to)
            s = lax.cond(several, lambda s: self._of_own_segment(s, start), lambda s: s, s)
        return wgmma.band(s, None if self.first_key is None else self.first_key - start, self.last_key - start)

    def _of_own_segment(self, s, start):
        """The scores of the keys from `start` on, `-inf` for keys of another segment."""
        own, keys = self.operands["key_segments"], self.plan.key[0]
        ids = wgmma.load_product_cols(own.ref, own.index(self.place.b) * keys + start, keys - start, self.shape)
        return of_own_segment(s, self.segments, ids)

    def _kept(self, weights, block):
        """The weights of a key block that dropout keeps, and 0 for the others."""
        rate = self.plan.dropout_rate
        if not rate:
            return weights
        place, seeds = self.place, self.operands["seeds"]
        return jnp.where(dropout_keeps(seeds, place.b, place.head, self.first, block, self.shape, rate), weights, 0.0)

    def _mask(self, block, there):
        """Loads the mask of a key block if the block is there: a step before it is needed, as loads take long."""
        return self._tile_of("mask", block, wgmma.load_mask, there) if "mask" in self.operands else []

    def _packed(self, loaded):
        """What `_mask` loaded, in bits."""
        return wgmma.pack_mask(loaded, self.shape) if loaded else []

    def _tile_of(self, name, block, load, there=True):
        """The elements of a bias or mask that belong to the scores of a key block, none if it is not there."""
        own, head = self.operands[name], self.place.head
        row = own.row(self.place.b, head, self.first)
        start = block * self.shape[1]
        limits = jnp.where(there, self.plan.query[0] - self.first, 0), self.plan.key[0] - start
        return load(own.ref, row, start, limits, self.shape, varies=own.varies)

    # The epilogue.

    def _store(self, state):
        """Stores the output, that of 16 bits by way of shared memory, and the log-sum-exp."""
        (length, _, _), size, (b, head) = self.plan.query, self.plan.value_size, (self.place.b, self.place.head)
        row = self.tile.row(self.place, self.first)
        if "value" in self.scales:
            state = state._replace(o=state.o * self.scales["value"])
        if self.plan.splits > 1:
            wgmma.store_product(self.results["out"], row, 0, (length - self.first, size), state.o)
            self.tile.store_rows(self.place, self.first, m=state.m, d=state.d)
            self._leave_queries()
            return
        reciprocal = jnp.where(state.d == 0, 0.0, 1 / ((1 - self.plan.dropout_rate) * state.d))
        o = state.o * lax.broadcast_in_dim(reciprocal, state.o.shape, (0,))
        if self.results["out"].dtype == jnp.float32:
            start = (row, 0) if isinstance(self.plan.rows, FoldedRows) else (b * length + self.first, head * size)
            wgmma.store_product(self.results["out"], *start, (length - self.first, size), o)
        else:
            self._copy_out(o)
        self.tile.store_rows(self.place, self.first, lse=online.lse_log2(state, unit=self.unit))
        self._leave_queries()

    def _leave_queries(self):
        """Says that the queries' shared memory is empty, if the output had it."""
        if not self.config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.memory["q_empty"].at[self.consumer])

    def _copy_out(self, o):
        letter, out = "o" if self.config.own_output else "q", self.results["out"]
        b, at = self.place.b, self.tile.at("out", pl.ds(self.first, ROWS), self.place.head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, part in enumerate(self.tile.parts(letter, self.consumer)):
            part[...] = o[:, i * part.shape[1] : (i + 1) * part.shape[1]].astype(self.dtype)
        plgpu.commit_smem()
        self.tile.copy_parts(letter, self.consumer, lambda cols, part: plgpu.copy_smem_to_gmem(part, out.at[b, *at, cols]))


def _when(condition, do):
    """Does it where the condition holds, which may be known while tracing."""
    if condition is True:
        do()
    elif condition is not False:
        pl.when(condition)(do)


def _pairs_of_terms(left, right):
    """Which terms are multiplied, the smallest products first: that of both low terms is left out."""
    return zip((left[1], left[0], left[0]), (right[0], right[1], right[0]), strict=True)
