"""Measures jaxsoftmax and its peers on a GPU; see `python -m benchmarks --help`."""
