"""Which implementation of an op runs, and why another does not.

When a primitive of an op is lowered for a platform, `choose` walks the op's implementations, the preferred first, and takes
the first that does not say why it cannot. Without the hardware at hand (ahead-of-time) the target on CUDA is Hopper, sm_90a.

An implementation is a module with a function for each primitive that it has a kernel for, of its name, that takes operands,
parameters and `target` by name (the reference, `xla.py`, has all, and takes no `target`), and with

    unsupported(primitive, target, operands, **params) -> str | None

which says in words why it cannot run a primitive on operands of these types (None where one is absent), or None where it can.
It may have `lacks(primitive, operands, **params)`, whether there is no kernel for such operands at all, so that the reference
runs even where it was forced, `unprofitable(primitive, target, operands, fused, cast, **params)`, why the reference is expected
to be faster, `remark(target)`, what `explain` adds, and `merges(primitive, target, operands, **params)`, whether the kernel
takes `devices`, the mesh axes over which rows are sharded, and merges over them itself. `docs/design.md` says more.
"""

import functools
import importlib
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from jaxsoftmax._core import arguments, compat
from jaxsoftmax._core.operands import Map
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
    """

    primitive: str
    operands: tuple[str, ...]
    implementation: str
    refusals: tuple[tuple[str, str], ...] = ()
    remark: str | None = None


@dataclass(frozen=True)
class Explanation(Sequence[Decision]):
    """What `explain` found: a sequence of decisions that prints as a table."""

    platform: str
    decisions: tuple[Decision, ...]

    def __getitem__(self, index):
        return self.decisions[index]

    def __len__(self) -> int:
        return len(self.decisions)

    def __str__(self) -> str:
        if not self.decisions:
            return f"on {self.platform}: no jaxsoftmax op"
        rows = [(d.primitive, ", ".join(d.operands), d.implementation) for d in self.decisions]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"on {self.platform}:"]
        for decision, (name, operands, chosen) in zip(self.decisions, rows, strict=True):
            lines.append(f"  {name:{widths[0]}}  {operands:{widths[1]}}  -> {chosen}")
            lines += [f"      {chosen}: {decision.remark}"] if decision.remark else []
            lines += [f"      not {refused}: {reason}" for refused, reason in decision.refusals]
        return "\n".join(lines)

    __repr__ = __str__


def explain(f: Callable[..., Any], *args: Any, platform: str | None = None, **kwargs: Any) -> Explanation:
    """Which implementation runs each jaxsoftmax op in `f(*args, **kwargs)`, and why others do not.

    `f` is traced and lowered, never run. Derivatives show where `f` takes them, as in `explain(jax.grad(loss), x)`. An op that
    a jitted function inside `f` holds shows once, however often that is called. Arrays that are sharded over explicit mesh
    axes show as shards, those on automatic ones, which only the compiler knows, whole.

    Args:
      f: a function of arrays that can be jitted.
      *args: its arguments, arrays or `jax.ShapeDtypeStruct`s of any shapes and dtypes.
      platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu"; it need not be there. The default is JAX's default backend.
      **kwargs: more arguments of `f`, which are not traced: options such as `axis`.

    Returns:
      A sequence of `Decision`s, in the order of the ops, that prints as a table.

    Raises:
      TypeError: `f` is no function, or an argument of it no array.
      ValueError: `platform` is none of those.
      NotImplementedError: `f` forces an implementation that cannot run.
    """
    arguments.callback("explain", "f", f)
    for index, arg in enumerate(args):
        for leaf in jax.tree.leaves(arg):
            arguments.check_traceable("explain", f"args[{index}]", leaf)
    name = jax.default_backend() if platform is None else platform
    if not isinstance(name, str) or name not in (*_KNOWN_PLATFORMS, "gpu"):
        raise ValueError(f"explain: platform must be one of {', '.join(_KNOWN_PLATFORMS)}, got {arguments.shown(name)}")
    name = "cuda" if name == "gpu" else name

    decisions: list[Decision] = []
    token = _record.set(decisions)
    try:  # a new function, so that no cached lowering is reused
        jax.jit(lambda *args: f(*args, **kwargs)).trace(*args).lower(lowering_platforms=(name,))
    finally:
        _record.reset(token)
    return Explanation(name, tuple(decisions))


_record: ContextVar[list[Decision] | None] = ContextVar("jaxsoftmax_decisions", default=None)


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
            return Decision(name, shown, implementation, tuple(refusals), remark)
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
