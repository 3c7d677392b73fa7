"""The cells of a sampler's step, as libraries write it in `jax.numpy`: a token is drawn, and its log-probability computed.

`as=tunix` is `sample_top_p` of tunix/generate/sampler.py (c7d8950): logits in float32 over a temperature, their `top_k`
largest, those that weigh `top_p` together, a draw, and the log-softmax of the whole row at the token.

`as=levanter` is `Sampler` of lib/levanter/src/levanter/layers/sampler.py in marin (25fb16a) without `top_ps`: a temperature and
a key for each row, the largest entry where the temperature is 0, and the log-sum-exp of the row. With `top_ps` it returns the
log-probability among the entries that are kept. Ours is that before the filters, so this step has no cell.

`bytes` are those of one read of the logits, without results. No logit of a token is smaller than those that the filters keep in
float64, and its log-probability is compared with that in float64. Our tokens are those of the reference for the same key.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from benchmarks import top_k
from benchmarks.cells import OURS, Cell, Contender, library
from benchmarks.check import sampled_of
from benchmarks.softmax import DTYPES, ELEMENTS, copy_cell, exactly, one_array
from tests.support.cross_entropy import oracle
from tests.support.oracle import to64
from tests.support.top_k.oracle import filtered

BATCHES = (8, 64, 256)
VOCABULARIES = (32000, 50257, 151936, 262144)
SHAPES = tuple((rows, cols) for cols in VOCABULARIES for rows in BATCHES)
OF_TUNIX: dict[str, Any] = {"temperature": 0.7, "top_k": 50, "top_p": 0.9}


def cells(shapes: Sequence[tuple[int, int]] = SHAPES) -> list[Cell]:
    """Returns all cells: copies, with which the others are compared, and each step."""
    copies = [copy_cell(dtype, ELEMENTS if shapes is SHAPES else math.prod(shapes[0])) for dtype in DTYPES]
    return [*copies, *(make(dtype, shape) for make in (_of_tunix, _of_levanter) for shape in shapes for dtype in DTYPES)]


def _of_tunix(dtype: str, shape: tuple[int, int]) -> Cell:
    def inputs(key, hurtful):
        return *one_array(shape, dtype)(key, hurtful), jax.random.fold_in(key, 4)

    def draw(categorical, x, key, **more):
        return categorical(key, x, return_log_prob=True, **OF_TUNIX, **more)

    options = " ".join(f"{name}={value:g}" for name, value in OF_TUNIX.items())
    return _cell("tunix", options, dtype, shape, inputs, draw, _step_of_tunix, lambda x, key: OF_TUNIX, shared=1)


def _of_levanter(dtype: str, shape: tuple[int, int]) -> Cell:
    def inputs(key, hurtful):
        temperatures = jax.random.uniform(jax.random.fold_in(key, 3), shape[:1], minval=0.5, maxval=1.5)
        keys = jax.random.key_data(jax.random.split(jax.random.fold_in(key, 4), shape[0]))
        return *one_array(shape, dtype)(key, hurtful), temperatures, keys

    def draw(categorical, x, temperatures, keys, **more):
        def of_row(x, temperature, key):
            return categorical(key, x, temperature=temperature, return_log_prob=True, **more)

        return jax.vmap(of_row)(x, temperatures, keys)

    step = jax.vmap(_step_of_levanter)
    return _cell("levanter", "temperatures=1", dtype, shape, inputs, draw, step, lambda x, t, keys: {"temperature": t})


def _cell(name, options, dtype, shape, inputs, draw, step, filters, shared=0) -> Cell:
    """Returns the cell of a step, which `draw` makes from a function such as `categorical`, and `step` as the library does.

    `filters` gives the options of `categorical` from the inputs.
    """
    reference = jax.jit(functools.partial(draw, jaxsoftmax.categorical, implementation="xla"))

    def ours(inputs, output):
        tokens = top_k._same_as(lambda *inputs: reference(*inputs)[0], inputs, output[0])
        return [*tokens, *_checked(filters(*inputs), inputs[0], *output)]

    def theirs(inputs, output):
        return _checked(filters(*inputs), inputs[0], *output)

    return Cell(
        "sampler_step",
        "forward",
        dtype,
        shape,
        f"as={name} {options}",
        math.prod(shape) * jnp.dtype(dtype).itemsize,
        inputs,
        (
            Contender(OURS, lambda: functools.partial(draw, library.categorical)),
            Contender(name, lambda: step, sample=theirs),
        ),
        top_k._no_truth,
        shared=shared,
        sample=ours,
    )


def _step_of_tunix(x, key, temperature=OF_TUNIX["temperature"], k=OF_TUNIX["top_k"], top_p=OF_TUNIX["top_p"]):
    scores = x.astype(jnp.float32) / temperature
    largest, indices = lax.top_k(scores, k)
    weights = jax.nn.softmax(largest, axis=-1)
    before = jnp.cumsum(weights, axis=-1) - weights
    place = jax.random.categorical(key, jnp.where(before > top_p, -jnp.inf, largest))
    token = jnp.take_along_axis(indices, place[:, None], -1)[:, 0]
    return token, jnp.take_along_axis(jax.nn.log_softmax(scores, axis=-1), token[:, None], -1)[:, 0]


def _step_of_levanter(x, temperature, key):
    """Draws the token of one row."""
    x, is_cold = x.astype(jnp.float32), temperature == 0
    scores = x / jnp.where(is_cold, 1.0, temperature)
    token = jnp.where(is_cold, jnp.argmax(x, -1), jax.random.categorical(key, scores))
    return token, scores[token] - jax.nn.logsumexp(scores)


def _checked(filters: dict[str, Any], x: jax.Array, tokens: jax.Array, log_p: jax.Array) -> top_k.Pairs:
    """Compares the tokens of some rows with the entries that may be drawn, and the log-probabilities with the truth."""
    at = sampled_of(*x.shape)
    temperature = np.broadcast_to(np.asarray(filters["temperature"], np.float64), x.shape[:1])[at]
    logits, drawn, found = (np.asarray(array[at]) for array in (x, tokens, log_p))
    kept = filtered(logits, **filters | {"temperature": temperature})
    least = np.min(np.where((kept.weights > 0) | kept.doubtful, to64(logits), np.inf), -1)
    is_inside = (drawn >= 0) & (drawn < logits.shape[-1])
    ids = np.where(is_inside, drawn, 0)
    may_be_drawn = is_inside & (np.take_along_axis(to64(logits), ids[:, None], -1)[:, 0] >= least)
    truth = oracle.log_probs(logits, ids, scale=np.float32(1 / temperature[:, None])).log_p
    return [((~may_be_drawn).astype(np.float64), exactly(np.zeros(len(at)))), (found, truth)]
