"""The losses and log-probabilities of a linear layer on Hopper, whose logits are in registers alone.

Blocks multiply tiles of 128 rows by 256 classes: a warpgroup copies operands to shared memory, and two others multiply 64 rows
each. What they have of each row in a tile becomes a state, the maximum and the sum of the exponentials, and the score of the
label if it is there; for an entropy also the sum of exponentials times exponents. XLA merges the states. Logits are sums in
float32, which are not rounded. A bias is added to them, and a cap bends them, in registers.

The gradient of logits multiplies once more, and has the states: what it has of each tile becomes the gradient of the logits
there, which is the result. XLA multiplies it by the weight and by the hidden states. For the gradient by the scale it adds up,
for each row and tile, the gradient of the scores times the scores.
"""

import functools
import math
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
from jaxsoftmax._core.target import ONE_DEVICE, Target
from jaxsoftmax._gpu import fused, matmul
from jaxsoftmax.ops.cross_entropy import linear_terms, parts
from jaxsoftmax.ops.softmax.across_devices import merge_stacked

TILE_CLASSES = matmul.COLUMNS
# More tiles of rows are filled up to an even number, for clusters of two blocks: a thirtieth more for a thirtieth less time.
_ALWAYS_PAIRED = 32
LOG2E = math.log2(math.e)
LEAST_EXPONENT = -1000.0  # in base 2: the weight of a smaller one is 0, and an infinite one times that is NaN


@dataclass(frozen=True)
class LinearLossPlan:
    """Runs `linear_log_probs` without writing the logits."""

    problem: Problem
    blocks: int  # one for each multiprocessor
    remark = None

    def describe(self) -> str:
        return describe(has_staging=False)

    def run(self, **operands: Any) -> list[jax.Array]:
        """Computes the results of the operation from its operands. A scale is positive, or NaN."""
        head, return_entropy = self.problem.params["head"], self.problem.params.get("return_entropy", False)

        def of_one(hidden, weight, labels, **options):
            terms = terms_of_rows(head, self.blocks, hidden, weight, labels[:, 0], return_entropy=return_entropy, **options)
            m, d, score, *exponents = terms
            return [m, d, score[:, None], *exponents]

        return linear_terms.of_batch(of_one, linear_terms.present(**operands), ONE_DEVICE)


def describe(*, has_staging: bool) -> str:
    """Describes a kernel that `launch` makes."""
    stages = matmul.STAGES - has_staging
    tile = f"{matmul.TILE_ROWS} rows by {TILE_CLASSES} classes"
    return f"tiles of {tile}, {stages} stages, {matmul.CONSUMERS} consumer warpgroups"


def plan(problem: Problem, target: Target) -> LinearLossPlan | Refusal:
    """Plans a problem of `linear_log_probs`."""
    return refusal_of_terms(problem) or refusal_of_layer(problem) or LinearLossPlan(problem, target.multiprocessors)


def refusal_of_terms(problem: Problem) -> Refusal | None:
    """Returns why kernels cannot compute these terms of rows, or their derivatives, or None."""
    if problem.params.get("return_total", False) or "c" in problem.operands:
        return Refusal("no kernel adds up scores, as label smoothing does")
    if problem.operands["labels"].shape[-1] != 1:
        return Refusal(f"a kernel finds one label of a row, got {problem.operands['labels'].shape[-1]}")
    return None


def refusal_of_layer(problem: Problem, dtypes: tuple[str, ...] = ("bfloat16", "float16")) -> Refusal | None:
    """Returns why kernels for hidden states of these dtypes cannot multiply by the layer, or None."""
    if problem.devices:
        return Refusal("it does not merge over devices")
    hidden, weight = problem.operands["hidden"], problem.operands["weight"]
    if hidden.dtype.name not in dtypes:
        return Refusal(f"hidden must be {' or '.join(dtypes)}, got {hidden.dtype}")
    if not math.prod(hidden.shape[:-1]):
        return Refusal("there are no rows")
    if math.prod(weight.shape[:-2]) != 1:
        return Refusal(f"the examples of a batch must share the weight, got {math.prod(weight.shape[:-2])} weights")
    if "bias" in problem.operands and math.prod(problem.operands["bias"].shape[:-1]) != 1:
        return Refusal("the examples of a batch must share the bias")
    if not math.prod(weight.shape[-2:]):
        return Refusal(f"weight must have entries, got shape {weight.shape}")
    return None


def terms_of_rows(head, blocks, hidden, weight, labels, bias=None, scale=None, return_entropy=False) -> list[jax.Array]:
    """Computes the state `(m, d)` of each row, the score of its label, 0 if that is no class, and what an entropy needs."""
    class_axis = head.class_axis
    classes = weight.shape[class_axis]
    of_rows = [] if scale is None else [scale * LOG2E]
    pieces: list[list[jax.Array]] = []
    size = _classes_of_piece(class_axis, weight, hidden.dtype)
    for start in range(0, classes, size):
        end = min(start + size, classes)
        piece = lax.slice_in_dim(weight, start, end, axis=class_axis)
        if pieces:  # only one copy of a piece is in memory
            piece, _ = lax.optimization_barrier((piece, pieces[-1]))
        operands = in_tiles(class_axis, hidden, piece, labels - start, *of_rows)
        own = piece.shape[class_axis]
        pieces.append(
            launch(
                functools.partial(reduce_logits, has_scale=scale is not None, has_bias=bias is not None, classes=own),
                head,
                blocks,
                operands,
                None if bias is None else bias[start:end],
                [jax.ShapeDtypeStruct((pl.cdiv(own, TILE_CLASSES), len(operands[2])), jnp.float32)] * (3 + return_entropy),
                name="linear_log_probs_mosaic",
            )
        )
    of_tiles = pieces[0] if len(pieces) == 1 else [jnp.concatenate(tiles) for tiles in zip(*pieces, strict=True)]
    return merged(of_tiles, labels, classes, scale)


def merged(of_tiles, labels, classes, scale) -> list[jax.Array]:
    """Merges what rows have in each tile, `[tiles of classes, rows]`, to the results of `terms_of_rows`."""
    maxima, parts, scores, *exponents = (part[:, : len(labels)] for part in of_tiles)
    m, d, *exponents = merge_stacked(maxima, parts, *exponents, scale=scale)
    tile_of_label = jnp.clip(labels // TILE_CLASSES, 0, len(scores) - 1)
    score = jnp.take_along_axis(scores, tile_of_label[None], 0)[0]
    score = jnp.where((labels >= 0) & (labels < classes), score, 0)
    return [online.shift(m), d, score, *exponents]


def in_tiles(class_axis, hidden, weight, labels, *numbers, window=None) -> list[jax.Array]:
    """Returns the operands of `launch` in whole tiles: the tiles with a label are `[tiles of classes, rows / 64]`."""
    rows = rows_in_tiles(len(labels))
    tiled = padded_to(rows, labels, otherwise=-1)
    classes = weight.shape[class_axis] if window is None else window.size
    tiles = jnp.arange(pl.cdiv(classes, TILE_CLASSES), dtype=labels.dtype)
    has_label = (tiled // TILE_CLASSES).reshape(1, -1, matmul.ROWS) == tiles[:, None, None]
    hidden, weight = padded_to(rows, padded(hidden, 1, matmul.DEPTH)), padded(weight.astype(hidden.dtype), *_units(class_axis))
    return [hidden, weight, tiled, jnp.any(has_label, -1).astype(jnp.int32), *(padded_to(rows, each) for each in numbers)]


def rows_in_tiles(rows: int) -> int:
    """Returns the number of rows of whole tiles: an even number of tiles if the blocks of a cluster share each weight."""
    tiles = pl.cdiv(rows, matmul.TILE_ROWS)
    return (tiles + (tiles > _ALWAYS_PAIRED) * (tiles % 2)) * matmul.TILE_ROWS


def padded_to(rows: int, array: jax.Array, otherwise=0) -> jax.Array:
    """Pads an array to this number of rows."""
    return jnp.pad(array, [(0, rows - len(array)), *[(0, 0)] * (array.ndim - 1)], constant_values=otherwise)


def launch(epilogue, head, blocks, operands, bias, out_type, *, name, staged=False, window=None) -> list[jax.Array]:
    """Multiplies hidden states by the weight, tile by tile, and runs `epilogue` on each tile of a consumer.

    Args:
      epilogue: `epilogue(tile, logits, numbers of rows, results, staging)` stores what results have of a tile.
      head: says which axis of the weight has the classes, and the cap of logits.
      blocks: number of blocks.
      operands: hidden states, weight, labels, tiles that have a label, and numbers of rows, all in whole tiles.
      bias: number of each class that is added to products, or None.
      out_type: types of the results.
      name: name of the kernel.
      staged: True to give each consumer shared memory as large as its tile in 16 bits, in place of one stage.
      window: the classes of the weight that are multiplied; None for all.
    """
    hidden, weight, *others = operands
    of_classes = [] if bias is None else [padded(bias.astype(jnp.float32), TILE_CLASSES)]
    n_numbers = len(others) - 2

    def with_tile(place, x, others, results, staging):
        labels, has_label, *others = others
        numbers, of_classes = others[:n_numbers], others[n_numbers:]
        rows, has_own_label = pl.ds(place.row * matmul.ROWS, matmul.ROWS), has_label[place.column, place.row] > 0
        tile = LogitTile(place.column, rows, labels, has_own_label, head.logits_soft_cap)
        for numbers_of_classes in of_classes:
            x += lax.broadcast_in_dim(tile.along_columns(numbers_of_classes), x.shape, (1,))
        epilogue(tile, x, numbers, results, staging)

    return matmul.multiply(
        with_tile,
        hidden,
        weight,
        [*others, *of_classes],
        along=(1, 1 - head.class_axis),
        blocks=blocks,
        name=name,
        out_type=out_type,
        window=window,
        stage=jax.ShapeDtypeStruct((matmul.ROWS, TILE_CLASSES), hidden.dtype) if staged else None,
    )


def _classes_of_piece(class_axis, weight, dtype) -> int:
    """Returns the classes that a kernel reads: all, or whole tiles of a part of the weight that is cast or padded, a copy."""
    classes = weight.shape[class_axis]
    if is_whole(class_axis, weight) and weight.dtype == dtype:
        return classes
    pieces = pl.cdiv(math.prod(weight.shape) * dtype.itemsize, parts.MOST)
    return pl.cdiv(classes, pieces * TILE_CLASSES) * TILE_CLASSES


def is_whole(class_axis, weight) -> bool:
    """Tells whether kernels read a weight of this shape without a padded copy."""
    return all(size % unit == 0 for size, unit in zip(weight.shape, _units(class_axis), strict=True))


def _units(class_axis) -> tuple[int, int]:
    """Returns the units that sizes of the weight must be multiples of."""
    return (8, matmul.DEPTH) if class_axis == 0 else (matmul.DEPTH, 64)


def padded(array, *units):
    """Pads an array with zeros to whole units along each axis, as copies to shared memory need it."""
    return jnp.pad(array, [(0, -size % unit) for size, unit in zip(array.shape, units, strict=True)])


@dataclass(frozen=True)
class LogitTile:
    """Describes a consumer's tile: some rows, and some classes."""

    column: Any  # its number along the classes
    rows: Any
    labels: Any  # of all rows
    has_label: Any = True  # False if none of its rows has its label in it
    soft_cap: float | None = None  # of logits

    @property
    def first(self) -> Any:
        """The number of its first class."""
        return self.column * TILE_CLASSES

    def is_label(self, shape, first=0) -> Any:
        """Marks the labels of rows among the columns of this shape that start at `first`."""
        label = plgpu.load(self.labels.at[self.rows], layout=matmul.LAYOUT.reduce(1), optimized=False) - self.first - first
        return _columns(shape) == lax.broadcast_in_dim(label, shape, (0,))

    def number(self, numbers) -> Any:
        """Returns the numbers of its rows."""
        return plgpu.load(numbers.at[self.rows], layout=matmul.LAYOUT.reduce(1), optimized=False)

    def of_own_classes(self, x, classes, otherwise, first=0) -> Any:
        """Replaces columns beyond the last class in those that start at `first`."""

        def without_others(x):
            return jnp.where(_columns(x.shape) < classes - first - self.first, x, otherwise)

        return lax.cond(self.first + TILE_CLASSES > classes, without_others, lambda x: x, x) if classes % TILE_CLASSES else x

    def along_columns(self, numbers) -> Any:
        """Returns the numbers of its classes."""
        return plgpu.load(numbers.at[pl.ds(self.first, TILE_CLASSES)], layout=matmul.LAYOUT.reduce(0), optimized=False)


def _columns(shape):
    return plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=matmul.LAYOUT)


def along_rows(numbers, shape):
    return lax.broadcast_in_dim(numbers, shape, (0,))


def reduce_logits(tile, x, numbers, results, staging, *, has_scale, has_bias, classes):
    """Reduces the logits of a tile to the states of its rows.

    With `staging` it also stores their weights, as the first result: relative to the largest score of the row in the tile, and
    times the slope of the scores if they are capped.
    """
    stored, (maxima, sums, scores, *exponents) = results[: len(staging)], results[len(staging) :]
    at, cap = (tile.column, tile.rows), tile.soft_cap
    if cap is not None:
        x = fused.fused(_capped, (cap,), [x], matmul.LAYOUT)

    @pl.when(tile.has_label)
    def _():
        scores[at] = jnp.sum(jnp.where(tile.is_label(x.shape), x, 0.0), 1)

    x = tile.of_own_classes(x, classes, -jnp.inf)
    m = jnp.max(x, 1)
    maxima[at] = m
    m = online.shift(m)
    # What needs a weight twice takes registers for both, which there are for a part of the columns.
    columns = matmul.DEPTH if staging and (exponents or cap is not None) else TILE_CLASSES
    totals, products = [], []
    for first in range(0, TILE_CLASSES, columns):
        score = lax.slice(x, (0, first), (len(x), first + columns))
        # The difference first: at low temperatures the scores, and with a bias all scores of a tile, may be so large that their
        # products are rounded by more than 1, or are infinite.
        if has_scale or has_bias:
            unit = along_rows(tile.number(numbers[0]), score.shape) if has_scale else LOG2E
            exponent = (score - along_rows(m, score.shape)) * unit
        else:
            exponent = score * LOG2E - along_rows(m * LOG2E, score.shape)
        weights = jnp.exp2(exponent)
        totals.append(jnp.sum(weights, 1))
        if exponents:
            products.append(jnp.sum(weights * jnp.maximum(exponent, LEAST_EXPONENT), 1))
        for stage in staging:
            if cap is not None:  # beyond the last class the score is infinite
                bent = jnp.maximum(score, -cap) * (1 / cap)
                weights -= weights * bent * bent
            if first == 0:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the tile before has left
            stage[:, pl.ds(first, columns)] = weights.astype(stage.dtype)
    for stage, array in zip(staging, stored, strict=True):
        store(tile, stage, array)
    sums[at] = functools.reduce(jnp.add, totals)
    for sums_of_exponents in exponents:
        sums_of_exponents[at] = functools.reduce(jnp.add, products) * (1 / LOG2E)


def store(tile, stage, array):
    """Stores what shared memory has of a tile."""
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(stage, array.at[tile.rows, pl.ds(tile.first, TILE_CLASSES)])


def bent(soft_cap, x):
    """Returns capped logits in units of the cap."""
    return fused.tanh(x * (1 / soft_cap))


def _capped(soft_cap, x):
    return soft_cap * bent(soft_cap, x)
