"""Sums of the losses of rows of linear layers, computed together with their gradients.

- A sum of losses computes its gradients together with its value, part by part, and scales them when the cotangent is known.
  That takes as many matrix products as a loss with all logits in memory takes: three for a layer, and four in kernels for a
  weight that is not aligned.
- Losses of rows compute the logits once more for their gradients, which is a fourth product.

If the examples of a batch share the layers, a sum is that of the losses of rows, whose backward pass is one call: a gradient
that is computed before its cotangent is known would be as large as the weight for each example.
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core import sharding
from jaxsoftmax._core.rules import mapped, with_rules
from jaxsoftmax.ops.cross_entropy.linear_parts import Layer, Wanted
from jaxsoftmax.ops.cross_entropy.loss import Head


def weighted_sum(
    head: Head, layers: tuple[Layer, ...], rows: dict[str, jax.Array], factors: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes `sum(factors * losses)`, and the other results of rows; `factors` are `[rows]`."""
    operands, tree = jax.tree.flatten((layers, rows, factors))
    total, *others = _weighted_sum(*operands, head=head, tree=tree, batches=())
    return total, others


def _of_one(head, tree, *operands) -> list[jax.Array]:
    """Computes the results of one example from the leaves of `tree`."""
    layers, rows, factors = tree.unflatten(operands)
    losses, *others = head.of_rows(layers, rows)
    return [jnp.sum(factors * losses), *others]


def _batch(operands, axes, *, head, tree, batches) -> list[jax.Array]:
    """Adds up the losses of rows, whose gradients JAX computes, if the examples share the layers. Else the rules remain."""
    if all(layer.get(name) is None for layer in tree.unflatten(axes)[0] for name in ("weight", "bias")):
        return mapped(functools.partial(_of_one, head, tree), (*batches, axes))(*operands)
    return _weighted_sum(*operands, head=head, tree=tree, batches=(*batches, axes))


def _jvp(primals, tangents, *, head, tree, batches):
    moving = {at: t for at, t in enumerate(tangents) if t is not None}

    def of_one(primals, moved):
        (layers, rows, factors), of_all = tree.unflatten(primals), tree.unflatten(map(moved.get, range(len(primals))))
        return _with_tangents(head, layers, rows, factors, *of_all)

    return mapped(of_one, [(axes, {at: axes[at] for at in moving}) for axes in batches])(tuple(primals), moving)


@with_rules(batch=_batch, jvp=_jvp)
def _weighted_sum(*operands, head: Head, tree, batches) -> list[jax.Array]:
    """Computes the results of an example, or of a batch: `batches` has the axes of the operands in each, innermost first."""
    return mapped(functools.partial(_of_one, head, tree), batches)(*operands)


def _with_tangents(head, layers, rows, factors, t_layers, t_rows, t_factors):
    """Computes the results of one example and their tangents. A tangent that is None is zero."""
    t_layers, t_rows = [_present(layer) for layer in t_layers], _present(t_rows)
    wanted = Wanted(tuple(map(tuple, t_layers)), tuple(t_rows))
    (losses, *others), by_layers, by_rows = head.gradients_of_rows(layers, rows, factors, wanted)
    # The transpose of these products scales the gradients by the cotangent of the sum.
    moving = [*zip(by_layers, t_layers, strict=True), (by_rows, t_rows)]
    pairs = [(own[name], t) for own, ts in moving for name, t in ts.items()]
    pairs += [] if t_factors is None else [(losses, t_factors)]
    total = jnp.sum(factors * losses)
    moved = sum([jnp.sum(a.astype(total.dtype) * t.astype(total.dtype)) for a, t in pairs], start=jnp.zeros_like(total))
    t_others = _tangents_of_others(head, layers, rows, t_layers, t_rows) if others else []
    results = [total, *others]
    return results, sharding.varying_as([moved, *t_others], results)


def _present(tangents: Mapping[str, Any]) -> dict[str, jax.Array]:
    """Returns the tangents that are not zero."""
    return {name: t for name, t in tangents.items() if t is not None}


def _tangents_of_others(head, layers, rows, t_layers, t_rows) -> list[jax.Array]:
    """Computes the tangents of the results after the losses, by products of their own if anything depends on them."""

    def others(of_layers, of_rows_):
        whole = [layer | own for layer, own in zip(layers, of_layers, strict=True)]
        return head.of_rows(tuple(whole), rows | of_rows_)[1:]

    moving = [{name: layer[name] for name in t} for layer, t in zip(layers, t_layers, strict=True)]
    return jax.jvp(others, (moving, {name: rows[name] for name in t_rows}), (t_layers, t_rows))[1]
