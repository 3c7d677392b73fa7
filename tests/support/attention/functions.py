"""Calls of attention with score and mask functions: operands of plans, results in float64, and how close a kernel comes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxsoftmax
from jaxsoftmax.ops.attention.score_functions import functions_and_operands

from . import interpreted

KINDS = ("score_mod", "mask_mod")
TOLERANCES = {"bfloat16": 2.0**-7, "float16": 2.0**-9, "float32": 2.0**-13}
NO_OPTIONS = {"dropout_rate": 0.0, "precision": "high", "deterministic_gradients": False}


def expected_of(given, functions, options):
    """Returns output and log-sum-exp in float64 by the reference, on a CPU, which compiles it in a fifth of the time."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        wide = {name: np.asarray(x, np.float64) if name in ("query", "key", "value") else x for name, x in given.items()}
        attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="xla", return_residual=True)
        return jax.tree.map(np.asarray, attend(**wide, **functions, **options))


def assert_close(actual, expected, dtype):
    for found, truth in zip(actual, expected, strict=True):
        found = np.asarray(found, np.float64)
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(truth))
        size = np.max(np.abs(truth), initial=1, where=np.abs(truth) < 1e9)
        np.testing.assert_allclose(found, truth, rtol=TOLERANCES[dtype], atol=size * TOLERANCES[dtype])


def planned(given, functions, options):
    """Returns operands and parameters of the primitive."""
    shape = (*given["query"].shape[:-3], given["query"].shape[-2])
    functions, operands = functions_and_operands("f", jnp.float32, *(functions.get(kind) for kind in KINDS), shape)
    window = (None, 0 if options.get("is_causal") else None)
    params = {"window": window, "soft_cap": options.get("logits_soft_cap"), "scale": given["query"].shape[-1] ** -0.5}
    return interpreted.named(given) | operands, NO_OPTIONS | params | functions
