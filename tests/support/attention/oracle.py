"""The truth of attention and its cotangents, which `python -m jaxsoftmax --check` shares."""

from jaxsoftmax._report.truth.attention import *  # noqa: F403
