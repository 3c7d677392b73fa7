"""One call as one compiled program with the decisions of its lowering, errors in words, and the device that runs programs."""

import itertools
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxsoftmax._core.choose import Decision, check_implementation, choose, recorded
from jaxsoftmax.ops import OPS

IMPLEMENTATIONS = tuple(dict.fromkeys(itertools.chain(*(op.implementations for op in OPS.values()))))
KERNELS = frozenset(IMPLEMENTATIONS) - {"xla"}
# The functions that raise if an implementation cannot run a call, or does not exist for its op.
_REFUSING = {choose.__code__, check_implementation.__code__}


@dataclass(frozen=True)
class Compiled:
    """A program and the implementations that run in it.

    Attributes:
      program: the compiled function.
      decisions: one for each primitive, in the order of the program.
    """

    program: Callable[..., Any]
    decisions: Sequence[Decision]

    @property
    def ran(self) -> dict[str, str]:
        """The implementation of each primitive."""
        return {decision.primitive: decision.implementation for decision in self.decisions}

    @property
    def implementation(self) -> str:
        """The implementations, as result files name them: `mosaic`, or `mosaic+xla` where a derivative has no kernel."""
        return "+".join(dict.fromkeys(decision.implementation for decision in self.decisions)) or "xla"

    @property
    def refusals(self) -> list[str]:
        """Says for each primitive on the reference why no kernel runs."""
        return [
            f"{decision.primitive}: " + "; ".join(f"not {name}: {reason}" for name, reason in decision.refusals)
            for decision in self.decisions
            if decision.implementation == "xla"
        ]


def compiled(f: Callable[..., Any], *args: Any) -> Compiled:
    """Traces, lowers and compiles `f(*args)`, and records the decisions as `explain` does.

    Raises:
      NotImplementedError: `f` forces an implementation that cannot run.
    """
    decisions: list[Decision] = []
    with recorded(decisions):
        # A new function, so that no cached lowering is reused.
        lowered = jax.jit(lambda *args: f(*args)).lower(*args)
    return Compiled(lowered.compile(), decisions)


def is_refusal(problem: BaseException) -> bool:
    """Returns True if a call raised because its implementation cannot run it, or does not exist for its op.

    The function that raised tells such errors from those of JAX about a program that it cannot lower.
    """
    frames = [frame for frame, _ in traceback.walk_tb(problem.__traceback__)]
    return bool(frames) and frames[-1].f_code in _REFUSING


def in_words(problem: BaseException) -> str:
    """Returns an error as one line, without the name of the user's home folder."""
    return f"{type(problem).__name__}: {problem}".splitlines()[0].replace(str(Path.home()), "~")


def backend() -> tuple[str | None, str]:
    """Returns the platform that JAX uses by default, and None with the reason if JAX cannot use the one it was told to use."""
    try:
        return jax.default_backend(), ""
    except (AssertionError, RuntimeError) as problem:
        reason = str(problem).partition("\n")[0] or "no plugin for it, or no such device"
        return None, f"JAX cannot use the platform that it was told to use, {jax.config.jax_platforms!r}: {reason}"


def gpu() -> jax.Device | None:
    """Returns the NVIDIA GPU that JAX uses by default, or None."""
    device = jax.devices()[0]
    return device if device.platform == "gpu" and hasattr(device, "compute_capability") else None
