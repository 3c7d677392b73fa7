"""How a Triton kernel becomes a part of a JAX program: a custom call that jax-triton makes while the program is lowered.

Nothing here imports jax-triton or Triton before a kernel is called, so that to say why there is none takes neither.
"""

import importlib.util
import inspect
import warnings
from collections.abc import Sequence
from typing import Any

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxsoftmax._core import compat

# The major compute capabilities of the GPUs that kernels are compiled for: Ampere and Ada, Hopper, Blackwell.
GENERATIONS = (8, 9, 10, 12)
MEASURED = 9  # the one that they were run on


def unsupported(target) -> str | None:
    """Why no Triton kernel runs on this target, in words, or None."""
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability[0] not in GENERATIONS:
        served = ", ".join(f"{generation}.x" for generation in GENERATIONS)
        return f"it needs a compute capability among {served}, got {target.platform} {target.compute_capability}"
    if missing := [name for module, name in _PACKAGES if importlib.util.find_spec(module) is None]:
        return f"it needs {' and '.join(missing)}: pip install 'jaxsoftmax[triton]'"
    return None


def not_preferred(target) -> str | None:
    """Why these kernels run on this target only where they are asked for, in words, or None."""
    if target.compute_capability[0] == MEASURED:  # where 'mosaic' is faster; what that does not run was not compared
        return "on Hopper it runs only where it is asked for"
    return None


def remark(target) -> str | None:
    """A caveat about the kernels on this target, in words, or None."""
    if target.compute_capability[0] == MEASURED:
        return None
    return f"compiled for compute capability {'.'.join(map(str, target.compute_capability))}, but run on {MEASURED}.0 only"


_PACKAGES = (("jax_triton", "jax-triton"), ("triton", "triton"))


def call(
    kernel: Any,
    operands: Sequence[jax.Array],
    results: Sequence[jax.ShapeDtypeStruct],
    *,
    programs: int,
    warps: int,
    stages: int = 3,
    fuses: bool = True,
    zeroed: tuple[int, ...] = (),
    target,
    replaces: bool = False,
    **constants: Any,
) -> list[jax.Array]:
    """The results of a kernel, whose arguments are the operands, the results and then constants by name.

    `stages` is how many iterations of a loop are in shared memory at once. Where it `fuses`, the compiler may add a product
    before that is rounded, and which one it is may depend on the lane. Results that are `zeroed`, by index, are 0 before.
    With `replaces` the first result takes the place of the first operand, which XLA copies where something else reads it. The
    target says for which GPU it is compiled; jax-triton asks a GPU otherwise, and there may be none.
    """
    major, minor = target.compute_capability
    options = {"grid": (programs,), "num_warps": warps, "num_stages": stages, "zeroed_outputs": zeroed, "replaces": replaces}
    options |= {"compute_capability": 10 * major + minor, "enable_fp_fusion": fuses, **constants}
    return _call.bind(*operands, kernel=kernel, results=tuple(results), options=tuple(options.items()))


# In a program for several platforms jax-triton compiles for the first. So a primitive of ours has a rule, which the rule for
# CUDA above it leads to, and in which CUDA is the only platform.
_call = Primitive("jaxsoftmax_triton")
_call.multiple_results = True
_call.def_abstract_eval(lambda *_, results, **params: [jax.core.ShapedArray(r.shape, r.dtype) for r in results])


def _lower(ctx, *operands, kernel, results, options):
    import jax_triton

    options = dict(options)
    if options.pop("replaces"):
        options["input_output_aliases"] = {0: 0}
    if "out_type" in inspect.signature(jax_triton.triton_call).parameters:  # since jax-triton 0.4
        options |= {"out_type": results, "backend_options": {"enable_fp_fusion": options.pop("enable_fp_fusion")}}
        if "input_output_aliases" in options:  # a result in place of an operand is no argument of the kernel
            options[kernel.arg_names[len(operands)]] = None
    else:
        options["out_shape"] = results

    def called(*operands):
        with warnings.catch_warnings():  # 0.4 prefers references where results are replaced or zeroed
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(jax_triton.triton_call(*operands, kernel=kernel, **options))

    return mlir.lower_fun(called)(compat.on_platform(ctx, "cuda"), *operands)


mlir.register_lowering(_call, _lower)
