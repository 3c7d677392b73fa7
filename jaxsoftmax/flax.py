"""Attention functions that modules of `flax.linen` and `flax.nnx` take as `attention_fn`.

`import jaxsoftmax` does not import this module, so Flax is needed only by programs that import `jaxsoftmax.flax`.
"""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

try:
    from flax.linen import dtypes
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "flax":
        raise
    message = 'jaxsoftmax.flax needs Flax, which is not installed: pip install "flax>=0.12.12"'
    raise ModuleNotFoundError(message, name=error.name) from error

from jaxsoftmax._core import arguments
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.attention import dropout
from jaxsoftmax.ops.attention.api import dot_product_attention, repeat_heads
from jaxsoftmax.ops.attention.block_masks import BlockMask
from jaxsoftmax.ops.attention.checks import DTYPES, dropout_seeds, scores_like
from jaxsoftmax.ops.attention.context_parallel.settings import ContextParallel, as_context_parallel
from jaxsoftmax.ops.softmax.api import softmax

__all__ = ["attention_fn", "attention_fn_with_rope"]

_NAME = "attention_fn"
_WITH_ROPE = "attention_fn_with_rope"


# Every argument has a name of its own: linen passes only arguments that the signature names, and nnx passes all that it
# has.
def attention_fn(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    broadcast_dropout: bool = True,
    dropout_rng: jax.Array | None = None,
    dropout_rate: float = 0.0,
    deterministic: bool = False,
    dtype: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    module: Any = None,
    force_fp32_for_softmax: bool = False,
    einsum_dot_general: None = None,
    qk_attn_weights_einsum: Callable[..., jax.Array] | None = None,
    attn_weights_value_einsum: Callable[..., jax.Array] | None = None,
    promote_dtype: Callable[..., tuple[jax.Array, jax.Array, jax.Array]] | None = None,
    is_causal: bool = False,
    fully_masked_rows: Literal["zero", "mean"] = "zero",
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | BlockMask | None = None,
    parallel: ContextParallel | None = None,
) -> jax.Array:
    """Computes attention with the arguments of `flax.linen.dot_product_attention` and `flax.nnx.dot_product_attention`.

    The attention modules of both APIs take the function as `attention_fn`. It runs as `jaxsoftmax.dot_product_attention`,
    with the same kernels, derivatives and checkpoint names. Two things differ from Flax: a query that sees no key gives 0
    unless `fully_masked_rows` is "mean", and the softmax is computed in float32 or wider for every dtype.

    `is_causal` and `mask` combine: a query sees a key if neither excludes it. If the mask is the same for all heads, as
    masks of Flax are, the kernels skip whole blocks of keys before the first key and after the last key that a block of
    queries sees.

    Args:
      query: array `[*batch, T, N, H]`, with any number of batch axes or none.
      key: array `[*batch, S, K, H]`. N is a multiple of K: each key head serves `N / K` consecutive query heads.
      value: array `[*batch, S, K, Hv]`.
      bias: floating array that broadcasts to `[*batch, N, T, S]` and is added to the scores. An entry of `-inf` hides a
        key. None (the default) for no bias.
      mask: boolean or numeric array that broadcasts to `[*batch, N, T, S]`. A query sees a key if the entry is not 0. None
        (the default) for no mask.
      broadcast_dropout: True (the default) to drop the same weights in all heads and in the whole batch.
      dropout_rng: key of `jax.random`, needed if weights are dropped. Equal keys drop equal weights, but other weights
        than Flax's own attention drops for the same key.
      dropout_rate: share of the weights that is dropped, a concrete number from 0 (the default) to less than 1. The
        remaining weights are divided by `1 - dropout_rate`.
      deterministic: True to drop no weights; False by default. A concrete value. It has no effect on the order in which
        gradients are summed.
      dtype: dtype to which query, key and value are cast, and dtype of the computation: float16, bfloat16, float32 or
        float64. None (the default) for the dtype to which theirs promote.
      precision: precision of the matrix products, as in `jax.lax.dot` and `jaxsoftmax.dot_product_attention`. None (the
        default) for `jax_default_matmul_precision`.
      module: linen or nnx module that sows the weights `[*batch, N, T, S]`, before dropout, as "attention_weights" of its
        intermediates. None (the default) sows nothing. The output is the same with and without it.
      force_fp32_for_softmax: True to return the output, and sow the weights, as float32 if `dtype` is narrower, as Flax
        does; False by default. The output has been rounded to `dtype` before.
      einsum_dot_general: must be None. Custom products are passed as the two einsums below.
      qk_attn_weights_einsum: function that computes the scores in place of `jnp.einsum`. All weights are then in memory,
        and no attention kernel runs. None (the default) for no custom product.
      attn_weights_value_einsum: function that computes the output from weights and values. Pass both einsums or neither.
      promote_dtype: function of `(query, key, value)` and `dtype=` that returns the three arrays in one dtype. None (the
        default) for Flax's function.
      is_causal: True if a query sees no key after its own position, with both counted from 0; False by default. It needs
        no mask in memory. nnx modules pass it. In linen pass `functools.partial(attention_fn, is_causal=True)`, but never
        with `decode=True`: there each call has a single query, whose position would be 0.
      fully_masked_rows: result of a query that sees no key: "zero" (the default), or "mean" for the mean of all values, as
        in Flax. Modules take `functools.partial(attention_fn, fully_masked_rows="mean")`.
      score_mod: function that changes each score, as in `jaxsoftmax.dot_product_attention`; None (the default) for none.
        Modules take `functools.partial(attention_fn, score_mod=...)`. It cannot be combined with sown weights or einsums.
      mask_mod: function that says which queries see which keys, or the `jaxsoftmax.BlockMask` of one, likewise.
      parallel: `jaxsoftmax.ContextParallel` that describes how devices share the sequence; None (the default) leaves the
        choice to the library. `zigzag` and `axis_name` cannot be combined with sown weights or custom einsums.

    Returns:
      Array `[*batch, T, N, Hv]` in the dtype of the computation, or float32 as described at `force_fp32_for_softmax`.

    Raises:
      TypeError: an argument has the wrong type or dtype, is complex, or is traced although it must be concrete.
      ValueError: an argument has a shape or value that does not fit, `einsum_dot_general` is not None, one einsum comes
        without the other or with `precision`, or sown weights or custom einsums come with a `parallel` that sets `zigzag`
        or `axis_name`, or with `score_mod` or `mask_mod`.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxsoftmax.flax import attention_fn
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 8, 2, 16), jnp.float32)
      >>> causal = nnx.make_causal_mask(jnp.ones((2, 8)))
      >>> output = attention_fn(query, key, value, mask=causal)
      >>> expected = nnx.dot_product_attention(query, key, value, mask=causal)
      >>> bool(jnp.allclose(output, expected, atol=1e-2))  # a GPU may multiply in TF32
      True

      One argument changes in a module, and its parameters stay the same:

      >>> attention = nnx.MultiHeadAttention(
      ...     2, in_features=16, attention_fn=attention_fn, decode=False, rngs=nnx.Rngs(0)
      ... )
      >>> print(attention(jnp.ones((2, 8, 16), jnp.float32), is_causal=True).shape)
      (2, 8, 16)

    Source: Dao 2023, arXiv:2307.08691, and Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    query, key, value = _real(_NAME, query=query, key=key, value=value)
    is_causal, deterministic, force_fp32_for_softmax = arguments.flags(
        _NAME, is_causal=is_causal, deterministic=deterministic, force_fp32_for_softmax=force_fp32_for_softmax
    )
    if module is not None and not hasattr(module, "sow"):
        raise TypeError(f"{_NAME}: module must be a module of linen or nnx, got {type(module).__name__}")
    if einsum_dot_general is not None:
        raise ValueError(
            f"{_NAME}: einsum_dot_general must be None, got {arguments.shown(einsum_dot_general)}; qk_attn_weights_einsum and"
            " attn_weights_value_einsum make products of your own"
        )
    einsums = {"qk_attn_weights_einsum": qk_attn_weights_einsum, "attn_weights_value_einsum": attn_weights_value_einsum}
    _check_functions(einsums, promote_dtype, precision)
    if dtype is not None:
        allowed = f"None or one of {', '.join(DTYPES)}"
        if (kind := arguments.dtype(_NAME, "dtype", dtype, allowed)).name not in DTYPES:
            raise TypeError(f"{_NAME}: dtype must be {allowed}, got {kind}")
    promoted = promote_dtype or (lambda arrays, dtype: dtypes.promote_dtype(*arrays, dtype=dtype))
    query, key, value = promoted((query, key, value), dtype=dtype)
    if mask is not None and (mask := arguments.array(_NAME, "mask", mask)).dtype != np.bool_:
        # Flax makes masks of float32. They stay masks: whether one is causal, or where a cache ends, is not known while
        # tracing. The kernels find the blocks that a mask hides when they run.
        mask = mask != 0
    result_dtype = jnp.float32 if force_fp32_for_softmax and query.dtype.itemsize < 4 else query.dtype
    attend = functools.partial(
        dot_product_attention,
        *(query, key, value, bias, mask),
        is_causal=is_causal,
        dropout_rate=dropout_rate,
        deterministic=deterministic,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        fully_masked_rows=fully_masked_rows,
        score_mod=score_mod,
        mask_mod=mask_mod,
        parallel=parallel,
    )
    if module is None and qk_attn_weights_einsum is None:
        return attend().astype(result_dtype)
    _refuse_order(_NAME, parallel, "where weights are in memory")
    for name, function in (("score_mod", score_mod), ("mask_mod", mask_mod)):
        if function is not None:
            raise ValueError(f"{_NAME}: {name} must be None where weights are sown or products are custom, got a function")
    jax.eval_shape(attend)  # checks the arguments
    einsum = qk_attn_weights_einsum or functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=accumulator(query.dtype)
    )
    # Weights that a module sows are computed beside the output: sowing changes no bit of the output, and XLA leaves out weights
    # that nobody reads.
    weights, seen = _weights(query, key, bias, mask, is_causal, einsum, result_dtype)
    sees_no_key = None
    if fully_masked_rows == "mean" and seen is not None and weights.shape[-1] != 0:
        sees_no_key = ~jnp.any(seen, -1, keepdims=True)
        weights = jnp.where(sees_no_key, 1 / weights.shape[-1], weights)
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if attn_weights_value_einsum is None:
        return attend().astype(result_dtype)
    if dropout_rate and not deterministic:
        dropped = _dropped(weights, dropout_rng, dropout_rate, broadcast_dropout)
        weights = dropped if sees_no_key is None else jnp.where(sees_no_key, weights, dropped)
    return attn_weights_value_einsum("...hqk,...khd->...qhd", weights, repeat_heads(value, query.shape[-2]))


def attention_fn_with_rope(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    rope: Callable[..., jax.Array],
    input_positions: ArrayLike | None = None,
    **options: Any,
) -> jax.Array:
    """Computes `attention_fn` of queries and keys that are rotated by their positions.

    The function replaces `flax.nnx.dot_product_attention_with_rope`. Modules take
    `functools.partial(attention_fn_with_rope, rope=rope)` as `attention_fn`.

    Args:
      query: array `[*batch, T, N, H]`, with any number of batch axes or none.
      key: array `[*batch, S, K, H]`. N is a multiple of K: each key head serves `N / K` consecutive query heads.
      value: array `[*batch, S, K, Hv]`.
      rope: function that rotates an array `[T, H]` by positions `[T]`, or by `0, ..., T - 1` if it gets no positions, such
        as a `flax.nnx.RoPE`.
      input_positions: real numbers that broadcast to `[*batch, T]` and to `[*batch, S]`, so T and S are equal
        unless the last axis of the positions is 1. None (the
        default) for `0, ..., T - 1`. If `parallel` sets `zigzag` or `axis_name`, positions are required, in the order of
        the tokens.
      **options: all other arguments of `attention_fn`, by name.

    Returns:
      Array `[*batch, T, N, Hv]` in the dtype of the computation, or float32 as described at `force_fp32_for_softmax` of
      `attention_fn`.

    Raises:
      TypeError: `rope` is not a function, `input_positions` are not real numbers, or an argument of `attention_fn` has the
        wrong type or dtype, is complex, or is traced although it must be concrete.
      ValueError: `query` or `key` has fewer than 3 axes, `input_positions` do not broadcast to the positions of queries
        and keys or are missing although `parallel` sets `zigzag` or `axis_name`, or an argument of `attention_fn` has a
        shape or value that does not fit.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from flax import nnx
      >>> from jaxsoftmax.flax import attention_fn_with_rope
      >>> query, key, value = jax.random.normal(jax.random.key(0), (3, 2, 8, 2, 16), jnp.float32)
      >>> output = attention_fn_with_rope(query, key, value, rope=nnx.RoPE())
      >>> expected = nnx.dot_product_attention_with_rope(query, key, value, rope=nnx.RoPE())
      >>> bool(jnp.allclose(output, expected, atol=1e-2))  # a GPU may multiply in TF32
      True

      In a module:

      >>> import functools
      >>> rotated = functools.partial(attention_fn_with_rope, rope=nnx.RoPE())
      >>> attention = nnx.MultiHeadAttention(
      ...     2, in_features=16, attention_fn=rotated, decode=False, rngs=nnx.Rngs(0)
      ... )
    """
    arguments.callback(_WITH_ROPE, "rope", rope)
    if input_positions is None:
        _refuse_order(_WITH_ROPE, options.get("parallel"), "without input_positions")
    if input_positions is not None:
        listed = arguments.listed(_WITH_ROPE, "input_positions", input_positions)
        (positions,) = _real(_WITH_ROPE, input_positions=listed)
        input_positions = positions.astype(np.float32)

    query, key = (_rotated(name, array, rope, input_positions) for name, array in (("query", query), ("key", key)))
    return attention_fn(query, key, value, **options)


def _rotated(name, array, rope, positions):
    """Rotates queries or keys by their positions, or by `0, 1, ...` if the positions are None."""
    (array,) = _real(_WITH_ROPE, **{name: array})
    if array.ndim < 3:
        raise ValueError(f"{_WITH_ROPE}: {name} must have at least 3 axes, got shape {array.shape}")
    arrays, signature = [jnp.swapaxes(array, -2, -3)], "(t,h)->(t,r)"
    if positions is not None:
        shape, batch = array.shape[:-2], positions.shape
        pairs = zip(batch[::-1], shape[::-1], strict=False)
        if len(batch) > len(shape) or any(size not in (1, whole) for size, whole in pairs):
            raise ValueError(f"{_WITH_ROPE}: input_positions must broadcast to {shape}, as {name} has, got shape {batch}")
        # The batch, which may be sharded, keeps axes of size 1: `vectorize` repeats positions along them.
        batch = ((1,) * (len(shape) - len(batch)) + batch)[:-1]
        arrays.append(jnp.broadcast_to(positions, (*batch, shape[-1]))[..., None, :])
        signature = "(t,h),(t)->(t,r)"
    return jnp.swapaxes(jnp.vectorize(rope, signature=signature)(*arrays), -2, -3)


def _real(function, **arrays):
    """Returns arguments as arrays, by name. Raises TypeError for complex ones."""
    checked = {name: arguments.array(function, name, array) for name, array in arrays.items()}
    for name, array in checked.items():
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(f"{function}: {name} must be real, got {array.dtype}; only the attention of Flax takes it")
    return checked.values()


def _refuse_order(function, parallel, where):
    """Raises ValueError if tokens are not in the order of their positions, or devices share them."""
    parallel = as_context_parallel(function, parallel)
    for name in ("zigzag", "axis_name"):
        if (option := getattr(parallel, name)) is not None:
            raise ValueError(f"{function}: parallel must have no {name} {where}, got {option!r}")


def _check_functions(einsums, promote_dtype, precision):
    """Checks arguments that are functions: Flax's einsums come in pairs, and without a precision."""
    for name, function in (einsums | {"promote_dtype": promote_dtype}).items():
        if function is not None:
            arguments.callback(_NAME, name, function)
    first, second = sorted(einsums, key=lambda name: einsums[name] is None)
    if einsums[first] is not None and einsums[second] is None:
        raise ValueError(f"{_NAME}: {first} must come with {second}, got no {second}")
    if einsums[first] is not None and precision is not None:
        raise ValueError(f"{_NAME}: precision must be None with einsums of the caller's own, got {precision!r}")


def _weights(query, key, bias, mask, is_causal, einsum, dtype):
    """Returns the weights before dropout, `[*batch, N, T, S]`, and a mask of the keys that queries see; None for all."""
    scores = einsum("...qhd,...khd->...hqk", query / math.sqrt(query.shape[-1]), repeat_heads(key, query.shape[-2]))
    masks = [] if mask is None else [scores_like(_NAME, "mask", mask, scores.shape)]
    if bias is not None:
        bias = scores_like(_NAME, "bias", jnp.asarray(bias), scores.shape).astype(accumulator(scores.dtype))
        scores = scores.astype(bias.dtype) + bias
        masks.append(bias != -jnp.inf)
    if is_causal:
        rows, cols = _positions(scores.shape)
        masks.append(rows >= cols)
    seen = functools.reduce(operator.and_, masks) if masks else None
    return softmax(scores, where=seen, dtype=dtype), seen


def _positions(shape):
    """Returns positions of queries and of keys that broadcast to scores of this shape, in uint32, as dropout takes them."""
    *batch, length, keys = shape
    ones = (1,) * len(batch)
    return lax.iota(np.uint32, length).reshape((*ones, length, 1)), lax.iota(np.uint32, keys).reshape((*ones, 1, keys))


def _dropped(weights, rng, rate, broadcast):
    """Applies dropout to weights: it drops the weights that `dot_product_attention` drops."""
    *batch, heads, _, _ = weights.shape
    seeds = dropout_seeds(_NAME, rng, tuple(batch), heads, broadcast)
    rows, cols = _positions(weights.shape)
    kept = dropout.keep(seeds[..., :1, None], seeds[..., 1:, None], rows, cols, rate)
    return weights * (kept.astype(weights.dtype) / (1 - rate))  # not a select, whose operands must be sharded alike
