"""Pairs of logits that hurt a divergence in different ways, and options of a call."""

import jax.numpy as jnp
import numpy as np

from .. import cases

# `-inf` is in both, or in the first alone: else the divergence is infinite.
PAIRS = ("normal", "wide", "near", "equal", "one-hot", "far apart", "offsets", "some -inf", "-inf in the first")
OPTIONS = ("plain", "scale", "scales", "where", "rows")


def pair_of(kind, shape, dtype, y_dtype):
    """Returns both logits of a kind."""
    first, second = cases.inputs(shape, "float32"), cases.inputs(shape, "float32", 1)
    normal, other = first["normal"], second["normal"]
    x, y = {
        "normal": (normal, other),
        "wide": (first["wide"], second["wide"]),
        "near": (normal, normal + 1e-3 * other),
        "equal": (normal, normal),
        "one-hot": (first["outliers"], other),
        "far apart": (other, first["outliers"]),
        "offsets": (first["offset of 1e4"], -second["offset of 1e4"]),
        "some -inf": (first["some -inf"], np.where(np.isneginf(first["some -inf"]), -np.inf, other)),
        "-inf in the first": (first["some -inf"], other),
    }[kind]
    if kind.endswith("-inf") or kind.startswith("-inf"):  # no row of nothing else
        x, y = (np.where(np.arange(shape[-1]) == 0, normal, each) for each in (x, y))
    return x.astype(jnp.dtype(dtype)), y.astype(jnp.dtype(y_dtype))


def pairs(kinds, shape, dtype, y_dtype):
    """Returns logits of kinds along the first axis, each of `shape`."""
    return tuple(np.concatenate(parts) for parts in zip(*(pair_of(kind, shape, dtype, y_dtype) for kind in kinds), strict=True))


def options_of(name, shape, axis=-1):
    """Returns a mask and both scales, with size 1 along the axis if they are of rows."""
    rng = np.random.default_rng(3)
    rows = [1 if a == axis % len(shape) else size for a, size in enumerate(shape)]
    where, scales = None, (None, None)
    if name == "scale":
        scales = np.float32(0.7), np.float32(-0.5)
    elif name == "scales":
        scales = rng.normal(size=rows).astype(np.float32), rng.normal(size=rows).astype(np.float32)
    elif name == "where":
        where = rng.random(shape) < 0.7
        where[(slice(None),) * (axis % len(shape)) + (0,)] = True
    elif name == "rows":
        where = rng.random(np.delete(shape, axis)) < 0.7
    return where, *scales
