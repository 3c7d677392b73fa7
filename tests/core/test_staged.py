"""Rows in one piece, with numbers in place of what MLIR computes: which thread touches which element, in every block."""

import itertools
import operator
from types import SimpleNamespace

import numpy as np
import pytest

from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax._gpu.rows import staged
from jaxsoftmax._gpu.rows.plans_sm90 import plan_rows
from jaxsoftmax._gpu.rows.staged import StagedPlan

THREADS = np.arange(128)
COMPARED = {"ult": operator.lt, "uge": operator.ge}


class Machine:
    """Global and shared memory of elements, and what 128 threads do there; it fails at what is in neither, or not aligned."""

    def __init__(self, itemsize, monkeypatch):
        self.itemsize, self.spaces = itemsize, {}
        arith = {
            **{"addi": operator.add, "subi": operator.sub, "muli": operator.mul, "andi": operator.and_, "minui": np.minimum},
            **{"divui": operator.floordiv, "remui": operator.mod, "ceildivui": lambda a, b: -(-a // b)},
            "trunci": lambda _, a: a,
        }
        words = SimpleNamespace(get=lambda shape, size: shape[0] * size)  # their bytes
        here = {"shared_address": lambda _, offset: offset, "address_of": lambda _: np.int64(0)}
        here |= {"load_words": self.load, "store_words": self.store}
        for name, value in {
            "arith": SimpleNamespace(**arith),
            "constant": np.int64,
            "i64": np.int64,
            "compare": lambda kind, a, b: COMPARED[kind](a, b),
            "both": lambda a, b: b if a is None else a if b is None else a & b,
            "integer": lambda bits: bits // 8,
            "ir": SimpleNamespace(VectorType=words),
            **here,
            "utils": SimpleNamespace(thread_idx=lambda: THREADS, bytewidth=lambda size: size),
            "Vector": self.vector,
        }.items():
            monkeypatch.setattr(staged, name, value)
        self.ref = SimpleNamespace(type=SimpleNamespace(element_type=itemsize))

    def places(self, address, offset, inside, size, space):
        """The elements that each thread that is inside touches."""
        starts = np.broadcast_to(address, THREADS.shape) + offset
        chosen = THREADS[np.broadcast_to(inside is None or inside, THREADS.shape)]
        assert np.all(starts[chosen] % size == 0)
        found = starts[chosen, None] // self.itemsize + np.arange(size // self.itemsize)
        assert np.all((found >= 0) & (found < len(self.spaces[space])))
        return chosen, found

    def word(self, place, k, size):
        """The elements of each thread's word `k` of a vector, in shared memory."""
        address, offsets, inside = place
        return self.places(address, offsets[k], inside[k], size * self.itemsize, "shared")

    def load(self, address, offset, inside, size, space="global"):
        chosen, found = self.places(address, offset, inside, size, space)
        values = np.full((len(THREADS), size // self.itemsize), -1)
        values[chosen] = self.spaces[space][found]
        return values

    def store(self, address, offset, inside, values, space="global"):
        chosen, found = self.places(address, offset, inside, values.shape[1] * self.itemsize, space)
        self.spaces[space][found] = values[chosen]

    def vector(self, address, offset, itemsize, inside):
        def copy(size, target, place):
            self.store(target, place, inside, self.load(address, offset, inside, size), "shared")

        return SimpleNamespace(copy=copy)


# Rows, and the plan.
PIECES = [
    (130, StagedPlan(69, 4, 8, 2, itemsize=2)),
    (37, StagedPlan(69, 2, 32, itemsize=2)),  # pieces start inside a vector
    (9, StagedPlan(5, 1, 32, itemsize=2)),  # and end in the one where they start
    (300, StagedPlan(7, 8, 1, itemsize=2)),
    (11, StagedPlan(1, 1, 32, itemsize=2)),  # many blocks in the last vector of the array
    (200, StagedPlan(12, 4, 4, 3, itemsize=2)),
    (64, StagedPlan(136, 2, 4, itemsize=2)),
    (64, StagedPlan(138, 8, 4, 2, itemsize=2)),
    (29, StagedPlan(1001, 8, 32, 3, itemsize=2)),
    (9, StagedPlan(101, 1, 32)),
    (5, StagedPlan(3, 1, 16)),
    (33, StagedPlan(322, 8, 8, 2)),
]


@pytest.mark.parametrize(("count", "plan"), PIECES, ids=str)
def test_each_element_of_a_row_is_touched_by_one_thread_and_nothing_else_is_stored(count, plan, monkeypatch):
    cols = plan.cols
    machine = Machine(plan.itemsize, monkeypatch)
    array, results = np.arange(count * cols), np.full(count * cols, -1)
    for first in range(0, count, plan.block_rows):
        memory = staged.StagedMemory(plan, np.int64(first), count, False)
        block = array[first * cols : (first + plan.block_rows) * cols]
        slot = np.full(plan.slot_elements, -1)
        machine.spaces = {"global": array, "shared": slot}
        staged._RowsOfBlock(memory, machine.ref, slot, memory.row).copy_in()
        computed, touched = np.full_like(slot, -2), []
        for step, k in itertools.product(range(plan.steps), range(plan.words)):
            word = (step * plan.words + k) * plan.lanes
            places = memory._places(machine.ref, memory.row, step)
            own_columns = memory.places(memory.place, np.int64(step))
            for place, columns, (row, there) in zip(places, own_columns, memory._own_rows(memory.row), strict=True):
                threads, found = machine.word(place, k, plan.word)
                column = (threads % plan.lanes + word)[:, None] * plan.word + np.arange(plan.word)
                told = [columns[k * plan.word + q] for q in range(plan.word)]
                np.testing.assert_array_equal(np.stack([start + more for start, more in told], 1)[threads], column)
                own = np.broadcast_to(there is None or there, THREADS.shape)[threads]
                np.testing.assert_array_equal(slot[found][own], (row[threads, None] * cols + column)[own])
                computed[found] = 2 * slot[found]
                touched.append(slot[found][own].ravel())
        np.testing.assert_array_equal(np.sort(np.concatenate(touched)), block)
        machine.spaces = {"global": results, "shared": computed}
        staged._RowsOfBlock(memory, machine.ref, slot, memory.row).copy_out()
        expected = np.where(array < (first + plan.block_rows) * cols, 2 * array, -1)
        np.testing.assert_array_equal(results, expected)


def test_lanes_that_touch_shared_memory_wait_for_few_others():
    for itemsize, cols in [(2, 69), (2, 151), (2, 371), (2, 172), (2, 1001), (4, 151), (4, 270)]:
        written = (itemsize,) if itemsize == 2 else ()  # rows of float32 are staged if they are read once
        plan = plan_rows(RowProblem((8, cols), (1,), read=(itemsize,), written=written), HOPPER)
        assert isinstance(plan, StagedPlan)
        assert plan.wavefronts(plan.apart) == 1
    assert StagedPlan(172, 2, 8, itemsize=2).wavefronts(1) == 2
