"""Log-probabilities of chosen classes and entropies: to float64's, on the reference and on emulated kernels."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

from ..support import cases, oracle
from ..support.cross_entropy.cases import labelled
from ..support.cross_entropy.oracle import log_probs as truth
from ..support.emulator import emulating
from ..support.meshes import make_mesh

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


def given(shape, dtype, kinds, axis=-1, where=None):
    """Returns logits of some kinds along the first axis, ids that the mask shows, and cotangents of the three results."""
    parts = cases.inputs((shape[0] // len(kinds), *shape[1:]), dtype)
    x, ids = np.concatenate([parts[kind] for kind in kinds]), labelled(shape, axis)
    seen = np.isfinite(x.astype(np.float64)) & (True if where is None else where)
    ids = np.where(np.squeeze(np.take_along_axis(seen, np.expand_dims(ids, axis), axis), axis), ids, np.argmax(seen, axis))
    rng = np.random.default_rng(2)
    return x, ids.astype(np.int32), tuple(rng.normal(size=ids.shape).astype(np.float32) for _ in range(3))


@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("options", OPTIONS)
def test_results_and_gradients_of_the_reference(options, dtype):
    shape = (6 * len(KINDS), 300)
    where, scale, cap = options_of(options, shape)
    x, ids, cotangents = given(shape, dtype, KINDS, where=where)
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
    kinds = KINDS if cols < 5000 else KINDS[1:3]
    shape = (len(kinds), cols)
    where, scale, cap = options_of(options, shape)
    run = functools.partial(results_and_gradient, implementation="mosaic")
    with emulating() as ran:
        check(*given(shape, dtype, kinds, where=where), -1, where, scale, cap, run)
    assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize("options", ["plain", "scales"])
@pytest.mark.parametrize(("cols", "dtype"), [(2056, "bfloat16"), (4096, "bfloat16"), (3001, "bfloat16"), (2100, "float16")])
def test_warps_that_hold_rows_in_pieces_of_code(cols, dtype, options):
    """Whole rows, rows that end inside a step, and rows through shared memory."""
    where, scale, cap = options_of(options, (8, cols))
    kinds = [*KINDS[1:3], "some -inf", "equal"]
    run = functools.partial(results_and_gradient, implementation="mosaic")
    with emulating() as ran:
        check(*given((8, cols), dtype, kinds, where=where), -1, where, scale, cap, run)
    assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize(("options", "dtype", "cols"), [("scales", "float32", 7), ("where", "bfloat16", 300)])
def test_kernels_along_another_axis(options, dtype, cols):
    shape = (2, cols, 24)
    where, scale, cap = options_of(options, shape, 1)
    run = functools.partial(results_and_gradient, implementation="mosaic")
    with emulating() as ran:
        check(*given(shape, dtype, ("wide",), 1, where), 1, where, scale, cap, run)
    assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize("scale", [None, 2.7, -0.3, 0.0])
@pytest.mark.parametrize(
    ("cols", "dtype"), [(7, "float32"), (5000, "bfloat16"), (2056, "bfloat16"), (20544, "float16"), (20544, "float32")]
)
def test_kernels_of_scores_that_hurt(cols, dtype, scale):
    """Scores at the ends of the range, further apart than exponents, and ties: alone, and beside ordinary scores."""
    most = float(np.finfo(dtype).max) if dtype == "float16" else float(jnp.finfo(dtype).max)
    x = np.zeros((12, cols))
    x[1:4] = np.array([-most, most, most * 0.7])[:, None]
    x[4:8, ::2] = -most
    x[5, 1], x[6, 3], x[7, 1::2] = most, 1e4, 1e4 * (1 + 2.0**-7)
    x[6, 1::2], x[8] = 1e4, np.linspace(9990, 1e4, cols)  # whose maximum grows along the row
    x[9:, ::2], x[10, 1::2], x[11, 1::2] = -np.inf, -most, -2e30 if dtype != "float16" else -6e4
    x, ids = x.astype(dtype), np.array([0, 1, 2, 0, 1, 3, 3, 0, 1, 1, 3, 5], np.int32)
    cotangents = tuple(np.random.default_rng(2).normal(size=12).astype(np.float32) for _ in range(3))
    scale = None if scale is None else np.full((12, 1), scale, np.float32)
    with emulating() as ran:
        check(x, ids, cotangents, -1, None, scale, None, functools.partial(results_and_gradient, implementation="mosaic"))
    assert set(ran) == {FORWARD, BACKWARD}


@pytest.mark.parametrize("cols", [1, 300, 12501])
def test_a_class_alone_has_no_entropy_in_kernels(cols):
    """The largest score has the exponent 0 and the weight 1, exactly, although both are computed in base 2."""
    x = np.full((32, cols), -np.inf, np.float32)
    x[:, 0] = [3.1, -1e4, 1e-30, 1e30, *np.linspace(100, 3000, 28)]
    scale = np.linspace(0.3, 2.9, 32, dtype=np.float32)
    with emulating() as ran:
        found = jaxsoftmax.log_probs(x, np.zeros(32, np.int32), scale=scale, return_entropy=True, implementation="mosaic")
    assert set(ran) == {FORWARD}
    np.testing.assert_array_equal(found, np.zeros((2, 32)))


@pytest.mark.parametrize("scale", [np.nan, np.inf, -np.inf])
def test_scales_that_are_not_finite_give_nan_in_kernels(scale):
    x = np.stack([np.zeros(100), np.arange(100), np.full(100, -3e38)]).astype(np.float32)
    with emulating() as ran:
        log_p, entropy = ours(x, np.zeros(3, np.int32), np.full(3, scale, np.float32), implementation="mosaic")[:2]
    assert set(ran) == {FORWARD}
    expected = ours(x, np.zeros(3, np.int32), np.full(3, scale, np.float32), implementation="xla")[:2]
    for found, other in zip((log_p, entropy), expected, strict=True):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(other))


def test_a_scale_of_0_hides_nothing_that_is_no_number_in_kernels():
    x = np.ones((4, 100), np.float32)
    x[0, 3], x[1, 3], x[2, 3] = np.nan, np.inf, -np.inf
    scale = np.zeros(4, np.float32)

    def gradient(x, implementation):
        return jax.grad(lambda x: jnp.sum(jaxsoftmax.entropy(x, scale=scale, implementation=implementation)))(x)

    with emulating() as ran:
        found = gradient(x, "mosaic")
    assert set(ran) == {FORWARD, BACKWARD}
    np.testing.assert_array_equal(found, gradient(x, "xla"))
    assert np.isnan(found[:3]).any(-1).all()


# Special rows and arguments.


def test_rows_without_entropy():
    """Of one class, of one score that is not -inf, of nothing that takes part, and of no class at all."""
    x = np.array([[3.0, -np.inf, -np.inf], [0.0, 1.0, 2.0]], np.float32)
    where = np.array([[True, True, True], [False, False, False]])
    f = functools.partial(jaxsoftmax.entropy, where=where)
    np.testing.assert_array_equal(f(x), [0, 0])
    np.testing.assert_array_equal(jax.grad(lambda x: jnp.sum(f(x)))(x), np.zeros((2, 3)))
    np.testing.assert_array_equal(jaxsoftmax.entropy(np.ones((4, 1))), np.zeros(4))
    np.testing.assert_array_equal(jaxsoftmax.entropy(np.ones((2, 0))), np.zeros(2))
    assert np.isnan(jaxsoftmax.entropy(np.full((1, 3), -np.inf)))


def test_entropies_over_several_axes():
    x = cases.inputs((3, 4, 5), "float32")["normal"]
    expected = jaxsoftmax.entropy(np.moveaxis(x, 1, 0).reshape(4, 15))
    np.testing.assert_allclose(jaxsoftmax.entropy(x, (0, 2)), expected, rtol=1e-6)
    np.testing.assert_allclose(jaxsoftmax.entropy(x, None), jaxsoftmax.entropy(x.reshape(-1)), rtol=1e-6)


def plain(x, ids, scale=None, axis=-1):
    """Log-probabilities, entropies and log-sum-exps as their formulas say them."""
    x = jnp.moveaxis(x, axis, -1)
    s = x if scale is None else x * jnp.expand_dims(scale, -1)
    log_p = jax.nn.log_softmax(s)
    chosen = jnp.take_along_axis(log_p, ids if ids.ndim == x.ndim else ids[..., None], -1).reshape(ids.shape)
    return chosen, -jnp.sum(jnp.exp(log_p) * log_p, -1), jax.nn.logsumexp(s, -1)


def ours(x, ids, scale=None, **options):
    return jaxsoftmax.log_probs(x, ids, scale=scale, return_entropy=True, return_lse=True, **options)


def total(f):
    """A function that is not linear in the results of `f`."""
    return lambda *arrays: sum(jnp.sum(jnp.sin((k + 1) * part)) for k, part in enumerate(f(*arrays)))


DERIVED = {
    "values": lambda f: f,
    "gradients": lambda f: jax.grad(total(f), (0, 1)),
    "tangents": lambda f: lambda x, scale: jax.jvp(f, (x, scale), (jnp.cos(x), jnp.sin(scale)))[1],
    "second derivatives": lambda f: lambda *given: jax.jvp(jax.grad(total(f), (0, 1)), given, tuple(map(jnp.cos, given)))[1],
    "logits mapped alone": lambda f: lambda x, scale: jax.vmap(lambda x: f(x, scale))(jnp.stack([x, -x])),
    "scales mapped alone": lambda f: lambda x, scale: jax.vmap(lambda scale: f(x, scale))(jnp.stack([scale, -scale])),
    "checkpointed": lambda f: jax.grad(total(jax.checkpoint(f)), (0, 1)),
}


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("name", DERIVED)
def test_transformations(name, n):
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((4, 9)), rng.standard_normal(4)
    ids = rng.integers(0, 9, (4, n) if n else 4)
    found, expected = (jax.jit(DERIVED[name](lambda x, scale, f=f: f(x, ids, scale)))(x, scale) for f in (ours, plain))
    oracle.assert_same_in_float64(found, expected)


def test_ids_that_are_no_class_or_hidden():
    x = np.zeros((2, 3), np.float32)
    ids = np.array([[0, 3], [-1, 1]])
    np.testing.assert_allclose(np.exp(jaxsoftmax.log_probs(x, ids)), [[1 / 3, np.nan], [np.nan, 1 / 3]], rtol=1e-6)
    where = np.array([[True, True, False], [False, True, True]])
    np.testing.assert_allclose(np.exp(jaxsoftmax.log_probs(x, np.array([2, 1]), where=where)), [0, 0.5], rtol=1e-6)
    np.testing.assert_allclose(np.exp(jaxsoftmax.log_probs(x, np.array([[0, 2], [0, 1]]), where=where)), [[0.5, 0], [0, 0.5]])
    rows = np.array([True, False])
    log_p, entropy = jaxsoftmax.log_probs(x, np.array([0, 0]), where=rows, return_entropy=True)
    np.testing.assert_allclose([log_p[0], entropy[0]], [-np.log(3), np.log(3)], rtol=1e-6)
    np.testing.assert_array_equal([log_p[1], entropy[1]], [0, 0])


def test_several_ids_are_as_each_alone():
    """Values and derivatives where ids tie, one is hidden and the largest, scores are large, -inf, NaN or 0 times the scale."""
    x = np.float32([[0, 0, 0, 0], [1e30, 1, 2, 3], [1e6 + 1, 1e6 + 3, 1e6 + 2.5, 0], [-np.inf, 0, 1, 2], [np.nan, 0, 1, 2]])
    ids, scale = np.array([[0, 1, 2, 1]] * 4 + [[1, 2, 3, -1]]), np.float32([1, -0.5, 0.7, 2, 0])
    where = np.array([[True] * 4, [False, True, True, True], [True] * 4, [True] * 4, [False, True, True, True]])

    def several(x, scale):
        return jaxsoftmax.log_probs(x, ids, where=where, scale=scale)

    def each(x, scale):
        return jnp.stack([jaxsoftmax.log_probs(x, ids[:, k], where=where, scale=scale) for k in range(4)], 1)

    np.testing.assert_allclose(several(x, scale), each(x, scale), rtol=1e-6, atol=1e-6)
    weights = np.random.default_rng(0).normal(size=ids.shape).astype(np.float32)

    def weighted(f):
        def of(*given):
            log_p = f(*given)
            return jnp.sum(jnp.where(jnp.isfinite(log_p), weights * log_p, 0))

        return jax.grad(of, (0, 1))(x, scale)

    (by_x, by_scale), (expected, expected_by_scale) = weighted(several), weighted(each)
    np.testing.assert_allclose(by_x, expected, rtol=1e-5, atol=1e-6)
    # Products with the scores of 1e6 cancel in that by the scale.
    np.testing.assert_allclose(np.delete(by_scale, 2), np.delete(expected_by_scale, 2), rtol=1e-5, atol=1e-6)
    assert np.all(np.isfinite(by_x))
    assert np.all(np.isfinite(by_scale))


def test_ids_over_several_axes():
    x = cases.inputs((2, 3, 4), "float32")["normal"]
    for where in (np.array([[[True, False, True, True]]]), np.ones((2, 3, 1), bool) & (np.arange(3) != 1)[:, None]):
        hidden = np.where(np.broadcast_to(where, x.shape), x, -np.inf).reshape(2, 12)
        expected = np.asarray(jax.nn.log_softmax(hidden))
        ids = np.tile(np.arange(12), (2, 1))
        found = jaxsoftmax.log_probs(x, ids, axis=(1, 2), where=where)
        np.testing.assert_allclose(found, expected, rtol=1e-5)
        np.testing.assert_allclose(jaxsoftmax.log_probs(x, ids[:, 5], axis=(1, 2), where=where), expected[:, 5], rtol=1e-5)
        np.testing.assert_allclose(jaxsoftmax.log_probs(x, ids[:, 1], axis=(1, 2), where=where), expected[:, 1], rtol=1e-5)


def test_few_classes_rows_and_ids():
    np.testing.assert_array_equal(
        jaxsoftmax.log_probs(np.zeros((2, 1)), np.array([[0, 5], [5, 0]])), [[0, np.nan], [np.nan, 0]]
    )
    np.testing.assert_array_equal(jaxsoftmax.log_probs(np.array([[2.0]]), np.array([0, 9]), axis=None), [0, np.nan])
    assert jaxsoftmax.log_probs(np.zeros((2, 3)), np.zeros((2, 0), int)).shape == (2, 0)
    assert jaxsoftmax.log_probs(np.zeros((0, 5)), np.zeros((0, 2), int)).shape == (0, 2)
    assert jaxsoftmax.entropy(np.zeros((0, 5, 2)), axis=(1, 2)).shape == (0,)
    assert np.all(np.isnan(jaxsoftmax.log_probs(np.zeros((2, 0)), np.zeros(2, int))))


def test_nothing_is_nan_behind_a_mask_of_rows():
    with jax.debug_nans(True):
        options = {"where": np.array([True, False]), "return_entropy": True, "return_lse": True}
        _, entropies, lse = jaxsoftmax.log_probs(np.zeros((2, 3), np.float32), np.zeros(2, int), **options)
    np.testing.assert_allclose(entropies, [np.log(3), 0], rtol=1e-6)
    np.testing.assert_allclose(lse, [np.log(3), -np.inf], rtol=1e-6)


def test_labels_of_a_scaled_loss():
    x, labels = cases.inputs((5, 20), "float32")["normal"], labelled((5, 20))
    scale = np.linspace(-1, 2, 5, dtype=np.float32)
    losses = jaxsoftmax.cross_entropy(x, labels, scale=scale)
    np.testing.assert_allclose(losses, -jaxsoftmax.log_probs(x, labels, scale=scale), rtol=1e-6)
    of_weights = jaxsoftmax.cross_entropy(x, np.eye(20, dtype=np.float32)[labels], scale=scale)
    np.testing.assert_allclose(of_weights, losses, rtol=1e-5)
    by_scale = jax.grad(lambda scale: jnp.sum(jaxsoftmax.cross_entropy(x.at[0, 1].set(-jnp.inf), weights, scale=scale)))
    x, weights = jnp.asarray(x), np.eye(20, dtype=np.float32)[np.where(labels == 1, 2, labels)]
    assert np.all(np.isfinite(by_scale(jnp.abs(scale))))
    smoothed = jaxsoftmax.cross_entropy(x, labels, scale=scale, label_smoothing=0.1)
    np.testing.assert_allclose(smoothed, jaxsoftmax.cross_entropy(x * scale[:, None], labels, label_smoothing=0.1), rtol=1e-5)


X, IDS = np.zeros((2, 3), np.float32), np.zeros(2, np.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"ids": np.zeros(2)}, TypeError, "log_probs: ids must be integers, got float"),
        ({"ids": np.zeros(3, int)}, ValueError, r"log_probs: ids must have the shape \(2,\) of rows, .* got \(3,\)"),
        ({"ids": np.zeros((2, 1, 1), int)}, ValueError, r"ids must have the shape \(2,\) of rows"),
        ({"scale": np.ones(3)}, ValueError, r"log_probs: scale must be a scalar, or broadcast to rows of shape \(2,\)"),
        ({"scale": True}, TypeError, "log_probs: scale must be a real number, or one for each row, got bool"),
        ({"logits_soft_cap": 0}, ValueError, "log_probs: logits_soft_cap must be"),
        ({"return_entropy": 1}, TypeError, "log_probs: return_entropy must be True or False"),
        ({"logits": np.zeros((2, 3), int)}, TypeError, "log_probs: logits must be floating"),
        ({"where": np.ones((2, 3))}, TypeError, "log_probs: where must be boolean"),
        ({"axis": ()}, ValueError, r"log_probs: axis must name an axis of logits, got \(\)"),
        ({"implementation": "cuda"}, ValueError, "log_probs: implementation must be None or one of"),
    ],
)
def test_bad_arguments(arguments, error, words):
    with pytest.raises(error, match=words):
        jaxsoftmax.log_probs(**{"logits": X, "ids": IDS} | arguments)


# Classes that devices share.


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
@pytest.mark.parametrize("n", [0, 2])
def test_classes_in_a_shard_map(check_vma, n):
    rng = np.random.default_rng(0)
    x, scale = rng.standard_normal((8, 64)), rng.standard_normal(8)
    x[0, 8:32], x[1, :48], scale[:2] = -np.inf, -1000, 0.5
    ids = rng.integers(0, 64, (8, n) if n else 8)
    ids[0] = 3
    with jax.set_mesh(make_mesh(AxisType.Auto)):
        specs = P("data", "model"), P("data"), P("data")
        f = jax.shard_map(
            functools.partial(ours, axis_name="model"), in_specs=specs, out_specs=(P("data"),) * 3, check_vma=check_vma
        )
        both = jax.jit(lambda *given: (f(*given), jax.grad(lambda x, scale: total(f)(x, given[1], scale), (0, 1))(x, given[2])))
        found, gradients = both(x, ids, scale)
    expected = jax.jit(ours)(x, ids, scale)
    oracle.assert_same_in_float64(found, expected)
    wanted = jax.jit(jax.grad(lambda x, scale: total(ours)(x, ids, scale), (0, 1)))(x, scale)
    oracle.assert_same_in_float64(gradients, wanted)


@pytest.mark.parametrize("check_vma", [True, False], ids=["checked", "unchecked"])
def test_one_class_on_each_device(check_vma):
    mesh = make_mesh(AxisType.Auto)
    n = mesh.shape["model"]
    x, where = np.arange(2 * n, dtype=np.float32).reshape(2, n), np.array([[True] * n, [False] + [True] * (n - 1)])
    ids = np.array([[0, n - 1], [0, n - 1]])
    with jax.set_mesh(mesh):
        f = functools.partial(jaxsoftmax.log_probs, axis_name="model")
        specs = P(None, "model"), P(), P(None, "model")
        several = jax.shard_map(lambda x, i, w: f(x, i, where=w), in_specs=specs, out_specs=P(), check_vma=check_vma)
        found = jax.jit(several)(x, ids, where)
        alone = jax.jit(several)(x, ids[:, 1], where)
    expected = jaxsoftmax.log_probs(x, ids, where=where)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_allclose(alone, expected[:, 1], rtol=1e-5)


@pytest.mark.usefixtures("hollow_kernels", "x64")
@pytest.mark.parametrize("n", [0, 3])
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_classes_that_are_sharded(kind, n):
    rng = np.random.default_rng(0)
    x, scale, ids = rng.standard_normal((8, 64)), rng.standard_normal(8), rng.integers(0, 64, (8, n) if n else 8)
    with jax.set_mesh(make_mesh(kind)) as _:
        mesh = make_mesh(kind)
        placed = jax.device_put(x, NamedSharding(mesh, P("data", "model")))
        along = NamedSharding(mesh, P("data"))
        run = jax.jit(lambda x, ids, scale: (ours(x, ids, scale), jax.grad(lambda x: total(ours)(x, ids, scale))(x)))
        found = run(placed, jax.device_put(ids, along), jax.device_put(scale, along))
    expected = jax.jit(lambda x: (ours(x, ids, scale), jax.grad(lambda x: total(ours)(x, ids, scale))(x)))(x)
    oracle.assert_same_in_float64(jax.device_get(found), expected)


# What runs.


def test_kernels_run_unless_they_cannot():
    logits, ids = jax.ShapeDtypeStruct((64, 50257), jnp.bfloat16), jax.ShapeDtypeStruct((64,), jnp.int32)

    def loss(logits, ids, **options):
        return sum(map(jnp.sum, jaxsoftmax.log_probs(logits, ids, return_entropy=True, **options)))

    decisions = jaxsoftmax.explain(jax.value_and_grad(functools.partial(loss, scale=0.5)), logits, ids, gpu="h100")
    assert [decision.primitive for decision in decisions] == ["cross_entropy", "cross_entropy_vjp"]
    cases.assert_all_run_on("mosaic", decisions)
    (decision,) = jaxsoftmax.explain(loss, logits, ids, gpu="a100")
    assert decision.implementation == "xla"
    long = jax.ShapeDtypeStruct((1, 2**20), jnp.float32)
    masked = functools.partial(jaxsoftmax.explain, lambda x, where: jaxsoftmax.entropy(x, where=where), gpu="h100")
    (decision,) = masked(long, long.update(dtype=bool))
    assert ("mosaic", "no kernel computes the entropy for rows of 1048576 entries") in decision.refusals


# On a GPU.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("dtype", cases.DTYPES)
@pytest.mark.parametrize("cols", [1, 2, 130, 2000, 2047, 3000, 4095, 4096, 9001, 32768, 50257, 151936])
def test_native_results_and_gradients(cols, dtype):
    for options in OPTIONS:
        kinds = KINDS[:5] if options == "where" else KINDS  # of few classes the mask might show -inf alone
        shape = (7 * len(kinds), cols)
        where, scale, cap = options_of(options, shape)
        run = jax.jit(functools.partial(results_and_gradient, implementation="mosaic"), static_argnums=(3, 6))
        if where is not None:
            where[:, 0] = True
        check(*given(shape, dtype, kinds, where=where), -1, where, scale, cap, run)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("cols", [2048, 2056, 4096, 5001])
def test_native_rows_of_little_but_infinity(cols):
    """The largest score is below -1e30, where the exponents of others are not all finite, or finite and the others are not."""
    x = np.full((6, cols), -np.inf, np.float32)
    x[0, 3], x[1, 1::2], x[2, 5::7], x[3], x[4, :2] = 1.5, -3.3e38, -2e30, -3.3e38, [0.5, -3e38]
    x = x.astype(jnp.bfloat16)
    ids, cotangents = np.array([3, 1, 5, 0, 0, 0], np.int32), tuple(np.ones((3, 6), np.float32))
    check(
        x[:5],
        ids[:5],
        tuple(c[:5] for c in cotangents),
        -1,
        None,
        None,
        None,
        functools.partial(results_and_gradient, implementation="mosaic"),
    )
    assert np.isnan(jaxsoftmax.entropy(x[5:], implementation="mosaic"))


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("shape", [(3, 7, 130), (2, 300, 24), (1, 5000, 256)], ids=str)
def test_native_rows_along_another_axis(shape):
    for options, dtype in zip(OPTIONS, ("float32", "bfloat16", "float16", "float32", "bfloat16"), strict=True):
        where, scale, cap = options_of(options, shape, 1)
        if where is not None:
            where[:, 0] = True
        run = functools.partial(results_and_gradient, implementation="mosaic")
        check(*given(shape, dtype, ("wide",), 1, where), 1, where, scale, cap, run)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(("cols", "dtype"), [(100, "float32"), (4096, "bfloat16"), (50257, "bfloat16"), (151936, "float32")])
def test_native_factors_in_front_are_taken(cols, dtype):
    x, ids, cotangents = given((14, cols), dtype, ("normal", "wide"))
    divisor = np.linspace(0.4, 2.9, 14, dtype=np.float32)[:, None]

    def f(x):
        scores = x.astype(jnp.float32) / divisor
        return jaxsoftmax.log_probs(scores, ids, return_entropy=True, return_lse=True, implementation="mosaic")

    def both(x):
        results, pull = jax.vjp(f, x)
        return *results, pull(cotangents)[0]

    assert [d.plan.endswith(", times a factor") for d in jaxsoftmax.explain(both, x)] == [True, True]
    log_p, entropy, lse, gradient = map(np.asarray, jax.jit(both)(x))
    expected = truth(oracle.to64(x) / divisor, ids)
    assert oracle.error(log_p, expected.log_p) <= 1
    assert oracle.error(entropy, expected.entropy) <= 1
    assert oracle.error(lse, expected.lse) <= 1
    of_scores = expected.gradient(*cotangents)
    assert oracle.error(gradient, oracle.Truth(of_scores.value / divisor, of_scores.budget / divisor)) <= 1
