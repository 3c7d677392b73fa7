"""The cells of first calls: how long a program takes until it has run once, in a process of its own.

Of softmax, of attention and of its gradients, by ours and by the way through `jax.nn`. A cell has the pass `lower`, to trace
and lower, which is Python and loads the modules of kernels; `compile`; or `first_call`, both and the first run. JAX is
imported, the GPU has run something, and nothing is taken from a compilation cache. Bytecode of modules is there, as after an
install: where the environment forbids Python to write it, it is written none the less.
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import attention, softmax
from benchmarks.cells import FIRST_CALL, OURS, Cell, Contender, library
from benchmarks.results import Row, new_run, now
from jaxsoftmax import explain

PASSES = ("lower", "compile", FIRST_CALL)
REPEATS = 3  # processes, of which the median counts
_PEERS = ("jax.nn", "cudnn")
_CALL = attention.Call(batch=4, length=4096, heads=16, head_size=128, causal=True)


def programs() -> dict[str, Cell]:
    """What is called, by name; contenders are those that are compared here."""
    found = {
        "softmax": next(cell for cell in softmax.cells() if cell.name == "softmax forward float32 32768x4096"),
        "attention": attention.cell_of(_CALL),
        "attention_gradients": attention.cell_of(replace(_CALL, backward=True)),
    }
    kept = {name: tuple(c for c in cell.contenders if c.name in (OURS, *_PEERS)) for name, cell in found.items()}
    return {name: replace(cell, contenders=kept[name]) for name, cell in found.items()}


def cells() -> list[Cell]:
    """A cell for each program and pass."""
    return [_cell(program, pass_) for program in programs().values() for pass_ in PASSES]


def _cell(program: Cell, pass_: str) -> Cell:
    options = " ".join(filter(None, [program.options, "grad=1" if "backward" in program.pass_ else ""]))
    return replace(program, pass_=pass_, options=options, bytes=0, flops=0)


def seconds(contender: Contender, inputs: Sequence[Any]) -> dict[str, float]:
    """Of each pass, in this process."""
    arguments = jax.block_until_ready(contender.prepare(*inputs))
    jax.block_until_ready(jax.jit(jnp.negative)(jnp.ones(8)))
    start = time.perf_counter()
    lowered = jax.jit(contender.build()).lower(*arguments)
    after_lowering = time.perf_counter()
    compiled = lowered.compile()
    after_compiling = time.perf_counter()
    jax.block_until_ready(compiled(*arguments))
    return dict(
        zip(PASSES, (after_lowering - start, after_compiling - after_lowering, time.perf_counter() - start), strict=True)
    )


def in_a_process(program: str, contender: str) -> dict[str, Any]:
    """What `main` prints there."""
    environment = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "JAX_ENABLE_COMPILATION_CACHE": "false",
        "PYTHONDONTWRITEBYTECODE": "",
    }
    forced = [] if library.implementation is None else [library.implementation]
    command = [sys.executable, "-m", "benchmarks.first_call", program, contender, *forced]
    root = Path(__file__).parents[1]
    run = subprocess.run(command, cwd=root, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout.splitlines()[-1])


def main(program: str, contender: str, implementation: str | None = None) -> None:
    """Prints the seconds of each pass, and which implementation ran, as a line of JSON; or why the one asked for cannot."""
    library.implementation = implementation
    cell = programs()[program]
    chosen = next(one for one in cell.contenders if one.name == contender)
    inputs = cell.inputs(jax.random.key(0), False)
    try:
        found: dict[str, Any] = seconds(chosen, inputs)
    except NotImplementedError as problem:
        if not library.refuses(problem):
            raise
        print(json.dumps({"refused": str(problem)}))
        return
    if contender == OURS:
        decisions = explain(chosen.build(), *chosen.prepare(*inputs))
        contender = "+".join(dict.fromkeys(decision.implementation for decision in decisions))
    print(json.dumps(found | {"implementation": contender}))


def measure(
    wanted: Iterable[Cell],
    gpu: str,
    commit: str,
    write: Callable[[Row], None],
    *,
    peers: frozenset[str] | None = None,
    call: Callable[[str, str], dict[str, Any]] = in_a_process,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> list[str]:
    """Writes a row for each cell and contender; returns what could not be measured of ours."""
    run, problems, names = new_run(), [], {cell.name for cell in wanted}
    for program, cell in programs().items():
        passes = [one for one in (_cell(cell, pass_) for pass_ in PASSES) if one.name in names]
        for contender in dict.fromkeys(c.name for c in cell.contenders if c.name == OURS or peers is None or c.name in peers):
            if not passes:
                continue
            try:
                found = [call(program, contender) for _ in range(REPEATS)]
            except (subprocess.CalledProcessError, ValueError, IndexError) as problem:
                say(f"{program}: {contender} left out: {problem}")
                problems += [f"{program}: {problem}"] if contender == OURS else []
                continue
            if "refused" in found[-1]:
                say(f"{program}: {contender} left out: {found[-1]['refused']}")
                continue
            for one in passes:
                us = 1e6 * statistics.median(times[one.pass_] for times in found)
                write(_row(one, run, gpu, commit, found[-1]["implementation"], us))
                say(f"{one.name:64} {found[-1]['implementation']:16} {us / 1e6:8.2f} s")
    return problems


def _row(cell: Cell, run: str, gpu: str, commit: str, implementation: str, us: float) -> Row:
    named = cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options, implementation
    return Row(run, now(), gpu, jax.__version__, commit, *named, us, bytes=0, flops=0, copy_share=None, error=None)


if __name__ == "__main__":
    main(*sys.argv[1:])
