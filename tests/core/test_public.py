"""Public names: where they say that they are, and what can be pickled."""

import functools
import importlib
import pickle

import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax import ContextParallel, explain

MODULES = ("jaxsoftmax", "jaxsoftmax.cache", "jaxsoftmax.flax", "jaxsoftmax.online", "jaxsoftmax.rl")
NAMES = [(module, name) for module in MODULES for name in importlib.import_module(module).__all__]


@pytest.mark.parametrize(("module", "name"), NAMES, ids=".".join)
def test_public_names_say_that_they_are_public(module, name):
    value = getattr(importlib.import_module(module), name)
    if hasattr(value, "__module__"):
        assert (value.__module__, value.__qualname__) == (module, name)
        assert pickle.loads(pickle.dumps(value)) is value


def test_what_says_how_to_call_a_function_can_be_pickled():
    attend = functools.partial(
        jaxsoftmax.dot_product_attention, parallel=ContextParallel("ring", axis_name="x", zigzag=np.int32(4))
    )
    found = pickle.loads(pickle.dumps(attend))
    assert found.keywords == attend.keywords
    assert hash(found.keywords["parallel"]) == hash(attend.keywords["parallel"])
    decisions = explain(jaxsoftmax.softmax, jnp.ones((2, 3)), platform="cpu")
    assert pickle.loads(pickle.dumps(decisions)) == decisions
    assert isinstance(decisions, jaxsoftmax.Explanation)
    assert isinstance(decisions[0], jaxsoftmax.Decision)


@pytest.mark.parametrize("names", ["x", ("x",), ["x"]], ids=str)
def test_one_axis_may_be_named_in_every_way(names):
    assert ContextParallel(axis_name=names, replicated_queries=np.bool_(True)) == ContextParallel(
        axis_name="x", replicated_queries=True
    )
