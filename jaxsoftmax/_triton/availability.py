"""Says whether Triton kernels can run with the packages that are installed, and on which GPUs they are preferred.

Neither Triton nor jax-triton is imported: the reason why no kernel runs costs nothing to find.
"""

import functools
import importlib.metadata
import importlib.util
import re

from jaxsoftmax._core.target import Target

# Major compute capability of the GPUs on which the kernels were run, an H200. For other generations they are compiled, and
# tests compute their values in Triton's interpreter.
_MEASURED = 9


def refused_unless_forced(target: Target) -> str | None:
    """Says why these kernels run on this target only if the user asks for them, or returns None."""
    if _is_measured(target):  # 'mosaic' is faster there; calls that it refuses were not compared with XLA
        return "on Hopper it runs only where it is asked for"
    return None


def remark(target: Target) -> str | None:
    """Returns the caveat about the kernels on this target, in words, or None."""
    if _is_measured(target) or target.compute_capability is None:
        return None
    capability = ".".join(map(str, target.compute_capability))
    return f"compiled for compute capability {capability}, but run on {_MEASURED}.0 only"


def _is_measured(target: Target) -> bool:
    return target.compute_capability is not None and target.compute_capability[0] == _MEASURED


# Modules that kernels need, and the packages that contain them.
_PACKAGES = (("jax_triton", "jax-triton"), ("triton", "triton"))
_SERVED = ((0, 3, 1), (0, 5))  # versions of jax-triton, from the first to before the second, as in the extra `triton`


@functools.cache
def missing(packages: tuple[tuple[str, str], ...] = _PACKAGES) -> str | None:
    """Says what kernels lack among the installed packages, and how to get it, or returns None."""
    first, end = map(_dotted, _SERVED)
    remedy = f'pip install "jax-triton>={first},<{end}"'  # it brings Triton, and replaces one that is too old
    if lacking := [package for module, package in packages if not _is_installed(module)]:
        return f"it needs {' and '.join(lacking)}: {remedy}"
    version = _version_of("jax-triton")
    if version and not _SERVED[0] <= version < _SERVED[1]:
        return f"it needs jax-triton from {first} on and before {end}, got {_dotted(version)}: {remedy}"
    triton, least = _version_of("triton"), _least_triton()
    if triton and triton < least:
        return f"jax-triton {_dotted(version)} needs triton from {_dotted(least)} on, got {_dotted(triton)}: {remedy}"
    if not hasattr(importlib.import_module("jaxlib.gpu_triton"), "TritonKernel"):
        remedy = f'pip install "jax[cuda13]=={importlib.metadata.version("jax")}" (or cuda12)'
        return f"it needs JAX's plugin for CUDA, in jaxlib's version: {remedy}"
    return None


def _is_installed(module: str) -> bool:
    """Tells whether a module can be found that is more than a folder that an uninstalled one has left."""
    spec = importlib.util.find_spec(module)
    return spec is not None and spec.origin is not None


def _version_of(package: str) -> tuple[int, ...]:
    """Returns the numbers of a package's version; none if its installation does not say."""
    try:
        return _numbers(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return ()


def _least_triton() -> tuple[int, ...]:
    """Returns the first version of Triton that the installed jax-triton takes; none if it does not say."""
    if not _version_of("jax-triton"):
        return ()
    matches = [re.match(r"triton *>= *([\d.]+)", line) for line in importlib.metadata.requires("jax-triton") or ()]
    return max((_numbers(match[1]) for match in matches if match), default=())


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition("+")[0])[:3])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))
