"""Which implementation of an op runs, and why another does not.

When a primitive of an op is lowered for a platform, `choose` walks the op's implementations, the preferred first, and takes
the first that does not say why it cannot. Without a GPU at hand the target on CUDA is any Hopper, sm_90a.

An implementation is a module with a function for each primitive that it has a kernel for, of its name, that takes operands,
parameters and `target` by name (the reference, `xla.py`, has all, and takes no `target`), and with

    unsupported(primitive, target, operands, **params) -> str | None

which says in words why it cannot run a primitive on operands of these types (None where one is absent), or None where it can.
It may have `lacks(primitive, operands, **params)`, whether there is no kernel for such operands at all, so that the reference
runs even where it was forced, `unprofitable(primitive, target, operands, fused, cast, **params)`, why the reference is expected
to be faster, `remark(target)`, what `explain` adds, and `merges(primitive, target, operands, **params)`, whether the kernel
takes `devices`, the mesh axes over which rows are sharded, and merges over them itself. `docs/design.md` says more.
"""

import contextlib
import functools
import importlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from jaxsoftmax._core import arguments, compat
from jaxsoftmax._core.operands import Map
from jaxsoftmax._gpu import target as targets
from jaxsoftmax._gpu.target import Target

# op: implementation: module; the preferred implementation first, the reference last.
implementations: dict[str, dict[str, str]] = {
    "softmax": {
        "mosaic": "jaxsoftmax.ops.softmax.mosaic",
        "triton": "jaxsoftmax.ops.softmax.triton",
        "xla": "jaxsoftmax.ops.softmax.xla",
    },
    "cross_entropy": {
        "mosaic": "jaxsoftmax.ops.cross_entropy.mosaic",
        "triton": "jaxsoftmax.ops.cross_entropy.triton",
        "xla": "jaxsoftmax.ops.cross_entropy.xla",
    },
    "attention": {
        "mosaic": "jaxsoftmax.ops.attention.mosaic",
        "triton": "jaxsoftmax.ops.attention.triton",
        "xla": "jaxsoftmax.ops.attention.xla",
    },
    "top_k": {
        "mosaic": "jaxsoftmax.ops.top_k.mosaic",
        "xla": "jaxsoftmax.ops.top_k.xla",
    },
}

# Where an implementation runs at all, so that its module need not be loaded to be refused; "xla" runs anywhere.
platforms: dict[str, tuple[str, ...]] = {"mosaic": ("cuda",), "triton": ("cuda",)}

_KNOWN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Decision:
    """Which implementation runs one call of a primitive, and why the preferred ones do not.

    Attributes:
      primitive: the name of the primitive, such as `softmax` or `softmax_jacobian`.
      operands: the types of what the implementation gets, such as `float32[8,128]`; kernels get what a cast to float32 widens.
      implementation: the name of the implementation that runs.
      refusals: pairs of the name of an implementation that does not run and why: it cannot, or it would not pay.
      remark: a caveat about the implementation on this GPU, such as that its kernels were only compiled for it, or None.
      gpu: the GPU that was lowered for, in words; None on other platforms than CUDA.
    """

    primitive: str
    operands: tuple[str, ...]
    implementation: str
    refusals: tuple[tuple[str, str], ...] = ()
    remark: str | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class Explanation(Sequence[Decision]):
    """The decisions that `explain` found: a sequence that prints as a table.

    Attributes:
      platform: "cpu", "cuda", "rocm" or "tpu".
      decisions: in the order of the ops.
      gpu: the GPU that was lowered for, in words; None on other platforms than CUDA.
      is_assumed: whether that is any Hopper because JAX sees no GPU and none was named.
    """

    platform: str
    decisions: tuple[Decision, ...]
    gpu: str | None = None
    is_assumed: bool = False

    def __getitem__(self, index):
        return self.decisions[index]

    def __len__(self) -> int:
        return len(self.decisions)

    def __str__(self) -> str:
        where = self.platform if self.gpu is None else f"{self.platform}, {self.gpu}"
        if self.is_assumed:
            where += ", assumed as JAX sees none; gpu= names another"
        if not self.decisions:
            return f"on {where}: no jaxsoftmax op"
        rows = [(d.primitive, ", ".join(d.operands), d.implementation) for d in self.decisions]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"on {where}:"]
        for decision, (name, operands, chosen) in zip(self.decisions, rows, strict=True):
            lines.append(f"  {name:{widths[0]}}  {operands:{widths[1]}}  -> {chosen}")
            lines += [f"      {chosen}: {decision.remark}"] if decision.remark else []
            lines += [f"      not {refused}: {reason}" for refused, reason in decision.refusals]
        return "\n".join(lines)

    __repr__ = __str__


def explain(
    f: Callable[..., Any],
    *args: Any,
    platform: str | None = None,
    gpu: str | tuple[int, int] | None = None,
    **kwargs: Any,
) -> Explanation:
    """Says which implementation runs each jaxsoftmax op in `f(*args, **kwargs)`, and why others do not.

    `f` is traced and lowered, never run. Derivatives show where `f` takes them, as in `explain(jax.grad(loss), x)`. An op that
    a jitted function inside `f` holds shows once, however often that is called. Arrays that are sharded over explicit mesh
    axes show as shards, those on automatic ones, which only the compiler knows, whole.

    Args:
      f: a function of arrays that can be jitted.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s of any shapes and dtypes.
      platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; it need not be there. The default is JAX's default backend, or
        "cuda" with `gpu`.
      gpu: for "cuda", which GPU it is, there or not: "a100", "l4", "l40s", "rtx3090", "rtx4090", "h100", "h200", "gh200",
        "b200" or "rtx5090", or a compute capability such as "8.0" or `(8, 0)`. None for the GPU that JAX sees, and where it
        sees none for any GPU of compute capability 9.0 (Hopper), which the table then says.
      **kwargs: more arguments of `f`. Options such as `axis` are not traced, those with a `jax.ShapeDtypeStruct` are.

    Returns:
      A sequence of `Decision`s, in the order of the ops, that prints as a table.

    Raises:
      TypeError: `f` is no function, or an argument of it no array.
      ValueError: `platform` or `gpu` is none of those, or `gpu` is given for another platform than "cuda".
      NotImplementedError: `f` forces an implementation that cannot run.
    """
    arguments.callback("explain", "f", f)
    for index, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            arguments.check_traceable("explain", f"args[{index}]", leaf)
    name = platform if platform is not None else jax.default_backend() if gpu is None else "cuda"
    if not isinstance(name, str) or name not in (*_KNOWN_PLATFORMS, "gpu"):
        raise ValueError(f"explain: platform must be one of {', '.join(_KNOWN_PLATFORMS)}, got {arguments.shown(name)}")
    name = "cuda" if name == "gpu" else name
    if gpu is not None and name != "cuda":
        raise ValueError(f"explain: gpu must be None on platform {name}, got {arguments.shown(gpu)}")

    types = {key: value for key, value in kwargs.items() if _is_type(value)}
    decisions: list[Decision] = []
    named = contextlib.nullcontext() if gpu is None else targets.lowering_for(targets.named("explain", gpu))
    with named, _recorded(decisions):
        # A new function, so that no cached lowering is reused.
        traced = jax.jit(lambda args, types: f(*args, **kwargs | types)).trace(args, types)
        traced.lower(lowering_platforms=(name,))
        target = targets.target_for(name)
    described = str(target) if name == "cuda" else None
    return Explanation(name, tuple(decisions), described, gpu is None and target.name is None and name == "cuda")


def _is_type(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


_record: ContextVar[list[Decision] | None] = ContextVar("jaxsoftmax_decisions", default=None)


@contextlib.contextmanager
def _recorded(decisions: list[Decision]) -> Generator[None, None, None]:
    """A context in which `record` appends to `decisions`."""
    token = _record.set(decisions)
    try:
        yield
    finally:
        _record.reset(token)


def check_implementation(op: str, function: str, name: str | None) -> None:
    """Raises ValueError in the name of the public `function` unless `name` is None or an implementation of `op`."""
    if name is not None and (not isinstance(name, str) or name not in implementations[op]):
        allowed = ", ".join(map(repr, implementations[op]))
        raise ValueError(f"{function}: implementation must be None or one of {allowed}, got {name!r}")


@dataclass(frozen=True)
class Call:
    """One call of a primitive: what decides which implementation runs it, but for the types of its operands.

    Attributes:
      map: what is called.
      names: of the operands that are there.
      dtypes: of those, after casts to float32.
      fused: the names of those that XLA would fuse with the reference.
      forced: the implementation that must run, or None.
      params: the parameters.
    """

    map: Map
    names: tuple[str, ...]
    dtypes: tuple[Any, ...]
    fused: frozenset[str]
    forced: str | None
    params: dict[str, Any]


def choose(call: Call, target: Target, types: Sequence[Any], obstacle: str | None = None) -> Decision:
    """Which implementation runs `call` on operands of these types, which are those before casts to float32.

    `obstacle` is a reason, if there is one, that leaves the reference alone.

    Raises:
      NotImplementedError: `call.forced` names an implementation that cannot, with its reason.
    """
    refusals: list[tuple[str, str]] = []
    name = call.map.name
    wide = [kind.update(dtype=dtype) for kind, dtype in zip(types, call.dtypes, strict=True)]
    operands = dict.fromkeys(call.map.by_name) | dict(zip(call.names, types, strict=True))
    forced = call.forced
    if forced is not None and _lacks(call, forced, operands):
        forced = "xla"
    for implementation in implementations[call.map.op]:
        reason = _refusal(implementation, forced, call, target, operands, obstacle)
        if reason is None:
            given = wide if implementation == "xla" else types
            shown = tuple([f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in given])
            module = importlib.import_module(implementations[call.map.op][implementation])
            remark = module.remark(target) if hasattr(module, "remark") else None
            gpu = None if target.compute_capability is None else str(target)
            return Decision(name, shown, implementation, tuple(refusals), remark, gpu)
        if implementation == forced:
            raise NotImplementedError(f"{name}: implementation={forced!r} cannot run: {reason}")
        refusals.append((implementation, reason))
    raise AssertionError(f"no implementation runs {name}: {refusals}")


def _refusal(name, forced, call: Call, target, operands, obstacle) -> str | None:
    """Why an implementation does not run a call, or None if it does."""
    if forced is not None and name != forced:
        return f"implementation={forced!r} was asked for"
    if name == "xla":
        return None
    if target.platform not in platforms.get(name, _KNOWN_PLATFORMS):
        return f"it runs on {' and '.join(platforms[name])}, not on {target.platform}"
    if obstacle is not None:
        return obstacle
    if any(not isinstance(size, int) for a in operands.values() if a is not None for size in a.shape):
        return "shapes must be known while lowering, and these are symbolic"
    if (reason := compat.missing()) is not None:
        return reason
    module_name, primitive = implementations[call.map.op][name], call.map.name
    is_guarded = forced is None and not compat.is_tested()
    if is_guarded and (reason := compat.failure(importlib.import_module, module_name)) is not None:
        return reason
    module = importlib.import_module(module_name)
    if not hasattr(module, primitive):
        return f"it has no kernel for {primitive}"
    reason = module.unsupported(primitive, target, operands, **call.params)
    if reason is None and forced is None and hasattr(module, "unprofitable"):
        cast = frozenset([n for n, dtype in zip(call.names, call.dtypes, strict=True) if operands[n].dtype != dtype])
        reason = module.unprofitable(primitive, target, operands, call.fused, cast, **call.params)
    if reason is None and is_guarded:
        kernel = functools.partial(getattr(module, primitive), target=target, **call.params)
        reason = compat.failure(compat.lower, kernel, operands, target.platform)
    return reason


def _lacks(call: Call, implementation: str, operands) -> bool:
    """Returns whether an implementation has no function for a primitive, or none for operands of these types."""
    if implementation == "xla" or compat.missing() is not None:
        return False  # the reference has all; without the names its module does not load, which is to be said
    module, primitive = importlib.import_module(implementations[call.map.op][implementation]), call.map.name
    return not hasattr(module, primitive) or (hasattr(module, "lacks") and module.lacks(primitive, operands, **call.params))


def record(decision: Decision) -> None:
    """Shows `decision` to the `explain` that is under way, if one is."""
    if (decisions := _record.get()) is not None:
        decisions.append(decision)
