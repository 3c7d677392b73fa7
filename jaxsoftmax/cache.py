"""Caches of keys and values for decoding: attention to pages, writing pages, and keys and values in 8 bits."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from jaxsoftmax._core import arguments, sharding
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.attention import checks, primitive, score_functions
from jaxsoftmax.ops.attention.implementations import ATTENTION_FAMILY

if TYPE_CHECKING:
    from jaxsoftmax.ops.options import PagedOptions

__all__ = ["paged_attention", "quantize", "update_pages"]


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_lse: Literal[False] = False,
    **options: "Unpack[PagedOptions]",
) -> jax.Array: ...


@overload
def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_lse: Literal[True],
    **options: "Unpack[PagedOptions]",
) -> tuple[jax.Array, jax.Array]: ...


def paged_attention(
    query: ArrayLike,
    key_pages: ArrayLike,
    value_pages: ArrayLike,
    page_table: ArrayLike,
    key_value_seq_lengths: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    local_window_size: checks.Window = None,
    query_offset: ArrayLike | None = None,
    logits_soft_cap: float | None = None,
    sinks: ArrayLike | None = None,
    key_scale: ArrayLike | None = None,
    value_scale: ArrayLike | None = None,
    score_mod: Callable[..., Any] | None = None,
    mask_mod: Callable[..., Any] | None = None,
    implementation: str | None = None,
    precision: lax.PrecisionLike = None,
    return_lse: bool = False,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes attention to a cache of keys and values in pages, which a page table puts in order for each sequence.

    Sequences of any lengths share the pages, as in vLLM and FlashInfer. Key `i` of a sequence is `i % page` of the page
    `page_table[..., i // page]`. The result is that of `jaxsoftmax.dot_product_attention` with `key` of
    `key_pages[page_table]`, its first two axes of pages and keys flattened, `value` likewise, and the same
    `key_value_seq_lengths`.

    On Hopper a kernel reads pages of 8, 16, ..., 256 keys where they are, for up to 64 queries in 16 bits. In other cases, and
    in derivatives, the keys and values of whole page tables are gathered first, which takes memory for them.

    Args:
      query: `[*batch, T, N, H]`, float16, bfloat16, float32 or float64: the T newest tokens of each sequence.
      key_pages: `[pages, page, K, H]`: pages of `page` keys each, shared by all sequences; in the dtype of `query`, or in
        float8_e4m3fn or int8.
      value_pages: `[pages, page, K, Hv]`, in the dtype of `key_pages`.
      page_table: integers `[*batch, M]`, the pages of each sequence in order. Entries after the last key have no effect, so no
        number needs to stand for "no page". An entry that is negative or too large counts as the first or the last page, and
        nothing outside the pages is read. (`update_pages` writes nothing there.)
      key_value_seq_lengths: integers `[*batch]`, the number of keys of each sequence, new ones included. Clipped to 0 and
        `M * page`.
      bias: floating, broadcast to `[*batch, N, T, M * page]`; added to the scores.
      mask: boolean, broadcast to `[*batch, N, T, M * page]`; True where a query sees a key.
      scale: number that multiplies the products; None for `1 / sqrt(H)`. It may be traced.
      is_causal: True if a query sees no key after its own position.
      local_window_size: `(left, right)`, the number of keys before and after its own position that a query sees; None in either
        place for all of them; one number for both.
      query_offset: integers `[*batch]`, or one for all: the position of the first query. None for `key_value_seq_lengths - T`:
        the queries are the last tokens. With `is_causal`, a query before position 0 sees nothing.
      logits_soft_cap: positive concrete number; scores become `cap * tanh(score / cap)` before `bias` is added.
      sinks: floating `[N]`, an extra score of each head that adds to the denominator and has no value.
      key_scale: floating `[K]` or `[pages, K]`, for pages in float8_e4m3fn or int8: an element stands for itself times the
        scale. None for 1. With scales for each page, kernels and derivatives round the products to the dtype of `query`.
      value_scale: the same for values.
      score_mod: function `score_mod(score, batch, head, query_index, key_index)` that returns the score to use, as for
        `jaxsoftmax.dot_product_attention`. `key_index` counts the keys of a sequence, and `query_index` queries from
        `query_offset`.
      mask_mod: function `mask_mod(batch, head, query_index, key_index)` that returns a bool, True where the query sees the key.
      implementation: None for the best implementation for this platform, GPU, shape and dtype; or its name.
      precision: precision of products of float32 operands, as for `jaxsoftmax.dot_product_attention`.
      return_lse: True to return the log-sum-exp too.

    Returns:
      The output, `[*batch, T, N, Hv]` in the dtype of `query`; with `return_lse` a pair of the output and the log-sum-exp,
      `[*batch, T, N]` in float32 (float64 for float64 operands), `-inf` where a query sees nothing. A query that sees nothing
      gives 0.

    Raises:
      TypeError: an argument has the wrong type or dtype, or is traced although it must be concrete.
      ValueError: an argument has a shape or a value that does not fit, or `implementation` or `precision` does not exist.
      NotImplementedError: `implementation` cannot run this call; the message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> pages = jax.random.normal(jax.random.key(0), (2, 4, 8, 2, 16))  # 4 pages of 8 keys, 2 heads
      >>> key_pages, value_pages = pages
      >>> query = jax.random.normal(jax.random.key(1), (2, 1, 4, 16))  # 2 sequences, 1 new token, 4 heads
      >>> page_table = jnp.array([[3, 1], [0, 0]])  # sequence 0 is on pages 3 and 1, sequence 1 on page 0
      >>> lengths = jnp.array([11, 5])
      >>> out = jaxsoftmax.cache.paged_attention(query, key_pages, value_pages, page_table, lengths)
      >>> key, value = (pages[page_table].reshape(2, 16, 2, 16) for pages in (key_pages, value_pages))
      >>> expected = jaxsoftmax.dot_product_attention(query, key, value, key_value_seq_lengths=lengths)
      >>> out.shape, bool(jnp.allclose(out, expected, atol=1e-2))
      ((2, 1, 4, 16), True)

    Source: Kwon et al. 2023, arXiv:2309.06180.
    """
    name = "paged_attention"
    check_implementation(ATTENTION_FAMILY, name, implementation)
    is_causal, return_lse = arguments.flags(name, is_causal=is_causal, return_lse=return_lse)
    query = arguments.array(name, "query", query, "floating")
    if query.dtype.name not in checks.DTYPES:
        raise TypeError(f"{name}: query must be of dtype {', '.join(checks.DTYPES)}, got {query.dtype}")
    if query.ndim < 3 or 0 in query.shape[-2:]:
        raise ValueError(f"{name}: query must have the axes [*batch, T, N, H] with heads of at least size 1, got {query.shape}")
    query, scale = checks.scaled(name, query, scale)
    batch, (length, heads, size) = query.shape[:-3], query.shape[-3:]
    key_pages, value_pages = _checked_pages(name, key_pages=key_pages, value_pages=value_pages)
    if key_pages.dtype != query.dtype and key_pages.dtype.name not in checks.BYTES:
        raise TypeError(
            f"{name}: key_pages must have the dtype of query or one of {', '.join(checks.BYTES)},"
            f" got {key_pages.dtype} and {query.dtype}"
        )
    if key_pages.shape[-1] != size or heads % key_pages.shape[-2]:
        raise ValueError(
            f"{name}: key_pages must have the head size of query, and a number of heads that divides that of query,"
            f" got shapes {key_pages.shape} and {query.shape}"
        )
    table = _checked_table(name, page_table, batch, query=query.shape)
    keys = table.shape[-1] * key_pages.shape[-3]
    lengths = checks.sequence_lengths(name, "key_value_seq_lengths", key_value_seq_lengths, batch)
    operands = {"query": query, "page_table": table, "key_lengths": lengths}
    ones = (1,) * len(batch)
    operands |= {
        "key_pages": key_pages.reshape(*ones, *key_pages.shape),
        "value_pages": value_pages.reshape(*ones, *value_pages.shape),
    }
    scales = checks.cache_scales(
        name, query.dtype, key_pages, (key_pages.shape[0], key_pages.shape[2]), key=key_scale, value=value_scale
    )
    for operand, array in scales.items():
        operand = operand if array.ndim == 1 else operand.replace("_", "_page_")
        operands[operand] = lax.expand_dims(array, range(len(batch)))
    operands |= checks.operands_of_scores(name, bias, mask, sinks, (*batch, heads, length, keys), "[*batch, N, T, M * page]")
    window = checks.window(name, local_window_size, is_causal, length, keys, True)
    if query_offset is not None:
        query_offset = checks.offset(name, query_offset, batch)
    functions, arrays = score_functions.functions_and_operands(
        name, accumulator(query.dtype), score_mod, mask_mod, (*batch, heads)
    )
    operands |= arrays
    if window != (None, None) or functions:
        operands["query_offset"] = jnp.clip(lengths, 0, keys) - length if query_offset is None else query_offset
    out, *lse = bind(
        primitive.PAGED,
        operands,
        return_lse=return_lse,
        scale=scale,
        window=window,
        soft_cap=None if logits_soft_cap is None else arguments.soft_cap(name, logits_soft_cap, accumulator(query.dtype)),
        precision=checks.precision(name, precision),
        deterministic_gradients=checks.xla_is_deterministic(),
        implementation=implementation,
        **functions,
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
    """Writes the keys and values of new tokens into pages, in place where the pages are donated.

    Under `jax.jit(..., donate_argnums=...)`, or in a loop that carries the pages, only the new tokens are written. Pages may be
    sharded by heads. Sequences that are sharded need pages of their own, inside a `jax.shard_map`.

    Args:
      key_pages: `[pages, page, K, H]`, floating or int8.
      value_pages: `[pages, page, K, Hv]`, in the dtype of `key_pages`.
      key: floating `[*batch, T, K, H]`, the T new tokens of each sequence. They are cast to the dtype of the pages. For pages
        in 8 bits they are divided by the scale and rounded as `quantize` does.
      value: floating `[*batch, T, K, Hv]`.
      page_table: integers `[*batch, M]`, the pages of each sequence in order, as for `paged_attention`.
      positions: integers `[*batch]`, the position of the first new token of each sequence: the number of keys that it had.
      key_scale: floating `[K]` or `[pages, K]`, for pages in float8_e4m3fn or int8, as for `paged_attention`. None for 1 in
        float8_e4m3fn. int8 holds whole numbers and needs a scale.
      value_scale: the same for values.

    Returns:
      The two arrays of pages. A token is left out if its position is negative or at least `M * page`, or if its page does not
      exist. If two tokens have the same place, one of them is written.

    Raises:
      TypeError: an argument is no array of the right kind.
      ValueError: an argument has a shape that does not fit, or pages of int8 come without scales.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> pages = jnp.zeros((4, 8, 2, 16))  # 4 pages of 8 tokens, 2 heads of size 16
      >>> new = jnp.ones((1, 3, 2, 16))  # 3 new tokens of one sequence, which has 6 tokens already
      >>> page_table, positions = jnp.array([[2, 0]]), jnp.array([6])
      >>> key_pages, value_pages = jaxsoftmax.cache.update_pages(
      ...     pages, pages, new, new, page_table, positions
      ... )
      >>> [(int(page), int(slot)) for page, slot in zip(*jnp.nonzero(key_pages[:, :, 0, 0]))]
      [(0, 0), (2, 6), (2, 7)]
    """
    name = "update_pages"
    key_pages, value_pages = _checked_pages(name, key_pages=key_pages, value_pages=value_pages)
    key, value = (arguments.array(name, which, array, "floating") for which, array in (("key", key), ("value", value)))
    n_pages, page_size = key_pages.shape[:2]
    for which, scale in (("key", key_scale), ("value", value_scale)):
        if scale is None and key_pages.dtype == jnp.int8:
            raise ValueError(f"{name}: {which}_scale must be given for pages of int8, which hold whole numbers, got None")
    for which, array, pages in (("key", key, key_pages), ("value", value, value_pages)):
        if array.ndim < 3 or array.shape[-2:] != pages.shape[-2:]:
            raise ValueError(f"{name}: {which} must have the axes [*batch, T, *{pages.shape[-2:]}], got shape {array.shape}")
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"{name}: value must have as many tokens as key, got shapes {value.shape} and {key.shape}")
    batch, length = key.shape[:-3], key.shape[-3]
    table = _checked_table(name, page_table, batch, key=key.shape)
    first = checks.sequence_lengths(name, "positions", positions, batch)
    scales = checks.cache_scales(name, key.dtype, key_pages, (n_pages, key.shape[-2]), key=key_scale, value=value_scale)
    # Pages are whole except along heads. On explicit mesh axes the new tokens are sharded like the pages.
    batch_axes, page_axes = (None,) * len(batch), (None, "heads", None)
    arrays = [key_pages, value_pages, key, value, table, first, *scales.values()]
    axes = [(None, *page_axes)] * 2 + [(*batch_axes, *page_axes)] * 2 + [(*batch_axes, None), batch_axes]
    axes += [(*(None,) * (scale.ndim - 1), "heads") for scale in scales.values()]
    key_pages, value_pages, key, value, table, first, *placed_scales = sharding.placed_alike(arrays, axes)
    scales = dict(zip(scales, placed_scales, strict=True))
    token_positions = first[..., None] + lax.broadcasted_iota(np.int32, (*batch, length), len(batch))
    is_inside = (token_positions >= 0) & (token_positions < table.shape[-1] * page_size)
    index = jnp.where(is_inside, token_positions // page_size, 0)
    pages = jnp.take_along_axis(table, index, -1) if table.shape[-1] else jnp.zeros_like(token_positions)
    pages = jnp.where(is_inside & (pages >= 0), pages, n_pages)  # page `n_pages` does not exist: such updates are dropped
    places = pages, token_positions % page_size
    key_pages = _write(key_pages, places, key, scales.get("key_scale"))
    return key_pages, _write(value_pages, places, value, scales.get("value_scale"))


def _write(pages, places, tokens, scale):
    """Writes tokens to places in pages: pairs of a page and a position in it. A `scale` is that of heads, or of pages too."""
    if scale is not None:
        scale = scale if scale.ndim == 1 else scale[jnp.minimum(places[0], len(pages) - 1)]
        tokens = _quantized(tokens, scale, pages.dtype)
    return pages.at[places].set(tokens.astype(pages.dtype), mode="drop")


def quantize(x: ArrayLike, scale: ArrayLike, dtype: DTypeLike) -> jax.Array:
    """Divides `x` by `scale` and rounds it to 8 bits, for keys and values of a cache.

    The result times `scale` is about `x`. For heads whose largest absolute value is `top`, the scale is `top / 448` in
    float8_e4m3fn and `top / 127` in int8.

    Args:
      x: floating `[..., heads, size]`.
      scale: floating, broadcast to `[..., heads]`: positive and not subnormal. Where it is 0, the result has no meaning, and
        attention multiplies it by 0.
      dtype: float8_e4m3fn or int8.

    Returns:
      `x / scale`, rounded to the nearest number of `dtype` and clipped to -448 and 448, or to -127 and 127. NaN stays NaN in
      float8_e4m3fn and becomes 0 in int8. Only float8_e4m3fn has a gradient.

    Raises:
      TypeError: an argument has the wrong type or dtype.
      ValueError: `scale` does not broadcast to the shape of `x` without its last axis.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> key = jax.random.normal(jax.random.key(0), (64, 2, 16))  # tokens, heads, head size
      >>> scale = jnp.max(jnp.abs(key), (0, 2)) / 127
      >>> small = jaxsoftmax.cache.quantize(key, scale, "int8")
      >>> small.dtype, bool(jnp.all(jnp.abs(small * scale[:, None] - key) <= 0.5001 * scale[:, None]))
      (dtype('int8'), True)
    """
    x, scale = (arguments.array("quantize", name, array, "floating") for name, array in (("x", x), ("scale", scale)))
    kind = arguments.dtype("quantize", "dtype", dtype, " or ".join(checks.BYTES))
    if kind.name not in checks.BYTES:
        raise TypeError(f"quantize: dtype must be {' or '.join(checks.BYTES)}, got {kind}")
    if x.ndim == 0:
        raise ValueError("quantize: x must have the axes [..., heads, size], got shape ()")
    rows = x.shape[:-1]
    pairs = zip(scale.shape[::-1], rows[::-1], strict=False)
    if len(scale.shape) > len(rows) or any(size not in (1, whole) for size, whole in pairs):
        raise ValueError(f"quantize: scale must broadcast to the shape of x without its last axis, {rows}, got {scale.shape}")
    return _quantized(x, scale, kind)


def _quantized(x, scale, dtype):
    """Computes `quantize` without checks."""
    wide = jnp.promote_types(accumulator(x.dtype), scale.dtype)
    scale = jnp.where(scale == 0, 1, scale).astype(wide)[..., None]
    x = x.astype(wide) / lax.expand_dims(scale, range(x.ndim - scale.ndim))
    if dtype == jnp.int8:
        return jnp.clip(jnp.round(jnp.where(jnp.isnan(x), 0, x)), -127, 127).astype(dtype)
    top = float(jnp.finfo(dtype).max)
    return jnp.clip(x, -top, top).astype(dtype)


def _checked_pages(function: str, **arrays: ArrayLike) -> list[jax.Array]:
    """Returns pages of keys and of values as arrays, whose shapes and dtypes fit each other, from arguments by name."""
    keys, values = pages = [checks.floating_or_bytes(function, name, array) for name, array in arrays.items()]
    for name, array in zip(arrays, pages, strict=True):
        if array.ndim != 4 or 0 in array.shape:
            raise ValueError(f"{function}: {name} must be [pages, page, heads, size], none of them 0, got shape {array.shape}")
    if values.dtype != keys.dtype:
        raise TypeError(f"{function}: value_pages must have the dtype of key_pages, got {values.dtype} and {keys.dtype}")
    if values.shape[:-1] != keys.shape[:-1]:
        what = f"got shapes {values.shape} and {keys.shape}"
        raise ValueError(f"{function}: value_pages must have the pages, page size and heads of key_pages, {what}")
    return pages


def _checked_table(function: str, value: ArrayLike, batch: tuple[int, ...], **shapes: tuple[int, ...]) -> jax.Array:
    """Returns a page table, int32 `[*batch, M]`. `shapes` has the name and the shape of the array that has the batch."""
    table = arguments.array(function, "page_table", arguments.listed(function, "page_table", value), "integers")
    if table.ndim != len(batch) + 1:
        ((name, shape),) = shapes.items()
        raise ValueError(
            f"{function}: {name} must have the axes [*batch, tokens, heads, size], also for one token, and page_table"
            f" [*batch, M], got shapes {shape} and {table.shape}"
        )
    if table.shape[:-1] != batch:
        raise ValueError(f"{function}: page_table must have the shape [*batch, M] with the batch {batch}, got {table.shape}")
    return checks.to_int32(table)
