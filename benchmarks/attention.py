"""The cells of attention, forward.

An array has 16384 tokens, `batch = 16384 / T`, and heads for a hidden size of 2048 or as near below as their size allows.
`flops` are two for each multiplication and addition of both products: of all pairs of queries and keys, of half of them for
causal attention, and of those that see each other where a window, documents or lengths rule out more. `bytes` are those of
query, key, value and output, and of a mask or bias, once. Some queries of one head of one batch entry are checked.
"""

import functools
import importlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from benchmarks.cells import OURS, Cell, Contender, torch
from benchmarks.check import attention_oracle, sampled, to_torch

TOKENS = 16384
HIDDEN = 2048
HEAD_SIZES = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
DOCUMENTS = 12
WINDOW = 1024
SOFT_CAP = 30.0
BLOCK = 128  # queries and keys of a block, where blocks are counted

_FEW_QUERIES = 3
_FEW_LENGTH = 4096  # the length at which calls with few queries are compared: each is compiled anew


@dataclass(frozen=True)
class Call:
    """What a cell computes: shapes, and what rules out keys or changes scores. `extras` are the operands beside the three."""

    batch: int
    length: int
    heads: int
    head_size: int
    causal: bool = False
    key_heads: int | None = None
    value_size: int | None = None
    window: int | None = None
    soft_cap: float | None = None
    extras: tuple[str, ...] = ()
    dtype: str = "bfloat16"

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.heads, self.head_size

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of query, key, value and output."""
        key_heads, value_size = self.key_heads or self.heads, self.value_size or self.head_size
        lead = (self.batch, self.length)
        return [
            self.shape,
            (*lead, key_heads, self.head_size),
            (*lead, key_heads, value_size),
            (*lead, self.heads, value_size),
        ]

    @property
    def options(self) -> str:
        words = {
            "causal": int(self.causal) or None,
            "kv_heads": self.key_heads,
            "value_size": self.value_size,
            "window": self.window,
            "soft_cap": self.soft_cap and f"{self.soft_cap:g}",
            "bias": "1xNxTxS" if "bias" in self.extras else None,
            "mask": "1x1xTxS" if "mask" in self.extras else None,
            "documents": DOCUMENTS if "segments" in self.extras else None,
            "key_lengths": 1 if "key_lengths" in self.extras else None,
            "sinks": 1 if "sinks" in self.extras else None,
        }
        return " ".join(f"{name}={value}" for name, value in sorted(words.items()) if value is not None)

    @property
    def bytes(self) -> int:
        itemsize, scores = jnp.dtype(self.dtype).itemsize, self.length**2
        extra = scores * ("mask" in self.extras) + scores * self.heads * itemsize * ("bias" in self.extras)
        return sum(map(math.prod, self.shapes)) * itemsize + extra

    @property
    def flops(self) -> int:
        return 2 * self.heads * self.pairs * (self.head_size + (self.value_size or self.head_size))

    @property
    def pairs(self) -> int:
        """Of queries and keys, in all batch entries, that are counted."""
        if self.window is None and not {"segments", "key_lengths"} & set(self.extras):
            return self.batch * self.length**2 // (2 if self.causal else 1)
        low, high = self.seen_from, self.seen_to
        if "key_lengths" not in self.extras:
            return self.batch * int(np.sum(high - low))
        return int(sum(np.sum(np.clip(np.minimum(high, keys) - low, 0, None)) for keys in self.key_lengths))

    @property
    def blocks(self) -> int:
        """Blocks of keys that blocks of queries have to visit, for one head, in all batch entries; lengths aside."""
        first = np.arange(0, self.length, BLOCK)
        last = np.minimum(first + BLOCK, self.length) - 1
        low, high = self.seen_from[first] // BLOCK, -(-self.seen_to[last] // BLOCK)
        return self.batch * int(np.sum(high - low))

    @property
    def seen_from(self) -> np.ndarray:
        """The first key that each query sees, without masks and lengths."""
        at = np.arange(self.length)
        low = np.zeros(self.length, np.int64) if self.window is None else np.maximum(at - self.window + 1, 0)
        if "segments" in self.extras:
            low = np.maximum(low, np.searchsorted(documents(self.length), documents(self.length)))
        return low

    @property
    def seen_to(self) -> np.ndarray:
        """The key behind the last one that each query sees."""
        if self.causal:
            return np.arange(self.length) + 1
        if "segments" in self.extras:
            return np.searchsorted(documents(self.length), documents(self.length), "right")
        return np.full(self.length, self.length)

    @property
    def key_lengths(self) -> np.ndarray:
        """Of each batch entry: from all keys down to half of them."""
        return np.linspace(self.length, self.length / 2, self.batch).astype(np.int32)

    def arguments(self, *extras: Any) -> dict[str, Any]:
        """The keyword arguments of `jaxsoftmax.dot_product_attention`; those of `jax.nn` have the same names."""
        names = {"key_lengths": "key_value_seq_lengths"}
        given: dict[str, Any] = {"is_causal": True} if self.causal else {}
        if self.window is not None:
            given["local_window_size"] = (self.window - 1, 0)
        if self.soft_cap is not None:
            given["logits_soft_cap"] = self.soft_cap
        for name, extra in zip(self.extras, extras, strict=True):
            if name == "segments":
                given["query_segment_ids"], given["key_value_segment_ids"] = extra
            else:
                given[names.get(name, name)] = extra
        return given


@functools.lru_cache
def documents(length: int) -> np.ndarray:
    """The document of each position: `DOCUMENTS` of uneven lengths."""
    ends = np.cumsum(np.random.default_rng(0).dirichlet([4] * DOCUMENTS))[:-1] * length
    return np.searchsorted(np.round(ends), np.arange(length), "right").astype(np.int32)


def cells(tokens: int = TOKENS, hidden: int = HIDDEN) -> list[Cell]:
    """All cells; with fewer tokens or a smaller hidden size, smaller ones of the same kinds."""
    most = max(tokens, 512)

    def call(length: int, head_size: int, **more: Any) -> Call:
        length = min(length, most + length % 2)
        usual: dict[str, Any] = {"batch": max(tokens // length, 1), "heads": max(hidden // head_size, 1)}
        return Call(length=length, head_size=head_size, **(usual | more))

    grid = [
        call(length, head_size, causal=causal)
        for head_size in HEAD_SIZES
        for causal in (False, True)
        for length in LENGTHS
        if length <= most
    ]
    usual = call(4096, 128)
    wide = replace(usual, heads=4 * usual.heads)
    long = call(TOKENS, 128, causal=True)
    more = [
        *(
            replace(wide, key_heads=key_heads, causal=causal)
            for causal in (False, True)
            for key_heads in (None, max(wide.heads // 8, 1))
        ),
        *(call(4097, 128, batch=usual.batch, causal=causal) for causal in (False, True)),
        replace(usual, extras=("mask",)),
        replace(long, extras=("segments",)),
        replace(long, window=min(WINDOW, long.length // 16)),
        replace(usual, causal=True, window=min(WINDOW, usual.length // 4)),
        replace(usual, soft_cap=SOFT_CAP),
        *(replace(usual, extras=(name,)) for name in ("sinks", "key_lengths", "bias")),
        call(4096, 80),
        call(4096, 192, value_size=128),
        *(replace(cell, dtype="float32") for cell in (usual, replace(usual, causal=True), call(4096, 64))),
        replace(usual, dtype="float16"),
    ]
    return [cell_of(call) for call in [*grid, *more]]


def cell_of(call: Call) -> Cell:
    return Cell(
        "attention",
        "forward",
        call.dtype,
        call.shape,
        call.options,
        call.bytes,
        functools.partial(_inputs, call),
        tuple(_contenders(call)),
        _no_truth,
        flops=call.flops,
        blocks=call.blocks,
        sample=functools.partial(_sample, call),
        fewer=functools.partial(_fewer, call) if call.length == _FEW_LENGTH or call.extras or call.window else _none_fewer,
    )


def _no_truth(*rows):
    raise AssertionError("attention is compared by `sample`")


# Inputs.


@functools.partial(jax.jit, static_argnames=("shapes", "dtype"))
def _operands(key, hurtful, shapes, dtype):
    """Standard normals; if `hurtful`, every third query is 16 times as large, and values have outliers."""
    keys = jax.random.split(key, 4)
    query, k, value = (jax.random.normal(keys[i], shape) for i, shape in enumerate(shapes))
    third = lax.broadcasted_iota(jnp.int32, query.shape, 1) % 3 == 1
    query = jnp.where(hurtful & third, 16 * query, query)
    value = jnp.where(hurtful & (jax.random.uniform(keys[3], value.shape) < 0.01), 30 * value, value)
    return tuple(array.astype(dtype) for array in (query, k, value))


def _inputs(call: Call, key, hurtful: bool) -> tuple[Any, ...]:
    """Query, key and value, and the call's extras."""
    own = jax.random.fold_in(key, 1)
    scores = (1, call.heads, call.length, call.length)
    segments = jnp.broadcast_to(documents(call.length), (call.batch, call.length))
    makers = {
        "bias": lambda: jax.random.normal(own, scores).astype(call.dtype),
        "mask": lambda: jax.random.bernoulli(own, 0.5, (1, 1, *scores[2:])),
        "segments": lambda: (segments, segments),
        "key_lengths": lambda: jnp.asarray(call.key_lengths),
        "sinks": lambda: jax.random.normal(own, (call.heads,)),
    }
    operands = _operands(key, hurtful, tuple(call.shapes[:3]), call.dtype)
    return (*operands, *(makers[name]() for name in call.extras))


# Whether it is right.


def _sample(call: Call, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Some queries of one head, the first and the last ones among them, and the truth of them."""
    b, head = call.batch - 1, call.heads // 2
    at = sampled(call.length)
    query, key, value = inputs[:3]
    key_head = head * key.shape[2] // call.heads
    # [1, rows, 1, size]: one batch entry, one head.
    query, actual = (np.asarray(_of_head(a, b, head))[at][None, :, None] for a in (query, output))
    key, value = (np.asarray(_of_head(a, b, key_head))[None, :, None] for a in (key, value))
    cols = np.arange(call.length)
    seen = (cols >= call.seen_from[at, None]) & (cols < call.seen_to[at, None])
    given: dict[str, Any] = {"logits_soft_cap": call.soft_cap}
    for name, extra in zip(call.extras, inputs[3:], strict=True):
        if name == "bias":
            given["bias"] = np.asarray(extra[:, head, at])[:, None]
        elif name == "sinks":
            given["sinks"] = np.asarray(extra[head])[None]
        elif name == "mask":
            seen = seen & np.asarray(extra[0, 0, at])
        elif name == "key_lengths":
            seen = seen & (cols < int(extra[b]))
    if call.dtype == "float32":
        given["product"] = attention_oracle.THREE_PRODUCTS
    truth, _ = attention_oracle.attention(query, key, value, mask=seen[None, None], **given)
    return [(actual, truth)]


@jax.jit
def _of_head(array, b, head):
    return array[b, :, head]


def _fewer(call: Call, inputs: Sequence[Any], output: Any) -> list[tuple[str, tuple[Any, ...], Any]]:
    """A call with the first batch entry's first queries alone."""
    few, (query, key, value, *extras) = slice(_FEW_QUERIES), inputs
    cut: dict[str, Callable[[Any], Any]] = {
        "bias": lambda bias: bias[:, :, few],
        "mask": lambda mask: mask[:, :, few],
        "segments": lambda both: (both[0][:1, few], both[1][:1]),
        "key_lengths": lambda lengths: lengths[:1],
        "sinks": lambda sinks: sinks,
    }
    cuts = (cut[name](extra) for name, extra in zip(call.extras, extras, strict=True))
    return [(f"{_FEW_QUERIES} queries", (query[:1, few], key[:1], value[:1], *cuts), output[:1, few])]


def _none_fewer(inputs, output):
    return []


# Contenders.


def _contenders(call: Call):
    yield Contender(OURS, lambda: lambda q, k, v, *extras: jaxsoftmax.dot_product_attention(q, k, v, **call.arguments(*extras)))
    if call.dtype == "float32":  # the others have none
        yield Contender("jax.nn", lambda: _of_jax_nn(call, "xla"))  # in TF32
        yield Contender("jax.nn highest", lambda: jax.default_matmul_precision("highest")(_of_jax_nn(call, "xla")))
        return
    if not ({"segments", "sinks"} & set(call.extras) or call.soft_cap):
        # Alone, as it captures a CUDA graph when it is built, which what others start at that time breaks.
        yield Contender("cudnn", lambda: _of_jax_nn(call, "cudnn"), alone=True)
    if call.extras or call.window or call.soft_cap or call.value_size:
        return
    if call.head_size % 64 == 0 and call.key_heads is None and call.length % 128 == 0:
        for block_kv in _BLOCKS_KV[call.head_size]:
            yield Contender(
                "attention_mgpu", functools.partial(_of_pallas, call, block_kv), prepare=functools.partial(_scaled, call)
            )
    yield Contender("tokamax", lambda: _of_tokamax(call), needs=("tokamax",))
    yield Contender("torch", lambda: _of_torch(call), prepare=_heads_first, framework="torch", needs=("torch",))


def _of_jax_nn(call: Call, implementation: Literal["xla", "cudnn"]) -> Callable[..., Any]:
    attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return lambda q, k, v, *extras: attention(q, k, v, **call.arguments(*extras))


_BLOCKS_KV = {64: (128, 256), 128: (64, 128), 256: (64,)}  # what shared memory holds two of


def _of_pallas(call: Call, block_kv: int) -> Callable[..., Any]:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    config = module.TuningConfig(block_q=64, block_kv=block_kv, max_concurrent_steps=2, causal=call.causal)
    return lambda q, k, v: module.attention(q, k, v, config)


def _scaled(call: Call, query, key, value):
    """What Pallas' kernel takes: it has no scale, and its shared memory is float16, which is as fast as bfloat16."""
    query, key, value = (array.astype(jnp.float16) for array in (query, key, value))
    return query * jnp.float16(call.head_size**-0.5), key, value


def _of_tokamax(call: Call) -> Callable[..., Any]:
    attention = importlib.import_module("tokamax").dot_product_attention
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():  # it reads them when called
        flags(["benchmarks"], known_only=True)
    return lambda q, k, v: attention(q, k, v, is_causal=call.causal)


def _heads_first(*inputs):
    """Views of torch's axes, `[B, N, T, H]`."""
    return tuple(array.transpose(1, 2) for array in to_torch(*inputs))


def _of_torch(call: Call) -> Callable[..., Any]:
    """Its flash attention."""
    attention = importlib.import_module("torch.nn.attention")
    compute = torch().nn.functional.scaled_dot_product_attention

    def run(q, k, v):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return compute(q, k, v, is_causal=call.causal, enable_gqa=call.key_heads is not None).transpose(1, 2)

    return run
