"""The Mosaic GPU kernels of the softmax family, emulated: all that Pallas's interpreter refuses, as it is written in PTX."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage

from ..support import cases, oracle
from ..support.emulator import emulating
from ..support.softmax import plans

KERNELS = {
    "softmax": ["softmax_forward", "softmax_jacobian", "softmax_jacobian"],
    "log_softmax": ["log_softmax_forward", "log_softmax_jvp", "log_softmax_vjp"],
    "logsumexp": ["logsumexp_forward", "logsumexp_jvp", "logsumexp_vjp"],
}
FEW = ("normal", "offset of 1e4", "some -inf", "extremes", "one NaN")


def results(name, x, t, c, axis, where, scale, plan=None):
    """Computes an op, its tangent and its cotangent, by this plan of rows, or by the plans that are chosen if it is None."""

    def run(x, t, c, where, scale):
        def op(x):
            options = {} if scale is None else {"scale": scale}
            return getattr(jaxsoftmax, name)(x, axis=axis, where=where, implementation="mosaic", **options)

        y, tangent = jax.jvp(op, [x], [t])
        return y, tangent, jax.vjp(op, x)[1](c)[0]

    with plans.planning(plan), emulating() as ran:
        found = jax.block_until_ready(jax.jit(run)(x, t, c, where, scale))
    assert dict.fromkeys(ran) == dict.fromkeys(f"{kernel}_mosaic" for kernel in KERNELS[name]), ran
    return list(map(np.asarray, found))


def check(name, x, dtype, axis=-1, where=None, scale=None, **options):
    """Holds the results to float64; derivatives where weights are finite. What is masked is NaN."""
    rng = np.random.default_rng(1)
    t = np.asarray(rng.standard_normal(x.shape), jnp.dtype(dtype))
    c = np.asarray(rng.uniform(-1, 1, np.delete(x.shape, axis) if name == "logsumexp" else x.shape), jnp.dtype(dtype))
    whole = None if where is None else np.broadcast_to(where, x.shape)
    hidden = x if where is None else np.where(whole, x, np.asarray(np.nan, x.dtype))
    found = results(name, hidden, t, c, axis, where, scale, **options)
    arguments = axis, whole, None if scale is None else oracle.to64(scale)
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


# Rows of lanes, staged, of a warpgroup, of several, in shared memory, looped, of clusters, and of blocks of the grid.
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


SHARED = {"storage": Storage.SHARED, "unroll": 2}
PLANS = {
    "several warpgroups": (3, RowPlan(1024, 4, 256)),
    "shared memory": (3, RowPlan(2048, 4, 128, **SHARED)),
    "a cluster": (3, RowPlan(2040, 4, 128, blocks=2)),
    "a cluster in shared memory": (2, RowPlan(7001, 4, 128, blocks=4, **SHARED)),
    "the grid": (3, RowPlan(4 * 2048 + 5, 4, 128, blocks=5, persistent_blocks=7, **SHARED)),
    "fewer blocks than slices": (2, RowPlan(4 * 2048 + 5, 4, 128, blocks=5, persistent_blocks=2, **SHARED)),
    "more slices than threads": (2, RowPlan(4203, 4, 128, blocks=131, persistent_blocks=7, **SHARED)),
}
EACH = ["softmax", "log_softmax", "logsumexp", "softmax", "log_softmax", "logsumexp", None]  # the last takes half a minute


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        pytest.param(name, kind, marks=cases.slow_unless(name == own))
        for kind, own in zip(PLANS, EACH, strict=True)
        for name in cases.OPS
    ],
)
def test_every_way_to_hold_a_row_is_right(name, kind):
    n_rows, plan = PLANS[kind]
    x = np.concatenate([hurtful((1, plan.cols), "float32", FEW[:1]), hurtful((n_rows - 1, plan.cols), "float32", FEW[1:2])])
    check(name, x, "float32", plan=plan)


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
        ("softmax", "bfloat16", 2047, "of rows", True),
        ("log_softmax", "bfloat16", 69, "of rows", True),
        ("logsumexp", "bfloat16", 3001, "of rows", True),
        ("logsumexp", "bfloat16", 3000, "of rows", True),
        pytest.param("softmax", "float32", 20001, "one for all", True, marks=pytest.mark.slow),
    ],
)
def test_masks_and_scales_are_taken(name, dtype, cols, kind, scaled):
    shape = (2, 3, cols)
    where = np.random.default_rng(3).random([cols if size is None else size for size in MASKS[kind]]) < 0.6
    where[0, 0] = False  # rows with nothing to see
    x = cases.inputs(shape, dtype)["wide"]
    check(name, x, dtype, where=where, scale=np.float32(-0.3) if scaled else None)


@pytest.mark.parametrize("name", cases.OPS)
@pytest.mark.parametrize("cols", [100, pytest.param(5001, marks=pytest.mark.slow)])
@pytest.mark.parametrize("divides", [True, False])
def test_factors_in_front_are_taken(name, cols, divides):
    """`-inf` stays so behind a positive factor, and behind 0 or infinity results are those of the reference."""
    rng = np.random.default_rng(4)
    numbers = np.asarray([0.7, -1.3, 2.5, 1000, 0, -0.0, np.inf, np.nan], np.float32)[:, None]
    x = jnp.asarray(rng.standard_normal((len(numbers), cols)), jnp.bfloat16).at[:4:2, 3:9].set(-jnp.inf)
    c = np.asarray(rng.uniform(-1, 1, x.shape[:1] if name == "logsumexp" else x.shape), np.float32)

    def both(implementation):
        def op(x):
            wide = x.astype(jnp.float32)
            scores = wide / numbers if divides else wide * numbers
            return getattr(jaxsoftmax, name)(scores, axis=-1, implementation=implementation)

        y, vjp = jax.vjp(op, x)
        return y, vjp(c)[0]

    with emulating() as ran:
        found = jax.block_until_ready(jax.jit(functools.partial(both, "mosaic"))())
        assert [d.plan.endswith(", times a factor") for d in jaxsoftmax.explain(functools.partial(both, "mosaic"))] == [
            True,
            name != "softmax",
        ]
    assert dict.fromkeys(ran) == dict.fromkeys(f"{KERNELS[name][at]}_mosaic" for at in (0, 2)), ran
    with np.errstate(divide="ignore"):
        scores = oracle.to64(x)[:4] / numbers[:4] if divides else oracle.to64(x)[:4] * oracle.to64(numbers[:4])
    assert oracle.error(found[0][:4], getattr(oracle, name)(scores, -1)) <= 1
    for actual, expected in zip(found, jax.jit(functools.partial(both, "xla"))(), strict=True):
        np.testing.assert_allclose(oracle.to64(actual), oracle.to64(expected), rtol=2**-7, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "dtype", "shape", "axis", "plan"),
    [
        ("softmax", "bfloat16", (3, 7, 33), 1, None),
        ("log_softmax", "float32", (2, 1000, 24), 1, None),
        ("logsumexp", "bfloat16", (2, 4097, 8), 1, None),
        pytest.param("softmax", "float32", (130, 33), 0, None, marks=pytest.mark.slow),
        (
            "log_softmax",
            "bfloat16",
            (2, 1200, 16),
            1,
            ColumnPlan(1200, 16, 8, 128, lanes=2, blocks=10, persistent_blocks=7, **SHARED),
        ),
    ],
    ids=str,
)
def test_rows_along_other_axes_are_right(name, dtype, shape, axis, plan):
    where = np.random.default_rng(3).random(shape) < 0.7 if name != "softmax" else None
    check(name, cases.inputs(shape, dtype)["some -inf"], dtype, axis, where, plan=plan)


@pytest.mark.parametrize("name", cases.quick("softmax", slow=["log_softmax", "logsumexp"]))
@pytest.mark.parametrize("cols", cases.quick(5001, slow=[69]))
def test_bits_do_not_depend_on_which_row_of_the_array_it_is(name, cols):
    """Rows start at each place of a line of the cache, and an element is in each lane."""
    x, t = (np.tile(np.random.default_rng(seed).standard_normal((1, cols), np.float32), (9, 1)) for seed in (1, 2))
    for result in results(name, x, t, t[:, 0] if name == "logsumexp" else t, -1, None, None):
        assert len({row.tobytes() for row in result}) == 1
