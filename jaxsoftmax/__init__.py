"""Softmax for JAX on NVIDIA GPUs: over logits, in attention, in a loss, over a sharded vocabulary."""

from jaxsoftmax import cache, online, rl
from jaxsoftmax._core.choose import Decision, Explanation, explain
from jaxsoftmax.ops.attention.api import dot_product_attention
from jaxsoftmax.ops.attention.block_masks import BlockMask, block_mask
from jaxsoftmax.ops.attention.context_parallel.order import unzigzag, zigzag
from jaxsoftmax.ops.attention.context_parallel.settings import ContextParallel
from jaxsoftmax.ops.cross_entropy.api import cross_entropy
from jaxsoftmax.ops.cross_entropy.linear_cross_entropy import linear_cross_entropy
from jaxsoftmax.ops.cross_entropy.linear_log_probs import linear_log_probs
from jaxsoftmax.ops.cross_entropy.log_probs import entropy, log_probs
from jaxsoftmax.ops.divergence.api import js_divergence, kl_divergence
from jaxsoftmax.ops.divergence.linear_divergence import linear_divergence
from jaxsoftmax.ops.softmax.api import log_softmax, logsumexp, softmax
from jaxsoftmax.ops.top_k.api import categorical, softmax_top_k, top_k

__all__ = [
    "BlockMask",
    "ContextParallel",
    "Decision",
    "Explanation",
    "block_mask",
    "cache",
    "categorical",
    "cross_entropy",
    "dot_product_attention",
    "entropy",
    "explain",
    "js_divergence",
    "kl_divergence",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_probs",
    "log_probs",
    "log_softmax",
    "logsumexp",
    "online",
    "rl",
    "softmax",
    "softmax_top_k",
    "top_k",
    "unzigzag",
    "zigzag",
]
__version__ = "0.1.0"

# Pickles and `help` name the public path of a function, which stays, not the file that holds it. The price, as in JAX itself:
# `inspect.getsource` of a class and `typing.get_overloads` find nothing.
for _name in __all__:
    if hasattr(_public := globals()[_name], "__module__"):
        _public.__module__ = __name__
