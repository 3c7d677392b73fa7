"""Building blocks that Pallas on Mosaic GPU lacks, in PTX, each once: barriers, counters, predicated loads and stores."""

import contextlib
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector
from jaxlib.mlir.dialects import math as math_dialect

from jaxsoftmax._core import compat
from jaxsoftmax._core.compat import utils

WARP = 32
WARPS = 4  # of a warpgroup

SPLAT = plgpu.Layout.WG_SPLAT(())
fragmented = compat.fragmented_array
integer = ir.IntegerType.get_signless
_SCALAR = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SPLAT)


def emit(
    make: Callable[..., Any], ref: Any = None, scalars: Sequence[Any] = (), arrays: Sequence[Any] = (), results: Any = None
) -> Any:
    """Puts MLIR and PTX into a kernel.

    Args:
      make: gets `ref` if there is one, or several, the MLIR values of `scalars`, and `arrays` of Mosaic GPU. It gives the
        registers of each of the results.
      ref: in shared or global memory, several in a tuple, or None.
      scalars: int32.
      arrays: pairs of an array and its layout.
      results: `plgpu.ShapeDtypeStruct`, one or a list.
    """
    refs = ref if isinstance(ref, tuple) else () if ref is None else (ref,)
    types = (*(plgpu.RefType() for _ in refs), *(SPLAT for _ in scalars), *(layout for _, layout in arrays))
    first, last = len(refs), len(refs) + len(scalars)

    @plgpu.inline_mgpu(arg_types=types, return_type=results)
    def inline(_, *given):
        made = make(*given[:first], *(scalar.registers.item() for scalar in given[first:last]), *given[last:])
        if results is None:
            return None
        made, kinds = (made, results) if isinstance(results, list) else ([made], [results])
        arrays = [
            fragmented(registers, kind.layout.to_mgpu(), kind.shape, utils.is_signed(kind.dtype))
            for registers, kind in zip(made, kinds, strict=True)
        ]
        return arrays if isinstance(results, list) else arrays[0]

    return inline(*refs, *map(_int32, scalars), *(array for array, _ in arrays))


def _int32(number):
    return number if isinstance(number, jax.Array) and number.dtype == jnp.int32 else jnp.int32(number)


def keep_loop() -> None:
    """In the body of a loop: ptxas must not unroll it, which would take registers that more blocks could have."""
    _barrier('.pragma "nounroll";')


def end_copies() -> None:
    """Ends a group of what this thread has copied with `Vector.copy` since the last one; it may be empty."""
    _barrier("cp.async.commit_group;")


def await_copies(but: int = 0) -> None:
    """Waits for what this thread has copied with `Vector.copy`, `but` for so many groups that it ended last."""
    _barrier(f"cp.async.wait_group {but};" if but else "cp.async.wait_all;")


def block_barrier() -> None:
    """Waits for all warpgroups of the block; what they wrote to shared memory is then visible."""
    _barrier("bar.sync 0;")


def widened(values: jax.Array, layout: Any) -> jax.Array:
    """bfloat16 values as float32, in one operation for each; where a word has two, `arith.extf` takes two for the second."""
    kind = plgpu.ShapeDtypeStruct(values.shape, jnp.float32, layout=layout)
    return emit(lambda values: list(map(widened_register, values.registers.flat)), arrays=[(values, layout)], results=kind)


def widened_register(register):
    """A vector of bfloat16, of an even size, as float32."""
    words = vector.bitcast(words_of(register.type), register)
    bits = llvm.mlir_undef(ir.VectorType.get((2 * words.type.shape[0],), integer(32)))
    for k in range(words.type.shape[0]):
        word = llvm.extractelement(words, constant(k))
        for q, half in enumerate((arith.shli(word, constant(16)), arith.andi(word, constant(-(2**16))))):
            bits = llvm.insertelement(bits, half, constant(2 * k + q))
    return vector.bitcast(ir.VectorType.get(register.type.shape, ir.F32Type.get()), bits)


def maximum(a: jax.Array, b: jax.Array, layout: Any) -> jax.Array:
    """The larger ones of 16-bit floats, or NaN, two in an operation."""

    def larger(given, other):
        registers = []
        for pair in zip(given.registers.flat, other.registers.flat, strict=True):
            own, others = (vector.bitcast(words_of(register.type), register) for register in pair)
            for k in range(own.type.shape[0]):
                word = larger_of_words(a.dtype, *(llvm.extractelement(part, constant(k)) for part in (own, others)))
                own = llvm.insertelement(own, word, constant(k))
            registers.append(vector.bitcast(pair[0].type, own))
        return registers

    return emit(larger, None, (), [(a, layout), (b, layout)], plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout))


def larger_of_words(dtype: Any, a, b):
    """The larger elements of two words, of floats NaN of sign 0 where one is NaN."""
    return utils.inline_ptx(f"max.{_MAXIMUM[jnp.dtype(dtype).name]} $0, $1, $2;", a, b, result_types=integer(32))


_MAXIMUM = {"float32": "NaN.f32", "bfloat16": "NaN.bf16x2", "float16": "NaN.f16x2", "int32": "s32", "uint32": "u32"}


def fma(a: jax.Array, b: jax.Array, c: jax.Array, layout: Any) -> jax.Array:
    """`a * b + c` of float32 arrays, rounded once."""

    def multiply_add(*arrays):
        return [math_dialect.fma(*registers) for registers in zip(*(array.registers.flat for array in arrays), strict=True)]

    kind = plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout)
    return emit(multiply_add, None, (), [(a, layout), (b, layout), (c, layout)], kind)


def plus_where(register, places, place, addend):
    """An MLIR vector of float32 with `addend` more where `places`, for each element an int32 plus a number, are `place`.

    `place` and `addend` are one for all, or one for each element. An addition with a predicate is one instruction,
    where a selection would be another.
    """
    total = llvm.mlir_undef(register.type)
    for q, (first, offset) in enumerate(places):
        at, more = (_element(value, q) for value in (place, addend))
        value = llvm.extractelement(register, constant(q))
        asm = f"{{ .reg .pred here; setp.eq.s32 here, $2, {offset}; mov.b32 $0, $1; @here add.f32 $0, $1, $3; }}"
        value = utils.inline_ptx(asm, value, arith.subi(at, first), more, result_types=value.type)
        total = llvm.insertelement(total, value, constant(q))
    return total


def _element(value, q: int):
    """Of a vector the q-th element, or the only one; else the value itself."""
    if not isinstance(value.type, ir.VectorType):
        return value
    return llvm.extractelement(value, constant(q if value.type.shape[0] > 1 else 0))


def prepare_pushes(barriers) -> None:
    """Says that this block has started and that its `barriers`, `[2, 2]` int32 in shared memory, are ready, without waiting."""

    def prepare(barriers):
        first = compare("eq", utils.thread_idx(), constant(0))
        for k in range(2):
            ptx = f"mbarrier.init.shared::cta.b64 [$0+{8 * k}], 1;"
            utils.inline_ptx(ptx, shared_address(barriers, constant(0)), predicate=first, has_side_effects=True)
        ptx = "fence.mbarrier_init.release.cluster; barrier.cluster.arrive.relaxed.aligned;"
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    emit(prepare, barriers)


def cluster_wait() -> None:
    """Waits until all blocks of the cluster have come to `prepare_pushes`: their shared memory is there from then on."""
    _barrier("barrier.cluster.wait.aligned;")


def await_pushes(barriers, round_: int, size: int) -> None:
    """Waits until `size` bytes were pushed to this block in a round: 0 the first time, 1 the second, and so on."""
    ptx = (
        "{ .reg .pred done; .reg .pred first; setp.eq.u32 first, $1, 0;"
        f" @first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};"
        f" again: mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], {round_ // 2 % 2}; @!done bra again; }}"
    )

    def wait(barriers):
        address = shared_address(barriers, constant(8 * (round_ % 2)))
        utils.inline_ptx(ptx, address, utils.thread_idx(), has_side_effects=True, convergent=True)

    emit(wait, barriers)


def _barrier(ptx: str, *scalars) -> None:
    emit(lambda *values: utils.inline_ptx(ptx, *values, has_side_effects=True, convergent=True), None, scalars)


def push_to_cluster(ref, index, values: jax.Array, layout: Any, blocks: int, barriers, round_: int) -> None:
    """Stores a float32 of each warp to `ref[index + warp]` in the shared memory of all blocks of the cluster.

    It does not wait: `await_pushes` of the round does, in the block that gets them. What a round has pushed must have been read
    where the round after the next one pushes there.

    Args:
      ref: one-dimensional, in shared memory, at the same address in all blocks.
      index: scalar int32, where this warpgroup's four values go.
      values: `[4]`, one for each warp of the warpgroup.
      layout: of `values`, in every lane of the warp.
      blocks: of the cluster, at most 16; one lane stores to each.
      barriers: of `prepare_pushes`.
      round_: of this block's pushes.
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


def push_rows_to_cluster(ref, index, values: jax.Array, layout, barriers, round_: int) -> None:
    """`push_to_cluster` of a float32 for each of a block's rows, to `ref[index * width :]`.

    `values` are `[4 * width]`, alike in all warps: the first one pushes. By `layout`, a `ColumnLayout`, several of its lanes
    have the same rows: they store to different blocks.
    """

    def push(ref, barriers, index, values):
        lane = utils.thread_idx()
        own = arith.muli(arith.remui(lane, constant(layout.lanes)), constant(layout.vector))
        place = arith.addi(arith.muli(index, constant(layout.width)), own)
        here = shared_address(ref, arith.muli(place, constant(4)))
        barrier = shared_address(barriers, constant(8 * (round_ % 2)))
        words = vector.bitcast(ir.VectorType.get((layout.vector,), integer(32)), values.registers.flat[0])
        copies, at_once = WARP // layout.lanes, min(4, layout.vector)
        for k in range(-(-layout.blocks // copies)):
            rank = arith.addi(arith.divui(lane, constant(layout.lanes)), constant(k * copies))
            rank = arith.select(compare("ult", lane, constant(WARP)), rank, constant(layout.blocks))
            for start in range(0, layout.vector, at_once):
                parts = [llvm.extractelement(words, constant(start + q)) for q in range(at_once)]
                kind, names = _list(integer(32), [f"${4 + q}" for q in range(at_once)]).split(" ", 1)
                ptx = (
                    "{ .reg .u32 there; .reg .u32 barrier; .reg .pred is; setp.lt.u32 is, $2, $3;"
                    " @is mapa.shared::cluster.u32 there, $0, $2; @is mapa.shared::cluster.u32 barrier, $1, $2;"
                    " @is st.async.shared::cluster.mbarrier::complete_tx::bytes."
                    f"{kind} [there+{4 * start}], {names}, [barrier]; }}"
                )
                utils.inline_ptx(ptx, here, barrier, rank, constant(layout.blocks), *parts, has_side_effects=True)

    emit(push, (ref, barriers), [index], [(values, layout.row_layout)])


@plgpu.inline_mgpu(arg_types=(SPLAT,))
def named_barrier_sync(_, barrier):
    """Waits until another warpgroup arrives at `barrier`, int32, the number of one of the hardware's 16."""
    utils.inline_ptx(f"bar.sync $0, {2 * WARPS * WARP};", barrier.registers.item(), has_side_effects=True, convergent=True)


@plgpu.inline_mgpu(arg_types=(SPLAT,))
def named_barrier_arrive(_, barrier):
    """Arrives at `barrier` for the warpgroup that waits there, or will, without waiting."""
    utils.inline_ptx(f"bar.arrive $0, {2 * WARPS * WARP};", barrier.registers.item(), has_side_effects=True, convergent=True)


def meeting(barrier: int, warpgroups: int) -> Any:
    """A function that waits for other warpgroups at `barrier`, the number of one of the hardware's 16.

    What they wrote to shared memory is then visible, to tensor cores and bulk copies too.
    """

    @plgpu.inline_mgpu()
    def meet(_):
        ptx = f"fence.proxy.async.shared::cta; bar.sync {barrier}, {warpgroups * WARPS * WARP};"
        utils.inline_ptx(ptx, has_side_effects=True, convergent=True)

    return meet


def await_count(ref, index, count) -> None:
    """Waits until `ref[index]`, int32 in global memory, is `count`; all that came before its `add_one` is then done."""
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
    """The address of an int32 entry of a line in global memory."""
    return arith.addi(address_of(ref), arith.muli(i64(index), i64(4)))


def take_ticket(counter, of_block: bool = False) -> jax.Array:
    """Adds 1 to the first entry of `counter`, int32 in global memory, by the first thread of the warpgroup, or of the block.

    Returns:
      What the entry was, in that thread alone; others hold 0. `store_scalars` tells them, or `tell`.
    """
    ptx = "{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }"

    def take(counter):
        operands = address_of(counter), utils.thread_idx() if of_block else thread()
        return [utils.inline_ptx(ptx, *operands, result_types=integer(32), has_side_effects=True)]

    return emit(take, counter, results=_SCALAR)


def add_one_of_block(counters, index, told) -> jax.Array:
    """Adds 1 to `counters[index]`, int32 in global memory; whoever adds later sees what the block has stored before.

    Returns:
      What it was, in all threads. `told` is an int32 in shared memory, which says it.
    """

    def add(counters, index):
        atom = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
        ptx = f"{{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0; @first {atom} }}"
        operands = _entry(counters, index), utils.thread_idx()
        return [utils.inline_ptx(ptx, *operands, result_types=integer(32), has_side_effects=True)]

    block_barrier()
    return tell(emit(add, counters, [index], results=_SCALAR), told)


def tell(value, told) -> jax.Array:
    """An int32 scalar of the first thread of the block, in all threads. `told` is one in shared memory, which says it."""

    def store(told, value):
        with utils.when(_is_first_thread()):
            utils.inline_ptx("st.shared.u32 [$0], $1;", shared_address(told, constant(0)), value, has_side_effects=True)

    emit(store, told, [value])
    block_barrier()
    value = told[0]
    block_barrier()
    return value


def store_by_first_thread(ref, index, value: jax.Array) -> None:
    """Stores a scalar to `ref[index]` in global memory, by the first thread: that of others may differ in the last bit."""

    def store(ref, index, value):
        register = value.registers.item()
        kind = ir.VectorType.get((1,), register.type)
        size = utils.bytewidth(register.type)
        address = arith.addi(address_of(ref), arith.muli(i64(index), i64(size)))
        Vector(address, 0, size, _is_first_thread()).store(vector.broadcast(kind, register))

    emit(store, ref, [index], [(value, SPLAT)])


def load_int(counters, index) -> jax.Array:
    """`counters[index]`, int32 in global memory that the block has stored before its last barrier, in all of its threads."""

    def load(counters, index):
        asm, kind = "ld.relaxed.gpu.global.u32 $0, [$1];", integer(32)
        return [utils.inline_ptx(asm, _entry(counters, index), result_types=kind, has_side_effects=True)]

    return emit(load, counters, [index], results=_SCALAR)


def publish_pair(pairs, index, values: Sequence[jax.Array], scope: str = "gpu") -> None:
    """Stores two float32 scalars, not both 0, to the int32 `pairs[index : index + 2]` in global memory, at once.

    The memory may be that of another device, with the scope "sys".
    """

    def store(pairs, index, *values):
        ptx = (
            "{ .reg .pred first; .reg .b64 pair; setp.eq.u32 first, $3, 0; mov.b64 pair, {$1, $2};"
            f" @first st.relaxed.{scope}.global.b64 [$0], pair; }}"
        )
        operands = [value.registers.item() for value in values]
        utils.inline_ptx(ptx, _entry(pairs, index), *operands, utils.thread_idx(), has_side_effects=True)

    emit(store, pairs, [index], [(value, SPLAT) for value in values])


def await_pairs(pairs, index, count, most: int, threads: int, tickets, patience: int, scope: str = "gpu") -> list[jax.Array]:
    """Waits until all pairs at `pairs[index : index + 2 * count]` are stored, int32 in global memory that was 0.

    It gives up after `patience` nanoseconds, unless as many as `tickets`, counted in the first entry, are taken by then:
    whoever took one stores its pair without waiting. Where `tickets` is 0 it never gives up. The scope is that of the stores.

    Returns:
      1, or 0 if one is missing, an int32 in all threads of the block. If it is 1, the first ones of all pairs, and the second
      ones, `of_warps`: a thread of the `threads` of the block has as many as it had of `most`, with -inf and 0 for those
      that are none. Neighbouring lanes have neighbours, so that a warp touches few lines.
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
        complete, *found = utils.inline_ptx(ptx, *operands, result_types=kinds, has_side_effects=True, convergent=True)
        vectors = []
        for part in range(2):
            values = llvm.mlir_undef(ir.VectorType.get((each,), ir.F32Type.get()))
            for q in places:
                values = llvm.insertelement(values, found[2 * q + part], constant(q))
            vectors.append([values])
        return [[complete], *vectors]

    kind = plgpu.ShapeDtypeStruct((WARPS, each * WARP), jnp.float32, layout=of_warps(each))
    return emit(wait, pairs, [index, count, tickets], results=[_SCALAR, kind, kind])


def await_row(counters, row, count: int, tickets: int, patience: int, told) -> jax.Array:
    """Waits until `counters[1 + row]` is `count`; all that came before what added to it is then visible to the block.

    It gives up after `patience` nanoseconds, unless all `tickets` of each row up to this one are taken by then: whoever took
    one adds to the counter without waiting.

    Returns:
      1, or 0 if it is not, an int32 in all threads. `told` is one in shared memory, which says it.
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

    return tell(emit(wait, counters, [row], results=_SCALAR), told)


def _is_first_thread():
    return compare("eq", utils.thread_idx(), constant(0))


def unknown(value: int) -> jax.Array:
    """An int32 of which compilers do not know that it is `value`: a loop of so many iterations is not unrolled for it."""
    asm = f"mov.b32 $0, {value};"
    return emit(lambda: [utils.inline_ptx(asm, result_types=integer(32), has_side_effects=True)], results=_SCALAR)


def of_first_lane(value: jax.Array) -> jax.Array:
    """A scalar int32 as the first lane of the warp holds it, in all lanes."""

    def broadcast(value):
        return [nvvm.shfl_sync(constant(-1), value, constant(0), constant(WARP - 1), nvvm.ShflKind.idx)]

    return emit(broadcast, None, [value], results=_SCALAR)


def store_scalars(ref, index, values: Sequence[jax.Array]) -> None:
    """Stores int32 scalars to the first entries of `ref[index]`, in shared memory; one thread of the warpgroup does."""

    def store(ref, index, *values):
        address = _shared_address(ref, index)
        with utils.when(compare("eq", thread(), constant(0))):
            for k, value in enumerate(values):
                utils.inline_ptx(f"st.shared.u32 [$0+{4 * k}], $1;", address, value, has_side_effects=True)

    emit(store, ref, [index, *values])


def load_scalars(ref, index) -> list[jax.Array]:
    """The int32 scalars in `ref[index]`, in shared memory, for a single warp too, which Pallas does not let read them."""
    asm = [f"ld.shared.u32 $0, [$1+{4 * k}];" for k in range(ref.shape[1])]

    def load(ref, index):
        address = _shared_address(ref, index)
        return [[utils.inline_ptx(ptx, address, result_types=integer(32), has_side_effects=True)] for ptx in asm]

    return emit(load, ref, [index], results=[_SCALAR] * len(asm))


def thread():
    """The index of a thread in its warpgroup."""
    return arith.remui(utils.thread_idx(), constant(WARPS * WARP))


def _shared_address(ref, index):
    """Where `ref[index]`, of int32, is in shared memory."""
    return shared_address(ref, arith.muli(index, constant(4 * ref.type.shape[1])))


def shared_address(ref, offset):
    """Where the byte `offset`, an int32 MLIR value, of an array is in shared memory."""
    return arith.addi(llvm.ptrtoint(integer(32), utils.memref_ptr(ref)), offset)


@functools.cache
def tiled(tiles, warp_dims, lane_dims, vector_dim=-1) -> Any:
    """A tiled layout in the canonical form that Mosaic GPU compares layouts in."""
    layout = compat.tiled_layout(plgpu.Tiling(tiles), warp_dims, lane_dims, vector_dim)
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


@functools.cache
def replicated(size: int) -> Any:
    """The layout of values, a power of two, all of which each warp holds: a lane one of up to 32, or a vector of more."""
    copies = max(1, WARP // size)
    lanes = (-2,) if copies == 1 else (plgpu.Replicated(copies), -2)
    return tiled(((size,), (max(1, size // WARP),)), (plgpu.Replicated(WARPS),), lanes)


def of_warps(each: int) -> Any:
    """The layout of `[4, 32 * each]` values: each lane of the four warps of a warpgroup has so many of a row."""
    return tiled(((WARPS, WARP * each), (1, WARP * each), (each,)), (-5,), (-3, -2))


@functools.cache
def of_threads() -> Any:
    """The layout of a value for each thread of a warpgroup, `[4, 32]`."""
    return tiled(((WARPS, WARP), (1, WARP), (1,)), (-5,), (-3, -2))


def gather(kind, itemsize, addresses, offsets, inside, bits=0, policy=None, space="global"):
    """A vector of type `kind` of elements from several places, those of `bits` where one is not inside."""
    one = ir.VectorType.get((1,), integer(8 * itemsize))
    gathered = llvm.mlir_undef(ir.VectorType.get((len(inside),), one.element_type))
    for q, (address, offset, own) in enumerate(zip(addresses, offsets, inside, strict=True)):
        loaded = load_words(address, offset, own, one, bits, policy, space)
        gathered = llvm.insertelement(gathered, llvm.extractelement(loaded, constant(0)), constant(q))
    return vector.bitcast(kind, gathered)


@dataclass(frozen=True)
class Vector:
    """Consecutive elements in global memory, those of a register.

    Attributes:
      address: an int64 MLIR value.
      offset: bytes from there to the first element, a constant that becomes a part of the instruction.
      itemsize: bytes of an element.
      inside: whether to touch all of it; None if always.
      partial: whether to touch a part of it; None if never.
      own: makes, for each element, whether it is of that part.
    """

    address: ir.Value
    offset: int
    itemsize: int
    inside: ir.Value | None
    partial: ir.Value | None = None
    own: Callable[[], Sequence[Any]] = tuple

    def load(self, register, bits=0, policy=None):
        """A register of type `register`, with `bits` in each of its words where nothing is to be touched."""
        words = words_of(register)
        if self.partial is None:
            return vector.bitcast(register, load_words(self.address, self.offset, self.inside, words, bits, policy))
        branch: Any = scf.IfOp(self.partial, [words], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            own = self.own()
            scf.yield_([gather(words, self.itemsize, [self.address] * len(own), self._offsets(own), own, bits, policy)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([load_words(self.address, self.offset, self.inside, words, bits, policy)])
        return vector.bitcast(register, branch.results[0])

    def among_others(self, last):
        """This, touched as a whole where a part is to be touched and it does not start behind `last`, an address."""
        if self.partial is None:
            return self
        whole: Any = self.inside  # which is there, if a part may be to be touched
        start = arith.addi(self.address, i64(self.offset))
        whole = arith.ori(whole, arith.andi(self.partial, compare("ule", start, last)))
        return replace(self, inside=whole, partial=arith.andi(self.partial, compare("ugt", start, last)))

    def fill_around(self, register, target, offset, bits):
        """Sets to `bits` what is there and was copied along with a part."""
        if self.partial is None:
            return
        words = words_of(register)
        with utils.when(self.partial):
            found = vector.bitcast(register, load_words(target, offset, None, words, space="shared"))
            fill = vector.bitcast(register, vector.broadcast(words, constant(bits)))
            for q, own in enumerate(self.own()):
                value = arith.select(own, *(llvm.extractelement(part, constant(q)) for part in (found, fill)))
                found = llvm.insertelement(found, value, constant(q))
            store_words(target, offset, None, vector.bitcast(words, found), "shared")

    def copy(self, register, target, offset):
        """Starts a copy to `target + offset` in shared memory, an int32 and a constant, if all of it is to be touched.

        It arrives after `await_copies`, in the thread that copied it.
        """
        if (size := self._size(register)) >= 4:
            ptx = f"cp.async.{'cg' if size == 16 else 'ca'}.shared.global [$0+{offset}], [$1+{self.offset}], {size};"
            utils.inline_ptx(ptx, target, self.address, predicate=self.inside, has_side_effects=True)

    def copy_rest(self, register, target, offset, bits):
        """Stores there what `copy` leaves: the part that is to be touched if that is not all, and `bits` around it."""
        is_left: Any = contextlib.nullcontext()
        if self._size(register) >= 4:
            if self.inside is None:
                return
            is_left = utils.when(arith.xori(self.inside, utils.c(1, integer(1))))
        with is_left:
            words = vector.bitcast(words_of(register), self.load(register, bits))
            store_words(target, offset, None, words, "shared")

    def _size(self, register):
        return math.prod(register.shape) * self.itemsize

    def touched(self, register):
        """A register of int8: 1 for the elements that are to be touched, 0 for the others."""
        ones, zeros = utils.c(1, register), utils.c(0, register)
        if self.partial is not None:
            for q, own in enumerate(self.own()):
                zeros = llvm.insertelement(zeros, arith.extui(register.element_type, own), constant(q))
            return zeros
        return ones if self.inside is None else arith.select(self.inside, ones, zeros)

    def store(self, register):
        """Stores a register."""
        store_words(self.address, self.offset, self.inside, vector.bitcast(words_of(register.type), register))
        if self.partial is None:
            return
        with utils.when(self.partial):
            kind, owned = integer(8 * self.itemsize), self.own()
            values = vector.bitcast(ir.VectorType.get((len(owned),), kind), register)
            for q, (offset, own) in enumerate(zip(self._offsets(owned), owned, strict=True)):
                one = llvm.mlir_undef(ir.VectorType.get((1,), kind))
                one = llvm.insertelement(one, llvm.extractelement(values, constant(q)), constant(0))
                store_words(self.address, offset, own, one)

    def _offsets(self, own):
        return [self.offset + q * self.itemsize for q in range(len(own))]


def load_words(address, offset, inside, words, bits=0, policy=None, space="global"):
    """A vector `words` from global memory, or another state space, or `bits` in each word; `policy` is the L2 cache's."""
    word = words.element_type
    held = integer(max(16, word.width))  # PTX has no registers of 8 bits
    loaded = llvm.mlir_undef(words)
    for first in range(0, words.shape[0], 4):
        count = min(4, words.shape[0] - first)
        results = [f"${k}" for k in range(count)]
        operands, hint, use = [address], "", ""
        if policy is not None:
            operands.append(policy)
            hint, use = "L2::cache_hint.", f", ${count + 1}"
        place = offset + first * word.width // 8
        ptx = f"ld.{space}.{hint}{_list(word, results)}, [${count}+{place}]{use};"
        if inside is not None:
            fills = " ".join(f"mov.b{held.width} {result}, {bits % 2**held.width};" for result in results)
            ptx = f"{fills} @${count + len(operands)} {ptx}"
            operands.append(inside)
        found = utils.inline_ptx(ptx, *operands, result_types=[held] * count, has_side_effects=True)
        for k, value in enumerate(found, first):
            value = value if held == word else arith.trunci(word, value)
            loaded = llvm.insertelement(loaded, value, constant(k))
    return loaded


def store_words(address, offset, inside, words, space="global"):
    """Stores a vector of words to global memory, or to another state space of PTX."""
    word = words.type.element_type
    for first in range(0, words.type.shape[0], 4):
        count = min(4, words.type.shape[0] - first)
        values = [llvm.extractelement(words, constant(first + k)) for k in range(count)]
        kind, names = _list(word, [f"${k + 1}" for k in range(count)]).split(" ", 1)
        ptx = f"st.{space}.{kind} [$0+{offset + first * word.width // 8}], {names};"
        utils.inline_ptx(ptx, address, *values, predicate=inside, has_side_effects=True)


def words_of(register):
    """The type in which PTX moves a vector of type `register`: words of 32 bits, or one of 16 or 8."""
    bits = math.prod(register.shape) * utils.bitwidth(register.element_type)
    width = min(32, bits)
    return ir.VectorType.get((bits // width,), integer(width))


def _list(word, names: list[str]) -> str:
    """The type and the operands of a load or store of several words: `v4.b32 {$0, $1, $2, $3}`."""
    kind = f"b{word.width}"
    return f"{kind} {names[0]}" if len(names) == 1 else f"v{len(names)}.{kind} {{{', '.join(names)}}}"


def address_of(ref):
    return llvm.ptrtoint(integer(64), utils.memref_ptr(ref))


def constant(value: int) -> Any:
    """An int32 MLIR constant."""
    return utils.c(value, integer(32))


def i64(value):
    return utils.c(value, integer(64)) if isinstance(value, int) else arith.extui(integer(64), value)


def compare(kind: str, a, b):
    return arith.cmpi(getattr(arith.CmpIPredicate, kind), a, b)


def both(a, b):
    return b if a is None else a if b is None else arith.andi(a, b)


def before_row(first, step, width: int):
    """How many elements lie from a thread's first one in a step, at column `first`, to the row's start; negative inside."""
    return arith.subi(arith.muli(step, constant(width)), first)


def arrive_in_cluster() -> None:
    """Says that this block has started, and has done what came before, without waiting."""
    _barrier("barrier.cluster.arrive.release.aligned;")


def fill_shared(ref, value: float, count: int) -> None:
    """Sets the first `count` float32 of an array in shared memory, as many as a block has threads at most."""
    bits = int.from_bytes(np.float32(value).tobytes(), "little")

    def fill(ref):
        inside = compare("ult", utils.thread_idx(), constant(count))
        address = shared_address(ref, arith.muli(utils.thread_idx(), constant(4)))
        utils.inline_ptx(f"st.shared.b32 [$0], {bits};", address, predicate=inside, has_side_effects=True)

    emit(fill, ref)


def copy_to_cluster(source, target, start, count: int, blocks: int) -> None:
    """Copies `source[start : start + count]`, words in shared memory, to this place of `target` in all blocks of the cluster.

    They are as many as a block has threads at most. They are there after a `cluster_barrier`.
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


def cluster_barrier() -> None:
    """Waits for all threads of the cluster; what they wrote to shared memory, of whichever block, is then visible."""
    _barrier("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def product(a: jax.Array, b: int, layout: Any) -> tuple[jax.Array, jax.Array]:
    """The high and the low words of the products of a uint32 array and a number."""

    def multiply(a):
        (register,) = a.registers.flat
        wide = ir.VectorType.get(register.type.shape, integer(64))
        whole = arith.muli(arith.extui(wide, register), utils.c(b, wide))
        high = arith.shrui(whole, utils.c(32, wide))
        return [[arith.trunci(register.type, part)] for part in (high, whole)]

    kind = plgpu.ShapeDtypeStruct(a.shape, a.dtype, layout=layout)
    return tuple(emit(multiply, arrays=[(a, layout)], results=[kind, kind]))


def least_halves(words: Sequence[jax.Array], layout: Any) -> list[jax.Array]:
    """The least lower and the least upper 16-bit half of uint32 arrays at each place, as upper halves of words."""

    def find(*arrays):
        (kind,) = {array.registers.item().type for array in arrays}
        lower, upper = llvm.mlir_undef(kind), llvm.mlir_undef(kind)
        for q in range(kind.shape[0]):
            least, *others = [llvm.extractelement(array.registers.item(), constant(q)) for array in arrays]
            for other in others:  # two halves in an operation
                least = utils.inline_ptx("min.u16x2 $0, $1, $2;", least, other, result_types=integer(32))
            lower = llvm.insertelement(lower, arith.shli(least, constant(16)), constant(q))
            upper = llvm.insertelement(upper, arith.andi(least, constant(-(2**16))), constant(q))
        return [[lower], [upper]]

    kind = plgpu.ShapeDtypeStruct(words[0].shape, jnp.uint32, layout=layout)
    return emit(find, arrays=[(word, layout) for word in words], results=[kind] * 2)
