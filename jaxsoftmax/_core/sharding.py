"""Shards a call: each device computes its own rows, and nothing is gathered.

Batch axes are sharded as the operands are. `names` names the last axes of each array; the axes before them are named by their
position. Axes with one name are sharded alike, or have size 1 and are whole on every device. An axis named None is whole, too.
A name with several sizes (heads and key heads) is sharded over devices that share each size evenly. A result of size 1 along a
sharded name is summed over its shards.

On `Explicit` mesh axes the types say how arrays are sharded, and a call is wrapped in `jax.shard_map`. On `Auto` axes only XLA
knows: a call is wrapped in `custom_partitioning`, whose Shardy rule gives each axis of the operands a factor. Inside a
`shard_map` over all mesh axes nothing is wrapped.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jaxsoftmax._core import compat
from jaxsoftmax._core.operation import Axes, Operation

# For each array the names of its last axes.
Names = Sequence[Axes]


@dataclass(frozen=True)
class Cut:
    """Describes how an axis is sharded along which devices merge.

    If devices do not share it evenly, shards have one size, and the last ones end in padding.
    """

    over: tuple[str, ...]  # names of the mesh axes
    size: int  # of the whole axis

    @classmethod
    def of_part(cls, over: tuple[str, ...], size: int) -> "Cut":
        """Describes an axis that a `shard_map` shards evenly; each device has `size` entries of it."""
        return cls(over, size * lax.axis_size(over))


# Operands.


def alike(this: Operation, names: Sequence[str], operands: list[Any]) -> tuple[list[Any], bool]:
    """Reshards the operands of a primitive so that they fit together.

    All vary over the same manual mesh axes. Over explicit mesh axes, each axis is sharded as in the first operand that is
    sharded along it, because a whole mask beside a sharded `x` would be a type error. Nothing is gathered.

    Returns:
      The operands, and True if their types say how they are sharded over devices.
    """
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    if all(mesh.empty for mesh in meshes):
        return operands, False
    is_settled = any(mesh.axis_types and AxisType.Auto not in mesh.axis_types for mesh in meshes)
    return _resharded(operands, [this.by_name[name].axes for name in names])[0], is_settled


def placed_alike(operands: list[Any], names: Names) -> list[Any]:
    """Reshards operands alike over explicit mesh axes, for an op that is no primitive."""
    return list(map(placing, _resharded(operands, names)[0]))


def on_shards(
    function: Callable[..., Any],
    operands: list[Any],
    names: Names,
    joined: str,
    ndim: int | list[int],
    axis_name: tuple[Any, ...] = (),
) -> Any:
    """Calls `function(mesh axes of rows, mesh axes of joined, *operands)`, on shards if the operands have explicit mesh axes.

    Rows are the axes that are named by their position. The function merges over devices along the axes named `joined`. It gets
    the mesh axes over which both are sharded, and operands that all vary over the same mesh axes. Its result has `ndim` axes,
    which are rows; for a list of numbers it returns a list of results. It may also merge over `axis_name`, axes of a
    `shard_map` around: over these the results are alike.
    """
    operands, mesh, over = _resharded(operands, names)
    both = _concatenated(over, [name for name in over if isinstance(name, int)]), _concatenated(over, [joined])
    runs_on_all = mesh is not None and is_all_explicit(mesh)
    if mesh is None or not (runs_on_all or any(both)):
        return function(*both, *operands)
    is_nested = AxisType.Manual in mesh.axis_types
    mapped = jax.shard_map(
        lambda *operands: function(*both, *vary_alike(list(operands))),
        mesh=mesh,
        in_specs=tuple(_specs(over, operands, names)),
        out_specs=jax.tree.map(lambda ndim: PartitionSpec(*map(over.get, range(ndim))), ndim),
        # An empty set means all axes of the mesh, except the one of a `vmap` around. Some kernels run on all axes only.
        axis_names=set() if runs_on_all else {*both[0], *both[1]},
        check_vma=not is_nested,
    )
    results = jax.jit(nested(mapped))(*operands) if is_nested else mapped(*operands)
    return jax.tree.map(lambda result: placing(_alike_over(axis_name, result)), results)


def _alike_over(axes: tuple[Any, ...], array: jax.Array) -> jax.Array:
    """Makes the type of an array that is alike over these axes not vary over them.

    Devices share a cotangent, which the transpose of a sum without `check_vma` adds up again.
    """
    axes = tuple([axis for axis in axes if axis in compat.varying(array)])
    return lax.pmean(array, axes) if axes else array


def nested(mapped: Callable[..., Any]) -> Callable[..., Any]:
    """Makes JAX 0.11.2 differentiate a `shard_map` without `check_vma` inside of one with it.

    JAX takes its operands for varying, but neither its results nor their cotangents, and so refuses these. With `check_vma`, it
    would shard what derivatives save over the axes of the `shard_map` around once more. Here no type in it names those axes.
    The operands vary alike, and the results as they do.
    """

    def call(*operands):
        if not compat.varying(operands[0]):
            return mapped(*operands)
        results = mapped(*[_vary.bind(operand, like=None) for operand in operands])
        return jax.tree.map(lambda result: _vary.bind(result, like=jax.typeof(operands[0])), results)

    return call


# Makes the type of an array vary as another type does. The array stays, and so does a cotangent, which `lax.pcast` would sum.
_vary = Primitive("vary")
_vary.def_abstract_eval(lambda array, *, like: compat.varying_as(array, like))
ad.deflinear2(_vary, lambda cotangent, array, **params: [_vary.bind(cotangent, like=array.aval)])
mlir.register_lowering(_vary, lambda ctx, array, **params: [array])
batching.primitive_batchers[_vary] = lambda arrays, dims, **params: (_vary.bind(*arrays, **params), dims[0])


def _resharded(operands, names):
    """Reshards operands alike over explicit mesh axes.

    Returns:
      The operands, their mesh or None, and the mesh axes by axis name.
    """
    operands = vary_alike(operands)
    types = [jax.typeof(operand) for operand in operands]
    first = next((index for index, kind in enumerate(types) if has_explicit_axes(kind)), None)
    if first is None:
        return operands, None, {}
    mesh, over = types[first].sharding.mesh, _mesh_axes(types, names)
    moved = [
        _moved(operand, NamedSharding(mesh, spec), operands[first])
        for operand, spec in zip(operands, _specs(over, types, names), strict=True)
    ]
    return moved, mesh, over


def placed_as(array: jax.Array, primal: jax.Array) -> jax.Array:
    """Places a tangent as `primal` is sharded over explicit mesh axes.

    A linear function of the tangent may run later, outside of `jit`, on arrays of other types than it was traced for. The
    placement is a step of that function: what `jax.linearize` returns places its tangents, and what `jax.vjp` returns its
    cotangents.
    """
    kind = jax.typeof(primal)
    if not has_explicit_axes(kind):
        return array
    devices = None if isinstance(primal, jax.core.Tracer) else primal.sharding
    return _place.bind(_moved(array, kind.sharding, primal), sharding=kind.sharding, devices=devices)


@jax.custom_jvp
def placing(array: jax.Array) -> jax.Array:
    """Returns the array. Its tangents and cotangents are sharded as it is, wherever the user placed them."""
    return array


@placing.defjvp
def _placing_jvp(primals, tangents):
    return primals[0], placed_as(tangents[0], primals[0])


# Places a tangent by the sharding of its type. `devices` is the same sharding with devices, or None inside `jit`, which knows
# the devices.
_place = Primitive("place")
_place.def_abstract_eval(lambda t, *, sharding, devices: t.update(sharding=sharding))
ad.deflinear2(_place, lambda cotangent, t, **params: [_place.bind(cotangent, **params | {"sharding": t.aval.sharding})])


@_place.def_impl
def _place_now(t, *, sharding, devices):
    if jax.typeof(t).sharding == sharding:
        return t
    return jax.sharding.reshard(t, sharding) if devices is None else jax.device_put(t, devices)


mlir.register_lowering(
    _place, mlir.lower_fun(lambda t, **params: _place_now(t, **params | {"devices": None}), multiple_results=False)
)


def _place_batch(ts, dims, *, sharding, devices):
    t = jnp.moveaxis(ts[0], dims[0], 0)
    kind = jax.typeof(t).sharding
    over = None if kind.mesh.empty else kind.spec[0]
    batched = NamedSharding(sharding.mesh, PartitionSpec(over, *sharding.spec))
    if devices is not None:
        devices = NamedSharding(devices.mesh, PartitionSpec(over, *devices.spec))
    return _place.bind(t, sharding=batched, devices=devices), 0


batching.primitive_batchers[_place] = _place_batch


def _moved(operand: jax.Array, sharding: NamedSharding, beside: jax.Array) -> jax.Array:
    """Reshards the operand over the devices of `beside`."""
    kind = jax.typeof(operand)
    if kind.sharding.mesh.empty:  # neither its type nor `sharding` names devices, and an eager call needs them
        return _moved_beside(operand, beside, sharding)
    return operand if kind.sharding.spec == sharding.spec else jax.sharding.reshard(placing(operand), sharding)


@functools.partial(jax.jit, static_argnames="sharding", keep_unused=True)
def _moved_beside(operand, beside, sharding):
    """Reshards the operand. `beside` is an argument only because it tells JAX the devices."""
    del beside
    return jax.sharding.reshard(operand, sharding)


def with_whole_rows(array: jax.Array) -> jax.Array:
    """Returns the array with its last axis whole on every device. If explicit mesh axes shard that axis, it is gathered."""
    kind = jax.typeof(array)
    spec = kind.sharding.spec
    if len(spec) < array.ndim or spec[-1] is None or not has_explicit_axes(kind):
        return array
    return _moved(array, NamedSharding(kind.sharding.mesh, PartitionSpec(*spec[:-1], None)), array)


def varying(array: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """Makes the type of an array vary over these axes of a `shard_map` around, if that keeps count of them."""
    missing = tuple([axis for axis in axes if axis not in compat.varying(array)])
    return lax.pcast(array, missing, to="varying") if missing else array


def varying_as(tangents: Sequence[jax.Array], results: Sequence[jax.Array]) -> list[jax.Array]:
    """Makes tangents vary as their results do, which vary if JAX thinks that a scale does, although it is alike everywhere."""
    pairs = zip(tangents, results, strict=True)
    return [varying(tangent, tuple(sorted(compat.varying(result)))) for tangent, result in pairs]


def vary_alike(operands: list[Any]) -> list[Any]:
    """Makes all operands vary over the same manual mesh axes."""
    axes_of = list(map(compat.varying, operands))
    if all(axes == axes_of[0] for axes in axes_of):
        return operands
    union = frozenset().union(*axes_of)
    return [
        operand if axes == union else lax.pcast(operand, tuple(sorted(union - axes)), to="varying")
        for operand, axes in zip(operands, axes_of, strict=True)
    ]


# Types and contexts.


def typed_alike(
    this: Operation, names: Sequence[str], results: Sequence[Any], operands: Sequence[Any], **params: Any
) -> list[Any]:
    """Returns types of the given shapes and dtypes, sharded over explicit mesh axes as the operands are."""
    first = operands[0]
    mesh = first.sharding.mesh
    if mesh.empty:
        specs = [PartitionSpec(*(None,) * len(result.shape)) for result in results]
    else:
        names_in, names_out = this.axes(names, len(results), **params)
        specs = _specs(_mesh_axes(operands, names_in), results, names_out)
    return [
        first.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=NamedSharding(mesh, spec))
        for result, spec in zip(results, specs, strict=True)
    ]


def types_of_results(function: Callable[..., Any], *operands: Any) -> list[Any]:
    """Returns the types of the results of a function of arrays, or of their types.

    In a `shard_map` that leaves mesh axes automatic, JAX 0.11.2 has no type for what `jax.eval_shape` returns.
    """
    return jax.make_jaxpr(function)(*operands).out_avals


def of_rows(aval: Any, shape: Sequence[int], dtype: Any) -> Any:
    """Returns a type of this shape and dtype, sharded as `aval` is along axes that are longer than 1."""
    spec = (*aval.sharding.spec, *(None,) * (len(shape) - len(aval.sharding.spec)))
    spec = PartitionSpec(*(None if size == 1 else axes for size, axes in zip(shape, spec, strict=True)))
    return aval.update(shape=tuple(shape), dtype=dtype, weak_type=False, sharding=NamedSharding(aval.sharding.mesh, spec))


def on_no_mesh() -> Any:
    """Returns a context in which new arrays have no sharding, whatever mesh the user set."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def on_mesh_of(avals: Sequence[Any]) -> Any:
    """Returns a context with the mesh of the first type that has explicit axes, as by `jax.set_mesh`, unless one is set."""
    mesh = next((aval.sharding.mesh for aval in avals if not aval.sharding.mesh.empty and has_explicit_axes(aval)), None)
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def has_explicit_axes(aval: Any) -> bool:
    """Tells whether the type of an array says how it is sharded."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def is_all_explicit(mesh: Any) -> bool:
    """Tells whether all axes of a mesh are explicit: no `shard_map` around has one."""
    return set(mesh.axis_types) == {AxisType.Explicit}


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """Returns the mesh of arrays if their types say entirely how they are sharded, else None."""
    mesh = next((aval.sharding.mesh for aval in avals if has_explicit_axes(aval)), None)
    return None if mesh is None or AxisType.Auto in mesh.axis_types else mesh


# Lowering.


def partitioning(ctx: Any) -> tuple[int, str | None]:
    """Returns the number of devices over which a program may shard arrays, and the reason why kernels cannot run on shards.

    Args:
      ctx: the context of a lowering rule.

    Returns:
      The number of devices. 1 inside a `shard_map` over all mesh axes.
      A reason, in words, that leaves the call to the reference and to XLA's partitioner, or None.
    """
    axes = compat.of_module(ctx, "axis_context")
    manual = getattr(axes, "manual_axes", None)  # inside a shard_map
    if manual is None:
        devices = 1 if axes is None else axes.num_devices
    else:
        devices = math.prod([size for name, size in axes.mesh.shape.items() if name not in manual])
    if devices == 1 or explicit_mesh(ctx.avals_in) is not None:
        return devices, None
    if manual:
        return devices, "the shard_map around it leaves mesh axes automatic, whose shards only XLA knows there"
    if compat.of_module(ctx, "lowering_parameters.for_export"):  # JAX cannot serialize custom_partitioning
        return devices, "on automatic mesh axes the compiler has to ask back, which an exported program cannot"
    return devices, None


def tells_what_is_whole(aval: Any, devices: int) -> bool:
    """Tells whether axes without a mesh axis in their type are whole, in a program for this number of devices.

    They may be sharded over automatic mesh axes, and over those of a mesh of one device.
    """
    mesh = aval.sharding.mesh
    if mesh.empty:
        return devices == 1
    return AxisType.Auto not in mesh.axis_types and (devices > 1 or AxisType.Manual in mesh.axis_types)


def partitioned(
    function, ctx, names_in: Names, names_out: Names, joined: Sequence[Any] = (), is_aligned: bool = True
) -> Callable[..., Any]:
    """Makes a function of whole operands that runs `function(*shards, cuts=cuts)` on each device.

    `function` merges over devices along axes of the names `joined`; `cuts` maps each of these names that is sharded to its
    `Cut`. Along other names results are summed over devices. If the operation is not aligned, they are summed along `joined`,
    too, if they have size 1 there.

    Shards have one size. Only those of an aligned operation on automatic mesh axes may end in padding, along `joined`.
    """
    if explicit_mesh(ctx.avals_in) is None:
        return _on_automatic_axes(function, names_in, names_out, joined, is_aligned)
    return on_explicit_axes(function, ctx.avals_in, ctx.avals_out, names_in, names_out, joined, is_aligned)


def on_explicit_axes(
    function, avals_in, avals_out, names_in: Names, names_out: Names, joined=(), is_aligned=False
) -> Callable[..., Any]:
    """Does what `partitioned` does, over the explicit axes of a mesh. XLA shards its other axes, inside."""
    mesh = next(aval.sharding.mesh for aval in avals_in if has_explicit_axes(aval))
    over = _mesh_axes(avals_in, names_in)
    local = functools.partial(function, cuts=_cuts(over, joined, avals_in, names_in))
    return jax.shard_map(
        lambda *operands: _summed(jax.tree.leaves(local(*operands)), avals_out, over, names_out, joined if is_aligned else ()),
        mesh=mesh,
        in_specs=tuple(_specs(over, avals_in, names_in)),
        out_specs=_specs(over, avals_out, names_out),
        axis_names={name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit},
        check_vma=False,
    )


def _on_automatic_axes(function, names_in, names_out, joined, is_aligned):
    """Does what `partitioned` does, over mesh axes whose shards XLA chooses. It asks `partition` back once it knows them."""
    from jax.experimental.custom_partitioning import custom_partitioning

    call = custom_partitioning(lambda *operands: function(*operands, cuts={}))  # it takes no keywords

    def partition(mesh, operands, results):
        over = _mesh_axes(operands, names_in, () if is_aligned else joined)
        specs_in = tuple(NamedSharding(mesh, spec) for spec in _specs(over, operands, names_in))
        leaves, structure = jax.tree.flatten(results)
        specs_out = structure.unflatten(NamedSharding(mesh, spec) for spec in _specs(over, leaves, names_out))

        def on_shard(*shards):
            with on_no_mesh():
                parts = jax.tree.leaves(function(*shards, cuts=_cuts(over, joined, operands, names_in)))
                return structure.unflatten(_summed(parts, leaves, over, names_out, joined if is_aligned else ()))

        return mesh, on_shard, specs_out, specs_in

    def rule(_, operands, results):
        factors = list(_factors((*operands, *results), (*names_in, *names_out)))
        return f"{', '.join(factors[: len(operands)])} -> {', '.join(factors[len(operands) :])}"

    call.def_partition(partition, sharding_rule=rule)
    return call


# Axes by name.


def _named(array, names):
    """Pairs the name and the size of each axis of an array."""
    return tuple(zip((*range(len(array.shape) - len(names)), *names), array.shape, strict=True))


def _mesh_axes(arrays, names, even=()):
    """Maps each axis name that is sharded to its mesh axes: those of the first array that is sharded along it.

    A mesh axis shards one name. Only names that no array has together, as those of queries and of keys, may share mesh axes. An
    axis that is named by its position shares none, because results may have it together with any other. Names with several
    sizes, and those in `even`, are sharded over the mesh axes that share each size evenly.
    """
    specs, sizes, beside = {}, {}, {}
    for array, trailing in zip(arrays, names, strict=True):
        spec = (*array.sharding.spec, *(None,) * (len(array.shape) - len(array.sharding.spec)))
        pairs = _named(array, trailing)
        for (name, size), dim in zip(pairs, spec, strict=True):
            sizes.setdefault(name, set()).update({size} - {1})
            beside.setdefault(name, set()).update(other for other, _ in pairs)
            if name is not None and dim is not None:
                specs.setdefault(name, (dim, array.sharding.mesh))
    over = {}
    for name, (dim, mesh) in specs.items():
        taken = set(_concatenated(over, [n for n in over if isinstance(n, int) or isinstance(name, int) or n in beside[name]]))
        free = tuple(axis for axis in (dim if isinstance(dim, tuple) else (dim,)) if axis not in taken)
        if len(sizes[name]) > 1 or name in even:
            free = _evenly(free, mesh, sizes[name])
        if free:
            over[name] = free
    return over


def _evenly(axes, mesh, sizes):
    """Chooses the mesh axes, in their order, that share each of the sizes evenly among the most devices."""
    subsets = [subset for count in range(len(axes), -1, -1) for subset in itertools.combinations(axes, count)]
    shards = {subset: math.prod(mesh.shape[axis] for axis in subset) for subset in subsets}
    return max((subset for subset in subsets if not any(size % shards[subset] for size in sizes)), key=shards.__getitem__)


def _specs(over, arrays, names):
    """Returns the `PartitionSpec` of each array, from the mesh axes by axis name."""
    return [
        PartitionSpec(*(None if size == 1 else over.get(name) for name, size in _named(array, trailing)))
        for array, trailing in zip(arrays, names, strict=True)
    ]


def _concatenated(over, names):
    """Returns the mesh axes over which `names` are sharded, one behind the other."""
    return tuple(itertools.chain(*(over.get(name, ()) for name in names)))


def _cuts(over, joined, arrays, names):
    """Maps each sharded name in `joined` to its `Cut`."""
    sizes = dict(
        pair for array, trailing in zip(arrays, names, strict=True) for pair in _named(array, trailing) if pair[1] != 1
    )
    return {name: Cut(over[name], sizes[name]) for name in joined if name in over}


def _summed(results, avals, over, names, joined):
    """Sums results over the shards of names, except `joined`, along which they have size 1."""
    for index, (result, aval, trailing) in enumerate(zip(results, avals, names, strict=True)):
        missing = [name for name, size in _named(aval, trailing) if size == 1 and name not in joined]
        if axes := _concatenated(over, missing):
            results[index] = lax.psum(result, axes)
    return results


def _factors(arrays, names):
    """Yields Shardy's factors of each array. Axes of one name and size share a factor; a whole axis has one of its own."""
    counter, shared = itertools.count(), {}
    for array, trailing in zip(arrays, names, strict=True):
        factors = []
        for name, size in _named(array, trailing):
            factor = f"a{next(counter)}"
            factors.append(factor if size == 1 or name is None else shared.setdefault((name, size), factor))
        yield " ".join(factors)
