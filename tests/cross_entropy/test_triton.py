"""Triton's kernel for cross-entropy: which calls it is chosen for, for which GPUs it compiles, what it computes.

What it computes is tested in `triton_interpreted.py`, which needs a process of its own.
"""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax.ops.cross_entropy import primitive as primitives
from jaxsoftmax.ops.cross_entropy import triton as ours

from ..support import cases
from ..support.cross_entropy.cases import OPTIONS, together
from ..support.triton_kernels import (
    CAPABILITIES,
    LARGE_TILES,
    SPILLED,
    SPILLED_OF_LARGE_TILES,
    assert_passes_interpreted,
    compiled,
    forced,
    lowering_without,
    needs_triton,
    operations,
    target_of,
)

X, LABELS, C = (jax.ShapeDtypeStruct(*kind) for kind in (((64, 1000), "float32"), ((64,), "int32"), ((64,), "float32")))


@pytest.fixture
def on():
    with lowering_without() as lower_for:
        yield lower_for


def loss(x, labels, **options):
    return jnp.sum(jaxsoftmax.cross_entropy(x, labels, **options))


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
def test_it_runs_where_it_is_forced(on, capability, options):
    on(capability)
    f = functools.partial(loss, implementation="triton", **OPTIONS[options])
    cases.assert_all_run_on("triton", explain(jax.value_and_grad(f), X, LABELS, platform="cuda"))
    cases.assert_all_run_on("triton", explain(together("triton", **OPTIONS[options]), X, LABELS, C, platform="cuda"))


def test_a_linear_layer_runs_on_it_part_by_part(on):
    on((8, 0))
    hidden, weight = jax.ShapeDtypeStruct((64, 32), jnp.bfloat16), jax.ShapeDtypeStruct((1000, 32), jnp.bfloat16)
    f = functools.partial(jaxsoftmax.linear_cross_entropy, class_axis=0, implementation="triton")
    gradient = explain(jax.grad(f, (0, 1)), hidden, weight, LABELS, platform="cuda")
    ran = [(decision.primitive, decision.implementation) for decision in gradient]
    assert ran == [("linear_cross_entropy_gradient", "xla"), ("cross_entropy_gradient", "triton")]
    losses = explain(f, hidden, weight, LABELS, platform="cuda")
    cases.assert_all_run_on("triton", losses, without=["linear_log_probs"])
    assert "cross_entropy" in [decision.primitive for decision in losses]


def test_tangents_run_on_the_reference(on):
    on((8, 0))
    f = functools.partial(loss, implementation="triton")
    explanation = explain(lambda x, t, labels: jax.jvp(lambda x: f(x, labels), (x,), (t,)), X, X, LABELS, platform="cuda")
    cases.assert_all_run_on("triton", explanation, without=["cross_entropy_jvp"])


def test_plans_say_what_is_computed_of_rows(on):
    on((8, 0))
    every, target = operations(primitives), target_of((8, 0))
    row = jax.ShapeDtypeStruct((64, 1), "float32")
    saved = dict.fromkeys("mdab", row) | {"x": X, "labels": jax.ShapeDtypeStruct((64, 1), "int32")}
    params = {"axes": (1,), "dtype": jnp.dtype("float32"), "soft_cap": 5.0}
    plan = forced(ours, every["cross_entropy"], saved, target, return_total=True, return_state=False, **params)
    assert (plan.row_plan.launch.formula.result, plan.row_plan.launch.formula.has_total) == ("m, d", True)
    assert [result.shape for result in plan.row_plan.results] == [(64, 1)] * 3
    for replaces, dtype in ((False, "float32"), (True, "float32"), (True, "bfloat16")):
        options = params | {"dtype": jnp.dtype(dtype), "replaces": replaces}
        plan = forced(ours, every["cross_entropy_vjp"], saved, target, **options)
        assert plan.row_plan.replaces == (replaces and dtype == "float32")
        assert not plan.row_plan.runs_twice
    plan = forced(ours, every["cross_entropy_gradient"], saved | {"t": row}, target, label_smoothing=0.0, z_loss=0.5, **params)
    formula = plan.row_plan.launch.formula
    assert (formula.reduces, formula.z_loss, formula.has_total, plan.row_plan.replaces) == ("state", 0.5, False, True)
    assert plan.describe() == plan.row_plan.describe() == "tiles of 2 x 1024, 4 warps"


def test_it_is_chosen_where_it_is_compiled_for(on):
    on((8, 0))
    (decision,) = explain(loss, X, LABELS, platform="cuda")
    assert decision.implementation == "triton"
    assert "but run on 9.0 only" in decision.remark


@needs_triton
@pytest.mark.parametrize("capability", CAPABILITIES, ids=str)
@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("has_all", [False, True])
@pytest.mark.parametrize("primitive", ["cross_entropy", "cross_entropy_vjp", "cross_entropy_gradient"])
def test_every_configuration_compiles_and_fits(monkeypatch, primitive, has_all, dtype, capability):
    target = target_of(capability)
    for shape in [(64, 127), (64, 16384), *LARGE_TILES, (8, 4096, 64), (8, 100, 5)]:
        call = functools.partial(call_of, primitive, shape, dtype, has_all, target)
        found = compiled(call, monkeypatch)
        assert {kernel.name.removesuffix("_triton").removesuffix("_states") for kernel in found} == {primitive}
        for kernel in found:
            assert kernel.spilled <= (SPILLED_OF_LARGE_TILES if shape in LARGE_TILES else SPILLED), (kernel, shape)
            assert kernel.shared <= target.shared_memory, (kernel, shape)


def call_of(primitive, shape, dtype, has_all, target):
    """Runs a primitive of zeros along axis 1, with all options or with none."""
    row = (shape[0], 1, *shape[2:])
    number = jnp.zeros(row, jnp.float32)
    arrays = {"x": jnp.zeros(shape, dtype), "labels": jnp.zeros(row, jnp.int32), **dict.fromkeys("mdabt", number)}
    arrays |= {"where": jnp.zeros(shape, bool), "c": number} if has_all else {}
    operation = operations(primitives)[primitive]
    operands = {name: arrays[name] for name in operation.by_name if name in arrays}
    options = {
        "cross_entropy": {"return_total": has_all, "return_state": True},
        "cross_entropy_vjp": {},
        "cross_entropy_gradient": {"label_smoothing": 0.1 if has_all else 0.0, "z_loss": 1e-4 if has_all else 0.0},
    }
    params = {"axes": (1,), "dtype": jnp.dtype("float32"), "soft_cap": 5.0 if has_all else None, **options[primitive]}
    return forced(ours, operation, operands, target, **params).run(**operands)


@needs_triton
def test_the_kernel_in_tritons_interpreter():
    assert_passes_interpreted(Path(__file__).with_name("triton_interpreted.py"))
