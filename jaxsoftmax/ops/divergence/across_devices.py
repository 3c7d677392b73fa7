"""Divergences of rows that devices share.

Forward `kl_divergence` takes one collective, which merges the five numbers of all parts of a row. `js_divergence` takes three:
one for the state of each array, and one for two sums. Cotangents are numbers of each row, which every device has, so that the
backward pass needs no collective.

The rules for primitives take the same arguments as those of `ops/softmax/across_devices.py`. `kl_divergence_of_parts`
and `js_divergence_of_parts` are for calls inside a `shard_map` of the user.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.divergence import primitive, xla
from jaxsoftmax.ops.softmax.across_devices import (
    gathered,
    is_zero,
    local_mask,
    merge_states,
    mesh_axes,
    state_of_parts,
    unbounded,
)
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP


def kl_divergence(runner, x, y, where, scale, y_scale, counts, *, axes, dtype, return_state=False, cuts):
    """Computes the divergence of rows that devices share, and with `return_state` their states."""
    operands = {"x": x, "y": y, "where": local_mask(x, where, cuts), "scale": scale, "y_scale": y_scale}
    results = _merged(runner, operands, mesh_axes(cuts), axes, accumulator(x.dtype, y.dtype, dtype))
    return xla.results_of(*results, counts, dtype=dtype, return_state=return_state)


def _jvp(reference, runner, x, where, *, cuts, **others):
    """Computes the numbers of tangents of rows that devices share, by the reference."""
    del runner
    return list(lax.psum(jnp.stack(reference(x=x, where=local_mask(x, where, cuts), **others)), mesh_axes(cuts)))


def js_divergence(runner, x, y, where, scale, y_scale, counts, *, axes, dtype, cuts, **params):
    """Computes the divergence of rows that devices share, and with `return_state` their states."""
    operands = {"x": x, "y": y, "where": local_mask(x, where, cuts), "scale": scale, "y_scale": y_scale}
    of_state, states = {"axes": axes, "dtype": accumulator(x.dtype, y.dtype, dtype), "return_state": True}, []
    for own, factor in ((x, scale), (y, y_scale)):
        local = runner(LOGSUMEXP, {"x": own, "where": operands["where"], "scale": factor}, **of_state)
        states += merge_states(*local[1:], cuts=cuts, scale=factor)
    names = mesh_axes(cuts)
    return xla.results_of_states(states, operands, counts, axes=axes, dtype=dtype, axis_name=names, **params)


_VJP_PARAMS = ("axes", "dtype", "y_dtype", "by", "weight", "of_scores")


def _vjp(operation, runner, x, where, *, cuts, **others):
    """Computes the gradients of this device's logits: the states hold the sums over whole rows."""
    params = {name: others.pop(name) for name in _VJP_PARAMS if name in others}
    return runner(operation, {"x": x, "where": local_mask(x, where, cuts), **others}, **params)


def _merged(runner, operands, axis_name, axes, dtype):
    """Computes `m`, `d`, `sums`, `y_m` and `y_d` of whole rows from this device's parts of them."""
    _, *local = runner(primitive.KL_DIVERGENCE, operands, axes=axes, dtype=dtype, return_state=True)
    m, d, sums, y_m, y_d = gathered(axis_name, *local)
    # The sums carry the derivatives, those of the scales too.
    scales = lax.stop_gradient((operands["scale"], operands["y_scale"]))
    size, y_size = (None if s is None else jnp.abs(s) for s in scales)
    state = online.merge_along(online.State(unbounded(m, d), d), 0, scale=size)
    y_state = online.merge_along(online.State(unbounded(y_m, y_d), y_d), 0, scale=y_size)

    def along(row):
        return jnp.broadcast_to(row[None], m.shape)

    lower, y_lower = (along(online.finite(of.m)) for of in (state, y_state))
    size, y_size = (None if of is None else along(of) for of in (size, y_size))
    _, sums, _ = online.lower_differences(m, d, sums, y_m, y_d, lower, y_lower, scale=size, other_scale=y_size)
    return online.finite(state.m), state.d, jnp.sum(sums, 0), online.finite(y_state.m), y_state.d


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def kl_divergence_of_parts(axis_name: tuple[str, ...], params: dict[str, Any], x, y, where, scale, y_scale, counts):
    """Computes the results of the primitive, with the states, of rows that devices share inside a `shard_map` of the user.

    All devices get the same results, and pass the same scales. The collectives stand beside the primitives, for the reason that
    `logsumexp_of_parts` gives.
    """
    operands = {"x": x, "y": y, "where": where, "scale": scale, "y_scale": y_scale}
    runner = functools.partial(bind, implementation=params["implementation"])
    results = _merged(runner, operands, axis_name, params["axes"], params["dtype"])
    return xla.results_of(*results, counts, dtype=params["dtype"], return_state=True)


@functools.partial(kl_divergence_of_parts.defjvp, symbolic_zeros=True)
def _jvp_of_parts(axis_name, params, primals, tangents):
    operands = dict(zip(("x", "y", "where", "scale", "y_scale"), primals[:5], strict=True))
    results = kl_divergence_of_parts(axis_name, params, *primals)
    divergence, m, d, sums, y_m, y_d = results
    moving = {name: t for name, t in zip(operands, tangents[:5], strict=True) if name != "where" and not is_zero(t)}
    found, of_scores = primitive.tangents_of_scores(operands, moving)
    saved = operands | {"m": m, "d": d, "y_m": y_m, "y_d": y_d, **found}
    numbers = lax.psum(jnp.stack(bind(primitive.KL_DIVERGENCE_JVP, saved, of_scores=of_scores, **params)), axis_name)
    saved_sums, moves = (divergence, d, sums, y_d), found["t"] is not None
    tangent, of_d, of_sums, of_y_d = primitive.tangents_of_results(*saved_sums, *numbers, moves=moves)
    found = [tangent, jnp.zeros_like(m), of_d, of_sums, jnp.zeros_like(m), of_y_d]
    return results, sharding.varying_as(found, results)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def js_divergence_of_parts(axis_name: tuple[str, ...], params: dict[str, Any], x, y, where, scale, y_scale, counts):
    """Computes the results of the primitive, with the states, as `kl_divergence_of_parts` does."""
    states, of_state = [], {name: params[name] for name in ("axes", "dtype", "implementation")}
    for own, factor in ((x, scale), (y, y_scale)):
        states += state_of_parts(axis_name, of_state, own, where, factor)[1:]
    operands = {"x": x, "y": y, "where": where, "scale": scale, "y_scale": y_scale}
    of_call = {name: params[name] for name in ("axes", "dtype", "weight")}
    return xla.results_of_states(states, operands, counts, return_state=True, axis_name=axis_name, **of_call)


@functools.partial(js_divergence_of_parts.defjvp, symbolic_zeros=True)
def _jvp_of_mixture(axis_name, params, primals, tangents):
    names, weight = ("x", "y", "where", "scale", "y_scale"), params["weight"]
    results = js_divergence_of_parts(axis_name, params, *primals)
    operands = {name: primal for name, primal in zip(names, primals[:5], strict=True) if primal is not None}
    moving = {name: t for name, t in zip(names, tangents[:5], strict=True) if name != "where" and not is_zero(t)}
    found, of_scores = primitive.tangents_of_scores(operands, moving)
    saved = operands | dict(zip(("m", "d", "y_m", "y_d"), results[1:5], strict=True))
    numbers = bind(primitive.JS_DIVERGENCE_JVP, saved | found, of_scores=of_scores, **params)
    numbers = lax.psum(jnp.stack(numbers), axis_name)
    of_d, of_y_d, *of_sums = primitive.tangents_of_sums(weight, params["axes"], saved, moving, numbers)
    of_sums = lax.psum(jnp.stack(of_sums), axis_name)
    zeros = [jnp.zeros_like(m) for m in (results[1], results[3])]  # unlike `d`, they do not vary where a scale does
    found = [primitive.tangent_of_mixture(weight, results, numbers), zeros[0], of_d, zeros[1], of_y_d, *of_sums]
    return results, sharding.varying_as(found, results)


RULES = {
    primitive.KL_DIVERGENCE: kl_divergence,
    primitive.KL_DIVERGENCE_JVP: functools.partial(_jvp, xla.kl_divergence_jvp),
    primitive.KL_DIVERGENCE_VJP: functools.partial(_vjp, primitive.KL_DIVERGENCE_VJP),
    primitive.JS_DIVERGENCE: js_divergence,
    primitive.JS_DIVERGENCE_JVP: functools.partial(_jvp, xla.js_divergence_jvp),
    primitive.JS_DIVERGENCE_VJP: functools.partial(_vjp, primitive.JS_DIVERGENCE_VJP),
}
