"""Attention for Flax: what modules of linen and nnx take as `attention_fn`.

`import jaxsoftmax` leaves this module alone, so Flax is imported by those who import this one.
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
from jaxsoftmax.ops.attention import _dropout as dropout
from jaxsoftmax.ops.attention.api import dot_product_attention, of_every_head
from jaxsoftmax.ops.attention.checks import DTYPES, dropout_seeds, scores_like
from jaxsoftmax.ops.attention.parallel import ContextParallel, as_context_parallel
from jaxsoftmax.ops.softmax.api import softmax

__all__ = ["attention_fn", "attention_fn_with_rope"]

_NAME = "attention_fn"
_WITH_ROPE = "attention_fn_with_rope"


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
    parallel: ContextParallel | None = None,
) -> jax.Array:
    """Attention with the arguments of `flax.linen.dot_product_attention` and of `flax.nnx.dot_product_attention`.

    The attention modules of both take it as `attention_fn`. It runs as `jaxsoftmax.dot_product_attention` does: the kernels are
    the same, the derivatives, and the names under `jax.checkpoint`. Other than in Flax, a query that sees no key gives 0
    unless `fully_masked_rows` is `"mean"`, and softmax is computed in float32 or wider, whatever the dtype.

    `is_causal` and a mask go together: a query sees what neither rules out. The kernels skip whole blocks of keys before the
    first and behind the last that any query of a block sees, if the mask is the same for all heads, as Flax's are.

    Args:
      query: `[*batch, T, N, H]`, with any number of batch axes or none.
      key: `[*batch, S, K, H]`. N is a multiple of K: each key head serves N / K query heads that follow one another.
      value: `[*batch, S, K, Hv]`.
      bias: as `jaxsoftmax.dot_product_attention` takes it.
      mask: boolean or numbers, broadcast to `[*batch, N, T, S]`: a query sees the keys where it is not 0.
      broadcast_dropout: whether the same weights are dropped in all heads and all of the batch.
      dropout_rng: a key of `jax.random`; the same key drops the same weights, though other ones than Flax's own attention.
      dropout_rate: as `jaxsoftmax.dot_product_attention` takes it.
      deterministic: True if no weight is dropped; concrete. It says nothing of gradients.
      dtype: to which query, key and value are cast, and that of the computation; None for the one to which theirs promote:
        float16, bfloat16, float32 or float64.
      precision: as `jaxsoftmax.dot_product_attention` takes it.
      module: a module of linen or nnx that sows the weights, `[*batch, N, T, S]`, before dropout, as `"attention_weights"` of
        its intermediates. The output is the same with and without them.
      force_fp32_for_softmax: whether sown weights and the output, which has been rounded to `dtype`, are float32 where that is
        narrower, as in Flax.
      einsum_dot_general: must be None. Products of the caller's own are what the two einsums make.
      qk_attn_weights_einsum: makes the scores in place of `jnp.einsum`. All weights are in memory then, and no kernel
        of attention runs.
      attn_weights_value_einsum: makes the output of weights and values; both or none.
      promote_dtype: a function of `(query, key, value)` and `dtype=` that returns the three of one dtype; None for Flax's.
      is_causal: whether a query sees no key after its own position, both counted from 0. No mask is in memory then. nnx
        passes it; in linen, `functools.partial(attention_fn, is_causal=True)` says so, but never with `decode=True`: there
        each query is the only one of its call, so that its position would be 0.
      fully_masked_rows: as for `jaxsoftmax.dot_product_attention`; modules take `functools.partial(attention_fn, ...)`.
      parallel: as for `jaxsoftmax.dot_product_attention`. Where weights are sown or einsums are the caller's own, it may have
        neither `zigzag` nor `axis_name`.

    Returns:
      `[*batch, T, N, Hv]` in the dtype of the computation, or float32 as `force_fp32_for_softmax` says.

    Raises:
      TypeError: an argument is of the wrong type or dtype, complex, or traced although it must be concrete.
      ValueError: an argument has a shape or a value that does not fit; one einsum without the other, or with `precision`;
        weights or einsums with `zigzag` or `axis_name` in `parallel`.
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
        if (found := arguments.dtype(_NAME, "dtype", dtype, allowed)).name not in DTYPES:
            raise TypeError(f"{_NAME}: dtype must be {allowed}, got {found}")
    promoted = promote_dtype or (lambda arrays, dtype: dtypes.promote_dtype(*arrays, dtype=dtype))
    query, key, value = promoted((query, key, value), dtype=dtype)
    if mask is not None and (mask := arguments.array(_NAME, "mask", mask)).dtype != np.bool_:
        mask = mask != 0  # Flax makes masks of float32
    rate = 0.0 if deterministic else dropout_rate
    result_dtype = jnp.float32 if force_fp32_for_softmax and query.dtype.itemsize < 4 else query.dtype
    attend = functools.partial(
        dot_product_attention,
        *(query, key, value, bias, mask),
        is_causal=is_causal,
        dropout_rate=rate,
        dropout_rng=dropout_rng,
        broadcast_dropout=broadcast_dropout,
        precision=precision,
        fully_masked_rows=fully_masked_rows,
        parallel=parallel,
    )
    if module is None and qk_attn_weights_einsum is None:
        return attend().astype(result_dtype)
    _refuse_order(_NAME, parallel, "where weights are in memory")
    jax.eval_shape(attend)  # checks the arguments
    einsum = qk_attn_weights_einsum or functools.partial(
        jnp.einsum, precision=precision, preferred_element_type=accumulator(query.dtype)
    )
    weights, seen = _weights(query, key, bias, mask, is_causal, einsum, result_dtype)
    equal = None
    if fully_masked_rows == "mean" and seen is not None and weights.shape[-1] != 0:
        equal = ~jnp.any(seen, -1, keepdims=True)
        weights = jnp.where(equal, 1 / weights.shape[-1], weights)
    if module is not None:
        module.sow("intermediates", "attention_weights", weights)
    if attn_weights_value_einsum is None:
        return attend().astype(result_dtype)
    if rate:
        dropped = _dropped(weights, dropout_rng, rate, broadcast_dropout)
        weights = dropped if equal is None else jnp.where(equal, weights, dropped)
    return attn_weights_value_einsum("...hqk,...khd->...qhd", weights, of_every_head(value, query.shape[-2]))


def attention_fn_with_rope(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    *,
    rope: Callable[..., jax.Array],
    input_positions: ArrayLike | None = None,
    **options: Any,
) -> jax.Array:
    """`attention_fn` of queries and keys that are rotated by their positions: `flax.nnx.dot_product_attention_with_rope`.

    Modules take `functools.partial(attention_fn_with_rope, rope=rope)` as `attention_fn`.

    Args:
      query: `[*batch, T, N, H]`.
      key: `[*batch, S, K, H]`.
      value: `[*batch, S, K, Hv]`.
      rope: rotates `[T, H]` by positions `[T]`, or by `0, ..., T - 1` where there are none: a `flax.nnx.RoPE`.
      input_positions: numbers, broadcast to `[*batch, T]` and to `[*batch, S]`, so that T and S are the same. They must be
        there, in the order of the tokens, if `parallel` has a `zigzag` or an `axis_name`.
      **options: what else `attention_fn` takes.

    Returns and raises what `attention_fn` does; TypeError and ValueError of positions too.
    """
    arguments.callback(_WITH_ROPE, "rope", rope)
    if input_positions is None:
        _refuse_order(_WITH_ROPE, options.get("parallel"), "without input_positions")
    if input_positions is not None:
        listed = arguments.listed(_WITH_ROPE, "input_positions", input_positions)
        (found,) = _real(_WITH_ROPE, input_positions=listed)
        input_positions = found.astype(np.float32)

    def rotated(name, array):
        (array,) = _real(_WITH_ROPE, **{name: array})
        if array.ndim < 3:
            raise ValueError(f"{_WITH_ROPE}: {name} must have at least 3 axes, got shape {array.shape}")
        arrays, signature = [jnp.swapaxes(array, -2, -3)], "(t,h)->(t,r)"
        if input_positions is not None:
            shape, own = array.shape[:-2], input_positions.shape
            if len(own) > len(shape) or any(a not in (1, b) for a, b in zip(own[::-1], shape[::-1], strict=False)):
                raise ValueError(f"{_WITH_ROPE}: input_positions must broadcast to {shape}, as {name} has, got shape {own}")
            # Axes of size 1 for the batch, which may be sharded: `vectorize` repeats positions along them.
            entries = ((1,) * (len(shape) - len(own)) + own)[:-1]
            arrays.append(jnp.broadcast_to(input_positions, (*entries, shape[-1]))[..., None, :])
            signature = "(t,h),(t)->(t,r)"
        return jnp.swapaxes(jnp.vectorize(rope, signature=signature)(*arrays), -2, -3)

    return attention_fn(rotated("query", query), rotated("key", key), value, **options)


def _real(function, **arrays):
    """Arrays that are not complex, by the names of their arguments."""
    found = {name: arguments.array(function, name, array) for name, array in arrays.items()}
    for name, array in found.items():
        if jnp.issubdtype(array.dtype, jnp.complexfloating):
            raise TypeError(f"{function}: {name} must be real, got {array.dtype}; only the attention of Flax takes it")
    return found.values()


def _refuse_order(function, parallel, where):
    """Raises ValueError if tokens are in another order than their positions, or here are a part of them."""
    parallel = as_context_parallel(function, parallel)
    for name in ("zigzag", "axis_name"):
        if (option := getattr(parallel, name)) is not None:
            raise ValueError(f"{function}: parallel must have no {name} {where}, got {option!r}")


def _check_functions(einsums, promote_dtype, precision):
    for name, function in (einsums | {"promote_dtype": promote_dtype}).items():
        if function is not None:
            arguments.callback(_NAME, name, function)
    given, missing = sorted(einsums, key=lambda name: einsums[name] is None)
    if einsums[given] is not None and einsums[missing] is None:
        raise ValueError(f"{_NAME}: {given} must come with {missing}, got no {missing}")
    if einsums[given] is not None and precision is not None:
        raise ValueError(f"{_NAME}: precision must be None with einsums of the caller's own, got {precision!r}")


def _weights(query, key, bias, mask, is_causal, einsum, dtype):
    """The weights of all heads before dropout, `[*batch, N, T, S]`, of what Flax makes scores of; and which keys are seen."""
    scores = einsum("...qhd,...khd->...hqk", query / math.sqrt(query.shape[-1]), of_every_head(key, query.shape[-2]))
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
    """Of queries and of keys, to be broadcast to scores of this shape; uint32, as dropout counts."""
    *batch, length, keys = shape
    ones = (1,) * len(batch)
    return lax.iota(np.uint32, length).reshape((*ones, length, 1)), lax.iota(np.uint32, keys).reshape((*ones, 1, keys))


def _dropped(weights, rng, rate, broadcast):
    """The weights after dropout, the same ones as those of `dot_product_attention`."""
    *batch, heads, _, _ = weights.shape
    seeds = dropout_seeds(_NAME, rng, tuple(batch), heads, broadcast)
    rows, cols = _positions(weights.shape)
    kept = dropout.keep(seeds[..., :1, None], seeds[..., 1:, None], rows, cols, rate)
    return weights * (kept.astype(weights.dtype) / (1 - rate))  # a product may be of arrays that are sharded in different ways
