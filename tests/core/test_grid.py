"""Blocks that share long rows, in any interleaving: the loop of `grid.Slices` itself, on memory of Python's.

Each block is a thread, of which one runs at a time. All that blocks do to memory that others see, or that takes a while, hands
over to another one at random: tickets, states, copies to shared memory. Only so many run at a time, as on a GPU that has other
work, and the others start when one has ended. A block that waits sees its patience end at random. Devices that share rows have
blocks, memory and tickets of their own, and some may start when others are nearly done.
"""

import random
import threading
import types

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from jaxsoftmax._gpu.rows import grid
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage

brute_force = settings(max_examples=80, deadline=None, derandomize=True, phases=[Phase.generate])


class HangError(Exception):
    """Blocks went on for longer than any run takes that ends."""


class Block:
    """A block: what it has started to copy, in groups, and what the stages of its shared memory hold."""

    def __init__(self, run, device):
        self.run, self.device, self.stages, self.groups, self.open = run, device, [None, None], [], []
        self.turn, self.ended = threading.Semaphore(0), False

    def land(self, keep=0):
        """Lets copies arrive, of all groups but the last ones."""
        while len(self.groups) > keep:
            for stage, ticket in self.groups.pop(0):
                self.stages[stage] = ticket


class Run:
    """`count` rows of so many slices, done by some blocks, of which `resident` run at a time; `along` another axis, tiles.

    Each of the devices has so many slices of a row, blocks, and residents.
    """

    def __init__(self, seed, count, slices, blocks, resident, along, devices=1):
        self.random, self.count, self.slices, self.devices = random.Random(seed), count, slices, devices
        self.resident, self.along = resident, along
        self.impatience = self.random.choice([0.1, 0.4, 1])
        self.memory = [np.zeros(0, np.int64) for _ in range(devices)]
        self.states, self.groups = {}, {}  # of slices, and of groups of them, by ticket, and by number
        self.finished = []
        self.local = threading.local()
        self.blocks = [Block(self, device) for device in range(devices) for _ in range(blocks)]
        self.failure, self.steps, self.main = None, 0, threading.Semaphore(0)

    # The scheduler.

    def go(self):
        waiting = [[block for block in self.blocks if block.device == device] for device in range(self.devices)]
        live = []
        for block in self.blocks:
            threading.Thread(target=self.work, args=(block,), daemon=True).start()
        while (any(waiting) or live) and self.failure is None:
            for device, blocks in enumerate(waiting):
                while blocks and sum(block.device == device for block in live) < self.resident:
                    live.append(blocks.pop(0))
            block = self.random.choice(live)
            block.turn.release()
            self.main.acquire()
            if block.ended:
                live.remove(block)
        if self.failure is not None:
            raise self.failure

    def work(self, block):
        block.turn.acquire()
        self.local.block = block
        try:
            self.slices_of_rows().work(self.copy_in, self.fill_around, self.body, self.store)
        except BaseException as failure:
            self.failure = failure
        block.ended = True
        self.main.release()

    def others(self):
        """Others go on for a while. Copies that are under way may arrive."""
        self.steps += 1
        if self.steps > 50_000:
            raise HangError
        block = self.local.block
        if self.random.random() < 0.3:
            block.land(self.random.randrange(len(block.groups) + 1))
        if self.random.random() < 0.7:
            self.main.release()
            block.turn.acquire()

    # What `grid` is used with.

    def slices_of_rows(self):
        options = {"blocks": self.slices, "storage": Storage.SHARED, "unroll": 2, "persistent_blocks": len(self.blocks)}
        if self.along:
            return grid.ColumnSlices(ColumnPlan(64 * self.slices, 32, 4, 128, 8, **options), self.count, None, None, None)
        plan, devices = RowPlan(1024 * self.slices, 4, 128, **options), Devices(self, self.local.block.device)
        return grid.Slices(plan, self.count, None, None, None, devices)

    def ticket(self, memory):
        """The number of a slice, of those of all devices."""
        part = int(memory.row) * self.devices + self.local.block.device
        return part * self.slices + int(memory.rank)

    def copy_in(self, memory):
        block = self.local.block
        block.stages[int(memory.stage)] = "under way"
        block.open.append((int(memory.stage), self.ticket(memory)))
        self.others()

    def fill_around(self, memory):
        """Sets what a copy has brought along: were that under way, it would be overwritten."""
        block, ticket = self.local.block, self.ticket(memory)
        assert block.stages[int(memory.stage)] == ticket
        assert not any(stage == int(memory.stage) for group in block.groups for stage, _ in group)

    def body(self, tile):
        """The state of a slice tells its ticket."""
        block, ticket = self.local.block, self.ticket(tile.memory)
        if isinstance(tile, (grid.UnpublishedSlice, grid.UnpublishedColumns)):
            assert block.stages[int(tile.memory.stage)] == ticket
            assert (self.local.block.device, ticket) not in self.states
            tile.published.extend([merge, [ticket]] if self.along else [np.float32(1 + ticket), np.float32(1)])
            self.others()
            return None
        slices = self.slices * self.devices
        row = range(int(tile.memory.row) * slices, (int(tile.memory.row) + 1) * slices)
        if self.along:
            groups = tile.memory.plan.groups
            found = [ticket for k in range(groups) for ticket in self.groups[int(tile.first) + k]]
        else:
            found = [int(value) - 1 for value in tile.states.m]
        assert found == list(row)
        return ticket

    def store(self, tile, ticket):
        assert self.local.block.stages[int(tile.memory.stage)] == ticket
        self.others()
        assert self.local.block.stages[int(tile.memory.stage)] == ticket
        self.finished.append(ticket)


class Devices:
    """What `grid.Devices` is to a block."""

    def __init__(self, run, own):
        self.run, self.own, self.count = run, own, run.devices

    def rank(self):
        return np.int32(self.own)

    def others(self, counters):
        assert counters is self.run.memory[self.own]
        return [self.run.memory[(self.own + k) % self.count] for k in range(1, self.count)]


def merge(*_):
    raise AssertionError("the states of groups are merged below")


def fakes(run):
    """The modules that `grid` calls, in terms of a run."""

    def entry(counters, index):
        run.others()
        return counters, int(index)

    def add(counters, index):
        counters, index = entry(counters, index)
        counters[index] += 1
        return np.int32(counters[index] - 1)

    def wait(is_there, counters, tickets):
        while not is_there():
            run.others()
            if run.random.random() < run.impatience and counters[0] < tickets:
                return np.int32(0)
        return np.int32(1)

    def await_pairs(pairs, index, count, most, threads, tickets, patience, scope):
        index, count = int(index), int(count)
        there = wait(lambda: pairs[index : index + 2 * count].all(), pairs, tickets)
        values = pairs[index : index + 2 * count].astype(np.float32)
        return [there, values[::2], values[1::2]]

    def publish_pair(pairs, index, values, scope):
        pairs, index = entry(pairs, index)
        assert scope == ("gpu" if run.devices == 1 else "sys")
        assert not pairs[index : index + 2].any()
        pairs[index : index + 2] = values
        device = next(device for device, memory in enumerate(run.memory) if memory is pairs)
        run.states[device, (index - 2) // 2] = values

    def await_row(counters, row, count, tickets, patience, told):
        return wait(lambda: counters[1 + int(row)] == count, counters, (int(row) + 1) * tickets)

    def await_copies(but=0):
        run.local.block.land(but)

    def end_copies():
        block = run.local.block
        block.groups.append(block.open)
        block.open = []

    def store_by_first_thread(counters, index, value):
        counters, index = entry(counters, index)
        counters[index] = value

    def load_int(counters, index):
        counters, index = entry(counters, index)
        return np.int32(counters[index])

    sync = types.SimpleNamespace(await_copies=await_copies, end_copies=end_copies)
    tickets = types.SimpleNamespace(
        await_pairs=await_pairs,
        await_row=await_row,
        add_one_of_block=lambda counters, index, told: add(counters, index),
        load_int=load_int,
        publish_pair=publish_pair,
        store_by_first_thread=store_by_first_thread,
        take_ticket=lambda counters, of_block: add(counters, 0),
        tell=lambda value, told: value,
    )
    lax = types.SimpleNamespace(
        cond=lambda is_true, then, otherwise: then() if is_true else otherwise(),
        div=lambda a, b: np.int32(int(a) // int(b)),
        rem=lambda a, b: np.int32(int(a) % int(b)),
        while_loop=while_loop,
    )

    def get_global(semaphores):
        if not len(run.memory[0]):  # on all devices before the first block starts
            run.memory[:] = [np.zeros(semaphores.shape[0], np.int64) for _ in run.memory]
        return run.memory[run.local.block.device]

    pl = types.SimpleNamespace(get_global=get_global, when=lambda is_true: lambda f: f() if is_true else None)
    return {"sync": sync, "tickets": tickets, "lax": lax, "pl": pl, "jnp": np}


def while_loop(goes_on, step, carry):
    while goes_on(carry):
        carry = step(carry)
    return carry


class UnpublishedColumns(grid.UnpublishedColumns):
    """With states that are the tickets of slices."""

    run = None

    def store_state(self, states, number, values):
        self.run.others()
        number = int(number)
        if number < self.run.count * self.run.slices:
            self.run.states[0, number] = values
        else:
            assert number not in self.run.groups
            self.run.groups[number] = values

    def merge_states(self, function, states, first, count, most):
        assert function is merge
        assert int(count) <= most
        self.run.others()
        return [ticket for k in range(int(count)) for ticket in self.run.states[0, int(first) + k]]


@pytest.fixture
def run(monkeypatch):
    def run(*args):
        found = Run(*args)
        for name, fake in fakes(found).items():
            monkeypatch.setattr(grid, name, fake)
        monkeypatch.setattr(UnpublishedColumns, "run", found)
        monkeypatch.setattr(grid, "UnpublishedColumns", UnpublishedColumns)
        found.go()
        return found

    return run


SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 9), st.integers(1, 6), st.integers(1, 6))


@pytest.mark.parametrize("along", [False, True], ids=["rows", "tiles"])
def test_each_slice_is_published_and_finished_once_whatever_runs(run, along):
    @brute_force
    @given(st.integers(0, 2**31), SHAPES)
    def check(seed, shape):
        count, slices, blocks, resident = shape
        slices *= 1 + 4 * along  # several groups
        found = run(seed, count, slices, blocks, min(blocks, resident), along)
        assert sorted(found.finished) == list(range(count * slices))
        assert sorted(found.states) == [(0, ticket) for ticket in range(count * slices)]

    check()


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_devices_that_share_rows_tell_each_other_the_states_of_all_slices(run, devices):
    @brute_force
    @given(st.integers(0, 2**31), SHAPES)
    def check(seed, shape):
        count, slices, blocks, resident = shape
        found = run(seed, count, slices, blocks, min(blocks, resident), False, devices)
        everything = range(count * slices * devices)
        assert sorted(found.finished) == list(everything)
        assert sorted(found.states) == [(device, ticket) for device in range(devices) for ticket in everything]

    check()


def test_a_slice_that_nobody_publishes_is_noticed(run, monkeypatch):
    monkeypatch.setattr(grid.UnpublishedSlice, "pair", [np.float32(0)] * 2)
    with pytest.raises(HangError):
        run(0, 2, 3, 2, 2, False)


def test_a_copy_that_has_not_arrived_is_noticed(run, monkeypatch):
    in_order = fakes

    def too_early(found):
        changed = in_order(found)
        sync = changed["sync"]
        sync.await_copies = lambda but=0, wait=sync.await_copies: wait(but + 1)
        return changed

    monkeypatch.setitem(globals(), "fakes", too_early)
    with pytest.raises(AssertionError):
        run(0, 2, 5, 2, 2, False)
