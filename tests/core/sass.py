"""Prints what ptxas makes of attention's kernels on Hopper, on a machine with jax's plugin for CUDA, which needs no GPU.

JAX_PLATFORMS=cpu python -m tests.core.sass --size 128 --length 4096 --causal --out forward.sass
JAX_PLATFORMS=cpu python -m tests.core.sass --size 64 --length 4096 --gradient --out backward.sass 'few=backward: stages=(2, 2)'

Settings of a kernel may differ, as for `python -m benchmarks.variants`. ptxas says how many registers are spilled, and whether
products wait for each other. The listing needs `nvdisasm` beside the plugin's `ptxas`; the wheel of Triton has one.
"""

import argparse
import contextlib
import math
import os
import re
import sys
import tempfile
from collections.abc import Sequence
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
    print(f"{options.out}: {summary(files['.sass_ctrl'])}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
