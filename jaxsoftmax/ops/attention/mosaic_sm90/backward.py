"""Attention on Hopper, backward: a block of keys keeps the sums of its derivatives while queries pass block by block.

A block of threads is persistent: one producer warpgroup, which starts the TMA copies, and two consumers. A tile is a block of
keys of one key head, or two that two blocks of threads share. Its keys and values stay in shared memory. Queries and output
cotangents come in stages, with their rows' log-sum-exp and `delta`: those of all query heads that share the key head, or of
one, in the order of `head_and_block`. Products are transposed, so that a row of the scores in registers is a key. For dQ the
derivatives of the scores go through shared memory.

    S' = K Q'    P' = exp(scale S' - lse)    dP' = V dO'    dS' = P' (dP' - delta)
    dV += P' dO    dK += dS' Q    dQ += dS K    delta = sum(dO out) - dlse

Reads Q, K, V, dO, lse and delta, Q and dO once for each block of keys; writes dK and dV once, or adds to them in float32, once
for each query head or slice of a tile; adds to dQ in float32, in global memory, once for each tile: `10 * T * S * H` operations
a head, whichever cotangents are wanted. The derivative of a bias is dS: tiles are added in float32, or stored in 16 bits where
each score has a bias of its own. In float32 XLA splits Q, K, V and dO once into two terms of bfloat16 each, and a product is
three of theirs: three times as many operations. Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608,
section 3.

A score function changes `scale S'` before the exponential, and dS is multiplied by its slope, which is computed beside it. A
mask function hides keys in steps that are not visible entirely. Derivatives by arrays that a score function reads are added in
float32, in any order: one addition for each warp, row, column or score, as the place in the array varies.

NaN or infinity in queries, keys and values that are not seen shows, as they are multiplied by 0. float16 holds derivatives of
scores between 2^-25 and 65504: scale the loss.

This file has the launch, the division of work among warpgroups, and the producer; `backward_pipeline` has the consumers, and
`backward_plan` which blocks of queries a block of keys visits.
"""

import functools
import itertools
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
from jaxsoftmax._core.primitive import summed_to
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import schedule, sync, tickets
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention import key_blocks
from jaxsoftmax.ops.attention.mosaic_sm90.backward_pipeline import (
    BackwardRole,
    DerivativesConsumer,
    HalfConsumer,
    WeightsConsumer,
)
from jaxsoftmax.ops.attention.mosaic_sm90.backward_plan import (
    ADDERS,
    CONSUMERS,
    SIZES,
    BackwardGeometry,
    BiasGradient,
    shape_backward,
)
from jaxsoftmax.ops.attention.mosaic_sm90.common import (
    KERNEL,
    ROWS,
    hidden_zero,
    lay_out,
    of_operand,
    pad_segments,
    record,
    split_terms,
    views_of,
)
from jaxsoftmax.ops.attention.mosaic_sm90.functions import reason_against
from jaxsoftmax.ops.attention.operands import (
    INITIAL_D_QUERY,
    OPERANDS,
    TABLES,
    AttentionProblem,
    cotangents_of_rows,
    cotangents_of_sinks,
)
from jaxsoftmax.ops.attention.score_derivatives import reads_elements

_MAX_MASKED = 2**21  # keys whose biases have addresses within 31 bits of each other, for all queries of a step


@dataclass(frozen=True)
class BackwardPlan:
    """Cotangents of attention by the backward kernel."""

    geometry: BackwardGeometry | None  # None if the cotangent of the sinks alone is wanted, which needs no kernel
    wanted: tuple[str, ...]  # names of the operands whose cotangents are computed
    window: tuple[int | None, int | None]
    # True if the cotangents, which are parts of sums, stay in float32, and the one of queries is not multiplied by the scale.
    is_partial: bool = False
    has_functions: bool = False  # a score or mask function may hide keys
    remark = None

    def describe(self) -> str:
        return "XLA, for the sinks alone" if self.geometry is None else self.geometry.describe()

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        """Computes the cotangents that are wanted, as `xla.dot_product_attention_vjp` does.

        The kernel adds to `INITIAL_D_QUERY`, a part of the cotangent of queries from other keys, if it is among the operands.
        """
        present: Any = {o.name: operands[o.name] for o in OPERANDS if operands.get(o.name) is not None}
        out, lse, d_out, d_lse = (operands.get(name) for name in ("out", "lse", "d_out", "d_lse"))
        d_out, delta = cotangents_of_rows(present, out, lse, d_out, d_lse, self.window, has_functions=self.has_functions)
        cotangents = {}
        if self.geometry is not None:
            kernel_operands = {name: present[name] for name in present if name in self.geometry.names}
            lines = self.geometry.lines(lse, delta)
            cotangents = launch(self.geometry, kernel_operands, *lines, d_out, self.is_partial, operands.get(INITIAL_D_QUERY))
        if "sinks" in self.wanted:
            cotangents["sinks"] = cotangents_of_sinks(present["sinks"], lse, delta)
        sums = [(summed_to(cotangents[name], present[name].shape), present[name].dtype) for name in self.wanted]
        return [total if self.is_partial else total.astype(dtype) for total, dtype in sums]


def plan(problem: AttentionProblem, target: Target) -> BackwardPlan | Refusal:
    """Plans the cotangents that a problem wants."""
    types, params = problem.types, problem.params
    wanted, is_deterministic, is_partial = params["wanted"], params["deterministic_gradients"], params.get("is_partial", False)
    keys = types["key"].shape[-3]
    if (size := max(types[name].shape[-1] for name in ("query", "value"))) > SIZES[-1]:
        return Refusal(f"derivatives of head sizes above {SIZES[-1]} have no kernel, got {size}", lacks_kernel=True)
    if {"bias", "mask"} & set(types) and keys > _MAX_MASKED:
        return Refusal(f"there must be at most {_MAX_MASKED} keys with a bias or a mask, got {keys}")
    if "bias" in wanted and is_deterministic and _is_same_for_all_keys(shape := types["bias"].shape, problem):
        return Refusal(f"the derivative of a bias that is the same for all keys, {shape}, is summed in any order")
    if any(name in TABLES for name in wanted) and is_deterministic:
        return Refusal("derivatives of arrays that score_mod reads are summed in any order", lacks_kernel=True)
    geometry = None
    if set(wanted) - {"sinks"}:
        geometry = shape_backward(types, target, wanted, is_deterministic, is_partial, **problem.options)
        if (refusal := _refuse_functions(geometry, types)) is not None:
            return refusal
    return BackwardPlan(geometry, tuple(wanted), params["window"], is_partial, bool(problem.functions))


def _refuse_functions(geometry: BackwardGeometry, types) -> Refusal | None:
    """Refuses score and mask functions that the kernel cannot run, and derivatives of tables that it does not have."""
    of_tables = "derivatives of arrays that score_mod reads have no kernel"
    if geometry.tables and geometry.config.roles:
        return Refusal(f"{of_tables} for these head sizes", lacks_kernel=True)
    if geometry.tables and not reads_elements(geometry.score_mod, geometry.tables):
        return Refusal(f"{of_tables} where it reads several elements of an array at once", lacks_kernel=True)
    functions = [*geometry.functions.values(), *(function for _, function in geometry.loads.values())]
    reasons = (reason_against(function, types) for function in functions)
    return next((Refusal(reason, lacks_kernel=bool(geometry.tables)) for reason in reasons if reason is not None), None)


def _is_same_for_all_keys(shape, problem: AttentionProblem) -> bool:
    """Returns True if several scores of a row share an element of a bias; with one key, if any scores do."""
    (length, heads, _), keys = problem.types["query"].shape[-3:], problem.types["key"].shape[-3]
    return shape[-1] != keys or (keys == 1 and shape != (*problem.batch, heads, length, keys))


def launch(
    geometry: BackwardGeometry, operands, lse, delta, d_out, is_partial=False, initial_d_query=None
) -> dict[str, jax.Array]:
    """Runs the kernel for the whole batch, on operands by name; `lse` and `delta` are those of `BackwardGeometry.lines`.

    `is_partial` is that of `BackwardPlan`, and `initial_d_query` what the kernel adds the cotangent of queries to; None for 0.

    Returns:
      The cotangents of "query", "key" and "value", and of "bias" and tables if these are wanted, `[*batch, ...]`.
    """
    tables = {"spans": _spans(geometry, operands)} if geometry.is_varying else {}
    refs, records = _lay_out(geometry, operands | tables, lse, delta, d_out)
    if geometry.bias_gradient is not BiasGradient.NONE:
        *entries, heads, rows, _ = _bias_sums(geometry, operands["bias"].shape)
        records["dbias"] = record(geometry.batch, tuple(entries), heads, rows)
    records |= {f"d_{name}": record(geometry.batch, operands[name].shape[:-2]) for name in geometry.tables}
    # In a loop XLA would make one fusion of the kernel and the slices of its operands, and forget what it writes in place.
    large = [name for name in refs if name not in ("lse", "delta")]
    refs.update(zip(large, lax.optimization_barrier([refs[name] for name in large]), strict=True))
    waves = schedule.waves(geometry) if is_partial else 1  # beside a step of a ring a collective may run
    if (table := schedule.table(geometry)) is not None:
        refs["table"] = table
    written = _written(geometry, operands, initial_d_query)
    if geometry.is_deterministic and geometry.is_varying:
        refs["before"] = geometry.turns_before(tables["spans"])
        if geometry.adds_bias_in_turns:
            bias = operands["bias"].shape[:-3]
            refs["bias_before"] = geometry.bias_turns_before(tables["spans"], bias)
    types = _result_types(geometry, is_partial)
    run = kernel_of(
        functools.partial(_kernel, geometry, records, waves),
        out_type=types,
        grid=(waves * geometry.n_blocks,),
        grid_names=("block",),
        **({"cluster": (2,), "cluster_names": ("rank",)} if geometry.is_paired else {}),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=geometry.scratch(),
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True, reduction_scratch_bytes=0),
        kernel_name="attention_backward_mosaic",
    )

    def run_in_place(state):
        written, results = state
        for name, result in run(OrderedDict(refs, **written)).items():
            results[name][...] = result

    # Not `jax.new_ref`, whose effect custom_partitioning refuses.
    empty = OrderedDict((name, lax.empty(kind.shape, kind.dtype)) for name, kind in types.items())
    written, results = pl.run_state(run_in_place)((written, empty))
    return _cotangents(geometry, operands, written, results, is_partial)


def _spans(geometry: BackwardGeometry, operands):
    """Computes from operands which blocks of queries each block of keys visits."""
    seen = None
    if "mask" in operands:
        seen = key_blocks.mark_visible(operands["mask"], geometry.lengths, geometry.config.block_q, geometry.block_kv)
    return geometry.spans(operands, seen)


def _whole(geometry: BackwardGeometry, array, sizes, size):
    """Returns an operand `[*batch, *sizes]` of the whole batch, with rows and columns as TMA needs them.

    Lengths are padded to multiples of 8, and columns to `size`.
    """
    array = jnp.broadcast_to(array, (*geometry.batch, *sizes)).reshape(-1, *sizes)
    more = -sizes[0] % 8, size - sizes[2]
    return jnp.pad(array, ((0, 0), (0, more[0]), (0, 0), (0, more[1]))) if any(more) else array


def _terms(geometry: BackwardGeometry, name, array, sizes, size) -> OrderedDict[str, jax.Array]:
    """Returns an operand of products by name, as `_whole` does; of float32, its two terms."""
    whole = _whole(geometry, array, sizes, size)
    if geometry.n_terms == 1:
        return OrderedDict({name: whole})
    return OrderedDict(zip((name, f"{name}_low"), split_terms(whole, size), strict=True))


def _in_tiles(matrices):
    """Pads matrices so that TMA takes them in tiles."""
    more = [(0, 0), (0, -matrices.shape[1] % 8), (0, -matrices.shape[2] % ROWS)]
    return jnp.pad(matrices, more) if any(map(any, more)) else matrices


def _lay_out(geometry: BackwardGeometry, operands, lse, delta, d_out):
    """Reshapes operands as the kernel addresses them. Rows behind the last are 0: their weights are 1, their products 0."""
    (length, heads, _), (keys, key_heads, _), value_size = geometry.query, geometry.key, geometry.value_size
    padding, (columns, value_columns) = -length % geometry.config.block_q, geometry.global_columns
    main = ("query", "key", "value")
    extras, records = lay_out(geometry.batch, {name: array for name, array in operands.items() if name not in main})

    if geometry.config.stages_bias:
        extras["bias"] = _in_tiles(extras["bias"].reshape(-1, *operands["bias"].shape[-2:]))

    if geometry.stages_segments:
        extras["query_segments"] = pad_segments(operands["query_segments"])

    def line(array):
        array = jnp.broadcast_to(array, (*geometry.batch, heads, length)).reshape(-1, heads, length)
        return jnp.pad(array, [(0, 0), (0, 0), (0, padding)])

    refs = OrderedDict(
        **_terms(geometry, "query", operands["query"], geometry.query, columns),
        **_terms(geometry, "key", operands["key"], geometry.key, columns),
        **_terms(geometry, "value", operands["value"], (keys, key_heads, value_size), value_columns),
        **_terms(geometry, "d_out", d_out, (length, heads, value_size), value_columns),
        lse=line(lse),
        delta=line(delta),
        **extras,
    )
    return refs, records


def _written(geometry: BackwardGeometry, operands, d_query) -> OrderedDict[str, jax.Array]:
    """Returns what the kernel writes in place, by name: dQ, to which blocks of keys add, and others."""
    shape = geometry.batch + geometry.query
    if d_query is None:
        d_query = jnp.zeros(shape, jnp.float32)
    elif d_query.shape != shape:  # queries that entries of the batch share: with the first of them
        d_query = lax.pad(d_query, 0.0, [(0, size - part, 0) for size, part in zip(shape, d_query.shape, strict=True)])
    d_query = _whole(geometry, d_query, geometry.query, geometry.dq_size)
    written = OrderedDict(dq=lax.optimization_barrier(d_query))  # it may be a slice too
    if geometry.is_deterministic:
        turns = math.prod(geometry.batch) * geometry.query[1] * geometry.blocks_q * geometry.blocks_per_tile
        written["turns"] = jnp.zeros((turns,), jnp.int32)
    if geometry.adds_to_keys:
        written["dk_dv"] = jnp.zeros(_sums_shape(geometry), jnp.float32)  # one array: XLA would copy one of two equal ones
    for name in geometry.tables:
        written[f"d_{name}"] = jnp.zeros((math.prod(operands[name].shape[:-2]), operands[name].shape[-1]), jnp.float32)
    if geometry.bias_gradient is not BiasGradient.NONE:
        written["dbias"] = _initial_d_bias(geometry, _bias_sums(geometry, operands["bias"].shape))
        if geometry.adds_bias_in_turns:
            turns = written["dbias"].shape[0] * geometry.blocks_kv * geometry.blocks_q
            written["bias_turns"] = jnp.zeros((turns,), jnp.int32)
    return written


def _bias_sums(geometry: BackwardGeometry, bias: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the shape of the sums that the kernel makes for the derivative of a bias of a shape, with all batch axes.

    One that all queries share has few elements: each head has its own sums, which XLA adds up, so that few blocks of threads
    add to one element.
    """
    if bias[-2] == 1:
        return (*geometry.batch, geometry.query[1], *bias[-2:])
    return (1,) * (len(geometry.batch) + 3 - len(bias)) + bias


def _initial_d_bias(geometry: BackwardGeometry, sums: tuple[int, ...]) -> jax.Array:
    """Returns what the derivative of a bias is before the kernel: 0, except where the kernel writes all of it."""
    if geometry.bias_gradient is BiasGradient.SUMS:
        return jnp.zeros((math.prod(sums[:-1]), sums[-1]), jnp.float32)
    shape = math.prod(sums[:-2]), sums[-2] + -sums[-2] % 8, sums[-1] + -sums[-1] % ROWS  # as TMA needs them
    if geometry.bias_gradient is BiasGradient.ADDED:
        return jnp.zeros(shape, jnp.float32)
    visits_all = geometry.window == (None, None) and not geometry.is_varying
    return (lax.empty if visits_all else jnp.zeros)(shape, geometry.dtype)


def _keys_shape(geometry: BackwardGeometry) -> tuple[int, ...]:
    """Returns the shape of sums of dK or of dV, with rows and columns as TMA needs them."""
    keys, key_heads, _ = geometry.key
    return math.prod(geometry.batch), keys + -keys % 8, key_heads, geometry.size


def _sums_shape(geometry: BackwardGeometry) -> tuple[int, ...]:
    """Returns the shape of the sums of dK, and behind them of dV, to which tiles add: those of all heads, or of cut ones."""
    entries, keys, heads, size = _keys_shape(geometry)
    return (2 * entries, keys, heads, size) if geometry.has_single_heads else (2 * geometry.cut_heads, keys, 1, size)


def _with_sums(geometry: BackwardGeometry, array, sums):
    """Returns dK or dV with the sums of the heads whose tiles are cut, the last ones of the last entries of the batch."""
    entries, _, heads, _ = array.shape
    shape = max(1, geometry.cut_heads // heads), min(heads, geometry.cut_heads), *sums.shape[1::2]
    sums = jnp.swapaxes(sums.reshape(shape), 1, 2).astype(array.dtype)[..., : array.shape[-1]]
    return lax.dynamic_update_slice(array, sums, (entries - shape[0], 0, heads - shape[1], 0))


def _result_types(geometry: BackwardGeometry, is_partial) -> OrderedDict[str, jax.ShapeDtypeStruct]:
    """Returns the types of the results of the kernel, by name, beside what it adds to."""
    if geometry.has_single_heads:
        return OrderedDict()
    entries, keys, heads, size = _keys_shape(geometry)
    # Results of float32 are matrices, rows of all heads, as stores from registers take them.
    if is_partial:  # one array, as devices send one
        return OrderedDict(dk_dv=jax.ShapeDtypeStruct((2 * entries * keys, heads * size), jnp.float32))
    if geometry.n_terms > 1:
        return OrderedDict.fromkeys(("dk", "dv"), jax.ShapeDtypeStruct((entries * keys, heads * size), geometry.dtype))
    kinds = (jax.ShapeDtypeStruct((entries, keys, heads, columns), geometry.dtype) for columns in geometry.global_columns)
    return OrderedDict(zip(("dk", "dv"), kinds, strict=True))


def _cotangents(geometry: BackwardGeometry, operands, written, results, is_partial) -> dict[str, jax.Array]:
    """Returns the cotangents by name, from what the kernel has written."""
    (length, _, head_size), keys, value_size = geometry.query, geometry.key[0], geometry.value_size
    # Flat, so that XLA sees that halves which are put together are the whole.
    results = [x.ravel() for x in ([written["dk_dv"]] if geometry.has_single_heads else results.values())]
    results, written = lax.optimization_barrier((results, dict(written)))
    dq, d_bias = written["dq"], written.get("dbias")
    dk, dv = (x.reshape(*_keys_shape(geometry)[:-1], -1) for x in (jnp.split(results[0], 2) if len(results) == 1 else results))
    if geometry.cut_heads:
        dk, dv = map(functools.partial(_with_sums, geometry), (dk, dv), jnp.split(written["dk_dv"], 2))
    dq = dq if is_partial else geometry.scale * dq
    arrays = {"query": dq[:, :length, :, :head_size], "key": dk[:, :keys, :, :head_size], "value": dv[:, :keys, :, :value_size]}
    cotangents = {name: array.reshape(*geometry.batch, *array.shape[1:]) for name, array in arrays.items()}
    cotangents |= {name: written[f"d_{name}"].reshape(operands[name].shape) for name in geometry.tables}
    if d_bias is not None:
        bias = operands["bias"].shape
        sums = _bias_sums(geometry, bias)
        if geometry.bias_gradient is not BiasGradient.SUMS:
            d_bias = d_bias[:, : sums[-2], : sums[-1]]
        d_bias = d_bias.reshape(sums)
        cotangents["bias"] = summed_to(d_bias, (1,) * (len(sums) - len(bias)) + bias).reshape(bias)
    return cotangents


def _kernel(geometry: BackwardGeometry, records, waves, refs, results, **memory) -> None:
    """Divides the work of a block of threads among its warpgroups."""
    operands = {name: replace(record, ref=refs[name]) for name, record in records.items()}
    if geometry.stages_results:  # names of one place
        memory["sums"], *views = memory["sums"]
        memory["results"] = views[0], views[-1]  # as TMA copies them, and in tiles
    shared = geometry, refs | results, operands, memory
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    counter = schedule.ticket_counter() if geometry.is_deterministic else None
    role = BackwardRole(*shared)
    work = schedule.BlockTiles(geometry, block, refs.get("table"), memory, role.tile, counter=counter, waves=waves)
    fewer, more = geometry.config.registers
    if geometry.is_paired:
        work = replace(work, rank=role.rank, barriers=role.barriers)
        sync.prepare_exchange(role.barriers, sync.BARRIERS_OF_PEERS)
        sync.cluster_wait()

    @pl.when(warpgroup == CONSUMERS)
    def _():
        plgpu.set_max_registers(fewer, action="decrease")
        producer = BackwardProducer(*shared)
        if not geometry.is_deterministic:
            work.each(producer, lambda number: [])
            return

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == 0)(functools.partial(work.each, producer, lambda number: []))
            pl.when(warp == 1)(lambda: plgpu.barrier_arrive(memory["sums_empty"]))
            for adder in range(ADDERS):
                pl.when(warp == 1 + adder)(functools.partial(work.each, TurnAdder(*shared, adder)))

    @pl.when(warpgroup < CONSUMERS)
    def _():
        plgpu.set_max_registers(more, action="increase")
        kinds = (WeightsConsumer, DerivativesConsumer) if geometry.config.roles else (HalfConsumer, HalfConsumer)
        kinds[0](*shared, warpgroup).start()
        if geometry.config.one_program:
            work.each(HalfConsumer(*shared, warpgroup))
        else:
            for index, kind in enumerate(kinds):
                pl.when(warpgroup == index)(functools.partial(work.each, kind(*shared, index)))
        plgpu.wait_smem_to_gmem(0)

    if geometry.is_paired:
        sync.cluster_barrier()  # the other block may still arrive at barriers of this one


@dataclass(frozen=True)
class BackwardProducer(BackwardRole):
    """The producer warpgroup: copies keys and values of tiles, and their queries and output cotangents block by block."""

    def __call__(self, tile, steps):
        """Copies what a tile needs; returns the number of steps so far."""
        first, total = tile.block * self.geometry.block_kv, self.geometry.heads_per_tile * tile.count
        pl.when(total > 0)(lambda: self._copy_queries(tile, steps, 0, tile.entry))
        self._copy_keys_and_values(tile, first)

        def copy_rest(i, entry):
            self._copy_cotangents(tile, steps, i, entry)
            if self.geometry.config.stages_bias:
                self._copy_bias(tile, first, i, entry)

        pl.when(total > 0)(lambda: copy_rest(0, tile.entry))

        @pl.loop(1, total, init_carry=self.load_entry(tile, jnp.int32(1)))
        def _(i, entry=None):
            following = self.load_entry(tile, i + 1)
            self._copy_queries(tile, steps, i, entry)
            copy_rest(i, entry)
            return following

        return steps + total

    def copy_terms(self, name, place, slots, full):
        """Copies a part of an operand, at `place`, to shared memory: as many terms of it as there are `slots`."""
        for part, slot in zip((name, f"{name}_low"), slots, strict=False):
            plgpu.copy_gmem_to_smem(self.refs[part].at[place], slot, full)

    def _copy_rows(self, name, slot, place, stage, full):
        """Copies rows of an operand, at `place`, to a stage of its slots."""
        if self.geometry.in_slabs:
            self._copy_slabs(name, slot, place, stage, full)
        else:
            self.copy_terms(name, place, self.terms(slot, stage), full)

    def _copy_slabs(self, name, slot, place, stage, full):
        """Copies rows of an operand in slabs of columns."""
        slabs, tail = of_operand(slot, self.geometry.slabs), of_operand(slot, self.geometry.tails)
        slots, source = views_of(self.memory[slot])[0], self.refs[name]

        @pl.loop(0, slots.shape[1])  # not written out: a slab behind the last column must not be known while tracing
        def _(i):
            plgpu.copy_gmem_to_smem(source.at[(*place, pl.ds(i * ROWS, ROWS))], slots.at[stage, i], full)

        if tail:
            slots_of_tail = views_of(self.memory[f"{slot}_tail"])[0]

            @pl.loop(slabs, slabs + 1)
            def _(i):
                plgpu.copy_gmem_to_smem(source.at[(*place, pl.ds(i * ROWS, tail))], slots_of_tail.at[stage, 0], full)

    def _copy_bias(self, tile, first, i, entry):
        """Copies the bias of step `i` of a tile, whose keys are from `first` on."""
        bias, staged = self.operands["bias"], self.memory["bias"]
        halves, chunks = staged.shape[:2]
        head, block = self.head_and_block(tile, i, entry)
        plgpu.barrier_wait(self.memory["bias_empty"])
        for half, chunk in itertools.product(range(halves), range(chunks)):
            rows = pl.ds(block * self.geometry.config.block_q + chunk * ROWS, ROWS)
            source = bias.ref.at[bias.entry(tile.b, head), rows, pl.ds(first + half * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(source, staged.at[half, chunk], self.memory["bias_full"])

    def _copy_keys_and_values(self, tile, first):
        """Copies keys and values of a tile, from key `first` on."""
        refs, memory, geometry = self.refs, self.memory, self.geometry
        halves, width = geometry.block_kv // ROWS, geometry.part_size
        plgpu.barrier_wait(memory["kv_empty"])
        if geometry.in_slabs:
            for half in range(halves):
                place = tile.b, pl.ds(first + half * ROWS, ROWS), tile.head
                self._copy_slabs("key", "k", place, half, memory["k_full"])
                self._copy_slabs("value", "v", place, half, memory["v_full"])
            return
        for half in range(halves):
            rows = pl.ds(first + half * ROWS, ROWS)
            for part in range(geometry.parts[1]):
                # In a part that is cut, TMA fills columns behind the last one with 0. A part behind it may hold anything:
                # `multiply_keys` skips it, and its dQ is left out. Where columns end must not be known while tracing.
                is_whole = geometry.columns_of_part(part) == width
                columns = pl.ds((part if is_whole else part + hidden_zero(first, 0)) * width, width)
                self.copy_terms("key", (tile.b, rows, tile.head, columns), self.terms("k", half, part), memory["k_full"])
        if geometry.is_paired:
            rows = pl.ds(tile.other_block * geometry.block_kv, ROWS)
            for consumer in range(CONSUMERS):
                _, part = self.part_of_dq(consumer)
                source = refs["key"].at[tile.b, rows, tile.head, pl.ds(part * width, width)]
                plgpu.copy_gmem_to_smem(source, memory["other_k"].at[consumer], memory["k_full"])
        for half in range(halves):
            place = tile.b, pl.ds(first + half * ROWS, ROWS), tile.head
            self.copy_terms("value", place, self.terms("v", half), memory["v_full"])

    def _copy_queries(self, tile, steps, i, entry):
        """Copies queries and log-sum-exp of step `i` of a tile."""
        refs, memory, size = self.refs, self.memory, self.geometry.config.block_q
        head, block = self.head_and_block(tile, i, entry)
        rows, (stage, _) = pl.ds(block * size, size), self.stages(steps + i)
        full = memory["q_full"].at[stage]
        plgpu.barrier_wait(memory["q_empty"].at[stage])
        self._copy_rows("query", "q", (tile.b, rows, head), stage, full)
        plgpu.copy_gmem_to_smem(refs["lse"].at[tile.b, head, rows], self.line("q_lse", stage), full)
        if self.geometry.stages_segments:
            ids = self.operands["query_segments"]
            plgpu.copy_gmem_to_smem(ids.ref.at[ids.index(tile.b), rows], memory["q_segments"].at[stage], full)

    def _copy_cotangents(self, tile, steps, i, entry):
        """Copies output cotangents and delta of step `i` of a tile."""
        refs, memory, size = self.refs, self.memory, self.geometry.config.block_q
        head, block = self.head_and_block(tile, i, entry)
        rows, (_, stage) = pl.ds(block * size, size), self.stages(steps + i)
        plgpu.barrier_wait(memory["do_empty"].at[stage])
        self._copy_rows("d_out", "do", (tile.b, rows, head), stage, memory["do_full"].at[stage])
        line, full = self.line("do_delta", stage), memory["delta_full"].at[stage]
        plgpu.copy_gmem_to_smem(refs["delta"].at[tile.b, head, rows], line, full)


@dataclass(frozen=True)
class TurnAdder(BackwardRole):
    """A warp that adds dQ of every `ADDERS`-th step to global memory, each when it is the tile's turn.

    A counter for each block of queries says how many tiles have added, and each waits until those before it have.
    The warps take steps in turn: one waits for the counter while what the other added arrives. A second pass for dQ would make
    seven products in place of five, with the forward pass nine in place of seven: 0.78 of the speed at best.
    """

    index: int  # number of the warp among those that add

    def __call__(self, tile, steps):
        """Adds what consumers stage in the steps of a tile; returns the number of steps so far."""
        geometry, total = self.geometry, self.geometry.heads_per_tile * tile.count
        first = lax.rem(self.index + (ADDERS - 1) * steps, jnp.int32(ADDERS))

        @pl.loop(0, lax.div(total - first + ADDERS - 1, jnp.int32(ADDERS)))
        def _(i):
            i = first + i * ADDERS
            head, block = self.head_and_block(tile, i, self.load_entry(tile, i))
            turn = (tile.b * geometry.query[1] + head) * geometry.blocks_q + block
            if geometry.is_paired:  # each block of threads has turns for its columns
                turn = 2 * turn + self.rank
            if "before" in self.refs:
                before = self.refs["before"][tile.b, tile.number, block]
            else:
                before = tile.number - geometry.first_tile(block, KERNEL)
            if geometry.adds_bias_in_turns:
                self._add_to_bias(tile, head, block)
            tickets.await_count(self.refs["turns"], turn, before)
            for piece in range(geometry.config.pieces):
                self._take_over(
                    lambda consumer, piece=piece: self.add_to_dq(consumer, tile.b, head, block, piece),
                    is_one_place=geometry.config.separate_dq,
                )
            plgpu.wait_smem_to_gmem(0)
            tickets.add_one(self.refs["turns"], turn)

        return steps + total

    def _add_to_bias(self, tile, head, block):
        """Adds what consumers stage for the bias in a step, when the head's turn comes.

        Heads of the batch that share elements of the bias add in their order. The turn ends before that of dQ is awaited: in
        the next step the other warp may wait for it, behind which consumers stage dQ of this step.
        """
        geometry, d_bias = self.geometry, self.operands["dbias"]
        turn = (d_bias.entry(tile.b, head) * geometry.blocks_kv + tile.block) * geometry.blocks_q + block
        if "bias_before" in self.refs:
            before = self.refs["bias_before"][tile.b, tile.block, block]
        else:
            before = d_bias.sharers_before(tile.b)
        if d_bias.heads == 1:
            before = before * geometry.query[1] + head
        tickets.await_count(self.refs["bias_turns"], turn, before)
        for chunk in range(geometry.config.block_q // ROWS):
            self._take_over(lambda consumer, chunk=chunk: self.add_to_bias(tile, consumer, head, block, chunk))
        plgpu.wait_smem_to_gmem(0)
        tickets.add_one(self.refs["bias_turns"], turn)

    def _take_over(self, add, *, is_one_place=False):
        """Adds what both consumers have staged, and tells them when it has left shared memory.

        `is_one_place` says that they add to the same elements: the second one waits until the first one is done.
        """
        plgpu.barrier_wait(self.memory["sums_full"].at[self.index])
        for consumer in range(CONSUMERS):
            if consumer and is_one_place:
                plgpu.wait_smem_to_gmem(0)
            add(consumer)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(self.memory["sums_empty"])
