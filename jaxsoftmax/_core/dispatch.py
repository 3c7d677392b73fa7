"""Choice of the implementation that runs an op, with the reasons against the others.

When a primitive is lowered for a platform, `choose` walks the implementations of its op, the preferred one first, and
takes the first one that has no reason against itself. On CUDA without a GPU at hand the target is any Hopper GPU,
sm_90a.

An implementation is a module. It has a function for each primitive that it has a kernel for, with the primitive's
name. That function takes operands, parameters and `target` by name. (The reference, `xla.py`, has a function for every
primitive, and its functions take no `target`.) The module also has

    unsupported(primitive, target, operands, **params) -> str | None

which returns the reason why it cannot run a primitive on operands of these types, or None if it can. An absent operand
is None.

A module may have four more functions:

- `lacks(primitive, operands, **params)`: tells if there is no kernel for such operands at all. The reference then runs even
  where this implementation was forced.
- `unprofitable(primitive, target, operands, fused, cast, **params)`: returns the reason why the reference is expected to be
  faster, or None.
- `remark(target)`: returns a text that `explain` adds, or None.
- `merges(primitive, target, operands, **params)`: tells if the kernel takes `devices`, the mesh axes over which rows are
  sharded, and merges over them itself.

`docs/design.md` says more.
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
from jaxsoftmax._core import target as targets
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.target import Target

# op: implementation: module; the preferred implementation first, the reference last.
implementations: dict[str, dict[str, str]] = {
    "softmax": {
        "mosaic": "jaxsoftmax.ops.softmax.mosaic_sm90",
        "triton": "jaxsoftmax.ops.softmax.triton",
        "xla": "jaxsoftmax.ops.softmax.xla",
    },
    "cross_entropy": {
        "mosaic": "jaxsoftmax.ops.cross_entropy.mosaic_sm90",
        "triton": "jaxsoftmax.ops.cross_entropy.triton",
        "xla": "jaxsoftmax.ops.cross_entropy.xla",
    },
    "attention": {
        "mosaic": "jaxsoftmax.ops.attention.mosaic_sm90",
        "triton": "jaxsoftmax.ops.attention.triton",
        "xla": "jaxsoftmax.ops.attention.xla",
    },
    "top_k": {
        "mosaic": "jaxsoftmax.ops.top_k.mosaic_sm90",
        "xla": "jaxsoftmax.ops.top_k.xla",
    },
}

# Where an implementation runs at all, so that its module need not be loaded to be refused; "xla" runs anywhere.
platforms: dict[str, tuple[str, ...]] = {"mosaic": ("cuda",), "triton": ("cuda",)}

_KNOWN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Decision:
    """Names the implementation that runs one call of a primitive, with the reasons against the preferred ones.

    `explain` returns a sequence of these.

    Attributes:
      primitive: name of the primitive, such as "softmax" or "softmax_jacobian".
      operands: types of the operands that the implementation gets, such as "float32[8,128]". If the program casts an
        operand to float32, kernels get the operand before the cast.
      implementation: name of the implementation that runs: "mosaic", "triton" or "xla".
      refusals: pairs `(name, reason)`, one for each preferred implementation that does not run: it cannot run the call,
        the reference is expected to be faster, or the call names another implementation.
      remark: caveat about the implementation on this GPU, for example that its kernels were compiled for the GPU but not
        run on it. None if there is no caveat.
      gpu: description of the GPU that the call was lowered for. None on platforms other than "cuda".

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> x = jnp.ones((8, 128), jnp.float32)
      >>> decision = jaxsoftmax.explain(jaxsoftmax.softmax, x, platform="cpu")[0]
      >>> print(decision.primitive, decision.operands, decision.implementation)
      softmax ('float32[8,128]',) xla
      >>> print(decision.refusals[0])
      ('mosaic', 'it runs on cuda, not on cpu')
    """

    primitive: str
    operands: tuple[str, ...]
    implementation: str
    refusals: tuple[tuple[str, str], ...] = ()
    remark: str | None = None
    gpu: str | None = None


@dataclass(frozen=True)
class Explanation(Sequence[Decision]):
    """Holds the decisions that `explain` found: a sequence of `Decision` that prints as a table.

    Attributes:
      platform: "cpu", "cuda", "rocm" or "tpu".
      decisions: tuple of `Decision`, in the order of the ops in the program.
      gpu: description of the GPU that the function was lowered for. None on platforms other than "cuda".
      is_assumed: True if `gpu` stands for any Hopper GPU because JAX sees no GPU and the caller named none.

    Examples:
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> x = jnp.ones((8, 128), jnp.float32)
      >>> explanation = jaxsoftmax.explain(jaxsoftmax.softmax, x, gpu="h100")
      >>> print(explanation.platform, len(explanation), explanation[0].implementation)
      cuda 1 mosaic
      >>> print(explanation)
      on cuda, H100 (compute capability 9.0, 132 multiprocessors):
        softmax  float32[8,128]  -> mosaic
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
    """Reports which implementation runs each jaxsoftmax op in `f(*args, **kwargs)`, and why others do not.

    `f` is traced and lowered, never run, and the platform need not be present. Derivatives appear where `f` takes them, as
    in `explain(jax.grad(loss), x)`. An op inside a jitted function appears once, however often that function is called.
    Arrays that are sharded over explicit mesh axes appear as shards. Arrays on automatic mesh axes appear whole, because
    only the compiler knows their shards.

    Args:
      f: function of arrays that `jax.jit` can trace.
      *args: arguments of `f`: arrays or `jax.ShapeDtypeStruct` of any shape and dtype, or pytrees of them.
      platform: "cpu", "cuda" (or "gpu"), "rocm" or "tpu". None (the default) for JAX's default backend, or for "cuda" if
        `gpu` is passed.
      gpu: GPU to lower for on "cuda": "a100", "l4", "l40s", "rtx3090", "rtx4090", "h100", "h200", "gh200", "b200" or
        "rtx5090", or a compute capability such as "8.0" or `(8, 0)`. The GPU need not be present. None (the default) for
        the GPU that JAX sees. If JAX sees none, any GPU of compute capability 9.0 (Hopper) is assumed, and the table says
        so.
      **kwargs: keyword arguments of `f`. Those that hold a `jax.ShapeDtypeStruct` are traced. All others are passed as
        they are, so options such as `axis` stay concrete.

    Returns:
      `Explanation`, a sequence of `Decision` in the order of the ops, which prints as a table.

    Raises:
      TypeError: `f` is not a function, one of `args` is not an array, or `gpu` is a pair that is not made of integers.
      ValueError: `platform` or `gpu` is none of the above, or `gpu` is passed for a platform other than "cuda".
      NotImplementedError: `f` names an implementation that cannot run. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> x = jnp.ones((8, 128), jnp.float32)
      >>> print(jaxsoftmax.explain(jaxsoftmax.softmax, x, gpu="h100"))
      on cuda, H100 (compute capability 9.0, 132 multiprocessors):
        softmax  float32[8,128]  -> mosaic

      Gradients are ops of their own:

      >>> def loss(logits, labels):
      ...     return jnp.mean(jaxsoftmax.cross_entropy(logits, labels))
      >>> labels = jax.ShapeDtypeStruct((8,), jnp.int32)
      >>> decisions = jaxsoftmax.explain(jax.grad(loss), x, labels, platform="cpu")
      >>> [(decision.primitive, decision.implementation) for decision in decisions]
      [('cross_entropy', 'xla'), ('cross_entropy_vjp', 'xla')]
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
    with named, recorded(decisions):
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
def recorded(decisions: list[Decision]) -> Generator[None, None, None]:
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
    """One call of a primitive: what decides which implementation runs it, except the types of its operands.

    Attributes:
      map: what is called.
      names: of the operands that are there.
      dtypes: of those, after casts to float32.
      fused: the names of those that XLA would fuse with the reference.
      forced: the implementation that must run, or None.
      params: the parameters.
    """

    map: Operation
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
