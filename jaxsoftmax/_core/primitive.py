"""How an op becomes a JAX primitive: run eagerly, lowered for each platform, on one device or many.

A primitive's operands are aligned: they have the same axes, and size 1 where one does not vary along an axis (a mask that is
the same for all heads, the maximum of each row). That makes batching and sharding the same for all of them. Which of the last
axes of operands and results belong together, a primitive may say with names (see `sharding`); without names all have the same
number of axes. Operands that are None are left out of the primitive; its parameter `present` says which. Every primitive has
the parameter `implementation`, a forced one or None; one without names has `axes` too, the axes of the softmax, over whose
shards the reference merges.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jaxsoftmax._core import compat, dispatch, fusion, sharding

# The same primitive for operands whose types leave no axis to the compiler: one that needs no devices while lowering.
_deviceless: dict[Primitive, Primitive] = {}

# From a primitive's parameters to the names of the last axes of its operands, those that are there, and of its results.
NamesOf = Callable[..., tuple[sharding.Names, sharding.Names]]
_names: dict[Primitive, NamesOf] = {}


def _unnamed(**params):
    del params
    return itertools.repeat(()), itertools.repeat(())


def define(
    op: str,
    name: str,
    abstract_eval: Callable[..., Any],
    *,
    whole: Sequence[int] = (),
    multiple_results: bool = False,
    names: NamesOf = _unnamed,
) -> Primitive:
    """A primitive of `op`, for which `dispatch` finds the implementation while it is lowered.

    `whole` are the operands, by index, that are as large as the scores. It matters where those come from: kernels get them
    as they were before a cast to float32, and are told which ones XLA would not write to memory. `names` gives, from the
    parameters, the names of the last axes of operands and results. With it, the reference runs on shards too where types say
    how those are cut, and is left to XLA elsewhere.
    """

    def types_of_chosen(*avals, fused, dtypes, **params):
        del fused
        return abstract_eval(*(aval.update(dtype=dtype) for aval, dtype in zip(avals, dtypes, strict=True)), **params)

    chosen = _primitive(name, types_of_chosen, multiple_results)
    for platform in (None, "cuda"):
        mlir.register_lowering(chosen, functools.partial(_lower_chosen, op, chosen, platform, names), platform=platform)
    primitive, deviceless = (_primitive(name, abstract_eval, multiple_results) for _ in range(2))
    for each in (primitive, deviceless):  # a rule that JAX caches does not see what produces its operands
        mlir.register_lowering(each, functools.partial(_lower, chosen, whole), cacheable=False)
    _deviceless[primitive], _names[primitive] = deviceless, names
    if len(dispatch.implementations[op]) > 1:
        compat.require_devices(primitive)
    return primitive


def _primitive(name, abstract_eval, multiple_results):
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    return primitive


def set_rule(rules: Any, primitive: Primitive, rule: Any) -> None:
    """Gives `primitive` its rule in a table of JAX, such as `jax.interpreters.ad.primitive_jvps`."""
    rules[primitive] = rules[_deviceless[primitive]] = rule


def bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Binds `primitive` to aligned operands, of which some may be None."""
    present = tuple(operand is not None for operand in operands)
    names, _ = _names[primitive](present=present, **params)
    given = sharding.vary_alike([operand for operand in operands if operand is not None])
    if any(sharding.is_settled(jax.typeof(operand)) for operand in given):
        primitive = _deviceless[primitive]
    return primitive.bind(*sharding.shard_alike(given, names), present=present, **params)


def unpack(present: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    """The operands with None where one is absent."""
    given = iter(operands)
    return [next(given) if there else None for there in present]


def _lower(chosen: Primitive, whole, ctx, *operands, present, **params):
    """The lowering rule that sees what produces the operands: it goes on with the operands before casts to float32."""
    sources, fused = unpack(present, operands), [False] * len(present)
    avals = unpack(present, ctx.avals_in)
    for index, aval in enumerate(avals):
        if index in whole and (source := fusion.widened_from(sources[index])) is not None:
            sources[index] = source
        if index in whole or (aval is not None and aval.dtype == bool and aval.shape == avals[0].shape):  # a whole mask
            fused[index] = fusion.is_fused(sources[index], compat.symbol_table(ctx))
    given = [source for source in sources if source is not None]
    params |= {"present": present, "fused": tuple(fused), "dtypes": tuple(aval.dtype for aval in ctx.avals_in)}
    ctx = ctx.replace(avals_in=[_with_dtype_of(source, a) for a, source in zip(ctx.avals_in, given, strict=True)])
    return mlir.lower_fun(functools.partial(chosen.bind, **params), multiple_results=chosen.multiple_results)(ctx, *given)


def _with_dtype_of(source, aval):
    narrow = fusion.narrow_dtype(source)
    return aval if narrow is None else aval.update(dtype=jax.numpy.dtype(narrow))


def _lower_chosen(op, primitive, platform, names, ctx, *operands, present, implementation, fused, dtypes, **params):
    """The lowering rule for `platform`, or for every platform without a rule of its own, which chooses the implementation.

    `dtypes` are those after casts to float32: the reference gets the operands so.
    """
    target = dispatch.target_for(platform or (ctx.platforms or ctx.module_context.platforms)[0])
    reference = importlib.import_module(dispatch.implementations[op]["xla"])

    def choose(types, obstacle):
        wide = [kind.update(dtype=dtype) for kind, dtype in zip(types, dtypes, strict=True)]
        wide, narrow = unpack(present, wide), unpack(present, types)
        return dispatch.choose(op, primitive.name, target, implementation, params, wide, narrow, fused, obstacle)

    def run(module, *operands, **more):
        if module is reference:
            operands = [operand.astype(dtype) for operand, dtype in zip(operands, dtypes, strict=True)]
        return getattr(module, primitive.name)(*unpack(present, operands), **params, **more)

    def on_shard(*operands, axis_name):
        obstacle = None
        if axis_name:
            obstacle = f"its axis is sharded over {' and '.join(axis_name)}, and only 'xla' merges over devices"
        module, decision = choose([jax.typeof(operand) for operand in operands], obstacle)
        dispatch.record(decision)
        return run(module, *operands, **({"axis_name": axis_name} if axis_name else {}))

    def off_mesh(*operands):
        with sharding.on_no_mesh():
            return run(module, *operands)

    named = names is not _unnamed
    module, decision = choose(ctx.avals_in, sharding.obstacle(ctx))
    if named and sharding.explicit_mesh(ctx.avals_in) is not None:
        shards = True  # types that say how they are sharded stand in the way of a reference that reshapes
    else:
        shards = module is not reference and sharding.is_partitioned(ctx)
    if shards:
        names_in, names_out = names(present=present, **params)
        function = sharding.partitioned(on_shard, ctx, names_in, names_out, params.get("axes", ()))
    else:
        dispatch.record(decision)
        function = off_mesh if named else functools.partial(run, module)
        ctx = ctx.replace(avals_in=[sharding.whole(a) for a in ctx.avals_in]) if named else ctx
    return mlir.lower_fun(function, multiple_results=primitive.multiple_results)(ctx, *operands)
