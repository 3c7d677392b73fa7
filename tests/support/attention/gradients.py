"""Checks attention's gradients: each cotangent against the tight budget of its kernel."""

import functools

import jax
import numpy as np

from .. import oracle
from . import oracle as attention_oracle
from . import values as forward

tight = functools.partial(attention_oracle.cotangents, tight=True)


def pull_of(f):
    """Returns the results of `f`, and the cotangents of its operands from those of the results."""

    def pull(moving, cotangents):
        results, vjp = jax.vjp(f, moving)
        return results, *vjp(cotangents)

    return pull


def cotangents_like(results, seed=7):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.standard_normal(x.shape).astype(x.dtype), results)


def assert_right(name, actual, given, options, dout, dlse, lse):
    """Fails unless cotangents are within the budget, and 0 for queries that see nothing and keys that nothing sees."""
    dlse = np.where(np.isneginf(lse), 0, dlse)  # nothing moves an lse of -inf
    truths = forward.truth_of(tight, name, given, options, dout, dlse)
    for key, found in actual.items():
        assert found.dtype == given[key].dtype
        assert np.all(np.isfinite(oracle.to64(found))), key
        assert oracle.error(found, truths[key]) <= 1, key
        assert np.all(oracle.to64(found)[truths[key].budget <= oracle.TINY] == 0), key
