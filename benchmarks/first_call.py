"""The cells of first calls: how long a program takes until it has run once, in a process of its own.

Each public op has cells (see `programs`), by ours, and of softmax, of attention and of its gradients by the way through
`jax.nn`. A cell has one of the passes

    lower        to trace and lower, which is Python and loads the modules of kernels
    lower_again  the same once more in that process, for a batch of twice the size
    compile
    first_call   to trace, lower, compile and run
    cached       the same in a process whose compilation cache another one has filled, which lowered other kernels before

JAX is imported, the GPU has run something, and except in `cached` nothing is taken from a compilation cache. Without a GPU
there are the passes `lower` and `lower_again` alone, for CUDA, in seconds of the processor; their rows go to `results/cpu`.
Bytecode of modules is there, as after an install: where the environment forbids Python to write it, it is written all the same.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.cells import FIRST_CALL, OURS, Cell, Contender, library
from benchmarks.programs import programs
from benchmarks.results import Row, new_run, now
from jaxsoftmax import explain

LOWERING = ("lower", "lower_again")
RUNNING = ("compile", FIRST_CALL)
CACHED = "cached"
PASSES = (*LOWERING, *RUNNING)
REPEATS = 3  # processes, of which the median counts
WITHOUT_A_GPU = "cpu"  # the name of the machine


def cells() -> list[Cell]:
    """A cell for each program and pass, and one for the gradients of attention where they are cached."""
    found = [_cell(program, pass_) for program in programs().values() for pass_ in PASSES]
    return [*found, *(_cell(program, CACHED) for program in programs().values() if _is_cached(program))]


def on(machine: str, cells: Iterable[Cell]) -> list[Cell]:
    """The cells that a machine can measure."""
    return [cell for cell in cells if machine != WITHOUT_A_GPU or cell.pass_ in LOWERING]


def _is_cached(program: Cell) -> bool:
    has_more = not {"all=1", "functions=1"}.isdisjoint(program.options.split())
    return program.op == "attention" and "backward" in program.pass_ and not has_more


def _cell(program: Cell, pass_: str) -> Cell:
    options = program.options
    if "backward" in program.pass_ and "grad=1" not in options:
        options = f"{options} grad=1".strip()
    contenders = tuple(c for c in program.contenders if c.name == OURS) if pass_ == CACHED else program.contenders
    return replace(program, pass_=pass_, options=options, bytes=0, flops=0, contenders=contenders)


def seconds(program: Cell, contender: Contender, runs: bool) -> dict[str, float]:
    """Seconds of each pass, in this process; those of `LOWERING` alone, for CUDA, unless it `runs` what it lowers."""
    platforms, clock = (None, time.perf_counter) if runs else (("cuda",), time.process_time)
    arguments = contender.prepare(*program.inputs(jax.random.key(0), False)) if runs else _types(program, contender)
    jax.block_until_ready((arguments if runs else (), jax.jit(jnp.negative)(jnp.ones(8))))
    start = clock()
    lowered = _lowered(contender, arguments, platforms)
    found = {"lower": clock() - start}
    if runs:
        compiled = lowered.compile()
        after_compiling = clock()
        jax.block_until_ready(compiled(*arguments))
        found |= {"compile": after_compiling - start - found["lower"], FIRST_CALL: clock() - start}
    further = _types(program, contender, times=2)
    start = clock()
    _lowered(contender, further, platforms)
    return found | {"lower_again": clock() - start}


def _lowered(contender: Contender, arguments: Iterable[Any], platforms: tuple[str, ...] | None) -> Any:
    return jax.jit(contender.build()).trace(*arguments).lower(lowering_platforms=platforms)


def _types(program: Cell, contender: Contender, times: int = 1) -> tuple[Any, ...]:
    """Returns the types of the contender's arguments, for a batch that is `times` as large."""

    def arguments(key):
        arrays = program.inputs(key, False)
        batched = len(arrays) - program.shared
        larger = [jnp.concatenate([array] * times) if i < batched else array for i, array in enumerate(arrays)]
        return contender.prepare(*larger)

    return jax.eval_shape(arguments, jax.random.key(0))


def in_a_process(program: str, contender: str, *, runs: bool, cache: str | None = None, before: str = "") -> dict[str, Any]:
    """Returns what `main` prints in a new process that has a compilation cache and has lowered another program first."""
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "true" if cache else "false",
        "JAX_COMPILATION_CACHE_DIR": cache or "",
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    command = [sys.executable, "-m", "benchmarks.first_call", program, contender]
    command += ["--runs"] * runs + ["--before", before] * bool(before)
    command += [] if library.implementation is None else ["--implementation", library.implementation]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main(*command: str) -> None:
    """Prints the seconds of each pass, which implementation ran, and misses of a cache, as a line of JSON; or why it cannot."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("contender")
    parser.add_argument("--runs", action="store_true")
    parser.add_argument("--before")
    parser.add_argument("--implementation")
    options = parser.parse_args(command)
    library.implementation = options.implementation
    misses: list[str] = []
    if options.before:
        other = programs()[options.before]
        _lowered(other.contenders[0], _types(other, other.contenders[0]), ("cuda",))
    program = programs()[options.program]
    chosen = next(one for one in program.contenders if one.name == options.contender)
    jax.monitoring.register_event_listener(lambda event, **_: misses.append(event) if event.endswith("/cache_misses") else None)
    try:
        found: dict[str, Any] = seconds(program, chosen, options.runs)
    except NotImplementedError as problem:
        if not library.refuses(problem):
            raise
        print(json.dumps({"refused": str(problem)}))
        return
    name = options.contender
    if name == OURS:
        decisions = explain(chosen.build(), *_types(program, chosen), platform="cuda")
        name = "+".join(dict.fromkeys(decision.implementation for decision in decisions))
    print(json.dumps(found | {"implementation": name, "misses": len(misses)}))


def measure(
    wanted: Iterable[Cell],
    machine: str,
    commit: str,
    write: Callable[[Row], None],
    *,
    peers: frozenset[str] | None = None,
    call: Callable[..., dict[str, Any]] = in_a_process,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> list[str]:
    """Writes a row for each cell and contender; returns what could not be measured of ours."""
    run, problems, names = new_run(), [], {cell.name for cell in wanted}
    if machine == WITHOUT_A_GPU:
        peers = frozenset()

    def record(cell: Cell, found: list[dict[str, Any]]) -> None:
        us = 1e6 * statistics.median(times[cell.pass_] for times in found)
        write(_row(cell, run, machine, commit, found[-1]["implementation"], us))
        say(f"{cell.name:72} {found[-1]['implementation']:16} {us / 1e6:8.2f} s")

    for name, program in programs().items():
        passes = [one for one in (_cell(program, pass_) for pass_ in PASSES) if one.name in names]
        runs = any(one.pass_ in RUNNING for one in passes)
        compared = [c.name for c in program.contenders if c.name == OURS or peers is None or c.name in peers]
        for contender in dict.fromkeys(compared if passes else []):
            try:
                found = [call(name, contender, runs=runs) for _ in range(REPEATS)]
            except (subprocess.CalledProcessError, ValueError, IndexError) as problem:
                say(f"{name}: {contender} left out: {problem}")
                problems += [f"{name}: {problem}"] if contender == OURS else []
                continue
            if "refused" in found[-1]:
                say(f"{name}: {contender} left out: {found[-1]['refused']}")
                continue
            for one in passes:
                record(one, found)
        if _is_cached(program) and _cell(program, CACHED).name in names:
            try:
                record(_cell(program, CACHED), _from_a_cache(name, call))
            except (subprocess.CalledProcessError, ValueError, IndexError) as problem:
                problems.append(f"{name}: {CACHED}: {problem}")
    return problems


def _from_a_cache(name: str, call: Callable[..., dict[str, Any]]) -> list[dict[str, Any]]:
    """The seconds of first calls whose cache a process filled that had lowered another program before.

    Raises:
      ValueError: something was compiled.
    """
    with tempfile.TemporaryDirectory() as cache:
        call(name, OURS, runs=True, cache=cache, before=next(iter(programs())))
        found = [call(name, OURS, runs=True, cache=cache) for _ in range(REPEATS)]
    if misses := sum(times["misses"] for times in found):
        raise ValueError(f"{misses} programs were compiled that a process before had compiled")
    return [times | {CACHED: times[FIRST_CALL]} for times in found]


def _row(cell: Cell, run: str, machine: str, commit: str, implementation: str, us: float) -> Row:
    named = cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options, implementation
    return Row(run, now(), machine, jax.__version__, commit, *named, us, bytes=0, flops=0, copy_share=None, error=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
