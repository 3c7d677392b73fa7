"""Blocks that tell each other through global memory: tickets, counters, and pairs of numbers that are published at once."""

from collections.abc import Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, vector

from jaxsoftmax._core.compat import utils
from jaxsoftmax._gpu.emit import (
    SCALAR,
    SPLAT,
    WARP,
    WARPS,
    Vector,
    address_of,
    compare,
    constant,
    emit,
    i64,
    integer,
    of_warps,
    shared_address,
    shared_word_address,
    thread,
)
from jaxsoftmax._gpu.sync import RECEIVED, SENT, block_barrier


def await_count(ref, index, count) -> None:
    """Waits until `ref[index]`, int32 in global memory, is `count`; what came before each `add_one` is then done."""
    ptx = (
        "{ .reg .pred differs; .reg .u32 found; again: ld.acquire.gpu.global.u32 found, [$0];"
        " setp.ne.u32 differs, found, $1; @differs bra again; } fence.proxy.async.global;"
    )

    def wait(ref, index, count):
        utils.inline_ptx(ptx, _entry(ref, index), count, has_side_effects=True, convergent=True)

    emit(wait, ref, [index, count])


def add_one(ref, index) -> None:
    """Adds 1 to `ref[index]`, int32 in global memory, after what the warp did before, which has waited for its bulk copies."""
    ptx = (
        "{ .reg .pred first; setp.eq.u32 first, $1, 0; fence.proxy.async.global;"
        " @first red.release.gpu.global.add.u32 [$0], 1; }"
    )

    def add(ref, index):
        utils.warp_barrier()
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        utils.inline_ptx(ptx, _entry(ref, index), lane, has_side_effects=True)

    emit(add, ref, [index])


def _entry(ref, index):
    """Returns the address of an int32 entry of a line in global memory."""
    return arith.addi(address_of(ref), arith.muli(i64(index), i64(4)))


def take_ticket(counter, of_block: bool = False) -> jax.Array:
    """Adds 1 to the first entry of `counter`, int32 in global memory, by the first thread of the warpgroup, or of the block.

    Returns:
      The entry before, in that thread alone; others hold 0. `store_scalars` or `tell` tells them.
    """
    ptx = "{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }"

    def take(counter):
        operands = address_of(counter), utils.thread_idx() if of_block else thread()
        return [utils.inline_ptx(ptx, *operands, result_types=integer(32), has_side_effects=True)]

    return emit(take, counter, results=SCALAR)


def add_one_of_block(counters, index, told) -> jax.Array:
    """Adds 1 to `counters[index]`, int32 in global memory; whoever adds later sees what the block has stored before.

    Returns:
      The entry before, in all threads. `told` is an int32 in shared memory through which they learn it.
    """

    def add(counters, index):
        atom = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
        ptx = f"{{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0; @first {atom} }}"
        operands = _entry(counters, index), utils.thread_idx()
        return [utils.inline_ptx(ptx, *operands, result_types=integer(32), has_side_effects=True)]

    block_barrier()
    return tell(emit(add, counters, [index], results=SCALAR), told)


def tell(value, told) -> jax.Array:
    """Returns, in all threads of the block, an int32 of the first one. They learn it through `told` in shared memory."""

    def store(told, value):
        with utils.when(_is_first_thread()):
            utils.inline_ptx("st.shared.u32 [$0], $1;", shared_address(told, constant(0)), value, has_side_effects=True)

    emit(store, told, [value])
    block_barrier()
    value = told[0]
    block_barrier()
    return value


def store_by_first_thread(ref, index, value: jax.Array) -> None:
    """Stores the first thread's scalar to `ref[index]` in global memory: other threads' may differ in the last bit."""

    def store(ref, index, value):
        register = value.registers.item()
        kind = ir.VectorType.get((1,), register.type)
        size = utils.bytewidth(register.type)
        address = arith.addi(address_of(ref), arith.muli(i64(index), i64(size)))
        Vector(address, 0, size, _is_first_thread()).store(vector.broadcast(kind, register))

    emit(store, ref, [index], [(value, SPLAT)])


def load_int(counters, index) -> jax.Array:
    """Loads `counters[index]`, int32 in global memory that the block stored before its last barrier, in all threads."""

    def load(counters, index):
        asm, kind = "ld.relaxed.gpu.global.u32 $0, [$1];", integer(32)
        return [utils.inline_ptx(asm, _entry(counters, index), result_types=kind, has_side_effects=True)]

    return emit(load, counters, [index], results=SCALAR)


def publish_pair(pairs, index, values: Sequence[jax.Array], scope: str = "gpu") -> None:
    """Stores two float32 scalars, not both 0, to the int32 `pairs[index : index + 2]` in global memory, at once.

    The memory may be that of another device, with the scope "sys".
    """

    def store(pairs, index, *values):
        # One store of both numbers needs no fence. A counter needs one, which waits until the block's results are
        # stored: that cost a tenth of the time (H200).
        ptx = (
            "{ .reg .pred first; .reg .b64 pair; setp.eq.u32 first, $3, 0; mov.b64 pair, {$1, $2};"
            f" @first st.relaxed.{scope}.global.b64 [$0], pair; }}"
        )
        operands = [value.registers.item() for value in values]
        utils.inline_ptx(ptx, _entry(pairs, index), *operands, utils.thread_idx(), has_side_effects=True)

    emit(store, pairs, [index], [(value, SPLAT) for value in values])


def await_pairs(pairs, index, count, most: int, threads: int, tickets, patience: int, scope: str = "gpu") -> list[jax.Array]:
    """Waits until all pairs at `pairs[index : index + 2 * count]` are stored, int32 in global memory that was 0.

    It gives up after `patience` nanoseconds, unless `tickets` tickets, counted in the first entry, are taken by then: a block
    that took one stores its pair without waiting. With 0 tickets it never gives up. The scope is that of the stores.

    Returns:
      1, or 0 if a pair is missing, an int32 in all threads of the block. If it is 1, the first and the second numbers of all
      pairs, in the layout `of_warps`: each of the `threads` threads has its share of `most` pairs, with -inf and 0 beyond
      `count`. Neighbouring lanes have neighbours, so that a warp touches few lines.
    """
    each = 1 << (-(-most // threads) - 1).bit_length()
    bits = int.from_bytes(np.float32(-np.inf).tobytes(), "little")
    places = range(each)
    address, left, counter, end = (f"${1 + 2 * each + k}" for k in range(4))
    names = "".join(f" .reg .b64 pair{q};" for q in places)
    starts = "".join(f" setp.gt.s32 is, {left}, {q * threads}; selp.b64 pair{q}, 0, {bits}, is;" for q in places)
    loads = "".join(  # what is there is not loaded again: all blocks of a row load the same lines
        f" setp.eq.b64 is, pair{q}, 0; @is ld.relaxed.{scope}.global.b64 pair{q}, [{address}+{8 * threads * q}];"
        for q in places
    )
    tests = "".join(f" setp.ne.and.b64 all, pair{q}, 0, all;" for q in places)
    parts = "".join(f" mov.b64 {{${1 + 2 * q}, ${2 + 2 * q}}}, pair{q};" for q in places)
    ptx = (
        f"{{ .reg .pred is; .reg .pred all; .reg .u32 found; .reg .u64 start; .reg .u64 now;{names}{starts}"
        f" mov.u64 start, %globaltimer; again:{loads} setp.eq.u32 all, 0, 0;{tests}"
        " vote.sync.all.pred all, all, 0xffffffff; @all bra ready; mov.u64 now, %globaltimer; sub.u64 now, now, start;"
        f" setp.lt.u64 is, now, {patience}; vote.sync.all.pred is, is, 0xffffffff; @is bra again;"
        f" ld.relaxed.gpu.global.u32 found, [{counter}]; setp.ge.u32 is, found, {end};"
        " vote.sync.any.pred is, is, 0xffffffff; @is bra again;"
        f" ready:{parts} bar.red.and.pred all, 0, all; selp.u32 $0, 1, 0, all; }}"
    )

    def wait(pairs, index, count, tickets):
        thread = utils.thread_idx()
        place = arith.addi(_entry(pairs, index), arith.muli(i64(thread), i64(8)))
        operands = place, arith.subi(count, thread), address_of(pairs), tickets
        kinds = [integer(32), *[ir.F32Type.get()] * (2 * each)]
        complete, *numbers = utils.inline_ptx(ptx, *operands, result_types=kinds, has_side_effects=True, convergent=True)
        vectors = []
        for part in range(2):
            values = llvm.mlir_undef(ir.VectorType.get((each,), ir.F32Type.get()))
            for q in places:
                values = llvm.insertelement(values, numbers[2 * q + part], constant(q))
            vectors.append([values])
        return [[complete], *vectors]

    kind = plgpu.ShapeDtypeStruct((WARPS, each * WARP), jnp.float32, layout=of_warps(each))
    return emit(wait, pairs, [index, count, tickets], results=[SCALAR, kind, kind])


def await_row(counters, row, count: int, tickets: int, patience: int, told) -> jax.Array:
    """Waits until `counters[1 + row]` is `count`; what came before each addition is then visible to the block.

    It gives up after `patience` nanoseconds, unless all `tickets` of each row up to this one are taken by then: a block that
    took one adds to the counter without waiting.

    Returns:
      1, or 0 if it is not, an int32 in all threads. They learn it through `told`, an int32 in shared memory.
    """
    ptx = (
        "{ .reg .pred is; .reg .u32 found; .reg .u64 start; .reg .u64 now; mov.u32 $0, 0;"
        " setp.ne.u32 is, $4, 0; @is bra ready; mov.u64 start, %globaltimer;"
        f" again: ld.acquire.gpu.global.u32 found, [$1+4]; setp.eq.u32 is, found, {count}; mov.u32 $0, 1; @is bra ready;"
        f" mov.u64 now, %globaltimer; sub.u64 now, now, start; setp.lt.u64 is, now, {patience}; @is bra again;"
        " mov.u32 $0, 0; ld.relaxed.gpu.global.u32 found, [$2]; setp.ge.u32 is, found, $3; @is bra again; ready: }"
    )

    def wait(counters, row):
        end = arith.muli(arith.addi(row, constant(1)), constant(tickets))
        operands = _entry(counters, row), address_of(counters), end, utils.thread_idx()
        return [utils.inline_ptx(ptx, *operands, result_types=integer(32), has_side_effects=True)]

    return tell(emit(wait, counters, [row], results=SCALAR), told)


def await_received(barriers, number) -> None:
    """Waits until the second block of a cluster of two has received the value before the last one, `number - 2`.

    All warps must have come back from here before `send_to_peer` sends: one that looked later might see the barrier two values
    further, and wait for ever.
    """
    ptx = (
        "{ .reg .pred is; setp.lt.u32 is, $2, 2; @is bra free; again:"
        f" mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is, [$0+{RECEIVED - SENT}], $1; @!is bra again; free: }}"
    )

    def wait(barriers, number):
        barrier, parity = _barrier_of_peer(barriers, number)
        operands = barrier, arith.xori(parity, constant(1)), number
        utils.inline_ptx(ptx, *operands, has_side_effects=True, convergent=True)

    emit(wait, barriers, [number])


def send_to_peer(ref, row: int, value: jax.Array, barriers, number) -> None:
    """Stores an int32 to `ref[row + stage, 0]` in the second block of a cluster of two, which gets it by `receive_from_peer`.

    `await_received` comes before.

    Args:
      ref: `[rows, columns]` int32 in shared memory, at the same address in both blocks.
      row: first of two rows.
      value: value of the first thread of the warpgroup.
      barriers: `sync.BARRIERS_OF_PEERS` barriers of `sync.prepare_exchange`.
      number: number of the value, from 0 on. The stage is its remainder by 2.
    """
    ptx = (
        "{ .reg .pred first; .reg .u32 there, barrier; setp.eq.u32 first, $3, 0;"
        " mapa.shared::cluster.u32 there, $0, 1; mapa.shared::cluster.u32 barrier, $2, 1;"
        " @first st.async.shared::cluster.mbarrier::complete_tx::bytes.b32 [there], $1, [barrier]; }"
    )

    def send(ref, barriers, value, number):
        barrier, _ = _barrier_of_peer(barriers, number)
        utils.inline_ptx(ptx, _place_of_peer(ref, row, number), value, barrier, thread(), has_side_effects=True)

    emit(send, (ref, barriers), [value, number])


def receive_from_peer(ref, row: int, barriers, number) -> jax.Array:
    """Returns, in all threads, what the first block of a cluster has sent by `send_to_peer`, whose arguments these are.

    `say_received` must follow, when all warps have it.
    """
    ptx = (
        "{ .reg .pred is; setp.eq.u32 is, $3, 0; @is mbarrier.arrive.expect_tx.shared::cta.b64 _, [$2], 4;"
        " again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 is, [$2], $4; @!is bra again;"
        " ld.shared.u32 $0, [$1]; }"
    )

    def receive(ref, barriers, number):
        barrier, parity = _barrier_of_peer(barriers, number)
        operands = _place_of_peer(ref, row, number), barrier, thread(), parity
        return [utils.inline_ptx(ptx, *operands, result_types=integer(32), has_side_effects=True, convergent=True)]

    return emit(receive, (ref, barriers), [number], results=SCALAR)


def say_received(barriers, number) -> None:
    """Tells the first block of a cluster of two that the second one has received a value."""
    ptx = (
        "{ .reg .pred first; .reg .u32 barrier; setp.eq.u32 first, $1, 0; mapa.shared::cluster.u32 barrier, $0, 0;"
        f" @first mbarrier.arrive.release.cluster.shared::cluster.b64 _, [barrier+{RECEIVED - SENT}]; }}"
    )

    def say(barriers, number):
        utils.inline_ptx(ptx, _barrier_of_peer(barriers, number)[0], thread(), has_side_effects=True)

    emit(say, barriers, [number])


def _place_of_peer(ref, row, number):
    """Returns the address of a value that blocks of a cluster pass."""
    return shared_word_address(ref, arith.addi(arith.remui(number, constant(2)), constant(row)))


def _barrier_of_peer(barriers, number):
    """Returns the address of the barrier of a value that blocks of a cluster pass, and its parity."""
    barrier = shared_address(barriers, arith.addi(constant(SENT), arith.muli(arith.remui(number, constant(2)), constant(8))))
    return barrier, arith.remui(arith.divui(number, constant(2)), constant(2))


def _is_first_thread():
    return compare("eq", utils.thread_idx(), constant(0))


def of_first_lane(value: jax.Array) -> jax.Array:
    """Returns, in all lanes of a warp, a scalar int32 of the first lane."""

    def broadcast(value):
        return [nvvm.shfl_sync(constant(-1), value, constant(0), constant(WARP - 1), nvvm.ShflKind.idx)]

    return emit(broadcast, None, [value], results=SCALAR)


def store_scalars(ref, index, values: Sequence[jax.Array]) -> None:
    """Stores int32 scalars to the first entries of `ref[index]`, in shared memory; one thread of the warpgroup does."""

    def store(ref, index, *values):
        address = shared_word_address(ref, index)
        with utils.when(compare("eq", thread(), constant(0))):
            for k, value in enumerate(values):
                utils.inline_ptx(f"st.shared.u32 [$0+{4 * k}], $1;", address, value, has_side_effects=True)

    emit(store, ref, [index, *values])


def load_scalars(ref, index) -> list[jax.Array]:
    """Loads the int32 scalars in `ref[index]`, in shared memory, also in a single warp, where Pallas does not load them."""
    asm = [f"ld.shared.u32 $0, [$1+{4 * k}];" for k in range(ref.shape[1])]

    def load(ref, index):
        address = shared_word_address(ref, index)
        return [[utils.inline_ptx(ptx, address, result_types=integer(32), has_side_effects=True)] for ptx in asm]

    return emit(load, ref, [index], results=[SCALAR] * len(asm))
