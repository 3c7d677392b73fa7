"""A real kernel that lives in tests only: it holds the place where the next release's kernels plug in.

Softmax over short rows on Hopper, in Pallas on Mosaic GPU. A block is one warpgroup with one tile of rows. A row stays inside a
warp, so that what is summed along it goes through registers alone. The tile comes as two halves of columns, whose states
`online` joins. Each element is read once and written once; the Jacobian product reads two and writes one.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._core.implementation import Refusal

DTYPES = ("float32", "bfloat16", "float16")
COLS = range(64, 1025, 64)


@dataclass(frozen=True)
class ProbePlan:
    """Runs one of the two kernels."""

    function: Callable[..., jax.Array]
    params: Mapping[str, Any]
    remark = None

    def describe(self):
        return "one warpgroup a tile"

    def run(self, **operands):
        return self.function(**{"where": None, "scale": None} | operands, **self.params)


def plan(problem, target):
    """Plans softmax and the product with its Jacobian."""
    del target
    function = {"softmax": softmax, "softmax_jacobian": softmax_jacobian}.get(problem.operation.name)
    if function is None:
        return Refusal(f"it has no kernel for {problem.operation.name}", lacks_kernel=True)
    if problem.devices:
        return Refusal("it does not merge over devices")
    reason = unsupported(problem.operands, **problem.params)
    return ProbePlan(function, problem.params) if reason is None else Refusal(reason)


def unsupported(operands, *, axes, dtype):
    """Says why it cannot run, or returns None."""
    scale = operands.get("scale")
    arrays = [operands[name] for name in ("x", "y", "t") if name in operands]
    x = arrays[0]
    if operands.get("where") is not None:
        return "it takes no where"
    if axes != (x.ndim - 1,):
        return f"the axis must be the last one alone, got axes {axes} of an array with {x.ndim}"
    for name in [a.dtype.name for a in arrays] + [jnp.dtype(dtype).name]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    if scale is not None and scale.size != 1:
        return f"scale must be one number, got shape {scale.shape}"
    rows, cols = math.prod(x.shape[:-1]), x.shape[-1]
    if cols not in COLS:
        return f"the axis must have a multiple of {COLS.step} entries, from {COLS[0]} to {COLS[-1]}, got {cols}"
    _, block = _layout(cols // 2, *(a.dtype for a in arrays), jnp.dtype(dtype))
    if rows == 0 or rows % block:
        return f"the number of rows must be a multiple of {block}, got {rows}"
    return None


def softmax(x, where, scale, *, axes, dtype):
    """The primitive: `unsupported` leaves no `where`, and `axes` the last."""
    del where, axes
    return forward(x.reshape(-1, x.shape[-1]), scale, dtype).reshape(x.shape)


def softmax_jacobian(y, t, scale, where, *, axes, dtype):
    """The primitive, for the tangent `t` and for a cotangent alike."""
    del where, axes
    rows = (-1, y.shape[-1])
    return backward(y.reshape(rows), t.reshape(rows), scale, dtype).reshape(y.shape)


@jax.custom_vjp
def alone(x):
    """Softmax of `[rows, cols]` on kernels in both directions, with no primitive around: what the interpreter runs."""
    return forward(x, None, x.dtype)


alone.defvjp(lambda x: (forward(x, None, x.dtype),) * 2, lambda y, c: (backward(y, c, None, y.dtype),))


def forward(x, scale, dtype):
    """`exp(s - m) / d` of `s = scale * x`, `[rows, cols]`."""

    def tile(scores):
        state = online.push(online.lift(scores[0]), scores[1])
        d = state.d + (state.m - state.m)  # NaN for a row whose maximum is infinite, as the reference has it
        return [jnp.exp(s - _along(state.m, s)) / _along(d, s) for s in scores]

    return _call("softmax_forward_probe", tile, [x], scale, dtype)


def backward(y, t, scale, dtype):
    """`y * (s - sum(y * s))` of `s = scale * t`, `[rows, cols]`."""

    def tile(y, t):
        t = [jnp.where(b != 0, a, jnp.zeros_like(a)) for a, b in zip(t, y, strict=True)]  # where y is 0, so is the result
        left, right = [jnp.sum(b * a, axis=1) for a, b in zip(t, y, strict=True)]
        return [b * (a - _along(left + right, a)) for a, b in zip(t, y, strict=True)]

    return _call("softmax_jacobian_probe", tile, [y, t], scale, dtype)


def _call(name, tile, operands, scale, dtype):
    """Runs `tile` on tiles of rows, each operand as a pair of float32 halves; `scale` multiplies the last operand."""
    rows, cols = operands[0].shape
    layout, block = _layout(cols // 2, *(a.dtype for a in operands), jnp.dtype(dtype))

    def body(*refs):
        refs, scale_ref, out_ref = refs[: len(operands)], refs[-2], refs[-1]
        here = pl.ds(lax.axis_index("tile") * block, block)
        halves = [pl.ds(0, cols // 2), pl.ds(cols // 2, cols // 2)]
        loads = [[plgpu.load(ref.at[here, half], layout=layout, optimized=False) for half in halves] for ref in refs]
        values = [[half.astype(jnp.float32) for half in pair] for pair in loads]
        if scale is not None:
            values[-1] = [half * scale_ref[0] for half in values[-1]]
        for half, result in zip(halves, tile(*values), strict=True):
            compat.store(out_ref.at[here, half], result.astype(dtype))

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((rows, cols), dtype),
        grid=(rows // block,),
        grid_names=("tile",),
        kernel_name=name,
    )(*operands, *([] if scale is None else [scale.reshape(1)]))


def _layout(cols, *dtypes):
    """Registers of a warpgroup over `[block, cols]`, a row in as few lanes of a warp as 16-byte loads allow; and `block`."""
    vector = 16 // max(dtype.itemsize for dtype in dtypes)
    lanes = math.gcd(32, cols // vector)
    rows = 32 // lanes  # of a warp
    tiles = (4 * rows, lanes * vector), (rows, lanes * vector), (vector,)
    tiled = mgpu.TiledLayout(plgpu.Tiling(tiles), (-5,), (-3, -2), -1, _check_canonical=False).canonicalize()
    return plgpu.Layout.TILED(tiled.tiling, tiled.warp_dims, tiled.lane_dims, tiled.vector_dim), 4 * rows


def _along(row, like):
    return lax.broadcast_in_dim(row, like.shape, (0,))
