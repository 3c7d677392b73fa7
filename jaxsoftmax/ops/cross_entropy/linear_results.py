"""Log-probabilities, log-sum-exp and entropy of rows of a linear layer, with derivatives, also if devices share the classes.

The function merges over devices what the primitives of `linear_terms.py` compute for the classes of each.
"""

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import sharding
from jaxsoftmax._core.primitive import bind
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.cross_entropy import across_devices, xla
from jaxsoftmax.ops.cross_entropy.linear_terms import LINEAR_LOG_PROBS, LINEAR_LOG_PROBS_JVP
from jaxsoftmax.ops.softmax.across_devices import is_zero
from jaxsoftmax.ops.softmax.xla import tangent_of_sum

if TYPE_CHECKING:
    from jaxsoftmax.ops.cross_entropy.loss import LogProbHead


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1, 2))
def results_of_rows(head: "LogProbHead", axis_name: tuple[str, ...], flags: tuple[str, ...], operands) -> list[jax.Array]:
    """Computes log-probabilities `[rows, n]`, and `[rows]` the log-sum-exp, what `flags` ask for, and the state.

    A label is negative if its token is no class, or if its row does not take part. All devices over which `axis_name` shards
    the classes get the same results, though their types vary over devices if those of the operands do.

    Args:
      head: what stands behind the layer.
      axis_name: mesh axes over which devices share the classes.
      flags: of "return_total", for the sum of the scores, and "return_entropy", in this order.
      operands: those of the primitive by name, with labels that count the classes of all devices.
    """
    own = {"labels": _own_labels(head, axis_name, operands)}
    params = {"head": head, "implementation": forced_on_layer(head.implementation), **dict.fromkeys(flags, True)}
    m, d, chosen, *sums = bind(LINEAR_LOG_PROBS, operands | own, **params)
    labels, scale, has_entropy = operands["labels"], operands.get("scale"), "return_entropy" in flags
    if axis_name:
        n, exponents = chosen.shape[1], sums.pop() if has_entropy else None
        cuts = _cuts(head, axis_name, operands)
        numbers = m, d, *jnp.unstack(chosen, axis=1), *sums
        m, d, *merged = across_devices.merge_states(*numbers, cuts=cuts, scale=lax.stop_gradient(scale), exponents=exponents)
        chosen, sums = jnp.stack(merged[:n], 1), merged[n:]
    chosen = jnp.where(labels == xla.NO_CLASS, jnp.nan, chosen)  # a row that does not take part has 0
    m, d, *sums = (number[:, None] for number in (m, d, *sums))
    options = {"return_entropy": has_entropy, "return_state": True, "dtype": m.dtype}
    nll, lse, *others = xla.results_of(labels, m, d, chosen, *sums, scale=None if scale is None else scale[:, None], **options)
    return [-nll, *(number[:, 0] for number in (lse, *others))]


@functools.partial(results_of_rows.defjvp, symbolic_zeros=True)
def _jvp(head, axis_name, flags, primals, tangents):
    (operands,), (moving,) = primals, tangents
    results = results_of_rows(head, axis_name, flags, operands)
    _, _, *others, m, d = results
    moved = {f"t_{name}": t for name, t in moving.items() if name != "labels" and not is_zero(t)}
    known = operands | {"labels": _own_labels(head, axis_name, operands), "m": m, "d": d}
    params = {"head": head, "implementation": forced_on_layer(head.implementation), **dict.fromkeys(flags, True)}
    mean, chosen, *sums = bind(LINEAR_LOG_PROBS_JVP, known | moved, **params)
    if axis_name:
        mean, chosen, *sums = lax.psum([mean, chosen, *sums], axis_name)
    if "return_entropy" in flags:  # see `_jvp` in primitive.py
        sums[-1] = xla.mean_of(others[-1], d) * mean - sums[-1]
    found = [chosen - mean[:, None], mean, *sums, jnp.zeros_like(m), tangent_of_sum(d, mean)]
    return results, sharding.varying_as(found, results)


def forced_on_layer(implementation: str | None) -> str | None:
    """Returns the implementation that must run. If Mosaic has no kernel without logits, its kernels for logits run."""
    return None if implementation == "mosaic" else implementation


def _cuts(head, axis_name, operands) -> dict[int, Cut]:
    """Describes how devices share the classes, for the functions that merge over devices."""
    return {1: Cut.of_part(axis_name, operands["weight"].shape[head.class_axis])}


def _own_labels(head, axis_name, operands) -> Any:
    """Returns the labels as this device counts its classes."""
    labels, classes = operands["labels"], operands["weight"].shape[head.class_axis]
    return across_devices.local_labels(labels, classes, _cuts(head, axis_name, operands)) if axis_name else labels
