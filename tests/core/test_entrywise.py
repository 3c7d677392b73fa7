"""What a loop's reverse mode computed is differentiated again by the rules of functions, which JAX may drop in a `lax.scan`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.entrywise import entrywise

from ..support import cases, oracle
from ..support.meshes import make_mesh

pytestmark = pytest.mark.usefixtures("hollow_kernels", "x64")

STEPS, ROWS, CLASSES = 2, 3, 8


@entrywise(lambda result, primals, tangents: 10 * result * tangents[0])
def grown(x):
    """Has a derivative that is 10 times itself, which is not that of its body."""
    return x * x


@entrywise(lambda results, primals, tangents, by: (by * tangents[0], -by * tangents[0]))
def opposites(x, factor, *, by):
    """Has tangents that are smaller than results."""
    return by * factor * x, -by * factor * x


def folded(f, *xs):
    return jax.lax.scan(lambda total, each: (total + f(*each), None), jnp.zeros(()), xs)[0]


def tangent(f):
    return lambda x: jax.jvp(f, (x,), (1.0,))[1]


@pytest.mark.parametrize("outer", [jax.grad, tangent])
@pytest.mark.parametrize("inner", [jax.grad, tangent])
def test_a_scan_keeps_the_rule(inner, outer):
    second = outer(inner(lambda x: folded(grown, x[None])))
    assert float(second(3.0)) == 900
    assert jax.vmap(second)(jnp.asarray([3.0, 1.0])).tolist() == [900, 100]


@pytest.mark.parametrize("axes", [(0, 0), (1, 0), (0, None), (None, 0)], ids=str)
def test_any_operand_may_have_a_batch(axes):
    operands = [np.random.default_rng(seed).standard_normal((3, 3, 1)) for seed in range(2)]
    operands[1] = operands[1].reshape(3, 1, 3)

    def both(x, factor):
        results, moved = jax.jvp(functools.partial(opposites, by=2.0), (x, factor), (jnp.cos(x), factor))
        return *results, *moved

    operands = [each[0] if axis is None else each for each, axis in zip(operands, axes, strict=True)]
    actual = jax.vmap(both, axes)(*operands)
    x, factor = (each if axis is None else np.moveaxis(each, axis, 0) for each, axis in zip(operands, axes, strict=True))
    expected = [sign * 2 * each for each in (factor * x, np.ones_like(factor) * np.cos(x)) for sign in (1, -1)]
    oracle.assert_same_in_float64(actual, tuple(expected))


def scaled(f, takes_labels=False):
    return lambda x, y, labels, scale, **options: f(x, *[labels] * takes_labels, scale=scale, **options)


def divergence(f, **own):
    return lambda x, y, labels, scale, **options: f(x, y, p_scale=scale, q_scale=2 - scale, **own, **options)


def of_layer(f, **own):
    def call(x, y, labels, scale, **options):
        hidden = jnp.sin(scale[:, None] * np.arange(1.0, ROWS + 1)[None])
        return f(hidden, x, labels, temperature=scale, **own, **options)

    return call


# Functions of logits and labels of rows, and of a scale for each row; those of a layer take the logits for its weight.
FUNCTIONS = {
    "logsumexp": scaled(functools.partial(jaxsoftmax.logsumexp, axis=-1)),
    "cross_entropy": scaled(functools.partial(jaxsoftmax.cross_entropy, label_smoothing=0.1), takes_labels=True),
    "entropy": scaled(jaxsoftmax.entropy),
    "kl_divergence": divergence(jaxsoftmax.kl_divergence),
    "js_divergence": divergence(jaxsoftmax.js_divergence, weight=0.3),
    "linear_log_probs": of_layer(jaxsoftmax.linear_log_probs, return_entropy=True),
    "linear_cross_entropy": of_layer(jaxsoftmax.linear_cross_entropy, reduction="none", label_smoothing=0.1),
}


def summed(f, loop, **options):
    """Makes a function of arrays that adds up what is not linear in the results of several steps, in a scan or unrolled."""

    def step(*operands):
        return sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves(f(*operands, **options)))

    def call(arrays):
        operands = [arrays[name] for name in ("x", "y", "labels", "scale")]
        return folded(step, *operands) if loop == "scan" else sum(step(*(each[i] for each in operands)) for i in range(STEPS))

    return call


def given():
    rng = np.random.default_rng(0)
    arrays = {name: rng.standard_normal((STEPS, ROWS, CLASSES)) for name in "xy"}
    labels = rng.integers(0, CLASSES, (STEPS, ROWS), np.int32)
    return arrays | {"labels": labels, "scale": rng.uniform(0.5, 1.5, (STEPS, ROWS))}


def tangent_of_gradient(f, arrays, order=2):
    """Computes the tangent of the gradient of `f`. For the third order, `f` is replaced by a function of its gradient."""
    labels = arrays["labels"]

    def of_gradient(wrt):
        return sum(jnp.sum(jnp.sin(each)) for each in jax.tree.leaves(jax.grad(own)(wrt)))

    def own(wrt):
        return f(wrt | {"labels": labels})

    wrt = {name: array for name, array in arrays.items() if name != "labels"}
    gradient = jax.grad(own if order == 2 else of_gradient)
    return jax.jit(lambda wrt: jax.jvp(gradient, (wrt,), (jax.tree.map(jnp.cos, wrt),))[1])(wrt)


@pytest.mark.parametrize("name", cases.quick("cross_entropy", "js_divergence", slow=["logsumexp", "entropy", "kl_divergence"]))
def test_third_derivatives_in_a_scan(name):
    scan, unrolled = (tangent_of_gradient(summed(FUNCTIONS[name], loop), given(), 3) for loop in ("scan", "unrolled"))
    oracle.assert_same_in_float64(scan, unrolled)


@pytest.mark.parametrize("name", ["linear_log_probs", "linear_cross_entropy"])
def test_second_derivatives_of_a_layer_in_a_scan(name):
    scan, unrolled = (tangent_of_gradient(summed(FUNCTIONS[name], loop), given()) for loop in ("scan", "unrolled"))
    oracle.assert_same_in_float64(scan, unrolled)


# Functions that merge over devices by a rule of `jax.custom_jvp`.
MERGING = ("kl_divergence", "linear_log_probs", "linear_cross_entropy", "js_divergence", "cross_entropy", "entropy")


@pytest.mark.parametrize(
    ("name", "check_vma", "devices"),
    [
        pytest.param(name, check_vma, devices, marks=cases.slow_unless(devices == 2 and check_vma == (i % 2 == 0) and i < 4))
        for i, name in enumerate(MERGING)
        for check_vma in (True, False)
        for devices in (1, 2, 4)
    ],
)
def test_second_derivatives_in_a_scan_where_devices_share_classes(name, check_vma, devices):
    place = {"x": P(None, None, "model"), "y": P(None, None, "model"), "labels": P(), "scale": P()}
    local = summed(FUNCTIONS[name], "scan", axis_name="model")
    mesh = make_mesh(AxisType.Auto, (8 // devices, devices))
    f = jax.shard_map(local, mesh=mesh, in_specs=(place,), out_specs=P(), check_vma=check_vma)
    expected = tangent_of_gradient(summed(FUNCTIONS[name], "unrolled"), given())
    oracle.assert_same_in_float64(tangent_of_gradient(f, given()), expected)
