"""Translates inline PTX to instructions of a program: those in the library's kernels. Any other raises an error."""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import arithmetic, program
from .machine import Machine
from .program import Label, Program

_EVERYONE = 0xFFFFFFFF


def barrier(to: Program, number: int, count: int | None, vote: int | None = None) -> None:
    """A barrier of the block, whose number is in a slot; threads are `count`, or all."""
    votes = () if vote is None else (vote,)
    to.do(lambda machine, number, *vote: machine.arrive(number, count, *vote) or (), (), program.MACHINE, number, *votes)
    to.converge()
    to.wait(Machine.has_passed, program.MACHINE, number)
    to.converge()


def translate(to: Program, text: str, constraints: str, results: Sequence[int], operands: Sequence[int]) -> None:
    """Appends the instructions of an `llvm.inline_asm`. `results` and `operands` are the slots of $0, $1 and so on."""
    assert len([part for part in constraints.split(",") if part and not part.startswith("~")]) == len(results) + len(operands)
    _Assembly(to, [*results, *operands], len(results)).run(text)


class _Assembly:
    def __init__(self, to: Program, numbered: list[int], results: int):
        self.to, self.numbered, self.results = to, numbered, results
        self.names: dict[str, int] = {}
        self.labels: dict[str, Label] = {}
        self.guard: int | None = None
        self.text = ""

    def run(self, text: str) -> None:
        for statement in text.split(";"):
            statement = statement.strip().lstrip("{} \n")
            while found := re.match(r"([\w$]+):(?!:)\s*", statement):
                self.to.place(self.label(found[1]))
                statement = statement[found.end() :].lstrip("{} \n")
            if statement:
                self.text = statement
                self.statement(statement)

    def label(self, name: str) -> Label:
        return self.labels.setdefault(name, Label())

    def statement(self, text: str) -> None:
        if text.startswith(".pragma"):
            return
        if text.startswith(".reg"):
            _, kind, names = text.split(maxsplit=2)
            for name in names.split(","):
                self.declare(name.strip(), kind[1:])
            return
        self.guard = None
        if text.startswith("@"):
            guard, text = text[1:].split(maxsplit=1)
            self.guard = self.predicate(guard)
        operation, _, rest = text.partition(" ")
        first, *parts = operation.split(".")
        method = getattr(self, f"_{first}", None)
        if method is None:
            raise self.unknown()
        method(parts, _separated(rest))

    def unknown(self) -> NotImplementedError:
        return NotImplementedError(f"the emulator does not know the instruction {self.text}")

    def declare(self, name: str, kind: str) -> None:
        dtype = _kind(kind)[1]
        found = re.fullmatch(r"(\w+)<(\d+)>", name)
        for each in [f"{found[1]}{k}" for k in range(int(found[2]))] if found else [name]:
            self.names[each] = self.to.slot(dtype)

    # Operands.

    def read(self, name: str, width: int) -> int:
        """Returns the slot of an operand's bits."""
        name = name.strip()
        if name.startswith("%"):
            return self.special(name)
        if name.startswith("{"):
            parts = _separated(name[1:-1])
            own = [self.read(part, width // len(parts)) for part in parts]
            return self.made(arithmetic.joined(width), width, *own)
        if not (name.startswith("$") or name in self.names):
            return self.to.constant(_literal(name) % 2**width, arithmetic.unsigned(width))
        slot = self.numbered[int(name[1:])] if name.startswith("$") else self.names[name]
        dtype = self.to.dtypes[slot]
        if width == 1:
            assert dtype.kind == "b", self.text
            return slot
        if 8 * dtype.itemsize != width or dtype.kind == "b":
            raise self.unknown()
        if dtype.kind == "u":
            return slot
        return self.made(arithmetic.viewed(arithmetic.unsigned(width)), width, slot)

    def predicate(self, name: str) -> int:
        if name.startswith("!"):
            return self.made(np.logical_not, 1, self.read(name[1:], 1))
        return self.read(name, 1)

    def width_of(self, name: str) -> int:
        if name.startswith("%") or not (name.startswith("$") or name in self.names):
            return 32
        dtype = self.to.dtypes[self.numbered[int(name[1:])] if name.startswith("$") else self.names[name]]
        return 1 if dtype.kind == "b" else 8 * dtype.itemsize

    def special(self, name: str) -> int:
        if name == "%laneid":
            return program.LANE
        if name == "%nsmid":
            return self.read("132", 32)
        if name == "%globaltimer":
            found = self.to.slot(np.uint64)
            self.to.do(lambda machine: np.uint64(machine.time), found, program.MACHINE)
            self.to.poll()
            return found
        raise self.unknown()

    def made(self, function: Callable[..., Any], width: int, *operands: int) -> int:
        found = self.to.slot(arithmetic.unsigned(width))
        self.to.do(function, found, *operands)
        return found

    def address(self, name: str, space: str) -> int:
        width = 64 if space == "global" else 32
        base, _, offset = name.strip("[] ").partition("+")
        slot = self.read(base.strip(), width)
        if not offset:
            return slot
        number = self.to.constant(_literal(offset), arithmetic.unsigned(width))
        return self.made(np.add, width, slot, number)

    def write(self, name: str, slot: int) -> None:
        """Moves bits to a register, in threads that the guard chooses."""
        name = name.strip()
        if name == "_":
            return
        if name.startswith("$"):
            assert int(name[1:]) < self.results, f"an operand that is written: {self.text}"
        target = self.numbered[int(name[1:])] if name.startswith("$") else self.names[name]
        dtype, own = self.to.dtypes[target], self.to.dtypes[slot]
        if dtype.itemsize != own.itemsize or (dtype.kind == "b") != (own.kind == "b"):
            raise self.unknown()
        if dtype != own:
            viewed = self.to.slot(dtype)
            self.to.do(arithmetic.viewed(dtype), viewed, slot)
            slot = viewed
        if self.guard is None:
            self.to.do(arithmetic.same, target, slot)
        else:
            self.to.do(arithmetic.select, target, self.guard, slot, target)

    def compute(self, function: Callable[..., Any], width: int, into: str, *operands: int) -> None:
        self.write(into, self.made(function, width, *operands))

    def where(self) -> tuple[int, ...]:
        return () if self.guard is None else (self.guard,)

    def act(self, function: Callable[..., Any], *operands: int) -> None:
        """Executes a function in threads that the guard chooses."""
        self.to.do(lambda *given: function(*given) or (), (), program.MACHINE, *operands, *self.where())

    # Moves.

    def _mov(self, parts, names):
        into, value = names
        if into.startswith("{"):
            own, width = _separated(into[1:-1]), _width(parts[-1])
            bits = self.read(value, width)
            for k, name in enumerate(own):
                each = width // len(own)
                self.write(name, self.made(arithmetic.part_of(k, each), each, bits))
            return
        self.write(into, self.read(value, _width(parts[-1])))

    def _ld(self, parts, names):
        space, size, count = _moved(parts)
        into = _separated(names[0].strip("{}"))
        place = self.address(names[1], space)
        loaded = [self.to.slot(arithmetic.unsigned(8 * size)) for _ in range(count)]
        load = functools.partial(_load, space, size, count)
        self.to.do(load, tuple(loaded), program.MACHINE, place, *self.where())
        if {"acquire", "relaxed", "volatile"} & set(parts):
            self.to.poll()
        for name, slot in zip(into, loaded, strict=True):
            if (width := self.width_of(name)) > 8 * size and parts[-1][0] in "bu":
                slot = self.made(arithmetic.converted(arithmetic.unsigned(width)), width, slot)
            self.write(name, slot)

    def _st(self, parts, names):
        if parts[0] == "async":
            return self.push(parts, names)
        space, size, _ = _moved(parts)
        place = self.address(names[0], space)
        values = []
        for name in _separated(names[1].strip("{}")):
            width = self.width_of(name) if name in self.names or name.startswith("$") else 8 * size
            slot = self.read(name, width)
            if width > 8 * size:
                slot = self.made(arithmetic.converted(arithmetic.unsigned(8 * size)), 8 * size, slot)
            values.append(slot)
        self.to.do(functools.partial(_store, space, size, len(values)), (), program.MACHINE, place, *values, *self.where())
        return None

    def push(self, parts, names):
        if parts[:4] != ["async", "shared::cluster", "mbarrier::complete_tx::bytes", *parts[3:4]]:
            raise self.unknown()
        size = _width(parts[-1]) // 8
        place, bar = self.address(names[0], "shared"), self.address(names[2], "shared")
        values = [self.read(name, 8 * size) for name in _separated(names[1].strip("{}"))]
        n = len(values)

        def run(machine, place, bar, *given):
            machine.push(place, size, given[:n], bar, *given[n:])
            return ()

        self.to.do(run, (), program.MACHINE, place, bar, *values, *self.where())

    def _mapa(self, parts, names):
        rank = self.read(names[2], 32)
        if self.guard is not None:
            rank = self.made(arithmetic.select, 32, self.guard, rank, self.to.constant(0, np.uint32))
        found = self.to.slot(np.uint32)
        self.to.do(Machine.of_block, found, program.MACHINE, self.read(names[1], 32), rank)
        self.write(names[0], found)

    def _cvt(self, parts, names):
        rounding = [part for part in parts if part not in _KINDS]
        kinds = [part for part in parts if part in _KINDS]
        if len(kinds) == 2 and set(rounding) <= {"rn"}:
            into, of = kinds
            if into in ("bf16x2", "f16x2") and of == "f32":
                upper, lower = (self.read(name, 32) for name in names[1:])
                return self.compute(functools.partial(_packed, _floating(into[:-2])), 32, names[0], lower, upper)
            if into[0] in "us" and of[0] in "us":
                value = self.read(names[1], _width(of))
                width = _width(into)
                grow = arithmetic.extended(width) if of[0] == "s" else arithmetic.converted(arithmetic.unsigned(width))
                return self.compute(grow, width, names[0], value)
            if into[0] in "bf" and of[0] in "bf" and "x2" not in into + of:
                source, target = _floating(of), _floating(into)
                convert = functools.partial(_converted, source, target)
                return self.compute(convert, _width(into), names[0], self.read(names[1], _width(of)))
        raise self.unknown()

    # Arithmetic.

    def binary(self, integers: Any, floats: Any, parts: list[str], names: list[str]) -> None:
        kind = parts[-1]
        width = _width(kind)
        values = [self.read(name, width) for name in names[1:]]
        if kind.endswith("x2") or kind[0] == "f" or kind.startswith("bf"):
            function = _of_floats(floats, kind, "ftz" in parts)
        elif kind[0] == "s":
            function = arithmetic.of_signed(integers)
        else:
            function = integers
        self.compute(function, width, names[0], *values)

    def _add(self, parts, names):
        self.binary(np.add, np.add, parts, names)

    def _sub(self, parts, names):
        self.binary(np.subtract, np.subtract, parts, names)

    def _mul(self, parts, names):
        if parts[0] == "wide":
            width = _width(parts[1])
            grow = (
                arithmetic.extended(2 * width) if parts[1][0] == "s" else arithmetic.converted(arithmetic.unsigned(2 * width))
            )
            values = [self.made(grow, 2 * width, self.read(name, width)) for name in names[1:]]
            return self.compute(np.multiply, 2 * width, names[0], *values)
        return self.binary(np.multiply, arithmetic.product_towards_zero if parts[0] == "rz" else np.multiply, parts, names)

    def _mad(self, parts, names):
        if parts[0] != "lo":
            raise self.unknown()
        a, b, c = (self.read(name, _width(parts[1])) for name in names[1:])
        self.compute(lambda a, b, c: a * b + c, _width(parts[1]), names[0], a, b, c)

    def _fma(self, parts, names):
        self.binary(None, arithmetic.fma, parts, names)

    def _and(self, parts, names):
        self.binary(np.bitwise_and, None, ["u1" if parts[-1] == "pred" else "u" + parts[-1][1:]], names)

    def _or(self, parts, names):
        self.binary(np.bitwise_or, None, ["u1" if parts[-1] == "pred" else "u" + parts[-1][1:]], names)

    def _xor(self, parts, names):
        self.binary(np.bitwise_xor, None, ["u1" if parts[-1] == "pred" else "u" + parts[-1][1:]], names)

    def _not(self, parts, names):
        width = _width(parts[-1])
        self.compute(np.invert, width, names[0], self.read(names[1], width))

    def _shl(self, parts, names):
        width = _width(parts[-1])
        self.compute(arithmetic.shift_left, width, names[0], self.read(names[1], width), self.read(names[2], 32))

    def _shr(self, parts, names):
        width = _width(parts[-1])
        function = arithmetic.shift_right_signed if parts[-1][0] == "s" else arithmetic.shift_right
        self.compute(function, width, names[0], self.read(names[1], width), self.read(names[2], 32))

    def _max(self, parts, names):
        is_nan = parts[0] == "NaN"
        self.extreme(np.maximum, arithmetic.maximum if is_nan else arithmetic.number_maximum, parts, names)

    def _min(self, parts, names):
        is_nan = parts[0] == "NaN"
        self.extreme(np.minimum, arithmetic.minimum if is_nan else arithmetic.number_minimum, parts, names)

    def extreme(self, integers, floats, parts, names):
        if parts[-1] in ("u16x2", "s16x2"):
            kind = np.uint16 if parts[-1][0] == "u" else np.int16
            function = functools.partial(_of_halves, integers, kind)
            return self.compute(function, 32, names[0], *(self.read(name, 32) for name in names[1:]))
        return self.binary(integers, floats, parts, names)

    def _abs(self, parts, names):
        self.binary(np.abs, np.abs, parts, names)

    def _ex2(self, parts, names):
        self.approximate(np.exp2, parts, names)

    def _lg2(self, parts, names):
        self.approximate(np.log2, parts, names)

    def _rcp(self, parts, names):
        self.approximate(arithmetic.reciprocal, parts, names)

    def _rsqrt(self, parts, names):
        self.approximate(lambda x: np.float32(1) / np.sqrt(x), parts, names)

    def _sqrt(self, parts, names):
        self.approximate(np.sqrt, parts, names)

    def _div(self, parts, names):
        if parts != ["full", "f32"]:
            raise self.unknown()
        self.binary(None, np.divide, ["f32"], names)

    def approximate(self, function, parts, names):
        if parts not in (["approx", "ftz", "f32"], ["approx", "f32"]):
            raise self.unknown()
        self.binary(None, arithmetic.approximate(function), ["f32"], names)

    def _prmt(self, parts, names):
        self.compute(arithmetic.permuted, 32, names[0], *(self.read(name, 32) for name in names[1:]))

    def _bfind(self, parts, names):
        if parts != ["u32"]:
            raise self.unknown()
        self.compute(arithmetic.first_bit, 32, names[0], self.read(names[1], 32))

    def _setp(self, parts, names):
        comparison, *combined, kind = [part for part in parts if part != "ftz"]
        both = names[0].split("|")
        a, b = (self.read(name, _width(kind)) for name in names[1:3])
        is_floating = kind.startswith(("f", "bf"))
        plain = arithmetic.COMPARISONS.get(comparison.removesuffix("u") if is_floating else comparison)
        if plain is None:
            raise self.unknown()
        if is_floating:
            plain = np.not_equal if comparison == "neu" else arithmetic.not_equal_ordered if comparison == "ne" else plain
            function = arithmetic.or_unordered(plain) if comparison.endswith("u") else plain
        else:
            function = arithmetic.of_signed(plain) if kind[0] == "s" else plain
        if kind.endswith("x2"):
            if combined:
                raise self.unknown()
            for place, name in enumerate(both):
                self.compute(functools.partial(_compare_half, function, _floating(kind[:-2]), place), 1, name, a, b)
            return
        if is_floating:
            function = functools.partial(_compare, function, _floating(kind))
        if len(both) > 1:
            raise self.unknown()
        found = self.made(function, 1, a, b)
        if combined:
            combine = {"and": np.logical_and, "or": np.logical_or}[combined[0]]
            found = self.made(combine, 1, found, self.predicate(names[3]))
        self.write(names[0], found)

    def _selp(self, parts, names):
        width = _width(parts[-1])
        yes, no = (self.read(name, width) for name in names[1:3])
        self.compute(arithmetic.select, width, names[0], self.read(names[3], 1), yes, no)

    # Jumps, and what threads tell each other.

    def _bra(self, parts, names):
        target = self.label(names[0])
        if self.guard is None:
            self.to.end("jump", target)
            return
        self.to.branch(self.guard, target, after := Label())
        self.to.place(after)

    def _bar(self, parts, names):
        if self.guard is not None:
            raise self.unknown()
        if parts[0] == "warp":
            self.everyone(names[0])
            self.act(lambda machine: None)
            self.to.converge()
        elif parts[0] == "sync":
            barrier(self.to, self.read(names[0], 32), int(names[1]) if len(names) > 1 else None)
        elif parts[0] == "arrive":
            count = int(names[1])
            self.act(lambda machine, number: machine.arrive(number, count), self.read(names[0], 32))
            self.to.converge()
        elif parts[0] == "red":
            number, count = self.read(names[1], 32), int(names[2]) if len(names) > 3 else None
            barrier(self.to, number, count, self.predicate(names[-1]))
            found = self.to.slot(np.uint32)
            self.to.do(Machine.counted, found, program.MACHINE, number)
            if parts[1:] == ["popc", "u32"]:
                self.write(names[0], found)
            elif parts[1:] in (["and", "pred"], ["or", "pred"]):
                result, is_all = self.to.slot(bool), parts[1] == "and"

                def decide(machine, found):
                    return found == (count or machine.threads) if is_all else found > 0

                self.to.do(decide, result, program.MACHINE, found)
                self.write(names[0], result)
            else:
                raise self.unknown()
        else:
            raise self.unknown()

    def _barrier(self, parts, names):
        if parts[0] != "cluster" or self.guard is not None:
            raise self.unknown()
        if parts[1] == "arrive":
            self.act(Machine.arrive_in_cluster)
        else:
            self.to.wait(Machine.cluster_has_passed, program.MACHINE)
        self.to.converge()

    def _mbarrier(self, parts, names):
        if parts[0] == "init":
            count = int(names[1])
            place = self.address(names[0], "shared")
            self.act(lambda machine, place, *where: machine.init_mbarrier(place, count, *where), place)
        elif parts[0] == "arrive" and names[0] == "_":
            expected = int(names[2]) if parts[1] == "expect_tx" else 0
            place = self.address(names[1], "shared")
            space = "shared::cluster" if "shared::cluster" in parts else "shared"

            def arrive(machine, place, *where):
                machine.arrive_at_mbarrier(place, *(where or (True,)), expected, space)

            self.act(arrive, place)
        elif parts[:2] == ["try_wait", "parity"]:
            place, parity = self.address(names[1], "shared"), self.read(names[2], 32)
            found = self.to.slot(bool)
            self.to.do(Machine.mbarrier_has_passed, found, program.MACHINE, place, parity)
            self.to.poll()
            self.write(names[0], found)
        else:
            raise self.unknown()

    def _createpolicy(self, parts, names):
        self.write(names[0], self.to.constant(0, np.uint64))

    def _fence(self, parts, names):
        pass

    def _atom(self, parts, names):
        operation, kind, space = self.atomic(parts)
        place, value = self.address(names[1], space), self.read(names[2], _width(kind))
        found = self.to.slot(arithmetic.unsigned(_width(kind)))
        run = functools.partial(_atomic, operation, space, _number(kind))
        self.to.do(run, found, program.MACHINE, place, value, *self.where())
        self.write(names[0], found)

    def _red(self, parts, names):
        operation, kind, space = self.atomic(parts)
        place, value = self.address(names[0], space), self.read(names[1], _width(kind))
        self.to.do(
            functools.partial(_reduce_atomically, operation, space, _number(kind)),
            (),
            program.MACHINE,
            place,
            value,
            *self.where(),
        )

    def atomic(self, parts):
        space = next(part for part in parts if part in ("global", "shared"))
        operation, kind = parts[-2:]
        if operation not in ("add", "max", "min", "exch", "or"):
            raise self.unknown()
        return operation, kind, space

    def _cp(self, parts, names):
        if parts[0] != "async" or parts[1] == "bulk":
            raise self.unknown()
        if parts[1] in ("commit_group", "wait_all", "wait_group"):
            if self.guard is not None:
                raise self.unknown()
            but = int(names[0]) if parts[1] == "wait_group" else None
            self.act(Machine.end_copies if parts[1] == "commit_group" else lambda machine: machine.await_copies(but))
            return
        size = int(names[2])
        target, source = self.address(names[0], "shared"), self.address(names[1], "global")
        self.act(lambda machine, target, source, *where: machine.start_copy(target, source, size, *where), target, source)

    def everyone(self, mask: str) -> None:
        if _literal(mask) % 2**32 != _EVERYONE or self.guard is not None:
            raise self.unknown()

    def _vote(self, parts, names):
        self.everyone(names[2])
        _, kind, _ = parts
        value = self.predicate(names[1])
        found = self.to.slot(np.uint32 if kind == "ballot" else bool)
        self.to.do(lambda machine, value: machine.vote(kind, value), found, program.MACHINE, value)
        self.to.converge()
        self.write(names[0], found)

    def _redux(self, parts, names):
        self.everyone(names[2])
        _, operation, kind = parts
        if kind not in ("u32", "b32"):
            raise self.unknown()
        function = {"add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or}[operation]
        found = self.to.slot(np.uint32)
        value = self.read(names[1], 32)
        self.to.do(lambda machine, value: machine.reduce(function, value), found, program.MACHINE, value)
        self.to.converge()
        self.write(names[0], found)

    def _shfl(self, parts, names):
        self.everyone(names[4])
        _, kind, _ = parts
        into = names[0].split("|")
        found, inside = self.to.slot(np.uint32), self.to.slot(bool)
        operands = [self.read(name, 32) for name in names[1:4]]
        self.to.do(lambda machine, *given: machine.shuffle(kind, *given), (found, inside), program.MACHINE, *operands)
        self.to.converge()
        for name, slot in zip(into, (found, inside), strict=False):
            self.write(name, slot)


def _load(space: str, size: int, count: int, machine: Machine, address: Any, where: Any = True) -> list[np.ndarray]:
    return machine.load(space, address, size, count, where)


def _store(space: str, size: int, count: int, machine: Machine, address: Any, *values: Any) -> tuple[()]:
    machine.store(space, address, size, values[:count], *values[count:])
    return ()


def _atomic(
    operation: str, space: str, dtype: Any, machine: Machine, address: Any, value: Any, where: Any = True
) -> np.ndarray:
    return machine.atomic(operation, space, address, value, dtype, where)


def _reduce_atomically(operation, space, dtype, machine, address, value, where=True) -> tuple[()]:
    machine.atomic(operation, space, address, value, dtype, where)
    return ()


def _compare(function, dtype, a, b):
    return function(a.view(dtype), b.view(dtype))


def _compare_half(function, dtype, place, a, b):
    return function(*(arithmetic.halves(word, dtype)[place].astype(np.float32) for word in (a, b)))


def _of_halves(function, dtype, *words):
    parts = zip(*(arithmetic.halves(word, dtype) for word in words), strict=True)
    return arithmetic.whole(*(function(*part) for part in parts))


def _packed(dtype, lower, upper):
    return arithmetic.whole(*(part.view(np.float32).astype(dtype) for part in (lower, upper)))


def _converted(source, target, value):
    return value.view(source).astype(target).view(f"u{target.itemsize}")


@functools.cache
def _of_floats(function: Callable[..., Any], kind: str, flushes: bool) -> Callable[..., Any]:
    if kind.endswith("x2"):
        return functools.partial(_of_halves, function, _floating(kind[:-2]))
    dtype = _floating(kind)

    def run(*values):
        values = [value.view(dtype) for value in values]
        found = arithmetic.flushed(function(*map(arithmetic.flushed, values))) if flushes else function(*values)
        return found.view(f"u{dtype.itemsize}")

    return run


_KINDS = {
    "pred": 1, "u1": 1, "u8": 8, "b8": 8, "u16": 16, "s16": 16, "b16": 16, "f16": 16, "bf16": 16, "u32": 32, "s32": 32,
    "b32": 32, "f32": 32, "f16x2": 32, "bf16x2": 32, "u16x2": 32, "s16x2": 32, "u64": 64, "s64": 64, "b64": 64,
}  # fmt: skip


def _width(kind: str) -> int:
    if kind not in _KINDS:
        raise NotImplementedError(f"the emulator does not know the type .{kind} of PTX")
    return _KINDS[kind]


def _kind(kind: str) -> tuple[int, Any]:
    return _width(kind), arithmetic.unsigned(_width(kind))


def _floating(kind: str) -> Any:
    return {"f32": np.dtype(np.float32), "f16": np.dtype(np.float16), "bf16": arithmetic.BFLOAT16}[kind]


def _number(kind: str) -> Any:
    """Returns the dtype of an atomic operation."""
    if kind == "f32":
        return np.dtype(np.float32)
    return np.dtype(f"{'i' if kind[0] == 's' else 'u'}{_width(kind) // 8}")


def _moved(parts: list[str]) -> tuple[str, int, int]:
    """Returns the state space of a load or store, the bytes of a word, and the number of words."""
    spaces = [part for part in parts if part.startswith(("global", "shared"))]
    known = {"v2", "v4", "nc", "relaxed", "acquire", "gpu", "sys", "volatile", "L2::cache_hint", "release"}
    if len(spaces) != 1 or set(parts[:-1]) - known - set(spaces):
        raise NotImplementedError(f"the emulator does not know a load or store of {'.'.join(parts)}")
    count = next((int(part[1]) for part in parts if part in ("v2", "v4")), 1)
    return spaces[0].replace("shared::cta", "shared"), _width(parts[-1]) // 8, count


def _separated(text: str) -> list[str]:
    """Splits operands, which may be lists in braces."""
    return [part.strip() for part in re.findall(r"(?:\{[^}]*\}|\[[^\]]*\]|[^,])+", text)]


def _literal(text: str) -> int:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return int(text[2:], 16)
    return math.prod(int(factor, 0) for factor in text.split("*"))
