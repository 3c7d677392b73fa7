"""The Mosaic GPU kernels of the softmax family, emulated: all that Pallas's interpreter refuses, as it is written in PTX."""

import contextlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._gpu.rows.layout import Config
from jaxsoftmax.ops.softmax import mosaic_sm90 as mosaic

from ..support import cases, oracle
from ..support.emulator import emulating

KERNELS = {
    "softmax": ["softmax_forward", "softmax_jacobian", "softmax_jacobian"],
    "log_softmax": ["log_softmax_forward", "log_softmax_jvp", "log_softmax_vjp"],
    "logsumexp": ["logsumexp_forward", "logsumexp_jvp", "logsumexp_vjp"],
}
FEW = ("normal", "offset of 1e4", "some -inf", "extremes", "one NaN")


def results(name, x, t, c, axis, where, scale, config=None):
    """An op, its tangent and its cotangent, by kernels with this configuration."""

    def run(x, t, c, where, scale):
        def op(x):
            options = {} if scale is None else {"scale": scale}
            return getattr(jaxsoftmax, name)(x, axis=axis, where=where, implementation="mosaic", **options)

        y, tangent = jax.jvp(op, [x], [t])
        return y, tangent, jax.vjp(op, x)[1](c)[0]

    forced = {} if config is None else {"config_for": lambda *args: config, "unsupported": served}
    with contextlib.ExitStack() as patches:
        for function, fake in forced.items():
            patches.enter_context(mock.patch.object(mosaic, function, fake))
        ran = patches.enter_context(emulating())
        found = jax.block_until_ready(jax.jit(run)(x, t, c, where, scale))
    assert dict.fromkeys(ran) == dict.fromkeys(f"{kernel}_mosaic" for kernel in KERNELS[name]), ran
    return list(map(np.asarray, found))


def served(*args, **params):
    return None


def check(name, x, dtype, axis=-1, where=None, scale=None, **options):
    """Holds the results to float64; derivatives where weights are finite. What is masked is NaN."""
    rng = np.random.default_rng(1)
    t = np.asarray(rng.standard_normal(x.shape), jnp.dtype(dtype))
    c = np.asarray(rng.uniform(-1, 1, np.delete(x.shape, axis) if name == "logsumexp" else x.shape), jnp.dtype(dtype))
    whole = None if where is None else np.broadcast_to(where, x.shape)
    hidden = x if where is None else np.where(whole, x, np.asarray(np.nan, x.dtype))
    found = results(name, hidden, t, c, axis, where, scale, **options)
    arguments = (axis, whole) if name == "logsumexp" else (axis, whole, None if scale is None else oracle.to64(scale))
    if name == "softmax":
        maps = [oracle.softmax_derivative(x, v, *arguments, saved=dtype) for v in (t, c)]
    else:
        maps = [getattr(oracle, f"{name}_{part}")(x, v, *arguments) for part, v in (("tangent", t), ("cotangent", c))]
    truths = [getattr(oracle, name)(x, *arguments), *maps]
    finite = np.isfinite(oracle.rows(x, axis, whole, 1.0 if scale is None else oracle.to64(scale)).y).all(axis, keepdims=True)
    for place, (actual, truth) in enumerate(zip(found, truths, strict=True)):
        own = np.True_ if not place else finite if actual.ndim == x.ndim else np.squeeze(finite, axis)
        own = np.broadcast_to(own, actual.shape)
        assert oracle.error(actual[own], oracle.Truth(truth.value[own], truth.budget[own])) <= 1, place


def hurtful(shape, dtype, kinds=None):
    arrays = cases.inputs(shape, dtype)
    return np.concatenate([arrays[kind] for kind in (arrays if kinds is None else kinds)])


# Rows of lanes, through shared memory, of a warpgroup, of several, parked, looped, of clusters, and of blocks of the grid.
ROWS = [
    ("softmax", "float32", 100),
    ("logsumexp", "bfloat16", 64),
    ("log_softmax", "bfloat16", 69),
    ("softmax", "float32", 322),
    ("logsumexp", "bfloat16", 1027),
    ("log_softmax", "float32", 2048),
    ("softmax", "bfloat16", 9001),
    ("log_softmax", "float32", 12501),
    ("softmax", "bfloat16", 50257),
    ("logsumexp", "bfloat16", 131072),
]


@pytest.mark.parametrize(
    ("name", "dtype", "cols"),
    [
        pytest.param(name, dtype, cols, marks=cases.slow_unless((name, dtype, cols) in ROWS))
        for name in cases.OPS
        for dtype, cols in dict.fromkeys(case[1:] for case in ROWS)
    ],
)
def test_emulated_kernels_are_right(name, dtype, cols):
    kinds = None if cols < 2000 else FEW[: 4 if cols < 30000 else 2]
    check(name, hurtful((3 if cols < 2000 else 1, cols), dtype, kinds), dtype)


CONFIGS = {
    "several warpgroups": ((3, 1024), Config(4, 256)),
    "parked": ((3, 2048), Config(4, 128, parked=True, unroll=2)),
    "a cluster": ((3, 2040), Config(4, 128, blocks=2)),
    "a parked cluster": ((2, 7001), Config(4, 128, blocks=4, parked=True, unroll=2)),
    "the grid": ((3, 4 * 2048 + 5), Config(4, 128, blocks=5, parked=True, unroll=2, grid=7)),
    "fewer blocks than slices": ((2, 4 * 2048 + 5), Config(4, 128, blocks=5, parked=True, unroll=2, grid=2)),
    "read twice": ((2, 33011), Config(4, 128, blocks=17, unroll=4)),
}
EACH = ["softmax", "log_softmax", "logsumexp", "softmax", "log_softmax", "logsumexp", "softmax"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=cases.slow_unless(name == own))
        for kind, own in zip(CONFIGS, EACH, strict=True)
        for name in cases.OPS
    ],
)
def test_every_way_to_hold_a_row_is_right(name, kind):
    shape, config = CONFIGS[kind]
    x = np.concatenate([hurtful((1, shape[1]), "float32", FEW[:1]), hurtful((shape[0] - 1, shape[1]), "float32", FEW[1:2])])
    check(name, x, "float32", config=config)


MASKS = {
    "whole": (2, 3, None),
    "repeated": (2, 1, None),
    "one for all": (1, 1, None),
    "of rows": (2, 3, 1),
}


@pytest.mark.parametrize(
    ("name", "dtype", "cols", "kind", "scaled"),
    [
        ("softmax", "bfloat16", 100, "whole", True),
        ("log_softmax", "float32", 2049, "repeated", False),
        ("logsumexp", "bfloat16", 5001, "whole", False),
        ("logsumexp", "float32", 69, "of rows", False),
        pytest.param("softmax", "float32", 20001, "one for all", True, marks=pytest.mark.slow),
    ],
)
def test_masks_and_scales_are_taken(name, dtype, cols, kind, scaled):
    shape = (2, 3, cols)
    where = np.random.default_rng(3).random([cols if size is None else size for size in MASKS[kind]]) < 0.6
    where[0, 0] = False  # rows with nothing to see
    x = cases.inputs(shape, dtype)["wide"]
    check(name, x, dtype, where=where, scale=np.float32(-0.3) if scaled else None)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "axis", "config"),
    [
        ("softmax", "bfloat16", (3, 7, 33), 1, None),
        ("log_softmax", "float32", (2, 1000, 24), 1, None),
        ("logsumexp", "bfloat16", (2, 4097, 8), 1, None),
        pytest.param("softmax", "float32", (130, 33), 0, None, marks=pytest.mark.slow),
        ("log_softmax", "bfloat16", (2, 1200, 16), 1, Config(8, 128, blocks=10, parked=True, unroll=2, lanes=2, grid=7)),
    ],
    ids=str,
)
def test_rows_along_other_axes_are_right(name, dtype, shape, axis, config):
    where = np.random.default_rng(3).random(shape) < 0.7 if name != "softmax" else None
    check(name, cases.inputs(shape, dtype)["some -inf"], dtype, axis, where, config=config)


@pytest.mark.parametrize("name", cases.quick("softmax", slow=["log_softmax", "logsumexp"]))
@pytest.mark.parametrize("cols", cases.quick(5001, slow=[69]))
def test_bits_do_not_depend_on_which_row_of_the_array_it_is(name, cols):
    """Rows start at each place of a line of the cache, and an element is in each lane."""
    x, t = (np.tile(np.random.default_rng(seed).standard_normal((1, cols), np.float32), (9, 1)) for seed in (1, 2))
    for result in results(name, x, t, t[:, 0] if name == "logsumexp" else t, -1, None, None):
        assert len({row.tobytes() for row in result}) == 1
