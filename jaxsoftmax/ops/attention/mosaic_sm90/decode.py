"""Attention on Hopper where queries are few, as in decoding: the time of reading keys and values once is the limit.

The rows of all query heads that share keys are folded: the forward kernel has up to 192 of them in a tile, and reads these keys
once for each tile. Where tiles do not fill the multiprocessors, keys are split too. Each split has a state `(m, d, o)` of its
own, in float32, and XLA merges them in one fusion with what comes behind. The number of splits follows from shapes. A tile
divides the key blocks that it sees evenly: a cache of 32768 keys with 4096 in use is read by the number of multiprocessors that
reads a full one. What a sequence's own queries see decides where its splits begin, so its bits do not depend on the other
sequences of its batch. A split without a key block that a row sees is neither read nor computed.

Keys and values may be in pages, and of 8 bits (`forward_formats`). Functions of scores get a head and a query for each row.

Reads K and V once, and writes and reads `8 * Hv` bytes for each split of a row.
Source: Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference"; Milakov and Gimelshein 2018,
arXiv:1805.02867, section 3.1.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import schedule
from jaxsoftmax.ops.attention.mosaic_sm90 import forward
from jaxsoftmax.ops.attention.mosaic_sm90.common import LOG2E, ROWS, lse_of_large
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import (
    FACTS,
    WIDEST,
    FoldedRows,
    ForwardConfig,
    ForwardGeometry,
    Pages,
    forward_config,
    halves,
    sizes_on_chip,
    with_tables,
)
from jaxsoftmax.ops.attention.mosaic_sm90.functions import factor_of_changed
from jaxsoftmax.ops.attention.operands import batch_of

PAGE_SIZES = (8, 16, 32, 64, 128, 256)  # keys of a page that is read where it is: it fits a key block, or a block fits it
REGISTERS_WITH_PAGES = {1: (72, 232), 2: (56, 224), 3: (56, 152)}  # by consumers: producers hold the numbers of pages
MAX_SPLITS = 64  # the program that merges them grows with their number
_MERGE_COST = 2.0  # of another program, in key blocks
_FILLED = 0.75  # share of its key blocks that a tile has, about, where only operands say it


@dataclass(frozen=True)
class DecodePlan(forward.ForwardPlan):
    """Attention of few queries by the forward kernel: rows are folded before it, and the states of splits merged behind it."""

    def attend(self, operands: Mapping[str, jax.Array]) -> list[jax.Array]:
        geometry = self.geometry
        (length, heads), dtype, rows = operands["query"].shape[-3:-1], operands["query"].dtype, geometry.rows
        batch, splits, (n_rows, key_heads, _), value_size = geometry.batch, geometry.splits, geometry.query, geometry.value_size
        group = heads // key_heads
        folded = _folded(operands, length, key_heads, group, is_strided=rows.box is not None)
        if geometry.bytes_dtype is not None:
            folded = _as_bits(folded)
        # Tickets for tiles that are all alike need no order: a constant that XLA would make in a program of its own.
        is_ordered = not (geometry.by_ticket and len(set(geometry.costs())) == 1)
        out, *numbers = forward.launch(geometry, folded, self.is_partial, is_ordered=is_ordered)
        if splits > 1:
            m, d = (array.reshape(-1, splits, n_rows) for array in numbers)
            out, lse = _merged(
                m,
                d,
                out.reshape(-1, splits, n_rows, value_size),
                geometry.unit / LOG2E,
                jnp.float32 if self.is_partial else dtype,
            )
            lse = lse_of_large(lse) if geometry.has_large_powers else lse
        else:
            (lse,) = numbers
        if splits > 1 or self.is_partial or rows.box is None:
            out = jnp.swapaxes(out.reshape(*batch, key_heads, length, group, value_size), -3, -4)
        lse = jnp.swapaxes(lse.reshape(*batch, key_heads, length, group), -1, -2)
        return [out.reshape(*batch, length, heads, value_size), lse.reshape(*batch, heads, length)]


def serves(query: tuple[int, ...]) -> bool:
    """Tells from the shape of the query whether queries are few: at most the rows of a consumer warpgroup."""
    return query[-3] <= ROWS


def serves_as_stored(query, key, value) -> bool:
    """Tells whether keys and values are read as they are, of 8 bits too. TMA copies rows of a multiple of 16 bytes."""
    is_wide = key.dtype == value.dtype == query.dtype
    is_aligned = all(a.shape[-1] * a.dtype.itemsize % 16 == 0 for a in (key, value))
    has_room = query.dtype != jnp.float32 and max(key.shape[-1], value.shape[-1]) <= WIDEST  # for bytes
    return serves(query.shape) and is_aligned and (is_wide or has_room)


def serves_pages(types: Mapping[str, Any]) -> bool:
    """Tells whether pages are read where they are."""
    query, key, value = (types[name] for name in ("query", "key_pages", "value_pages"))
    return serves_as_stored(query, key, value) and key.shape[-3] in PAGE_SIZES and query.dtype != jnp.float32


def decode_config(head_size: int, value_size: int, dtype, rows: int, window, is_bytes=False) -> ForwardConfig:
    """Returns the configuration for a number of rows.

    For 64 rows about 128 KiB of keys and values are under way: two stages of 128 keys, with heads of 128, are as fast as three,
    or six of 64.
    """
    if is_bytes:
        sizes = sizes_on_chip(head_size, value_size)
        block, copied = (128, 4 if max(sizes) <= 64 else 2) if max(sizes) <= 128 else (64, 2 if sum(sizes) <= 384 else 1)
        own_output = sizes[0] != sizes[1]  # else it is where the queries were
        return ForwardConfig(1, block, 2, own_output, (88, 240), ping_pong=False, byte_stages=copied)
    if rows > ROWS:
        config = forward_config(head_size, value_size, window, dtype)
        return replace(config, consumers=min(config.consumers, -(-rows // ROWS)))
    largest = max(sizes_on_chip(head_size, value_size))
    if jnp.dtype(dtype) == jnp.float32:
        stages = 4 if largest <= 64 else 2
        return ForwardConfig(1, 64, stages, registers=(96, 240), ping_pong=False, has_terms=True, producers=2)
    if head_size > WIDEST:  # the output is where the queries were
        return ForwardConfig(1, 64, 1, own_output=False, ping_pong=False)
    if largest <= 128:
        return ForwardConfig(1, 128, 3 if largest <= 64 else 2, ping_pong=False)
    return ForwardConfig(1, 64, 3 if largest <= 192 else 2, ping_pong=False)


def shape_decoding(types: Mapping[str, Any], target: Target, **options: Any) -> ForwardGeometry:
    """Shapes the kernel for operands of these types, by name; `options` are those of `AttentionProblem`."""
    query, has_pages = types["query"], "page_table" in types
    (length, heads, size), batch = query.shape[-3:], batch_of(types)
    key, value = (types[f"{name}_pages" if has_pages else name] for name in ("key", "value"))
    keys, key_heads, _ = key.shape[-3:]
    value_size, n_rows = value.shape[-1], length * heads // key_heads
    bytes_dtype = key.dtype.name if key.dtype.itemsize == 1 else None
    config = decode_config(size, value_size, query.dtype, n_rows, options["window"], bytes_dtype is not None)
    pages = None
    if has_pages:
        pages = Pages(keys, key.shape[-4])
        keys *= types["page_table"].shape[-1]
        if bytes_dtype is None:
            config = replace(config, registers=REGISTERS_WITH_PAGES[config.consumers])
    group = heads // key_heads
    is_strided = length > 1 and ROWS % group == 0 and query.dtype != jnp.float32  # one query needs no strides
    has_reach = "mask" in types and (key_heads == 1 or types["mask"].shape[-3] == 1)  # the heads that share keys are folded
    names = with_tables(types, has_reach, options.get("mask_mod") is not None)
    n_tiles = math.prod(batch) * key_heads * halves(value_size) * -(-n_rows // (ROWS * config.consumers))
    splits = splits_for(n_tiles, -(-keys // config.block_kv), target.multiprocessors, bool(set(FACTS) & names))
    shapes: dict[str, Any] = {"batch": batch, "query": (n_rows, key_heads, size), "key": (keys, key_heads, size)}
    shapes |= {"value_size": value_size, "dtype": query.dtype, "names": names, "multiprocessors": target.multiprocessors}
    shapes |= {"changed_factor": factor_of_changed({**types, "key": key}, **options)}  # it does not depend on lengths
    rows = FoldedRows(group, group if is_strided else None)
    return ForwardGeometry(**shapes, **options, config=config, rows=rows, splits=splits, pages=pages, bytes_dtype=bytes_dtype)


def splits_for(tiles_unsplit: int, blocks_kv: int, multiprocessors: int, is_ragged: bool) -> int:
    """Returns the number of splits of the keys that should be fastest.

    It minimizes a model of the time among all numbers that give each split the same number of key blocks.

    Args:
      tiles_unsplit: number of tiles without splits.
      blocks_kv: key blocks of a tile.
      multiprocessors: blocks of threads that run at a time.
      is_ragged: True if tiles have different numbers of key blocks, each up to `blocks_kv`, that only operands say.
    """

    def cost(splits):
        size = -(-blocks_kv // splits)
        tile, merge = size + schedule.TILE_COST, (_MERGE_COST if splits > 1 else 0)
        if is_ragged and tiles_unsplit * splits > multiprocessors:  # some come later; at the end all wait for one of them
            return _FILLED * tiles_unsplit * splits / multiprocessors * tile + size + merge
        return -(-tiles_unsplit * splits // multiprocessors) * tile + merge

    sizes = {-(-blocks_kv // splits) for splits in range(1, min(blocks_kv, MAX_SPLITS) + 1)}
    return min(sorted(-(-blocks_kv // size) for size in sizes), key=cost)


def _folded(operands, length, key_heads, group, is_strided):
    """Folds operands: their rows are those of all query heads that share keys, query by query and in it head by head."""
    folded, rows = dict(operands), length * group
    if not is_strided:
        *batch, _, _, size = operands["query"].shape
        query = jnp.swapaxes(operands["query"].reshape(*batch, length, key_heads, group, size), -3, -4)
        folded["query"] = query.reshape(*batch, key_heads, rows, size)
    for name in ("bias", "mask"):
        if name in operands and operands[name].shape[-3:-1] != (1, 1):
            *batch, heads, queries, keys = operands[name].shape
            shape = (key_heads, group) if heads > 1 else (1, 1)
            array = jnp.swapaxes(operands[name].reshape(*batch, *shape, queries, keys), -2, -3)
            array = jnp.broadcast_to(array, (*batch, shape[0], length, group, keys))
            folded[name] = array.reshape(*batch, shape[0], rows, keys)
    if "query_segments" in operands:
        folded["query_segments"] = jnp.repeat(operands["query_segments"], group, -1)
    if "sinks" in operands:
        *batch, _ = operands["sinks"].shape
        sinks = operands["sinks"].astype(jnp.float32).reshape(*batch, key_heads, 1, group)
        folded["sinks"] = jnp.broadcast_to(sinks, (*batch, key_heads, length, group)).reshape(*batch, key_heads * rows)
    return folded


def _as_bits(operands):
    """Returns operands with keys and values as int8, and scales of pages as int32, of the same bits."""
    kinds = {"": jnp.int8, "_pages": jnp.int8, "_page_scale": jnp.int32}
    names = {f"{name}{rest}": kind for name in ("key", "value") for rest, kind in kinds.items()}
    return {name: lax.bitcast_convert_type(a, names[name]) if name in names else a for name, a in operands.items()}


def _merged(m, d, o, scale: float, dtype):
    """Merges the states of splits, `[tiles, splits, rows]` with `m` in units of `scale`, to output and log-sum-exp."""
    unit, states = jnp.float32(scale), []
    for i in range(m.shape[1]):  # one by one: what is done to all of them XLA does in a program of its own
        states.append(online.State(m[:, i] * unit, d[:, i], jnp.where(d[:, i, :, None] == 0, 0, o[:, i])))
    while len(states) > 1:  # in pairs: the largest `m` of many, which all need, would be a program of its own, too
        states = [functools.reduce(online.merge, pair) for pair in itertools.batched(states, 2)]
    state = online.finish(states[0])
    return jnp.asarray(state.o, dtype), state.m
