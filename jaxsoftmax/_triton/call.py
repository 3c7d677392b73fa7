"""How a Triton kernel becomes a part of a JAX program: a custom call that jax-triton makes while the program is lowered.

Nothing here imports jax-triton or Triton before a kernel is called, so that to say why there is none takes neither.
"""

import functools
import importlib.metadata
import importlib.util
import inspect
import re
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
    """Returns why no Triton kernel runs on this target, in words, or None."""
    if target.platform != "cuda" or target.compute_capability is None or target.compute_capability[0] not in GENERATIONS:
        served = ", ".join(f"{generation}.x" for generation in GENERATIONS)
        return f"it needs a compute capability among {served}, got {target.platform} {target.compute_capability}"
    return missing()


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


# The modules that are needed, and the packages that they come in.
_PACKAGES = (("jax_triton", "jax-triton"), ("triton", "triton"))
_SERVED = ((0, 3, 1), (0, 5))  # versions of jax-triton, from the first to before the second, as in the extra `triton`


@functools.cache
def missing(packages: tuple[tuple[str, str], ...] = _PACKAGES) -> str | None:
    """Returns what kernels lack among what is installed, and how to get it, in words, or None; it imports no Triton."""
    first, end = map(_dotted, _SERVED)
    remedy = f'pip install "jax-triton>={first},<{end}"'  # which brings Triton, and replaces one that is too old
    if lacking := [package for module, package in packages if not _is_there(module)]:
        return f"it needs {' and '.join(lacking)}: {remedy}"
    own = _version_of("jax-triton")
    if own and not _SERVED[0] <= own < _SERVED[1]:
        return f"it needs jax-triton from {first} on and before {end}, got {_dotted(own)}: {remedy}"
    triton, least = _version_of("triton"), _least_triton()
    if triton and triton < least:
        return f"jax-triton {_dotted(own)} needs triton from {_dotted(least)} on, got {_dotted(triton)}: {remedy}"
    if not hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernel"):
        remedy = f'pip install "jax[cuda13]=={importlib.metadata.version("jax")}" (or cuda12)'
        return f"it needs JAX's plugin for CUDA, in jaxlib's version: {remedy}"
    return None


def _is_there(module: str) -> bool:
    """Returns whether a module can be found that is more than a folder that an uninstalled one has left."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _version_of(package: str) -> tuple[int, ...]:
    """The numbers of a package's version; none where its installation does not say."""
    try:
        return _numbers(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()


def _least_triton() -> tuple[int, ...]:
    """The first version of Triton that the installed jax-triton takes, as far as it says."""
    if not _version_of("jax-triton"):
        return ()
    found = [re.match(r"triton *>= *([\d.]+)", line) for line in importlib.metadata.requires("jax-triton") or ()]
    return max((_numbers(match[1]) for match in found if match), default=())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


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

    def called(*operands):
        with warnings.catch_warnings():  # 0.4 prefers references where results are replaced or zeroed
            warnings.simplefilter("ignore", DeprecationWarning)
            return list(jax_triton.triton_call(*operands, kernel=kernel, **options))

    with knobs.compilation.scope():
        knobs.compilation.disable_line_info = True  # which holds the directories of source files: equal kernels would differ
        return mlir.lower_fun(called)(compat.on_platform(ctx, "cuda"), *operands)


mlir.register_lowering(_call, _lower)
