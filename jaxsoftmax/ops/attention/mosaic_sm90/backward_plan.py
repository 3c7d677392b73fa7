"""How the backward kernel runs a problem: tiles, the blocks of queries that they visit, their turns, and shared memory."""

import enum
import functools
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import ClosedJaxpr, Literal

from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import schedule
from jaxsoftmax._gpu.kernel import tile_transforms
from jaxsoftmax.ops.attention import key_blocks, mask_blocks
from jaxsoftmax.ops.attention.mosaic_sm90 import lists
from jaxsoftmax.ops.attention.mosaic_sm90.common import (
    HOST,
    KERNEL,
    LOG2E,
    ROWS,
    Arithmetic,
    AttentionGeometry,
    in_two_views,
    of_operand,
    raised_lse,
    shapes_of,
    tail_of,
)
from jaxsoftmax.ops.attention.mosaic_sm90.functions import Function, factor_of_changed, is_finite, loads_tiles
from jaxsoftmax.ops.attention.operands import TABLES
from jaxsoftmax.ops.attention.score_derivatives import TableLoad, with_loads, with_results, with_slope
from jaxsoftmax.ops.attention.score_functions import TracedFunction

SIZES = (64, 128, 256)  # head sizes on chip
CONSUMERS = 2  # consumer warpgroups
ADDERS = 2  # warps that add dQ in the order of turns: one waits for its turn while the other's copies arrive
DS_STAGES = 2  # for the derivatives of the scores: one is written while the other is read
_LEAST_SEEDED = 1e-30  # of scales by which a log-sum-exp may be divided
# Where tiles add dK and dV, XLA writes zeros before and rounds the sums after the kernel, which is counted in steps of 2.2 us.
_BYTES_OF_STEP = 7e6  # that an H100 reads or writes in the time of a step
_STEPS_OF_LAUNCHES = 2  # for the start of two kernels
_LEAST_GAIN_OF_SINGLE_HEADS, _LEAST_GAIN_OF_CUTS = 1.05, 1.01  # gains that pay, as times are estimates


class BiasGradient(enum.Enum):
    """Ways in which the kernel writes the derivative of a bias, which is that of the scores, to global memory."""

    NONE = "not wanted"
    # Each thread adds sums in float32: the bias is the same for all queries, or for all keys.
    SUMS = "bias's gradient added by threads"
    # Tiles are added by TMA, in float32: several scores share an element of the bias, or it is not of the dtype of queries.
    ADDED = "bias's gradient added in tiles"
    # Tiles are stored by TMA, in the dtype of queries, as dQ reads them from shared memory: each score has an element.
    STORED = "bias's gradient stored in tiles"


@dataclass(frozen=True)
class BackwardConfig:
    """Settings of a block of threads of the backward kernel."""

    block_q: int  # queries of a step
    stages: tuple[int, int]  # blocks of queries, and of output cotangents, that shared memory has room for
    roles: bool = False  # the consumers share the 64 keys of a tile and compute different products; else each has 64 keys
    # True if two blocks of threads, a cluster, share a tile where shared memory has room; only with `roles`. Each has 64 keys.
    # They send each other the derivatives of their scores, and each makes half of the columns of dQ, for 128 keys.
    pairs: bool = False
    pieces: int = 1  # pieces, one after the other, in which a consumer's part of dQ goes through shared memory
    # True if each consumer adds all columns of dQ, for its own keys; not with `roles`. Else consumers share dQ of all keys.
    separate_dq: bool = False
    # True if both consumers run one program, in which the number of the consumer is a variable; not with `roles`. Else each has
    # a program of its own, in which its number is a constant.
    one_program: bool = False
    registers: tuple[int, int] = (24, 240)  # of a thread of the producer, and of a consumer
    stages_bias: bool = False  # the bias of a step comes to shared memory by TMA; else each thread loads its elements


# Registers of a thread that hold arrays, and KiB of shared memory. There are 240 registers (two warpgroups of 240 and one of
# 24: 64512 of 65536) and 227 KiB.
#
#   head size         S', dP'  P', dS'  dV, dK  dQ  at most                   K, V  Q, dO  dS'  dQ  P'  sum
#    64, 128 queries  64, 64   32, 32   32, 32  32  192; later 160            32    80     64   32      208
#   128,  64 queries  32, 32   16, 16   64, 64  32  192; later 192            64    80     32   32      208
#   256,  64 queries  32       16       128     64  192; 208 with P' or dS'   64    96     16   32  8   216
#    of two blocks    32       16       128     32  192                       80    96     32   16      224
#
# P' and dS' have 16 bits; with a bias's derivative and a soft cap there are two P'. Registers for addresses, for limits, and
# for lse and delta (16 each for 64 queries) come on top. A sum that starts with `-lse / scale` or `-delta` needs none for it.
_CONFIGS = {
    # One program takes 0.99 of the time of two.
    64: BackwardConfig(128, (3, 2), one_program=True),
    # One program would be lowered in 1.0 s in place of 1.4, and compiled in 1.9 s in place of 2.2. But it takes 1.02 of the
    # time at 4096 tokens and at 16384 causal ones (1.00 at 4096 causal; medians of four processes on two H200s).
    128: BackwardConfig(64, (3, 2)),
    # dK and dV of 64 keys take all registers of two warpgroups. A block that adds dQ of 64 keys keeps the way to the L2 cache
    # busy for 90% of the time (lts__xbar2lts_cycles_active). Two blocks add it once, and take 2480 us where single ones take
    # 3258 us (4096 tokens, H100).
    256: BackwardConfig(64, (2, 1), roles=True, pairs=True, pieces=2),
}

# For heads of up to 64 of 16 bits and score functions that need many registers. With 128 queries ptxas spills 1300 to 2800
# bytes for a cap, or for a table of distances, and nothing so. Not measured.
_CONFIG_OF_FUNCTIONS = BackwardConfig(64, (3, 2), one_program=True, separate_dq=True)

# The same for float32: each operand of a product is two terms of bfloat16, in shared memory and in registers.
#
#   head size         S', dP'  P', dS'  dV, dK  dQ  at most                   K, V  Q, dO  dS'  dQ  P'  sum
#    64,  64 queries  32, 32   32, 32   32, 32  32  192; later 160            64    64     64   32      224
#   128,  64 queries  32       32       64      32  160                       64    96     32   32      224
#    P' of a bias     32       32       64      32  160                       64    64     32   32  16  208
#
# A block of 64 queries has no parts of dQ that two consumers could share at head size 64: a part has at least 64 columns, as
# tiles of K do.
_CONFIGS_OF_TERMS = {
    64: BackwardConfig(64, (2, 2), one_program=True, separate_dq=True),
    128: BackwardConfig(64, (2, 1), roles=True),
}
_CONFIGS_OF_TERMS_AND_BIAS = _CONFIGS_OF_TERMS | {128: BackwardConfig(64, (1, 1), roles=True)}


def backward_config(
    head_size: int, value_size: int, dtype: Any = jnp.bfloat16, *, passes_both: bool = False
) -> tuple[int, BackwardConfig]:
    """Returns the head size on chip, of keys and values both, and the configuration for operands of a dtype.

    Configurations of 16 bits are as measured on an H200. `passes_both` says that a bias has a derivative, and that
    a soft cap or a score function changes scores: see `BackwardGeometry`.
    """
    configs = _CONFIGS
    if dtype == jnp.float32:
        configs = _CONFIGS_OF_TERMS_AND_BIAS if passes_both else _CONFIGS_OF_TERMS
    size = next(size for size in configs if size >= max(head_size, value_size))
    return size, configs[size]


@dataclass(frozen=True)
class BackwardGeometry(AttentionGeometry):
    """The geometry of the backward kernel for one problem.

    A tile is a block of keys of a key head, or two that two blocks of threads share. Its steps are the blocks of queries that
    see the keys, of all query heads that share the key head, or of one of them (`has_single_heads`).
    """

    config: BackwardConfig
    size: int  # head size of the configuration: columns of sums of dK and dV, and of all parts of dQ
    value_size: int
    bias_gradient: BiasGradient
    # Results have the same bits in every run: blocks of keys add to dQ in the order of turns, and no tiles add dK and dV.
    is_deterministic: bool
    is_varying: bool  # operands say which queries a block of keys visits
    # True if a tile has one of several query heads that share its keys. Tiles then add dK and dV, in float32.
    has_single_heads: bool = False
    tables: tuple[str, ...] = ()  # operands that the score function reads whose cotangents are wanted
    has_finite_slope: bool = True  # the derivative of the score function by its score is finite everywhere
    # Heads, the last ones, whose tiles are cut: several blocks of threads share the steps of a tile, which are all blocks of
    # queries, so that all blocks of threads end together. They add dK and dV, in float32.
    cut_heads: int = 0

    # These follow from the others.
    lengths: tuple[int, int] = field(init=False)  # T and S: numbers of queries and keys
    heads_per_key_head: int = field(init=False)  # query heads that share a key head
    heads_per_tile: int = field(init=False)  # query heads of a tile: all that share its keys, or one
    block_kv: int = field(init=False)  # keys of a tile that a block of threads has
    blocks_q: int = field(init=False)
    blocks_kv: int = field(init=False)
    tiles_of_head: int = field(init=False)  # tiles of a key head, or of each query head if a tile has one
    parts: tuple[int, int] = field(init=False)  # parts of dQ's rows and of its columns that the consumers share
    part_size: int = field(init=False)  # columns of dQ that a consumer makes
    # Columns of queries and keys, and of values and output cotangents, in products. XLA pads operands to them, except in slabs.
    columns: tuple[int, int] = field(init=False)
    # True if either head size is no multiple of 64. Both then come in slabs of 64 columns, with a tail if `tail_of` gives one,
    # and TMA clips the last slab. 4096 causal tokens and 18 heads of 112 take 1826 us so, forward and backward, and 2052 us if
    # XLA pads them (H200).
    in_slabs: bool = field(init=False)
    slabs: tuple[int, int] = field(init=False)  # of either, without the tail; one of all columns if they are not in slabs
    tails: tuple[int, int] = field(init=False)  # columns of the tail of either, or 0
    is_ragged: bool = field(init=False)  # the last block of keys has rows behind the last key
    # True if the sums of products start with what is subtracted from them, because nothing comes between: the sum of S' with
    # `-lse / scale`, the sum of dP' with `-delta`. Neither is in registers then, and one operation for each score is less.
    is_seeded: bool = field(init=False)
    seeds_delta: bool = field(init=False)
    # True if a thread loads what a sum starts with to each register, in place of moving what it has loaded from one to another.
    seeds_from_memory: bool = field(init=False)
    # True if weights pass from one consumer to the other both with the derivative of the scores by products and without.
    passes_both: bool = field(init=False)

    def __post_init__(self):
        (length, heads, _), (keys, key_heads, _), config = self.query, self.key, self.config
        block_kv = ROWS if config.roles else ROWS * CONSUMERS
        blocks_kv = pl.cdiv(keys, block_kv)
        # Beside all that two blocks exchange there is no room for the bias, or for weights that its derivative needs.
        has_room = self.bias_gradient is BiasGradient.NONE and not self.config.stages_bias
        blocks_per_tile = 2 if config.pairs and has_room else 1
        parts = config.block_q // ROWS, 1 if config.separate_dq else blocks_per_tile * CONSUMERS * ROWS // config.block_q
        seeds_delta = not config.roles and "seeds" not in self.names
        is_changed = self.soft_cap is not None or self.score_mod is not None  # scores are not the products, scaled
        is_plain = not is_changed and "bias" not in self.names
        passes_both = config.roles and self.bias_gradient is not BiasGradient.NONE and is_changed
        sizes = self.query[2], self.value_size
        tails = tail_of(sizes[0]), tail_of(sizes[1])
        # XLA splits float32 into terms in whole tiles. With roles, above 128, steps of 64 add at most a third to the columns.
        in_slabs = any(size % ROWS for size in sizes) and self.n_terms == 1 and not config.roles
        if not in_slabs:
            tails = 0, 0
        slabs = pl.cdiv(sizes[0] - tails[0], ROWS), pl.cdiv(sizes[1] - tails[1], ROWS)
        columns = ROWS * slabs[0] + tails[0], ROWS * slabs[1] + tails[1]
        self._derive(
            lengths=(length, keys),
            heads_per_key_head=heads // key_heads,
            heads_per_tile=(heads_per_tile := 1 if self.has_single_heads else heads // key_heads),
            block_kv=block_kv,
            blocks_q=pl.cdiv(length, config.block_q),
            blocks_kv=blocks_kv,
            tiles_of_head=(tiles_of_head := pl.cdiv(blocks_kv, blocks_per_tile)),
            parts=parts,
            part_size=self.size // parts[1],
            columns=columns,
            in_slabs=in_slabs,
            slabs=slabs if in_slabs else (1, 1),
            tails=tails,
            is_ragged=keys % (blocks_per_tile * block_kv) != 0,
            is_seeded=is_plain and seeds_delta and self.scale > _LEAST_SEEDED,
            seeds_delta=seeds_delta,
            # 16384 tokens, forward and backward: 12950 us in place of 13165; with heads of 128 11346 in place of 11230 (H100).
            seeds_from_memory=self.size == 64,
            blocks_per_tile=blocks_per_tile,
            passes_both=passes_both,
            # Those of turns are taken in order of arrival. With `passes_both` shared memory has no room for tickets.
            by_ticket=self.is_deterministic or (self.is_varying and not passes_both),
            n_tiles=math.prod(self.batch) * (heads // heads_per_tile) * tiles_of_head,
            n_cut=self.cut_heads * tiles_of_head,
        )

    @functools.cached_property
    def slope(self) -> float | None:
        """Derivative of the score function's results by scores where it is a number; None where it is an array."""
        if self.score_mod is None:
            return 1.0
        slope = with_slope(self.score_mod).jaxpr.outvars[1]
        return float(slope.val) if isinstance(slope, Literal) else None

    @property
    def functions(self) -> dict[str, Function]:
        """Programs of the score and mask functions, by name.

        That of scores has the slope as another result, if it is no number, and then derivatives by elements of tables.
        """
        functions, function = {}, self.score_mod
        if function is not None:
            program = with_loads(function, self.tables)[0] if self.tables else with_slope(function)
            result, slope, *others = program.jaxpr.outvars
            wanted = [result, *others] if self.slope is not None else [result, slope, *others]
            functions["score_mod"] = Function.of(function, with_results(program, wanted))
        if self.mask_mod is not None:
            functions["mask_mod"] = Function.of(self.mask_mod)
        return functions

    @property
    def loads(self) -> dict[str, tuple[TableLoad, Function]]:
        """Loads by which cotangents of tables are wanted, with their programs, by name."""
        function = self.score_mod
        if not self.tables:
            return {}
        loads: tuple[TableLoad, ...] = with_loads(function, self.tables)[1]
        return {
            f"load_{i}": (load, replace(Function.of(function, load.program), gradient=f"d_{load.name}"))
            for i, load in enumerate(loads)
        }

    @property
    def is_natural(self) -> bool:
        """True if the log-sum-exp is subtracted from scores before both become powers of two.

        With a bias or a score function scores may be as large as `finfo.min`, and so the log-sum-exp. With `has_large_powers`
        too: `raised_lse` bounds what is lost.
        """
        return "bias" in self.names or self.score_factor is None

    @property
    def n_terms(self) -> int:
        """Number of terms of bfloat16 that an element of float32 is the sum of; 1 for operands of 16 bits."""
        return 2 if self.dtype == jnp.float32 else 1

    @property
    def is_paired(self) -> bool:
        """True if two blocks of threads, a cluster, share each tile."""
        return self.blocks_per_tile == 2

    @property
    def bytes_of_query_head(self) -> int:
        """Bytes of the queries and output cotangents of a query head, in terms of 16 bits, and of dQ."""
        columns, value_columns = self.columns
        return (2 * self.n_terms * (columns + value_columns) + 4 * columns) * self.query[0]

    @functools.cached_property
    def alternates(self) -> bool:
        """True if tiles visit each block of queries with all heads, by turns from the last block to the first and back.

        A block of threads goes down the queries in its first tile, up in its second, and so on. Tiles of causal attention are
        long or short. All first tiles start at the last block of queries, so that they read the same queries at the same time.
        The shortest ends first, and its block of threads takes the longest that is left. That tile goes up from its own first
        block of queries. The later a tile starts, the higher is its first block, so that these tiles too read the same queries
        at the same time, and the L2 cache holds them. Forward and backward of 4 x 4096 causal tokens, 16 query heads of 128 and
        4 key heads, take 1592 us so, and 1712 us if all tiles go down, one head after the other; with 2 key heads 1586 us and
        2380 us (H100).

        Tiles of a window are at different queries anyway: with 1024 keys 1316 us so, and 1012 us if all go down. Tiles of
        single heads gain nothing. Tiles that wait for turns, whose lengths operands say, or that no table orders, go down.
        """
        (left, right), n_heads = self.window, self.heads_per_tile
        is_known = not self.is_deterministic and not self.is_varying and self.n_tiles <= schedule.MAX_SCHEDULED
        return is_known and n_heads > 1 and left is None and right is not None and _is_uneven(self.costs())

    @property
    def adds_to_keys(self) -> bool:
        """True if some tiles add dK and dV, in float32."""
        return self.has_single_heads or self.cut_heads > 0

    @property
    def replaces_weights(self) -> bool:
        """True if derivatives of scores take the place of the weights that one consumer gives the other."""
        return self.is_paired or self.n_terms > 1

    @property
    def adds_bias_in_turns(self) -> bool:
        """True if warps add the derivative of the bias in the order of turns."""
        return self.is_deterministic and self.bias_gradient is BiasGradient.ADDED

    @property
    def is_empty_early(self) -> bool:
        """True if consumers wait before they have the derivatives of scores until what they staged has left shared memory."""
        return self.seeds_delta and self.bias_gradient is not BiasGradient.ADDED

    def describe(self) -> str:
        """Says in one line how the kernel runs."""
        config = self.config
        work = "one makes dV, the other dK" if config.roles else "each with half of the keys"
        work += " and their dQ" if config.separate_dq else ""
        parts = [
            f"tiles of {self.blocks_per_tile * self.block_kv} keys by {config.block_q} queries",
            f"{config.stages[0]} stages of queries",
            f"{config.stages[1]} of output cotangents",
            f"{CONSUMERS} consumer warpgroups, {work}",
        ]
        parts += ["{} and {} columns".format(*self.columns)] if self.columns != (self.size, self.size) else []
        parts += ["operands split before"] if self.n_terms > 1 else []
        parts += ["two blocks of threads share a tile"] if self.is_paired else []
        parts += ["single query heads, which add dK and dV"] if self.has_single_heads else []
        parts += [f"tiles of {self.cut_heads} heads are cut"] if self.cut_heads else []
        parts += ["queries go down and up by turns"] if self.alternates else []
        parts += ["dQ added in the order of turns"] if self.is_deterministic else []
        parts += ["bias copied by TMA"] if config.stages_bias else []
        parts += ["lists of blocks of queries"] if self.has_lists else []
        parts += [] if self.bias_gradient is BiasGradient.NONE else [self.bias_gradient.value]
        return ", ".join(parts)

    @property
    def global_columns(self) -> tuple[int, int]:
        """Numbers of columns that operands of products have in global memory, and dK and dV unless they are sums of tiles.

        In slabs these are a multiple of 8, as TMA takes rows of a multiple of 16 bytes.
        """
        sizes = self.query[2], self.value_size
        return (sizes[0] + -sizes[0] % 8, sizes[1] + -sizes[1] % 8) if self.in_slabs else self.columns

    def columns_of_part(self, part: int) -> int:
        """Counts the columns of the keys, a multiple of 64, in a part of the columns of dQ; 0 if the part is behind them."""
        return min(max(self.columns[0] - part * self.part_size, 0), self.part_size)

    @property
    def dq_size(self) -> int:
        """Number of columns of dQ in global memory, where float32 comes in tiles of 32."""
        return ROWS * self.slabs[0] + 32 * (self.tails[0] > 0) if self.in_slabs else self.columns[0]

    def span(self, block: Any, arithmetic: Arithmetic, lengths: Any = None, offset: Any = 0) -> tuple[Any, Any, Any, Any]:
        """Returns the blocks of queries that window and lengths let see a block of keys.

        The first block with a query that sees some key and the one behind the last, then the first of the blocks whose queries
        see all keys and the one behind the last. An end may be before its start.

        Args:
          block: number of the block of keys.
          arithmetic: operations on such numbers.
          lengths: numbers of queries and keys of each batch entry, which operands say, or None for those of the arrays.
          offset: position of query 0.
        """
        (left, right), (queries, keys) = self.window, self.lengths if lengths is None else lengths
        step, size = self.config.block_q, self.block_kv
        divide, minimum, maximum, _ = arithmetic
        first, last = block * size, (block + 1) * size - 1
        from_query, to_query = first - offset, last - offset  # by position
        low = 0 if right is None else divide(maximum(from_query - right, 0), step)
        high = divide(queries + step - 1, step)
        whole_from = 0 if right is None else divide(maximum(to_query - right, 0) + step - 1, step)
        # Behind the last query of the arrays the kernel reads zeros, which add nothing: their block needs no mask. A score
        # function may make weights of them that are infinite.
        whole_to = self.blocks_q if lengths is None and self.score_mod is None else divide(queries, step)
        if left is not None:
            high = minimum(high, divide(maximum(minimum(last, keys - 1) - offset + left, -1) + step, step))
            whole_to = minimum(whole_to, divide(maximum(from_query + left + 1, 0), step))
        is_key, is_whole = minimum(maximum(keys - first, 0), 1), minimum(maximum(keys - last, 0), 1)
        return low, high * is_key, whole_from, whole_to * is_whole

    def visited(self, tile: Any, arithmetic: Arithmetic) -> tuple[Any, Any]:
        """Returns the first block of queries that a tile visits, and the one behind the last: all that some of its keys see.

        `tile` is its number among those of a key head.
        """
        if not self.is_paired:
            return self.span(tile, arithmetic)[:2]
        (low, high, *_), (other_low, other_high, *_) = (self.span(2 * tile + i, arithmetic) for i in range(2))
        return arithmetic.minimum(low, other_low), arithmetic.maximum(high, other_high)

    def spans(self, operands: Mapping[str, jax.Array], seen: jax.Array | None) -> jax.Array:
        """Computes the `span` of every block of keys from operands, `mask_mod` and `seen`: int32 `[*batch, blocks_kv, 4]`.

        Blocks of keys that share a tile visit the same blocks of queries. `seen` says which blocks of queries a mask lets see a
        block of keys, or is None. With lists the result is what `list_blocks` returns.
        """
        if self.has_lists:
            # Turns are counted for all heads together.
            heads_per_list = self.query[1] if self.is_deterministic else self.heads_per_tile
            options = {"by_keys": True, "sharers": self.blocks_per_tile, "heads_per_list": heads_per_list}
            blocks = self.config.block_q, self.block_kv
            return lists.list_blocks(self.mask_mod, operands, self.lengths, blocks, self.window, **options)
        lengths = [
            jnp.clip(operands[name][..., None], 0, size) if name in operands else jnp.int32(size)
            for name, size in zip(("query_lengths", "key_lengths"), self.lengths, strict=True)
        ]
        offset = operands["query_offset"][..., None] if "query_offset" in operands else 0
        block = jnp.arange(self.blocks_kv, dtype=jnp.int32).reshape(*(1,) * len(self.batch), -1)
        mixed = KERNEL._replace(divide=jnp.floor_divide)  # KERNEL's own takes operands of one shape
        low, high, whole_from, whole_to = jnp.broadcast_arrays(*self.span(block, mixed, lengths, offset))
        found, block_q, block_kv = [], self.config.block_q, self.block_kv
        if "query_segments" in operands:
            segments = operands["key_segments"], operands["query_segments"]
            found.append(key_blocks.find_segment_spans(*segments, block_kv, block_q))
        if self.mask_mod is not None:
            found.append(mask_blocks.find_block_spans(self.mask_mod, operands, self.lengths, block_q, block_kv, by_keys=True))
        for ranges in found:
            low, high = jnp.maximum(low, ranges[..., 0]), jnp.minimum(high, ranges[..., 1])
            whole_from, whole_to = jnp.maximum(whole_from, ranges[..., 2]), jnp.minimum(whole_to, ranges[..., 3])
        if seen is not None:
            ends = key_blocks.find_ends(jnp.swapaxes(seen, -1, -2))
            low, high = jnp.maximum(low, ends[..., 0]), jnp.minimum(high, ends[..., 1])
        high = jnp.maximum(low, high)
        whole_from = jnp.clip(whole_from, low, high)
        spans = jnp.stack(jnp.broadcast_arrays(low, high, whole_from, jnp.clip(whole_to, whole_from, high)), -1)
        return self._of_pairs(spans) if self.is_paired else spans

    def _of_pairs(self, spans: jax.Array) -> jax.Array:
        """Lets both blocks of keys of a tile visit all from the first block of queries that either visits to the last.

        Their number becomes even.
        """
        padding = [(0, 0)] * (spans.ndim - 2) + [(0, -self.blocks_kv % 2), (0, 0)]
        pairs = jnp.pad(spans, padding).reshape(*spans.shape[:-2], self.tiles_of_head, 2, 4)
        low, high = pairs[..., 0], pairs[..., 1]
        high_of_both = jnp.where(low < high, high, 0).max(-1, keepdims=True)
        low_of_both = jnp.minimum(jnp.where(low < high, low, self.blocks_q).min(-1, keepdims=True), high_of_both)
        ends = jnp.broadcast_to(jnp.stack([low_of_both, high_of_both], -1), pairs[..., :2].shape)
        return jnp.concatenate([ends, pairs[..., 2:]], -1).reshape(*spans.shape[:-2], -1, 4)

    def turns_before(self, spans: jax.Array) -> jax.Array:
        """Counts the tiles that add to a block of queries before each: int32 `[batch, tiles_of_head, blocks_q]`."""
        visits = self._visits(spans[..., ::2, :] if self.is_paired else spans)
        return jnp.cumsum(visits, -2, dtype=jnp.int32) - visits

    def _visits(self, spans: jax.Array) -> jax.Array:
        """Says which blocks of queries are in each span or list: 1 or 0, int32 `[batch, spans.shape[-2], blocks_q]`."""
        spans = jnp.broadcast_to(spans, (*self.batch, *spans.shape[-2:])).reshape(-1, *spans.shape[-2:])
        if self.has_lists:
            return lists.visited(spans, self.blocks_q).astype(jnp.int32)
        block = jnp.arange(self.blocks_q, dtype=jnp.int32).reshape(1, 1, -1)
        return ((spans[..., 0, None] <= block) & (block < spans[..., 1, None])).astype(jnp.int32)

    def bias_turns_before(self, spans: jax.Array, bias: tuple[int, ...]) -> jax.Array:
        """Counts the batch entries before each that add to the same part of a bias: int32 `[batch, blocks_kv, blocks_q]`.

        `bias` are the sizes of the bias's batch axes.
        """
        shape = *self.batch, self.blocks_kv, self.blocks_q
        visits = self._visits(spans).reshape(shape)
        bias = (1,) * (len(self.batch) - len(bias)) + bias
        shared = tuple(axis for axis, size in enumerate(bias) if size == 1)
        first = jnp.moveaxis(visits, shared, range(len(shared)))
        line = first.reshape(-1, *first.shape[len(shared) :])
        before = (jnp.cumsum(line, 0, dtype=jnp.int32) - line).reshape(first.shape)
        return jnp.moveaxis(before, range(len(shared)), shared).reshape(-1, *shape[-2:])

    def first_tile(self, block: Any, arithmetic: Arithmetic) -> Any:
        """Returns the first tile whose keys the window lets a block of queries see."""
        (left, _), (divide, _, maximum, _) = self.window, arithmetic
        keys = self.blocks_per_tile * self.block_kv
        return 0 if left is None else divide(maximum(block * self.config.block_q - left, 0), keys)

    def lines(self, lse, delta):
        """Returns log-sum-exp and delta of queries as the kernel takes them. A score of `-inf` then has weight 0."""
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        factor = -1 / self.scale if self.is_seeded else 1 if self.is_natural else LOG2E
        lse = (raised_lse(lse) if self.has_large_powers else lse) * factor
        if self.has_large_powers:  # `finfo.min` stays finite
            lse = jnp.maximum(lse, float(jnp.finfo(lse.dtype).min))
        return lse, -delta if self.seeds_delta else delta

    def costs(self) -> tuple[int, ...]:
        """Counts the steps of each tile, or says 1 for all where only then tiles come in the order of turns."""
        spans = (self.visited(tile, HOST) for tile in range(self.tiles_of_head))
        sizes = [max(high - low, 0) for low, high in spans]
        if self.has_lists:
            sizes = map(min, sizes, self._shown())
        costs = tuple(self.heads_per_tile * size for size in sizes)
        is_other_order = self.is_deterministic and any(a < b for a, b in itertools.pairwise(costs))
        return (1,) * len(costs) if is_other_order else costs

    def _shown(self) -> list[int]:
        """Counts the blocks of queries of each tile that are not known to be hidden by the mask function while tracing."""
        kinds = mask_blocks.classify(
            self.mask_mod,
            self.lengths,
            self.config.block_q,
            self.block_kv,
            has_offset=not lists.OPERANDS_OF_POSITIONS.isdisjoint(self.names),
        )
        seen = lists.share(np.swapaxes(kinds != mask_blocks.EMPTY, 0, 1), self.blocks_per_tile)
        return [int(count) for count in seen[:: self.blocks_per_tile].sum(1)]

    def n_heads_at_once(self, costs: tuple[int, ...]) -> int:
        """Returns the number of heads whose tiles are handed out together: as in the forward kernel, with queries for keys.

        With turns it is larger, though L2 may not hold them: fewer blocks of keys of one head start together then, and
        each starts later than the one before. What is best on an H200 grows with the room in L2 and where tiles get shorter.
        """
        equal = len(set(costs)) == 1
        if equal and not self.is_deterministic:
            return 1
        bytes_of_head = self.bytes_of_query_head * self.heads_per_tile
        least, most, times = (8, 32, 2 if equal else 4) if self.is_deterministic else (1, 8, 1)
        return min(most, max(least, 1 << max(1, times * schedule.L2 // bytes_of_head).bit_length() - 1))

    @property
    def stages_results(self) -> bool:
        """True if dK and dV of 16 bits leave by way of the place of dQ.

        Otherwise those of 16 bits leave by way of the place of keys and values. By way of the place of dQ, the next keys and
        values may come meanwhile: forward and backward of 4096 causal tokens take 1932 us so, and 1958 us otherwise, of 1024
        causal ones 747 us and 770 us (head size 64, H200; 1592 us and 1600 us at head size 128, 4096 tokens).
        """
        return self.n_terms == 1 and not (self.is_deterministic or self.config.roles or self.has_single_heads)

    @property
    def stages_segments(self) -> bool:
        """True if segments of queries come to shared memory by TMA, beside the queries. Else threads load them when they mask.

        Forward and backward of 16384 causal tokens in 12 documents take 1537 us if each step loads them ahead, for which ptxas
        spilled 468 bytes, and 1231 us so (head size 64, H200); 1031 us and 993 us at head size 128.
        """
        return "query_segments" in self.names and self.n_terms == 1 and not self.config.roles

    def scratch(self) -> dict[str, Any]:
        """Describes what is in shared memory. A barrier is full when copies have landed, and empty when all have read them."""
        config, (columns, value_columns), halves = self.config, self.columns, self.block_kv // ROWS
        (stages, stages_do), terms = config.stages, self.n_terms
        memory: dict[str, Any] = {}
        if config.roles and not self.replaces_weights:
            memory["p"] = self._tiles(ROWS, config.block_q)
        if self.passes_both:
            memory["p_of_bias"] = self._tiles(ROWS, config.block_q, dtype=self.dtype)
        if self.by_ticket:
            listeners = CONSUMERS + ADDERS * self.is_deterministic
            memory |= schedule.ticket_memory(1, listeners, in_order=self.is_deterministic)
        lines = {"q_lse": stages, "do_delta": stages_do}
        # One array for both: each array starts at a multiple of 1 KiB, and there is no room for two.
        if self.is_deterministic or self.is_paired or terms > 1:
            lines = {"lines": stages + stages_do + self.is_paired}  # the last one has barriers
        if self.is_paired:
            memory |= {"other_k": self._tiles(CONSUMERS, ROWS, self.part_size)}
            step_done = plgpu.ClusterBarrier(collective_axes=("rank",), num_arrivals=CONSUMERS, num_barriers=DS_STAGES)
        else:
            step_done = plgpu.Barrier(num_barriers=CONSUMERS * DS_STAGES)
        if self.is_deterministic:
            memory |= {
                "sums_full": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=ADDERS),
                "sums_empty": plgpu.Barrier(num_arrivals=1),
            }
        memory |= {name: plgpu.SMEM((count, config.block_q), jnp.float32) for name, count in lines.items()}
        if self.stages_segments:
            memory["q_segments"] = plgpu.SMEM((stages, config.block_q), jnp.int32)
        if self.in_slabs:
            memory |= self._slabs_and_tails(halves)
        else:
            memory |= {
                "k": self._tiles(terms, halves, self.parts[1], ROWS, self.part_size),
                "v": self._tiles(terms, halves, ROWS, value_columns),
                "q": self._tiles(terms, stages, config.block_q, columns),
                "do": self._tiles(terms, stages_do, config.block_q, value_columns),
            }
        return memory | {
            # What blocks of threads send each other lies together, so that terms come later.
            "ds": self._tiles(DS_STAGES, self.blocks_per_tile * halves, terms, config.block_q // ROWS, ROWS, ROWS),
            # In tiles of 64 columns where a bias has a derivative, which goes through it too.
            "sums": self._place_of_sums(self.part_size // config.pieces),
            "k_full": plgpu.Barrier(num_arrivals=terms * halves * self.count_slabs("k") + CONSUMERS * self.is_paired),
            "v_full": plgpu.Barrier(num_arrivals=terms * halves * self.count_slabs("v")),
            "kv_empty": plgpu.Barrier(num_arrivals=CONSUMERS),
            **({} if config.separate_dq else {"step_done": step_done}),
            **self._bias_stage(halves),
            "q_full": plgpu.Barrier(num_arrivals=terms * self.count_slabs("q") + 1 + self.stages_segments, num_barriers=stages),
            "do_full": plgpu.Barrier(num_arrivals=terms * self.count_slabs("do"), num_barriers=stages_do),
            "delta_full": plgpu.Barrier(num_barriers=stages_do),
            "q_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            "do_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages_do),
        }

    def count_slabs(self, name: str) -> int:
        """Counts the slabs of columns that TMA copies of queries "q", keys "k", values "v" or output cotangents "do"."""
        count = self.parts[1] if name == "k" else of_operand(name, self.slabs)
        return count + (of_operand(name, self.tails) > 0)

    def _slabs_and_tails(self, halves: int) -> dict[str, Any]:
        """Describes operands in slabs of columns. Keys have all parts that dQ has, with 0 behind the last column."""
        (stages, stages_do), (slabs, value_slabs), memory = self.config.stages, self.slabs, {}
        rows = self.config.block_q
        places = {"k": (halves, self.parts[1], ROWS), "v": (halves, value_slabs, ROWS)}
        places |= {"q": (stages, slabs, rows), "do": (stages_do, value_slabs, rows)}
        for name, place in places.items():
            memory[name] = self._in_two_views(*place, ROWS)
            if tail := of_operand(name, self.tails):
                memory[f"{name}_tail"] = self._in_two_views(place[0], 1, place[2], tail)
        return memory

    def _in_two_views(self, *shape: int):
        return in_two_views(shape, shape, self.dtype)

    def _place_of_sums(self, width: int):
        """Describes the place from where consumers add dQ to global memory, `width` columns at a time, and store results."""
        sums = self._tiles(CONSUMERS, ROWS, width, dtype=jnp.float32)
        if not self.stages_results:
            return sums
        # One consumer may store results while the other one still adds dQ, so that both names must have the same bytes of each
        # consumer. JAX puts each array of a union at its start, and a test holds these arrays to the same size.
        shape = CONSUMERS, 2 * width // ROWS, ROWS, ROWS
        results = self._in_two_views(*shape) if self.in_slabs else self._tiles(*shape)
        return plgpu.RefUnion(sums, *getattr(results, "refs", [results]))  # JAX does not take apart a union in a union

    def _bias_stage(self, halves: int) -> dict[str, Any]:
        """Describes the place for the bias of a step: queries are rows, as in global memory."""
        if not self.config.stages_bias:
            return {}
        chunks = self.config.block_q // ROWS
        return {
            "bias": self._tiles(halves, chunks, ROWS, ROWS),
            "bias_full": plgpu.Barrier(num_arrivals=halves * chunks),
            "bias_empty": plgpu.Barrier(num_arrivals=halves),
        }

    def _tiles(self, *shape: int, dtype: Any = None):
        """Describes an array in tiles as tensor cores read and TMA writes them; without a dtype it has that of operands."""
        dtype = dtype or (self.dtype if self.n_terms == 1 else jnp.dtype(jnp.bfloat16))
        return plgpu.SMEM(shape, dtype, transforms=tile_transforms(dtype))


def _varies(types) -> bool:
    """Returns True if the bias varies both along queries and along keys."""
    lengths = types["query"].shape[-3], types["key"].shape[-3]
    return types["bias"].shape[-2:] == lengths and 1 not in lengths


def _is_of_16_bits(types) -> bool:
    """Returns True if the bias has the dtype of queries, and both have 16 bits."""
    return types["bias"].dtype == types["query"].dtype and types["query"].dtype.itemsize == 2


def _bias_gradient(types, batch, *, is_changed, is_partial) -> BiasGradient:
    """Says how the derivative of a bias is written, from the types of operands and the sizes of the batch.

    `is_changed` says that a soft cap or a score function changes the products.
    """
    if not _varies(types):
        return BiasGradient.SUMS
    bias, (length, heads, _) = types["bias"], types["query"].shape[-3:]
    is_whole = bias.shape == (*batch, heads, length, bias.shape[-1])
    is_of_products = not is_changed and _is_of_16_bits(types) and not is_partial
    return BiasGradient.STORED if is_whole and is_of_products else BiasGradient.ADDED


def slope_of(score_mod: TracedFunction) -> ClosedJaxpr:
    """Returns the program of the derivative of a score function by its score."""
    program = with_slope(score_mod)
    return with_results(program, program.jaxpr.outvars[1:])


def _needs_registers(types, wanted, *, score_mod=None, mask_mod=None, soft_cap=None, **options) -> bool:
    """Returns True if functions have more arrays as large as the scores than fit beside 128 queries of a step."""
    functions = [function for function in (score_mod, mask_mod) if function is not None]
    if any(loads_tiles(Function.of(function), types) for function in functions):
        return True
    if score_mod is None:
        return False
    has_slope = not isinstance(with_slope(score_mod).jaxpr.outvars[1], Literal)
    return has_slope or soft_cap is not None or not set(TABLES).isdisjoint(wanted)


def shape_backward(
    types: Mapping[str, Any],
    target: Target,
    wanted: Collection[str],
    is_deterministic: bool,
    is_partial: bool = False,
    **options: Any,
) -> BackwardGeometry:
    """Shapes the kernel for operands of these types, by name, and the cotangents `wanted`.

    `is_partial` is as in `BackwardPlan`, `options` as in `AttentionProblem`.
    """
    has_limits = bool({"query_lengths", "key_lengths", "query_offset", "query_segments"} & set(types))
    score_mod, has_mask_mod = options.get("score_mod"), options.get("mask_mod") is not None
    shapes, bias_gradient = shapes_of(types, target), BiasGradient.NONE
    is_changed = options["soft_cap"] is not None or options.get("score_mod") is not None
    if "bias" in wanted:
        bias_gradient = _bias_gradient(types, shapes["batch"], is_changed=is_changed, is_partial=is_partial)
    head_size, value_size = (types[name].shape[-1] for name in ("query", "value"))
    passes_both = "bias" in wanted and is_changed
    size, config = backward_config(head_size, value_size, shapes["dtype"], passes_both=passes_both)
    if config is _CONFIGS[64] and _needs_registers(types, wanted, **options):
        config = _CONFIG_OF_FUNCTIONS
    shape = functools.partial(
        BackwardGeometry,
        **shapes | {"names": frozenset(types) - {"sinks"}},
        **options,
        size=size,
        value_size=value_size,
        changed_factor=factor_of_changed(types, **options),
        has_finite_slope=score_mod is None or is_finite(Function.of(score_mod, slope_of(score_mod)), types),
        bias_gradient=bias_gradient,
        is_deterministic=is_deterministic,
        tables=tuple(name for name in wanted if name in TABLES),
        is_varying=has_limits or has_mask_mod or ("mask" in types and key_blocks.is_shared(types["mask"])),
    )
    plain = shape(config=config)
    has_lists = lists.pays_to_list(plain.mask_mod, types, config.block_q, plain.block_kv, by_keys=True)
    shape = functools.partial(shape, has_lists=has_lists)
    plain = shape(config=config)
    if "bias" in types and _varies(types) and _is_of_16_bits(types):
        staged = shape(config=replace(config, stages=(2, config.stages[1]), stages_bias=True))
        # Two blocks of threads take 4259 us where each thread loads its elements of the bias, and single ones 4410 us where TMA
        # does (head size 256, 4096 tokens, H100).
        if staged.shared_memory <= target.shared_memory and not plain.is_paired:
            plain = staged
    return plain if is_partial else _with_fitting_tiles(plain)


def _with_fitting_tiles(geometry: BackwardGeometry) -> BackwardGeometry:
    """Returns the geometry with tiles of single query heads, or with tiles that are cut, where it is done sooner.

    Tiles of all query heads that share keys are few and long. Some blocks of threads may end late: of 4 x 4096 causal tokens,
    16 query heads of 128 and one key head, after 1026 steps, and after 536 with tiles of single query heads. Or the tiles that
    run at a time need more than L2 holds (`_exceeds_cache`), and do not alternate.

    Tiles that take equally long end late if the blocks of threads do not divide their number: 4 x 4096 tokens, 16 heads of 128
    are 15.5 tiles a block of threads, and the last block ends after 1048 steps, and after 1018 if tiles of three heads are cut.
    """
    if geometry.is_deterministic:
        return geometry
    if geometry.heads_per_key_head == 1:
        return _with_cut_tiles(geometry)
    single = replace(geometry, has_single_heads=True)
    if single.n_tiles > schedule.MAX_SCHEDULED:
        return geometry
    duration = schedule.duration(single) + _steps_of_xla(geometry, math.prod(geometry.batch) * geometry.key[1])
    is_sooner = schedule.duration(geometry) > _LEAST_GAIN_OF_SINGLE_HEADS * duration
    return single if is_sooner or (not geometry.alternates and _exceeds_cache(geometry)) else geometry


def _is_uneven(costs: Sequence[int]) -> bool:
    """Returns True if the longest tile takes far longer than the average, as with causal attention of equal lengths."""
    return max(costs) * len(costs) > 1.5 * sum(costs)


def _exceeds_cache(geometry: BackwardGeometry) -> bool:
    """Returns True if the query heads that tiles visit at a time have more bytes than twice the L2 cache of an H100.

    That is four times `schedule.L2`, which tiles may share.

    Tiles that take equally long are at the same query head at a time; others are at any of those that share their keys, unless
    they alternate. For 4 x 4096 causal tokens and 16 query heads of 128, forward and backward take, with tiles of all query
    heads and of single ones, 2380 us and 1657 us with two key heads, and with four 1712 us and 1687 us (H100).
    """
    key_heads_at_once = min(geometry.n_blocks / geometry.tiles_of_head, math.prod(geometry.batch) * geometry.key[1])
    bytes_at_once = key_heads_at_once * geometry.heads_per_key_head * geometry.bytes_of_query_head
    return _is_uneven(geometry.costs()) and bytes_at_once > 4 * schedule.L2


def _with_cut_tiles(geometry: BackwardGeometry) -> BackwardGeometry:
    """Returns the geometry with tiles that are cut if it is done sooner, else with whole ones."""
    steps, heads = geometry.blocks_q, geometry.query[1]
    is_added = geometry.bias_gradient is BiasGradient.ADDED  # whose tiles come in an order of their own
    visits_all = not geometry.is_varying and set(geometry.costs()) == {steps}
    if is_added or not visits_all or geometry.n_tiles > schedule.MAX_SCHEDULED:
        return geometry
    blocks = geometry.blocks_at_once
    cut = pl.cdiv(geometry.n_tiles % blocks, geometry.tiles_of_head)
    cut = cut if cut <= heads else pl.cdiv(cut, heads) * heads  # of one entry of the batch, or of all heads of some
    if not cut:
        return geometry
    with_cuts = replace(geometry, cut_heads=cut)
    if geometry.n_tiles + with_cuts.n_cut * steps >= 2**31:  # places in the line are int32
        return geometry
    end = schedule.schedule_cut(steps, geometry.n_tiles, with_cuts.n_cut, blocks)[1]
    is_sooner = schedule.duration(geometry) > _LEAST_GAIN_OF_CUTS * (end + _steps_of_xla(geometry, cut))
    return with_cuts if is_sooner else geometry


def _steps_of_xla(geometry: BackwardGeometry, heads: int) -> float:
    """Estimates the steps in the time that XLA takes for sums of dK and dV: zeros, and a read of 32 bits, a result of 16."""
    return 20 * heads * geometry.key[0] * geometry.size / _BYTES_OF_STEP + _STEPS_OF_LAUNCHES
