"""How an op becomes a JAX primitive: run eagerly, lowered for each platform, on one device or many.

A primitive's operands are aligned: all have the same number of axes, and size 1 where one does not vary along an axis (a mask
that is the same for all heads, the maximum of each row). That makes batching and sharding the same for all of them. Operands
that are None are left out of the primitive; its parameter `present` says which. Parameters that every primitive has are
`axes`, the axes of the softmax, `dtype`, that of its result, and `implementation`, a forced one or None.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir, xla

from jaxsoftmax import dispatch, sharding


def define(op: str, name: str, abstract_eval: Callable[..., Any], *, multiple_results: bool = False) -> Primitive:
    """A primitive of `op`, for which `dispatch` finds the implementation while it is lowered."""
    primitive = Primitive(name)
    primitive.multiple_results = multiple_results
    primitive.def_abstract_eval(abstract_eval)
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    for platform in (None, "cuda"):
        mlir.register_lowering(primitive, functools.partial(_lower, op, primitive, platform), platform=platform)
    if len(dispatch.implementations[op]) > 1:
        sharding.require_devices(primitive)
    return primitive


def bind(primitive: Primitive, *operands: Any, **params: Any) -> Any:
    """Binds `primitive` to aligned operands, of which some may be None."""
    present = tuple(operand is not None for operand in operands)
    given = sharding.vary_alike([operand for operand in operands if operand is not None])
    return primitive.bind(*sharding.shard_alike(given), present=present, **params)


def unpack(present: Sequence[bool], operands: Sequence[Any]) -> list[Any]:
    """The operands with None where one is absent."""
    given = iter(operands)
    return [next(given) if there else None for there in present]


def _lower(op: str, primitive: Primitive, platform: str | None, ctx, *operands, present, implementation, **params):
    """The lowering rule for `platform`, or for every platform without a rule of its own."""
    target = dispatch.target_for(platform or (ctx.platforms or ctx.module_context.platforms)[0])
    choose = functools.partial(dispatch.choose, op, primitive.name, target, implementation, params)
    reference = importlib.import_module(dispatch.implementations[op]["xla"])

    def run(module, *operands, **more):
        return getattr(module, primitive.name)(*unpack(present, operands), **params, **more)

    def on_shard(*operands, axis_name):
        obstacle = None
        if axis_name:
            obstacle = f"its axis is sharded over {' and '.join(axis_name)}, and only 'xla' merges over devices"
        module, decision = choose(unpack(present, [jax.typeof(operand) for operand in operands]), obstacle)
        dispatch.record(decision)
        return run(module, *operands, **({"axis_name": axis_name} if module is reference else {}))

    module, decision = choose(unpack(present, ctx.avals_in), sharding.obstacle(ctx))
    if module is reference or not sharding.is_partitioned(ctx):
        dispatch.record(decision)
        function = functools.partial(run, module)
    else:
        function = sharding.partitioned(on_shard, ctx, params["axes"])
    return mlir.lower_fun(function, multiple_results=primitive.multiple_results)(ctx, *operands)
