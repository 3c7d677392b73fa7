"""softmax, log_softmax and logsumexp as JAX primitives, with their derivatives.

Each op's derivative is a primitive too, linear in one operand, so that forward and reverse mode run the same few kernels:

    op           tangent                                       cotangent
    softmax      y * (t - sum(y * t))                          the same map: the Jacobian is symmetric
    log_softmax  t - sum(p * t)                                c - p * sum(c)
    logsumexp    sum(p * t)                                    p * c

Softmax saves its result `y`; the other two save the state `(m, d)` of each row, from which `p = exp(s - m) / d`. What depends
on the state does not depend on how it is split between `m` and `d`, so `m` counts as a constant and `d` carries the derivative.

Operands, as far as the primitive has them: `x` or `y`, `m`, `d`, the (co)tangent, `where`, `scale`. All have the same number of
axes; rows (`m`, `d`, and what belongs to logsumexp's result) have size 1 along `axes`, `where` and `scale` may have size 1
anywhere. Derivatives of the linear maps themselves, in anything but the (co)tangent, are those of the reference.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters import ad, batching

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind, define, set_rule, unpack
from jaxsoftmax._core.sharding import has_explicit_axes
from jaxsoftmax.ops.softmax import xla

# How many operands come before the optional ones, `where` and `scale`.
_REQUIRED = {"softmax": 1, "log_softmax": 1, "logsumexp": 1, "softmax_jacobian": 2}
_REQUIRED |= dict.fromkeys(("log_softmax_jvp", "log_softmax_vjp", "logsumexp_jvp", "logsumexp_vjp"), 4)


def softmax(x, where, scale, **params):
    """Binds softmax: `params` are `axes`, `dtype` and `implementation`."""
    return bind(softmax_p, x, where, scale, **params)


def log_softmax(x, where, scale, **params):
    """Binds log_softmax: `params` as for softmax."""
    return bind(log_softmax_p, x, where, scale, return_state=False, **params)[0]


def logsumexp(x, where, scale, **params):
    """Binds logsumexp, whose result keeps `axes` with size 1: `params` as for softmax."""
    return bind(logsumexp_p, x, where, scale, return_state=False, **params)[0]


def _types(name, *avals, present, axes, dtype, implementation, **params):
    """The types of the results: a list if the primitive has several."""
    if any(map(has_explicit_axes, avals)):  # the reference knows how shardings go together
        reference = functools.partial(getattr(xla, name), axes=axes, dtype=dtype, **params)
        jaxpr = jax.make_jaxpr(lambda *operands: reference(*unpack(present, operands)))(*avals)
        types = [aval.strip_weak_type() for aval in jaxpr.out_avals]
        return types if name in ("log_softmax", "logsumexp") else types[0]
    x = avals[0].strip_weak_type()
    rows = tuple(1 if axis in axes else size for axis, size in enumerate(x.shape))
    if name in ("log_softmax", "logsumexp"):
        out = x.update(shape=x.shape if name == "log_softmax" else rows, dtype=dtype)
        state = x.update(shape=rows, dtype=accumulator(x.dtype, dtype))
        return [out, state, state] if params["return_state"] else [out]
    return x.update(shape=rows if name == "logsumexp_jvp" else x.shape, dtype=dtype)


def _batch(primitive, name, operands, dims, *, present, axes, **params):
    """Adds a batch axis where the first batched operand has it."""
    operands, dims = unpack(present, operands), unpack(present, dims)
    at, size = next((d, o.shape[d]) for o, d in zip(operands, dims, strict=True) if d is not None)

    def aligned(index, operand, dim):
        if operand is None:
            return None
        if dim is not None:
            return jnp.moveaxis(operand, dim, at)
        operand = jnp.expand_dims(operand, at)
        if index < _REQUIRED[name]:  # the optional ones may have size 1 anywhere
            operand = jnp.broadcast_to(operand, (*operand.shape[:at], size, *operand.shape[at + 1 :]))
        return operand

    operands = [aligned(index, *pair) for index, pair in enumerate(zip(operands, dims, strict=True))]
    axes = tuple(axis + (axis >= at) for axis in axes)
    out = bind(primitive, *operands, axes=axes, **params)
    return out, [at] * len(out) if primitive.multiple_results else at


def _scores_tangent(dx, dscale, x, scale):
    """The tangent of `scale * x` from those of `x` and `scale`, and whether the kernel still has to multiply with `scale`."""
    if dscale is None or type(dscale) is ad.Zero:
        return dx, True
    return xla.scores_tangent(x, scale, None if type(dx) is ad.Zero else dx, dscale), False


def _softmax_jvp(primals, tangents, *, present, axes, dtype, implementation):
    (x, where, scale), (dx, _, dscale) = unpack(present, primals), unpack(present, tangents)
    params = {"axes": axes, "dtype": dtype, "implementation": implementation}
    y = softmax(x, where, scale, **params)
    t, scaled = _scores_tangent(dx, dscale, x, scale)
    if type(t) is ad.Zero:
        return y, _zero(y)
    return y, bind(softmax_jacobian_p, y, t, scale if scaled else None, **params)


def _log_jvp(op, primals, tangents, *, present, return_state, **params):
    """The jvp rule of log_softmax and logsumexp."""
    op_p, tangent_p = (log_softmax_p, log_softmax_jvp_p) if op == "log_softmax" else (logsumexp_p, logsumexp_jvp_p)
    (x, where, scale), (dx, _, dscale) = unpack(present, primals), unpack(present, tangents)
    out, m, d = bind(op_p, x, where, scale, return_state=True, **params)
    t, scaled = _scores_tangent(dx, dscale, x, scale)
    primals_out = [out, m, d] if return_state else [out]
    if type(t) is ad.Zero:
        return primals_out, [_zero(p) for p in primals_out]
    operands = (x, m, d, t, where, scale)
    tangents_out = [bind(tangent_p, *operands, scale_tangent=scaled, **params)]
    if return_state:
        mean = bind(logsumexp_jvp_p, *operands, scale_tangent=scaled, **{**params, "dtype": d.dtype})
        tangents_out += [_zero(m), d * mean]
    return primals_out, tangents_out


def _map_jvp(primitive, name, linear, primals, tangents, *, present, **params):
    """The jvp rule of a map that is linear in its operand `linear`."""
    operands, tangents = unpack(present, primals), unpack(present, tangents)
    out = bind(primitive, *operands, **params)
    moving = [i for i, t in enumerate(tangents) if t is not None and type(t) is not ad.Zero]
    parts = []
    if linear in moving:
        parts.append(bind(primitive, *_replaced(operands, {linear: tangents[linear]}), **params))
    if others := [i for i in moving if i != linear]:
        kept = {key: value for key, value in params.items() if key != "implementation"}

        def reference(*values):
            return getattr(xla, name)(*_replaced(operands, dict(zip(others, values, strict=True))), **kept)

        parts.append(jax.jvp(reference, [operands[i] for i in others], [tangents[i] for i in others])[1])
    return out, functools.reduce(ad.add_tangents, parts, _zero(out))


def _map_transpose(transposed, linear, cotangent, *operands, present, dtype, **params):
    """The transpose of a map that is linear in its operand `linear`."""
    del dtype
    operands = unpack(present, operands)
    results: list[Any] = [None] * len(operands)
    if type(cotangent) is not ad.Zero:
        operand_type = operands[linear].aval
        operands = _replaced(operands, {linear: cotangent})
        results[linear] = bind(transposed(), *operands, dtype=operand_type.dtype, **params)
    return [result for result, there in zip(results, present, strict=True) if there]


def _zero(primal) -> ad.Zero:
    return ad.Zero(jax.typeof(primal).to_tangent_aval())


def _replaced(operands, new: dict[int, Any]):
    return [new.get(index, operand) for index, operand in enumerate(operands)]


def _define(name, *whole, multiple_results=False):
    p = define("softmax", name, functools.partial(_types, name), whole=whole, multiple_results=multiple_results)
    set_rule(batching.primitive_batchers, p, functools.partial(_batch, p, name))
    return p


def _define_map(name, *whole, linear, transposed):
    p = _define(name, *whole)
    set_rule(ad.primitive_jvps, p, functools.partial(_map_jvp, p, name, linear))
    set_rule(ad.primitive_transposes, p, functools.partial(_map_transpose, transposed, linear))
    return p


# The numbers say which operands are as large as the scores: x or y, and the (co)tangent unless it belongs to rows.
softmax_p = _define("softmax", 0)
log_softmax_p = _define("log_softmax", 0, multiple_results=True)
logsumexp_p = _define("logsumexp", 0, multiple_results=True)
set_rule(ad.primitive_jvps, softmax_p, _softmax_jvp)
set_rule(ad.primitive_jvps, log_softmax_p, functools.partial(_log_jvp, "log_softmax"))
set_rule(ad.primitive_jvps, logsumexp_p, functools.partial(_log_jvp, "logsumexp"))

softmax_jacobian_p = _define_map("softmax_jacobian", 0, 1, linear=1, transposed=lambda: softmax_jacobian_p)
log_softmax_jvp_p = _define_map("log_softmax_jvp", 0, 3, linear=3, transposed=lambda: log_softmax_vjp_p)
log_softmax_vjp_p = _define_map("log_softmax_vjp", 0, 3, linear=3, transposed=lambda: log_softmax_jvp_p)
logsumexp_jvp_p = _define_map("logsumexp_jvp", 0, 3, linear=3, transposed=lambda: logsumexp_vjp_p)
logsumexp_vjp_p = _define_map("logsumexp_vjp", 0, linear=3, transposed=lambda: logsumexp_jvp_p)
