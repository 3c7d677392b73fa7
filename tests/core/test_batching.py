"""`jax.vmap` over any of the operands of an op, alone and with others, equals one call after the other."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax

pytestmark = pytest.mark.usefixtures("hollow_kernels")

ENTRIES = 2
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal((ENTRIES, *shape)).astype(np.float32)


def positive(*shape):
    return np.abs(normal(*shape)) / 30


def integers(low, high, *shape, dtype=np.int32):
    return RNG.integers(low, high, (ENTRIES, *shape)).astype(dtype)


def mask(*shape):
    return RNG.random((ENTRIES, *shape)) < 0.8


def eight_bits(*shape):
    return integers(-127, 128, *shape, dtype=np.int8)


def sample(seeds, **given):
    return jaxsoftmax.categorical(jax.random.wrap_key_data(seeds), return_log_prob=True, **given)


def linear_loss(hidden, weight, labels, **given):
    return jaxsoftmax.linear_cross_entropy(hidden, weight, labels, ignore_index=-1, **given)


page_attend = functools.partial(jaxsoftmax.cache.paged_attention, is_causal=True, return_lse=True)
attend = functools.partial(jaxsoftmax.dot_product_attention, return_residual=True)
SEEDS = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(0), ENTRIES)))
PAGES_OF_BYTES = {"key_pages": eight_bits(5, 4, 2, 8), "value_pages": eight_bits(5, 4, 2, 4)}
IN_PAGES = {"query": normal(2, 2, 4, 8), "page_table": integers(-1, 6, 2, 3), "key_value_seq_lengths": integers(1, 13, 2)}
LOGITS, ALLOWED = normal(4, 7), mask(4, 7)
# Functions, their operands, one for each entry, and the names of those that are differentiated.
OPS = {
    "attention": (
        functools.partial(attend, is_causal=True),
        {
            "query": normal(2, 5, 4, 3),
            "key": normal(2, 6, 2, 3),
            "value": normal(2, 6, 2, 4),
            "bias": normal(1, 4, 5, 6),
            "mask": mask(2, 1, 5, 6),
            "query_seq_lengths": integers(1, 6, 2),
            "key_value_seq_lengths": integers(1, 7, 2),
            "query_offset": integers(-1, 3, 2),
            "query_segment_ids": integers(0, 2, 2, 5),
            "key_value_segment_ids": integers(0, 2, 2, 6),
            "sinks": normal(4),
        },
        ("query", "key", "value", "bias", "sinks"),
    ),
    "attention to 8 bits": (
        attend,
        {
            "query": normal(2, 2, 4, 8),
            "key": eight_bits(2, 6, 2, 8),
            "value": eight_bits(2, 6, 2, 4),
            "key_scale": positive(2, 2),
            "value_scale": positive(2),
            "key_value_seq_lengths": integers(1, 7, 2),
        },
        ("query", "key_scale", "value_scale"),
    ),
    "attention to pages of 8 bits": (
        page_attend,
        IN_PAGES | PAGES_OF_BYTES | {"key_scale": positive(5, 2), "value_scale": positive(5, 2)},
        ("query", "key_scale", "value_scale"),
    ),
    "attention to pages": (
        page_attend,
        IN_PAGES
        | {
            "key_pages": normal(5, 4, 2, 8),
            "value_pages": normal(5, 4, 2, 4),
            "bias": normal(1, 4, 1, 12),
            "mask": mask(2, 1, 2, 12),
            "query_offset": integers(0, 3),
            "sinks": normal(4),
        },
        ("query", "key_pages", "value_pages", "bias", "sinks"),
    ),
    "update of pages": (
        jaxsoftmax.cache.update_pages,
        PAGES_OF_BYTES
        | {
            "key": normal(2, 2, 2, 8),
            "value": normal(2, 2, 2, 4),
            "page_table": np.stack([RNG.permutation(6).reshape(2, 3) for _ in range(ENTRIES)]).astype(np.int32),
            "positions": integers(0, 11, 2),
            "key_scale": positive(5, 2),
            "value_scale": positive(2),
        },
        (),
    ),
    "softmax": (jaxsoftmax.softmax, {"x": LOGITS, "where": ALLOWED, "scale": normal()}, ("x", "scale")),
    "log_softmax": (jaxsoftmax.log_softmax, {"x": LOGITS, "where": ALLOWED, "scale": normal(4)}, ("x", "scale")),
    "logsumexp": (
        functools.partial(jaxsoftmax.logsumexp, axis=-1),
        {"a": LOGITS, "where": ALLOWED, "scale": normal(4)},
        ("a", "scale"),
    ),
    "cross_entropy": (
        functools.partial(jaxsoftmax.cross_entropy, label_smoothing=0.1, z_loss=0.01),
        {"logits": LOGITS, "labels": integers(0, 7, 4), "where": ALLOWED},
        ("logits",),
    ),
    "cross_entropy of probabilities": (
        jaxsoftmax.cross_entropy,
        {"logits": LOGITS, "labels": np.asarray(jax.nn.softmax(normal(4, 7))), "where": ALLOWED},
        ("logits", "labels"),
    ),
    "linear_cross_entropy": (
        linear_loss,
        {
            "hidden": normal(4, 3),
            "weight": normal(3, 5),
            "labels": integers(-1, 5, 4),
            "bias": normal(5),
            "sample_weight": positive(4),
        },
        ("hidden", "weight", "bias", "sample_weight"),
    ),
    "top_k": (lambda x, **given: jaxsoftmax.top_k(x, 3, **given), {"x": LOGITS, "where": ALLOWED}, ("x",)),
    "softmax_top_k": (
        lambda x, **given: jaxsoftmax.softmax_top_k(x, 3, **given),
        {"x": LOGITS, "where": ALLOWED, "scale": normal(4)},
        ("x", "scale"),
    ),
    "categorical": (
        sample,
        {
            "seeds": SEEDS,
            "logits": LOGITS,
            "where": ALLOWED,
            "temperature": 1 + positive(4),
            "top_p": 1 - positive(4),
        },
        (),
    ),
}
EVERY_SUBSET = 3  # operands; with more, every subset is slow


def few_subsets(names):
    """Five subsets, or six: any two operands are mapped together in one, and each without the other in another."""
    rows = 5 if len(names) <= 10 else 6
    places = list(zip(names, itertools.combinations(range(rows), rows // 2 + 1), strict=False))  # any two share a number
    return [tuple(name for name, place in places if row in place) for row in range(rows)]


def every_subset(names):
    return [subset for size in range(1, len(names) + 1) for subset in itertools.combinations(names, size)]


CASES = [(op, False) for op in OPS] + [
    pytest.param(op, True, marks=pytest.mark.slow) for op, (_, operands, _) in OPS.items() if len(operands) > EVERY_SUBSET
]


@pytest.mark.parametrize(("op", "is_whole"), CASES)
def test_every_subset_of_operands_mapped_equals_one_at_a_time(op, is_whole):
    f, operands, moving = OPS[op]
    is_small = len(operands) <= EVERY_SUBSET

    def loss(moving, given):
        return sum(jnp.sum(jnp.sin(r)) for r in jax.tree.leaves(f(**given | moving)) if jnp.issubdtype(r.dtype, jnp.floating))

    def values(given):
        if not (moving and (is_small or is_whole)):
            return f(**given)
        return f(**given), jax.grad(loss)({name: given[name] for name in moving}, given)

    one = jax.jit(values)
    subsets = every_subset(list(operands)) if is_small or is_whole else few_subsets(list(operands))

    @functools.partial(jax.jit, static_argnums=0)
    def mapped(subsets, operands):
        """Of each subset, all entries of its operands with the first of the others."""
        of = []
        for subset in subsets:
            fixed = {name: array[0] for name, array in operands.items() if name not in subset}
            of.append(jax.vmap(lambda own, fixed=fixed: values(fixed | own))({name: operands[name] for name in subset}))
        return of

    for together in itertools.batched(subsets, 7):  # all 2047 of attention in one program take 8 GB to compile
        for subset, found in zip(together, mapped(together, operands), strict=True):
            for i in range(ENTRIES):
                expected = one({name: array[i if name in subset else 0] for name, array in operands.items()})
                for actual, right in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                    np.testing.assert_allclose(actual[i], right, rtol=1e-4, atol=1e-4, err_msg=f"{op} mapped over {subset}")
        mapped.clear_cache()  # kept, the 293 programs of attention take the 65530 mappings that Linux grants a process
