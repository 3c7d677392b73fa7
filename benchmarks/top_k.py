"""The cells of the largest entries of rows: alone, as the weights of a softmax, and as what samples are drawn from.

`bytes` are those of one read of the logits, without results, so that the share of a copy's speed says how many reads a call
takes. A router of experts has short rows, and more is counted: forward also writes weights and indices; backward reads
cotangents and indices, and the logits, or only the selected weights where these alone are normalized, and writes the gradient.

Our numbers are checked exactly. Our samples are compared with the reference's for the same key: one row in 200 may differ,
where noise is as close as rounding. Peers choose among equal entries as they like, so their indices count by what is there and
their gradients in any order; of their samples only the range is checked, as each has a noise of its own.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from benchmarks.cells import OURS, Cell, Contender, library, torch
from benchmarks.check import sampled_of, to_torch
from benchmarks.softmax import DTYPES, ELEMENTS, copy_cell, exactly, one_array, torch_contender, with_direction, with_first
from tests.support import oracle
from tests.support.top_k import oracle as order

Pairs = list[tuple[Any, Any]]

VOCABULARIES = (128256, 50257)
ROWS = (512, 64, 1)
OTHERS = ((512, 151936), (300, 100003), (128, 262144), (2000, 32000))
OF_A_BATCH = tuple((512, cols) for cols in VOCABULARIES)
OF_STEPS = tuple((rows, VOCABULARIES[0]) for rows in ROWS)
FEW = ((64, VOCABULARIES[1]), (1, VOCABULARIES[1]))
K = 50
COUNTS = (5, 200, 1024)
ROUTERS = ((1048576, 64), (262144, 256))
EXPERTS = 8
NORMALIZE = ("all", "selected")
FILTERS: tuple[dict[str, Any], ...] = ({}, {"top_k": 50}, {"top_p": 0.9}, {"min_p": 0.1})
DIFFERING = 1 / 200  # of the rows that are sampled, where two entries are as good


def cells(fewer: int = 1) -> list[Cell]:
    """Returns all cells, their rows divided by `fewer`: copies, with which the others are compared, and the three ops."""
    return [
        *(copy_cell(dtype, ELEMENTS // fewer) for dtype in DTYPES),
        *_cells(lambda shape: (shape[0] // fewer or 1, shape[1])),
    ]


def _cells(sized: Callable[[tuple[int, int]], tuple[int, int]]) -> Iterator[Cell]:
    for dtype in DTYPES:
        for shape in (*((rows, cols) for cols in VOCABULARIES for rows in ROWS), *OTHERS):
            yield cell_of(dtype, sized(shape), K)
    yield from (cell_of("float32", sized(OF_A_BATCH[0]), k) for k in COUNTS)
    yield from (cell_of(dtype, sized(shape), 1) for dtype in DTYPES for shape in OF_STEPS)
    for dtype in DTYPES:
        yield from (weights_cell(dtype, sized(shape), K) for shape in (*OF_A_BATCH, *FEW))
        for shape in map(sized, ROUTERS):
            for normalize in NORMALIZE:
                yield weights_cell(dtype, shape, EXPERTS, normalize, is_router=True)
                yield _gradient(dtype, shape, EXPERTS, normalize)
    for dtype in DTYPES:
        for options in FILTERS:
            yield from (sampled_cell(dtype, sized(shape), options) for shape in (*OF_A_BATCH, *OF_STEPS[1:]))


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


# Truths.


def _truth_of_rows(x: np.ndarray, k: int, normalize: str | None = None) -> tuple[oracle.Truth, np.ndarray]:
    """Returns the values of the largest entries of rows, or their weights, and their indices."""
    indices = order.top_k(x, k)[1]
    if normalize is None:
        return exactly(oracle.to64(x)), indices
    return oracle.softmax(x, where=_selected(x, indices) if normalize == "selected" else None), indices


def _selected(x: np.ndarray, indices: np.ndarray) -> np.ndarray:
    mask = np.zeros(x.shape, bool)
    np.put_along_axis(mask, indices, True, -1)
    return mask


def _at(truth: oracle.Truth, indices: np.ndarray) -> oracle.Truth:
    return oracle.Truth(*(np.take_along_axis(array, indices, -1) for array in (truth.value, truth.budget)))


def _found(k: int, normalize: str | None, x: np.ndarray) -> list[oracle.Truth]:
    """The truth of ours."""
    whole, indices = _truth_of_rows(x, k, normalize)
    return [_at(whole, indices), exactly(oracle.to64(indices))]


def _found_by_peers(k: int, normalize: str | None, inputs: Sequence[Any], output: Any) -> Pairs:
    """Pairs the values that peers found with the truth, and the entries at their indices if they give any."""
    x, values, *indices = _some_rows(*inputs, *jax.tree.leaves(output))
    whole, true_indices = _truth_of_rows(x, k, normalize)
    truth = _at(whole, true_indices)
    return [(values, truth), *((np.take_along_axis(whole.value, at, -1), truth) for at in indices)]


def _true_gradient(k: int, normalize: str, dtype: str, x: np.ndarray, cotangent: np.ndarray) -> oracle.Truth:
    """Computes the gradient in the logits; its two parts may be rounded to the dtype before they are added up."""
    indices = order.top_k(x, k)[1]
    t = np.zeros(x.shape)
    np.put_along_axis(t, indices, oracle.to64(cotangent), -1)
    where = _selected(x, indices) if normalize == "selected" else None
    return oracle.softmax_derivative(x, t, where=where, saved=dtype)


def _gradient_of_peers(k: int, normalize: str, dtype: str, inputs: Sequence[Any], output: Any) -> Pairs:
    """The gradients of rows in increasing order: which of two equal logits has which cotangent is theirs to say."""
    x, cotangent, gradient = _some_rows(*inputs, *jax.tree.leaves(output))
    truth = _true_gradient(k, normalize, dtype, x, cotangent)
    ordered = np.sort(oracle.to64(gradient), -1).astype(gradient.dtype)
    return [(ordered, _at(truth, np.argsort(truth.value, -1)))]


def _some_rows(*arrays: jax.Array) -> list[np.ndarray]:
    at = sampled_of(*arrays[0].shape)
    return [np.asarray(array[at]) for array in arrays]


def _same_as(reference: Callable[..., jax.Array], inputs: Sequence[Any], output: Any) -> Pairs:
    """The share of samples that are not those of the reference, and how large it may be."""
    samples, expected = np.asarray(output), np.asarray(reference(*inputs))
    assert samples.shape == expected.shape, f"shape {samples.shape}, should be {expected.shape}"
    return [(np.mean(samples != expected), oracle.Truth(np.zeros(()), np.asarray(DIFFERING)))]


def _in_range(inputs: Sequence[Any], output: Any) -> Pairs:
    logits, samples = inputs[0], np.asarray(output)
    is_out = (samples < 0) | (samples >= logits.shape[-1])
    return [(is_out.astype(np.float64), exactly(np.zeros(logits.shape[:-1])))]


def _no_truth(*rows):
    raise AssertionError("samples are compared by `sample`")


# Cells.


def cell_of(dtype: str, shape: tuple[int, int], k: int) -> Cell:
    sample = functools.partial(_found_by_peers, k, None)
    contenders = [
        Contender(OURS, lambda: lambda x: library.top_k(x, k)),
        Contender("jax", lambda: lambda x: lax.top_k(x, k), sample=sample),
        torch_contender("torch", lambda: lambda x: torch().topk(x, k, dim=-1)[0], sample=sample),
        torch_contender("flashinfer", lambda: _flashinfer_top_k(k), needs=("flashinfer", "torch"), sample=sample),
    ]
    if k == 1:
        truth = functools.partial(_found, k, None)
        of_argmax = Contender("argmax", lambda: lambda x: jnp.argmax(x, -1, keepdims=True), truth=lambda x: truth(x)[1:])
        contenders.append(of_argmax)
    return Cell(
        "top_k",
        "forward",
        dtype,
        shape,
        f"k={k}",
        _size(shape, dtype),
        one_array(shape, dtype),
        tuple(contenders),
        functools.partial(_found, k, None),
    )


def _flashinfer_top_k(k: int) -> Callable[..., Any]:
    find = importlib.import_module("flashinfer").top_k
    return lambda x: find(x, k, sorted=True)[0]


def weights_cell(dtype: str, shape: tuple[int, int], k: int, normalize: str = "all", is_router: bool = False) -> Cell:
    written = shape[0] * k * (jnp.dtype(dtype).itemsize + 4) if is_router else 0
    sample = functools.partial(_found_by_peers, k, normalize)
    contenders = (
        Contender(OURS, lambda: lambda x: library.softmax_top_k(x, k, normalize=normalize)),
        Contender("jax", lambda: functools.partial(_weights_of_jax, k, normalize), sample=sample),
        torch_contender("torch", lambda: functools.partial(_weights_of_torch, k, normalize), sample=sample),
    )
    return Cell(
        "softmax_top_k",
        "forward",
        dtype,
        shape,
        _options_of_weights(k, normalize),
        _size(shape, dtype) + written,
        one_array(shape, dtype),
        contenders,
        functools.partial(_found, k, normalize),
    )


def _gradient(dtype: str, shape: tuple[int, int], k: int, normalize: str) -> Cell:
    """The gradient alone, from what the forward pass saved.

    "scatter" is the reference: XLA's scatter into the part of the gradient that all elements of a row have. The kernel for the
    gradient of a router stays as long as it is faster than that.
    """
    size, found = _size(shape, dtype), _size((shape[0], k), dtype)
    read = (size if normalize == "all" else found) + found + 4 * shape[0] * k

    def of(function):
        return {
            "build": lambda: lambda vjp, cotangent: vjp(cotangent)[0],
            "prepare": with_first(lambda x: jax.vjp(lambda x: function(x)[0], x)[1]),
        }

    def of_torch(x, cotangent):
        x, cotangent = to_torch(x, cotangent)
        x.requires_grad_()
        return _weights_of_torch(k, normalize, x), x, cotangent

    sample = functools.partial(_gradient_of_peers, k, normalize, dtype)
    options: dict[str, Any] = {"k": k, "normalize": normalize, "implementation": "xla"}
    reference = functools.partial(jaxsoftmax.softmax_top_k, **options)
    contenders = (
        Contender(OURS, **of(lambda x: library.softmax_top_k(x, k, normalize=normalize))),
        Contender("jax", **of(functools.partial(_weights_of_jax, k, normalize)), sample=sample),
        torch_contender("torch", _backward_of_torch, prepare=of_torch, sample=sample),
        Contender("scatter", **of(reference)),
    )
    return Cell(
        "softmax_top_k",
        "backward",
        dtype,
        shape,
        _options_of_weights(k, normalize),
        read + size,
        with_direction(shape, dtype, (shape[0], k)),
        contenders,
        lambda x, cotangent: [_true_gradient(k, normalize, dtype, x, cotangent)],
    )


def _options_of_weights(k: int, normalize: str) -> str:
    return f"k={k}" if normalize == "all" else f"k={k} normalize={normalize}"


def _weights_of_jax(k, normalize, x):
    """Computes the weights in float32, as models compute a router."""
    if normalize == "selected":
        values, indices = lax.top_k(x, k)
        return jax.nn.softmax(values.astype(jnp.float32), axis=-1).astype(x.dtype), indices
    weights, indices = lax.top_k(jax.nn.softmax(x.astype(jnp.float32), axis=-1), k)
    return weights.astype(x.dtype), indices


def _weights_of_torch(k, normalize, x):
    if normalize == "selected":
        return torch().softmax(x.topk(k, dim=-1)[0], -1, dtype=torch().float32).to(x.dtype)
    return torch().softmax(x, -1, dtype=torch().float32).topk(k, dim=-1)[0].to(x.dtype)


def _backward_of_torch() -> Callable[..., Any]:
    return lambda weights, x, cotangent: torch().autograd.grad(weights, x, cotangent, retain_graph=True)


def sampled_cell(dtype: str, shape: tuple[int, int], options: dict[str, Any]) -> Cell:
    def inputs(key, hurtful):
        return *one_array(shape, dtype)(key, hurtful), jax.random.fold_in(key, 4)

    reference = jax.jit(lambda x, key: jaxsoftmax.categorical(key, x, implementation="xla", **options))
    contenders = [Contender(OURS, lambda: lambda x, key: library.categorical(key, x, **options))]
    if not options.keys() - {"top_k"}:
        contenders.append(Contender("jax", lambda: functools.partial(_samples_of_jax, options.get("top_k")), sample=_in_range))
    contenders.append(
        torch_contender(
            "flashinfer",
            lambda: _flashinfer_sampler(options),
            prepare=lambda x, key: to_torch(x),
            needs=("flashinfer", "torch"),
            sample=_in_range,
        )
    )
    return Cell(
        "categorical",
        "forward",
        dtype,
        shape,
        " ".join(f"{name}={value:g}" for name, value in options.items()),
        _size(shape, dtype),
        inputs,
        tuple(contenders),
        _no_truth,
        shared=1,
        sample=functools.partial(_same_as, reference),
    )


def _samples_of_jax(k, x, key):
    """Draws samples with noise of float32, as noise of bfloat16 has 8 bits."""
    if k is None:
        return jax.random.categorical(key, x.astype(jnp.float32))
    values, indices = lax.top_k(x, k)
    place = jax.random.categorical(key, values.astype(jnp.float32))
    return jnp.take_along_axis(indices, place[:, None], -1)[:, 0]


def _flashinfer_sampler(options: dict[str, Any]) -> Callable[..., Any]:
    """Its samplers with a filter take probabilities."""
    module = importlib.import_module("flashinfer.sampling")
    if not options:
        return module.sampling_from_logits
    ((name, value),) = options.items()
    sample = getattr(module, f"{name}_sampling_from_probs")
    return lambda x: sample(module.softmax(x), value)
