"""What a kernel computes in one operation is, bit for bit, what Pallas computes in many."""

import functools

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxsoftmax._gpu import fused as module
from jaxsoftmax._gpu.emit import WARP, WARPS, of_warps
from jaxsoftmax._gpu.fused import fused
from jaxsoftmax._gpu.kernel import kernel_of

LAYOUT = of_warps(2)
ROWS, SIZE = WARPS, 2 * WARP


def arithmetic(bound, x, narrow, columns, factor):
    """Every operation that may be fused, and constants and numbers beside arrays."""
    scaled = x * lax.broadcast_in_dim(factor, x.shape, ()) - narrow.astype(jnp.float32)
    weights = jnp.exp(-jnp.abs(scaled)) + jnp.log(jnp.maximum(jnp.abs(x), jnp.float32(0.5)))
    is_near = ((columns + 3 > bound) & (scaled <= 1)) | (x != x) | (columns == 7) | (weights < jnp.minimum(x, 0)) | (x >= 2)
    weights += jnp.exp2(-jnp.abs(x)) / 3
    words = lax.bitcast_convert_type(x, jnp.uint32)
    words = (words << np.uint32(3)) ^ (words >> np.uint32(5)) & np.uint32(0xFFFF0000)
    return jnp.where(is_near, weights, lax.bitcast_convert_type(words >> np.uint32(2), jnp.float32)), words


def run(is_fused):
    def body(x, narrow, columns, factor, *results):
        load = functools.partial(plgpu.load, layout=LAYOUT, optimized=False)
        operands = [load(x), load(narrow), load(columns), factor[0]]
        found = fused(arithmetic, (5,), operands, LAYOUT) if is_fused else arithmetic(5, *operands)
        for ref, array in zip(results, found, strict=True):
            ref[...] = plgpu.layout_cast(array, LAYOUT)

    types = [jax.ShapeDtypeStruct((ROWS, SIZE), dtype) for dtype in (jnp.float32, jnp.uint32)]
    return kernel_of(
        body,
        out_type=types,
        grid=(1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        kernel_name=f"{'fused' if is_fused else 'plain'}_mosaic",
    )


def operands():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((ROWS, SIZE)).astype(np.float32)
    x[0, :4] = np.nan, np.inf, -np.inf, -0.0
    narrow, columns = rng.standard_normal(x.shape).astype(jnp.bfloat16), rng.integers(-9, 9, x.shape, np.int32)
    return x, narrow, columns, np.array([0.7], np.float32)


@pytest.mark.parametrize("is_fused", [False, True])
def test_both_lower(is_fused):
    assert "mosaic" in jax.jit(run(is_fused)).trace(*operands()).lower(lowering_platforms=("cuda",)).as_text()


def test_tanh_is_that_of_float64(monkeypatch):
    """To within three units of float32, small arguments too, with a division in place of what GPUs make of a reciprocal."""
    monkeypatch.setattr(module, "reciprocal", lambda a: 1 / a)
    x = np.concatenate([np.geomspace(1e-30, 100, 999), [0, 0.624999, 0.625, np.inf, np.nan]]).astype(np.float32)
    x = np.concatenate([x, -x])
    np.testing.assert_allclose(module.tanh(jnp.asarray(x)), np.tanh(x.astype(np.float64)), rtol=3 * 2**-23)


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
def test_bits_are_those_of_single_operations():
    for one, other in zip(*(jax.jit(run(is_fused))(*operands()) for is_fused in (False, True)), strict=True):
        np.testing.assert_array_equal(*(np.asarray(a).view(np.uint32) for a in (one, other)))
