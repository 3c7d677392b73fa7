"""Measures jaxsoftmax and its peers on the GPU that JAX sees, and holds the result files to the bars.

python -m benchmarks softmax               measure, print, and append to results/<gpu>/softmax.csv
python -m benchmarks softmax_sweep         likewise, softmax over 64 widths drawn at random
python -m benchmarks attention             likewise, attention, and with tangents of query, key and value
python -m benchmarks attention_gradients   likewise, its forward and backward passes together
python -m benchmarks attention_sustained   likewise, attention back to back in long turns, with the energy of a call and clocks
python -m benchmarks attention_cool        likewise, single calls of attention on a GPU that rests between them
python -m benchmarks score_functions       likewise, attention with score and mask functions beside arguments that mean the same
python -m benchmarks decoding              likewise, attention of a few queries to the keys of a cache
python -m benchmarks cross_entropy         likewise, losses from integer labels, and their gradient
python -m benchmarks log_probs             likewise, log-probabilities of ids and entropies, and PPO's loss from logits
python -m benchmarks linear_cross_entropy  likewise, the loss of a linear layer and its gradients, and their memory
python -m benchmarks linear_log_probs      likewise, log-probabilities of a linear layer and their gradients, and GRPO's loss
python -m benchmarks linear_divergence     likewise, divergences of two linear layers and the gradients of one, and their memory
python -m benchmarks top_k                 likewise, the largest entries of rows, their weights, and samples
python -m benchmarks sampler               likewise, a token with its log-probability, beside the steps of other samplers
python -m benchmarks reference             likewise, the reference, which runs where no kernel does, and its counterparts; on a
                                           CPU too, results/cpu-<its name>/xla
python -m benchmarks first_call            likewise, how long first calls take to lower, compile and run; without a GPU how long
                                           they take to lower for CUDA, results/cpu
python -m benchmarks host                  likewise, what an import and eager calls cost in Python; without a GPU
                                           results/cpu-<its name>
python -m benchmarks sharded               likewise, calls on arrays that are sharded over all GPUs of the host, beside one of
                                           them; results/<gpu>x<count>/sharded.csv, as in h200x2
python -m benchmarks sharded_rows          likewise, softmax of rows that GPUs share, in each way in which they can
python -m benchmarks links                 likewise, the exchanges between these GPUs alone
python -m benchmarks softmax --only REGEX  measure a part, and the copies that it is compared with
python -m benchmarks softmax --implementation triton
                                           measure ours on one implementation; results/<gpu>/triton/softmax.csv
python -m benchmarks softmax --against PATH
                                           measure ours here and in another checkout by turns, each in a process of its own, and
                                           print the ratio of every cell; no result file is touched
python -m benchmarks --check               hold what was measured last of each cell to bars.toml; needs no GPU
python -m benchmarks --plot                draw what was measured last; needs no GPU, but matplotlib
"""

import argparse
import math
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import (
    against,
    attention,
    bars,
    clock,
    cross_entropy,
    decoding,
    figures,
    first_call,
    harness,
    host,
    linear_cross_entropy,
    linear_divergence,
    linear_log_probs,
    links,
    log_probs,
    nvml,
    reference,
    results,
    sampler,
    score_functions,
    sharded,
    softmax,
    sustained,
    sweep,
    top_k,
)
from benchmarks.cells import IMPLEMENTATIONS, OURS, Cell, library
from benchmarks.results import Row

SUITES: dict[str, Callable[[], list[Cell]]] = {
    "softmax": softmax.cells,
    "softmax_sweep": sweep.cells,
    "attention": attention.cells,
    "attention_gradients": attention.gradient_cells,
    "attention_sustained": sustained.cells,
    "attention_cool": sustained.cool_cells,
    "score_functions": score_functions.cells,
    "decoding": decoding.cells,
    "cross_entropy": cross_entropy.cells,
    "log_probs": log_probs.cells,
    "linear_cross_entropy": linear_cross_entropy.cells,
    "linear_log_probs": linear_log_probs.cells,
    "linear_divergence": linear_divergence.cells,
    "top_k": top_k.cells,
    "sampler": sampler.cells,
    "reference": reference.cells,
    "first_call": first_call.cells,
    "host": host.cells,
    "sharded": sharded.cells,
    "sharded_rows": sharded.row_cells,
    "links": links.cells,
}
ROUNDS = {"sharded_rows": 60}  # of suites whose calls are so short that a host's other work would decide; 5 of the others
ON_SEVERAL = frozenset({"sharded", "sharded_rows", "links"})  # suites that are measured on all GPUs; the others take one
WITHOUT_FIGURES = frozenset({"attention_sustained", "attention_cool"})  # they would take the names of those of `attention`
WITHOUT_TURNS = {  # suites that cannot be measured against another checkout, and why
    "first_call": "starts a process for each measurement",
    "host": "starts a process for each import",
    "links": "measures nothing of ours",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 if a bar is missed or our op is wrong, 2 for what cannot be done."""
    parser = _parser()
    options = parser.parse_args(argv)
    _refuse_what_does_not_go_together(parser, options)
    try:
        if options.self_test:
            return _self_test()
        if options.check:
            return _check(options)
        if options.plot:
            return _plot(options)
        return _list_or_measure(options)
    except (argparse.ArgumentTypeError, ValueError, OSError) as problem:
        return _fail(str(problem))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("suite", nargs="?", choices=SUITES, help="what to measure; with --check and --plot, all by default")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--list", action="store_true", help="print the cells, and measure nothing")
    modes.add_argument(
        "--against", type=_checkout, metavar="PATH", help="measure ours beside that of the checkout in this directory"
    )
    modes.add_argument("--check", action="store_true", help="hold what was measured last of each cell to bars.toml")
    modes.add_argument("--plot", action="store_true", help="draw what was measured last of each cell")
    modes.add_argument("--self-test", action="store_true", help="compare the two ways to time, on a copy of 1 GiB")
    parser.add_argument(
        "--only", type=_pattern, metavar="REGEX", help="a part of the cells: matched in 'op pass dtype shape options'"
    )
    parser.add_argument("--peers", type=_names, metavar="A,B", help="the peers to measure, of those that are installed")
    parser.add_argument(
        "--implementation", choices=sorted(IMPLEMENTATIONS), help="what ours runs on; with --check and --plot, whose files"
    )
    parser.add_argument(
        "--wall-only", action="store_true", default=None, help="on several GPUs, leave out the time of kernels alone"
    )
    parser.add_argument(
        "--turn",
        type=_seconds,
        metavar="SECONDS",
        help=f"of attention_sustained, how long a turn lasts; default: {sustained.TURN:g}",
    )
    parser.add_argument(
        "--pause",
        type=_seconds,
        metavar="SECONDS",
        help=f"of attention_cool, the rest before a call; default: {sustained.PAUSE:g}",
    )
    parser.add_argument("--commit", type=_word, metavar="HASH", help="the commit that is measured, where git cannot tell")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="with --against, a new file for its rows")
    parser.add_argument("--gpu", metavar="NAME", help="the folder to check or draw, such as h200; all by default")
    parser.add_argument(
        "--out", type=Path, default=results.FOLDER, metavar="DIR", help="where result files are; default: benchmarks/results"
    )
    return parser


def _pattern(text: str) -> re.Pattern[str]:
    try:
        return re.compile(text)
    except re.error as problem:
        raise argparse.ArgumentTypeError(f"{text!r} is no regular expression: {problem}") from None


def _names(text: str) -> frozenset[str]:
    return frozenset(name.strip() for name in text.split(",") if name.strip())


def _checkout(text: str) -> Path:
    path = Path(text).resolve()
    if not (path / "jaxsoftmax" / "__init__.py").is_file():
        raise argparse.ArgumentTypeError(f"{text!r} is no checkout: it must be a directory with the package jaxsoftmax in it")
    return path


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of seconds")
    return seconds


def _word(text: str) -> str:
    if not re.fullmatch(r"[\w.-]+", text):
        raise argparse.ArgumentTypeError(f"{text!r} is no commit")
    return text


def _refuse_what_does_not_go_together(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    measuring = not (options.list or options.check or options.plot or options.self_test)
    recording = measuring and options.against is None
    allowed = {
        "--only": measuring or options.list,
        "--peers": recording,
        "--implementation": measuring or options.check or options.plot,
        "--commit": recording,
        "--turn": measuring and options.suite == "attention_sustained",
        "--pause": measuring and options.suite == "attention_cool",
        "--wall-only": recording and options.suite in ON_SEVERAL,
        "--csv": measuring and not recording,
        "--gpu": options.check or options.plot,
    }
    where = "here" if options.against is None else "with --against"
    for name, is_allowed in allowed.items():
        if getattr(options, name.removeprefix("--").replace("-", "_")) is not None and not is_allowed:
            parser.error(f"argument {name}: has no meaning {where}")
    if options.against is not None and options.suite in WITHOUT_TURNS:
        parser.error(f"argument --against: {options.suite} {WITHOUT_TURNS[options.suite]}; choose another suite")
    if (measuring or options.list) and options.suite is None:
        parser.error(f"argument suite: choose from {', '.join(SUITES)}")
    if options.self_test and options.suite is not None:
        parser.error("argument suite: has no meaning with --self-test")


def _list_or_measure(options: argparse.Namespace) -> int:
    cells = SUITES[options.suite]()
    peers = {contender.name for cell in cells for contender in cell.contenders} - {OURS}
    if options.peers is not None and (unknown := options.peers - peers):
        return _fail(f"argument --peers: no {', '.join(sorted(unknown))}; choose from {', '.join(sorted(peers))}")
    if options.only is not None:
        cells = _part(cells, options.only)
        if not cells:
            return _fail(f"argument --only: no cell matches {options.only.pattern!r}; see --list")
    if options.list:
        for cell in cells:
            print(f"{cell.name:58} {', '.join(dict.fromkeys(contender.name for contender in cell.contenders))}")
        return 0
    return _measure(options, cells)


def _part(cells: list[Cell], only: re.Pattern[str]) -> list[Cell]:
    """The cells that match, and the copies of their dtypes."""
    chosen = [cell for cell in cells if only.search(cell.name)]
    dtypes = {cell.dtype for cell in chosen}
    return [cell for cell in cells if cell in chosen or (cell.op == "copy" and cell.dtype in dtypes)]


def _measure(options: argparse.Namespace, cells: list[Cell]) -> int:
    gpu, cells, devices, timing = _on_this_machine(options, cells)
    if options.against is not None:
        return _compare(options, gpu, cells, timing.get("effort", harness.Effort()))
    library.implementation = options.implementation
    commit = options.commit or harness.commit()
    if commit is None:
        return _fail("argument --commit: needed, as this is no git checkout")
    path = results.path_for(options.out, gpu, options.suite, options.implementation, devices)
    if path.exists():
        results.read(path)
    written = []

    def write(row: Row) -> None:
        results.append(path, row)
        written.append(row)

    if options.suite == "first_call":
        problems, left_out = first_call.measure(cells, gpu, commit, write, peers=options.peers), []
    elif options.suite == "host":
        problems, left_out = host.measure(cells, gpu, commit, write, peers=options.peers)
    else:
        run = harness.Run(gpu, commit, write, peers=options.peers, **timing)
        run.measure(cells)
        problems, left_out = run.problems, run.left_out
    for reason in left_out:
        print(f"left out: {reason}")
    for problem in problems:
        print(f"not recorded: {problem}", file=sys.stderr)
    print(f"appended to {path}, which may be sent as it is" if written else "nothing was measured")
    if problems:
        return 1
    if options.implementation is not None and not any(map(bars.is_ours, written)):
        return _fail(f"argument --implementation: {options.implementation} ran nothing")
    return 0


def _on_this_machine(options: argparse.Namespace, cells: list[Cell]) -> tuple[str, list[Cell], int, dict[str, Any]]:
    """The GPU's name, what it measures of the cells, on how many devices, and options of `harness.Run`.

    Raises:
      ValueError: there is nothing to measure, or nothing to measure it with.
    """
    gpu = harness.gpu_name()
    if gpu is None and options.suite == "first_call":
        gpu, cells = first_call.WITHOUT_A_GPU, first_call.on(first_call.WITHOUT_A_GPU, cells)
    if gpu is None and options.suite == "host":
        gpu = reference.machine()
    timing: dict[str, Any] = {"clock": clock.wall_clock} if options.wall_only else {}
    if options.suite in ROUNDS:
        timing["effort"] = harness.Effort(ROUNDS[options.suite])
    if options.suite == "attention_sustained":
        timing["effort"] = sustained.effort(options.turn or sustained.TURN)
    if options.suite == "attention_cool":
        timing["effort"] = sustained.cool_effort(options.pause or sustained.PAUSE)
    if options.suite == "reference":
        options.implementation = reference.IMPLEMENTATION
        if gpu is None:
            gpu, cells = reference.machine(), reference.as_programs(cells)
            timing["effort"] = reference.ON_A_CPU
    if gpu is None:
        raise ValueError("JAX sees no GPU, and there is nothing to measure without one")
    if options.suite == "attention_sustained" and options.against is None:
        timing["meter"] = _meter(options.suite)
    devices = harness.device_count() if options.suite in ON_SEVERAL else 1
    cells = [cell for cell in cells if cell.devices == devices]
    if not cells:
        raise ValueError(f"none of these cells is for {devices} GPU{'s' if devices > 1 else ''}; see --list")
    return gpu, cells, devices, timing


def _meter(suite: str) -> nvml.Meter:
    try:
        return nvml.Meter(harness.gpu_ordinal())
    except nvml.UnavailableError as problem:
        raise ValueError(f"{suite} is left out, as the energy of this GPU is not known: {problem}") from None


def _compare(options: argparse.Namespace, gpu: str, cells: list[Cell], effort: harness.Effort) -> int:
    cells = [cell for cell in cells if any(contender.name == OURS for contender in cell.contenders)]
    if not cells:
        return _fail("argument --only: none of these cells measures ours; see --list")
    found = against.compare(
        SUITES[options.suite], cells, options.against, gpu, effort, implementation=options.implementation, path=options.csv
    )
    print(found.summary())
    if found.is_wrong_here:
        return 1
    return 0 if found.rows else _fail("nothing was measured")


def _check(options: argparse.Namespace) -> int:
    status = 0
    for suite, implementation, path in _files(options):
        run = results.newest_of_each_cell(results.read(path))
        machine = path.relative_to(options.out).parts[0]
        held = bars.of_file(bars.load(suite), implementation, machine)
        cells = SUITES[suite]()
        if suite == "first_call":
            cells = first_call.on(machine, cells)
        count, found = bars.misses(held, cells, run)
        runs = ", ".join(dict.fromkeys(f"run {row.run} of {row.commit}" for row in run))
        print(f"{path}: {runs or 'no run'}, {len(found)} of {count} bars missed")
        if found:
            status = 1
            print(bars.table(found))
        if any(row.commit.endswith("-dirty") for row in run):
            status = 1
            print("it measured what no commit holds")
    return status


def _plot(options: argparse.Namespace) -> int:
    for suite, _, path in _files(options):
        if suite in WITHOUT_FIGURES:
            continue
        for figure in figures.draw(results.read(path), path.parent, sweep=suite == "softmax_sweep"):
            print(figure)
    return 0


def _files(options: argparse.Namespace) -> list[tuple[str, str | None, Path]]:
    """Returns the suites asked for, what their runs asked for, and their result files. At least one file must exist."""
    suites = list(SUITES) if options.suite is None else [options.suite]
    kinds = [None, *sorted(IMPLEMENTATIONS)] if options.implementation is None else [options.implementation]
    paths = [
        (suite, kind, path)
        for suite in suites
        for kind in kinds
        for path in sorted(options.out.glob("/".join(filter(None, (options.gpu or "*", kind, f"{suite}.csv")))))
    ]
    if not paths:
        names = " or ".join(f"{suite}.csv" for suite in suites)
        if options.gpu is not None:
            raise argparse.ArgumentTypeError(f"argument --gpu: no {names} in {options.out / options.gpu}")
        raise argparse.ArgumentTypeError(f"argument --out: no {names} in a folder of {options.out}")
    return paths


def _self_test() -> int:
    if harness.gpu_name() is None:
        return _fail("JAX sees no GPU, and there is nothing to time without one")
    print(clock.self_test())
    return 0


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
