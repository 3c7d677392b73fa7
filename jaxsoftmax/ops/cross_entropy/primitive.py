"""Cross-entropy with integer labels as a JAX primitive, and its derivatives as primitives.

The scores `s` of a row are `scale * x`, or `scale * soft_cap * tanh(x / soft_cap)`. From the row's state `(m, d)` and its label
the primitive computes, where `z = s - max s`,

    nll = log d - z[label],   lse = max s + log d,   with `return_total` the sum of the scores,
    and with `return_entropy` the entropy of the softmax, log d - sum(p * z), in nats;

with `return_state` it returns the state too. Smoothing, z-loss and ignored rows need a few operations for each row, which XLA
computes and differentiates. The derivatives are linear, and transposes of each other:

    cross_entropy_jvp  from the tangent t of x:                 sum(p * u), u[label], the sum of u and sum(p * z * u),
                                                                with u = t * ds/dx
    cross_entropy_vjp  from numbers a, b, c and e of each row:  (a * p + b * onehot(label) + c + e * p * z) * ds/dx

with `p = exp(z) / d`. Results that depend on the state do not depend on how it is split into `m` and `d`, so `m` counts as
a constant. With `of_scores` the tangent, or the cotangent, is that of the scores, and `ds/dx` is left out.

If the cotangents are known together with the logits, another primitive computes losses and gradient at once, in the memory of
`x` if nothing else reads that:

    cross_entropy_gradient  from a factor t of each row:     t times the derivative of its loss
                            (1 - label_smoothing) * nll + label_smoothing * (lse - mean of s) + z_loss * lse**2
                            by x, in the dtype of x, and then nll, lse and with smoothing the sum of the scores

If a row holds +inf, some entries of that gradient are NaN; which ones depends on the implementation.

All operands have the same axes. `labels`, int32, and all operands and results of rows have size 1 along `axes`, which is a
single axis; so does `scale`, which may have size 1 along others too. `where` may have size 1 along any axis. The operation
`cross_entropy_gradient` takes neither. A label that is no entry of the row gives NaN, as the label `NO_CLASS` does. A row with
the label `NO_ROW` does not count: its results and tangents are 0, and its numbers `a`, `b`, `c`, `e` and `t` must be 0.

Parameters of all primitives are `axes`, `dtype` (of the results), `soft_cap` (a number or None) and `implementation`;
`cross_entropy` and its tangent have `return_total` and `return_entropy` too, False where they are absent.
"""

import functools

import jax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operand, Operation
from jaxsoftmax._core.primitive import bind, define, set_jvp, set_transpose
from jaxsoftmax.ops.cross_entropy import xla
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.problem import CrossEntropyProblem
from jaxsoftmax.ops.softmax.xla import tangent_of_sum

_X = Operand("x", is_scores=True, may_be_one=False)
_M, _D, _LABELS = (Operand(name, may_be_one=False) for name in ("m", "d", "labels"))
_WHERE, _SCALE = Operand("where"), Operand("scale")
_REPLACED = Operand("x", may_be_one=False)  # not `is_scores`: before a cast to float32 it has no room for the gradient


def _whole(operands, *, dtype, **params):
    del params
    return [jax.ShapeDtypeStruct(operands["x"].shape, dtype)]


def _of_rows(operands, *, dtype, return_total=False, return_entropy=False, return_state=False, **params):
    del params
    return [jax.ShapeDtypeStruct(operands["labels"].shape, dtype)] * (2 + return_total + return_entropy + 2 * return_state)


def _of_rows_and_whole(operands, *, label_smoothing, **params):
    x = operands["x"]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype), *_of_rows(operands, return_total=label_smoothing > 0, **params)]


CROSS_ENTROPY = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "cross_entropy",
        (_X, _LABELS, _WHERE, _SCALE),
        _of_rows,
        problem=CrossEntropyProblem,
        factor_of="x",
    )
)
CROSS_ENTROPY_JVP = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "cross_entropy_jvp",
        (_X, _M, _D, _X.called("t"), _LABELS, _WHERE, _SCALE),
        _of_rows,
        linear=("t",),
        problem=CrossEntropyProblem,
    )
)
CROSS_ENTROPY_VJP = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "cross_entropy_vjp",
        (_X, _M, _D, *map(_M.called, "abce"), _LABELS, _WHERE, _SCALE),
        _whole,
        linear=("a", "b", "c", "e"),
        problem=CrossEntropyProblem,
        factor_of="x",
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


def _jvp(operands, tangents, *, return_state, return_entropy=False, **params):
    """Computes results and tangents, by `x` and `scale`: labels and masks are not floating."""
    *results, m, d = bind(CROSS_ENTROPY, operands, return_state=True, return_entropy=return_entropy, **params)
    saved, of_scores = operands | {"m": m, "d": d}, "scale" in tangents
    if of_scores:
        dx, dscale = tangents.get("x"), tangents["scale"]
        saved["t"] = xla.scores_tangent(operands["x"], operands["scale"], dx, dscale, params["soft_cap"])
    else:
        saved["t"] = tangents["x"]
    options = {"of_scores": of_scores, "return_entropy": return_entropy}
    mean, chosen, *sums = bind(CROSS_ENTROPY_JVP, saved, **options, **params)
    if return_entropy:  # that of -sum(p * log(p)) is the covariance of the scores and their tangents, negative
        sums[-1] = xla.mean_of(results[-1], d) * mean - sums[-1]
    tangents_out = [mean - chosen, mean, *sums]
    if return_state:
        results, tangents_out = [*results, m, d], [*tangents_out, None, tangent_of_sum(d, mean)]
    return results, tangents_out


def _numbers(has_total: bool, has_entropy: bool) -> str:
    """Returns the names of the numbers of rows that `cross_entropy_vjp` takes, in the order of the results of its transpose."""
    return "ab" + "c" * has_total + "e" * has_entropy


def _transpose_of_jvp(cotangents, operands, types, *, dtype, return_total, return_entropy=False, **params):
    del dtype
    numbers = dict(zip(_numbers(return_total, return_entropy), cotangents, strict=True))
    (t,) = bind(CROSS_ENTROPY_VJP, operands | numbers, dtype=types["t"].dtype, **params)
    return {"t": t}


def _transpose_of_vjp(cotangents, operands, types, *, dtype, replaces=False, **params):
    del replaces  # results of rows take no memory of `x`
    kind, has_total, has_entropy = accumulator(operands["x"].dtype, dtype), "c" in types, "e" in types
    options = {"return_total": has_total, "return_entropy": has_entropy}
    numbers = bind(CROSS_ENTROPY_JVP, operands | {"t": cotangents[0]}, dtype=kind, **options, **params)
    return {name: number for name, number in zip(_numbers(has_total, has_entropy), numbers, strict=True) if name in types}


def _jvp_of_gradient(operands, tangents, **params):
    """Computes results and tangents by the two primitives that compose this one, and that have derivatives."""
    forward, backward = functools.partial(bind, CROSS_ENTROPY), functools.partial(bind, CROSS_ENTROPY_VJP)
    classes = operands["x"].shape[params["axes"][0]]

    def composed(moving):
        return xla.composed(forward, backward, operands | moving, classes=classes, **params)

    return jax.jvp(composed, ({name: operands[name] for name in tangents},), (tangents,))


set_jvp(CROSS_ENTROPY, _jvp)
set_jvp(CROSS_ENTROPY_GRADIENT, _jvp_of_gradient)
set_transpose(CROSS_ENTROPY_JVP, _transpose_of_jvp)
set_transpose(CROSS_ENTROPY_VJP, _transpose_of_vjp)
