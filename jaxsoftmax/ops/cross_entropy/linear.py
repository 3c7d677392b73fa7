"""Cross-entropy of the logits of a linear layer, which are made for a part of the rows at a time and never whole in memory.

For a sum of losses the gradients are made at once, part by part, and scaled when their cotangent is known: three products in
all, as many as with whole logits. For losses by themselves the logits are made again, which is a fourth product.

The gradient of a part's logits takes their place in memory. That of the weight adds up over the parts, where it is: on GPUs XLA
makes the sum a part of the product, with no other array.

A part has every n-th row, and not neighbours: where rows are sharded, each device has some of every part.

Of losses without gradients there is a primitive, `linear_cross_entropy`, for which Hopper has a kernel that keeps no logits.

Devices may share the classes, over the mesh axes `axis_name` of the head: each has the logits of its own, and one collective
merges their states, of a part of the rows where gradients are made, else of all. What devices return adds up to the losses, and
so do gradients of what all of them have: JAX adds those up, once, behind the last part.

A `head` has `class_axis`, 0 or 1, the axis of the weight that has the classes; `axis_name`; `own(labels, classes)`, the labels
as this device counts its classes, which are so many; `numbers(logits, own)`, what it knows of rows, `[rows]` each: `nll` and
`lse`, or where devices share the classes `m`, `d` and the label's score, and with smoothing the sum of the scores;
`losses(numbers, labels, classes)`; and `losses_and_gradient(logits, labels, factors)`, which gives them, and the derivative of
the sum of `factors` times them. `is_plain` says that there is no smoothing and no cap. It can be hashed.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operand, Operation
from jaxsoftmax._core.primitive import bind, define, reverse_only
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY

# Bytes of the logits of a part: few parts where each reads and writes the gradient of the weight.
MOST_WITH_GRADIENT = 2**29
MOST = 2**28
REVERSE_ONLY = (
    "linear_cross_entropy: it has no forward mode (jax.jvp, jax.jacfwd, jax.linearize as a function of tangents);"
    " take cross_entropy(hidden @ weight + bias, labels), which has whole logits in memory"
)
_TILE = 128  # rows that tensor cores take at a time


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def losses(head, hidden, weight, bias, labels) -> jax.Array:
    """`[rows]`, of `hidden` `[rows, H]`, a weight with `H` and the classes, a bias of these or None, and labels `[rows]`."""
    classes = weight.shape[head.class_axis]
    operands = {"hidden": hidden, "weight": weight, "labels": head.own(labels, classes)}
    if bias is not None or not head.is_plain:
        return head.losses(numbers_by_parts(head, bias=bias, **operands), labels, classes)
    # Where Mosaic has no kernel without logits, its kernels of logits run, in the reference here.
    forced = None if head.implementation == "mosaic" else head.implementation
    return head.losses(bind(LINEAR_CROSS_ENTROPY, operands, head=head, implementation=forced), labels, classes)


def numbers_by_parts(head, hidden, weight, bias, labels) -> list[jax.Array]:
    """`head.numbers` of all rows, from logits of a part of them at a time."""

    def part(totals, h, own):
        return totals, head.numbers(_logits(head, h, weight, bias), own)

    return _by_parts(part, MOST, head, weight, bias, [hidden, labels])[1]


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
        is_uncut=True,
        knows_machine=True,
    )
)


def of_batch(numbers, hidden, weight, labels) -> list[jax.Array]:
    """`numbers(hidden, weight, labels)` of a batch of rows that share the weight."""
    rows = math.prod(labels.shape)
    found = numbers(hidden.reshape(rows, hidden.shape[-1]), weight.reshape(weight.shape[-2:]), labels.reshape(rows))
    return [number.reshape(labels.shape) for number in found]


def _losses_forward(head, hidden, weight, bias, labels):
    # Forward mode over this one has no rule either.
    given = [None if array is None else reverse_only(REVERSE_ONLY, array) for array in (hidden, weight, bias)]
    return losses(head, *given, labels), (hidden, weight, bias, labels)


def _losses_backward(head, saved, cotangents):
    hidden, weight, bias, labels = saved
    _, *gradients = _with_gradients(head, hidden, weight, bias, labels, cotangents)
    return (*gradients, None)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def weighted_sum(head, hidden, weight, bias, labels, factors) -> jax.Array:
    """The sum of `factors` times the losses."""
    return jnp.sum(factors * losses(head, hidden, weight, bias, labels))


def _sum_forward(head, hidden, weight, bias, labels, factors):
    found, *gradients = _with_gradients(head, hidden, weight, bias, labels, factors)
    return jnp.sum(factors * found), (gradients, found)


def _sum_backward(head, saved, cotangent):
    del head
    gradients, found = saved
    scaled = [None if g is None else (g.astype(found.dtype) * cotangent).astype(g.dtype) for g in gradients]
    return (*scaled, None, found * cotangent)


losses.defvjp(_losses_forward, _losses_backward)
weighted_sum.defvjp(_sum_forward, _sum_backward)


def _with_gradients(head, hidden, weight, bias, labels, cotangents):
    """The losses, and the gradients of their sum times `cotangents`."""

    def part(totals, h, own, c):
        found, of_logit = head.losses_and_gradient(_logits(head, h, weight, bias), own, c)
        of_hidden = _product(of_logit, weight.astype(h.dtype), 1, head.class_axis, h.dtype)
        pair = (h, of_logit) if head.class_axis == 1 else (of_logit, h)
        of_weight = [_product(*pair, 0, 0, weight.dtype)]
        of_bias = [] if bias is None else [jnp.sum(of_logit, 0, dtype=c.dtype)]
        sums = of_weight + of_bias
        return sums if totals is None else list(map(jnp.add, totals, sums)), [found, of_hidden]

    totals, found = _by_parts(part, MOST_WITH_GRADIENT, head, weight, bias, [hidden, labels, cotangents])
    of_weight, *of_bias = totals
    return *found, of_weight, of_bias[0].astype(bias.dtype) if of_bias else None


def _logits(head, hidden, weight, bias):
    """In the dtype of `hidden`, rounded once."""
    dtype = hidden.dtype if bias is None else accumulator(hidden.dtype)
    logits = _product(hidden, weight.astype(hidden.dtype), 1, 1 - head.class_axis, dtype)
    return logits if bias is None else (logits + bias.astype(dtype)[None]).astype(hidden.dtype)


def _product(a, b, axis_of_a, axis_of_b, dtype) -> jax.Array:
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=dtype)


def _by_parts(function, most: int, head, weight, bias, arrays: list[jax.Array]) -> tuple[Any, list[jax.Array]]:
    """A fold of `function(totals, *parts of the arrays)` over the rows: the totals, None at first, and the results of all rows.

    The logits of a part have about `most` bytes. The last rows of parts may be zeros. Symbolic sizes make one part.
    """
    rows, classes = arrays[0].shape[0], weight.shape[head.class_axis]
    each, parts = rows, 1
    if isinstance(rows, int) and isinstance(classes, int):
        dtype = arrays[0].dtype
        itemsize = dtype.itemsize if bias is None else dtype.itemsize + accumulator(dtype).itemsize  # see `_logits`
        each, parts = _sizes(rows, -(-rows * classes * itemsize // most))
    if parts == 1:
        return function(None, *arrays)

    def cut(array):
        padded = jnp.pad(array, ((0, parts * each - rows), *((0, 0) for _ in array.shape[1:])))
        return padded.reshape(each, parts, *array.shape[1:])

    def step(carry, i):
        totals, found = carry
        totals, new = function(totals, *(lax.dynamic_index_in_dim(array, i, 1, keepdims=False) for array in cuts))
        return (totals, [lax.dynamic_update_index_in_dim(a, b, i, 1) for a, b in zip(found, new, strict=True)]), None

    cuts = list(map(cut, arrays))
    totals, of_part = jax.eval_shape(function, None, *(array[:, 0] for array in cuts))
    of_parts = [jax.ShapeDtypeStruct((each, parts, *result.shape[1:]), result.dtype) for result in of_part]
    leaves, tree = jax.tree.flatten((totals, of_parts))
    # No part goes before the loop: sharded rows would add up the gradient of the weight over devices twice.
    zeros = [jnp.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    carry = jax.tree.unflatten(tree, sharding.vary_alike([cuts[0], *zeros])[1:])
    (totals, found), _ = lax.scan(step, carry, jnp.arange(parts))
    return totals, [array.reshape(-1, *array.shape[2:])[:rows] for array in found]


def _sizes(rows: int, least: int) -> tuple[int, int]:
    """How many rows parts have, and how many parts there are: from `least` to a third more, so that few rows are added."""
    tiles = -(-rows // _TILE)
    if min(least, tiles) <= 1:
        return rows, 1
    each = min((-(-tiles // parts) for parts in range(least, least + least // 3 + 1)), key=lambda each: -tiles % each)
    return each * _TILE, -(-tiles // each)
