"""The attention kernels as a plain `jax.custom_vjp` function, to read or to take out: no primitive stands around them."""

import functools

import jax

from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention.mosaic_sm90 import backward_plan, forward_plan
from jaxsoftmax.ops.attention.mosaic_sm90.backward import BackwardPlan
from jaxsoftmax.ops.attention.mosaic_sm90.forward import ForwardPlan


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5, 6))
def standalone_attention(query, key, value, scale, window=(None, None), soft_cap=None, target=HOPPER):
    """Computes attention by the kernels in both directions: `[B, T, N, Hv]` in the dtype of the queries.

    There is no reference to fall back on, no batching beyond what Pallas does, no sharding, and no second derivative.
    `mosaic_sm90.plan` says what the kernels take; that is not checked here.

    Args:
      query: `[B, T, N, H]`, float16 or bfloat16. Head sizes, of values too, are multiples of 8.
      key: `[B, S, K, H]`, where K divides N.
      value: `[B, S, K, Hv]`.
      scale: positive factor of the scores.
      window: `(left, right)`, numbers of keys before and after its own position that a query sees; None for all. Causal
        attention is `(None, 0)`.
      soft_cap: bound of the scores in `soft_cap * tanh(score / soft_cap)`, or None.
      target: GPU that the kernels are lowered for; an H100 or H200 by default.
    """
    return _forward(query, key, value, scale, window, soft_cap, target)[0]


def _forward(query, key, value, scale, window, soft_cap, target):
    operands = {"query": query, "key": key, "value": value}
    out, lse = ForwardPlan(forward_plan.shape_forward(operands, target, **_options(scale, window, soft_cap))).run(**operands)
    return out, operands | {"out": out, "lse": lse}


def _backward(scale, window, soft_cap, target, saved, d_out):
    wanted = ("query", "key", "value")
    types = {name: saved[name] for name in wanted}
    geometry = backward_plan.shape_backward(types, target, wanted, is_deterministic=False, **_options(scale, window, soft_cap))
    return tuple(BackwardPlan(geometry, wanted, window).run(**saved, d_out=d_out))


def _options(scale, window, soft_cap):
    return {"scale": scale, "window": window, "soft_cap": soft_cap, "dropout_rate": 0.0}


standalone_attention.defvjp(_forward, _backward)
