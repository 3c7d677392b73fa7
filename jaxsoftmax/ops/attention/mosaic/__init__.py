"""Attention on Hopper: kernels of the forward pass and of its cotangents."""

from jaxsoftmax.ops.attention.mosaic.forward import attention, attention_vjp, lacks, unprofitable, unsupported

__all__ = ["attention", "attention_vjp", "lacks", "unprofitable", "unsupported"]
