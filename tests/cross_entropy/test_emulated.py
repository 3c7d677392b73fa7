"""The kernels of cross-entropy, emulated: losses and gradients of rows that are held in each way, to float64's."""

import jax.numpy as jnp
import numpy as np
import pytest

from ..support import cases, oracle
from ..support.cross_entropy.cases import FINITE, OPTIONS, labelled, together, with_gradient, without_ignored
from ..support.cross_entropy.oracle import cross_entropy as truth
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
