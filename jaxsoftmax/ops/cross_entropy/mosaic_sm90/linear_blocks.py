"""The derivatives of log-probabilities of a linear layer on Hopper, for one block of classes after another.

A kernel multiplies the hidden states by the weight once more, as `linear_loss.py` does, and has the states of rows: what it has
of each tile becomes the gradient of the logits there, which is the result. For the gradient by the scale it adds up, for each
row and tile, the gradient of the scores times the scores.

The products of the gradient of a block's logits are those of `linear_products.py`. XLA multiplies if there is one block, if the
sizes of the weight are not aligned, if the rows of a block are in parts, and if a product has too few tiles.
"""

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import fused, matmul
from jaxsoftmax._gpu.kernel import unwritten
from jaxsoftmax.ops.cross_entropy import linear_terms, parts, xla
from jaxsoftmax.ops.cross_entropy.mosaic_sm90 import linear_loss, linear_products
from jaxsoftmax.ops.cross_entropy.mosaic_sm90.linear_loss import LOG2E, TILE_CLASSES

# Bytes that memory moves while all blocks of threads multiply tiles by one step of `matmul.DEPTH` (H200: 4.3 TB/s, 0.75 us).
_BYTES_OF_STEP = 3_200_000


@dataclass(frozen=True)
class LinearBlocksPlan:
    """Runs `linear_log_probs_vjp`."""

    problem: Problem
    blocks: int  # one for each multiprocessor
    classes: int | None  # those of a block whose products are kernels; None if XLA makes the products
    remark = None

    def describe(self) -> str:
        products = "" if self.classes is None else f", products of {self.classes} classes in place"
        return linear_loss.describe(has_staging=True) + products

    def run(self, **operands: Any) -> list[jax.Array]:
        """Computes the results of the operation from its operands."""
        head, wrt = self.problem.params["head"], self.problem.params["wrt"]
        operands = linear_terms.present(**operands)
        if self.classes is None:
            return by_blocks(head, wrt, self.blocks, operands)
        found = _in_place(head, wrt, self.blocks, self.classes, **operands)
        return [found[name].astype(operands[name].dtype) for name in wrt]


def plan(problem: Problem, target: Target) -> LinearBlocksPlan | Refusal:
    """Plans a problem of `linear_log_probs_vjp`."""
    refusal = linear_loss.refusal_of_terms(problem)
    if refusal is None and len(problem.operands["labels"].shape) > 2:
        refusal = Refusal("the examples of a batch have gradients of the weight of their own")
    refusal = refusal or linear_loss.refusal_of_layer(problem)
    return refusal or LinearBlocksPlan(problem, target.multiprocessors, _classes_in_place(problem, target.multiprocessors))


def by_blocks(head, wrt, blocks, operands) -> list[jax.Array]:
    """Computes gradients for a scale that is positive; XLA makes two of the three products."""
    gradient = functools.partial(gradient_of_logits, head, blocks, "scale" in wrt)
    own = operands["hidden"].dtype.itemsize
    return linear_terms.gradients_by_blocks(head, wrt, gradient, own, empty=unwritten, **operands)


def _classes_in_place(problem, blocks) -> int | None:
    """Returns the classes of a block, the fastest number that fits in memory; None if kernels cannot make the products."""
    axis = problem.params["head"].class_axis
    (rows, units), weight = problem.operands["hidden"].shape, problem.operands["weight"]
    classes, rows = weight.shape[axis], linear_loss.rows_in_tiles(rows)
    bytes_of_class = rows * problem.operands["hidden"].dtype.itemsize
    if classes % matmul.DEPTH or not linear_loss.is_whole(axis, weight):
        return None
    if not linear_terms.LEAST_CLASSES * bytes_of_class <= linear_terms.ONE_BLOCK < classes * bytes_of_class:
        return None

    def waves(tiles_of_classes, size):
        return pl.cdiv(tiles_of_classes * pl.cdiv(size, matmul.TILE_ROWS), blocks)

    def steps(tiles):
        """Counts the steps of a block of threads for all classes, if a block of classes has this number of tiles."""
        whole, rest = divmod(pl.cdiv(classes, TILE_CLASSES), tiles)
        products = [waves(each, rows) * units + waves(each, units) * rows for each in (tiles, rest)]
        of_sums = rows * units * 8 / _BYTES_OF_STEP  # gradients of hidden states are read and written
        return (whole * products[0] + products[1]) / matmul.DEPTH + (whole + (rest > 0)) * of_sums

    most = max(linear_terms.BLOCK // bytes_of_class, linear_terms.LEAST_CLASSES) // TILE_CLASSES
    size = min(range(most, 0, -1), key=steps) * TILE_CLASSES
    return size if linear_products.fills((units, size) if axis == 1 else (size, units), blocks) else None


def _in_place(head, wrt, blocks, classes_of_block, *, weight, bias=None, **rows) -> dict[str, jax.Array]:
    """Computes gradients by name, by products that read the weight and write its gradient where they stand."""
    (count, units), axis = rows["hidden"].shape, head.class_axis
    classes, tiled = weight.shape[axis], linear_loss.rows_in_tiles(count)
    rows = {name: parts.filled_up(name, each, tiled) for name, each in rows.items()}
    hidden, labels = rows.pop("hidden"), rows.pop("labels")
    is_by_kernel, options = linear_products.fills((tiled, units), blocks), {"class_axis": axis, "blocks": blocks}

    def add(found, start, size):
        first = jnp.reshape(start // matmul.DEPTH, 1)
        block, window = weight, matmul.Window(axis, first, size)
        if weight.dtype != hidden.dtype:  # a copy that is cast
            block, window = lax.dynamic_slice_in_dim(weight, start, size, axis).astype(hidden.dtype), None
        layer = {"weight": block} | ({} if bias is None else {"bias": lax.dynamic_slice_in_dim(bias, start, size)})
        own_labels = head.labels_of_block(labels, start, size)
        g, of_scale = gradient_of_logits(head, blocks, "scale" in wrt, hidden, layer, own_labels, window=window, **rows)
        new = {}
        if "weight" in wrt:
            new["weight"] = linear_products.write_weight(found["weight"], g, hidden, first, **options)
        if "bias" in wrt:
            of_bias = jnp.sum(g, 0, dtype=jnp.float32)
            new["bias"] = lax.dynamic_update_slice_in_dim(found["bias"], of_bias, start, 0)
        if "hidden" in wrt and is_by_kernel:
            new["hidden"] = linear_products.add_hidden(found["hidden"], g, block, window, **options)
        elif "hidden" in wrt:
            own = block if window is None else lax.dynamic_slice_in_dim(weight, start, size, axis)
            new["hidden"] = found["hidden"] + parts.product(g, own, 1, axis, jnp.float32, head.precision)
        if of_scale is not None:
            new["scale"] = found["scale"] + of_scale
        return new

    starts = {"bias": (classes,), "hidden": (tiled, units), "scale": (tiled,)}
    found = {name: jnp.zeros(shape, jnp.float32) for name, shape in starts.items() if name in wrt}
    found |= {"weight": unwritten(weight.shape, weight.dtype)} if "weight" in wrt else {}
    whole, rest = divmod(classes, classes_of_block)
    steps = jnp.arange(whole, dtype=jnp.int32)
    found, _ = lax.scan(lambda found, i: (add(found, i * classes_of_block, classes_of_block), None), found, steps)
    if rest:  # XLA would cast the whole weight, if it saw where the last block starts
        found = add(found, lax.optimization_barrier(jnp.int32(classes - rest)), rest)
    return {name: each[:count] if name in ("hidden", "scale") else each for name, each in found.items()}


def gradient_of_logits(
    head, blocks, wants_scale, hidden, layer, labels, m, d, a=None, b=None, e=None, scale=None, window=None
) -> tuple[jax.Array, jax.Array | None]:
    """Computes `LogProbHead.gradient` of a layer, or of a window of its weight, by a scale that is positive."""
    weight, rows = layer["weight"], hidden.shape[0]
    classes = weight.shape[head.class_axis] if window is None else window.size
    zeros = jnp.zeros(rows, jnp.float32)
    factor = 1.0 if scale is None else scale
    # A row where both numbers are 0 may hold anything.
    has_weights = functools.reduce(jnp.logical_or, [each != 0 for each in (a, e) if each is not None], jnp.zeros(rows, bool))
    counts = (labels[:, 0] != xla.NO_ROW) & (d != 0) & has_weights
    a, e = (zeros if each is None else jnp.where(counts, each * factor / jnp.where(counts, d, 1), 0) for each in (a, e))
    b = zeros if b is None else b[:, 0] * factor
    # In base 2, the exponent is `(x - m) * unit`, and the weight times `a + e * exponent` is the gradient. A row that does not
    # count has weights of 0: those of a bias alone may be infinite.
    numbers = [zeros + LOG2E * factor, jnp.where(counts, m, jnp.inf), a, b]
    numbers += [] if e is zeros else [e / LOG2E]
    numbers = [number.astype(jnp.float32) for number in numbers]
    operands = linear_loss.in_tiles(head.class_axis, hidden, weight, labels[:, 0], *numbers, window=window)
    tiled = len(operands[2])
    sums = [jax.ShapeDtypeStruct((pl.cdiv(classes, TILE_CLASSES), tiled), jnp.float32)] if wants_scale else []
    gradient, *of_scale = linear_loss.launch(
        functools.partial(_differentiate, has_entropy=e is not zeros, classes=classes),
        head,
        blocks,
        operands,
        layer.get("bias"),
        [jax.ShapeDtypeStruct((tiled, -(-classes // 64) * 64), hidden.dtype), *sums],
        name="linear_log_probs_gradient_mosaic",
        staged=True,
        window=window,
    )
    if wants_scale:  # a row whose numbers all are 0 may hold anything
        of_scale = [jnp.where((a != 0) | (b != 0) | (e != 0), jnp.sum(sums, 0)[:rows] / factor, 0) for sums in of_scale]
    return gradient[:rows, :classes], of_scale[0] if wants_scale else None


def _differentiate(tile, x, numbers, results, staging, *, has_entropy, classes):
    """Turns the logits of a tile into their gradient, and stores it by way of shared memory; columns of no class hold any.

    A second result is the sum over the classes of the gradient by the scores times the capped logits.
    """
    (gradient, *sums), (stage,) = results, staging
    numbers, cap, of_scale = [tile.number(each) for each in numbers], tile.soft_cap, []
    # What needs a score behind its weight takes registers for both, which there are for a part of the columns.
    is_whole = cap is None and not sums
    columns = TILE_CLASSES if is_whole else matmul.DEPTH
    for first in range(0, TILE_CLASSES, columns):
        score = x if is_whole else lax.slice(x, (0, first), (len(x), first + columns))
        unit, m, a, b, *e = (functools.partial(linear_loss.along_rows, number, score.shape) for number in numbers)
        bent = None if cap is None else fused.fused(linear_loss.bent, (cap,), [score], matmul.LAYOUT)
        score = score if bent is None else cap * bent
        exponent = (score - m()) * unit()
        weights = jnp.exp2(exponent)
        factor = a() + e[0]() * jnp.maximum(exponent, linear_loss.LEAST_EXPONENT) if has_entropy else a()

        def with_label(total, b=b, first=first):
            return total + jnp.where(tile.is_label(total.shape, first), b(), 0.0)

        total = weights * factor  # a branch for each part would spill registers
        total = lax.cond(tile.has_label, with_label, lambda total: total, total) if is_whole else with_label(total)
        if sums:  # the product is NaN if a bias of -inf excludes the class, or if the weight beyond the last class is infinite
            shares = tile.of_own_classes(jnp.where(total != 0, total * score, 0.0), classes, 0.0, first)
            of_scale.append(jnp.sum(shares, 1))
        if bent is not None:
            total *= 1 - bent * bent
        if first == 0:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
        stage[:, pl.ds(first, columns)] = total.astype(stage.dtype)
    linear_loss.store(tile, stage, gradient)
    for result in sums:
        result[tile.column, tile.rows] = functools.reduce(jnp.add, of_scale)
