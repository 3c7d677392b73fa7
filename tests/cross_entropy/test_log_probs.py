"""Log-probabilities of chosen classes and entropies: to float64's, on the reference and on emulated kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

from ..support import cases, oracle
from ..support.cross_entropy.cases import labelled
from ..support.cross_entropy.oracle import log_probs as truth
from ..support.emulator import emulating

FORWARD, BACKWARD = (f"cross_entropy_{name}_mosaic" for name in ("forward", "vjp"))
KINDS = ("normal", "wide", "outliers", "offset of 1e4", "equal", "some -inf")
# Inside a warp, staged, by a block, in shared memory, read in a loop, by a cluster.
WIDTHS = [37, 100, 1024, 5001, 12501, 50257]
OPTIONS = ("plain", "scale", "scales", "cap and scales", "where")


def options_of(name, shape, axis=-1):
    """Returns a mask, a scale with size 1 along the axis, and a cap."""
    rng = np.random.default_rng(3)
    rows = [1 if a == axis % len(shape) else size for a, size in enumerate(shape)]
    scale = {"scale": np.float32(0.7), "plain": None, "where": None}.get(name, rng.normal(size=rows).astype(np.float32))
    return rng.random(shape) < 0.7 if name == "where" else None, scale, 30.0 if name.startswith("cap") else None


def results_and_gradient(x, ids, cotangents, axis, where, scale, cap, implementation=None):
    """Returns log-probabilities, entropies, log-sum-exps, and the gradient for cotangents of all three."""
    scale = scale if scale is None or np.ndim(scale) == 0 else np.squeeze(scale, axis)
    options = {"scale": scale, "logits_soft_cap": cap, "return_entropy": True, "return_lse": True}
    f = functools.partial(jaxsoftmax.log_probs, ids=ids, axis=axis, where=where, implementation=implementation, **options)
    results, pull = jax.vjp(f, x)
    return *results, pull(cotangents)[0]


def check(x, ids, cotangents, axis, where, scale, cap, run):
    """Holds results and gradient of `run` to the truth."""
    log_p, entropy, lse, gradient = map(np.asarray, run(x, ids, cotangents, axis, where, scale, cap))
    expected = truth(x, ids, axis, where, scale=scale, logits_soft_cap=cap)
    assert oracle.error(entropy, expected.entropy) <= 1
    assert oracle.error(log_p, expected.log_p) <= 1
    assert oracle.error(lse, expected.lse) <= 1
    assert oracle.error(gradient, expected.gradient(*cotangents)) <= 1


def given(shape, dtype, kind, axis=-1, where=None):
    """Returns logits, ids that the mask shows, and cotangents of the three results."""
    x, ids = cases.inputs(shape, dtype)[kind], labelled(shape, axis)
    seen = np.isfinite(x.astype(np.float64)) & (True if where is None else where)
    ids = np.where(np.squeeze(np.take_along_axis(seen, np.expand_dims(ids, axis), axis), axis), ids, np.argmax(seen, axis))
    rng = np.random.default_rng(2)
    return x, ids.astype(np.int32), tuple(rng.normal(size=ids.shape).astype(np.float32) for _ in range(3))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", OPTIONS)
def test_results_and_gradients_of_the_reference(options, kind, dtype):
    where, scale, cap = options_of(options, (6, 300))
    x, ids, cotangents = given((6, 300), dtype, kind, where=where)
    check(x, ids, cotangents, -1, where, scale, cap, results_and_gradient)


def in_turn():
    """Of each width two cases by default, each option and dtype in turn."""
    return [
        pytest.param(name, dtype, cols, marks=cases.slow_unless(i == k % len(OPTIONS) and j == k % 2))
        for k, cols in enumerate(WIDTHS)
        for i, name in enumerate(OPTIONS)
        for j, dtype in enumerate(("float32", "bfloat16"))
    ]


@pytest.mark.parametrize(("options", "dtype", "cols"), in_turn())
def test_results_and_gradients_of_kernels(options, dtype, cols):
    shape = (2, cols)
    where, scale, cap = options_of(options, shape)
    run = functools.partial(results_and_gradient, implementation="mosaic")
    for kind in KINDS if cols < 5000 else KINDS[1:3]:
        with emulating() as ran:
            check(*given(shape, dtype, kind, where=where), -1, where, scale, cap, run)
        assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize(("options", "dtype", "cols"), [("scales", "float32", 7), ("where", "bfloat16", 300)])
def test_kernels_along_another_axis(options, dtype, cols):
    shape = (2, cols, 24)
    where, scale, cap = options_of(options, shape, 1)
    run = functools.partial(results_and_gradient, implementation="mosaic")
    with emulating() as ran:
        check(*given(shape, dtype, "wide", 1, where), 1, where, scale, cap, run)
    assert set(ran) == {FORWARD, BACKWARD}
