"""Divergences of two softmaxes as JAX primitives, and their derivatives as primitives.

The scores of a row are `s = scale * x` and `t = y_scale * y`, with `p = softmax(s)` and `q = softmax(t)`. Where
`u = s - max s`, `v = t - max t`, `d = sum(exp(u))`, `y_d = sum(exp(v))` and `sums = sum(exp(u) * (u - v))`,

    kl_divergence     sum(p * log(p / q)) = sums / d + log(y_d / d), in nats, and with `return_state` m, d, sums, y_m and y_d

An entry whose `exp(u)` is 0 adds 0. Rounding below 0 is cut off. The derivatives are linear, and transposes of each other:

    kl_divergence_jvp  from the tangents t of x and y_t of y:  a = sum(p * ((u - v) * t - y_t)), b = sum(p * t) and
                                                               c = sum(q * y_t), with t * ds/dx for t, y_t * dt/dy for y_t
    kl_divergence_vjp  from numbers a, b and c of each row:    (a * (u - v) + b) * p * ds/dx   and   (c * q - a * p) * dt/dy

The tangent of the divergence is `a - b * sums / d + c`. Results that depend on a state do not depend on how it is split into a
maximum and a sum, so `m` and `y_m` count as constants. With `of_scores` tangents and cotangents are those of the scores.

The Jensen-Shannon divergence has the parameter `weight`, the share `w` of `p` in the mixture `r = w * p + (1 - w) * q`, between
0 and 1. Where `f = log(p / r)` and `g = log(q / r)`,

    js_divergence      w * sum(p * f) + (1 - w) * sum(q * g), and with `return_state` m, d, y_m, y_d, sum(p * f) and sum(q * g)
    js_divergence_jvp  a = sum(w * p * f * t + (1 - w) * q * g * y_t), b = sum(p * t) and c = sum(q * y_t)
    js_divergence_vjp  (a * w * f + b) * p * ds/dx   and   (a * (1 - w) * g + c) * q * dt/dy

The tangent of the divergence is `a - b * w * sum(p * f) - c * (1 - w) * sum(q * g)`: what `r` adds cancels, because the
tangents of `p` and of `q` sum to 0. Those of the two sums, for higher derivatives, are `jax.jvp` of the reference.

All operands have the same axes. `counts`, `scale`, `y_scale`, operands of states and results of rows have size 1 along `axes`;
`where` and the scales may have size 1 along others too. A row that does not count, as `counts` says, gives 0; `where` must mask
all of it.

Parameters of all primitives are `axes`, `dtype` (of the results) and `implementation`. `kl_divergence_vjp` has `by`, "x", "y"
or "xy": the gradients that it computes; that by `y` has the dtype `y_dtype`.
"""

import functools
from dataclasses import replace

import jax
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operand, Operation
from jaxsoftmax._core.primitive import bind, define, set_jvp, set_transpose
from jaxsoftmax.ops.divergence import xla
from jaxsoftmax.ops.divergence.implementations import DIVERGENCE_FAMILY
from jaxsoftmax.ops.divergence.problem import DivergenceProblem, MixtureProblem
from jaxsoftmax.ops.softmax.xla import scores_tangent, tangent_of_sum

_X = Operand("x", is_scores=True, may_be_one=False)
_Y = _X.called("y")
_M = Operand("m", may_be_one=False)
_OPTIONS = tuple([Operand(name) for name in ("where", "scale", "y_scale")])
_SAVED = (_X, _Y, *map(_M.called, ("m", "d", "y_m", "y_d")))


def _row_shape(operands, axes):
    return tuple([1 if axis in axes else size for axis, size in enumerate(operands["x"].shape)])


def _of_rows(n_saved, operands, *, axes, dtype, return_state, **params):
    del params
    shape, state = _row_shape(operands, axes), accumulator(operands["x"].dtype, operands["y"].dtype, dtype)
    return [jax.ShapeDtypeStruct(shape, kind) for kind in (dtype, *[state] * (n_saved * return_state))]


def _numbers(operands, *, axes, dtype, **params):
    del params
    return [jax.ShapeDtypeStruct(_row_shape(operands, axes), dtype)] * 3


def _whole(operands, *, by, dtype, y_dtype, **params):
    del params
    dtypes = {"x": dtype, "y": y_dtype}
    return [jax.ShapeDtypeStruct(operands["x"].shape, dtypes[name]) for name in by]


KL_DIVERGENCE = define(
    Operation(
        DIVERGENCE_FAMILY,
        "kl_divergence",
        (_X, _Y, *_OPTIONS, _M.called("counts")),
        functools.partial(_of_rows, 5),
        problem=DivergenceProblem,
    )
)
KL_DIVERGENCE_JVP = define(
    Operation(
        DIVERGENCE_FAMILY,
        "kl_divergence_jvp",
        (*_SAVED, _X.called("t"), _X.called("y_t"), *_OPTIONS),
        _numbers,
        linear=("t", "y_t"),
        problem=DivergenceProblem,
    )
)
KL_DIVERGENCE_VJP = define(
    Operation(
        DIVERGENCE_FAMILY,
        "kl_divergence_vjp",
        (*_SAVED, *map(_M.called, "abc"), *_OPTIONS),
        _whole,
        linear=("a", "b", "c"),
        problem=DivergenceProblem,
    )
)
JS_DIVERGENCE = define(
    replace(KL_DIVERGENCE, name="js_divergence", types=functools.partial(_of_rows, 6), problem=MixtureProblem)
)
JS_DIVERGENCE_JVP = define(replace(KL_DIVERGENCE_JVP, name="js_divergence_jvp", problem=MixtureProblem))
JS_DIVERGENCE_VJP = define(replace(KL_DIVERGENCE_VJP, name="js_divergence_vjp", problem=MixtureProblem))


def tangents_of_scores(operands, tangents):
    """Returns the tangents of both arrays by name, None for zero, and whether they are those of the scores.

    They are those of the scores where a scale has a tangent.
    """
    of_scores, found = not tangents.keys().isdisjoint(("scale", "y_scale")), {}
    for name, x, scale in (("t", "x", "scale"), ("y_t", "y", "y_scale")):
        dx, dscale = tangents.get(x), tangents.get(scale)
        found[name] = dx
        if of_scores and not (dx is None and dscale is None):
            found[name] = scores_tangent(operands[x], operands.get(scale), dx, dscale)
    return found, of_scores


def tangents_of_results(divergence, d, sums, y_d, a, b, c, moves):
    """Computes the tangents of the divergence, of `d`, `sums` and `y_d`, from numbers of rows and saved results.

    `moves` tells whether the scores of `p` have a tangent. If they have none, an infinite divergence keeps a finite derivative.
    """
    mean = sums / d + 0 * lax.stop_gradient(divergence)  # NaN if the divergence is not finite
    tangent = a - b * mean + c if moves else a + c
    return tangent, tangent_of_sum(d, b), tangent_of_sum(d, a + b), tangent_of_sum(y_d, c)


def _kl_jvp(operands, tangents, *, return_state, **params):
    """Computes results and tangents."""
    results = bind(KL_DIVERGENCE, operands, return_state=True, **params)
    divergence, m, d, sums, y_m, y_d = results
    found, of_scores = tangents_of_scores(operands, tangents)
    saved = {name: operand for name, operand in operands.items() if name != "counts"}
    saved |= {"m": m, "d": d, "y_m": y_m, "y_d": y_d, **found}
    numbers = bind(KL_DIVERGENCE_JVP, saved, of_scores=of_scores, **params)
    tangent, *of_state = tangents_of_results(divergence, d, sums, y_d, *numbers, moves=found["t"] is not None)
    if not return_state:
        return results[:1], [tangent]
    return results, [tangent, None, *of_state[:2], None, of_state[2]]


def _js_jvp(operands, tangents, *, return_state, weight, **params):
    """Computes results and tangents."""
    results = bind(JS_DIVERGENCE, operands, return_state=True, weight=weight, **params)
    found, of_scores = tangents_of_scores(operands, tangents)
    saved = {name: operand for name, operand in operands.items() if name != "counts"}
    saved |= dict(zip(("m", "d", "y_m", "y_d"), results[1:5], strict=True))
    numbers = bind(JS_DIVERGENCE_JVP, saved | found, weight=weight, of_scores=of_scores, **params)
    tangent = tangent_of_mixture(weight, results, numbers)
    if not return_state:
        return results[:1], [tangent]
    of_d, of_y_d, *of_sums = tangents_of_sums(weight, params["axes"], saved, tangents, numbers)
    return results, [tangent, None, of_d, None, of_y_d, *of_sums]


def tangent_of_mixture(weight, results, numbers):
    """Computes the tangent of the Jensen-Shannon divergence from numbers of rows and saved results."""
    (a, b, c), (sums, y_sums) = numbers, results[5:]
    return a - weight * sums * b - (1 - weight) * y_sums * c


def tangents_of_sums(weight, axes, saved, tangents, numbers):
    """Computes the tangents of `d`, of `y_d`, and of both sums over the mixture, or of their parts on this device."""
    _, b, c = numbers
    moving = tangents | {"d": tangent_of_sum(saved["d"], b), "y_d": tangent_of_sum(saved["y_d"], c)}

    def sums_of(primals):
        return xla.sums_of_mixture(weight, axes, saved | primals)

    of_sums = jax.jvp(sums_of, ({name: saved[name] for name in moving},), (moving,))[1]
    return [moving["d"], moving["y_d"], *of_sums]


def _transpose_of_jvp(vjp, cotangents, operands, types, *, dtype, **params):
    del dtype
    dtypes = {name: types[of].dtype for name, of in (("x", "t"), ("y", "y_t")) if of in types}
    by, numbers = "".join(dtypes), dict(zip("abc", cotangents, strict=True))
    dtype, y_dtype = dtypes.get("x", dtypes.get("y")), dtypes.get("y")
    results = bind(vjp, operands | numbers, by=by, dtype=dtype, y_dtype=y_dtype, **params)
    return dict(zip([{"x": "t", "y": "y_t"}[name] for name in by], results, strict=True))


def _transpose_of_vjp(jvp, cotangents, operands, types, *, by, dtype, y_dtype, **params):
    kind = accumulator(operands["x"].dtype, operands["y"].dtype, dtype)
    tangents = dict(zip([{"x": "t", "y": "y_t"}[name] for name in by], cotangents, strict=True))
    numbers = bind(jvp, operands | tangents, dtype=kind, **params)
    return {name: number for name, number in zip("abc", numbers, strict=True) if name in types}


set_jvp(KL_DIVERGENCE, _kl_jvp)
set_jvp(JS_DIVERGENCE, _js_jvp)
set_transpose(KL_DIVERGENCE_JVP, functools.partial(_transpose_of_jvp, KL_DIVERGENCE_VJP))
set_transpose(KL_DIVERGENCE_VJP, functools.partial(_transpose_of_vjp, KL_DIVERGENCE_JVP))
set_transpose(JS_DIVERGENCE_JVP, functools.partial(_transpose_of_jvp, JS_DIVERGENCE_VJP))
set_transpose(JS_DIVERGENCE_VJP, functools.partial(_transpose_of_vjp, JS_DIVERGENCE_JVP))
