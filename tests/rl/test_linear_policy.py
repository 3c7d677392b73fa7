"""The loss of a policy behind a linear layer: to the loss from log-probabilities of whole logits, and its own work."""

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
from jaxsoftmax import rl
from jaxsoftmax.ops.cross_entropy import linear_terms, parts

from ..support import cases, kernels, oracle
from ..support.meshes import make_mesh

pytestmark = pytest.mark.usefixtures("hollow_kernels")

X64 = pytest.mark.usefixtures("x64")

SEQUENCES, LENGTH, HIDDEN, CLASSES = 4, 40, 8, 34
CONSTANTS = ("advantages", "old_log_p", "reference_log_p")
# Options of calls, beside the arrays that they name: a clipped ratio, a divergence, the policy itself, and a changed layer.
FORMS = {
    "clip": {"clip": (0.2, 0.28), "arrays": ("old_log_p", "where")},
    "kl": {"kl_weight": 0.3, "arrays": ("old_log_p", "reference_log_p", "where", "bias")},
    "kl of the policy itself": {"kl_weight": 0.3, "clip": 0.1, "arrays": ("reference_log_p",)},
    "reinforce": {"arrays": ()},
    "layer": {"logits_soft_cap": 3.0, "arrays": ("old_log_p", "bias", "temperature", "where")},
}


def given(dtype=np.float64, sequences=SEQUENCES, length=LENGTH):
    """Operands with ratios on both sides of the bounds. Arrays are NaN at tokens that do not count; a sequence has no other."""
    rng, rows = np.random.default_rng(0), (sequences, length)
    arrays = {
        "hidden": rng.standard_normal((*rows, HIDDEN)),
        "weight": rng.standard_normal((HIDDEN, CLASSES)),
        "advantages": np.where(np.arange(length) % 5 == 0, 0, rng.standard_normal(rows)),
        "temperature": rng.uniform(0.5, 2, rows),
        "bias": rng.standard_normal(CLASSES),
    }
    arrays["bias"][0] = -np.inf  # the label of rows that fill up parts
    tokens = rng.integers(1, CLASSES, rows, np.int32)
    log_p = np.asarray(jaxsoftmax.log_probs(arrays["hidden"] @ arrays["weight"], tokens), np.float64)
    arrays |= {name: log_p + rng.uniform(-0.5, 0.5, rows) for name in ("old_log_p", "reference_log_p")}
    where = np.arange(length) < np.linspace(0, length, sequences).astype(int)[:, None]
    return {name: array.astype(dtype) for name, array in arrays.items()} | {"tokens": tokens, "where": where}


def of_form(form, **sizes):
    """The operands of a form, and its options."""
    options, arrays = dict(FORMS[form]), given(**sizes)
    names = {"hidden", "weight", "tokens", "advantages", *options.pop("arrays")}
    arrays = {name: array for name, array in arrays.items() if name in names}
    for name in {*CONSTANTS, "hidden"} & names if "where" in names else ():
        arrays[name][~arrays["where"]] = np.nan
    return arrays, options


def split(arrays):
    """Returns the operands that have derivatives, and the others."""
    wrt = {name: arrays[name] for name in ("hidden", "weight", "bias", "temperature") if name in arrays}
    return wrt, {name: array for name, array in arrays.items() if name not in wrt}


def ours(arrays, **options):
    arrays = dict(arrays)
    first = (arrays.pop("hidden"), arrays.pop("weight"), arrays.pop("tokens"), arrays.pop("old_log_p", None))
    return rl.linear_policy_gradient_loss(*first, arrays.pop("advantages"), **arrays, **options)


def whole(arrays, *, reduction="token", logits_soft_cap=None, clip=0.2, kl_weight=0.0):
    """Computes the loss and the log-probabilities from all logits."""
    where = arrays.get("where", np.ones(arrays["tokens"].shape, bool))
    logits = jnp.where(where[..., None], arrays["hidden"], 0) @ arrays["weight"]
    logits = logits + arrays["bias"][None, None] if "bias" in arrays else logits
    logits = logits if logits_soft_cap is None else logits_soft_cap * jnp.tanh(logits / logits_soft_cap)
    logits = logits / arrays["temperature"][..., None] if "temperature" in arrays else logits
    log_p = jnp.take_along_axis(jax.nn.log_softmax(logits), arrays["tokens"][..., None], -1)[..., 0]
    options = {"clip": clip, "kl_weight": kl_weight, "reference_log_p": arrays.get("reference_log_p"), "where": where}
    kind = "none" if reduction == "sum" else reduction
    loss = rl.policy_gradient_loss(log_p, arrays.get("old_log_p"), arrays["advantages"], reduction=kind, **options)
    return jnp.sum(loss), jnp.where(where, log_p, 0)


def with_gradients(loss, arrays, **options):
    wrt, others = split(arrays)
    return jax.jit(jax.value_and_grad(lambda wrt: loss(wrt | others, **options), has_aux=True))(wrt)


@pytest.fixture
def small_parts(monkeypatch):
    """Parts have 128 rows, which is less than all."""
    monkeypatch.setattr(parts, "MOST", 2**13)
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 2**13)
    monkeypatch.setattr(linear_terms, "ONE_BLOCK", 2**13)


@X64
@pytest.mark.parametrize("reduction", ["token", "sequence", "sum"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_parts")
def test_the_loss_and_its_gradients_are_those_of_whole_logits(form, reduction):
    arrays, options = of_form(form)
    found, expected = (with_gradients(f, arrays, reduction=reduction, **options) for f in (ours, whole))
    oracle.assert_same_in_float64(found, expected)
    assert np.any(found[1]["hidden"])


@X64
@pytest.mark.parametrize("class_axis", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_narrow_operands(dtype, class_axis):
    """Logits are not rounded. Gradients are rounded where they are multiplied."""
    arrays, options = of_form("kl")
    arrays = {name: array.astype(dtype if name in ("hidden", "weight") else array.dtype) for name, array in arrays.items()}
    loss, log_p = whole({name: np.float64(a) if a.dtype == dtype else a for name, a in arrays.items()}, **options)
    gradients = with_gradients(whole, {n: np.float64(a) if a.dtype == dtype else a for n, a in arrays.items()}, **options)[1]
    if class_axis == 0:
        arrays["weight"], gradients["weight"] = arrays["weight"].T, gradients["weight"].T
    (found, found_log_p), found_gradients = with_gradients(ours, arrays, class_axis=class_axis, **options)
    assert (found.dtype, found_log_p.dtype) == (np.float32, np.float32)
    np.testing.assert_allclose(found, loss, rtol=1e-5)
    np.testing.assert_allclose(found_log_p, log_p, atol=1e-5)
    for name, gradient in found_gradients.items():
        assert gradient.dtype == arrays[name].dtype
        error = np.linalg.norm(np.float64(gradient) - gradients[name])
        assert error <= (1e-5 if dtype == "float32" else 0.01) * np.linalg.norm(gradients[name])


@pytest.mark.parametrize(("dtype", "products"), [("float32", 3), ("bfloat16", 3), ("float16", 4)])
def test_products(dtype, products):
    arrays, options = of_form("kl", dtype=np.float32)
    wrt, others = split(arrays)
    wrt = {name: array.astype(dtype) for name, array in wrt.items()}
    f = jax.jit(jax.value_and_grad(lambda wrt: ours(wrt | others, **options), has_aux=True))
    assert len(re.findall(r" dot\(", f.lower(wrt).as_text("hlo"))) == products


@X64
def test_all_else_counts_as_constants():
    arrays, options = of_form("kl")
    wrt = {name: np.nan_to_num(arrays.pop(name)) for name in CONSTANTS}
    gradients = jax.grad(lambda wrt, kl_weight: sum(map(jnp.sum, ours(arrays | wrt, kl_weight=kl_weight))), (0, 1))(
        wrt, options["kl_weight"]
    )
    assert not any(np.any(gradient) for gradient in jax.tree.leaves(gradients))
    layer, others = split(arrays | wrt)
    of_log_p = jax.grad(lambda layer: jnp.sum(ours(layer | others, **options)[1]))(layer)
    assert not any(np.any(gradient) for gradient in jax.tree.leaves(of_log_p))


@X64
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.usefixtures("small_parts")
def test_derivatives_of_higher_order(form):
    arrays, options = of_form(form)
    wrt, others = split(arrays)
    tangents = jax.tree.map(lambda x: np.cos(np.where(np.isfinite(x), x, 0)), wrt)

    def moved(loss, f):
        return jax.jit(lambda *x: jax.jvp(f(lambda wrt: loss(wrt | others, **options)[0]), *x))((wrt,), (tangents,))

    for f in (lambda f: f, jax.grad):
        oracle.assert_same_in_float64(moved(ours, f), moved(whole, f))


@X64
@pytest.mark.parametrize("own", [(), ("weight", "bias")], ids=["shared", "own"])
@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("form", ["layer", "kl"])
def test_examples_of_a_vmap(form, own):
    arrays, options = of_form(form)
    own = [name for name in own if name in arrays]
    arrays |= {name: np.stack([arrays[name] * (1 + at / 16) for at in range(3)]) for name in own}
    arrays = {n: a if n in ("weight", "bias") else np.stack([np.roll(a, at, 1) for at in range(3)]) for n, a in arrays.items()}
    axes = {name: 0 if name in own or name not in ("weight", "bias") else None for name in arrays}

    def one(loss, arrays, kl_weight):
        return loss(arrays, **options | ({"kl_weight": kl_weight} if form == "kl" else {}))

    def batch(loss):
        def total(arrays):
            losses, log_p = jax.vmap(functools.partial(one, loss), (axes, 0))(arrays, jnp.arange(1.0, 4))
            return jnp.sum(jnp.sin(losses)), log_p

        return total

    oracle.assert_same_in_float64(*(with_gradients(batch(loss), arrays) for loss in (ours, whole)))


@X64
@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize(("form", "reduction"), [("layer", "sequence"), ("kl", "token"), ("reinforce", "sum")])
@pytest.mark.usefixtures("small_parts")
def test_arrays_on_a_mesh(form, reduction, kind):
    """Devices share the sequences and the classes."""
    arrays, options = of_form(form)
    expected = with_gradients(whole, arrays, reduction=reduction, **options)
    mesh = make_mesh(kind)
    specs = {"weight": P(None, "model"), "bias": P("model")}
    with jax.set_mesh(mesh):
        placed = {name: jax.device_put(a, NamedSharding(mesh, specs.get(name, P("data")))) for name, a in arrays.items()}
        found = with_gradients(ours, placed, reduction=reduction, **options)
    oracle.assert_same_in_float64(found, expected)


@X64
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", ["layer", "kl", "reinforce"])
@pytest.mark.usefixtures("small_parts")
def test_classes_that_devices_share_in_a_shard_map(form, check_vma):
    arrays, options = of_form(form)
    wrt, others = split(arrays)
    mesh = make_mesh(AxisType.Auto)
    specs = {name: {"weight": P(None, "model"), "bias": P("model")}.get(name, P("data")) for name in arrays}

    def local(arrays):
        loss, log_p = ours(arrays, axis_name="model", reduction="sum", **options)
        return jax.lax.psum(loss, "data"), log_p

    mapped = jax.shard_map(local, mesh=mesh, in_specs=(specs,), out_specs=(P(), P("data")), check_vma=check_vma)
    found = jax.jit(jax.value_and_grad(lambda wrt: mapped(wrt | others), has_aux=True))(wrt)
    oracle.assert_same_in_float64(found, with_gradients(whole, arrays, reduction="sum", **options))


@X64
def test_a_batch_of_symbolic_sizes_is_exported():
    arrays, options = of_form("kl")
    names = dict(zip((SEQUENCES, LENGTH), export.symbolic_shape("sequences, length"), strict=True))
    types = {
        name: jax.ShapeDtypeStruct([names.get(size, size) for size in array.shape], array.dtype)
        for name, array in arrays.items()
    }
    f = jax.jit(functools.partial(ours, reduction="sequence", **options))
    oracle.assert_same_in_float64(export.export(f)(types).call(arrays), f(arrays))


@pytest.mark.parametrize("rows", [(0, 5), (2, 0)])
def test_without_tokens_the_loss_is_0(rows):
    arrays = {"hidden": np.ones((*rows, HIDDEN), np.float32), "weight": np.ones((HIDDEN, CLASSES), np.float32)}
    arrays |= {"tokens": np.zeros(rows, np.int32), "advantages": np.ones(rows[:1], np.float32)}
    for more in ({}, {"where": np.zeros(rows, bool)}):
        (loss, log_p), gradients = with_gradients(ours, arrays | more)
        assert (loss, log_p.shape) == (0, rows)
        assert not any(np.any(gradient) for gradient in gradients.values())


def test_tokens_that_are_no_class_give_nan():
    arrays, options = of_form("reinforce", dtype=np.float32)
    arrays["tokens"][1, 2] = CLASSES
    loss, log_p = ours(arrays, **options)
    assert np.isnan(loss)
    np.testing.assert_array_equal(np.isnan(log_p), np.arange(LENGTH) + LENGTH * np.arange(SEQUENCES)[:, None] == LENGTH + 2)


TYPES = [((2, 64, 128), "bfloat16"), ((128, 512), "bfloat16"), ((2, 64), "int32"), ((2, 64), "float32"), ((2,), "float32")]


@pytest.mark.parametrize(("classes", "names"), [(512, ["weights", "gradient"]), (513, ["log_probs", "log_probs_gradient"])])
def test_its_kernels_are_lowered(classes, names):
    """A weight that is not aligned has four products, as in a cross-entropy."""
    types = [jax.ShapeDtypeStruct(*kind) for kind in (TYPES[0], ((128, classes), "bfloat16"), *TYPES[2:])]
    f = jax.grad(lambda *arrays: rl.linear_policy_gradient_loss(*arrays)[0], (0, 1))
    prefix = "linear" if classes == 513 else "linear_cross_entropy"
    kernels.lowered_for_cuda(f, *types, kernels=[f"{prefix}_{name}_mosaic" for name in names])


def test_what_runs():
    types = [jax.ShapeDtypeStruct(*kind) for kind in TYPES]
    for backward, primitive in ((False, "linear_log_probs"), (True, "linear_cross_entropy_gradient")):
        f = rl.linear_policy_gradient_loss
        f = jax.grad(f, has_aux=True) if backward else f
        (decision,) = jaxsoftmax.explain(f, *types, gpu="h100")
        assert (decision.primitive, decision.implementation) == (primitive, "mosaic")


X = np.zeros((2, 3, 4), np.float32)
W = np.zeros((4, 5), np.float32)
T = np.zeros((2, 3), np.int32)
A = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f(X[0, 0], W, T, None, A), r"hidden must be \[\*batch, length, H\], got shape \(4,\)"),
        (lambda f: f(X, W, T[0], None, A), r"tokens must have the shape \(2, 3\) of hidden without its last axis, got \(3,\)"),
        (lambda f: f(X, W, X[..., 0], None, A), "tokens must be integers"),
        (lambda f: f(X, W, T, A, A), r"old_log_p must have the shape \(2, 3\) of tokens, got \(2,\)"),
        (lambda f: f(X, W, T, None, A[:1]), r"advantages must have the shape \(2, 3\) of tokens, or that .* got \(1,\)"),
        (lambda f: f(X, W, T, None, A, kl_weight=0.1), "kl_weight must be 0 without reference_log_p, got 0.1"),
        (lambda f: f(X, W, T, None, A, reference_log_p=A), r"reference_log_p must have the shape \(2, 3\) of tokens"),
        (lambda f: f(X, W, T, None, A, where=T), "where must be boolean, got int32"),
        (lambda f: f(X, W, T, None, A, clip=-1), "clip must not be negative, got -1"),
        (lambda f: f(X, W, T, None, A, temperature=0), "temperature must be larger than 0"),
        (lambda f: f(X, W, T, None, A, reduction="none"), "reduction must be 'token', 'sequence' or 'sum', got 'none'"),
        (lambda f: f(X, W.T, T, None, A), r"weight must be \[H, classes\] for hidden \[\*rows, H\]"),
        (lambda f: f(X, W, T, None, A, implementation="cuda"), "implementation must be"),
    ],
)
def test_errors_name_the_argument_and_say_what_is_allowed(call, message):
    with pytest.raises((TypeError, ValueError), match=f"^linear_policy_gradient_loss: {message}"):
        call(rl.linear_policy_gradient_loss)


# On a GPU.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(4, 300, 256, 50304), (3, 427, 128, 32000), (2, 260, 320, 50257)], ids=cases.ident)
def test_native_loss_and_gradients(shape, form, monkeypatch):
    """Weights are aligned or not, and there are several parts or blocks; against whole logits."""
    sequences, length, units, classes = shape
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 512 * classes * 2)
    arrays, options = of_form(form, dtype=np.float32, sequences=sequences, length=length)
    keys = jax.random.split(jax.random.key(0), 4)
    arrays["hidden"] = jax.random.normal(keys[0], (sequences, length, units), "bfloat16")
    arrays["weight"] = jax.random.normal(keys[1], (units, classes), "bfloat16") * jnp.bfloat16(units**-0.5)
    arrays["tokens"] = jax.random.randint(keys[2], (sequences, length), 0, classes)
    if "bias" in arrays:
        arrays["bias"] = jax.random.normal(keys[3], (classes,))
    with jax.default_matmul_precision("highest"):
        wide = {name: a.astype(np.float32) if name in ("hidden", "weight") else a for name, a in arrays.items()}
        constants = {name for name in ("old_log_p", "reference_log_p") if name in arrays}
        log_p = whole({name: a for name, a in wide.items() if name not in constants}, **options | {"kl_weight": 0.0})[1]
        drift = np.random.default_rng(1).uniform(-0.5, 0.5, log_p.shape).astype(np.float32)
        more = {name: log_p + (drift if name == "old_log_p" else -drift) for name in constants}
        expected = with_gradients(whole, wide | more, **options)
    arrays |= more
    wrt, others = split(arrays)
    f = jax.jit(jax.value_and_grad(lambda wrt: ours(wrt | others, **options), has_aux=True))
    cases.assert_ran("mosaic", f, wrt)
    (loss, log_p), gradients = f(wrt)
    np.testing.assert_allclose(loss, expected[0][0], rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(log_p, expected[0][1], atol=1e-4)
    for name, gradient in gradients.items():
        error = np.linalg.norm(np.float64(gradient) - np.float64(expected[1][name]))
        assert error <= 0.006 * np.linalg.norm(np.float64(expected[1][name])), name
