"""The cells of softmax, log_softmax and logsumexp.

Unless said otherwise an array has 2^27 elements; smaller ones stay in the GPU's cache, as they would between the layers of a
model. `bytes` counts each input that has as many elements as `x`, and each such
output, once, and no other; for `forward+backward`, those of the two passes together.
"""

import functools
import importlib
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from benchmarks.cells import FIRST_CALL, OURS, Cell, Contender, library, torch
from benchmarks.check import sampled_of, to_torch
from tests.support import oracle

ELEMENTS = 2**27
POWERS = tuple(2**n for n in range(6, 16))
ODD = (100, 127, 1000, 10001)
BACKWARD = (64, 128, 256, 1024, 4096, 8192, 16384, 32768, 1000)
LONG = (49152, 65536, 128256, 131072, 151936, 256000, 262144, 1048576)  # no block holds them: vocabularies, and powers of two
LONG_ODD = (50257, 100277, 128003, 200019)
LONG_OF_LOG = (50257, 128256)
LONG_BACKWARD = (65536, 131072, 262144, 1048576, 50257, 128256)
LONG_LOGSUMEXP = (50257, 65536, 128256, 131072, 200019, 262144, 1048576)
AXIS_1 = ((64, 4096, 512), (256, 1000, 128), (8, 131072, 128), (8, 50257, 320))
COMPILED_BY_TORCH = (64, 256, 1024, 4096, 16384, 32768)
DTYPES = ("float32", "bfloat16")


def cells(elements: int = ELEMENTS) -> list[Cell]:
    """All cells: first calls first, while no kernel module is loaded, then copies, with which the others are compared."""
    return [
        *_first_calls(elements),
        *(copy_cell(dtype, elements) for dtype in (*DTYPES, "float16")),
        *(forward_cell(op, dtype, shape_of(elements, cols)) for op in _OPS for dtype in DTYPES for cols in (*POWERS, *ODD)),
        *(forward_cell("softmax", "float16", shape_of(elements, cols)) for cols in (1024, 4096, 32768)),
        *(forward_cell("softmax", "float16", (rows, cols)) for rows in (32, 64) for cols in (512, 1024, 2048, 4096, 8192)),
        forward_cell("softmax", "float32", (1024, 512)),
        *(logsumexp_cell(dtype, shape_of(elements, cols)) for dtype in DTYPES for cols in BACKWARD),
        *_backward(elements),
        *_both(elements),
        *_masked(elements),
        _converted("bfloat16", "float32", shape_of(elements, 4096)),
        _converted("float32", "bfloat16", shape_of(elements, 4096)),
        _fused(shape_of(elements, 4096)),
        _cast(shape_of(elements, 4096)),
        *_long(elements),
        *_few_rows(elements),
        *_along_axis_1(elements),
    ]


_OPS = ("softmax", "log_softmax")


def shape_of(elements: int, cols: int) -> tuple[int, int]:
    return max(elements // cols, 1), cols


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * jnp.dtype(dtype).itemsize


# Inputs.


@functools.partial(jax.jit, static_argnames=("draw", "count"))
def _drawn(key, draw, count):
    return draw(key, (count,))


def _flat(key, draw, shape):
    """At least as many numbers as a shape has, in one line. Their count is a power of two: generators are slow to compile."""
    return _drawn(key, draw, 1 << (int(np.prod(shape)) - 1).bit_length())


def _shaped(flat, shape):
    return flat[: int(np.prod(shape))].reshape(shape)


def _scores(key, shape, dtype, hurtful):
    """A standard normal times 3, and an offset for each row; if `hurtful`, rows in turn have outliers, 1e4 added, or `-inf`."""
    keys = jax.random.split(key, 3)
    normals, offsets = _flat(keys[0], jax.random.normal, shape), _flat(keys[1], jax.random.normal, shape[:-1])
    return _arranged(normals, offsets, _flat(keys[2], jax.random.uniform, shape), hurtful, shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _arranged(normals, offsets, chances, hurtful, shape, dtype):
    x = 3 * _shaped(normals, shape) + 4 * _shaped(offsets, (*shape[:-1], 1))
    chance = _shaped(chances, shape)
    kind = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2) % 3
    finite = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) == 0
    outliers = jnp.where(chance < 0.02, 1e3, x)
    holes = jnp.where((chance < 0.3) & ~finite, -jnp.inf, x)
    return jnp.where(hurtful, lax.select_n(kind, outliers, x + 1e4, holes), x).astype(dtype)


def _normal(key, shape, dtype):
    return _converted_to(_flat(jax.random.fold_in(key, 1), jax.random.normal, shape), shape, dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _converted_to(flat, shape, dtype):
    return _shaped(flat, shape).astype(dtype)


def one_array(shape, dtype) -> Callable[..., tuple[Any, ...]]:
    return lambda key, hurtful: (_scores(key, shape, dtype, hurtful),)


def with_direction(shape, dtype, direction=None) -> Callable[..., tuple[Any, ...]]:
    """Inputs `x` and a tangent or cotangent, of its shape unless `direction` is another one."""
    return lambda key, hurtful: (_scores(key, shape, dtype, hurtful), _normal(key, direction or shape, dtype))


# Contenders.


def _function(module: Any, op: str, axis: int = -1) -> Callable[..., Any]:
    return functools.partial(getattr(module, op), axis=axis)


def _ours_and_jax_nn(make: Callable[[Any], dict[str, Any]]) -> tuple[Contender, Contender]:
    """`make` gives what a contender needs, from the module that holds the op."""
    return Contender(OURS, **make(library)), Contender("jax.nn", **make(jax.nn))


def _plain(op: str, axis: int = -1) -> Callable[[Any], dict[str, Any]]:
    return lambda module: {"build": lambda: lambda x: _function(module, op, axis)(x)}


def _pullback(op: str) -> Callable[[Any], dict[str, Any]]:
    """The vjp alone: the function that it returns is a pytree, whose residuals are arguments of the program."""
    return lambda module: {
        "build": lambda: lambda vjp, c: vjp(c)[0],
        "prepare": with_first(lambda x: jax.vjp(_function(module, op), x)[1]),
    }


def _pushforward(op: str) -> Callable[[Any], dict[str, Any]]:
    """The jvp alone, in the same way."""
    return lambda module: {
        "build": lambda: lambda linear, t: linear(t),
        "prepare": with_first(lambda x: jax.linearize(_function(module, op), x)[1]),
    }


def with_first(function: Callable[[Any], Any]) -> Callable[[Any, Any], tuple[Any, Any]]:
    """A function of the first of two inputs, in its place; jitted, it gives one pytree, and what takes that is traced once."""
    jitted = jax.jit(function)
    return lambda x, direction: (jitted(x), direction)


def _pullback_with_value(op: str) -> Callable[[Any], dict[str, Any]]:
    def both(module, x, c):
        y, vjp = jax.vjp(_function(module, op), x)
        return y, vjp(c)[0]

    return lambda module: {"build": lambda: functools.partial(both, module)}


def torch_contender(
    name: str, build: Callable[[], Callable[..., Any]], *, prepare=to_torch, needs=("torch",), **more
) -> Contender:
    return Contender(name, build, prepare, framework="torch", needs=needs, **more)


def of_torch(op: str, axis: int = -1) -> Contender:
    return torch_contender("torch", lambda: functools.partial(getattr(torch(), op), dim=axis))


def sums() -> tuple[Contender, Contender]:
    """The fastest way to read an array, which is the first of the inputs."""

    def true_sum(x, *others):
        return [exactly(oracle.to64(x).sum(-1))]

    return (
        Contender("sum", lambda: lambda x, *others: jnp.sum(x, -1, dtype="float32"), truth=true_sum),
        torch_contender("sum", lambda: lambda x, *others: x.sum(-1, dtype=torch().float32), truth=true_sum),
    )


def _compiled_softmax() -> Callable[..., Any]:
    module = torch()
    module._dynamo.reset()  # a function that was compiled for many shapes is no longer compiled for another
    return module.compile(lambda x: module.softmax(x, -1), dynamic=False)


def _quack_takes(dtype: str, cols: int) -> bool:
    """It copies vectors of 16 bytes, and its largest cluster is meant for rows of up to 256K."""
    return cols * jnp.dtype(dtype).itemsize % 16 == 0 and cols <= 2**18


def _quack_softmax() -> Callable[..., Any]:
    return importlib.import_module("quack.softmax").softmax


def _torch_backward(op: str) -> Contender:
    """The kernel of torch's backward pass, which reads the output."""

    def build():
        backward = getattr(torch().ops.aten, f"_{op}_backward_data")
        return lambda c, y: backward(c, y, -1, y.dtype)

    def prepare(x, c):
        x, c = to_torch(x, c)
        return c, getattr(torch(), op)(x, dim=-1)

    return torch_contender("torch", build, prepare=prepare)


# Cells.


def copy_cell(dtype: str, elements: int) -> Cell:
    """The fastest way to read and write an array. The factor of the scaling is exact in every dtype, and not 1."""

    def with_target(x):
        (x,) = to_torch(x)
        return x, torch().empty_like(x)

    shape = shape_of(elements, 4096)
    contenders = (
        Contender("copy", lambda: jnp.copy),
        Contender("copy", lambda: lambda x: x * jnp.asarray(1 + 2**-7, x.dtype)),
        torch_contender("copy", lambda: lambda x, target: target.copy_(x), prepare=with_target),
    )
    return Cell(
        "copy",
        "forward",
        dtype,
        shape,
        "",
        2 * _size(shape, dtype),
        one_array(shape, dtype),
        contenders,
        lambda x: [exactly(oracle.to64(x))],
    )


def exactly(value: np.ndarray) -> Any:
    return oracle.Truth(value, np.full(value.shape, oracle.TINY))


def without(cell: Cell, *names: str) -> Cell:
    """A cell less some of its peers."""
    return replace(cell, contenders=tuple(contender for contender in cell.contenders if contender.name not in names))


def forward_cell(op: str, dtype: str, shape: tuple[int, ...]) -> Cell:
    contenders = [*_ours_and_jax_nn(_plain(op)), of_torch(op)]
    if op == "softmax":
        if dtype in DTYPES and shape[1] in COMPILED_BY_TORCH:
            contenders.append(torch_contender("torch.compile", _compiled_softmax))
        if _quack_takes(dtype, shape[1]):
            contenders.append(torch_contender("quack", _quack_softmax, needs=("quack", "torch")))
    return Cell(
        op,
        "forward",
        dtype,
        shape,
        "",
        2 * _size(shape, dtype),
        one_array(shape, dtype),
        tuple(contenders),
        lambda x: [getattr(oracle, op)(x)],
    )


def logsumexp_cell(dtype: str, shape: tuple[int, ...]) -> Cell:
    """It reads once, as sums do."""
    return Cell(
        "logsumexp",
        "forward",
        dtype,
        shape,
        "",
        _size(shape, dtype),
        one_array(shape, dtype),
        (*_ours_and_jax_nn(_plain("logsumexp")), of_torch("logsumexp"), *sums()),
        lambda x: [oracle.logsumexp(x, -1)],
    )


def jacobian_cell(dtype: str, shape: tuple[int, int]) -> Cell:
    """The Jacobian product of softmax alone, from what the forward pass saved."""
    return Cell(
        "softmax",
        "backward",
        dtype,
        shape,
        "",
        3 * _size(shape, dtype),
        with_direction(shape, dtype),
        (*_ours_and_jax_nn(_pullback("softmax")), _torch_backward("softmax")),
        functools.partial(_derivative_of_softmax, dtype),
    )


def _backward(elements: int) -> Iterator[Cell]:
    """Derivatives alone: the Jacobian product of softmax, the two maps of log_softmax, the vjp of logsumexp."""
    for dtype in DTYPES:
        for shape in (shape_of(elements, cols) for cols in BACKWARD):
            make = functools.partial(Cell, pass_="backward", dtype=dtype, shape=shape)
            both, size = with_direction(shape, dtype), _size(shape, dtype)
            yield jacobian_cell(dtype, shape)
            yield make(
                "log_softmax",
                options="mode=jvp",
                bytes=3 * size,
                inputs=both,
                contenders=_ours_and_jax_nn(_pushforward("log_softmax")),
                truth=lambda x, t: [oracle.log_softmax_tangent(x, t)],
            )
            yield make(
                "log_softmax",
                options="mode=vjp",
                bytes=3 * size,
                inputs=both,
                contenders=(*_ours_and_jax_nn(_pullback("log_softmax")), _torch_backward("log_softmax")),
                truth=lambda x, c: [oracle.log_softmax_cotangent(x, c)],
            )
            if shape[1] in (4096, 32768):
                yield make(
                    "logsumexp",
                    options="mode=jvp",
                    bytes=2 * size,
                    inputs=both,
                    contenders=_ours_and_jax_nn(_pushforward("logsumexp")),
                    truth=lambda x, t: [oracle.logsumexp_tangent(x, t, -1)],
                )
            yield make(
                "logsumexp",
                options="mode=vjp",
                bytes=2 * size,
                inputs=with_direction(shape, dtype, shape[:-1]),
                contenders=_ours_and_jax_nn(_pullback("logsumexp")),
                truth=lambda x, c: [oracle.logsumexp_cotangent(x, c, -1)],
            )


def _derivative_of_softmax(dtype: str, x, c) -> list[Any]:
    return [oracle.softmax_derivative(x, c, saved=dtype)]


def _long(elements: int) -> Iterator[Cell]:
    """Rows that no block holds."""
    for dtype in DTYPES:
        yield from (forward_cell("softmax", dtype, shape_of(elements, cols)) for cols in (*LONG, *LONG_ODD))
        yield from (forward_cell("log_softmax", dtype, shape_of(elements, cols)) for cols in LONG_OF_LOG)
        yield from (jacobian_cell(dtype, shape_of(elements, cols)) for cols in LONG_BACKWARD)
        yield from (logsumexp_cell(dtype, shape_of(elements, cols)) for cols in LONG_LOGSUMEXP)


def _few_rows(elements: int) -> Iterator[Cell]:
    """Fewer long rows than multiprocessors: of 128K and 1M columns, and one of 16M."""
    few = [(rows, max(elements // part, 1)) for part in (1024, 128) for rows in (1, 4, 16, 64)]
    for dtype in DTYPES:
        for shape in (*few, (1, max(elements // 8, 1))):
            yield without(forward_cell("softmax", dtype, shape), "torch", "torch.compile", "quack")


def _along_axis_1(elements: int) -> Iterator[Cell]:
    for dtype in DTYPES:
        for batch, length, size in AXIS_1:
            yield _along_an_inner_axis(dtype, (batch, max(length * elements // ELEMENTS, 2), size))


def _along_an_inner_axis(dtype: str, shape: tuple[int, int, int]) -> Cell:
    """Softmax of the columns of a batch of matrices, which are not made of rows of the array."""
    batch, length, size = shape

    def inputs(key, hurtful):
        return (jnp.moveaxis(_scores(key, (batch, size, length), dtype, hurtful), -1, 1),)

    def sample(inputs, output):
        entry, column = np.unravel_index(sampled_of(batch * size, length), (batch, size))
        x, y = (np.asarray(array[entry, :, column]) for array in (*inputs, output))
        return [(y, oracle.softmax(x))]

    return Cell(
        "softmax",
        "forward",
        dtype,
        shape,
        "axis=1",
        2 * _size(shape, dtype),
        inputs,
        (*_ours_and_jax_nn(_plain("softmax", 1)), of_torch("softmax", 1)),
        lambda x: [oracle.softmax(x, 1)],
        sample=sample,
        fewer=lambda inputs, output: [("those of one matrix", (inputs[0][:1],), output[:1])],
    )


def _both(elements: int) -> Iterator[Cell]:
    for op in _OPS:
        for dtype in DTYPES:
            yield from (both_cell(op, dtype, shape_of(elements, cols)) for cols in (4096, 32768))


def both_cell(op: str, dtype: str, shape: tuple[int, ...]) -> Cell:
    """The forward pass and its vjp, from the cotangent of the output."""
    is_summed = op == "logsumexp"
    return Cell(
        op,
        "forward+backward",
        dtype,
        shape,
        "",
        (3 if is_summed else 5) * _size(shape, dtype),
        with_direction(shape, dtype, shape[:-1] if is_summed else None),
        _ours_and_jax_nn(_pullback_with_value(op)),
        functools.partial(_value_and_cotangent, op, dtype),
    )


def _value_and_cotangent(op: str, dtype: str, x, c) -> list[Any]:
    if op == "softmax":
        return [oracle.softmax(x), *_derivative_of_softmax(dtype, x, c)]
    if op == "logsumexp":
        return [oracle.logsumexp(x, -1), oracle.logsumexp_cotangent(x, c, -1)]
    return [oracle.log_softmax(x), oracle.log_softmax_cotangent(x, c)]


@functools.partial(jax.jit, static_argnames=("shape",))
def _random_mask(key, shape):
    return jax.random.bernoulli(jax.random.fold_in(key, 2), 0.8, shape)


def _masked(elements: int) -> Iterator[Cell]:
    """A random mask for every element, and a causal one that all heads of a batch share, whose bytes are not counted."""
    heads = (4, 8, max(elements // (32 * 2048), 1), 2048)
    for dtype in DTYPES:
        for shape in (shape_of(elements, cols) for cols in (1024, 2048, 8192)):
            yield _with_mask(dtype, shape, "full", functools.partial(_random_mask, shape=shape), int(np.prod(shape)))
        yield _with_mask(dtype, heads, "1x1xTxS", lambda _: jnp.tri(*heads[2:], dtype=bool)[None, None], 0)


def _with_mask(dtype, shape, word, mask: Callable[[Any], Any], mask_bytes: int, pass_: str = "forward") -> Cell:
    return Cell(
        "softmax",
        pass_,
        dtype,
        shape,
        f"where={word}",
        0 if pass_ == FIRST_CALL else 2 * _size(shape, dtype) + mask_bytes,
        lambda key, hurtful: (_scores(key, shape, dtype, hurtful), mask(key)),
        _ours_and_jax_nn(lambda module: {"build": lambda: lambda x, where: module.softmax(x, -1, where)})[
            : 1 if pass_ == FIRST_CALL else 2
        ],
        lambda x, where: [oracle.softmax(x, -1, where)],
    )


def masked_cell(dtype: str, shape: tuple[int, ...], backward: bool = False) -> Cell:
    """Softmax with a random mask of every element, and with its vjp if `backward`."""
    forward = _with_mask(dtype, shape, "full", functools.partial(_random_mask, shape=shape), math.prod(shape))
    if not backward:
        return forward

    def inputs(key, hurtful):
        x, where = forward.inputs(key, hurtful)
        return x, where, _normal(key, shape, dtype)

    def of(module):
        def both(x, where, c):
            y, vjp = jax.vjp(lambda x: module.softmax(x, -1, where), x)
            return y, vjp(c)[0]

        return {"build": lambda: both}

    def truth(x, where, c):
        return [oracle.softmax(x, -1, where), oracle.softmax_derivative(x, c, where=where, saved=dtype)]

    return replace(
        forward, pass_="forward+backward", inputs=inputs, contenders=_ours_and_jax_nn(of), truth=truth, bytes=2 * forward.bytes
    )


def _converted(dtype: str, out: str, shape: tuple[int, int]) -> Cell:
    """Scaled scores, and a result of another dtype."""
    return Cell(
        "softmax",
        "forward",
        dtype,
        shape,
        f"out={out} scale=0.125",
        _size(shape, dtype) + _size(shape, out),
        one_array(shape, dtype),
        (
            Contender(OURS, lambda: lambda x: library.softmax(x, scale=0.125, dtype=out)),
            Contender("jax.nn", lambda: lambda x: jax.nn.softmax(x.astype("float32") * 0.125).astype(out)),
        ),
        lambda x: [oracle.softmax(x, scale=0.125)],
    )


def _fused(shape: tuple[int, int]) -> Cell:
    """Softmax between operations that XLA fuses into its own.

    Scores, factor and bias are such that every sum is exact in bfloat16: whether XLA rounds in between makes no difference.
    """

    @functools.partial(jax.jit, static_argnames="hurtful")
    def inputs(key, hurtful):
        keys = jax.random.split(key, 3)
        scores = jax.random.randint(keys[0], shape, -63, 64).astype(jnp.float32) / 8
        if hurtful:
            chance = jax.random.uniform(keys[1], shape)
            first = lax.broadcasted_iota(jnp.int32, shape, 1) == 0
            scores = jnp.where(first, scores, jnp.where(chance < 0.3, -jnp.inf, jnp.where(chance < 0.35, -1024.0, scores)))
        bias = jax.random.randint(keys[2], shape[1:], -63, 64).astype(jnp.float32) / 16
        return scores.astype(jnp.bfloat16), jnp.asarray(0.5, jnp.bfloat16), bias.astype(jnp.bfloat16)

    def make(module):
        def fused(scores, factor, bias):
            return module.softmax((scores * factor + bias[None]).astype(jnp.float32), axis=-1).astype(jnp.bfloat16)

        return {"build": lambda: fused}

    return Cell(
        "softmax",
        "forward",
        "bfloat16",
        shape,
        "fused=1",
        2 * _size(shape, "bfloat16"),
        inputs,
        _ours_and_jax_nn(make),
        lambda scores, factor, bias: [oracle.softmax(oracle.to64(scores) * factor + bias)],
        shared=2,
    )


def _cast(shape: tuple[int, int]) -> Cell:
    """What models write to compute in float32: a cast before and one after."""

    def make(module):
        return {"build": lambda: lambda x: module.softmax(x.astype(jnp.float32), axis=-1).astype(jnp.bfloat16)}

    size, inputs = _size(shape, "bfloat16"), one_array(shape, "bfloat16")
    return Cell(
        "softmax",
        "forward",
        "bfloat16",
        shape,
        "cast=1",
        2 * size,
        inputs,
        _ours_and_jax_nn(make),
        lambda x: [oracle.softmax(x)],
    )


def _first_calls(elements: int) -> Iterator[Cell]:
    """Fresh programs of softmax, with a mask, and with its gradient; the very first also loads the modules of the kernels."""
    for dtype in DTYPES:
        masked = shape_of(elements, 10001)
        yield _with_mask(dtype, masked, "full", functools.partial(_random_mask, shape=masked), 0, FIRST_CALL)
        for shape in (shape_of(elements, cols) for cols in (4096, 32768)):
            make = functools.partial(Cell, "softmax", FIRST_CALL, dtype, shape, bytes=0)
            yield make(
                options="",
                inputs=one_array(shape, dtype),
                contenders=(Contender(OURS, lambda: lambda x: library.softmax(x)),),
                truth=lambda x: [oracle.softmax(x)],
            )
        for shape in (shape_of(elements // 2, cols) for cols in (4096, 32768)):  # of which no kernel is compiled yet
            yield Cell(
                "softmax",
                FIRST_CALL,
                dtype,
                shape,
                "grad=1",
                0,
                with_direction(shape, dtype),
                (Contender(OURS, **_pullback_with_value("softmax")(library)),),
                functools.partial(_value_and_cotangent, "softmax", dtype),
            )
