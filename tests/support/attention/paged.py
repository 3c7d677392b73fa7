"""Operands of paged attention, the operands of `dot_product_attention` of the same meaning, and a check of the two."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax

from . import values

attend = jaxsoftmax.cache.paged_attention


STATIC = ("is_causal", "local_window_size", "logits_soft_cap", "scale", "return_lse", "precision", "implementation")


def jitted(**given):
    """Runs a call as one program, which is made anew because tests replace parts of it."""
    options = {name: given.pop(name) for name in STATIC if name in given}
    return jax.jit(functools.partial(attend, **options))(**given)


def paged(
    batch=(3,), length=2, heads=8, key_heads=2, size=64, page=16, pages=40, most=20, dtype="bfloat16", seed=0, value_size=None
):
    """Returns the operands of a call: pages in any order, some in several sequences, and numbers of pages that do not exist."""
    rng = np.random.default_rng(seed)
    of_keys = (pages, page, key_heads)
    shapes = {
        "query": (*batch, length, heads, size),
        "key_pages": (*of_keys, size),
        "value_pages": (*of_keys, value_size or size),
    }
    arrays = {name: (2 * rng.standard_normal(shape)).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}
    table = rng.integers(0, pages, (*batch, most)).astype(np.int32)
    if most:
        table.flat[:: 7 * most] = pages + 3
        table.flat[1 :: 7 * most] = -2
    lengths = rng.integers(0, most * page + 1, batch).astype(np.int32)
    if lengths.size > 1:
        lengths.flat[:2] = 2**31 - 1, -(2**31)
    return arrays | {"page_table": table, "key_value_seq_lengths": lengths}


def gathered(arrays, **more):
    """Returns the operands of `dot_product_attention` with the same meaning."""
    pages, table = arrays["key_pages"].shape[0], arrays["page_table"]
    found = {"query": arrays["query"], "key_value_seq_lengths": arrays["key_value_seq_lengths"]}
    for name in ("key", "value"):
        array = arrays[f"{name}_pages"][np.clip(table, 0, pages - 1)]
        found[name] = array.reshape(*table.shape[:-1], -1, *array.shape[-2:])
    return found | more


def features(batch, length, heads, keys):
    """Returns the optional arguments by feature: arrays and options."""
    random = values.random
    return {
        "plain": ({}, {}),
        "causal": ({}, {"is_causal": True}),
        "window": ({}, {"local_window_size": (50, 3)}),
        "offset": ({"query_offset": np.full(batch, 30, np.int32)}, {"is_causal": True}),
        "one offset": ({"query_offset": np.int32(77)}, {"local_window_size": (40, None)}),
        "soft cap": ({}, {"logits_soft_cap": 3.0}),
        "sinks": ({"sinks": random((heads,), "bias")}, {}),
        "mask": ({"mask": random((*batch, 1, length, keys))}, {}),
        "mask of keys": ({"mask": random((keys,))}, {"is_causal": True}),
        "bias": ({"bias": random((heads, length, keys), "bias")}, {}),
        "scale": ({}, {"scale": 0.3}),
    }


FEATURES = list(features((1,), 1, 1, 16))


def check(arrays, feature, name="xla", call=jitted):
    """Compares a call with float64."""
    batch, (length, heads) = arrays["key_value_seq_lengths"].shape, arrays["query"].shape[-3:-1]
    keys = arrays["page_table"].shape[-1] * arrays["key_pages"].shape[1]
    more, options = features(batch, length, heads, keys)[feature]
    results = call(**arrays, **more, **options, return_lse=True)
    moves = "is_causal" in options or "local_window_size" in options
    arrays = arrays | {"key_value_seq_lengths": np.clip(arrays["key_value_seq_lengths"], 0, keys)}
    last = {"query_offset": arrays["key_value_seq_lengths"] - length} if moves else {}
    values.assert_right(name, results, gathered(arrays, **last | more), options)
