"""The same program in every process: the cache of compiled programs hits, and hosts that run one program together agree."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.mosaic.gpu import constraints

import jaxsoftmax

from .. import kernels


@pytest.mark.parametrize(("options", "count"), [([], 36), pytest.param(["--every"], 56, marks=pytest.mark.slow)], ids=str)
def test_programs_do_not_depend_on_the_order_of_sets(options, count):
    root = Path(__file__).parents[2]

    def start(seed):
        env = os.environ | {"PYTHONHASHSEED": str(seed), "JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-m", "tests.core.lowered", *options]
        return subprocess.Popen(command, env=env, cwd=root, stdout=subprocess.PIPE, text=True)

    seeds = (0, 1, 2, 3) if options else (0, 3)  # of which 0 and 1 agree about a set of two names
    first, *others = [json.loads(process.communicate()[0]) for process in [start(seed) for seed in seeds]]
    assert len(first) == count
    for other in others:
        assert {name: first[name] == found for name, found in other.items()} == dict.fromkeys(first, True)


@pytest.mark.skipif(
    jax.__version_info__ >= (0, 12), reason="lower_faster() leaves this JAX as it is: there is no order to compare"
)
def test_kernels_lower_in_tests_as_they_do_without_what_makes_that_faster():
    same = []

    def compared(system):
        found = kernels.equal_variables_named_at_once(system)
        same.append(list(found.items()) == list(kernels.equal_variables(system).items()))
        return found

    def in_a_window(q):
        return jaxsoftmax.dot_product_attention(q, q, q, local_window_size=(30, 0))

    q = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    with mock.patch.object(constraints, "compute_transitively_equal_vars", compared):
        kernels.lowered_for_cuda(in_a_window, q, kernels=["attention_forward_mosaic"])
    assert same
    assert all(same)
