"""The row engine serves ops that the library does not have: cross-entropy, the state alone, rows of the largest clusters."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax import online
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._gpu import rows
from jaxsoftmax._gpu.rows.kernel import PerRow, RowKernel, Whole
from jaxsoftmax._gpu.rows.plan import RowPlan, Storage
from jaxsoftmax._gpu.rows.staged import StagedPlan
from jaxsoftmax._gpu.rows.tile import each

from ..support import cases, kernels, oracle


def launch(name, body, operands, plan, whole=(), n_exchanges=1, **results):
    """Runs a kernel on the rows of the matrices `operands`."""
    (x, *_) = (operand.array for operand in operands.values())
    written = tuple(jnp.dtype(dtype).itemsize for dtype in whole)
    problem = RowProblem(x.shape, (1,), read=(x.dtype.itemsize,), written=written, n_exchanges=n_exchanges)
    plan = replace(plan, is_stored=bool(whole))
    plan = replace(plan, itemsize=problem.widest) if isinstance(plan, StagedPlan) else plan
    return rows.launch(RowKernel(name, body, operands, problem, whole, **results), plan)


# Cross-entropy with integer labels: the logits are read once, and once more for their gradient.


def losses(logits, labels, plan):
    """`lse - logits[label]` and the log-sum-exp of each row, `[rows, 1]` float32; the labels are int32."""

    def body(tile, logits, label):
        state = tile.merge(tile.lift(logits))
        lse = online.finish(state).m

        def of_label(step):
            return jnp.where(tile.column(step) == tile.along(label), logits(step), jnp.zeros_like(logits(step)))

        return [lse - tile.sum(of_label, exchange=1), lse]

    operands = {"logits": Whole(logits, -jnp.inf, jnp.float32), "label": PerRow(labels)}
    return launch("losses_mosaic", body, operands, plan, per_row=[jnp.float32] * 2, n_exchanges=2)


def losses_vjp(logits, labels, lse, t, plan):
    """`(exp(logits - lse) - (column == label)) * t`."""

    def body(tile, logits, label, lse, t):
        lse, t, label = tile.along(lse), tile.along(t), tile.along(label)

        def gradient(step):
            y = jnp.exp(logits(step) - lse)
            return jnp.where(tile.column(step) == label, y - 1, y) * t

        return [gradient]

    operands = {"logits": Whole(logits, -jnp.inf, jnp.float32), "label": PerRow(labels), "lse": PerRow(lse), "t": PerRow(t)}
    return launch("losses_vjp_mosaic", body, operands, plan, whole=[logits.dtype], n_exchanges=0)[0]


def states(x, plan):
    """The state of each row, alone."""

    def body(tile, x):
        return list(tile.merge(tile.lift(x))[:2])

    operands = {"x": Whole(x, -jnp.inf, jnp.float32)}
    return launch("states_mosaic", body, operands, plan, per_row=[jnp.float32] * 2)


def columns(x, plan):
    """Two results as large as the rows, both integers: the columns, and what there is twice."""

    def body(tile, x):
        return [tile.column, each(lambda x: x + x, x)]

    return launch("columns_mosaic", body, {"x": Whole(x)}, plan, whole=[jnp.int32, x.dtype], n_exchanges=0)


# How a row is held: the number of rows, and the plan.
SHARED, NOWHERE = {"storage": Storage.SHARED, "unroll": 2}, {"storage": Storage.NOWHERE, "unroll": 2}
INTERPRETED = {
    "rows inside a warp": (16, RowPlan(128, 4, 32)),
    "several steps inside a warp, few lanes": (64, RowPlan(64, 4, 8)),
    "a warpgroup a row": (3, RowPlan(2048, 4, 128)),
}
LOWERED = {
    **INTERPRETED,
    "in shared memory": (3, RowPlan(1024, 4, 128, storage=Storage.SHARED, unroll=1)),
    "in shared memory, not aligned, in a cluster": (3, RowPlan(9001, 4, 128, blocks=2, **SHARED)),
    "read in a loop, not aligned": (3, RowPlan(9001, 4, 128, **NOWHERE)),
    "read in a loop, in a cluster": (3, RowPlan(40002, 4, 128, blocks=2, storage=Storage.NOWHERE, unroll=4)),
    "ragged rows": (3, RowPlan(100, 4, 32)),
    "in one piece": (131, StagedPlan(69, 4, 2, 2)),
    "in pieces that start anywhere": (7, StagedPlan(1001, 8, 32)),
    "in one piece, several steps": (9, StagedPlan(302, 4, 16)),
    "rows that are not aligned": (3, RowPlan(1001, 4, 128)),
    "several warpgroups": (3, RowPlan(20000, 8, 512)),
    "a cluster": (3, RowPlan(32768, 8, 512, blocks=2)),
    "32 warps": (2, RowPlan(32768, 4, 256, blocks=4)),
    "512 warps": (2, RowPlan(131072, 8, 1024, blocks=16)),
    "128 warps, not aligned": (2, RowPlan(131071, 8, 1024, blocks=4)),
}


def case(cases, kind):
    """The shape of the arrays, and the plan."""
    n_rows, plan = cases[kind]
    return (n_rows, plan.cols), plan


def logits_and_labels(shape, dtype):
    x = cases.inputs(shape, dtype)["offset of 1e4" if dtype == "float32" else "wide"]
    return x, np.random.default_rng(3).integers(0, shape[1], (shape[0], 1), np.int32)


def assert_right(loss, lse, x, labels):
    truth = oracle.logsumexp(x, -1, keepdims=True)
    assert oracle.error(lse, truth) <= 1
    value = truth.value - np.take_along_axis(oracle.to64(x), labels, 1)
    assert oracle.error(loss, oracle.Truth(value, truth.budget + 2 * oracle.EPS * np.abs(value))) <= 1  # of a difference


@pytest.mark.parametrize("kind", INTERPRETED)
def test_cross_entropy_is_right_in_both_directions(kind):
    shape, plan = case(INTERPRETED, kind)
    x, labels = logits_and_labels(shape, "float32")
    t = np.random.default_rng(4).uniform(-1, 1, (shape[0], 1)).astype(np.float32)
    loss, lse = kernels.interpreted(losses, x, labels, plan)
    assert_right(loss, lse, x, labels)

    gradient = kernels.interpreted(losses_vjp, x, labels, lse, t, plan)
    exponent = oracle.to64(x) - oracle.to64(lse)
    y = np.exp(exponent)
    expected = (y - (np.arange(shape[1]) == labels)) * t
    # That of a weight whose exponent is rounded, and the roundings of a difference and of a product.
    budget = (8 + 3 * np.abs(exponent)) * oracle.EPS * y * np.abs(t) + 2 * oracle.EPS * np.abs(expected) + oracle.TINY
    assert oracle.error(gradient, oracle.Truth(expected, budget)) <= 1


@pytest.mark.parametrize("kind", cases.every_other(LOWERED))
def test_cross_entropy_lowers_for_cuda(kind):
    shape, plan = case(LOWERED, kind)
    logits, row = jax.ShapeDtypeStruct(shape, jnp.bfloat16), jax.ShapeDtypeStruct((shape[0], 1), jnp.float32)
    labels = jax.ShapeDtypeStruct(row.shape, jnp.int32)
    kernels.lowered_for_cuda(functools.partial(losses, plan=plan), logits, labels, kernels=["losses_mosaic"])
    backward = functools.partial(losses_vjp, plan=plan)
    kernels.lowered_for_cuda(backward, logits, labels, row, row, kernels=["losses_vjp_mosaic"])


@pytest.mark.parametrize("kind", INTERPRETED)
def test_the_state_alone_is_that_of_the_reference(kind):
    shape, plan = case(INTERPRETED, kind)
    x, _ = logits_and_labels(shape, "float32")
    m, d = kernels.interpreted(states, x, plan)
    np.testing.assert_array_equal(m, np.max(x, -1, keepdims=True))
    assert oracle.error(d, oracle.denominator(x)) <= 1


@pytest.mark.parametrize("kind", cases.every_other(LOWERED, 1))
def test_the_state_alone_lowers_for_cuda(kind):
    shape, plan = case(LOWERED, kind)
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    kernels.lowered_for_cuda(functools.partial(states, plan=plan), x, kernels=["states_mosaic"])


@pytest.mark.parametrize("kind", INTERPRETED)
def test_several_results_and_columns_of_integers(kind):
    shape, plan = case(INTERPRETED, kind)
    x = np.arange(shape[0] * shape[1], dtype=np.int32).reshape(shape)
    column, twice = kernels.interpreted(columns, x, plan)
    np.testing.assert_array_equal(column, np.broadcast_to(np.arange(shape[1]), shape))
    np.testing.assert_array_equal(twice, 2 * x)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", LOWERED)
def test_native_rows_are_right(kind):
    shape, plan = case(LOWERED, kind)
    plan = replace(plan, vector=min(plan.vector, 4))  # 16 bytes of float32 and int32
    x, labels = logits_and_labels(shape, "float32")
    loss, lse = (np.asarray(a) for a in jax.jit(functools.partial(losses, plan=plan))(x, labels))
    assert_right(loss, lse, x, labels)
    column, twice = jax.jit(functools.partial(columns, plan=plan))(np.full(shape, 3, np.int32))
    np.testing.assert_array_equal(column, np.broadcast_to(np.arange(shape[1]), shape))
    np.testing.assert_array_equal(twice, 6)
    m, d = jax.jit(functools.partial(states, plan=plan))(x)
    np.testing.assert_array_equal(m, np.max(x, -1, keepdims=True))
    assert oracle.error(d, oracle.denominator(x)) <= 1
