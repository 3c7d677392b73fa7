"""Hashes what Triton compiles for the public functions, so that a change that must not change a kernel can be held to it.

    JAX_SKIP_CUDA_CONSTRAINTS_CHECK=1 python -m tests.core.triton_programs CSV [--like CSV] [--only REGEX] [--part I/N] [--ptx]

Each case is a public function, forced on Triton and lowered for a GPU that need not be there. A line of the file holds the
name of the case, the hash of its StableHLO, and name and hash of each kernel in the order of compilation. A kernel is hashed as
Triton's IR after inlining, with all options of the compiler: the rest of the compiler depends on nothing else, and takes ten
times as long. With `--ptx` it is hashed as PTX. The StableHLO holds operands, results and grids. With `--like` the differences
from an earlier file are printed, and the exit status is 1 if there are any.
"""

import argparse
import contextlib
import functools
import hashlib
import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax

from ..support import kernels
from ..support.attention.lowering import EVERYTHING, FEATURES, with_features
from ..support.triton_kernels import target_of
from .programs import differences, read


@dataclass(frozen=True)
class TritonCase:
    """A public function of arrays, with its derivatives, to lower for a GPU.

    Attributes:
      name: the op, the GPU, shapes and options.
      capability: compute capability of the GPU.
      function: function of the operands.
      operands: their types.
    """

    name: str
    capability: tuple[int, int]
    function: Callable[..., Any]
    operands: tuple[Any, ...]


def shaped(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))


# Shapes and the axes of their rows, one for each way in which rows are spread over programs, and one for each data type of
# indices.
ALONG = [((64, 1), -1), ((64, 3), -1), ((64, 127), -1), ((64, 1000), -1), ((64, 1024), -1), ((16, 4096), -1), ((8, 16384), -1)]
ALONG += [((8, 20000), -1), ((64, 32768), -1), ((4, 50257), -1), ((2, 131072), -1), ((1, 2**21 + 3), -1)]
ACROSS = [((8, 100, 5), 1), ((8, 64, 16), 1), ((8, 1000, 128), 1), ((8, 4096, 64), 1), ((2, 2**18, 17), 1), ((64, 33), 0)]
HUGE = [((2**16, 2**15 + 8), -1), ((2, 64, 2**26), 1)]
NEIGHBOURS = [((3, 5, 30, 4), (1, 2)), ((4, 6, 32), (0, 1))]
EVERY = [*ALONG, *ACROSS, *HUGE, *NEIGHBOURS]
FEW = [((64, 127), -1), ((8, 20000), -1), ((4, 50257), -1), ((8, 100, 5), 1), ((8, 4096, 64), 1)]

# Operands and options of the softmax family, from the shape of the array and the axes of its rows.
VARIANTS: dict[str, Callable[..., dict[str, Any]]] = {
    "plain": lambda shape, axis: {},
    "mask": lambda shape, axis: {"where": shaped(*shape, dtype=bool)},
    "mask of one row": lambda shape, axis: {"where": shaped(1, *shape[1:], dtype=bool)},
    "mask along the first axis": lambda shape, axis: {"where": shaped(shape[0], *[1] * (len(shape) - 1), dtype=bool)},
    "scale": lambda shape, axis: {"scale": shaped()},
    "scales, mask": lambda shape, axis: {"scale": shaped(shape[0]), "where": shaped(*shape, dtype=bool)},
}


def with_derivatives(f: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function that computes a value with its tangent and its cotangents, from the operand `x` and others."""

    def both(x, operands):
        value, pull = jax.vjp(lambda x: f(x, **operands), x)
        tangent = jax.jvp(lambda x: f(x, **operands), (x,), (jnp.ones_like(x),))[1]
        return value, pull(jnp.ones_like(value)), tangent

    return both


def softmax_cases() -> Iterator[TritonCase]:
    """All shapes in float32 and bfloat16 for one GPU; few of them with all variants, in float16, and for another GPU."""
    for name in ("softmax", "log_softmax", "logsumexp"):
        for shape, axis in EVERY:
            for dtype, variant in ((dtype, variant) for dtype in ("float32", "bfloat16") for variant in ("plain", "mask")):
                yield _of_softmax(name, (8, 0), shape, axis, dtype, variant)
        for shape, axis in FEW:
            yield _of_softmax(name, (8, 0), shape, axis, "float16", "plain")
            for variant in ("mask of one row", "mask along the first axis"):
                yield _of_softmax(name, (8, 0), shape, axis, "float32", variant)
            for capability in ((9, 0), (12, 0)):
                yield _of_softmax(name, capability, shape, axis, "float32", "plain")
    for name in ("softmax", "log_softmax"):
        for shape, axis in FEW:
            yield _of_softmax(name, (8, 0), shape, axis, "float32", "scale")
            yield _of_softmax(name, (8, 0), shape, axis, "bfloat16", "scales, mask")
        yield _of_softmax(name, (9, 0), (64, 1000), -1, "bfloat16", "mask", dtype_of_result="float32")
        yield _of_softmax(name, (9, 0), (64, 1000), -1, "float32", "scale", dtype_of_result="bfloat16")


def _of_softmax(name, capability, shape, axis, dtype, variant, dtype_of_result=None) -> TritonCase:
    options: dict[str, Any] = {"implementation": "triton", "axis": axis}
    options |= {} if dtype_of_result is None else {"dtype": jnp.dtype(dtype_of_result)}
    f = functools.partial(getattr(jaxsoftmax, name), **options)
    if variant == "scales, mask":  # one for each index of the first axis: a scale is a scalar, unless it is mapped over
        f = jax.vmap(functools.partial(f, axis=axis if axis < 0 else axis - 1))
    f = with_derivatives(f)
    said = " ".join(map(str, (name, _gpu(capability), dtype, "x".join(map(str, shape)), axis, variant, dtype_of_result or "")))
    return TritonCase(said.strip(), capability, f, (shaped(*shape, dtype=dtype), VARIANTS[variant](shape, axis)))


def _gpu(capability) -> str:
    return f"sm_{capability[0]}{capability[1]}"


LOSSES: dict[str, dict[str, Any]] = {
    "plain": {},
    "smoothing": {"label_smoothing": 0.1},
    "z-loss": {"z_loss": 1e-2},
    "cap": {"logits_soft_cap": 5.0},
    "all": {"label_smoothing": 0.2, "z_loss": 1e-3, "logits_soft_cap": 30.0, "ignore_index": 3},
}


def cross_entropy_cases() -> Iterator[TritonCase]:
    """Losses with their gradients, of logits and of a linear layer, whose gradient takes the place of its logits."""
    for shape, axis in (*ALONG, *ACROSS, *HUGE):
        for dtype, loss in ((dtype, loss) for dtype in ("float32", "bfloat16") for loss in ("plain", "all")):
            yield _of_loss((8, 0), shape, axis, dtype, loss)
    for shape, axis in FEW:
        for loss in list(LOSSES)[1:-1]:
            yield _of_loss((8, 0), shape, axis, "float16", loss)
        yield _of_loss((8, 0), shape, axis, "float32", "all", has_mask=True)
        yield _of_loss((9, 0), shape, axis, "bfloat16", "smoothing", has_mask=True)
    for classes in (100, 1000, 5000, 32768, 50257, 128256):
        for dtype, loss in ((dtype, loss) for dtype in ("float32", "bfloat16") for loss in LOSSES):
            yield _of_linear_loss((8, 0), classes, dtype, loss)
        yield _of_linear_loss((9, 0), classes, "bfloat16", "all")


def _of_loss(capability, shape, axis, dtype, loss, has_mask=False) -> TritonCase:
    def both(x, labels, where):
        f = functools.partial(jaxsoftmax.cross_entropy, axis=axis, where=where, implementation="triton", **LOSSES[loss])
        value, pull = jax.vjp(lambda x: f(x, labels, return_lse=True), x)
        return value, pull(jax.tree.map(jnp.ones_like, value)), f(x, labels)

    labels = jax.eval_shape(lambda: jnp.ones(shape, jnp.int32).sum(axis))
    where = shaped(*shape, dtype=bool) if has_mask else None
    name = " ".join(["cross_entropy", _gpu(capability), dtype, "x".join(map(str, shape)), str(axis), loss, "mask" * has_mask])
    return TritonCase(name.strip(), capability, both, (shaped(*shape, dtype=dtype), labels, where))


def _of_linear_loss(capability, classes, dtype, loss) -> TritonCase:
    f = functools.partial(jaxsoftmax.linear_cross_entropy, class_axis=0, implementation="triton", **LOSSES[loss])
    operands = shaped(64, 32, dtype=dtype), shaped(classes, 32, dtype=dtype), shaped(64, dtype="int32")
    name = f"linear_cross_entropy {_gpu(capability)} {dtype} {classes} {loss}"
    return TritonCase(name, capability, jax.value_and_grad(lambda *given: jnp.sum(f(*given)), (0, 1)), operands)


MOVING = ("query", "key", "value", "bias", "sinks")
GPUS = ((8, 0), (8, 6), (9, 0), (10, 0), (12, 0))


def attention_cases() -> Iterator[TritonCase]:
    """Each head size on each GPU; all features at one of them; wanted cotangents, pages, and a ring of devices."""
    for capability in GPUS:
        for dtype, size in [("bfloat16", size) for size in (16, 64, 80, 128, 256, 512)] + [("float32", 64), ("float32", 128)]:
            yield _of_attention(capability, dtype, (size, size), (512, 512), ["causal"])
    for capability, lengths in (((8, 0), (300, 301)), ((9, 0), (384, 512))):
        for feature in FEATURES:
            yield _of_attention(
                capability, "float16" if feature in ("bias", "sinks") else "bfloat16", (64, 64), lengths, [feature]
            )
        for dtype, sizes in (("bfloat16", (64, 40)), ("bfloat16", (128, 128)), ("float32", (80, 128)), ("float16", (8, 8))):
            yield _of_attention(capability, dtype, sizes, lengths, [])
            yield _of_attention(capability, dtype, sizes, lengths, EVERYTHING)
            yield _of_attention(capability, dtype, sizes, lengths, ["window", "lengths"])
    for moving in (("query",), ("value",), ("bias",), ("sinks",), ("key", "bias")):
        yield _of_attention((8, 0), "bfloat16", (64, 64), (300, 301), ["bias of 16 bits", "sinks"], moving)
    yield _of_pages()
    yield from (_of_ring(dtype) for dtype in ("bfloat16", "float16"))


def _of_attention(capability, dtype, sizes, lengths, features, moving=MOVING) -> TritonCase:
    operands, options = with_features(features, sizes, lengths, dtype)
    f = functools.partial(jaxsoftmax.dot_product_attention, implementation="triton", return_residual=True, **options)

    def both(operands):
        moved = {name: array for name, array in operands.items() if name in moving}
        results, pull = jax.vjp(lambda moved: f(**operands | moved), moved)
        return results, pull(jax.tree.map(jnp.ones_like, results))

    function = both if max(sizes) <= 256 else lambda operands: f(**operands)
    of_moving = "" if moving == MOVING else f"for {'+'.join(moving)}"
    parts = ["attention", _gpu(capability), dtype, "x".join(map(str, sizes)), "x".join(map(str, lengths)), "+".join(features)]
    return TritonCase(" ".join([*parts, of_moving]).strip(), capability, function, (operands,))


def _of_pages() -> TritonCase:
    f = functools.partial(jaxsoftmax.cache.paged_attention, implementation="triton", is_causal=True)
    pages, table = shaped(9, 16, 2, 64, dtype="bfloat16"), shaped(2, 4, dtype="int32")
    query, lengths = shaped(2, 3, 4, 64, dtype="bfloat16"), shaped(2, dtype="int32")
    return TritonCase("attention sm_80 pages", (8, 0), f, (query, pages, pages, table, lengths))


def _of_ring(dtype) -> TritonCase:
    """Four devices that pass keys on: kernels go on from the results of others, and give parts of sums."""
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Explicit,))
    query = jax.ShapeDtypeStruct((2, 512, 4, 64), jnp.dtype(dtype), sharding=NamedSharding(mesh, P(None, "x")))
    parallel = jaxsoftmax.ContextParallel(strategy="ring")
    f = functools.partial(jaxsoftmax.dot_product_attention, implementation="triton", is_causal=True, parallel=parallel)

    def both(query, key, value):
        with jax.sharding.use_abstract_mesh(mesh):
            results, pull = jax.vjp(f, query, key, value)
            return results, pull(jnp.ones_like(results))

    return TritonCase(f"attention sm_80 {dtype} ring", (8, 0), both, (query, query, query))


def all_cases(only: str) -> list[TritonCase]:
    cases = [*softmax_cases(), *cross_entropy_cases(), *attention_cases()]
    assert len({case.name for case in cases}) == len(cases)
    return [case for case in cases if re.search(only, case.name)]


def hashed(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_CONSTANT = re.compile(r"^ +(%[A-Za-z]\w*) = arith\.constant (.*)\n", re.MULTILINE)


def with_constants_in_place(text: str) -> str:
    """Writes the value of each constant where its name is used: their order depends on the functions that were inlined."""
    values = dict(_CONSTANT.findall(text))
    return re.sub(r"%[A-Za-z]\w*", lambda name: values.get(name[0], name[0]), _CONSTANT.sub("", text))


@contextlib.contextmanager
def hashing(hashes: list[str], is_ptx: bool) -> Iterator[None]:
    """Makes jax-triton put the hash of a kernel where its PTX would be, and appends it to `hashes` with the kernel's name."""
    from jax_triton import triton_lib

    compile_inplace, make_kernel = triton_lib.compile_ttir_inplace, triton_lib.triton_kernel_call_lib.TritonKernel

    def compile_to_hash(module, backend, options, gpu):
        if is_ptx:
            result = compile_inplace(module, backend, options, gpu)
            text, name, shared = result.binary, result.name, result.shared_mem_bytes
        else:
            text, shared = with_constants_in_place(backend.make_ttir(module, {}, options, gpu.arch).str_nodebug()), 0
            name = re.search(r"tt\.func public @(\w+)", text).group(1)
        hashes.append(f"{name}:{hashed(f'{text} {options} {gpu}')}")
        return triton_lib.CompilationResult(hashes[-1], name, shared, "", "", tensordesc_meta=())

    def kernel_without_ir(name, warps, blocks, shared, binary, ir, arch, *scratch):
        """The IR before inlining has names of functions and constants, which may change."""
        del ir
        return make_kernel(name, warps, blocks, shared, binary, "", arch, *scratch)

    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(triton_lib, "compile_ttir_inplace", compile_to_hash))
        patches.enter_context(mock.patch.object(triton_lib.triton_kernel_call_lib, "TritonKernel", kernel_without_ir))
        never_kept = mock.PropertyMock(side_effect=lambda: {})
        patches.enter_context(mock.patch.object(triton_lib.TritonFunction, "_kernel_cache", never_kept))
        yield


def programs(case: TritonCase, is_ptx: bool = False) -> str:
    """Hashes the program of a case, and its kernels; a word for the error if it does not lower."""
    hashes: list[str] = []
    try:
        with hashing(hashes, is_ptx), kernels.target(target_of(case.capability)), kernels.anew():
            text = jax.jit(case.function).trace(*case.operands).lower(lowering_platforms=("cuda",)).as_text()
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0].replace('"', "'")
    assert hashes, case.name
    return " ".join([hashed(text), *hashes])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("csv", type=Path, help="the file to append to; cases that it has are left out")
    parser.add_argument("--like", type=Path, help="a file of an earlier run to compare with")
    parser.add_argument("--only", default="", help="a regular expression: cases whose names have a match")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th case from the I-th on")
    parser.add_argument("--ptx", action="store_true", help="compile to PTX")
    arguments = parser.parse_args()
    part, parts = map(int, arguments.part.split("/"))
    done = read(arguments.csv)
    for case in all_cases(arguments.only)[part::parts]:
        if case.name not in done:
            with arguments.csv.open("a") as file:
                file.write(f'"{case.name}","{programs(case, arguments.ptx)}"\n')
            jax.clear_caches()
    if arguments.like is None:
        return 0
    before = {name: old for name, old in read(arguments.like).items() if re.search(arguments.only, name)}
    lines = differences(before, read(arguments.csv))
    print(*lines, f"{len(lines)} of {len(before)} cases differ", sep="\n")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
