"""The best entry of a row so far, in the shared memory of a block, with which scores with noise are compared.

An entry is a number of 64 bits: above, the key of its score, and below how far its column is from the last one, as in
`candidates`. So the larger of two is that of the larger score, and of equal ones that of the lower column.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.ptx import SPLAT, compare, constant, i64, integer, utils
from jaxsoftmax.ops.top_k.mosaic_sm90.candidates import BITS_OF_KEY, FLAG, KEY, start_of


@dataclass(frozen=True)
class Winner:
    """The largest of the scores of a row, and of equal ones that of the lowest column, as an entry in shared memory.

    Attributes:
      best: int32 in shared memory, of `scratch`: the entry of the block, and those of all blocks of the cluster.
      cols: of a row.
      blocks: of the cluster.
    """

    best: Any
    cols: int
    blocks: int

    @staticmethod
    def scratch(blocks: int) -> Any:
        return plgpu.SMEM((2 + 2 * blocks,), jnp.int32)

    @property
    def bits(self) -> int:
        return self.cols.bit_length()

    def clear(self) -> None:
        """Sets it to what is less than all scores that may be drawn: -inf in the first column."""
        entry = 0x007FFFFF << self.bits | (2**self.bits - 1)

        def clear(best):
            asm, first = f"st.shared.b64 [$0], {entry};", compare("eq", utils.thread_idx(), constant(0))
            utils.inline_ptx(asm, start_of(best), predicate=first, has_side_effects=True)

        ptx.block_barrier()
        ptx.emit(clear, self.best)
        ptx.block_barrier()

    def may_win(self, scores: jax.Array, words: jax.Array, noise: jax.Array | None, layout) -> jax.Array:
        """Whether a score with noise may be larger than the entry, in any thread of the warp: 0 if not, an int32.

        `words` are the random ones, or less than these. Noise is at most `-log(v)`, with `v` the word as a fraction of 2^32, so
        `v` must not be more than the exponential of what the score lacks: one operation of the special function unit, and not
        three as the noise takes. A sum that rounds to what the entry has may win by its column.
        """

        def test(best, *given):
            score, word, noise_here = [array.registers.item() for array in given] + [None] * (noise is None)
            asm = f"{{ .reg .b64 entry; ld.shared.u64 entry, [$1]; shr.u64 entry, entry, {self.bits}; cvt.u32.u64 $0, entry; }}"
            key = utils.inline_ptx(asm, start_of(best), result_types=integer(32), has_side_effects=True)
            bits = utils.inline_ptx(BITS_OF_KEY, key, result_types=integer(32))
            asm = "{ .reg .f32 size; abs.f32 size, $1; fma.rn.f32 $0, size, 0fB4000000, $1; }"  # less by 2^-23 of it
            least = arith.bitcast(ir.F32Type.get(), bits)
            least = utils.inline_ptx(asm, least, result_types=least.type)
            unit = utils.c(math.log2(math.e), least.type)
            if noise_here is not None:
                unit = arith.divf(unit, arith.maximumf(noise_here, utils.c(1e-30, unit.type)))
            flag: Any = constant(0)
            for q in range(score.type.shape[0]):
                operands = (llvm.extractelement(part, constant(q)) for part in (score, word))
                flag = utils.inline_ptx(_MAY_WIN, *operands, least, unit, flag, result_types=integer(32))
            asm = "{ .reg .pred any; setp.ne.u32 any, $1, 0; vote.sync.any.pred any, any, 0xffffffff; selp.u32 $0, 1, 0, any; }"
            return [utils.inline_ptx(asm, flag, result_types=integer(32), has_side_effects=True, convergent=True)]

        arrays = [(scores, layout), (words, layout)] + ([] if noise is None else [(noise, SPLAT)])
        return ptx.emit(test, self.best, (), arrays, FLAG)

    def push(self, scores: jax.Array, columns: jax.Array, layout) -> None:
        """Offers elements of each thread; what is offered is there after a barrier."""

        def push(best, scores, columns):
            scores, columns = (array.registers.item() for array in (scores, columns))
            found: Any = i64(0)
            for q in range(scores.type.shape[0]):
                score, column = (llvm.extractelement(part, constant(q)) for part in (scores, columns))
                asm = _ENTRY.format(bits=self.bits, last=2**self.bits - 1)
                entry = utils.inline_ptx(asm, arith.bitcast(integer(32), score), column, result_types=integer(64))
                found = arith.maxui(found, entry)
            asm = _PUSH_LARGEST.format(bits=self.bits, last=2**self.bits - 1)
            utils.inline_ptx(asm, start_of(best), found, utils.thread_idx(), has_side_effects=True, convergent=True)

        ptx.emit(push, self.best, (), [(scores, layout), (columns, layout)])

    def share(self, rank) -> None:
        """Makes the entries of all blocks known to each, once they are final. The cluster must have started."""
        ptx.block_barrier()
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

        ptx.emit(share, self.best, [rank])
        ptx.cluster_barrier()

    def column(self) -> jax.Array:
        """The column, in all threads, after `share`."""
        loads = " ".join(
            f"ld.shared.u64 other, [$1+{8 + 8 * rank}]; max.u64 entry, entry, other;" for rank in range(self.blocks)
        )
        asm = (
            f"{{ .reg .b64 entry, other; ld.shared.u64 entry, [$1]; {loads if self.blocks > 1 else ''}"
            f" cvt.u32.u64 $0, entry; and.b32 $0, $0, {2**self.bits - 1}; sub.u32 $0, {2**self.bits - 1}, $0; }}"
        )

        def load(best):
            return [utils.inline_ptx(asm, start_of(best), result_types=integer(32), has_side_effects=True)]

        return ptx.emit(load, self.best, results=FLAG)


# $0: the entry of a float32 $1 in column $2, of which one that is none counts as the last.
_ENTRY = (
    "{{ .reg .b32 key, word; .reg .b64 place; mov.b32 key, $1;"
    + KEY["float32"]
    + " cvt.u64.u32 $0, key; shl.b64 $0, $0, {bits};"
    " min.u32 word, $2, {last}; sub.u32 word, {last}, word; cvt.u64.u32 place, word; add.u64 $0, $0, place; }}"
)

# $0: $5, or 1 if the score $1 may exceed $3 with the random word $2: if v, rounded down to 23 bits, is no more than
# 2^(($1 - $3) * $4), which is increased a little, as it is rounded.
_MAY_WIN = (
    "{ .reg .pred is; .reg .b32 word; .reg .f32 most; shr.u32 word, $2, 9; or.b32 word, word, 0x3f800000; sub.f32 most, $1, $3;"
    " fma.rn.f32 most, most, $4, 0f3C23D70A; ex2.approx.ftz.f32 most, most; add.f32 most, most, 0f3F800000;"
    " setp.leu.f32 is, word, most; mov.b32 $0, $5; @is mov.b32 $0, 1; }"
)

# To the entry at $0 the largest $1 of a warp, by its first thread.
_PUSH_LARGEST = (
    "{{ .reg .pred is; .reg .b32 key, rest, word; .reg .b64 entry, more; shr.u64 entry, $1, {bits}; cvt.u32.u64 key, entry;"
    " redux.sync.max.u32 word, key, 0xffffffff; setp.eq.u32 is, key, word; cvt.u32.u64 rest, $1; and.b32 rest, rest, {last};"
    " selp.u32 rest, rest, 0, is; redux.sync.max.u32 rest, rest, 0xffffffff;"
    " cvt.u64.u32 entry, word; shl.b64 entry, entry, {bits};"
    " cvt.u64.u32 more, rest; add.u64 entry, entry, more; and.b32 word, $2, 31; setp.eq.u32 is, word, 0;"
    " @is red.shared.max.u64 [$0], entry; }}"
)
