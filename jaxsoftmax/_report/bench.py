"""`python -m jaxsoftmax --bench`: times standard calls beside JAX's own, and writes rows that `python -m benchmarks` reads.

`python -m benchmarks` has the same cells, by name, shape and counts of bytes and operations, and more. It times them likewise:
contenders take turns, a turn is at least ten calls over inputs that pass the cache of the GPU, the time is that of the kernels,
and the median of the turns counts. A value is checked against float64 before it is timed.
"""

import csv
import functools
import itertools
import math
import os
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from jaxsoftmax._core import compat
from jaxsoftmax._report import call, cases, truth
from jaxsoftmax._report.cases import Judge
from jaxsoftmax._report.clock import kernels_us
from jaxsoftmax._report.progress import Progress
from jaxsoftmax._report.rows import COLUMNS, Row, commit, formatted, machine, new_run, now
from jaxsoftmax._report.truth import attention as attention_truth
from jaxsoftmax._report.truth import cross_entropy as losses_truth
from jaxsoftmax._report.truth import top_k as order

OURS = "jaxsoftmax"
_ROUNDS = 5
_CALLS = 10  # calls of a turn, at least
_CACHE = 4 * 50 * 2**20  # bytes that the inputs of a turn exceed: four times the L2 cache of an H200
_MOST_BUFFERS = 64
_GROSS = 0.1  # a peer with a larger relative error computes something else
_SAMPLED = 6  # rows that are compared with float64
_QUERIES = 64  # last queries of attention that are compared with float64


@dataclass(frozen=True)
class Contender:
    """One way to compute a cell.

    Attributes:
      name: `OURS` or the name of the peer.
      function: the function that is timed.
      prepare: turns a cell's inputs into the arguments of the function, before any timing.
    """

    name: str
    function: Callable[..., Any]
    prepare: Callable[..., tuple[Any, ...]] = lambda *inputs: inputs


@dataclass(frozen=True)
class Cell:
    """One line of the table; the first seven attributes are those of `Row`.

    Attributes:
      inputs: makes the inputs from a key.
      contenders: takes the name of an implementation, or None, and returns who computes the cell, ours first.
      part: the index of the part of each result that is checked.
      judges: takes whether a kernel of ours ran, and the inputs, and returns the truth of that part of each result.
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
    part: Any
    judges: Callable[..., Sequence[Judge]]

    @property
    def key(self) -> tuple[str, str, str, str, str]:
        """The attributes that name a cell in a result file."""
        return self.op, self.pass_, self.dtype, "x".join(map(str, self.shape)), self.options

    @property
    def name(self) -> str:
        """Name of the cell, such as `softmax forward float32 32768x4096`."""
        return " ".join(filter(None, self.key))


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


def main(path: Path | None = None, implementation: str | None = None) -> int:
    """Measures, prints the table and writes the file; returns the exit status.

    It is 1 if a value is wrong or the file cannot be written. Without a GPU it is 0, and there is no file.
    """
    device = call.gpu()
    if device is None:
        print(f"JAX sees no NVIDIA GPU ({jax.default_backend()}): nothing to measure, and no file.")
        return 0
    path = path or Path(f"jaxsoftmax_{machine(device.device_kind)}.csv")
    run = Run(device.device_kind, implementation)
    run.measure(all_cells())
    print(table(run.rows))
    if not run.rows:
        print("nothing was measured, and no file was written")
        return 1
    try:
        write(path, run.rows)
    except OSError as problem:
        print(f"{path} was not written: {problem}")
        return 1
    print(f"\n{len(run.rows)} rows are in {path}, which may be sent as it is.")
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
      rows: the measurements.
      is_wrong: True if a result of ours was wrong, or a call of ours raised. Such a call has no row.
    """

    def __init__(self, gpu: str, implementation: str | None):
        self.rows: list[Row] = []
        self.is_wrong = False
        self._gpu, self._implementation = gpu, implementation
        self._id, self._copy_speed = new_run(), 0.0
        self._commit = commit(Path(__file__).parents[2]) or f"v{jaxsoftmax.__version__}"

    def measure(self, cells: Sequence[Cell]) -> None:
        """Measures cells in their order; copies come before the cells that are compared with them."""
        self._progress = Progress(len(cells))
        try:
            for cell in cells:
                before = len(self.rows)
                try:
                    self._measure(cell)
                except Exception as problem:  # too little memory for the inputs, say
                    self._say(f"{cell.name}: left out: {call.in_words(problem)[:200]}")
                times = ", ".join(f"{row.implementation} {row.us:.1f} us" for row in self.rows[before:])
                self._progress.step(cell.name, times)
        finally:
            self._progress.end()

    def _say(self, line: str) -> None:
        self._progress.end()  # the bar of a terminal, which comes again with the next step
        print(line, flush=True)

    def _measure(self, cell: Cell) -> None:
        key = jax.random.key(0)
        buffers = max(1, min(_MOST_BUFFERS, math.ceil(_CACHE / cell.bytes)))
        inputs = jax.block_until_ready([cell.inputs(jax.random.fold_in(key, index)) for index in range(buffers)])
        entrants = [self._tried(cell, each, self._enter, cell, each, inputs) for each in cell.contenders(self._implementation)]
        for _ in range(1 + _ROUNDS):
            entrants = [self._tried(cell, entrant, self._take_turn, entrant) for entrant in entrants if entrant is not None]
        self.rows += [self._row(cell, entrant) for entrant in entrants if entrant is not None]

    def _tried(self, cell: Cell, who: Contender | Entrant, step: Callable[..., Entrant | None], *args: Any) -> Entrant | None:
        """Returns `step(*args)`, or None if it raises; says why: whatever a compiler raises is the reason to leave it out."""
        try:
            return step(*args)
        except Exception as problem:
            self._say(f"{cell.name}: {who.name} left out: {call.in_words(problem)[:200]}")
            is_refused = call.is_refusal(problem) or "RESOURCE_EXHAUSTED" in str(problem)
            self.is_wrong |= who.name == OURS and not is_refused
            return None

    def _enter(self, cell: Cell, contender: Contender, inputs: list[tuple[Any, ...]]) -> Entrant | None:
        """Compiles a contender and checks its values; returns None if they are wrong."""
        arguments = [jax.block_until_ready(contender.prepare(*buffer)) for buffer in inputs]
        compiled = call.compiled(contender.function, *arguments[0])
        results = jax.tree.leaves(jax.block_until_ready(compiled.program(*arguments[0])))
        is_ours = contender.name == OURS
        judges = cell.judges(is_ours and "xla" not in compiled.implementation.split("+"), *inputs[0])
        pairs = [(judge, np.asarray(result[cell.part])) for judge, result in zip(judges, results, strict=True)]
        # A peer has noise of its own, which has no truth.
        errors = [cases.error(judge, part) for judge, part in pairs if is_ours or isinstance(judge, truth.Truth)]
        error = max(errors, default=None)
        if is_ours and not max(errors) <= 1:
            self.is_wrong = True
            self._say(f"{cell.name}: WRONG: its error is {error:.3g} times the tolerance; it is not timed")
            return None
        if not is_ours and any(_is_something_else(judge, part) for judge, part in pairs):
            self._say(f"{cell.name}: {contender.name} left out: it errs by {error:.2g} times the tolerance")
            return None
        implementation = compiled.implementation if is_ours else contender.name
        return Entrant(contender.name, implementation, compiled.program, arguments, None if cell.op == "copy" else error)

    def _take_turn(self, entrant: Entrant) -> Entrant:
        """Times at least `_CALLS` calls. The first turn only warms up."""
        calls = max(_CALLS, len(entrant.arguments))
        arguments = itertools.islice(itertools.cycle(entrant.arguments), calls)

        def run() -> None:
            result = None
            for args in arguments:
                result = entrant.program(*args)
            jax.block_until_ready(result)

        us = kernel_clock(run, calls)
        if us is None:
            raise RuntimeError("CUPTI saw no kernel")
        entrant.times.append(us)
        return entrant

    def _row(self, cell: Cell, entrant: Entrant) -> Row:
        times = entrant.times[1:]
        us = statistics.median(times)
        if cell.op == "copy":
            self._copy_speed = cell.bytes / us
        share = cell.bytes / us / self._copy_speed if self._copy_speed else None
        origin = self._id, now(), self._gpu, metadata.version("jax"), self._commit
        measured = us, cell.bytes, cell.flops, share, entrant.error
        return Row(*origin, *cell.key, entrant.implementation, *measured, least_us=min(times))


def _is_something_else(judge: Judge, part: np.ndarray) -> bool:
    """Tells whether a part of a peer's result is far from the truth. Budgets do not tell: peers round to 16 bits earlier."""
    if not isinstance(judge, truth.Truth):
        return False
    return not np.linalg.norm(truth.to64(part) - judge.value) <= _GROSS * np.linalg.norm(judge.value)


# What is printed and written.


def is_ours(row: Row) -> bool:
    """Tells whether a row is of this library."""
    return set(call.IMPLEMENTATIONS).issuperset(row.implementation.split("+"))


def table(rows: Sequence[Row]) -> str:
    """Returns rows as a table in Markdown: a line for each cell, with the times of peers over ours."""
    header = "| call | runs on | us | fastest | GB/s | TFLOP/s | of a copy | error/tol. | peers: time over ours |"
    lines = [header, "|---|---|---|---|---|---|---|---|---|"]
    for cell, group in itertools.groupby(rows, key=lambda row: row.cell):
        rows_of_cell = list(group)
        ours = next((row for row in rows_of_cell if is_ours(row) or row.op == "copy"), None)
        if ours is None:
            continue
        times = f"{ours.us:.1f} | {ours.fastest_us:.1f} | {ours.speed / 1e3:.0f} | {f'{ours.tflops:.0f}' if ours.flops else ''}"
        shares = " | ".join("" if share is None else f"{share:.2f}" for share in (ours.copy_share, ours.error))
        peers = ", ".join(f"{row.implementation} {row.us / ours.us:.2f}" for row in rows_of_cell if row is not ours)
        lines.append(f"| {' '.join(filter(None, cell))} | {ours.implementation} | {times} | {shares} | {peers} |")
    return "\n".join(lines)


def write(path: Path, rows: Sequence[Row]) -> None:
    """Writes a result file: a temporary file takes its name when it is complete.

    Raises:
      OSError: it cannot be written; what was there before is left as it was.
    """
    path = path.resolve()  # a symbolic link stays one
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([COLUMNS, *map(formatted, rows)])
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


# The cells.


def all_cells(shrink: int = 1) -> list[Cell]:
    """Returns every cell, the copy first; with `shrink`, cells with as many times fewer rows or keys."""
    rows, fewer = 32768 // shrink, min(shrink, 16)
    length, keys, few = 4096 // shrink, max(4096 // shrink, 64), (max(2, 64 // shrink), 128256 // fewer)
    return [
        _copy((rows, 4096)),
        _beside_nn("softmax", "float32", (rows, 4096), 2),
        _beside_nn("softmax", "bfloat16", (rows, 4096), 2),
        _beside_nn("softmax", "bfloat16", (max(1, 1024 // shrink), 131072 // fewer), 2),
        _jacobian("bfloat16", (rows, 4096)),
        _beside_nn("logsumexp", "float32", (rows, 4096), 1),
        _losses("bfloat16", (8192 // shrink, 128256 // fewer)),
        _attention(length, 128, is_causal=False),
        _attention(length, 128, is_causal=True),
        _attention(length, 64, is_causal=True),
        _attention(length, 128, is_causal=True, backward=True),
        _decoding(keys),
        _decoding(keys, page=16),
        _largest("float32", (max(2, 512 // shrink), 128256 // fewer), 50),
        _router("bfloat16", (262144 // shrink, 256), 8),
        _samples("float32", few),
        _samples("float32", few, top_p=0.9),
    ]


def _size(shape: Sequence[int], dtype: str) -> int:
    return math.prod(shape) * jnp.dtype(dtype).itemsize


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normals(key, shape, dtype):
    return jax.random.normal(key, shape).astype(dtype)


def _several(key: Any, *shapes: tuple[int, ...]) -> tuple[Any, ...]:
    return tuple(_normals(jax.random.fold_in(key, index), shape, "bfloat16") for index, shape in enumerate(shapes))


def _some_rows(count: int) -> np.ndarray:
    """Returns the indices of some rows, the first and the last ones among them."""
    first = np.arange(min(_SAMPLED // 2, count))
    return np.unique([*first, *(count - 1 - first)])


def _of_rows(key, n_bytes: int, truths, contenders, more=None) -> Cell:
    """Cell of an op of rows, of which a few rows are checked.

    Args:
      key: op, pass, dtype, shape and options, as in `Row`.
      n_bytes: bytes that a call must read and write.
      truths: takes some rows of the inputs, and returns the truth of each result.
      contenders: as in `Cell`.
      more: makes the second input from a key, or None.
    """
    op, pass_, dtype, shape, options = key
    part = _some_rows(shape[0])

    def inputs(key):
        return (_normals(key, shape, dtype), *([more(jax.random.fold_in(key, 1))] if more else []))

    def judges(is_kernel, *inputs):
        return truths(*(np.asarray(array[part]) for array in inputs))

    return Cell(op, pass_, dtype, shape, options, n_bytes, 0, inputs, contenders, part, judges)


def _beside(ours: Callable[..., Any], **peers: Callable[..., Any]) -> Callable[[str | None], list[Contender]]:
    """Returns the contenders of a function that takes `implementation`, and of peers by name, `_` for `.`."""

    def contenders(implementation):
        first = Contender(OURS, functools.partial(ours, implementation=implementation))
        return [first, *(Contender(name.replace("_", "."), peer) for name, peer in peers.items())]

    return contenders


def _copy(shape: tuple[int, int]) -> Cell:
    """Cell of the fastest way to read and write an array: a scaling in float32, as a plain copy runs no kernel.

    In bfloat16 XLA's scaling moves 3346 GB/s on an H200 where this one moves 4293.
    """

    def truths(x):
        return [cases.exactly((truth.to64(x) * (1 + 2**-7)).astype(x.dtype))]

    scaled = Contender("copy", lambda x: x * jnp.asarray(1 + 2**-7, x.dtype))
    key = "copy", "forward", "float32", shape, ""
    return _of_rows(key, 2 * _size(shape, "float32"), truths, lambda implementation: [scaled])


def _beside_nn(op: str, dtype: str, shape: tuple[int, int], passes: int) -> Cell:
    def along_rows(of, x, **forced):
        return getattr(of, op)(x, axis=-1, **forced)

    contenders = _beside(functools.partial(along_rows, jaxsoftmax), jax_nn=functools.partial(along_rows, jax.nn))
    key, n_bytes = (op, "forward", dtype, shape, ""), passes * _size(shape, dtype)
    return _of_rows(key, n_bytes, lambda x: [getattr(truth, op)(x, -1)], contenders)


def _jacobian(dtype: str, shape: tuple[int, int]) -> Cell:
    """The vjp of softmax alone, from what the forward pass saved."""

    def of(name: str, f: Callable[[Any], Any]) -> Contender:
        saved = jax.jit(lambda x: jax.vjp(f, x)[1])
        return Contender(name, lambda vjp, c: vjp(c)[0], lambda x, c: (saved(x), c))

    def contenders(implementation):
        return [of(OURS, functools.partial(jaxsoftmax.softmax, implementation=implementation)), of("jax.nn", jax.nn.softmax)]

    def truths(x, c):
        return [truth.softmax_derivative(x, c, saved=x.dtype)]

    more = functools.partial(_normals, shape=shape, dtype=dtype)
    key = "softmax", "backward", dtype, shape, ""
    return _of_rows(key, 3 * _size(shape, dtype), truths, contenders, more)


def _losses(dtype: str, shape: tuple[int, int]) -> Cell:
    rows, classes = shape

    def in_jnp(x, labels):
        """Computes the losses as optax does."""
        shifted = x - lax.stop_gradient(jnp.max(x, -1, keepdims=True))
        chosen = jnp.take_along_axis(shifted, labels[:, None], -1)[:, 0]
        return (jnp.log(jnp.sum(jnp.exp(shifted), -1)) - chosen).astype(jnp.float32)

    def with_gradient(x, labels, loss=None, **forced):
        loss = loss or functools.partial(jaxsoftmax.cross_entropy, **forced)
        losses, vjp = jax.vjp(lambda x: loss(x, labels), x)
        return losses, vjp(jnp.full_like(losses, 1 / rows))[0]

    def truths(x, labels):
        losses = losses_truth.cross_entropy(x, labels)
        return [losses.loss, losses.gradient(np.full(labels.shape, 1 / rows))]

    contenders = _beside(with_gradient, jnp=functools.partial(with_gradient, loss=in_jnp))
    more = functools.partial(jax.random.randint, shape=(rows,), minval=0, maxval=classes)
    key = "cross_entropy", "forward+backward", dtype, shape, ""
    return _of_rows(key, 3 * _size(shape, dtype), truths, contenders, more)


def _attention(length: int, size: int, *, is_causal: bool, backward: bool = False, batch: int = 4, hidden: int = 2048) -> Cell:
    """Attention of 16384 tokens, or its gradients; the last queries of a head are checked, and the keys that they alone see."""
    shape = batch, length, hidden // size, size
    first = max(length - _QUERIES, 0)
    last, every = (slice(-1, None), slice(first, None), slice(-1, None)), (slice(-1, None), slice(None), slice(-1, None))

    def inputs(key):
        return _several(key, *[shape] * (3 + backward))

    def attend(of, q, k, v, *cotangent, implementation):
        f = functools.partial(of.dot_product_attention, is_causal=is_causal, implementation=implementation)
        return jax.vjp(f, q, k, v)[1](*cotangent) if cotangent else f(q, k, v)

    def judges(is_kernel, *inputs):
        operands = [np.asarray(array[part]) for array, part in zip(inputs, (last, every, every, last), strict=False)]
        options = {"is_causal": is_causal, "query_offset": np.array([first], np.int32)}
        if not backward:
            return attention_truth.attention(*operands, **options)[:1]
        dout = operands.pop()
        expected = attention_truth.cotangents(dout, np.zeros(dout.shape[:-1]), *operands, **options, tight=is_kernel)
        of_keys = [truth.Truth(expected[name].value[:, first:], expected[name].budget[:, first:]) for name in ("key", "value")]
        return [expected["query"], *of_keys]

    pass_, times, products = ("forward+backward", 3, 7) if backward else ("forward", 1, 2)
    count = times * 4 * _size(shape, "bfloat16")
    flops = products * 2 * hidden * batch * length**2 // (2 if is_causal else 1)
    options = "causal=1" if is_causal else ""
    cudnn = functools.partial(attend, jax.nn, implementation="cudnn")
    contenders = _beside(functools.partial(attend, jaxsoftmax), cudnn=cudnn)
    return Cell("attention", pass_, "bfloat16", shape, options, count, flops, inputs, contenders, last, judges)


def _decoding(keys: int, page: int = 0, batch: int = 32) -> Cell:
    """A step of decoding with grouped queries; the last sequence is checked."""
    heads, key_heads, size = 32, 8, 128
    shape = batch, 1, heads, size
    of_keys = (batch * keys // page, page, key_heads, size) if page else (batch, keys, key_heads, size)
    last = slice(-1, None)

    def inputs(key):
        arrays = _several(key, shape, of_keys, of_keys)
        if not page:
            return arrays
        pages = jax.random.permutation(key, of_keys[0]).astype(jnp.int32).reshape(batch, -1)
        return (*arrays, pages, jnp.full(batch, keys, jnp.int32))

    def ours(*operands, **forced):
        return (jaxsoftmax.cache.paged_attention if page else jaxsoftmax.dot_product_attention)(*operands, **forced)

    def judges(is_kernel, query, key, value, *pages):
        if page:
            key, value = (array[pages[0][-1]].reshape(1, keys, key_heads, size) for array in (key, value))
        return attention_truth.attention(*(np.asarray(array[last]) for array in (query, key, value)))[:1]

    options = f"keys={keys} kv_heads={key_heads}" + (f" page={page}" if page else "")
    count, flops = 4 * batch * keys * key_heads * size, 4 * batch * keys * heads * size
    backends = {} if page else {"jax_nn": "xla", "cudnn": "cudnn"}
    peers = {name: functools.partial(jax.nn.dot_product_attention, implementation=by) for name, by in backends.items()}
    return Cell("decoding", "forward", "bfloat16", shape, options, count, flops, inputs, _beside(ours, **peers), last, judges)


def _largest(dtype: str, shape: tuple[int, int], k: int) -> Cell:
    def truths(x):
        return [cases.exactly(expected) for expected in order.top_k(x, k)]

    contenders = _beside(lambda x, **forced: jaxsoftmax.top_k(x, k, **forced), jax=lambda x: lax.top_k(x, k))
    return _of_rows(("top_k", "forward", dtype, shape, f"k={k}"), _size(shape, dtype), truths, contenders)


def _router(dtype: str, shape: tuple[int, int], k: int) -> Cell:
    """The weights of a router of experts, normalized over those that are selected."""

    def in_jax(x):
        values, indices = lax.top_k(x, k)
        return jax.nn.softmax(values.astype(jnp.float32), axis=-1).astype(x.dtype), indices

    def truths(x):
        values, indices = order.top_k(x, k)
        return [truth.softmax(values), cases.exactly(indices)]

    contenders = _beside(lambda x, **forced: jaxsoftmax.softmax_top_k(x, k, normalize="selected", **forced), jax=in_jax)
    n_bytes = _size(shape, dtype) + shape[0] * k * (jnp.dtype(dtype).itemsize + 4)
    return _of_rows(("softmax_top_k", "forward", dtype, shape, f"k={k} normalize=selected"), n_bytes, truths, contenders)


def _samples(dtype: str, shape: tuple[int, int], **options: Any) -> Cell:
    key = jax.random.key(3)
    peers = {} if options else {"jax": lambda x: jax.random.categorical(key, x)}
    contenders = _beside(lambda x, **forced: jaxsoftmax.categorical(key, x, **options, **forced), **peers)

    def truths(x):
        return [cases.samples_of(key, x, _some_rows(shape[0]), **options)]

    words = " ".join(f"{name}={value:g}" for name, value in options.items())
    return _of_rows(("categorical", "forward", dtype, shape, words), _size(shape, dtype), truths, contenders)
