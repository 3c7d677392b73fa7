"""Lowers a primitive: finds what produces its operands, chooses a plan, and runs it on one device or on shards.

JAX caches lowering rules, and a cached rule does not see what produces the operands. So there are two steps. `lower`, which is
not cached, looks at the producers and binds a second primitive. `_lower_call`, the rule of that one, is cached: it chooses the
implementation and traces its plan in place, so that equal calls lower their kernel once. It has a version for CUDA, which a
rule that is not cached must not have.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax._core import compat, fusion, sharding
from jaxsoftmax._core.choose import Choice, choose, record
from jaxsoftmax._core.operation import OnShards, Operation
from jaxsoftmax._core.problem import FACTORS
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax._core.target import ONE_DEVICE, Machine, Target, target_for

_call = Primitive("jaxsoftmax")
_call.multiple_results = True
_call.def_abstract_eval(lambda *operands, results, **params: list(results))


@dataclass(frozen=True)
class Site:
    """One call of an operation in a program: the parameters of the second step."""

    operation: Operation
    names: tuple[str, ...]  # of the operands that are present
    dtypes: tuple[Any, ...]  # of these after casts to float32, after which the reference gets them
    fused: frozenset[str]  # names of the operands that XLA would compute together with the reference
    implementation: str | None  # name of the one that must run, or None
    axis_name: tuple[str, ...]  # mesh axes of a `shard_map` around over which rows are sharded
    params: tuple[tuple[str, Any], ...]  # the other parameters of the operation, by name
    factored: "Site | None" = None  # the same call with one of `FACTORS`, see `_factored`

    def named(self, operands: Sequence[Any]) -> dict[str, Any]:
        return dict(zip(self.names, operands, strict=True))


def lower(operation: Operation, ctx, *operands, names, implementation, axis_name=(), **params):
    """Binds the second step, on operands as they were before casts to float32."""
    sources, avals, functions = list(operands), list(ctx.avals_in), compat.of_module(ctx, "symbol_table")
    platforms = {target_for(platform).platform for platform in compat.platforms(ctx)}
    # Names of operands that XLA could fuse with the reference, and of those among them that it writes anyway.
    fusible, in_memory = set(), set()
    for index, name in enumerate(names):
        is_scores = operation.by_name[name].is_scores
        if is_scores and (source := fusion.widened_from(sources[index])) is not None:
            # Kernels see the narrow type alone: a kernel that refuses it is not asked about float32.
            sources[index], avals[index] = source, avals[index].update(dtype=np.dtype(fusion.narrow_dtype(source)))
        # A CPU scatters faster than it compares.
        if name == "t" and is_scores and operation.is_aligned and platforms == {"cuda"}:
            sources[index] = fusion.one_hot_from(sources[index], params["axes"], functions) or sources[index]
        is_whole_mask = avals[index].dtype == bool and avals[index].shape == avals[0].shape
        if (is_scores or is_whole_mask) and fusion.is_fused(sources[index], functions):
            fusible.add(name)
            # XLA computes a derivative together with those of the operations that produce its operand, which come behind it.
            if not operation.linear and fusion.is_written(sources[index], functions):
                in_memory.add(name)
    dtypes = tuple(aval.dtype for aval in ctx.avals_in)
    site = Site(operation, names, dtypes, frozenset(fusible - in_memory), implementation, axis_name, tuple(params.items()))
    if (name := operation.factor_of) in fusible and dtypes[names.index(name)] == avals[names.index(name)].dtype:
        site = _factored(site, ctx, sources, avals, platforms)
    bound = functools.partial(_call.bind, results=tuple(ctx.avals_out), site=site)
    with sharding.on_mesh_of(avals):
        return mlir.lower_fun(bound)(ctx.replace(avals_in=avals), *sources)


def _factored(site: Site, ctx, operands: list[Any], avals: list[Any], platforms: set[str]) -> Site:
    """Looks for a factor that a kernel can take in, in the operand that XLA would compute.

    If there is one, this appends the two sides of the product to the operands and their types. The reference runs on the
    product as before, and a kernel on the two sides. XLA leaves out what is not used.
    """
    operation, params = site.operation, dict(site.params)
    kernels, name = operation.op.kernels.values(), operation.factor_of
    at = site.names.index(name)
    if site.axis_name or not any(each.takes_factor and platforms & {*each.platforms} for each in kernels):
        return site
    if (scaled := fusion.scaled_from(operands[at], operation.row_axes(avals[at].ndim, **params))) is None:
        return site
    is_fused = fusion.is_fused(scaled.source, compat.of_module(ctx, "symbol_table"))
    fused = site.fused | {name} if is_fused else site.fused - {name}
    product, narrow = avals[at], fusion.narrow_dtype(scaled.source)
    operands += [scaled.source, scaled.factor]
    avals += [
        product if narrow is None else product.update(dtype=np.dtype(narrow)),
        sharding.of_rows(product, mlir.ir.RankedTensorType(scaled.factor.type).shape, np.dtype(np.float32)),
    ]
    name_of_factor = "divisor" if scaled.divides else "factor"
    factored = replace(site, names=(*site.names, name_of_factor), dtypes=(*site.dtypes, avals[-1].dtype), fused=fused)
    return replace(site, factored=factored)


@dataclass(frozen=True)
class Runner:
    """Runs operations where one call is lowered, each by the plan that is chosen for its operands."""

    target: Target
    known_target: Target | None  # the same if the program is for no other platform: the reference may depend on it
    forced: str | None  # name of the implementation that must run, or None
    widened: dict[str, tuple[Any, Any]]  # dtypes of operands before and after casts to float32, by name
    fused: frozenset[str]  # names of the operands that XLA would compute together with the reference
    reaches_peers: bool  # True if a kernel may store to the memory of the other devices
    obstacle: str | None = None  # a reason that leaves everything to the reference, or None

    def choose(self, operation: Operation, types, n_devices: int = 1, obstacle=None, is_optional=False, **params) -> Choice:
        """Chooses the plan for operands of these types by name; XLA would run the reference on `n_devices`."""
        problem = self._problem(operation, types, params, machine=Machine(n_devices, self.known_target))
        return choose(problem, self.target, self.forced, obstacle or self.obstacle, is_optional)

    def run(self, choice: Choice, operands) -> list[Any]:
        """Runs a plan, and shows it to `explain`."""
        record(choice)
        return jax.tree.leaves(choice.plan.run(**operands))

    def __call__(self, operation: Operation, operands, **params) -> list[Any]:
        """Computes the results of an operation from operands by name; None is absent."""
        operands = _present(operands)
        return self.run(self.choose(operation, _types_of(operands), **params), operands)

    def on_all_devices(self, operation: Operation, operands, cuts, **params) -> list[Any] | None:
        """Runs one kernel that merges over the devices that share rows; None if no such kernel serves this call."""
        if not (self.reaches_peers and compat.is_tested()):
            return None
        operands = _present(operands)
        types = _types_of(operands)
        choice = self.choose(operation, types, **params)
        if choice.is_reference:
            return None
        devices = tuple((axis, lax.axis_size(axis)) for cut in cuts.values() for axis in cut.over)
        problem = self._problem(operation, types, params, devices=devices)
        choice = choose(problem, self.target, choice.implementation, is_optional=True)
        return None if choice.is_reference else self.run(choice, operands)

    def unless(self, reason: str | None) -> "Runner":
        """Returns this runner, or one that leaves everything to the reference if there is a reason and nothing is forced."""
        return self if reason is None or self.forced is not None else replace(self, obstacle=self.obstacle or reason)

    def on_reference(self, operation: Operation, operands, reason: str, **params) -> list[Any]:
        """Runs the reference, whatever is forced; `explain` gives the reason."""
        return replace(self, forced=None, obstacle=self.obstacle or reason)(operation, operands, **params)

    def _problem(self, operation, types, params, devices=(), machine=ONE_DEVICE):
        dtypes = {n: dtype for n, (narrow, dtype) in self.widened.items() if n in types and types[n].dtype == narrow}
        return operation.problem(operation, types, params, dtypes, self.fused & set(types), devices, machine)


class ReferenceRunner:
    """A `Runner` of the reference alone, outside of a lowering rule."""

    def __call__(self, operation: Operation, operands, **params) -> list[Any]:
        operands = _present(operands)
        problem = operation.problem(operation, _types_of(operands), params)
        return jax.tree.leaves(operation.op.reference().plan(problem).run(**operands))

    def on_all_devices(self, operation: Operation, operands, cuts, **params) -> None:
        del operation, operands, cuts, params

    def unless(self, reason: str | None) -> "ReferenceRunner":
        del reason
        return self

    def on_reference(self, operation: Operation, operands, reason: str, **params) -> list[Any]:
        del reason
        return self(operation, operands, **params)


def on_reference(
    operation: Operation, operands: dict[str, Any], results: Sequence[Any], *, implementation=None, axis_name=(), **params
) -> list[Any]:
    """Computes an operation by its reference, on shards where types say how operands and results are sharded."""
    del implementation
    operands = _present(operands)
    names, types = list(operands), list(_types_of(operands).values())
    manual = _manual_cuts(operation, types[0], axis_name, params) if axis_name else {}

    def run(*arrays, cuts=None, machine=ONE_DEVICE):
        named, cuts = dict(zip(names, arrays, strict=True)), (cuts or {}) | manual
        if cuts:
            return _across_devices(operation, ReferenceRunner(), named, cuts, params, is_manual=bool(manual))
        problem = operation.problem(operation, _types_of(named), params, machine=machine)
        return jax.tree.leaves(operation.op.reference().plan(problem).run(**named))

    arrays = list(operands.values())
    if operation.is_aligned:
        return run(*arrays)
    if not any(map(sharding.has_explicit_axes, types)):
        return run(*arrays, machine=Machine(types[0].sharding.mesh.size))
    names_in, names_out = operation.axes(names, len(results), **params)
    mapped = sharding.on_explicit_axes(run, types, results, names_in, names_out, operation.joined)
    # Outside of jit JAX (0.11, 0.12) takes automatic axes for manual ones, and has no map in one with another `check_vma`.
    if not sharding.is_all_explicit(results[0].sharding.mesh):
        mapped = jax.jit(sharding.nested(mapped))
    return list(map(sharding.placing, mapped(*arrays)))


def _present(operands):
    return {name: operand for name, operand in operands.items() if operand is not None}


def _types_of(operands):
    return {name: jax.typeof(operand) for name, operand in operands.items()}


def _manual_cuts(operation: Operation, first: Any, axis_name: tuple[str, ...], params) -> dict[Any, Cut]:
    """Maps what is joined to how a `shard_map` around the call shards it: evenly, as in the first operand, of type `first`."""
    names = next(iter(operation.by_name.values())).axes
    joined = {axis: axis for axis in params.get("axes", ())[-1:]}
    if not operation.is_aligned:
        joined = {name: names.index(name) - len(names) if name in names else None for name in operation.joined}
    return {name: Cut.of_part(axis_name, 0 if at is None else first.shape[at]) for name, at in joined.items()}


def _across_devices(
    operation: Operation, runner, operands, cuts, params, is_manual: bool, knows_cuts: bool = True
) -> list[Any]:
    """Computes an operation whose rows devices share, by the rule of its op, from each device's part."""
    if operation.op.across_devices is None:
        raise AssertionError(f"{operation.name} has no rule for rows that devices share")
    rule = operation.op.across_devices()[operation]
    options = {} if operation.is_aligned else {"is_manual": is_manual, "knows_cuts": knows_cuts}
    return jax.tree.leaves(rule(runner, **dict.fromkeys(operation.by_name) | operands, cuts=cuts, **params, **options))


@dataclass(frozen=True)
class Placement:
    """Places the second step: on how many devices it runs, and what is known of how they share the operands."""

    site: Site
    runner: Runner  # of operations on one device
    n_devices: int  # over which XLA may shard the operands
    obstacle: str | None  # a reason why kernels cannot run on shards, or None
    manual: dict[Any, Cut]  # how a `shard_map` of the user cuts what is joined; empty if it does not
    depends_on_cuts: bool  # True if a parameter depends on how sequences are cut, and it is known which axes are whole
    is_reordered: bool  # True if operands are in an order that only the rule for shared sequences undoes

    def on_shard(self, *operands, cuts) -> list[Any]:
        """Computes the results from shards of the operands, which are cut as `cuts` says."""
        site, cuts, params = self.site, cuts | self.manual, dict(self.site.params)
        named, runner = site.named(operands), self.runner
        knows_cuts = bool(cuts) or self.depends_on_cuts
        if not (knows_cuts or self.is_reordered):
            return runner(site.operation, named, **params)
        if named.keys() & set(FACTORS):  # the rules take none
            named, runner = site.operation.multiplied(named), replace(runner, fused=runner.fused | {site.operation.factor_of})
        with compat.unchecked() if self.manual else contextlib.nullcontext():
            return _across_devices(site.operation, runner, named, cuts, params, bool(self.manual), knows_cuts)

    def is_partitioned(self, choice: Choice, avals) -> bool:
        """Tells whether the results are computed on shards, and not left to XLA's partitioner."""
        operation = self.site.operation
        if self.n_devices == 1:
            return False
        runs_all = operation.on_shards is OnShards.EVERYTHING and self.obstacle is None
        # Types that say how arrays are sharded are in the way of a reference that reshapes.
        return not choice.is_reference or runs_all or (not operation.is_aligned and sharding.explicit_mesh(avals) is not None)


def _placement(platform, ctx, site: Site) -> Placement:
    """Finds out what the context of a lowering rule says of the devices."""
    operation, platforms, params = site.operation, compat.platforms(ctx), dict(site.params)
    target = target_for(platform or platforms[0])
    manual = _manual_cuts(operation, ctx.avals_in[0], site.axis_name, params) if site.axis_name else {}
    n_devices, obstacle = sharding.partitioning(ctx)
    if n_devices > 1 and operation.on_shards is OnShards.NOTHING:
        obstacle = obstacle or "on several devices it runs only inside a shard_map over all mesh axes"
    pairs = zip(site.names, ctx.avals_in, site.dtypes, strict=True)
    runner = Runner(
        target,
        known_target=target if len(platforms) == 1 else None,
        forced=site.implementation,
        widened={name: (a.dtype, dtype) for name, a, dtype in pairs if a.dtype != dtype},
        fused=site.fused,
        reaches_peers=(n_devices > 1 or bool(manual)) and compat.reaches_peers(ctx),
        obstacle=obstacle if manual else None,
    )
    depends = operation.depends_on_cuts(**params) and sharding.tells_what_is_whole(ctx.avals_in[0], n_devices)
    return Placement(site, runner, n_devices, obstacle, manual, depends, operation.is_reordered(**params))


@compat.without_directories()
def _lower_call(platform, ctx, *operands, site: Site, results):
    """Chooses a plan and runs it: the rule for a platform, or for each platform that has no rule of its own."""
    if (factored := site.factored) is not None:
        site, ctx, operands = _with_or_without_factor(platform, ctx, operands, site, factored)
    operation, params = site.operation, dict(site.params)
    placement = _placement(platform, ctx, site)
    # What varies over axes of a shard_map around matters to no implementation, and kernels that write in place refuse it.
    bare = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in ctx.avals_in])
    if placement.manual and operation.is_aligned:
        return _emit(functools.partial(placement.on_shard, cuts={}), bare, operands)
    runner, n_devices = placement.runner, placement.n_devices
    choice = runner.choose(operation, site.named(ctx.avals_in), n_devices, placement.obstacle, **params)
    if placement.is_partitioned(choice, ctx.avals_in):
        names_in, names_out = operation.axes(site.names, len(results), **params)
        joined = params["axes"] if operation.is_aligned else operation.joined
        function = sharding.partitioned(placement.on_shard, bare, names_in, names_out, joined, operation.is_aligned)
        return _emit(function, compat.on_mesh_that_is_set(bare), operands)

    def whole(*operands):
        # One device, too, may need the rule for shared sequences.
        is_reordered = placement.is_reordered and not choice.is_reference
        if placement.manual or placement.depends_on_cuts or is_reordered:
            return placement.on_shard(*operands, cuts={})
        return runner.run(choice, site.named(operands))

    # A reference that reshapes takes operands of no mesh; that of an aligned operation does not, and keeps their shardings.
    # Where a `shard_map` around leaves some axes automatic, collectives need the mesh of the context.
    if operation.is_aligned or (placement.manual and n_devices > 1):
        return _emit(whole, bare, operands)
    with sharding.on_no_mesh():
        return _emit(whole, ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype) for a in ctx.avals_in]), operands)


def _with_or_without_factor(platform, ctx, operands, site: Site, factored: Site):
    """Returns the site, context and operands with the factor if a kernel takes it, else without."""
    *product, source, factor = range(len(operands))
    sides = [source if name == site.operation.factor_of else index for index, name in enumerate(site.names)]

    def selected(indices):
        return ctx.replace(avals_in=[ctx.avals_in[index] for index in indices]), [operands[index] for index in indices]

    context, arrays = selected([*sides, factor])
    placement, params = _placement(platform, context, factored), dict(site.params)
    types = factored.named(context.avals_in)
    # An implementation that is forced, and takes no factor, runs on the product.
    choice = placement.runner.choose(site.operation, types, placement.n_devices, placement.obstacle, is_optional=True, **params)
    return (replace(site, factored=None), *selected(product)) if choice.is_reference else (factored, context, arrays)


def _emit(function: Callable[..., Any], ctx, operands):
    return mlir.lower_fun(function)(ctx, *operands)


# The rule for None looks at the first of its platforms alone. Kernels for a platform other than CUDA need a rule of
# that platform here.
for _platform in (None, "cuda"):
    mlir.register_lowering(_call, functools.partial(_lower_call, _platform), platform=_platform)
