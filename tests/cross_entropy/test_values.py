"""Values, gradients and edge cases of cross-entropy, against float64 and against optax."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax.ops.cross_entropy.xla import NO_ROW, factors

from ..support import cases, oracle
from ..support.cross_entropy.cases import FINITE, OPTIONS, labelled, loss, together, with_gradient, without_ignored
from ..support.cross_entropy.oracle import cross_entropy as truth


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("implementation", cases.implementations("cross_entropy"))
def test_losses_together_with_gradients(implementation, dtype, options):
    shape, options = (5, 1001), OPTIONS[options]
    f, labels = together(implementation, **options), labelled(shape)
    labels[2:4] = 1001, NO_ROW  # no class, and a row that does not count
    c = np.array([1, -0.5, 2, 0, 0], np.float32)
    arrays = cases.inputs(shape, dtype)
    cases.assert_ran(implementation, f, arrays["normal"], labels, c)
    for kind in (*FINITE, "some -inf"):
        expected = truth(arrays[kind], labels, **without_ignored(options))
        loss, gradient = f(arrays[kind], labels, c)
        assert (loss.dtype, gradient.dtype) == (jnp.float32, jnp.dtype(dtype))
        assert loss[3] == 0
        assert oracle.error(loss.at[3].set(np.nan), expected.loss) <= 1, kind
        if kind != "some -inf" or not options.get("label_smoothing"):  # the mean of -inf has no derivative
            assert oracle.error(gradient, expected.gradient(c)) <= 1, kind
        np.testing.assert_array_equal(gradient[3:], 0)


@pytest.mark.parametrize(
    ("implementation", "dtype", "options", "shape"),
    cases.crossed(
        "cross_entropy",
        cases.quick("float32", "bfloat16", slow=["float16"]),
        OPTIONS,
        cases.quick((5, 7), (4, 1001), slow=[(3, 1)]),
    ),
    ids=cases.ident,
)
def test_losses_and_gradients_are_within_the_budget(implementation, dtype, options, shape):
    options = OPTIONS[options]
    f, labels = with_gradient(implementation, **options), labelled(shape)
    c = np.random.default_rng(2).standard_normal(shape[:1]).astype(np.float32)
    arrays = cases.inputs(shape, dtype)
    cases.assert_ran(implementation, f, arrays["normal"], labels, c)
    for kind in (*FINITE, "some -inf"):
        expected = truth(arrays[kind], labels, **options)
        loss, lse, gradient = f(arrays[kind], labels, c)
        assert (loss.dtype, lse.dtype, gradient.dtype) == (jnp.float32, jnp.float32, jnp.dtype(dtype))
        assert oracle.error(loss, expected.loss) <= 1, kind
        assert oracle.error(lse, expected.lse) <= 1, kind
        if kind != "some -inf" or not options.get("label_smoothing"):  # the mean of -inf has no derivative
            assert oracle.error(gradient, expected.gradient(c)) <= 1, kind
    for kind in ("all -inf", "one +inf", "one NaN"):
        loss = f(arrays[kind], labels, c)[0]
        assert oracle.error(loss, truth(arrays[kind], labels, **options).loss) <= 1, kind


def assert_within_the_budget(implementation, dtype, shape, axis, where, seen, options):
    """Fails unless losses and gradients are those of what is seen."""
    labels, x = labelled(shape, axis), cases.inputs(shape, dtype)["wide"]
    c = np.random.default_rng(2).standard_normal(labels.shape).astype(np.float32)
    f = with_gradient(implementation, axis=axis, where=where, **options)
    cases.assert_ran(implementation, f, x, labels, c)
    expected = truth(x, labels, axis, seen, **options)
    loss, _, gradient = f(x, labels, c)
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1


@pytest.mark.parametrize(
    ("implementation", "dtype", "options", "mask"),
    cases.crossed(
        "cross_entropy",
        cases.quick("float32", slow=["bfloat16"]),
        ["plain", "all"],
        [(4, 3, 33), (1, 1, 33), (4, 3, 1), (4, 3), (33,)],
        by_turns=True,
    ),
    ids=cases.ident,
)
@pytest.mark.usefixtures("optimised")  # without, products and sums are rounded apart: up to 1.15 of the budget
def test_where(implementation, dtype, options, mask):
    shape, options = (4, 3, 33), OPTIONS[options]
    where = np.random.default_rng(0).random(mask) < 0.6
    if len(mask) == 3 and mask[0] > 1:
        where[1] = False  # rows with nothing to see
    seen = where[..., None] if mask == shape[:2] else where
    assert_within_the_budget(implementation, dtype, shape, -1, where, np.broadcast_to(seen, shape), options)


@pytest.mark.parametrize(
    ("implementation", "dtype", "options", "place"),
    cases.crossed(
        "cross_entropy",
        cases.quick("float32", slow=["bfloat16"]),
        ["plain", "all"],
        [((5, 70, 6), 1), ((70, 4), 0), ((2, 3, 4, 35), -2)],
        by_turns=True,
    ),
    ids=cases.ident,
)
def test_other_axes(implementation, dtype, options, place):
    shape, axis = place
    assert_within_the_budget(implementation, dtype, shape, axis, None, None, OPTIONS[options])


@pytest.mark.parametrize("implementation", cases.implementations("cross_entropy"))
def test_rows_that_do_not_count_may_hold_anything(implementation):
    x = np.array([[1, 2, 3], [np.nan, np.inf, 0], [np.inf, np.inf, np.inf], [-np.inf] * 3], np.float32)
    labels, c = np.array([2, -100, -100, -100]), np.ones(4, np.float32)
    options = {"ignore_index": -100, "z_loss": 0.1, "label_smoothing": 0.1, "logits_soft_cap": 4.0}
    f = with_gradient(implementation, **options)
    cases.assert_ran(implementation, f, x, labels, c)
    loss, _, gradient = f(x, labels, c)
    np.testing.assert_array_equal(loss[1:], 0)
    np.testing.assert_array_equal(gradient[1:], 0)
    assert oracle.error(loss[:1], truth(x[:1], labels[:1], **options).loss) <= 1
    loss, _, gradient = f(x, np.full(4, -100), c)  # all of them
    np.testing.assert_array_equal(loss, 0)
    np.testing.assert_array_equal(gradient, 0)


def test_factors_of_rows_that_do_not_count_are_0():
    """Whatever the log-sum-exp is. Of others they make the derivative of the loss, with smoothing and z-loss."""
    t, lse = jnp.array([0.0, 0.0, 2.0]), jnp.array([jnp.inf, jnp.nan, 3.0])
    found = factors(t, lse, 0.1, 0.5, 10)
    for name, of_row in (("a", 2 * (1 + 2 * 0.5 * 3)), ("b", -0.9 * 2), ("c", -0.1 / 10 * 2)):
        np.testing.assert_allclose(found[name], [0, 0, of_row], rtol=1e-6)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.uint32])
@pytest.mark.parametrize("implementation", cases.implementations("cross_entropy"))
def test_labels_that_are_no_class_give_nan_and_the_gradient_of_the_log_sum_exp(implementation, dtype):
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    labels = np.array([0, 39, 40, 127, 5], dtype)
    if np.dtype(dtype).kind == "i":
        labels[4] = -1
    c = np.ones(5, np.float32)
    f = with_gradient(implementation)
    cases.assert_ran(implementation, f, x, labels, c)
    loss, lse, gradient = f(x, labels, c)
    expected = truth(x, labels.astype(np.int64))
    np.testing.assert_array_equal(np.isnan(loss), np.isnan(expected.loss.value))
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(lse, expected.lse) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1


@pytest.mark.parametrize("classes", [100, 128, 256, 300])
def test_labels_of_any_integer_dtype(classes):
    linear, given = functools.partial(jaxsoftmax.linear_cross_entropy, reduction="none"), {}
    for dtype in (np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32):
        labels = np.unique(np.clip([0, 1, 99, 100, 127, 128, 255, 256, 299, 300], 0, min(np.iinfo(dtype).max, 300)))
        given[dtype.__name__] = np.resize(labels, 10).astype(dtype)
    x = np.random.default_rng(0).standard_normal((10, classes)).astype(np.float32)

    def both(x, labels):
        return jaxsoftmax.cross_entropy(x, labels), linear(x, np.eye(classes, dtype=np.float32), labels)

    results = jax.jit(lambda x, given: {name: both(x, labels) for name, labels in given.items()})(x, given)
    for name, (of_logits, of_linear) in results.items():
        assert oracle.error(of_logits, truth(x, given[name].astype(int)).loss) <= 1, name
        np.testing.assert_allclose(of_linear, of_logits, rtol=8 * oracle.EPS, err_msg=name)


def test_wide_labels_do_not_wrap():
    with jax.enable_x64(True):
        loss = jaxsoftmax.cross_entropy(np.zeros((2, 4), np.float32), np.array([2**32 + 1, 1]))
    np.testing.assert_array_equal(np.isnan(loss), [True, False])


def test_ignored_labels_may_be_the_largest_of_their_dtype():
    x, labels = np.ones((2, 4), np.float32), np.array([2**32 - 1, 1], np.uint32)
    loss = jaxsoftmax.cross_entropy(x, labels, ignore_index=2**32 - 1)
    np.testing.assert_array_equal(loss == 0, [True, False])


@pytest.mark.parametrize("ignored", [-1, 300, 2])
def test_ignored_labels_need_not_fit_the_dtype(ignored):
    x, labels = np.zeros((3, 4), np.float32), np.array([0, 1, 2], np.uint8)
    loss = jaxsoftmax.cross_entropy(x, labels, ignore_index=ignored)
    np.testing.assert_array_equal(loss == 0, [False, False, ignored == 2])


# Beside optax.


def of_optax(x, labels, **options):
    return optax.softmax_cross_entropy_with_integer_labels(x, labels, **options)


PAIR = jaxsoftmax.cross_entropy, of_optax


@pytest.mark.parametrize("axis", [-1, 0, 1, (1, 2), (2, 1), (0, 2)], ids=cases.ident)
def test_axes_are_those_of_optax(axis):
    shape = (4, 5, 6)
    axes = axis if isinstance(axis, tuple) else (axis % 3,)
    x = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    classes = np.prod([shape[a] for a in axes])
    labels = np.random.default_rng(1).integers(0, classes, [shape[a] for a in range(3) if a not in axes])
    where = np.random.default_rng(2).random(shape) < 0.7
    both = jax.jit(lambda *given: [[f(*given, axis=axis, where=mask) for f in PAIR] for mask in (None, where)])
    for actual, expected in both(x, labels):
        np.testing.assert_allclose(actual, expected, rtol=0, atol=64 * oracle.EPS)


EDGES = {
    "all -inf": [[-np.inf, -np.inf, -np.inf]],
    "+inf at the label": [[0.0, np.inf, 1.0]],
    "+inf elsewhere": [[np.inf, 0.0, 1.0]],
    "-inf at the label": [[0.0, -np.inf, 1.0]],
    "-inf elsewhere": [[-np.inf, 0.0, 1.0]],
    "NaN": [[np.nan, 0.0, 1.0]],
    "large": [[3e38, -3e38, 3e38]],
    "no rows": np.zeros((0, 3)),
}


@jax.jit
def pair_with_masks(x, labels):
    masks = [jnp.broadcast_to(np.array([where], bool), x.shape) for where in ([0, 0, 0], [1, 1, 0], [1, 0, 1])]
    return [[f(x, labels, where=mask) for f in PAIR] for mask in (None, *masks)]


@pytest.mark.parametrize("edge", EDGES)
def test_edge_cases_are_those_of_optax(edge):
    x = np.asarray(EDGES[edge], np.float32)
    whole, *masked = pair_with_masks(x, np.ones(x.shape[:1], np.int32))
    np.testing.assert_array_equal(*whole)
    for actual, expected in masked:
        np.testing.assert_allclose(actual, expected, rtol=4 * oracle.EPS, atol=4 * oracle.EPS)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize("where", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
def test_probabilities_as_labels_are_those_of_optax(smoothing, where):
    rng = np.random.default_rng(0)
    x, labels = 3 * rng.standard_normal((4, 6, 33)), rng.random((4, 6, 33))
    mask = rng.random(x.shape) < 0.7 if where and not smoothing else None

    def ours(x, labels):
        return jaxsoftmax.cross_entropy(x, labels, label_smoothing=smoothing, where=mask)

    def theirs(x, labels):
        labels = labels if not smoothing else (1 - smoothing) * labels + smoothing / 33
        return optax.softmax_cross_entropy(x, labels, where=mask)

    wanted = (0, 1) if mask is None else 0  # optax's of what is masked is NaN

    def derived(f, *given):
        return f(*given), jax.grad(lambda x, q: jnp.sum(jnp.sin(f(x, q))), wanted)(*given)

    actual, expected = jax.jit(lambda *given: [derived(f, *given) for f in (ours, theirs)])(x, labels)
    assert actual[0].shape == (4, 6)
    oracle.assert_same_in_float64(actual, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("shape", "of_labels", "axis", "mask"),
    [
        ((4, 7), (7,), -1, None),
        ((7,), (4, 7), -1, None),
        ((1,), (), -1, None),
        ((3, 1, 7), (5, 7), 2, (3, 5)),
        ((3, 4, 1), (4, 5), -1, None),
        ((4, 5), (3, 4, 1), -1, None),
        ((1, 3, 5), (2, 1, 1), (0, 2), (1, 3, 5)),
        ((5, 1, 4), (6, 1), (-1, 0), None),
    ],
    ids=cases.ident,
)
def test_probabilities_and_logits_broadcast_as_in_optax(shape, of_labels, axis, mask):
    rng = np.random.default_rng(0)
    x, labels = 3 * rng.standard_normal(shape), rng.random(of_labels)
    labels = np.where(rng.random(of_labels) < 0.3, 0, labels)  # which has a derivative, too
    where = None if mask is None else rng.random(mask) < 0.7
    wanted = 0 if mask else (0, 1)  # optax's of what is masked is NaN

    def derived(f, x, labels):
        return f(x, labels, axis, where), jax.grad(lambda x, q: jnp.sum(jnp.sin(f(x, q, axis, where))), wanted)(x, labels)

    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(functools.partial(derived, optax.softmax_cross_entropy))(x, labels)
    (_, lse), ours = jax.jit(
        lambda *given: (
            jaxsoftmax.cross_entropy(*given, axis, where, return_lse=True),
            derived(jaxsoftmax.cross_entropy, *given),
        )
    )(x, labels)
    assert lse.shape == ours[0].shape
    oracle.assert_same_in_float64(ours, expected)


@pytest.mark.usefixtures("x64")
@pytest.mark.parametrize(
    ("shape", "of_labels", "axis"),
    [((1, 7), (4,), -1), ((3, 1, 7), (3, 5), -1), ((7, 1, 1), (2, 3), 0), ((1, 7, 3), (2, 3), 1), ((1, 7), (0,), -1)],
    ids=cases.ident,
)
def test_rows_of_logits_broadcast_to_classes_as_in_optax(shape, of_labels, axis):
    rng = np.random.default_rng(0)
    x, labels = 3 * rng.standard_normal(shape), rng.integers(0, 7, of_labels)

    def derived(f, x, labels):
        return f(x, labels, axis=axis), jax.grad(lambda x: jnp.sum(jnp.sin(f(x, labels, axis=axis))))(x)

    with jax.numpy_rank_promotion("allow"):
        expected = jax.jit(functools.partial(derived, of_optax))(x, labels)
    ours = jax.jit(functools.partial(derived, jaxsoftmax.cross_entropy))(x, labels)
    assert ours[0].shape == of_labels
    oracle.assert_same_in_float64(ours, expected)


@pytest.mark.parametrize("dtype", [np.bool_, np.int32, np.uint8])
def test_one_hot_labels_of_any_dtype(dtype):
    x, labels = np.random.default_rng(0).standard_normal((5, 5)).astype(np.float32), np.arange(5)
    onehot = np.eye(5, dtype=dtype)
    np.testing.assert_allclose(loss(x, onehot), loss(x, labels), rtol=4 * oracle.EPS)
    assert loss(x, labels).shape == (5,)  # fewer axes than logits: classes


def test_probabilities_of_zero_add_nothing():
    x = np.array([[0.0, -np.inf, 1.0]], np.float32)
    labels = np.array([[0.25, 0, 0.75]], np.float32)
    loss = jaxsoftmax.cross_entropy(x, labels)
    assert np.all(np.isfinite(jax.grad(lambda q: jnp.sum(jaxsoftmax.cross_entropy(x, q)))(labels)))
    expected = np.log1p(np.exp(-1)) + 0.25
    np.testing.assert_allclose(loss, [expected], rtol=8 * oracle.EPS)


def test_no_classes():
    x = np.zeros((2, 0), np.float32)
    np.testing.assert_array_equal(jaxsoftmax.cross_entropy(x, np.zeros(2, np.int32)), [np.nan] * 2)
    loss, lse = jaxsoftmax.cross_entropy(np.zeros((0,), np.float32), 0, return_lse=True)
    assert np.isnan(loss)
    assert lse == -np.inf


@st.composite
def calls(draw):
    shape = tuple(draw(st.lists(st.integers(1, 9), min_size=1, max_size=4)))
    axis = draw(st.integers(0, len(shape) - 1))
    mask = draw(st.none() | st.just([size if draw(st.booleans()) else 1 for size in shape]))
    options = {
        "label_smoothing": draw(st.sampled_from([0.0, 0.1, 1.0])),
        "z_loss": draw(st.sampled_from([0.0, 1e-2])),
        "logits_soft_cap": draw(st.sampled_from([None, 3.0])),
        "ignore_index": draw(st.sampled_from([None, 0, -100])),
    }
    return shape, axis, mask, options, draw(st.sampled_from(cases.DTYPES))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(call=calls(), seed=st.integers(0, 2**16))
def test_random_combinations_of_features(call, seed):
    shape, axis, mask, options, dtype = call
    rng = np.random.default_rng(seed)
    x = (3 * rng.standard_normal(shape)).astype(jnp.dtype(dtype))
    where = None if mask is None else rng.random(mask) < 0.6
    labels = rng.integers(-1, shape[axis] + 1, np.delete(shape, axis))
    c = rng.standard_normal(labels.shape).astype(np.float32)
    expected = truth(x, labels, axis, where, **options)
    loss, _, gradient = with_gradient(axis=axis, where=where, **options)(x, labels, c)
    assert oracle.error(loss, expected.loss) <= 1
    assert oracle.error(gradient, expected.gradient(c)) <= 1


# What comes in.

X, LABELS = np.zeros((4, 5), np.float32), np.zeros(4, np.int32)
WRONG = {
    "logits int": (lambda: loss(X.astype(int), LABELS), TypeError, "logits must be floating, got int"),
    "labels bool": (
        lambda: loss(X, LABELS == 0),
        ValueError,
        r"bool labels must be one-hot in the shape \(4, 5\) of logits, got \(4,\)",
    ),
    "labels complex": (lambda: loss(X, X * 1j), TypeError, "labels must be integers, boolean or floating, got complex"),
    "labels of two axes": (
        lambda: loss(X, LABELS[:, None]),
        ValueError,
        r"int32 labels must be classes of shape \(4,\), or one-hot in the shape \(4, 5\) of logits, got \(4, 1\)",
    ),
    "one-hot ignored": (
        lambda: loss(X, X.astype(int), ignore_index=0),
        ValueError,
        "ignore_index must be None where labels are floating or one-hot, got 0",
    ),
    "labels shape": (lambda: loss(X, LABELS[:3]), ValueError, r"labels must broadcast with rows of shape \(4,\), got \(3,\)"),
    "probabilities": (
        lambda: loss(X, X[:3]),
        ValueError,
        r"floating labels must broadcast with logits, got shapes \(3, 5\) and \(4, 5\)",
    ),
    "where shape": (
        lambda: loss(X, LABELS, where=np.ones((4, 4), bool)),
        ValueError,
        r"where must broadcast to shape \(4, 5\), got \(4, 4\)",
    ),
    "where of classes": (
        lambda: loss(X, LABELS, where=np.ones(5, bool)),
        ValueError,
        r"where must broadcast to shape \(4,\), got \(5,\); a mask of classes is \(1, 5\)",
    ),
    "where int": (lambda: loss(X, LABELS, where=LABELS), TypeError, "where must be boolean, got int32"),
    "axis": (lambda: loss(X, LABELS, axis=2), ValueError, "axis 2 is out of range for 2 dimensions"),
    "axes": (lambda: loss(X, LABELS, axis=()), ValueError, r"axis must name an axis of logits, got \(\)"),
    "no axis": (lambda: loss(np.float32(1), 0), ValueError, "axis -1 is out of range for 0 dimensions"),
    "smoothing": (
        lambda: loss(X, LABELS, label_smoothing=1.5),
        ValueError,
        r"label_smoothing must be from 0 to 1, got 1\.5",
    ),
    "smoothing NaN": (
        lambda: loss(X, LABELS, label_smoothing=float("nan")),
        ValueError,
        "label_smoothing must be from 0 to 1, got nan",
    ),
    **{
        f"z_loss {wrong}": (
            functools.partial(loss, X, LABELS, z_loss=wrong),
            ValueError,
            f"z_loss must be 0 or more and finite in float32, got {re.escape(str(float(wrong)))}",
        )
        for wrong in (float("inf"), float("nan"), -1, 1e39)
    },
    "z_loss traced": (
        lambda: jax.jit(lambda z: loss(X, LABELS, z_loss=z))(1.0),
        TypeError,
        "z_loss must be a concrete number, got a traced one",
    ),
    "z_loss bool": (lambda: loss(X, LABELS, z_loss=True), TypeError, "z_loss must be a real number, got True"),
    "cap NaN": (lambda: loss(X, LABELS, logits_soft_cap=float("nan")), ValueError, "logits_soft_cap must be positive"),
    "cap": (
        lambda: loss(X, LABELS, logits_soft_cap=0),
        ValueError,
        "logits_soft_cap must be positive and finite in float32, got 0",
    ),
    "ignore_index": (
        lambda: loss(X, LABELS, ignore_index=0.5),
        TypeError,
        "ignore_index must be a concrete integer or None, got 0.5",
    ),
    "ignored probabilities": (
        lambda: loss(X, X, ignore_index=0),
        ValueError,
        "ignore_index must be None where labels are floating or one-hot, got 0",
    ),
    "return_lse": (lambda: loss(X, LABELS, return_lse=1), TypeError, "return_lse must be True or False, got 1"),
    "implementation": (
        lambda: loss(X, LABELS, implementation="cuda"),
        ValueError,
        "implementation must be None or one of 'mosaic', 'triton', 'xla', got 'cuda'",
    ),
}


@pytest.mark.parametrize("kind", WRONG)
def test_what_does_not_fit_is_said(kind):
    call, error, words = WRONG[kind]
    with pytest.raises(error, match=f"cross_entropy: {words}"):
        call()


def test_explained():
    def total(x):
        return jnp.sum(loss(x, np.zeros(8, np.int32)))

    explanation = explain(jax.grad(total), jax.ShapeDtypeStruct((8, 5000), jnp.bfloat16), platform="cuda")
    assert [d.primitive for d in explanation] == ["cross_entropy", "cross_entropy_vjp"]
    cases.assert_all_run_on("mosaic", explanation)


def test_more_classes_than_an_index_holds_are_refused():
    def shaped(*shape, dtype="float32"):
        return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))

    x, labels = shaped(1, 2**31), shaped(1, dtype="int32")
    for name, operands in {
        "cross_entropy": [(x, labels), (x, x)],
        "linear_cross_entropy": [(shaped(1, 4), shaped(4, 2**31), labels)],
    }.items():
        for types in operands:
            with pytest.raises(ValueError, match=f"^{name}: there must be at most 2147483647 classes, got 2147483648"):
                jax.eval_shape(getattr(jaxsoftmax, name), *types)
