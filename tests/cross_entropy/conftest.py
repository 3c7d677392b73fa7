"""Fixtures of the losses' tests."""

import pytest

from jaxsoftmax.ops.cross_entropy import parts as parts_module

from ..support.cross_entropy.linear import CLASSES


@pytest.fixture
def parts(monkeypatch):
    """Several parts, of 128 rows at most, of which the last rows are of no array."""
    for most in ("MOST", "MOST_WITH_GRADIENT"):
        monkeypatch.setattr(parts_module, most, 128 * CLASSES * 8)
