"""Results of rows of linear layers, and gradients together with them, from the logits of a part of the rows at a time.

The gradient of a part's logits takes their place in memory. The gradient of the weight accumulates over the parts in place: on
GPUs XLA makes the addition a part of the product, without another array.

If devices share the classes (`head.axis_name`), each computes the logits of its own classes, and one collective merges the
terms of rows of a part. The results that devices return add up. The gradients of arrays that all devices have add up too, which
JAX does once, behind the last part.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy import parts
from jaxsoftmax.ops.cross_entropy.parts import by_parts, product

if TYPE_CHECKING:
    from jaxsoftmax.ops.cross_entropy.loss import Head

Layer = dict[str, jax.Array]  # `hidden` `[rows, H]`, `weight` with the classes along one axis, and `bias` `[classes]` or none


@dataclass(frozen=True)
class Wanted:
    """Names of the operands of each layer, and of rows, that derivatives are wanted of."""

    layers: tuple[tuple[str, ...], ...]
    rows: tuple[str, ...]


def results_of_parts(head: "Head", layers: Sequence[Layer], rows: dict[str, jax.Array]) -> list[jax.Array]:
    """Computes the results of rows, `[rows]` each.

    Args:
      head: the loss behind the layers.
      layers: one layer, or several whose logits have the same shape.
      rows: what else the head takes of rows, by name.
    """

    def part(sums, own):
        hidden = [own.pop(name) for name in _hidden(layers)]
        return sums, head.results(_logits(head, layers, hidden), own)

    # In reverse mode each part adds to the gradient of the weight, too.
    return by_parts(jax.checkpoint(part), _most(layers), _bytes_of_row(head, layers), _hidden(layers) | rows)[1]


def gradients_of_parts(
    head: "Head", layers: Sequence[Layer], rows: dict[str, jax.Array], factors: jax.Array, wanted: Wanted, **options: bool
) -> tuple[list[jax.Array], list[Layer], dict[str, jax.Array]]:
    """Computes the results, and the derivatives of `sum(factors * losses)` by the operands that are wanted.

    Args:
      head: the loss behind the layers.
      layers: as in `results_of_parts`.
      rows: what else the head takes of rows, by name.
      factors: `[rows]`.
      wanted: the operands that derivatives are wanted of.
      **options: those of `by_parts`.

    Returns:
      The results; the derivatives by the operands of each layer, by name; and those by operands of rows.
    """
    with_hidden = [at for at, names in enumerate(wanted.layers) if "hidden" in names]

    def part(sums, own):
        hidden, c = [own.pop(name) for name in _hidden(layers)], own.pop("factors")
        logits = _logits(head, layers, hidden)
        results, gradients, found = head.with_gradients(logits, own, c, wanted, hidden[0].dtype)
        more, of_hidden = {}, {}
        for at, (names, h, g) in enumerate(zip(wanted.layers, hidden, gradients, strict=True)):
            if g is None:
                continue
            weight = layers[at]["weight"]
            of_layer = gradients_of_layer(names, g.astype(h.dtype), h, weight, head.class_axes[at], weight.dtype)
            of_hidden |= {at: of_layer.pop("hidden")} if "hidden" in names else {}
            more |= {(at, name): each for name, each in of_layer.items()}
        sums = more if sums is None else {name: sums[name] + each for name, each in more.items()}
        return sums, [*results, *(of_hidden[at] for at in with_hidden), *(found[name] for name in wanted.rows)]

    of_all = _hidden(layers) | rows | {"factors": factors}
    sums, results = by_parts(jax.checkpoint(part), _most(layers), _bytes_of_row(head, layers, wanted.layers), of_all, **options)
    by_rows = {name: results.pop() for name in reversed(wanted.rows)}
    by_layers: list[Layer] = [{} for _ in layers]
    for at in reversed(with_hidden):
        by_layers[at]["hidden"] = results.pop()
    for (at, name), total in sums.items():
        by_layers[at][name] = total
    return results, by_layers, by_rows


def gradients_of_layer(names: Sequence[str], g, hidden, weight, class_axis: int, dtype) -> Layer:
    """Computes what `names` ask for from the gradient of the logits, `[rows, classes]`; that of the weight has this dtype."""
    found = {}
    if "weight" in names:
        found["weight"] = product(*((hidden, g) if class_axis == 1 else (g, hidden)), 0, 0, dtype)
    if "bias" in names:
        found["bias"] = jnp.sum(g, 0, dtype=accumulator(hidden.dtype))
    if "hidden" in names:
        found["hidden"] = product(g, weight.astype(hidden.dtype), 1, class_axis, hidden.dtype)
    return found


def _hidden(layers: Sequence[Layer]) -> dict[str, jax.Array]:
    """Returns the hidden states of layers by names of their own."""
    return {f"hidden {at}": layer["hidden"] for at, layer in enumerate(layers)}


def _logits(head: "Head", layers, hidden) -> list[jax.Array]:
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


def _bytes_of_row(head: "Head", layers, wanted: Sequence[Sequence[str]] | None = None) -> Any:
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
