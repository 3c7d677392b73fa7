"""The command `python -m jaxsoftmax`: a report, a check of values and a benchmark. The library itself loads none of it."""
