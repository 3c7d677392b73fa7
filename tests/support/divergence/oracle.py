"""The truth of divergences and their gradients, which `python -m jaxsoftmax --check` shares."""

from jaxsoftmax._report.truth.divergence import *  # noqa: F403
