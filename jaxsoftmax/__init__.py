"""Softmax for JAX on NVIDIA GPUs: over logits, in attention, in a loss, over a sharded vocabulary."""

from jaxsoftmax import online
from jaxsoftmax._core.dispatch import explain
from jaxsoftmax.ops.attention.api import dot_product_attention, paged_attention, quantize, update_pages
from jaxsoftmax.ops.cross_entropy.api import cross_entropy, linear_cross_entropy
from jaxsoftmax.ops.softmax.api import log_softmax, logsumexp, softmax

__all__ = [
    "cross_entropy",
    "dot_product_attention",
    "explain",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "online",
    "paged_attention",
    "quantize",
    "softmax",
    "update_pages",
]
__version__ = "0.1.0"
