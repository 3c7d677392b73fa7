"""Which thread holds which elements of which rows: geometry alone."""

import math
from dataclasses import dataclass

from jaxsoftmax._gpu.ptx import WARP, WARPS, tiled


@dataclass(frozen=True)
class Config:
    """How the rows of an array are spread over threads, and held there.

    Attributes:
      vector: consecutive elements that a thread loads at once, a power of two. Where a block has many rows it is a divisor of
        the columns, or if they are parked, what a thread has of one in a step.
      threads: threads of a block that share a row, a power of two to 32, or a multiple of 128.
      repeats: rows of a block for each group of threads; 1 where the block has one row.
      blocks: blocks that share a row; 1 where a block has many rows. Up to 16 are a cluster.
      parked: whether rows are held in shared memory, not in registers, of which a thread then needs few. Where a block has many
        rows, they pass through it (see `flat`).
      unroll: steps of a thread in an iteration of a loop; 0 for no loop but code for each step. With a loop rows that are not
        parked are read from global memory with each pass.
      lanes: of a warp along the last axis where rows lie along another one (see `columns`), a power of two; else 0.
      grid: at most so many blocks run, any of which share a row, or rows side by side (see `split`). With 0 those of a cluster
        do, and where a row has more than 16 it is read twice, by a block for each.
    """

    vector: int
    threads: int
    repeats: int = 1
    blocks: int = 1
    parked: bool = False
    unroll: int = 0
    lanes: int = 0
    grid: int = 0


_MOST_OF_A_CLUSTER = 16


class RowLayout:
    """How the threads of a block, or of a cluster of blocks, hold rows of an array.

    A row is cut into slices, one for each block, and a slice into vectors. In each step every thread that shares the slice has
    one: thread p the vectors p, p + `threads`, and so on. Up to 32 threads are lanes of a warp, and a block is one warpgroup
    with many rows; more are all threads of a block, which has one row or a slice of one. In a step a warpgroup holds an array
    of `shape`: part of its rows, or of the shares that its four warps have of one.

    The vectors of a whole block start where a line of the cache does, up to `line - 1` elements before the slice: a warp that
    touches a line more than it must is slower. Those that are not of the slice, and what is not in its first and last one, are
    filled. Where a row starts in a line depends on which row it is: see `Memory.sums_in_order`.

    Attributes:
      cols: elements of a row.
      config, vector, threads, repeats, blocks: the `Config`, and what it says.
      whole_block: whether all of the block shares one row.
      branches: whether results may be `Either`: the block has one row, and code of its own for each case is worth its length.
      warpgroups: of a block.
      is_read_twice: whether a row has more blocks than a cluster, which are not those of a grid.
      lanes: of a warp that share a row.
      cluster: blocks of a cluster.
      warps: that share a row of a whole block, in all blocks of the cluster.
      rows: of a block.
      whole_vectors: whether rows consist of whole vectors.
      line: elements of a line of 128 bytes, where vectors have 16.
      slice_lines, longer_slices: lines of a slice, but that so many of the first ones have one more, and the last one may end
        inside of a line.
      slice_cols: elements of the longest slice.
      shifted: whether slices start elsewhere than vectors may.
      joined: whether a thread joins vectors of two steps, so that steps end where they do in the order of the slice: what is
        read in a loop, held nowhere, and not stored at its place, can be ordered in no other way.
      steps: vectors of a slice that a thread holds, the last of which may lie beyond the end.
      whole_steps: those in which all threads have whole vectors of any slice.
      looped_steps: those that a loop goes over. The others are left to code of their own where what is not parked is loaded in
        part, as a branch in a loop makes it slow. With `grid` the loop goes over all.
      entries: of a row of a whole block: each is what a warpgroup holds in a step.
      is_exact: whether Pallas can load and store rows: they end with a step of all threads, and are in registers of one block.
      exchange_shape: of float32 in shared memory for values that warps exchange, two for each of two rounds.
      order_shape: of float32 in shared memory for `Memory.sums_in_order`: two sums of each thread, and a maximum of each warp;
        None where the order is that of the row.
      scratch_size: bytes of both.
      stages: of shared memory, in each of which a block may hold rows.
      slot_elements: of rows that a block holds in shared memory, and what fills their last steps.
      shape: what a warpgroup holds in a step: rows, or warps, by elements.
      layout: where the elements of `shape` are: in vectors, a row in lanes of one warp.
      row_layout: of a value for each of the rows, or warps, in every lane that shares it.
    """

    def __init__(self, cols: int, config: Config, stored: bool = True):
        self.cols, self.config = cols, config
        self.vector, self.threads = config.vector, config.threads
        self.repeats, self.blocks = config.repeats, config.blocks
        self.whole_block = self.threads > WARP
        self.is_read_twice = config.blocks > _MOST_OF_A_CLUSTER and not config.grid
        self.branches = self.whole_block and not config.grid
        self.warpgroups = max(1, self.threads // (WARP * WARPS))
        self.lanes = min(self.threads, WARP)
        self.cluster = 1 if config.grid or self.is_read_twice else self.blocks
        self.warps = WARPS * self.warpgroups * self.cluster
        self.exchange_shape = (4, self.warps)
        self.rows = 1 if self.whole_block else WARPS * (WARP // self.lanes) * self.repeats
        self.whole_vectors = cols % self.vector == 0
        self.line = 8 * self.vector
        self.shifted = self.whole_block and cols % self.line != 0
        self.slice_lines, self.longer_slices = divmod(-(-cols // self.line), self.blocks)
        self.slice_cols = cols if self.blocks == 1 else -(-cols // (self.blocks * self.line)) * self.line
        self.joined = self.shifted and bool(config.unroll) and not (config.parked or config.grid or stored)
        before = (self.line - (self.vector if self.whole_vectors else 1)) if self.shifted and not self.joined else 0
        step = self.threads * self.vector
        self.steps = -(-(self.slice_cols + before) // step)
        shortest = cols if self.blocks == 1 else max(0, (self.slice_lines - 1) * self.line + 1)
        self.whole_steps = range(1 if self.shifted else 0, shortest // step)
        self.looped_steps = range(self.steps) if config.parked or config.grid else self.whole_steps
        if self.joined:
            self.looped_steps = range(self.whole_steps.stop - 1)
        self.entries = self.steps * self.blocks * self.warpgroups
        self.stages = 2 if config.grid else 1
        self.slot_elements = self.stages * self.steps * step
        self.order_shape = (2 * self.threads + WARPS * self.warpgroups,) if self.shifted else None
        self.scratch_size = 4 * sum(map(math.prod, filter(None, [self.exchange_shape, self.order_shape])))
        ends_with_step = cols == self.steps * step
        self.is_exact = ends_with_step and self.blocks == 1 and not config.parked
        self.shape = (WARPS if self.whole_block else self.rows), self.lanes * self.vector
        rows, width = WARP // self.lanes, self.shape[1]
        self.layout = tiled(((WARPS * rows, width), (rows, width), (self.vector,)), (-5,), (-3, -2))
        self.row_layout = self.layout.reduce(1)
