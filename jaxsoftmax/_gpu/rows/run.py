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

from jaxsoftmax._core.row_problem import RowProblem, is_along
from jaxsoftmax._gpu import ptx
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax._gpu.rows import grid
from jaxsoftmax._gpu.rows.columns import ColumnLayout, ColumnMemory, Columns
from jaxsoftmax._gpu.rows.in_warp import Flat, FlatLayout, FlatMemory
from jaxsoftmax._gpu.rows.layout import Config, RowLayout
from jaxsoftmax._gpu.rows.memory import Memory
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
    problem: RowProblem,
    config: Config,
    *,
    whole: Sequence[Any] = (),
    per_row: Sequence[Any] = (),
    replaced: str | None = None,
    devices: tuple[tuple[str, int], ...] = (),
) -> list[jax.Array]:
    """Runs a kernel on the rows of arrays.

    Args:
      name: of the kernel.
      body: gets a `Tile`, and the operands by name, None for None. It gives the results, the whole ones, which
        are functions of a step, or an `Either`, before those of rows.
      operands: what they are; one at least is whole. They are loaded in this order.
      problem: the rows, and what the operands and results need of a kernel.
      config: how the rows are spread over threads.
      whole: dtypes of the results that are as large as the rows.
      per_row: dtypes of the results that have size 1 along `axes`.
      replaced: the operand in whose memory the whole result is written, which has its dtype, or None. XLA copies it before
        where something else may read it later.
      devices: the axes of the mesh, and their sizes, along which devices have parts of each row; the configuration is one of
        the grid then. None where rows are whole.
    """
    given = {key: operand for key, operand in operands.items() if operand is not None}
    held = {key: operand.array for key, operand in given.items() if isinstance(operand, Whole)}
    fills = {key: operand.fill for key, operand in given.items() if isinstance(operand, Whole)}
    others = [key for key, operand in given.items() if isinstance(operand, Mask)]  # as arguments, the largest come first
    others += [key for key, operand in given.items() if isinstance(operand, (PerRow, Scalar))]
    shape, axes, row_shape = problem.shape, problem.axes, problem.row_shape
    outer, cols, inner = problem.outer, problem.cols, problem.inner
    dtypes, row_dtypes = ([jnp.dtype(dtype) for dtype in kinds] for kinds in (whole, per_row))

    is_flat = inner == 1 and config.parked and config.threads <= ptx.WARP
    kinds: tuple[Any, Any] = (ColumnMemory, Columns) if inner > 1 else (FlatMemory, Flat) if is_flat else (Memory, Tile)
    along_last: Any = FlatLayout(cols, config, problem.widest) if is_flat else RowLayout(cols, config, bool(whole))
    layout: Any = ColumnLayout(cols, inner, config) if inner > 1 else along_last
    count = outer * layout.tiles if inner > 1 else outer  # of rows, or of tiles of them
    exact = layout.is_exact and count % layout.rows == 0
    view = (count * layout.entries, *layout.shape) if exact and layout.whole_block else (outer * cols, inner)
    if inner == 1 and not (exact and layout.whole_block):
        view = (count, cols)

    def flat(operand):
        """An operand that is not whole, as the kernel has it."""
        array = operand.array
        if isinstance(operand, Scalar):
            return array.reshape(1)
        if isinstance(operand, PerRow):
            return jnp.broadcast_to(array, row_shape).reshape(-1)
        if not is_along(array, axes):
            return jnp.broadcast_to(array, row_shape).reshape(-1).astype(jnp.float32)
        return array.reshape(-1, cols) if inner == 1 else array.reshape(view if array.shape == shape else -1)

    def values(tile, refs, slots):
        """The operands as a body gets them: those that are held from `slots`, if they are there."""
        memory, found = tile.memory, dict.fromkeys(operands)
        # What is copied to shared memory is waited for last.
        for key, operand in sorted(given.items(), key=lambda item: is_flat and isinstance(item[1], Whole)):
            match operand:
                case Whole():
                    found[key] = memory.hold(refs[key], operand.fill, slots.get(key), operand.dtype or refs[key].dtype)
                case PerRow():
                    found[key] = memory.load_row(refs[key]).astype(operand.dtype or refs[key].dtype)
                case Scalar():
                    found[key] = refs[key][0]
                case Inside():
                    found[key] = memory.inside()
                case Mask(array) if not is_along(array, axes):
                    seen = tile.along(memory.load_row(refs[key])) != 0
                    found[key] = lambda _, seen=seen: seen
                case Mask(array):
                    source = None if array.shape == shape else problem.indexed(array.shape)
                    found[key] = memory.load_mask(refs[key], source)
        return found

    def store(tile, out_refs, results):
        stored = list(zip(out_refs, results[: len(dtypes)], strict=False))
        if plain := [(ref, result) for ref, result in stored if not isinstance(result, Either)]:
            tile.store(plain)
        for ref, result in stored:
            if isinstance(result, Either):
                pl.when(result.condition)(functools.partial(tile.store, [(ref, result.then)]))
                pl.when(~result.condition)(functools.partial(tile.store, [(ref, result.otherwise)]))
        for ref, result in zip(out_refs[len(dtypes) :], results[len(dtypes) :], strict=True):
            tile.memory.store_row(ref, result.astype(ref.dtype))

    def copy(copying, refs, slots):
        copying([refs[key] for key in slots], list(slots.values()), [fills[key] for key in slots])

    def kernel(*refs):
        *refs, slots, exchange, pushed, order, told = refs
        refs, out_refs = dict(zip([*held, *others], refs, strict=False)), refs[len(arrays) :]
        out_refs[:0] = [refs[replaced]] if replaced else []
        slots, results_slots = dict(zip(held, slots, strict=False)), slots[len(held) :]
        if layout.config.grid:
            states = out_refs.pop() if inner > 1 else None
            shared_rows = grid.Tiles if inner > 1 else grid.Rows
            shared_rows(layout, count, states, exchange, order, told, grid.Devices(devices)).work(
                lambda memory: copy(memory.copy_in, refs, slots),
                lambda memory: copy(memory.fill_around, refs, slots),
                lambda tile: body(tile, **values(tile, refs, slots)),
                lambda tile, results: store(tile, out_refs, results),
            )
            return
        rank = lax.axis_index("rank") if layout.cluster > 1 else jnp.int32(0)
        memory = kinds[0](layout, lax.axis_index("block") * jnp.int32(layout.rows), count, exact, rank)
        tile = kinds[1](memory, exchange, pushed, order)
        if layout.cluster > 1:
            ptx.prepare_pushes(pushed)
        if slots:
            copy(memory.copy_in, refs, slots)
        if slots and not is_flat:
            ptx.await_copies()
            copy(memory.fill_around, refs, slots)
        landing = list(out_refs)
        if is_flat:
            landing[: len(dtypes)] = [slots[over]] if over else results_slots
        store(tile, landing, body(tile, **values(tile, refs, slots)))
        if is_flat and dtypes:
            memory.copy_out(landing[: len(dtypes)], out_refs[: len(dtypes)])
        if layout.cluster > 1 and next(tile.rounds) == 0:  # nothing was pushed, which waits
            ptx.cluster_wait()

    # A result goes through the slot of an operand of its dtype: each thread writes what it alone has read.
    over = next((key for key, array in held.items() if is_flat and dtypes == [array.dtype]), None)

    def launched(kernel, layout, results, blocks):
        parked = [array.dtype for array in held.values()] if layout.config.parked else []
        parked += dtypes if is_flat and not over else []
        steps = layout.stages * layout.steps * layout.warpgroups
        slots = [plgpu.SMEM((layout.slot_elements,) if is_flat else (steps, *layout.shape), dtype) for dtype in parked]
        exchange = plgpu.SMEM(layout.exchange_shape, jnp.float32) if layout.whole_block else None
        pushed = plgpu.SMEM((2, 2), jnp.int32) if layout.cluster > 1 else None
        order = plgpu.SMEM(layout.order_shape, jnp.float32) if layout.order_shape else None
        told = plgpu.SMEM((1,), jnp.int32) if layout.config.grid else None
        options: dict[str, Any] = {}
        if layout.warpgroups > 1:
            options |= {"num_threads": layout.warpgroups, "thread_name": "warpgroup"}
        if layout.cluster > 1:
            options |= {"cluster": (layout.cluster,), "cluster_names": ("rank",)}
        return kernel_of(
            kernel,
            out_type=results,
            grid=(blocks,),
            grid_names=("block",),
            scratch_types=(slots, exchange, pushed, order, told),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name=name,
            **options,
        )

    arrays = [*(array.reshape(view) for array in held.values()), *(flat(given[key]) for key in others)]
    outs = [jax.ShapeDtypeStruct(view, dtype) for dtype in dtypes if replaced is None]
    outs += [jax.ShapeDtypeStruct((outer * inner,), dtype) for dtype in row_dtypes]

    if layout.is_read_twice:
        # Masks are not joined as scores are, where threads join vectors of two steps.
        first_layout = grid.unheld(layout) if problem.masked else RowLayout(cols, config, stored=False)

        def computed(refs):
            refs = dict(zip([*held, *others], refs, strict=True))
            return lambda tile: body(tile, **values(tile, refs, {}))

        def first_pass(*refs):
            *refs, states, _, exchange, _, order, _ = refs
            grid.first_pass(first_layout, count, states, exchange, order, computed(refs))

        def second_pass(*refs):
            *refs, _, exchange, _, order, _ = refs
            states, out_refs = refs[len(arrays)], refs[len(arrays) + 1 :]
            out_refs[:0] = [refs[list(held).index(replaced)]] if replaced else []

            def stored(tile, results):
                store(tile, out_refs, results)

            grid.second_pass(layout, count, states, exchange, order, computed(refs[: len(arrays)]), stored)

        def call(*arrays):
            states = grid.states(layout, count)
            (found,) = launched(first_pass, first_layout, [states], count * layout.blocks)(*arrays)
            return launched(second_pass, layout, outs, count * layout.blocks)(*arrays, found)
    else:
        states = [grid.states(layout, count)] if config.grid and inner > 1 else []
        blocks = min(config.grid, count * layout.blocks) if config.grid else pl.cdiv(count, layout.rows)
        call = launched(kernel, layout, outs + states, blocks)
    narrowest = min((*problem.read, *problem.written))
    starts_anywhere = is_flat or layout.shifted
    if config.grid or (starts_anywhere and math.prod(shape) * narrowest % 16):
        call = jax.custom_batching.sequential_vmap(call)  # a batch would share tickets, or its arrays start inside a vector
    if replaced is None:
        results = call(*arrays)
    else:
        at = list(held).index(replaced)

        def in_place(refs):  # which has no way out for results but references
            results = call(*arrays[:at], refs[0], *arrays[at + 1 :])
            for ref, result in zip(refs[1:], results, strict=False):
                ref[...] = result

        # Not `jax.new_ref`, whose effect custom_partitioning refuses.
        results = pl.run_state(in_place)([arrays[at], *(lax.empty(out.shape, out.dtype) for out in outs)])
    shapes = [shape] * len(dtypes) + [row_shape] * len(row_dtypes)
    return [result.reshape(shape) for result, shape in zip(results, shapes, strict=False)]
