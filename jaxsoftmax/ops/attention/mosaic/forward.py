"""Attention on Hopper, forward: a block of queries keeps the state of its rows and pushes the keys block by block.

A block of threads is one warpgroup that copies, or two, and two or three that compute, each for 64 queries. It works through
tiles (a block of queries of one head) in an order by which keys and values stay in the L2 cache and all blocks end at about the
same time: that of a table, or, where operands decide how long a tile takes, one after another as blocks come free. Keys and
values come by bulk copies into a ring in shared memory. The scores of a key block are in registers, and so are its weights,
from where the second product takes them: it runs while the scores of the next key block are computed. Warpgroups take turns at
the tensor cores, so that one multiplies while another exponentiates. Key blocks that no query of a tile sees are not visited,
and those that all see are not masked.

For each tile Q is read and O written once, and K and V are read from the cache: `4 * T * S * H` operations a head.

A float32 operand is split into the sum of two of bfloat16, and a product is three of theirs: all but that of the low terms.
Who copies splits them, by way of registers; the output goes from registers to global memory.

Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, section 3.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.typing import DTypeLike

from jaxsoftmax import online
from jaxsoftmax._gpu import products, ptx
from jaxsoftmax.online import State
from jaxsoftmax.ops.attention import _dropout as dropout
from jaxsoftmax.ops.attention._operands import OPERANDS
from jaxsoftmax.ops.attention.mosaic import backward, common

MAX_HEAD_SIZE = {"float16": 256, "bfloat16": 256, "float32": 128}
DTYPES = tuple(MAX_HEAD_SIZE)
ROWS = 64  # of a warpgroup
_SWIZZLED = 64  # 16-bit elements of 128 bytes

_MAX_ROWS = 2**31 - 2**16  # to which some more are added before they are compared, in int32
_LOG2E = math.log2(math.e)
# By how much, in powers of two, a maximum grows before sums are rescaled, and how far it stays below the largest score: weights
# are at most 2 to the power of their sum, which float16 holds up to 2^15, and loses bits of below 2^-14.
_SLACK_AND_HEADROOM = {"bfloat16": (8, 0), "float16": (2, 13), "float32": (8, 0)}
_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT = _LAYOUT.reduce(1)


@dataclass(frozen=True)
class Config:
    """How a block of threads works.

    Attributes:
      warpgroups: those that compute, each for 64 queries.
      block_kv: keys of a block.
      stages: key blocks in shared memory, and as many of values.
      own_output: whether the output has shared memory of its own; else it has that of the queries, which are as large then.
      registers: of a thread of the warpgroup that copies, and of those that compute.
      turns: whether the warpgroups take turns at the tensor cores.
      split: whether operands are float32, of each of which there are two terms; the output needs no shared memory then.
      copiers: warpgroups that copy: one, or one for queries and keys and one for values.
    """

    warpgroups: int
    block_kv: int
    stages: int
    own_output: bool = True
    registers: tuple[int, int] = (24, 240)
    turns: bool = True
    split: bool = False
    copiers: int = 1


def config_for(
    head_size: int,
    value_size: int,
    window: tuple[int | None, int | None] = (None, None),
    dtype: DTypeLike = jnp.bfloat16,
) -> Config:
    """The configuration for a call, as measured on an H200; `benchmarks/results/h200/attention.csv` has those of 16 bits."""
    sizes = common.up(head_size, _SWIZZLED), common.up(value_size, _SWIZZLED)
    if jnp.dtype(dtype) == jnp.float32:
        if max(sizes) <= 64:
            return Config(3, 64, 3, registers=(72, 144), turns=False, split=True)
        return Config(2, 64, 2, registers=(96, 160), turns=False, split=True, copiers=2)
    if max(sizes) > 128 and sizes[0] != sizes[1]:
        return Config(2, 64, 2, turns=False)
    if max(sizes) <= 64:
        return Config(3, 128, 4, registers=(32, 160), turns=window != (None, None))
    if max(sizes) <= 128:
        return Config(2, 128, 2)
    return Config(2, 64, 3 if max(sizes) <= 192 else 2, own_output=False, turns=False)


def lacks(primitive, operands) -> bool:
    """Whether there is no kernel at all: for derivatives of float32."""
    return primitive == "dot_product_attention_vjp" and operands["query"].dtype == jnp.float32


def unsupported(primitive, target, operands, *, scale, precision, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    if primitive == "dot_product_attention_jvp":
        return "there is no kernel for tangents"
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability[0] != 9:
        return f"it needs compute capability 9.x, got {target.platform} {target.compute_capability}"
    given = {o.name: operands[o.name] for o in OPERANDS if operands[o.name] is not None}
    query, key, value = (given[name] for name in ("query", "key", "value"))
    if query.dtype.name not in DTYPES:
        return f"dtypes must be among {', '.join(DTYPES)}, got {query.dtype.name}"
    if query.dtype == jnp.float32 and precision == "highest":
        return "float32 products are sums of three of bfloat16, and precision asks for more"
    most = MAX_HEAD_SIZE[query.dtype.name]
    for name, size in (("head", query.shape[-1]), ("value", value.shape[-1])):
        if size % 8 or not 8 <= size <= most:
            return f"{name} size must be a multiple of 8 from 8 to {most}, got {size} in {query.dtype.name}"
    for name in ("bias", "sinks"):
        if name in given and given[name].dtype.name not in DTYPES:
            return f"{name} must be of dtype {', '.join(DTYPES)}, got {given[name].dtype.name}"
    for name in ("query_segments", "key_segments"):
        if name in given and given[name].dtype.itemsize > 4:
            return f"segment ids must have at most 32 bits, got {given[name].dtype.name}"
    batch = common.batch_of(given)
    rows, keys = math.prod(batch) * query.shape[-2] * query.shape[-3], math.prod(batch) * key.shape[-3]
    if not (rows and keys):
        return f"there must be queries and keys, got shapes {query.shape} and {key.shape} in a batch of {batch}"
    if max(rows, keys) >= _MAX_ROWS:
        return f"there must be less than {_MAX_ROWS} rows of scores, and keys, got {rows} and {keys}"
    if not (math.isfinite(scale) and scale >= np.finfo(np.float32).tiny):
        return f"scale must be positive, got {scale}"
    return backward.unsupported(given, **params) if primitive == "dot_product_attention_vjp" else None


def unprofitable(primitive, target, operands, fused, cast, **params) -> str | None:
    """Why the reference should be faster although the kernel could run, in words, or None."""
    del primitive, target, fused, cast, params
    query, key = operands["query"], operands["key"]
    if query.dtype == jnp.float32 and query.shape[-3] <= query.shape[-2] // key.shape[-2]:
        return "XLA reads float32 keys once for all query heads that share them, and there are few queries"
    return None


def dot_product_attention(
    query,
    key,
    value,
    bias,
    mask,
    query_lengths,
    key_lengths,
    query_segments,
    key_segments,
    sinks,
    seeds,
    *,
    scale,
    window,
    soft_cap,
    dropout_rate,
    target=None,
    return_lse=True,
    precision="high",
    deterministic=False,
    config=None,
):
    """Attention as in `xla.dot_product_attention`: `[out, lse]`."""
    del target, precision, deterministic  # `unsupported` has looked at the one, and the other is so anyway
    config = config or config_for(query.shape[-1], value.shape[-1], window, query.dtype)
    given = {"bias": bias, "mask": mask, "query_lengths": query_lengths, "key_lengths": key_lengths, "sinks": sinks}
    given |= {"query_segments": query_segments, "key_segments": key_segments, "seeds": seeds if dropout_rate else None}
    given = {name: operand for name, operand in given.items() if operand is not None}
    batch = common.batch_of({"query": query, "key": key, "value": value} | given)
    problem = _Problem(batch, query.shape[-3:], key.shape[-3:], value.shape[-1], scale, window, soft_cap, dropout_rate, config)
    if query_segments is not None:
        given["ranges"] = common.ranges(query_segments, key_segments, problem.block_q, config.block_kv)
    if mask is not None:
        seen = common.seen(mask, (query.shape[-3], key.shape[-3]), problem.block_q, config.block_kv)
        given |= {} if seen is None else {"seen": common.ends(seen)}
    return problem.run(query, key, value, given)[: 2 if return_lse else 1]


def dot_product_attention_vjp(*, out, lse, d_out, d_lse, target=None, precision="high", **params):
    """The cotangents of attention as in `xla.dot_product_attention_vjp`."""
    del target, precision  # of float32 operands, which have no kernel
    given = {operand.name: params.pop(operand.name, None) for operand in OPERANDS}
    return backward.attention_vjp(given, out, lse, d_out, d_lse, **params)


@dataclass(frozen=True)
class _Problem:
    """The static part of a call, and how a kernel is made of it."""

    batch: tuple[int, ...]
    query: tuple[int, int, int]  # T, N, H
    key: tuple[int, int, int]  # S, K, H
    value_size: int
    scale: float
    window: tuple[int | None, int | None]
    soft_cap: float | None
    dropout_rate: float
    config: Config

    @property
    def block_q(self) -> int:
        return ROWS * self.config.warpgroups

    @property
    def blocks_q(self) -> int:
        return pl.cdiv(self.query[0], self.block_q)

    @property
    def blocks_kv(self) -> int:
        return pl.cdiv(self.key[0], self.config.block_kv)

    @property
    def sizes(self) -> tuple[int, int]:
        """The head sizes of keys and values on chip."""
        return common.up(self.query[2], _SWIZZLED), common.up(self.value_size, _SWIZZLED)

    @property
    def is_ragged(self) -> bool:
        """Whether lengths or head sizes are no multiples of a tile's, which is what bulk copies of several tiles move."""
        if self.config.split:  # there are none
            return False
        lengths, sizes = (self.query[0], self.key[0]), (self.query[2], self.value_size)
        return any(length % 8 for length in lengths) or any(size % _SWIZZLED for size in sizes)

    @property
    def parts(self) -> tuple[int, int]:
        """In how many slabs of columns queries and keys, and values and the output, are in shared memory."""
        head, value = (size // _SWIZZLED if self.is_ragged else 1 for size in self.sizes)
        return head, value

    @property
    def value_products(self) -> int:
        """How many products make up that of weights and values."""
        return 3 if self.config.split else self.parts[1]

    def key_blocks(self, first: int, last: int) -> tuple[int, int]:
        """From and to which key block the window lets queries `first` to `last` see, at least one."""
        left, right = self.window
        size, end = self.config.block_kv, self.blocks_kv
        low = 0 if left is None else min(max(first - left, 0) // size, end - 1)
        high = end if right is None else min((last + right) // size + 1, end)
        return low, max(high, low + 1)

    def costs(self) -> tuple[int, ...]:
        """How many key blocks each block of queries takes."""
        found = []
        for i in range(self.blocks_q):
            first = i * self.block_q
            low, high = self.key_blocks(first, min(first + self.block_q, self.query[0]) - 1)
            found.append(high - low)
        return tuple(found)

    def group(self, costs: tuple[int, ...], segmented: bool) -> int:
        """For how many heads at a time tiles are handed out.

        One, if they all take equally long: they then read the same keys at the same time. Else several, as many as the L2
        cache has room for, so that the last tiles to be handed out are short ones. With segments a tile reads few keys.
        """
        if segmented:
            return 16
        if len(set(costs)) == 1:
            return 1
        keys, key_heads, size = self.key
        itemsize = 4 if self.config.split else 2
        bytes_of_head = max(1, itemsize * keys * (size + self.value_size) * key_heads // self.query[1])
        return min(8, 1 << max(1, common.L2 // bytes_of_head).bit_length() - 1)

    def run(self, query, key, value, given):
        """Runs the kernel; `given` are the optional operands that are there."""
        length, heads, _ = self.query
        pairs = math.prod(self.batch) * heads
        tiles = pairs * self.blocks_q
        blocks = min(common.sms(), tiles)
        names = list(given)
        arrays = [query, key, value, *given.values()]
        trailing = [3, 3, 3, *(common.TRAILING[name] for name in names)]
        at = [common.batch_index(self.batch, a.shape[: a.ndim - t]) for a, t in zip(arrays, trailing, strict=True)]
        arrays = [a.reshape(-1, *a.shape[a.ndim - t :]) for a, t in zip(arrays, trailing, strict=True)]
        sizes = {name: array.shape[1:3] for name, array in zip(names, arrays[3:], strict=True)}  # heads and rows
        arrays[3:] = [common.flat(name, array) for name, array in zip(names, arrays[3:], strict=True)]
        out_shape = math.prod(self.batch), length, heads, self.value_size
        if self.config.split:
            arrays[:3] = [a.reshape(-1, a.shape[-2] * a.shape[-1]) for a in arrays[:3]]
            out_shape = out_shape[0] * length, heads * self.value_size
        # How long a tile takes may depend on operands: then blocks of threads take one after another.
        facts = sum(_FACTS.get(name, 0) for name in names)
        if tiles <= common.MAX_SCHEDULED:
            costs = self.costs()
            group = self.group(costs, "ranges" in names)
            table = common.order(costs, pairs, group) if facts else common.schedule(costs, pairs, group, blocks)
            arrays.append(jax.jit(lambda: jnp.asarray(table))())  # custom_partitioning takes no constants but inner ones
        rows = math.prod(self.batch) * heads * length
        out, lse = plgpu.kernel(
            functools.partial(_kernel, self, names, sizes, at, blocks, tiles),
            out_type=[
                jax.ShapeDtypeStruct(out_shape, query.dtype),
                jax.ShapeDtypeStruct((rows,), jnp.float32),
            ],
            grid=(blocks,),
            grid_names=("block",),
            num_threads=self.config.warpgroups + self.config.copiers,
            thread_name="warpgroup",
            scratch_types=self._scratch(query.dtype, facts),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name="attention_forward_mosaic",
        )(*arrays)
        return [out.reshape(*self.batch, length, heads, self.value_size), lse.reshape(*self.batch, heads, length)]

    def _scratch(self, dtype, facts: int) -> dict[str, Any]:
        """What is in shared memory. A barrier is full when a copy has landed, and empty when all have read it.

        `facts` says how many are looked up of each tile.
        """
        config = self.config
        (head_size, head_parts), (value_size, value_parts) = zip(self.sizes, self.parts, strict=True)
        tiling, swizzle = plgpu.TilingTransform((8, _SWIZZLED)), plgpu.SwizzleTransform(128)

        def memory(slots, rows, size, parts):
            if config.split:
                return plgpu.SMEM((slots, 2, rows, size), jnp.bfloat16, transforms=(tiling, swizzle))
            if not self.is_ragged:
                return plgpu.SMEM((slots, rows, size), dtype, transforms=(tiling, swizzle))
            # A slab of 64 columns has the same bytes with tiles and without, and without them bulk copies clip it anywhere.
            shape = (slots, parts, rows, size // parts)
            return plgpu.RefUnion(*(plgpu.SMEM(shape, dtype, transforms=t) for t in ((swizzle,), (tiling, swizzle))))

        own: dict[str, Any] = {}
        others = config.warpgroups + config.copiers - 1
        if facts:
            own |= common.ticket_memory(1 + facts, others)
        if config.own_output and not config.split:
            own |= {"o": memory(config.warpgroups, ROWS, value_size, value_parts)}
        everyone = {"num_arrivals": config.warpgroups, "num_barriers": config.stages}
        return own | {
            "q": memory(config.warpgroups, ROWS, head_size, head_parts),
            "k": memory(config.stages, config.block_kv, head_size, head_parts),
            "v": memory(config.stages, config.block_kv, value_size, value_parts),
            "q_full": plgpu.Barrier(num_arrivals=head_parts, num_barriers=config.warpgroups),
            "q_empty": plgpu.Barrier(num_barriers=config.warpgroups),
            "k_full": plgpu.Barrier(num_arrivals=head_parts, num_barriers=config.stages),
            "v_full": plgpu.Barrier(num_arrivals=value_parts, num_barriers=config.stages),
            "k_empty": plgpu.Barrier(**everyone),
            "v_empty": plgpu.Barrier(**everyone),
        }


def _kernel(problem, names, sizes, at, blocks, tiles, *refs, **memory):
    """The program of all warpgroups of a block."""
    refs = list(refs)
    table = refs.pop(3 + len(names)) if tiles <= common.MAX_SCHEDULED else None
    operands = dict(zip(["query", "key", "value", *names], zip(refs, at, strict=False), strict=False))
    out_ref, lse_ref = refs[-2:]
    tile = _Tile(problem, operands, sizes, out_ref, lse_ref, memory)
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

    def number_of(ticket):  # without a table the last block of queries first, which may see the most keys
        return tiles - 1 - ticket if table is None else table[ticket]

    def look_up(ticket):
        number = number_of(ticket)
        return [number, *tile.look_up(number)]

    def each_tile(work):
        common.each_tile(lambda number, steps: work(tile.place(number, []), steps), table, tiles, number_of, block, blocks)

    def of_values(work):
        return lambda values, steps: work(tile.place(values[0], values[1:]), steps)

    def each_tile_taken(work):
        common.each_tile_taken(of_values(work), look_up, memory, tiles, block, blocks)

    def each_tile_told(work):
        common.each_tile_told(of_values(work), memory)

    taken = "tile" in memory
    less, more = problem.config.registers

    for i, letters in enumerate(("kqv",) if problem.config.copiers == 1 else ("kq", "v")):

        @pl.when(warpgroup == problem.config.warpgroups + i)
        def _(i=i, letters=letters):
            plgpu.set_max_registers(less, action="decrease")
            each = each_tile if not taken else each_tile_told if i else each_tile_taken
            each(functools.partial(tile.copy_in, letters))

    @pl.when(warpgroup < problem.config.warpgroups)
    def _():
        plgpu.set_max_registers(more, action="increase")
        tile.start(warpgroup)
        (each_tile_told if taken else each_tile)(functools.partial(tile.compute, warpgroup))
        plgpu.wait_smem_to_gmem(0)


_FACTS = {"query_lengths": 1, "key_lengths": 1, "ranges": 4, "seen": 2}  # how many numbers an operand says of a tile
_TURN = 8  # the first of the hardware's barriers by which warpgroups take turns; Mosaic GPU uses the first ones


@dataclass(frozen=True)
class _Place:
    """Where a tile is, how many queries and keys there are, and what `common.ranges` and `common.ends` say, if it was asked."""

    b: Any
    head: Any
    block: Any
    lengths: list[Any]
    ranges: list[Any]
    seen: list[Any]


@dataclass(frozen=True)
class _Tile:
    """What is done for a tile. The key blocks of all tiles are counted through: step `i` uses stage `i % stages`."""

    problem: _Problem
    operands: dict[str, Any]  # refs in global memory, and functions from the batch entry to the index in them
    sizes: dict[str, Any]  # heads and rows of a bias or mask, of which the ref is two-dimensional
    out_ref: Any
    lse_ref: Any
    memory: dict[str, Any]

    @property
    def config(self) -> Config:
        return self.problem.config

    def _coordinates(self, number):
        """Batch entry, head, and block of queries of a tile."""
        blocks, heads = jnp.int32(self.problem.blocks_q), jnp.int32(self.problem.query[1])
        pair = lax.div(number, blocks)
        return lax.div(pair, heads), lax.rem(pair, heads), lax.rem(number, blocks)

    def look_up(self, number) -> list[Any]:
        """What operands say of a tile: its lengths and ranges, as far as there are any."""
        b, _, block = self._coordinates(number)
        found = []
        for name, count in _FACTS.items():
            if name in self.operands:
                ref, index = self.operands[name]
                found += [ref[index(b)]] if count == 1 else [ref[index(b), block, i] for i in range(count)]
        return found

    def place(self, number, found) -> _Place:
        """The place of a tile, with what was looked up."""
        b, head, block = self._coordinates(number)
        found, lengths = list(found), []
        for name, size in (("query_lengths", self.problem.query[0]), ("key_lengths", self.problem.key[0])):
            lengths.append(jnp.minimum(jnp.int32(size), found.pop(0)) if name in self.operands else jnp.int32(size))
        ranges = found[:4] if "ranges" in self.operands else []
        return _Place(b, head, block, lengths, ranges, found[len(ranges) :])

    def _at(self, name, b):
        """An operand's entry of the batch."""
        ref, index = self.operands[name]
        return ref.at[index(b)]

    def _key_blocks(self, place):
        """From and to which key block a tile goes, at least one."""
        low, high = self._seen(place.lengths, place.block * self.problem.block_q, self.problem.block_q)
        for start, end in (limits[:2] for limits in (place.ranges, place.seen) if limits):
            low, high = jnp.maximum(low, start), jnp.minimum(high, end)
        low = jnp.clip(low, 0, self.problem.blocks_kv - 1)
        return low, jnp.clip(high, low + 1, self.problem.blocks_kv)

    def _seen(self, lengths, first, rows):
        """From and to which key block the window and the lengths let some of the queries from `first` on see a key."""
        queries, keys = lengths
        size = jnp.int32(self.config.block_kv)
        left, right = self.problem.window
        low, high = jnp.int32(0), lax.div(keys + size - 1, size)
        if left is not None:
            low = lax.div(jnp.maximum(first - left, 0), size)
        if right is not None:
            last = jnp.minimum(first + rows, queries) - 1
            high = jnp.minimum(high, lax.div(jnp.maximum(last + right, -1) + size, size))
        return low, jnp.where(first < queries, high, 0)

    def _seen_whole(self, place, first, rows):
        """The same for key blocks of which all of these queries see every key; to may be before from."""
        queries, keys = place.lengths
        size = jnp.int32(self.config.block_kv)
        left, right = self.problem.window
        low, high = jnp.int32(0), lax.div(keys, size)
        if left is not None:
            low = lax.div(jnp.maximum(first + rows - 1 - left, 0) + size - 1, size)
        if right is not None:
            high = jnp.minimum(high, lax.div(jnp.maximum(first + right + 1, 0), size))
        if "query_lengths" in self.operands:
            high = jnp.where(first + rows <= queries, high, 0)
        if place.ranges:
            low, high = jnp.maximum(low, place.ranges[2]), jnp.minimum(high, place.ranges[3])
        return low, high

    def _copy_parts(self, letter, slot, copy):
        """Does `copy(columns, part)` for each part of a slot."""
        if not self.problem.is_ragged:
            copy(slice(None), self.memory[letter].at[slot])
            return
        copied, _ = self.memory[letter]

        @pl.loop(0, copied.shape[1])  # columns behind the last one are clipped, if it is not known while tracing that there are
        def _(part):
            copy(pl.ds(part * _SWIZZLED, _SWIZZLED), copied.at[slot, part])

    def _parts(self, letter, slot):
        """The parts of a slot as the tensor cores take them, or the terms of what is split."""
        if self.config.split:
            return [self.memory[letter].at[slot, term] for term in range(2)]
        if not self.problem.is_ragged:
            return [self.memory[letter].at[slot]]
        _, tiled = self.memory[letter]
        return [tiled.at[slot, part] for part in range(tiled.shape[1])]

    def _stage(self, step):
        return lax.rem(step, jnp.int32(self.config.stages))

    # The warpgroup that copies.

    def copy_in(self, letters, place, steps):
        """Copies what a tile needs of these, the last key block first; gives how many steps there have been."""
        b, head, block = place.b, place.head, place.block
        low, high = self._key_blocks(place)
        problem, memory = self.problem, self.memory
        key_head = lax.div(head, jnp.int32(problem.query[1] // problem.key[1]))
        size, count = self.config.block_kv, high - low

        def copy(name, first, rows, head, letter, slot):
            empty, full = (memory[f"{letter}_{state}"].at[slot] for state in ("empty", "full"))
            if self.config.split:
                for i, (place, piece) in enumerate(self._load(name, b, first, rows, head)):
                    if i == 0:
                        plgpu.barrier_wait(empty)  # behind the first load, as loads take long
                    for part, term in zip(self._parts(letter, slot), products.bfloat16_terms(piece), strict=True):
                        part[place] = term
                plgpu.commit_smem()
                plgpu.barrier_arrive(full)
                return
            plgpu.barrier_wait(empty)

            def copy_part(cols, part):
                plgpu.copy_gmem_to_smem(self._at(name, b).at[pl.ds(first, rows), head, cols], part, full)

            self._copy_parts(letter, slot, copy_part)

        def copy_block(name, letter, i):
            stage = self._stage(steps + i)
            copy(name, (high - 1 - i) * size, size, key_head, letter, stage)

        if "k" in letters:
            copy_block("key", "k", 0)
        if "q" in letters:
            for warpgroup in range(self.config.warpgroups):
                copy("query", block * problem.block_q + warpgroup * ROWS, ROWS, head, "q", warpgroup)

        @pl.loop(1, count)
        def _(i):
            if "k" in letters:
                copy_block("key", "k", i)
            if "v" in letters:
                copy_block("value", "v", i - 1)

        if "v" in letters:
            copy_block("value", "v", count - 1)
        return steps + count

    def _load(self, name, b, first, rows, head):
        """Rows of a float32 operand in registers, 0 beyond the ends, piece by piece, and where in a slot each belongs."""
        ref, index = self.operands[name]
        length, heads, _ = self.problem.query if name == "query" else self.problem.key
        size = ref.shape[1] // heads
        for row in range(0, rows, ROWS):
            for col in range(0, size, _SWIZZLED):
                limits = length - first - row, size - col
                start = index(b) * length + first + row
                place = slice(row, row + ROWS), slice(col, col + _SWIZZLED)
                yield (
                    place,
                    products.load_product(ref, start, head * size + col, limits, (ROWS, _SWIZZLED), varies=(True, True)),
                )

    # Those that compute.

    def start(self, warpgroup):
        """Says that all of shared memory is empty, and that the first warpgroup has the first turn."""
        for stage in range(self.config.stages):
            plgpu.barrier_arrive(self.memory["k_empty"].at[stage])
            plgpu.barrier_arrive(self.memory["v_empty"].at[stage])
        plgpu.barrier_arrive(self.memory["q_empty"].at[warpgroup])
        if self.config.turns:

            @pl.when(warpgroup == self.config.warpgroups - 1)
            def _():
                ptx.pass_turn(_TURN)

    def _take_turn(self, warpgroup):
        if self.config.turns:
            ptx.take_turn(_TURN + warpgroup)

    def _pass_turn(self, warpgroup):
        if self.config.turns:
            ptx.pass_turn(_TURN + lax.rem(warpgroup + 1, jnp.int32(self.config.warpgroups)))

    def compute(self, warpgroup, place, steps):
        """Computes the rows of a warpgroup; gives how many steps there have been."""
        b, head, block, lengths = place.b, place.head, place.block, place.lengths
        tile_low, tile_high = self._key_blocks(place)
        problem, memory, config = self.problem, self.memory, self.config
        first = block * problem.block_q + warpgroup * ROWS
        low, high = self._seen(lengths, first, ROWS)  # of the rows, which may be less than of the tile
        high = jnp.clip(high, tile_low + 1, tile_high)
        low = jnp.clip(low, tile_low, high - 1)
        count, end = high - low, steps + tile_high - tile_low
        scores = _Scores(self, place, first)

        def multiply_keys(s_acc, step):
            pairs = _pairs_of_terms if config.split else functools.partial(zip, strict=True)
            for q, k in pairs(self._parts("q", warpgroup), self._parts("k", self._stage(step))):
                plgpu.wgmma(s_acc, q, k.T)

        def multiply_values(o_acc, weights, step):
            plgpu.barrier_wait(memory["v_full"].at[self._stage(step)])
            values = self._parts("v", self._stage(step))
            if config.split:
                for term, v in _pairs_of_terms(weights, values):
                    plgpu.wgmma(o_acc, term, v)
                return
            for i, v in enumerate(values):
                plgpu.wgmma(o_acc.at[:, i * v.shape[1] : (i + 1) * v.shape[1]], weights, v)

        def rounded(weights):
            return products.bfloat16_terms(weights) if config.split else weights.astype(self.out_ref.dtype)

        def wait_for_keys(step):
            plgpu.barrier_wait(memory["k_full"].at[self._stage(step)])

        def skip(step, _):
            """Leaves a key block to the other warpgroups."""
            stage = self._stage(step)
            wait_for_keys(step)
            self._take_turn(warpgroup)
            self._pass_turn(warpgroup)
            plgpu.barrier_arrive(memory["k_empty"].at[stage])
            plgpu.barrier_wait(memory["v_full"].at[stage])
            plgpu.barrier_arrive(memory["v_empty"].at[stage])

        lax.fori_loop(steps, steps + tile_high - high, skip, None)
        steps = steps + tile_high - high

        def rows_of(o_acc):
            def first_block(s_acc):
                wait_for_keys(steps)
                self._take_turn(warpgroup)
                multiply_keys(s_acc, steps)
                self._pass_turn(warpgroup)
                masks = [scores.mask(high - 1 - i, i < count) for i in range(2)]
                return s_acc[...], masks

            plgpu.barrier_wait(memory["q_full"].at[warpgroup])
            s, masks = pl.run_scoped(first_block, plgpu.ACC(scores.shape, jnp.float32))
            plgpu.barrier_arrive(memory["k_empty"].at[self._stage(steps)])
            mask, following = (scores.packed(mask) for mask in masks)
            s = scores.of(s, mask, high - 1, banded=True)
            state, _, weights = scores.push(scores.start(), s)
            pl.when(count > 1)(lambda: wait_for_keys(steps + 1))

            def step(banded, i, carry):
                m, d, weights, mask = carry

                def both(s_acc):
                    self._take_turn(warpgroup)
                    multiply_keys(s_acc, steps + i)
                    multiply_values(o_acc, weights, steps + i - 1)
                    self._pass_turn(warpgroup)
                    following = scores.mask(high - 2 - i, i + 1 < count)
                    return plgpu.wgmma_accumulator_load(s_acc, wait_n=problem.value_products), following

                s, following = pl.run_scoped(both, plgpu.ACC(scores.shape, jnp.float32))
                plgpu.barrier_arrive(memory["k_empty"].at[self._stage(steps + i)])
                s = scores.of(s, mask, high - 1 - i, banded=banded)
                state, factor, weights = scores.push(State(m, d), s)
                weights = scores.kept(weights, high - 1 - i)
                (m, d, _), factor, weights = lax.optimization_barrier((state, factor, weights))
                # A branch between the weights and the wait: without one ptxas computes them after it, and nothing overlaps.
                pl.when(i + 1 < count)(lambda: wait_for_keys(steps + i + 1))
                o = plgpu.wgmma_accumulator_load(o_acc, wait_n=0)
                plgpu.barrier_arrive(memory["v_empty"].at[self._stage(steps + i - 1)])
                o_acc[...] = products.scale_rows(o, factor)
                return m, d, rounded(weights), scores.packed(following)

            weights = rounded(scores.kept(weights, high - 1))
            carry = (state.m, state.d, weights, following)
            for banded, start, stop in scores.spans(*self._seen_whole(place, first, ROWS), low, high):
                carry = lax.fori_loop(start, stop, functools.partial(step, banded), carry)
            m, d, weights, _ = carry
            if config.own_output:
                plgpu.barrier_arrive(memory["q_empty"].at[warpgroup])
            last = steps + count - 1
            multiply_values(o_acc, weights, last)
            o = o_acc[...]
            plgpu.barrier_arrive(memory["v_empty"].at[self._stage(last)])
            self._store(warpgroup, b, head, first, scores, State(m, d, o))

        pl.run_scoped(rows_of, plgpu.ACC((ROWS, problem.sizes[1]), jnp.float32))
        lax.fori_loop(steps + count, end, skip, None)
        return end

    def _store(self, warpgroup, b, head, first, scores, state):
        """Stores the output, that of 16 bits by way of shared memory, and the log-sum-exp of a warpgroup's rows."""
        length, heads, _ = self.problem.query
        reciprocal = jnp.where(state.d == 0, 0.0, 1 / ((1 - self.problem.dropout_rate) * state.d))
        o = state.o * lax.broadcast_in_dim(reciprocal, state.o.shape, (0,))
        if self.config.split:
            size = self.problem.value_size
            products.store_product(self.out_ref, b * length + first, head * size, (length - first, size), o)
        else:
            self._copy_out(warpgroup, b, head, first, o)
        lse = online.lse_log2(state, unit=scores.unit)
        row = (b * heads + head) * length + first
        products.store_product_rows(self.lse_ref, row, length - first, lse)
        if not self.config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(self.memory["q_empty"].at[warpgroup])

    def _copy_out(self, warpgroup, b, head, first, o):
        letter, rows = "o" if self.config.own_output else "q", pl.ds(first, ROWS)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for i, part in enumerate(self._parts(letter, warpgroup)):
            part[...] = o[:, i * part.shape[1] : (i + 1) * part.shape[1]].astype(self.out_ref.dtype)
        plgpu.commit_smem()
        self._copy_parts(
            letter, warpgroup, lambda cols, part: plgpu.copy_smem_to_gmem(part, self.out_ref.at[b, rows, head, cols])
        )


def _pairs_of_terms(left, right):
    """Which terms are multiplied, the smallest products first: that of both low terms is left out."""
    return zip((left[1], left[0], left[0]), (right[0], right[1], right[0]), strict=True)


class _Scores:
    """How the products of queries and keys become the scores of a warpgroup's rows."""

    def __init__(self, tile, place, first):
        self.b, self.head, self.ranges, lengths = place.b, place.head, place.ranges, place.lengths
        self.first, self.out_ref = first, tile.out_ref
        self.problem, self.operands, self.sizes = tile.problem, tile.operands, tile.sizes
        self.shape = (ROWS, tile.config.block_kv)
        left, right = self.problem.window
        self.has_high = (
            right is not None
            or self.problem.key[0] % tile.config.block_kv != 0
            or self._has("query_lengths", "key_lengths", "ranges")
        )
        self.has_low = left is not None or self._has("ranges")
        self.is_banded = self.has_high or self.has_low
        self.low = self.high = None
        if self.is_banded:
            position = first + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW_LAYOUT)
            self.low = None if left is None else position - left
            high = jnp.where(position < lengths[0], lengths[1] - 1, -1)
            self.high = high if right is None else jnp.minimum(high, position + right)
        self.segments: Any = None
        if self._has("query_segments"):
            ref, index = self.operands["query_segments"]
            base = index(self.b) * self.problem.query[0] + first
            self.segments = products.load_product_rows(ref, base, self.problem.query[0] - first, self.shape)

    def _has(self, *names):
        return any(name in self.operands for name in names)

    @property
    def slack_and_headroom(self) -> tuple[int, int]:
        return _SLACK_AND_HEADROOM[self.out_ref.dtype.name]

    @property
    def is_biased(self) -> bool:
        """Whether scores may be as large as `finfo.min`, so that their maximum must not be rounded when it is scaled."""
        return self._has("bias")

    @property
    def unit(self) -> float:
        """Of the maximum, in powers of two."""
        return _LOG2E if self.is_biased else 1.0

    @property
    def scale_log2(self) -> float:
        return 1.0 if self.is_biased else _LOG2E * self.factor

    @property
    def factor(self) -> float:
        """Of the scores, to be multiplied with last."""
        return self.problem.scale if self.problem.soft_cap is None else self.problem.soft_cap

    def push(self, state, s):
        """`online.push_log2` of a key block."""
        slack, headroom = self.slack_and_headroom
        return online.push_log2(state, s, self.scale_log2, slack=slack, headroom=headroom, unit=self.unit)

    def start(self) -> State:
        """The state before the first key: that of the sink, if there is one."""
        state = online.identity(())
        if self._has("sinks"):
            ref, index = self.operands["sinks"]
            _, headroom = self.slack_and_headroom
            state = online.lift_log2(ref[index(self.b), self.head].astype(jnp.float32), headroom=headroom, unit=self.unit)
        rows = [jnp.broadcast_to(part, (ROWS,)) for part in (state.m, state.d)]
        return State(*(plgpu.layout_cast(part, _ROW_LAYOUT) for part in rows))

    def spans(self, whole_from, whole_to, low, high):
        """The steps behind the first as spans, which are banded or not: the last key block comes first."""
        whole_to = jnp.clip(whole_to, low, high)
        whole_from = jnp.clip(whole_from, low, whole_to)
        first, second = (jnp.maximum(high - block, 1) for block in (whole_to, whole_from))
        spans: list[tuple[bool, Any, Any]] = [(True, 1, first)] if self.has_high else []
        spans.append((False, first if self.has_high else 1, second if self.has_low else high - low))
        return [*spans, (True, second, high - low)] if self.has_low else spans

    def of(self, s, mask, block, *, banded):
        """The scores of a key block, `-inf` for keys that are not seen; `mask` is what `packed` gives of its."""
        size = self.problem.config.block_kv
        start = block * size
        if self.problem.soft_cap is not None:
            s = common.tanh(s * (self.problem.scale / self.problem.soft_cap))
        if self.is_biased:
            s = s * self.factor
        if self._has("bias"):
            bias = self._tile_of("bias", block, products.load_product).astype(jnp.float32)
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s + bias)  # s may be NaN
        if self._has("mask"):
            s = products.select_bits(s, mask)
        if self.ranges and banded:
            _, _, whole_from, whole_to = self.ranges
            several = (block < whole_from) | (block >= whole_to)
            s = lax.cond(several, lambda s: self._of_own_segment(s, start), lambda s: s, s)
        if not banded or self.high is None:
            return s
        return products.band(s, None if self.low is None else self.low - start, self.high - start)

    def kept(self, weights, block):
        """The weights of a key block that dropout keeps, and 0 for the others."""
        rate = self.problem.dropout_rate
        if not rate:
            return weights
        ref, index = self.operands["seeds"]
        starts = jnp.uint32(self.first), jnp.uint32(block * self.shape[1])
        row, col = (
            start + plgpu.broadcasted_iota(jnp.uint32, self.shape, axis, layout=_LAYOUT) for axis, start in enumerate(starts)
        )
        first, second = (jnp.broadcast_to(ref[index(self.b), self.head, i], self.shape) for i in range(2))
        return jnp.where(dropout.keep(first, second, row, col, rate), weights, 0.0)

    def mask(self, block, there):
        """Loads the mask of a key block if the block is there: a step before it is needed, as loads take long."""
        return self._tile_of("mask", block, products.load_mask, there) if self._has("mask") else []

    def packed(self, loaded):
        """What `mask` loaded, in bits."""
        return products.pack_mask(loaded, self.shape) if loaded else []

    def _of_own_segment(self, s, start):
        """The scores of the keys from `start` on, `-inf` for keys of another segment."""
        ref, index = self.operands["key_segments"]
        keys = self.problem.key[0]
        own = products.load_product_cols(ref, index(self.b) * keys + start, keys - start, self.shape)
        same = lax.broadcast_in_dim(self.segments, s.shape, (0,)) == lax.broadcast_in_dim(own, s.shape, (1,))
        return jnp.where(same, s, -jnp.inf)

    def _tile_of(self, name, block, load, there=True):
        """The elements of a bias or mask that belong to the scores of a key block, none if it is not there."""
        ref, index = self.operands[name]
        heads, rows = self.sizes[name]
        row = (index(self.b) * heads + (self.head if heads > 1 else 0)) * rows + (self.first if rows > 1 else 0)
        start = block * self.shape[1]
        limits = jnp.where(there, self.problem.query[0] - self.first, 0), self.problem.key[0] - start
        return load(ref, row, start, limits, self.shape, varies=(rows > 1, ref.shape[1] > 1))
