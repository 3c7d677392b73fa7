"""`python -m jaxsoftmax --bench`: times standard calls beside JAX's own, and writes rows that `python -m benchmarks` reads.

`python -m benchmarks` has the same cells, by name, shape and counts of bytes and operations, and more. It times them likewise:
contenders take turns, a turn is at least ten calls over inputs that pass the cache of the GPU, the time is that of the kernels,
and the median of the turns counts. A value is checked against float64 before it is timed.
"""

import csv
import functools
import io
import itertools
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from jaxsoftmax._core import compat
from jaxsoftmax._report import call, cases, installed, truth
from jaxsoftmax._report.cases import Judge
from jaxsoftmax._report.clock import kernels_us
from jaxsoftmax._report.progress import Progress
from jaxsoftmax._report.rows import COLUMNS, Row, commit, formatted, machine, new_run, now
from jaxsoftmax._report.truth import attention as attention_truth
from jaxsoftmax._report.truth import cross_entropy as losses_truth
from jaxsoftmax._report.truth import top_k as order

OURS = "jaxsoftmax"
_ROUNDS = 5
_CALLS = 10  # of a turn, at least
_CACHE = 4 * 50 * 2**20  # bytes that the inputs of a turn pass: four times the L2 cache of an H200
_MOST_BUFFERS = 64
_GROSS = 0.1  # the relative error from which on a peer computes something else
_SAMPLED = 6  # rows that are compared with float64
_QUERIES = 64  # likewise, the last ones of attention

Clock = Callable[[Callable[[], None], int], float | None]
Pairs = list[tuple[Judge, Any]]


@dataclass(frozen=True)
class Contender:
    """One way to compute a cell.

    Attributes:
      name: `OURS` or the name of the peer.
      function: the function that is timed.
      prepare: turns a cell's inputs into the arguments of the function, before any timing.
      is_checked: whether its results are compared with the truth of the cell; not those of another random generator.
    """

    name: str
    function: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs
    is_checked: bool = True


@dataclass(frozen=True)
class Cell:
    """One line of the table; the first seven attributes are those of `Row`.

    Attributes:
      inputs: makes the inputs from a key.
      contenders: takes the name of an implementation, or None, and returns who computes the cell, ours first.
      pairs: takes inputs, the leaves of a result, and whether a kernel made it; returns parts of the result with their truths.
    """

    op: str
    pass_: str
    dtype: str
    shape: tuple[int, ...]
    options: str
    bytes: int
    flops: int
    inputs: Callable[[Any], tuple[Any, ...]]
    contenders: Callable[[str | None], list[Contender]]
    pairs: Callable[[Sequence[Any], Sequence[Any], bool], Pairs]

    @property
    def shape_text(self) -> str:
        return "x".join(map(str, self.shape))

    @property
    def name(self) -> str:
        """Such as `softmax forward float32 32768x4096`."""
        return " ".join(filter(None, (self.op, self.pass_, self.dtype, self.shape_text, self.options)))


@dataclass
class Entrant:
    """A contender that takes part: its program, the arguments of each call, its error, and its times in microseconds."""

    name: str
    implementation: str
    program: Callable[..., Any]
    arguments: list[tuple[Any, ...]]
    error: float | None
    times: list[float] = field(default_factory=list)


# The run.


def main(
    path: Path | None = None,
    implementation: str | None = None,
    say: Callable[[str], None] = print,
) -> int:
    """Measures, prints the table and writes the file; returns the exit status: 1 if a value is wrong or there is no file."""
    device = call.gpu()
    if device is None:
        say(f"JAX sees no NVIDIA GPU ({jax.default_backend()}): nothing to measure, and no file.")
        return 0
    path = path or Path(f"jaxsoftmax_{machine(device.device_kind)}.csv")
    run = Run(device.device_kind, implementation, say, kernel_clock)
    run.measure(all_cells())
    say(table(run.rows))
    if not run.rows:
        say("nothing was measured, and no file was written")
        return 1
    try:
        write(path, run.rows)
    except OSError as problem:
        say(f"{path} was not written: {problem}")
        return 1
    say(f"\n{len(run.rows)} rows are in {path}, which may be sent as it is.")
    return 1 if run.is_wrong else 0


def kernel_clock(run: Callable[[], None], calls: int) -> float | None:
    """Returns the microseconds of the kernels of one call, or None if there are none.

    Raises:
      ImportError: this jaxlib has no CUPTI.
    """
    return kernels_us(compat.cupti(), run, calls)


class Run:
    """The measurements of one process.

    Attributes:
      rows: what was measured.
      is_wrong: whether a result of ours was wrong, or a call of ours raised. It has no row.
    """

    def __init__(self, gpu: str, implementation: str | None, say: Callable[[str], None], clock: Clock):
        self.rows: list[Row] = []
        self.is_wrong = False
        self._gpu, self._implementation, self._say, self._clock = gpu, implementation, say, clock
        self._id, self._copy_speed = new_run(), {}
        self._commit = commit(Path(__file__).parents[2]) or f"v{jaxsoftmax.__version__}"

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measures cells in their order; copies come before the cells that are compared with them."""
        progress = Progress(len(cells))
        for cell in cells:
            before = len(self.rows)
            try:
                self._measure(cell)
            except Exception as problem:  # too little memory for the inputs, say
                self._say(f"{cell.name}: left out: {call.in_words(problem)[:200]}")
            progress.step(cell.name, ", ".join(f"{row.implementation} {row.us:.1f} us" for row in self.rows[before:]))
        progress.end()

    def _measure(self, cell: Cell) -> None:
        key = jax.random.key(0)
        buffers = max(1, min(_MOST_BUFFERS, math.ceil(_CACHE / cell.bytes)))
        inputs = jax.block_until_ready([cell.inputs(jax.random.fold_in(key, index)) for index in range(buffers)])
        entrants = [self._tried(cell, c, functools.partial(self._enter, cell, c, inputs)) for c in self._contenders(cell)]
        entrants = [entrant for entrant in entrants if entrant is not None]
        for _ in range(1 + _ROUNDS):
            entrants = [e for e in entrants if self._tried(cell, e, functools.partial(self._take_turn, e)) is not None]
        self.rows += [self._row(cell, entrant) for entrant in entrants]

    def _contenders(self, cell: Cell) -> list[Contender]:
        return cell.contenders(self._implementation)

    def _tried(self, cell: Cell, who: Contender | Entrant, step: Callable[[], Any]) -> Any:
        """Returns `step()`, or None if it raises; says why, as whatever a compiler raises is the reason to leave it out."""
        try:
            return step()
        except Exception as problem:
            self._say(f"{cell.name}: {who.name} left out: {call.in_words(problem)[:200]}")
            is_refused = call.is_refusal(problem) or "RESOURCE_EXHAUSTED" in str(problem)
            self.is_wrong |= who.name == OURS and not is_refused
            return None

    def _enter(self, cell: Cell, contender: Contender, inputs: list[tuple[Any, ...]]) -> Entrant | None:
        """Compiles a contender and checks its values."""
        arguments = [jax.block_until_ready(contender.prepare(*buffer)) for buffer in inputs]
        compiled = call.compiled(contender.function, *arguments[0])
        output = jax.tree.leaves(jax.block_until_ready(compiled.program(*arguments[0])))
        implementation = compiled.implementation if contender.name == OURS else contender.name
        error = None
        if contender.is_checked:
            error = self._checked(cell, contender, inputs[0], output, is_kernel="xla" not in implementation.split("+"))
            if error is None:
                return None
        is_yardstick = cell.op == "copy"
        return Entrant(contender.name, implementation, compiled.program, arguments, None if is_yardstick else error)

    def _checked(self, cell, contender, inputs, output, *, is_kernel: bool) -> float | None:
        """Returns the largest fraction of the budget that a result uses, or None if it is wrong."""
        is_ours = contender.name == OURS
        pairs = [(judge, np.asarray(part)) for judge, part in cell.pairs(inputs, output, is_ours and is_kernel)]
        error = max(cases.error(judge, part) for judge, part in pairs)
        if is_ours and not error <= 1:
            self.is_wrong = True
            self._say(f"{cell.name}: WRONG: its error is {error:.3g} times the tolerance; it is not timed")
            return None
        relative = max(_relative(judge, part) for judge, part in pairs)
        if not is_ours and not relative <= _GROSS:
            self._say(f"{cell.name}: {contender.name} left out: its relative error is {relative:.2g}")
            return None
        return error

    def _take_turn(self, entrant: Entrant) -> bool:
        """Times at least `_CALLS` calls. The first turn only warms up."""
        calls = max(_CALLS, len(entrant.arguments))
        arguments = itertools.islice(itertools.cycle(entrant.arguments), calls)

        def run() -> None:
            result = None
            for args in arguments:
                result = entrant.program(*args)
            jax.block_until_ready(result)

        us = self._clock(run, calls)
        if us is None:
            raise RuntimeError("CUPTI saw no kernel")
        entrant.times.append(us)
        return True

    def _row(self, cell: Cell, entrant: Entrant) -> Row:
        entrant.times = entrant.times[1:]
        us = statistics.median(entrant.times)
        if cell.op == "copy":
            self._copy_speed[cell.dtype] = cell.bytes / us
        copy_speed = self._copy_speed.get(cell.dtype)
        return Row(
            run=self._id,
            date=now(),
            gpu=self._gpu,
            jax=installed.version("jax") or "",
            commit=self._commit,
            op=cell.op,
            pass_=cell.pass_,
            dtype=cell.dtype,
            shape=cell.shape_text,
            options=cell.options,
            implementation=entrant.implementation,
            us=us,
            bytes=cell.bytes,
            flops=cell.flops,
            copy_share=cell.bytes / us / copy_speed if copy_speed else None,
            error=entrant.error,
            least_us=min(entrant.times),
        )


def _relative(judge: Judge, part: np.ndarray) -> float:
    """Returns the relative error of a part, by the norm of its finite values."""
    if not isinstance(judge, truth.Truth):
        return judge(part) * _GROSS
    finite = np.isfinite(judge.value)
    value, actual = judge.value[finite], truth.to64(part)[finite]
    return float(np.linalg.norm(actual - value) / max(np.linalg.norm(value), truth.TINY))


def wall_clock(run: Callable[[], None], calls: int) -> float:
    """Returns the microseconds of one call on the wall clock, which needs no GPU."""
    start = time.perf_counter()
    run()
    return 1e6 * (time.perf_counter() - start) / calls


# What is printed and written.


def is_ours(row: Row) -> bool:
    """Tells whether a row is of this library."""
    return {"mosaic", "triton", "xla"}.issuperset(row.implementation.split("+"))


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a table in Markdown: a line for each cell, with the times of peers over ours."""
    header = "| call | runs on | us | fastest | GB/s | TFLOP/s | of a copy | error/tol. | peers: time over ours |"
    lines = [header, "|---|---|---|---|---|---|---|---|---|"]
    for cell, group in itertools.groupby(rows, key=lambda row: row.cell):
        rows_of_cell = list(group)
        ours = next((row for row in rows_of_cell if is_ours(row) or row.op == "copy"), None)
        if ours is None:
            continue
        peers = ", ".join(f"{row.implementation} {row.us / ours.us:.2f}" for row in rows_of_cell if row is not ours)
        share = "" if ours.copy_share is None else f"{ours.copy_share:.2f}"
        cells = (
            " ".join(filter(None, cell)),
            ours.implementation,
            f"{ours.us:.1f}",
            f"{ours.fastest_us:.1f}",
            f"{ours.speed / 1e3:.0f}",
            f"{ours.tflops:.0f}" if ours.flops else "",
            share,
            "" if ours.error is None else f"{ours.error:.2f}",
            peers,
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Writes a result file: a temporary file takes its name when it is complete.

    Raises:
      OSError: it cannot be written; what was there before is left as it was.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([COLUMNS, *map(formatted, rows)])
    descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(descriptor, "w") as file:
            file.write(text.getvalue())
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(name)
        raise


# The cells.


def all_cells(shrink: int = 1) -> list[Cell]:
    """Returns every cell, copies first; with `shrink`, cells with as many times fewer rows or keys."""
    rows = 32768 // shrink
    return [
        _copy("float32", (rows, 4096)),
        _copy("bfloat16", (rows, 4096)),
        _softmax("float32", (rows, 4096)),
        _softmax("bfloat16", (rows, 4096)),
        _softmax("bfloat16", (max(1, 1024 // shrink), 131072 // min(shrink, 16))),
        _jacobian("bfloat16", (rows, 4096)),
        _logsumexp("float32", (rows, 4096)),
        _losses("bfloat16", (8192 // shrink, 128256 // min(shrink, 16))),
        *_attention_cells(4096 // shrink),
        _decoding(max(4096 // shrink, 64)),
        _decoding(max(4096 // shrink, 64), page=16),
        _largest("float32", (max(2, 512 // shrink), 128256 // min(shrink, 16)), 50),
        _router("bfloat16", (262144 // shrink, 256), 8),
        _samples("float32", (max(2, 64 // shrink), 128256 // min(shrink, 16))),
        _samples("float32", (max(2, 64 // shrink), 128256 // min(shrink, 16)), top_p=0.9),
    ]


def _size(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normals(key, shape, dtype):
    return jax.random.normal(key, shape).astype(dtype)


@jax.jit
def _taken(array, at):
    return array[at]


def _some_rows(*arrays: Any) -> tuple[np.ndarray, list[np.ndarray]]:
    """Returns the indices of some rows, the first and the last ones among them, and these rows of each array."""
    count = arrays[0].shape[0]
    first = np.arange(min(_SAMPLED // 2, count))
    at = np.unique([*first, *(count - 1 - first)])
    return at, [np.asarray(_taken(array, at)) for array in arrays]


def _of_rows(
    op: str,
    pass_: str,
    dtype: str,
    shape: tuple[int, ...],
    passes: float,
    truths: Callable[..., Sequence[Judge]],
    contenders: Callable[[str | None], list[Contender]],
    *,
    options: str = "",
    written: int = 0,
    more: Callable[[Any], tuple[Any, ...]] = lambda key: (),
    needs_places: bool = False,
) -> Cell:
    """A cell whose rows are checked by `truths` of some rows of the inputs; each pass reads or writes as much as `x`."""

    def inputs(key):
        return (_normals(key, shape, dtype), *more(jax.random.fold_in(key, 1)))

    def pairs(inputs, output, is_kernel):
        at, parts = _some_rows(*inputs, *output)
        expected = truths(at, *parts[: len(inputs)]) if needs_places else truths(*parts[: len(inputs)])
        return list(zip(expected, parts[len(inputs) :], strict=True))

    count = int(passes * _size(shape, dtype)) + written
    return Cell(op, pass_, dtype, shape, options, count, 0, inputs, contenders, pairs)


def _beside(ours: Callable[..., Any], **peers: Callable[..., Any]) -> Callable[[str | None], list[Contender]]:
    """Returns the contenders of a function that takes `implementation`, and of peers by name, `_` for `.`."""

    def contenders(implementation):
        first = Contender(OURS, functools.partial(ours, implementation=implementation))
        return [first, *(Contender(name.replace("_", "."), peer) for name, peer in peers.items())]

    return contenders


def _copy(dtype: str, shape: tuple[int, int]) -> Cell:
    """The fastest way to read and write an array: a scaling, as a plain copy runs no kernel."""

    def scaled(x):
        return x * jnp.asarray(1 + 2**-7, x.dtype)

    def truths(x):
        value = (truth.to64(x) * (1 + 2**-7)).astype(x.dtype)
        return [truth.Truth(truth.to64(value), np.full(value.shape, truth.TINY))]

    return _of_rows("copy", "forward", dtype, shape, 2, truths, lambda implementation: [Contender("copy", scaled)])


def _softmax(dtype: str, shape: tuple[int, int]) -> Cell:
    contenders = _beside(lambda x, implementation: jaxsoftmax.softmax(x, implementation=implementation), jax_nn=jax.nn.softmax)
    return _of_rows("softmax", "forward", dtype, shape, 2, lambda x: [truth.softmax(x)], contenders)


def _logsumexp(dtype: str, shape: tuple[int, int]) -> Cell:
    contenders = _beside(
        lambda x, implementation: jaxsoftmax.logsumexp(x, -1, implementation=implementation),
        jax_nn=lambda x: jax.nn.logsumexp(x, -1),
    )
    return _of_rows("logsumexp", "forward", dtype, shape, 1, lambda x: [truth.logsumexp(x, -1)], contenders)


def _jacobian(dtype: str, shape: tuple[int, int]) -> Cell:
    """The vjp of softmax alone, from what the forward pass saved."""

    def of(name: str, f: Callable[[Any], Any]) -> Contender:
        saved = jax.jit(lambda x: jax.vjp(f, x)[1])
        return Contender(name, lambda vjp, c: vjp(c)[0], lambda x, c: (saved(x), c))

    def contenders(implementation):
        return [of(OURS, lambda x: jaxsoftmax.softmax(x, implementation=implementation)), of("jax.nn", jax.nn.softmax)]

    def truths(x, c):
        return [truth.softmax_derivative(x, c, saved=np.dtype(jnp.dtype(dtype)))]

    more = functools.partial(_direction, shape=shape, dtype=dtype)
    return _of_rows("softmax", "backward", dtype, shape, 3, truths, contenders, more=more)


def _direction(key, shape, dtype):
    return (_normals(key, shape, dtype),)


def _losses(dtype: str, shape: tuple[int, int]) -> Cell:
    rows, classes = shape

    def in_jnp(x, labels):
        """Computes the losses as optax does."""
        shifted = x - lax.stop_gradient(jnp.max(x, -1, keepdims=True))
        chosen = jnp.take_along_axis(shifted, labels[:, None], -1)[:, 0]
        return (jnp.log(jnp.sum(jnp.exp(shifted), -1)) - chosen).astype(jnp.float32)

    def with_gradient(loss, x, labels):
        losses, vjp = jax.vjp(lambda x: loss(x, labels), x)
        return losses, vjp(jnp.full_like(losses, 1 / rows))[0]

    def ours(x, labels, implementation):
        return with_gradient(functools.partial(jaxsoftmax.cross_entropy, implementation=implementation), x, labels)

    def truths(x, labels):
        losses = losses_truth.cross_entropy(x, labels)
        return [losses.loss, losses.gradient(np.full(labels.shape, 1 / rows))]

    return _of_rows(
        "cross_entropy",
        "forward+backward",
        dtype,
        shape,
        3,
        truths,
        _beside(ours, jnp=functools.partial(with_gradient, in_jnp)),
        more=lambda key: (jax.random.randint(key, (rows,), 0, classes),),
    )


def _attention_cells(length: int) -> Iterator[Cell]:
    yield _attention(length, 128, causal=False)
    yield _attention(length, 128, causal=True)
    yield _attention(length, 64, causal=True)
    yield _attention(length, 128, causal=True, backward=True)


def _attention(length: int, size: int, *, causal: bool, backward: bool = False, batch: int = 4, hidden: int = 2048) -> Cell:
    """Attention of 16384 tokens, or its gradients; the last queries of a head are checked, and the keys that they alone see."""
    shape = batch, length, hidden // size, size

    def as_measured(f, q, k, v, *cotangent):
        return jax.vjp(f, q, k, v)[1](*cotangent) if cotangent else f(q, k, v)

    def contenders(implementation):
        ours = functools.partial(jaxsoftmax.dot_product_attention, is_causal=causal, implementation=implementation)
        cudnn = functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="cudnn")
        return [Contender(name, functools.partial(as_measured, f)) for name, f in ((OURS, ours), ("cudnn", cudnn))]

    def inputs(key):
        return tuple(_normals(jax.random.fold_in(key, index), shape, "bfloat16") for index in range(3 + backward))

    def pairs(inputs: Sequence[Any], output: Sequence[Any], is_kernel: bool) -> Pairs:
        first = max(length - _QUERIES, 0)
        last, every = (slice(-1, None), slice(first, None), slice(-1, None)), (slice(-1, None), slice(None), slice(-1, None))
        operands = [np.asarray(array[part]) for array, part in zip(inputs, (last, every, every, last), strict=False)]
        parts = [np.asarray(array[last]) for array in output]
        options = {"is_causal": causal, "query_offset": np.array([first], np.int32)}
        if not backward:
            return [(attention_truth.attention(*operands, **options)[0], parts[0])]
        dout = operands.pop()
        expected = attention_truth.cotangents(dout, np.zeros(dout.shape[:-1]), *operands, **options, tight=is_kernel)
        of_keys = [truth.Truth(expected[name].value[:, first:], expected[name].budget[:, first:]) for name in ("key", "value")]
        return list(zip([expected["query"], *of_keys], parts, strict=True))

    times = 3 if backward else 1
    products = 7 if backward else 2
    flops = products * 2 * hidden * batch * length**2 // (2 if causal else 1)
    return Cell(
        "attention",
        "forward+backward" if backward else "forward",
        "bfloat16",
        shape,
        "causal=1" if causal else "",
        times * 4 * _size(shape, "bfloat16"),
        flops,
        inputs,
        contenders,
        pairs,
    )


def _decoding(keys: int, page: int = 0, batch: int = 32) -> Cell:
    """A step of decoding with grouped queries; the last sequence is checked."""
    heads, key_heads, size = 32, 8, 128
    of_keys = (batch * keys // page, page, key_heads, size) if page else (batch, keys, key_heads, size)

    def inputs(key):
        shapes = (batch, 1, heads, size), of_keys, of_keys
        arrays = [_normals(jax.random.fold_in(key, index), shape, "bfloat16") for index, shape in enumerate(shapes)]
        if not page:
            return tuple(arrays)
        pages = jax.random.permutation(key, of_keys[0]).astype(jnp.int32).reshape(batch, -1)
        return (*arrays, pages, jnp.full(batch, keys, jnp.int32))

    def contenders(implementation):
        if page:
            return [Contender(OURS, functools.partial(jaxsoftmax.cache.paged_attention, implementation=implementation))]
        ours = functools.partial(jaxsoftmax.dot_product_attention, implementation=implementation)
        peers = {
            name: functools.partial(jax.nn.dot_product_attention, implementation=backend)
            for name, backend in (("jax.nn", "xla"), ("cudnn", "cudnn"))
        }
        return [Contender(OURS, ours), *(Contender(name, peer) for name, peer in peers.items())]

    def pairs(inputs: Sequence[Any], output: Sequence[Any], is_kernel: bool) -> Pairs:
        query, key, value = inputs[0][-1:], *inputs[1:3]
        if page:
            key, value = (array[inputs[3][-1]].reshape(1, keys, key_heads, size) for array in (key, value))
        operands = [np.asarray(array) for array in (query, key[-1:], value[-1:])]
        return [(attention_truth.attention(*operands)[0], output[0][-1:])]

    options = f"keys={keys} kv_heads={key_heads}" + (f" page={page}" if page else "")
    count = 2 * batch * keys * key_heads * size
    flops = 4 * batch * keys * heads * size
    shape = batch, 1, heads, size
    return Cell("decoding", "forward", "bfloat16", shape, options, 2 * count, flops, inputs, contenders, pairs)


def _exactly(array: np.ndarray) -> truth.Truth:
    return truth.Truth(truth.to64(array), np.full(array.shape, truth.TINY))


def _largest(dtype: str, shape: tuple[int, int], k: int) -> Cell:
    def ours(x, implementation):
        return jaxsoftmax.top_k(x, k, implementation=implementation)

    def truths(x):
        return [_exactly(expected) for expected in order.top_k(x, k)]

    contenders = _beside(ours, jax=lambda x: lax.top_k(x, k))
    return _of_rows("top_k", "forward", dtype, shape, 1, truths, contenders, options=f"k={k}")


def _router(dtype: str, shape: tuple[int, int], k: int) -> Cell:
    """The weights of a router of experts, normalized over those that are selected."""

    def ours(x, implementation):
        return jaxsoftmax.softmax_top_k(x, k, normalize="selected", implementation=implementation)

    def in_jax(x):
        values, indices = lax.top_k(x, k)
        return jax.nn.softmax(values.astype(jnp.float32), axis=-1).astype(x.dtype), indices

    def truths(x):
        values, indices = order.top_k(x, k)
        return [truth.softmax(values), _exactly(indices)]

    written = shape[0] * k * (jnp.dtype(dtype).itemsize + 4)
    options = f"k={k} normalize=selected"
    return _of_rows(
        "softmax_top_k", "forward", dtype, shape, 1, truths, _beside(ours, jax=in_jax), options=options, written=written
    )


def _samples(dtype: str, shape: tuple[int, int], **options: Any) -> Cell:
    key = jax.random.key(3)

    def contenders(implementation):
        def ours(x):
            return jaxsoftmax.categorical(key, x, implementation=implementation, **options)

        peer = Contender("jax", lambda x: jax.random.categorical(key, x), is_checked=False)
        return [Contender(OURS, ours), *([] if options else [peer])]

    def truths(at, x):
        return [cases.samples_of(key, x, at, **options)]

    words = " ".join(f"{name}={value:g}" for name, value in options.items())
    return _of_rows("categorical", "forward", dtype, shape, 1, truths, contenders, options=words, needs_places=True)
