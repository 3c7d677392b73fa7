"""The cells of cross-entropy of a linear layer: the mean loss of hidden states, and its gradients by them and by the weight.

A shape has the tokens, the hidden size and the vocabulary. `flops` are those of the products alone, of one forward and of three
with the gradients; `bytes` are those of hidden states and weight, and of their gradients. The peer `products` is the products
alone, of whole logits and a gradient of the logits that it is given.

An `error` of 0.25 is that of whole logits: as far from float64 as they are, with exact products, and logits, their gradient
and results rounded once to the dtypes that they have. 1 is four times as far: a sum over parts rounds more often. Of the
gradients some rows of the hidden states, and all of the vocabulary for some of the hidden size, are compared.
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

from benchmarks.cells import OURS, Cell, Contender, library, torch
from benchmarks.check import sampled, to_torch
from benchmarks.softmax import torch_contender
from tests.support import oracle

SHAPES = ((16384, 4096, 128256), (8192, 4096, 128256), (4096, 4096, 128256), (8192, 2048, 32000))  # the largest first
OTHERS = ((10240, 2560, 151936), (5000, 3072, 50257))  # that no bar names
TOKENS, HIDDEN = 8192, 4096
VOCABULARIES = tuple(2**power for power in range(18, 12, -1))  # of the figure

_CUTE_OF_LIGER = "liger_kernel.ops.cutedsl.ops.fused_linear_cross_entropy_sm90"
_ROWS = 1024  # that are compared with the truth at a time
_MOST = 4  # times as far from it as whole logits are


def cells(shrink: int = 1) -> list[Cell]:
    """All cells; with `shrink`, of shapes smaller by this factor."""
    return [cell_of(*(size // shrink for size in shape), **options) for shape, options in _kinds()]


def _kinds() -> Iterator[tuple[tuple[int, int, int], dict[str, Any]]]:
    for shape in (*SHAPES, *OTHERS):
        yield shape, {"backward": True}
    yield SHAPES[1], {"backward": True, "class_axis": 0}
    yield SHAPES[1], {"backward": True, "weight_dtype": "float32"}
    for shape in (*SHAPES, *OTHERS):
        yield shape, {}
    for vocabulary in VOCABULARIES:
        yield (TOKENS, HIDDEN, vocabulary), {"backward": True, "peers": ("optax",)}


def cell_of(
    tokens: int,
    hidden_size: int,
    vocabulary: int,
    *,
    backward: bool = False,
    class_axis: int = 1,
    weight_dtype: str = "bfloat16",
    peers: Sequence[str] | None = None,
) -> Cell:
    dtype, letters = "bfloat16", "hv" if class_axis else "vh"
    shape = tokens, hidden_size, vocabulary

    def inputs(key, hurtful):
        return _inputs(key, hurtful, shape, letters, dtype, weight_dtype)

    def of_jax(loss):
        return jax.value_and_grad(loss, (0, 1)) if backward else loss

    def ours(hidden, weight, labels):
        return library.linear_cross_entropy(hidden, weight, labels, class_axis=class_axis)

    def of_optax():
        losses = importlib.import_module("optax").softmax_cross_entropy_with_integer_labels
        product = functools.partial(jnp.einsum, f"th,{letters}->tv")
        return of_jax(lambda h, w, labels: jnp.mean(losses(product(h, w.astype(h.dtype)), labels).astype(jnp.float32)))

    def products():
        return functools.partial(_products, letters=letters, weight_dtype=weight_dtype)

    def given(hidden, weight, labels):
        weight = weight.astype(hidden.dtype)
        return (hidden, weight, _gradient_of_logits(hidden, weight, labels, letters)) if backward else (hidden, weight)

    own = [
        Contender("products", products, prepare=given),
        Contender("optax", of_optax, needs=("optax",)),
        *(_of_torch(*names, backward, class_axis) for names in _PEERS_OF_TORCH if weight_dtype == dtype),
    ]
    contenders = [Contender(OURS, lambda: of_jax(ours)), *(peer for peer in own if peers is None or peer.name in peers)]
    words = ["class_axis=0"] * (class_axis == 0) + [f"weight={weight_dtype}"] * (weight_dtype != dtype)
    itemsizes = jnp.dtype(dtype).itemsize, jnp.dtype(weight_dtype).itemsize
    return Cell(
        "linear_cross_entropy",
        "forward+backward" if backward else "forward",
        dtype,
        shape,
        " ".join(words),
        (2 if backward else 1) * hidden_size * (tokens * itemsizes[0] + vocabulary * itemsizes[1]),
        inputs,
        tuple(contenders),
        _no_truth,
        flops=(3 if backward else 1) * 2 * math.prod(shape),
        sample=functools.partial(_sample, letters),
        fewer=lambda inputs, output: [],
        program=True,
    )


def _no_truth(*rows):
    raise AssertionError("it is compared by `sample`")


@functools.partial(jax.jit, static_argnames=("shape", "letters", "dtype", "weight_dtype"))
def _inputs(key, hurtful, shape, letters, dtype, weight_dtype):
    """Logits are standard normals; if `hurtful`, those of every third token are 16 times as large."""
    keys, sizes = jax.random.split(key, 3), dict(zip("thv", shape, strict=True))
    hidden = jax.random.normal(keys[0], shape[:2], dtype)
    hidden = jnp.where(hurtful & (jnp.arange(len(hidden)) % 3 == 1)[:, None], 16 * hidden, hidden)
    weight = jax.random.normal(keys[1], [sizes[letter] for letter in letters], weight_dtype)
    return hidden, weight * jnp.asarray(shape[1] ** -0.5, weight_dtype), jax.random.randint(keys[2], shape[:1], 0, shape[2])


# Contenders.


def _products(hidden, weight, of_logits=None, *, letters, weight_dtype):
    logits = jnp.einsum(f"th,{letters}->tv", hidden, weight)
    if of_logits is None:
        return logits
    of_hidden = jnp.einsum(f"tv,{letters}->th", of_logits, weight)
    return logits, (of_hidden, jnp.einsum(f"th,tv->{letters}", hidden, of_logits, preferred_element_type=weight_dtype))


@functools.partial(jax.jit, static_argnames="letters")
def _gradient_of_logits(hidden, weight, labels, letters):
    """Takes the gradient of the mean loss, as products take another time with other numbers."""
    logits = jnp.einsum(f"th,{letters}->tv", hidden, weight)
    chances = jax.nn.softmax(logits.astype(jnp.float32))
    return ((chances - jax.nn.one_hot(labels, logits.shape[1])) / len(labels)).astype(hidden.dtype)


# Names, modules and functions. The second of Liger is in CuTe DSL, for Hopper, whole blocks of 256 classes and of 128 tokens.
_PEERS_OF_TORCH = (
    ("quack", "quack.linear_cross_entropy", "chunked_linear_cross_entropy"),
    ("liger", "liger_kernel.transformers.functional", "liger_fused_linear_cross_entropy"),
    ("liger", _CUTE_OF_LIGER, "liger_fused_linear_cross_entropy_sm90"),
)


def _of_torch(name: str, module: str, function: str, backward: bool, class_axis: int) -> Contender:
    """A peer whose weight has the classes first."""
    is_cute = module == _CUTE_OF_LIGER

    def build():
        loss_of = getattr(importlib.import_module(module), function)

        def run(hidden, weight, labels):
            loss = loss_of(hidden, weight, labels)
            if not backward:
                return loss
            of_hidden, of_weight = torch().autograd.grad(loss, (hidden, weight))
            return loss.detach(), (of_hidden, of_weight.T if class_axis else of_weight)

        return run

    def prepare(hidden, weight, labels):
        hidden, weight, labels = to_torch(hidden, weight.T if class_axis else weight, labels)
        return hidden.requires_grad_(backward), weight.requires_grad_(backward), labels.long()

    needs = module.split(".")[0], *(["cutlass"] if is_cute else []), "torch"
    return torch_contender(name, build, prepare=prepare, needs=needs, capability=9 if is_cute else None)


# Whether it is right.


def _sample(letters: str, inputs: Sequence[Any], output: Any) -> list[tuple[Any, Any]]:
    """The loss, or some rows of logits, and parts of the gradients."""
    hidden, weight, labels = inputs
    first, *gradients = jax.tree.leaves(output)
    tokens, size = hidden.shape
    with jax.enable_x64(True):
        weight = weight.astype(hidden.dtype).astype(jnp.float64)
        weight = weight if letters == "hv" else weight.T
        at, some = sampled(tokens), sampled(size)
        logits, _, of_logits, spread = _from_logits(hidden[at], weight, labels[at], tokens)
        losses: list[Any] = []
        of_weight: Any = None
        for start in range(0, tokens, _ROWS):
            part = hidden[start : start + _ROWS]
            _, own, gradient, squares = _from_logits(part, weight, labels[start : start + _ROWS], tokens)
            losses.append(own)
            if gradients:
                added = _of_weight(part, some, gradient, squares)
                of_weight = added if of_weight is None else jax.tree.map(jnp.add, of_weight, added)
        if first.ndim:
            pairs = [(np.asarray(first[at]), oracle.Truth(np.asarray(logits), np.full(logits.shape, oracle.TINY)))]
        else:
            pairs = [(np.asarray(first), _loss(np.concatenate(losses, 1)))]
        if gradients:
            found = gradients[0][at], (gradients[1] if letters == "hv" else gradients[1].T)[some]
            truths, spreads = zip(_of_hidden(of_logits, spread, weight), of_weight, strict=True)
            pairs += map(_distance, found, truths, spreads, (hidden.dtype, inputs[1].dtype), (1, 0))
    return pairs


@functools.partial(jax.jit, static_argnames="tokens")
def _from_logits(hidden, weight, labels, tokens):
    """The logits; the losses and the gradient of the logits by their mean, exactly and of whole logits, the two stacked.

    And the square of how far from the exact gradient an element may be, where all roundings are as large as they can be.
    """
    dtype = hidden.dtype
    logits = hidden.astype(jnp.float64) @ weight

    def from_rounded(round_: Callable[[Any], Any]):
        s = round_(logits)
        lse = jax.nn.logsumexp(s, -1, keepdims=True)
        losses = (lse - jnp.take_along_axis(s, labels[:, None], 1))[:, 0]
        return losses, round_((jnp.exp(s - lse) - jax.nn.one_hot(labels, s.shape[1])) / tokens)

    both = from_rounded(lambda x: x), from_rounded(functools.partial(_rounded, dtype=dtype))
    p = jnp.exp(logits - jax.nn.logsumexp(logits, -1, keepdims=True))
    size = p * jnp.abs(logits)
    far = (size + p * jnp.sum(size, -1, keepdims=True)) / tokens + jnp.abs(both[0][1])
    squares = (float(jnp.finfo(dtype).eps) / 2 * far) ** 2
    return logits, *(jnp.stack(parts) for parts in zip(*both, strict=True)), squares


@jax.jit
def _of_weight(hidden, some, gradient, squares):
    """What some tokens add to some rows of the gradient of the weight, and to how far from it an element may be, squared."""
    part = hidden[:, some].astype(jnp.float64)
    return part.T @ gradient, jnp.sum(part**2, 1) @ squares


@jax.jit
def _of_hidden(gradient, squares, weight):
    """The gradient of hidden, and how far from it an element may be, squared."""
    return gradient @ weight.T, squares @ jnp.sum(weight**2, 0)


def _rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """Rounds to the precision of a dtype: XLA may leave out a conversion there and back."""
    kind = jnp.finfo(dtype)
    return lax.reduce_precision(x, kind.nexp, kind.nmant)


def _loss(losses: np.ndarray) -> oracle.Truth:
    """Computes the truth of the mean: errors of its terms may cancel in one way of rounding and not in another."""
    exactly, beside = np.mean(losses, 1)
    by_chance = 4 * np.linalg.norm(losses[1] - losses[0]) / losses.shape[1]
    return oracle.Truth(exactly, _MOST * (abs(beside - exactly) + by_chance) + 8 * oracle.EPS * (abs(exactly) + 1))


def _distance(found: Any, truths: jax.Array, spread: jax.Array, dtype: Any, axis: int) -> tuple[np.ndarray, oracle.Truth]:
    """How far it is from the truth, in all and along an axis, as a pair whose difference and relative error this is.

    Along the axis, where it is of few numbers, chance allows twice as much, and counts as whole logits' own error at least the
    square root of `spread`: a single logit between two numbers of its dtype may be rounded to the nearer one in one way only.
    """
    size, error, budget = np.array(_norms(found, truths, dtype, axis))
    budget[:-1] = 2 * np.maximum(budget[:-1], np.sqrt(spread))
    return size + error, oracle.Truth(size, _MOST * budget + oracle.TINY * found.size)


@functools.partial(jax.jit, static_argnames=("dtype", "axis"))
def _norms(found, truths, dtype, axis):
    """The norms of the truth, the error and the change by rounding: along an axis and, at the end, over all elements."""
    exactly, beside = truths[0], _rounded(truths[1], dtype)
    arrays = jnp.stack([exactly, found.astype(jnp.float64) - exactly, beside - exactly])
    along = jnp.linalg.norm(arrays, axis=1 + axis)
    return jnp.concatenate([along, jnp.linalg.norm(along, axis=1, keepdims=True)], 1)
