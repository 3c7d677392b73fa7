"""The drop-ins of the recipes, on what distrax, rlax and tunix expect of the functions that these take the place of.

The inputs and numbers are those of `categorical_test.py` of distrax (f51bffc), of `policy_gradients_test.py` and
`distributions_test.py` of rlax (4c5d25b), and of `tests/rl/common_test.py` of tunix (c7d8950). Where distrax compares with
another library, the number is that of float64 here.
"""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

from ..support import documents

HEADING = "How do I replace the log-probabilities and entropies of distrax, rlax or tunix?"

ROWS = np.float32([[1, 1, 1], [2, 0, 0], [-1, -2, -3]])  # of a policy, in the tests of rlax
ADVANTAGES = np.float32([0.3, 0.2, 0.1])
WEIGHTS = np.float32([-2, 2, 0])
TWO_ROWS = np.float32([[1, 1, 0], [1, 2, 0]])
PROBABILITIES = np.array([[0.42231882, 0.42231882, 0.15536241], [0.24472848, 0.66524094, 0.09003057]])


@pytest.fixture(scope="module")
def drop_ins():
    """Returns the functions of the recipe, in which users promote dtypes and ranks."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        return types.SimpleNamespace(**documents.names("docs/recipes/losses.md", HEADING))


@pytest.fixture(autouse=True)
def as_users_promote():
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


def log_p_of(logits):
    """Computes log-probabilities in float64."""
    logits = np.asarray(logits, np.float64)
    return (
        logits - np.log(np.sum(np.exp(logits - logits.max(-1, keepdims=True)), -1, keepdims=True)) - logits.max(-1)[..., None]
    )


def at(log_p, value):
    """Takes log-probabilities at ids whose last axes are the batch; samples are in front."""
    shape = np.broadcast_shapes(np.shape(value), log_p.shape[:-1])
    rows = np.broadcast_to(log_p, (*shape, log_p.shape[-1]))
    return np.take_along_axis(rows, np.broadcast_to(value, shape)[..., None], -1)[..., 0]


# distrax.

ONE, TWO = [0.0, 0.5, -0.5], [[0.0, 0.5, -0.5], [-0.2, 0.3, 0.5]]


def logs(probabilities):
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities))


@pytest.mark.parametrize("compile_", [jax.jit, lambda f: f], ids=["jit", "eager"])
@pytest.mark.parametrize(
    ("logits", "value"),
    [
        pytest.param(ONE, [1, 0, 2, 0], id="samples of a row"),
        pytest.param(logs([0.3, 0.2, 0.5]), [1, 0, 2, 0], id="samples of probabilities"),
        pytest.param(ONE, [[1, 0], [2, 0]], id="samples of a row in two axes"),
        pytest.param(TWO, [1, 0], id="an id for each row"),
        pytest.param(logs([[0.1, 0.5, 0.4], [0.3, 0.3, 0.4]]), [1, 0], id="an id for each row of probabilities"),
        pytest.param(TWO, [[1, 0], [2, 1]], id="samples in front of rows"),
        pytest.param(logs([[0.1, 0.5, 0.4], [0.3, 0.3, 0.4]]), [[1, 0], [2, 1]], id="samples in front of probabilities"),
        pytest.param(logs([0.0, 1.0, 0.0]), [0, 1, 1, 2], id="probabilities of 0 and 1"),
        pytest.param(logs([0.1, 0.2, 0.3]), [0, 1, 2], id="probabilities that do not sum to 1"),
    ],
)
def test_log_prob_of_distrax(drop_ins, logits, value, compile_):
    def log_prob(logits, value):
        return drop_ins.Categorical(logits).log_prob(value)

    actual = compile_(log_prob)(jnp.float32(logits), jnp.int32(value))
    np.testing.assert_allclose(actual, at(log_p_of(logits), value), atol=3e-5)


def test_log_prob_of_distrax_outside_of_the_classes(drop_ins):
    def log_prob(logits):
        return drop_ins.Categorical(logits).log_prob(jnp.int32([-1, -2, 3, 4]))

    logits = jnp.float32(logs([0.2, 0.3, 0.5]))
    np.testing.assert_array_equal(log_prob(logits), -np.inf)
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(jnp.exp(log_prob(x))))(logits), 0)


def test_log_prob_of_distrax_under_vmap(drop_ins):
    def log_prob_sum(logits, value):
        return drop_ins.Categorical(logits).log_prob(value).sum()

    logits, value = jnp.arange(60.0).reshape(3, 4, 5), jnp.zeros((3, 4), int)
    expected = at(log_p_of(logits), value)
    for axis in (0, 1):
        actual = jax.vmap(log_prob_sum, axis)(logits, value)
        np.testing.assert_allclose(actual, expected.sum(1 - axis), rtol=1e-6)


def test_entropy_of_distrax(drop_ins):
    probabilities = np.random.default_rng(42).uniform(size=(4, 3))
    probabilities /= probabilities.sum(-1, keepdims=True)
    actual = drop_ins.Categorical(jnp.float32(np.log(probabilities))).entropy()
    np.testing.assert_allclose(actual, -np.sum(probabilities * np.log(probabilities), -1), rtol=1e-3)


@pytest.mark.parametrize(
    "logits",
    [
        pytest.param([-np.inf, 2, -3, -np.inf, 5], id="-inf"),
        pytest.param([-1e9] * 11, id="large and negative"),
        pytest.param([1e9] * 11, id="large"),
        pytest.param([0] * 11, id="equal"),
        pytest.param([1, 7, -3, 2, 4], id="typical"),
    ],
)
def test_gradient_of_the_entropy_of_distrax(drop_ins, logits):
    def entropy(logits):
        return drop_ins.Categorical(logits).entropy()

    logits = np.float32(logits)
    value, gradient = jax.value_and_grad(entropy)(logits)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    for actual, expected in zip((value, gradient), jax.value_and_grad(entropy)(np.maximum(logits, -1e4)), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    log_p = log_p_of(logits)
    p = np.exp(log_p)
    terms = np.where(p > 0, p * np.where(p > 0, log_p, 0), 0)
    np.testing.assert_allclose(value, -terms.sum(), rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(gradient, p * terms.sum() - terms, rtol=1e-4, atol=1e-6)


# rlax.


def test_policy_gradient_loss_of_rlax(drop_ins):
    logits, weights = np.stack([ROWS, ROWS + 1]), np.stack([WEIGHTS, WEIGHTS - 1])
    advantages, actions = np.stack([ADVANTAGES, -ADVANTAGES]), np.int32([[0, 1, 2], [0, 0, 0]])
    actual = jax.jit(jax.vmap(drop_ins.policy_gradient_loss))(logits, actions, advantages, weights)
    np.testing.assert_allclose(actual, [0.0788835088, 0.327200909], atol=1e-4)


@pytest.mark.parametrize("stops", [True, False])
def test_advantages_have_a_gradient_if_asked_for(drop_ins, stops):
    actions = np.int32([0, 1, 2])

    def loss(advantages):
        return drop_ins.policy_gradient_loss(ROWS, actions, advantages, WEIGHTS, stops)

    expected = 0 if stops else -at(log_p_of(ROWS), actions) * WEIGHTS / 3
    np.testing.assert_allclose(jax.grad(loss)(ADVANTAGES), np.broadcast_to(expected, 3), atol=1e-6)


def test_entropy_loss_of_rlax(drop_ins):
    logits, weights = np.stack([ROWS, ROWS + 1]), np.stack([WEIGHTS, WEIGHTS - 1])
    actual = jax.jit(jax.vmap(drop_ins.entropy_loss))(logits, weights)
    np.testing.assert_allclose(actual, [0.288693, 1.15422], atol=1e-4)


def test_clipped_surrogate_loss_of_rlax(drop_ins):
    actions, old = np.int32([0, 1, 2]), np.float32([[1, 1, 1], [2, 0, 0], [-3, -2, -1]])
    ratios = drop_ins.importance_ratios(ROWS, old, actions)
    losses = [-jnp.mean(jnp.minimum(ratios * a, jnp.clip(ratios, 0.8, 1.2) * a)) for a in (ADVANTAGES, -ADVANTAGES)]
    np.testing.assert_allclose(losses, [-0.17117467, 0.19333333], atol=1e-4)


def test_importance_ratios_of_rlax(drop_ins):
    pi, mu, actions = np.float32([[0.2, 0.8], [0.6, 0.4]]), np.float32([[0.8, 0.2], [0.6, 0.4]]), np.int32([1, 0])
    expected = np.exp(at(log_p_of(pi), actions) - at(log_p_of(mu), actions))
    np.testing.assert_allclose(drop_ins.importance_ratios(pi, mu, actions), expected, atol=1e-4)


def test_softmax_of_rlax():
    """Its `logprob` and `entropy`, of a batch and of each row, and of a temperature."""
    samples = np.int32([0, 1])
    expected = np.log(PROBABILITIES[[0, 1], samples]), -np.sum(PROBABILITIES * np.log(PROBABILITIES), -1)
    log_p, entropy = jaxsoftmax.log_probs(TWO_ROWS, samples, return_entropy=True)
    np.testing.assert_allclose(log_p, expected[0], atol=1e-4)
    np.testing.assert_allclose(entropy, expected[1], atol=1e-4)
    for row, sample, *numbers in zip(TWO_ROWS, samples, *expected, strict=True):
        np.testing.assert_allclose(jaxsoftmax.log_probs(row, sample, return_entropy=True), numbers, atol=1e-4)
    at_ten = jaxsoftmax.log_probs(TWO_ROWS, np.int32([[0, 1, 2]] * 2), scale=1 / 10)
    np.testing.assert_allclose(
        jnp.exp(at_ten), [[0.34425336, 0.34425336, 0.31149334], [0.332225, 0.3671654, 0.3006096]], atol=1e-4
    )


@pytest.mark.parametrize(("share", "expected"), [(0.9, [0.988751, 0.832396]), (0.5, [0.549306, 0.549306])])
def test_clipped_entropy_of_rlax(share, expected):
    actual = jnp.minimum(jaxsoftmax.entropy(TWO_ROWS), share * jnp.log(3.0))
    np.testing.assert_allclose(actual, expected, atol=1e-4)


# tunix.


@pytest.mark.parametrize("compile_", [jax.jit, lambda f: f], ids=["jit", "eager"])
def test_selective_log_softmax_of_tunix(drop_ins, compile_):
    with jax.threefry_partitionable(False):  # as these numbers were drawn
        key = jax.random.PRNGKey(0)
        logits, ids = jax.random.uniform(key, (2, 4, 8)), jax.random.randint(key, (2, 4), 0, 8)
    expected = [[-2.242679, -2.2733693, -2.1024966, -1.9994389], [-2.0603075, -2.4863663, -1.9176172, -2.0206313]]
    np.testing.assert_allclose(compile_(drop_ins.selective_log_softmax)(logits, ids), expected, rtol=1e-4, atol=1e-4)
    log_p = log_p_of(logits)
    entropies = compile_(drop_ins.compute_entropy_from_logits)(logits)
    np.testing.assert_allclose(entropies, -np.sum(np.exp(log_p) * log_p, -1), rtol=1e-5)
