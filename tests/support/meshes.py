"""Meshes of CPU devices, arrays on them, and the collectives of a compiled program."""

import itertools
import re

import jax
import numpy as np
from jax.sharding import NamedSharding

# A collective: the type of its result, and its name.
COLLECTIVE = re.compile(r"= (.*?) (all-[a-z-]+?|collective-[a-z]+|reduce-scatter)(?:-start)?\(")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")


def make_mesh(kind, shape=(4, 2), names=("data", "model")):
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(shape), devices=jax.devices("cpu"))


def array(shape, spec, mesh, seed=0):
    """Returns random numbers on the host and on a mesh, in float64: one and several devices then differ by rounding only."""
    x = np.random.default_rng(seed).standard_normal(shape)
    return x, jax.device_put(x, NamedSharding(mesh, spec))


def spec_of(result, ndim):
    return (*result.sharding.spec, *(None,) * (ndim - len(result.sharding.spec)))


def hurtful(shape, seed=0):
    """Returns rows that have parts of nothing but -inf, parts far below the others, or +inf or NaN."""
    x = np.random.default_rng(seed).standard_normal(shape)
    x[:4] -= 1000
    x[0, :32], x[1, :8], x[2], x[3, 40], x[4, 3] = -np.inf, 0, -np.inf, np.inf, np.nan
    return x


def collectives_of(compiled):
    """Returns the names of the collectives of a program, in their order, and the size of their largest result."""
    found = COLLECTIVE.findall(compiled.as_text())
    sizes = [[np.prod([int(size) for size in shape.split(",") if size]) for shape in _SHAPE.findall(kind)] for kind, _ in found]
    return [name for _, name in found], max(itertools.chain([0], *sizes))
