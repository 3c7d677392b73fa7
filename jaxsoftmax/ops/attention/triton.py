"""Attention for NVIDIA GPUs since Ampere, in Triton; `_triton/attention.py` has the kernels, and says how they work.

They were run on an H200. For other generations they are compiled, and what they compute is tested in Triton's interpreter.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.row_problem import indexed
from jaxsoftmax._triton import availability, custom_call
from jaxsoftmax.ops.attention import dropout
from jaxsoftmax.ops.attention import key_blocks as blocks
from jaxsoftmax.ops.attention.operands import (
    AXES,
    OPERANDS,
    batch_of,
    cotangents_of_rows,
    cotangents_of_sinks,
    dequantised,
    merged,
    paged,
    types_without_pages,
    without_pages,
)
from jaxsoftmax.ops.attention.xla import summed_to

MAX_HEAD_SIZE = {"float16": 512, "bfloat16": 512, "float32": 128}
MAX_HEAD_SIZE_BACKWARD = {"float16": 256, "bfloat16": 256, "float32": 128}
DTYPES = tuple(MAX_HEAD_SIZE)
_LOG2E = math.log2(math.e)


# What is served.


def unsupported(primitive, target, operands, *, precision, deterministic_gradients, wanted=(), **params) -> str | None:
    """Why it cannot run, in words, or None."""
    del params
    if (reason := availability.missing()) is not None:
        return reason
    given = _given(types_without_pages(operands) if primitive == "paged_attention" else operands)
    is_forward = primitive != "dot_product_attention_vjp"
    reason = _of_types(given, precision, MAX_HEAD_SIZE if is_forward else MAX_HEAD_SIZE_BACKWARD) or _of_shapes(given)
    if reason is None and "bias" in wanted and deterministic_gradients and not _is_whole(given):
        return f"the derivative of a bias that is broadcast, of shape {given['bias'].shape}, is summed in any order"
    return reason


def _given(named):
    """The operands that are there."""
    return {operand.name: named[operand.name] for operand in OPERANDS if named.get(operand.name) is not None}


def _of_types(given, precision, most):
    """Says why dtypes, or the head sizes that they allow, are not served."""
    dtype = given["query"].dtype
    if dtype.name not in DTYPES:
        return f"dtypes must be among {', '.join(DTYPES)}, got {dtype.name}"
    if dtype == jnp.float32 and precision == "highest":
        return "float32 products are sums of three of TF32, and precision asks for more"
    for name, operand in (("head", "query"), ("value", "value")):
        size = given[operand].shape[-1]
        if size > most[dtype.name]:
            return f"{name} size must be at most {most[dtype.name]}, got {size} in {dtype.name}"
    for name in ("bias", "sinks"):
        if name in given and given[name].dtype.name not in DTYPES:
            return f"{name} must be of dtype {', '.join(DTYPES)}, got {given[name].dtype.name}"
    return None


def _of_shapes(given):
    """Why there are too many, or too few, queries and keys."""
    batch, query, key = batch_of(given), given["query"].shape, given["key"].shape
    if not all((*batch, query[-3], key[-3])):
        return f"there must be queries and keys, got shapes {query} and {key} in a batch of {batch}"
    programs = math.prod(batch) * max(query[-2] * query[-3], key[-2] * key[-3])
    if max(query[-3], key[-3]) >= 2**30 or programs >= 2**31 - 2**16:
        return f"there must be less than {2**31 - 2**16} rows of scores, and keys, got shapes {query} and {key}"
    return None


def _is_whole(given) -> bool:
    """Returns True where each score has a bias of its own."""
    (*_, length, heads, _), keys = given["query"].shape, given["key"].shape[-3]
    return given["bias"].shape == (*batch_of(given), heads, length, keys)


def unprofitable(primitive, target, operands, fused, cast, **params) -> str | None:
    """Why the reference should be faster although the kernels could run, in words, or None."""
    del primitive, fused, cast, params
    query, key = operands["query"], operands.get("key") or operands["key_pages"]
    if query.dtype == jnp.float32 and query.shape[-3] <= query.shape[-2] // key.shape[-2]:
        return "XLA reads float32 keys once for all query heads that share them, and there are few queries"
    return availability.unless_forced(target)


remark = availability.remark


# How work is spread over programs.


@dataclass(frozen=True)
class Config:
    """The tiles of a program, and its threads.

    Attributes:
      block_q: queries of a tile, a power of two.
      block_kv: keys of a tile, a power of two.
      warps: of 32 threads.
      stages: tiles of what passes by that are in shared memory at once.
    """

    block_q: int
    block_kv: int
    warps: int
    stages: int


# By kernel and bytes of an element, for each head size of a tile: where tensor cores read shared memory (Hopper, and Blackwell
# for servers), and where they read registers, which then have to hold more. ptxas says that these spill little or nothing.
_CONFIGS = {
    ("forward", 2): {
        64: (Config(64, 64, 4, 3), Config(128, 64, 4, 3)),
        128: (Config(64, 64, 4, 3), Config(128, 64, 8, 3)),
        256: (Config(128, 64, 8, 2), Config(64, 32, 4, 2)),
        512: (Config(32, 32, 8, 1), Config(32, 32, 8, 1)),
    },
    ("forward", 4): {
        64: (Config(64, 32, 4, 2), Config(64, 32, 4, 2)),
        128: (Config(32, 32, 4, 2), Config(32, 32, 4, 2)),
    },
    ("backward_keys", 2): {
        64: (Config(64, 64, 4, 3), Config(64, 64, 4, 2)),
        128: (Config(64, 64, 4, 2), Config(64, 64, 8, 2)),
        256: (Config(32, 64, 8, 2), Config(32, 64, 8, 1)),
    },
    ("backward_keys", 4): {
        64: (Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
        128: (Config(32, 16, 8, 1), Config(32, 16, 8, 1)),
    },
    ("backward_queries", 2): {
        64: (Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
        128: (Config(64, 64, 4, 2), Config(64, 64, 4, 2)),
        256: (Config(64, 32, 8, 2), Config(64, 32, 8, 1)),
    },
    ("backward_queries", 4): {
        64: (Config(32, 32, 4, 1), Config(32, 32, 4, 1)),
        128: (Config(32, 16, 8, 1), Config(32, 16, 8, 1)),
    },
}
_LEAST = 16  # keys of a tile that tensor cores take
_READ_SHARED_MEMORY = (9, 10)  # major compute capabilities of the former


def config_for(kernel: str, itemsize: int, widths: tuple[int, int], target, of_scores: int = 0) -> Config:
    """The configuration of a kernel for tiles of these head sizes: of fewer stages or keys where memory is short.

    A bias and a mask, `of_scores` bytes for each score, have tiles too, in shared memory and registers: others shrink then.
    """
    table = _CONFIGS[kernel, itemsize]
    from_shared, from_registers = table[min(size for size in table if size >= max(widths))]
    config = from_shared if target.compute_capability[0] in _READ_SHARED_MEMORY else from_registers
    if of_scores:
        most = (64, 32) if kernel != "backward_keys" else (32, 64)
        config = replace(config, block_q=min(config.block_q, most[0]), block_kv=min(config.block_kv, most[1]))
    while shared_bytes(kernel, config, itemsize, widths, of_scores) > target.shared_memory:
        if config.stages > 1:
            config = replace(config, stages=config.stages - 1)
        elif config.block_kv > _LEAST:
            config = replace(config, block_kv=config.block_kv // 2)
        else:
            raise AssertionError(f"no configuration of {kernel} for head sizes {widths} fits {target}")
    return config


def shared_bytes(kernel: str, config: Config, itemsize: int, widths: tuple[int, int], of_scores: int = 0) -> int:
    """About how much shared memory a program needs: its own tiles, those that pass by, and some that change their layout."""
    own, other, both = config.block_q, config.block_kv, sum(widths)
    own_bytes, extra = itemsize * both * own, 3 if itemsize == 4 else 0
    if kernel == "forward":
        own_bytes, extra = itemsize * widths[0] * own, 0
    elif kernel == "backward_keys":
        own, other, own_bytes, extra = other, own, itemsize * both * other, max(extra, 1)
    passing = config.stages * other * (itemsize * both + own * of_scores)
    return own_bytes + passing + itemsize * extra * max(widths) * other


@dataclass(frozen=True)
class Call:
    """The static parameters of a call of a kernel.

    Attributes:
      kernel: its name.
      queries, keys: the lengths.
      groups: query heads that share a key head.
      size, value_size: of heads; in tiles `width` and `value_width`.
      block_q, block_kv: queries and keys of a tile.
      by_keys: whether a program has a block of keys, of which there are `blocks`, of `own_block` rows; else of queries.
      other_block: rows of a tile that passes by.
      pairs: batch entries times heads, of which each entry has `own_heads`.
      together: of how many of them blocks run at the same time; with `last_first` from the last block on.
      left, right: the window.
      before, after: the window as rows of a program see it.
      scale, soft_cap: those of the scores.
      query_scale: what the derivative of queries is multiplied with.
      factor: of what the tensor cores or the soft cap give, where `unit` is not 1.
      scale_log2, headroom, unit: as `online.push_log2` takes them.
      dropped: how many weights of 2^32 dropout drops, or None; `kept` is what it multiplies the others with.
      some_whole: whether there may be blocks that all rows see whole.
      some_masked: whether there may be others.
      own_vary: whether an operand says how many rows of their own side there are.
      hides: whether an operand may hide keys between others that are seen.
      bias_is_whole: whether each score has a bias of its own.
      dims: names of operands and results, and for each of their four axes what `addresses.offset` takes.
    """

    kernel: str
    queries: int
    keys: int
    groups: int
    size: int
    value_size: int
    width: int
    value_width: int
    block_q: int
    block_kv: int
    by_keys: bool
    blocks: int
    own_block: int
    other_block: int
    pairs: int
    own_heads: int
    together: int
    last_first: bool
    left: int | None
    right: int | None
    before: int | None
    after: int | None
    scale: float
    query_scale: float
    soft_cap: float | None
    factor: float
    scale_log2: float
    headroom: float
    unit: float
    dropped: int | None
    kept: float
    some_whole: bool
    some_masked: bool
    own_vary: bool
    hides: bool
    bias_is_whole: bool
    dims: tuple[tuple[str, Any], ...]


def dims(name: str, shape, batch: tuple[int, ...], sizes: dict[str, int]) -> tuple[tuple[int, ...], ...]:
    """Returns the index of an operand or result by batch entry, head, row and column: see `problem.indexed`."""
    # Spans belong to blocks: of keys there may be several where there is one query.
    axes = (AXES | {"spans": "B4", "delta": AXES["lse"]})[name]
    own = shape[len(shape) - len(axes) :]
    whole = (*batch, *(sizes.get(letter, size) for letter, size in zip(axes, own, strict=True)))
    shape = (1,) * (len(whole) - len(shape)) + tuple(shape)
    at = len(batch)
    heads = [at + i for i, letter in enumerate(axes) if letter in "NK"]
    lines = [at + i for i, letter in enumerate(axes) if letter in "BTS"]
    return tuple([indexed(shape, whole, members) for members in (range(at), heads, lines[:1], lines[1:])])


# The primitives.


def dot_product_attention(
    *, target, scale, window, soft_cap, dropout_rate, return_lse=True, is_partial=False, onto=None, **operands
):
    """Attention as in `xla.dot_product_attention`: `[out, lse]`, or `[out]`; deterministic and as precise as said anyway."""
    given = _given(dequantised(operands))
    batch, (*_, length, heads, _) = batch_of(given), given["query"].shape
    dtype = jnp.float32 if is_partial or onto is not None else given["query"].dtype
    results = {
        "out": jax.ShapeDtypeStruct((*batch, length, heads, given["value"].shape[-1]), dtype),
        "lse": jax.ShapeDtypeStruct((*batch, heads, length), jnp.float32),
    }
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "dropout_rate": dropout_rate}
    found = _run("forward", given, {"sinks": given.get("sinks")}, results, target, **options)
    if onto is not None:
        out, lse = merged(onto, found)
        found = [out if is_partial else out.astype(given["query"].dtype), lse]
    return found[: 2 if return_lse else 1]


def paged_attention(*, target, precision=None, deterministic_gradients=False, **given):
    """Attention as in `xla.paged_attention`, of keys and values that are gathered from their pages before."""
    del precision, deterministic_gradients
    operands, options = paged(given)
    return dot_product_attention(target=target, dropout_rate=0.0, **without_pages(operands), **options)


def dot_product_attention_vjp(
    *,
    target,
    wanted,
    scale,
    window,
    soft_cap,
    dropout_rate,
    out,
    lse,
    d_out=None,
    d_lse=None,
    precision=None,
    is_partial=False,
    onto=None,
    **operands,
):
    """The cotangents of attention that are `wanted`, as in `xla.dot_product_attention_vjp`."""
    del precision  # `unsupported` has looked at the precision
    given, found = _given(operands), {}
    batch = batch_of(given)
    d_out, delta = cotangents_of_rows(given, out, lse, d_out, d_lse, window)
    if "sinks" in wanted:
        found["sinks"] = cotangents_of_sinks(given["sinks"], lse, delta)
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * (_LOG2E / _unit(given, scale if soft_cap is None else soft_cap)))
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "dropout_rate": dropout_rate}
    for kernel, names in (("backward_keys", ("key", "value")), ("backward_queries", ("query", "bias"))):
        if not set(names) & set(wanted):
            continue
        results = {}
        for name in names:
            if name != "bias":
                dtype = jnp.float32 if is_partial else given[name].dtype
                results[f"d_{name}"] = jax.ShapeDtypeStruct((*batch, *given[name].shape[-3:]), dtype)
            elif name in wanted:  # one that is broadcast is added up
                dtype = given[name].dtype if _is_whole(given) else jnp.float32
                results[f"d_{name}"] = jax.ShapeDtypeStruct(given[name].shape, dtype)
        more = {"d_out": d_out, "lse": lse, "delta": delta}
        made = _run(kernel, given, more, results, target, is_partial=is_partial, **options)
        found |= dict(zip(names, made, strict=False))
    found = {name: summed_to(found[name], given[name].shape) for name in wanted}
    if onto is not None:
        found["query"] += onto
    return [found[name] if is_partial else found[name].astype(given[name].dtype) for name in wanted]


# What they have in common.

_COMMON = [operand.name for operand in OPERANDS if operand.name not in ("sinks", "key_scale", "value_scale")]
_L2 = 24 << 20  # bytes of what passes by that programs may share at a time
_HEADROOM = {"float16": 13.0, "bfloat16": 0.0, "float32": 0.0}  # see `online.push_log2`: float16 holds weights up to 2^15


def _unit(given, factor) -> float:
    """That of `online.push_log2`. Scores with a bias may be as large as `finfo.min`, and are not to be rounded with a scale."""
    return 1.0 if "bias" not in given and factor > np.finfo(np.float32).tiny else _LOG2E


def _width(size: int) -> int:
    """A head size in tiles."""
    return max(16, 1 << (size - 1).bit_length())


def _run(kernel, given, more, results, target, *, scale, window, soft_cap, dropout_rate, is_partial=False):
    """Runs a kernel: `results`, by name, of operands that all kernels take, and more."""
    from jaxsoftmax._triton import attention as kernels

    batch, by_keys = batch_of(given), kernel == "backward_keys"
    (*_, length, heads, size), (*_, keys, key_heads, _) = given["query"].shape, given["key"].shape
    dtype, value_size = given["query"].dtype, given["value"].shape[-1]
    widths = _width(size), _width(value_size)
    of_scores = sum(given[name].dtype.itemsize for name in ("bias", "mask") if name in given)
    config = config_for(kernel, dtype.itemsize, widths, target, of_scores)
    spans = blocks.spans(given, (length, keys), config.block_q, config.block_kv, by_keys=by_keys)
    (own, own_block, before), (other, other_block, after) = sides = [
        (length, config.block_q, window[0]),
        (keys, config.block_kv, window[1]),
    ]
    own_heads = heads
    if by_keys:
        (own, own_block, before), (other, other_block, after) = reversed(sides)
        own_heads = key_heads
    always_masked = "mask" in given or "bias" in given
    is_banded = window != (None, None) or other % other_block or {"query_lengths", "key_lengths", "query_segments"} & set(given)
    bytes_of_head = dtype.itemsize * other * (size + value_size) * (heads if by_keys else key_heads) // own_heads
    factor = scale if soft_cap is None else soft_cap
    unit = _unit(given, factor)
    sizes = {"N": heads, "K": key_heads, "T": length, "S": keys}
    arrays = {name: given.get(name) for name in _COMMON} | {"spans": spans} | more
    there = {name: array for name, array in (arrays | results).items() if array is not None}
    static = Call(
        kernel=kernel,
        queries=length,
        keys=keys,
        groups=heads // key_heads,
        size=size,
        value_size=value_size,
        width=widths[0],
        value_width=widths[1],
        block_q=config.block_q,
        block_kv=config.block_kv,
        by_keys=by_keys,
        blocks=-(-own // own_block),
        own_block=own_block,
        other_block=other_block,
        pairs=math.prod(batch) * own_heads,
        own_heads=own_heads,
        together=1 if window == (None, None) else max(1, min(8, _L2 // bytes_of_head)),
        last_first=after is not None,
        left=window[0],
        right=window[1],
        before=before,
        after=after,
        scale=scale,
        query_scale=1.0 if is_partial else scale,
        soft_cap=soft_cap,
        factor=factor,
        scale_log2=factor * _LOG2E if unit == 1 else 1.0,
        headroom=_HEADROOM[dtype.name],
        unit=unit,
        dropped=dropout.dropped(dropout_rate) if "seeds" in given else None,
        kept=1 / (1 - dropout_rate),
        some_whole=not always_masked,
        some_masked=always_masked or bool(is_banded),
        own_vary=("key_lengths" if by_keys else "query_lengths") in given,
        hides=always_masked or "query_segments" in given,
        bias_is_whole="bias" in given and _is_whole(given),
        dims=tuple([(name, dims(name, array.shape, batch, sizes)) for name, array in there.items()]),
    )
    absent: dict[str, Any] = {"d_bias": None} if kernel == "backward_queries" and "d_bias" not in results else {}
    return custom_call.launch(
        getattr(kernels, f"attention_{kernel}"),
        [given["query"] if array is None else array for array in arrays.values()],  # what is absent is not read
        list(results.values()),
        programs=static.pairs * static.blocks,
        warps=config.warps,
        stages=config.stages,
        zeroed=(1,) if "d_bias" in results else (),
        target=target,
        CALL=static,
        **absent,
    )
