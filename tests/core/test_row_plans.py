"""Plans of rows: data that says how a kernel distributes rows, before anything is lowered."""

import itertools
import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._core.target import ANY_HOPPER, HOPPER
from jaxsoftmax._gpu.rows.kernel import scratch_of
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage
from jaxsoftmax._gpu.rows.plans_sm90 import most_blocks, plan_rows
from jaxsoftmax._gpu.rows.staged import StagedPlan
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import losses
from jaxsoftmax.ops.softmax import mosaic_sm90 as softmax

from ..support.cross_entropy import plans as loss_plans
from ..support.softmax import plans

SHARED, NOWHERE = {"storage": Storage.SHARED}, {"storage": Storage.NOWHERE}

# The plan of an operation for a dtype and a shape, whose rows lie along axis 1, and what `explain` says of it.
WAYS = {
    "staged": (
        ("softmax", "bfloat16", (8192, 69)),
        StagedPlan(69, 4, 2, itemsize=2),
        "64 rows a block, 2 lanes a row, in registers through shared memory",
    ),
    "a warp": (
        ("softmax", "float32", (8192, 256)),
        RowPlan(256, 4, 32),
        "4 rows a block, 32 lanes a row, in registers",
    ),
    "a block": (
        ("softmax", "float32", (8192, 4096)),
        RowPlan(4096, 4, 128),
        "a block a row, 128 threads a block, rows in registers",
    ),
    "a block in shared memory": (
        ("softmax", "bfloat16", (8192, 12501)),
        RowPlan(12501, 8, 128, unroll=2, **SHARED),
        "a block a row, 128 threads a block, rows in shared memory",
    ),
    "a cluster": (
        ("softmax", "float32", (8192, 32768)),
        RowPlan(32768, 4, 512, blocks=2),
        "a cluster of 2 blocks a row, 512 threads a block, rows in registers",
    ),
    "a cluster in shared memory": (
        ("softmax", "bfloat16", (8192, 128256)),
        RowPlan(128256, 8, 128, blocks=16, unroll=2, **SHARED),
        "a cluster of 16 blocks a row, 128 threads a block, rows in shared memory",
    ),
    "nowhere": (
        ("logsumexp", "float32", (8192, 50257)),
        RowPlan(50257, 4, 128, unroll=4, is_stored=False, **NOWHERE),
        "a block a row, 128 threads a block, rows read in a loop",
    ),
    "nowhere, in a cluster": (
        ("logsumexp_vjp", "float32", (8, 2**20)),
        RowPlan(2**20, 4, 512, blocks=16, unroll=4, **NOWHERE),
        "a cluster of 16 blocks a row, 512 threads a block, rows read in a loop",
    ),
    "the grid": (
        ("softmax", "float32", (8, 2**20)),
        RowPlan(2**20, 4, 128, blocks=128, unroll=4, persistent_blocks=396, **SHARED),
        "128 slices a row over 396 blocks of the grid, 128 threads a block, rows in shared memory",
    ),
    "columns": (
        ("softmax", "float32", (8, 300, 128)),
        ColumnPlan(300, 128, 4, 128, lanes=8, unroll=2),
        "tiles of 32 neighbouring rows, 128 threads a block, rows in shared memory",
    ),
    "columns, in a cluster": (
        ("softmax", "float32", (2, 12000, 64)),
        ColumnPlan(12000, 64, 4, 256, lanes=8, blocks=16, unroll=2),
        "a cluster of 16 blocks a tile, tiles of 32 neighbouring rows, 256 threads a block, rows in shared memory",
    ),
    "columns, nowhere": (
        ("logsumexp", "float32", (8, 131072, 128)),
        ColumnPlan(131072, 128, 4, 128, lanes=4, blocks=16, unroll=4, **NOWHERE),
        "a cluster of 16 blocks a tile, tiles of 16 neighbouring rows, 128 threads a block, rows read in a loop",
    ),
    "columns over the grid": (
        ("softmax", "float32", (8, 131072, 128)),
        ColumnPlan(131072, 128, 4, 128, lanes=4, blocks=256, unroll=2, persistent_blocks=396),
        "256 slices a tile over 396 blocks of the grid, tiles of 16 neighbouring rows, 128 threads a block, rows in shared "
        "memory",
    ),
}


def planned(name, dtype, shape, **options):
    operands = plans.operands_of(name, shape, dtype, axes=(1,), t=dtype)
    return plans.plan_of(plans.problem_of(name, operands, axes=(1,), **options))


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_distribute_rows_has_its_plan(way):
    call, expected, words = WAYS[way]
    plan = planned(*call)
    assert (type(plan.row_plan), plan.row_plan) == (type(expected), expected)
    assert plan.describe() == plan.row_plan.describe() == words


@pytest.mark.parametrize(
    ("cols", "has_scale", "has_entropy", "steps"),
    [
        (1024, False, True, 0),
        (2048, True, True, 2),
        (4096, False, True, 2),
        (4104, False, True, None),
        (3000, True, False, 2),
        (3000, False, False, 2),
        (4096, True, False, None),
        (3001, True, True, 2),
    ],
)
def test_warps_hold_rows_of_16_bits_in_pieces_of_code(cols, has_scale, has_entropy, steps):
    operands = loss_plans.operands_of("cross_entropy", (8192, cols), "bfloat16")
    if has_scale:
        operands["scale"] = jax.ShapeDtypeStruct((8192, 1), "float32")
    problem = loss_plans.problem_of("cross_entropy", operands, dtype="float32", return_entropy=has_entropy)
    plan = loss_plans.plan_of(problem).row_plan
    assert (None if plan.takes_block else plan.unroll) == steps


def test_rows_that_devices_share_are_shared_by_the_grid():
    plan = planned("softmax", "bfloat16", (8192, 2048), devices=(("x", 4),))
    assert plan.row_plan == RowPlan(2048, 8, 128, blocks=1, unroll=4, persistent_blocks=HOPPER.multiprocessors * 16, **SHARED)
    refused = planned("softmax", "bfloat16", (8192, 256), devices=(("x", 4),))
    assert refused.reason == "one kernel for all devices pays from 1024 bytes of a row in each on, got 512"
    for name, shape in (("logsumexp", (8192, 2048)), ("softmax", (8, 2048, 64))):
        assert planned(name, "bfloat16", shape, devices=(("x", 4),)).reason.endswith("merges rows of this kind over devices")


def test_the_number_of_rows_does_not_matter():
    for name, cols in itertools.product(("softmax", "logsumexp"), (7, 69, 1024, 50257, 128256, 2**20)):
        assert len({planned(name, "bfloat16", (n_rows, cols)).row_plan for n_rows in (1, 2, 100, 8192)}) == 1


def test_a_row_takes_little_of_a_multiprocessor():
    for case in plans.everything():
        name, cols, itemsize, _ = case
        if isinstance(plan := plans.rows_of(*case), Refusal):
            continue
        step = plan.threads * plan.blocks * plan.vector
        if plan.takes_block:
            assert plan.steps * step - cols < step + plan.blocks * plan.line, case
        if plan.storage == Storage.SHARED:  # two blocks or more, except of the longest rows
            operands = 2 if name in ("softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp", "logsumexp_jvp") else 1
            assert plan.blocks >= 16 or plan.slot_elements * itemsize * operands <= HOPPER.shared_memory / 2
        elif plan.storage == Storage.REGISTERS and not isinstance(plan, StagedPlan):
            most = 256 if plan.unroll else 128  # in pieces of code, elements of 16 bits stay as they are in memory
            assert plan.steps * plan.vector * plan.rows_per_lanes * itemsize <= most + 16 + itemsize, case


def test_a_gpu_with_fewer_multiprocessors_gets_smaller_clusters():
    assert plans.rows_of("softmax", 2**18, 2).blocks == 16
    for small in (replace(HOPPER, multiprocessors=114), ANY_HOPPER):  # which may have fewer, too
        assert plans.rows_of("softmax", 2**18, 2, target=small).persistent_blocks > 0
        for case in plans.everything():
            plan = plans.rows_of(*case, target=small)
            assert isinstance(plan, Refusal) or plan.cluster <= 8
        for (cols, inner), itemsize in itertools.product([(131072, 128), (50257, 320), (12000, 64), (131072, 32)], (4, 2)):
            assert plans.rows_of("softmax", cols, itemsize, False, inner, small).cluster <= 8


def test_long_rows_along_another_axis_are_shared_by_the_grid_unless_they_are_held_nowhere():
    """Tiles are half a line of the cache wide, or wider."""
    for name, (cols, inner), itemsize in itertools.product(plans.OPERATIONS, [(131072, 128), (50257, 320)], (4, 2)):
        plan = plans.rows_of(name, cols, itemsize, False, inner)
        is_unheld = name.startswith("logsumexp")
        assert (plan.persistent_blocks == 0) == (plan.storage == Storage.NOWHERE) == is_unheld
        assert plan.width * itemsize >= 64


# A plan is never an error later: what it says fits the GPU.

SIZES = st.integers(0, 29).flatmap(lambda bits: st.integers(2**bits, min(2 ** (bits + 1), 2**30 - 1))) | st.sampled_from(
    [2**k + extra for k in range(2, 29) for extra in (-1, 0, 1)]
)
MULTIPROCESSORS = (78, 114, 132, 144)


@st.composite
def row_problems(draw):
    inner = draw(st.just(1) | st.integers(1, 4096))
    shape = draw(st.integers(1, 8192)), draw(SIZES), inner
    read = draw(st.lists(st.sampled_from([2, 4]), min_size=1, max_size=2))
    return RowProblem(
        shape if inner > 1 or draw(st.booleans()) else shape[:2],
        (1,),
        tuple(read),
        tuple(draw(st.lists(st.sampled_from([2, 4]), max_size=1))),
        has_mask=draw(st.booleans()),
        needs_end=draw(st.booleans()),
        reduces=draw(st.sampled_from(["state", "exponents", "sum", "nothing"])),
        n_exchanges=draw(st.integers(0, 2)),
        is_read_again=draw(st.booleans()),
        fits_registers=draw(st.booleans()),
        keeps_scores=draw(st.booleans()),
    )


TARGETS = st.sampled_from([ANY_HOPPER, *(replace(HOPPER, multiprocessors=count) for count in MULTIPROCESSORS)])


def bytes_of_shared_memory(plan, problem, is_staged):
    """The bytes that a block of a kernel allocates."""
    itemsizes = problem.read + problem.written if is_staged else problem.read if plan.storage == Storage.SHARED else ()
    if is_staged:
        return sum(math.prod(plan.slot_shape) * itemsize for itemsize in itemsizes)
    slots = [jnp.dtype(plans.NARROW[itemsize]) for itemsize in itemsizes]
    scratch = scratch_of(plan, slots)
    references = jax.tree.leaves(scratch, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    return sum(math.prod(reference.shape) * jnp.dtype(reference.dtype).itemsize for reference in references)


def check_fits(plan, problem, target):
    is_staged, is_columns = isinstance(plan, StagedPlan), isinstance(plan, ColumnPlan)
    assert plan.describe()
    assert "\n" not in plan.describe()
    assert is_columns == (problem.inner > 1)
    assert not (is_staged and problem.has_mask)  # it does not know the columns of its elements
    # Threads.
    if is_columns or plan.takes_block:
        assert plan.threads in range(128, 1025, 128)
    else:
        assert plan.threads in (1, 2, 4, 8, 16, 32)
        assert plan.storage == Storage.REGISTERS
    assert plan.vector in (1, 2, 4, 8)
    assert is_staged or plan.vector * problem.widest <= 16
    assert plan.unroll > 0 if plan.storage != Storage.REGISTERS else plan.unroll <= 2
    # Every element has its thread.
    if is_columns:
        assert plan.lanes in (1, 2, 4, 8, 16)
        assert problem.inner % plan.vector == 0
        assert plan.steps * plan.threads // plan.lanes * plan.blocks >= problem.cols
    else:
        assert plan.steps * plan.step_cols * plan.blocks >= problem.cols
        assert is_staged or plan.takes_block or problem.cols % plan.vector == 0
        if plan.storage == Storage.REGISTERS:  # of one operand, in bytes
            most = 16 * plan.vector * problem.widest if is_staged else 256 if plan.unroll else 128
            assert plan.steps * plan.vector * plan.rows_per_lanes * problem.widest <= most + 32
    # Blocks.
    if plan.persistent_blocks:
        assert plan.storage == Storage.SHARED
        assert plan.blocks <= plan.stages * plan.persistent_blocks
    else:
        assert plan.blocks <= most_blocks(target) <= 16
    # Shared memory: of a block, and of those that are on a multiprocessor at a time.
    needed = bytes_of_shared_memory(plan, problem, is_staged)
    assert needed <= target.shared_memory
    if plan.persistent_blocks:
        per_multiprocessor, rest = divmod(plan.persistent_blocks, target.multiprocessors)
        assert rest == 0
        assert per_multiprocessor * (needed + 1024) <= target.shared_memory + 1024  # CUDA takes 1 KiB for each block


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(row_problems(), TARGETS, st.booleans())
def test_random_rows_have_a_plan_that_fits_or_a_refusal(problem, target, devices):
    plan = plan_rows(problem, target, devices=devices and problem.inner == 1)
    if isinstance(plan, Refusal):
        assert plan.reason.startswith(f"rows of {problem.cols} entries ")
        assert plan.plan is None
    else:
        assert hash(plan) == hash(replace(plan))
        check_fits(plan, problem, target)


DTYPES = st.sampled_from(["float32", "bfloat16", "float16", "float8_e5m2", "complex64"])


@settings(max_examples=300, deadline=None, derandomize=True)
@given(st.data())
def test_random_calls_have_a_plan_or_a_refusal(data):
    """Calls have any number of axes and entries, and masks and scales that broadcast along any of them."""
    shape = tuple(data.draw(st.lists(st.sampled_from([0, 1, 2, 7, 64, 1000, 50257]), min_size=1, max_size=4)))
    axes = tuple(sorted(data.draw(st.sets(st.sampled_from(range(len(shape))), min_size=1))))
    mask, scale = (data.draw(st.none() | st.tuples(*(st.sampled_from([1, size]) for size in shape))) for _ in range(2))
    name, target = data.draw(st.sampled_from(plans.OPERATIONS)), data.draw(TARGETS)
    operands = plans.operands_of(name, shape, data.draw(DTYPES), axes=axes, scale=scale, t=data.draw(DTYPES))
    if mask is not None and name in plans.MASKABLE:
        operands["where"] = jax.ShapeDtypeStruct(mask, bool)
    devices = data.draw(st.sampled_from([(), (("x", 2),)]))
    problem = plans.problem_of(name, operands, axes=axes, dtype=data.draw(DTYPES), devices=devices)
    check_plan(softmax.plan(problem, target), softmax.SoftmaxPlan, target)
    if len(axes) == 1 and not devices:
        name = data.draw(st.sampled_from(list(loss_plans.PARAMS)))
        mask = mask if name != "cross_entropy_gradient" else None
        operands = loss_plans.operands_of(name, shape, data.draw(DTYPES), axis=axes[0], mask=mask)
        soft_cap = data.draw(st.sampled_from([None, 30.0]))
        dtype = "float32" if name == "cross_entropy_gradient" else data.draw(DTYPES)  # of losses, which are computed in it
        problem = loss_plans.problem_of(name, operands, axis=axes[0], dtype=dtype, soft_cap=soft_cap)
        check_plan(losses.plan(problem, target), losses.LossPlan, target)


def check_plan(plan, kind, target):
    if isinstance(plan, Refusal):
        assert plan.reason
        assert "\n" not in plan.reason
        plan = plan.plan
    if plan is not None:
        assert isinstance(plan, kind)
        assert plan.remark is None
        check_fits(plan.row_plan, plan.problem.rows, target)
