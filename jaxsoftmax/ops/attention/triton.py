"""Attention for NVIDIA GPUs since Ampere, in Triton; `_triton/attention.py` has the kernels, and says how they work.

On Hopper Mosaic's kernels are preferred. These were run on an H200. For other generations they are compiled, and tests compute
their values in Triton's interpreter.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.primitive import summed_to
from jaxsoftmax._core.target import Target
from jaxsoftmax._triton import attention_launch, availability
from jaxsoftmax._triton.attention_launch import (
    LOG2E,
    AttentionLaunch,
    AttentionSizes,
    AttentionTiling,
    KernelName,
    ScoreScale,
    WeightDropout,
)
from jaxsoftmax.ops.attention import dropout, key_blocks, mask_blocks, triton_functions
from jaxsoftmax.ops.attention.operands import (
    AXES,
    INITIAL_D_QUERY,
    INITIAL_RESULTS,
    OPERANDS,
    TABLES,
    AttentionProblem,
    batch_of,
    cotangents_of_rows,
    cotangents_of_sinks,
    dequantised,
    merged,
    without_pages,
)
from jaxsoftmax.ops.attention.triton_functions import FunctionPrograms

MAX_HEAD_SIZE = {"float16": 512, "bfloat16": 512, "float32": 128}
MAX_HEAD_SIZE_BACKWARD = {"float16": 256, "bfloat16": 256, "float32": 128}
DTYPES = tuple(MAX_HEAD_SIZE)

# The kernels that compute cotangents, with the operands of those: a kernel runs if something that it makes is wanted.
_BACKWARD: dict[KernelName, tuple[str, ...]] = {
    "backward_keys": ("key", "value", *TABLES),
    "backward_queries": ("query", "bias"),
}

# Plans.


@dataclass(frozen=True)
class TritonForwardPlan:
    """Computes attention by one kernel. Keys and values in pages are gathered before, those of 8 bits are widened."""

    problem: AttentionProblem
    target: Target
    tiling: AttentionTiling  # tiles of a program

    @property
    def remark(self) -> str | None:
        return availability.remark(self.target)

    def describe(self) -> str:
        return self.tiling.describe()

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        params = self.problem.params
        present = {name: array for name, array in operands.items() if array is not None}
        arrays = _in_order(dequantised(without_pages(present) if "page_table" in present else present))
        batch, sizes, dtype = batch_of(arrays), _sizes(arrays), arrays["query"].dtype
        is_partial, has_initial = params.get("is_partial", False), operands.get("initial_out") is not None
        results = {
            "out": jax.ShapeDtypeStruct(
                (*batch, sizes.queries, sizes.heads, sizes.value_size),
                jnp.float32 if is_partial or has_initial else dtype,
            ),
            "lse": jax.ShapeDtypeStruct((*batch, sizes.heads, sizes.queries), jnp.float32),
        }
        out, lse = _launch("forward", self.tiling, self.target, params, arrays, results)
        if has_initial:
            out, lse = merged([operands[name] for name in INITIAL_RESULTS], [out, lse])
            out = out if is_partial else out.astype(dtype)
        return [out, lse][: 2 if params.get("return_lse", True) else 1]


@dataclass(frozen=True)
class TritonBackwardPlan:
    """Computes the wanted cotangents of attention, those of keys and values by one kernel, of queries and biases by another."""

    problem: AttentionProblem
    target: Target
    tilings: tuple[tuple[KernelName, AttentionTiling], ...]  # the kernels that run, by name, and the tiles of their programs

    @property
    def remark(self) -> str | None:
        return availability.remark(self.target)

    def describe(self) -> str:
        said = [f"{kernel.removeprefix('backward_')}: {tiling.describe()}" for kernel, tiling in self.tilings]
        return "; ".join(said) or "no kernel: cotangents of sinks follow from the results"

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        params, arrays, has_functions = self.problem.params, _in_order(operands), bool(self.problem.functions)
        wanted, is_partial = params["wanted"], params.get("is_partial", False)
        out: Any = operands["out"]
        lse: Any = operands["lse"]
        cotangents_of_results = operands.get("d_out"), operands.get("d_lse"), params["window"]
        d_out, delta = cotangents_of_rows(arrays, out, lse, *cotangents_of_results, has_functions=has_functions)
        cotangents = {}
        if "sinks" in wanted:
            cotangents["sinks"] = cotangents_of_sinks(arrays["sinks"], lse, delta)
        # A query that sees nothing has weights of 0: exp(score - inf).
        lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * (LOG2E / _score_scale(params, arrays).unit))
        rows = {"d_out": d_out, "lse": lse, "delta": delta}
        for kernel, tiling in self.tilings:
            results = _cotangent_types(kernel, arrays, wanted, is_partial)
            computed = dict(zip(results, _launch(kernel, tiling, self.target, params, arrays | rows, results), strict=True))
            if (words := computed.pop("d_words", None)) is not None:
                cotangents |= triton_functions.arrays_of(words, arrays, wanted)
            cotangents |= {name.removeprefix("d_"): array for name, array in computed.items()}
        cotangents = {name: summed_to(cotangents[name], arrays[name].shape) for name in wanted}
        if (earlier := operands.get(INITIAL_D_QUERY)) is not None:
            cotangents["query"] += earlier
        return [cotangents[name] if is_partial else cotangents[name].astype(arrays[name].dtype) for name in wanted]


def plan(problem: AttentionProblem, target: Target) -> Plan | Refusal:
    """Plans a problem of attention."""
    name, params = problem.operation.name, problem.params
    if name not in ("dot_product_attention", "paged_attention", "dot_product_attention_vjp"):
        return Refusal(f"it has no kernel for {name}", lacks_kernel=True)
    if problem.devices:
        return Refusal("it does not merge over devices")
    if (reason := availability.missing()) is not None:
        return Refusal(reason)
    types = problem.types
    is_forward = name != "dot_product_attention_vjp"
    reason = _refused_types(types, params["precision"], MAX_HEAD_SIZE if is_forward else MAX_HEAD_SIZE_BACKWARD)
    reason = reason or _refused_shapes(types) or (None if is_forward else _refused_gradients(types, params))
    if reason is not None:
        return Refusal(reason)
    wanted = params.get("wanted", ())
    tables = None if is_forward else [name for name in wanted if name in TABLES]
    if tables and params["deterministic_gradients"]:
        return Refusal("derivatives of arrays that score_mod reads are summed in any order", lacks_kernel=True)
    if (reason := triton_functions.reason_against(problem.functions, types, tables)) is not None:
        return Refusal(reason, lacks_kernel=bool(tables))
    backward = [kernel for kernel, names in _BACKWARD.items() if not set(names).isdisjoint(wanted)]
    kernels: list[KernelName] = ["forward"] if is_forward else backward
    tilings: list[tuple[KernelName, AttentionTiling]] = []
    for kernel in kernels:
        if (tiling := _tiling(kernel, types, target, _programs(kernel, params))) is None:
            return Refusal(f"its smallest tiles need more than {target.shared_memory} bytes of shared memory for a program")
        tilings.append((kernel, tiling))
    if is_forward:
        attention = TritonForwardPlan(problem, target, tilings[0][1])
    else:
        attention = TritonBackwardPlan(problem, target, tuple(tilings))
    reason = _slower(types) or availability.refused_unless_forced(target)
    return attention if reason is None else Refusal(reason, attention)


# Refusals.


def _refused_types(types: Mapping[str, Any], precision: Any, max_head_size: Mapping[str, int]) -> str | None:
    """Says why no kernel serves these dtypes, or the head sizes that they allow, or returns None."""
    dtype = types["query"].dtype
    if dtype.name not in DTYPES:
        return f"dtypes must be among {', '.join(DTYPES)}, got {dtype.name}"
    if dtype == jnp.float32 and precision == "highest":
        return "float32 products are sums of three of TF32, and precision asks for more"
    for name, operand in (("head", "query"), ("value", "value")):
        size = types[operand].shape[-1]
        if size > max_head_size[dtype.name]:
            return f"{name} size must be at most {max_head_size[dtype.name]}, got {size} in {dtype.name}"
    for name in ("bias", "sinks"):
        if name in types and types[name].dtype.name not in DTYPES:
            return f"{name} must be of dtype {', '.join(DTYPES)}, got {types[name].dtype.name}"
    return None


def _refused_shapes(types: Mapping[str, Any]) -> str | None:
    """Says why there are too many, or too few, queries and keys, or returns None."""
    batch, query, key = batch_of(types), types["query"].shape, types["key"].shape
    if not all((*batch, query[-3], key[-3])):
        return f"there must be queries and keys, got shapes {query} and {key} in a batch of {batch}"
    programs = math.prod(batch) * max(query[-2] * query[-3], key[-2] * key[-3])
    if max(query[-3], key[-3]) >= 2**30 or programs >= 2**31 - 2**16:
        return f"there must be fewer than {2**31 - 2**16} rows of scores, and keys, got shapes {query} and {key}"
    return None


def _refused_gradients(types: Mapping[str, Any], params: Mapping[str, Any]) -> str | None:
    """Says why the gradients would not have the same bits run after run, if they must, or returns None."""
    if "bias" in params["wanted"] and params["deterministic_gradients"] and not _bias_is_whole(types):
        return f"the derivative of a bias that is broadcast, of shape {types['bias'].shape}, is summed in any order"
    return None


def _slower(types: Mapping[str, Any]) -> str | None:
    """Says why the reference should be faster although the kernels could run, or returns None."""
    query, key = types["query"], types["key"]
    if query.dtype == jnp.float32 and query.shape[-3] <= query.shape[-2] // key.shape[-2]:
        return "XLA reads float32 keys once for all query heads that share them, and there are few queries"
    return None


# Launches.


def _in_order(operands: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the operands of attention that are present, in the order of `OPERANDS`."""
    return {operand.name: operands[operand.name] for operand in OPERANDS if operands.get(operand.name) is not None}


def _sizes(arrays: Mapping[str, Any]) -> AttentionSizes:
    """Returns the sizes of operands, or of their types."""
    (*_, queries, heads, size), (*_, keys, key_heads, _) = arrays["query"].shape, arrays["key"].shape
    value_size, itemsize = arrays["value"].shape[-1], arrays["query"].dtype.itemsize
    entries = math.prod(batch_of(_in_order(arrays)))
    return AttentionSizes(entries, queries, keys, heads, key_heads, size, value_size, itemsize)


def _bias_is_whole(arrays: Mapping[str, Any]) -> bool:
    """Returns True if each score has a bias of its own."""
    sizes, batch = _sizes(arrays), batch_of(_in_order(arrays))
    return "bias" in arrays and arrays["bias"].shape == (*batch, sizes.heads, sizes.queries, sizes.keys)


def _programs(kernel: KernelName, params: Mapping[str, Any]) -> FunctionPrograms:
    """Returns the programs of score and mask functions that a kernel runs."""
    functions = {name: params[name] for name in ("score_mod", "mask_mod") if params.get(name) is not None}
    if kernel == "forward":
        return triton_functions.programs_of(functions, None)
    tables = [name for name in params["wanted"] if name in TABLES and kernel == "backward_keys"]
    return triton_functions.programs_of(functions, tables)


def _tiling(kernel: KernelName, types: Mapping[str, Any], target: Target, programs: FunctionPrograms) -> AttentionTiling | None:
    sizes = _sizes(types)
    score_bytes = sum(types[name].dtype.itemsize for name in ("bias", "mask") if name in types) + programs.bytes_of_score
    has_score_mod = programs.score_mod is not None
    return attention_launch.tiling_for(kernel, sizes.itemsize, sizes.widths, target, score_bytes, has_score_mod)


_HEADROOM = {"float16": 13.0, "bfloat16": 0.0, "float32": 0.0}  # see `online.push_log2`: float16 holds weights up to 2^15


def _score_scale(params: Mapping[str, Any], arrays: Mapping[str, Any]) -> ScoreScale:
    headroom = _HEADROOM[arrays["query"].dtype.name]
    return ScoreScale(params["scale"], params["soft_cap"], "bias" in arrays, headroom, params.get("score_mod") is not None)


def _cotangent_types(kernel: KernelName, arrays: Mapping[str, Any], wanted, is_partial: bool) -> dict[str, Any]:
    """Returns the types of the results of a kernel: cotangents, of all of the batch, before they are summed."""
    batch, types = batch_of(_in_order(arrays)), {}
    for name in _BACKWARD[kernel]:
        if name in TABLES:
            if name in wanted:  # for all tables together
                types["d_words"] = jax.ShapeDtypeStruct((triton_functions.count_words(arrays),), jnp.float32)
        elif name != "bias":
            dtype = jnp.float32 if is_partial else arrays[name].dtype
            types[f"d_{name}"] = jax.ShapeDtypeStruct((*batch, *arrays[name].shape[-3:]), dtype)
        elif name in wanted:  # the cotangents of a bias that is broadcast are added up in the result
            dtype = arrays[name].dtype if _bias_is_whole(arrays) else jnp.float32
            types[f"d_{name}"] = jax.ShapeDtypeStruct(arrays[name].shape, dtype)
    return types


def _launch(
    kernel: KernelName,
    tiling: AttentionTiling,
    target: Target,
    params: Mapping[str, Any],
    arrays: Mapping[str, Any],
    results: Mapping[str, Any],
) -> list[jax.Array]:
    """Launches a kernel on operands, and on rows of a gradient, that are present, by name; `results` are types by name."""
    batch, sizes = batch_of(_in_order(arrays)), _sizes(arrays)
    # What segments, masks and the mask function leave to visit is a table that XLA computes before the kernel runs.
    spans = _find_spans(kernel, tiling, params, arrays)
    starts = triton_functions.starts_of(arrays)
    arrays = {**arrays, **({} if spans is None else {"spans": spans})}
    letters = {"N": sizes.heads, "K": sizes.key_heads, "T": sizes.queries, "S": sizes.keys}
    # Spans belong to blocks: there may be several blocks of keys where there is one query.
    axes = AXES | {"spans": "B4", "delta": AXES["lse"]}
    dims = [
        (name, attention_launch.index_dims(axes[name], array.shape, batch, letters))
        for name, array in {**arrays, **results}.items()
        if name != "d_words"
    ]
    rate, programs = params.get("dropout_rate", 0.0), _programs(kernel, params)
    launch = AttentionLaunch(
        kernel=kernel,
        tiling=tiling,
        sizes=sizes,
        window=params["window"],
        scores=_score_scale(params, arrays),
        dropout=WeightDropout(dropout.dropped(rate), dropout.MULTIPLIERS) if "seeds" in arrays else None,
        kept=1 / (1 - rate),
        is_partial=kernel == "backward_queries" and params.get("is_partial", False),
        bias_is_whole=_bias_is_whole(arrays),
        dims=tuple(dims),
        score_mod=programs.score_mod,
        mask_mod=programs.mask_mod,
        starts=starts,
        loads=programs.loads,
    )
    read = {"words": triton_functions.words_of(arrays)} if starts else {}
    return attention_launch.launch_attention(launch, arrays | read, results, target)


def _find_spans(kernel: KernelName, tiling: AttentionTiling, params: Mapping[str, Any], arrays: Mapping[str, Any]) -> Any:
    """Finds the blocks of the other side that each block of a kernel visits, as `key_blocks.find_spans` does; None for all."""
    sizes, blocks, by_keys = _sizes(arrays), (tiling.block_q, tiling.block_kv), kernel == "backward_keys"
    lengths = sizes.queries, sizes.keys
    spans = key_blocks.find_spans(arrays, lengths, *blocks, by_keys=by_keys)
    if (mask_mod := params.get("mask_mod")) is None:
        return spans
    shown = mask_blocks.find_block_spans(mask_mod, arrays, lengths, *blocks, by_keys=by_keys)
    return shown if spans is None else key_blocks.intersect_spans(spans, shown)
