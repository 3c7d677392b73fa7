"""Losses of reinforcement learning and of preference learning, from log-probabilities of tokens.

Each loss takes arrays `[*batch, length]`, as `jaxsoftmax.log_probs` returns them from logits, and
`jaxsoftmax.linear_log_probs` from the last layer without its logits in memory. The arithmetic is
float32, or float64 if an array is float64, and plain `jax.numpy`: it runs on every platform and under every transformation.

A mask such as `where` names the tokens that count. What an array holds at other tokens, the padding, has no influence on a loss
or on a gradient, even if it is NaN. NaN at a token that counts gives NaN. A ratio of probabilities that overflows is infinite
unless it is clipped.

Examples:
  >>> import jax
  >>> import jax.numpy as jnp
  >>> import jaxsoftmax
  >>> from jaxsoftmax import rl
  >>> logits = jax.random.normal(jax.random.key(0), (2, 4, 6, 100))  # prompts, samples of each, length, classes
  >>> tokens = jax.random.randint(jax.random.key(1), (2, 4, 6), 0, 100)
  >>> rewards = jnp.array([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 1.0]])
  >>> old_log_p = jaxsoftmax.log_probs(logits, tokens)
  >>> def loss(logits):
  ...     log_p = jaxsoftmax.log_probs(logits, tokens)
  ...     return rl.policy_gradient_loss(log_p, old_log_p, rl.group_advantages(rewards))
  >>> moved = jnp.any(jax.grad(loss)(logits) != 0, axis=(2, 3))  # equal rewards teach nothing
  >>> print(moved)
  [[ True  True  True  True]
   [False False False False]]
"""

import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from jaxsoftmax._core import arguments
from jaxsoftmax._core.choose import check_implementation
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.cross_entropy.linear_layer import linear_layer, more_operands, precision_of_products, reduced_losses
from jaxsoftmax.ops.cross_entropy.policy import PolicyHead, policy_losses

__all__ = ["dpo_loss", "group_advantages", "linear_policy_gradient_loss", "orpo_loss", "policy_gradient_loss", "simpo_loss"]


def policy_gradient_loss(
    log_p: ArrayLike,
    old_log_p: ArrayLike | None,
    advantages: ArrayLike,
    *,
    clip: float | tuple[float, float] = 0.2,
    reference_log_p: ArrayLike | None = None,
    kl_weight: ArrayLike = 0.0,
    entropy: ArrayLike | None = None,
    entropy_weight: ArrayLike = 0.0,
    where: ArrayLike | None = None,
    reduction: Literal["token", "sequence", "none"] = "token",
) -> jax.Array:
    """Computes the clipped loss of PPO, GRPO and DAPO.

    With `ratio = exp(log_p - old_log_p)` and `low, high = clip`, the loss of a token is

        -min(ratio * advantage, clip(ratio, 1 - low, 1 + high) * advantage)
            + kl_weight * (exp(d) - d - 1) - entropy_weight * entropy,    d = reference_log_p - log_p

    The second term estimates the divergence from the policy of `reference_log_p`. It is not negative, and its mean over tokens
    that the policy draws is the Kullback-Leibler divergence of policy and reference. A ratio that overflows and is clipped has
    the gradient 0. An advantage of 0 gives 0, whatever the ratio is.

    The gradient is by `log_p` and `entropy`. All other arrays count as constants.

    Args:
      log_p: floating array `[*batch, length]`, the log-probabilities of the tokens under the policy that is trained.
      old_log_p: floating array in the shape of `log_p`, the log-probabilities under the policy that drew the tokens. None
        stands for the policy itself: the ratio is 1, and the gradient that of REINFORCE.
      advantages: real array `[*batch]`, one number for each sequence, or `[*batch, length]`, one for each token.
      clip: how far the ratio may move below and above 1: a concrete number for both, or a pair of them; 0.2 by default.
        `math.inf` does not clip.
      reference_log_p: floating array in the shape of `log_p`, the log-probabilities under a policy that is not trained, or
        None (the default).
      kl_weight: real number that multiplies the estimate of the divergence; 0 by default, which leaves it out. It may be
        traced.
      entropy: floating array in the shape of `log_p`, such as `log_probs` with `return_entropy` returns, or None (the default).
      entropy_weight: real number that multiplies the entropy; 0 by default, which leaves it out. It may be traced.
      where: boolean mask that broadcasts to the shape of `log_p`, True at tokens that count, or None (the default).
      reduction: "token" (the default) returns the mean over all tokens, as in DAPO. "sequence" returns the mean over
        sequences of their means over tokens, as in GRPO; a sequence without tokens does not count. "none" returns the
        loss of each token. Inside a `shard_map` a mean is that of the tokens of one device: for the mean over all, divide a
        `psum` of sums by a `psum` of counts.

    Returns:
      A scalar, or an array `[*batch, length]` for `reduction="none"`; float32, or float64 if an array is float64. A token that
      does not count gives 0, and so does a mean over no tokens.

    Raises:
      TypeError: an array is not floating, `advantages` are not real, `where` is not boolean, `clip` is not made of concrete
        real numbers, or a weight is not a real number.
      ValueError: a shape does not fit `log_p`, `clip` is negative or no pair, a weight comes without its array, or
        `reduction` is not one of the three.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import rl
      >>> log_p = jnp.log(jnp.array([[0.5, 0.2, 0.9], [0.1, 0.4, 0.3]]))
      >>> old_log_p = jnp.log(jnp.array([[0.5, 0.1, 0.9], [0.2, 0.4, jnp.nan]]))
      >>> mask = jnp.array([[True, True, True], [True, True, False]])
      >>> losses = rl.policy_gradient_loss(log_p, old_log_p, jnp.array([1.0, -1.0]), where=mask, reduction="none")
      >>> expected = jnp.array([[-1.0, -1.2, -1.0], [0.8, 1.0, 0.0]])  # two of the ratios 2 and 0.5 are clipped
      >>> bool(jnp.allclose(losses, expected))
      True

    Source: Schulman et al. 2017, arXiv:1707.06347, for the clipped ratio; Shao et al. 2024, arXiv:2402.03300 (GRPO), for the
    estimate of the divergence and the mean over sequences; Yu et al. 2025, arXiv:2503.14476 (DAPO), for two bounds and the mean
    over tokens.
    """
    name = "policy_gradient_loss"
    arguments.check_choice(name, "reduction", reduction, "token", "sequence", "none")
    low, high = _bounds(name, clip)
    log_p = _tokens(name, "log_p", log_p)
    like = {"old_log_p": old_log_p, "reference_log_p": reference_log_p, "entropy": entropy}
    like = {key: _shaped(name, key, array, log_p, "log_p") for key, array in like.items() if array is not None}
    advantages = _advantages(name, advantages, log_p, "log_p")
    where = _mask(name, "where", where, log_p)
    dtype = accumulator(log_p.dtype, advantages.dtype, *[array.dtype for array in like.values()])
    log_p, advantages = _counted(log_p, where, dtype), _counted(advantages, where, dtype)
    like = {key: _counted(array, where, dtype) for key, array in like.items()}
    of_tokens = like | {"advantages": advantages}
    weight = _weight(name, "kl_weight", kl_weight, "reference_log_p", reference_log_p, dtype)
    if weight is not None:
        of_tokens["kl_weight"] = weight
    losses = policy_losses(log_p, of_tokens, low, high)
    weight = _weight(name, "entropy_weight", entropy_weight, "entropy", entropy, dtype)
    if weight is not None:
        losses -= weight * like["entropy"]
    return _reduced(losses, where, reduction)


def linear_policy_gradient_loss(
    hidden: ArrayLike,
    weight: ArrayLike,
    tokens: ArrayLike,
    old_log_p: ArrayLike | None,
    advantages: ArrayLike,
    *,
    clip: float | tuple[float, float] = 0.2,
    reference_log_p: ArrayLike | None = None,
    kl_weight: ArrayLike = 0.0,
    where: ArrayLike | None = None,
    reduction: Literal["token", "sequence", "sum"] = "token",
    bias: ArrayLike | None = None,
    temperature: ArrayLike | None = None,
    class_axis: int = -1,
    logits_soft_cap: float | None = None,
    axis_name: str | Sequence[str] | None = None,
    implementation: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the clipped loss of PPO, GRPO and DAPO from the last layer, with a matrix product less for its gradients.

    The loss equals `policy_gradient_loss(linear_log_probs(hidden, weight, tokens, ...), old_log_p, advantages, ...)`, whose
    gradients compute the logits once more. Here the same logits serve the loss and the gradients, for a part of the tokens
    at a time: the loss of a token depends on no other token.

    The gradient is by `hidden`, `weight`, `bias` and `temperature`. All else counts as a constant, `kl_weight` too. A loss with
    an entropy, or with a ratio of whole sequences, needs `linear_log_probs`.

    Args:
      hidden: floating array `[*batch, length, H]` of 16 bits or more, the input of the last layer.
      weight: floating array `[H, classes]`, or `[classes, H]` with `class_axis=0`. It is multiplied in the dtype of `hidden`.
        Pass a float32 parameter as it is: its gradient adds up over parts in the dtype of `weight`.
      tokens: integers `[*batch, length]`. A token that is not the index of a class gives NaN.
      old_log_p: floating array `[*batch, length]`, the log-probabilities of the tokens under the policy that drew them. None
        stands for the policy itself: the ratio is 1, and the gradient that of REINFORCE.
      advantages: real array `[*batch]`, one number for each sequence, or `[*batch, length]`, one for each token.
      clip: how far the ratio may move below and above 1: a concrete number for both, or a pair of them, such as (0.2, 0.28)
        for ratios from 0.8 to 1.28; 0.2 by default. `math.inf` does not clip.
      reference_log_p: floating array `[*batch, length]`, the log-probabilities under a policy that is not trained, or None
        (the default).
      kl_weight: real number that multiplies the estimate of the divergence from that policy; 0 by default, which leaves it
        out. It may be traced.
      where: boolean mask that broadcasts to `[*batch, length]`, True at tokens that count, or None (the default). Arrays may
        hold anything at other tokens, except a concrete `temperature`.
      reduction: "token" (the default) and "sequence" return the means that `policy_gradient_loss` returns, over all devices if
        arrays are sharded. "sum" returns the sum over the tokens that count, for batches in several calls or inside a
        `shard_map`: divide the sum of sums by the number of tokens of all. There are no losses of tokens.
      bias: floating array that broadcasts to `[classes]`; None (the default) for no bias.
      temperature: real number or array that broadcasts to `[*batch, length]`, larger than 0, which divides the scores; None
        (the default) for 1: that of the sampler, with which `old_log_p` and `reference_log_p` were computed too. It may be
        traced. In a JAX array a temperature that is not larger than 0 gives NaN.
      class_axis: axis of `weight` that has the classes; -1 by default.
      logits_soft_cap: the scores are `logits_soft_cap * tanh(logits / logits_soft_cap)`; a concrete positive number. None
        (the default) for no cap.
      axis_name: name or names of the mesh axes over which the classes of `weight` and `bias` are sharded, for calls inside
        a `shard_map`; None (the default) if they are not sharded there. All other arguments are the same on all devices of
        these axes, which are not those of data parallelism.
      implementation: name of the implementation that must run: "mosaic", "triton" or "xla". None (the default) takes the
        best one for the platform, shape and dtype.

    Returns:
      The loss, a scalar, and the log-probabilities of the tokens, `[*batch, length]`, which count as constants, and are 0 at
      tokens that do not count; float32, or float64 if `hidden` is float64.

    Raises:
      TypeError: an array has a wrong kind of dtype, or an argument that must be concrete is traced.
      ValueError: a shape does not fit `hidden` or `weight`, `clip` is negative or no pair, `kl_weight` comes without its
        array, a number is out of range, or `reduction` or `implementation` is no name of one.
      NotImplementedError: the named `implementation` cannot run this call. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> import jaxsoftmax
      >>> from jaxsoftmax import rl
      >>> keys = jax.random.split(jax.random.key(0), 3)
      >>> hidden = jax.random.normal(keys[0], (4, 6, 16))  # samples, length, units
      >>> weight = jax.random.normal(keys[1], (16, 100))
      >>> tokens = jax.random.randint(keys[2], (4, 6), 0, 100)
      >>> advantages = rl.group_advantages(jnp.array([0.0, 1.0, 1.0, 0.0]))
      >>> def loss(hidden, weight):
      ...     return rl.linear_policy_gradient_loss(hidden, weight, tokens, None, advantages)
      >>> with jax.default_matmul_precision("highest"):
      ...     (value, log_p), gradients = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, weight)
      ...     expected = jaxsoftmax.linear_log_probs(hidden, weight, tokens)
      >>> bool(jnp.allclose(log_p, expected, atol=1e-5))
      True
      >>> print([gradient.shape for gradient in gradients])
      [(4, 6, 16), (16, 100)]

    Memory, work and kernels are those of `linear_cross_entropy` with `reduction="mean"`, except that logits in memory are not
    rounded: three products, and four in float16 or for examples of a `vmap` that share the layer.

    Source: that of `policy_gradient_loss`; Milakov and Gimelshein 2018, arXiv:1805.02867, for the log-sum-exp.
    """
    name = "linear_policy_gradient_loss"
    check_implementation(CROSS_ENTROPY_FAMILY, name, implementation)
    arguments.check_choice(name, "reduction", reduction, "token", "sequence", "sum")
    low, high = _bounds(name, clip)
    hidden, weight, axis = linear_layer(name, hidden, weight, class_axis)
    if hidden.ndim < 2:
        raise ValueError(f"{name}: hidden must be [*batch, length, H], got shape {hidden.shape}")
    rows, kind, classes = hidden.shape[:-1], accumulator(hidden.dtype), weight.shape[axis]
    tokens = arguments.array(name, "tokens", tokens, "integers")
    if tokens.shape != rows:
        raise ValueError(f"{name}: tokens must have the shape {rows} of hidden without its last axis, got {tokens.shape}")
    mask = _mask(name, "where", where, tokens)
    of_tokens = {"old_log_p": old_log_p, "reference_log_p": reference_log_p}
    of_tokens = {key: _shaped(name, key, array, tokens, "tokens") for key, array in of_tokens.items() if array is not None}
    of_tokens["advantages"] = _advantages(name, advantages, tokens, "tokens")
    of_divergence = _weight(name, "kl_weight", kl_weight, "reference_log_p", reference_log_p, kind)
    if of_divergence is None:
        of_tokens.pop("reference_log_p", None)
    else:
        of_tokens["kl_weight"] = jnp.full(rows, of_divergence, kind)
    sample_weight = None
    if where is not None:
        share = mask.astype(kind)
        sample_weight = share / jnp.maximum(jnp.sum(share, -1, keepdims=True), 1) if reduction == "sequence" else share
    more = {"bias": bias, "temperature": temperature, "sample_weight": sample_weight}
    operands = {"hidden": hidden, "weight": weight, "labels": tokens} | more_operands(name, rows, classes, kind, **more)
    operands |= {key: lax.stop_gradient(_counted(array, mask, kind)) for key, array in of_tokens.items()}
    cap = None if logits_soft_cap is None else arguments.soft_cap(name, logits_soft_cap, kind)
    names, dtype = arguments.axis_names(name, axis_name), jnp.dtype(kind).name
    head = PolicyHead((axis,), dtype, cap, implementation, precision_of_products(), names, low=low, high=high)
    loss, log_p = reduced_losses(name, head, operands, "sum" if reduction == "sum" else "mean", (True,))
    return loss, lax.stop_gradient(log_p)


def group_advantages(rewards: ArrayLike, *, axis: int = -1, normalize: bool = True, eps: float = 1e-4) -> jax.Array:
    """Compares each reward with the others of its group, as GRPO does.

    The advantage is `(reward - mean) / (std + eps)`, with the mean and the sample standard deviation (`n - 1` in its
    denominator) over the group. Equal rewards give exactly 0, and so does a group of one.

    Args:
      rewards: real or boolean array with the members of a group along `axis`, such as `[prompts, samples]`.
      axis: axis of the group; -1 by default.
      normalize: True (the default) divides by the standard deviation; False leaves the difference, as in Dr. GRPO.
      eps: concrete number, not negative, that is added to the standard deviation; 1e-4 by default.

    Returns:
      Array in the shape of `rewards`, float32, or float64 if `rewards` are float64.

    Raises:
      TypeError: `rewards` are not real, `axis` is not an integer, `normalize` is not True or False, or `eps` is not a
        concrete real number.
      ValueError: `axis` is out of range, or `eps` is negative.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import rl
      >>> rewards = jnp.array([[1.0, 2.0, 3.0], [0.3, 0.3, 0.3]])
      >>> print(rl.group_advantages(rewards, eps=0))
      [[-1.  0.  1.]
       [ 0.  0.  0.]]

    Source: Shao et al. 2024, arXiv:2402.03300 (GRPO); Liu et al. 2025, arXiv:2503.20783 (Dr. GRPO), for `normalize=False`.
    """
    name = "group_advantages"
    rewards = _real_array(name, "rewards", rewards)
    axis = arguments.integer(name, "axis", axis)
    if not -rewards.ndim <= axis < rewards.ndim:
        raise ValueError(f"{name}: axis must be an axis of rewards of shape {rewards.shape}, got {axis}")
    (normalize,) = arguments.flags(name, normalize=normalize)
    eps = arguments.number(name, "eps", eps)
    if not eps >= 0:
        raise ValueError(f"{name}: eps must not be negative, got {eps}")
    rewards = rewards.astype(accumulator(rewards.dtype))
    # Relative to one member, so that the mean of equal rewards is not rounded.
    deviation = rewards - jnp.max(rewards, axis, keepdims=True, initial=-jnp.inf)
    deviation = deviation - jnp.mean(deviation, axis, keepdims=True)
    if not normalize:
        return deviation
    n_others = jnp.maximum(rewards.shape[axis] - 1, 1)  # the size may be symbolic
    variance = jnp.sum(deviation**2, axis, keepdims=True) / n_others.astype(rewards.dtype)
    spread = jnp.sqrt(variance) + eps
    return deviation / jnp.where(spread > 0, spread, 1)


def dpo_loss(
    chosen_log_p: ArrayLike,
    rejected_log_p: ArrayLike,
    reference_chosen_log_p: ArrayLike,
    reference_rejected_log_p: ArrayLike,
    *,
    beta: ArrayLike = 0.1,
    label_smoothing: float = 0.0,
    chosen_where: ArrayLike | None = None,
    rejected_where: ArrayLike | None = None,
) -> jax.Array:
    """Computes the loss of direct preference optimization (DPO) for each pair of a chosen and a rejected sequence.

    With the sums over the tokens of each sequence, the loss is

        -(1 - label_smoothing) * log_sigmoid(z) - label_smoothing * log_sigmoid(-z)
        z = beta * (sum(chosen_log_p - reference_chosen_log_p) - sum(rejected_log_p - reference_rejected_log_p))

    The gradient is by `chosen_log_p` and `rejected_log_p`. The log-probabilities of the reference count as constants.

    Args:
      chosen_log_p: floating array `[*batch, length]`, the log-probabilities of the tokens of the chosen sequences. Sums over
        tokens are passed as sequences of one token, `sums[..., None]`.
      rejected_log_p: likewise of the rejected sequences, `[*batch, other_length]`.
      reference_chosen_log_p: floating array in the shape of `chosen_log_p`, the log-probabilities under a policy
        that is not trained.
      reference_rejected_log_p: likewise, in the shape of `rejected_log_p`.
      beta: real number that multiplies the difference; 0.1 by default. It may be traced.
      label_smoothing: probability that chosen and rejected are exchanged in the data (cDPO), a concrete number from 0 to 1; 0
        by default.
      chosen_where: boolean mask that broadcasts to the shape of `chosen_log_p`, True at tokens that count, or None (the
        default).
      rejected_where: likewise, for `rejected_log_p`.

    Returns:
      Array `[*batch]`, float32, or float64 if an array is float64. A pair without tokens gives `log(2)`.

    Raises:
      TypeError: an array is not floating, a mask is not boolean, or `beta` or `label_smoothing` is not a real number.
      ValueError: shapes do not fit, or `label_smoothing` is out of range.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import rl
      >>> chosen, rejected = jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -1.0, jnp.nan]])
      >>> mask = jnp.array([[True, True, False]])
      >>> print(jnp.round(rl.dpo_loss(chosen, rejected, chosen - 1, rejected, rejected_where=mask), 4))
      [0.5981]

    Source: Rafailov et al. 2023, arXiv:2305.18290; Mitchell 2023, "A note on DPO with noisy preferences", for the smoothing.
    """
    name = "dpo_loss"
    smoothing = arguments.number(name, "label_smoothing", label_smoothing)
    if not 0 <= smoothing <= 1:
        raise ValueError(f"{name}: label_smoothing must be from 0 to 1, got {smoothing}")
    pair = _pair(name, chosen_log_p, rejected_log_p, chosen_where, rejected_where)
    references = (
        _shaped(name, "reference_chosen_log_p", reference_chosen_log_p, pair[0][0], "chosen_log_p"),
        _shaped(name, "reference_rejected_log_p", reference_rejected_log_p, pair[1][0], "rejected_log_p"),
    )
    dtype = accumulator(*[array.dtype for array in (pair[0][0], pair[1][0], *references)])
    chosen, rejected = (
        jnp.sum(_counted(log_p, where, dtype) - lax.stop_gradient(_counted(reference, where, dtype)), -1)
        for (log_p, where), reference in zip(pair, references, strict=True)
    )
    z = _real(name, "beta", beta, dtype) * (chosen - rejected)
    losses = jax.nn.softplus(-z)
    return losses if smoothing == 0 else (1 - smoothing) * losses + smoothing * jax.nn.softplus(z)


def simpo_loss(
    chosen_log_p: ArrayLike,
    rejected_log_p: ArrayLike,
    *,
    beta: ArrayLike = 2.0,
    gamma: ArrayLike = 1.0,
    chosen_where: ArrayLike | None = None,
    rejected_where: ArrayLike | None = None,
) -> jax.Array:
    """Computes the loss of simple preference optimization (SimPO) for each pair of a chosen and a rejected sequence.

    With the means over the tokens of each sequence, the loss is

        -log_sigmoid(beta * (mean(chosen_log_p) - mean(rejected_log_p)) - gamma)

    Args:
      chosen_log_p: floating array `[*batch, length]`, the log-probabilities of the tokens of the chosen sequences.
      rejected_log_p: likewise of the rejected sequences, `[*batch, other_length]`.
      beta: real number that multiplies the difference; 2 by default. It may be traced.
      gamma: real number, the margin by which the chosen sequence should win; 1 by default. It may be traced.
      chosen_where: boolean mask that broadcasts to the shape of `chosen_log_p`, True at tokens that count, or None (the
        default).
      rejected_where: likewise, for `rejected_log_p`.

    Returns:
      Array `[*batch]`, float32, or float64 if an array is float64. The mean over no tokens counts as 0.

    Raises:
      TypeError: an array is not floating, a mask is not boolean, or `beta` or `gamma` is not a real number.
      ValueError: shapes do not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import rl
      >>> print(jnp.round(rl.simpo_loss(jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -1.0, -2.0]])), 4))
      [0.6931]

    Source: Meng et al. 2024, arXiv:2405.14734.
    """
    name = "simpo_loss"
    chosen, rejected = _means(_pair(name, chosen_log_p, rejected_log_p, chosen_where, rejected_where))
    beta, gamma = _real(name, "beta", beta, chosen.dtype), _real(name, "gamma", gamma, chosen.dtype)
    return jax.nn.softplus(gamma - beta * (chosen - rejected))


def orpo_loss(
    chosen_log_p: ArrayLike,
    rejected_log_p: ArrayLike,
    *,
    odds_weight: ArrayLike = 0.1,
    chosen_where: ArrayLike | None = None,
    rejected_where: ArrayLike | None = None,
) -> jax.Array:
    """Computes the loss of odds ratio preference optimization (ORPO) for each pair of a chosen and a rejected sequence.

    With `c` and `r`, the means of the log-probabilities over the tokens of each sequence, the loss is

        -c - odds_weight * log_sigmoid(log_odds(c) - log_odds(r)),    log_odds(c) = c - log(1 - exp(c))

    The first term trains on the chosen sequence. Both terms are computed without cancellation where a mean is near 0, and
    where it is very negative. A mean of 0 counts as the negative number that is nearest to 0, and has no gradient in the
    second term.

    Args:
      chosen_log_p: floating array `[*batch, length]`, the log-probabilities of the tokens of the chosen sequences.
      rejected_log_p: likewise of the rejected sequences, `[*batch, other_length]`.
      odds_weight: real number that multiplies the loss of the odds ratio, lambda in the paper; 0.1 by default. It may be
        traced.
      chosen_where: boolean mask that broadcasts to the shape of `chosen_log_p`, True at tokens that count, or None (the
        default).
      rejected_where: likewise, for `rejected_log_p`.

    Returns:
      Array `[*batch]`, float32, or float64 if an array is float64. The mean over no tokens counts as 0.

    Raises:
      TypeError: an array is not floating, a mask is not boolean, or `odds_weight` is not a real number.
      ValueError: shapes do not fit.

    Examples:
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax import rl
      >>> print(jnp.round(rl.orpo_loss(jnp.array([[-1.0, -2.0]]), jnp.array([[-3.0, -1.0, -2.0]])), 4))
      [1.5435]

    Source: Hong et al. 2024, arXiv:2403.07691.
    """
    name = "orpo_loss"
    chosen, rejected = _means(_pair(name, chosen_log_p, rejected_log_p, chosen_where, rejected_where))
    # At a mean of 0 the odds are infinite, and the gradient would be 0 * inf.
    c, r = (jnp.minimum(mean, -jnp.finfo(mean.dtype).tiny) for mean in (chosen, rejected))
    of_odds = jax.nn.softplus(r + jax.nn.log1mexp(-c) - c - jax.nn.log1mexp(-r))
    return _real(name, "odds_weight", odds_weight, chosen.dtype) * of_odds - chosen


def _tokens(function: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a floating array with an axis of tokens."""
    array = arguments.array(function, name, value, "floating")
    if array.ndim == 0:
        raise ValueError(f"{function}: {name} must have an axis of tokens, got shape ()")
    return array


def _shaped(function: str, name: str, value: Any, like: jax.Array, of: str) -> jax.Array:
    """Returns `value` as a floating array in the shape of `like`, which is the argument `of`."""
    array = arguments.array(function, name, value, "floating")
    if array.shape != like.shape:
        raise ValueError(f"{function}: {name} must have the shape {like.shape} of {of}, got {array.shape}")
    return array


def _advantages(function: str, advantages: Any, like: jax.Array, of: str) -> jax.Array:
    """Returns the advantages of tokens, in the shape of `like`, which is the argument `of`."""
    advantages = _real_array(function, "advantages", advantages)
    if advantages.shape not in (like.shape, like.shape[:-1]):
        allowed = f"{like.shape} of {of}, or that without its last axis"
        raise ValueError(f"{function}: advantages must have the shape {allowed}, got {advantages.shape}")
    if advantages.ndim < like.ndim:
        advantages = jnp.broadcast_to(jnp.expand_dims(advantages, -1), like.shape)
    return advantages


def _mask(function: str, name: str, value: Any, log_p: jax.Array) -> jax.Array:
    """Returns the mask of the tokens that count, in the shape of `log_p`."""
    if value is None:
        return jnp.ones(log_p.shape, np.bool_)
    mask = arguments.array(function, name, value, "boolean")
    try:
        return jnp.broadcast_to(mask, log_p.shape)
    except ValueError:
        raise ValueError(f"{function}: {name} must broadcast to the shape {log_p.shape}, got {mask.shape}") from None


def _counted(array: jax.Array, where: jax.Array, dtype: np.dtype) -> jax.Array:
    """Returns the entries of tokens that count, and 0 at others, before any arithmetic: NaN there has no gradient."""
    return jnp.where(where, array.astype(dtype), 0)


def _bounds(function: str, clip: Any) -> tuple[float, float]:
    """Returns the least and the largest logarithm of the ratio."""
    pair = clip if isinstance(clip, tuple | list) else (clip, clip)
    if len(pair) != 2:
        raise ValueError(f"{function}: clip must be a number or a pair of them, got {arguments.shown(clip)}")
    low, high = (arguments.number(function, "clip", bound) for bound in pair)
    if not (low >= 0 and high >= 0):
        raise ValueError(f"{function}: clip must not be negative, got {arguments.shown(clip)}")
    return math.log1p(-low) if low < 1 else -math.inf, math.log1p(high)


def _real_array(function: str, name: str, value: Any) -> jax.Array:
    """Returns `value` as a floating array; integers and bools, such as 1 for an answer that is right, become float32."""
    array = arguments.array(function, name, value)
    if jnp.issubdtype(array.dtype, jnp.complexfloating):
        raise TypeError(f"{function}: {name} must be real, got {array.dtype}")
    return array if jnp.issubdtype(array.dtype, jnp.floating) else array.astype(jnp.float32)


def _real(function: str, name: str, value: Any, dtype: np.dtype) -> Any:
    """Returns a real number: a float, or a traced number in `dtype`."""
    if not isinstance(value, jax.core.Tracer):
        return arguments.number(function, name, value)
    is_real = jnp.issubdtype(value.dtype, jnp.floating) or jnp.issubdtype(value.dtype, jnp.integer)
    if value.shape != () or not is_real:
        raise TypeError(f"{function}: {name} must be a real number, got {arguments.shown(value)}")
    return value.astype(dtype)


def _weight(function: str, name: str, value: Any, needs: str, operand: Any, dtype: np.dtype) -> Any:
    """Returns the weight of a term of a loss, or None if the term is left out; `operand` is the argument that it `needs`."""
    weight = _real(function, name, value, dtype)
    if not isinstance(weight, jax.core.Tracer) and weight == 0:
        return None
    if operand is None:
        raise ValueError(f"{function}: {name} must be 0 without {needs}, got {arguments.shown(value)}")
    return weight


def _reduced(losses: jax.Array, where: jax.Array, reduction: str) -> jax.Array:
    """Returns the mean that `reduction` names; `losses` are 0 at tokens that do not count."""
    if reduction == "none":
        return losses
    if reduction == "token":
        return _mean(losses, where, None)
    return _mean(_mean(losses, where, -1), jnp.any(where, -1), None)


def _mean(x: jax.Array, where: jax.Array, axis: int | None) -> jax.Array:
    """Returns the mean of the entries that count, 0 if there are none; the others are 0."""
    return jnp.sum(x, axis) / jnp.maximum(jnp.sum(where, axis), 1).astype(x.dtype)


def _pair(
    function: str, chosen: Any, rejected: Any, chosen_where: Any, rejected_where: Any
) -> list[tuple[jax.Array, jax.Array]]:
    """Returns the log-probabilities and the masks of the chosen and of the rejected sequences."""
    chosen, rejected = (_tokens(function, f"{key}_log_p", x) for key, x in (("chosen", chosen), ("rejected", rejected)))
    if rejected.shape[:-1] != chosen.shape[:-1]:
        expected = f"must have the shape {chosen.shape[:-1]} of chosen_log_p, except for its last axis"
        raise ValueError(f"{function}: rejected_log_p {expected}, got {rejected.shape}")
    return [
        (chosen, _mask(function, "chosen_where", chosen_where, chosen)),
        (rejected, _mask(function, "rejected_where", rejected_where, rejected)),
    ]


def _means(pair: list[tuple[jax.Array, jax.Array]]) -> list[jax.Array]:
    """Returns the means of the log-probabilities over the tokens that count."""
    dtype = accumulator(*[log_p.dtype for log_p, _ in pair])
    return [_mean(_counted(log_p, where, dtype), where, -1) for log_p, where in pair]
