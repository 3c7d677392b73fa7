"""Sums of the losses of rows of linear layers, computed together with their gradients.

- A sum of losses computes its gradients together with its value, part by part, and scales them when the cotangent is known.
  That takes as many matrix products as a loss with all logits in memory takes: three for a layer, and four in kernels for a
  weight that is not aligned.
- Losses of rows compute the logits once more for their gradients, which is a fourth product.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core import sharding
from jaxsoftmax.ops.cross_entropy.linear_parts import Layer, Wanted
from jaxsoftmax.ops.cross_entropy.loss import Head
from jaxsoftmax.ops.softmax.across_devices import is_zero


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_sum(
    head: Head, layers: tuple[Layer, ...], rows: dict[str, jax.Array], factors: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes `sum(factors * losses)`, and the other results of rows; `factors` are `[rows]`."""
    losses, *others = head.of_rows(layers, rows)
    return jnp.sum(factors * losses), others


@functools.partial(weighted_sum.defjvp, symbolic_zeros=True)
def _jvp(head, primals, tangents):
    layers, rows, factors = primals
    t_layers, t_rows = [_moving(layer) for layer in tangents[0]], _moving(tangents[1])
    wanted = Wanted(tuple(map(tuple, t_layers)), tuple(t_rows))
    (losses, *others), by_layers, by_rows = head.gradients_of_rows(layers, rows, factors, wanted)
    # The transpose of these products scales the gradients by the cotangent of the sum.
    moving = [*zip(by_layers, t_layers, strict=True), (by_rows, t_rows)]
    pairs = [(own[name], t) for own, ts in moving for name, t in ts.items()]
    pairs += [] if is_zero(tangents[2]) else [(losses, tangents[2])]
    total = jnp.sum(factors * losses)
    moved = sum([jnp.sum(a.astype(total.dtype) * t.astype(total.dtype)) for a, t in pairs], start=jnp.zeros_like(total))
    t_others = _tangents_of_others(head, layers, rows, t_layers, t_rows) if others else []
    return (total, others), (sharding.varying_as([moved], [total])[0], sharding.varying_as(t_others, others))


def _moving(tangents: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns the tangents that are not zero."""
    return {name: t for name, t in tangents.items() if not is_zero(t)}


def _tangents_of_others(head, layers, rows, t_layers, t_rows) -> list[jax.Array]:
    """Computes the tangents of the results after the losses, by products of their own if anything depends on them."""

    def others(of_layers, of_rows_):
        whole = [layer | own for layer, own in zip(layers, of_layers, strict=True)]
        return head.of_rows(tuple(whole), rows | of_rows_)[1:]

    moving = [{name: layer[name] for name in t} for layer, t in zip(layers, t_layers, strict=True)]
    return jax.jvp(others, (moving, {name: rows[name] for name in t_rows}), (t_layers, t_rows))[1]
