"""The softmax family of rows that devices share: each makes a state, or a sum, of its part, and one collective joins those.

Every function gets a `lower.Runner`, which runs maps on this device's part of the rows, on kernels where there are, and
`over`, how the axes of the softmax are sharded (`sharding.Cut` by axis). No operand moves between devices: of a row each tells
the others two numbers forward, and one in a derivative. A kernel that tells them itself reads each element once.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.softmax import primitive, xla
from jaxsoftmax.ops.softmax.xla import select


def softmax(run, x, where, scale, *, axes, dtype, over):
    given = {"x": x, "where": seen(x, where, over), "scale": scale}
    if found := run.on_all_devices(primitive.SOFTMAX, given, over, axes=axes, dtype=dtype):
        return found
    run = run.unless(unprofitable(x))
    m, d = _state(run, given, axes, dtype, over)
    d = jnp.where((d > 0) & (d < jnp.inf), d, jnp.nan)  # what is masked is 0 all the same
    given |= {"m": m, "d": d, "t": jnp.ones_like(d)}
    return run(primitive.LOGSUMEXP_VJP, given, axes=axes, dtype=dtype, scale_tangent=False)


def log_softmax(run, x, where, scale, *, axes, dtype, return_state, over):
    given = {"x": x, "where": seen(x, where, over), "scale": scale}
    if found := run.on_all_devices(primitive.LOG_SOFTMAX, given, over, axes=axes, dtype=dtype, return_state=return_state):
        return found
    run = run.unless(unprofitable(x))
    m, d = _state(run, given, axes, dtype, over)
    d += d - d  # NaN where it is infinite
    out = select(given["where"], xla.saved_exponent(x, m, scale) - jnp.log(d), -jnp.inf).astype(dtype)
    return [out, m, d] if return_state else [out]


def logsumexp(run, x, where, scale, *, axes, dtype, return_state, over):
    run = run.unless(unprofitable(x))
    m, d = _state(run, {"x": x, "where": seen(x, where, over), "scale": scale}, axes, dtype, over)
    lse = xla.lse_of(m, d, scale).astype(dtype)
    return [lse, m, d] if return_state else [lse]


def softmax_jacobian(run, y, t, scale, *, axes, dtype, over):
    y = select(inside(y, over), y, 0)
    return _with_sums(run, primitive.SOFTMAX_JACOBIAN, {"y": y, "t": t, "scale": scale}, over, axes=axes, dtype=dtype)


def log_softmax_jvp(run, *, over, **given):
    return _log_softmax_derivative(run, primitive.LOG_SOFTMAX_JVP, over, **given)


def log_softmax_vjp(run, *, over, **given):
    return _log_softmax_derivative(run, primitive.LOG_SOFTMAX_VJP, over, **given)


def _log_softmax_derivative(run, this, over, *, x, m, d, t, where, scale, **params):
    d, where = _saved(x, d, where, over)
    return _with_sums(run, this, {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale}, over, **params)


def _with_sums(run, this, given, over, **params):
    """A derivative that needs a sum along whole rows: by one kernel that sums over devices, or by the reference."""
    found = run.on_all_devices(this, given, over, **params)
    return found or run.on_reference(this, given, OF_ONE_KERNEL, axis_name=mesh_axes(over), **params)


def logsumexp_jvp(run, x, m, d, t, where, scale, *, dtype, over, **params):
    d, where = _saved(x, d, where, over)
    given = {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale}
    (mean,) = run(primitive.LOGSUMEXP_JVP, given, dtype=m.dtype, **params)
    return lax.psum(mean, mesh_axes(over)).astype(dtype)


def logsumexp_vjp(run, x, m, d, t, where, scale, *, over, **params):
    del over  # the sum over the row is in the state
    return run(primitive.LOGSUMEXP_VJP, {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale}, **params)


# Bytes of a device's part of all rows, from which on kernels that make states of it, and read it again, are faster than the
# reference, which reads it as often in fewer steps: on four H200s logsumexp and its gradient of [8192, 32768] in bfloat16, as
# many as these, take 144 us on kernels, 179 on the reference and 214 with jax.nn. On four H100s, beside other work, softmax of
# these took 182 in two kernels, 233 and 238, and of a quarter, [2048, 32768], 149, 104 and 98.
LEAST_FOR_STATES = 2**27


OF_ONE_KERNEL = (
    "one kernel runs on all devices where each has 1 KiB of a row, or 2 KiB if there are more than 16384 rows, and their memory"
    " can be reached"
)


def unprofitable(x) -> str | None:
    """Says why the reference should be faster than kernels that make states of a part of rows, or None."""
    size = x.size * x.dtype.itemsize
    if size >= LEAST_FOR_STATES:
        return None
    return (
        f"each device has {size} bytes of rows that they share, and kernels that make states pay from {LEAST_FOR_STATES} on;"
        f" {OF_ONE_KERNEL}"
    )


def _state(run, given, axes, dtype, over):
    """The state of whole rows, of operands of which `where` leaves out padding."""
    params = {"axes": axes, "dtype": accumulator(given["x"].dtype, dtype), "return_state": True}
    return merged(*run(primitive.LOGSUMEXP, given, **params)[1:], over=over, scale=given["scale"])


def _saved(x, d, where, over):
    """A saved sum, and what is seen. One of 0, of a row of nothing but -inf, is not one of a row that is masked."""
    if where is None and inside(x, over) is not None:
        d = jnp.where(d == 0, jnp.nan, d)
    return d, seen(x, where, over)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def logsumexp_of_parts(axis_name: tuple[str, ...], params: dict[str, Any], x, where) -> jax.Array:
    """Computes the log-sum-exp of rows that devices along mesh axes share, inside a `shard_map` of the user.

    Its collectives stand beside the primitives, and not in their rules, so that JAX transposes them, which it does in one way
    where the `shard_map` checks what varies and in another where it does not.
    """
    return _lse_and_state(axis_name, params, x, where)[0]


@logsumexp_of_parts.defjvp
def _jvp_of_parts(axis_name, params, primals, tangents):
    (x, where), (t, _) = primals, tangents
    lse, m, d = _lse_and_state(axis_name, params, x, where)
    given, params = {"x": x, "m": m, "d": d, "t": t, "where": where}, params | {"dtype": d.dtype}
    (mean,) = bind(primitive.LOGSUMEXP_JVP, given, scale_tangent=False, **params)
    return lse, lax.psum(mean, axis_name).astype(lse.dtype)


def _lse_and_state(axis_name, params, x, where):
    _, *state = bind(primitive.LOGSUMEXP, {"x": x, "where": where}, return_state=True, **params)
    m, d = _merged_over(*state, axis_name=axis_name)
    return xla.lse_of(m, d, None).astype(params["dtype"]), m, d


def merged(m, d, *sums, over, scale=None):
    """The state of the rows, with a finite `m`, and sums along them, of those of each device's part: by one collective."""
    return _merged_over(m, d, *sums, axis_name=mesh_axes(over), scale=scale)


def _merged_over(m, d, *sums, axis_name, scale=None):
    m = jnp.where(d == 0, -jnp.inf, jnp.where(d == jnp.inf, jnp.inf, m))  # as it was before it was made finite
    of_part = jnp.stack([m, d, *sums])
    # All devices get the same, which JAX is told where a `shard_map` of the user checks what varies.
    to = "invarying" if compat.varying(of_part).issuperset(axis_name) else "varying"
    m, d, *sums = lax.all_gather(of_part, axis_name, axis=1, to=to)
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


# The rules by the names of the operations.
RULES = {
    rule.__name__: rule
    for rule in (
        softmax,
        log_softmax,
        logsumexp,
        softmax_jacobian,
        log_softmax_jvp,
        log_softmax_vjp,
        logsumexp_jvp,
        logsumexp_vjp,
    )
}
