"""What Triton's kernels compute, in its interpreter on the CPU; `test_triton.py` runs this file in a process of its own.

The interpreter is chosen by `TRITON_INTERPRET=1` before Triton is imported. There is no JAX around the kernels: plans get NumPy
arrays, and where they would make a custom call the kernel runs.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import triton
import triton.language as tl

from jaxsoftmax import online
from jaxsoftmax._triton import custom_call, row_launch
from jaxsoftmax._triton import online as twin
from jaxsoftmax.ops.softmax import primitive, xla
from jaxsoftmax.ops.softmax import triton as ours

from ..support import cases, oracle, triton_kernels
from ..support.softmax.spread import ROWS, spreading, stacked

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")  # NumPy warns of NaN and infinity


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    triton_kernels.interpret(monkeypatch)


@pytest.fixture(params=ROWS)
def target(request, monkeypatch):
    return spreading(request.param, monkeypatch)


WIDTHS = [(3, 1), (1, 700), (2, 67, 3), (1, 40, 17)]
WIDTHS = [(shape, 1, "float32") for shape in WIDTHS] + [((3, 5, 30), (1, 2), "float32"), ((4, 5), 0, "float32")]
WIDTHS += [((3, 127), 1, dtype) for dtype in cases.DTYPES] + [((1, 40, 17), 1, "float16")]


OPERATIONS = triton_kernels.operations(primitive)


def computed(name, operands, target, **params):
    """Returns the results of a plan for NumPy arrays by name."""
    return triton_kernels.forced(ours, OPERATIONS[name], operands, target, **params).run(**operands)


def axes_of(axis, ndim):
    return tuple([a % ndim for a in np.atleast_1d(axis)])


def forward(name, x, axis, dtype, target, where=None, scale=None):
    """A result, and the state."""
    params = {"axes": axes_of(axis, x.ndim), "dtype": jnp.dtype(dtype)}
    params |= {} if name == "softmax" else {"return_state": True}
    y, *state = computed(name, {"x": x, "where": where, "scale": scale}, target, **params)
    return y, *(state or (None, None))


TRUTH = {
    "softmax": oracle.softmax,
    "log_softmax": oracle.log_softmax,
    "logsumexp": functools.partial(oracle.logsumexp, keepdims=True),
}


@pytest.mark.parametrize(("shape", "axis", "dtype"), WIDTHS, ids=cases.ident)
@pytest.mark.parametrize("name", cases.OPS)
def test_values_and_states(target, name, dtype, shape, axis):
    x, axis = stacked(shape, dtype), tuple(1 + np.atleast_1d(axis))
    y, m, d = forward(name, x, axis, dtype, target)
    assert y.dtype == x.dtype
    assert oracle.error(y, TRUTH[name](x, axis)) <= 1
    if m is not None:
        _, expected_m, expected_d = getattr(xla, name)(x, None, None, axes=axis, dtype=dtype, return_state=True)
        finite = np.isfinite(expected_d)
        np.testing.assert_array_equal(np.isnan(d), np.isnan(expected_d))
        has_maximum = finite & (expected_d > 0)  # of nothing that is there any finite `m` will do
        np.testing.assert_array_equal(m[has_maximum], expected_m[has_maximum])
        np.testing.assert_allclose(d[finite], expected_d[finite], rtol=1e-5)


MASKS = [
    ((2, 3, 2, 67), (2, 3, 2, 67), (3,)),
    ((2, 3, 2, 67), (1, 3, 1, 67), (3,)),
    ((2, 3, 2, 67), (2, 1, 2, 1), (3,)),
    ((2, 3, 2, 67), (1, 1, 1, 1), (3,)),
    ((1, 2, 5, 20), (1, 2, 1, 20), (2, 3)),
    ((1, 2, 5, 20), (1, 1, 5, 1), (1, 2)),
    ((1, 70, 2, 3), (1, 70, 1, 3), (1,)),
    ((2, 2, 7, 17), (2, 1, 7, 1), (2,)),
]


@pytest.mark.parametrize(("shape", "mask_shape", "axis"), MASKS, ids=cases.ident)
@pytest.mark.parametrize("name", cases.OPS)
def test_masks(target, name, shape, mask_shape, axis):
    where = np.random.default_rng(0).random(mask_shape) < 0.5
    where[0, 0, 0] = False
    axis = tuple(1 + np.array(axis))
    x = stacked(shape, "float32", ["normal", "some -inf", "extremes"])
    truth = TRUTH[name](x, axis, where)
    if where.shape == shape:
        x[:, ~where] = np.nan  # what is masked may hold anything
    assert oracle.error(forward(name, x, axis, "float32", target, where[None])[0], truth) <= 1
    nothing = forward(name, stacked(shape, "float32", ["one NaN"]), axis, "float32", target, np.zeros_like(where)[None])[0]
    np.testing.assert_array_equal(nothing, {"softmax": 0.0}.get(name, -np.inf))


@pytest.mark.parametrize(("dtype", "result"), [("float32", "bfloat16"), ("bfloat16", "float32"), ("float16", "float16")])
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_scale_and_result_dtype(target, name, dtype, result):
    x = stacked((6, 1, 70), dtype, ["wide", "offset of 1e4"])
    scale = np.array([0.125, -3, 0, 1, 0.5, -0.1], np.float32).reshape(1, 6, 1, 1)
    for where in (None, np.random.default_rng(0).random((1, 1, 1, 70)) < 0.7):
        for factor in (scale, scale[:, 1:2]):
            y = forward(name, x, -1, result, target, where, factor)[0]
            assert y.dtype == jnp.dtype(result)
            assert oracle.error(y, TRUTH[name](x, -1, where, factor)) <= 1


DERIVATIVES = {
    "log_softmax_jvp": oracle.log_softmax_tangent,
    "log_softmax_vjp": oracle.log_softmax_cotangent,
    "logsumexp_jvp": oracle.logsumexp_tangent,
    "logsumexp_vjp": oracle.logsumexp_cotangent,
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("shape", "axis", "dtype"),
    [((3, 1), 1, "float32"), ((2, 157), 1, "float32"), ((1, 67, 3), 1, "bfloat16"), ((1, 40, 17), 1, "float16")],
    ids=cases.ident,
)
@pytest.mark.parametrize("name", ["softmax_jacobian", *DERIVATIVES])
def test_derivatives(target, name, dtype, shape, axis, masked):
    scale = -0.3 if masked and not name.startswith("logsumexp") else None
    rng = np.random.default_rng(1)
    kinds = [
        "normal",
        "wide",
        "offset of 1e4",
        "outliers",
        "equal",
        *(["some -inf"] if scale is None and shape[-1] > 1 else []),
    ]
    x, axis = stacked(shape, dtype, kinds), axis + 1
    where = rng.random(x.shape) < 0.6 if masked else None
    factor = None if scale is None else np.full((1,) * x.ndim, scale, np.float32)
    params = {"axes": (axis,), "dtype": jnp.dtype(dtype)}
    t = rng.standard_normal(x.shape).astype(jnp.dtype(dtype))
    if name == "softmax_jacobian":
        truth = oracle.softmax_derivative(x, t, axis, where, scale, saved=dtype)
        y = np.array(xla.softmax(x, where, factor, **params))
        t = np.where(y == 0, np.nan, t).astype(t.dtype)
        (actual,) = computed(name, {"y": y, "t": t, "scale": factor}, target, **params)
    else:
        if name == "logsumexp_vjp":
            t = np.take(t, [0], axis)
        options = {} if name.startswith("logsumexp") else {"scale": scale}
        truth = DERIVATIVES[name](x, np.squeeze(t, axis) if name == "logsumexp_vjp" else t, axis, where, **options)
        if where is not None:
            x = np.where(where, x, np.asarray(np.nan, x.dtype))
            t = t if name == "logsumexp_vjp" else np.where(where, t, np.asarray(np.nan, t.dtype))
        _, m, d = xla.log_softmax(x, where, factor, return_state=True, **params)
        operands = {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": factor}
        (actual,) = computed(name, operands, target, scale_tangent=True, **params)
        actual = np.squeeze(actual, axis) if name == "logsumexp_jvp" else actual
    assert actual.dtype == t.dtype
    assert oracle.error(actual, truth) <= 1


@pytest.mark.parametrize("name", ["logsumexp_jvp", "logsumexp_vjp"])
@pytest.mark.parametrize("scale_tangent", [False, True])
def test_derivatives_of_logsumexp_multiply_with_a_scale_if_asked(target, name, scale_tangent):
    """Second derivatives of log_softmax need them."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 157)).astype(np.float32)
    scale, params = np.full((1, 1), -0.3, np.float32), {"axes": (1,), "dtype": jnp.dtype("float32")}
    _, m, d = xla.log_softmax(x, None, scale, return_state=True, **params)
    t = rng.standard_normal((3, 1) if name == "logsumexp_vjp" else x.shape).astype(np.float32)
    operands = {"x": x, "m": np.array(m), "d": np.array(d), "t": t, "scale": scale}
    (actual,) = computed(name, operands, target, scale_tangent=scale_tangent, **params)
    expected = getattr(xla, name)(**operands, where=None, scale_tangent=scale_tangent, **params)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", cases.OPS)
def test_rows_that_hurt_are_those_of_the_reference(target, name):
    x = np.random.default_rng(0).standard_normal((10, 300)).astype(np.float32)
    x[0], x[1, :150], x[2, 150:], x[3] = -np.inf, -np.inf, -np.inf, np.inf
    x[4, 5], x[5, 200], x[6, 250], x[7] = np.inf, np.inf, np.nan, np.nan
    x[8, 5], x[8, 200] = np.inf, -np.inf
    assert oracle.error(forward(name, x, -1, "float32", target)[0], TRUTH[name](x, -1)) <= 1
    for where in (np.ones((1, 300), bool), x < np.inf):
        assert oracle.error(forward(name, x, -1, "float32", target, where)[0], TRUTH[name](x, -1, where)) <= 1


@pytest.mark.parametrize("shape", [(100,), (200,), (60, 17)], ids=cases.ident)
@pytest.mark.parametrize("name", ["softmax", "softmax_jacobian"])
def test_the_bits_of_a_row_depend_on_no_other_row(target, name, shape):
    rows = cases.inputs((7, *shape), "float32")["wide"]

    def of(x):
        if name == "softmax":
            return forward(name, x, 1, "float32", target)[0]
        return computed(name, {"y": x, "t": x[..., ::-1].copy()}, target, axes=(1,), dtype=jnp.float32)[0]

    alone = of(rows[:1])
    for place in (1, 5):
        moved = rows.copy()
        moved[[0, place]] = moved[[place, 0]]
        np.testing.assert_array_equal(of(moved)[place], alone[0])


ONE, TWICE, SLICES_OF_ROWS = [("all", 1, False)], [("all", 1, True)], [("states", 2, True), ("finish", 2, True)]


@pytest.mark.parametrize(
    ("name", "way", "cols", "expected"),
    [
        ("softmax", "tiles", 200, ONE),
        ("softmax_jacobian", "tiles", 200, ONE),
        ("softmax", "twice", 100, TWICE),
        ("softmax_jacobian", "twice", 100, TWICE),
        ("softmax", "slices", 200, SLICES_OF_ROWS),
        ("softmax_jacobian", "slices", 200, SLICES_OF_ROWS),
        ("logsumexp", "slices", 200, SLICES_OF_ROWS),
        ("logsumexp_vjp", "slices", 200, [("all", 2, True)]),
    ],
)
def test_rows_are_spread_as_the_ways_say(name, way, cols, expected, monkeypatch):
    launches = []
    monkeypatch.setattr(custom_call, "launch", lambda *args, LAUNCH, **more: launches.append(LAUNCH) or [None] * 4)
    x = np.zeros((3, cols), np.float32)
    operands = {operand.name: x for operand in OPERATIONS[name].operands if operand.name not in ("where", "scale")}
    params = {"logsumexp": {"return_state": False}, "logsumexp_vjp": {"scale_tangent": True}}.get(name, {})
    computed(name, operands, spreading(way, monkeypatch), axes=(1,), dtype=jnp.float32, **params)
    assert [(launch.step, launch.n_slices, not launch.is_one_tile) for launch in launches] == expected


@pytest.mark.parametrize("shape", [(3, 130), (1, 40, 17)], ids=cases.ident)
def test_offsets_of_64_bits(target, shape, monkeypatch):
    monkeypatch.setattr(row_launch, "_WIDE", 0)
    x = cases.inputs(shape, "float32")["wide"]
    where = np.random.default_rng(0).random(shape) < 0.5
    assert oracle.error(forward("softmax", x, 1, "float32", target, where)[0], oracle.softmax(x, 1, where)) <= 1


# The twin of the monoid.

WIDTH = 16


@triton.jit
def states(x, size, out_m, out_d, WIDTH: tl.constexpr):
    """The state of `[2, 2, WIDTH]` scores made in four ways: lifted, pushed, merged, and merged along an axis."""
    rows, columns = tl.arange(0, 2), tl.arange(0, WIDTH)
    size = tl.load(size + rows)
    left = tl.load(x + rows[:, None] * 2 * WIDTH + columns[None, :])
    right = tl.load(x + rows[:, None] * 2 * WIDTH + WIDTH + columns[None, :])
    both = tl.load(x + rows[:, None] * 2 * WIDTH + tl.arange(0, 2 * WIDTH)[None, :])
    m, d = twin.lift(both, size)
    tl.store(out_m + rows, m)
    tl.store(out_d + rows, d)
    left_m, left_d = twin.lift(left, size)
    m, d = twin.push(left_m, left_d, right, size)
    tl.store(out_m + 2 + rows, m)
    tl.store(out_d + 2 + rows, d)
    right_m, right_d = twin.lift(right, size)
    m, d = twin.merge(left_m, left_d, right_m, right_d, size)
    tl.store(out_m + 4 + rows, m)
    tl.store(out_d + 4 + rows, d)
    is_left = tl.arange(0, 2)[None, :] == 0
    m, d = twin.merge_along(
        tl.where(is_left, left_m[:, None], right_m[:, None]), tl.where(is_left, left_d[:, None], right_d[:, None]), size
    )
    tl.store(out_m + 6 + rows, m)
    tl.store(out_d + 6 + rows, d)


HALVES = ("normal", "far", "-inf", "one -inf", "+inf", "NaN")


def half(kind):
    scores = np.random.default_rng(len(kind)).standard_normal((2, WIDTH)).astype(np.float32) * 10
    if kind == "far":
        return scores - 1e4
    if kind == "-inf":
        return np.full_like(scores, -np.inf)
    if kind != "normal":
        scores[:, 3] = {"one -inf": -np.inf, "+inf": np.inf, "NaN": np.nan}[kind]
    return scores


@pytest.mark.parametrize("size", [1.0, 0.3, 0.0])
def test_the_monoid_is_that_of_online(size):
    for left, right in itertools.product(HALVES, repeat=2):
        x, sizes = np.concatenate([half(left), half(right)], 1), np.full(2, size, np.float32)
        results = [jax.ShapeDtypeStruct((4, 2), np.float32)] * 2
        m, d = triton_kernels.run(states, [x, sizes], results, programs=1, WIDTH=WIDTH)
        expected = online.lift(jnp.asarray(x), scale=jnp.asarray(sizes))
        for way in range(4):
            m[way][np.isnan(expected.d)] = np.asarray(expected.m)[np.isnan(expected.d)]  # then `m` does not matter
            np.testing.assert_array_equal(m[way], expected.m, err_msg=f"{left} {right} {way}")
            np.testing.assert_allclose(d[way], expected.d, rtol=1e-6, err_msg=f"{left} {right} {way}")


@triton.jit
def states_log2(x, sink, out, weights, SCALE: tl.constexpr, HEADROOM: tl.constexpr, UNIT: tl.constexpr, WIDTH: tl.constexpr):
    """The state of a sink and two blocks of `WIDTH` scores, the factor and the weights of the second, and log-sum-exp."""
    rows, columns = tl.arange(0, 2), tl.arange(0, WIDTH)
    m, d = twin.lift_log2(tl.load(sink + rows), HEADROOM, UNIT)
    for k in tl.static_range(2):
        scores = tl.load(x + rows[:, None] * 2 * WIDTH + k * WIDTH + columns[None, :])
        m, d, factor, weight = twin.push_log2(m, d, scores, SCALE, HEADROOM, UNIT)
    tl.store(out + rows, m)
    tl.store(out + 2 + rows, d)
    tl.store(out + 4 + rows, factor)
    tl.store(out + 6 + rows, twin.lse_log2(m, d, UNIT))
    tl.store(weights + rows[:, None] * WIDTH + columns[None, :], weight)


@pytest.mark.parametrize(("scale", "headroom", "unit"), [(0.2, 0.0, 1.0), (0.2, 13.0, 1.0), (1.0, 13.0, online._LOG2E)])
def test_the_monoid_in_powers_of_two_is_that_of_online(scale, headroom, unit):
    sink = np.array([-np.inf, 0.5], np.float32)
    for left, right in itertools.product(HALVES, repeat=2):
        x = np.concatenate([half(left), half(right)], 1)
        results = [jax.ShapeDtypeStruct(shape, np.float32) for shape in ((4, 2), (2, WIDTH))]
        constants = {"SCALE": scale, "HEADROOM": headroom, "UNIT": unit, "WIDTH": WIDTH}
        (m, d, factor, lse), weights = triton_kernels.run(states_log2, [x, sink], results, programs=1, **constants)
        state = online.lift_log2(jnp.asarray(sink), headroom=headroom, unit=unit)
        for k in range(2):
            scores = jnp.asarray(x[:, k * WIDTH : (k + 1) * WIDTH])
            state, *expected = online.push_log2(state, scores, scale, headroom=headroom, unit=unit)
        expected = [state.m, state.d, *expected, online.lse_log2(state, unit=unit)]
        seen = ~np.isnan(state.d)
        np.testing.assert_array_equal(~np.isnan(d), seen)  # where it is NaN, the others do not matter
        for own, other in zip([m, d, factor, weights, lse], expected, strict=True):
            np.testing.assert_allclose(own[seen], other[seen], rtol=2e-6, err_msg=f"{left} {right}")
