"""What kernels of derivatives are given of the cotangents, and what follows from those of rows alone."""

import jax
import jax.numpy as jnp


def of_rows(given, out, lse, d_out, d_lse, window):
    """The cotangent of out, and delta: 0 for rows that see nothing, whose cotangents may be NaN, or infinite."""
    delta = jnp.zeros(lse.shape, jnp.float32)
    if d_out is None:
        d_out = jnp.zeros_like(out)
    else:
        delta = jnp.sum(out.astype(jnp.float32) * d_out.astype(jnp.float32), -1).mT
    left, empty = window[0], None
    of_operands = {"bias", "mask", "query_lengths", "key_lengths", "query_segments"} & set(given)
    if of_operands or (left is not None and given["query"].shape[-3] > given["key"].shape[-3] + left):
        empty = alone = lse == -jnp.inf
        if "sinks" in given:
            sink = given["sinks"].astype(jnp.float32)[..., None]
            alone |= (lse == sink) & jnp.all(out == 0, -1).mT
        d_out, delta = jnp.where(alone.mT[..., None], 0, d_out), jnp.where(alone, 0, delta)
    if d_lse is not None:
        delta -= d_lse if empty is None else jnp.where(empty, 0, d_lse)
    return d_out, delta


def of_sinks(sinks, lse, delta) -> jax.Array:
    """The cotangents of the sinks: they are keys without a value."""
    weight = jnp.where(lse == -jnp.inf, 0, jnp.exp(sinks.astype(jnp.float32)[..., None] - lse))
    return -jnp.sum(weight * delta, -1)
