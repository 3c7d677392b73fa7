"""Hashes the kernel programs of all configurations, so that a change that must not change a kernel can be held to it.

    python -m tests.core.programs CSV [--like CSV] [--only REGEX] [--part I/N] [--processes N]

Each case of `compiled` is lowered for an H100, without a GPU and without ptxas, and each of its Mosaic kernels hashed as MLIR
without locations: equal text is compiled to equal PTX. With `--like` the cases are those of an earlier file; the differences
are printed, and the exit status is 1 if there are any.
"""

import argparse
import csv
import hashlib
import itertools
import re
import subprocess
import sys
from pathlib import Path

import jax

from ..support import kernels, lowering
from . import compiled


def programs(case: compiled.Case) -> list[str]:
    """Hashes the kernels of a case, in their order; a word for the error where it does not lower."""

    def hashed(module) -> str:
        text = module.operation.get_asm(enable_debug_info=False)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    try:
        function = compiled.traced_while_lowered(case.function, case.operands)
        return kernels.with_modules(function, *case.operands.values(), see=hashed)
    except Exception as error:
        return [f"{type(error).__name__}: {error}".splitlines()[0]]


def read(path: Path) -> dict[str, str]:
    """Maps the names of the cases of a file to the hashes of their kernels."""
    return {row[0]: row[1] for row in csv.reader(path.read_text().splitlines())} if path.exists() else {}


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    """Lists the cases whose kernels differ, and those that are missing."""
    return [f"{name}: {old} before, {after.get(name)} now" for name, old in before.items() if after.get(name) != old]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, help="the file to append to; cases that it has are left out")
    parser.add_argument("--like", type=Path, help="a file of an earlier run to compare with")
    parser.add_argument("--only", default="", help="a regular expression: cases whose names have a match")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case from the I-th on")
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    before = {} if arguments.like is None else read(arguments.like)
    if arguments.processes > 1:
        command = [sys.executable, "-m", "tests.core.programs", str(arguments.csv), "--only", arguments.only]
        command += [] if arguments.like is None else ["--like", str(arguments.like)]
        count = arguments.processes
        running = [
            subprocess.Popen([*command, "--part", f"{part + i * parts}/{parts * count}"], stdout=subprocess.DEVNULL)
            for i in range(count)
        ]
        for process in running:
            process.wait()
    else:
        lowering.quickly()
        if before:
            every = {case.name: case for case in itertools.chain.from_iterable(make() for make in compiled.CASES)}
            wanted = [every[name] for name in before if name in every and re.search(arguments.only, name)]
        else:
            wanted = compiled.cases(arguments.only)
        done = read(arguments.csv)
        for case in wanted[part::parts]:
            if case.name not in done:
                line = f'"{case.name}","{" ".join(programs(case))}"\n'.replace('""', '"')
                with arguments.csv.open("a") as file:
                    file.write(line)
                jax.clear_caches()
    if not before:
        return 0
    after = read(arguments.csv)
    found = differences({name: old for name, old in before.items() if re.search(arguments.only, name)}, after)
    print(*found, f"{len(found)} of {len(before)} cases differ", sep="\n")
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
