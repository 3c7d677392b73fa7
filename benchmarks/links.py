"""The cells of collectives alone: how long an exchange between the GPUs of a host takes, and what it costs beside a product.

Each is a program of several exchanges, each of what the last one gave, on the wall clock: times of small ones are latencies.
`shape` and the option `size` are what a device gives, in float32; `bytes` are what it sends over its links: as much for
`ppermute`, `2 (n - 1) / n` times that for `psum`, as in a ring, and `n - 1` times for `all_gather`.

`overlap` is a `ppermute` of 128 MiB beside a product of two matrices, of 8192 x 8192, and, as the option `of` says, each alone.
Whether the two run at a time is for XLA to decide. The row `latency hiding` has XLA's scheduler for this on.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.cells import Cell, Contender
from benchmarks.sharded import AXIS, COUNTS, mesh_of, whole
from benchmarks.softmax import exactly
from tests.support import oracle

SIZES = {"64KiB": 2**16, "1MiB": 2**20, "16MiB": 2**24, "128MiB": 2**27}
SIDE = 8192  # of the matrices
CALLS = 32  # of a program: small exchanges take less time than its start

_FEW = 256  # elements of each device that are compared
_HIDING = {"xla_gpu_enable_latency_hiding_scheduler": True}


def cells(counts: Sequence[int] = COUNTS, shrink: int = 1) -> list[Cell]:
    """All cells for each number of devices; with `shrink`, of sizes smaller by this factor."""
    return [cell for devices in counts for kind in (_exchanges, _overlap) for cell in kind(devices, shrink)]


def _exchanges(devices: int, shrink: int) -> Iterator[Cell]:
    kinds: dict[str, tuple[Callable[[Any], Any], Callable[[np.ndarray], np.ndarray], float]] = {
        "ppermute": (functools.partial(_shift, devices), _shifted, 1),
        "psum": (lambda x: lax.psum(x, AXIS), lambda x: np.repeat(x.sum(0, keepdims=True), devices, 0), 2 - 2 / devices),
        "all_gather": (
            lambda x: lax.all_gather(x, AXIS, tiled=True),
            lambda x: np.tile(x, (devices, 1)),
            devices - 1,
        ),
    }
    for op, (exchange, truth, sent) in kinds.items():
        for name, size in SIZES.items():

            def sample(inputs, output, truth=truth):
                return [(np.asarray(whole(output[0][:, :_FEW])), exactly(truth(_few(inputs[0]))))]

            # All that was gathered has as its first part one that may be sent next.
            program = _program(devices, lambda x, exchange=exchange: (exchange(x),), lambda y: (y[:1],), 1)
            yield _cell(
                op, f"size={name}", "float32", (size // shrink // 4,), devices, program, sample, int(sent * size) // shrink
            )


def _overlap(devices: int, shrink: int) -> Iterator[Cell]:
    side, size = SIDE // shrink, SIZES["128MiB"] // shrink
    work = {
        "ppermute": lambda x, a, b: (_shift(devices, x), a),
        "product": lambda x, a, b: (x, a @ b),
        "both": lambda x, a, b: (_shift(devices, x), a @ b),
    }
    for of, function in work.items():

        def sample(inputs, output, of=of):
            x, a, b = inputs
            few = np.asarray(whole(output[0])[:, :_FEW]), np.asarray(whole(output[1])[:2, :_FEW])
            moved = _few(x) if of == "product" else _shifted(_few(x))
            product = oracle.to64(a[:2]) @ oracle.to64(b[:, :_FEW]) if of != "ppermute" else oracle.to64(a[:2, :_FEW])
            return list(zip(few, map(exactly, (moved, product)), strict=True))

        flops, sent = (0 if of == "ppermute" else 2 * side**3), (0 if of == "product" else size)
        program = _program(devices, function, lambda *output: output, 2, shared=1)
        shape = (size // 4, side, side)
        yield _cell("overlap", f"of={of}", "bfloat16", shape, devices, program, sample, sent, flops)


def _cell(op, option, dtype, shape, devices, program, sample, sent, flops=0) -> Cell:
    def inputs(key, hurtful):
        """Small integers, whose sums are exact, and matrices whose product is as large as the first."""
        keys = jax.random.split(key, 3)
        x = jax.random.randint(keys[0], (devices, shape[0]), -8, 9).astype(jnp.float32)
        if len(shape) == 1:
            return (x,)
        side = shape[1]
        a, b = (jax.random.normal(key, (rows, side), dtype) for key, rows in zip(keys[1:], (devices * side, side), strict=True))
        return x, a, b * jnp.asarray(side**-0.5, dtype)

    def prepare(*arrays):
        specs = P(AXIS), P(AXIS), P()
        places = (NamedSharding(mesh_of(devices, "auto"), spec) for spec in specs[: len(arrays)])
        return tuple(jax.device_put(array, place) for array, place in zip(arrays, places, strict=True))

    contenders = (
        Contender("exchange", lambda: program, prepare, devices=devices),
        Contender("latency hiding", lambda: program, prepare, devices=devices, compiler_options=_HIDING),
    )
    return Cell(
        op,
        "forward",
        dtype,
        shape,
        " ".join(sorted([f"devices={devices}", option])),
        sent,
        inputs,
        contenders if op == "overlap" else contenders[:1],
        _no_truth,
        flops=flops,
        sample=sample,
        program=True,
        calls=CALLS,
    )


def _program(devices: int, work: Callable[..., Any], again: Callable[..., Any], varied: int, shared: int = 0):
    """Work on each device's parts, several times, of its own results; it gives the first ones and the last ones.

    `work` takes `varied` parts of the devices, and `shared` arrays that are the same for all; `again` makes the next parts from
    its results.
    """

    def on_device(*inputs):
        first = output = work(*inputs)
        for _ in range(CALLS - 1):
            output = work(*again(*lax.optimization_barrier(output)), *inputs[varied:])
        return *first, *output

    specs = (P(AXIS),) * varied + (P(),) * shared
    return lambda *inputs: jax.shard_map(
        on_device, mesh=mesh_of(devices, "auto"), in_specs=specs, out_specs=P(AXIS), check_vma=False
    )(*inputs)


def _shift(devices: int, x: Any) -> Any:
    return lax.ppermute(x, AXIS, [(device, (device + 1) % devices) for device in range(devices)])


def _shifted(parts: np.ndarray) -> np.ndarray:
    return np.roll(parts, 1, 0)


def _few(x: jax.Array) -> np.ndarray:
    return np.asarray(x[:, :_FEW])


def _no_truth(*rows):
    raise AssertionError("it is compared by `sample`")
