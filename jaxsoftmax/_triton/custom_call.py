"""Launches a Triton kernel in a JAX program: a custom call that jax-triton makes while the program is lowered.

jax-triton and Triton are imported here and nowhere else in the library outside of the kernels, once a kernel is lowered. The
custom call is one that `jax.export` does not know: an export has to allow it by `DisabledSafetyCheck.custom_call`.
"""

import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax._core import compat
from jaxsoftmax._core.target import Target


def launch(
    kernel: Any,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    warps: int,
    target: Target,
    stages: int = 3,
    fuses: bool = True,
    zeroed: tuple[int, ...] = (),
    replaces: bool = False,
    **constants: Any,
) -> list[jax.Array]:
    """Runs a kernel and returns its results.

    Args:
      kernel: function of Triton. Its arguments are the operands, the results, and then the constants by name.
      operands: arrays that the kernel reads.
      results: types of the arrays that it writes.
      programs: number of programs.
      warps: warps of a program.
      target: the GPU that the kernel is compiled for. jax-triton would ask a GPU for it, and there may be none.
      stages: iterations of a loop that are in shared memory at once.
      fuses: True if the compiler may add a product before the product is rounded. Which of two products it takes may depend on
        the lane.
      zeroed: indices of the results that are 0 before the kernel starts.
      replaces: True if the first result takes the place of the first operand, which XLA copies if something else reads it.
      **constants: constants that the kernel is compiled for.
    """
    if target.compute_capability is None:
        raise AssertionError(f"Triton compiles for GPUs, not for {target}")
    major, minor = target.compute_capability
    options = {"grid": (programs,), "num_warps": warps, "num_stages": stages, "zeroed_outputs": zeroed, "replaces": replaces}
    options |= {"compute_capability": 10 * major + minor, "enable_fp_fusion": fuses, **constants}
    return _call.bind(*operands, kernel=kernel, results=tuple(results), options=tuple(options.items()))


# In a program for several platforms jax-triton compiles for the first. Therefore this primitive has a rule of its own, below
# the library's rule for CUDA, in which CUDA is the only platform.
_call = Primitive("jaxsoftmax_triton")
_call.multiple_results = True
_call.def_abstract_eval(lambda *_, results, **params: [jax.core.ShapedArray(r.shape, r.dtype) for r in results])


def _lower(ctx, *operands, kernel, results, options):
    import jax_triton
    from triton import knobs

    options = dict(options)
    if options.pop("replaces"):
        options["input_output_aliases"] = {0: 0}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # since jax-triton 0.4
        options |= {"out_type": results, "backend_options": {"enable_fp_fusion": options.pop("enable_fp_fusion")}}
        if "input_output_aliases" in options:  # a result in place of an operand is no argument of the kernel
            options[kernel.arg_names[len(operands)]] = None
    else:
        options["out_shape"] = results

    def call(*operands):
        with warnings.catch_warnings():  # 0.4 prefers references for results that are replaced or zeroed
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(jax_triton.triton_call(*operands, kernel=kernel, **options))

    with knobs.compilation.scope():
        # Line information holds the folders of source files: equal kernels would differ from one installation to another.
        knobs.compilation.disable_line_info = True
        return mlir.lower_fun(call)(compat.on_platform(ctx, "cuda"), *operands)


mlir.register_lowering(_call, _lower)
