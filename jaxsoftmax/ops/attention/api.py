"""Attention, with the signature of `jax.nn.dot_product_attention` and more."""

import math
import operator
from typing import Any, Literal, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxsoftmax._core import arguments, compat, dispatch, sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.attention import _zigzag, primitive

Window = int | tuple[int | None, int | None] | None
ContextParallel = Literal["ring", "all_gather", "all_to_all"] | None
AxisName = str | tuple[str, ...] | None

_NAME = "dot_product_attention"
DTYPES = ("float16", "bfloat16", "float32", "float64")
BYTES = ("float8_e4m3fn", "int8")  # of keys and values with a scale


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    query_offset: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    fully_masked_rows: Literal["zero", "mean"] = "zero",
    context_parallel: ContextParallel = None,
    zigzag: int | None = None,
    axis_name: AxisName = None,
    whole_queries: bool = False,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    query_offset: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    fully_masked_rows: Literal["zero", "mean"] = "zero",
    context_parallel: ContextParallel = None,
    zigzag: int | None = None,
    axis_name: AxisName = None,
    whole_queries: bool = False,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: Window = None,
    query_offset: ArrayLike | None = None,
    query_segment_ids: ArrayLike | None = None,
    key_value_segment_ids: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    dropout_rate: float = 0.0,
    dropout_rng: jax.Array | None = None,
    broadcast_dropout: bool = False,
    deterministic: bool = False,
    fully_masked_rows: Literal["zero", "mean"] = "zero",
    context_parallel: ContextParallel = None,
    zigzag: int | None = None,
    axis_name: AxisName = None,
    whole_queries: bool = False,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention, `softmax(scale * query key^T + bias) value` for each head, without the T x S matrix in memory.

    Arithmetic is float32 inside, up to `precision`, or float64 where the operands are. It may be differentiated, any number of
    times and in both modes, in `query`, `key`, `value`, `bias`, `sinks` and the scales, also through the residual. Cotangents
    of float8_e4m3fn have its few bits; int8 has none.

    A query sees the keys that `mask`, `is_causal`, the lengths, the window and the segments all leave, and that `bias` does not
    rule out with `-inf`. One that sees none gives 0, and so do its gradients; `fully_masked_rows` may say otherwise. What keys
    and values that no query sees hold has no effect; NaN too, but on `mosaic` for values, and for queries, keys and values in
    derivatives: it multiplies them with 0.

    Derivatives save the output and the log-sum-exp, named `"jaxsoftmax_attention_out"` and `"jaxsoftmax_attention_lse"`. Under
    `jax.checkpoint`, a policy that saves both names, such as `save_only_these_names` of them, keeps the forward pass from
    running twice; one that saves matrix products, such as `dots_saveable`, sees none of those in here.

    Args:
      query: `[*batch, T, N, H]`, float16, bfloat16, float32 or float64, with any number of batch axes or none.
      key: `[*batch, S, K, H]`, of the same dtype, or of 8 bits. N is a multiple of K: each key head serves N / K query heads
        that follow one another.
      value: `[*batch, S, K, Hv]`, of the dtype of key.
      bias: floating, broadcast to `[*batch, N, T, S]`, added to the scores.
      mask: boolean, broadcast to `[*batch, N, T, S]`: which keys a query sees.
      scale: a number that multiplies the products; None for `1 / sqrt(H)`. One that is traced, which may be differentiated,
        multiplies the queries instead: in float32, and then rounded to their dtype, as Flax scales queries.
      is_causal: whether a query sees no key after its own position: keys are counted from 0, queries from `query_offset`.
      query_seq_lengths: integers `[*batch]`: how many queries there are; those behind them see nothing.
      key_value_seq_lengths: integers `[*batch]`: how many keys there are.
      local_window_size: how many keys before and after its own position a query sees: `(left, right)`, either None for all, or
        one number for both.
      query_offset: integers `[*batch]`, or one for all: the position of the first query, from -2^29 to 2^29, None for 0. Where
        keys are a cache, it is how many of them came before these queries. Nothing but `is_causal` and the window counts
        positions.
      query_segment_ids: integers `[*batch, T]`: a query sees keys of its own segment only; 64 bits run on the reference.
      key_value_segment_ids: integers `[*batch, S]`; None for those of the queries, if T == S.
      logits_soft_cap: a concrete positive number: scores become `cap * tanh(score / cap)` before the bias is added.
      sinks: floating `[N]`, a score for each head of a key without a value: it is added to the denominator, as it is.
      key_scale: floating `[K]` or `[*batch, K]`, of keys of float8_e4m3fn or int8, which stand for what they are times the
        scale; None for 1. `jaxsoftmax.quantize` makes such keys. On Hopper up to 64 queries of 16 bits read them as they are.
        For other kernels, and where it is differentiated, products are made first, in memory and in the dtype of query,
        which rounds them, and in float16 makes what is beyond 65504 infinite.
      value_scale: likewise, of values.
      dropout_rate: the part of the weights that are dropped, concrete, in [0, 1); the others are divided by `1 - dropout_rate`.
      dropout_rng: a key of `jax.random`; the same key drops the same weights, whatever the implementation and the sharding.
      broadcast_dropout: whether the same weights are dropped in all heads and all of the batch, as Flax has it.
      deterministic: whether no weight is dropped and derivatives have the same bits run after run. For those with dropout, set
        `--xla_gpu_deterministic_ops` or `--xla_gpu_exclude_nondeterministic_ops` in the environment variable XLA_FLAGS, for the
        whole program. Without either, a kernel may add to derivatives in any order.
      fully_masked_rows: what a query gives that sees no key: `"zero"`; or `"mean"`, that of all S values of its head, masked
        ones too and without dropout, as `jax.nn` and Flax have it. It passes gradients to the values alone. Queries behind
        `query_seq_lengths`, and those with a sink, which they see, give 0 either way. So do all where S is 0.
      context_parallel: how devices share a sequence over which queries and keys are sharded alike: `"ring"`, keys and values go
        round while devices attend to those that are there; `"all_gather"`, each gets all keys; `"all_to_all"`, each gets the
        whole sequence for some of the heads, of which N and K must be multiples of their number. None for the one that should
        be fastest. Where queries are sharded and keys are not, or keys and not queries, there is nothing to choose. Where
        both are whole, as without a mesh or in a `jax.shard_map` without `axis_name`, anything but None raises ValueError.
        docs/scaling.md names flags of XLA that make rings faster.
      zigzag: the `n` of `jaxsoftmax.zigzag`, by which queries, keys, values and all else with an axis T or S are ordered; None
        for their own order. Positions are those of that. It gives `n` devices that share a sequence equal work in a causal
        ring; with another number of them keys are gathered.
      axis_name: inside a `jax.shard_map`, the mesh axis or axes over which the sequence is sharded, in equal parts: T and S are
        those of a shard then, but masks and biases have all keys. None outside, where arrays say how they are sharded.
      whole_queries: with `axis_name`, whether every device has all queries, and only keys and values are sharded: a step of
        decoding with a sharded cache. Each device attends to its own keys, and the states are merged.
      implementation: None for the best one for this platform, shapes and dtype; or the name of the one that must run.
        Derivatives run on the reference where it has no kernel for them at all, as for tangents and for float32; they raise
        NotImplementedError where it has one that cannot.
      precision: of the products of float32 operands, as `jax.lax.dot` takes it; None for `jax_default_matmul_precision`. They
        are those of float32 with `"highest"`, `"float32"` and algorithms of more than three bfloat16 products. Otherwise, by
        default too, `mosaic` makes three bfloat16 products of each, which err by up to 2^-15 of the sum of their absolute terms
        (TF32, as `jax.nn` has it on NVIDIA GPUs: 2^-10) and give NaN for operands that are infinite, or beyond bfloat16's
        largest number, 3.39e38. Derivatives have float32 products, of the forward pass' log-sum-exp. Weights of operands of 16
        bits, which are float32, are multiplied likewise by `xla` on an NVIDIA GPU of compute capability 8.0 or more, forward
        and backward.
      return_residual: whether to return the log-sum-exp of the scores too.

    Returns:
      `[*batch, T, N, Hv]` in the dtype of `query`; with `return_residual`, a pair of it and the natural logarithm of the sum of
      `exp(score)`, the sink's too but without dropout, `[*batch, T, N]`, float32 (float64), `-inf` where nothing is seen.

    Raises:
      TypeError: an argument is of the wrong type or dtype, or traced although it must be concrete.
      ValueError: an argument has a shape or a value that does not fit; no such `implementation` or `precision`.
      NotImplementedError: `implementation` cannot run this call; with the reason.

    Source: Dao 2023, arXiv:2307.08691, and Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    dispatch.check_implementation("attention", _NAME, implementation)
    query, key, value = _operands(query=query, key=key, value=value)
    is_causal, deterministic, return_residual, broadcast_dropout = arguments.flags(
        _NAME,
        is_causal=is_causal,
        deterministic=deterministic,
        return_residual=return_residual,
        broadcast_dropout=broadcast_dropout,
    )
    rate = arguments.number(_NAME, "dropout_rate", dropout_rate)
    if not 0 <= rate < 1:
        raise ValueError(f"{_NAME}: dropout_rate must be in [0, 1), got {rate}")
    if not isinstance(fully_masked_rows, str) or fully_masked_rows not in ("zero", "mean"):
        raise ValueError(f"{_NAME}: fully_masked_rows must be 'zero' or 'mean', got {arguments.shown(fully_masked_rows)}")
    query, scale = _scaled(_NAME, query, scale)
    batch, (length, heads), keys = query.shape[:-3], query.shape[-3:-1], key.shape[-3]
    axes, devices = _axis_name(axis_name, whole_queries)
    lengths = length * (1 if whole_queries else devices), keys * devices  # of the whole sequences
    sequence = _sequence(context_parallel, zigzag, lengths)
    if axes:
        query = sharding.varying(query, () if whole_queries else axes)
        key, value = (sharding.varying(array, axes) for array in (key, value))
    operands = {"query": query, "key": key, "value": value}
    scales = _scales(_NAME, query.dtype, key, (*batch, key.shape[-2]), key=key_scale, value=value_scale)
    operands |= {name: lax.expand_dims(scale, range(len(batch) + 1 - scale.ndim)) for name, scale in scales.items()}
    operands |= _of_scores(_NAME, bias, mask, sinks, (*batch, heads, length, lengths[1]))
    if query_seq_lengths is not None:
        operands["query_lengths"] = _lengths("query_seq_lengths", query_seq_lengths, batch)
    if key_value_seq_lengths is not None:
        operands["key_lengths"] = _lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    if query_segment_ids is not None or key_value_segment_ids is not None:
        operands |= _segments(query_segment_ids, key_value_segment_ids, batch, length, keys)
    if drops := rate > 0 and not deterministic:
        seeds = dropout_seeds(dropout_rng, batch, heads, broadcast_dropout)
        operands["seeds"] = jnp.pad(seeds, [(0, 0)] * (seeds.ndim - 1) + [(0, 2)])  # positions are counted from 0
    window = _window(local_window_size, is_causal, *lengths, query_offset is not None)
    if query_offset is not None:
        offset = _offset(query_offset, batch)
        if window != (None, None):
            operands["query_offset"] = offset
    means = fully_masked_rows == "mean" and keys != 0
    options = {
        "scale": scale,
        "window": window,
        "soft_cap": None if logits_soft_cap is None else arguments.soft_cap(_NAME, logits_soft_cap, accumulator(query.dtype)),
        "dropout_rate": rate if drops else 0.0,
        "precision": _precision(precision),
        "deterministic": deterministic or _xla_is_deterministic(),
        "implementation": implementation,
        "return_lse": return_residual or means,
    }
    if whole_queries:
        out, *lse = _over_keys(operands, axes, sequence | options)
    else:
        out, *lse = bind(primitive.ATTENTION, operands, **options, **sequence, **({"axis_name": axes} if axes else {}))
    if not lse:
        return out
    residual = jnp.swapaxes(lse[0], -1, -2)
    if means:
        out = _with_means(out, residual, operands, axes, whole_queries, zigzag)
    return (out, residual) if return_residual else out


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: Literal[False] = False,
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: Literal[True],
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: Window = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Attention to keys and values in pages, which a table puts in order: a cache that sequences of any lengths share.

    It is `dot_product_attention` of `key = key_pages[page_table]`, its first two axes flattened, and of values likewise, with
    `key_value_seq_lengths=lengths`; key `i` of a sequence is in page `page_table[..., i // page]`, at `i % page`. On Hopper
    pages of 8, 16, ..., 256 keys are read where they are, in 16 bits and for up to 64 queries. Elsewhere, and where it is
    differentiated, keys and values of whole tables are gathered first, which takes memory for them.

    Arguments that are not described here are as for `dot_product_attention`. It has no segments, lengths of queries, dropout or
    `fully_masked_rows`.

    Args:
      query: `[*batch, T, N, H]`, as for `dot_product_attention`.
      key_pages: `[pages, page, K, H]`, of the dtype of query or of 8 bits: pages of so many keys each, of all sequences.
      value_pages: `[pages, page, K, Hv]`, likewise.
      page_table: integers `[*batch, M]`: the pages of each sequence, in their order. Numbers below 0 or beyond the last page
        count as the first and the last page: nothing outside is read. Those of pages from `lengths` on have no effect, so no
        number has to stand for "none". (`update_pages` writes nothing where a page does not exist.)
      lengths: integers `[*batch]`: how many keys each sequence has, new ones included, from 0 to `M * page`; what is below or
        above counts as these.
      bias: floating, broadcast to `[*batch, N, T, M * page]`.
      mask: boolean, likewise.
      scale: a number, None for `1 / sqrt(H)`.
      is_causal: whether a query sees no key after its own position.
      local_window_size: how many keys before and after its own position a query sees.
      query_offset: integers `[*batch]`, or one for all: the position of the first query. None for `lengths - T`: queries are
        the last tokens. One before position 0 sees nothing if it `is_causal`.
      logits_soft_cap: a concrete positive number.
      sinks: floating `[N]`.
      key_scale: floating `[K]` or `[pages, K]`, of keys of float8_e4m3fn or int8, as for `dot_product_attention`. Kernels, and
        derivatives, round products with scales of pages to the dtype of query.
      value_scale: likewise, of values.
      implementation: None for the best one, or the name of the one that must run.
      precision: of the products of float32 operands.
      return_residual: whether to return the log-sum-exp of the scores too.

    Returns:
      `[*batch, T, N, Hv]` in the dtype of `query`; with `return_residual`, a pair of it and the log-sum-exp, `[*batch, T, N]`,
      float32 (float64), `-inf` where nothing is seen.

    Raises:
      TypeError: an argument is of the wrong type or dtype, or traced although it must be concrete.
      ValueError: an argument has a shape or a value that does not fit; no such `implementation` or `precision`.
      NotImplementedError: `implementation` cannot run this call; with the reason.

    Source: Kwon et al. 2023, arXiv:2309.06180.
    """
    name = "paged_attention"
    dispatch.check_implementation("attention", name, implementation)
    is_causal, return_residual = arguments.flags(name, is_causal=is_causal, return_residual=return_residual)
    query = arguments.array(name, "query", query, "floating")
    if query.dtype.name not in DTYPES:
        raise TypeError(f"{name}: query must be of dtype {', '.join(DTYPES)}, got {query.dtype}")
    if query.ndim < 3 or 0 in query.shape[-2:]:
        raise ValueError(f"{name}: query must have the axes [*batch, T, N, H] with heads of at least size 1, got {query.shape}")
    query, scale = _scaled(name, query, scale)
    batch, (length, heads, size) = query.shape[:-3], query.shape[-3:]
    key_pages, value_pages = _pages(name, key_pages=key_pages, value_pages=value_pages)
    if key_pages.dtype != query.dtype and key_pages.dtype.name not in BYTES:
        raise TypeError(
            f"{name}: key_pages must have the dtype of query or one of {', '.join(BYTES)},"
            f" got {key_pages.dtype} and {query.dtype}"
        )
    if key_pages.shape[-1] != size or heads % key_pages.shape[-2]:
        raise ValueError(
            f"{name}: key_pages must have the head size of query, and a number of heads that divides that of query,"
            f" got shapes {key_pages.shape} and {query.shape}"
        )
    table = _table(name, page_table, batch, query=query.shape)
    keys = table.shape[-1] * key_pages.shape[-3]
    lengths = _lengths("lengths", lengths, batch, name)
    operands = {"query": query, "page_table": table, "key_lengths": lengths}
    ones = (1,) * len(batch)
    operands |= {
        "key_pages": key_pages.reshape(*ones, *key_pages.shape),
        "value_pages": value_pages.reshape(*ones, *value_pages.shape),
    }
    scales = _scales(name, query.dtype, key_pages, (key_pages.shape[0], key_pages.shape[2]), key=key_scale, value=value_scale)
    for which, own in scales.items():
        operands[which if own.ndim == 1 else which.replace("_", "_page_")] = lax.expand_dims(own, range(len(batch)))
    operands |= _of_scores(name, bias, mask, sinks, (*batch, heads, length, keys))
    window = _window(local_window_size, is_causal, length, keys, True, name)
    if query_offset is not None:
        query_offset = _offset(query_offset, batch, name)
    if window != (None, None):
        operands["query_offset"] = jnp.clip(lengths, 0, keys) - length if query_offset is None else query_offset
    out, *lse = bind(
        primitive.PAGED,
        operands,
        return_lse=return_residual,
        scale=scale,
        window=window,
        soft_cap=None if logits_soft_cap is None else arguments.soft_cap(name, logits_soft_cap, accumulator(query.dtype)),
        precision=_precision(precision, name),
        deterministic=_xla_is_deterministic(),
        implementation=implementation,
    )
    return (out, jnp.swapaxes(lse[0], -1, -2)) if lse else out


def update_pages(
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    page_table: ArrayLike,
    positions: ArrayLike,
    *,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Pages in which the keys and values of new tokens are written; in place where the pages are donated.

    Under `jax.jit(..., donate_argnums=...)`, or in a loop that carries the pages, nothing but the new tokens is written. Pages
    may be sharded by heads; sequences that are sharded have pages of their own, inside a `jax.shard_map`.

    Args:
      key_pages: `[pages, page, K, H]`, floating, or int8.
      value_pages: `[pages, page, K, Hv]`, of the same dtype.
      key: floating `[*batch, T, K, H]`, of T new tokens of each sequence; cast to the dtype of the pages, or if that is of
        8 bits divided by the scale, and rounded as `quantize` does.
      value: `[*batch, T, K, Hv]`, likewise.
      page_table: integers `[*batch, M]`, as `paged_attention` takes it.
      positions: integers `[*batch]`: that of the first new token of each sequence, how many keys it had.
      key_scale: floating `[K]` or `[pages, K]`, of pages of float8_e4m3fn or int8, as `paged_attention` takes it. None for 1 in
        float8_e4m3fn; int8, which holds whole numbers, must have one.
      value_scale: likewise, of values.

    Returns:
      The two arrays of pages. Tokens whose position is below 0 or from `M * page` on, or whose page does not exist, are left
      out. Where two tokens have the same place, one of them is there.

    Raises:
      TypeError: an argument is no array of the right kind.
      ValueError: an argument has a shape that does not fit.
    """
    name = "update_pages"
    key_pages, value_pages = _pages(name, key_pages=key_pages, value_pages=value_pages)
    key, value = (arguments.array(name, which, array, "floating") for which, array in (("key", key), ("value", value)))
    count, page = key_pages.shape[:2]
    for which, scale in (("key", key_scale), ("value", value_scale)):
        if scale is None and key_pages.dtype == jnp.int8:
            raise ValueError(f"{name}: {which}_scale must be given for pages of int8, which hold whole numbers, got None")
    for which, array, pages in (("key", key, key_pages), ("value", value, value_pages)):
        if array.ndim < 3 or array.shape[-2:] != pages.shape[-2:]:
            raise ValueError(f"{name}: {which} must have the axes [*batch, T, *{pages.shape[-2:]}], got shape {array.shape}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"{name}: value must have as many tokens as key, got shapes {value.shape} and {key.shape}")
    batch, length = key.shape[:-3], key.shape[-3]
    table, first = _table(name, page_table, batch, key=key.shape), _lengths("positions", positions, batch, name)
    scales = _scales(name, key.dtype, key_pages, (count, key.shape[-2]), key=key_scale, value=value_scale)
    # Pages are whole except along heads. On explicit mesh axes, what is written into them is sharded likewise.
    whole, heads = (None,) * len(batch), (None, "heads", None)
    given = [key_pages, value_pages, key, value, table, first, *scales.values()]
    axes = [(None, *heads)] * 2 + [(*whole, *heads)] * 2 + [(*whole, None), whole]
    axes += [(*(None,) * (scale.ndim - 1), "heads") for scale in scales.values()]
    key_pages, value_pages, key, value, table, first, *of_heads = sharding.placed_alike(given, axes)
    scales = dict(zip(scales, of_heads, strict=True))
    at = first[..., None] + lax.broadcasted_iota(np.int32, (*batch, length), len(batch))
    inside = (at >= 0) & (at < table.shape[-1] * page)
    numbers = jnp.take_along_axis(table, jnp.where(inside, at // page, 0), -1) if table.shape[-1] else jnp.zeros_like(at)
    numbers = jnp.where(inside & (numbers >= 0), numbers, count)  # beyond the last page: such updates are dropped
    place = numbers, at % page
    found = []
    for which, array, pages in (("key", key, key_pages), ("value", value, value_pages)):
        if (own := scales.get(f"{which}_scale")) is not None:
            own = own if own.ndim == 1 else own[jnp.minimum(numbers, count - 1)]
            array = _quantized(array, own, pages.dtype)
        found.append(pages.at[place].set(array.astype(pages.dtype), mode="drop"))
    return found[0], found[1]


def quantize(x: ArrayLike, scale: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """`x / scale` in 8 bits, as keys and values of a cache may be; `x` is about `scale` times what it gives.

    For heads of a known largest absolute value `top`, the scale is `top / 448` for float8_e4m3fn, and `top / 127` for int8.

    Args:
      x: floating `[..., heads, size]`.
      scale: floating, broadcast to `[..., heads]`; positive, and no subnormal number. Where it is 0, so may the result be all
        the same: attention multiplies it with 0.
      dtype: float8_e4m3fn, or int8.

    Returns:
      `x / scale` rounded to the nearest number of the dtype; what is beyond -448 and 448, or -127 and 127, becomes these. NaN
      stays NaN in float8_e4m3fn, and becomes 0 in int8. There is a gradient in float8_e4m3fn alone.

    Raises:
      TypeError: an argument is of the wrong type or dtype.
      ValueError: `scale` does not broadcast to the shape of `x` without its last axis.
    """
    x, scale = (arguments.array("quantize", name, array, "floating") for name, array in (("x", x), ("scale", scale)))
    kind = arguments.dtype("quantize", "dtype", dtype, " or ".join(BYTES))
    if kind.name not in BYTES:
        raise TypeError(f"quantize: dtype must be {' or '.join(BYTES)}, got {kind}")
    if x.ndim == 0:
        raise ValueError("quantize: x must have the axes [..., heads, size], got shape ()")
    rows = x.shape[:-1]
    if len(scale.shape) > len(rows) or any(own not in (1, n) for own, n in zip(scale.shape[::-1], rows[::-1], strict=False)):
        raise ValueError(f"quantize: scale must broadcast to the shape of x without its last axis, {rows}, got {scale.shape}")
    return _quantized(x, scale, kind)


def _quantized(x, scale, dtype):
    """See `quantize`."""
    wide = jnp.promote_types(accumulator(x.dtype), scale.dtype)
    scale = jnp.where(scale == 0, 1, scale).astype(wide)[..., None]
    x = x.astype(wide) / lax.expand_dims(scale, range(x.ndim - scale.ndim))
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(jnp.where(jnp.isnan(x), 0, x)), -127, 127).astype(dtype)
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -top, top).astype(dtype)


def _scales(function, dtype, keys, shape, **scales):
    """The scales of keys and values of 8 bits, as what results of a dtype are summed in, by the names of the operands.

    `shape` is the largest that they may have, of which the last axis is heads.
    """
    found = {}
    if keys.dtype.name not in BYTES:
        for name, scale in scales.items():
            if scale is not None:
                raise TypeError(
                    f"{function}: {name}_scale must be None unless keys and values are of dtype {' or '.join(BYTES)},"
                    f" got one with {keys.dtype}"
                )
        return found
    for name, scale in scales.items():
        scale = jnp.ones(shape[-1:]) if scale is None else scale
        array = arguments.array(function, f"{name}_scale", scale, "floating")
        if array.shape not in (shape, shape[-1:]):
            raise ValueError(f"{function}: {name}_scale must have the shape {shape[-1:]} or {shape}, got {array.shape}")
        found[f"{name}_scale"] = array.astype(accumulator(dtype))
    return found


def _pages(function: str, **arrays: ArrayLike) -> list[jax.Array]:
    """Pages of keys and values, of shapes and dtypes that go together, by the names of their arguments."""
    keys, values = found = [_floating_or_bytes(function, name, array) for name, array in arrays.items()]
    for name, array in zip(arrays, found, strict=True):
        if array.ndim != 4 or 0 in array.shape:
            raise ValueError(f"{function}: {name} must be [pages, page, heads, size], none of them 0, got shape {array.shape}")
    if values.shape[:-1] != keys.shape[:-1] or values.dtype != keys.dtype:
        raise ValueError(
            f"{function}: value_pages must have the pages, heads and dtype of key_pages,"
            f" got {values.dtype} {values.shape} and {keys.dtype} {keys.shape}"
        )
    return found


def _floating_or_bytes(function: str, name: str, value: ArrayLike) -> jax.Array:
    """An array of floating point numbers, or of 8 bits."""
    array = arguments.array(function, name, value)
    hint = "" if name == "query" else f", or of dtype {' or '.join(BYTES)}"
    return array if hint and array.dtype.name in BYTES else arguments.array(function, name, array, "floating", hint)


def _table(function: str, value: ArrayLike, batch: tuple[int, ...], **shapes: tuple[int, ...]) -> jax.Array:
    """A table of pages, `[*batch, M]`, int32; `shapes` has the name and the shape of the array from which the batch comes."""
    table = arguments.array(function, "page_table", arguments.listed(function, "page_table", value), "integers")
    if table.ndim != len(batch) + 1:
        ((name, shape),) = shapes.items()
        raise ValueError(
            f"{function}: {name} must have the axes [*batch, tokens, heads, size], also for one token, and page_table"
            f" [*batch, M], got shapes {shape} and {table.shape}"
        )
    if table.shape[:-1] != batch:
        raise ValueError(f"{function}: page_table must have the shape [*batch, M] with the batch {batch}, got {table.shape}")
    return _of_32_bits(table)


def _of_32_bits(array):
    """Integers as int32: one that int32 does not hold is as good as the next that it does."""
    if array.dtype.itemsize > 4 or array.dtype == np.uint32:
        limits = np.iinfo(np.int32)
        array = jnp.clip(array, 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else limits.min, limits.max)
    return array.astype(np.int32)


def _operands(**arrays: ArrayLike) -> list[jax.Array]:
    """Query, key and value, of shapes and dtypes that go together."""
    query, key, value = found = [_floating_or_bytes(_NAME, name, array) for name, array in arrays.items()]
    if query.dtype.name not in DTYPES:
        raise TypeError(f"{_NAME}: query must be of dtype {', '.join(DTYPES)}, got {query.dtype}")
    axes = "[*batch, T, N, H]", "[*batch, S, K, H]", "[*batch, S, K, Hv]"
    for name, array, expected in zip(arrays, found, axes, strict=True):
        if array.dtype != query.dtype and array.dtype.name not in BYTES:
            raise TypeError(
                f"{_NAME}: {name} must have the dtype of query, or be of dtype {' or '.join(BYTES)},"
                f" got {array.dtype} and {query.dtype}"
            )
        if array.ndim < 3:
            raise ValueError(f"{_NAME}: {name} must have the axes {expected}, got shape {array.shape}")
        if array.ndim != query.ndim:
            raise ValueError(
                f"{_NAME}: query must have the axes {axes[0]} and {name} {expected}, got shapes {query.shape} and {array.shape}"
            )
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(f"{_NAME}: {name} must have the batch axes of query, got shapes {array.shape} and {query.shape}")
        if 0 in array.shape[-2:]:
            raise ValueError(f"{_NAME}: {name} must have heads of at least size 1, got shape {array.shape}")
    if value.dtype != key.dtype:
        raise TypeError(f"{_NAME}: value must have the dtype of key, got {value.dtype} and {key.dtype}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"{_NAME}: key must have the head size of query, got shapes {key.shape} and {query.shape}")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(f"{_NAME}: value must have the length and heads of key, got shapes {value.shape} and {key.shape}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"{_NAME}: query must have a multiple of the heads of key, got {query.shape[-2]} and {key.shape[-2]} heads"
            f" in shapes {query.shape} and {key.shape}"
        )
    return found


def _of_scores(function, bias, mask, sinks, shape):
    """Bias, mask and sinks of scores of a shape, as far as there are any, by the names of the operands."""
    found, (*batch, heads, _, _) = {}, shape
    if bias is not None:
        found["bias"] = scores_like("bias", arguments.array(function, "bias", bias, "floating"), shape, function)
    if mask is not None:
        mask = arguments.array(function, "mask", mask, "boolean", "; what is added to the scores goes into bias")
        found["mask"] = scores_like("mask", mask, shape, function)
    if sinks is not None:
        sinks = _of_shape("sinks", sinks, "floating", (heads,), "[N]", function)
        found["sinks"] = lax.expand_dims(sinks, range(len(batch)))
    return found


def scores_like(name, array, shape, function=_NAME):
    """`array` with the axes of the scores, of which it may have size 1."""
    extra = array.ndim - len(shape)
    if extra > 0 and all(size == 1 for size in array.shape[:extra]):  # four axes without a batch, as `jax.nn` has it
        array = lax.squeeze(array, range(extra))
    fits = array.ndim <= len(shape) and all(own in (1, size) for own, size in zip(array.shape[::-1], shape[::-1], strict=False))
    if not fits:
        raise ValueError(f"{function}: {name} must broadcast to [*batch, N, T, S], got shape {array.shape} for {shape}")
    return lax.expand_dims(array, range(len(shape) - array.ndim))


def _of_shape(name, value, kind, shape, axes, function=_NAME):
    """`value` as an array of a dtype of this kind and of this shape."""
    array = arguments.array(function, name, value, kind)
    if array.shape == (1,) and shape == ():  # as `jax.nn` has it without a batch
        array = array.reshape(())
    if array.shape != shape:
        raise ValueError(f"{function}: {name} must have the shape {axes} = {shape}, got {array.shape}")
    return array


def _lengths(name, value, batch, function=_NAME):
    """Lengths as int32."""
    return _of_32_bits(_of_shape(name, arguments.listed(function, name, value), "integers", batch, "[*batch]", function))


def _offset(value, batch, function=_NAME):
    """An offset as int32, one for each batch entry or one for all, within what sums with lengths do not exceed."""
    array = arguments.array(function, "query_offset", arguments.listed(function, "query_offset", value), "integers")
    if array.shape not in ((), batch):
        raise ValueError(f"{function}: query_offset must be one number or have the shape [*batch] = {batch}, got {array.shape}")
    if array.dtype.itemsize >= 4:
        array = jnp.minimum(array, 2**29)
        array = array if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else jnp.maximum(array, -(2**29))
    return array.astype(np.int32).reshape(array.shape or (1,) * len(batch))


def _segments(queries, keys, batch, length, keys_length):
    """The segments of queries and of keys, by the names of the operands."""
    if queries is None:
        raise ValueError(f"{_NAME}: key_value_segment_ids must come with query_segment_ids, got no query_segment_ids")
    if keys is None and length != keys_length:
        raise ValueError(
            f"{_NAME}: query_segment_ids must come with key_value_segment_ids unless there are as many keys as queries,"
            f" got {length} queries and {keys_length} keys"
        )
    keys = queries if keys is None else keys
    queries = _of_shape("query_segment_ids", queries, "integers", (*batch, length), "[*batch, T]")
    keys = _of_shape("key_value_segment_ids", keys, "integers", (*batch, keys_length), "[*batch, S]")
    if max(queries.dtype.itemsize, keys.dtype.itemsize) <= 4:
        queries, keys = queries.astype(np.int32), keys.astype(np.int32)
    if queries.dtype != keys.dtype:
        raise TypeError(
            f"{_NAME}: key_value_segment_ids must have the dtype of query_segment_ids where one has 64 bits,"
            f" got {keys.dtype} and {queries.dtype}"
        )
    return {"query_segments": queries, "key_segments": keys}


def _scaled(function, query, scale) -> tuple[jax.Array, float]:
    """The query and a concrete scale, 1 if the scale is traced: it multiplies the query then, which is rounded once."""
    kind = accumulator(query.dtype)
    if scale is None:
        return query, 1 / math.sqrt(query.shape[-1])
    if not isinstance(scale, jax.core.Tracer):
        return query, _scale(function, scale, kind)
    scale = arguments.array(function, "scale", scale)
    if scale.shape != () or not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
        raise TypeError(f"{function}: scale must be a real number, got {arguments.shown(scale)}")
    return (query.astype(kind) * scale.astype(kind)).astype(query.dtype), 1.0


def _scale(function, value, kind):
    scale, limits = arguments.number(function, "scale", value), jnp.finfo(kind)
    if not abs(scale) <= float(limits.max):
        raise ValueError(f"{function}: scale must be finite in {limits.dtype}, got {scale}")
    return scale


_PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")  # those of jax.lax.Precision

_MORE_THAN_THREE_PRODUCTS = {  # of bfloat16
    lax.Precision.HIGHEST,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    lax.DotAlgorithmPreset.F32_F32_F32,
    lax.DotAlgorithmPreset.F64_F64_F64,
}


def _precision(value: Any, function: str = _NAME) -> Literal["high", "highest"]:
    """Whether float32 products must be those of float32, or may be made of three bfloat16 products."""
    if value is None:
        value = jax.config.jax_default_matmul_precision
    if isinstance(value, lax.DotAlgorithm):  # arithmetic of its own
        return "highest"
    several = isinstance(value, tuple | list)
    found = [_one_precision(one, function) for one in (value if several else [value])]
    if several and not (len(found) == 2 and all(isinstance(one, lax.Precision) for one in found)):
        raise ValueError(f"{function}: several precisions must be two of jax.lax.Precision, got {arguments.shown(value)}")
    return "highest" if any(one in _MORE_THAN_THREE_PRODUCTS for one in found) else "high"


def _one_precision(value, function):
    if value is None or isinstance(value, lax.Precision | lax.DotAlgorithmPreset):
        return value
    if not isinstance(value, str):
        raise TypeError(f"{function}: precision must be None, a string or one of jax.lax's, got {arguments.shown(value)}")
    if value in lax.DotAlgorithmPreset.__members__:
        return lax.DotAlgorithmPreset[value]
    try:
        return lax.Precision(value)
    except ValueError:
        names = ", ".join(map(repr, _PRECISIONS))
        raise ValueError(
            f"{function}: precision must be one that jax.lax.dot takes, None, {names}, or the name of a"
            f" jax.lax.DotAlgorithmPreset such as 'BF16_BF16_F32', got {arguments.shown(value)}"
        ) from None


def _axis_name(value, whole_queries) -> tuple[tuple[str, ...], int]:
    """The mesh axes of a `shard_map` around over which a sequence is sharded, and how many devices there are along them."""
    (whole_queries,) = arguments.flags(_NAME, whole_queries=whole_queries)
    axes = arguments.axis_names(_NAME, value)
    if whole_queries and not axes:
        raise ValueError(f"{_NAME}: whole_queries must come with axis_name, got axis_name={arguments.shown(value)}")
    return axes, lax.axis_size(axes)


def _sequence(context_parallel, zigzag, lengths) -> dict[str, Any]:
    """The parameters of attention over devices, as far as they are not None."""
    allowed = get_args(get_args(ContextParallel)[0])
    if context_parallel is not None and (not isinstance(context_parallel, str) or context_parallel not in allowed):
        names = ", ".join(map(repr, allowed))
        raise ValueError(f"{_NAME}: context_parallel must be None or one of {names}, got {arguments.shown(context_parallel)}")
    if zigzag is not None:
        zigzag = _zigzag.check(_NAME, "zigzag", zigzag)
        if any(length % (2 * zigzag) for length in lengths):
            raise ValueError(
                f"{_NAME}: zigzag must divide half of the numbers of queries and of keys, got {zigzag} with"
                f" {lengths[0]} queries and {lengths[1]} keys"
            )
    given = {"context_parallel": context_parallel, "zigzag": zigzag}
    return {name: option for name, option in given.items() if option is not None}


def _over_keys(operands, axes, options):
    """`[out, lse]` of queries that all devices have, of keys that axes of a `shard_map` shard, to differentiate."""
    from jaxsoftmax.ops.attention import _devices  # no part of the primitive, whose cotangents would be those of one device

    def run(this, operands, **params):
        return bind(this, operands, implementation=options["implementation"], **params)

    over = {"keys": sharding.Cut.of_part(axes, operands["key"].shape[-3])}
    params = {name: option for name, option in options.items() if name != "implementation"}
    found = _devices.dot_product_attention(run, **operands, **params, over=over, is_manual=True)
    return lax.psum(found, axes) if lax.axis_size(axes) == 1 else found  # a sum says that all devices have it


def _with_means(out, lse, operands, axes, whole_queries, zigzag):
    """`out` with the mean of all values in the place of 0 where a query sees no key, but for those behind `query_lengths`."""
    names = [name for name in ("value", "value_scale") if name in operands]
    (value, *scale), _ = sharding.alike(primitive.ATTENTION, names, [operands[name] for name in names])
    empty, query_lengths = lse[..., None] == -jnp.inf, operands.get("query_lengths")
    if query_lengths is not None:
        positions, devices = lax.iota(np.int32, out.shape[-3]), 1
        if axes and not whole_queries:
            positions, devices = positions + lax.axis_index(axes) * out.shape[-3], lax.axis_size(axes)
        if zigzag is not None:
            positions = _zigzag.position_of(positions, devices * out.shape[-3], zigzag)
        positions = positions.reshape((1,) * query_lengths.ndim + (-1, 1, 1))
        empty &= positions < query_lengths[..., None, None, None]
    means = jnp.mean(value, -3, dtype=lse.dtype, keepdims=True)
    means = lax.pmean(means, axes) if axes else means
    means = (means * scale[0][..., None, :, None] if scale else means).astype(out.dtype)
    return jnp.where(empty, of_every_head(means, out.shape[-2]), out)


def of_every_head(array: jax.Array, heads: int) -> jax.Array:
    """Keys or values of every query head, of those that each serve several."""
    *batch, length, key_heads, size = array.shape
    groups = heads // key_heads
    if groups == 1:
        return array
    # Not `jnp.repeat`, which does not know how to shard its result.
    return jnp.broadcast_to(array[..., None, :], (*batch, length, key_heads, groups, size)).reshape(*batch, length, heads, size)


def _xla_is_deterministic() -> bool:
    """Whether XLA_FLAGS asks for GPU programs that give the same bits run after run."""
    flags = compat.xla_flags()
    names = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
    return any(flags.get(name, "").lower() in ("true", "1") for name in names)


def dropout_seeds(dropout_rng: jax.Array | None, batch: tuple[int, ...], heads: int, broadcast: bool) -> jax.Array:
    """The seeds of dropout, uint32 `[*batch, N, 2]`, the same ones everywhere if `broadcast`."""
    if dropout_rng is None:
        raise ValueError(f"{_NAME}: dropout_rng must be a key where dropout_rate is above 0, got None")
    key, shape = arguments.random_key(_NAME, "dropout_rng", dropout_rng), (*batch, heads, 2)
    seeds = jax.random.bits(key, (2,) if broadcast else shape, np.uint32)
    return jnp.broadcast_to(seeds, shape)


def _window(value, is_causal, length, keys, is_offset, function=_NAME) -> tuple[int | None, int | None]:
    """How many keys before and after its own position a query sees, None where that rules out nothing, wherever queries are."""
    sides = tuple(value) if isinstance(value, tuple | list) else (value, value)
    if len(sides) != 2:
        raise ValueError(
            f"{function}: local_window_size must be one number or a pair (left, right), got {arguments.shown(value)}"
        )
    try:
        if any(isinstance(side, bool | np.bool_) for side in sides):
            raise TypeError
        left, right = (None if side is None else operator.index(side) for side in sides)
    except TypeError:
        raise TypeError(
            f"{function}: local_window_size must be an int or a pair of ints, got {arguments.shown(value)}"
        ) from None
    if any(side is not None and side < 0 for side in (left, right)):
        raise ValueError(
            f"{function}: local_window_size must not be negative, and None is for all keys, got {arguments.shown(value)}"
        )
    ends = (None, None) if is_offset else (length, keys)
    return _side(left, ends[0]), _side(0 if is_causal else right, ends[1])


def _side(side: int | None, length) -> int | None:
    if side is None or (isinstance(length, int) and side >= length - 1):
        return None
    return min(side, 2**30)  # positions are of 32 bits, and there are less than that many
