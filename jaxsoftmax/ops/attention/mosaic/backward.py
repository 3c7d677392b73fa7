"""Attention on Hopper, backward: a block of keys keeps the sums of its derivatives while queries pass block by block.

A block of threads is one warpgroup that copies and two that compute. It works through tiles, a block of keys of one key head
each, in the order of a table, as the forward kernel does, or of their numbers where there are very many. Keys and values of a
tile stay in shared memory. Queries and output cotangents of all query heads that share the key head come by bulk copies into
rings, with the rows' log-sum-exp and `delta`. Products are transposed, so that a row of the scores in registers is a key:
weights and their derivatives are then, as they are, the left operands of the products that make dV and dK. The derivatives of
the scores also go to shared memory, from where both warpgroups take them for dQ, which bulk copies add to global memory in
float32.

    S' = K Q'    P' = exp(scale S' - lse)    dP' = V dO'    dS' = P' (dP' - delta)
    dV += P' dO    dK += dS' Q    dQ += dS K    delta = sum(dO out) - dlse

Queries pass from the last block to the first, so that blocks of keys that start together find the same queries in L2, and soon
have their turns, also where attention is causal. Blocks of keys add to dQ in any order, so its last bits vary. Where the bits
must not, a counter for each block of queries says whose turn it is, and blocks of keys take turns in their order, in which they
are also handed out. Two warps that do nothing else wait for turns, start the copies, wait for them and end turns: where the
warpgroups that compute did all that, they waited for most of the time.

Head sizes 64 and 128: each warpgroup has 64 of the keys, makes all of dV and dK for them, and half of dQ. Head size 256: there
are 64 keys, as dV or dK alone take half of a thread's registers. One warpgroup makes S', P' and dV, the other dP', dS' and dK:
weights pass from the one to the other by way of shared memory. Other head sizes are padded in memory, to the next of these.

`10 * T * S * H` operations a head.

Source: Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608, section 3.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxsoftmax._gpu import products, ptx
from jaxsoftmax.ops.attention import _dropout as dropout
from jaxsoftmax.ops.attention.mosaic import common
from jaxsoftmax.ops.attention.xla import summed_to

SIZES = (64, 128, 256)  # of heads, on chip
ROWS = 64  # keys or queries of a product
WARPGROUPS = 2  # that compute
_ADDERS = 2  # warps that add, if deterministic: one asks whose turn it is while the other's copies arrive
_SLOTS = 2  # for the derivatives of the scores: one is written while the other is read
_BOTH = 8  # the hardware's barrier at which both warpgroups meet, and that which says that weights are there
_WEIGHTS = 9
_LOG2E = math.log2(math.e)
_MAX_MASKED = 2**21  # keys whose biases have addresses within 31 bits of each other, for all queries of a step
_LEAST_SEEDED = 1e-30  # of scales by which a log-sum-exp may be divided
_LAYOUT = plgpu.Layout.WGMMA
_ROW_LAYOUT, _COL_LAYOUT = _LAYOUT.reduce(1), _LAYOUT.reduce(0)


@dataclass(frozen=True)
class Config:
    """How a block of threads works.

    Attributes:
      block_q: queries of a step.
      stages: blocks of queries, and of output cotangents, in shared memory.
      roles: whether the warpgroups share the 64 keys and do different products; else each has 64 keys of its own.
      pieces: in how many pieces, one after the other, a warpgroup's part of dQ goes through shared memory.
      keys_first: whether dK's product is started before the warpgroups meet for dQ's; else behind dQ's, while dQ is added.
      registers: of a thread of the warpgroup that copies, and of those that compute.
    """

    block_q: int
    stages: tuple[int, int]
    roles: bool = False
    pieces: int = 1
    keys_first: bool = False
    registers: tuple[int, int] = (24, 240)

    @property
    def block_kv(self) -> int:
        return ROWS if self.roles else ROWS * WARPGROUPS


# Registers of a thread that hold arrays, at the most, and KiB of shared memory:
#
# | head size | S', dP' | P', dS' in 16 bits | dV, dK | dQ | at most | K, V | Q, dO | dS' | dQ | P' | sum |
# |---|---|---|---|---|---|---|---|---|---|---|---|
# | 64 (128 queries) | 64, 64 | 32, 32 | 32, 32 | 32 | 192; later 160 | 32 | 80 | 64 | 32 | | 208 |
# | 128 (64 queries) | 32, 32 | 16, 16 | 64, 64 | 32 | 192; later 192 | 64 | 80 | 32 | 32 | | 208 |
# | 256 (64 queries) | 32 | 16 | 128 | 64 | 192, or 208 with P' or dS' | 64 | 96 | 16 | 32 | 8 | 216 |
#
# of 240 (two warpgroups of 240 and one of 24: 64512 of 65536) and of 227 KiB; with a bias's derivative and a soft cap there are
# two P'. Addresses, limits, and for each 64 queries 16 of lse and of delta come on top; where sums start with those, they are
# in them.
_CONFIGS = {64: Config(128, (3, 2), keys_first=True), 128: Config(64, (3, 2)), 256: Config(64, (2, 1), roles=True, pieces=2)}


def size_for(head_size: int, value_size: int) -> int:
    """The head size on chip, of keys and values."""
    return next(size for size in SIZES if size >= max(head_size, value_size))


def config_for(head_size: int, value_size: int) -> Config:
    """The configuration for a call, as measured on an H200."""
    return _CONFIGS[size_for(head_size, value_size)]


def unsupported(given, *, wanted, deterministic, **params) -> str | None:
    """Why the derivatives have no kernel where the forward pass has one, in words, or None."""
    del params
    query, key = given["query"], given["key"]
    if query.dtype == jnp.float32:
        return "derivatives of float32 have no kernel"
    if "bias" in given or "mask" in given:
        keys = key.shape[-3]
        if keys > _MAX_MASKED:
            return f"there must be at most {_MAX_MASKED} keys with a bias or mask, got {keys}"
    if "bias" in wanted:
        bias, batch = given["bias"], common.batch_of(given)
        whole = *batch, query.shape[-2], query.shape[-3], key.shape[-3]
        if deterministic and bias.shape != whole:
            return f"the derivative of a bias that is broadcast, {bias.shape} to {whole}, is summed in any order"
    return None


def attention_vjp(given, out, lse, dout, dlse, *, wanted, scale, window, soft_cap, dropout_rate, deterministic, config=None):
    """The cotangents that are wanted of `xla.MOVING`, as in `xla.attention_vjp`; `given` are the operands by name."""
    given = {name: operand for name, operand in given.items() if operand is not None}
    if not dropout_rate:
        given.pop("seeds", None)
    query, key, value = (given[name] for name in ("query", "key", "value"))
    batch = common.batch_of(given)
    delta = jnp.zeros(lse.shape, jnp.float32)
    if dout is None:
        dout = jnp.zeros_like(out)
    else:
        delta = _rows_first(jnp.sum(out.astype(jnp.float32) * dout.astype(jnp.float32), -1))
    empty = None
    if _may_see_nothing(given, window):  # cotangents of such rows may be NaN, or infinite
        empty = lse == -jnp.inf
        alone = empty
        if "sinks" in given:
            sink = given["sinks"].astype(jnp.float32)[..., None]
            alone |= (lse == sink) & _rows_first(jnp.all(out == 0, -1))
        dout, delta = jnp.where(_rows_first(alone)[..., None], 0, dout), jnp.where(alone, 0, delta)
    if dlse is not None:
        delta -= dlse if empty is None else jnp.where(empty, 0, dlse)
    problem = _Problem(
        batch,
        query.shape[-3:],
        key.shape[-3:],
        scale,
        window,
        soft_cap,
        dropout_rate,
        "bias" in wanted,
        deterministic,
        size_for(query.shape[-1], value.shape[-1]),
        config or config_for(query.shape[-1], value.shape[-1]),
    )
    found = {}
    if set(wanted) - {"sinks"}:
        found = problem.run(given, lse, dout, delta, value.shape[-1])
    if "sinks" in wanted:
        weight = jnp.where(lse == -jnp.inf, 0, jnp.exp(given["sinks"].astype(jnp.float32)[..., None] - lse))
        found["sinks"] = -jnp.sum(weight * delta, -1)
    return [summed_to(found[name], given[name].shape).astype(given[name].dtype) for name in wanted]


def _rows_first(array):
    """`[*batch, T, N]` as `[*batch, N, T]`, and back."""
    return jnp.swapaxes(array, -1, -2)


def _may_see_nothing(given, window) -> bool:
    """Whether there may be a query that sees no key."""
    if {"bias", "mask", "query_lengths", "key_lengths", "query_segments"} & set(given):
        return True
    left, _ = window
    return left is not None and given["query"].shape[-3] > given["key"].shape[-3] + left


@dataclass(frozen=True)
class _Problem:
    """The static part of a call, and how a kernel is made of it."""

    batch: tuple[int, ...]
    query: tuple[int, int, int]  # T, N, H
    key: tuple[int, int, int]  # S, K, H
    scale: float
    window: tuple[int | None, int | None]
    soft_cap: float | None
    dropout_rate: float
    biased: bool  # whether the derivative of the bias is wanted
    deterministic: bool
    size: int  # of heads on chip
    config: Config

    @property
    def heads(self) -> int:
        """Query heads of a key head."""
        return self.query[1] // self.key[1]

    @property
    def blocks_q(self) -> int:
        return pl.cdiv(self.query[0], self.config.block_q)

    @property
    def blocks_kv(self) -> int:
        return pl.cdiv(self.key[0], self.config.block_kv)

    @property
    def is_ragged(self) -> bool:
        """Whether the last block of keys has rows that are none."""
        return self.key[0] % self.config.block_kv != 0

    @property
    def parts(self) -> tuple[int, int]:
        """How dQ is cut between the warpgroups: by queries and by columns."""
        return self.config.block_q // ROWS, WARPGROUPS * ROWS // self.config.block_q

    @property
    def part_size(self) -> int:
        """Columns of dQ that a warpgroup makes."""
        return self.size // self.parts[1]

    def span(self, block: Any, lengths: Any, divide: Any, minimum: Any, maximum: Any) -> tuple[Any, Any, Any, Any]:
        """Which blocks of queries the window and the lengths let see a key of a block.

        From and to where some query sees some key, and from and to where all see all; to may be before from.
        """
        (left, right), (queries, keys) = self.window, lengths
        step, size = self.config.block_q, self.config.block_kv
        first, last = block * size, (block + 1) * size - 1
        low = 0 if right is None else divide(maximum(first - right, 0), step)
        high = divide(queries + step - 1, step)
        whole_from = 0 if right is None else divide(maximum(last - right, 0) + step - 1, step)
        whole_to = divide(queries, step) if lengths != self.lengths else self.blocks_q  # rows that are none are 0
        if left is not None:
            high = minimum(high, divide(minimum(last, keys - 1) + left, step) + 1)
            whole_to = minimum(whole_to, divide(maximum(first + left + 1, 0), step))
        is_key, is_whole = minimum(maximum(keys - first, 0), 1), minimum(maximum(keys - last, 0), 1)
        return low, high * is_key, whole_from, whole_to * is_whole

    @property
    def passes_both(self) -> bool:
        """Whether weights pass from one warpgroup to the other both with the derivative of the soft cap and without."""
        return self.config.roles and self.biased and self.soft_cap is not None

    @property
    def lengths(self) -> tuple[int, int]:
        return self.query[0], self.key[0]

    def costs(self) -> tuple[int, ...]:
        """How many steps each block of keys takes."""
        spans = (self.span(block, self.lengths, lambda a, b: a // b, min, max) for block in range(self.blocks_kv))
        return tuple(self.heads * max(high - low, 0) for low, high, *_ in spans)

    def takes(self, varying: bool) -> bool:
        """Whether blocks of threads take one tile after another: where it depends on operands how long a tile takes.

        Not where there are turns: the warps that add have no loops of unknown length. Nor is there always room to say it.
        """
        return varying and not (self.deterministic or self.passes_both)

    def costs_in_order(self) -> tuple[int, ...]:
        """By which costs tiles are handed out: of each head in the order of turns, if deterministic."""
        costs = self.costs()
        if self.deterministic and any(a < b for a, b in itertools.pairwise(costs)):
            return (1,) * len(costs)
        return costs

    def group(self, costs: tuple[int, ...]) -> int:
        """For how many heads at a time tiles are handed out: as the forward kernel's, with queries in the place of keys.

        If deterministic, more, though L2 may not hold them: of one head fewer blocks of keys start together then, each of which
        starts later than the one before. What is best on an H200 grows with the room in L2 and where tiles get shorter.
        """
        equal = len(set(costs)) == 1
        if equal and not self.deterministic:
            return 1
        bytes_of_head = 8 * self.query[0] * self.size * self.heads  # two of 16 bits, and one of 32
        least, most, times = (8, 32, 2 if equal else 4) if self.deterministic else (1, 8, 1)
        return min(most, max(least, 1 << max(1, times * common.L2 // bytes_of_head).bit_length() - 1))

    def first_key_block(self, block: Any, divide: Any, maximum: Any) -> Any:
        """The first block of keys that the window lets a block of queries see."""
        left, _ = self.window
        return 0 if left is None else divide(maximum(block * self.config.block_q - left, 0), self.config.block_kv)

    def spans(self, given, seen) -> jax.Array:
        """What `span` says of all blocks of keys, of these lengths, segments and `seen`: int32 `[*batch, blocks_kv, 4]`."""
        lengths = [
            jnp.clip(given[name][..., None], 0, size) if name in given else jnp.int32(size)
            for name, size in zip(("query_lengths", "key_lengths"), self.lengths, strict=True)
        ]
        block = jnp.arange(self.blocks_kv, dtype=jnp.int32).reshape(*(1,) * len(self.batch), -1)
        span = self.span(block, lengths, jnp.floor_divide, jnp.minimum, jnp.maximum)
        low, high, whole_from, whole_to = jnp.broadcast_arrays(*span)
        if "query_segments" in given:
            sizes = self.config.block_kv, self.config.block_q
            ranges = common.ranges(given["key_segments"], given["query_segments"], *sizes)
            low, high = jnp.maximum(low, ranges[..., 0]), jnp.minimum(high, ranges[..., 1])
            whole_from, whole_to = jnp.maximum(whole_from, ranges[..., 2]), jnp.minimum(whole_to, ranges[..., 3])
        if seen is not None:
            ends = common.ends(jnp.swapaxes(seen, -1, -2))
            low, high = jnp.maximum(low, ends[..., 0]), jnp.minimum(high, ends[..., 1])
        high = jnp.maximum(low, high)
        whole_from = jnp.clip(whole_from, low, high)
        return jnp.stack(jnp.broadcast_arrays(low, high, whole_from, jnp.clip(whole_to, whole_from, high)), -1)

    def is_seeded(self, given) -> bool:
        """Whether sums of products start with what is subtracted from them, as that is all that is done to them."""
        plain = self.soft_cap is None and "bias" not in given and "seeds" not in given
        return plain and not self.config.roles and self.scale > _LEAST_SEEDED

    def lines(self, given, lse, delta):
        """The log-sum-exp and delta of queries as the kernel takes them; a score of `-inf` then has weight 0."""
        lse = jnp.where(lse == -jnp.inf, 0, lse)
        if self.is_seeded(given):
            return lse * (-1 / self.scale), -delta
        return (lse if "bias" in given else lse * _LOG2E), delta

    def run(self, given, lse, dout, delta, value_size) -> dict[str, jax.Array]:
        """Runs the kernel: the cotangents of query, key and value, and of the bias if that is wanted, of the whole batch."""
        count, (length, heads, head_size), (keys, key_heads, _) = math.prod(self.batch), self.query, self.key
        given = dict(given)
        given.pop("sinks", None)
        seen = common.seen(given["mask"], self.lengths, self.config.block_q, self.config.block_kv) if "mask" in given else None
        if seen is not None or {"query_lengths", "key_lengths", "query_segments"} & set(given):
            given["spans"] = self.spans(given, seen)
        names = [name for name in given if name not in ("query", "key", "value")]

        def whole(array, trailing, rows):
            """An operand of the whole batch, with rows and columns as bulk copies need them."""
            array = jnp.broadcast_to(array, (*self.batch, *trailing)).reshape(count, *trailing)
            padding = (0, 0), (0, rows - trailing[0]), (0, 0), (0, self.size - trailing[2])
            return array if rows == trailing[0] and self.size == trailing[2] else jnp.pad(array, padding)

        rows, cols = common.up(length, 8), common.up(keys, 8)
        query = whole(given["query"], self.query, rows)
        key = whole(given["key"], self.key, cols)
        value = whole(given["value"], (keys, key_heads, value_size), cols)
        dout = whole(dout, (length, heads, value_size), rows)
        # Rows behind the last are 0 in all operands: their weights are 1 and all their products 0.
        line = [(0, 0), (0, 0), (0, -length % self.config.block_q)]
        lse, delta = (jnp.broadcast_to(a, (*self.batch, heads, length)) for a in (lse, delta))
        lse, delta = self.lines(given, *(a.reshape(count, heads, length) for a in (lse, delta)))
        lse, delta = (jnp.pad(a, line) for a in (lse, delta))
        extras, ends = [given[name] for name in names], [-common.TRAILING[name] for name in names]
        at = [common.batch_index(self.batch, a.shape[: a.ndim + end]) for a, end in zip(extras, ends, strict=True)]
        extras = [a.reshape(-1, *a.shape[a.ndim + end :]) for a, end in zip(extras, ends, strict=True)]
        sizes = {name: array.shape[1:3] for name, array in zip(names, extras, strict=True)}  # heads and rows
        extras = [common.flat(name, array) for name, array in zip(names, extras, strict=True)]
        tiles = count * key_heads * self.blocks_kv
        blocks = min(common.sms(least=self.deterministic), tiles)  # those that wait for each other must all be there
        taken = self.takes("spans" in given)
        tables: list[Any] = []
        if tiles <= common.MAX_SCHEDULED:
            costs = self.costs_in_order()
            arguments = costs, count * key_heads, self.group(costs)
            table = common.order(*arguments) if taken else common.schedule(*arguments, blocks)
            tables = [jax.jit(lambda: jnp.asarray(table))()]  # custom_partitioning takes no constants but inner ones
        # In a loop XLA would make one fusion of the kernel and the slices of its operands, and forget what it writes in place.
        query, key, value, dout, extras = lax.optimization_barrier((query, key, value, dout, extras))
        written = {"dq": jnp.zeros((count, rows, heads, self.size), jnp.float32)}  # in place
        if self.deterministic:
            written["turns"] = jnp.zeros((count * heads * self.blocks_q,), jnp.int32)
            if "spans" in given:
                tables.append(self._turns_before(given["spans"]))
        if self.biased:
            written["dbias"] = jnp.zeros(given["bias"].shape, jnp.float32).reshape(-1, given["bias"].shape[-1])
        order = list(written)
        of_keys = jax.ShapeDtypeStruct((count, cols, key_heads, self.size), query.dtype)
        kernel = plgpu.kernel(
            functools.partial(_kernel, self, names, sizes, at, order, len(tables), blocks, tiles),
            out_type=[of_keys] * 2,
            grid=(blocks,),
            grid_names=("block",),
            num_threads=WARPGROUPS + 1,
            thread_name="warpgroup",
            scratch_types=self._scratch(query.dtype, taken=taken),
            compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=True),
            kernel_name="attention_backward_mosaic",
        )

        def run(refs):
            written, results = refs
            found = kernel(query, key, value, dout, lse, delta, *extras, *tables, *(written[name] for name in order))
            for ref, result in zip(results, found, strict=True):
                ref[...] = result

        # Not `jax.new_ref`, whose effect custom_partitioning refuses.
        written, (dk, dv) = pl.run_state(run)((written, [lax.empty(of_keys.shape, of_keys.dtype) for _ in range(2)]))
        dk, dv, dbias = lax.optimization_barrier((dk, dv, written.get("dbias")))
        dq = self.scale * written["dq"]
        found = {"query": dq[:, :length, :, :head_size], "key": dk[:, :keys, :, :head_size]}
        found |= {"value": dv[:, :keys, :, :value_size]}
        found = {name: array.reshape(*self.batch, *array.shape[1:]) for name, array in found.items()}
        if self.biased:
            found["bias"] = dbias.reshape(given["bias"].shape)
        return found

    def _turns_before(self, spans):
        """How many blocks of keys have their turns at a block of queries before each: int32 `[batch, blocks_kv, blocks_q]`."""
        spans = jnp.broadcast_to(spans, (*self.batch, self.blocks_kv, 4)).reshape(-1, self.blocks_kv, 4)
        block = jnp.arange(self.blocks_q, dtype=jnp.int32).reshape(1, 1, -1)
        visits = ((spans[..., 0, None] <= block) & (block < spans[..., 1, None])).astype(jnp.int32)
        return jnp.cumsum(visits, -2, dtype=jnp.int32) - visits

    def _scratch(self, dtype, *, taken: bool) -> dict[str, Any]:
        """What is in shared memory. A barrier is full when copies have landed, and empty when all have read them.

        `taken` says whether tiles are taken one after another.
        """
        config, size, halves = self.config, self.size, self.config.block_kv // ROWS
        stages, stages_do = config.stages

        def memory(*shape, dtype=dtype):
            width = 128 // jnp.dtype(dtype).itemsize
            return plgpu.SMEM(shape, dtype, transforms=(plgpu.TilingTransform((8, width)), plgpu.SwizzleTransform(128)))

        def ring(copies, stages):
            return plgpu.Barrier(num_arrivals=copies, num_barriers=stages)

        own = {"p": memory(ROWS, config.block_q)} if config.roles else {}
        if self.passes_both:
            own["p_of_bias"] = own["p"]
        if taken:
            own |= common.ticket_memory(1, WARPGROUPS)
        if self.deterministic:
            own |= {"sums_full": ring(WARPGROUPS, _ADDERS), "sums_empty": plgpu.Barrier(num_arrivals=1)}
        return own | {
            "k": memory(halves, self.parts[1], ROWS, self.part_size),
            "v": memory(halves, ROWS, size),
            "q": memory(stages, config.block_q, size),
            "do": memory(stages_do, config.block_q, size),
            "ds": memory(_SLOTS, halves, config.block_q // ROWS, ROWS, ROWS),
            "sums": memory(WARPGROUPS, ROWS, self.part_size // config.pieces, dtype=jnp.float32),
            "q_lse": plgpu.SMEM((stages, config.block_q), jnp.float32),
            "do_delta": plgpu.SMEM((stages_do, config.block_q), jnp.float32),
            "k_full": plgpu.Barrier(num_arrivals=halves * self.parts[1]),
            "v_full": plgpu.Barrier(num_arrivals=halves),
            "kv_empty": plgpu.Barrier(num_arrivals=WARPGROUPS),
            "q_full": ring(2, stages),
            "do_full": ring(1, stages_do),
            "delta_full": ring(1, stages_do),
            "q_empty": ring(WARPGROUPS, stages),
            "do_empty": ring(WARPGROUPS, stages_do),
        }


def _kernel(problem, names, sizes, at, written, table_count, blocks, tiles, *refs, **memory):
    """The program of all warpgroups of a block."""
    refs, fixed = list(refs), ["query", "key", "value", "dout", "lse", "delta"]
    named = dict(zip(fixed, refs, strict=False))
    extras = refs[len(fixed) : len(fixed) + len(names)]
    tables = refs[len(fixed) + len(names) : len(fixed) + len(names) + table_count]
    named |= dict(zip([*written, "dk", "dv"], refs[len(fixed) + len(names) + table_count :], strict=True))
    table = tables.pop(0) if tiles <= common.MAX_SCHEDULED else None
    named |= dict(zip(["before"], tables, strict=False))
    operands = dict(zip(names, zip(extras, at, strict=True), strict=True))
    tile = _Tile(problem, named, operands, sizes, memory)
    block, warpgroup = lax.axis_index("block"), lax.axis_index("warpgroup")

    def number_of(ticket):
        return ticket if table is None else table[ticket]

    def each_tile(work):
        common.each_tile(lambda number, steps: work(tile.place(number), steps), table, tiles, number_of, block, blocks)

    def of_values(work):
        return lambda values, steps: work(tile.place(*values), steps)

    def each_tile_taken(work):
        common.each_tile_taken(of_values(work), lambda ticket: [number_of(ticket)], memory, tiles, block, blocks)

    def each_tile_told(work):
        common.each_tile_told(of_values(work), memory)

    taken = "tile" in memory
    less, more = problem.config.registers

    @pl.when(warpgroup == WARPGROUPS)
    def _():
        plgpu.set_max_registers(less, action="decrease")
        if not problem.deterministic:
            (each_tile_taken if taken else each_tile)(tile.copy_in)
            return

        @plgpu.warp_map
        def _(warp):
            pl.when(warp == _ADDERS)(functools.partial(each_tile, tile.copy_in))
            pl.when(warp == 0)(lambda: plgpu.barrier_arrive(memory["sums_empty"]))
            for own in range(_ADDERS):
                pl.when(warp == own)(functools.partial(each_tile, functools.partial(tile.add, own)))

    @pl.when(warpgroup < WARPGROUPS)
    def _():
        plgpu.set_max_registers(more, action="increase")
        tile.start()
        compute = tile.compute_role if problem.config.roles else tile.compute
        each = each_tile_told if taken else each_tile
        for own in range(WARPGROUPS):  # each has a program of its own, in which addresses are constants
            pl.when(warpgroup == own)(functools.partial(each, functools.partial(compute, own)))
        plgpu.wait_smem_to_gmem(0)


@dataclass(frozen=True)
class _Place:
    """Where a tile is, from and to which block of queries it goes, and where all queries see all keys."""

    b: Any
    head: Any  # of keys
    block: Any
    low: Any
    count: Any
    whole_from: Any
    whole_to: Any
    lengths: tuple[Any, Any]


@dataclass(frozen=True)
class _Tile:
    """What is done for a tile. The steps of all tiles are counted through: step `i` uses stage `i % stages`."""

    problem: _Problem
    refs: dict[str, Any]  # in global memory
    operands: dict[str, Any]  # the same for optional ones, with functions from the batch entry to the index in them
    sizes: dict[str, Any]  # heads and rows of a bias or mask, of which the ref is two-dimensional
    memory: dict[str, Any]

    @property
    def config(self) -> Config:
        return self.problem.config

    def place(self, number) -> _Place:
        problem = self.problem
        blocks, heads = jnp.int32(problem.blocks_kv), jnp.int32(problem.key[1])
        pair, block = lax.div(number, blocks), lax.rem(number, blocks)
        b, head = lax.div(pair, heads), lax.rem(pair, heads)
        lengths = []
        for name, size in zip(("query_lengths", "key_lengths"), problem.lengths, strict=True):
            ref, index = self.operands.get(name, (None, None))
            lengths.append(size if ref is None else jnp.clip(ref[index(b)], 0, size))
        if "spans" in self.operands:
            ref, index = self.operands["spans"]
            low, high, whole_from, whole_to = (ref[index(b), block, i] for i in range(4))
        else:
            low, high, whole_from, whole_to = problem.span(block, problem.lengths, _divide, jnp.minimum, jnp.maximum)
            low, high = low + _zero(number, 0), high + _zero(number, 1)  # of loops with constant ends the compiler makes less
            high = jnp.maximum(low, high)
            whole_from = jnp.clip(whole_from, low, high)
            whole_to = jnp.clip(whole_to, whole_from, high)
        return _Place(b, head, block, low, high - low, whole_from, whole_to, (lengths[0], lengths[1]))

    def _stage(self, step):
        return lax.rem(step, jnp.int32(self.config.stages[0])), lax.rem(step, jnp.int32(self.config.stages[1]))

    # The warpgroup that copies.

    def copy_in(self, place, steps):
        """Copies what a tile needs; gives how many steps there have been."""
        refs, memory, problem = self.refs, self.memory, self.problem
        halves, width = memory["k"].shape[0], problem.part_size
        first = place.block * self.config.block_kv

        def copy_queries(i):
            head, rows, (stage, _) = self._head(place, i), self._queries(place, i), self._stage(steps + i)
            full = memory["q_full"].at[stage]
            plgpu.barrier_wait(memory["q_empty"].at[stage])
            plgpu.copy_gmem_to_smem(refs["query"].at[place.b, rows, head], memory["q"].at[stage], full)
            plgpu.copy_gmem_to_smem(refs["lse"].at[place.b, head, rows], memory["q_lse"].at[stage], full)

        def copy_cotangents(i):
            head, rows, (_, stage) = self._head(place, i), self._queries(place, i), self._stage(steps + i)
            plgpu.barrier_wait(memory["do_empty"].at[stage])
            plgpu.copy_gmem_to_smem(refs["dout"].at[place.b, rows, head], memory["do"].at[stage], memory["do_full"].at[stage])
            line, full = memory["do_delta"].at[stage], memory["delta_full"].at[stage]
            plgpu.copy_gmem_to_smem(refs["delta"].at[place.b, head, rows], line, full)

        total = problem.heads * place.count
        pl.when(total > 0)(lambda: copy_queries(0))
        plgpu.barrier_wait(memory["kv_empty"])
        for half in range(halves):
            rows = pl.ds(first + half * ROWS, ROWS)
            for part in range(problem.parts[1]):
                source = refs["key"].at[place.b, rows, place.head, pl.ds(part * width, width)]
                plgpu.copy_gmem_to_smem(source, memory["k"].at[half, part], memory["k_full"])
        for half in range(halves):
            source = refs["value"].at[place.b, pl.ds(first + half * ROWS, ROWS), place.head]
            plgpu.copy_gmem_to_smem(source, memory["v"].at[half], memory["v_full"])
        pl.when(total > 0)(lambda: copy_cotangents(0))

        @pl.loop(1, total)
        def _(i):
            copy_queries(i)
            copy_cotangents(i)

        return steps + total

    def _head(self, place, i):
        """The query head of step `i` of a tile."""
        return place.head * self.problem.heads + lax.div(jnp.int32(i), place.count)

    def _queries(self, place, i):
        """The queries of step `i` of a tile."""
        return pl.ds(self._block(place, i) * self.config.block_q, self.config.block_q)

    def _block(self, place, i):
        """The block of queries of step `i` of a tile."""
        return place.low + place.count - 1 - lax.rem(jnp.int32(i), place.count)

    # Those that compute.

    def start(self):
        """Says that all of shared memory is empty."""
        plgpu.barrier_arrive(self.memory["kv_empty"])
        for name, stages in zip(("q_empty", "do_empty"), self.config.stages, strict=True):
            for stage in range(stages):
                plgpu.barrier_arrive(self.memory[name].at[stage])

    def compute(self, warpgroup, place, steps):
        """Computes dV and dK of a warpgroup's keys, and its part of dQ; gives how many steps there have been."""
        problem, memory, config = self.problem, self.memory, self.config
        dtype, shape = self.refs["query"].dtype, (ROWS, config.block_q)
        scores = _Scores(self, place, place.block * config.block_kv + warpgroup * ROWS)
        slab, part = self._part(warpgroup)

        def sums_of(dk_acc, dv_acc):
            def step(banded, head, block, step):
                stage, stage_do = self._stage(step)
                q, do = memory["q"].at[stage], memory["do"].at[stage_do]

                def derive(s_acc, dp_acc):
                    plgpu.barrier_wait(memory["q_full"].at[stage])
                    lse = plgpu.load(memory["q_lse"].at[stage], layout=_COL_LAYOUT)
                    if scores.seeded:
                        plgpu.barrier_wait(memory["do_full"].at[stage_do])
                        plgpu.barrier_wait(memory["delta_full"].at[stage_do])
                        delta = plgpu.load(memory["do_delta"].at[stage_do], layout=_COL_LAYOUT)
                        s_acc[...] = _along_rows(lse, shape)
                        dp_acc[...] = _along_rows(delta, shape)
                    self._multiply_keys(s_acc, warpgroup + _zero(step, 0), q)
                    if not scores.seeded:
                        plgpu.barrier_wait(memory["do_full"].at[stage_do])
                    plgpu.wgmma(dp_acc, memory["v"].at[warpgroup + _zero(step, 1)], do.T)
                    loaded = scores.load(head, block, banded=banded)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=1)
                    p, slope = scores.weights(s, lse, loaded, block, banded=banded)
                    kept = scores.kept(head, block)
                    p, rounded = lax.optimization_barrier((p, _only(kept, p).astype(dtype)))
                    plgpu.wgmma(dv_acc, rounded, do)
                    # A branch between the weights and the other product: without one ptxas may compute them after it.
                    if scores.seeded:
                        pl.when(step >= 0)(self._await_staged)
                        delta = None
                    else:
                        plgpu.barrier_wait(memory["delta_full"].at[stage_do])
                        delta = plgpu.load(memory["do_delta"].at[stage_do], layout=_COL_LAYOUT)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=1)
                    return scores.derivatives(p, slope, dp, delta, kept, head, block).astype(dtype)

                ds = pl.run_scoped(derive, plgpu.ACC(shape, jnp.float32), plgpu.ACC(shape, jnp.float32))
                slot = memory["ds"].at[lax.rem(step, jnp.int32(_SLOTS))]

                def multiply_derivatives(dq_acc):
                    if config.keys_first:
                        plgpu.wgmma(dk_acc, ds, q)
                    self._share(slot, warpgroup, ds)
                    for half in range(WARPGROUPS):
                        plgpu.wgmma(dq_acc, slot.at[half, slab].T, memory["k"].at[half + _zero(step, 2), part])
                    if config.keys_first:
                        plgpu.wgmma_wait(WARPGROUPS + 1)
                        self._release("do", step)
                        plgpu.wgmma_wait(WARPGROUPS)
                        self._release("q", step)
                        return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)
                    plgpu.wgmma(dk_acc, ds, q)
                    plgpu.wgmma_wait(WARPGROUPS + 1)
                    self._release("do", step)
                    return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

                dq = pl.run_scoped(multiply_derivatives, plgpu.ACC((ROWS, problem.part_size), jnp.float32))
                self._add(warpgroup, place.b, head, block, step, dq, is_empty=scores.seeded)
                if not config.keys_first:
                    plgpu.wgmma_wait(0)
                    self._release("q", step)

            total = self._each_step(place, scores, steps, step)
            dk, dv = dk_acc[...], dv_acc[...]
            _meet()  # all keys have been read
            memory["v"][warpgroup] = (scores.of_kept * dv).astype(dtype)
            for i in range(problem.parts[1]):
                memory["k"][warpgroup, i] = (problem.scale * self._columns(dk, i)).astype(dtype)
            plgpu.commit_smem()
            self._copy_out("dv", place, warpgroup)
            self._copy_out("dk", place, warpgroup)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory["kv_empty"])
            return total

        plgpu.barrier_wait(memory["k_full"])
        plgpu.barrier_wait(memory["v_full"])
        sums = plgpu.ACC((ROWS, problem.size), jnp.float32)
        return steps + pl.run_scoped(sums_of, sums, sums)

    def compute_role(self, role, place, steps):
        """The same where the first warpgroup makes dV, and the second dK."""
        problem, memory, config = self.problem, self.memory, self.config
        dtype, shape = self.refs["query"].dtype, (ROWS, config.block_q)
        scores = _Scores(self, place, place.block * config.block_kv, weighs=role == 0)

        def multiply_derivatives(step, dq_acc):
            slot = memory["ds"].at[lax.rem(step, jnp.int32(_SLOTS))]
            plgpu.wgmma(dq_acc, slot.at[0, 0].T, memory["k"].at[_zero(step, 2), role])

        def sum_of(acc):
            def step_of_values(banded, head, block, step):
                stage, stage_do = self._stage(step)

                def weigh(s_acc):
                    plgpu.barrier_wait(memory["q_full"].at[stage])
                    self._multiply_keys(s_acc, _zero(step, 0), memory["q"].at[stage])
                    lse = plgpu.load(memory["q_lse"].at[stage], layout=_COL_LAYOUT)
                    loaded = scores.load(head, block, banded=banded)
                    s = plgpu.wgmma_accumulator_load(s_acc, wait_n=0)
                    p, slope = scores.weights(s, lse, loaded, block, banded=banded)
                    kept = _only(scores.kept(head, block), p).astype(dtype)
                    if problem.passes_both:
                        memory["p_of_bias"][...] = p.astype(dtype)
                    return (p if slope is None else p * slope).astype(dtype), kept

                p, kept = pl.run_scoped(weigh, plgpu.ACC(shape, jnp.float32))
                self._release("q", step)
                memory["p"][...] = p
                ptx.pass_turn(_WEIGHTS)
                plgpu.barrier_wait(memory["do_full"].at[stage_do])
                plgpu.wgmma(acc, kept, memory["do"].at[stage_do])
                _meet()  # the derivatives of the scores are there

                def multiply(dq_acc):
                    multiply_derivatives(step, dq_acc)
                    plgpu.wgmma_wait(1)
                    self._release("do", step)
                    return plgpu.wgmma_accumulator_load(dq_acc, wait_n=0)

                dq = pl.run_scoped(multiply, plgpu.ACC((ROWS, problem.part_size), jnp.float32))
                self._add(role, place.b, head, block, step, dq)

            def step_of_keys(banded, head, block, step):
                del banded
                stage, stage_do = self._stage(step)

                def multiply_values(dp_acc):
                    plgpu.barrier_wait(memory["do_full"].at[stage_do])
                    plgpu.wgmma(dp_acc, memory["v"].at[_zero(step, 1)], memory["do"].at[stage_do].T)
                    plgpu.barrier_wait(memory["delta_full"].at[stage_do])
                    delta = plgpu.load(memory["do_delta"].at[stage_do], layout=_COL_LAYOUT)
                    kept = scores.kept(head, block)
                    dp = plgpu.wgmma_accumulator_load(dp_acc, wait_n=0)
                    return scores.less_delta(dp, delta, kept)

                dp = pl.run_scoped(multiply_values, plgpu.ACC(shape, jnp.float32))
                self._release("do", step)
                ptx.take_turn(_WEIGHTS)
                if problem.passes_both:
                    p = plgpu.load(memory["p_of_bias"], layout=_LAYOUT)
                    scores.add_to_bias(p.astype(jnp.float32) * dp, head, block)
                p = plgpu.load(memory["p"], layout=_LAYOUT)
                ds = p.astype(jnp.float32) * dp
                if not problem.passes_both:
                    scores.add_to_bias(ds, head, block)
                ds = ds.astype(dtype)
                slot = memory["ds"].at[lax.rem(step, jnp.int32(_SLOTS))]
                self._share(slot, 0, ds)

                def multiply(dq_acc):
                    multiply_derivatives(step, dq_acc)
                    plgpu.barrier_wait(memory["q_full"].at[stage])
                    plgpu.wgmma(acc, ds, memory["q"].at[stage])
                    return plgpu.wgmma_accumulator_load(dq_acc, wait_n=1)

                dq = pl.run_scoped(multiply, plgpu.ACC((ROWS, problem.part_size), jnp.float32))
                self._add(role, place.b, head, block, step, dq)
                plgpu.wgmma_wait(0)
                self._release("q", step)

            total = self._each_step(place, scores, steps, (step_of_values, step_of_keys)[role])
            sum = acc[...]
            _meet()  # all keys and values have been read
            if role == 0:
                memory["v"][0] = (scores.of_kept * sum).astype(dtype)
            else:
                for i in range(problem.parts[1]):
                    memory["k"][0, i] = (problem.scale * self._columns(sum, i)).astype(dtype)
            plgpu.commit_smem()
            self._copy_out(("dv", "dk")[role], place, 0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(memory["kv_empty"])
            return total

        plgpu.barrier_wait(memory["k_full"])
        plgpu.barrier_wait(memory["v_full"])
        return steps + pl.run_scoped(sum_of, plgpu.ACC((ROWS, problem.size), jnp.float32))

    def _each_step(self, place, scores, steps, work):
        """Does `work(banded, head, block, step)` for all steps of a tile; gives how many they are."""
        problem = self.problem

        def of_head(i, _):
            head = place.head * problem.heads + i
            last = steps + (i + 1) * place.count - 1

            for banded, start, stop in reversed(scores.spans(place)):

                def step(i, _, banded=banded, stop=stop):
                    block = stop - 1 - i
                    work(banded, head, block, last - (block - place.low))

                lax.fori_loop(0, stop - start, step, None)

        if problem.heads == 1:
            of_head(0, None)
        else:
            lax.fori_loop(0, problem.heads, of_head, None)
        return problem.heads * place.count

    def _multiply_keys(self, s_acc, half, q):
        """Multiplies keys and queries."""
        width = self.problem.part_size
        for part in range(self.problem.parts[1]):
            plgpu.wgmma(s_acc, self.memory["k"].at[half, part], q.at[:, part * width : (part + 1) * width].T)

    def _release(self, letters, step):
        stage = self._stage(step)[letters == "do"]
        plgpu.barrier_arrive(self.memory[f"{letters}_empty"].at[stage])

    def _columns(self, array, part):
        width = self.problem.part_size
        return array[:, part * width : (part + 1) * width]

    def _share(self, slot, half, ds):
        """Stores the derivatives of scores for both warpgroups, and meets the other one.

        A slot is written again two steps later: after the next meeting, before which both have waited for their products.
        """
        for slab in range(self.config.block_q // ROWS):
            slot[half, slab] = ds[:, slab * ROWS : (slab + 1) * ROWS]
        _meet()

    def _await_staged(self):
        """Waits until what was staged has left shared memory."""
        if self.problem.deterministic:
            plgpu.barrier_wait(self.memory["sums_empty"])
        else:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _part(self, warpgroup):
        """Which rows of 64 and which columns of a block of dQ a warpgroup makes."""
        return (warpgroup, 0) if self.problem.parts[0] > 1 else (0, warpgroup)

    def _add(self, warpgroup, b, head, block, step, dq, *, is_empty=False):
        """Adds a warpgroup's part of dQ to global memory, or gives it to the warps that do in the order of turns.

        `is_empty` says that what was staged before is known to have left.
        """
        width = self.problem.part_size // self.config.pieces
        for piece in range(self.config.pieces):
            if piece or not is_empty:
                self._await_staged()
            self.memory["sums"][warpgroup] = dq[:, piece * width : (piece + 1) * width]
            plgpu.commit_smem()
            if self.problem.deterministic:
                plgpu.barrier_arrive(self.memory["sums_full"].at[lax.rem(step, jnp.int32(_ADDERS))])
            else:
                self._add_staged(warpgroup, b, head, block, piece)

    def _add_staged(self, warpgroup, b, head, block, piece):
        staged, (slab, part) = self.memory["sums"].at[warpgroup], self._part(warpgroup)
        width = staged.shape[1]
        rows = pl.ds(block * self.config.block_q + slab * ROWS, ROWS)
        cols = pl.ds(part * self.problem.part_size + piece * width, width)
        plgpu.copy_smem_to_gmem(staged, self.refs["dq"].at[b, rows, head, cols], reduction_op="add")

    def _copy_out(self, name, place, half):
        """Copies dV or dK, which are where values or keys were, to global memory."""
        rows = pl.ds(place.block * self.config.block_kv + half * ROWS, ROWS)
        if name == "dv":
            plgpu.copy_smem_to_gmem(self.memory["v"].at[half], self.refs["dv"].at[place.b, rows, place.head])
            return
        width = self.problem.part_size
        for part in range(self.problem.parts[1]):
            target = self.refs["dk"].at[place.b, rows, place.head, pl.ds(part * width, width)]
            plgpu.copy_smem_to_gmem(self.memory["k"].at[half, part], target)

    # The warps that add, if deterministic.

    def add(self, own, place, steps):
        """Adds dQ of every `_ADDERS`-th step to global memory, each when it is the block of keys' turn; gives the steps."""
        problem, total = self.problem, self.problem.heads * place.count
        first = lax.rem(own + (_ADDERS - 1) * steps, jnp.int32(_ADDERS))

        @pl.loop(0, lax.div(total - first + _ADDERS - 1, jnp.int32(_ADDERS)))
        def _(i):
            i = first + i * _ADDERS
            head, block = self._head(place, i), self._block(place, i)
            turn = (place.b * problem.query[1] + head) * problem.blocks_q + block
            if "before" in self.refs:
                before = self.refs["before"][place.b, place.block, block]
            else:
                before = place.block - problem.first_key_block(block, _divide, jnp.maximum)
            ptx.await_count(self.refs["turns"], turn, before)
            for piece in range(self.config.pieces):
                plgpu.barrier_wait(self.memory["sums_full"].at[own])
                for warpgroup in range(WARPGROUPS):
                    self._add_staged(warpgroup, place.b, head, block, piece)
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.barrier_arrive(self.memory["sums_empty"])
            plgpu.wait_smem_to_gmem(0)
            ptx.add_one(self.refs["turns"], turn)

        return steps + total


class _Scores:
    """How products of 64 keys from `first` on, which are rows, and queries become weights, and those of values derivatives."""

    def __init__(self, tile, place, first, *, weighs=True):
        self.problem, self.operands, self.sizes, self.refs = tile.problem, tile.operands, tile.sizes, tile.refs
        self.b, self.lengths, self.first = place.b, place.lengths, first
        self.shape = ROWS, tile.config.block_q
        left, right = self.problem.window
        lengths = self._has("query_lengths", "key_lengths")
        self.is_limited = left is not None or right is not None or self.problem.is_ragged or lengths
        self.is_banded = self.is_limited or self._has("query_segments")
        self.seeded = self.problem.is_seeded(self.operands)
        self.segments: Any = None
        if self._has("key_segments") and weighs:
            ref, index = self.operands["key_segments"]
            keys = self.problem.key[0]
            self.segments = products.load_product_rows(ref, index(self.b) * keys + first, keys - first, self.shape)

    def _has(self, *names):
        return any(name in self.operands for name in names)

    @property
    def of_kept(self) -> float:
        """What weights that dropout keeps are multiplied with."""
        return 1 / (1 - self.problem.dropout_rate) if self._has("seeds") else 1.0

    def spans(self, place):
        """The blocks of queries of a tile as spans, which are banded or not."""
        low, end = place.low, place.low + place.count
        if not self.is_banded:
            return [(False, low, end)]
        return [(True, low, place.whole_from), (False, place.whole_from, place.whole_to), (True, place.whole_to, end)]

    def load(self, head, block, *, banded):
        """What global memory has on a block of queries: while products are made, as loads take long."""
        loaded = {name: self._tile_of(name, head, block) for name in ("bias", "mask") if self._has(name)}
        if self._has("query_segments") and banded:
            ref, index = self.operands["query_segments"]
            queries, start = self.problem.query[0], block * self.shape[1]
            loaded["segments"] = products.load_product_cols(ref, index(self.b) * queries + start, queries - start, self.shape)
        return loaded

    def weights(self, s, lse, loaded, block, *, banded):
        """The weights of a block of queries, and the derivative of the soft cap, if there is one."""
        slope, factor = None, self.problem.scale
        if self.problem.soft_cap is not None:
            s = common.tanh(s * (self.problem.scale / self.problem.soft_cap))
            slope, factor = 1 - s * s, self.problem.soft_cap
        if "bias" in loaded:
            bias = loaded["bias"].astype(jnp.float32)
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s * factor + bias)  # s may be NaN
        if "mask" in loaded:
            s = jnp.where(loaded["mask"] != 0, s, -jnp.inf)
        if "segments" in loaded:
            same = lax.broadcast_in_dim(self.segments, s.shape, (0,)) == _along_rows(loaded["segments"], s.shape)
            s = jnp.where(same, s, -jnp.inf)
        if banded and self.is_limited:
            s = products.band(s, *self._limits(block * self.shape[1]))
        if "bias" in loaded:  # they may be as large as `finfo.min`
            return jnp.exp2((s - _along_rows(lse, s.shape)) * _LOG2E), slope
        s = s * (factor * _LOG2E)
        return jnp.exp2(s if self.seeded else s - _along_rows(lse, s.shape)), slope

    def kept(self, head, block):
        """Which weights dropout keeps, or None for all."""
        if not self._has("seeds"):
            return None
        ref, index = self.operands["seeds"]
        starts = jnp.uint32(self.first), jnp.uint32(block * self.shape[1])
        col, row = (
            start + plgpu.broadcasted_iota(jnp.uint32, self.shape, axis, layout=_LAYOUT) for axis, start in enumerate(starts)
        )
        first, second = (jnp.broadcast_to(ref[index(self.b), head, i], self.shape) for i in range(2))
        return dropout.keep(first, second, row, col, self.problem.dropout_rate)

    def less_delta(self, dp, delta, kept):
        """The derivatives of weights, those that are kept, less `delta`."""
        if kept is not None:
            dp = _only(kept, dp * self.of_kept)
        return dp if delta is None else dp - _along_rows(delta, dp.shape)

    def derivatives(self, p, slope, dp, delta, kept, head, block):
        """The derivatives of the products of keys and queries."""
        ds = p * self.less_delta(dp, delta, kept)
        self.add_to_bias(ds, head, block)
        return ds if slope is None else ds * slope

    def add_to_bias(self, ds, head, block):
        if self.problem.biased:
            varies = self.sizes["bias"][1] > 1, self.operands["bias"][0].shape[1] > 1
            products.add_transposed(self.refs["dbias"], *self._at("bias", head, block), ds, varies=varies)

    def _limits(self, start):
        """The first and the last column that each row sees, where columns are queries from `start` on."""
        (left, right), (queries, keys) = self.problem.window, self.lengths
        position = self.first + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_ROW_LAYOUT)
        low = None if right is None else position - (right + start)
        most = queries - start if self._has("query_lengths") else self.shape[1]
        high = plgpu.layout_cast(jnp.broadcast_to(jnp.int32(most - 1), (ROWS,)), _ROW_LAYOUT)
        if left is not None:
            high = jnp.minimum(high, position + (left - start))
        if self.problem.is_ragged or self._has("key_lengths"):
            high = jnp.where(position < keys, high, -1)
        return low, high

    def _at(self, name, head, block):
        """Where the elements of a bias or mask are that belong to a block of queries: row, column, and how many there are."""
        ref, index = self.operands[name]
        heads, rows = self.sizes[name]
        start = block * self.shape[1]
        row = (index(self.b) * heads + (head if heads > 1 else 0)) * rows + (start if rows > 1 else 0)
        col = self.first if ref.shape[1] > 1 else 0
        return row, col, (self.problem.query[0] - start, self.problem.key[0] - self.first)

    def _tile_of(self, name, head, block):
        ref, _ = self.operands[name]
        varies = self.sizes[name][1] > 1, ref.shape[1] > 1
        return products.load_transposed(ref, *self._at(name, head, block), self.shape, varies=varies)


def _divide(a, b):
    return lax.div(jnp.int32(a), jnp.int32(b))


def _zero(step, use):
    """0, though the compiler cannot know, nor that it is that of another use: else it keeps addresses in registers."""
    return lax.shift_right_arithmetic(step, jnp.int32(31 - use))


def _meet():
    """Waits for the other warpgroup that computes; what both wrote to shared memory is then visible to products."""
    ptx.meet(_BOTH, WARPGROUPS)


def _only(kept, array):
    return array if kept is None else jnp.where(kept, array, 0.0)


def _along_rows(line, shape):
    """A value for each column, in all rows."""
    return lax.broadcast_in_dim(line, shape, (1,))
