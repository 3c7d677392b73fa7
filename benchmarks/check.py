"""Whether what a contender computes is right: no speed is recorded of what is not."""

import functools
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cells import Cell, Contender, torch
from tests.support import oracle

FEW_ROWS = (1, 3)
_RANDOM_ROWS = 64
_ROWS_AT_ENDS = 20
_ENTRIES = 2**20  # of the rows that are compared, about: the truth is computed on the CPU


def errors(cell: Cell, contender: Contender, inputs: Sequence[Any], output: Any) -> tuple[float, float]:
    """On some rows, the first and the last ones among them: the largest fraction of the budget used, and the relative error.

    The relative error is that of the vector of all finite values, by its norm; infinite where one is wrongly not finite.
    """
    found = pairs(cell, contender, inputs, jax.tree.map(as_jax, output))
    return max(oracle.error(*pair) for pair in found), max(_relative(actual, truth.value) for actual, truth in found)


def pairs(cell: Cell, contender: Contender, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """What is compared of an output, each part with its truth."""
    sample = contender.sample or cell.sample
    return sample(inputs, output) if sample else _sample(cell, contender, inputs, output)


def sampled(rows: int, ends: int = _ROWS_AT_ENDS, random: int = _RANDOM_ROWS) -> np.ndarray:
    """Which of so many rows are compared with the truth: some at both ends, and some anywhere."""
    first = np.arange(min(ends, rows))
    return np.unique([*first, *(rows - 1 - first), *np.random.default_rng(0).integers(rows, size=random)])


def sampled_of(rows: int, cols: int) -> np.ndarray:
    """`sampled`, fewer of long rows."""
    share = min(1, _ENTRIES / ((2 * _ROWS_AT_ENDS + _RANDOM_ROWS) * cols))
    return sampled(rows, max(1, int(share * _ROWS_AT_ENDS)), max(1, int(share * _RANDOM_ROWS)))


def _sample(cell: Cell, contender: Contender, inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Some rows of each output, and their truth."""
    index = np.unravel_index(sampled_of(cell.rows, cell.shape[-1]), cell.lead)
    own = len(inputs) - cell.shared
    rows = [np.asarray(_rows(array, index) if at < own else array) for at, array in enumerate(inputs)]
    truths = (contender.truth or cell.truth)(*rows)
    return list(zip([np.asarray(_rows(array, index)) for array in jax.tree.leaves(output)], truths, strict=True))


def as_jax(array: Any) -> jax.Array:
    """An array of JAX that shares what one of torch holds."""
    return array if isinstance(array, jax.Array) else jnp.from_dlpack(array)


def to_torch(*inputs: Any) -> tuple[Any, ...]:
    """Tensors that share what arrays of JAX hold."""
    return tuple(torch().from_dlpack(array) for array in jax.block_until_ready(inputs))


def differing_bits(
    cell: Cell, contender: Contender, function: Any, inputs: Sequence[Any], output: Any, *, kernels: bool
) -> list[str]:
    """What is not the same, bit for bit, in a second call and, with `kernels`, in calls with a few rows only.

    In plain `jax.numpy` the order of a sum is XLA's, which may choose another one for another number of rows.
    """
    found = []
    if not _same(function(*contender.prepare(*inputs)), output):
        found.append("a second call gives other bits")

    def alone(fewer: tuple[Any, ...]) -> Any:
        return jax.block_until_ready(function(*contender.prepare(*fewer)))

    calls = (cell.fewer(inputs, output) if cell.fewer else _fewer(cell, inputs, output)) if kernels else []
    with ThreadPoolExecutor(len(FEW_ROWS)) as pool:  # each row count is compiled anew
        results = pool.map(alone, [fewer for _, fewer, _ in calls])
        for (words, _, part), result in zip(calls, results, strict=True):
            own = jax.tree.map(lambda array, like: array[tuple(map(slice, like.shape))], result, part)
            if not _same(own, part):
                found.append(f"rows have other bits where there are only {words}")
    return found


def _fewer(cell: Cell, inputs: Sequence[Any], output: Any) -> list[tuple[str, tuple[Any, ...], Any]]:
    """Calls with the first few rows only: in words, their inputs, and their part of the output."""
    own, calls = len(inputs) - cell.shared, []
    for count in (count for count in FEW_ROWS if count < cell.lead[-1]):
        few = tuple(_first(array, cell.lead, count) if at < own else array for at, array in enumerate(inputs))
        calls.append((str(count), few, jax.tree.map(lambda array, count=count: _first(array, cell.lead, count), output)))
    return calls


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
