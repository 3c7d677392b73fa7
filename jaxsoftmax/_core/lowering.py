"""How a primitive is lowered: what produces its operands, which implementation runs, on one device or on shards.

Two steps, as JAX caches lowering rules, and a rule that it caches does not see what produces its operands. The first, which is
not cached, looks at that and binds `_call`. The rule of that, which JAX caches, chooses the implementation and traces it in
place, so equal calls lower their kernel once. It has a version for CUDA, which a rule that is not cached must not have.
"""

import contextlib
import functools
import importlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax._core import compat, dispatch, fusion, sharding
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.target import Machine, Target, target_for

_call = Primitive("jaxsoftmax")
_call.multiple_results = True
_call.def_abstract_eval(lambda *operands, results, **params: list(results))


def register(this: Operation, primitive: Primitive) -> None:
    """Gives a primitive of a map its lowering rule."""
    mlir.register_lowering(primitive, functools.partial(_lower, this), cacheable=False)


def require_devices(this: Operation, primitive: Primitive) -> None:
    """Makes devices known while a primitive is lowered that runs on shards: where XLA cuts its operands, it asks back."""
    if len(dispatch.implementations[this.op]) > 1:
        compat.require_devices(primitive)


def on_reference(
    this: Operation, operands: dict[str, Any], results: Sequence[Any], *, implementation=None, axis_name=(), **params
) -> list[Any]:
    """A map as its reference computes it, on shards where types say how operands and results are sharded."""
    del implementation
    names = [name for name, operand in operands.items() if operand is not None]
    given = [operands[name] for name in names]

    types = [jax.typeof(operand) for operand in given]
    manual = _manual_cut(this, types[0], axis_name, **params)

    def run(*given, over=None, **options):
        operands, over = dict(zip(names, given, strict=True)), (over or {}) | manual
        if over:
            return _merged(this, _Reference(), operands, over, is_manual=bool(manual), **params)
        return _Reference()(this, operands, **params, **options)

    if this.is_aligned:
        return run(*given)
    if not any(map(sharding.has_explicit_axes, types)):
        return run(*given, **({"machine": Machine(types[0].sharding.mesh.size)} if this.knows_machine else {}))
    names_in, names_out = this.axes(names, len(results), **params)
    mapped = sharding.on_explicit_axes(run, types, results, names_in, names_out, this.joined)
    if sharding.explicit_mesh(types) is None:  # outside of jit JAX takes automatic axes for manual ones (0.11, 0.12)
        mapped = jax.jit(mapped)
    return list(map(sharding.placing, mapped(*given)))


def _joined(this: Operation, params) -> Sequence[Any]:
    """The names of the axes along which devices merge what they have."""
    return params["axes"] if this.is_aligned else this.joined


def _manual_cut(this: Operation, kind: Any, axis_name: tuple[str, ...], **params) -> dict[Any, sharding.Cut]:
    """How what is joined is sharded over axes of a `shard_map` around it: evenly, as in the first operand, of this type."""
    if not axis_name:
        return {}
    names = this.by_name[next(iter(this.by_name))].axes
    joined = {axis: axis for axis in params.get("axes", ())[-1:]}
    if not this.is_aligned:
        joined = {name: names.index(name) - len(names) if name in names else None for name in this.joined}
    return {name: sharding.Cut.of_part(axis_name, 0 if at is None else kind.shape[at]) for name, at in joined.items()}


@dataclass(frozen=True)
class Run:
    """Runs maps of an op where one of its calls is lowered: on the implementations that are chosen for their operands.

    Attributes:
      target: what is lowered for.
      known_target: the target if the program is for no other platform, for references; else None.
      forced: the implementation that must run, or None.
      widened: the dtypes of operands before and after casts to float32, by name: the reference gets them after those.
      fused: the names of those that XLA would fuse with the reference.
      reaches_peers: whether a kernel may store to the memory of the other devices.
      obstacle: a reason that leaves all to the reference, or None.
    """

    target: Target
    known_target: Target | None
    forced: str | None
    widened: dict[str, tuple[Any, Any]]
    fused: frozenset[str]
    reaches_peers: bool
    obstacle: str | None = None

    def choose(self, this: Operation, types, obstacle: str | None = None, **params) -> tuple[dispatch.Call, dispatch.Decision]:
        """The call of a map, on operands of these types by name, and which implementation runs it."""
        wide = [
            self.widened[n][1] if n in self.widened and self.widened[n][0] == a.dtype else a.dtype for n, a in types.items()
        ]
        call = dispatch.Call(this, tuple(types), tuple(wide), self.fused & set(types), self.forced, params)
        return call, dispatch.choose(call, self.target, list(types.values()), obstacle or self.obstacle)

    def __call__(self, this: Operation, operands, chosen=None, devices=1, **params) -> list[Any]:
        """The results of a map on operands by name; None is absent. `devices` may share what is left to XLA."""
        operands = _present(operands)
        call, decision = chosen or self.choose(this, _types_of(operands), **params)
        if decision.implementation == "xla":
            operands = {name: a.astype(dtype) for (name, a), dtype in zip(operands.items(), call.dtypes, strict=True)}
            options = {"machine": Machine(devices, self.known_target)} if this.knows_machine else {}
        else:
            options = {"target": self.target}
        return self._run(this, operands, decision, **params, **options)

    def together(self, this: Operation, operands, over, **params) -> list[Any]:
        """The results of a map of rows that devices share, of a kernel that merges over them itself; none if there is none."""
        if not (self.reaches_peers and compat.is_tested()):
            return []
        operands = _present(operands)
        _, decision = self.choose(this, types := _types_of(operands), **params)
        module = _module(this, decision.implementation)
        if not (hasattr(module, "merges") and module.merges(this.name, self.target, types, **params)):
            return []
        devices = tuple((axis, lax.axis_size(axis)) for cut in over.values() for axis in cut.over)
        return self._run(this, operands, decision, target=self.target, devices=devices, **params)

    def unless(self, reason: str | None) -> "Run":
        """This run, on the reference alone if there is a reason for it and no implementation was forced."""
        return self if reason is None or self.forced is not None else replace(self, obstacle=self.obstacle or reason)

    def on_reference(self, this: Operation, operands, reason: str, **params) -> list[Any]:
        """The results of a map by the reference, whatever was forced; `explain` gives the reason."""
        return replace(self, forced=None, obstacle=self.obstacle or reason)(this, operands, **params)

    def _run(self, this, operands, decision, **params):
        dispatch.record(decision)
        if decision.implementation == "mosaic":
            compat.infer_layouts_sooner()
        function = getattr(_module(this, decision.implementation), this.name)
        return jax.tree.leaves(function(**dict.fromkeys(this.by_name) | operands, **params))


class _Reference:
    """A `Run` on the reference alone."""

    def __call__(self, this: Operation, operands, **params) -> list[Any]:
        return jax.tree.leaves(getattr(_module(this, "xla"), this.name)(**dict.fromkeys(this.by_name) | operands, **params))

    def together(self, this: Operation, operands, over, **params) -> list[Any]:
        del this, operands, over, params
        return []

    def unless(self, reason: str | None) -> "_Reference":
        del reason
        return self

    def on_reference(self, this: Operation, operands, reason: str, **params) -> list[Any]:
        del reason
        return self(this, operands, **params)


def _module(this: Operation, implementation: str) -> Any:
    return importlib.import_module(dispatch.implementations[this.op][implementation])


def _present(operands):
    return {name: operand for name, operand in operands.items() if operand is not None}


def _types_of(operands):
    return {name: jax.typeof(operand) for name, operand in operands.items()}


def _merged(this: Operation, run, operands: dict[str, Any], over, is_manual: bool = False, **params) -> list[Any]:
    """A map over devices that share its rows, by what `run` gives of each device's part."""
    function = getattr(importlib.import_module(f"jaxsoftmax.ops.{this.op}.across_devices"), this.name)
    options = {} if this.is_aligned else {"is_manual": is_manual}
    return jax.tree.leaves(function(run, **dict.fromkeys(this.by_name) | operands, over=over, **params, **options))


def _lower(this: Operation, ctx, *operands, names, **params):
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
    with sharding.on_mesh_of(avals):
        return mlir.lower_fun(bound)(ctx.replace(avals_in=avals), *sources)


@compat.without_directories()
def _lower_call(platform, ctx, *operands, this, names, dtypes, fused, results, implementation, axis_name=(), **params):
    """The rule for a platform, or for each that has no rule of its own, which chooses the implementation.

    `dtypes` are those after casts to float32, of which the reference gets the operands. `axis_name` are the mesh axes of a
    `shard_map` around over which rows are sharded.
    """
    target = target_for(platform or compat.platforms(ctx)[0])
    widened = {name: (a.dtype, dtype) for name, a, dtype in zip(names, ctx.avals_in, dtypes, strict=True) if a.dtype != dtype}

    def on_shard(*operands, over):
        given, over = dict(zip(names, operands, strict=True)), over | manual
        if over or is_judged or params.get("zigzag") is not None:
            unknown = {} if over or is_judged else {"strategy": None}
            with compat.unchecked() if manual else contextlib.nullcontext():
                return _merged(this, run, given, over, is_manual=bool(manual), **params | unknown)
        return run(this, given, **params)

    manual = _manual_cut(this, ctx.avals_in[0], axis_name, **params)
    devices, obstacle = sharding.partitioning(ctx)
    # Where it is known how a sequence is sharded, `across_devices` refuses to share one that is whole.
    is_judged = params.get("strategy") is not None and sharding.tells_what_is_whole(ctx.avals_in[0], devices)
    if devices > 1 and this.is_uncut:
        obstacle = obstacle or "on several devices it runs only inside a shard_map over all mesh axes"
    is_shared = devices > 1 or bool(manual)
    known_target = target if len(compat.platforms(ctx)) == 1 else None
    reaches_peers = is_shared and compat.reaches_peers(ctx)
    run = Run(target, known_target, implementation, widened, fused, reaches_peers, obstacle if manual else None)
    # What varies over axes of a shard_map around matters to no implementation, and kernels that write in place refuse it.
    bare = ctx.replace(avals_in=[jax.core.ShapedArray(a.shape, a.dtype, sharding=a.sharding) for a in ctx.avals_in])
    if manual and this.is_aligned:
        return mlir.lower_fun(functools.partial(on_shard, over={}))(bare, *operands)
    chosen = run.choose(this, dict(zip(names, ctx.avals_in, strict=True)), obstacle, **params)
    is_kernel = chosen[1].implementation != "xla"
    is_partitioned = devices > 1 and (is_kernel or (this.is_cut and obstacle is None))
    if devices > 1 and not this.is_aligned:  # types that say how arrays are sharded are in the way of a reference that reshapes
        is_partitioned |= sharding.explicit_mesh(ctx.avals_in) is not None
    if is_partitioned:
        names_in, names_out = this.axes(names, len(results), **params)
        joined = _joined(this, params)
        function = sharding.partitioned(on_shard, bare, names_in, names_out, joined, is_aligned=this.is_aligned)
        return mlir.lower_fun(function)(compat.on_mesh_that_is_set(bare), *operands)

    def whole(*operands):
        if manual or is_judged or (is_kernel and params.get("zigzag") is not None):  # kernels do not know the order of tokens
            return on_shard(*operands, over={})
        return run(this, dict(zip(names, operands, strict=True)), chosen, devices, **params)

    if this.is_aligned or (manual and devices > 1):
        return mlir.lower_fun(whole)(bare, *operands)
    with sharding.on_no_mesh():
        avals = [jax.core.ShapedArray(aval.shape, aval.dtype) for aval in ctx.avals_in]
        return mlir.lower_fun(whole)(ctx.replace(avals_in=avals), *operands)


for _platform in (None, "cuda"):
    mlir.register_lowering(_call, functools.partial(_lower_call, _platform), platform=_platform)
