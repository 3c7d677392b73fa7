"""Which implementation of an op runs, and why another does not.

When a primitive of an op is lowered for a platform, `choose` walks the op's implementations, the preferred first, and takes
the first that does not say why it cannot. Without the hardware at hand (ahead-of-time) the target on CUDA is Hopper, sm_90a.

An implementation is a module with a function for each primitive, of the same name and signature as the reference's in
`xla.py`, and

    unsupported(primitive, target, *avals, **params) -> str | None

which says in words why it cannot run a primitive on operands of these shapes and dtypes (None where one is absent), or
None where it can. What a forced implementation has no function for runs on the reference, as a derivative of which there is no
kernel. It may have

    lacks(primitive, *avals) -> bool

too, for a function that has no kernel for such operands at all, which is the same, and

    unprofitable(primitive, target, fused, cast, *avals, **params) -> str | None

which says why the reference is expected to be faster although the kernel can run. `fused` tells for each operand (False
where one is absent) whether XLA would compute it together with its own softmax, so that the kernel is what makes it be written
to memory and read back; `cast`, whether it was cast to float32. It is not asked where an implementation was forced.

A kernel gets the operands that are as large as the scores as they were before a cast from float16 or bfloat16 to float32: the
cast is exact, and a kernel computes in float32 anyway. Results have the dtype that the parameter `dtype` says. Such modules
load when first asked.
"""

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import jax

from jaxsoftmax._core import compat

# op: implementation: module; the preferred implementation first, the reference last.
implementations: dict[str, dict[str, str]] = {
    "softmax": {"mosaic": "jaxsoftmax.ops.softmax.mosaic", "xla": "jaxsoftmax.ops.softmax.xla"},
    "attention": {"mosaic": "jaxsoftmax.ops.attention.mosaic", "xla": "jaxsoftmax.ops.attention.xla"},
}

# Where an implementation runs at all, so that its module need not be loaded to be refused; "xla" runs anywhere.
platforms: dict[str, tuple[str, ...]] = {"mosaic": ("cuda",), "triton": ("cuda",)}

_KNOWN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Target:
    """What is lowered for: a platform, and the compute capability of its GPUs, `(9, 0)` for Hopper, on CUDA."""

    platform: str
    compute_capability: tuple[int, int] | None = None


@dataclass(frozen=True)
class Decision:
    """Which implementation runs one call of a primitive, and why the preferred ones do not.

    Attributes:
      primitive: the name of the primitive, such as `softmax` or `softmax_jacobian`.
      operands: the types of what the implementation gets, such as `float32[8,128]`; kernels get what a cast to float32 widens.
      implementation: the name of the implementation that runs.
      refusals: pairs of the name of an implementation that does not run and why: it cannot, or it would not pay.
    """

    primitive: str
    operands: tuple[str, ...]
    implementation: str
    refusals: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Explanation(Sequence[Decision]):
    """What `explain` found: a sequence of decisions that prints as a table."""

    platform: str
    decisions: tuple[Decision, ...]

    def __getitem__(self, index):
        return self.decisions[index]

    def __len__(self) -> int:
        return len(self.decisions)

    def __iter__(self) -> Iterator[Decision]:
        return iter(self.decisions)

    def __str__(self) -> str:
        if not self.decisions:
            return f"on {self.platform}: no jaxsoftmax op"
        rows = [(d.primitive, ", ".join(d.operands), d.implementation) for d in self.decisions]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [f"on {self.platform}:"]
        for decision, (name, operands, chosen) in zip(self.decisions, rows, strict=True):
            lines.append(f"  {name:{widths[0]}}  {operands:{widths[1]}}  -> {chosen}")
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
      ValueError: `platform` is none of those.
      NotImplementedError: `f` forces an implementation that cannot run.
    """
    name = jax.default_backend() if platform is None else platform
    name = {"gpu": "cuda"}.get(name, name)
    if name not in _KNOWN_PLATFORMS:
        raise ValueError(f"explain: platform must be one of {', '.join(_KNOWN_PLATFORMS)}, got {name!r}")

    def fresh(*args):  # a new function, so that no cached lowering is reused
        return f(*args, **kwargs)

    with _recorded() as decisions:
        jax.jit(fresh).trace(*args).lower(lowering_platforms=(name,))
    return Explanation(name, tuple(decisions))


_record: ContextVar[list[Decision] | None] = ContextVar("jaxsoftmax_decisions", default=None)


@contextmanager
def _recorded() -> Iterator[list[Decision]]:
    decisions: list[Decision] = []
    token = _record.set(decisions)
    try:
        yield decisions
    finally:
        _record.reset(token)


def check_implementation(op: str, function: str, name: str | None) -> None:
    """Raises ValueError in the name of the public `function` unless `name` is None or an implementation of `op`."""
    if name is not None and (not isinstance(name, str) or name not in implementations[op]):
        allowed = ", ".join(map(repr, implementations[op]))
        raise ValueError(f"{function}: implementation must be None or one of {allowed}, got {name!r}")


def choose(
    op: str,
    primitive: str,
    target: Target,
    forced: str | None,
    params: dict[str, Any],
    avals: Sequence[Any],
    narrow: Sequence[Any],
    fused: Sequence[bool],
    obstacle: str | None = None,
) -> tuple[ModuleType, Decision]:
    """The implementation that runs `primitive` of `op` on operands of types `avals`, None where one is absent.

    `narrow` are the types before casts to float32, which kernels get; `fused` says which operands XLA would fuse with the
    reference. `obstacle` is a reason, if there is one, that leaves the reference alone.

    Raises:
      NotImplementedError: `forced` names an implementation that cannot, with its reason.
    """
    refusals: list[tuple[str, str]] = []
    if forced is not None and _lacks(implementations[op][forced], primitive, avals):
        forced = "xla"
    for name, module_name in implementations[op].items():
        reason = _refusal(name, module_name, primitive, target, forced, params, avals, narrow, fused, obstacle)
        if reason is None:
            given = avals if name == "xla" else narrow
            types = tuple(f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in given if a is not None)
            return importlib.import_module(module_name), Decision(primitive, types, name, tuple(refusals))
        if name == forced:
            raise NotImplementedError(f"{op}: implementation={forced!r} cannot run {primitive}: {reason}")
        refusals.append((name, reason))
    raise AssertionError(f"no implementation of {op} runs {primitive}: {refusals}")


def _lacks(module_name, primitive, avals) -> bool:
    """Whether an implementation has no function for a primitive, or none for operands of these types whatever they are."""
    if compat.missing() is not None:
        return False  # it does not load, which is to be said
    module = importlib.import_module(module_name)
    return not hasattr(module, primitive) or (hasattr(module, "lacks") and module.lacks(primitive, *avals))


def record(decision: Decision) -> None:
    """Shows `decision` to the `explain` that is under way, if one is."""
    if (decisions := _record.get()) is not None:
        decisions.append(decision)


def _refusal(name, module_name, primitive, target, forced, params, wide, avals, fused, obstacle) -> str | None:
    if forced is not None and name != forced:
        return f"implementation={forced!r} was asked for"
    if name == "xla":
        return None
    if target.platform not in platforms.get(name, _KNOWN_PLATFORMS):
        return f"it runs on {' and '.join(platforms[name])}, not on {target.platform}"
    if obstacle is not None:
        return obstacle
    if any(not isinstance(size, int) for a in avals if a is not None for size in a.shape):
        return "shapes must be known while lowering, and these are symbolic"
    if (reason := compat.missing()) is not None:
        return reason
    if forced is None and (reason := compat.failure(importlib.import_module, module_name)) is not None:
        return reason
    module = importlib.import_module(module_name)
    reason = module.unsupported(primitive, target, *avals, **params)
    if reason is None and forced is None and hasattr(module, "unprofitable"):
        cast = tuple(a is not None and a.dtype != before.dtype for a, before in zip(wide, avals, strict=True))
        reason = module.unprofitable(primitive, target, tuple(fused), cast, *avals, **params)
    if reason is None and forced is None:
        kernel = functools.partial(getattr(module, primitive), **params)
        reason = compat.failure(compat.lower, kernel, avals, target.platform)
    return reason


def target_for(platform: str) -> Target:
    """The target of lowering for a platform: the GPU at hand, else Hopper."""
    if platform != "cuda":
        return Target(platform)
    try:
        major, minor = jax.devices("cuda")[0].compute_capability.split(".")
    except RuntimeError:
        return Target(platform, (9, 0))
    return Target(platform, (int(major), int(minor)))
