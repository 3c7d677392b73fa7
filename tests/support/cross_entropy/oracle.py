"""The truth of cross-entropy and its gradient, which `python -m jaxsoftmax --check` shares."""

from jaxsoftmax._report.truth.cross_entropy import *  # noqa: F403
