"""Kernels for divergences of two softmaxes on Hopper.

The Kullback-Leibler divergence:

1. Forward, blocks read both rows and lift them to their states `(m, d)` and `(y_m, y_d)`, and to the sum of the weights of the
   first times the differences of the exponents. Both sums are relative to both maxima. Where rows are read in a loop, they are
   rescaled as a maximum grows. Warps tell each other all five numbers at one time.
2. Backward, each element gets `(a * (u - v) + b) * p` for the first array, and `c * q - a * p` for the second one, from the
   saved states. Blocks need nothing of each other.

The Jensen-Shannon divergence:

1. Forward, blocks hold both rows, in registers of a warp or in shared memory, and lift them to both states. Warps tell each
   other these four numbers at one time.
2. Each element then adds `p * log(p / r)` to one sum and `q * log(q / r)` to another one, where `r` is the mixture. Warps tell
   each other both sums.
3. Backward, each element gets `(a * w * log(p / r) + b) * p`, and `(a * (1 - w) * log(q / r) + c) * q`.

So each array is read once forward. Backward each is read once, and one or two gradients are written once. If no cluster holds
the rows of the second divergence, softmax's kernels compute both states, and a kernel reads both arrays again for the sums.
XLA does so if there is a mask.

Source: Milakov and Gimelshein 2018, arXiv:1805.02867, for the states.
"""

import math
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxsoftmax import online
from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax._gpu import rows
from jaxsoftmax._gpu.rows.kernel import Inside, Mask, PerRow, RowKernel, RowOperand, Whole
from jaxsoftmax._gpu.rows.plan import ColumnPlan, RowPlan, Storage
from jaxsoftmax._gpu.rows.plans_sm90 import plan_rows
from jaxsoftmax._gpu.rows.tile import together
from jaxsoftmax.ops.divergence import xla
from jaxsoftmax.ops.divergence.primitive import JS_DIVERGENCE, JS_DIVERGENCE_VJP, KL_DIVERGENCE, KL_DIVERGENCE_VJP
from jaxsoftmax.ops.divergence.problem import DivergenceProblem
from jaxsoftmax.ops.softmax import mosaic_sm90 as softmax
from jaxsoftmax.ops.softmax.mosaic_sm90 import directed, factor_operand, refused_rows
from jaxsoftmax.ops.softmax.primitive import LOGSUMEXP
from jaxsoftmax.ops.softmax.profit import slower_rows

_LN2 = math.log(2)


@dataclass(frozen=True)
class DivergencePlan:
    """Runs a problem of divergences by one kernel over rows."""

    problem: DivergenceProblem
    row_plan: RowPlan | ColumnPlan  # how rows are distributed over threads
    remark = None

    def describe(self) -> str:
        return self.row_plan.describe()

    def run(self, **operands: jax.Array | None) -> list[jax.Array]:
        arrays = dict.fromkeys(self.problem.operation.by_name) | operands
        return _RUN[self.problem.operation](self, **arrays)


def plan(problem: DivergenceProblem, target: Target) -> Plan | Refusal:
    """Plans a problem of divergences."""
    if problem.operation not in _RUN:
        return Refusal(f"it has no kernel for {problem.operation.name}", lacks_kernel=True)
    if problem.devices:
        return Refusal("it does not merge over devices")
    dtypes = [problem.operands["x"].dtype, problem.operands["y"].dtype, *problem.written]
    if (reason := refused_rows(dtypes, problem.operands.get("where"), problem.rows)) is not None:
        return Refusal(reason)
    row_plan = plan_rows(problem.rows, target)
    if problem.operation is JS_DIVERGENCE and not _holds(row_plan):
        chosen = _plan_passes(problem, target)
    elif isinstance(row_plan, Refusal):
        return row_plan
    elif row_plan.persistent_blocks:  # blocks tell each other one state of a row
        return Refusal(f"no kernel computes the divergence for rows of {problem.rows.cols} entries")
    else:
        chosen = DivergencePlan(problem, row_plan)
    reason = slower_rows(problem, wins_if_wide=False)
    return chosen if reason is None or isinstance(chosen, Refusal) else Refusal(reason, chosen)


def _holds(plan: RowPlan | ColumnPlan | Refusal) -> bool:
    """Tells whether blocks, or clusters of them, hold whole rows."""
    return not isinstance(plan, Refusal) and not plan.persistent_blocks and plan.storage != Storage.NOWHERE


@dataclass(frozen=True)
class PassesPlan:
    """Runs `js_divergence` of rows that no cluster holds: softmax's kernels for both states, and one for the sums, or XLA."""

    problem: DivergenceProblem
    states: tuple[Plan, Plan]
    sums: DivergencePlan | None  # None if XLA computes them
    remark = None

    def describe(self) -> str:
        first, second = (plan.describe() for plan in self.states)
        again = "XLA" if self.sums is None else self.sums.describe()
        return f"log-sum-exps first: {first if first == second else f'{first}; {second}'}; both arrays are read again: {again}"

    def run(self, **operands: Any) -> list[jax.Array]:
        counts, states = operands.pop("counts", None), []
        for plan, names in zip(self.states, _NAMES, strict=True):
            states += plan.run(**_renamed(operands, names))[1:]
        params = {name: self.problem.params[name] for name in ("dtype", "weight", "return_state")}
        if self.sums is None:
            return xla.results_of_states(states, operands, counts, axes=self.problem.params["axes"], **params)
        operands = dict.fromkeys(("where", "scale", "y_scale")) | operands
        sums, y_sums = _js_divergence_sums(self.sums, states, **operands)
        m, d, y_m, y_d = states
        return xla.results_of_mixture(m, d, y_m, y_d, sums, y_sums, counts, **params)


_NAMES = ("x", "where", "scale"), ("y", "where", "y_scale")


def _renamed(operands, names) -> dict[str, Any]:
    """Returns the operands of one array, under the names that they have in softmax's primitives."""
    return {name: operands[own] for name, own in zip(_NAMES[0], names, strict=True) if own in operands}


def _plan_passes(problem: DivergenceProblem, target: Target) -> PassesPlan | Refusal:
    """Plans both states; the speed of softmax's kernel does not decide."""
    plans, params = [], {"axes": problem.params["axes"], "dtype": problem.params["dtype"], "return_state": True}
    for names in _NAMES:
        state = softmax.plan(LOGSUMEXP.problem(LOGSUMEXP, _renamed(problem.operands, names), params), target)
        state = state.plan if isinstance(state, Refusal) and state.plan is not None else state
        if isinstance(state, Refusal):
            return state
        plans.append(state)
    sums = plan_rows(
        replace(problem.rows, reduces="sum", n_exchanges=1, exchanged=2, is_read_again=False, fits_registers=True), target
    )
    again = None if isinstance(sums, Refusal) else DivergencePlan(problem, sums)
    if again is not None and again.row_plan.persistent_blocks:  # blocks of the grid tell each other one number
        again = None
    return PassesPlan(problem, (plans[0], plans[1]), again)


def _kl_divergence(plan: DivergencePlan, x, y, where, scale, y_scale, counts):
    """Computes the divergence, and if asked for the states of both rows and the sums between them."""

    def body(tile, x, y, inside, where, scale, y_scale):
        (scores, size), (others, y_size) = _directed(tile, x, y, inside, where, scale, y_scale)
        local = tile.lift_differences(scores, others, size, y_size)
        state, other, sums = tile.merge_differences(*local, size, y_size)
        return [state.m, state.d, sums, other.m, other.d]

    params = plan.problem.params
    m, d, sums, y_m, y_d = _launch(plan, "kl_divergence_forward", body, (x, y, where, scale, y_scale), {}, [jnp.float32] * 5)
    return xla.results_of(m, d, sums, y_m, y_d, counts, dtype=params["dtype"], return_state=params["return_state"])


def _kl_divergence_vjp(plan: DivergencePlan, x, y, where, scale, y_scale, m, d, y_m, y_d, **numbers):
    """Computes `(a * (u - v) + b) * p * ds/dx` and `(c * q - a * p) * dt/dy`, those that are asked for."""
    by, of_scores = plan.problem.params["by"], plan.problem.params.get("of_scores", False)

    def body(tile, x, y, m, d, y_m, y_d, a, b, c, inside, where, scale, y_scale):
        if where is not None:  # rows with nothing to see
            d, y_d = jnp.where(d != 0, d, 1), jnp.where(y_d != 0, y_d, 1)
        (scores, size), (others, y_size) = _directed(tile, x, y, inside, where, scale, y_scale)
        size, y_size = (None if of is None else tile.along(of) for of in (size, y_size))
        m, y_m = tile.along(m), tile.along(y_m)

        def factor(number, total, slope):
            return tile.along(number / total if slope is None or of_scores else number / total * slope)

        of_difference, of_weight = factor(a, d, scale), factor(b, d, scale)
        of_other, of_less = factor(c, y_d, y_scale), factor(a, d, y_scale)
        nothing = tile.along(0 / d)  # NaN in a row of nothing except -inf

        def gradients(score, other):
            u = online.exponents(score, m, axis=(), scale=size)
            v = online.exponents(other, y_m, axis=(), scale=y_size)
            weight, found = jnp.exp(u), {}
            if "x" in by:
                slope = of_difference * (u - v) + of_weight
                found["x"] = weight * jnp.where(weight != 0, slope, nothing)
            if "y" in by:
                found["y"] = of_other * jnp.exp(v) - of_less * weight
            return [found[name] for name in by]

        return together(gradients, len(by), scores, others)

    return _launch_vjp(plan, "kl_divergence_vjp", body, (x, y, where, scale, y_scale), (m, d, y_m, y_d), numbers)


def _js_divergence(plan: DivergencePlan, x, y, where, scale, y_scale, counts):
    """Computes the divergence, and if asked for the states of both rows and both divergences from the mixture."""
    params = plan.problem.params

    def body(tile, x, y, inside, where, scale, y_scale):
        (scores, size), (others, y_size) = _directed(tile, x, y, inside, where, scale, y_scale)
        state, other = tile.merge_both(*tile.lift_both(scores, others, size, y_size), size, y_size)
        log_p, log_q = _log_weights(tile, state.m, state.d, size), _log_weights(tile, other.m, other.d, y_size)
        sums = tile.sum_both(_terms(params["weight"], log_p, log_q, scores, others), exchange=1)
        return [online.shift(state.m), state.d, online.shift(other.m), other.d, *(_LN2 * total for total in sums)]

    operands = x, y, where, scale, y_scale
    m, d, y_m, y_d, sums, y_sums = _launch(plan, "js_divergence_forward", body, operands, {}, [jnp.float32] * 6)
    options = {name: params[name] for name in ("dtype", "weight", "return_state")}
    return xla.results_of_mixture(m, d, y_m, y_d, sums, y_sums, counts, **options)


def _js_divergence_sums(plan: DivergencePlan, states, x, y, where, scale, y_scale):
    """Computes both divergences from the mixture, from states of rows."""
    weight = plan.problem.params["weight"]

    def body(tile, x, y, m, d, y_m, y_d, inside, where, scale, y_scale):
        (scores, size), (others, y_size) = _directed(tile, x, y, inside, where, scale, y_scale)
        log_p, log_q = _log_weights(tile, m, d, size), _log_weights(tile, y_m, y_d, y_size)
        return [_LN2 * total for total in tile.sum_both(_terms(weight, log_p, log_q, scores, others))]

    of_rows = _per_row(dict(zip(("m", "d", "y_m", "y_d"), states, strict=True)))
    return _launch(plan, "js_divergence_sums", body, (x, y, where, scale, y_scale), of_rows, [jnp.float32] * 2)


def _terms(weight, log_p, log_q, scores, others):
    """Returns what each element adds to both sums, in base 2, as a function of a step."""

    def terms(step):
        p, q, of_p, of_q = _shares(weight, log_p(scores(step)), log_q(others(step)))
        return p * of_p, q * of_q

    return terms


def _js_divergence_vjp(plan: DivergencePlan, x, y, where, scale, y_scale, m, d, y_m, y_d, **numbers):
    """Computes `(a * w * f + b) * p * ds/dx` and `(a * (1 - w) * g + c) * q * dt/dy`, those that are asked for."""
    params = plan.problem.params
    by, weight, of_scores = params["by"], params["weight"], params.get("of_scores", False)

    def body(tile, x, y, m, d, y_m, y_d, a, b, c, inside, where, scale, y_scale):
        if where is not None:  # rows with nothing to see
            d, y_d = jnp.where(d != 0, d, 1), jnp.where(y_d != 0, y_d, 1)
        (scores, size), (others, y_size) = _directed(tile, x, y, inside, where, scale, y_scale)
        log_p, log_q = _log_weights(tile, m, d, size), _log_weights(tile, y_m, y_d, y_size)

        def factor(number, slope):
            return tile.along(number if slope is None or of_scores else number * slope)

        factors = {
            "x": (factor(a * (weight * _LN2), scale), factor(b, scale)),
            "y": (factor(a * ((1 - weight) * _LN2), y_scale), factor(c, y_scale)),
        }

        def gradients(score, other):
            p, q, of_p, of_q = _shares(weight, log_p(score), log_q(other))
            found = {"x": (p, of_p), "y": (q, of_q)}
            return [found[name][0] * (factors[name][0] * found[name][1] + factors[name][1]) for name in by]

        return together(gradients, len(by), scores, others)

    return _launch_vjp(plan, "js_divergence_vjp", body, (x, y, where, scale, y_scale), (m, d, y_m, y_d), numbers)


def _log_weights(tile, m, d, size):
    """Returns a function of scores to the logarithms of their softmax weights in base 2, finite also where a weight is 0."""
    exponents, error = tile.exponents(m, size)
    error, total = tile.along(error), tile.along(jnp.log2(d))  # not their sum: the error may be 64, and would round it
    return lambda scores: online.bounded(exponents(scores) - error - total)


def _shares(weight, log_p, log_q):
    """Returns `p` and `q`, and the logarithms of their quotients by the mixture, from logarithms in base 2.

    The lesser weight is a part of the greater one, so that three of the instructions that only few units of a multiprocessor
    execute are enough.
    """
    shares: Any = xla.shares_of_mixture(np.float32(weight))
    distance = log_q - log_p
    is_p = distance < 0  # greater
    part = jnp.exp2(-jnp.abs(distance))
    greater = jnp.exp2(jnp.maximum(log_p, log_q))
    lesser = greater * part
    if weight != 0.5:
        shares = [jnp.where(is_p, *(jnp.full_like(part, each) for each in pair)) for pair in (shares, shares[::-1])]
    above = -jnp.log2(shares[0] + shares[1] * part)
    of_p, of_q = above - jnp.maximum(distance, 0), above + jnp.minimum(distance, 0)
    return jnp.where(is_p, greater, lesser), jnp.where(is_p, lesser, greater), of_p, of_q


_RUN = {
    KL_DIVERGENCE: _kl_divergence,
    KL_DIVERGENCE_VJP: _kl_divergence_vjp,
    JS_DIVERGENCE: _js_divergence,
    JS_DIVERGENCE_VJP: _js_divergence_vjp,
}


def _directed(tile, x, y, inside, where, scale, y_scale):
    """Returns the `directed` scores of both arrays, each with the magnitude of its scale."""
    return directed(tile, x, inside, where, scale), directed(tile, y, inside, where, y_scale)


def _launch_vjp(plan: DivergencePlan, name: str, body, operands, states, numbers) -> list[jax.Array]:
    of_rows = dict(zip(("m", "d", "y_m", "y_d"), states, strict=True))
    of_rows |= {name: jnp.zeros_like(states[1]) if number is None else number for name, number in numbers.items()}
    return _launch(plan, name, body, operands, _per_row(of_rows))


def _per_row(arrays) -> dict[str, PerRow]:
    return {name: PerRow(array, jnp.float32) for name, array in arrays.items()}


def _launch(plan: DivergencePlan, name: str, body, operands, of_rows, per_row=()) -> list[jax.Array]:
    problem, (x, y, where, scale, y_scale) = plan.problem, operands
    arrays: dict[str, RowOperand | None] = {of: Whole(array, -jnp.inf, jnp.float32) for of, array in (("x", x), ("y", y))}
    arrays |= of_rows
    arrays["inside"] = Inside() if problem.rows.needs_end else None
    arrays["where"] = None if where is None else Mask(where)
    arrays |= {"scale": factor_operand(scale), "y_scale": factor_operand(y_scale)}
    kernel = RowKernel(f"{name}_mosaic", body, arrays, problem.rows, problem.written, per_row)
    return rows.launch(kernel, plan.row_plan)
