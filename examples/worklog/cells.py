"""What is timed: every rung and the peers on the shapes of the tables and figures, as cells of the benchmarks' harness."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import attention, harness, softmax
from benchmarks.cells import Cell, Contender, torch
from benchmarks.check import sampled, sampled_of
from examples.worklog import common
from examples.worklog.common import (
    ATTENTION,
    HALVES,
    LADDERS,
    LONG_ROW,
    MEDIUM,
    OF_A_WRITE_UP,
    OF_ONE_VECTOR,
    OF_TOP_K,
    OF_VECTORS,
    ROW,
    SIZES,
    SMALL,
    TOP_K_SHAPES,
    VECTOR,
    WAYS_OF_ATTENTION,
    K,
    Shape,
    size,
    takes,
)
from tests.support import oracle

EFFORT = harness.Effort(calls=3)


def cells(elements: int = softmax.ELEMENTS) -> list[Cell]:
    """All that is timed; the copy comes first, with which the others are compared."""
    of_rows = [*LADDERS, OF_A_WRITE_UP, SMALL, *rows_of(ROW).values(), *rows_of(LONG_ROW).values()]
    vectors = [(1, count) for count in SIZES if (1, count) not in of_rows]
    return [
        softmax.copy_cell("float32", elements),
        *(_cell("float32", shape) for shape in of_rows),
        *(_cell("float32", shape, OF_ONE_VECTOR if shape == VECTOR else OF_VECTORS) for shape in vectors),
        *(_cell("float16", shape) for shape in HALVES),
        _cell_of_top_k(MEDIUM, in_steps=True),
        *(_cell_of_top_k(shape) for shape in TOP_K_SHAPES),
        dataclasses.replace(attention.cell_of(ATTENTION), contenders=tuple(map(_way, WAYS_OF_ATTENTION))),
    ]


def rows_of(cols: int) -> dict[int, Shape]:
    """The figure's sizes that have whole rows of so many columns."""
    return {count: (count // cols, cols) for count in SIZES if count >= cols}


def _way(name: str) -> Contender:
    return Contender(name, lambda: getattr(common.ladder(), name))


def _cell(dtype: str, shape: Shape, names: Sequence[str] | None = None) -> Cell:
    """Softmax along the rows of an array, by the rungs of these names, None for all, and the peers."""
    rungs = [rung for rung in common.ladder().RUNGS if takes(rung, shape, dtype) and (names is None or rung.name in names)]
    return Cell(
        "softmax",
        "forward",
        dtype,
        shape,
        "",
        2 * size(shape, dtype),
        softmax.one_array(shape, dtype),
        (
            *(Contender(rung.name, lambda rung=rung: rung.softmax) for rung in rungs),
            Contender("jax.nn", lambda: jax.nn.softmax),
            softmax.of_torch("softmax"),
        ),
        lambda x: [oracle.softmax(x)],
        sample=_sample,
    )


@jax.jit
def _states(x):
    """Maximum and sum of every row; sums of float64 on the device, as no row of millions is brought to the host."""
    m = jnp.max(x, axis=1, keepdims=True).astype(jnp.float64)
    return m, jnp.sum(jnp.exp(x.astype(jnp.float64) - m), axis=1, keepdims=True)


@jax.jit
def _part(array, rows, cols):
    return array[rows[:, None], cols[None, :]]


def _sample(inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """Some columns of some rows, the first and the last ones among them, and the truth of them."""
    at = tuple(map(sampled, output.shape))
    with jax.enable_x64(True):
        m, d = (np.asarray(state)[at[0]] for state in _states(inputs[0]))
    scores = oracle.to64(_part(inputs[0], *at))
    y = np.exp(scores - m) / d
    rows = oracle.Rows(scores, np.ones(y.shape, bool), m, d, y, (1,))
    truth = oracle.Truth(y, (8 + 3 * rows.distance) * oracle.EPS * y + oracle.TINY)
    return [(np.asarray(_part(output, *at)), truth)]


def top_k_of(function: Callable[[jax.Array], jax.Array]) -> Callable[[jax.Array], Any]:
    return lambda x: lax.top_k(function(x), K)


def _cell_of_top_k(shape: Shape, in_steps: bool = False) -> Cell:
    """The largest values of softmax in the three ways that the paper compares; with `in_steps` also behind rungs and peers."""
    ladder = common.ladder()
    contenders = [Contender(way.name, lambda way=way: way.softmax) for way in ladder.WITH_TOP_K if takes(way, shape)]
    if in_steps:
        rungs = [rung for rung in ladder.RUNGS if rung.name in OF_TOP_K and takes(rung, shape)]
        contenders += [Contender(rung.name, lambda rung=rung: top_k_of(rung.softmax)) for rung in rungs]
        contenders.append(Contender("jax.nn", lambda: top_k_of(jax.nn.softmax)))
        contenders.append(softmax.torch_contender("torch", lambda: lambda x: torch().topk(torch().softmax(x, -1), K).values))
    return Cell(
        "softmax_top_k",
        "forward",
        "float32",
        shape,
        f"k={K}",
        size(shape),
        softmax.one_array(shape, "float32"),
        tuple(contenders),
        lambda x: [oracle.softmax(x)],
        sample=_sample_of_top_k,
    )


def _sample_of_top_k(inputs: Sequence[Any], output: Any) -> list[tuple[np.ndarray, Any]]:
    """The largest weights of some rows, and what weighs most by the indices, if they are there.

    Two weights may have been told apart by what they were rounded to, so that what is at an index has twice the budget.
    """
    values, *indices = jax.tree.leaves(output)
    at = sampled_of(*inputs[0].shape)
    truth = oracle.softmax(np.asarray(inputs[0][jnp.asarray(at)]))
    order = np.argsort(-truth.value, axis=1)[:, :K]
    largest = oracle.Truth(*(np.take_along_axis(array, order, axis=1) for array in (truth.value, truth.budget)))
    there = [np.take_along_axis(truth.value, np.asarray(found)[at], axis=1) for found in indices]
    return [(np.asarray(values)[at], largest), *((one, oracle.Truth(largest.value, 2 * largest.budget)) for one in there)]
