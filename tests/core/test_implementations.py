"""Every implementation of every op keeps the contract of `_core.implementation`: it plans a problem, and the plan runs it."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir

import jaxsoftmax
from jaxsoftmax._core import lower, primitive
from jaxsoftmax._core import target as targets
from jaxsoftmax._core.implementation import Implementation, Plan, ReferencePlan, Refusal
from jaxsoftmax.ops import OPS
from jaxsoftmax.ops.softmax.primitive import SOFTMAX, SOFTMAX_JACOBIAN

from ..support import kernels
from . import lowered

# GPUs by the major number of the compute capability; 0 stands for a platform without generations.
GPUS = {8: "a100", 9: "h100", 10: "b200", 12: "rtx5090"}
IMPLEMENTATIONS = [
    *((op, name, generation) for op in OPS for name, own in OPS[op].kernels.items() for generation in own.generations),
    *((op, "xla", 0) for op in OPS),
]


def programs():
    """Functions of one argument, and types of the argument, that have all operations of all ops."""
    yield from ((f, argument) for _, f, argument, _ in lowered.programs())
    labels = np.zeros(lowered.LABELS.shape, lowered.LABELS.dtype)
    yield tangent_of(lambda x: jaxsoftmax.cross_entropy(x, labels)), lowered.ROWS
    yield tangent_of(lambda x: jaxsoftmax.kl_divergence(x, 2 * x)), lowered.ROWS
    yield tangent_of(lambda x: jaxsoftmax.js_divergence(x, 2 * x)), lowered.ROWS
    yield tangent_of(lambda x: jaxsoftmax.softmax_top_k(x, 4)[0]), lowered.ROWS
    linear = functools.partial(jaxsoftmax.linear_cross_entropy, reduction="sum")
    operands = {"hidden": lowered.HIDDEN, "weight": lowered.WEIGHT, "labels": lowered.LABELS}
    yield lowered.with_gradient(lambda given: linear(**given)), operands
    tokens = np.zeros(lowered.LABELS.shape, lowered.LABELS.dtype)
    policy = functools.partial(jaxsoftmax.linear_log_probs, tokens=tokens)
    operands = {"hidden": lowered.HIDDEN, "weight": lowered.WEIGHT}
    yield lowered.with_gradient(lambda given: policy(**given)), operands
    yield tangent_of(lambda hidden: policy(hidden, jnp.ones(lowered.WEIGHT.shape, hidden.dtype))), lowered.HIDDEN


def tangent_of(f):
    return lambda x: jax.jvp(f, [x], [x])[1]


@functools.cache
def problems():
    """The problems of these programs, by the name of the op. The reference runs them, so that no kernel is traced."""
    found, choose = {op: [] for op in OPS}, lower.choose

    def noted(problem, target, forced=None, obstacle=None, is_optional=False):
        del target, forced
        found[problem.operation.op.name].append(problem)
        return choose(problem, targets.CPU, None, obstacle, is_optional)

    with kernels.anew(), mock.patch.object(lower, "choose", noted):
        for f, argument in programs():
            jax.jit(f).trace(argument).lower(lowering_platforms=("cuda",))
    return found


def loaded(op, name, generation) -> tuple[Implementation, targets.Target]:
    """The implementation, and a target that it is for."""
    if name == "xla":
        return OPS[op].reference(), targets.CPU
    return OPS[op].kernels[name].generations[generation](), targets.named("test", GPUS[generation])


def test_the_problems_are_of_every_operation_of_every_op():
    """A new operation needs a program here."""
    planned = {problem.operation for own in problems().values() for problem in own}
    assert planned == set(primitive._primitives)


def test_every_generation_has_a_gpu():
    assert {generation for _, _, generation in IMPLEMENTATIONS} == {0, *GPUS}


@pytest.mark.parametrize(("op", "name", "generation"), IMPLEMENTATIONS)
def test_an_implementation_plans_each_problem_or_says_why_not(op, name, generation):
    implementation, target = loaded(op, name, generation)
    planned = 0
    with kernels.without_triton():
        for problem in problems()[op]:
            plan = implementation.plan(problem, target)
            if isinstance(plan, Refusal):
                check_refusal(plan)
                assert name != "xla", "the reference never refuses"
                plan = plan.plan
            if plan is not None:
                planned += 1
                check_plan(plan)
    assert planned


def check_refusal(refusal):
    assert refusal.reason
    assert "\n" not in refusal.reason
    assert not (refusal.lacks_kernel and refusal.plan is not None), "there is no kernel, and here is its plan"


def check_plan(plan: Plan):
    words = plan.describe()
    assert isinstance(words, str)
    assert "\n" not in words
    assert words
    assert plan.remark is None or plan.remark
    assert callable(plan.run)
    with pytest.raises(AttributeError, match="cannot assign to field"):  # it is data, which nobody changes
        plan.problem = None


@pytest.mark.parametrize(("op", "name", "generation"), [each for each in IMPLEMENTATIONS if each[2] in (0, 8, 9)])
def test_plans_give_the_results_that_the_operation_says(op, name, generation):
    """Traced, not lowered; operands that are absent need not be named."""
    implementation, target = loaded(op, name, generation)
    seen = set()
    with kernels.without_triton(), mlir.make_ir_context(), ir.Location.unknown():
        for problem in problems()[op]:
            plan = implementation.plan(problem, target)
            plan = plan.plan if isinstance(plan, Refusal) else plan
            if plan is None or problem.operation in seen:
                continue
            seen.add(problem.operation)
            results = jax.tree.leaves(jax.eval_shape(lambda operands, plan=plan: plan.run(**operands), dict(problem.operands)))
            expected = problem.operation.types(as_cast(problem), **problem.params)
            assert [(a.shape, a.dtype) for a in results] == [(a.shape, a.dtype) for a in expected], problem.operation.name
    assert seen


def as_cast(problem):
    """Types of the operands after the casts of the program."""
    return {name: a.update(dtype=problem.dtypes.get(name, a.dtype)) for name, a in problem.operands.items()}


@pytest.mark.parametrize("operation", [SOFTMAX, SOFTMAX_JACOBIAN], ids=["softmax", "softmax_jacobian"])
def test_the_reference_gets_operands_after_casts_and_knows_its_machine_if_it_asks(operation):
    first = next(iter(operation.by_name))
    x, machine = jnp.ones((2, 3), jnp.bfloat16), targets.Machine(4)
    params, dtypes = {"axes": (1,), "dtype": jnp.float32}, {first: np.dtype("float32")}
    problem = operation.problem(operation, {first: jax.typeof(x)}, params, dtypes, machine=machine)
    given = ReferencePlan(lambda **given: given, problem).run(**{first: x})
    assert given.pop(first).dtype == jnp.float32
    expected = dict.fromkeys(operation.by_name) | params | ({"machine": machine} if operation.knows_machine else {})
    assert given == {name: value for name, value in expected.items() if name != first}


def test_what_is_no_implementation_is_noticed():
    with pytest.raises(AssertionError):
        check_refusal(Refusal(""))
    with pytest.raises(AssertionError):
        check_plan(mock.Mock(remark=None, describe=lambda: ""))
