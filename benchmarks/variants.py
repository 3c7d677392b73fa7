"""Times attention with other settings of its kernels on Hopper, beside those that the library chooses and FlashAttention-3.

python -m benchmarks.variants --only ' forward .*x16x128 causal=1$' 'keys64=forward: block_kv=64, stages=4'
python -m benchmarks.variants --only ' forward .*x16x128$' 'product=forward: correction=FROM_PRODUCT'
python -m benchmarks.variants --sustained --only ... 'stages=backward: stages=(2, 2)'

A variant is a name, the kernel, and what differs in its `ForwardConfig` or `BackwardConfig`. Values are checked as those of
other benchmarks are, so a variant that is wrong is left out by name. Launches are cool, as in `attention_cool`, or with
`--sustained` turns, as in `attention_sustained`. No result file is touched.
"""

import argparse
import ast
import contextlib
import functools
import re
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from benchmarks import harness, sustained
from benchmarks.cells import Cell, Contender
from jaxsoftmax.ops.attention.mosaic_sm90 import backward_plan, forward_plan

_LOCK = threading.Lock()  # one program is lowered at a time: a variant changes a module meanwhile


@dataclass(frozen=True)
class Variant:
    """Settings that differ from those that the library chooses, by name.

    `kernel` is "forward" or "backward".
    """

    name: str
    kernel: str
    settings: dict[str, Any]

    @contextlib.contextmanager
    def chosen(self) -> Iterator[None]:
        """A context in which the library chooses these settings."""
        module = {"forward": forward_plan, "backward": backward_plan}[self.kernel]
        function = f"{self.kernel}_config"
        choose = getattr(module, function)

        @functools.wraps(choose)
        def changed(*args, **options):
            config = choose(*args, **options)
            if self.kernel == "forward":
                return replace(config, **self.settings)
            size, config = config
            return size, replace(config, **self.settings)

        setattr(module, function, changed)
        try:
            yield
        finally:
            setattr(module, function, choose)


def parse(text: str) -> Variant:
    """Reads a variant such as `wide=forward: block_kv=192, own_output=False`.

    Raises:
      ValueError: it is none; with what it must be.
    """
    match = re.fullmatch(r"([\w.-]+)=(forward|backward):(.*)", text.strip())
    if match is None:
        raise ValueError(f"a variant must be NAME=forward: FIELD=VALUE, ... or NAME=backward: ..., got {text!r}")
    name, kernel, fields = match.groups()
    config = {"forward": forward_plan.ForwardConfig, "backward": backward_plan.BackwardConfig}[kernel]
    settings = {}
    try:
        call = ast.parse(f"f({fields})", mode="eval").body
        assert isinstance(call, ast.Call)
        assert not call.args
        for keyword in call.keywords:
            settings[str(keyword.arg)] = _value(keyword.value)
    except (SyntaxError, ValueError, AssertionError):
        raise ValueError(f"{name}: the settings must be FIELD=VALUE, ..., got {fields!r}") from None
    if unknown := settings.keys() - config.__dataclass_fields__.keys():
        known = ", ".join(config.__dataclass_fields__)
        raise ValueError(f"{name}: no setting {', '.join(sorted(unknown))} of {config.__name__}; choose from {known}")
    return Variant(name, kernel, settings)


def _value(node: ast.expr) -> Any:
    """Returns a literal, or the member of `Correction` that a name stands for."""
    if isinstance(node, ast.Name) and node.id in forward_plan.Correction.__members__:
        return forward_plan.Correction[node.id]
    return ast.literal_eval(node)


class _Compiled:
    """A function that is compiled in a context, once for arguments of the same types."""

    def __init__(self, function: Callable[..., Any], context: Callable[[], contextlib.AbstractContextManager[None]]):
        self._function, self._context = function, context
        self._compiled: dict[Any, Callable[..., Any]] = {}

    def __call__(self, *args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        if any(isinstance(leaf, jax.core.Tracer) for leaf in leaves):  # `explain` looks at the function
            return self._function(*args)
        types = tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        if types not in self._compiled:
            with _LOCK, self._context():
                lowered = jax.jit(self._function).lower(*args)
            self._compiled[types] = lowered.compile()
        return self._compiled[types](*args)


def with_variants(cell: Cell, variants: Sequence[Variant]) -> Cell:
    """Returns a cell whose contenders are ours, variants of ours, and the cell's peers."""
    ours, *peers = cell.contenders

    def compiled(contender: Contender, context: Callable[[], Any]) -> Contender:
        return replace(contender, build=lambda: _Compiled(contender.build(), context))

    contenders = [compiled(contender, contextlib.nullcontext) for contender in (ours, *peers)]
    contenders += [replace(compiled(ours, variant.chosen), name=variant.name) for variant in variants]
    return replace(cell, contenders=tuple(contenders), jitted=False)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status: 1 if ours is wrong, 2 for what cannot be done."""
    parser = argparse.ArgumentParser("python -m benchmarks.variants", description=__doc__.splitlines()[0])
    parser.add_argument("variants", nargs="*", metavar="NAME=KERNEL: FIELD=VALUE, ...")
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="a part of the cells")
    parser.add_argument("--sustained", action="store_true", help="run back to back, and measure the energy of a call")
    parser.add_argument("--turn", type=float, default=sustained.TURN, metavar="SECONDS", help="of a turn, with --sustained")
    options = parser.parse_args(argv)
    try:
        variants = [parse(text) for text in options.variants]
    except ValueError as problem:
        parser.error(str(problem))
    cells = [cell for cell in sustained.cool_cells() if options.only.search(cell.name)]
    if not cells:
        parser.error(f"argument --only: no cell matches {options.only.pattern!r}")
    gpu = harness.gpu_name()
    if gpu is None:
        print("JAX sees no GPU, and there is nothing to measure without one", file=sys.stderr)
        return 2
    effort = sustained.effort(options.turn) if options.sustained else sustained.cool_effort(sustained.PAUSE)
    run = harness.Run(gpu, harness.commit() or "unknown", lambda row: None, effort=effort)
    run.measure(with_variants(cell, variants) for cell in cells)
    for problem in run.problems:
        print(problem, file=sys.stderr)
    return int(bool(run.problems))


if __name__ == "__main__":
    sys.exit(main())
