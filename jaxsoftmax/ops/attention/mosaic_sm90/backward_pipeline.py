"""The backward kernel's warpgroups: a producer copies blocks of queries, consumers keep the sums of their keys' derivatives.

    consumer with 64 keys of its own              consumers that share 64 keys (head size 256)
                                                  of the weights                of the derivatives
    S' = K Q'; P'                                 S' = K Q'; P'                 dP' = V dO'
    dP' = V dO'                                   P' to shared memory
    dV += P' dO                                   dV += P' dO                   dS' = P' (dP' - delta)
    dS' = P' (dP' - delta)
    dS' to shared memory, and meet the other      meet the other                dS' to shared memory, and meet the other
    its part of dQ = dS K; dK += dS' Q            its part of dQ = dS K         its part of dQ = dS K; dK += dS' Q
    add it to dQ in global memory                 add it to dQ                  add it to dQ

The steps of all tiles are counted through: step `i` uses stage `i % stages`. A barrier is full when copies have landed, and
empty when all have read them.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import sync, tickets, wgmma
from jaxsoftmax.ops.attention.mosaic_sm90.backward_plan import ADDERS, CONSUMERS, SLOTS, BackwardKernel
from jaxsoftmax.ops.attention.mosaic_sm90.backward_scores import BackwardScores, along_rows, where_kept
from jaxsoftmax.ops.attention.mosaic_sm90.operands import KERNEL, ROWS, GlobalOperand
from jaxsoftmax.ops.attention.mosaic_sm90.scores import LAYOUT

# Named barriers. Mosaic GPU uses those before: a test holds it to that.
_BOTH = 8  # at which both consumers meet
_WEIGHTS = 9  # by which one consumer tells the other that weights are in shared memory

# Waits for the other consumer. What both wrote to shared memory is then visible to wgmma.
_meet = sync.meeting(_BOTH, CONSUMERS)


@dataclass(frozen=True)
class BackwardTile:
    """A tile of the backward kernel, as its warpgroups know it.

    Attributes:
      b: index of the batch entry.
      head: index of the key head.
      block: number of the block of keys.
      low: first block of queries that the tile visits.
      count: number of blocks of queries of each query head.
      whole_from: first of the blocks whose queries see all keys.
      whole_to: the one behind the last of those.
      lengths: numbers of queries and keys of the batch entry.
      offset: position of query 0.
    """

    b: Any
    head: Any
    block: Any
    low: Any
    count: Any
    whole_from: Any
    whole_to: Any
    lengths: tuple[Any, Any]
    offset: Any


@dataclass(frozen=True)
class BackwardStep:
    """A step of a tile: one block of queries of one head.

    Attributes:
      head: index of the query head.
      block: number of the block of queries.
      banded: False, or an array that says whether some query does not see some key.
      index: number of the step among those of all tiles.
      stage: stage of the queries.
      stage_do: stage of the output cotangents.
    """

    head: Any
    block: Any
    banded: Any
    index: Any
    stage: Any
    stage_do: Any


@dataclass(frozen=True)
class BackwardRole:
    """Knowledge and addresses that all roles of warpgroups and warps of the backward kernel share.

    Attributes:
      kernel: how the kernel runs.
      refs: operands and results in global memory, by name.
      operands: records of the optional operands, by name.
      memory: arrays and barriers in shared memory, by name.
    """

    kernel: BackwardKernel
    refs: dict[str, Any]
    operands: dict[str, GlobalOperand]
    memory: dict[str, Any]

    def tile(self, number) -> BackwardTile:
        """Returns a tile."""
        kernel, operands = self.kernel, self.operands
        blocks, heads = jnp.int32(kernel.blocks_kv), jnp.int32(kernel.key[1])
        pair, block = lax.div(number, blocks), lax.rem(number, blocks)
        b, head = lax.div(pair, heads), lax.rem(pair, heads)
        lengths = []
        for name, size in zip(("query_lengths", "key_lengths"), kernel.lengths, strict=True):
            lengths.append(jnp.clip(operands[name][b], 0, size) if name in operands else size)
        if "spans" in operands:
            low, high, whole_from, whole_to = (operands["spans"][b, block, i] for i in range(4))
        else:
            low, high, whole_from, whole_to = kernel.span(block, kernel.lengths, KERNEL)
            low += _hidden_zero(number, 0)  # ptxas makes slower loops of constant bounds
            high = jnp.maximum(low, high + _hidden_zero(number, 1))
            whole_from = jnp.clip(whole_from, low, high)
            whole_to = jnp.clip(whole_to, whole_from, high)
        offset = operands["query_offset"][b] if "query_offset" in operands else 0
        return BackwardTile(b, head, block, low, high - low, whole_from, whole_to, (lengths[0], lengths[1]), offset)

    def head_and_block(self, tile, i):
        """Returns the query head and the block of queries of step `i` of a tile.

        Queries pass from the last block to the first. So blocks of keys which start together are each a step behind the one
        before, also where attention is causal.
        """
        head = tile.head * self.kernel.groups + lax.div(jnp.int32(i), tile.count)
        return head, tile.low + tile.count - 1 - lax.rem(jnp.int32(i), tile.count)

    def stages(self, step):
        """Returns the stages of queries and of output cotangents of a step."""
        return tuple([lax.rem(step, jnp.int32(count)) for count in self.kernel.config.stages])

    def line(self, name, stage):
        """Returns the log-sum-exp or the delta of a block of queries, in shared memory."""
        if name in self.memory:
            return self.memory[name].at[stage]
        return self.memory["lines"].at[stage if name == "q_lse" else self.kernel.config.stages[0] + stage]

    def part_of_dq(self, consumer):
        """Returns which 64 rows and which part of the columns of a block of dQ a consumer makes."""
        return [consumer if count > 1 else 0 for count in self.kernel.parts]

    def add_to_dq(self, consumer, b, head, block, piece) -> None:
        """Starts to add what a consumer staged, a piece of its part of dQ, to global memory."""
        staged, (slab, part) = self.memory["sums"].at[consumer], self.part_of_dq(consumer)
        width = staged.shape[1]
        rows = pl.ds(block * self.kernel.config.block_q + slab * ROWS, ROWS)
        columns = pl.ds(part * self.kernel.part_size + piece * width, width)
        plgpu.copy_smem_to_gmem(staged, self.refs["dq"].at[b, rows, head, columns], reduction_op="add")


@dataclass(frozen=True)
class BackwardProducer(BackwardRole):
    """The producer warpgroup: copies keys and values of tiles, and their queries and output cotangents block by block."""

    def __call__(self, tile, steps):
        """Copies what a tile needs; returns the number of steps so far."""
        first, total = tile.block * self.kernel.block_kv, self.kernel.groups * tile.count
        pl.when(total > 0)(lambda: self._copy_queries(tile, steps, 0))
        self._copy_keys_and_values(tile, first)
        pl.when(total > 0)(lambda: self._copy_cotangents(tile, steps, 0))

        @pl.loop(1, total)
        def _(i):
            self._copy_queries(tile, steps, i)
            self._copy_cotangents(tile, steps, i)

        return steps + total

    def _copy_keys_and_values(self, tile, first):
        """Copies keys and values of a tile, from key `first` on."""
        refs, memory, kernel = self.refs, self.memory, self.kernel
        halves, width = memory["k"].shape[0], kernel.part_size
        plgpu.barrier_wait(memory["kv_empty"])
        for half in range(halves):
            rows = pl.ds(first + half * ROWS, ROWS)
            for part in range(kernel.parts[1]):
                source = refs["key"].at[tile.b, rows, tile.head, pl.ds(part * width, width)]
                plgpu.copy_gmem_to_smem(source, memory["k"].at[half, part], memory["k_full"])
        for half in range(halves):
            source = refs["value"].at[tile.b, pl.ds(first + half * ROWS, ROWS), tile.head]
            plgpu.copy_gmem_to_smem(source, memory["v"].at[half], memory["v_full"])

    def _copy_queries(self, tile, steps, i):
        """Copies queries and log-sum-exp of step `i` of a tile."""
        refs, memory, size = self.refs, self.memory, self.kernel.config.block_q
        head, block = self.head_and_block(tile, i)
        rows, (stage, _) = pl.ds(block * size, size), self.stages(steps + i)
        full = memory["q_full"].at[stage]
        plgpu.barrier_wait(memory["q_empty"].at[stage])
        plgpu.copy_gmem_to_smem(refs["query"].at[tile.b, rows, head], memory["q"].at[stage], full)
        plgpu.copy_gmem_to_smem(refs["lse"].at[tile.b, head, rows], self.line("q_lse", stage), full)

    def _copy_cotangents(self, tile, steps, i):
        """Copies output cotangents and delta of step `i` of a tile."""
        refs, memory, size = self.refs, self.memory, self.kernel.config.block_q
        head, block = self.head_and_block(tile, i)
        rows, (_, stage) = pl.ds(block * size, size), self.stages(steps + i)
        plgpu.barrier_wait(memory["do_empty"].at[stage])
        plgpu.copy_gmem_to_smem(refs["d_out"].at[tile.b, rows, head], memory["do"].at[stage], memory["do_full"].at[stage])
        line, full = self.line("do_delta", stage), memory["delta_full"].at[stage]
        plgpu.copy_gmem_to_smem(refs["delta"].at[tile.b, head, rows], line, full)


@dataclass(frozen=True)
class BackwardConsumer(BackwardRole):
    """A consumer warpgroup. Its kinds have a `step` each, which adds a block of queries to their sums.

    Attributes:
      index: its number.
    """

    index: Any

    # Names of the sums.
    SUMS = ()

    def start(self) -> None:
        """Says that all of shared memory is empty."""
        plgpu.barrier_arrive(self.memory["kv_empty"])
        for name, stages in zip(("q_empty", "do_empty"), self.kernel.config.stages, strict=True):
            for stage in range(stages):
                plgpu.barrier_arrive(self.memory[name].at[stage])

    def scores(self, tile) -> BackwardScores:
        """Returns the scores of its keys."""
        raise NotImplementedError

    def step(self, tile, scores, at, sums) -> None:
        """Adds a block of queries to the sums, and the part of dQ that the consumer makes to dQ."""
        raise NotImplementedError

    def __call__(self, tile, steps):
        """Computes and stores the sums of a tile; returns the number of steps so far."""
        kernel, scores = self.kernel, self.scores(tile)

        def visit_head(sums, end, i, _):
            head = tile.head * kernel.groups + i
            last = steps + (i + 1) * tile.count - 1

            def visit(i, _):
                block = end - 1 - i
                # A branch in the step, where queries are to be masked. The first call of a gradient took 8.8 s with a loop for
                # each kind of step, and 4.3 s with one loop (head size 128, causal). The kernel takes 1.003 of the time of
                # several loops at head size 64, 0.98 to 1.013 at 128, 1.009 at 256 (causal, 512 to 16384 tokens, on an H200),
                # and 1.017 with segments.
                banded = scores.is_banded and (block < tile.whole_from) | (block >= tile.whole_to)
                index = last - (block - tile.low)
                self.step(tile, scores, BackwardStep(head, block, banded, index, *self.stages(index)), sums)

            lax.fori_loop(0, tile.count, visit, None)

        def add_up(*sums):
            each = functools.partial(visit_head, sums, tile.low + tile.count)
            if kernel.groups == 1:
                each(0, None)
            else:
                lax.fori_loop(0, kernel.groups, each, None)
            total = kernel.groups * tile.count
            self._store(tile, scores.kept_factor, **{name: acc[...] for name, acc in zip(self.SUMS, sums, strict=True)})
            return total

        plgpu.barrier_wait(self.memory["k_full"])
        plgpu.barrier_wait(self.memory["v_full"])
        return steps + pl.run_scoped(add_up, *(plgpu.ACC((ROWS, kernel.size), jnp.float32) for _ in self.SUMS))

    def multiply_keys(self, s_acc, half, at) -> None:
        """Starts S' += K Q'."""
        width, q = self.kernel.part_size, self.memory["q"].at[at.stage]
        for part in range(self.kernel.parts[1]):
            plgpu.wgmma(s_acc, self.memory["k"].at[half, part], q.at[:, part * width : (part + 1) * width].T)

    def multiply_derivatives(self, dq_acc, slot, at) -> None:
        """Starts the consumer's part of dQ = dS K, from the derivatives that both consumers have shared."""
        slab, part = self.part_of_dq(self.index)
        for half in range(self.kernel.block_kv // ROWS):
            plgpu.wgmma(dq_acc, slot.at[half, slab].T, self.memory["k"].at[half + _hidden_zero(at.index, 2), part])

    def share(self, slot, half, ds) -> None:
        """Stores the derivatives of scores for both consumers, and meets the other one.

        A slot is written again two steps later: after the next meeting, before which both have waited for their wgmma.
        """
        for slab in range(self.kernel.config.block_q // ROWS):
            slot[half, slab] = ds[:, slab * ROWS : (slab + 1) * ROWS]
        _meet()

    def slot(self, at):
        """Returns the slot of the derivatives of a step's scores."""
        return self.memory["ds"].at[lax.rem(at.index, jnp.int32(SLOTS))]

    def await_staged(self) -> None:
        """Waits until what was staged has left shared memory."""
        if self.kernel.is_deterministic:
            plgpu.barrier_wait(self.memory["sums_empty"])
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def add(self, tile, at, multiply, *, is_empty=False) -> None:
        """Adds the consumer's part of dQ to global memory, or gives it to the warps that do in the order of turns.

        `multiply(acc)` returns that part. `is_empty` says that what was staged before is known to have left.
        """
        kernel = self.kernel
        dq = pl.run_scoped(multiply, plgpu.ACC((ROWS, kernel.part_size), jnp.float32))
        width = kernel.part_size // kernel.config.pieces
        for piece in range(kernel.config.pieces):
            if piece or not is_empty:
                self.await_staged()
            self.memory["sums"][self.index] = dq[:, piece * width : (piece + 1) * width]
            plgpu.commit_smem()
            if kernel.is_deterministic:
                plgpu.barrier_arrive(self.memory["sums_full"].at[lax.rem(at.index, jnp.int32(ADDERS))])
            else:
                self.add_to_dq(self.index, tile.b, at.head, at.block, piece)

    def _store(self, tile, kept_factor, *, dv=None, dk=None):
        """Stores those of dV and dK of 64 keys that the consumer has."""
        if "dk_dv" in self.refs:
            self._store_parts(tile, kept_factor, dv, dk)
            return
        kernel, memory, dtype, width = self.kernel, self.memory, self.kernel.dtype, self.kernel.part_size
        half = 0 if kernel.config.roles else self.index
        _meet()  # both consumers have read keys and values, in whose place the results go
        if dv is not None:
            memory["v"][half] = (kept_factor * dv).astype(dtype)
        if dk is not None:
            for part in range(kernel.parts[1]):
                memory["k"][half, part] = (kernel.scale * dk[:, part * width : (part + 1) * width]).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(tile.block * kernel.block_kv + half * ROWS, ROWS)
        if dv is not None:
            plgpu.copy_smem_to_gmem(memory["v"].at[half], self.refs["dv"].at[tile.b, rows, tile.head])
        if dk is not None:
            for part in range(kernel.parts[1]):
                target = self.refs["dk"].at[tile.b, rows, tile.head, pl.ds(part * width, width)]
                plgpu.copy_smem_to_gmem(memory["k"].at[half, part], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(memory["kv_empty"])

    def _store_parts(self, tile, kept_factor, dv, dk):
        """Stores dV and dK in float32, from registers."""
        kernel, keys, out = self.kernel, self.kernel.key[0], self.refs["dk_dv"]
        first = tile.block * kernel.block_kv + (0 if kernel.config.roles else self.index) * ROWS
        for entry, values in (
            (tile.b + math.prod(kernel.batch), None if dv is None else kept_factor * dv),
            (tile.b, None if dk is None else kernel.scale * dk),
        ):
            if values is not None:
                start = entry * (keys + -keys % 8) + first, tile.head * kernel.size
                wgmma.store_product(out, *start, (keys - first, kernel.size), values)
        plgpu.barrier_arrive(self.memory["kv_empty"])


class HalfConsumer(BackwardConsumer):
    """A consumer that has 64 keys of a tile: it makes dK and dV for them, and half of dQ."""

    SUMS = ("dk", "dv")

    def scores(self, tile):
        return BackwardScores(self, tile, tile.block * self.kernel.block_kv + self.index * ROWS)

    def step(self, tile, scores, at, sums):
        kernel, memory, keys_first = self.kernel, self.memory, self.kernel.config.keys_first
        dk_acc, dv_acc = sums
        accumulator = plgpu.ACC(scores.shape, jnp.float32)
        ds = pl.run_scoped(functools.partial(self._derive, scores, at, dv_acc), accumulator, accumulator)
        q, slot = memory["q"].at[at.stage], self.slot(at)

        def multiply(dq_acc):
            if keys_first:
                plgpu.wgmma(dk_acc, ds, q)
            self.share(slot, self.index, ds)
            self.multiply_derivatives(dq_acc, slot, at)
            if not keys_first:
                plgpu.wgmma(dk_acc, ds, q)
            plgpu.wgmma_wait(CONSUMERS + 1)
            plgpu.barrier_arrive(memory["do_empty"].at[at.stage_do])
            if keys_first:
                plgpu.wgmma_wait(CONSUMERS)
                plgpu.barrier_arrive(memory["q_empty"].at[at.stage])
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0 if keys_first else 1)

        self.add(tile, at, multiply, is_empty=kernel.is_seeded)
        if not keys_first:
            plgpu.wgmma_wait(0)
            plgpu.barrier_arrive(memory["q_empty"].at[at.stage])

    def _derive(self, scores, at, dv_acc, s_acc, dp_acc):
        """Returns the derivatives of the scores, and starts dV += P' dO."""
        kernel, memory, do = self.kernel, self.memory, self.memory["do"].at[at.stage_do]
        plgpu.barrier_wait(memory["q_full"].at[at.stage])
        lse = plgpu.load(self.line("q_lse", at.stage))
        if kernel.is_seeded:
            plgpu.barrier_wait(memory["do_full"].at[at.stage_do])
            delta = self._delta(at)
            s_acc[...] = along_rows(lse, scores.shape)
            dp_acc[...] = along_rows(delta, scores.shape)
        self.multiply_keys(s_acc, self.index + _hidden_zero(at.index, 0), at)
        if not kernel.is_seeded:
            plgpu.barrier_wait(memory["do_full"].at[at.stage_do])
        plgpu.wgmma(dp_acc, memory["v"].at[self.index + _hidden_zero(at.index, 1)], do.T)
        loaded = scores.load(at)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
        p, slope = scores.weights(s, lse, loaded, at)
        kept = scores.kept(at)
        p, rounded = lax.optimization_barrier((p, where_kept(kept, p).astype(kernel.dtype)))
        plgpu.wgmma(dv_acc, rounded, do)
        # A branch between the weights and the other product: without one ptxas may compute them after it.
        if kernel.is_seeded:
            pl.when(at.index >= 0)(self.await_staged)
            delta = None
        else:
            delta = self._delta(at)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
        return scores.derivatives(p, slope, dp, delta, kept, at).astype(kernel.dtype)

    def _delta(self, at):
        """Loads the deltas of a block of queries, once they are there."""
        plgpu.barrier_wait(self.memory["delta_full"].at[at.stage_do])
        return plgpu.load(self.line("do_delta", at.stage_do))


class WeightsConsumer(BackwardConsumer):
    """The first of two consumers that share 64 keys: it makes weights and dV, and half of dQ."""

    SUMS = ("dv",)

    def scores(self, tile):
        return BackwardScores(self, tile, tile.block * self.kernel.block_kv)

    def step(self, tile, scores, at, sums):
        memory, (dv_acc,) = self.memory, sums
        p, kept = pl.run_scoped(functools.partial(self._weigh, scores, at), plgpu.ACC(scores.shape, jnp.float32))
        plgpu.barrier_arrive(memory["q_empty"].at[at.stage])
        memory["p"][...] = p
        sync.named_barrier_arrive(jnp.int32(_WEIGHTS))
        plgpu.barrier_wait(memory["do_full"].at[at.stage_do])
        plgpu.wgmma(dv_acc, kept, memory["do"].at[at.stage_do])
        _meet()  # the derivatives of the scores are there

        def multiply(dq_acc):
            self.multiply_derivatives(dq_acc, self.slot(at), at)
            plgpu.wgmma_wait(1)
            plgpu.barrier_arrive(memory["do_empty"].at[at.stage_do])
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

        self.add(tile, at, multiply)

    def _weigh(self, scores, at, s_acc):
        """Returns the weights times the derivative of the soft cap, and the weights that dropout keeps."""
        kernel, memory = self.kernel, self.memory
        plgpu.barrier_wait(memory["q_full"].at[at.stage])
        self.multiply_keys(s_acc, _hidden_zero(at.index, 0), at)
        lse = plgpu.load(self.line("q_lse", at.stage))
        loaded = scores.load(at)
        s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
        p, slope = scores.weights(s, lse, loaded, at)
        kept = where_kept(scores.kept(at), p).astype(kernel.dtype)
        if kernel.passes_both:
            memory["p_of_bias"][...] = p.astype(kernel.dtype)
        return (p if slope is None else p * slope).astype(kernel.dtype), kept


class DerivativesConsumer(BackwardConsumer):
    """The second of two consumers that share 64 keys: it makes derivatives and dK, and half of dQ.

    Weights reach it through shared memory, rounded.
    """

    SUMS = ("dk",)

    def scores(self, tile):
        return BackwardScores(self, tile, tile.block * self.kernel.block_kv, needs_segments=False)

    def step(self, tile, scores, at, sums):
        kernel, memory, (dk_acc,) = self.kernel, self.memory, sums
        dp = pl.run_scoped(functools.partial(self._multiply_values, scores, at), plgpu.ACC(scores.shape, jnp.float32))
        plgpu.barrier_arrive(memory["do_empty"].at[at.stage_do])
        sync.named_barrier_sync(jnp.int32(_WEIGHTS))
        if kernel.passes_both:
            p = plgpu.load(memory["p_of_bias"], layout=LAYOUT)
            scores.add_to_bias(p.astype(jnp.float32) * dp, at)
        p = plgpu.load(memory["p"], layout=LAYOUT)
        ds = p.astype(jnp.float32) * dp
        if not kernel.passes_both:
            scores.add_to_bias(ds, at)
        ds = ds.astype(kernel.dtype)
        slot = self.slot(at)
        self.share(slot, 0, ds)

        def multiply(dq_acc):
            self.multiply_derivatives(dq_acc, slot, at)
            plgpu.barrier_wait(memory["q_full"].at[at.stage])
            plgpu.wgmma(dk_acc, ds, memory["q"].at[at.stage])
            return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

        self.add(tile, at, multiply)
        plgpu.wgmma_wait(0)
        plgpu.barrier_arrive(memory["q_empty"].at[at.stage])

    def _multiply_values(self, scores, at, dp_acc):
        """Returns the derivatives of the weights less delta: dP' = V dO'."""
        memory = self.memory
        plgpu.barrier_wait(memory["do_full"].at[at.stage_do])
        plgpu.wgmma(dp_acc, memory["v"].at[_hidden_zero(at.index, 1)], memory["do"].at[at.stage_do].T)
        plgpu.barrier_wait(memory["delta_full"].at[at.stage_do])
        delta = plgpu.load(self.line("do_delta", at.stage_do))
        kept = scores.kept(at)
        dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
        return scores.less_delta(dp, delta, kept)


@dataclass(frozen=True)
class TurnAdder(BackwardRole):
    """A warp that adds dQ of every `ADDERS`-th step to global memory, each when it is the block of keys' turn.

    A counter for each block of queries says how many blocks of keys have added, and each waits until those before it have.
    The warps take steps in turn: one waits for the counter while what the other added arrives. A second pass for dQ would make
    seven products in place of five, with the forward pass nine in place of seven: 0.78 of the speed at best.

    Attributes:
      index: number of the warp among those that add.
    """

    index: int

    def __call__(self, tile, steps):
        """Adds what consumers stage in the steps of a tile; returns the number of steps so far."""
        kernel, total = self.kernel, self.kernel.groups * tile.count
        first = lax.rem(self.index + (ADDERS - 1) * steps, jnp.int32(ADDERS))

        @pl.loop(0, lax.div(total - first + ADDERS - 1, jnp.int32(ADDERS)))
        def _(i):
            i = first + i * ADDERS
            head, block = self.head_and_block(tile, i)
            turn = (tile.b * kernel.query[1] + head) * kernel.blocks_q + block
            if "before" in self.refs:
                before = self.refs["before"][tile.b, tile.block, block]
            else:
                before = tile.block - kernel.first_key_block(block, KERNEL)
            tickets.await_count(self.refs["turns"], turn, before)
            for piece in range(kernel.config.pieces):
                plgpu.barrier_wait(self.memory["sums_full"].at[self.index])
                for consumer in range(CONSUMERS):
                    self.add_to_dq(consumer, tile.b, head, block, piece)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(self.memory["sums_empty"])
            plgpu.wait_smem_to_gmem(0)
            tickets.add_one(self.refs["turns"], turn)

        return steps + total


def _hidden_zero(step, use: int):
    """Returns 0 in a form that the compiler cannot fold, a different one for each use.

    It then recomputes addresses instead of keeping them in registers.
    """
    return lax.shift_right_arithmetic(step, jnp.int32(31 - use))
