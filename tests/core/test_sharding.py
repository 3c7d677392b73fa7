"""Sharded arrays stay where they are: on automatic and explicit meshes, inside shard_map, and without devices at hand."""

import contextlib
import functools
import importlib
import itertools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
import jaxsoftmax.flax
from jaxsoftmax import online
from jaxsoftmax._core import primitive
from jaxsoftmax._core.implementation import ReferencePlan
from jaxsoftmax._core.operation import OnShards, Op, Operand, Operation
from jaxsoftmax._core.primitive import bind, define

from ..support import cases, kernels, oracle
from ..support.meshes import array, collectives_of, hurtful, make_mesh, spec_of

X64 = pytest.mark.usefixtures("x64")

NAMES = pytest.mark.parametrize("name", cases.OPS)
SOME_NAMES = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "log_softmax" else ()) for name in cases.OPS]
)
MESHES = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])


def value_and_gradient(name, **options):
    f = functools.partial(getattr(jaxsoftmax, name), axis=-1, **options)
    return lambda x, *args: (f(x, *args), jax.grad(lambda x: jnp.sum(jnp.sin(f(x, *args))))(x))


def of_every_op(x, **options):
    """Values and gradients by name."""
    return {name: value_and_gradient(name, **options)(x) for name in cases.OPS}


# On one device.
plainly = jax.jit(of_every_op)


def probe():
    """Loads the kernel that lives in tests only."""
    return importlib.import_module("tests.core.probe")


@MESHES
@pytest.mark.parametrize("spec", [P("data"), P("data", "model"), P(("data", "model")), P(None, "data")], ids=str)
@X64
def test_batch_axes_stay_sharded_and_nothing_is_gathered(kind, spec):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, sharded = array((8, 8, 33), spec, mesh)
        compiled = jax.jit(of_every_op).lower(sharded).compile()
        for collective in ("all-gather", "all-to-all", "collective-permute"):
            assert collective not in compiled.as_text()
        results = compiled(sharded)
        padded = (*spec, *(None,) * (3 - len(spec)))
        for name, (y, gradient) in results.items():
            assert spec_of(y, y.ndim) == padded[: y.ndim], name
            assert spec_of(gradient, 3) == padded, name
    oracle.assert_same_in_float64(results, plainly(x))


@MESHES
def test_a_reference_without_kernels_runs_on_shards(kind):
    """XLA would gather the batch of a sort, and JAX asks for devices where a primitive is cut."""

    def plan(problem, target):
        return ReferencePlan(lambda x: [jnp.sort(x, axis=-1)], problem)

    op = Op("test", {}, lambda: types.SimpleNamespace(plan=plan))
    row = Operand("x", (None,))
    operation = Operation(
        op, "sort", (row,), lambda operands, **_: [operands["x"]], lambda **_: (row,), on_shards=OnShards.EVERYTHING
    )
    define(operation)
    try:
        mesh = make_mesh(kind)
        with jax.set_mesh(mesh):
            _, sharded = array((8, 64), P("data"), mesh)
            compiled = jax.jit(lambda x: bind(operation, {"x": x}, implementation=None)[0]).lower(sharded).compile()
            assert "all-gather" not in compiled.as_text()
            np.testing.assert_array_equal(compiled(sharded), np.sort(np.asarray(sharded)))
    finally:
        del primitive._primitives[operation]


@MESHES
@NAMES
@X64
def test_sharded_softmax_axis_is_not_gathered(name, kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, sharded = array((8, 64), P("data", "model"), mesh)
        compiled = jax.jit(value_and_gradient(name)).lower(sharded).compile()
        assert "all-gather" not in compiled.as_text()
        assert "all-reduce" in compiled.as_text()
        actual = compiled(sharded)
    oracle.assert_same_in_float64(actual, plainly(x)[name])


ROWS, TOTALS = ["all-gather"], ["all-reduce"]  # the states of rows, and a sum of each
FORWARD = {"softmax": (ROWS, TOTALS), "log_softmax": (ROWS, TOTALS), "logsumexp": (ROWS, [])}


# Ways to shard rows: a kind of mesh, a spec and the columns. JAX shards explicit axes evenly.
SPREAD = {
    "auto": (AxisType.Auto, P("data", "model"), 64),
    "auto, both axes": (AxisType.Auto, P(None, ("data", "model")), 64),
    "explicit": (AxisType.Explicit, P("data", "model"), 64),
    "explicit, both axes": (AxisType.Explicit, P(None, ("data", "model")), 64),
    "uneven": (AxisType.Auto, P(None, ("data", "model")), 61),
    "uneven, two axes": (AxisType.Auto, P("data", "model"), 61),
    "shards of padding alone": (AxisType.Auto, P(None, ("data", "model")), 3),
}


def each_way_to_shard_rows():
    """Each op with each of them and each of two options; by default the first five, with one of the options in turn."""
    options = {"plain": {}, "scale and where": {"scale": ..., "where": ...}}
    for (i, name), (j, way), (k, option) in itertools.product(*map(enumerate, (cases.OPS, SPREAD, options))):
        marks = cases.slow_unless(j < 5 and (i + j + k) % 2 == 0)
        yield pytest.param(name, *SPREAD[way], options[option], id=f"{name}, {way}, {option}", marks=marks)


@pytest.mark.parametrize(("name", "kind", "spec", "cols", "options"), list(each_way_to_shard_rows()))
@X64
def test_kernels_run_on_shards_of_rows_whose_states_one_collective_merges(name, kind, spec, cols, options):
    mesh, x = make_mesh(kind), hurtful((8, 64))[:, :cols]
    rng = np.random.default_rng(1)
    t, where, weights = np.cos(rng.standard_normal(x.shape)), rng.random(x.shape) < 0.8, rng.standard_normal((cols, 3))
    where[5] = False
    scale = np.linspace(-0.9, 0.7, len(x)) if kind == AxisType.Explicit or cols == 61 else -0.7
    options = {key: {"where": where, "scale": scale}[key] for key in options}
    op = functools.partial(getattr(jaxsoftmax, name), axis=-1, **options)

    def constrained(x, spec):
        return x if kind == AxisType.Explicit else jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def result(y, placed):
        """Of a program: its results are sharded evenly."""
        return y if cols == 64 or y.ndim == 1 else placed(jnp.where(jnp.isfinite(y), y, 7) @ weights, P(spec[0]))

    def forward(x, t, placed=constrained):
        return result(op(placed(x, spec)), placed)

    def gradient(x, t, placed=constrained):
        y, pull = jax.vjp(lambda x: op(placed(x, spec)), x)
        return result(pull(t if name != "logsumexp" else jnp.cos(jnp.where(jnp.isfinite(y), y, 0)))[0], placed)

    def tangent(x, t, placed=constrained):
        return result(jax.jvp(lambda x: op(placed(x, spec)), (x,), (t,))[1], placed)

    with kernels.plugged_in_local("softmax") as local, jax.set_mesh(mesh):
        args = x, t
        if kind == AxisType.Explicit:
            args = tuple(jax.device_put(array, NamedSharding(mesh, spec)) for array in args)
        results = []
        for f in (forward, gradient, tangent):
            compiled = jax.jit(f).lower(*args).compile()
            results.append((f, compiled(*args), *collectives_of(compiled)))
    shards = np.prod([mesh.shape[axis] for axis in jax.tree.leaves(spec[-1:])])
    widths = {shapes[0][-1] for shapes in local.shapes}
    assert -(-cols // shards) in widths
    assert kind == AxisType.Auto or len(widths) == 1  # there it is traced for whole arrays first
    first, then = FORWARD[name]
    truths = jax.jit(lambda x, t: [f(x, t, lambda x, spec: x) for f, *_ in results])(x, t)
    for (_, actual, collectives, size), truth, expected in zip(
        results, truths, (first, first + then, first + TOTALS), strict=True
    ):
        oracle.assert_same_in_float64(actual, truth)
        if cols == 64:
            assert sorted(collectives) == sorted(expected)
        assert size <= 2 * shards * len(x)


SHARED, BY_STATES = ["softmax_forward_mosaic", "softmax_jacobian_mosaic"], ["logsumexp_forward_mosaic", "logsumexp_vjp_mosaic"]


@pytest.mark.parametrize(
    ("in_order", "shape", "ran", "reason"),
    [
        (True, (64, 16384), SHARED, None),
        (True, (64, 512), SHARED, None),
        (
            True,
            (64, 256),
            [],
            "each device has 32768 bytes of rows that they share, and kernels that make states pay from 134217728 on",
        ),
        (False, (64, 16384), [], "each device has 2097152 bytes of rows that they share"),
        (False, (4096, 16384), BY_STATES, "one kernel runs on all devices where each has 1 KiB of a row"),
    ],
)
def test_kernels_of_several_devices_share_rows_where_mosaic_can_reach_the_others(in_order, shape, ran, reason):
    devices = jax.devices("cpu")[:2]
    mesh = jax.sharding.Mesh(devices if in_order else devices[::-1], ("model",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    is_whole = shape == (64, 512)  # else kernels are hollow
    with contextlib.nullcontext() if is_whole else kernels.hollow(), jax.set_mesh(mesh):
        both = jax.jit(lambda x, t: jax.vjp(jaxsoftmax.softmax, x)[1](t)[0])
        text = both.trace(x, x).lower(lowering_platforms=("cuda",)).as_text()
        explanation = jaxsoftmax.explain(both, x, x, platform="cuda")
    assert kernels.kernel_names(text) == ran
    assert ("softmax_jacobian", "mosaic" if ran == SHARED else "xla") in [(d.primitive, d.implementation) for d in explanation]
    assert ("not mosaic" in str(explanation)) == (reason is not None)
    assert (reason or "") in str(explanation)
    assert text.count("uses_xla_collective_metadata = true") == (2 if is_whole else 0)
    assert ("stablehlo.all_gather" in text) != (ran == SHARED)


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize(
    ("shape", "dtype", "is_kernel"),
    [
        ((64, 16384), "float32", True),
        ((8192, 2048), "bfloat16", True),
        ((32768, 2048), "float32", True),
        ((32768, 2048), "bfloat16", False),
        ((32768, 4096), "bfloat16", True),
    ],
    ids=str,
)
def test_four_devices_share_many_rows_where_each_has_two_kilobytes_of_one(shape, dtype, is_kernel):
    mesh = jax.make_mesh((4,), ("model",), axis_types=(AxisType.Explicit,), devices=jax.devices("cpu")[:4])
    x = jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(None, "model")))
    with jax.set_mesh(mesh):
        explanation = jaxsoftmax.explain(lambda x, t: jax.vjp(jaxsoftmax.softmax, x)[1](t)[0], x, x, platform="cuda")
    ran = {decision.implementation for decision in explanation}
    assert ran == ({"mosaic"} if is_kernel else {"xla"})
    assert ("2 KiB if there are more than 16384 rows" in str(explanation)) != is_kernel


@pytest.mark.usefixtures("hollow_kernels")
@pytest.mark.parametrize("shape", [(8192, 2, 8192), (8192, 16384, 1)], ids=str)
def test_a_part_of_rows_along_several_axes_is_as_long_as_all_of_them(shape):
    mesh = jax.sharding.Mesh(jax.devices("cpu")[:2], ("model",), axis_types=(AxisType.Explicit,))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(None, "model")))
    with jax.set_mesh(mesh):
        for f in (jaxsoftmax.softmax, jaxsoftmax.logsumexp):
            decisions = jaxsoftmax.explain(functools.partial(f, axis=(1, 2)), x, platform="cuda")
            kernels.assert_ran(decisions, "mosaic")


@NAMES
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("manual", [("model",), ("data", "model")], ids=str)
@X64
def test_in_a_shard_map_axis_name_says_what_rows_are_sharded_over(name, check_vma, manual):
    mesh, x = make_mesh(AxisType.Auto), hurtful((8, 64))
    rng = np.random.default_rng(1)
    t, where = rng.standard_normal(x.shape), rng.random(x.shape) < 0.8
    where[5] = False
    op = functools.partial(getattr(jaxsoftmax, name), axis=-1)
    spec = P(None, manual)
    mapped = jax.shard_map(
        lambda x, where: op(x, where=where, axis_name=manual),
        mesh=mesh,
        in_specs=spec,
        out_specs=P() if name == "logsumexp" else spec,
        check_vma=check_vma,
    )

    def everything(f):
        def run(x, t):
            y, pull = jax.vjp(lambda x: f(x, where), x)
            c = t if name != "logsumexp" else jnp.cos(jnp.where(jnp.isfinite(y), y, 0))
            return y, pull(c)[0], jax.jvp(lambda x: f(x, where), (x,), (t,))[1]

        return run

    with kernels.plugged_in_local("softmax") as local:
        compiled = jax.jit(everything(mapped)).lower(x, t).compile()
        results = compiled(x, t)
    assert {shapes[0][-1] for shapes in local.shapes} == {64 // (2 if len(manual) == 1 else 8)}
    if check_vma or len(manual) == 2:  # else JAX adds up gradients over the axis that shards nothing
        assert collectives_of(compiled)[1] <= 2 * 8 * len(x)
    oracle.assert_same_in_float64(results, jax.jit(everything(lambda x, where: op(x, where=where)))(x, t))


@NAMES
@pytest.mark.parametrize("check_vma", [True, False])
@X64
def test_in_a_shard_map_rows_that_devices_share_have_a_scale(name, check_vma):
    """One number or one for each row, which has derivatives of both orders. It may vary over devices that have the same one."""
    mesh, x = make_mesh(AxisType.Auto), numbers(4, 16)
    weights, where = numbers(4, 16, seed=1), numbers(4, 16, seed=2) < 1
    weights = weights[:, 0] if name == "logsumexp" else weights

    def op(x, scale, where, **options):
        return getattr(jaxsoftmax, name)(x, axis=-1, where=where, scale=scale, **options)

    def derivatives(f):
        def loss(x, scale):
            y = f(x, scale, where)
            return jnp.sum(jnp.where(jnp.isfinite(y), jnp.sin(y) * weights, 0))

        def run(x, scale):
            def tangent(x, scale):
                return jax.jvp(loss, (x, scale), (jnp.cos(x), jnp.cos(scale)))[1]

            of_tangent = jax.value_and_grad(tangent, (0, 1))(x, scale)
            return jax.value_and_grad(loss, (0, 1))(x, scale), of_tangent, jax.hessian(loss, 1)(x, scale)

        return jax.jit(run)

    spec = P(None, "model")
    for scale in (np.array(0.7), np.array([0.5, 0.0, -2.0, 1.0])):
        mapped = jax.shard_map(
            functools.partial(op, axis_name="model"),
            mesh=mesh,
            in_specs=(spec, P(), spec),
            out_specs=P() if name == "logsumexp" else spec,
            check_vma=check_vma,
        )
        oracle.assert_same_in_float64(derivatives(mapped)(x, scale), derivatives(op)(x, scale))


@NAMES
@pytest.mark.parametrize("check_vma", [True, False])
@X64
def test_in_a_shard_map_that_leaves_explicit_axes_these_may_shard_rows(name, check_vma):
    mesh, x = make_mesh(AxisType.Explicit), hurtful((8, 64))
    op, t = functools.partial(getattr(jaxsoftmax, name), axis=-1), numbers(8, 64, seed=1)
    spec = P(None, "model")

    def everything(f):
        def run(x, t):
            cotangent = jnp.sum(t, -1) if name == "logsumexp" else t
            return *jax.jvp(f, (x,), (t,)), jax.vjp(f, x)[1](cotangent)

        return jax.jit(run)

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(
            functools.partial(op, axis_name="model"),
            in_specs=spec,
            out_specs=P() if name == "logsumexp" else spec,
            axis_names={"model"},
            check_vma=check_vma,
        )
        placed = jax.device_put((x, t), NamedSharding(mesh, P("data", "model")))
        results = everything(mapped)(*placed)
    oracle.assert_same_in_float64(results, everything(op)(x, t))


@pytest.mark.parametrize("check_vma", [True, False])
@X64
def test_a_scale_that_varies_makes_logsumexp_vary(check_vma):
    mesh, x, scale = make_mesh(AxisType.Auto), numbers(3, 16), np.array([0.5, 0.0, -2.0])

    def local(x, scale):
        return jaxsoftmax.logsumexp(x, -1, scale=scale, axis_name="model")[None]

    specs = (P(None, "model"), P("model"))
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("model"), check_vma=check_vma)

    def run(f, x, scale):
        tangents = jnp.cos(x), jnp.cos(scale)
        return *jax.jvp(f, (x, scale), tangents), jax.grad(lambda x, scale: jnp.sum(jnp.sin(f(x, scale))), (0, 1))(x, scale)

    n = mesh.shape["model"]
    copies = np.tile(scale, n)
    value, tangent, (dx, dscale) = jax.jit(functools.partial(run, mapped))(x, copies)
    expected = jax.jit(functools.partial(run, lambda x, scale: jaxsoftmax.logsumexp(x, -1, scale=scale)))(x, scale)
    actual = value[0], tangent[-1], (dx / n, dscale.reshape(n, 3).sum(0) / n)
    oracle.assert_same_in_float64(actual, expected)


def test_errors_of_axis_name():
    mesh = make_mesh(AxisType.Auto)
    with pytest.raises(ValueError, match=r"softmax: axis_name must name mesh axes, .* got 'rows'"):
        jaxsoftmax.softmax(np.ones((2, 3)), axis_name="rows")
    with pytest.raises(TypeError, match="log_softmax: axis_name must be None, a string or a sequence of strings, got 3"):
        jaxsoftmax.log_softmax(np.ones((2, 3)), axis_name=3)
    twice = jax.shard_map(lambda x: jaxsoftmax.softmax(x, axis_name=("data", "data")), mesh=mesh, in_specs=P(), out_specs=P())
    with pytest.raises(ValueError, match=r"softmax: axis_name must name mesh axes, each once, .* got \('data', 'data'\)"):
        jax.eval_shape(twice, np.ones((2, 3)))
    for options, words in (({"b": np.ones((2, 3))}, "with b or return_sign"), ({"axis": ()}, "where axis names no axis")):
        f = jax.shard_map(
            lambda a, options=options: jaxsoftmax.logsumexp(a, axis_name="data", **options),
            mesh=mesh,
            in_specs=P(),
            out_specs=P(),
        )
        with pytest.raises(ValueError, match=f"logsumexp: axis_name must be None {words}, got 'data'"):
            f(np.ones((2, 3)))


@MESHES
@SOME_NAMES
@X64
def test_masks_of_other_shardings(name, kind):
    mesh = make_mesh(kind)
    where = np.random.default_rng(1).random((1, 8, 33)) < 0.7
    where[..., 0] = True
    with jax.set_mesh(mesh):
        x, sharded = array((8, 8, 33), P("data", "model"), mesh)
        f = jax.jit(lambda x, where: value_and_gradient(name, where=where)(x))
        y, gradient = f(x, where)
        for spec in (P(), P(None, "model")):
            mask = jax.device_put(where, NamedSharding(mesh, spec))
            compiled = f.lower(sharded, mask).compile()
            assert "all-gather" not in compiled.as_text()
            actual = compiled(sharded, mask)
            assert spec_of(actual[1], 3) == ("data", "model", None)
            oracle.assert_same_in_float64((actual[0], np.where(where, actual[1], 0)), (y, np.where(where, gradient, 0)))


@MESHES
@pytest.mark.parametrize("name", ["softmax", *(pytest.param(n, marks=pytest.mark.slow) for n in cases.OPS if n != "softmax")])
@X64
def test_operands_of_unlike_shardings(name, kind):
    """Masks, constants and batch axes that are whole beside an array that is sharded."""
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, sharded = array((8, 8, 16), P("data", "model"), mesh)

        def masked(x):
            return value_and_gradient(name, where=jnp.tril(jnp.ones((8, 8, 16), bool)))(x)

        def constant_tangent(x):
            f = functools.partial(getattr(jaxsoftmax, name), axis=-1)
            return jax.jvp(f, (x,), (jnp.ones_like(x),))[1]

        rows = jax.vmap(jax.grad(lambda row: jnp.sum(jnp.sin(getattr(jaxsoftmax, name)(row, axis=-1)))))
        hessians = jax.vmap(jax.vmap(jax.hessian(lambda row: jnp.sum(jnp.sin(getattr(jaxsoftmax, name)(row, axis=-1))))))
        unmixed, others = (lambda x: (masked(x), rows(x))), (lambda x: (constant_tangent(x), hessians(x)))
        compiled = jax.jit(unmixed).lower(sharded).compile()
        assert "all-gather" not in compiled.as_text()
        results = compiled(sharded), jax.jit(others)(sharded)
    oracle.assert_same_in_float64(results, jax.jit(lambda x: (unmixed(x), others(x)))(x))


@MESHES
@NAMES
@X64
def test_eager_calls_and_vmap_keep_the_sharding(name, kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, sharded = array((8, 6, 33), P("data"), mesh)
        f = functools.partial(getattr(jaxsoftmax, name), axis=-1)
        y = f(sharded)
        assert spec_of(y, y.ndim)[0] == "data"
        over_data = jax.jit(jax.vmap(f))(sharded)
        assert spec_of(over_data, over_data.ndim)[0] == "data"
        over_heads = jax.jit(jax.vmap(f, in_axes=1, out_axes=1))(sharded)
        assert spec_of(over_heads, over_heads.ndim)[0] == "data"
    expected = f(x)
    for actual in (y, over_data, over_heads):
        oracle.assert_same_in_float64(actual, expected)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("manual", [("data", "model"), ("data",)], ids=str)
@X64
def test_inside_shard_map(check_vma, manual):
    mesh = make_mesh(AxisType.Auto)
    with jax.set_mesh(mesh):
        x, sharded = array((8, 8, 33), P("data"), mesh)
        where = np.random.default_rng(1).random((1, 8, 33)) < 0.7  # replicated: it does not vary as x does
        where[..., 0] = True
        local = functools.partial(of_every_op, where=where)
        f = jax.shard_map(local, in_specs=P("data"), out_specs=P("data"), axis_names=set(manual), check_vma=check_vma)
        compiled = jax.jit(f).lower(sharded).compile()
        assert "all-gather" not in compiled.as_text()
        oracle.assert_same_in_float64(compiled(sharded), jax.jit(local)(x))


@X64
def test_a_scale_that_does_not_vary_gets_the_gradient_of_all_shards():
    mesh = make_mesh(AxisType.Explicit)
    weights = np.random.default_rng(1).standard_normal((8, 33))
    with jax.set_mesh(mesh):
        x, sharded = array((8, 33), P("data"), mesh)
        mapped = jax.shard_map(
            lambda x, scale: jaxsoftmax.softmax(x, scale=scale), in_specs=(P("data"), P()), out_specs=P("data")
        )
        gradient = jax.jit(jax.grad(lambda scale, x: jnp.sum(mapped(x, scale) * weights)))(0.7, sharded)
    expected = jax.grad(lambda scale: jnp.sum(jaxsoftmax.softmax(x, scale=scale) * weights))(0.7)
    oracle.assert_same_in_float64(gradient, expected)


@NAMES
def test_lowering_for_a_mesh_without_devices(name):
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        text = jax.jit(value_and_gradient(name)).trace(x).lower(lowering_platforms=("cuda",)).as_text()
    kernels.assert_ran(text, "mosaic")


@pytest.mark.parametrize("kinds", [(AxisType.Auto,) * 2, (AxisType.Explicit, AxisType.Auto)], ids=["auto", "both"])
def test_with_a_kernel_listed_automatic_axes_need_devices_unless_all_are_manual(kinds):
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=kinds)
    with (
        kernels.plugged_in("softmax", "probe", probe, "cuda"),
        jax.sharding.use_abstract_mesh(mesh),
    ):
        x = jax.ShapeDtypeStruct((64, 128), jnp.float32, sharding=NamedSharding(mesh, P("data")))
        with pytest.raises(ValueError, match="AbstractMesh cannot be used"):
            jax.jit(jaxsoftmax.softmax).trace(x).lower(lowering_platforms=("cuda",))
        mapped = jax.shard_map(jaxsoftmax.softmax, in_specs=P("data"), out_specs=P("data"))
        text = jax.jit(mapped).trace(x).lower(lowering_platforms=("cuda",)).as_text()
        assert kernels.kernel_names(text) == ["softmax_forward_probe"]


@MESHES
def test_export_from_a_mesh_of_several_devices_holds_the_kernel_where_shards_are_known(kind):
    mesh = make_mesh(kind)
    with (
        kernels.plugged_in("softmax", "probe", probe, "cuda"),
        jax.set_mesh(mesh),
    ):
        sharded = jax.device_put(np.zeros((64, 128), np.float32), NamedSharding(mesh, P("data")))
        exported = jax.export.export(jax.jit(jaxsoftmax.softmax), platforms=["cuda"])(sharded)
        names = kernels.kernel_names(exported.mlir_module())
        assert names == (["softmax_forward_probe"] if kind == AxisType.Explicit else [])
        if kind == AxisType.Auto:
            forced = jax.jit(functools.partial(jaxsoftmax.softmax, implementation="probe"))
            with pytest.raises(NotImplementedError, match="the compiler has to ask back, which an exported program cannot"):
                jax.export.export(forced, platforms=["cuda"])(sharded)


# Operands of ops, and how they are sharded over data and model: on explicit meshes nobody has to set the mesh.


def numbers(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape)


def of_attention(query, key, value, **options):
    return jaxsoftmax.dot_product_attention(query, key, value, **options)


ROWS_AND_COLUMNS, DATA, HEADS, SEEN = P("data", "model"), P("data"), P("data", None, "model"), numbers(8, 16, seed=1) < 1
TABLE, PAGES, OF_HEADS = np.array([[0, 1], [2, 3], [4, 5], [0, 2]], np.int32), numbers(6, 4, 4, 8), P(None, None, "model")
ATTENTION = {name: (numbers(4, 8, 4, 8, seed=seed), HEADS) for seed, name in enumerate(("query", "key", "value"))}
LENGTHS, LABELS = (np.array([3, 7, 5, 1], np.int32), DATA), (np.array([0, 5, 15, 3, 7, 2, 9, 12], np.int32), DATA)

# By name: a function, its operands by name with their specs, and in which of them it is differentiated.
PLACED = {
    "softmax": (
        jaxsoftmax.softmax,
        {"x": (numbers(8, 16), ROWS_AND_COLUMNS), "where": (SEEN, DATA), "scale": (np.array(0.7), P())},
        ("x", "scale"),
    ),
    "log_softmax": (
        jaxsoftmax.log_softmax,
        {"x": (numbers(8, 16), DATA), "where": (SEEN[:1], P(None, "model")), "scale": (numbers(8), DATA)},
        ("x", "scale"),
    ),
    "logsumexp": (
        functools.partial(jaxsoftmax.logsumexp, axis=-1),
        {"a": (numbers(8, 16), ROWS_AND_COLUMNS), "where": (SEEN, ROWS_AND_COLUMNS), "b": (np.abs(numbers(16)), P("model"))},
        ("a", "b"),
    ),
    "cross_entropy": (
        functools.partial(jaxsoftmax.cross_entropy, label_smoothing=0.1, ignore_index=3),
        {"logits": (numbers(8, 16), ROWS_AND_COLUMNS), "labels": LABELS, "where": (SEEN[:, 1], DATA)},
        ("logits",),
    ),
    "cross_entropy of probabilities": (
        functools.partial(jaxsoftmax.cross_entropy, z_loss=0.1, return_lse=True),
        {"logits": (numbers(8, 16), ROWS_AND_COLUMNS), "labels": (np.abs(numbers(8, 16)), ROWS_AND_COLUMNS)},
        ("logits", "labels"),
    ),
    "linear_cross_entropy": (
        jaxsoftmax.linear_cross_entropy,
        {
            "hidden": (numbers(8, 4), DATA),
            "weight": (numbers(4, 16), P(None, "model")),
            "labels": LABELS,
            "bias": (numbers(16), P("model")),
        },
        ("hidden", "weight", "bias"),
    ),
    "linear_cross_entropy of each row": (
        functools.partial(jaxsoftmax.linear_cross_entropy, reduction="none"),
        {"hidden": (numbers(8, 4), DATA), "weight": (numbers(4, 16), P(None, "model")), "labels": LABELS},
        ("hidden", "weight"),
    ),
    "attention": (
        functools.partial(of_attention, is_causal=True),
        ATTENTION | {"mask": (numbers(4, 1, 8, 8) < 1, DATA), "bias": (numbers(1, 4, 8, 8), P(None, "model"))},
        ("query", "value", "bias"),
    ),
    "attention to a sequence": (
        of_attention,
        {name: (array, ROWS_AND_COLUMNS) for name, (array, _) in ATTENTION.items()} | {"key_value_seq_lengths": LENGTHS},
        ("query", "key"),
    ),
    "attention with dropout": (
        functools.partial(of_attention, dropout_rate=0.5),
        ATTENTION | {"dropout_rng": (jax.random.key_data(jax.random.key(0)), P())},
        ("query",),
    ),
    "attention_fn": (
        jaxsoftmax.flax.attention_fn,
        {name: ATTENTION[name] for name in ATTENTION} | {"mask": (numbers(4, 1, 8, 8) < 1, DATA)},
        ("key",),
    ),
    "paged_attention": (
        jaxsoftmax.cache.paged_attention,
        {
            "query": (numbers(4, 1, 4, 8), HEADS),
            "key_pages": (PAGES, OF_HEADS),
            "value_pages": (PAGES, OF_HEADS),
            "page_table": (TABLE, DATA),
            "key_value_seq_lengths": LENGTHS,
        },
        ("query", "key_pages", "value_pages"),
    ),
    "update_pages": (
        jaxsoftmax.cache.update_pages,
        {
            "key_pages": (PAGES, OF_HEADS),
            "value_pages": (PAGES, OF_HEADS),
            "key": (numbers(4, 1, 4, 8), HEADS),
            "value": (numbers(4, 1, 4, 8), HEADS),
            "page_table": (TABLE, DATA),
            "positions": LENGTHS,
        },
        (),
    ),
    "quantize": (
        functools.partial(jaxsoftmax.cache.quantize, dtype=jnp.int8),
        {"x": (numbers(4, 8, 2, 8), HEADS), "scale": (np.abs(numbers(2)), P("model"))},
        (),
    ),
    "top_k": (
        functools.partial(jaxsoftmax.top_k, k=3),
        {"operand": (numbers(8, 16), DATA), "where": (SEEN, DATA)},
        ("operand",),
    ),
    "softmax_top_k": (
        functools.partial(jaxsoftmax.softmax_top_k, k=3),
        {"logits": (numbers(8, 16), ROWS_AND_COLUMNS), "where": (SEEN, DATA)},
        ("logits",),
    ),
    "categorical": (
        functools.partial(jaxsoftmax.categorical, top_k=5, return_log_prob=True),
        {
            "key": (jax.random.key_data(jax.random.key(0)), P()),
            "logits": (numbers(8, 16), DATA),
            "temperature": (np.abs(numbers(8)) + 0.1, DATA),
        },
        (),
    ),
    "online": (
        lambda a, b: online.finish(online.merge(online.lift(a), online.lift(b))),
        {"a": (numbers(8, 16), ROWS_AND_COLUMNS), "b": (numbers(8, 16), DATA)},
        ("a",),
    ),
}


def cotangent_of(result):
    """1 where a result is finite, sharded as it is."""
    if not jnp.issubdtype(result.dtype, jnp.floating):
        return np.zeros(result.shape, jax.dtypes.float0)
    return jnp.isfinite(result).astype(result.dtype)


# What runs by default: eagerly, where each step compiles by itself, or compiled as a whole.
EAGER = {"softmax", "cross_entropy", "attention to a sequence", "top_k"}
JITTED = {"logsumexp", "linear_cross_entropy", "attention", "update_pages", "categorical"}


@pytest.mark.parametrize(
    ("kinds", "jitted", "name"),
    [
        pytest.param(
            (*kinds,), jitted, name, id=f"{name}, {kinds[0].name}, {kinds[1].name}, {'jit' if jitted else 'eager'}", marks=marks
        )
        for name in PLACED
        for kinds, jitted in itertools.product(
            [(AxisType.Explicit,) * 2, (AxisType.Explicit, AxisType.Auto), (AxisType.Auto,) * 2], [False, True]
        )
        for marks in [cases.slow_unless(AxisType.Auto not in kinds and name in (JITTED if jitted else EAGER))]
    ],
)
@X64
def test_operands_need_not_be_placed_on_a_mesh_nor_the_mesh_be_set(name, kinds, jitted):
    """The first operand alone is placed, then all others alone."""
    function, operands, differentiated = PLACED[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=jax.devices("cpu"))
    plain = {operand: jnp.asarray(array) for operand, (array, _) in operands.items()}

    def everything(given):
        moving = {operand: given[operand] for operand in differentiated}
        results, pull = jax.vjp(lambda moving: function(**given | moving), moving)
        return results, pull(jax.tree.map(cotangent_of, results)) if moving else ()

    expected = jax.jit(everything)(plain)
    first, *others = operands
    for placed in ([first], others):
        given = {
            operand: jax.device_put(array, NamedSharding(mesh, operands[operand][1])) if operand in placed else array
            for operand, array in plain.items()
        }
        actual = (jax.jit(everything) if jitted else everything)(given)
        for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)


MIXED = [(AxisType.Explicit, AxisType.Auto), (AxisType.Auto, AxisType.Explicit)]


def plain_and_placed(kinds, name):
    """A function of what an op is differentiated in, and that: with no operand placed, and with all of them on a mesh."""
    function, operands, differentiated = PLACED[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=jax.devices("cpu"))
    plain = {operand: jnp.asarray(array) for operand, (array, _) in operands.items()}
    placed = {operand: jax.device_put(plain[operand], NamedSharding(mesh, spec)) for operand, (_, spec) in operands.items()}

    def of_moving(given):
        return lambda moving: function(**given | moving), {operand: given[operand] for operand in differentiated}

    return of_moving(plain), of_moving(placed)


def off_the_mesh(array, seed=7):
    """Numbers for a tangent or a cotangent of an array, on one device."""
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return np.zeros(array.shape, jax.dtypes.float0)
    return jnp.asarray(np.random.default_rng(seed).standard_normal(array.shape).astype(array.dtype))


def assert_close(actual, expected):
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if b.dtype != jax.dtypes.float0:
            np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=1e-5, atol=1e-7)


# What runs by default: a linear layer's loss compiled, as the steps of a part compile by themselves otherwise, 250 of them.
BY_DEFAULT = {
    ("linear_cross_entropy of each row", (AxisType.Explicit,) * 2, True),
    ("paged_attention", MIXED[0], False),
    ("logsumexp", MIXED[1], False),
}


@pytest.mark.parametrize(
    ("kinds", "name", "jitted"),
    [
        pytest.param(
            kinds, name, jitted, id=f"{name}, {kinds[0].name}, {kinds[1].name}, {'jit' if jitted else 'eager'}", marks=marks
        )
        for name, kinds in itertools.product(PLACED, [(AxisType.Explicit,) * 2, *MIXED])
        if PLACED[name][2] and (name, kinds) != ("attention to a sequence", MIXED[1])  # which has no result there
        for jitted in (False, True)
        for marks in [cases.slow_unless((name, kinds, jitted) in BY_DEFAULT)]
    ],
)
@X64
def test_cotangents_need_not_be_placed_on_the_mesh(name, kinds, jitted):
    (f, moving), (of_placed, placed) = plain_and_placed(kinds, name)
    cotangents = jax.tree.map(off_the_mesh, jax.eval_shape(f, moving))
    expected = jax.jit(lambda moving, cotangents: jax.vjp(f, moving)[1](cotangents))(moving, cotangents)
    assert_close(jax.vjp(jax.jit(of_placed) if jitted else of_placed, placed)[1](cotangents), expected)


@pytest.mark.parametrize("kinds", [(AxisType.Explicit,) * 2, *MIXED], ids=["explicit", "explicit, auto", "auto, explicit"])
@pytest.mark.parametrize(
    "name",
    [
        "softmax_top_k",
        "attention",
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("log_softmax", "attention with dropout", "paged_attention")],
    ],
)
@X64
def test_tangents_need_not_be_placed_on_the_mesh_where_a_derivative_is_linearized(name, kinds):
    plain, placed = plain_and_placed(kinds, name)
    tangents = {operand: off_the_mesh(array) for operand, array in plain[1].items()}
    expected = jax.jit(lambda moving, tangents: jax.jvp(plain[0], (moving,), (tangents,))[1])(plain[1], tangents)
    assert_close(jax.linearize(*placed)[1](tangents), expected)


# What runs by default in a `shard_map` that leaves explicit axes.
NESTED = {"attention", "linear_cross_entropy", "paged_attention", "softmax_top_k"}


@pytest.mark.parametrize(
    ("kinds", "name", "check_vma"),
    [
        pytest.param(
            kinds, name, check_vma, id=f"{name}, {kinds[0].name}, {'checked' if check_vma else 'unchecked'}", marks=marks
        )
        for name in PLACED
        if PLACED[name][2] and name != "attention with dropout"  # each device numbers its samples from 0
        for kinds in [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit,) * 2]
        for check_vma in (True, False)
        for marks in [cases.slow_unless(check_vma and AxisType.Auto not in kinds and name in NESTED)]
    ],
)
@X64
def test_derivatives_in_a_shard_map_that_leaves_explicit_axes(name, kinds, check_vma):
    """Rows are sharded by the `shard_map`, and the rest as types say. Arrays that all devices have do not vary."""
    function, operands, differentiated = PLACED[name]
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=kinds, devices=jax.devices("cpu"))
    plain = {operand: jnp.asarray(array) for operand, (array, _) in operands.items()}
    specs = {operand: P(*(axes if axes == "data" else None for axes in spec)) for operand, (_, spec) in operands.items()}

    def mean(given):
        results = [each for each in jax.tree.leaves(function(**given)) if jnp.issubdtype(each.dtype, jnp.floating)]
        squares = [jnp.where(jnp.isfinite(each), each, 0) ** 2 if each.ndim else each for each in results]  # of rows alone
        return sum(map(jnp.mean, squares))

    def derivatives(f, given):
        """The value, the gradient, and gradients of a tangent and of the gradient."""
        moving = {operand: given[operand] for operand in differentiated}
        along = {operand: jnp.cos(array) for operand, array in moving.items()}

        def loss(moving):
            return f(given | moving)

        def slope(moving):
            return jax.jvp(loss, (moving,), (along,))[1]

        def product(moving):
            return sum(jnp.sum(gradient * along[operand]) for operand, gradient in jax.grad(loss)(moving).items())

        return jax.value_and_grad(loss)(moving), jax.grad(slope)(moving), jax.grad(product)(moving)

    expected = jax.jit(functools.partial(derivatives, mean))(plain)
    with jax.set_mesh(mesh):
        placed = {operand: jax.device_put(plain[operand], NamedSharding(mesh, spec)) for operand, (_, spec) in operands.items()}
        options = {"axis_names": {"data"}, "check_vma": check_vma}
        mapped = jax.shard_map(lambda given: jax.lax.pmean(mean(given), "data"), in_specs=(specs,), out_specs=P(), **options)
        actual = jax.jit(functools.partial(derivatives, mapped))(placed)
    assert_close(actual, expected)
