"""The softmax family on Hopper, for rows of any length.

Each element is read once and written once, but of rows that fill more than two thirds of what the whole GPU can hold:

1. A block loads its rows, its one row or its part of one into registers or shared memory; of what it reads once only, nothing
   is held.
2. Each warp lifts its share of a row to a state `(m, d)`: the maximum, and the sum of `exp(s - m)`.
3. Where warps share a row, their states merge through shared memory; those of a cluster write to each other's, and those of
   blocks that share longer rows go through global memory.
4. The results are computed from the elements that are held and the state, and stored.

Of the elements of each row, softmax and log_softmax read one array and write one; logsumexp reads one; the derivatives read two
(`logsumexp_vjp`: one) and write one (`logsumexp_jvp`: none). A mask is read as bytes, in its own shape.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.row_problem import Masked, RowProblem, entries, is_along
from jaxsoftmax._core.target import target_for
from jaxsoftmax._gpu.ptx import WARP
from jaxsoftmax._gpu.rows import run as rows
from jaxsoftmax._gpu.rows.columns import ColumnLayout
from jaxsoftmax._gpu.rows.layout import Config, RowLayout
from jaxsoftmax._gpu.rows.run import Inside, Mask, PerRow, Scalar, Whole
from jaxsoftmax._gpu.rows.tile import Either, each

DTYPES = ("float32", "bfloat16", "float16")
FUSED_COLS = {4: 16384, 2: 8192}  # by bytes of an element, up to how many columns XLA's fused forward is faster


# What is served.


def unsupported(primitive, target, operands, *, axes, dtype, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    del params
    whole = _whole_operands(primitive, operands)
    dtypes = [operands[name].dtype for name in whole] + [jnp.dtype(dtype)]
    where, problem = operands.get("where"), problem_of(primitive, operands, axes, dtype)
    return unsupported_rows(target, kernel_of(primitive), dtypes, where, problem)


def unsupported_rows(target, kernel: str, dtypes, where, problem: RowProblem) -> str | None:
    """Returns why `kernel` cannot run on rows of these dtypes, in words, or None."""
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability[0] not in _CLUSTERS:
        served = " or ".join(f"{generation}.x" for generation in _CLUSTERS)
        return f"it needs compute capability {served}, got {target.platform} {target.compute_capability}"
    for name in [dtype.name for dtype in dtypes]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    if (reason := problem.unsupported(2**31 - 1)) is not None:
        return reason
    if where is not None and entries(where.shape, problem.axes) not in (1, problem.cols):
        return f"where must be whole along the axes, or of size 1, got shape {where.shape} for {problem.shape}"
    return _does_not_fit(target, problem, config_of(target, kernel, problem))


def _does_not_fit(target, problem: RowProblem, config: Config) -> str | None:
    """Returns why the blocks of a configuration cannot hold the rows in shared memory, in words, or None."""
    if not config.parked or config.threads <= WARP:
        return None
    cols, inner = problem.cols, problem.inner
    layout = ColumnLayout(cols, inner, config) if inner > 1 else RowLayout(cols, config)
    held = layout.stages * config.grid
    if config.grid and layout.blocks > held:
        return f"rows of {cols} entries side by side are {layout.blocks} slices, of which the grid holds {held}"
    needed = layout.slot_elements * sum(problem.read) + layout.scratch_size
    if needed > target.shared_memory - _RESERVED:
        return f"rows of {cols} entries need {needed} bytes of shared memory in each of {layout.blocks} blocks"
    return None


def merges(primitive, target, operands, *, axes, dtype, **params) -> bool:
    """Whether its kernel takes `devices`, and merges over them what it has, of operands that it runs otherwise.

    It then reads each element once. By states alone, which a collective joins, it would be twice.
    """
    del params
    problem = problem_of(primitive, operands, axes, dtype)
    if primitive not in _MERGING or problem.inner > 1 or problem.cols * problem.read[0] < _least_shared(problem.rows):
        return False
    config = _of_devices(target, kernel_of(primitive), problem)
    return bool(config.grid) and _does_not_fit(target, problem, config) is None


def kernel_of(primitive) -> str:
    return f"{primitive}_forward" if primitive in ("softmax", "log_softmax", "logsumexp") else primitive


def problem_of(primitive, operands, axes, dtype) -> RowProblem:
    """The problem of a primitive, from operands of these types."""
    names = _whole_operands(primitive, operands)
    return RowProblem(
        operands[names[0]].shape,
        tuple(axes),
        read=tuple(operands[name].dtype.itemsize for name in names),
        written=() if primitive in _STREAMED_PRIMITIVES else (jnp.dtype(dtype).itemsize,),
        has_mask=is_along(operands.get("where"), axes),
        needs_end=primitive != "softmax_jacobian" and operands.get("scale") is not None,
    )


def _whole_operands(primitive, operands) -> list[str]:
    """The names of the operands that are as large as the rows."""
    names = "x", "y", *(() if primitive == "logsumexp_vjp" else ("t",))
    return [name for name in names if operands.get(name) is not None]


_STREAMED_PRIMITIVES = ("logsumexp", "logsumexp_jvp")  # whose results are numbers of rows


_MERGING = ("softmax", "log_softmax", "softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp")


def _least_shared(rows: int) -> int:
    """Returns the bytes of a row that a device must have for one kernel of all devices to be faster than a collective.

    On four H200s softmax of [8192, 2048] in bfloat16, 1 KiB of a row each, takes 54 us in one kernel, 59 on the reference and
    70 with `jax.nn`. Blocks of many short rows wait for each other most of the time: [32768, 2048] takes 101, 92 and 98, and in
    float32 98, 111 and 118. No part under 1 KiB was measured, and no number of rows between these.
    """
    return 1024 if rows <= 2**14 else 2048


def unprofitable(primitive, target, operands, fused, cast, *, axes, dtype, **params) -> str | None:
    """Why the reference should be faster although the kernels could run, in words, or None."""
    del target, params
    problem = problem_of(primitive, operands, axes, dtype)
    return unprofitable_rows(primitive, kernel_of(primitive), problem, fused, cast, dtype)


def unprofitable_rows(primitive, kernel: str, problem: RowProblem, fused, cast, dtype) -> str | None:
    """Returns why the reference should be faster at such rows, in words, or None."""
    if problem.cols == 1:
        return "XLA computes rows of one entry element by element"
    # [2^20, 16, 8] takes 1774 us in float32 and 3795 in bfloat16, and XLA 579 and 368.
    if 1 < problem.inner < 16 and problem.cols * problem.inner <= 256:
        return "XLA is faster at rows that are short and have few others beside them"
    wide = problem.cols > FUSED_COLS[max(problem.read[0], jnp.dtype(dtype).itemsize)]
    if fused and not (wide and kernel in ("softmax_forward", "log_softmax_forward")):
        return f"XLA computes {primitive} together with what produces its operand, which then is never in memory"
    if kernel == "softmax_forward" and cast and jnp.dtype(dtype) == jnp.float32 and not wide:
        return "XLA fuses the cast of its operand, and one back that may follow; with dtype= the kernel casts both"
    return None


# How a row is spread over threads.


# The generations of GPUs that are served, by the major number of the compute capability: from how many multiprocessors on a
# cluster may have how many blocks. Its blocks run on one of eight parts of the GPU, which must have a multiprocessor for each.
# Where any GPU is meant, as in an export without one at hand, clusters have 8 blocks, which all of them can run.
_CLUSTERS = {9: [(132, 16), (0, 8)]}


def config_of(target, kernel: str, problem: RowProblem) -> Config:
    """The configuration of a kernel for a problem."""
    return config_for(target, kernel, problem.cols, problem.widest, problem.masked, problem.inner)


def config_for(target, kernel: str, cols: int, itemsize: int, masked: Masked, inner: int = 1) -> Config:
    """The configuration of a kernel for rows of `cols` elements, the widest of `itemsize` bytes, as measured on an H200.

    Short rows are inside a warp, and a block has several: it costs as much time to start as 3 KiB take to be read. A
    thread holds up to 128 bytes of a row in registers, which is fastest. Where that takes too many threads, or in 16 bits
    where rows do not start with a line of the cache, rows are in shared memory, up to 250 elements for each thread, so that a
    multiprocessor has several blocks, some of which load while others store. Long rows are shared by the blocks of a cluster,
    longer ones by those of the grid. What is read once and not written is held nowhere where that is long.

    `masked` is True for a mask along the columns, and "end" for a scale, which must know what is beyond the end. The number of
    rows does not matter, so the bits of a row do not depend on it. The measurements are in
    `benchmarks/results/h200/softmax.csv`.
    """
    widest = 16 // itemsize
    clusters = _CLUSTERS[target.compute_capability[0]]
    known = 0 if target.name is None else target.multiprocessors
    most = next(blocks for multiprocessors, blocks in clusters if known >= multiprocessors)
    if inner > 1:
        return _along_another_axis(target, kernel, cols, itemsize, inner, most)
    vector = math.gcd(cols, widest)
    # Where short rows reach the bandwidth as they are, in registers, small arrays of them are fastest so, too.
    plain = bool(masked) or (itemsize == 4 and kernel != "logsumexp_forward")
    in_a_warp = 2048 if plain or (kernel != "logsumexp_forward" and cols % 1024 == 0) else 4096  # bytes
    if not plain and itemsize == 2 and kernel not in _TWO_OPERANDS and cols % 64:
        in_a_warp = 8192
    if cols * itemsize <= in_a_warp or (cols <= 1024 and vector < widest):
        return _within_a_warp(kernel, cols, vector, widest, plain)
    if kernel in _STREAMED and masked is not True and cols > (8192 if itemsize == 4 else 20480):
        threads = 256 if cols * itemsize > 2**20 else 128
        return Config(4, threads, blocks=min(8, _power(cols / 65536)), unroll=16 // itemsize)
    size = itemsize, 2 if kernel in _TWO_OPERANDS else 1
    whole_lines = cols % (8 * widest) == 0
    # What log_softmax holds of a row it needs once more, with an exponent for each: then a thread has too many registers.
    few = masked or kernel == "log_softmax_forward"
    in_registers = 8192 if few else 131072 if size == (4, 1) and whole_lines else _IN_REGISTERS[size]
    if cols <= in_registers and (whole_lines or itemsize == 4 or masked):
        each = 128 // itemsize  # elements of a thread
        most_threads = 512 if itemsize == 4 and (whole_lines or kernel != "logsumexp_vjp") else 256
        threads = min(most_threads, max(128, _power(cols / each)))
        return Config(widest, threads, blocks=_power(cols / (each * threads)))
    share, longest = _SHARES[size]
    if cols > most * longest:
        if kernel == "logsumexp_vjp":  # whose blocks need nothing of each other
            return Config(widest, 2048 // widest, blocks=most, unroll=4)
        return _of_the_grid(target, cols, *size)
    blocks = min(most, _power(cols / share))
    if size == (2, 1) and whole_lines and cols > 65536:  # as fast, and faster where rows are few
        blocks = most
    threads = 256 if cols > 8192 and size != (2, 1) else 128
    unroll = 4 if cols > 200_000 else 1 if size == (2, 2) and cols > 8192 else 2
    return Config(widest, threads, blocks=blocks, parked=True, unroll=unroll)


def _along_another_axis(target, kernel: str, cols: int, itemsize: int, inner: int, most: int) -> Config:
    """Rows side by side that fill a line of the cache, or half of one, and up to 40 KiB of them a block; of longer ones fewer.

    In 16 bits, and where what is read is not written, a block of half lines has more elements of each row, which is worth more
    where rows are long. Where a cluster would hold less than half a line of them, blocks of the grid share them.
    """
    vector = math.gcd(inner, 16 // itemsize)
    size = vector * itemsize * (2 if kernel in _TWO_OPERANDS else 1)  # of what a lane holds of an element of its rows
    line = 128 // (vector * itemsize)  # lanes
    fills = itemsize == 4 or (cols * line * size <= 2**18 and (inner % (line * vector) == 0 or inner > 8 * line * vector))
    touched = line if fills and kernel not in _STREAMED else line // 2
    lanes = widest = min(WARP // 2, touched, _power(inner / vector))
    while lanes * vector * itemsize > 64 and cols * lanes * size > most * 102400:
        lanes //= 2
    if cols * lanes * size <= most * 102400:
        blocks = min(most, _power(cols * lanes * size / 40960))
        threads = 128 if cols * lanes * size <= blocks * 65536 else 256
        return Config(vector, threads, blocks=blocks, parked=True, unroll=8 // itemsize, lanes=lanes)
    if kernel in _STREAMED or kernel == "logsumexp_vjp":  # read once, or of which blocks need nothing of each other
        return Config(vector, 128, blocks=most, unroll=4, lanes=widest)
    stage = 49152 if kernel in _TWO_OPERANDS else 32768  # bytes, of all operands
    threads = 128 if stage <= 32 * 128 * size else 256
    found = []  # wide tiles, unless they have more slices than blocks run at a time
    for width in (widest, lanes):
        blocks = -(-cols // (stage // (threads * size) * (threads // width)))
        found.append(Config(vector, threads, blocks=blocks, parked=True, unroll=2, lanes=width, grid=_resident(target, stage)))
    return found[0] if found[0].blocks <= found[0].grid else found[1]


def _of_devices(target, kernel: str, problem: RowProblem) -> Config:
    """The configuration for a device's part of rows that devices share: blocks of the grid hold it, however short it is."""
    cols, itemsize, operands = problem.cols, problem.widest, 2 if kernel in _TWO_OPERANDS else 1
    return _of_the_grid(target, cols, itemsize, operands, min(_STAGE[itemsize], operands * max(2048, cols * itemsize)))


def _of_the_grid(target, cols: int, itemsize: int, operands: int, stage: int | None = None) -> Config:
    """Slices that the blocks of the grid hold; larger ones, read twice, where a row would be more than two thirds of all."""
    vector, threads, stage = 16 // itemsize, 128, stage or _STAGE[itemsize]
    step, line = threads * vector, 8 * vector
    held = stage // (step * itemsize * operands) * step
    blocks = -(-cols // (held if cols % line == 0 else held - line))  # slices may start inside of a line
    grid = _resident(target, stage)
    slices = 2 * grid  # that the blocks hold in their stages
    if 3 * blocks > 2 * slices:
        threads = 512 if itemsize == 4 else 256
        return Config(vector, threads, blocks=max(256, min(1024, -(-cols // (128 * threads)))), unroll=4)
    return Config(vector, threads, blocks=blocks, parked=True, unroll=4, grid=grid)


def _resident(target, stage: int) -> int:
    """How many blocks run at a time that have two stages of shared memory."""
    return target.multiprocessors * max(1, target.shared_memory // (2 * stage + _RESERVED))


_STAGE = {4: 32768, 2: 24576}  # bytes of a stage of a block of the grid, by bytes of an element
_STREAMED = ("logsumexp_forward", "logsumexp_jvp")
_RESERVED = 6144  # bytes of shared memory for what is neither rows nor their states
# By bytes of an element, and operands that are held: up to how many columns registers hold them; else from how many for a
# block on a cluster has twice as many blocks, and with the most blocks from how many on the grid shares rows.
_IN_REGISTERS = {(4, 1): 65536, (4, 2): 65536, (2, 1): 65536, (2, 2): 8192}
_SHARES = {(4, 1): (16384, 11264), (4, 2): (12288, 8192), (2, 1): (20480, 24576), (2, 2): (25600, 25600)}


def _power(least: float) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, math.ceil(math.log2(least)))


def _within_a_warp(kernel: str, cols: int, vector: int, widest: int, plain: bool) -> Config:
    """Rows of whole vectors are loaded to registers, by the lanes of which fewest idle; others pass through shared memory.

    A block has rows enough for a thread to wait for a few loads. With `plain` all rows are loaded to registers.
    """
    singly = widest == 8 and vector == 1  # 16-bit elements: eight for each lane, of one row
    if plain:
        lanes = min(WARP, 1 << max(1, (cols // (4 if singly else vector)).bit_length() - 1))
    else:
        lanes = min(_shared_by(cols, widest), key=lambda lanes: (max(4, lanes) * _share(cols, widest, lanes), -lanes))
        share = _share(cols, widest, lanes)
        if vector < widest or lanes * share > 1.12 * cols or share > 8 * widest:
            return _flat(cols)
    each = 4 * widest if kernel == "logsumexp_forward" else widest if kernel in _TWO_OPERANDS else 2 * widest
    return Config(vector, lanes, 1 if singly else max(1, each // _share(cols, vector, lanes)))


def _flat(cols: int) -> Config:
    """Vectors of words, in so many lanes that few idle; few of them, as a body is written out for each."""
    found = [(lanes, vector) for vector in (8, 4, 2) for lanes in _shared_by(cols, vector)]
    found = [(lanes, vector) for lanes, vector in found if _share(cols, vector, lanes) <= 16 * vector]
    lanes, vector = min(found, key=lambda found: found[0] * _share(cols, found[1], found[0]) * (1 + 0.15 / found[1]))
    return Config(vector, lanes, max(1, min(8, 32 // _share(cols, vector, lanes))), parked=True)


def _shared_by(cols: int, vector: int) -> list[int]:
    """How many lanes may share a row of vectors, so that each holds few elements."""
    return [1 << k for k in range(6) if k == 5 or _share(cols, vector, 1 << k) <= 40]


def _share(cols: int, vector: int, lanes: int) -> int:
    """Elements that a lane has of a row."""
    return -(-cols // (lanes * vector)) * vector


_TWO_OPERANDS = ("softmax_jacobian", "log_softmax_vjp", "log_softmax_jvp", "logsumexp_jvp")


# The primitives. The body of a kernel computes in float32: `x`, `y` and `t` are functions of a step that give the elements
# of a vector of each thread, as are results and `where`, unless it is None.


def softmax(x, where, scale, *, axes, dtype, target, devices=()):
    """`exp(s - m) / d`."""

    def body(tile, x, inside, where, scale):
        scores, size = _directed(tile, x, inside, where, scale)
        local = tile.lift(scores, size)
        state = tile.merge(local, size)
        d = state.d + (state.m - state.m)  # NaN where the maximum is infinite
        weights, alike = tile.weights(local.m, size)
        factor = tile.along(online.weights(local.m, state.m, axis=(), scale=size) * alike / d)
        y = each(lambda s: weights(s) * factor, scores)
        if where is None or not tile.memory.layout.branches:
            return [apply_mask(where, y, 0)]
        finite = jnp.logical_and(jnp.abs(state.m) < jnp.inf, state.d > 0)  # then what is masked has weight 0 by itself
        return [Either(finite, y, apply_mask(where, y, 0))]

    return _run("softmax_forward", body, axes, target, x, where, scale, whole=[dtype], devices=devices)[0]


def log_softmax(x, where, scale, *, axes, dtype, return_state, target, devices=()):
    """`(s - m) - log d`, and the state `(m, d)` if asked for."""

    def body(tile, x, inside, where, scale):
        scores, size = _directed(tile, x, inside, where, scale)
        state = tile.merge(tile.lift(scores, size), size)
        m = state.m if where is None else jnp.where(state.m != -jnp.inf, state.m, 0)
        d = state.d + (m - m)
        along_m, log_d = tile.along(m), tile.along(jnp.log(d))
        out = each(lambda s: _times(s - along_m, size) - log_d, scores)
        return [apply_mask(where, out, -jnp.inf), m, d][: 3 if return_state else 1]

    state = [jnp.float32] * (2 * return_state)
    return _run("log_softmax_forward", body, axes, target, x, where, scale, whole=[dtype], per_row=state, devices=devices)


def logsumexp(x, where, scale, *, axes, dtype, return_state, target):
    """`m + log d`, and the state `(m, d)` if asked for."""

    def body(tile, x, inside, where, scale):
        scores, size = _directed(tile, x, inside, where, scale)
        state = tile.merge(tile.lift(scores, size), size)
        m = online.shift(state.m)
        return [_times(m, size) + jnp.log(state.d), m, state.d][: 3 if return_state else 1]

    results = [dtype, *[jnp.float32] * (2 * return_state)]
    return _run("logsumexp_forward", body, axes, target, x, where, scale, per_row=results)


def softmax_jacobian(y, t, scale, *, axes, dtype, target, devices=()):
    """`scale * y * (t - sum(y * t))`."""

    def body(tile, y, t, scale):
        pairs = each(lambda y, t: (y, _times(select(y != 0, t, 0), scale)), y, t)
        total = tile.along(tile.sum(each(lambda pair: jnp.multiply(*pair), pairs)))
        return [each(lambda pair: select(pair[0] != 0, pair[0] * (pair[1] - total), 0), pairs)]

    operands = {
        "y": Whole(y, 0, jnp.float32),
        "t": Whole(t, 0, jnp.float32),
        "scale": None if scale is None else _factor(scale),
    }
    problem = problem_of("softmax_jacobian", {"y": y, "t": t, "scale": scale}, axes, dtype)
    config = _config(target, "softmax_jacobian", problem, devices)
    return rows.run("softmax_jacobian_mosaic", body, operands, problem, config, whole=[dtype], devices=devices)[0]


def log_softmax_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target, devices=()):
    """`t - sum(p * t)`."""

    def body(tile, x, t, m, d, inside, where, scale):
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        tangents = _tangents(t, where, scale if scale_tangent else None)
        total = tile.along(tile.sum(each(lambda p, t: p * select(p != 0, t, 0), weights, tangents)))
        return [apply_mask(where, each(lambda t: t - total, tangents), 0)]

    given = {"t": Whole(t, 0, jnp.float32), "m": PerRow(m), "d": PerRow(d)}
    return _run("log_softmax_jvp", body, axes, target, x, where, scale, given, whole=[dtype], devices=devices)[0]


def log_softmax_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target, devices=()):
    """`t - p * sum(t)`, of the cotangent `t`."""

    def body(tile, x, t, m, d, inside, where, scale):
        cotangents = _tangents(t, where, scale if scale_tangent else None)
        total = tile.along(tile.sum(cotangents))
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        return [apply_mask(where, each(lambda t, p: t - p * total, cotangents, weights), 0)]

    given = {"t": Whole(t, 0, jnp.float32), "m": PerRow(m), "d": PerRow(d)}
    return _run("log_softmax_vjp", body, axes, target, x, where, scale, given, whole=[dtype], devices=devices)[0]


def logsumexp_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target):
    """`sum(p * t)`."""

    def body(tile, x, t, m, d, inside, where, scale):
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        factor = scale if scale_tangent else None
        return [tile.sum(each(lambda p, t: p * _times(select(p != 0, t, 0), factor), weights, t))]

    given = {"t": Whole(t, 0, jnp.float32), "m": PerRow(m), "d": PerRow(d)}
    return _run("logsumexp_jvp", body, axes, target, x, where, scale, given, per_row=[dtype])[0]


def logsumexp_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target):
    """`p * t`, of the cotangent `t`, one for each row."""

    def body(tile, x, m, d, t, inside, where, scale):
        t = tile.along(_times(t, scale if scale_tangent else None))
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        return [apply_mask(where, each(lambda p: p * t, weights), 0)]

    given = {"m": PerRow(m), "d": PerRow(d), "t": PerRow(t, jnp.float32)}
    return _run("logsumexp_vjp", body, axes, target, x, where, scale, given, whole=[dtype])[0]


# Each op alone: plain `jax.custom_vjp` functions, the kernels above with no primitive and no dispatch (see docs/design.md).
# Rows lie along the last axis of `x`, and results have its dtype; `logsumexp_alone` keeps the axis.


def _alone(op):
    def params(x):
        target = target_for("cuda")
        if reason := unsupported(op, target, {"x": x}, axes=(x.ndim - 1,), dtype=x.dtype):
            raise NotImplementedError(f"{op}_alone: {reason}")
        return {"axes": (x.ndim - 1,), "dtype": x.dtype, "target": target}

    def forward(x):
        if op == "softmax":
            y = softmax(x, None, None, **params(x))
            return y, (y,)
        run = log_softmax if op == "log_softmax" else logsumexp
        out, m, d = run(x, None, None, return_state=True, **params(x))
        return out, (x, m, d)

    def backward(saved, t):
        if op == "softmax":
            (y,) = saved
            return (softmax_jacobian(y, t, None, **params(y)),)
        x, m, d = saved
        run = log_softmax_vjp if op == "log_softmax" else logsumexp_vjp
        return (run(x, m, d, t, None, None, scale_tangent=False, **params(x)),)

    alone = jax.custom_vjp(lambda x: forward(x)[0])
    alone.defvjp(forward, backward)
    return alone


softmax_alone, log_softmax_alone, logsumexp_alone = map(_alone, ("softmax", "log_softmax", "logsumexp"))


# What they have in common.


def _run(kernel, body, axes, target, x, where, scale, given=None, devices=(), **results):
    """Runs a kernel on scores, on what else is given, and on a mask and a scale, each of which may be None."""
    operands = {"x": Whole(x, -jnp.inf, jnp.float32), **(given or {})}
    operands["inside"] = None if scale is None else Inside()
    operands["where"] = None if where is None else Mask(where)
    operands["scale"] = None if scale is None else _factor(scale)
    types = {"x": x, "t": given["t"].array if given and "t" in given else None, "where": where, "scale": scale}
    problem = problem_of(kernel.removesuffix("_forward"), types, axes, [*results.get("whole", ()), jnp.float32][0])
    config = _config(target, kernel, problem, devices)
    return rows.run(f"{kernel}_mosaic", body, operands, problem, config, devices=devices, **results)


def _config(target, kernel, problem, devices):
    return (_of_devices if devices else config_of)(target, kernel, problem)


def _factor(scale):
    return Scalar(scale) if scale.size == 1 else PerRow(scale.astype(jnp.float32))


def _directed(tile, x, inside, where, scale):
    """`x` in the direction in which the scores grow, `-inf` where it is masked, and the size of `scale`."""
    if scale is None:
        return apply_mask(where, x, -jnp.inf), None
    sign = tile.along(jnp.sign(scale))
    directed = apply_mask(inside, each(lambda x: x * sign, x), -jnp.inf)  # beyond the end x is -inf
    return apply_mask(where, directed, -jnp.inf), jnp.abs(scale)


def weights_of_state(tile, x, m, d, inside, where, scale, factor=1):
    """The softmax weights times a factor for each row, from the saved state."""
    if where is not None:
        d = jnp.where(d != 0, d, 1)  # a row with nothing to see
    scores, size = _directed(tile, x, inside, where, scale)
    weights, alike = tile.weights(m, size)
    factor = tile.along(alike * factor / d)
    return each(lambda s: weights(s) * factor, scores)


def _tangents(t, where, scale):
    return each(lambda t: _times(t, scale), apply_mask(where, t, 0))


def apply_mask(where, values, otherwise):
    """`values` where `where` is true, or everywhere if it is None, and `otherwise` elsewhere: functions of a step."""
    return values if where is None else each(lambda seen, values: select(seen, values, otherwise), where, values)


def select(seen, values, otherwise):
    return jnp.where(seen, values, jnp.full_like(values, otherwise))


def _times(values, scale):
    """`values * scale`, where `scale` is None, a number or one for each row."""
    if scale is None or scale.shape == values.shape:
        return values if scale is None else values * scale
    return values * lax.broadcast_in_dim(scale, values.shape, (0,) if scale.ndim else ())
