"""The tangent of attention on Hopper: a block of queries keeps the sums of its tangents while the keys pass block by block.

A block of threads, its tiles and the order of key blocks are those of the forward kernel. Weights are made anew from the
log-sum-exp, so that no maximum is needed, and no sum is rescaled:

    S = Q K'    tS = tQ K' + Q tK'    P = exp(scale S - lse)    W = P scale tS
    tO = W V + P tV - rowsum(W) O     t_lse = rowsum(W)

Reads Q, tQ, O and lse once and writes tO and t_lse once; reads K, tK, V and tV, mostly from L2, once for each tile:
`10 * T * S * H` operations a head, or 2 for each product that the tangents which are present need. Source: Dao 2023,
arXiv:2307.08691, for the tiles; the derivative of softmax.

This file has the plan and the launch, `tangent_pipeline` what warpgroups do, and `tangent_plan` tiles and shared memory.
"""

import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import schedule
from jaxsoftmax.ops.attention.mosaic_sm90.common import GlobalOperand, lay_out
from jaxsoftmax.ops.attention.mosaic_sm90.forward import (
    PREPARED,
    call_kernel,
    divide_work,
    head_multiple,
    pad_heads,
    result_types,
)
from jaxsoftmax.ops.attention.mosaic_sm90.forward_pipeline import ForwardProducer
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import ForwardTiles, make_tables
from jaxsoftmax.ops.attention.mosaic_sm90.tangent_pipeline import TangentConsumer, TangentCopies, TangentSlots
from jaxsoftmax.ops.attention.mosaic_sm90.tangent_plan import LARGEST, TangentGeometry, shape_tangent
from jaxsoftmax.ops.attention.operands import OPERANDS, RESULTS, TANGENTS, AttentionProblem, batch_of, weights_of_sinks


@dataclass(frozen=True)
class TangentPlan:
    """Tangents of attention by the tangent kernel."""

    geometry: TangentGeometry | None  # None if at most the sinks have a tangent, which needs no kernel
    prepare: tuple[Callable[..., Any], ...] = ()  # functions of the operands by name, which XLA computes before the kernel
    is_partial: bool = False  # the tangents are parts of sums, beside which a collective may run
    remark = None

    def describe(self) -> str:
        if self.geometry is None:
            return "XLA, for the sinks alone"
        return ", ".join([self.geometry.describe(), *(PREPARED[function] for function in self.prepare)])

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        """Computes `[dout, dlse]`, as `xla.dot_product_attention_jvp` does."""
        names = [operand.name for operand in (*OPERANDS, *RESULTS, *TANGENTS)]
        present: Any = {name: operands[name] for name in names if operands.get(name) is not None}
        batch, (length, heads, value_size) = batch_of(present), present["out"].shape[-3:]
        start: Any = None
        if "d_sinks" in present:
            start = weights_of_sinks(present["sinks"], present["lse"]) * present["d_sinks"].astype(jnp.float32)[..., None]
            start = jnp.broadcast_to(start, (*batch, heads, length))
        if self.geometry is None and start is None:
            return [jnp.zeros((*batch, length, heads, value_size), present["query"].dtype), jnp.zeros((*batch, heads, length))]
        if self.geometry is None:
            d_out = -start.mT[..., None] * present["out"].astype(jnp.float32)
            return [d_out.astype(present["query"].dtype), start]
        for function in self.prepare:
            present = function(present)
        present = {name: array for name, array in present.items() if name in self.geometry.names}
        results = launch(self.geometry, present, start, schedule.waves(self.geometry) if self.is_partial else 1)
        out = results["out"].reshape(*batch, length, heads, -1)[..., :value_size]
        if "lse" not in results:
            return [out, jnp.zeros((*batch, heads, length), jnp.float32)]
        return [out, results["lse"].reshape(*batch, heads, length)]


def plan(problem: AttentionProblem, target: Target) -> TangentPlan | Refusal:
    """Plans the tangents of a problem."""
    types: Mapping[str, Any] = problem.operands
    if problem.dtype == jnp.float32:
        return Refusal("tangents of float32 have no kernel", lacks_kernel=True)
    if (size := max(types[name].shape[-1] for name in ("query", "value"))) > LARGEST:
        return Refusal(f"tangents of head sizes above {LARGEST} have no kernel, got {size}", lacks_kernel=True)
    if {tangent.name for tangent in TANGENTS} & set(types) <= {"d_sinks"}:  # a part of the keys may have none at all
        return TangentPlan(None)
    prepare: list[Callable[..., Any]] = []
    if any(types[name].shape[-1] % head_multiple(problem.dtype) for name in ("query", "value")):
        prepare.append(pad_heads)
        types = jax.eval_shape(pad_heads, {n: jax.ShapeDtypeStruct(kind.shape, kind.dtype) for n, kind in types.items()})
    geometry = shape_tangent(types, target, **problem.options)
    if "mask" in types and geometry.config.block_kv < 64:
        reason = "tangents of scores and of values with a mask have no kernel for head sizes above 128"
        return Refusal(f"{reason}, got {size}", lacks_kernel=True)
    return TangentPlan(geometry, tuple(prepare), problem.params.get("is_partial", False))


def launch(geometry: TangentGeometry, operands, start, waves=1) -> OrderedDict[str, jax.Array]:
    """Runs the kernel on operands by name, in several `waves` of blocks of threads.

    `start` is what the sums of rows start with, `[*batch, heads, queries]`, or None for 0.

    Returns:
      The tangents "out", `[entries, rows, heads, size]`, and "lse" of all rows if it is not 0.
    """
    refs, records = lay_out(geometry.batch, operands | make_tables(geometry, operands))
    refs["lse"] = refs["lse"].ravel()
    if "out" in refs:
        refs["out"] = refs["out"].reshape(-1, geometry.query[1] * geometry.value_size)
    if start is not None:
        refs["start"], records["start"] = start.ravel(), GlobalOperand(lambda b: b)
    if (table := schedule.table(geometry)) is not None:
        refs["table"] = table
    types = result_types(geometry, refs["query"])
    if not geometry.moves_scores and start is None:
        del types["lse"]
    body = functools.partial(_kernel, geometry, records, waves)
    return call_kernel(body, geometry, refs, types, waves, "attention_tangent_mosaic")


def _kernel(geometry: TangentGeometry, records, waves, refs, results, **memory) -> None:
    """Computes tangents in a block of threads."""
    operands = {name: replace(record, ref=refs[name]) for name, record in records.items()}
    slots, tiles = TangentSlots(geometry, memory), ForwardTiles(geometry, operands)
    producer = ForwardProducer(geometry, TangentCopies(geometry, operands, slots), "kqv")

    def consumer(index):
        return TangentConsumer(index, geometry, operands, results, slots, tiles, None)

    divide_work(tiles, refs.get("table"), memory, [producer], consumer, waves)
