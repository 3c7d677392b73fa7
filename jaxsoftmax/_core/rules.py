"""Functions with rules of their own for batches and tangents, as primitives that keep what JAX traced of the function.

`jax.custom_jvp` has no rule for batches, and loops drop its rule: see `entrywise.py`. `jax.custom_batching.custom_vmap` batches
the tangents of its rule, also where each example has a gradient of its own, and has no reverse mode.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir


def with_rules(*, batch: Callable[..., Any], jvp: Callable[..., Any] | None = None) -> Callable[..., Any]:
    """Makes a function of arrays, with hashable parameters by name, a primitive. An eager call is one of the function.

    Args:
      batch: `batch(operands, axes, **params)` returns the results of a batch, with its axis in front. It gets that axis in
        front of the operands that have it, and for each operand 0 or None.
      jvp: `jvp(primals, tangents, **params)` returns the results and their tangents. It gets None for a tangent that is zero.
        None (the default) for the derivative of the function.

    Returns:
      A decorator of `function(*arrays, **params)`, which returns a list of arrays.
    """

    def decorator(function: Callable[..., list[jax.Array]]) -> Callable[..., list[jax.Array]]:
        @functools.wraps(function)
        def call(*operands, **params):
            # JAX looks into what is traced for primitives that need devices.
            jaxpr = jax.make_jaxpr(functools.partial(function, **params))(*operands)
            return primitive.bind(*operands, jaxpr=jaxpr, **params)

        def batched(operands, dims, *, jaxpr, **params):
            del jaxpr
            axes = tuple([None if dim is None else 0 for dim in dims])
            pairs = zip(operands, dims, strict=True)
            results = batch([each if dim is None else jnp.moveaxis(each, dim, 0) for each, dim in pairs], axes, **params)
            return results, [0] * len(results)

        def moved(primals, tangents, *, jaxpr, **params):
            del jaxpr
            moving = {at: t for at, t in enumerate(tangents) if type(t) is not ad.Zero}
            if jvp is not None:
                return jvp(primals, [moving.get(at) for at in range(len(primals))], **params)

            def of_moving(own):
                return function(*[own.get(at, primal) for at, primal in enumerate(primals)], **params)

            return jax.jvp(of_moving, ({at: primals[at] for at in moving},), (moving,))

        primitive = Primitive(function.__name__.strip("_"))
        primitive.multiple_results = True
        primitive.def_impl(lambda *operands, jaxpr, **params: function(*operands, **params))
        primitive.def_abstract_eval(lambda *_, jaxpr, **params: jaxpr.out_avals)
        batching.primitive_batchers[primitive] = batched
        ad.primitive_jvps[primitive] = moved
        mlir.register_lowering(primitive, mlir.lower_fun(lambda *operands, jaxpr, **params: jaxpr_as_fun(jaxpr)(*operands)))
        return call

    return decorator


def mapped(function: Callable[..., Any], batches: Sequence[Any]) -> Callable[..., Any]:
    """Maps a function over the axes of batches in front of its operands; each batch has `in_axes` as `jax.vmap` takes them."""
    for axes in batches:
        function = jax.vmap(function, axes)
    return function
