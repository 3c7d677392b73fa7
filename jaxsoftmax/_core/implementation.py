"""The contract of an implementation: it plans a problem for a target, and the plan runs it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import jax

from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target


class Plan(Protocol):
    """Runs one problem on one target: data that tests can assert on without lowering anything.

    Attributes:
      remark: a caveat about the implementation on this target, in words, or None.
    """

    @property
    def remark(self) -> str | None: ...

    def describe(self) -> str:
        """Says in one line how the problem is computed: `explain` prints it."""
        ...

    def run(self, **operands: jax.Array | None) -> Any:
        """Computes the results, one array or a list of them, from operands by name; absent ones are None."""
        ...


@dataclass(frozen=True)
class Refusal:
    """Says in words why an implementation does not run a problem.

    If the reason is only that the reference should be faster, the refusal has a plan, which runs where the user asks for this
    implementation. If it `lacks_kernel`, no kernel exists for such operands on any target, and the reference runs even there.
    """

    reason: str
    plan: Plan | None = None
    lacks_kernel: bool = False


class Implementation(Protocol):
    """A module that runs the operations of an op: kernels for a GPU generation, or the reference."""

    def plan(self, problem: Problem, target: Target, /) -> Plan | Refusal:
        """Plans a problem, or says why it is not run. The reference never refuses."""
        ...


@dataclass(frozen=True)
class ReferencePlan:
    """Runs a problem by a function of `jax.numpy`, which XLA compiles."""

    function: Callable[..., Any]
    problem: Problem
    remark = None

    def describe(self) -> str:
        return "XLA"

    def run(self, **operands: jax.Array | None) -> Any:
        operation, dtypes = self.problem.operation, self.problem.dtypes
        operands = operation.multiplied(operands)
        cast = {name: a.astype(dtypes[name]) for name, a in operands.items() if a is not None and name in dtypes}
        machine = {"machine": self.problem.machine} if operation.knows_machine else {}
        return self.function(**dict.fromkeys(operation.by_name) | operands | cast, **self.problem.params, **machine)
