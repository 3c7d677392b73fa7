"""Softmax for JAX on NVIDIA GPUs: over logits, in attention, in a loss, over a sharded vocabulary."""

from jaxsoftmax import online
from jaxsoftmax._core.dispatch import explain
from jaxsoftmax.ops.attention._zigzag import unzigzag, zigzag
from jaxsoftmax.ops.attention.api import dot_product_attention, paged_attention, quantize, update_pages
from jaxsoftmax.ops.cross_entropy.api import cross_entropy, linear_cross_entropy
from jaxsoftmax.ops.softmax.api import log_softmax, logsumexp, softmax
from jaxsoftmax.ops.top_k.api import categorical, softmax_top_k, top_k

__all__ = [
    "categorical",
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
    "softmax_top_k",
    "top_k",
    "unzigzag",
    "update_pages",
    "zigzag",
]
__version__ = "0.1.0"
