"""The kernels of cross-entropy, emulated: losses and gradients of rows that are held in each way, to float64's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

from ..support import cases, oracle
from ..support.cross_entropy.cases import FINITE, OPTIONS, labelled, together, with_gradient, without_ignored
from ..support.cross_entropy.oracle import cross_entropy as truth
from ..support.cross_entropy.oracle import log_probs as truth_of_log_probs
from ..support.emulator import emulated, emulating

FORWARD, BACKWARD, TOGETHER = (f"cross_entropy_{name}_mosaic" for name in ("forward", "vjp", "gradient"))
# Inside a warp, staged, by a block, in shared memory, by a cluster.
WIDTHS = [37, 100, 1024, 5001, 12501, 50257]


def of_kinds(cols, dtype):
    kinds = FINITE if cols < 5000 else FINITE[1:3]
    return np.concatenate([cases.inputs((1 + (cols < 2000), cols), dtype)[kind] for kind in kinds])


def in_turn(names, widths):
    """Of each width one case by default, and each option and dtype in turn."""
    return [
        pytest.param(name, dtype, cols, marks=cases.slow_unless(i == k % len(names) and j == k % 2))
        for k, cols in enumerate(widths)
        for i, name in enumerate(names)
        for j, dtype in enumerate(("float32", "bfloat16"))
    ]


@pytest.mark.parametrize(("options", "dtype", "cols"), in_turn([*OPTIONS, "where"], WIDTHS))
def test_losses_and_gradients(options, dtype, cols):
    x, chosen = of_kinds(cols, dtype), OPTIONS.get(options, {})
    labels, c = labelled(x.shape), np.random.default_rng(2).standard_normal(len(x)).astype(np.float32)
    where = np.random.default_rng(3).random(x.shape) < 0.7 if options == "where" else None
    with emulating() as ran:
        loss, lse, gradient = map(np.asarray, with_gradient("mosaic", where=where, **chosen)(x, labels, c))
    assert set(ran) == {FORWARD, BACKWARD}
    expected = truth(x, labels, -1, where, **chosen)
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(lse, expected.lse) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1


@pytest.mark.parametrize(("options", "dtype", "cols"), in_turn(["plain", "all"], [1024, 5001, 50257, 100]))
def test_losses_together_with_gradients(options, dtype, cols):
    x, chosen = jnp.asarray(of_kinds(cols, dtype)), OPTIONS[options]
    labels, c = labelled(x.shape), np.random.default_rng(2).standard_normal(len(x)).astype(np.float32)
    c[-1] = 0
    loss, gradient = map(np.asarray, emulated(together("mosaic", **chosen), x, labels, c, kernels=[TOGETHER]))
    expected = truth(np.asarray(x), labels, -1, **without_ignored(chosen))
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1
    np.testing.assert_array_equal(gradient[-1], 0)


@pytest.mark.parametrize(("options", "dtype", "cols"), in_turn(["where", "all"], [7, 1000]))
def test_losses_and_gradients_along_another_axis(options, dtype, cols):
    shape, chosen = (2, cols, 24), OPTIONS.get(options, {})
    x, labels = cases.inputs(shape, dtype)["wide"], labelled(shape, 1)
    c = np.random.default_rng(2).standard_normal(labels.shape).astype(np.float32)
    where = np.random.default_rng(3).random(shape) < 0.7 if options == "where" else None
    with emulating() as ran:
        loss, lse, gradient = map(np.asarray, with_gradient("mosaic", axis=1, where=where, **chosen)(x, labels, c))
    assert set(ran) == {FORWARD, BACKWARD}
    expected = truth(x, labels, 1, where, **chosen)
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(lse, expected.lse) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1


def test_labels_that_are_no_class_touch_nothing():
    """Their rows get the gradient of the log-sum-exp, and those before and after them theirs."""
    x = cases.inputs((6, 5001), "bfloat16")["wide"]
    labels, c = np.array([5000, -1, 0, 5001, 2**31 - 1, 7], np.int32), np.ones(6, np.float32)
    with emulating() as ran:
        loss, _, gradient = map(np.asarray, with_gradient("mosaic")(x, labels, c))
    assert set(ran) == {FORWARD, BACKWARD}
    np.testing.assert_array_equal(np.isnan(loss), [False, True, False, True, True, False])
    assert oracle.error(gradient, truth(x, labels).gradient(c)) <= 1


@pytest.mark.parametrize("cols", [100, pytest.param(5001, marks=pytest.mark.slow)])
@pytest.mark.parametrize("divides", [True, False])
@pytest.mark.parametrize("options", ["plain", "all"])
def test_factors_in_front_are_taken(options, divides, cols):
    """Also infinite ones and 0, behind which results are those of the reference. A cap comes behind the factor."""
    numbers = np.asarray([0.7, -1.3, 2.5, 40, 0, -0.0, np.inf, np.nan], np.float32)[:, None]
    x = np.random.default_rng(4).standard_normal((len(numbers), cols)).astype(jnp.bfloat16)
    labels, c = labelled(x.shape), np.random.default_rng(2).standard_normal(len(x)).astype(np.float32)

    def both(implementation, x):
        def f(x):
            wide = x.astype(jnp.float32)
            scores = wide / numbers if divides else wide * numbers
            named = {"implementation": implementation, **OPTIONS[options]}
            return jaxsoftmax.cross_entropy(scores, labels, return_lse=True, **named)

        (loss, lse), pull = jax.vjp(f, x)
        return loss, lse, pull((c, c))[0]

    with emulating() as ran:
        found = [np.asarray(part) for part in jax.jit(functools.partial(both, "mosaic"))(x)]
        decisions = jaxsoftmax.explain(functools.partial(both, "mosaic"), x)
        assert [d.plan.endswith(", times a factor") for d in decisions] == [True, True]
        assert [d.operands[0] for d in decisions] == [f"bfloat16[8,{cols}]"] * 2
    assert set(ran) == {FORWARD, BACKWARD}
    scores = oracle.to64(x[:4]) / numbers[:4] if divides else oracle.to64(x[:4]) * oracle.to64(numbers[:4])
    expected = truth(scores, labels[:4], **OPTIONS[options])
    assert oracle.error(found[0][:4], expected.loss) <= 1
    assert oracle.error(found[1][:4], expected.lse) <= 1
    for actual, other in zip(found, jax.jit(functools.partial(both, "xla"))(x), strict=True):
        np.testing.assert_allclose(oracle.to64(actual), oracle.to64(other), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize("axis", [1, -1])
def test_factors_in_front_of_log_probabilities_are_taken(axis):
    """The factors are those of a map over rows, with a scale behind them, along any axis."""
    shape = (3, 40, 24)
    x, ids = np.random.default_rng(4).standard_normal(shape, np.float32), labelled(shape, axis)
    numbers, scale = np.asarray([0.7, -1.3, 2.5], np.float32), np.float32(0.5)
    cotangents = tuple(np.random.default_rng(2).standard_normal(ids.shape).astype(np.float32) for _ in range(3))

    def both(x):
        def of_one(x, ids, number):
            options = {"axis": axis if axis < 0 else axis - 1, "return_entropy": True, "return_lse": True}
            return jaxsoftmax.log_probs(x / number, ids, scale=scale, implementation="mosaic", **options)

        results, pull = jax.vjp(lambda x: jax.vmap(of_one)(x, ids, numbers), x)
        return *results, pull(cotangents)[0]

    with emulating() as ran:
        *found, gradient = (np.asarray(part) for part in jax.jit(both)(x))
        assert [d.plan.endswith(", times a factor") for d in jaxsoftmax.explain(both, x)] == [True, True]
    assert set(ran) == {FORWARD, BACKWARD}
    numbers = oracle.to64(numbers)[:, None, None]
    expected = truth_of_log_probs(x / numbers, ids, axis, scale=scale)
    for actual, name in zip(found, ("log_p", "entropy", "lse"), strict=True):
        assert oracle.error(actual, getattr(expected, name)) <= 1, name
    of_scores = expected.gradient(*cotangents)
    assert oracle.error(gradient, oracle.Truth(of_scores.value / numbers, of_scores.budget / np.abs(numbers))) <= 1
