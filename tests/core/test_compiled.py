"""A few of the configurations that `compiled.py` compiles, one or more of each op; the whole is run by hand."""

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
]


@pytest.fixture(scope="module")
def cases():
    return {case.name: case for case in compiled.cases()}


def test_cases_are_of_every_op_and_of_every_configuration_of_attention(cases):
    assert {name.split(" ")[0] for name in cases} == {"attention", "softmax", "cross_entropy", "top_k"}
    found = {dict(case.key[2:])["config"] for name, case in cases.items() if name.startswith("attention backward")}
    assert len(found) == 3
    assert len({dict(case.key[2:])["config"] for name, case in cases.items() if name.startswith("attention forward")}) > 20


@pytest.mark.parametrize("name", [*FEW[:1], *(pytest.param(name, marks=pytest.mark.slow) for name in FEW[1:])])
def test_ptxas_compiles(cases, name):
    if isinstance(reason := xla_cuda.sharding(), str):
        pytest.skip(reason)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        rows = compiled.compile_case(cases[name])
    assert [row.error for row in rows] == [""] * len(rows)
    assert all(0 < row.registers <= 255 for row in rows)


def test_what_ptxas_refuses_is_an_error():
    """There is no such instruction: an error shows that ptxas runs."""
    if isinstance(reason := xla_cuda.sharding(), str):
        pytest.skip(reason)

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
