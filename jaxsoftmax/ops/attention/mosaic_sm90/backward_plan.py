"""What is settled about a call of the backward kernel before it runs: configuration, spans of blocks, tiles, shared memory."""

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import schedule
from jaxsoftmax.ops.attention import key_blocks as blocks
from jaxsoftmax.ops.attention.mosaic_sm90.operands import HOST, KERNEL, Arithmetic, Call, static_of
from jaxsoftmax.ops.attention.mosaic_sm90.scores import LOG2E

SIZES = (64, 128, 256)  # of heads, on chip
ROWS = 64  # keys or queries of a product
CONSUMERS = 2  # warpgroups
ADDERS = 2  # warps that add, if deterministic: one waits for its turn while the other's copies arrive
SLOTS = 2  # for the derivatives of the scores: one is written while the other is read
_LEAST_SEEDED = 1e-30  # of scales by which a log-sum-exp may be divided


@dataclass(frozen=True)
class Config:
    """How a block of threads works.

    Attributes:
      block_q: queries of a step.
      stages: blocks of queries, and of output cotangents, in shared memory.
      roles: whether the consumers share the 64 keys and do different products; else each has 64 keys of its own.
      pieces: in how many pieces, one after the other, a consumer's part of dQ goes through shared memory.
      keys_first: whether dK's product is started before the consumers meet for dQ's; else behind dQ's, while dQ is added.
      one_program: whether both consumers run one program; not with `roles`. Else each has a program of its own, in which its
        number is a constant. That is up to 2 percent faster at head size 128, but is lowered more slowly (docs/design.md).
      registers: of a thread of the producer, and of the consumers.
    """

    block_q: int
    stages: tuple[int, int]
    roles: bool = False
    pieces: int = 1
    keys_first: bool = False
    one_program: bool = False
    registers: tuple[int, int] = (24, 240)


# docs/design.md has their registers and shared memory.
_CONFIGS = {
    64: Config(128, (3, 2), keys_first=True, one_program=True),
    128: Config(64, (3, 2)),
    256: Config(64, (2, 1), roles=True, pieces=2),
}


def config_for(head_size: int, value_size: int) -> tuple[int, Config]:
    """The head size on chip, of keys and values, and the configuration for a call, as measured on an H200."""
    size = next(size for size in SIZES if size >= max(head_size, value_size))
    return size, _CONFIGS[size]


@dataclass
class Plan(Call):
    """A call, and what follows from it.

    Attributes:
      adds_bias: whether the derivative of the bias is wanted.
      varying: whether operands say which queries a block of keys visits.
      size: of heads on chip.
      groups: query heads of a key head.
      parts: how dQ is cut between the consumers: by queries and by columns.
      part_size: columns of dQ that a consumer makes.
      is_ragged: whether the last block of keys has rows that are none.
      is_seeded: whether sums of products start with what is subtracted from them, as that is all that is done to them.
      passes_both: whether weights pass from one consumer to the other both with the derivative of the soft cap and without.
      by_ticket: whether blocks of threads take tickets: if deterministic, in order of arrival; else where operands decide how
        long a tile takes, but not with `passes_both`: there is no shared memory left then.
      count: how many tiles there are.
    """

    adds_bias: bool
    deterministic: bool
    varying: bool
    size: int

    def __post_init__(self):
        (length, heads, _), (keys, key_heads, _), config = self.query, self.key, self.config
        self.lengths, self.groups = (length, keys), heads // key_heads
        self.block_kv = ROWS if config.roles else ROWS * CONSUMERS
        self.blocks_q, self.blocks_kv = pl.cdiv(length, config.block_q), pl.cdiv(keys, self.block_kv)
        self.parts = config.block_q // ROWS, CONSUMERS * ROWS // config.block_q
        self.part_size = self.size // self.parts[1]
        self.is_ragged = keys % self.block_kv != 0
        is_plain = self.soft_cap is None and not {"bias", "seeds"} & self.names
        self.is_seeded = is_plain and not config.roles and self.scale > _LEAST_SEEDED
        self.passes_both = config.roles and self.adds_bias and self.soft_cap is not None
        self.by_ticket = self.deterministic or (self.varying and not self.passes_both)
        self.count = math.prod(self.batch) * key_heads * self.blocks_kv

    def span(self, block: Any, lengths: Any, arithmetic: Arithmetic, offset: Any = 0) -> tuple[Any, Any, Any, Any]:
        """Which blocks of queries the window and the lengths let see a key of a block, if `offset` is the position of query 0.

        From and to where some query sees some key, and from and to where all see all; to may be before from.
        """
        (left, right), (queries, keys) = self.window, lengths
        step, size = self.config.block_q, self.block_kv
        divide, minimum, maximum, _ = arithmetic
        first, last = block * size, (block + 1) * size - 1
        from_query, to_query = first - offset, last - offset  # by position
        low = 0 if right is None else divide(maximum(from_query - right, 0), step)
        high = divide(queries + step - 1, step)
        whole_from = 0 if right is None else divide(maximum(to_query - right, 0) + step - 1, step)
        whole_to = divide(queries, step) if lengths != self.lengths else self.blocks_q  # rows that are none are 0
        if left is not None:
            high = minimum(high, divide(maximum(minimum(last, keys - 1) - offset + left, -1) + step, step))
            whole_to = minimum(whole_to, divide(maximum(from_query + left + 1, 0), step))
        is_key, is_whole = minimum(maximum(keys - first, 0), 1), minimum(maximum(keys - last, 0), 1)
        return low, high * is_key, whole_from, whole_to * is_whole

    def spans(self, given, seen) -> jax.Array:
        """What `span` says of all blocks of keys, of these lengths, segments and `seen`: int32 `[*batch, blocks_kv, 4]`."""
        lengths = [
            jnp.clip(given[name][..., None], 0, size) if name in given else jnp.int32(size)
            for name, size in zip(("query_lengths", "key_lengths"), self.lengths, strict=True)
        ]
        offset = given["query_offset"][..., None] if "query_offset" in given else 0
        block = jnp.arange(self.blocks_kv, dtype=jnp.int32).reshape(*(1,) * len(self.batch), -1)
        mixed = KERNEL._replace(divide=jnp.floor_divide)  # KERNEL's own takes operands of one shape
        span = self.span(block, lengths, mixed, offset)
        low, high, whole_from, whole_to = jnp.broadcast_arrays(*span)
        if "query_segments" in given:
            ranges = blocks.ranges(given["key_segments"], given["query_segments"], self.block_kv, self.config.block_q)
            low, high = jnp.maximum(low, ranges[..., 0]), jnp.minimum(high, ranges[..., 1])
            whole_from, whole_to = jnp.maximum(whole_from, ranges[..., 2]), jnp.minimum(whole_to, ranges[..., 3])
        if seen is not None:
            ends = blocks.ends(jnp.swapaxes(seen, -1, -2))
            low, high = jnp.maximum(low, ends[..., 0]), jnp.minimum(high, ends[..., 1])
        high = jnp.maximum(low, high)
        whole_from = jnp.clip(whole_from, low, high)
        return jnp.stack(jnp.broadcast_arrays(low, high, whole_from, jnp.clip(whole_to, whole_from, high)), -1)

    def turns_before(self, spans):
        """How many blocks of keys have their turns at a block of queries before each: int32 `[batch, blocks_kv, blocks_q]`."""
        spans = jnp.broadcast_to(spans, (*self.batch, self.blocks_kv, 4)).reshape(-1, self.blocks_kv, 4)
        block = jnp.arange(self.blocks_q, dtype=jnp.int32).reshape(1, 1, -1)
        visits = ((spans[..., 0, None] <= block) & (block < spans[..., 1, None])).astype(jnp.int32)
        return jnp.cumsum(visits, -2, dtype=jnp.int32) - visits

    def first_key_block(self, block: Any, arithmetic: Arithmetic) -> Any:
        """The first block of keys that the window lets a block of queries see."""
        (left, _), (divide, _, maximum, _) = self.window, arithmetic
        return 0 if left is None else divide(maximum(block * self.config.block_q - left, 0), self.block_kv)

    def lines(self, lse, delta):
        """The log-sum-exp and delta of queries as the kernel takes them; a score of `-inf` then has weight 0."""
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        if self.is_seeded:
            return lse * (-1 / self.scale), -delta
        return (lse if "bias" in self.names else lse * LOG2E), delta

    def costs(self) -> tuple[int, ...]:
        """How many steps each block of keys takes, or 1 for all where only then tiles come in the order of turns."""
        spans = (self.span(block, self.lengths, HOST) for block in range(self.blocks_kv))
        costs = tuple(self.groups * max(high - low, 0) for low, high, *_ in spans)
        is_other_order = self.deterministic and any(a < b for a, b in itertools.pairwise(costs))
        return (1,) * len(costs) if is_other_order else costs

    def group(self, costs: tuple[int, ...]) -> int:
        """For how many heads at a time tiles are handed out: as the forward kernel's, with queries in the place of keys.

        If deterministic, more, though L2 may not hold them: of one head fewer blocks of keys start together then, each of which
        starts later than the one before. What is best on an H200 grows with the room in L2 and where tiles get shorter.
        """
        equal = len(set(costs)) == 1
        if equal and not self.deterministic:
            return 1
        bytes_of_head = 8 * self.query[0] * self.size * self.groups  # two of 16 bits, and one of 32
        least, most, times = (8, 32, 2 if equal else 4) if self.deterministic else (1, 8, 1)
        return min(most, max(least, 1 << max(1, times * schedule.L2 // bytes_of_head).bit_length() - 1))

    def scratch(self, dtype) -> dict[str, Any]:
        """What is in shared memory. A barrier is full when copies have landed, and empty when all have read them."""
        config, size, halves = self.config, self.size, self.block_kv // ROWS
        stages, stages_do = config.stages

        def memory(*shape, dtype=dtype):
            width = 128 // jnp.dtype(dtype).itemsize
            return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))

        own = {"p": memory(ROWS, config.block_q)} if config.roles else {}
        if self.passes_both:
            own["p_of_bias"] = own["p"]
        if self.by_ticket:
            own |= schedule.ticket_memory(1, CONSUMERS + ADDERS * self.deterministic, in_order=self.deterministic)
        lines = {"q_lse": stages, "do_delta": stages_do}
        if self.deterministic:  # one array for both: each array starts at a multiple of 1 KiB, and there is no room for two
            lines = {"lines": stages + stages_do}
            own |= {
                "sums_full": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=ADDERS),
                "sums_empty": plgpu.Barrier(num_arrivals=1),
            }
        own |= {name: plgpu.SMEM((count, config.block_q), jnp.float32) for name, count in lines.items()}
        return own | {
            "k": memory(halves, self.parts[1], ROWS, self.part_size),
            "v": memory(halves, ROWS, size),
            "q": memory(stages, config.block_q, size),
            "do": memory(stages_do, config.block_q, size),
            "ds": memory(SLOTS, halves, config.block_q // ROWS, ROWS, ROWS),
            "sums": memory(CONSUMERS, ROWS, self.part_size // config.pieces, dtype=jnp.float32),
            "k_full": plgpu.Barrier(num_arrivals=halves * self.parts[1]),
            "v_full": plgpu.Barrier(num_arrivals=halves),
            "kv_empty": plgpu.Barrier(num_arrivals=CONSUMERS),
            "q_full": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
            "do_full": plgpu.Barrier(num_barriers=stages_do),
            "delta_full": plgpu.Barrier(num_barriers=stages_do),
            "q_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            "do_empty": plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages_do),
        }


def plan_of(
    given: Mapping[str, Any], *, wanted: Collection[str], deterministic: bool, config: Config | None = None, **options: Any
) -> Plan:
    """The plan of a call with these operands, or operands of these types, by name, for the cotangents that are `wanted`."""
    size, own_config = config_for(given["query"].shape[-1], given["value"].shape[-1])
    of_operands = bool({"query_lengths", "key_lengths", "query_offset", "query_segments"} & set(given))
    return Plan(
        **static_of(given) | {"names": frozenset(given) - {"sinks"}},
        **options,
        adds_bias="bias" in wanted,
        deterministic=deterministic,
        varying=of_operands or ("mask" in given and blocks.is_shared(given["mask"])),
        size=size,
        config=config or own_config,
    )
