"""Attention on Hopper, forward: a block of queries keeps the state of its rows and pushes the keys block by block.

A block of threads is persistent: one producer warpgroup, or two, and two or three consumers, each for 64 queries of a tile,
which is a block of queries of one head. Producers copy keys and values by TMA into stages in shared memory, from the last key
block that a query of the tile sees to the first. Consumers have the scores of a key block in registers, and its weights, from
where the second product takes them: it runs while the scores of the next key block become weights. They hand the tensor cores
over to each other (ping-pong), so that one multiplies while another exponentiates. In bfloat16 weights do not wait for the
maximum of their key block (`pays_to_guess` in `forward_plan`). Key blocks that all queries see are not masked. Tiles come in
an order by which keys and values stay in the L2 cache and all blocks end at about the same time.

Reads Q once and writes O and lse once; reads K and V, mostly from L2, once for each tile: `4 * T * S * H` operations a head,
three times as many in float32.
Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, section 3.

This file has the launch and the division of work among warpgroups, `forward_pipeline` what these do, `forward_formats` how they
get pages, float32 and 8 bits, and `forward_plan` which rows are in a tile and which key blocks they visit: those of `lists` if
a mask function leaves holes.
"""

import functools
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
from jax.typing import DTypeLike

from jaxsoftmax._gpu import schedule
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.ops.attention.mosaic_sm90.common import lay_out, pad_segments, split_terms
from jaxsoftmax.ops.attention.mosaic_sm90.forward_formats import (
    ByteConverter,
    ByteCopies,
    PagedByteCopies,
    PagedCopies,
    SplitCopies,
    TermCopies,
    TermSlots,
)
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import ForwardConsumer, ForwardProducer, ForwardSlots, TmaCopies
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import ForwardGeometry, ForwardTiles, HeadRows, make_tables
from jaxsoftmax.ops.attention.operands import INITIAL_RESULTS, OPERANDS, dequantised, without_pages


@dataclass(frozen=True)
class ForwardPlan:
    """Attention by the forward kernel."""

    geometry: ForwardGeometry
    prepare: tuple[Callable[..., Any], ...] = ()  # functions of the operands by name, which XLA computes before the kernel
    n_results: int = 2  # 1 for the output alone, 2 for the output and the log-sum-exp
    is_partial: bool = False  # the output, which is one of several that are merged, stays in float32
    remark = None

    def describe(self) -> str:
        return ", ".join([self.geometry.describe(), *(PREPARED[function] for function in self.prepare)])

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        """Computes `[output, log-sum-exp]`, or the output alone, as `xla.dot_product_attention` does.

        Rows start from `INITIAL_RESULTS` if these are among the operands.
        """
        present: Any = {name: operand for name, operand in operands.items() if operand is not None}
        value_size = present["value_pages" if "value_pages" in present else "value"].shape[-1]
        for function in self.prepare:
            present = function(present)
        # A ring's `jax.jit` sorts operands by name: in this order the text of the kernel is the same in and outside of a ring.
        order = present if "page_table" in present else [operand.name for operand in OPERANDS] + list(INITIAL_RESULTS)
        out, *others = self.attend({name: present[name] for name in order if name in present})[: self.n_results]
        return [out if out.shape[-1] == value_size else out[..., :value_size], *others]

    def attend(self, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
        """Computes `[output, log-sum-exp]`."""
        geometry = self.geometry
        waves = schedule.waves(geometry) if self.is_partial else 1  # beside a step of a ring a collective may run
        out, lse = launch(geometry, operands, self.is_partial, waves)
        (length, heads, _), batch = geometry.query, geometry.batch
        return [out.reshape(*batch, length, heads, geometry.value_size), lse.reshape(*batch, heads, length)]


def head_multiple(dtype: DTypeLike) -> int:
    """Returns the number that divides the head sizes which the kernel takes: 8, as TMA copies rows of 16 bytes.

    In float32 it is 2, as operands go through registers, in pairs.
    """
    return 2 if jnp.dtype(dtype) == jnp.float32 else 8


def pad_heads(operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Pads queries, keys and values, their tangents, and outputs with zeros to head sizes that the kernel takes."""
    multiple = head_multiple(operands["query"].dtype)

    def padded(array):
        return jnp.pad(array, [(0, 0)] * (array.ndim - 1) + [(0, -array.shape[-1] % multiple)])

    names = {"query", "key", "value", "initial_out", "out", "d_query", "d_key", "d_value"}
    return {name: padded(array) if name in names else array for name, array in operands.items()}


PREPARED = {
    without_pages: "pages gathered before",
    dequantised: "8 bits converted before",
    pad_heads: "head sizes padded before",
}


def launch(geometry: ForwardGeometry, operands, is_partial=False, waves=1, is_ordered=True) -> list[jax.Array]:
    """Runs the kernel on operands by name, in several `waves` of blocks of threads.

    `is_partial` is that of `ForwardPlan`. Tiles come in the order of `schedule.table`, or by number unless `is_ordered`.

    Returns:
      The output `[entries, rows, heads, size]`, or as `geometry.rows` says, and the log-sum-exp of the rows; of splits `o`, `m`
      and `d`, see `ForwardGeometry`.
    """
    refs, records = _lay_out(geometry, operands)
    if is_ordered and (table := schedule.table(geometry)) is not None:
        refs["table"] = table
    types = result_types(geometry, refs["query"], is_partial)
    body = functools.partial(_kernel, geometry, records, waves)
    results = call_kernel(body, geometry, refs, types, waves, "attention_forward_mosaic")
    return [results[name] for name in types]


def call_kernel(body, geometry: ForwardGeometry, refs, types, waves, name) -> OrderedDict[str, jax.Array]:
    """Runs the kernel with a body and a name on `refs`, in several `waves` of blocks of threads; `types` are its results'."""
    return kernel_of(
        body,
        out_type=types,
        grid=(waves * geometry.n_blocks,),
        grid_names=("block",),
        num_threads=geometry.n_warpgroups,
        thread_name="warpgroup",
        scratch_types=geometry.scratch(),
        # Reductions are along rows, which are inside of warps, and need no shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        kernel_name=name,
    )(refs)


def _lay_out(geometry: ForwardGeometry, operands):
    """Reshapes operands as the kernel addresses them."""
    others = {name: array for name, array in operands.items() if name not in INITIAL_RESULTS}
    refs, records = lay_out(geometry.batch, others | make_tables(geometry, others))
    if geometry.stages_segments:
        refs["key_segments"] = pad_segments(operands["key_segments"])
    if geometry.pages is not None:
        for name in ("key_pages", "value_pages"):
            refs[name] = refs[name].reshape(-1, *refs[name].shape[2:])
    if geometry.config.has_terms:
        matrices = {"query": geometry.rows}
        if geometry.config.copies_terms:
            for name, size in zip(("key", "value"), geometry.sizes, strict=True):
                refs[name], refs[f"{name}_low"] = split_terms(refs[name], size)
                records[f"{name}_low"] = records[name]
        else:
            matrices |= {"key": HeadRows(), "value": HeadRows()}
        for name, rows in matrices.items():
            refs[name] = refs[name].reshape(rows.matrix_shape(refs[name].shape))
    if "initial_out" in operands:
        refs["initial_out"] = operands["initial_out"].reshape(-1, geometry.query[1] * geometry.value_size)
        refs["initial_lse"] = operands["initial_lse"].ravel()
    return refs, records


def result_types(geometry: ForwardGeometry, query, is_partial=False) -> OrderedDict[str, jax.ShapeDtypeStruct]:
    """Returns the types of the results of the kernel, by name."""
    count, (length, heads, _), size = math.prod(geometry.batch), geometry.query, geometry.value_size
    numbers = jax.ShapeDtypeStruct((count * heads * geometry.splits * length,), jnp.float32)
    if geometry.splits > 1:
        return OrderedDict(out=jax.ShapeDtypeStruct((*numbers.shape, size), jnp.float32), m=numbers, d=numbers)
    shape, dtype = (count, *query.shape[1:-1], size), query.dtype
    if geometry.config.has_terms or is_partial:  # from registers
        shape, dtype = geometry.rows.matrix_shape((count, length, heads, size)), jnp.float32
    return OrderedDict(out=jax.ShapeDtypeStruct(shape, dtype), lse=numbers)


def _kernel(geometry: ForwardGeometry, records, waves, refs, results, **memory) -> None:
    """Computes attention in a block of threads."""
    operands = {name: replace(record, ref=refs[name]) for name, record in records.items()}
    initial = (refs["initial_out"], refs["initial_lse"]) if "initial_out" in refs else None
    slots = TermSlots(geometry, memory) if geometry.config.has_terms else ForwardSlots(geometry, memory)
    tiles = ForwardTiles(geometry, operands)

    def consumer(index):
        return ForwardConsumer(index, geometry, operands, results, slots, tiles, initial)

    divide_work(tiles, refs.get("table"), memory, _producers(geometry, operands, slots), consumer, waves)


def divide_work(tiles: ForwardTiles, table, memory, producers, consumer_of, waves) -> None:
    """Divides the work of a block of threads among its warpgroups.

    Args:
      tiles: tiles of the kernel.
      table: table of tiles, or None.
      memory: arrays and barriers in shared memory.
      producers: what each warpgroup beside the consumers does with a tile.
      consumer_of: function that makes a consumer from its number.
      waves: number of waves of blocks of threads.
    """
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")
    # The last block of queries may see the most keys.
    work = schedule.BlockTiles(tiles.geometry, block, table, memory, tiles.tile, last_first=True, waves=waves)
    (fewer, more), consumers = tiles.geometry.config.registers, tiles.geometry.config.consumers

    for i, role in enumerate(producers):

        @pl.when(warpgroup == consumers + i)
        def _(i=i, role=role):
            plgpu.set_max_registers(fewer, action="decrease")
            work.each(role, None if i else tiles.look_up)

    @pl.when(warpgroup < consumers)
    def _():
        plgpu.set_max_registers(more, action="increase")
        consumer = consumer_of(warpgroup)
        consumer.start()
        work.each(consumer)
        plgpu.wait_smem_to_gmem(0)


def _producers(geometry, operands, slots):
    """Lists what the warpgroups beside the consumers do with a tile."""
    plain, paged = (ByteCopies, PagedByteCopies) if geometry.config.byte_stages else (TmaCopies, PagedCopies)
    terms = SplitCopies if geometry.config.copies_terms else TermCopies
    kind = terms if geometry.config.has_terms else plain if geometry.pages is None else paged
    copies, letters = kind(geometry, operands, slots), {1: ["kqv"], 2: ["kq", "v"]}[geometry.config.producers]
    letters = ["kv"] if geometry.config.copies_terms else letters
    producers = [ForwardProducer(geometry, copies, copied) for copied in letters]
    converted = ("key", "value") if geometry.config.byte_stages else ()
    return producers + [ByteConverter(geometry, operands, slots, name) for name in converted]
