"""The truth of divergences of two softmaxes, and of their gradients, with their budgets."""

from dataclasses import dataclass

import numpy as np

from jaxsoftmax._report.truth import EPS, TINY, Rows, Truth, rows, to64


@dataclass
class Divergence:
    """The truth of a divergence, for rows along some axes.

    Attributes:
      value: truth of the divergence, without the axes.
      p, q: softmaxes of both arrays.
      scale, y_scale: factors of the scores; the axes keep size 1.
    """

    value: Truth
    p: Rows
    q: Rows
    scale: np.ndarray
    y_scale: np.ndarray

    def gradients(self, cotangent) -> tuple[Truth, Truth]:
        """Returns the gradients of the sum of divergences times `cotangent`, by both arrays.

        A weight errs by a few roundings, and by as much as its exponent times one; so does the mean.
        """
        p, q = self.p, self.q
        g = np.expand_dims(to64(cotangent), p.axes)
        with np.errstate(all="ignore"):
            difference = _difference(p, q)
            mean = p.sum(p.y * difference)
            by_x = np.where(p.y > 0, g * p.y * (difference - mean), 0)
            by_y = np.where(p.where, g * (q.y - p.y), 0)
            unit_of_p, unit_of_q = (16 + 3 * p.distance) * EPS, (16 + 3 * q.distance) * EPS
            size = np.abs(difference) + np.abs(mean) + _size(p, q) + p.sum(p.y * _size(p, q)) + 1
            of_x = np.abs(g) * p.y * (unit_of_p * size + p.sum(p.y * unit_of_p * (np.abs(difference) + 1)))
            of_y = np.abs(g) * (unit_of_p * p.y + unit_of_q * q.y)
            flushed = TINY * np.maximum(1, np.abs(g)) * np.maximum(1, np.where(np.isfinite(size), size, 1))
            pairs = ((by_x, of_x, self.scale), (by_y, of_y, self.y_scale))
            results = [Truth(value * factor, (budget + flushed) * np.abs(factor) + flushed) for value, budget, factor in pairs]
        return results[0], results[1]


def kl_divergence(x, y, axis=-1, where=None, *, scale=None, y_scale=None) -> Divergence:
    """Computes the truth of `jaxsoftmax.kl_divergence`; a scale keeps size 1 along `axis`, or is a number.

    The terms of both signs cancel where the softmaxes are near each other. Each exponent errs by its own rounding, a weight by
    a few, and by as much as its exponent times one.
    """
    scale, y_scale = (np.asarray(1.0) if factor is None else to64(factor) for factor in (scale, y_scale))
    with np.errstate(all="ignore"):
        p, q = rows(to64(x) * scale, axis, where), rows(to64(y) * y_scale, axis, where)
        difference = _difference(p, q)
        terms = p.y * difference
        value = p.sum(terms) + np.log(q.d) - np.log(p.d)
        is_state = (p.d > 0) & (p.d < np.inf) & (q.d > 0) & (q.d < np.inf)
        value = np.where(is_state, np.maximum(value, 0), np.nan)
        value = np.where(np.any(p.where, p.axes, keepdims=True), value, 0.0)
        of_weights = (
            p.sum((8 + 4 * p.distance) * np.abs(terms)) + p.sum(4 * (p.distance + 1) * p.y) + q.sum(4 * (q.distance + 1) * q.y)
        )
        budget = EPS * (8 + 8 * np.abs(np.log(q.d / p.d)) + of_weights + 4 * p.sum(p.y * _size(p, q)))
    budget = np.where(np.isfinite(budget), budget, 0.0) + TINY
    return Divergence(Truth(np.squeeze(value, p.axes), np.squeeze(budget, p.axes)), p, q, scale, y_scale)


def _difference(p: Rows, q: Rows) -> np.ndarray:
    """Returns the differences of exponents, 0 where `p` is 0."""
    return np.where(p.y > 0, (p.scores - p.m) - (q.scores - q.m), 0.0)


def _size(p: Rows, q: Rows) -> np.ndarray:
    """Returns the sizes of the exponents that are subtracted, 0 where `p` is 0."""
    return np.where(p.y > 0, np.abs(p.scores - p.m) + np.abs(q.scores - q.m), 0.0)


@dataclass
class Mixture:
    """The truth of a Jensen-Shannon divergence, for rows along some axes.

    Attributes:
      value: truth of the divergence, without the axes.
      parts: for each array its share of the mixture, its softmax, the logarithms of the quotients by the mixture, the part of
        the mixture that the other softmax has, and the factor of the scores; the axes keep size 1.
    """

    value: Truth
    parts: tuple[tuple[float, Rows, np.ndarray, np.ndarray, np.ndarray], ...]

    def gradients(self, cotangent) -> tuple[Truth, Truth]:
        """Returns the gradients of the sum of divergences times `cotangent`, by both arrays.

        A weight errs as in the value. A logarithm errs by a few roundings, by one of the logarithm of `p / q`, and by the
        share that the other softmax has of the mixture times the roundings of both exponents.
        """
        (_, p, of_p, *_), (_, q, of_q, *_) = self.parts
        results = []
        with np.errstate(all="ignore"):
            size = p.distance + q.distance + np.abs(np.log(p.d)) + np.abs(np.log(q.d))
            apart = np.where((p.y > 0) & (q.y > 0), np.abs(of_p - of_q), 0)
        for share, own, logs, other, factor in self.parts:
            g = np.expand_dims(to64(cotangent), own.axes) * share
            with np.errstate(all="ignore"):
                mean = own.sum(own.y * logs)
                value = np.where(own.where, g * own.y * (logs - mean), 0)
                unit, of_logs = (8 + 4 * own.distance) * EPS, EPS * (8 + 2 * apart + 4 * other * size)
                slack = unit * (np.abs(logs) + np.abs(mean)) + of_logs + own.sum(own.y * (unit * np.abs(logs) + of_logs))
                flushed = TINY * np.maximum(1, np.abs(g)) * (1 + np.abs(logs) + np.abs(mean))
                budget = np.abs(g) * own.y * slack + flushed
            results.append(Truth(value * factor, budget * np.abs(factor) + TINY))
        return results[0], results[1]


def js_divergence(x, y, weight=0.5, axis=-1, where=None, *, scale=None, y_scale=None) -> Mixture:
    """Computes the truth of `jaxsoftmax.js_divergence`; a scale keeps size 1 along `axis`, or is a number.

    A weight errs by a few roundings, and by as much as its exponent times one. A logarithm of a quotient errs by a few
    roundings. What both logarithms of an entry share, such as the roundings of exponents, cancels.
    """
    scale, y_scale = (np.asarray(1.0) if factor is None else to64(factor) for factor in (scale, y_scale))
    with np.errstate(all="ignore"):
        p, q = rows(to64(x) * scale, axis, where), rows(to64(y) * y_scale, axis, where)
        mixture, parts = weight * p.y + (1 - weight) * q.y, []
        value, budget = np.zeros_like(p.m), np.zeros_like(p.m)
        for share, own, factor in ((weight, p, scale), (1 - weight, q, y_scale)):
            is_mixture = 0 < weight < 1
            logs = np.where(own.y > 0, np.log(own.y / mixture), 0) if is_mixture else np.zeros_like(own.y)
            terms = np.where(np.isnan(own.y), np.nan, own.y * logs)
            value = value + share * own.sum(terms)
            budget = budget + share * own.sum((8 + 4 * own.distance) * np.abs(terms) + 8 * own.y)
            other = 1 - np.where(mixture > 0, share * own.y / mixture, 1)
            parts.append((share if is_mixture else 0.0, own, logs, other, factor))
        value = np.where(np.any(p.where, p.axes, keepdims=True), value, 0.0)
    budget = EPS * np.where(np.isfinite(budget), budget, 0.0) + TINY
    return Mixture(Truth(np.squeeze(value, p.axes), np.squeeze(budget, p.axes)), tuple(parts))
