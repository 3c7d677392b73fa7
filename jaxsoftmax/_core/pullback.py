"""Functions with a pullback of their own: reverse mode takes a rule, and forward mode is JAX's.

A function with a rule of `jax.custom_vjp` has no forward mode. A rule of `jax.custom_jvp` leaves the transpose to JAX. Here
tangents are JAX's, and cotangents go to a rule. Derivatives of all orders follow: JAX differentiates the rule, and tangents.

The results pass through a primitive that returns them as they are, and also takes the operands. Its tangent is the same
primitive, which takes the tangents of the operands beside those of the results. Its transpose calls the rule for the cotangents
of the operands' tangents. The tangents of the results get none. Loops keep the rule of a primitive: see `entrywise.py`.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from jaxsoftmax._core import sharding

Arrays = dict[str, jax.Array]

_with_pullback = Primitive("with_pullback")
_with_pullback.multiple_results = True


def with_pullback(
    pullback: Callable[[Arrays, list[jax.Array | None], Mapping[str, Any]], Arrays],
    function: Callable[[Arrays], list[jax.Array]],
    operands: Arrays,
) -> list[jax.Array]:
    """Calls a function of operands by name, whose cotangents the pullback computes.

    Args:
      pullback: `pullback(operands, cotangents, types)` returns the cotangents of the operands whose types it gets, by name.
        A cotangent of a result is None for zero. Axes of a batch are in front of everything, and operands and types have size 1
        there if the examples share them.
      function: the function, whose tangents must be those of a jitted one. In reverse mode they have no cotangent. JAX 0.11.2
        then runs the transpose of a loop, on zeros, but drops that of a call of a jitted function.
      operands: its operands.
    """
    return _with_pullback.bind(*function(operands), *operands.values(), names=tuple(operands), moving=(), pullback=pullback)


def _split(arrays, names, moving) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
    """Returns the results, the operands by name, and the tangents of those that move."""
    n_results = len(arrays) - len(names) - len(moving)
    operands = dict(zip(names, arrays[n_results:], strict=False))
    return list(arrays[:n_results]), operands, dict(zip(moving, arrays[n_results + len(names) :], strict=True))


def _results(*arrays, names, moving, pullback):
    """Returns the results as they are: arrays, their types, or what they are while lowering."""
    del pullback
    return _split(arrays, names, moving)[0]


def _jvp(primals, tangents, *, names, moving, pullback):
    results = _with_pullback.bind(*primals, names=names, moving=moving, pullback=pullback)
    _, operands, _ = _split(primals, names, moving)
    t_results, t_operands, t_moving = _split(tangents, names, moving)
    of_operands, of_moving = ({n: t for n, t in each.items() if type(t) is not ad.Zero} for each in (t_operands, t_moving))
    # Tangents of tangents are JAX's, unless they are linear: the rule says nothing of how they depend on the operands.
    moved = of_moving if moving else of_operands
    if not moved or (moving and of_operands):
        return results, t_results
    t_results = [jnp.zeros_like(r) if type(t) is ad.Zero else t for r, t in zip(results, t_results, strict=True)]
    params = {"names": names, "moving": tuple(moved), "pullback": pullback}
    return results, _with_pullback.bind(*t_results, *operands.values(), *moved.values(), **params)


def _transpose(cotangents, *arrays, names, moving, pullback):
    results, operands, tangents = _split(arrays, names, moving)
    types, found = {name: t.aval for name, t in tangents.items() if ad.is_undefined_primal(t)}, {}
    cotangents = [None if type(c) is ad.Zero else c for c in cotangents]
    if any(c is not None for c in cotangents):
        found = pullback(operands, cotangents, types)
    return [None] * (len(results) + len(operands)) + [found.get(name) for name in moving]


def _batch(arrays, dims, *, names, moving, pullback):
    """Adds an axis in front, of size 1 where operands have none."""
    size = next(array.shape[dim] for array, dim in zip(arrays, dims, strict=True) if dim is not None)
    arrays = [
        jnp.expand_dims(array, 0) if dim is None else jnp.moveaxis(array, dim, 0)
        for array, dim in zip(arrays, dims, strict=True)
    ]
    n_results = len(arrays) - len(names) - len(moving)
    arrays[:n_results] = [jnp.broadcast_to(result, (size, *result.shape[1:])) for result in arrays[:n_results]]
    # A mesh may have the axis of a batch: the cotangents of operands that examples share add up over it.
    results = _with_pullback.bind(*sharding.vary_alike(arrays), names=names, moving=moving, pullback=pullback)
    return results, [0] * n_results


_with_pullback.def_impl(_results)
_with_pullback.def_abstract_eval(_results)
mlir.register_lowering(_with_pullback, lambda ctx, *arrays, **params: _results(*arrays, **params))
ad.primitive_jvps[_with_pullback] = _jvp
ad.primitive_transposes[_with_pullback] = _transpose
batching.primitive_batchers[_with_pullback] = _batch
