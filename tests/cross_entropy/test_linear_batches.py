"""Batches of losses of linear layers: examples that share the layers take the memory of one call, and others have their own."""

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
from jaxsoftmax.ops.cross_entropy import linear_terms, parts

from ..support import cases, oracle
from ..support.compilations import compilations
from ..support.meshes import make_mesh

pytestmark = pytest.mark.usefixtures("hollow_kernels")

X64 = pytest.mark.usefixtures("x64")

EXAMPLES, ROWS, HIDDEN, CLASSES = 3, 150, 8, 33
LAYER = ("weight", "bias")


def given(dtype=np.float64, examples=EXAMPLES, rows=ROWS):
    """Operands of a batch whose examples have everything of their own."""
    rng = np.random.default_rng(0)
    shapes = {"hidden": (rows, HIDDEN), "weight": (HIDDEN, CLASSES), "bias": (CLASSES,), "teacher": (rows, HIDDEN)}
    arrays = {name: rng.standard_normal((examples, *shape)).astype(dtype) for name, shape in shapes.items()}
    arrays |= {name: rng.uniform(0.5, 2, (examples, rows)).astype(dtype) for name in ("sample_weight", "temperature")}
    arrays["bias"][:, 5] = -np.inf
    arrays["hidden"][:, 3] *= 40
    classes = rng.integers(6, CLASSES, (examples, rows), np.int32)
    return arrays | {"classes": classes, "probabilities": rng.random((examples, rows, CLASSES)).astype(dtype)}


def of_labels(name):
    def loss(arrays, **options):
        more = {each: arrays[each] for each in ("bias", "sample_weight", "temperature") if each in arrays}
        return jaxsoftmax.linear_cross_entropy(arrays["hidden"], arrays["weight"], arrays[name], **more, **options)

    return loss


def of_teacher(kind):
    def loss(arrays, **options):
        more = {each: arrays[each] for each in ("sample_weight", "temperature") if each in arrays}
        operands = arrays["hidden"], arrays["weight"], arrays["teacher"], jnp.flip(arrays["weight"], 0)
        return jaxsoftmax.linear_divergence(*operands, kind=kind, **more, **options)

    return loss


LOSSES = {"classes": of_labels("classes"), "probabilities": of_labels("probabilities"), "divergence": of_teacher("reverse_kl")}


def whole(name, arrays, reduction="mean"):
    """Computes the loss with all logits."""
    weight, scale = arrays["weight"], 1 / arrays["temperature"]
    logits = arrays["hidden"] @ weight
    if name == "divergence":
        teacher = arrays["teacher"] @ jnp.flip(weight, 0)
        losses = jaxsoftmax.kl_divergence(logits, teacher, p_scale=scale, q_scale=scale)
    else:
        bias = jnp.where(arrays["bias"] == -np.inf, -1e300, arrays["bias"]) if name == "probabilities" else arrays["bias"]
        losses = jaxsoftmax.cross_entropy(logits + bias[None], arrays[name], scale=scale)
    total = jnp.sum(arrays["sample_weight"] * losses)
    return {"mean": total / jnp.sum(arrays["sample_weight"]), "sum": total}[reduction]


def operands_of(name, is_mapped, **sizes):
    """The operands of a loss, those that are mapped for each example; and the axes of `jax.vmap`."""
    arrays = given(**sizes)
    others = {"classes": ("teacher", "probabilities"), "probabilities": ("teacher", "classes")}
    for each in others.get(name, ("bias", "classes", "probabilities")):
        del arrays[each]
    if name == "probabilities":  # which weigh the class that a bias of -inf excludes
        arrays["bias"] = np.where(np.isfinite(arrays["bias"]), arrays["bias"], -3)
    axes = {each: 0 if each in is_mapped else None for each in arrays}
    return {each: array if each in is_mapped else array[0] for each, array in arrays.items()}, axes


def split(arrays):
    """Returns the operands that have derivatives, and the others."""
    wrt = {name: array for name, array in arrays.items() if array.dtype != np.int32}
    return wrt, {name: array for name, array in arrays.items() if name not in wrt}


def total_of(loss, axes, others):
    """A function of the operands that is not linear in the losses of the examples."""
    return lambda wrt: jnp.sum(jnp.sin(jax.vmap(loss, (axes,))(wrt | others)))


def direction(wrt):
    """Tangents that are finite, also where a bias is not."""
    return {name: jnp.cos(jnp.where(jnp.isfinite(array), array, 0)) for name, array in wrt.items()}


MAPPED = [
    ("hidden", "classes", "probabilities", "teacher", "sample_weight", "temperature"),
    ("hidden",),
    ("classes", "probabilities", "teacher"),
    ("sample_weight",),
    ("temperature",),
    ("weight",),
    ("bias", "weight", "classes"),
    ("hidden", "classes", "probabilities", "teacher", *LAYER),
]


@X64
@pytest.mark.parametrize(
    ("name", "is_mapped", "reduction"),
    [
        pytest.param(name, mapped, reduction, marks=cases.slow_unless((i + j + k) % 2 == 0))
        for i, name in enumerate(LOSSES)
        for j, mapped in enumerate(MAPPED)
        for k, reduction in enumerate(["mean", "sum"])
    ],
    ids=cases.ident,
)
@pytest.mark.usefixtures("parts")
def test_gradients_of_a_batch_and_a_batch_of_gradients(name, is_mapped, reduction):
    """Both orders, in reverse and forward mode."""
    arrays, axes = operands_of(name, is_mapped)
    wrt, others = split(arrays)

    def both(loss):
        loss = functools.partial(loss, reduction=reduction)
        total = total_of(loss, axes, others)

        def gradients(arrays):
            own, more = split(arrays)
            return jax.value_and_grad(lambda own: jnp.sin(loss(own | more)))(own)

        @jax.jit
        def run(wrt):
            moved = jax.jvp(total, (wrt,), (direction(wrt),))
            return jax.grad(total)(wrt), moved, jax.vmap(gradients, (axes,))(wrt | others)

        return run(wrt)

    oracle.assert_same_in_float64(both(LOSSES[name]), both(functools.partial(whole, name)))


def in_a_scan(f):
    """The steps share all operands except hidden states."""

    def call(wrt):
        steps = jnp.stack([wrt["hidden"], 2 * wrt["hidden"]])
        return jax.lax.scan(lambda total, hidden: (total + f(wrt | {"hidden": hidden}), None), 0.0, steps)[0]

    return call


def tangent_of_gradient(f):
    return lambda wrt: jax.jvp(jax.grad(f), (wrt,), (direction(wrt),))[1]


def gradient_of_gradient(f):
    def squares(wrt):
        return sum(jnp.vdot(each, each) for each in jax.tree.leaves(jax.grad(f)(wrt)))

    return jax.grad(squares)


STEPS = {
    "tangent of gradient": tangent_of_gradient,
    "gradient of gradient": gradient_of_gradient,
    "scan": lambda f: jax.grad(in_a_scan(f)),
    "tangent of gradient of scan": lambda f: tangent_of_gradient(in_a_scan(f)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@X64
@pytest.mark.parametrize(
    ("name", "step"),
    [
        pytest.param(name, step, marks=cases.slow_unless((i + j) % 3 == 0))
        for i, name in enumerate(LOSSES)
        for j, step in enumerate(STEPS)
    ],
    ids=cases.ident,
)
@pytest.mark.parametrize("is_mapped", [MAPPED[0], ("weight",)], ids=["rows", "layers"])
def test_loops_and_derivatives_of_higher_order(name, step, is_mapped):
    arrays, axes = operands_of(name, is_mapped, rows=5)
    wrt, others = split(arrays)
    losses = LOSSES[name], functools.partial(whole, name)
    actual, expected = (jax.jit(STEPS[step](total_of(loss, axes, others)))(wrt) for loss in losses)
    oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.parametrize("outer", ["layers", "rows", "nothing"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("parts")
def test_batches_of_batches(name, outer):
    """The examples of one batch share the layers, and those of the other one have layers, or share everything but labels."""
    arrays, _ = operands_of(name, ("hidden", "classes", "probabilities", "teacher"), examples=2)
    wrt, others = split(arrays)
    wrt["weight"] = np.stack([wrt["weight"], 2 * wrt["weight"], -wrt["weight"]])
    of_rows = {each: 0 if each in ("hidden", "classes", "probabilities", "teacher") else None for each in arrays}
    of_layers = {each: 0 if each == "weight" else None for each in arrays}

    def run(loss):
        batches = {"layers": (of_rows, of_layers), "rows": (of_layers, of_rows), "nothing": (of_layers, of_rows)}[outer]
        for axes in batches:
            loss = jax.vmap(loss, (axes,))
        if outer == "nothing":
            loss = jax.vmap(loss, (dict.fromkeys(arrays) | {"temperature": 0},))

        def total(wrt):
            more = {"temperature": jnp.stack([wrt["temperature"]])} if outer == "nothing" else {}
            return jnp.sum(jnp.sin(loss(wrt | others | more)))

        return jax.jit(jax.value_and_grad(total))(wrt)

    oracle.assert_same_in_float64(run(LOSSES[name]), run(functools.partial(whole, name)))


def compiled_with(loss, wrt, arrays):
    """Compiles gradients by some operands."""
    types = {name: jax.ShapeDtypeStruct(array.shape, array.dtype) for name, array in arrays.items()}

    def gradients(arrays):
        return jax.grad(lambda own: loss(arrays | own))({name: arrays[name] for name in wrt})

    return jax.jit(gradients).lower(types).compile()


@pytest.fixture
def small_parts(monkeypatch):
    for module, most in (
        (parts, "MOST"),
        (parts, "MOST_WITH_GRADIENT"),
        (linear_terms, "BLOCK"),
        (linear_terms, "ONE_BLOCK"),
    ):
        monkeypatch.setattr(module, most, 2**20)
    monkeypatch.setattr(linear_terms, "LEAST_CLASSES", 512)


def large(examples, rows, units, classes):
    """Operands whose examples share the layer, as types."""
    shapes = {"hidden": (examples, rows, units), "weight": (units, classes), "bias": (classes,)}
    shapes |= {"probabilities": (examples, rows, classes), "teacher": (examples, rows, units)}
    types = {name: jax.ShapeDtypeStruct(shape, np.float32) for name, shape in shapes.items()}
    return types | {"classes": jax.ShapeDtypeStruct((examples, rows), np.int32)}


NAMES = {
    "classes": ("hidden", "weight", "bias", "classes"),
    "probabilities": ("hidden", "weight", "bias", "probabilities"),
    "divergence": ("hidden", "weight", "teacher"),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("small_parts")
def test_examples_that_share_layers_take_the_memory_of_one_call(name):
    """No array has the gradient of the weight, or logits, of each example."""
    examples, rows, units, classes = 16, 512, 128, 4096
    arrays = {each: kind for each, kind in large(examples, rows, units, classes).items() if each in NAMES[name]}
    axes = {each: None if each in LAYER else 0 for each in arrays}
    wrt = [each for each in arrays if each not in ("classes", "probabilities")]

    def of_batch(arrays):
        return jnp.sum(jax.vmap(LOSSES[name], (axes,))(arrays))

    def of_rows(arrays):
        return jnp.mean(LOSSES[name](arrays, reduction="none"))

    batch, one = (compiled_with(loss, wrt, arrays) for loss in (of_batch, of_rows))
    assert f"[{examples},{units},{classes}]" not in batch.as_text()
    most = 1.6 * one.memory_analysis().temp_size_in_bytes
    assert batch.memory_analysis().temp_size_in_bytes <= most < examples * units * classes * 4
    forward = jax.jit(of_batch).lower(arrays).compile()
    assert forward.memory_analysis().temp_size_in_bytes <= most


@pytest.mark.parametrize("outer", ["layers", "rows"])
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.usefixtures("small_parts")
def test_each_layer_of_a_batch_has_one_gradient(name, outer):
    """Several layers share a batch of examples, or examples a batch of layers."""
    layers, examples, rows, units, classes = 3, 24, 96, 128, 2048
    arrays = {each: kind for each, kind in large(examples, rows, units, classes).items() if each in NAMES[name]}
    arrays["weight"] = jax.ShapeDtypeStruct((layers, units, classes), np.float32)
    of_rows = {each: None if each in LAYER else 0 for each in arrays}
    of_layers = dict.fromkeys(arrays) | {"weight": 0}
    inner, outer = (of_rows, of_layers) if outer == "layers" else (of_layers, of_rows)

    def loss(arrays):
        return jnp.sum(jax.vmap(jax.vmap(LOSSES[name], (inner,)), (outer,))(arrays))

    compiled = compiled_with(loss, ["hidden", "weight"], arrays)
    each = rf"\[({layers},{examples}|{examples},{layers}),{units},{classes}\]"
    assert not re.search(each, compiled.as_text())
    assert compiled.memory_analysis().temp_size_in_bytes < layers * examples * units * classes * 4


@pytest.mark.parametrize(
    ("order", "is_mapped", "products"),
    [
        ("gradient of a batch", False, 4),
        ("gradient of a batch", True, 3),
        ("batch of gradients", False, 3),
        ("batch of gradients", True, 3),
    ],
)
@pytest.mark.parametrize("name", ["classes", "probabilities"])
def test_products(name, order, is_mapped, products):
    """Gradients of each example, and by its own layers, are computed together with the loss."""
    arrays, axes = operands_of(name, (*MAPPED[0], *LAYER) if is_mapped else MAPPED[0], dtype=np.float32)
    wrt, others = split(arrays)

    def gradients(arrays):
        own, more = split(arrays)
        return jax.grad(lambda own: LOSSES[name](own | more))(own)

    f = {
        "gradient of a batch": jax.grad(total_of(LOSSES[name], axes, others)),
        "batch of gradients": lambda wrt: jax.vmap(gradients, (axes,))(wrt | others),
    }[order]
    assert len(re.findall(r" dot\(", jax.jit(f).lower(wrt).as_text("hlo"))) == products


@X64
@pytest.mark.parametrize("name", cases.quick("classes", "divergence", slow=["probabilities"]))
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("place", ["inside", "around", "automatic axes"])
@pytest.mark.usefixtures("parts")
def test_batches_in_a_shard_map(place, check_vma, name):
    """A `vmap` in a `shard_map`, around it, and in one that leaves mesh axes automatic."""
    arrays, axes = operands_of(name, MAPPED[0], examples=4, rows=152)
    wrt, others = split(arrays)
    mesh = make_mesh(AxisType.Auto)

    def losses(arrays):
        return jax.vmap(LOSSES[name], (axes,))(arrays)

    def of_rows(arrays):
        return jax.lax.psum(LOSSES[name](arrays, reduction="sum"), "data")

    options = {"in_specs": ({each: P() if each in LAYER else P("data") for each in arrays},), "check_vma": check_vma}
    if place == "around":  # devices have rows of each example
        mapped = jax.shard_map(of_rows, mesh=mesh, out_specs=P(), **options)
        mapped = jax.vmap(mapped, (axes,), spmd_axis_name="model")
    else:
        options |= {"axis_names": {"data"}} if place == "automatic axes" else {}
        mapped = jax.shard_map(losses, mesh=mesh, out_specs=P("data"), **options)

    def total(wrt):
        return jnp.sum(jnp.sin(mapped(wrt | others)))

    expected = functools.partial(whole, name, reduction="sum" if place == "around" else "mean")
    functions = total, total_of(expected, axes, others)
    oracle.assert_same_in_float64(*(jax.jit(jax.value_and_grad(f))(wrt) for f in functions))


@X64
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("has_layers", [False, True])
@pytest.mark.usefixtures("parts")
def test_examples_on_explicit_axes(has_layers, name):
    """Devices have examples. Gradients are sharded as the operands are."""
    arrays, axes = operands_of(name, (*MAPPED[0], *LAYER) if has_layers else MAPPED[0], examples=4)
    wrt, others = split(arrays)
    expected = jax.jit(jax.value_and_grad(total_of(functools.partial(whole, name), axes, others)))(wrt)
    mesh = make_mesh(AxisType.Explicit)
    with jax.set_mesh(mesh):
        specs = {each: P() if axis is None else P("data") for each, axis in axes.items()}
        wrt, others = (
            {each: jax.device_put(array, NamedSharding(mesh, specs[each])) for each, array in some.items()}
            for some in (wrt, others)
        )
        actual = jax.jit(jax.value_and_grad(total_of(LOSSES[name], axes, others)))(wrt)
        for each, gradient in actual[1].items():
            assert (*gradient.sharding.spec, None)[0] == (*specs[each], None)[0], each
    oracle.assert_same_in_float64(actual, expected)


@X64
@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("sizes", ["rows", "examples", "examples, rows"])
def test_symbolic_sizes_are_exported(name, sizes):
    arrays, axes = operands_of(name, MAPPED[0])
    symbols = dict(zip(sizes.split(", "), export.symbolic_shape(sizes), strict=True))
    names = {EXAMPLES: symbols.get("examples", EXAMPLES), ROWS: symbols.get("rows", ROWS)}
    types = {
        each: jax.ShapeDtypeStruct([names.get(size, size) for size in array.shape], array.dtype)
        for each, array in arrays.items()
    }

    def run(arrays):
        wrt, others = split(arrays)
        return jax.value_and_grad(total_of(LOSSES[name], axes, others))(wrt)

    exported = export.export(jax.jit(run))(types)
    for some in (arrays, operands_of(name, MAPPED[0], rows=40)[0]):
        if "rows" in symbols or some is arrays:
            oracle.assert_same_in_float64(exported.call(some), jax.jit(run)(some))


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.usefixtures("parts")
def test_eager_gradients_compile_once(name, reduction):
    """Parts are a loop, which JAX compiles anew for each function."""
    arrays, axes = operands_of(name, MAPPED[0], dtype=np.float32)
    wrt, others = split(arrays)

    def run():
        gradients = jax.grad(total_of(functools.partial(LOSSES[name], reduction=reduction), axes, others))(wrt)
        one = {each: array[0] if axes[each] == 0 else array for each, array in arrays.items()}
        own, more = split(one)
        return gradients, jax.grad(lambda own: jnp.sum(LOSSES[name](own | more, reduction=reduction)))(own)

    jax.block_until_ready(run())
    with compilations() as compiled:
        run()
    assert not compiled


@X64
def test_a_precision_stays_with_what_was_traced():
    """One that holds where the loss is traced holds where it is lowered."""
    arrays, axes = operands_of("probabilities", MAPPED[0])

    def losses(arrays):
        with jax.default_matmul_precision("highest"):
            return jax.vmap(LOSSES["probabilities"], (axes,))(arrays)

    text = jax.jit(losses).lower(arrays).as_text()
    dots = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert dots
    assert all("HIGHEST" in line for line in dots)


def of_tokens(arrays, reduction):
    results = jaxsoftmax.linear_log_probs(arrays["hidden"], arrays["weight"], arrays["classes"], return_entropy=True)
    return sum(map({"mean": jnp.mean, "none": jnp.sin}[reduction], results))


@X64
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("rule", ["value", "batch", "tangent", "tangent of a batch", "cotangent", "tangent of a cotangent"])
@pytest.mark.parametrize("name", [*LOSSES, "tokens"])
def test_a_precision_inside_a_jitted_function_holds_in_rules_and_references(name, rule, reduction):
    """Rules of a jitted function run when its context has ended, and so do references."""
    is_batch, loss_of = "batch" in rule, of_tokens if name == "tokens" else LOSSES[name]
    arrays, axes = operands_of("classes" if name == "tokens" else name, MAPPED[0])
    arrays = arrays if is_batch else {each: array[0] if axes[each] == 0 else array for each, array in arrays.items()}
    wrt, others = split(arrays)

    @jax.jit
    def loss(arrays):
        with jax.default_matmul_precision("highest"):
            return jnp.sum(loss_of(arrays, reduction=reduction))

    def run(wrt):
        f = (lambda wrt: jax.vmap(loss, (axes,))(wrt | others)) if is_batch else (lambda wrt: loss(wrt | others))
        f = jax.grad(f) if "cotangent" in rule else f
        return jax.jvp(f, (wrt,), (direction(wrt),)) if "tangent" in rule else f(wrt)

    dots = [line for line in jax.jit(run).lower(wrt).as_text().splitlines() if "stablehlo.dot_general" in line]
    assert dots
    assert all("HIGHEST" in line for line in dots)
