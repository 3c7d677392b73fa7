"""Fixtures of the losses' tests."""

import pytest

from jaxsoftmax.ops.cross_entropy import linear

from ..support.cross_entropy.linear import CLASSES


@pytest.fixture
def parts(monkeypatch):
    """Several parts, of 128 rows at most, of which the last rows are of no array."""
    for most in ("MOST", "MOST_WITH_GRADIENT"):
        monkeypatch.setattr(linear, most, 128 * CLASSES * 8)
