"""The largest scores of rows, and samples from rows, as JAX primitives.

`top_k` gives the `k` largest entries of each row, in decreasing order of the scores `scale * x`, and their indices. Values are
those of `x`, not of the scores. The order is the one of `x`, or of `-x` if `scale` is negative, by the bits as `jax.lax.top_k`
has it: NaN of sign 0, +inf, ..., +0, -0, ..., -inf, NaN of sign 1, and among equals the lower index first. An entry outside
`where` counts as a score of -inf; among integers, and floating dtypes without infinity, as the smallest number. That is its
value too: -inf, or +inf if `scale` is negative.

`softmax_top_k` gives the `k` largest weights of the softmax of the scores in place of values: weights in the whole row, or,
with `normalize="selected"`, among the `k` selected entries.

`categorical` gives the index of one entry of each row, drawn by the Gumbel-max trick: the first index where

    inverse * x + noise * gumbel(key0, key1, row, column)

is largest among the entries that are kept. `inverse` is 1 / temperature; `noise` is 0 where the temperature is 0, and 1
elsewhere; None stands for 1. The filters `top_k`, `top_p` and `min_p` keep entries one after another: `xla.py` defines them.

The derivatives of `softmax_top_k` are linear, and transposes of each other. With the weights `w` at the indices and `p` of
whole rows they are:

    softmax_top_k_jvp  for a tangent t of the scores, or of x with `scale_tangent`:  w * (t[indices] - mean). The mean is
                       sum(p * t), or sum(w * t[indices]) if only the selected entries are normalized. With `return_mean`,
                       sum(p * t) too.
    softmax_top_k_vjp  for cotangents c and b of the two results, or one of them:  p * b, and at the indices
                       w * c, less p * sum(w * c); or w * (c - sum(w * c)) if only the selected entries are normalized.

A router with a z-loss so has both derivatives in one pass. Weights of the selected entries are saved in the dtype of the
result, as softmax saves its result. Weights of whole rows are computed again from `x` and the state, which are operands
wherever `p` is needed. The indices of a row differ. `size` is the size of a row.

With `return_state` all give the state `(m, d)` of the rows too, as `logsumexp` has it, for that `scale` or `inverse`: `m` is
the maximum of `sign(scale) * x`, 0 where that is infinite. It does not matter how a log-sum-exp is split into the two, so `m`
counts as a constant, and `d` carries the derivative. The tangent of the values is the tangent of `x` at the indices.

The last axis is the row's, whole on every device; operands except `x` and `where` have size 1 along it. All have the same
number of batch axes in front, each of size 1 where an operand does not vary along it. The results have the batch axes of `row`
in `categorical`, and of `x` in the others.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import OnShards, Operand, Operation
from jaxsoftmax._core.primitive import bind, define, set_jvp, set_transpose
from jaxsoftmax.ops.softmax import primitive as softmax
from jaxsoftmax.ops.softmax import xla
from jaxsoftmax.ops.top_k.implementations import TOP_K_FAMILY
from jaxsoftmax.ops.top_k.problem import TopKProblem
from jaxsoftmax.ops.top_k.xla import at

_WHOLE = (None,)  # the names of the axes of a row
_X = Operand("x", _WHOLE, is_scores=True, may_be_one=False)
_WHERE, _SCALE = Operand("where", _WHOLE), Operand("scale", _WHOLE)
_ROW = Operand("row", _WHOLE, may_be_one=False)
_STATE = (Operand("m", _WHOLE), Operand("d", _WHOLE))
_INDICES, _WEIGHTS, _C, _B = (Operand(name, _WHOLE, may_be_one=False) for name in ("indices", "weights", "c", "b"))
_SAVED = (_X, *(Operand(name, _WHOLE, may_be_one=False) for name in "md"), _WEIGHTS, _WHERE, _SCALE)
_OPTIONS = tuple([Operand(name, _WHOLE) for name in ("key0", "key1", "inverse", "noise", "top_k", "top_p", "min_p")])


def _top_k_types(operands, *, k, return_state, dtype, **params):
    """Returns the types of the results of `top_k` and of `softmax_top_k`."""
    del params
    x = operands["x"]
    batch = x.shape[:-1]
    entries = [jax.ShapeDtypeStruct((*batch, k), dtype), jax.ShapeDtypeStruct((*batch, k), jnp.int32)]
    return entries + [jax.ShapeDtypeStruct((*batch, 1), accumulator(x.dtype, dtype))] * (2 * return_state)


def _categorical_types(operands, *, return_state, **params):
    del params
    shape = operands["row"].shape
    state = jax.ShapeDtypeStruct(shape, accumulator(operands["x"].dtype))
    return [jax.ShapeDtypeStruct(shape, jnp.int32)] + [state] * (2 * return_state)


def _jvp_types(operands, *, dtype, return_mean, **params):
    del params
    indices = operands["indices"]
    mean = [jax.ShapeDtypeStruct((*indices.shape[:-1], 1), operands["d"].dtype)] if return_mean else []
    return [jax.ShapeDtypeStruct(indices.shape, dtype), *mean]


def _vjp_types(operands, *, size, dtype, **params):
    del params
    return [jax.ShapeDtypeStruct((*operands["indices"].shape[:-1], size), dtype)]


def _results(*names):
    results = tuple([Operand(name, _WHOLE) for name in names])
    return lambda return_state, **params: (*results, *_STATE[: 2 * return_state])


def _operation(name, operands, types, results, linear=(), with_batch="x", factor_of="") -> Operation:
    """Describes an operation whose reference runs on shards, too: XLA would gather the rows of a `lax.top_k`."""
    # A reference that sorts whole rows would gather nothing. But jax 0.11.2 partitions its gradient wrongly if columns
    # are sharded and another mesh axis is idle.
    problem, on_shards = functools.partial(TopKProblem, with_batch=with_batch), OnShards.EVERYTHING
    options = {"linear": linear, "problem": problem, "on_shards": on_shards, "factor_of": factor_of}
    return Operation(TOP_K_FAMILY, name, operands, types, results, **options)


TOP_K = define(_operation("top_k", (_X, _WHERE, _SCALE), _top_k_types, _results("values", "indices")))
SOFTMAX_TOP_K = define(_operation("softmax_top_k", (_X, _WHERE, _SCALE), _top_k_types, _results("weights", "indices")))
CATEGORICAL = define(
    _operation(
        "categorical",
        (Operand("x", _WHOLE, is_scores=True), _ROW, *_OPTIONS, _WHERE),
        _categorical_types,
        _results("index"),
        with_batch="row",
        factor_of="x",
    )
)
SOFTMAX_TOP_K_JVP = define(
    _operation(
        "softmax_top_k_jvp",
        (_INDICES, _X.called("t"), *_SAVED),
        _jvp_types,
        lambda return_mean, **params: (_C, *[_B] * return_mean),
        linear=("t",),
        with_batch="indices",
    )
)
SOFTMAX_TOP_K_VJP = define(
    _operation(
        "softmax_top_k_vjp",
        (_INDICES, _C, _B, *_SAVED),
        _vjp_types,
        lambda **params: (_X,),
        linear=("c", "b"),
        with_batch="indices",
    )
)


def _tangent_of_d(operands, tangents, state, implementation) -> Any:
    """Returns the tangent of `d`, or None for zero: `d` times the mean of the scores' tangents."""
    m, d = state
    t, needs_scale = softmax.scores_tangent(operands, tangents)
    if t is None:
        return None
    of_mean = {name: operands.get(name) for name in ("x", "where", "scale")} | {"m": m, "d": d, "t": t}
    params = {"axes": (m.ndim - 1,), "dtype": d.dtype, "scale_tangent": needs_scale, "implementation": implementation}
    return d * bind(softmax.LOGSUMEXP_JVP, of_mean, **params)[0]


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


def _softmax_top_k_jvp(operands, tangents, *, normalize, dtype, return_state, implementation, **params):
    params |= {"normalize": normalize, "dtype": dtype, "implementation": implementation}
    needs_state = return_state or normalize == "all"
    weights, indices, *state = bind(SOFTMAX_TOP_K, operands, return_state=needs_state, **params)
    results = [weights, indices, *state[: 2 * return_state]]
    tangents_out: list[jax.Array | None] = [None] * len(results)
    t, needs_scale = softmax.scores_tangent(operands, tangents)
    if t is None:
        return results, tangents_out
    of_jvp = {"indices": indices, "t": t, "scale": operands.get("scale")}
    if needs_state:
        of_jvp |= {"x": operands["x"], "m": state[0], "d": state[1], "where": operands.get("where")}
    if normalize == "selected":
        of_jvp["weights"] = weights
    options = {"return_mean": return_state, "scale_tangent": needs_scale, "implementation": implementation}
    tangents_out[0], *mean = bind(SOFTMAX_TOP_K_JVP, of_jvp, normalize=normalize, dtype=dtype, **options)
    if return_state:
        tangents_out[3] = state[1] * mean[0]
    return results, tangents_out


def _transpose_of_jvp(cotangents, operands, types, *, return_mean, dtype, **params):
    del return_mean, dtype
    (c, *b), t = cotangents, types["t"]
    b = b[0] if b else None
    if b is None and params["normalize"] == "selected":  # nothing of whole rows is needed
        operands = {name: operands[name] for name in ("indices", "weights", "scale") if name in operands}
    if c is None:
        of_mean = {name: operands.get(name) for name in ("x", "m", "d", "where", "scale")} | {"t": b}
        params = {name: params[name] for name in ("scale_tangent", "implementation")}
        (t,) = bind(softmax.LOGSUMEXP_VJP, of_mean, axes=(t.ndim - 1,), dtype=t.dtype, **params)
        return {"t": t}
    (t,) = bind(SOFTMAX_TOP_K_VJP, operands | {"c": c, "b": b}, size=t.shape[-1], dtype=t.dtype, **params)
    return {"t": t}


def _transpose_of_vjp(cotangents, operands, types, *, size, dtype, **params):
    del size, dtype
    kind = types["c"].dtype if "c" in types else types["b"].dtype
    results = bind(SOFTMAX_TOP_K_JVP, operands | {"t": cotangents[0]}, return_mean="b" in types, dtype=kind, **params)
    return {name: value for name, value in zip("cb", results, strict=False) if name in types}


def _categorical_jvp(operands, tangents, *, return_state, implementation):
    results = bind(CATEGORICAL, operands, return_state=return_state, implementation=implementation)
    if not return_state:
        return results, [None]
    _, *state = results
    shape = (*state[0].shape[:-1], operands["x"].shape[-1])
    scores = {"x": jnp.broadcast_to(operands["x"], shape), "where": operands.get("where"), "scale": operands.get("inverse")}
    of_scores = {name: tangents[source] for name, source in (("x", "x"), ("scale", "inverse")) if source in tangents}
    if "x" in of_scores:
        of_scores["x"] = jnp.broadcast_to(of_scores["x"], shape)
    return results, [None, None, _tangent_of_d(scores, of_scores, state, implementation)]


set_jvp(TOP_K, _top_k_jvp)
set_jvp(SOFTMAX_TOP_K, _softmax_top_k_jvp)
set_jvp(CATEGORICAL, _categorical_jvp)
set_transpose(SOFTMAX_TOP_K_JVP, _transpose_of_jvp)
set_transpose(SOFTMAX_TOP_K_VJP, _transpose_of_vjp)
