"""Triton's kernels of the softmax family: which calls they are chosen for, for which GPUs they compile, what they compute.

What the kernels compute is tested in `triton_interpreted.py`, which needs a process of its own.
"""

import dataclasses
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
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.row_problem import RowProblem
from jaxsoftmax._triton import availability, row_launch
from jaxsoftmax.ops.softmax import primitive as primitives
from jaxsoftmax.ops.softmax import profit
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
    monkeypatch.setattr(availability, "_is_installed", lambda module: versions[module.replace("_", "-")] is not None)
    monkeypatch.setattr(importlib.metadata, "version", versions.__getitem__)
    monkeypatch.setattr(
        importlib.metadata, "requires", lambda package: ["absl-py>=1.4.0", "triton>=3.7", "pytest; extra == 'tests'"]
    )
    plugin = types.SimpleNamespace(TritonKernel=None) if has_plugin else types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "jaxlib.gpu_triton", plugin)
    monkeypatch.setattr(availability, "missing", availability.missing.__wrapped__)  # its answer is kept
    forced = functools.partial(jaxsoftmax.softmax, implementation="triton")
    if reason is None:
        assert availability.missing() is None
    else:
        (decision,) = explain(jaxsoftmax.softmax, X, gpu="a100")
        assert dict(decision.refusals)["triton"].startswith(reason)
        with pytest.raises(NotImplementedError, match=re.escape(f"softmax: implementation='triton' cannot run: {reason}")):
            explain(forced, X, gpu="a100")


def test_a_folder_that_an_uninstalled_package_left_is_no_package(monkeypatch, tmp_path):
    (tmp_path / "left_behind" / "backends").mkdir(parents=True)
    monkeypatch.syspath_prepend(tmp_path)
    assert not availability._is_installed("left_behind")
    assert availability._is_installed("jaxsoftmax")


OF_COMPLEX = jax.ShapeDtypeStruct((3, 4), jnp.complex64)
NO_ROWS = jax.ShapeDtypeStruct((0, 4), jnp.float32)
REFUSALS = {
    "an old GPU": ((7, 5), jaxsoftmax.softmax, X, r"compute capability 8.x or 9.x or 10.x or 12.x, got cuda \(7, 5\)"),
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
    monkeypatch.setattr(availability, "missing", lambda: None)
    for shape, reason in (
        ((4, 1), None),
        ((1, 1), None),
        ((1, 8), "scale must be one number for each row, got shape (1, 8) for axes (1,)"),
    ):
        operands = {"x": jax.ShapeDtypeStruct((4, 8), jnp.float32), "scale": jax.ShapeDtypeStruct(shape, jnp.float32)}
        plan = ours.plan(problem_of("softmax", operands, axes=(1,), dtype=jnp.float32), target_of((8, 0)))
        assert (plan.reason if isinstance(plan, Refusal) else None) == reason


@pytest.mark.parametrize("name", cases.OPS)
def test_a_call_with_a_scale_of_each_row_runs_on_it(on, name):
    on((8, 0))
    x, scale = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((8, 512, 64), (8, 1)))

    def f(x, scale):
        return getattr(jaxsoftmax, name)(x, axis=1, scale=scale)

    both = explain(lambda x, scale, c: jax.vjp(f, x, scale)[1](c), x, scale, jax.eval_shape(f, x, scale), platform="cuda")
    cases.assert_all_run_on("triton", both)


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


OPERATIONS = triton_kernels.operations(primitives)


def problem_of(name, operands, **params):
    return triton_kernels.problem_of(OPERATIONS[name], operands, **params)


# Plans for rows of a shape along an axis: the tile, warps, slices of a row, and programs in all.
PLANS = {
    ("softmax", (64, 127), 1, "float32"): ((8, 128, 1), 1, 8),
    ("softmax", (64, 127), 1, "bfloat16"): ((16, 128, 1), 1, 4),
    ("softmax", (64, 1024), 1, "float32"): ((2, 1024, 4), 1, 32),
    ("softmax", (64, 32768), 1, "float32"): ((1, 32768, 32), 1, 64),
    ("softmax", (64, 32768), 1, "bfloat16"): ((1, 16384, 16), 1, 64),
    ("softmax", (4, 50257), 1, "float32"): ((1, 8192, 8), 7, 28),
    ("logsumexp", (4, 50257), 1, "float32"): ((1, 4096, 4), 4, 16),
    ("softmax", (8, 4096, 64), 1, "float32"): ((32, 256, 8), 16, 256),
    ("softmax", (8, 100, 5), 1, "float32"): ((16, 128, 4), 1, 3),
}


@pytest.mark.parametrize("case", PLANS, ids=cases.ident)
def test_plans_spread_rows_as_the_table_says(on, case):
    name, shape, axis, dtype = case
    on((8, 0))
    params = {"axes": (axis,), "dtype": jnp.dtype(dtype)} | ({"return_state": False} if name == "logsumexp" else {})
    operands = {"x": jax.ShapeDtypeStruct(shape, dtype)}
    plan = triton_kernels.forced(ours, OPERATIONS[name], operands, target_of((8, 0)), **params)
    launch, tiling = plan.launch, plan.launch.tiling
    programs = launch.blocks * launch.n_slices
    assert ((tiling.rows, tiling.cols, tiling.warps), launch.n_slices, programs) == PLANS[case]
    assert plan.describe()
    assert plan.runs_twice == (launch.n_slices > 1)


def test_a_plan_says_in_words_how_it_runs(on):
    on((8, 0))
    for shape, words in (
        ((64, 127), "tiles of 8 x 128, 1 warp"),
        ((64, 40000), "1 row in tiles of 8192 columns, 8 warps, 5 programs a row, two runs"),
        ((64, 32769), "1 row in tiles of 8192 columns, 8 warps, 5 programs a row, two runs"),
    ):
        (decision,) = explain(jaxsoftmax.softmax, jax.ShapeDtypeStruct(shape, "float32"), platform="cuda")
        assert decision.plan == words
    (decision,) = explain(jaxsoftmax.softmax, jax.ShapeDtypeStruct((64, 20000), "bfloat16"), platform="cuda")
    assert decision.plan == "1 row in tiles of 16384 columns, 16 warps, which are read twice"


def test_on_hopper_the_refusal_has_a_plan(on):
    on((9, 0))
    problem = problem_of("softmax", {"x": X}, axes=(1,), dtype=jnp.float32)
    refusal = ours.plan(problem, targets.HOPPER)
    assert isinstance(refusal, Refusal)
    assert not refusal.lacks_kernel
    assert refusal.plan == dataclasses.replace(ours.plan(problem, target_of((8, 0))), target=targets.HOPPER)


def test_a_kernel_that_would_merge_over_devices_is_refused(on):
    on((8, 0))
    problem = problem_of("softmax", {"x": X}, axes=(1,), dtype=jnp.float32)
    refusal = ours.plan(dataclasses.replace(problem, devices=(("x", 4),)), target_of((8, 0)))
    assert refusal == Refusal("it does not merge over devices")


@pytest.mark.parametrize("formula", ours._FORMULAS.values(), ids=lambda formula: formula.name)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("inner", [1, 3, 16, 33, 4096])
def test_tilings_fit(formula, itemsize, inner):
    lengths = (1, 2, 3, 127, 1024, 1025, 4097, 16384, 16385, 50257, 131072, 262144, 2**24 + 1, 2**30 - 1)
    for cols, masked in itertools.product(lengths, (False, True)):
        tiling = row_launch.tiling_for(formula, cols, inner, itemsize, masked)
        assert tiling.rows & (tiling.rows - 1) == tiling.cols & (tiling.cols - 1) == 0
        most = 64 if formula.reduces != "sum" and itemsize == 2 else 32  # a thread's
        assert tiling.rows * tiling.cols // (32 * tiling.warps) <= most, (cols, tiling)
        assert tiling.slice % tiling.cols == 0
        if tiling.cols < cols:
            assert -(-cols // tiling.slice) <= (512 if inner == 1 else 64), (cols, tiling)
        else:
            assert tiling.slice >= cols


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
    """Runs a primitive of zeros, with a mask and a scale or neither."""
    x, row = jnp.zeros(shape, dtype), jnp.zeros((*shape[:axis], 1, *shape[axis + 1 :]), jnp.float32)
    arrays = {"x": x, "y": x, "t": row.astype(dtype) if primitive == "logsumexp_vjp" else x, "m": row, "d": row}
    arrays |= {"where": jnp.zeros(shape, bool), "scale": jnp.ones((1,) * len(shape))} if masked else {}
    operands = {name: arrays[name] for name in OPERATIONS[primitive].by_name if name in arrays}
    params = {"axes": (axis,), "dtype": jnp.dtype(dtype)}
    if primitive in ("log_softmax", "logsumexp"):
        params["return_state"] = True
    elif primitive not in ("softmax", "softmax_jacobian"):
        params["scale_tangent"] = masked
    return triton_kernels.forced(ours, OPERATIONS[primitive], operands, target, **params).run(**operands)


@needs_triton
@pytest.mark.parametrize("platforms", [("cuda",), ("cpu", "cuda"), ("cuda", "cpu")], ids=str)
def test_a_program_for_a_gpu_that_is_not_there_holds_the_kernels(monkeypatch, platforms):
    for name in ("slower_shape", "slower_if_fused", "slower_if_cast"):  # a forced one does not lower for the CPU
        monkeypatch.setattr(profit, name, lambda *args, **options: None)
    f = jax.jit(lambda x, c: jax.vjp(jaxsoftmax.softmax, x)[1](c))
    with kernels.target(target_of((8, 0))), kernels.anew():
        module = jax.export.export(f, platforms=platforms, disabled_checks=triton_kernels.UNCHECKED)(X, X).mlir_module()
    assert module.count("stablehlo.custom_call @triton_kernel_call") == 2


# What the kernels compute.


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    triton_kernels.assert_passes_interpreted(Path(__file__).with_name("triton_interpreted.py"))
