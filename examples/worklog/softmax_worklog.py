"""Climb from the naive softmax to one read and one write, a rung at a time.

    uv run examples/worklog/softmax_worklog.py                                  # on a CPU: small arrays, interpreted, checked
    uv run examples/worklog/softmax_worklog.py --rows 1024 --cols 131072        # on an NVIDIA GPU: the time of each rung too
    uv run examples/worklog/softmax_worklog.py --only fused,online_wide --dtype bfloat16

Softmax does five operations on eight bytes of float32, so what it costs is the passes that it makes over the array, and each
rung here is a way to make fewer. The kernels are written with Pallas on its Mosaic GPU backend. A block is one warpgroup, of
128 threads. Of a row it takes a step at a time: each thread loads some vectors, all before the first is used, and keeps a
maximum or a sum of its own, so that threads wait for each other once a row and not once a step. Arithmetic is float32.

Every rung is a function of `[rows, cols]` along the last axis. It is compared with float64; `error` is the largest share of the
error budget that it uses, (8 + 3 |x - max|) * 2^-24 of the true value and half a unit in the last place of a 16-bit dtype. The
last two rungs are attention, where the same state carries values, and the search of the largest weights, none of which is
written. Time is that of the wall clock, the median of several measurements, with several calls queued and waited for together.
"""

import argparse
import contextlib
import functools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax

DTYPES = ("float32", "bfloat16", "float16")
THREADS = 128  # of a warpgroup
WARP = 32
TILE = 4 * THREADS  # columns are a multiple of it: a tile of 8-byte vectors of 16 bits, or of 16-byte vectors of float32
MAX_COLS = 2**24
HELD = 32  # elements that a thread loads before it uses the first
REGISTERS = 40  # for those and for a state of each place in a vector; of the 64 that leave room for eight blocks at a time
AHEAD = 8  # elements of a row that a thread with a row of its own loads before it uses the first: 32 bytes of float32
KEPT = 128  # elements that a thread keeps, where it keeps all of its row
SHARE = 16384  # elements of a row for each block, at most, where many share a row
ON_CHIP = {4: 4325376, 2: 8650752}  # by bytes of an element: the longest rows that the library holds on an H200
K = 5  # of the largest weights
LOWEST = float(np.finfo(np.float32).min)  # in place of -inf: what is subtracted from it gives no NaN


class InputError(Exception):
    """Something that the user gave cannot be used; the message is the one line to show."""


# The state of online softmax, which is all that there is to merge.


class State(NamedTuple):
    """The scores seen so far: `m` their maximum, and `d` the sum of `exp(score - m)`. Of each lane, or of a row."""

    m: jax.Array
    d: jax.Array


def merge(a: State, b: State) -> State:
    """The state of the scores of both."""
    m = jnp.maximum(a.m, b.m)
    return State(m, a.d * jnp.exp(a.m - m) + b.d * jnp.exp(b.m - m))


def push(state: State, scores: Sequence[jax.Array]) -> State:
    """`merge` with scores that are new, which rescales once for all of them."""
    m = functools.reduce(jnp.maximum, scores, state.m)
    return State(m, state.d * jnp.exp(state.m - m) + sum_of([jnp.exp(score - m) for score in scores]))


def merge_lanes(lanes: State) -> State:
    """The state of a row, of those of lanes: two reductions over the warpgroup, by shuffles and through shared memory."""
    m = jnp.max(lanes.m)
    return State(m, jnp.sum(lanes.d * jnp.exp(lanes.m - m)))


def max_of(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.maximum, parts)


def sum_of(parts: Sequence[jax.Array]) -> jax.Array:
    return functools.reduce(jnp.add, parts)


# How a block walks over its elements.


@dataclass(frozen=True)
class Walk:
    """How a block walks over `size` elements that follow each other: in tiles, each a vector for each thread, several a step.

    Arrays are seen as `[blocks, tiles, tile]`.
    """

    size: int
    vector: int

    @property
    def tile(self) -> int:
        return THREADS * self.vector

    @property
    def tiles(self) -> int:
        return self.size // self.tile

    @property
    def layout(self) -> Any:
        """Of a tile: neighbours have neighbouring vectors."""
        return plgpu.Layout.WG_STRIDED((self.tile,), vec_size=self.vector)

    def view(self, array: jax.Array) -> jax.Array:
        return array.reshape(-1, self.tiles, self.tile)

    def shape(self, elements: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Of a result of so many elements."""
        return jax.ShapeDtypeStruct((elements // self.size, self.tiles, self.tile), dtype)

    def lanes(self, value: float) -> jax.Array:
        """The same number in each lane, one for each element of a vector of each thread."""
        return plgpu.layout_cast(jnp.full((self.tile,), value, jnp.float32), self.layout)

    def load(self, ref: Any, block: Any, first: Any, count: int) -> list[jax.Array]:
        """Some tiles, in float32."""
        loads = [plgpu.load(ref.at[block, first + i], layout=self.layout) for i in range(count)]
        return [load.astype(jnp.float32) for load in loads]

    def steps(self, step: Callable[[Any, int, Any], Any], carry: Any = ()) -> Any:
        """`carry = step(first tile, number of tiles, carry)`, until there are no more tiles."""
        at_once = max(1, min(HELD, REGISTERS - 2 * self.vector) // self.vector)
        whole, rest = divmod(self.tiles, at_once)
        if whole > 1:
            carry = lax.fori_loop(0, whole, lambda i, carry: step(i * at_once, at_once, carry), carry)
        elif whole:
            carry = step(0, at_once, carry)
        return step(whole * at_once, rest, carry) if rest else carry

    def fold(self, ref: Any, block: Any, combine: Callable[[Any, list[jax.Array]], Any], start: Any) -> Any:
        """One read: `combine` takes what the lanes have so far, and the tiles of a step."""
        lanes = self.steps(lambda first, count, carry: combine(carry, self.load(ref, block, first, count)), start)
        plgpu.commit_smem()  # of nothing: over a fence, the compiler does not hand on what was read to the next read
        return lanes

    def maximum(self, ref: Any, block: Any) -> jax.Array:
        lanes = self.fold(ref, block, lambda m, scores: max_of([m, *scores]), self.lanes(LOWEST))
        return jnp.max(lanes)

    def total(self, ref: Any, block: Any, function: Callable[[jax.Array], jax.Array]) -> jax.Array:
        """The sum of `function` of the elements."""
        lanes = self.fold(ref, block, lambda d, scores: d + sum_of([function(score) for score in scores]), self.lanes(0.0))
        return jnp.sum(lanes)

    def state(self, ref: Any, block: Any) -> State:
        """Maximum and sum in one read."""
        return merge_lanes(self.fold(ref, block, push, State(self.lanes(LOWEST), self.lanes(0.0))))

    def write(self, ref: Any, out_ref: Any, block: Any, function: Callable[[jax.Array], jax.Array]) -> None:
        """One read and one write: `function` of the elements."""

        def step(first: Any, count: int, carry: Any) -> Any:
            for i, score in enumerate(self.load(ref, block, first, count)):
                out_ref[block, first + i] = function(score).astype(out_ref.dtype)
            return carry

        self.steps(step)


def widest(cols: int, dtype: Any) -> int:
    """Elements of a vector of 16 bytes, or of 8 where 16 bits do not fill a tile with those."""
    vector = 16 // jnp.dtype(dtype).itemsize
    return vector if cols % (THREADS * vector) == 0 else TILE // THREADS


def row_walk(x: jax.Array) -> Walk:
    """A row for each block."""
    return Walk(x.shape[1], widest(x.shape[1], x.dtype))


def share_walk(x: jax.Array) -> Walk:
    """Equal shares of a row, of whole tiles: four or more where there are as many tiles, and none of more than `SHARE`.

    A row whose number of tiles is a prime has a share for each of them, and as many states to merge.
    """
    cols, vector = x.shape[1], widest(x.shape[1], x.dtype)
    tile = THREADS * vector
    most = min(SHARE, max(SHARE // 4, cols // THREADS), cols // 4) // tile
    return Walk(tile * next(n for n in range(max(1, most), 0, -1) if cols // tile % n == 0), vector)


def kernel(name: str, body: Callable[..., None], out: Any, blocks: int, *operands: jax.Array) -> Any:
    """Runs `body(block, *refs)` in so many blocks of one warpgroup; `out` is the type of the result, or several."""
    return plgpu.kernel(
        lambda *refs: body(lax.axis_index("block"), *refs),
        out_type=out,
        grid=(blocks,),
        grid_names=("block",),
        kernel_name=f"worklog_{name}",
        compiler_params=plgpu.CompilerParams(approx_math=True),
    )(*operands)


def numbers(count: int) -> jax.ShapeDtypeStruct:
    """The type of so many of float32."""
    return jax.ShapeDtypeStruct((count,), jnp.float32)


def spread(count: int) -> Any:
    """The layout of a power of two of numbers, up to 128, one for each thread; fewer are there several times."""
    lanes = min(count, WARP)
    warps, of_count = THREADS // WARP, count // lanes
    warp_dims = (-3,) if of_count == warps else (plgpu.Replicated(warps // of_count), -3)
    lane_dims = (-2,) if lanes == WARP else (plgpu.Replicated(WARP // lanes), -2)
    tiling = plgpu.Tiling(((count,), (lanes,), (1,)))
    # Mosaic GPU compares layouts in their canonical form.
    layout = mgpu.TiledLayout(tiling, warp_dims, lane_dims, -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim)


def partial_results(ref: Any, row: Any) -> list[jax.Array]:
    """The results that blocks have left for a row: what fills warpgroups, then powers of two, and the last may be a scalar."""
    count = ref.shape[1]
    at = count - count % THREADS
    layout = plgpu.Layout.WG_STRIDED((at,), vec_size=1)
    parts = [plgpu.load(ref.at[row, pl.ds(0, at)], layout=layout)] if at else []
    while at < count:
        size = min(WARP, 1 << (count - at).bit_length() - 1)
        some = ref.at[row, pl.ds(at, size)]
        parts.append(plgpu.load(some, layout=spread(size), optimized=False) if size > 1 else ref[row, at])
        at += size
    return parts


# Rung 1.


def naive(x: jax.Array) -> jax.Array:
    """`exp(x) / sum(exp(x))`, as the formula stands: right until an exponential or their sum is no float32 any more."""
    walk = row_walk(x)

    def body(row: Any, x_ref: Any, y_ref: Any) -> None:
        factor = 1 / walk.total(x_ref, row, jnp.exp)
        walk.write(x_ref, y_ref, row, lambda score: jnp.exp(score) * factor)

    return kernel("naive_sum_write", body, walk.shape(x.size, x.dtype), x.shape[0], walk.view(x)).reshape(x.shape)


# Rung 2.


def separate(x: jax.Array) -> jax.Array:
    """A kernel for each line of the formula. Exponentials are written in float32, so that 16 bits are rounded once."""
    rows, walk = x.shape[0], row_walk(x)

    def maximum(row: Any, x_ref: Any, m_ref: Any) -> None:
        m_ref[row] = walk.maximum(x_ref, row)

    def exponential(row: Any, x_ref: Any, m_ref: Any, e_ref: Any, d_ref: Any) -> None:
        m = m_ref[row]

        def step(first: Any, count: int, d: jax.Array) -> jax.Array:
            weights = [jnp.exp(score - m) for score in walk.load(x_ref, row, first, count)]
            for i, weight in enumerate(weights):
                e_ref[row, first + i] = weight
            return d + sum_of(weights)

        d_ref[row] = jnp.sum(walk.steps(step, walk.lanes(0.0)))

    m = kernel("separate_max", maximum, numbers(rows), rows, walk.view(x))
    types = [walk.shape(x.size, jnp.float32), numbers(rows)]
    e, d = kernel("separate_exp_sum", exponential, types, rows, walk.view(x), m)
    return divide("separate_divide", e.reshape(x.shape), d, x.dtype)


def divide(name: str, e: jax.Array, d: jax.Array, dtype: Any) -> jax.Array:
    """Divides rows, in shares: no element needs another."""
    walk = share_walk(e)
    shares = e.shape[1] // walk.size

    def body(share: Any, e_ref: Any, d_ref: Any, y_ref: Any) -> None:
        factor = 1 / d_ref[share // shares]
        walk.write(e_ref, y_ref, share, lambda weight: weight * factor)

    return kernel(name, body, walk.shape(e.size, dtype), e.size // walk.size, walk.view(e), d).reshape(e.shape)


# Rung 3.


def tree(x: jax.Array) -> jax.Array:
    """One vector is more than one block should read: all of them reduce a share, and the next launch what they found."""
    walk = share_walk(x)
    shares = x.shape[1] // walk.size

    def exponential(share: Any, x_ref: Any, m_ref: Any, e_ref: Any) -> None:
        m = m_ref[share // shares]
        walk.write(x_ref, e_ref, share, lambda score: jnp.exp(score - m))

    m = reduce_tree("tree_max", x, Walk.maximum, max_of, jnp.max)
    types = walk.shape(x.size, jnp.float32)
    e = kernel("tree_exp", exponential, types, x.size // walk.size, walk.view(x), m).reshape(x.shape)
    d = reduce_tree("tree_sum", e, lambda walk, ref, share: walk.total(ref, share, lambda e: e), sum_of, jnp.sum)
    return divide("tree_divide", e, d, x.dtype)


def reduce_tree(name: str, x: jax.Array, reduce_share: Any, combine: Any, reduce_lanes: Any) -> jax.Array:
    """A number for each row: one for each share in the first launch, and of those in the second."""
    walk, rows = share_walk(x), x.shape[0]
    shares = x.shape[1] // walk.size

    def leaves(share: Any, x_ref: Any, found_ref: Any) -> None:
        found_ref[share] = reduce_share(walk, x_ref, share)

    def root(row: Any, found_ref: Any, out_ref: Any) -> None:
        parts = partial_results(found_ref, row)
        out_ref[row] = combine([reduce_lanes(part) if part.ndim else part for part in parts])

    found = kernel(f"{name}_leaves", leaves, numbers(rows * shares), rows * shares, walk.view(x))
    if shares == 1:
        return found
    return kernel(f"{name}_root", root, numbers(rows), rows, found.reshape(rows, shares))


# Rung 4.


def fused(x: jax.Array) -> jax.Array:
    """One kernel, which reads its row for the maximum, for the sum, and for the result."""
    walk = row_walk(x)

    def body(row: Any, x_ref: Any, y_ref: Any) -> None:
        m = walk.maximum(x_ref, row)
        factor = 1 / walk.total(x_ref, row, lambda score: jnp.exp(score - m))
        walk.write(x_ref, y_ref, row, lambda score: jnp.exp(score - m) * factor)

    return kernel("fused_max_sum_write", body, walk.shape(x.size, x.dtype), x.shape[0], walk.view(x)).reshape(x.shape)


def fused_kept(x: jax.Array) -> jax.Array:
    """The second read keeps all exponentials of the row in registers while their sum is made."""
    walk = row_walk(x)

    def body(row: Any, x_ref: Any, y_ref: Any) -> None:
        m = walk.maximum(x_ref, row)
        weights = [jnp.exp(score - m) for score in walk.load(x_ref, row, 0, walk.tiles)]
        factor = 1 / jnp.sum(sum_of(weights))
        for tile, weight in enumerate(weights):
            y_ref[row, tile] = (weight * factor).astype(x.dtype)

    return kernel("fused_kept_max_write", body, walk.shape(x.size, x.dtype), x.shape[0], walk.view(x)).reshape(x.shape)


# Rung 5.


def online_thread(x: jax.Array) -> jax.Array:
    """The recurrence as it is printed: each thread has a row of its own, and takes a score after another.

    A block has as many rows as divide the array evenly, up to 128. Where those are fewer, threads do the same as others do.
    Every new maximum rounds the sum: in a row that rises to its end, the relative error grows with the number of columns.
    """
    rows, cols = x.shape
    threads = math.gcd(rows, THREADS)
    layout = spread(threads)

    def body(block: Any, x_ref: Any, y_ref: Any) -> None:
        here = pl.ds(block * threads, threads)

        def load(first: Any) -> list[jax.Array]:
            columns = [x_ref.at[here, first + i] for i in range(AHEAD)]
            loads = [plgpu.load(column, layout=layout, optimized=False) for column in columns]
            return [load.astype(jnp.float32) for load in loads]

        def read(step: Any, carry: list[jax.Array]) -> list[jax.Array]:
            m, d, lost = carry  # what the roundings of `d` have lost: one thread adds up all of a row, term by term
            for score in load(step * AHEAD):
                old, m = m, jnp.maximum(m, score)
                scale = jnp.exp(old - m)
                scaled, term = d * scale, jnp.exp(score - m) - lost * scale
                d = scaled + term
                lost = (d - scaled) - term
            return [m, d, lost]

        def write(step: Any, carry: Any) -> Any:
            for i, score in enumerate(load(step * AHEAD)):
                store(y_ref.at[here, step * AHEAD + i], (jnp.exp(score - m) * factor).astype(x.dtype))
            return carry

        start = [plgpu.layout_cast(jnp.full((threads,), value, jnp.float32), layout) for value in (LOWEST, 0.0, 0.0)]
        m, d, _ = lax.fori_loop(0, cols // AHEAD, read, start)
        factor = 1 / d
        lax.fori_loop(0, cols // AHEAD, write, ())

    return kernel("online_thread_rows", body, jax.ShapeDtypeStruct(x.shape, x.dtype), rows // threads, x)


def store(column: Any, values: jax.Array) -> None:
    """Stores what lies far apart in memory, which JAX 0.12 refuses as slow unless told."""
    if hasattr(plgpu, "store"):
        plgpu.store(column, values, optimized=False)
    else:
        column[...] = values


def online_row(name: str, x: jax.Array, walk: Walk) -> jax.Array:
    """A block has a row: maximum and sum in one read, the result in the second."""

    def body(row: Any, x_ref: Any, y_ref: Any) -> None:
        m, d = walk.state(x_ref, row)
        factor = 1 / d
        walk.write(x_ref, y_ref, row, lambda score: jnp.exp(score - m) * factor)

    return kernel(name, body, walk.shape(x.size, x.dtype), x.shape[0], walk.view(x)).reshape(x.shape)


def online_lanes(x: jax.Array) -> jax.Array:
    """Each thread has a state, of every 128th element; they merge by shuffles and through shared memory, in one reduction."""
    return online_row("online_lanes_row", x, Walk(x.shape[1], 1))


def online_wide(x: jax.Array) -> jax.Array:
    """The same in vectors of 16 bytes: an instruction for four or eight elements, and a state for each place in the vector."""
    return online_row("online_wide_row", x, row_walk(x))


# Rung 6.


def online_blocks(x: jax.Array) -> jax.Array:
    """A row belongs to many blocks: each leaves the state of its share, and in the second launch each merges all of them."""
    walk, rows = share_walk(x), x.shape[0]
    shares = x.shape[1] // walk.size

    def states(share: Any, x_ref: Any, m_ref: Any, d_ref: Any) -> None:
        m_ref[share], d_ref[share] = walk.state(x_ref, share)

    def write(block: Any, x_ref: Any, m_ref: Any, d_ref: Any, y_ref: Any) -> None:
        share = rows * shares - 1 - block  # what was read last may still be in the L2 cache, so it comes first
        row = share // shares
        parts = map(State, partial_results(m_ref, row), partial_results(d_ref, row))
        m, d = functools.reduce(merge, [merge_lanes(part) if part.m.ndim else part for part in parts])
        factor = 1 / d
        walk.write(x_ref, y_ref, share, lambda score: jnp.exp(score - m) * factor)

    m, d = kernel("online_blocks_states", states, [numbers(rows * shares)] * 2, rows * shares, walk.view(x))
    operands = walk.view(x), m.reshape(rows, shares), d.reshape(rows, shares)
    types = walk.shape(x.size, x.dtype)
    return kernel("online_blocks_merge_write", write, types, rows * shares, *operands).reshape(x.shape)


# Rung 7.


def on_chip(x: jax.Array) -> jax.Array:
    """The library: the row stays in registers or shared memory from its one read to its one write.

    One block holds a short row, those of a cluster a longer one, and then all that run. A row that fills more than two thirds
    of these is left to XLA.
    """
    return jaxsoftmax.softmax(x)


# Rung 8.


def attention_written(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention in three steps, `[batch, length, heads, head_dim]`: float32 scores and weights are written and read again."""
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, preferred_element_type=jnp.float32)
    weights = jaxsoftmax.softmax(scores, scale=q.shape[-1] ** -0.5, dtype=v.dtype)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, v)


def attention_fused(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Attention by the library: a state `(m, d, o)` carries the weighted sum of values, so no score is ever written."""
    return jaxsoftmax.dot_product_attention(q, k, v)


def attention_bytes(shape: tuple[int, int, int, int], dtype: Any) -> dict[str, int]:
    """What both should move, for `q`, `k`, `v` of one shape, `[batch, length, heads, head_dim]`.

    Both read three arrays and write one. The written one also writes and reads scores in float32 and weights in `dtype`.
    """
    batch, length, heads, _ = shape
    itemsize, scores = jnp.dtype(dtype).itemsize, batch * heads * length**2
    least = 4 * math.prod(shape) * itemsize
    return {"attention_written": least + 2 * scores * (4 + itemsize), "attention_fused": least}


# Rung 9. These give the largest weights of each row and their columns, and equal weights in the order of their columns.


def safe_then_top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Two steps: safe softmax writes all weights, and the search reads them again."""
    weights, columns = jaxsoftmax.top_k(fused(x), K)
    return weights, columns


def safe_top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One kernel, which reads its row for the maximum, and for the sum and the largest scores: no other weight is computed.

    Each lane keeps its `K` largest scores in order; what is `-inf` counts as the lowest number, which is above nothing.
    """
    walk, rows = row_walk(x), x.shape[0]

    def body(row: Any, x_ref: Any, weights_ref: Any, columns_ref: Any) -> None:
        m = walk.maximum(x_ref, row)
        place = plgpu.broadcasted_iota(jnp.int32, (walk.tile,), 0, layout=walk.layout)

        def step(first: Any, count: int, carry: tuple[jax.Array, Largest]) -> tuple[jax.Array, Largest]:
            d, largest = carry
            scores = walk.load(x_ref, row, first, count)
            for i, score in enumerate(scores):
                largest = insert(largest, jnp.maximum(score, LOWEST), place + (first + i) * walk.tile)
            return d + sum_of([jnp.exp(score - m) for score in scores]), largest

        nothing = [(walk.lanes(-math.inf), place) for _ in range(K)]
        d, largest = walk.steps(step, (walk.lanes(0.0), nothing))
        factor = 1 / jnp.sum(d)
        for i in range(K):
            scores, columns = largest[0]
            score = jnp.max(scores)
            column = -jnp.max(jnp.where(scores == score, -columns, -MAX_COLS))  # the first of equal ones
            weights_ref[row * K + i] = jnp.exp(jnp.where(score == LOWEST, -jnp.inf, score) - m) * factor
            columns_ref[row * K + i] = column
            largest = without_first(largest, (scores == score) & (columns == column))

    types = [numbers(rows * K), jax.ShapeDtypeStruct((rows * K,), jnp.int32)]
    weights, columns = kernel("safe_top_k_max_search", body, types, rows, walk.view(x))
    return weights.astype(x.dtype).reshape(rows, K), columns.reshape(rows, K)


Largest = list[tuple[jax.Array, jax.Array]]  # scores and their columns, of each lane, the largest first


def insert(largest: Largest, score: jax.Array, column: jax.Array) -> Largest:
    """The largest scores with one more for each lane: what is larger takes the place, and what was there moves on."""
    found = []
    for other, other_column in largest:
        is_larger = score > other
        found.append((jnp.where(is_larger, score, other), jnp.where(is_larger, column, other_column)))
        score, column = jnp.where(is_larger, other, score), jnp.where(is_larger, other_column, column)
    return found


def without_first(largest: Largest, where: jax.Array) -> Largest:
    """The largest scores of each lane, without the first one in some of them; the last stands there twice."""
    following = [*largest[1:], largest[-1]]
    return [
        (jnp.where(where, next_score, score), jnp.where(where, next_column, column))
        for (score, column), (next_score, next_column) in zip(largest, following, strict=True)
    ]


def online_top_k(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The library: one read finds the state of a row and its largest scores, and only their weights are computed."""
    weights, columns = jaxsoftmax.softmax_top_k(x, K)
    return weights, columns


# What a rung serves.


def unsupported(rows: int, cols: int, dtype: Any) -> str | None:
    """Why a rung cannot run, in words, or None."""
    if jnp.dtype(dtype).name not in DTYPES:
        return f"dtype must be among {', '.join(DTYPES)}, got {jnp.dtype(dtype).name}"
    if rows < 1:
        return f"there must be rows, got {rows}"
    if cols % TILE or not TILE <= cols <= MAX_COLS:
        return f"cols must be a multiple of {TILE}, a vector of 8 or 16 bytes for each thread, up to {MAX_COLS}, got {cols}"
    return None


def unsupported_kept(rows: int, cols: int, dtype: Any) -> str | None:
    if cols > KEPT * THREADS:
        return f"cols must be at most {KEPT * THREADS}, what registers of a block keep, got {cols}"
    return unsupported(rows, cols, dtype)


def unsupported_thread(rows: int, cols: int, dtype: Any) -> str | None:
    if cols > 2**20:
        return f"cols must be at most {2**20}, as one thread takes seconds for more, got {cols}"
    return unsupported(rows, cols, dtype)


@functools.cache
def unsupported_on_chip(rows: int, cols: int, dtype: Any) -> str | None:
    """The library's own reason."""
    x = jax.ShapeDtypeStruct((rows, cols), dtype)
    try:
        jaxsoftmax.explain(functools.partial(jaxsoftmax.softmax, implementation="mosaic"), x, platform="cuda")
    except NotImplementedError as refusal:
        return str(refusal)
    return None


@dataclass(frozen=True)
class Rung:
    """A way to compute softmax.

    Attributes:
      name: by which it is asked for; its kernels are called `worklog_<name>_<step>`.
      number: of the rung; ways that make the same point share one.
      title: in a few words.
      teaches: what it shows, in one line.
      softmax: of `[rows, cols]`, along the last axis; it can be jitted. Those of `WITH_TOP_K` give weights and columns.
      reads: how often it asks global memory for each element.
      writes: how often it writes each.
      unsupported: of rows, columns and dtype: why it cannot run, in words, or None.
      slow: why it does not reach the speed that its passes allow, where that is what it shows.
      wide: of its passes, how many are over exponentials in float32, whatever the dtype of the array.
      holds: by bytes of an element, the columns of the longest rows that a kernel holds. The kernel that was measured at longer
        rows read them once more; there is none today.
    """

    name: str
    number: str
    title: str
    teaches: str
    softmax: Callable[[jax.Array], Any]
    reads: int
    writes: int
    unsupported: Callable[[int, int, Any], str | None] = unsupported
    slow: str = ""
    wide: int = 0
    holds: Mapping[int, int] | None = None

    def passes(self, cols: int, dtype: Any) -> int:
        """Over the array. Results of blocks and of rows, which are few, do not count."""
        again = self.holds is not None and cols > self.holds[jnp.dtype(dtype).itemsize]
        return self.reads + self.writes + again

    def bytes(self, rows: int, cols: int, dtype: Any) -> int:
        """What it asks of global memory, both ways."""
        return rows * cols * ((self.passes(cols, dtype) - self.wide) * jnp.dtype(dtype).itemsize + self.wide * 4)


RUNGS = (
    Rung(
        "naive",
        "1",
        "naive",
        "the formula as it stands needs two reads and a write, but exp overflows: in float32 above 88.7",
        naive,
        reads=2,
        writes=1,
    ),
    Rung(
        "separate",
        "2",
        "safe, separate kernels",
        "subtracting the maximum is always safe; a kernel for each line of the formula costs five passes",
        separate,
        reads=3,
        writes=2,
        wide=2,
    ),
    Rung(
        "tree",
        "3",
        "safe, tree reductions",
        "blocks that share a row fill the GPU, but each launch that waits for all of them reads the row again",
        tree,
        reads=4,
        writes=2,
        wide=3,
    ),
    Rung(
        "fused",
        "4",
        "safe, one kernel",
        "exp is cheaper than memory: computing it twice saves writing the exponentials",
        fused,
        reads=3,
        writes=1,
    ),
    Rung(
        "fused_kept",
        "4",
        "safe, exponentials kept",
        "a block need not read again what it keeps: exponentials of short rows stay in registers",
        fused_kept,
        reads=2,
        writes=1,
        unsupported=unsupported_kept,
    ),
    Rung(
        "online_thread",
        "5",
        "online, one thread per row",
        "rescaling the sum when the maximum grows finds both in one read; but neighbouring threads must load neighbours",
        online_thread,
        reads=2,
        writes=1,
        unsupported=unsupported_thread,
        slow="the threads of a warp load from 32 rows at once, and few threads each wait for one score after another",
    ),
    Rung(
        "online_lanes",
        "5",
        "online, lanes merged",
        "states merge in any order, so all lanes and warps of a block can share a row, and loads coalesce",
        online_lanes,
        reads=2,
        writes=1,
    ),
    Rung(
        "online_wide",
        "5",
        "online, wide loads",
        "loads of 16 bytes need a quarter of the instructions, or less, for the same bytes in flight",
        online_wide,
        reads=2,
        writes=1,
    ),
    Rung(
        "online_blocks",
        "6",
        "online, blocks merged",
        "states of blocks merge like states of lanes: one long vector needs two launches and three passes",
        online_blocks,
        reads=2,
        writes=1,
    ),
    Rung(
        "on_chip",
        "7",
        "online, on chip",
        "a row that stays on chip is read once and written once; no softmax that writes its result moves less",
        on_chip,
        reads=1,
        writes=1,
        unsupported=unsupported_on_chip,
        holds=ON_CHIP,
    ),
)

RUNGS_BY_NAME = {rung.name: rung for rung in RUNGS}
WITH_TOP_K = (
    Rung(
        "safe_then_top_k",
        "9",
        "safe, then top-k",
        "the search reads again what softmax wrote, and looks at each weight once",
        safe_then_top_k,
        reads=4,
        writes=1,
    ),
    Rung(
        "safe_top_k",
        "9",
        "safe, with top-k",
        "the largest scores have the largest weights, so they are found while the sum is made, and few weights are written",
        safe_top_k,
        reads=2,
        writes=0,
    ),
    Rung(
        "online_top_k",
        "9",
        "online, with top-k",
        "the read that finds the maximum and the sum can find the largest scores too",
        online_top_k,
        reads=1,
        writes=0,
    ),
)
NAMES = (*RUNGS_BY_NAME, "attention", "top_k")
# What is chosen where the command line does not say.
ON_GPU = {"rows": 1024, "cols": 131072}
ELSEWHERE = {"rows": 4, "cols": 2048}
ATTENTION_ON_GPU = (4, 4096, 16, 128)  # batch, length, heads, head size
ATTENTION_ELSEWHERE = (1, 128, 2, 32)
OVERFLOWS = ([1000.0, 1001.0, 1002.0], [0.0, 500.0, 1000.0], [-1000.0, -1001.0, -1002.0])
CHECKED = 2**22  # elements that are compared with float64, at most; whole rows, but no less than one
MEASUREMENTS = 5


# Whether it is right.


def softmax_error(actual: jax.Array, x: jax.Array) -> float:
    """The largest share of its error budget that an element of some rows uses; infinite for NaN that should not be there."""
    some = compared_rows(x)
    truth, budget = softmax_truth(x[some])
    return largest_share(np.asarray(actual[some]).astype(np.float64), truth, budget)


def top_k_error(weights: jax.Array, columns: jax.Array, x: jax.Array) -> float:
    """`softmax_error` of the largest weights, and of what weighs most by their columns, of which no two are the same.

    Two weights may have been told apart by what they were rounded to, so what is at the columns has twice the budget.
    """
    some = compared_rows(x)
    truth, budget = softmax_truth(x[some])
    order = np.argsort(-truth, axis=1, kind="stable")[:, :K]
    largest, of_largest = (np.take_along_axis(array, order, axis=1) for array in (truth, budget))
    found, at = np.asarray(weights[some]).astype(np.float64), np.asarray(columns[some])
    if np.min(at) < 0 or np.max(at) >= x.shape[1] or not np.all(np.diff(np.sort(at, axis=1), axis=1)):
        return math.inf
    there = np.take_along_axis(truth, at, axis=1)
    return max(largest_share(found, largest, of_largest), largest_share(there, largest, 2 * of_largest))


def compared_rows(x: jax.Array) -> np.ndarray:
    """The numbers of some rows, the first and the last one among them."""
    rows, cols = x.shape
    return np.unique(np.linspace(0, rows - 1, max(1, min(rows, CHECKED // cols))).astype(int))


def softmax_truth(x: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """Softmax in float64, and the error budget of each weight."""
    x64 = np.asarray(x).astype(np.float64)
    with np.errstate(invalid="ignore"):
        distance = np.max(x64, axis=1, keepdims=True) - x64
        weights = np.exp(-distance)
        truth = weights / np.sum(weights, axis=1, keepdims=True)
        budget = (8 + 3 * np.where(weights > 0, distance, 0)) * 2.0**-24 * truth + 2.0**-126
    if x.dtype.itemsize == 2:
        budget += float(jnp.finfo(x.dtype).eps) / 2 * np.maximum(truth, float(jnp.finfo(x.dtype).tiny))
    return truth, budget


def largest_share(actual: np.ndarray, truth: np.ndarray, budget: np.ndarray) -> float:
    """Of the budget, that an element uses; infinite for NaN that should not be there."""
    with np.errstate(invalid="ignore"):
        share = np.where(np.isnan(truth) & np.isnan(actual), 0, np.abs(actual - truth) / budget)
    return float(np.max(np.where(np.isnan(share), np.inf, share)))


def attention_error(actual: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> float:
    """The largest difference from float64 of the last head, as a part of the largest value."""
    q64, k64, v64, actual64 = (np.asarray(array[-1, :, -1]).astype(np.float64) for array in (q, k, v, actual))
    scores = q64 @ k64.T / math.sqrt(q.shape[-1])
    weights = np.exp(scores - np.max(scores, axis=1, keepdims=True))
    truth = weights / np.sum(weights, axis=1, keepdims=True) @ v64
    return float(np.max(np.abs(actual64 - truth)) / np.max(np.abs(truth)))


def naive_in_words(scores: Sequence[float]) -> np.ndarray:
    """What the formula gives in float32: infinite exponentials give NaN, and with an infinite sum the others give 0."""
    with np.errstate(all="ignore"):
        weights = np.exp(np.asarray(scores, np.float32))
        return weights / np.sum(weights)


def padded(scores: Sequence[float]) -> jax.Array:
    """A row that kernels take; what is added has no weight."""
    return jnp.full((1, TILE), -jnp.inf, jnp.float32).at[0, : len(scores)].set(jnp.asarray(scores, jnp.float32))


# Running it.


@contextlib.contextmanager
def interpreted_without_gpu() -> Iterator[None]:
    """Kernels are interpreted, but for those of the library, in whose place its reference runs."""
    with contextlib.ExitStack() as stack:
        if jax.default_backend() != "gpu":
            stack.enter_context(plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()))
        yield


def seconds(run: Callable[[], Any]) -> float:
    """The median time of a call, on a GPU; several are queued, so that the time to start one hardly counts."""

    def measure(calls: int) -> float:
        began = time.perf_counter()
        for _ in range(calls - 1):
            run()
        jax.block_until_ready(run())
        return (time.perf_counter() - began) / calls

    jax.block_until_ready(run())
    calls = max(2, min(100, math.ceil(0.02 / measure(2))))
    return statistics.median(measure(calls) for _ in range(MEASUREMENTS))


def speed(run: Callable[[], Any], moved: int) -> list[str]:
    """Milliseconds and GB/s of a call, on a GPU."""
    if jax.default_backend() != "gpu":
        return []
    duration = seconds(run)
    return [f"{1e3 * duration:.4f}", f"{moved / duration / 1e9:.0f}"]


def columns(cells: Sequence[str], widths: Sequence[int]) -> str:
    """The first and the last cell start on the left, the others end on the right."""
    first, *middle, last = cells
    return "  ".join([first.ljust(widths[0]), *map(str.rjust, middle, widths[1:]), last]).rstrip()


def header(*names: str) -> list[str]:
    return [*names, *(["ms", "GB/s"] if jax.default_backend() == "gpu" else [])]


def climb(rungs: Sequence[Rung], rows: int, cols: int, dtype: str, seed: int, find_error: Callable[..., float]) -> bool:
    """Prints a line for each rung; whether all are right, by `find_error` of what it gives and of the array."""
    x = jax.random.normal(jax.random.key(seed), (rows, cols)).astype(dtype)
    widths = [max(13, *(len(rung.name) for rung in rungs)), 6, 7, 9, 9]
    print(columns([*header("rung", "passes", "error"), "what it teaches"], widths))
    right = True
    for rung in rungs:
        passes = str(rung.passes(cols, dtype))
        if reason := rung.unsupported(rows, cols, x.dtype):
            print(columns([rung.name, passes, "-", *["-"] * len(header()), f"not served: {reason}"], widths))
            continue
        run = jax.jit(rung.softmax)
        with interpreted_without_gpu():
            error = find_error(*jax.tree.leaves(run(x)), x)
        right = right and error <= 1
        cells = [rung.name, passes, f"{error:.3f}", *speed(functools.partial(run, x), rung.bytes(rows, cols, dtype))]
        print(columns([*cells, rung.teaches], widths), flush=True)
    return right


def show_overflows() -> bool:
    """Prints what the naive formula makes of a few rows; whether it is wrong exactly where it must be."""
    print("\nnaive, in float32, beside what softmax is")
    right = True
    for scores in OVERFLOWS:
        with interpreted_without_gpu():
            found = np.asarray(jax.jit(naive)(padded(scores)))[0, : len(scores)]
        truth = np.asarray(jax.nn.softmax(jnp.asarray(scores)))
        right = right and np.allclose(found, naive_in_words(scores), equal_nan=True)
        lists = [", ".join(f"{number:.4g}" for number in numbers) for numbers in (scores, found, truth)]
        print("  [{}] gives [{}], not [{}]".format(*lists))
    return right


def show_attention(dtype: str, seed: int) -> bool:
    """Prints a line for attention in both ways; whether both are right."""
    shape = ATTENTION_ON_GPU if jax.default_backend() == "gpu" else ATTENTION_ELSEWHERE
    q, k, v = (jax.random.normal(key, shape).astype(dtype) for key in jax.random.split(jax.random.key(seed), 3))
    moved = attention_bytes(shape, dtype)
    print(f"\nattention, batch {shape[0]}, length {shape[1]}, {shape[2]} heads of {shape[3]}, {dtype}")
    widths = [17, 10, 10, 9, 9]
    print(columns([*header("way", "MB", "difference"), ""], widths))
    right = True
    for way in (attention_written, attention_fused):
        run = jax.jit(way)
        error = attention_error(run(q, k, v), q, k, v)
        # A GPU multiplies float32 in TF32, which has the bits of float16.
        right = right and error <= 8 * max(float(jnp.finfo(dtype).eps), 2.0**-10)
        name = way.__name__
        cells = [name, f"{moved[name] / 1e6:.3f}", f"{error:.2e}", *speed(functools.partial(run, q, k, v), moved[name])]
        print(columns([*cells, ""], widths), flush=True)
    print("the state carries values: scores are as many as the square of the length, and need not be written")
    return right


def show_top_k(rows: int, cols: int, dtype: str, seed: int) -> bool:
    """Prints a line for each way to the largest weights; whether all are right."""
    print(f"\nsoftmax and the {K} largest of each row")
    return climb(WITH_TOP_K, rows, cols, dtype, seed, top_k_error)


# The command line.


def whole(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text)):
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def row_count(text: str) -> int:
    if whole(text) >= 2**31:
        raise argparse.ArgumentTypeError(f"must be less than {2**31}, got {text}")
    return int(text)


def seed(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 0 to 4294967295")
    return int(text)


def length(text: str) -> int:
    if reason := unsupported(1, whole(text), "float32"):
        raise argparse.ArgumentTypeError(reason)
    return int(text)


def some_names(text: str) -> list[str]:
    """Some of the rungs, in their own order."""
    parts = text.split(",")
    for part in parts:
        if part not in NAMES:
            raise argparse.ArgumentTypeError(f"{part!r} is not one of {', '.join(NAMES)}")
    return [name for name in NAMES if name in parts]


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise InputError(message)


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    description = "Climb from the naive softmax to one read and one write, a rung at a time."
    codes = "Exit codes: 0 all are right, 1 one is wrong or cannot go on, 2 bad input, 130 interrupted."
    parser = Parser(description=description, epilog=codes)
    chosen = ON_GPU if jax.default_backend() == "gpu" else ELSEWHERE
    defaults = {name: f"{ON_GPU[name]} on a GPU, {ELSEWHERE[name]} elsewhere" for name in ON_GPU}
    parser.add_argument("--rows", type=row_count, default=chosen["rows"], metavar="N", help=f"default: {defaults['rows']}")
    cols_help = f"a multiple of {TILE} up to {MAX_COLS} (default: {defaults['cols']})"
    parser.add_argument("--cols", type=length, default=chosen["cols"], metavar="N", help=cols_help)
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the array (default: %(default)s)")
    only_help = f"which rungs to run, of {','.join(NAMES)} (default: all)"
    parser.add_argument("--only", type=some_names, default=list(NAMES), metavar="RUNG,...", help=only_help)
    parser.add_argument("--seed", type=seed, default=0, help="of the inputs (default: %(default)s)")
    return parser.parse_args(argv)


def work(args: argparse.Namespace) -> bool:
    """Runs what was asked for; whether all of it is right."""
    device = jax.devices()[0].device_kind
    how = "" if jax.default_backend() == "gpu" else ", kernels interpreted, the library's reference in place of its kernels"
    print(f"softmax of {args.rows} x {args.cols} {args.dtype} on {device}{how}; jax {jax.__version__}")
    rungs = [RUNGS_BY_NAME[name] for name in args.only if name in RUNGS_BY_NAME]
    right = not rungs or climb(rungs, args.rows, args.cols, args.dtype, args.seed, softmax_error)
    if "naive" in args.only:
        right = show_overflows() and right
    if "attention" in args.only:
        right = show_attention(args.dtype, args.seed) and right
    if "top_k" in args.only:
        right = show_top_k(args.rows, args.cols, args.dtype, args.seed) and right
    return right


def main(argv: list[str] | None = None) -> int:
    try:
        if not work(parse_arguments(argv)):
            print(
                f"{Path(__file__).name}: error: a rung is wrong: its error is above 1, or not where it must be", file=sys.stderr
            )
            return 1
    except InputError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in ("RESOURCE_EXHAUSTED", "Out of memory")):
            raise
        print(f"{Path(__file__).name}: error: out of memory", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"{Path(__file__).name}: interrupted", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
