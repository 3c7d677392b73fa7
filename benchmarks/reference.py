"""The cells of the reference, which runs wherever no kernel does, each beside the function that it stands in for.

Sizes are those of a laptop. On a CPU cells are whole programs: they are timed by the wall clock, in turns with their
counterpart, and have the memory of the compiled program. `--implementation xla` is implied: on a GPU, too, the reference is
what is measured.
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from benchmarks import attention, cross_entropy, softmax, top_k
from benchmarks.attention import Call
from benchmarks.cells import FIRST_CALL, OURS, Cell
from benchmarks.harness import Effort

IMPLEMENTATION = "xla"
COUNTERPARTS = frozenset({"jax.nn", "jax.nn highest", "optax", "jax"})
ON_A_CPU = Effort(rounds=15, calls=1, cache=0, turn=0.02)

_OPS = ("softmax", "log_softmax", "logsumexp")
_DTYPES = ("float32", "bfloat16")
_SCORES = (64, 12, 128, 128)  # of attention: batch, heads, queries, keys
_SHAPES = (
    *(_SCORES, (64, 8192), (512, 1024), (8, 32768), (4096, 64), (1, 128256), (2000, 1000)),
    *(
        (1, 100),
        (8, 128),
        (32, 1000),
        (128, 128),
        (256, 2048),
        (1024, 4096),
        (16384, 16),
        (65536, 100),
        (2, 16384),
        (4, 8, 256, 256),
    ),
)
_LOGITS = ((64, 50257), (512, 1000), (256, 32000), (4096, 10), (8, 128256), (1024, 5000), (32, 512))
_SAMPLED = ((64, 50257), (8, 128256), (1, 32000), (4, 1000), (256, 1024), (32, 10000), (16, 50257), (2, 128))
_CALLS = (
    Call(1, 512, 8, 64, causal=True),
    Call(1, 512, 8, 64),
    Call(1, 2048, 4, 64, causal=True),
    Call(16, 128, 4, 32, causal=True),
    Call(4, 64, 4, 64, causal=True),
    Call(1, 64, 8, 64, causal=True),
    Call(8, 64, 8, 32),
    Call(32, 32, 4, 64),
    Call(1, 1024, 8, 64, causal=True),
    Call(2, 512, 4, 128, causal=True, window=128),
    Call(2, 256, 8, 64, key_heads=2, causal=True),
    Call(2, 256, 8, 64, extras=("bias",)),
    Call(2, 256, 8, 64, extras=("mask",)),
)


def cells() -> list[Cell]:
    """All cells: each op forward and with its gradient, where it has one, in two dtypes."""
    found = [*_of_rows(), *_masked(), *_losses(), *_attention(), *_largest(), *_first_calls()]
    return list(map(_beside_its_counterpart, found))


def _beside_its_counterpart(cell: Cell) -> Cell:
    contenders = {c.name: c for c in cell.contenders if c.name == OURS or c.name in COUNTERPARTS}
    return replace(cell, contenders=tuple(contenders.values()))


def as_programs(cells: Iterable[Cell]) -> list[Cell]:
    """The cells as a machine without a GPU measures them."""
    return [replace(cell, program=True) for cell in cells]


def _of_rows() -> Iterator[Cell]:
    for op in _OPS:
        for dtype in _DTYPES:
            for shape in _SHAPES:
                yield from (_cell_of_rows(op, dtype, shape, backward) for backward in (False, True))
            for shape in _SHAPES[:4]:
                yield _gradient_alone(softmax.both_cell(op, dtype, shape))


def _cell_of_rows(op: str, dtype: str, shape: tuple[int, ...], backward: bool) -> Cell:
    if backward:
        return softmax.both_cell(op, dtype, shape)
    return softmax.logsumexp_cell(dtype, shape) if op == "logsumexp" else softmax.forward_cell(op, dtype, shape)


def _gradient_alone(cell: Cell) -> Cell:
    """A cell whose program keeps nothing of the forward pass."""

    def last(build):
        return lambda: (lambda both: lambda *inputs: both(*inputs)[1])(build())

    contenders = tuple([replace(contender, build=last(contender.build)) for contender in cell.contenders])
    return replace(cell, options="gradient=1", contenders=contenders, truth=lambda *rows: cell.truth(*rows)[1:])


def _masked() -> Iterator[Cell]:
    for dtype in _DTYPES:
        for shape in (_SCORES, (512, 1024)):
            yield softmax.masked_cell(dtype, shape)
            yield softmax.masked_cell(dtype, shape, backward=True)


def _losses() -> Iterator[Cell]:
    for dtype in _DTYPES:
        for shape in _LOGITS:
            for backward in (False, True):
                yield cross_entropy.cell_of(dtype, shape, backward=backward)


def _attention() -> Iterator[Cell]:
    for dtype in _DTYPES:
        for call in _CALLS:
            for backward in (False, True)[: 1 + ("mask" not in call.extras)]:
                own = replace(call, dtype=dtype, backward=backward)
                contenders = [attention.of_ours(own), attention.of_xla(own)]
                if dtype == "float32":  # as ours is, also where that of JAX is TF32
                    contenders.append(attention.of_xla_in_float32(own))
                yield replace(attention.cell_of(own), contenders=tuple(contenders))


def _largest() -> Iterator[Cell]:
    for dtype in _DTYPES:
        for shape in _SAMPLED:
            yield top_k.sampled_cell(dtype, shape, {})
            yield top_k.cell_of(dtype, shape, 40)
            yield top_k.weights_cell(dtype, shape, 40)
        yield top_k.weights_cell(dtype, (4096, 64), 8)


def _first_calls() -> Iterator[Cell]:
    """Cells whose time is that to trace, lower and compile."""
    for dtype in _DTYPES:
        for backward in (False, True):
            found = [_cell_of_rows(op, dtype, (512, 1024), backward) for op in _OPS]
            found.append(cross_entropy.cell_of(dtype, (512, 1000), backward=backward))
            call = replace(_CALLS[0], dtype=dtype, backward=backward)
            found.append(replace(attention.cell_of(call), contenders=(attention.of_ours(call), attention.of_xla(call))))
            for cell in found:
                options = f"{cell.options} grad=1".strip() if backward else cell.options
                yield replace(cell, pass_=FIRST_CALL, options=options, bytes=0, flops=0, program=True)


def machine() -> str:
    """The name of the processor, where there is no GPU."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"cpu {names[0]}" if names else "cpu"
