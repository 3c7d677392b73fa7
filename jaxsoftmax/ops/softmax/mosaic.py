"""The softmax family on Hopper, for rows that fit into the registers of a block: up to 32768 elements.

Each element is read once and written once. A block loads its rows, or its one row, into registers; each thread, warp and
warpgroup lifts its share to a state, and the states merge: within a warp by shuffles, where a warp holds whole rows; through
shared memory, where a block shares one. Then the results are computed from the registers and stored. Bytes per element: softmax
and log_softmax read one and write one; logsumexp reads one; the maps read two (`logsumexp_vjp`: one) and write one
(`logsumexp_jvp`: none); a mask is read as bytes, in its own shape.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jaxlib.mlir.dialects import arith

from jaxsoftmax import hopper, online
from jaxsoftmax.hopper import RowTile
from jaxsoftmax.online import State

DTYPES = ("float32", "bfloat16", "float16")
MAX_COLS = 32768
FUSED_COLS = {4: 16384, 2: 8192}  # by bytes of an element, up to how many columns XLA's fused forward is faster


# What is served.


def unsupported(primitive, target, *avals, axes, dtype, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    del params
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability[0] != 9:
        return f"it needs compute capability 9.x, got {target.platform} {target.compute_capability}"
    x = avals[0]
    whole = [a for a in avals if a is not None and a.dtype != bool and a.shape == x.shape]
    for name in [a.dtype.name for a in whole] + [jnp.dtype(dtype).name]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    along = [axis for axis in axes if x.shape[axis] != 1]
    after = [axis for axis in range(min(along, default=x.ndim), x.ndim) if axis not in axes and x.shape[axis] != 1]
    if after:
        return f"the axes must be the last ones, got axes {axes} of shape {x.shape}"
    rows, cols = _rows_and_cols(x.shape, axes)
    if not 1 <= cols <= MAX_COLS:
        return f"a row must have from 1 to {MAX_COLS} entries, got {cols}"
    if not 1 <= rows < 2**31:
        return f"there must be from 1 to {2**31 - 1} rows, got {rows}"
    where = _where_of(primitive, avals)
    if where is not None and math.prod(where.shape[axis] for axis in axes) not in (1, cols):
        return f"where must be whole along the axes, or of size 1, got shape {where.shape} for {x.shape}"
    return None


def _where_of(primitive, avals):
    return None if primitive == "softmax_jacobian" else avals[1] if len(avals) == 3 else avals[4]


def _rows_and_cols(shape: Sequence[int], axes: Sequence[int]) -> tuple[int, int]:
    cols = math.prod(shape[axis] for axis in axes)
    return (math.prod(shape) // cols if cols else 0), cols


def unprofitable(primitive, target, fused, *avals, axes, dtype, **params) -> str | None:
    """Why the reference should be faster although the kernels could run, in words, or None."""
    del target, params
    if not any(fused):
        return None
    _, cols = _rows_and_cols(avals[0].shape, axes)
    most = FUSED_COLS[max(avals[0].dtype.itemsize, jnp.dtype(dtype).itemsize)]
    if primitive in ("softmax", "log_softmax") and cols > most:  # XLA reads such rows more than once
        return None
    return f"XLA computes {primitive} together with what produces its operand, which then is never in memory"


# How a row is spread over threads.


@dataclass(frozen=True)
class Config:
    """How the rows of an array are spread over threads, and held there.

    Attributes:
      vector, threads, repeats, blocks: as in `hopper.RowTile`.
      parked: whether rows are held in shared memory, not in registers, of which a thread then needs few.
      unroll: turns of a thread in an iteration of a loop; 0 for no loop but code for each turn. With a loop rows come by bulk
        copies if they are parked, else from global memory with each pass. Only where rows end with a turn, and without a mask.
    """

    vector: int
    threads: int
    repeats: int = 1
    blocks: int = 1
    parked: bool = False
    unroll: int = 0


# How a block holds a row, by bytes of an element: up to how many columns, and how.
_BLOCKS = {
    4: [(4096, Config(4, 128)), (8192, Config(4, 256)), (16384, Config(4, 512)), (MAX_COLS, Config(4, 1024))],
    2: [(4096, Config(8, 128)), (16384, Config(8, 256)), (MAX_COLS, Config(8, 512))],
}

# Where another way is faster, by kernel: from more than how many columns, up to how many, and how.
_FASTER = {
    ("softmax_forward", 2): [
        (8192, 16384, Config(8, 256, parked=True, unroll=2)),
        (16384, MAX_COLS, Config(8, 512, parked=True, unroll=1)),
    ],
    ("softmax_backward", 4): [(16384, MAX_COLS, Config(4, 512, blocks=2))],
    ("softmax_backward", 2): [(4096, 8192, Config(8, 128)), (8192, 16384, Config(8, 512, parked=True, unroll=2))],
    ("log_softmax_forward", 4): [(8192, 16384, Config(4, 512, parked=True))],
    ("log_softmax_forward", 2): [
        (4096, 8192, Config(8, 128)),
        (8192, 16384, Config(8, 256, parked=True, unroll=4)),
        (8192, 16384, Config(8, 128, parked=True)),
        (16384, MAX_COLS, Config(8, 512, parked=True, unroll=1)),
    ],
    ("log_softmax_backward", 4): [(16384, MAX_COLS, Config(4, 128, blocks=4))],
    ("log_softmax_backward", 2): [
        (4096, 8192, Config(8, 128)),
        (8192, 16384, Config(8, 512, parked=True, unroll=2)),
        (8192, 16384, Config(8, 256, parked=True)),
        (16384, MAX_COLS, Config(8, 1024)),
    ],
    ("log_softmax_tangent", 2): [
        (8192, 16384, Config(8, 512, parked=True, unroll=2)),
        (16384, MAX_COLS, Config(8, 1024)),
    ],
    ("logsumexp_forward", 2): [(4096, 8192, Config(8, 128)), (8192, MAX_COLS, Config(8, 128, unroll=2))],
    ("logsumexp_tangent", 2): [(8192, MAX_COLS, Config(8, 128, unroll=2))],
}


def config_for(kernel: str, cols: int, itemsize: int, masked: bool) -> Config:
    """The configuration of a kernel for rows of `cols` elements, the widest of `itemsize` bytes, as measured on an H200.

    It does not depend on the number of rows, so neither do the bits of a row. The measurements are in
    `benchmarks/results/h200/softmax.csv`.
    """
    widest = 16 // itemsize
    vector = math.gcd(cols, widest)
    if cols <= 128 * widest or (cols <= 1024 and vector < widest):
        return _within_a_warp(kernel, cols, vector, widest)
    ways = [config for above, most, config in _FASTER.get((kernel, itemsize), []) if above < cols <= most]
    ways += [config for most, config in _BLOCKS[itemsize] if cols <= most]
    config = next(config for config in ways if _can_be(config, cols, masked))
    return replace(config, vector=vector) if masked else config  # a mask need not be aligned as the rows are


def _within_a_warp(kernel: str, cols: int, vector: int, widest: int) -> Config:
    """A vector for each lane, or several where there are more than 32, and rows enough for a thread to wait for a few loads."""
    vectors, repeats = cols // vector, None
    if widest == 8 and vector == 1:  # 16-bit elements one by one: eight for each lane, of one row
        vectors, repeats = cols // 4, 1
    elif widest == 8 and kernel == "logsumexp_forward" and cols < 512:  # two vectors for each lane, of two rows
        vectors, repeats = vectors // 2, 2
    threads = min(hopper.WARP, 1 << max(1, vectors.bit_length() - 1))
    elements = -(-cols // (vector * threads)) * vector
    each = widest if kernel in _TWO_OPERANDS else 2 * widest
    return Config(vector, threads, repeats or max(1, each // elements))


_TWO_OPERANDS = ("softmax_backward", "log_softmax_backward", "log_softmax_tangent", "logsumexp_tangent")


def _can_be(config: Config, cols: int, masked: bool) -> bool:
    """Whether rows of `cols` elements can be held so."""
    if not config.unroll:
        return True
    tile = RowTile(cols, config.vector, config.threads, config.repeats, config.blocks)
    return not masked and tile.exact(1) and tile.turns % config.unroll == 0


# The primitives. The body of a kernel gets a tile of rows. Whole operands are functions of a turn that give its elements in
# float32 (`where`: bool, or None), and so are whole results: what is computed twice need not be kept.


def softmax(x, where, scale, *, axes, dtype):
    """`exp(s - m) / d`."""

    def rows(tile, x, where, scale):
        scores, size = _directed(tile, x, where, scale)
        local = tile.lift(scores, size)
        state = tile.merge(local, size)
        d = state.d + (state.m - state.m)  # NaN where the maximum is infinite
        factor = tile.along(online.weights(local.m, state.m, axis=(), scale=size) / d)
        y = _each(lambda s: online.weights(s, local.m, scale=size) * factor, scores)
        return [_each(_where, where, y, _constant(0))]

    return _call("softmax_forward", rows, axes, [x], where, scale, [dtype])[0]


def log_softmax(x, where, scale, *, axes, dtype, return_state):
    """`(s - m) - log d`, and the state `(m, d)` if asked for."""

    def rows(tile, x, where, scale):
        scores, size = _directed(tile, x, where, scale)
        state = tile.merge(tile.lift(scores, size), size)
        m = state.m if where is _everything else jnp.where(state.m != -jnp.inf, state.m, jnp.zeros_like(state.m))
        d = state.d + (m - m)
        along_m, log_d = tile.along(m), tile.along(jnp.log(d))
        out = _each(lambda s: _times(s - along_m, size) - log_d, scores)
        return [_each(_where, where, out, _constant(-jnp.inf)), m, d][: 3 if return_state else 1]

    return _call("log_softmax_forward", rows, axes, [x], where, scale, [dtype], state=return_state)


def logsumexp(x, where, scale, *, axes, dtype, return_state):
    """`m + log d`, and the state `(m, d)` if asked for."""

    def rows(tile, x, where, scale):
        scores, size = _directed(tile, x, where, scale)
        state = tile.merge(tile.lift(scores, size), size)
        m = online.shift(state.m)
        return [_times(m, size) + jnp.log(state.d), m, state.d][: 3 if return_state else 1]

    return _call("logsumexp_forward", rows, axes, [x], where, scale, [], row_dtypes=[dtype], state=return_state)


def softmax_jacobian(y, t, scale, *, axes, dtype):
    """`scale * y * (t - sum(y * t))`."""

    def rows(tile, y, t, where, scale):
        del where

        def product(y, t):
            return y, _times(_where(y != 0, t, 0), scale)

        total = tile.along(tile.sum(_each(lambda y, t: jnp.multiply(*product(y, t)), y, t)))

        def result(y, t):
            y, t = product(y, t)
            return _where(y != 0, y * (t - total), 0)

        return [_each(result, y, t)]

    return _call("softmax_backward", rows, axes, [y, t], None, scale, [dtype])[0]


def log_softmax_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent):
    """`t - sum(p * t)`."""

    def rows(tile, x, t, m, d, where, scale):
        weights = _weights(tile, x, m, d, where, scale)
        tangents = _tangents(t, where, scale if scale_tangent else None)
        total = tile.along(tile.sum(_each(lambda p, t: p * _where(p != 0, t, 0), weights, tangents)))
        return [_each(lambda seen, t: _where(seen, t - total, 0), where, tangents)]

    return _call("log_softmax_tangent", rows, axes, [x, t], where, scale, [dtype], row_operands=[m, d])[0]


def log_softmax_vjp(x, m, d, c, where, scale, *, axes, dtype, scale_tangent):
    """`c - p * sum(c)`."""

    def rows(tile, x, c, m, d, where, scale):
        cotangents = _tangents(c, where, scale if scale_tangent else None)
        total = tile.along(tile.sum(cotangents))
        weights = _weights(tile, x, m, d, where, scale)
        return [_each(lambda seen, c, p: _where(seen, c - p * total, 0), where, cotangents, weights)]

    return _call("log_softmax_backward", rows, axes, [x, c], where, scale, [dtype], row_operands=[m, d])[0]


def logsumexp_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent):
    """`sum(p * t)`."""

    def rows(tile, x, t, m, d, where, scale):
        weights = _weights(tile, x, m, d, where, scale)
        factor = scale if scale_tangent else None
        return [tile.sum(_each(lambda p, t: p * _times(_where(p != 0, t, 0), factor), weights, t))]

    return _call("logsumexp_tangent", rows, axes, [x, t], where, scale, [], row_operands=[m, d], row_dtypes=[dtype])[0]


def logsumexp_vjp(x, m, d, c, where, scale, *, axes, dtype, scale_tangent):
    """`p * c`."""

    def rows(tile, x, m, d, c, where, scale):
        c = tile.along(_times(c, scale if scale_tangent else None))
        weights = _weights(tile, x, m, d, where, scale)
        return [_each(lambda seen, p: _where(seen, p * c, 0), where, weights)]

    return _call("logsumexp_backward", rows, axes, [x], where, scale, [dtype], row_operands=[m, d, c])[0]


@jax.custom_vjp
def alone(x):
    """Softmax of `[rows, cols]` on kernels in both directions, with no primitive around: what the interpreter runs."""
    return softmax(x, None, None, axes=(1,), dtype=x.dtype)


alone.defvjp(lambda x: (alone(x),) * 2, lambda y, c: (softmax_jacobian(y, c, None, axes=(1,), dtype=y.dtype),))


# What they have in common.


def _each(function, *operands):
    """`function` of the operands' elements, turn by turn."""
    return lambda turn: function(*(operand(turn) for operand in operands))


def _constant(value):
    return lambda turn: value


_everything = _constant(None)  # no mask


def _nonzero(values):
    return _each(lambda values: values != 0, values.__getitem__)


def _directed(tile, x, where, scale):
    """`x` in the direction in which the scores grow, `-inf` where it is masked, and the size of `scale`."""
    if scale is None:
        return _each(lambda seen, x: _where(seen, x, -jnp.inf), where, x), None
    sign = tile.along(jnp.sign(scale))
    directed = _each(lambda inside, x: _where(inside, x * sign, -jnp.inf), tile.inside, x)  # beyond the end x is -inf
    return _each(lambda seen, x: _where(seen, x, -jnp.inf), where, directed), jnp.abs(scale)


def _weights(tile, x, m, d, where, scale):
    """The softmax weights, from the saved state."""
    if where is not _everything:
        d = jnp.where(d != 0, d, jnp.ones_like(d))  # a row with nothing to see
    scores, size = _directed(tile, x, where, scale)
    reciprocal = tile.along(1 / d)
    return _each(lambda s: online.weights(s, m, scale=size) * reciprocal, scores)


def _tangents(t, where, scale):
    return _each(lambda seen, t: _times(_where(seen, t, 0), scale), where, t)


def _times(values, scale):
    """`values * scale`, where `scale` is None, a number or one for each row."""
    if scale is None or scale.shape == values.shape:
        return values if scale is None else values * scale
    return values * lax.broadcast_in_dim(scale, values.shape, (0,) if scale.ndim else ())


def _where(where, values, otherwise):
    return values if where is None else jnp.where(where, values, jnp.full_like(values, otherwise))


# The kernel around them.


@dataclass(frozen=True)
class _Tile:
    """What the body of a kernel asks of the rows that its block holds."""

    layout: RowTile
    unroll: int
    scratch: Any  # [2, warps] float32 in shared memory, where warps share a row
    barriers: Sequence[Any]  # of the bulk copies of each operand, one for each turn
    inside: Callable[..., Any]  # a function of a turn: whether its elements are of a row, None if all are

    def along(self, row):
        """A value for each row, or one for all, along the row."""
        return lax.broadcast_in_dim(row, self.layout.shape, (0,) if row.ndim else ())

    def lift(self, scores, scale) -> State:
        """The states of what a warp holds of each row."""
        if not self.unroll:
            return online.lift(map(scores, range(self.layout.turns)), scale=scale)
        identity = online.identity(self.layout.shape[:1])
        start = [plgpu.layout_cast(part, self.layout.row_layout) for part in (identity.m, identity.d)]
        state = self._fold(lambda turns, *state: online.push(State(*state), map(scores, turns), scale=scale), start)
        return State(*state)

    def sum(self, values):
        """The sums of the rows."""
        if self.unroll:
            zeros = plgpu.layout_cast(jnp.zeros(self.layout.shape, jnp.float32), self.layout.layout)
            (total,) = self._fold(lambda turns, total: [functools.reduce(jnp.add, map(values, turns), total)], [zeros])
        else:
            total = functools.reduce(jnp.add, map(values, range(self.layout.turns)))
        sums = jnp.sum(total, 1)
        return jnp.sum(self._exchange(sums)[0]) if self.layout.whole_block else sums

    def merge(self, state: State, scale) -> State:
        """The states of the rows from those of what a warp holds."""
        if not self.layout.whole_block:
            return state
        return online.merge_along(State(*self._exchange(state.m, state.d)), 0, scale=scale)

    def each_turn(self, step):
        """Calls `step` with each turn."""
        if not self.unroll:
            for turn in range(self.layout.turns):
                step(turn)
        else:
            self._fold(lambda turns: [step(turn) for turn in turns][:0], [], wait=False)

    def _fold(self, step, start, wait=True):
        """Folds `step(turns, *carry)` over all turns in a loop; the first time it waits for the copies of each turn."""
        turns, unroll = self.layout.turns, self.unroll

        def iteration(i, carry):
            group = [i * unroll + k for k in range(unroll)]
            for barrier in self.barriers if wait else ():
                for turn in group:
                    plgpu.barrier_wait(barrier.at[turn])
            return tuple(part for part in step(group, *carry) if part is not None)

        return lax.fori_loop(0, turns // unroll, iteration, tuple(start))

    def _exchange(self, *parts):
        """What all warps have that share the row."""
        tile = self.layout
        group = _group(tile)
        if tile.blocks > 1:
            group = lax.axis_index("rank") * tile.warpgroups + group
            hopper.cluster_wait()
            for i, part in enumerate(parts):
                hopper.push_to_cluster(self.scratch.at[i], group * hopper.WARPS, part, tile.row_layout, tile.blocks)
            hopper.cluster_barrier()
        else:
            for i, part in enumerate(parts):
                self.scratch[i, pl.ds(group * hopper.WARPS, hopper.WARPS)] = part
            if tile.warpgroups > 1:
                hopper.block_barrier()
            else:
                plgpu.commit_smem()
        layout = hopper.replicated(hopper.WARPS * tile.warpgroups * tile.blocks)
        return [plgpu.load(self.scratch.at[i], layout=layout, optimized=False) for i in range(len(parts))]


def _call(
    name: str,
    body: Callable[..., list[Any]],
    axes: Sequence[int],
    operands: Sequence[jax.Array],
    where: jax.Array | None,
    scale: jax.Array | None,
    dtypes: Sequence[Any],
    *,
    row_operands: Sequence[jax.Array] = (),
    row_dtypes: Sequence[Any] = (),
    state: bool = False,
) -> list[jax.Array]:
    """Runs `body` on the rows of `operands`.

    Args:
      name: of the kernel, without the name of the implementation.
      body: gets a `_Tile`, the operands, the row operands, `where` and `scale`; gives the results.
      axes: the axes of a row.
      operands: whole arrays.
      where: a mask that broadcasts with them, or None.
      scale: factors that broadcast with their rows, or None.
      dtypes: of the results that are whole.
      row_operands: with size 1 along `axes`.
      row_dtypes: of the results that have size 1 along `axes`.
      state: whether a state, two float32 a row, comes after them.
    """
    shape = operands[0].shape
    row_shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    rows, cols = _rows_and_cols(shape, axes)
    dtypes = [jnp.dtype(dtype) for dtype in dtypes]
    row_dtypes = [jnp.dtype(dtype) for dtype in row_dtypes] + [jnp.dtype(jnp.float32)] * (2 * state)
    row_operands = [operand.reshape(rows) for operand in row_operands]

    def of_rows(operand):
        return jnp.broadcast_to(operand, row_shape).reshape(rows).astype(jnp.float32)

    mask_of_rows = where is not None and math.prod(where.shape[axis] for axis in axes) == 1
    masks, mask_row = [], None
    if where is not None and not mask_of_rows:
        masks, mask_row = [where.reshape(-1, cols)], _row_of_mask(shape, where.shape, axes)
    scales = [] if scale is None else [scale.reshape(1) if scale.size == 1 else of_rows(scale)]
    row_operands += [of_rows(where)] if mask_of_rows else []

    itemsize = max(dtype.itemsize for dtype in [*(a.dtype for a in operands), *dtypes])
    config = config_for(name, cols, itemsize, bool(masks))
    tile = RowTile(cols, config.vector, config.threads, config.repeats, config.blocks)
    exact = tile.exact(rows)
    slots = [plgpu.SMEM((tile.turns * tile.warpgroups, *tile.shape), a.dtype) for a in operands if config.parked]
    barriers = [plgpu.Barrier(num_barriers=tile.turns) for _ in slots if config.unroll]
    scratch = [plgpu.SMEM((2, hopper.WARPS * tile.warpgroups * tile.blocks), jnp.float32)] if tile.whole_block else []

    def kernel(*refs):
        remaining = iter(refs)
        given, masks_in, row_refs, scale_refs, out_refs, row_out_refs, slot_refs, barrier_refs, scratch_refs = (
            list(itertools.islice(remaining, len(group)))
            for group in (operands, masks, row_operands, scales, dtypes, row_dtypes, slots, barriers, scratch)
        )
        row = lax.axis_index("block") * jnp.int32(tile.rows)
        if tile.blocks > 1:
            hopper.cluster_arrive()
        if barriers:
            for ref, slot, barrier in zip(given, slot_refs, barrier_refs, strict=True):
                _copy_in(tile, ref, row, slot, barrier)
        sources = []
        for i, (ref, operand) in enumerate(zip(given, operands, strict=True)):
            fill = -jnp.inf if i == 0 and name != "softmax_backward" else 0
            slot = slot_refs[i] if slots else None
            sources.append(_source(tile, ref, row, rows, exact, operand.dtype, fill, slot, bool(config.unroll)))
        values = [_load_row(tile, ref, row, rows, exact) for ref in row_refs]
        inside = _everything if exact or not scales else _nonzero(tile.inside(row, rows))
        here = _Tile(tile, config.unroll, scratch_refs[0] if scratch else None, barrier_refs, inside)
        seen = _everything
        if masks:
            seen = _nonzero(tile.load(masks_in[0], row, rows, dtype=jnp.dtype(jnp.int8), source_row=mask_row))
        elif mask_of_rows:
            seen = _constant(here.along(values.pop()) != 0)
        factor = [ref[0] if ref.shape == (1,) else _load_row(tile, ref, row, rows, exact) for ref in scale_refs] or [None]
        results = body(here, *sources, *values, seen, *factor)
        if out_refs:

            def store(turn):
                _store(tile, out_refs[0], row, rows, exact, turn, results[0](turn).astype(dtypes[0]))

            here.each_turn(store)
        for ref, dtype, result in zip(row_out_refs, row_dtypes, results[len(dtypes) :], strict=True):
            _store_row(tile, ref, row, rows, exact, result.astype(dtype))

    whole = _exact_shape(tile, rows) if exact else (rows, cols)
    out_type = [jax.ShapeDtypeStruct(whole, dtype) for dtype in dtypes]
    out_type += [jax.ShapeDtypeStruct((rows,), dtype) for dtype in row_dtypes]
    options: dict[str, Any] = {}
    if tile.warpgroups > 1:
        options |= {"num_threads": tile.warpgroups, "thread_name": "warpgroup"}
    if tile.blocks > 1:
        options |= {"cluster": (tile.blocks,), "cluster_names": ("rank",)}
    results = plgpu.kernel(
        kernel,
        out_type=out_type,
        grid=(pl.cdiv(rows, tile.rows),),
        grid_names=("block",),
        scratch_types=slots + barriers + scratch,
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"{name}_mosaic",
        **options,
    )(*(operand.reshape(whole) for operand in operands), *masks, *row_operands, *scales)
    shapes = [shape] * len(dtypes) + [row_shape] * len(row_dtypes)
    return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]


def _group(tile: RowTile):
    return lax.axis_index("warpgroup") if tile.warpgroups > 1 else jnp.int32(0)


def _exact_shape(tile: RowTile, rows: int) -> tuple[int, ...]:
    """The view of an array that ends where a tile does, in which what a warpgroup has with a turn is one entry, or a slice."""
    return (rows * tile.turns * tile.blocks * tile.warpgroups, *tile.shape) if tile.whole_block else (rows, tile.cols)


def _first(tile: RowTile, row, turn):
    """The first entry of that view that the block has with a turn."""
    rank = lax.axis_index("rank") if tile.blocks > 1 else jnp.int32(0)
    return ((row * tile.turns + turn) * tile.blocks + rank) * tile.warpgroups


def _at(tile: RowTile, ref, row, turn):
    if tile.whole_block:
        return ref.at[_first(tile, row, turn) + _group(tile)]
    width = tile.shape[1]
    return ref.at[pl.ds(row, tile.rows), pl.ds(turn * width, width)]


def _copy_in(tile: RowTile, ref, row, slot, barrier):
    """Starts the copies of a row to shared memory, one for each turn of the block."""

    def start():
        for turn in range(tile.turns):
            source = ref.at[pl.ds(_first(tile, row, turn), tile.warpgroups)]
            target = slot.at[pl.ds(turn * tile.warpgroups, tile.warpgroups)]
            plgpu.copy_gmem_to_smem(source, target, barrier.at[turn], oob_mode=plgpu.OOBFillMode.PROMISE_IN_BOUNDS)

    if tile.warpgroups > 1:
        pl.when(_group(tile) == 0)(start)
    else:
        start()


def _source(tile, ref, row, rows, exact, dtype, fill, slot, looped):
    """A whole operand as a function of a turn, from where it is held."""

    def load(ref):
        return plgpu.load(ref, layout=tile.layout, optimized=False)

    def own_slot(turn):
        return slot.at[turn * tile.warpgroups + _group(tile)]

    def in_float32(source):
        return lambda turn: source(turn).astype(jnp.float32)

    if looped and slot is None:
        return in_float32(lambda turn: load(_at(tile, ref, row, turn)))
    if looped:
        return in_float32(lambda turn: load(own_slot(turn)))
    if exact:
        held = [load(_at(tile, ref, row, turn)) for turn in range(tile.turns)]
    else:
        held = tile.load(ref, row, rows, dtype=dtype, fill=fill)
    if slot is None:
        return in_float32(lambda turn: held[turn])
    for turn, values in enumerate(held):
        own_slot(turn)[...] = values
    return in_float32(lambda turn: load(own_slot(turn)))


def _store(tile, ref, row, rows, exact, turn, values):
    if exact:
        _at(tile, ref, row, turn)[...] = values
    else:
        tile.store(ref, row, rows, turn, values)


def _load_row(tile, ref, row, rows, exact):
    """What belongs to the rows of the tile, in float32."""
    if tile.whole_block:
        value = ref[row]
    elif exact:
        value = plgpu.load(ref.at[pl.ds(row, tile.rows)], layout=tile.row_layout, optimized=False)
    else:
        value = tile.load_row(ref, row, rows, dtype=ref.dtype)
    return value.astype(jnp.float32)


def _store_row(tile, ref, row, rows, exact, values):
    if tile.whole_block:
        ref[row] = values
    elif exact:
        ref[pl.ds(row, tile.rows)] = values
    else:
        tile.store_row(ref, row, rows, values)


def _row_of_mask(shape, where_shape, axes):
    """The row of a mask for a row of the scores, as a function of an int32 MLIR value: where it has size 1, it repeats."""
    parts: list[
        list[int]
    ] = []  # from the last axis: rows of the scores between entries, entries, rows of the mask between them
    between, stride = 1, 1
    for axis in reversed(range(len(shape))):
        if axis in axes or shape[axis] == 1:
            continue
        if where_shape[axis] != 1:
            if parts and parts[-1][0] * parts[-1][1] == between:
                parts[-1][1] *= shape[axis]
            else:
                parts.append([between, shape[axis], stride])
            stride *= shape[axis]
        between *= shape[axis]

    def source_row(row):
        total = hopper.constant(0)
        for divisor, modulus, stride in parts:
            index = arith.divui(row, hopper.constant(divisor))
            if divisor * modulus != between:
                index = arith.remui(index, hopper.constant(modulus))
            total = arith.addi(total, arith.muli(index, hopper.constant(stride)))
        return total

    return source_row
