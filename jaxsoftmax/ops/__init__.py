"""The ops. A new op adds its folder, and its line in `OPS`."""

from jaxsoftmax.ops.attention.implementations import ATTENTION_FAMILY
from jaxsoftmax.ops.cross_entropy.implementations import CROSS_ENTROPY_FAMILY
from jaxsoftmax.ops.divergence.implementations import DIVERGENCE_FAMILY
from jaxsoftmax.ops.softmax.implementations import SOFTMAX_FAMILY
from jaxsoftmax.ops.top_k.implementations import TOP_K_FAMILY

_FAMILIES = (SOFTMAX_FAMILY, CROSS_ENTROPY_FAMILY, DIVERGENCE_FAMILY, ATTENTION_FAMILY, TOP_K_FAMILY)

OPS = {op.name: op for op in _FAMILIES}
