"""Represents a kernel as blocks of instructions on arrays that have an entry for each thread of the grid."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Slots that the machine fills: itself, and where a thread is.
MACHINE, THREAD, BLOCK_X, BLOCK_Y, BLOCK_Z, LANE, RANK = range(7)


@dataclass(eq=False)
class Label:
    """A place to jump to: the number of a block, once that is known."""

    place: int | None = None


@dataclass(eq=False)
class Block:
    """Instructions that a thread executes one after another, and where it goes then.

    Attributes:
      code: instructions, each a function, the slot of its result or several, and the slots of its operands.
      end: the kind of the jump, and what it needs.
      converged: whether threads of a warp execute it together: they wait for each other at its start.
      polls: whether it looks at what other threads change.
      waits: whether threads that jump back from here look again at what others change.
    """

    code: list[tuple[Callable[..., Any], Any, tuple[int, ...]]] = field(default_factory=list)
    end: tuple[Any, ...] = ("exit",)
    converged: bool = False
    polls: bool = False
    waits: bool = False
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()


class Program:
    """Blocks, and slots that instructions read and write. It is built from the first instruction to the last."""

    def __init__(self, name: str):
        self.name = name
        self.blocks = [Block()]
        self.dtypes: list[Any] = [object, *[np.dtype(np.uint32)] * RANK]
        self.constants: dict[int, Any] = {}
        self._numbers: dict[Hashable, int] = {}
        self._known: list[dict[Hashable, Any]] = [{}]

    def slot(self, dtype: Any) -> int:
        """Makes a slot for values of a dtype that are not known."""
        self.dtypes.append(np.dtype(dtype))
        return len(self.dtypes) - 1

    def constant(self, value: Any, dtype: Any) -> int:
        """Returns the slot of a number that is alike in all threads."""
        value = np.asarray(value).astype(dtype)[()]
        key = (value.tobytes(), value.dtype)
        if key not in self._numbers:
            self._numbers[key] = self.slot(dtype)
            self.constants[self._numbers[key]] = value
        return self._numbers[key]

    def pure(self, function: Callable[..., Any], dtype: Any, *operands: int) -> int:
        """Returns the slot of `function(*operands)`. It is computed now if all operands are constants."""
        if all(operand in self.constants for operand in operands):
            return self.constant(function(*(self.constants[operand] for operand in operands)), dtype)
        key = (function, np.dtype(dtype), operands)
        for known in self._known:
            if key in known:
                return known[key]
        self._known[-1][key] = found = self.slot(dtype)
        self.do(function, found, *operands)
        return found

    def do(self, function: Callable[..., Any], results: int | tuple[int, ...], *operands: int) -> None:
        """Appends an instruction."""
        self.blocks[-1].code.append((function, results, operands))

    def end(self, *end: Any) -> None:
        """Ends the block with a jump; what follows starts another one."""
        self.blocks[-1].end = end
        self.blocks.append(Block())

    def place(self, label: Label) -> None:
        """Puts a label here."""
        if self.blocks[-1].code or len(self.blocks) == 1:
            self.end("jump", here := Label())
            here.place = len(self.blocks) - 1
        label.place = len(self.blocks) - 1

    def branch(self, condition: int, yes: Label, no: Label) -> None:
        if yes.place is not None:
            self.blocks[-1].waits = any(block.polls for block in self.blocks[yes.place :])
        self.end("branch", condition, yes, no)

    def wait(self, ready: Callable[..., Any], *operands: int) -> None:
        """Makes a thread wait until `ready` is true for it."""
        self.place(Label())
        is_ready = self.slot(bool)
        self.do(ready, is_ready, *operands)
        self.blocks[-1].waits = True
        self.end("wait", is_ready, after := Label())
        after.place = len(self.blocks) - 1

    def converge(self) -> None:
        """Says that the last instruction is one of a whole warp."""
        self.blocks[-1].converged = True

    def poll(self) -> None:
        """Says that the last instruction looks at what others change."""
        self.blocks[-1].polls = True

    def enter(self) -> None:
        """Starts a part whose results are not known after `leave`."""
        self._known.append({})

    def leave(self) -> None:
        self._known.pop()

    def finish(self) -> "Program":
        """Finds what blocks read that others have written, and replaces labels by numbers."""
        for block in self.blocks:
            read, written = dict.fromkeys(()), set()
            for _, results, operands in block.code:
                read |= dict.fromkeys(operand for operand in operands if operand not in written)
                written.update((results,) if isinstance(results, int) else results)
            if block.end[0] in ("branch", "switch") and block.end[1] not in written:
                read[block.end[1]] = None
            block.inputs = tuple(slot for slot in read if slot not in self.constants and slot != MACHINE)
            block.outputs = tuple(written)
            block.end = tuple(_placed(part) for part in block.end)
        shared = {slot for block in self.blocks for slot in block.inputs}
        for block in self.blocks:
            block.outputs = tuple(slot for slot in block.outputs if slot in shared)
        return self


def _placed(part: Any) -> Any:
    if isinstance(part, Label):
        assert part.place is not None, "a label that is nowhere"
        return part.place
    return {key: _placed(value) for key, value in part.items()} if isinstance(part, dict) else part


def listed(values: int | Sequence[int]) -> list[int]:
    """Returns the slots of a scalar or of a vector."""
    return [values] if isinstance(values, int) else list(values)
