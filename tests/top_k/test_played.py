"""Kernels of short rows, and the order of values, with NumPy in place of what MLIR and PTX compute, for a block of threads."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax.ops.top_k import _candidates, _floats, _short, _short_gradient, _staged, xla

from ..support import cases, oracle

THREADS = np.arange(128, dtype=np.int32)
COMPARED = {"lt": np.less, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal}
KINDS = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}


def unsigned(values):
    return np.asarray(values).view(f"uint{8 * np.asarray(values).itemsize}")


def compare(kind, a, b):
    """`slt`, `ult` and others; the sign does not matter to `eq` and `ne`."""
    if kind[0] == "u":
        a, b = unsigned(a), unsigned(b)
    return COMPARED[kind[-2:]](a, b)


def arithmetic():
    """The operations of MLIR, of arrays with an entry for each thread."""
    return SimpleNamespace(
        **dict.fromkeys(("addi", "addf"), np.add),
        **dict.fromkeys(("subi", "subf"), np.subtract),
        **dict.fromkeys(("muli", "mulf"), np.multiply),
        **{"andi": np.bitwise_and, "ori": np.bitwise_or, "xori": np.bitwise_xor, "divui": np.floor_divide, "remui": np.mod},
        **{"maxsi": np.maximum, "minsi": np.minimum, "select": np.where, "shrsi": np.right_shift},
        shli=lambda a, b: (unsigned(a) << unsigned(b)).view(a.dtype),
        shrui=lambda a, b: (unsigned(a) >> unsigned(b)).view(a.dtype),
        bitcast=lambda kind, a: a.view(kind),
        extui=lambda kind, a: a.astype(kind),
        constant=lambda kind, number: np.full(THREADS.shape, number, kind),
        cmpf=lambda test, a, b: test(a, b),
        CmpFPredicate=SimpleNamespace(OLT=np.less, UNE=np.not_equal),
    )


class Block:
    """128 threads, shared memory of `plan`, and a block's rows there, as `_staged` copies them from `array`, `[rows, cols]`."""

    def __init__(self, monkeypatch, plan, array=None, number=0):
        self.array = None if array is None else np.ascontiguousarray(array).view(np.int32).ravel()
        self.shared = np.full(plan.bytes, 0x7FFFFFFF, np.int32)  # of four warps; NaN where nothing was copied
        self.unsure = np.zeros(THREADS.shape, bool)
        here = {
            "arith": arithmetic(),
            "constant": lambda number: np.full(THREADS.shape, number, np.int64).astype(np.int32),
            "i64": lambda value: np.asarray(value, np.int64),
            "compare": compare,
            "both": lambda a, b: b if a is None else a if b is None else a & b,
            "integer": KINDS.__getitem__,
            "vector_of": lambda count, bits: (count, bits),
            "ir": SimpleNamespace(F32Type=SimpleNamespace(get=lambda: np.float32)),
            "llvm": SimpleNamespace(extractelement=lambda array, place: array[:, place[0]]),
            "nvvm": SimpleNamespace(
                shfl_sync=lambda every, value, bit, last, kind: value[THREADS ^ bit], ShflKind=SimpleNamespace(bfly=None)
            ),
            "ptx": SimpleNamespace(
                shared_address=lambda _, offset: offset,
                address_of=lambda _: np.int64(0),
                load_words=self.load,
                larger_of_words=larger,
            ),
            "utils": SimpleNamespace(thread_idx=lambda: THREADS, inline_ptx=self.inline_ptx),
            "exponential": np.exp,
            "shifted": lambda m: np.where(np.abs(m) < np.inf, m, np.float32(0)),
            "reciprocal": lambda d: 1 / d,
            "inverse_of": lambda d: np.where(d < np.inf, 1 / d, np.float32(np.nan)),
        }
        for module in (_short, _short_gradient, _staged, _floats):
            for name, fake in here.items():
                if hasattr(module, name) and getattr(module, name).__class__.__module__ != "numpy":
                    monkeypatch.setattr(module, name, fake)
        self.warp = _staged.Warp(plan, None, np.full(THREADS.shape, number, np.int32))
        if array is not None:
            self.warp.fetch(None)

    def load(self, address, offset, inside, kind, bits=0, space="global"):
        assert (kind[1], space) == (32, "shared")
        places = ((address + offset) // 4)[:, None] + np.arange(kind[0])
        fill = np.full(places.shape, bits, np.int64).astype(np.int32)
        return (
            self.shared[places] if inside is None else np.where(inside[:, None], self.shared[places % len(self.shared)], fill)
        )

    def inline_ptx(self, text, *operands, predicate=None, result_types=None, **options):
        """A copy to shared memory; or where a lane is not sure, what it has."""
        if result_types is not None:
            self.unsure = operands[-1] != 0
            return list(operands[: len(result_types)])
        target, source = (int(number) // 4 for number in re.fullmatch(r"cp.async.*\+(\d+)\].*\+(\d+)\], 16;", text).groups())
        chosen = THREADS[np.broadcast_to(predicate is None or predicate, THREADS.shape)]
        into, out_of = (operand[chosen, None] // 4 + np.arange(4) for operand in operands)
        self.shared[into + target] = self.array[out_of + source]
        return None


def larger(dtype, a, b):
    if dtype != np.float32:
        return np.maximum(a.view(dtype), b.view(dtype)).view(np.int32)
    found = np.maximum(a.view(np.float32), b.view(np.float32))
    return np.where(np.isnan(found), 0x7FFFFFFF, found.view(np.int32)).astype(np.int32)


SHAPES = [
    (8, 8),
    (16, 1),
    (64, 8),
    (256, 3),
    (300, 8),
    (508, 5),
    (512, 16),
]  # columns, of which 300 and 508 are shared unevenly


@pytest.mark.parametrize("dtype", cases.quick("float32", "int32", "uint32"))
@pytest.mark.parametrize(("cols", "k"), SHAPES)
def test_the_largest_entries_of_short_rows_are_found_and_weighed(cols, k, dtype, monkeypatch):
    rng, rows = np.random.default_rng(cols), 150
    array = rng.integers(0, 2**32, (rows, cols), np.uint32).view(dtype)
    if dtype == "float32":
        array = rng.standard_normal((rows, cols)).astype(np.float32)
        array[7, cols // 2] = np.nan
    plan = _staged.Plan(rows, cols, 4, _staged.rows_of_warp(4 * cols), more=8 * k)
    call = _short._Call(plan, k, np.dtype(dtype), "all" if dtype == "float32" else None, False)
    expected = [np.asarray(part) for part in jax.lax.top_k(array, k)]
    weights = oracle.softmax(array) if dtype == "float32" else None
    certain = 0
    for number in range(plan.blocks):
        block = Block(monkeypatch, plan, array, number)
        warp = block.warp
        entries, is_unsure = _short._found(call, warp)
        bits, columns = _short._sure(call, warp, entries, is_unsure)
        own = warp.first + warp.row
        sure = (own < rows) & ~block.unsure
        own, certain = own[sure], certain + np.count_nonzero(sure)
        assert dtype != "float32" or 7 not in own  # NaN
        for place in range(k):
            np.testing.assert_array_equal(columns[place][sure], expected[1][own, place])
            np.testing.assert_array_equal(bits[place].view(dtype)[sure], expected[0][own, place])
        if weights is not None:
            floats = [_short._float(call, b) for b in bits]
            state = _short._state_of_row(call, warp, floats[0])
            found = np.stack(_short._weights(call, floats, state), 1)[sure]
            columns = np.stack(columns, 1)[sure]
            truth = oracle.Truth(*(np.take_along_axis(a[own], columns, 1) for a in (weights.value, weights.budget)))
            assert oracle.error(found, truth) <= 1
    assert certain >= 0.9 * rows * plan.lanes  # others are searched in another way


@pytest.mark.parametrize(("normalize", "with_b"), [("all", False), ("all", True), ("selected", False), ("selected", True)])
def test_gradients_of_short_rows_are_those_of_the_reference(normalize, with_b, monkeypatch):
    rng, (rows, cols, k) = np.random.default_rng(0), (len(THREADS), 12, 3)
    x, c, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((rows, cols), (rows, k), (rows, 1)))
    x[3, :9] = -np.inf  # of 3 entries with a weight
    m, b = x.max(1, keepdims=True), b if with_b else None
    d = np.exp(x - m).sum(1, keepdims=True)
    indices = np.asarray(jax.lax.top_k(x, k)[1])
    values = np.take_along_axis(x, indices, 1)
    weights = np.exp(values - m) / np.exp(values - m).sum(1, keepdims=True) if normalize == "selected" else None
    Block(monkeypatch, _staged.Plan(rows, cols, 4, 32))
    monkeypatch.setattr(_short_gradient, "_element", lambda call, of_x, column: x[THREADS, column])
    given = {"c": c, "weights": weights, "b": b, "m": m, "d": d}
    of_rows = {name: array[:, 0] for name, array in given.items() if array is not None and name in "bmd"}
    lists = {name: list(array.T) for name, array in given.items() if array is not None and name not in "bmd"}
    found, common, shift = _short_gradient._of_found(None, None, list(indices.T), **lists, **of_rows)
    whole = np.zeros((rows, cols)) if common is None else np.exp(x - shift[:, None]) * common[:, None]
    np.put_along_axis(whole, indices, np.stack(found, 1), 1)
    options = {"size": cols, "normalize": normalize, "dtype": jnp.float32, "scale_tangent": False}
    (expected,) = xla.softmax_top_k_vjp(indices, c, b, x, m, d, weights, None, None, **options)
    np.testing.assert_allclose(whole, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_words_are_widened_and_summed_up(dtype, monkeypatch):
    Block(monkeypatch, _staged.Plan(1, 8, 4, 32))
    values = np.random.default_rng(0).standard_normal((len(THREADS), 4 // jnp.dtype(dtype).itemsize)).astype(jnp.dtype(dtype))
    found = _floats.widened(jnp.dtype(dtype), values.view(np.int32)[:, 0])
    np.testing.assert_array_equal(np.stack(found, 1), values.astype(np.float32))
    for count in (1, 2, 5, 8):
        assert _floats.sum_of([np.float32(2**i) for i in range(count)]) == 2**count - 1


OPERATIONS = {
    "shr.s32": lambda a, b: (a.view(np.int32) >> b.astype(np.int32)).view(np.uint32),
    "shr.u32": np.right_shift,
    "or.b32": np.bitwise_or,
    "xor.b32": np.bitwise_xor,
    "not.b32": np.invert,
}


def computed(text, **held):
    """What registers hold after PTX, of one operation after another on bits."""
    for statement in filter(None, map(str.strip, text.strip(" {}").split(";"))):
        if not statement.startswith(".reg"):
            operation, into, *names = re.split(r",? +", statement)
            held[into] = OPERATIONS[operation](*(held[name] if name in held else np.uint32(int(name, 0)) for name in names))
    return held


@pytest.mark.parametrize("dtype", ["float32", "int32", "uint32"])
def test_keys_are_in_the_order_of_values_and_keep_all_bits(dtype):
    """That of `lax.top_k`: NaN of sign 1 is the least, -0 comes before 0, and NaN of sign 0 is the largest."""
    special = [0, 2**31, 1, 2**31 + 1, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x3F800000, 0xBF800000, 2**32 - 1]
    bits = np.concatenate([np.array(special, np.uint32), np.random.default_rng(0).integers(0, 2**32, 1000, np.uint32)])
    keys = computed(_candidates.KEY[dtype], key=bits)["key"]
    largest = np.asarray(jax.lax.top_k(bits.view(dtype)[None], len(bits))[1][0])
    assert (np.diff(keys[largest].astype(np.int64)) <= 0).all()
    assert len(np.unique(keys)) == len(np.unique(bits))
    if dtype == "float32":
        np.testing.assert_array_equal(computed(_candidates.BITS_OF_KEY, **{"$1": keys})["$0"], bits)
