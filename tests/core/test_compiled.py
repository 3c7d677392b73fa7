"""A few of the configurations that `compiled.py` compiles, one or more of each op; the whole is run by hand."""

import functools

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxsoftmax._core import compat

from ..support import xla_cuda
from . import compiled

FEW = [
    "attention forward float16 64x256 few int8 plain",
    "attention forward bfloat16 256x192 many  what tiles depend on",
    "attention backward bfloat16 256x256 everything",
    "softmax softmax bfloat16 8192 ",
    "top_k categorical top_p bfloat16 64x50257",
    "top_k weights of the found bfloat16 2048x128 k 8",
    "cross_entropy linear bfloat16 256x1024 classes 0 cap",
    "divergence kl_divergence_vjp xy bfloat16 bfloat16 8192 ",
    "divergence js_divergence  bfloat16 bfloat16 8192 ",
]


@functools.cache
def all_cases():
    return {case.name: case for case in compiled.cases()}


def test_cases_are_of_every_op_and_of_every_configuration_of_attention():
    ops = [next(cases()).name.split(" ")[0] for cases in compiled.CASES]
    assert sorted(ops) == ["attention", "cross_entropy", "divergence", "softmax", "top_k"]
    configs = {"forward": set(), "backward": set()}
    for case in compiled.attention_cases():
        for pass_, found in configs.items():
            if case.name.startswith(f"attention {pass_}"):
                found.add(dict(case.key[2:])["config"])
    # Three head sizes, with a bias in shared memory and without; two of float32, and one with a bias's derivative; one of
    # functions that need registers.
    assert len(configs["backward"]) == 10
    assert len(configs["forward"]) > 20


@pytest.mark.parametrize("name", [*FEW[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in FEW[1:])])
def test_ptxas_compiles(name):
    xla_cuda.skip_unless_it_compiles()
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows = compiled.compile_case(all_cases()[name])
    assert [row.error for row in rows] == [""] * len(rows)
    assert all(0 < row.registers <= 255 for row in rows)


def test_what_ptxas_refuses_is_an_error():
    """There is no such instruction: an error shows that ptxas runs."""
    xla_cuda.skip_unless_it_compiles()

    @plgpu.inline_mgpu()
    def nonsense(_):
        compat.utils.inline_ptx("nonsense.u32;", has_side_effects=True)

    def body(x, y):
        nonsense()
        y[...] = x[...]

    def run(given):
        kernel = plgpu.kernel(body, out_type=compiled.shaped(128), grid=(1,), grid_names=("block",), kernel_name="nonsense")
        return kernel(given["x"])

    (row,) = compiled.compile_case(compiled.Case("nonsense", (), run, {"x": compiled.shaped(128)}))
    assert "nonsense" in row.error
