"""softmax, log_softmax and logsumexp as JAX primitives, with their derivatives.

The derivative of an op is a primitive too, linear in one operand, so that forward and reverse mode run the same few kernels:

    op           tangent                                       cotangent
    softmax      y * (t - sum(y * t))                          the same operation: the Jacobian is symmetric
    log_softmax  t - sum(p * t)                                t - p * sum(t)
    logsumexp    sum(p * t)                                    p * t

Softmax saves its result `y`, in the dtype of the result. The other two save the state `(m, d)` of each row, with which `p =
exp(s - m) / d`. Results that depend on the state do not depend on how it is split into `m` and `d`, so `m` counts as a constant
and `d` carries the derivative.

All operands have the same axes. `m`, `d` and the cotangent of logsumexp have size 1 along `axes`; `where` and `scale` may have
size 1 along any axis. All primitives have the parameters `axes`, `dtype` (of the result) and `implementation`. log_softmax and
logsumexp have `return_state`; their derivatives have `scale_tangent`, True if they must still multiply `t` by `scale`.
"""

import functools
from typing import Any

import jax
from jax import lax

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
    """Returns the type of a result that is as large as the scores."""
    del axes, params
    return [jax.ShapeDtypeStruct(next(iter(operands.values())).shape, dtype)]


def _of_rows(operands, *, axes, dtype, **params):
    """Returns the type of a result that has one number for each row."""
    del params
    shape = tuple([1 if axis in axes else size for axis, size in enumerate(operands["x"].shape)])
    return [jax.ShapeDtypeStruct(shape, dtype)]


def _with_state(types, operands, *, return_state, dtype, **params):
    """Returns the type of the result, and with `return_state` the types of the state of rows."""
    state = _of_rows(operands, dtype=accumulator(operands["x"].dtype, dtype), **params)
    return types(operands, dtype=dtype, **params) + (2 * state if return_state else [])


def _operation(name, operands, types, linear=(), knows_machine=False, **options) -> Operation:
    """Defines an operation, whose problems have these options."""
    problem = functools.partial(SoftmaxProblem, **options)
    more: dict[str, Any] = {"knows_machine": knows_machine, "factor_of": "x" if _X in operands else ""}
    return define(Operation(SOFTMAX_FAMILY, name, operands, types, linear=linear, problem=problem, **more))


_SCORES, _SAVED = (_X, _WHERE, _SCALE), (_X, _M, _D, _T, _WHERE, _SCALE)
SOFTMAX = _operation("softmax", _SCORES, _whole)
LOG_SOFTMAX = _operation("log_softmax", _SCORES, functools.partial(_with_state, _whole), keeps_scores=True)
LOGSUMEXP = _operation("logsumexp", _SCORES, functools.partial(_with_state, _of_rows), writes_rows=False)
SOFTMAX_JACOBIAN = _operation(
    "softmax_jacobian", (_X.called("y"), _T, _SCALE), _whole, linear=("t",), knows_machine=True, reduces="sum"
)
LOG_SOFTMAX_JVP = _operation("log_softmax_jvp", _SAVED, _whole, linear=("t",), reduces="sum")
LOG_SOFTMAX_VJP = _operation("log_softmax_vjp", _SAVED, _whole, linear=("t",), reduces="sum")
LOGSUMEXP_JVP = _operation("logsumexp_jvp", _SAVED, _of_rows, linear=("t",), reduces="sum", writes_rows=False)
LOGSUMEXP_VJP = _operation("logsumexp_vjp", (_X, _M, _D, _T_OF_ROWS, _WHERE, _SCALE), _whole, linear=("t",), reduces="nothing")


def scores_tangent(operands, tangents) -> tuple[Any, bool]:
    """Returns the tangent for a derivative, None for zero, and True if the derivative must still multiply it by `scale`."""
    if "scale" not in tangents:
        return tangents.get("x"), True
    return xla.scores_tangent(operands["x"], operands["scale"], tangents.get("x"), tangents["scale"]), False


def _softmax_jvp(operands, tangents, **params):
    # `y` is saved as it is returned: with `dtype=bfloat16` the derivative is the one of the rounded `y`.
    (y,) = bind(SOFTMAX, operands, **params)
    t, needs_scale = scores_tangent(operands, tangents)
    if t is None:
        return [y], [None]
    return [y], bind(SOFTMAX_JACOBIAN, {"y": y, "t": t, "scale": operands.get("scale") if needs_scale else None}, **params)


def _log_jvp(operation, derivative, operands, tangents, *, return_state, **params):
    """Computes results and tangents of log_softmax or logsumexp, whose tangent the operation `derivative` computes.

    It saves the state, not the log-sum-exp: for scores near 1e4 in float32, `exp(x - lse)` errs by 4.9e-4 of itself, and
    `exp(x - m) / d` by 2.6e-7.
    """
    out, m, d = bind(operation, operands, return_state=True, **params)
    t, needs_scale = scores_tangent(operands, tangents)
    results, tangents_out = [out, m, d], [None, None, None]
    if t is not None:
        saved = operands | {"m": m, "d": d, "t": t}
        tangents_out[:1] = bind(derivative, saved, scale_tangent=needs_scale, **params)
        if return_state:
            # Devices have parts of the cotangent of `d`: JAX has to transpose the sum over them, which a primitive would hold.
            options = params | {"dtype": d.dtype}
            axis_name = options.pop("axis_name", ())
            (mean,) = bind(LOGSUMEXP_JVP, saved, scale_tangent=needs_scale, **options)
            mean = lax.psum(mean, axis_name)
            tangents_out[2] = d * mean
    return (results, tangents_out) if return_state else (results[:1], tangents_out[:1])


def _transpose(transposed, cotangents, operands, types, *, dtype, **params):
    """Computes the cotangent of `t` by the operation `transposed`."""
    del dtype
    (t,) = bind(transposed, operands | {"t": cotangents[0]}, dtype=types["t"].dtype, **params)
    return {"t": t}


set_jvp(SOFTMAX, _softmax_jvp)
set_jvp(LOG_SOFTMAX, functools.partial(_log_jvp, LOG_SOFTMAX, LOG_SOFTMAX_JVP))
set_jvp(LOGSUMEXP, functools.partial(_log_jvp, LOGSUMEXP, LOGSUMEXP_JVP))
for _linear, _transposed in (
    (SOFTMAX_JACOBIAN, SOFTMAX_JACOBIAN),
    (LOG_SOFTMAX_JVP, LOG_SOFTMAX_VJP),
    (LOG_SOFTMAX_VJP, LOG_SOFTMAX_JVP),
    (LOGSUMEXP_JVP, LOGSUMEXP_VJP),
    (LOGSUMEXP_VJP, LOGSUMEXP_JVP),
):
    set_transpose(_linear, functools.partial(_transpose, _transposed))
