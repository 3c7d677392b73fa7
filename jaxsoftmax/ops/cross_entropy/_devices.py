"""Cross-entropy of rows that devices share: a vocabulary-parallel loss, as softmax's `_devices` for what it gets and returns.

Forward one collective brings the states of all parts of a row, and the score of its label from the device that has it.
Cotangents are numbers of rows, which every device has: backward there is none.
"""

import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy import primitive, xla
from jaxsoftmax.ops.softmax._devices import merged, mesh_axes, seen


def cross_entropy(run, x, labels, where, *, axes, dtype, soft_cap, return_total, return_state, over):
    kind = accumulator(x.dtype, dtype)
    given = {"x": x, "labels": jnp.full_like(labels, -1), "where": seen(x, where, over)}
    params = {"axes": axes, "dtype": kind, "soft_cap": soft_cap, "return_total": return_total}
    _, _, *total, m, d = run(primitive.CROSS_ENTROPY, given, return_state=True, **params)
    chosen = xla.chosen_score(x, _labels(labels, over), axes, soft_cap, kind, mesh_axes(over))
    m, d, chosen, *total = merged(m, d, chosen, *total, over=over)
    found = xla.losses_of(m, d, chosen, *total, dtype=dtype)
    return [*found, m, d] if return_state else found


def cross_entropy_jvp(run, labels, where, *, over, **given):
    del run
    where = seen(given["x"], where, over)
    return xla.cross_entropy_jvp(labels=_labels(labels, over), where=where, axis_name=mesh_axes(over), **given)


def cross_entropy_vjp(run, x, labels, where, *, over, axes, dtype, soft_cap, **of_rows):
    size = x.shape[axes[0]]
    own = _labels(labels, over) - lax.axis_index(mesh_axes(over)) * size
    own = jnp.where((own >= 0) & (own < size), own, -1)
    given = {"x": x, "labels": own, "where": seen(x, where, over), **of_rows}
    return run(primitive.CROSS_ENTROPY_VJP, given, axes=axes, dtype=dtype, soft_cap=soft_cap)


def cross_entropy_gradient(run, x, labels, t, *, over, **params):
    def forward(operands, **params):
        return cross_entropy(run, **operands, where=None, over=over, **params)

    def backward(operands, **params):
        return cross_entropy_vjp(run, **operands, where=None, over=over, **params)

    (cut,) = over.values()
    return xla.composed(forward, backward, {"x": x, "labels": labels, "t": t}, classes=cut.size, **params)


def _labels(labels, over):
    """The labels, and -1 for those that are no class: a shard may end in padding, which is none."""
    (cut,) = over.values()
    return jnp.where(labels < cut.size, labels, -1)
