"""The losses of rows from their terms, and the loss behind a linear layer as a value that `linear` calls part by part.

The terms of a row are its `nll` and `lse`, and with label smoothing the sum of its scores. If devices share the classes, a
device's terms are instead the state `(m, d)` of its classes and the score of the label, 0 if another device has that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.primitive import bind
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.cross_entropy import across_devices
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT


def combined(nll, lse, total=None, *, label_smoothing, z_loss, classes):
    """Computes the losses of rows with smoothing and z-loss, from the terms of whole rows."""
    loss = (1 - label_smoothing) * nll + label_smoothing * (lse - total / classes) if label_smoothing else nll
    return loss + z_loss * lse * lse if z_loss else loss


@dataclass(frozen=True)
class LossHead:
    """The loss behind a linear layer: computes losses, and the gradient of the logits, from logits `[rows, classes]`.

    Equal heads have equal hashes, so that JAX compiles equal calls once. If devices share the classes, the losses that they
    return add up to the loss of a row.
    """

    class_axis: int  # of the weight, 0 or 1
    label_smoothing: float  # share of the label's probability that is spread over the classes
    z_loss: float  # factor of `lse**2` in the loss
    logits_soft_cap: float | None
    implementation: str | None  # name of the one that must run, or None
    axis_name: tuple[str, ...] = ()  # mesh axes over which devices share the classes

    @property
    def is_plain(self) -> bool:
        """True if the loss has neither smoothing nor a cap."""
        return self.label_smoothing == 0 and self.logits_soft_cap is None

    def local_labels(self, labels: jax.Array, classes: int) -> jax.Array:
        """Returns the labels as this device counts its `classes` classes."""
        return across_devices.local_labels(labels, classes, self._cuts(classes)) if self.axis_name else labels

    def terms(self, logits: jax.Array, labels: jax.Array) -> list[jax.Array]:
        """Computes the terms of rows, `[rows]` each, from the logits of this device's classes and its `local_labels`."""
        params = {"axes": (1,), "dtype": accumulator(logits.dtype), "soft_cap": self.logits_soft_cap}
        params |= {"return_total": self.label_smoothing > 0}
        operands = {"x": logits, "labels": labels[:, None]}
        if self.axis_name:
            terms = across_devices.local_terms(self._run, **operands, where=None, **params)
        else:
            terms = self._run(CROSS_ENTROPY, operands, return_state=False, **params)
        return [jnp.squeeze(term, 1) for term in terms]

    def losses(self, terms: Sequence[jax.Array], labels: jax.Array, classes: int) -> jax.Array:
        """Computes the losses of rows from `terms` and from labels that count the classes of all devices."""
        if self.axis_name:
            terms = across_devices.merge_terms(terms, labels, terms[0].dtype, self._cuts(classes))
        return self.combined(terms, classes)

    def losses_and_gradient(self, logits: jax.Array, labels: jax.Array, factors: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Computes the losses, and the derivative of `sum(factors * losses)` in the memory of the logits."""
        operands = {"x": logits, "labels": labels[:, None], "t": factors[:, None]}
        params = {"axes": (1,), "dtype": factors.dtype, "soft_cap": self.logits_soft_cap}
        params |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        classes = logits.shape[1]
        if self.axis_name:
            cuts = self._cuts(classes)
            gradient, *terms = across_devices.cross_entropy_gradient(self._run, **operands, cuts=cuts, **params)
        else:
            gradient, *terms = self._run(CROSS_ENTROPY_GRADIENT, operands, **params)
        return self.combined([jnp.squeeze(term, 1) for term in terms], classes), gradient

    def combined(self, terms: Sequence[jax.Array], classes: int) -> jax.Array:
        """Computes the losses from the terms of whole rows; 0 on all devices except the first.

        A `psum` outside adds them up. JAX transposes that sum, as it transposes the sum of the gradients of arrays that all
        devices have, in one way if a `shard_map` checks what varies over devices, and in another way if it does not.
        """
        classes = max(classes, 1) * lax.axis_size(self.axis_name)
        losses = combined(*terms, label_smoothing=self.label_smoothing, z_loss=self.z_loss, classes=classes)
        return jnp.where(lax.axis_index(self.axis_name) == 0, losses, 0) if self.axis_name else losses

    def _run(self, operation: Operation, operands: dict[str, Any], **params: Any) -> list[jax.Array]:
        return bind(operation, operands, implementation=self.implementation, **params)

    def _cuts(self, classes: int) -> dict[int, Cut]:
        return {1: Cut.of_part(self.axis_name, classes)}
