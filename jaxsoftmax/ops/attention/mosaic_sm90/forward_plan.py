"""What is settled about a call of the forward kernel before it runs: configuration, tiles, shared memory."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxsoftmax._gpu import schedule
from jaxsoftmax.ops.attention import key_blocks as blocks
from jaxsoftmax.ops.attention.mosaic_sm90.operands import HOST, Arithmetic, Call, static_of
from jaxsoftmax.ops.attention.mosaic_sm90.scores import LOG2E

ROWS = 64  # queries of a consumer warpgroup
SWIZZLED = 64  # 16-bit elements of 128 bytes
# How many numbers an operand says of a tile. Where there are any, it depends on operands how long a tile takes.
FACTS = {"query_lengths": 1, "key_lengths": 1, "query_offset": 1, "ranges": 4, "mask_reach": 2}


@dataclass(frozen=True)
class Config:
    """How a block of threads works.

    Attributes:
      consumers: warpgroups that compute, each for 64 queries.
      block_kv: keys of a block.
      stages: key blocks in shared memory, and as many of values.
      own_output: whether the output has shared memory of its own; else it has that of the queries, which are as large then.
      registers: of a thread of a producer, and of a consumer.
      ping_pong: whether consumers multiply one at a time, so that one uses the tensor cores while another exponentiates.
      split: whether operands are float32, of each of which there are two terms; the output needs no shared memory then.
      producers: warpgroups that copy: one, or one for queries and keys and one for values.
      byte_stages: key blocks of 8 bits in shared memory, and as many of values; 0 if they have more.
      converters: warpgroups that convert what has 8 bits: one for keys and one for values, or none.
    """

    consumers: int
    block_kv: int
    stages: int
    own_output: bool = True
    registers: tuple[int, int] = (24, 240)
    ping_pong: bool = True
    split: bool = False
    producers: int = 1
    byte_stages: int = 0

    @property
    def converters(self) -> int:
        return 2 if self.byte_stages else 0


def config_for(head_size: int, value_size: int, window: Any = (None, None), dtype: DTypeLike = jnp.bfloat16) -> Config:
    """The configuration for a call, as measured on an H200; `benchmarks/results/h200/attention.csv` has those of 16 bits."""
    sizes = padded(head_size), padded(value_size)
    if jnp.dtype(dtype) == jnp.float32:
        if max(sizes) <= 64:
            return Config(3, 64, 3, registers=(72, 144), ping_pong=False, split=True)
        return Config(2, 64, 2, registers=(96, 160), ping_pong=False, split=True, producers=2)
    if max(sizes) > 128 and sizes[0] != sizes[1]:
        return Config(2, 64, 2, ping_pong=False)
    if max(sizes) <= 64:
        return Config(3, 128, 4, registers=(32, 160), ping_pong=window != (None, None))
    if max(sizes) <= 128:
        return Config(2, 128, 2)
    return Config(2, 64, 3 if max(sizes) <= 192 else 2, own_output=False, ping_pong=False)


def padded(size: int) -> int:
    """A head size on chip."""
    return pl.cdiv(size, SWIZZLED) * SWIZZLED


@dataclass
class Plan(Call):
    """A call, and what follows from it.

    Attributes:
      head_group: where rows are those of all query heads that share keys, how many heads these are: row `i` is of query
        `i // head_group` and of head `i % head_group`. `query` counts such rows as T, and key heads as N, and query and output
        are `[..., N, T, H]` then.
      is_strided: whether they are `[..., queries, heads, H]` even so; the group divides 64 then.
      splits: into how many parts the key blocks that a tile sees are split. Results of more than one are states: of each split
        of a row `o`, `m` and `d` in float32, where `o` has no meaning if `d` is 0.
      unit: that of `m`, see `online.push_log2`. Scores with a bias may be as large as `finfo.min`, and are not to be rounded.
      page: how many keys a page has, where keys and values are in pages; else 0.
      pages: how many of them there are.
      bytes_dtype: the dtype of keys and values if they have 8 bits; they come as int8 with the same bits then.
      pages_of_block: how many a key block has, or 1 where a page has several key blocks.
      is_folded: whether there is a `head_group`.
      queries: how many there are.
      block_q: queries of a tile.
      sizes: of the heads of keys and values on chip.
      is_ragged: whether lengths or head sizes are no multiples of a swizzled tile's, which is what TMA copies several of.
      parts: in how many slabs of columns queries and keys, and values and the output, are in shared memory.
      value_width: columns of values of a product.
      value_products: how many products make up that of weights and values.
      facts: how many numbers operands say of a tile.
      by_ticket: whether there are any: blocks of threads take tickets then.
      count: how many tiles there are.
    """

    value_size: int
    head_group: int | None = None
    is_strided: bool = False
    splits: int = 1
    page: int = 0
    pages: int = 0
    bytes_dtype: str | None = None

    def __post_init__(self):
        (length, heads, size), keys, config = self.query, self.key[0], self.config
        self.is_folded = self.head_group is not None
        self.unit = LOG2E if "bias" in self.names else 1.0
        self.queries = self.query[0] // (self.head_group or 1)
        self.pages_of_block = max(1, config.block_kv // self.page) if self.page else 1
        self.block_q = ROWS * config.consumers
        self.blocks_q, self.blocks_kv = pl.cdiv(length, self.block_q), pl.cdiv(keys, config.block_kv)
        self.sizes = padded(size), padded(self.value_size)
        is_whole = length % 8 == keys % 8 == 0 and self.sizes == (size, self.value_size)
        self.is_ragged = not config.split and (self.is_strided or not is_whole)  # nothing that is split goes through TMA
        self.parts = (self.sizes[0] // SWIZZLED, self.sizes[1] // SWIZZLED) if self.is_ragged else (1, 1)
        self.value_width = self.sizes[1] // self.parts[1]
        if config.converters and self.value_width == 256:  # four warpgroups start with 128 registers, and its product takes 158
            self.value_width = 128
        self.value_products = 3 if config.split else self.sizes[1] // self.value_width
        self.facts = sum(count for name, count in FACTS.items() if name in self.names)
        self.by_ticket = self.facts > 0
        self.count = math.prod(self.batch) * heads * self.blocks_q * self.splits

    def seen(self, lengths: Any, first: Any, rows: int, arithmetic: Arithmetic, offset: Any = 0) -> tuple[Any, Any]:
        """From and to which key block the window and the lengths let some of the queries from `first` on see a key.

        `offset` is the position of query 0.
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
        """From and to which key block a split goes, of those from `low` to `high`; nowhere if to is not larger than from."""
        size = arithmetic.divide(arithmetic.maximum(high - low, 0) + self.splits - 1, self.splits)
        first = low + split * size
        return first, arithmetic.minimum(first + size, high)

    def costs(self) -> tuple[int, ...]:
        """How many key blocks each block of queries takes, or each of its splits, at least one."""
        starts, lengths = range(0, self.query[0], self.block_q), (self.queries, self.key[0])
        spans = (self.seen(lengths, *self.queries_from(first, self.block_q, HOST), HOST) for first in starts)
        parts = (self.part(*span, split, HOST) for span in spans for split in range(self.splits))
        return tuple(max(high - low, 1) for low, high in parts)

    def queries_from(self, first: Any, rows: int, arithmetic: Arithmetic) -> tuple[Any, int]:
        """The first query that rows from `first` on belong to, and from there on how many they may belong to."""
        if self.head_group is None:
            return first, rows
        return arithmetic.divide(first, self.head_group), (rows + self.head_group - 2) // self.head_group + 1

    def group(self, costs: tuple[int, ...]) -> int:
        """For how many heads at a time tiles are handed out.

        One, if they all take equally long: they then read the same keys at the same time. Else several, as many as the L2
        cache has room for, so that the last tiles to be handed out are short ones. With segments a tile reads few keys.
        """
        if "ranges" in self.names:
            return 16
        if len(set(costs)) == 1:
            return 1
        keys, key_heads, size = self.key
        itemsize = 4 if self.config.split else 1 if self.bytes_dtype else 2
        bytes_of_head = max(1, itemsize * keys * (size + self.value_size) * key_heads // self.query[1])
        return min(8, 1 << max(1, schedule.L2 // bytes_of_head).bit_length() - 1)

    def scratch(self, dtype) -> dict[str, Any]:
        """What is in shared memory. A barrier is full when a copy has landed, and empty when all have read it."""
        config = self.config
        (head_size, head_parts), (value_size, value_parts) = zip(self.sizes, self.parts, strict=True)
        tiling = plgpu.TilingTransform((8, SWIZZLED))

        def memory(slots, rows, size, parts, dtype=dtype, group=None):
            if config.split:
                return plgpu.SMEM((slots, 2, rows, size), jnp.bfloat16, transforms=(tiling, plgpu.SwizzleTransform(128)))
            swizzle = plgpu.SwizzleTransform(SWIZZLED * jnp.dtype(dtype).itemsize)
            if not self.is_ragged:
                return plgpu.SMEM((slots, rows, size), dtype, transforms=(tiling, swizzle))
            # A slab of 64 columns has the same bytes with tiles and without, and without them TMA clips it anywhere.
            shape = (slots, parts, rows, size // parts)
            whole = plgpu.SMEM(shape, dtype, transforms=(tiling, swizzle))
            if group is not None:
                shape = (slots, parts, rows // group, group, size // parts)
            return plgpu.RefUnion(plgpu.SMEM(shape, dtype, transforms=(swizzle,)), whole)

        own: dict[str, Any] = {}
        group = self.head_group if self.is_strided else None
        if self.facts:
            own |= schedule.ticket_memory(1 + self.facts, config.consumers + config.producers + config.converters - 1)
        if config.own_output and not config.split and self.splits == 1:
            own |= {"o": memory(config.consumers, ROWS, value_size, value_parts, group=group)}
        everyone = {"num_arrivals": config.consumers, "num_barriers": config.stages}
        copies = [parts * self.pages_of_block for parts in (head_parts, value_parts)]
        if config.byte_stages:
            for letter, size, parts, count in zip("kv", self.sizes, self.parts, copies, strict=True):
                own[f"{letter}_bytes"] = memory(config.byte_stages, config.block_kv, size, parts, jnp.int8)
                own[f"{letter}_bytes_full"] = plgpu.Barrier(num_arrivals=count, num_barriers=config.byte_stages)
                own[f"{letter}_bytes_empty"] = plgpu.Barrier(num_barriers=config.byte_stages)
            copies = [1, 1]
        return own | {
            "q": memory(config.consumers, ROWS, head_size, head_parts, group=group),
            "k": memory(config.stages, config.block_kv, head_size, head_parts),
            "v": memory(config.stages, config.block_kv, value_size, value_parts),
            "q_full": plgpu.Barrier(num_arrivals=head_parts, num_barriers=config.consumers),
            "q_empty": plgpu.Barrier(num_barriers=config.consumers),
            "k_full": plgpu.Barrier(num_arrivals=copies[0], num_barriers=config.stages),
            "v_full": plgpu.Barrier(num_arrivals=copies[1], num_barriers=config.stages),
            "k_empty": plgpu.Barrier(**everyone),
            "v_empty": plgpu.Barrier(**everyone),
        }


def plan_of(given: Mapping[str, Any], *, config: Config | None = None, **options: Any) -> Plan:
    """The plan of a call with these operands, or operands of these types, by name."""
    query, value = given["query"], given["value"]
    config = config or config_for(query.shape[-1], value.shape[-1], options["window"], query.dtype)
    has_reach = "mask" in given and blocks.is_shared(given["mask"])
    static = static_of(given) | {"names": names_of(given, has_reach)}
    return Plan(**static, **options, value_size=value.shape[-1], config=config)


def names_of(given: Mapping[str, Any], has_reach: bool) -> frozenset[str]:
    """The names of operands, and of what `tables` makes of them."""
    made = {"ranges": "query_segments" in given, "mask_reach": has_reach}
    return frozenset(given) | {name for name, is_made in made.items() if is_made}


def tables(plan: Plan, given: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns by name the tables of key blocks that matter to a tile, from segments and from a mask that all heads share."""
    lengths, sizes, found = (plan.query[0], plan.key[0]), (plan.block_q, plan.config.block_kv), {}
    if "ranges" in plan.names:
        found["ranges"] = blocks.ranges(given["query_segments"], given["key_segments"], *sizes)
    if "mask_reach" in plan.names:
        found["mask_reach"] = blocks.mask_reach(given["mask"], lengths, *sizes)
    return found
