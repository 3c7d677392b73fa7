"""Triton's kernels under the transformations of JAX, on meshes and in exports: every op keeps them, and has no more.

What the kernels compute there is tested in `triton_interpreted.py`, which needs a process of its own.
"""

import functools
import re
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._triton import custom_call

from ..support import cases, kernels, triton_kernels, xla_cuda
from ..support.triton_kernels import needs_triton, target_of
from ..support.triton_ops import (
    AXES,
    OPS,
    SIZES,
    WAYS,
    Op,
    forward,
    mapped,
    primitives,
    shaped,
    specs_of_results,
    stacked,
    with_gradient,
)

# Those of the softmax family share their rules and their kernel.
EVERY_OP = pytest.mark.parametrize(
    "name", cases.quick("softmax", "cross_entropy", "attention", slow=("log_softmax", "logsumexp"))
)


FUNCTIONS = {"forward": forward, "with gradient": with_gradient}
EVERY_FUNCTION = pytest.mark.parametrize("function", cases.quick("with gradient", slow=["forward"]))


def count(op, function):
    return 1 if function == "forward" else op.kernels


@pytest.fixture
def on_ampere():
    """Lowers for a GPU of compute capability 8.0, which need not be there."""
    with kernels.target(target_of((8, 0))):
        yield


def lowered(f, *operands):
    return jax.jit(f).trace(*operands).lower(lowering_platforms=("cuda",)).as_text()


CALL = re.compile(r"custom_call @triton_kernel_call.* : \(tensor<(\w+)>")  # and the type of its first operand


def assert_runs(op, function, f, *operands):
    """The program for CUDA of `f`; fails unless Triton runs all of it, with as many kernels as the op has by itself."""
    explanation = explain(f, *operands, platform="cuda")
    cases.assert_all_run_on("triton", explanation)
    assert [decision.primitive for decision in explanation] == primitives(op, function)
    text = lowered(f, *operands)
    assert len(CALL.findall(text)) == text.count("@triton_kernel_call") == count(op, function)
    return text


# vmap.


@needs_triton
@EVERY_FUNCTION
@pytest.mark.parametrize("way", WAYS)
@EVERY_OP
def test_a_vmap_is_more_rows_of_the_same_kernels(on_ampere, name, way, function):
    op = OPS[name]
    levels, f = WAYS[way](op), FUNCTIONS[function](op)
    assert "while" not in assert_runs(op, function, mapped(f, levels), *stacked(op.operands, levels))


@EVERY_FUNCTION
@pytest.mark.parametrize("name", cases.OPS)
def test_a_vmap_parts_no_axes_of_the_softmax(name, function):
    """Kernels want them side by side, so what is mapped over is moved in front of them, where it stood between."""
    op = Op(lambda x, **options: getattr(jaxsoftmax, name)(x, axis=(1, 2), **options), (shaped(2, 8, 12),), 1, (), ())
    with triton_kernels.lowering_without() as on:
        on((8, 0))
        f = jax.vmap(FUNCTIONS[function](op), in_axes=2)
        explanation = explain(f, shaped(2, 8, 3, 12), platform="cuda")
    cases.assert_all_run_on("triton", explanation)
    assert {decision.operands[0] for decision in explanation} == {"float32[2,3,8,12]"}


# Other transformations.


def scanned(f):
    def scan(first, *others):
        return jax.lax.scan(lambda carry, _: (0.5 * carry, f(carry, *others)), first, None, length=3)[1]

    return scan


def nested(transform):
    """The gradient of a sum of a transformed function, in what moves."""

    def gradient(op):
        f = transform(forward(op))

        def total(*operands):
            return jnp.sum(jnp.sin(f(*operands).astype(jnp.float32)))

        return jax.grad(total, tuple(range(op.moving)))

    return gradient


# How many kernels there are beside those of a gradient: a checkpoint computes its value twice.
TRANSFORMED = {
    "grad": (nested(lambda f: f), 0),
    "grad of jit": (nested(jax.jit), 0),
    "grad of scan": (nested(scanned), 0),
    "grad of checkpoint": (nested(jax.checkpoint), 1),
    "scan of grad": (lambda op: scanned(nested(lambda f: f)(op)), 0),
}


@needs_triton
@pytest.mark.parametrize("transformed", TRANSFORMED)
@EVERY_OP
def test_transformations_keep_the_kernels(on_ampere, name, transformed):
    op, (transform, more) = OPS[name], TRANSFORMED[transformed]
    f = transform(op)
    explanation = explain(f, *op.operands, platform="cuda")
    cases.assert_all_run_on("triton", explanation)
    assert {decision.primitive for decision in explanation} == set(op.primitives)
    assert len(CALL.findall(lowered(f, *op.operands))) == op.kernels + more


# Meshes, of two axes for batches and heads.

SHARD = dict.fromkeys(OPS, (4, 12)) | {"attention": (1, 20, 1, 8)}  # the shape of the first operand's
REDUCED = {"attention": {"all-reduce"}}  # the derivative of a bias that all of the batch shares, and nothing else


def placed(op, mesh):
    """The types of operands, sharded."""
    return [
        shaped(*a.shape, dtype=a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(op.operands, op.specs, strict=False)
    ]


def assert_of_shards(text, name):
    found = CALL.findall(text)
    assert set(found) == {"x".join(map(str, SHARD[name])) + "xf32"}, found


@needs_triton
@EVERY_FUNCTION
@EVERY_OP
def test_explicit_axes_lower_to_kernels_for_shards(on_ampere, name, function):
    op = OPS[name]
    mesh = AbstractMesh(SIZES, AXES, axis_types=(AxisType.Explicit,) * 2)
    with jax.sharding.use_abstract_mesh(mesh):
        f, operands = FUNCTIONS[function](op), placed(op, mesh)
        text = assert_runs(op, function, f, *operands)
        for decision in explain(f, *operands, platform="cuda"):
            assert decision.operands[0] == f"float32[{','.join(map(str, SHARD[name]))}]"
    assert_of_shards(text, name)
    assert not re.search("all_gather|all_to_all|collective_permute|reduce_scatter", text)
    assert ("all_reduce" in text) == (function != "forward" and name in REDUCED)


@needs_triton
@EVERY_FUNCTION
@EVERY_OP
def test_a_shard_map_holds_kernels_for_shards(on_ampere, name, function):
    op = OPS[name]
    mesh = AbstractMesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2)
    f = jax.shard_map(FUNCTIONS[function](op), mesh=mesh, in_specs=op.specs[:-1], out_specs=specs_of_results(op, function))
    with jax.sharding.use_abstract_mesh(mesh):
        assert_of_shards(assert_runs(op, function, f, *placed(op, mesh)), name)


COLLECTIVE = re.compile(r" (all-(?:gather|reduce|to-all)|collective-[a-z]+|reduce-scatter)(?:-start|-done)?\(")


@EVERY_FUNCTION
@EVERY_OP
def test_automatic_axes_run_kernels_on_shards_and_gather_nothing(name, function):
    """As XLA cuts operands for devices of the CPU, with something else in place of the kernels."""
    op, shapes = OPS[name], []

    def sums(kernel, operands, results, **options):
        """Results that need all operands."""
        shapes.append(operands[0].shape)
        total = functools.reduce(jnp.add, [jnp.sum(operand.astype(jnp.float32)) for operand in operands])
        return [jnp.full(result.shape, total, result.dtype) for result in results]

    mesh = jax.make_mesh(SIZES, AXES, axis_types=(AxisType.Auto,) * 2, devices=jax.devices("cpu")[:4])
    with (
        triton_kernels.lowering_without(interpreted=True) as on,
        mock.patch.object(custom_call, "launch", sums),
        jax.set_mesh(mesh),
    ):
        on((8, 0))
        lowering = jax.jit(FUNCTIONS[function](op)).lower(*placed(op, mesh))
        shapes.clear()  # as JAX traces it once for whole operands
        text = lowering.compile().as_text()
    assert shapes == [SHARD[name]] * count(op, function)
    assert set(COLLECTIVE.findall(text)) == (REDUCED.get(name, set()) if function != "forward" else set())


@needs_triton
@EVERY_OP
def test_automatic_axes_compile_to_kernels_for_shards(on_ampere, name):
    """For GPUs that are there only for XLA's compiler."""
    xla_cuda.skip_unless_it_compiles_for_absent_gpus()
    op = OPS[name]
    text = jax.jit(with_gradient(op)).lower(*placed(op, xla_cuda.mesh(SIZES, AXES))).compile().as_text()
    calls = re.findall(r'custom_call_target="triton_kernel_call.*?operand_layout_constraints=\{f32\[([\d,]+)\]', text)
    assert calls == [",".join(map(str, SHARD[name]))] * op.kernels
    assert set(COLLECTIVE.findall(text)) == REDUCED.get(name, set())


# Exports.


export = functools.partial(jax.export.export, platforms=("cuda",), disabled_checks=triton_kernels.UNCHECKED)


@needs_triton
@EVERY_FUNCTION
@pytest.mark.parametrize(
    "capability", [(8, 0), (12, 0), *[pytest.param(c, marks=pytest.mark.slow) for c in ((8, 6), (8, 9), (10, 0))]], ids=str
)
@EVERY_OP
def test_an_export_holds_the_kernels(monkeypatch, name, capability, function):
    import jax_triton

    op, capabilities, triton_call = OPS[name], [], jax_triton.triton_call

    def noted(*operands, **options):
        capabilities.append(options["compute_capability"])
        return triton_call(*operands, **options)

    monkeypatch.setattr(jax_triton, "triton_call", functools.wraps(triton_call)(noted))
    with kernels.target(target_of(capability)):
        exported = export(jax.jit(FUNCTIONS[function](op)))(*op.operands)
    assert capabilities == [10 * capability[0] + capability[1]] * count(op, function)
    assert_holds(exported, op.operands, count(op, function))


@needs_triton
@EVERY_OP
def test_an_export_read_from_bytes_holds_the_kernels_and_those_of_its_derivatives(on_ampere, name):
    pytest.importorskip("flatbuffers", reason="JAX serializes exports with flatbuffers")
    op = OPS[name]
    written = export(jax.jit(forward(op)))(*op.operands).serialize(vjp_order=1)
    restored = jax.export.deserialize(written)
    assert_holds(restored, op.operands, 1)
    assert_holds(restored.vjp(), [*restored.in_avals, *restored.out_avals], op.kernels)


def assert_holds(exported, operands, count):
    """Fails unless there are so many kernels in an export, and in a program that calls it."""
    for text in (exported.mlir_module(), lowered(exported.call, *operands)):
        assert text.count("custom_call @triton_kernel_call") == count


# What the kernels compute.


@needs_triton
def test_the_kernels_in_tritons_interpreter():
    triton_kernels.assert_passes_interpreted(Path(__file__).with_name("triton_interpreted.py"))
