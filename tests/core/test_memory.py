"""Rows that threads hold, with numbers in place of what MLIR computes: which thread touches which element, in every block."""

import operator
from types import SimpleNamespace

import numpy as np
import pytest

from jaxsoftmax._gpu.rows import columns, memory
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage

ITEMSIZE = 2


class Number(np.int64):
    """A constant of MLIR."""

    type = np.int64


def compare(kind, a, b):
    if kind[0] == "u":
        a, b = np.asarray(a) % 2**32, np.asarray(b) % 2**32
    return {"lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq}[kind[1:]](a, b)


@pytest.fixture
def numbers(monkeypatch):
    """A function that lets `memory` and `columns` compute with numbers, for so many threads."""

    def compute(threads):
        arith = {
            **{"addi": operator.add, "subi": operator.sub, "muli": operator.mul, "xori": operator.xor},
            **{"divui": operator.floordiv, "remui": operator.mod, "minsi": np.minimum, "maxsi": np.maximum},
            "extui": lambda _, a: np.int64(a),
        }
        for name, fake in {
            "arith": SimpleNamespace(**arith),
            "constant": Number,
            "i64": np.int64,
            "compare": compare,
            "both": lambda a, b: b if a is None else a if b is None else a & b,
            "address_of": lambda _: np.int64(0),
            "utils": SimpleNamespace(thread_idx=lambda: np.arange(threads)),
        }.items():
            monkeypatch.setattr(memory, name, fake)
            monkeypatch.setattr(columns, name, fake)

    return compute


# Rows, and the plan.
SHARED, NOWHERE = {"storage": Storage.SHARED, "unroll": 2}, {"storage": Storage.NOWHERE, "unroll": 4}
ROWS = [
    (16, RowPlan(128, 4, 32)),
    (9, RowPlan(128, 4, 32)),  # rows behind the last
    (70, RowPlan(24, 8, 4, 2)),
    (5, RowPlan(100, 4, 32)),  # the last step is not whole
    (3, RowPlan(2048, 8, 128)),
    (3, RowPlan(2056, 8, 128)),  # vectors are whole, lines are not
    (5, RowPlan(1001, 8, 128)),
    (3, RowPlan(5003, 8, 256, **NOWHERE)),
    (2, RowPlan(9001, 8, 128, blocks=2, **SHARED)),
    (2, RowPlan(9001, 8, 128, blocks=4)),
    (3, RowPlan(40002, 8, 128, blocks=8, **NOWHERE)),
    (2, RowPlan(16384, 8, 256, blocks=4)),
    (1, RowPlan(100, 8, 128, blocks=4)),  # blocks without a line
    (3, RowPlan(9001, 8, 128, blocks=5, persistent_blocks=7, **SHARED)),
]


@pytest.mark.parametrize(("count", "plan"), ROWS, ids=str)
def test_each_element_of_a_row_is_touched_by_one_thread_and_nothing_else_is(count, plan, numbers):
    cols = plan.cols
    touched = np.zeros(count * cols, int)
    numbers(max(plan.threads, 128))
    for first in range(0, count, plan.block_rows):
        for rank in range(plan.blocks):
            held = memory.RowMemory(plan, np.int64(first), count, False, np.int64(rank))
            for step in range(plan.steps):
                at_once = list(vectors(held, step))
                for place, again in zip(at_once, vectors(held, np.int64(step)), strict=True):  # as in a loop
                    np.testing.assert_array_equal(place, again)
                for place, of_elements in zip(at_once, held.places(held.place, np.int64(step)), strict=True):
                    touch(touched, place, of_elements, lambda element: element % cols)
    np.testing.assert_array_equal(touched, 1)


def touch(touched, place, of_elements, column_of):
    """Counts elements that threads touch, -1 for none, in the columns that they are said to have."""
    assert np.all((place >= -1) & (place < len(touched)))
    for own, (start, more) in zip(place.T, of_elements, strict=True):
        inside = own >= 0
        np.add.at(touched, own[inside], 1)
        np.testing.assert_array_equal(np.broadcast_to(start + more, own.shape)[inside], column_of(own[inside]))


# Rows along another axis: `outer`, and the plan.
COLUMNS = [
    (2, ColumnPlan(100, 64, 8, 128, lanes=8)),
    (3, ColumnPlan(33, 72, 8, 128, lanes=4)),  # tiles of 32 rows, the last one ragged
    (2, ColumnPlan(1000, 24, 8, 128, lanes=2, blocks=4)),
    (1, ColumnPlan(515, 6, 2, 256, lanes=4, blocks=2, **NOWHERE)),
    (2, ColumnPlan(700, 16, 8, 128, lanes=2, blocks=3, persistent_blocks=9, **SHARED)),
]


@pytest.mark.parametrize(("outer", "plan"), COLUMNS, ids=str)
def test_each_element_of_rows_side_by_side_is_touched_by_one_thread_and_nothing_else_is(outer, plan, numbers):
    cols, inner = plan.cols, plan.inner
    touched = np.zeros(outer * cols * inner, int)
    numbers(plan.threads)
    for row in range(outer * plan.tiles):
        for rank in range(plan.blocks):
            held = columns.ColumnMemory(plan, np.int64(row), outer * plan.tiles, False, np.int64(rank))
            for step in range(plan.steps):
                (place,), (again,) = vectors(held, step), vectors(held, np.int64(step))
                np.testing.assert_array_equal(place, again)
                (of_elements,) = held.places(held.place, np.int64(step))
                touch(touched, place, of_elements, lambda element: element // inner % cols)
    np.testing.assert_array_equal(touched, 1)


def vectors(held, step):
    """For each row of each thread the elements of the array that it touches in a step, -1 for what it does not."""
    plan = held.plan
    for start in held._starts(None, held.place, ITEMSIZE):
        whole = not isinstance(step, int) and step in plan.whole_steps  # a loop goes over those, or asks
        vector = held._vector(step, start, ITEMSIZE, whole)
        (threads,) = np.shape(vector.address)
        elements = (vector.address + vector.offset)[:, None] // ITEMSIZE + np.arange(plan.vector)
        is_there = np.broadcast_to(True if vector.inside is None else vector.inside, threads)
        inside = np.repeat(is_there[:, None], plan.vector, 1)
        if vector.partial is not None:
            assert not np.any(vector.partial & is_there)
            own = np.stack([np.broadcast_to(part, threads) for part in vector.inside_each()], 1)
            inside = inside | (vector.partial[:, None] & own)
        if inside.any():
            assert np.all((vector.address + vector.offset)[is_there] % (plan.vector * ITEMSIZE) == 0)
        yield np.where(inside, elements, -1)
