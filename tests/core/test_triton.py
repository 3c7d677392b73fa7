"""Triton's kernels under the transformations of JAX, on meshes and in exports: every op keeps them, and has no more.

What the kernels compute there is tested in `triton_interpreted.py`, which needs a process of its own.
"""

import functools
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax import explain
from jaxsoftmax._core import lowering
from jaxsoftmax._triton import call

from .. import cases, kernels, triton_kernels
from ..triton_kernels import needs_triton, target_of
from . import xla_cuda


@dataclass(frozen=True)
class Op:
    """A function of arrays, of which the first `moving` are differentiated, forced on an implementation by name.

    Attributes:
      f: the function.
      operands: the types of its operands.
      moving: of how many there are derivatives.
      specs: how operands are sharded over the mesh axes "data" and "model", and then the result.
      primitives: those of the value, and of its derivatives.
      kernels: how many there are in the value and its derivatives together.
    """

    f: Callable[..., Any]
    operands: tuple[jax.ShapeDtypeStruct, ...]
    moving: int
    specs: tuple[P, ...]
    primitives: tuple[str, str]
    kernels: int = 2


def shaped(*shape, dtype="float32", sharding=None):
    return jax.ShapeDtypeStruct(shape, jnp.dtype(dtype), sharding=sharding)


def masked(name):
    return lambda x, where, **options: getattr(jaxsoftmax, name)(x, axis=-1, where=where, **options)


def attend(query, key, value, bias, mask, **options):
    return jaxsoftmax.dot_product_attention(query, key, value, bias, mask, precision="high", **options)


ROWS, HEADS = P("data"), P("data", None, "model")
X, HEAD = shaped(8, 12), shaped(2, 20, 2, 8)
OPS = {
    "softmax": Op(
        lambda x, where, scale, **options: jaxsoftmax.softmax(x, where=where, scale=scale, **options),
        (X, shaped(8, 12, dtype=bool), shaped()),
        1,
        (ROWS, ROWS, P(), ROWS),
        ("softmax", "softmax_jacobian"),
    ),
    "log_softmax": Op(
        masked("log_softmax"),
        (X, shaped(12, dtype=bool)),
        1,
        (ROWS, P(), ROWS),
        ("log_softmax", "log_softmax_vjp"),
    ),
    "logsumexp": Op(
        masked("logsumexp"),
        (X, shaped(12, dtype=bool)),
        1,
        (ROWS, P(), ROWS),
        ("logsumexp", "logsumexp_vjp"),
    ),
    "cross_entropy": Op(
        functools.partial(jaxsoftmax.cross_entropy, label_smoothing=0.1),
        (X, shaped(8, dtype="int32")),
        1,
        (ROWS, ROWS, ROWS),
        ("cross_entropy", "cross_entropy_vjp"),
    ),
    "attention": Op(
        attend,
        (HEAD, HEAD, HEAD, shaped(1, 2, 20, 20), shaped(2, 1, 1, 20, dtype=bool)),
        4,
        (HEADS, HEADS, HEADS, P(None, "model"), ROWS, HEADS),
        ("dot_product_attention", "dot_product_attention_vjp"),
        3,
    ),
}
# Those of the softmax family share their rules and their kernel.
EVERY_OP = pytest.mark.parametrize(
    "name", cases.quick("softmax", "cross_entropy", "attention", slow=("log_softmax", "logsumexp"))
)


def forward(op, implementation="triton"):
    return functools.partial(op.f, implementation=implementation)


def with_gradient(op, implementation="triton"):
    """The value and its derivatives."""

    def both(*operands):
        moving, fixed = operands[: op.moving], operands[op.moving :]
        value, vjp = jax.vjp(lambda *moving: forward(op, implementation)(*moving, *fixed), *moving)
        return value, vjp(jnp.cos(value))

    return both


FUNCTIONS = {"forward": forward, "with gradient": with_gradient}
EVERY_FUNCTION = pytest.mark.parametrize("function", cases.quick("with gradient", slow=["forward"]))


def count(op, function):
    return 1 if function == "forward" else op.kernels


def primitives(op, function):
    return list(op.primitives[: 1 if function == "forward" else 2])


@pytest.fixture
def on_ampere(monkeypatch):
    """Lowers for a GPU of compute capability 8.0, which need not be there."""
    monkeypatch.setattr(lowering, "target_for", lambda platform: target_of((8, 0)))
    kernels.forget_lowerings()
    yield
    kernels.forget_lowerings()


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


def axes_of(op, last=0, first=0):
    """Along which axis each operand is mapped over: the first and the last as said, the others in front."""
    return (first, *[0] * (len(op.operands) - 2), last)


WAYS = {
    "in front": lambda op: [axes_of(op)],
    "another axis": lambda op: [axes_of(op, first=1)],
    "the last axis": lambda op: [axes_of(op, first=op.operands[0].ndim)],
    "the last operand is for all": lambda op: [axes_of(op, last=None)],
    "only the last operand": lambda op: [(*[None] * (len(op.operands) - 1), 0)],
    "two levels": lambda op: [axes_of(op, last=None), axes_of(op, first=1)],
}


def mapped(f, levels):
    for axes in levels:
        f = jax.vmap(f, in_axes=axes)
    return f


def stacked(operands, levels, size=2):
    """The types of operands that are mapped over."""
    for axes in levels:
        operands = [
            a if axis is None else shaped(*a.shape[:axis], size, *a.shape[axis:], dtype=a.dtype)
            for a, axis in zip(operands, axes, strict=True)
        ]
    return operands


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

SIZES, AXES = (2, 2), ("data", "model")
SHARD = dict.fromkeys(OPS, (4, 12)) | {"attention": (1, 20, 1, 8)}  # the shape of the first operand's
REDUCED = {"attention": {"all-reduce"}}  # the derivative of a bias that all of the batch shares, and nothing else


def placed(op, mesh):
    """The types of operands, sharded."""
    return [
        shaped(*a.shape, dtype=a.dtype, sharding=NamedSharding(mesh, spec))
        for a, spec in zip(op.operands, op.specs, strict=False)
    ]


def specs_of_results(op, function):
    *given, result = op.specs
    return result if function == "forward" else (result, tuple(given[: op.moving]))


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
    with triton_kernels.lowering_without() as on, mock.patch.object(call, "call", sums), jax.set_mesh(mesh):
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
def test_an_export_holds_the_kernels(on_ampere, monkeypatch, name, capability, function):
    import jax_triton

    op, capabilities, triton_call = OPS[name], [], jax_triton.triton_call

    def noted(*operands, **options):
        capabilities.append(options["compute_capability"])
        return triton_call(*operands, **options)

    monkeypatch.setattr(jax_triton, "triton_call", functools.wraps(triton_call)(noted))
    monkeypatch.setattr(lowering, "target_for", lambda platform: target_of(capability))
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
