"""What the library uses of JAX that is private, or newer than what was tested: kernels are refused, and the reference runs."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core import compat, sharding
from jaxsoftmax.ops.softmax import mosaic_sm90 as mosaic

from ..support import kernels, oracle
from ..support.attention import oracle as attention_oracle

X = jax.ShapeDtypeStruct((64, 4096), jnp.bfloat16)
Q = jax.ShapeDtypeStruct((1, 256, 4, 64), jnp.bfloat16)


class Without(types.ModuleType):
    """A module that lacks some of its names; a name with a dot or a parameter leaves a class that lacks it."""

    def __init__(self, module, names):
        super().__init__(module)
        self.module, self.names = importlib.import_module(module), {re.split(r"[.(]", name)[0] for name in names}
        self.fields = {name.split(".")[-1] for name in names}
        self.bare = {name for name in self.names if any(full.startswith((f"{name}.", f"{name}(")) for full in names)}

    def __getattr__(self, name):
        if name in self.bare:
            kept = getattr(getattr(self.module, name), "__annotations__", {}).keys() - self.fields
            return type(name, (), {"__annotations__": dict.fromkeys(kept)})
        if name in self.names:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return getattr(self.module, name)


def hide(names):
    """For each module that has some of `names` one that lacks those."""
    return {module: Without(module, {name for owner, name in names if owner == module}) for module, _ in names}


@pytest.fixture
def forgetting():
    compat.infer_layouts_sooner()  # once in a process: it must replace what the modules have, not their stand-ins
    forget()
    yield
    forget()


def forget():
    compat.find.cache_clear()
    compat.missing.cache_clear()


def softmax_and_attention(x, q):
    return jaxsoftmax.softmax(x), jaxsoftmax.dot_product_attention(q, q, q)


@pytest.mark.parametrize("name", compat.NAMES, ids=" ".join)
def test_a_jax_that_lacks_a_name_runs_the_reference_and_explain_names_it(forgetting, monkeypatch, name):
    for module, without in hide([name]).items():
        monkeypatch.setitem(sys.modules, module, without)
    forget()
    decisions = explain(softmax_and_attention, X, Q, platform="cuda")
    assert {decision.primitive for decision in decisions} == {"softmax", "dot_product_attention"}
    for decision in decisions:
        assert decision.implementation == "xla"
        assert dict(decision.refusals)["mosaic"] == f"jax {jax.__version__} has no {name[1]} in {name[0]}, which kernels need"
    words = re.escape(f"softmax: implementation='mosaic' cannot run: jax {jax.__version__} has no {name[1]}")
    with pytest.raises(NotImplementedError, match=words):
        explain(lambda x: jaxsoftmax.softmax(x, implementation="mosaic"), X, platform="cuda")
    x, q = np.linspace(-3, 3, 64).reshape(4, 16).astype(np.float32), np.ones((1, 3, 2, 8), np.float32)
    y, o = jax.jit(lambda x, q: softmax_and_attention(x, q))(x, q)
    assert oracle.error(y, oracle.softmax(x)) <= 1
    assert oracle.error(o, attention_oracle.attention(q, q, q)[0]) <= 1


def test_import_and_reference_need_none_of_the_names():
    """In a process of its own, where all of them are gone before the import, and so are the modules of kernels."""
    script = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
import jax
from tests.core.test_compat import Without, compat, hide
names = list(compat.NAMES)
for module in [module for module in sys.modules if module.startswith("jaxsoftmax")]:
    del sys.modules[module]
sys.modules |= hide(names)
import jaxsoftmax
q = jax.numpy.ones((1, 3, 2, 8))
print(jaxsoftmax.softmax(jax.numpy.zeros(4)), jaxsoftmax.dot_product_attention(q, q, q).sum())
print(jaxsoftmax.explain(jaxsoftmax.softmax, jax.ShapeDtypeStruct((64, 4096), "bfloat16"), platform="cuda"))
"""
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert out.startswith("[0.25 0.25 0.25 0.25] 48.0\n")
    assert "not mosaic: jax" in out


def test_importing_the_library_loads_nothing_of_pallas():
    script = "import jax, sys; before = set(sys.modules); import jaxsoftmax; print(*sorted(set(sys.modules) - before))"
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "jaxsoftmax._core.compat" in out.split()
    kernels_only = ("jax.experimental.pallas", "jax.experimental.mosaic", "jaxsoftmax._gpu.")
    loaded = [module for module in out.split() if module.startswith(kernels_only)]
    assert loaded == []


def test_the_reference_loads_nothing_of_pallas_on_a_cpu():
    """Forced and unforced, with derivatives, each op in turn in a process of its own."""
    script = """
import sys
import jax
import jax.numpy as jnp
import jaxsoftmax as js

x, q, labels = jnp.ones((2, 8)), jnp.ones((1, 4, 2, 8)), jnp.zeros(2, int)
pages, lengths = [jnp.ones((2, 8, 2, 8))] * 2, jnp.array([3])
calls = {
    "softmax": (js.softmax, x),
    "log_softmax": (js.log_softmax, x),
    "logsumexp": (js.logsumexp, x),
    "cross_entropy": (lambda x, **o: js.cross_entropy(x, labels, **o), x),
    "linear_cross_entropy": (lambda x, **o: js.linear_cross_entropy(x, x.T, labels, **o), x),
    "linear_log_probs": (lambda x, **o: js.linear_log_probs(x, x.T, labels, **o), x),
    "dot_product_attention": (lambda q, **o: js.dot_product_attention(q, q, q, **o), q),
    "paged_attention": (lambda q, **o: js.cache.paged_attention(q, *pages, jnp.zeros((1, 2), int), lengths, **o), q),
    "top_k": (lambda x, **o: js.top_k(x, 2, **o)[0], x),
    "softmax_top_k": (lambda x, **o: js.softmax_top_k(x, 2, **o)[0], x),
    "categorical": (lambda x, **o: js.categorical(jax.random.key(0), x, top_k=3, return_log_prob=True, **o)[1], x),
}
options = [{}, {"implementation": "xla"}]
for name, (f, operand) in calls.items():
    for option in options:
        jax.jit(jax.grad(lambda operand: jnp.sum(f(operand, **option)))).lower(operand)
    kernels_only = ("jax.experimental.pallas", "jax.experimental.mosaic", "jaxsoftmax._gpu.", "jaxsoftmax._triton.")
    loaded = [module for module in sys.modules if module.startswith(kernels_only)]
    print(name, *loaded)
"""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, env=env).stdout
    lines = [line.split() for line in out.splitlines()]
    assert len(lines) == 11
    assert all(loaded == [] for _, *loaded in lines), out


def test_a_context_that_says_nothing_stands_in_no_ones_way():
    ctx = types.SimpleNamespace(module_context=types.SimpleNamespace(), avals_in=[jax.typeof(np.zeros(3, np.float32))])
    for path in ("axis_context", "symbol_table", "lowering_parameters.for_export"):
        assert compat.of_module(ctx, path) is None
    assert sharding.partitioning(ctx)[1] is None


# Modules that JAX documents for all, and what objects of JAX have that no module names.
PUBLIC = {"jax", *(f"jax.{name}" for name in ("ad_checkpoint", "custom_batching", "dtypes", "errors", "export", "lax", "nn"))}
PUBLIC |= {f"jax.{name}" for name in ("numpy", "random", "sharding", "tree", "tree_util", "typing")}
OF_OBJECTS = {re.split(r"[.(]", name)[-1].rstrip(")") for _, name in compat.NAMES if re.search("[.(]", name)}
OF_OBJECTS = {"module_context", "manual_axis_type"} | OF_OBJECTS - {"TILED", "platforms"}  # which public classes have too


@functools.cache
def is_module(name):
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # what should hold it is no package
        return False


def names_of_jax(source):
    """Yields what a module uses of JAX: pairs of a module and a name, and names of objects with None."""
    tree = ast.parse(source)
    modules = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            modules |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    modules = {alias: name for alias, name in modules.items() if name.split(".")[0] in ("jax", "jaxlib")}
    found = [*modules.values()]
    for node in ast.walk(tree):
        match node:
            case ast.Attribute(attr=name) | ast.keyword(arg=name) if name in OF_OBJECTS:
                yield None, name
            case ast.Constant(value=str() as text) if re.fullmatch(r"jax(lib)?(\.\w+)+", text):
                found.append(text)
        if isinstance(node, ast.Attribute):
            owner, _, names = ast.unparse(node).partition(".")
            if owner in modules and re.fullmatch(r"[\w.]+", names):
                found.append(f"{modules[owner]}.{names}")
    for full in found:
        parts = full.split(".")
        lengths = [n for n in range(len(parts), 0, -1) if is_module(".".join(parts[:n]))]
        yield ".".join(parts[: lengths[0]]), ".".join(parts[lengths[0] : lengths[0] + 1])


def undocumented(source):
    """What a module uses of JAX that is neither public nor in `compat.EXPERIMENTAL`."""
    for module, name in names_of_jax(source):
        owners = [owner for owner in compat.EXPERIMENTAL if f"{module}.".startswith(f"{owner}.")]
        known = None if not owners else compat.EXPERIMENTAL[owners[-1]][1]
        is_listed = bool(owners) and (known is None or name in ("", *known.split()))
        is_listed |= not name and any(
            listed.startswith(f"{module}.") for listed in compat.EXPERIMENTAL
        )  # what is used says more
        if module is None or name.startswith("_") or not (module in PUBLIC or is_listed):
            yield f"{module}: {name}"


def test_what_jax_does_not_document_is_used_in_compat_or_listed_there():
    package, used = Path(jaxsoftmax.__file__).parent, set()
    for path in package.rglob("*.py"):
        if path != Path(compat.__file__):
            source = path.read_text()
            assert list(undocumented(source)) == [], path
            used.update(names_of_jax(source))
    for module, (reason, names) in compat.EXPERIMENTAL.items():
        assert reason
        assert any(f"{user}.".startswith(f"{module}.") for user, _ in used), module
        for name in (names or "").split():
            assert (module, name) in used, "it is used no more"


@pytest.mark.parametrize(
    "line",
    [
        "from jax._src import core",
        "import jax._src.core as core",
        "import jax.experimental.mosaic.gpu as mgpu",
        "from jax.interpreters import mlir; mlir.ir_constant(3)",
        "from jax.interpreters import partial_eval",
        "import jax; jax.core.get_aval",
        "import jax; jax._src.core",
        "from jaxlib import xla_client",
        "import importlib; importlib.import_module('jax._src.core')",
        "ctx.module_context",
        "jax.typeof(x).manual_axis_type",
        "array(_registers=registers)",
    ],
)
def test_what_is_private_would_be_noticed(line):
    assert list(undocumented(line)) != []
    assert list(undocumented("from jax import lax; from jax.interpreters import mlir; mlir.lower_fun(lax.exp)")) == []


# A newer JAX.


def broken(*args, **kwargs):
    raise TypeError("kernel() takes no layouts any more\nand more lines")


def test_a_kernel_that_does_not_lower_on_a_newer_jax_leaves_the_reference_and_a_reason(monkeypatch):
    monkeypatch.setattr(mosaic.SoftmaxPlan, "run", broken)
    with pytest.raises(TypeError, match="takes no layouts"):  # on a tested one it is a defect of ours
        explain(jaxsoftmax.softmax, X, platform="cuda")
    monkeypatch.setattr(jax, "__version_info__", (99, 0, 1))
    monkeypatch.setattr(jax, "__version__", "99.0.1")
    (decision,) = explain(jaxsoftmax.softmax, X, platform="cuda")
    assert decision.implementation == "xla"
    newest = ".".join(map(str, compat.TESTED[-1]))
    assert dict(decision.refusals)["mosaic"] == (
        f"it does not lower on jax 99.0.1, which is newer than the newest that was tested, {newest}:"
        " TypeError: kernel() takes no layouts any more"
    )
    assert kernels.kernel_names(kernels.lowered_for_cuda(jaxsoftmax.softmax, X)) == []
    with pytest.raises(TypeError, match="takes no layouts"):
        explain(lambda x: jaxsoftmax.softmax(x, implementation="mosaic"), X, platform="cuda")


def test_a_module_of_kernels_that_does_not_load_on_a_newer_jax_leaves_the_reference_and_a_reason(monkeypatch, forgetting):
    monkeypatch.setattr(jax, "__version_info__", (99, 0, 1))

    def load():
        raise ModuleNotFoundError("No module named 'a_module_that_does_not_exist'")

    with kernels.plugged_in("softmax", "unloadable", load, "cuda"):
        (decision,) = explain(jaxsoftmax.softmax, X, platform="cuda")
        assert decision.implementation == "xla"
        assert "No module named 'a_module_that_does_not_exist'" in dict(decision.refusals)["unloadable"]
        with pytest.raises(ModuleNotFoundError):
            explain(lambda x: jaxsoftmax.softmax(x, implementation="unloadable"), X, platform="cuda")


def test_a_kernel_that_lowers_on_a_newer_jax_runs_there(monkeypatch):
    monkeypatch.setattr(jax, "__version_info__", (99, 0, 1))
    decisions = explain(softmax_and_attention, X, Q, platform="cuda")
    assert {decision.implementation for decision in decisions} == {"mosaic"}
    mesh = jax.make_mesh((4,), ("rows",), devices=jax.devices("cpu")[:4], axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        shards = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=jax.NamedSharding(mesh, jax.P("rows")))
        (decision,) = explain(jaxsoftmax.softmax, shards, platform="cuda")
        assert (decision.operands, decision.implementation) == (("bfloat16[16,4096]",), "mosaic")


@pytest.mark.parametrize("version", [(0, 11, 2), (0, 12, 0, 1), (0, 12)])
def test_what_was_tested_is_no_newer_than_the_newest_tested(monkeypatch, version):
    monkeypatch.setattr(jax, "__version_info__", version)
    assert compat.is_tested()
    monkeypatch.setattr(jax, "__version_info__", (*compat.TESTED[-1], 1))
    assert not compat.is_tested()


def test_this_jax_is_a_tested_one():
    assert tuple(jax.__version_info__) in compat.TESTED, "run all tests on it, and add it to compat.TESTED"
    assert compat.missing() is None
    assert hasattr(plgpu, "kernel")
