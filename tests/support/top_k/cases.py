"""Inputs that hurt top-k, and the truth of its weights."""

import jax
import jax.numpy as jnp
import numpy as np

from .. import cases, oracle
from .oracle import top_k as truth


def inputs(shape, dtype):
    """Returns arrays that hurt: those of `cases.inputs`, ties, zeros and NaN of both signs, and the extremes of integers."""
    rng, dtype = np.random.default_rng(0), jnp.dtype(dtype)
    few = rng.integers(0, 5, shape)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        ends = np.array([limits.min, limits.min + 1, 0, 1, limits.max - 1, limits.max], dtype)
        anything = rng.integers(limits.min, limits.max, shape, dtype, endpoint=True)
        return {"anything": anything, "ties": few.astype(dtype), "ends": rng.choice(ends, shape)}
    special = np.array([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1, -1, 1e-45, -1e-45], np.float32).astype(dtype)
    found = {name: array for name, array in cases.inputs(shape, dtype).items() if name != "all -inf"}
    return found | {
        "ties": few.astype(np.float32).astype(dtype),
        "zeros": rng.choice(special[4:6], shape),
        "NaN": rng.choice(special[:2], shape),
        "special": rng.choice(special, shape),
        "increasing": np.arange(np.prod(shape)).reshape(shape).clip(max=float(jnp.finfo(dtype).max)).astype(dtype),
    }


def taken(whole, indices, axis=-1):
    """Returns a truth at the indices."""
    return oracle.Truth(*(np.take_along_axis(array, np.asarray(indices), axis) for array in (whole.value, whole.budget)))


def weights_of(x, k, normalize, scale=None, where=None):
    """Returns the truth of `softmax_top_k`: the weights, their indices, and the log-sum-exp.

    The scale is one number, or one for each row.
    """
    scale = None if scale is None else np.float64(np.float32(scale))[..., None]
    turned = x if scale is None else np.where(scale < 0, -x, x)
    indices = truth(turned, k, where=where)[1]
    if normalize == "all":
        weights = taken(oracle.softmax(x, -1, where, scale), indices)
    else:
        seen = None if where is None else np.take_along_axis(np.broadcast_to(where, x.shape), indices, -1)
        weights = oracle.softmax(np.take_along_axis(x, indices, -1), -1, seen, scale)
    return weights, indices, oracle.logsumexp(x, -1, where, scale)


def plain_softmax_top_k(x, k, *, scale=1.0, where=None, normalize="all", return_lse=False):
    """Computes `softmax_top_k` by `jax.nn` and `jax.lax`."""
    scale = scale[..., None] if jnp.ndim(scale) else scale
    scores = x * scale if where is None else jnp.where(where, x * scale, -jnp.inf)
    found, indices = jax.lax.top_k(scores, k)
    lse = jax.nn.logsumexp(scores, -1)
    weights = jnp.exp(found - lse[..., None]) if normalize == "all" else jax.nn.softmax(found, -1)
    return (weights, indices, lse) if return_lse else (weights, indices)
