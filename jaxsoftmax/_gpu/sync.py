"""Waiting: for copies, warpgroups, the blocks of a cluster, and what they store to each other's shared memory."""

import math
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, vector

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu.emit import (
    SPLAT,
    WARP,
    WARPS,
    compare,
    constant,
    emit,
    instruct,
    integer,
    operand_list,
    shared_address,
    thread,
)

# Barriers of two blocks that work together, and where they are behind the first: two for `exchange_with_peer`, two for what
# `tickets.send_to_peer` sends, and two for what was received, 8 bytes each.
BARRIERS_OF_PEERS, SENT, RECEIVED = 6, 16, 32


def end_copies() -> None:
    """Ends a group of the copies that this thread has started since the last group; it may be empty."""
    instruct("cp.async.commit_group;")


def await_copies(but: int = 0) -> None:
    """Waits for the copies that this thread has started with `Vector.copy`, except those of the last `but` groups."""
    instruct(f"cp.async.wait_group {but};" if but else "cp.async.wait_all;")


def block_barrier() -> None:
    """Waits for all warpgroups of the block; what they wrote to shared memory is then visible."""
    instruct("bar.sync 0;")


def prepare_exchange(barriers, count: int = 2) -> None:
    """Tells the cluster, without waiting, that this block has started and its barriers are ready.

    `barriers` are 8 bytes for each of `count` barriers, in shared memory. One thread arrives at each.
    """

    def prepare(barriers):
        first = compare("eq", utils.thread_idx(), constant(0))
        for k in range(count):
            # The barrier is in the block that receives. At a barrier of the whole cluster a block waits for all its
            # copies in flight, which cost a tenth of the time (H200).
            ptx = f"mbarrier.init.shared::cta.b64 [$0+{8 * k}], 1;"
            utils.inline_ptx(ptx, shared_address(barriers, constant(0)), predicate=first, has_side_effects=True)
        ptx = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;"
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    emit(prepare, barriers)


def cluster_wait() -> None:
    """Waits until all blocks of the cluster have come to `prepare_exchange`, so that their shared memory exists."""
    instruct("barrier.cluster.wait.aligned;")


def await_exchange(barriers, round_: int, size: int) -> None:
    """Waits until `size` bytes were sent to this block in a round: 0 is the first, 1 the second, and so on."""
    ptx = (
        "{ .reg .pred done; .reg .pred first; setp.eq.u32 first, $1, 0;"
        f" @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};"
        f" again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], {round_ // 2 % 2}; @!done bra again; }}"
    )

    def wait(barriers):
        address = shared_address(barriers, constant(8 * (round_ % 2)))
        utils.inline_ptx(ptx, address, utils.thread_idx(), has_side_effects=True, convergent=True)

    emit(wait, barriers)


def send_to_cluster(ref, index, values: jax.Array, layout: Any, blocks: int, barriers, round_: int) -> None:
    """Stores a float32 of each warp to `ref[index + warp]` in the shared memory of all blocks of the cluster.

    It does not wait: `await_exchange` of the round does, in the block that gets the values. They must have been read before the
    round after the next one sends.

    Args:
      ref: one-dimensional, in shared memory, at the same address in all blocks.
      index: scalar int32, the place of this warpgroup's four values.
      values: `[4]`, one for each warp of the warpgroup.
      layout: layout of `values`, which every lane of the warp holds.
      blocks: blocks of the cluster, at most 16; one lane stores to each.
      barriers: barriers of `prepare_exchange`.
      round_: number of the round.
    """

    def push(ref, barriers, index, values):
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        warp = arith.remui(arith.divui(utils.thread_idx(), constant(WARP)), constant(WARPS))
        here = shared_address(ref, arith.muli(arith.addi(index, warp), constant(4)))
        barrier = shared_address(barriers, constant(8 * (round_ % 2)))
        rank = arith.remui(lane, constant(blocks))
        value = llvm.extractelement(values.registers.flat[0], constant(0))
        ptx = (
            "{ .reg .u32 there; .reg .u32 barrier; mapa.shared::cluster.u32 there, $0, $2;"
            " mapa.shared::cluster.u32 barrier, $1, $2; .reg .pred own; setp.lt.u32 own, $4, $5;"
            " @own st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [there], $3, [barrier]; }"
        )
        utils.inline_ptx(ptx, here, barrier, rank, value, lane, constant(blocks), has_side_effects=True)

    emit(push, (ref, barriers), [index], [(values, layout)])


def send_rows_to_cluster(ref, index, values: jax.Array, plan: Any, barriers, round_: int) -> None:
    """Sends a float32 for each of a block's rows to `ref[index * width :]` of all blocks, as `send_to_cluster`.

    `plan` is a `ColumnPlan`. `values` are `[4 * width]`, alike in all warps: the first one sends. Several of its lanes have the
    same rows: they store to different blocks.
    """

    def push(ref, barriers, index, values):
        thread = utils.thread_idx()
        first = arith.muli(arith.remui(thread, constant(plan.lanes)), constant(plan.vector))
        place = arith.addi(arith.muli(index, constant(plan.width)), first)
        here = shared_address(ref, arith.muli(place, constant(4)))
        barrier = shared_address(barriers, constant(8 * (round_ % 2)))
        words = vector.bitcast(ir.VectorType.get((plan.vector,), integer(32)), values.registers.flat[0])
        copies, at_once = WARP // plan.lanes, min(4, plan.vector)
        for k in range(-(-plan.blocks // copies)):
            rank = arith.addi(arith.divui(thread, constant(plan.lanes)), constant(k * copies))
            rank = arith.select(compare("ult", thread, constant(WARP)), rank, constant(plan.blocks))
            for start in range(0, plan.vector, at_once):
                parts = [llvm.extractelement(words, constant(start + q)) for q in range(at_once)]
                kind, names = operand_list(integer(32), [f"${4 + q}" for q in range(at_once)]).split(" ", 1)
                ptx = (
                    "{ .reg .u32 there; .reg .u32 barrier; .reg .pred is; setp.lt.u32 is, $2, $3;"
                    " @is mapa.shared::cluster.u32 there, $0, $2; @is mapa.shared::cluster.u32 barrier, $1, $2;"
                    " @is st.async.shared::cluster.mbarrier::complete_tx::bytes."
                    f"{kind} [there+{4 * start}], {names}, [barrier]; }}"
                )
                utils.inline_ptx(ptx, here, barrier, rank, constant(plan.blocks), *parts, has_side_effects=True)

    emit(push, (ref, barriers), [index], [(values, plan.row_layout)])


@plgpu.inline_mgpu(arg_types=(SPLAT,))
def named_barrier_sync(_, barrier):
    """Waits until another warpgroup arrives at `barrier`, int32, the number of one of the hardware's 16."""
    utils.inline_ptx(f"bar.sync $0, {2 * WARPS * WARP};", barrier.registers.item(), has_side_effects=True, convergent=True)


@plgpu.inline_mgpu(arg_types=(SPLAT,))
def named_barrier_arrive(_, barrier):
    """Arrives at `barrier`, without waiting, for the warpgroup that waits at it or will."""
    utils.inline_ptx(f"bar.arrive $0, {2 * WARPS * WARP};", barrier.registers.item(), has_side_effects=True, convergent=True)


def meeting(barrier: int, warpgroups: int) -> Any:
    """Returns a function that waits for other warpgroups at `barrier`, the number of one of the hardware's 16.

    What they wrote to shared memory is then visible, to tensor cores and bulk copies too.
    """

    @plgpu.inline_mgpu()
    def meet(_):
        ptx = f"fence.proxy.async.shared::cta; bar.sync {barrier}, {warpgroups * WARPS * WARP};"
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    return meet


def warpgroup_barrier() -> None:
    """Waits for all warps of the warpgroup."""
    emit(utils.warpgroup_barrier)


def exchange_with_peer(ref, transforms, barriers, peer, step) -> None:
    """Sends `ref[stage, 0]` to `ref[stage, 1]` of the other block of a cluster of two, which sends as much.

    It does not wait: `await_peer` does, in all warpgroups that read what was sent.

    Args:
      ref: in shared memory, at the same address in both blocks. `ref[stage, 0]` is visible to bulk copies.
      transforms: transforms of `ref`.
      barriers: barriers of `prepare_exchange`. The first two are used.
      peer: rank of the other block.
      step: number of the exchange, from 0 on. The stage is its remainder by 2. The blocks must have read what the step before
        the last one sent. One warpgroup of a block makes all exchanges.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(transforms), plgpu.RefType(), SPLAT, SPLAT))
    def send(_, ref, barriers, peer, step):
        peer, step = peer.registers.item(), step.registers.item()
        size = math.prod(ref.type.shape[2:]) * utils.bytewidth(ref.type.element_type)
        stage = arith.remui(step, constant(2))
        source = shared_address(ref, arith.muli(stage, constant(2 * size)))
        target, barrier = arith.addi(source, constant(size)), shared_address(barriers, arith.muli(stage, constant(8)))
        ptx = (
            "{ .reg .u32 there, barrier; .reg .pred first; setp.eq.u32 first, $4, 0;"
            f" @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], {size};"
            " mapa.shared::cluster.u32 there, $1, $3; mapa.shared::cluster.u32 barrier, $2, $3;"
            " @first cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes"
            f" [there], [$0], {size}, [barrier]; }}"
        )
        utils.inline_ptx(ptx, source, target, barrier, peer, thread(), has_side_effects=True)

    send(ref, barriers, jnp.int32(peer), jnp.int32(step))


def await_peer(barriers, step) -> None:
    """Waits until what the other block has sent in the `exchange_with_peer` of `step` is there, for products to read."""
    ptx = (
        "{ .reg .pred done; again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], $1; @!done bra again; }"
    )

    def wait(barriers, step):
        address = shared_address(barriers, arith.muli(arith.remui(step, constant(2)), constant(8)))
        parity = arith.remui(arith.divui(step, constant(2)), constant(2))
        utils.inline_ptx(ptx, address, parity, has_side_effects=True, convergent=True)

    emit(wait, barriers, [step])


def arrive_in_cluster() -> None:
    """Tells the cluster, without waiting, that this block has started and has done what came before."""
    instruct("barrier.cluster.arrive.release.aligned;")


def cluster_barrier() -> None:
    """Waits for all threads of the cluster; what they wrote to shared memory, of any block, is then visible."""
    instruct("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def fill_shared(ref, value: float, count: int) -> None:
    """Sets the first `count` float32 of an array in shared memory; a block has at least `count` threads."""
    bits = int.from_bytes(np.float32(value).tobytes(), "little")

    def fill(ref):
        inside = compare("ult", utils.thread_idx(), constant(count))
        address = shared_address(ref, arith.muli(utils.thread_idx(), constant(4)))
        utils.inline_ptx(f"st.shared.b32 [$0], {bits};", address, predicate=inside, has_side_effects=True)

    emit(fill, ref)


def copy_to_cluster(source, target, start, count: int, blocks: int) -> None:
    """Copies `source[start : start + count]`, words in shared memory, to this place of `target` in all blocks of the cluster.

    A block has at least `count` threads. The words have arrived after a `cluster_barrier`.
    """
    stores = "".join(
        f" mapa.shared::cluster.u32 there, $1, {rank}; @is st.shared::cluster.b32 [there], word;" for rank in range(blocks)
    )
    ptx = f"{{ .reg .pred is; .reg .b32 word, there; setp.lt.u32 is, $2, {count}; @is ld.shared.b32 word, [$0];{stores} }}"

    def copy(source, target, start):
        offset = arith.muli(arith.addi(utils.thread_idx(), start), constant(4))
        places = (shared_address(ref, offset) for ref in (source, target))
        utils.inline_ptx(ptx, *places, utils.thread_idx(), has_side_effects=True)

    block_barrier()
    emit(copy, (source, target), [start])
