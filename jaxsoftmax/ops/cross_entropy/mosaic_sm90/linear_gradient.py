"""The losses of a linear layer together with their gradients on Hopper, by one product that stores no logits, and two of XLA.

The product stores `w = 2**(s * log2(e) - k)` of scores `s` in bfloat16, which has the exponents of float32, with a number `k`
for each row. Then the gradient of the logits is `f * w` except at the label, where `f` is a number of each row. So no pass over
an array as large as the logits turns them into their gradient. XLA multiplies `w` as it is, after the entries at the labels are
replaced:

    the gradient of the weight is  w^T (f * hidden),  and that of hidden is  f * (w weight^T).

`f` has the log-sum-exp, which is known when the product has ended, and `k` must be known before: it is the largest score among
some classes. If a weight overflows, because the largest score of its row is far above that, the product is made again with the
largest scores.

A weight whose sizes no tile divides is copied, and its products without copies are slow. It has four products for one block of
classes after another instead, as log-probabilities have them.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import fused
from jaxsoftmax.ops.cross_entropy import linear_terms, parts, xla
from jaxsoftmax.ops.cross_entropy.linear_gradient import LINEAR_CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.cross_entropy.linear_parts import of_part
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import linear_loss
from jaxsoftmax.ops.cross_entropy.mosaic_sm90.linear_loss import LEAST_EXPONENT, LOG2E, TILE_CLASSES, along_rows
from jaxsoftmax.ops.cross_entropy.parts import product

_SOME = 256  # classes that the largest score of a row is looked for among, before the product
# Exponents of weights, in base 2: that of the largest score among some classes, so that weights down to 2**-112 of it are
# there, and the largest that a row may have. The factor of a row has its inverse, and must not underflow.
_USUAL, _MOST = -20, 72
# The least magnitude that the derivative of a loss by its log-sum-exp counts with. With a z-loss it may be 0, and the entry at
# the label is divided by it. The gradient of other classes is wrong by as much, relative to that of the label.
_LEAST_SLOPE = 2.0**-30
_OTHERWISE = {"hidden": 0, "labels": xla.NO_ROW, "scale": 1, "factors": 0}  # operands of rows, in those that fill up a tile


@dataclass(frozen=True)
class LinearGradientPlan:
    """Runs `linear_cross_entropy_gradient`."""

    problem: Problem
    blocks: int  # one for each multiprocessor
    is_whole: bool  # True if tiles divide the weight
    remark = None

    def describe(self) -> str:
        own = linear_loss.describe(has_staging=True)
        return f"{own}, weights of scores in memory" if self.is_whole else f"{own}, made twice for blocks of classes"

    def run(self, **operands: Any) -> list[jax.Array]:
        """Computes the results of the operation from its operands."""
        run = _with_weights if self.is_whole else _by_blocks
        results, gradients = run(self.blocks, self.problem.params, linear_terms.present(**operands))
        return [*results, *(gradients[name].astype(operands[name].dtype) for name in self.problem.params["wrt"])]


def plan(problem: Problem, target: Target) -> LinearGradientPlan | Refusal:
    """Plans a problem of `linear_cross_entropy_gradient`."""
    assert problem.operation is LINEAR_CROSS_ENTROPY_GRADIENT
    head, weight = problem.params["head"], problem.operands["weight"]
    if head.label_smoothing:
        return Refusal("no kernel adds up scores, as label smoothing does")
    if len(weight.shape) > 2:
        return Refusal("the examples of a batch have gradients of the weight of their own")
    is_whole = linear_loss.is_whole(head.class_axes[0], weight)
    return linear_loss.refusal_of_layer(problem, ("bfloat16",)) or LinearGradientPlan(problem, target.multiprocessors, is_whole)


def _by_blocks(blocks, params, operands) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Computes results, and gradients by name, by the kernels of log-probabilities, which compute logits twice."""
    head, wrt = params["head"], params["wrt"]
    factors, of_log_probs = operands.pop("factors"), head.of_log_probs()
    labels, scale, has_entropy = operands["labels"], operands.get("scale"), _needs_entropy(params)
    m, d, chosen, *sums = linear_loss.terms_of_rows(of_log_probs, blocks, **operands, return_entropy=has_entropy)
    terms = _terms(labels, _classes(head, operands), m, d, chosen, sums, scale)
    numbers = xla.factors(factors, terms[1], 0, head.z_loss, 1)
    operands |= {"labels": labels[:, None], "m": m, "d": d, "a": numbers["a"], "b": numbers["b"][:, None]}
    gradient = functools.partial(linear_loss.gradient_of_logits, of_log_probs, blocks, False)
    own, of_layer = operands["hidden"].dtype.itemsize, tuple([name for name in wrt if name != "scale"])
    gradients = linear_terms.gradients_by_blocks(of_log_probs, of_layer, gradient, own, **operands)
    found = dict(zip(of_layer, gradients, strict=True)) | _by_scale(params, factors, scale, terms)
    return head.of_terms(terms, 1)[: 2 + head.return_entropy], found


def _with_weights(blocks, params, operands) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Computes results, and gradients by name, for a part of the rows at a time."""
    head, wrt = params["head"], params["wrt"]
    (axis,) = head.class_axes
    classes = _classes(head, operands)
    rows = {name: operands.pop(name) for name in _OTHERWISE if name in operands}
    kept = operands.pop("weight")
    layer = operands | {"weight": kept.astype(rows["hidden"].dtype)}  # cast once for all parts
    step = max(classes // _SOME, 1)
    some = {name: lax.slice_in_dim(each, 0, classes, step, axis if name == "weight" else 0) for name, each in layer.items()}

    run_kernel = jax.jit(functools.partial(_run_kernel, params, blocks))  # lowered once, for all its calls

    def part(sums, *arrays):
        # In whole tiles, as a copy of weights of fewer rows would be as large as the logits.
        own, count = of_part(rows, arrays), linear_loss.rows_in_tiles(len(arrays[0]))
        own = {name: linear_loss.padded_to(count, each, _OTHERWISE[name]) for name, each in own.items()}
        hidden, labels, factors, scale = own["hidden"], own["labels"], own["factors"], own.get("scale")
        weights, lift, m, d, chosen, *exponents = _weigh(head, run_kernel, layer, some, hidden, labels, scale)
        terms = _terms(labels, classes, m, d, chosen, exponents, scale)
        # The gradient of a row is `factor` times its weights.
        at_label, factor = _at_label(head, terms, chosen, factors), factors
        if head.z_loss:
            slope = 1 + 2 * head.z_loss * terms[1]
            slope = jnp.where(jnp.abs(slope) < _LEAST_SLOPE, jnp.copysign(_LEAST_SLOPE, slope), slope)
            at_label, factor = at_label / slope, factor * slope
        factor *= 1 if scale is None else scale
        counts = (factors != 0) & (d != 0)
        factor = jnp.where(counts, factor / jnp.where(counts, d * lift, 1), 0)
        weights = xla.put(weights, labels[:, None], (at_label * d * lift)[:, None], (1,))
        more, found = {}, []
        if "weight" in wrt:
            scaled = (hidden.astype(factor.dtype) * factor[:, None]).astype(hidden.dtype)
            more["weight"] = product(*((scaled, weights) if axis == 1 else (weights, scaled)), 0, 0, kept.dtype)
        if "bias" in wrt:
            more["bias"] = jnp.sum(weights.astype(factor.dtype) * factor[:, None], 0)
        if "hidden" in wrt:
            found.append((product(weights, layer["weight"], 1, axis, jnp.float32) * factor[:, None]).astype(hidden.dtype))
        found += list(_by_scale(params, factors, scale, terms).values())
        results = head.of_terms(terms, 1)[: 2 + head.return_entropy]
        results = [each[: len(arrays[0])] for each in (*results, *found)]
        return more if sums is None else jax.tree.map(jnp.add, sums, more), results

    bytes_of_row = classes * rows["hidden"].dtype.itemsize
    sums, found = parts.by_parts(part, parts.MOST_WITH_GRADIENT, bytes_of_row, list(rows.values()), is_first_apart=True)
    names = [name for name in ("hidden", "scale") if name in wrt]
    n_results = len(found) - len(names)
    return found[:n_results], sums | dict(zip(names, found[n_results:], strict=True))


def _run_kernel(params, blocks, hidden, weight, labels, has_label, reference, unit, bias) -> list[jax.Array]:
    """Computes the weights of scores relative to a score of each row, and what rows have in each tile of classes."""
    head = params["head"]
    classes = weight.shape[head.class_axes[0]]
    of_tiles = jax.ShapeDtypeStruct((pl.cdiv(classes, TILE_CLASSES), len(labels)), jnp.float32)
    return linear_loss.launch(
        functools.partial(_store, classes=classes),
        head.of_log_probs(),
        blocks,
        (hidden, weight, labels, has_label, reference, unit),
        bias,
        [jax.ShapeDtypeStruct((len(labels), classes), hidden.dtype), *[of_tiles] * (3 + _needs_entropy(params))],
        name="linear_cross_entropy_gradient_mosaic",
        staged=True,
    )


def _weigh(head, run_kernel, layer, some, hidden, labels, scale) -> list[jax.Array]:
    """Computes the weights of scores, `[rows, classes]`, and terms of rows.

    Args:
      head: the loss behind the layer.
      run_kernel: `_run_kernel` of the operands.
      layer: weight, and bias if there is one, by name.
      some: the same of some classes.
      hidden: hidden states of whole tiles of rows.
      labels: labels of the rows.
      scale: scale of the scores of each row, or None.

    Returns:
      The weights `exp(scale * (s - max s)) * lift`; `lift`; the state `(m, d)`; the score of the label; and what an entropy
      needs if it is asked for.
    """
    (axis,), bias = head.class_axes, layer.get("bias")
    unit = LOG2E * (jnp.ones(len(hidden), jnp.float32) if scale is None else scale)

    def weigh(reference):
        in_tiles = linear_loss.in_tiles(axis, hidden, layer["weight"], labels, reference, unit)
        weights, *of_tiles = run_kernel(*in_tiles, bias)
        m, d, score, *exponents = linear_loss.merged(of_tiles, labels, layer["weight"].shape[axis], scale)
        return [weights, reference, (m - reference) * unit + _USUAL, m, d, score, *exponents]

    def again(found):
        _, reference, above, m, *_ = found
        return weigh(jnp.where(above > _MOST, m, reference))

    logits = product(hidden, some["weight"], 1, 1 - axis, jnp.float32)
    logits += some["bias"].astype(jnp.float32)[None] if "bias" in some else 0
    found = weigh(online.shift(jnp.max(xla.capped(logits, head.logits_soft_cap), 1)))
    # A largest score that is infinite is above in the second try too.
    is_over = functools.partial(jnp.any, where=jnp.abs(found[3]) < jnp.inf)
    weights, _, above, *terms = lax.while_loop(lambda found: is_over(found[2] > _MOST), again, found)
    return [weights, jnp.exp2(above), *terms]


def _terms(labels, classes, m, d, chosen, sums, scale) -> list[jax.Array]:
    """Computes `nll`, `lse`, and the entropy if there is what it needs."""
    chosen = jnp.where((labels >= 0) & (labels < classes), chosen, jnp.nan)
    return xla.results_of(labels, m, d, chosen, *sums, dtype=m.dtype, scale=scale, return_entropy=bool(sums))


def _at_label(head, terms, chosen, factors) -> jax.Array:
    """Computes the derivative of each loss by the logit of its label, before a scale. A difference is exact near 0."""
    nll, lse, *_ = terms
    nll = jnp.where(factors != 0, nll, 0)
    slope = 1 if head.logits_soft_cap is None else 1 - (chosen / head.logits_soft_cap) ** 2
    return slope * (jnp.expm1(-nll) + (2 * head.z_loss * lse * jnp.exp(-nll) if head.z_loss else 0))


def _by_scale(params, factors, scale, terms) -> dict[str, jax.Array]:
    """Computes the derivative by the scale, if it is asked for."""
    return {"scale": params["head"].by_scale(factors, scale, terms, 1)} if "scale" in params["wrt"] else {}


def _needs_entropy(params) -> bool:
    return params["head"].return_entropy or "scale" in params["wrt"]


def _classes(head, operands) -> int:
    return operands["weight"].shape[head.class_axes[0]]


def _store(tile, x, numbers, results, staging, *, classes):
    """Stores the weights of a tile's scores, by way of shared memory, and reduces the scores to the states of rows."""
    (weights, maxima, sums, scores, *exponents), (stage,) = results, staging
    at, cap = (tile.column, tile.rows), tile.soft_cap
    if cap is not None:
        x = fused.fused(linear_loss.capped, (cap,), [x], linear_loss.LAYOUT)

    @pl.when(tile.has_label)
    def _():
        scores[at] = jnp.sum(jnp.where(tile.is_label(x.shape), x, 0.0), 1)

    x = tile.of_own_classes(x, classes, -jnp.inf)
    m = jnp.max(x, 1)
    maxima[at] = m
    m, unit = online.shift(m), tile.number(numbers[1])
    # A weight that is needed twice takes registers for both, which there are for a part of the columns.
    columns = TILE_CLASSES if cap is None and not exponents else TILE_CLASSES // 4
    totals, products = [], []
    for first in range(0, TILE_CLASSES, columns):
        score = lax.slice(x, (0, first), (len(x), first + columns))
        exponent = (score - along_rows(m, score.shape)) * along_rows(unit, score.shape)
        weight = jnp.exp2(exponent)
        totals.append(jnp.sum(weight, 1))
        if exponents:
            products.append(jnp.sum(weight * jnp.maximum(exponent, LEAST_EXPONENT), 1))
        if cap is not None:  # beyond the last class the score is infinite
            bent = jnp.maximum(score, -cap) * (1 / cap)
            weight -= weight * bent * bent
        lift = jnp.exp2((m - tile.number(numbers[0])) * unit + _USUAL)
        weight *= along_rows(lift, score.shape)
        if first == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
        stage[:, pl.ds(first, columns)] = weight.astype(stage.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, weights.at[tile.rows, pl.ds(tile.first, TILE_CLASSES)])
    sums[at] = functools.reduce(jnp.add, totals)
    for sums_of_exponents in exponents:
        sums_of_exponents[at] = functools.reduce(jnp.add, products) * (1 / LOG2E)
