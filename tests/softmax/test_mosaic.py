"""The Mosaic GPU kernels of the softmax family: lowered for CUDA and interpreted on any machine, run on Hopper."""

import functools
import itertools
import math
import os
import re
import subprocess
import sys
import threading
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu import rows as row_kernels
from jaxsoftmax._gpu import sync
from jaxsoftmax._gpu.rows.columns import ColumnTile, places_of_vector
from jaxsoftmax._gpu.rows.kernel import RowKernel, Whole
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage
from jaxsoftmax._gpu.rows.staged import StagedPlan
from jaxsoftmax._gpu.rows.tile import RowTile
from jaxsoftmax.ops.softmax import mosaic_sm90 as mosaic

from ..support import cases, kernels, lowering, oracle
from ..support.meshes import collectives_of
from ..support.meshes import hurtful as with_hurtful_parts
from ..support.softmax import plans
from ..support.softmax.plans import MASKABLE, NARROW, OPERATIONS, STATEFUL

SHARED, NOWHERE = {"storage": Storage.SHARED, "unroll": 2}, {"storage": Storage.NOWHERE, "unroll": 4}


def lower(name, shape, dtype, *, mask=None, scale=None, result=None, t="float32", axes=None, **params):
    """Lowers the kernel of an operation for CUDA; `t` is the dtype of a tangent or a cotangent."""
    operands = plans.operands_of(name, shape, dtype, axes=axes, mask=mask, scale=scale, t=t)
    run = functools.partial(plans.run, name, axes=axes, dtype=dtype if result is None else result, **params)
    kernels.lowered_for_cuda(run, operands, kernels=[plans.kernel_of(name)])


# Lowered for CUDA: every way to distribute rows over threads.

# Columns for which each kernel is lowered, by bytes of an element, and some for which one kernel in six is.
EACH = {
    4: [64, 2048, 12288, 20000, 128003, 131072, 2**20],
    2: [64, 1001, 2048, 6007, 10001, 12288, 24576, 100277, 131072, 2**20],
}
SOME = [1, 1001, 32767, 1000, 3, 129, 49152, 127, 7, 4097, 100, 10001, 8192, 65536, 50257, 16384, 200019, 32768, 262144, 400000]
MASKED_EACH = {4: [2048, 12288, 50257, 2**20 + 1], 2: [2048, 12288, 50257, 2**20 + 1]}
MASKED_SOME = [3, 100, 4097, 20000, 64, 8192, 16384, 24576, 131072, 200019, 262144]


def columns(each, rest, name, itemsize):
    """The numbers of columns for which a kernel is lowered, by default or if slow: all kernels together have all of them."""
    first = OPERATIONS.index(name) + itemsize // 4
    return each[itemsize] + rest[first % 6 :: 6]


def grid(names, each, rest, masked):
    """The arguments of `plans.rows_of` for each case."""
    for name, itemsize in itertools.product(names, (4, 2)):
        yield from ((name, cols, itemsize, masked) for cols in columns(each, rest, name, itemsize))


# Short rows, by bytes of an element: all numbers of lanes, of vectors and of rows, for kernels that differ in them.
SHORT_KERNELS = [(name, False) for name in ("softmax", "softmax_jacobian", "logsumexp")]
SHORT_KERNELS += [("softmax", True), ("log_softmax_jvp", True)]
RAGGED = [33, 34, 41, 45, 65, 66, 81, 100, 105, 129, 130, 161, 162, 177, 210, 321, 322, 353, 417, 642, 833]
SHORT = {
    4: [1, 2, 3, 4, 6, 7, 8, 9, 10, 12, 16, 17, 18, 19, 23, 32, 64, 89, 128, 705, *RAGGED],
    2: [1, 2, 3, 4, 7, 8, 9, 10, 12, 16, 17, 18, 20, 24, 32, 36, 64, 68, 128, 132, 256, 257, 258, 260, *RAGGED],
}
LONGEST = {4: 2**21 + 3, 2: 2**22 + 3}  # columns that the grid holds, of two operands, by bytes of an element
OF_THE_LONGEST = [
    ("softmax", 4, False),
    ("log_softmax", 2, False),
    ("softmax_jacobian", 2, False),
    ("softmax", 4, True),
    ("log_softmax_vjp", 2, True),
]
LOWERED = [
    *grid(OPERATIONS, EACH, SOME, False),
    *grid(MASKABLE, MASKED_EACH, MASKED_SOME, True),
    *(("logsumexp", cols, 2, False) for cols in (20480, 100000, 200000, 400000)),
    ("logsumexp_vjp", 12501, 4, False),
    *((name, LONGEST[itemsize], itemsize, masked) for name, itemsize, masked in OF_THE_LONGEST),
    *((name, cols, itemsize, masked) for name, masked in SHORT_KERNELS for itemsize in SHORT for cols in SHORT[itemsize]),
]


def ways(case):
    """What a case hits: a way to distribute rows over threads, and for its kernel a kind of them. Nothing if it is refused."""
    name, _, itemsize, masked = case
    plan = plans.rows_of(*case)
    if isinstance(plan, Refusal):
        return set()
    if not plan.takes_block:
        is_staged = isinstance(plan, StagedPlan)
        return {(itemsize, plan.vector, plan.threads, plan.rows_per_lanes > 1, is_staged), (name, itemsize, is_staged)}
    is_stored = plan.is_stored or plan.storage != Storage.NOWHERE  # matters only to rows that are read in a loop
    plan = replace(plan, cols=0, blocks=17 if plan.persistent_blocks else plan.blocks, is_stored=is_stored)
    return {(itemsize, plan), (name, itemsize, masked, plan.storage, plan.blocks > 1, plan.persistent_blocks > 0)}


def ways_hit(all_cases, of=ways):
    return set().union(*map(of, all_cases))


def those_that_hit_more(all_cases):
    """The cases that hit what none before them does."""
    found, seen = [], set()
    for case in all_cases:
        hit = ways(case)
        found += [case] if hit - seen else []
        seen |= hit
    return found


EVERY_WAY = those_that_hit_more(LOWERED)


def pairs(case):
    """What a case hits of any two parts of a plan, and of a kernel and what its rows are held in."""
    plan = plans.rows_of(*case)
    held = {
        "masked": case[3],
        "storage": plan.storage,
        "staged": isinstance(plan, StagedPlan),
        "blocks": plan.blocks > 1,
        "grid": plan.persistent_blocks > 0,
    }
    parts = {"vector": plan.vector, "threads": plan.threads, "rows": plan.rows_per_lanes > 1, "unroll": plan.unroll}
    of_kernel = itertools.product([case[0]], held.items())
    return {*itertools.combinations((held | parts).items(), 2), *of_kernel}


def that_hit_all_pairs(all_cases):
    """Few cases that hit what all do, each of two values together: the one that hits the most that is left, in turn."""
    hit, found, left = {case: pairs(case) for case in all_cases}, [], ways_hit(all_cases, pairs)
    while left:
        found.append(max(all_cases, key=lambda case: len(hit[case] & left)))
        left -= hit[found[-1]]
    return found


QUICK = that_hit_all_pairs([case for case in EVERY_WAY if (case[2] == 2) != (case[0] in STATEFUL)])
REST = [case for case in LOWERED if case not in QUICK]


def of_each_kernel(all_cases):
    """The columns and masks of the cases, for each kernel and itemsize that has any."""
    together = {}
    for name, cols, itemsize, masked in all_cases:
        together.setdefault((name, itemsize), {})[cols, masked] = None  # a set that keeps its order
    return [pytest.param(*key, list(columns), id=f"{key[0]}-{key[1]}") for key, columns in together.items()]


def check_columns(name, itemsize, columns):
    for cols, masked in columns:
        lower(name, (3, cols), NARROW[itemsize], t=NARROW[itemsize], mask=(3, cols) if masked else None)


@pytest.mark.parametrize(("name", "itemsize", "columns"), of_each_kernel(QUICK))
def test_plans_lower_for_cuda(name, itemsize, columns):
    check_columns(name, itemsize, columns)


def test_kernels_are_those_that_users_lower():
    """Tests have Mosaic lower faster, to the same."""
    x = shaped(3, 2, 50257, dtype=jnp.bfloat16)
    found = kernels.lowered_for_cuda(OPS["softmax"], x)
    with lowering.as_users_lower():
        assert kernels.lowered_for_cuda(OPS["softmax"], x) == found


@pytest.mark.slow
@pytest.mark.parametrize(("name", "itemsize", "columns"), of_each_kernel(REST))
def test_every_other_number_of_columns_lowers_for_cuda(name, itemsize, columns):
    check_columns(name, itemsize, columns)


@pytest.mark.parametrize(("name", "itemsize"), [("softmax", 4), ("log_softmax_vjp", 2)])
def test_masks_of_fewer_rows_lower_where_rows_are_not_aligned(name, itemsize):
    for cols in (1025, 20002) if itemsize == 4 else (4100, 50257):
        lower(name, (3, 2, cols), NARROW[itemsize], t=NARROW[itemsize], mask=(3, 1, cols))


def test_every_way_to_hold_rows_is_hit_by_a_lowered_case():
    assert ways_hit(plans.everything()) - ways_hit(EVERY_WAY) == set()


def test_a_missing_case_is_noticed():
    assert ways_hit(EVERY_WAY) - ways_hit([case for case in EVERY_WAY if case[1] != 131072]) != set()


# Where a mask has size 1 and where it has not, on rows along the last axis of [2, 3, 4, cols].
MASKS = {
    "whole": (2, 3, 4, None),
    "of queries and keys": (1, 1, 4, None),
    "of keys": (2, 1, 1, None),
    "of batch, queries and keys": (2, 1, 4, None),
    "of heads and keys": (1, 3, 1, None),
    "one for all": (1, 1, 1, None),
    "of rows": (2, 3, 4, 1),
    "of batch": (2, 1, 1, 1),
    "one number": (1, 1, 1, 1),
}


def mask_shape(kind, cols):
    return tuple(cols if size is None else size for size in MASKS[kind])


@pytest.mark.parametrize("name", MASKABLE)
def test_masks_of_every_shape_lower_for_cuda(name):
    first = MASKABLE.index(name) % 3  # for a kernel every third shape, in turn
    for kind, (dtype, cols) in zip(list(MASKS)[first::3], itertools.cycle([("float32", 100), ("float16", 2048)])):
        lower(name, (2, 3, 4, cols), dtype, t=dtype, mask=mask_shape(kind, cols))


DTYPES = [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "bfloat16"), ("float16", "float32")]


@pytest.mark.parametrize("name", cases.every_other(OPERATIONS))
def test_scales_and_dtypes_lower_for_cuda(name):
    place = OPERATIONS.index(name) // 2
    turn = place % 2
    for cols, scale in [(64, (1, 1)), (100, (5, 1)), (1001, (1, 1)), (2048, (5, 1)), (20000, (1, 1))][place % 3 :: 3]:
        lower(name, (5, cols), "float32", scale=scale)
    lower(name, (5, 100), "bfloat16", scale=(5, 1), mask=(5, 100) if name in MASKABLE else None, t="bfloat16")
    for (dtype, result), shape in zip(DTYPES[turn::2], [(512, 64), (3, 4100)], strict=True):
        lower(name, shape, dtype, result=result)  # a tangent is float32
    lower(name, (33, 69), dtype, result=result)
    if "m" in plans.operation_of(name).by_name:
        lower(name, (3, 100), "bfloat16", scale=(1, 1), scale_tangent=True)
        lower(name, (3, 69), "bfloat16", mask=(3, 1))
        lower(name, (3, 2048), "bfloat16", scale=(3, 1), scale_tangent=True)


@pytest.mark.parametrize("name", STATEFUL)
def test_kernels_that_give_their_state_lower_for_cuda(name):
    for shape in [(512, 64), (3, 100), (3, 2048), (3, 20000)][STATEFUL.index(name) :: 2]:
        lower(name, shape, "bfloat16", return_state=True)
    lower(name, (3, 100), "bfloat16", return_state=True, mask=(3, 1), scale=(1, 1))


@pytest.mark.parametrize("name", OPERATIONS)
def test_rows_of_several_axes_lower_for_cuda(name):
    if OPERATIONS.index(name) % 2:  # in turn
        lower(name, (3, 5, 1), "float32", axes=(1,), scale=(3, 1, 1))
    else:
        lower(name, (2, 3, 5, 7), "float32", axes=(2, 3), mask=(2, 1, 5, 7) if name in MASKABLE else None)
        lower(name, (5, 7), "bfloat16", axes=(0, 1))


def test_staged_rows_refuse_masks_along_the_columns():
    staged = StagedPlan(69, 4, 2)
    with pytest.raises(NotImplementedError, match="staged: masks along the columns"):
        lower("softmax", (3, 69), "float32", mask=(3, 69), rows=staged)
    lower("softmax", (3, 69), "float32", scale=(1, 1), rows=staged)


@pytest.mark.parametrize("plan", [RowPlan(8192, 4, 128, blocks=4, **SHARED), ColumnPlan(8192, 4, 4, 128, 1, blocks=4)], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_problems_know_how_often_kernels_exchange(name, plan, monkeypatch):
    """A kernel waits once for the other blocks of its cluster: in the first exchange, or at its end if there is none."""
    shape, numbers, waits = (3, 8192) if isinstance(plan, RowPlan) else (3, 8192, 4), [], []
    for tile in (RowTile, ColumnTile):
        exchange = tile._exchange
        monkeypatch.setattr(
            tile, "_exchange", lambda self, number, *parts, own=exchange: numbers.append(number) or own(self, number, *parts)
        )
    wait = sync.cluster_wait
    monkeypatch.setattr(sync, "cluster_wait", lambda: waits.append(wait()))
    lower(name, shape, "float32", axes=(1,), rows=plan)
    problem = plans.problem_of(name, plans.operands_of(name, shape, "float32", axes=(1,)), axes=(1,))
    assert numbers == list(range(problem.rows.n_exchanges))
    assert len(waits) == 1


# Rows along another axis: shape and axes.
ALONG = [
    ((5, 7), (0,)),
    ((130, 33, 1), (0,)),
    ((3, 1000, 128), (1,)),
    ((2, 4097, 40), (1,)),
    ((2, 3, 17, 5), (1, 2)),
    ((2, 12000, 2, 24), (1,)),
    ((1, 20000, 8), (1,)),
]


@pytest.mark.parametrize("name", cases.every_other(OPERATIONS, 1))
def test_rows_along_other_axes_lower_for_cuda(name):
    first = OPERATIONS.index(name) % 2
    scaled = itertools.cycle([False, True] if OPERATIONS.index(name) % 4 < 2 else [True, False])
    for (shape, axes), dtype, has_scale in zip(ALONG[first::2], itertools.cycle(["float32", "bfloat16"]), scaled):
        mask = shape if name in MASKABLE and shape[0] == 3 else None
        option = {"scale": (1,) * len(shape)} if has_scale else {"mask": mask}
        lower(name, shape, dtype, axes=axes, t=dtype, **option)


# Masks that repeat, beside rows along axis 2: the shape of the array and of the mask. Of a vector of rows side by side the
# mask has neighbours, one entry, or entries apart.
REPEATED = [
    ((2, 3, 300, 4, 24), (1, 3, 300, 4, 24)),
    ((2, 3, 300, 4, 24), (2, 1, 300, 1, 24)),
    ((2, 3, 300, 4, 24), (2, 3, 300, 1, 1)),
    ((2, 3, 300, 4, 24), (1, 1, 300, 4, 1)),
    ((2, 3, 300, 4, 6), (1, 3, 300, 4, 1)),
    ((2, 3, 300, 4, 6), (2, 1, 300, 1, 6)),
    ((2, 1, 70001, 1, 40), (1, 1, 70001, 1, 40)),
    ((2, 1, 70001, 1, 40), (1, 1, 70001, 1, 1)),
]


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(("name", "case"), list(zip(itertools.cycle(cases.OPS), REPEATED, strict=False)), ids=str)
def test_no_mask_is_broadcast_beside_rows_along_another_axis(name, case):
    (shape, mask), op = case, functools.partial(getattr(jaxsoftmax, name), axis=2, implementation="mosaic")

    def both(x, where):
        y, vjp = jax.vjp(lambda x: op(x, where=where), x)
        return y, vjp(y)

    names = NAMES[name][:1] + NAMES[name][2:] if name != "softmax" else NAMES[name][:2]
    operands = shaped(*shape, dtype="bfloat16"), shaped(*mask, dtype=bool)
    text = kernels.lowered_for_cuda(both, *operands, kernels=names)
    assert kernels.sizes(text, "i1", "i8", "ui8") == {math.prod(mask)}


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("axis", [0, 1])
def test_no_scale_is_broadcast_along_rows(axis):
    f = jax.vmap(lambda x, scale: jaxsoftmax.softmax(x, axis, scale=scale, implementation="mosaic"))
    text = kernels.lowered_for_cuda(f, shaped(6, 300, 16, dtype="bfloat16"), shaped(6))
    assert max(kernels.sizes(text, "f32")) == 6 * (16, 300)[axis]


@pytest.mark.parametrize(("shape", "mask"), REPEATED, ids=str)
def test_a_mask_that_repeats_is_found_beside_rows_along_another_axis(shape, mask):
    shape, mask = (tuple(min(size, 30) for size in sizes) for sizes in (shape, mask))
    problem = RowProblem(shape, (2,))
    three = problem.outer, problem.cols, problem.inner
    expected = np.broadcast_to(np.arange(math.prod(mask)).reshape(mask), shape).reshape(three)
    outer, (_, _, apart), across = problem.indexed(mask)

    def place(triples, index, size=1):
        parts = (
            (index // divisor % (modulus or index.size), stride) for divisor, modulus, stride in itertools.batched(triples, 3)
        )
        return sum(part * (stride // size) for part, stride in parts) + 0 * index

    starts = place(outer, np.arange(three[0]), apart * three[1]) * apart * three[1]
    found = starts[:, None, None] + (np.arange(three[1]) * apart)[:, None] + place(across, np.arange(three[2]))
    np.testing.assert_array_equal(found, expected)
    for vector in (vector for vector in (1, 2, 4, 8) if three[2] % vector == 0):
        vectors = (expected - expected[:, :, :1] if vector == 1 else expected).reshape(-1, vector)
        steps = np.unique(vectors - vectors[:, :1], axis=0)
        if (count := places_of_vector(across, vector)) != vector:
            np.testing.assert_array_equal(steps, [np.arange(vector) * (count is None)])
        if count is None:
            assert np.all(expected.reshape(-1, vector)[:, 0] % vector == 0)  # a vector is loaded at once


# Rows along another axis that blocks of the grid share, or those of a cluster if they need not be held.
LONG_ALONG = [(8, 131072, 128), (8, 50257, 320)]
UNHELD = ("logsumexp", "logsumexp_jvp", "logsumexp_vjp")


@pytest.mark.parametrize("name", cases.every_other(OPERATIONS))
def test_long_rows_along_another_axis_lower_for_cuda(name):
    turn = OPERATIONS.index(name) // 2 % 2
    for shape, dtype in zip(LONG_ALONG, ["float32", "bfloat16"][:: 1 - 2 * turn], strict=True):
        if shape is LONG_ALONG[turn]:
            option = {"mask": shape} if name in (*UNHELD, "log_softmax") else {"scale": (1, 1, 1)}
            lower(name, shape, dtype, axes=(1,), t=dtype, **option)
    if turn == 0:
        lower(name, (8, 131072, 6), "bfloat16", axes=(1,), t="bfloat16", scale=(8, 1, 6))


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float32"]))
@pytest.mark.parametrize("name", cases.quick("softmax", "logsumexp", slow=["log_softmax"]))
def test_long_rows_along_another_axis_run_on_kernels(name, dtype):
    op = functools.partial(getattr(jaxsoftmax, name), axis=1)
    for shape in LONG_ALONG:
        x, where = shaped(*shape, dtype=dtype), shaped(*shape, dtype=bool)
        c = shaped(8, shape[2], dtype=dtype) if name == "logsumexp" else x
        kernels.assert_ran(explain(lambda x, c: jax.vjp(op, x)[1](c), x, c, platform="cuda"), "mosaic")
        kernels.assert_ran(explain(lambda x, t: jax.jvp(op, [x], [t]), x, x, platform="cuda"), "mosaic")
        kernels.assert_ran(explain(lambda x, where: op(x, where=where), x, where, platform="cuda"), "mosaic")


OPS = {name: functools.partial(getattr(jaxsoftmax, name), axis=-1) for name in cases.OPS}
NAMES = {
    "softmax": ["softmax_forward_mosaic", "softmax_jacobian_mosaic", "softmax_jacobian_mosaic"],
    "log_softmax": ["log_softmax_forward_mosaic", "log_softmax_jvp_mosaic", "log_softmax_vjp_mosaic"],
    "logsumexp": ["logsumexp_forward_mosaic", "logsumexp_jvp_mosaic", "logsumexp_vjp_mosaic"],
}


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("name", OPS)
def test_ops_and_their_derivatives_lower_to_their_kernels(name):
    forward, tangent, backward = NAMES[name]
    x, row = jax.ShapeDtypeStruct((6, 130), jnp.bfloat16), jax.ShapeDtypeStruct((6,), jnp.bfloat16)
    c = row if name == "logsumexp" else x
    op = OPS[name]
    for f, operands, names in [
        (op, [x], [forward]),
        (jax.vmap(op), [x], [forward]),
        (lambda x, t: jax.jvp(op, [x], [t]), [x, x], [forward, tangent]),
        (lambda x, c: jax.vjp(op, x)[1](c), [x, c], [forward, backward]),
        (lambda x: op(x.astype(jnp.float32), implementation="mosaic"), [x], [forward]),
    ]:
        kernels.lowered_for_cuda(f, *operands, kernels=names)
        explanation = explain(f, *operands, platform="cuda")
        kernels.assert_ran(explanation, "mosaic")
        assert explanation[0].operands[0] == "bfloat16[6,130]"


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("kind", [pytest.param(AxisType.Auto, marks=pytest.mark.slow), AxisType.Explicit])
@pytest.mark.parametrize(
    ("name", "masked"),
    [
        pytest.param(name, masked, marks=cases.slow_unless((name, masked) in [("softmax", True), ("logsumexp", False)]))
        for name in OPS
        for masked in (False, True)
    ],
)
def test_kernels_are_traced_under_a_mesh_as_without_one(name, kind, masked):
    """Where a row is a block its state is scalars, of which some functions of `jax.numpy` reshard their constants."""
    mesh = jax.make_mesh((1,), ("data",), axis_types=(kind,), devices=jax.devices("cpu")[:1])
    scaled = {} if name == "logsumexp" else {"scale": 0.5}
    op = functools.partial(OPS[name], implementation="mosaic", **scaled)  # refused, it would raise
    forward, tangent, backward = NAMES[name]
    with jax.set_mesh(mesh):
        whole = NamedSharding(mesh, PartitionSpec())
        for shape, dtype in (((8, 100), "float32"), ((8, 4096), "float32"), ((8, 32768), "bfloat16")):
            x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=whole)
            where = jax.ShapeDtypeStruct(shape, bool, sharding=whole) if masked else None
            for both, names in (
                (lambda x, where: jax.jvp(lambda x: op(x, where=where), [x], [jnp.sin(x)]), [forward, tangent]),
                (lambda x, where: jax.grad(lambda x: jnp.sum(op(x, where=where) ** 2))(x), [forward, backward]),
            ):
                kernels.lowered_for_cuda(both, x, where, kernels=names)


@pytest.mark.parametrize("name", cases.OPS)
def test_a_scale_for_each_row_lowers_to_a_kernel(name):
    x, scale = jax.ShapeDtypeStruct((6, 130), jnp.float32), jax.ShapeDtypeStruct((6,), jnp.float32)
    for f in (OPS[name], jax.vmap(OPS[name])):
        f = functools.partial(lambda f, x, scale: f(x, scale=scale), f)
        kernels.lowered_for_cuda(f, x, scale, kernels=NAMES[name][:1])

        def both(x, scale, c, f=f):
            return jax.vjp(f, x, scale)[1](c)

        kernels.lowered_for_cuda(both, x, scale, jax.eval_shape(f, x, scale), kernels=NAMES[name][::2])


@pytest.mark.parametrize("name", cases.OPS)
def test_a_scale_for_each_row_is_taken_along_any_axis(name):
    shapes = ((64, 4096), -1, (64,)), ((64, 4096), -1, (1,)), ((8, 512, 64), 1, (8, 64)), ((8, 6, 512), -1, (8, 1))
    for shape, axis, of_rows in shapes:
        x, scale = (jax.ShapeDtypeStruct(each, jnp.bfloat16) for each in (shape, of_rows))

        def f(x, scale, axis=axis):
            return getattr(jaxsoftmax, name)(x, axis=axis, scale=scale)

        explanation = explain(
            lambda x, scale, c, f=f: jax.vjp(f, x, scale)[1](c), x, scale, jax.eval_shape(f, x, scale), gpu="h100"
        )
        kernels.assert_ran(explanation, "mosaic")


@pytest.mark.parametrize(
    ("shape", "dtype", "masked"),
    [
        pytest.param((6, 776), "float32", False, marks=pytest.mark.slow),
        ((6, 905), "bfloat16", True),
        pytest.param((6, 6152), "float32", False, marks=pytest.mark.slow),
        pytest.param((6, 32760), "bfloat16", False, marks=pytest.mark.slow),
        ((6, 32761), "float32", True),
        ((6, 151937), "bfloat16", False),
        ((6, 262120), "float32", True),
    ],
    ids=str,
)
def test_no_width_has_a_long_program(shape, dtype, masked):
    """The text of both passes takes 0.08 to 0.28 MB. A first call takes longer with what is unrolled, most of it in ptxas."""
    x, where = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape, bool) if masked else None

    def value_and_grad(x, c, where):
        y, vjp = jax.vjp(lambda x: jaxsoftmax.softmax(x, where=where, implementation="mosaic"), x)
        return y, vjp(c)[0]

    assert len(jax.jit(value_and_grad).trace(x, x, where).lower(lowering_platforms=("cuda",)).as_text()) < 400_000


# Refused, in words.

X = jax.ShapeDtypeStruct((4, 64), jnp.float32)


def shaped(*shape, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


def all_axes(op, **options):
    return lambda x: op(x, axis=tuple(range(x.ndim)), **options)


REFUSALS = {
    "float8": (OPS["softmax"], [shaped(4, 64, dtype="float8_e5m2")], "dtypes must be among .*, got float8_e5m2"),
    "float8 result": (lambda x: OPS["softmax"](x, dtype="float8_e4m3fn"), [X], "dtypes must be among .*, got float8_e4m3fn"),
    "complex": (OPS["logsumexp"], [shaped(4, 64, dtype=jnp.complex64)], "dtypes must be among .*, got complex64"),
    "outer axes": (lambda x: OPS["logsumexp"](x, axis=(0, 2)), [shaped(2, 3, 4)], r"be neighbours, got axes \(0, 2\)"),
    "many rows side by side": (
        lambda x: OPS["softmax"](x, axis=0),
        [shaped(2**19, 64)],
        "rows of 524288 entries are 1024 slices, and the grid holds 792",
    ),
    "long rows": (OPS["softmax"], [shaped(2, 2**24)], "are 2048 slices, more than two thirds of the 792 that the grid holds"),
    "no rows": (OPS["softmax"], [shaped(0, 64)], "from 1 to 2147483647 rows, got 0"),
    "no columns": (OPS["softmax"], [shaped(4, 0)], "from 1 to 1073741823 entries, got 0"),
    "many columns": (OPS["log_softmax"], [shaped(4, 2**30)], "from 1 to 1073741823 entries, got 1073741824"),
    "many columns on two axes": (all_axes(OPS["softmax"]), [shaped(2**15, 2**15)], "1073741823 entries, got 1073741824"),
    "many rows": (OPS["softmax"], [shaped(2**31, 1)], "from 1 to 2147483647 rows, got 2147483648"),
    "mask broadcast along one of two axes": (
        lambda x, where: OPS["softmax"](x, axis=(1, 2), where=where),
        [shaped(2, 3, 4), shaped(2, 1, 4, dtype=bool)],
        r"where must be whole along the axes, or of size 1, got shape \(2, 1, 4\) for \(2, 3, 4\)",
    ),
}


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_not_served_is_said_in_words(kind):
    f, operands, words = REFUSALS[kind]
    explanation = explain(f, *operands, platform="cuda")
    cases.assert_all_run_on("xla", explanation)
    for decision in explanation:
        reason = dict(decision.refusals)["mosaic"]
        assert re.search(words, reason), reason


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("f", [OPS["softmax"], lambda x: OPS["softmax"](x.astype(jnp.float32), dtype=jnp.float64)])
def test_float64_is_refused(f):
    (decision,) = explain(f, shaped(4, 64, dtype=jnp.float64), platform="cuda")
    assert decision.implementation == "xla"
    assert dict(decision.refusals)["mosaic"] == "dtypes must be among float32, bfloat16, float16, got float64"


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_gpus_are_refused(capability):
    (decision,) = explain(OPS["softmax"], shaped(5, 63), gpu=capability)
    assert dict(decision.refusals)["mosaic"] == f"it needs compute capability 9.x, got cuda {capability}"
    assert decision.implementation != "mosaic"


def test_elsewhere_it_is_refused():
    (decision,) = explain(OPS["softmax"], shaped(5, 63), platform="cpu")
    assert dict(decision.refusals)["mosaic"] == "it runs on cuda, not on cpu"


@pytest.mark.usefixtures("hollow_kernels")
def test_the_limits_themselves_are_served():
    softmax, logsumexp = (functools.partial(OPS[name], implementation="mosaic") for name in ("softmax", "logsumexp"))
    for op, shape in [(softmax, (4, 1)), (logsumexp, (4, 2**30 - 1)), (softmax, (2**31 - 1, 1))]:
        for dtype in ("float32", "bfloat16"):
            kernels.assert_ran(explain(op, shaped(*shape, dtype=dtype), platform="cuda"), "mosaic")
    kernels.assert_ran(explain(OPS["logsumexp"], shaped(4, 2**28), platform="cuda"), "mosaic")
    longest = 528 * 8192  # two thirds of the slices that an H100 holds
    kernels.assert_ran(explain(OPS["softmax"], shaped(4, longest), gpu="h100"), "mosaic")
    with pytest.raises(NotImplementedError, match=f"rows of {longest + 1} entries are 531 slices, more than two thirds"):
        explain(softmax, shaped(4, longest + 1), gpu="h100")


# Axes of size 1 count nowhere: shapes and axes of softmax, and the same rows without such axes.
SINGLE = [
    ((1024, 16, 8, 1), (1, 3), (1024, 16, 8), 1),
    ((1024, 16, 8, 1), (1,), (1024, 16, 8), 1),
    ((1024, 1, 16, 1, 8), (1, 2), (1024, 16, 8), 1),
    ((1, 1024, 64), (0, 2), (1024, 64), 1),
    ((4, 65536, 8, 1), (1, 3), (4, 65536, 8), 1),
    ((1024, 1, 8), (1,), (8192, 1), 1),
    ((1024, 8, 1), (2,), (8192, 1), 1),
    ((1, 1), (), (1, 1), 1),
    ((4, 0, 8), (1,), (4, 0), 1),
    ((0, 64, 1), (1, 2), (0, 64), 1),
]


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(("shape", "axes", "same", "axis"), SINGLE, ids=str)
def test_axes_of_size_1_decide_nothing(shape, axes, same, axis):
    for name in OPS:
        decided = []
        for sizes, along in ((shape, axes), (same, axis)):
            x = shaped(*sizes, dtype="bfloat16")
            op = functools.partial(getattr(jaxsoftmax, name), axis=along)
            explanation = explain(lambda x, op=op: jax.vjp(op, x)[1](jnp.sin(op(x))), x, platform="cuda")
            decided.append([(d.primitive, d.implementation, dict(d.refusals).get("mosaic")) for d in explanation])
        assert decided[0] == decided[1], name
    for name in [operation.name for operation in mosaic._MERGING]:
        refusals = []
        for sizes, along in ((shape, axes), (same, (axis,))):
            operands = plans.operands_of(name, sizes, "bfloat16", axes=along)
            problem = plans.problem_of(name, operands, axes=along, devices=(("x", 2),))
            refusals.append(mosaic.plan(problem, HOPPER))
        assert refusals[0] == refusals[1]
        assert isinstance(refusals[0], Refusal)


@pytest.mark.usefixtures("hollow_kernels")
def test_rows_of_one_entry_are_left_to_xla():
    for name in OPS:
        (decision,) = explain(OPS[name], shaped(64, 1), platform="cuda")
        assert dict(decision.refusals)["mosaic"] == "XLA computes rows of one entry element by element"
    (decision,) = explain(jaxsoftmax.cross_entropy, shaped(64, 1), shaped(64, dtype="int32"), platform="cuda")
    assert decision.implementation == "xla"


def produced(op, **options):
    return lambda x: op(x * jnp.asarray(2, x.dtype) + jnp.asarray(1, x.dtype), **options)


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(("dtype", "most"), [("float32", 16384), ("bfloat16", 8192)])
@pytest.mark.parametrize("name", OPS)
def test_what_xla_would_fuse_is_left_to_it_unless_rows_are_wide(name, dtype, most):
    why = f"XLA computes {name} together with what produces its operand"
    for cols in (64, most, most + 1, 2**18):
        x = shaped(4, cols, dtype=dtype)
        (decision,) = explain(produced(OPS[name]), x, platform="cuda")
        if cols > most and name != "logsumexp":
            assert decision.implementation == "mosaic", cols
        else:
            assert decision.implementation == "xla", cols
            assert dict(decision.refusals)["mosaic"].startswith(why)
    for op in (produced(OPS[name], implementation="mosaic"), OPS[name]):  # forced; an argument
        kernels.assert_ran(explain(op, shaped(4, 64, dtype=dtype), platform="cuda"), "mosaic")


@pytest.mark.usefixtures("hollow_kernels")
def test_the_wider_of_operand_and_result_says_whether_rows_are_wide():
    x = shaped(4, 12288, dtype=jnp.bfloat16)
    for result, implementation in [("bfloat16", "mosaic"), ("float32", "xla")]:
        (decision,) = explain(produced(OPS["softmax"], dtype=result), x, platform="cuda")
        assert decision.implementation == implementation


@pytest.mark.usefixtures("hollow_kernels")
def test_a_cast_to_float32_and_back_is_left_to_xla_in_softmax_unless_rows_are_wide():
    for name, cols, implementation in [
        ("softmax", 64, "xla"),
        ("softmax", 16384, "xla"),
        ("softmax", 16385, "mosaic"),
        ("log_softmax", 64, "mosaic"),
        ("logsumexp", 64, "mosaic"),
    ]:
        x = shaped(4, cols, dtype=jnp.bfloat16)
        (decision,) = explain(lambda x, op=OPS[name]: op(x.astype(jnp.float32)), x, platform="cuda")
        assert decision.implementation == implementation, (name, cols)
        if implementation == "xla":
            assert dict(decision.refusals)["mosaic"].startswith("XLA fuses the cast of its operand")
    with_dtype = functools.partial(OPS["softmax"], dtype=jnp.float32)
    kernels.assert_ran(explain(with_dtype, shaped(4, 64, dtype=jnp.bfloat16), platform="cuda"), "mosaic")


@pytest.mark.usefixtures("hollow_kernels")
def test_a_mask_that_xla_would_fuse_is_left_to_it():
    (decision,) = explain(lambda x: OPS["softmax"](x, where=x > 0), X, platform="cuda")
    assert decision.implementation == "xla"
    (decision,) = explain(lambda x, where: OPS["softmax"](x, where=where), X, shaped(4, 64, dtype=bool), platform="cuda")
    assert decision.implementation == "mosaic"


@pytest.mark.usefixtures("hollow_kernels")
def test_a_cotangent_that_xla_would_fuse_is_left_to_it():
    def both(x, c):
        return jax.vjp(OPS["log_softmax"], x)[1](c * 2)

    forward, backward = explain(both, X, X, platform="cuda")
    assert (forward.implementation, backward.implementation) == ("mosaic", "xla")
    assert dict(backward.refusals)["mosaic"].startswith("XLA computes log_softmax_vjp together with")


# Interpreted on the CPU, with race detection.

# How the interpreter can hold a row: shape and plan, None for the plan that is chosen.
RUNS = {
    "rows inside a warp": ((16, 128), None),
    "several steps inside a warp": ((8, 512), None),
    "a warpgroup a row": ((1, 1024), RowPlan(1024, 4, 128)),
    "looped": ((1, 1024), RowPlan(1024, 4, 128, storage=Storage.NOWHERE, unroll=1)),
    "looped, two steps an iteration": ((1, 2560), RowPlan(2560, 4, 128, storage=Storage.NOWHERE, unroll=2)),
}


def hurtful(shape, dtype):
    """All inputs of `cases`, one below another: what would be rows of other calls are neighbours here."""
    return np.concatenate(list(cases.inputs(shape, dtype).values()))


def some(shape, dtype, seed=1):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


def on_host(tree):
    return jax.tree.map(np.asarray, tree)


@pytest.mark.parametrize(("kind", "dtype"), list(zip(RUNS, ["float32", "bfloat16"] * 3, strict=False)))
def test_interpreted_softmax_is_right_in_both_directions(kind, dtype):
    shape, plan = RUNS[kind]
    x = hurtful(shape if plan else (4, shape[1]), dtype)  # in all, whole tiles
    c = some(x.shape, dtype)
    y = kernels.interpreted(functools.partial(plans.run, "softmax", rows=plan), {"x": x})
    assert y.dtype == x.dtype
    assert oracle.error(y, oracle.softmax(x)) <= 1
    dx = kernels.interpreted(functools.partial(plans.run, "softmax_jacobian", rows=plan), {"y": y, "t": c})
    finite = np.isfinite(oracle.softmax(x).value).all(-1)
    assert finite.sum() > len(x) // 2
    assert oracle.error(np.asarray(dx)[finite], oracle.softmax_derivative(x[finite], c[finite], saved=dtype)) <= 1


def test_softmax_with_vjp_is_softmax_in_both_directions():
    x, c = some((4, 1024), "float32"), some((4, 1024), "float32", seed=2)
    y, vjp = kernels.interpreted(functools.partial(jax.vjp, mosaic.softmax_with_vjp), x)
    assert oracle.error(y, oracle.softmax(x)) <= 1
    (dx,) = kernels.interpreted(vjp, c)
    assert oracle.error(dx, oracle.softmax_derivative(x, c)) <= 1
    x, names = shaped(4, 1024), ["softmax_forward_mosaic", "softmax_jacobian_mosaic"]
    kernels.lowered_for_cuda(jax.grad(lambda x: jnp.sum(mosaic.softmax_with_vjp(x)[:, 0])), x, kernels=names)
    kernels.lowered_for_cuda(mosaic.softmax_with_vjp, shaped(64, 1), kernels=names[:1])  # where the reference is faster, too


def test_softmax_with_vjp_refuses_rows_that_no_kernel_takes():
    with pytest.raises(NotImplementedError, match="softmax_with_vjp: a row must have from 1 to 1073741823 entries, got 0"):
        mosaic.softmax_with_vjp(jnp.zeros((1, 0)))
    with pytest.raises(NotImplementedError, match=r"softmax_with_vjp: dtypes must be among .*, got int32"):
        mosaic.softmax_with_vjp(jnp.zeros((1, 8), jnp.int32))


@pytest.mark.parametrize(
    ("shape", "loops"),
    [((3, 2, 2**20), True), ((3, 2, 69), True), ((3, 8, 69), False), ((3, 2, 5001), True), ((3, 8, 5001), False)],
    ids=str,
)
def test_a_batch_of_kernels_is_a_loop_where_they_share_tickets_or_arrays_are_not_aligned(shape, loops):
    x = shaped(*shape, dtype=jnp.bfloat16)
    batched = jax.vmap(lambda x: plans.run("softmax", {"x": x}))
    text = kernels.lowered_for_cuda(batched, x, kernels=["softmax_forward_mosaic"])
    assert ("stablehlo.while" in text) == loops


def test_a_body_with_tickets_exchanges_once():
    plan = RowPlan(9 * 8192, 4, 256, blocks=9, persistent_blocks=40, **SHARED)

    def twice(tile, x):
        return [tile.sum(x) + tile.sum(x, exchange=1)]

    def run(x):
        problem = RowProblem(x.shape, (1,), read=(4,))
        return row_kernels.launch(RowKernel("twice", twice, {"x": Whole(x)}, problem, per_row=[jnp.float32]), plan)

    with pytest.raises(NotImplementedError, match="grid: a body may merge or sum once"):
        kernels.lowered_for_cuda(run, shaped(2, 9 * 8192))


@dataclass
class Saved:
    """The operands of every kernel for some scores, from float64, and the truth of its result."""

    x: np.ndarray
    t: np.ndarray
    where: np.ndarray | None
    scale: np.ndarray | None

    def operands(self, name):
        factor = 1.0 if self.scale is None else oracle.to64(self.scale)
        rows = oracle.rows(self.x, -1, self.where, factor)
        directed = np.where(rows.where, oracle.to64(self.x) * np.sign(factor), -np.inf)
        m = np.max(directed, -1, keepdims=True)
        m = np.where(np.isfinite(m), m, 0)
        values = {"x": self.x, "y": rows.y.astype(self.x.dtype), "t": self.t, "m": m.astype(np.float32)}
        values |= {"d": rows.d.astype(np.float32)} | ({"t": self.t[:, :1]} if name == "logsumexp_vjp" else {})
        operands = {own: values[own] for own in plans.operation_of(name).by_name if own in values}
        if self.where is not None and name in MASKABLE:
            operands["where"] = self.where
        return operands if self.scale is None else operands | {"scale": self.scale}

    def truth(self, name):
        scale = None if self.scale is None else oracle.to64(self.scale)
        factor = 1.0 if scale is None else scale
        scores, t, where = oracle.to64(self.x) * factor, oracle.to64(self.t), self.where
        kept = {
            "softmax": lambda: oracle.softmax(self.x, -1, where, scale),
            "softmax_jacobian": lambda: oracle.softmax_derivative(self.x, t, -1, where, scale, saved=self.x.dtype),
            "log_softmax": lambda: oracle.log_softmax(self.x, -1, where, scale),
            "log_softmax_jvp": lambda: oracle.log_softmax_tangent(self.x, t, -1, where, scale),
            "log_softmax_vjp": lambda: oracle.log_softmax_cotangent(self.x, t, -1, where, scale),
            "logsumexp": lambda: oracle.logsumexp(scores, -1, where, keepdims=True),
            "logsumexp_jvp": lambda: oracle.logsumexp_tangent(scores, t * factor, -1, where),
            "logsumexp_vjp": lambda: oracle.logsumexp_cotangent(scores, (t[:, :1] * factor)[:, 0], -1, where),
        }
        truth = kept[name]()
        if name != "logsumexp_jvp":
            return truth
        return oracle.Truth(truth.value[:, None], truth.budget[:, None])


# Each kernel with every second way to hold a row, by default with every fourth, in turn, and with a mask of rows.
PASSES = [
    pytest.param(name, kind, (i + j // 2) % 2 == 1, marks=cases.slow_unless((i + j) % 4 == 0))
    for (i, name), (j, kind) in itertools.product(enumerate(OPERATIONS), enumerate(RUNS))
    if (i + j) % 2 == 0
]


@pytest.mark.parametrize(("name", "kind", "is_masked"), PASSES)
def test_interpreted_kernels_are_right(name, kind, is_masked):
    shape, plan = RUNS[kind]
    dtype = "bfloat16" if is_masked and name not in ("logsumexp", "logsumexp_jvp") else "float32"
    arrays = cases.inputs((least_rows(name, kind, dtype), shape[1]), dtype)
    kinds = ("normal", "offset of 1e4", "wide", "some -inf")[: 3 if is_masked else 4]
    x = np.concatenate([arrays[own] for own in kinds])
    saved = Saved(x, np.clip(some(x.shape, dtype), -1, 1), np.arange(len(x))[:, None] % 3 != 0 if is_masked else None, None)
    result = kernels.interpreted(functools.partial(plans.run, name, rows=plan, dtype=dtype), saved.operands(name))
    assert result.dtype == jnp.dtype(dtype)
    assert oracle.error(result, saved.truth(name)) <= 1


def least_rows(name, kind, dtype):
    """The least number of rows that fill a block."""
    (n_rows, cols), plan = RUNS[kind]
    return n_rows if plan else plans.rows_of(name, cols, jnp.dtype(dtype).itemsize).block_rows


@pytest.mark.parametrize("kind", ["rows inside a warp", "a warpgroup a row", "looped"])
@pytest.mark.parametrize("name", STATEFUL)
def test_interpreted_states_are_those_of_the_reference(name, kind):
    shape, plan = RUNS[kind]
    shape = least_rows(name, kind, "float32"), shape[1]
    x = cases.inputs(shape, "float32")["offset of 1e4"]
    _, m, d = kernels.interpreted(functools.partial(plans.run, name, rows=plan, return_state=True), {"x": x})
    np.testing.assert_array_equal(m, np.max(x, -1, keepdims=True))
    assert oracle.error(d, oracle.denominator(x, -1, None, None)) <= 1


WHY_NOT = {
    "ragged columns": "what lies beyond the end of a row is left out in PTX",
    "ragged rows": "what lies beyond the last row is left out in PTX",
    "a mask": "masks are loaded in PTX, as their rows may repeat",
    "a scale": "exponents are made by a multiply-add that is written in PTX",
    "several warpgroups": "they wait for each other in PTX",
    "shared memory": "threads copy vectors to shared memory in PTX",
    "a cluster": "blocks write to each other's shared memory in PTX",
}
NOT_INTERPRETED = {
    "ragged columns": ((2, 1000), RowPlan(1000, 4, 128), {}),
    "ragged rows": ((15, 64), None, {}),
    "a mask": ((2, 1024), RowPlan(1024, 4, 128), {"where": np.ones((2, 1024), bool)}),
    "a scale": ((2, 1024), RowPlan(1024, 4, 128), {"scale": np.ones((1, 1), np.float32)}),
    "several warpgroups": ((2, 1024), RowPlan(1024, 4, 256), {}),
    "shared memory": ((2, 2048), RowPlan(2048, 4, 128, **SHARED), {}),
    "a cluster": ((2, 1024), RowPlan(1024, 4, 128, blocks=2), {}),
}


@pytest.mark.parametrize("kind", WHY_NOT)
def test_what_the_interpreter_refuses_it_still_refuses(kind):
    shape, plan, others = NOT_INTERPRETED[kind]
    operands = {"x": some(shape, "float32")} | others
    with pytest.raises(ValueError, match="does not support `inline_mgpu`"):
        kernels.interpreted(functools.partial(plans.run, "softmax", rows=plan), operands)


# Native.


@functools.cache
def program(name, shape, dtype, *, mask=None, scale=None, result=None, cast=False):
    """A compiled function of (x, t, c, where, scale) to (op, op of the jvp, tangent, cotangent).

    `mask` is a shape or None; `scale` is None, "one" or "rows", for one in each entry of the first axis. With `cast` the
    operand becomes float32 in the program.
    """
    options = {"implementation": "mosaic"} | ({} if result is None else {"dtype": result})

    def run(x, t, c, where, scale_value):
        def one(x, where, factor):
            more = options | ({} if factor is None else {"scale": factor})
            return OPS[name](x.astype(jnp.float32) if cast else x, where=where, **more)

        op = jax.vmap(one, (0, None if where is None else 0, 0)) if scale == "rows" else one

        def f(x):
            return op(x, where, scale_value)

        y, vjp = jax.vjp(f, x)
        again, tangent = jax.jvp(f, [x], [t])
        return f(x), again, tangent, vjp(c)[0], y

    out = dtype if result is None else result
    out = "float32" if cast and result is None else out
    c = shape[:-1] if name == "logsumexp" else shape
    avals = [shaped(*shape, dtype=dtype), shaped(*shape, dtype=dtype), shaped(*c, dtype=out)]
    avals.append(None if mask is None else shaped(*mask, dtype=bool))
    avals.append({None: None, "one": shaped(), "rows": shaped(shape[0])}[scale])
    lowered = jax.jit(run).lower(*avals)
    names = kernels.kernel_names(lowered.as_text())
    assert set(names) == set(NAMES[name]), names
    return lowered.compile()


def truths(name, x, t, c, where, scale, saved):
    """The truth of the results of `program`."""
    if name == "softmax":
        y = oracle.softmax(x, -1, where, scale)
        maps = [oracle.softmax_derivative(x, v, -1, where, scale, saved=saved) for v in (t, c)]
    elif name == "log_softmax":
        y = oracle.log_softmax(x, -1, where, scale)
        maps = [
            oracle.log_softmax_tangent(x, t, -1, where, scale),
            oracle.log_softmax_cotangent(x, c, -1, where, scale),
        ]
    else:
        y = oracle.logsumexp(x, -1, where)
        maps = [oracle.logsumexp_tangent(x, t, -1, where), oracle.logsumexp_cotangent(x, c, -1, where)]
    return [y, y, *maps, y]


def check(name, shape, dtype, kinds=None, *, mask=None, scale=None, result=None, cast=False, scales=(None,)):
    """Holds all results of a program against float64, on each kind of input and each scale.

    Derivatives are held only in rows whose weights are finite.
    """
    run = program(name, shape, dtype, mask=mask, scale=scale, result=result, cast=cast)
    out = "float32" if cast and result is None else dtype if result is None else result
    rng = np.random.default_rng(math.prod(shape))
    t = rng.standard_normal(shape).astype(jnp.dtype(dtype))
    c = rng.uniform(-1, 1, shape[:-1] if name == "logsumexp" else shape).astype(jnp.dtype(out))
    where = None
    if mask is not None:
        where = rng.random(mask) < 0.5
        where[(0,) * (len(mask) - 1)] = False  # rows with nothing to see
        whole = np.broadcast_to(where, shape)
    arrays = cases.inputs(shape, dtype)
    for kind, factor in itertools.product(arrays if kinds is None else kinds, scales):
        x = arrays[kind]
        factor64 = None
        if factor is not None:
            factor = np.asarray(factor, np.float32)
            factor64 = oracle.to64(factor).reshape((-1,) + (1,) * (len(shape) - 1) if factor.ndim else ())
        expected = truths(name, x, t, c, where, factor64, out)
        if where is not None:  # what is masked may hold anything
            x, t_in = (np.where(whole, a, np.asarray(np.nan, a.dtype)) for a in (x, t))
            c_in = c if name == "logsumexp" else np.where(whole, c, np.asarray(np.nan, c.dtype))
        else:
            t_in, c_in = t, c
        results = on_host(run(x, t_in, c_in, where, factor))
        finite = np.isfinite(oracle.rows(arrays[kind], -1, where, factor64).y).all(-1)
        labels = ("op", "op of the jvp", "tangent", "cotangent", "op of the vjp")
        for label, actual, truth in zip(labels, results, expected, strict=True):
            assert actual.dtype == jnp.dtype(dtype if label == "cotangent" else out)
            if label.endswith("tangent"):
                actual, truth = actual[finite], oracle.Truth(truth.value[finite], truth.budget[finite])
            error = oracle.error(actual, truth)
            assert error <= 1, f"{label} of {kind}, scale {factor}: {error:.3g} times the budget"


# Columns by dtype, and how many rows: enough to hit every entry of the tables; wide rows are few.
GRID = [
    *((dtype, cols, rows) for dtype in ("float32", "bfloat16") for cols, rows in [(1, 130), (2, 33), (3, 5), (7, 130)]),
    *((dtype, cols, rows) for dtype in ("float32", "bfloat16") for cols, rows in [(100, 33), (127, 3), (128, 130), (129, 5)]),
    *((dtype, cols, rows) for dtype in ("float32", "bfloat16") for cols, rows in [(1000, 33), (1001, 3), (2048, 3)]),
    *((dtype, cols, 3) for dtype in ("float32", "bfloat16") for cols in (8192, 10001, 12288, 16384, 20000, 32767, 32768)),
    *(("bfloat16", cols, 3) for cols in (4097, 20480, 24576)),
    *((dtype, cols, 130) for dtype in ("float32", "bfloat16") for cols in (5, 69, 136, 162)),  # through shared memory
    *(("bfloat16", cols, 7) for cols in (371, 540, 644, 1490, 1644, 2047)),
    ("float32", 999, 7),
    *(("float16", cols, rows) for cols, rows in [(7, 33), (129, 2), (1000, 5), (12288, 2), (32767, 1)]),
]


# Longer rows, of which fewer inputs are enough: clusters of every size, and rows that start at any element.
LONG = [
    *(
        (dtype, cols)
        for dtype in ("float32", "bfloat16")
        for cols in (32769, 49152, 50257, 65536, 77777, 128256, 151937, 262144)
    ),
    *((dtype, cols) for dtype in ("float32", "bfloat16") for cols in (300001, 400002, 2**20, 2**20 + 3)),
    *((NARROW[itemsize], cols) for itemsize, cols in LONGEST.items()),
    ("float16", 100278),
]


def test_the_grid_on_the_gpu_hits_every_way_to_hold_rows():
    sizes = {(cols, jnp.dtype(dtype).itemsize) for dtype, cols, *_ in (*GRID, *LONG)}
    tested = ways_hit((name, *size, False) for name in OPERATIONS for size in sizes)
    assert ways_hit(case for case in plans.everything() if not case[3] and case[1] > 1024) - tested == set()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "cols"), LONG)
@pytest.mark.parametrize("name", OPS)
def test_native_kernels_are_right_for_long_rows(name, dtype, cols):
    check(name, (5, cols), dtype, ("normal", "offset of 1e4", "some -inf", "-1e10 beyond the middle", "extremes"))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "cols", "rows"), GRID)
@pytest.mark.parametrize("name", OPS)
def test_native_kernels_are_right(name, dtype, cols, rows):
    check(name, (rows, cols), dtype)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 33, 130, 512])
@pytest.mark.parametrize(
    ("name", "dtype", "cols"), list(zip(OPS, ["float32", "bfloat16", "float16"], [64, 12, 256], strict=True))
)
def test_native_kernels_are_right_for_any_number_of_rows(name, dtype, cols, rows):
    check(name, (rows, cols), dtype)


LONGER_ALONG = [*ALONG, *((shape, (1,)) for shape in ((2, 50257, 24), (1, 70001, 40), (1, 131072, 32), (1, 400003, 3)))]
ALONG_AND_MASKED = [(shape, axes, mask) for shape, axes in LONGER_ALONG for mask in (None, shape)]
ALONG_AND_MASKED += [(shape, (2,), mask) for shape, mask in REPEATED]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axes", "mask"), ALONG_AND_MASKED)
@pytest.mark.parametrize("name", OPS)
def test_native_kernels_are_right_along_other_axes(name, shape, axes, mask, dtype):
    c_shape = tuple(size for axis, size in enumerate(shape) if axis not in axes) if name == "logsumexp" else shape
    t, c = some(shape, dtype), some(c_shape, dtype, seed=2)
    where = None if mask is None else np.random.default_rng(3).random(mask) < 0.7
    whole = None if mask is None else np.broadcast_to(where, shape)

    @jax.jit
    def run(x, t, c, where):
        def op(x):
            return getattr(jaxsoftmax, name)(x, axis=axes, where=where, implementation="mosaic")

        y, vjp = jax.vjp(op, x)
        return y, jax.jvp(op, [x], [t])[1], vjp(c)[0]

    kinds = ("normal", "offset of 1e4", "some -inf", "-1e10 beyond the middle") if mask in (None, shape) else ("normal",)
    for kind in kinds:
        x = cases.inputs(shape, dtype)[kind]
        if name == "softmax":
            maps = [oracle.softmax_derivative(x, v, axes, whole, saved=dtype) for v in (t, c)]
        else:
            maps = [getattr(oracle, f"{name}_{part}")(x, v, axes, whole) for part, v in (("tangent", t), ("cotangent", c))]
        for result, truth in zip(run(x, t, c, where), [getattr(oracle, name)(x, axes, whole), *maps], strict=True):
            assert oracle.error(np.asarray(result), truth) <= 1, kind


# Blocks of the grid that share rows, fewer and more than a row has slices: 9 of 8192 elements, the last of 5.
GRIDS = [1, 2, 7, 9, 40, 528]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", OPS)
def test_native_blocks_of_the_grid_never_wait_for_one_that_does_not_run(name):
    """One block alone does all tickets; the bits are those of many."""
    shape = (4, 8 * 8192 + 5)
    x, c = some(shape, "float32"), some(shape[:1] if name == "logsumexp" else shape, "float32", seed=2)

    def run(x, c):
        y, vjp = jax.vjp(functools.partial(OPS[name], implementation="mosaic"), x)
        return y, vjp(c)[0]

    results = []
    options = {} if name == "logsumexp" else {"scale": -0.3}
    where = np.random.default_rng(3).random(shape) < 0.7

    def scaled(x):
        return OPS[name](x, where=where, implementation="mosaic", **options)

    plan = RowPlan(shape[1], 4, 256, blocks=9, **SHARED)
    for blocks in GRIDS:
        with plans.planning(replace(plan, persistent_blocks=blocks)):
            results.append([*on_host(jax.jit(run)(x, c)), np.asarray(jax.jit(scaled)(x))])
        assert_same_bits(results[-1], results[0])
    plan = replace(plan, persistent_blocks=40)
    with plans.planning(plan):
        batched = jax.jit(jax.vmap(lambda x: OPS[name](x, implementation="mosaic")))(jnp.stack([x[:2], x[2:]]))
    assert np.asarray(batched).tobytes() == results[0][0].tobytes()
    if name == "softmax":  # a kernel by itself: the examples of a batch share no tickets
        one = jax.vmap(lambda x: plans.run("softmax", {"x": x}, rows=plan))
        assert np.asarray(jax.jit(one)(jnp.stack([x[:2], x[2:]]))).tobytes() == results[0][0].tobytes()
    truth = truths(name, x, x, c, None, None, "float32")
    assert oracle.error(results[0][0], truth[0]) <= 1
    assert oracle.error(results[0][1], truth[3]) <= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_native_blocks_of_the_grid_share_tiles_as_they_share_rows(name, dtype):
    """Tiles of 40 slices in three groups, the last slices with less or nothing, and every other tile with eight rows."""
    shape = (2, 4837, 40)
    x = cases.inputs(shape, dtype)["some -inf"]
    t = some(shape, dtype)
    c = some((2, 40) if name == "logsumexp" else shape, dtype, seed=2)
    where = np.random.default_rng(3).random(shape) < 0.7
    scales = {} if name == "logsumexp" else {"scale": np.float32(-0.7)}
    op = functools.partial(getattr(jaxsoftmax, name), axis=1, implementation="mosaic")

    def run(x, t, c, where):
        y, vjp = jax.vjp(op, x)
        return y, jax.jvp(op, [x], [t])[1], vjp(c)[0], op(x, where=where, **scales)

    results = []
    vector = 16 // jnp.dtype(dtype).itemsize
    plan = ColumnPlan(4837, 40, math.gcd(vector, 40), 128, lanes=32 // vector, blocks=40, **SHARED)
    for blocks in GRIDS:
        with plans.planning(replace(plan, persistent_blocks=blocks)):
            results.append(on_host(jax.jit(run)(x, t, c, where)))
        assert_same_bits(results[-1], results[0])
    if name == "softmax":
        maps = [oracle.softmax_derivative(x, v, (1,), saved=dtype) for v in (t, c)]
    else:
        maps = [getattr(oracle, f"{name}_{part}")(x, v, (1,)) for part, v in (("tangent", t), ("cotangent", c))]
    for result, truth in zip(results[0], [getattr(oracle, name)(x, (1,)), *maps], strict=False):
        assert oracle.error(result, truth) <= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("name", OPS)
def test_native_bits_of_shared_tiles_do_not_depend_on_other_rows(name):
    """Nor on which tile of the array it is."""
    op = jax.jit(functools.partial(getattr(jaxsoftmax, name), axis=1, implementation="mosaic"))
    x = some((1, 70001, 32), "float32")
    alone = np.asarray(op(x))
    many = np.asarray(op(np.concatenate([np.roll(x, 5, axis=2), some((2, 70001, 32), "float32", seed=2), x])))
    assert many[-1:].tobytes() == alone.tobytes()
    assert np.roll(many[:1], -5, axis=many.ndim - 1).tobytes() == alone.tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 131072), (3, 2**18), (3, 2**20 + 1), (1, 131072, 64)])
@pytest.mark.parametrize("name", OPS)
def test_native_bits_of_shared_rows_repeat_while_the_gpu_is_busy(name, dtype, shape):
    """Ten thousand launches of a kernel and of its derivative's, beside products of torch's on a stream of their own."""
    torch = pytest.importorskip("torch")
    x, c = jnp.asarray(some(shape, dtype)), jnp.asarray(some(shape, dtype, seed=2))
    if name == "logsumexp":
        c = c[:, 0]
    op = functools.partial(OPS[name], axis=1, implementation="mosaic")

    def both_ways(x):
        y, vjp = jax.vjp(op, x)
        return y, vjp(c)[0]

    @jax.jit
    def differing(x):
        first = both_ways(x)

        def again(i, count):
            same, x_again = lax.optimization_barrier((first, x))
            differ = [jnp.any(result != expected) for result, expected in zip(both_ways(x_again), same, strict=True)]
            return count + jnp.any(jnp.stack(differ)).astype(jnp.int32)

        return lax.fori_loop(0, 10_000, again, jnp.int32(0))

    stop = threading.Event()

    def keep_busy():
        with torch.cuda.stream(torch.cuda.Stream()):
            a = torch.randn(2048, 2048, device="cuda")
            while not stop.is_set():
                for _ in range(20):
                    a = (a @ a).clamp_(-1, 1)
                torch.cuda.current_stream().synchronize()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        assert int(differing(x)) == 0
    finally:
        stop.set()
        busy.join()


UNSCALED = ("normal", "offset of 1e4", "some -inf", "extremes")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", MASKS)
@pytest.mark.parametrize(("dtype", "cols"), [("bfloat16", 100), ("float32", 2049)])
@pytest.mark.parametrize("name", OPS)
def test_native_kernels_take_masks_of_every_shape(name, dtype, cols, kind):
    check(name, (2, 3, 4, cols), dtype, UNSCALED, mask=mask_shape(kind, cols))


WIDE = [
    ("float32", 4097),
    ("bfloat16", 12288),
    ("bfloat16", 16384),
    ("float32", 20001),
    ("bfloat16", 50257),
    ("float32", 131072),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "cols"), WIDE)
@pytest.mark.parametrize("name", OPS)
def test_native_kernels_take_masks_of_wide_rows(name, dtype, cols):
    kinds = ("offset of 1e4", "some -inf", "all -inf", "one +inf", "one NaN")
    check(name, (5, cols), dtype, kinds, mask=(5, cols))
    check(name, (2, 2, cols), dtype, kinds[:2], mask=(2, 1, cols))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", OPS)
def test_native_rows_of_more_slices_than_threads_take_masks_and_scales(name, dtype):
    shape = (3, 600_011)  # the second and the third row start inside a line of the cache
    plan = RowPlan(shape[1], 16 // jnp.dtype(dtype).itemsize, 128, blocks=300, persistent_blocks=40, **SHARED)
    with plans.planning(plan):
        for mask in (None, shape, (1, shape[1])):
            check(name, shape, dtype, ("normal",), mask=mask)
        if name != "logsumexp":
            check(name, shape, dtype, ("offset of 1e4",), scale="one", scales=(0.125,))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "nothing"), [("softmax", 0.0), ("log_softmax", -np.inf), ("logsumexp", -np.inf)])
def test_native_rows_with_nothing_to_see(name, nothing):
    f = jax.jit(lambda x, where: OPS[name](x, where=where, implementation="mosaic"))
    for cols, mask in [(100, (5, 100)), (100, (5, 1)), (2048, (5, 2048)), (2048, (5, 1))]:
        x = np.full((5, cols), np.nan, np.float32)
        np.testing.assert_array_equal(f(x, np.zeros(mask, bool)), nothing)


SCALES = (-3.0, 0.0, 0.125)
OF_ROWS = np.array([-3, 0, 0.125, 1, -0.5], np.float32)
SCALED = ("normal", "wide", "offset of 1e4", "offset of 1e6", "equal")


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("scale", ["one", "rows"])
@pytest.mark.parametrize(
    ("dtype", "cols"), [("float32", 64), ("bfloat16", 129), ("float32", 2050), ("bfloat16", 12288), ("float32", 2**20)]
)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_native_kernels_scale(name, dtype, cols, scale, masked):
    shape = (5, cols)
    scales = SCALES if scale == "one" else (OF_ROWS,)
    check(name, shape, dtype, SCALED, mask=shape if masked else None, scale=scale, scales=scales)
    if scale == "one":
        check(name, shape, dtype, ["some -inf"], mask=shape if masked else None, scale=scale, scales=(0.125,))


PAIRS = [("bfloat16", "float32"), ("float32", "bfloat16"), ("float16", "float32"), ("bfloat16", "float16")]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cols", [129, 12288])
@pytest.mark.parametrize(("dtype", "result"), PAIRS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_native_kernels_convert(name, dtype, result, cols):
    kinds = ("normal", "wide", "some -inf", "equal")
    check(name, (3, cols), dtype, kinds, result=result)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cols", [100, 16384])
@pytest.mark.parametrize("name", OPS)
def test_native_kernels_take_back_a_cast(name, cols):
    check(name, (3, cols), "bfloat16", ("normal", "wide", "some -inf"), cast=True)
    x = shaped(3, cols, dtype=jnp.bfloat16)
    (decision,) = explain(lambda x: OPS[name](x.astype(jnp.float32), implementation="mosaic"), x)
    assert (decision.operands, decision.implementation) == ((f"bfloat16[3,{cols}]",), "mosaic")


# Inside a warp, a warpgroup or several a row, a cluster, in shared memory, looped.
BITS = [
    *((dtype, cols, 33) for dtype in ("float32", "bfloat16") for cols in (69, 151, 322, 1001)),
    ("bfloat16", 1490, 33),
    *(("float32", cols, rows) for cols, rows in [(7, 130), (64, 130), (1001, 33), (2048, 3), (12288, 3), (20000, 3)]),
    *(("bfloat16", cols, rows) for cols, rows in [(100, 33), (2048, 3), (12288, 3), (16384, 3), (20000, 3), (24576, 3)]),
    *((dtype, cols, 3) for dtype in ("float32", "bfloat16") for cols in (9001, 12500, 50257, 131072, 262144, 439349)),
    *((NARROW[itemsize], cols, 3) for itemsize, cols in LONGEST.items()),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("dtype", "cols", "rows"), BITS)
@pytest.mark.parametrize("name", OPS)
def test_native_bits_repeat_and_do_not_depend_on_other_rows(name, dtype, cols, rows):
    x, t = cases.inputs((rows, cols), dtype)["wide"], some((rows, cols), dtype)
    c = t[:, 0] if name == "logsumexp" else t
    whole = program(name, (rows, cols), dtype)
    results = on_host(whole(x, t, c, None, None))
    for _ in range(3):
        assert_same_bits(whole(x, t, c, None, None), results)
    few = slice(1, 3) if rows == 3 else slice(5, 12)
    part = program(name, x[few].shape, dtype)
    assert_same_bits(part(x[few], t[few], c[few], None, None), [result[few] for result in results])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [69, 1490, 5001])
def test_native_batches_of_a_kernel_have_the_bits_of_each(cols, dtype):
    def softmax(x):
        return plans.run("softmax", {"x": x})

    for rows in (2, 3, 8):
        x = some((3, rows, cols), dtype)
        batched = np.asarray(jax.jit(jax.vmap(softmax))(x))
        assert batched.tobytes() == np.stack([np.asarray(softmax(part)) for part in x]).tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [7, 69, 322, 1001, 5001, 20011, 50257, 100277, 200019, 600011])
@pytest.mark.parametrize("name", OPS)
def test_native_bits_do_not_depend_on_which_row_of_the_array_it_is(name, dtype, cols):
    """Rows start at each place of a line of the cache, and an element is in each lane."""
    x, t = (np.tile(some((1, cols), dtype, seed), (131 if cols < 5000 else 67, 1)) for seed in (1, 2))
    for result in on_host(program(name, x.shape, dtype)(x, t, t[:, 0] if name == "logsumexp" else t, None, None)):
        assert len({row.tobytes() for row in result}) == 1


def assert_same_bits(actual, expected):
    for a, b in zip(on_host(actual), expected, strict=True):
        assert a.tobytes() == b.tobytes()


@st.composite
def calls(draw):
    name = draw(st.sampled_from(list(OPS)))
    dtype = draw(st.sampled_from(cases.DTYPES))
    cols = draw(st.integers(1, 4096) | st.integers(1, 200))
    shape = (*draw(st.sampled_from([(1,), (2,), (7,), (40,), (2, 3), (3, 1, 5)])), cols)
    mask = draw(st.none() | st.tuples(*(st.sampled_from([1, size]) for size in shape)))
    options = {"mask": mask}
    if name != "logsumexp":
        options["result"] = draw(st.none() | st.sampled_from(cases.DTYPES))
        options["scale"] = draw(st.sampled_from([None, "one", "rows"] if mask is None else [None, "one"]))
    scale = options.get("scale")
    numbers = draw(st.lists(st.sampled_from([-2.0, 0.5, 0.0, 1.0]), min_size=shape[0], max_size=shape[0]))
    scales = {None: None, "one": numbers[0], "rows": numbers}[scale]
    return name, shape, dtype, options, scales


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@settings(max_examples=25, deadline=None, derandomize=True)
@given(call=calls())
def test_native_kernels_take_random_combinations(call):
    name, shape, dtype, options, scales = call
    check(name, shape, dtype, ("normal", "wide", "equal"), scales=(scales,), **options)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def made(rows, cols, seed):
    """An array with another pattern in each row, made where it is needed: a few numbers that bfloat16 holds exactly."""
    row, col = (lax.broadcasted_iota(jnp.uint32, (rows, cols), axis) for axis in (0, 1))
    mixed = (row + jnp.uint32(seed)) * jnp.uint32(2654435761)
    mixed = (mixed ^ (mixed >> jnp.uint32(15)) ^ col) * jnp.uint32(2246822519)
    return ((mixed >> jnp.uint32(13)) % jnp.uint32(128)).astype(jnp.bfloat16) / jnp.bfloat16(16)


# More than 2^31 elements: a row a block; inside a warp with ragged columns; the same where tiles are exact, or rows end
# inside their vectors; clusters.
BIG = [(70000, 32768), (2**25 + 3, 65), (2**25, 128), (2**21 + 1, 1032), (2**21 + 1, 1027), (10737, 200019), (2**13 + 1, 2**18)]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("rows", "cols"), BIG)
def test_native_kernels_index_more_than_2_to_the_31_elements(rows, cols):
    assert rows * cols > 2**31
    middle = 2**31 // cols
    checked = jnp.asarray(sorted({0, 1, middle - 1, middle, min(middle + 1, rows - 1), rows // 2, rows - 2, rows - 1}))
    x, c = made(rows, cols, 0), made(rows, cols, 5)

    def pair(x, c):
        y, vjp = jax.vjp(functools.partial(jaxsoftmax.softmax, implementation="mosaic"), x)
        return y, vjp(c)[0]

    lowered = jax.jit(pair).lower(x, c)
    assert kernels.kernel_names(lowered.as_text()) == NAMES["softmax"][:2]
    y, dx = lowered.compile()(x, c)
    x, c, y, dx = (np.asarray(array[checked]) for array in (x, c, y, dx))
    assert len({row.tobytes() for row in x}) == len(x)
    assert oracle.error(y, oracle.softmax(x)) <= 1
    assert oracle.error(dx, oracle.softmax_derivative(x, c, saved="bfloat16")) <= 1


# A few rows of each kind: what compute-sanitizer is run over, as CONTRIBUTING.md says.
EACH_KIND = [
    ("float32", 5, 100),
    ("bfloat16", 64, 64),
    ("bfloat16", 131, 69),
    ("float32", 33, 322),
    ("bfloat16", 3, 1027),
    ("bfloat16", 5, 2049),
    ("float32", 3, 2048),
    ("bfloat16", 3, 16384),
    ("float32", 3, 20001),
    ("bfloat16", 3, 32768),
    ("float32", 3, 32768),
    ("bfloat16", 2, 50257),
    ("float32", 2, 131072),
    ("bfloat16", 2, 262145),
]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("name", "masked"), [*((k, False) for k in OPERATIONS), *((k, True) for k in MASKABLE)])
def test_one_of_each_kind(name, masked):
    for dtype, rows, cols in EACH_KIND:
        x, t = (some((rows, cols), dtype, seed) for seed in (0, 1))
        where = np.random.default_rng(2).random((rows, cols)) < 0.8 if masked else None
        saved = Saved(x, t, where, None)
        operands = saved.operands(name)
        if name == "logsumexp_vjp":
            operands["t"] = operands["t"].astype(np.float32)
        result = jax.jit(functools.partial(plans.run, name, dtype=dtype))(operands)
        assert oracle.error(result, saved.truth(name)) <= 1


# On several GPUs. They need all of one process.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("name", cases.OPS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(24, 131072), (33, 50256), (300, 8192), (64, 1024), (40, 2408), (1, 2**20)], ids=str)
@pytest.mark.parametrize("masked", [False, True], ids=["plain", "where"])
def test_native_rows_that_gpus_share_are_within_the_budget_and_have_the_same_bits(name, kind, dtype, shape, masked):
    """From 1 KiB of a row on each device kernels tell each other their states; below, a collective does."""
    devices = cases.several("gpu")
    mesh = jax.make_mesh((len(devices),), ("model",), axis_types=(kind,), devices=devices)
    rng = np.random.default_rng(0)
    x = jnp.asarray(with_hurtful_parts(shape) if shape[0] > 4 else rng.standard_normal(shape), dtype)
    x, t = np.asarray(x), np.asarray(jnp.asarray(rng.standard_normal(shape), dtype))
    where = rng.random(shape) < 0.8 if masked else None
    c = t if name != "logsumexp" else t[:, 0]
    op = functools.partial(getattr(jaxsoftmax, name), axis=-1)

    def both(x, c, *mask):
        y, pull = jax.vjp(functools.partial(op, where=mask[0] if mask else None), x)
        return y, pull(c)[0]

    with jax.set_mesh(mesh):
        args = [x, c, *([where] if masked else [])]
        args = [
            jax.device_put(a, NamedSharding(mesh, PartitionSpec(None, "model") if a.ndim == 2 else PartitionSpec()))
            for a in args
        ]
        compiled = jax.jit(both).lower(*args).compile()
        found, again = compiled(*args), compiled(*args)
    is_long = shape[1] * x.dtype.itemsize // len(devices) >= 1024 and name != "logsumexp"
    assert bool(collectives_of(compiled)[0]) != is_long
    assert [np.asarray(a).tobytes() for a in found] == [np.asarray(a).tobytes() for a in again]
    truths = {
        "softmax": lambda: (oracle.softmax(x, -1, where), oracle.softmax_derivative(x, c, -1, where, saved=dtype)),
        "log_softmax": lambda: (oracle.log_softmax(x, -1, where), oracle.log_softmax_cotangent(x, c, -1, where)),
        "logsumexp": lambda: (oracle.logsumexp(x, -1, where), oracle.logsumexp_cotangent(x, c, -1, where)),
    }
    finite = np.all(
        np.isfinite(oracle.to64(x)) | (np.arange(shape[0]) < 2)[:, None], -1
    )  # else a gradient is NaN, of what it is
    for actual, truth in zip(map(np.asarray, found), truths[name](), strict=True):
        assert oracle.error(actual[finite], oracle.Truth(truth.value[finite], truth.budget[finite])) <= 1


EXPORT = """
import sys
import jax
import jaxsoftmax

for place, shape, axis in zip(sys.argv[1:], {shapes}, {axes}):
    x = jax.ShapeDtypeStruct(shape, "bfloat16")

    def both(x, c):
        y, vjp = jax.vjp(lambda x: jaxsoftmax.softmax(x, axis), x)
        return y, vjp(c)[0]

    exported = jax.export.export(jax.jit(both), platforms=["cuda"])(x, x)
    assert exported.mlir_module().count("custom_call @mosaic_gpu") >= 2
    open(place, "wb").write(exported.serialize())
"""
EXPORTED = {(3, 2**18): -1, (2, 600_000): -1, (5, 50257): -1, (2, 50257, 64): 1}  # the axis, by shape


def exported_without_a_gpu(folder):
    """Where the programs of a process that sees no GPU are."""
    pytest.importorskip("flatbuffers", reason="JAX serializes exports with flatbuffers")
    places = [folder / str(number) for number in range(len(EXPORTED))]
    script = EXPORT.format(shapes=list(EXPORTED), axes=list(EXPORTED.values()))
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    subprocess.run([sys.executable, "-c", script, *map(str, places)], check=True, env=env)
    return [jax.export.deserialize(place.read_bytes()) for place in places]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_native_exports_from_a_machine_without_a_gpu_are_right(tmp_path):
    for exported, (shape, axis) in zip(exported_without_a_gpu(tmp_path), EXPORTED.items(), strict=True):
        x, c = some(shape, "bfloat16"), some(shape, "bfloat16", seed=2)
        y, dx = on_host(jax.jit(exported.call)(x, c))
        assert oracle.error(y, oracle.softmax(x, axis)) <= 1
        assert oracle.error(dx, oracle.softmax_derivative(x, c, axis, saved="bfloat16")) <= 1
