"""Whether what a contender computes is right: no speed is recorded of what is not."""

import functools
import importlib
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cells import Cell, Contender

sys.path.append(str(Path(__file__).parents[1] / "tests"))
oracle = importlib.import_module("oracle")

FEW_ROWS = (1, 3)
_RANDOM_ROWS = 64
_ROWS_AT_ENDS = 20


def errors(cell: Cell, contender: Contender, inputs: Sequence[Any], output: Any) -> tuple[float, float]:
    """On some rows, the first and the last ones among them: the largest fraction of the budget used, and the relative error.

    The relative error is that of the vector of all finite values, by its norm; infinite where one is wrongly not finite.
    """
    random = np.random.default_rng(0).integers(cell.rows, size=_RANDOM_ROWS)
    ends = np.arange(min(_ROWS_AT_ENDS, cell.rows))
    index = np.unravel_index(np.unique([*ends, *(cell.rows - 1 - ends), *random]), cell.lead)
    own = len(inputs) - cell.shared
    rows = [np.asarray(_rows(array, index) if at < own else array) for at, array in enumerate(inputs)]
    truths = (contender.truth or cell.truth)(*rows)
    actuals = [np.asarray(_rows(array, index)) for array in jax.tree.leaves(jax.tree.map(as_jax, output))]
    pairs = list(zip(actuals, truths, strict=True))
    return max(oracle.error(*pair) for pair in pairs), max(_relative(actual, truth.value) for actual, truth in pairs)


def as_jax(array: Any) -> jax.Array:
    """An array of JAX that shares what one of torch holds."""
    return array if isinstance(array, jax.Array) else jnp.from_dlpack(array)


def differing_bits(
    cell: Cell, contender: Contender, function: Any, inputs: Sequence[Any], output: Any, *, kernels: bool
) -> list[str]:
    """What is not the same, bit for bit, in a second call and, with `kernels`, in calls with a few rows only.

    In plain `jax.numpy` the order of a sum is XLA's, which may choose another one for another number of rows.
    """
    found = []
    if not _same(function(*contender.prepare(*inputs)), output):
        found.append("a second call gives other bits")

    def alone(count: int) -> Any:
        own = len(inputs) - cell.shared
        few = [_first(array, cell.lead, count) if at < own else array for at, array in enumerate(inputs)]
        return jax.block_until_ready(function(*contender.prepare(*few)))

    counts = [count for count in FEW_ROWS if kernels and count < cell.lead[-1]]
    with ThreadPoolExecutor(len(FEW_ROWS)) as pool:  # each row count is compiled anew
        for count, result in zip(counts, pool.map(alone, counts), strict=True):
            if not _same(result, jax.tree.map(lambda array, count=count: _first(array, cell.lead, count), output)):
                found.append(f"rows have other bits where there are only {count}")
    return found


@jax.jit
def _rows(array, index):
    """The rows of an array at a tuple of indices, one for each axis of rows; on axes of size 1 they are all the same."""
    return array[tuple(jnp.zeros_like(i) if size == 1 else i for i, size in zip(index, array.shape, strict=False))]


@functools.partial(jax.jit, static_argnames=("lead", "count"))
def _first(array, lead, count):
    """The first rows along the last axis of rows, and only those."""
    return array[(*[slice(1)] * (len(lead) - 1), slice(count))]


@jax.jit
def _all_same(a, b):
    def bits(array):
        return lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))

    return jnp.stack([jnp.all(bits(x) == bits(y)) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)])


def _same(a: Any, b: Any) -> bool:
    return bool(np.all(_all_same(a, b)))


def _relative(actual: np.ndarray, truth: np.ndarray) -> float:
    finite = np.isfinite(truth)
    actual, truth = oracle.to64(actual)[finite], truth[finite]
    if not np.all(np.isfinite(actual)):
        return float("inf")
    return float(np.linalg.norm(actual - truth) / max(np.linalg.norm(truth), oracle.TINY))
