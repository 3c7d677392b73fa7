"""A GPU that runs a `Program`: threads of all blocks of a grid at once, their memory, and what they wait for.

Threads that are at the same block of instructions execute it together. There are two teams: one goes on for as long as some of
its threads can, and then the other. In some blocks of a grid they are of warps, in others of warpgroups, or of whole blocks. So
what needs a barrier and has none reads what is not there yet.
Memory starts with garbage, and what is outside of all arrays is not touched.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from . import program as programs

WARP = 32
GARBAGE = 0x7FE1DEAD  # NaN, and an index of nothing
_BASE = 0x7F0000000000  # address of global memory
START = 1024  # address of a block's shared memory, as its threads see it
_APART = 4096  # bytes between arrays
_PATIENCE = 20000  # rounds in which all threads wait
_MOST = 100_000  # blocks of instructions that are executed
_AHEAD = 40  # blocks that a team may execute while others could catch up
_TICK = 1000  # nanoseconds of one round
_BARRIERS = 16
_SHIFTS = {1: 0, 2: 1, 4: 2, 8: 3}


class Memory:
    """Memory: bytes that belong to arrays, and bytes between them."""

    def __init__(self, size: int):
        words = np.full(-(-size // 8) * 2, GARBAGE, np.uint32)
        self.bytes = words.view(np.uint8)
        self._views = {size: words.view(f"u{size}") for size in (1, 2, 4, 8)}

    def load(self, places: np.ndarray, size: int) -> np.ndarray:
        return self._views[size][places >> _SHIFTS[size]]

    def store(self, places: np.ndarray, values: np.ndarray, size: int) -> None:
        self._views[size][places >> _SHIFTS[size]] = values


class Machine:
    """Runs a kernel: the state of its threads and its memory."""

    def __init__(self, kernel: Any):
        program, grid, cluster, threads, shared = kernel.program, kernel.grid, kernel.cluster, kernel.threads, kernel.shared
        assert threads % WARP == 0
        self.program, self.threads, self.shared_size = program, threads, shared
        self.blocks = math.prod(grid)
        self.count = count = self.blocks * threads
        self.cluster_blocks = math.prod(cluster)
        assert cluster[1] == cluster[2] == 1, cluster
        assert grid[0] % cluster[0] == 0, (grid, cluster)
        everyone = np.arange(count, dtype=np.int64)
        self.block_of, self.warp_of = everyone // threads, everyone // WARP
        self.cluster_of = self.block_of // self.cluster_blocks
        by_chance = np.random.default_rng(0).random(count // WARP)[self.warp_of] < 0.5
        in_turn = self.warp_of // 4 % 2 == self.block_of // 3 % 2
        self.team_of = np.choose(self.block_of % 3, [by_chance, in_turn, self.block_of // 3 % 2 == 0])
        x, y = self.block_of % grid[0], self.block_of // grid[0]
        self.registers: list[Any] = [None] * len(program.dtypes)
        of_slots = {
            programs.THREAD: everyone % threads,
            programs.BLOCK_X: x,
            programs.BLOCK_Y: y % grid[1],
            programs.BLOCK_Z: y // grid[1],
            programs.LANE: everyone % WARP,
            programs.RANK: x % self.cluster_blocks,
        }
        for slot, values in of_slots.items():
            self.registers[slot] = values.astype(np.uint32)
        self.held: list[Any] = [None] * len(program.dtypes)
        self.held[programs.MACHINE] = self
        for slot, value in program.constants.items():
            self.held[slot] = value
        # One number for each barrier and block: how many threads have come, and how often all had; also of clusters.
        self._come, self._rounds, self._votes, self._counted = np.zeros((4, self.blocks * _BARRIERS), np.int64)
        self._seen = np.zeros((count, _BARRIERS), np.int64)
        self._cluster_come = np.zeros(self.blocks, np.int64)
        self._cluster_rounds = np.zeros(self.blocks, np.int64)
        self._cluster_seen = np.full(count, -1)
        self.everyone, self.now = everyone, everyone  # `now`: the threads that execute
        self.shared = Memory(shared * self.blocks)
        # The state of mbarriers: an entry for each 8 bytes of shared memory.
        self._pending, self._arrivals, self._bytes, self._phase = np.zeros((4, -(-shared * self.blocks // 8)), np.int64)
        self._copies: list[tuple[np.ndarray, ...]] = []
        self._group = np.zeros(count, np.int64)
        self.time = 0
        self.has_changed = False  # something for which threads may wait

    def allocate(self, arrays: Sequence[np.ndarray | tuple[int, bool]]) -> list[tuple[int, slice]]:
        """Puts arrays into global memory, or garbage of a number of bytes, and returns the address and the offset of each."""
        starts, at = [], _APART
        for array in arrays:
            starts.append(at)
            at += -(-max(1, self._size(array)) // _APART) * _APART + _APART
        self.memory = Memory(at)
        self._owned = np.zeros(len(self.memory.bytes), bool)
        found = []
        for start, array in zip(starts, arrays, strict=True):
            place = slice(start, start + self._size(array))
            self._owned[place] = True
            if isinstance(array, np.ndarray):
                self.memory.bytes[place] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
            found.append((_BASE + start, place))
        return found

    @staticmethod
    def _size(array: Any) -> int:
        return array.nbytes if isinstance(array, np.ndarray) else array

    def run(self) -> None:
        """Executes the program to its end in all threads."""
        ready: list[dict[int, list[np.ndarray]]] = [{}, {}]
        for team, places in enumerate(ready):
            own = self.everyone[self.team_of == bool(team)]
            if own.size:
                places[0] = [own]
        waiting: list[tuple[int, int, np.ndarray]] = []
        team, idle, executed, since = 0, 0, 0, 0
        with np.errstate(all="ignore"):
            while True:
                first, others = (min(ready[own], default=math.inf) for own in (team, 1 - team))
                is_due = executed - since > _AHEAD and any(own == team and place < first for own, place, _ in waiting)
                if is_due and others < first:  # some of the team wait for those: all go on together, which takes less time
                    team, since = 1 - team, executed
                if (found := self._next(ready[team])) is None:
                    team, since = 1 - team, executed
                    found = self._next(ready[team])
                if found is not None:
                    executed += 1
                    assert executed < _MOST, f"{self.program.name}: a loop without an end"
                    place, self.now = found
                    for target, threads in self._execute(place):
                        if threads.size and target <= place and self.program.blocks[place].waits:
                            waiting.append((team, target, threads))
                        elif threads.size:
                            ready[team].setdefault(target, []).append(threads)
                            idle = 0
                    if self.has_changed:
                        self.has_changed = False
                        for own, target, threads in waiting:
                            ready[own].setdefault(target, []).append(threads)
                        waiting = []
                    continue
                stuck = sorted({*ready[0], *ready[1]})
                if not waiting:
                    assert not stuck, f"{self.program.name}: threads of a warp that do not come to blocks {stuck}"
                    break
                idle += 1
                assert idle < _PATIENCE, f"{self.program.name}: all threads wait, in blocks {sorted({w[1] for w in waiting})}"
                self.time += _TICK
                for own, place, threads in waiting:
                    ready[own].setdefault(place, []).append(threads)
                waiting = []
        assert not self._come.any(), f"{self.program.name}: a barrier to which not all threads have come"

    def _next(self, places: dict[int, list[np.ndarray]]) -> tuple[int, np.ndarray] | None:
        """Returns the first block that threads of a team can execute, and these threads."""
        for place in sorted(places):
            parts = places[place]
            threads = np.sort(np.concatenate(parts)) if len(parts) > 1 else parts[0]
            rest = threads[:0]
            if self.program.blocks[place].converged:
                warps = threads // WARP
                if threads.size % WARP or (warps[::WARP] != warps[WARP - 1 :: WARP]).any():
                    whole = np.bincount(warps)[warps] == WARP
                    threads, rest = threads[whole], threads[~whole]
            if threads.size:
                if rest.size:
                    places[place] = [rest]
                else:
                    del places[place]
                return place, threads
        return None

    def _execute(self, place: int) -> list[tuple[int, np.ndarray]]:
        """Executes a block, and returns where threads go then."""
        block, held, registers, now = self.program.blocks[place], self.held, self.registers, self.now
        is_all = now.size == self.count
        for slot in block.inputs:
            values = registers[slot]
            if values is None:
                values = registers[slot] = self._garbage(slot)
            held[slot] = values if is_all else values[now]
        for function, results, operands in block.code:
            found = function(*[held[slot] for slot in operands])
            if results.__class__ is int:
                held[results] = found
            else:
                for slot, values in zip(results, found, strict=True):
                    held[slot] = values
        for slot in block.outputs:
            values = held[slot]
            if is_all and values.shape == (self.count,):
                registers[slot] = values
            else:
                old = registers[slot]
                registers[slot] = self._garbage(slot) if old is None else old.copy()
                registers[slot][now] = values
        kind, *rest = block.end
        if kind == "jump":
            return [(rest[0], now)]
        if kind == "exit":
            return []
        decided = _broadcast(held[rest[0]], now.shape)
        if kind == "branch":
            if decided.all():
                return [(rest[1], now)]
            return [(rest[1], now[decided]), (rest[2], now[~decided])]
        if kind == "wait":
            return [(rest[1], now[decided]), (place, now[~decided])]
        _, cases, default = rest
        passed = []
        left = np.ones(now.shape, bool)
        for value, target in cases.items():
            is_it = decided == value
            left &= ~is_it
            passed.append((target, now[is_it]))
        return [*passed, (default, now[left])]

    def _garbage(self, slot: int) -> np.ndarray:
        dtype = self.program.dtypes[slot]
        if dtype.kind == "b":
            return np.zeros(self.count, bool)
        words = np.full(self.count * max(1, dtype.itemsize // 4), GARBAGE, np.uint32)
        return words.astype(f"u{dtype.itemsize}").view(dtype) if dtype.itemsize < 4 else words.view(dtype)

    # Memory. Addresses are of 64 bits in global memory and of 32 in shared memory.

    def places(self, space: str, address: Any, size: int, now: np.ndarray) -> tuple[Memory, np.ndarray]:
        """Returns the memory of addresses and their offsets in it. Fails if one is outside of all arrays."""
        address = _broadcast(np.asarray(address), now.shape).astype(np.int64)
        if space == "global":
            found = address - _BASE
            inside = (found >= 0) & (found <= len(self._owned) - size)
            safe = np.where(inside, found, 0)
            inside &= self._owned[safe] & self._owned[safe + size - 1]
            memory = self.memory
        else:
            block, offset = self.block_of[now], address - START
            if space == "shared::cluster":
                rank = address >> 24
                assert (rank <= self.cluster_blocks).all(), "an address of no block of the cluster"
                first = block - block % self.cluster_blocks
                block = np.where(rank > 0, first + rank - 1, block)
                offset = (address & (1 << 24) - 1) - START
            inside = (offset >= 0) & (offset <= self.shared_size - size)
            found = offset + block * self.shared_size
            memory = self.shared
        if not inside.all():
            outside = int(address[~inside][0])
            raise AssertionError(f"{self.program.name}: {space} memory outside of all arrays, at {outside:#x}")
        assert not (found % size).any(), f"{self.program.name}: an address of {space} memory that is no multiple of {size}"
        return memory, found

    def load(self, space: str, address: Any, size: int, count: int, where: Any = True) -> list[np.ndarray]:
        """Loads vectors of words; they are 0 in threads that load none."""
        now, chosen, (address,) = self._chosen(where, address)
        memory, places = self.places(space, address, size * count, now)
        found = []
        for k in range(count):
            values = memory.load(places + k * size, size)
            if chosen is not None:
                whole = np.zeros(self.now.shape, values.dtype)
                whole[chosen] = values
                values = whole
            found.append(values)
        return found

    def store(self, space: str, address: Any, size: int, values: Sequence[Any], where: Any = True) -> None:
        now, _, (address, *values) = self._chosen(where, address, *values)
        memory, places = self.places(space, address, size * len(values), now)
        for k, value in enumerate(values):
            memory.store(places + k * size, bits(value), size)

    def _chosen(self, where: Any, *arrays: Any) -> tuple[np.ndarray, np.ndarray | None, list[Any]]:
        """Returns the threads that do something, their indices among those that execute, and their entries of arrays."""
        arrays = [np.asarray(array) for array in arrays]
        where = np.asarray(where)
        if where.all():
            return self.now, None, arrays
        chosen = np.flatnonzero(_broadcast(where, self.now.shape))
        return self.now[chosen], chosen, [array[chosen] if array.ndim else array for array in arrays]

    def atomic(self, operation: str, space: str, address: Any, value: Any, dtype: Any, where: Any = True) -> np.ndarray:
        """Updates memory, one thread after another, and returns the values from before."""
        now, chosen, (address, value) = self._chosen(where, address, value)
        size = np.dtype(dtype).itemsize
        memory, places = self.places(space, address, size, now)
        value = _broadcast(value, now.shape).view(dtype)
        if operation == "add" and np.dtype(dtype).kind == "u":
            old = self._add_to(memory, places, value, size)
            return old if chosen is None else self._whole(old, chosen)
        combine = {"add": np.add, "max": np.maximum, "min": np.minimum, "or": np.bitwise_or, "exch": lambda old, new: new}[
            operation
        ]
        old = np.zeros(now.shape, f"u{size}")
        for k in range(now.size):
            at = places[k : k + 1]
            old[k : k + 1] = before = memory.load(at, size)
            memory.store(at, combine(before.view(dtype), value[k : k + 1]).view(f"u{size}"), size)
        return old if chosen is None else self._whole(old, chosen)

    def _add_to(self, memory: Memory, places: np.ndarray, values: np.ndarray, size: int) -> np.ndarray:
        order = np.argsort(places, kind="stable")
        at, added = places[order], values[order]
        before = np.cumsum(added, dtype=added.dtype) - added
        first = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]])[: at.size])
        group = np.repeat(np.arange(first.size), np.diff([*first, at.size]))
        sums = memory.load(at, size) + before - before[first][group]
        last = np.append(first[1:], at.size)[: first.size] - 1
        memory.store(at[last], (sums + added)[last], size)
        old = np.empty_like(sums)
        old[order] = sums
        return old

    def _whole(self, values: np.ndarray, chosen: np.ndarray) -> np.ndarray:
        whole = np.zeros(self.now.shape, values.dtype)
        whole[chosen] = values
        return whole

    def of_block(self, address: Any, rank: Any) -> np.ndarray:
        """Returns the address of the same place in another block of the cluster."""
        assert (np.asarray(rank) < self.cluster_blocks).all(), f"{self.program.name}: a block that the cluster has not"
        own = np.asarray(address, np.uint32) & np.uint32((1 << 24) - 1)
        return (np.asarray(rank, np.uint32) + np.uint32(1) << np.uint32(24)) | own

    # What threads wait for.

    def arrive(self, barrier: Any, expected: int | None, vote: Any = None) -> None:
        """Arrives at a barrier of the block, for `expected` threads, or all of the block."""
        at = self._barrier(barrier)
        self._seen[self.now, at % _BARRIERS] = self._rounds[at]
        came = np.bincount(at, minlength=self._come.size)
        self._come += came
        if vote is not None:
            self._votes += np.bincount(at[_broadcast(vote, at.shape)], minlength=self._come.size)
        expected = self.threads if expected is None else expected
        reached = np.flatnonzero((came > 0) & (self._come >= expected))
        assert (self._come[reached] == expected).all(), f"{self.program.name}: too many threads at a barrier"
        self._come[reached] = 0
        self._rounds[reached] += 1
        self._counted[reached], self._votes[reached] = self._votes[reached], 0
        self.has_changed |= bool(reached.size)

    def _barrier(self, number: Any) -> np.ndarray:
        assert (np.asarray(number) < _BARRIERS).all()
        return self.block_of[self.now] * _BARRIERS + np.asarray(number).astype(np.int64)

    def has_passed(self, barrier: Any) -> np.ndarray:
        """Tells whether all threads have arrived at the barrier since this one has."""
        at = self._barrier(barrier)
        return self._rounds[at] > self._seen[self.now, at % _BARRIERS]

    def counted(self, barrier: Any) -> np.ndarray:
        """Counts the votes of the threads that arrived at the barrier."""
        return self._counted[self._barrier(barrier)].astype(np.uint32)

    def arrive_in_cluster(self) -> None:
        cluster = self.cluster_of[self.now]
        assert (self._cluster_seen[self.now] < 0).all(), f"{self.program.name}: a thread arrives twice in its cluster"
        self._cluster_seen[self.now] = self._cluster_rounds[cluster]
        np.add.at(self._cluster_come, cluster, 1)
        full = np.flatnonzero(self._cluster_come == self.threads * self.cluster_blocks)
        self._cluster_come[full] = 0
        self._cluster_rounds[full] += 1
        self.has_changed |= bool(full.size)

    def cluster_has_passed(self) -> np.ndarray:
        seen = self._cluster_seen[self.now]
        assert (seen >= 0).all(), f"{self.program.name}: a thread waits for its cluster, where it has not arrived"
        ready = self._cluster_rounds[self.cluster_of[self.now]] > seen
        self._cluster_seen[self.now[ready]] = -1
        return ready

    def _mbarrier(self, address: Any, where: Any, space: str = "shared") -> np.ndarray:
        now, _, (address,) = self._chosen(where, address)
        return self.places(space, address, 8, now)[1] // 8

    def init_mbarrier(self, address: Any, count: int, where: Any = True) -> None:
        at = self._mbarrier(address, where)
        self._pending[at], self._arrivals[at], self._bytes[at], self._phase[at] = count, count, 0, 0

    def arrive_at_mbarrier(self, address: Any, where: Any = True, expected: int = 0, space: str = "shared") -> None:
        at = self._mbarrier(address, where, space)
        np.add.at(self._bytes, at, expected)
        np.subtract.at(self._pending, at, 1)
        self._complete(at)

    def push(self, address: Any, size: int, values: Sequence[Any], barrier: Any, where: Any = True) -> None:
        """Stores to another block of the cluster, whose mbarrier counts the bytes."""
        self.store("shared::cluster", address, size, values, where)
        at = self._mbarrier(barrier, where, "shared::cluster")
        np.subtract.at(self._bytes, at, size * len(values))
        self._complete(at)

    def _complete(self, at: np.ndarray) -> None:
        assert (self._arrivals[at] > 0).all(), f"{self.program.name}: an mbarrier that is not there yet"
        assert (self._pending[at] >= 0).all(), f"{self.program.name}: too many arrive at an mbarrier"
        at = np.unique(at)
        done = at[(self._pending[at] == 0) & (self._bytes[at] == 0)]
        self._phase[done] += 1
        self._pending[done] = self._arrivals[done]
        self.has_changed |= bool(done.size)

    def mbarrier_has_passed(self, address: Any, parity: Any) -> np.ndarray:
        at = self._mbarrier(address, True)
        assert (self._arrivals[at] > 0).all(), f"{self.program.name}: an mbarrier that is not there yet"
        return self._phase[at] % 2 != parity

    # Copies that arrive only where a thread waits for them.

    def start_copy(self, target: Any, source: Any, size: int, where: Any = True) -> None:
        now, _, (target, source) = self._chosen(where, target, source)
        places = (self.places(*of, size, now)[1] for of in (("shared", target), ("global", source)))
        self._copies.append((now, self._group[now], *places, np.full(now.shape, size)))

    def end_copies(self) -> None:
        self._group[self.now] += 1

    def await_copies(self, but: int | None) -> None:
        """Finishes the copies of the threads that execute, except the last `but` groups."""
        limit = np.full(self.count, -1)
        limit[self.now] = np.iinfo(np.int64).max if but is None else self._group[self.now] - but
        left = []
        for copy in self._copies:
            done = copy[1] < limit[copy[0]]
            if done.any():
                _, _, target, source, size = (part[done] for part in copy)
                unit = 8 if size[0] % 8 == 0 else int(size[0])
                for k in range(0, int(size[0]), unit):
                    self.shared.store(target + k, self.memory.load(source + k, unit), unit)
            if not done.all():
                left.append(tuple(part[~done] for part in copy))
        self._copies = left

    # What threads of a warp tell each other; a vote is of all of them.

    def vote(self, kind: str, values: Any) -> np.ndarray:
        values = _broadcast(values, self.now.shape).reshape(-1, WARP)
        if kind == "ballot":
            found = (values.astype(np.uint32) << np.arange(WARP, dtype=np.uint32)).sum(1, dtype=np.uint32)
        else:
            found = values.any(1) if kind == "any" else values.all(1)
        return np.repeat(found, WARP)

    def reduce(self, operation: Any, values: Any) -> np.ndarray:
        return np.repeat(operation.reduce(_broadcast(values, self.now.shape).reshape(-1, WARP), axis=1), WARP)

    def shuffle(self, kind: str, values: Any, which: Any, clamp: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns the value of another lane, or that of the thread if there is no such lane, and which case it is."""
        lanes = self.now % WARP
        which, clamp = (_broadcast(np.asarray(part), self.now.shape).astype(np.int64) for part in (which, clamp))
        first = lanes & (clamp >> 8 & 31)
        last = first | (clamp & 31 & ~(clamp >> 8 & 31))
        if kind == "idx":
            source = first | (which & 31 & ~(clamp >> 8 & 31))
        else:
            source = {"bfly": lanes ^ which, "up": lanes - which, "down": lanes + which}[kind]
        inside = source >= last if kind == "up" else source <= last
        source = np.where(inside, source, lanes)
        values = _broadcast(values, self.now.shape)
        return values[np.arange(self.now.size) // WARP * WARP + source], inside

    def elected(self) -> np.ndarray:
        return self.now % WARP == 0


def _broadcast(values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Broadcasts as `np.broadcast_to` does, which takes longer than most operations here."""
    values = np.asarray(values)
    return values if values.shape == shape else np.full(shape, values)


def bits(values: Any) -> np.ndarray:
    """Views numbers as unsigned integers of their size."""
    values = np.asarray(values)
    return values.view(f"u{values.dtype.itemsize}")
