"""Triton's kernels of the softmax family: which calls they are chosen for, for which GPUs they compile, what they compute.

What the kernels compute is tested in `triton_interpreted.py`, which needs a process of its own.
"""

import functools
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core import target as targets
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._triton import call
from jaxsoftmax.ops.softmax import triton as ours

from ..support import cases, kernels, triton_kernels
from ..support.triton_kernels import CAPABILITIES, LARGE_TILES, SPILLED, SPILLED_OF_LARGE_TILES, needs_triton, target_of

X = jax.ShapeDtypeStruct((64, 1000), jnp.float32)


@pytest.fixture
def on():
    with triton_kernels.lowering_without() as lower_for:
        yield lower_for


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (10, 3), (12, 0)], ids=str)
@pytest.mark.parametrize("name", cases.OPS)
def test_it_runs_where_it_is_forced(on, name, capability):
    on(capability)
    f = functools.partial(getattr(jaxsoftmax, name), axis=-1, implementation="triton")
    cases.assert_all_run_on("triton", explain(f, X, platform="cuda"))
    cases.assert_all_run_on("triton", explain(lambda x, c: jax.vjp(f, x)[1](c), X, jax.eval_shape(f, X), platform="cuda"))
    cases.assert_all_run_on("triton", explain(lambda x, t: jax.jvp(f, (x,), (t,)), X, X, platform="cuda"))


@pytest.mark.parametrize("capability", [(8, 0), (12, 0)], ids=str)
def test_it_is_chosen_where_it_is_compiled_for(on, capability):
    on(capability)
    (decision,) = explain(jaxsoftmax.softmax, X, platform="cuda")
    assert decision.implementation == "triton"
    assert "but run on 9.0 only" in decision.remark


def test_on_hopper_it_runs_only_where_it_is_asked_for(on):
    on((9, 0))
    x, where = jax.ShapeDtypeStruct((2, 3, 4), jnp.float32), jax.ShapeDtypeStruct((1, 3, 4), bool)  # a mask that mosaic refuses
    (decision,) = explain(lambda x, where: jaxsoftmax.softmax(x, axis=(0, 1), where=where), x, where, platform="cuda")
    assert decision.implementation == "xla"
    assert dict(decision.refusals)["triton"] == "on Hopper it runs only where it is asked for"
    (decision,) = explain(functools.partial(jaxsoftmax.softmax, implementation="triton"), X, platform="cuda")
    assert decision.implementation == "triton"
    assert decision.remark is None


def test_explain_prints_the_remark(on):
    on((8, 6))
    text = str(explain(jaxsoftmax.softmax, X, platform="cuda"))
    assert "      triton: compiled for compute capability 8.6, but run on 9.0 only" in text


@pytest.mark.parametrize(
    ("shape", "dtype", "expected"),
    [
        ((64, 16, 15), "bfloat16", "xla"),
        ((64, 17, 15), "bfloat16", "xla"),
        ((64, 18, 15), "bfloat16", "triton"),
        ((64, 16, 16), "bfloat16", "triton"),
        ((64, 16, 15), "float32", "xla"),
        ((64, 257, 1), "float32", "triton"),
    ],
)
def test_short_rows_with_few_beside_them_are_left_to_xla(on, shape, dtype, expected):
    f = functools.partial(jaxsoftmax.softmax, axis=1)
    for capability, implementation in (((8, 0), "triton"), ((9, 0), "mosaic")):
        on(capability)
        (decision,) = explain(f, jax.ShapeDtypeStruct(shape, dtype), platform="cuda")
        assert decision.implementation == (expected if expected == "xla" else implementation)


def test_what_xla_computes_together_with_its_operand_is_left_to_it(on):
    on((8, 0))
    (decision,) = explain(lambda x: jaxsoftmax.softmax(x * 2 + 1), X, platform="cuda")
    assert decision.implementation == "xla"


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
def test_without_jax_triton_the_reason_names_what_to_install(on, capability):
    on(capability, is_installed=False)
    words = 'it needs jax-triton: pip install "jax-triton>=0.3.1,<0.5"'
    if capability != (9, 0):
        (decision,) = explain(jaxsoftmax.softmax, X, platform="cuda")
        assert decision.implementation == "xla"
        assert re.fullmatch(words, dict(decision.refusals)["triton"])
    with pytest.raises(NotImplementedError, match=f"softmax: implementation='triton' cannot run: {words}"):
        explain(functools.partial(jaxsoftmax.softmax, implementation="triton"), X, platform="cuda")


# What may be there in part: versions of jax-triton and Triton, whether jaxlib has JAX's plugin for CUDA, and the reason.
INSTALLED = {
    "all": ("0.4.1", "3.9.0", True, None),
    "a build of Triton": ("0.3.1", "3.8.0+git1234", True, None),
    "an old jax-triton": ("0.3.0", "3.9.0", True, "it needs jax-triton from 0.3.1 on and before 0.5, got 0.3.0: pip install"),
    "a newer jax-triton": ("0.5.0", "3.9.0", True, "it needs jax-triton from 0.3.1 on and before 0.5, got 0.5.0: pip install"),
    "an old Triton": ("0.4.1", "3.6.0", True, "jax-triton 0.4.1 needs triton from 3.7 on, got 3.6.0: pip install"),
    "no CUDA in jaxlib": ("0.4.1", "3.9.0", False, "it needs JAX's plugin for CUDA, in jaxlib's version: pip install \"jax["),
    "no Triton": ("0.4.1", None, True, 'it needs triton: pip install "jax-triton>='),
    "nothing": (None, None, True, 'it needs jax-triton and triton: pip install "jax-triton>='),
}


@pytest.mark.parametrize("kind", INSTALLED)
def test_what_is_installed_in_part_is_refused_with_a_remedy(monkeypatch, kind):
    jax_triton, triton, has_plugin, reason = INSTALLED[kind]
    versions = {"jax-triton": jax_triton, "triton": triton, "jax": "0.11.2"}
    monkeypatch.setattr(call, "_is_there", lambda module: versions[module.replace("_", "-")] is not None)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda package: ["absl-py>=1.4.0", "triton>=3.7", "pytest; extra == 'tests'"]
    )
    plugin = types.SimpleNamespace(TritonKernel=None) if has_plugin else types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "jaxlib.gpu_triton", plugin)
    monkeypatch.setattr(call, "missing", call.missing.__wrapped__)  # whose answer is kept
    forced = functools.partial(jaxsoftmax.softmax, implementation="triton")
    if reason is None:
        assert call.unsupported(target_of((8, 0))) is None
    else:
        (decision,) = explain(jaxsoftmax.softmax, X, gpu="a100")
        assert dict(decision.refusals)["triton"].startswith(reason)
        with pytest.raises(NotImplementedError, match=re.escape(f"softmax: implementation='triton' cannot run: {reason}")):
            explain(forced, X, gpu="a100")


def test_a_folder_that_an_uninstalled_package_left_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "left_behind" / "backends").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not call._is_there("left_behind")
    assert call._is_there("jaxsoftmax")


OF_COMPLEX = jax.ShapeDtypeStruct((3, 4), jnp.complex64)
NO_ROWS = jax.ShapeDtypeStruct((0, 4), jnp.float32)
REFUSALS = {
    "an old GPU": ((7, 5), jaxsoftmax.softmax, X, r"compute capability among 8.x, 9.x, 10.x, 12.x, got cuda \(7, 5\)"),
    "dtype": (
        (8, 0),
        jaxsoftmax.softmax,
        jax.ShapeDtypeStruct((3, 4), jnp.complex64),
        "dtypes must be among .*, got complex64",
    ),
    "result": ((8, 0), lambda x: jaxsoftmax.softmax(x, dtype="float8_e5m2"), X, "dtypes must be among .*, got float8_e5m2"),
    "axes": (
        (8, 0),
        lambda x: jaxsoftmax.softmax(x, (0, 2)),
        jax.ShapeDtypeStruct((3, 4, 5), jnp.float32),
        r"the axes must be neighbours, got axes \(0, 2\) of shape \(3, 4, 5\)",
    ),
    "no rows": ((8, 0), jaxsoftmax.softmax, NO_ROWS, "there must be from 1 to 2147418111 rows, got 0"),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_it_says_why_it_does_not_run(on, kind):
    capability, f, x, words = REFUSALS[kind]
    on(capability)
    (decision,) = explain(f, x, platform="cuda")
    assert decision.implementation == "xla"
    assert re.search(words, dict(decision.refusals)["triton"])


def test_a_scale_of_each_row_is_served_and_no_other(monkeypatch):
    monkeypatch.setattr(call, "unsupported", lambda target: None)
    for shape, reason in (
        ((4, 1), None),
        ((1, 1), None),
        ((1, 8), "scale must be one number for each row, got shape (1, 8) for axes (1,)"),
    ):
        given = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32), "scale": jax.ShapeDtypeStruct(shape, jnp.float32)}
        assert ours.unsupported("softmax", targets.HOPPER, given, axes=(1,), dtype=jnp.float32) == reason


def test_nothing_of_triton_is_imported_unless_a_kernel_is_lowered():
    code = """
import sys
import jax, jaxsoftmax
from jaxsoftmax._core.target import Target, lowering_for
x = jax.ShapeDtypeStruct((64, 1000), "float32")
jaxsoftmax.explain(jaxsoftmax.softmax, x, platform="cuda")
jaxsoftmax.explain(jaxsoftmax.softmax, x, platform="cpu")
with lowering_for(Target("cuda", (7, 5))):
    jaxsoftmax.explain(jaxsoftmax.softmax, x, platform="cuda")
assert not {"triton", "jax_triton"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})


# How rows are spread over programs.


@pytest.mark.parametrize(
    "primitive", ["softmax", "softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp", "logsumexp", "logsumexp_vjp"]
)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inner", [1, 3, 16, 33, 4096])
def test_configurations_fit(primitive, itemsize, inner):
    lengths = (1, 2, 3, 127, 1024, 1025, 4097, 16384, 16385, 50257, 131072, 262144, 2**24 + 1, 2**30 - 1)
    for cols, masked in itertools.product(lengths, (False, True)):
        config = ours.config_for(primitive, cols, inner, itemsize, masked)
        assert config.rows & (config.rows - 1) == config.cols & (config.cols - 1) == 0
        most = 64 if ours._REDUCES.get(primitive) != "sum" and itemsize == 2 else 32  # a thread's
        assert config.rows * config.cols // (32 * config.warps) <= most, (cols, config)
        assert config.slice % config.cols == 0
        if config.cols < cols:
            assert -(-cols // config.slice) <= (512 if inner == 1 else 64), (cols, config)
        else:
            assert config.slice >= cols


@pytest.mark.parametrize(
    ("shape", "whole", "axes", "expected"),
    [
        ((4, 5), (4, 5), (1,), [(1, 0, 5), (1, 0, 1), ()]),
        ((1, 5), (4, 5), (1,), [(), (1, 0, 1), ()]),
        ((4, 1), (4, 5), (1,), [(1, 0, 1), (), ()]),
        ((2, 1, 4, 5), (2, 3, 4, 5), (3,), [(1, 4, 5, 12, 0, 20), (1, 0, 1), ()]),
        ((1, 3, 4, 5), (2, 3, 4, 5), (3,), [(1, 12, 5), (1, 0, 1), ()]),
        ((2, 3, 1, 5), (2, 3, 4, 5), (1, 2), [(1, 0, 15), (4, 0, 5), (1, 0, 1)]),
        ((1, 1), (1, 1), (), [(), (), ()]),
    ],
)
def test_how_a_mask_is_indexed(shape, whole, axes, expected):
    assert RowProblem(whole, axes).indexed(shape) == tuple(expected)


# What compiles, for GPUs that need not be there.


PRIMITIVES = (*cases.OPS, "softmax_jacobian", "log_softmax_jvp", "log_softmax_vjp", "logsumexp_jvp", "logsumexp_vjp")
SHAPES = [(64, 1), (64, 127), (64, 4096), *LARGE_TILES, (8, 4096, 64), (8, 100, 5)]


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("primitive", PRIMITIVES)
def test_every_configuration_compiles_and_fits(monkeypatch, primitive, masked, dtype, capability):
    target = target_of(capability)
    for shape in SHAPES:
        found = triton_kernels.compiled(functools.partial(call_of, primitive, shape, 1, dtype, masked, target), monkeypatch)
        assert found
        for kernel in found:
            assert kernel.name in (f"{primitive}_triton", f"{primitive}_states_triton")
            assert kernel.spilled <= (SPILLED_OF_LARGE_TILES if shape in LARGE_TILES else SPILLED), (kernel, shape)
            assert kernel.shared <= target.shared_memory, (kernel, shape)


def call_of(primitive, shape, axis, dtype, masked, target):
    """A primitive of zeros, with a mask and a scale or neither."""
    x, row = jnp.zeros(shape, dtype), jnp.zeros((*shape[:axis], 1, *shape[axis + 1 :]), jnp.float32)
    params = {"axes": (axis,), "dtype": jnp.dtype(dtype), "target": target}
    given = {"where": jnp.zeros(shape, bool) if masked else None, "scale": jnp.ones((1,) * len(shape)) if masked else None}
    if primitive == "softmax_jacobian":
        return ours.softmax_jacobian(x, x, given["scale"], **params)
    if primitive == "softmax":
        return ours.softmax(x, **given, **params)
    if primitive in cases.OPS:
        return getattr(ours, primitive)(x, **given, return_state=True, **params)
    t = row.astype(dtype) if primitive == "logsumexp_vjp" else x
    return getattr(ours, primitive)(x, row, row, t, **given, scale_tangent=masked, **params)


@needs_triton
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda"), ("cuda", "cpu")], ids=str)
def test_a_program_for_a_gpu_that_is_not_there_holds_the_kernels(monkeypatch, platforms):
    monkeypatch.delattr(ours, "unprofitable")  # one that is forced does not lower for the CPU
    f = jax.jit(lambda x, c: jax.vjp(jaxsoftmax.softmax, x)[1](c))
    with kernels.target(target_of((8, 0))), kernels.anew():
        module = jax.export.export(f, platforms=platforms, disabled_checks=triton_kernels.UNCHECKED)(X, X).mlir_module()
    assert module.count("stablehlo.custom_call @triton_kernel_call") == 2


# What the kernels compute.


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    triton_kernels.assert_passes_interpreted(Path(__file__).with_name("triton_interpreted.py"))
