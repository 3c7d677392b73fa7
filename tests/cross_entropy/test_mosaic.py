"""The kernels of cross-entropy on Hopper: lowered here, and held against float64 where there is such a GPU."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.primitive import bind
from jaxsoftmax._gpu.rows.tile import RowTile
from jaxsoftmax.ops.cross_entropy import xla
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY_GRADIENT, CROSS_ENTROPY_VJP

from ..support import cases, kernels, oracle
from ..support.cross_entropy import plans
from ..support.cross_entropy.cases import OPTIONS, labelled, together, with_gradient, without_ignored
from ..support.cross_entropy.oracle import cross_entropy as truth

# Columns by how a row is held: inside a warp, through shared memory, by a block, by clusters, by the grid.
WIDTHS = [1, 37, 100, 1000, 1024, 2049, 5001, 8192, 12500, 32768, 50257, 128256, 128003, 200019, 400003, 2**20 + 1]
LONGEST = 2**23 + 3
LONGEST_TOGETHER = 2**22 + 3  # the grid holds no more than two thirds of what fits
NAMES = ["cross_entropy_forward_mosaic", "cross_entropy_vjp_mosaic"]


def mosaic(**options):
    return functools.partial(jaxsoftmax.cross_entropy, implementation="mosaic", **options)


def each_way_to_hold_rows():
    """Shapes with each dtype and options: by default each shape with all options, and the others with a shape in turn."""
    shapes = [((64, 37), -1), ((8, 1024), -1), ((3, 50257), -1), ((2, 400003), -1), ((2, 701, 40), 1)]
    for (i, (shape, axis)), dtype, options in itertools.product(
        enumerate(shapes), ["float32", "bfloat16"], ["plain", "all", "where"]
    ):
        is_quick = options == "all" or (options == "where" and i % 2 == 0) or (options == "plain" and i == 1)
        yield pytest.param(shape, axis, dtype, options, marks=cases.slow_unless(dtype == "bfloat16" and is_quick))


@pytest.mark.parametrize(("shape", "axis", "dtype", "options"), list(each_way_to_hold_rows()), ids=cases.ident)
def test_kernels_are_lowered(shape, axis, dtype, options):
    x, labels = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(np.delete(shape, axis), jnp.int32)
    where = np.ones(shape, bool) if options == "where" else None
    f = mosaic(axis=axis, where=where, **OPTIONS.get(options, {}))
    both = jax.value_and_grad(lambda x, labels: jnp.sum(f(x, labels)))
    kernels.lowered_for_cuda(both, x, labels, kernels=NAMES)


@pytest.mark.parametrize("return_total", [False, True])
def test_interpreted_states_of_masked_rows_are_those_of_the_reference(return_total):
    """Of rows inside a warp; what else a loss takes is read, or computed, in PTX."""
    rng = np.random.default_rng(0)
    x, labels = rng.standard_normal((16, 128), np.float32), rng.integers(0, 128, (16, 1), np.int32)
    params = {"axes": (1,), "dtype": jnp.float32, "soft_cap": None, "return_total": return_total, "return_state": True}
    where = np.arange(16)[:, None] % 3 > 0
    problem_of = functools.partial(plans.problem_of, "cross_entropy", return_total=return_total, return_state=True)
    operands = {"x": x, "labels": labels, "where": where}
    found = kernels.interpreted(functools.partial(plans.run, problem_of), operands)
    for actual, expected in zip(found, xla.cross_entropy(x, labels, where, **params), strict=True):
        np.testing.assert_allclose(actual[where], expected[where], rtol=1e-5, atol=1e-5)
    assert np.all(np.isneginf(found[1][~where]))
    assert not np.any(found[-1][~where])


def test_smoothing_under_a_mask_has_no_kernel_for_long_rows():
    x, labels = jax.ShapeDtypeStruct((2, 400003), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    f = mosaic(label_smoothing=0.1, where=np.ones((1, 400003), bool))
    with pytest.raises(NotImplementedError, match="sum of the scores, which smoothing needs, for rows of 400003"):
        kernels.lowered_for_cuda(f, x, labels)
    of_rows = mosaic(label_smoothing=0.1, where=np.array([True, False]))
    kernels.lowered_for_cuda(of_rows, x, labels, kernels=NAMES[:1])


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    ("shape", "axis", "options"),
    [
        ((3, 1000, 40), 1, "all"),
        pytest.param((3, 1000, 40), 1, "plain", marks=pytest.mark.slow),  # of no smoothing there is less to lower
        ((4, 2**18, 64), 1, "plain"),
        ((2**20, 3), 0, "plain"),
    ],
    ids=cases.ident,
)
def test_the_kernel_of_losses_and_gradients_is_lowered_along_other_axes(shape, axis, dtype, options):
    row = tuple(1 if i == axis else size for i, size in enumerate(shape))
    smoothing = 0.1 if options == "all" and shape[axis] < 2**18 else 0.0
    given = [(shape, dtype), (row, "int32"), (row, "float32")]
    params = {"soft_cap": None, "label_smoothing": smoothing, "z_loss": 0.0, "implementation": "mosaic"}

    def f(x, labels, t):
        operands = {"x": x, "labels": labels, "t": t}
        return bind(CROSS_ENTROPY_GRADIENT, operands, axes=(axis,), dtype=jnp.float32, **params)

    text = kernels.lowered_for_cuda(f, *(jax.ShapeDtypeStruct(*each) for each in given))
    assert set(kernels.kernel_names(text)) == {"cross_entropy_gradient_mosaic"}


@pytest.mark.parametrize("options", ["plain", "all"])
@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.slow), "bfloat16"])
@pytest.mark.parametrize(
    "shape",
    cases.every_other([(64, 37), (8, 1024), (3, 50257), (3, 128256), (2, 400003), (2, LONGEST_TOGETHER)], 1),
    ids=cases.ident,
)
def test_the_kernel_of_losses_and_gradients_is_lowered(shape, dtype, options):
    x, labels = jax.ShapeDtypeStruct(shape, dtype), jax.ShapeDtypeStruct(shape[:1], jnp.int32)
    c = jax.ShapeDtypeStruct(shape[:1], jnp.float32)
    f = together("mosaic", **OPTIONS[options])
    if options == "all" and shape[1] * x.dtype.itemsize > 400_000:
        with pytest.raises(NotImplementedError, match="sum of the scores, which smoothing needs, for rows of"):
            kernels.lowered_for_cuda(f, x, labels, c)
        return
    text = kernels.lowered_for_cuda(f, x, labels, c)
    assert set(kernels.kernel_names(text)) == {"cross_entropy_gradient_mosaic"}
    assert "output_operand_aliases = [#stablehlo.output_operand_alias" in text


def test_losses_and_gradients_of_rows_that_the_grid_does_not_hold_have_no_kernel():
    x, labels = jax.ShapeDtypeStruct((2, 2**25), jnp.bfloat16), jax.ShapeDtypeStruct((2,), jnp.int32)
    with pytest.raises(NotImplementedError, match="rows of 33554432 entries are 2731 slices, more than two thirds of"):
        kernels.lowered_for_cuda(together("mosaic"), x, labels, jax.ShapeDtypeStruct((2,), jnp.float32))


def in_place(x, labels, numbers, replaces):
    """The cotangent of what was `x` times 2, which nothing else reads."""
    operands = {"x": 2 * x, "labels": labels, **numbers}
    params = {"axes": (1,), "dtype": x.dtype, "soft_cap": None, "implementation": "mosaic"}
    return bind(CROSS_ENTROPY_VJP, operands, replaces=replaces, **params)[0]


def saved(x, labels):
    """The operands of `in_place` that belong to rows."""
    numbers = np.random.default_rng(0).standard_normal((4, len(x), 1)).astype(np.float32)
    state = {"m": 2 * jnp.max(x, 1, keepdims=True).astype(jnp.float32), "d": 1 + np.abs(numbers[3])}
    return jnp.asarray(labels[:, None], jnp.int32), state | dict(zip("abc", numbers, strict=False))


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [100, 1024, 50257, 64128])
def test_a_cotangent_takes_the_memory_of_the_logits(cols, dtype):
    x = jax.ShapeDtypeStruct((8, cols), dtype)
    labels, numbers = saved(jnp.zeros((8, 1)), np.zeros(8))
    for replaces in (True, False):
        f = functools.partial(in_place, replaces=replaces)
        text = kernels.lowered_for_cuda(f, x, labels, numbers, kernels=["cross_entropy_vjp_mosaic"])
        assert ("output_operand_aliases = [#stablehlo.output_operand_alias" in text) == replaces


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("cols", [*WIDTHS, LONGEST])
def test_native_cotangents_in_place_are_the_same(cols, dtype):
    x, labels = jnp.asarray(cases.inputs((4, cols), dtype)["wide"]), labelled((4, cols))
    found = [jax.jit(functools.partial(in_place, replaces=each))(x, *saved(x, labels)) for each in (True, False)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("implementation", ["mosaic", None])
def test_tangents_run_on_the_reference(implementation):
    def tangent(x, t, labels):
        f = functools.partial(jaxsoftmax.cross_entropy, labels=labels, implementation=implementation)
        return jax.jvp(f, (x,), (t,))[1]

    x = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
    labels = jax.ShapeDtypeStruct((64,), jnp.int32)
    explanation = jaxsoftmax.explain(tangent, x, x, labels, platform="cuda")
    cases.assert_all_run_on("mosaic", explanation, without=["cross_entropy_jvp"])


def test_a_fused_operand_is_left_to_the_reference():
    def loss(x, labels):
        return jnp.sum(jaxsoftmax.cross_entropy(2 * x + 1, labels))

    x, labels = jax.ShapeDtypeStruct((64, 4096), jnp.float32), jax.ShapeDtypeStruct((64,), jnp.int32)
    cases.assert_all_run_on("xla", jaxsoftmax.explain(loss, x, labels, platform="cuda"))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [*OPTIONS, "where"])
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("cols", [*WIDTHS, LONGEST])
def test_native_losses_and_gradients(cols, dtype, options):
    """Rows start at any place of a line of the cache where their width is odd; all kinds of input are rows of one array."""
    kinds = ("normal", "wide", "outliers", "offset of 1e4", "equal") if cols < LONGEST else ("wide",)
    x = np.concatenate([cases.inputs((2, cols), dtype)[kind] for kind in kinds])
    labels, c = labelled(x.shape), np.random.default_rng(2).standard_normal(len(x)).astype(np.float32)
    where = np.random.default_rng(3).random(x.shape) < 0.7 if options == "where" else None
    chosen = OPTIONS.get(options, {})
    f = with_gradient("mosaic", where=where, **chosen)
    cases.assert_ran("mosaic", f, x, labels, c)  # or says why it does not
    loss, lse, gradient = f(x, labels, c)
    expected = truth(x, labels, -1, where, **chosen)
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(lse, expected.lse) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("cols", [*WIDTHS, LONGEST_TOGETHER])
def test_native_losses_together_with_gradients(cols, dtype, options):
    kinds = ("normal", "wide", "outliers", "offset of 1e4", "equal") if cols < LONGEST_TOGETHER else ("wide",)
    x = jnp.concatenate([cases.inputs((2, cols), dtype)[kind] for kind in kinds])
    labels, c = labelled(x.shape), np.random.default_rng(2).standard_normal(len(x)).astype(np.float32)
    c[-1] = 0
    chosen, before = OPTIONS[options], np.array(x)
    f = together("mosaic", **chosen)
    cases.assert_ran("mosaic", f, x, labels, c)  # or says why it does not
    loss, gradient = f(x, labels, c)
    expected = truth(before, labels, -1, **without_ignored(chosen))
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1
    np.testing.assert_array_equal(gradient[-1], 0)
    assert np.array(x).tobytes() == before.tobytes()  # which is still there, and so was copied
    again = jax.jit(lambda x: f(2 * x, labels, c))(x)  # which is not, and is replaced
    assert all(a.tobytes() == b.tobytes() for a, b in zip(again, f(2 * x, labels, c), strict=True))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("options", [*OPTIONS, "where"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("shape", [(3, 7, 33), (3, 1000, 40), (2, 4837, 40), (2, 70001, 24), (1, 131072, 64)], ids=cases.ident)
def test_native_losses_and_gradients_along_other_axes(shape, dtype, options):
    x, labels = cases.inputs(shape, dtype)["wide"], labelled(shape, 1)
    c = np.random.default_rng(2).standard_normal(labels.shape).astype(np.float32)
    where = np.random.default_rng(3).random(shape) < 0.7 if options == "where" else None
    chosen = OPTIONS.get(options, {})
    loss, lse, gradient = with_gradient("mosaic", axis=1, where=where, **chosen)(x, labels, c)
    expected = truth(x, labels, 1, where, **chosen)
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(lse, expected.lse) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [100, 1001, 50257, 400003])
def test_native_bits_do_not_depend_on_other_rows(cols, dtype):
    x = cases.inputs((9, cols), dtype)["wide"]
    labels, c = labelled(x.shape), np.ones(9, np.float32)
    f = with_gradient("mosaic")
    whole, part = f(x, labels, c), f(x[4:6], labels[4:6], c[4:6])
    again = f(x, labels, c)
    for a, b, d in zip(whole, again, part, strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
        assert np.asarray(a)[4:6].tobytes() == np.asarray(d).tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_native_labels_that_are_no_class_touch_nothing(dtype):
    """Their rows get the gradient of the log-sum-exp, and those before and after them theirs."""
    x = cases.inputs((6, 5001), dtype)["wide"]
    labels, c = np.array([5000, -1, 0, 5001, 2**31 - 1, 7]), np.ones(6, np.float32)
    loss, _, gradient = with_gradient("mosaic")(x, labels, c)
    expected = truth(x, labels)
    np.testing.assert_array_equal(np.isnan(loss), [False, True, False, True, True, False])
    assert oracle.error(gradient, expected.gradient(c)) <= 1


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("cols", [50256, 128256])
@pytest.mark.parametrize(
    "options", [{}, {"label_smoothing": 0.1, "z_loss": 1e-3, "logits_soft_cap": 30.0}], ids=["plain", "all"]
)
def test_native_classes_that_gpus_share_are_within_the_budget(kind, dtype, cols, options):
    devices = cases.several("gpu")
    mesh, rng = jax.make_mesh((len(devices),), ("x",), axis_types=(kind,), devices=devices), np.random.default_rng(0)
    x = np.asarray(jnp.asarray(3 * rng.standard_normal((40, cols)), dtype))
    labels, c = rng.integers(0, cols, 40), rng.standard_normal(40).astype(np.float32)
    labels[:2] = 0, cols - 1

    def both(x, labels, c):
        loss, pull = jax.vjp(lambda x: jaxsoftmax.cross_entropy(x, labels, **options), x)
        return loss, pull(c)[0]

    with jax.set_mesh(mesh):
        placed = jax.device_put(x, NamedSharding(mesh, P(None, "x")))
        found, again = (jax.jit(both)(placed, labels, c) for _ in range(2))
    assert [np.asarray(a).tobytes() for a in found] == [np.asarray(a).tobytes() for a in again]
    expected = truth(x, labels, -1, None, **options)
    assert oracle.error(np.asarray(found[0]), expected.loss) <= 1
    assert oracle.error(np.asarray(found[1]), expected.gradient(c)) <= 1


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("cross_entropy", {}),
        ("cross_entropy", {"return_total": True}),
        ("cross_entropy", {"return_entropy": True}),
        ("cross_entropy_vjp", {}),
        ("cross_entropy_gradient", {}),
        ("cross_entropy_gradient", {"label_smoothing": 0.1}),
    ],
)
def test_problems_know_how_often_kernels_exchange(name, params, monkeypatch):
    """A kernel that exchanges nothing waits by itself for the other blocks of its cluster."""
    numbers, exchange = [], RowTile._exchange

    def noted(tile, number, *parts):
        numbers.append(number)
        return exchange(tile, number, *parts)

    monkeypatch.setattr(RowTile, "_exchange", noted)
    operands = plans.operands_of(name, (3, 2**19 if name == "cross_entropy" else 32768), "float32")
    problem = plans.problem_of(name, operands, **params)
    assert plans.plan_of(problem).row_plan.cluster > 1
    kernels.lowered_for_cuda(functools.partial(plans.run, lambda _: problem), operands)
    assert numbers == list(range(problem.rows.n_exchanges))


def operations(jaxpr):
    """How many operations a jaxpr has, with those of what its operations run."""
    inner = [leaf for equation in jaxpr.eqns for leaf in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)]
    return len(jaxpr.eqns) + sum(operations(getattr(leaf, "jaxpr", leaf)) for leaf in inner if is_jaxpr(leaf))


def is_jaxpr(value):
    return hasattr(value, "eqns")


@pytest.mark.parametrize("cols", [8192, 400003])
def test_kernels_have_few_operations(cols):
    """Each takes about a millisecond to lower, for an inference of its layout among others: a soft cap is one, in each step."""
    for name, params, most in (
        ("cross_entropy", {"return_total": True, "return_state": True}, 450),
        ("cross_entropy_vjp", {}, 300),
    ):
        operands = plans.operands_of(name, (8, cols), "bfloat16")
        run = functools.partial(plans.run, functools.partial(plans.problem_of, name, soft_cap=30.0, **params))
        assert operations(jax.make_jaxpr(run)(operands).jaxpr) < most
