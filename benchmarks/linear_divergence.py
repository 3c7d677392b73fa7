"""The cells of divergences of two linear layers, losses of distillation, with the student's gradients and memory.

A shape has the tokens, the student's hidden size, the teacher's, and the vocabulary. Gradients are those by the student's
hidden states and weight, and the teacher is constant. The loss is the mean over rows. With the option `reduction=none` each row
has a divergence and a cotangent of its own.

`flops` are those of the products alone: four for the mean, the logits of both layers and the two gradients, and six for the
divergences of rows, where logits that are not kept are computed twice. `bytes` are those of hidden states and weights, and of
the gradients. The peer `products` is the same products alone, of whole logits and a gradient of the logits that it is given.
`jax.numpy` has whole logits in float32, which are not rounded.

The peer `liger` is Liger's mean divergence from parts of the logits, the only one of its losses that computes the logits of
both layers. That of Jensen and Shannon with a share of 0 is the forward one. Its loss for the forward one alone, which
`ops/fused_linear_kl_div.py` has, is given the probabilities of the teacher, whole.

The `error` of the mean and of gradients is that of `linear_cross_entropy.py`: 0.25 is as far from float64 as with whole logits
of 16 bits. The divergences of rows may differ by the roundings of sums of products in float32, as in `linear_log_probs.py`.
"""

import functools
import importlib
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks import linear_cross_entropy as linear
from benchmarks.cells import OURS, Cell, Contender, library, torch
from benchmarks.check import sampled, to_torch
from benchmarks.softmax import torch_contender
from tests.support import oracle

SHAPES = ((8192, 4096, 4096, 151936), (8192, 2048, 4096, 128256), (5000, 3072, 2560, 50257))
KINDS = {"forward_kl": 0.0, "js": 0.5}  # the share of the teacher in Liger's mixture

_DTYPE = "bfloat16"


def cells(shrink: int = 1) -> list[Cell]:
    """All cells; with `shrink`, of shapes smaller by this factor."""
    kinds = (("forward_kl", "mean"), ("js", "mean"), ("forward_kl", "none"))
    sizes = [tuple(size // shrink for size in shape) for shape in SHAPES]
    return [cell_of(shape, kind, reduction) for shape in sizes for kind, reduction in kinds]


def cell_of(shape: tuple[int, ...], kind: str, reduction: str) -> Cell:
    tokens, hidden_size, teacher_size, vocabulary = shape
    sizes, is_mean = hidden_size + teacher_size, reduction == "mean"

    def of(divergence: Callable[..., Any]):
        """Builds the divergences and the gradients by hidden states and weight."""

        def run(hidden, weight, teacher_hidden, teacher_weight, cotangents):
            found, pull = jax.vjp(lambda h, w: divergence(h, w, teacher_hidden, teacher_weight), hidden, weight)
            return found, pull(jnp.ones_like(found) if is_mean else cotangents)

        return lambda: run

    def ours(*layers):
        return library.linear_divergence(*layers, kind=kind, reduction=reduction)

    def of_jax(hidden, weight, teacher_hidden, teacher_weight):
        logits = _logits(hidden, weight, "float32"), _logits(teacher_hidden, teacher_weight, "float32")
        found = _divergence(kind, *logits)
        return jnp.mean(found) if is_mean else found

    def given(*inputs):
        return *inputs[:4], _gradient_of_logits(*inputs, kind=kind, is_mean=is_mean)

    contenders = [
        Contender(OURS, of(ours)),
        Contender("products", lambda: functools.partial(_products, again=not is_mean), prepare=given),
        Contender("jax.numpy", of(of_jax)),
    ]
    if is_mean:  # which Liger's loss always is
        contenders.append(_liger(KINDS[kind]))
    return Cell(
        "linear_divergence",
        "forward+backward",
        _DTYPE,
        shape,
        f"kind={kind}" + ("" if is_mean else " reduction=none"),
        (sizes + hidden_size) * (tokens + vocabulary) * jnp.dtype(_DTYPE).itemsize,
        functools.partial(_inputs, shape=shape),
        tuple(contenders),
        linear._no_truth,
        flops=2 * tokens * vocabulary * ((1 if is_mean else 2) * sizes + 2 * hidden_size),
        sample=functools.partial(_sample, kind, is_mean),
        fewer=lambda inputs, output: [],
        program=True,
    )


@functools.partial(jax.jit, static_argnames="shape")
def _inputs(key, hurtful, shape):
    """Makes the layers of a student and of a teacher, and a cotangent for each row."""
    tokens, *sizes, vocabulary = shape
    keys = jax.random.split(jax.random.fold_in(key, 3), 3)
    layers = [
        linear._inputs(own, hurtful, (tokens, size, vocabulary), "hv", _DTYPE, _DTYPE)[:2]
        for own, size in zip(keys, sizes, strict=False)
    ]
    return *layers[0], *layers[1], jax.random.normal(keys[2], (tokens,))


# Contenders.


def _logits(hidden, weight, dtype=_DTYPE):
    return jnp.einsum("th,hv->tv", hidden, weight, preferred_element_type=dtype)


def _divergence(kind, student, teacher):
    """Computes the divergence of each row from the logits of both."""
    log_q, log_p = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    if kind == "forward_kl":
        return jnp.sum(jnp.exp(log_p) * (log_p - log_q), -1)
    log_r = jnp.logaddexp(log_p, log_q) - np.log(2)
    return jnp.sum(jnp.exp(log_p) * (log_p - log_r) + jnp.exp(log_q) * (log_q - log_r), -1) / 2


def _products(hidden, weight, teacher_hidden, teacher_weight, of_logits, *, again):
    student, gradients = linear._products(hidden, weight, of_logits, letters="hv", weight_dtype=_DTYPE)
    logits = [student, _logits(teacher_hidden, teacher_weight)]
    if again:  # XLA would compute equal logits once
        layers = lax.optimization_barrier(((hidden, weight), (teacher_hidden, teacher_weight)))
        logits += [_logits(*layer) for layer in layers]
    return logits, gradients


@functools.partial(jax.jit, static_argnames=("kind", "is_mean"))
def _gradient_of_logits(hidden, weight, teacher_hidden, teacher_weight, cotangents, kind, is_mean):
    """Takes the gradient of the student's logits, as products take another time with other numbers."""
    teacher = _logits(teacher_hidden, teacher_weight).astype(jnp.float32)
    student = _logits(hidden, weight)
    _, pull = jax.vjp(lambda x: _divergence(kind, x.astype(jnp.float32), teacher), student)
    return pull(jnp.full_like(cotangents, 1 / len(hidden)) if is_mean else cotangents)[0]


def _liger(share: float) -> Contender:
    """Liger's mean loss, whose weights have the classes first."""

    def build():
        loss_of = importlib.import_module("liger_kernel.transformers.functional").liger_fused_linear_jsd

        def run(hidden, weight, teacher_hidden, teacher_weight):
            loss = loss_of(hidden, weight, teacher_hidden, teacher_weight, jsd_beta=share)
            of_hidden, of_weight = torch().autograd.grad(loss, (hidden, weight))
            return loss.detach(), (of_hidden, of_weight.T)

        return run

    def prepare(hidden, weight, teacher_hidden, teacher_weight, cotangents):
        hidden, weight, *teacher = to_torch(hidden, weight.T, teacher_hidden, teacher_weight.T)
        return hidden.requires_grad_(True), weight.requires_grad_(True), *teacher

    return torch_contender("liger", build, prepare=prepare, needs=("liger_kernel", "torch"))


# Whether it is right.


def _sample(kind: str, is_mean: bool, inputs: Sequence[Any], output: Any) -> list[tuple[Any, Any]]:
    """Pairs the mean, or the divergences of all rows, or some rows of logits, and parts of the gradients with their truth."""
    *states, cotangents = inputs
    hidden, weight, teacher_hidden, teacher_weight = states
    *results, of_hidden, of_weight = jax.tree.leaves(output)
    tokens, size = hidden.shape
    with jax.enable_x64(True):
        weights = weight.astype(jnp.float64), teacher_weight.astype(jnp.float64)
        cotangents = jnp.full(tokens, 1 / tokens) if is_mean else cotangents.astype(jnp.float64)
        at, some = sampled(tokens), sampled(size)

        def of_rows(part):
            return _from_logits(kind, (hidden[part], teacher_hidden[part]), weights, cotangents[part])

        logits, _, _, of_logits, spread = of_rows(at)
        values: list[Any] = []
        budgets: list[Any] = []
        whole: Any = None
        for start in range(0, tokens, linear._ROWS):
            part = slice(start, start + linear._ROWS)
            _, own, budget, *gradient = of_rows(part)
            values.append(own)
            budgets.append(budget)
            added = linear._of_weight(hidden[part], some, *gradient)
            whole = added if whole is None else jax.tree.map(jnp.add, whole, added)
        exactly_and_rounded = np.concatenate(values, 1)
        if results[0].ndim == 2:
            truths = [oracle.Truth(np.asarray(own), np.full(own.shape, oracle.TINY)) for own in logits]
            pairs = [(np.asarray(found[at]), truth) for found, truth in zip(results, itertools.cycle(truths), strict=False)]
        elif is_mean:
            pairs = [(np.asarray(results[0]), linear._loss(exactly_and_rounded))]
        else:
            pairs = [(np.asarray(results[0]), oracle.Truth(exactly_and_rounded[0], np.concatenate(budgets)))]
        truths, spreads = zip(linear._of_hidden(of_logits, spread, weights[0]), whole, strict=True)
        found = of_hidden[at], of_weight[some]
        pairs += map(linear._distance, found, truths, spreads, (hidden.dtype, weight.dtype), (1, 0))
    return pairs


@functools.partial(jax.jit, static_argnames="kind")
def _from_logits(kind, hidden, weights, cotangents):
    """Computes the truth of some rows from the logits of both layers.

    Returns:
      The logits of both; the divergences; their budgets; the gradient of the student's logits; and the squares of its errors,
      if all roundings of whole logits are as large as they can be. Divergences and gradient are two stacked arrays: exact ones,
      and those of whole logits.
    """
    dtype, c = hidden[0].dtype, cotangents[:, None]
    logits = [x.astype(jnp.float64) @ weight for x, weight in zip(hidden, weights, strict=True)]

    def from_rounded(round_):
        values, pull = jax.vjp(functools.partial(_divergence, kind), *map(round_, logits))
        slopes = pull(jnp.ones_like(values))
        return (values, round_(c * slopes[0])), slopes

    exactly, slopes = from_rounded(lambda x: x)
    rounded, _ = from_rounded(functools.partial(linear._rounded, dtype=dtype))
    # Sums of H products round at each addition, and so do those of weights: a lane adds up one of 512.
    budget = sum(
        oracle.EPS * (x.shape[1] + s.shape[1] / 512 + 64) * (jnp.max(jnp.abs(s), 1) + 1) * (1 + jnp.sum(jnp.abs(slope), 1))
        for x, s, slope in zip(hidden, logits, slopes, strict=True)
    )
    far = jnp.abs(c) * _change(kind, *logits) + jnp.abs(exactly[1])
    of_weights = 16 * oracle.EPS * jnp.abs(c) * jax.nn.softmax(logits[0])  # all there is, where the softmaxes lie far apart
    squares = (float(jnp.finfo(dtype).eps) / 2 * far + of_weights) ** 2
    values, gradient = (jnp.stack(parts) for parts in zip(exactly, rounded, strict=True))
    return logits, values, budget, gradient, squares


def _change(kind, student, teacher):
    """Bounds the change of the gradient of the student's logits, if each logit changes by as much as its absolute value."""
    log_q, log_p = jax.nn.log_softmax(student), jax.nn.log_softmax(teacher)
    q, p = jnp.exp(log_q), jnp.exp(log_p)
    of_q, of_p = (
        jnp.abs(s) + jnp.sum(weights * jnp.abs(s), 1, keepdims=True) for s, weights in ((student, q), (teacher, p))
    )  # of the logarithms
    if kind == "forward_kl":
        return q * of_q + p * of_p
    of_r = p / (p + q)
    log_ratio = log_q - jnp.logaddexp(log_p, log_q) + np.log(2)
    distance = jnp.abs(log_ratio - jnp.sum(q * log_ratio, 1, keepdims=True))
    own = q * (of_q * distance + of_r * (of_q + of_p))
    return (own + q * jnp.sum(own, 1, keepdims=True)) / 2
