"""Results of rows of linear layers, and gradients together with them, from the logits of a part of the rows at a time.

The gradient of a part's logits takes their place in memory. The gradient of the weight accumulates over the parts in place: on
GPUs XLA makes the addition a part of the product, without another array. Reverse mode of the results of rows computes gradients
in the same way, from the cotangents: see `_pullback`.

If devices share the classes (`head.axis_name`), each computes the logits of its own classes, and one collective merges the
terms of rows of a part. The results that devices return add up. The gradients of arrays that all devices have add up too, which
JAX does once, behind the last part.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.primitive import summed_to
from jaxsoftmax._core.pullback import with_pullback
from jaxsoftmax._core.rules import with_rules
from jaxsoftmax.ops.cross_entropy import parts
from jaxsoftmax.ops.cross_entropy.parts import by_parts, product

if TYPE_CHECKING:
    from jaxsoftmax.ops.cross_entropy.loss import Head

Factors = Sequence[jax.Array | None]
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
    operands = {f"{name} {at}": array for at, layer in enumerate(layers) for name, array in layer.items()} | rows

    def function(operands):
        return _results_of_rows(*operands.values(), head=head, names=tuple(operands), n=0, most=_most(layers))

    return with_pullback(functools.partial(_pullback, head), function, operands)


def _batch(arrays, axes, *, n, **params) -> list[jax.Array]:
    """Adds an axis in front, of size 1 where examples share an operand."""
    size = next(array.shape[0] for array, axis in zip(arrays, axes, strict=True) if axis is not None)
    arrays = [jnp.expand_dims(array, 0) if axis is None else array for array, axis in zip(arrays, axes, strict=True)]
    results = _results_of_rows(*arrays, n=n + 1, **params)
    return [jnp.broadcast_to(result, (size, *result.shape[1:])) for result in results]


@with_rules(batch=_batch)
def _results_of_rows(*arrays, head: "Head", names: tuple[str, ...], n: int, most: int) -> list[jax.Array]:
    """Computes the results of rows, with `n` axes of a batch in front. JAX differentiates this for tangents, and theirs."""
    return _results_of_batch(dict(zip(names, arrays, strict=True)), head=head, n=n, most=most)


@functools.partial(jax.jit, static_argnames=("head", "n", "most"))
def _results_of_batch(operands, *, head: "Head", n: int, most: int) -> list[jax.Array]:
    """Computes the results for the rows of all examples of a batch together, if they share the layers: see `_pullback`."""
    if not _is_one_call(operands, n):
        examples = jnp.broadcast_shapes(*(array.shape[:n] for array in operands.values()))
        at, axes = _axis_to_map(examples, operands, {})
        of_one = functools.partial(_results_of_batch, head=head, n=n - 1, most=most)
        return jax.vmap(of_one, (axes,), at)(_of_example(operands, at, axes))
    layers, rows = _split(head, _of_one_layer(operands, n))

    def part(sums, own):
        own = _of_each(own, n)
        hidden, results_of = [own.pop(name) for name in _hidden(layers)], head.results
        for _ in range(n):
            results_of = jax.vmap(results_of)
        return sums, results_of(_logits(head, layers, hidden), own)

    return by_parts(jax.checkpoint(part), most, _bytes_of_row(head, layers), _hidden(layers) | rows, axis=n)[1]


def _split(head: "Head", named: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Returns what belongs to each layer, whose names end in its number, and what belongs to rows."""
    ends = [f" {at}" for at in range(len(head.class_axes))]
    layers = [{name.removesuffix(end): each for name, each in named.items() if name.endswith(end)} for end in ends]
    return layers, {name: each for name, each in named.items() if not name.endswith(tuple(ends))}


def _pullback(head: "Head", operands, cotangents, types) -> dict[str, jax.Array]:
    """Computes the cotangents of operands from those of the results, by the products that a sum of losses takes.

    JAX's transpose would multiply the gradient of logits as it is. If logits are float32, XLA would make whole copies of the
    weights and of their gradients in float32, and multiply those, at half the speed of 16 bits or less.

    If the examples of a batch share the layers, a part has rows of all of them, and the product for the gradient of the weight
    adds up over them: the gradient of an example would be as large as the weight.
    """
    first = next(cotangent for cotangent in cotangents if cotangent is not None)
    n = first.ndim - 1
    if _is_one_call(operands, n) and _shares_layers(types, n):
        found = _pullback_of_rows(head, operands, cotangents, types, n)
    else:
        at, axes = _axis_to_map(first.shape[:n], operands, types)
        operands = _of_example(operands, at, axes)
        shapes = {name: kind.shape[:at] + kind.shape[at + 1 :] for name, kind in types.items()}
        of_one = {name: jax.ShapeDtypeStruct(shapes[name], kind.dtype) for name, kind in types.items()}
        found = jax.vmap(functools.partial(_pullback, head, types=of_one), (axes, at), at)(operands, cotangents)
    return {name: summed_to(found[name], kind.shape).astype(kind.dtype) for name, kind in types.items()}


def _pullback_of_rows(head: "Head", operands, cotangents, types, n: int) -> dict[str, jax.Array]:
    """Computes the cotangents of operands for the rows of a batch of `n` axes, whose examples share the layers."""
    layers, rows = _split(head, _of_one_layer(operands, n))
    of_layers, of_rows = _split(head, types)
    wanted = Wanted(tuple(map(tuple, of_layers)), tuple(of_rows))
    _, by_layers, found = gradients_of_parts(head, layers, rows, cotangents, wanted)
    found |= {f"{name} {at}": array for at, layer in enumerate(by_layers) for name, array in layer.items()}
    return {name: array.reshape((1,) * n + array.shape) if _is_of_classes(name) else array for name, array in found.items()}


def _is_of_classes(name: str) -> bool:
    return name.startswith(("weight ", "bias "))


def _is_one_call(operands: Mapping[str, Any], n: int) -> bool:
    """Tells whether the rows of all examples of a batch of `n` axes are those of one call: if they share the layers.

    The exception is a batch that explicit mesh axes may shard, since the zeros that `by_parts` starts with are whole on every
    device.
    """
    has_explicit_axes = any(sharding.has_explicit_axes(jax.typeof(array)) for array in operands.values())
    return n == 0 or (_shares_layers(operands, n) and not has_explicit_axes)


def _shares_layers(operands: Mapping[str, Any], n: int) -> bool:
    return all(math.prod(array.shape[:n]) == 1 for name, array in operands.items() if _is_of_classes(name))


def _axis_to_map(examples: tuple[int, ...], operands: Mapping[str, Any], types) -> tuple[int, dict[str, int | None]]:
    """Chooses an axis of a batch, and tells which operands have it: one whose examples have layers, if there is any."""
    layers = [each[name] for each in (operands, types) for name in each if _is_of_classes(name)]
    at = next((at for at in range(len(examples)) if any(array.shape[at] != 1 for array in layers)), 0)
    return at, {name: at if examples[at] == 1 or array.shape[at] != 1 else None for name, array in operands.items()}


def _of_example(operands: Mapping[str, jax.Array], at: int, axes: Mapping[str, int | None]) -> dict[str, jax.Array]:
    """Returns the operands without the axis of a batch where examples share them."""
    return {name: jnp.squeeze(array, at) if axes[name] is None else array for name, array in operands.items()}


def _of_one_layer(operands: Mapping[str, jax.Array], n: int) -> dict[str, jax.Array]:
    """Returns the operands with layers without the `n` axes of a batch that shares them."""
    return {name: array.reshape(array.shape[n:]) if _is_of_classes(name) else array for name, array in operands.items()}


def _of_each(rows: Mapping[str, jax.Array], n: int) -> dict[str, jax.Array]:
    """Returns the arrays of a part, written out for each example of `n` axes: those of all rows would take more memory."""
    examples = jnp.broadcast_shapes(*(array.shape[:n] for array in rows.values()))
    return {name: jnp.broadcast_to(array, (*examples, *array.shape[n:])) for name, array in rows.items()}


def gradients_of_parts(
    head: "Head", layers: Sequence[Layer], rows: dict[str, jax.Array], factors: Factors, wanted: Wanted, **options: bool
) -> tuple[list[jax.Array], list[Layer], dict[str, jax.Array]]:
    """Computes the results, and derivatives of the sum of `factor * result` over rows and results, by what is wanted.

    Arrays of rows may have axes in front, of examples that share the layers; of size 1 if examples share the array.

    Args:
      head: the loss behind the layers.
      layers: as in `results_of_parts`.
      rows: what else the head takes of rows, by name.
      factors: one for each result, `[rows]`, or None for 0. Results behind the last factor have none.
      wanted: the operands that derivatives are wanted of.
      **options: those of `by_parts`.

    Returns:
      The results; the derivatives by the operands of each layer, by name; and those by operands of rows.
    """
    params = {"head": head, "wanted": wanted, "most": _most(layers), "options": tuple(options.items())}
    return _gradients_of_parts(tuple(layers), rows, tuple(factors), **params)


@functools.partial(jax.jit, static_argnames=("head", "wanted", "most", "options"))  # an eager call compiles its loop once
def _gradients_of_parts(layers, rows, factors, *, head: "Head", wanted: Wanted, most: int, options):
    with_hidden = [at for at, names in enumerate(wanted.layers) if "hidden" in names]
    n = next(each.ndim for each in factors if each is not None) - 1

    def part(sums, own):
        own = _of_each(own, n)
        hidden = [own.pop(name) for name in _hidden(layers)]
        of_results = [own.pop(f"factors {at}", None) for at in range(len(factors))]
        with_gradients = functools.partial(head.with_gradients, wanted=wanted, dtype=hidden[0].dtype)
        for _ in range(n):
            with_gradients = jax.vmap(with_gradients)
        results, gradients, found = with_gradients(_logits(head, layers, hidden), own, of_results)
        more, of_hidden = {}, {}
        for at, (names, h, g) in enumerate(zip(wanted.layers, hidden, gradients, strict=True)):
            if g is None:
                continue
            weight = layers[at]["weight"]
            of_layer = gradients_of_layer(head, at, names, g.astype(h.dtype), h, weight, weight.dtype)
            of_hidden |= {at: of_layer.pop("hidden")} if "hidden" in names else {}
            more |= {(at, name): each for name, each in of_layer.items()}
        sums = more if sums is None else {name: sums[name] + each for name, each in more.items()}
        return sums, [*results, *(of_hidden[at] for at in with_hidden), *(found[name] for name in wanted.rows)]

    of_all = _hidden(layers) | rows | {f"factors {at}": each for at, each in enumerate(factors) if each is not None}
    bytes_of_row = _bytes_of_row(head, layers, wanted.layers)
    sums, results = by_parts(jax.checkpoint(part), most, bytes_of_row, of_all, axis=n, **dict(options))
    by_rows = {name: results.pop() for name in reversed(wanted.rows)}
    by_layers: list[Layer] = [{} for _ in layers]
    for at in reversed(with_hidden):
        by_layers[at]["hidden"] = results.pop()
    for (at, name), total in sums.items():
        by_layers[at][name] = total
    return results, by_layers, by_rows


def gradients_of_layer(head: "Head", at: int, names: Sequence[str], g, hidden, weight, dtype) -> Layer:
    """Computes what `names` ask for of a layer from the gradient `[*rows, classes]` of its logits.

    Args:
      head: the loss behind the layers.
      at: the number of the layer.
      names: names of the layer's operands.
      g: the gradient of the logits.
      hidden: the hidden states `[*rows, H]`.
      weight: the weight.
      dtype: that of the weight's gradient.
    """
    class_axis, along, found = head.class_axes[at], tuple(range(g.ndim - 1)), {}
    if "weight" in names:
        found["weight"] = product(*((hidden, g) if class_axis == 1 else (g, hidden)), along, along, dtype, head.precision)
    if "bias" in names:
        found["bias"] = jnp.sum(g, along, dtype=accumulator(hidden.dtype))
    if "hidden" in names:
        found["hidden"] = product(g, weight.astype(hidden.dtype), g.ndim - 1, class_axis, hidden.dtype, head.precision)
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
        x = product(h, layer["weight"].astype(h.dtype), h.ndim - 1, 1 - axis, wide, head.precision)
        found.append(x if bias is None else (x + jnp.expand_dims(bias.astype(wide), range(h.ndim - 1))).astype(dtype))
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
