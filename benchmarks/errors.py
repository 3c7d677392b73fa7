"""Numerical errors of the ops and of their counterparts in `jax.nn` and optax, beside float64, on the device that JAX sees.

python -m benchmarks.errors                      print a table in Markdown
python -m benchmarks.errors --csv FILE           write each error to a new file too
python -m benchmarks.errors --only 'attention'   measure a part: matched in 'op dtype inputs'
python -m benchmarks.errors --show FILE          print the table of a file that was written before

Each op runs once with its gradient. The truth is the same computation in float64, on the CPU, of the operands as their dtype
holds them. An error is a difference to the truth in units in the last place of the operands' dtype, at a magnitude that depends
on the op (`Op.magnitude`). The table has the largest error and the mean of all, and "-" where a counterpart does not run.
"""

import argparse
import csv
import functools
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax

import jaxsoftmax

DTYPES = ("float32", "bfloat16", "float16")
ROWS, LONG_ROWS = (64, 1024), (4, 131072)
ATTENTION, LONG_ATTENTION = (1, 512, 4, 64), (1, 4096, 1, 64)
ROW_INPUTS = ("ordinary", "outliers", "offset", "long rows")
OURS = "jaxsoftmax"


def attention_of_jax(query, key, value):
    """Computes causal attention as `jax.nn` does by default."""
    return jax.nn.dot_product_attention(query, key, value, is_causal=True)


def attention(query, key, value):
    """Computes causal attention as this library does."""
    return jaxsoftmax.dot_product_attention(query, key, value, is_causal=True)


def attention_written_out(query, key, value):
    """Computes causal attention in the dtype of its operands, which is float64 for the truth."""
    scores = jnp.einsum("btnh,bsnh->bnts", query, key) / np.sqrt(query.shape[-1])
    causal = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(scores, where=causal), value)


def labels_of(logits):
    """Returns a label for each row."""
    rows, classes = logits.shape
    return jnp.arange(rows) * 7919 % classes


@dataclass(frozen=True)
class Op:
    """A function, its counterpart, and how its error counts.

    Attributes:
      name: the name of the public function.
      ours: the function of this library, of floating operands alone.
      theirs: its counterpart.
      peer: the library of the counterpart.
      truth: the function that is exact in float64.
      magnitude: where a unit in the last place is taken for the output: at the "value" itself, at the larger one of the
        "value or 1", or at the largest value of the "row". For a gradient it is the largest value of the array.
    """

    name: str
    ours: Callable[..., jax.Array]
    theirs: Callable[..., jax.Array]
    peer: str
    truth: Callable[..., jax.Array]
    magnitude: Literal["value", "value or 1", "row"]


def _loss(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda logits: function(logits, labels_of(logits))


OPS = (
    Op("softmax", jaxsoftmax.softmax, jax.nn.softmax, "jax.nn", jax.nn.softmax, "value"),
    Op("log_softmax", jaxsoftmax.log_softmax, jax.nn.log_softmax, "jax.nn", jax.nn.log_softmax, "value or 1"),
    Op(
        "logsumexp",
        functools.partial(jaxsoftmax.logsumexp, axis=-1),
        functools.partial(jax.nn.logsumexp, axis=-1),
        "jax.nn",
        functools.partial(jax.nn.logsumexp, axis=-1),
        "value or 1",
    ),
    Op(
        "cross_entropy",
        _loss(jaxsoftmax.cross_entropy),
        _loss(optax.softmax_cross_entropy_with_integer_labels),
        "optax",
        _loss(optax.softmax_cross_entropy_with_integer_labels),
        "value or 1",
    ),
    Op("dot_product_attention", attention, attention_of_jax, "jax.nn", attention_written_out, "row"),
)


@dataclass(frozen=True)
class Error:
    """The error of one output of one contender.

    Attributes:
      device: what JAX calls the device.
      op: the name of the op, with ", gradient" for its cotangents.
      dtype: the dtype of the operands.
      inputs: one of `ROW_INPUTS`.
      contender: `OURS`, or the library of the counterpart.
      implementation: what ran the op, or its gradient: `mosaic`, `triton` or `xla` if it is ours, else the contender.
      largest: the largest error, in units in the last place of `dtype`.
      mean: the mean error.
    """

    device: str
    op: str
    dtype: str
    inputs: str
    contender: str
    implementation: str
    largest: float
    mean: float


@dataclass(frozen=True)
class Case:
    """An op with operands: all contenders get the same."""

    op: Op
    dtype: str
    inputs: str

    @property
    def name(self) -> str:
        return f"{self.op.name} {self.dtype} {self.inputs}"

    def operands(self) -> list[np.ndarray]:
        """Returns the operands, rounded to the dtype."""
        rng = np.random.default_rng(0)
        long = self.inputs == "long rows"
        if self.op.name != "dot_product_attention":
            return [self._spread(rng, 3 * rng.standard_normal(LONG_ROWS if long else ROWS), 1e4)]
        shape = LONG_ATTENTION if long else ATTENTION
        query, key, value = (rng.standard_normal(shape) for _ in range(3))
        if self.inputs == "outliers":
            query = self._spread(rng, query, 0)
        return [query.astype(self.dtype), self._spread(rng, key, 30), value.astype(self.dtype)]

    def _spread(self, rng, x, offset):
        """Makes the array as hurtful as `inputs` says: ten times as large at one entry of 256, or far from 0."""
        if self.inputs == "outliers":
            x = np.where(rng.random(x.shape) < 1 / 256, 10 * x, x)
        return (x + offset if self.inputs == "offset" else x).astype(self.dtype)

    def cotangent(self) -> np.ndarray:
        """Returns the cotangent of the output, the same for all contenders."""
        shape = jax.eval_shape(self.op.truth, *self.operands()).shape
        return np.random.default_rng(1).standard_normal(shape).astype(self.dtype)


def cases() -> list[Case]:
    return [Case(op, dtype, inputs) for op in OPS for dtype in DTYPES for inputs in ROW_INPUTS]


def with_gradient(function: Callable[..., jax.Array]) -> Callable[..., Any]:
    """Returns a function of operands and a cotangent that gives the output and the cotangents of the operands."""

    def both(operands, cotangent):
        out, transpose = jax.vjp(function, *operands)
        return out, transpose(cotangent.astype(out.dtype))

    return both


def truth_of(case: Case) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the output and the cotangents of the operands in float64."""
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        operands = [np.asarray(array, np.float64) for array in case.operands()]
        out, cotangents = jax.jit(with_gradient(case.op.truth))(operands, np.asarray(case.cotangent(), np.float64))
        return np.asarray(out), [np.asarray(array) for array in cotangents]


def in_units(actual: np.ndarray, truth: np.ndarray, dtype: str, magnitude: str) -> np.ndarray:
    """Returns errors in units in the last place of a dtype."""
    info = ml_dtypes.finfo(dtype)
    size = np.abs(truth)
    match magnitude:
        case "row":
            size = size.max(-1, keepdims=True)
        case "array":
            size = size.max()
        case "value or 1":
            size = np.maximum(size, 1)
    least = max(float(info.smallest_normal), 2.0**-100)  # what is smaller may be flushed to 0 on its way
    unit = 2.0 ** np.floor(np.log2(np.maximum(size, least))) * float(info.eps)
    errors = np.abs(np.asarray(actual, np.float64) - truth) / unit
    return np.where(np.isnan(errors), np.inf, errors)


def implementations_of(function: Callable[..., Any], *arguments: Any) -> dict[str, str]:
    """Returns which implementations of this library run an op and its gradient, by the suffix of their names."""
    forward, *backward = [decision.implementation for decision in jaxsoftmax.explain(function, *arguments)]
    return {"": forward, ", gradient": "+".join(sorted(set(backward or [forward])))}


def measure(chosen: Sequence[Case]) -> list[Error]:
    """Runs all contenders of the cases and returns their errors."""
    device = jax.devices()[0].device_kind
    programs = {}

    def compiled(case: Case, contender: str) -> Any:
        """Returns a program and what runs its parts."""
        function = with_gradient(case.op.ours if contender == OURS else case.op.theirs)
        arguments = case.operands(), case.cotangent()
        names = implementations_of(function, *arguments) if contender == OURS else dict.fromkeys(("", ", gradient"), contender)
        return jax.jit(function).lower(*arguments).compile(), names

    with ThreadPoolExecutor() as pool:  # most of the time goes into compiling
        for case in chosen:
            for contender in (OURS, case.op.peer):
                key = (case.op.name, case.dtype, case.inputs == "long rows", contender)
                if key not in programs:
                    programs[key] = pool.submit(compiled, case, contender)
        truths = [truth_of(case) for case in chosen]
    found = []
    for case, (out, cotangents) in zip(chosen, truths, strict=True):
        arguments = case.operands(), case.cotangent()
        for contender in (OURS, case.op.peer):
            try:
                run, names = programs[case.op.name, case.dtype, case.inputs == "long rows", contender].result()
            except (ValueError, NotImplementedError, jax.errors.JaxRuntimeError) as problem:
                if contender == OURS:
                    raise
                print(f"{case.name}: {contender} does not run here: {str(problem).splitlines()[0]}", file=sys.stderr)
                continue
            actual_out, actual_cotangents = run(*arguments)
            outputs = {"": [in_units(actual_out, out, case.dtype, case.op.magnitude)]}
            pairs = zip(actual_cotangents, cotangents, strict=True)
            outputs[", gradient"] = [in_units(*pair, case.dtype, "array") for pair in pairs]
            for suffix, errors in outputs.items():
                everything = np.concatenate([array.ravel() for array in errors])
                largest, mean = float(everything.max()), float(everything.mean())
                found.append(
                    Error(device, case.op.name + suffix, case.dtype, case.inputs, contender, names[suffix], largest, mean)
                )
    return found


def table(errors: Sequence[Error]) -> str:
    """Returns a table in Markdown: a line for each op and dtype, and two columns for each kind of inputs."""
    kinds = [kind for kind in ROW_INPUTS if any(error.inputs == kind for error in errors)]
    columns = [f"{kind}: ours | theirs" for kind in kinds]
    lines = ["| | dtype | runs on | " + " | ".join(columns) + " |", "|---|---|---|" + "---|" * (2 * len(kinds))]
    cells = {(error.op, error.dtype, error.inputs, error.contender == OURS): error for error in errors}
    for op, dtype in dict.fromkeys((error.op, error.dtype) for error in errors):
        row = [cells.get((op, dtype, kind, is_ours)) for kind in kinds for is_ours in (True, False)]
        names = dict.fromkeys(error.implementation for error in row if error is not None and error.contender == OURS)
        shown = ["-" if error is None else f"{number(error.largest)}, {number(error.mean)}" for error in row]
        lines.append(f"| {op} | {dtype} | {', '.join(names)} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def number(value: float) -> str:
    """Returns a number with two digits or more, as short as it can be read."""
    if value == 0:
        return "0"
    if value < 0.001:
        return "<0.001"
    return f"{value:.2g}" if value < 100 else f"{value:.0f}" if value < 1e5 else f"{value:.0e}"


def write(path: Path, errors: Sequence[Error]) -> None:
    """Writes errors to a new file."""
    with path.open("x", newline="") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(Error)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(asdict(error) for error in errors)


def read(path: Path) -> list[Error]:
    """Reads a file that `write` has written."""
    with path.open(newline="") as file:
        _, *rows = csv.reader(file)
    return [Error(*row[:6], largest=float(row[6]), mean=float(row[7])) for row in rows]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    parser = argparse.ArgumentParser(
        "python -m benchmarks.errors", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--csv", type=Path, metavar="FILE", help="a new file for the errors")
    parser.add_argument("--only", type=re.compile, metavar="REGEX", help="a part of the cases: matched in 'op dtype inputs'")
    parser.add_argument("--show", type=Path, metavar="FILE", help="a file of errors to print; nothing is measured")
    options = parser.parse_args(argv)
    if options.show is not None:
        errors = read(options.show)
    else:
        if options.csv is not None and options.csv.exists():
            parser.error(f"argument --csv: {options.csv} is there already")
        chosen = [case for case in cases() if options.only is None or options.only.search(case.name)]
        if not chosen:
            parser.error(f"argument --only: no case matches {options.only.pattern!r}")
        errors = measure(chosen)
        if options.csv is not None:
            write(options.csv, errors)
    print(f"{errors[0].device}, largest and mean error in units in the last place of the dtype:\n")
    print(table(errors))
    return 0


if __name__ == "__main__":
    sys.exit(main())
