"""Functions of single entries as primitives with derivatives of their own, for use in references.

A rule of `jax.custom_jvp` is not enough where derivatives of any order are to be right. JAX 0.11.2 drops it if a `lax.scan` has
the call in its body, and a gradient through the loop is differentiated again: reverse mode moves what all steps share out of
the loop, and for that traces the body without its rules. A primitive keeps its rule.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, xla

from jaxsoftmax._core import sharding


def entrywise(rule: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of arrays that broadcast, of equal numbers of axes or scalars, a primitive.

    Args:
      rule: `rule(results, primals, tangents, **params)` returns the tangents of the results, as the function returns these. It
        gets None for a tangent that is zero.

    Returns:
      A decorator of `function(*arrays, **params)`, which returns an array or a tuple of arrays.
    """

    def decorator(function: Callable[..., Any]) -> Callable[..., Any]:
        def leaves(*operands, **params):
            return jax.tree.leaves(function(*operands, **params))

        @functools.wraps(function)
        def call(*operands, **params):
            results = primitive.bind(*sharding.vary_alike(list(operands)), **params)
            return results[0] if len(results) == 1 else tuple(results)

        def types(*avals, **params):
            return sharding.types_of_results(functools.partial(leaves, **params), *avals)

        def batch(operands, dims, **params):
            ndim = 1 + max([operand.ndim - (dim is not None) for operand, dim in zip(operands, dims, strict=True)])
            fitting = [_in_front(operand, dim, ndim) for operand, dim in zip(operands, dims, strict=True)]
            results = jax.tree.leaves(call(*fitting, **params))
            return results, [0] * len(results)

        def jvp(primals, tangents, **params):
            results = jax.tree.leaves(call(*primals, **params))
            moving = [None if type(t) is ad.Zero else t for t in tangents]
            found = jax.tree.leaves(rule(results[0] if len(results) == 1 else tuple(results), primals, moving, **params))
            # In a batch an operand that does not move may be larger than those that do.
            found = [jnp.broadcast_to(t, result.shape) for t, result in zip(found, results, strict=True)]
            return results, sharding.varying_as(found, results)

        primitive = Primitive(function.__name__.strip("_"))
        primitive.multiple_results = True
        primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
        primitive.def_abstract_eval(types)
        batching.primitive_batchers[primitive] = batch
        ad.primitive_jvps[primitive] = jvp
        mlir.register_lowering(primitive, mlir.lower_fun(leaves, multiple_results=True))
        return call

    return decorator


def _in_front(operand: jax.Array, dim: int | None, ndim: int) -> jax.Array:
    """Returns an operand with its batch axis in front, of size 1 if it has none, and with this number of axes."""
    operand = jnp.expand_dims(operand, 0) if dim is None else jnp.moveaxis(operand, dim, 0)
    return jnp.expand_dims(operand, range(1, 1 + ndim - operand.ndim))
