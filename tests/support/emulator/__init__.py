"""Runs Mosaic GPU kernels without a GPU: executes with NumPy what Mosaic has lowered, inline PTX among it.

`emulated(f, *arrays)` runs a function on the CPU, and its kernels here. Each thread of a grid is an entry of arrays. Memory is
checked, and what nobody has written is NaN. What cannot be seen so: races between threads that execute together, and the last
bit of approximate instructions, which are more exact here. Tensor cores and bulk copies are not known.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from unittest import mock

import jax
import numpy as np
from jax._src import callback
from jax._src.pallas import mpmd
from jax.experimental.mosaic.gpu import core

from .. import kernels as _kernels
from .machine import Machine
from .mlir import Kernel, kernel_of


def emulated(f: Callable[..., Any], *args: Any, kernels: Sequence[str], **target: Any) -> Any:
    """Returns `f(*args)` with its Mosaic kernels emulated. Fails unless these are `kernels`, by name, in order.

    `target` are attributes of the GPU that it is lowered for, as of `kernels.target`.
    """
    with emulating(**target) as ran:
        results = jax.block_until_ready(jax.jit(f)(*args))
    assert kernels, "nothing says which kernels run"
    assert ran == list(kernels), ran
    return results


@contextlib.contextmanager
def emulating(**target: Any) -> Iterator[list[str]]:
    """Emulates kernels inside the context, and yields the names of those that ran so far.

    Fails with an `AssertionError` at a kernel that touches what is in no array, or whose threads wait for ever.
    """
    ran: list[str] = []
    errors: list[BaseException] = []

    def lower(ctx, *args, module, out_types, inout_types, input_output_aliases=(), **options):
        assert not inout_types
        kernel = kernel_of(module)
        aliases = {result: operand for operand, result in input_output_aliases}

        def run(*arrays):
            ran.append(kernel.program.name)
            results = [(aval.shape, aval.dtype) for aval in ctx.avals_out]
            running = thread.submit(run_kernel, kernel, arrays, results, aliases)
            errors.extend(filter(None, [running.exception()]))
            return running.result()

        results, _, _ = callback.emit_python_callback(
            ctx, run, None, list(args), ctx.avals_in, ctx.avals_out, has_side_effect=False
        )
        return results

    with contextlib.ExitStack() as patches:
        thread = patches.enter_context(ThreadPoolExecutor(1))
        thread.submit(lambda: None).result()  # in threads of XLA, and those that they start, subnormal numbers are 0
        patches.enter_context(mock.patch.object(core, "_mosaic_gpu_lowering_rule", lower))
        patches.enter_context(mock.patch.object(mpmd, "_mpmd_map_fallback_lowering", mpmd._mpmd_map_mgpu_lowering))
        patches.enter_context(_kernels.target(interpreted=True, **target))
        patches.enter_context(_kernels.anew())
        patches.enter_context(jax.default_device(jax.devices("cpu")[0]))
        try:
            yield ran
        except jax.errors.JaxRuntimeError as error:  # which has nothing of the kernel's own error but its text
            raise errors[0] if errors else error from error


def run_kernel(
    kernel: Kernel, arrays: Sequence[Any], results: Sequence[Any], aliases: dict[int, int]
) -> tuple[np.ndarray, ...]:
    """Returns the results of a kernel. `results` are their types, `aliases` those that an operand's memory holds."""
    machine = Machine(kernel)
    arrays = [np.asarray(array) for array in arrays]
    sizes = [int(np.prod(shape)) * np.dtype(dtype).itemsize for shape, dtype in results]
    own = [None if place in aliases else size for place, size in enumerate(sizes)]
    memory = machine.allocate([*arrays, *(size for size in own if size is not None)])
    fresh = iter(memory[len(arrays) :])
    places = [memory[aliases[k]] if size is None else next(fresh) for k, size in enumerate(own)]
    of_arguments = [*memory[: len(arrays)], *places]
    for number, slot in kernel.addresses.items():
        address, _ = of_arguments[number]
        machine.held[slot] = np.uint64(address)
        machine.registers[slot] = np.full(machine.count, address, np.uint64)
    machine.run()
    found = []
    for (shape, dtype), (_, place) in zip(results, places, strict=True):
        found.append(machine.memory.bytes[place].copy().view(dtype).reshape(shape))
    return tuple(found)
