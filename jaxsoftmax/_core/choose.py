"""Choice of the implementation that runs an operation, with the reasons against the others, and `explain`, which shows both.

While a primitive is lowered, `choose` asks the implementations of its op for a plan, the preferred one first, and takes the
first plan. The reference comes last and never refuses. Without a GPU at hand the target is any Hopper GPU, sm_90a.
"""

import contextlib
from collections.abc import Callable, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import jax

from jaxsoftmax._core import arguments, compat
from jaxsoftmax._core import target as targets
from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.operation import Kernels, Op
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target

_KNOWN_PLATFORMS = ("cpu", "cuda", "rocm", "tpu")


@dataclass(frozen=True)
class Decision:
    """Names the implementation that runs one call of a primitive, with the reasons against the preferred ones.

    `explain` returns a sequence of these.

    Attributes:
      primitive: name of the primitive, such as "softmax" or "softmax_jacobian".
      operands: types of the operands that the implementation gets, such as "float32[8,128]". If the program casts an
        operand to float32, or multiplies or divides it by a number for each row, kernels may get the operand before that.
      implementation: name of the implementation that runs: "mosaic", "triton" or "xla".
      plan: description of how it runs, in words that may change: for a kernel of rows where rows are held, threads, and blocks
        of a cluster; for one of attention tiles, stages and warpgroups. "XLA" for the reference.
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
    plan: str = ""
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
            mosaic: 8 rows a block, 32 lanes a row, in registers
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
            lines += [f"      {chosen}: {decision.plan}"] if chosen != "xla" else []
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
            mosaic: 8 rows a block, 32 lanes a row, in registers

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
    """Appends to `decisions`, inside the context, every choice whose plan runs."""
    token = _record.set(decisions)
    try:
        yield
    finally:
        _record.reset(token)


def check_implementation(op: Op, function: str, name: str | None) -> None:
    """Raises ValueError in the name of the public `function` unless `name` is None or an implementation of `op`."""
    if name is not None and (not isinstance(name, str) or name not in op.implementations):
        allowed = ", ".join(map(repr, op.implementations))
        raise ValueError(f"{function}: implementation must be None or one of {allowed}, got {name!r}")


@dataclass(frozen=True)
class Choice:
    """The plan that runs a problem."""

    problem: Problem
    plan: Plan
    implementation: str  # name of the one whose plan it is
    refusals: tuple[tuple[str, str], ...]  # pairs `(name, reason)`, one for each preferred implementation that does not run
    target: Target

    @property
    def is_reference(self) -> bool:
        return self.implementation == "xla"

    def decision(self) -> Decision:
        """Returns what `explain` shows of this choice."""
        by_name = self.problem.operation.by_name
        operands = {key: a for key, a in self.problem.operands.items() if key in by_name}  # not what one step hands to the next
        if self.is_reference:
            operands = {key: a.update(dtype=self.problem.dtypes.get(key, a.dtype)) for key, a in operands.items()}
        shown = tuple([f"{a.dtype.name}[{','.join(map(str, a.shape))}]" for a in operands.values()])
        gpu = None if self.target.compute_capability is None else str(self.target)
        name, plan = self.problem.operation.name, self.plan
        return Decision(name, shown, self.implementation, plan.describe(), self.refusals, plan.remark, gpu)


def record(choice: Choice) -> None:
    """Shows a choice to the `explain` that is under way, if one is."""
    if (decisions := _record.get()) is not None:
        decisions.append(choice.decision())


def choose(
    problem: Problem, target: Target, forced: str | None = None, obstacle: str | None = None, is_optional: bool = False
) -> Choice:
    """Chooses the first implementation of the op that does not refuse the problem, the preferred one first.

    Args:
      problem: the problem.
      target: the platform and GPU that the program is lowered for.
      forced: name of the implementation that must run, or None.
      obstacle: a reason that leaves all problems to the reference, or None.
      is_optional: True to choose the reference where the implementation `forced` cannot run the problem.

    Raises:
      NotImplementedError: the implementation `forced` cannot run the problem. The message gives its reason.
    """
    operation, refusals = problem.operation, []
    plan: Plan | Refusal
    for name, kernels in operation.op.kernels.items():
        if forced not in (None, name):
            refusals.append((name, f"implementation={forced!r} was asked for"))
            continue
        plan = _plan(name, kernels, problem, target, obstacle, is_forced=name == forced)
        if isinstance(plan, Refusal) and forced is not None and plan.plan is not None:
            plan = plan.plan
        if not isinstance(plan, Refusal):
            return Choice(problem, plan, name, tuple(refusals), target)
        if name == forced and not (plan.lacks_kernel or is_optional):
            raise NotImplementedError(f"{operation.name}: implementation={forced!r} cannot run: {plan.reason}")
        refusals.append((name, plan.reason))
    reference: Plan = operation.op.reference().plan(problem, target)
    return Choice(problem, reference, "xla", tuple(refusals), target)


def _plan(
    name: str, kernels: Kernels, problem: Problem, target: Target, obstacle: str | None, is_forced: bool
) -> Plan | Refusal:
    """Asks an implementation for its plan, or refuses for it where its module need not load."""
    if target.platform not in kernels.platforms:
        return Refusal(f"it runs on {' and '.join(kernels.platforms)}, not on {target.platform}")
    if obstacle is not None:
        return Refusal(obstacle)
    if problem.is_product and not kernels.takes_factor:
        return Refusal("it multiplies its operand by no factor")
    if problem.is_symbolic:
        return Refusal("shapes must be known while lowering, and these are symbolic")
    if (reason := compat.missing()) is not None:
        return Refusal(reason)
    generation = 0 if target.compute_capability is None else target.compute_capability[0]
    if (load := kernels.generations.get(generation)) is None:
        served = " or ".join(f"{major}.x" for major in kernels.generations)
        return Refusal(f"it needs compute capability {served}, got {target.platform} {target.compute_capability}")
    is_guarded = not is_forced and not compat.is_tested()
    if is_guarded and (reason := compat.failure(load)) is not None:
        return Refusal(reason)
    plan = load().plan(problem, target)
    if is_guarded and not isinstance(plan, Refusal):
        operands = dict.fromkeys(problem.operation.by_name) | dict(problem.operands)
        if (reason := compat.failure(compat.lower, plan.run, operands, target.platform)) is not None:
            return Refusal(reason)
    return plan
