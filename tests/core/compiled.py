"""Compiles every configuration that a table or a plan can give to a Mosaic kernel, with ptxas for sm_90a, GPU or not.

    python -m tests.core.compiled [--only REGEX] [--list] [--part I/N] [--processes N] [--csv PATH] [--sass FOLDER]

Lowering is not compiling: ptxas may find too few registers for an instruction, or more shared memory than there is. Problems of
each op are swept, their configurations asked for, and of problems whose kernels are configured alike the largest is compiled.
A line says `compiled`, with what ptxas says of each kernel, or the error. The exit status is 1 if there is an error. Cases that
the file has as compiled are left out. Without a GPU it needs JAX's plugin for CUDA: see `xla_cuda`.

With `--sass` the line also says where memory may be overwritten that is still being loaded: see `loads_in_flight` of `sass.py`.
The listings of such kernels are written to the folder. This needs `nvdisasm` beside the plugin's `ptxas`.
"""

import argparse
import contextlib
import csv
import functools
import io
import itertools
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jaxlib.mlir import ir

import jaxsoftmax
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu.emit import WARP
from jaxsoftmax._gpu.rows.plan import ColumnPlan
from jaxsoftmax.ops.attention import mosaic_sm90 as attention
from jaxsoftmax.ops.attention.mosaic_sm90 import decode
from jaxsoftmax.ops.attention.mosaic_sm90.common import NARROW
from jaxsoftmax.ops.attention.primitive import ATTENTION, ATTENTION_JVP, ATTENTION_VJP, PAGED
from jaxsoftmax.ops.attention.score_functions import functions_and_operands
from jaxsoftmax.ops.cross_entropy import primitive as cross_entropy_primitive
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import losses
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem
from jaxsoftmax.ops.divergence import mosaic_sm90 as divergence
from jaxsoftmax.ops.divergence.primitive import JS_DIVERGENCE, JS_DIVERGENCE_VJP, KL_DIVERGENCE, KL_DIVERGENCE_VJP
from jaxsoftmax.ops.softmax import mosaic_sm90 as softmax
from jaxsoftmax.ops.softmax import primitive as softmax_primitive
from jaxsoftmax.ops.top_k.mosaic_sm90 import warp_rows
from jaxsoftmax.ops.top_k.mosaic_sm90.keys import kernel_dtype
from jaxsoftmax.ops.top_k.mosaic_sm90.long_rows import plan_sweeps
from jaxsoftmax.ops.top_k.mosaic_sm90.sampling import plan_check, plan_draw

from ..support import xla_cuda
from . import sass

TARGET = {"target": HOPPER}


@dataclass(frozen=True)
class Case:
    """A problem to compile.

    Attributes:
      name: the op, a primitive or function of it, and what it is called with.
      key: what is equal where kernels are configured alike.
      function: a function of a dictionary of operands.
      operands: their types by name.
    """

    name: str
    key: tuple[Any, ...]
    function: Callable[..., Any]
    operands: dict[str, Any]


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# Attention: operands and options of a feature, by batch, query heads, queries and keys.

B = 2
FEATURES: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": lambda n, t, s: {},
    "causal": lambda n, t, s: {"window": (None, 0)},
    "window": lambda n, t, s: {"window": (100, 30)},
    "soft cap": lambda n, t, s: {"soft_cap": 30.0},
    "query lengths": lambda n, t, s: {"query_lengths": shaped(B, dtype="int32")},
    "lengths": lambda n, t, s: {"query_lengths": shaped(B, dtype="int32"), "key_lengths": shaped(B, dtype="int32")},
    "offset": lambda n, t, s: {"query_offset": shaped(B, dtype="int32"), "window": (None, 0)},
    "segments": lambda n, t, s: {"query_segments": shaped(B, t, dtype="int32"), "key_segments": shaped(B, s, dtype="int32")},
    "mask": lambda n, t, s: {"mask": shaped(B, n, t, s, dtype=bool)},
    "mask of keys": lambda n, t, s: {"mask": shaped(B, 1, 1, s, dtype=bool)},
    "mask of queries": lambda n, t, s: {"mask": shaped(1, n, t, 1, dtype=bool)},
    "bias": lambda n, t, s: {"bias": shaped(B, n, t, s)},
    "bias of 16 bits": lambda n, t, s: {"bias": shaped(1, 1, t, s, dtype="bfloat16")},
    "whole bias of 16 bits": lambda n, t, s: {"bias": shaped(B, n, t, s, dtype="bfloat16")},
    "sinks": lambda n, t, s: {"sinks": shaped(n)},
    "dropout": lambda n, t, s: {"dropout_rate": 0.2, "seeds": shaped(B, n, 4, dtype="uint32")},
}
EVERYTHING = ("window", "soft cap", "lengths", "offset", "segments", "mask", "bias", "sinks", "dropout")
FEATURES["everything"] = lambda *sizes: {key: own for name in EVERYTHING for key, own in FEATURES[name](*sizes).items()}
FEATURES["everything but dropout"] = lambda *sizes: {
    key: own for name in EVERYTHING[:-1] for key, own in FEATURES[name](*sizes).items()
}
FEATURES["what tiles depend on"] = lambda *sizes: {
    key: own for name in ("lengths", "segments", "mask of keys") for key, own in FEATURES[name](*sizes).items()
}


def functions_of(n, t, s, score=False, mask=False):
    """Operands and parameters of a score and a mask function with tables of heads, queries and keys, and of distances."""
    slopes, distances, ids = jnp.ones(n), jnp.ones((n, t + s), jnp.bfloat16), jnp.zeros(t + s, jnp.int32)

    def score_mod(score, batch, head, query, key):
        nearness = slopes[head] * jnp.abs(query - key).astype(jnp.float32)
        return jnp.tanh(score - nearness + distances[head, query - key + s].astype(jnp.float32))

    def mask_mod(batch, head, query, key):
        return (ids[query] == ids[key]) & (query // 64 >= key // 64)

    given = score_mod if score else None, mask_mod if mask else None
    functions, operands = functions_and_operands("compiled", jnp.float32, *given, (B, n))
    return functions | {name: shaped(*array.shape, dtype=array.dtype) for name, array in operands.items()}


FEATURES["score function"] = functools.partial(functions_of, score=True)
FEATURES["mask function"] = functools.partial(functions_of, mask=True)
FEATURES["both functions"] = functools.partial(functions_of, score=True, mask=True)
OPTIONS = {"window": (None, None), "soft_cap": None, "dropout_rate": 0.0, "scale": 0.125}
PADDED = {64: 40, 128: 80, 192: 136, 256: 200}  # a head size that is padded to each of those on chip
IN_NARROW_TILES = [(32, 32), (96, 96), (160, 160), (224, 224), (64, 96), (96, 192), (224, 128)]
LARGE = [(512, 512), (440, 440), (384, 384), (320, 512), (512, 64), (64, 512), (200, 512)]  # of queries and keys, and of values
TANGENTS = ("query key value bias sinks", "query", "key", "value", "query key", "key value", "query value")
# Queries, and query and key heads. With those of "many that share", float32 keys and values are split before.
QUERIES = {"many": (300, 4, 2), "many that share": (300, 32, 2), "one": (1, 8, 2)}
QUERIES |= {"many in whole tiles": (320, 4, 2)}
QUERIES |= {"few in place": (16, 12, 3), "few": (16, 15, 3), "few of 3 tiles": (48, 8, 2)}


def attention_cases() -> Iterator[Case]:
    """Each pair of head sizes with few features, and equal ones, padded or not, with all of them."""
    every = [(size, other) for size in PADDED for other in PADDED]
    sizes = [*every, *((PADDED[size], PADDED[other]) for size, other in every), *LARGE, *IN_NARROW_TILES]
    for dtype, (size, value_size) in itertools.product(attention.DTYPES, sizes):
        if max(size, value_size) > attention.MAX_HEAD_SIZE[dtype]:
            continue
        few = ("plain", "what tiles depend on", "everything", "everything but dropout")
        features = FEATURES if size == value_size and dtype != "float16" else few  # whose code is that of bfloat16
        for feature, (kind, counts) in itertools.product(features, QUERIES.items()):
            is_many = kind.startswith("many")
            if kind == "many that share" and dtype != "float32":
                continue
            is_whole, has_whole_sizes = kind == "many in whole tiles", size % NARROW == value_size % NARROW == 0
            if is_whole and (dtype == "float32" or not has_whole_sizes):
                continue
            if (size, value_size) in IN_NARROW_TILES and not is_whole:
                continue
            for byte in (None, "int8", "float8_e4m3fn"):
                if byte and (is_many or dtype == "float32" or (size != value_size and byte != "int8")):
                    continue
                if is_many and feature == "everything but dropout":
                    continue
                if not is_many and feature not in few and (kind, byte) != ("few in place", None):
                    continue
                yield from _forward(dtype, size, value_size, feature, kind, counts, byte)
        if (size, value_size) in IN_NARROW_TILES:
            continue
        for feature in features if (size, value_size) in ((64, 64), (128, 128), (256, 256)) else ("plain",):
            for is_deterministic in (False, True):
                yield from _backward(dtype, size, value_size, feature, is_deterministic)
            yield from _backward(dtype, size, value_size, feature, is_deterministic=False, has_many_tiles=True)
        if dtype == "float32":
            continue
        for feature, tangents in itertools.product(features if size == value_size else ("plain",), TANGENTS):
            if feature in ("plain", "causal", "everything") or tangents == TANGENTS[0]:
                yield from _tangent(dtype, size, value_size, feature, tangents)
    pages = itertools.product(
        ("bfloat16", "float16"), decode.PAGE_SIZES, (None, "int8", "float8_e4m3fn"), (64, 128, 192, 256, 512)
    )
    for (dtype, page, byte, size), (kind, counts) in itertools.product(pages, QUERIES.items()):
        if not kind.startswith("many") and (dtype == "bfloat16" or page == 16):
            yield from _paged(dtype, page, byte, size, kind, counts)


def _attention(name, operation, params, dtype, operands, kind=None) -> Iterator[Case]:
    """A case, unless there is no plan for it."""
    plan: Any = attention.plan(operation.problem(operation, operands, params), HOPPER)
    if isinstance(plan, Refusal) and (plan := plan.plan) is None:
        return
    kinds = {"paged_attention": "paged", "dot_product_attention_vjp": "backward", "dot_product_attention_jvp": "tangent"}
    kind = kind or kinds.get(operation.name, "forward")
    yield Case(
        f"attention {kind} {name}", (kind, dtype, *_said(plan.geometry)), lambda operands: plan.run(**operands), operands
    )


def _said(kernel) -> tuple[Any, ...]:
    """What a plan says of the kernel's code, which numbers of tiles and lengths do not change."""
    numbers = {
        "batch",
        "query",
        "key",
        "queries",
        "blocks_q",
        "blocks_kv",
        "n_tiles",
        "n_blocks",
        "value_size",
        "lengths",
        "scale",
    }
    said = {name: value for name, value in vars(kernel).items() if name not in numbers}
    said |= {"window": tuple(side is None for side in kernel.window), "soft_cap": kernel.soft_cap is None}
    said |= {"names": tuple(sorted(kernel.names)), "dropout_rate": kernel.dropout_rate > 0}
    said |= {"heads_per_key_head": kernel.query[1] > kernel.key[1], "is_padded": kernel.query[2] % 64 > 0}
    pages = getattr(kernel, "pages", None)
    said |= {"splits": said.get("splits", 1) > 1, "pages": pages and pages.size}
    return tuple(sorted(said.items(), key=lambda item: item[0]))


def _split(given) -> tuple[dict[str, Any], dict[str, Any]]:
    """Operands, and options, of what a feature has."""
    names = {*OPTIONS, "score_mod", "mask_mod"}
    operands = {name: value for name, value in given.items() if name not in names}
    return operands, OPTIONS | {name: value for name, value in given.items() if name in names}


def _qkv(dtype, size, value_size, counts, byte=None):
    length, heads, key_heads = counts
    keys = 301 if length == 300 else 1024
    given = {"query": shaped(B, length, heads, size, dtype=dtype)}
    for name, own in (("key", size), ("value", value_size)):
        given[name] = shaped(B, keys, key_heads, own, dtype=byte or dtype)
        given |= {f"{name}_scale": shaped(B, key_heads)} if byte else {}
    return given, (heads, length, keys)


PARAMS = {"precision": None, "deterministic_gradients": False}


def _forward(dtype, size, value_size, feature, kind, counts, byte) -> Iterator[Case]:
    given, lengths = _qkv(dtype, size, value_size, counts, byte)
    more, options = _split(FEATURES[feature](*lengths))
    given |= more
    if not kind.startswith("many") and options["dropout_rate"]:
        return
    if byte and not decode.serves_as_stored(*(given[name] for name in ("query", "key", "value"))):
        return
    name, params = f"{dtype} {size}x{value_size} {kind} {byte or ''} {feature}", PARAMS | options | {"return_lse": True}
    yield from _attention(name, ATTENTION, params, dtype, given)
    is_of_ring = kind == ("many that share" if dtype == "float32" else "many")
    if is_of_ring and feature in ("plain", "causal", "everything"):
        heads, length, _ = lengths
        of_ring = given | {"initial_out": shaped(B, length, heads, value_size), "initial_lse": shaped(B, heads, length)}
        step = params | {"is_partial": True}
        yield from _attention(f"{name} step of a ring", ATTENTION, step, dtype, of_ring, "forward, onto")


def _backward(dtype, size, value_size, feature, is_deterministic, has_many_tiles=False) -> Iterator[Case]:
    counts = (300, 600, 300) if has_many_tiles else QUERIES["many"]  # of few tiles each has a single query head
    given, (heads, length, keys) = _qkv(dtype, size, value_size, counts)
    more, options = _split(FEATURES[feature](heads, length, keys))
    given |= more
    wanted = tuple(name for name in ("query", "key", "value", "bias", "sinks") if name in given)
    operands = given | {"out": shaped(B, length, heads, value_size, dtype=dtype), "lse": shaped(B, heads, length)}
    operands["d_out"] = operands["out"]
    name = f"{dtype} {size}x{value_size} {feature}{' deterministic' * is_deterministic}{' many tiles' * has_many_tiles}"
    params = PARAMS | options | {"wanted": wanted, "deterministic_gradients": is_deterministic}
    yield from _attention(name, ATTENTION_VJP, params, dtype, operands)
    if feature in ("plain", "causal", "everything") and not has_many_tiles:
        step = params | {"is_partial": True}
        yield from _attention(f"{name} step of a ring", ATTENTION_VJP, step, dtype, operands, "backward, partial")


def _tangent(dtype, size, value_size, feature, tangents) -> Iterator[Case]:
    given, (heads, length, keys) = _qkv(dtype, size, value_size, QUERIES["many"])
    more, options = _split(FEATURES[feature](heads, length, keys))
    given |= more
    operands = given | {"out": shaped(B, length, heads, value_size, dtype=dtype), "lse": shaped(B, heads, length)}
    operands |= {f"d_{name}": given[name] for name in tangents.split() if name in given}
    name = f"{dtype} {size}x{value_size} {feature}, {tangents}"
    yield from _attention(name, ATTENTION_JVP, PARAMS | options, dtype, operands)


def _paged(dtype, page, byte, size, kind, counts) -> Iterator[Case]:
    length, heads, key_heads = counts
    of_pages = shaped(1, 100, page, key_heads, size, dtype=byte or dtype)
    given = {"query": shaped(B, length, heads, size, dtype=dtype), "key_pages": of_pages, "value_pages": of_pages}
    given |= {"page_table": shaped(B, 1024 // page, dtype="int32"), "key_lengths": shaped(B, dtype="int32")}
    given |= {"query_offset": shaped(B, dtype="int32")}
    of_heads, of_each = ({f"{name}_{of}": shaped(*sizes, key_heads) for name in ("key", "value")} for of, sizes in
                         (("scale", (B,)), ("page_scale", (1, 100))))  # fmt: skip
    params = PARAMS | OPTIONS | {"window": (None, 0), "return_lse": True}
    del params["dropout_rate"]
    for scales in (of_heads, of_each) if byte else ({},):
        name = f"{dtype} {byte or ''} {size} pages of {page} {kind} {'scales of pages' * (scales is of_each)}"
        yield from _attention(name, PAGED, params, dtype, given | scales)


# Rows.

_ROWS = 4
_IN_FLOAT16 = ("softmax", "log_softmax_vjp")  # whose configurations are those of bfloat16
OF_ROWS = {
    "softmax": {},
    "log_softmax": {"return_state": True},
    "logsumexp": {"return_state": True},
    "softmax_jacobian": {},
    "log_softmax_jvp": {"scale_tangent": True},
    "log_softmax_vjp": {"scale_tangent": True},
    "logsumexp_jvp": {"scale_tangent": True},
    "logsumexp_vjp": {"scale_tangent": True},
}
OF_SOFTMAX = {name: getattr(softmax_primitive, name.upper()) for name in OF_ROWS}
OF_LOSSES: dict[str, dict[str, Any]] = {
    "cross_entropy": {"return_total": False, "return_state": True},
    "cross_entropy_vjp": {},
    "cross_entropy_gradient": {"label_smoothing": 0.0, "z_loss": 0.1},
}
OF_CROSS_ENTROPY = {name: getattr(cross_entropy_primitive, name.upper()) for name in OF_LOSSES}


def widths() -> list[int]:
    """Short rows, and of longer ones some that are odd, whole vectors, whole lines of the cache, and whole KiB."""
    found = set(range(2, 40))
    for quarter in range(20, 104):
        for unit in (1, 8, 64, 1024):
            found.add(max(1, int(2 ** (quarter / 4)) // unit) * unit + (unit == 1))
    return sorted(found)


def softmax_cases() -> Iterator[Case]:
    """Each kernel of rows, by dtype, mask and scale; along the last axis and along another one."""
    for primitive, options in OF_ROWS.items():
        for dtype, masked in (("float32", False), ("float32", True), ("float32", "end"), ("bfloat16", False),
                              ("bfloat16", True), ("bfloat16", "end"), ("float16", False)):  # fmt: skip
            for inner, cols in itertools.product((1, 16, 100, 1024), widths()):
                if (inner > 1 and (cols % 8 or cols > 2**22)) or (dtype == "float16" and primitive not in _IN_FLOAT16):
                    continue
                yield from _rows(primitive, options, dtype, masked, cols, inner)


def _rows(primitive, options, dtype, masked, cols, inner) -> Iterator[Case]:
    whole, row = (_ROWS, cols), (_ROWS, 1)
    if inner > 1:
        whole, row = (*whole, inner), (*row, inner)
    given = {"x": shaped(*whole, dtype=dtype)}
    if primitive == "softmax_jacobian":
        if masked is True:
            return
        given = {"y": given["x"], "t": given["x"]}
    elif primitive.endswith(("jvp", "vjp")):
        of_t = row if primitive == "logsumexp_vjp" else whole
        given |= {"m": shaped(*row), "d": shaped(*row), "t": shaped(*of_t, dtype="float32" if of_t is row else dtype)}
    if primitive != "softmax_jacobian":
        given["where"] = shaped(*whole, dtype=bool) if masked is True else None
    given["scale"] = shaped(*row) if masked == "end" else None
    options = options | {"axes": (1,), "dtype": jnp.dtype("float32" if primitive == "logsumexp_jvp" else dtype)}
    operation = OF_SOFTMAX[primitive]
    plan = softmax.plan(operation.problem(operation, _there(given), options), HOPPER)
    if isinstance(plan, Refusal) and plan.plan is None:
        return
    plan = plan.plan if isinstance(plan, Refusal) else plan
    name = f"softmax {primitive} {dtype} {cols}{f'x{inner}' if inner > 1 else ''} {masked or ''}"
    yield Case(name, (primitive, dtype, masked, *_of_layout(plan.row_plan)), functools.partial(_run_plan, plan), _there(given))


def _run_plan(plan, given):
    return plan.run(**given)


def _there(given):
    return {name: kind for name, kind in given.items() if kind is not None}


def _of_layout(plan) -> tuple[Any, ...]:
    """Returns the settings of a plan that change the code of rows: steps if each has its own, but no blocks of the grid."""
    blocks = plan.blocks if not plan.persistent_blocks else 17
    counted = replace(plan, cols=0, blocks=blocks, persistent_blocks=min(plan.persistent_blocks, 1))
    if isinstance(plan, ColumnPlan):
        return (replace(counted, inner=0), plan.inner % plan.vector)
    steps = 0 if plan.unroll or plan.threads <= WARP else plan.steps
    return (counted, plan.is_shifted, plan.has_whole_vectors, plan.is_exact, plan.is_joined, steps)


def cross_entropy_cases() -> Iterator[Case]:
    """Kernels of losses, with labels, a mask, a cap or a divisor, or with the entropy and a scale; and of a linear layer."""
    for (primitive, options), dtype in itertools.product(OF_LOSSES.items(), ("float32", "bfloat16")):
        for masked, cols in itertools.product((False, True, "end", "entropy", "divided"), widths()):
            given = {"x": shaped(_ROWS, cols, dtype=dtype), "labels": shaped(_ROWS, 1, dtype="int32")}
            if primitive != "cross_entropy_gradient":
                given["where"] = shaped(_ROWS, cols, dtype=bool) if masked is True else None
            elif masked in (True, "entropy", "divided"):
                continue
            of = options | {"axes": (1,), "dtype": jnp.dtype("float32"), "soft_cap": 30.0 if masked == "end" else None}
            if primitive == "cross_entropy_vjp":
                given |= dict.fromkeys("mdabc", shaped(_ROWS, 1))
                of["dtype"] = jnp.dtype(dtype)
            if masked == "end":
                of |= {"return_total": True} if primitive == "cross_entropy" else {}
                of |= {"label_smoothing": 0.1} if primitive == "cross_entropy_gradient" else {}
            elif masked == "divided":
                given["divisor"] = shaped(_ROWS, 1)
            elif masked == "entropy":
                given["scale"] = shaped(_ROWS, 1)
                given |= {"e": shaped(_ROWS, 1)} if primitive == "cross_entropy_vjp" else {}
                of |= {"return_entropy": True} if primitive == "cross_entropy" else {}
            elif primitive == "cross_entropy_gradient":
                given["t"] = shaped(_ROWS, 1)
            given |= {"t": shaped(_ROWS, 1)} if primitive == "cross_entropy_gradient" else {}
            plan = losses.plan(CrossEntropyProblem(OF_CROSS_ENTROPY[primitive], _there(given), of), HOPPER)
            if isinstance(plan, Refusal) and plan.plan is None:
                continue
            plan = plan.plan if isinstance(plan, Refusal) else plan
            key = (primitive, dtype, masked, *_of_layout(plan.row_plan))
            name = f"cross_entropy {primitive} {dtype} {cols} {masked or ''}"
            yield Case(name, key, functools.partial(_run_plan, plan), _there(given))
    for dtype, class_axis, cap, sizes in itertools.product(
        ("bfloat16", "float16"), (0, 1), (None, 30.0), ((256, 1024), (256, 1000), (250, 1000))
    ):
        hidden, classes = sizes
        shape = (classes, hidden) if class_axis == 0 else (hidden, classes)
        operands = {"hidden": shaped(300, hidden, dtype=dtype), "weight": shaped(*shape, dtype=dtype)}
        options = {"class_axis": class_axis, "logits_soft_cap": cap, "implementation": "mosaic"}
        run = functools.partial(_public, jaxsoftmax.linear_cross_entropy, options)
        name = f"cross_entropy linear {dtype} {hidden}x{classes} classes {class_axis} {'cap' * bool(cap)}"
        yield Case(name, (name,), run, operands | {"labels": shaped(300, dtype="int32")})
        for has_bias, scaled in itertools.product((False, True), ("", "scaled")):
            if dtype == "bfloat16":  # float16 has the kernels of log-probabilities
                options = {"class_axis": class_axis, "logits_soft_cap": cap, "implementation": "mosaic"}
                more = ({"temperature": shaped(300)} if scaled else {}) | ({"bias": shaped(classes)} if has_bias else {})
                kind = " ".join([str(class_axis), *filter(None, ["cap" * bool(cap), "bias" * has_bias, scaled])])
                name = f"cross_entropy linear gradient {hidden}x{classes} classes {kind}"
                run = functools.partial(_with_gradient_of_losses, options)
                yield Case(name, (name,), run, operands | {"labels": shaped(300, dtype="int32")} | more)
        for has_bias, scaled in itertools.product((False, True), ("", "scaled", "by scale")):
            options = {"class_axis": class_axis, "logits_soft_cap": cap}
            run = functools.partial(_with_gradient_of_log_probs, options, scaled == "by scale")
            more = {"tokens": shaped(300, dtype="int32")}
            more |= ({"temperature": shaped(300)} if scaled else {}) | ({"bias": shaped(classes)} if has_bias else {})
            kind = " ".join([str(class_axis), *filter(None, ["cap" * bool(cap), "bias" * has_bias, scaled])])
            name = f"cross_entropy linear log_probs {dtype} {hidden}x{classes} classes {kind}"
            yield Case(name, (name,), run, operands | more)
    # Products of several blocks of classes; 2624 units are an odd number of tiles, whose blocks of threads are in no cluster.
    for dtype, wide, class_axis, hidden in itertools.product(("bfloat16", "float16"), ("", "float32"), (0, 1), (4096, 2624)):
        shape = (128256, hidden) if class_axis == 0 else (hidden, 128256)
        operands = {"hidden": shaped(8192, hidden, dtype=dtype), "weight": shaped(*shape, dtype=wide or dtype)}
        run = functools.partial(_with_gradient_of_log_probs, {"class_axis": class_axis}, False)
        name = f"cross_entropy linear blocks {dtype} {hidden} classes {class_axis} {wide}"
        yield Case(name, (name,), run, operands | {"tokens": shaped(8192, dtype="int32")})


def _with_gradient_of_losses(options, given):
    """Runs the kernel of a mean loss with its gradients, with an entropy if there is a temperature."""
    rest = {name: operand for name, operand in given.items() if name not in ("hidden", "weight")}

    def loss(hidden, weight, temperature):
        more = {} if temperature is None else {"temperature": temperature}
        return jaxsoftmax.linear_cross_entropy(hidden, weight, **rest | more, **options)

    wrt = (0, 1) if "temperature" not in given else (0, 1, 2)
    return jax.value_and_grad(loss, wrt)(given["hidden"], given["weight"], given.get("temperature"))


def _with_gradient_of_log_probs(options, wants_temperature, given):
    """Runs both kernels of `linear_log_probs`, with an entropy if there is a temperature."""
    tokens, bias = given["tokens"], given.get("bias")
    options = options | {"return_entropy": "temperature" in given}

    def loss(hidden, weight, temperature):
        results = jaxsoftmax.linear_log_probs(hidden, weight, tokens, bias=bias, temperature=temperature, **options)
        return sum(map(jnp.sum, results if options["return_entropy"] else [results]))

    wrt = (0, 1, 2) if wants_temperature else (0, 1)
    return jax.value_and_grad(loss, wrt)(given["hidden"], given["weight"], given.get("temperature"))


def divergence_cases() -> Iterator[Case]:
    """The kernels of two softmaxes by both dtypes, with a mask or scales, and by what is differentiated."""
    operations = []
    for forward, vjp, more in ((KL_DIVERGENCE, KL_DIVERGENCE_VJP, {}), (JS_DIVERGENCE, JS_DIVERGENCE_VJP, {"weight": 0.3})):
        operations += [(forward, more | {"return_state": True}), *((vjp, more | {"by": by}) for by in ("x", "y", "xy"))]
    dtypes = [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32")]
    for (operation, options), (dtype, y_dtype), masked in itertools.product(operations, dtypes, (False, True, "end")):
        if masked is not False and (options.get("by") in ("x", "y") or dtype != y_dtype):
            continue
        for inner, cols in itertools.product((1, 16, 1024), widths()):
            if inner > 1 and (cols % 8 or cols > 2**22):
                continue
            shape = (_ROWS, cols, *([inner] if inner > 1 else []))
            row = shaped(_ROWS, 1, *shape[2:])
            given = {"x": shaped(*shape, dtype=dtype), "y": shaped(*shape, dtype=y_dtype)}
            given |= {"where": shaped(*shape, dtype=bool)} if masked is True else {}
            given |= {"scale": row, "y_scale": row} if masked == "end" else {}
            of = options | {"axes": (1,), "dtype": jnp.dtype("float32")}
            if operation in (KL_DIVERGENCE_VJP, JS_DIVERGENCE_VJP):
                given |= dict.fromkeys(("m", "d", "y_m", "y_d", "a", "b", "c"), row)
                of |= {"dtype": jnp.dtype(dtype if "x" in options["by"] else y_dtype), "y_dtype": jnp.dtype(y_dtype)}
            plan = divergence.plan(operation.problem(operation, given, of), HOPPER)
            if isinstance(plan, Refusal) and plan.plan is None:
                continue
            plan = plan.plan if isinstance(plan, Refusal) else plan
            rows = plan.sums if isinstance(plan, divergence.PassesPlan) else plan
            if rows is None:  # all kernels are softmax's
                continue
            key = (operation.name, dtype, y_dtype, masked, options.get("by"), rows is plan, *_of_layout(rows.row_plan))
            size = f"{cols}{f'x{inner}' if inner > 1 else ''}"
            name = f"divergence {operation.name} {options.get('by', '')} {dtype} {y_dtype} {size}"
            yield Case(f"{name} {masked or ''}", key, functools.partial(_run_plan, plan), given)


def _public(function, options, given):
    return function(**given, **options)


# The largest entries, and samples.


def top_k_cases() -> Iterator[Case]:
    """`top_k`, `softmax_top_k` with its gradient, and `categorical`: short rows, and rows of each plan, few and many."""
    cols_of_all = (16, 64, 128, 256, 512, 777, 4096, 8000, 8192, 32768, 50257, 131072, 2**20 + 1, 2**22)
    for rows, cols, k in itertools.product((1, 2048), cols_of_all, (1, 2, 8, 16, 40, 256, 1024)):
        if k > cols or (k in (2, 40) and cols > 512):
            continue
        for dtype in ("float32", "bfloat16", "float16", "int32", "int8", "uint16"):
            for kind in ("values", "where", "weights", "weights of the found", "scaled"):
                if (kind != "values" and not dtype.startswith(("float", "bfloat"))) or (kind == "where" and dtype == "float16"):
                    continue
                yield from _top_k(rows, cols, k, dtype, kind)
    for rows, cols, dtype in itertools.product((1, 64, 2048), cols_of_all[2:], ("float32", "bfloat16", "float16")):
        for kind in ("plain", "temperature", "top_p", "min_p", "top_p min_p", "log_prob", "top_p log_prob", "noise"):
            yield from _categorical(rows, cols, dtype, kind)
        for kind in ("divided", "divided log_prob"):
            yield from _categorical(rows, cols, dtype, kind)


def _top_k(rows, cols, k, dtype, kind) -> Iterator[Case]:
    x = shaped(rows, cols, dtype=dtype)
    plan = plan_sweeps(rows, cols, kernel_dtype(x.dtype).itemsize, HOPPER, has_state=kind == "weights")
    is_short = warp_rows.serves(cols, x.dtype.itemsize) and k <= warp_rows.MAX_K
    of_plan = (cols, rows > 1) if is_short else _key_of_sweeps(plan)
    key = (kind, dtype, k, is_short, rows == 1, plan.row_plan.has_whole_vectors, *of_plan)
    operands, options = {"x": x}, {"k": k, "implementation": "mosaic"}
    function: Callable[..., Any] = jaxsoftmax.top_k
    if kind == "where":
        operands["where"] = shaped(rows, cols, dtype=bool)
    elif kind != "values":
        options |= {"normalize": "selected" if kind == "weights of the found" else "all"}
        options |= {"scale": 0.5} if kind == "scaled" else {}
        function = _with_gradient if kind != "scaled" else _weights
    yield Case(f"top_k {kind} {dtype} {rows}x{cols} k {k}", key, functools.partial(_public, function, options), operands)


def _key_of_sweeps(plan) -> tuple[Any, ...]:
    """What is equal where kernels read rows alike."""
    return replace(plan.row_plan, cols=0), plan.blocks, plan.slices, plan.copied, plan.row_plan.is_joined


def _weights(x, **options):
    return jaxsoftmax.softmax_top_k(x, **options)


def _with_gradient(x, **options):
    """The weights, and the gradient of their squares, on whichever implementation has one."""
    weights, pull = jax.vjp(lambda x: _weights(x, **options)[0], x)
    return weights, pull(weights)


def _categorical(rows, cols, dtype, kind) -> Iterator[Case]:
    x = shaped(rows, cols, dtype=dtype)
    of = {"temperature": shaped(rows)} if kind not in ("plain", "divided") else {}
    of |= {name: shaped(rows) for name in ("top_p", "min_p") if name in kind}
    parts = 2 if kind in ("log_prob", "divided log_prob") else int("top_p" in kind)
    plans = plan_draw(rows, cols, parts, HOPPER), plan_check(rows, cols, x.dtype.itemsize, HOPPER)
    key = ("categorical", kind, dtype, rows == 1, *map(_key_of_sweeps, plans))
    options = {"return_log_prob": "log_prob" in kind, "implementation": "mosaic"}
    operands = {"key": shaped(2, dtype="uint32"), "logits": x} | of
    function = _divided_samples if "divided" in kind else jaxsoftmax.categorical
    operands |= {"divisor": shaped(rows, 1)} if "divided" in kind else {}
    run = functools.partial(_public, function, options)
    yield Case(f"top_k categorical {kind} {dtype} {rows}x{cols}", key, run, operands)


def _divided_samples(logits, divisor, **options):
    return jaxsoftmax.categorical(logits=logits.astype(jnp.float32) / divisor, **options)


CASES = (attention_cases, softmax_cases, cross_entropy_cases, divergence_cases, top_k_cases)


def cases(only: str = "") -> list[Case]:
    """The last case of each key, among those whose name has a match."""
    pattern, found = re.compile(only), {}
    for case in itertools.chain.from_iterable(make() for make in CASES):
        if pattern.search(case.name):
            found[case.key] = case
    return list(found.values())


# Compiling.


@dataclass
class Row:
    """A line of the file: what ptxas says of a kernel, or the error of a case."""

    case: str
    kernel: str
    registers: int = 0
    spilled: int = 0  # bytes
    notes: str = ""  # codes of what ptxas remarks, such as that products are serialised; loads in flight
    seconds: float = 0
    error: str = ""


_KERNEL = re.compile(
    r"Compiling entry function '(\w+?)(?:_mosaic_gpu_kernel)?'.*?"
    r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers",
    re.DOTALL,
)

_HASH = re.compile(r'kernel_hash = "((?:[^"\\]|\\.)*)"')  # of the text of a kernel
_compiled: set[str] = set()  # the hashes of the kernels of this process


# Kernels are traced while they are lowered, where MLIR has a context: so is a case, in a primitive of its own.
_case = Primitive("case")
_case.multiple_results = True
_case.def_abstract_eval(lambda *operands, function, names, results: list(results))
mlir.register_lowering(
    _case,
    lambda ctx, *operands, function, names, results: mlir.lower_fun(
        lambda *given: jax.tree.leaves(function(dict(zip(names, given, strict=True))))
    )(ctx, *operands),
    cacheable=False,
)


def traced_while_lowered(function, operands: dict[str, Any]) -> Callable[..., list[Any]]:
    """The function of operands, which are given one by one."""
    with mlir.make_ir_context(), ir.Location.unknown():
        results = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in jax.tree.leaves(jax.eval_shape(function, operands)))
    jax.clear_caches()
    return functools.partial(_case.bind, function=function, names=tuple(operands), results=results)


def compile_case(case: Case, folder: Path | None = None) -> list[Row]:
    """Compiles a case; looks for loads in flight if there is a folder for listings."""
    start = time.perf_counter()
    dumps = {"MOSAIC_GPU_DUMP_PTXAS": "1"} | ({} if folder is None else {"MOSAIC_GPU_DUMP_SASS_CTRL": "1"})
    with mock.patch.dict(os.environ, dumps), standard_output() as printed:
        try:
            function = traced_while_lowered(case.function, case.operands)
            placed = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=xla_cuda.sharding()) for a in case.operands.values()]
            lowered = jax.jit(function, out_shardings=xla_cuda.sharding()).lower(*placed)
            lowered.compile()
            kernels, error = set(_HASH.findall(lowered.as_text())), ""
        except Exception as problem:
            kernels, error = set(), f"{type(problem).__name__}: {problem}"
    seconds, text = round(time.perf_counter() - start, 2), printed()
    notes = " ".join(sorted({code for code in re.findall(r"\((C\d+)\)", text) if code != "C7519"}))
    if error:
        fatal = re.search(r"ptxas .*\b(?:fatal|error)\s*:.*", text)
        return [Row(case.name, "", notes=notes, seconds=seconds, error=fatal[0] if fatal else error.splitlines()[0])]
    rows = []
    for told in re.split("(?=Compiling entry function)", text):  # ptxas of a kernel, and behind that its listing
        for kernel, stores, loads, registers in _KERNEL.findall(told):
            row = Row(case.name, kernel, int(registers), int(stores) + int(loads), notes, seconds)
            rows.append(row if folder is None else with_loads_in_flight(row, told, folder))
    if not rows and kernels and kernels <= _compiled:  # XLA compiles a kernel of one text once in a process
        return [Row(case.name, "", notes="kernels of earlier cases", seconds=seconds)]
    _compiled.update(kernels)
    return rows or [Row(case.name, "", seconds=seconds, error="nothing was compiled by ptxas")]


def with_loads_in_flight(row: Row, listing: str, folder: Path) -> Row:
    """Adds what the listing of a kernel shows to its row, and keeps the listing if there is something."""
    try:
        found = sass.loads_in_flight(listing)
    except ValueError as problem:
        return replace(row, error=str(problem))
    if found:
        (folder / f"{row.case} {row.kernel}.sass").write_text(listing)
    return replace(row, notes="; ".join([*filter(None, [row.notes]), *found]))


@contextlib.contextmanager
def standard_output() -> Iterator[Callable[[], str]]:
    """Gives a function that tells, afterwards, what ptxas and others printed to the files of standard output and error."""
    sys.stdout.flush()
    kept = [os.dup(number) for number in (1, 2)]
    with tempfile.TemporaryFile() as file:
        text = ""
        try:
            for number in (1, 2):
                os.dup2(file.fileno(), number)
            yield lambda: text
        finally:
            for number, own in zip((1, 2), kept, strict=True):
                os.dup2(own, number)
                os.close(own)
            file.seek(0)
            text = file.read().decode(errors="replace")


def in_processes(arguments, count: int) -> int:
    """Runs the command in so many processes, each with a part of the cases, which append to one file."""
    part, parts = arguments.part
    running = []
    for index in range(count):
        command = [sys.executable, "-m", "tests.core.compiled", "--only", arguments.only]
        command += ["--part", f"{part + index * parts}/{parts * count}"]
        command += [] if arguments.csv is None else ["--csv", str(arguments.csv)]
        command += [] if arguments.sass is None else ["--sass", str(arguments.sass)]
        running.append(subprocess.Popen(command))
    return max([process.wait() for process in running])


def append(path: Path, rows: list[dict[str, Any]]) -> None:
    """Appends lines to a file, with a first line of names if it is new, in one piece, as other processes append too."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(Row)])
    if not path.exists():
        writer.writeheader()
    writer.writerows(rows)
    with path.open("a", newline="") as file:
        file.write(text.getvalue())


def known(path: Path | None) -> set[str]:
    """The names of the cases that a file has as compiled."""
    if path is None or not path.exists():
        return set()
    return {row["case"] for row in csv.DictReader(path.read_text().splitlines()) if not row["error"]}


def main() -> int:
    """Compiles what the command line asks for, and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="a regular expression: cases whose names have a match")
    parser.add_argument("--list", action="store_true", help="print the names of the cases, and compile nothing")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case from the I-th on")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--csv", type=Path, help="the file to append to")
    parser.add_argument(
        "--sass", type=Path, metavar="FOLDER", help="look for loads in flight; listings that have some go there"
    )
    arguments = parser.parse_args()
    part, parts = arguments.part = tuple(map(int, arguments.part.split("/")))
    if arguments.csv is not None and not arguments.list:
        append(arguments.csv, [])
    if arguments.processes > 1 and not arguments.list:
        return in_processes(arguments, arguments.processes)
    done, failures = known(arguments.csv), 0
    wanted = [case for case in cases(arguments.only)[part::parts] if case.name not in done]
    if arguments.list:
        print(*(case.name for case in wanted), f"{len(wanted)} cases", sep="\n")
        return 0
    if isinstance(reason := xla_cuda.sharding(), str):
        print(reason)
        return 1
    if arguments.sass is not None:
        arguments.sass.mkdir(parents=True, exist_ok=True)
    for case in wanted:
        rows = compile_case(case, arguments.sass)
        for row in rows:
            failures += bool(row.error)
            said = row.error or f"compiled, {row.registers} registers, {row.spilled} bytes spilled {row.notes}"
            print(f"{row.case}: {row.kernel} {said}", flush=True)
        if arguments.csv is not None:
            append(arguments.csv, [vars(row) for row in rows])
        jax.clear_caches()
    print(f"{len(wanted)} cases, {failures} failed", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
