"""Rows on Triton: what the kernel in `rows.py` computes of a row, how rows are spread over programs, and the launch.

An op states its equation as a `RowFormula`. `plan_rows` adds the tiles of a program, by a table that was measured, and gives a
`TritonRowPlan`, whose `run` launches the kernel once, or twice for rows that several programs share.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._core.target import Target
from jaxsoftmax._triton import availability, custom_call

MOST_ROWS = 2**31 - 2**16 - 1  # indices of rows have 32 bits, and those of the last tile may be beyond the last row
_WIDE = 2**31 - 2**16  # elements from which on offsets in a mask need 64 bits, for the same reason


# What is computed.


@dataclass(frozen=True)
class RowFormula:
    """Says what the kernel computes of each row.

    A row of scores `s` has a state: the maximum `m`, and the sum `d` of `exp(s - m)`. Its weights are `p = exp(s - m) / d`.
    """

    name: str  # of the kernel, which profiles show
    result: Literal[
        "p", "log p", "m + log d", "m, d", "p * (t - sum)", "t - sum", "t - p * sum", "sum", "p * t", "a * p + b * onehot + c"
    ]
    # What the result needs of its whole row: the state of its scores, the sum of `summand`, or nothing.
    reduces: Literal["state", "sum", "nothing"] = "state"
    operand: Literal["x", "y"] = "x"  # the operand that is as large as the rows: scores, or weights
    summand: Literal["p * t", "t"] = "p * t"
    # Elements of `t` that count: those whose `p` is not 0, or those that the mask shows. None if `t` is no array of elements.
    tangent: Literal["weighted", "seen"] | None = None
    rescales: bool = False  # True if `t` is multiplied with the scale
    cap: float | None = None  # bound of scores `cap * tanh(x / cap)`
    has_total: bool = False  # True if the sum of the scores of each row is a result, too
    smoothing: float = 0.0  # label smoothing, for the gradient of a loss from its state
    z_loss: float = 0.0  # factor of the z-loss, likewise

    @property
    def is_of_rows(self) -> bool:
        """True if the result is one number for each row, or a state."""
        return self.result in ("m + log d", "m, d", "sum")


# How rows are spread over programs.


@dataclass(frozen=True)
class RowTiling:
    """The tile of a program, and its threads."""

    rows: int  # a power of two
    cols: int  # a power of two
    warps: int
    slice: int  # columns of a slice of rows that are longer than a tile, a multiple of `cols`


# Elements of a tile of several short rows, by the number of arrays that are read.
_SEVERAL = {1: 2048, 2: 1024}

_NARROW = 1024  # columns of the longest rows in tiles of one warp

# Elements of the longest rows that are one tile, by the number of arrays, or the result, and the bytes of an element. ptxas
# holds 16 bits as 32: of longer rows a multiprocessor would have one program, which waits for memory.
_WHOLE: dict[tuple[Any, int], int] = {(1, 4): 32768, (1, 2): 16384, (2, 4): 16384, (2, 2): 32768}
_WHOLE |= {("t - sum", 4): 32768, ("t - p * sum", 2): 8192}

# Columns of the longest rows that are two tiles of one program, and the warps of a tile: the larger a tile is, the fewer rows
# are under way, and the more of them is still in the cache when it is read again.
#
# One program for longer rows, too, where there are many, was tried. It is no faster from 131072 columns on, as the first slices
# of a row have left the cache when they are read again. At 49152 columns in float32 it reaches 0.72 of a copy, and two runs can
# reach 0.67. And for equal bits its sums of slices need an order of their own, which takes 70 us of 454 (128 x 2^20, float32).
_TWICE, _WARPS_OF_TWO = 32768, {"state": 16, "sum": 32}

# Elements of a tile of longer rows, its warps, and tiles of a slice.
_LONG = {"state": (8192, 8, 1), "sum": (8192, 8, 1), "nothing": (4096, 4, 1), "of rows": (4096, 4, 4)}

# Rows that are not along the last axis: rows of a tile, elements of the largest tile of whole rows, and elements and warps of a
# tile of longer rows.
_SIDE_BY_SIDE, _WHOLE_SIDE_BY_SIDE, _LONG_SIDE_BY_SIDE = 32, 16384, (8192, 8)

_SLICES = {"along": 512, "across": 64}  # most slices of a row, so that each program can merge their states


def tiling_for(formula: RowFormula, cols: int, inner: int, itemsize: int, is_masked: bool) -> RowTiling:
    """Returns the tiling of rows of `cols` elements, with `inner` rows side by side; `itemsize` is that of the scores.

    The number of rows does not matter, so the bits of a row do not depend on it. Sizes are those that were fast on an H200,
    except the ones for narrow rows of 16 bits with a mask.
    """
    arrays = 2 if formula.reduces == "sum" else 1
    width = power_of_two(cols)
    if inner > 1:
        return _tiling_side_by_side(cols, width, inner, arrays, itemsize)
    if width <= _NARROW and (cols * itemsize % 16 or formula.is_of_rows):
        # Rows that are no whole vectors have one warp for a tile, so that none waits for another: 127 columns in bfloat16 took
        # 326 us with four warps, and 172 with one. With a mask, 64 elements of 16 bits in each thread spill up to 2800 bytes in
        # Triton 3.9, and 32 spill none; not timed.
        elements = 1024 if arrays == 2 or is_masked else 4096 // itemsize
        return RowTiling(max(1, elements // width), width, 1, width)
    rows = max(1, _SEVERAL[arrays] // width)
    if rows * width <= _WHOLE.get((formula.result, itemsize), _WHOLE[arrays, itemsize]):
        return RowTiling(rows, width, _warps(rows * width, arrays, itemsize), width)
    kind = "of rows" if formula.is_of_rows else formula.reduces
    if kind in _WARPS_OF_TWO and cols <= _TWICE:
        return RowTiling(1, width // 2, _WARPS_OF_TWO[kind], width)
    block, warps, tiles = _LONG[kind]
    return RowTiling(1, block, warps, block * max(tiles, math.ceil(cols / (_SLICES["along"] * block))))


def _tiling_side_by_side(cols: int, width: int, inner: int, arrays: int, itemsize: int) -> RowTiling:
    """Returns the tiling of rows that are not along the last axis: 32 of them are a line of the cache, or half of one."""
    rows = min(power_of_two(inner), _SIDE_BY_SIDE)
    if inner < 16:  # rows of several outer indices share a tile
        rows = max(rows, _SEVERAL[arrays] // width)
    elif rows * width > _WHOLE_SIDE_BY_SIDE:
        rows //= 2
    if rows * width <= _WHOLE_SIDE_BY_SIDE:
        return RowTiling(rows, width, _warps(rows * width, arrays, itemsize), width)
    elements, warps = _LONG_SIDE_BY_SIDE
    rows = min(power_of_two(inner), _SIDE_BY_SIDE)
    block = max(1, elements // rows)
    return RowTiling(rows, block, warps, block * math.ceil(cols / (_SLICES["across"] * block)))


def _warps(elements: int, arrays: int, itemsize: int) -> int:
    """Returns the warps of a tile: 32 elements for each thread, fewer for small tiles, which wait for memory less.

    There are no more threads than elements: two threads that have the same element might read it after one of them replaced it.
    Long rows of one array of 16 bits have twice as many elements for each thread, as fewer threads wait for each other.
    """
    share = 2048 if elements >= 16384 and arrays == 1 and itemsize == 2 else 1024
    return max(elements // share, min(4, max(1, elements // 32)))


def power_of_two(least: int) -> int:
    """Returns the least power of two that is no less."""
    return 1 << max(0, least - 1).bit_length()


# The launch.


@dataclass(frozen=True)
class RowLaunch:
    """The constants of a launch of the kernel in `rows.py`."""

    formula: RowFormula
    tiling: RowTiling
    outer: int  # sizes of the three axes of the arrays
    cols: int
    inner: int
    where: tuple[tuple[int, ...], ...] | None  # places in the mask by each of the axes, see `RowProblem.indexed`
    scale: tuple[tuple[int, ...], ...] | None  # places in the scale by the first and the last axis
    is_wide: bool  # True if offsets in the mask need 64 bits
    step: Literal["all", "states", "finish"] = "all"  # "all"; or, in two runs, "states" and "finish"
    programs: int = 1  # number of programs that share the rows of a tile: 1, or `n_slices`

    @property
    def n_slices(self) -> int:
        """Number of slices of a row."""
        return -(-self.cols // self.tiling.slice)

    @property
    def n_slices_padded(self) -> int:
        """Length of an array of the slices of a row, a power of two."""
        return power_of_two(self.n_slices)

    @property
    def is_one_tile(self) -> bool:
        """True if a tile holds whole rows."""
        return self.tiling.cols >= self.cols

    @property
    def blocks(self) -> int:
        """Number of tiles of rows. Rows of several outer indices share a tile if fewer than 16 are side by side."""
        if self.inner < 16:
            return -(-self.outer * self.inner // self.tiling.rows)
        return self.outer * -(-self.inner // self.tiling.rows)


# The kernel's pointers after the first, in their order, except those to states and results.
_POINTERS = ("t", "m", "d", "where", "scale", "a", "b", "c", "labels")


@dataclass(frozen=True)
class TritonRowPlan:
    """Computes rows by one kernel, which runs twice for rows that several programs share."""

    launch: RowLaunch
    results: tuple[Any, ...]  # types of the results. A state, and the sum of the scores, come last
    target: Target
    replaces: bool = False  # True if the first result takes the place of the first operand

    @property
    def remark(self) -> str | None:
        return availability.remark(self.target)

    @property
    def runs_twice(self) -> bool:
        """True if a first run computes the states, or sums, of slices."""
        return self.launch.n_slices > 1 and self.launch.formula.reduces != "nothing"

    def describe(self) -> str:
        launch, tiling = self.launch, self.launch.tiling
        warps = f"{tiling.warps} warp{'s' * (tiling.warps > 1)}"
        if launch.is_one_tile:
            return f"tiles of {tiling.rows} x {tiling.cols}, {warps}"
        text = f"{tiling.rows} row{'s' * (tiling.rows > 1)} in tiles of {tiling.cols} columns, {warps}"
        if launch.n_slices == 1:
            return f"{text}, which are read twice"
        return f"{text}, {launch.n_slices} programs a row" + (", two runs" if self.runs_twice else "")

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        """Computes the results from operands by name."""
        launch, formula = self.launch, self.launch.formula
        arrays = {name: array for name, array in operands.items() if array is not None}
        x = arrays[formula.operand]
        # Absent operands are not read, and any array will do. An operand that is replaced must have no other use.
        absent = arrays.get("labels", x)
        pointers = [x, *(arrays.get(name, absent) for name in _POINTERS)]
        if not self.runs_twice:
            return self._launch("all", launch.n_slices, pointers, [absent] * 3, self.results, self.replaces)
        state = jax.ShapeDtypeStruct((launch.outer * launch.inner, launch.n_slices), jnp.float32)
        states = self._launch("states", launch.n_slices, pointers, [absent] * 3, [state] * (3 if formula.has_total else 2))
        states += [absent] * (3 - len(states))
        return self._launch(
            "finish", 1 if formula.is_of_rows else launch.n_slices, pointers, states, self.results, self.replaces
        )

    def _launch(self, step, programs, pointers, states, results: Sequence[Any], replaces=False) -> list[jax.Array]:
        from jaxsoftmax._triton import rows  # it imports Triton

        launch = replace(self.launch, step=step, programs=programs)
        absent: dict[str, Any] = dict.fromkeys(("out_m", "out_d", "out_total")[len(results) - 1 :])
        return custom_call.launch(
            rows.rows,
            [*pointers, *states],
            results,
            programs=launch.blocks * programs,
            warps=launch.tiling.warps,
            target=self.target,
            # The bits of a row would depend on its lane, if the compiler chose the product that is added before it is rounded.
            fuses=False,
            replaces=replaces,
            LAUNCH=launch,
            **absent,
        )


def plan_rows(
    formula: RowFormula,
    rows: RowProblem,
    operands: Mapping[str, Any],
    results: Sequence[Any],
    target: Target,
    replaces: bool = False,
) -> TritonRowPlan:
    """Plans rows from the types of the operands that are present, by name, and of the results."""
    x, where, scale = operands[formula.operand], operands.get("where"), operands.get("scale")
    launch = RowLaunch(
        replace(formula, rescales=formula.rescales and scale is not None),
        tiling_for(formula, rows.cols, rows.inner, x.dtype.itemsize, where is not None),
        rows.outer,
        rows.cols,
        rows.inner,
        where=None if where is None else rows.indexed(where.shape),
        scale=None if scale is None else rows.indexed(scale.shape)[::2],
        is_wide=math.prod(x.shape) >= _WIDE,
    )
    return TritonRowPlan(launch, tuple(results), target, replaces)
