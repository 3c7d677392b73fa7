"""Cross-entropy of rows that devices share: a vocabulary-parallel loss.

Forward one collective merges the states of all parts of a row, and brings the score of its label from the device that has it.
A cotangent is one number for each row, which every device has, so that the backward pass needs no collective.

The rules for primitives take the same arguments as those of `ops/softmax/across_devices.py`. `cross_entropy_of_parts` is for
calls inside a `shard_map` of the user.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.cross_entropy import primitive, xla
from jaxsoftmax.ops.softmax.across_devices import local_mask, merge_states, mesh_axes


def cross_entropy(runner, x, labels, where, *, axes, return_state, cuts, **params):
    """Computes the results of cross-entropy of rows that devices share."""
    own_labels = local_labels(labels, x.shape[axes[0]], cuts)
    terms = local_terms(runner, x, own_labels, local_mask(x, where, cuts), axes=axes, **params)
    return merge_terms(terms, labels, params["dtype"], cuts, return_state)


def cross_entropy_jvp(runner, x, labels, where, *, axes, cuts, **others):
    """Computes the tangents of rows that devices share, by the reference."""
    del runner
    operands = {"x": x, "labels": local_labels(labels, x.shape[axes[0]], cuts), "where": local_mask(x, where, cuts)}
    return list(lax.psum(jnp.stack(xla.cross_entropy_jvp(axes=axes, **operands, **others)), mesh_axes(cuts)))


def cross_entropy_vjp(runner, x, labels, where, *, axes, cuts, dtype, soft_cap, replaces=False, **of_rows):
    """Computes the gradient of this device's logits: the state holds the sums over whole rows."""
    operands = {"x": x, "labels": local_labels(labels, x.shape[axes[0]], cuts), "where": local_mask(x, where, cuts), **of_rows}
    return runner(primitive.CROSS_ENTROPY_VJP, operands, axes=axes, dtype=dtype, soft_cap=soft_cap, replaces=replaces)


def cross_entropy_gradient(runner, x, labels, t, *, cuts, **params):
    """Computes the losses of rows that devices share, and the gradient of this device's logits."""

    def forward(operands, **params):
        return cross_entropy(runner, **operands, where=None, cuts=cuts, **params)

    def backward(operands, **params):
        return cross_entropy_vjp(runner, **operands, where=None, cuts=cuts, replaces=True, **params)

    (cut,) = cuts.values()
    return xla.composed(forward, backward, {"x": x, "labels": labels, "t": t}, classes=cut.size, **params)


def local_labels(labels, classes, cuts):
    """Returns the labels as this device counts its `classes` classes: `NO_CLASS` for those of other devices."""
    (cut,) = cuts.values()
    index = labels - lax.axis_index(cut.over) * classes
    is_local = (index >= 0) & (index < classes) & (labels < cut.size)
    return jnp.where(is_local, index, jnp.where(labels == xla.NO_ROW, xla.NO_ROW, xla.NO_CLASS))


def local_terms(runner, x, labels, where, *, axes, dtype, soft_cap, return_total):
    """Computes `m`, `d`, the score of the label and with `return_total` the sum of the scores, of this device's classes.

    `labels` are `local_labels`. The score of a label of another device is 0.
    """
    params = {"axes": axes, "dtype": accumulator(x.dtype, dtype), "soft_cap": soft_cap, "return_total": return_total}
    _, _, *total, m, d = runner(
        primitive.CROSS_ENTROPY, {"x": x, "labels": labels, "where": where}, return_state=True, **params
    )
    chosen = jnp.where(labels >= 0, xla.chosen_score(x, labels, axes, soft_cap, m.dtype), 0)
    return [m, d, chosen, *total]


def merge_terms(terms, labels, dtype, cuts, return_state=False):
    """Merges the `local_terms` of all devices to the results of `cross_entropy`. `labels` count the classes of all devices."""
    (cut,) = cuts.values()
    m, d, chosen, *total = merge_states(*terms, cuts=cuts)
    chosen = jnp.where((labels >= 0) & (labels < cut.size), chosen, jnp.nan)
    return xla.results_of(labels, m, d, chosen, *total, dtype=dtype, return_state=return_state)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def cross_entropy_of_parts(axis_name: tuple[str, ...], params: dict[str, Any], x, labels, where) -> list[jax.Array]:
    """Computes the results of the primitive, with the state, of rows that devices share inside a `shard_map` of the user.

    All devices get the same results, and pass the same labels, which count the classes of all devices. The collectives stand
    beside the primitives, for the reason that `logsumexp_of_parts` gives. The logits are read and written as often as on one
    device.
    """
    runner = functools.partial(bind, implementation=params["implementation"])
    params = {name: value for name, value in params.items() if name != "implementation"}
    (axis,) = params["axes"]
    cuts = {axis: Cut.of_part(axis_name, x.shape[axis])}
    return cross_entropy(runner, x, labels, where, return_state=True, cuts=cuts, **params)


@cross_entropy_of_parts.defjvp
def _jvp_of_parts(axis_name, params, primals, tangents):
    (x, labels, where), (t, *_) = primals, tangents
    *results, m, d = cross_entropy_of_parts(axis_name, params, x, labels, where)
    (axis,) = params["axes"]
    own_labels = local_labels(labels, x.shape[axis], {axis: Cut.of_part(axis_name, x.shape[axis])})
    operands = {"x": x, "m": m, "d": d, "t": t, "labels": own_labels, "where": where}
    mean, chosen, *total = lax.psum(jnp.stack(bind(primitive.CROSS_ENTROPY_JVP, operands, **params)), axis_name)
    return [*results, m, d], [mean - chosen, mean, *total, jnp.zeros_like(m), xla.tangent_of_sum(d, mean)]


RULES = {
    primitive.CROSS_ENTROPY: cross_entropy,
    primitive.CROSS_ENTROPY_JVP: cross_entropy_jvp,
    primitive.CROSS_ENTROPY_VJP: cross_entropy_vjp,
    primitive.CROSS_ENTROPY_GRADIENT: cross_entropy_gradient,
}
