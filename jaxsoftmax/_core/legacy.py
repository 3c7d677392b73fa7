"""Plans of modules that still answer by `unsupported`, `unprofitable`, `lacks`, `merges` and `remark`."""

from dataclasses import dataclass
from typing import Any

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target


@dataclass(frozen=True)
class LegacyPlan:
    module: Any
    problem: Problem
    target: Target
    remark: str | None

    def describe(self) -> str:
        return ""

    def run(self, **operands):
        problem = self.problem
        options = {"devices": problem.devices} if problem.devices else {}
        operands = dict.fromkeys(problem.operation.by_name) | operands
        return getattr(self.module, problem.operation.name)(**operands, target=self.target, **problem.params, **options)


@dataclass(frozen=True)
class Legacy:
    module: Any

    def plan(self, problem: Problem, target: Target) -> Plan | Refusal:
        module, name, params = self.module, problem.operation.name, problem.params
        operands = dict.fromkeys(problem.operation.by_name) | dict(problem.operands)
        lacks = not hasattr(module, name) or (hasattr(module, "lacks") and module.lacks(name, operands, **params))
        if not hasattr(module, name):
            return Refusal(f"it has no kernel for {name}", lacks_kernel=True)
        if problem.devices and not (hasattr(module, "merges") and module.merges(name, target, problem.operands, **params)):
            return Refusal("it does not merge over devices")
        if (reason := module.unsupported(name, target, operands, **params)) is not None:
            return Refusal(reason, lacks_kernel=lacks)
        plan = LegacyPlan(module, problem, target, module.remark(target) if hasattr(module, "remark") else None)
        cast = frozenset(n for n, dtype in problem.dtypes.items() if problem.operands[n].dtype != dtype)
        if hasattr(module, "unprofitable"):
            reason = module.unprofitable(name, target, operands, problem.fused, cast, **params)
        return plan if reason is None else Refusal(reason, None if lacks else plan, lacks)
