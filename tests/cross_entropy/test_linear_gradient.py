"""The kernel of a linear layer's mean loss and its gradients: lowered, interpreted, and held against float64 on such a GPU."""

import contextlib
import functools
import itertools
import math
import re
from dataclasses import replace
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.cross_entropy import linear_terms, parts
from jaxsoftmax.ops.cross_entropy.loss import LossHead
from jaxsoftmax.ops.cross_entropy.policy import PolicyHead
from jaxsoftmax.ops.cross_entropy.xla import NO_CLASS, NO_ROW
from jaxsoftmax.ops.softmax import across_devices

from ..support import cases, kernels
from ..support.cross_entropy import plans
from ..support.cross_entropy.tiles import LEFT_OUT, SHAPES, bias_of, given, temperatures, types

NAMES = ["linear_cross_entropy_weights_mosaic", "linear_cross_entropy_gradient_mosaic"]
ALIGNED = [(200, 128, 576, 1), (128, 64, 256, 1)]  # shapes of `SHAPES` whose weights are aligned
# What differs between kernels: a cap, a bias and a temperature; and the z-loss.
KINDS = {
    "plain": {},
    "z-loss": {"z_loss": 1e-2},
    "cap": {"logits_soft_cap": 5.0},
    "bias": {"has_bias": True},
    "temperature": {"is_scaled": True},
    "everything": {"z_loss": 1e-2, "logits_soft_cap": 5.0, "has_bias": True, "is_scaled": True},
}


def head_of(shape, **options):
    return LossHead((shape[3],), None, options.pop("logits_soft_cap", None), None, "default", **options)


def run(head, wrt, operands):
    """The results by name, and the gradients by `wrt`, of an interpreted kernel of two blocks."""
    problem_of = functools.partial(plans.linear_problem_of, head, wrt=wrt)
    operands = {name: jnp.asarray(operand) for name, operand in operands.items()}
    found = kernels.interpreted(lambda given: plans.run(problem_of, given, replace(HOPPER, multiprocessors=2)), operands)
    names = ("losses", "lse", *(["entropy"] if head.return_entropy else []), *wrt)
    return dict(zip(names, found, strict=True))


def in_float64(head, operands):
    """The results and the gradients by all operands, of rows that count."""
    operands = {name: np.asarray(each) if name == "labels" else np.float64(each) for name, each in operands.items()}
    (axis,), cap = head.class_axes, head.logits_soft_cap
    hidden, labels, factors = (operands[name] for name in ("hidden", "labels", "factors"))
    weight = operands["weight"] if axis else operands["weight"].T
    scale, rows = operands.get("scale", np.ones(len(labels))), np.arange(len(labels))
    x = hidden @ weight + operands.get("bias", 0)
    bent = x if cap is None else cap * np.tanh(x / cap)
    s = bent * scale[:, None]
    m = s.max(1)
    lse = m + np.log(np.exp(s - m[:, None]).sum(1))
    p = np.exp(s - lse[:, None])
    nll = lse - s[rows, np.maximum(labels, 0)]
    entropy = lse - np.where(p > 0, p * np.where(p > 0, s, 0), 0).sum(1)
    g = (factors * (1 + 2 * head.z_loss * lse))[:, None] * p
    g[rows, np.maximum(labels, 0)] -= factors
    of_scale = np.where(g != 0, g * np.where(g != 0, bent, 0), 0).sum(1)
    g *= scale[:, None] * (1 if cap is None else 1 - np.tanh(x / cap) ** 2)
    of_weight = hidden.T @ g
    gradients = {"hidden": g @ weight.T, "weight": of_weight if axis else of_weight.T, "bias": g.sum(0), "scale": of_scale}
    return {"losses": nll + head.z_loss * lse**2, "lse": lse, "entropy": entropy} | gradients


def check(found, expected, of_rows=1e-6, of_bias=0.005):
    """Weights, the gradient of the logits, and gradients are rounded to 16 bits. Numbers of rows err by `of_rows` at most."""
    most = {"hidden": 0.005, "weight": 0.005, "bias": of_bias}
    for name, each in found.items():
        assert np.all(np.isfinite(np.float64(each))), name
        assert each.shape == expected[name].shape, name
        error = np.linalg.norm(np.float64(each) - expected[name])
        assert error <= most.get(name, of_rows) * np.linalg.norm(expected[name]), name


def operands_of(shape, factor=4.0, has_bias=False, is_scaled=False):
    """Operands whose labels are classes that the bias leaves; the second row has the factor 0."""
    hidden, weight, labels = given(*shape, "bfloat16", factor)
    labels, rng = np.clip(labels, 0, shape[2] - 1), np.random.default_rng(0)
    factors = rng.standard_normal(shape[0]).astype(np.float32)
    factors[1:2] = 0
    operands = {"hidden": hidden, "weight": weight, "labels": labels, "factors": factors}
    if has_bias:
        operands["bias"] = bias_of(shape[2], has_bias)
        labels[operands["bias"][labels] < LEFT_OUT] = 2
    return operands | ({"scale": 1 / temperatures(shape[0])} if is_scaled else {})


def wrt_of(operands):
    return tuple([name for name in operands if name not in ("labels", "factors")])


@pytest.mark.usefixtures("plain_functions")
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(shape, kind, marks=cases.slow_unless((i + j) % 3 == 0))
        for i, shape in enumerate(SHAPES)
        for j, kind in enumerate(KINDS)
    ],
    ids=cases.ident,
)
def test_interpreted_results_and_gradients_are_right(shape, kind):
    options = dict(KINDS[kind])
    operands = operands_of(shape, **{name: options.pop(name) for name in ("has_bias", "is_scaled") if name in options})
    head = head_of(shape, return_entropy=True, **options)
    cap = head.logits_soft_cap
    bias = operands.get("bias")
    if cap is not None and bias is not None:  # else the cap alone is the score of a class that the bias leaves out
        operands["bias"] = np.maximum(bias, -3)
    check(run(head, wrt_of(operands), operands), in_float64(head, operands))


@pytest.mark.parametrize("wrt", [("hidden",), ("weight",), (), ("weight", "hidden")], ids=str)
@pytest.mark.parametrize("shape", [ALIGNED[0], SHAPES[2]], ids=cases.ident)
def test_interpreted_gradients_that_are_asked_for(shape, wrt):
    operands, head = operands_of(shape), head_of(shape)
    found, expected = run(head, wrt, operands), in_float64(head, operands)
    assert list(found) == ["losses", "lse", *wrt]
    check(found, expected)


@pytest.mark.parametrize(
    ("rows", "class_axis", "weight_dtype"),
    [
        *[(300, 0, "float32"), (300, 1, "float32"), (200, 1, "float32")],
        *[(300, 0, "bfloat16"), (200, 1, "bfloat16")],
    ],
)
def test_interpreted_gradients_of_several_parts_of_rows(rows, class_axis, weight_dtype, monkeypatch):
    """The last part is filled up. A weight in float32 is cast once, and its gradient is not rounded."""
    shape = (rows, 64, 512, class_axis)
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 128 * 512 * 2)
    operands, head = operands_of(shape, has_bias=True, is_scaled=True), head_of(shape, return_entropy=True)
    operands["weight"] = operands["weight"].astype(weight_dtype)
    found = run(head, wrt_of(operands), operands)
    assert found["weight"].dtype == weight_dtype
    check(found, in_float64(head, operands))


@contextlib.contextmanager
def as_device(device, gather):
    """Gives a program the place of one of two devices, and its collective: an interpreter has the kernels of one device."""
    index, size = jax.lax.axis_index, jax.lax.axis_size
    with (
        mock.patch.object(jax.lax, "axis_index", lambda name: device if name == ("model",) else index(name)),
        mock.patch.object(jax.lax, "axis_size", lambda name: 2 if name == ("model",) else size(name)),
        mock.patch.object(across_devices, "gathered", lambda axis_name, *numbers: gather(jnp.stack(numbers))),
    ):
        yield


@pytest.mark.usefixtures("plain_functions")
@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("shape", [(200, 64, 512, 1), (130, 72, 518, 0)], ids=cases.ident)
def test_interpreted_gradients_of_classes_that_devices_share(shape, kind):
    """Each device has half of the classes. What it returns adds up to the results and gradients of all classes."""
    options = dict(KINDS[kind])
    operands = operands_of(shape, **{name: options.pop(name) for name in ("has_bias", "is_scaled") if name in options})
    operands["bias"] = np.maximum(operands.get("bias", np.zeros(shape[2], np.float32)), -3)
    operands["labels"][4:9] = [0, shape[2] // 2 - 1, shape[2] // 2, shape[2] - 1, NO_CLASS]
    operands["factors"][8] = 0  # else the row's gradient has no label, which `in_float64` does not know
    head, wrt = head_of(shape, return_entropy=True, axis_name=("model",), **options), wrt_of(operands)
    halves = {"weight": np.split(operands["weight"], 2, shape[3]), "bias": np.split(operands["bias"], 2)}
    parts_of = [operands | {name: pair[device] for name, pair in halves.items()} for device in range(2)]
    gathered: list[jax.Array] = []
    for own in parts_of:  # first what each device has, then the results
        with as_device(len(gathered), lambda numbers: gathered.append(numbers) or jnp.stack([numbers, numbers], 1)):
            run(head, wrt, own)
    found = []
    for device, own in enumerate(parts_of):
        with as_device(device, lambda numbers: jnp.stack(gathered, 1)):
            found.append(run(head, wrt, own))
    whole = {name: sum(np.float64(each[name]) for each in found) for name in found[0]}
    whole |= {name: np.concatenate([each[name] for each in found], axis) for name, axis in (("weight", shape[3]), ("bias", 0))}
    expected = in_float64(head, operands)
    assert np.isnan(whole["losses"][8])
    for each in whole, expected:
        each["losses"] = np.delete(each["losses"], 8)
    check(whole, expected)


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("top", [8.0, 400.0])
def test_interpreted_gradients_of_rows_that_one_class_leads(top, is_scaled):
    """Tiles without that class have weights relative to their own largest score, far below, in every third row."""
    shape = (200, 64, 1024, 1)
    operands, head = operands_of(shape, 1.0, is_scaled=is_scaled), head_of(shape, z_loss=1e-4)
    weight = operands["weight"].at[0].set(0).at[0, 300].set(top)
    hidden = operands["hidden"].at[:, 0].set(jnp.where(jnp.arange(200) % 3 == 0, 30, 0).astype(jnp.bfloat16))
    operands |= {"hidden": hidden, "weight": weight}
    check(run(head, wrt_of(operands), operands), in_float64(head, operands))


def test_interpreted_gradients_where_a_z_loss_has_no_slope():
    """The gradient is that of the label alone where `1 + 2 * z_loss * lse` is 0."""
    shape, head = (128, 64, 256, 1), head_of((128, 64, 256, 1), z_loss=10.0)
    operands = operands_of(shape, 1.0)
    operands |= {"hidden": operands["hidden"].at[:].set(0), "bias": np.full(256, -np.log(256) - 1 / 20, np.float32)}
    found, expected = run(head, ("hidden",), operands), in_float64(head, operands)
    error = np.linalg.norm(np.float64(found["hidden"]) - expected["hidden"])
    assert error <= 0.005 * np.linalg.norm(expected["hidden"])


@pytest.mark.usefixtures("plain_functions")
@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("shape", [(300, 64, 512, 0), SHAPES[2]], ids=cases.ident)
def test_interpreted_losses_of_a_policy(shape, kind, monkeypatch):
    """The derivative of a loss is known behind the first kernel of each part; half of the ratios are clipped."""
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 128 * 512 * 2)
    options = {name: KINDS[kind][name] for name in ("has_bias", "is_scaled") if name in KINDS[kind]}
    operands, rng, head = operands_of(shape, 1.0, **options), np.random.default_rng(2), head_of(shape)
    nll = in_float64(head, operands)["losses"]
    advantages, ratio, d = rng.standard_normal(shape[0]), rng.uniform(0.6, 1.6, shape[0]), rng.uniform(-1, 1, shape[0])
    of_policy = {"advantages": advantages, "old_log_p": -nll - np.log(ratio)}
    of_policy |= {"reference_log_p": d - nll, "kl_weight": np.full(shape[0], 0.3)}
    low, high = 0.8, 1.28
    losses = -np.minimum(ratio * advantages, np.clip(ratio, low, high) * advantages) + 0.3 * (np.exp(d) - d - 1)
    is_clipped = np.where(advantages > 0, ratio > high, ratio < low)
    slopes = np.where(is_clipped, 0, advantages * ratio) + 0.3 * np.expm1(d)  # by the negative log-probability
    expected = in_float64(head, operands | {"factors": operands["factors"] * slopes})
    expected |= {"losses": losses, "lse": -nll}  # its second result are log-probabilities
    policy = PolicyHead(head.class_axes, None, None, None, "default", low=math.log(low), high=math.log(high))
    of_policy = {name: each.astype(np.float32) for name, each in of_policy.items()}
    # The gradient of the logits adds up to a small one of the bias, which is 0.006 away where that alone is rounded.
    check(run(policy, wrt_of(operands), operands | of_policy), expected, of_rows=1e-5, of_bias=0.01)


@pytest.mark.parametrize("size", [200, -200])
@pytest.mark.parametrize("shape", [(130, 64, 320, 0), (130, 72, 259, 1)], ids=cases.ident)
def test_interpreted_rows_that_do_not_count_have_none(shape, size):
    """Exponentials of a bias overflow in rows whose hidden states are zeros."""
    operands, head = operands_of(shape, 1.0, is_scaled=True), head_of(shape, return_entropy=True)
    ignored = np.array([5, 6, 7, 129])
    operands["labels"][ignored], operands["factors"][ignored] = NO_ROW, 0
    operands["hidden"] = operands["hidden"].at[ignored].set(0)
    operands["bias"] = np.full(shape[2], size, np.float32)
    found, expected = run(head, wrt_of(operands), operands), in_float64(head, operands)
    for name in ("losses", "lse", "entropy", "hidden", "scale"):
        np.testing.assert_array_equal(np.float64(found[name])[ignored], 0)
        expected[name][ignored] = 0
    check(found, expected, of_rows=1e-5)


@pytest.mark.parametrize("shape", [ALIGNED[0], SHAPES[2]], ids=cases.ident)
def test_interpreted_labels_that_are_no_class(shape):
    """The loss is NaN, and the gradient is the softmax times the factor, as it is from logits."""
    operands, head = operands_of(shape, 1.0), head_of(shape)
    operands["labels"][3] = NO_CLASS
    found = run(head, ("hidden",), operands)
    assert np.isnan(found["losses"][3])
    assert np.isfinite(np.delete(np.asarray(found["losses"]), 3)).all()
    logits = np.float64(operands["hidden"]) @ np.float64(operands["weight"])
    p = np.exp(logits[3] - jax.nn.logsumexp(logits[3]))
    expected = operands["factors"][3] * (p @ np.float64(operands["weight"]).T)
    assert np.linalg.norm(np.float64(found["hidden"][3]) - expected) <= 0.005 * np.linalg.norm(expected)


def test_interpreted_rows_of_nan_leave_other_rows_alone():
    shape = (128, 64, 256, 1)
    operands, head = operands_of(shape, 1.0), head_of(shape)
    expected = in_float64(head, operands)
    operands["hidden"] = operands["hidden"].at[4].set(np.nan)
    found = run(head, ("hidden",), operands)
    assert np.isnan(found["losses"][4])
    assert np.all(np.isnan(np.float64(found["hidden"][4])))
    found = {name: np.delete(np.float64(each), 4, 0) for name, each in found.items()}
    check(found, {name: np.delete(expected[name], 4, 0) for name in found})


@pytest.mark.parametrize("shape", [ALIGNED[1], SHAPES[2]], ids=cases.ident)
def test_interpreted_rows_without_a_class_have_gradients_of_nan(shape):
    """Where a bias excludes all classes, the loss is NaN, and so is the gradient of each row that counts."""
    operands, head = operands_of(shape, 1.0) | {"bias": np.full(shape[2], -np.inf, np.float32)}, head_of(shape)
    found = run(head, ("hidden",), operands)
    assert np.all(np.isnan(found["losses"]))
    is_nan = np.isnan(np.float64(found["hidden"]))
    np.testing.assert_array_equal(is_nan, np.broadcast_to((operands["factors"] != 0)[:, None], is_nan.shape))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e30])
def test_interpreted_losses_of_low_and_high_temperatures(temperature):
    shape = (128, 64, 256, 1)
    operands, head = operands_of(shape, 1.0), head_of(shape)
    operands["scale"] = np.full(128, 1 / temperature, np.float32)
    with np.errstate(under="ignore"):
        expected = in_float64(head, operands)
    found = run(head, ("hidden", "weight"), operands)
    for name, each in found.items():
        assert np.all(np.isfinite(np.float64(each))), name
        error = np.linalg.norm(np.float64(each) - expected[name])
        assert error <= 0.01 * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize(
    ("shape", "dtype", "options", "why"),
    [
        ((128, 64, 256, 1), "bfloat16", {"label_smoothing": 0.1}, "no kernel adds up scores, as label smoothing does"),
        ((128, 64, 256, 1), "float32", {}, "hidden must be bfloat16, got float32"),
        ((0, 64, 256, 1), "bfloat16", {}, "there are no rows"),
        ((128, 0, 256, 1), "bfloat16", {}, "weight must have entries, got shape (0, 256)"),
    ],
)
def test_other_operands_have_their_logits_made_part_by_part(shape, dtype, options, why):
    both = jax.value_and_grad(functools.partial(jaxsoftmax.linear_cross_entropy, **options), (0, 1))
    outer, *inner = jaxsoftmax.explain(both, *types(*shape, dtype), platform="cuda")
    assert (outer.primitive, outer.implementation) == ("linear_cross_entropy_gradient", "xla")
    assert why in outer.refusals[0][1]
    assert [decision.primitive for decision in inner] == ["cross_entropy_gradient"]


@pytest.mark.parametrize("has_labels", [True, False], ids=["classes", "probabilities"])
@pytest.mark.parametrize("implementation", [None, "mosaic", "xla"])
def test_what_runs(implementation, has_labels):
    hidden, weight, labels = types(128, 64, 256, 1, "bfloat16")
    labels = labels if has_labels else jax.ShapeDtypeStruct((128, 256), np.float32)
    f = jax.grad(functools.partial(jaxsoftmax.linear_cross_entropy, implementation=implementation))
    explanation = jaxsoftmax.explain(f, hidden, weight, labels, platform="cuda")
    assert has_labels == ("linear_cross_entropy_gradient" in {decision.primitive for decision in explanation})
    if has_labels:
        cases.assert_all_run_on(implementation or "mosaic", explanation)


def test_the_examples_of_a_batch_have_their_logits_made_part_by_part():
    hidden, weight, labels = types(128, 64, 256, 1, "bfloat16")
    hidden, labels = (jax.ShapeDtypeStruct((3, *array.shape), array.dtype) for array in (hidden, labels))
    f = jax.vmap(jax.grad(jaxsoftmax.linear_cross_entropy), (0, None, 0))
    outer, *_ = jaxsoftmax.explain(f, hidden, weight, labels, platform="cuda")
    assert outer.implementation == "xla"
    assert "the examples of a batch have gradients of the weight of their own" in outer.refusals[0][1]


@pytest.mark.parametrize(("shape", "is_aligned"), [(ALIGNED[0], True), (SHAPES[2], False)], ids=cases.ident)
def test_a_plan_says_how_it_runs(shape, is_aligned):
    operands = operands_of(shape)
    plan = plans.plan_of(
        plans.linear_problem_of(head_of(shape), operands, wrt=("hidden",)), replace(HOPPER, multiprocessors=78)
    )
    assert not isinstance(plan, Refusal)
    assert (plan.blocks, plan.is_aligned) == (78, is_aligned)
    more = "weights of scores in memory" if is_aligned else "then again with a stage less for each block of classes"
    stages = 3 if is_aligned else 4
    assert plan.describe() == f"tiles of 128 rows by 256 classes, {stages} stages, 2 consumer warpgroups, {more}"


@pytest.mark.parametrize("shape", SHAPES, ids=cases.ident)
def test_it_is_lowered(shape):
    f = jax.grad(functools.partial(jaxsoftmax.linear_cross_entropy, class_axis=shape[3]), (0, 1))
    names = NAMES if shape in ALIGNED else ["linear_log_probs_mosaic", "linear_log_probs_gradient_mosaic"]
    kernels.lowered_for_cuda(f, *types(*shape, "bfloat16"), kernels=names)


@pytest.mark.parametrize("rows", [256, 1000])
def test_the_kernel_of_several_parts_is_lowered_once(rows, monkeypatch):
    """The gradient of the weight starts as that of the first part, not as zeros."""
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 128 * 256 * 2)
    text = kernels.lowered_for_cuda(jax.grad(jaxsoftmax.linear_cross_entropy, (0, 1)), *types(rows, 64, 256, 1, "bfloat16"))
    assert kernels.kernel_names(text) == NAMES
    assert "stablehlo.while" in text
    assert not re.search(r"broadcast_in_dim.*-> tensor<64x256xbf16>", text)


# On a GPU.

# The last weights are copied. With "everything" others have what each kind has.
NATIVE = [(1000, 256, 50304, 1), (3001, 128, 32000, 0), (1000, 256, 50257, 1)]
OTHERS = [(1000, 256, 50304, 0), (2050, 1024, 4104, 0), (130, 192, 264, 0), (1, 64, 8, 0), (129, 4096, 128256, 1)]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("shape", "kind"), [*itertools.product(NATIVE, KINDS), *itertools.product(OTHERS, ["everything"])], ids=cases.ident
)
def test_native_results_and_gradients(shape, kind, monkeypatch):
    """The sum of weighted losses and its gradients, in several parts of rows or blocks of classes, against whole logits."""
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 512 * shape[2] * 2)
    monkeypatch.setattr(linear_terms, "ONE_BLOCK", 512 * shape[2] * 2)
    options = dict(KINDS[kind])
    operands = operands_of(shape, **{name: options.pop(name) for name in ("has_bias", "is_scaled") if name in options})
    if "logits_soft_cap" in options and "bias" in operands:
        operands["bias"] = np.maximum(operands["bias"], -3)
    temperature = jnp.asarray(1 / operands["scale"]) if "scale" in operands else None
    bias = jnp.asarray(operands["bias"]) if "bias" in operands else None
    labels, factors = jnp.asarray(operands["labels"]), jnp.asarray(operands["factors"])
    wrt = tuple([at for at, given in enumerate((0, 0, temperature, bias)) if given is not None])

    def ours(hidden, weight, temperature, bias):
        more = options | {"temperature": temperature, "bias": bias, "sample_weight": factors, "class_axis": shape[3]}
        loss, lse, entropy = jaxsoftmax.linear_cross_entropy(
            hidden, weight, labels, reduction="sum", return_lse=True, return_entropy=True, **more
        )
        return loss, (jax.lax.stop_gradient(lse), jax.lax.stop_gradient(entropy))

    def whole(hidden, weight, temperature, bias):
        weight = (weight if shape[3] == 1 else weight.T).astype(jnp.float32)
        logits = jnp.dot(hidden.astype(jnp.float32), weight, precision="highest")
        logits = logits if bias is None else logits + bias[None]
        cap, more = options.get("logits_soft_cap"), {"scale": None if temperature is None else 1 / temperature}
        scores = logits if cap is None else cap * jnp.tanh(logits / cap)
        losses, lse = jaxsoftmax.cross_entropy(logits, labels, return_lse=True, implementation="xla", **options, **more)
        counts = factors != 0
        entropy = jaxsoftmax.entropy(scores, implementation="xla", **more)
        return jnp.sum(factors * losses), (jnp.where(counts, lse, 0), jnp.where(counts, entropy, 0))

    arrays = operands["hidden"], operands["weight"], temperature, bias
    f, truth = (jax.jit(jax.value_and_grad(f, wrt, has_aux=True)) for f in (ours, whole))
    cases.assert_ran("mosaic", f, *arrays)
    found, expected = f(*arrays), truth(*arrays)
    assert [np.asarray(a).tobytes() for a in jax.tree.leaves(found)] == [
        np.asarray(a).tobytes() for a in jax.tree.leaves(f(*arrays))
    ]
    (loss, others), gradients = found
    (expected_loss, expected_others), expected_gradients = expected
    np.testing.assert_allclose(loss, expected_loss, rtol=1e-4, atol=1e-3)
    for a, b in zip(others, expected_others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-4)
    for at, a, b in zip(wrt, gradients, expected_gradients, strict=True):
        assert np.all(np.isfinite(np.float64(a)))
        most = (0.005, 0.005, 2e-4, 0.005)[at]
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= most * np.linalg.norm(np.float64(b))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [(300, 256, 5056, 1), (300, 256, 5057, 1)], ids=cases.ident)
def test_native_rows_that_are_not_finite_leave_other_rows_alone(shape, number):
    hidden, weight, labels = given(*shape, "bfloat16")
    labels = jnp.asarray(np.clip(labels, 0, shape[2] - 1))
    f = jax.jit(jax.grad(jaxsoftmax.linear_cross_entropy))
    cases.assert_ran("mosaic", f, hidden, weight, labels)
    expected, found = f(hidden, weight, labels), np.float64(f(hidden.at[4].set(number), weight, labels))
    assert not np.any(np.isfinite(found[4]))
    np.testing.assert_array_equal(np.delete(found, 4, 0), np.delete(np.float64(expected), 4, 0))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(1000, 256, 50304, 1), (3001, 128, 32000, 0), (1000, 256, 50257, 1)], ids=cases.ident)
def test_native_losses_are_those_without_gradients(shape):
    """A loss of 16-bit operands does not change its value where it is differentiated, except by the order of a sum."""
    hidden, weight, labels = given(*shape, "bfloat16", 4)
    labels = jnp.asarray(np.clip(labels, 0, shape[2] - 1))
    loss = jax.jit(functools.partial(jaxsoftmax.linear_cross_entropy, class_axis=shape[3]))
    both = jax.jit(jax.value_and_grad(functools.partial(jaxsoftmax.linear_cross_entropy, class_axis=shape[3]), (0, 1)))
    np.testing.assert_allclose(loss(hidden, weight, labels), both(hidden, weight, labels)[0], rtol=1e-6)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("shape", [(500, 256, 50304, 1), (500, 128, 32000, 0), (300, 256, 50257, 1)], ids=cases.ident)
def test_native_examples_that_share_the_layer(shape, reduction, monkeypatch):
    """The gradients of a batch of losses are the sums of those of each example, in several parts, against whole logits."""
    examples = 3
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 512 * shape[2] * 2)
    monkeypatch.setattr(linear_terms, "ONE_BLOCK", 512 * shape[2] * 2)
    monkeypatch.setattr(linear_terms, "BLOCK", 256 * shape[2] * 2)
    hidden, weight, labels = given(examples * shape[0], *shape[1:], "bfloat16")
    hidden, labels = hidden.reshape(examples, *shape[:1], -1), jnp.clip(labels, 0, shape[2] - 1).reshape(examples, -1)
    counts = np.random.default_rng(2).uniform(0.5, 2, labels.shape).astype(np.float32)
    counts[:, ::7] = 0

    def loss(hidden, labels, counts, weight):
        options = {"sample_weight": counts, "reduction": reduction, "class_axis": shape[3]}
        return jnp.sum(jaxsoftmax.linear_cross_entropy(hidden, weight, labels, **options))

    def whole(hidden, labels, counts, weight):
        weight = (weight if shape[3] == 1 else weight.T).astype(jnp.float32)
        logits = jnp.dot(hidden.astype(jnp.float32), weight, precision="highest")
        total = jnp.sum(counts * jaxsoftmax.cross_entropy(logits, labels, implementation="xla"))
        return total / jnp.sum(counts) if reduction == "mean" else total

    def gradients(loss, map_):
        def total(hidden, weight):
            return jnp.sum(jnp.sin(map_(functools.partial(loss, weight=weight), (hidden, labels, counts))))

        return jax.jit(jax.value_and_grad(total, (0, 1)))

    f = gradients(loss, lambda f, operands: jax.vmap(f)(*operands))
    cases.assert_ran("mosaic", f, hidden, weight)
    found, expected = (
        f(hidden, weight),
        gradients(whole, lambda f, operands: jax.lax.map(lambda x: f(*x), operands))(hidden, weight),
    )
    np.testing.assert_allclose(found[0], expected[0], rtol=1e-3, atol=1e-3)
    for a, b in zip(found[1], expected[1], strict=True):
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= 0.005 * np.linalg.norm(np.float64(b))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_mapped", [True, False], ids=["shard_map", "explicit"])
@pytest.mark.parametrize("kind", ["plain", "everything"])
@pytest.mark.parametrize("shape", [(1300, 256, 50432, 1), (1025, 128, 32000, 0), (300, 256, 5056, 1)], ids=cases.ident)
def test_native_classes_that_gpus_share(shape, kind, is_mapped, monkeypatch):
    """All results and gradients of a mean are those of one GPU that has all classes, and the same in every call."""
    devices = cases.several("gpu")
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 512 * shape[2] * 2 // len(devices))
    axis_type = AxisType.Auto if is_mapped else AxisType.Explicit
    mesh = jax.make_mesh((len(devices),), ("model",), axis_types=(axis_type,), devices=devices)
    options = dict(KINDS[kind])
    operands = operands_of(shape, **{name: options.pop(name) for name in ("has_bias", "is_scaled") if name in options})
    bias = np.maximum(operands.get("bias", np.zeros(shape[2], np.float32)), -3)
    temperature = 1 / operands["scale"] if "scale" in operands else np.ones(shape[0], np.float32)
    arrays = operands["hidden"], operands["weight"], bias, temperature
    options |= {"class_axis": shape[3], "return_lse": True, "return_entropy": True}
    of_classes = P("model") if shape[3] == 0 else P(None, "model")
    specs = P(), of_classes, P("model"), P()

    def loss(hidden, weight, bias, temperature, **more):
        results = jaxsoftmax.linear_cross_entropy(
            hidden, weight, operands["labels"], bias=bias, temperature=temperature, **options, **more
        )
        return results[0], results[1:]

    of_shards = loss
    if is_mapped:
        of_shards = functools.partial(loss, axis_name="model")
        of_shards = jax.shard_map(of_shards, mesh=mesh, in_specs=specs, out_specs=(P(), (P(), P())))
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
        both = jax.jit(jax.value_and_grad(of_shards, (0, 1, 2, 3), has_aux=True))
        cases.assert_ran("mosaic", both, *placed)
        found, again = jax.tree.leaves(both(*placed)), jax.tree.leaves(both(*placed))
    assert [np.asarray(a).tobytes() for a in found] == [np.asarray(a).tobytes() for a in again]
    alone = jax.tree.leaves(jax.jit(jax.value_and_grad(loss, (0, 1, 2, 3), has_aux=True))(*map(jnp.asarray, arrays)))
    for a, b, most in zip(found, alone, (1e-6, 1e-6, 1e-5, 0.01, 0.01, 0.01, 1e-4), strict=True):
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= most * np.linalg.norm(np.float64(b))
