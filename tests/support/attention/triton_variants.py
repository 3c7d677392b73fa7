"""Checks score and mask functions on Triton's kernels: values and all cotangents against float64.

A variant is compared with the same written out, a call that has other arguments too with the reference.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax

from . import values
from .functions import TOLERANCES, assert_close, expected_of
from .gradients import cotangents_like
from .variants import VARIANTS, Sizes, written_out

forced = functools.partial(jaxsoftmax.dot_product_attention, implementation="triton", precision="high", return_residual=True)


def check_variant(name: str, sizes: Sizes, key_heads: int, dtype: str, size: int = 16) -> None:
    """Fails unless output, log-sum-exp, and cotangents of operands and tables are those of the variant written out."""
    rng = np.random.default_rng([7, *name.encode()])
    variant = VARIANTS[name](rng, sizes)
    shapes = {"query": (sizes.queries, sizes.heads), "key": (sizes.keys, key_heads), "value": (sizes.keys, key_heads)}
    arrays = {n: rng.standard_normal((sizes.batch, *shape, size)).astype(jnp.dtype(dtype)) for n, shape in shapes.items()}
    moving = arrays | {f"table {n}": table.astype(np.float32) for n, table in variant.moving.items()}

    def tables_of(moving):
        return variant.arrays | {n.removeprefix("table "): x for n, x in moving.items() if n.startswith("table ")}

    def run(moving):
        tables = {n: jnp.asarray(table) for n, table in tables_of(moving).items()}
        return forced(*(moving[n] for n in shapes), **variant.functions(tables))

    results, found, cotangents = _pulled(run, moving)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide, wide_cotangents = jax.tree.map(_wide, (moving, cotangents))
        truth, pull = jax.vjp(lambda moving: written_out(variant, tables_of(moving), *(moving[n] for n in shapes)), wide)
        (expected,) = pull(wide_cotangents)
    for actual, written in zip(results, truth, strict=True):
        _check("a result", actual, written, TOLERANCES[dtype])
    for operand, actual in found.items():
        assert actual.dtype == moving[operand].dtype
        _check(operand, actual, expected[operand], TOLERANCES[dtype])


SLOPES = np.array([0.25, 0.125, 0.0625, 0.03125], np.float32)


def alibi(score, batch, head, query, key):
    return score - jnp.asarray(SLOPES)[head].astype(score.dtype) * jnp.abs(query - key).astype(score.dtype)


def documents(batch, head, query, key):
    return (query // 8 == key // 8) | (key < batch)


def causal(batch, head, query, key):
    return (query >= key) & (head > -1)  # no window, which runs without a function


def hiding(score, batch, head, query, key):
    return jnp.where(query >= key, 2 * score, -jnp.inf)


def _segments():
    return {"query_segment_ids": values.segments(40, 0), "key_value_segment_ids": values.segments(56, 1)}


CALLS = {  # functions, shapes, other operands, and options
    "both, and causal": ((alibi, documents), {}, None, {"is_causal": True}),
    "a soft cap": ((hiding, None), {}, None, {"logits_soft_cap": 2.0}),
    "lengths": ((alibi, documents), {}, lambda: dict(values.LENGTHS), {}),
    "segments": ((None, causal), {}, _segments, {}),
    "a mask": ((alibi, causal), {}, lambda: {"mask": values.random((2, 1, 40, 56))}, {}),
    "a bias": ((hiding, causal), {}, lambda: {"bias": values.random((2, 4, 40, 56), "bias")}, {}),
    "sinks": ((alibi, causal), {}, lambda: {"sinks": values.random((4,), "bias")}, {}),
    "an offset": ((alibi, causal), {}, lambda: {"query_offset": np.array([30, -9], np.int32)}, {}),
    "no batch": ((alibi, documents), {"batch": ()}, None, {}),
    "two batch axes": ((alibi, documents), {"batch": (2, 2), "length": 9, "keys": 40}, None, {}),
    "one query": ((alibi, causal), {"length": 1}, lambda: {"query_offset": np.int32(50)}, {}),
    "a window": ((alibi, documents), {}, None, {"local_window_size": (9, 4)}),
    "negative scale": ((alibi, None), {}, None, {"scale": -0.3}),
}


def check_call(name: str, dtype: str) -> None:
    """Fails unless output, log-sum-exp and cotangents of a call are those of the reference in float64."""
    (score_mod, mask_mod), shapes, make, options = CALLS[name]
    options = options | {"score_mod": score_mod, "mask_mod": mask_mod}
    given = values.arrays(dtype=dtype, **shapes) | ({} if make is None else make())
    moving, fixed = values.split(given)
    results, found, cotangents = _pulled(lambda moving: forced(**moving, **fixed, **options), moving)
    assert_close(results, expected_of(given, {}, options), dtype)
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide, wide_cotangents = jax.tree.map(_wide, (moving, cotangents))
        reference = functools.partial(jaxsoftmax.dot_product_attention, implementation="xla", return_residual=True)
        _, pull = jax.vjp(lambda moving: reference(**moving, **fixed, **options), wide)
        (expected,) = pull(wide_cotangents)
    for operand, actual in found.items():
        # The output is rounded before its product with the cotangent is subtracted, and weights once more.
        _check(operand, actual, expected[operand], 2 * TOLERANCES[dtype])


def _pulled(run, moving):
    """Returns results, cotangents of the operands by name, and the cotangents of the results from which these follow."""
    results, pull = jax.vjp(jax.jit(run), jax.tree.map(jnp.asarray, moving))
    dout, dlse = cotangents_like(results)
    cotangents = dout, np.where(results[1] == -np.inf, 0, dlse)  # nothing moves an lse of -inf
    (found,) = pull(jax.tree.map(jnp.asarray, cotangents))
    return results, found, cotangents


def _wide(array):
    return jnp.asarray(np.asarray(array, np.float64))


def _check(name, actual, expected, tolerance):
    """Fails unless an array differs from the truth by at most a tolerance times its largest element."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected)
    np.testing.assert_array_equal(np.isfinite(actual), np.isfinite(expected), name)
    largest = max(1, np.max(np.abs(expected), where=np.isfinite(expected), initial=0))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=largest * tolerance, err_msg=name)
