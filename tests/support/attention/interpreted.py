"""Runs the kernels of attention, and of its derivatives, without a GPU, by Pallas' interpreter of GPU kernels.

It knows barriers, TMA, and products of shared memory. Stand-ins are here for left operands in registers, sums that start with
values, copies that add, and functions that are MLIR. The interpreter multiplies and copies at once, and runs one block of
threads after the other: it does not show that a wait for products, or for a turn, is too short. These do not run at all:
derivatives whose sums start with log-sum-exps, two blocks of threads that share a tile, tickets, masks, biases and float32
forward, and queries or keys that do not fill the last tile. Each warpgroup needs a thread of the CPU client, which has one for
each of its devices.
"""

import contextlib
import threading
from unittest import mock

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.pallas.mosaic_gpu import primitives as mosaic_primitives
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks, shared_memory
from jax._src.state import primitives as state_primitives
from jax.experimental import pallas as pl
from jax.extend.core import jaxpr_as_fun

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._gpu import emit, schedule, sync, tickets, wgmma
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.mosaic_sm90 import (
    backward,
    backward_pipeline,
    backward_plan,
    decode,
    forward_pipeline,
    forward_plan,
)
from jaxsoftmax.ops.attention.mosaic_sm90.forward_plan import FoldedRows, ForwardTiles
from jaxsoftmax.ops.attention.mosaic_sm90.functions import TileFunctions
from jaxsoftmax.ops.attention.score_functions import wide_tables

_adding = threading.Lock()
_of_thread = threading.local()  # the reduction of the copy that a thread starts
# Names of operands of `dot_product_attention`, and of the same operands of plans.
_NAMES = {"query_segment_ids": "query_segments", "key_value_segment_ids": "key_segments"}
_NAMES |= {"query_seq_lengths": "query_lengths", "key_value_seq_lengths": "key_lengths"}

_tile = ForwardTiles.tile
_copy, _multiply, _Copy = gpu_callbacks.copy_smem_to_gmem, gpu_callbacks.wgmma, gpu_callbacks.AsyncCopySmemToGmemTask


class _Addition(_Copy):
    """A copy that adds to what is there."""

    def __call__(self, tma_thread_id):
        memory = gpu_callbacks._get_shared_memory()

        def load(key, access):
            return memory.get_buffer_content(key, access, self.thread, logging_info=self.logging_info)[0]

        shape = memory.buffer_shape_and_dtype(self.dst_allocation_key).shape
        value = load(self.src_allocation_key, self.src_access)
        clipped = gpu_callbacks._clip_store_to_shape(self.dst_access, value, tuple(shape))
        if clipped is not None:
            access, value = clipped
            with _adding:
                total = load(self.dst_allocation_key, access) + value
                memory.store_buffer_content(self.dst_allocation_key, access, total, self.thread, logging_info=self.logging_info)
        self.post_write(tma_thread_id, memory)


def _copy_or_add(*, reduction_op, **options):
    assert reduction_op in (None, "add")
    _of_thread.reduction_op = reduction_op
    return _copy(reduction_op=None, **options)


def _task_of_copy(**options):
    return (_Copy if _of_thread.reduction_op is None else _Addition)(**options)


def _multiply_from_registers(*, a_allocation_key_as_array, **options):
    """Multiplies, also where the left operand is an array and not the key of one in shared memory."""
    left = np.asarray(a_allocation_key_as_array)
    if left.ndim == 1:
        return _multiply(a_allocation_key_as_array=left, **options)
    memory, thread = gpu_callbacks._get_shared_memory(), options["thread"]
    logging_info = shared_memory.GPULoggingInfo(options["mesh_location"], thread, options["source_info"])

    def place(name):
        key = gpu_callbacks.HostAllocationKey.from_array(options[f"{name}_allocation_key_as_array"])
        transforms = gpu_callbacks._remove_noop_transforms(options[f"{name}_transforms"])
        return key, memory.access(key, jax.tree.map(int, transforms))

    def load(name):
        return memory.get_buffer_content(*place(name), thread, logging_info=logging_info)[0]

    total = load("acc") + np.matmul(left, load("b"), dtype=np.float32)
    memory.store_buffer_content(*place("acc"), total, thread, logging_info=logging_info)
    return options["token"]


def _deallocate(barrier):
    with barrier.cv:
        barrier.ref_count -= 1  # barriers may have completed phases that nobody waits for


def _named_barrier(operation):
    """Returns a function that arrives at one of the hardware's barriers, and waits there if `operation` is "sync"."""
    num_threads = 256

    def meet(barrier):
        @plgpu.inline_mgpu(arg_types=(emit.SPLAT,))
        def bar_op(_, barrier):  # the interpreter knows the name, and the names around
            return operation, num_threads

        bar_op(jnp.int32(barrier))

    return meet


def _terms(product):
    high = lax.reduce_precision(product, exponent_bits=8, mantissa_bits=7)
    return high.astype(jnp.bfloat16), (product - high).astype(jnp.bfloat16)


def _store_sum(ref, value):
    """Stores a value to a sum of products, which is like other memory to the interpreter."""
    _, no_transforms = jax.tree.flatten(())
    state_primitives.swap_p.bind(ref, value, tree=no_transforms)


def _tile_with_facts(tiles, number, *facts):
    """Returns a tile, also if no ticket came with its facts."""
    return _tile(tiles, number, *(facts or tiles.look_up(number)))


def _band(scores, low, high, hidden=-jnp.inf):
    columns = lax.broadcasted_iota(jnp.int32, scores.shape, 1)
    seen = jnp.full(scores.shape, fill_value=True)
    seen &= True if low is None else columns >= low[:, None]
    seen &= True if high is None else columns <= high[:, None]
    return jnp.where(seen, scores, hidden)


def _load_transposed(ref, row, col, limits, shape, *, varies):
    assert all(varies)
    return ref[pl.ds(row, shape[1]), pl.ds(col, shape[0])].T


def _store_product(ref, row, col, limits, values):
    def store(first, part):
        ref[pl.ds(row + first, part.shape[0]), pl.ds(col, part.shape[1])] = part

    _store_rows(limits[0], values, store)


def _store_rows(limit, values, store):
    """Does `store(first, part)` for all rows at once, or one by one for those before a limit, as stores are not clipped."""
    count = values.shape[0]
    pl.when(limit >= count)(lambda: store(0, values))
    each = pl.loop(0, jnp.where(limit >= count, 0, jnp.maximum(limit, 0)))
    each(lambda i: store(i, lax.dynamic_slice_in_dim(values, i, 1)))


def _load_product_rows(ref, start, limit, shape):
    return ref[pl.ds(start, shape[0])]


def _load_product_cols(ref, start, limit, shape):
    return ref[pl.ds(start, shape[1])]


def _store_product_rows(ref, start, limit, values):
    def store(first, part):
        ref[pl.ds(start + first, part.shape[0])] = part

    _store_rows(limit, values, store)


def _any_above(product, limit, barrier=None):
    return jnp.any(~(product <= limit)).astype(jnp.int32)


def _results_of_functions(tile: TileFunctions, name, s, start):
    """Runs a score or mask function on a tile by `jax.vmap`."""
    function = tile.functions[name]

    def line(name):
        operand = tile.operands[name]
        return operand.ref[operand.index(tile.b)]

    rows, columns = (first + lax.iota(jnp.int32, size) for first, size in zip((tile.first, start), s.shape, strict=True))
    query, key = (rows, columns) if tile.rows_are_queries else (columns, rows)
    query, place = (operation(query, jnp.int32(tile.heads_per_query)) for operation in (lax.div, lax.rem))
    head = tile.head * tile.heads_per_query + place
    query = query if tile.offset is None else query + tile.offset
    present = set(function.operands) & tile.operands.keys()
    query = line("query_numbers")[query] if "query_numbers" in present else query
    key = line("key_numbers")[key] if "key_numbers" in present else key
    entry = line("entries") if "entries" in present else 0
    head = line("head_numbers")[head] if "head_numbers" in present else head
    tables = wide_tables([line(name) for name in function.tables])

    def run(score, query, head, key):
        scores = [score] if function.takes_score else []
        numbers = (jnp.asarray(number, jnp.int32) for number in (entry, head, query, key))
        return jaxpr_as_fun(function.program)(*tables, *scores, *numbers)

    s = s * tile.scale if function.takes_score else s
    of_row, of_column = (0, None) if tile.rows_are_queries else (None, 0)
    run = jax.vmap(run, (0, of_column, of_column, of_row))
    first, *others = jax.vmap(run, (0, of_row, of_row, of_column))(s, query, head, key)
    if function.takes_score:
        most = float(jnp.finfo(first.dtype).max)  # finite results stay finite
        first = jnp.where(jnp.isinf(first), first, jnp.clip(first / (tile.changed_factor or 1), -most, most))
    return [first, *others]


def _hidden_by_function(tile, s, start, hidden=-jnp.inf, name="mask_mod"):
    (seen,) = tile.results(name, s, start)
    return jnp.where(seen, s, hidden)


def _in_one_view(shape, tiled_shape, dtype):
    """Describes slabs under one name: two would be two arrays to the interpreter."""
    assert shape == tiled_shape
    return plgpu.SMEM(shape, dtype)


STAND_INS = {
    gpu_callbacks: {"copy_smem_to_gmem": _copy_or_add, "AsyncCopySmemToGmemTask": _task_of_copy}
    | {"wgmma": _multiply_from_registers},
    shared_memory.Barrier: {"deallocate": _deallocate},
    wgmma: {"bfloat16_terms": _terms, "band": _band, "load_transposed": _load_transposed, "store_product": _store_product}
    | {"split_pairs": lambda product: product, "scale_rows": lambda product, factors: product * factors[:, None]}
    | {"load_product_rows": _load_product_rows, "load_product_cols": _load_product_cols}
    | {"join_columns": lambda left, right: jnp.concatenate([left, right], 1)}
    | {"store_product_rows": _store_product_rows, "any_above": _any_above}
    # A row is in one place here, and not in four threads which have a quarter of its sum each.
    | {"sum_in_threads": lambda product: jnp.sum(product, -1) / wgmma.THREADS_OF_ROW}
    | {"sum_over_threads": lambda sums: sums * wgmma.THREADS_OF_ROW},
    mosaic_primitives: {"wgmma_accumulator_store": _store_sum},
    ForwardTiles: {"tile": _tile_with_facts},
    forward_plan: {"in_two_views": _in_one_view},
    forward_pipeline: {"tanh": jnp.tanh, "views_of": lambda slabs: (slabs, slabs)},
    TileFunctions: {"_load": lambda tile, function: {}, "results": _results_of_functions, "hidden": _hidden_by_function},
    sync: {
        "named_barrier_sync": _named_barrier("sync"),
        "named_barrier_arrive": _named_barrier("arrive"),
    },
    backward_plan: {"in_two_views": _in_one_view},
    backward_pipeline: {"_meet": lambda: sync.named_barrier_sync(backward_pipeline._BOTH), "tanh": jnp.tanh}
    | {"views_of": lambda slabs: (slabs, slabs)},
    backward: {"views_of": lambda slabs: (slabs, slabs)},
    schedule: {"ticket_counter": lambda: None},
    tickets: {"await_count": lambda *_: None, "add_one": lambda *_: None},
}


def attention(target, operands, *, operation=primitive.ATTENTION, **params):
    """Returns output and log-sum-exp of attention, by the kernel that is planned for a target.

    XLA folds the rows of few queries: boxes of several queries would be a second view of shared memory.
    """
    with mock.patch.object(decode, "FoldedRows", lambda heads_per_query, box: FoldedRows(heads_per_query)):
        plan = _plan(operation, target, operands, params)
    object.__setattr__(plan.geometry, "by_ticket", False)
    return _run(plan, operands)


def cotangents(target, operands, **params):
    """Returns the cotangents of attention that `params` want, by the kernel that is planned for a target."""
    plan = _plan(primitive.ATTENTION_VJP, target, operands, params)
    for name in ("is_seeded", "seeds_delta", "by_ticket"):
        object.__setattr__(plan.geometry, name, False)
    assert not plan.geometry.is_paired
    return _run(plan, operands)


def named(given):
    """Returns operands of `dot_product_attention` as plans name them."""
    return {_NAMES.get(name, name): jnp.asarray(array) for name, array in given.items()}


def _plan(operation, target, operands, params):
    types = {name: jax.typeof(operand) for name, operand in operands.items()}
    plan = mosaic.plan(operation.problem(operation, types, params), target)
    plan = plan.plan if isinstance(plan, Refusal) and plan.plan is not None else plan
    assert not isinstance(plan, Refusal), plan
    return plan


def _run(plan, operands):
    params = plgpu.InterpretGPUParams(inline_mgpu="_hack_model_inline_mgpu_tokamax")
    with contextlib.ExitStack() as patches:
        for place, names in STAND_INS.items():
            patches.enter_context(mock.patch.multiple(place, **names))
        patches.callback(gpu_callbacks.reset_gpu_interpret_mode_state)
        patches.enter_context(plgpu.force_gpu_interpret_mode(params))
        patches.enter_context(jax.default_device(jax.devices("cpu")[0]))
        return jax.block_until_ready(plan.run(**operands))
