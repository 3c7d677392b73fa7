# Keyword arguments of public functions. Overloads unpack them (PEP 692), so that they need not repeat whole signatures for the
# type of one bool. Only type checkers read this file: Python 3.12 has no closed TypedDict (PEP 728).

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from typing_extensions import TypedDict

from jaxsoftmax.ops.attention.block_masks import BlockMask
from jaxsoftmax.ops.attention.checks import Window
from jaxsoftmax.ops.attention.context_parallel.settings import ContextParallel

# `cross_entropy`, except `return_lse`.
class LossOptions(TypedDict, total=False, closed=True):
    label_smoothing: float
    z_loss: float
    logits_soft_cap: float | None
    scale: ArrayLike | None
    ignore_index: int | None
    axis_name: str | Sequence[str] | None
    implementation: str | None

# `linear_cross_entropy`, except `return_lse` and `return_entropy`.
class LinearLossOptions(TypedDict, total=False, closed=True):
    bias: ArrayLike | None
    sample_weight: ArrayLike | None
    reduction: Literal["mean", "sum", "none"]
    class_axis: int
    label_smoothing: float
    z_loss: float
    logits_soft_cap: float | None
    temperature: ArrayLike | None
    logits_dtype: DTypeLike | None
    ignore_index: int | None
    axis_name: str | Sequence[str] | None
    implementation: str | None

# `log_probs`, except `return_entropy` and `return_lse`.
class LogProbOptions(TypedDict, total=False, closed=True):
    scale: ArrayLike | None
    logits_soft_cap: float | None
    axis_name: str | Sequence[str] | None
    implementation: str | None

# `linear_log_probs`, except `return_entropy` and `return_lse`.
class LinearLogProbOptions(TypedDict, total=False, closed=True):
    bias: ArrayLike | None
    temperature: ArrayLike | None
    class_axis: int
    logits_soft_cap: float | None
    where: ArrayLike | None
    axis_name: str | Sequence[str] | None
    implementation: str | None

# `softmax_top_k`, except `return_lse`.
class TopWeightOptions(TypedDict, total=False, closed=True):
    axis: int
    scale: ArrayLike | None
    where: ArrayLike | None
    normalize: Literal["all", "selected"]
    implementation: str | None

# `categorical`, except `return_log_prob`.
class SamplingOptions(TypedDict, total=False, closed=True):
    temperature: ArrayLike | None
    top_k: ArrayLike | None
    top_p: ArrayLike | None
    min_p: ArrayLike | None
    where: ArrayLike | None
    out_sharding: NamedSharding | PartitionSpec | None
    implementation: str | None

# Keyword arguments that the two functions of attention share.
class _ScoreOptions(TypedDict, total=False):
    scale: ArrayLike | None
    is_causal: bool
    local_window_size: Window
    query_offset: ArrayLike | None
    logits_soft_cap: float | None
    sinks: ArrayLike | None
    key_scale: ArrayLike | None
    value_scale: ArrayLike | None
    score_mod: Callable[..., Any] | None
    implementation: str | None
    precision: lax.PrecisionLike

# `cache.paged_attention`, except `return_lse`.
class PagedOptions(_ScoreOptions, total=False, closed=True):
    mask_mod: Callable[..., Any] | None

# `dot_product_attention`, except `return_residual`.
class AttentionOptions(_ScoreOptions, total=False, closed=True):
    mask_mod: Callable[..., Any] | BlockMask | None
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    query_segment_ids: ArrayLike | None
    key_value_segment_ids: ArrayLike | None
    dropout_rate: float
    dropout_rng: jax.Array | None
    broadcast_dropout: bool
    deterministic: bool
    deterministic_gradients: bool
    fully_masked_rows: Literal["zero", "mean"]
    parallel: ContextParallel | None
