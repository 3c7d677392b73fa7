"""Attention on Hopper: kernels of the forward pass and of its cotangents."""

from jaxsoftmax.ops.attention.mosaic.forward import (
    dot_product_attention,
    dot_product_attention_vjp,
    lacks,
    unprofitable,
    unsupported,
)

__all__ = ["dot_product_attention", "dot_product_attention_vjp", "lacks", "unprofitable", "unsupported"]
