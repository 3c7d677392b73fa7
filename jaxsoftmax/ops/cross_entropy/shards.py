"""Cross-entropy inside a `shard_map` that shards the classes: each device runs the primitives on its own.

Collectives stand beside the primitives, and not in their rules, so that JAX transposes them, which it does in one way where the
`shard_map` checks what varies and in another where it does not. The logits are read and written as often as on one device.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.primitive import bind
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.cross_entropy import across_devices, xla
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY_JVP


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def cross_entropy(axis_name: tuple[str, ...], params: dict[str, Any], x, labels, where) -> list[jax.Array]:
    """What the primitive gives with its state, on every device. Labels count the classes of all devices."""
    run = functools.partial(bind, implementation=params["implementation"])
    params = {name: value for name, value in params.items() if name != "implementation"}
    (axis,) = params["axes"]
    over = {axis: Cut.of_part(axis_name, x.shape[axis])}
    return across_devices.cross_entropy(run, x, labels, where, return_state=True, over=over, **params)


@cross_entropy.defjvp
def _jvp(axis_name, params, primals, tangents):
    (x, labels, where), (t, *_) = primals, tangents
    *found, m, d = cross_entropy(axis_name, params, x, labels, where)
    (axis,) = params["axes"]
    own = across_devices.own(labels, x.shape[axis], Cut.of_part(axis_name, x.shape[axis]))
    given = {"x": x, "m": m, "d": d, "t": t, "labels": own, "where": where}
    mean, chosen, *total = lax.psum(jnp.stack(bind(CROSS_ENTROPY_JVP, given, **params)), axis_name)
    return [*found, m, d], [mean - chosen, mean, *total, jnp.zeros_like(m), xla.tangent_of_sum(d, mean)]
