"""Cross-entropy for NVIDIA GPUs since Ampere, in Triton: softmax's kernel with labels (see `_triton/rows.py`).

It was run on an H200. For other generations it is compiled, and what it computes is tested in Triton's interpreter.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._triton import call
from jaxsoftmax.ops.cross_entropy import xla
from jaxsoftmax.ops.softmax import triton as of_softmax
from jaxsoftmax.ops.softmax.triton import of_rows, run


def unsupported(primitive, target, operands, *, axes, dtype, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    del params
    given = {"x": operands["x"], "where": operands.get("where")}
    return of_softmax.unsupported(primitive, target, given, axes=axes, dtype=dtype)


def unprofitable(primitive, target, operands, fused, cast, *, axes, dtype, **params) -> str | None:
    """Why the reference should be faster although the kernel could run, in words, or None."""
    del params
    return of_softmax.unprofitable(primitive, target, operands, fused, cast, axes=axes, dtype=dtype)


remark = call.remark


def cross_entropy(x, labels, where, *, axes, dtype, soft_cap, return_total, return_state, target):
    """`nll`, `lse`, the sum of the scores if asked for, and the state `(m, d)` if asked for."""
    results = [of_rows(x, axes, jnp.float32)] * (2 + return_total)
    m, d, *total = run("cross_entropy", axes, target, results, x, where=where, cap=soft_cap)
    chosen = xla.chosen_score(x, labels, axes, soft_cap, m.dtype)
    return xla.results_of(labels, m, d, chosen, *total, dtype=dtype, return_state=return_state)


def cross_entropy_vjp(x, m, d, a, b, c, labels, where, *, axes, dtype, soft_cap, target, replaces=False):
    """`(a * p + b * onehot(label) + c) * ds/dx`, in the memory of `x` if it `replaces` that."""
    zeros, replaces = jnp.zeros(labels.shape, jnp.float32), replaces and x.dtype == dtype
    a, b, c = (zeros if number is None else number for number in (a, b, c))
    if replaces:  # see `mosaic.py`
        x, m, d, a, b, c, labels = lax.optimization_barrier((x, m, d, a, b, c, labels))
    given = {"x": x, "m": m, "d": d, "a": a, "b": b, "c": c, "labels": labels, "where": where, "replaces": replaces}
    (found,) = run("cross_entropy_vjp", axes, target, [jax.ShapeDtypeStruct(x.shape, dtype)], cap=soft_cap, **given)
    return lax.optimization_barrier(found) if replaces else found


def cross_entropy_gradient(x, labels, t, *, axes, dtype, soft_cap, label_smoothing, z_loss, target):
    """`t` times the derivative of the losses, `nll`, `lse` and with smoothing the sum of the scores."""
    # The label's score is read before the gradient takes its place, see `mosaic.py`.
    chosen = xla.chosen_score(x, labels, axes, soft_cap, jnp.float32)
    x, t, labels, chosen = lax.optimization_barrier((x, t, labels, chosen))
    results = [jax.ShapeDtypeStruct(x.shape, x.dtype), *[of_rows(x, axes, jnp.float32)] * (2 + (label_smoothing > 0))]
    options = {"cap": soft_cap, "smoothing": label_smoothing, "z_loss": z_loss, "replaces": True}
    found = run("cross_entropy_gradient", axes, target, results, x, labels=labels, t=t, **options)
    gradient, *found = lax.optimization_barrier(tuple(found))
    m, d, *total = found
    return [gradient, *xla.results_of(labels, m, d, chosen, *total, dtype=dtype)]
