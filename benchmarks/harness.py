"""Measures cells: every contender is built, checked, and timed in turns with the others."""

import functools
import itertools
import math
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from benchmarks import check
from benchmarks.cells import FIRST_CALL, ONE, OURS, YARDSTICKS, Cell, Contender, library, torch
from benchmarks.clock import Clock, kernel_clock, loaded_clock, mean_of_devices_us, synchronize, wall_clock
from benchmarks.nvml import Load, Meter
from benchmarks.results import Row, new_run, now
from jaxsoftmax import explain
from jaxsoftmax._report import rows

ROOT = Path(__file__).parents[1]  # of this checkout
_GROSS = 0.1  # the relative error from which on a peer computes something else
_CALLS_OF_A_PROGRAM = 5  # in a round, at most: each takes milliseconds
_HEADER = f"{'cell':64} {'implementation':16} {'us':>10} {'GB/s':>7} {'TFLOP/s':>8} {'of copy':>8} {'error':>9} {'temp MB':>8}"


@dataclass(frozen=True)
class Effort:
    """Amount of measurements: `rounds` rounds of at least `calls` calls, over input buffers that pass `cache` bytes together.

    A round of a program lasts `turn` seconds at least. If the GPU is `loaded`, so does a round of any call, back to back, by
    the wall clock. The first `warm_ups` rounds do not count. The GPU rests for `pause` seconds before each turn. `ahead` cells
    are compiled and checked at the same time, before they are timed one after the other: for calls of JAX on one device.
    """

    rounds: int = 5
    calls: int = 10
    cache: int = 4 * 50 * 2**20  # four times the L2 cache of an H200
    most_buffers: int = 64
    turn: float = 0
    loaded: bool = False
    warm_ups: int = 0
    pause: float = 0
    ahead: int = 1

    def buffers(self, cell: Cell) -> int:
        if cell.pass_ == FIRST_CALL or cell.devices > 1 or not cell.jitted:  # whose calls follow on one another
            return 1
        return max(1, min(self.most_buffers, math.ceil(self.cache / cell.bytes)))


@dataclass
class Entrant:
    """A contender that takes part: its function, the arguments of each call, what was found, and its times and loads."""

    contender: Contender
    function: Callable[..., Any]
    arguments: list[tuple[Any, ...]]
    implementation: str
    error: float | None
    times: list[float] = field(default_factory=list)
    temporaries: int | None = None
    kernel_us: float | None = None
    calls: int = 0
    loads: list[Load] = field(default_factory=list)


class Run:
    """One process's measurements of a suite.

    Attributes:
      problems: what is wrong with our own op, and was not recorded for that.
      left_out: what of it was not measured although nothing is wrong: the GPU has too little memory, or the implementation
        that was asked for does not serve it.
    """

    def __init__(
        self,
        gpu: str,
        commit: str,
        write: Callable[[Row], None],
        *,
        clock: Clock = kernel_clock,
        effort: Effort | None = None,
        peers: frozenset[str] | None = None,
        meter: Meter | None = None,
        say: Callable[[str], None] = lambda line: print(line, flush=True),
    ):
        """Every row goes to `write` as soon as it is measured; `peers` are those that take part, None for all.

        `meter` measures the GPU's power and clocks beside each time.
        """
        self.problems: list[str] = []
        self.left_out: list[str] = []
        self._gpu, self._commit, self._write, self._clock, self._peers, self._say = gpu, commit, write, clock, peers, say
        self._effort, self._meter = effort or Effort(), meter
        self._id = new_run()
        self._copy_speed: dict[str, float] = {}
        self._named: set[str] = set()
        self._hurtful_of: dict[str, tuple[Any, ...]] = {}
        self._lock = threading.Lock()
        self._turn = threading.Lock()

    def measure(self, cells: Iterable[Cell]) -> None:
        """Measures cells in their order; copies come before what is compared with them."""
        start = time.perf_counter()
        self._say(f"run {self._id} on {self._gpu}, jax {jax.__version__}, commit {self._commit}\n{_HEADER}")
        for batch in itertools.batched(cells, self._effort.ahead):
            with ThreadPoolExecutor(len(batch)) as pool:
                ways = [*(pool.map if len(batch) > 1 else map)(self._enter_together, batch)]
            entered = list(zip(batch, map(self._enter_alone, batch, ways), strict=True))
            del ways
            while entered:  # `pop` frees the memory of cells that are timed
                self._measure(*entered.pop(0))
        self._say(f"{time.perf_counter() - start:.0f} s")

    def ours(self, cell: Cell) -> Entrant | None:
        """Ours alone, with its values checked, for `take_turn`; None where `problems` or `left_out` says why not."""
        inputs = self._inputs_that_fit(cell)
        (contender,) = [contender for contender in cell.contenders if contender.name == OURS]
        entrant = None if inputs is None else self._enter(cell, contender, inputs)
        self._hurtful_of.pop(cell.name, None)
        return entrant

    def _enter_together(self, cell: Cell) -> dict[Contender, Callable[[], Entrant | None]]:
        """Enters those contenders of a cell that may be built at the same time.

        Returns:
          A function for each contender that takes part, which enters it, or returns what has entered.
        """
        inputs = self._inputs_that_fit(cell)
        if inputs is None:
            return {}
        contenders = [contender for contender in cell.contenders if self._takes_part(contender)]
        with ThreadPoolExecutor(1 if cell.pass_ == FIRST_CALL else 4) as pool:  # most of the time is the compilers'
            in_turns = cell.program and cell.devices == 1
            together = [c for c in contenders if c.framework == "jax" and not (c.alone or in_turns)]
            own = {c: pool.submit(self._enter, cell, c, inputs) for c in together}
        return {c: own[c].result if c in own else functools.partial(self._enter, cell, c, inputs) for c in contenders}

    def _enter_alone(self, cell: Cell, ways: dict[Contender, Callable[[], Entrant | None]]) -> list[Entrant]:
        """Enters the other contenders of a cell, while nothing else is built; returns all, in the order of its contenders."""
        entrants = [enter() for enter in ways.values()]
        self._hurtful_of.pop(cell.name, None)  # its memory is needed
        return [entrant for entrant in entrants if entrant is not None]

    def _measure(self, cell: Cell, entrants: list[Entrant]) -> None:
        """Times and records the entrants of a cell."""
        if cell.pass_ != FIRST_CALL or cell.program:
            self._time(cell, entrants)
        fastest: dict[str, Entrant] = {}
        for entrant in sorted((e for e in entrants if e.times), key=lambda e: statistics.median(e.times)):
            fastest.setdefault(entrant.implementation, entrant)
        for entrant in entrants:
            if fastest.get(entrant.implementation) is entrant:
                self._record(cell, entrant)

    def _inputs_that_fit(self, cell: Cell) -> list[tuple[Any, ...]] | None:
        try:
            return self._inputs(cell)
        except Exception as problem:
            if not _is_out_of_memory(problem):
                raise
            self.left_out.append(f"{cell.name}: its inputs do not fit into memory, {_words(problem)}")
            self._say(f"{self.left_out[-1]}, left out")
            return None

    def _inputs(self, cell: Cell) -> list[tuple[Any, ...]]:
        key = jax.random.key(0)
        inputs = [cell.inputs(jax.random.fold_in(key, buffer), False) for buffer in range(self._effort.buffers(cell))]
        return jax.block_until_ready(inputs)

    def _takes_part(self, contender: Contender) -> bool:
        if contender.name not in (OURS, ONE, "copy") and self._peers is not None and contender.name not in self._peers:
            return False
        missing = contender.missing()
        if missing is not None:
            own = contender.name == missing.split(":")[0]
            self._say_once(f"{missing}, left out" if own else f"{missing}, its {contender.name} left out")
        return missing is None

    def _say_once(self, line: str) -> None:
        if line not in self._named:
            self._named.add(line)
            self._say(line)

    def _enter(self, cell: Cell, contender: Contender, inputs: list[tuple[Any, ...]]) -> Entrant | None:
        """The contender with its values checked; None, and why, if it is not to be timed."""
        try:
            return self._checked(cell, contender, inputs)
        except Exception as problem:  # whatever a library raises is the reason to leave it out
            return self._leave_out(cell, contender, _words(problem), problem)

    def _leave_out(self, cell: Cell, contender: Contender, reason: str, problem: Exception | None = None) -> None:
        self._say(f"{cell.name}: {contender.name} left out: {reason}")
        if contender.name == OURS:
            is_right = problem is not None and (library.refuses(problem) or _is_out_of_memory(problem))
            (self.left_out if is_right else self.problems).append(f"{cell.name}: {reason}")

    def _checked(self, cell: Cell, contender: Contender, inputs: list[tuple[Any, ...]]) -> Entrant | None:
        arguments = [contender.prepare(*buffer) for buffer in inputs]
        synchronize(contender.framework, arguments)
        if cell.pass_ == FIRST_CALL:
            jax.clear_caches()
        start = time.perf_counter()
        function = contender.build()
        if contender.framework == "jax" and cell.jitted:
            function = jax.jit(function)
            with contender.context():
                lowered = function.lower(*arguments[0]) if cell.program else None
            function = lowered.compile(contender.compiler_options or None) if lowered else function
        # Where threads start two programs at a time, collectives of one may wait for those of the other forever.
        with self._turn if cell.devices > 1 else nullcontext():
            return self._run_and_check(cell, contender, function, inputs, arguments, start)

    def _run_and_check(
        self,
        cell: Cell,
        contender: Contender,
        function: Any,
        inputs: list[tuple[Any, ...]],
        arguments: list[tuple[Any, ...]],
        start: float,
    ) -> Entrant | None:
        """The contender, whose function was made from `start` on, with its values checked."""
        times = []
        output = function(*arguments[0])
        synchronize(contender.framework, output)
        if cell.pass_ == FIRST_CALL:
            times.append(1e6 * (time.perf_counter() - start))
        error, relative = check.errors(cell, contender, inputs[0], output)
        implementation = contender.name if contender.name != OURS else _implementation(contender, arguments[0])
        found = []
        if contender.name != OURS and not relative <= _GROSS:
            found.append(f"its relative error is {relative:.2g}")
        if contender.name == OURS and cell.pass_ != FIRST_CALL and cell.repeatable:
            found += check.differing_bits(cell, contender, function, inputs[0], output, kernels="xla" not in implementation)
        del output
        if contender.name not in YARDSTICKS:
            hurtful = self._hurtful(cell)
            error = max(error, check.errors(cell, contender, hurtful, function(*contender.prepare(*hurtful)))[0])
        if contender.name == OURS and not error <= 1:
            found.append(f"its error is {error:.3g} times the budget")
        if found:
            return self._leave_out(cell, contender, "; ".join(found))
        recorded = None if contender.name in YARDSTICKS else error
        is_one_call = cell.program and cell.jitted and cell.calls == 1
        temporaries = _temporaries(contender.framework, function, arguments[0]) if is_one_call else None
        return Entrant(contender, function, arguments, implementation, recorded, times, temporaries)

    def _hurtful(self, cell: Cell) -> tuple[Any, ...]:
        """Inputs with large values, the same for all contenders of a cell."""
        with self._lock:
            if cell.name not in self._hurtful_of:
                self._hurtful_of[cell.name] = cell.inputs(jax.random.key(1), True)
            return self._hurtful_of[cell.name]

    def _time(self, cell: Cell, entrants: list[Entrant]) -> None:
        """Rounds in which each entrant has its turn, so that a drift of the clocks hits all alike."""
        warm_ups = 1 + self._effort.warm_ups
        for number in range(warm_ups + self._effort.rounds):
            if number == warm_ups:
                for entrant in entrants:
                    entrant.times, entrant.loads = [], []
            entrants[:] = [entrant for entrant in entrants if self.take_turn(cell, entrant)]
        if cell.devices > 1 and self._clock is not wall_clock:
            for entrant in entrants:
                entrant.kernel_us = self._kernel_us(entrant, self._least_calls(cell))

    def take_turn(self, cell: Cell, entrant: Entrant) -> bool:
        """Times an entrant once more, after a first turn that only warms it up; False if it fails, and is left out."""
        try:
            if not entrant.calls:
                self._warm_up(cell, entrant)
            elif cell.pass_ == FIRST_CALL:
                entrant.times.append(_us_of_a_first_call(entrant))
            else:
                self._time_once(cell, entrant)
        except Exception as problem:  # out of memory, say: the reason to leave it out
            reason = f"not timed ({entrant.contender.framework}), {_words(problem)}"
            self._leave_out(cell, entrant.contender, reason, problem)
            return False
        return True

    def _time_once(self, cell: Cell, entrant: Entrant) -> None:
        clock = loaded_clock(self._effort.turn) if self._effort.loaded else wall_clock if cell.program else self._clock
        time.sleep(self._effort.pause)

        def turn() -> float:
            return clock(entrant.function, entrant.arguments, entrant.calls, entrant.contender.framework)

        if self._meter is None:
            entrant.times.append(turn())
            return
        us, load = self._meter.during(turn)
        entrant.times.append(us)
        entrant.loads.append(load)

    def _warm_up(self, cell: Cell, entrant: Entrant) -> None:
        """Calls it with each input, and finds how many calls a turn has; of first calls the very first does not count."""
        if cell.pass_ == FIRST_CALL:
            entrant.times, entrant.calls = [], 1
            return
        start = time.perf_counter()
        for arguments in entrant.arguments:
            synchronize(entrant.contender.framework, entrant.function(*arguments))
        seconds = (time.perf_counter() - start) / len(entrant.arguments)
        entrant.calls = max(self._least_calls(cell), len(entrant.arguments))
        if cell.program:
            entrant.calls = max(entrant.calls, math.ceil(self._effort.turn / seconds))

    def _least_calls(self, cell: Cell) -> int:
        return min(self._effort.calls, _CALLS_OF_A_PROGRAM) if cell.program else self._effort.calls

    def _kernel_us(self, entrant: Entrant, calls: int) -> float | None:
        try:
            return mean_of_devices_us(entrant.function, entrant.arguments, calls, entrant.contender.devices)
        except (ImportError, RuntimeError) as problem:  # CUPTI's; the wall clock's time stands without it
            self._say_once(f"kernel times left out: {_words(problem)}")
            return None

    def _record(self, cell: Cell, entrant: Entrant) -> None:
        us, least_us = (of(entrant.times) / cell.calls for of in (statistics.median, min))
        kernel_us = entrant.kernel_us and entrant.kernel_us / cell.calls
        energies = [
            load.watts * turn_us / 1e3 / cell.calls for load, turn_us in zip(entrant.loads, entrant.times, strict=False)
        ]
        if cell.op == "copy":
            self._copy_speed[cell.dtype] = cell.bytes / us
        copy_speed = self._copy_speed.get(cell.dtype)
        row = Row(
            run=self._id,
            date=now(),
            gpu=self._gpu,
            jax=jax.__version__,
            commit=self._commit,
            op=cell.op,
            pass_=cell.pass_,
            dtype=cell.dtype,
            shape=cell.shape_text,
            options=cell.options,
            implementation=entrant.implementation,
            us=us,
            bytes=cell.bytes,
            flops=cell.flops,
            copy_share=cell.bytes / us / copy_speed if cell.bytes and copy_speed else None,
            error=entrant.error,
            temporaries=entrant.temporaries,
            kernel_us=kernel_us,
            least_us=least_us if self._effort.turn and not self._effort.loaded else None,
            millijoules=statistics.median(energies) if energies else None,
            sm_mhz=statistics.median(load.sm_mhz for load in entrant.loads) if entrant.loads else None,
        )
        self._write(row)
        share = "" if row.copy_share is None else f"{row.copy_share:.3f}"
        error = "" if row.error is None else f"{row.error:.3g}"
        tflops = "" if not row.flops else f"{row.tflops:.1f}"
        speed = f"{row.speed / 1e3:7.0f} {tflops:>8}"
        memory = "" if row.temporaries is None else f"{row.temporaries / 1e6:.1f}"
        kernels = "" if row.kernel_us is None else f", {row.kernel_us:.2f} in kernels"
        line = f"{cell.name:64} {row.implementation:16} {us:10.2f} {speed} {share:>8} {error:>9} {memory:>8}"
        load = "" if row.millijoules is None else f", {row.millijoules:.1f} mJ at {row.sm_mhz:.0f} MHz"
        self._say(line.rstrip() + kernels + load)


def _us_of_a_first_call(entrant: Entrant) -> float:
    """Microseconds to trace, lower and compile as if for the first time."""
    jax.clear_caches()
    start = time.perf_counter()
    with entrant.contender.context():
        lowered = jax.jit(entrant.contender.build()).lower(*entrant.arguments[0])
    lowered.compile(entrant.contender.compiler_options or None)
    return 1e6 * (time.perf_counter() - start)


def _words(problem: Exception) -> str:
    """An error in a line."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0][:200]


def _is_out_of_memory(problem: Exception) -> bool:
    """Tells whether the GPU has too little memory. A kernel that asks for too much shared memory is wrong instead."""
    words = str(problem)
    return isinstance(problem, jax.errors.JaxRuntimeError) and "RESOURCE_EXHAUSTED" in words and "shared" not in words.lower()


def _temporaries(framework: str, function: Any, arguments: tuple[Any, ...]) -> int:
    """The most bytes that a call holds beyond inputs and outputs; a function of JAX is a compiled one."""
    if framework == "jax":
        return function.memory_analysis().temp_size_in_bytes
    cuda = torch().cuda
    cuda.reset_peak_memory_stats()
    before = cuda.memory_allocated()
    output = jax.tree.leaves(function(*arguments))
    return cuda.max_memory_allocated() - before - sum(tensor.nbytes for tensor in output)


def _implementation(contender: Contender, arguments: tuple[Any, ...]) -> str:
    """The implementations that run in a call of ours, as `explain` names them; "xla" where it is all plain `jax.numpy`."""
    with contender.context():
        explanation = explain(contender.build(), *arguments)
    return "+".join(dict.fromkeys(decision.implementation for decision in explanation)) or "xla"


def gpu_name() -> str | None:
    """The name of the GPU that JAX sees, or None."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # torch lives on the same GPU
    try:
        return jax.devices()[0].device_kind if jax.default_backend() == "gpu" else None
    except (AssertionError, RuntimeError):  # JAX was told to use one that is not there
        return None


def gpu_ordinal() -> int:
    """The number that CUDA gives the GPU on which cells for one device run."""
    return jax.devices()[0].local_hardware_id


def device_count() -> int:
    """Counts the devices that JAX sees."""
    return len(jax.devices())


def commit(root: Path = ROOT) -> str | None:
    """The short hash of a checkout, with `-dirty` if the package differs from it; None outside of a checkout."""
    return rows.commit(root)
