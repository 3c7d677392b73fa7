"""The reference: the largest scores, and samples, in plain `jax.numpy`, on every platform. `primitive.py` defines them.

Three filters keep entries of a row, in decreasing order, at the temperature. `top_k` keeps the first `top_k` entries. `top_p`
keeps the shortest beginning of these that weighs a share of `top_p` or more of them all. `min_p` keeps the entries of that
beginning that weigh `min_p` times the first one or more. A `top_k` below 1 keeps all, and so do a `top_p` from 1, a `min_p` up
to 0, and NaN. The first entry is kept in any case. Without `top_k`, 0 and -0 are equal in this order.

The functions have the parameters of the primitives.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.implementation import ReferencePlan
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.softmax.xla import logsumexp, saved_exponent, select, weights_of_state
from jaxsoftmax.ops.top_k.noise import gumbel_rows


def top_k(x, where, scale, *, k, return_state, dtype):
    """Returns the `k` largest entries of rows, their indices, and the state `(m, d)` if it is asked for."""
    # A sign is turned, also that of NaN, and nothing is rounded.
    directed = x if scale is None else jnp.where(scale < 0, -x, x)
    directed = select(where, directed, least(x.dtype))
    if k == 1 and not _is_float_of_8_bits(x.dtype):  # XLA computes the operand with it, and searches instead of sorting
        values, indices = _largest(directed)
    else:
        values, indices = _sorted_out(directed, k)
    if scale is not None:
        values = jnp.where(scale < 0, -values, values)
    state = []
    if return_state:
        state = logsumexp(x, where, scale, axes=(x.ndim - 1,), dtype=accumulator(x.dtype, dtype), return_state=True)[1:]
    return [values.astype(dtype), indices, *state]


def softmax_top_k(x, where, scale, *, k, normalize, return_state, dtype):
    """Returns the `k` largest weights of rows, their indices, and the state `(m, d)` if it is asked for."""
    params = {"k": k, "return_state": return_state or normalize == "all", "dtype": x.dtype}
    results = weighed(top_k(x, where, scale, **params), where, scale, normalize, dtype)
    return results[: 2 + 2 * return_state]


def softmax_top_k_jvp(indices, t, x, m, d, weights, where, scale, *, normalize, return_mean, dtype, scale_tangent):
    """Computes `w * (t - mean)` with `t` at the indices, and the mean of `t` over whole rows if it is asked for."""
    w = _weights_at(indices, t, x, (m, d), weights, where, scale, normalize)
    t = t.astype(w.dtype)
    if scale_tangent and scale is not None:
        t = t * scale.astype(t.dtype)
    t_at_indices = _where_weighed(w, at(t, indices))
    means = []  # of the whole row, if it is needed
    if return_mean or normalize == "all":
        p = weights_of_state(x, m, d, where, scale)
        means.append(jnp.sum(p * select(p != 0, t, 0), -1, keepdims=True))
    mean = means[0] if normalize == "all" else jnp.sum(w * t_at_indices, -1, keepdims=True)
    return [_where_weighed(w, w * (t_at_indices - mean)).astype(dtype), *means[: int(return_mean)]]


def softmax_top_k_vjp(indices, c, b, x, m, d, weights, where, scale, *, size, normalize, dtype, scale_tangent):
    """Transposes `softmax_top_k_jvp`: computes rows of `size`, for the cotangents `c` and `b` of its two results."""
    at_indices, common = parts_of_vjp(indices, c, b, x, m, d, weights, where, scale, normalize)
    kind = next(part.dtype for part in (common, at_indices) if part is not None)
    total = jnp.zeros((*indices.shape[:-1], size), kind)
    if common is not None:
        total = select(where, weights_of_state(x, m, d, where, scale) * common, 0)
    if at_indices is not None:
        total = scattered(lax.scatter_add, total, indices, at_indices)
    if scale_tangent and scale is not None:
        total = total * scale.astype(kind)
    return [total.astype(dtype)]


def parts_of_vjp(indices, c, b, x, m, d, weights, where, scale, normalize):
    """Returns the addends at the indices, and the factor of `p` in each row; None for 0."""
    if c is None:
        return None, b
    w = _weights_at(indices, c, x, (m, d), weights, where, scale, normalize)
    c = _where_weighed(w, c.astype(w.dtype))
    mean = jnp.sum(w * c, -1, keepdims=True)
    if normalize == "selected":
        return _where_weighed(w, w * (c - mean)), b
    return _where_weighed(w, w * c), -mean if b is None else b - mean


def _weights_at(indices, t, x, state, weights, where, scale, normalize):
    """Returns the weights at the indices: saved ones, or ones that are computed from the state."""
    if normalize == "selected":
        return weights.astype(accumulator(weights.dtype, t.dtype))
    seen = None if where is None else at(where, indices)
    m, d = state
    return _weights(at(x, indices), m, d, seen, scale)


def _where_weighed(weights, values):
    """Returns 0 where a weight is 0: an element without weight has no effect, even if it is NaN."""
    return jnp.where(weights != 0, values, 0)


def weighed(results, where, scale, normalize, dtype):
    """Returns the results of `top_k` with weights in place of values."""
    values, indices, *state = results
    seen = None if where is None else at(where, indices)
    m, d = state if normalize == "all" else _state_of_selected(values, seen, scale)
    return [_weights(values, m, d, seen, scale).astype(dtype), indices, *state]


def _weights(values, m, d, seen, scale):
    """Computes the softmax weights of values in rows of this state."""
    exponent = select(seen, saved_exponent(select(seen, values, 0), m, scale), -jnp.inf)
    return jnp.exp(exponent) / of_seen(d, seen)


def of_seen(d, seen):
    """Returns the sums of the weights of rows as softmax has them: NaN with +inf in a row, and 1 for what is not seen."""
    return select(seen, jnp.where(d < jnp.inf, d, jnp.nan), 1)


def _state_of_selected(values, seen, scale):
    """Computes the state `(m, d)` of the values that are selected of rows."""
    directed = values.astype(accumulator(values.dtype))
    directed = directed if scale is None else jnp.where(scale < 0, -directed, directed)
    m = online.shift(jnp.max(directed, -1, keepdims=True))  # not the first one: a slice makes XLA sort all on a CPU
    weights = jnp.exp(select(seen, saved_exponent(select(seen, values, 0), m, scale), -jnp.inf))
    return m, jnp.sum(weights, -1, keepdims=True)


def categorical(x, row, key0, key1, inverse, noise, top_k, top_p, min_p, where, *, return_state):
    """Returns the indices of samples, and the state `(m, d)` of `inverse * x` if it is asked for."""
    x = x.astype(accumulator(x.dtype))
    scores = select(where, x, -jnp.inf)
    noise_of_columns = gumbel_rows(key0, key1, row, x.shape[-1]).astype(x.dtype)
    if top_k is None and top_p is None and min_p is None:
        index = _first_largest(noisy(scores, noise_of_columns, inverse, noise))
    else:
        if top_k is None:
            scores = jnp.where(scores == 0, 0, scores)  # -0 as 0, as kernels compare them
        scores, indices = lax.top_k(scores, x.shape[-1])
        index = drawn(scores, indices, at(noise_of_columns, indices), inverse, noise, top_k, top_p, min_p)
    state = []
    if return_state:
        whole = jnp.broadcast_to(x, (*row.shape[:-1], x.shape[-1]))
        state = logsumexp(whole, where, inverse, axes=(x.ndim - 1,), dtype=x.dtype, return_state=True)[1:]
    return [index, *state]


def drawn(scores, indices, noise_of_columns, inverse, noise, top_k, top_p, min_p):
    """Returns the indices of samples, `[*batch, 1]`, from scores in decreasing order, their indices and their noise."""
    kept = _kept(scores, inverse, top_k, top_p, min_p)
    # An index has no derivative, and a reduction of a pair would want one of both.
    compared = lax.stop_gradient(jnp.where(kept, noisy(scores, noise_of_columns, inverse, noise), -jnp.inf))
    indices = jnp.where(kept, indices, jnp.iinfo(jnp.int32).max)

    is_nan = jnp.isnan(compared)  # where one is, they have no order, and the lowest index of those kept is drawn
    # One reduction of both: XLA computes what is compared anew, and may round it differently, wherever it is read. Compared
    # with its own maximum no score of a row would be the largest then. Equal scores: the lowest index, as where nothing is
    # sorted. 0 is above -0 only in the order of the bits.
    _, index = _largest_entry(-jnp.inf, *jnp.broadcast_arrays(jnp.where(is_nan, -jnp.inf, compared), indices))
    return jnp.where(jnp.any(is_nan, -1, keepdims=True), jnp.min(indices, -1, keepdims=True), index)


def noisy(scores, noise_of_columns, inverse, noise):
    """Returns what is compared: the scores at the temperature, with noise."""
    if inverse is not None:
        scores = scores * inverse.astype(scores.dtype)
    return scores + (noise_of_columns if noise is None else noise_of_columns * noise.astype(scores.dtype))


def _kept(scores, inverse, top_k, top_p, min_p):
    """Tells which scores of a row, in decreasing order, are kept, in a shape that broadcasts with them."""
    place = lax.broadcasted_iota(jnp.int32, (*(1,) * (scores.ndim - 1), scores.shape[-1]), scores.ndim - 1)
    kept = place >= 0
    if top_k is not None:
        kept = (place < top_k) | (top_k < 1)
    if top_p is not None or min_p is not None:
        # Not a slice of the first: XLA would sort all on a CPU for a top_k whose results are not all used.
        exponent = scores - online.shift(jnp.max(scores, -1, keepdims=True))
        weights = jnp.exp(exponent if inverse is None else exponent * inverse.astype(scores.dtype))
        if top_p is not None:
            upto = jnp.cumsum(jnp.where(kept, weights, 0), -1)
            before = jnp.concatenate([jnp.zeros_like(upto[..., :1]), upto[..., :-1]], -1)
            kept &= ~(before >= top_p.astype(upto.dtype) * upto[..., -1:]) | (top_p >= 1)
        if min_p is not None:
            kept &= ~(weights < jnp.minimum(min_p, 1).astype(weights.dtype))
    return kept | (place == 0)


def at(values, indices):
    """Takes values at indices along the last axis, where they may have size 1; other axes of size 1 are broadcast."""
    if values.shape[-1] == 1:
        return values
    batch = lax.broadcast_shapes(values.shape[:-1], indices.shape[:-1])
    indices = jnp.broadcast_to(indices, (*batch, indices.shape[-1]))
    return jnp.take_along_axis(values, indices, -1, mode="promise_in_bounds")


def common_at_indices(indices, common, x, m, d, where, scale):
    """Returns the part of the gradient at the indices that all elements of a row have: their weights times a factor."""
    seen = None if where is None else at(where, indices)
    return select(seen, _weights(at(x, indices), m, d, seen, scale) * common, 0)


def scattered(scatter, total, indices, values):
    """Puts or adds values to `total` at indices along the last axis; the indices of a row differ."""
    batch = tuple(range(total.ndim - 1))
    places = lax.ScatterDimensionNumbers(
        update_window_dims=(),
        inserted_window_dims=(total.ndim - 1,),
        scatter_dims_to_operand_dims=(total.ndim - 1,),
        operand_batching_dims=batch,
        scatter_indices_batching_dims=batch,
    )
    values = values.astype(total.dtype)
    return scatter(total, indices[..., None], values, places, unique_indices=True, mode=lax.GatherScatterMode.PROMISE_IN_BOUNDS)


def least(dtype):
    """Returns what counts as less than all: -inf, or the smallest number of a dtype without infinity."""
    if jnp.issubdtype(dtype, jnp.integer):
        return jnp.iinfo(dtype).min
    has_infinity = np.isinf(np.float32(np.asarray(np.inf).astype(dtype)))
    return -np.inf if has_infinity else float(jnp.finfo(dtype).min)


def _sorted_out(x, k):
    """Computes what `lax.top_k` does, which rows of 8-bit floats are left to.

    On CPUs XLA is fast for 32 bits alone: the 40 largest of [64, 50257] take 6 ms in float32 and 100 in bfloat16.
    """

    def as_it_is(x):
        return tuple(lax.top_k(x, k))

    def in_float32(x):
        if x.dtype == jnp.bfloat16:  # as XLA does, which may change the bits of NaN
            values, indices = lax.top_k(x.astype(jnp.float32), k)
            return values.astype(x.dtype), indices
        indices = lax.top_k(_order(x).astype(jnp.float32), k)[1]
        return at(x, indices), indices

    if x.dtype.itemsize > 2 or _is_float_of_8_bits(x.dtype):
        return as_it_is(x)
    return lax.platform_dependent(x, cpu=in_float32, default=as_it_is)


def _is_float_of_8_bits(dtype) -> bool:
    return dtype.itemsize == 1 and jnp.issubdtype(dtype, jnp.floating)


def _order(x):
    """Returns integers in the order of `lax.top_k`, where NaN and the signs of 0 have their places."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    bits = lax.bitcast_convert_type(x, jnp.dtype(f"int{8 * x.dtype.itemsize}"))
    return jnp.where(bits < 0, bits ^ jnp.iinfo(bits.dtype).max, bits)


def _largest(x):
    """Returns the largest entry of each row in the order of `lax.top_k`, and its index.

    `lax.argmax` gives the place alone, and to read the entry there would take another kernel. XLA sorts bfloat16 in float32 and
    does not keep all bits of NaN, so its values pass through float32 here too. What becomes of NaN and subnormal numbers of 8
    bits depends on the platform: `top_k` leaves their rows to `lax.top_k`.
    """
    keys, values = _order(x), x
    if jnp.issubdtype(x.dtype, jnp.floating):
        bits = lax.bitcast_convert_type(x, keys.dtype)
        values = x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else bits
    if keys.dtype.itemsize < 4:
        keys = keys.astype(jnp.int32)

    columns = lax.broadcasted_iota(jnp.int32, x.shape, x.ndim - 1)
    _, index, value = _largest_entry(jnp.iinfo(keys.dtype).min, keys, columns, values)
    return value.astype(x.dtype) if x.dtype == jnp.bfloat16 else lax.bitcast_convert_type(value, x.dtype), index


def _largest_entry(least, keys, columns, *values):
    """Returns the largest key of each row, at the lowest column among equals, and what other arrays have there."""

    def larger(a, b):
        (key_a, column_a, *_), (key_b, column_b, *_) = a, b
        is_a = (key_a > key_b) | ((key_a == key_b) & (column_a < column_b))
        return tuple([jnp.where(is_a, *pair) for pair in zip(a, b, strict=True)])

    operands, least = (keys, columns, *values), (least, jnp.iinfo(jnp.int32).max, *[0] * len(values))
    initial = tuple([jnp.asarray(value, array.dtype) for value, array in zip(least, operands, strict=True)])
    return [array[..., None] for array in lax.reduce(operands, initial, larger, (keys.ndim - 1,))]


def _first_largest(values):
    """Returns the index of the largest entry of each row, the lowest index among equals, `[*batch, 1]`."""
    return lax.argmax(values, values.ndim - 1, jnp.int32)[..., None]


_FUNCTIONS = {
    "top_k": top_k,
    "softmax_top_k": softmax_top_k,
    "softmax_top_k_jvp": softmax_top_k_jvp,
    "softmax_top_k_vjp": softmax_top_k_vjp,
    "categorical": categorical,
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
