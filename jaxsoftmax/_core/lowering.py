"""How a primitive is lowered: what produces its operands, which implementation runs, on one device or on shards.

Two steps, as JAX caches lowering rules, and a rule that it caches does not see what produces its operands. The first, which is
not cached, looks at that and binds `_call`. The rule of that, which JAX caches, chooses the implementation and traces it in
place, so equal calls lower their kernel once. It has a version for CUDA, which a rule that is not cached must not have.
"""

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax._core import compat, dispatch, fusion, sharding
from jaxsoftmax._core.operands import Map
from jaxsoftmax._gpu.target import target_for

_call = Primitive("jaxsoftmax")
_call.multiple_results = True
_call.def_abstract_eval(lambda *operands, results, **params: list(results))


def register(this: Map, primitive: Primitive) -> None:
    """Gives a primitive of a map its lowering rule."""
    mlir.register_lowering(primitive, functools.partial(_lower, this), cacheable=False)


def require_devices(this: Map, primitive: Primitive) -> None:
    """Makes devices known while a primitive is lowered that runs on shards: where XLA cuts its operands, it asks back."""
    if len(dispatch.implementations[this.op]) > 1:
        compat.require_devices(primitive)


def on_reference(this: Map, operands: dict[str, Any], results: Sequence[Any], *, implementation=None, **params) -> list[Any]:
    """A map as its reference computes it, on shards where types say how operands and results are sharded."""
    del implementation
    reference = getattr(importlib.import_module(dispatch.implementations[this.op]["xla"]), this.name)
    names = [name for name, operand in operands.items() if operand is not None]
    given, absent = [operands[name] for name in names], dict.fromkeys(this.by_name)

    def run(*given, axis_name=(), **options):
        del axis_name
        return jax.tree.leaves(reference(**absent | dict(zip(names, given, strict=True)), **params, **options))

    types = [jax.typeof(operand) for operand in given]
    if this.is_aligned:
        return run(*given)
    if sharding.explicit_mesh(types) is None:
        return run(*given, devices=types[0].sharding.mesh.size)
    return sharding.on_explicit_axes(run, types, results, *this.axes(names, len(results), **params))(*given)


def _lower(this: Map, ctx, *operands, names, **params):
    """The rule that sees what produces the operands: it goes on with them as they were before casts to float32."""
    sources, avals, fused = list(operands), list(ctx.avals_in), []
    for index, name in enumerate(names):
        is_scores = this.by_name[name].is_scores
        if is_scores and (source := fusion.widened_from(sources[index])) is not None:
            sources[index], avals[index] = source, avals[index].update(dtype=np.dtype(fusion.narrow_dtype(source)))
        is_whole_mask = avals[index].dtype == bool and avals[index].shape == avals[0].shape
        if (is_scores or is_whole_mask) and fusion.is_fused(sources[index], compat.of_module(ctx, "symbol_table")):
            fused.append(name)
    params |= {"this": this, "names": names, "dtypes": tuple(aval.dtype for aval in ctx.avals_in), "fused": frozenset(fused)}
    bound = functools.partial(_call.bind, results=tuple(ctx.avals_out), **params)
    return mlir.lower_fun(bound)(ctx.replace(avals_in=avals), *sources)


def _lower_call(platform, ctx, *operands, this, names, dtypes, fused, results, implementation, **params):
    """The rule for a platform, or for each that has no rule of its own, which chooses the implementation.

    `dtypes` are those after casts to float32, of which the reference gets the operands.
    """
    absent = dict.fromkeys(this.by_name)
    target = target_for(platform or (ctx.platforms or ctx.module_context.platforms)[0])
    call = dispatch.Call(this, names, dtypes, fused, implementation, params)

    def run(implementation, *operands, **options):
        if implementation == "xla":
            operands = [operand.astype(dtype) for operand, dtype in zip(operands, dtypes, strict=True)]
        else:
            options["target"] = target
        function = getattr(importlib.import_module(dispatch.implementations[this.op][implementation]), this.name)
        return jax.tree.leaves(function(**absent | dict(zip(names, operands, strict=True)), **params, **options))

    def on_shard(*operands, axis_name):
        obstacle = None
        if axis_name:
            obstacle = f"its axis is sharded over {' and '.join(axis_name)}, and only 'xla' merges over devices"
        decision = dispatch.choose(call, target, [jax.typeof(operand) for operand in operands], obstacle)
        dispatch.record(decision)
        return run(decision.implementation, *operands, **({"axis_name": axis_name} if axis_name else {}))

    devices, obstacle = sharding.partitioning(ctx)
    if devices > 1 and this.is_uncut:
        obstacle = obstacle or "on several devices it runs only inside a shard_map over all mesh axes"
    decision = dispatch.choose(call, target, ctx.avals_in, obstacle)
    is_partitioned = devices > 1 and (decision.implementation != "xla" or (this.is_cut and obstacle is None))
    if devices > 1 and not this.is_aligned:  # types that say how arrays are sharded are in the way of a reference that reshapes
        is_partitioned |= sharding.explicit_mesh(ctx.avals_in) is not None
    # What varies over axes of a shard_map around matters to no implementation, and kernels that write in place refuse it.
    ctx = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in ctx.avals_in])
    if is_partitioned:
        names_in, names_out = this.axes(names, len(results), **params)
        function = sharding.partitioned(on_shard, ctx, names_in, names_out, params.get("axes", ()))
        return mlir.lower_fun(function)(ctx, *operands)
    dispatch.record(decision)
    function = functools.partial(run, decision.implementation)
    if this.is_aligned:
        return mlir.lower_fun(function)(ctx, *operands)
    if decision.implementation == "xla":
        function = functools.partial(function, devices=devices)
    with sharding.on_no_mesh():
        avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        return mlir.lower_fun(function)(ctx.replace(avals_in=avals), *operands)


for _platform in (None, "cuda"):
    mlir.register_lowering(_call, functools.partial(_lower_call, _platform), platform=_platform)
