"""Calls as type checkers see them; `test_types.py` checks this file. A line that ends in `# error` has a call that is wrong."""

from typing import assert_type

import jax
import numpy as np

import jaxsoftmax
from jaxsoftmax import cache

Pair = tuple[jax.Array, jax.Array]


def results(x: jax.Array, labels: np.ndarray, key: jax.Array, flag: bool) -> None:
    assert_type(jaxsoftmax.logsumexp(x, -1), jax.Array)
    assert_type(jaxsoftmax.logsumexp(x, -1, return_sign=False), jax.Array)
    assert_type(jaxsoftmax.logsumexp(x, -1, None, True, return_sign=True), Pair)
    assert_type(jaxsoftmax.cross_entropy(x, labels), jax.Array)
    assert_type(jaxsoftmax.cross_entropy(x, labels, 0, None, z_loss=1e-4, return_lse=False), jax.Array)
    assert_type(jaxsoftmax.cross_entropy(logits=x, labels=labels, return_lse=True, axis_name=["x"]), Pair)
    assert_type(jaxsoftmax.cross_entropy(x, labels, return_lse=flag), jax.Array | Pair)
    assert_type(jaxsoftmax.softmax_top_k(x, 8, normalize="selected"), Pair)
    assert_type(jaxsoftmax.softmax_top_k(x, 8, return_lse=True, axis=0), tuple[jax.Array, jax.Array, jax.Array])
    assert_type(jaxsoftmax.categorical(key, x, -1, (3,), top_p=0.9), jax.Array)
    assert_type(jaxsoftmax.categorical(key, x, return_log_prob=True, temperature=x), Pair)
    assert_type(jaxsoftmax.dot_product_attention(x, x, x, None, labels, is_causal=True), jax.Array)
    assert_type(jaxsoftmax.dot_product_attention(query=x, key=x, value=x, return_residual=True, scale=0.1), Pair)
    assert_type(cache.paged_attention(x, x, x, labels, labels), jax.Array)
    assert_type(cache.paged_attention(x, x, x, labels, labels, return_lse=True, local_window_size=(3, None)), Pair)


def wrong(x: jax.Array, key: jax.Array) -> None:
    jaxsoftmax.logsumexp(x, keep=True)  # error
    jaxsoftmax.cross_entropy(x)  # error
    jaxsoftmax.cross_entropy(x, x, smoothing=0.1)  # error
    jaxsoftmax.cross_entropy(x, x, smoothing=0.1, return_lse=True)  # error
    jaxsoftmax.cross_entropy(x, x, label_smoothing="0.1", return_lse=True)  # error
    jaxsoftmax.softmax_top_k(x, 8, normalize="some", return_lse=True)  # error
    jaxsoftmax.categorical(key, x, topp=0.9)  # error
    jaxsoftmax.dot_product_attention(x, x, x, fully_masked_rows="none")  # error
    jaxsoftmax.dot_product_attention(x, x, x, causal=True, return_residual=True)  # error
    cache.paged_attention(x, x, x, x, x, dropout_rate=0.1)  # error
