"""The best entry of a row so far, in the shared memory of a block, with which scores with noise are compared.

An entry (see `keys`) is larger than another if its score is, or if the scores are equal and its column is the lower one.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax._gpu import sync
from jaxsoftmax._gpu.emit import SPLAT, compare, constant, emit, i64, integer, utils
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import FLAG, start_of
from jaxsoftmax.ops.top_k.mosaic_sm90.keys import BITS_OF_KEY, KEY, EntryFormat


@dataclass(frozen=True)
class Winner:
    """The largest of the scores of a row, as an entry in shared memory.

    Attributes:
      best: int32 in shared memory, of `scratch`: the entry of the block, and the entries of all blocks of the cluster.
      cols: columns of a row.
      blocks: blocks of the cluster.
    """

    best: Any
    cols: int
    blocks: int

    @staticmethod
    def scratch(blocks: int) -> Any:
        """Returns the type of `best`."""
        return plgpu.SMEM((2 + 2 * blocks,), jnp.int32)

    @functools.cached_property
    def format(self) -> EntryFormat:
        return EntryFormat(self.cols)

    def clear(self) -> None:
        """Sets it to what is less than all scores that may be drawn: -inf in the first column."""
        entry = 0x007FFFFF << self.format.bits | self.format.last

        def clear(best):
            asm, is_first = f"st.shared.b64 [$0], {entry};", compare("eq", utils.thread_idx(), constant(0))
            utils.inline_ptx(asm, start_of(best), predicate=is_first, has_side_effects=True)

        sync.block_barrier()
        emit(clear, self.best)
        sync.block_barrier()

    def may_win(self, scores: jax.Array, words: jax.Array, noise: jax.Array | None, layout) -> jax.Array:
        """Tells whether a score with noise may be larger than the entry, in any thread of the warp: an int32, 0 if not.

        `words` are the random ones, or less than these. Noise is at most `-log(v)`, with `v` the word as a fraction of 2^32. So
        `v` must not exceed the exponential of the difference between the scores: one operation of the special function unit,
        where the noise takes three. A sum that rounds to the entry's score may win by its column. `noise` is a factor of the
        noise, or None for 1.
        """

        def test(best, score, word, *factor):
            score, word = (array.registers.item() for array in (score, word))
            bits = self.format.bits
            asm = f"{{ .reg .b64 entry; ld.shared.u64 entry, [$1]; shr.u64 entry, entry, {bits}; cvt.u32.u64 $0, entry; }}"
            key = utils.inline_ptx(asm, start_of(best), result_types=integer(32), has_side_effects=True)
            least, unit = _limits(key, factor[0].registers.item() if factor else None)
            flag: Any = constant(0)
            for q in range(score.type.shape[0]):
                operands = (llvm.extractelement(part, constant(q)) for part in (score, word))
                flag = utils.inline_ptx(_MAY_WIN, *operands, least, unit, flag, result_types=integer(32))
            asm = "{ .reg .pred any; setp.ne.u32 any, $1, 0; vote.sync.any.pred any, any, 0xffffffff; selp.u32 $0, 1, 0, any; }"
            return [utils.inline_ptx(asm, flag, result_types=integer(32), has_side_effects=True, convergent=True)]

        arrays = [(scores, layout), (words, layout)] + ([] if noise is None else [(noise, SPLAT)])
        return emit(test, self.best, (), arrays, FLAG)

    def push(self, scores: jax.Array, columns: jax.Array, layout) -> None:
        """Offers elements of each thread. After a barrier all threads see the entry."""

        def push(best, scores, columns):
            scores, columns = (array.registers.item() for array in (scores, columns))
            largest: Any = i64(0)
            for q in range(scores.type.shape[0]):
                score, column = (llvm.extractelement(part, constant(q)) for part in (scores, columns))
                asm = _ENTRY.format(bits=self.format.bits, last=self.format.last)
                entry = utils.inline_ptx(asm, arith.bitcast(integer(32), score), column, result_types=integer(64))
                largest = arith.maxui(largest, entry)
            asm = _PUSH_LARGEST.format(bits=self.format.bits, last=self.format.last)
            utils.inline_ptx(asm, start_of(best), largest, utils.thread_idx(), has_side_effects=True, convergent=True)

        emit(push, self.best, (), [(scores, layout), (columns, layout)])

    def share(self, rank) -> None:
        """Makes the entries of all blocks known to each, once they are final. The cluster must have started."""
        sync.block_barrier()
        if self.blocks == 1:
            return
        stores = " ".join(
            f"mapa.shared::cluster.u32 there, place, {other}; @is st.shared::cluster.b64 [there+8], entry;"
            for other in range(self.blocks)
        )
        asm = (
            "{ .reg .pred is; .reg .b32 place, there; .reg .b64 entry; setp.eq.u32 is, $1, 0; ld.shared.u64 entry, [$0];"
            f" shl.b32 place, $2, 3; add.u32 place, place, $0; {stores} }}"
        )

        def share(best, rank):
            utils.inline_ptx(asm, start_of(best), utils.thread_idx(), rank, has_side_effects=True)

        emit(share, self.best, [rank])
        sync.cluster_barrier()

    def column(self) -> jax.Array:
        """Returns the column of the best entry of all blocks, in all threads, after `share`."""
        loads = " ".join(
            f"ld.shared.u64 other, [$1+{8 + 8 * rank}]; max.u64 entry, entry, other;" for rank in range(self.blocks)
        )
        last = self.format.last
        asm = (
            f"{{ .reg .b64 entry, other; ld.shared.u64 entry, [$1]; {loads if self.blocks > 1 else ''}"
            f" cvt.u32.u64 $0, entry; and.b32 $0, $0, {last}; sub.u32 $0, {last}, $0; }}"
        )

        def load(best):
            return [utils.inline_ptx(asm, start_of(best), result_types=integer(32), has_side_effects=True)]

        return emit(load, self.best, results=FLAG)


def _limits(key, factor):
    """Returns the score of a key, rounded down, and log2(e) over the factor of the noise: `$3` and `$4` of `_MAY_WIN`."""
    bits = utils.inline_ptx(BITS_OF_KEY, key, result_types=integer(32))
    asm = "{ .reg .f32 size; abs.f32 size, $1; fma.rn.f32 $0, size, 0fB4000000, $1; }"  # less by 2^-23 of it
    score = arith.bitcast(ir.F32Type.get(), bits)
    score = utils.inline_ptx(asm, score, result_types=score.type)
    unit = utils.c(math.log2(math.e), score.type)
    if factor is not None:
        unit = arith.divf(unit, arith.maximumf(factor, utils.c(1e-30, unit.type)))
    return score, unit


# $0: the entry of a float32 $1 in column $2; a column behind the row counts as the last one.
_ENTRY = (
    "{{ .reg .b32 key, word; .reg .b64 place; mov.b32 key, $1;"
    + KEY["float32"]
    + " cvt.u64.u32 $0, key; shl.b64 $0, $0, {bits};"
    " min.u32 word, $2, {last}; sub.u32 word, {last}, word; cvt.u64.u32 place, word; add.u64 $0, $0, place; }}"
)

# $0: $5, or 1 if the score $1 may exceed $3 with the random word $2.
_MAY_WIN = (
    "{ .reg .pred is; .reg .b32 word; .reg .f32 most;"
    " shr.u32 word, $2, 9; or.b32 word, word, 0x3f800000;"  # 1 + v, with v rounded down to 23 bits
    " sub.f32 most, $1, $3; fma.rn.f32 most, most, $4, 0f3C23D70A;"  # ($1 - $3) * $4, increased by 0.01 as it is rounded
    " ex2.approx.ftz.f32 most, most; add.f32 most, most, 0f3F800000;"  # 1 + the largest v with which the score wins
    " setp.leu.f32 is, word, most; mov.b32 $0, $5; @is mov.b32 $0, 1; }"
)

# The largest $1 of a warp goes to the entry at $0, by its first thread; $2 is the thread.
_PUSH_LARGEST = (
    "{{ .reg .pred is; .reg .b32 key, rest, word; .reg .b64 entry, more; shr.u64 entry, $1, {bits}; cvt.u32.u64 key, entry;"
    " redux.sync.max.u32 word, key, 0xffffffff; setp.eq.u32 is, key, word;"  # the largest key
    " cvt.u32.u64 rest, $1; and.b32 rest, rest, {last}; selp.u32 rest, rest, 0, is;"
    " redux.sync.max.u32 rest, rest, 0xffffffff;"  # and of entries with this key the first column
    " cvt.u64.u32 entry, word; shl.b64 entry, entry, {bits}; cvt.u64.u32 more, rest; add.u64 entry, entry, more;"
    " and.b32 word, $2, 31; setp.eq.u32 is, word, 0; @is red.shared.max.u64 [$0], entry; }}"
)
