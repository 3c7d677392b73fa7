"""Attention, with the signature of `jax.nn.dot_product_attention` and more."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments, sharding
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.attention import block_masks, checks, mask_blocks, primitive, score_functions
from jaxsoftmax.ops.attention.block_masks import BlockMask
from jaxsoftmax.ops.attention.context_parallel import order
from jaxsoftmax.ops.attention.context_parallel.settings import ContextParallel, as_context_parallel
from jaxsoftmax.ops.attention.implementations import ATTENTION_FAMILY

if TYPE_CHECKING:
    from jaxsoftmax.ops.options import AttentionOptions

_NAME = "dot_product_attention"


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: "Unpack[AttentionOptions]",
) -> jax.Array: ...


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: "Unpack[AttentionOptions]",
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
    local_window_size: checks.Window = None,
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
    deterministic_gradients: bool = False,
    fully_masked_rows: Literal["zero", "mean"] = "zero",
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | BlockMask | None = None,
    parallel: ContextParallel | None = None,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_residual: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention, `softmax(scale * query @ key^T + bias) @ value` for each head, and never holds all scores in memory.

    The signature is that of `jax.nn.dot_product_attention`, with more arguments. The arithmetic is float32 (see `precision`),
    or float64 where the operands are. Derivatives of any order, in forward and reverse mode, exist for `query`, `key`, `value`,
    `bias`, `sinks`, the scales, a traced `scale` and arrays that `score_mod` reads, also through the log-sum-exp. Cotangents of
    float8_e4m3fn have its few bits; int8 has none.

    A query sees the keys that `mask`, `mask_mod`, `is_causal`, the lengths, the window and the segments all allow, and that
    neither `bias` nor `score_mod` excludes with `-inf`. A query that sees no key gives 0 and has zero gradients, unless
    `fully_masked_rows` says otherwise. Keys and values that no query sees have no effect; those that `score_mod` hides must be
    finite. On Hopper (implementation "mosaic")
    hidden values must be finite, and for derivatives hidden queries and keys too: they are multiplied by 0, and NaN or infinity
    times 0 is NaN.

    The arguments by purpose:

    - what a query sees: `mask`, `is_causal`, `query_seq_lengths`, `key_value_seq_lengths`, `local_window_size`, `query_offset`,
      `query_segment_ids`, `key_value_segment_ids`, `mask_mod`, `fully_masked_rows`
    - the scores: `scale`, `score_mod`, `logits_soft_cap`, `bias`, `sinks`, `precision`
    - keys and values in 8 bits: `key_scale`, `value_scale`
    - dropout: `dropout_rate`, `dropout_rng`, `broadcast_dropout`, `deterministic`
    - how it runs: `implementation`, `parallel`, `deterministic_gradients`, `return_residual`

    Derivatives save the output and the log-sum-exp under the names `"jaxsoftmax_attention_out"` and
    `"jaxsoftmax_attention_lse"`. Under `jax.checkpoint` (rematerialization), the policy
    `jax.checkpoint_policies.save_only_these_names` with both names keeps the forward pass from running twice. A policy that
    saves matrix products, such as `dots_saveable`, does not see the products inside a kernel.

    Args:
      query: `[*batch, T, N, H]`: T queries of N heads of size H; float16, bfloat16, float32 or float64. Any number of batch
        axes, or none.
      key: `[*batch, S, K, H]`, in the dtype of `query` or in 8 bits (see `key_scale`). N must be a multiple of K: each key head
        serves N / K consecutive query heads (grouped-query and multi-query attention).
      value: `[*batch, S, K, Hv]`, in the dtype of `key`. Hv may differ from H.
      bias: floating, broadcast to `[*batch, N, T, S]`; added to the scores.
      mask: boolean, broadcast to `[*batch, N, T, S]`; True where a query sees a key.
      scale: number that multiplies the products; None for `1 / sqrt(H)`. A traced scale, which may be differentiated,
        multiplies the queries instead: in float32, and the result is rounded to their dtype, as Flax scales queries.
      is_causal: True if a query sees no key after its own position. Keys count from 0, queries from `query_offset`.
      query_seq_lengths: integers `[*batch]`, the number of queries of each sequence. Later queries see nothing.
      key_value_seq_lengths: integers `[*batch]`, the number of keys of each sequence.
      local_window_size: `(left, right)`, the number of keys before and after its own position that a query sees; None in either
        place for all of them; one number for both. A sliding window of n tokens that include the query is `(n - 1, 0)`.
      query_offset: integers `[*batch]`, or one for all, from -2^29 to 2^29: the position of the first query. None for 0. If
        keys are a cache, it is the number of keys that came before these queries. Only `is_causal`, `local_window_size`,
        `score_mod` and `mask_mod` use positions.
      query_segment_ids: integers `[*batch, T]`. A query sees the keys of its own segment (packed documents). 64-bit integers
        run on the reference.
      key_value_segment_ids: integers `[*batch, S]`. None for the segments of the queries, if T is S.
      logits_soft_cap: positive concrete number; scores become `cap * tanh(score / cap)` before `bias` is added.
      sinks: floating `[N]`, an extra score of each head that adds to the denominator and has no value (attention sinks).
      key_scale: floating `[K]` or `[*batch, K]`, for keys in float8_e4m3fn or int8: an element stands for itself times the
        scale. None for 1. `jaxsoftmax.cache.quantize` makes such keys. On Hopper up to 64 queries in 16 bits read them as they
        are. Other kernels, and derivatives, first convert the keys to the dtype of `query` in memory. In float16 a key beyond
        65504 becomes infinite there.
      value_scale: the same for values.
      dropout_rate: share of the weights that is dropped, concrete, at least 0 and less than 1. The others are divided by
        `1 - dropout_rate`.
      dropout_rng: key of `jax.random`. The same key drops the same weights for every implementation and sharding.
      broadcast_dropout: True if all heads and batch entries drop the same weights, as in Flax.
      deterministic: True if no weight is dropped, as in Flax.
      deterministic_gradients: True if derivatives must have the same bits in every run. Otherwise a kernel may add in any
        order. Setting `--xla_gpu_deterministic_ops` or `--xla_gpu_exclude_nondeterministic_ops` in the environment variable
        XLA_FLAGS asks for it in the whole program.
      fully_masked_rows: result of a query that sees no key. `"zero"`: 0. `"mean"`: the mean of all S values of its head, hidden
        values included and without dropout, as in `jax.nn` and Flax; gradients pass to the values alone. Queries after
        `query_seq_lengths` and queries with a sink give 0 either way, and so does every query if S is 0.
      score_mod: function `score_mod(score, batch, head, query_index, key_index)` that returns the score to use in place of
        `score`, which is a product times `scale`. `logits_soft_cap` and `bias` come after it, and masks last. All arguments are
        scalars: the score in float32 (float64 for float64 operands), the others int32. `batch` counts batch entries in
        row-major order, `head` query heads, `key_index` keys from 0, and `query_index` queries from `query_offset`. The result
        has the dtype of the score; `-inf` hides the key. The function is traced once, and may use any code of `jax.numpy` and
        `jax.lax` on scalars. It may read arrays that it closes over, at indices that it computes from its arguments, and
        floating ones have derivatives, which must be finite where the key is hidden too. Those of 16 bits add up in float32.
      mask_mod: function `mask_mod(batch, head, query_index, key_index)` that returns a bool, True where the query sees the key;
        or a `jaxsoftmax.BlockMask`, with which several calls share the search for blocks. It is traced likewise. Kernels do not
        visit blocks of scores that it hides, and a function that is a window around the query runs as `local_window_size`.
        Kernels refuse functions with operations that they do not have. The reference runs these, unless `implementation` names
        another one.
      parallel: `jaxsoftmax.ContextParallel` that says how devices share the sequence. None where tokens have their own order
        and no `jax.shard_map` shards the sequence: a model then picks the strategy.
      implementation: None for the best implementation for this platform, GPU, shape and dtype; or its name, "mosaic", "triton"
        or "xla". Derivatives run on the reference "xla" where the named one has no kernel for that kind of derivative at all
        (as for tangents of float32), and raise NotImplementedError where it has one that cannot run this call.
      precision: precision of products of float32 operands, as `jax.lax.dot` takes it; None for `jax_default_matmul_precision`.
        `"highest"`, `"float32"` and algorithms of more than three bfloat16 products ask for float32 products. With any other
        value, "mosaic" replaces each product by three bfloat16 products. Their error is at most 2^-15 of the sum of the
        absolute terms; that of TF32, which `jax.nn` uses on NVIDIA GPUs, is 2^-10. Infinite operands, and operands beyond
        3.39e38, then give NaN. Gradients multiply alike; tangents use float32 products. With 16-bit operands, "xla" multiplies
        its float32 weights by three bfloat16 products on NVIDIA GPUs of compute capability 8.0 or more.
      return_residual: True to return the log-sum-exp too. The name is that of `jax.nn`; other ops call it `return_lse`.

    Returns:
      The output, `[*batch, T, N, Hv]` in the dtype of `query`. With `return_residual` a pair of the output and
      `log(sum(exp(score)))`, `[*batch, T, N]` in float32 (float64 for float64 operands), which includes the sink, ignores
      dropout, and is `-inf` where a query sees nothing.

    Raises:
      TypeError: an argument has the wrong type or dtype, or is traced although it must be concrete.
      ValueError: an argument has a shape or a value that does not fit, or `implementation` or `precision` does not exist; a
        strategy is named in `parallel` although no sequence is sharded.
      NotImplementedError: `implementation`, or the strategy in `parallel`, cannot run this call; the message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> query = jax.random.normal(jax.random.key(0), (2, 16, 8, 32))  # batch, length, heads, head size
      >>> key, value = jax.random.normal(jax.random.key(1), (2, 2, 16, 2, 32))  # each for 4 query heads
      >>> out, lse = jaxsoftmax.dot_product_attention(
      ...     query, key, value, is_causal=True, local_window_size=(3, 0), return_residual=True
      ... )
      >>> out.shape, lse.shape
      ((2, 16, 8, 32), (2, 16, 8))
      >>> expected = jax.nn.dot_product_attention(
      ...     query, key, value, is_causal=True, local_window_size=(3, 0)
      ... )
      >>> bool(jnp.allclose(out, expected, atol=1e-2))  # on a GPU `jax.nn` multiplies in TF32
      True

      A bias that is learned for each head and distance, as a function:

      >>> table = jnp.zeros((8, 31))
      >>> def relative(score, batch, head, query_index, key_index):
      ...     return score + table[head, query_index - key_index + 15]
      >>> jaxsoftmax.dot_product_attention(query, key, value, score_mod=relative).shape
      (2, 16, 8, 32)

    Source: Dao 2023, arXiv:2307.08691, and Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    check_implementation(ATTENTION_FAMILY, _NAME, implementation)
    query, key, value = checks.queries_keys_values(_NAME, query=query, key=key, value=value)
    is_causal, deterministic, deterministic_gradients, return_residual, broadcast_dropout = arguments.flags(
        _NAME,
        is_causal=is_causal,
        deterministic=deterministic,
        deterministic_gradients=deterministic_gradients,
        return_residual=return_residual,
        broadcast_dropout=broadcast_dropout,
    )
    rate = checks.dropout_rate(_NAME, dropout_rate, deterministic)
    arguments.check_choice(_NAME, "fully_masked_rows", fully_masked_rows, "zero", "mean")
    query, scale = checks.scaled(_NAME, query, scale)
    batch, (length, heads), keys = query.shape[:-3], query.shape[-3:-1], key.shape[-3]
    parallel = as_context_parallel(_NAME, parallel)
    axes = arguments.axis_names(_NAME, parallel.axis_name, "parallel.axis_name")
    replicated, devices = parallel.replicated_queries, lax.axis_size(axes)
    lengths = length * (1 if replicated else devices), keys * devices  # numbers of queries and keys on all devices
    sequence = checks.sequence_params(_NAME, parallel, lengths)
    if axes:
        query = sharding.varying(query, () if replicated else axes)
        key, value = (sharding.varying(array, axes) for array in (key, value))
    operands = {"query": query, "key": key, "value": value}
    scales = checks.cache_scales(_NAME, query.dtype, key, (*batch, key.shape[-2]), key=key_scale, value=value_scale)
    operands |= {name: lax.expand_dims(scale, range(len(batch) + 1 - scale.ndim)) for name, scale in scales.items()}
    operands |= checks.operands_of_scores(_NAME, bias, mask, sinks, (*batch, heads, length, lengths[1]))
    if query_seq_lengths is not None:
        operands["query_lengths"] = checks.sequence_lengths(_NAME, "query_seq_lengths", query_seq_lengths, batch)
    if key_value_seq_lengths is not None:
        operands["key_lengths"] = checks.sequence_lengths(_NAME, "key_value_seq_lengths", key_value_seq_lengths, batch)
    if query_segment_ids is not None or key_value_segment_ids is not None:
        operands |= checks.segments(_NAME, query_segment_ids, key_value_segment_ids, batch, length, keys)
    if rate > 0:
        seeds = checks.dropout_seeds(_NAME, dropout_rng, batch, heads, broadcast_dropout)
        operands["seeds"] = jnp.pad(seeds, [(0, 0)] * (seeds.ndim - 1) + [(0, 2)])  # the first query and key have position 0
    window = checks.window(_NAME, local_window_size, is_causal, *lengths, query_offset is not None)
    offset = None if query_offset is None else checks.offset(_NAME, query_offset, batch)
    hiding: Any = mask_mod
    if isinstance(mask_mod, BlockMask):
        kinds = block_masks.kinds_for(_NAME, mask_mod, batch, heads, lengths)
        operands |= kinds if query_offset is None else {}  # queries at other positions see other blocks
        hiding = score_functions.Closure(mask_mod.function, mask_mod.arrays)
    functions, arrays = score_functions.functions_and_operands(
        _NAME, accumulator(query.dtype), score_mod, hiding, (*batch, heads)
    )
    operands |= arrays
    if query_offset is None and "mask_mod" in functions:
        window, functions = _with_window_of_mask(window, functions, lengths)
    if offset is not None and (window != (None, None) or functions):
        operands["query_offset"] = offset
    means = fully_masked_rows == "mean" and keys != 0
    options = {
        "scale": scale,
        "window": window,
        "soft_cap": None if logits_soft_cap is None else arguments.soft_cap(_NAME, logits_soft_cap, accumulator(query.dtype)),
        "dropout_rate": rate,
        "precision": checks.precision(_NAME, precision),
        "deterministic_gradients": deterministic_gradients or checks.xla_is_deterministic(),
        "implementation": implementation,
        "return_lse": return_residual or means,
    } | functions
    if replicated:
        out, *lse = _over_keys(operands, axes, sequence | options)
    else:
        out, *lse = bind(primitive.ATTENTION, operands, **options, **sequence, **({"axis_name": axes} if axes else {}))
    if not lse:
        return out
    residual = jnp.swapaxes(lse[0], -1, -2)
    if means:
        out = _with_means(out, residual, operands, axes, parallel)
    return (out, residual) if return_residual else out


def _with_window_of_mask(window, functions, lengths):
    """Returns the window and the functions, with a mask function that is a window as one."""
    shown = mask_blocks.find_window(functions["mask_mod"], lengths)
    if shown is None:
        return window, functions
    length, keys = lengths
    limits = zip(window, checks.window(_NAME, shown, False, length, keys, False), strict=True)
    sides = (min((side for side in pair if side is not None), default=None) for pair in limits)
    return tuple(sides), {name: function for name, function in functions.items() if name != "mask_mod"}


def _over_keys(operands, axes, options):
    """Computes `[out, lse]` of queries that all devices have, where axes of a `shard_map` shard the keys.

    The rule for shared sequences runs here and not inside the primitive, whose cotangents would be those of one device.
    """
    from jaxsoftmax.ops.attention import across_devices

    def run(operation, operands, **params):
        return bind(operation, operands, implementation=options["implementation"], **params)

    cuts = {"keys": sharding.Cut.of_part(axes, operands["key"].shape[-3])}
    params = {name: option for name, option in options.items() if name != "implementation"}
    results = across_devices.dot_product_attention(run, **operands, **params, cuts=cuts, is_manual=True)
    return lax.psum(results, axes) if lax.axis_size(axes) == 1 else results  # the sum tells JAX that all devices have the same


def _with_means(out, lse, operands, axes, parallel):
    """Returns `out` with the mean of all values where a query sees no key, except for queries after `query_lengths`."""
    names = [name for name in ("value", "value_scale") if name in operands]
    (value, *scale), _ = sharding.alike(primitive.ATTENTION, names, [operands[name] for name in names])
    is_empty, query_lengths = lse[..., None] == -jnp.inf, operands.get("query_lengths")
    if query_lengths is not None:
        positions, devices = lax.iota(np.int32, out.shape[-3]), 1
        if axes and not parallel.replicated_queries:
            positions, devices = positions + lax.axis_index(axes) * out.shape[-3], lax.axis_size(axes)
        if parallel.zigzag is not None:
            positions = order.position_of(positions, devices * out.shape[-3], parallel.zigzag)
        positions = positions.reshape((1,) * query_lengths.ndim + (-1, 1, 1))
        is_empty &= positions < query_lengths[..., None, None, None]
    means = jnp.mean(value, -3, dtype=lse.dtype, keepdims=True)
    means = lax.pmean(means, axes) if axes else means
    means = (means * scale[0][..., None, :, None] if scale else means).astype(out.dtype)
    return jnp.where(is_empty, repeat_heads(means, out.shape[-2]), out)


def repeat_heads(array: jax.Array, heads: int) -> jax.Array:
    """Repeats keys or values for each query head that they serve."""
    *batch, length, key_heads, size = array.shape
    groups = heads // key_heads
    if groups == 1:
        return array
    # `jnp.repeat` does not know how to shard its result.
    return jnp.broadcast_to(array[..., None, :], (*batch, length, key_heads, groups, size)).reshape(*batch, length, heads, size)
