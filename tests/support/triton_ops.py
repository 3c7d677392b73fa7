"""The ops that have Triton kernels, their derivatives, and the transformations of them that are tested."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

import jaxsoftmax


@dataclass(frozen=True)
class Op:
    """A function of arrays, forced on an implementation by name. It is differentiated in the first `moving` arrays.

    Attributes:
      f: the function.
      operands: the types of its operands.
      moving: of how many there are derivatives.
      specs: how operands are sharded over the mesh axes "data" and "model", and then the result.
      primitives: those of the value, and of its derivatives.
      kernels: how many there are in the value and its derivatives together.
    """

    f: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    moving: int
    specs: tuple[P, ...]
    primitives: tuple[str, str]
    kernels: int = 2


def shaped(*shape, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def masked(name):
    return lambda x, where, **options: getattr(jaxsoftmax, name)(x, axis=-1, where=where, **options)


def attend(query, key, value, bias, mask, **options):
    return jaxsoftmax.dot_product_attention(query, key, value, bias, mask, precision="high", **options)


ROWS, HEADS = P("data"), P("data", None, "model")
X, HEAD = shaped(8, 12), shaped(2, 20, 2, 8)
OPS = {
    "softmax": Op(
        lambda x, where, scale, **options: jaxsoftmax.softmax(x, where=where, scale=scale, **options),
        (X, shaped(8, 12, dtype=bool), shaped()),
        1,
        (ROWS, ROWS, P(), ROWS),
        ("softmax", "softmax_jacobian"),
    ),
    "log_softmax": Op(
        masked("log_softmax"),
        (X, shaped(12, dtype=bool)),
        1,
        (ROWS, P(), ROWS),
        ("log_softmax", "log_softmax_vjp"),
    ),
    "logsumexp": Op(
        masked("logsumexp"),
        (X, shaped(12, dtype=bool)),
        1,
        (ROWS, P(), ROWS),
        ("logsumexp", "logsumexp_vjp"),
    ),
    "cross_entropy": Op(
        functools.partial(jaxsoftmax.cross_entropy, label_smoothing=0.1),
        (X, shaped(8, dtype="int32")),
        1,
        (ROWS, ROWS, ROWS),
        ("cross_entropy", "cross_entropy_vjp"),
    ),
    "attention": Op(
        attend,
        (HEAD, HEAD, HEAD, shaped(1, 2, 20, 20), shaped(2, 1, 1, 20, dtype=bool)),
        4,
        (HEADS, HEADS, HEADS, P(None, "model"), ROWS, HEADS),
        ("dot_product_attention", "dot_product_attention_vjp"),
        3,
    ),
}


def forward(op, implementation="triton"):
    return functools.partial(op.f, implementation=implementation)


def with_gradient(op, implementation="triton"):
    """Returns a function of the value and its derivatives."""

    def both(*operands):
        moving, fixed = operands[: op.moving], operands[op.moving :]
        value, vjp = jax.vjp(lambda *moving: forward(op, implementation)(*moving, *fixed), *moving)
        return value, vjp(jnp.cos(value))

    return both


def primitives(op, function):
    return list(op.primitives[: 1 if function == "forward" else 2])


def axes_of(op, last=0, first=0):
    """Returns the axis along which each operand is mapped: `first`, then 0 for those between, then `last`."""
    return (first, *[0] * (len(op.operands) - 2), last)


WAYS = {
    "in front": lambda op: [axes_of(op)],
    "another axis": lambda op: [axes_of(op, first=1)],
    "the last axis": lambda op: [axes_of(op, first=op.operands[0].ndim)],
    "the last operand is for all": lambda op: [axes_of(op, last=None)],
    "only the last operand": lambda op: [(*[None] * (len(op.operands) - 1), 0)],
    "two levels": lambda op: [axes_of(op, last=None), axes_of(op, first=1)],
}


def mapped(f, levels):
    for axes in levels:
        f = jax.vmap(f, in_axes=axes)
    return f


def stacked(operands, levels, size=2):
    """Returns the types of operands that are mapped over."""
    for axes in levels:
        operands = [
            a if axis is None else shaped(*a.shape[:axis], size, *a.shape[axis:], dtype=a.dtype)
            for a, axis in zip(operands, axes, strict=True)
        ]
    return operands


SIZES, AXES = (2, 2), ("data", "model")


def specs_of_results(op, function):
    *given, result = op.specs
    return result if function == "forward" else (result, tuple(given[: op.moving]))
