"""Losses of linear layers, computed for a part of the rows at a time, so that all logits are never in memory.

- A sum of losses computes its gradients together with its value, part by part, and scales them when the cotangent is known.
  That takes as many matrix products as a loss with all logits in memory takes: three for a layer.
- Losses of rows compute the logits once more for their gradients, which is a fourth product.

The gradient of a part's logits takes their place in memory. The gradient of the weight accumulates over the parts in place: on
GPUs XLA makes the addition a part of the product, without another array.

If devices share the classes (`head.axis_name`), each computes the logits of its own classes, and one collective merges the
terms of rows: of one part if gradients are computed, else of all rows. The results that devices return add up. The gradients of
arrays that all devices have add up too, which JAX does once, behind the last part.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy import parts
from jaxsoftmax.ops.cross_entropy.loss import Head, LossHead, Wanted
from jaxsoftmax.ops.cross_entropy.parts import by_parts, product, sizes
from jaxsoftmax.ops.softmax.across_devices import is_zero

Layer = dict[str, jax.Array]  # `hidden` `[rows, H]`, `weight` with the classes along one axis, and `bias` `[classes]` or none


def of_rows(head: Head, layers: tuple[Layer, ...], rows: dict[str, jax.Array]) -> list[jax.Array]:
    """Computes the results of rows, `[rows]` each: the losses, and what the head computes beside them.

    Args:
      head: the loss behind the layers.
      layers: one layer, or several whose logits have the same shape.
      rows: what else the head takes of rows, by name; labels count the classes of all devices.
    """
    if isinstance(head, LossHead):
        (layer,) = layers
        return head.of_rows(layer, rows)

    def part(sums, *arrays):
        hidden, of_rows = arrays[: len(layers)], _of_part(rows, arrays[len(layers) :])
        return sums, head.results(_logits(head, layers, hidden), of_rows)

    arrays = [*(layer["hidden"] for layer in layers), *rows.values()]
    # In reverse mode each part adds to the gradient of the weight, too.
    return by_parts(jax.checkpoint(part), _most(layers), _bytes_of_row(head, layers), arrays)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def weighted_sum(
    head: Head, layers: tuple[Layer, ...], rows: dict[str, jax.Array], factors: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """Computes `sum(factors * losses)`, and the other results of `of_rows`; `factors` are `[rows]`."""
    losses, *others = of_rows(head, layers, rows)
    return jnp.sum(factors * losses), others


@functools.partial(weighted_sum.defjvp, symbolic_zeros=True)
def _jvp(head, primals, tangents):
    layers, rows, factors = primals
    t_layers, t_rows = [_moving(layer) for layer in tangents[0]], _moving(tangents[1])
    wanted = Wanted(tuple(map(tuple, t_layers)), tuple(t_rows))
    if (
        head.axis_name
        and "scale" in rows
        and sizes(len(factors), _bytes_of_row(head, layers, wanted.layers), _most(layers))[1] > 1
    ):
        rows = rows | {"scale": _not_twice(rows["scale"])}
    (losses, *others), by_layers, by_rows = _with_gradients(head, layers, rows, factors, wanted)
    # The transpose of these products scales the gradients by the cotangent of the sum.
    moving = [*zip(by_layers, t_layers, strict=True), (by_rows, t_rows)]
    pairs = [(own[name], t) for own, ts in moving for name, t in ts.items()]
    pairs += [] if is_zero(tangents[2]) else [(losses, tangents[2])]
    total = jnp.sum(factors * losses)
    moved = sum([jnp.sum(a.astype(total.dtype) * t.astype(total.dtype)) for a, t in pairs], start=jnp.zeros_like(total))
    t_others = _tangents_of_others(head, layers, rows, t_layers, t_rows) if others else []
    return (total, others), (sharding.varying_as([moved], [total])[0], sharding.varying_as(t_others, others))


@jax.custom_jvp
def _not_twice(scale: jax.Array) -> jax.Array:
    """Returns the scale, and raises NotImplementedError if a derivative is differentiated by it.

    Tangents of the gradient by the scale are wrong if a `lax.scan` over parts computes the terms that devices merge. The cause
    is not known. Without a scan they are right, and so are tangents of tangents (JAX 0.11.2, also on one device).
    """
    return scale


@_not_twice.defjvp
def _no_second_derivative(primals, tangents):
    raise NotImplementedError(
        "gradients of a mean or sum are not differentiated by the temperature where devices share the classes and rows are"
        ' computed in several parts; take reduction="none"'
    )


def _moving(tangents: dict[str, Any]) -> dict[str, jax.Array]:
    """Returns the tangents that are not zero."""
    return {name: t for name, t in tangents.items() if not is_zero(t)}


def _tangents_of_others(head, layers, rows, t_layers, t_rows) -> list[jax.Array]:
    """Computes the tangents of the results after the losses, by products of their own if anything depends on them."""

    def others(of_layers, of_rows_):
        whole = [layer | own for layer, own in zip(layers, of_layers, strict=True)]
        return of_rows(head, tuple(whole), rows | of_rows_)[1:]

    moving = [{name: layer[name] for name in t} for layer, t in zip(layers, t_layers, strict=True)]
    return jax.jvp(others, (moving, {name: rows[name] for name in t_rows}), (t_layers, t_rows))[1]


def _with_gradients(
    head: Head, layers, rows, factors, wanted: Wanted
) -> tuple[list[jax.Array], list[Layer], dict[str, jax.Array]]:
    """Computes the results, and the derivatives of `sum(factors * losses)` by the operands that are wanted.

    Returns:
      The results; the derivatives by the operands of each layer, by name; and those by operands of rows.
    """
    with_hidden = [at for at, names in enumerate(wanted.layers) if "hidden" in names]

    def part(sums, *arrays):
        hidden, of_rows, c = arrays[: len(layers)], _of_part(rows, arrays[len(layers) : -1]), arrays[-1]
        logits = _logits(head, layers, hidden)
        results, gradients, found = head.with_gradients(logits, of_rows, c, wanted, hidden[0].dtype)
        more, of_hidden = {}, {}
        for at, (names, h, g) in enumerate(zip(wanted.layers, hidden, gradients, strict=True)):
            if g is None:
                continue
            weight, axis, g = layers[at]["weight"], head.class_axes[at], g.astype(h.dtype)
            if "weight" in names:
                more[at, "weight"] = product(*((h, g) if axis == 1 else (g, h)), 0, 0, weight.dtype)
            if "bias" in names:
                more[at, "bias"] = jnp.sum(g, 0, dtype=c.dtype)
            if "hidden" in names:
                of_hidden[at] = product(g, weight.astype(h.dtype), 1, axis, h.dtype)
        sums = more if sums is None else {name: sums[name] + each for name, each in more.items()}
        return sums, [*results, *(of_hidden[at] for at in with_hidden), *(found[name] for name in wanted.rows)]

    arrays = [*(layer["hidden"] for layer in layers), *rows.values(), factors]
    sums, results = by_parts(jax.checkpoint(part), _most(layers), _bytes_of_row(head, layers, wanted.layers), arrays)
    by_rows = {name: results.pop() for name in reversed(wanted.rows)}
    by_layers: list[Layer] = [{} for _ in layers]
    for at in reversed(with_hidden):
        by_layers[at]["hidden"] = results.pop()
    for (at, name), total in sums.items():
        by_layers[at][name] = total
    return results, by_layers, by_rows


def _of_part(names, arrays) -> dict[str, jax.Array]:
    """Returns what belongs to the rows of a part by name."""
    rows = dict(zip(names, arrays, strict=True))
    if "scale" in rows:  # 0 in rows that fill up the part, where a bias of -inf would become NaN
        rows["scale"] = jnp.where(rows["scale"] == 0, 1, rows["scale"])
    return rows


def _logits(head: Head, layers, hidden) -> list[jax.Array]:
    """Computes logits, rounded once: with a bias the products have the dtype of the arithmetic until it is added."""
    found = []
    for layer, h, axis in zip(layers, hidden, head.class_axes, strict=True):
        bias, dtype = layer.get("bias"), jnp.dtype(head.logits_dtype or h.dtype)
        wide = dtype if bias is None else accumulator(h.dtype)
        x = product(h, layer["weight"].astype(h.dtype), 1, 1 - axis, wide)
        found.append(x if bias is None else (x + bias.astype(wide)[None]).astype(dtype))
    return found


def _most(layers) -> int:
    """Returns the bytes of the logits of a part. Two layers with float32 logits would have few rows in one layer's bytes."""
    return parts.MOST_WITH_GRADIENT * len(layers)


def _bytes_of_row(head: Head, layers, wanted: Sequence[Sequence[str]] | None = None) -> Any:
    """Returns the bytes that the logits of a row take, with the gradients of those that are wanted.

    The number is symbolic if the number of classes is.
    """
    total = 0
    for at, (layer, axis) in enumerate(zip(layers, head.class_axes, strict=True)):
        dtype = layer["hidden"].dtype
        of_sums = accumulator(dtype).itemsize if "bias" in layer else 0
        has_gradient = wanted is not None and len(wanted[at]) > 0
        total += layer["weight"].shape[axis] * (head.bytes_of_logit(dtype, has_gradient=has_gradient) + of_sums)
    return total
