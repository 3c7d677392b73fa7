"""Checks of the arguments that `dot_product_attention` and `paged_attention` share.

Each function takes the name of the public function first, which opens the messages of its errors.
"""

import math
import operator
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments, compat
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.attention.context_parallel.settings import ContextParallel

Window = int | tuple[int | None, int | None] | None

DTYPES = ("float16", "bfloat16", "float32", "float64")
BYTES = ("float8_e4m3fn", "int8")  # dtypes of keys and values with a scale


def cache_scales(function, dtype, keys, shape, **scales):
    """Returns the scales of keys and values of 8 bits by the names of the operands, in the accumulator of `dtype`.

    `shape` is the largest shape that a scale may have. Its last axis is that of the heads.
    """
    operands = {}
    if keys.dtype.name not in BYTES:
        for name, scale in scales.items():
            if scale is not None:
                raise TypeError(
                    f"{function}: {name}_scale must be None unless keys and values, or their pages, are of dtype"
                    f" {' or '.join(BYTES)}, got one with {keys.dtype}"
                )
        return operands
    for name, scale in scales.items():
        scale = jnp.ones(shape[-1:]) if scale is None else scale
        array = arguments.array(function, f"{name}_scale", scale, "floating")
        if array.shape not in (shape, shape[-1:]):
            raise ValueError(f"{function}: {name}_scale must have the shape {shape[-1:]} or {shape}, got {array.shape}")
        operands[f"{name}_scale"] = array.astype(accumulator(dtype))
    return operands


def floating_or_bytes(function: str, name: str, value: ArrayLike) -> jax.Array:
    """Returns an array that is floating, or one of the 8-bit dtypes."""
    array = arguments.array(function, name, value)
    hint = "" if name == "query" else f", or of dtype {' or '.join(BYTES)}"
    return array if hint and array.dtype.name in BYTES else arguments.array(function, name, array, "floating", hint)


def queries_keys_values(function: str, **arrays: ArrayLike) -> list[jax.Array]:
    """Returns query, key and value as arrays, whose shapes and dtypes fit each other."""
    query, key, value = checked = [floating_or_bytes(function, name, array) for name, array in arrays.items()]
    if query.dtype.name not in DTYPES:
        raise TypeError(f"{function}: query must be of dtype {', '.join(DTYPES)}, got {query.dtype}")
    axes = "[*batch, T, N, H]", "[*batch, S, K, H]", "[*batch, S, K, Hv]"
    for name, array, expected in zip(arrays, checked, axes, strict=True):
        if array.dtype != query.dtype and array.dtype.name not in BYTES:
            raise TypeError(
                f"{function}: {name} must have the dtype of query, or be of dtype {' or '.join(BYTES)},"
                f" got {array.dtype} and {query.dtype}"
            )
        if array.ndim < 3:
            raise ValueError(f"{function}: {name} must have the axes {expected}, got shape {array.shape}")
        if array.ndim != query.ndim:
            raise ValueError(
                f"{function}: query must have the axes {axes[0]} and {name} {expected},"
                f" got shapes {query.shape} and {array.shape}"
            )
        if array.shape[:-3] != query.shape[:-3]:
            raise ValueError(
                f"{function}: {name} must have the batch axes of query, got shapes {array.shape} and {query.shape}"
            )
        if 0 in array.shape[-2:]:
            raise ValueError(f"{function}: {name} must have heads of at least size 1, got shape {array.shape}")
    if value.dtype != key.dtype:
        raise TypeError(f"{function}: value must have the dtype of key, got {value.dtype} and {key.dtype}")
    if key.shape[-1] != query.shape[-1]:
        raise ValueError(f"{function}: key must have the head size of query, got shapes {key.shape} and {query.shape}")
    if value.shape[-3:-1] != key.shape[-3:-1]:
        raise ValueError(f"{function}: value must have the length and heads of key, got shapes {value.shape} and {key.shape}")
    if query.shape[-2] % key.shape[-2]:
        raise ValueError(
            f"{function}: query must have a multiple of the heads of key, got {query.shape[-2]} and {key.shape[-2]} heads"
            f" in shapes {query.shape} and {key.shape}"
        )
    return checked


def to_int32(array):
    """Casts integers to int32, clipped to its range."""
    if array.dtype.itemsize > 4 or array.dtype == np.uint32:
        limits = np.iinfo(np.int32)
        array = jnp.clip(array, 0 if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else limits.min, limits.max)
    return array.astype(np.int32)


def operands_of_scores(function, bias, mask, sinks, shape, axes="[*batch, N, T, S]"):
    """Returns the bias, mask and sinks that are not None by the names of the operands, for scores of a shape."""
    operands, (*batch, heads, _, _) = {}, shape
    if bias is not None:
        operands["bias"] = scores_like(function, "bias", arguments.array(function, "bias", bias, "floating"), shape, axes)
    if mask is not None:
        mask = arguments.array(function, "mask", mask, "boolean", "; what is added to the scores goes into bias")
        operands["mask"] = scores_like(function, "mask", mask, shape, axes)
    if sinks is not None:
        sinks = array_of_shape(function, "sinks", sinks, "floating", (heads,), "[N]")
        operands["sinks"] = lax.expand_dims(sinks, range(len(batch)))
    return operands


def scores_like(function, name, array, shape, axes="[*batch, N, T, S]"):
    """Returns `array` with all axes of the scores, each in its full size or with size 1."""
    extra = array.ndim - len(shape)
    if extra > 0 and all(size == 1 for size in array.shape[:extra]):  # `jax.nn` takes four axes without a batch too
        array = lax.squeeze(array, range(extra))
    pairs = zip(array.shape[::-1], shape[::-1], strict=False)
    if array.ndim > len(shape) or any(size not in (1, whole) for size, whole in pairs):
        raise ValueError(f"{function}: {name} must broadcast to {axes}, got shape {array.shape} for {shape}")
    return lax.expand_dims(array, range(len(shape) - array.ndim))


def array_of_shape(function, name, value, kind, shape, axes):
    """Returns `value` as an array of this kind of dtype and of this shape."""
    array = arguments.array(function, name, value, kind)
    if array.shape == (1,) and shape == ():  # `jax.nn` takes one axis without a batch too
        array = array.reshape(())
    if array.shape != shape:
        raise ValueError(f"{function}: {name} must have the shape {axes} = {shape}, got {array.shape}")
    return array


def sequence_lengths(function, name, value, batch):
    """Returns lengths as int32."""
    return to_int32(array_of_shape(function, name, arguments.listed(function, name, value), "integers", batch, "[*batch]"))


def segments(function, queries, keys, batch, length, keys_length) -> dict[str, jax.Array]:
    """Returns the segments of queries and of keys, by the names of the operands."""
    if queries is None:
        raise ValueError(f"{function}: key_value_segment_ids must come with query_segment_ids, got no query_segment_ids")
    if keys is None and length != keys_length:
        raise ValueError(
            f"{function}: query_segment_ids must come with key_value_segment_ids unless there are as many keys as queries,"
            f" got {length} queries and {keys_length} keys"
        )
    keys = queries if keys is None else keys
    queries = array_of_shape(function, "query_segment_ids", queries, "integers", (*batch, length), "[*batch, T]")
    keys = array_of_shape(function, "key_value_segment_ids", keys, "integers", (*batch, keys_length), "[*batch, S]")
    if max(queries.dtype.itemsize, keys.dtype.itemsize) <= 4:
        queries, keys = queries.astype(np.int32), keys.astype(np.int32)
    if queries.dtype != keys.dtype:
        raise TypeError(
            f"{function}: key_value_segment_ids must have the dtype of query_segment_ids where one has 64 bits,"
            f" got {keys.dtype} and {queries.dtype}"
        )
    return {"query_segments": queries, "key_segments": keys}


def offset(function, value, batch):
    """Returns an offset as int32, clipped so that its sum with a length fits; one for each batch entry, or one for all."""
    array = arguments.array(function, "query_offset", arguments.listed(function, "query_offset", value), "integers")
    if array.shape not in ((), batch):
        raise ValueError(f"{function}: query_offset must be one number or have the shape [*batch] = {batch}, got {array.shape}")
    if array.dtype.itemsize >= 4:
        array = jnp.minimum(array, 2**29)
        array = array if jnp.issubdtype(array.dtype, jnp.unsignedinteger) else jnp.maximum(array, -(2**29))
    return array.astype(np.int32).reshape(array.shape or (1,) * len(batch))


def scaled(function, query, scale) -> tuple[jax.Array, float]:
    """Returns the query and a concrete scale. A traced scale multiplies the query, which is rounded once, and gives 1."""
    kind = accumulator(query.dtype)
    if scale is None:
        return query, 1 / math.sqrt(query.shape[-1])
    if not isinstance(scale, jax.core.Tracer):
        number, limits = arguments.number(function, "scale", scale), jnp.finfo(kind)
        if not abs(number) <= float(limits.max):
            raise ValueError(f"{function}: scale must be finite in {limits.dtype}, got {number}")
        return query, number
    scale = arguments.array(function, "scale", scale)
    if scale.shape != () or not (jnp.issubdtype(scale.dtype, jnp.floating) or jnp.issubdtype(scale.dtype, jnp.integer)):
        raise TypeError(f"{function}: scale must be a real number, got {arguments.shown(scale)}")
    return (query.astype(kind) * scale.astype(kind)).astype(query.dtype), 1.0


_PRECISIONS = ("default", "high", "highest", "bfloat16", "tensorfloat32", "float32")  # names of jax.lax.Precision

_MORE_THAN_THREE_PRODUCTS = {  # precisions that take more than three bfloat16 products
    lax.Precision.HIGHEST,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
    lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    lax.DotAlgorithmPreset.F32_F32_F32,
    lax.DotAlgorithmPreset.F64_F64_F64,
}


def precision(function: str, value: Any) -> Literal["high", "highest"]:
    """Returns "highest" if float32 products must be exact, "high" if three bfloat16 products may replace each."""
    if value is None:
        value = jax.config.jax_default_matmul_precision
    if isinstance(value, lax.DotAlgorithm):  # a custom algorithm may be exact
        return "highest"
    several = isinstance(value, tuple | list)
    precisions = [_one_precision(function, one) for one in (value if several else [value])]
    if several and not (len(precisions) == 2 and all(isinstance(one, lax.Precision) for one in precisions)):
        raise ValueError(f"{function}: several precisions must be two of jax.lax.Precision, got {arguments.shown(value)}")
    return "highest" if any(one in _MORE_THAN_THREE_PRODUCTS for one in precisions) else "high"


def _one_precision(function, value):
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


def dropout_rate(function: str, value: float, deterministic: bool) -> float:
    """Checks `dropout_rate`. Returns it, or 0 if dropout is off."""
    rate = arguments.number(function, "dropout_rate", value)
    if not 0 <= rate < 1:
        raise ValueError(f"{function}: dropout_rate must be in [0, 1), got {rate}")
    return 0.0 if deterministic else rate


def dropout_seeds(
    function: str, dropout_rng: jax.Array | None, batch: tuple[int, ...], heads: int, broadcast: bool
) -> jax.Array:
    """Returns the seeds of dropout, uint32 `[*batch, N, 2]`; all are equal if `broadcast`."""
    if dropout_rng is None:
        raise ValueError(f"{function}: dropout_rng must be a key where dropout_rate is above 0, got None")
    key, shape = arguments.random_key(function, "dropout_rng", dropout_rng), (*batch, heads, 2)
    seeds = jax.random.bits(key, (2,) if broadcast else shape, np.uint32)
    return jnp.broadcast_to(seeds, shape)


def xla_is_deterministic() -> bool:
    """Returns True if XLA_FLAGS asks for GPU programs that give the same bits in every run.

    It is read while tracing, which does not know the `compiler_options` of `jax.jit`.
    """
    flags = compat.xla_flags()
    names = ("xla_gpu_deterministic_ops", "xla_gpu_exclude_nondeterministic_ops")
    return any(flags.get(name, "").lower() in ("true", "1") for name in names)


def window(function, value, is_causal, length, keys, is_offset) -> tuple[int | None, int | None]:
    """Returns the numbers of keys before and after its own position that a query sees; None for a side without a limit."""
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
    """Returns the limit of a window on one side, or None if it excludes no key of a sequence of this length."""
    if side is None or (isinstance(length, int) and side >= length - 1):
        return None
    return min(side, 2**30)  # positions have 32 bits, and no sequence is longer


def sequence_params(function: str, parallel: ContextParallel, lengths) -> dict[str, Any]:
    """Returns the parameters of the primitive that `parallel` sets, for these numbers of queries and keys."""
    n = parallel.zigzag
    if n is not None and any(length % (2 * n) for length in lengths):
        raise ValueError(
            f"{function}: parallel.zigzag must divide half of the numbers of queries and of keys, got {n} with"
            f" {lengths[0]} queries and {lengths[1]} keys"
        )
    params = {"strategy": parallel.strategy, "zigzag": n}
    return {name: param for name, param in params.items() if param is not None}
