"""What does not count may hold NaN and infinities: it changes no derivative of any order, and makes no NaN on the way."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

from ..support import oracle

pytestmark = pytest.mark.usefixtures("x64")

SHAPE = (4, 6)
RNG = np.random.default_rng(0)
X, T, PROBABILITIES, WEIGHT = (RNG.standard_normal(SHAPE), RNG.standard_normal(SHAPE), RNG.random(SHAPE), np.eye(6)[:, ::-1])
ROWS = np.array([True, False, True, True])
ENTRIES = (RNG.random(SHAPE) < 0.6) | np.eye(*SHAPE, dtype=bool)
ENTRIES[1] = False
MASKS = {"rows": ROWS[:, None], "entries": ENTRIES}
LABELS = np.array([0, 1, 2, 3])
IGNORED = np.where(ROWS, LABELS, -100)
ALL = {"label_smoothing": 0.2, "z_loss": 0.1, "logits_soft_cap": 5.0}


def losses(mask, options):
    """Losses in which a mask leaves rows, or entries of rows, out."""
    loss = jaxsoftmax.cross_entropy
    found = {
        "classes": lambda x: loss(x, LABELS, where=MASKS[mask], **options),
        "probabilities": lambda x: loss(x, PROBABILITIES, where=MASKS[mask], **options),
    }
    if mask == "rows":
        found |= {
            "ignored": lambda x: loss(x, IGNORED, ignore_index=-100, **options),
            "ignored, with lse": lambda x: loss(x, IGNORED, ignore_index=-100, return_lse=True, **options)[0],
            "linear": lambda x: linear(x, labels=IGNORED, ignore_index=-100, reduction="none", **options),
            "linear, mean": lambda x: linear(x, labels=IGNORED, ignore_index=-100, **options),
            "linear, weights": lambda x: linear(x, labels=LABELS, sample_weight=2.0 * ROWS, **options),
        }
    return found


def finite(x):
    """0 in place of infinities."""
    return jnp.where(jnp.abs(x) < jnp.inf, x, 0)


def linear(x, **options):
    return jaxsoftmax.linear_cross_entropy(x, WEIGHT, **options)


def softmaxes(mask, scale):
    """Sums of the results of ops with a mask."""
    where = MASKS[mask]

    def total(f, **options):
        def found(x):
            results = [part for part in jax.tree.leaves(f(x, where=where, **options)) if part.dtype == x.dtype]
            return sum(jnp.sum(jnp.sin((i + 1) * finite(part))) for i, part in enumerate(results))

        return found

    top_k = functools.partial(jaxsoftmax.softmax_top_k, k=3, return_lse=True)
    drawn = functools.partial(jaxsoftmax.categorical, jax.random.key(0), return_log_prob=True)
    return {
        "softmax": total(jaxsoftmax.softmax, scale=scale),
        "log_softmax": total(jaxsoftmax.log_softmax, scale=scale),
        "logsumexp": total(jaxsoftmax.logsumexp, axis=-1),
        "top_k": total(jaxsoftmax.top_k, k=3),
        "weights of all": total(top_k, scale=scale),
        "weights of the selected": total(top_k, normalize="selected", scale=scale),
        "categorical": total(drawn, temperature=None if scale is None else 1 / abs(scale)),
    }


def derivatives(f, name):
    """The gradient and second derivatives: reverse over reverse, reverse over forward and forward over reverse."""

    def total(x):
        return jnp.sum(jnp.sin(f(x)))

    gradient, found = jax.grad(total), {}
    found["gradient"] = gradient
    found["reverse over reverse"] = jax.grad(lambda x: jnp.sum(jnp.sin(gradient(x))))
    if "linear" not in name:
        found["tangent"] = lambda x: jax.jvp(f, (x,), (T,))[1]
        found["forward over reverse"] = lambda x: jax.jvp(gradient, (x,), (T,))[1]
        if "lse" not in name:  # which is that of a row that holds NaN, and a result
            found["reverse over forward"] = jax.grad(lambda x: jnp.sum(jnp.sin(jax.jvp(f, (x,), (T,))[1])))
    return found


CASES = [(losses, mask, options) for mask in MASKS for options in ({}, ALL)]
CASES += [(softmaxes, mask, scale) for mask in MASKS for scale in (None, -0.7)]


# By default half of the derivatives of each op behind each mask, in turn, and with all options.
HALVES = [(*case, list(MASKS).index(case[1])) for case in CASES if case[2] in (ALL, -0.7)]


@pytest.mark.parametrize(
    ("ops", "mask", "option", "half"), [*HALVES, *(pytest.param(*case, None, marks=pytest.mark.slow) for case in CASES)]
)
def test_what_is_left_out_has_no_derivative_of_any_order(ops, mask, option, half):
    @jax.jit
    def run(x):
        return {
            (name, order): g(x)
            for i, (name, f) in enumerate(ops(mask, option).items())
            for j, (order, g) in enumerate(derivatives(f, name).items())
            if half is None or (i + j) % 2 == half
        }

    bad = np.resize([np.nan, np.inf, np.nan, -np.inf, np.inf], SHAPE)
    oracle.assert_same_in_float64(run(np.where(MASKS[mask], X, bad)), run(X))


def test_nothing_that_is_left_out_is_nan_on_the_way():
    """With `jax_debug_nans` JAX raises where an operation, outside of `jit`, gives a NaN."""
    labels = np.where(ROWS, LABELS, 10**6)
    table = {"page_table": np.array([[0], [1], [0], [1]]), "key_value_seq_lengths": np.array([4, 0, 2, 1])}
    queries, pages = jnp.asarray(RNG.standard_normal((4, 2, 1, 8))), jnp.asarray(RNG.standard_normal((2, 4, 1, 8)))
    segments = np.eye(4, 2, dtype=int)
    attend = functools.partial(jaxsoftmax.dot_product_attention, return_residual=True)
    ops = losses("rows", ALL) | {f"entries, {name}": f for name, f in losses("entries", ALL).items()}
    ops |= softmaxes("entries", 0.7) | {
        "labels that are no class": lambda x: jaxsoftmax.cross_entropy(x, labels, where=ROWS, return_lse=True),
        "linear, no class": lambda x: linear(x, labels=labels, sample_weight=ROWS),
    }
    heads = {
        "mask": lambda q: attend(q, q, q, mask=ROWS[:, None, None, None]),
        "lengths": lambda q: attend(q, q, q, key_value_seq_lengths=np.array([2, 0, 1, 2]), is_causal=True),
        "segments": lambda q: attend(q, q, q, query_segment_ids=segments, key_value_segment_ids=0 * segments),
        "pages": lambda q: jaxsoftmax.cache.paged_attention(q, pages, pages, **table, return_lse=True),
    }
    with jax.debug_nans(True):
        for of, x in ((ops, X), (heads, queries)):
            for f in of.values():
                jax.value_and_grad(lambda x, f=f: sum(jnp.sum(finite(part)) for part in jax.tree.leaves(f(x))))(jnp.asarray(x))
        assert jaxsoftmax.top_k(X, 3, where=ENTRIES)[0].shape == (4, 3)
        jaxsoftmax.categorical(jax.random.key(0), X, where=ENTRIES, top_p=0.7, min_p=0.1, top_k=3)
