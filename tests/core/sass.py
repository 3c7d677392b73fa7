"""Prints what ptxas makes of attention's kernels on Hopper, on a machine with jax's plugin for CUDA, which needs no GPU.

JAX_PLATFORMS=cpu python -m tests.core.sass --size 128 --length 4096 --causal --out forward.sass
JAX_PLATFORMS=cpu python -m tests.core.sass --size 64 --length 4096 --gradient --out backward.sass 'few=backward: stages=(2, 2)'

Settings of a kernel may differ, as for `python -m benchmarks.variants`. ptxas says how many registers are spilled, and whether
products wait for each other. The command also says which loads are in flight where their memory is freed: `loads_in_flight`.
The listing needs `nvdisasm` beside the plugin's `ptxas`; the wheel of Triton has one.
"""

import argparse
import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp

import jaxsoftmax
from benchmarks import variants
from tests.support import xla_cuda

TOKENS, HIDDEN = 16384, 2048
_SPILL = re.compile(r"\b(STL|LDL)\b")
_PRODUCT = re.compile(r"\bHGMMA\b")
_INSTRUCTION = re.compile(
    r" *(?P<waits>-|\d(?:&\d)?|0x[0-9a-f]+):[-\d]:(?P<scoreboard>[-\d]):[-Y]:\d+"
    r" +/\*(?P<address>[0-9a-f]+)\*/ +(?:@(?P<predicate>\S+) +)?(?P<text>.*\S)"
)
_LABEL = re.compile(r"(\S+):$")
_LOAD = re.compile(r"LDSM?\b")
_FREES = re.compile(r"SYNCS\.ARRIVE\b|UTMALDG\b|UBLKCP\b")  # tells that memory may be overwritten, or has it overwritten
_JUMP = re.compile(r"(?:BRA|BRX|JMP|CALL)\b")
_END = re.compile(r"(?:EXIT|RET|BRX|JMP)\b|BRA `")  # of a path, unless there is a predicate


def compile_into(folder: Path, options: argparse.Namespace) -> None:
    """Compiles attention, or its gradient. Mosaic GPU writes what it makes of kernels to `folder`."""
    sharding = xla_cuda.sharding()
    if isinstance(sharding, str):
        raise ValueError(sharding)
    heads = HIDDEN // options.size
    shapes = [(max(1, TOKENS // options.length), options.length, n, options.size) for n in (heads, options.key_heads or heads)]
    query, key = (jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding) for shape in shapes)

    def attend(q, k, v):
        return jaxsoftmax.dot_product_attention(q, k, v, is_causal=options.causal, implementation="mosaic")

    def gradient(q, k, v):
        out, vjp = jax.vjp(attend, q, k, v)
        return vjp(out)

    with contextlib.ExitStack() as stack:
        for text in options.variants:
            stack.enter_context(variants.parse(text).chosen())
        dumps = {"MOSAIC_GPU_DUMP_TO": str(folder), "MOSAIC_GPU_DUMP_PTXAS": "1"}
        stack.enter_context(mock.patch.dict(os.environ, dumps))
        function = jax.jit(gradient if options.gradient else attend, out_shardings=sharding)
        function.trace(query, key, key).lower(lowering_platforms=("cuda",)).compile()


def summary(listing: str) -> str:
    """Says how often a listing spills, and how much of that is between its products, where the steps of a tile are."""
    lines = listing.splitlines()
    products = [number for number, line in enumerate(lines) if _PRODUCT.search(line)]
    spills = [number for number, line in enumerate(lines) if _SPILL.search(line)]
    first, last = (products[0], products[-1]) if products else (math.inf, -math.inf)
    inside = sum(first < number < last for number in spills)
    return f"{len(lines)} lines, {len(products)} products, {len(spills)} spills, {inside} of them between products"


@dataclass(frozen=True)
class Instruction:
    """A line of a listing with control codes.

    Attributes:
      address: in the kernel, hexadecimal.
      predicate: of the lanes that execute it; empty if all do.
      text: the instruction without the predicate.
      waits: scoreboards that are empty before the instructions behind this one start.
      scoreboard: the one that holds the instruction until its result is there, or None.
    """

    address: str
    predicate: str
    text: str
    waits: frozenset[int]
    scoreboard: int | None

    def loads_behind(self, number: int, loads: set[tuple[int, int | None]]) -> set[tuple[int, int | None]]:
        """The loads in flight behind this instruction, given its number and those before: pairs of number and scoreboard."""
        loads = self.unfinished(loads)
        if not _LOAD.match(self.text) or self.predicate == "!PT":
            return loads
        if self.scoreboard is not None and not self.predicate:
            loads = {(load, self.scoreboard if own is None else own) for load, own in loads}
        return loads | {(number, self.scoreboard)}

    def unfinished(self, loads: set[tuple[int, int | None]]) -> set[tuple[int, int | None]]:
        """The loads that this instruction does not wait for."""
        return {(load, scoreboard) for load, scoreboard in loads if scoreboard not in self.waits}


def _instructions(listing: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of a listing, and the numbers of those behind its labels."""
    code, labels = [], {}
    for line in listing.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        if not (found := _INSTRUCTION.match(line)):
            continue
        mask, text = found["waits"], found["text"]
        if mask.startswith("0x"):
            waits = {scoreboard for scoreboard in range(6) if int(mask, 16) >> scoreboard & 1}
        else:
            waits = set(map(int, re.findall(r"\d", mask)))
        if not found["predicate"] and (emptied := re.match(r"DEPBAR\.LE SB(\d), 0x0", text)):
            waits.add(int(emptied[1]))
        scoreboard = None if found["scoreboard"] == "-" else int(found["scoreboard"])
        code.append(Instruction(found["address"], found["predicate"] or "", text, frozenset(waits), scoreboard))
    return code, labels


def _successors(number: int, instruction: Instruction, labels: dict[str, int], count: int) -> list[int]:
    """The numbers of the instructions that may follow one, below a count."""
    following = {number + 1} if instruction.predicate or not _END.match(instruction.text) else set()
    if _JUMP.match(instruction.text):
        following |= {labels[name] for name in re.findall(r"[.$\w]+", instruction.text) if name in labels}
    return [other for other in following if other < count]


def loads_in_flight(listing: str) -> list[str]:
    """Finds arrivals and copies before which a thread does not wait for its loads from shared memory.

    ptxas does not wait for loads before an arrival at an mbarrier, by which a thread tells that it has read a stage. A copy
    by TMA, which the arrival allows, may then overwrite what is being loaded: see `backward_pipeline.py`. An instruction
    waits for a load if it waits for the load's scoreboard. Loads finish in order: one without a scoreboard has finished when
    the next one that has a scoreboard has. All paths through the kernel are followed, also those that no thread takes.

    A finding is an error only where TMA fills the memory anew. Known findings do no harm, as ordinary stores fill it: the
    facts and tickets of tiles, which `BlockTiles` of `_gpu/schedule.py` tells. Arrivals at named barriers are left out:
    `_WEIGHTS_READ` of the backward kernel is one before which loads are in flight, and ordinary stores fill that memory too.

    Args:
      listing: of one kernel, with control codes, as Mosaic GPU prints it for MOSAIC_GPU_DUMP_SASS_CTRL.

    Returns:
      A line for each arrival at an mbarrier, or copy to shared memory, with the addresses of the loads in flight.

    Raises:
      ValueError: there is no instruction with control codes.
    """
    code, labels = _instructions(listing)
    if not code:
        raise ValueError("no listing: nvdisasm is missing beside ptxas")
    successors = [_successors(number, instruction, labels, len(code)) for number, instruction in enumerate(code)]
    before: list[set[tuple[int, int | None]]] = [set() for _ in code]
    is_done = False
    while not is_done:
        is_done = True
        for number, instruction in enumerate(code):
            behind = instruction.loads_behind(number, before[number])
            for successor in successors[number]:
                if not behind <= before[successor]:
                    before[successor] |= behind
                    is_done = False
    found = []
    for instruction, loads in zip(code, before, strict=True):
        numbers = sorted({load for load, _ in instruction.unfinished(loads)})
        if numbers and _FREES.match(instruction.text):
            addresses = " ".join(code[number].address for number in numbers)
            found.append(f"{instruction.text.split()[0]} at {instruction.address} with loads in flight from {addresses}")
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status, 2 for what cannot be done."""
    parser = argparse.ArgumentParser("python -m tests.core.sass", description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="NAME=KERNEL: FIELD=VALUE, ...")
    parser.add_argument("--size", type=int, default=128, help="head size")
    parser.add_argument("--length", type=int, default=4096, help="numbers of queries and of keys")
    parser.add_argument("--key-heads", type=int, help="number of key heads; that of query heads by default")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--gradient", action="store_true", help="look at the backward kernel")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="file for the listing")
    options = parser.parse_args(argv)
    name = "attention_backward_mosaic" if options.gradient else "attention_forward_mosaic"
    with tempfile.TemporaryDirectory() as folder:
        try:
            compile_into(Path(folder), options)
        except ValueError as problem:
            print(problem, file=sys.stderr)
            return 2
        files = {
            path.suffix: path.read_text() for path in Path(folder).glob(f"{name}.*") if path.suffix.startswith((".pt", ".sass"))
        }
    print(files.get(".ptxas", "ptxas said nothing"))
    if ".sass_ctrl" not in files:
        print("no listing: nvdisasm is missing beside ptxas", file=sys.stderr)
        return 2
    options.out.write_text(files[".sass_ctrl"])
    print(f"{options.out}: {summary(files['.sass_ctrl'])}", *loads_in_flight(files[".sass_ctrl"]), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
