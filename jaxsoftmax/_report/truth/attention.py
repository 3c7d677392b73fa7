"""The truth of attention, its tangents and its cotangents, in float64 on the CPU, and the error that a result may have.

A score is a sum of products, `scale * q k + bias`, and its float32 error is a few roundings of the sum `A` of their absolute
values. A weight `p = exp(s - lse)` therefore errs, relative to itself, by

    unit = (8 + 3 * |s - max|) * 2^-24 + 8 * 2^-24 * A, plus the mean of these over the row, which errs in its denominator,

and a result by the sum of `unit` times the absolute values of its terms. If the operands have 16 bits, a kernel rounds the
weights to 16 bits before it multiplies them, which adds one `half_unit` of that sum. The cotangents of the scores are rounded
too; they are differences to `sum(out * dout)`, where out was saved in the operands' dtype. If the result has 16 bits, `error`
of this package adds half a unit of it.

Kernels for float16 scale the weights by 2^13. Their log-sum-exp is then the difference of two numbers near 13 in powers of two,
each rounded by up to 2^-21: after a product with log(2) these are 11 * 2^-24 in all, which `lifted` holds.

With `tight`, a score's cotangent `ds = p g`, `g = z dp - delta + dlse`, errs in float32 by

    e(ds) = e(p) |ds| + p (1 + e(p)) e(g),   e(p) = unit + e(lse) + 8 * 2^-24, relative to p,
    e(g) = (8 + Hv / 8) 2^-24 (z sum |do| |v| + sum |do| sum z p |v| + |dlse|) + e(delta),
    e(delta) = sum |do| (half_unit |out| + floor + sum (unit + half_unit) z p |v|).

The last term of `e(delta)` is the rounding of the saved out, and of the weights that out was computed from. `ds` and `p` are
rounded before they are multiplied, by `half_unit ds + floor` and `half_unit p + floor`. So an entry of dq errs by the scale
times the sum over keys of `(e(ds) + half_unit |ds| + floor) |k|`, and an entry of dk likewise; an entry of dv errs by the sum
over queries of `((e(p) + half_unit) z p + floor) |do|`. In heads larger than 128, p is also rounded before it is multiplied
with g, which adds `half_unit |ds| + floor |g|`. `floor` is the largest number that float16 may lose below its smallest normal
number, 2^-25; in bfloat16 it is 2^-126, below which all numbers, p too, are flushed to 0. A sum of n products errs by n / 8 *
2^-24 of its absolute terms besides: tensor cores add 16 products at a time, and cut off bits below 2^-23.

A score's tangent `ds` is a sum of products as a score is, with the error `e(ds) = (8 + H / 8) 2^-24` times its absolute terms,
and its weight is `w = p ds`, with `e(w) = e(p) |w| + p e(ds)`. The tangent of lse errs by the sum of `e(w)`, and by `n / 4 *
2^-24` of the absolute terms, as each of four threads adds a quarter of them. `w` and `p` are rounded before they are multiplied
with the values and their tangents. The tangent of out errs by that, and by the errors of the tangent of lse and of the saved
out in their product.

If an implementation computes float32 products as three bfloat16 products, each errs by up to `THREE_PRODUCTS` of the sum of its
absolute terms. bfloat16 has 8 bits: for x in [1, 2) the high term misses at most 2^-8, which the low term holds, and the low
term misses at most 2^-17. The product of two low terms, 2^-16, is left out, and both low terms are rounded, 2^-17 each. With
`tight` this adds `THREE_PRODUCTS z sum |do| |v|` to `e(g)`. It adds `THREE_PRODUCTS / 4 |ds|` to `e(ds)`, as p may be two terms
when it is multiplied with g. A sum of n products errs by 3 n / 8 * 2^-24, as there are three times as many.
"""

from dataclasses import dataclass

import numpy as np

from jaxsoftmax._report.truth import EPS, TINY, Truth, half_unit, to64

THREE_PRODUCTS = 2.0**-15


@dataclass
class Weights:
    """Arrays from which all results are computed. Arrays as large as the scores are `[*batch, N, T, S]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    seen: np.ndarray
    scale: float
    slope: np.ndarray
    p: np.ndarray
    p_sink: np.ndarray
    z: np.ndarray
    unit: np.ndarray
    lse: np.ndarray
    lse_budget: np.ndarray
    groups: int
    product: float
    narrow: float
    floor: float


def seen_by(
    shape,
    mask,
    bias,
    *,
    is_causal=False,
    query_seq_lengths=None,
    key_value_seq_lengths=None,
    local_window_size=None,
    query_offset=None,
    query_segment_ids=None,
    key_value_segment_ids=None,
):
    """Returns whether each query sees each key, `[*batch, N, T, S]`. Arguments are those of `dot_product_attention`."""
    *batch, _, length, keys = shape
    seen = np.ones(shape, bool)
    rows, cols = np.arange(length)[:, None], np.arange(keys)[None, :]
    left, right = local_window_size if isinstance(local_window_size, tuple) else (local_window_size,) * 2
    at = rows if query_offset is None else rows + np.broadcast_to(query_offset, batch).reshape(*batch, 1, 1, 1)
    seen &= True if left is None else cols >= at - left
    seen &= True if right is None else cols <= at + right
    seen &= cols <= at if is_causal else True
    if mask is not None:
        seen &= np.asarray(mask)
    if bias is not None:
        seen &= to64(bias) != -np.inf
    if query_seq_lengths is not None:
        seen &= rows < np.asarray(query_seq_lengths).reshape(*batch, 1, 1, 1)
    if key_value_seq_lengths is not None:
        seen &= cols < np.asarray(key_value_seq_lengths).reshape(*batch, 1, 1, 1)
    if query_segment_ids is not None:
        of_keys = query_segment_ids if key_value_segment_ids is None else key_value_segment_ids
        seen &= (np.asarray(query_segment_ids)[..., :, None] == np.asarray(of_keys)[..., None, :])[..., None, :, :]
    return seen


def weights(
    query, key, value, bias=None, mask=None, *, scale=None, logits_soft_cap=None, sinks=None, kept=None, product=0.0, **seen_if
) -> Weights:
    """Computes the weights of all heads, from arguments of `dot_product_attention`; `seen_if` are arguments of `seen_by`.

    `kept` are the factors of dropout, `[*batch, N, T, S]`. `product` is the error of a product, as a share of its absolute
    terms.
    """
    narrow = half_unit(query.dtype) + product
    floor = 2.0**-25 if query.dtype == np.float16 else TINY
    lifted = 11 * EPS if query.dtype == np.float16 else 0.0
    groups = query.shape[-2] // key.shape[-2]
    q, k, v = (np.swapaxes(to64(a), -2, -3) for a in (query, key, value))
    k, v = (np.repeat(a, groups, -3) for a in (k, v))
    shape = (*q.shape[:-1], k.shape[-2])
    seen = seen_by(shape, mask, bias, **seen_if)
    k, v = (np.where(np.any(seen, -2)[..., None], a, 0.0) for a in (k, v))  # what nobody sees may hold NaN
    q = np.where(np.any(seen, -1)[..., None], q, 0.0)
    scale = 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    s, bend = scale * of_pairs(q, k), np.ones(shape)
    size = np.abs(scale) * of_pairs(np.abs(q), np.abs(k))
    if logits_soft_cap is not None:
        bent = np.tanh(s / logits_soft_cap)
        s, bend = logits_soft_cap * bent, 1 - bent**2
    missed = product * size * bend if product else 0.0
    if bias is not None:
        finite = np.where(to64(bias) == -np.inf, 0.0, to64(bias))
        s, size = s + finite, size + np.abs(finite)
    s = np.where(seen, s, -np.inf)
    sink = np.full((1, 1), -np.inf) if sinks is None else to64(sinks)[:, None]
    with np.errstate(all="ignore"):
        m = np.maximum(np.max(s, -1, initial=-np.inf), sink)
        lse = np.where(m == -np.inf, -np.inf, m + np.log(np.sum(np.exp(s - m[..., None]), -1) + np.exp(sink - m)))
        p = np.where(seen, np.exp(s - lse[..., None]), 0.0)
        p_sink = np.where(lse == -np.inf, 0.0, np.exp(sink - lse))
        unit = np.where(p > 0, (8 + 3 * np.abs(s - m[..., None]) + 8 * size) * EPS + missed, 0.0)
        budget = 8 * EPS * np.where(m == -np.inf, 0.0, np.abs(m) + np.abs(lse - m) + 1) + np.sum(p * unit, -1) + TINY
        budget += lifted
    unit = unit + np.where(p > 0, np.sum(p * unit, -1, keepdims=True), 0.0)
    z = np.ones(shape) if kept is None else kept
    return Weights(q, k, v, seen, scale, scale * bend, p, p_sink, z, unit, lse, budget, groups, product, narrow, floor)


def of_pairs(rows, cols):
    """Multiplies each row of `[..., T, H]` with each row of `[..., S, H]`."""
    return np.matmul(rows, np.swapaxes(cols, -1, -2))


def of_columns(scores, rows):
    """Sums rows of `[..., T, H]`, weighted by each column of `[..., T, S]`."""
    return np.matmul(np.swapaxes(scores, -1, -2), rows)


def attention(*args, **kwargs) -> tuple[Truth, Truth]:
    """Returns the truth of the output, `[*batch, T, N, Hv]`, and of lse, `[*batch, T, N]`."""
    w = weights(*args, **kwargs)
    terms = np.matmul((w.unit + w.narrow) * w.p * w.z, np.abs(w.v)) + TINY
    out = Truth(*(np.swapaxes(a, -2, -3) for a in (np.matmul(w.p * w.z, w.v), terms)))
    return out, Truth(np.swapaxes(w.lse, -1, -2), np.swapaxes(w.lse_budget, -1, -2))


def cotangents(dout, dlse, *args, tight=False, **kwargs) -> dict[str, Truth]:
    """Returns the cotangents of query, key, value, bias and sinks, from dout `[*batch, T, N, Hv]` and dlse `[*batch, T, N]`."""
    w = weights(*args, **kwargs)
    do, dl = np.swapaxes(to64(dout), -2, -3), np.swapaxes(to64(dlse), -1, -2)[..., None]
    rows_seen = np.any(w.seen, -1, keepdims=True)
    do = np.where(rows_seen, do, 0.0)
    dp = of_pairs(do, w.v)
    delta = np.sum(w.p * w.z * dp, -1, keepdims=True)
    g = w.z * dp - delta + dl
    ds = w.p * g
    dp_size = of_pairs(np.abs(do), np.abs(w.v))
    out_size = np.matmul(w.p * w.z, np.abs(w.v))
    delta_size = np.sum(out_size * np.abs(do), -1, keepdims=True)
    # The saved lse is rounded, and so is the saved out.
    lse_error = np.where(rows_seen, w.lse_budget[..., None], 0.0)
    delta_error = np.sum(np.matmul((w.unit + 2 * w.narrow) * w.p * w.z, np.abs(w.v)) * np.abs(do), -1)
    ds_size = w.p * (w.z * dp_size + delta_size + np.abs(dl))
    ds_error = (w.unit + lse_error + w.narrow + 8 * EPS) * ds_size + w.p * delta_error[..., None]
    p_error = (w.unit + lse_error + w.narrow + 8 * EPS) * w.p * w.z
    dx_size, dx_floor = ds_size, 0.0
    products_per_unit = 8 / 3 if w.product else 8  # three products for one
    if tight:
        out = np.abs(np.matmul(w.p * w.z, w.v))
        out_error = np.matmul((w.unit + w.narrow) * w.p * w.z, np.abs(w.v))
        delta_error = np.sum((out_error + w.narrow * out + w.floor) * np.abs(do), -1)
        g_size = w.z * dp_size + delta_size + np.abs(dl)
        g_error = (8 + w.v.shape[-1] / products_per_unit) * EPS * g_size + w.product * w.z * dp_size + delta_error[..., None]
        relative, floor = w.unit + lse_error + 8 * EPS, np.where(w.seen, w.floor, 0.0)
        is_wide = max(w.q.shape[-1], w.v.shape[-1]) > 128
        ds_error = relative * np.abs(ds) + w.p * (1 + relative) * g_error + np.where(w.seen, TINY, 0.0) * np.abs(g)
        ds_error += w.narrow * np.abs(ds) + floor * np.abs(g) if is_wide else w.product / 4 * np.abs(ds)
        p_error += floor * np.max(w.z, initial=1.0)
        dx_size, dx_floor = np.abs(ds), np.abs(w.scale) * floor * (1 + (np.abs(g) if is_wide else 0.0))

    def grouped(array):
        heads = array.shape[-3] // w.groups
        return array.reshape(*array.shape[:-3], heads, w.groups, *array.shape[-2:]).sum(-3)

    def heads_last(value, error):
        return Truth(np.swapaxes(value, -2, -3), np.swapaxes(error, -2, -3) + TINY)

    def of_keys(scores, rows, error):
        errors = of_columns(error + of_col * np.abs(scores), np.abs(rows))
        return heads_last(grouped(of_columns(scores, rows)), grouped(errors))

    dx, slope = w.slope * ds, np.abs(w.slope)
    dx_error = slope * ds_error
    if tight:
        dx_error += w.narrow * np.abs(dx) + dx_floor
    if kwargs.get("logits_soft_cap") is not None:  # 1 - tanh^2 cancels
        dx_error = dx_error + 16 * EPS * abs(w.scale) * dx_size + slope * dx_size * w.unit
    of_row, of_col = ((n / products_per_unit * EPS if tight else 0.0) for n in (ds.shape[-1], w.groups * ds.shape[-2]))
    results = {
        "query": heads_last(np.matmul(dx, w.k), np.matmul(dx_error + of_row * np.abs(dx), np.abs(w.k))),
        "key": of_keys(dx, w.q, dx_error),
        "value": of_keys(w.p * w.z, do, p_error),
    }
    bias = args[3] if len(args) > 3 else kwargs.get("bias")
    if bias is not None:
        of_bias = ds.size / max(1, bias.size) / 8 * EPS if tight else 0.0
        error = _summed_to(ds_error + of_bias * np.abs(ds), bias.shape)
        results["bias"] = Truth(_summed_to(ds, bias.shape), error + TINY)
    if kwargs.get("sinks") is not None:
        p_sink = w.p_sink[..., None]
        error = p_sink * ((lse_error + w.lse_budget[..., None] + 16 * EPS) * (delta_size + np.abs(dl)) + delta_error[..., None])
        axes = (*range(p_sink.ndim - 3), -2, -1)
        results["sinks"] = Truth(np.sum(p_sink * (dl - delta), axes), np.sum(error, axes) + TINY)
    return results


def tangents(moved, *args, **kwargs) -> tuple[Truth, Truth]:
    """Returns the tangents of the output, `[*batch, T, N, Hv]`, and of lse, `[*batch, T, N]`.

    Args:
      moved: tangents of query, key, value, bias and sinks by name; one that is absent is zero.
      *args: arguments of `weights`.
      **kwargs: arguments of `weights`.
    """
    w = weights(*args, **kwargs)

    def tangent_of(name, like):
        if name not in moved:
            return np.zeros_like(like)
        array = np.swapaxes(to64(moved[name]), -2, -3)
        return array if name == "query" else np.repeat(array, w.groups, -3)

    tq, tk, tv = (tangent_of(name, like) for name, like in (("query", w.q), ("key", w.k), ("value", w.v)))
    tb = to64(moved["bias"]) if "bias" in moved else 0.0
    ds = np.where(w.seen, w.slope * (of_pairs(tq, w.k) + of_pairs(w.q, tk)) + tb, 0.0)
    size = np.abs(w.slope) * (of_pairs(np.abs(tq), np.abs(w.k)) + of_pairs(np.abs(w.q), np.abs(tk))) + np.abs(tb)
    ds_error = ((8 + w.q.shape[-1] / 8) * EPS + w.unit) * size
    if kwargs.get("logits_soft_cap") is not None:  # 1 - tanh^2 cancels
        unbent = of_pairs(np.abs(tq), np.abs(w.k)) + of_pairs(np.abs(w.q), np.abs(tk))
        ds_error += 16 * EPS * np.abs(w.scale) * unbent
    rows_seen = np.any(w.seen, -1, keepdims=True)
    relative = w.unit + np.where(rows_seen, w.lse_budget[..., None], 0.0) + 8 * EPS
    weight, floor = w.p * ds, np.where(w.seen, w.floor, 0.0)
    weight_error = relative * np.abs(weight) + w.p * (1 + relative) * ds_error + TINY * np.abs(ds)
    keys = ds.shape[-1]
    dlse = np.sum(weight, -1, keepdims=True)
    dlse_error = np.sum(weight_error + keys / 4 * EPS * np.abs(weight), -1, keepdims=True)
    if "sinks" in moved:
        of_sink = w.p_sink[..., None] * to64(moved["sinks"])[:, None, None]
        dlse = dlse + of_sink
        dlse_error = dlse_error + np.abs(of_sink) * (np.where(np.isfinite(w.lse), w.lse_budget, 0.0)[..., None] + 16 * EPS)
    z, v, terms = w.z, np.abs(w.v), keys / 8 * EPS
    out, out_size = np.matmul(w.p * z, w.v), np.matmul(w.p * z, v)
    out_error = np.matmul((w.unit + w.narrow) * w.p * z, v) + w.narrow * np.abs(out) + w.floor
    dout = np.matmul(weight * z, w.v) + np.matmul(w.p * z, tv) - dlse * out
    error = np.matmul(z * (weight_error + (w.narrow + terms) * np.abs(weight) + floor), v)
    error += np.matmul(z * ((relative + w.narrow + terms) * w.p + floor), np.abs(tv))
    error += dlse_error * np.abs(out) + np.abs(dlse) * (out_error + 4 * EPS * out_size)
    dlse, dlse_error = dlse[..., 0], dlse_error[..., 0] + TINY
    return Truth(*(np.swapaxes(a, -2, -3) for a in (dout, error + TINY))), Truth(
        *(np.swapaxes(a, -1, -2) for a in (dlse, dlse_error))
    )


def _summed_to(array, shape):
    whole = (1,) * (array.ndim - len(shape)) + tuple(shape)
    axes = tuple(axis for axis, size in enumerate(whole) if size == 1)
    return np.sum(array, axes, keepdims=True).reshape(shape)
