"""How the forward kernel runs a problem: rows, tiles, the key blocks that they visit, and shared memory."""

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import schedule, wgmma
from jaxsoftmax.ops.attention import key_blocks, mask_blocks
from jaxsoftmax.ops.attention.mosaic_sm90 import lists
from jaxsoftmax.ops.attention.mosaic_sm90.common import (
    HOST,
    KERNEL,
    LN2,
    LOG2E,
    NARROW,
    ROWS,
    SWIZZLED,
    Arithmetic,
    AttentionGeometry,
    GlobalOperand,
    in_two_views,
    of_operand,
    shapes_of,
    tail_of,
)
from jaxsoftmax.ops.attention.mosaic_sm90.functions import Function, factor_of_changed

# Number of int32 that each operand tells of a tile. With any of them only operands decide how long a tile takes, so blocks take
# tickets. `query_offset` is an operand, as a cache grows from step to step.
FACTS = {"query_lengths": 1, "key_lengths": 1, "query_offset": 1, "ranges": 4, "mask_reach": 2}
CROWDING = {"bias", "mask", "seeds"}  # operands that leave consumers too few registers for some means
# Rows that see a key, from which on float32 keys and values are split before the kernel. Splitting 16384 keys of 2048 columns,
# and as many values, takes 176 us. A kernel that splits takes 3346 us, else 2051 us, where 4096 rows see each key, and 1674 us
# and 1079 us where 2048 do (heads of 128, H100): as long for about 600 rows.
LEAST_ROWS_TO_SPLIT = 640
WIDEST = 256  # columns of the output that a consumer has in registers, 128 of a thread


class Correction(enum.Enum):
    """Ways to compute weights again after a wrong guess that maxima do not follow: see `online.guess_log2`.

    Consumers guess in every step except the first one of a tile. This leaves out 64 of the 400 instructions of a step, and
    exponentials start when scores are there: 3055 us without guesses, 2795 us with them (head size 128, 16384 tokens, H100);
    3837 us and 3597 us at head size 64.
    """

    FROM_SCORES = enum.auto()  # the scores are still in registers; each warp corrects its own rows
    FROM_PRODUCT = enum.auto()  # registers do not hold scores and weights: a consumer multiplies again, for all its warps


@dataclass(frozen=True)
class ForwardConfig:
    """Settings of a block of threads of the forward kernel."""

    consumers: int  # warpgroups, each with 64 rows of a tile
    block_kv: int  # keys of a step
    stages: int  # key blocks, and value blocks, that shared memory has room for
    own_output: bool = True  # else the output takes the place of the queries, which are as large then
    registers: tuple[int, int] = (24, 240)  # of a thread of a producer, and of a consumer
    ping_pong: bool = True  # consumers take turns at the tensor cores, so that one multiplies while another exponentiates
    has_terms: bool = False  # operands are float32, each the sum of two terms; the output needs no shared memory then
    # XLA splits keys and values into terms, which TMA copies, and consumers their queries. Else producers split what they copy.
    copies_terms: bool = False
    producers: int = 1  # warpgroups that copy: one, or one for queries and keys and one for values
    byte_stages: int = 0  # key blocks of 8 bits, and value blocks, in shared memory; 0 if keys and values have more bits
    correction: Correction | None = None  # of guessed weights; None if maxima come first, and nothing is guessed

    @property
    def converters(self) -> int:
        """Number of warpgroups that convert 8 bits: one for keys and one for values, or none."""
        return 2 if self.byte_stages else 0

    @property
    def slot_terms(self) -> int:
        """Number of terms of queries in shared memory. Consumers that split their queries keep the high one in registers."""
        return 1 if self.copies_terms else 2


@dataclass(frozen=True)
class HeadRows:
    """Rows of a query head: row `i` belongs to query `i`. Queries and output are `[entries, rows, heads, size]`."""

    heads_per_query: int = 1  # heads that have a row of each query
    box: int | None = None  # rows that a box of TMA takes from each of several queries; None if it takes rows of one head

    def queries_from(self, first: Any, n_rows: int, arithmetic: Arithmetic) -> tuple[Any, int]:
        """Returns the first query that rows from `first` on belong to, and the number of queries that they may belong to."""
        del arithmetic
        return first, n_rows

    def query_of(self, row):
        """Returns the query that a row belongs to."""
        return row

    def at(self, rows, head):
        """Returns the indices of a slice of rows of a head in queries and output, between entry and columns."""
        return rows, head

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of queries, or the output, as a matrix of rows: `[entries * rows, heads * size]`."""
        entries, rows, heads, size = shape
        return entries * rows, heads * size

    def in_matrix(self, entry, head, heads: int) -> tuple[Any, Any, int]:
        """Returns entry, head and number of heads of rows in that matrix."""
        return entry, head, heads

    def sinks(self, operand, tile, first, geometry):
        """Loads the sink of the rows, a scalar."""
        del first, geometry
        return operand[tile.b, tile.head].astype(jnp.float32)


@dataclass(frozen=True)
class FoldedRows(HeadRows):
    """Rows of all query heads that share a key head: a tile reads these keys once for all of them.

    With `n = heads_per_query`, row `i` belongs to query `i // n` and to its head `i % n`. Heads of a kernel with such rows are
    key heads. If `n` divides 64, TMA copies a box of queries, heads and columns to rows that follow one another, and the output
    back: `box` is `n` then. Otherwise, and in float32, XLA transposes both to `[entries, key heads, rows, size]`.
    """

    def queries_from(self, first: Any, n_rows: int, arithmetic: Arithmetic) -> tuple[Any, int]:
        return arithmetic.divide(first, self.heads_per_query), (n_rows + self.heads_per_query - 2) // self.heads_per_query + 1

    def query_of(self, row):
        return lax.div(row, jnp.int32(self.heads_per_query))

    def at(self, rows, head):
        if self.box is None:
            return head, rows
        heads = self.heads_per_query
        return pl.ds(lax.div(rows.start, jnp.int32(heads)), rows.size // heads), pl.ds(head * heads, heads)

    def matrix_shape(self, shape: tuple[int, ...]) -> tuple[int, int]:
        """Returns the shape of queries, or the output, as a matrix of rows: `[entries * heads * rows, size]`."""
        return math.prod(shape[:-1]), shape[-1]

    def in_matrix(self, entry, head, heads: int) -> tuple[Any, Any, int]:
        return entry * heads + head, 0, 1

    def sinks(self, operand, tile, first, geometry):
        """Loads the sinks of the rows. They belong to the first split alone: the others have no sink."""
        length, heads, _ = geometry.query
        start = (operand.index(tile.b) * heads + tile.head) * length + first
        sinks = wgmma.load_product_rows(operand.ref, start, length - first, (ROWS, geometry.config.block_kv))
        return jnp.where(jnp.broadcast_to(tile.split, (ROWS,)) == 0, sinks, -jnp.inf)


@dataclass(frozen=True)
class Pages:
    """Pages of keys and values, `[*batch, count, size, heads, head size]`."""

    size: int  # keys of a page, a power of two
    count: int  # pages of a batch entry

    def count_in_block(self, block_kv: int) -> int:
        """Counts the pages that a key block has keys of: 1 if a page has several key blocks."""
        return max(1, block_kv // self.size)


def forward_config(
    head_size: int,
    value_size: int,
    window: Any = (None, None),
    dtype: DTypeLike = jnp.bfloat16,
    guesses: bool = False,
    copies_terms: bool = False,
    is_crowded: bool = False,
) -> ForwardConfig:
    """Returns the configuration for head sizes, as measured on an H200: `benchmarks/results/h200/attention.csv`.

    Args:
      head_size: head size of queries and keys.
      value_size: head size of values.
      window: numbers of keys before and after its own position that a query sees.
      dtype: dtype of the queries.
      guesses: consumers guess that maxima do not follow, except those of float32.
      copies_terms: XLA splits float32 keys and values into terms.
      is_crowded: some of `CROWDING` are among the operands. Only float32 heeds it: the others do not guess then.
    """
    sizes = sizes_on_chip(head_size, value_size)
    if jnp.dtype(dtype) == jnp.float32 and copies_terms:
        block, stages = (128, 2) if max(sizes) <= 64 and not is_crowded else (64, 3)
        return ForwardConfig(2, block, stages, has_terms=True, copies_terms=True)
    if jnp.dtype(dtype) == jnp.float32:
        if max(sizes) <= 64:
            return ForwardConfig(3, 64, 3, registers=(72, 144), ping_pong=False, has_terms=True)
        # One warpgroup that splits operands is too slow for the tensor cores.
        return ForwardConfig(2, 64, 2, registers=(96, 160), ping_pong=False, has_terms=True, producers=2)
    if max(head_size, value_size) > WIDEST:
        # Queries of 512, keys and a half of the values take 224 KiB. The output goes where the queries were if it fits there.
        return ForwardConfig(2, 64, 1 if head_size > WIDEST else 2, own_output=sizes[0] < sizes[1], ping_pong=False)
    from_scores, from_product = (Correction.FROM_SCORES, Correction.FROM_PRODUCT) if guesses else (None, None)
    # Ping-pong costs more than it gives above head size 128, and at 64 without a window and guesses.
    if max(sizes) <= 64:
        ping_pong = window != (None, None) or from_product is not None
        return ForwardConfig(3, 128, 4, registers=(32, 160), ping_pong=ping_pong, correction=from_product)
    # With guesses ptxas spills 20 to 68 bytes, except at head size 192: what a tile needs before and after its steps. In
    # a step it spills one sum with lengths, and more with segments: up to head size 128 scores, weights, the output and the
    # weights of the step before take 224 of a consumer's 240 registers.
    if max(sizes) <= 128:
        return ForwardConfig(2, 128, 2, correction=from_scores)
    # Heads of 192, and 128 of values: 405 us without guesses and with two stages, 361 us with guesses, 350 us with three stages
    # too (4096 causal tokens, 12 heads, H200). With 256 columns shared memory has no room for a third stage.
    stages = 3 if max(sizes) <= 192 else 2
    return ForwardConfig(2, 64, stages, own_output=sizes[0] != sizes[1], ping_pong=False, correction=from_scores)


def pays_to_guess(types: Mapping[str, Any], window: Any) -> bool:
    """Tells whether consumers are faster if they guess that maxima do not follow, for operands of these types.

    Figures are times with guesses over times without, of an H100.

    - float16 holds weights of at most 2^15, which leaves no room for guesses. float32 was not tried.
    - Masks, biases and dropout leave too few registers: 1.34 with a mask, 1.45 with a bias (4096 tokens).
    - Few key blocks do not repay what guesses add to a tile: 1.01 and 1.02 (512 causal tokens, heads of 128 and 256).
    """
    size, keys = types["query"].shape[-1], types["key"].shape[-3]
    is_short = size > 64 and window[1] is not None and keys <= 512
    return types["query"].dtype == jnp.bfloat16 and not CROWDING & types.keys() and not is_short


def pays_to_split(types: Mapping[str, Any], window: Any) -> bool:
    """Tells whether XLA should split float32 keys and values into terms, for operands of these types.

    It pays if many rows see a key, as each tile would split it otherwise.
    """
    (length, heads, _), key_heads, (left, right) = types["query"].shape[-3:], types["key"].shape[-2], window
    if left is not None and right is not None:
        length = min(length, left + right + 1)
    elif left is not None or right is not None:
        length //= 2
    return types["query"].dtype == jnp.float32 and length * heads // key_heads >= LEAST_ROWS_TO_SPLIT


def padded(size: int) -> int:
    """Returns the columns that a head size takes in shared memory: above 256 in two halves."""
    unit = SWIZZLED * halves(size)
    return pl.cdiv(size, unit) * unit


def halves(size: int) -> int:
    """Returns 2 if a head size is so large that its columns come in halves, else 1."""
    return 2 if size > WIDEST else 1


def sizes_on_chip(head_size: int, value_size: int) -> tuple[int, int]:
    """Returns the columns of keys, and of the values of a tile, in shared memory, in steps of 64: see `_lay_out_columns`."""
    return padded(head_size), padded(value_size) // halves(value_size)


@dataclass(frozen=True)
class ForwardGeometry(AttentionGeometry):
    """The geometry of the forward kernel for one problem.

    A tile is a block of rows of one head, and of one split of the keys.

    Registers hold 64 rows of the output with 256 columns. A tile has half of the columns of larger values, and the scores are
    computed for each half: 1.5 times the products. Two consumers with half of the columns each, for the same 64 rows, would
    compute them twice too, and read more from the L2 cache, which is the limit: a byte for 64 operations, here for 85.
    """

    config: ForwardConfig
    value_size: int
    rows: HeadRows = field(default_factory=HeadRows)
    # Number of parts of the key blocks that rows see. The results of more than one are states: for each split of a row `o`, `m`
    # and `d` in float32, where `o` has no meaning if `d` is 0.
    splits: int = 1
    pages: Pages | None = None
    bytes_dtype: str | None = None  # of keys and values if they have 8 bits; they come as int8 with the same bits then

    # These follow from the others.
    n_warpgroups: int = field(init=False)
    queries: int = field(init=False)
    block_q: int = field(init=False)  # rows of a tile
    blocks_q: int = field(init=False)
    blocks_kv: int = field(init=False)
    sizes: tuple[int, int] = field(init=False)  # columns of keys, and of the values of a tile, in shared memory
    value_parts: int = field(init=False)  # tiles that share the columns of the values
    # Parts of the columns of keys, with barriers of their own: the first part is copied while the second is multiplied.
    key_parts: int = field(init=False)
    is_ragged: bool = field(init=False)  # lengths or head sizes are no multiples of a swizzled tile's: TMA copies slabs
    slabs: tuple[int, int] = field(init=False)  # equal slabs of columns of queries and keys, and of values and the output
    tails: tuple[int, int] = field(init=False)  # columns of a narrower slab behind them, or 0: see `tail_of`
    # Columns of a swizzled tile of shared memory, for queries and keys and for values and the output: `SWIZZLED` or `NARROW`.
    widths: tuple[int, int] = field(init=False)
    value_width: int = field(init=False)  # columns of values of one product, except that of the tail
    n_products: int = field(init=False)  # products of the tensor cores that multiply weights and values
    unit: float = field(init=False)  # of `m`, see `online.push_log2`
    n_facts: int = field(init=False)  # int32 that operands say of a tile; blocks of threads take tickets if there are any

    def __post_init__(self):
        (n_rows, heads, size), keys, config = self.query, self.key[0], self.config
        block_q, key_parts, value_parts = ROWS * config.consumers, halves(size), halves(self.value_size)
        blocks_q = pl.cdiv(n_rows, block_q)
        wide, tails, widths, is_whole = self._lay_out_columns()
        is_ragged = not config.has_terms and (self.rows.box is not None or not is_whole)  # float32 does not go through TMA
        slabs = (wide[0] // SWIZZLED, wide[1] // SWIZZLED) if is_ragged else (key_parts, 1)
        value_width = wide[1] // slabs[1]
        if config.byte_stages and value_width == 256:  # four warpgroups start with 128 registers, and its product takes 158
            value_width = 128
        n_facts = sum(count for name, count in FACTS.items() if name in self.names) + self.tells_entries
        self._derive(
            n_warpgroups=config.consumers + config.producers + config.converters,
            queries=n_rows // self.rows.heads_per_query,
            block_q=block_q,
            blocks_q=blocks_q,
            blocks_kv=pl.cdiv(keys, config.block_kv),
            sizes=(wide[0] + tails[0], wide[1] + tails[1]),
            value_parts=value_parts,
            key_parts=key_parts,
            is_ragged=is_ragged,
            slabs=slabs,
            tails=tails,
            widths=widths,
            value_width=value_width,
            n_products=3 if config.has_terms else wide[1] // value_width + (tails[1] > 0),
            # Scores with a bias, or of the user, may be as large as `finfo.min`: their maximum must not be rounded when it is
            # scaled.
            unit=LOG2E if "bias" in self.names or (self.score_factor is None and self.soft_cap is None) else 1.0,
            n_facts=n_facts,
            by_ticket=n_facts > 0,
            n_tiles=math.prod(self.batch) * heads * value_parts * blocks_q * self.splits,
        )

    @property
    def tells_entries(self) -> bool:
        """True if the number of the batch entry, which functions read, is told of a tile, so that consumers need not wait."""
        return {"entries", "ranges"} <= self.names

    @property
    def functions(self) -> dict[str, Function]:
        """Score and mask functions, by name."""
        functions = {"score_mod": self.score_mod, "mask_mod": self.mask_mod}
        return {name: Function.of(function) for name, function in functions.items() if function is not None}

    @property
    def fits_columns(self) -> bool:
        """True if columns in shared memory may be no multiple of 64: in 16 bits, neither paged nor decoded, up to `WIDEST`."""
        is_plain = not self.config.has_terms and not self.config.byte_stages and self.pages is None
        is_decoded = isinstance(self.rows, FoldedRows)
        return is_plain and not is_decoded and max(self.query[2], self.value_size) <= WIDEST

    def _lay_out_columns(self) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bool]:
        """Returns the columns before a tail, `tails`, `widths`, and True if TMA copies whole tiles, False for slabs.

        The output takes one product with whole tiles, which may have `NARROW` columns, and several with slabs. 4096 causal
        tokens take 356 us with whole tiles, and 468 us with slabs and a tail (12 heads of 160); 382 us and 439 us (9 heads of
        224); 430 us and 451 us (21 heads of 96; H200). Tiles of 16 columns are slower than slabs: 524 us and 448 us (18 heads
        of 112), 595 us and 503 us (25 heads of 80).
        """
        sizes = self.query[2], self.value_size // halves(self.value_size)
        has_own, has_whole_rows = self.config.own_output, self.query[0] % 8 == self.key[0] % 8 == 0
        # An output that takes the place of the queries has the same slabs or tiles as they.
        is_alike = has_own or sizes[0] == halves(self.query[2]) * sizes[1]
        if self.fits_columns and has_whole_rows and is_alike and all(size % NARROW == 0 for size in sizes):
            return sizes, (0, 0), tuple(NARROW if size % SWIZZLED else SWIZZLED for size in sizes), True
        wide = sizes_on_chip(self.query[2], self.value_size)
        tails = (tail_of(sizes[0]), tail_of(sizes[1])) if self.fits_columns else (0, 0)
        if not has_own and tails[0] != tails[1]:
            tails = 0, 0
        is_whole = has_whole_rows and is_alike and wide == sizes
        wide = tuple(columns - (SWIZZLED if tail else 0) for columns, tail in zip(wide, tails, strict=True))
        return wide, tails, (SWIZZLED, SWIZZLED), is_whole

    @property
    def hides_in_first_block_alone(self) -> bool:
        """True if the window and the end of the keys hide keys of the first key block that rows visit, and of no other one.

        The first one has the highest number. With an aligned `right` it has the last key of each of the 64 rows.
        """
        left, right = self.window
        is_aligned = right is None or (right % ROWS == self.config.block_kv % ROWS == 0 and self.rows.heads_per_query == 1)
        return left is None and is_aligned and not {"ranges", "query_lengths", "key_lengths", "query_offset"} & self.names

    def describe(self) -> str:
        """Says in one line how the kernel runs."""
        config, heads = self.config, self.rows.heads_per_query
        parts = [
            f"tiles of {self.block_q} {'queries' if heads == 1 else f'rows of {heads} heads'} by {config.block_kv} keys",
            f"{config.stages} {'stages' if config.stages > 1 else 'stage'}",
            f"{config.consumers} consumer {'warpgroups' if config.consumers > 1 else 'warpgroup'}",
            f"{self.splits} {'splits' if self.splits > 1 else 'split'}",
        ]
        is_narrower = self.sizes != sizes_on_chip(self.query[2], self.value_size)
        parts += ["{} and {} columns".format(*self.sizes)] if is_narrower else []
        parts += ["each half of the values in its own tiles"] if self.value_parts > 1 else []
        parts += ["guessed maxima"] if config.correction is not None else []
        parts += ["keys and values split before"] if config.copies_terms else []
        parts += [f"pages of {self.pages.size} keys"] if self.pages is not None else []
        parts += [f"{self.bytes_dtype} converted in shared memory"] if self.bytes_dtype is not None else []
        parts += [f"{' and '.join(self.functions)} in registers"] if self.functions else []
        parts += ["lists of key blocks"] if self.has_lists else []
        return ", ".join(parts)

    def seen(self, lengths: Any, first: Any, rows: int, arithmetic: Arithmetic, offset: Any = 0) -> tuple[Any, Any]:
        """Returns the first key block that some of the queries from `first` on see, and the one behind the last.

        Window and lengths say it. `offset` is the position of query 0.
        """
        (queries, keys), (left, right), size = lengths, self.window, self.config.block_kv
        divide, minimum, maximum, where = arithmetic
        low, high = 0, divide(keys + size - 1, size)
        if left is not None:
            low = divide(maximum(first + offset - left, 0), size)
        if right is not None:
            last = minimum(first + rows, queries) - 1 + offset
            high = minimum(high, divide(maximum(last + right, -1) + size, size))
        return low, where(first < queries, high, 0)

    def part(self, low: Any, high: Any, split: Any, arithmetic: Arithmetic) -> tuple[Any, Any]:
        """Returns the key blocks of a split, of those from `low` to `high`; none if the end is not above the start."""
        size = arithmetic.divide(arithmetic.maximum(high - low, 0) + self.splits - 1, self.splits)
        first = low + split * size
        return first, arithmetic.minimum(first + size, high)

    def costs(self) -> tuple[int, ...]:
        """Counts the key blocks of each block of rows, or of each of its splits: at least one."""
        starts, lengths = range(0, self.query[0], self.block_q), (self.queries, self.key[0])
        spans = (self.seen(lengths, *self.rows.queries_from(first, self.block_q, HOST), HOST) for first in starts)
        parts = (self.part(*span, split, HOST) for span in spans for split in range(self.splits))
        sizes = [max(high - low, 1) for low, high in parts]
        # Splits divide what a mask function shows to few queries evenly.
        if self.mask_mod is None or isinstance(self.rows, FoldedRows) or (counts := self._shown()) is None:
            return tuple(sizes)
        return tuple(max(min(pair), 1) for pair in zip(sizes, counts, strict=True))

    def _shown(self) -> list[int] | None:
        """Counts the key blocks of each block of rows that the mask function shows, if positions alone say it."""
        lengths, has_offset = (self.query[0], self.key[0]), not {"query_offset", "query_numbers"}.isdisjoint(self.names)
        counts = mask_blocks.counts(self.mask_mod, lengths, self.block_q, self.config.block_kv, has_offset=has_offset)
        return None if counts is None else [int(count) for count in counts]

    def n_heads_at_once(self, costs: tuple[int, ...]) -> int:
        """Returns the number of heads whose tiles are handed out together.

        If all tiles take equally long it is one: they read the same keys at the same time then, from the L2 cache. Otherwise it
        is the number of heads that the L2 cache has room for, so that the last tiles to be handed out are short ones. With
        segments, or a mask function that reads arrays, a tile reads few keys.
        """
        if "query_segments" in self.names or (self.mask_mod is not None and self.mask_mod.tables):
            return 16
        if len(set(costs)) == 1:
            return 1
        keys, key_heads, size = self.key
        itemsize = 4 if self.config.has_terms else 1 if self.bytes_dtype else 2
        bytes_of_head = max(1, itemsize * keys * (size + self.value_size) * key_heads // self.query[1])
        return min(8, 1 << max(1, schedule.L2 // bytes_of_head).bit_length() - 1)

    @property
    def stages_segments(self) -> bool:
        """True if segments of keys come to shared memory by TMA, beside the keys. Else threads load them when they mask.

        While threads load them nothing is multiplied: 16384 causal tokens in 12 documents take 407 us so, and 315 us by TMA,
        without a spill (head size 64, H200); 236 us and 224 us at head size 128, 217 us and 205 us at 256.
        """
        has_plain_keys = self.pages is None and not self.config.has_terms and not self.config.byte_stages
        return "key_segments" in self.names and has_plain_keys and self.key_parts == 1

    def scratch(self) -> dict[str, Any]:
        """Describes what is in shared memory. A barrier is full when a copy has landed, and empty when all have read it."""
        config = self.config
        head_slabs, value_slabs = (self.count_slabs(letter) for letter in "qv")
        pages = 1 if self.pages is None else self.pages.count_in_block(config.block_kv)
        copies = [head_slabs * pages, value_slabs * pages]
        if config.copies_terms:
            copies = [2, 2]
        key_slots = self.key_parts * config.stages
        memory: dict[str, Any] = {}
        if self.by_ticket:
            memory |= schedule.ticket_memory(1 + self.n_facts, self.n_warpgroups - 1)
        if config.own_output and not config.has_terms and self.splits == 1:
            memory |= self._slots_of("o", config.consumers, ROWS, box=self.rows.box)
        if config.byte_stages:
            for letter, count in zip("kv", copies, strict=True):
                memory |= self._slots_of(f"{letter}_bytes", config.byte_stages, config.block_kv, dtype=jnp.int8)
                memory[f"{letter}_bytes_full"] = plgpu.Barrier(num_arrivals=count, num_barriers=config.byte_stages)
                memory[f"{letter}_bytes_empty"] = plgpu.Barrier(num_barriers=config.byte_stages)
            copies = [1, 1]
        memory |= self._slots_of("q", config.consumers, ROWS, box=self.rows.box, terms=config.slot_terms)
        if self.stages_segments:
            memory["k_segments"] = plgpu.SMEM((config.stages, config.block_kv), jnp.int32)
        if not config.copies_terms:
            memory["q_full"] = plgpu.Barrier(num_arrivals=head_slabs, num_barriers=config.consumers)
            memory["q_empty"] = plgpu.Barrier(num_barriers=config.consumers)
        memory |= self._slots_of("k", config.stages, config.block_kv) | self._slots_of("v", config.stages, config.block_kv)
        return memory | {
            "k_full": plgpu.Barrier(num_arrivals=copies[0] // self.key_parts + self.stages_segments, num_barriers=key_slots),
            "v_full": plgpu.Barrier(num_arrivals=copies[1], num_barriers=config.stages),
            "k_empty": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=key_slots),
            "v_empty": plgpu.Barrier(num_arrivals=config.consumers, num_barriers=config.stages),
        }

    def count_slabs(self, letter: str) -> int:
        """Counts the slabs of columns of queries "q", keys "k", values "v" or the output "o", with a tail."""
        return of_operand(letter, self.slabs) + (of_operand(letter, self.tails) > 0)

    def _slots_of(self, letter, n_stages, rows, **options) -> dict[str, Any]:
        """Describes the slots of one operand, and those of its tail, by name."""
        tail = of_operand(letter, self.tails)
        size, slabs = of_operand(letter, self.sizes) - tail, of_operand(letter, self.slabs)
        memory = {letter: self._slots(n_stages, rows, size, slabs, width=of_operand(letter, self.widths), **options)}
        if tail:
            memory[f"{letter}_tail"] = self._slots(n_stages, rows, tail, 1, **options)
        return memory

    def _slots(self, n_stages, rows, size, slabs, width=SWIZZLED, dtype=None, box=None, terms=2):
        """Describes slots of one operand, in tiles as the tensor cores read them, `width` columns wide."""
        dtype, tiling = dtype or self.dtype, plgpu.TilingTransform((8, width))
        if self.config.has_terms:
            transforms = tiling, plgpu.SwizzleTransform(2 * SWIZZLED)
            return plgpu.SMEM((n_stages, terms, rows, size), jnp.bfloat16, transforms=transforms)
        if not self.is_ragged:
            shape = (n_stages, rows, size) if slabs == 1 else (n_stages, slabs, rows, size // slabs)
            return plgpu.SMEM(shape, dtype, transforms=(tiling, plgpu.SwizzleTransform(width * jnp.dtype(dtype).itemsize)))
        shape = tiled = (n_stages, slabs, rows, size // slabs)
        if box is not None:
            shape = (n_stages, slabs, rows // box, box, size // slabs)
        return in_two_views(shape, tiled, dtype)


def shape_forward(types: Mapping[str, Any], target: Target, **options: Any) -> ForwardGeometry:
    """Shapes the kernel for operands of these types, by name; `options` are those of `AttentionProblem`."""
    query, value_size = types["query"], types["value"].shape[-1]
    window = options["window"]
    changed_factor = factor_of_changed(types, **options)
    # With guesses and ALiBi as a function ptxas spills 52 bytes at head size 128, and 248 at 64, most of them in each step.
    has_small_tiles = max(query.shape[-1], value_size) <= 64 and changed_factor in (None, LN2)
    is_changed = options.get("score_mod") is not None and (has_small_tiles or query.dtype == jnp.float32)
    is_crowded = bool(CROWDING & types.keys()) or is_changed
    pays = pays_to_guess(types, window) and not is_crowded, pays_to_split(types, window)
    config = forward_config(query.shape[-1], value_size, window, query.dtype, *pays, is_crowded)
    has_reach = "mask" in types and key_blocks.is_shared(types["mask"])
    shapes = shapes_of(types, target) | {"names": with_tables(types, has_reach, options.get("mask_mod") is not None)}
    geometry = ForwardGeometry(**shapes, **options, value_size=value_size, config=config, changed_factor=changed_factor)
    has_lists = lists.pays_to_list(geometry.mask_mod, types, geometry.block_q, config.block_kv)
    return replace(geometry, has_lists=has_lists)


def with_tables(names, has_reach: bool, has_mask_mod: bool = False) -> frozenset[str]:
    """Returns the names of operands, and of the tables that XLA makes of them and of a mask function."""
    made = {"ranges": "query_segments" in names or has_mask_mod, "mask_reach": has_reach}
    return frozenset(names) | {name for name, is_made in made.items() if is_made}


def make_tables(geometry: ForwardGeometry, operands: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
    """Computes the key blocks that matter to a tile, by name: from segments, mask functions, and masks that all heads share.

    Key blocks that such a mask hides cost nothing then. A mask of its own for each head would cost as much to look through as
    it saves.
    """
    lengths, sizes, result = (geometry.query[0], geometry.key[0]), (geometry.block_q, geometry.config.block_kv), {}
    if geometry.has_lists:
        result["ranges"] = lists.list_blocks(geometry.mask_mod, operands, lengths, sizes, geometry.window)
    elif "ranges" in geometry.names:
        spans = []
        if "query_segments" in geometry.names:
            spans.append(key_blocks.find_segment_spans(operands["query_segments"], operands["key_segments"], *sizes))
        if geometry.mask_mod is not None:
            spans.append(_find_spans_of_function(geometry, operands))
        result["ranges"] = spans[0] if len(spans) == 1 else key_blocks.intersect_spans(*spans)
    if "mask_reach" in geometry.names:
        result["mask_reach"] = key_blocks.measure_mask(operands["mask"], lengths, *sizes)
    return result


def _find_spans_of_function(geometry, operands):
    """Finds the key blocks that the mask function shows to each block of rows: folded ones get those of all the few queries."""
    is_folded = isinstance(geometry.rows, FoldedRows)
    block_q = geometry.queries if is_folded else geometry.block_q
    lengths = geometry.queries, geometry.key[0]
    spans = mask_blocks.find_block_spans(geometry.mask_mod, operands, lengths, block_q, geometry.config.block_kv)
    return jnp.broadcast_to(spans, (*spans.shape[:-2], geometry.blocks_q, 4))


@dataclass(frozen=True)
class ForwardTile:
    """A tile of the forward kernel, as its warpgroups know it."""

    b: Any  # batch entry
    head: Any
    block: Any  # of rows
    split: Any  # of the keys
    column: Any  # first of the columns of values
    lengths: list[Any]  # numbers of queries and keys of the batch entry
    offset: Any  # position of query 0
    entry: Any  # number of the batch entry that functions read, or None if consumers load it
    # By segments and the mask function, the first key block that some query may see, the one behind the last, and the same for
    # the key blocks that all queries see. Empty if there are neither. With a list, what it starts with: number and entries.
    ranges: list[Any]
    low: Any  # first key block that the tile visits; 0 with a list
    high: Any  # the one behind the last, or the number of entries; there is at least one
    is_empty: Any  # the tile is of a split that has no key block which a row sees, and visits none. False if there is one split

    def load_entry(self, geometry: ForwardGeometry, operands: Mapping[str, GlobalOperand], i: Any) -> Any:
        """Loads entry `i` of the tile's list."""
        return lists.load_entry(operands["ranges"], geometry.blocks_q, self.b, self.head, self.block, i)


@dataclass(frozen=True)
class ForwardTiles:
    """The tiles of the forward kernel, by number."""

    geometry: ForwardGeometry
    operands: dict[str, GlobalOperand]

    def look_up(self, number) -> list[Any]:
        """Loads what operands say of a tile: those of its `FACTS` that there are, and the number of its batch entry."""
        b, head, _, block, _ = self._coordinates(number)
        facts = []
        for name, count in FACTS.items():
            if name in self.operands:
                operand = self.operands[name]
                if name == "ranges" and self.geometry.has_lists:
                    facts += [lists.load(operand, self.geometry.blocks_q, b, head, block, i) for i in range(count)]
                    continue
                facts += [operand[b]] if count == 1 else [operand[b, block, i] for i in range(count)]
        if self.geometry.tells_entries:
            facts.append(self.operands["entries"][b])
        return facts

    def tile(self, number, *facts) -> ForwardTile:
        """Returns a tile with the facts that were looked up."""
        geometry, facts, lengths = self.geometry, list(facts), []
        entry = facts.pop() if geometry.tells_entries else None
        b, head, column, block, split = self._coordinates(number)
        for name, size in (("query_lengths", geometry.queries), ("key_lengths", geometry.key[0])):
            lengths.append(jnp.clip(facts.pop(0), 0, size) if name in self.operands else jnp.int32(size))
        offset = facts.pop(0) if "query_offset" in self.operands else 0
        ranges = facts[:4] if "ranges" in self.operands else []
        shown = []
        if "mask_reach" in self.operands:
            size = jnp.int32(geometry.config.block_kv)
            to_end, from_start = (lax.div(keys + size - 1, size) for keys in facts[-2:])
            shown = [geometry.blocks_kv - to_end, from_start]
        if geometry.has_lists:
            low, high = jnp.int32(0), ranges[0]
        else:
            low, high = self.seen(lengths, offset, block * geometry.block_q, geometry.block_q)
            for start, end in (limits[:2] for limits in (ranges, shown) if limits):
                low, high = jnp.maximum(low, start), jnp.minimum(high, end)
        if geometry.splits > 1:
            low, high = geometry.part(low, high, split, KERNEL)
        is_empty = False if geometry.splits == 1 else high <= low
        if is_empty is not False and "sinks" in self.operands:
            is_empty &= split > 0  # the first one starts with the sinks
        low = jnp.clip(low, 0, geometry.blocks_kv - 1)
        high = jnp.clip(high, low + 1, geometry.blocks_kv)
        return ForwardTile(b, head, block, split, column, lengths, offset, entry, ranges, low, high, is_empty)

    def _coordinates(self, number):
        """Returns batch entry, head, first column of values, block of rows, and split of the keys of a tile."""
        geometry, column = self.geometry, 0
        heads, splits = jnp.int32(geometry.query[1]), jnp.int32(geometry.splits)
        blocks = jnp.int32(geometry.blocks_q * geometry.splits)
        pair, part = lax.div(number, blocks), lax.rem(number, blocks)
        block, split = (part, jnp.int32(0)) if geometry.splits == 1 else (lax.div(part, splits), lax.rem(part, splits))
        if geometry.value_parts > 1:
            parts = jnp.int32(geometry.value_parts)
            pair, column = lax.div(pair, parts), lax.rem(pair, parts) * geometry.sizes[1]
        return lax.div(pair, heads), lax.rem(pair, heads), column, block, split

    def seen(self, lengths, offset, first, rows):
        """Returns the key blocks that some of the rows from `first` on see: see `ForwardGeometry.seen`."""
        geometry = self.geometry
        limits = geometry.seen(lengths, *geometry.rows.queries_from(first, rows, KERNEL), KERNEL, offset)
        return tuple(map(jnp.int32, limits))

    def seen_whole(self, tile, first, rows):
        """Returns the first of the key blocks whose keys all these rows see, and the one behind the last.

        The end may be before the start.
        """
        geometry, (queries, keys), (left, right) = self.geometry, tile.lengths, self.geometry.window
        size = jnp.int32(geometry.config.block_kv)
        first, rows = geometry.rows.queries_from(first, rows, KERNEL)
        low, high, position = jnp.int32(0), lax.div(keys, size), first + tile.offset
        if left is not None:
            low = lax.div(jnp.maximum(position + rows - 1 - left, 0) + size - 1, size)
        if right is not None:
            high = jnp.minimum(high, lax.div(jnp.maximum(position + right + 1, 0), size))
        if "query_lengths" in self.operands:
            high = jnp.where(first + rows <= queries, high, 0)
        if tile.ranges:
            low, high = jnp.maximum(low, tile.ranges[2]), jnp.minimum(high, tile.ranges[3])
        return low, high
