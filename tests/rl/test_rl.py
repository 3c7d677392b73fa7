"""Losses from log-probabilities: to formulas in float64 and to numbers that other libraries state, also where inputs hurt."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from jax.test_util import check_grads

import jaxsoftmax
from jaxsoftmax import rl

from ..support.meshes import make_mesh

# A loss is a sum of some dozens of terms of at most 10. A term errs by a few roundings of float32.
CLOSE = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
# Central differences in float64 err by the third derivative times the square of this step, and by 2^-53 over it.
STEP = 1e-5
AS_DIFFERENCES = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-8)
SHAPE = (3, 2, 5)
RNG = np.random.default_rng(0)
MASK = np.arange(5) < np.array([[5, 3], [1, 0], [4, 5]])[..., None]  # one sequence has no tokens


def log_probabilities(shape=SHAPE, dtype=np.float32):
    return np.log(RNG.uniform(0.05, 1, shape)).astype(dtype)


def log_sigmoid(x):
    return -np.logaddexp(0, -x)


def policy_truth(
    log_p,
    old_log_p,
    advantages,
    clip=0.2,
    reference_log_p=None,
    kl_weight=0,
    entropy=None,
    entropy_weight=0,
    where=None,
    reduction="token",
):
    """Returns the loss as the papers write it, token by token."""
    low, high = clip if isinstance(clip, tuple) else (clip, clip)
    advantages = np.broadcast_to(advantages if np.ndim(advantages) == log_p.ndim else advantages[..., None], log_p.shape)
    losses, counted = (
        np.zeros(log_p.shape),
        np.ones(log_p.shape, bool) if where is None else np.broadcast_to(where, log_p.shape),
    )
    for i in zip(*np.nonzero(counted), strict=True):
        ratio = np.exp(log_p[i] - old_log_p[i])
        losses[i] = -min(ratio * advantages[i], min(max(ratio, 1 - low), 1 + high) * advantages[i])
        if reference_log_p is not None:
            losses[i] += kl_weight * (np.exp(reference_log_p[i] - log_p[i]) - (reference_log_p[i] - log_p[i]) - 1)
        if entropy is not None:
            losses[i] -= entropy_weight * entropy[i]
    if reduction == "none":
        return losses
    if reduction == "token":
        return losses.sum() / max(counted.sum(), 1)
    means = [row[there].mean() for row, there in zip(losses.reshape(-1, 5), counted.reshape(-1, 5), strict=True) if there.any()]
    return np.mean(means) if means else 0.0


def mean_truth(log_p, where):
    return (log_p * where).sum(-1) / np.maximum(where.sum(-1), 1)


def dpo_truth(chosen, rejected, reference_chosen, reference_rejected, beta=0.1, label_smoothing=0.0, *, wheres):
    z = ((chosen - reference_chosen) * wheres[0]).sum(-1) - ((rejected - reference_rejected) * wheres[1]).sum(-1)
    return -(1 - label_smoothing) * log_sigmoid(beta * z) - label_smoothing * log_sigmoid(-beta * z)


def simpo_truth(chosen, rejected, beta=2.0, gamma=1.0, *, wheres):
    return -log_sigmoid(beta * (mean_truth(chosen, wheres[0]) - mean_truth(rejected, wheres[1])) - gamma)


def orpo_truth(chosen, rejected, odds_weight=0.1, *, wheres):
    c, r = mean_truth(chosen, wheres[0]), mean_truth(rejected, wheres[1])
    odds = [np.exp(mean) / -np.expm1(mean) for mean in (c, r)]
    return -c - odds_weight * log_sigmoid(np.log(odds[0]) - np.log(odds[1]))


def differences(f, x):
    """Returns the gradient of a scalar function of float64 by central differences."""
    gradient = np.zeros(x.shape)
    for i in np.ndindex(x.shape):
        step = np.zeros(x.shape)
        step[i] = STEP
        gradient[i] = (f(x + step) - f(x - step)) / (2 * STEP)
    return gradient


def check(f, truth, arrays, n):
    """Holds a loss and its gradients by the first `n` arrays to the truth, in float32 and in float64."""
    f, weights = jax.jit(f), RNG.normal(size=np.shape(truth(*arrays)))
    wide = [array.astype(np.float64) for array in arrays]
    expected = truth(*wide)
    gradients = [differences(lambda x, i=i: np.sum(truth(*wide[:i], x, *wide[i + 1 :]) * weights), wide[i]) for i in range(n)]
    for enabled, used, close in ((False, arrays, CLOSE), (True, wide, AS_DIFFERENCES)):
        with jax.enable_x64(enabled):
            value, pull = jax.vjp(f, *used)
            assert value.dtype == used[0].dtype
            close(value, expected, **({"rtol": 1e-13, "atol": 1e-13} if enabled else {}))
            for ours, theirs in zip(pull(jnp.asarray(weights, value.dtype))[:n], gradients, strict=True):
                close(ours, theirs)


@pytest.mark.parametrize("where", [None, MASK, MASK[0, 1]], ids=["all", "mask", "positions"])
@pytest.mark.parametrize("reduction", ["token", "sequence", "none"])
@pytest.mark.parametrize(
    ("clip", "terms", "of_tokens"),
    [(0.2, "", False), ((0.2, 0.28), "kl", True), (math.inf, "entropy", False), ((1.5, 0.0), "kl entropy", True)],
)
def test_policy_gradient_loss_and_its_gradients(clip, terms, of_tokens, reduction, where):
    log_p, old_log_p, reference_log_p, entropy = (log_probabilities() for _ in range(4))
    advantages = RNG.normal(size=SHAPE if of_tokens else SHAPE[:-1]).astype(np.float32)
    options = {"clip": clip, "where": where, "reduction": reduction}
    options |= {"kl_weight": 0.3} if "kl" in terms else {}
    options |= {"entropy_weight": 0.2} if "entropy" in terms else {}

    def call(function, log_p, entropy, old_log_p, reference_log_p, advantages):
        arrays = {"reference_log_p": reference_log_p} if "kl" in terms else {}
        arrays |= {"entropy": entropy} if "entropy" in terms else {}
        return function(log_p, old_log_p, advantages, **arrays, **options)

    arrays = [log_p, entropy, old_log_p, reference_log_p, advantages]
    ours, truth = functools.partial(call, rl.policy_gradient_loss), functools.partial(call, policy_truth)
    check(ours, truth, arrays, 2)
    gradients = jax.grad(lambda *arrays: jnp.sum(ours(*arrays)), (2, 3, 4))(*arrays)
    assert not any(np.any(gradient) for gradient in gradients)  # they count as constants


@pytest.mark.parametrize("smoothing", [0, 0.1])
def test_dpo_loss_and_its_gradients(smoothing):
    arrays = [log_probabilities(shape) for shape in (SHAPE, (3, 2, 4)) * 2]
    wheres = MASK, MASK[..., :4]
    options = {"beta": 0.3, "label_smoothing": smoothing}
    ours = functools.partial(rl.dpo_loss, chosen_where=wheres[0], rejected_where=wheres[1], **options)
    check(ours, functools.partial(dpo_truth, wheres=wheres, **options), arrays, 2)
    gradients = jax.grad(lambda *arrays: jnp.sum(ours(*arrays)), (2, 3))(*arrays)
    assert not any(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize(
    ("ours", "truth", "options"),
    [
        (rl.simpo_loss, simpo_truth, {}),
        (rl.simpo_loss, simpo_truth, {"beta": 2.5, "gamma": 0.3}),
        (rl.orpo_loss, orpo_truth, {}),
        (rl.orpo_loss, orpo_truth, {"odds_weight": 0.7}),
    ],
)
def test_losses_of_means_and_their_gradients(ours, truth, options):
    arrays, wheres = [log_probabilities(), log_probabilities((3, 2, 4))], (MASK, MASK[..., :4] | (np.arange(4) < 1))
    wheres = wheres[0] | (np.arange(5) < 1), wheres[1]  # the odds of no tokens are infinite
    ours = functools.partial(ours, chosen_where=wheres[0], rejected_where=wheres[1], **options)
    check(ours, functools.partial(truth, wheres=wheres, **options), arrays, 2)


@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("eps", [1e-4, 0])
def test_group_advantages(eps, axis):
    rewards = RNG.normal(100, 1, (4, 6)).astype(np.float32)
    wide = rewards.astype(np.float64)
    deviation = wide - wide.mean(axis, keepdims=True)
    CLOSE(rl.group_advantages(rewards, axis=axis, normalize=False), deviation)
    CLOSE(rl.group_advantages(rewards, axis=axis, eps=eps), deviation / (wide.std(axis, ddof=1, keepdims=True) + eps))
    with jax.enable_x64(True):
        ours = rl.group_advantages(wide, axis=axis, normalize=False)
        assert ours.dtype == np.float64
        np.testing.assert_allclose(ours, deviation, atol=1e-13)


@pytest.mark.parametrize("eps", [1e-4, 0])
@pytest.mark.parametrize("shape", [(3, 7), (3, 1), (3, 0)])
def test_equal_rewards_have_no_advantage(shape, eps):
    rewards = np.broadcast_to(np.array([[0.1], [-3.3], [1e30]], np.float32), shape)  # no mean of 7 of them is exact
    for normalize in (True, False):
        np.testing.assert_array_equal(rl.group_advantages(rewards, normalize=normalize, eps=eps), np.zeros(shape))


# What other libraries state


def test_the_numbers_of_rlax():
    """Compares with the test of `clipped_surrogate_pg_loss`, for a batch of two."""
    logits = jnp.array([[1.0, 1, 1], [2, 0, 0], [-1, -2, -3]])
    old_logits = jnp.array([[1.0, 1, 1], [2, 0, 0], [-3, -2, -1]])
    log_p, old_log_p = (jaxsoftmax.log_probs(x, jnp.arange(3))[None] for x in (logits, old_logits))
    for sign, expected in ((1, -0.17117467), (-1, 0.19333333)):
        ours = rl.policy_gradient_loss(log_p, old_log_p, sign * jnp.array([[0.3, 0.2, 0.1]]))
        np.testing.assert_allclose(ours, expected, atol=1e-5)  # the first one should be -0.1711778


@pytest.mark.parametrize(("smoothing", "expected"), [(0, 0.753059), (0.3, 0.925447)])
def test_the_numbers_of_tunix_for_dpo(smoothing, expected):
    rng = np.random.RandomState(0)
    log_p, reference = (rng.normal(0, 5, size=(8, 4)).astype(np.float32) for _ in range(2))
    ours = rl.dpo_loss(log_p[:4], log_p[4:], reference[:4], reference[4:], label_smoothing=smoothing)
    np.testing.assert_allclose(ours.mean(), expected, atol=1e-5)
    sums = [array.sum(-1, keepdims=True) for array in (log_p[:4], log_p[4:], reference[:4], reference[4:])]
    np.testing.assert_allclose(rl.dpo_loss(*sums, label_smoothing=smoothing).mean(), expected, atol=1e-5)


def test_the_numbers_of_tunix_for_orpo():
    log_p = -np.abs(np.random.RandomState(0).rand(8, 4)).astype(np.float32)
    where = np.arange(4) < np.array([2, 3, 4, 1])[:, None]
    ours = rl.orpo_loss(log_p[:4], log_p[4:], chosen_where=where, rejected_where=where)
    likelihood = rl.orpo_loss(log_p[:4], log_p[4:], odds_weight=0, chosen_where=where, rejected_where=where)
    np.testing.assert_allclose(ours.mean(), 0.671129, atol=1e-5)
    np.testing.assert_allclose(likelihood.mean(), 0.592339, atol=1e-5)
    np.testing.assert_allclose((ours - likelihood).mean() / 0.1, 0.787900, atol=1e-5)


def test_the_numbers_of_tunix_for_grpo():
    with jax.threefry_partitionable(False):
        rewards = jax.random.uniform(jax.random.PRNGKey(0), (1, 6)).reshape(2, 3)
    expected = [[0.307498, -1.117636, 0.810138], [1.094526, -0.228671, -0.865855]]
    np.testing.assert_allclose(rl.group_advantages(rewards, eps=1e-6), expected, atol=1e-5)
    log_p, where = log_probabilities((2, 3)), np.array([[True, True, True], [True, False, False]])
    for reduction, loss in (("sequence", -2.25), ("token", -1.875)):
        ours = rl.policy_gradient_loss(log_p, None, np.array([1.5, 3.0], np.float32), where=where, reduction=reduction)
        np.testing.assert_allclose(ours, loss, rtol=1e-6)


# Where inputs hurt

LOSSES = {
    "token": (functools.partial(rl.policy_gradient_loss, kl_weight=0.1, entropy_weight=0.1), 5),
    "sequence": (functools.partial(rl.policy_gradient_loss, kl_weight=0.1, entropy_weight=0.1, reduction="sequence"), 5),
    "none": (functools.partial(rl.policy_gradient_loss, kl_weight=0.1, entropy_weight=0.1, reduction="none"), 5),
    "dpo": (rl.dpo_loss, 4),
    "smooth dpo": (functools.partial(rl.dpo_loss, label_smoothing=0.2), 4),
    "simpo": (rl.simpo_loss, 2),
    "orpo": (rl.orpo_loss, 2),
}


def called(name, arrays, where):
    """Calls a loss with all its arrays and one mask for them."""
    loss, n = LOSSES[name]
    if n == 5:
        return loss(*arrays[:3], reference_log_p=arrays[3], entropy=arrays[4], where=where)
    return loss(*arrays, chosen_where=where, rejected_where=where)


def with_gradients(name, arrays, where=None):
    value, pull = jax.vjp(lambda *arrays: called(name, arrays, where), *arrays)
    return [value, *pull(jnp.ones_like(value))]


@pytest.mark.parametrize("padding", [np.nan, np.inf, -np.inf, 3e38])
@pytest.mark.parametrize("name", LOSSES)
def test_padding_has_no_influence(name, padding):
    arrays = [log_probabilities() for _ in range(LOSSES[name][1])]
    plain = with_gradients(name, [np.where(MASK, array, np.float32(-1)) for array in arrays], MASK)
    hurt = with_gradients(name, [np.where(MASK, array, np.float32(padding)) for array in arrays], MASK)
    assert all(np.all(np.isfinite(result)) for result in hurt)
    jax.tree.map(np.testing.assert_array_equal, hurt, plain)
    assert not any(np.any(gradient[~MASK]) for gradient in hurt[1:])
    assert np.any(hurt[1][MASK])


@pytest.mark.parametrize("shape", [SHAPE, (0, 5), (2, 0)])
@pytest.mark.parametrize("name", LOSSES)
def test_without_tokens_losses_are_constants(name, shape):
    arrays = [np.full(shape, np.nan, np.float32)] * LOSSES[name][1]
    value, *gradients = with_gradients(name, arrays, np.zeros(shape, bool))
    weight = 1 if name.endswith("dpo") else 0.1
    expected = {"simpo": np.log1p(np.e), "token": 0, "sequence": 0, "none": 0}.get(name, weight * np.log(2))
    np.testing.assert_allclose(value, np.full(value.shape, expected), rtol=1e-6)
    assert not any(np.any(gradient) for gradient in gradients)


@pytest.mark.parametrize(
    ("log_ratio", "advantage", "loss", "gradient"),
    [
        (1000, 1, -1.2, 0),
        (1000, 0, 0, 0),
        (1000, -1, np.inf, np.inf),
        (-1000, 1, 0, 0),
        (-1000, 0, 0, 0),
        (-1000, -1, 0.8, 0),
        (-np.inf, 2, 0, 0),
        (-np.inf, -2, 1.6, 0),
        (0, 3, -3, -3),
        (np.nan, 1, np.nan, np.nan),
    ],
)
def test_ratios_that_overflow(log_ratio, advantage, loss, gradient):
    old_log_p = np.array([-2], np.float32)
    ours = jax.value_and_grad(rl.policy_gradient_loss)(old_log_p + np.float32(log_ratio), old_log_p, np.float32([advantage]))
    np.testing.assert_allclose(ours[0], loss, rtol=1e-6)
    np.testing.assert_allclose(ours[1], [gradient], rtol=1e-6)


def test_a_ratio_without_bounds_does_not_meet_an_advantage_of_0():
    ours = jax.value_and_grad(rl.policy_gradient_loss)(*(np.array([x], np.float32) for x in (-1, -1e4, 0)), clip=math.inf)
    assert ours == (0, 0)


def test_the_divergence_of_policies_that_are_near():
    """exp(d) - d - 1 cancels to nothing in float32 there, and the square of d does not."""
    d = np.array([1e-3, -1e-3, 3e-4, 1e-2], np.float32)
    ours = rl.policy_gradient_loss(-d, -d, 0 * d, reference_log_p=0 * d, kl_weight=1.0, reduction="none")
    np.testing.assert_allclose(ours, np.expm1(d.astype(np.float64)) - d, rtol=4 * 2**-24 / 3e-4)


@pytest.mark.parametrize("rejected", [-1e-30, -1e-7, -1e-3, -1.0, -30.0, -1e4])
@pytest.mark.parametrize("chosen", [-1e-30, -1e-7, -1e-3, -1.0, -30.0, -1e4])
def test_odds_near_certainty_and_far_from_it(chosen, rejected):
    c, r = (np.float64(np.float32(x)) for x in (chosen, rejected))
    u, v, larger = -np.expm1(c), -np.expm1(r), max(c, r)
    lost, won = np.exp(r - larger) * u, np.exp(c - larger) * v  # the loss is log(1 + lost / won)
    value, gradients = jax.value_and_grad(lambda c, r: rl.orpo_loss(c[None], r[None], odds_weight=1.0), (0, 1))(
        np.float32(chosen), np.float32(rejected)
    )
    log_odds = c - r + np.log(v) - np.log(u)
    np.testing.assert_allclose(value, -c + np.logaddexp(0, -log_odds), rtol=1e-5)
    # A log-odds of up to 1e4 is rounded to 2^-11, which is relative in the gradient.
    rtol = 1e-5 + 2.0**-23 * max(-c, -r)
    np.testing.assert_allclose(gradients[0], -1 - np.exp(r - larger) / (lost + won), rtol=rtol)
    np.testing.assert_allclose(gradients[1], lost / (lost + won) / v, rtol=rtol, atol=1e-37)


@pytest.mark.parametrize(("chosen", "rejected"), [(0, -1), (-1, 0), (0, 0)])
def test_the_odds_of_certainty_are_finite(chosen, rejected):
    loss = jax.value_and_grad(lambda c, r: rl.orpo_loss(c[None], r[None]), (0, 1))
    value, (of_chosen, of_rejected) = loss(np.float32(chosen), np.float32(rejected))
    assert np.isfinite(value)
    assert np.isfinite(of_chosen)
    assert of_rejected == 0 or (rejected == -1 and 0 < of_rejected < 1)
    assert chosen == -1 or of_chosen == -1


# Dtypes, transformations, devices


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("name", LOSSES)
def test_narrow_arrays_are_widened(name, dtype):
    arrays = [jnp.asarray(log_probabilities(), dtype) for _ in range(LOSSES[name][1])]
    value, *gradients = with_gradients(name, arrays)
    wide, *wide_gradients = with_gradients(name, [array.astype(jnp.float32) for array in arrays])
    assert value.dtype == np.float32
    np.testing.assert_array_equal(value, wide)
    for ours, theirs in zip(gradients, wide_gradients, strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(dtype))


@pytest.mark.parametrize("name", LOSSES)
def test_vmap_is_a_loop(name):
    arrays = [log_probabilities() for _ in range(LOSSES[name][1])]
    ours = jax.jit(jax.vmap(lambda where, *arrays: with_gradients(name, arrays, where)))(MASK, *arrays)
    for i in range(SHAPE[0]):
        expected = with_gradients(name, [array[i] for array in arrays], MASK[i])
        jax.tree.map(lambda a, b, i=i: CLOSE(a[i], b), list(ours), expected)


@pytest.mark.parametrize("name", LOSSES)
def test_second_derivatives_by_check_grads(name):
    with jax.enable_x64(True):
        arrays = [log_probabilities((2, 3), np.float64) for _ in range(LOSSES[name][1])]
        check_grads(lambda log_p: called(name, [log_p, *arrays[1:]], None), (arrays[0],), order=2)


@pytest.mark.parametrize("name", [*LOSSES, "group_advantages"])
def test_exports_of_symbolic_shapes(name):
    f = functools.partial(called, name) if name in LOSSES else lambda arrays, where: rl.group_advantages(arrays[0])
    arrays, where = [log_probabilities((3, 4)) for _ in range(LOSSES.get(name, (None, 1))[1])], MASK[:, 0, :4]
    symbolic = jax.ShapeDtypeStruct(jax.export.symbolic_shape("a, b"), np.float32)
    exported = jax.export.export(jax.jit(f))([symbolic] * len(arrays), jax.ShapeDtypeStruct(symbolic.shape, np.bool_))
    CLOSE(exported.call(arrays, where), f(arrays, where))


@pytest.mark.parametrize(
    ("name", "weights"),
    [
        ("token", {"kl_weight": 0.3, "entropy_weight": 0.2}),
        ("dpo", {"beta": 0.3}),
        ("simpo", {"beta": 0.3, "gamma": 0.2}),
        ("orpo", {"odds_weight": 0.3}),
    ],
)
def test_weights_may_be_traced(name, weights, monkeypatch):
    arrays, loss = [log_probabilities() for _ in range(LOSSES[name][1])], LOSSES[name]

    def run(**weights):
        monkeypatch.setitem(LOSSES, name, (functools.partial(loss[0], **weights), loss[1]))
        return called(name, arrays, MASK)

    CLOSE(jax.jit(run)(**weights), run(**weights))
    for weight in weights:
        ours = jax.jacfwd(lambda value, weight=weight: run(**weights | {weight: value}))(weights[weight])
        step = run(**weights | {weight: weights[weight] + 0.01}) - run(**weights | {weight: weights[weight] - 0.01})
        np.testing.assert_allclose(ours, step / 0.02, rtol=1e-2, atol=1e-4)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
@pytest.mark.parametrize("name", LOSSES)
def test_sharded_arrays(name, kind):
    shape = (4, 2, 6)
    arrays, where = [log_probabilities(shape) for _ in range(LOSSES[name][1])], RNG.random(shape) < 0.7
    expected = with_gradients(name, arrays, where)
    mesh = make_mesh(kind, (2, 2), ("x", "y"))
    with jax.set_mesh(mesh):
        sharded = [jax.device_put(array, NamedSharding(mesh, P("x", None, "y"))) for array in arrays]
        jax.tree.map(CLOSE, jax.jit(lambda *arrays: with_gradients(name, arrays, where))(*sharded), expected)


@pytest.mark.parametrize("kind", [AxisType.Explicit, AxisType.Auto])
def test_groups_that_devices_share(kind):
    rewards = log_probabilities((3, 8))
    mesh = make_mesh(kind, (4,), ("x",))
    with jax.set_mesh(mesh):
        CLOSE(rl.group_advantages(jax.device_put(rewards, NamedSharding(mesh, P(None, "x")))), rl.group_advantages(rewards))


# Wrong arguments

X = np.zeros((2, 3), np.float32)
ROWS = np.zeros(2, np.float32)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: rl.policy_gradient_loss(ROWS[0], None, ROWS[0]), r"log_p must have an axis of tokens, got shape \(\)"),
        (lambda: rl.policy_gradient_loss(X, X[:1], ROWS), r"old_log_p must have the shape \(2, 3\) of log_p, got \(1, 3\)"),
        (lambda: rl.policy_gradient_loss(X, None, X[0]), r"advantages must have the shape \(2, 3\) of log_p, or.* got \(3,\)"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, entropy=ROWS), r"entropy must have the shape .* got \(2,\)"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, where=np.ones(2, bool)), r"where must broadcast to .*, got \(2,\)"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, where=X), "where must be boolean, got float32"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, clip=-0.1), "clip must not be negative, got -0.1"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, clip=(0.1, -0.1)), r"clip must not be negative, got \(0.1, -0.1\)"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, clip=(0.1, 0.2, 0.3)), "clip must be a number or a pair of them"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, clip=math.nan), "clip must not be negative, got nan"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, kl_weight=0.1), "kl_weight must be 0 without reference_log_p, got 0.1"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, entropy_weight=1), "entropy_weight must be 0 without entropy, got 1"),
        (lambda: rl.policy_gradient_loss(X, None, ROWS, reduction="mean"), "reduction must be 'token', 'sequence' or 'none'"),
        (lambda: rl.group_advantages(np.zeros((2, 3), complex)), "rewards must be real, got complex"),
        (lambda: rl.group_advantages(X, axis=2), r"axis must be an axis of rewards of shape \(2, 3\), got 2"),
        (lambda: rl.group_advantages(X, eps=-1), "eps must not be negative, got -1.0"),
        (lambda: rl.dpo_loss(X, X, X, X[:, :2]), r"reference_rejected_log_p must have the shape \(2, 3\) of rejected_log_p"),
        (lambda: rl.dpo_loss(X, X, X, X, label_smoothing=1.5), "label_smoothing must be from 0 to 1, got 1.5"),
        (lambda: rl.simpo_loss(X, X[:1]), r"rejected_log_p must have the shape \(2,\) of chosen_log_p, except .* got \(1, 3\)"),
        (lambda: rl.simpo_loss(X, X, rejected_where=np.ones(2, bool)), r"rejected_where must broadcast to .* got \(2,\)"),
        (lambda: rl.orpo_loss(X, X, odds_weight=ROWS), "odds_weight must be a real number, got an array"),
        (lambda: jax.vmap(lambda w: rl.orpo_loss(X, X, odds_weight=w))(X), "odds_weight must be a real number, got a traced"),
    ],
)
def test_errors_name_the_argument_and_say_what_is_allowed(call, message):
    with pytest.raises((TypeError, ValueError), match=rf"^(\w+_loss|group_advantages): {message}"):
        call()


@pytest.mark.parametrize("dtype", [bool, int, np.int8])
def test_rewards_may_be_counts(dtype):
    rewards = np.array([[0, 1, 1, 0], [1, 1, 1, 1]])
    found = rl.group_advantages(rewards.astype(dtype))
    assert found.dtype == jnp.float32
    np.testing.assert_array_equal(found, rl.group_advantages(rewards.astype(np.float32)))
    log_p = jnp.log(jnp.full((2, 3), 0.5))
    of_counts, of_numbers = (rl.policy_gradient_loss(log_p, None, np.array([0, 1], kind)) for kind in (dtype, np.float32))
    assert of_counts == of_numbers
