"""Plans of kernels over rows for Hopper: tables and models, as measured on an H100 and an H200.

The measurements are in `benchmarks/results/h200/softmax.csv` and `softmax_sweep.csv`. The number of rows does not matter to a
plan, so the bits of a row do not depend on it.
"""

import math
from dataclasses import replace

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu.emit import WARP
from jaxsoftmax._gpu.rows.plan import MOST_OF_A_CLUSTER, ColumnPlan, RowPlan, Storage
from jaxsoftmax._gpu.rows.staged import StagedPlan

_RESERVED = 6144  # bytes of shared memory for everything except rows and their states
# Longest rows that registers hold, by bytes of an element and operands held.
_IN_REGISTERS = {(4, 1): 65536, (4, 2): 65536, (2, 1): 65536, (2, 2): 8192}
# Columns per block above which a cluster doubles its blocks; columns per block of the largest cluster above which the grid
# shares rows.
_SHARES = {(4, 1): (16384, 11264), (4, 2): (12288, 8192), (2, 1): (20480, 24576), (2, 2): (25600, 25600)}
_STAGE = {4: 32768, 2: 24576}  # bytes of a stage of a block of the grid, by bytes of an element

# Bytes of a tile of rows along another axis.
_MOST_OF_A_BLOCK = 102400
_WANTED_OF_A_BLOCK = 40960
_MOST_OF_128_THREADS = 65536


def plan_rows(problem: RowProblem, target: Target, devices: bool = False) -> RowPlan | ColumnPlan | Refusal:
    """Plans rows along any axis; refuses rows that do not fit shared memory. `devices` says that devices share the rows."""
    if devices:  # blocks of the grid hold a device's part of a row, however short it is
        size = len(problem.read) * max(2048, problem.cols * problem.widest)
        plan = _grid(problem, target, min(_STAGE[problem.widest], size))
    else:
        plan = _columns(problem, target) if problem.inner > 1 else _rows(problem, target)
    if isinstance(plan, Refusal):
        return plan
    if problem.exchanged != plan.exchanged:
        plan = replace(plan, exchanged=problem.exchanged)
    if isinstance(plan, StagedPlan) or plan.storage != Storage.SHARED:
        return plan
    if plan.persistent_blocks and plan.blocks > (held := plan.stages * plan.persistent_blocks):
        return Refusal(f"rows of {problem.cols} entries are {plan.blocks} slices, and the grid holds {held}")
    needed = plan.slot_elements * sum(problem.read) + plan.scratch_bytes
    if needed > target.shared_memory - _RESERVED:
        return Refusal(f"rows of {problem.cols} entries need {needed} bytes of shared memory in each of {plan.blocks} blocks")
    return plan


def most_blocks(target: Target) -> int:
    """Returns the most blocks that a cluster may have.

    Its blocks run on one of eight parts of the GPU, which must have a multiprocessor for each. Where any GPU is meant, as in an
    export without one at hand, clusters have 8 blocks, which all of them can run.
    """
    return MOST_OF_A_CLUSTER if target.name is not None and target.multiprocessors >= 132 else 8


def _rows(problem: RowProblem, target: Target) -> RowPlan | Refusal:
    """Plans rows along the last axis.

    Short rows are inside a warp, and a block has several, because a block takes as long to start as 3 KiB take to be read. In
    registers, which are fastest, a thread holds up to 128 bytes of a row. Where that takes too many threads, and in 16 bits
    where rows do not start with a line of the cache, rows are in shared memory, with up to 192 elements for each thread. A
    multiprocessor then has several blocks: some load while others store. Long rows are shared by the blocks of a cluster,
    longer ones by the grid. Long rows that are read once and not written are held nowhere, unless a second sum needs the first.
    """
    cols, itemsize, is_streamed = problem.cols, problem.widest, not problem.written
    widest, operands = 16 // itemsize, len(problem.read)
    vector = math.gcd(cols, widest)
    if _is_in_pieces(problem):
        return RowPlan(cols, widest, WARP, unroll=_steps_of_a_piece(problem), is_stored=False)
    if cols * itemsize <= _bytes_in_a_warp(problem) or (cols <= 1024 and vector < widest):
        return _within_a_warp(problem, vector)
    if is_streamed and not problem.is_read_again and not problem.has_mask and cols > (8192 if itemsize == 4 else 20480):
        threads = 256 if cols * itemsize > 2**20 else 128
        # Entropies of 8192 x 151936 bfloat16 take 612 us by a block a row, 634 by two, 706 by four (H200). If rows are few,
        # several are faster.
        share = 131072 if itemsize == 2 and problem.reduces == "exponents" else 65536
        blocks = min(8, _power(cols / share))
        return RowPlan(cols, 4, threads, blocks=blocks, storage=Storage.NOWHERE, unroll=16 // itemsize, is_stored=False)
    has_whole_lines = cols % (8 * widest) == 0
    # A thread has too few registers for both the scores and their exponentials, or for the mask, of longer rows.
    few = problem.is_masked or problem.keeps_scores
    in_registers = 131072 if (itemsize, operands) == (4, 1) and has_whole_lines else _IN_REGISTERS[itemsize, operands]
    is_short = problem.fits_registers and cols <= (8192 if few else in_registers)
    if is_short and (has_whole_lines or itemsize == 4 or problem.is_masked):
        per_thread = 128 // itemsize  # elements
        most_threads = 512 if itemsize == 4 and (has_whole_lines or problem.reduces != "nothing") else 256
        threads = min(most_threads, max(128, _power(cols / per_thread)))
        return RowPlan(cols, widest, threads, blocks=_power(cols / (per_thread * threads)), is_stored=not is_streamed)
    return _shared(problem, target, has_whole_lines)


def _shared(problem: RowProblem, target: Target, has_whole_lines: bool) -> RowPlan | Refusal:
    """Plans rows in the shared memory of a block, a cluster or the grid."""
    cols, size, most = problem.cols, (problem.widest, len(problem.read)), most_blocks(target)
    widest, is_stored = 16 // problem.widest, bool(problem.written)
    share, longest = _SHARES[size]
    if cols > most * longest:
        if problem.reduces == "nothing":  # blocks need nothing of each other
            threads = 2048 // widest
            return RowPlan(cols, widest, threads, blocks=most, storage=Storage.NOWHERE, unroll=4, is_stored=is_stored)
        return _grid(problem, target, _STAGE[problem.widest])
    blocks = min(most, _power(cols / share))
    if size == (2, 1) and has_whole_lines and cols > 65536:  # as fast, and faster if rows are few
        blocks = most
    # A float32 row gives each of 256 threads up to 64 elements. A row of 16 bits gives each of 128 up to 192, because
    # instructions count as much as bytes there (measured on an H200: `benchmarks/results/h200/softmax_sweep.csv`).
    threads = 256 if cols > 8192 and size != (2, 1) else 128
    unroll = 4 if cols > 200_000 else 1 if size == (2, 2) and cols > 8192 else 2
    return RowPlan(cols, widest, threads, blocks=blocks, storage=Storage.SHARED, unroll=unroll, is_stored=is_stored)


def _grid(problem: RowProblem, target: Target, stage: int) -> RowPlan | Refusal:
    """Plans slices of up to `stage` bytes that blocks of the grid hold in shared memory."""
    cols, itemsize = problem.cols, problem.widest
    vector, threads = 16 // itemsize, 128
    step, line = threads * vector, 8 * vector
    held = stage // (step * itemsize * len(problem.read)) * step
    blocks = -(-cols // (held if cols % line == 0 else held - line))  # slices may start inside a line
    resident = _resident(target, stage)
    # The last slices of longer rows would leave most blocks waiting.
    if 3 * blocks > 4 * resident:  # a row is then more than two thirds of the slices that all blocks hold, each in two stages
        return Refusal(
            f"rows of {cols} entries are {blocks} slices, more than two thirds of the {2 * resident} that the grid holds"
        )
    options = {"persistent_blocks": resident, "is_stored": bool(problem.written)}
    return RowPlan(cols, vector, threads, blocks=blocks, storage=Storage.SHARED, unroll=4, **options)


def _resident(target: Target, stage: int) -> int:
    """Returns the number of blocks that run at a time, if each has two stages of shared memory."""
    return target.multiprocessors * max(1, target.shared_memory // (2 * stage + _RESERVED))


def _bytes_in_a_warp(problem: RowProblem) -> int:
    """Returns the bytes of the longest rows that stay inside a warp."""
    cols, itemsize, operands = problem.cols, problem.widest, len(problem.read)
    is_read_once = not problem.written and operands == 1
    if not _is_plain(problem) and itemsize == 2 and cols % 64:
        # log_softmax keeps scores beside their exponents: 87381 x 3000 behind a factor 319 us, by a block 261 (H200).
        if operands == 1 and not (problem.keeps_scores and problem.needs_end and cols % 8 == 0):
            return 8192
        # kl_divergence of 87381 x 3001 371 us, by a block 400; of 65536 x 4095 413 and 370.
        if operands == 2 and problem.reduces == "exponents":
            return 6144
    return 2048 if _is_plain(problem) or (not is_read_once and cols % 1024 == 0) else 4096


def _is_in_pieces(problem: RowProblem) -> bool:
    """Tells whether a warp holds a row of up to 4096 elements of 16 bits, and has a piece of code for each one or two steps.

    Several warps exchange what they have: 65536 x 4096 log_probs with entropies 148 us instead of 124, and kl_divergence 304
    instead of 261 (bfloat16). If rows are few they are faster: 64 rows 2.7 us instead of 3.4, and 2.9 instead of 4.8. States
    alone are as fast either way, unless a block tells elements from those beyond the end: 87381 x 3000 logsumexp with scales
    151 us instead of 116 (H200).
    """
    cols = problem.cols
    step_cols = 1024  # elements that 128 threads of a block have in one step
    is_whole = cols % 8 == 0 and not problem.has_mask
    if not is_whole or cols > 4096 or not _steps_of_a_piece(problem):
        return False
    if problem.reduces == "exponents":
        return not problem.is_read_again  # js_divergence of 4096 columns would spill
    return problem.needs_end and len(problem.read) == 1 and cols > 2048 and cols % step_cols != 0


def _steps_of_a_piece(problem: RowProblem) -> int:
    """Returns the steps of a piece of code of a warp that holds rows of 16 bits; 0 for code in one piece.

    Shorter rows are as fast in one piece. 262144 x 1024 log_probs with scales 154 us, in pieces of two steps 164; kl_divergence
    289 us, of one step 258, and of 268435 x 1000 287 and 350 (bfloat16, H200).
    """
    if problem.widest != 2 or problem.written:
        return 0
    if len(problem.read) == 2:
        return 1 if problem.cols >= 1024 else 0
    return 2 if problem.cols > 1024 else 0


def _is_plain(problem: RowProblem) -> bool:
    """Tells whether short rows reach the bandwidth as they are, in registers: small arrays of them are then fastest so, too."""
    is_read_once = not problem.written and len(problem.read) == 1
    return problem.has_mask or (problem.widest == 4 and not is_read_once)


def _within_a_warp(problem: RowProblem, vector: int) -> RowPlan:
    """Plans rows inside a warp.

    Rows of whole vectors are loaded to registers, by the number of lanes that leaves the fewest idle; others pass through
    shared memory. A block has enough rows for a thread to wait for a few loads. Plain rows are all loaded to registers.
    """
    cols, widest, operands = problem.cols, 16 // problem.widest, len(problem.read)
    is_single = widest == 8 and vector == 1  # 16-bit elements: eight for each lane, of one row
    if _is_plain(problem):
        lanes = min(WARP, 1 << max(1, (cols // (4 if is_single else vector)).bit_length() - 1))
    else:
        lanes = min(_lanes_of(cols, widest), key=lambda lanes: (max(4, lanes) * _share(cols, widest, lanes), -lanes))
        share = _share(cols, widest, lanes)
        if vector < widest or lanes * share > 1.12 * cols or share > 8 * widest:
            return _staged(problem)
    per_lane = 2 * widest  # elements
    if operands == 2:
        per_lane = widest
    elif not problem.written:
        per_lane = 4 * widest
    rows = 1 if is_single else max(1, per_lane // _share(cols, vector, lanes))
    return RowPlan(cols, vector, lanes, rows, is_stored=bool(problem.written))


def _staged(problem: RowProblem) -> StagedPlan:
    """Plans rows through shared memory, in vectors of few words, because a body is written out for each word."""
    cols = problem.cols
    candidates = [(lanes, vector) for vector in (8, 4, 2) for lanes in _lanes_of(cols, vector)]
    candidates = [(lanes, vector) for lanes, vector in candidates if _share(cols, vector, lanes) <= 16 * vector]
    lanes, vector = min(candidates, key=lambda pair: pair[0] * _share(cols, pair[1], pair[0]) * (1 + 0.15 / pair[1]))
    rows = max(1, min(8, 32 // _share(cols, vector, lanes)))
    options = {"unroll": _steps_of_a_piece(problem), "is_stored": bool(problem.written), "itemsize": problem.widest}
    return StagedPlan(cols, vector, lanes, rows, **options)


def _lanes_of(cols: int, vector: int) -> list[int]:
    """Lists the numbers of lanes that may share a row of vectors, so that each holds few elements."""
    return [1 << k for k in range(6) if k == 5 or _share(cols, vector, 1 << k) <= 40]


def _share(cols: int, vector: int, lanes: int) -> int:
    """Returns the number of elements that a lane has of a row."""
    return -(-cols // (lanes * vector)) * vector


def _columns(problem: RowProblem, target: Target) -> ColumnPlan:
    """Plans tiles of neighbouring rows that fill a line of the cache, or half of one, up to 40 KiB in a block.

    In 16 bits, and if no result is as large as the rows, a block of half lines has more elements of each row, which is worth
    more if rows are long. Where a cluster would hold less than half a line of them, blocks of the grid share a tile.
    """
    cols, itemsize, inner, most = problem.cols, problem.widest, problem.inner, most_blocks(target)
    operands, is_streamed = len(problem.read), not problem.written
    vector = math.gcd(inner, 16 // itemsize)
    size = vector * itemsize * operands  # bytes of an element of a lane's rows
    line = 128 // (vector * itemsize)  # lanes
    fills = itemsize == 4 or (cols * line * size <= 2**18 and (inner % (line * vector) == 0 or inner > 8 * line * vector))
    touched = line if fills and not is_streamed else line // 2
    lanes = widest = min(WARP // 2, touched, _power(inner / vector))
    while lanes * vector * itemsize > 64 and cols * lanes * size > most * _MOST_OF_A_BLOCK:
        lanes //= 2
    if cols * lanes * size <= most * _MOST_OF_A_BLOCK:
        blocks = min(most, _power(cols * lanes * size / _WANTED_OF_A_BLOCK))
        threads = 128 if cols * lanes * size <= blocks * _MOST_OF_128_THREADS else 256
        return ColumnPlan(cols, inner, vector, threads, lanes, blocks, unroll=8 // itemsize)
    if is_streamed or problem.reduces == "nothing":  # read once, or by blocks that need nothing of each other
        return ColumnPlan(cols, inner, vector, 128, widest, most, Storage.NOWHERE, unroll=4)
    stage = 49152 if operands == 2 else 32768  # bytes, of all operands
    threads = 128 if stage <= 32 * 128 * size else 256
    resident = _resident(target, stage)
    plans = []  # wide tiles, unless they have more slices than blocks run at a time
    for width in (widest, lanes):
        blocks = -(-cols // (stage // (threads * size) * (threads // width)))
        plans.append(ColumnPlan(cols, inner, vector, threads, width, blocks, unroll=2, persistent_blocks=resident))
    return plans[0] if plans[0].blocks <= resident else plans[1]


def _power(least: float) -> int:
    """Returns the least power of two that is no less."""
    return 1 << max(0, math.ceil(math.log2(least)))
