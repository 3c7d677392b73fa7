"""Helps tests of Pallas kernels: plugs one in, lowers it without a GPU, interprets it, and tells that it ran."""

import contextlib
import dataclasses
import functools
import itertools
import math
import re
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
from jax._src.dispatch import prim_requires_devices_during_lowering
from jax._src.pallas.mosaic_gpu import pallas_call_registration
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.mosaic.gpu import core
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir

from jaxsoftmax import _triton
from jaxsoftmax._core import choose, compat, lower, primitive
from jaxsoftmax._core import target as targets
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.operation import Kernels
from jaxsoftmax._triton import availability, custom_call
from jaxsoftmax.ops import OPS
from jaxsoftmax.ops.softmax import across_devices

from . import cases

# The name of a Mosaic GPU kernel in the module that its custom call carries along; the other name there is the dialect's.
_KERNEL = re.compile(r"\\00(?!stable_)(\w+)_mosaic_gpu\\00")


@contextlib.contextmanager
def plugged_in(op: str, name: str, load: Callable[[], Any], *platforms: str, takes_factor: bool = False) -> Iterator[None]:
    """Makes a module the only implementation of `op` beside the reference, on `platforms`, inside the context."""
    primitives = {compiled for this, (compiled, _) in primitive._primitives.items() if this.op.name == op}
    added = primitives - prim_requires_devices_during_lowering
    generations = {9: load} if platforms == ("cuda",) else {0: load, 9: load}
    with mock.patch.dict(OPS[op].kernels, {name: Kernels(generations, platforms, takes_factor)}, clear=True):
        for each in primitives:
            compat.require_devices(each)
        try:
            with anew():
                yield
        finally:
            prim_requires_devices_during_lowering.difference_update(added)


class Local:
    """Runs the reference of an op under another name, and notes the shapes of its operands while it is lowered."""

    def __init__(self, op: str, *platforms: str):
        self.reference, self.platforms, self.shapes = OPS[op].reference(), platforms, []
        self.reason = lambda problem: None  # why it refuses a problem, for tests to set

    def plan(self, problem, target):
        assert target.platform in self.platforms
        if problem.devices:
            return Refusal("it does not merge over devices")
        if (reason := self.reason(problem)) is not None:
            return Refusal(reason)
        plan = self.reference.plan(problem)
        return dataclasses.replace(plan, function=functools.partial(self.run, plan.function))

    def run(self, function, **given):
        assert "axis_name" not in given, "only the reference is asked to merge over devices"
        self.shapes.append(tuple(value.shape for value in given.values() if isinstance(value, jax.Array)))
        return function(**given)


@contextlib.contextmanager
def plugged_in_local(op: str) -> Iterator[Local]:
    """Makes the reference of `op` an implementation on the CPU that runs on shards, however short their parts of rows are."""
    module = Local(op, "cpu")
    always = mock.patch.object(across_devices, "slower_states", return_value=None)
    with always, plugged_in(op, "local", lambda: module, "cpu"):
        yield module


_key = jax.make_user_context()  # is a part of the keys of all that JAX keeps
_numbers = itertools.count()


@contextlib.contextmanager
def anew() -> Iterator[None]:
    """Makes JAX trace and lower programs anew inside the context: it keeps the implementation that it once chose."""
    with _key((_key.value, next(_numbers))):
        yield


@contextlib.contextmanager
def target(base: targets.Target = targets.HOPPER, interpreted: bool = False, **changes: Any) -> Iterator[None]:
    """A context that lowers programs for CUDA for `base` with these attributes changed, whatever JAX has lowered before.

    On few multiprocessors blocks of threads of a small problem have many tiles each. `interpreted` is for kernels that run on
    the CPU in place of those of a GPU: programs for the CPU are lowered for the target too.
    """
    changed = dataclasses.replace(base, **changes)
    of_cpu = mock.patch.object(lower, "target_for", return_value=changed) if interpreted else contextlib.nullcontext()
    with targets.lowering_for(changed), of_cpu, _key((_key.value, changed)):
        yield


def lowered_for_cuda(f: Callable[..., Any], *avals: Any, kernels: list[str] | None = None) -> str:
    """Returns the StableHLO of `f(*avals)` for CUDA, GPU or not. Fails unless its Mosaic kernels are `kernels`, in order."""
    text = jax.jit(f).trace(*avals).lower(lowering_platforms=("cuda",)).as_text()
    if kernels is not None:
        assert kernel_names(text) == kernels
    return text


def products_in_use(f: Callable[..., Any], *avals: Any) -> list[str]:
    """Lists the products and quotients as large as the first operand that a program for CUDA computes and something reads.

    What a gather takes is computed with it: it reads nothing else.
    """
    module = jax.jit(f).trace(*avals).lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    functions, size, found = ir.SymbolTable(module.operation), math.prod(avals[0].shape), []

    def is_read(value):
        for use in value.uses:
            is_unused = use.owner.name == "stablehlo.reshape" and not is_read(use.owner.results[0])
            if is_unused or use.owner.name == "stablehlo.gather":
                continue
            if use.owner.name != "func.call":
                return True
            (block,) = functions[use.owner.attributes["callee"].value].regions[0]
            if is_read(block.arguments[use.operand_number]):
                return True
        return False

    def visit(operation):
        if operation.name in ("stablehlo.multiply", "stablehlo.divide"):
            (result,) = operation.results
            if math.prod(ir.RankedTensorType(result.type).shape) == size and is_read(result):
                found.append(str(operation))
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def sizes(text, *kinds):
    """Returns the number of entries of each array of these MLIR types in a program."""
    shapes = re.findall(rf"tensor<([0-9x]+x)(?:{'|'.join(kinds)})>", text)
    return {math.prod(map(int, shape.split("x")[:-1])) for shape in shapes}


def with_modules(f: Callable[..., Any], *avals: Any, see: Callable[[Any], Any]) -> list[Any]:
    """Returns `see(module)` for the lowered module of each Mosaic kernel of `f(*avals)`."""
    found, lower = [], core.lower_mgpu_module

    def noted(module, *args, **options):
        lower(module, *args, **options)
        found.append(see(module))

    with anew(), mock.patch.object(core, "lower_mgpu_module", noted):
        lowered_for_cuda(f, *avals)
    return found


# The operands of a barrier, without the predicate that `red` gives.
_BARRIER = re.compile(r"(?<![\w.])bar(?:rier(?:\.cta)?)?\.(?:sync|arrive|red\.(?:and|or)\.pred\s+\w+,)(?:\.\w+)*\s+([^;]*);")


def named_barriers(module: Any) -> set[tuple[range, int]]:
    """The numbers that each barrier of a lowered kernel may have, and for how many threads it is, 0 for all of the block.

    Numbers are bounded by those of the threads. Fails at instructions that are not known.
    """
    found, threads = set(), 0

    def values(value) -> range:
        operation = value.owner
        name, own = operation.name, operation.operands
        if name == "arith.constant":
            return range(number := operation.attributes["value"].value, number + 1)
        if name in ("gpu.thread_id", "gpu.block_dim"):
            is_x = "x" in str(operation.attributes["dimension"])
            size = threads if is_x else 1
            return range(size) if name == "gpu.thread_id" else range(size, size + 1)
        if name in ("arith.index_cast", "nvvm.shfl.sync"):
            return values(own[name == "nvvm.shfl.sync"])
        left, right = map(values, own)
        if name == "arith.remsi":
            return range(right.stop - 1)
        ends = {"arith.addi": lambda a, b: a + b, "arith.muli": lambda a, b: a * b, "arith.shrui": lambda a, b: a >> b}[name]
        return range(ends(left.start, right.start), ends(left.stop - 1, right.stop - 1) + 1)

    def visit(operation):
        nonlocal threads
        if operation.name == "gpu.launch":
            threads = operation.opview.blockSizeX.owner.attributes["value"].value
        if operation.name == "gpu.barrier":
            found.add((range(1), 0))
        elif operation.name == "llvm.inline_asm":
            text = operation.attributes["asm_string"].value
            matches = _BARRIER.findall(text)
            assert len(matches) == len(re.findall(r"(?<![\w.])bar(?:rier)?\.(?!warp|cluster)", text)), text
            for number, count in (f"{match}, 0".split(", ")[:2] for match in matches):
                if number.startswith("$"):  # results are counted first
                    one = values(operation.operands[int(number[1:]) - len(operation.results)])
                else:
                    one = range(int(number), int(number) + 1)
                found.add((one, int(count)))
        else:
            assert "barrier" not in operation.name or operation.name.startswith(("nvvm.mbarrier", "mosaic_gpu.")), (
                operation.name
            )
        return ir.WalkResult.ADVANCE

    module.operation.walk(visit, ir.WalkOrder.PRE_ORDER)
    return found


@contextlib.contextmanager
def hollow(but: str | None = None) -> Iterator[None]:
    """A context in which Mosaic kernels, `but` those of a name, are lowered without what is in them.

    Their names, operands and results stay. To lower what is in them takes most of the time, and which kernels a program has
    does not depend on it.
    """
    rule = pallas_call_registration.mpmd_map_mgpu_lowering_rule

    def without_what_is_in_them(ctx, *args, jaxprs, **params):
        empty = [jaxpr.replace(eqns=[]) for jaxpr in jaxprs]
        return rule(ctx, *args, jaxprs=jaxprs if but and params["name"] == but else empty, **params)

    empty = mock.patch.object(pallas_call_registration, "mpmd_map_mgpu_lowering_rule", without_what_is_in_them)
    with empty, _key((_key.value, "hollow", but)):
        yield


def kernel_names(stablehlo: str) -> list[str]:
    """Returns the names of the Mosaic kernels in a program, in order."""
    names = _KERNEL.findall(stablehlo)
    assert len(names) == stablehlo.count("custom_call @mosaic_gpu"), "a Mosaic kernel whose name is not found"
    return names


def assert_ran(what: choose.Explanation | str, implementation: str) -> None:
    """Fails unless all decisions, or all kernels of a StableHLO text, are of `implementation`, and there is one at least."""
    if isinstance(what, str):
        names = kernel_names(what)
        assert names, "there is no Mosaic kernel in this program"
        assert all(name.endswith(f"_{implementation}") for name in names), names
    else:
        cases.assert_all_run_on(implementation, what)


_is_adding = threading.local()  # whether the copy that this thread starts adds


class _Copy(gpu_callbacks.AsyncCopySmemToGmemTask):
    """A copy to global memory that may add to what is there, which JAX 0.11 and 0.12 do not interpret."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.adds = getattr(_is_adding, "value", False)

    def __call__(self, tma_thread_id: int) -> None:
        if not self.adds:
            return super().__call__(tma_thread_id)
        memory = gpu_callbacks._get_shared_memory()
        self.pre_read(tma_thread_id, memory)
        value = memory.get_buffer_content(
            self.src_allocation_key, self.src_access, self.thread, logging_info=self.logging_info
        )[0]
        self.post_read(tma_thread_id, memory)
        own, shape = self.dst_allocation_key, tuple(memory.buffer_shape_and_dtype(self.dst_allocation_key).shape)
        store = gpu_callbacks._clip_store_to_shape(self.dst_access, value, shape)
        if store is not None:
            before = memory.get_buffer_content(own, store[0], self.thread, logging_info=self.logging_info)[0]
            memory.store_buffer_content(own, store[0], before + store[1], self.thread, logging_info=self.logging_info)
        return self.post_write(tma_thread_id, memory)


def _with_additions(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the interpreter's copy to global memory, which also adds."""

    def copied(*, reduction_op: Any, **options: Any) -> Any:
        assert reduction_op is None or "add" in str(reduction_op).lower(), reduction_op
        _is_adding.value = reduction_op is not None
        return copy(reduction_op=None, **options)

    return copied


def interpreted(f: Callable[..., Any], *args: Any) -> Any:
    """Returns `f(*args)` with its Pallas kernels interpreted on the CPU. Fails if there is none, or if one has a data race."""
    states = []
    new_state = gpu_callbacks.GPURaceDetectionState

    def recorded(**kwargs):  # JAX keeps the races of the last kernel only
        states.append(new_state(**kwargs))
        return states[-1]

    cpu = jax.devices("cpu")[0]
    params = plgpu.InterpretGPUParams(detect_races=True)
    copies = {"AsyncCopySmemToGmemTask": _Copy, "copy_smem_to_gmem": _with_additions(gpu_callbacks.copy_smem_to_gmem)}
    with mock.patch.multiple(gpu_callbacks, GPURaceDetectionState=recorded, **copies), jax.default_device(cpu):
        try:
            with plgpu.force_gpu_interpret_mode(params):
                results = jax.block_until_ready(f(*args))
        except jax.errors.JaxRuntimeError as error:  # since 0.12 JAX raises at a race, and says where
            raise AssertionError("a kernel has a data race") if "RACE DETECTED" in str(error) else error from error
        finally:
            gpu_callbacks.reset_gpu_interpret_mode_state()  # after an error no kernel could be interpreted any more
    assert states, "no kernel was interpreted"
    assert not any(state.races_found for state in states), "a kernel has a data race: its output above says where"
    return results


@contextlib.contextmanager
def _imported(module: types.ModuleType) -> Iterator[None]:
    """Gives imports of a module's name this one.

    `mock.patch.dict` would drop the modules that are first imported meanwhile. Imported once more they would have classes of
    their own, and no plan would be an instance of those.
    """
    name, before = module.__name__, sys.modules.get(module.__name__)
    sys.modules[name] = module
    try:
        yield
    finally:
        del sys.modules[name]
        if before is not None:
            sys.modules[name] = before


@contextlib.contextmanager
def without_triton() -> Iterator[None]:
    """Lowers calls of Triton kernels to something else, as if the packages that compile them were installed."""

    def something(kernel, operands, results, **options):
        return [jax.lax.sort(jnp.zeros((*result.shape, 1), result.dtype))[..., 0] for result in results]

    modules = {name: types.ModuleType(f"jaxsoftmax._triton.{name}") for name in ("rows", "attention")}
    modules["rows"].rows = None
    for kernel in ("forward", "backward_keys", "backward_queries"):
        setattr(modules["attention"], f"attention_{kernel}", None)
    with contextlib.ExitStack() as patches:
        patches.enter_context(mock.patch.object(custom_call, "launch", something))
        patches.enter_context(mock.patch.object(availability, "missing", return_value=None))
        for name, module in modules.items():
            patches.enter_context(_imported(module))
            patches.enter_context(mock.patch.object(_triton, name, module, create=True))
        patches.enter_context(anew())
        yield


def missing(major: int) -> str | None:
    """Returns the reason to skip a test that runs kernels for compute capability `major`.x, or None."""
    try:
        capability = jax.devices("cuda")[0].compute_capability
    except RuntimeError:
        return f"needs an NVIDIA GPU of compute capability {major}.x, and JAX sees none"
    if capability.split(".")[0] != str(major):
        return f"needs an NVIDIA GPU of compute capability {major}.x, and this one has {capability}"
    return None
