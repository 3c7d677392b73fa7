"""The cells of decoding: attention of one query, or a few, for each sequence, to the keys of a cache.

The shape is that of the queries, `[batch, queries, heads, size]`. `bytes` are those of keys and values, as many as lengths
say: what a step cannot do without reading. `flops` are those of both products. A sequence, and the heads of a key head,
are checked.
"""

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from benchmarks.cells import OURS, Cell, Contender, library
from benchmarks.softmax import ELEMENTS, copy_cell
from jaxsoftmax import online
from tests.support.attention import oracle

CHUNK = 512  # queries of a part of a prompt
BYTES = ("float8_e4m3fn", "int8")
SCALE = {"float8_e4m3fn": 4 / 448, "int8": 4 / 127}  # of standard normals, of which a few are beyond


@dataclass(frozen=True)
class Step:
    """What a cell computes.

    Attributes:
      batch, queries, heads, key_heads, keys, head_size: the sizes.
      ragged: whether sequences have different lengths, from 1 to all keys.
      causal: whether the queries are the last ones of each sequence, and see no key behind their own.
      page: how many keys a page has, or 0 where keys are one array. Pages are in any order.
      cache: the dtype of keys and values if it has 8 bits, with a scale for each head; else empty.
      filled: of how many keys a mask says that they are there, as that of a module of Flax does, or 0.
      prefix: how many keys more, before these, all sequences share. `with_prefix` is attention to both.
      dtype: of the operands.
    """

    batch: int
    keys: int
    queries: int = 1
    heads: int = 32
    key_heads: int = 8
    head_size: int = 128
    ragged: bool = False
    causal: bool = False
    page: int = 0
    cache: str = ""
    filled: int = 0
    prefix: int = 0
    dtype: str = "bfloat16"

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """The shapes of query, key and value, in pages or not, and of a prefix."""
        of_head = self.key_heads, self.head_size
        of_keys = (self.batch, self.keys, *of_head)
        if self.page:
            of_keys = (self.batch * self.keys // self.page, self.page, *of_head)
        prefix = [(self.prefix, *of_head)] * 2 if self.prefix else []
        return [(self.batch, self.queries, self.heads, self.head_size), of_keys, of_keys, *prefix]

    @property
    def options(self) -> str:
        words = {
            "cache": self.cache,
            "causal": self.causal,
            "filled": self.filled,
            "keys": self.keys,
            "kv_heads": self.key_heads,
        }
        words |= {"page": self.page, "prefix": self.prefix, "ragged": self.ragged}
        return " ".join(f"{name}={value if name == 'cache' else int(value)}" for name, value in words.items() if value)

    @property
    def lengths(self) -> np.ndarray:
        """How many keys each sequence has."""
        if not self.ragged:
            return np.full(self.batch, self.filled or self.keys)
        return np.random.default_rng(0).integers(1, self.keys + 1, self.batch)

    def arguments(self, lengths: Any = None) -> dict[str, Any]:
        """The keyword arguments of `jaxsoftmax.dot_product_attention`."""
        given: dict[str, Any] = {} if lengths is None else {"key_value_seq_lengths": lengths}
        return given | ({"is_causal": True, "query_offset": self.keys - self.queries} if self.causal else {})


def cells(scale: int = 1) -> list[Cell]:
    """All cells, with so many times fewer keys: a copy, with which the others are compared, and steps."""
    steps = (replace(step, keys=max(step.keys // scale, step.queries)) for step in _steps())
    return [copy_cell("bfloat16", ELEMENTS // scale), *map(cell_of, steps)]


def _steps() -> Iterator[Step]:
    for heads, key_heads in ((32, 8), (64, 8), (16, 16)):
        for batch in (32, 128):
            yield from (Step(batch, keys, heads=heads, key_heads=key_heads) for keys in (4096, 32768))
    yield from (Step(1, keys) for keys in (4096, 32768, 131072))
    yield from (Step(batch, keys, queries=4) for batch in (32, 1) for keys in (4096, 32768))
    for size in (64, 256):
        yield from (Step(batch, keys, head_size=size) for batch in (32, 1) for keys in (4096, 32768))
    yield Step(32, 5000)
    yield Step(3, 20001)
    yield Step(64, 32768, ragged=True)
    yield from (Step(batch, keys, page=page) for page in (16, 64) for batch in (32, 1) for keys in (4096, 32768))
    yield from (Step(64, 8192 + 128), Step(64, 128, prefix=8192))
    yield from (Step(32, 4096, cache=cache, head_size=size) for cache in BYTES for size in (128, 64, 256))
    yield from (Step(batch, 32768, cache=BYTES[0], page=page) for batch, page in ((1, 0), (1, 16), (32, 16)))
    yield Step(32, 32768, filled=4096)
    yield Step(8, 4096, dtype="float32")
    yield from (Step(1, 32768, queries=CHUNK, causal=causal) for causal in (False, True))


def cell_of(step: Step) -> Cell:
    itemsize = jnp.dtype(step.cache or step.dtype).itemsize
    read = 2 * (int(step.lengths.sum()) + step.prefix) * step.key_heads * step.head_size
    hidden = step.queries * (step.queries - 1) // 2 if step.causal else 0
    pairs = step.queries * int((step.lengths + step.prefix).sum()) - step.batch * hidden
    return Cell(
        "decoding",
        "forward",
        step.dtype,
        step.shapes[0],
        step.options,
        read * itemsize,
        functools.partial(_inputs, step),
        tuple(_contenders(step)),
        _no_truth,
        flops=4 * pairs * step.heads * step.head_size,
        sample=functools.partial(_sample, step),
        fewer=functools.partial(_fewer, step),
    )


def _no_truth(*rows):
    raise AssertionError("decoding is compared by `sample`")


@functools.partial(jax.jit, static_argnames=("shapes", "dtype"))
def _operands(key, hurtful, shapes, dtype):
    """Standard normals, queries 16 times as large if `hurtful`."""
    keys = jax.random.split(key, len(shapes))
    arrays = [jax.random.normal(own, shape, dtype) for own, shape in zip(keys, shapes, strict=True)]
    return (jnp.where(hurtful, 16 * arrays[0], arrays[0]), *arrays[1:])


def _inputs(step: Step, key, hurtful: bool) -> tuple[Any, ...]:
    operands = _operands(key, hurtful, tuple(step.shapes), step.dtype)
    lengths, scale = jnp.asarray(step.lengths, jnp.int32), ()
    if step.cache:
        scale = (jnp.full(step.key_heads, SCALE[step.cache], jnp.float32),)
        operands = (operands[0], *(_quantized(array, scale[0], step.cache) for array in operands[1:]))
    if step.page:
        pages = step.shapes[1][0]
        return (*operands, *scale, jax.random.permutation(key, pages).astype(jnp.int32).reshape(step.batch, -1), lengths)
    if step.filled:
        return (*operands, jnp.broadcast_to(jnp.arange(step.keys) < step.filled, (step.batch, 1, 1, step.keys)))
    return (*operands, *scale, lengths) if step.ragged else (*operands, *scale)


_quantized = jax.jit(jaxsoftmax.cache.quantize, static_argnames="dtype")


def _sample(step: Step, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """The heads of a key head of the last sequence, the first and the last queries, and the truth of them."""
    group, last = step.heads // step.key_heads, step.batch - 1
    key_head = step.key_heads // 2
    heads, at = slice(key_head * group, (key_head + 1) * group), np.unique([0, 1, step.queries // 2, -1 % step.queries])
    at = at[at < step.queries]
    query, key, value = inputs[:3]
    if step.page:
        key, value = (array[inputs[-2][last]].reshape(1, -1, *array.shape[2:]) for array in (key, value))
    query, key, value = (np.asarray(array[-1:]) for array in (query, key, value))
    if step.cache:
        key, value = (array.astype(np.float64) * np.asarray(inputs[3], np.float64)[:, None] for array in (key, value))
    if step.prefix:
        prefix = (np.asarray(array)[None] for array in inputs[3:])
        key, value = (np.concatenate(both, 1) for both in zip(prefix, (key, value), strict=True))
    seen = np.arange(step.keys) < step.lengths[last]
    if step.causal:
        seen = seen & (np.arange(step.keys) <= step.keys - step.queries + at[:, None])
    operands = query[:, at, heads], key[:, :, key_head : key_head + 1], value[:, :, key_head : key_head + 1]
    mask = np.pad(np.broadcast_to(seen, (len(at), step.keys)), ((0, 0), (step.prefix, 0)), constant_values=True)
    product = oracle.THREE_PRODUCTS if step.dtype == "float32" else 0.0
    return [(np.asarray(output[last:])[:, at, heads], oracle.attention(*operands, mask=mask, product=product)[0])]


def _fewer(step: Step, inputs: Sequence[Any], output: Any) -> list[tuple[str, tuple[Any, ...], Any]]:
    """A call in which all sequences but the first have other queries, and no keys where they may have fewer.

    One with fewer sequences may have other bits: keys are split to fill the GPU.
    """
    if step.batch == 1:
        return []
    query, *others = inputs
    if step.filled:
        others[-1] = others[-1].at[1:].set(False)
    elif step.ragged or step.page:
        others[-1] = others[-1].at[1:].set(0)
    return [("NaN and no keys in the others", (query.at[1:].set(jnp.nan), *others), output[:1])]


def with_prefix(query, key, value, prefix_key, prefix_value):
    """Attention of one query of each sequence to a prefix that all share, and to keys of its own: two states, merged."""
    attend = functools.partial(library.dot_product_attention, return_residual=True)
    shared = attend(query[:, 0], prefix_key, prefix_value)
    own = [result[:, 0] for result in attend(query, key, value)]
    states = [online.State(lse, jnp.ones_like(lse), out.astype(jnp.float32)) for out, lse in (shared, own)]
    return jnp.asarray(online.finish(online.merge(*states)).o, query.dtype)[:, None]


def _jax_nn_with_mask(query, key, value, mask):
    return jax.nn.dot_product_attention(query, key, value, mask=mask, implementation="xla")


def _scales(scale):
    """One scale for keys and values, if there is one."""
    return {"key_scale": scale[0], "value_scale": scale[0]} if scale else {}


def _contenders(step: Step) -> Iterator[Contender]:
    if step.prefix:
        yield Contender(OURS, lambda: with_prefix)
    elif step.page:
        yield Contender(OURS, lambda: lambda q, k, v, *more: library.paged_attention(q, k, v, *more[-2:], **_scales(more[:-2])))
    elif step.cache:
        yield Contender(OURS, lambda: lambda q, k, v, *scale: library.dot_product_attention(q, k, v, **_scales(scale)))
    elif step.filled:
        yield Contender(OURS, lambda: lambda q, k, v, mask: library.dot_product_attention(q, k, v, mask=mask))
        yield Contender("jax.nn", lambda: _jax_nn_with_mask)
    else:
        yield Contender(OURS, lambda: lambda q, k, v, *more: library.dot_product_attention(q, k, v, **step.arguments(*more)))
    if step.ragged or step.causal or step.page or step.prefix or step.cache or step.filled:
        return
    yield Contender("jax.nn", lambda: functools.partial(jax.nn.dot_product_attention, implementation="xla"))
    if step.dtype != "float32":
        # Alone, as it captures a CUDA graph when it is built, which what others start at that time breaks.
        cudnn = functools.partial(jax.nn.dot_product_attention, implementation="cudnn")
        yield Contender("cudnn", lambda: cudnn, alone=True)
