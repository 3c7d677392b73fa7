"""What is measured: a cell is one call on one shape and dtype, and its contenders are the ways to compute it."""

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import numpy as np

import jaxsoftmax

OURS = "ours"  # the row that it becomes names the implementation that ran, if one did
ONE = "one device"  # ours on one device, in a cell that is measured on several
IMPLEMENTATIONS = frozenset({"mosaic", "triton", "xla"})  # the names of rows that are ours
YARDSTICKS = frozenset({"copy", "sum", "products"})  # measured for their speed: their rows have no error
FIRST_CALL = "first_call"  # the pass of a cell whose time is that to trace, compile and run, of a program without the run

Truth = Callable[..., Sequence[Any]]
Sample = Callable[[Sequence[Any], Any], list[tuple[Any, Any]]]


class Library:
    """Stands for the functions of `jaxsoftmax`, its `cache` and its `rl` in all cells. They run on `implementation` if set."""

    def __init__(self) -> None:
        self.implementation: str | None = None

    def __getattr__(self, op: str) -> Callable[..., Any]:
        modules = [getattr(jaxsoftmax, name, None) for name in ("cache", "rl")]  # a checkout before 0.1.0 has none of them
        function = getattr(next((each for each in modules if op in getattr(each, "__all__", ())), jaxsoftmax), op)
        return function if self.implementation is None else functools.partial(function, implementation=self.implementation)

    def refuses(self, problem: Exception) -> bool:
        """Tells whether an error is that the implementation which was asked for cannot run a call."""
        return isinstance(problem, NotImplementedError) and f"implementation={self.implementation!r}" in str(problem)


library = Library()


def torch() -> Any:
    """The module, which need not be installed and is slow to load."""
    return importlib.import_module("torch")


def unchanged(*inputs: Any) -> tuple[Any, ...]:
    """The inputs as they are."""
    return inputs


@dataclass(frozen=True)
class Contender:
    """One way to compute a cell.

    Attributes:
      name: `OURS` or that of the peer. Contenders of one name are variants; the fastest is recorded.
      build: makes the measured function; one of JAX is jitted afterwards, unless the cell says otherwise.
      prepare: turns a cell's inputs into the function's arguments, outside of what is measured.
      framework: whose function it is.
      needs: the modules that must be installed.
      truth, sample: as for `Cell`, where they differ from the cell's.
      alone: whether no other contender may be built at the same time.
      capability: the major compute capability of the only GPUs that it is for, None for any.
      devices: how many it runs on.
      context: what is set while it is traced, such as a mesh.
      compiler_options: for XLA, of a function that is compiled ahead of time.
    """

    name: str
    build: Callable[[], Callable[..., Any]]
    prepare: Callable[..., tuple[Any, ...]] = unchanged
    framework: Literal["jax", "torch"] = "jax"
    needs: tuple[str, ...] = ()
    truth: Truth | None = None
    sample: Sample | None = None
    alone: bool = False
    capability: int | None = None
    devices: int = 1
    context: Callable[[], AbstractContextManager[Any]] = nullcontext
    compiler_options: dict[str, Any] = field(default_factory=dict, hash=False)

    def missing(self) -> str | None:
        """Returns why it cannot take part on this machine, or None."""
        for module in self.needs:
            if importlib.util.find_spec(module) is None:
                return f"{module}: not installed"
        if self.framework == "torch" and not torch().cuda.is_available():
            return "torch: sees no GPU"
        if self.capability is not None:
            capability = getattr(jax.devices()[0], "compute_capability", "none")
            if not capability.startswith(f"{self.capability}."):
                return f"{self.name}: for compute capability {self.capability}.x, not for {capability}"
        return None


@dataclass(frozen=True)
class Cell:
    """One line of the measurements, for every contender.

    Attributes:
      op, pass_, dtype, shape, options: as in the result files.
      bytes: those that have to be read and written.
      inputs: from a key and whether they should hurt, the input arrays, rows along all axes but the last.
      contenders: who computes it.
      truth: from some rows of the inputs in NumPy, the `oracle.Truth` of each output.
      shared: how many of the inputs, at the end, are the same for all rows.
      flops: the arithmetic, where that is the limit; 0 where it is not counted.
      blocks: how many blocks have to be visited, where some need not be; 0 where they are not counted.
      sample: where outputs are not made or not compared row by row: from the inputs and an output, pairs of a part of it, or
        of what is made of it, and its truth.
      fewer: likewise, from the same, calls with a part of the rows: in words, its inputs, and its part of the output,
        with which the first entries of its result are compared.
      repeatable: whether ours must give the same bits each time.
      program: whether it is measured as a program of many kernels: by the wall clock, with copies and gaps, and its memory.
      jitted: whether functions are jitted; otherwise they are called as they are, and of a `program` the memory is not known.
      calls: how many calls of the op the function of a contender makes; times are those of one of them.
    """

    op: str
    pass_: str
    dtype: str
    shape: tuple[int, ...]
    options: str
    bytes: int
    inputs: Callable[[Any, bool], tuple[Any, ...]]
    contenders: tuple[Contender, ...]
    truth: Truth
    shared: int = 0
    flops: int = 0
    blocks: int = 0
    sample: Sample | None = None
    fewer: Callable[[Sequence[Any], Any], list[tuple[str, tuple[Any, ...], Any]]] | None = None
    repeatable: bool = True
    program: bool = False
    jitted: bool = True
    calls: int = 1

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def devices(self) -> int:
        """The number of devices that ours runs on."""
        return max(contender.devices for contender in self.contenders)

    @property
    def name(self) -> str:
        """Such as `softmax forward float32 32768x4096 where=full`."""
        return " ".join(filter(None, (self.op, self.pass_, self.dtype, self.shape_text, self.options)))

    @property
    def lead(self) -> tuple[int, ...]:
        """The shape of its rows."""
        return self.shape[:-1]

    @property
    def rows(self) -> int:
        return int(np.prod(self.lead))
