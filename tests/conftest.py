"""Settings of every test: strict promotion of dtypes and ranks, and eight CPU devices beside whatever else there is."""

import contextlib
import gc
import importlib.util
import os
import re
import sys
import types

import pytest

# Before NumPy is imported: as many workers as cores run tests, and its threads for products would wait in loops for theirs.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention import xla

pytest.register_assert_rewrite("tests.support")  # before any of it is imported

from .support import kernels, lowering, triton_kernels  # noqa: E402

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


def pytest_configure(config: pytest.Config) -> None:
    """Processes that tests start share bytecode, also where none may be written beside sources: JAX's takes seconds to make."""
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        os.environ.setdefault("PYTHONPYCACHEPREFIX", str(config.rootpath / ".pytest_cache" / "bytecode"))
    if not config.getoption("--as-users-compile"):
        compile_quickly()
        if not has_gpu():
            lowering.quickly()


def compile_quickly() -> None:
    """Has XLA leave out, on the CPU, what makes a program fast: tests compile 20000, and run each of them once or twice.

    A small softmax compiles in 22 ms then, not in 139: in 84 without the passes that cost most, in 29 with emitters of fusions
    that make no MLIR, and in 22 in one part. `--as-users-compile` runs the tests without this.
    """
    flags = "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flags}"
    if jax.default_backend() == "cpu":
        jax.config.update("jax_disable_most_optimizations", True)


def pytest_collection_finish() -> None:
    """Takes what was imported and collected from what the garbage collector looks at: it stays."""
    gc.freeze()


def has_gpu() -> bool:
    """Says whether JAX sees an NVIDIA GPU."""
    return jax.default_backend() == "gpu"


# Words in the names of tests and of their modules, for what a newer JAX may break.
KINDS = re.compile(
    "check_grads|checkpoint|compat|explain|export|hessian|interpreted|lower|scan|shard|transformations|vmap|within_the_budget"
)
# Parameters that stand for an op, an implementation or a kernel.
EACH = ("op", "name", "kernel", "implementation")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--kinds", action="store_true", help="run one case of each kind of test, in a few minutes")
    parser.addoption("--as-users-compile", action="store_true", help="let XLA optimise programs, which takes minutes more")


def leaves_out_native_tests(config: pytest.Config) -> bool:
    """Says whether tests of kernels on a GPU are left out: there is none, and no `-m gpu` asks for the reason, test by test."""
    return not has_gpu() and "gpu" not in config.option.markexpr


def pytest_report_header(config: pytest.Config) -> str | None:
    return "no NVIDIA GPU: tests marked `gpu` are left out" if leaves_out_native_tests(config) else None


@pytest.hookimpl(trylast=True)  # after pytest has left out what `-k` and `-m` leave out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--kinds"):
        keep_one_of_each_kind(config, items)
    native = [item for item in items if item.get_closest_marker("gpu")]
    if leaves_out_native_tests(config):
        config.hook.pytest_deselected(items=native)
        items[:] = [item for item in items if not item.get_closest_marker("gpu")]
        return
    for item in native:
        if not has_gpu():
            item.add_marker(pytest.mark.skip(reason="needs an NVIDIA GPU, and JAX sees none"))
        elif triton_kernels.MISSING and forces_triton(item):
            item.add_marker(pytest.mark.skip(reason=str(triton_kernels.MISSING)))  # else explain's refusal would be a failure


def forces_triton(item: pytest.Item) -> bool:
    """Says whether a test is in a file of Triton's kernels, or has their implementation as a parameter."""
    params = getattr(getattr(item, "callspec", None), "params", {})
    return item.path.name == "test_triton.py" or any(value == "triton" for value in params.values() if isinstance(value, str))


def keep_one_of_each_kind(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keeps, of each test that a word of `KINDS` names, the first case for each value of the parameters `EACH`."""
    kept = {}
    for item in items:
        function, params = item.nodeid.partition("[")[0], getattr(getattr(item, "callspec", None), "params", {})
        if KINDS.search(function) and not item.get_closest_marker("gpu"):
            values = [value for name in EACH if isinstance(value := params.get(name), str)]
            kept.setdefault((function, *values), item)
    config.hook.pytest_deselected(items=list(set(items).difference(kept.values())))
    items[:] = kept.values()


@pytest.fixture
def gpu():
    """Leaves a test out, with the reason, where there is no GPU that the kernels run on."""
    if reason := kernels.missing(9):
        pytest.skip(reason)


@pytest.fixture
def native(request):
    """Leaves a test out that is marked `gpu` where there is no GPU that the kernels run on."""
    if request.node.get_closest_marker("gpu"):
        request.getfixturevalue("gpu")


@pytest.fixture
def choices(monkeypatch):
    """Replaces kernels by the reference, which lowers faster: which implementation is chosen does not depend on it."""
    plan = mosaic.plan

    def planned(problem, target):
        result = plan(problem, target)
        if isinstance(result, Refusal):
            return result
        return types.SimpleNamespace(remark=None, describe=result.describe, run=xla.plan(problem).run)

    monkeypatch.setattr(mosaic, "plan", planned)
    with kernels.anew():
        yield


@pytest.fixture
def hollow_kernels(request):
    """Lowers kernels without what is in them, for a test that asks only which kernels there are. On a GPU they have to run."""
    with contextlib.nullcontext() if request.node.get_closest_marker("gpu") else kernels.hollow():
        yield


@pytest.fixture
def x64():
    """Double precision while a test runs."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def optimised():
    """Lets XLA optimise, for a test whose budget or program needs it."""
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


def promoting():
    """Dtypes are promoted as JAX does by default, for libraries that rely on it; the ranks stay strict."""
    with jax.numpy_dtype_promotion("standard"):
        yield


# For a test, and for a whole module, whose own fixtures need it too.
standard_promotion = pytest.fixture(promoting, name="standard_promotion")
standard_promotion_all = pytest.fixture(promoting, scope="module", name="standard_promotion_all")


@pytest.fixture(scope="module")
def example(request):
    """The script `SCRIPT` of a module of tests, as a module."""
    path = request.module.SCRIPT
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[path.stem]
