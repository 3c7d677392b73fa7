"""Fixtures of attention's tests."""

import pytest

from jaxsoftmax.ops.attention import mosaic, xla

from .. import kernels


@pytest.fixture
def choices(monkeypatch):
    """Which implementation runs does not depend on what it does: kernels are replaced by the reference, which lowers faster."""
    monkeypatch.setattr(mosaic, "dot_product_attention", lambda target, **given: xla.dot_product_attention(**given))
    monkeypatch.setattr(mosaic, "dot_product_attention_vjp", lambda target, **given: xla.dot_product_attention_vjp(**given))
    kernels.forget_lowerings()
    yield
    kernels.forget_lowerings()
