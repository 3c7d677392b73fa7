"""Which thread holds which elements of which rows: geometry alone."""

from dataclasses import dataclass

from jaxsoftmax._gpu.ptx import WARP, WARPS, tiled


@dataclass(frozen=True)
class Config:
    """How the rows of an array are spread over threads, and held there.

    Attributes:
      vector: consecutive elements that a thread loads at once, a power of two. One row a block, or a divisor of the columns.
      threads: threads of a block that share a row, a power of two to 32, or a multiple of 128.
      repeats: rows of a block for each group of threads; 1 where the block has one row.
      blocks: blocks of a cluster that share a row, at most 16; 1 where a block has many rows.
      parked: whether rows are held in shared memory, not in registers, of which a thread then needs few.
      unroll: steps of a thread in an iteration of a loop; 0 for no loop but code for each step. With a loop rows come by bulk
        copies if they are parked, else from global memory with each pass. Only where rows end with a step, and without a mask.
    """

    vector: int
    threads: int
    repeats: int = 1
    blocks: int = 1
    parked: bool = False
    unroll: int = 0


class RowLayout:
    """How the threads of a block, or of a cluster of blocks, hold rows of an array.

    A row is cut into vectors. In each step every thread that shares the row has one: thread p the vectors p, p + `sharers`,
    and so on. Up to 32 sharers are lanes of a warp, and a block is one warpgroup with many rows; more are all threads of a
    block, or of a cluster, which has one row. In a step a warpgroup holds an array of `shape`: part of its rows, or of the
    shares that its four warps have of one.

    Vectors start where the array is aligned to them. If `vector` does not divide `cols`, that is up to `vector - 1` elements
    before the row; the first and the last vector of the row then hold what fills it where they are not of the row.

    Attributes:
      cols: elements of a row.
      config, vector, threads, repeats, blocks: the `Config`, and what it says.
      whole_block: whether all of the block shares one row.
      warpgroups: of a block.
      lanes: of a warp that share a row.
      sharers: threads that share a row, in all blocks.
      warps: that share a row of a whole block, in all blocks.
      rows: of a block.
      aligned: whether rows start where vectors do.
      steps: vectors of a row that a thread holds, the last of which may lie beyond the end.
      entries: of a row of a whole block: each is what a warpgroup holds in a step.
      is_full: whether a row ends with a step of all threads.
      shape: what a warpgroup holds in a step: rows, or warps, by elements.
      layout: where the elements of `shape` are: in vectors, a row in lanes of one warp.
      row_layout: of a value for each of the rows, or warps, in every lane that shares it.
    """

    def __init__(self, cols: int, config: Config):
        self.cols, self.config = cols, config
        self.vector, self.threads = config.vector, config.threads
        self.repeats, self.blocks = config.repeats, config.blocks
        self.whole_block = self.threads > WARP
        self.warpgroups = max(1, self.threads // (WARP * WARPS))
        self.lanes = min(self.threads, WARP)
        self.sharers = self.threads * self.blocks
        self.warps = WARPS * self.warpgroups * self.blocks
        self.rows = 1 if self.whole_block else WARPS * (WARP // self.lanes) * self.repeats
        self.aligned = cols % self.vector == 0
        touched = cols // self.vector + (0 if self.aligned else 2)
        self.steps = -(-touched // self.sharers)
        self.entries = self.steps * self.blocks * self.warpgroups
        self.is_full = cols == self.steps * self.vector * self.sharers
        self.shape = (WARPS if self.whole_block else self.rows), self.lanes * self.vector
        rows, width = WARP // self.lanes, self.shape[1]
        self.layout = tiled(((WARPS * rows, width), (rows, width), (self.vector,)), (-5,), (-3, -2))
        self.row_layout = self.layout.reduce(1)
