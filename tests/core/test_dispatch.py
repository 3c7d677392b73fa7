"""The place where kernels plug in, held by a real kernel (`probe`) and by the reference under another name (`local`)."""

import functools
import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import explain, online
from jaxsoftmax._core import compat
from jaxsoftmax._core import primitive as core
from jaxsoftmax.ops import OPS as FAMILIES
from jaxsoftmax.ops.softmax import across_devices, primitive

from ..support import kernels, oracle

pytestmark = pytest.mark.usefixtures("hollow_kernels")

FORWARD, BACKWARD = "softmax_forward_probe", "softmax_jacobian_probe"
X = jax.ShapeDtypeStruct((2, 32, 128), jnp.float32)
SCALE = jax.ShapeDtypeStruct((), jnp.float32)

softmax = jaxsoftmax.softmax
last_logsumexp = functools.partial(jaxsoftmax.logsumexp, axis=-1)


@pytest.fixture
def probe():
    with kernels.plugged_in("softmax", "probe", lambda: importlib.import_module("tests.core.probe"), "cuda"):
        yield importlib.import_module("tests.core.probe")


@pytest.fixture
def local():
    with kernels.plugged_in_local("softmax") as module:
        yield module


def loss(x, **options):
    return jnp.sum(jnp.sin(softmax(x, **options)))


# Which implementation runs, and why another does not.


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("cols", [64, 192, 1024])
def test_the_kernel_is_chosen_for_what_it_supports(probe, cols, dtype):
    x = jax.ShapeDtypeStruct((2, 32, cols), dtype)
    explanation = explain(jax.grad(lambda x: jnp.sum(softmax(x, scale=0.5, dtype="float32"))), x, platform="cuda")
    assert [decision.primitive for decision in explanation] == ["softmax", "softmax_jacobian"]
    kernels.assert_ran(explanation, "probe")


REFUSALS = {
    "where": (lambda x: softmax(x, where=x > 0), X, "it takes no where"),
    "another axis": (lambda x: softmax(x, 1), X, r"the axis must be the last one alone, got axes \(1,\)"),
    "two axes": (lambda x: softmax(x, (1, 2)), X, r"the axis must be the last one alone, got axes \(1, 2\)"),
    "operand dtype": (softmax, jax.ShapeDtypeStruct((32, 128), jnp.complex64), "dtypes must be among .*, got complex64"),
    "result dtype": (lambda x: softmax(x, dtype="float8_e5m2"), X, "dtypes must be among .*, got float8_e5m2"),
    "many scales": (jax.vmap(lambda x: softmax(x, scale=x[0, 0])), X, r"scale must be one number, got shape \(2, 1, 1\)"),
    "odd columns": (lambda x: softmax(x[..., :100]), X, "multiple of 64 entries, from 64 to 1024, got 100"),
    "many columns": (softmax, jax.ShapeDtypeStruct((32, 2048), jnp.float32), "from 64 to 1024, got 2048"),
    "ragged rows": (softmax, jax.ShapeDtypeStruct((17, 64), jnp.float32), "rows must be a multiple of 16, got 17"),
    "no rows": (softmax, jax.ShapeDtypeStruct((0, 64), jnp.float32), "rows must be a multiple of 16, got 0"),
    "another op": (jaxsoftmax.log_softmax, X, "it has no kernel for log_softmax"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_the_kernel_says_why_it_cannot(probe, kind):
    f, x, words = REFUSALS[kind]
    (decision,) = explain(f, x, platform="cuda")
    assert decision.implementation == "xla"
    assert [name for name, _ in decision.refusals] == list(FAMILIES["softmax"].kernels)
    assert re.search(words, dict(decision.refusals)["probe"])
    assert kernels.kernel_names(kernels.lowered_for_cuda(f, x)) == []


def test_the_kernel_refuses_other_gpus(probe):
    (decision,) = explain(softmax, X, gpu="a100")
    assert dict(decision.refusals)["probe"] == "it needs compute capability 9.x, got cuda (8, 0)"


def test_elsewhere_a_kernel_is_refused_before_its_module_loads():
    def load():
        raise ModuleNotFoundError("a_module_that_does_not_exist")

    with kernels.plugged_in("softmax", "unloadable", load, "cuda"):
        for platform in ("cpu", "tpu"):
            (decision,) = explain(softmax, X, platform=platform)
            assert decision.implementation == "xla"
            assert dict(decision.refusals)["unloadable"] == f"it runs on cuda, not on {platform}"
        with pytest.raises(ModuleNotFoundError, match="a_module_that_does_not_exist"):
            explain(softmax, X, platform="cuda")


def test_a_forced_kernel_that_cannot_run_raises_its_own_words_while_lowering(probe):
    traced = jax.jit(lambda x: softmax(x[..., :100], implementation="probe")).trace(X)
    with pytest.raises(
        NotImplementedError, match=r"softmax: implementation='probe' cannot run: .* multiple of 64 entries.* got 100"
    ):
        traced.lower(lowering_platforms=("cuda",))
    forced = functools.partial(softmax, implementation="probe")
    kernels.assert_ran(kernels.lowered_for_cuda(forced, X), "probe")
    with pytest.raises(NotImplementedError, match="softmax: implementation='probe' cannot run: it runs on cuda, not on cpu"):
        jax.jit(forced).trace(X).lower(lowering_platforms=("cpu",))


def test_a_plugged_in_implementation_replaces_what_was_lowered_before_and_leaves_nothing_behind():
    from jax._src.dispatch import prim_requires_devices_during_lowering as needing_devices

    with jax.default_device(jax.devices("cpu")[0]):
        x = jnp.ones((3, 7))
        jitted = jax.jit(softmax)
        calls = [softmax, jitted]
        before = dict(FAMILIES["softmax"].kernels), set(needing_devices)
        for call in calls:
            call(x)
        with kernels.plugged_in_local("softmax") as module:
            assert module.shapes == []
            for call in calls:
                call(x)
            assert module.shapes == [((3, 7),)] * len(calls)
            assert core._primitives[primitive.SOFTMAX][0] in needing_devices
        for call in calls:
            call(x)
        assert module.shapes == [((3, 7),)] * len(calls)
    assert before == (FAMILIES["softmax"].kernels, needing_devices)


# What is lowered for CUDA.

CHECKPOINTED = jax.grad(lambda x: jnp.sum(jnp.sin(jax.checkpoint(lambda x: softmax(jnp.sin(x)))(x))))
TRANSFORMATIONS = {
    "call": (softmax, [X], [FORWARD]),
    "grad": (jax.grad(loss), [X], [FORWARD, BACKWARD]),
    "grad with scale": (jax.grad(lambda x, s: loss(x, scale=s)), [X, SCALE], [FORWARD, BACKWARD]),
    "grad of scale": (jax.grad(lambda s, x: loss(x, scale=s)), [SCALE, X], [FORWARD, BACKWARD]),
    "jvp": (lambda x, t: jax.jvp(softmax, [x], [t]), [X, X], [FORWARD, BACKWARD]),
    "vmap": (jax.vmap(softmax), [X], [FORWARD]),
    "vmap along rows": (jax.vmap(softmax, in_axes=1, out_axes=1), [X], [FORWARD]),
    "vmap of grad": (jax.vmap(jax.grad(loss)), [X], [FORWARD, BACKWARD]),
    "scan": (lambda x: lax.scan(lambda x, _: (softmax(x), None), x, length=3)[0], [X], [FORWARD]),
    "checkpoint": (CHECKPOINTED, [X], [FORWARD, FORWARD, BACKWARD]),
    "forward over reverse": (lambda x, t: jax.jvp(jax.grad(loss), [x], [t])[1], [X, X], [FORWARD, BACKWARD, BACKWARD]),
}


@pytest.mark.parametrize("transformation", TRANSFORMATIONS)
def test_every_transformation_lowers_to_kernels(probe, transformation):
    f, avals, names = TRANSFORMATIONS[transformation]
    kernels.assert_ran(kernels.lowered_for_cuda(f, *avals, kernels=names), "probe")


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=" and ".join)
def test_export_holds_the_kernel_for_cuda_and_the_reference_elsewhere(probe, platforms):
    exported = jax.export.export(jax.jit(lambda x: value_and_cotangent(softmax)(x)[1]), platforms=platforms)(X)
    kernels.assert_ran(exported.mlir_module(), "probe")
    assert sorted(kernels.kernel_names(exported.mlir_module())) == sorted([FORWARD, BACKWARD])
    if "cpu" in platforms:
        with jax.default_device(jax.devices("cpu")[0]):
            x = np.random.default_rng(0).standard_normal(X.shape).astype(X.dtype)
            assert oracle.error(exported.call(x), oracle.softmax_derivative(x, x, -1)) <= 1


@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda")], ids=" and ".join)
def test_export_with_symbolic_shapes_holds_the_reference(probe, platforms):
    x = jax.ShapeDtypeStruct(jax.export.symbolic_shape("batch, 32, 128"), jnp.float32)
    exported = jax.export.export(jax.jit(softmax), platforms=platforms)(x)
    assert kernels.kernel_names(exported.mlir_module()) == []
    with pytest.raises(NotImplementedError, match="shapes must be known while lowering, and these are symbolic"):
        jax.export.export(jax.jit(lambda x: softmax(x, implementation="probe")), platforms=["cuda"])(x)


@pytest.mark.parametrize("f", [jaxsoftmax.log_softmax, jnp.sin], ids=["reference", "no op"])
def test_a_program_without_the_kernel_does_not_pass_for_one_with_it(probe, f):
    both = explain(lambda x: (softmax(x), f(x), jaxsoftmax.log_softmax(x)), X, platform="cuda")
    for what in (kernels.lowered_for_cuda(f, X), explain(f, X, platform="cuda"), both):
        with pytest.raises(AssertionError):
            kernels.assert_ran(what, "probe")
    with pytest.raises(AssertionError):
        kernels.assert_ran(kernels.lowered_for_cuda(softmax, X), "mosaic")


# What the kernel computes: interpreted here, native below.


def scores(shape, dtype, seed=0):
    """Scores of which each row has its own spread and offset, and some are -inf."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(shape) * np.exp(rng.uniform(-3, 3, (*shape[:-1], 1)))
    x += rng.choice([0.0, 1e4, -3e4, 1e6 if dtype == "float32" else 0.0], (*shape[:-1], 1))
    x[rng.random(shape) < 0.1] = -np.inf
    return x.astype(jnp.dtype(dtype))


def half_ulp(dtype, y):
    """Half a unit in the last place of a 16-bit dtype at `y`."""
    info = jnp.finfo(dtype)
    _, exponent = np.frexp(np.fmax(np.abs(y), float(info.tiny)))
    return 0 if info.bits == 32 else np.ldexp(float(info.eps) / 2, exponent - 1)


def assert_softmax(y, x, scale=1.0):
    """Holds `y` against float64."""
    with np.errstate(invalid="ignore"):
        s = np.asarray(x, np.float64) * scale
        shifted = s - np.max(s, -1, keepdims=True)
    weights = np.exp(shifted)
    truth = weights / np.sum(weights, -1, keepdims=True)
    budget = (8 + 3 * np.where(truth > 0, -shifted, 0)) * 2**-24 * truth + 2**-126 + half_ulp(y.dtype, truth)
    assert_within(y, truth, budget)


def assert_jacobian(dx, y, t, scale=1.0):
    """Holds the product of softmax's Jacobian with `t`, from the rounded `y`, against float64."""
    y, t = np.asarray(y, np.float64), np.where(np.asarray(y) == 0, 0, np.asarray(t, np.float64)) * scale
    truth = y * (t - np.sum(y * t, -1, keepdims=True))
    terms = np.abs(y) * (np.abs(t) + np.sum(np.abs(y * t), -1, keepdims=True))
    assert_within(dx, truth, 8 * 2**-24 * terms + 2**-126 + half_ulp(dx.dtype, truth))


def assert_within(actual, truth, budget):
    actual = np.asarray(actual, np.float64)
    np.testing.assert_array_equal(np.isnan(actual), np.isnan(truth))
    error = np.nan_to_num(np.abs(actual - truth) / budget)
    assert np.max(error) <= 1, f"{np.max(error):.3g} times the budget at {np.unravel_index(np.argmax(error), error.shape)}"


SHAPES = [("float32", (32, 64)), ("float32", (8, 1024)), ("bfloat16", (64, 192)), ("float16", (8, 512))]


@pytest.mark.parametrize(("dtype", "shape"), SHAPES, ids=str)
def test_interpreted_kernels_are_right_in_both_directions(probe, dtype, shape):
    x, c = scores(shape, dtype), np.random.default_rng(1).standard_normal(shape).astype(jnp.dtype(dtype))
    y, vjp = kernels.interpreted(functools.partial(jax.vjp, probe.alone), x)
    assert_softmax(y, x)
    (dx,) = kernels.interpreted(vjp, c)
    assert_jacobian(dx, y, c)


def test_interpreted_kernels_scale_and_convert(probe):
    x, t, scale = scores((32, 128), "bfloat16"), scores((32, 128), "float16", 1), np.full((1, 1), -0.3, np.float32)
    x[np.isinf(x)] = 7  # a negative scale makes +inf of -inf
    y = kernels.interpreted(functools.partial(probe.forward, dtype="float32"), x, scale)
    assert_softmax(y, x, np.float64(scale[0, 0]))
    dx = kernels.interpreted(functools.partial(probe.backward, dtype="bfloat16"), y, np.nan_to_num(t, neginf=3), scale)
    assert dx.dtype == jnp.bfloat16
    assert_jacobian(dx, y, np.nan_to_num(t, neginf=3), np.float64(scale[0, 0]))


def hurtful():
    """Rows that hurt, some only in their left or right half of columns, and which of them are NaN."""
    x = np.random.default_rng(0).standard_normal((16, 128)).astype(np.float32)
    x[0] = -np.inf
    x[1, :64] = -np.inf
    x[2, 64:] = -np.inf
    x[3, 5] = np.inf
    x[4, 100] = np.inf
    x[5, 5], x[5, 100] = np.inf, -np.inf
    x[6, 70] = np.nan
    x[7, :64], x[7, 64:] = -3e38, 3e38
    x[8] = np.inf
    return x, [0, 3, 4, 5, 6, 8]


def test_interpreted_kernels_have_the_edge_cases_of_the_reference(probe):
    x, nan = hurtful()
    y = kernels.interpreted(probe.alone, x)
    assert_softmax(y, x)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(y).all(-1)), nan)
    t = np.where(np.isnan(x), 1, np.nan_to_num(x, posinf=1, neginf=np.nan)).astype(np.float32)
    dx = kernels.interpreted(functools.partial(probe.backward, scale=None, dtype="float32"), np.nan_to_num(y), t)
    assert_jacobian(dx, np.nan_to_num(y), t)  # where y is 0 the result is, although t is NaN there


def test_all_of_online_runs_inside_a_kernel(probe):
    layout, block = probe._layout(64, jnp.dtype("float32"))

    def body(x_ref, out_ref):
        rows = pl.ds(lax.axis_index("tile") * block, block)
        left, middle, right = (plgpu.load(x_ref.at[rows, pl.ds(i, 64)], layout=layout, optimized=False) for i in (0, 64, 128))
        state = online.merge(online.push(online.identity((block,)), left), online.push(online.lift(middle), right))
        compat.store(out_ref.at[rows], online.finish(state).m)

    def lse(x):
        out_type = jax.ShapeDtypeStruct(x.shape[:1], jnp.float32)
        return plgpu.kernel(body, out_type=out_type, grid=(len(x) // block,), grid_names=("tile",), kernel_name="online")(x)

    x = np.random.default_rng(0).standard_normal((2 * block, 192)).astype(np.float32) * 30
    x[0], x[1, :130], x[2, 3] = -np.inf, -np.inf, np.inf
    kernels.lowered_for_cuda(lse, jax.ShapeDtypeStruct(x.shape, x.dtype), kernels=["online"])
    assert oracle.error(kernels.interpreted(lse, x), oracle.logsumexp(x, -1)) <= 1


def racing(x):
    """Two warpgroups write the same rows and do not wait for each other."""

    def body(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    return plgpu.kernel(body, out_type=jax.ShapeDtypeStruct(x.shape, x.dtype), num_threads=2, thread_name="warpgroup")(x)


def test_interpretation_fails_on_a_race_an_error_or_the_lack_of_a_kernel(probe):
    x = np.zeros((32, 128), np.float32)
    for f in (racing, lambda x: probe.alone(racing(x))):  # of several kernels JAX itself remembers the last one's races only
        with pytest.raises(AssertionError, match="data race"):
            kernels.interpreted(f, x)
    with pytest.raises(AssertionError, match="no kernel was interpreted"):
        kernels.interpreted(softmax, x)
    with pytest.raises(ZeroDivisionError):
        kernels.interpreted(lambda x: (probe.alone(x), 1 // 0), x)
    np.testing.assert_array_equal(kernels.interpreted(probe.alone, x), 1 / 128)


# Shards. XLA partitions the reference by itself; another implementation is lowered for the shards of each device.

E, A = AxisType.Explicit, AxisType.Auto
KINDS = {"explicit": (E, E), "auto": (A, A), "explicit and auto": (E, A), "auto and explicit": (A, E)}
MESHES = pytest.mark.parametrize("kind", ["explicit", "auto", "explicit and auto"])
OPS = {"softmax": softmax, "log_softmax": jaxsoftmax.log_softmax, "logsumexp": last_logsumexp}
COLLECTIVES = ("all-gather", "all-to-all", "collective-permute", "all-reduce")


def make_mesh(kind):
    return jax.make_mesh((4, 2), ("data", "model"), axis_types=KINDS[kind], devices=jax.devices("cpu"))


def sharded(shape, mesh, *spec):
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    return x, jax.device_put(x, NamedSharding(mesh, P(*spec)))


def value_and_cotangent(f):
    """The result of `f`, and the cotangent of its operand for that one, or for ones where it has no such shape."""

    def both(x):
        y, pull = jax.vjp(f, x)
        return y, *pull(x if y.shape == x.shape else jnp.ones_like(y))

    return both


def assert_right(op, actual, x):
    """Fails unless that is what float64 has, within the budgets."""
    pulled = {"softmax": oracle.softmax_derivative, "log_softmax": oracle.log_softmax_cotangent}
    cotangent = pulled[op](x, x, -1) if op in pulled else oracle.logsumexp_cotangent(x, np.ones(x.shape[:-1]), -1)
    for result, truth in zip(actual, (getattr(oracle, op)(x, -1), cotangent), strict=True):
        assert oracle.error(result, truth) <= 1


def collectives(compiled):
    return {name for name in COLLECTIVES if name in str(compiled.as_text())}


@MESHES
@pytest.mark.parametrize("op", OPS)
def test_an_implementation_gets_shards_and_nothing_is_communicated(local, op, kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, shards = sharded((8, 6, 64), mesh, "data", "model")
        compiled = jax.jit(value_and_cotangent(OPS[op])).lower(shards).compile()
        assert_right(op, compiled(shards), x)
    assert collectives(compiled) == set()
    assert "[8,6,64]" not in str(compiled.as_text())
    operands = {shapes[0] for shapes in local.shapes}
    # automatic axes: first once for the whole, only to find the types
    assert operands - {x.shape} == {(2, 3, 64)}
    assert kind != "explicit" or x.shape not in operands


@MESHES
def test_operands_that_vary_along_fewer_axes_are_sharded_along_those(local, kind):
    mesh = make_mesh(kind)
    where = np.random.default_rng(1).random((1, 6, 64)) < 0.7
    where[..., 0] = True
    with jax.set_mesh(mesh):
        x, shards = sharded((8, 6, 64), mesh, "data", "model")
        mask = jax.device_put(where, NamedSharding(mesh, P(None, "model")))
        compiled = jax.jit(lambda x, where, scale: softmax(x, where=where, scale=scale)).lower(shards, mask, 0.5).compile()
        assert oracle.error(compiled(shards, mask, 0.5), oracle.softmax(x, -1, where, 0.5)) <= 1
    assert collectives(compiled) == set()
    assert local.shapes[-1] == ((2, 3, 64), (1, 3, 64), (1, 1, 1))


@MESHES
def test_eager_calls_and_vmap_run_on_shards(local, kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, shards = sharded((8, 6, 64), mesh, "data")
        for f in (softmax, jax.jit(jax.vmap(softmax, in_axes=1, out_axes=1))):
            y = f(shards)
            assert oracle.error(y, oracle.softmax(x)) <= 1
            assert y.sharding.is_equivalent_to(shards.sharding, 3)
            assert local.shapes.pop() == ((2, 6, 64),)


@MESHES
def test_a_forced_implementation_runs_on_shards_of_rows_or_says_why_not(local, kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, shards = sharded((8, 64), mesh, None, "model")
        forced = functools.partial(softmax, implementation="local")
        assert oracle.error(jax.jit(forced)(shards), oracle.softmax(x)) <= 1
        assert ((8, 32),) in local.shapes
        local.reason = lambda problem: "it is narrow" if problem.operands["x"].shape == (8, 32) else None
        # from within the compiler, errors come wrapped
        refused = pytest.raises(NotImplementedError if kind == "explicit" else jax.errors.JaxRuntimeError)
        with kernels.anew(), refused as raised:
            jax.jit(forced).lower(shards).compile()
    assert "softmax: implementation='local' cannot run: it is narrow" in str(raised.value)


def test_a_forced_implementation_runs_on_shards_where_it_would_not_pay(local, monkeypatch):
    monkeypatch.setattr(across_devices, "slower_states", lambda x: "rows are short")
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        _, shards = sharded((8, 64), mesh, None, "model")
        for forced, chosen in ((None, "xla"), ("local", "local")):
            with kernels.anew():
                found = explain(functools.partial(softmax, implementation=forced), shards, platform="cpu")
            assert [decision.implementation for decision in found] == [chosen] * 2


def test_padding_of_an_axis_that_devices_cannot_share_evenly_does_not_count(local):
    mesh = make_mesh("auto")
    with jax.set_mesh(mesh):
        x, shards = sharded((6, 64), mesh, None, "data")
        for op, f in OPS.items():
            cut = jax.jit(lambda x, f=f: f(x[:, :61]))
            assert oracle.error(cut(shards), getattr(oracle, op)(x[:, :61], -1)) <= 1


def test_explain_shows_each_op_once_and_of_shared_rows_what_runs_on_shards(local):
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        rows, cols = (sharded((8, 64), mesh, *spec)[1] for spec in [("data",), (None, "model")])
        (decision,) = explain(softmax, rows, platform="cpu")
        assert (decision.operands, decision.implementation) == (("float32[2,64]",), "local")
        state, weights = explain(softmax, cols, platform="cpu")
        assert (state.primitive, state.operands, state.implementation) == ("logsumexp", ("float32[8,32]",), "local")
        row = "float32[8,1]"
        expected = "logsumexp_vjp", ("float32[8,32]", row, row, row), "local"
        assert (weights.primitive, weights.operands, weights.implementation) == expected
    mesh = make_mesh("auto")
    with jax.set_mesh(mesh):
        (decision,) = explain(softmax, sharded((8, 64), mesh, "data")[1], platform="cpu")
        assert (decision.operands, decision.implementation) == (("float32[8,64]",), "local")


@MESHES
def test_inside_a_shard_map_nothing_is_wrapped(local, kind):
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        x, shards = sharded((8, 64), mesh, "data")
        lowered = jax.jit(jax.shard_map(softmax, in_specs=P("data"), out_specs=P("data"))).lower(shards)
        assert local.shapes == [((2, 64),)]
        assert lowered.as_text().count("sdy.manual_computation") == 1
        assert "CustomSPMDPartitioning" not in lowered.as_text()
        assert oracle.error(lowered.compile()(shards), oracle.softmax(x)) <= 1


def test_a_shard_map_over_some_axes_leaves_automatic_ones_to_the_reference(local):
    for kind, implementation in (("auto", "xla"), ("explicit", "local"), ("auto and explicit", "local")):
        mesh = make_mesh(kind)
        with jax.set_mesh(mesh):
            x, shards = sharded((8, 6, 64), mesh, "data", "model")
            f = jax.jit(jax.shard_map(softmax, in_specs=P("data"), out_specs=P("data"), axis_names={"data"}))
            (decision,) = explain(f, shards, platform="cpu")
            assert decision.implementation == implementation
            if implementation == "xla":
                assert "leaves mesh axes automatic" in dict(decision.refusals)["local"]
            compiled = f.lower(shards).compile()
            assert oracle.error(compiled(shards), oracle.softmax(x)) <= 1
            double = jax.shard_map(lambda x: x + x, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
            # JAX 0.12 gathers what enters a map over automatic axes alone beside explicit ones, whatever the function
            assert collectives(compiled) == collectives(jax.jit(double).lower(shards).compile())


def test_sharded_rows_lower_to_kernels_for_cuda(probe):
    mesh = make_mesh("explicit")
    with jax.set_mesh(mesh):
        _, shards = sharded((64, 128), mesh, "data")
        (decision,) = explain(softmax, shards, platform="cuda")
        assert (decision.operands, decision.implementation) == (("float32[16,128]",), "probe")
        assert "tensor<16x128xf32>" in kernels.lowered_for_cuda(jax.grad(loss), shards, kernels=[FORWARD, BACKWARD])


# Native.


@pytest.fixture
def gpu(gpu, probe):
    """With the probe among the implementations."""


def test_what_is_missing_is_said_in_words(monkeypatch):
    found = [types.SimpleNamespace(compute_capability="8.0")]
    monkeypatch.setattr(jax, "devices", lambda platform: found)
    assert kernels.missing(9) == "needs an NVIDIA GPU of compute capability 9.x, and this one has 8.0"
    assert kernels.missing(8) is None

    def none(platform):
        raise RuntimeError(f"Unknown backend {platform}")

    monkeypatch.setattr(jax, "devices", none)
    assert kernels.missing(9) == "needs an NVIDIA GPU of compute capability 9.x, and JAX sees none"


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape"), SHAPES, ids=str)
@pytest.mark.parametrize("mode", ["eager", "jit", "vmap"])
def test_native_kernels_are_right_in_both_directions(gpu, mode, dtype, shape):
    wrap = {"eager": lambda f: f, "jit": jax.jit, "vmap": jax.vmap}[mode]
    forward, backward = wrap(softmax), wrap(lambda x, c: jax.vjp(softmax, x)[1](c)[0])
    x = scores((2, *shape), dtype)
    c = np.random.default_rng(1).standard_normal(x.shape).astype(x.dtype)
    kernels.assert_ran(explain(forward, x), "probe")
    kernels.assert_ran(explain(backward, x, c), "probe")
    y = forward(x)
    assert_softmax(y, x)
    assert_jacobian(backward(x, c), y, c)


@pytest.mark.gpu
def test_native_kernels_have_the_edge_cases_of_the_reference(gpu):
    x, nan = hurtful()
    y = softmax(x, implementation="probe")
    assert_softmax(y, x)
    np.testing.assert_array_equal(np.flatnonzero(np.isnan(y).all(-1)), nan)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "shape"), SHAPES, ids=str)
def test_native_kernels_give_the_same_bits_again_and_in_other_company(gpu, dtype, shape):
    x = jnp.asarray(scores((64 * shape[0], shape[1]), dtype))
    f = jax.jit(functools.partial(softmax, implementation="probe"))
    bits = np.asarray(f(x)).tobytes()
    for _ in range(3):
        assert np.asarray(f(x)).tobytes() == bits
    few = np.asarray(f(x[: shape[0]]))
    assert few.tobytes() == bits[: few.nbytes]
