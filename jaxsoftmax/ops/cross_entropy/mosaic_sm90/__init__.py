"""Cross-entropy on Hopper, for rows of any length: softmax's kernels (see `ops/softmax/mosaic`) with labels.

1. Forward, the state of each row is computed as for logsumexp, of capped scores if there is a cap. What belongs to a row, the
   label's logit among it, is left to XLA, which computes it together with what reads the loss.
2. Backward, each element gets `(a * p + b * onehot(label) + c) * ds/dx`. Blocks need nothing of each other.
3. Where the cotangents are known with the logits, rows are held as for softmax, and the gradient replaces them.

So the logits are read once forward, and read and written once backward, or read and written once in all; a mask is read as
bytes.
"""

import functools

import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.row_problem import RowProblem, is_along
from jaxsoftmax._gpu import fused
from jaxsoftmax._gpu.rows import run as rows
from jaxsoftmax._gpu.rows.layout import RowLayout
from jaxsoftmax._gpu.rows.run import Inside, Mask, PerRow, Whole
from jaxsoftmax._gpu.rows.tile import each
from jaxsoftmax.ops.cross_entropy import linear, xla
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import linear_loss
from jaxsoftmax.ops.softmax import mosaic_sm90 as of_softmax
from jaxsoftmax.ops.softmax.mosaic_sm90 import apply_mask, select

_LIKE = {  # softmax's kernels that are as large, and hold rows or not as these
    "cross_entropy": "logsumexp_forward",
    "cross_entropy_vjp": "logsumexp_vjp",
    "cross_entropy_gradient": "softmax_forward",
}


def unsupported(primitive, target, operands, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    if primitive == "linear_cross_entropy":
        return linear_loss.unsupported(target, operands, params["head"].class_axis)
    x, where, kernel, problem = operands["x"], operands.get("where"), _LIKE[primitive], _problem(primitive, operands, **params)
    dtypes = [x.dtype] if primitive == "cross_entropy_gradient" else [x.dtype, jnp.dtype(params["dtype"])]
    reason = of_softmax.unsupported_rows(target, kernel, dtypes, where, problem)
    if reason is None and _has_total(**params):
        config = of_softmax.config_of(target, kernel, problem)
        if (
            config.grid or RowLayout(problem.cols, config).is_read_twice
        ):  # blocks tell each other one state of a row, and no sum
            return f"the sum of the scores, for smoothing, is not computed of rows of {problem.cols} entries"
    return reason


def unprofitable(primitive, target, operands, fused, cast, **params) -> str | None:
    """Why the reference should be faster although the kernels could run, in words, or None."""
    if primitive == "linear_cross_entropy":
        return linear_loss.unprofitable(operands, params["head"].class_axis)
    problem = _problem(primitive, operands, **params)
    return of_softmax.unprofitable_rows(primitive, _LIKE[primitive], problem, fused, cast, params["dtype"])


def _has_total(*, return_total=False, label_smoothing=0, **params):
    del params
    return return_total or label_smoothing > 0


def _problem(primitive, operands, *, axes, dtype, soft_cap, **params) -> RowProblem:
    """The problem of a primitive, from operands of these types."""
    x = operands["x"]
    written = {"cross_entropy": [], "cross_entropy_vjp": [dtype], "cross_entropy_gradient": [x.dtype]}[primitive]
    return RowProblem(
        x.shape,
        tuple(axes),
        read=(x.dtype.itemsize,),
        written=tuple(jnp.dtype(dtype).itemsize for dtype in written),
        has_mask=is_along(operands.get("where"), axes),
        needs_end=soft_cap is not None or _has_total(**params),
    )


def cross_entropy(x, labels, where, *, axes, dtype, soft_cap, return_total, return_state, target):
    """`nll`, `lse`, the sum of the scores if asked for, and the state `(m, d)` if asked for."""

    def body(tile, x, inside, where):
        def score_or_0(step, scores):
            for seen in filter(None, (inside, where)):
                scores = select(seen(step), scores, 0)
            return scores

        scores = _scores(tile, x, inside, where, soft_cap)
        local, sums = tile.lift_and_sum(scores, score_or_0) if return_total else (tile.lift(scores), None)
        state = tile.merge(local)
        return [online.shift(state.m), state.d, *([tile.sum(sums)] if return_total else [])]

    problem = _problem(
        "cross_entropy", {"x": x, "where": where}, axes=axes, dtype=dtype, soft_cap=soft_cap, return_total=return_total
    )
    per_row = [jnp.float32] * (2 + return_total)
    m, d, *total = _run("cross_entropy", body, problem, target, x, where, per_row=per_row)
    chosen = xla.chosen_score(x, labels, axes, soft_cap, m.dtype)
    return xla.results_of(labels, m, d, chosen, *total, dtype=dtype, return_state=return_state)


def cross_entropy_vjp(x, m, d, a, b, c, labels, where, *, axes, dtype, soft_cap, target, replaces=False):
    """`(a * p + b * onehot(label) + c) * ds/dx`, in the memory of `x` if it `replaces` that."""

    def body(tile, x, m, d, a, b, c, labels, inside, where):
        weights = None
        if a is not None:
            scores = _scores(tile, x, inside, None, soft_cap)
            weights = of_softmax.weights_of_state(tile, scores, m, d, None, where, None, factor=a)
        return [_gradient(tile, x, weights, a, b, c, labels, where, soft_cap)]

    replaced = "x" if replaces and x.dtype == dtype else None
    if replaced:  # of a loop, see `cross_entropy_gradient`
        x, m, d, a, b, c, labels = lax.optimization_barrier((x, m, d, a, b, c, labels))
    given = {"m": m, "d": d, "a": a, "b": b, "c": c, "labels": labels}
    given = {name: None if array is None else PerRow(array) for name, array in given.items()}
    problem = _problem("cross_entropy_vjp", {"x": x, "where": where}, axes=axes, dtype=dtype, soft_cap=soft_cap)
    results = {"whole": [dtype], "replaced": replaced}
    (found,) = _run("cross_entropy_vjp", body, problem, target, x, where, given, **results)
    return lax.optimization_barrier(found) if replaced else found


def cross_entropy_gradient(x, labels, t, *, axes, dtype, soft_cap, label_smoothing, z_loss, target):
    """`t` times the derivative of the losses, `nll`, `lse` and with smoothing the sum of the scores."""

    def body(tile, x, t, labels, inside, where):
        scores = _scores(tile, x, inside, where, soft_cap)
        local = tile.lift(scores)
        m, d = tile.merge(local)[:2]
        of_row = xla.factors(t, online.shift(m) + jnp.log(d), label_smoothing, z_loss, classes)
        of_score, alike = tile.weights(local.m)
        factor = of_row["a"] * online.weights(local.m, m, axis=()) * alike / (d + (m - m))  # NaN where the maximum is infinite
        along = tile.along(factor)
        weights = each(lambda s: of_score(s) * along, scores)
        gradient = _gradient(tile, x, weights, **of_row, labels=labels, where=where, soft_cap=soft_cap)
        return [gradient, online.shift(m), d, *([tile.sum(apply_mask(inside, scores, 0))] if label_smoothing else [])]

    # The label's score is read before the gradient takes its place. In a loop XLA must not fuse the kernel with slices that it
    # reads or writes: it would forget that one operand is written in place.
    chosen = xla.chosen_score(x, labels, axes, soft_cap, jnp.float32)
    x, t, labels, chosen = lax.optimization_barrier((x, t, labels, chosen))
    classes, given = x.shape[axes[0]], {"t": PerRow(t), "labels": PerRow(labels)}
    options = {"axes": axes, "dtype": dtype, "soft_cap": soft_cap, "label_smoothing": label_smoothing}
    problem = _problem("cross_entropy_gradient", {"x": x}, **options)
    results = {"whole": [x.dtype], "per_row": [jnp.float32] * (2 + (label_smoothing > 0)), "replaced": "x"}
    found = _run("cross_entropy_gradient", body, problem, target, x, None, given, **results)
    gradient, m, d, *total = lax.optimization_barrier(found)
    return [gradient, *xla.results_of(labels, m, d, chosen, *total, dtype=dtype)]


def linear_cross_entropy(hidden, weight, labels, *, head, target):
    """`head.numbers`, without the logits."""
    return linear.of_batch(functools.partial(linear_loss.numbers, head, target), hidden, weight, labels)


def _run(primitive, body, problem, target, x, where, given=None, **results):
    operands = {"x": Whole(x, -jnp.inf, jnp.float32), **(given or {})}
    operands["inside"] = Inside() if problem.needs_end else None
    operands["where"] = None if where is None else Mask(where)
    config = of_softmax.config_of(target, _LIKE[primitive], problem)
    name = "cross_entropy_forward" if primitive == "cross_entropy" else primitive
    return rows.run(f"{name}_mosaic", body, operands, problem, config, **results)


def _scores(tile, x, inside, where, soft_cap):
    """The scores, and `-inf` where there are none; a cap is finite beyond the end, too."""
    if soft_cap is not None:
        layout = tile.memory.layout.layout
        x = apply_mask(inside, each(lambda x: fused.fused(_capped, (soft_cap,), [x], layout), x), -jnp.inf)
    return apply_mask(where, x, -jnp.inf)


def _gradient(tile, x, weights, a, b, c, labels, where, soft_cap):
    """`(a * p + b * onehot(label) + c) * ds/dx`, of `weights`, which are `a * p`; `a`, `b` and `c` may be None."""
    parts = []
    if a is not None:
        counts = tile.along(a) != 0
        parts.append(each(lambda weight: select(counts, weight, 0), weights))
    if c is not None:
        along_c = tile.along(c)
        parts.append(apply_mask(where, lambda step: along_c, 0))
    total = each(lambda *parts: functools.reduce(jnp.add, parts), *parts)
    if b is not None:
        total = tile.plus_at(total, labels, b)
    if soft_cap is None:
        return total
    layout = tile.memory.layout.layout
    return each(lambda total, x: fused.fused(_sloped, (soft_cap,), [total, x], layout), total, x)


def _capped(soft_cap, x):
    return soft_cap * fused.tanh(x / soft_cap)


def _sloped(soft_cap, total, x):
    bent = fused.tanh(x / soft_cap)
    return jnp.where(total != 0, total * (1 - bent * bent), 0)
