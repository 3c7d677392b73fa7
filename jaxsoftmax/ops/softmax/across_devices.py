"""The softmax family for rows that devices share. No operand moves between devices.

1. If every device reaches the memory of the others, one kernel computes a row on all devices: it reads each element once and
   writes it once (`Runner.on_all_devices`).
2. Else each device computes the state of its part of a row, one all-gather merges the states, and a second pass computes the
   result from the merged state, so that each element is read twice. On two H100s `[2048, 131072]` in float32 takes 578 us this
   way and 398 us the first way; the suite `sharded_rows` measures both.

So a device sends two numbers of each row forward, and one in a derivative. `logsumexp` needs no second pass.

Each rule takes a `lower.Runner`, which runs operations on this device's part of the rows, by kernels where they exist, and
`cuts`, which maps each axis of a row that is sharded to its `Cut`. The other arguments are the operands and parameters of
the operation.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_derivatives import SymbolicZero

from jaxsoftmax import online
from jaxsoftmax._core import compat, sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.softmax import primitive, xla
from jaxsoftmax.ops.softmax.xla import select


def softmax(runner, x, where, scale, *, axes, dtype, cuts):
    """Computes softmax of rows that devices share."""
    operands = {"x": x, "where": local_mask(x, where, cuts), "scale": scale}
    if results := runner.on_all_devices(primitive.SOFTMAX, operands, cuts, axes=axes, dtype=dtype):
        return results
    runner = runner.unless(slower_states(x))
    m, d = _row_states(runner, operands, axes, dtype, cuts)
    d = jnp.where((d > 0) & (d < jnp.inf), d, jnp.nan)  # masked entries are 0 all the same
    operands |= {"m": m, "d": d, "t": jnp.ones_like(d)}
    return runner(primitive.LOGSUMEXP_VJP, operands, axes=axes, dtype=dtype, scale_tangent=False)


def log_softmax(runner, x, where, scale, *, axes, dtype, return_state, cuts):
    """Computes log_softmax of rows that devices share, and with `return_state` their state."""
    operands = {"x": x, "where": local_mask(x, where, cuts), "scale": scale}
    params = {"axes": axes, "dtype": dtype, "return_state": return_state}
    if results := runner.on_all_devices(primitive.LOG_SOFTMAX, operands, cuts, **params):
        return results
    runner = runner.unless(slower_states(x))
    m, d = _row_states(runner, operands, axes, dtype, cuts)
    d += d - d  # NaN where it is infinite
    out = select(operands["where"], xla.saved_exponent(x, m, scale) - jnp.log(d), -jnp.inf).astype(dtype)
    return [out, m, d] if return_state else [out]


def logsumexp(runner, x, where, scale, *, axes, dtype, return_state, cuts):
    """Computes logsumexp of rows that devices share, and with `return_state` their state."""
    runner = runner.unless(slower_states(x))
    m, d = _row_states(runner, {"x": x, "where": local_mask(x, where, cuts), "scale": scale}, axes, dtype, cuts)
    lse = xla.lse_of(m, d, scale).astype(dtype)
    return [lse, m, d] if return_state else [lse]


def softmax_jacobian(runner, y, t, scale, *, axes, dtype, cuts):
    """Computes the derivative of softmax of rows that devices share."""
    y = select(_inside(y, cuts), y, 0)
    operands = {"y": y, "t": t, "scale": scale}
    return _with_sums(runner, primitive.SOFTMAX_JACOBIAN, operands, cuts, axes=axes, dtype=dtype)


def log_softmax_jvp(runner, *, cuts, **arguments):
    """Computes the tangent of log_softmax of rows that devices share."""
    operands, params = _saved_operands(arguments, cuts)
    return _with_sums(runner, primitive.LOG_SOFTMAX_JVP, operands, cuts, **params)


def log_softmax_vjp(runner, *, cuts, **arguments):
    """Computes the cotangent of log_softmax of rows that devices share."""
    operands, params = _saved_operands(arguments, cuts)
    return _with_sums(runner, primitive.LOG_SOFTMAX_VJP, operands, cuts, **params)


def _with_sums(runner, operation, operands, cuts, **params):
    """Computes a derivative that needs sums along whole rows: by one kernel that sums over devices, or by the reference."""
    results = runner.on_all_devices(operation, operands, cuts, **params)
    return results or runner.on_reference(operation, operands, OF_ONE_KERNEL, axis_name=mesh_axes(cuts), **params)


def logsumexp_jvp(runner, *, dtype, cuts, **arguments):
    """Computes the tangent of logsumexp of rows that devices share."""
    operands, params = _saved_operands(arguments, cuts)
    (mean,) = runner(primitive.LOGSUMEXP_JVP, operands, dtype=operands["m"].dtype, **params)
    return lax.psum(mean, mesh_axes(cuts)).astype(dtype)


def logsumexp_vjp(runner, x, m, d, t, where, scale, *, cuts, **params):
    """Computes the cotangent of logsumexp for this device's part of the rows."""
    del cuts  # the state holds the sum over the whole row
    return runner(primitive.LOGSUMEXP_VJP, {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale}, **params)


# Bytes that a device must have of all rows, at least, for kernels that compute states and read their part again to be faster
# than the reference, which also reads it twice, in fewer steps. On four H200s logsumexp and its gradient of [8192, 32768] in
# bfloat16, 2^27 bytes on each device, take 144 us by kernels, 179 by the reference and 214 with jax.nn. On four H100s, beside
# other work, softmax of this array took 182 us by two kernels, 233 and 238; of a quarter, [2048, 32768], it took 149, 104 and
# 98.
LEAST_FOR_STATES = 2**27


OF_ONE_KERNEL = (
    "one kernel runs on all devices where each has 1 KiB of a row, or 2 KiB if there are more than 16384 rows, and their memory"
    " can be reached"
)


def slower_states(x) -> str | None:
    """Says why the reference should be faster than kernels that compute the states of this part of the rows, or None."""
    size = x.size * x.dtype.itemsize
    if size >= LEAST_FOR_STATES:
        return None
    return (
        f"each device has {size} bytes of rows that they share, and kernels that make states pay from {LEAST_FOR_STATES} on;"
        f" {OF_ONE_KERNEL}"
    )


def _row_states(runner, operands, axes, dtype, cuts):
    """Computes the state of whole rows. The `where` of the operands masks padding too."""
    params = {"axes": axes, "dtype": accumulator(operands["x"].dtype, dtype), "return_state": True}
    return merge_states(*runner(primitive.LOGSUMEXP, operands, **params)[1:], cuts=cuts, scale=operands["scale"])


_SAVED = ("x", "m", "d", "t", "where", "scale")


def _saved_operands(arguments, cuts):
    """Returns the operands of a derivative by name, with a mask of this device's part, and the parameters."""
    operands = {name: arguments[name] for name in _SAVED}
    params = {name: value for name, value in arguments.items() if name not in _SAVED}
    x, d, where = operands["x"], operands["d"], operands["where"]
    # A row of nothing except -inf has d = 0, and derivatives that are NaN. A masked row has d = 0 too, and derivatives that are
    # 0: a mask of padding must not turn the first kind into the second.
    if where is None and _inside(x, cuts) is not None:
        operands["d"] = jnp.where(d == 0, jnp.nan, d)
    operands["where"] = local_mask(x, where, cuts)
    return operands, params


def logsumexp_of_parts(axis_name: tuple[str, ...], params: dict[str, Any], x, where, scale) -> jax.Array:
    """Computes the log-sum-exp of rows that devices along mesh axes share, inside a `shard_map` of the user.

    The collectives stand beside the primitives, not in their rules, so that JAX transposes them: in one way if the `shard_map`
    checks what varies over devices (`check_vma`), and in another way if it does not. A primitive does not know which one.
    """
    return state_of_parts(axis_name, params, x, where, scale)[0]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def state_of_parts(axis_name: tuple[str, ...], params: dict[str, Any], x, where, scale) -> tuple[jax.Array, ...]:
    """Computes `logsumexp_of_parts`, and the state `(m, d)` of the rows."""
    return _lse_and_state(axis_name, params, {"x": x, "where": where, "scale": scale})


@functools.partial(state_of_parts.defjvp, symbolic_zeros=True)
def _jvp_of_parts(axis_name, params, primals, tangents):
    operands = dict(zip(("x", "where", "scale"), primals, strict=True))
    lse, m, d = _lse_and_state(axis_name, params, operands)
    of_scores = {name: t for name, t in zip(operands, tangents, strict=True) if name != "where" and not is_zero(t)}
    t, needs_scale = primitive.scores_tangent(operands, of_scores)
    operands |= {"m": m, "d": d, "t": t}
    (mean,) = bind(primitive.LOGSUMEXP_JVP, operands, scale_tangent=needs_scale, **params | {"dtype": d.dtype})
    mean = lax.psum(mean, axis_name)
    found = [mean.astype(lse.dtype), jnp.zeros_like(m), xla.tangent_of_sum(d, mean)]
    return (lse, m, d), tuple(sharding.varying_as(found, [lse, m, d]))


def is_zero(tangent) -> bool:
    """Returns True for the tangent of an operand that is absent or does not depend on what is differentiated."""
    return tangent is None or type(tangent) is SymbolicZero


def _lse_and_state(axis_name, params, operands):
    """Returns the log-sum-exp of whole rows, and their state. `d` alone carries derivatives: those of `scale` too."""
    _, *state = bind(primitive.LOGSUMEXP, operands, return_state=True, **params)
    scale = lax.stop_gradient(operands["scale"])
    m, d = _merge_along_mesh(*state, axis_name=axis_name, scale=scale)
    return xla.lse_of(m, d, scale).astype(params["dtype"]), m, d


def merge_states(m, d, *sums, cuts, scale=None, exponents=None):
    """Merges the states of all devices' parts of rows, and adds up sums along the parts, in one collective.

    `exponents` are `xla.sum_of_exponents` of the parts, or None.

    Returns:
      The state `(m, d)` of whole rows, with a finite `m`, the sums along whole rows, and `exponents` of whole rows.
    """
    return _merge_along_mesh(m, d, *sums, axis_name=mesh_axes(cuts), scale=scale, exponents=exponents)


def _merge_along_mesh(m, d, *sums, axis_name, scale=None, exponents=None):
    more = [] if exponents is None else [exponents]
    maxima, parts, *numbers = gathered(axis_name, unbounded(m, d), d, *sums, *more)
    size = None if scale is None else jnp.abs(scale)
    m, d, *merged = merge_stacked(maxima, parts, *numbers[len(sums) :], scale=size)
    return [online.finite(m), d, *[jnp.sum(total, 0) for total in numbers[: len(sums)]], *merged]


def merge_stacked(maxima, parts, exponents=None, *, scale=None) -> list[jax.Array]:
    """Merges states `(maxima, parts)` along their first axis, and `xla.sum_of_exponents` of them if there are any.

    The scale is not negative, and has the shape of the results.
    """
    m, d, _ = online.merge_along(online.State(maxima, parts), 0, scale=scale)
    if exponents is None:
        return [m, d]
    lower = jnp.broadcast_to(online.finite(m)[None], maxima.shape)
    size = None if scale is None else jnp.broadcast_to(scale[None], maxima.shape)
    return [m, d, jnp.sum(online.lower_exponents(maxima, parts, exponents, lower, scale=size)[1], 0)]


def unbounded(m, d):
    """Returns the maxima of rows with the sums `d`, infinite where `online.finite` made them finite."""
    return jnp.where(d == 0, -jnp.inf, jnp.where(d == jnp.inf, jnp.inf, m))


def gathered(axis_name, *numbers):
    """Gathers numbers of this device's parts of rows from all devices, along a first axis."""
    stacked = jnp.stack(numbers)
    # All devices get the same numbers. If a `shard_map` of the user checks what varies, "invarying" says so to JAX, and nothing
    # else has to make the result the same on all devices.
    to = "invarying" if compat.varying(stacked).issuperset(axis_name) else "varying"
    # It is tiled, because otherwise JAX 0.11.2 does not move explicit mesh axes to behind the first axis.
    return lax.all_gather(stacked[:, None], axis_name, axis=1, tiled=True, to=to)


def alike_on_all(axis_name: tuple[str, ...], array: jax.Array) -> jax.Array:
    """Returns an array that is the same on all devices as one whose type says so, if a `shard_map` around checks that."""
    is_typed = bool(axis_name) and compat.varying(array).issuperset(axis_name)
    return gathered(axis_name, array)[0, 0] if is_typed else array


def mesh_axes(cuts) -> tuple[str, ...]:
    """Returns the mesh axes over which rows are sharded."""
    return tuple([axis for cut in cuts.values() for axis in cut.over])


def local_mask(x, where, cuts):
    """Returns the mask of this device's part of the rows, which excludes the padding that a shard may end in."""
    inside = _inside(x, cuts)
    return where if inside is None else inside if where is None else where & inside


def _inside(x, cuts) -> jax.Array | None:
    """Marks the entries of a part that belong to the rows. Returns None if all do.

    The marks have size 1 except along axes whose last shards end in padding.
    """
    inside = None
    for axis, cut in cuts.items():
        size = x.shape[axis]
        if size * lax.axis_size(cut.over) != cut.size:
            shape = [size if other == axis else 1 for other in range(x.ndim)]
            along_axis = lax.broadcasted_iota(jnp.int32, shape, axis) < cut.size - lax.axis_index(cut.over) * size
            inside = along_axis if inside is None else inside & along_axis
    return inside


RULES = {
    primitive.SOFTMAX: softmax,
    primitive.LOG_SOFTMAX: log_softmax,
    primitive.LOGSUMEXP: logsumexp,
    primitive.SOFTMAX_JACOBIAN: softmax_jacobian,
    primitive.LOG_SOFTMAX_JVP: log_softmax_jvp,
    primitive.LOG_SOFTMAX_VJP: log_softmax_vjp,
    primitive.LOGSUMEXP_JVP: logsumexp_jvp,
    primitive.LOGSUMEXP_VJP: logsumexp_vjp,
}
