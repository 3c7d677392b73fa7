"""The largest scores of rows, and samples from rows, as JAX primitives.

`top_k` gives the `k` largest entries of each row, in decreasing order of the scores `scale * x`, and where they are. Values are
those of `x`, not of the scores. The order is that of `x`, or of `-x` where `scale` is negative, by the bits as `jax.lax.top_k`
has it: NaN of sign 0, +inf, ..., +0, -0, ..., -inf, NaN of sign 1, and among equals the lower index first. An entry outside
`where` counts as a score of -inf, and of integers (and floating dtypes without infinity) as the smallest number. That is its
value too: -inf, +inf where `scale` is negative.

`softmax_top_k` gives the `k` largest weights of the softmax of the scores in place of values: those of the whole row, or, with
`normalize="selected"`, of the `k` found ones.

`categorical` gives the index of one entry of each row, drawn by the Gumbel-max trick: the first that is largest in

    inverse * x + noise * gumbel(key0, key1, row, column)

among those that are kept. `inverse` is 1 / temperature; `noise` is 0 where the temperature is, and 1 elsewhere; None is 1 for
both. Entries are kept by `top_k`, of those by `top_p`, of those by `min_p`, all of which `xla.py` defines.

With `return_state` all give the state `(m, d)` of the rows too, as `logsumexp` has it, for that `scale` or `inverse`: `m` is
the maximum of `sign(scale) * x`, 0 where that is infinite. It does not depend on how it is split, so `m` counts as a constant
and `d` carries the derivative, which is that of logsumexp. The values' tangent is the tangent of `x` at the indices.

The last axis is that of the row, whole on every device; operands but `x` and `where` have size 1 along it. All have the same
number of batch axes in front, each of size 1 where an operand does not vary along it. Those of `row` in `categorical`, and of
`x` in the others, have the sizes of the results.
"""

from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operands import Map, Operand
from jaxsoftmax._core.primitive import bind, define, set_jvp
from jaxsoftmax.ops.softmax import primitive as softmax
from jaxsoftmax.ops.softmax import xla
from jaxsoftmax.ops.top_k.xla import at

_WHOLE = (None,)  # the names of the axes of a row
_X = Operand("x", _WHOLE, is_scores=True, may_be_one=False)
_WHERE, _SCALE = Operand("where", _WHOLE), Operand("scale", _WHOLE)
_ROW = Operand("row", _WHOLE, may_be_one=False)
_STATE = (Operand("m", _WHOLE), Operand("d", _WHOLE))
_OF_ROWS = tuple([Operand(name, _WHOLE) for name in ("key0", "key1", "inverse", "noise", "top_k", "top_p", "min_p")])


def _top_k_types(operands, *, k, return_state, dtype, **params):
    """Those of `top_k` and of `softmax_top_k`."""
    del params
    x = operands["x"]
    batch = x.shape[:-1]
    found = [jax.ShapeDtypeStruct((*batch, k), dtype), jax.ShapeDtypeStruct((*batch, k), jnp.int32)]
    return found + [jax.ShapeDtypeStruct((*batch, 1), accumulator(x.dtype, dtype))] * (2 * return_state)


def _categorical_types(operands, *, return_state, **params):
    del params
    shape = operands["row"].shape
    state = jax.ShapeDtypeStruct(shape, accumulator(operands["x"].dtype))
    return [jax.ShapeDtypeStruct(shape, jnp.int32)] + [state] * (2 * return_state)


def _results(*names):
    results = tuple([Operand(name, _WHOLE) for name in names])
    return lambda return_state, **params: (*results, *_STATE[: 2 * return_state])


TOP_K = define(
    Map("top_k", "top_k", (_X, _WHERE, _SCALE), _top_k_types, _results("values", "indices"), is_cut=True),
)
SOFTMAX_TOP_K = define(
    Map("top_k", "softmax_top_k", (_X, _WHERE, _SCALE), _top_k_types, _results("weights", "indices"), is_cut=True),
)
CATEGORICAL = define(
    Map(
        "top_k",
        "categorical",
        (Operand("x", _WHOLE, is_scores=True), _ROW, *_OF_ROWS, _WHERE),
        _categorical_types,
        _results("index"),
        is_cut=True,
    )
)


def _tangent_of_d(operands, tangents, state, implementation):
    """The tangent of `d` for tangents of `x` and `scale`, None for zero."""
    mean = _mean_tangent(operands, tangents, state, implementation)
    return None if mean is None else state[1] * mean


def _mean_tangent(operands, tangents, state, implementation) -> Any:
    """The mean of the tangents of scores, weighted with softmax, for tangents of `x` and `scale`, None for zero."""
    m, d = state
    t, needs_scale = softmax.scores_tangent(operands, tangents)
    if t is None:
        return None
    given = {name: operands.get(name) for name in ("x", "where", "scale")} | {"m": m, "d": d, "t": t}
    params = {"axes": (m.ndim - 1,), "dtype": d.dtype, "scale_tangent": needs_scale, "implementation": implementation}
    return bind(softmax.LOGSUMEXP_JVP, given, **params)[0]


def _top_k_jvp(operands, tangents, *, dtype, return_state, implementation, **params):
    params |= {"dtype": dtype, "return_state": return_state, "implementation": implementation}
    values, indices, *state = bind(TOP_K, operands, **params)
    tangents_out: list[jax.Array | None] = [None] * (2 + len(state))
    if "x" in tangents:
        where = operands.get("where")
        seen = None if where is None else at(where, indices)
        tangents_out[0] = xla.select(seen, at(tangents["x"], indices).astype(dtype), 0)
    if return_state:
        tangents_out[3] = _tangent_of_d(operands, tangents, state, implementation)
    return [values, indices, *state], tangents_out


def _softmax_top_k_jvp(operands, tangents, *, normalize, dtype, return_state, **params):
    """The jvp rule: `w * (t - mean)` with the tangents of scores that were found, and their mean over what is normalized."""
    params |= {"normalize": normalize, "return_state": return_state or normalize == "all"}
    weights, indices, *state = bind(SOFTMAX_TOP_K, operands, dtype=accumulator(operands["x"].dtype, dtype), **params)
    results = [weights.astype(dtype), indices, *state[: 2 * return_state]]
    tangents_out: list[jax.Array | None] = [None] * len(results)
    t, needs_scale = softmax.scores_tangent(operands, tangents)
    if t is None:
        return results, tangents_out
    chosen = at(t, indices).astype(weights.dtype)
    if needs_scale and operands.get("scale") is not None:
        chosen = chosen * operands["scale"].astype(weights.dtype)
    chosen = jnp.where(weights != 0, chosen, 0)  # what has no weight has no effect, NaN neither
    mean = jnp.sum(weights * chosen, -1, keepdims=True)
    if state:
        mean_of_row = _mean_tangent(operands, tangents, state, params["implementation"])
        mean = mean_of_row if normalize == "all" else mean
        tangents_out[3:] = [state[1] * mean_of_row] * return_state
    tangents_out[0] = jnp.where(weights != 0, weights * (chosen - mean), 0).astype(dtype)
    return results, tangents_out


def _categorical_jvp(operands, tangents, *, return_state, implementation):
    results = bind(CATEGORICAL, operands, return_state=return_state, implementation=implementation)
    if not return_state:
        return results, [None]
    _, *state = results
    shape = (*state[0].shape[:-1], operands["x"].shape[-1])
    scores = {"x": jnp.broadcast_to(operands["x"], shape), "where": operands.get("where"), "scale": operands.get("inverse")}
    moving = {name: tangents[of] for name, of in (("x", "x"), ("scale", "inverse")) if of in tangents}
    if "x" in moving:
        moving["x"] = jnp.broadcast_to(moving["x"], shape)
    return results, [None, None, _tangent_of_d(scores, moving, state, implementation)]


set_jvp(TOP_K, _top_k_jvp)
set_jvp(SOFTMAX_TOP_K, _softmax_top_k_jvp)
set_jvp(CATEGORICAL, _categorical_jvp)
