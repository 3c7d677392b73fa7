"""The cells of log-probabilities and entropies of a linear layer, and of GRPO's loss from them, with gradients and memory.

A shape has the tokens, the hidden size and the vocabulary. Gradients are those by hidden states and weight, for a cotangent of
each result. With the option `temperatures` logits are divided by a number for each row, and with `temperature` by one number.
`grpo` is the loss of GRPO without a divergence: the mean of clipped ratios over the tokens that count. It is computed from
log-probabilities, and with `products=3` by `rl.linear_policy_gradient_loss`, which computes the logits once, and adds up the
gradient of the weight in 16 bits.

`flops` are those of the products alone: of one forward, and of four with the gradients, since logits that are not kept are
computed twice. `bytes` are those of hidden states and weight, and of their gradients. The peer `products` is the same products
alone, of whole logits and a gradient of the logits that it is given. `jax.numpy` has whole logits in float32, which are not
rounded, and `jax.numpy bfloat16` rounds them before it casts them to float32: its products are the faster ones.

The peer `liger` is Liger's kernels for Hopper, which need `nvidia-cutlass-dsl`. They take one temperature, and round logits to
16 bits and entropies to bfloat16, so that their `error` is above 1. `liger triton` is Liger's loss from parts of the logits,
which has neither an entropy nor a temperature. Both get the weight with the classes first, as they take it.

The `error` of gradients and of GRPO's loss is that of `linear_cross_entropy.py`: 0.25 is as far from float64 as with whole
logits. The results of all rows are compared. They may differ by the roundings of a sum of `H` products in float32, each as
large as that of the largest score. Log-probabilities from logits that are rounded to 16 bits have an error above 1.
"""

import functools
import importlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from benchmarks import linear_cross_entropy as linear
from benchmarks import log_probs
from benchmarks.cells import OURS, Cell, Contender, library, torch
from benchmarks.check import sampled, to_torch
from benchmarks.softmax import torch_contender
from tests.support import oracle

SHAPES = ((8192, 4096, 128256), (16384, 4096, 151936), (8192, 2048, 32000), (5000, 3072, 50257))
GRPO = (32768, 4096, 151936)
TEMPERATURE = 0.75

_DTYPE = "bfloat16"
_OF_JAX = {"jax.numpy": "float32", "jax.numpy bfloat16": "bfloat16"}  # the dtype of logits before they are cast to float32
_LOG_RATIOS = (-0.4, -0.1, 0.1, 0.4)  # of GRPO: two are clipped, and none is so close to a limit that rounding decides


def cells(shrink: int = 1) -> list[Cell]:
    """All cells; with `shrink`, of shapes smaller by this factor."""
    layers = [*((shape, 1) for shape in SHAPES), (SHAPES[0], 0)]
    kinds: list[tuple[Any, dict[str, Any]]] = [
        *((layer, {"backward": backward}) for backward in (False, True) for layer in layers),
        *((layer, {"backward": True, "temperature": TEMPERATURE}) for layer in layers[:-1]),
    ]
    found = [
        cell_of(*(size // shrink for size in shape), entropy=entropy, class_axis=class_axis, **options)
        for (shape, class_axis), options in kinds
        for entropy in (False, True)
    ]
    return [*found, *(grpo_cell(*(size // shrink for size in GRPO), products=products) for products in (4, 3))]


def cell_of(
    tokens: int,
    hidden_size: int,
    vocabulary: int,
    *,
    backward: bool = False,
    entropy: bool = False,
    class_axis: int = 1,
    temperature: float | None = None,
) -> Cell:
    """A cell; with gradients each row has a temperature of its own if there is no `temperature`."""
    letters, shape = "hv" if class_axis else "vh", (tokens, hidden_size, vocabulary)

    def of(layer):
        """Builds the results of a layer, and `backward` its gradients, at a temperature, for their cotangents."""

        def both(hidden, weight, tokens, temperatures, *cotangents):
            chosen = temperatures if temperature is None else temperature
            results, pull = jax.vjp(lambda h, w: layer(h, w, tokens, chosen, entropy), hidden, weight)
            return results, pull(cotangents[: len(results)])

        def forward(hidden, weight, tokens, *_):
            return layer(hidden, weight, tokens, None, entropy)

        return lambda: both if backward else forward

    def rows_of(temperatures, of_log_p, of_entropy):
        if temperature is not None or not backward:
            temperatures = jnp.full_like(temperatures, temperature or 1)
        return temperatures, of_log_p, of_entropy if entropy else jnp.zeros_like(of_entropy)

    def given(hidden, weight, tokens, *of_rows):
        if not backward:
            return hidden, weight
        of_logits = _gradient_of_logits(hidden, weight, tokens, *rows_of(*of_rows), letters=letters, entropy=entropy)
        return hidden, weight, of_logits

    contenders = [
        Contender(OURS, of(functools.partial(_ours, class_axis))),
        Contender("products", lambda: functools.partial(_products, letters=letters), prepare=given),
    ]
    if temperature is None:  # else they would take as long as with a temperature for each row
        contenders += [Contender(name, of(functools.partial(_of_jax, letters, dtype))) for name, dtype in _OF_JAX.items()]
    if temperature is not None or not backward:  # Liger has one temperature for all rows
        options = {"temperature": temperature or 1.0, "return_entropy": entropy}
        contenders.append(_liger("liger", class_axis, _cotangents if backward else None, **options))
    if not backward and not entropy:
        contenders.append(_liger("liger triton", class_axis, None))
    words = ["class_axis=0"] * (class_axis == 0) + ["entropy=1"] * entropy
    if backward:
        words.append("temperatures=1" if temperature is None else f"temperature={temperature:g}")
    sample = functools.partial(_sample, _policy, rows_of, letters, backward)
    inputs = functools.partial(_inputs, shape=shape, letters=letters)
    return _cell("linear_log_probs", backward, shape, " ".join(words), inputs, tuple(contenders), sample)


def grpo_cell(tokens: int, hidden_size: int, vocabulary: int, *, products: int) -> Cell:
    """A cell of GRPO's loss; three products are those of the function that has the loss in it."""
    shape = tokens, hidden_size, vocabulary

    def of(layer):
        def run(hidden, weight, tokens, *of_rows):
            def loss(hidden, weight):
                (log_p,) = layer(hidden, weight, tokens, None, False)
                return jnp.sum(_terms_of_grpo(log_p, *_rows_of_grpo(*of_rows)[1:]))

            return jax.value_and_grad(loss, (0, 1))(hidden, weight)

        return lambda: run

    contenders = (
        Contender(OURS, of(functools.partial(_ours, 1)) if products == 4 else lambda: _policy_gradient),
        *(Contender(name, of(functools.partial(_of_jax, "hv", dtype))) for name, dtype in _OF_JAX.items()),
        # Its own loss of GRPO makes the products for the gradients in float32, and would take seconds.
        _liger("liger", 1, _loss_of_grpo, lambda *of_rows: _rows_of_grpo(*of_rows)[1:]),
    )
    sample = functools.partial(_sample, _policy_of_grpo, _rows_of_grpo, "hv", True)
    inputs, options = functools.partial(_inputs_of_grpo, shape=shape), "products=3" if products == 3 else ""
    return _cell("grpo", True, shape, options, inputs, contenders, sample, products)


def _cell(op, backward, shape, options, inputs, contenders, sample, products=4) -> Cell:
    tokens, hidden_size, vocabulary = shape
    return Cell(
        op,
        "forward+backward" if backward else "forward",
        _DTYPE,
        shape,
        options,
        (2 if backward else 1) * hidden_size * (tokens + vocabulary) * jnp.dtype(_DTYPE).itemsize,
        inputs,
        contenders,
        linear._no_truth,
        flops=(products if backward else 1) * 2 * math.prod(shape),
        sample=sample,
        fewer=lambda inputs, output: [],
        program=True,
    )


@functools.partial(jax.jit, static_argnames=("shape", "letters"))
def _inputs(key, hurtful, shape, letters):
    """Makes a layer and tokens, and for each row a temperature and two cotangents."""
    keys = jax.random.split(jax.random.fold_in(key, 3), 3)
    temperature = jax.random.uniform(keys[0], shape[:1], minval=0.5, maxval=1.5)
    cotangents = (jax.random.normal(k, shape[:1]) for k in keys[1:])
    return *linear._inputs(key, hurtful, shape, letters, _DTYPE, _DTYPE), temperature, *cotangents


@functools.partial(jax.jit, static_argnames="shape")
def _inputs_of_grpo(key, hurtful, shape):
    """Makes a layer and tokens, and for each row an old log-probability, an advantage, and whether it counts."""
    hidden, weight, tokens = linear._inputs(key, hurtful, shape, "hv", _DTYPE, _DTYPE)
    keys = jax.random.split(jax.random.fold_in(key, 3), 3)
    log_p = jaxsoftmax.linear_log_probs(hidden, weight, tokens, implementation="xla")
    old = log_p - jax.random.choice(keys[0], jnp.array(_LOG_RATIOS), shape[:1])
    advantages = 0.5 + jax.random.normal(keys[1], shape[:1])  # a loss of 0 would have no relative error
    return hidden, weight, tokens, old, advantages, jax.random.bernoulli(keys[2], 0.75, shape[:1])


# Contenders: log-probabilities, and entropies if asked for.


def _ours(class_axis, hidden, weight, tokens, temperature, entropy):
    options = {"temperature": temperature, "class_axis": class_axis, "return_entropy": entropy}
    results = library.linear_log_probs(hidden, weight, tokens, **options)
    return results if entropy else (results,)


def _of_jax(letters, dtype, hidden, weight, tokens, temperature, entropy):
    return _of_logits(_logits(hidden, weight, letters, dtype), tokens, temperature, entropy)


def _logits(hidden, weight, letters, dtype=_DTYPE):
    return jnp.einsum(f"th,{letters}->tv", hidden, weight, preferred_element_type=dtype)


def _policy_gradient(hidden, weight, tokens, *of_rows):
    tokens, old, advantages, mask = (each[None] for each in (tokens, *of_rows))  # one sequence

    def loss(hidden, weight):
        options = {"clip": log_probs.CLIP, "where": mask}
        return library.linear_policy_gradient_loss(hidden[None], weight, tokens, old, advantages, **options)[0]

    return jax.value_and_grad(loss, (0, 1))(hidden, weight)


def _of_logits(logits, tokens, temperature, entropy):
    logits = logits.astype(jnp.float32)
    log_p = jax.nn.log_softmax(logits if temperature is None else logits / temperature[:, None])
    chosen = jnp.take_along_axis(log_p, tokens[:, None], 1)[:, 0]
    return (chosen, log_probs._entropy(log_p)) if entropy else (chosen,)


def _products(hidden, weight, of_logits=None, *, letters):
    results = linear._products(hidden, weight, of_logits, letters=letters, weight_dtype=_DTYPE)
    if of_logits is None:
        return results
    hidden, weight = lax.optimization_barrier((hidden, weight))  # XLA would compute equal logits once
    return _logits(hidden, weight, letters), results


@functools.partial(jax.jit, static_argnames=("letters", "entropy"))
def _gradient_of_logits(hidden, weight, tokens, temperature, *cotangents, letters, entropy):
    """Takes the gradient of the results, as products take another time with other numbers."""
    results, pull = jax.vjp(lambda x: _of_logits(x, tokens, temperature, entropy), _logits(hidden, weight, letters))
    return pull(cotangents[: len(results)])[0]


def _rows_of_grpo(old, advantages, mask):
    """Returns what GRPO's terms know of rows: a temperature, and then the share of each row instead of the mask."""
    mask = mask.astype(old.dtype)
    return jnp.ones_like(old), old, advantages, mask / jnp.sum(mask)


def _terms_of_grpo(log_p, old, advantages, share, module=jnp):
    """Computes the terms of the loss, which is their sum, by functions of `jax.numpy` or torch."""
    ratio = module.exp(log_p - old)
    return -share * module.minimum(ratio * advantages, module.clip(ratio, 1 - log_probs.CLIP, 1 + log_probs.CLIP) * advantages)


def _liger(
    name: str,
    class_axis: int,
    outcome: Callable[..., Any] | None,
    rows_of: Callable[..., Any] = lambda *of_rows: of_rows,
    **options: Any,
) -> Contender:
    """A function of Liger, with gradients by torch if there is an `outcome`.

    Args:
      name: a key of `_OF_LIGER`.
      class_axis: axis of the cell's weight that has the classes.
      outcome: computes what is differentiated, and its cotangents or None, from the results and from the numbers of rows.
      rows_of: computes these numbers from those that the inputs have for each row.
      options: those of Liger's function.
    """
    load, *modules = _OF_LIGER[name]

    def build():
        layer = load()

        def run(hidden, weight, tokens, *of_rows):
            results = layer(hidden, weight, tokens, **options)
            if outcome is None:
                return results
            results, cotangents = outcome(results, *of_rows)
            of_hidden, of_weight = torch().autograd.grad(results, (hidden, weight), cotangents)
            return [result.detach() for result in results], (of_hidden, of_weight.T if class_axis else of_weight)

        return run

    def prepare(hidden, weight, tokens, *of_rows):
        given = hidden, weight.T if class_axis else weight, tokens, *rows_of(*of_rows)
        hidden, weight, tokens, *of_rows = to_torch(*given)
        has_gradients = outcome is not None
        return hidden.requires_grad_(has_gradients), weight.requires_grad_(has_gradients), tokens.long(), *of_rows

    return torch_contender(name, build, prepare=prepare, needs=(*modules, "torch"), capability=9)


def _cotangents(results, _, *cotangents):
    return results, cotangents[: len(results)]


def _loss_of_grpo(results, *of_rows):
    return [_terms_of_grpo(*results, *of_rows, module=torch()).sum()], None


def _cute_of_liger():
    os.environ["LIGER_SCALED_CE_SM90_VALIDATE_TARGETS"] = "0"  # a check of tokens waits for the GPU, and ours has none
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")

    def layer(*arrays, **options):
        results = module.LigerFusedLinearScaledCrossEntropyFunction.apply(*arrays, **options)
        losses, *entropies = results if isinstance(results, tuple) else (results,)
        return -losses, *entropies

    return layer


def _triton_of_liger():
    module = importlib.import_module("liger_kernel.transformers.functional")
    return lambda *arrays: (-module.liger_fused_linear_cross_entropy(*arrays, reduction="none"),)


_OF_LIGER: dict[str, tuple[Any, ...]] = {  # the function that loads it, and the modules that it needs
    "liger": (_cute_of_liger, "liger_kernel", "cutlass"),
    "liger triton": (_triton_of_liger, "liger_kernel"),
}


# Whether it is right.


def _policy(log_p, entropy, of_log_p, of_entropy):
    return (log_p, entropy), of_log_p, of_entropy


def _policy_of_grpo(log_p, entropy, *of_rows):
    terms, pull = jax.vjp(lambda log_p: _terms_of_grpo(log_p, *of_rows), log_p)
    return (terms,), *pull(jnp.ones_like(terms)), jnp.zeros_like(entropy)


def _sample(
    policy: Callable[..., Any],
    rows_of: Callable[..., Any],
    letters: str,
    backward: bool,
    inputs: Sequence[Any],
    output: Any,
) -> list[tuple[Any, Any]]:
    """Pairs the results of rows, or the loss, or some rows of logits, and parts of the gradients with their truth.

    Args:
      policy: computes the results from log-probabilities, entropies and what `rows_of` returns after the temperature, and
        two numbers for each row: the derivatives of the weighted sum of all results by its log-probability and its entropy.
      rows_of: computes, from what inputs have for each row, a temperature and the operands of `policy`.
      letters: the axes of the weight.
      backward: whether the output has gradients.
      inputs: those of the cell.
      output: the result of a contender.
    """
    hidden, weight, tokens, *of_rows = inputs
    leaves = jax.tree.leaves(output)
    results, gradients = (leaves[:-2], leaves[-2:]) if backward else (leaves, [])
    with jax.enable_x64(True):
        of_rows = tokens, *rows_of(*(row.astype(jnp.float64) for row in of_rows))
        weight = weight.astype(jnp.float64)
        weight = weight if letters == "hv" else weight.T
        at, some = sampled(hidden.shape[0]), sampled(hidden.shape[1])
        logits, _, _, of_logits, spread = _from_logits(policy, hidden[at], weight, *(row[at] for row in of_rows))
        values: list[Any] = []
        budgets: list[Any] = []
        of_weight: Any = None
        for start in range(0, len(tokens), linear._ROWS):
            part = slice(start, start + linear._ROWS)
            own = _from_logits(policy, hidden[part], weight, *(row[part] for row in of_rows))
            values.append(own[1])
            budgets.append(own[2])
            if backward:
                added = linear._of_weight(hidden[part], some, *own[3:])
                of_weight = added if of_weight is None else jax.tree.map(jnp.add, of_weight, added)
        exactly_and_rounded, budget = np.concatenate(values, 2), np.concatenate(budgets, 1)
        if results[0].ndim == 2:
            truth = oracle.Truth(np.asarray(logits), np.full(logits.shape, oracle.TINY))
            pairs = [(np.asarray(whole[at]), truth) for whole in results]
        elif results[0].ndim == 1:
            pairs = [
                (np.asarray(result), oracle.Truth(*truth))
                for result, *truth in zip(results, exactly_and_rounded[0], budget, strict=False)
            ]
        else:
            pairs = [(np.asarray(results[0]), linear._loss(exactly_and_rounded[:, 0] * len(tokens)))]
        if backward:
            found = gradients[0][at], (gradients[1] if letters == "hv" else gradients[1].T)[some]
            truths, spreads = zip(linear._of_hidden(of_logits, spread, weight), of_weight, strict=True)
            pairs += map(linear._distance, found, truths, spreads, (hidden.dtype, inputs[1].dtype), (1, 0))
    return pairs


@functools.partial(jax.jit, static_argnames="policy")
def _from_logits(policy, hidden, weight, tokens, temperature, *of_rows):
    """Computes the truth of some rows from their logits.

    Returns:
      The logits; the results; the budgets of log-probabilities and entropies; the gradient of the logits; and the squares
      of its errors, if all roundings of whole logits are as large as they can be. Results and gradient are two stacked
      arrays: exact ones, and those of whole logits.
    """
    dtype, temperature = hidden.dtype, temperature[:, None]
    logits = hidden.astype(jnp.float64) @ weight
    onehot = jax.nn.one_hot(tokens, logits.shape[1], dtype=logits.dtype)

    def from_rounded(round_):
        s = round_(logits) / temperature
        log_p = jax.nn.log_softmax(s)
        p, chosen = jnp.exp(log_p), jnp.take_along_axis(log_p, tokens[:, None], 1)[:, 0]
        entropy = -jnp.sum(p * log_p, 1)
        results, *numbers = policy(chosen, entropy, *of_rows)
        c, e = (number[:, None] for number in numbers)
        gradient = (c * (onehot - p) - e * p * (log_p + entropy[:, None])) / temperature
        return (jnp.stack(results), round_(gradient)), (s, p, log_p, chosen, entropy, c, e)

    exactly, (s, p, log_p, chosen, entropy, c, e) = from_rounded(lambda x: x)
    rounded, _ = from_rounded(functools.partial(linear._rounded, dtype=dtype))
    # Sums of H products round at each addition, and so do those of weights: a lane adds up one of 512.
    unit = oracle.EPS * (hidden.shape[1] + logits.shape[1] / 512 + 64) * (jnp.max(jnp.abs(s), 1) + 1)
    budgets = jnp.stack([unit, 2 * unit * (1 + entropy)])
    size, surprise = jnp.abs(s), jnp.abs(log_p + entropy[:, None])
    change = size + jnp.sum(p * size, 1, keepdims=True)  # of log-probabilities, if scores are rounded
    _, slope = jax.jvp(lambda chosen: policy(chosen, entropy, *of_rows)[1], (chosen,), (jnp.ones_like(chosen),))
    of_c = jnp.abs(slope)[:, None] * jnp.take_along_axis(change, tokens[:, None], 1)
    of_e = change * (surprise + 1) + jnp.sum(p * surprise * size, 1, keepdims=True)
    far = (of_c * jnp.abs(onehot - p) + p * (jnp.abs(c) * change + jnp.abs(e) * of_e)) / temperature + jnp.abs(exactly[1])
    squares = (float(jnp.finfo(dtype).eps) / 2 * far) ** 2
    results, gradient = (jnp.stack(parts) for parts in zip(exactly, rounded, strict=True))
    return logits, results, budgets, gradient, squares
