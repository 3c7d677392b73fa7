"""Fixtures of the losses' tests."""

import pytest

from jaxsoftmax._gpu import fused
from jaxsoftmax.ops.cross_entropy import parts as parts_module

from ..support.cross_entropy.linear import CLASSES


@pytest.fixture
def parts(monkeypatch):
    """Several parts, of 128 rows at most, of which the last rows are of no array."""
    for most in ("MOST", "MOST_WITH_GRADIENT"):
        monkeypatch.setattr(parts_module, most, 128 * CLASSES * 8)


@pytest.fixture
def plain_functions(monkeypatch):
    """Traces functions of registers as functions of arrays: the interpreter knows no registers."""
    monkeypatch.setattr(fused, "fused", lambda function, static, arrays, layout: function(*static, *arrays))
    monkeypatch.setattr(fused, "reciprocal", lambda a: 1 / a)
