"""The softmax family of rows that devices share: each makes a state, or a sum, of its part, and one collective joins those.

Every function gets `run(map, operands, **params)`, which runs a map on this device's part of the rows, on a kernel where one
serves it, and `over`, how the axes of the softmax are sharded (`sharding.Cut` by axis). No operand moves between devices: of
a row each tells the others two numbers forward, and one in a derivative.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.softmax import primitive, xla
from jaxsoftmax.ops.softmax.xla import select


def softmax(run, x, where, scale, *, axes, dtype, over):
    m, d, where = _state(run, x, where, scale, axes, dtype, over)
    d = jnp.where((d > 0) & (d < jnp.inf), d, jnp.nan)  # what is masked is 0 all the same
    given = {"x": x, "m": m, "d": d, "t": jnp.ones_like(d), "where": where, "scale": scale}
    return run(primitive.LOGSUMEXP_VJP, given, axes=axes, dtype=dtype, scale_tangent=False)


def log_softmax(run, x, where, scale, *, axes, dtype, return_state, over):
    m, d, where = _state(run, x, where, scale, axes, dtype, over)
    d += d - d  # NaN where it is infinite
    out = select(where, xla.saved_exponent(x, m, scale) - jnp.log(d), -jnp.inf).astype(dtype)
    return [out, m, d] if return_state else [out]


def logsumexp(run, x, where, scale, *, axes, dtype, return_state, over):
    m, d, _ = _state(run, x, where, scale, axes, dtype, over)
    lse = xla.lse_of(m, d, scale).astype(dtype)
    return [lse, m, d] if return_state else [lse]


def softmax_jacobian(run, y, t, scale, *, axes, dtype, over):
    del run
    y = select(inside(y, over), y, 0)
    return xla.softmax_jacobian(y, t, scale, axes=axes, dtype=dtype, axis_name=mesh_axes(over))


def log_softmax_jvp(run, x, m, d, t, where, scale, *, over, **params):
    del run
    d, where = _saved(x, d, where, over)
    return xla.log_softmax_jvp(x, m, d, t, where, scale, axis_name=mesh_axes(over), **params)


def log_softmax_vjp(run, x, m, d, t, where, scale, *, over, **params):
    del run
    d, where = _saved(x, d, where, over)
    return xla.log_softmax_vjp(x, m, d, t, where, scale, axis_name=mesh_axes(over), **params)


def logsumexp_jvp(run, x, m, d, t, where, scale, *, dtype, over, **params):
    d, where = _saved(x, d, where, over)
    given = {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale}
    (mean,) = run(primitive.LOGSUMEXP_JVP, given, dtype=m.dtype, **params)
    return lax.psum(mean, mesh_axes(over)).astype(dtype)


def logsumexp_vjp(run, x, m, d, t, where, scale, *, over, **params):
    del over  # the sum over the row is in the state
    return run(primitive.LOGSUMEXP_VJP, {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale}, **params)


def _state(run, x, where, scale, axes, dtype, over):
    """The state of whole rows, and what is seen of them here."""
    where = seen(x, where, over)
    given = {"x": x, "where": where, "scale": scale}
    params = {"axes": axes, "dtype": accumulator(x.dtype, dtype), "return_state": True}
    m, d = merged(*run(primitive.LOGSUMEXP, given, **params)[1:], over=over, scale=scale)
    return m, d, where


def _saved(x, d, where, over):
    """A saved sum, and what is seen. One of 0, of a row of nothing but -inf, is not one of a row that is masked."""
    if where is None and inside(x, over) is not None:
        d = jnp.where(d == 0, jnp.nan, d)
    return d, seen(x, where, over)


def merged(m, d, *sums, over, scale=None):
    """The state of the rows, with a finite `m`, and sums along them, of those of each device's part: by one collective."""
    m = jnp.where(d == 0, -jnp.inf, jnp.where(d == jnp.inf, jnp.inf, m))  # as it was before it was made finite
    m, d, *sums = lax.all_gather(jnp.stack([m, d, *sums]), mesh_axes(over), axis=1)
    m, d, _ = online.merge_along(online.State(m, d), 0, scale=None if scale is None else jnp.abs(scale))
    return [online.shift(m), d, *[jnp.sum(total, 0) for total in sums]]


def mesh_axes(over) -> tuple[str, ...]:
    """The mesh axes over which rows are sharded."""
    return tuple([axis for cut in over.values() for axis in cut.over])


def seen(x, where, over):
    """`where` of this device's part of the rows, without the padding that a shard may end in."""
    valid = inside(x, over)
    return where if valid is None else valid if where is None else where & valid


def inside(x, over) -> jax.Array | None:
    """Which elements of a part are of the rows: of size 1 but along axes whose last shards end in padding; None for all."""
    valid = None
    for axis, cut in over.items():
        size = x.shape[axis]
        if size * lax.axis_size(cut.over) != cut.size:
            shape = [size if other == axis else 1 for other in range(x.ndim)]
            part = lax.broadcasted_iota(jnp.int32, shape, axis) < cut.size - lax.axis_index(cut.over) * size
            valid = part if valid is None else valid & part
    return valid
