"""Cross-entropy of rows that devices share: a vocabulary-parallel loss. `ops/softmax/across_devices` says what it gets.

Forward one collective brings the states of all parts of a row, and the score of its label from the device that has it.
Cotangents are numbers of rows, which every device has: backward there is none.
"""

import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy import primitive, xla
from jaxsoftmax.ops.softmax.across_devices import merged, mesh_axes, seen


def cross_entropy(run, x, labels, where, *, axes, return_state, over, **params):
    here = part(run, x, _own(x, labels, axes, over), seen(x, where, over), axes=axes, **params)
    return joined(here, labels, params["dtype"], over, return_state)


def cross_entropy_jvp(run, x, labels, where, *, axes, over, **given):
    del run
    given |= {"x": x, "labels": _own(x, labels, axes, over), "where": seen(x, where, over)}
    return list(lax.psum(jnp.stack(xla.cross_entropy_jvp(axes=axes, **given)), mesh_axes(over)))


def cross_entropy_vjp(run, x, labels, where, *, axes, over, dtype, soft_cap, replaces=False, **of_rows):
    given = {"x": x, "labels": _own(x, labels, axes, over), "where": seen(x, where, over), **of_rows}
    return run(primitive.CROSS_ENTROPY_VJP, given, axes=axes, dtype=dtype, soft_cap=soft_cap, replaces=replaces)


def cross_entropy_gradient(run, x, labels, t, *, over, **params):
    def forward(operands, **params):
        return cross_entropy(run, **operands, where=None, over=over, **params)

    def backward(operands, **params):
        return cross_entropy_vjp(run, **operands, where=None, over=over, replaces=True, **params)

    (cut,) = over.values()
    return xla.composed(forward, backward, {"x": x, "labels": labels, "t": t}, classes=cut.size, **params)


def part(run, x, labels, where, *, axes, dtype, soft_cap, return_total):
    """Of this device's part of the rows `m`, `d`, the scores of its `own` labels, 0 for others, and the sum if asked for."""
    params = {"axes": axes, "dtype": accumulator(x.dtype, dtype), "soft_cap": soft_cap, "return_total": return_total}
    _, _, *total, m, d = run(primitive.CROSS_ENTROPY, {"x": x, "labels": labels, "where": where}, return_state=True, **params)
    chosen = jnp.where(labels >= 0, xla.chosen_score(x, labels, axes, soft_cap, m.dtype), 0)
    return [m, d, chosen, *total]


def joined(parts, labels, dtype, over, return_state=False):
    """Merges the results of `part` on each device into those of whole rows."""
    (cut,) = over.values()
    m, d, chosen, *total = merged(*parts, over=over)
    chosen = jnp.where((labels >= 0) & (labels < cut.size), chosen, jnp.nan)
    return xla.results_of(labels, m, d, chosen, *total, dtype=dtype, return_state=return_state)


def _own(x, labels, axes, over):
    (cut,), (axis,) = over.values(), axes
    return own(labels, x.shape[axis], cut)


def own(labels, size, cut):
    """The labels as this device counts its `size` classes. Those of other devices are no class."""
    place = labels - lax.axis_index(cut.over) * size
    is_here = (place >= 0) & (place < size) & (labels < cut.size)
    return jnp.where(is_here, place, jnp.where(labels == xla.NO_ROW, xla.NO_ROW, xla.NO_CLASS))


# The rules by the names of the operations.
_ALL = (
    cross_entropy,
    cross_entropy_jvp,
    cross_entropy_vjp,
    cross_entropy_gradient,
)
RULES = {rule.__name__: rule for rule in _ALL}
