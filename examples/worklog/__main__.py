"""Measures the rungs of softmax_worklog.py, beside this file, and writes the tables and figures of docs/worklog.md.

python -m examples.worklog              all parts, in the order below
python -m examples.worklog times        run times of rungs and peers, of softmax with top-k and of attention
python -m examples.worklog bytes        bytes that they move, by the GPU's counters, which Nsight Compute reads
python -m examples.worklog cpu          naive, safe and online softmax on one CPU core, and jax.nn on all; alone it needs no
                                        GPU, and without one its rows go to the folder cpu
python -m examples.worklog times bytes --op softmax_top_k
                                        the same of one op alone
python -m examples.worklog page check   tables and figures from the result files; the page's claims. Neither needs a GPU

Result files are worklog.csv, worklog_bytes.csv and worklog_cpu.csv; of each op the newest run counts. In the first and the
last, `bytes` counts one read and one write whatever a rung moves: its own bytes are those that the example predicts.
"""

import argparse
import functools
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import harness, results
from examples.worklog import cells, claims, counters, figures, serial, tables
from examples.worklog.measured import Measured

PAGE = Path(__file__).parents[2] / "docs" / "worklog.md"
PARTS = ("times", "bytes", "cpu", "page", "check")
OPS = ("softmax", "softmax_top_k", "attention")
MEASURING = frozenset({"times", "bytes", "cpu"})
CHILDREN = {
    "cases": counters.run_cases,
    "serial": functools.partial(serial.run_serial, one_core=True),
    "parallel": functools.partial(serial.run_serial, one_core=False),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 if a claim is missed or a part fails, 2 for what cannot be done."""
    options = _parser().parse_args(argv)
    if options.child:
        CHILDREN[options.child](*([options.op] if options.child == "cases" else []))
        return 0
    chosen = [part for part in PARTS if part in options.parts or not options.parts]
    try:
        return _run(options, chosen)
    except (OSError, ValueError) as problem:
        return _fail(str(problem))


def _parser() -> argparse.ArgumentParser:
    form = argparse.RawTextHelpFormatter
    parser = argparse.ArgumentParser("python -m examples.worklog", description=__doc__, formatter_class=form)
    parser.add_argument("parts", nargs="*", type=_part_of_all, metavar="PART", help=f"{', '.join(PARTS)}; all by default")
    parser.add_argument("--op", choices=OPS, help="measure this op alone, and the copy; with times and bytes")
    parser.add_argument("--results", type=Path, default=results.FOLDER, metavar="DIR", help="default: benchmarks/results")
    parser.add_argument("--gpu", metavar="NAME", help="the folder that the page is of; default: what was measured, or h200")
    parser.add_argument("--page", type=Path, default=PAGE, metavar="FILE", help="default: docs/worklog.md")
    parser.add_argument("--commit", metavar="HASH", help="the commit that is measured, where git cannot tell")
    parser.add_argument("--child", choices=CHILDREN, help=argparse.SUPPRESS)
    return parser


def _part_of_all(name: str) -> str:
    if name not in PARTS:
        raise argparse.ArgumentTypeError(f"{name!r} is not one of {', '.join(PARTS)}")
    return name


def _run(options: argparse.Namespace, chosen: Sequence[str]) -> int:
    problems, folder = [], options.results / (options.gpu or "h200")
    if MEASURING.intersection(chosen):
        gpu, commit = harness.gpu_name(), options.commit or harness.commit()
        if gpu is None and MEASURING.intersection(chosen) == {"cpu"}:
            gpu = "cpu"
        if gpu is None:
            return _fail("JAX sees no GPU, and there is nothing to measure without one; choose cpu, page or check")
        if commit is None:
            return _fail("argument --commit: needed, as this is no git checkout")
        path = functools.partial(results.path_for, options.results, gpu)
        folder = folder if options.gpu else path("worklog").parent
        if "times" in chosen:
            run = harness.Run(gpu, commit, functools.partial(results.append, path("worklog")), effort=cells.EFFORT)
            run.measure(cell for cell in cells.cells() if options.op in (None, cell.op) or cell.op == "copy")
            problems += run.problems
        if "bytes" in chosen:
            problems += counters.count(path("worklog_bytes"), gpu, commit, options.op)
        if "cpu" in chosen:
            problems += serial.time_serial(path("worklog_cpu"), gpu, commit)
            print(path("worklog_cpu"))
    for problem in problems:
        print(f"not recorded: {problem}", file=sys.stderr)
    measured = Measured.read(folder)
    if not (measured.times or measured.counted or measured.serial or MEASURING.intersection(chosen)):
        return _fail(f"{folder} has no result file of the worklog")
    if "page" in chosen:
        options.page.write_text(tables.rendered(options.page.read_text(), measured))
        print(options.page)
        try:
            print(*figures.draw(measured, folder), sep="\n")
        except ImportError as problem:
            problems.append(f"no figures: {problem}")
            print(problems[-1], file=sys.stderr)
    if "check" in chosen:
        missed = claims.misses(measured, options.page)
        print("\n".join([f"{len(missed)} claims missed", *missed]))
        problems += missed
    return 1 if problems else 0


def _fail(reason: str) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
