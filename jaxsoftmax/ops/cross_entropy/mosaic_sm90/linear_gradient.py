"""The losses of a linear layer together with their gradients on Hopper, by one product of a kernel, and two of XLA.

The kernel makes the logits. In their place it stores the weights of scores, relative to the largest score of a row in each tile
of classes. The results of rows come from logits that are not rounded. When the log-sum-exp of each row is known, which one
collective merges if devices share the classes, another kernel turns weights into the gradient of the logits, in place.

XLA's products of a weight whose sizes are not aligned are slow. Such a weight has four products for one block of classes after
another instead, whose copies are aligned, as log-probabilities have them.
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
from jaxsoftmax._gpu import matmul
from jaxsoftmax._gpu.kernel import kernel_of, tile_transforms, written_in_place
from jaxsoftmax.ops.cross_entropy import across_devices, linear_terms, parts, xla
from jaxsoftmax.ops.cross_entropy.linear_gradient import LINEAR_CROSS_ENTROPY_GRADIENT
from jaxsoftmax.ops.cross_entropy.linear_parts import gradients_of_layer
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import linear_blocks, linear_loss
from jaxsoftmax.ops.cross_entropy.mosaic_sm90.linear_loss import TILE_CLASSES

_COLUMNS = 64  # columns that registers hold at a time
_SLOTS = 3  # tiles in shared memory: one that comes, one that is computed, and one that leaves
_BLOCKS = 2  # blocks of threads of the second kernel, for each multiprocessor


@dataclass(frozen=True)
class LinearGradientPlan:
    """Runs `linear_cross_entropy_gradient`."""

    problem: Problem
    blocks: int  # one for each multiprocessor
    is_aligned: bool  # False if the sizes of the weight are not
    remark = None

    def describe(self) -> str:
        if self.is_aligned:
            return linear_loss.describe(has_staging=True) + ", weights of scores in memory"
        return linear_loss.describe(has_staging=False) + ", then again with a stage less for each block of classes"

    def run(self, **operands: Any) -> list[jax.Array]:
        """Computes the results of the operation from its operands."""
        run = _with_weights if self.is_aligned else _by_blocks
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
    (axis,), refusal = head.class_axes, linear_loss.refusal_of_layer(problem, ("bfloat16",))
    is_aligned = weight.shape[axis] % 64 == 0 and linear_loss.is_whole(axis, weight)
    return refusal or LinearGradientPlan(problem, target.multiprocessors, is_aligned)


def _by_blocks(blocks, params, operands) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Computes results, and gradients by name, by the kernels of log-probabilities, which compute logits twice."""
    head, wrt = params["head"], params["wrt"]
    factors, labels, of_log_probs = operands.pop("factors"), operands["labels"], head.of_log_probs()
    of_loss = {name: operands.pop(name) for name in head.operands_of_loss if name in operands}
    operands["labels"] = own_labels = _own_labels(head, labels, classes := _classes(head, operands))
    scale, has_entropy = operands.get("scale"), _needs_entropy(params)
    of_rows = linear_loss.terms_of_rows(of_log_probs, blocks, **operands, return_entropy=has_entropy)
    terms, m, d = _terms(head, labels, classes, of_rows, scale)
    by_nll = head.by_nll(factors, terms[0], of_loss)
    numbers = xla.factors(by_nll, terms[1], 0, head.z_loss, 1)
    b = jnp.where((by_nll != 0) & (d == 0), jnp.nan, numbers["b"])  # of a row of no scores, whose loss is NaN
    operands |= {"labels": own_labels[:, None], "m": m, "d": d, "a": numbers["a"], "b": b[:, None]}
    of_layer = tuple([name for name in wrt if name != "scale"])
    gradients = linear_blocks.by_blocks(of_log_probs, of_layer, blocks, operands)
    found = dict(zip(of_layer, gradients, strict=True)) | _by_scale(params, by_nll, scale, terms)
    return head.of_terms(terms, 1, of_loss)[: 2 + head.return_entropy], found


def _with_weights(blocks, params, operands) -> tuple[list[jax.Array], dict[str, jax.Array]]:
    """Computes results, and gradients by name, for a part of the rows at a time."""
    head, wrt = params["head"], params["wrt"]
    classes = _classes(head, operands)
    rows = {name: operand for name, operand in operands.items() if name not in ("weight", "bias")}
    weight, bias = operands["weight"], operands.get("bias")
    dtype, of_weight = rows["hidden"].dtype, weight.dtype
    weight = weight.astype(dtype)  # once for all parts
    weigh, turn = (jax.jit(functools.partial(*each)) for each in ((_weigh, params, blocks), (_turned, blocks)))  # lowered once

    def part(sums, own):
        # In whole tiles, as a copy of weights of fewer rows would be as large as the logits.
        count = len(own["hidden"])
        own = {name: parts.filled_up(name, each, linear_loss.rows_in_tiles(count)) for name, each in own.items()}
        hidden, labels, factors, scale = own["hidden"], own["labels"], own["factors"], own.get("scale")
        own_labels = _own_labels(head, labels, classes)
        weights, *of_tiles = weigh(hidden, weight, own_labels, bias, scale)
        of_rows = linear_loss.merged(of_tiles, own_labels, classes, scale)
        terms, m, d = _terms(head, labels, classes, of_rows, scale)
        by_nll = head.by_nll(factors, terms[0], own)
        g = turn(weights, own_labels, *_numbers(head, of_tiles[0], m, d, of_rows[2], by_nll, scale, terms))
        more = gradients_of_layer(head, 0, wrt, g, hidden, weight, of_weight)
        by_rows = [more.pop("hidden")] if "hidden" in wrt else []
        by_rows += _by_scale(params, by_nll, scale, terms).values()
        results = [each[:count] for each in (*head.of_terms(terms, 1, own)[: 2 + head.return_entropy], *by_rows)]
        return more if sums is None else jax.tree.map(jnp.add, sums, more), results

    most, bytes_of_row = parts.MOST_WITH_GRADIENT, classes * dtype.itemsize
    sums, found = parts.by_parts(part, most, bytes_of_row, rows, is_first_apart=True, is_differentiated=False)
    names = [name for name in ("hidden", "scale") if name in wrt]
    n_results = len(found) - len(names)
    return found[:n_results], sums | dict(zip(names, found[n_results:], strict=True))


def _weigh(params, blocks, hidden, weight, labels, bias, scale) -> list[jax.Array]:
    """Computes the weights of scores, `[rows, classes]`, and what rows have in each tile of classes."""
    head = params["head"]
    classes, is_scaled = weight.shape[head.class_axes[0]], scale is not None
    of_rows = [scale * linear_loss.LOG2E] if is_scaled else []
    of_tiles = jax.ShapeDtypeStruct((pl.cdiv(classes, TILE_CLASSES), len(labels)), jnp.float32)
    return linear_loss.launch(
        functools.partial(linear_loss.reduce_logits, has_scale=is_scaled, has_bias=bias is not None, classes=classes),
        head.of_log_probs(),
        blocks,
        linear_loss.in_tiles(*head.class_axes, hidden, weight, labels, *of_rows),
        bias,
        [jax.ShapeDtypeStruct((len(labels), classes), hidden.dtype), *[of_tiles] * (3 + _needs_entropy(params))],
        name="linear_cross_entropy_weights_mosaic",
        staged=True,
    )


def _numbers(head, maxima, m, d, chosen, factors, scale, terms) -> list[jax.Array]:
    """Computes what multiplies the weights of rows in tiles, `[tiles of classes, rows]`, and what those of labels become.

    Args:
      head: the loss.
      maxima: the largest score of each row in each tile.
      m: that of each row.
      d: the other number of the state of each row.
      chosen: the score of the label, if this device has it.
      factors: factors of the losses.
      scale: scale of the scores, or None.
      terms: what `_terms` returns.
    """
    nll, lse, *_ = terms
    a, t = xla.factors(factors, lse, 0, head.z_loss, 1)["a"], factors
    if scale is not None:
        a, t = a * scale, t * scale
    counts = factors != 0  # a row of no scores that counts has gradients of NaN, as its loss is
    of_tiles = online.weights(maxima, m, axis=0, scale=scale) * jnp.where(counts, a / jnp.where(counts, d, 1), 0)[None]
    of_label = a * jnp.expm1(-nll) + (a - t)  # a * p - t, which is exact where p is close to 1
    if head.logits_soft_cap is not None:
        of_label *= 1 - (chosen / head.logits_soft_cap) ** 2
    return [of_tiles, jnp.where(counts, of_label, 0)]


def _turned(blocks, weights, labels, of_tiles, of_label) -> jax.Array:
    """Turns weights into the gradient of the logits, in their memory."""
    run = kernel_of(
        _turn,
        out_type=[],
        grid=(_BLOCKS * blocks,),
        grid_names=("block",),
        scratch_types=[
            plgpu.SMEM((_SLOTS, matmul.ROWS, TILE_CLASSES), weights.dtype, transforms=tile_transforms(weights.dtype)),
            plgpu.Barrier(num_barriers=_SLOTS),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="linear_cross_entropy_gradient_mosaic",
    )
    return written_in_place(run, weights, of_tiles, of_label, labels)


def _turn(of_tiles, of_label, labels, weights, slots, full):
    """Multiplies weights by a number of each row and tile, and replaces those of the labels, in place."""
    tiles = weights.shape[0] // matmul.ROWS, of_tiles.shape[0]
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    steps = (tiles[0] * tiles[1] - block + blocks - 1) // blocks

    def tile(step):
        place = block + step * blocks
        return linear_loss.LogitTile(lax.rem(place, tiles[1]), pl.ds(place // tiles[1] * matmul.ROWS, matmul.ROWS), labels)

    def in_memory(step):
        own = tile(step)
        return weights.at[own.rows, pl.ds(own.first, TILE_CLASSES)]

    def copy(step):
        at = lax.rem(step, _SLOTS)
        plgpu.copy_gmem_to_smem(in_memory(step), slots.at[at], full.at[at])

    pl.when(steps > 0)(lambda: copy(0))

    @pl.loop(0, steps)
    def _(step):
        at, own = lax.rem(step, _SLOTS), tile(step)
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the tile in the next slot has left it
        pl.when(step + 1 < steps)(lambda: copy(step + 1))
        plgpu.barrier_wait(full.at[at])
        factor, replacement = own.number(of_tiles.at[own.column]), own.number(of_label)
        for first in range(0, TILE_CLASSES, _COLUMNS):
            part = slots.at[at, :, pl.ds(first, _COLUMNS)]
            weight = plgpu.load(part, layout=matmul.LAYOUT).astype(jnp.float32)
            factors, replacements = (linear_loss.along_rows(each, weight.shape) for each in (factor, replacement))
            gradient = jnp.where(own.is_label(weight.shape, first), replacements, weight * factors)
            slots[at, :, pl.ds(first, _COLUMNS)] = gradient.astype(slots.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(slots.at[at], in_memory(step))

    plgpu.wait_smem_to_gmem(0)


def _own_labels(head, labels, classes) -> jax.Array:
    """Returns the labels as this device counts its classes."""
    return across_devices.local_labels(labels, classes, head.cuts(classes)) if head.axis_name else labels


def _terms(head, labels, classes, of_rows, scale) -> tuple[list[jax.Array], jax.Array, jax.Array]:
    """Computes `nll`, `lse`, and the entropy if there is what it needs, and the state of rows of all devices.

    Args:
      head: the loss.
      labels: labels that count the classes of all devices.
      classes: number of classes of this device.
      of_rows: what `linear_loss.merged` returns.
      scale: scale of the scores, or None.
    """
    m, d, chosen, *sums = of_rows
    options = {"dtype": m.dtype, "scale": scale, "return_entropy": bool(sums)}
    if head.axis_name:
        *terms, m, d = across_devices.merge_terms(of_rows, labels, cuts=head.cuts(classes), return_state=True, **options)
    else:
        chosen = jnp.where((labels >= 0) & (labels < classes), chosen, jnp.nan)
        terms = xla.results_of(labels, m, d, chosen, *sums, **options)
    return terms, m, d


def _by_scale(params, factors, scale, terms) -> dict[str, jax.Array]:
    """Computes the derivative by the scale, if it is asked for."""
    head = params["head"]
    return {"scale": head.share(head.by_scale(factors, scale, terms, 1))} if "scale" in params["wrt"] else {}


def _needs_entropy(params) -> bool:
    return params["head"].return_entropy or "scale" in params["wrt"]


def _classes(head, operands) -> int:
    return operands["weight"].shape[head.class_axes[0]]
