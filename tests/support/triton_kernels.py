"""What tests of Triton kernels need: to choose them without a GPU, to compile them for one, and to interpret them.

Triton is not among the packages that tests need: it is imported where it is used. Where it is installed, those tests run too:

    uv run --extra triton pytest tests/*/test_triton.py
"""

import contextlib
import functools
import os
import re
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxsoftmax._core import target as targets
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.operation import Operation
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._triton import availability, custom_call

from . import kernels

MISSING = availability.missing()
needs_triton = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


# The custom calls of kernels, the second since jax-triton 0.4. An export does not know whether they stay as they are.
UNCHECKED = list(map(jax.export.DisabledSafetyCheck.custom_call, ("triton_kernel_call", "triton_kernel_call_ffi")))


def target_of(capability: tuple[int, int]) -> targets.Target:
    shared = targets._SHARED_MEMORY.get(capability, targets._LEAST_SHARED_MEMORY) << 10
    return targets.Target("cuda", capability, 108, shared)


# Plans without a lowering, and what they compute.


def problem_of(operation: Operation, operands: Mapping[str, Any], **params: Any) -> Problem:
    """Returns the problem of an operation for arrays, or types, by name; None is absent."""
    types = {name: jax.ShapeDtypeStruct(a.shape, a.dtype) for name, a in operands.items() if a is not None}
    return operation.problem(operation, types, params)


@dataclass(frozen=True)
class Forced:
    """Plans as an implementation does where the user asks for it, though the reference may be faster."""

    module: Any

    def plan(self, problem: Problem, target: targets.Target) -> Any:
        plan = self.module.plan(problem, target)
        plan = plan.plan if isinstance(plan, Refusal) and plan.plan is not None else plan
        assert not isinstance(plan, Refusal), plan
        return plan


def forced(module: Any, operation: Operation, operands: Mapping[str, Any], target: targets.Target, **params: Any) -> Any:
    """Returns the plan of an implementation for arrays by name, though the reference may be faster."""
    return Forced(module).plan(problem_of(operation, operands, **params), target)


def operations(module: Any) -> dict[str, Operation]:
    """Returns the operations that a module of primitives defines, by name."""
    return {value.name: value for value in vars(module).values() if isinstance(value, Operation)}


# The choice of kernels.


@contextlib.contextmanager
def lowering_without(interpreted: bool = False) -> Iterator[Callable[..., None]]:
    """Yields a function that lowers for a compute capability, as if Triton were installed or not. Nothing is compiled.

    `interpreted` is that of `kernels.target`.
    """
    missing = availability.missing
    with kernels.without_triton(), pytest.MonkeyPatch.context() as patch, contextlib.ExitStack() as contexts:

        def lower_for(capability, is_installed=True):
            contexts.close()
            contexts.enter_context(kernels.target(target_of(capability), interpreted))
            lacks = None if is_installed else missing((("no_such_module", "jax-triton"),))
            patch.setattr(availability, "missing", lambda: lacks)
            contexts.enter_context(kernels.anew())

        yield lower_for


# Compilation, for GPUs that need not be there.


@dataclass(frozen=True)
class Compiled:
    """A compiled kernel: its name, registers of a thread, bytes that it spills, bytes of shared memory of a block."""

    name: str
    registers: int
    spilled: int
    shared: int


_TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16", "bool": "*i1", "int32": "*i32", "uint32": "*u32"}


def compiled(f: Callable[[], Any], monkeypatch: Any) -> list[Compiled]:
    """Returns the kernels that a function of an implementation compiles."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    found = []

    def compile_kernel(
        kernel, operands, results, *, programs, warps, target, stages=3, fuses=True, zeroed=(), replaces=False, **constants
    ):
        arrays = [_TYPES[a.dtype.name] for a in [*operands, *results]]
        signature = dict(zip(kernel.arg_names, arrays, strict=False)) | dict.fromkeys(constants, "constexpr")
        aligned = {(index,): [["tt.divisibility", 16]] for index in range(len(arrays))}
        source = ASTSource(kernel, signature=signature, constexprs=constants, attrs=aligned)
        major, minor = target.compute_capability
        options = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": fuses}
        binary = triton.compile(source, GPUTarget("cuda", 10 * major + minor, 32), options)
        found.append(Compiled(binary.metadata.name, *_registers(binary.asm["ptx"]), binary.metadata.shared))
        return [jnp.zeros(result.shape, result.dtype) for result in results]

    monkeypatch.setattr(custom_call, "launch", compile_kernel)
    if not os.environ.get("TRITON_CACHE_DIR"):  # jax-triton 0.3 takes it away when it is imported
        monkeypatch.setenv("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    jax.eval_shape(f)
    return found


def _registers(ptx: str) -> tuple[int, int]:
    """Returns the registers of a thread that a kernel uses, and the bytes of them that it keeps in local memory."""
    from triton.backends.nvidia.compiler import get_ptxas

    arch = re.search(r"\.target (sm_\d+a?)", ptx).group(1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.ptx"
        path.write_text(ptx)
        ptxas = get_ptxas(int(re.sub(r"\D", "", arch))).path
        command = [ptxas, "-v", f"--gpu-name={arch}", str(path), "-o", str(path.with_suffix(".cubin"))]
        log = subprocess.run(command, check=True, capture_output=True, text=True).stderr
    return int(re.search(r"Used (\d+) registers", log).group(1)), sum(map(int, re.findall(r"(\d+) bytes spill", log)))


# Results of kernels. The interpreter is chosen by `TRITON_INTERPRET=1` before Triton is imported.


def assert_passes_interpreted(path: Path) -> None:
    """Runs a file of tests in a process of its own, in which Triton interprets kernels."""
    env = {**os.environ, "TRITON_INTERPRET": "1", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, cwd=Path(__file__).parents[2])
    assert done.returncode == 0, done.stdout[-4000:]


def interpret(monkeypatch: Any, run_kernel: Callable[..., Any] | None = None) -> None:
    """Runs kernels where they are called, on NumPy arrays. They round to bfloat16 as on GPUs, and do not truncate."""
    from triton.runtime import interpreter

    monkeypatch.setattr(custom_call, "launch", run_kernel or run)
    monkeypatch.setattr(interpreter.GridExecutor, "_init_args_hst", lambda self, args, kwargs: (args, kwargs))
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda self, *args: None)
    monkeypatch.setattr(interpreter, "_convert_float", _rounded)
    monkeypatch.setattr(interpreter, "_patch_lang_tensor", functools.partial(_patched, interpreter._patch_lang_tensor))
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", _dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_splat", _splat)


def run(
    kernel, operands, results, *, programs, warps=4, stages=3, fuses=True, zeroed=(), replaces=False, target=None, **constants
):
    """Returns the results of a kernel, from NumPy arrays."""
    del warps, stages, fuses, target
    given = [np.ascontiguousarray(operand) for operand in operands]
    out = [np.full(result.shape, 0 if index in zeroed else 7, result.dtype) for index, result in enumerate(results)]
    if replaces:
        given[0] = out[0] = given[0].copy()
    with np.errstate(all="ignore"):  # what is 7 the kernel has to overwrite
        kernel[(programs,)](*map(_pointer, given), *map(_pointer, out), **constants)
    return out


def run_in_jax(kernel, operands, results, **options):
    """Does the same in a traced function."""

    def called(*given):
        with _one_at_a_time:
            return tuple(run(kernel, given, results, **options))

    return list(jax.pure_callback(called, tuple(results), *operands))


_one_at_a_time = threading.Lock()  # the interpreter changes Triton's functions while it runs a kernel; devices call in threads


def _pointer(array):
    return SimpleNamespace(data_ptr=lambda: array.ctypes.data, dtype=array.dtype.name, array=array)


def _patched(patch, tensor, scope):
    """Turns arrays of one element into numbers, which Triton 3.6 needs as bounds of loops and NumPy 2.5 refuses."""
    patch(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _rounded(values, from_type, to_type, mode):
    """Converts floating point numbers between types of the interpreter, which holds bfloat16 as integers."""
    import triton.language as tl

    del mode
    dtypes = {tl.bfloat16: jnp.bfloat16, tl.float32: np.float32, tl.float16: np.float16}
    values = np.ascontiguousarray(values).view(dtypes[from_type]).astype(dtypes[to_type])
    return values.view(f"uint{to_type.primitive_bitwidth}")


def _dot(builder, a, b, sum, precision, imprecise):
    """Multiplies matrices, also of bfloat16, which the interpreter takes for integers."""
    import triton.language as tl
    from triton.runtime import interpreter

    del builder, precision, imprecise
    a, b = (x.data.view(jnp.bfloat16) if x.dtype.scalar == tl.bfloat16 else x.data for x in (a, b))
    product = np.matmul(a.astype(np.float32), b.astype(np.float32))
    return interpreter.TensorHandle(product + sum.data, sum.dtype.scalar)


def _splat(builder, kind, number):
    """Repeats a number in the type of its array. For the interpreter the result of a comparison of floats is a float."""
    from triton.runtime import interpreter

    del builder
    return interpreter.TensorHandle(np.full(kind.shape, number.data, number.data.dtype), number.dtype.scalar)


CAPABILITIES = [(8, 0), *[pytest.param(c, marks=pytest.mark.slow) for c in ((8, 6), (8, 9), (9, 0), (10, 0), (12, 0))]]
SPILLED = 64  # bytes that a thread may spill
SPILLED_OF_LARGE_TILES = 384  # of two arrays, or with a mask and a cap: Triton 3.9 spills 340 at most
LARGE_TILES = [(64, 32768), (4, 50257), (8, 1000, 128)]
