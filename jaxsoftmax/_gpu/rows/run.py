"""Makes a kernel over the rows of arrays on Hopper from a body: a function of a `Tile` and of operands by name."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.rows.layout import Config, RowLayout
from jaxsoftmax._gpu.rows.memory import Memory, row_of_mask
from jaxsoftmax._gpu.rows.tile import Either, Tile


@dataclass(frozen=True)
class Whole:
    """An operand as large as the rows: a body gets a function of a step, with `fill` beyond the end of a row.

    A body gets this operand, and those for each row, in `dtype`, converted when it asks; None for that of the array.
    """

    array: jax.Array
    fill: float = 0
    dtype: Any = None


@dataclass(frozen=True)
class Mask:
    """A bool operand that broadcasts with the rows, whole along them or of size 1: a body gets a function of a step."""

    array: jax.Array


@dataclass(frozen=True)
class PerRow:
    """An operand of size 1 along the rows, which broadcasts with them: a body gets a value for each row of the block."""

    array: jax.Array
    dtype: Any = None


@dataclass(frozen=True)
class Scalar:
    """An operand of size 1."""

    array: jax.Array


@dataclass(frozen=True)
class Inside:
    """Whether elements are of a row: a body gets a function of a step, None if all are. It is no array."""


Operand = Whole | Mask | PerRow | Scalar | Inside


def run(
    name: str,
    body: Callable[..., list[Any]],
    operands: Mapping[str, Operand | None],
    axes: Sequence[int],
    config: Callable[[int, int, bool, bool], Config],
    *,
    whole: Sequence[Any] = (),
    per_row: Sequence[Any] = (),
) -> list[jax.Array]:
    """Runs a kernel on the rows of arrays.

    Args:
      name: of the kernel.
      body: gets a `Tile`, and the operands by name, None for None. It gives the results, the whole ones, which
        are functions of a step, or an `Either`, before those of rows.
      operands: what they are; one at least is whole. They are loaded in this order.
      axes: the axes of a row, the last ones that have not size 1.
      config: the configuration for a number of columns, the bytes of the widest element, whether there is a mask along the
        columns, and whether it has fewer rows.
      whole: dtypes of the results that are as large as the rows.
      per_row: dtypes of the results that have size 1 along `axes`.
    """
    given = {key: operand for key, operand in operands.items() if operand is not None}
    held = {key: operand.array for key, operand in given.items() if isinstance(operand, Whole)}
    others = [key for key, operand in given.items() if isinstance(operand, Mask)]  # as arguments, the largest come first
    others += [key for key, operand in given.items() if isinstance(operand, (PerRow, Scalar))]
    shape = next(iter(held.values())).shape
    row_shape = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    cols = math.prod(shape[axis] for axis in axes)
    count = math.prod(shape) // cols
    dtypes, row_dtypes = ([jnp.dtype(dtype) for dtype in kinds] for kinds in (whole, per_row))

    masks = [mask.array.shape for mask in given.values() if isinstance(mask, Mask) and not _is_per_row(mask, axes)]
    widest = max(dtype.itemsize for dtype in [*(array.dtype for array in held.values()), *dtypes])
    layout = RowLayout(cols, config(cols, widest, bool(masks), any(mask != shape for mask in masks)))
    exact = layout.is_full and count % layout.rows == 0
    view = (count * layout.entries, *layout.shape) if exact and layout.whole_block else (count, cols)

    def flat(operand):
        """An operand that is not whole, as the kernel has it."""
        array = operand.array
        if isinstance(operand, Scalar):
            return array.reshape(1)
        if isinstance(operand, PerRow):
            return jnp.broadcast_to(array, row_shape).reshape(count)
        if _is_per_row(operand, axes):
            return jnp.broadcast_to(array, row_shape).reshape(count).astype(jnp.float32)
        return array.reshape(-1, cols)

    def kernel(*refs):
        *refs, slots, barriers, exchange = refs
        refs, out_refs = dict(zip([*held, *others], refs, strict=False)), refs[len(held) + len(others) :]
        memory = Memory(layout, lax.axis_index("block") * jnp.int32(layout.rows), count, exact)
        tile = Tile(memory, exchange, list(barriers))
        if layout.blocks > 1:
            ptx.cluster_arrive()
        for key, slot, barrier in zip(held, slots, barriers, strict=False):
            memory.copy_in(refs[key], slot, barrier)
        slots = dict(zip(held, slots, strict=False))
        values = dict.fromkeys(operands)
        for key, operand in given.items():
            match operand:
                case Whole():
                    values[key] = memory.hold(refs[key], operand.fill, slots.get(key), operand.dtype or refs[key].dtype)
                case PerRow():
                    values[key] = memory.load_row(refs[key]).astype(operand.dtype or refs[key].dtype)
                case Scalar():
                    values[key] = refs[key][0]
                case Inside():
                    values[key] = memory.inside()
                case Mask() if refs[key].ndim == 1:
                    seen = tile.along(memory.load_row(refs[key])) != 0
                    values[key] = lambda _, seen=seen: seen
                case Mask(array):
                    source_row = None if array.shape == shape else row_of_mask(shape, array.shape, axes)
                    values[key] = memory.load_mask(refs[key], source_row)
        results = body(tile, **values)

        stored = list(zip(out_refs, results[: len(dtypes)], strict=False))
        if plain := [(ref, result) for ref, result in stored if not isinstance(result, Either)]:
            tile.store(plain)
        for ref, result in stored:
            if isinstance(result, Either):
                pl.when(result.condition)(functools.partial(tile.store, [(ref, result.then)]))
                pl.when(~result.condition)(functools.partial(tile.store, [(ref, result.otherwise)]))
        for ref, result in zip(out_refs[len(dtypes) :], results[len(dtypes) :], strict=True):
            memory.store_row(ref, result.astype(ref.dtype))

    parked = held.values() if layout.config.parked else ()
    slots = [plgpu.SMEM((layout.steps * layout.warpgroups, *layout.shape), array.dtype) for array in parked]
    barriers = [plgpu.Barrier(num_barriers=layout.steps) for _ in slots if layout.config.unroll]
    exchange = plgpu.SMEM((2, layout.warps), jnp.float32) if layout.whole_block else None
    options: dict[str, Any] = {}
    if layout.warpgroups > 1:
        options |= {"num_threads": layout.warpgroups, "thread_name": "warpgroup"}
    if layout.blocks > 1:
        options |= {"cluster": (layout.blocks,), "cluster_names": ("rank",)}
    results = plgpu.kernel(
        kernel,
        out_type=[jax.ShapeDtypeStruct(view, dtype) for dtype in dtypes]
        + [jax.ShapeDtypeStruct((count,), dtype) for dtype in row_dtypes],
        grid=(pl.cdiv(count, layout.rows),),
        grid_names=("block",),
        scratch_types=(slots, barriers, exchange),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=name,
        **options,
    )(*(array.reshape(view) for array in held.values()), *(flat(given[key]) for key in others))
    shapes = [shape] * len(dtypes) + [row_shape] * len(row_dtypes)
    return [result.reshape(shape) for result, shape in zip(results, shapes, strict=True)]


def _is_per_row(mask: Mask, axes: Sequence[int]) -> bool:
    return math.prod(mask.array.shape[axis] for axis in axes) == 1
