"""The truth of cross-entropy and its gradient in float64, and the error that a result may have."""

from dataclasses import dataclass

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
