"""The clipped loss of a policy from the log-probability of each token, and this loss behind a linear layer.

A sum of losses of a cross-entropy knows the factor of each row before its logits. Here the factor is the derivative of the loss
by the log-probability, which is known when the classes of the row are reduced. So a sum takes three products, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax.ops.cross_entropy.linear_gradient import OF_POLICY
from jaxsoftmax.ops.cross_entropy.loss import LossHead


def policy_losses(log_p: jax.Array, of_tokens: Mapping[str, Any], low: float, high: float) -> jax.Array:
    """Computes the loss of each token; `low` and `high` bound the logarithm of the ratio.

    The derivative is by `log_p`, and by `kl_weight`.

    Args:
      log_p: the log-probabilities.
      of_tokens: by name `advantages`; `old_log_p`, absent for a ratio of 1; and `reference_log_p` with `kl_weight`, absent if
        the loss has no divergence. Other names have no influence.
      low: least logarithm of the ratio.
      high: largest logarithm of the ratio.
    """
    log_ratio = log_p - lax.stop_gradient(of_tokens.get("old_log_p", log_p))
    losses = _clipped(log_ratio, lax.stop_gradient(of_tokens["advantages"]), low, high)
    if "kl_weight" in of_tokens:
        d = lax.stop_gradient(of_tokens["reference_log_p"]) - log_p
        losses += of_tokens["kl_weight"] * (jnp.expm1(d) - d)
    return losses


def _clipped(log_ratio: jax.Array, advantages: jax.Array, low: float, high: float) -> jax.Array:
    """Returns the clipped loss of each token.

    Only one bound acts: `high` where the advantage is positive, `low` where it is negative. The ratio is clipped before the
    exponential, so that the gradient of a bound, 0, is not multiplied by an infinite ratio. Where the advantage is 0 any bound
    serves that keeps the ratio finite.
    """
    least = jnp.where(advantages < 0, low, -jnp.inf).astype(log_ratio.dtype)
    most = jnp.where(advantages > 0, high, jnp.where(advantages < 0, jnp.inf, 0)).astype(log_ratio.dtype)
    return -advantages * jnp.exp(jnp.clip(log_ratio, least, most))


@dataclass(frozen=True)
class PolicyHead(LossHead):
    """The loss of a policy. Results are the losses, the log-probabilities, and the entropy if asked for."""

    label_smoothing: float = field(default=0.0, init=False)  # it has neither smoothing nor z-loss
    z_loss: float = field(default=0.0, init=False)
    low: float = 0.0  # least and largest logarithm of the ratio
    high: float = 0.0

    operands_of_loss: ClassVar[tuple[str, ...]] = OF_POLICY

    def by_nll(self, factors, nll, rows):
        """Computes the derivatives of `sum(factors * losses)` by `nll`."""
        # Rows that fill up a part have any label, whose loss may be infinite.
        losses, pull = jax.vjp(lambda nll: self._losses(nll, rows), jnp.where(factors != 0, nll, 0))
        return pull(factors.astype(losses.dtype))[0]

    def of_terms(self, terms: Sequence[jax.Array], classes: int, rows: dict[str, jax.Array]) -> list[jax.Array]:
        """Computes the results from `nll`, `lse`, and the entropy or nothing."""
        nll, _, *entropy = terms
        return list(map(self.share, [self._losses(nll, rows), -nll, *entropy]))

    def _losses(self, nll, rows) -> jax.Array:
        return policy_losses(-nll, rows, self.low, self.high)
