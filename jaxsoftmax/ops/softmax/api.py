"""The softmax family, with the signatures and edge cases of `jax.nn`."""

import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import logsumexp as logsumexp_of_jax  # bound here: a program may put this library's function in its place
from jax.typing import ArrayLike, DTypeLike

from jaxsoftmax._core import arguments, dispatch
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.softmax import _devices, primitive

Axis = int | Sequence[int] | None


def softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """Softmax, `exp(scale * x) / sum(exp(scale * x))` along `axis`, computed without overflow.

    Arithmetic is float32 inside, whatever the dtypes of `x` and of the result, or float64 where one of them is. It may be
    differentiated, any number of times and in both modes, in `x` and in `scale`.

    Args:
      x: array of any shape, of a floating, complex or integer dtype. Integers become float32 first (as in `jnp.exp`).
      axis: the axis or axes that sum to 1; None for all. It counts in the shape to which `x` and `where` broadcast.
      where: boolean, broadcast against `x` (also `x` against it): the entries that take part. The others give 0, and what `x`
        holds there, NaN too, has no effect.
      scale: a number that multiplies `x`, such as `1 / sqrt(head_dim)`; a traced scalar as well. None for 1.
      dtype: of the result, floating; None for that of `x`. The conversion costs no pass over memory.
      axis_name: inside a `shard_map`, the mesh axes over which `axis` is sharded, a part as long on each device; None for none.
        No part of `x` moves between devices. Elsewhere JAX knows how arrays are sharded.
      implementation: None for the best one for this platform, shape and dtype; or the name of the one that must run.

    Returns:
      An array of the broadcast shape of `x` and `where`. As with `jax.nn.softmax`, a row of nothing but `-inf`, and one that
      holds `+inf` or NaN, is NaN; one without an entry in `where` is 0; an empty array stays empty.

    Raises:
      TypeError: `x` is bool or no array, `where` is not boolean, `scale` is not real, `dtype` is not floating.
      ValueError: `axis` is out of range or repeated, `where` does not broadcast, `scale` is no scalar or too large, `axis_name`
        is no mesh axis of a `shard_map` around, no such `implementation`.
      NotImplementedError: `implementation` cannot run this call; with the reason.

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    operands, params = _arguments("softmax", x, axis, where, scale, dtype, implementation, axis_name)
    return bind(primitive.SOFTMAX, operands, **params)[0]


def log_softmax(
    x: ArrayLike,
    axis: Axis = -1,
    where: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    dtype: DTypeLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array:
    """The logarithm of softmax, `(s - m) - log(sum(exp(s - m)))` with `s = scale * x` and `m = max(s)` along `axis`.

    Arguments, shapes, dtypes and errors are those of `softmax`. Entries outside `where` give `-inf`. As with
    `jax.nn.log_softmax`, a row of nothing but `-inf`, and one that holds `+inf` or NaN, is NaN.
    """
    operands, params = _arguments("log_softmax", x, axis, where, scale, dtype, implementation, axis_name)
    return bind(primitive.LOG_SOFTMAX, operands, return_state=False, **params)[0]


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: Literal[False] = False,
    where: ArrayLike | None = None,
    *,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array: ...


@overload
def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    *,
    return_sign: Literal[True],
    where: ArrayLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def logsumexp(
    a: ArrayLike,
    axis: Axis = None,
    b: ArrayLike | None = None,
    keepdims: bool = False,
    return_sign: bool = False,
    where: ArrayLike | None = None,
    *,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`log(sum(b * exp(a)))` along `axis`, computed without overflow.

    Arithmetic is float32 inside, or float64 where `a` is.

    Args:
      a: array of any shape, of a floating, complex, integer or bool dtype.
      axis: the axis or axes that are summed; None for all. It counts in the shape to which `a` and `where` broadcast.
      b: factors, broadcast against `a`; None for 1. Real ones may be negative.
      keepdims: whether the summed axes stay, with size 1.
      return_sign: whether to return the sign of the sum too; without it, a negative sum gives NaN.
      where: boolean, broadcast against `a`: the entries that take part.
      axis_name: as for `softmax`; every device gets the result, which a `shard_map` that checks what varies knows to be the
        same. Not with `b` or `return_sign`.
      implementation: as for `softmax`. Calls with `b` or `return_sign` are left to `jax.nn.logsumexp`, in float32.

    Returns:
      An array without `axis`, of the dtype of `a` (integers and bool: float32); with `return_sign`, a pair of it and the sign.
      The sum of nothing is `-inf`, and so is that of nothing but `-inf`; with a `+inf` among them, `+inf`; with a NaN, NaN.

    Raises what `softmax` does.
    """
    keepdims, return_sign = arguments.flags("logsumexp", keepdims=keepdims, return_sign=return_sign)
    if b is not None or return_sign:
        if axis_name is not None:
            what = arguments.shown(axis_name)
            raise ValueError(f"logsumexp: axis_name must be None with b or return_sign, got {what}")
        return _with_factors(a, axis, b, keepdims, return_sign, where, implementation)
    operands, params = _arguments("logsumexp", a, axis, where, None, None, implementation, axis_name, name="a")
    if names := params.pop("axis_name", ()):
        lse = _devices.logsumexp_of_parts(names, params, operands["x"], operands["where"])
    else:
        (lse,) = bind(primitive.LOGSUMEXP, operands, return_state=False, **params)
    return lse if keepdims else lax.squeeze(lse, params["axes"])


def _with_factors(a, axis, b, keepdims, return_sign, where, implementation):
    if implementation not in (None, "xla"):
        dispatch.check_implementation("softmax", "logsumexp", implementation)
        raise NotImplementedError(
            f"logsumexp: implementation={implementation!r} takes neither b nor return_sign; only 'xla' does"
        )
    a = arguments.array("logsumexp", "a", a)
    if b is not None:
        b = arguments.array("logsumexp", "b", b)
        a = broadcast("logsumexp", "a", a, "b", b)
    checked, params = _arguments("logsumexp", a, axis, where, None, None, implementation, name="a")
    a, where = checked["x"], checked["where"]
    operands = [a] if b is None else [a, lax.expand_dims(b, range(a.ndim - b.ndim))]

    def call(a, b=None):
        return logsumexp_of_jax(a, params["axes"], b, keepdims, return_sign, where)

    acc = accumulator(*(operand.dtype for operand in operands))
    with jax.numpy_dtype_promotion("standard"):
        types = jax.eval_shape(call, *operands)
    results = call(*(operand.astype(acc) for operand in operands))
    return jax.tree.map(lambda result, kind: result.astype(kind.dtype), results, types)


def _arguments(
    op, x, axis, where, scale, dtype, implementation, axis_name=None, *, name="x"
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The checked operands of a primitive, aligned and by name, and its parameters."""
    dispatch.check_implementation("softmax", op, implementation)
    x = arguments.array(op, name, x)
    if x.dtype == np.bool_ and op != "logsumexp":
        raise TypeError(f"{op}: {name} must be floating, complex or integer, got bool")
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        x = x.astype(jax.eval_shape(jnp.exp, x).dtype)
    if where is not None:
        where = arguments.array(op, "where", where, "boolean")
        x = broadcast(op, name, x, "where", where)
        where = lax.expand_dims(where, range(x.ndim - where.ndim))
    axes = sorted_axes(op, axis, x.ndim)
    dtype = x.dtype if dtype is None else _result_dtype(op, x, dtype)
    if scale is not None:
        scale = scalar_scale(op, scale, x.ndim, accumulator(x.dtype, dtype))
    params = {"axes": axes, "dtype": dtype, "implementation": implementation}
    if names := arguments.axis_names(op, axis_name):
        if not axes:
            raise ValueError(f"{op}: axis_name must be None where axis names no axis, got {arguments.shown(axis_name)}")
        params["axis_name"] = names
    return {"x": x, "where": where, "scale": scale}, params


def broadcast(op: str, name: str, x: jax.Array, other_name: str, other: jax.Array) -> jax.Array:
    """`x` in the shape to which it and the other array broadcast."""
    try:
        return jnp.broadcast_to(x, lax.broadcast_shapes(x.shape, other.shape))
    except ValueError:
        raise ValueError(f"{op}: {other_name} must broadcast with {name}, got shapes {other.shape} and {x.shape}") from None


def sorted_axes(op: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """`axis` as a sorted tuple of axes from 0."""
    if axis is None:
        return tuple(range(ndim))
    several = isinstance(axis, Sequence | np.ndarray | jax.Array) and getattr(axis, "ndim", 1) > 0
    try:
        given: list[Any] = list(axis) if several else [axis]
        if any(isinstance(a, bool | np.bool_) for a in given):
            raise TypeError
        given = [operator.index(a) for a in given]
    except TypeError:
        raise TypeError(f"{op}: axis must be an int, a sequence of ints or None, got {arguments.shown(axis)}") from None
    for a in given:
        if not -ndim <= a < ndim:
            allowed = f"{-ndim} to {ndim - 1}" if ndim else "none but () and None"
            raise ValueError(f"{op}: axis {arguments.shown(a)} is out of range for {ndim} dimensions, allowed are {allowed}")
    axes = tuple(sorted(a % ndim for a in given))
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis must not be repeated, got {axis!r} for {ndim} dimensions")
    return axes


def _result_dtype(op: str, x: jax.Array, dtype: DTypeLike) -> np.dtype:
    kind = jnp.complexfloating if x.dtype.kind == "c" else jnp.floating
    result = arguments.dtype(op, "dtype", dtype, f"{kind.__name__} for an array of {x.dtype}")
    if not jnp.issubdtype(result, kind) or jnp.finfo(result).bits > 64:
        raise TypeError(f"{op}: dtype must be {kind.__name__} for an array of {x.dtype}, got {result}")
    return result


def _is_known_float(scale: Any) -> bool:
    """Returns whether `scale` is an array of one float64, which may be too large for float32, whose value is at hand."""
    if isinstance(scale, jax.core.Tracer) or not isinstance(scale, np.ndarray | jax.Array):
        return False
    is_there = isinstance(scale, np.ndarray) or scale.is_fully_addressable
    return is_there and scale.shape == () and scale.dtype == np.float64


def scalar_scale(op: str, scale: Any, ndim: int, dtype: np.dtype) -> jax.Array | np.ndarray:
    """`scale` with as many axes as the scores, and real where they are complex."""
    if _is_known_float(scale):
        scale = np.asarray(scale)[()]
    if isinstance(scale, float | int) and not isinstance(scale, bool):  # no op of its own in an eager call
        kind = np.finfo(dtype)
        number = arguments.number(op, "scale", scale)
        if float(kind.max) < abs(number) < float("inf"):
            raise ValueError(f"{op}: scale must be finite in {kind.dtype}, got {number}")
        return np.full((1,) * ndim, number, kind.dtype)
    scale = arguments.array(op, "scale", scale)
    if scale.dtype == np.bool_ or jnp.issubdtype(scale.dtype, jnp.complexfloating):
        raise TypeError(f"{op}: scale must be a real number, got {scale.dtype}")
    if scale.shape:
        raise ValueError(f"{op}: scale must be a scalar, got an array of shape {scale.shape}")
    return lax.expand_dims(scale.astype(np.finfo(dtype).dtype), range(ndim))
