"""Sharded operands: each device runs its own rows, and nothing is gathered.

On meshes with explicit axes only, the shardings are known while tracing, and an op's primitive is lowered inside a
`shard_map`. On the others the compiler knows them, and asks back through `custom_partitioning`. The reference needs neither,
as XLA partitions it.
"""

import functools
import math
import string
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec


def vary_alike(operands: list[Any]) -> list[Any]:
    """The operands, all varying over the same manual mesh axes, as one primitive wants them in a `shard_map`."""
    varying = [jax.typeof(operand).manual_axis_type.varying for operand in operands]
    union = frozenset().union(*varying)
    return [
        operand if axes == union else lax.pcast(operand, tuple(sorted(union - axes)), to="varying")
        for operand, axes in zip(operands, varying, strict=True)
    ]


def shard_alike(operands: list[Any]) -> list[Any]:
    """The operands, on explicit mesh axes sharded as the first one that is sharded along an axis: nothing is gathered."""
    types = [jax.typeof(operand) for operand in operands]
    mesh = next((t.sharding.mesh for t in types if has_explicit_axes(t)), None)
    if mesh is None:
        return operands
    dims = _dims(types)
    specs = [_spec(dims, t.shape) for t in types]
    return [
        operand if t.sharding.spec == spec else jax.sharding.reshard(operand, NamedSharding(mesh, spec))
        for operand, t, spec in zip(operands, types, specs, strict=True)
    ]


def has_explicit_axes(aval: Any) -> bool:
    """Whether the type of an array says how it is sharded."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def is_settled(aval: Any) -> bool:
    """Whether an array's mesh leaves nothing to the compiler: its axes are explicit, or manual in a `shard_map`."""
    kinds = aval.sharding.mesh.axis_types
    return bool(kinds) and AxisType.Auto not in kinds


def require_devices(primitive: Primitive) -> None:
    """Makes devices known while `primitive` is lowered, which `custom_partitioning` needs and JAX has no public way for."""
    from jax._src.dispatch import prim_requires_devices_during_lowering

    prim_requires_devices_during_lowering.add(primitive)


def is_partitioned(ctx: Any) -> bool:
    """Whether what is lowered in `ctx`, a lowering rule's context, runs on parts of its arrays on several devices."""
    axes = ctx.module_context.axis_context
    if hasattr(axes, "manual_axes"):  # inside a shard_map
        return set(axes.manual_axes) != set(axes.mesh.axis_names)
    return axes.num_devices != 1


def obstacle(ctx: Any) -> str | None:
    """Why what is lowered in `ctx` can be left to XLA only, or None."""
    if not is_partitioned(ctx) or _explicit_mesh(ctx) is not None:
        return None
    if getattr(ctx.module_context.axis_context, "manual_axes", ()):
        return "the shard_map around it leaves mesh axes automatic, whose shards only XLA knows there"
    if ctx.module_context.lowering_parameters.for_export:
        return "on automatic mesh axes the compiler has to ask back, which an exported program cannot"
    return None


def _explicit_mesh(ctx: Any) -> Any:
    """The mesh of the operands, if their types say all about how they are sharded."""
    mesh = next((a.sharding.mesh for a in ctx.avals_in if has_explicit_axes(a)), None)
    return None if mesh is None or AxisType.Auto in mesh.axis_types else mesh


def partitioned(function: Callable[..., Any], ctx: Any, axes: Sequence[int]) -> Callable[..., Any]:
    """`function` of aligned operands, run on shards.

    `function(*shards, axis_name=...)` gets the mesh axes over which the operands' `axes` are sharded, usually none.
    """
    mesh = _explicit_mesh(ctx)
    if mesh is None:
        return _on_automatic_axes(function, axes)
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    return _on_explicit_axes(function, axes, mesh, explicit, ctx.avals_in, ctx.avals_out)


def _on_explicit_axes(function, axes, mesh, explicit, avals_in, avals_out):
    dims = _dims(avals_in)
    specs_in, specs_out = [_spec(dims, a.shape) for a in avals_in], [_spec(dims, a.shape) for a in avals_out]
    local = functools.partial(function, axis_name=_names(dims, axes))
    mapped = jax.shard_map(
        lambda *operands: jax.tree.leaves(local(*operands)),
        mesh=mesh,
        in_specs=tuple(specs_in),
        out_specs=specs_out,
        axis_names=explicit,
        check_vma=False,
    )

    def call(*operands):
        results = mapped(*operands)
        return results if len(results) > 1 else results[0]

    return call


def _on_automatic_axes(function, axes):
    from jax.experimental.custom_partitioning import custom_partitioning

    call = custom_partitioning(lambda *operands: function(*operands, axis_name=()))  # it takes no keywords

    def partition(mesh, operands, results):
        dims = list(_dims(operands))
        for axis in axes:  # the last shard of an uneven axis is padded, and padding has no place in its maximum and sum
            shards = math.prod(mesh.shape[name] for name in _names(dims, [axis]))
            if max(a.shape[axis] for a in operands) % shards:
                dims[axis] = None
        specs_in = tuple(NamedSharding(mesh, _spec(dims, a.shape)) for a in operands)
        specs_out = jax.tree.map(lambda a: NamedSharding(mesh, _spec(dims, a.shape)), results)

        def on_shard(*shards):
            with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):  # shards have no sharding, whatever mesh the user set
                return function(*shards, axis_name=_names(dims, axes))

        return mesh, on_shard, specs_out, specs_in

    def rule(mesh, operands, results):
        del mesh
        return f"{', '.join(_factors(operands, 0))} -> {', '.join(_factors(results, len(operands)))}"

    call.def_partition(partition, sharding_rule=rule)
    return call


def _dims(arrays):
    """How each axis is sharded: as in the first array that is sharded along it."""
    specs = [(*a.sharding.spec, *(None,) * (len(a.shape) - len(a.sharding.spec))) for a in arrays]
    return tuple(next((dim for dim in along if dim is not None), None) for along in zip(*specs, strict=True))


def _spec(dims, shape):
    return PartitionSpec(*(None if size == 1 else dim for dim, size in zip(dims, shape, strict=True)))


def _names(dims, axes):
    """The mesh axes over which `axes` are sharded."""
    found = [dims[axis] for axis in axes if dims[axis] is not None]
    return tuple(name for dim in found for name in (dim if isinstance(dim, tuple) else (dim,)))


def _factors(types, first):
    """Shardy's names of the axes of each array: shared along an axis, and one of its own where the size is 1."""
    for index, kind in enumerate(types, first):
        letters = zip(string.ascii_lowercase, kind.shape, strict=False)
        yield " ".join(f"{letter}{index}" if size == 1 else letter for letter, size in letters)
