"""softmax, log_softmax and logsumexp as JAX primitives, with their derivatives.

Each op's derivative is a primitive too, linear in one operand, so that forward and reverse mode run the same few kernels:

    op           tangent                                       cotangent
    softmax      y * (t - sum(y * t))                          the same map: the Jacobian is symmetric
    log_softmax  t - sum(p * t)                                t - p * sum(t)
    logsumexp    sum(p * t)                                    p * t

Softmax saves its result `y`; the other two save the state `(m, d)` of each row, from which `p = exp(s - m) / d`. What depends
on the state does not depend on how it is split between `m` and `d`, so `m` counts as a constant and `d` carries the derivative.

All operands have the same axes: `m` and `d`, and what belongs to logsumexp's result, have size 1 along `axes`, `where` and
`scale` may have size 1 anywhere. Parameters of all are `axes`, `dtype` (of the result) and `implementation`; of log_softmax and
logsumexp `return_state`; of their maps `scale_tangent`, whether the map still has to multiply its operand with `scale`.
"""

import functools
from typing import Any

import jax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operand, Operation
from jaxsoftmax._core.primitive import bind, define, set_jvp, set_transpose
from jaxsoftmax.ops.softmax import xla
from jaxsoftmax.ops.softmax.implementations import SOFTMAX_FAMILY
from jaxsoftmax.ops.softmax.problem import SoftmaxProblem

_X = Operand("x", is_scores=True, may_be_one=False)
_M, _D = (Operand(name, may_be_one=False) for name in "md")
_T = _X.called("t")  # a tangent or a cotangent as large as the scores
_T_OF_ROWS = _M.called("t")
_WHERE, _SCALE = Operand("where"), Operand("scale")


def _whole(operands, *, axes, dtype, **params):
    """The result of a map that is as large as the scores."""
    del axes, params
    return [jax.ShapeDtypeStruct(next(iter(operands.values())).shape, dtype)]


def _of_rows(operands, *, axes, dtype, **params):
    """The result of a map that gives one number for each row."""
    del params
    shape = tuple([1 if axis in axes else size for axis, size in enumerate(operands["x"].shape)])
    return [jax.ShapeDtypeStruct(shape, dtype)]


def _with_state(types, operands, *, return_state, dtype, **params):
    """The result, and the state of the rows if it is asked for."""
    state = _of_rows(operands, dtype=accumulator(operands["x"].dtype, dtype), **params)
    return types(operands, dtype=dtype, **params) + (2 * state if return_state else [])


def _map(name, operands, types, **options) -> Operation:
    return define(Operation(SOFTMAX_FAMILY, name, operands, types, problem=SoftmaxProblem, **options))


SOFTMAX = _map("softmax", (_X, _WHERE, _SCALE), _whole)
LOG_SOFTMAX = _map("log_softmax", (_X, _WHERE, _SCALE), functools.partial(_with_state, _whole))
LOGSUMEXP = _map("logsumexp", (_X, _WHERE, _SCALE), functools.partial(_with_state, _of_rows))
SOFTMAX_JACOBIAN = _map("softmax_jacobian", (_X.called("y"), _T, _SCALE), _whole, linear=("t",), knows_machine=True)
LOG_SOFTMAX_JVP = _map("log_softmax_jvp", (_X, _M, _D, _T, _WHERE, _SCALE), _whole, linear=("t",))
LOG_SOFTMAX_VJP = _map("log_softmax_vjp", (_X, _M, _D, _T, _WHERE, _SCALE), _whole, linear=("t",))
LOGSUMEXP_JVP = _map("logsumexp_jvp", (_X, _M, _D, _T, _WHERE, _SCALE), _of_rows, linear=("t",))
LOGSUMEXP_VJP = _map("logsumexp_vjp", (_X, _M, _D, _T_OF_ROWS, _WHERE, _SCALE), _whole, linear=("t",))


def scores_tangent(operands, tangents) -> tuple[Any, bool]:
    """The tangent of `scale * x`, None for zero, and whether the map that gets it still has to multiply it with `scale`."""
    if "scale" not in tangents:
        return tangents.get("x"), True
    return xla.scores_tangent(operands["x"], operands["scale"], tangents.get("x"), tangents["scale"]), False


def _softmax_jvp(operands, tangents, **params):
    (y,) = bind(SOFTMAX, operands, **params)
    t, needs_scale = scores_tangent(operands, tangents)
    if t is None:
        return [y], [None]
    return [y], bind(SOFTMAX_JACOBIAN, {"y": y, "t": t, "scale": operands.get("scale") if needs_scale else None}, **params)


def _log_jvp(this, tangent, operands, tangents, *, return_state, **params):
    """The jvp rule of log_softmax and logsumexp, whose tangent is that map."""
    out, m, d = bind(this, operands, return_state=True, **params)
    t, needs_scale = scores_tangent(operands, tangents)
    results, tangents_out = [out, m, d], [None, None, None]
    if t is not None:
        given = operands | {"m": m, "d": d, "t": t}
        tangents_out[:1] = bind(tangent, given, scale_tangent=needs_scale, **params)
        if return_state:
            (mean,) = bind(LOGSUMEXP_JVP, given, scale_tangent=needs_scale, **{**params, "dtype": d.dtype})
            tangents_out[2] = d * mean
    return (results, tangents_out) if return_state else (results[:1], tangents_out[:1])


def _transpose(transposed, cotangents, operands, types, *, dtype, **params):
    """The transpose rule of a map that is linear in `t`, whose transpose is that map."""
    del dtype
    (t,) = bind(transposed, operands | {"t": cotangents[0]}, dtype=types["t"].dtype, **params)
    return {"t": t}


set_jvp(SOFTMAX, _softmax_jvp)
set_jvp(LOG_SOFTMAX, functools.partial(_log_jvp, LOG_SOFTMAX, LOG_SOFTMAX_JVP))
set_jvp(LOGSUMEXP, functools.partial(_log_jvp, LOGSUMEXP, LOGSUMEXP_JVP))
for _this, _transposed in (
    (SOFTMAX_JACOBIAN, SOFTMAX_JACOBIAN),
    (LOG_SOFTMAX_JVP, LOG_SOFTMAX_VJP),
    (LOG_SOFTMAX_VJP, LOG_SOFTMAX_JVP),
    (LOGSUMEXP_JVP, LOGSUMEXP_VJP),
    (LOGSUMEXP_VJP, LOGSUMEXP_JVP),
):
    set_transpose(_this, functools.partial(_transpose, _transposed))
