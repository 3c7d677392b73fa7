"""How kernels distribute rows over threads, and where they keep them: plans, and the geometry that follows from them.

`RowPlan` is for rows along the last axis, `ColumnPlan` for rows along another one. `staged.StagedPlan` is for short rows that
pass through shared memory. `plans_sm90` chooses the numbers.
"""

import enum
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

from jaxsoftmax._gpu.emit import WARP, WARPS, tiled

MOST_OF_A_CLUSTER = 16  # blocks, with a launch attribute that Mosaic sets


class Storage(enum.Enum):
    """The place where a block keeps its rows between the reduction and the store."""

    REGISTERS = "registers"  # every step is written out, without a loop
    SHARED = "shared memory"  # longer rows; threads need few registers, so that one block loads while another one stores
    NOWHERE = "nowhere"  # each pass reads global memory: rows that are read once, or whose blocks need nothing of each other


_derived: Callable[[], Any] = functools.partial(field, init=False, repr=False, compare=False)


@dataclass(frozen=True)
class RowPlan:
    """Distributes rows along the last axis over threads.

    A row is split into a slice for each of `blocks` blocks, a slice into vectors. In one step every thread that shares the
    slice has one vector: thread p has the vectors p, p + `threads`, and so on. Up to 32 threads are lanes of a warp; a block is
    then one warpgroup with many rows. More threads are all threads of a block, which has one row or a slice of one. In one step
    a warpgroup holds an array of `shape`: part of its rows, or of the shares that its four warps have of one row.

    If the rows of an array do not start where a line of the cache does, the vectors of a whole block still do: they start up to
    `line - 1` elements before the slice, because a warp that touches one line more than it must is slower. Elements outside the
    slice are filled. Where in its line a row starts depends on the number of the row: see `RowMemory.sums_in_order`.

    The fields after `exchanged` follow from those before.
    """

    cols: int  # elements of a row
    vector: int  # elements of one load or store of a thread: a power of two, at most 16 bytes
    threads: int  # threads of a block that share a row: a power of two up to 32, lanes of one warp, or a multiple of 128
    rows_per_lanes: int = 1  # rows of each group of lanes, one after the other; 1 if a row takes a whole block
    blocks: int = 1  # blocks that share a row; up to 16 form a cluster and exchange states through distributed shared memory
    storage: Storage = Storage.REGISTERS
    unroll: int = 0  # steps in one iteration of a loop; in registers steps in one piece of straight code, or 0 for all
    persistent_blocks: int = 0  # blocks that take slices of long rows by tickets (`grid`); 0 if each has the slice of its index
    is_stored: bool = True  # True if a result is as large as the rows, so that elements are stored where they were loaded
    exchanged: int = 2  # most numbers that a warp tells the others of each row at one time

    takes_block: bool = _derived()  # True if all threads of a block share one row
    cluster: int = _derived()  # blocks of a cluster
    warpgroups: int = _derived()  # of a block
    lanes: int = _derived()  # lanes of a warp that share a row
    block_rows: int = _derived()  # rows of a block
    warps: int = _derived()  # warps that share a row of a whole block, in all blocks of the cluster
    shape: tuple[int, int] = _derived()  # what a warpgroup holds in one step: rows, or its warps, by elements
    line: int = _derived()  # elements of a line of 128 bytes, if a vector has 16 bytes
    has_whole_vectors: bool = _derived()  # True if rows consist of whole vectors
    is_shifted: bool = _derived()  # True if slices start elsewhere than vectors may
    is_joined: bool = _derived()  # True if a thread joins vectors of two steps, so that they end where they do in the slice
    slice_lines: int = _derived()  # lines of a slice; the last slice may end inside a line
    n_longer_slices: int = _derived()  # number of the first slices, which have one line more
    step_cols: int = _derived()  # elements that the threads of a block, or the lanes of a row, have in one step
    steps: int = _derived()  # vectors of a slice that a thread holds; the last of them may lie beyond the end
    whole_steps: range = _derived()  # steps in which all threads have whole vectors of any slice
    looped_steps: range = _derived()  # steps that a loop goes over
    is_exact: bool = _derived()  # True if Pallas can load and store rows
    stages: int = _derived()  # copies of the slots: slices that a block may hold at a time

    def __post_init__(self):
        cols, vector, threads, blocks = self.cols, self.vector, self.threads, self.blocks
        put = vars(self).update  # the dataclass is frozen
        cluster, stages = (1, 2) if self.persistent_blocks else (blocks, 1)
        put(takes_block=threads > WARP, cluster=cluster, stages=stages)
        put(warpgroups=max(1, threads // (WARP * WARPS)), lanes=min(threads, WARP), step_cols=threads * vector)
        put(block_rows=1 if self.takes_block else WARPS * (WARP // self.lanes) * self.rows_per_lanes)
        put(warps=WARPS * self.warpgroups * cluster)
        put(shape=(WARPS if self.takes_block else self.block_rows, self.lanes * vector))

        put(line=8 * vector, has_whole_vectors=cols % vector == 0)
        put(is_shifted=self.takes_block and cols % self.line != 0)
        # Elements that are read in a loop, kept nowhere and not stored at their place can be put in order in no other way.
        put(is_joined=self.is_shifted and self.storage == Storage.NOWHERE and not self.is_stored)
        slice_lines, n_longer_slices = divmod(-(-cols // self.line), blocks)
        put(slice_lines=slice_lines, n_longer_slices=n_longer_slices)

        line, is_shifted, step_cols = self.line, self.is_shifted, self.step_cols
        longest = cols if blocks == 1 else -(-cols // (blocks * line)) * line
        shortest = cols if blocks == 1 else max(0, (slice_lines - 1) * line + 1)
        is_ragged = is_shifted and not self.is_joined
        before = line - (vector if self.has_whole_vectors else 1) if is_ragged else 0  # of its first line
        steps = -(-(longest + before) // step_cols)
        whole_steps = range(1 if is_shifted else 0, shortest // step_cols)
        # Rows that are not in shared memory leave some steps to code of their own, because a branch in a loop makes it slow.
        looped_steps = range(steps) if self.storage == Storage.SHARED else whole_steps
        if self.is_joined:
            looped_steps = range(whole_steps.stop - 1)
        put(steps=steps, whole_steps=whole_steps, looped_steps=looped_steps)
        put(is_exact=cols == steps * step_cols and blocks == 1 and self.storage != Storage.SHARED)

    def describe(self) -> str:
        if not self.takes_block:
            return f"{self.block_rows} rows a block, {_counted(self.threads, 'lane')} a row, in {self.storage.value}"
        how = f"{self.threads} threads a block, rows in {self.storage.value}"
        if self.storage == Storage.NOWHERE:
            how = f"{self.threads} threads a block, rows read in a loop"
        if self.persistent_blocks:
            return f"{self.blocks} slices a row over {self.persistent_blocks} blocks of the grid, {how}"
        return f"a cluster of {self.blocks} blocks a row, {how}" if self.blocks > 1 else f"a block a row, {how}"

    def count(self, outer: int) -> int:
        """Returns the number of rows of an array."""
        return outer

    def view(self, outer: int) -> tuple[int, ...]:
        """Returns the shape in which kernels see an array, unless its rows end with their steps."""
        return (outer, self.cols)

    @property
    def allows_either(self) -> bool:
        """True if results may be `Either`: with one row in the block, code of its own for each case is worth its length."""
        return self.takes_block and not self.persistent_blocks

    # Shared memory.

    @property
    def slot_elements(self) -> int:
        """Elements that a block holds in shared memory, with those that fill the last steps."""
        return self.stages * self.steps * self.step_cols

    @property
    def slot_shape(self) -> tuple[int, ...]:
        """Shape of the shared memory for an operand: the part of each warpgroup in each step of each stage."""
        return (self.stages * self.steps * self.warpgroups, *self.shape)

    @property
    def exchange_shape(self) -> tuple[int, int]:
        """Shape of float32 in shared memory by which warps exchange values: some of each warp, for each of two rounds."""
        return (2 * self.exchanged, self.warps)

    @property
    def order_shape(self) -> tuple[int] | None:
        """Shape of float32 in shared memory for `RowMemory.sums_in_order`: two sums of each thread, a maximum of each warp."""
        return (2 * self.threads + WARPS * self.warpgroups,) if self.is_shifted else None

    @property
    def scratch_bytes(self) -> int:
        """Bytes of shared memory for exchanges and orders."""
        return 4 * sum(map(math.prod, filter(None, [self.exchange_shape, self.order_shape])))

    # Registers.

    @functools.cached_property
    def layout(self):
        """Places of the elements of `shape` in registers: vectors, with a row in the lanes of one warp."""
        rows, width = WARP // self.lanes, self.shape[1]
        return tiled(((WARPS * rows, width), (rows, width), (self.vector,)), (-5,), (-3, -2))

    @functools.cached_property
    def row_layout(self):
        """Places of a value for each row, or warp, in every lane that shares it."""
        return self.layout.reduce(1)


@dataclass(frozen=True)
class ColumnPlan:
    """Distributes rows along `cols` of an array `[outer, cols, inner]` over threads.

    A block has `width` neighbouring rows, a tile. In one step a thread has a vector of `inner` at one of `height` places along
    the rows. Blocks of a cluster have their places in turn; blocks of the grid share a tile in slices, one below another,
    because what they hold at one time should be close together.
    """

    cols: int  # elements of a row
    inner: int  # rows that are neighbours in memory
    vector: int  # neighbouring rows in one load or store of a thread: a power of two, at most 16 bytes
    threads: int  # of a block, a multiple of 128
    lanes: int  # of a warp along `inner`, a power of two; the others are at other places along the rows
    blocks: int = 1  # see `RowPlan`, also for what follows
    storage: Storage = Storage.SHARED
    unroll: int = 1
    persistent_blocks: int = 0
    exchanged: int = 2

    # What a `RowPlan` says of rows, said of tiles.
    block_rows: ClassVar[int] = 1  # a block has one tile
    takes_block: ClassVar[bool] = True
    allows_either: ClassVar[bool] = False  # the rows of a tile may differ in the condition
    has_whole_vectors: ClassVar[bool] = True  # `vector` divides `inner`
    is_shifted: ClassVar[bool] = False  # slices start where vectors may
    is_exact: ClassVar[bool] = False
    order_shape: ClassVar[None] = None  # the lane of an element does not depend on the number of the tile

    def describe(self) -> str:
        how = f"tiles of {self.width} neighbouring rows, {self.threads} threads a block"
        how += ", rows read in a loop" if self.storage == Storage.NOWHERE else f", rows in {self.storage.value}"
        if self.persistent_blocks:
            return f"{self.blocks} slices a tile over {self.persistent_blocks} blocks of the grid, {how}"
        return f"a cluster of {self.blocks} blocks a tile, {how}" if self.blocks > 1 else how

    def count(self, outer: int) -> int:
        """Returns the number of tiles of an array."""
        return outer * self.tiles

    def view(self, outer: int) -> tuple[int, int]:
        """Returns the shape in which kernels see an array."""
        return (outer * self.cols, self.inner)

    @property
    def width(self) -> int:
        """Rows of a tile."""
        return self.lanes * self.vector

    @property
    def tiles(self) -> int:
        """Tiles that cover all of `inner`."""
        return -(-self.inner // self.width)

    @property
    def cluster(self) -> int:
        return 1 if self.persistent_blocks else self.blocks

    @property
    def warpgroups(self) -> int:
        return self.threads // (WARP * WARPS)

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return WARPS * self.warpgroups

    # Places along the rows.

    @property
    def height(self) -> int:
        """Places between two steps of a thread."""
        places = self.threads // self.lanes
        return places if self.persistent_blocks else places * self.blocks

    @property
    def apart(self) -> int:
        """Places between the first one of a block and that of the next block."""
        places = self.threads // self.lanes
        return places * self.steps if self.persistent_blocks else places

    @functools.cached_property
    def steps(self) -> int:
        return -(-self.cols // (self.threads // self.lanes * self.blocks))

    @functools.cached_property
    def whole_steps(self) -> range:
        """Steps in which every place is one of the rows."""
        of_all = self.threads // self.lanes * self.blocks  # places of a step of all blocks
        whole = self.cols // of_all
        return range(whole) if self.cols == whole * of_all or not self.persistent_blocks else range(0)

    @property
    def looped_steps(self) -> range:
        return range(self.steps)

    @property
    def group(self) -> int:
        """Blocks of the grid whose states are merged first, a power of two."""
        return 1 << max(4, self.blocks.bit_length() // 2)

    @property
    def groups(self) -> int:
        """Groups of a tile."""
        return -(-self.blocks // self.group)

    # Shared memory.

    @property
    def stages(self) -> int:
        return 2 if self.persistent_blocks else 1

    @property
    def slot_elements(self) -> int:
        return self.stages * self.steps * self.threads * self.vector

    @property
    def slot_shape(self) -> tuple[int, ...]:
        return (self.stages * self.steps * self.warpgroups, *self.shape)

    @property
    def exchange_shape(self) -> tuple[int, int]:
        """Shape of float32 in shared memory for some values of each row, of each warp and block, for each of two rounds."""
        return (2 * self.exchanged, (self.warps + (self.cluster if self.cluster > 1 else 0)) * self.width)

    @property
    def scratch_bytes(self) -> int:
        return 4 * math.prod(self.exchange_shape)

    # Registers.

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of a warpgroup's part of one step: the tile's rows for each of its warps, by places."""
        return (WARPS * self.width, WARP // self.lanes)

    @functools.cached_property
    def layout(self):
        tiles = (self.shape, (self.width, self.shape[1]), (self.vector, 1))
        return tiled(tiles, (-6,), (-3, -4), -2)

    @functools.cached_property
    def row_layout(self):
        return self.layout.reduce(1)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
