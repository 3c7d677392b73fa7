"""The backward kernel's consumer warpgroups, which keep the sums of their keys' derivatives while blocks of queries pass.

    consumer with 64 keys of its own              consumers that share 64 keys (head size 256)
                                                  of the weights                of the derivatives
    S' = K Q'; P'                                 S' = K Q'; P'                 dP' = V dO'
    dP' = V dO'                                   P' to shared memory
    dV += P' dO                                   dV += P' dO
    dS' = P' (dP' - delta)                                                      dS' = P' (dP' - delta)
    dS' to shared memory                                                        dS' to shared memory
    dK += dS' Q                                                                 dK += dS' Q
    its part of dQ = dS K of the step before      the same                      the same
    add it to dQ in global memory                 the same                      the same

A part of dQ needs the derivatives of both consumers. It is multiplied a step later, when the other's are there, so that
consumers need not keep in step: one multiplies while the other exponentiates. Forward and backward of 4096 tokens take 3570 us
so, and 3691 us if consumers meet in each step (head size 64, H100). The first step of a tile has no step before. Code of its
own makes it shorter; a branch around the product would make all products wait for each other. 4096 causal tokens take 1974 us
so, and 2010 us if the first step multiplies what is left of the tile before, and drops it (head size 64, H100).

Two blocks of threads that share a tile (head size 256) differ by at most a step. In step i of either block

    the first consumer waits for all four to arrive in step i - 1 (`step_done`): they have read the stage of step i - 2
    it stores P' to that stage; the second one stores dS' in its place
    a bulk copy sends dS' to the other block's memory, and completes a barrier there (`exchange_with_peer`)
    dQ of step i - 1 takes the block's own dS', waits for the other's (`await_peer`), and takes it with the other's keys
    all four arrive

The steps of all tiles are counted through: step `i` uses stage `i % stages`. A barrier is full when copies have landed, and
empty when all have read them.

In float32 each operand is two terms of bfloat16, and a product is three of theirs: see `TermSlots` of `forward_formats`. With
heads of up to 64 each consumer then adds dQ of its own 64 keys, and need not wait for the other. With heads of up to 128
consumers share 64 keys, and dS' takes the place of P' as it does in a cluster.

Products have as many columns as heads, in steps of 64, and keys may have others than values. A head of 65 to 96 columns has
a slab of 64 and a tail of 16 or 32: see `tail_of`. dQ alone has all columns of the configuration, with 0 behind the last one.

TMA writes in another proxy than loads read in. A barrier alone does not order a load before the copy that it allows, and ptxas
does not wait for the load. Behind stores to global memory loads took longer than the next copy: one run in seven of float32
gradients had a wrong delta in the first step of some tile (H100). So consumers free a stage behind an instruction that needs
what they loaded from it.

Weights are made anew from the log-sum-exp. Rows of products are keys, columns queries. Biases and masks are loaded while the
products run, as loads take long. Segments of queries are loaded where a step is masked: they would take registers until then.
"""

import functools
import math
import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import sync, wgmma
from jaxsoftmax._gpu.kernel import tile_transforms
from jaxsoftmax.ops.attention.mosaic_sm90 import lists
from jaxsoftmax.ops.attention.mosaic_sm90.backward_plan import (
    ADDERS,
    CONSUMERS,
    DS_STAGES,
    BackwardGeometry,
    BiasGradient,
)
from jaxsoftmax.ops.attention.mosaic_sm90.common import (
    COL_LAYOUT,
    KERNEL,
    LAYOUT,
    LOG2E,
    ROWS,
    GlobalOperand,
    dropout_keeps,
    hidden_zero,
    in_one_segment,
    of_operand,
    pair_terms,
    tanh,
    views_of,
)
from jaxsoftmax.ops.attention.mosaic_sm90.functions import TileFunctions

# Named barriers. Mosaic GPU uses those before: a test holds it to that.
_BOTH = 8  # at which both consumers meet
_WEIGHTS = 9  # by which one consumer tells the other that weights are in shared memory
_WEIGHTS_READ = 10  # by which the other tells that it has read them

# Waits for the other consumer. What both wrote to shared memory is then visible to wgmma.
_meet = sync.meeting(_BOTH, CONSUMERS)


@dataclass(frozen=True)
class BackwardTile:
    """A tile of the backward kernel, as its warpgroups know it."""

    b: Any  # batch entry
    head: Any  # key head
    group: Any  # of query heads, which the tile has: it is the key head, or the query head
    number: Any  # among the tiles of the group
    block: Any  # of keys
    other_block: Any  # of keys, that the other block of threads has; None if there is none
    low: Any  # first block of queries that the tile visits; 0 with a list
    count: Any  # blocks of queries of each query head
    entry: Any  # the first one of its list, or None if it has none
    whole_from: Any  # first of the blocks whose queries see all keys
    whole_to: Any  # the one behind the last of those
    lengths: tuple[Any, Any]  # numbers of queries and keys of the batch entry
    offset: Any  # position of query 0
    # Number among the tiles that are cut, if it is a slice of one: `count` blocks of queries from `low` on. Below 0 if it is
    # whole, None if no tile is cut.
    cut_number: Any
    goes_up: Any  # False, or an array that says whether queries pass from the first block to the last


@dataclass(frozen=True)
class BackwardStep:
    """A step of a tile: one block of queries of one head."""

    head: Any  # query head
    block: Any  # of queries
    banded: Any  # False, or an array that says whether some query does not see some key
    index: Any  # of the step among those of all tiles
    is_first: bool  # it is the first step of its tile
    stage: Any  # of the queries
    stage_do: Any  # of the output cotangents


@dataclass(frozen=True)
class BackwardRole:
    """Knowledge and addresses that all roles of warpgroups and warps of the backward kernel share."""

    geometry: BackwardGeometry
    refs: dict[str, Any]  # operands and results in global memory
    operands: dict[str, GlobalOperand]  # records of the optional operands
    memory: dict[str, Any]  # arrays and barriers in shared memory

    def tile(self, number, following=None, ordinal=None) -> BackwardTile:
        """Returns a tile.

        If tiles are cut, `number` may stand for a slice, which ends where `following` starts. If directions alternate,
        `ordinal` is the tile's number among those of the block of threads.
        """
        geometry, operands = self.geometry, self.operands
        cut, skipped, left = None, 0, 0
        if geometry.cut_heads:
            place, steps = number - geometry.n_tiles, jnp.int32(geometry.blocks_q)
            cut, skipped, left = jnp.where(place < 0, -1, lax.div(place, steps)), lax.rem(place, steps), following - number
            number = jnp.where(cut < 0, number, geometry.n_tiles - geometry.n_cut + cut)
        tiles, groups = jnp.int32(geometry.tiles_of_head), jnp.int32(geometry.query[1] // geometry.heads_per_tile)
        pair, tile = lax.div(number, tiles), lax.rem(number, tiles)
        b, group = lax.div(pair, groups), lax.rem(pair, groups)
        if geometry.bias_gradient is BiasGradient.ADDED and not geometry.is_deterministic and operands["dbias"].heads > 1:
            # Tiles of all batch entries come together, as they add to the same elements, which the L2 cache then holds.
            entries = jnp.int32(math.prod(geometry.batch))
            b, group = lax.rem(pair, entries), lax.div(pair, entries)
        head = lax.div(group, jnp.int32(geometry.heads_per_key_head)) if geometry.has_single_heads else group
        block, other_block = (2 * tile + self.rank, 2 * tile + 1 - self.rank) if geometry.is_paired else (tile, None)
        lengths = []
        for name, size in zip(("query_lengths", "key_lengths"), geometry.lengths, strict=True):
            lengths.append(jnp.clip(operands[name][b], 0, size) if name in operands else size)
        entry = None
        if geometry.has_lists:
            low, whole_from, whole_to = 0, None, None
            n_blocks = geometry.tiles_of_head * geometry.blocks_per_tile
            high, entry = (lists.load(operands["spans"], n_blocks, b, group, block, i) for i in range(2))
        elif "spans" in operands:
            low, high, whole_from, whole_to = (operands["spans"][b, block, i] for i in range(4))
        else:
            (low, high), (whole_from, whole_to) = geometry.visited(tile, KERNEL), geometry.span(block, KERNEL)[2:]
            low += hidden_zero(number, 0)  # ptxas makes slower loops of constant bounds
            high = jnp.maximum(low, high + hidden_zero(number, 1))
            whole_from = jnp.clip(whole_from, low, high)
            whole_to = jnp.clip(whole_to, whole_from, high)
        offset = operands["query_offset"][b] if "query_offset" in operands else 0
        count = high - low
        if cut is not None:
            low, count = low + jnp.where(cut < 0, 0, skipped), jnp.where(cut < 0, count, left)
        limits = low, count, entry, whole_from, whole_to
        goes_up = False if ordinal is None else lax.rem(ordinal, jnp.int32(2)) != 0
        return BackwardTile(b, head, group, tile, block, other_block, *limits, (lengths[0], lengths[1]), offset, cut, goes_up)

    @property
    def barriers(self):
        """Barriers by which both blocks of threads of a cluster tell each other what they send, in shared memory."""
        return self.memory["lines"].at[sum(self.geometry.config.stages)]

    @property
    def rank(self):
        """Number of the block of threads in its cluster."""
        return lax.axis_index("rank") if self.geometry.is_paired else 0

    def load_entry(self, tile, i):
        """Loads the entry of step `i` in the list of a tile, or None if it has none."""
        if not self.geometry.has_lists:
            return None
        if self.geometry.heads_per_tile > 1:  # each head visits all of the list
            i = lax.rem(i, jnp.maximum(tile.count, 1))
        n_blocks = self.geometry.tiles_of_head * self.geometry.blocks_per_tile
        return lists.load_entry(self.operands["spans"], n_blocks, tile.b, tile.group, tile.block, i)

    def head_and_block(self, tile, i, entry=None):
        """Returns the query head and the block of queries of step `i` of a tile; `entry` is that of its list, if it has one.

        Queries pass from the last block to the first, one head after the other, so that tiles which start together are at the
        same queries at the same time, causal ones too. `BackwardGeometry.alternates` describes the other order.
        """
        heads, i = self.geometry.heads_per_tile, jnp.int32(i)
        if self.geometry.alternates:
            head, place = lax.rem(i, jnp.int32(heads)), lax.div(i, jnp.int32(heads))
            place = jnp.where(tile.goes_up, place, tile.count - 1 - place)
        else:
            head, place = (lax.div(i, tile.count), lax.rem(i, tile.count)) if heads > 1 else (0, i)
            place = tile.count - 1 - place if entry is None else lists.block_of(entry)
        return tile.group * heads + head, tile.low + place

    def next_head_and_block(self, tile, head, block, entry=None):
        """Returns the query head and the block of queries of the step after one of a tile, as `head_and_block` counts them."""
        heads = self.geometry.heads_per_tile
        if entry is not None:  # blocks go down in a list: the next head starts where they do not
            following = lists.block_of(entry)
            return head if heads == 1 else jnp.where(following < block, head, head + 1), following
        if heads == 1:
            return head, block - 1
        if self.geometry.alternates:
            is_last_head = head == (tile.group + 1) * heads - 1
            next_block = block + jnp.where(tile.goes_up, 1, -1)
            return jnp.where(is_last_head, tile.group * heads, head + 1), jnp.where(is_last_head, next_block, block)
        is_last_block = block == tile.low
        return jnp.where(is_last_block, head + 1, head), jnp.where(is_last_block, tile.low + tile.count - 1, block - 1)

    def terms(self, name, *place):
        """Lists the terms of an operand in shared memory, the high one first; one of 16 bits is one term."""
        return [self.memory[name].at[(term, *place)] for term in range(self.geometry.n_terms)]

    def slabs(self, name, place, view=1) -> list[list[Any]]:
        """Lists the slabs of columns of an operand in shared memory, each as the list of its terms.

        `view` is 1 for tiles, and 0 for slabs as TMA copies them: see `in_two_views`.
        """
        if not self.geometry.in_slabs:
            return [self.terms(name, place)]
        tail, count = self.memory.get(f"{name}_tail"), of_operand(name, self.geometry.slabs)
        slabs = [[views_of(self.memory[name])[view].at[place, i]] for i in range(count)]
        return slabs if tail is None else [*slabs, [views_of(tail)[view].at[place, 0]]]

    def part_of_keys(self, half, part) -> list[Any]:
        """Lists the terms of the keys that a part of the columns of dQ is multiplied with."""
        return [views_of(self.memory["k"])[1].at[half, part]] if self.geometry.in_slabs else self.terms("k", half, part)

    def stages(self, step):
        """Returns the stages of queries and of output cotangents of a step."""
        return tuple([lax.rem(step, jnp.int32(count)) for count in self.geometry.config.stages])

    def line(self, name, stage):
        """Returns the log-sum-exp or the delta of a block of queries, in shared memory."""
        if name in self.memory:
            return self.memory[name].at[stage]
        return self.memory["lines"].at[stage if name == "q_lse" else self.geometry.config.stages[0] + stage]

    def part_of_dq(self, consumer):
        """Returns which 64 rows and which part of the columns of a block of dQ a consumer makes."""
        rows, columns = self.geometry.parts
        return [consumer if rows > 1 else 0, CONSUMERS * self.rank + consumer if columns > 1 else 0]

    def first_key(self, tile, consumer):
        """Returns the first of the 64 keys of a tile that a consumer has. With `roles` both have the same."""
        first = tile.block * self.geometry.block_kv
        return first if self.geometry.config.roles else first + consumer * ROWS

    def add_to_bias(self, tile, consumer, head, block, chunk) -> None:
        """Starts to add what a consumer staged, derivatives of scores for 64 queries, to that of the bias in global memory."""
        if not self.geometry.config.roles or consumer == CONSUMERS - 1:  # of roles, the second has them
            target = self.place_in_d_bias(tile, consumer, head, block, chunk)
            plgpu.copy_smem_to_gmem(self.memory["sums"].at[consumer], target, reduction_op="add")

    def place_in_d_bias(self, tile, consumer, head, block, chunk):
        """Returns the place of 64 queries and a consumer's 64 keys in the derivative of the bias."""
        geometry, d_bias = self.geometry, self.operands["dbias"]
        first = self.first_key(tile, consumer)
        rows = pl.ds(block * geometry.config.block_q + chunk * ROWS, ROWS)
        return d_bias.ref.at[d_bias.entry(tile.b, head), rows, pl.ds(first, ROWS)]

    def add_to_dq(self, consumer, b, head, block, piece) -> None:
        """Starts to add what a consumer staged, a piece of its part of dQ, to global memory."""
        staged, (chunk, part) = self.memory["sums"].at[consumer], self.part_of_dq(consumer)
        width = staged.shape[1]
        rows = pl.ds(block * self.geometry.config.block_q + chunk * ROWS, ROWS)
        start, size = part * self.geometry.part_size + piece * width, self.geometry.dq_size
        if not self.geometry.is_paired and start + width > size:
            if start >= size:
                return
            # TMA clips columns behind the last one, which must not be known while tracing.
            start = (start // width + hidden_zero(block, 0)) * width
        plgpu.copy_smem_to_gmem(staged, self.refs["dq"].at[b, rows, head, pl.ds(start, width)], reduction_op="add")


class BackwardScores:
    """Weights and derivatives for 64 keys of a consumer, from `first` on, and one block of queries after the other."""

    def __init__(self, consumer, tile, first, *, weighs):
        self.consumer, self.geometry, self.operands = consumer, consumer.geometry, consumer.operands
        self.tile, self.first = tile, first
        geometry, names = consumer.geometry, consumer.geometry.names
        self.shape = ROWS, geometry.config.block_q
        has_lengths = not {"query_lengths", "key_lengths"}.isdisjoint(names)
        # A score function may make infinite weights of the zeros behind the last query.
        self.limits_queries = "query_lengths" in names or (
            geometry.score_mod is not None and geometry.query[0] % geometry.config.block_q != 0
        )
        self.is_limited = geometry.window != (None, None) or geometry.is_ragged or has_lengths or self.limits_queries
        # Some block of queries has to be masked by lengths, the window, segments or the mask function.
        self.is_banded = self.is_limited or "query_segments" in names or geometry.mask_mod is not None
        self.kept_factor = 1 / (1 - geometry.dropout_rate) if "seeds" in names else 1.0
        self.segments: Any = None
        if "key_segments" in names and weighs:
            ref, start, limit = self.operands["key_segments"].part_of_line(tile.b, first, geometry.key[0])
            self.segments = wgmma.load_product_rows(ref, start, limit, self.shape)
        # The score and mask functions of all steps of the tile, or None if those of each step have a head of their own.
        self.functions: Any = None
        has_one_head = geometry.heads_per_tile == 1 or "head_numbers" not in names
        if geometry.functions and weighs and has_one_head:
            self.functions = self._functions_of(tile.group * geometry.heads_per_tile)

    def _functions_of(self, head, functions=None) -> TileFunctions:
        """Loads what functions read for a query head: score and mask functions, or others."""
        geometry, tile = self.geometry, self.tile
        offset = tile.offset if "query_offset" in self.operands else None
        at: dict[str, Any] = {"b": tile.b, "head": head, "first": self.first, "offset": offset, "rows_are_queries": False}
        ends = geometry.tiles_of_head * geometry.blocks_per_tile * geometry.block_kv, geometry.blocks_q * self.shape[1]
        at |= {"scale": geometry.scale, "changed_factor": geometry.changed_factor, "ends": ends}
        return TileFunctions(functions or geometry.functions, self.operands, geometry.lengths, self.shape[1], **at)

    def load(self, current):
        """Loads the bias and the mask of a step, and what functions read of tables, from global memory."""
        loaded: dict[str, Any] = {}
        if self.geometry.functions:
            loaded["functions"] = self._functions_of(current.head) if self.functions is None else self.functions
        for name in ("bias", "mask"):
            if name in self.operands and not (name == "bias" and self.geometry.config.stages_bias):
                operand = self.operands[name]
                place = self._place(operand, current)
                loaded[name] = wgmma.load_transposed(operand.ref, *place, self.shape, varies=operand.varies)
        return loaded

    def weights(self, s, lse, loaded, current):
        """Returns the weights of a block of queries, the derivative of the scores by the products, scaled, and `change`.

        The derivative is None for 1: without a score function and a soft cap. `change` is for `add_to_tables`: the derivative
        of the soft cap, or None, and those of the score function by elements of tables that depend on scores.
        """
        slope, factor, is_hidden, bend, by_elements = None, self.geometry.scale, None, None, []
        if self.geometry.score_mod is not None:
            s, slope, by_elements = self._changed(s, loaded["functions"], current)
            factor = self.geometry.score_factor or 1
        if (cap := self.geometry.soft_cap) is not None:
            if self.geometry.score_mod is not None:
                is_hidden = s == -jnp.inf
            s = tanh(s * (factor / cap))
            bend, factor = 1 - s * s, cap
            slope = bend if slope is None else slope * bend
            s = s if is_hidden is None else jnp.where(is_hidden, -jnp.inf, s)
        if "bias" in self.operands:
            bias = (self.consumer.bias() if self.geometry.config.stages_bias else loaded["bias"]).astype(jnp.float32)
            s, factor = jnp.where(bias == -jnp.inf, -jnp.inf, times(factor, s) + bias), 1  # scores may be NaN
        if self.geometry.is_natural:
            s, factor = times(factor, s) - along_rows(lse, s.shape), 1
        if "mask" in loaded:
            s = jnp.where(loaded["mask"] != 0, s, -jnp.inf)
        s = s * (factor * LOG2E)
        p = jnp.exp2(s if self.geometry.is_seeded or self.geometry.is_natural else s - along_rows(lse, s.shape))
        if self.is_banded:
            p = lax.cond(current.banded, lambda p: self._masked(p, loaded, current), lambda p: p, p)
        return p, slope, (bend, by_elements)

    def _changed(self, s, functions, current):
        """Returns what the score function makes of scores, its derivative by them, and those by elements of tables.

        The former is an array, a number, or None for 1.
        """
        slope = self.geometry.slope
        s, *others = functions.results("score_mod", s, current.block * self.shape[1])
        return (s, others[0], others[1:]) if slope is None else (s, None if slope == 1 else slope, others)

    def _masked(self, p, loaded, current):
        """Returns the weights of a block of queries, 0 where functions, segments, the window or the lengths hide a key.

        On an H200 a branch here costs nothing. One that masks the scores, before the exponentials, costs up to 4 percent at
        head size 128.
        """
        if "query_segments" in self.operands:
            p = in_one_segment(p, self.segments, self._load_segments(current), hidden=0.0)
        if self.geometry.mask_mod is not None:
            p = loaded["functions"].hidden(p, current.block * self.shape[1], 0.0)
        return wgmma.band(p, *self._limits(current.block * self.shape[1]), hidden=0.0) if self.is_limited else p

    def _load_segments(self, current):
        """Loads the segments of the queries of a step."""
        if self.geometry.stages_segments:
            return plgpu.load(self.consumer.memory["q_segments"].at[current.stage], layout=COL_LAYOUT)
        first, ids = current.block * self.shape[1], self.operands["query_segments"]
        ref, start, limit = ids.part_of_line(self.tile.b, first, self.geometry.query[0])
        return wgmma.load_product_cols(ref, start, limit, self.shape)

    def kept(self, current):
        """Tells which weights dropout keeps; None if it keeps all."""
        if "seeds" not in self.operands:
            return None
        seeds, rate = self.operands["seeds"], self.geometry.dropout_rate
        return dropout_keeps(seeds, self.tile.b, current.head, self.first, current.block, self.shape, rate, is_transposed=True)

    def less_delta(self, dp, delta, kept):
        """Returns the derivatives of the weights that dropout keeps less `delta`, or less nothing if it is None."""
        if kept is not None:
            dp = where_kept(kept, dp * self.kept_factor)
        return dp if delta is None else dp - along_rows(delta, dp.shape)

    def derivatives(self, p, slope, change, dp, delta, kept, current):
        """Returns the derivatives of the products of keys and queries."""
        ds = p * self.less_delta(dp, delta, kept)
        self.add_to_bias(ds, current)
        self.add_to_tables(ds, change, current)
        return self.times_slope(ds, p, slope)

    def add_to_tables(self, ds, change, current) -> None:
        """Adds to the derivatives of tables in global memory, in float32, in any order."""
        if not self.geometry.tables:
            return
        bend, by_elements = change
        ds = ds if bend is None else ds * bend
        by_elements, start = iter(by_elements), current.block * self.shape[1]
        loads = self.geometry.loads
        functions = self._functions_of(current.head, {name: function for name, (_, function) in loads.items()})
        for name, (load, _) in loads.items():
            functions.add(name, jnp.where(ds == 0, 0.0, ds * next(by_elements)) if load.is_of_score else ds, start)

    def times_slope(self, ds, p, slope):
        """Multiplies by the derivative of scores by products.

        Unless it `has_finite_slope`, it may be NaN or infinite where the weight `p` is 0.
        """
        if slope is None:
            return ds
        return ds * slope if self.geometry.has_finite_slope else jnp.where(p == 0, 0.0, ds * slope)

    def add_to_bias(self, ds, current) -> None:
        """Adds the derivatives of scores to that of the bias in global memory, in float32, if it is made of sums.

        Sums along axes along which the bias does not vary are made in registers first. Additions come in any order.
        """
        if self.geometry.bias_gradient is BiasGradient.SUMS:
            sums = self.operands["dbias"]
            wgmma.add_transposed(sums.ref, *self._place(sums, current), ds, varies=sums.varies)
        elif self.geometry.bias_gradient is BiasGradient.ADDED:
            for chunk in range(self.shape[1] // ROWS):
                self.consumer.stage_for_bias(self.tile, current, chunk, ds[:, chunk * ROWS : (chunk + 1) * ROWS])

    def _limits(self, start):
        """Returns the first and the last column that each row sees; None for no limit. Columns are queries from `start` on."""
        (left, right), (queries, keys) = self.geometry.window, self.tile.lengths
        position = self.first + lax.iota(jnp.int32, ROWS)
        start_at = start + self.tile.offset  # where windows count from
        low, high = None if right is None else position - (right + start_at), None
        if self.limits_queries:
            high = jnp.where(position >= 0, queries - start - 1, -1)  # it always holds, and gives the number a layout
        if left is not None:
            window_end = position + (left - start_at)
            high = window_end if high is None else jnp.minimum(high, window_end)
        if self.geometry.is_ragged or "key_lengths" in self.operands:
            high = jnp.where(position < keys, jnp.int32(self.shape[1] - 1) if high is None else high, -1)
        return low, high

    def _place(self, operand, current):
        """Returns row and column of the elements of a bias or mask for a block of queries, and their numbers."""
        start = current.block * self.shape[1]
        return (
            operand.row(self.tile.b, current.head, start),
            self.first if operand.varies[1] else 0,
            (self.geometry.query[0] - start, self.geometry.key[0] - self.first),
        )


@dataclass(frozen=True)
class BackwardConsumer(BackwardRole):
    """A consumer warpgroup. Its kinds have a `step` each, which adds a block of queries to their sums."""

    index: Any  # number of the consumer
    SUMS = ()  # names of the sums
    WEIGHS = True  # it makes weights, which segments and functions mask

    def start(self) -> None:
        """Says that all of shared memory is empty."""
        plgpu.barrier_arrive(self.memory["kv_empty"])
        for name, stages in zip(("q_empty", "do_empty"), self.geometry.config.stages, strict=True):
            for stage in range(stages):
                plgpu.barrier_arrive(self.memory[name].at[stage])
        if self.geometry.config.stages_bias:  # those that make weights read it
            pl.when(self.index < self.memory["bias"].shape[0])(lambda: plgpu.barrier_arrive(self.memory["bias_empty"]))

    def step(self, scores, current, sums) -> jax.Array | None:
        """Adds a block of queries to the sums.

        Returns the consumer's part of dQ of the step before, or None in the first step of a tile.
        """
        raise NotImplementedError

    def end_step(self, current) -> None:
        """Ends a step when the part of dQ is on its way."""

    def __call__(self, tile, steps):
        """Computes and stores the sums of a tile; returns the number of steps so far."""
        geometry, first = self.geometry, self.first_key(tile, self.index)
        scores = BackwardScores(self, tile, first, weighs=self.WEIGHS)
        total = geometry.heads_per_tile * tile.count
        if geometry.heads_per_tile > 1:
            # If ptxas knows that the number of heads divides the total, it spills five times as much (head size 128, causal).
            total += hidden_zero(steps, 0)

        def visit(sums, index, head, block, *, entry, is_first=False):
            # A branch in the step, where queries are to be masked. The first call of a gradient took 8.8 s with a loop for
            # each kind of step, and 4.3 s with one loop (head size 128, causal). The kernel takes 1.003 of the time of
            # several loops at head size 64, 0.98 to 1.013 at 128, 1.009 at 256 (causal, 512 to 16384 tokens, on an H200),
            # and 1.017 with segments.
            if entry is None:
                banded = scores.is_banded and (block < tile.whole_from) | (block >= tile.whole_to)
            else:
                banded = lists.is_partial(entry)
            current = BackwardStep(head, block, banded, index, is_first, *self.stages(index))
            return current, self.step(scores, current, sums)

        def visit_next(sums, i, before):
            entry = self.load_entry(tile, i)  # which ends while the scores are multiplied
            head, block = self.next_head_and_block(tile, *before, entry=entry)
            current, dq = visit(sums, steps + i, head, block, entry=entry)
            self.add(tile, steps + i - 1, *before, dq=dq, is_empty=geometry.is_empty_early)
            self.end_step(current)
            return [head, block]

        def visit_all(sums):
            first = list(self.head_and_block(tile, 0, tile.entry))
            current, _ = visit(sums, steps, *first, entry=tile.entry, is_first=True)
            self.end_step(current)
            # The query head and the block of queries of the step before pass from step to step.
            last = lax.fori_loop(1, total, functools.partial(visit_next, sums), first)
            self._add_last(tile, steps + total - 1, *last)

        def add_up(*sums):
            pl.when(total > 0)(lambda: visit_all(sums))
            results = {name: self._in_whole_slabs(acc[...]) for name, acc in zip(self.SUMS, sums, strict=True)}
            self._store(tile, scores.kept_factor, **results)
            return total

        plgpu.barrier_wait(self.memory["k_full"])
        plgpu.barrier_wait(self.memory["v_full"])
        columns = dict(zip(("dk", "dv"), geometry.columns, strict=True))
        return steps + pl.run_scoped(add_up, *(plgpu.ACC((ROWS, columns[name]), jnp.float32) for name in self.SUMS))

    def _in_whole_slabs(self, total):
        """Returns a sum of products with columns of 0 behind a tail, up to a multiple of 64."""
        missing = -total.shape[1] % ROWS
        if not missing:
            return total
        return wgmma.join_columns(total, plgpu.layout_cast(jnp.zeros((ROWS, missing), jnp.float32), LAYOUT))

    def bias(self) -> jax.Array:
        """Loads the bias of a step from shared memory."""
        staged = self.memory["bias"].at[0 if self.geometry.config.roles else self.index]
        plgpu.barrier_wait(self.memory["bias_full"])
        chunks = [plgpu.load(staged.at[chunk].T, layout=LAYOUT) for chunk in range(staged.shape[0])]
        return jnp.concatenate(chunks, 1) if len(chunks) > 1 else chunks[0]

    def free_bias(self) -> None:
        """Says that the next bias may come to shared memory, behind an instruction that needs all weights."""
        if self.geometry.config.stages_bias:
            plgpu.barrier_arrive(self.memory["bias_empty"])

    def rounded(self, values) -> Sequence[Any]:
        """Lists the terms of float32 values in registers, as left operands of products."""
        return [values.astype(self.geometry.dtype)] if self.geometry.n_terms == 1 else wgmma.bfloat16_terms(values)

    def multiply(self, acc, left, right) -> int:
        """Starts to add the product of two operands, listed as terms, to `acc`. Returns the number of products it starts."""
        pairs = pair_terms(left, right)
        for pair in pairs:
            plgpu.wgmma(acc, *pair)
        return len(pairs)

    def multiply_slabs(self, acc, left, right) -> int:
        """Starts to add the product of two operands, listed as slabs of the columns that they share, to `acc`.

        Returns the number of products it starts. The right operand is transposed.
        """
        return sum(self.multiply(acc, a, [term.T for term in b]) for a, b in zip(left, right, strict=True))

    def multiply_columns(self, acc, left, right) -> int:
        """Starts to add the product of two operands to `acc`, the right one listed as slabs of columns.

        Returns the number of products it starts.
        """
        if len(right) == 1:
            return self.multiply(acc, left, right[0])
        count = column = 0
        for slab in right:
            width = slab[0].shape[1]
            count += self.multiply(acc.at[:, column : column + width], left, slab)
            column += width
        return count

    def multiply_keys(self, s_acc, half, current) -> None:
        """Starts S' += K Q'."""
        if self.geometry.in_slabs:
            self.multiply_slabs(s_acc, self.slabs("k", half), self.slabs("q", current.stage))
            return
        width, terms = self.geometry.part_size, self.terms("q", current.stage)
        for part in range(self.geometry.parts[1]):
            if columns := self.geometry.columns_of_part(part):
                queries = [q.at[:, part * width : part * width + columns].T for q in terms]
                self.multiply(s_acc, [k.at[:, :columns] for k in self.terms("k", half, part)], queries)

    @property
    def makes_dq(self) -> bool:
        """True if the consumer makes a part of dQ. In a cluster, and where warps add in turns, all do, if only of zeros."""
        _, part = self.part_of_dq(self.index)
        return self.geometry.is_paired or self.geometry.is_deterministic or self.geometry.columns_of_part(part) > 0

    def with_dq(self, current, multiply):
        """Returns `multiply(dq_acc)`, given an accumulator for dQ of the step before.

        It is None in the first step of a tile, and for a consumer that makes no part of dQ.
        """
        if current.is_first or not self.makes_dq:
            return multiply(None)
        return pl.run_scoped(multiply, plgpu.ACC((ROWS, self.geometry.part_size), jnp.float32))

    def multiply_derivatives(self, dq_acc, step) -> int:
        """Starts the consumer's part of dQ = dS K of a step, from the derivatives that consumers have shared.

        Returns the number of products that it starts, which is 0 if there is no accumulator.
        """
        if dq_acc is None:
            return 0
        chunk, part = self.part_of_dq(self.index)
        halves, count = [self.index] if self.geometry.config.separate_dq else range(self.geometry.block_kv // ROWS), 0
        is_transposed = self.geometry.bias_gradient is BiasGradient.STORED  # queries are rows
        for half in halves:
            terms = self.ds_terms(step, half, chunk)
            keys = self.part_of_keys(half + hidden_zero(step, 2), part)
            count += self.multiply(dq_acc, [ds if is_transposed else ds.T for ds in terms], keys)
        if self.geometry.is_paired:
            sync.await_peer(self.barriers, step)
            (ds,) = self.ds_terms(step, 1, chunk)
            count += self.multiply(dq_acc, [ds.T], [self.memory["other_k"].at[self.index + hidden_zero(step, 2)]])
        return count

    def share(self, half, ds, tile, current) -> None:
        """Stores the derivatives of scores, listed as terms, for both consumers. `arrive` tells the other one.

        A stage is written again two steps later. `await_other` makes sure that the other consumer has read it then.
        """
        geometry = self.geometry
        is_stored = geometry.bias_gradient is BiasGradient.STORED
        if is_stored:  # derivatives of two steps before, which were stored from this stage, have left it
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        chunks = range(geometry.config.block_q // ROWS)
        for chunk in chunks:
            for stage, term in zip(self.ds_terms(current.index, half, chunk), ds, strict=True):
                (stage.T if is_stored else stage)[...] = term[:, chunk * ROWS : (chunk + 1) * ROWS]
        plgpu.commit_smem()
        if is_stored:
            for chunk in chunks:
                (stage,) = self.ds_terms(current.index, half, chunk)
                target = self.place_in_d_bias(tile, self.index, current.head, current.block, chunk)
                plgpu.copy_smem_to_gmem(stage, target)
        if geometry.is_paired:
            transforms = tile_transforms(geometry.dtype)
            sync.exchange_with_peer(self.memory["ds"], transforms, self.barriers, 1 - self.rank, current.index)

    def ds_terms(self, step, half, chunk):
        """Lists the terms of the derivatives of a step's scores, in shared memory, for 64 keys and 64 queries."""
        stage = self.memory["ds"].at[lax.rem(step, jnp.int32(DS_STAGES))]
        return [stage.at[half, term, chunk] for term in range(self.geometry.n_terms)]

    def weights(self, step):
        """Lists the places of the terms of the weights of a step, in shared memory."""
        return self.ds_terms(step, 0, 0) if self.geometry.replaces_weights else [self.memory["p"]]

    def _step_done(self, consumer, step):
        """Returns the barrier at which a consumer arrives in a step; in a cluster those of both blocks arrive at one.

        Steps have two in turn, as a consumer may arrive twice before the other one waits.
        """
        stage = lax.rem(step, jnp.int32(DS_STAGES))
        return self.memory["step_done"].at[stage if self.geometry.is_paired else consumer * DS_STAGES + stage]

    def arrive(self, step) -> None:
        """Says that the consumer has shared its derivatives of a step, and has read those of the step before."""
        if self.geometry.config.separate_dq:
            return
        if self.geometry.is_paired:
            sync.warpgroup_barrier()  # one thread arrives for all
        plgpu.barrier_arrive(self._step_done(self.index, step))

    def await_other(self, current) -> None:
        """Waits until the other consumer has arrived in the step before; in a cluster, until all four have.

        The first step of a tile need not wait, as `_add_last` has waited. Consumers with dQ of their own never wait.
        """
        if not (current.is_first or self.geometry.config.separate_dq):
            plgpu.barrier_wait(self._step_done(1 - self.index, current.index - 1))

    def _add_last(self, tile, step, head, block) -> None:
        """Adds the consumer's part of dQ of the last step of a tile."""
        if not self.geometry.config.separate_dq:
            plgpu.barrier_wait(self._step_done(1 - self.index, step))
        if not self.makes_dq:
            return

        def multiply(dq_acc):
            self.multiply_derivatives(dq_acc, step)
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        dq = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.geometry.part_size), jnp.float32))
        self.add(tile, step, head, block, dq)

    def await_staged(self) -> None:
        """Waits until what was staged has left shared memory."""
        if self.geometry.is_deterministic:
            plgpu.barrier_wait(self.memory["sums_empty"])
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def stage_for_bias(self, tile, current, chunk, ds) -> None:
        """Adds derivatives of scores for 64 queries to that of the bias in global memory."""
        self.await_staged()
        self.memory["sums"].at[self.index].T[...] = wgmma.split_pairs(ds)
        plgpu.commit_smem()
        if self.geometry.is_deterministic:
            self.give_to_adder(current.index)
        else:
            self.add_to_bias(tile, self.index, current.head, current.block, chunk)

    def give_to_adder(self, step) -> None:
        """Gives what is staged to the warp that adds what belongs to a step, in the order of turns."""
        plgpu.barrier_arrive(self.memory["sums_full"].at[lax.rem(step, jnp.int32(ADDERS))])

    def add(self, tile, step, head, block, dq, *, is_empty=False) -> None:
        """Adds the consumer's part of dQ of a step to global memory, or gives it to the warps that do in the order of turns.

        `dq` is None if the consumer makes no part. `is_empty` says that what was staged before is known to have left.
        """
        geometry = self.geometry
        if dq is None:
            return
        width = geometry.part_size // geometry.config.pieces
        for piece in range(geometry.config.pieces):
            if piece or not is_empty:
                self.await_staged()
            self.memory["sums"][self.index] = dq[:, piece * width : (piece + 1) * width]
            plgpu.commit_smem()
            if geometry.is_deterministic:
                self.give_to_adder(step)
            else:
                self.add_to_dq(self.index, tile.b, head, block, piece)

    def _store(self, tile, kept_factor, *, dv=None, dk=None):
        """Stores those of dV and dK of 64 keys that the consumer has."""
        if self.geometry.has_single_heads:
            self._add_to_keys(tile, kept_factor, dv, dk)
        elif self.geometry.cut_heads:
            pl.when(tile.cut_number >= 0)(lambda: self._add_to_keys(tile, kept_factor, dv, dk))
            pl.when(tile.cut_number < 0)(lambda: self._store_whole(tile, kept_factor, dv, dk))
        else:
            self._store_whole(tile, kept_factor, dv, dk)

    def _store_whole(self, tile, kept_factor, dv, dk):
        """Stores dV and dK of all queries: in the dtype of keys of 16 bits, by way of shared memory, else in float32."""
        if "dk" not in self.refs or self.geometry.n_terms > 1:
            self._store_float32(tile, kept_factor, dv, dk)
            return
        results = {"dv": (kept_factor, dv), "dk": (self.geometry.scale, dk)}
        scaled = {name: factor * total for name, (factor, total) in results.items() if total is not None}
        if self.geometry.stages_results:
            self._store_staged(tile, **scaled)
        else:
            self._store_in_place(tile, **scaled)

    def _store_in_place(self, tile, **results):
        """Stores dV and dK in 16 bits by way of the place of values and keys."""
        geometry = self.geometry
        half = 0 if geometry.config.roles else self.index
        places = [(name, *place) for name in results for place in self._places_of_result(name, half)]
        _meet()  # both consumers have read keys and values
        for name, start, tiled, _ in places:
            tiled[...] = results[name][:, start : start + tiled.shape[1]].astype(geometry.dtype)
        plgpu.commit_smem()
        rows = pl.ds(tile.block * geometry.block_kv + half * ROWS, ROWS)
        for name, start, _, copied in places:
            columns = pl.ds(self._clipped(start, copied.shape[1], self.refs[name].shape[-1], tile), copied.shape[1])
            plgpu.copy_smem_to_gmem(copied, self.refs[name].at[tile.b, rows, tile.head, columns])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["kv_empty"])

    def _places_of_result(self, name, half) -> Iterator[tuple[int, Any, Any]]:
        """Yields first column, place in tiles, and the same place as TMA copies it, for dV in values and dK in keys."""
        geometry, letter = self.geometry, name[1]
        if geometry.in_slabs:
            for i, ((tiled,), copied) in enumerate(zip(self.slabs(letter, half), self.slabs(letter, half, 0), strict=True)):
                yield i * ROWS, tiled, copied[0]
        elif name == "dv":
            (v,) = self.terms("v", half)
            yield 0, v, v
        else:
            for part in range(geometry.parts[1]):
                if columns := geometry.columns_of_part(part):
                    (k,) = self.terms("k", half, part)
                    yield part * geometry.part_size, k.at[:, :columns], k

    def _clipped(self, start, width, size, tile):
        """Returns the first of some columns. If these go beyond `size`, where TMA clips them, tracing must not know it."""
        return start if start + width <= size else (start // width + hidden_zero(tile.block, 0)) * width

    def _store_staged(self, tile, **results):
        """Stores dV and dK in 16 bits by way of the place of dQ, in tiles of 64 columns."""
        plgpu.barrier_arrive(self.memory["kv_empty"])
        untiled, tiles = (view.at[self.index] for view in self.memory["results"])
        rows = pl.ds(self.first_key(tile, self.index), ROWS)
        pieces = [(name, column) for name, values in results.items() for column in range(0, values.shape[1], ROWS)]
        for first in range(0, len(pieces), tiles.shape[0]):
            self.await_staged()
            staged = list(enumerate(pieces[first : first + tiles.shape[0]]))
            for i, (name, column) in staged:
                tiles[i] = results[name][:, column : column + ROWS].astype(self.geometry.dtype)
            plgpu.commit_smem()
            for i, (name, column) in staged:
                start = self._clipped(column, ROWS, self.refs[name].shape[-1], tile)
                plgpu.copy_smem_to_gmem(untiled.at[i], self.refs[name].at[tile.b, rows, tile.head, pl.ds(start, ROWS)])

    def _add_to_keys(self, tile, kept_factor, dv, dk):
        """Adds dV and dK of a query head, or of a slice of a tile, to those of others, in float32.

        They go through the place of dQ piece by piece, so that the next keys and values may come meanwhile.
        """
        staged = self.memory["sums"].at[self.index]
        plgpu.barrier_arrive(self.memory["kv_empty"])
        first = self.first_key(tile, self.index)
        for entry, head, values in self._list_sums(tile, kept_factor, dv, dk):
            for start in range(0, values.shape[1], width := staged.shape[1]):
                self.await_staged()
                staged[...] = values[:, start : start + width]
                plgpu.commit_smem()
                target = self.refs["dk_dv"].at[entry, pl.ds(first, ROWS), head, pl.ds(start, width)]
                plgpu.copy_smem_to_gmem(staged, target, reduction_op="add")

    def _list_sums(self, tile, kept_factor, dv, dk):
        """Yields entry and head in `dk_dv`, and values, of each of dV and dK that the consumer has."""
        geometry = self.geometry
        entry, entries, head = tile.b, math.prod(geometry.batch), tile.head
        if geometry.cut_heads:
            entry, entries, head = lax.div(tile.cut_number, jnp.int32(geometry.tiles_of_head)), geometry.cut_heads, 0
        for at, values, factor in (entry + entries, dv, kept_factor), (entry, dk, geometry.scale):
            if values is not None:
                yield at, head, factor * values

    def _store_float32(self, tile, kept_factor, dv, dk):
        """Stores dV and dK in float32, from registers: to two arrays, or to one, dK first."""
        geometry, keys, refs = self.geometry, self.geometry.key[0], self.refs
        first = self.first_key(tile, self.index)
        entries = 0 if "dk" in refs else math.prod(geometry.batch)
        for name, entry, values, factor in ("dv", tile.b + entries, dv, kept_factor), ("dk", tile.b, dk, geometry.scale):
            if values is not None:
                start = entry * (keys + -keys % 8) + first, tile.head * geometry.size
                out = refs[name if "dk" in refs else "dk_dv"]
                wgmma.store_product(out, *start, (keys - first, values.shape[1]), factor * values)
        plgpu.barrier_arrive(self.memory["kv_empty"])


class HalfConsumer(BackwardConsumer):
    """A consumer that has 64 keys of a tile: it makes dK and dV for them, and half of dQ."""

    SUMS = ("dk", "dv")

    def step(self, scores, current, sums):
        memory = self.memory
        dk_acc, dv_acc = sums
        accumulator = plgpu.ACC(scores.shape, jnp.float32)
        ds = pl.run_scoped(functools.partial(self._derive, scores, current, dv_acc), accumulator, accumulator)
        self.await_other(current)
        self.share(self.index, ds, scores.tile, current)

        def multiply(dq_acc):
            of_dk = self.multiply_columns(dk_acc, ds, self.slabs("q", current.stage))
            others = self.multiply_derivatives(dq_acc, current.index - 1)
            plgpu.wgmma_wait(others + of_dk)
            plgpu.barrier_arrive(memory["do_empty"].at[current.stage_do])
            plgpu.wgmma_wait(others)
            plgpu.barrier_arrive(memory["q_empty"].at[current.stage])
            return None if dq_acc is None else plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        dq = self.with_dq(current, multiply)
        self.arrive(current.index)
        return dq

    def _derive(self, scores, current, dv_acc, s_acc, dp_acc):
        """Returns the derivatives of the scores, listed as terms, and starts dV += P' dO."""
        geometry, memory, do = self.geometry, self.memory, self.slabs("do", current.stage_do)
        plgpu.barrier_wait(memory["q_full"].at[current.stage])
        if geometry.is_seeded:
            s_acc[...] = self._seed("q_lse", current.stage, scores.shape)
        if geometry.seeds_delta:
            plgpu.barrier_wait(memory["do_full"].at[current.stage_do])
            plgpu.barrier_wait(memory["delta_full"].at[current.stage_do])
            dp_acc[...] = self._seed("do_delta", current.stage_do, scores.shape)
        self.multiply_keys(s_acc, self.index + hidden_zero(current.index, 0), current)
        if not geometry.seeds_delta:
            plgpu.barrier_wait(memory["do_full"].at[current.stage_do])
        others = self.multiply_slabs(dp_acc, self.slabs("v", self.index + hidden_zero(current.index, 1)), do)
        loaded = scores.load(current)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=others)
        lse = None if geometry.is_seeded else plgpu.load(self.line("q_lse", current.stage))
        p, slope, change = scores.weights(s, lse, loaded, current)
        kept = scores.kept(current)
        rounded = self.rounded(where_kept(kept, p))
        if geometry.score_mod is not None and geometry.bias_gradient is BiasGradient.NONE and not geometry.tables:
            # Nothing needs weights and slopes apart, which take twice the registers.
            p, slope = scores.times_slope(p, p, slope), None
        p, rounded = lax.optimization_barrier((p, rounded))
        others = self.multiply_columns(dv_acc, rounded, do)
        self.free_bias()
        # Always true. With a branch between the weights and the other product ptxas does not compute them after it.
        if geometry.is_empty_early and not current.is_first:
            pl.when(current.index > 0)(self.await_staged)
        delta = None if geometry.seeds_delta else self._delta(current)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=others)
        return self.rounded(scores.derivatives(p, slope, change, dp, delta, kept, current))

    def _seed(self, name, stage, shape):
        """Loads what a sum of products starts with, from a line in shared memory."""
        line = self.line(name, stage)
        return wgmma.load_along_rows(line, shape) if self.geometry.seeds_from_memory else along_rows(plgpu.load(line), shape)

    def _delta(self, current):
        """Loads the deltas of a block of queries, once they are there."""
        plgpu.barrier_wait(self.memory["delta_full"].at[current.stage_do])
        return plgpu.load(self.line("do_delta", current.stage_do))


class WeightsConsumer(BackwardConsumer):
    """The first of two consumers that share 64 keys: it makes weights and dV, and half of dQ."""

    SUMS = ("dv",)

    def step(self, scores, current, sums):
        memory, (dv_acc,) = self.memory, sums
        p, kept = pl.run_scoped(functools.partial(self._weigh, scores, current), plgpu.ACC(scores.shape, jnp.float32))
        for place, term in zip(self.weights(current.index), p, strict=True):
            place[...] = term
        sync.named_barrier_arrive(jnp.int32(_WEIGHTS))
        plgpu.barrier_arrive(memory["q_empty"].at[current.stage])
        self.free_bias()
        if self.geometry.adds_bias_in_turns:  # the other consumer has staged derivatives for the bias
            self.await_staged()
            self.give_to_adder(current.index)
        plgpu.barrier_wait(memory["do_full"].at[current.stage_do])
        if not self.geometry.replaces_weights:  # or it has waited, before it wrote weights
            self.await_other(current)

        def multiply(dq_acc):
            self.multiply(dv_acc, kept, self.terms("do", current.stage_do))
            others = self.multiply_derivatives(dq_acc, current.index - 1)
            plgpu.wgmma_wait(others)
            plgpu.barrier_arrive(memory["do_empty"].at[current.stage_do])
            return None if dq_acc is None else plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        dq = self.with_dq(current, multiply)
        self.arrive(current.index)
        return dq

    def _weigh(self, scores, current, s_acc):
        """Returns the weights times the derivative of scores by products, and those that dropout keeps, as lists of terms."""
        geometry, memory = self.geometry, self.memory
        plgpu.barrier_wait(memory["q_full"].at[current.stage])
        self.multiply_keys(s_acc, hidden_zero(current.index, 0), current)
        lse = plgpu.load(self.line("q_lse", current.stage))
        loaded = scores.load(current)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
        p, slope, _ = scores.weights(s, lse, loaded, current)
        kept = self.rounded(where_kept(scores.kept(current), p))
        if geometry.replaces_weights:
            self.await_other(current)  # derivatives of the step before the last one have been read
        else:  # weights of the step before have been read
            pl.when(current.index > 0)(lambda: sync.named_barrier_sync(jnp.int32(_WEIGHTS_READ)))
        if geometry.passes_both:
            memory["p_of_bias"][...] = p.astype(geometry.dtype)
        return self.rounded(scores.times_slope(p, p, slope)), kept


class DerivativesConsumer(BackwardConsumer):
    """The second of two consumers that share 64 keys: it makes derivatives and dK, and half of dQ.

    Weights reach it through shared memory, rounded, or as two terms.
    """

    SUMS = ("dk",)
    WEIGHS = False

    def step(self, scores, current, sums):
        geometry, memory, (dk_acc,) = self.geometry, self.memory, sums
        dp = pl.run_scoped(functools.partial(self._multiply_values, scores, current), plgpu.ACC(scores.shape, jnp.float32))
        sync.named_barrier_sync(jnp.int32(_WEIGHTS))
        if geometry.passes_both:
            p = plgpu.load(memory["p_of_bias"], layout=LAYOUT)
            scores.add_to_bias(p.astype(jnp.float32) * dp, current)
        weights = [plgpu.load(term, layout=LAYOUT).astype(jnp.float32) for term in self.weights(current.index)]
        ds = functools.reduce(operator.add, weights) * dp
        if not geometry.passes_both:
            scores.add_to_bias(ds, current)
        ds = lax.optimization_barrier(self.rounded(ds))  # weights have been read
        if not geometry.replaces_weights:
            sync.named_barrier_arrive(jnp.int32(_WEIGHTS_READ))
        self.await_other(current)
        self.share(0, ds, scores.tile, current)
        plgpu.barrier_arrive(memory["do_empty"].at[current.stage_do])  # the stores needed delta

        def multiply(dq_acc):
            self.multiply_derivatives(dq_acc, current.index - 1)
            plgpu.barrier_wait(memory["q_full"].at[current.stage])
            others = self.multiply(dk_acc, ds, self.terms("q", current.stage))
            return None if dq_acc is None else plgpu.wgmma_accumulator_load(dq_acc, wait_n=others)

        dq = self.with_dq(current, multiply)
        self.arrive(current.index)
        return dq

    def end_step(self, current):
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(self.memory["q_empty"].at[current.stage])

    def _multiply_values(self, scores, current, dp_acc):
        """Returns the derivatives of the weights less delta: dP' = V dO'."""
        memory = self.memory
        plgpu.barrier_wait(memory["do_full"].at[current.stage_do])
        cotangents = [term.T for term in self.terms("do", current.stage_do)]
        self.multiply(dp_acc, self.terms("v", hidden_zero(current.index, 1)), cotangents)
        plgpu.barrier_wait(memory["delta_full"].at[current.stage_do])
        delta = plgpu.load(self.line("do_delta", current.stage_do))
        kept = scores.kept(current)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        return scores.less_delta(dp, delta, kept)


def where_kept(kept, array):
    """Returns an array with 0 where dropout keeps nothing; `kept` is None if it keeps all."""
    return array if kept is None else jnp.where(kept, array, 0.0)


def along_rows(line, shape):
    """Returns a value for each column, in all rows."""
    return lax.broadcast_in_dim(line, shape, (1,))


def times(factor, array):
    """Multiplies an array by a number that is known while tracing, in no instruction for 1."""
    return array if factor == 1 else array * factor
