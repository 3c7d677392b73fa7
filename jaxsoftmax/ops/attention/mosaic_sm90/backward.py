"""Attention on Hopper, backward: a block of keys keeps the sums of its derivatives while queries pass block by block.

A block of threads is persistent: one producer warpgroup, which starts the TMA copies, and two consumers. A tile is a block of
keys of one key head. Its keys and values stay in shared memory. Queries and output cotangents of all query heads that share the
key head come in stages, with their rows' log-sum-exp and `delta`, from the last block of queries to the first. Products are
transposed, so that a row of the scores in registers is a key. For dQ the derivatives of the scores go through shared memory.

    S' = K Q'    P' = exp(scale S' - lse)    dP' = V dO'    dS' = P' (dP' - delta)
    dV += P' dO    dK += dS' Q    dQ += dS K    delta = sum(dO out) - dlse

Reads Q, K, V, dO, lse and delta, Q and dO once for each block of keys; writes dK and dV once; adds to dQ in float32, in global
memory, once for each block of keys: `10 * T * S * H` operations a head. Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024,
arXiv:2407.08608, section 3. Roles by head size, and what `deterministic` does: docs/design.md.
"""

import functools
import math
from collections import OrderedDict
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import ptx, schedule, wgmma
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention import key_blocks as blocks
from jaxsoftmax.ops.attention.mosaic_sm90.backward_plan import ADDERS, CONSUMERS, SLOTS, BackwardKernel, plan_backward
from jaxsoftmax.ops.attention.mosaic_sm90.operands import KERNEL, ROWS, GlobalOperand, laid_out
from jaxsoftmax.ops.attention.mosaic_sm90.scores import (
    COL_LAYOUT,
    LAYOUT,
    LOG2E,
    ROW_LAYOUT,
    dropout_keeps,
    in_one_segment,
    tanh,
)
from jaxsoftmax.ops.attention.operands import OPERANDS, cotangents_of_rows, cotangents_of_sinks
from jaxsoftmax.ops.attention.problem import AttentionProblem
from jaxsoftmax.ops.attention.xla import summed_to

_BOTH = 8  # the named barrier at which both consumers meet; Mosaic GPU uses the first ones
_WEIGHTS = 9  # that by which one consumer tells the other that weights are in shared memory
_MAX_MASKED = 2**21  # keys whose biases have addresses within 31 bits of each other, for all queries of a step


@dataclass(frozen=True)
class BackwardPlan:
    """Cotangents of attention by the backward kernel.

    Attributes:
      kernel: how the kernel runs. None if the cotangent of the sinks alone is wanted, which needs no kernel.
      wanted: names of the operands whose cotangents are computed.
      window: see `AttentionKernel`.
      is_partial: True if the cotangents, which are parts of sums, stay in float32, and the one of the queries is not multiplied
        by the scale.
      onto: such a part of the cotangent of the queries, from other keys, to which the kernel adds. None for 0.
    """

    kernel: BackwardKernel | None
    wanted: tuple[str, ...]
    window: tuple[int | None, int | None]
    is_partial: bool = False
    onto: Any = None
    remark = None

    def describe(self) -> str:
        return "XLA, for the sinks alone" if self.kernel is None else self.kernel.describe()

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        """Computes the cotangents that are wanted, as `xla.dot_product_attention_vjp` does."""
        present: Any = {o.name: operands[o.name] for o in OPERANDS if operands.get(o.name) is not None}
        out, lse, d_out, d_lse = (operands.get(name) for name in ("out", "lse", "d_out", "d_lse"))
        d_out, delta = cotangents_of_rows(present, out, lse, d_out, d_lse, self.window)
        cotangents = {}
        if self.kernel is not None:
            kernel_operands = {name: present[name] for name in present if name in self.kernel.names}
            lines = self.kernel.lines(lse, delta)
            cotangents = _run(self.kernel, kernel_operands, *lines, d_out, self.is_partial, self.onto)
        if "sinks" in self.wanted:
            cotangents["sinks"] = cotangents_of_sinks(present["sinks"], lse, delta)
        sums = [(summed_to(cotangents[name], present[name].shape), present[name].dtype) for name in self.wanted]
        return [total if self.is_partial else total.astype(dtype) for total, dtype in sums]


def plan(problem: AttentionProblem, target: Target) -> BackwardPlan | Refusal:
    """Plans the cotangents that a problem wants."""
    types, params = problem.types, problem.params
    wanted, is_deterministic = params["wanted"], params["deterministic_gradients"]
    keys = types["key"].shape[-3]
    if problem.dtype == jnp.float32:
        return Refusal("derivatives of float32 have no kernel", lacks_kernel=True)
    if {"bias", "mask"} & set(types) and keys > _MAX_MASKED:
        return Refusal(f"there must be at most {_MAX_MASKED} keys with a bias or a mask, got {keys}")
    if "bias" in wanted and is_deterministic:
        length, heads = types["query"].shape[-3:-1]
        shape, whole = types["bias"].shape, (*problem.batch, heads, length, keys)
        if shape != whole:
            return Refusal(f"the derivative of a bias that is broadcast, {shape} to {whole}, is summed in any order")
    kernel = None
    if set(wanted) - {"sinks"}:
        kernel = plan_backward(types, target, wanted, is_deterministic, **problem.options)
    options = {name: params[name] for name in ("is_partial", "onto") if name in params}
    return BackwardPlan(kernel, tuple(wanted), params["window"], **options)


def _run(plan, given, lse, delta, d_out, is_partial, onto) -> dict[str, jax.Array]:
    """Runs the kernel: the cotangents of query, key and value, and of the bias if that is wanted, of the whole batch."""
    count, (length, heads, head_size), (keys, key_heads, _) = math.prod(plan.batch), plan.query, plan.key
    value_size, itself = given["value"].shape[-1], ("query", "key", "value")
    if plan.is_varying:
        seen = None
        if "mask" in given:
            seen = blocks.seen(given["mask"], plan.lengths, plan.config.block_q, plan.block_kv)
        given["spans"] = plan.spans(given, seen)

    def whole(array, trailing):
        """An operand of the whole batch, with rows and columns as TMA needs them."""
        array = jnp.broadcast_to(array, (*plan.batch, *trailing)).reshape(count, *trailing)
        more = -trailing[0] % 8, plan.size - trailing[2]
        return jnp.pad(array, ((0, 0), (0, more[0]), (0, 0), (0, more[1]))) if any(more) else array

    # Rows behind the last are 0 in all operands: their weights are 1 and all their products 0.
    line = [(0, 0), (0, 0), (0, -length % plan.config.block_q)]
    lse, delta = (jnp.broadcast_to(a, (*plan.batch, heads, length)) for a in (lse, delta))
    lse, delta = (a.reshape(count, heads, length) for a in (lse, delta))
    extras, operands = laid_out(plan.batch, {name: array for name, array in given.items() if name not in itself})
    refs = OrderedDict(
        query=whole(given["query"], plan.query),
        key=whole(given["key"], plan.key),
        value=whole(given["value"], (keys, key_heads, value_size)),
        d_out=whole(d_out, (length, heads, value_size)),
        lse=jnp.pad(lse, line),
        delta=jnp.pad(delta, line),
        **extras,
    )
    # In a loop XLA would make one fusion of the kernel and the slices of its operands, and forget what it writes in place.
    large = [name for name in refs if name not in ("lse", "delta")]
    refs.update(zip(large, lax.optimization_barrier([refs[name] for name in large]), strict=True))
    waves = schedule.waves(plan) if is_partial else 1  # beside a step of a ring a collective may run
    if (table := schedule.table(plan)) is not None:
        refs["table"] = table
    shape = plan.batch + plan.query
    if onto is None:
        onto = jnp.zeros(shape, jnp.float32)
    elif onto.shape != shape:  # queries that entries of the batch share: with the first of them
        onto = lax.pad(onto, 0.0, [(0, size - own, 0) for size, own in zip(shape, onto.shape, strict=True)])
    written = OrderedDict(dq=lax.optimization_barrier(whole(onto, plan.query)))  # in place; it may be a slice too
    if plan.is_deterministic:
        written["turns"] = jnp.zeros((count * heads * plan.blocks_q,), jnp.int32)
        if plan.is_varying:
            refs["before"] = plan.turns_before(given["spans"])
    if plan.adds_bias:
        written["dbias"] = jnp.zeros(given["bias"].shape, jnp.float32).reshape(-1, given["bias"].shape[-1])
    shape = count, keys + -keys % 8, key_heads, plan.size
    results = OrderedDict.fromkeys(("dk", "dv"), jax.ShapeDtypeStruct(shape, refs["query"].dtype))
    if is_partial:  # seen as rows of all heads, for stores from registers: one array, as devices send one
        results = {"dk_dv": jax.ShapeDtypeStruct((2 * count * shape[1], key_heads * plan.size), jnp.float32)}
    kernel = kernel_of(
        functools.partial(_kernel, plan, operands, waves),
        out_type=results,
        grid=(waves * plan.n_blocks,),
        grid_names=("block",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=plan.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name="attention_backward_mosaic",
    )

    def run(state):
        written, results = state
        for name, result in kernel(OrderedDict(refs, **written)).items():
            results[name][...] = result

    # Not `jax.new_ref`, whose effect custom_partitioning refuses.
    empty = OrderedDict((name, lax.empty(kind.shape, kind.dtype)) for name, kind in results.items())
    written, results = pl.run_state(run)((written, empty))
    results = [x.ravel() for x in results.values()]  # flat, so that XLA sees that halves which are put together are the whole
    results, dq, dbias = lax.optimization_barrier((results, written["dq"], written.get("dbias")))
    dk, dv = jnp.split(results[0], 2) if is_partial else results
    dk, dv, dq = dk.reshape(shape), dv.reshape(shape), dq if is_partial else plan.scale * dq
    found = {"query": dq[:, :length, :, :head_size], "key": dk[:, :keys, :, :head_size], "value": dv[:, :keys, :, :value_size]}
    found = {name: array.reshape(*plan.batch, *array.shape[1:]) for name, array in found.items()}
    return found | ({"bias": dbias.reshape(given["bias"].shape)} if plan.adds_bias else {})


def _kernel(plan, operands, waves, refs, results, **memory):
    """What the warpgroups of a block of threads do."""
    operands = {name: replace(operand, ref=refs[name]) for name, operand in operands.items()}
    tile = _Tile(plan, refs | results, operands, memory)
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    counter = schedule.ticket_counter() if plan.is_deterministic else None
    own_tiles = schedule.BlockTiles(plan, block, refs.get("table"), memory, tile.place, counter=counter, waves=waves)
    less, more = plan.config.registers

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(less, action="decrease")
        if not plan.is_deterministic:
            own_tiles.each(tile.produce, lambda number: [])
            return

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(functools.partial(own_tiles.each, tile.produce, lambda number: []))
            pl.when(warp == 1)(lambda: plgpu.barrier_arrive(memory["sums_empty"]))
            for adder in range(ADDERS):
                pl.when(warp == 1 + adder)(functools.partial(own_tiles.each, functools.partial(tile.add, adder)))

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(more, action="increase")
        tile.start()
        consume = tile.consume_role if plan.config.roles else tile.consume
        if plan.config.one_program:
            own_tiles.each(functools.partial(consume, warpgroup))
        else:
            for consumer in range(CONSUMERS):
                pl.when(warpgroup == consumer)(functools.partial(own_tiles.each, functools.partial(consume, consumer)))
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Place:
    """Where a tile is, from and to which block of queries it goes, and where all queries see all keys."""

    b: Any
    head: Any  # of keys
    block: Any
    low: Any
    count: Any
    whole_from: Any
    whole_to: Any
    lengths: tuple[Any, Any]
    offset: Any


@dataclass(frozen=True)
class _Tile:
    """What is done for a tile. The steps of all tiles are counted through: step `i` uses stage `i % stages`."""

    plan: BackwardKernel
    refs: dict[str, Any]  # in global memory
    operands: dict[str, GlobalOperand]  # the optional ones
    memory: dict[str, Any]

    def place(self, number) -> _Place:
        plan = self.plan
        blocks, heads = jnp.int32(plan.blocks_kv), jnp.int32(plan.key[1])
        pair, block = lax.div(number, blocks), lax.rem(number, blocks)
        b, head = lax.div(pair, heads), lax.rem(pair, heads)
        lengths = []
        for name, size in zip(("query_lengths", "key_lengths"), plan.lengths, strict=True):
            lengths.append(jnp.clip(self.operands[name][b], 0, size) if name in self.operands else size)
        if "spans" in self.operands:
            low, high, whole_from, whole_to = (self.operands["spans"][b, block, i] for i in range(4))
        else:
            low, high, whole_from, whole_to = plan.span(block, plan.lengths, KERNEL)
            low += _hidden_zero(number, 0)  # ptxas makes slower loops of constant bounds
            high = jnp.maximum(low, high + _hidden_zero(number, 1))
            whole_from = jnp.clip(whole_from, low, high)
            whole_to = jnp.clip(whole_to, whole_from, high)
        offset = self.operands["query_offset"][b] if "query_offset" in self.operands else 0
        return _Place(b, head, block, low, high - low, whole_from, whole_to, (lengths[0], lengths[1]), offset)

    def _stage(self, step):
        return lax.rem(step, jnp.int32(self.plan.config.stages[0])), lax.rem(step, jnp.int32(self.plan.config.stages[1]))

    def _line(self, name, stage):
        """The log-sum-exp or the delta of a block of queries, in shared memory."""
        if name in self.memory:
            return self.memory[name].at[stage]
        return self.memory["lines"].at[stage if name == "q_lse" else self.plan.config.stages[0] + stage]

    # The producer.

    def produce(self, place, steps):
        """Copies what a tile needs; gives how many steps there have been."""
        refs, memory, plan = self.refs, self.memory, self.plan
        halves, width, size = memory["k"].shape[0], plan.part_size, plan.config.block_q
        first = place.block * self.plan.block_kv

        def copy_queries(i):
            head, block = self._head_and_block(place, i)
            rows, (stage, _) = pl.ds(block * size, size), self._stage(steps + i)
            full = memory["q_full"].at[stage]
            plgpu.barrier_wait(memory["q_empty"].at[stage])
            plgpu.copy_gmem_to_smem(refs["query"].at[place.b, rows, head], memory["q"].at[stage], full)
            plgpu.copy_gmem_to_smem(refs["lse"].at[place.b, head, rows], self._line("q_lse", stage), full)

        def copy_cotangents(i):
            head, block = self._head_and_block(place, i)
            rows, (_, stage) = pl.ds(block * size, size), self._stage(steps + i)
            plgpu.barrier_wait(memory["do_empty"].at[stage])
            plgpu.copy_gmem_to_smem(refs["d_out"].at[place.b, rows, head], memory["do"].at[stage], memory["do_full"].at[stage])
            line, full = self._line("do_delta", stage), memory["delta_full"].at[stage]
            plgpu.copy_gmem_to_smem(refs["delta"].at[place.b, head, rows], line, full)

        total = plan.groups * place.count
        pl.when(total > 0)(lambda: copy_queries(0))
        plgpu.barrier_wait(memory["kv_empty"])
        for half in range(halves):
            rows = pl.ds(first + half * ROWS, ROWS)
            for part in range(plan.parts[1]):
                source = refs["key"].at[place.b, rows, place.head, pl.ds(part * width, width)]
                plgpu.copy_gmem_to_smem(source, memory["k"].at[half, part], memory["k_full"])
        for half in range(halves):
            source = refs["value"].at[place.b, pl.ds(first + half * ROWS, ROWS), place.head]
            plgpu.copy_gmem_to_smem(source, memory["v"].at[half], memory["v_full"])
        pl.when(total > 0)(lambda: copy_cotangents(0))

        @pl.loop(1, total)
        def _(i):
            copy_queries(i)
            copy_cotangents(i)

        return steps + total

    def _head_and_block(self, place, i):
        """The query head and the block of queries of step `i` of a tile."""
        head = place.head * self.plan.groups + lax.div(jnp.int32(i), place.count)
        return head, place.low + place.count - 1 - lax.rem(jnp.int32(i), place.count)

    # The consumers.

    def start(self):
        """Says that all of shared memory is empty."""
        plgpu.barrier_arrive(self.memory["kv_empty"])
        for name, stages in zip(("q_empty", "do_empty"), self.plan.config.stages, strict=True):
            for stage in range(stages):
                plgpu.barrier_arrive(self.memory[name].at[stage])

    def consume(self, consumer, place, steps):
        """Computes dV and dK of a consumer's keys, and its part of dQ; gives how many steps there have been."""
        plan, memory, config = self.plan, self.memory, self.plan.config
        dtype, shape = self.refs["query"].dtype, (ROWS, config.block_q)
        scores = _Scores(self, place, place.block * plan.block_kv + consumer * ROWS)
        slab, part = self._part_of_dq(consumer)

        def work(dk_acc, dv_acc, banded, head, block, step):
            stage, stage_do = self._stage(step)
            q, do = memory["q"].at[stage], memory["do"].at[stage_do]

            def derive(s_acc, dp_acc):
                plgpu.barrier_wait(memory["q_full"].at[stage])
                lse = plgpu.load(self._line("q_lse", stage))
                if plan.is_seeded:
                    plgpu.barrier_wait(memory["do_full"].at[stage_do])
                    plgpu.barrier_wait(memory["delta_full"].at[stage_do])
                    delta = plgpu.load(self._line("do_delta", stage_do))
                    s_acc[...] = _along_rows(lse, shape)
                    dp_acc[...] = _along_rows(delta, shape)
                self._multiply_keys(s_acc, consumer + _hidden_zero(step, 0), q)
                if not plan.is_seeded:
                    plgpu.barrier_wait(memory["do_full"].at[stage_do])
                plgpu.wgmma(dp_acc, memory["v"].at[consumer + _hidden_zero(step, 1)], do.T)
                loaded = scores.load(head, block, banded=banded)
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                p, slope = scores.weights(s, lse, loaded, block, banded=banded)
                kept = scores.kept(head, block)
                p, rounded = lax.optimization_barrier((p, _only(kept, p).astype(dtype)))
                plgpu.wgmma(dv_acc, rounded, do)
                # A branch between the weights and the other product: without one ptxas may compute them after it.
                if plan.is_seeded:
                    pl.when(step >= 0)(self._await_staged)
                    delta = None
                else:
                    plgpu.barrier_wait(memory["delta_full"].at[stage_do])
                    delta = plgpu.load(self._line("do_delta", stage_do))
                dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                return scores.derivatives(p, slope, dp, delta, kept, head, block).astype(dtype)

            ds = pl.run_scoped(derive, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
            slot = memory["ds"].at[lax.rem(step, jnp.int32(SLOTS))]

            def multiply_derivatives(dq_acc):
                if config.keys_first:
                    plgpu.wgmma(dk_acc, ds, q)
                self._share(slot, consumer, ds)
                for half in range(CONSUMERS):
                    plgpu.wgmma(dq_acc, slot.at[half, slab].T, memory["k"].at[half + _hidden_zero(step, 2), part])
                if not config.keys_first:
                    plgpu.wgmma(dk_acc, ds, q)
                plgpu.wgmma_wait(CONSUMERS + 1)
                self._release("do", step)
                if config.keys_first:
                    plgpu.wgmma_wait(CONSUMERS)
                    self._release("q", step)
                return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0 if config.keys_first else 1)

            self._add(consumer, place.b, head, block, step, multiply_derivatives, is_empty=plan.is_seeded)
            if not config.keys_first:
                plgpu.wgmma_wait(0)
                self._release("q", step)

        return self._sum_up(("dk", "dv"), consumer, place, scores, steps, work)

    def consume_role(self, role, place, steps):
        """The same where the first consumer makes dV, and the second dK."""
        plan, memory, config = self.plan, self.memory, self.plan.config
        dtype, shape = self.refs["query"].dtype, (ROWS, config.block_q)
        scores = _Scores(self, place, place.block * plan.block_kv, weighs=role == 0)

        def multiply_derivatives(step, dq_acc):
            slot = memory["ds"].at[lax.rem(step, jnp.int32(SLOTS))]
            plgpu.wgmma(dq_acc, slot.at[0, 0].T, memory["k"].at[_hidden_zero(step, 2), role])

        def step_of_values(acc, banded, head, block, step):
            stage, stage_do = self._stage(step)

            def weigh(s_acc):
                plgpu.barrier_wait(memory["q_full"].at[stage])
                self._multiply_keys(s_acc, _hidden_zero(step, 0), memory["q"].at[stage])
                lse = plgpu.load(self._line("q_lse", stage))
                loaded = scores.load(head, block, banded=banded)
                s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                p, slope = scores.weights(s, lse, loaded, block, banded=banded)
                kept = _only(scores.kept(head, block), p).astype(dtype)
                if plan.passes_both:
                    memory["p_of_bias"][...] = p.astype(dtype)
                return (p if slope is None else p * slope).astype(dtype), kept

            p, kept = pl.run_scoped(weigh, plgpu.ACC(shape, jnp.float32))
            self._release("q", step)
            memory["p"][...] = p
            ptx.named_barrier_arrive(jnp.int32(_WEIGHTS))
            plgpu.barrier_wait(memory["do_full"].at[stage_do])
            plgpu.wgmma(acc, kept, memory["do"].at[stage_do])
            _meet()  # the derivatives of the scores are there

            def multiply(dq_acc):
                multiply_derivatives(step, dq_acc)
                plgpu.wgmma_wait(1)
                self._release("do", step)
                return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

            self._add(role, place.b, head, block, step, multiply)

        def step_of_keys(acc, banded, head, block, step):
            del banded
            stage, stage_do = self._stage(step)

            def multiply_values(dp_acc):
                plgpu.barrier_wait(memory["do_full"].at[stage_do])
                plgpu.wgmma(dp_acc, memory["v"].at[_hidden_zero(step, 1)], memory["do"].at[stage_do].T)
                plgpu.barrier_wait(memory["delta_full"].at[stage_do])
                delta = plgpu.load(self._line("do_delta", stage_do))
                kept = scores.kept(head, block)
                dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                return scores.less_delta(dp, delta, kept)

            dp = pl.run_scoped(multiply_values, plgpu.ACC(shape, jnp.float32))
            self._release("do", step)
            ptx.named_barrier_sync(jnp.int32(_WEIGHTS))
            if plan.passes_both:
                p = plgpu.load(memory["p_of_bias"], layout=LAYOUT)
                scores.add_to_bias(p.astype(jnp.float32) * dp, head, block)
            p = plgpu.load(memory["p"], layout=LAYOUT)
            ds = p.astype(jnp.float32) * dp
            if not plan.passes_both:
                scores.add_to_bias(ds, head, block)
            ds = ds.astype(dtype)
            slot = memory["ds"].at[lax.rem(step, jnp.int32(SLOTS))]
            self._share(slot, 0, ds)

            def multiply(dq_acc):
                multiply_derivatives(step, dq_acc)
                plgpu.barrier_wait(memory["q_full"].at[stage])
                plgpu.wgmma(acc, ds, memory["q"].at[stage])
                return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

            self._add(role, place.b, head, block, step, multiply)
            plgpu.wgmma_wait(0)
            self._release("q", step)

        work = (step_of_values, step_of_keys)[role]
        return self._sum_up((("dv", "dk")[role],), 0, place, scores, steps, work)

    def _sum_up(self, names, half, place, scores, steps, work):
        """Does `work(*sums, banded, head, block, step)` for all steps of a tile; gives how many steps there have been.

        The sums, `dk` and `dv` or the one that is in `names`, are stored in the end. `banded` says whether queries are to be
        masked: False, or an array where that is a branch in the step.
        """
        plan = self.plan

        def of_head(sums, end, i, _):
            head = place.head * plan.groups + i
            last = steps + (i + 1) * place.count - 1

            def step(i, _):
                block = end - 1 - i
                banded = scores.is_banded and (block < place.whole_from) | (block >= place.whole_to)
                work(*sums, banded, head, block, last - (block - place.low))

            lax.fori_loop(0, place.count, step, None)

        def summed(*sums):
            each = functools.partial(of_head, sums, place.low + place.count)
            if plan.groups == 1:
                each(0, None)
            else:
                lax.fori_loop(0, plan.groups, each, None)
            total = plan.groups * place.count
            self._store(place, half, scores.of_kept, **{name: sum[...] for name, sum in zip(names, sums, strict=True)})
            return total

        plgpu.barrier_wait(self.memory["k_full"])
        plgpu.barrier_wait(self.memory["v_full"])
        return steps + pl.run_scoped(summed, *(plgpu.ACC((ROWS, plan.size), jnp.float32) for _ in names))

    def _multiply_keys(self, s_acc, half, q):
        """Multiplies keys and queries."""
        width = self.plan.part_size
        for part in range(self.plan.parts[1]):
            plgpu.wgmma(s_acc, self.memory["k"].at[half, part], q.at[:, part * width : (part + 1) * width].T)

    def _release(self, letters, step):
        stage = self._stage(step)[letters == "do"]
        plgpu.barrier_arrive(self.memory[f"{letters}_empty"].at[stage])

    def _share(self, slot, half, ds):
        """Stores the derivatives of scores for both consumers, and meets the other one.

        A slot is written again two steps later: after the next meeting, before which both have waited for their wgmma.
        """
        for slab in range(self.plan.config.block_q // ROWS):
            slot[half, slab] = ds[:, slab * ROWS : (slab + 1) * ROWS]
        _meet()

    def _await_staged(self):
        """Waits until what was staged has left shared memory."""
        if self.plan.is_deterministic:
            plgpu.barrier_wait(self.memory["sums_empty"])
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _add(self, consumer, b, head, block, step, multiply, *, is_empty=False):
        """Adds a consumer's part of dQ to global memory, or gives it to the warps that do in the order of turns.

        `multiply(acc)` gives that part. `is_empty` says that what was staged before is known to have left.
        """
        dq = pl.run_scoped(multiply, plgpu.ACC((ROWS, self.plan.part_size), jnp.float32))
        width = self.plan.part_size // self.plan.config.pieces
        for piece in range(self.plan.config.pieces):
            if piece or not is_empty:
                self._await_staged()
            self.memory["sums"][consumer] = dq[:, piece * width : (piece + 1) * width]
            plgpu.commit_smem()
            if self.plan.is_deterministic:
                plgpu.barrier_arrive(self.memory["sums_full"].at[lax.rem(step, jnp.int32(ADDERS))])
            else:
                self._add_staged(consumer, b, head, block, piece)

    def _part_of_dq(self, consumer):
        """Which rows of 64 and which columns of a block of dQ a consumer makes."""
        return [consumer if count > 1 else 0 for count in self.plan.parts]

    def _add_staged(self, consumer, b, head, block, piece):
        staged, (slab, part) = self.memory["sums"].at[consumer], self._part_of_dq(consumer)
        width = staged.shape[1]
        rows = pl.ds(block * self.plan.config.block_q + slab * ROWS, ROWS)
        cols = pl.ds(part * self.plan.part_size + piece * width, width)
        plgpu.copy_smem_to_gmem(staged, self.refs["dq"].at[b, rows, head, cols], reduction_op="add")

    def _store(self, place, half, of_kept, *, dv=None, dk=None):
        """Stores dV and dK of 64 keys, by way of where values and keys were, once both consumers have read these."""
        plan, memory, dtype, width = self.plan, self.memory, self.refs["query"].dtype, self.plan.part_size
        if "dk_dv" in self.refs:
            keys, first, out = plan.key[0], place.block * plan.block_kv + half * ROWS, self.refs["dk_dv"]
            of_entry = keys + -keys % 8
            for entry, values in (
                (place.b + math.prod(plan.batch), None if dv is None else of_kept * dv),
                (place.b, None if dk is None else plan.scale * dk),
            ):
                if values is not None:
                    start = entry * of_entry + first, place.head * plan.size
                    wgmma.store_product(out, *start, (keys - first, plan.size), values)
            plgpu.barrier_arrive(memory["kv_empty"])
            return
        _meet()
        if dv is not None:
            memory["v"][half] = (of_kept * dv).astype(dtype)
        if dk is not None:
            for part in range(plan.parts[1]):
                memory["k"][half, part] = (plan.scale * dk[:, part * width : (part + 1) * width]).astype(dtype)
        plgpu.commit_smem()
        rows = pl.ds(place.block * plan.block_kv + half * ROWS, ROWS)
        if dv is not None:
            plgpu.copy_smem_to_gmem(memory["v"].at[half], self.refs["dv"].at[place.b, rows, place.head])
        if dk is not None:
            for part in range(plan.parts[1]):
                target = self.refs["dk"].at[place.b, rows, place.head, pl.ds(part * width, width)]
                plgpu.copy_smem_to_gmem(memory["k"].at[half, part], target)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(memory["kv_empty"])

    # The warps that add to dQ, if deterministic.

    def add(self, own, place, steps):
        """Adds dQ of every `ADDERS`-th step to global memory, each when it is the block of keys' turn; gives the steps."""
        plan, total = self.plan, self.plan.groups * place.count
        first = lax.rem(own + (ADDERS - 1) * steps, jnp.int32(ADDERS))

        @pl.loop(0, lax.div(total - first + ADDERS - 1, jnp.int32(ADDERS)))
        def _(i):
            i = first + i * ADDERS
            head, block = self._head_and_block(place, i)
            turn = (place.b * plan.query[1] + head) * plan.blocks_q + block
            if "before" in self.refs:
                before = self.refs["before"][place.b, place.block, block]
            else:
                before = place.block - plan.first_key_block(block, KERNEL)
            ptx.await_count(self.refs["turns"], turn, before)
            for piece in range(self.plan.config.pieces):
                plgpu.barrier_wait(self.memory["sums_full"].at[own])
                for consumer in range(CONSUMERS):
                    self._add_staged(consumer, place.b, head, block, piece)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(self.memory["sums_empty"])
            plgpu.wait_smem_to_gmem(0)
            ptx.add_one(self.refs["turns"], turn)

        return steps + total


class _Scores:
    """How products of 64 keys from `first` on, which are rows, and queries become weights, and those of values derivatives."""

    def __init__(self, tile, place, first, *, weighs=True):
        self.plan, self.operands, self.refs = tile.plan, tile.operands, tile.refs
        self.b, self.lengths, self.offset, self.first = place.b, place.lengths, place.offset, first
        self.shape = ROWS, self.plan.config.block_q
        left, right = self.plan.window
        has_lengths = bool({"query_lengths", "key_lengths"} & self.plan.names)
        self.is_limited = left is not None or right is not None or self.plan.is_ragged or has_lengths
        self.is_banded = self.is_limited or "query_segments" in self.plan.names
        self.of_kept = 1 / (1 - self.plan.dropout_rate) if "seeds" in self.plan.names else 1.0
        self.segments: Any = None
        if "key_segments" in self.plan.names and weighs:
            own, keys = self.operands["key_segments"], self.plan.key[0]
            self.segments = wgmma.load_product_rows(own.ref, own.index(self.b) * keys + first, keys - first, self.shape)

    def load(self, head, block, *, banded):
        """What global memory has on a block of queries: while products are made, as loads take long."""
        loaded = {}
        for name in ("bias", "mask"):
            if name in self.operands:
                own = self.operands[name]
                at = self._at(own, head, block)
                loaded[name] = wgmma.load_transposed(own.ref, *at, self.shape, varies=own.varies)
        if "query_segments" in self.operands:
            own, queries, start = self.operands["query_segments"], self.plan.query[0], block * self.shape[1]
            first = own.index(self.b) * queries + start
            loaded["segments"] = lax.cond(
                banded,
                lambda: wgmma.load_product_cols(own.ref, first, queries - start, self.shape),
                lambda: plgpu.layout_cast(jnp.zeros(self.shape[1:], own.ref.dtype), COL_LAYOUT),
            )
        return loaded

    def weights(self, s, lse, loaded, block, *, banded):
        """The weights of a block of queries, and the derivative of the soft cap, if there is one."""
        slope, factor = None, self.plan.scale
        if self.plan.soft_cap is not None:
            s = tanh(s * (self.plan.scale / self.plan.soft_cap))
            slope, factor = 1 - s * s, self.plan.soft_cap
        if "bias" in loaded:
            bias = loaded["bias"].astype(jnp.float32)
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s * factor + bias)  # s may be NaN
        if "mask" in loaded:
            s = jnp.where(loaded["mask"] != 0, s, -jnp.inf)
        if "bias" in loaded:  # they may be as large as `finfo.min`
            p = jnp.exp2((s - _along_rows(lse, s.shape)) * LOG2E)
        else:
            s = s * (factor * LOG2E)
            p = jnp.exp2(s if self.plan.is_seeded else s - _along_rows(lse, s.shape))
        if self.is_banded:
            p = lax.cond(banded, lambda p: self._masked(p, loaded, block), lambda p: p, p)
        return p, slope

    def _masked(self, p, loaded, block):
        """The weights of a block of queries, 0 where segments, the window or the lengths hide a key.

        On an H200 a branch here costs nothing. One that masks the scores, before the exponentials, costs up to four percent.
        """
        if "segments" in loaded:
            p = in_one_segment(p, self.segments, loaded["segments"], hidden=0.0)
        return wgmma.band(p, *self._limits(block * self.shape[1]), hidden=0.0) if self.is_limited else p

    def kept(self, head, block):
        """Which weights dropout keeps, or None for all."""
        if "seeds" not in self.operands:
            return None
        seeds, rate = self.operands["seeds"], self.plan.dropout_rate
        return dropout_keeps(seeds, self.b, head, self.first, block, self.shape, rate, is_transposed=True)

    def less_delta(self, dp, delta, kept):
        """The derivatives of weights, those that are kept, less `delta`."""
        if kept is not None:
            dp = _only(kept, dp * self.of_kept)
        return dp if delta is None else dp - _along_rows(delta, dp.shape)

    def derivatives(self, p, slope, dp, delta, kept, head, block):
        """The derivatives of the products of keys and queries."""
        ds = p * self.less_delta(dp, delta, kept)
        self.add_to_bias(ds, head, block)
        return ds if slope is None else ds * slope

    def add_to_bias(self, ds, head, block):
        if self.plan.adds_bias:
            own = self.operands["bias"]
            wgmma.add_transposed(self.refs["dbias"], *self._at(own, head, block), ds, varies=own.varies)

    def _limits(self, start):
        """The first and the last column that each row sees, where columns are queries from `start` on; None for no limit."""
        (left, right), (queries, keys) = self.plan.window, self.lengths
        position = self.first + lax.iota(jnp.int32, ROWS)
        start_at = start + self.offset  # where windows count from
        low, high = None if right is None else position - (right + start_at), None
        if "query_lengths" in self.operands:
            high = plgpu.layout_cast(jnp.broadcast_to(queries - start - 1, (ROWS,)), ROW_LAYOUT)
        if left is not None:
            of_window = position + (left - start_at)
            high = of_window if high is None else jnp.minimum(high, of_window)
        if self.plan.is_ragged or "key_lengths" in self.operands:
            high = jnp.where(position < keys, jnp.int32(self.shape[1] - 1) if high is None else high, -1)
        return low, high

    def _at(self, own, head, block):
        """Where the elements of a bias or mask are that belong to a block of queries: row, column, and how many there are."""
        start = block * self.shape[1]
        return (
            own.row(self.b, head, start),
            self.first if own.varies[1] else 0,
            (self.plan.query[0] - start, self.plan.key[0] - self.first),
        )


def _hidden_zero(step, use):
    """0, though the compiler cannot know, nor that it is that of another use: else it would hold addresses in registers."""
    return lax.shift_right_arithmetic(step, jnp.int32(31 - use))


# Waits for the other consumer; what both wrote to shared memory is then visible to wgmma.
_meet = ptx.meeting(_BOTH, CONSUMERS)


def _only(kept, array):
    return array if kept is None else jnp.where(kept, array, 0.0)


def _along_rows(line, shape):
    """A value for each column, in all rows."""
    return lax.broadcast_in_dim(line, shape, (1,))
