"""The softmax family for NVIDIA GPUs since Ampere, in Triton; `_triton/rows.py` has the kernel, and says how it works.

It was run on an H200. For other generations it is compiled, and what it computes is tested in Triton's interpreter.
"""

import math
import types
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._core.row_problem import RowProblem, is_along
from jaxsoftmax._triton import call

DTYPES = ("float32", "bfloat16", "float16")


# What is served.


def unsupported(primitive, target, operands, *, axes, dtype, **params) -> str | None:
    """Says why it cannot run, or gives None."""
    del params
    if (reason := call.unsupported(target)) is not None:
        return reason
    x = operands["x"] if "x" in operands else operands["y"]
    for name in [a.dtype.name for a in operands.values() if a is not None and a.dtype != bool] + [jnp.dtype(dtype).name]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    if (reason := RowProblem(x.shape, tuple(axes)).unsupported(2**31 - 2**16 - 1)) is not None:
        return reason
    scale = operands.get("scale")
    if is_along(scale, axes):
        return f"scale must be one number for each row, got shape {scale.shape} for axes {axes}"
    return None


def unprofitable(primitive, target, operands, fused, cast, *, axes, dtype, **params) -> str | None:
    """Says why the reference should be faster although the kernel could run, or gives None."""
    # Its reasons hold here too: XLA fuses other operations, and is faster at short rows side by side.
    from jaxsoftmax.ops.softmax import mosaic_sm90 as mosaic

    if (reason := call.not_preferred(target)) is not None:
        return reason
    whole = [operands[name] for name in ("x", "y", "t") if operands.get(name) is not None and primitive != "logsumexp_vjp"]
    rows = RowProblem(
        (operands.get("x") or operands["y"]).shape,
        tuple(axes),
        read=tuple(a.dtype.itemsize for a in whole) or (operands["x"].dtype.itemsize,),
        written=() if primitive in _OF_ROWS or primitive.startswith("cross") else (jnp.dtype(dtype).itemsize,),
        reduces="state" if primitive in ("softmax", "log_softmax", "logsumexp") else "sum",
        exponentiates_twice=primitive == "log_softmax",
    )
    problem = types.SimpleNamespace(
        operation=types.SimpleNamespace(name=primitive), params={"dtype": dtype}, fused=fused, is_cast=bool(cast)
    )
    return mosaic.slower_rows(problem, rows)


remark = call.remark


# How rows are spread over programs.

# What a result needs of its whole row: the state of the scores, unless it is said here.
_REDUCES = dict.fromkeys(("softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp", "logsumexp_jvp"), "sum")
_REDUCES |= dict.fromkeys(("logsumexp_vjp", "cross_entropy_vjp"), "nothing")
_OF_ROWS = ("logsumexp", "logsumexp_jvp", "cross_entropy")  # whose results are numbers of rows


@dataclass(frozen=True)
class Config:
    """The tile of a program, and its threads.

    Attributes:
      rows: of a tile, a power of two.
      cols: columns of a tile, a power of two.
      warps: of 32 threads.
      slice: columns of a slice of rows that are longer than a tile, a multiple of `cols`.
    """

    rows: int
    cols: int
    warps: int
    slice: int


# Elements of a tile in registers, of several short rows; and of one row, at most, by how many arrays it has, or the primitive,
# and the bytes of an element. ptxas holds 16 bits as 32: of longer rows a multiprocessor would have one program, which waits
# for memory.
_SEVERAL = {1: 2048, 2: 1024}
_NARROW = 1024  # columns of the longest rows that one warp has as a whole
_WHOLE: dict[tuple[Any, int], int] = {(1, 4): 32768, (1, 2): 16384, (2, 4): 16384, (2, 2): 32768}
_WHOLE |= {("log_softmax_jvp", 4): 32768, ("log_softmax_vjp", 2): 8192}

# Columns of rows that two tiles hold, at most, and the warps of a tile: the larger it is, the fewer rows are under way, and the
# more of them is still in the cache when it is read again.
_TWICE, _WARPS_OF_TWO = 32768, {"state": 16, "sum": 32}

# Elements of a tile, its warps, and tiles of a slice, of longer rows.
_LONG = {"state": (8192, 8, 1), "sum": (8192, 8, 1), "nothing": (4096, 4, 1), "rows": (4096, 4, 4)}

# Rows that are not along the last axis: how many a tile has, its elements at most, and those and its warps for longer rows.
_SIDE_BY_SIDE, _WHOLE_SIDE_BY_SIDE, _LONG_SIDE_BY_SIDE = 32, 16384, (8192, 8)

_SLICES = {"along": 512, "across": 64}  # at most, so that each program can merge their states
_WIDE = 2**31 - 2**16  # elements, from which on offsets in a mask need 64 bits: those of the last tile may be beyond it


def config_for(primitive: str, cols: int, inner: int, itemsize: int, masked: bool) -> Config:
    """The configuration for rows of `cols` elements, with `inner` rows side by side; `itemsize` is that of the scores.

    The number of rows does not matter, so the bits of a row do not depend on it. Sizes are those that were fast on an H200,
    except those of narrow rows of 16 bits with a mask.
    """
    reduces = _REDUCES.get(primitive, "state")
    arrays = 2 if reduces == "sum" else 1
    width = _power(cols)
    if inner > 1:
        return _side_by_side(cols, width, inner, arrays, itemsize)
    if width <= _NARROW and (cols * itemsize % 16 or primitive in _OF_ROWS):  # no warp waits for another
        # With a mask, 64 elements of 16 bits a thread spill up to 2800 bytes in Triton 3.9, and 32 spill none; not timed.
        elements = 1024 if arrays == 2 or masked else 4096 // itemsize
        return Config(max(1, elements // width), width, 1, width)
    rows = max(1, _SEVERAL[arrays] // width)
    if rows * width <= _WHOLE.get((primitive, itemsize), _WHOLE[arrays, itemsize]):
        return Config(rows, width, _warps(rows * width, arrays, itemsize), width)
    kind = "rows" if primitive in _OF_ROWS else reduces
    if kind in _WARPS_OF_TWO and cols <= _TWICE:
        return Config(1, width // 2, _WARPS_OF_TWO[kind], width)
    block, warps, tiles = _LONG[kind]
    return Config(1, block, warps, block * max(tiles, math.ceil(cols / (_SLICES["along"] * block))))


def _side_by_side(cols, width, inner, arrays, itemsize) -> Config:
    """Likewise of rows that are not along the last axis: 32 of them are a line of the cache, or half of one."""
    rows = min(_power(inner), _SIDE_BY_SIDE)
    if inner < 16:  # those of several outer indices are together
        rows = max(rows, _SEVERAL[arrays] // width)
    elif rows * width > _WHOLE_SIDE_BY_SIDE:
        rows //= 2
    if rows * width <= _WHOLE_SIDE_BY_SIDE:
        return Config(rows, width, _warps(rows * width, arrays, itemsize), width)
    elements, warps = _LONG_SIDE_BY_SIDE
    rows = min(_power(inner), _SIDE_BY_SIDE)
    block = max(1, elements // rows)
    return Config(rows, block, warps, block * math.ceil(cols / (_SLICES["across"] * block)))


def _warps(elements: int, arrays: int, itemsize: int) -> int:
    """The warps of a tile: 32 elements for each thread, fewer of small tiles, which wait for memory less.

    There are no more threads than elements: two that have the same one might read it after one of them replaced it. Long rows
    of one array of 16 bits have twice as many for each thread, as fewer threads wait for each other.
    """
    share = 2048 if elements >= 16384 and arrays == 1 and itemsize == 2 else 1024
    return max(elements // share, min(4, max(1, elements // 32)))


def _power(least: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(0, least - 1).bit_length()


# The primitives.


def softmax(x, where, scale, *, axes, dtype, target):
    """`exp(s - m) / d`."""
    return run("softmax", axes, target, [jax.ShapeDtypeStruct(x.shape, dtype)], x, where=where, scale=scale)[0]


def log_softmax(x, where, scale, *, axes, dtype, return_state, target):
    """`(s - m) - log d`, and the state `(m, d)` if asked for."""
    results = [jax.ShapeDtypeStruct(x.shape, dtype), *_state(x, axes, return_state)]
    return run("log_softmax", axes, target, results, x, where=where, scale=scale)


def logsumexp(x, where, scale, *, axes, dtype, return_state, target):
    """`m + log d`, and the state `(m, d)` if asked for."""
    results = [of_rows(x, axes, dtype), *_state(x, axes, return_state)]
    return run("logsumexp", axes, target, results, x, where=where, scale=scale)


def softmax_jacobian(y, t, scale, *, axes, dtype, target):
    """`scale * y * (t - sum(y * t))`."""
    results = [jax.ShapeDtypeStruct(y.shape, dtype)]
    return run("softmax_jacobian", axes, target, results, y, t=t, scale=scale, rescales=True)[0]


def log_softmax_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target):
    """`t - sum(p * t)`."""
    given = {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale, "rescales": scale_tangent}
    return run("log_softmax_jvp", axes, target, [jax.ShapeDtypeStruct(x.shape, dtype)], **given)[0]


def log_softmax_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target):
    """`t - p * sum(t)`, of the cotangent `t`."""
    given = {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale, "rescales": scale_tangent}
    return run("log_softmax_vjp", axes, target, [jax.ShapeDtypeStruct(x.shape, dtype)], **given)[0]


def logsumexp_jvp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target):
    """`sum(p * t)`."""
    given = {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale, "rescales": scale_tangent}
    return run("logsumexp_jvp", axes, target, [of_rows(x, axes, dtype)], **given)[0]


def logsumexp_vjp(x, m, d, t, where, scale, *, axes, dtype, scale_tangent, target):
    """`p * t`, of the cotangent `t`, one for each row."""
    given = {"x": x, "m": m, "d": d, "t": t, "where": where, "scale": scale, "rescales": scale_tangent}
    return run("logsumexp_vjp", axes, target, [jax.ShapeDtypeStruct(x.shape, dtype)], **given)[0]


# What they have in common.


def of_rows(x, axes, dtype):
    """The type of one number for each row."""
    return jax.ShapeDtypeStruct(tuple([1 if axis in axes else size for axis, size in enumerate(x.shape)]), dtype)


def _state(x, axes, is_wanted):
    return [of_rows(x, axes, jnp.float32)] * 2 if is_wanted else []


_RESULTS_WITH_TOTAL = {"cross_entropy": 3, "cross_entropy_gradient": 4}
_OPERANDS = ("t", "m", "d", "where", "scale", "a", "b", "c", "labels")


@dataclass(frozen=True)
class Call:
    """The static parameters of a call of the kernel.

    Attributes:
      map: the name of the primitive.
      reduces: what of a row is needed for the result: the "state" of its scores, the "sum" that a derivative has, or "nothing".
      step: "all"; or, in two runs, "states" and "finish".
      outer, cols, inner: the sizes of the three axes.
      where: None, or for each of the three axes where the mask has what belongs to an index, as `problem.indexed` says.
      scale: None, or the same for the scale, of the first and the last axis.
      rescales: whether tangents are multiplied with the scale.
      cap: None, or the bound of `cap * tanh(x / cap)`.
      total: whether the sum of the scores is wanted.
      smoothing, z_loss: of the losses, for `cross_entropy_gradient`.
      block_rows, block_cols: those of a tile.
      slice: columns of a slice, a multiple of `block_cols`, where rows are longer than a tile. There are `count` in a row.
      slices: a power of two that is no less than `count`.
      programs: how many programs share the rows of a tile: 1, or as many as there are slices.
      wide: whether offsets in the mask need 64 bits.
    """

    map: str
    reduces: str
    step: str
    outer: int
    cols: int
    inner: int
    where: Any
    scale: Any
    rescales: bool
    cap: float | None
    total: bool
    smoothing: float
    z_loss: float
    block_rows: int
    block_cols: int
    slice: int
    count: int
    slices: int
    programs: int
    wide: bool


def run(
    primitive,
    axes,
    target,
    results,
    x,
    *,
    where=None,
    scale=None,
    rescales=False,
    cap=None,
    smoothing=0.0,
    z_loss=0.0,
    replaces=False,
    **given,
):
    """The results of the kernel for a primitive of this op or of cross-entropy.

    Where rows are long it runs twice, with a program for each slice of a row.

    Args:
      primitive: its name.
      axes: neighbours.
      target: the GPU.
      results: their types. Those of cross-entropy may end with the sum of the scores.
      x: the scores, or softmax.
      where: the mask.
      scale: of the scores.
      rescales: whether tangents are multiplied with the scale.
      cap: None, or the bound of the scores.
      smoothing: of labels.
      z_loss: the factor.
      replaces: whether the first result takes the place of `x`.
      **given: the other operands that are there, by name, among `_OPERANDS`.
    """
    from jaxsoftmax._triton import rows

    problem = RowProblem(x.shape, tuple(axes))
    outer, cols, inner = problem.outer, problem.cols, problem.inner
    config = config_for(primitive, cols, inner, x.dtype.itemsize, where is not None)
    count = -(-cols // config.slice)
    static = Call(
        map=primitive,
        reduces=_REDUCES.get(primitive, "state"),
        step="all",
        outer=outer,
        cols=cols,
        inner=inner,
        where=None if where is None else problem.indexed(where.shape),
        scale=None if scale is None else problem.indexed(scale.shape)[::2],
        rescales=bool(rescales and scale is not None),
        cap=cap,
        total=len(results) == _RESULTS_WITH_TOTAL.get(primitive),
        smoothing=smoothing,
        z_loss=z_loss,
        block_rows=config.rows,
        block_cols=config.cols,
        slice=config.slice,
        count=count,
        slices=_power(count),
        programs=1,
        wide=x.size >= _WIDE,
    )
    blocks = -(-outer * inner // config.rows) if inner < 16 else outer * -(-inner // config.rows)
    unused = given.get("labels", x)  # of what may be replaced there is one use
    given |= {name: operand for name, operand in (("where", where), ("scale", scale)) if operand is not None}
    operands = [x, *(given.get(name, unused) for name in _OPERANDS)]

    def step(name, programs, states, results, replaces=False):
        absent: dict[str, Any] = dict.fromkeys(("out_m", "out_d", "out_total")[len(results) - 1 :])
        options = {"programs": blocks * programs, "warps": config.warps, "target": target, "fuses": False, "replaces": replaces}
        states = [*states, *[unused] * (3 - len(states))]
        own = replace(static, step=name, programs=programs)
        return call.call(rows.rows, [*operands, *states], results, **options, CALL=own, **absent)

    if count == 1 or static.reduces == "nothing":
        return step("all", count, [], results, replaces)
    states = [jax.ShapeDtypeStruct((outer * inner, count), jnp.float32)] * (3 if static.total else 2)
    states = step("states", count, [], states)
    return step("finish", 1 if primitive in _OF_ROWS else count, states, results, replaces)
