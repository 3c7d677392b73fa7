"""The truth of cross-entropy and its gradient in float64, and the error that a result may have."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxsoftmax._report.truth import EPS, TINY, Rows, Truth, rows, to64


@dataclass
class Losses:
    """The truth of cross-entropy, for rows along one axis.

    Attributes:
      loss, lse: truths, without the axis.
      rows: the softmax of the scores.
      onehot: True at the entry of each row's label.
      counts: True for rows that count; the axis keeps size 1.
      slope: the derivative of the scores by the logits.
      share: share of the labels that is spread over the classes.
      z_loss: the factor of `lse**2`.
      full_lse: the log-sum-exp; the axis keeps size 1.
    """

    loss: Truth
    lse: Truth
    rows: Rows
    onehot: np.ndarray
    counts: np.ndarray
    slope: np.ndarray
    share: float
    z_loss: float
    full_lse: np.ndarray

    def gradient(self, cotangent) -> Truth:
        """Returns the gradient of the sum of losses times `cotangent`, which has the shape of the losses."""
        r, axis = self.rows, self.rows.axes[0]
        g = np.where(self.counts, np.expand_dims(to64(cotangent), axis), 0.0)
        lse = np.where(self.counts, self.full_lse, 0.0)
        with np.errstate(all="ignore"):
            classes = np.maximum(r.sum(r.where), 1)
            a, b, c = g * (1 + 2 * self.z_loss * lse), -(1 - self.share) * g, -self.share * g / classes
            parts = [np.where(a == 0, 0, a * r.y), b * self.onehot, np.where(r.where, c, 0)]
            value = sum(parts)
            value = np.where(value == 0, 0, value * self.slope)
            unit = (16 + 3 * r.distance) * EPS
            budget = unit * np.abs(parts[0]) + 8 * EPS * sum(map(np.abs, parts)) * (1 + np.abs(self.slope))
            budget += 16 * EPS * np.abs(g) * self.z_loss * (np.abs(lse) + 1) * r.y
            budget += TINY * np.maximum(1, np.abs(a))  # weights may be flushed
        return Truth(value, budget)


def cross_entropy(
    x, labels, axis=-1, where=None, *, label_smoothing=0.0, z_loss=0.0, logits_soft_cap=None, ignore_index=None
) -> Losses:
    """Computes the truth of the losses; arguments are those of `jaxsoftmax.cross_entropy`."""
    smoothing, cap = label_smoothing, logits_soft_cap
    x, axis = to64(x), axis % np.ndim(x)
    labels = np.expand_dims(np.asarray(labels), axis)
    scores = x if cap is None else cap * np.tanh(x / cap)
    r = rows(scores, axis, where)
    n = x.shape[axis]
    onehot = np.arange(n).reshape([-1 if a == axis else 1 for a in range(x.ndim)]) == labels
    counts = np.any(r.where, axis, keepdims=True) if where is not None else np.ones(labels.shape, bool)
    counts &= np.ones(labels.shape, bool) if ignore_index is None else labels != ignore_index
    inside = (labels >= 0) & (labels < n)
    with np.errstate(all="ignore"):
        chosen = np.where(inside, np.take_along_axis(scores, np.clip(labels, 0, n - 1).astype(np.int64), axis), np.nan)
        log_d = np.log(r.d)
        lse = np.where(np.isinf(r.m), r.m, r.m + log_d)
        nll = np.where(np.isfinite(r.m), log_d - (chosen - r.m), lse - chosen)
        classes = np.maximum(r.sum(r.where), 1)
        total = np.sum(np.where(r.where, scores, 0.0), axis, keepdims=True)
        size = np.sum(np.where(r.where, np.abs(scores), 0.0), axis, keepdims=True)
        loss = nll if not smoothing else (1 - smoothing) * nll + smoothing * (lse - total / classes)
        loss = loss if not z_loss else loss + z_loss * lse * lse
        of_lse = 8 * EPS * (np.abs(r.m) + np.abs(log_d) + 1)
        budget = 8 * EPS * (np.abs(chosen - r.m) + np.abs(log_d) + 1)
        if smoothing:
            budget += smoothing * (of_lse + 8 * EPS * size / classes)
        if z_loss:
            budget += z_loss * (2 * np.abs(lse) * of_lse + 8 * EPS * lse * lse)
        budget += 0 if cap is None else 32 * EPS * cap
    loss, budget = np.where(counts, loss, 0.0), np.where(counts & np.isfinite(loss), budget, 0.0) + TINY
    slope = np.ones_like(x) if cap is None else 1 - np.tanh(x / cap) ** 2
    finite = np.where(np.isfinite(lse), of_lse, 0.0) + TINY + (0 if cap is None else 32 * EPS * cap)
    squeezed = [np.squeeze(part, axis) for part in (loss, budget, lse, finite)]
    return Losses(Truth(*squeezed[:2]), Truth(*squeezed[2:]), r, onehot, counts, slope, smoothing, z_loss, lse)


@dataclass
class Policy:
    """The truth of the log-probability of a chosen class, and of the entropy, for rows along one axis.

    Attributes:
      log_p, entropy, lse: truths, without the axis.
      rows: the softmax of the scores.
      onehot: True at the entry of each row's id.
      slope: the derivative of the scores by the logits.
      bend: the error of the scores that a cap causes, or 0.
    """

    log_p: Truth
    entropy: Truth
    lse: Truth
    rows: Rows
    onehot: np.ndarray
    slope: np.ndarray
    bend: Any

    def gradient(self, of_log_p, of_entropy, of_lse) -> Truth:
        """Returns the gradient of the sum of the results times their cotangents, which have the shape of the results."""
        r, axis = self.rows, self.rows.axes[0]
        t, h, g = (np.expand_dims(to64(cotangent), axis) for cotangent in (of_log_p, of_entropy, of_lse))
        with np.errstate(all="ignore"):
            z = np.where(r.y > 0, r.scores - r.m, 0.0)
            mean = r.sum(r.y * z)
            parts = [t * self.onehot, (g - t) * r.y, -h * r.y * (z - mean)]
            value = np.where(r.where, sum(parts), t * self.onehot) * self.slope
            unit = (16 + 3 * r.distance) * EPS + self.bend
            size = r.y * (np.abs(g - t) + np.abs(h) * (np.abs(z) + np.abs(mean) + 1))
            budget = (unit * size + 16 * EPS * np.abs(parts[0])) * (np.abs(self.slope) + np.abs(self.steepest))
            budget += (
                TINY * np.maximum(1, np.abs(t) + 128 * np.abs(h) + np.abs(g)) * np.maximum(1, self.steepest)
            )  # flushed weights
        return Truth(value, budget)

    @property
    def steepest(self) -> np.ndarray:
        """Largest absolute derivative of the scores of each row."""
        return np.max(np.abs(self.slope), self.rows.axes, keepdims=True)


def log_probs(x, ids, axis=-1, where=None, *, scale=None, logits_soft_cap=None) -> Policy:
    """Computes the truth of `jaxsoftmax.log_probs`; `scale` has size 1 along `axis`, or is a number."""
    cap, factor = logits_soft_cap, 1.0 if scale is None else to64(scale)
    x, axis = to64(x), axis % np.ndim(x)
    ids = np.expand_dims(np.asarray(ids), axis)
    bent = x if cap is None else cap * np.tanh(x / cap)
    slope = factor * (np.ones_like(x) if cap is None else 1 - np.tanh(x / cap) ** 2)
    with np.errstate(all="ignore"):
        r = rows(bent * factor, axis, where)
        n = x.shape[axis]
        onehot = np.arange(n).reshape([-1 if a == axis else 1 for a in range(x.ndim)]) == ids
        at = np.clip(ids, 0, n - 1).astype(np.int64)
        chosen, log_d = np.take_along_axis(r.scores, at, axis), np.log(r.d)
        z, lse = chosen - r.m, np.where(np.isinf(r.m), r.m, r.m + log_d)
        log_p = np.where((ids >= 0) & (ids < n), np.where(np.isfinite(r.m), z - log_d, chosen - lse), np.nan)
        distances = np.where(r.y > 0, r.m - r.scores, 0.0)
        entropy = log_d + r.sum(r.y * distances)
        bend = 0.0 if cap is None else 64 * EPS * cap * np.abs(factor)
        # A sum of many small weights and a large one rounds at each addition: a lane adds up one of 512 weights, or more.
        added = EPS * n / 512
        of_log_p = 8 * EPS * (np.abs(np.where(np.isfinite(z), z, 0)) + np.abs(log_d) + 1) + added + bend
        # A weight errs by a few roundings, and by as much as its exponent times one.
        of_entropy = EPS * (8 + 8 * np.abs(entropy) + 4 * r.sum(r.y * distances * (distances + 1)))
        of_entropy += (added + bend) * (1 + np.abs(entropy))
        of_lse = 8 * EPS * (np.abs(r.m) + np.abs(log_d) + 1) + added + bend
        entropy = np.where(np.any(r.where, axis, keepdims=True), entropy, 0.0)
    budgets = (np.where(np.isfinite(b), b, 0.0) + TINY for b in (of_log_p, of_entropy, of_lse))
    pairs = zip((log_p, entropy, lse), budgets, strict=True)
    log_p, entropy, lse = (Truth(np.squeeze(value, axis), np.squeeze(budget, axis)) for value, budget in pairs)
    return Policy(log_p, entropy, lse, r, onehot, slope, bend)
