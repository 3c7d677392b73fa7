"""`python -m jaxsoftmax --check`: runs kernels on the GPU at hand, and holds their results to float64."""

import os
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import jax
import numpy as np

from jaxsoftmax._report import call
from jaxsoftmax._report.cases import Case, all_cases, error, few_cases
from jaxsoftmax._report.progress import Progress

OK, WRONG, REFUSED, RAISED = "ok", "WRONG", "refused", "raised"
BAD = (WRONG, RAISED)
_THREADS = 4  # that lower and compile cases; lowering is Python's work, compiling is not
_NAME, _IMPLEMENTATION, _ERROR = 64, 12, 10  # widths of columns


@dataclass(frozen=True)
class Outcome:
    """The result of a case.

    Attributes:
      case: the name of the case.
      implementation: the implementations that ran, or "-".
      error: the largest error of a result, over its tolerance; None if there is none.
      status: `OK`, `WRONG`, `REFUSED` (no kernel runs this call here, and the reference is right) or `RAISED`.
      reasons: why no kernel runs, or the error that was raised.
    """

    case: str
    implementation: str
    error: float | None
    status: str
    reasons: tuple[str, ...] = ()


def main(implementation: str | None = None) -> int:
    """Runs the check, prints its table, and returns the exit status: 1 if a value is wrong or a call raises."""
    device = call.gpu()
    cases = few_cases() if device is None else all_cases()
    if device is None:
        print(f"JAX sees no NVIDIA GPU ({jax.default_backend()}): a few cases check the reference, and no kernel runs.\n")
    outcomes = run(cases, implementation, on_gpu=device is not None)
    print(table(outcomes))
    return 1 if any(outcome.status in BAD for outcome in outcomes) else 0


def run(cases: Sequence[Case], implementation: str | None = None, *, on_gpu: bool) -> list[Outcome]:
    """Runs cases in their order, while threads compile those to come."""
    progress, outcomes = Progress(len(cases)), []
    pool = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
    try:
        programs = [pool.submit(_compiled, case, implementation) for case in cases]
        for case, program in zip(cases, programs, strict=True):
            outcome = _outcome(case, program, wants_kernel=on_gpu and implementation != "xla")
            outcomes.append(outcome)
            progress.step(case.name, f"{outcome.status} on {outcome.implementation}")
    finally:
        pool.shutdown(cancel_futures=True)  # Ctrl-C waits for no compilation that has not begun
        progress.end()
    return outcomes


def _compiled(case: Case, implementation: str | None) -> call.Compiled:
    return call.compiled(case.build(implementation), case.inputs())


def _outcome(case: Case, program: Future[call.Compiled], *, wants_kernel: bool) -> Outcome:
    try:
        compiled = program.result()
    except Exception as problem:  # whatever a compiler raises is the outcome
        if call.is_refusal(problem):
            return Outcome(case.name, "-", None, REFUSED, (str(problem),))
        return Outcome(case.name, "-", None, RAISED, (call.in_words(problem),))
    try:
        arrays = case.inputs()
        results = [np.asarray(result) for result in compiled.program(arrays)]
        judges = case.judges(compiled.ran, arrays)
        largest = max(error(judge, result) for judge, result in zip(judges, results, strict=True))
    except Exception as problem:
        return Outcome(case.name, compiled.implementation, None, RAISED, (call.in_words(problem),))
    if not largest <= 1:
        return Outcome(case.name, compiled.implementation, largest, WRONG)
    is_refused = wants_kernel and compiled.implementation == "xla"
    reasons = tuple(compiled.refusals) if wants_kernel else ()
    return Outcome(case.name, compiled.implementation, largest, REFUSED if is_refused else OK, reasons)


def table(outcomes: Sequence[Outcome]) -> str:
    """Returns outcomes as a table, the reasons below it, and a last line that counts them."""
    lines = [f"{'case':{_NAME}} {'ran':{_IMPLEMENTATION}} {'error/tol.':>{_ERROR}} result"]
    reasons: dict[str, list[str]] = {}
    for outcome in outcomes:
        number = "" if outcome.error is None else f"{outcome.error:.3g}"
        line = f"{outcome.case[:_NAME]:{_NAME}} {outcome.implementation:{_IMPLEMENTATION}} {number:>{_ERROR}} {outcome.status}"
        lines.append(line.rstrip())
        for reason in outcome.reasons:
            reasons.setdefault(reason, []).append(outcome.case)
    if reasons:
        lines += ["", "where no kernel runs, or none of a derivative, and errors:"]
    for reason, names in reasons.items():
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines += [f"  {reason}", f"      {names[0]}{more}"]
    counts = {status: sum(outcome.status == status for outcome in outcomes) for status in (OK, WRONG, REFUSED, RAISED)}
    kernels = sum(bool(call.KERNELS.intersection(outcome.implementation.split("+"))) for outcome in outcomes)
    words = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    return "\n".join([*lines, "", f"{len(outcomes)} cases: {words}; {kernels} ran a kernel"])
