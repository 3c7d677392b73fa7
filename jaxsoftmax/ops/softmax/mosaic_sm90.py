"""The softmax family on Hopper, for rows up to those that the grid holds.

`plan` distributes rows over threads, and each kernel has a function.

1. A block loads its rows, its one row or its slice of one, into registers or shared memory; rows that are read once only are
   held nowhere.
2. Each warp lifts its share of a row to a state `(m, d)`: the maximum, and the sum of `exp(s - m)`.
3. The warps of a block merge their states through shared memory. The blocks of a cluster store theirs to each other's shared
   memory. Blocks that share longer rows do it through global memory.
4. The results are computed from the elements that are held and the state, and stored.

Softmax and log_softmax read one array and write one; logsumexp reads one; the derivatives read two (`logsumexp_vjp`: one) and
write one (`logsumexp_jvp`: none). Each element is read once and written once. A mask is read as bytes, in its own shape.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, section 3.1.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.problem import FACTORS
from jaxsoftmax._core.row_problem import RowProblem, RowwiseProblem, entries
from jaxsoftmax._core.target import Target, target_for
from jaxsoftmax._gpu import rows
from jaxsoftmax._gpu.rows.kernel import Inside, Mask, PerRow, RowKernel, RowOperand, Scalar, Whole
from jaxsoftmax._gpu.rows.memory import Elements
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan
from jaxsoftmax._gpu.rows.plans_sm90 import plan_rows
from jaxsoftmax._gpu.rows.tile import Either, each
from jaxsoftmax.ops.softmax.primitive import (
    LOG_SOFTMAX,
    LOG_SOFTMAX_JVP,
    LOG_SOFTMAX_VJP,
    LOGSUMEXP,
    LOGSUMEXP_JVP,
    LOGSUMEXP_VJP,
    SOFTMAX,
    SOFTMAX_JACOBIAN,
)
from jaxsoftmax.ops.softmax.problem import SoftmaxProblem
from jaxsoftmax.ops.softmax.profit import slower_softmax

PlanRows = Callable[..., RowPlan | ColumnPlan | Refusal]

DTYPES = ("float32", "bfloat16", "float16")

# The operations whose kernel merges over the devices that share rows: the others lose nothing by a collective of states.
_MERGING = (SOFTMAX, LOG_SOFTMAX, SOFTMAX_JACOBIAN, LOG_SOFTMAX_JVP, LOG_SOFTMAX_VJP)


@dataclass(frozen=True)
class SoftmaxPlan:
    """Runs a problem of the softmax family by one kernel over rows."""

    problem: SoftmaxProblem
    row_plan: RowPlan | ColumnPlan  # how rows are distributed over threads
    remark: str | None = None

    def describe(self) -> str:
        return self.row_plan.describe() + (", times a factor" if self.problem.is_product else "")

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        problem = self.problem
        factors = {name: operands.pop(name, None) for name in FACTORS}
        arrays = dict.fromkeys(problem.operation.by_name) | operands
        return rows.launch(multiplied(_KERNELS[problem.operation](problem, **arrays), **factors), self.row_plan)


def plan(problem: SoftmaxProblem, target: Target) -> SoftmaxPlan | Refusal:
    """Plans a problem of the softmax family."""
    return plan_with(plan_rows, problem, target)


def plan_with(plan_rows: PlanRows, problem: SoftmaxProblem, target: Target, remark: str | None = None) -> SoftmaxPlan | Refusal:
    """Plans a problem of the softmax family by the table of a GPU generation, which may have a caveat."""
    dtypes = [operand.dtype for operand in problem.whole] + [problem.dtype]
    reason = refused_rows(dtypes, problem.operands.get("where"), problem.rows)
    if reason is None and problem.devices:
        reason = _refused_devices(problem)
    reason = refused_product(problem) if reason is None else reason
    if reason is not None:
        return Refusal(reason)
    row_plan = plan_rows(problem.rows, target, devices=bool(problem.devices))
    if isinstance(row_plan, Refusal):
        return row_plan
    result, reason = SoftmaxPlan(problem, row_plan, remark), slower_softmax(problem)
    return result if reason is None else Refusal(reason, result)


def refused_rows(dtypes, where, problem: RowProblem) -> str | None:
    """Says why no kernel runs on rows of these dtypes, with this mask, or returns None."""
    for name in [dtype.name for dtype in dtypes]:
        if name not in DTYPES:
            return f"dtypes must be among {', '.join(DTYPES)}, got {name}"
    if (reason := problem.refused(2**31 - 1)) is not None:
        return reason
    if where is not None and entries(where.shape, problem.axes) not in (1, problem.cols):
        return f"where must be whole along the axes, or of size 1, got shape {where.shape} for {problem.shape}"
    return None


def _refused_devices(problem: SoftmaxProblem) -> str | None:
    """Says why no kernel merges over the devices that share the rows, or returns None.

    Such a kernel reads each element once; with a collective of states it would be read twice. It pays from 1 KiB of a row in
    each device on: on four H200s softmax of [8192, 2048] in bfloat16, 1 KiB of a row each, takes 54 us in one kernel, 59 on the
    reference and 70 with `jax.nn`. Blocks of many short rows wait for each other most of the time: [32768, 2048] takes 101, 92
    and 98, and in float32 98, 111 and 118. No part under 1 KiB was measured, and no number of rows between these.
    """
    least = 1024 if problem.rows.n_rows <= 2**14 else 2048
    size = problem.rows.cols * problem.rows.read[0]
    if problem.operation not in _MERGING or problem.rows.inner > 1:
        return "no kernel of this operation merges rows of this kind over devices"
    return None if size >= least else f"one kernel for all devices pays from {least} bytes of a row in each on, got {size}"


def refused_product(problem: RowwiseProblem) -> str | None:
    """Says why no kernel computes a product with a factor, or returns None.

    If the program rounds the product to 16 bits, and the reference computes a derivative, the saved maximum must be that of the
    rounded scores.
    """
    if problem.is_rounded_product and ("m" in problem.operands or problem.params.get("return_state")):
        return "the state that derivatives need is that of a product of 16 bits"
    return None


# The kernels. A body computes in float32: `x`, `y` and `t` are functions of a step that give the elements of a vector of each
# thread, as are results and `where`, unless it is None.


def _softmax(problem, x, where, scale) -> RowKernel:
    """Computes `exp(s - m) / d`."""

    def body(tile, x, inside, where, scale):
        scores, magnitude = directed(tile, x, inside, where, scale)
        local = tile.lift(scores, magnitude)
        state = tile.merge(local, magnitude)
        d = state.d + (state.m - state.m)  # NaN if the maximum is infinite
        weights, alike = tile.weights(local.m, magnitude)
        factor = tile.along(online.weights(local.m, state.m, axis=(), scale=magnitude) * alike / d)
        y = each(lambda s: weights(s) * factor, scores)
        if where is None or not tile.allows_either:
            return [apply_mask(where, y, 0)]
        finite = jnp.logical_and(jnp.abs(state.m) < jnp.inf, state.d > 0)  # then masked elements have weight 0 by themselves
        return [Either(finite, y, apply_mask(where, y, 0))]

    return _kernel(problem, "softmax_forward", body, _with_scores({}, x, where, scale))


def _log_softmax(problem, x, where, scale) -> RowKernel:
    """Computes `(s - m) - log d`, and the state `(m, d)` if it is asked for."""
    return_state = problem.params["return_state"]

    def body(tile, x, inside, where, scale):
        scores, magnitude = directed(tile, x, inside, where, scale)
        state = tile.merge(tile.lift(scores, magnitude), magnitude)
        m = state.m if where is None else jnp.where(state.m != -jnp.inf, state.m, 0)
        d = state.d + (m - m)
        along_m, log_d = tile.along(m), tile.along(jnp.log(d))
        out = each(lambda s: _times(s - along_m, magnitude) - log_d, scores)
        return [apply_mask(where, out, -jnp.inf), m, d][: 3 if return_state else 1]

    state = [jnp.float32] * (2 * return_state)
    return _kernel(problem, "log_softmax_forward", body, _with_scores({}, x, where, scale), per_row=state)


def _logsumexp(problem, x, where, scale) -> RowKernel:
    """Computes `m + log d`, and the state `(m, d)` if it is asked for."""
    return_state = problem.params["return_state"]

    def body(tile, x, inside, where, scale):
        scores, magnitude = directed(tile, x, inside, where, scale)
        state = tile.merge(tile.lift(scores, magnitude), magnitude)
        m = online.shift(state.m)
        return [_times(m, magnitude) + jnp.log(state.d), m, state.d][: 3 if return_state else 1]

    results = [problem.dtype, *[jnp.float32] * (2 * return_state)]
    return _kernel(problem, "logsumexp_forward", body, _with_scores({}, x, where, scale), per_row=results)


def _softmax_jacobian(problem, y, t, scale) -> RowKernel:
    """Computes `scale * y * (t - sum(y * t))`."""

    def body(tile, y, t, scale):
        pairs = each(lambda y, t: (y, _times(select(y != 0, t, 0), scale)), y, t)
        total = tile.along(tile.sum(each(lambda pair: jnp.multiply(*pair), pairs)))
        return [each(lambda pair: select(pair[0] != 0, pair[0] * (pair[1] - total), 0), pairs)]

    operands = {"y": Whole(y, 0, jnp.float32), "t": Whole(t, 0, jnp.float32), "scale": factor_operand(scale)}
    return _kernel(problem, "softmax_jacobian", body, operands)


def _log_softmax_jvp(problem, x, m, d, t, where, scale) -> RowKernel:
    """Computes `t - sum(p * t)`."""

    def body(tile, x, t, m, d, inside, where, scale):
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        tangents = _tangents(problem, t, where, scale)
        total = tile.along(tile.sum(each(lambda p, t: p * select(p != 0, t, 0), weights, tangents)))
        return [apply_mask(where, each(lambda t: t - total, tangents), 0)]

    return _kernel(problem, "log_softmax_jvp", body, _with_state(x, m, d, t, where, scale))


def _log_softmax_vjp(problem, x, m, d, t, where, scale) -> RowKernel:
    """Computes `t - p * sum(t)`, of the cotangent `t`."""

    def body(tile, x, t, m, d, inside, where, scale):
        cotangents = _tangents(problem, t, where, scale)
        total = tile.along(tile.sum(cotangents))
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        return [apply_mask(where, each(lambda t, p: t - p * total, cotangents, weights), 0)]

    return _kernel(problem, "log_softmax_vjp", body, _with_state(x, m, d, t, where, scale))


def _logsumexp_jvp(problem, x, m, d, t, where, scale) -> RowKernel:
    """Computes `sum(p * t)`."""

    def body(tile, x, t, m, d, inside, where, scale):
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        factor = scale if problem.params["scale_tangent"] else None
        return [tile.sum(each(lambda p, t: p * _times(select(p != 0, t, 0), factor), weights, t))]

    operands = _with_state(x, m, d, t, where, scale)
    return _kernel(problem, "logsumexp_jvp", body, operands, per_row=[problem.dtype])


def _logsumexp_vjp(problem, x, m, d, t, where, scale) -> RowKernel:
    """Computes `p * t`, of the cotangent `t`, one for each row."""

    def body(tile, x, m, d, t, inside, where, scale):
        t = tile.along(_times(t, scale if problem.params["scale_tangent"] else None))
        weights = weights_of_state(tile, x, m, d, inside, where, scale)
        return [apply_mask(where, each(lambda p: p * t, weights), 0)]

    operands = {"m": PerRow(m), "d": PerRow(d), "t": PerRow(t, jnp.float32)}
    return _kernel(problem, "logsumexp_vjp", body, _with_scores(operands, x, where, scale))


_KERNELS = {
    SOFTMAX: _softmax,
    LOG_SOFTMAX: _log_softmax,
    LOGSUMEXP: _logsumexp,
    SOFTMAX_JACOBIAN: _softmax_jacobian,
    LOG_SOFTMAX_JVP: _log_softmax_jvp,
    LOG_SOFTMAX_VJP: _log_softmax_vjp,
    LOGSUMEXP_JVP: _logsumexp_jvp,
    LOGSUMEXP_VJP: _logsumexp_vjp,
}


def _kernel(problem: SoftmaxProblem, name: str, body, operands: Mapping[str, RowOperand | None], per_row=()) -> RowKernel:
    whole = [problem.dtype] if problem.rows.written else []
    return RowKernel(f"{name}_mosaic", body, operands, problem.rows, whole, per_row, devices=problem.devices)


def _with_scores(operands, x, where, scale) -> dict[str, RowOperand | None]:
    """Returns the operands of a kernel that computes scores: `x`, other ones, a mask and a scale, which may be None."""
    inside = None if scale is None else Inside()
    mask = None if where is None else Mask(where)
    return {"x": Whole(x, -jnp.inf, jnp.float32), **operands, "inside": inside, "where": mask, "scale": factor_operand(scale)}


def _with_state(x, m, d, t, where, scale) -> dict[str, RowOperand | None]:
    """Returns the operands of a derivative: scores, the saved state, and a tangent or cotangent as large as the scores."""
    return _with_scores({"t": Whole(t, 0, jnp.float32), "m": PerRow(m), "d": PerRow(d)}, x, where, scale)


def multiplied(kernel: RowKernel, factor=None, divisor=None) -> RowKernel:
    """Returns the kernel on the product of `x` and a factor, or the reciprocal of a divisor, if either is given.

    It multiplies as the program does: `-inf * 0` is NaN.
    """
    if factor is None and divisor is None:
        return kernel
    number = factor_operand(divisor if factor is None else factor)

    def body(tile, x, inside, factor, **operands):
        along = tile.along(factor if divisor is None else 1 / factor)
        product = apply_mask(inside, each(lambda x: x * along, x), -jnp.inf)  # beyond the end x is -inf
        return kernel.body(tile, x=product, inside=inside, **operands)

    return replace(kernel, body=body, operands={**kernel.operands, "inside": Inside(), "factor": number})


def factor_operand(scale) -> RowOperand | None:
    """Returns the operand of a kernel for a factor of rows: one number, or one for each row, or None."""
    if scale is None:
        return None
    return Scalar(scale) if scale.size == 1 else PerRow(scale.astype(jnp.float32))


def directed(tile, x, inside, where, scale):
    """Returns `x` in the direction in which the scores grow, `-inf` where it is masked, and the magnitude of `scale`.

    It is 2^-126 where the scale is 0: finite scores are 0 by their sign already, and `0 * -inf` would be NaN.
    """
    if scale is None:
        return apply_mask(where, x, -jnp.inf), None
    sign = tile.along(jnp.sign(scale))

    def signed(values):
        values = each(lambda x: x * sign.astype(x.dtype), values)
        return apply_mask(where, apply_mask(inside, values, -jnp.inf), -jnp.inf)  # beyond the end x is -inf

    in_words = isinstance(x, Elements) and x.in_words  # two by each operation
    return replace(x, load=signed(x.load)) if in_words else signed(x), jnp.where(scale == 0, 2.0**-126, jnp.abs(scale))


def undirected(m, scale):
    """Returns the element with the largest score, from the maximum in the direction in which the scores grow."""
    return m if scale is None else m * jnp.sign(scale)


def weights_of_state(tile, x, m, d, inside, where, scale, factor=1):
    """Computes the softmax weights times a factor for each row, from the saved state."""
    if where is not None:
        d = jnp.where(d != 0, d, 1)  # a row with nothing to see
    weights, alike = tile.weights(undirected(m, scale), scale)
    factor = tile.along(alike * factor / d)
    return apply_mask(inside, apply_mask(where, each(lambda x: weights(x) * factor, x), 0), 0)


def _tangents(problem, t, where, scale):
    """Returns the tangents of the scores, 0 where they are masked."""
    factor = scale if problem.params["scale_tangent"] else None
    return each(lambda t: _times(t, factor), apply_mask(where, t, 0))


def apply_mask(where, values, otherwise):
    """Returns `values` where `where` is true, or everywhere if it is None, and `otherwise` elsewhere: functions of a step."""
    return values if where is None else each(lambda seen, values: select(seen, values, otherwise), where, values)


def select(seen, values, otherwise):
    """Returns `values` where `seen` is true, or everywhere if it is None, and a number elsewhere."""
    return values if seen is None else jnp.where(seen, values, jnp.full_like(values, otherwise))


def _times(values, scale):
    """Computes `values * scale`; `scale` is None, a number, or one for each row."""
    if scale is None or scale.shape == values.shape:
        return values if scale is None else values * scale
    return values * lax.broadcast_in_dim(scale, values.shape, (0,) if scale.ndim else ())


# The kernels without the primitive, for who wants to see or time them alone.


@jax.custom_vjp
def softmax_with_vjp(x: jax.Array) -> jax.Array:
    """Computes the softmax along the last axis on these kernels in both directions, as a plain `jax.custom_vjp` function.

    There is no reference to fall back on, no sharding, and no second derivative.

    Args:
      x: float32, bfloat16 or float16 array of any shape.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      NotImplementedError: no kernel runs on such rows. The message gives the reason.

    Examples:
      >>> import jax
      >>> import jax.numpy as jnp
      >>> from jaxsoftmax.ops.softmax.mosaic_sm90 import softmax_with_vjp
      >>> f = jax.jit(jax.grad(lambda x: jnp.sum(softmax_with_vjp(x)[:, 0])))
      >>> text = f.trace(jax.ShapeDtypeStruct((8, 4096), jnp.bfloat16)).lower(lowering_platforms=("cuda",)).as_text()
      >>> [name in text for name in ("softmax_forward_mosaic", "softmax_jacobian_mosaic")]
      [True, True]

    Source: Milakov and Gimelshein 2018, arXiv:1805.02867.
    """
    return _softmax_forward(x)[0]


def _softmax_forward(x):
    y = _run_alone(SOFTMAX, x.ndim - 1, x.dtype, {"x": x})
    return y, y


def _softmax_backward(y, cotangent):
    return (_run_alone(SOFTMAX_JACOBIAN, y.ndim - 1, y.dtype, {"y": y, "t": cotangent}),)


def _run_alone(operation, axis, dtype, operands):
    types = {name: jax.typeof(operand) for name, operand in operands.items()}
    chosen = plan(operation.problem(operation, types, {"axes": (axis,), "dtype": dtype}), target_for("cuda"))
    if isinstance(chosen, Refusal):
        if chosen.plan is None:
            raise NotImplementedError(f"softmax_with_vjp: {chosen.reason}")
        chosen = chosen.plan
    return chosen.run(**operands)[0]


softmax_with_vjp.defvjp(_softmax_forward, _softmax_backward)
