"""Largest entries of rows, their softmax weights, and samples, with the signatures of `jax.lax.top_k` and `jax.random`."""

import math
import operator
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import export, lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments, sharding
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax.ops.softmax.api import broadcast, row_scale
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP
from jaxsoftmax.ops.softmax.xla import saved_exponent, select
from jaxsoftmax.ops.top_k import xla
from jaxsoftmax.ops.top_k.implementations import TOP_K_FAMILY
from jaxsoftmax.ops.top_k.noise import gumbel_at
from jaxsoftmax.ops.top_k.primitive import CATEGORICAL, SOFTMAX_TOP_K, TOP_K

if TYPE_CHECKING:
    from jaxsoftmax.ops.options import SamplingOptions, TopWeightOptions

_CATEGORICAL = "categorical"
_INT32 = np.iinfo(np.int32)
_MOST_SORTED = 1024  # largest number of entries that are selected and sorted before samples are drawn from them
_LEAST_TEMPERATURE = 2.0**-64  # scores at a lower temperature might overflow


def top_k(
    operand: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    where: ArrayLike | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the `k` largest entries of `operand` along `axis`, the largest first, and their indices.

    The function replaces `jax.lax.top_k` and returns the same bits. In addition it takes `axis`, `where` and
    `implementation`. The order of floating numbers is the order of their bits: NaN of sign 0, `+inf`, finite numbers,
    `-inf`, NaN of sign 1, with +0 before -0. Equal entries come in the order of their indices. In long rows on a GPU
    `jax.lax.top_k` takes +0 and -0 as equal, and so does the implementation "xla".

    Values can be differentiated any number of times, in forward and reverse mode. Indices are constants.

    Args:
      operand: array of a floating or integer dtype with at least one axis.
      k: number of entries to return, a concrete integer from 0 to the size of `axis`.
      axis: axis along which entries are compared; -1 by default. It is counted in the shape to which `operand` and `where`
        broadcast.
      where: boolean array that selects the entries that take part, or None (the default) for all entries. It broadcasts
        against `operand`, and `operand` against it. Entries that are not selected count as `-inf`, or as the smallest
        number of a dtype without infinity. Their values in `operand`, even NaN, have no effect.
      implementation: name of the implementation that must run: "mosaic" or "xla". None (the default) takes the best one
        for the platform, shape and dtype.

    Returns:
      A pair: the values, in the dtype of `operand`, and their indices along `axis`, int32. Both have the shape to which
      `operand` and `where` broadcast, with size `k` along `axis`.

    Raises:
      TypeError: `operand` is not an array of numbers or is bool or complex, `k` or `axis` is not a concrete integer, or
        `where` is not boolean.
      ValueError: `k` or `axis` is out of range, `where` does not broadcast with `operand`, or there is no `implementation`
        of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> x = jnp.array([[0.1, 0.7, 0.2, 0.4], [3.0, 1.0, 2.0, 3.0]])
      >>> values, indices = jaxsoftmax.top_k(x, 2)
      >>> print(indices)
      [[1 3]
       [0 3]]
      >>> expected = jax.lax.top_k(x, 2)
      >>> print(bool(jnp.all(values == expected[0])), bool(jnp.all(indices == expected[1])))
      True True
    """
    name = "top_k"
    check_implementation(TOP_K_FAMILY, name, implementation)
    x, where, axis = _rows(name, "operand", _real(name, "operand", operand), axis, where)
    k = _checked_k(name, k, x.shape[-1])
    shape = (*x.shape[:-1], k)
    if _is_empty(shape):
        values, indices = jnp.zeros(shape, x.dtype), jnp.zeros(shape, jnp.int32)
    else:
        params = {"k": k, "return_state": False, "dtype": x.dtype, "implementation": implementation}
        values, indices = bind(TOP_K, {"x": x, "where": where}, **params)
    return jnp.moveaxis(values, -1, axis), jnp.moveaxis(indices, -1, axis)


@overload
def softmax_top_k(
    logits: ArrayLike, k: int, *, return_lse: Literal[False] = False, **options: "Unpack[TopWeightOptions]"
) -> tuple[jax.Array, jax.Array]: ...


@overload
def softmax_top_k(
    logits: ArrayLike, k: int, *, return_lse: Literal[True], **options: "Unpack[TopWeightOptions]"
) -> tuple[jax.Array, jax.Array, jax.Array]: ...


def softmax_top_k(
    logits: ArrayLike,
    k: int,
    *,
    axis: int = -1,
    scale: ArrayLike | None = None,
    where: ArrayLike | None = None,
    normalize: Literal["all", "selected"] = "all",
    return_lse: bool = False,
    implementation: str | None = None,
) -> tuple[jax.Array, ...]:
    """Returns the `k` largest weights of `softmax(scale * logits)` along `axis`, the largest first, and their indices.

    A router of experts needs these weights. On NVIDIA Hopper GPUs a kernel reads the logits once: it finds the largest of
    them and sums the exponentials of the row. The weights of all other entries are never computed. With `where` the logits
    are read twice, unless `normalize` is "selected" and `return_lse` is False.

    The arithmetic is float32, or float64 if `logits` are float64. Weights can be differentiated with respect to `logits`
    and `scale`, any number of times, in forward and reverse mode. Indices are constants.

    Args:
      logits: array of a floating or integer dtype with at least one axis. Integers are converted first, as `jnp.exp`
        converts them: to float32, or to float64 if they have 64 bits.
      k: number of weights to return, a concrete integer from 0 to the size of `axis`.
      axis: axis of the softmax; -1 by default. It is counted in the shape to which `logits` and `where` broadcast.
      scale: real number that multiplies `logits`, or an array of them with one for each row; None (the default) for 1. An
        array broadcasts to the shape of the result without `axis`. It may be traced. Where it is negative, the smallest
        logits come first. Where it is 0, all weights are the same, and the largest logits come first.
      where: boolean array that selects the entries that take part, or None (the default) for all entries. It broadcasts
        against `logits`, and `logits` against it. Entries that are not selected have weight 0.
      normalize: "all" (the default) for weights of the softmax over the whole row. "selected" for weights of the softmax
        over the `k` entries, which sum to 1.
      return_lse: True to return `logsumexp(scale * logits)` over the whole row too; False by default.
      implementation: name of the implementation that must run: "mosaic" or "xla". None (the default) takes the best one
        for the platform, shape and dtype.

    Returns:
      A pair: the weights, in the dtype of `logits` (converted, if they are integers), and their indices along `axis`,
      int32. Both have the shape to which `logits` and `where` broadcast, with size `k` along `axis`, in the order of
      `top_k`. With `return_lse` the log-sum-exp comes third, without `axis`, in float32, or float64 if the logits are
      float64.

      As in `softmax`, a row is NaN if it holds NaN or `+inf`, or nothing except `-inf`. With `normalize="selected"` only
      NaN and `+inf` among the `k` entries count.

    Raises:
      TypeError: `logits` are not an array of numbers or are bool or complex, `k` or `axis` is not a concrete integer,
        `where` is not boolean, `scale` is not real, or `return_lse` is not True or False.
      ValueError: `k` or `axis` is out of range, `where` does not broadcast with `logits`, `scale` does not broadcast to the
        rows or is a number too large for the arithmetic, `normalize` is neither "all" nor "selected", or there is no
        `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> logits = jnp.log(jnp.array([[1.0, 5.0, 2.0, 2.0], [4.0, 1.0, 0.5, 4.5]]))
      >>> weights, experts = jaxsoftmax.softmax_top_k(logits, 2)
      >>> print(experts)
      [[1 2]
       [3 0]]
      >>> expected = jax.lax.top_k(jax.nn.softmax(logits), 2)[0]
      >>> bool(jnp.allclose(weights, expected, atol=1e-6))
      True
      >>> weights, _ = jaxsoftmax.softmax_top_k(logits, 2, normalize="selected")
      >>> print(jnp.round(jnp.sum(weights, axis=-1), 3))
      [1. 1.]

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 4, fuses softmax with the search of its largest weights.
    """
    name = "softmax_top_k"
    check_implementation(TOP_K_FAMILY, name, implementation)
    (return_lse,) = arguments.flags(name, return_lse=return_lse)
    arguments.check_choice(name, "normalize", normalize, "all", "selected")
    x, where, axis = _rows(name, "logits", _floating(name, "logits", logits), axis, where)
    k, kind = _checked_k(name, k, x.shape[-1]), accumulator(x.dtype)
    scale = None if scale is None else row_scale(name, scale, x.shape, (x.ndim - 1,), kind)
    operands, shape = {"x": x, "where": where, "scale": scale}, (*x.shape[:-1], k)
    if _is_empty(shape):
        weights, indices = jnp.zeros(shape, x.dtype), jnp.zeros(shape, jnp.int32)
        lse = _state_of(operands, implementation)[0] if return_lse else None
    else:
        params = {"k": k, "normalize": normalize, "return_state": return_lse, "dtype": x.dtype}
        weights, indices, *state = bind(SOFTMAX_TOP_K, operands, implementation=implementation, **params)
        lse = _log_sum_exp(state, scale) if return_lse else None
    results = jnp.moveaxis(weights, -1, axis), jnp.moveaxis(indices, -1, axis)
    return results if lse is None else (*results, jnp.squeeze(lse, -1))


@overload
def categorical(
    key: ArrayLike,
    logits: ArrayLike,
    axis: int = -1,
    shape: Sequence[int] | None = None,
    *,
    return_log_prob: Literal[False] = False,
    **options: "Unpack[SamplingOptions]",
) -> jax.Array: ...


@overload
def categorical(
    key: ArrayLike,
    logits: ArrayLike,
    axis: int = -1,
    shape: Sequence[int] | None = None,
    *,
    return_log_prob: Literal[True],
    **options: "Unpack[SamplingOptions]",
) -> tuple[jax.Array, jax.Array]: ...


def categorical(
    key: ArrayLike,
    logits: ArrayLike,
    axis: int = -1,
    shape: Sequence[int] | None = None,
    *,
    temperature: ArrayLike | None = None,
    top_k: ArrayLike | None = None,
    top_p: ArrayLike | None = None,
    min_p: ArrayLike | None = None,
    where: ArrayLike | None = None,
    out_sharding: NamedSharding | PartitionSpec | None = None,
    return_log_prob: bool = False,
    implementation: str | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Draws samples from `softmax(logits / temperature)` along `axis`.

    `top_k`, `top_p` and `min_p` limit the entries that can be drawn. They apply in this order, after `where` and
    `temperature`. The function has the signature of `jax.random.categorical`, without `replace` and `mode`. In addition it
    takes the filters, `temperature`, `where`, `return_log_prob` and `implementation`.

    A sample is the entry with the largest `logits / temperature + noise`, where `noise` is Gumbel noise. The noise of an
    entry depends only on the key, the number of the sample and the column. A sample is therefore the same for every
    implementation and sharding, unless the two largest sums differ by no more than rounding. From the same key
    `jax.random.categorical` draws other samples, because its noise differs: the noise here is finer where it is large.

    Inside a `shard_map` each device counts its own samples from 0. Pass a different key on each device.

    Args:
      key: key of `jax.random`, typed or raw.
      logits: array of a floating or integer dtype with at least one axis. Integers are converted first, as `jnp.exp`
        converts them: to float32, or to float64 if they have 64 bits.
      axis: axis of the classes; -1 by default. It is counted in the shape to which `logits` and `where` broadcast.
      shape: shape of the samples. The shape of `logits` without `axis` must broadcast to it, and so must `temperature`,
        `top_k`, `top_p` and `min_p`. None (the default) for the shape to which all of these broadcast together.
      temperature: number or array, 0 or more; None (the default) for 1. A temperature of 0 takes the largest logit, at the
        lowest index among equal ones. A temperature below 2^-64 counts as 0. In a JAX array a negative temperature and NaN
        count as 0 too.
      top_k: number of largest entries to keep, in the order of `jaxsoftmax.top_k`: an integer of at least 1, or an array
        of integers, in which values below 1 keep all. None (the default) keeps all. On NVIDIA Hopper GPUs a kernel finds
        up to 1024 entries. If an array holds a larger value, or a value that keeps all, the reference sorts all rows.
      top_p: share of the remaining weight to keep: the shortest beginning of the sorted entries whose weights reach this
        share is kept, and at least one entry. A number from 0 to 1, or an array. 1, NaN and None (the default) keep all.
        In a JAX array a value above 1 keeps all too, and a negative one keeps one entry. Without `top_k`, +0 and -0 count
        as equal in the order of the entries.
      min_p: smallest weight to keep, as a share of the largest weight: a number of at most 1, or an array. Values up to 0,
        NaN and None (the default) keep all. In a JAX array a value above 1 counts as 1.
      where: boolean array that selects the entries that take part, or None (the default) for all entries. It broadcasts
        against `logits`, and `logits` against it.
      out_sharding: sharding of the samples over explicit mesh axes, a `NamedSharding` or `PartitionSpec`, as in
        `jax.random.categorical`. None (the default) for the sharding of `logits`.
      return_log_prob: True to return the log-probabilities of the samples too; False by default.
      implementation: name of the implementation that must run: "mosaic" or "xla". None (the default) takes the best one
        for the platform, shape and dtype.

    Returns:
      Samples in the shape `shape`, int32 indices along `axis`. An entry that is `-inf` or not selected by `where` is never
      drawn, unless the row has no other entry: then the sample is 0. If a row holds NaN or `+inf`, the sample is some
      index.

      With `return_log_prob` the result is a pair: the samples, and the logarithms of their weights in `softmax(logits /
      temperature)` over the whole row, before the filters apply. They have the shape of the samples, in float32, or
      float64 if `logits` are float64. They can be differentiated with respect to `logits` and `temperature`, and are 0
      where the temperature is 0.

    Raises:
      TypeError: `key` is not a key of `jax.random`, `logits` are not an array of numbers or are bool or complex, `axis` is
        not a concrete integer, `shape` is not a sequence of integers, `temperature`, `top_p` or `min_p` is not real,
        `top_k` is not made of integers, `where` is not boolean, `out_sharding` is not a sharding, or `return_log_prob` is
        not True or False.
      ValueError: `key` is an array of several keys, `axis` is out of range or has size 0, shapes do not broadcast, `shape`
        has a negative size, a concrete `temperature`, `top_k`, `top_p` or `min_p` is out of range, or there is no
        `implementation` of this name.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> logits = jnp.array([[0.0, 3.0, 1.0, -jnp.inf], [2.0, 0.0, 0.0, 0.0]])
      >>> tokens = jaxsoftmax.categorical(
      ...     jax.random.key(0), logits, shape=(1000, 2), temperature=0.8, top_k=2
      ... )
      >>> print(tokens.shape, tokens.dtype)
      (1000, 2) int32

      Only the two largest entries of the first row are drawn. A temperature of 0 takes the largest of each row:

      >>> print(sorted(set(tokens[:, 0].tolist())))
      [1, 2]
      >>> print(jaxsoftmax.categorical(jax.random.key(0), logits, temperature=0))
      [1 0]

    Source: Gumbel-max sampling. `top_p` is nucleus sampling (Holtzman et al. 2019, arXiv:1904.09751). `min_p` is by Nguyen
    et al. 2024, arXiv:2407.01082.
    """
    check_implementation(TOP_K_FAMILY, _CATEGORICAL, implementation)
    (return_log_prob,) = arguments.flags(_CATEGORICAL, return_log_prob=return_log_prob)
    key = arguments.random_key(_CATEGORICAL, "key", key)
    x, where, _ = _rows(_CATEGORICAL, "logits", _floating(_CATEGORICAL, "logits", logits), axis, where)
    size, kind = x.shape[-1], accumulator(x.dtype)
    if isinstance(size, int) and size == 0:
        raise ValueError(
            f"{_CATEGORICAL}: logits must have an entry along axis, got shape {x.shape} with axis moved to the end"
        )
    options = {
        "temperature": _option("temperature", temperature, kind, 0, math.inf),
        "top_k": _checked_top_k(top_k, size),
        "top_p": _option("top_p", top_p, kind, 0, 1),
        "min_p": _option("min_p", min_p, kind, -math.inf, 1),
    }
    batch = _shape_of_samples(shape, x.shape[:-1], options)
    if isinstance(options["temperature"], float) and options["temperature"] == 0:
        options |= dict.fromkeys(("top_k", "top_p", "min_p"))  # no filter drops the largest entry
    if _is_empty(batch):
        index, log_prob = jnp.zeros(batch, jnp.int32), jnp.zeros(batch, kind)
        return _placed((index, log_prob) if return_log_prob else index, out_sharding)

    most, is_enough = _most_kept(options["top_k"], size)
    if most is None and isinstance(options["top_k"], int) and implementation not in (None, "xla"):
        limit = f"top_k must be {_MOST_SORTED} or less, got {options['top_k']}"
        raise NotImplementedError(f"{_CATEGORICAL}: implementation={implementation!r} cannot run: {limit}")
    words = jax.random.bits(key, (2,), jnp.uint32)
    if return_log_prob:  # two cotangents of narrow logits would be rounded before they are added up
        x = x.astype(kind)
    operands = _as_operands(options, len(batch) + 1, kind, most) | {
        "x": lax.expand_dims(_with_infinity(x, where), range(len(batch) - x.ndim + 1)),
        "row": lax.iota(jnp.uint32, math.prod(batch)).reshape(*batch, 1),
        "key0": words[0].reshape((1,) * (len(batch) + 1)),
        "key1": words[1].reshape((1,) * (len(batch) + 1)),
        "where": None if where is None else lax.expand_dims(where, range(len(batch) - where.ndim + 1)),
    }
    index, state = _sample(operands, most, is_enough, return_log_prob, implementation)
    if not return_log_prob:
        return _placed(jnp.squeeze(index, -1), out_sharding)
    log_prob = _log_prob(operands, index, state, implementation)
    return _placed((jnp.squeeze(index, -1), jnp.squeeze(log_prob, -1)), out_sharding)


def _placed(samples, out_sharding):
    """Reshards the results of `categorical` as its caller asks."""
    if out_sharding is None:
        return samples
    if not isinstance(out_sharding, NamedSharding | PartitionSpec):
        kind = type(out_sharding).__name__
        raise TypeError(f"{_CATEGORICAL}: out_sharding must be None, a NamedSharding or a PartitionSpec, got {kind}")
    try:
        return jax.sharding.reshard(samples, out_sharding)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{_CATEGORICAL}: out_sharding does not fit: {error}") from None


def _sample(operands, most, is_enough, return_state, implementation):
    """Draws samples. `most` and `is_enough` are the results of `_most_kept`.

    Returns:
      Indices `[*shape, 1]`, and the state `(m, d)` of the rows if `return_state` is True and the state costs nothing, else
      None.
    """
    if most is None:
        has_state = return_state and operands["x"].shape[:-1] == operands["row"].shape[:-1]
        index, *state = bind(CATEGORICAL, operands, return_state=has_state, implementation=implementation)
        return index, state or None
    if is_enough:
        return _sample_sorted(operands, most, return_state, implementation)
    constants = {name: None if operand is None else lax.stop_gradient(operand) for name, operand in operands.items()}
    index = lax.cond(
        jnp.any((operands["top_k"] < 1) | (operands["top_k"] > most)),
        lambda: bind(CATEGORICAL, constants, return_state=False, implementation=implementation)[0],
        lambda: _sample_sorted(constants, most, False, implementation)[0],
    )
    return index, None


def _sample_sorted(operands, most, return_state, implementation):
    """Computes `_sample` for rows that keep up to `most` entries: `top_k` sorts them, XLA does the rest on `[rows, most]`."""
    x, inverse = operands["x"], operands["inverse"]
    is_of_rows = inverse is None or lax.broadcast_shapes(x.shape[:-1], inverse.shape[:-1]) == x.shape[:-1]
    has_state = return_state and is_of_rows  # a row with several temperatures has several states, and is sorted once
    top_k_operands = {"x": x, "where": operands["where"], "scale": inverse if has_state else None}
    params = {"k": most, "return_state": has_state, "dtype": x.dtype, "implementation": implementation}
    values, indices, *state = bind(TOP_K, top_k_operands, **params)
    scores = lax.stop_gradient(values).astype(accumulator(x.dtype))
    noise_of_columns = gumbel_at(operands["key0"], operands["key1"], operands["row"], indices).astype(scores.dtype)
    filters = {name: operands[name] for name in ("inverse", "noise", "top_k", "top_p", "min_p")}
    return xla.drawn(scores, indices, noise_of_columns, **filters), state or None


def _log_prob(operands, index, state, implementation):
    """Computes the logarithms of the weights of samples, `[*shape, 1]`."""
    x, where, inverse, noise = (operands[name] for name in ("x", "where", "inverse", "noise"))
    seen = None if where is None else xla.at(where, index)
    if state is None:
        batch = x.shape[:-1] if inverse is None else lax.broadcast_shapes(x.shape[:-1], inverse.shape[:-1])
        x_of_rows = jnp.broadcast_to(x, (*batch, x.shape[-1]))
        state = _state_of({"x": x_of_rows, "where": where, "scale": inverse}, implementation)[1:]
    m, d = state
    exponent = saved_exponent(select(seen, xla.at(x, index), 0), m, inverse)
    log_prob = select(seen, exponent - jnp.log(xla.of_seen(d, seen)), -jnp.inf)
    return log_prob if noise is None else jnp.where(noise == 0, 0, log_prob)


def _log_sum_exp(state, scale):
    """Computes the log-sum-exp of a state; `d` alone carries its derivative."""
    m, d = state
    is_positive = d != 0  # the logarithm of 0 has no derivative
    log_d = jnp.where(is_positive, jnp.log(jnp.where(is_positive, d, 1)), -jnp.inf)
    return lax.stop_gradient(m if scale is None else m * jnp.abs(scale).astype(m.dtype)) + log_d


def _state_of(operands, implementation):
    """Computes the log-sum-exp and the state `(m, d)` of rows."""
    x = operands["x"]
    params = {"axes": (x.ndim - 1,), "dtype": accumulator(x.dtype), "implementation": implementation}
    return bind(LOGSUMEXP, operands, return_state=True, **params)


def _real(function: str, name: str, value: Any) -> jax.Array:
    array = arguments.array(function, name, value)
    if array.dtype == np.bool_ or jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{function}: {name} must be floating or integer, got {array.dtype}")
    return array


def _floating(function: str, name: str, value: Any) -> jax.Array:
    """Returns an array of floating numbers. Integers become floating as `jnp.exp` converts them."""
    x = _real(function, name, value)
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jax.eval_shape(jnp.exp, x).dtype)


def _rows(function, name, x, axis, where) -> tuple[jax.Array, jax.Array | None, int]:
    """Returns rows along the last axis, a mask with the same number of axes or None, and `axis` counted from 0."""
    if where is not None:
        where = arguments.array(function, "where", where, "boolean")
        x = broadcast(function, name, x, "where", where)
        where = lax.expand_dims(where, range(x.ndim - where.ndim))
    axis = arguments.integer(function, "axis", axis)
    if not -x.ndim <= axis < x.ndim:
        allowed = f"{-x.ndim} to {x.ndim - 1}" if x.ndim else "none, as it needs one"
        what = f"axis {arguments.shown(axis)} is out of range for {name} with {x.ndim} dimensions"
        raise ValueError(f"{function}: {what}, allowed are {allowed}")
    if isinstance(size := x.shape[axis], int) and size > _INT32.max + 1:
        raise ValueError(
            f"{function}: {name} must have at most {_INT32.max + 1} entries along axis, as indices are int32, got {size}"
        )
    where = None if where is None else sharding.with_whole_rows(jnp.moveaxis(where, axis, -1))
    return sharding.with_whole_rows(jnp.moveaxis(x, axis, -1)), where, axis % x.ndim


def _checked_k(function: str, value: Any, size: Any) -> int:
    """Returns `k`, checked for rows of this size, which may be symbolic."""
    k = arguments.integer(function, "k", value)
    try:
        is_allowed = 0 <= k <= size
    except jax.errors.InconclusiveDimensionOperation:
        constraint = f"a symbolic size needs the constraint '{size} >= {k}'"
        raise ValueError(f"{function}: k must be from 0 to {size}, the size of axis, got {k}: {constraint}") from None
    if not is_allowed:
        raise ValueError(f"{function}: k must be from 0 to {size}, the size of axis, got {arguments.shown(k)}")
    return k


def _option(name: str, value: Any, kind: np.dtype, least: float, most: float) -> float | jax.Array | None:
    """Returns a concrete number, or an array of this dtype. Checks the limits of numbers, lists and arrays of NumPy.

    NaN is out of range for a temperature. As a filter it keeps every entry.
    """
    value = arguments.listed(_CATEGORICAL, name, value)
    if value is None:
        return None
    is_number = isinstance(value, int | float | np.generic)
    value = arguments.number(_CATEGORICAL, name, value) if is_number else value
    array = None if is_number else _real(_CATEGORICAL, name, value)
    if isinstance(value, float | np.ndarray):
        is_allowed = (least <= np.asarray(value)) & (np.asarray(value) <= most)
        if name != "temperature":
            is_allowed |= np.isnan(np.asarray(value, np.float64))
        if not np.all(is_allowed):
            bounds = {math.inf: f"{least} or more", -math.inf: f"{most} or less"}
            allowed = bounds.get(most, bounds.get(least, f"from {least} to {most}"))
            raise ValueError(f"{_CATEGORICAL}: {name} must be {allowed}, got {arguments.shown(value)}")
    return value if array is None else array.astype(kind)


def _checked_top_k(value: Any, size: Any) -> int | np.ndarray | jax.Array | None:
    """Returns `top_k`: None if it keeps all entries, a positive number, or an int32 array where numbers below 1 keep all."""
    value = arguments.listed(_CATEGORICAL, "top_k", value)
    if value is None:
        return None
    if isinstance(value, int | np.integer | float | np.floating | np.bool_) or export.is_symbolic_dim(value):
        limit = arguments.integer(_CATEGORICAL, "top_k", value)
        if limit < 1:
            raise ValueError(f"{_CATEGORICAL}: top_k must be 1 or more, got {arguments.shown(limit)}")
        return None if limit > _INT32.max or (isinstance(size, int) and limit >= size) else limit
    array = arguments.array(_CATEGORICAL, "top_k", value, "integers")
    if not isinstance(value, jax.Array):
        value = np.asarray(value)
        return np.where((value < 1) | (value > _INT32.max), 0, value).astype(np.int32)
    if jnp.iinfo(array.dtype).max > _INT32.max:  # such numbers keep all entries
        array = jnp.where(array > np.asarray(_INT32.max, array.dtype), 0, array)
    return array.astype(jnp.int32)


def _most_kept(limits: Any, size: Any) -> tuple[int | None, bool]:
    """Returns the number of entries to sort before sampling, None to sort none, and True if that is enough for every row."""
    if limits is None or not isinstance(size, int):
        return None, True
    if isinstance(limits, int):
        return (limits if limits <= _MOST_SORTED else None), True
    if size <= _MOST_SORTED:
        return size, True
    if isinstance(limits, np.ndarray):
        is_small = limits.size > 0 and bool(np.all((limits >= 1) & (limits <= _MOST_SORTED)))
        return (int(limits.max()) if is_small else None), True
    return _MOST_SORTED, False


def _shape_of_samples(shape: Any, batch: Any, options: dict[str, Any]) -> Any:
    """Returns the shape of the samples, to which the batch of the logits and all options broadcast."""
    shapes: dict[str, Any] = {"logits without axis": batch} | {name: np.shape(option) for name, option in options.items()}
    if shape is None:
        samples = ()
        for name, other in shapes.items():
            try:
                samples = lax.broadcast_shapes(samples, other)
            except ValueError:
                raise ValueError(
                    f"{_CATEGORICAL}: {name} must broadcast to the shape of samples {samples}, got {other}"
                ) from None
        return samples
    sizes = _sizes(shape)
    for name, other in shapes.items():
        try:
            fits = lax.broadcast_shapes(sizes, other) == sizes
        except ValueError:
            fits = False
        if not fits:
            raise ValueError(f"{_CATEGORICAL}: {name} must broadcast to shape {sizes}, got {other}")
    return sizes


def _sizes(shape: Any) -> Any:
    """Returns the argument `shape` as a tuple of sizes, which may be symbolic."""
    try:
        if not isinstance(shape, Sequence | np.ndarray) or any(isinstance(size, bool | np.bool_) for size in shape):
            raise TypeError
        sizes = tuple([size if export.is_symbolic_dim(size) else operator.index(size) for size in shape])
    except TypeError:
        what = arguments.shown(shape)
        raise TypeError(f"{_CATEGORICAL}: shape must be a sequence of concrete integers or None, got {what}") from None
    if any(isinstance(size, int) and size < 0 for size in sizes):
        raise ValueError(f"{_CATEGORICAL}: shape must have no negative size, got {arguments.shown(shape)}")
    return sizes


def _as_operands(options, ndim, kind, most) -> dict[str, Any]:
    """Returns the options as operands with `ndim` axes, None for an option that changes nothing."""
    temperature, limit, top_p, min_p = (options[name] for name in ("temperature", "top_k", "top_p", "min_p"))
    inverse, noise = _at_temperature(temperature, kind)
    operands = {
        "inverse": inverse,
        "noise": noise,
        "top_k": None if isinstance(limit, int) and limit == most else limit,
        "top_p": None if isinstance(top_p, float) and not top_p < 1 else top_p,
        "min_p": None if isinstance(min_p, float) and not min_p > 0 else min_p,
    }
    return {name: None if option is None else _operand(option, ndim, kind) for name, option in operands.items()}


def _at_temperature(temperature, kind):
    """Returns `1 / temperature`, and the factor of the noise, 0 where the temperature is 0, else 1; None is 1 everywhere."""
    most = 1 / float(jnp.finfo(kind).tiny)  # a larger temperature has the inverse 0, and 0 times an infinite score is NaN
    if temperature is None or (isinstance(temperature, float) and temperature == 1):
        return None, None
    if isinstance(temperature, float):
        return (None, 0.0) if temperature == 0 else (1 / min(max(temperature, _LEAST_TEMPERATURE), most), None)
    is_hot, is_usual = temperature > 0, temperature >= _LEAST_TEMPERATURE
    inverse = 1 / jnp.minimum(jnp.where(is_usual, temperature, 1), most)
    # The derivative of the inverse of a lower temperature is infinite, and 0 times it is NaN.
    return jnp.where(is_hot & ~is_usual, 1 / _LEAST_TEMPERATURE, inverse), is_hot.astype(kind)


def _operand(option, ndim, kind):
    """Returns an option as an array with `ndim` axes: those of an array, one behind them, and axes of size 1 in front."""
    if isinstance(option, float | int):  # an array of NumPy: an eager call runs no op for it
        return np.full((1,) * ndim, option, np.int32 if isinstance(option, int) else kind)
    return lax.expand_dims(option, (*range(ndim - 1 - option.ndim), ndim - 1))


def _with_infinity(x, where):
    """Returns the logits, which a mask sets to -inf, in a dtype that has -inf."""
    return x if where is None or xla.least(x.dtype) == -jnp.inf else x.astype(jnp.float32)


def _is_empty(shape) -> bool:
    return any(isinstance(size, int) and size == 0 for size in shape)
