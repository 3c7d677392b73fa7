"""The cells of the host: what an import and an eager call cost in Python.

A cell has one of the passes

    import   what `import jaxsoftmax` adds to `import jax`, in processes of their own, in seconds of the processor; the row
             `jax` is `import jax` alone
    eager    a call outside of jit, on so few numbers that they take little of its time, in turns with its counterpart on the
             wall clock

`jax.nn.softmax` is not jitted, and neither is ours. `jax.nn.log_softmax` is, so that `log_softmax` is measured beside both.
Where there is no GPU rows go to the processor's folder, `results/cpu-<its name>`.
"""

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax

from benchmarks import harness
from benchmarks.cells import OURS, Cell, Contender, library
from benchmarks.results import Row, new_run, now
from benchmarks.softmax import forward_cell
from tests.support import oracle

IMPORT = "import"
EFFORT = harness.Effort(rounds=60, calls=1, cache=0, turn=0.005)
PROCESSES = 7  # of which the median counts
SHAPE = 4, 16
SCALE = 0.5
UNJITTED = "jax.nn softmax"  # the peer of another op

_IMPORTS = f"""
import json, time
start = time.process_time()
import jax
between = time.process_time()
import jaxsoftmax
print(json.dumps({{"jax": between - start, "{OURS}": time.process_time() - between}}))
"""


def cells() -> list[Cell]:
    """The import, and eager calls with and without a scale."""
    return [_import(), *(_eager(op, scale) for op in ("softmax", "log_softmax") for scale in (1.0, SCALE))]


def _import() -> Cell:
    contenders = tuple(Contender(name, _no_function) for name in (OURS, "jax"))
    return Cell("jaxsoftmax", IMPORT, "", (), "", 0, _no_function, contenders, _no_function)


def _no_function(*_: Any) -> Any:
    raise AssertionError("an import calls no function")


def _eager(op: str, scale: float) -> Cell:
    cell = forward_cell(op, "float32", SHAPE)
    ours = Contender(OURS, lambda: lambda x: getattr(library, op)(x, **({} if scale == 1 else {"scale": scale})))
    contenders = [ours, _of_jax_nn("jax.nn", op, scale)]
    if op != "softmax":
        contenders.append(_of_jax_nn(UNJITTED, "softmax", scale))
    return replace(
        cell,
        pass_="eager",
        options="" if scale == 1 else f"scale={scale}",
        bytes=0,
        contenders=tuple(contenders),
        truth=_truth(op, scale),
        program=True,
        jitted=False,
    )


def _of_jax_nn(name: str, op: str, scale: float) -> Contender:
    function = getattr(jax.nn, op)
    return Contender(name, lambda: function if scale == 1 else lambda x: function(scale * x), truth=_truth(op, scale))


def _truth(op: str, scale: float) -> Callable[..., Any]:
    return lambda x: [getattr(oracle, op)(scale * x)]


def import_seconds() -> dict[str, float]:
    """Seconds of the processor that each import takes in a new process, where their bytecode may be written."""
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": ""}
    command = [sys.executable, "-c", _IMPORTS]
    run = subprocess.run(command, cwd=harness.ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(run.stdout)


def measure(
    wanted: Iterable[Cell],
    machine: str,
    commit: str,
    write: Callable[[Row], None],
    *,
    peers: frozenset[str] | None = None,
    effort: harness.Effort = EFFORT,
    importing: Callable[[], dict[str, float]] = import_seconds,
    say: Callable[[str], None] = lambda line: print(line, flush=True),
) -> tuple[list[str], list[str]]:
    """Writes a row for each cell and contender, of an import unless an implementation was asked for.

    Returns:
      What is wrong with ours, and what of it was left out.
    """
    wanted = list(wanted)
    imports = [cell for cell in wanted if cell.pass_ == IMPORT and library.implementation is None]
    for cell in imports:
        found, own = [importing() for _ in range(PROCESSES)], new_run()
        for name in (c.name for c in cell.contenders if c.name == OURS or peers is None or c.name in peers):
            row = _row(cell, own, machine, commit, name, [1e6 * seconds[name] for seconds in found])
            write(row)
            say(f"{cell.name:64} {name:16} {row.us:10.2f}")
    run = harness.Run(machine, commit, write, peers=peers, effort=effort, say=say)
    if calls := [cell for cell in wanted if cell.pass_ != IMPORT]:
        run.measure(calls)
    return run.problems, run.left_out


def _row(cell: Cell, run: str, machine: str, commit: str, name: str, us: list[float]) -> Row:
    named = cell.op, cell.pass_, cell.dtype, cell.shape_text, cell.options, name
    fixed: dict[str, Any] = {"bytes": 0, "flops": 0, "copy_share": None, "error": None}
    return Row(run, now(), machine, jax.__version__, commit, *named, statistics.median(us), **fixed, least_us=min(us))
