"""Divergences of two linear layers, whose logits are made part by part, against those of whole logits in float64."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax.ops.cross_entropy import parts

from ..support import cases, oracle
from ..support.meshes import COLLECTIVE, make_mesh

pytestmark = pytest.mark.usefixtures("hollow_kernels")

X64 = pytest.mark.usefixtures("x64")
KINDS = ("forward_kl", "reverse_kl", "js", "tv")
ROWS, CLASSES, JS_WEIGHT = (3, 70), 32, 0.3
OPERANDS = ("hidden", "weight", "teacher_hidden", "teacher_weight")
WRT = (*OPERANDS, "bias", "teacher_bias", "temperature", "sample_weight")


@pytest.fixture
def in_parts(monkeypatch):
    for most in ("MOST", "MOST_WITH_GRADIENT"):
        monkeypatch.setattr(parts, most, 128 * CLASSES * 16)


def given(rows=ROWS, classes=CLASSES, dtype=np.float64):
    rng = np.random.default_rng(0)
    shapes = {"hidden": (*rows, 16), "weight": (16, classes), "teacher_hidden": (*rows, 8), "teacher_weight": (8, classes)}
    arrays = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    arrays |= {name: rng.standard_normal(classes) for name in ("bias", "teacher_bias")}
    arrays = {name: array.astype(jnp.dtype(dtype)) for name, array in arrays.items()}
    return arrays | {"temperature": rng.uniform(0.5, 2, rows), "sample_weight": rng.random(rows)}


def by_parts(arrays, **options):
    arrays = dict(arrays)
    operands = [arrays.pop(name) for name in OPERANDS]
    return jaxsoftmax.linear_divergence(*operands, js_weight=JS_WEIGHT, **arrays, **options)


def whole(arrays, kind="forward_kl", reduction="mean", class_axis=-1, logits_soft_cap=None):
    """Computes the divergences with all logits, by their definitions."""

    def log_softmax(prefix):
        weight = arrays[f"{prefix}weight"]
        logits = arrays[f"{prefix}hidden"] @ (weight if class_axis else weight.T)
        logits += jnp.broadcast_to(arrays.get(f"{prefix}bias", 0.0), logits.shape)
        scores = logits if logits_soft_cap is None else logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
        return jax.nn.log_softmax(scores / jnp.broadcast_to(arrays.get("temperature", 1.0), scores.shape[:-1])[..., None])

    def kl(log_p, log_q):
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)

    teacher, student = log_softmax("teacher_"), log_softmax("")
    if kind == "tv":
        divergence = jnp.sum(jnp.abs(jnp.exp(teacher) - jnp.exp(student)), -1) / 2
    elif kind == "js":
        mixture = jnp.log(JS_WEIGHT * jnp.exp(teacher) + (1 - JS_WEIGHT) * jnp.exp(student))
        divergence = JS_WEIGHT * kl(teacher, mixture) + (1 - JS_WEIGHT) * kl(student, mixture)
    else:
        divergence = kl(teacher, student) if kind == "forward_kl" else kl(student, teacher)
    factors = jnp.broadcast_to(arrays.get("sample_weight", 1.0), divergence.shape)
    total = jnp.sum(factors * divergence)
    return {"none": factors * divergence, "sum": total, "mean": total / jnp.sum(factors)}[reduction]


def with_derivatives(f, arrays, **options):
    """Returns divergences, and derivatives in reverse and forward mode of a function that is not linear in them."""

    def total(wrt):
        return jnp.sum(jnp.sin(f(wrt, **options)))

    @jax.jit
    def run(wrt):
        gradients = jax.grad(total)
        return f(wrt, **options), gradients(wrt), jax.jvp(total, (wrt,), (jax.tree.map(jnp.cos, wrt),))[1]

    return run(arrays)


@X64
@pytest.mark.parametrize(
    ("kind", "reduction", "class_axis", "logits_soft_cap"),
    [
        pytest.param(kind, reduction, axis, cap, marks=cases.slow_unless((i + j) % 3 == 0))
        for i, kind in enumerate(KINDS)
        for j, (reduction, axis, cap) in enumerate([("mean", -1, None), ("sum", 0, 5.0), ("none", -1, 5.0)])
    ],
)
@pytest.mark.usefixtures("in_parts")
def test_divergences_and_derivatives_are_those_of_whole_logits(kind, reduction, class_axis, logits_soft_cap):
    arrays = given()
    if class_axis == 0:
        arrays |= {name: arrays[name].T for name in ("weight", "teacher_weight")}
    options = {"kind": kind, "reduction": reduction, "class_axis": class_axis, "logits_soft_cap": logits_soft_cap}
    oracle.assert_same_in_float64(*(with_derivatives(f, arrays, **options) for f in (by_parts, whole)))


def moved(f):
    return lambda wrt: jax.jvp(f, (wrt,), (jax.tree.map(jnp.cos, wrt),))[1]


def total(f):
    """A function that is not linear in the results."""
    return lambda wrt: sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves(f(wrt)))


def in_a_scan(f):
    """Steps share the layers."""

    def call(wrt):
        states = jnp.stack([wrt["hidden"], 2 * wrt["hidden"]])
        return jax.lax.scan(lambda _, hidden: (None, f(wrt | {"hidden": hidden})), None, states)[1]

    return call


def of_many_tangents(f):
    """Examples share the layers, but not their tangents."""

    def call(wrt):
        factors = {name: 1 + jnp.arange(3.0) * at for at, name in enumerate(wrt)}

        def examples(factors):
            tangents = {name: factors[name] * jnp.cos(each) for name, each in wrt.items()}
            return jax.jvp(f, (wrt,), (tangents,))[1]

        return jax.grad(lambda factors: jnp.sum(jnp.sin(jax.vmap(examples)(factors))))(factors)

    return call


def transposed(f):
    """Transposes what reverse mode returns: the tangents, from another program."""

    def call(wrt):
        results, pull = jax.vjp(f, wrt)
        return jax.linear_transpose(lambda c: pull(c)[0], results)(jax.tree.map(jnp.cos, wrt))

    return call


DERIVED = {
    "tangents of gradients": lambda f: moved(jax.grad(total(f))),
    "gradients of gradients": lambda f: jax.grad(total(jax.grad(total(f)))),
    "gradients of tangents": lambda f: jax.grad(total(moved(f))),
    "tangents of tangents": lambda f: moved(moved(f)),
    "third derivatives": lambda f: jax.grad(total(moved(jax.grad(total(f))))),
    "tangents of gradients in a scan": lambda f: moved(jax.grad(total(in_a_scan(f)))),
    "tangents of a linear function": lambda f: lambda wrt: moved(jax.linearize(f, wrt)[1])(wrt),
    "transposed": transposed,
    "gradients of many tangents": of_many_tangents,
    "checkpointed": lambda f: jax.grad(total(jax.checkpoint(f))),
}


@X64
@pytest.mark.parametrize(
    ("derived", "kind", "reduction"),
    [
        pytest.param(name, kind, reduction, marks=cases.slow_unless(kind == "forward_kl" and (reduction == "none" or i == 0)))
        for i, name in enumerate(DERIVED)
        for kind in ("forward_kl", "js")
        for reduction in ("mean", "none")
    ],
)
@pytest.mark.usefixtures("in_parts")
def test_derivatives_of_any_order_in_both_modes(derived, kind, reduction):
    arrays = {name: given()[name] for name in (*OPERANDS, "temperature")}
    wrt = {name: arrays[name] for name in ("hidden", "teacher_weight", "temperature")}

    def derivatives(f):
        return jax.jit(DERIVED[derived](lambda wrt: f(arrays | wrt, kind=kind, reduction=reduction)))(wrt)

    oracle.assert_same_in_float64(derivatives(by_parts), derivatives(whole))


@X64
@pytest.mark.parametrize("kind", ["js", "tv"])
@pytest.mark.usefixtures("in_parts")
def test_a_class_that_both_exclude_changes_nothing(kind):
    """A bias of -inf excludes it. The other divergences exclude it from the mean of a logarithm alone."""
    arrays, without = given(), given()
    for prefix in ("", "teacher_"):
        arrays[f"{prefix}bias"][5] = -np.inf
        without[f"{prefix}bias"], without[f"{prefix}weight"] = (
            np.delete(without[f"{prefix}{name}"], 5, -1) for name in ("bias", "weight")
        )
    (value, gradients, _), (expected, of_others, _) = (
        with_derivatives(by_parts, each, kind=kind) for each in (arrays, without)
    )
    for name in ("bias", "weight", "teacher_bias", "teacher_weight"):
        np.testing.assert_array_equal(gradients[name][..., 5], 0)
        gradients[name] = np.delete(gradients[name], 5, -1)
    oracle.assert_same_in_float64((value, gradients), (expected, of_others))


@X64
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("in_parts")
def test_without_hidden_units_logits_are_biases(reduction):
    arrays = given()
    for prefix in ("", "teacher_"):
        arrays[f"{prefix}hidden"], arrays[f"{prefix}weight"] = np.zeros((*ROWS, 0)), np.zeros((0, CLASSES))
    oracle.assert_same_in_float64(*(with_derivatives(f, arrays, reduction=reduction) for f in (by_parts, whole)))


@X64
def test_axes_of_classes_may_differ():
    arrays = given()
    expected = whole(arrays)
    turned = arrays | {"teacher_weight": arrays["teacher_weight"].T}
    oracle.assert_same_in_float64(by_parts(turned, teacher_class_axis=0), expected)


STUDENT = ("hidden", "weight")


@pytest.mark.parametrize("rows", [40, 1024], ids=["one part", "parts"])
@pytest.mark.parametrize(
    ("reduction", "dtype", "wrt", "products"),
    [
        ("mean", "float32", STUDENT, 4),
        ("none", "float32", STUDENT, 6),
        ("none", "float32", ("hidden",), 5),
        ("none", "float32", OPERANDS, 8),
        ("none", "bfloat16", STUDENT, 6),
        ("mean", "float16", STUDENT, 6),
    ],
)
@pytest.mark.usefixtures("in_parts")
def test_products_of_each_form(reduction, dtype, wrt, products, rows):
    """A frozen teacher costs one product. The products for gradients have 16 bits."""
    arrays = {name: array for name, array in given((rows,), dtype=dtype).items() if name in OPERANDS}

    def loss(wrt):
        return jnp.sum(jnp.sin(by_parts(arrays | wrt, reduction=reduction)))

    text = jax.jit(jax.value_and_grad(loss)).lower({name: arrays[name] for name in wrt}).as_text("hlo")
    found = re.findall(r"= (\w+)\[[\d,]*\]\S* dot\(", text)
    of_gradients = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[dtype]
    assert len(found) == products
    assert found.count(of_gradients) == (products if dtype == "float32" else len(wrt))


@pytest.mark.parametrize("kind", cases.quick("forward_kl", slow=["reverse_kl", "js", "tv"]))
@pytest.mark.parametrize(("dtype", "logits_dtype"), [("bfloat16", None), ("bfloat16", "bfloat16"), ("float16", None)])
def test_errors_in_16_bits(dtype, logits_dtype, kind):
    """Logits are sums that are not rounded, unless their dtype is asked for."""
    arrays = given(rows=(100,), dtype=dtype)
    found, gradients, _ = with_derivatives(by_parts, arrays, kind=kind, reduction="none", logits_dtype=logits_dtype)
    assert found.dtype == jnp.float32
    assert gradients["weight"].dtype == jnp.dtype(dtype)
    with jax.enable_x64(True):
        wide = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        truth, true_gradients, _ = jax.tree.map(np.asarray, with_derivatives(whole, wide, kind=kind, reduction="none"))
    eps = float(jnp.finfo(dtype).eps)
    tolerance = eps if logits_dtype else 8 * oracle.EPS
    np.testing.assert_allclose(found, truth, rtol=tolerance, atol=2 * tolerance)
    for name in ("hidden", "weight"):
        error = np.linalg.norm(np.float64(gradients[name]) - true_gradients[name]) / np.linalg.norm(true_gradients[name])
        assert error < (8 if logits_dtype else 2) * eps, name


@X64
@pytest.mark.parametrize("kind", cases.quick("forward_kl", slow=["js", "tv"]))
@pytest.mark.usefixtures("in_parts")
def test_rows_that_do_not_count_may_hold_anything(kind):
    arrays = given(rows=(200,))
    few = {name: array[50:] if len(array) == 200 else array for name, array in arrays.items()}
    arrays["sample_weight"][:50] = 0
    for name in ("hidden", "teacher_hidden", "temperature"):
        arrays[name][:50] = np.nan
    (value, gradients, _), (expected, of_few, _) = (with_derivatives(by_parts, given, kind=kind) for given in (arrays, few))
    for name in ("hidden", "teacher_hidden", "temperature"):
        np.testing.assert_array_equal(gradients[name][:50], 0)
        gradients[name] = gradients[name][50:]
    gradients.pop("sample_weight"), of_few.pop("sample_weight")
    oracle.assert_same_in_float64((value, gradients), (expected, of_few))


@X64
@pytest.mark.parametrize(
    ("kind", "reduction"),
    [
        pytest.param(k, r, marks=cases.slow_unless((i + j) % 4 == 0))
        for i, k in enumerate(KINDS)
        for j, r in enumerate(["mean", "none"])
    ],
)
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.usefixtures("in_parts")
def test_sharded_rows_and_classes(axes, kind, reduction):
    arrays, mesh = given(rows=(512,)), make_mesh(axes)
    of_classes = {
        name: P(None, "model") if "weight" in name else P("model") for name in WRT if "weight" in name or "bias" in name
    }
    specs = {name: P("data") for name in WRT} | of_classes | {"sample_weight": P("data")}
    options = {"kind": kind, "reduction": reduction}
    with jax.set_mesh(mesh):
        sharded = {name: jax.device_put(array, NamedSharding(mesh, specs[name])) for name, array in arrays.items()}
        compiled = jax.jit(functools.partial(with_derivatives, by_parts, **options)).lower(sharded).compile()
        actual = compiled(sharded)
    gathered = [shape for shape, name in COLLECTIVE.findall(compiled.as_text()) if name == "all-gather"]
    assert not any(re.search(rf"\b({16 * CLASSES}|16,{CLASSES}|8,{CLASSES})\b", shape) for shape in gathered)
    oracle.assert_same_in_float64(actual, with_derivatives(whole, arrays, **options))


IN_A_SHARD_MAP = {("forward_kl", "mean"), ("forward_kl", "none"), ("tv", "mean")}


@X64
@pytest.mark.parametrize(
    ("kind", "reduction"),
    [
        pytest.param(kind, reduction, marks=cases.slow_unless((kind, reduction) in IN_A_SHARD_MAP))
        for kind in KINDS
        for reduction in ("mean", "none")
    ],
)
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.usefixtures("in_parts")
def test_classes_that_devices_share_in_a_shard_map(kind, reduction, check_vma):
    mesh, arrays = make_mesh(AxisType.Auto, (4,), ("model",)), {name: given()[name] for name in OPERANDS}
    specs = {"hidden": P(), "teacher_hidden": P(), "weight": P(None, "model"), "teacher_weight": P(None, "model")}
    options = {"kind": kind, "reduction": reduction}
    local = functools.partial(by_parts, axis_name="model", **options)
    f = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma)
    oracle.assert_same_in_float64(with_derivatives(f, arrays), with_derivatives(whole, arrays, **options))


@X64
@pytest.mark.parametrize("kind", cases.quick("forward_kl", slow=["reverse_kl", "js"]))
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.usefixtures("in_parts")
def test_second_derivatives_of_classes_that_devices_share(kind, check_vma):
    """Derivatives by the temperature go through the collective of each part."""
    mesh = make_mesh(AxisType.Auto, (4,), ("model",))
    arrays = {name: given(rows=(1024,))[name] for name in (*OPERANDS, "temperature")}
    specs = {name: P(None, "model") if "weight" in name else P() for name in arrays}
    local = functools.partial(by_parts, kind=kind, axis_name="model")
    f = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=P(), check_vma=check_vma)

    def second(f):
        gradient = jax.grad(lambda wrt: jnp.sin(f(wrt)))
        return jax.jit(lambda wrt: jax.jvp(gradient, (wrt,), (jax.tree.map(jnp.cos, wrt),))[1])(arrays)

    oracle.assert_same_in_float64(second(f), second(functools.partial(whole, kind=kind)))


@X64
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize(
    "mapped",
    cases.quick(("hidden", "teacher_hidden"), ("hidden", "weight"), slow=[("temperature",), ("teacher_weight",)]),
    ids=str,
)
@pytest.mark.usefixtures("in_parts")
def test_examples_of_a_batch(mapped, reduction):
    """Each has its own gradients, and arrays that they share have the sum of them."""
    names = (*OPERANDS, "temperature", "bias")
    arrays = {name: np.stack([given()[name], given()[name] / 2]) if name in mapped else given()[name] for name in names}
    axes = ({name: 0 if name in mapped else None for name in names},)

    def derivatives(f):
        def of_one(arrays):
            return jnp.sum(jnp.sin(f(arrays, reduction=reduction)))

        def together(arrays):
            return jnp.sum(jnp.sin(jax.vmap(of_one, axes)(arrays)))

        own = jax.jit(jax.vmap(jax.value_and_grad(of_one), axes))(arrays)
        return own, jax.jit(jax.grad(together))(arrays), jax.jit(moved(together))(arrays)

    oracle.assert_same_in_float64(derivatives(by_parts), derivatives(whole))


def of_examples(arrays):
    mapped = jax.vmap(
        functools.partial(by_parts, reduction="none"), ({name: 0 if "hidden" in name else None for name in arrays},)
    )
    return jnp.sum(jnp.sin(mapped(arrays)))


@pytest.mark.usefixtures("in_parts")
def test_examples_that_share_the_layers_have_one_gradient_of_them():
    arrays = {name: given((5, 300), dtype=np.float32)[name] for name in OPERANDS}
    text = jax.jit(jax.grad(of_examples)).lower(arrays).as_text("hlo")
    assert f"[16,{CLASSES}]" in text
    assert f"[5,16,{CLASSES}]" not in text


@X64
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("spec", cases.quick(P("data"), P(None, "data"), slow=[P(("data", "model"))]), ids=str)
@pytest.mark.usefixtures("in_parts")
def test_examples_and_rows_that_devices_share_are_not_gathered(spec, axes):
    arrays, mesh = {name: given((8, 512))[name] for name in OPERANDS}, make_mesh(axes)
    with jax.set_mesh(mesh):
        places = {name: NamedSharding(mesh, spec if "hidden" in name else P()) for name in OPERANDS}
        sharded = {name: jax.device_put(array, places[name]) for name, array in arrays.items()}
        compiled = jax.jit(jax.grad(of_examples)).lower(sharded).compile()
        actual = compiled(sharded)
    assert {name for _, name in COLLECTIVE.findall(compiled.as_text())} == {"all-reduce"}
    oracle.assert_same_in_float64(actual, jax.grad(lambda arrays: jnp.sum(jnp.sin(whole(arrays, reduction="none"))))(arrays))


@X64
def test_symbolic_shapes_are_exported():
    (rows,) = export.symbolic_shape("rows")
    arrays = {name: given(rows=(20,))[name] for name in OPERANDS}
    types = {
        name: jax.ShapeDtypeStruct((rows, *a.shape[1:]) if "hidden" in name else a.shape, a.dtype) for name, a in arrays.items()
    }
    exported = export.export(jax.jit(functools.partial(with_derivatives, by_parts)), platforms=("cpu", "cuda"))(types)
    oracle.assert_same_in_float64(exported.call(arrays), with_derivatives(whole, arrays))


def test_logits_are_never_whole():
    rows, classes = 16384, 50000
    shapes = {"hidden": (rows, 8), "weight": (8, classes), "teacher_hidden": (rows, 16), "teacher_weight": (16, classes)}
    types = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    compiled = jax.jit(jax.grad(lambda wrt: by_parts(wrt))).lower(types).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * parts.MOST_WITH_GRADIENT < rows * classes * 4


@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float32"]))
@pytest.mark.parametrize("wrt", cases.quick(STUDENT, slow=[OPERANDS]), ids=str)
def test_divergences_of_rows_take_the_memory_of_their_mean(wrt, dtype, monkeypatch):
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 2**20)
    shapes = {"hidden": (1024, 1024), "weight": (1024, 2048), "teacher_hidden": (1024, 512), "teacher_weight": (512, 2048)}
    types = {name: jax.ShapeDtypeStruct(shape, dtype) for name, shape in shapes.items()}

    def gradients(reduction, arrays):
        def loss(wrt):
            return jnp.sum(jnp.sin(by_parts(arrays | wrt, reduction=reduction)))

        return jax.grad(loss)({name: arrays[name] for name in wrt})

    of_rows, of_mean = (
        jax.jit(functools.partial(gradients, reduction)).lower(types).compile().memory_analysis().temp_size_in_bytes
        for reduction in ("none", "mean")
    )
    assert of_rows <= of_mean


def test_a_loss_scale_keeps_gradients_in_float16():
    """The gradient of logits is computed with the cotangent: without it most of its entries would be 0."""
    arrays = {name: array for name, array in given((1000,), 2000, np.float16).items() if name in OPERANDS}

    def gradient(f, arrays):
        def scaled(wrt):
            return 2.0**15 * f(arrays | wrt)

        return jax.jit(jax.grad(scaled))({name: arrays[name] for name in STUDENT})

    found = gradient(by_parts, arrays)
    with jax.enable_x64(True):
        wide = {name: np.asarray(array, np.float64) for name, array in arrays.items()}
        expected = jax.tree.map(np.asarray, gradient(whole, wide))
    for name in STUDENT:
        assert np.linalg.norm(np.float64(found[name]) - expected[name]) <= 2**-9 * np.linalg.norm(expected[name])


def test_kernels_read_the_logits():
    types = {name: jax.ShapeDtypeStruct(a.shape, jnp.bfloat16) for name, a in given(classes=5000).items() if name in OPERANDS}
    for kind, name in (("forward_kl", "kl_divergence"), ("js", "js_divergence")):
        explanation = jaxsoftmax.explain(jax.grad(lambda wrt, kind=kind: by_parts(wrt, kind=kind)), types, platform="cuda")
        cases.assert_all_run_on("mosaic", explanation)
        assert [d.primitive for d in explanation] == [name, f"{name}_vjp"]
        assert explanation[0].operands[0] == "float32[210,5000]"


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1000, 256, 192, 50257), (3001, 128, 320, 32000)], ids=cases.ident)
def test_native_divergences(shape, kind, reduction, monkeypatch):
    """Differentiates by all four arrays and the temperature, in several parts of rows."""
    rows, size, teacher_size, classes = shape
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 512 * classes * 16)
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((rows, size), (size, classes), (rows, teacher_size), (teacher_size, classes))
    arrays = [jax.random.normal(key, of, jnp.bfloat16) for key, of in zip(keys, shapes, strict=False)]
    arrays[1], arrays[3] = (arrays[at] * jnp.bfloat16(2 * arrays[at].shape[0] ** -0.5) for at in (1, 3))
    temperature = jax.random.uniform(keys[4], (rows,), minval=0.5, maxval=2)
    c = np.random.default_rng(2).standard_normal(rows).astype(np.float32) if reduction == "none" else np.float32(1)

    def ours(*arrays):
        *arrays, temperature = arrays
        options = {"kind": kind, "js_weight": JS_WEIGHT, "reduction": reduction, "temperature": temperature}
        found = jaxsoftmax.linear_divergence(*arrays, **options)
        return jnp.sum(c * found), found

    def expected(*arrays):
        *wide, temperature = (array.astype(jnp.float32) for array in arrays)
        with jax.default_matmul_precision("highest"):
            found = whole(dict(zip(OPERANDS, wide, strict=True)) | {"temperature": temperature}, kind, reduction)
        return jnp.sum(c * found), found

    f, truth = (jax.jit(jax.value_and_grad(f, tuple(range(5)), has_aux=True)) for f in (ours, expected))
    cases.assert_ran("mosaic", f, *arrays, temperature)
    ((_, found), gradients), ((_, true), of_whole) = f(*arrays, temperature), truth(*arrays, temperature)
    np.testing.assert_allclose(found, true, rtol=1e-5, atol=1e-5)
    for gradient, own in zip(gradients, of_whole, strict=True):
        assert np.linalg.norm(np.float64(gradient) - np.float64(own)) <= 0.01 * np.linalg.norm(np.float64(own))


F = given(dtype=np.float32)
WRONG = {
    "kind": (F, {"kind": "kl"}, ValueError, "kind must be 'forward_kl', 'reverse_kl', 'js' or 'tv', got 'kl'"),
    "reduction": (F, {"reduction": "avg"}, ValueError, "reduction must be 'mean', 'sum' or 'none', got 'avg'"),
    "teacher's rows": (
        F | {"teacher_hidden": F["teacher_hidden"][0]},
        {},
        ValueError,
        r"teacher_hidden must have the rows and the dtype of hidden, got float32\[70, 8\] and float32\[3, 70, 16\]",
    ),
    "teacher's dtype": (
        F | {"teacher_hidden": F["teacher_hidden"].astype(jnp.bfloat16)},
        {},
        ValueError,
        "teacher_hidden must have the rows and the dtype of hidden, got bfloat16",
    ),
    "teacher's classes": (
        F | {"teacher_weight": F["teacher_weight"][:, 1:]},
        {},
        ValueError,
        "teacher_weight must have 32 classes, got 31",
    ),
    "teacher's weight": (
        F | {"teacher_weight": F["weight"]},
        {},
        ValueError,
        r"teacher_weight must be \[H, classes\] for teacher_hidden \[\*rows, H\], got shapes \(16, 32\) and \(3, 70, 8\)",
    ),
    "teacher_bias": (
        F | {"teacher_bias": np.zeros(3)},
        {},
        ValueError,
        r"teacher_bias must broadcast to shape \(32,\), got \(3,\)",
    ),
    "temperature": (F | {"temperature": -1.0}, {}, ValueError, "temperature must be larger than 0"),
    "logits_dtype": (F, {"logits_dtype": "int8"}, ValueError, "logits_dtype must be float32 for this hidden, got int8"),
    "implementation": (F, {"implementation": "cublas"}, ValueError, "implementation must be None or one of"),
    "class_axis": (F, {"teacher_class_axis": 3}, ValueError, "teacher_class_axis must be -2, -1, 0 or 1, got 3"),
}


@X64
@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_said(kind):
    arrays, options, error, words = WRONG[kind]
    with pytest.raises(error, match=f"linear_divergence: {words}"):
        by_parts(arrays, **options)


@pytest.mark.parametrize("js_weight", [-0.1, 1.1])
def test_shares_of_the_mixture_are_from_0_to_1(js_weight):
    with pytest.raises(ValueError, match="linear_divergence: js_weight must be from 0 to 1, got"):
        jaxsoftmax.linear_divergence(*(F[name] for name in OPERANDS), kind="js", js_weight=js_weight)
