"""Cross-entropy of a linear layer's logits, computed for a part of the rows at a time, so that all logits are never in memory.

- A sum of losses computes its gradients together with its value, part by part, and scales them when the cotangent is known.
  That takes three matrix products in all, the number that a loss with all logits in memory takes.
- Losses of rows compute the logits once more for their gradients, which is a fourth product.
- Losses without gradients have the primitive `linear_cross_entropy`, for which Hopper has a kernel that keeps no logits.

The gradient of a part's logits takes their place in memory. The gradient of the weight accumulates over the parts in place: on
GPUs XLA makes the addition a part of the product, without another array.

With n parts a part has every n-th row, not neighbours: if rows are sharded, each device has some of every part.

If devices share the classes (`head.axis_name`), each computes the logits of its own classes, and one collective merges the
terms of rows: of one part if gradients are computed, else of all rows. The losses that devices return add up to the loss. The
gradients of arrays that all devices have add up too, which JAX does once, behind the last part.
"""

import functools
import math
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import OnShards, Operand, Operation
from jaxsoftmax._core.primitive import bind, define, reverse_only
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY

if TYPE_CHECKING:
    from jaxsoftmax.ops.cross_entropy.loss import LossHead

# Bytes of the logits of a part. With gradients parts are fewer, as each reads and writes the gradient of the weight.
MOST_WITH_GRADIENT = 2**29
MOST = 2**28
REVERSE_ONLY = (
    "linear_cross_entropy: it has no forward mode (jax.jvp, jax.jacfwd, jax.linearize as a function of tangents);"
    " take cross_entropy(hidden @ weight + bias, labels), which has whole logits in memory"
)
_TILE = 128  # rows of one tile of tensor cores


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def losses(head: "LossHead", hidden, weight, bias, labels) -> jax.Array:
    """Computes the loss of each row, `[rows]`.

    Args:
      head: the loss behind the layer.
      hidden: `[rows, H]`.
      weight: the weight, with the classes along `head.class_axis` and `H` along the other axis.
      bias: `[classes]`, or None.
      labels: `[rows]`; they count the classes of all devices.
    """
    classes = weight.shape[head.class_axis]
    operands = {"hidden": hidden, "weight": weight, "labels": head.local_labels(labels, classes)}
    if bias is not None or not head.is_plain:
        return head.losses(terms_by_parts(head, bias=bias, **operands), labels, classes)
    # If Mosaic has no kernel without logits, the reference of this primitive runs, and in it Mosaic's kernels for logits.
    forced = None if head.implementation == "mosaic" else head.implementation
    return head.losses(bind(LINEAR_CROSS_ENTROPY, operands, head=head, implementation=forced), labels, classes)


def terms_by_parts(head: "LossHead", hidden, weight, bias, labels) -> list[jax.Array]:
    """Computes `head.terms` of all rows, from the logits of a part of the rows at a time. Labels are `head.local_labels`."""

    def terms_of_part(sums, hidden, labels):
        return sums, head.terms(_logits(head, hidden, weight, bias), labels)

    return by_parts(terms_of_part, MOST, _bytes_of_row(head, hidden, weight, bias), [hidden, labels])[1]


def _results(*, head, **params):
    del params
    return [Operand(name, ("rows",)) for name in (("m", "d", "chosen") if head.axis_name else ("nll", "lse"))]


def _types(operands, **params):
    kind = accumulator(operands["hidden"].dtype)
    return [jax.ShapeDtypeStruct(operands["labels"].shape, kind) for _ in _results(**params)]


LINEAR_CROSS_ENTROPY = define(
    Operation(
        CROSS_ENTROPY_FAMILY,
        "linear_cross_entropy",
        (
            Operand("hidden", ("rows", None), may_be_one=False),
            Operand("weight", (None, None)),
            Operand("labels", ("rows",), may_be_one=False),
        ),
        _types,
        _results,
        on_shards=OnShards.NOTHING,  # to hand the kernel shards, XLA would gather a weight whose classes are sharded
        knows_machine=True,
    )
)


def of_batch(terms, hidden, weight, labels) -> list[jax.Array]:
    """Calls `terms(hidden, weight, labels)` for a batch of rows that share the weight, as one row after another."""
    rows = math.prod(labels.shape)
    results = terms(hidden.reshape(rows, hidden.shape[-1]), weight.reshape(weight.shape[-2:]), labels.reshape(rows))
    return [result.reshape(labels.shape) for result in results]


def _losses_forward(head, hidden, weight, bias, labels):
    # Forward mode over this rule must raise too.
    floating = [None if array is None else reverse_only(REVERSE_ONLY, array) for array in (hidden, weight, bias)]
    return losses(head, *floating, labels), (hidden, weight, bias, labels)


def _losses_backward(head, saved, cotangents):
    hidden, weight, bias, labels = saved
    _, *gradients = _with_gradients(head, hidden, weight, bias, labels, cotangents)
    return (*gradients, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_sum(head: "LossHead", hidden, weight, bias, labels, factors) -> jax.Array:
    """Computes `sum(factors * losses)`, a scalar; `factors` are `[rows]`."""
    return jnp.sum(factors * losses(head, hidden, weight, bias, labels))


def _sum_forward(head, hidden, weight, bias, labels, factors):
    losses, *gradients = _with_gradients(head, hidden, weight, bias, labels, factors)
    return jnp.sum(factors * losses), (gradients, losses)


def _sum_backward(head, saved, cotangent):
    del head
    gradients, losses = saved
    scaled = [None if g is None else (g.astype(losses.dtype) * cotangent).astype(g.dtype) for g in gradients]
    return (*scaled, None, losses * cotangent)


losses.defvjp(_losses_forward, _losses_backward)
weighted_sum.defvjp(_sum_forward, _sum_backward)


def _with_gradients(head, hidden, weight, bias, labels, cotangents):
    """Computes the losses, and the gradients of `sum(cotangents * losses)` by `hidden`, `weight` and `bias` (or None)."""

    def part(sums, h, labels, c):
        losses, d_logits = head.losses_and_gradient(_logits(head, h, weight, bias), labels, c)
        d_hidden = product(d_logits, weight.astype(h.dtype), 1, head.class_axis, h.dtype)
        factors = (h, d_logits) if head.class_axis == 1 else (d_logits, h)
        more = [product(*factors, 0, 0, weight.dtype)]
        if bias is not None:
            more.append(jnp.sum(d_logits, 0, dtype=c.dtype))
        return more if sums is None else list(map(jnp.add, sums, more)), [losses, d_hidden]

    bytes_of_row = _bytes_of_row(head, hidden, weight, bias)
    (d_weight, *d_bias), results = by_parts(part, MOST_WITH_GRADIENT, bytes_of_row, [hidden, labels, cotangents])
    return *results, d_weight, d_bias[0].astype(bias.dtype) if d_bias else None


def _logits(head, hidden, weight, bias):
    """Computes logits in the dtype of `hidden`, rounded once: with a bias the products are float32 until it is added."""
    dtype = hidden.dtype if bias is None else accumulator(hidden.dtype)
    logits = product(hidden, weight.astype(hidden.dtype), 1, 1 - head.class_axis, dtype)
    return logits if bias is None else (logits + bias.astype(dtype)[None]).astype(hidden.dtype)


def _bytes_of_row(head, hidden, weight, bias) -> Any:
    """Returns the bytes that the logits of a row take in `_logits`; symbolic if the number of classes is."""
    dtype = hidden.dtype
    return weight.shape[head.class_axis] * (dtype.itemsize if bias is None else dtype.itemsize + accumulator(dtype).itemsize)


def product(a: jax.Array, b: jax.Array, axis_of_a: int, axis_of_b: int, dtype) -> jax.Array:
    """Multiplies two matrices along an axis of each."""
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=dtype)


def by_parts(function, most: int, bytes_of_row: Any, arrays: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
    """Folds a function over parts of the rows.

    Args:
      function: `function(sums, *parts of the arrays)` returns the new sums, and results `[rows of the part, ...]`. The sums
        that it gets first are None if there is one part, else zeros.
      most: bytes that the logits of a part take, approximately.
      bytes_of_row: bytes that those of a row take.
      arrays: arrays whose first axis has the rows.

    Returns:
      The sums, and the results of all rows. The last rows of parts may be zeros, whose results are left out. Symbolic sizes
      make one part.
    """
    rows = arrays[0].shape[0]
    rows_of_part, parts = sizes(rows, bytes_of_row, most)
    if parts == 1:
        return function(None, *arrays)

    def interleaved(array):
        padded = jnp.pad(array, ((0, parts * rows_of_part - rows), *((0, 0) for _ in array.shape[1:])))
        return padded.reshape(rows_of_part, parts, *array.shape[1:])

    def step(carry, i):
        sums, results = carry
        sums, new = function(sums, *(lax.dynamic_index_in_dim(array, i, 1, keepdims=False) for array in in_parts))
        return (sums, [lax.dynamic_update_index_in_dim(a, b, i, 1) for a, b in zip(results, new, strict=True)]), None

    in_parts = list(map(interleaved, arrays))
    sum_types, result_types = jax.eval_shape(function, None, *(array[:, 0] for array in in_parts))
    result_types = [jax.ShapeDtypeStruct((rows_of_part, parts, *kind.shape[1:]), kind.dtype) for kind in result_types]
    leaves, tree = jax.tree.flatten((sum_types, result_types))
    # The loop begins with zeros, not with a first part in front of it: that would add up the gradient of the weight over the
    # devices of sharded rows twice.
    zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    carry = jax.tree.unflatten(tree, sharding.vary_alike([in_parts[0], *zeros])[1:])
    (sums, results), _ = lax.scan(step, carry, jnp.arange(parts))
    return sums, [array.reshape(-1, *array.shape[2:])[:rows] for array in results]


def sizes(rows: Any, bytes_of_row: Any, most: int) -> tuple[Any, int]:
    """Returns the rows of a part, and the number of parts: the least that fits, or up to a third more with fewer zeros."""
    if not (isinstance(rows, int) and isinstance(bytes_of_row, int)):
        return rows, 1
    tiles, least = -(-rows // _TILE), -(-rows * bytes_of_row // most)
    if min(least, tiles) <= 1:
        return rows, 1
    tiles_of_part = (-(-tiles // parts) for parts in range(least, least + least // 3 + 1))
    size = min(tiles_of_part, key=lambda size: -tiles % size)
    return size * _TILE, -(-tiles // size)
