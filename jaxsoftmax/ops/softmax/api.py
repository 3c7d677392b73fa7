"""Softmax, log-softmax and log-sum-exp, with the signatures and edge cases of `jax.nn`."""

import operator
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.nn import logsumexp as logsumexp_of_jax  # bound here: a program may put this library's function in its place
from jax.typing import ArrayLike, DTypeLike

from jaxsoftmax._core import arguments
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.softmax import across_devices, primitive
from jaxsoftmax.ops.softmax.implementations import SOFTMAX_FAMILY
from jaxsoftmax.ops.softmax.xla import scores

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
    """Computes the softmax of `x` along `axis`.

    With `s = scale * x`, the result is `exp(s - max(s)) / sum(exp(s - max(s)))`, so no exponential overflows. The function
    replaces `jax.nn.softmax`. In addition it takes `scale`, `dtype`, `axis_name` and `implementation`.

    The arithmetic is float32, for any dtype of `x` and of the result, or float64 if one of the two is float64. On NVIDIA
    Hopper GPUs a kernel reads and writes each element once; the longest rows run on the reference. The result can be
    differentiated with respect to `x` and `scale`, any number of times, in forward and reverse mode.

    Args:
      x: array of any shape. The dtype is floating, complex or integer. Integers are converted first, as `jnp.exp` converts
        them: to float32, or to float64 if they have 64 bits.
      axis: axis or axes along which the result sums to 1; -1 by default. None stands for all axes. Axes are counted in the
        shape to which `x` and `where` broadcast.
      where: boolean array that selects the entries that take part, or None (the default) for all entries. It broadcasts
        against `x`, and `x` against it. Entries that are not selected give 0, and their values in `x`, even NaN, have no
        effect.
      scale: real number that multiplies `x`, such as `1 / sqrt(head_dim)`, or an array of them with one for each row; None
        (the default) for 1. An array broadcasts to the shape of the result without `axis`. It may be traced. With a
        negative number the smallest entry of a row gets the largest weight. With 0 all entries of a row get the same
        weight, and a row that holds an infinity is NaN, as `0 * inf` is.
      dtype: floating dtype of the result, complex if `x` is complex; None (the default) for the dtype of `x`. The
        conversion needs no extra pass over memory.
      axis_name: name or names of the mesh axes over which `axis` is sharded, for calls inside a `shard_map`; None (the
        default) if `axis` is not sharded there. All devices must hold parts of equal length, and the same `scale`. Devices
        exchange two numbers for each row, and no part of `x` moves. Outside a `shard_map` leave it None: JAX knows how
        arrays are sharded.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype.

    Returns:
      Array in the shape to which `x` and `where` broadcast, of dtype `dtype`. As with `jax.nn.softmax`, a row is NaN if it
      holds NaN or `+inf`, or nothing except `-inf`. A row without a selected entry is 0. An empty array stays empty.

    Raises:
      TypeError: `x` is not an array of numbers or has dtype bool, `axis` is not made of integers, `where` is not boolean,
        `scale` is not real, `dtype` is not floating (not complex if `x` is complex), or `axis_name` is not made of
        strings.
      ValueError: `axis` is out of range or names an axis twice, `where` does not broadcast with `x`, `scale` does not
        broadcast to the rows or is a number too large for the arithmetic, `axis_name` is not a mesh axis of a `shard_map`
        around the call, or there is no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> scores = jax.random.normal(jax.random.key(0), (2, 8, 8))
      >>> bool(jnp.allclose(jaxsoftmax.softmax(scores), jax.nn.softmax(scores), atol=1e-6))
      True

      Causal attention weights, scaled and rounded to bfloat16 in the same pass:

      >>> causal = jnp.tril(jnp.ones((8, 8), bool))
      >>> weights = jaxsoftmax.softmax(scores, where=causal, scale=0.125, dtype=jnp.bfloat16)
      >>> print(weights.shape, weights.dtype)
      (2, 8, 8) bfloat16

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
    """Computes the logarithm of the softmax of `x` along `axis`.

    With `s = scale * x` and `m = max(s)`, the result is `(s - m) - log(sum(exp(s - m)))`. It stays finite where
    `log(softmax(x))` would take the logarithm of a weight that is rounded to 0. The function replaces
    `jax.nn.log_softmax`. In addition it takes `scale`, `dtype`, `axis_name` and `implementation`.

    The arithmetic is float32, for any dtype of `x` and of the result, or float64 if one of the two is float64. On NVIDIA
    Hopper GPUs a kernel reads and writes each element once; the longest rows run on the reference. The result can be
    differentiated with respect to `x` and `scale`, any number of times, in forward and reverse mode.

    Args:
      x: array of any shape. The dtype is floating, complex or integer. Integers are converted first, as `jnp.exp` converts
        them: to float32, or to float64 if they have 64 bits.
      axis: axis or axes of the softmax; -1 by default. None stands for all axes. Axes are counted in the shape to which
        `x` and `where` broadcast.
      where: boolean array that selects the entries that take part, or None (the default) for all entries. It broadcasts
        against `x`, and `x` against it. Entries that are not selected give `-inf`, and their values in `x`, even NaN, have
        no effect.
      scale: real number that multiplies `x`, such as the inverse of a temperature, or an array of them with one for each
        row; None (the default) for 1. An array broadcasts to the shape of the result without `axis`. It may be traced.
        Numbers that are negative or 0 have the same meaning as in `softmax`.
      dtype: floating dtype of the result, complex if `x` is complex; None (the default) for the dtype of `x`. The
        conversion needs no extra pass over memory.
      axis_name: name or names of the mesh axes over which `axis` is sharded, for calls inside a `shard_map`; None (the
        default) if `axis` is not sharded there. All devices must hold parts of equal length, and the same `scale`. Devices
        exchange two numbers for each row, and no part of `x` moves. Outside a `shard_map` leave it None: JAX knows how
        arrays are sharded.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype.

    Returns:
      Array in the shape to which `x` and `where` broadcast, of dtype `dtype`. As with `jax.nn.log_softmax`, a row is NaN
      if it holds NaN or `+inf`, or nothing except `-inf`. A row without a selected entry is `-inf`. An empty array stays
      empty.

    Raises:
      TypeError: `x` is not an array of numbers or has dtype bool, `axis` is not made of integers, `where` is not boolean,
        `scale` is not real, `dtype` is not floating (not complex if `x` is complex), or `axis_name` is not made of
        strings.
      ValueError: `axis` is out of range or names an axis twice, `where` does not broadcast with `x`, `scale` does not
        broadcast to the rows or is a number too large for the arithmetic, `axis_name` is not a mesh axis of a `shard_map`
        around the call, or there is no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> logits = jnp.array([[0.0, 1.0, 200.0], [3.0, 3.0, 3.0]])
      >>> log_weights = jaxsoftmax.log_softmax(logits)
      >>> bool(jnp.allclose(log_weights, jax.nn.log_softmax(logits), atol=1e-6))
      True
      >>> print(jnp.round(log_weights[0]))
      [-200. -199.    0.]

      Each row has a temperature of its own:

      >>> temperature = jnp.array([0.5, 2.0])
      >>> log_weights = jaxsoftmax.log_softmax(logits, scale=1 / temperature)
      >>> expected = jax.nn.log_softmax(logits / temperature[:, None])
      >>> bool(jnp.allclose(log_weights, expected, atol=1e-6))
      True

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
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
    scale: ArrayLike | None = None,
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
    scale: ArrayLike | None = None,
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
    scale: ArrayLike | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Computes `log(sum(b * exp(scale * a)))` along `axis`.

    The maximum of `scale * a` is subtracted before the exponential, so nothing overflows. The function replaces
    `jax.nn.logsumexp`. In addition it takes `scale`, `axis_name` and `implementation`.

    The arithmetic is float32, or float64 if `a` is float64. On NVIDIA Hopper GPUs a kernel reads each element once. Calls
    with `b` or `return_sign` run as `jax.nn.logsumexp`, in float32 or wider. The result can be differentiated with respect
    to `a`, `b` and `scale`, any number of times, in forward and reverse mode.

    Args:
      a: array of any shape. The dtype is floating, complex, integer or bool.
      axis: axis or axes over which the sum runs; None (the default) for all axes. Axes are counted in the shape to which
        `a`, `b` and `where` broadcast.
      b: array of factors that broadcasts against `a`, and `a` against it; None (the default) for 1. Real factors may be
        negative.
      keepdims: True to keep the summed axes, with size 1; False by default.
      return_sign: True to return the sign of the sum too; False by default. Without it a negative sum gives NaN.
      where: boolean array that selects the entries that take part, or None (the default) for all entries. It broadcasts
        against `a`, and `a` against it.
      scale: real number that multiplies `a`, such as the inverse of a temperature, or an array of them with one for each
        row; None (the default) for 1. An array broadcasts to the shape of the result with `keepdims=False`. It may be
        traced. Numbers that are negative or 0 have the same meaning as in `softmax`.
      axis_name: name or names of the mesh axes over which `axis` is sharded, for calls inside a `shard_map`; None (the
        default) if `axis` is not sharded there. All devices must hold parts of equal length, and the same `scale`. Devices
        exchange two numbers for each row, in one all-gather. Every device gets the same result, and a `shard_map` with
        `check_vma=True` knows that it does not vary, if `scale` does not. Must be None with `b` or `return_sign`. Outside a
        `shard_map` leave it None: JAX knows how arrays are sharded.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype. With `b` or `return_sign` only None and "xla" are possible.

    Returns:
      Array in the shape to which `a`, `b` and `where` broadcast, without `axis`, or with size 1 along `axis` if `keepdims`
      is True. The dtype is that of `a`; for integers and bool it is float32, or float64 if they have 64 bits. A `b`
      promotes the dtype as in `jax.nn.logsumexp`. With `return_sign` the result is a pair: the logarithm of the sum's
      absolute value, and the sign of the sum, in arrays of the same shape.

      The sum of no entries gives `-inf`. With `s = scale * a`, a sum in which every `s` is `-inf` gives `-inf` too. If an
      `s` is `+inf`, the result is `+inf`. If an `s` is NaN, the result is NaN.

    Raises:
      TypeError: `a` or `b` is not an array of numbers, `axis` is not made of integers, `where` is not boolean, `scale` is
        not real, `keepdims` or `return_sign` is not True or False, or `axis_name` is not made of strings.
      ValueError: `axis` is out of range or names an axis twice, `where` or `b` does not broadcast with `a`, `scale` does
        not broadcast to the rows or is a number too large for the arithmetic, `axis_name` is not a mesh axis of a
        `shard_map` around the call or comes with `b` or `return_sign`, or there is no `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> logits = jax.random.normal(jax.random.key(0), (4, 100))
      >>> lse = jaxsoftmax.logsumexp(logits, axis=-1)
      >>> bool(jnp.allclose(lse, jax.nn.logsumexp(logits, axis=-1), atol=1e-6))
      True

      A difference of exponentials needs factors, and a sign:

      >>> a, b = jnp.array([1.0, 2.0]), jnp.array([1.0, -1.0])
      >>> value, sign = jaxsoftmax.logsumexp(a, b=b, return_sign=True)
      >>> print(jnp.round(sign * jnp.exp(value), 3), jnp.round(jnp.exp(1.0) - jnp.exp(2.0), 3))
      -4.671 -4.671

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    keepdims, return_sign = arguments.flags("logsumexp", keepdims=keepdims, return_sign=return_sign)
    if b is not None or return_sign:
        if axis_name is not None:
            what = arguments.shown(axis_name)
            raise ValueError(f"logsumexp: axis_name must be None with b or return_sign, got {what}")
        return _logsumexp_with_factors(a, axis, b, keepdims, return_sign, where, scale, implementation)
    operands, params = _arguments("logsumexp", a, axis, where, scale, None, implementation, axis_name)
    if names := params.pop("axis_name", ()):
        lse = across_devices.logsumexp_of_parts(names, params, operands["x"], operands["where"], operands["scale"])
    else:
        (lse,) = bind(primitive.LOGSUMEXP, operands, return_state=False, **params)
    return lse if keepdims else lax.squeeze(lse, params["axes"])


def _logsumexp_with_factors(a, axis, b, keepdims, return_sign, where, scale, implementation):
    """Calls `jax.nn.logsumexp` in the dtype of the arithmetic; results have the dtypes that it gives without a cast."""
    if implementation not in (None, "xla"):
        check_implementation(SOFTMAX_FAMILY, "logsumexp", implementation)
        raise NotImplementedError(
            f"logsumexp: implementation={implementation!r} takes neither b nor return_sign; only 'xla' does"
        )
    a = arguments.array("logsumexp", "a", a)
    if b is not None:
        b = arguments.array("logsumexp", "b", b)
        a = broadcast("logsumexp", "a", a, "b", b)
    operands, params = _arguments("logsumexp", a, axis, where, None, None, implementation)
    a, where = operands["x"], operands["where"]
    arrays = [a] if b is None else [a, lax.expand_dims(b, range(a.ndim - b.ndim))]

    def call(a, b=None):
        return logsumexp_of_jax(a, params["axes"], b, keepdims, return_sign, where)

    acc = accumulator(*(array.dtype for array in arrays))
    with jax.numpy_dtype_promotion("standard"):
        types = jax.eval_shape(call, *arrays)
    arrays = [array.astype(acc) for array in arrays]
    if scale is not None:
        arrays[0] = scores(arrays[0], row_scale("logsumexp", scale, a.shape, params["axes"], acc))
    results = call(*arrays)
    return jax.tree.map(lambda result, kind: result.astype(kind.dtype), results, types)


def _arguments(op, x, axis, where, scale, dtype, implementation, axis_name=None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Checks arguments. Returns the operands of the primitive, by name and with equal numbers of axes, and its parameters."""
    check_implementation(SOFTMAX_FAMILY, op, implementation)
    name = "a" if op == "logsumexp" else "x"
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
        scale = row_scale(op, scale, x.shape, axes, accumulator(x.dtype, dtype))
    params = {"axes": axes, "dtype": dtype, "implementation": implementation}
    if names := arguments.axis_names(op, axis_name):
        if not axes:
            raise ValueError(f"{op}: axis_name must be None where axis names no axis, got {arguments.shown(axis_name)}")
        params["axis_name"] = names
    return {"x": x, "where": where, "scale": scale}, params


def broadcast(op: str, name: str, x: jax.Array, other_name: str, other: jax.Array) -> jax.Array:
    """Returns `x` in the shape to which it and the other array broadcast."""
    try:
        return jnp.broadcast_to(x, lax.broadcast_shapes(x.shape, other.shape))
    except ValueError:
        raise ValueError(f"{op}: {other_name} must broadcast with {name}, got shapes {other.shape} and {x.shape}") from None


def sorted_axes(op: str, axis: Axis, ndim: int) -> tuple[int, ...]:
    """Returns `axis` as a sorted tuple of axes, counted from 0."""
    if axis is None:
        return tuple(range(ndim))
    several = isinstance(axis, Sequence | np.ndarray | jax.Array) and getattr(axis, "ndim", 1) > 0
    try:
        axes: list[Any] = list(axis) if several else [axis]
        if any(isinstance(a, bool | np.bool_) for a in axes):
            raise TypeError
        axes = [operator.index(a) for a in axes]
    except TypeError:
        raise TypeError(f"{op}: axis must be an int, a sequence of ints or None, got {arguments.shown(axis)}") from None
    for a in axes:
        if not -ndim <= a < ndim:
            allowed = f"{-ndim} to {ndim - 1}" if ndim else "none but () and None"
            raise ValueError(f"{op}: axis {arguments.shown(a)} is out of range for {ndim} dimensions, allowed are {allowed}")
    axes = sorted(a % ndim for a in axes)
    if len(set(axes)) != len(axes):
        raise ValueError(f"{op}: axis must not be repeated, got {axis!r} for {ndim} dimensions")
    return tuple(axes)


def _result_dtype(op: str, x: jax.Array, dtype: DTypeLike) -> np.dtype:
    kind = jnp.complexfloating if x.dtype.kind == "c" else jnp.floating
    result = arguments.dtype(op, "dtype", dtype, f"{kind.__name__} for an array of {x.dtype}")
    if not jnp.issubdtype(result, kind) or jnp.finfo(result).bits > 64:
        raise TypeError(f"{op}: dtype must be {kind.__name__} for an array of {x.dtype}, got {result}")
    return result


def _is_known_float(scale: Any) -> bool:
    """Returns True for an array of one float64 whose value is known: it may be too large for float32."""
    if isinstance(scale, jax.core.Tracer) or not isinstance(scale, np.ndarray | jax.Array):
        return False
    is_addressable = isinstance(scale, np.ndarray) or scale.is_fully_addressable
    return is_addressable and scale.shape == () and scale.dtype == np.float64


def row_scale(
    op: str, scale: Any, shape: Sequence[Any], axes: tuple[int, ...], dtype: np.dtype, name: str = "scale"
) -> jax.Array | np.ndarray:
    """Returns the factor of rows along `axes` of an array of this shape, in the real dtype of the arithmetic.

    The factor has as many axes as the array, and size 1 along `axes`. `name` is that of the argument, for errors.
    """
    if _is_known_float(scale):
        scale = np.asarray(scale)[()]
    if isinstance(scale, float | int) and not isinstance(scale, bool):  # an array of NumPy: an eager call runs no op for it
        kind = np.finfo(dtype)
        number = arguments.number(op, name, scale)
        if float(kind.max) < abs(number) < float("inf"):
            raise ValueError(f"{op}: {name} must be finite in {kind.dtype}, got {number}")
        return np.full((1,) * len(shape), number, kind.dtype)
    scale = arguments.array(op, name, scale)
    if scale.dtype == np.bool_ or jnp.issubdtype(scale.dtype, jnp.complexfloating):
        raise TypeError(f"{op}: {name} must be a real number, or one for each row, got {scale.dtype}")
    rows = tuple([size for axis, size in enumerate(shape) if axis not in axes])
    try:
        fits = lax.broadcast_shapes(rows, scale.shape) == rows
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"{op}: {name} must be a scalar, or broadcast to rows of shape {rows}, got shape {scale.shape}")
    scale = lax.expand_dims(scale.astype(np.finfo(dtype).dtype), range(len(rows) - scale.ndim))
    return lax.expand_dims(scale, axes)
