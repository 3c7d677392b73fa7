"""The kernels of the largest entries and of samples: lowered for CUDA on any machine, run on Hopper."""

import dataclasses
import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.top_k import mosaic_sm90 as mosaic
from jaxsoftmax.ops.top_k.mosaic_sm90 import sampling, warp_rows
from jaxsoftmax.ops.top_k.mosaic_sm90.long_rows import LongGradientPlan, LongRowsPlan, plan_sweeps
from jaxsoftmax.ops.top_k.mosaic_sm90.short_gradient import ShortGradientPlan
from jaxsoftmax.ops.top_k.mosaic_sm90.short_rows import ShortRowsPlan
from jaxsoftmax.ops.top_k.primitive import CATEGORICAL, SOFTMAX_TOP_K, SOFTMAX_TOP_K_JVP, SOFTMAX_TOP_K_VJP, TOP_K

from ..support import cases, kernels, oracle
from ..support.cross_entropy.oracle import log_probs as truth_of_log_probs
from ..support.top_k.cases import inputs, weights_of


def shaped(shape, dtype):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", cases.quick("float32", "bfloat16", "int32", slow=["float16", "uint32", "int8"]))
@pytest.mark.parametrize(("shape", "k"), [((512, 128256), 50), ((3, 50257), 1024), ((5, 1), 1), ((2, 3, 4097), 7)])
def test_the_largest_entries_are_lowered(shape, k, dtype):
    f = functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic")
    kernels.lowered_for_cuda(f, shaped(shape, dtype), kernels=["top_k_mosaic"])


@pytest.mark.parametrize("where", [(1, 1000), (3, 2, 1000), (3, 1, 1)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int32"])
def test_the_largest_entries_of_masked_rows_are_lowered(dtype, where):
    def f(x, where):
        return jaxsoftmax.top_k(x, 5, where=where, implementation="mosaic")

    text = kernels.lowered_for_cuda(f, shaped((3, 2, 1000), dtype), shaped(where, bool), kernels=["top_k_mosaic"])
    assert max(kernels.sizes(text, "i1", "i8", "ui8")) <= max(np.prod(where), 6)  # 6 rows


@pytest.mark.parametrize(("shape", "dtype", "scale"), [((64, 50257), "bfloat16", None), ((3, 1000), "float32", -0.5)])
def test_the_largest_weights_are_lowered_as_one_kernel(shape, dtype, scale):
    f = functools.partial(jaxsoftmax.softmax_top_k, k=8, scale=scale, return_lse=True, implementation="mosaic")
    kernels.lowered_for_cuda(f, shaped(shape, dtype), kernels=["top_k_mosaic"])


@pytest.mark.parametrize("normalize", ["all", "selected"])
def test_a_scale_for_each_row_runs_on_kernels(normalize):
    def f(x, scale):
        return jaxsoftmax.softmax_top_k(x, 8, scale=scale, normalize=normalize, return_lse=True)

    for shape, of_rows in (((64, 50257), (64,)), ((64, 4, 64), (4,))):
        explanation = jaxsoftmax.explain(f, shaped(shape, "bfloat16"), shaped(of_rows, "float32"), gpu="h100")
        kernels.assert_ran(explanation, "mosaic")


SHORT = "top_k_of_short_rows_mosaic"
SHORT_GRADIENT = "softmax_top_k_vjp_of_short_rows_mosaic"
COLS = (8, 16, 40, 60, 64, 100, 128, 256, 264, 300, 508, 512)  # of 264, 300 and 508 lanes have different shares


# A dtype, columns and k: by default one k of two for each of two dtypes, by turns.
SHORT_CASES = [
    pytest.param(dtype, cols, k, marks=cases.slow_unless(i < 2 and j < 2 and (i + j + at) % 2 == 0))
    for i, dtype in enumerate(["float32", "bfloat16", "float16", "int32", "uint32"])
    for at, cols in enumerate(COLS)
    for j, k in enumerate([1, 8, 2, 5, 16])
]


def kernel_for(cols, dtype):
    """Returns the name of the kernel that finds the largest entries: the one for short rows if they are whole vectors."""
    return SHORT if cols * jnp.dtype(dtype).itemsize % 16 == 0 else "top_k_mosaic"


@pytest.mark.parametrize("rows", cases.quick(1000, slow=[1024]))
@pytest.mark.parametrize(("dtype", "cols", "k"), SHORT_CASES)
def test_the_largest_entries_of_short_rows_are_lowered(dtype, cols, k, rows):
    k = min(k, cols)
    f = functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic")
    kernels.lowered_for_cuda(f, shaped((rows, cols), dtype), kernels=[kernel_for(cols, dtype)])


# A dtype, columns, and what is asked for: by default pairwise, of few widths.
WEIGHTS_CASES = [
    pytest.param(dtype, cols, normalize, lse, marks=cases.slow_unless((dtype, cols, normalize, lse) in few))
    for few in [cases.pairwise(["float32", "bfloat16"], [64, 256], ["all", "selected"], [False, True])]
    for dtype in ("float32", "bfloat16", "float16")
    for cols in COLS
    for normalize in ("all", "selected")
    for lse in (False, True)
]


@pytest.mark.parametrize("rows", cases.quick(1000, slow=[1024]))
@pytest.mark.parametrize("k", [8, *cases.quick(slow=[1, 2, 5, 16])])
@pytest.mark.parametrize(("dtype", "cols", "normalize", "return_lse"), WEIGHTS_CASES)
def test_weights_of_short_rows_and_their_gradients_are_lowered(dtype, cols, normalize, return_lse, k, rows):
    def loss(x):
        weights, _, *lse = jaxsoftmax.softmax_top_k(x, min(k, cols), normalize=normalize, return_lse=return_lse)
        return sum(jnp.sum(jnp.sin(part.astype(jnp.float32))) for part in (weights, *lse))

    names = [SHORT, SHORT_GRADIENT]
    if kernel_for(cols, dtype) != SHORT:
        is_alone = normalize == "selected" and not return_lse
        names = ["top_k_mosaic", *([] if is_alone else ["logsumexp_vjp_mosaic"])]
    kernels.lowered_for_cuda(jax.grad(loss), shaped((rows, cols), dtype), kernels=names)


@pytest.mark.parametrize(
    ("dtype", "cols"),
    [
        pytest.param(dtype, cols, marks=cases.slow_unless((i + j) % 2 == 0))
        for i, dtype in enumerate(["bfloat16", "float16"])
        for j, cols in enumerate([64, 256, 512])
    ],
)
def test_a_router_in_float32_reads_narrower_logits_and_leaves_the_cast_out(dtype, cols):
    def loss(x):
        return jnp.sum(jnp.sin(jaxsoftmax.softmax_top_k(x.astype(jnp.float32), 8)[0]))

    kernels.lowered_for_cuda(jax.grad(loss), shaped((1000, cols), dtype), kernels=[SHORT, SHORT_GRADIENT])
    with kernels.hollow():
        forward, backward = explain(jax.grad(loss), shaped((1000, cols), dtype), platform="cuda")
    assert forward.operands == (f"{dtype}[1000,{cols}]",)
    assert f"{dtype}[1000,{cols}]" in backward.operands


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("options", "cols", "kernel"),
    [
        ({"scale": 0.5}, 64, "top_k_mosaic"),
        ({"where": np.arange(64) % 3 > 0}, 64, "top_k_mosaic"),
        ({}, 520, "top_k_mosaic"),
        ({"k": 17}, 64, "top_k_mosaic"),
        ({}, 62, "top_k_mosaic"),
    ],
)
def test_other_rows_have_the_kernel_for_long_ones(options, cols, kernel):
    f = functools.partial(jaxsoftmax.softmax_top_k, **{"k": 8, **options})
    assert kernel in kernels.kernel_names(kernels.lowered_for_cuda(f, shaped((1000, cols), "float32")))


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("options", "cols", "implementation"),
    [
        ({}, 64, "mosaic"),
        ({"normalize": "selected"}, 64, "mosaic"),
        ({"scale": 0.5}, 64, "mosaic"),
        ({"normalize": "selected", "scale": 0.5}, 64, "xla"),
        ({}, 5000, "mosaic"),
        ({"normalize": "selected"}, 5000, "xla"),
        ({"normalize": "selected", "implementation": "mosaic"}, 5000, "xla"),
    ],
)
def test_where_gradients_run(options, cols, implementation):
    def loss(x):
        return jnp.sum(jnp.sin(jaxsoftmax.softmax_top_k(x, 8, **options)[0]))

    forward, backward = explain(jax.grad(loss), jnp.zeros((16, cols)), platform="cuda")
    assert (forward.primitive, forward.implementation) == ("softmax_top_k", "mosaic")
    assert (backward.primitive, backward.implementation) == ("softmax_top_k_vjp", implementation), str(backward)
    if implementation == "xla" and "implementation" not in options:
        assert any("its kernel is for rows of up to 512 columns" in reason for _, reason in backward.refusals)


def test_a_cotangent_of_selected_weights_alone_needs_no_logits():
    """Also where they are at hand, narrower than the gradient: it was linearized together with that of the log-sum-exp."""

    def loss(theta, x):
        weights, _, lse = jaxsoftmax.softmax_top_k(x.astype(jnp.float32), 8, normalize="selected", return_lse=True)
        return jnp.sum(theta * weights) + jnp.sum(lse)

    def derivative(theta, x):
        return jax.jvp(lambda theta: jax.grad(loss, 1)(theta, x), (theta,), (theta,))[1]

    run, asked = ShortGradientPlan.run, []

    def noted(plan, **operands):
        asked.append(("b" in plan.names, "x" in plan.names))
        return run(plan, **operands)

    types = shaped((1000, 8), "float32"), shaped((1000, 64), "bfloat16")
    with mock.patch.object(ShortGradientPlan, "run", noted), kernels.anew():
        kernels.lowered_for_cuda(derivative, *types)
    assert (False, False) in asked
    assert (False, True) not in asked


@pytest.mark.parametrize("cols", range(4, 513, 4))
def test_rows_of_a_block_fit_into_shared_memory_and_lanes_meet_in_no_bank(cols):
    for itemsize in (2, 4):
        if not warp_rows.serves(cols, itemsize):
            continue
        plan = warp_rows.StagedRows(1000, cols, itemsize, warp_rows.rows_per_warp(cols * itemsize))
        assert plan.rows_per_warp * plan.lanes == 32
        assert plan.block_bytes <= 72 * 1024
        assert cols * itemsize <= plan.stride < cols * itemsize + 2 * 16 * plan.lanes
        for first in range(0, 32, 8):  # lanes that read a vector at a time
            places = {lane // plan.lanes * plan.stride // 16 + lane % plan.lanes for lane in range(first, first + 8)}
            assert len({place % 8 for place in places}) == 8


# Plans.


def plan_of(operation, types, **params):
    """The plan for operands of these types on an H100, or the refusal."""
    return mosaic.plan(operation.problem(operation, types, params), HOPPER)


def rows_of(rows, cols, dtype="float32", **more):
    return {"x": shaped((rows, cols), dtype), **more}


ROWS_OF_SAMPLES = {"row": shaped((64, 1), "uint32"), "key0": shaped((1, 1), "uint32"), "key1": shaped((1, 1), "uint32")}


@pytest.mark.parametrize(
    ("types", "k", "kind"),
    [
        (rows_of(1000, 64), 8, ShortRowsPlan),
        (rows_of(1000, 64, "int8"), 8, ShortRowsPlan),
        (rows_of(1000, 64), 17, LongRowsPlan),
        (rows_of(1000, 62), 8, LongRowsPlan),
        (rows_of(1000, 516), 8, LongRowsPlan),
        (rows_of(1000, 64, scale=shaped((1, 1), "float32")), 8, LongRowsPlan),
        (rows_of(1000, 64, where=shaped((1000, 64), bool)), 8, LongRowsPlan),
    ],
)
def test_rows_have_the_plan_of_their_kernel(types, k, kind):
    plan = plan_of(TOP_K, types, k=k, dtype=types["x"].dtype, return_state=False)
    assert type(plan) is kind
    assert plan.shared_memory <= HOPPER.shared_memory
    assert plan.describe()


def test_plans_say_how_long_rows_are_read():
    def sweeps_of(rows, cols, dtype, **params):
        return plan_of(SOFTMAX_TOP_K, rows_of(rows, cols, dtype), k=50, dtype=jnp.dtype(dtype), **params).sweeps

    values = {"normalize": "selected", "return_state": False}
    plan = sweeps_of(512, 128256, "bfloat16", **values)
    row_plan = plan.row_plan
    assert (row_plan.vector, row_plan.threads, row_plan.unroll, plan.copied, plan.blocks) == (8, 256, 2, 2, 1)
    assert sweeps_of(512, 128256, "float32", **values).copied == 0
    assert sweeps_of(1, 128256, "bfloat16", **values).blocks == 8
    plan = sweeps_of(1, 128256, "bfloat16", normalize="all", return_state=False)
    assert (plan.row_plan.vector, plan.row_plan.threads, plan.copied, plan.slices) == (4, 128, 0, 4)
    assert not plan.row_plan.is_joined
    assert sweeps_of(1, 50257, "bfloat16", normalize="all", return_state=False).row_plan.is_joined


def test_masked_rows_have_their_state_from_a_plan_of_softmax():
    types = rows_of(8, 5000, where=shaped((8, 5000), bool))
    params = {"k": 8, "dtype": jnp.dtype("float32")}
    assert plan_of(SOFTMAX_TOP_K, types, normalize="all", return_state=False, **params).state is not None
    plan = plan_of(SOFTMAX_TOP_K, types, normalize="selected", return_state=False, **params)
    assert (plan.state, plan.parts) == (None, 0)
    plan = plan_of(SOFTMAX_TOP_K, rows_of(8, 5000), normalize="all", return_state=False, **params)
    assert (plan.state, plan.parts) == (None, 2)


def gradient_types(rows, cols, k, x="float32", c="float32"):
    types = {name: shaped((rows, 1), "float32") for name in ("m", "d")}
    entries = {"indices": shaped((rows, k), "int32"), "c": shaped((rows, k), c)}
    return types | entries | {"x": shaped((rows, cols), x)}


def plan_of_gradient(types, cols, dtype="float32", normalize="all"):
    return plan_of(SOFTMAX_TOP_K_VJP, types, size=cols, normalize=normalize, dtype=jnp.dtype(dtype), scale_tangent=False)


def test_gradients_have_the_plan_of_their_kernel():
    short = plan_of_gradient(gradient_types(1000, 64, 8), 64)
    assert type(short) is ShortGradientPlan
    assert short.names == ("indices", "c", "m", "d", "x")
    assert short.places == [short.staged.block_bytes]  # the gradient takes the place of `x`
    narrow = plan_of_gradient(gradient_types(1000, 64, 8, x="bfloat16"), 64)
    assert narrow.places == [narrow.staged.block_bytes, narrow.staged_x.block_bytes]
    params = {"size": 5000, "normalize": "all", "dtype": jnp.dtype("float32"), "scale_tangent": False}
    problem = SOFTMAX_TOP_K_VJP.problem(SOFTMAX_TOP_K_VJP, gradient_types(16, 5000, 8), params)
    assert type(mosaic.plan(problem, HOPPER)) is LongGradientPlan
    refusal = mosaic.plan(dataclasses.replace(problem, fused=frozenset(["x"])), HOPPER)
    assert "XLA computes logsumexp_vjp together with what produces its operand" in refusal.reason
    assert type(refusal.plan) is LongGradientPlan
    selected = gradient_types(16, 5000, 8) | {"weights": shaped((16, 8), "float32")}
    refusal = plan_of_gradient(selected, 5000, normalize="selected")
    assert isinstance(refusal, Refusal)
    assert refusal.lacks_kernel


def test_operations_without_a_kernel_are_left_to_the_reference():
    types = gradient_types(16, 64, 8) | {"t": shaped((16, 64), "float32")}
    params = {"normalize": "all", "return_mean": False, "dtype": jnp.dtype("float32"), "scale_tangent": False}
    refusal = plan_of(SOFTMAX_TOP_K_JVP, types, **params)
    assert refusal == Refusal("it has no kernel for softmax_top_k_jvp", lacks_kernel=True)


def test_samples_have_a_plan_for_each_kernel_that_their_filters_need():
    one = {name: shaped((1, 1), "float32") for name in ("top_p", "min_p", "inverse")}

    def plan(*names, return_state=False):
        types = rows_of(64, 50257) | ROWS_OF_SAMPLES | {name: one[name] for name in names}
        return plan_of(CATEGORICAL, types, return_state=return_state)

    assert [plan().parts, plan(return_state=True).parts, plan("top_p").parts, plan("min_p").parts] == [0, 2, 1, 0]
    assert plan("min_p").state is not None
    assert plan("inverse").check is None
    both = plan("top_p", "min_p")
    assert both.state is None
    assert both.check == sampling.plan_check(64, 50257, 4, HOPPER)
    assert both.redraw.clusters * both.redraw.sweeps.blocks <= 2 * HOPPER.multiprocessors
    assert both.shared_memory <= HOPPER.shared_memory


def test_samples_of_more_than_the_largest_1024_are_left_to_the_reference():
    """Also where the kernels are asked for: none of them looks at `top_k`."""

    def f(x, k=2000, **options):
        return jaxsoftmax.categorical(jax.random.key(0), x, top_k=k, **options)

    (decision,) = explain(f, jnp.zeros((2, 5000)), platform="cuda")
    assert (decision.implementation, decision.refusals) == ("xla", (("mosaic", "it takes no top_k"),))
    decisions = explain(functools.partial(f, implementation="mosaic"), jnp.zeros((2, 5000)), jnp.int32(9), platform="cuda")
    assert {decision.primitive: decision.implementation for decision in decisions} == {"top_k": "mosaic", "categorical": "xla"}


SAMPLED = [
    ({}, ["categorical_mosaic"]),
    ({"temperature": 0.7}, ["categorical_mosaic"]),
    ({"top_k": 50}, ["top_k_mosaic"]),
    ({"top_p": 0.9}, ["categorical_mosaic", "categorical_check_mosaic", "categorical_again_mosaic"]),
    ({"min_p": 0.1}, ["logsumexp_forward_mosaic", "categorical_mosaic"]),
]


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "names"),
    [
        pytest.param(*rows, *sampled, marks=cases.slow_unless((i + j) % 2 == 0))  # by default each options, by turns
        for i, rows in enumerate([((64, 50257), "bfloat16"), ((3, 1000), "float32")])
        for j, sampled in enumerate(SAMPLED)
    ],
)
def test_samples_are_lowered(shape, dtype, options, names):
    def f(x):
        return jaxsoftmax.categorical(jax.random.key(0), x, implementation="mosaic", **options)

    kernels.lowered_for_cuda(f, shaped(shape, dtype), kernels=names)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"k": 2000}, "k must be from 1 to 1024, got 2000"),
        ({"k": 1}, "XLA's argmax is faster at so few elements"),
    ],
)
def test_what_there_is_no_kernel_for_says_why(options, reason):
    f = functools.partial(jaxsoftmax.top_k, **options)
    (decision,) = explain(f, jnp.zeros((2, 4000)), platform="cuda")
    assert decision.implementation == "xla"
    assert ("mosaic", reason) in decision.refusals


def test_masked_samples_are_left_to_the_reference():
    def f(x):
        return jaxsoftmax.categorical(jax.random.key(0), x, where=np.arange(4000) % 2 > 0)

    (decision,) = explain(f, jnp.zeros((2, 4000)), platform="cuda")
    assert decision.implementation == "xla"
    assert ("mosaic", "it takes no where") in decision.refusals


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("f", "primitive"),
    [
        (lambda x: jaxsoftmax.top_k(x * 2, 50), "top_k"),
        (lambda x: jaxsoftmax.softmax_top_k(x + 1, 8), "softmax_top_k"),
        (lambda x: jaxsoftmax.softmax_top_k(x.astype(jnp.int32), 8), "softmax_top_k"),
        (lambda x: jaxsoftmax.categorical(jax.random.key(0), x[::2], top_p=0.9), "categorical"),
    ],
)
def test_what_would_be_sorted_is_written_for_the_kernels(f, primitive):
    (decision,) = explain(f, jnp.zeros((8, 5000)), platform="cuda")
    assert (decision.primitive, decision.implementation) == (primitive, "mosaic"), str(decision)


@pytest.mark.parametrize(
    ("f", "reason"),
    [
        (lambda x: jaxsoftmax.top_k(x * 2, 1), "XLA computes top_k together with what produces its operand"),
        (lambda x: jaxsoftmax.categorical(jax.random.key(0), x + 1), "XLA computes categorical together with what produces"),
        (
            lambda x: jaxsoftmax.categorical(jax.random.key(0), x[0], shape=(9,)),
            "a copy of the logits for each of their samples",
        ),
    ],
)
def test_what_xla_only_searches_is_left_to_it(f, reason):
    (decision,) = explain(f, jnp.zeros((8, 5000)), platform="cuda")
    assert decision.implementation == "xla"
    assert any(name == "mosaic" and reason in why for name, why in decision.refusals), str(decision)


def test_a_limit_that_no_kernel_has_is_refused_where_one_is_forced():
    with pytest.raises(
        NotImplementedError, match="categorical: implementation='mosaic' cannot run: top_k must be 1024 or less"
    ):
        jaxsoftmax.categorical(jax.random.key(0), jnp.zeros((2, 5000)), top_k=2000, implementation="mosaic")


@pytest.mark.gpu
@pytest.mark.parametrize("cols", [3, 70, 50257])
def test_samples_of_rows_that_hurt_are_those_of_the_reference(cols):
    """Rows have nothing to see, or overflow at the temperature: no search may go on without end."""
    normal = np.random.default_rng(0).standard_normal(cols).astype(np.float32)
    rows = [np.full(cols, -np.inf), np.full(cols, 0.5), -3.4e38 + 1e37 * np.abs(normal), 3e38 * np.sign(normal), 1e-3 * normal]
    rows.append(np.where(np.arange(cols) == cols - 1, 0.0, -np.inf))
    rows.append(np.where(np.arange(cols) % 2, 0.0, -0.0))
    x, key = jnp.asarray(np.stack(rows), jnp.float32), jax.random.key(3)
    for options in (
        {},
        {"temperature": 0.5},
        {"temperature": 0.0},
        {"temperature": 0.5, "top_p": 0.9},
        {"top_p": 0.3, "min_p": 0.2},
        {"temperature": 2.0, "top_p": 0.7, "min_p": 1.0},
        {"min_p": 0.5},
        {"top_k": 2, "top_p": 0.4},
        {"top_p": jnp.linspace(0.1, 1.2, len(rows)), "min_p": jnp.linspace(-0.5, 1, len(rows))},
    ):
        f = functools.partial(jaxsoftmax.categorical, **options)
        cases.assert_ran("mosaic", functools.partial(f, implementation="mosaic"), key, x)
        found, expected = (np.array(jax.jit(functools.partial(f, implementation=name))(key, x)) for name in ("mosaic", "xla"))
        if "top_k" in options:
            expected[-1] = 1  # the first 0. In long rows on a GPU XLA's `top_k` takes 0 and -0 as equal.
        np.testing.assert_array_equal(found, expected, str(options))


@pytest.mark.gpu
@pytest.mark.parametrize(("rows", "cols"), [(5000, 300), (130, 9000), (3, 40000)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rows_that_are_drawn_again_are_those_of_the_reference(dtype, rows, cols):
    """Many are with a small `top_p`, more than run at a time, and more than a block counts at a time."""
    x = jnp.asarray(2 * np.random.default_rng(0).standard_normal((rows, cols)), dtype)
    key, f = jax.random.key(5), functools.partial(jaxsoftmax.categorical, top_p=0.2)
    found, expected = (jax.jit(functools.partial(f, implementation=name))(key, x) for name in ("mosaic", "xla"))
    assert np.mean(found != expected) < 1 / 1000  # except where scores come as close as rounding


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [300, 5000, 50257, 50260])
def test_sums_of_rows_that_start_inside_of_a_line(cols, dtype):
    """Two sums go through the same shared memory, and neither has a part of the other."""
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((600, cols)), dtype)
    options = {"top_p": 0.9, "return_log_prob": True}
    f = jax.jit(functools.partial(jaxsoftmax.categorical, jax.random.key(1), implementation="mosaic", **options))
    index, found = f(x)
    whole = jax.nn.log_softmax(x.astype(jnp.float32), axis=-1)
    expected = np.take_along_axis(np.asarray(whole), np.asarray(index)[:, None], -1)[:, 0]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
    for again in (f(x) for _ in range(5)):
        np.testing.assert_array_equal(again[1], found)


@pytest.mark.parametrize("rows", [1, 3, 64, 528, 5000])
def test_a_row_has_as_many_sweeps_as_blocks_at_least(rows):
    for cols in (1, 100, 4096, 50257, 128256, 2**20):
        for itemsize in (2, 4):
            for has_state in (False, True):
                plan = plan_sweeps(rows, cols, itemsize, HOPPER, has_state)
                assert plan.blocks in (1, 2, 4, 8)
                assert plan.blocks <= max(1, plan.sweeps)
                assert plan.slices == (next((n for n in (8, 4, 2) if 6 * n <= plan.sweeps), 1) if has_state else 8)
                assert plan.slices % plan.blocks == 0
                assert plan.blocks == 1 or plan.blocks * rows <= 4 * HOPPER.multiprocessors
                assert plan.row_plan.is_joined == (has_state and cols % plan.row_plan.line != 0)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [1000, 50257, 128256])
def test_bits_of_a_row_do_not_depend_on_the_others(cols, dtype):
    """However many blocks share a row, and wherever in a line it starts."""
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((7, cols)), dtype)
    f = jax.jit(functools.partial(jaxsoftmax.softmax_top_k, k=20, return_lse=True, implementation="mosaic"))
    cases.assert_ran("mosaic", f, x)
    few, many = f(x), f(jnp.concatenate([x[:1]] * 5 + [x] * 100 + [x[:1]]))
    for a, b in zip(few, many, strict=True):
        for row in (0, 1, 2, 3, 4, 5, -1):
            np.testing.assert_array_equal(a[0], b[row])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["equal", "rising", "mostly -inf", "NaN of both signs", "few values", "lowest NaN"])
@pytest.mark.parametrize(
    ("shape", "k"), [((5, 50257), 50), ((2, 128256), 1), ((300, 5000), 100), ((2, 33001), 1024), ((4, 513), 513)]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_lists_that_fill_up(dtype, shape, k, kind):
    """Rows in which all is above the bound, or nothing is, or much is alike."""
    rng = np.random.default_rng(1)
    normal = rng.standard_normal(shape).astype(np.float32)
    signs = np.where(rng.random(shape) < 0.5, np.float32(np.nan), -np.float32(np.nan))
    x = {
        "equal": np.full(shape, 0.3, np.float32),
        "rising": np.broadcast_to(np.arange(shape[1], dtype=np.float32), shape),
        "mostly -inf": np.where(rng.random(shape) < 0.999, -np.inf, normal).astype(np.float32),
        "NaN of both signs": np.where(rng.random(shape) < 0.2, signs, normal).astype(np.float32),
        "few values": np.round(normal),
        "lowest NaN": np.full(shape, -1, np.int32).view(np.float32),
    }[kind]
    x = jnp.asarray(x).astype(dtype)
    f = jax.jit(functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic"))
    cases.assert_ran("mosaic", f, x)
    words = {2: np.int16, 4: np.int32}[x.dtype.itemsize]
    bits = np.asarray(x).view(words)
    keys = np.where(bits < 0, -(bits & np.iinfo(words).max).astype(np.int64) - 1, bits)  # in the order of all bits
    expected = np.argsort(-keys, axis=-1, kind="stable")[:, :k]
    values, indices = f(x)
    np.testing.assert_array_equal(indices, expected)
    np.testing.assert_array_equal(np.asarray(values).view(words), np.take_along_axis(bits, expected, -1))


def keys_of(x):
    """Integers in the order of the bits, of floats."""
    words = {2: np.int16, 4: np.int32}[x.dtype.itemsize]
    bits = np.asarray(x).view(words).astype(np.int64)
    return np.where(bits < 0, -(bits & np.iinfo(words).max) - 1, bits)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["alike in many bits", "ties", "NaN of both signs", "zeros", "mostly -inf", "equal"])
@pytest.mark.parametrize(("cols", "k"), [(8, 2), (64, 8), (64, 16), (264, 8), (512, 5), (40, 1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_short_rows_that_hurt(dtype, cols, k, kind):
    """A lane cannot order some entries by the bits that it keeps, and some pairs are not in the order of their columns."""
    rng, shape = np.random.default_rng(1), (5003, cols)
    normal = rng.standard_normal(shape).astype(np.float32)
    signs = np.where(rng.random(shape) < 0.5, np.float32(np.nan), -np.float32(np.nan))
    x = {
        "alike in many bits": 1 + rng.integers(0, 40, shape).astype(np.float32) * 2**-22,
        "ties": rng.integers(0, 4, shape).astype(np.float32),
        "NaN of both signs": np.where(rng.random(shape) < 0.01, signs, normal).astype(np.float32),
        "zeros": np.where(rng.random(shape) < 0.5, np.float32(0), -np.float32(0)),
        "mostly -inf": np.where(rng.random(shape) < 0.9, -np.inf, normal).astype(np.float32),
        "equal": np.full(shape, -0.3, np.float32),
    }[kind]
    x = jnp.asarray(x).astype(dtype)
    f = jax.jit(functools.partial(jaxsoftmax.top_k, k=k, implementation="mosaic"))
    cases.assert_ran("mosaic", f, x)
    assert kernels.kernel_names(f.lower(x).as_text()) == [SHORT]
    expected = np.argsort(-keys_of(x), axis=-1, kind="stable")[:, :k]
    values, indices = f(x)
    np.testing.assert_array_equal(indices, expected)
    words = {2: np.int16, 4: np.int32}[x.dtype.itemsize]
    np.testing.assert_array_equal(np.asarray(values).view(words), np.take_along_axis(np.asarray(x).view(words), expected, -1))


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize(
    ("shape", "k"), [((3001, 64), 8), ((515, 264), 8), ((777, 40), 5), ((130, 512), 16), ((129, 8), 2), ((200, 1024), 8)]
)
@pytest.mark.parametrize(
    ("dtype", "wide"), [("float32", None), ("bfloat16", None), ("float16", None), ("bfloat16", "float32")], ids=str
)
def test_weights_of_rows_and_their_gradients(dtype, wide, shape, k, normalize):
    """`wide` is what the logits are cast to, as a router's are: gradients are rounded to what they were before."""
    options = {"normalize": normalize, "return_lse": True, "implementation": "mosaic"}

    def weights(x):
        weights, indices, lse = jaxsoftmax.softmax_top_k(x if wide is None else x.astype(wide), k, **options)
        return (weights, lse), indices

    def gradient(x, c, b):
        return jax.vjp(weights, x, has_aux=True)[1]((c, b))[0]

    rng, arrays = np.random.default_rng(0), inputs(shape, dtype)
    c = jnp.asarray(rng.standard_normal((*shape[:-1], k)), wide or dtype)
    b = jnp.asarray(rng.standard_normal(shape[:-1]), jnp.float32)
    f = jax.jit(gradient)
    cases.assert_ran("mosaic", f, arrays["normal"], c, b)
    names = [SHORT, SHORT_GRADIENT] if shape[-1] <= 512 else ["top_k_mosaic", "logsumexp_vjp_mosaic"]
    assert kernels.kernel_names(f.lower(arrays["normal"], c, b).as_text()) == names
    for kind in ("normal", "wide", "outliers", "offset of 1e4", "ties", "some -inf", "equal"):
        x = arrays[kind]
        (found, lse), indices = jax.jit(weights)(x)
        expected, at, of_rows = weights_of(x, k, normalize)
        np.testing.assert_array_equal(indices, at, kind)
        assert oracle.error(found, expected) <= 1, kind
        assert oracle.error(lse, of_rows) <= 1, kind
        t = np.zeros(shape)
        np.put_along_axis(t, at, oracle.to64(c), -1)
        where = None
        if normalize == "selected":
            where = np.zeros(shape, bool)
            np.put_along_axis(where, at, True, -1)
        truth = oracle.softmax_derivative(x, t, where=where, saved=dtype)
        p = oracle.softmax(x)
        size = np.abs(oracle.to64(b))[:, None]
        value = truth.value + p.value * oracle.to64(b)[:, None]
        budget = truth.budget + p.budget * size + oracle.half_unit(dtype) * p.value * size
        assert oracle.error(f(x, c, b), oracle.Truth(value, budget)) <= 1, kind


@pytest.mark.gpu
@pytest.mark.parametrize("normalize", ["all", "selected"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_short_rows_without_a_distribution_have_the_gradients_of_the_reference(dtype, normalize):
    """NaN where the reference has it on a CPU, and nowhere else: on a GPU `lax.top_k` may have another order of NaN and -0."""
    c = np.random.default_rng(0).standard_normal((300, 8)).astype(dtype)

    def gradient(x, implementation):
        options = {"normalize": normalize, "implementation": implementation}
        return jax.vjp(lambda x: jaxsoftmax.softmax_top_k(x, 8, **options)[0], x)[1](jnp.asarray(c))[0]

    f = jax.jit(gradient, static_argnums=1)
    for kind, x in inputs((300, 64), dtype).items():
        found = f(x, "mosaic")
        with jax.default_device(jax.devices("cpu")[0]):
            expected = f(x, "xla")
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected), kind)
        tolerance = 1e-5 if dtype == "float32" else 4 * oracle.half_unit(dtype)
        pair = (oracle.to64(array) for array in (found, expected))
        np.testing.assert_allclose(*pair, rtol=tolerance, atol=tolerance, err_msg=kind)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [64, 256, 512])
def test_bits_of_a_short_row_do_not_depend_on_the_others(cols, dtype):
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((300, cols)), dtype)
    f = jax.jit(functools.partial(jaxsoftmax.softmax_top_k, k=8, return_lse=True, implementation="mosaic"))
    cases.assert_ran("mosaic", f, x)
    for a, b in zip(f(x), f(jnp.concatenate([x[7:], x[:7]])), strict=True):
        np.testing.assert_array_equal(a[7:], b[:-7])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [1000, 50257, 151936])
def test_samples_behind_a_factor_are_those_at_a_temperature(cols, dtype):
    x = jnp.asarray(3 * np.random.default_rng(0).standard_normal((64, cols)), dtype)
    divisor = np.linspace(0.25, 2.5, 64, dtype=np.float32)

    def behind(x):
        scores = x.astype(jnp.float32) / divisor[:, None]
        return jaxsoftmax.categorical(jax.random.key(3), scores, return_log_prob=True, implementation="mosaic")

    assert all(decision.plan.endswith(", times a factor") for decision in explain(behind, x))
    index, log_prob = map(np.asarray, jax.jit(behind)(x))
    at_temperature, _ = jaxsoftmax.categorical(jax.random.key(3), x, temperature=divisor, return_log_prob=True)
    assert np.mean(index == np.asarray(at_temperature)) >= 60 / 64  # a quotient and a product may differ in the last place
    expected = truth_of_log_probs(x, index, scale=1 / oracle.to64(divisor)[:, None]).log_p
    size = 8 * oracle.EPS * np.max(np.abs(oracle.to64(x)), -1) / divisor
    assert oracle.error(log_prob, oracle.Truth(expected.value, expected.budget + size)) <= 1
    if dtype != "float32":  # a kernel does not round a quotient of 16 bits
        narrow = jnp.asarray(divisor[:, None], dtype)
        of_quotient = functools.partial(jaxsoftmax.categorical, jax.random.key(3), implementation="mosaic")
        index = jax.jit(lambda x: of_quotient(x / narrow))(x)
        exact = jax.jit(lambda x: of_quotient(x.astype(jnp.float32) / narrow.astype(jnp.float32)))(x)
        np.testing.assert_array_equal(index, exact)
