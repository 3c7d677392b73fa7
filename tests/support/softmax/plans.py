"""Problems of the softmax family on Hopper, from shapes and dtypes alone, and their plans."""

import contextlib
import functools
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER, Target
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.plans_sm90 import plan_rows
from jaxsoftmax.ops.softmax import mosaic_sm90 as mosaic
from jaxsoftmax.ops.softmax import primitive
from jaxsoftmax.ops.softmax.problem import SoftmaxProblem

from .. import kernels

OPERATIONS = (
    "softmax",
    "softmax_jacobian",
    "log_softmax",
    "log_softmax_jvp",
    "log_softmax_vjp",
    "logsumexp",
    "logsumexp_jvp",
    "logsumexp_vjp",
)
STATEFUL = ("log_softmax", "logsumexp")  # kernels that may return the state of each row
MASKABLE = tuple(name for name in OPERATIONS if name != "softmax_jacobian")
NARROW = {4: "float32", 2: "bfloat16"}  # dtypes by bytes of an element


def kernel_of(name: str) -> str:
    """Returns the name of an operation's kernel in programs."""
    return f"{name}_forward_mosaic" if name in ("softmax", *STATEFUL) else f"{name}_mosaic"


def operands_of(name: str, shape, dtype, *, axes=None, mask=None, scale=None, t="float32") -> dict[str, Any]:
    """Returns types of the operands of an operation by name; `t` is the dtype of a tangent or a cotangent."""
    axes = (len(shape) - 1,) if axes is None else axes
    row = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    sizes = {"m": row, "d": row, "t": row if name == "logsumexp_vjp" else shape, "where": mask, "scale": scale}
    dtypes = {"m": "float32", "d": "float32", "t": t, "where": "bool", "scale": "float32"}
    names = [operand.name for operand in operation_of(name).operands if sizes.get(operand.name, shape) is not None]
    return {own: jax.ShapeDtypeStruct(sizes.get(own, shape), dtypes.get(own, dtype)) for own in names}


def operation_of(name: str):
    return getattr(primitive, name.upper())


def problem_of(name: str, operands: Mapping[str, Any], *, axes=None, dtype=None, devices=(), **params) -> SoftmaxProblem:
    """Returns the problem of an operation for operands of these types, with rows along the last axis if `axes` is None."""
    first, *_ = operands.values()
    params |= {"axes": (len(first.shape) - 1,) if axes is None else axes, "dtype": jnp.dtype(dtype or first.dtype)}
    params |= {"return_state": params.get("return_state", False)} if name in STATEFUL else {}
    params |= {"scale_tangent": params.get("scale_tangent", False)} if "m" in operands else {}
    operation = operation_of(name)
    return operation.problem(operation, dict(operands), params, devices=devices)


def plan_of(problem: SoftmaxProblem, target: Target = HOPPER) -> mosaic.SoftmaxPlan | Refusal:
    """Plans a problem as if the user had asked for the kernel: also where the reference should be faster."""
    plan = mosaic.plan(problem, target)
    return plan.plan if isinstance(plan, Refusal) and plan.plan is not None else plan


@functools.cache
def rows_of(name: str, cols: int, itemsize: int, masked: bool = False, inner: int = 1, target: Target = HOPPER):
    """Plans rows of `cols` elements of an operation, with a mask along the columns if `masked`; or returns the refusal."""
    rows = _rows(name, itemsize, masked and cols > 1)
    return plan_rows(replace(rows, shape=(3, cols) if inner == 1 else (3, cols, inner)), target)


@functools.cache
def _rows(name, itemsize, masked):
    """Returns the rows of a problem of any shape, axis 1 along the columns: plans of many shapes are made from it."""
    shape, dtype = (3, 2, 2), NARROW[itemsize]
    operands = operands_of(name, shape, dtype, axes=(1,), mask=shape if masked else None, t=dtype)
    return problem_of(name, operands, axes=(1,)).rows


def run(name: str, operands: Mapping[str, Any], rows: RowPlan | ColumnPlan | None = None, **params) -> Any:
    """Runs the kernel of an operation, by the plan `rows` or by the plan that is chosen; `params` are those of `problem_of`."""
    problem = problem_of(name, jax.tree.map(jax.typeof, dict(operands)), **params)
    plan = plan_of(problem) if rows is None else mosaic.SoftmaxPlan(problem, for_problem(rows, problem.rows))
    assert not isinstance(plan, Refusal), plan.reason
    results = plan.run(**operands)
    return results if params.get("return_state") else results[0]


def for_problem(rows, problem):
    """Returns a plan with the attribute that follows from the problem."""
    return replace(rows, is_stored=bool(problem.written)) if isinstance(rows, RowPlan) else rows


@contextlib.contextmanager
def planning(rows: RowPlan | ColumnPlan | None) -> Iterator[None]:
    """A context in which every kernel of the family distributes rows as this plan says; None for the plans that are chosen.

    It fails if no kernel was planned in it.
    """
    if rows is None:
        with kernels.anew():
            yield
        return
    forced = mock.Mock(side_effect=lambda problem, *_, **options: for_problem(rows, problem))
    with kernels.anew(), mock.patch.object(mosaic, "plan_rows", forced):
        yield
    assert forced.called


def everything() -> Iterator[tuple[str, int, int, bool]]:
    """Yields arguments of `rows_of` that find every plan: exact, aligned and ragged rows of every length."""
    long = {1024 * i for i in range(1, 33)} | {2**n + 2**m for n in range(15, 22) for m in range(n)}
    long = sorted(cols + extra for cols in (*long, 9 * 2**20) for extra in (0, 8, 4, 1))
    for name, cols, itemsize, masked in itertools.product(OPERATIONS, [*range(1, 1025), *long], (4, 2), [False, True]):
        if name in MASKABLE or not masked:
            yield name, cols, itemsize, masked
