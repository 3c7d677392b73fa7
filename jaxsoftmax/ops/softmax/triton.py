"""The softmax family for NVIDIA GPUs since Ampere, in Triton; `_triton/rows.py` has the kernel, and says how it works.

It has run on no GPU yet: it is compiled for each generation, and what it computes is tested in Triton's interpreter.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxsoftmax._triton import call

DTYPES = ("float32", "bfloat16", "float16")


# What is served.


def unsupported(primitive, target, operands, *, axes, dtype, **params) -> str | None:
    """Why it cannot run, in words, or None."""
    del params
    if (reason := call.unsupported(target)) is not None:
        return reason
    x = operands["x"] if "x" in operands else operands["y"]
    for name in [a.dtype.name for a in operands.values() if a is not None and a.dtype != bool] + [jnp.dtype(dtype).name]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    along = [axis for axis in axes if x.shape[axis] != 1]
    if any(axis not in axes and x.shape[axis] != 1 for axis in range(min(along, default=0), max(along, default=0))):
        return f"the axes must be neighbours, got axes {axes} of shape {x.shape}"
    outer, cols, inner = _three_axes(x.shape, axes)
    if not 1 <= cols < 2**30:
        return f"a row must have from 1 to {2**30 - 1} entries, got {cols}"
    if not 1 <= outer * inner < 2**31 - 2**16:
        return f"there must be from 1 to {2**31 - 2**16 - 1} rows, got {outer * inner}"
    scale = operands.get("scale")
    if scale is not None and any(scale.shape[axis] != 1 for axis in axes):
        return f"scale must be one number for each row, got shape {scale.shape} for axes {axes}"
    return None


unprofitable = call.unprofitable


# How rows are spread over programs.


@dataclass(frozen=True)
class Config:
    """What a program has, and how many threads it is.

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


# By how many arrays are held in registers, elements of a tile: of several rows, where they are short; of one row, at most; and
# of a loop over a row, or of rows side by side.
_SEVERAL = {1: 2048, 2: 1024}
_WHOLE = {1: 16384, 2: 16384}
_LOOP = {1: 4096, 2: 4096}
_SLICES = {"along": 128, "across": 16}  # at most, so that one program can merge their states
_SLICE = 32768  # elements, at least
_WIDE = 2**31 - 2**16  # elements, from which on offsets need 64 bits: those of the last tile may be beyond the array


def config_for(primitive: str, cols: int, inner: int, itemsize: int) -> Config:
    """The configuration for rows of `cols` elements, with `inner` rows side by side; `itemsize` is that of the scores.

    The number of rows does not matter, so the bits of a row do not depend on it.
    """
    arrays = 2 if _REDUCES.get(primitive) == "sum" else 1
    width = _power(cols)
    if inner == 1:  # rows follow each other
        rows, most = max(1, _SEVERAL[arrays] // width), _WHOLE[arrays]
    else:  # rows lie side by side: a tile is as wide as a line of the cache
        rows, most = min(_power(inner), 128 // itemsize), _LOOP[arrays]
        if inner < 16:  # and few: those of several outer indices are together
            rows = max(rows, _SEVERAL[arrays] // width)
    if rows * width <= most:
        return Config(rows, width, _warps(rows * width), width)
    block = _LOOP[arrays] // rows
    slices = _SLICES["along" if inner == 1 else "across"]
    tiles = max(_SLICE // rows // block, math.ceil(cols / (slices * block)))
    return Config(rows, block, 8, tiles * block)


def _warps(elements: int) -> int:
    """How many warps have a tile: 32 elements for each thread, fewer of small tiles, which wait for memory less.

    There are no more threads than elements: two that have the same one might read it after one of them replaced it. A loop has
    16: with 32, and rows that do not start with a vector, ptxas used 128 registers and more.
    """
    return min(16, max(elements // 1024, min(4, max(1, elements // 32))))


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


# What a result needs of its whole row: the state of the scores, unless it is said here.
_REDUCES = dict.fromkeys(("softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp", "logsumexp_jvp"), "sum")
_REDUCES |= dict.fromkeys(("logsumexp_vjp", "cross_entropy_vjp"), "nothing")
_OF_ROWS = ("logsumexp", "logsumexp_jvp", "cross_entropy")  # whose results are numbers of rows
_RESULTS_WITH_TOTAL = {"cross_entropy": 3, "cross_entropy_gradient": 4}
_OPERANDS = ("t", "m", "d", "where", "scale", "a", "b", "c", "labels")


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

    Where rows are long and too few for the GPU it runs twice, with a program for each slice of a row.

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

    outer, cols, inner = _three_axes(x.shape, axes)
    config = config_for(primitive, cols, inner, x.dtype.itemsize)
    slices = -(-cols // config.slice)
    total = len(results) == _RESULTS_WITH_TOTAL.get(primitive)
    constants: dict[str, Any] = {
        "MAP": primitive,
        "REDUCES": _REDUCES.get(primitive, "state"),
        "OUTER": outer,
        "COLS": cols,
        "INNER": inner,
        "WHERE": None if where is None else tuple(indexed(where.shape, x.shape, axes)),
        "SCALE": None if scale is None else tuple(indexed(scale.shape, x.shape, axes)[::2]),
        "RESCALES": bool(rescales and scale is not None),
        "CAP": cap,
        "TOTAL": total,
        "SMOOTHING": smoothing,
        "Z_LOSS": z_loss,
        "BLOCK_ROWS": config.rows,
        "BLOCK_COLS": config.cols,
        "SLICE": config.slice,
        "SLICES": _power(slices),
        "WIDE": x.size >= _WIDE,
    }
    blocks = -(-outer * inner // config.rows) if inner < 16 else outer * -(-inner // config.rows)
    unused = given.get("labels", x)  # of what may be replaced there is one use
    given |= {name: operand for name, operand in (("where", where), ("scale", scale)) if operand is not None}
    operands = [x, *(given.get(name, unused) for name in _OPERANDS)]

    def step(name, programs, states, results, replaces=False):
        own: dict[str, Any] = {"STEP": name, "PROGRAMS": programs}
        own |= dict.fromkeys(("out_m", "out_d", "out_total")[len(results) - 1 :])
        options = {"programs": blocks * programs, "warps": config.warps, "target": target, "replaces": replaces}
        states = [*states, *[unused] * (3 - len(states))]
        return call.call(rows.rows, [*operands, *states], results, **options, **(constants | own))

    is_split = slices > 1 and blocks < 2 * target.multiprocessors
    shared = slices if is_split and primitive not in _OF_ROWS else 1
    if not is_split or constants["REDUCES"] == "nothing":
        return step("all", shared, [], results, replaces)
    states = [jax.ShapeDtypeStruct((outer * inner, slices), jnp.float32)] * (3 if total else 2)
    return step("finish", shared, step("states", slices, [], states), results, replaces)


def _three_axes(shape, axes) -> tuple[int, int, int]:
    """The sizes of an array seen as `[outer, cols, inner]`, whose rows are along `axes`."""
    along = [axis for axis in axes if shape[axis] != 1] or [len(shape) - 1]
    cols = math.prod(shape[axis] for axis in axes)
    inner = math.prod(shape[max(along) + 1 :])
    return math.prod(shape) // max(1, cols * inner), cols, inner


def indexed(shape, whole, axes) -> list[tuple[int, ...]]:
    """How an array of size 1 along some axes is indexed along each of the three axes of a whole one: see `call.indexed`."""
    along = [axis for axis in axes if whole[axis] != 1]
    first, last = (min(along), max(along)) if along else (len(whole), len(whole) - 1)
    three = range(first), range(first, last + 1), range(last + 1, len(whole))
    return [call.indexed(shape, whole, members) for members in three]
