"""The forward kernel's warpgroups: producers fill slots of shared memory, consumers push key blocks to the state of their rows.

    producer                                      consumer, for its 64 rows
    copy K of the last key block, and Q           S = Q K'; state and weights P
    for each key block before it:                 for each key block before it:
        copy its K, and V of the one behind           S = Q K'; O += P V of the one behind; state and weights P, rescale O
    copy V of the first key block                 O += P V; store O / d and lse

Consumers hand the tensor cores over to each other (ping-pong): while one multiplies, another exponentiates.

With a `Correction` the weights of a step are a guess: `m` is that of the key blocks before, so that no weight waits for the
maximum. If a sum of weights is too large then, `m` follows, and the step's weights are computed again (`_corrected`).

Columns of heads come in slabs of 64 where TMA has to clip them, and a last one may be narrower: see `tail_of`. Each slab is a
product of its own, of queries and keys and of weights and values.

Score and mask functions run on the scores of a step in registers (`functions`): score functions in every step, mask functions
where they hide keys of the step from some row.

A score is multiplied by `scale * log2(e)` and the maximum subtracted in one multiply-add. Key blocks that all rows see are not
masked. In the others the column of each score, which is a constant, is compared with the limits of its row. Masks and biases
are read from global memory in their own shape: a bias by each thread for its scores; a mask, a step before it is needed, in
vectors by the four threads that share rows, which make bits of it and exchange those.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax import online
from jaxsoftmax._gpu import sync, wgmma
from jaxsoftmax.online import State
from jaxsoftmax.ops.attention.mosaic_sm90 import lists
from jaxsoftmax.ops.attention.mosaic_sm90.common import (
    COL_LAYOUT,
    LOG2E,
    ROWS,
    SWIZZLED,
    GlobalOperand,
    dropout_keeps,
    hidden_zero,
    in_one_segment,
    lse_of_large,
    tanh,
    views_of,
)
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import Correction, ForwardGeometry, ForwardTile, ForwardTiles
from jaxsoftmax.ops.attention.mosaic_sm90.functions import TileFunctions

# The first of the named barriers for ping-pong, and of those for corrections: each consumer has one of both, and there are at
# most three consumers. Mosaic GPU uses the barriers before: a test holds it to that.
_PING_PONG, _CORRECTION = 8, 11
# Powers of two by which a maximum grows before sums are rescaled, and by which it stays below the largest score. Warps in which
# no maximum grows skip the multiplication of their sums. Nothing is lost by either: the same maximum is in all weights and in
# the log-sum-exp. Weights are at most 2 to the power of their sum. float16 holds up to 2^15, and loses bits below 2^-14.
_SLACK_AND_HEADROOM = {"bfloat16": (8, 0), "float16": (2, 13), "float32": (8, 0)}
# Powers of two that sums of guessed weights may reach before a maximum follows. With 8, rows that see few keys in their first
# key block were corrected in most steps: 486 us to 384 (causal, 4096 tokens, head size 128, H100). bfloat16 and float32 hold
# the sums, and products with values as docs/numerics.md says.
_SLACK_OF_GUESSES = 24
# Powers of two by which a maximum that follows exceeds the largest score. With 0, scores that grow from key block to key block,
# as with ALiBi towards the first key, were corrected in half of the blocks: 4707 us, with 64 4177 us, with 90 4162 us. Exact
# maxima take 4001 us, and 10% more where no guess is wrong (16 heads of 128, 16384 tokens, H200). Weights below 2^-62 of the
# largest are lost, and bits of values below 2^-62.
_LEAD_OF_CORRECTIONS = 64
_PARTS = 8  # sums of a row's guessed weights: each of its four threads has two


@dataclass(frozen=True)
class ForwardSlots:
    """Slots of the queries "q" of each consumer, of keys "k" and values "v", and of the output "o".

    A slot is full when a copy has landed, and empty when all consumers have read it. The key blocks of all tiles of a block of
    threads are counted through: step `i` uses stage `i % stages` of keys and values.
    """

    geometry: ForwardGeometry
    memory: dict[str, Any]

    @property
    def value_stages(self) -> int:
        """Number of stages of values."""
        return self.geometry.config.stages

    def stage(self, step):
        """Returns the stage of keys of a step."""
        return self._stage(step, self.geometry.config.stages, 0)

    def value_stage(self, step):
        """Returns the stage of values of a step."""
        return self._stage(step, self.value_stages, 1)

    def _stage(self, step, stages, use):
        if stages == 1:  # constant addresses would stay in registers: 1360 bytes spill at head size 512
            return hidden_zero(step, use)
        return lax.rem(step, jnp.int32(stages))

    def key_part(self, stage, part):
        """Returns the index of the barriers of a part of the columns of keys; the last part is -1."""
        parts = self.geometry.key_parts
        return stage if parts == 1 else stage * parts + part % parts

    def slabs(self, letter, slot) -> list[Any]:
        """Lists the slabs of columns of a slot, as the tensor cores take them."""
        count, memory = self.geometry.count_slabs(letter), self.memory[letter]
        if not self.geometry.is_ragged:
            return [memory.at[slot]] if count == 1 else [memory.at[slot, i] for i in range(count)]
        has_tail = f"{letter}_tail" in self.memory
        slabs = [views_of(memory)[1].at[slot, i] for i in range(count - has_tail)]
        return [*slabs, views_of(self.memory[f"{letter}_tail"])[1].at[slot, 0]] if has_tail else slabs

    def copy_slabs(self, letter, slot, slabs: range, copy, column=0) -> None:
        """Does `copy(columns, slab)` for some of the slabs of a slot, as TMA takes them. Slab 0 starts at `column`."""
        if not self.geometry.is_ragged:
            for i, slab in enumerate(self.slabs(letter, slot)):
                if i in slabs:
                    copy(pl.ds(column, slab.shape[1]), slab)
                column += slab.shape[1]
            return
        has_tail, untiled = f"{letter}_tail" in self.memory, views_of(self.memory[letter])[0]
        stop = slabs.stop - has_tail

        @pl.loop(slabs.start, stop)  # not written out: a slab behind the last column must not be known while tracing
        def _(i):
            copy(pl.ds(column + i * SWIZZLED, SWIZZLED), untiled.at[slot, i])

        if has_tail:
            tail = views_of(self.memory[f"{letter}_tail"])[0]
            pl.loop(stop, stop + 1)(lambda i: copy(pl.ds(column + i * SWIZZLED, tail.shape[-1]), tail.at[slot, 0]))

    def take_queries(self, consumer: "ForwardConsumer", tile: ForwardTile, first) -> list[Any]:
        """Waits until the queries of a consumer are there. Returns the left operands that it has in registers: none."""
        del tile, first
        plgpu.barrier_wait(self.memory["q_full"].at[consumer.index])
        return []

    def multiply_keys(self, s_acc, consumer, queries, step) -> None:
        """Starts S += Q K'. The keys of the step are there, or the first part of their columns.

        A part is left when its product is done, except the last one: its slot is empty when S is. `queries` are what
        `take_queries` returned.
        """
        memory, stage, parts = self.memory, self.stage(step), self.geometry.key_parts
        if parts > 1 or self.geometry.value_parts > 1:
            consumer = consumer + hidden_zero(step, 2)
        pairs = list(self.pairs([*queries, *self.slabs("q", consumer)], self.slabs("k", stage)))
        count = len(pairs) // parts
        for part in range(parts):
            if part:
                plgpu.barrier_wait(memory["k_full"].at[self.key_part(stage, part)])
            for q, k in pairs[part * count : (part + 1) * count]:
                plgpu.wgmma(s_acc, q, k.T)
            if part:
                plgpu.wgmma_wait(count)
                plgpu.barrier_arrive(memory["k_empty"].at[self.key_part(stage, part - 1)])

    def multiply_values(self, o_acc, weights, step) -> None:
        """Starts O += P V once the values are there. `weights` are `rounded`."""
        stage, width = self.value_stage(step), self.geometry.value_width
        plgpu.barrier_wait(self.memory["v_full"].at[stage])
        values, column = self.slabs("v", stage), 0
        if width < values[0].shape[1]:
            values = [v.at[:, pl.ds(start, width)] for v in values for start in range(0, v.shape[1], width)]
        for v in values:
            plgpu.wgmma(o_acc.at[:, column : column + v.shape[1]], weights, v)
            column += v.shape[1]

    def pairs(self, left, right):
        """Pairs the slabs of two operands that are multiplied with each other."""
        return list(zip(left, right, strict=True))

    def rounded(self, weights):
        """Returns weights as the tensor cores take them, from registers."""
        return weights.astype(self.geometry.dtype)


@dataclass(frozen=True)
class TmaCopies:
    """Copies queries, keys and values to their slots by TMA, once these are empty."""

    geometry: ForwardGeometry
    operands: dict[str, GlobalOperand]
    slots: ForwardSlots
    IS_ONE_LOOP = False  # all steps of a tile are in one loop, so that the code of a copy is there once, and lowered once

    @property
    def n_stages(self) -> int:
        """Number of stages of keys, and of values."""
        return self.geometry.config.stages

    def slot(self, name, step):
        """Returns the slot of keys or values of a step."""
        del name
        return lax.rem(step, jnp.int32(self.n_stages))

    def look_up(self, tile, block) -> list[Any]:
        """Loads what a copy of a key block has to know, a step before: nothing."""
        del tile, block
        return []

    def copy(self, name, slot, tile, first, rows, head, looked_up=()) -> None:
        """Copies rows of an operand, from `first` on, to a slot. For keys and values `looked_up` is what `look_up` loaded."""
        del looked_up
        operand = self.operands[name]

        def copy_slab(columns, slab, full):
            at = pl.ds(first, rows), head
            if name == "query":
                at = self.geometry.rows.at(*at)
            plgpu.copy_gmem_to_smem(operand.ref.at[operand.index(tile.b)].at[*at, columns], slab, full)

        self.fill(name, slot, tile, copy_slab)
        if name == "key" and self.geometry.stages_segments:
            ids, memory = self.operands["key_segments"], self.slots.memory
            source = ids.ref.at[ids.index(tile.b), pl.ds(first, rows)]
            plgpu.copy_gmem_to_smem(source, memory["k_segments"].at[slot], memory["k_full"].at[slot])

    def fill(self, name, slot, tile, copy) -> None:
        """Does `copy(columns, slab, full)` for each slab of a slot once it is empty; `full` is the barrier to arrive at."""
        letter, memory, slots = self.letter(name), self.slots.memory, self.slots
        parts = self.geometry.key_parts if name == "key" else 1
        count = self.geometry.count_slabs(letter) // parts
        for part in range(parts):
            at = slots.key_part(slot, part) if name == "key" else slot
            plgpu.barrier_wait(memory[f"{letter}_empty"].at[at])
            copy_part = functools.partial(copy, full=memory[f"{letter}_full"].at[at])
            slabs = range(part * count, (part + 1) * count)
            slots.copy_slabs(letter, slot, slabs, copy_part, tile.column if name == "value" else 0)

    def letter(self, name) -> str:
        """Returns the name of the slots that an operand is copied to."""
        return name[0]


def visit(tile: ForwardTile, steps, work) -> Any:
    """Does `work()` unless the tile visits no key block; returns the number of steps so far, `steps` before this tile."""
    if tile.is_empty is False:
        work()
        return steps + tile.high - tile.low
    pl.when(~tile.is_empty)(work)
    return jnp.where(tile.is_empty, steps, steps + tile.high - tile.low)


@dataclass(frozen=True)
class ForwardProducer:
    """A producer warpgroup, which copies what its `letters` name: queries "q", keys "k" and values "v"."""

    geometry: ForwardGeometry
    copies: TmaCopies
    letters: str

    def __call__(self, tile, steps):
        """Copies what a tile needs, the last key block first; returns the number of steps so far."""
        return visit(tile, steps, lambda: self._copy_tile(tile, steps))

    def _copy_tile(self, tile, steps):
        geometry, config, copies = self.geometry, self.geometry.config, self.copies
        key_head = lax.div(tile.head, jnp.int32(geometry.query[1] // geometry.key[1]))
        count = tile.high - tile.low

        def copy_queries():
            for consumer in range(config.consumers):
                copies.copy("query", consumer, tile, tile.block * geometry.block_q + consumer * ROWS, ROWS, tile.head)

        def copy_block(name, i, looked_up):
            slot = copies.slot(name, steps + i)
            block = lists.block_of(looked_up[0]) if geometry.has_lists else tile.high - 1 - i
            first = block * config.block_kv
            copies.copy(name, slot, tile, first, config.block_kv, key_head, looked_up)

        def look_up(i, before):
            """Loads what copies of key block `i` have to know. From a list this is its entry, and the one behind it."""
            if geometry.has_lists:
                return [before[1], tile.load_entry(geometry, copies.operands, i + 1)]
            return copies.look_up(tile, jnp.maximum(tile.high - 1 - i, 0))

        def copy_step(i, before, has_keys=True, has_queries=False, has_values=True):
            """Copies keys `i`, the queries behind the first keys, and values `i - 1`, with what was looked up before."""
            following = look_up(i, before)
            if "k" in self.letters:
                pl.when(has_keys)(lambda: copy_block("key", i, following))
            if "q" in self.letters:
                pl.when(has_queries)(copy_queries)
            if "v" in self.letters:
                pl.when(has_values)(lambda: copy_block("value", i - 1, before))
            return following

        if copies.IS_ONE_LOOP:
            pages: Any = geometry.pages
            none = [jnp.int32(0)] * pages.count_in_block(config.block_kv)
            lax.fori_loop(0, count + 1, lambda i, before: copy_step(i, before, i < count, i == 0, i > 0), none)
            return
        before = copy_step(0, [tile.ranges[1]] * 2 if geometry.has_lists else [], has_queries=True, has_values=False)
        before = lax.fori_loop(1, count, copy_step, before)
        copy_step(count, before, has_keys=False)


class ForwardScores:
    """Scores and weights of the rows of a tile that a consumer has, from `first` on, one key block after the other."""

    def __init__(self, geometry: ForwardGeometry, operands: dict[str, GlobalOperand], tile: ForwardTile, first, load_segments):
        self.geometry: Any = geometry
        self.operands, self.tile, self.first = operands, tile, first
        self.load_segments = load_segments  # function of the number of a key block, which loads the segments of its keys
        self.shape, self.unit = (ROWS, geometry.config.block_kv), geometry.unit
        slack, self.headroom = _SLACK_AND_HEADROOM[geometry.dtype.name]
        self.factor = geometry.soft_cap or geometry.score_factor or 1.0
        scale_log2 = LOG2E * self.factor if self.unit == 1 else 1.0
        options = {"scale_log2": scale_log2, "slack": slack, "headroom": self.headroom, "unit": self.unit}
        # They take scores in these units, and give their weights.
        self.push = functools.partial(online.push_log2, **options)
        self.correction = geometry.config.correction
        of_guesses = {"scale_log2": scale_log2, "unit": self.unit}
        self.guess = functools.partial(online.guess_log2, **of_guesses, parts=_PARTS)
        self.correct = functools.partial(online.correct_log2, **of_guesses, slack=_SLACK_OF_GUESSES, lead=_LEAD_OF_CORRECTIONS)
        left, right = geometry.window
        has_limits = not {"ranges", "query_lengths", "key_lengths"}.isdisjoint(geometry.names)
        is_ragged = geometry.key[0] % self.shape[1] != 0
        # Some key block has to be masked by lengths, the window, segments or the mask function.
        self.is_banded = left is not None or right is not None or is_ragged or has_limits
        scales = (operands.get(f"{name}_scale") for name in ("key", "value"))
        self.key_scale, self.value_scale = (None if scale is None else scale[tile.b, tile.head] for scale in scales)
        self.first_key: Any = None  # int32 of the rows, the first key that each sees; None if no window limits it
        self.last_key: Any = None  # int32 of the rows, the last key that each sees; None unless `is_banded`
        if self.is_banded:
            position = geometry.rows.query_of(first + lax.iota(jnp.int32, ROWS))
            last_key = jnp.where(position < tile.lengths[0], tile.lengths[1] - 1, -1)
            position += tile.offset
            self.first_key = None if left is None else position - left
            self.last_key = last_key if right is None else jnp.minimum(last_key, position + right)
        self.segments: Any = None
        if "query_segments" in operands:
            part = operands["query_segments"].part_of_line(tile.b, first, geometry.query[0])
            self.segments = wgmma.load_product_rows(*part, self.shape)
        self.functions: Any = None
        if geometry.functions:
            at = {"b": tile.b, "head": tile.head, "first": first}
            at |= {"offset": tile.offset} if "query_offset" in operands else {}
            at |= {"entry": tile.entry}
            at |= {"scale": geometry.scale, "changed_factor": geometry.changed_factor}
            at |= {"ends": (geometry.blocks_q * geometry.block_q, geometry.blocks_kv * self.shape[1])}
            at |= {"heads_per_query": geometry.rows.heads_per_query}
            lengths = geometry.queries, geometry.key[0]
            self.functions = TileFunctions(geometry.functions, operands, lengths, self.shape[1], **at)

    def masked(self, s, mask, block, *, banded):
        """Returns the scores of a key block from its products, `-inf` for keys that are not seen.

        Values are multiplied by weights of 0 there, so that NaN in values of a key block that is visited shows.

        Args:
          s: the products.
          mask: what `packed` returns for the key block.
          block: number of the key block.
          banded: a bool, or an array: lengths, the window, segments or the mask function hide some of its keys from some row.
        """
        if self.key_scale is not None:
            s = s * self.key_scale
        if self.geometry.score_mod is not None:
            s = self._changed(s, block)
        elif self.geometry.soft_cap is not None:
            s = self.bent(s)
        return self.hidden(s, mask, block, banded=banded)

    def _changed(self, s, block):
        """Returns what the score function makes of products, with their hyperbolic tangent if a soft cap bends it."""
        cap = self.geometry.soft_cap
        s = self.functions.changed(s, block * self.shape[1])
        if cap is None:
            return s
        bent = tanh(s * ((self.geometry.score_factor or 1) / cap))
        return jnp.where(s == -jnp.inf, -jnp.inf, bent)  # what it hides stays hidden

    def bent(self, s):
        """Returns the hyperbolic tangent of scores that a soft cap bends, from their products."""
        return tanh(s * (self.geometry.scale / self.geometry.soft_cap))

    def hidden(self, s, mask, block, *, banded):
        """Returns the scores of a key block from products that are scaled and bent. Arguments are those of `masked`."""
        if "bias" in self.operands:
            s = s * self.factor
            bias = self._tile_of("bias", block, wgmma.load_product).astype(jnp.float32)
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s + bias)  # s may be NaN
        if "mask" in self.operands:
            s = wgmma.select_bits(s, mask)
        if not self.is_banded or banded is False:
            return s
        return self._banded(s, block) if banded is True else lax.cond(banded, lambda s: self._banded(s, block), lambda s: s, s)

    def _banded(self, s, block):
        """Returns the scores of a key block, `-inf` where segments, the mask function, the window or lengths hide the key."""
        start = block * self.shape[1]
        if self.geometry.has_lists:
            s = self._selected(s, block)
        elif self.tile.ranges:
            _, _, whole_from, whole_to = self.tile.ranges
            several = (block < whole_from) | (block >= whole_to)
            s = lax.cond(several, lambda s: self._selected(s, block), lambda s: s, s)
        return wgmma.band(s, None if self.first_key is None else self.first_key - start, self.last_key - start)

    def _selected(self, s, block):
        """Returns the scores of a key block, `-inf` where segments or the mask function hide the key."""
        if self.segments is not None:
            s = in_one_segment(s, self.segments, self.load_segments(block))
        if self.geometry.mask_mod is not None:
            s = self.functions.hidden(s, block * self.shape[1])
        return s

    def in_parts(self, state):
        """Returns a state with `d` as a step takes it: a part in each of a row's four threads if weights are guessed.

        These need half as many registers as `_PARTS` parts, and ptxas spilled some of those in each step.
        """
        return state if self.correction is None else State(state.m, state.d / wgmma.THREADS_OF_ROW)

    def with_sum(self, m, d, o):
        """Returns the state that the last step leaves, with the sum of the parts as `d`."""
        return State(m, d if self.correction is None else wgmma.sum_over_threads(d), o)

    def kept(self, weights, block):
        """Returns the weights of a key block that dropout keeps, and 0 for the others."""
        keeps = self.keeps(block)
        return weights if keeps is None else jnp.where(keeps, weights, 0.0)

    def keeps(self, block):
        """Tells which weights of a key block dropout keeps; None if it keeps all."""
        rate, tile = self.geometry.dropout_rate, self.tile
        if not rate:
            return None
        return dropout_keeps(self.operands["seeds"], tile.b, tile.head, self.first, block, self.shape, rate)

    def load_mask(self, block, is_there):
        """Loads the mask of a key block if the block is there: a step before it is needed, as loads take long."""
        return self._tile_of("mask", block, wgmma.load_mask, is_there) if "mask" in self.operands else []

    def packed(self, loaded):
        """Returns what `load_mask` loaded in bits."""
        return wgmma.pack_mask(loaded, self.shape) if loaded else []

    def _tile_of(self, name, block, load, is_there=True):
        """Loads the elements of a bias or mask that belong to the scores of a key block, none if it is not there."""
        operand = self.operands[name]
        row = operand.row(self.tile.b, self.tile.head, self.first)
        start = block * self.shape[1]
        limits = jnp.where(is_there, self.geometry.query[0] - self.first, 0), self.geometry.key[0] - start
        return load(operand.ref, row, start, limits, self.shape, varies=operand.varies)


@dataclass(frozen=True)
class ForwardConsumer:
    """A consumer warpgroup, which computes 64 rows of each tile."""

    index: Any  # number of the consumer
    geometry: ForwardGeometry
    operands: dict[str, GlobalOperand]
    results: dict[str, Any]
    slots: ForwardSlots  # what producers fill
    tiles: ForwardTiles
    initial: Any  # output and log-sum-exp of other keys, from which rows start, or None

    def start(self) -> None:
        """Says that all slots are empty, and that the first consumer has the tensor cores first."""
        config, memory = self.geometry.config, self.slots.memory
        for stage in range(config.byte_stages):

            @pl.when(self.index == 0)
            def _(stage=stage):
                for letter in "kv":
                    plgpu.barrier_arrive(memory[f"{letter}_bytes_empty"].at[stage])

        for stage in range(config.stages):
            for part in range(self.geometry.key_parts):
                plgpu.barrier_arrive(memory["k_empty"].at[self.slots.key_part(stage, part)])
        for stage in range(self.slots.value_stages):
            plgpu.barrier_arrive(memory["v_empty"].at[stage])
        if not config.copies_terms:
            plgpu.barrier_arrive(memory["q_empty"].at[self.index])
        if config.ping_pong:
            pl.when(self.index == config.consumers - 1)(lambda: sync.named_barrier_arrive(jnp.int32(_PING_PONG)))

    def __call__(self, tile, steps):
        """Computes the rows of a tile; returns the number of steps so far."""
        first = tile.block * self.geometry.block_q + self.index * ROWS
        pl.when(tile.is_empty)(lambda: self._store_nothing(tile, first))
        return visit(tile, steps, lambda: self._attend(tile, first, steps))

    def _attend(self, tile, first, steps):
        """Computes the rows from `first` on, and leaves key blocks that only other rows of the tile see to their consumers.

        All rows visit all of a list.
        """
        low, high = tile.low, tile.high
        if not self.geometry.has_lists:
            low, high = self.tiles.seen(tile.lengths, tile.offset, first, ROWS)
            high = jnp.clip(high, tile.low + 1, tile.high)
            low = jnp.clip(low, tile.low, high - 1)
        start, end = steps + tile.high - high, steps + tile.high - low
        top = tile.high - 1 + steps
        scores = self._scores(tile, first, functools.partial(self._load_segments, tile, top))
        lax.fori_loop(steps, start, self._skip, None)
        pipeline = self._pipeline(tile, scores, first, start, end, top)
        pl.run_scoped(pipeline.attend, plgpu.ACC((ROWS, self.geometry.sizes[1]), jnp.float32))
        lax.fori_loop(end, steps + tile.high - tile.low, self._skip, None)

    def _scores(self, tile, first, load_segments):
        return ForwardScores(self.geometry, self.operands, tile, first, load_segments)

    def _pipeline(self, *args):
        return ForwardPipeline(self, *args)

    def _load_segments(self, tile, top, block):
        """Loads the segments of the keys of a block. `top` is that of `ForwardPipeline`."""
        if self.geometry.stages_segments:
            return plgpu.load(self.slots.memory["k_segments"].at[self.slots.stage(top - block)], layout=COL_LAYOUT)
        shape = ROWS, self.geometry.config.block_kv
        part = self.operands["key_segments"].part_of_line(tile.b, block * shape[1], self.geometry.key[0])
        return wgmma.load_product_cols(*part, shape)

    def _skip(self, step, _):
        """Leaves a key block to the other consumers."""
        memory, stage, value_stage = self.slots.memory, self.slots.stage(step), self.slots.value_stage(step)
        self.wait_for_keys(step)
        self.take_tensor_cores()
        self.pass_tensor_cores()
        for part in range(self.geometry.key_parts):
            at = self.slots.key_part(stage, part)
            if part:
                plgpu.barrier_wait(memory["k_full"].at[at])
            plgpu.barrier_arrive(memory["k_empty"].at[at])
        plgpu.barrier_wait(memory["v_full"].at[value_stage])
        plgpu.barrier_arrive(memory["v_empty"].at[value_stage])

    def wait_for_keys(self, step) -> None:
        """Waits until the keys of a step are there, or the first part of their columns."""
        plgpu.barrier_wait(self.slots.memory["k_full"].at[self.slots.key_part(self.slots.stage(step), 0)])

    def leave_keys(self, step) -> None:
        """Says that the keys of a step, or the last part of their columns, are multiplied."""
        plgpu.barrier_arrive(self.slots.memory["k_empty"].at[self.slots.key_part(self.slots.stage(step), -1)])

    def take_tensor_cores(self) -> None:
        """Waits until the consumer before hands the tensor cores over."""
        if self.geometry.config.ping_pong:
            sync.named_barrier_sync(_PING_PONG + self.index)

    def pass_tensor_cores(self) -> None:
        """Hands the tensor cores over to the next consumer."""
        if self.geometry.config.ping_pong:
            following = lax.rem(self.index + 1, jnp.int32(self.geometry.config.consumers))
            sync.named_barrier_arrive(_PING_PONG + following)

    def row(self, tile, first):
        """Returns the number of a row among those of all splits."""
        (length, heads, _), splits = self.geometry.query, self.geometry.splits
        return ((tile.b * heads + tile.head) * splits + tile.split) * length + first

    def store_rows(self, tile, first, **numbers) -> None:
        """Stores a number of each of the rows from `first` on, to results by name: the tile with the first columns does."""
        limit = self.geometry.query[0] - first
        if self.geometry.value_parts > 1:
            limit = jnp.where(tile.column == 0, limit, 0)
        for name, values in numbers.items():
            wgmma.store_product_rows(self.results[name], self.row(tile, first), limit, values)

    def _store_nothing(self, tile, first):
        """Stores the state of no scores, except for the sums of values, which do not count then."""
        nothing = online.identity(())
        is_row = lax.iota(jnp.int32, ROWS) >= 0  # always: Mosaic GPU finds no layout for constants
        self.store_rows(tile, first, m=jnp.where(is_row, nothing.m, 0.0), d=jnp.where(is_row, nothing.d, 1.0))


@dataclass(frozen=True)
class ForwardPipeline:
    """The pipeline of a consumer for its rows of a tile, from `first` on.

    They push a key block in each step from `start` to before `end`: step `i` pushes the key block `top - i`, or that of entry
    `i - start` of the tile's list. Three numbers, as registers are short in the loop.
    """

    consumer: ForwardConsumer
    tile: ForwardTile
    scores: ForwardScores
    first: Any
    start: Any
    end: Any
    top: Any

    def attend(self, o_acc) -> None:
        """Pushes the key blocks to the state of the rows, one after the other, and stores it.

        The product P V of a key block runs while the scores S of the next one become weights P.
        """
        consumer, scores, slots = self.consumer, self.scores, self.consumer.slots
        memory, geometry = slots.memory, consumer.geometry

        # S = Q K' of the first key block.
        start, o = self._start()
        entry = self.tile.ranges[1] if geometry.has_lists else None
        queries = slots.take_queries(consumer, self.tile, self.first)
        multiply_first = functools.partial(self._multiply_first, queries)
        s, masks = pl.run_scoped(multiply_first, plgpu.ACC(scores.shape, jnp.float32))
        mask, following = (scores.packed(mask) for mask in masks)

        # Its weights.
        s = self._masked(s, mask, self.start, entry, banded=True if entry is None else lists.is_partial(entry))
        state, factor, p = scores.push(start, s)
        state = scores.in_parts(state)
        if o is not None:
            o_acc[...] = wgmma.scale_rows(o, factor)
        pl.when(self.start + 1 < self.end)(lambda: consumer.wait_for_keys(self.start + 1))
        carry = (state.m, state.d, slots.rounded(scores.kept(p, self._block(self.start, entry))), following)

        # The other key blocks.
        is_banded = scores.is_banded and not geometry.hides_in_first_block_alone and not geometry.has_lists
        whole = consumer.tiles.seen_whole(self.tile, self.first, ROWS) if is_banded else None
        push = functools.partial(self._step, whole, queries, o_acc)
        m, d, weights, _ = lax.fori_loop(self.start + 1, self.end, push, carry)

        # O += P V of the last one, and the output.
        if geometry.config.own_output and not geometry.config.copies_terms:
            plgpu.barrier_arrive(memory["q_empty"].at[consumer.index])
        last = self.end - 1
        slots.multiply_values(o_acc, weights, last)
        o = o_acc[...]
        plgpu.barrier_arrive(memory["v_empty"].at[slots.value_stage(last)])
        self._store(scores.with_sum(m, d, o))

    def _load_entry(self, step):
        """Loads the entry of a step in the tile's list; None if there is no list.

        Loads end while the scores are multiplied, which must be masked only then.
        """
        if not self.consumer.geometry.has_lists:
            return None
        return self.tile.load_entry(self.consumer.geometry, self.consumer.operands, step - self.start)

    def _block(self, step, entry):
        """Returns the key block of a step, whose entry is None if there is no list."""
        return self.top - step if entry is None else lists.block_of(entry)

    def _multiply_first(self, queries, s_acc):
        """Returns the product of the first key block, and the masks of the first two."""
        consumer = self.consumer
        consumer.wait_for_keys(self.start)
        consumer.take_tensor_cores()
        consumer.slots.multiply_keys(s_acc, consumer.index, queries, self.start)
        consumer.pass_tensor_cores()
        masks = [self.scores.load_mask(self.top - step, step < self.end) for step in (self.start, self.start + 1)]
        return s_acc[...], masks

    def _step(self, whole, queries, o_acc, step, carry):
        """Pushes the key block of a step, while the values of the one before are multiplied.

        `queries` are those in registers. `whole` are the key blocks that all rows see, the first one and the one behind the
        last; None if these are all. Masking the others is a branch in the step: a loop for each kind of step would run equally
        fast and take longer to compile.
        """
        m, d, weights, mask = carry
        entry = self._load_entry(step)
        consumer, scores, slots = self.consumer, self.scores, self.consumer.slots
        memory, block = slots.memory, self._block(step, entry)
        banded = False if whole is None else (block < whole[0]) | (block >= whole[1])
        banded = banded if entry is None else lists.is_partial(entry)

        def multiply(s_acc):
            consumer.take_tensor_cores()
            slots.multiply_keys(s_acc, consumer.index, queries, step)
            slots.multiply_values(o_acc, weights, step - 1)
            consumer.pass_tensor_cores()
            following = scores.load_mask(block - 1, step + 1 < self.end)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=consumer.geometry.n_products), following

        s, following = pl.run_scoped(multiply, plgpu.ACC(scores.shape, jnp.float32))
        s = self._masked(s, mask, step, entry, banded=banded, leaves_keys=scores.correction is not Correction.FROM_PRODUCT)
        if scores.correction is None:
            (m, d, _), factor, p = scores.push(State(m, d), s)
            result: Any = m, d, factor, scores.kept(p, block)  # no weights are guessed with dropout: `pays_to_guess`
        elif scores.correction is Correction.FROM_SCORES:
            result = self._corrected(m, d, scores.guess(m, s), lambda: s)
        else:
            result = scores.guess(m, s)
        result = lax.optimization_barrier(result)
        # A branch between the weights and the wait: without one ptxas computes them after it, and nothing overlaps.
        pl.when(step + 1 < self.end)(lambda: consumer.wait_for_keys(step + 1))
        o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
        plgpu.barrier_arrive(memory["v_empty"].at[slots.value_stage(step - 1)])
        if scores.correction is Correction.FROM_PRODUCT:
            # Not before the wait: ptxas would let all products wait for each other.
            result = self._corrected(m, d, result, functools.partial(self._multiply_again, queries, step, mask, entry, banded))
            consumer.leave_keys(step)
        m, d, factor, p = result
        o_acc[...] = wgmma.scale_rows(o, factor)
        return m, d, slots.rounded(p), scores.packed(following)

    def _masked(self, s, mask, step, entry, *, banded, leaves_keys=True):
        """Returns the scores of a step as `ForwardScores.masked` does, and leaves the keys if `leaves_keys`.

        Keys are left first, so that the next ones may come, except where masking reads segments beside them. These loads are in
        a branch with the selection that needs them, and so are done then. Weights that may be corrected by another product
        need the keys for longer.
        """
        is_late = self.consumer.geometry.stages_segments
        if leaves_keys and not is_late:
            self.consumer.leave_keys(step)
        s = self.scores.masked(s, mask, self._block(step, entry), banded=banded)
        if leaves_keys and is_late:
            self.consumer.leave_keys(step)
        return s

    def _corrected(self, m, d, guess, scores_again):
        """Returns `m` and `d` with a key block, the factors of earlier sums, and the weights.

        A row whose guess was right gets the same bits, corrected or not: they do not depend on the other rows of a warp.

        Args:
          m: `m` without the key block.
          d: `d` without the key block, a part in each thread.
          guess: sums and weights, as `online.guess_log2` returns them.
          scores_again: function that returns the scores of the key block. It runs if the guess was wrong in a row of the warp,
            or with `FROM_PRODUCT` in a row of the consumer, whose warps can only multiply together.
        """
        sums, p = guess
        barrier = _CORRECTION + self.consumer.index if self.scores.correction is Correction.FROM_PRODUCT else None
        is_wrong = wgmma.any_above(sums, 2.0**_SLACK_OF_GUESSES, barrier) != 0
        m, factor, sums, p = lax.cond(
            is_wrong, lambda: self.scores.correct(m, scores_again(), sums=sums), lambda: (m, jnp.ones_like(m), sums, p)
        )
        return m, online.rescale_sum(d, factor) + wgmma.sum_in_threads(sums), factor, p

    def _multiply_again(self, queries, step, mask, entry, banded):
        """Returns the scores of the key block of a step, whose keys are still there."""

        def multiply(s_acc):
            self.consumer.slots.multiply_keys(s_acc, self.consumer.index, queries, step)
            return plgpu.wgmma_accumulator_load(s_acc, wait_n=0)

        s = pl.run_scoped(multiply, plgpu.ACC(self.scores.shape, jnp.float32))
        return self.scores.masked(s, mask, self._block(step, entry), banded=banded)

    def _start(self):
        """Returns the state before the first key, from `initial` or a sink if there is one, and its sums of values or None."""
        consumer, scores, geometry, tile = self.consumer, self.scores, self.consumer.geometry, self.tile
        state, o = online.identity(()), None
        if consumer.initial is not None:
            (length, _, _), size, (out, lse) = geometry.query, geometry.value_size, consumer.initial
            place, left = (tile.b * length + self.first, tile.head * size + tile.column), length - self.first
            limits, shape = (left, size - tile.column), (ROWS, geometry.sizes[1])
            o = wgmma.load_product(out, *place, limits, shape, varies=(True, True))
            lse = wgmma.load_product_rows(lse, consumer.row(tile, self.first), left, scores.shape)
            state = online.lift_log2(lse, headroom=scores.headroom, unit=scores.unit)
            if geometry.has_large_powers:  # the finite ones stay finite
                state = state._replace(m=jnp.where(lse == -jnp.inf, lse, jnp.maximum(state.m, float(jnp.finfo(lse.dtype).min))))
            # `initial` is normalised, and `_store` divides by (1 - rate) d, where d starts as 2^headroom.
            o = o * ((1 - geometry.dropout_rate) * 2.0**scores.headroom)
        elif "sinks" in consumer.operands:
            sinks = geometry.rows.sinks(consumer.operands["sinks"], tile, self.first, geometry)
            state = online.lift_log2(sinks, headroom=scores.headroom, unit=scores.unit)
        return State(*(jnp.broadcast_to(part, (ROWS,)) for part in (state.m, state.d))), o

    def _store(self, state):
        """Stores output and log-sum-exp, or the state if there are several splits."""
        consumer, geometry, tile, first = self.consumer, self.consumer.geometry, self.tile, self.first
        (length, heads, _), size, out = geometry.query, geometry.value_size, consumer.results["out"]
        row = consumer.row(tile, first)
        if self.scores.value_scale is not None:
            state = state._replace(o=state.o * self.scores.value_scale)
        if geometry.splits > 1:
            wgmma.store_product(out, row, tile.column, (length - first, size - tile.column), state.o)
            consumer.store_rows(tile, first, m=state.m, d=state.d)
            self._leave_queries()
            return
        reciprocal = jnp.where(state.d == 0, 0.0, 1 / ((1 - geometry.dropout_rate) * state.d))
        o = state.o * lax.broadcast_in_dim(reciprocal, state.o.shape, (0,))
        if out.dtype == jnp.float32:
            entry, head, _ = geometry.rows.in_matrix(tile.b, tile.head, heads)
            place, limits = (entry * length + first, head * size + tile.column), (length - first, size - tile.column)
            wgmma.store_product(out, *place, limits, o)
        else:
            self._copy_out(o)
        lse = online.lse_log2(state, unit=self.scores.unit)
        consumer.store_rows(tile, first, lse=lse_of_large(lse) if geometry.has_large_powers else lse)
        self._leave_queries()

    def _copy_out(self, o):
        """Stores an output of 16 bits by way of shared memory."""
        consumer, geometry, slots = self.consumer, self.consumer.geometry, self.consumer.slots
        letter, out = "o" if geometry.config.own_output else "q", consumer.results["out"]
        b, at = self.tile.b, geometry.rows.at(pl.ds(self.first, ROWS), self.tile.head)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        slabs, column = range(geometry.count_slabs("o")), 0
        for _, slab in zip(slabs, slots.slabs(letter, consumer.index), strict=False):  # queries may have more
            slab[...] = o[:, column : column + slab.shape[1]].astype(geometry.dtype)
            column += slab.shape[1]
        plgpu.commit_smem()

        def copy_slab(columns, slab):
            plgpu.copy_smem_to_gmem(slab, out.at[b, *at, columns])

        slots.copy_slabs(letter, consumer.index, slabs, copy_slab, self.tile.column)

    def _leave_queries(self):
        """Says that the queries' shared memory is empty, if the output had it."""
        if not self.consumer.geometry.config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.consumer.slots.memory["q_empty"].at[self.consumer.index])
