"""The kernel of a linear layer's losses on Hopper: lowered and interpreted here, and held against float64 on such a GPU."""

import functools
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.cross_entropy import linear_terms, parts, xla
from jaxsoftmax.ops.cross_entropy.loss import LogProbHead
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import linear_loss
from jaxsoftmax.ops.cross_entropy.xla import NO_ROW

from ..support import cases, kernels, oracle
from ..support.cross_entropy import oracle as losses_oracle
from ..support.cross_entropy import plans
from ..support.cross_entropy.tiles import LARGE, LAYERS, LEFT_OUT, SHAPES, bias_of, given, temperatures, types
from ..support.meshes import COLLECTIVE, make_mesh

NAME = "linear_log_probs_mosaic"


def loss(hidden, weight, labels, **options):
    return jaxsoftmax.linear_cross_entropy(hidden, weight, labels, **options)


@jax.jit
def scores_and_sizes(hidden, weight):
    """Scores in float64, and those of absolute values."""
    hidden, weight = hidden.astype(jnp.float64), weight.astype(jnp.float64)
    return hidden @ weight, jnp.abs(hidden) @ jnp.abs(weight)


def check(found, hidden, weight, labels, class_axis, **options):
    """Against float64, of all scores or of these rows; a product adds an error of the sum in float32 to a score."""
    rows = np.linspace(0, len(labels) - 1, min(len(labels), 200)).astype(int)
    with jax.enable_x64(True):
        scores, sizes = map(np.asarray, scores_and_sizes(hidden[rows], weight if class_axis == 1 else weight.T))
    expected = losses_oracle.cross_entropy(scores, labels[rows], **options).loss
    outside = (labels[rows] < 0) | (labels[rows] >= scores.shape[1])
    np.testing.assert_array_equal(np.isnan(np.asarray(found)[rows]), outside)
    # Tensor cores truncate what they add up.
    more = 4 * oracle.EPS * np.sqrt(hidden.shape[1]) * np.max(sizes, 1)
    assert oracle.error(np.asarray(found)[rows], oracle.Truth(expected.value, expected.budget + more)) <= 1


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        pytest.param(shape, dtype, marks=cases.slow_unless(i % 2 == j))
        for i, shape in enumerate(SHAPES)
        for j, dtype in enumerate(["bfloat16", "float16"])
    ],
    ids=cases.ident,
)
def test_it_is_lowered(shape, dtype):
    f = functools.partial(loss, class_axis=shape[3])
    kernels.lowered_for_cuda(f, *types(*shape, dtype), kernels=[NAME])


@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "why"),
    [
        ((128, 64, 256, 1), "float32", None, "hidden must be bfloat16 or float16, got float32"),
        ((0, 64, 256, 1), "bfloat16", None, "there are no rows"),
        ((128, 0, 256, 1), "bfloat16", None, "weight must have entries, got shape (0, 256)"),
    ],
)
def test_other_operands_have_their_logits_made_part_by_part(shape, dtype, weight_dtype, why):
    f = functools.partial(loss, class_axis=shape[3])
    outer, *inner = jaxsoftmax.explain(f, *types(*shape, dtype, weight_dtype), platform="cuda")
    assert (outer.primitive, outer.implementation) == ("linear_log_probs", "xla")
    assert why in outer.refusals[0][1]
    assert [decision.primitive for decision in inner] == ["cross_entropy"]


@pytest.mark.parametrize("options", [{"logits_soft_cap": 30.0}, {"bias": np.zeros(256)}, {"temperature": 0.7}])
def test_options_that_the_kernel_has(options):
    (decision,) = jaxsoftmax.explain(functools.partial(loss, **options), *types(128, 64, 256, 1, "bfloat16"), platform="cuda")
    assert (decision.primitive, decision.implementation) == ("linear_log_probs", "mosaic")


def test_smoothing_has_its_logits_made_part_by_part():
    f = functools.partial(loss, label_smoothing=0.1)
    outer, inner = jaxsoftmax.explain(f, *types(128, 64, 256, 1, "bfloat16"), platform="cuda")
    assert (outer.primitive, outer.implementation, inner.primitive) == ("linear_log_probs", "xla", "cross_entropy")


def test_a_wider_weight_is_cast():
    kernels.lowered_for_cuda(loss, *types(128, 64, 256, 1, "bfloat16", "float32"), kernels=[NAME])


def test_it_runs_where_gradients_are_made_anew():
    arrays = types(128, 64, 256, 1, "bfloat16")
    both = jax.value_and_grad(lambda *given: jnp.sum(loss(*given, reduction="none") ** 2))
    explanation = jaxsoftmax.explain(both, *arrays, platform="cuda")
    assert [d.primitive for d in explanation] == ["linear_log_probs", "linear_log_probs_vjp"]
    cases.assert_all_run_on("mosaic", explanation)


@pytest.mark.parametrize("implementation", ["mosaic", "xla"])
def test_a_forced_implementation(implementation):
    f = functools.partial(loss, implementation=implementation)
    explanation = jaxsoftmax.explain(f, *types(128, 64, 256, 1, "bfloat16"), platform="cuda")
    cases.assert_all_run_on(implementation, explanation)
    by_parts = jaxsoftmax.explain(f, *types(128, 60, 5000, 1, "float32"), platform="cuda")
    assert [d.implementation for d in by_parts] == ["xla", implementation]


def test_examples_that_share_the_weight_are_rows_of_one_call():
    hidden, weight, labels = types(128, 64, 256, 1, "bfloat16")
    hidden, labels = (jax.ShapeDtypeStruct((3, *array.shape), array.dtype) for array in (hidden, labels))
    kernels.lowered_for_cuda(jax.vmap(loss, (0, None, 0)), hidden, weight, labels, kernels=[NAME])
    weights = jax.ShapeDtypeStruct((3, *weight.shape), weight.dtype)
    decision = jaxsoftmax.explain(jax.vmap(loss), hidden, weights, labels, platform="cuda")[0]
    assert "the examples of a batch must share the weight, got 3 weights" in decision.refusals[0][1]


@pytest.mark.parametrize("shared", [True, False])
def test_batches_are_right_on_the_reference(shared):
    hidden, weight, labels = (
        np.random.default_rng(0).standard_normal(shape) for shape in [(3, 2, 20, 8), (3, 8, 30), (3, 2, 20)]
    )
    labels = (np.abs(labels) * 10).astype(np.int32)
    weight = weight[0] if shared else weight
    inner = jax.vmap(functools.partial(loss, reduction="none"), (0, None, 0))
    found = jax.vmap(inner, (0, None if shared else 0, 0))(*map(jnp.float32, (hidden, weight)), labels)
    scores = np.einsum("abth,hv->abtv" if shared else "abth,ahv->abtv", hidden, weight)
    expected = jaxsoftmax.cross_entropy(jnp.float32(scores), labels)
    np.testing.assert_allclose(found, expected, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("shape", [(3, 0, 8, 30), (3, 5, 0, 30), (0, 5, 8, 30)], ids=cases.ident)
def test_empty_batches(shape):
    batch, rows, size, classes = shape
    hidden, weights, labels = jnp.zeros((batch, rows, size)), jnp.zeros((batch, size, classes)), jnp.zeros((batch, rows), int)
    found = jax.vmap(functools.partial(loss, reduction="none"))(hidden, weights, labels)
    np.testing.assert_allclose(found, np.full((batch, rows), np.log(30)), rtol=1e-6)


@pytest.mark.parametrize("kind", ["examples", "examples, own weights", "rows", "both"])
def test_of_a_batch_on_automatic_axes_nothing_is_gathered(kind):
    mesh = make_mesh(AxisType.Auto)
    of_rows = {"rows": P(None, "data"), "both": P("model", "data")}.get(kind, P("data"))
    own = kind == "examples, own weights"
    f = jax.vmap(functools.partial(loss, reduction="none"), (0, 0 if own else None, 0))
    shapes = (8, 16, 32), (8, 32, 48) if own else (32, 48), (8, 16)
    specs, dtypes = (of_rows, P("data") if own else P(), of_rows), (jnp.float32, jnp.float32, jnp.int32)
    arrays = [
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
        for shape, dtype, spec in zip(shapes, dtypes, specs, strict=True)
    ]
    assert not COLLECTIVE.search(jax.jit(f).lower(*arrays).compile().as_text())


@pytest.mark.parametrize("classes", [P(), P(None, "model")], ids=str)
@pytest.mark.parametrize("rows", [P(("data", "model")), P("data"), P()], ids=str)
def test_on_explicit_axes_it_runs_on_shards(rows, classes):
    mesh = make_mesh(AxisType.Explicit)
    arrays = [
        jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=NamedSharding(mesh, spec))
        for array, spec in zip(types(1024, 64, 256, 1, "bfloat16"), (rows, classes, rows), strict=True)
    ]
    with jax.set_mesh(mesh):
        (decision,) = jaxsoftmax.explain(loss, *arrays, platform="cuda")
    own_rows = {P(("data", "model")): 128, P("data"): 256, P(): 1024}[rows]
    own_classes = 256 if classes == P() or own_rows == 128 else 128  # a mesh axis shards rows or classes
    assert decision.operands[:2] == (f"bfloat16[{own_rows},64]", f"bfloat16[64,{own_classes}]")
    assert (decision.primitive, decision.implementation) == ("linear_log_probs", "mosaic")


@pytest.mark.parametrize("is_mapped", [True, False], ids=["shard_map", "automatic"])
def test_on_several_devices_it_runs_inside_a_shard_map(is_mapped):
    mesh, f = make_mesh(AxisType.Auto, (8,), ("data",)), functools.partial(loss, reduction="none")
    specs = P("data"), P(), P("data")
    arrays = types(1024, 64, 256, 1, "bfloat16")
    arrays = [
        jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=NamedSharding(mesh, s)) for a, s in zip(arrays, specs, strict=True)
    ]
    if is_mapped:
        f = jax.shard_map(f, mesh=mesh, in_specs=specs, out_specs=P("data"))
    decision = jaxsoftmax.explain(f, *arrays, platform="cuda")[0]
    assert decision.primitive == "linear_log_probs"
    assert decision.implementation == ("mosaic" if is_mapped else "xla")
    assert is_mapped or "only inside a shard_map over all mesh axes" in decision.refusals[0][1]


def numbers_by_kernel(class_axis, hidden, weight, labels):
    """The state and the score of the label of each row, by a kernel of two blocks."""
    operands = {"hidden": hidden, "weight": weight, "labels": labels[:, None]}
    problem_of = functools.partial(plans.linear_problem_of, LogProbHead(class_axis, None, None, "default"))
    return plans.run(problem_of, operands, replace(HOPPER, multiprocessors=2))


def losses_by_kernel(class_axis, hidden, weight, labels):
    """The losses and the log-sum-exp of each row."""
    m, d, score = numbers_by_kernel(class_axis, hidden, weight, labels)
    chosen = jnp.where((labels >= 0) & (labels < weight.shape[class_axis]), score[:, 0], jnp.nan)
    return xla.results_of(labels, m, d, chosen, dtype=m.dtype)


def test_a_plan_has_a_block_for_each_multiprocessor():
    operands = dict(zip(("hidden", "weight"), types(128, 64, 256, 1, "bfloat16"), strict=False))
    operands["labels"] = jax.ShapeDtypeStruct((128, 1), jnp.int32)
    plan = plans.plan_of(
        plans.linear_problem_of(LogProbHead(1, None, None, "default"), operands), replace(HOPPER, multiprocessors=78)
    )
    assert plan.blocks == 78
    assert plan.describe() == "tiles of 128 rows by 256 classes, 4 stages, 2 consumer warpgroups"


@pytest.mark.parametrize("dtype", cases.quick("bfloat16", slow=["float16"]))
@pytest.mark.parametrize("shape", cases.every_other(SHAPES), ids=cases.ident)
def test_interpreted_losses_are_right(shape, dtype):
    arrays = given(*shape, dtype, factor=16)

    def f(hidden, weight, labels):
        nll, lse = losses_by_kernel(shape[3], hidden, weight, labels)
        return nll + 1e-3 * lse**2

    ignored = range(7, 80) if shape[0] > 128 else range(0)  # rows that do not count may hold anything
    hidden, weight, labels = np.array(arrays[0]), arrays[1], np.array(arrays[2])
    hidden[ignored], labels[ignored] = np.nan, NO_ROW
    found = kernels.interpreted(f, *map(jnp.asarray, (hidden, weight, labels)))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found[np.array(ignored, int)], 0)
    found, hidden, labels = (np.delete(array, ignored, 0) for array in (found, hidden, labels))
    check(found, hidden, weight, labels, shape[3], z_loss=1e-3)


def test_interpreted_states_of_a_part_of_the_classes_are_right():
    shape = (130, 128, 320, 1)
    hidden, weight, labels = given(*shape, "bfloat16")
    f = functools.partial(numbers_by_kernel, 1)
    m, d, score = map(np.asarray, kernels.interpreted(f, hidden, weight, jnp.asarray(labels)))
    scores = np.float64(hidden) @ np.float64(weight)
    np.testing.assert_allclose(m, scores.max(1), rtol=1e-5)
    np.testing.assert_allclose(m + np.log(d), jax.nn.logsumexp(np.float32(scores), 1), rtol=1e-5)
    is_own = (labels >= 0) & (labels < 320)
    own = np.where(is_own, np.take_along_axis(scores, np.clip(labels, 0, 319)[:, None], 1)[:, 0], 0)  # of other devices' 0
    np.testing.assert_allclose(score[:, 0], own, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("weight_dtype", [None, "float32"])
def test_interpreted_losses_of_a_weight_that_is_copied_in_pieces(weight_dtype, monkeypatch):
    shape = (130, 72, 700, 1)
    monkeypatch.setattr(parts, "MOST", 300 * 72 * 2)
    hidden, weight, labels = given(*shape, "bfloat16")
    assert linear_loss._classes_of_piece(1, weight, hidden.dtype) == 256
    f = functools.partial(losses_by_kernel, 1)
    nll, lse = kernels.interpreted(f, hidden, weight.astype(weight_dtype or weight.dtype), jnp.asarray(labels))
    check(nll, hidden, weight, labels, 1)
    scores = np.float64(hidden) @ np.float64(weight)
    np.testing.assert_allclose(lse, jax.nn.logsumexp(np.float32(scores), 1), rtol=1e-5)


LOG_PROBS, GRADIENT = "linear_log_probs_mosaic", "linear_log_probs_gradient_mosaic"


def check_log_probs(found, arrays, class_axis, temperature, bias=None, cap=None):
    """Holds log-probabilities, entropies and log-sum-exps against those of logits in float64."""
    hidden, weight, tokens = arrays
    rows = np.linspace(0, len(tokens) - 1, min(len(tokens), 200)).astype(int)
    with jax.enable_x64(True):
        scores, sizes = map(np.asarray, scores_and_sizes(hidden[rows], weight if class_axis == 1 else weight.T))
    if bias is not None:
        bias = np.float64(bias)
        scores, sizes = scores + bias, np.where(bias < LEFT_OUT, 0, sizes + np.abs(bias))
    inverse = 1.0 if temperature is None else np.float64(np.float32(1) / temperature[rows, None])
    tokens, inside = tokens[rows], (tokens[rows] >= 0) & (tokens[rows] < scores.shape[1])
    truth = losses_oracle.log_probs(scores, np.where(inside, tokens, 0), scale=inverse, logits_soft_cap=cap)
    # Tensor cores truncate what they add up. An entropy errs by the spread of scores that err by as much.
    more = 8 * oracle.EPS * np.sqrt(hidden.shape[1]) * np.max(sizes * inverse, 1)
    log_p, entropy, lse = (np.asarray(each)[rows] for each in found)
    np.testing.assert_array_equal(np.isnan(log_p), ~inside)
    pairs = (log_p[inside], truth.log_p, inside), (entropy, truth.entropy, slice(None)), (lse, truth.lse, slice(None))
    for each, expected, kept in pairs:
        budget = expected.budget[kept] + more[kept] * (1 + np.max(truth.entropy.value))
        assert oracle.error(each, oracle.Truth(expected.value[kept], budget)) <= 1


@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("shape", cases.every_other(SHAPES), ids=cases.ident)
def test_interpreted_log_probs_are_right(shape, is_scaled):
    hidden, weight, tokens = given(*shape, "bfloat16", factor=16)
    temperature, head = temperatures(len(tokens)) if is_scaled else None, LogProbHead(shape[3], None, None, "default")
    f = functools.partial(plans.linear_problem_of, head, return_entropy=True)

    def run(hidden, weight, labels):
        operands = {"hidden": hidden, "weight": weight, "labels": labels}
        if is_scaled:
            operands["scale"] = 1 / jnp.asarray(temperature)
        return plans.run(f, operands, replace(HOPPER, multiprocessors=2))

    m, d, score, exponents = map(np.float64, kernels.interpreted(run, hidden, weight, jnp.asarray(tokens)[:, None]))
    inverse = 1.0 if temperature is None else 1 / np.float64(temperature)
    log_p, lse = (score[:, 0] - m) * inverse - np.log(d), m * inverse + np.log(d)
    log_p = np.where((tokens >= 0) & (tokens < shape[2]), log_p, np.nan)
    check_log_probs((log_p, np.log(d) - exponents / d, lse), (hidden, weight, tokens), shape[3], temperature)


def run_log_probs(head, operands):
    """The results of `linear_log_probs` with an entropy, by a kernel of two blocks."""
    problem_of = functools.partial(plans.linear_problem_of, head, return_entropy=True)
    return kernels.interpreted(lambda given: plans.run(problem_of, given, replace(HOPPER, multiprocessors=2)), operands)


@pytest.mark.usefixtures("plain_functions")
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        pytest.param(shape, kind, marks=cases.slow_unless((i + j) % 3 == 0))
        for i, shape in enumerate(SHAPES)
        for j, kind in enumerate(LAYERS)
    ],
    ids=cases.ident,
)
def test_interpreted_log_probs_with_a_bias_or_a_cap_are_right(shape, kind, is_scaled):
    hidden, weight, tokens = given(*shape, "bfloat16", factor=4)
    has_bias, cap = LAYERS[kind]
    bias = bias_of(shape[2], has_bias)
    operands = {"hidden": hidden, "weight": weight, "labels": jnp.asarray(tokens)[:, None]}
    operands |= {"scale": 1 / jnp.asarray(temperatures(len(tokens)))} if is_scaled else {}
    operands |= {"bias": jnp.asarray(bias)} if has_bias else {}
    m, d, score, exponents = map(np.float64, run_log_probs(LogProbHead(shape[3], cap, None, "default"), operands))
    temperature = temperatures(len(tokens)) if is_scaled else None
    inverse = 1 / np.float64(temperature) if is_scaled else 1.0
    log_p, lse = (score[:, 0] - m) * inverse - np.log(d), m * inverse + np.log(d)
    log_p = np.where((tokens >= 0) & (tokens < shape[2]), log_p, np.nan)
    found = log_p, np.log(d) - exponents / d, lse
    check_log_probs(found, (hidden, weight, tokens), shape[3], temperature, bias, cap)


@pytest.mark.parametrize("is_scaled", [True, False])
def test_interpreted_log_probs_of_rows_without_a_class_have_an_empty_state(is_scaled):
    hidden, weight, tokens = given(130, 72, 300, 1, "bfloat16")
    operands = {"hidden": hidden, "weight": weight, "labels": jnp.asarray(tokens)[:, None], "bias": jnp.full(300, -jnp.inf)}
    operands |= {"scale": 1 / jnp.asarray(temperatures(130))} if is_scaled else {}
    m, d, score, exponents = run_log_probs(LogProbHead(1, None, None, "default"), operands)
    for number in (m, d, exponents):
        np.testing.assert_array_equal(number, 0)
    np.testing.assert_array_equal(score[:, 0], np.where((tokens >= 0) & (tokens < 300), -np.inf, 0))


@pytest.mark.parametrize("hidden_by", [-1e9, np.finfo(np.float32).min, -np.inf])
def test_interpreted_log_probs_of_classes_that_a_bias_leaves(hidden_by):
    """A bias leaves a tenth of the first tile, as `examples/grpo_tiny.py` does, in pieces of the weight."""
    hidden, weight, tokens = given(128, 64, 600, 1, "bfloat16", factor=4)
    tokens = tokens % 10
    bias = jnp.where(jnp.arange(600) < 10, 0, hidden_by).astype(np.float32)
    operands = {"hidden": hidden, "weight": weight, "labels": jnp.asarray(tokens)[:, None], "bias": bias}
    m, d, score, exponents = map(np.float64, run_log_probs(LogProbHead(1, None, None, "default"), operands))
    found = score[:, 0] - m - np.log(d), np.log(d) - exponents / d, m + np.log(d)
    check_log_probs(found, (hidden, weight[:, :10], tokens), 1, None)


def test_interpreted_log_probs_of_a_weight_that_is_copied_in_pieces_have_their_own_biases(monkeypatch):
    shape = (130, 72, 700, 1)
    monkeypatch.setattr(parts, "MOST", 300 * 72 * 2)
    hidden, weight, tokens = given(*shape, "bfloat16")
    assert linear_loss._classes_of_piece(1, weight, hidden.dtype) == 256
    bias = np.random.default_rng(1).standard_normal(700).astype(np.float16)
    operands = {"hidden": hidden, "weight": weight, "labels": jnp.asarray(tokens)[:, None], "bias": jnp.asarray(bias)}
    m, d, score, exponents = map(np.float64, run_log_probs(LogProbHead(1, None, None, "default"), operands))
    log_p = np.where((tokens >= 0) & (tokens < 700), score[:, 0] - m - np.log(d), np.nan)
    check_log_probs((log_p, np.log(d) - exponents / d, m + np.log(d)), (hidden, weight, tokens), 1, None, bias)


@pytest.mark.parametrize("temperature", [1e-3, 1e-30])
def test_interpreted_log_probs_of_a_low_temperature_have_one_class_left(temperature):
    hidden, weight, tokens = given(128, 64, 300, 1, "bfloat16")
    f = functools.partial(plans.linear_problem_of, LogProbHead(1, None, None, "default"), return_entropy=True)

    def run(hidden, weight, labels):
        operands = {"hidden": hidden, "weight": weight, "labels": labels, "scale": jnp.full(128, 1 / temperature)}
        return plans.run(f, operands, replace(HOPPER, multiprocessors=2))

    _, d, _, exponents = kernels.interpreted(run, hidden, weight, jnp.asarray(tokens)[:, None])
    scores = np.sort(np.float64(hidden) @ np.float64(weight), 1)
    is_alone = (scores[:, -1] - scores[:, -2]) / temperature > 30
    assert is_alone.sum() > 100
    np.testing.assert_array_equal(d[is_alone], 1)
    np.testing.assert_allclose(exponents[is_alone], 0, atol=1e-10)


@pytest.mark.parametrize(("is_scaled", "has_entropy"), [(True, True), (False, True), (True, False)])
@pytest.mark.parametrize("shape", cases.every_other(SHAPES), ids=cases.ident)
def test_interpreted_gradients_of_log_probs_are_right(shape, is_scaled, has_entropy, monkeypatch):
    """Against the reference, which rounds the gradient of logits as the kernel does. Labels are of all tiles, and of none."""
    monkeypatch.setattr(linear_terms, "LEAST_CLASSES", 256)
    for most in ("BLOCK", "ONE_BLOCK"):
        monkeypatch.setattr(linear_terms, most, 256 * (shape[0] * 2 + 4 * shape[1]))
    hidden, weight, tokens = given(*shape, "bfloat16", factor=4)
    tokens[7:9] = NO_ROW
    rng, head = np.random.default_rng(0), LogProbHead(shape[3], None, None, "default")
    logits = jnp.float32(hidden) @ (jnp.float32(weight) if shape[3] else jnp.float32(weight).T)
    inverse = 1 / temperatures(len(tokens)) if is_scaled else np.ones(len(tokens), np.float32)
    m = np.array(logits.max(1))
    operands = {"m": m, "d": np.exp(inverse[:, None] * (logits - m[:, None])).sum(1), "a": rng.standard_normal(len(m))}
    operands |= {"b": rng.standard_normal((len(m), 1))} | ({"e": rng.standard_normal(len(m))} if has_entropy else {})
    for name in ("a", "b", "e") if has_entropy else ("a", "b"):
        operands[name][tokens == NO_ROW] = 0
    operands |= {"scale": inverse} if is_scaled else {}
    operands = {name: jnp.float32(array) for name, array in operands.items()}
    operands |= {"hidden": hidden, "weight": weight, "labels": jnp.asarray(np.where(tokens < shape[2], tokens, -1))[:, None]}

    def run(operands):
        problem_of = functools.partial(plans.linear_problem_of, head, wrt=("hidden", "weight"))
        return plans.run(problem_of, operands, replace(HOPPER, multiprocessors=2))

    found = kernels.interpreted(run, operands)
    expected = linear_terms.gradients(head=head, wrt=("hidden", "weight"), **dict.fromkeys(("bias", "scale", "e")) | operands)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == b.shape
        assert a.dtype == b.dtype
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= 0.002 * np.linalg.norm(np.float64(b))


def test_interpreted_gradients_of_several_parts_of_rows_in_a_block(monkeypatch):
    """Rows that fill up the last part have the scale 0, whose exponents must not become NaN in the gradient of the weight."""
    monkeypatch.setattr(linear_terms, "ONE_BLOCK", 128 * 320 * 2)
    hidden, weight, tokens = given(130, 64, 320, 1, "bfloat16")
    tokens = np.clip(tokens, 0, 319)
    scale, x = 1 / temperatures(130), np.float64(hidden) @ np.float64(weight)
    numbers = state_and_numbers(x, tokens, None, scale)
    operands = {"hidden": hidden, "weight": weight, "labels": tokens[:, None], "scale": scale} | numbers

    def run(operands):
        problem_of = functools.partial(plans.linear_problem_of, LogProbHead(1, None, None, "default"), wrt=("hidden", "weight"))
        return plans.run(problem_of, operands, replace(HOPPER, multiprocessors=2))

    found = kernels.interpreted(run, jax.tree.map(jnp.asarray, operands))
    expected = gradients_in_float64(hidden, weight, x, tokens, None, scale, **numbers)
    for name, gradient in zip(("hidden", "weight"), found, strict=True):
        assert np.linalg.norm(np.float64(gradient) - expected[name]) <= 0.004 * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize(
    ("shape", "dtype", "weight_dtype", "multiprocessors"),
    [
        ((256, 192, 832, 1), "bfloat16", None, 2),
        ((100, 512, 704, 0), "float16", None, 4),
        pytest.param((250, 128, 832, 0), "bfloat16", "float32", 2, marks=pytest.mark.slow),
        pytest.param((250, 128, 832, 1), "bfloat16", None, 1, marks=pytest.mark.slow),
    ],
    ids=cases.ident,
)
def test_interpreted_products_in_place_are_right(shape, dtype, weight_dtype, multiprocessors, monkeypatch):
    """In blocks of one tile. XLA multiplies by the weight if that makes few tiles, as in the second case."""
    monkeypatch.setattr(linear_terms, "LEAST_CLASSES", 256)
    for most in ("BLOCK", "ONE_BLOCK"):
        monkeypatch.setattr(linear_terms, most, 256 * 2 * linear_loss.rows_in_tiles(shape[0]))
    hidden, weight, tokens = given(*shape, dtype, factor=4)
    weight, scale, bias = weight.astype(weight_dtype or dtype), 1 / temperatures(shape[0]), bias_of(shape[2], True)
    tokens = np.where(tokens < shape[2], tokens, -1)
    tokens[bias[tokens] < LEFT_OUT] = 2  # else the derivative by the scale is infinite
    tokens[7:9] = NO_ROW
    of_class = weight if shape[3] else weight.T
    x = np.float64(hidden) @ np.float64(of_class) + np.float64(bias)
    numbers, wrt = state_and_numbers(x, tokens, None, scale), ("hidden", "weight", "bias", "scale")
    operands = {"hidden": hidden, "weight": weight, "labels": tokens[:, None], "scale": scale, "bias": bias} | numbers
    problem = plans.linear_problem_of(LogProbHead(shape[3], None, None, "default"), jax.tree.map(jax.typeof, operands), wrt=wrt)
    plan = plans.plan_of(problem, replace(HOPPER, multiprocessors=multiprocessors))
    assert plan.classes == 256
    found = kernels.interpreted(lambda operands: plan.run(**operands), jax.tree.map(jnp.asarray, operands))
    expected = gradients_in_float64(hidden, of_class, x, tokens, None, scale, **numbers)
    expected["weight"] = expected["weight"] if shape[3] else expected["weight"].T
    for name, gradient in zip(wrt, found, strict=True):
        assert gradient.dtype == operands[name].dtype
        most = 1e-5 if name == "scale" else 0.004
        assert np.linalg.norm(np.float64(gradient) - expected[name]) <= most * np.linalg.norm(expected[name]), name


@pytest.mark.parametrize(
    ("shape", "classes"),
    [
        ((8192, 4096, 128256, 1), 19968),
        ((8192, 4096, 128256, 0), 19968),
        ((16384, 4096, 151936, 1), 8448),
        ((8192, 2048, 32000, 1), None),  # one block
        ((5000, 3072, 50257, 1), None),  # not aligned
        ((8192, 4096, 128264, 0), None),  # likewise
        ((8192, 64, 128256, 1), None),  # few tiles
        ((65536, 1024, 32000, 1), None),  # the rows of a block are in parts
    ],
    ids=cases.ident,
)
def test_blocks_that_are_multiplied_in_place(shape, classes):
    arrays, head = types(*shape, "bfloat16"), LogProbHead(shape[3], None, None, "default")
    operands = dict(zip(("hidden", "weight", "labels"), arrays, strict=True))
    operands["labels"] = jax.ShapeDtypeStruct((shape[0], 1), jnp.int32)
    of_rows = {name: jax.ShapeDtypeStruct(shape[:1], jnp.float32) for name in "mda"}
    plan = plans.plan_of(plans.linear_problem_of(head, operands | of_rows, wrt=("hidden", "weight")))
    assert plan.classes == classes

    def loss(hidden, weight):
        return jnp.sum(jaxsoftmax.linear_log_probs(hidden, weight, jnp.zeros(shape[0], int), class_axis=shape[3]))

    lowered = jax.jit(jax.grad(loss, (0, 1))).trace(*arrays[:2]).lower(lowering_platforms=("cuda",)).as_text()
    names = set(kernels.kernel_names(lowered))
    in_place = {"unwritten_mosaic", "linear_weight_gradient_mosaic", "linear_hidden_gradient_mosaic"}
    assert names >= {LOG_PROBS, GRADIENT} | (in_place if classes else set())
    # Neither the weight nor its gradient is copied.
    copies = re.findall(rf"dynamic_(?:update_)?slice.*tensor<(?:{shape[1]}x\d+|\d+x{shape[1]})x", lowered)
    assert not classes or not copies


def state_and_numbers(x, tokens, cap, scale, *, has_entropy=True):
    """Returns the state of rows of logits in float64, and numbers that multiply derivatives, 0 in rows that do not count."""
    s = x if cap is None else cap * np.tanh(x / cap)
    m = np.float32(s.max(1))
    m = np.where(np.isfinite(m), m, 0)
    rng = np.random.default_rng(0)
    numbers = {"m": m, "d": np.exp(scale[:, None] * (s - m[:, None])).sum(1), "a": rng.standard_normal(len(m))}
    numbers |= {"b": rng.standard_normal((len(m), 1))} | ({"e": rng.standard_normal(len(m))} if has_entropy else {})
    for name in numbers.keys() - {"m", "d"}:
        numbers[name][tokens == NO_ROW] = 0
    return {name: np.float32(number) for name, number in numbers.items()}


def gradients_in_float64(hidden, weight, x, tokens, cap, scale, m, d, a, b, e=None):
    """Computes the derivatives of `linear_log_probs_vjp` at logits `x`; `weight` has the classes along its last axis."""
    bent = x if cap is None else cap * np.tanh(x / cap)
    z = np.maximum(scale[:, None] * (bent - np.float64(m)[:, None]), -700)
    counts = (tokens != NO_ROW) & (d > 0)
    p = np.where(counts[:, None], np.exp(np.where(counts[:, None], z, 0)) / np.where(d > 0, d, 1)[:, None], 0)
    p = np.where(bent == -np.inf, 0, p)
    factor = a[:, None] + (0 if e is None else np.float64(e)[:, None] * z)
    total = p * factor + b * (np.arange(x.shape[1]) == tokens[:, None])
    of_scale = np.where(total != 0, total * np.where(total != 0, bent, 0), 0).sum(1)
    g = total * scale[:, None] * (1 if cap is None else 1 - np.tanh(x / cap) ** 2)
    return {"hidden": g @ np.float64(weight).T, "weight": np.float64(hidden).T @ g, "bias": g.sum(0), "scale": of_scale}


@pytest.mark.usefixtures("plain_functions")
@pytest.mark.parametrize(
    ("shape", "kind", "by_scale"),
    [
        pytest.param(shape, kind, by_scale, marks=cases.slow_unless((i + j + by_scale) % 4 == 0))
        for i, shape in enumerate(SHAPES)
        for j, kind in enumerate([*LAYERS, "neither"])
        for by_scale in (False, True)
        if kind != "neither" or by_scale
    ],
    ids=cases.ident,
)
def test_interpreted_gradients_with_a_bias_or_a_cap_are_right(shape, kind, by_scale, monkeypatch):
    """Differentiates by all operands, in blocks of classes. The kernel rounds the gradient of logits to 16 bits."""
    monkeypatch.setattr(linear_terms, "LEAST_CLASSES", 256)
    for most in ("BLOCK", "ONE_BLOCK"):
        monkeypatch.setattr(linear_terms, most, 256 * (shape[0] * 2 + 4 * shape[1]))
    hidden, weight, tokens = given(*shape, "bfloat16", factor=4)
    has_bias, cap = LAYERS.get(kind, (False, None))
    bias = bias_of(shape[2], has_bias)
    tokens = np.where(tokens < shape[2], tokens, -1)
    if has_bias and cap is None:  # else the derivative by the scale is infinite
        tokens[bias[tokens] < LEFT_OUT] = 2
    tokens[7:9] = NO_ROW
    scale = 1 / temperatures(len(tokens)) if by_scale else np.ones(len(tokens), np.float32)
    of_class = weight if shape[3] else weight.T
    x = np.float64(hidden) @ np.float64(of_class) + (0 if bias is None else np.float64(bias))
    numbers = state_and_numbers(x, tokens, cap, scale, has_entropy=by_scale)
    operands = {"hidden": hidden, "weight": weight, "labels": tokens[:, None]} | numbers
    operands |= ({"scale": scale} if by_scale else {}) | ({"bias": bias} if has_bias else {})
    wrt = ("hidden", "weight", *(["bias"] if has_bias else []), *(["scale"] if by_scale else []))

    def run(operands):
        problem_of = functools.partial(plans.linear_problem_of, LogProbHead(shape[3], cap, None, "default"), wrt=wrt)
        return plans.run(problem_of, operands, replace(HOPPER, multiprocessors=2))

    found = dict(zip(wrt, kernels.interpreted(run, {name: jnp.asarray(each) for name, each in operands.items()}), strict=True))
    expected = gradients_in_float64(hidden, of_class, x, tokens, cap, scale, **numbers)
    found["weight"] = found["weight"] if shape[3] else found["weight"].T
    for name, gradient in found.items():
        assert np.all(np.isfinite(np.float64(gradient))), name
        most = 1e-5 if name == "scale" else 0.004
        assert np.linalg.norm(np.float64(gradient) - expected[name]) <= most * np.linalg.norm(expected[name]), name
    if has_bias and cap is None:
        np.testing.assert_array_equal(np.float64(found["weight"])[:, bias < LEFT_OUT], 0)
        np.testing.assert_array_equal(found["bias"][bias < LEFT_OUT], 0)


@pytest.mark.parametrize("size", [200, -200])
def test_interpreted_gradients_of_rows_that_do_not_count_are_0(size):
    """Exponentials of a bias overflow in a row that does not count, or those of zeros beyond the last class in all others."""
    hidden, weight, tokens = given(128, 64, 300, 1, "bfloat16")
    tokens[5:9] = NO_ROW
    hidden = hidden.at[5:9].set(0)
    bias = np.full(300, size, np.float32)
    x = np.float64(hidden) @ np.float64(weight) + bias
    numbers = state_and_numbers(x, tokens, None, np.ones(128, np.float32))
    for name in "mde":
        numbers[name][5:9] = 0
    for name in "abe":
        numbers[name][20] = 0
    operands = {"hidden": hidden, "weight": weight, "labels": tokens[:, None], "bias": bias, "scale": np.ones(128, np.float32)}

    def run(operands):
        problem_of = functools.partial(plans.linear_problem_of, LogProbHead(1, None, None, "default"), wrt=("hidden", "scale"))
        return plans.run(problem_of, operands, replace(HOPPER, multiprocessors=2))

    of_hidden, of_scale = kernels.interpreted(run, jax.tree.map(jnp.asarray, operands | numbers))
    for gradient in (np.float64(of_hidden), np.float64(of_scale)):
        assert np.all(np.isfinite(gradient))
        np.testing.assert_array_equal(gradient[[5, 6, 7, 8, 20]], 0)
        assert np.all(np.any(np.delete(gradient.reshape(128, -1), [5, 6, 7, 8, 20], 0), 1))


@pytest.mark.parametrize("shape", cases.every_other(SHAPES), ids=cases.ident)
def test_gradients_of_log_probs_are_lowered(shape):
    def loss(hidden, weight, tokens):
        return sum(map(jnp.sum, jaxsoftmax.linear_log_probs(hidden, weight, tokens, class_axis=shape[3], return_entropy=True)))

    kernels.lowered_for_cuda(jax.grad(loss, (0, 1)), *types(*shape, "bfloat16"), kernels=[LOG_PROBS, GRADIENT])


@pytest.mark.parametrize("kind", [*LAYERS, "neither"])
def test_a_bias_a_cap_and_the_gradient_by_the_temperature_take_the_kernels(kind):
    has_bias, cap = LAYERS.get(kind, (False, None))

    def loss(hidden, weight, temperature, bias, tokens):
        options = {"temperature": temperature, "bias": bias if has_bias else None, "logits_soft_cap": cap}
        return sum(map(jnp.sum, jaxsoftmax.linear_log_probs(hidden, weight, tokens, return_entropy=True, **options)))

    hidden, weight, tokens = types(200, 128, 576, 1, "bfloat16")
    temperature, bias = jax.ShapeDtypeStruct((200,), np.float32), jax.ShapeDtypeStruct((576,), np.float32)
    by = (0, 1, 2, 3) if has_bias else (0, 1, 2)
    arrays = hidden, weight, temperature, bias, tokens
    kernels.lowered_for_cuda(jax.grad(loss, by), *arrays, kernels=[LOG_PROBS, GRADIENT])


@pytest.mark.parametrize("is_shared", [True, False])
def test_examples_that_share_the_weight_are_rows_of_one_call_if_they_share_the_bias(is_shared):
    def f(hidden, tokens, bias, weight):
        return jaxsoftmax.linear_log_probs(hidden, weight, tokens, bias=bias, temperature=0.7)

    hidden, weight, tokens = types(128, 64, 256, 1, "bfloat16")
    hidden, tokens = (jax.ShapeDtypeStruct((3, *array.shape), array.dtype) for array in (hidden, tokens))
    bias = jax.ShapeDtypeStruct((256,) if is_shared else (3, 256), np.float32)
    arrays, mapped = (hidden, tokens, bias, weight), jax.vmap(f, (0, 0, None if is_shared else 0, None))
    if is_shared:
        kernels.lowered_for_cuda(mapped, *arrays, kernels=[LOG_PROBS])
    else:
        decision = jaxsoftmax.explain(mapped, *arrays, platform="cuda")[0]
        assert "the examples of a batch must share the bias" in decision.refusals[0][1]


def test_tokens_beside_each_other_have_their_logits_made_part_by_part():
    hidden, weight, _ = types(128, 64, 256, 1, "bfloat16")
    tokens = jax.ShapeDtypeStruct((128, 2), np.int32)
    outer, inner = jaxsoftmax.explain(jaxsoftmax.linear_log_probs, hidden, weight, tokens, platform="cuda")
    assert (outer.primitive, outer.implementation, inner.primitive) == ("linear_log_probs", "xla", "cross_entropy")


@pytest.mark.parametrize("shape", cases.every_other(SHAPES), ids=cases.ident)
def test_log_probs_are_lowered(shape):
    f = functools.partial(jaxsoftmax.linear_log_probs, class_axis=shape[3], temperature=0.7, return_entropy=True)
    kernels.lowered_for_cuda(f, *types(*shape, "bfloat16"), kernels=[LOG_PROBS])


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=cases.ident)
def test_native_log_probs(shape, dtype, is_scaled):
    arrays = given(*shape, dtype, 4)
    temperature = temperatures(shape[0]) if is_scaled else None
    options = {"class_axis": shape[3], "return_entropy": True, "return_lse": True}

    @jax.jit
    def f(*arrays):
        return jaxsoftmax.linear_log_probs(
            *arrays, temperature=None if temperature is None else jnp.asarray(temperature), **options
        )

    found = f(*arrays)
    check_log_probs(found, arrays, shape[3], temperature)
    assert [np.asarray(each).tobytes() for each in found] == [np.asarray(each).tobytes() for each in f(*arrays)]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", LAYERS)
@pytest.mark.parametrize("is_scaled", [True, False])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=cases.ident)
def test_native_log_probs_with_a_bias_or_a_cap(shape, dtype, is_scaled, kind):
    arrays = given(*shape, dtype, 4)
    has_bias, cap = LAYERS[kind]
    bias, temperature = bias_of(shape[2], has_bias), temperatures(shape[0]) if is_scaled else None
    options = {"class_axis": shape[3], "logits_soft_cap": cap, "return_entropy": True, "return_lse": True}
    options |= {"bias": bias, "temperature": None if temperature is None else jnp.asarray(temperature)}
    f = jax.jit(functools.partial(jaxsoftmax.linear_log_probs, **options))
    cases.assert_ran("mosaic", f, *arrays)
    found = f(*arrays)
    check_log_probs(found, arrays, shape[3], temperature, bias, cap)
    assert [np.asarray(each).tobytes() for each in found] == [np.asarray(each).tobytes() for each in f(*arrays)]


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("kind", [*LAYERS, "neither"])
@pytest.mark.parametrize("shape", [(1000, 256, 50257, 1), (3001, 128, 32000, 0), (130, 192, 264, 0)], ids=cases.ident)
def test_native_gradients_with_a_bias_or_a_cap(shape, kind):
    """Differentiates all results together, by all operands, in several blocks of classes."""
    hidden, weight, tokens = given(*shape, "bfloat16", 4)
    has_bias, cap = LAYERS.get(kind, (False, None))
    bias, tokens = bias_of(shape[2], has_bias), np.clip(tokens, 0, shape[2] - 1)
    if has_bias and cap is None:  # else results are infinite
        tokens[bias[tokens] < LEFT_OUT] = 2
    weight = weight if shape[3] == 1 else weight.T
    cotangents = np.random.default_rng(0).standard_normal((3, shape[0])).astype(np.float32)
    options = {"logits_soft_cap": cap, "return_entropy": True, "return_lse": True}

    def ours(hidden, weight, temperature, bias):
        weight = weight if shape[3] == 1 else weight.T
        more = options | {"class_axis": shape[3], "bias": bias, "temperature": temperature}
        found = jaxsoftmax.linear_log_probs(hidden, weight, tokens, **more)
        return sum(jnp.sum(c * each) for c, each in zip(cotangents, found, strict=True))

    def whole(hidden, weight, temperature, bias):
        logits = jnp.dot(hidden.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
        logits = logits if bias is None else logits + bias[None]
        found = jaxsoftmax.log_probs(logits, tokens, scale=1 / temperature, **options)
        return sum(jnp.sum(c * each) for c, each in zip(cotangents, found, strict=True))

    arrays = hidden, weight, jnp.asarray(temperatures(shape[0])), None if bias is None else jnp.asarray(bias)
    by = (0, 1, 2, 3) if has_bias else (0, 1, 2)
    cases.assert_ran("mosaic", jax.jit(jax.grad(ours, by)), *arrays)
    found, expected = (jax.jit(jax.grad(f, by))(*arrays) for f in (ours, whole))
    for a, b, most in zip(found, expected, (0.004, 0.004, 2e-4, 0.004), strict=False):
        assert np.all(np.isfinite(np.float64(a)))
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= most * np.linalg.norm(np.float64(b))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("n", [None, 3])
@pytest.mark.parametrize("weight_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(
    "shape",
    [
        *[(1000, 256, 50257, 1), (3001, 128, 32000, 0), (130, 192, 264, 0)],
        *[(8269, 256, 64064, 1), (8269, 320, 64064, 0), (4100, 4096, 128256, 1), (10240, 2560, 50304, 1)],
    ],
    ids=cases.ident,
)
def test_native_gradients_of_log_probs(shape, weight_dtype, n):
    """Of all results together, by all operands, in several blocks of classes, also by products in place."""
    hidden, weight, tokens = given(*shape, "bfloat16")
    weight = weight.astype(weight_dtype)
    tokens = np.clip(tokens, 0, shape[2] - 1)
    tokens = tokens if n is None else np.stack([tokens, tokens, np.roll(tokens, 1)], 1)
    weight = weight if shape[3] == 1 else weight.T
    cotangents = [
        np.random.default_rng(at).standard_normal(size).astype(np.float32)
        for at, size in enumerate((tokens.shape, shape[0], shape[0]))
    ]

    def total(found):
        return sum(jnp.sum(c * each) for c, each in zip(cotangents, found, strict=True))

    def ours(hidden, weight, temperature):
        weight = weight if shape[3] == 1 else weight.T
        options = {"class_axis": shape[3], "return_entropy": True, "return_lse": True}
        return total(jaxsoftmax.linear_log_probs(hidden, weight, tokens, temperature=temperature, **options))

    def whole(hidden, weight, temperature):
        logits = jnp.dot(hidden.astype(jnp.float32), weight.astype(jnp.float32), precision="highest")
        return total(jaxsoftmax.log_probs(logits, tokens, scale=1 / temperature, return_entropy=True, return_lse=True))

    arrays = hidden, weight, jnp.asarray(temperatures(shape[0]))
    found, expected = (jax.jit(jax.grad(f, (0, 1, 2)))(*arrays) for f in (ours, whole))
    for a, b, most in zip(found, expected, (0.004, 0.004, 2e-4), strict=True):
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= most * np.linalg.norm(np.float64(b))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("factor", [1, 16])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE], ids=cases.ident)
def test_native_losses(shape, dtype, factor):
    arrays = given(*shape, dtype, factor)
    f = jax.jit(functools.partial(loss, class_axis=shape[3], reduction="none", z_loss=1e-4))
    cases.assert_ran("mosaic", f, *arrays)
    found = f(*arrays)
    check(found, *arrays, shape[3], z_loss=1e-4)
    assert np.asarray(found).tobytes() == np.asarray(f(*arrays)).tobytes()


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("ignored", [slice(100, 900), slice(None)], ids=["some", "all"])
def test_native_rows_that_do_not_count(ignored):
    hidden, weight, labels = given(1000, 256, 5056, 1, "bfloat16")
    labels = np.clip(labels, 0, 5055)
    f = jax.jit(functools.partial(loss, reduction="none", ignore_index=-100))
    expected = np.array(f(hidden, weight, labels))
    expected[ignored] = labels[ignored] = -100
    found = f(hidden.at[ignored].set(np.nan), weight, labels)
    cases.assert_ran("mosaic", f, hidden, weight, labels)
    np.testing.assert_array_equal(found, np.where(labels == -100, 0, expected))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_native_gradients_made_anew():
    hidden, weight, labels = given(1000, 256, 5056, 1, "bfloat16")
    labels = np.clip(labels, 0, 5055)
    f = jax.jit(jax.value_and_grad(lambda h, w: jnp.mean(loss(h, w, labels, reduction="none") ** 2), (0, 1)))
    cases.assert_ran("mosaic", f, hidden, weight)

    def whole(h, w):
        logits = jnp.dot(h.astype(jnp.float32), w.astype(jnp.float32), precision="highest")
        return jnp.mean(jaxsoftmax.cross_entropy(logits, labels, implementation="xla") ** 2)

    expected = jax.value_and_grad(whole, (0, 1))(hidden, weight)
    for a, b in zip(jax.tree.leaves(f(hidden, weight)), jax.tree.leaves(expected), strict=True):
        difference = np.linalg.norm(np.float64(a) - np.float64(b))
        assert difference <= 0.01 * np.linalg.norm(np.float64(b))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("logits_dtype", [None, "float32"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("kind", ["classes", "probabilities"])
@pytest.mark.parametrize("shape", [(1000, 256, 50257, 1), (3001, 128, 32000, 0)], ids=cases.ident)
def test_native_results_and_gradients_of_losses(shape, kind, reduction, logits_dtype, monkeypatch):
    """The loss, the log-sum-exp and the entropy, and their gradients together, in several parts of rows."""
    monkeypatch.setattr(parts, "MOST_WITH_GRADIENT", 512 * shape[2] * 4)
    hidden, weight, labels = given(*shape, "bfloat16", 4)
    labels = np.clip(labels, 0, shape[2] - 1)
    if kind == "probabilities":
        labels = jax.nn.softmax(jax.random.normal(jax.random.key(1), (shape[0], shape[2])))
    rng = np.random.default_rng(2)
    cotangents = [np.float32(100), *(rng.standard_normal(shape[0], np.float32) for _ in range(2))]

    def total(found):
        return sum(jnp.sum(c * each) for c, each in zip(cotangents, found, strict=True)), found

    def ours(hidden, weight, temperature, labels):
        options = {"temperature": temperature, "reduction": reduction, "logits_dtype": logits_dtype, "class_axis": shape[3]}
        return total(loss(hidden, weight, labels, **options, return_lse=True, return_entropy=True))

    def whole(hidden, weight, temperature, labels):
        weight = (weight if shape[3] == 1 else weight.T).astype(jnp.float32)
        logits, scale = jnp.dot(hidden.astype(jnp.float32), weight, precision="highest"), 1 / temperature
        losses, lse = jaxsoftmax.cross_entropy(logits, labels, scale=scale, return_lse=True, implementation="xla")
        losses = losses if reduction == "none" else jnp.mean(losses)
        return total((losses, lse, jaxsoftmax.entropy(logits, scale=scale, implementation="xla")))

    arrays = hidden, weight, jnp.asarray(temperatures(shape[0])), labels
    f, truth = (jax.jit(jax.value_and_grad(f, (0, 1, 2), has_aux=True)) for f in (ours, whole))
    cases.assert_ran("mosaic", f, *arrays)
    ((_, results), gradients), ((_, expected), of_whole) = f(*arrays), truth(*arrays)
    is_rounded = logits_dtype is None and (reduction == "mean" or kind == "probabilities")
    for found, true in zip(results, expected, strict=True):
        np.testing.assert_allclose(found, true, rtol=1e-2 if is_rounded else 1e-5, atol=0.1 if is_rounded else 1e-4)
    for found, true in zip(gradients, of_whole, strict=True):
        difference = np.linalg.norm(np.float64(found) - np.float64(true))
        assert difference <= (0.05 if is_rounded else 0.01) * np.linalg.norm(np.float64(true))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_mapped", [True, False], ids=["shard_map", "explicit"])
@pytest.mark.parametrize("shape", [(300, 256, 5056, 1), (1025, 128, 32000, 0)], ids=cases.ident)
def test_native_classes_that_gpus_share(shape, is_mapped):
    devices = cases.several("gpu")
    kind, class_axis = AxisType.Auto if is_mapped else AxisType.Explicit, shape[3]
    mesh = jax.make_mesh((len(devices),), ("model",), axis_types=(kind,), devices=devices)
    hidden, weight, labels = given(*shape, "bfloat16")
    options = {"class_axis": class_axis, "z_loss": 1e-4}
    c = np.random.default_rng(1).standard_normal(len(labels)).astype(np.float32)

    def gradients(of_losses, hidden, weight, labels):
        losses, pull = jax.vjp(lambda hidden, weight: of_losses(hidden, weight, labels), hidden, weight)
        return losses, *pull(c)

    of_class = P("model") if class_axis == 0 else P(None, "model")
    of_shards = functools.partial(loss, reduction="none", **options)
    if is_mapped:
        of_shards = jax.shard_map(
            functools.partial(of_shards, axis_name="model"), mesh=mesh, in_specs=(P(), of_class, P()), out_specs=P()
        )
    inside = np.clip(labels, 0, shape[2] - 1)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((hidden, P()), (weight, of_class))]
        losses = jax.jit(of_shards)
        cases.assert_ran("mosaic", losses, *placed, labels)
        check(losses(*placed, labels), hidden, weight, labels, class_axis, z_loss=1e-4)
        both = jax.jit(functools.partial(gradients, of_shards))
        found, again = both(*placed, inside), both(*placed, inside)
    assert [np.asarray(a).tobytes() for a in found] == [np.asarray(a).tobytes() for a in again]
    alone = jax.jit(functools.partial(gradients, functools.partial(loss, reduction="none", **options)))
    for a, b in zip(found, alone(hidden, weight, inside), strict=True):
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= 0.01 * np.linalg.norm(np.float64(b))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("is_mapped", [True, False], ids=["shard_map", "explicit"])
@pytest.mark.parametrize("shared", ["tokens", "classes"])
@pytest.mark.parametrize("shape", [(16640, 256, 64064, 1), (1000, 256, 50432, 0)], ids=cases.ident)
def test_native_log_probs_that_gpus_share(shape, shared, is_mapped):
    """All results and gradients, by products in place and not, are those of one GPU, and the same in every call."""
    devices = cases.several("gpu")
    kind, class_axis = AxisType.Auto if is_mapped else AxisType.Explicit, shape[3]
    mesh = jax.make_mesh((len(devices),), ("axis",), axis_types=(kind,), devices=devices)
    hidden, weight, tokens = given(*shape, "bfloat16")
    tokens = np.clip(tokens, 0, shape[2] - 1)
    cotangents = np.random.default_rng(1).standard_normal((3, len(tokens))).astype(np.float32)
    arrays = hidden, weight, tokens, temperatures(shape[0]), *cotangents

    def log_probs(hidden, weight, tokens, temperature, **options):
        options |= {"class_axis": class_axis, "return_entropy": True, "return_lse": True}
        return jaxsoftmax.linear_log_probs(hidden, weight, tokens, temperature=temperature, **options)

    def gradients(log_probs, hidden, weight, tokens, temperature, *cotangents):
        results, pull = jax.vjp(lambda h, w, t: log_probs(h, w, tokens, t), hidden, weight, temperature)
        return *results, *pull(cotangents)

    is_of_tokens = shared == "tokens"
    of_rows, of_classes = (P("axis"), P()) if is_of_tokens else (P(), P("axis") if class_axis == 0 else P(None, "axis"))
    specs = of_rows, of_classes, *[of_rows] * 5
    of_shards = log_probs
    if is_mapped:
        of_shards = log_probs if is_of_tokens else functools.partial(log_probs, axis_name="axis")
        of_shards = jax.shard_map(of_shards, mesh=mesh, in_specs=specs[:4], out_specs=(of_rows,) * 3)
    with jax.set_mesh(mesh):
        placed = [jax.device_put(array, NamedSharding(mesh, spec)) for array, spec in zip(arrays, specs, strict=True)]
        both = jax.jit(functools.partial(gradients, of_shards))
        cases.assert_ran("mosaic", both, *placed)
        found, again = both(*placed), both(*placed)
    assert [np.asarray(a).tobytes() for a in found] == [np.asarray(a).tobytes() for a in again]
    alone = jax.jit(functools.partial(gradients, log_probs))(*map(jnp.asarray, arrays))
    for a, b, most in zip(found, alone, (1e-5, 1e-5, 1e-5, 0.01, 0.01, 1e-3), strict=True):
        assert np.linalg.norm(np.float64(a) - np.float64(b)) <= most * np.linalg.norm(np.float64(b))
