"""Building blocks that Pallas on Mosaic GPU lacks, in PTX, each once: barriers, counters, predicated loads and stores."""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, nvvm, scf, vector

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
      make: gets `ref` if there is one, the MLIR values of `scalars`, and `arrays` of Mosaic GPU. It gives the registers of each
        of the results.
      ref: in shared or global memory, or None.
      scalars: int32.
      arrays: pairs of an array and its layout.
      results: `plgpu.ShapeDtypeStruct`, one or a list.
    """
    refs = () if ref is None else (ref,)
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

    return inline(*refs, *map(jnp.int32, scalars), *(array for array, _ in arrays))


def block_barrier() -> None:
    """Waits for all warpgroups of the block; what they wrote to shared memory is then visible."""
    _barrier("bar.sync 0;")


def cluster_arrive() -> None:
    """Says that this block has started, without waiting: first half of what must precede `push_to_cluster`."""
    _barrier("barrier.cluster.arrive.relaxed.aligned;")


def cluster_wait() -> None:
    """Waits until all blocks of the cluster have arrived: their shared memory is there from then on."""
    _barrier("barrier.cluster.wait.aligned;")


def cluster_barrier() -> None:
    """Waits for all blocks of the cluster; what they wrote to shared memory, also to that of others, is then visible."""
    _barrier("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned;")


def _barrier(ptx: str, *scalars) -> None:
    emit(lambda *values: utils.inline_ptx(ptx, *values, has_side_effects=True, convergent=True), None, scalars)


def push_to_cluster(ref, index, values: jax.Array, layout: Any, blocks: int) -> None:
    """Stores a float32 of each warp to `ref[index + warp]` in the shared memory of all blocks of the cluster.

    Args:
      ref: one-dimensional, in shared memory, at the same address in all blocks.
      index: scalar int32, where this warpgroup's four values go.
      values: `[4]`, one for each warp of the warpgroup.
      layout: of `values`, in every lane of the warp.
      blocks: of the cluster, at most 16; one lane stores to each.
    """

    def push(ref, index, values):
        lane = arith.remui(utils.thread_idx(), constant(WARP))
        warp = arith.remui(arith.divui(utils.thread_idx(), constant(WARP)), constant(WARPS))
        entry = arith.muli(arith.addi(index, warp), constant(4))
        here = arith.addi(llvm.ptrtoint(integer(32), utils.memref_ptr(ref)), entry)
        rank = arith.remui(lane, constant(blocks))
        there = utils.inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", here, rank, result_types=integer(32))
        value = llvm.extractelement(values.registers.flat[0], constant(0))
        one_each = compare("ult", lane, constant(blocks))
        utils.inline_ptx("st.shared::cluster.f32 [$0], $1;", there, value, predicate=one_each, has_side_effects=True)

    emit(push, ref, [index], [(values, layout)])


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


def take_ticket(counter) -> jax.Array:
    """Adds 1 to the first entry of `counter`, int32 in global memory, by the first thread of the warpgroup.

    Returns:
      What the entry was, in that thread alone; others hold 0. `store_scalars` tells them.
    """
    ptx = "{ .reg .pred first; setp.eq.u32 first, $2, 0; mov.b32 $0, 0; @first atom.global.add.u32 $0, [$1], 1; }"

    def take(counter):
        return [utils.inline_ptx(ptx, address_of(counter), thread(), result_types=integer(32), has_side_effects=True)]

    return emit(take, counter, results=_SCALAR)


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
    base = llvm.ptrtoint(integer(32), utils.memref_ptr(ref))
    return arith.addi(base, arith.muli(index, constant(4 * ref.type.shape[1])))


@functools.cache
def tiled(tiles, warp_dims, lane_dims) -> Any:
    """A tiled layout whose last axis is the vector, in the canonical form that Mosaic GPU compares layouts in."""
    layout = compat.tiled_layout(plgpu.Tiling(tiles), warp_dims, lane_dims, -1)
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


@functools.cache
def replicated(size: int) -> Any:
    """The layout of values, a power of two, all of which each warp holds: a lane one of up to 32, or a vector of more."""
    copies = max(1, WARP // size)
    lanes = (-2,) if copies == 1 else (plgpu.Replicated(copies), -2)
    return tiled(((size,), (max(1, size // WARP),)), (plgpu.Replicated(WARPS),), lanes)


def gather(kind, itemsize, addresses, offsets, inside, bits=0, policy=None):
    """A vector of type `kind` of elements from several places, those of `bits` where one is not inside."""
    one = ir.VectorType.get((1,), integer(8 * itemsize))
    gathered = llvm.mlir_undef(ir.VectorType.get((len(inside),), one.element_type))
    for q, (address, offset, own) in enumerate(zip(addresses, offsets, inside, strict=True)):
        loaded = load_words(address, offset, own, one, bits, policy)
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
      own: for each element, whether it is of that part.
    """

    address: ir.Value
    offset: int
    itemsize: int
    inside: ir.Value | None
    partial: ir.Value | None = None
    own: Sequence[Any] = ()

    def load(self, register, bits=0, policy=None):
        """A register of type `register`, with `bits` in each of its words where nothing is to be touched."""
        words = words_of(register)
        if self.partial is None:
            return vector.bitcast(register, load_words(self.address, self.offset, self.inside, words, bits, policy))
        branch: Any = scf.IfOp(self.partial, [words], has_else=True)
        with ir.InsertionPoint(branch.then_block):
            count = len(self.own)
            scf.yield_([gather(words, self.itemsize, [self.address] * count, self._offsets(), self.own, bits, policy)])
        with ir.InsertionPoint(branch.else_block):
            scf.yield_([load_words(self.address, self.offset, self.inside, words, bits, policy)])
        return vector.bitcast(register, branch.results[0])

    def touched(self, register):
        """A register of int8: 1 for the elements that are to be touched, 0 for the others."""
        ones, zeros = utils.c(1, register), utils.c(0, register)
        if self.partial is not None:
            for q, own in enumerate(self.own):
                zeros = llvm.insertelement(zeros, arith.extui(register.element_type, own), constant(q))
            return zeros
        return ones if self.inside is None else arith.select(self.inside, ones, zeros)

    def store(self, register):
        """Stores a register."""
        store_words(self.address, self.offset, self.inside, vector.bitcast(words_of(register.type), register))
        if self.partial is None:
            return
        with utils.when(self.partial):
            kind = integer(8 * self.itemsize)
            values = vector.bitcast(ir.VectorType.get((len(self.own),), kind), register)
            for q, (offset, own) in enumerate(zip(self._offsets(), self.own, strict=True)):
                one = llvm.mlir_undef(ir.VectorType.get((1,), kind))
                one = llvm.insertelement(one, llvm.extractelement(values, constant(q)), constant(0))
                store_words(self.address, offset, own, one)

    def _offsets(self):
        return [self.offset + q * self.itemsize for q in range(len(self.own))]


def load_words(address, offset, inside, words, bits=0, policy=None):
    """A vector `words` from global memory, or `bits` in each word; `policy` is the L2 cache's, None for the usual one."""
    count, word = words.shape[0], words.element_type
    held = integer(max(16, word.width))  # PTX has no registers of 8 bits
    results = [f"${k}" for k in range(count)]
    operands, hint, use = [address], "", ""
    if policy is not None:
        operands.append(policy)
        hint, use = "L2::cache_hint.", f", ${count + 1}"
    ptx = f"ld.global.{hint}{_list(word, results)}, [${count}+{offset}]{use};"
    if inside is not None:
        fills = " ".join(f"mov.b{held.width} {result}, {bits % 2**held.width};" for result in results)
        ptx = f"{fills} @${count + len(operands)} {ptx}"
        operands.append(inside)
    loaded = llvm.mlir_undef(words)
    for k, value in enumerate(utils.inline_ptx(ptx, *operands, result_types=[held] * count, has_side_effects=True)):
        value = value if held == word else arith.trunci(word, value)
        loaded = llvm.insertelement(loaded, value, constant(k))
    return loaded


def store_words(address, offset, inside, words):
    """Stores a vector of words to global memory."""
    count = words.type.shape[0]
    values = [llvm.extractelement(words, constant(k)) for k in range(count)]
    kind, names = _list(words.type.element_type, [f"${k + 1}" for k in range(count)]).split(" ", 1)
    utils.inline_ptx(f"st.global.{kind} [$0+{offset}], {names};", address, *values, predicate=inside, has_side_effects=True)


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
