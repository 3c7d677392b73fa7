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

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import bind
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.cross_entropy import primitive, xla
from jaxsoftmax.ops.cross_entropy.linear_gradient import LINEAR_CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.softmax.across_devices import is_zero, local_mask, merge_states, mesh_axes
from jaxsoftmax.ops.softmax.xla import tangent_of_sum


def cross_entropy(runner, x, labels, where, scale, *, axes, return_state=False, return_entropy=False, cuts, **params):
    """Computes the results of cross-entropy of rows that devices share."""
    own_labels, own_mask = local_labels(labels, x.shape[axes[0]], cuts), local_mask(x, where, cuts)
    terms = local_terms(runner, x, own_labels, own_mask, scale, axes=axes, return_entropy=return_entropy, **params)
    options = {"scale": scale, "return_entropy": return_entropy, "return_state": return_state}
    return merge_terms(terms, labels, params["dtype"], cuts, **options)


def cross_entropy_jvp(runner, x, labels, where, *, axes, cuts, **others):
    """Computes the tangents of rows that devices share, by the reference."""
    del runner
    operands = {"x": x, "labels": local_labels(labels, x.shape[axes[0]], cuts), "where": local_mask(x, where, cuts)}
    return list(lax.psum(jnp.stack(xla.cross_entropy_jvp(axes=axes, **operands, **others)), mesh_axes(cuts)))


def cross_entropy_vjp(runner, x, labels, where, *, axes, cuts, dtype, soft_cap, of_scores=False, replaces=False, **others):
    """Computes the gradient of this device's logits: the state holds the sums over whole rows."""
    operands = {"x": x, "labels": local_labels(labels, x.shape[axes[0]], cuts), "where": local_mask(x, where, cuts), **others}
    params = {"axes": axes, "dtype": dtype, "soft_cap": soft_cap, "of_scores": of_scores, "replaces": replaces}
    return runner(primitive.CROSS_ENTROPY_VJP, operands, **params)


def cross_entropy_gradient(runner, x, labels, t, scale=None, *, cuts, **params):
    """Computes the losses of rows that devices share, and the gradient of this device's logits: see `xla.composed`."""

    def forward(operands, **params):
        return cross_entropy(runner, **operands, where=None, cuts=cuts, **params)

    def backward(operands, **params):
        return cross_entropy_vjp(runner, **operands, where=None, cuts=cuts, replaces=True, **params)

    (cut,) = cuts.values()
    operands = {"x": x, "labels": labels, "t": t, "scale": scale}
    return xla.composed(forward, backward, operands, classes=cut.size, **params)


def linear_cross_entropy_gradient(runner, *, head, wrt, cuts, is_manual, knows_cuts, **operands):
    """Computes losses of rows and gradients: implementations merge over the mesh axes that the head names."""
    del cuts, is_manual, knows_cuts
    return runner(LINEAR_CROSS_ENTROPY_GRADIENT, operands, head=head, wrt=wrt)


def local_labels(labels, classes, cuts):
    """Returns the labels as this device counts its `classes` classes: `NO_CLASS` for those of other devices."""
    (cut,) = cuts.values()
    index = labels - lax.axis_index(cut.over) * classes
    is_local = (index >= 0) & (index < classes) & (labels < cut.size)
    return jnp.where(is_local, index, jnp.where(labels == xla.NO_ROW, xla.NO_ROW, xla.NO_CLASS))


def local_terms(runner, x, labels, where, scale=None, *, axes, dtype, soft_cap, return_total, return_entropy=False):
    """Computes the terms of this device's classes: `m`, `d`, the score of the label before a scale, and what is asked for.

    `labels` are `local_labels`. The score of a label of another device is 0. `return_total` asks for the sum of the scores, and
    `return_entropy` for `softmax.xla.sum_of_exponents`.
    """
    params = {"axes": axes, "dtype": accumulator(x.dtype, dtype), "soft_cap": soft_cap, "return_total": return_total}
    operands = {"x": x, "labels": labels, "where": where, "scale": scale}
    *_, m, d = results = runner(primitive.CROSS_ENTROPY, operands, return_state=True, return_entropy=return_entropy, **params)
    sums = results[2:-2]
    if return_entropy:
        sums[-1] = d * xla.mean_of(sums[-1], d)
    chosen = jnp.where(labels >= 0, xla.chosen_score(x, labels, axes, soft_cap, m.dtype), 0)
    return [m, d, chosen, *sums]


def merge_terms(terms, labels, dtype, cuts, scale=None, return_entropy=False, return_state=False):
    """Merges the `local_terms` of all devices to the results of `cross_entropy`. `labels` count the classes of all devices."""
    (cut,) = cuts.values()
    exponents = terms[-1] if return_entropy else None
    parts = terms[:-1] if return_entropy else terms
    # `d` alone carries derivatives, those of `scale` too: see `_lse_and_state` in `softmax/across_devices.py`.
    m, d, chosen, *sums = merge_states(*parts, cuts=cuts, scale=lax.stop_gradient(scale), exponents=exponents)
    chosen = jnp.where((labels >= 0) & (labels < cut.size), chosen, jnp.nan)
    options = {"dtype": dtype, "scale": scale, "return_entropy": return_entropy, "return_state": return_state}
    return xla.results_of(labels, m, d, chosen, *sums, **options)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def cross_entropy_of_parts(axis_name: tuple[str, ...], params: dict[str, Any], x, labels, where, scale) -> list[jax.Array]:
    """Computes the results of the primitive, with the state, of rows that devices share inside a `shard_map` of the user.

    All devices get the same results, and pass the same labels, which count the classes of all devices, and the same scale. The
    collectives stand beside the primitives, for the reason that `logsumexp_of_parts` gives. The logits are read and written as
    often as on one device.
    """
    runner = functools.partial(bind, implementation=params["implementation"])
    params = {name: value for name, value in params.items() if name != "implementation"}
    (axis,) = params["axes"]
    cuts = {axis: Cut.of_part(axis_name, x.shape[axis])}
    return cross_entropy(runner, x, labels, where, scale, return_state=True, cuts=cuts, **params)


@functools.partial(cross_entropy_of_parts.defjvp, symbolic_zeros=True)
def _jvp_of_parts(axis_name, params, primals, tangents):
    (x, labels, where, scale), (dx, _, _, dscale) = primals, tangents
    *results, m, d = cross_entropy_of_parts(axis_name, params, x, labels, where, scale)
    (axis,) = params["axes"]
    own_labels = local_labels(labels, x.shape[axis], {axis: Cut.of_part(axis_name, x.shape[axis])})
    of_scores = not is_zero(dscale)
    t = None if is_zero(dx) else dx
    t = xla.scores_tangent(x, scale, t, dscale, params["soft_cap"]) if of_scores else t
    operands = {"x": x, "m": m, "d": d, "t": t, "labels": own_labels, "where": where, "scale": scale}
    mean, chosen, *sums = bind(primitive.CROSS_ENTROPY_JVP, operands, of_scores=of_scores, **params)
    mean, chosen, *sums = lax.psum(jnp.stack([mean, chosen, *sums]), axis_name)
    if params.get("return_entropy", False):
        sums[-1] = xla.mean_of(results[-1], d) * mean - sums[-1]
    found = [mean - chosen, mean, *sums, jnp.zeros_like(m), tangent_of_sum(d, mean)]
    return [*results, m, d], sharding.varying_as(found, [*results, m, d])


RULES = {
    primitive.CROSS_ENTROPY: cross_entropy,
    primitive.CROSS_ENTROPY_JVP: cross_entropy_jvp,
    primitive.CROSS_ENTROPY_VJP: cross_entropy_vjp,
    primitive.CROSS_ENTROPY_GRADIENT: cross_entropy_gradient,
    LINEAR_CROSS_ENTROPY_GRADIENT: linear_cross_entropy_gradient,
}
