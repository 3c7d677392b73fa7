"""Attention on Hopper by Pallas Mosaic GPU: what the kernels serve, and the plan of the kernel that serves it.

forward     attention, by a kernel in which a block of queries keeps its state and pushes the keys
decode      attention of few queries, by the same kernel with other rows; keys and values may be in pages, or of 8 bits
backward    the cotangents of attention
tangent     the tangents of attention
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.attention.mosaic_sm90 import backward, decode, forward_plan, tangent
from jaxsoftmax.ops.attention.mosaic_sm90.forward import ForwardPlan, head_multiple, pad_heads
from jaxsoftmax.ops.attention.mosaic_sm90.functions import Function, reason_against
from jaxsoftmax.ops.attention.operands import INITIAL_RESULTS, AttentionProblem, dequantised, without_pages

MAX_HEAD_SIZE = {"float16": 512, "bfloat16": 512, "float32": 128}  # shared memory has two terms of a float32 element
DTYPES = tuple(MAX_HEAD_SIZE)
_MAX_ROWS = 2**31 - 2**16  # to which some more are added before they are compared, in int32
# Number of rows that share keys, from which the kernel is faster than the reference although XLA pads keys and values before.
# 1, 4 and 8 rows take 185, 186 and 187 us with the kernel, and 179, 224 and 238 us with the reference (heads of 36, batch 32,
# 4096 keys, an H200).
_LEAST_PADDED_ROWS = 2


def plan(problem: AttentionProblem, target: Target) -> Plan | Refusal:
    """Plans attention, attention with pages, or the tangents or cotangents of attention."""
    if problem.devices:
        return Refusal("it does not merge over devices")
    plan_derivative = {"dot_product_attention_vjp": backward.plan, "dot_product_attention_jvp": tangent.plan}.get(
        problem.operation.name
    )
    if plan_derivative is tangent.plan and problem.functions:
        return Refusal(f"tangents have no kernel with {' and '.join(problem.functions)}", lacks_kernel=True)
    if (reason := _refused_problem(problem)) is not None:
        return Refusal(reason, lacks_kernel=plan_derivative is tangent.plan and problem.dtype == jnp.float32)
    result = _plan_attention(problem, target) if plan_derivative is None else plan_derivative(problem, target)
    if isinstance(result, Refusal) or result.geometry is None:
        return result
    if (needed := result.geometry.shared_memory) > target.shared_memory:
        sizes = " and ".join(str(problem.types[operand].shape[-1]) for operand in ("query", "value"))
        reason = f"a block for head sizes {sizes} needs {needed} bytes of shared memory, and has up to {target.shared_memory}"
        return Refusal(reason, lacks_kernel=isinstance(result, tangent.TangentPlan))  # with one tangent more it fits
    reason = _unprofitable(problem, result)
    return result if reason is None else Refusal(reason, result)


def _refused_problem(problem: AttentionProblem) -> str | None:
    """Returns why dtypes, head sizes, numbers of queries and keys, or the scale, are not served, or None."""
    types, dtype = problem.types, problem.dtype
    if dtype.name not in DTYPES:
        return f"dtypes must be among {', '.join(DTYPES)}, got {dtype.name}"
    if dtype == jnp.float32 and problem.params["precision"] == "highest":
        return "float32 products are sums of three of bfloat16, and precision asks for more"
    most = MAX_HEAD_SIZE[dtype.name]
    for name, operand in (("head", "query"), ("value", "value")):
        size = types[operand].shape[-1]
        if not 1 <= size <= most:
            return f"{name} size must be from 1 to {most}, got {size} in {dtype.name}"
    for name in ("bias", "sinks"):
        if name in types and types[name].dtype.name not in DTYPES:
            return f"{name} must be of dtype {', '.join(DTYPES)}, got {types[name].dtype.name}"
    for name in ("query_segments", "key_segments"):
        if name in types and types[name].dtype.itemsize > 4:
            return f"segment ids must have at most 32 bits, got {types[name].dtype.name}"
    batch, query, key = problem.batch, types["query"].shape, types["key"].shape
    rows, keys = math.prod(batch) * query[-2] * query[-3], math.prod(batch) * key[-3]
    if not (rows and keys):
        return f"there must be queries and keys, got shapes {query} and {key} in a batch of {batch}"
    if max(rows, keys) >= _MAX_ROWS:
        return f"there must be fewer than {_MAX_ROWS} rows of scores, and keys, got {rows} and {keys}"
    for function in problem.functions.values():
        if (reason := reason_against(Function.of(function), types)) is not None:
            return reason
    scale = problem.params["scale"]
    if not (math.isfinite(scale) and scale >= np.finfo(np.float32).tiny):
        return f"scale must be a normal number above 0 in float32, got {scale}"
    return None


def _plan_attention(problem: AttentionProblem, target: Target) -> ForwardPlan:
    """Plans the forward kernel, for few queries that of decoding, and what XLA does to operands before it."""
    params, options = problem.params, problem.options
    types: Mapping[str, Any] = problem.types
    prepare: list[Callable[..., Any]] = []
    if "page_table" in problem.operands:
        if decode.serves_pages(problem.operands):
            types = problem.operands
        else:
            prepare.append(without_pages)
    has_initial = not set(INITIAL_RESULTS).isdisjoint(problem.operands)
    is_few = decode.serves(types["query"].shape) and not options["dropout_rate"] and not has_initial
    is_stored = "page_table" in types or (is_few and decode.serves_as_stored(*(types[n] for n in ("query", "key", "value"))))
    if not is_stored and not {"key_scale", "value_scale"}.isdisjoint(types):
        prepare.append(dequantised)
        types = _types_after(dequantised, types)
    if "page_table" not in types and any(types[name].shape[-1] % head_multiple(problem.dtype) for name in ("query", "value")):
        prepare.append(pad_heads)
        types = _types_after(pad_heads, types)
    geometry = (decode.shape_decoding if is_few else forward_plan.shape_forward)(types, target, **options)
    n_results = 2 if params.get("return_lse", True) else 1
    plan_type = decode.DecodePlan if is_few else ForwardPlan
    return plan_type(geometry, tuple(prepare), n_results, params.get("is_partial", False))


def _types_after(function: Callable[..., Any], types: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the types of the operands that `function` makes from operands of these types, by name."""
    return jax.eval_shape(function, {name: jax.ShapeDtypeStruct(kind.shape, kind.dtype) for name, kind in types.items()})


def _unprofitable(problem: AttentionProblem, plan: Plan) -> str | None:
    """Returns why the reference is faster than a plan, or None."""
    if not isinstance(plan, decode.DecodePlan) or plan.prepare != (pad_heads,) or plan.geometry.query[0] >= _LEAST_PADDED_ROWS:
        return None
    sizes = " and ".join(str(problem.types[name].shape[-1]) for name in ("key", "value"))
    return f"padding head sizes {sizes} takes longer than the reference takes for one row"
