"""Sharded operands: each device runs its own rows, and nothing is gathered.

`names` says for each array the names of its last axes; those before are named by their position. Axes of one name are sharded
alike, or have size 1 and are whole on every device, as are those named None. One name with several sizes (heads, key heads) is
sharded as far as devices share each evenly. A result of size 1 along a sharded name is summed over its shards.
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
    """How an axis is sharded that devices merge along.

    Attributes:
      over: the mesh axes.
      size: of the whole axis. Where devices do not share it evenly, shards are of one size, and the last ones end in padding.
    """

    over: tuple[str, ...]
    size: int

    @classmethod
    def of_part(cls, over: tuple[str, ...], size: int) -> "Cut":
        """How an axis is sharded evenly, in a `shard_map`, of which each device has a part of this size."""
        return cls(over, size * lax.axis_size(over))


def alike(this: Operation, names: Sequence[str], operands: list[Any]) -> tuple[list[Any], bool]:
    """The operands of a map as one primitive wants them, and whether their types say how they are cut over devices.

    All vary over the same manual mesh axes, and are sharded over explicit ones as the first that is sharded along an axis:
    nothing is gathered.
    """
    meshes = [jax.typeof(operand).sharding.mesh for operand in operands]
    if all(mesh.empty for mesh in meshes):
        return operands, False
    is_settled = any(mesh.axis_types and AxisType.Auto not in mesh.axis_types for mesh in meshes)
    return _resharded(operands, [this.by_name[name].axes for name in names])[0], is_settled


def placed_alike(operands: list[Any], names: Names) -> list[Any]:
    """The operands, sharded alike over explicit mesh axes, for an op that is no primitive."""
    return list(map(placing, _resharded(operands, names)[0]))


def on_shards(function: Callable[..., Any], operands: list[Any], names: Names, joined: str, ndim: int) -> Any:
    """`function(mesh axes of rows, mesh axes of joined, *operands)`, on explicit mesh axes on shards of the operands.

    Rows are the axes that are named by their position; along the axes named `joined` the function merges over devices. It gets
    the mesh axes over which both are sharded, and operands that all vary alike. Its result has `ndim` axes of rows.
    """
    operands, mesh, dims = _resharded(operands, names)
    over = _mesh_axes(dims, [name for name in dims if isinstance(name, int)]), _mesh_axes(dims, [joined])
    # All axes of a mesh if they may be, as some kernels run on no other; no names mean those, but for one of a `vmap` around.
    is_all_explicit = mesh is not None and set(mesh.axis_types) == {AxisType.Explicit}
    if not is_all_explicit and not any(over):
        return function(*over, *operands)
    mapped = jax.shard_map(
        lambda *operands: function(*over, *vary_alike(list(operands))),
        mesh=mesh,
        in_specs=tuple(_specs(dims, operands, names)),
        out_specs=PartitionSpec(*map(dims.get, range(ndim))),
        axis_names=set() if is_all_explicit else {*over[0], *over[1]},
    )
    return placing(mapped(*operands))


def _resharded(operands, names):
    """Operands sharded alike over explicit mesh axes, their mesh, or None, and how each name is sharded."""
    operands = vary_alike(operands)
    types = [jax.typeof(operand) for operand in operands]
    mesh = next((t.sharding.mesh for t in types if has_explicit_axes(t)), None)
    if mesh is None:
        return operands, None, {}
    dims = _dims(types, names)
    placed = next(operand for operand, t in zip(operands, types, strict=True) if has_explicit_axes(t))
    moved = [
        _moved(operand, NamedSharding(mesh, spec), placed)
        for operand, spec in zip(operands, _specs(dims, types, names), strict=True)
    ]
    return moved, mesh, dims


def placed_as(array: jax.Array, placed: jax.Array) -> jax.Array:
    """Places a tangent of `placed` as that is sharded, on explicit mesh axes.

    A linear function of the tangent may run later, outside of `jit`, on arrays that are not of the types it was traced for. So
    what `jax.linearize` returns places its tangents, and what `jax.vjp` returns its cotangents.
    """
    kind = jax.typeof(placed)
    if not has_explicit_axes(kind):
        return array
    devices = None if isinstance(placed, jax.core.Tracer) else placed.sharding
    return _place.bind(_moved(array, kind.sharding, placed), sharding=kind.sharding, devices=devices)


@jax.custom_jvp
def placing(array: jax.Array) -> jax.Array:
    """Returns the array. Its tangents and cotangents are sharded as it is, wherever the user placed them."""
    return array


@placing.defjvp
def _placing_jvp(primals, tangents):
    return primals[0], placed_as(tangents[0], primals[0])


# Places a tangent as `sharding`, which its type has, says. `devices` is that sharding over devices. It is None inside `jit`,
# which knows the devices.
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


def _moved(operand: jax.Array, sharding: NamedSharding, placed: jax.Array) -> jax.Array:
    """The operand sharded so, over the devices of `placed`."""
    kind = jax.typeof(operand)
    if kind.sharding.mesh.empty:  # its type names no devices, nor does the mesh of a type, which an eager call has to know
        return _placed(operand, placed, sharding)
    return operand if kind.sharding.spec == sharding.spec else jax.sharding.reshard(placing(operand), sharding)


@functools.partial(jax.jit, static_argnames="sharding", keep_unused=True)
def _placed(operand, beside, sharding):
    """The operand sharded so. `beside`, which is not used, tells JAX the devices."""
    del beside
    return jax.sharding.reshard(operand, sharding)


def with_whole_rows(array: jax.Array) -> jax.Array:
    """The array with its last axis whole on every device: gathered, where explicit mesh axes cut it."""
    kind = jax.typeof(array)
    spec = kind.sharding.spec
    if len(spec) < array.ndim or spec[-1] is None or not has_explicit_axes(kind):
        return array
    return _moved(array, NamedSharding(kind.sharding.mesh, PartitionSpec(*spec[:-1], None)), array)


def varying(array: jax.Array, axes: tuple[Any, ...]) -> jax.Array:
    """The array, varying over these axes of a `shard_map` around, if that keeps count of it."""
    missing = tuple([axis for axis in axes if axis not in compat.varying(array)])
    return lax.pcast(array, missing, to="varying") if missing else array


def vary_alike(operands: list[Any]) -> list[Any]:
    """The operands, all varying over the same manual mesh axes."""
    varying = list(map(compat.varying, operands))
    union = frozenset().union(*varying)
    return [
        operand if axes == union else lax.pcast(operand, tuple(sorted(union - axes)), to="varying")
        for operand, axes in zip(operands, varying, strict=True)
    ]


def typed_alike(
    this: Operation, names: Sequence[str], results: Sequence[Any], operands: Sequence[Any], **params: Any
) -> list[Any]:
    """The types of results of a map, of these shapes and dtypes, on explicit mesh axes sharded as the operands are."""
    first = operands[0]
    if first.sharding.mesh.empty:
        specs = [PartitionSpec(*(None,) * len(result.shape)) for result in results]
    else:
        names_in, names_out = this.axes(names, len(results), **params)
        specs = _specs(_dims(operands, names_in), results, names_out)
    shardings = [NamedSharding(first.sharding.mesh, spec) for spec in specs]
    return [
        first.update(shape=result.shape, dtype=result.dtype, weak_type=False, sharding=sharding)
        for result, sharding in zip(results, shardings, strict=True)
    ]


def on_no_mesh() -> Any:
    """A context in which new arrays have no sharding, whatever mesh the user set."""
    return jax.sharding.use_abstract_mesh(AbstractMesh((), ()))


def on_mesh_of(avals: Sequence[Any]) -> Any:
    """A context of the mesh on which types say how arrays are sharded, as `jax.set_mesh` sets it, unless one is set."""
    mesh = next((aval.sharding.mesh for aval in avals if has_explicit_axes(aval)), None)
    if mesh is None or not jax.sharding.get_abstract_mesh().empty:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(mesh)


def has_explicit_axes(aval: Any) -> bool:
    """Whether the type of an array says how it is sharded."""
    return AxisType.Explicit in aval.sharding.mesh.axis_types


def partitioning(ctx: Any) -> tuple[int, str | None]:
    """Over how many devices arrays may be cut of what is lowered in `ctx`, a lowering rule's context.

    Returns:
      How many they are, and why it can be left to XLA only, or None.
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
    if compat.of_module(ctx, "lowering_parameters.for_export"):
        return devices, "on automatic mesh axes the compiler has to ask back, which an exported program cannot"
    return devices, None


def tells_what_is_whole(aval: Any, devices: int) -> bool:
    """Says whether axes without a mesh axis in their type are whole, in a program for this number of devices.

    They may be sharded over automatic axes, and over those of a mesh of one device.
    """
    mesh = aval.sharding.mesh
    if mesh.empty:
        return devices == 1
    return AxisType.Auto not in mesh.axis_types and (devices > 1 or AxisType.Manual in mesh.axis_types)


def _explicit_axes(mesh):
    return {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}


def explicit_mesh(avals: Sequence[Any]) -> Any:
    """The mesh of arrays, if their types say all about how they are sharded, or None."""
    mesh = next((a.sharding.mesh for a in avals if has_explicit_axes(a)), None)
    return None if mesh is None or AxisType.Auto in mesh.axis_types else mesh


def partitioned(
    function, ctx, names_in: Names, names_out: Names, joined: Sequence[Any] = (), is_aligned: bool = True
) -> Callable[..., Any]:
    """`function` of operands whose axes have these names, run on shards.

    `function(*shards, over=...)` merges over devices along axes of the names `joined`: it gets a `Cut` by each of these names
    that is sharded. Along other names results add up over devices. `is_aligned` says whether the map is: if not, results add up
    along names of `joined` too, where they have size 1.

    Shards are equal, but of an aligned map on automatic mesh axes along `joined`: there the last ones may end in padding.
    """
    if explicit_mesh(ctx.avals_in) is None:
        return _on_automatic_axes(function, names_in, names_out, joined, is_aligned)
    return on_explicit_axes(function, ctx.avals_in, ctx.avals_out, names_in, names_out, joined, is_aligned)


def on_explicit_axes(
    function, avals_in, avals_out, names_in: Names, names_out: Names, joined=(), is_aligned=False
) -> Callable[..., Any]:
    """`partitioned` over the explicit axes of a mesh: all of them, or those that are not left to the compiler inside."""
    mesh = next(aval.sharding.mesh for aval in avals_in if has_explicit_axes(aval))
    dims = _dims(avals_in, names_in)
    local = functools.partial(function, over=_cuts(dims, joined, avals_in, names_in))
    return jax.shard_map(
        lambda *operands: _summed(jax.tree.leaves(local(*operands)), avals_out, dims, names_out, joined if is_aligned else ()),
        mesh=mesh,
        in_specs=tuple(_specs(dims, avals_in, names_in)),
        out_specs=_specs(dims, avals_out, names_out),
        axis_names=_explicit_axes(mesh),
        check_vma=False,
    )


def _on_automatic_axes(function, names_in, names_out, joined, is_aligned):
    from jax.experimental.custom_partitioning import custom_partitioning

    call = custom_partitioning(lambda *operands: function(*operands, over={}))  # it takes no keywords

    def partition(mesh, operands, results):
        dims = _dims(operands, names_in, () if is_aligned else joined)
        specs_in = tuple(NamedSharding(mesh, spec) for spec in _specs(dims, operands, names_in))
        leaves, structure = jax.tree.flatten(results)
        specs_out = structure.unflatten(NamedSharding(mesh, spec) for spec in _specs(dims, leaves, names_out))

        def on_shard(*shards):
            with on_no_mesh():
                parts = jax.tree.leaves(function(*shards, over=_cuts(dims, joined, operands, names_in)))
                return structure.unflatten(_summed(parts, leaves, dims, names_out, joined if is_aligned else ()))

        return mesh, on_shard, specs_out, specs_in

    def rule(_, operands, results):
        factors = list(_factors((*operands, *results), (*names_in, *names_out)))
        return f"{', '.join(factors[: len(operands)])} -> {', '.join(factors[len(operands) :])}"

    call.def_partition(partition, sharding_rule=rule)
    return call


def _named(array, names):
    """The axes of an array as pairs of a name and a size."""
    return tuple(zip((*range(len(array.shape) - len(names)), *names), array.shape, strict=True))


def _dims(arrays, names, even=()):
    """How each name is sharded: as in the first array that is sharded along it, over its mesh axes that are not taken.

    Names that have several sizes and those that are `even` are sharded over as many devices as share each size evenly. Names of
    which no array has both, as those of queries and of keys, may be sharded over the same mesh axes. An axis that is
    named by its position shares none: results may have it together with any other.
    """
    found, sizes, beside = {}, {}, {}
    for array, trailing in zip(arrays, names, strict=True):
        spec = (*array.sharding.spec, *(None,) * (len(array.shape) - len(array.sharding.spec)))
        own = _named(array, trailing)
        for (name, size), dim in zip(own, spec, strict=True):
            sizes.setdefault(name, set()).update({size} - {1})
            beside.setdefault(name, set()).update(other for other, _ in own)
            if name is not None and dim is not None:
                found.setdefault(name, (dim, array.sharding.mesh))
    dims = {}
    for name, (dim, mesh) in found.items():
        taken = set(_mesh_axes(dims, [n for n in dims if isinstance(n, int) or isinstance(name, int) or n in beside[name]]))
        over = tuple(axis for axis in (dim if isinstance(dim, tuple) else (dim,)) if axis not in taken)
        if len(sizes[name]) > 1 or name in even:
            over = _evenly(over, mesh, sizes[name])
        if over:
            dims[name] = over
    return dims


def _evenly(axes, mesh, sizes):
    """Of the mesh axes, in their order, those that share each of the sizes evenly among the most devices."""
    subsets = [subset for count in range(len(axes), -1, -1) for subset in itertools.combinations(axes, count)]
    shards = {subset: math.prod(mesh.shape[axis] for axis in subset) for subset in subsets}
    return max((subset for subset in subsets if not any(size % shards[subset] for size in sizes)), key=shards.__getitem__)


def _specs(dims, arrays, names):
    """How arrays are sharded if their names are so."""
    return [
        PartitionSpec(*(None if size == 1 else dims.get(name) for name, size in _named(array, trailing)))
        for array, trailing in zip(arrays, names, strict=True)
    ]


def _mesh_axes(dims, names):
    """The mesh axes over which `names` are sharded."""
    return tuple(itertools.chain(*(dims.get(name, ()) for name in names)))


def _cuts(dims, joined, arrays, names):
    """Of each of the names `joined` that is sharded, how."""
    sizes = dict(
        pair for array, trailing in zip(arrays, names, strict=True) for pair in _named(array, trailing) if pair[1] != 1
    )
    return {name: Cut(dims[name], sizes[name]) for name in joined if name in dims}


def _summed(results, avals, dims, names, joined):
    """Results on shards; what is cut along a name, other than `joined`, but has size 1 there, is the sum over the shards."""
    for index, (result, aval, trailing) in enumerate(zip(results, avals, names, strict=True)):
        missing = [name for name, size in _named(aval, trailing) if size == 1 and name not in joined]
        if over := _mesh_axes(dims, missing):
            results[index] = lax.psum(result, over)
    return results


def _factors(arrays, names):
    """Shardy's names of the axes of each array: shared by axes of one name and size, and one of its own where it is whole."""
    counter, shared = itertools.count(), {}
    for array, trailing in zip(arrays, names, strict=True):
        axes = []
        for name, size in _named(array, trailing):
            own = f"a{next(counter)}"
            axes.append(own if size == 1 or name is None else shared.setdefault((name, size), own))
        yield " ".join(axes)
