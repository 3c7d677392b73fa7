"""The losses of rows from their terms, and what stands behind a linear layer as values that `linear` calls part by part.

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
from jaxsoftmax.ops.cross_entropy import across_devices, xla
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT, CROSS_ENTROPY_JVP, CROSS_ENTROPY_VJP
from jaxsoftmax.ops.cross_entropy.xla import NO_CLASS, NO_ROW


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


@dataclass(frozen=True)
class LogProbHead:
    """The log-probabilities behind a linear layer: computes terms of rows, and derivatives, from logits `[rows, classes]`.

    Equal heads have equal hashes, as those of losses. Rows have `n` labels, `[rows, n]`, as this device counts its classes.
    """

    class_axis: int  # of the weight, 0 or 1
    logits_soft_cap: float | None
    implementation: str | None  # name of the one that must run, or None

    def terms(self, x, labels, scale=None, *, return_entropy) -> list[jax.Array]:
        """Computes the state `(m, d)`, the scores of the labels before a scale, and what `return_entropy` asks for."""
        operands = {"x": x, "labels": labels[:, :1], "where": None, "scale": _column(scale)}
        options = self._params(return_total=False, return_entropy=return_entropy)
        m, d, chosen, *sums = across_devices.local_terms(self._run, **operands, **options, dtype=accumulator(x.dtype))
        if labels.shape[1] != 1:
            chosen = jnp.where(labels >= 0, xla.chosen_score(x, labels, (1,), self.logits_soft_cap, m.dtype), 0)
        m, d, *sums = (jnp.squeeze(number, 1) for number in (m, d, *sums))
        return [m, d, chosen, *sums]

    def tangents(self, x, t, labels, m, d, scale=None, t_scale=None, *, return_entropy) -> list[jax.Array]:
        """Computes `sum(p * u)`, `u[labels]` and what is asked for, from the tangents `t` of logits, and of `scale`."""
        if scale is None:
            u = t * xla.slope(x, self.logits_soft_cap)
        else:
            u = xla.scores_tangent(x, _column(scale), t, _column(t_scale), self.logits_soft_cap)
        return self._sums(x, u, labels, m, d, scale, return_entropy)

    def gradient(self, x, labels, dtype, wants_scale, m, d, a=None, b=None, e=None, scale=None) -> tuple[jax.Array, Any]:
        """Computes `(a * p + b * onehot(labels) + e * p * z) * ds/dx` in this dtype, and the derivative by `scale` or None."""
        is_one = labels.shape[1] == 1
        of_rows = {"m": _column(m), "d": _column(d), "a": _column(a), "e": _column(e), "scale": _column(scale)}
        label = labels if is_one else jnp.where(labels[:, :1] == NO_ROW, NO_ROW, NO_CLASS)
        operands = {"x": x, "labels": label, "b": b if is_one else None, **of_rows}
        (gradient,) = self._run(CROSS_ENTROPY_VJP, operands, dtype=dtype, **self._params())
        if not is_one and b is not None:
            gradient = self._with_labels(gradient, x, labels, b, of_rows)
        of_scale = None
        if wants_scale:
            mean, chosen, *sums = self._sums(x, xla.capped(x, self.logits_soft_cap), labels, m, d, scale, e is not None)
            # A number of 0 leaves out what it multiplies: the mean of a row that holds NaN, or the score of a class that a bias
            # of -inf excludes.
            pairs = [(_column(a), mean[:, None]), (b, chosen), *((_column(e), total[:, None]) for total in sums)]
            terms = [numbers * jnp.where(numbers != 0, what, 0) for numbers, what in pairs if numbers is not None]
            of_scale = sum([jnp.sum(term, 1) for term in terms], start=jnp.zeros_like(m))
        return gradient, of_scale

    def _sums(self, x, u, labels, m, d, scale, return_entropy):
        """Computes the sums of `tangents` from those of the scores, `u`."""
        operands = {"x": x, "m": _column(m), "d": _column(d), "t": u, "labels": labels[:, :1], "scale": _column(scale)}
        options = self._params(return_total=False, return_entropy=return_entropy)
        mean, chosen, *sums = self._run(CROSS_ENTROPY_JVP, operands, of_scores=True, dtype=m.dtype, **options)
        if labels.shape[1] != 1:
            chosen = xla.entry_at(u, labels, (1,), 0)
        mean, *sums = (jnp.squeeze(number, 1) for number in (mean, *sums))
        return [mean, chosen, *sums]

    def _with_labels(self, gradient, x, labels, b, of_rows):
        """Replaces the entries at the labels of rows, which may name a class twice, by what `b` adds there too.

        An entry is rounded once, so that `p - 1` is exact where `p` is close to 1.
        """
        entries = xla.entry_at(x, labels, (1,), 0)
        none = jnp.full_like(labels[:, :1], NO_CLASS)
        params = self._params() | {"dtype": of_rows["m"].dtype, "of_scores": True}
        total = xla.cross_entropy_vjp(entries, b=None, c=None, labels=none, where=None, **of_rows, **params)
        total += jnp.sum(jnp.where(labels[:, :, None] == labels[:, None, :], b[:, None, :], 0), 2)
        total *= xla.slope(entries, self.logits_soft_cap) * (1 if of_rows["scale"] is None else of_rows["scale"])
        places = jnp.where(labels >= 0, labels, x.shape[1])  # one that is outside is dropped
        return jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(gradient, places, total.astype(gradient.dtype))

    def labels_of_block(self, labels: jax.Array, start: Any, size: Any) -> jax.Array:
        """Returns the labels as a block of `size` classes from `start` on counts them."""
        index = labels - start
        return jnp.where((index >= 0) & (index < size) & (labels >= 0), index, jnp.minimum(labels, NO_CLASS))

    def _params(self, **params: Any) -> dict[str, Any]:
        return {"axes": (1,), "soft_cap": self.logits_soft_cap, **params}

    def _run(self, operation: Operation, operands: dict[str, Any], **params: Any) -> list[jax.Array]:
        return bind(operation, operands, implementation=self.implementation, **params)


def _column(numbers: jax.Array | None) -> jax.Array | None:
    return None if numbers is None else numbers[:, None]
