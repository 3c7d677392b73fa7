"""The losses and log-probabilities of a linear layer on Hopper, whose logits are in registers alone.

Blocks multiply tiles of 128 rows by 256 classes: a warpgroup copies operands to shared memory, and two others multiply 64 rows
each. What they have of each row in a tile becomes a state, the maximum and the sum of the exponentials, and the score of the
label if it is there; for an entropy also the sum of exponentials times exponents. XLA merges the states. Scores are sums in
float32, which are not rounded.
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
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax.online import State
from jaxsoftmax.ops.cross_entropy import linear, linear_terms, xla

_CONSUMERS = 2
_ROWS, _CLASSES = 64, 256  # a tile of each consumer
_DEPTH, _STAGES = 64, 4  # shared memory: hidden units of a stage, and stages
_SIDE_BY_SIDE = 16  # tiles of rows that blocks go over before the next classes: both operands stay in the L2 cache
_LAYOUT = plgpu.Layout.WGMMA
_LOG2E = math.log2(math.e)
_LEAST_EXPONENT = -1000.0  # in base 2: the weight of a smaller one is 0, and an infinite one times that is NaN


@dataclass(frozen=True)
class LinearLossPlan:
    """Runs linear_cross_entropy, or linear_log_probs, without writing the logits."""

    problem: Problem
    blocks: int  # one for each multiprocessor
    remark = None

    def describe(self) -> str:
        return f"tiles of {_CONSUMERS * _ROWS} rows by {_CLASSES} classes, {_STAGES} stages, {_CONSUMERS} consumer warpgroups"

    def run(self, **operands: Any) -> list[jax.Array]:
        """Computes the results of the operation from its operands."""
        head = self.problem.params["head"]
        if self.problem.operation is linear_terms.LINEAR_LOG_PROBS:
            return_entropy = self.problem.params["return_entropy"]
            compute = functools.partial(_log_prob_terms, head, self.blocks, return_entropy)
            return linear_terms.of_batch(compute, linear_terms.present(**operands), ONE_DEVICE)
        compute = functools.partial(_loss_terms, head, self.blocks)
        return linear.of_batch(compute, operands["hidden"], operands["weight"], operands["labels"])


def plan(problem: Problem, target: Target) -> LinearLossPlan | Refusal:
    """Plans a problem of linear_cross_entropy or linear_log_probs."""
    if problem.operation not in (linear.LINEAR_CROSS_ENTROPY, linear_terms.LINEAR_LOG_PROBS):
        return Refusal(f"it has no kernel for {problem.operation.name}", lacks_kernel=True)
    if problem.devices:
        return Refusal("it does not merge over devices")
    if problem.operation is linear_terms.LINEAR_LOG_PROBS:
        if "bias" in problem.operands or problem.params["head"].logits_soft_cap is not None:
            return Refusal("no kernel adds a bias, or caps logits")
        if problem.operands["labels"].shape[-1] != 1:
            return Refusal(f"a kernel finds one label of a row, got {problem.operands['labels'].shape[-1]}")
    hidden, weight, units = problem.operands["hidden"], problem.operands["weight"], _units(problem.params["head"].class_axis)
    if hidden.dtype.name not in ("bfloat16", "float16"):
        return Refusal(f"hidden must be bfloat16 or float16, got {hidden.dtype}")
    if not math.prod(hidden.shape[:-1]):
        return Refusal("there are no rows")
    if math.prod(weight.shape[:-2]) != 1:
        return Refusal(f"the examples of a batch must share the weight, got {math.prod(weight.shape[:-2])} weights")
    if not math.prod(weight.shape[-2:]):
        return Refusal(f"weight must have entries, got shape {weight.shape}")
    plan, size = LinearLossPlan(problem, target.multiprocessors), math.prod(weight.shape) * weight.dtype.itemsize
    is_copied = any(length % unit for length, unit in zip(weight.shape[-2:], units, strict=True))
    if is_copied and weight.dtype == hidden.dtype and size > linear.MOST:  # another dtype is cast there, too
        return Refusal(f"a copy of the weight would take {size} bytes, and parts of the logits {linear.MOST}", plan)
    return plan


def _loss_terms(head, blocks, hidden, weight, labels) -> list[jax.Array]:
    """Computes `head.terms` from `hidden` `[rows, H]`, a weight with `H` and the classes, and labels `[rows]`."""
    m, d, score = _numbers(head.class_axis, blocks, hidden, weight, labels)
    if head.axis_name:
        return [m, d, score]
    inside = (labels >= 0) & (labels < weight.shape[head.class_axis])
    return xla.results_of(labels, m, d, jnp.where(inside, score, jnp.nan), dtype=m.dtype)


def _log_prob_terms(head, blocks, return_entropy, hidden, weight, labels, scale=None) -> list[jax.Array]:
    """Computes the results of linear_log_probs. A scale is positive, or NaN."""
    m, d, score, *exponents = _numbers(head.class_axis, blocks, hidden, weight, labels[:, 0], scale, return_entropy)
    return [m, d, score[:, None], *exponents]


def _numbers(class_axis, blocks, hidden, weight, labels, scale=None, return_entropy=False) -> list[jax.Array]:
    """Computes the state `(m, d)` of each row, the score of its label, 0 if that is no class, and what an entropy needs."""
    rows, classes = hidden.shape[0], weight.shape[class_axis]
    block = _CONSUMERS * _ROWS
    hidden, padded = _padded(hidden, block, _DEPTH), jnp.pad(labels, (0, -rows % block), constant_values=-1)
    weight = _padded(weight.astype(hidden.dtype), *_units(class_axis))
    tiles = pl.cdiv(classes, _CLASSES)
    has_label = (padded // _CLASSES).reshape(1, -1, _ROWS) == jnp.arange(tiles, dtype=labels.dtype)[:, None, None]
    swizzled = plgpu.TilingTransform((8, _DEPTH)), plgpu.SwizzleTransform(128)
    slot = (_CLASSES, _DEPTH) if class_axis == 0 else (_DEPTH, _CLASSES)
    of_rows = [] if scale is None else [jnp.pad(scale * _LOG2E, (0, -rows % block))]
    results = kernel_of(
        functools.partial(_kernel, class_axis=class_axis, classes=classes, has_scale=scale is not None),
        out_type=[jax.ShapeDtypeStruct((tiles, len(padded)), jnp.float32)] * (3 + return_entropy),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        scratch_types=[
            plgpu.SMEM((_STAGES, block, _DEPTH), hidden.dtype, transforms=swizzled),
            plgpu.SMEM((_STAGES, *slot), hidden.dtype, transforms=swizzled),
            plgpu.Barrier(num_arrivals=2, num_barriers=_STAGES),
            plgpu.Barrier(num_arrivals=_CONSUMERS, num_barriers=_STAGES),
        ],
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name="linear_cross_entropy_mosaic" if scale is None and not return_entropy else "linear_log_probs_mosaic",
    )(hidden, weight, padded, jnp.any(has_label, -1).astype(jnp.int32), *of_rows)
    maxima, parts, scores, *exponents = (part[:, :rows] for part in results)
    m, d, _ = online.merge_along(State(maxima, parts), 0, scale=scale)
    if return_entropy:
        lower = jnp.broadcast_to(online.finite(m)[None], maxima.shape)
        size = None if scale is None else jnp.broadcast_to(scale[None], maxima.shape)
        exponents = [jnp.sum(online.lower_exponents(maxima, parts, exponents[0], lower, scale=size)[1], 0)]
    tile_of_label = jnp.clip(labels // _CLASSES, 0, tiles - 1)
    score = jnp.take_along_axis(scores, tile_of_label[None], 0)[0]
    score = jnp.where((labels >= 0) & (labels < classes), score, 0)
    return [online.shift(m), d, score, *exponents]


def _units(class_axis) -> tuple[int, int]:
    """Returns the units that sizes of the weight must be multiples of."""
    return (8, _DEPTH) if class_axis == 0 else (_DEPTH, 64)


def _padded(array, *units):
    """Pads an array with zeros to whole units along each axis, as copies to shared memory need it."""
    return jnp.pad(array, [(0, -size % unit) for size, unit in zip(array.shape, units, strict=True)])


def _kernel(*refs, class_axis, classes, has_scale):
    """Computes for each tile of classes the maxima, the sums, and the scores of labels in it: `[tiles of classes, rows]`."""
    hidden, weight, labels, has_label, *refs = refs
    factors = refs.pop(0) if has_scale else None
    results, slots = refs[:-4], refs[-4:]  # stages of both operands; barriers that tell that they are full, and empty again
    steps = hidden.shape[1] // _DEPTH
    tiles = hidden.shape[0] // (_CONSUMERS * _ROWS), pl.cdiv(classes, _CLASSES)
    warpgroup = lax.axis_index("warpgroup")

    def each_tile(body):
        @plgpu.nd_loop((math.prod(tiles),), collective_axes="block", init_carry=jnp.int32(0))
        def end(info, carry):  # how many steps were before: barriers count on from tile to tile
            (place,) = info.index
            body(*plgpu.planar_snake(place, tiles, 0, _SIDE_BY_SIDE), carry)
            return carry + steps

        return end

    pl.when(warpgroup == _CONSUMERS)(lambda: _produce(hidden, weight, slots, class_axis, each_tile))
    multiply = functools.partial(_multiply, slots, warpgroup, steps, class_axis)
    of_rows = labels, has_label, factors
    consume = functools.partial(_consume, of_rows, results, slots[-1], classes, warpgroup, multiply, each_tile)
    pl.when(warpgroup < _CONSUMERS)(consume)


def _stage(step):
    return lax.rem(step, jnp.int32(_STAGES))


def _produce(hidden, weight, slots, class_axis, each_tile):
    """Copies operands to shared memory."""
    hidden_slots, weight_slots, full, empty = slots
    plgpu.set_max_registers(40, action="decrease")

    def copy(row, column, before):
        rows = pl.ds(row * (_CONSUMERS * _ROWS), _CONSUMERS * _ROWS)
        columns = pl.ds(column * _CLASSES, _CLASSES)

        @pl.loop(0, hidden.shape[1] // _DEPTH)
        def _(k):
            at, deep = _stage(before + k), pl.ds(k * _DEPTH, _DEPTH)
            plgpu.barrier_wait(empty.at[at])
            plgpu.copy_gmem_to_smem(hidden.at[rows, deep], hidden_slots.at[at], full.at[at])
            part = weight.at[columns, deep] if class_axis == 0 else weight.at[deep, columns]
            plgpu.copy_gmem_to_smem(part, weight_slots.at[at], full.at[at])

    end = each_tile(copy)

    @pl.loop(0, _STAGES)  # a barrier may not go while others arrive there
    def _(k):
        plgpu.barrier_wait(empty.at[_stage(end + k)])


def _multiply(slots, warpgroup, steps, class_axis, before):
    """Multiplies the rows of a consumer by a tile of classes, whose first step is the number `before`."""
    hidden_slots, weight_slots, full, empty = slots

    def multiply(product):
        @pl.loop(0, steps)
        def _(k):
            at = _stage(before + k)
            plgpu.barrier_wait(full.at[at])
            part = weight_slots.at[at]
            part = part.transpose((1, 0)) if class_axis == 0 else part
            plgpu.wgmma(product, hidden_slots.at[at, pl.ds(warpgroup * _ROWS, _ROWS)], part)
            plgpu.wgmma_wait(1)  # the step before has ended
            pl.when(k > 0)(lambda: plgpu.barrier_arrive(empty.at[_stage(before + k - 1)]))

        return product[...]

    product = pl.run_scoped(multiply, plgpu.ACC((_ROWS, _CLASSES), jnp.float32))
    plgpu.barrier_arrive(empty.at[_stage(before + steps - 1)])
    return product


def _consume(of_rows, results, empty, classes, warpgroup, multiply, each_tile):
    """Reduces the scores of each tile to the states of its rows."""
    plgpu.set_max_registers(232, action="increase")
    labels, has_label, factors = of_rows
    maxima, sums, scores, *exponents = results
    for at in range(_STAGES):
        plgpu.barrier_arrive(empty.at[at])

    def compute(row, column, before):
        number = row * _CONSUMERS + warpgroup
        own_rows, first = pl.ds(number * _ROWS, _ROWS), column * _CLASSES
        product = multiply(before)

        def columns():
            return plgpu.broadcasted_iota(jnp.int32, product.shape, 1, layout=_LAYOUT)

        @pl.when(has_label[column, number] > 0)
        def _():
            label = plgpu.load(labels.at[own_rows], layout=_LAYOUT.reduce(1), optimized=False) - first
            is_label = columns() == lax.broadcast_in_dim(label, product.shape, (0,))
            scores[column, own_rows] = jnp.sum(jnp.where(is_label, product, 0.0), 1)

        if classes % _CLASSES:
            is_last = first + _CLASSES > classes
            product = lax.cond(is_last, lambda x: jnp.where(columns() < classes - first, x, -jnp.inf), lambda x: x, product)
        m = jnp.max(product, 1)
        maxima[column, own_rows] = m
        factor = _LOG2E if factors is None else plgpu.load(factors.at[own_rows], layout=_LAYOUT.reduce(1), optimized=False)
        shifted = lax.broadcast_in_dim(online.shift(m) * factor, product.shape, (0,))
        if factors is not None:
            factor = lax.broadcast_in_dim(factor, product.shape, (0,))
        exponent = product * factor - shifted
        weights = jnp.exp2(exponent)
        sums[column, own_rows] = jnp.sum(weights, 1)
        for sums_of_exponents in exponents:
            bounded = jnp.maximum(exponent, _LEAST_EXPONENT)
            sums_of_exponents[column, own_rows] = jnp.sum(weights * bounded, 1) * (1 / _LOG2E)

    each_tile(compute)
