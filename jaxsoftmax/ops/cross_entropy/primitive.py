"""Cross-entropy with integer labels as a JAX primitive, with its derivatives.

Of the scores `s` of a row, which are `x` or `soft_cap * tanh(x / soft_cap)`, and its label, the primitive gives

    nll = log d - (s[label] - m),   lse = m + log d,   and with `return_total` the sum of the scores,

from the row's state `(m, d)`, which it returns too with `return_state`. Smoothing, z-loss and rows that are ignored are a few
numbers for each row, which XLA computes and differentiates. The derivatives are linear and transposes of each other:

    cross_entropy_jvp  of the tangent t of x:  sum(p * u), u[label] and the sum of u, with u = t * ds/dx
    cross_entropy_vjp  of numbers a, b, c of each row:  (a * p + b * onehot(label) + c) * ds/dx

with `p = exp(s - m) / d`. What depends on the state does not depend on how it is split, so `m` counts as a constant.

Where the cotangents are known with the logits, one more gives both, in the memory of `x` where nothing else reads that:

    cross_entropy_gradient  of a factor t of each row:  t times the derivative of its loss
                            (1 - label_smoothing) * nll + label_smoothing * (lse - mean of s) + z_loss * lse**2
                            by x, in its dtype, and then nll, lse and with smoothing the sum of the scores;
                            of a row that holds +inf some are NaN, and not the same ones everywhere

All operands have the same axes: `labels`, int32, and what belongs to a row have size 1 along `axes`, which is a single one. A
label that is not in the row gives NaN, as `NO_CLASS` does. A row with the label `NO_ROW` does not count: its results are 0, and
so are its tangents; its numbers `a`, `b`, `c` and `t` must be 0. `where` may have size 1 anywhere. Parameters of all are
`axes`, `dtype` (of the results), `soft_cap`, None or a number, and `implementation`; `return_total` is one of the primitive and
of its tangent.
`cross_entropy_gradient` has no `where`.
"""

import functools

import jax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operand, Operation
from jaxsoftmax._core.primitive import bind, define, set_jvp, set_transpose
from jaxsoftmax.ops.cross_entropy import xla
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem

_X = Operand("x", is_scores=True, may_be_one=False)
_M, _D, _LABELS = (Operand(name, may_be_one=False) for name in ("m", "d", "labels"))
_WHERE = Operand("where")
_REPLACED = Operand("x", may_be_one=False)  # as it is: one that a cast has widened has no room for the gradient


def _whole(operands, *, dtype, **params):
    del params
    return [jax.ShapeDtypeStruct(operands["x"].shape, dtype)]


def _of_rows(operands, *, dtype, return_total, return_state=False, **params):
    del params
    return [jax.ShapeDtypeStruct(operands["labels"].shape, dtype)] * (2 + return_total + 2 * return_state)


def _of_rows_and_whole(operands, *, label_smoothing, **params):
    x = operands["x"]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype), *_of_rows(operands, return_total=label_smoothing > 0, **params)]


CROSS_ENTROPY = define(
    Operation(CROSS_ENTROPY_FAMILY, "cross_entropy", (_X, _LABELS, _WHERE), _of_rows, problem=CrossEntropyProblem)
)
CROSS_ENTROPY_JVP = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "cross_entropy_jvp",
        (_X, _M, _D, _X.called("t"), _LABELS, _WHERE),
        _of_rows,
        linear=("t",),
        problem=CrossEntropyProblem,
    )
)
CROSS_ENTROPY_VJP = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "cross_entropy_vjp",
        (_X, _M, _D, *map(_M.called, "abc"), _LABELS, _WHERE),
        _whole,
        linear=("a", "b", "c"),
        problem=CrossEntropyProblem,
    )
)
CROSS_ENTROPY_GRADIENT = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "cross_entropy_gradient",
        (_REPLACED, _LABELS, _M.called("t")),
        _of_rows_and_whole,
        problem=CrossEntropyProblem,
    )
)


def _jvp(operands, tangents, *, return_state, **params):
    """The jvp rule. What varies is `x` alone: labels and masks are no floating numbers."""
    *found, m, d = bind(CROSS_ENTROPY, operands, return_state=True, **params)
    given = operands | {"m": m, "d": d, "t": tangents["x"]}
    mean, chosen, *total = bind(CROSS_ENTROPY_JVP, given, **params)
    results, tangents_out = found, [mean - chosen, mean, *total]
    if return_state:
        results, tangents_out = [*results, m, d], [*tangents_out, None, xla.tangent_of_sum(d, mean)]
    return results, tangents_out


def _transpose_of_jvp(cotangents, operands, types, *, dtype, return_total, **params):
    del dtype, return_total
    given = operands | dict(zip("abc", cotangents, strict=False))
    (t,) = bind(CROSS_ENTROPY_VJP, given, dtype=types["t"].dtype, **params)
    return {"t": t}


def _transpose_of_vjp(cotangents, operands, types, *, dtype, **params):
    kind = accumulator(operands["x"].dtype, dtype)
    found = bind(CROSS_ENTROPY_JVP, operands | {"t": cotangents[0]}, dtype=kind, return_total="c" in types, **params)
    return {name: value for name, value in zip("abc", found, strict=False) if name in types}


def _jvp_of_gradient(operands, tangents, **params):
    """The jvp rule: the primitive gives what two others do, which have derivatives."""
    maps = functools.partial(bind, CROSS_ENTROPY), functools.partial(bind, CROSS_ENTROPY_VJP)

    def composed(given):
        classes = operands["x"].shape[params["axes"][0]]
        return xla.composed(*maps, operands | given, classes=classes, **params)

    return jax.jvp(composed, ({name: operands[name] for name in tangents},), (tangents,))


set_jvp(CROSS_ENTROPY, _jvp)
set_jvp(CROSS_ENTROPY_GRADIENT, _jvp_of_gradient)
set_transpose(CROSS_ENTROPY_JVP, _transpose_of_jvp)
set_transpose(CROSS_ENTROPY_VJP, _transpose_of_vjp)
