"""Programs of first calls: each public op, its gradient, and the options that change how its kernel is written."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import attention, softmax
from benchmarks.cells import OURS, Cell, Contender, library

_PEERS = ("jax.nn", "cudnn")
_CALL = attention.Call(batch=4, length=4096, heads=16, head_size=128, causal=True)
_BF16 = jnp.bfloat16
_VOCABULARY = 128256


def programs() -> dict[str, Cell]:
    """Programs by the names of their cells, which have the passes `forward` and `backward`; contenders are those compared here.

    Inputs lie along the batch, except the last ones, as many as `shared` says.
    """
    cells = [
        next(cell for cell in softmax.cells() if cell.name == "softmax forward float32 32768x4096"),
        attention.cell_of(_CALL),
        attention.cell_of(replace(_CALL, backward=True)),
        *_of_rows(),
        *_losses(),
        *_attention(),
        *_largest(),
    ]
    return {cell.name: cell for cell in map(_compared, cells)}


def _compared(cell: Cell) -> Cell:
    return replace(cell, contenders=tuple(c for c in cell.contenders if c.name in (OURS, *_PEERS)))


def _program(
    op: str,
    shape: tuple[int, ...],
    options: str,
    call: Callable[..., Any],
    *inputs: Any,
    is_gradient: bool = False,
    shared: int = 0,
    dtype: str = "bfloat16",
) -> Cell:
    """A program of ours; `inputs` are types, and `call` takes arrays of them.

    With `is_gradient` it is differentiated in the floating inputs, for a cotangent that comes first.
    """
    moving = tuple(i for i, kind in enumerate(inputs) if jnp.issubdtype(kind.dtype, jnp.floating))

    def gradient(cotangent, *arrays):
        def of_moving(*own):
            given = dict(enumerate(arrays)) | dict(zip(moving, own, strict=True))
            return call(*given.values())

        out, pullback = jax.vjp(of_moving, *(arrays[i] for i in moving))
        return out, pullback(cotangent)

    def ones(key, hurtful):
        kinds = [jax.eval_shape(call, *inputs), *inputs] if is_gradient else inputs
        return tuple(jnp.ones(kind.shape, kind.dtype) for kind in kinds)

    options = " ".join(filter(None, [options, "grad=1" if is_gradient else ""]))
    pass_ = "backward" if is_gradient else "forward"
    ours = Contender(OURS, lambda: gradient if is_gradient else call)
    return Cell(op, pass_, dtype, shape, options, 0, ones, (ours,), _no_truth, shared=shared)


def _no_truth(*rows):
    raise AssertionError("what a first call computes is not looked at")


def _array(*shape: int, dtype: Any = _BF16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def _of_rows() -> Iterator[Cell]:
    square, vocabulary, columns = (8192, 8192), (512, _VOCABULARY), (64, 4096, 512)
    for name in ("softmax", "log_softmax", "logsumexp"):

        def op(x, where=None, name=name, axis=-1):
            return getattr(library, name)(x, axis, where=where)

        for is_gradient in (False, True):
            yield _program(name, square, "", op, _array(*square), is_gradient=is_gradient)
        yield _program(name, vocabulary, "", op, _array(*vocabulary))
        yield _program(name, square, "where=full", op, _array(*square), _array(*square, dtype=bool))
        yield _program(name, columns, "axis=1", lambda x, op=op: op(x, axis=1), _array(*columns))


_LOSS = {"label_smoothing": 0.1, "z_loss": 1e-4, "logits_soft_cap": 30.0, "ignore_index": -100}


def _losses() -> Iterator[Cell]:
    shape = rows, classes = 8192, _VOCABULARY
    logits, labels, where = _array(*shape), _array(rows, dtype=jnp.int32), _array(rows, 1, dtype=bool)

    def plain(logits, labels):
        return library.cross_entropy(logits, labels)

    def with_all(logits, labels, where):
        return library.cross_entropy(logits, labels, where=where, **_LOSS)

    for is_gradient in (False, True):
        yield _program("cross_entropy", shape, "", plain, logits, labels, is_gradient=is_gradient)
        yield _program("cross_entropy", shape, "all=1", with_all, logits, labels, where, is_gradient=is_gradient)
    hidden, weight = _array(rows, 4096), _array(4096, classes)

    def linear(hidden, labels, weight):
        return library.linear_cross_entropy(hidden, weight, labels, reduction="none")

    for is_gradient in (False, True):
        shape = rows, 4096, classes
        yield _program("linear_cross_entropy", shape, "", linear, hidden, labels, weight, is_gradient=is_gradient, shared=1)


def _attention() -> Iterator[Cell]:
    batch, length, heads, _ = shape = 4, 4096, 16, 128

    def plain(query, key, value):
        return library.dot_product_attention(query, key, value, is_causal=True)

    wide = [_array(*shape, dtype=jnp.float32)] * 3
    yield _program("attention", shape, "causal=1", plain, *wide, dtype="float32")
    operands = {
        "query": _array(*shape),
        "key": _array(*shape),
        "value": _array(*shape),
        "mask": _array(batch, 1, length, length, dtype=bool),
        "query_seq_lengths": _array(batch, dtype=jnp.int32),
        "key_value_seq_lengths": _array(batch, dtype=jnp.int32),
        "query_segment_ids": _array(batch, length, dtype=jnp.int32),
        "key_value_segment_ids": _array(batch, length, dtype=jnp.int32),
        "bias": _array(1, heads, length, length),
        "sinks": _array(heads, dtype=jnp.float32),
    }

    def with_all(*arrays):
        options = {"is_causal": True, "local_window_size": (1024, 0), "logits_soft_cap": 30.0, "dropout_rate": 0.1}
        given = dict(zip(operands, arrays, strict=True))
        return library.dot_product_attention(**given, **options, dropout_rng=jax.random.key(0))

    functions = [_array(*shape)] * 3 + [_array(heads, dtype=jnp.float32), _array(batch, length, dtype=jnp.int32)]

    def with_functions(query, key, value, slopes, documents):
        def score_mod(score, batch, head, query, key):
            return score - slopes[head] * (query - key).astype(jnp.float32)

        def mask_mod(batch, head, query, key):
            return (documents[batch, query] == documents[batch, key]) & (query >= key)

        return library.dot_product_attention(query, key, value, score_mod=score_mod, mask_mod=mask_mod)

    for is_gradient in (False, True):
        yield _program("attention", shape, "functions=1", with_functions, *functions, is_gradient=is_gradient, shared=2)
        yield _program("attention", shape, "all=1", with_all, *operands.values(), is_gradient=is_gradient, shared=2)
    yield from _decoding()


def _decoding() -> Iterator[Cell]:
    batch, keys, heads, key_heads, size, page = 64, 8192, 32, 8, 128, 64
    query, lengths = _array(batch, 1, heads, size), _array(batch, dtype=jnp.int32)
    table = _array(batch, keys // page, dtype=jnp.int32)
    shape = batch, keys, heads, size

    def attend(query, key, value, lengths, scales=None):
        options = {} if scales is None else {"key_scale": scales, "value_scale": scales}
        return library.dot_product_attention(query, key, value, key_value_seq_lengths=lengths, **options)

    def attend_to_pages(query, table, lengths, keys, values, scales=None):
        options = {} if scales is None else {"key_scale": scales, "value_scale": scales}
        return library.paged_attention(query, keys, values, table, lengths, **options)

    pages = batch * keys // page
    for dtype, options in ((_BF16, ""), (jnp.int8, "cache=int8")):
        scales = [] if dtype == _BF16 else [_array(key_heads, dtype=jnp.float32)]
        cache = [_array(batch, keys, key_heads, size, dtype=dtype)] * 2
        options_of_decode = f"decode=1 {options}".strip()
        yield _program("attention", shape, options_of_decode, attend, query, *cache, lengths, *scales, shared=len(scales))
        cache = [_array(pages, page, key_heads, size, dtype=dtype)] * 2
        scales = [] if dtype == _BF16 else [_array(pages, key_heads, dtype=jnp.float32)]
        inputs = query, table, lengths, *cache, *scales
        yield _program("paged_attention", shape, options, attend_to_pages, *inputs, shared=2 + len(scales))


_FILTERS: dict[str, dict[str, Any]] = {
    "": {},
    "top_k=50": {"top_k": 50},
    "top_p=0.9": {"top_p": 0.9},
    "min_p=0.1": {"min_p": 0.1},
    "all=1": {"temperature": 0.8, "top_k": 50, "top_p": 0.9, "min_p": 0.1, "return_log_prob": True},
}


def _largest() -> Iterator[Cell]:
    vocabulary, router = (512, _VOCABULARY), (262144, 256)
    for name in ("top_k", "softmax_top_k"):
        for shape, k in ((vocabulary, 50), (router, 8)):

            def op(x, name=name, k=k):
                return getattr(library, name)(x, k)[0]

            for is_gradient in (False, True):
                yield _program(name, shape, f"k={k}", op, _array(*shape), is_gradient=is_gradient)
    for text, options in _FILTERS.items():

        def sample(logits, options=options):
            return library.categorical(jax.random.key(0), logits, **options)

        yield _program("categorical", vocabulary, text, sample, _array(*vocabulary))
