"""The cells of softmax, log_softmax and logsumexp.

Unless said otherwise an array has 2^27 elements; smaller ones stay in the GPU's cache, as they would between the layers of a
model. `bytes` counts each input that has as many elements as `x`, and each such
output, once, and no other; for `forward+backward`, those of the two passes together.
"""

import functools
import importlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import jaxsoftmax
from benchmarks.cells import FIRST_CALL, OURS, Cell, Contender, torch
from benchmarks.check import to_torch
from tests import oracle

ELEMENTS = 2**27
POWERS = tuple(2**n for n in range(6, 16))
ODD = (100, 127, 1000, 10001)
BACKWARD = (64, 128, 256, 1024, 4096, 8192, 16384, 32768, 1000)
COMPILED_BY_TORCH = (64, 256, 1024, 4096, 16384, 32768)
DTYPES = ("float32", "bfloat16")


def cells(elements: int = ELEMENTS) -> list[Cell]:
    """All cells: first calls first, while no kernel module is loaded, then copies, with which the others are compared."""
    return [
        *_first_calls(elements),
        *(copy_cell(dtype, elements) for dtype in (*DTYPES, "float16")),
        *(_forward(op, dtype, _shape(elements, cols)) for op in _OPS for dtype in DTYPES for cols in (*POWERS, *ODD)),
        *(_forward("softmax", "float16", _shape(elements, cols)) for cols in (1024, 4096, 32768)),
        *(_forward("softmax", "float16", (rows, cols)) for rows in (32, 64) for cols in (512, 1024, 2048, 4096, 8192)),
        _forward("softmax", "float32", (1024, 512)),
        *(_logsumexp(dtype, _shape(elements, cols)) for dtype in DTYPES for cols in BACKWARD),
        *_backward(elements),
        *_both(elements),
        *_masked(elements),
        _converted("bfloat16", "float32", _shape(elements, 4096)),
        _converted("float32", "bfloat16", _shape(elements, 4096)),
        _fused(_shape(elements, 4096)),
        _cast(_shape(elements, 4096)),
    ]


_OPS = ("softmax", "log_softmax")


def _shape(elements: int, cols: int) -> tuple[int, int]:
    return max(elements // cols, 1), cols


def _size(shape: tuple[int, ...], dtype: str) -> int:
    return int(np.prod(shape)) * jnp.dtype(dtype).itemsize


# Inputs.


@functools.partial(jax.jit, static_argnames=("shape", "dtype", "hurtful"))
def _scores(key, shape, dtype, hurtful):
    """A standard normal times 3, and an offset for each row; if `hurtful`, rows in turn have outliers, 1e4 added, or `-inf`."""
    keys = jax.random.split(key, 3)
    x = 3 * jax.random.normal(keys[0], shape) + 4 * jax.random.normal(keys[1], (*shape[:-1], 1))
    if hurtful:
        chance = jax.random.uniform(keys[2], shape)
        kind = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 2) % 3
        finite = lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1) == 0
        outliers = jnp.where(chance < 0.02, 1e3, x)
        holes = jnp.where((chance < 0.3) & ~finite, -jnp.inf, x)
        x = lax.select_n(kind, outliers, x + 1e4, holes)
    return x.astype(dtype)


@functools.partial(jax.jit, static_argnames=("shape", "dtype"))
def _normal(key, shape, dtype):
    return jax.random.normal(jax.random.fold_in(key, 1), shape).astype(dtype)


def one_array(shape, dtype) -> Callable[..., tuple[Any, ...]]:
    return lambda key, hurtful: (_scores(key, shape, dtype, hurtful),)


def _with_direction(shape, dtype, direction=None) -> Callable[..., tuple[Any, ...]]:
    """Inputs `x` and a tangent or cotangent, of its shape unless `direction` is another one."""
    return lambda key, hurtful: (_scores(key, shape, dtype, hurtful), _normal(key, direction or shape, dtype))


# Contenders.


def _function(module: Any, op: str) -> Callable[..., Any]:
    return functools.partial(getattr(module, op), axis=-1)


def _ours_and_jax_nn(make: Callable[[Any], dict[str, Any]]) -> tuple[Contender, Contender]:
    """`make` gives what a contender needs, from the module that holds the op."""
    return Contender(OURS, **make(jaxsoftmax)), Contender("jax.nn", **make(jax.nn))


def _plain(op: str) -> Callable[[Any], dict[str, Any]]:
    return lambda module: {"build": lambda: lambda x: _function(module, op)(x)}


def _pullback(op: str) -> Callable[[Any], dict[str, Any]]:
    """The vjp alone: the function that it returns is a pytree, whose residuals are arguments of the program."""
    return lambda module: {
        "build": lambda: lambda vjp, c: vjp(c)[0],
        "prepare": lambda x, c: (jax.vjp(_function(module, op), x)[1], c),
    }


def _pushforward(op: str) -> Callable[[Any], dict[str, Any]]:
    """The jvp alone, in the same way."""
    return lambda module: {
        "build": lambda: lambda linear, t: linear(t),
        "prepare": lambda x, t: (jax.linearize(_function(module, op), x)[1], t),
    }


def _pullback_with_value(op: str) -> Callable[[Any], dict[str, Any]]:
    def both(module, x, c):
        y, vjp = jax.vjp(_function(module, op), x)
        return y, vjp(c)[0]

    return lambda module: {"build": lambda: functools.partial(both, module)}


def torch_contender(
    name: str, build: Callable[[], Callable[..., Any]], *, prepare=to_torch, needs=("torch",), **more
) -> Contender:
    return Contender(name, build, prepare, framework="torch", needs=needs, **more)


def of_torch(op: str) -> Contender:
    return torch_contender("torch", lambda: functools.partial(getattr(torch(), op), dim=-1))


def _compiled_softmax() -> Callable[..., Any]:
    module = torch()
    module._dynamo.reset()  # a function that was compiled for many shapes is no longer compiled for another
    return module.compile(lambda x: module.softmax(x, -1), dynamic=False)


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

    shape = _shape(elements, 4096)
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
        lambda x: [_exactly(oracle.to64(x))],
    )


def _exactly(value: np.ndarray) -> Any:
    return oracle.Truth(value, np.full(value.shape, oracle.TINY))


def _forward(op: str, dtype: str, shape: tuple[int, int]) -> Cell:
    contenders = [*_ours_and_jax_nn(_plain(op)), of_torch(op)]
    if op == "softmax":
        if dtype in DTYPES and shape[1] in COMPILED_BY_TORCH:
            contenders.append(torch_contender("torch.compile", _compiled_softmax))
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


def _logsumexp(dtype: str, shape: tuple[int, int]) -> Cell:
    """It reads once, as sums do."""

    def true_sum(x):
        return [_exactly(oracle.to64(x).sum(-1))]

    def sum_of_torch():
        return functools.partial(torch().sum, dim=-1, dtype=torch().float32)

    contenders = (
        *_ours_and_jax_nn(_plain("logsumexp")),
        of_torch("logsumexp"),
        Contender("sum", lambda: functools.partial(jnp.sum, axis=-1, dtype="float32"), truth=true_sum),
        torch_contender("sum", sum_of_torch, truth=true_sum),
    )
    return Cell(
        "logsumexp",
        "forward",
        dtype,
        shape,
        "",
        _size(shape, dtype),
        one_array(shape, dtype),
        contenders,
        lambda x: [oracle.logsumexp(x, -1)],
    )


def _backward(elements: int) -> Iterator[Cell]:
    """Derivatives alone: the Jacobian product of softmax, the two maps of log_softmax, the vjp of logsumexp."""
    for dtype in DTYPES:
        for shape in (_shape(elements, cols) for cols in BACKWARD):
            make = functools.partial(Cell, pass_="backward", dtype=dtype, shape=shape)
            both, size = _with_direction(shape, dtype), _size(shape, dtype)
            yield make(
                "softmax",
                options="",
                bytes=3 * size,
                inputs=both,
                contenders=(*_ours_and_jax_nn(_pullback("softmax")), _torch_backward("softmax")),
                truth=functools.partial(_derivative_of_softmax, dtype),
            )
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
                inputs=_with_direction(shape, dtype, shape[:-1]),
                contenders=_ours_and_jax_nn(_pullback("logsumexp")),
                truth=lambda x, c: [oracle.logsumexp_cotangent(x, c, -1)],
            )


def _derivative_of_softmax(dtype: str, x, c) -> list[Any]:
    return [oracle.softmax_derivative(x, c, saved=dtype)]


def _both(elements: int) -> Iterator[Cell]:
    for op in _OPS:
        for dtype in DTYPES:
            for shape in (_shape(elements, cols) for cols in (4096, 32768)):
                yield Cell(
                    op,
                    "forward+backward",
                    dtype,
                    shape,
                    "",
                    5 * _size(shape, dtype),
                    _with_direction(shape, dtype),
                    _ours_and_jax_nn(_pullback_with_value(op)),
                    functools.partial(_value_and_cotangent, op, dtype),
                )


def _value_and_cotangent(op: str, dtype: str, x, c) -> list[Any]:
    if op == "softmax":
        return [oracle.softmax(x), *_derivative_of_softmax(dtype, x, c)]
    return [oracle.log_softmax(x), oracle.log_softmax_cotangent(x, c)]


@functools.partial(jax.jit, static_argnames=("shape",))
def _random_mask(key, shape):
    return jax.random.bernoulli(jax.random.fold_in(key, 2), 0.8, shape)


def _masked(elements: int) -> Iterator[Cell]:
    """A random mask for every element, and a causal one that all heads of a batch share, whose bytes are not counted."""
    heads = (4, 8, max(elements // (32 * 2048), 1), 2048)
    for dtype in DTYPES:
        for shape in (_shape(elements, cols) for cols in (1024, 2048, 8192)):
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
            Contender(OURS, lambda: lambda x: jaxsoftmax.softmax(x, scale=0.125, dtype=out)),
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
        masked = _shape(elements, 10001)
        yield _with_mask(dtype, masked, "full", functools.partial(_random_mask, shape=masked), 0, FIRST_CALL)
        for shape in (_shape(elements, cols) for cols in (4096, 32768)):
            make = functools.partial(Cell, "softmax", FIRST_CALL, dtype, shape, bytes=0)
            yield make(
                options="",
                inputs=one_array(shape, dtype),
                contenders=(Contender(OURS, lambda: lambda x: jaxsoftmax.softmax(x)),),
                truth=lambda x: [oracle.softmax(x)],
            )
        for shape in (_shape(elements // 2, cols) for cols in (4096, 32768)):  # of which no kernel is compiled yet
            yield Cell(
                "softmax",
                FIRST_CALL,
                dtype,
                shape,
                "grad=1",
                0,
                _with_direction(shape, dtype),
                (Contender(OURS, **_pullback_with_value("softmax")(jaxsoftmax)),),
                functools.partial(_value_and_cotangent, "softmax", dtype),
            )
