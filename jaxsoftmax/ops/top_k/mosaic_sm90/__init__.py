"""The k largest entries of rows, their softmax weights, the gradient of these, and samples, on Hopper.

A kernel serves rows of one kind:

long_rows       rows of any length, read in `sweeps` by a block, or the blocks of a cluster; a list of `candidates` has the best
short_rows      many rows of up to 512 columns, such as the experts of a router: a lane, or a few, search a row by a `network`
short_gradient  the gradient of the weights of such rows; that of long rows is the work of softmax's kernel and of XLA's scatter
sampling        samples: `drawing` by noise for the few elements that may be the best, `redrawing` of rows that filters reject
"""

import math
from collections.abc import Callable

from jaxsoftmax._core.implementation import Plan, Refusal
from jaxsoftmax._core.target import Target
from jaxsoftmax.ops.top_k.mosaic_sm90 import short_gradient, short_rows, warp_rows
from jaxsoftmax.ops.top_k.mosaic_sm90.long_rows import LongRowsPlan, plan_long_gradient, plan_long_rows
from jaxsoftmax.ops.top_k.mosaic_sm90.sampling import SamplingPlan, plan_sampling
from jaxsoftmax.ops.top_k.mosaic_sm90.short_gradient import ShortGradientPlan, plan_short_gradient
from jaxsoftmax.ops.top_k.mosaic_sm90.short_rows import ShortRowsPlan, plan_short_rows
from jaxsoftmax.ops.top_k.problem import TopKProblem

DTYPES = ("float32", "bfloat16", "float16", "int32", "uint32", "int16", "uint16", "int8", "uint8")
FLOATS = DTYPES[:3]
MAX_K = 1024  # entries of a row that are found

KernelPlan = LongRowsPlan | ShortRowsPlan | ShortGradientPlan | SamplingPlan


def plan(problem: TopKProblem, target: Target) -> Plan | Refusal:
    """Plans an operation of this family."""
    name = problem.operation.name
    if name not in _PLANNERS:
        return Refusal(f"it has no kernel for {name}", lacks_kernel=True)
    if problem.devices:
        return Refusal("it does not merge over devices")
    return _PLANNERS[name](problem, target)


def _plan_largest(problem: TopKProblem, target: Target) -> Plan | Refusal:
    """Plans `top_k` or `softmax_top_k`."""
    served = DTYPES if problem.operation.name == "top_k" else FLOATS
    if (reason := _refused_dtypes(problem, ["x"], served) or _refused_rows(problem)) is not None:
        return Refusal(reason)
    if not 1 <= problem.k <= MAX_K:
        return Refusal(f"k must be from 1 to {MAX_K}, got {problem.k}")
    result = plan_short_rows(problem) if short_rows.serves(problem) else plan_long_rows(problem, target)
    return _unless_refused(result, target, _slower_search(problem))


def _plan_samples(problem: TopKProblem, target: Target) -> Plan | Refusal:
    """Plans `categorical`."""
    if "top_k" in problem.operands:  # the k largest are found first, and XLA does the rest, if k is small enough for that
        return Refusal("it takes no top_k", lacks_kernel=True)
    if (reason := _refused_dtypes(problem, ["x"], FLOATS) or _refused_rows(problem)) is not None:
        return Refusal(reason)
    if "where" in problem.operands:
        return Refusal("it takes no where")
    if problem.is_product and not _is_plain_draw(problem):
        return Refusal("with a factor it takes no filters")
    if problem.is_rounded_product and problem.needs_state:  # log-probabilities are those of the rounded scores
        return Refusal("with a product of 16 bits it gives no state")
    return _unless_refused(plan_sampling(problem, target), target, _slower_samples(problem))


def _plan_gradient(problem: TopKProblem, target: Target) -> Plan | Refusal:
    """Plans `softmax_top_k_vjp`."""
    is_short = short_gradient.serves(problem)
    lacks_kernel = problem.ignores_rows and not is_short
    if (reason := _refused_dtypes(problem, ["x", "c", "weights"], FLOATS) or _refused_row_number(problem)) is not None:
        return Refusal(reason, lacks_kernel=lacks_kernel)
    if is_short:
        return _unless_refused(plan_short_gradient(problem), target)
    if not lacks_kernel:
        return plan_long_gradient(problem, target)
    rows = f"rows of up to {warp_rows.MAX_COLS} columns that are whole vectors"
    needs = f"its kernel is for {rows}, k up to {warp_rows.MAX_K}, no where and no scale"
    return Refusal(f"{needs}, got {problem.cols} columns and k {problem.k}", lacks_kernel=True)


_PLANNERS: dict[str, Callable[[TopKProblem, Target], Plan | Refusal]] = {
    "top_k": _plan_largest,
    "softmax_top_k": _plan_largest,
    "softmax_top_k_vjp": _plan_gradient,
    "categorical": _plan_samples,
}


# What is refused.


def _refused_dtypes(problem: TopKProblem, names: list[str], served: tuple[str, ...]) -> str | None:
    """Says why operands of these names, or the result, have a dtype that is not served, or returns None."""
    dtypes = [problem.operands[name].dtype.name for name in names if name in problem.operands]
    dtypes += [problem.dtype.name] if "dtype" in problem.params else []
    if all(name in served for name in dtypes):
        return None
    return f"dtypes must be among {', '.join(served)}, got {' and '.join(dict.fromkeys(dtypes))}"


def _refused_rows(problem: TopKProblem) -> str | None:
    """Says why rows are too long, or too many, or returns None."""
    if not 1 <= problem.cols < 2**30:
        return f"a row must have from 1 to {2**30 - 1} entries, got {problem.cols}"
    return _refused_row_number(problem)


def _refused_row_number(problem: TopKProblem) -> str | None:
    if not 1 <= problem.rows < 2**31:
        return f"there must be from 1 to {2**31 - 1} rows, got {problem.rows}"
    return None


def _unless_refused(result: KernelPlan | Refusal, target: Target, reason: str | None = None) -> Plan | Refusal:
    """Returns a plan, or a refusal if a block has too little shared memory, or there is a reason why it should be slower."""
    if isinstance(result, Refusal):
        return result
    if result.shared_memory > target.shared_memory:
        return Refusal(f"it needs {result.shared_memory} bytes of shared memory in a block, of {target.shared_memory}")
    return result if reason is None else Refusal(reason, result)


# What is slower.


def _slower_search(problem: TopKProblem) -> str | None:
    """Says why XLA should be faster at a search for the largest entry alone, which it does without a sort, or returns None."""
    if problem.operation.name != "top_k" or problem.k > 1 or problem.params["return_state"]:
        return None
    if "x" in problem.fused:
        return _computed_with_producer(problem)
    return "XLA's argmax is faster at so few elements" if problem.rows * problem.cols < 2**25 else None


def _slower_samples(problem: TopKProblem) -> str | None:
    """Says why XLA should be faster at samples, or returns None."""
    if math.prod(problem.operands["x"].shape[:-1]) < problem.rows:
        return "the kernel would have a copy of the logits for each of their samples"
    return _computed_with_producer(problem) if _is_plain_draw(problem) and "x" in problem.fused else None


def _is_plain_draw(problem: TopKProblem) -> bool:
    """Tells whether `categorical` draws among all entries: one kernel then reads the row, once."""
    return problem.operands.keys().isdisjoint(("top_p", "min_p"))


def _computed_with_producer(problem: TopKProblem) -> str:
    return f"XLA computes {problem.operation.name} together with what produces its operand, which then is never in memory"
