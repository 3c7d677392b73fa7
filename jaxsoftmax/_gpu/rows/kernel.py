"""Kernels over rows: what they read, compute and return, however a plan distributes the rows over threads."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax._core.row_problem import RowProblem, is_along
from jaxsoftmax._gpu.kernel import kernel_of
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.tile import Either, Tile


@dataclass(frozen=True)
class Whole:
    """An operand as large as the rows. A body gets it as a function of a step."""

    array: jax.Array
    fill: float = 0  # beyond the end of a row
    dtype: Any = None  # in which the body gets it; None for the dtype of the array


@dataclass(frozen=True)
class Mask:
    """A bool operand that broadcasts with the rows, whole along them or of size 1. A body gets it as a function of a step."""

    array: jax.Array


@dataclass(frozen=True)
class PerRow:
    """An operand of size 1 along the rows, which broadcasts with them. A body gets a value for each row of the block."""

    array: jax.Array
    dtype: Any = None  # in which the body gets it; None for the dtype of the array


@dataclass(frozen=True)
class Scalar:
    """An operand of size 1."""

    array: jax.Array


@dataclass(frozen=True)
class Inside:
    """No array: a function of a step that tells which elements are of a row, or None for a step whose elements all are.

    A body gets None instead of the function if all elements are.
    """


RowOperand = Whole | Mask | PerRow | Scalar | Inside


class Scratch(NamedTuple):
    """Types of the shared memory of a block, and in a kernel the references to it."""

    slots: list[Any]  # one for each operand, and result, that is held in shared memory
    exchange: Any = None  # see `Tile`, also for the next two
    arrivals: Any = None
    order: Any = None
    answer: Any = None  # an int32 through which one thread tells the others what it read, or None


def scratch_of(plan: RowPlan | ColumnPlan, dtypes: Sequence[Any]) -> Scratch:
    """Returns the types of the shared memory of a block that holds operands of these dtypes."""
    order_shape = plan.order_shape
    return Scratch(
        [plgpu.SMEM(plan.slot_shape, dtype) for dtype in dtypes],
        plgpu.SMEM(plan.exchange_shape, jnp.float32),
        plgpu.SMEM((2, 2), jnp.int32) if plan.cluster > 1 else None,
        None if order_shape is None else plgpu.SMEM(order_shape, jnp.float32),
        plgpu.SMEM((1,), jnp.int32) if plan.persistent_blocks else None,
    )


@dataclass(frozen=True, eq=False)
class RowKernel:
    """A kernel over rows.

    The body is a function of a `Tile` and of operands by name, None for absent ones. It returns the results: those as large as
    the rows, each a function of a step or an `Either`, and then those with a value for each row.

    If an operand is `replaced`, the one whole result, of the same dtype, is written in its memory. XLA copies the operand if
    something else may read it later.
    """

    name: str  # of the kernel in the program
    body: Callable[..., list[Any]]
    operands: Mapping[str, RowOperand | None]  # in the order in which they are loaded; at least one is `Whole`
    problem: RowProblem
    whole: Sequence[Any] = ()  # dtypes of the results as large as the rows
    per_row: Sequence[Any] = ()  # dtypes of the results with a value for each row
    replaced: str | None = None
    devices: tuple[tuple[str, int], ...] = ()  # mesh axes, with sizes, whose devices share the rows: then the grid does, too

    @functools.cached_property
    def present(self) -> dict[str, RowOperand]:
        return {name: operand for name, operand in self.operands.items() if operand is not None}

    @functools.cached_property
    def whole_arrays(self) -> dict[str, jax.Array]:
        """Operands as large as the rows, by name."""
        return {name: operand.array for name, operand in self.present.items() if isinstance(operand, Whole)}

    @functools.cached_property
    def others(self) -> list[str]:
        """Names of the other operands with an array: the largest ones first, as arguments."""
        masks = [name for name, operand in self.present.items() if isinstance(operand, Mask)]
        return masks + [name for name, operand in self.present.items() if isinstance(operand, (PerRow, Scalar))]

    def fills(self, names: Sequence[str]) -> list[float]:
        """Lists the values beyond the ends of rows of these operands."""
        return [operand.fill for name in names if isinstance(operand := self.present[name], Whole)]

    # In the kernel.

    def split(self, refs: Sequence[Any]) -> tuple[dict[str, Any], list[Any], Scratch]:
        """Splits the references that a kernel gets into operands by name, results and scratch."""
        *refs, slots, exchange, arrivals, order, answer = refs
        scratch, names = Scratch(slots, exchange, arrivals, order, answer), [*self.whole_arrays, *self.others]
        operands, results = dict(zip(names, refs, strict=False)), refs[len(names) :]
        if self.replaced is not None:
            results.insert(0, operands[self.replaced])
        return operands, results, scratch

    def load(self, tile: Tile, refs, slots, rows_last: bool = False) -> dict[str, Any]:
        """Loads the operands as the body gets them, those that are held in shared memory from `slots`."""
        memory, values = tile.memory, dict.fromkeys(self.operands)
        for name, operand in sorted(self.present.items(), key=lambda item: rows_last and isinstance(item[1], Whole)):
            match operand:
                case Whole():
                    values[name] = memory.hold(refs[name], operand.fill, slots.get(name), operand.dtype or refs[name].dtype)
                case PerRow():
                    values[name] = memory.load_row(refs[name]).astype(operand.dtype or refs[name].dtype)
                case Scalar():
                    values[name] = refs[name][0]
                case Inside():
                    values[name] = memory.inside()
                case Mask(array) if not is_along(array, self.problem.axes):
                    seen = tile.along(memory.load_row(refs[name])) != 0
                    values[name] = lambda _, seen=seen: seen
                case Mask(array):
                    is_whole = array.shape == self.problem.shape
                    values[name] = memory.load_mask(refs[name], None if is_whole else self.problem.indexed(array.shape))
        return values

    def store(self, tile: Tile, refs, results) -> None:
        """Stores the results of the body."""
        n_whole = len(self.whole)
        whole = list(zip(refs, results[:n_whole], strict=False))
        if plain := [(ref, result) for ref, result in whole if not isinstance(result, Either)]:
            tile.store(plain)
        for ref, result in whole:
            if isinstance(result, Either):
                pl.when(result.condition)(functools.partial(tile.store, [(ref, result.then)]))
                pl.when(~result.condition)(functools.partial(tile.store, [(ref, result.otherwise)]))
        for ref, result in zip(refs[n_whole:], results[n_whole:], strict=True):
            tile.memory.store_row(ref, result.astype(ref.dtype))

    # Around the kernel.

    def call(
        self, run, plan: RowPlan | ColumnPlan, view, scratch: Scratch, *, blocks: int, is_sequential: bool = False, states=()
    ) -> list[jax.Array]:
        """Calls the kernel on a grid of blocks or clusters.

        `run` is a function of the references that `split` takes. `view` is the shape in which it sees what is as large as the
        rows, `scratch` the types of a block's shared memory. If the call `is_sequential`, the examples of a `vmap` do not share
        it. `states` are types of further results, which are dropped.
        """
        arrays = [array.reshape(view) for array in self.whole_arrays.values()]
        arrays += [self._flat(self.present[name], view) for name in self.others]
        results = [jax.ShapeDtypeStruct(view, dtype) for dtype in self.whole if self.replaced is None]
        results += [jax.ShapeDtypeStruct((self.problem.n_rows,), dtype) for dtype in self.per_row]
        options: dict[str, Any] = {}
        if plan.warpgroups > 1:
            options |= {"num_threads": plan.warpgroups, "thread_name": "warpgroup"}
        if plan.cluster > 1:
            options |= {"cluster": (plan.cluster,), "cluster_names": ("rank",)}
        call = kernel_of(
            run,
            out_type=[*results, *states],
            grid=(blocks,),
            grid_names=("block",),
            scratch_types=tuple(scratch),
            compiler_params=plgpu.CompilerParams(approx_math=True),
            kernel_name=self.name,
            **options,
        )
        if is_sequential:
            call = jax.custom_batching.sequential_vmap(call)
        made = call(*arrays) if self.replaced is None else self._call_in_place(call, arrays, results)
        shapes = [self.problem.shape] * len(self.whole) + [self.problem.row_shape] * len(self.per_row)
        return [result.reshape(shape) for result, shape in zip(made, shapes, strict=False)]

    def _call_in_place(self, call, arrays, results) -> Sequence[jax.Array]:
        """Calls a kernel that writes its first result in the memory of an operand."""
        at = [*self.whole_arrays].index(str(self.replaced))

        def in_place(refs):  # which has no way out for results except references
            made = call(*arrays[:at], refs[0], *arrays[at + 1 :])
            for ref, result in zip(refs[1:], made, strict=False):
                ref[...] = result

        # Not `jax.new_ref`, whose effect custom_partitioning refuses.
        return pl.run_state(in_place)([arrays[at], *(lax.empty(result.shape, result.dtype) for result in results)])

    def _flat(self, operand: Any, view):
        """Returns an operand that is not as large as the rows, as the kernel sees it."""
        problem, array = self.problem, operand.array
        if isinstance(operand, Scalar):
            return array.reshape(1)
        if isinstance(operand, PerRow):
            return jnp.broadcast_to(array, problem.row_shape).reshape(-1)
        if not is_along(array, problem.axes):
            return jnp.broadcast_to(array, problem.row_shape).reshape(-1).astype(jnp.float32)
        if problem.inner == 1:
            return array.reshape(-1, problem.cols)
        return array.reshape(view if array.shape == problem.shape else -1)

    @property
    def may_start_inside_a_vector(self) -> bool:
        """True if an example of a `vmap` may start inside a vector of the array of all examples."""
        narrowest = min((*self.problem.read, *self.problem.written))
        return math.prod(self.problem.shape) * narrowest % 16 != 0
