"""The losses of rows from their terms, and what stands behind linear layers as values that are called part by part.

The terms of a row are its `nll` and `lse`, with label smoothing the sum of its scores, and its entropy if asked for.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core import sharding
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.primitive import bind
from jaxsoftmax._core.sharding import Cut
from jaxsoftmax.ops.cross_entropy import across_devices, xla
from jaxsoftmax.ops.cross_entropy.linear_gradient import LINEAR_CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.cross_entropy.linear_parts import Factors, Layer, Wanted, gradients_of_parts, results_of_parts
from jaxsoftmax.ops.cross_entropy.linear_results import forced_on_layer, results_of_rows
from jaxsoftmax.ops.cross_entropy.primitive import CROSS_ENTROPY, CROSS_ENTROPY_GRADIENT, CROSS_ENTROPY_JVP, CROSS_ENTROPY_VJP
from jaxsoftmax.ops.cross_entropy.xla import NO_CLASS, NO_ROW


def combined(nll, lse, total=None, *, label_smoothing, z_loss, classes):
    """Computes the losses of rows with smoothing and z-loss, from the terms of whole rows."""
    loss = (1 - label_smoothing) * nll + label_smoothing * (lse - total / classes) if label_smoothing else nll
    return loss + z_loss * lse * lse if z_loss else loss


@dataclass(frozen=True)
class Head:
    """The loss behind linear layers: computes losses of rows, and the gradients of the logits, from logits `[rows, classes]`.

    Equal heads have equal hashes, so that JAX compiles equal calls once. If devices share the classes, the results that they
    return add up to those of a row. JAX transposes that sum, as it transposes the sum of the gradients of arrays that all
    devices have, in one way if a `shard_map` checks what varies over devices, and in another way if it does not.
    """

    class_axes: tuple[int, ...]  # of the weight of each layer, 0 or 1
    logits_dtype: str | None  # None for the dtype of hidden states
    logits_soft_cap: float | None
    implementation: str | None  # name of the one that must run, or None
    precision: str  # of products, as `jax.lax.dot` takes it
    axis_name: tuple[str, ...] = ()  # mesh axes over which devices share the classes

    def of_rows(self, layers: tuple[Layer, ...], rows: dict[str, jax.Array]) -> list[jax.Array]:
        """Computes the results of all rows from the layers, part by part."""
        return results_of_parts(self, layers, rows)

    def gradients_of_rows(
        self, layers: tuple[Layer, ...], rows: dict[str, jax.Array], factors: jax.Array, wanted: Wanted
    ) -> tuple[list[jax.Array], list[Layer], dict[str, jax.Array]]:
        """Computes what `gradients_of_parts` returns for all rows, from a factor of each loss."""
        return gradients_of_parts(self, layers, rows, [factors], wanted)

    def results(self, logits: Sequence[jax.Array], rows: dict[str, jax.Array]) -> list[jax.Array]:
        """Computes the losses `[rows]`, and other numbers of rows."""
        raise NotImplementedError

    def with_gradients(
        self, logits: Sequence[jax.Array], rows: dict[str, jax.Array], factors: Factors, wanted: Wanted, dtype: Any
    ) -> tuple[list[jax.Array], list[jax.Array | None], dict[str, jax.Array]]:
        """Computes the results, and the derivatives of `sum(factor * result)` over rows and results.

        Args:
          logits: those of each layer.
          rows: what else belongs to rows, by name.
          factors: as `gradients_of_parts` takes them.
          wanted: the operands that derivatives are wanted of.
          dtype: dtype that the gradient of logits may have if they have another one.

        Returns:
          The results, the gradient of the logits of each layer, or None, and derivatives by what belongs to rows.
        """
        del dtype
        moving = [x for x, names in zip(logits, wanted.layers, strict=True) if names]
        of_rows = {name: rows[name] for name in wanted.rows}

        def multiplied(moving, of_rows):
            left = iter(moving)
            results = self.results(
                [next(left) if names else x for x, names in zip(logits, wanted.layers, strict=True)], rows | of_rows
            )
            return [result for result, factor in zip(results, factors, strict=False) if factor is not None], results

        values, pull, results = jax.vjp(multiplied, moving, of_rows, has_aux=True)
        gradients, found = pull(sharding.varying_as([factor for factor in factors if factor is not None], values))
        left = iter(gradients)
        return results, [next(left) if names else None for names in wanted.layers], found

    def bytes_of_logit(self, dtype, *, has_gradient: bool) -> int:
        """Returns the bytes that a logit takes, with its gradient, for hidden states of this dtype."""
        return jnp.dtype(self.logits_dtype or dtype).itemsize * (2 if has_gradient else 1)

    def share(self, numbers: jax.Array) -> jax.Array:
        """Returns numbers that all devices have as shares that add up: 0 on all devices except the first."""
        return jnp.where(lax.axis_index(self.axis_name) == 0, numbers, 0) if self.axis_name else numbers


@dataclass(frozen=True)
class LossHead(Head):
    """The cross-entropy of labels that are classes. Results are the losses, the log-sum-exp, and the entropy if asked for."""

    label_smoothing: float = 0.0  # share of the label's probability that is spread over the classes
    z_loss: float = 0.0  # factor of `lse**2` in the loss
    return_entropy: bool = False

    operands_of_loss: ClassVar[tuple[str, ...]] = ()  # names of those of rows that the loss takes beside labels and scale

    def of_rows(self, layers, rows):
        """Computes the results of all rows from one layer."""
        (layer,), head = layers, self.of_log_probs()
        flags = ("return_total",) * (self.label_smoothing > 0) + ("return_entropy",) * self.return_entropy
        of_rows = {name: array for name, array in rows.items() if name not in self.operands_of_loss}
        of_rows["labels"] = rows["labels"][:, None]
        log_p, *terms, _, _ = results_of_rows(head, self.axis_name, flags, layer | of_rows)
        return self.of_terms([-log_p[:, 0], *terms], layer["weight"].shape[head.class_axis], rows)

    def gradients_of_rows(self, layers, rows, factors, wanted):
        """Computes what `gradients_of_parts` returns, by a primitive."""
        (layer,), (of_layer,) = layers, wanted.layers
        wrt, n_results = (*of_layer, *wanted.rows), 2 + self.return_entropy
        params = {"head": self, "wrt": wrt, "implementation": forced_on_layer(self.implementation)}
        merging = {"axis_name": self.axis_name} if self.axis_name else {}
        found = bind(LINEAR_CROSS_ENTROPY_GRADIENT, layer | rows | {"factors": factors}, **params, **merging)
        gradients = dict(zip(wrt, found[n_results:], strict=True))
        by_layer, by_rows = ({name: gradients[name] for name in names} for names in (of_layer, wanted.rows))
        return found[:n_results], [by_layer], by_rows

    def with_gradients(self, logits, rows, factors, wanted, dtype):
        """Computes the results and derivatives of `Head`, in the memory of the logits if they have this dtype.

        Only losses have a factor: the other results of `of_rows` have derivatives of their own.
        """
        (x,), (factors,), scale = logits, factors, rows.get("scale")
        classes, labels = x.shape[1], rows["labels"][:, None]
        operands = {"x": x, "labels": labels, "t": factors[:, None]}
        params = {"axes": (1,), "dtype": factors.dtype, "soft_cap": self.logits_soft_cap}
        params |= {"label_smoothing": self.label_smoothing, "z_loss": self.z_loss}
        more = {"gradient_dtype": dtype, "return_entropy": self.return_entropy or "scale" in wanted.rows}
        if self.operands_of_loss:
            more["by_nll"] = lambda t, nll: self.by_nll(t[:, 0], nll[:, 0], rows)[:, None]
        if self.axis_name:
            operands |= {"scale": _column(scale), "cuts": self.cuts(classes)}
            gradient, *terms = across_devices.cross_entropy_gradient(self._run, **operands, **params, **more)
        elif scale is not None or x.dtype != dtype or self.return_entropy or self.operands_of_loss:
            forward = functools.partial(self._run, CROSS_ENTROPY)
            backward = functools.partial(self._run, CROSS_ENTROPY_VJP, replaces=True)
            operands["scale"] = _column(scale)
            gradient, *terms = xla.composed(forward, backward, operands, classes=classes, **params, **more)
        else:
            gradient, *terms = self._run(CROSS_ENTROPY_GRADIENT, operands, **params)
        terms = [jnp.squeeze(term, 1) for term in terms]
        found = {}
        if "scale" in wanted.rows:
            found["scale"] = self.share(self.by_scale(self.by_nll(factors, terms[0], rows), scale, terms, classes))
        results = self.of_terms(terms, classes, rows)
        return results[: 2 + self.return_entropy], [gradient], found

    def bytes_of_logit(self, dtype, *, has_gradient):
        """Returns the bytes that a logit takes, with its gradient, for hidden states of this dtype."""
        own = jnp.dtype(self.logits_dtype or dtype)
        return own.itemsize + (jnp.dtype(dtype).itemsize if has_gradient and own != dtype else 0)

    def of_log_probs(self) -> "LogProbHead":
        """Returns the head of the log-probabilities of the labels."""
        return LogProbHead(self.class_axes[0], self.logits_soft_cap, self.implementation, self.precision)

    def by_nll(self, factors: jax.Array, nll: jax.Array, rows: dict[str, jax.Array]) -> jax.Array:
        """Computes the derivatives of `sum(factors * losses)` by the cross-entropy without z-loss, from `nll`."""
        del nll, rows
        return factors

    def of_terms(self, terms: Sequence[jax.Array], classes: int, rows: dict[str, jax.Array]) -> list[jax.Array]:
        """Computes the results from `nll`, `lse`, the sum of the scores if there is smoothing, and the entropy or nothing."""
        del rows
        n_terms = 2 + (self.label_smoothing > 0)
        classes = max(classes, 1) * lax.axis_size(self.axis_name)
        losses = combined(*terms[:n_terms], label_smoothing=self.label_smoothing, z_loss=self.z_loss, classes=classes)
        return list(map(self.share, [losses, terms[1], *terms[n_terms:]]))

    def by_scale(self, factors, scale, terms, classes) -> jax.Array:
        """Computes the derivative of `sum(factors * losses)` by the scale of scores, from the terms of rows.

        The mean of the scores is `lse - entropy`, and a score over the scale is its derivative by the scale.
        """
        nll, lse, *total, entropy = terms
        share, mean = self.label_smoothing, lse - entropy
        slope = (1 - share) * (nll - entropy)
        if total:
            slope += share * (mean - total[0] / (max(classes, 1) * lax.axis_size(self.axis_name)))
        if self.z_loss:
            slope += 2 * self.z_loss * lse * mean
        return jnp.where(factors != 0, factors * slope / scale, 0)

    def _run(self, operation: Operation, operands: dict[str, Any], **params: Any) -> list[jax.Array]:
        return bind(operation, operands, implementation=self.implementation, **params)

    def cuts(self, classes: int) -> dict[int, Cut]:
        """Describes how devices share the classes; each device has this number of them."""
        return {1: Cut.of_part(self.axis_name, classes)}


@dataclass(frozen=True)
class LogProbHead:
    """The log-probabilities behind a linear layer: computes terms of rows, and derivatives, from logits `[rows, classes]`.

    Equal heads have equal hashes, as those of losses. Rows have `n` labels, `[rows, n]`, as this device counts its classes.
    """

    class_axis: int  # of the weight, 0 or 1
    logits_soft_cap: float | None
    implementation: str | None  # name of the one that must run, or None
    precision: str  # of products, as `jax.lax.dot` takes it

    def terms(self, x, labels, scale=None, *, return_total=False, return_entropy=False) -> list[jax.Array]:
        """Computes the state `(m, d)`, the scores of the labels before a scale, and what the flags ask for."""
        operands = {"x": x, "labels": labels[:, :1], "where": None, "scale": _column(scale)}
        options = self._params(return_total=return_total, return_entropy=return_entropy)
        m, d, chosen, *sums = across_devices.local_terms(self._run, **operands, **options, dtype=accumulator(x.dtype))
        if labels.shape[1] != 1:
            chosen = jnp.where(labels >= 0, xla.chosen_score(x, labels, (1,), self.logits_soft_cap, m.dtype), 0)
        m, d, *sums = (jnp.squeeze(number, 1) for number in (m, d, *sums))
        return [m, d, chosen, *sums]

    def tangents(self, x, t, labels, m, d, scale=None, t_scale=None, **flags) -> list[jax.Array]:
        """Computes `sum(p * u)`, `u[labels]` and what is asked for, from the tangents `t` of logits, and of `scale`."""
        if scale is None:
            u = t * xla.slope(x, self.logits_soft_cap)
        else:
            u = xla.scores_tangent(x, _column(scale), t, _column(t_scale), self.logits_soft_cap)
        return self._sums(x, u, labels, m, d, scale, **flags)

    def gradient(self, x, labels, dtype, wants_scale, m, d, a=None, b=None, c=None, e=None, scale=None):
        """Computes the gradient of logits, and the derivative by `scale` or None.

        The gradient is `(a * p + b * onehot(labels) + c + e * p * z) * ds/dx`, in this dtype.
        """
        is_one = labels.shape[1] == 1
        of_rows = dict(zip(("m", "d", "a", "c", "e", "scale"), map(_column, (m, d, a, c, e, scale)), strict=True))
        label = labels if is_one else jnp.where(labels[:, :1] == NO_ROW, NO_ROW, NO_CLASS)
        operands = {"x": x, "labels": label, "b": b if is_one else None, **of_rows}
        (gradient,) = self._run(CROSS_ENTROPY_VJP, operands, dtype=dtype, **self._params())
        if not is_one and b is not None:
            gradient = self._with_labels(gradient, x, labels, b, of_rows)
        of_scale = None
        if wants_scale:
            flags = {"return_total": c is not None, "return_entropy": e is not None}
            mean, chosen, *sums = self._sums(x, xla.capped(x, self.logits_soft_cap), labels, m, d, scale, **flags)
            # A number of 0 leaves out what it multiplies: the mean of a row that holds NaN, or the score of a class that a bias
            # of -inf excludes.
            asked = [numbers[:, None] for numbers in (c, e) if numbers is not None]
            pairs = [(_column(a), mean[:, None]), (b, chosen), *zip(asked, [total[:, None] for total in sums], strict=True)]
            terms = [numbers * jnp.where(numbers != 0, what, 0) for numbers, what in pairs if numbers is not None]
            of_scale = sum([jnp.sum(term, 1) for term in terms], start=jnp.zeros_like(m))
        return gradient, of_scale

    def _sums(self, x, u, labels, m, d, scale, *, return_total=False, return_entropy=False):
        """Computes the sums of `tangents` from those of the scores, `u`."""
        operands = {"x": x, "m": _column(m), "d": _column(d), "t": u, "labels": labels[:, :1], "scale": _column(scale)}
        options = self._params(return_total=return_total, return_entropy=return_entropy)
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
        total = xla.cross_entropy_vjp(entries, b=None, labels=none, where=None, **of_rows, **params)
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
