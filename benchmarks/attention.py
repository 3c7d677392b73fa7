"""The cells of attention: forward, forward with tangents, and forward and backward together.

An array has 16384 tokens, `batch = 16384 / T`, and heads for a hidden size of 2048 or as near below as their size allows.
`flops` are two for each multiplication and addition of both products: of all pairs of queries and keys, of half of them for
causal attention, and of those that see each other where a window, documents or lengths rule out more. `bytes` are those of
query, key, value and output, and of a mask or bias, once. Some queries of one head of one batch entry are checked.

Forward and backward together are the gradients of query, key, value and a bias, in one program, from the output's cotangent, an
input. They have five products more. `bytes` are those of the two passes: backward reads what forward reads and writes, and the
cotangent, and writes the gradients. Some keys of one head are checked too.

Forward with tangents, the pass `jvp`, is `jax.jvp` with tangents of query, key and value. It has five products more: the scores
again, two for their tangent, and two for that of the output. `bytes` are those of forward, and once more with a tangent of each
array.
"""

import collections
import functools
import importlib
import itertools
import math
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cells import OURS, Cell, Contender, library, torch
from benchmarks.check import sampled, to_torch
from jaxsoftmax import ContextParallel
from tests.support import oracle
from tests.support.attention import oracle as attention_oracle

TOKENS = 16384
HIDDEN = 2048
HEAD_SIZES = (64, 128, 256)
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
LENGTHS_BACKWARD = (512, 2048, 4096, 16384)
LENGTHS_TANGENTS = (4096, 16384)
DOCUMENTS = 12
WINDOW = 1024
SOFT_CAP = 30.0
BLOCK = 128  # queries and keys of a block, where blocks are counted

_MOST_SCORES = 2**31  # 8 GiB in float32; XLA holds several such arrays for tangents
_FEW_QUERIES = 131  # more than those of a decoding step, which splits keys and so adds up in another order
_FEWER = {"ends": 4, "random": 8}  # of queries and of keys whose gradients are compared
_FEW_LENGTH = 4096  # the length at which calls with few queries are compared: each is compiled anew


@dataclass(frozen=True)
class Call:
    """Describes what a cell computes: shapes, and what rules out keys or changes scores.

    `extras` are the operands beside query, key and value. With `backward` their gradients are computed, with `tangents` the
    tangent of the output from those of query, key and value. `deterministic` asks for gradients that have the same bits each
    time. `zigzag` is a number of devices: tokens come in the order in which causal attention costs each of them the same;
    inputs here do not. `keys` is the number of keys of each batch entry; None if it is that of queries.

    Raises:
      ValueError: `keys` beside what is said of positions, which have no common start then; or `backward` beside `tangents`.
    """

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
    backward: bool = False
    tangents: bool = False
    deterministic: bool = False
    zigzag: int | None = None
    keys: int | None = None

    def __post_init__(self) -> None:
        if self.keys is not None and (
            self.causal or self.window or {"causal_mask", "segments", "key_lengths"} & set(self.extras)
        ):
            raise ValueError(f"keys: must be None where positions matter, got {self}")
        if self.backward and self.tangents:
            raise ValueError(f"tangents: must be False with backward, got {self}")

    @property
    def n_keys(self) -> int:
        """The number of keys of each batch entry."""
        return self.length if self.keys is None else self.keys

    @property
    def pass_(self) -> str:
        return "forward+backward" if self.backward else "jvp" if self.tangents else "forward"

    @property
    def has_derivative(self) -> bool:
        """True if more is computed than the output."""
        return self.backward or self.tangents

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.length, self.heads, self.head_size

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of query, key, value and output."""
        key_heads, value_size = self.key_heads or self.heads, self.value_size or self.head_size
        return [
            self.shape,
            (self.batch, self.n_keys, key_heads, self.head_size),
            (self.batch, self.n_keys, key_heads, value_size),
            (self.batch, self.length, self.heads, value_size),
        ]

    def key_head(self, head: int) -> int:
        """The key head that serves a head."""
        return head * (self.key_heads or self.heads) // self.heads

    @property
    def options(self) -> str:
        words = {
            "causal": int(self.causal) or None,
            "keys": self.keys,
            "kv_heads": self.key_heads,
            "value_size": self.value_size,
            "window": self.window,
            "soft_cap": self.soft_cap and f"{self.soft_cap:g}",
            "bias": "1xNxTxS" if "bias" in self.extras else None,
            "mask": "1x1xTxS" if "mask" in self.extras else "causal" if "causal_mask" in self.extras else None,
            "documents": DOCUMENTS if "segments" in self.extras else None,
            "key_lengths": 1 if "key_lengths" in self.extras else None,
            "sinks": 1 if "sinks" in self.extras else None,
            "deterministic": int(self.deterministic) or None,
            "zigzag": self.zigzag,
        }
        return " ".join(f"{name}={value}" for name, value in sorted(words.items()) if value is not None)

    @property
    def bytes(self) -> int:
        itemsize, scores = jnp.dtype(self.dtype).itemsize, self.length * self.n_keys
        varied = sum(map(math.prod, self.shapes)) + scores * self.heads * ("bias" in self.extras)
        times, times_mask = (3, 2) if self.has_derivative else (1, 1)
        return times * varied * itemsize + times_mask * scores * bool({"mask", "causal_mask"} & set(self.extras))

    @property
    def flops(self) -> int:
        of_keys, of_values = (4, 3) if self.has_derivative else (1, 1)  # products
        sizes = of_keys * self.head_size + of_values * (self.value_size or self.head_size)
        return 2 * self.heads * self.pairs * sizes

    @property
    def pairs(self) -> int:
        """The number of pairs of a query and a key that are counted, in all batch entries."""
        if self.window is None and not {"segments", "key_lengths"} & set(self.extras):
            return self.batch * self.length * self.n_keys // (2 if self.causal or "causal_mask" in self.extras else 1)
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
        if self.causal or "causal_mask" in self.extras:
            return np.arange(self.length) + 1
        if "segments" in self.extras:
            return np.searchsorted(documents(self.length), documents(self.length), "right")
        return np.full(self.length, self.n_keys)

    @property
    def key_lengths(self) -> np.ndarray:
        """Number of keys of each batch entry, from all keys down to half of them."""
        return np.linspace(self.length, self.length / 2, self.batch).astype(np.int32)

    def arguments(self, *extras: Any) -> dict[str, Any]:
        """The keyword arguments of `jaxsoftmax.dot_product_attention`; those of `jax.nn` have the same names."""
        names = {"key_lengths": "key_value_seq_lengths", "causal_mask": "mask"}
        given: dict[str, Any] = {"is_causal": True} if self.causal else {}
        if self.window is not None:
            given["local_window_size"] = (self.window - 1, 0)
        if self.soft_cap is not None:
            given["logits_soft_cap"] = self.soft_cap
        if self.deterministic:
            given["deterministic_gradients"] = True
        if self.zigzag is not None:
            given["parallel"] = ContextParallel(zigzag=self.zigzag)
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
    """All cells of the forward pass, with and without tangents; with fewer tokens or a smaller hidden size, smaller ones."""
    return [cell_of(call) for call in _calls(tokens, hidden) if not call.backward]


def gradient_cells(tokens: int = TOKENS, hidden: int = HIDDEN) -> list[Cell]:
    """Likewise, of forward and backward together."""
    return [cell_of(call) for call in _calls(tokens, hidden) if call.backward]


def _calls(tokens: int, hidden: int) -> list[Call]:
    most = max(tokens, 512)

    def call(length: int, head_size: int, **more: Any) -> Call:
        length = min(length, most + length % 2)
        usual: dict[str, Any] = {"batch": max(tokens // length, 1), "heads": max(hidden // head_size, 1)}
        return Call(length=length, head_size=head_size, **(usual | more))

    def grid(lengths: Sequence[int], **more: Any) -> list[Call]:
        kinds = itertools.product(HEAD_SIZES, (False, True), lengths)
        return [call(length, head_size, causal=causal, **more) for head_size, causal, length in kinds]

    def up_to_most(lengths: Sequence[int]) -> list[int]:
        return [length for length in lengths if length <= most]

    usual = call(4096, 128)
    wide = replace(usual, heads=4 * usual.heads)
    long = call(TOKENS, 128, causal=True)
    of_float32 = [replace(cell, dtype="float32") for cell in (usual, replace(usual, causal=True), call(4096, 64))]
    more = [
        *(
            replace(wide, key_heads=key_heads, causal=causal)
            for causal in (False, True)
            for key_heads in (None, max(wide.heads // 8, 1))
        ),
        *(call(4097, 128, batch=usual.batch, causal=causal) for causal in (False, True)),
        *(replace(usual, extras=(name,)) for name in ("mask", "causal_mask")),
        replace(long, extras=("segments",)),
        replace(long, window=min(WINDOW, long.length // 16)),
        replace(usual, causal=True, window=min(WINDOW, usual.length // 4)),
        replace(usual, soft_cap=SOFT_CAP),
        *(replace(usual, extras=(name,)) for name in ("sinks", "key_lengths", "bias")),
        call(4096, 80),
        call(4096, 192, value_size=128),
        *of_float32,
        replace(usual, dtype="float16"),
    ]
    backward = [
        replace(wide, key_heads=max(wide.heads // 8, 1), causal=True),
        replace(long, extras=("segments",)),
        replace(long, window=min(WINDOW, long.length // 16)),
        *(replace(usual, extras=(name,)) for name in ("causal_mask", "key_lengths", "bias")),
        replace(usual, dtype="float16"),
        *of_float32,
        *grid((4096,), deterministic=True),
    ]
    tangents = grid(sorted({min(length, most) for length in LENGTHS_TANGENTS}), tangents=True)
    both = (replace(call, backward=True) for call in [*grid(up_to_most(LENGTHS_BACKWARD)), *backward])
    return [*grid(up_to_most(LENGTHS)), *more, *tangents, *both]


def cell_of(call: Call) -> Cell:
    fewer = not call.backward and (call.length == _FEW_LENGTH or call.extras or call.window)
    return Cell(
        "attention",
        call.pass_,
        call.dtype,
        call.shape,
        call.options,
        call.bytes,
        functools.partial(_inputs, call),
        tuple(_contenders(call)),
        _no_truth,
        flops=call.flops,
        blocks=call.blocks,
        sample=functools.partial(_sample_of_gradients if call.backward else _sample, call),
        fewer=functools.partial(_fewer, call) if fewer else _none_fewer,
        repeatable=call.deterministic or not call.backward,
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
    """Query, key and value, the call's extras, and a cotangent of the output or tangents where derivatives are computed."""
    own = jax.random.fold_in(key, 1)
    scores = (1, call.heads, call.length, call.n_keys)
    segments = jnp.broadcast_to(documents(call.length), (call.batch, call.length))
    makers = {
        "bias": lambda: jax.random.normal(own, scores).astype(call.dtype),
        "mask": lambda: jax.random.bernoulli(own, 0.5, (1, 1, *scores[2:])),
        "causal_mask": lambda: jnp.tril(jnp.ones((1, 1, *scores[2:]), bool)),
        "segments": lambda: (segments, segments),
        "key_lengths": lambda: jnp.asarray(call.key_lengths),
        "sinks": lambda: jax.random.normal(own, (call.heads,)),
    }
    operands = _operands(key, hurtful, tuple(call.shapes[:3]), call.dtype)
    extras = [makers[name]() for name in call.extras]
    if call.backward:
        extras.append(jax.random.normal(jax.random.fold_in(key, 2), call.shapes[3]).astype(call.dtype))
    if call.tangents:
        extras += _operands(jax.random.fold_in(key, 2), False, tuple(call.shapes[:3]), call.dtype)
    return (*operands, *extras)


# Whether it is right.


def _sample(call: Call, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Some queries of one head, the first and the last ones among them, and the truth of them; likewise of their tangents."""
    at, outputs = sampled(call.length), output if call.tangents else (output,)
    parts = [_some(array, [call.batch - 1], call.heads // 2, at) for array in outputs]
    return list(zip(parts, _truths(call, inputs, at), strict=True))


def _sample_of_gradients(call: Call, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Likewise, of the gradients of query, key, value and bias: those of fewer queries, and of as many keys."""
    head, at, at_keys = call.heads // 2, sampled(call.length, **_FEWER), sampled(call.n_keys, **_FEWER)
    parts = [_some(output[0], _entries(call), head, at)]
    parts += [np.asarray(_of_head(gradient, call.batch - 1, call.key_head(head)))[at_keys] for gradient in output[1:3]]
    if "bias" in call.extras:
        parts.append(np.asarray(output[3][:, head, at])[:, None])
    return list(zip(parts, _truths(call, inputs, at), strict=True))


def _entries(call: Call) -> list[int]:
    """Lists the batch entries that are looked at: all for the gradient of a bias, which they share, else the last one."""
    return list(range(0 if call.backward and "bias" in call.extras else call.batch - 1, call.batch))


# The last truths, with calls and queries, by which inputs are known: contenders have the same, one after another or at the same
# time. Several cells are checked at a time, each with inputs of two kinds.
_known: collections.deque[tuple[Call, weakref.ref[Any], list[Any]]] = collections.deque(maxlen=32)
_locks: collections.defaultdict[Call, threading.Lock] = collections.defaultdict(threading.Lock)
_lock_of_locks = threading.Lock()


def _truths(call: Call, inputs: Sequence[Any], at: np.ndarray) -> list[Any]:
    """Computes the truths of the parts of the outputs that are sampled."""
    with _lock_of_locks:
        lock = _locks[call]
    with lock:
        for known, query, truths in list(_known):
            if known == call and query() is inputs[0]:
                return truths
        in_truth = _gradients_in_truth if call.backward else _tangent_in_truth if call.tangents else _output_in_truth
        truths = in_truth(call, inputs, at)
        _known.append((call, weakref.ref(inputs[0]), truths))
        return truths


def _output_in_truth(call: Call, inputs: Sequence[Any], at: np.ndarray) -> list[Any]:
    operands, given = _of_queries(call, inputs, [call.batch - 1], call.heads // 2, at)
    return [attention_oracle.attention(*operands, **given)[0]]


def _tangent_in_truth(call: Call, inputs: Sequence[Any], at: np.ndarray) -> list[Any]:
    """Computes the truths of the output and of its tangent."""
    arrays, given = _of_queries(call, inputs[:-3], [call.batch - 1], call.heads // 2, at)
    tangents = _of_one_head(call, inputs[-3:], [call.batch - 1], call.heads // 2, at)
    moved = dict(zip(("query", "key", "value"), tangents, strict=True))
    return [attention_oracle.attention(*arrays, **given)[0], attention_oracle.tangents(moved, *arrays, **given)[0]]


def _gradients_in_truth(call: Call, inputs: Sequence[Any], at: np.ndarray) -> list[Any]:
    *operands, dout = inputs
    entries, head = _entries(call), call.heads // 2
    (query, key, value), given = _of_queries(call, operands, entries, head, at)
    dout = _some(dout, entries, head, at)
    truths = attention_oracle.cotangents(dout, np.zeros(dout.shape[:-1]), query, key, value, **given)
    at_keys = sampled(call.n_keys, **_FEWER)
    found = [truths["query"], *_truths_of_keys(call, inputs, call.batch - 1, call.key_head(head), at_keys)]
    if "bias" in call.extras:
        # A weight that flushes to 0 is times a cotangent of the weights, at most.
        largest = 2 * len(entries) * np.max(np.sum(np.abs(oracle.to64(dout)), -1)) * np.max(np.abs(oracle.to64(value)))
        found.append(oracle.Truth(truths["bias"].value, truths["bias"].budget + largest * oracle.TINY))
    return found


def _of_queries(call: Call, inputs: Sequence[Any], entries: list[int], head: int, at: np.ndarray):
    """Returns the oracle's arguments for some queries of one head: query, key and value, and a dict of the others."""
    cols = np.arange(call.n_keys)
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
            seen = seen & (cols < np.asarray(extra)[entries, None, None])
    if call.dtype == "float32":
        given["product"] = attention_oracle.THREE_PRODUCTS
    arrays = _of_one_head(call, inputs[:3], entries, head, at)
    return arrays, given | {"mask": seen.reshape(-1, 1, *seen.shape[-2:])}


def _of_one_head(call: Call, arrays: Sequence[Any], entries: list[int], head: int, at: np.ndarray) -> tuple[np.ndarray, ...]:
    """Selects from query, key and value, or their tangents: some queries of one head, the keys and values of its key head."""
    query, *others = arrays
    return (_some(query, entries, head, at), *(_some(array, entries, call.key_head(head)) for array in others))


def _some(array: Any, entries: list[int], head: int, at: Any = slice(None)) -> np.ndarray:
    """`[entries, rows, 1, size]`: rows of one head of some batch entries."""
    return np.stack([np.asarray(_of_head(array, b, head))[at] for b in entries])[:, :, None]


def _truths_of_keys(call: Call, inputs: Sequence[Any], b: int, key_head: int, at: np.ndarray) -> list[Any]:
    """The gradients of some keys and values of one key head, which come from all queries that it serves.

    Budgets are those of the oracle. What is the same for a whole query, as its log-sum-exp, is of float32: what that misses is
    lost beside the rounding of 16 bits, or beside the error of three products. There is no soft cap, mask or sink.
    """
    query, key, value, *extras, dout = inputs
    extra = dict(zip(call.extras, extras, strict=True))
    low, high = call.seen_from, call.seen_to
    if "key_lengths" in extra:
        high = np.minimum(high, int(extra["key_lengths"][b]))
    keys, values = (_of_head(a, b, key_head) for a in (key, value))
    k, v = (oracle.to64(a)[at] for a in (keys, values))
    product = attention_oracle.THREE_PRODUCTS if call.dtype == "float32" else 0.0
    narrow, scale = oracle.half_unit(keys.dtype) + product, call.head_size**-0.5
    seen = (at >= low[:, None]) & (at < high[:, None])
    results = [np.zeros(array.shape) for array in (k, k, v, v)]
    group = call.heads // key.shape[2]
    for head in range(key_head * group, (key_head + 1) * group):
        queries, douts = (_of_head(a, b, head) for a in (query, dout))
        bias = extra["bias"][0, head] if "bias" in extra else None
        of_rows = _of_rows(queries, keys, values, douts, bias, low, high, scale)
        lse, delta, delta_size = (oracle.to64(array)[:, None] for array in of_rows)
        q, do, added = oracle.to64(queries), oracle.to64(douts), 0.0 if bias is None else oracle.to64(bias[:, at])
        s, size = scale * q @ k.T + added, scale * np.abs(q) @ np.abs(k).T
        missed, size = product * size, size + np.abs(added)
        p = np.exp(np.where(seen, s - lse, -np.inf))
        # Twice, as its denominator errs too.
        unit = 2 * ((8 + 3 * np.abs(s - lse) + 8 * size) * oracle.EPS + missed) + narrow
        ds, dp_size = p * (do @ v.T - delta), np.abs(do) @ np.abs(v).T
        ds_error = p * (unit * (dp_size + 2 * delta_size) + narrow * delta_size)
        terms = (scale * ds, q), (scale * ds_error, np.abs(q)), (p, do), (p * unit, np.abs(do))
        results = [result + of_keys.T @ of_queries for result, (of_keys, of_queries) in zip(results, terms, strict=True)]
    dk, dk_error, dv, dv_error = results
    return [oracle.Truth(dk, dk_error + oracle.TINY), oracle.Truth(dv, dv_error + oracle.TINY)]


@functools.partial(jax.jit, static_argnames="scale")
def _of_rows(query, key, value, dout, bias, low, high, scale):
    """Returns for each query of one head the log-sum-exp, the sum of `weight * (dout value)` and of its absolute terms."""
    query, key, value, dout = (array.astype(jnp.float32) for array in (query, key, value, dout))
    cols = jnp.arange(len(key))

    def of_row(row):
        query, dout, bias, low, high = row
        s = scale * (key @ query) + (0.0 if bias is None else bias.astype(jnp.float32))
        s = jnp.where((cols >= low) & (cols < high), s, -jnp.inf)
        lse = jax.nn.logsumexp(s)
        p = jnp.exp(s - lse)
        return lse, p @ (value @ dout), p @ (jnp.abs(value) @ jnp.abs(dout))

    with jax.default_matmul_precision("highest"):
        return lax.map(of_row, (query, dout, bias, low, high), batch_size=512)


@jax.jit
def _of_head(array, b, head):
    return array[b, :, head]


def _fewer(call: Call, inputs: Sequence[Any], output: Any) -> list[tuple[str, tuple[Any, ...], Any]]:
    """A call with the first batch entry's first queries alone."""
    operands, tangents = (inputs[:-3], inputs[-3:]) if call.tangents else (inputs, ())
    few, extras = slice(_FEW_QUERIES), operands[3:]
    cut: dict[str, Callable[[Any], Any]] = {
        "bias": lambda bias: bias[:, :, few],
        "mask": lambda mask: mask[:, :, few],
        "causal_mask": lambda mask: mask[:, :, few],
        "segments": lambda both: (both[0][:1, few], both[1][:1]),
        "key_lengths": lambda lengths: lengths[:1],
        "sinks": lambda sinks: sinks,
    }
    cuts = (cut[name](extra) for name, extra in zip(call.extras, extras, strict=True))

    def first(query: Any, *others: Any) -> list[Any]:
        return [query[:1, few], *(array[:1] for array in others)]

    arrays = (*first(*operands[:3]), *cuts, *(first(*tangents) if tangents else ()))
    return [(f"{_FEW_QUERIES} queries", arrays, jax.tree.map(lambda array: array[:1, few], output))]


def _none_fewer(inputs, output):
    return []


# Contenders.


def _contenders(call: Call):
    yield of_ours(call)
    if call.deterministic:  # is compared with the same without
        return
    if call.tangents:  # that only XLA computes of the others
        if call.batch * call.heads * call.length * call.n_keys <= _MOST_SCORES:
            yield of_xla(call)
        return
    if call.dtype == "float32":  # the others have none
        yield of_xla(call)  # in TF32
        yield of_xla_in_float32(call)
        return
    if not ({"segments", "sinks"} & set(call.extras) or call.soft_cap):
        # Alone, as it captures a CUDA graph when it is built, which what others start at that time breaks.
        yield Contender("cudnn", lambda: _as_measured(call, _of_jax_nn(call, "cudnn")), alone=True)
    if call.extras or call.soft_cap or call.value_size:
        return
    is_plain = call.key_heads is None and call.keys is None and call.window is None
    if is_plain and call.head_size in _BLOCKS_KV and call.length % 128 == 0:
        for config in _configs_of_pallas(call):
            yield Contender(
                "attention_mgpu",
                functools.partial(_of_pallas, call, config),
                prepare=functools.partial(_scaled, call),
                capability=9,
            )
    yield Contender("flash_attention_3", lambda: _as_measured(call, _of_flash_attention_3(call)), needs=("dew_flash_attn",))
    if call.window is not None:
        return
    if call.backward:
        yield Contender("torch", lambda: _gradients_of_torch(call), prepare=_with_grad, framework="torch", needs=("torch",))
        return
    yield Contender("tokamax", lambda: _of_tokamax(call), needs=("tokamax",))
    yield Contender("torch", lambda: _of_torch(call), prepare=_heads_first, framework="torch", needs=("torch",))


def of_ours(call: Call) -> Contender:
    """The library's attention."""
    return Contender(OURS, lambda: _as_measured(call, _of_ours(call)))


def of_xla(call: Call) -> Contender:
    """JAX's own without cuDNN, which holds the scores."""
    return Contender("jax.nn", lambda: _as_measured(call, _of_jax_nn(call, "xla")))


def of_xla_in_float32(call: Call) -> Contender:
    """The same with products of float32, which by default are those of TF32 on a GPU."""
    highest = jax.default_matmul_precision("highest")
    return Contender("jax.nn highest", lambda: _as_measured(call, highest(_of_jax_nn(call, "xla"))))


def _as_measured(call: Call, attention: Callable[..., Any]) -> Callable[..., Any]:
    """The function of a cell's inputs: attention, or the gradients of query, key, value and a bias, the first of the extras.

    With `tangents` it is attention and its tangent.
    """
    if call.tangents:
        return lambda *inputs: _with_tangent(attention, inputs[:3], inputs[3:-3], inputs[-3:])
    if not call.backward:
        return attention

    def gradients(*inputs):
        *operands, dout = inputs
        count = 3 + ("bias" in call.extras)
        varied, others = operands[:count], operands[count:]
        return jax.vjp(lambda *varied: attention(*varied, *others), *varied)[1](dout)

    return gradients


def _with_tangent(attention: Callable[..., Any], operands: Any, extras: Any, tangents: Any) -> Any:
    return jax.jvp(lambda *operands: attention(*operands, *extras), operands, tangents)


def _of_ours(call: Call) -> Callable[..., Any]:
    return lambda q, k, v, *extras: library.dot_product_attention(q, k, v, **call.arguments(*extras))


def _of_jax_nn(call: Call, implementation: Literal["xla", "cudnn"]) -> Callable[..., Any]:
    attention = functools.partial(jax.nn.dot_product_attention, implementation=implementation)
    return lambda q, k, v, *extras: attention(q, k, v, **call.arguments(*extras))


_BLOCKS_KV = {64: (128, 256), 128: (64, 128), 256: (64,)}  # shared memory has room for two such blocks
_BLOCKS_BACKWARD = {64: (64, 128), 128: (64,), 256: (64,)}  # registers hold such a block, or nearly


def _configs_of_pallas(call: Call) -> list[dict[str, Any]]:
    """Lists the configurations of Pallas' kernel that are tried. Backward it has no causal attention."""
    usual = {"block_q": 64, "max_concurrent_steps": 2, "causal": call.causal}
    if not call.backward:
        return [usual | {"block_kv": block} for block in _BLOCKS_KV[call.head_size]]
    if call.causal:
        return []
    usual |= {"block_kv": _BLOCKS_KV[call.head_size][-1], "block_q_dq": 64, "block_kv_dkv": 64}
    usual |= {"compute_wgs_bwd": 2 if call.head_size <= 128 else 1}
    return [usual | {"block_kv_dq": block, "block_q_dkv": block} for block in _BLOCKS_BACKWARD[call.head_size]]


def _of_pallas(call: Call, config: dict[str, Any]) -> Callable[..., Any]:
    module = importlib.import_module("jax.experimental.pallas.ops.gpu.attention_mgpu")
    function = _as_measured(call, lambda q, k, v: module.attention(q, k, v, module.TuningConfig(**config)))
    if not call.backward:
        return function

    def gradients(*inputs):
        dq, dk, dv = function(*inputs)
        return dq * jnp.float16(call.head_size**-0.5), dk, dv

    return gradients


def _scaled(call: Call, *inputs):
    """Prepares inputs for Pallas' kernel: it has no scale, and its shared memory is float16, which is as fast as bfloat16."""
    query, *others = (array.astype(jnp.float16) for array in inputs)
    return query * jnp.float16(call.head_size**-0.5), *others


def _of_tokamax(call: Call) -> Callable[..., Any]:
    attention = importlib.import_module("tokamax").dot_product_attention
    flags = importlib.import_module("absl.flags").FLAGS
    if not flags.is_parsed():  # it reads them when called
        flags(["benchmarks"], known_only=True)
    return lambda q, k, v: attention(q, k, v, is_causal=call.causal)


def _of_flash_attention_3(call: Call) -> Callable[..., Any]:
    """FlashAttention-3, as the wheel `dew-flash-attn-cu13` brings it to JAX."""
    attention = importlib.import_module("dew_flash_attn").flash_mha
    if call.window is None:
        return functools.partial(attention, is_causal=call.causal)
    # A window that ends at the query is causal by itself.
    return functools.partial(attention, window_size=(call.window - 1, 0))


def _heads_first(*inputs):
    """Views of torch's axes, `[B, N, T, H]`."""
    return tuple(array.transpose(1, 2) for array in to_torch(*inputs))


def _with_grad(*inputs):
    """Likewise, query, key and value such that torch computes their gradients."""
    *operands, dout = _heads_first(*inputs)
    return (*(operand.requires_grad_() for operand in operands), dout)


def _of_torch(call: Call) -> Callable[..., Any]:
    """Its flash attention."""
    attention = _flash_of_torch(call)
    return lambda q, k, v: attention(q, k, v).transpose(1, 2)


def _gradients_of_torch(call: Call) -> Callable[..., Any]:
    attention = _flash_of_torch(call)

    def run(q, k, v, dout):
        return tuple(gradient.transpose(1, 2) for gradient in torch().autograd.grad(attention(q, k, v), (q, k, v), dout))

    return run


def _flash_of_torch(call: Call) -> Callable[..., Any]:
    """Returns flash attention of torch as a function of arrays with torch's axes."""
    attention = importlib.import_module("torch.nn.attention")
    compute = torch().nn.functional.scaled_dot_product_attention

    def run(q, k, v):
        with attention.sdpa_kernel(attention.SDPBackend.FLASH_ATTENTION):
            return compute(q, k, v, is_causal=call.causal, enable_gqa=call.key_heads is not None)

    return run
