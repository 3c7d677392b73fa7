"""Cross-entropy of the logits of a linear layer, which are made for a part of the rows at a time and never whole in memory.

For a sum of losses the gradients are made at once, part by part, and scaled when their cotangent is known: three products in
all, as many as with whole logits. For losses by themselves the logits are made again, which is a fourth product.

A part has every n-th row, and not neighbours: where rows are sharded, each device has some of every part.

A `head` has `class_axis`, 0 or 1, the axis of the weight that has the classes, and `losses(logits, labels)`, which gives
`[rows]` of `[rows, classes]` and `[rows]`. It can be hashed.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator

_MOST = 2**28  # bytes of the logits of a part; its gradient takes as many


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def losses(head, hidden, weight, bias, labels) -> jax.Array:
    """`[rows]`, of `hidden` `[rows, H]`, a weight with `H` and the classes, a bias of these or None, and labels `[rows]`."""

    def part(_, given):
        h, own = given
        return None, head.losses(_logits(head, h, weight, bias), own)

    rows = len(labels)
    return _joined(lax.scan(part, None, _parts(rows, weight.shape[head.class_axis], hidden, labels))[1], rows)


def _losses_forward(head, hidden, weight, bias, labels):
    return losses(head, hidden, weight, bias, labels), (hidden, weight, bias, labels)


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

    def part(carry, given):
        of_weight, *of_bias = carry  # none or one
        h, own, c = given
        found, pull = jax.vjp(lambda logits: head.losses(logits, own), _logits(head, h, weight, bias))
        (of_logit,) = pull(c)
        of_hidden = _product(of_logit, weight.astype(h.dtype), 1, head.class_axis, h.dtype)
        pair = (h, of_logit) if head.class_axis == 1 else (of_logit, h)
        of_weight = of_weight + _product(*pair, 0, 0, of_weight.dtype)
        of_bias = [total + jnp.sum(of_logit, 0, dtype=total.dtype) for total in of_bias]
        return [of_weight, *of_bias], (found, of_hidden)

    rows = len(labels)
    zeros = [jnp.zeros_like(weight)] + ([] if bias is None else [jnp.zeros_like(bias, cotangents.dtype)])
    _, *start = sharding.vary_alike([hidden, *zeros])
    parts = _parts(rows, weight.shape[head.class_axis], hidden, labels, cotangents)
    (of_weight, *of_bias), found = lax.scan(part, start, parts)
    found, of_hidden = (_joined(parts, rows) for parts in found)
    return found, of_hidden, of_weight, of_bias[0].astype(bias.dtype) if of_bias else None


def _logits(head, hidden, weight, bias):
    """In the dtype of `hidden`, rounded once."""
    dtype = hidden.dtype if bias is None else accumulator(hidden.dtype)
    logits = _product(hidden, weight.astype(hidden.dtype), 1, 1 - head.class_axis, dtype)
    return logits if bias is None else (logits + bias.astype(dtype)[None]).astype(hidden.dtype)


def _product(a, b, axis_of_a, axis_of_b, dtype) -> jax.Array:
    return lax.dot_general(a, b, (((axis_of_a,), (axis_of_b,)), ((), ())), preferred_element_type=dtype)


def _parts(rows: int, classes: int, *arrays: Any) -> Any:
    """The rows of the arrays in parts, `[parts, rows of a part, ...]`; the last rows of parts may be zeros."""
    parts = -(-rows * classes * arrays[0].dtype.itemsize // _MOST)
    each = -(-rows // max(1, parts))
    each = min(rows, -(-each // 128) * 128)  # what the tensor cores take at a time
    parts = -(-rows // max(1, each))

    def cut(array):
        padded = jnp.pad(array, ((0, parts * each - rows), *((0, 0) for _ in array.shape[1:])))
        return jnp.moveaxis(padded.reshape(each, parts, *array.shape[1:]), 1, 0)

    return tuple(map(cut, arrays))


def _joined(parts, rows: int):
    """What `_parts` has cut."""
    joined = jnp.moveaxis(parts, 0, 1)
    return joined.reshape(joined.shape[0] * joined.shape[1], *joined.shape[2:])[:rows]
