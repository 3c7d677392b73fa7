"""Attention on NVIDIA GPUs by Pallas Mosaic GPU: what the kernels serve, and their entry points, for each GPU generation."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention.mosaic_sm90 import backward, decode, forward
from jaxsoftmax.ops.attention.mosaic_sm90.operands import Call
from jaxsoftmax.ops.attention.operands import (
    OPERANDS,
    batch_of,
    dequantised,
    paged,
    types_without_pages,
    without_pages,
)

# The modules with the kernels, forward, for few queries, and backward, by the major compute capability of a GPU.
GENERATIONS = {9: (forward, decode, backward)}
MAX_HEAD_SIZE = {"float16": 256, "bfloat16": 256, "float32": 128}
DTYPES = tuple(MAX_HEAD_SIZE)
_MAX_ROWS = 2**31 - 2**16  # to which some more are added before they are compared, in int32


def _given(named):
    """The operands that are there."""
    return {operand.name: named[operand.name] for operand in OPERANDS if named.get(operand.name) is not None}


def lacks(primitive, operands, **params) -> bool:
    """Whether there is no kernel at all: for derivatives of float32."""
    del params
    return primitive == "dot_product_attention_vjp" and operands["query"].dtype == jnp.float32


def unsupported(primitive, target, operands, *, scale, precision, deterministic_gradients, wanted=(), **params) -> str | None:
    """Why it cannot run, in words, or None."""
    capability = target.compute_capability
    if target.platform != "cuda" or capability is None or capability[0] not in GENERATIONS:
        served = " or ".join(f"{major}.x" for major in GENERATIONS)
        return f"it needs compute capability {served}, got {target.platform} {capability}"
    given = _given(types_without_pages(operands) if primitive == "paged_attention" else operands)
    reason = _of_types(given, precision) or _of_shapes(given)
    if reason is None and not (math.isfinite(scale) and scale >= np.finfo(np.float32).tiny):
        return f"scale must be positive, got {scale}"
    if reason is None and primitive == "dot_product_attention_vjp":
        reason = GENERATIONS[capability[0]][2].unsupported(given, wanted, deterministic_gradients)
    if (
        reason is None
        and (plan := _plan(primitive, target, operands, scale, wanted, deterministic_gradients, params)) is not None
    ):
        return plan.does_not_fit(given["query"].dtype, target)
    return reason


def _plan(primitive, target, operands, scale, wanted, deterministic_gradients, params) -> Call | None:
    """The plan of the kernel that would run, from types of operands; None if none would: the cotangent of sinks needs none."""
    many, few, back = GENERATIONS[target.compute_capability[0]]
    options = {"scale": scale, "window": params["window"], "soft_cap": params["soft_cap"]}
    options["dropout_rate"] = params.get("dropout_rate", 0.0)
    if primitive == "paged_attention":
        named, _ = paged(operands)
        if few.serves_pages(**named):
            return few.plan_of(named, target, **options)
        operands = types_without_pages(operands)
    given = _given(operands)
    if primitive == "dot_product_attention_vjp":
        is_run = set(wanted) - {"sinks"}
        return back.plan_of(given, wanted=wanted, deterministic=deterministic_gradients, **options) if is_run else None
    kernel, is_stored = _kernel(target, given, options["dropout_rate"])
    if not is_stored:
        given = jax.eval_shape(dequantised, {n: jax.ShapeDtypeStruct(a.shape, a.dtype) for n, a in given.items()})
    return kernel.plan_of(given, target, **options) if kernel is few else many.plan_of(given, **options)


def _kernel(target, operands, dropout_rate, onto=None):
    """The module with the kernel that runs, and whether it takes keys and values as they are stored."""
    many, few, _ = GENERATIONS[target.compute_capability[0]]
    kernel = few if few.serves(operands["query"].shape) and not dropout_rate and onto is None else many
    return kernel, kernel is few and few.serves_as_stored(*(operands[name] for name in ("query", "key", "value")))


def _of_types(given, precision):
    """Why dtypes, or the head sizes that they allow, are not served."""
    dtype = given["query"].dtype
    if dtype.name not in DTYPES:
        return f"dtypes must be among {', '.join(DTYPES)}, got {dtype.name}"
    if dtype == jnp.float32 and precision == "highest":
        return "float32 products are sums of three of bfloat16, and precision asks for more"
    most = MAX_HEAD_SIZE[dtype.name]
    for name, operand in (("head", "query"), ("value", "value")):
        size = given[operand].shape[-1]
        if size % 8 or not 8 <= size <= most:
            return f"{name} size must be a multiple of 8 from 8 to {most}, got {size} in {dtype.name}"
    for name in ("bias", "sinks"):
        if name in given and given[name].dtype.name not in DTYPES:
            return f"{name} must be of dtype {', '.join(DTYPES)}, got {given[name].dtype.name}"
    for name in ("query_segments", "key_segments"):
        if name in given and given[name].dtype.itemsize > 4:
            return f"segment ids must have at most 32 bits, got {given[name].dtype.name}"
    return None


def _of_shapes(given):
    """Why there are too many, or too few, queries and keys."""
    batch, query, key = batch_of(given), given["query"].shape, given["key"].shape
    rows, keys = math.prod(batch) * query[-2] * query[-3], math.prod(batch) * key[-3]
    if not (rows and keys):
        return f"there must be queries and keys, got shapes {query} and {key} in a batch of {batch}"
    if max(rows, keys) >= _MAX_ROWS:
        return f"there must be less than {_MAX_ROWS} rows of scores, and keys, got {rows} and {keys}"
    return None


def dot_product_attention(
    *, target, scale, window, soft_cap, dropout_rate, return_lse=True, is_partial=False, onto=None, config=None, **operands
):
    """Attention as in `xla.dot_product_attention`: `[out, lse]`, or `[out]`; deterministic and as precise as said anyway."""
    kernel, is_stored = _kernel(target, operands, dropout_rate, onto)
    if not is_stored:
        operands = dequantised(operands)
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "dropout_rate": dropout_rate, "config": config}
    options |= {"is_partial": is_partial} | ({} if onto is None else {"onto": onto})
    return kernel.attention(_given(operands), target=target, **options)[: 2 if return_lse else 1]


def paged_attention(*, target, precision=None, deterministic_gradients=False, return_lse=True, **given):
    """Attention as in `xla.paged_attention`: keys and values of many queries are gathered from their pages before."""
    del precision, deterministic_gradients
    operands, options = paged(given)
    _, few, _ = GENERATIONS[target.compute_capability[0]]
    if not few.serves_pages(**operands):
        return dot_product_attention(
            target=target, return_lse=return_lse, dropout_rate=0.0, **without_pages(operands), **options
        )
    return few.attention(operands, target=target, dropout_rate=0.0, **options)[: 2 if return_lse else 1]


def dot_product_attention_vjp(
    *,
    target,
    wanted,
    scale,
    window,
    soft_cap,
    dropout_rate,
    deterministic_gradients=False,
    is_partial=False,
    onto=None,
    **operands,
):
    """The cotangents of attention that are `wanted`, as in `xla.dot_product_attention_vjp`."""
    *_, kernel = GENERATIONS[target.compute_capability[0]]
    saved = [operands.get(name) for name in ("out", "lse", "d_out", "d_lse")]
    options = {"scale": scale, "window": window, "soft_cap": soft_cap, "dropout_rate": dropout_rate, "wanted": wanted}
    options |= {"deterministic": deterministic_gradients, "is_partial": is_partial, "onto": onto}
    return kernel.attention_vjp(_given(operands), *saved, target=target, **options)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def alone(query, key, value, scale, window=(None, None), soft_cap=None, target=HOPPER):
    """Attention on kernels in both directions, for who wants them without the primitive: `[B, T, N, Hv]` in query's dtype.

    It is a plain `jax.custom_vjp` function: there is no reference to fall back on, no batching beyond what Pallas does, no
    sharding, and no second derivative. `unsupported` says what it takes; that is not checked here.

    Args:
      query: `[B, T, N, H]`, float16 or bfloat16.
      key: `[B, S, K, H]`, where K divides N.
      value: `[B, S, K, Hv]`.
      scale: of the scores.
      window: `(left, right)`, how many keys before and after its own position a query sees, None for all; causal: `(None, 0)`.
      soft_cap: None, or the bound of `soft_cap * tanh(score / soft_cap)`.
      target: the GPU it is for, an H100 or H200 unless told.
    """
    return _alone_forward(query, key, value, scale, window, soft_cap, target)[0]


def _alone_forward(query, key, value, *options):
    operands = {"query": query, "key": key, "value": value}
    out, lse = dot_product_attention(**operands, **_options(*options))
    return out, operands | {"out": out, "lse": lse}


def _alone_backward(scale, window, soft_cap, target, saved, d_out):
    options = _options(scale, window, soft_cap, target)
    return tuple(dot_product_attention_vjp(**saved, d_out=d_out, wanted=("query", "key", "value"), **options))


def _options(scale, window, soft_cap, target):
    return {"scale": scale, "window": window, "soft_cap": soft_cap, "dropout_rate": 0.0, "target": target}


alone.defvjp(_alone_forward, _alone_backward)
