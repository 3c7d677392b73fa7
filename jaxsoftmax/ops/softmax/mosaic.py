"""The softmax family on Hopper, for rows that fit into a block, or a small cluster: up to 32768 elements.

Each element is read once and written once. A block holds its rows, or its one row, in registers or shared memory. Each warp
lifts its share to a state; where warps share a row, their states merge through shared memory. Then the results are computed
from what is held, and stored. Per element, softmax and log_softmax read one and write one; logsumexp reads one; the maps read
two (`logsumexp_vjp`: one) and write one (`logsumexp_jvp`: none); a mask is read as bytes, in its own shape.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows import run as rows
from jaxsoftmax._gpu.rows.layout import RowTile
from jaxsoftmax._gpu.rows.run import Config, constant, each, everything, rows_and_cols
from jaxsoftmax.ops.softmax.xla import select

DTYPES = ("float32", "bfloat16", "float16")
MAX_COLS = 32768
FUSED_COLS = {4: 16384, 2: 8192}  # by bytes of an element, up to how many columns XLA's fused forward is faster


# What is served.


def unsupported(primitive, target, operands, *, axes, dtype, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    del params
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability[0] != 9:
        return f"it needs compute capability 9.x, got {target.platform} {target.compute_capability}"
    x, where = next(iter(a for a in operands.values() if a is not None)), operands.get("where")
    whole = [a for a in operands.values() if a is not None and a.dtype != bool and a.shape == x.shape]
    for name in [a.dtype.name for a in whole] + [jnp.dtype(dtype).name]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    along = [axis for axis in axes if x.shape[axis] != 1]
    after = [axis for axis in range(min(along, default=x.ndim), x.ndim) if axis not in axes and x.shape[axis] != 1]
    if after:
        return f"the axes must be the last ones, got axes {axes} of shape {x.shape}"
    count, cols = rows_and_cols(x.shape, axes)
    if not 1 <= cols <= MAX_COLS:
        return f"a row must have from 1 to {MAX_COLS} entries, got {cols}"
    if not 1 <= count < 2**31:
        return f"there must be from 1 to {2**31 - 1} rows, got {count}"
    if where is not None and math.prod(where.shape[axis] for axis in axes) not in (1, cols):
        return f"where must be whole along the axes, or of size 1, got shape {where.shape} for {x.shape}"
    return None


def unprofitable(primitive, target, operands, fused, cast, *, axes, dtype, **params) -> str | None:
    """Why the reference should be faster although the kernels could run, in words, or None."""
    del target, params
    x = next(a for a in operands.values() if a is not None)
    _, cols = rows_and_cols(x.shape, axes)
    wide = cols > FUSED_COLS[max(x.dtype.itemsize, jnp.dtype(dtype).itemsize)]
    if fused and not (wide and primitive in ("softmax", "log_softmax")):
        return f"XLA computes {primitive} together with what produces its operand, which then is never in memory"
    if primitive == "softmax" and cast and jnp.dtype(dtype) == jnp.float32 and not wide:
        return "XLA fuses the cast of its operand, and one back that may follow; with dtype= the kernel casts both"
    return None


# How a row is spread over threads.


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
    ("logsumexp_backward", 2): [(16384, MAX_COLS, Config(8, 1024))],
}


def config_for(kernel: str, cols: int, itemsize: int, masked: bool, repeated: bool = False) -> Config:
    """The configuration of a kernel for rows of `cols` elements, the widest of `itemsize` bytes, as measured on an H200.

    `repeated` is for a mask of fewer rows: they are not aligned as the rows are that they belong to. The number of rows does
    not matter, so the bits of a row do not depend on it. The measurements are in `benchmarks/results/h200/softmax.csv`.
    """
    widest = 16 // itemsize
    vector = math.gcd(cols, widest)
    if cols <= 128 * widest or (cols <= 1024 and vector < widest):
        return _within_a_warp(kernel, cols, vector, widest)
    if repeated and vector < widest:
        return Config(vector, next(threads for threads in (128, 256, 512, 1024) if cols <= 32 * vector * threads))
    ways = [config for above, most, config in _FASTER.get((kernel, itemsize), []) if above < cols <= most]
    ways += [config for most, config in _BLOCKS[itemsize] if cols <= most]
    return next(config for config in ways if _can_be(config, cols, masked))


def _within_a_warp(kernel: str, cols: int, vector: int, widest: int) -> Config:
    """A vector for each lane, or several where there are more than 32, and rows enough for a thread to wait for a few loads."""
    vectors, repeats = cols // vector, None
    if widest == 8 and vector == 1:  # 16-bit elements one by one: eight for each lane, of one row
        vectors, repeats = cols // 4, 1
    elif widest == 8 and kernel == "logsumexp_forward" and cols < 512:  # two vectors for each lane, of two rows
        vectors, repeats = vectors // 2, 2
    threads = min(ptx.WARP, 1 << max(1, vectors.bit_length() - 1))
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


def softmax(x, where, scale, *, axes, dtype, target=None):
    """`exp(s - m) / d`."""

    def body(tile, x, where, scale):
        scores, size = _directed(tile, x, where, scale)
        local = tile.lift(scores, size)
        state = tile.merge(local, size)
        d = state.d + (state.m - state.m)  # NaN where the maximum is infinite
        factor = tile.along(online.weights(local.m, state.m, axis=(), scale=size) / d)
        y = each(lambda s: online.weights(s, local.m, scale=size) * factor, scores)
        masked = each(select, where, y, constant(0))
        if where is everything or not tile.layout.whole_block:
            return [masked]
        finite = jnp.logical_and(jnp.abs(state.m) < jnp.inf, state.d > 0)  # then what is masked has weight 0 by itself
        return [rows.Either(finite, y, masked)]

    return _run("softmax_forward", body, axes, [x], where, scale, [dtype])[0]


def log_softmax(x, where, scale, *, axes, dtype, return_state, target=None):
    """`(s - m) - log d`, and the state `(m, d)` if asked for."""

    def body(tile, x, where, scale):
        scores, size = _directed(tile, x, where, scale)
        state = tile.merge(tile.lift(scores, size), size)
        m = state.m if where is everything else jnp.where(state.m != -jnp.inf, state.m, 0)
        d = state.d + (m - m)
        along_m, log_d = tile.along(m), tile.along(jnp.log(d))
        out = each(lambda s: _times(s - along_m, size) - log_d, scores)
        return [each(select, where, out, constant(-jnp.inf)), m, d][: 3 if return_state else 1]

    return _run("log_softmax_forward", body, axes, [x], where, scale, [dtype], return_state=return_state)


def logsumexp(x, where, scale, *, axes, dtype, return_state, target=None):
    """`m + log d`, and the state `(m, d)` if asked for."""

    def body(tile, x, where, scale):
        scores, size = _directed(tile, x, where, scale)
        state = tile.merge(tile.lift(scores, size), size)
        m = online.shift(state.m)
        return [_times(m, size) + jnp.log(state.d), m, state.d][: 3 if return_state else 1]

    return _run("logsumexp_forward", body, axes, [x], where, scale, [], row_dtypes=[dtype], return_state=return_state)


def softmax_jacobian(y, t, scale, *, axes, dtype, target=None):
    """`scale * y * (t - sum(y * t))`."""

    def body(tile, y, t, where, scale):
        del where

        def product(y, t):
            return y, _times(select(y != 0, t, 0), scale)

        total = tile.along(tile.sum(each(lambda y, t: jnp.multiply(*product(y, t)), y, t)))

        def result(y, t):
            y, t = product(y, t)
            return select(y != 0, y * (t - total), 0)

        return [each(result, y, t)]

    return _run("softmax_backward", body, axes, [y, t], None, scale, [dtype])[0]


def log_softmax_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target=None):
    """`t - sum(p * t)`."""

    def body(tile, x, t, m, d, where, scale):
        weights = _weights(tile, x, m, d, where, scale)
        tangents = _tangents(t, where, scale if scale_tangent else None)
        total = tile.along(tile.sum(each(lambda p, t: p * select(p != 0, t, 0), weights, tangents)))
        return [each(lambda seen, t: select(seen, t - total, 0), where, tangents)]

    return _run("log_softmax_tangent", body, axes, [x, t], where, scale, [dtype], row_operands=[m, d])[0]


def log_softmax_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target=None):
    """`c - p * sum(c)`."""

    def body(tile, x, c, m, d, where, scale):
        cotangents = _tangents(c, where, scale if scale_tangent else None)
        total = tile.along(tile.sum(cotangents))
        weights = _weights(tile, x, m, d, where, scale)
        return [each(lambda seen, c, p: select(seen, c - p * total, 0), where, cotangents, weights)]

    return _run("log_softmax_backward", body, axes, [x, t], where, scale, [dtype], row_operands=[m, d])[0]


def logsumexp_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target=None):
    """`sum(p * t)`."""

    def body(tile, x, t, m, d, where, scale):
        weights = _weights(tile, x, m, d, where, scale)
        factor = scale if scale_tangent else None
        return [tile.sum(each(lambda p, t: p * _times(select(p != 0, t, 0), factor), weights, t))]

    return _run("logsumexp_tangent", body, axes, [x, t], where, scale, [], row_operands=[m, d], row_dtypes=[dtype])[0]


def logsumexp_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target=None):
    """`p * c`."""

    def body(tile, x, m, d, c, where, scale):
        c = tile.along(_times(c, scale if scale_tangent else None))
        weights = _weights(tile, x, m, d, where, scale)
        return [each(lambda seen, p: select(seen, p * c, 0), where, weights)]

    return _run("logsumexp_backward", body, axes, [x], where, scale, [dtype], row_operands=[m, d, t])[0]


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def alone(x, op="softmax"):
    """An op of `[rows, cols]` on kernels in both directions, with no primitive around: what the interpreter runs."""
    return _alone_forward(x, op)[0]


def _alone_forward(x, op):
    params = {"axes": (1,), "dtype": x.dtype}
    if op == "softmax":
        y = softmax(x, None, None, **params)
        return y, (y,)
    out, m, d = {"log_softmax": log_softmax, "logsumexp": logsumexp}[op](x, None, None, return_state=True, **params)
    return out, (x, m, d)


def _alone_backward(op, saved, cotangent):
    params = {"axes": (1,), "dtype": saved[0].dtype}
    if op == "softmax":
        (y,) = saved
        return (softmax_jacobian(y, cotangent, None, **params),)
    x, m, d = saved
    backward = {"log_softmax": log_softmax_vjp, "logsumexp": logsumexp_vjp}[op]
    return (backward(x, m, d, cotangent, None, None, scale_tangent=False, **params),)


alone.defvjp(_alone_forward, _alone_backward)


# What they have in common.


def _run(kernel, body, axes, operands, where, scale, dtypes, *, row_operands=(), row_dtypes=(), return_state=False):
    """Runs a kernel; with `return_state` its last two results are a state."""
    fills = [0 if kernel == "softmax_backward" else -jnp.inf] + [0] * (len(operands) - 1)
    return rows.run(
        f"{kernel}_mosaic",
        body,
        functools.partial(config_for, kernel),
        axes,
        operands,
        where,
        scale,
        dtypes,
        fills=fills,
        row_operands=row_operands,
        row_dtypes=[*row_dtypes, *[jnp.float32] * (2 * return_state)],
    )


def _directed(tile, x, where, scale):
    """`x` in the direction in which the scores grow, `-inf` where it is masked, and the size of `scale`."""
    if scale is None:
        return each(lambda seen, x: select(seen, x, -jnp.inf), where, x), None
    sign = tile.along(jnp.sign(scale))
    directed = each(lambda inside, x: select(inside, x * sign, -jnp.inf), tile.inside, x)  # beyond the end x is -inf
    return each(lambda seen, x: select(seen, x, -jnp.inf), where, directed), jnp.abs(scale)


def _weights(tile, x, m, d, where, scale):
    """The softmax weights, from the saved state."""
    if where is not everything:
        d = jnp.where(d != 0, d, 1)  # a row with nothing to see
    scores, size = _directed(tile, x, where, scale)
    reciprocal = tile.along(1 / d)
    return each(lambda s: online.weights(s, m, scale=size) * reciprocal, scores)


def _tangents(t, where, scale):
    return each(lambda seen, t: _times(select(seen, t, 0), scale), where, t)


def _times(values, scale):
    """`values * scale`, where `scale` is None, a number or one for each row."""
    if scale is None or scale.shape == values.shape:
        return values if scale is None else values * scale
    return values * lax.broadcast_in_dim(scale, values.shape, (0,) if scale.ndim else ())
