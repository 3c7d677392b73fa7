"""`python -m jaxsoftmax` reports what is installed; with `--check` it checks values, with `--bench` it measures."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxsoftmax._core import target
from jaxsoftmax._report import call

_DESCRIPTION = """Reports what is installed, which GPU there is, and which implementation runs each op.

The report, the tables and the file may be sent as they are: they hold no names of hosts, users or folders.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns the exit status.

    It is 1 if a value is wrong, a call raises, a file cannot be written, or JAX has no platform to check or measure.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.csv is not None and not options.bench:
        parser.error("argument --csv: needs --bench")
    if options.csv is not None:
        is_no_file = options.csv.exists() and not options.csv.is_file()  # a folder, or a device such as /dev/null
        if is_no_file or not options.csv.absolute().parent.is_dir():
            parser.error(f"argument --csv: {options.csv} must be a file in a folder that exists")
    if options.implementation is not None and not (options.check or options.bench):
        parser.error("argument --implementation: needs --check or --bench")
    if options.gpu is not None and (options.check or options.bench):
        parser.error("argument --gpu: is for the report alone")

    from jaxsoftmax._report import installed  # here: to refuse arguments needs nothing of it

    if options.gpu is not None:
        try:
            target.named("explain", options.gpu)
        except ValueError as problem:
            parser.error(f"argument --gpu: {problem}")
    print(installed.report(options.gpu))
    if call.backend()[0] is None:
        return 1 if options.check or options.bench else 0
    status = 0
    if options.check:
        from jaxsoftmax._report import check

        print(flush=True)
        status |= check.main(options.implementation)
    if options.bench:
        from jaxsoftmax._report import bench

        print(flush=True)
        status |= bench.main(options.csv, options.implementation)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m jaxsoftmax", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="run kernels here and hold their results to float64")
    parser.add_argument("--bench", action="store_true", help="time standard calls beside JAX's own, and write a CSV")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="the file of --bench; jaxsoftmax_<gpu>.csv by default")
    parser.add_argument(
        "--implementation", choices=call.IMPLEMENTATIONS, help="what --check and --bench run; the best one by default"
    )
    parser.add_argument("--gpu", metavar="NAME", help="report what would run on this GPU, such as a100 or 8.0")
    return parser


if __name__ == "__main__":
    sys.exit(main())
