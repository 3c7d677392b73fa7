"""The tangent kernel's warpgroups: those of the forward kernel, with slots for tangents and other products.

    consumer, for its 64 rows
    S = Q K', tS = Q tK' + tQ K'; weights P = exp(S - lse) and W = P tS, and their sums
    for each key block before it:
        S, tS; tO += [W P] [V; tV] of the one behind; weights, while that product runs
    tO += [W P] [V; tV]; store tO - sum(W) out, and sum(W)

Products that only absent tangents would need are left out.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.common import LAYOUT, LOG2E, ROWS, hidden_zero
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import (
    ForwardConsumer,
    ForwardPipeline,
    ForwardScores,
    ForwardSlots,
    TmaCopies,
)
from jaxsoftmax.ops.attention.mosaic_sm90.tangent_plan import TangentGeometry


@dataclass(frozen=True)
class TangentSlots(ForwardSlots):
    """Slots of queries, keys and values, which hold their tangents too, and of the output."""

    geometry: TangentGeometry

    @property
    def value_stages(self) -> int:
        return self.geometry.config.value_stages

    def slot_of(self, source, slot):
        """Returns the slot of an operand or of its tangent, from the stage, or the consumer, that it is for."""
        config = self.geometry.config
        return slot + {"d_query": config.consumers, "d_key": config.stages}.get(source, 0)

    def load_queries(self, consumer) -> list[Any]:
        """Loads the slabs of columns of the queries; none if products take them from shared memory."""
        if not self.geometry.config.has_queries_in_registers:
            return []
        queries = [plgpu.load(slab, layout=LAYOUT) for slab in self.slabs("q", consumer)]
        plgpu.commit_smem()  # the first products need these loads; the fence orders them before the next tile's copy
        return queries

    def multiply_scores(self, queries, consumer, step, s_acc, t_acc=None) -> None:
        """Starts S += Q K' and tS += Q tK' + tQ K'. Keys and tangents of the step are there."""
        names, stage = self.geometry.names, self.stage(step)
        consumer = consumer + hidden_zero(step, 2)  # the addresses of queries would stay in registers
        keys = self.slabs("k", stage)
        queries = queries or self.slabs("q", consumer)
        products = [(s_acc, queries, keys)]
        if "d_key" in names:
            products.append((t_acc, queries, self.slabs("k", self.slot_of("d_key", stage))))
        if "d_query" in names:
            products.append((t_acc, self.slabs("q", self.slot_of("d_query", consumer)), keys))
        for acc, left, right in products:
            for q, k in self.pairs(left, right):
                plgpu.wgmma(acc, q, k.T)


@dataclass(frozen=True)
class TangentCopies(TmaCopies):
    """Copies queries, keys and values, and their tangents, to their slots by TMA, once these are empty."""

    geometry: TangentGeometry
    slots: TangentSlots

    def slot(self, name, step):
        config = self.geometry.config
        return lax.rem(step, jnp.int32(config.stages if name == "key" else config.value_stages))

    def copy(self, name, slot, tile, first, rows, head, looked_up=()):
        del looked_up
        letter, memory, slots = self.letter(name), self.slots.memory, self.slots
        full = memory[f"{letter}_full"].at[slot]
        plgpu.barrier_wait(memory[f"{letter}_empty"].at[slot])
        for place, source in enumerate(self.geometry.sources(name)):
            operand = self.operands[source]
            array = operand.ref.at[operand.index(tile.b)]

            def copy_slab(columns, slab, array=array, place=place):
                slab = slab.at[pl.ds(place * rows, rows)] if name == "value" else slab
                plgpu.copy_gmem_to_smem(array.at[pl.ds(first, rows), head, columns], slab, full)

            slots.copy_slabs(letter, slots.slot_of(source, slot), range(slots.geometry.count_slabs(letter)), copy_slab)


class TangentScores(ForwardScores):
    """Weights and their products with the tangents of scores, for the rows of a tile that a consumer has."""

    geometry: TangentGeometry

    def __init__(self, geometry, operands, tile, first, load_segments):
        super().__init__(geometry, operands, tile, first, load_segments)
        self.rows_left = geometry.query[0] - first
        self.find_lse()

    def find_lse(self) -> None:
        """Loads the log-sum-exp of the rows in the units of `weigh`."""
        lse = self.load_lse()
        # A row that sees no key has scores of -inf, whose weights are 0 then.
        self.lse = jnp.where(lse == -jnp.inf, 0.0, lse) * (1.0 if "bias" in self.operands else LOG2E)

    def load_lse(self):
        """Loads the log-sum-exp of the rows."""
        lse, tile, (length, heads, _) = self.operands["lse"], self.tile, self.geometry.query
        start = (lse.index(tile.b) * heads + tile.head) * length + self.first
        return wgmma.load_product_rows(lse.ref, start, self.rows_left, self.shape)

    def weigh(self, s, t, mask, block, *, banded):
        """Returns the weights of a key block, and their products with the tangents of scores or None if there are none.

        NaN or infinity in tangents of keys that are not seen shows, as they are multiplied by weights of 0.

        Args:
          s: the products of queries and keys.
          t: the sum of the products with tangents, or None.
          mask: what `packed` returns for the key block.
          block: number of the key block.
          banded: see `ForwardScores.masked`.
        """
        slope = None
        if self.geometry.soft_cap is not None:
            s = self.bent(s)
            slope = 1 - s * s
        s, lse = self.hidden(s, mask, block, banded=banded), lax.broadcast_in_dim(self.lse, self.shape, (0,))
        # Scores with a bias may be as large as `finfo.min`: a product with them would overflow.
        p = jnp.exp2((s - lse) * LOG2E if "bias" in self.operands else s * (self.factor * LOG2E) - lse)
        if not self.geometry.moves_scores:
            return p, None
        if t is not None:
            t = t * self.geometry.scale if slope is None else t * self.geometry.scale * slope
        if "d_bias" in self.operands:
            d_bias = self._tile_of("d_bias", block, wgmma.load_product).astype(jnp.float32)
            t = d_bias if t is None else t + d_bias
        return p, p * t


@dataclass(frozen=True)
class TangentConsumer(ForwardConsumer):
    """A consumer warpgroup, which computes the tangents of 64 rows of each tile."""

    geometry: TangentGeometry
    slots: TangentSlots

    def _scores(self, tile, first, load_segments):
        return TangentScores(self.geometry, self.operands, tile, first, load_segments)

    def _pipeline(self, *args):
        return TangentPipeline(self, *args)


@dataclass(frozen=True)
class TangentPipeline(ForwardPipeline):
    """The pipeline of a consumer for its rows of a tile. Attributes are those of `ForwardPipeline`."""

    consumer: TangentConsumer
    scores: TangentScores

    def attend(self, o_acc) -> None:
        """Adds the key blocks to the tangents of the rows, one after the other, and stores them."""
        consumer, scores, slots = self.consumer, self.scores, self.consumer.slots
        memory, geometry = slots.memory, consumer.geometry

        # The first key block.
        plgpu.barrier_wait(memory["q_full"].at[consumer.index])
        queries = slots.load_queries(consumer.index)
        products, masks = self._with_accumulators(functools.partial(self._multiply_first_scores, queries))
        consumer.leave_keys(self.start)
        mask, following = (scores.packed(mask) for mask in masks)
        weights, sums = self._weigh(products, mask, self.start, banded=True)
        weights = self._rounded(weights)
        pl.when(self.start + 1 < self.end)(lambda: consumer.wait_for_keys(self.start + 1))

        # The other key blocks.
        is_banded = scores.is_banded and not geometry.hides_in_first_block_alone
        whole = consumer.tiles.seen_whole(self.tile, self.first, ROWS) if is_banded else None
        step = functools.partial(self._add_block, whole, o_acc, queries)
        weights, sums, _ = lax.fori_loop(self.start + 1, self.end, step, (weights, sums, following))

        # The last product, and what the rows have in common.
        if geometry.config.own_output:
            plgpu.barrier_arrive(memory["q_empty"].at[consumer.index])
        last = self.end - 1
        slots.multiply_values(o_acc, weights, last)
        out = self._load_out() if "out" in consumer.operands else None
        o = o_acc[...]
        plgpu.barrier_arrive(memory["v_empty"].at[slots.value_stage(last)])
        self._store_tangents(o, out, sums)

    def _with_accumulators(self, multiply):
        """Returns `multiply(s_acc)`, or `multiply(s_acc, t_acc)` if the tangent of the scores has products."""
        count = 1 + self.consumer.geometry.multiplies_tangents
        return pl.run_scoped(multiply, *[plgpu.ACC(self.scores.shape, jnp.float32)] * count)

    def _multiply_first_scores(self, queries, *accumulators):
        """Returns the products of the first key block, and the masks of the first two."""
        consumer = self.consumer
        consumer.wait_for_keys(self.start)
        consumer.take_tensor_cores()
        consumer.slots.multiply_scores(queries, consumer.index, self.start, *accumulators)
        consumer.pass_tensor_cores()
        masks = [self.scores.load_mask(self.top - step, step < self.end) for step in (self.start, self.start + 1)]
        return [plgpu.wgmma_accumulator_load(acc, wait_n=0) for acc in accumulators], masks

    def _add_block(self, whole, o_acc, queries, step, carry):
        """Adds the values of the key block before, while the scores of a step's key block become weights.

        `whole` is that of `ForwardPipeline._step`.
        """
        weights, sums, mask = carry
        consumer, scores, slots = self.consumer, self.scores, self.consumer.slots
        geometry, block = consumer.geometry, self.top - step
        banded = False if whole is None else (block < whole[0]) | (block >= whole[1])

        def multiply(*accumulators):
            consumer.take_tensor_cores()
            slots.multiply_scores(queries, consumer.index, step, *accumulators)
            slots.multiply_values(o_acc, weights, step - 1)
            consumer.pass_tensor_cores()
            following = scores.load_mask(block - 1, step + 1 < self.end)
            return [plgpu.wgmma_accumulator_load(acc, wait_n=geometry.n_products) for acc in accumulators], following

        products, following = self._with_accumulators(multiply)
        consumer.leave_keys(step)
        weights, sums = lax.optimization_barrier(self._weigh(products, mask, step, banded=banded, sums=sums))
        # A branch between the weights and the wait: without one ptxas computes them after it, and nothing overlaps.
        pl.when(step + 1 < self.end)(lambda: consumer.wait_for_keys(step + 1))
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(slots.memory["v_empty"].at[slots.value_stage(step - 1)])
        return self._rounded(weights), sums, scores.packed(following)

    def _weigh(self, products, mask, step, *, banded, sums=None):
        """Returns what a step's values, and their tangents, are multiplied by, and the sums of the rows with the step.

        Args:
          products: the scores, and their tangents if these have products.
          mask: what `packed` returns for the key block.
          step: number of the step.
          banded: see `ForwardScores.masked`.
          sums: sums of the steps before, a part in each thread of a row, or None.
        """
        block, names = self.top - step, self.consumer.geometry.names
        p, w = self.scores.weigh(products[0], products[1] if len(products) > 1 else None, mask, block, banded=banded)
        if w is not None:
            total = wgmma.sum_in_threads(w)
            sums = total if sums is None else sums + total
        keeps = self.scores.keeps(block)
        used: list[Any] = [w] if "d_value" not in names else [p] if w is None else [w, p]
        return [x if keeps is None else jnp.where(keeps, x, 0.0) for x in used], sums

    def _rounded(self, weights):
        """Returns the left operand of the product with values and their tangents.

        It takes the registers of the one before, whose product is done: else all products would wait for each other.
        """
        return functools.reduce(wgmma.join_columns, map(self.consumer.slots.rounded, weights))

    def _load_out(self):
        """Loads the output of the rows."""
        operand, tile, scores, geometry = self.consumer.operands["out"], self.tile, self.scores, self.consumer.geometry
        size = geometry.value_size
        place = operand.index(tile.b) * geometry.query[0] + self.first, tile.head * size
        shape = (ROWS, geometry.sizes[1])
        return wgmma.load_product(operand.ref, *place, (scores.rows_left, size), shape, varies=(True, True))

    def _store_tangents(self, o, out, sums):
        """Stores the tangents of the output and of the log-sum-exp: 0 for rows that see no key and no sink."""
        consumer, scores, geometry = self.consumer, self.scores, self.consumer.geometry
        is_empty = scores.load_lse() == -jnp.inf  # again: it needs no registers in the loop
        total = None if sums is None else wgmma.sum_over_threads(sums)
        if "start" in consumer.operands:
            row, ref = consumer.row(self.tile, self.first), consumer.operands["start"].ref
            start = wgmma.load_product_rows(ref, row, scores.rows_left, scores.shape)
            total = start if total is None else total + start
        if geometry.dropout_rate:
            o = o * (1 / (1 - geometry.dropout_rate))
        if total is not None:
            o = o - lax.broadcast_in_dim(total, o.shape, (0,)) * out.astype(jnp.float32)
            consumer.store_rows(self.tile, self.first, lse=jnp.where(is_empty, 0.0, total))
        self._copy_out(jnp.where(lax.broadcast_in_dim(is_empty, o.shape, (0,)), 0.0, o))
        self._leave_queries()
