"""The cells of arrays that are sharded over all GPUs of a host, in one process.

The cells are the ones of the other suites, on a mesh of one axis. A call is a plain call of the library on sharded arrays:
softmax and cross-entropy along a sharded axis, a linear layer whose classes are sharded, attention whose tokens are. The option
`devices` says over how many. `mesh=auto` says that the mesh axis is left to XLA's partitioner; it is explicit otherwise. Causal
attention takes tokens as `jaxsoftmax.zigzag` deals them out, or, without the option `zigzag`, in order: the last device has
most to do. `permute=peer` says that attention runs with the flags of XLA that docs/scaling.md recommends for a ring.

Of every cell the row `one device` is the whole problem on one GPU, in the same run: `scaling` is its time over that of n GPUs
times n. `us` is wall-clock time, as no kernel's time shows a gap in which a device waits. Calls of softmax, of cross-entropy,
and of attention to few tokens are so short that starting a program on several devices may take longer. So a program makes
several, each of the last one's result. `kernel_us` is for comparison. `temporaries` are those of a call on one device. `bytes`
and `flops` are of all devices.

The suite `sharded_rows` has softmax, log_softmax and logsumexp of rows of all lengths, in each way in which devices can share
them: it tells from which length on a way pays.

Values are checked as in the other suites: parts are gathered, and what was dealt out is put back into order.
"""

import contextlib
import functools
import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import attention, check, cross_entropy, linear_cross_entropy, softmax
from benchmarks.cells import ONE, Cell, Contender
from jaxsoftmax._core import compat

COUNTS = (2, 4)  # of devices
CALLS = 8  # of a program of short calls
AXIS = "model"
COLUMNS, ROWS, VOCABULARY = P(None, AXIS), P(AXIS), 128256
TOKENS, FEW_TOKENS, HEADS, KEY_HEADS = 16384, 4096, 16, 4  # of attention, on each device
PEER = {  # the flags of XLA that docs/scaling.md recommends for a ring
    "xla_gpu_collective_permute_mode": "COLLECTIVES_PEER_MEMORY",
    "xla_gpu_collective_permute_combine_threshold_bytes": 2**30,
    "xla_gpu_experimental_parallel_collective_overlap_limit": 2,
}

_TRACING = threading.Lock()
_MOST_SCORES = 2**33  # bytes in float32, on each device, that a peer may hold them in: its gradients hold several

Again = Callable[[tuple[Any, ...], Any], tuple[Any, ...]]


def cells(counts: Sequence[int] = COUNTS, shrink: int = 1) -> list[Cell]:
    """All cells for each number of devices; with `shrink`, of sizes smaller by this factor."""
    kinds = _softmax, _cross_entropy, _linear_cross_entropy, _attention
    return [cell for devices in counts for kind in kinds for cell in kind(devices, shrink)]


def _softmax(devices: int, shrink: int) -> Iterator[Cell]:
    def cell(dtype: str, rows: int, cols: int, both: bool = False, mesh: str = "explicit") -> Cell:
        shape = rows // shrink, cols // shrink
        base = (softmax.both_cell if both else softmax.forward_cell)("softmax", dtype, shape)
        again: Again = (lambda inputs, output: output) if both else (lambda inputs, output: (output,))
        of_jax = next(contender for contender in base.contenders if contender.name == "jax.nn")
        return _sharded(base, devices, [COLUMNS, COLUMNS][: 1 + both], mesh=mesh, again=again, peers=[of_jax])

    for both in (False, True):
        for dtype in softmax.DTYPES:
            yield from (cell(dtype, rows, 131072, both) for rows in (2048, 8192))
        yield cell("bfloat16", 8192, 131072, both, mesh="auto")
    # What no bar names: shorter rows, and a width that no vector divides.
    yield cell("float32", 8192, 32768)
    yield from (cell("bfloat16", 8192, cols) for cols in (32768, 8192))
    yield cell("bfloat16", 2048, 50257 // shrink * shrink * devices)


def row_cells(counts: Sequence[int] = (*COUNTS, 8), shrink: int = 1) -> list[Cell]:
    """The cells that say which way of `WAYS` rows are best shared, by how long and how many they are, beside `jax.nn`'s."""
    return [cell for devices in counts for cell in _rows(devices, shrink)]


def _rows(devices: int, shrink: int) -> Iterator[Cell]:
    def cell(op: str, dtype: str, rows: int, cols: int, both: bool = False) -> Cell:
        shape = rows // shrink, cols // shrink
        base = (softmax.both_cell if both else softmax.forward_cell)(op, dtype, shape)
        again: Again = _gradient_again if op == "logsumexp" else _results_again if both else _output_again
        specs = [COLUMNS, P() if op == "logsumexp" else COLUMNS][: 1 + both]
        of_jax = next(contender for contender in base.contenders if contender.name == "jax.nn")
        return _in_each_way(_sharded(base, devices, specs, again=again, peers=[of_jax]))

    few, many = 256, 8192
    for dtype in softmax.DTYPES:
        for cols in (2048, 8192, 32768):
            yield from (cell("softmax", dtype, rows, cols) for rows in (few, 2048, many))
            yield from (cell("softmax", dtype, rows, cols, both=True) for rows in (few, many))
        yield from (cell("softmax", dtype, *shape) for shape in ((32768, 2048), (few, 131072), (2048, 131072)))
    for cols in (2048, 8192, 32768):
        yield cell("log_softmax", "bfloat16", many, cols)
        yield cell("log_softmax", "bfloat16", many, cols, both=True)
        yield from (cell("logsumexp", "bfloat16", rows, cols, both=True) for rows in (few, many))


def _results_again(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The output as the next input, and the gradient as the next cotangent."""
    del inputs
    return output


def _gradient_again(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The gradient as the next input."""
    return output[1], *inputs[1:]


# Whether one kernel does all, and otherwise why kernels do not make states.
WAYS: dict[str, tuple[bool, str | None]] = {
    "one kernel": (True, None),
    "states": (False, None),
    "reference": (False, "the reference is measured"),
}


def _in_each_way(cell: Cell) -> Cell:
    """A cell of rows that devices share, without the row of one device, and in each of `WAYS`."""
    ours, _, *peers = cell.contenders
    names = [name for name in WAYS if (cell.op, name) != ("logsumexp", "one kernel")]
    ways = [replace(ours, name=name, context=functools.partial(_made_to, name, ours.context)) for name in names]
    return replace(cell, contenders=(ours, *ways, *peers))


@contextlib.contextmanager
def _made_to(way: str, context: Callable[[], contextlib.AbstractContextManager[Any]]) -> Iterator[None]:
    """Makes all calls share rows in this way."""
    devices, mosaic = (importlib.import_module(f"jaxsoftmax.ops.softmax.{name}") for name in ("across_devices", "mosaic_sm90"))
    is_one, reason = WAYS[way]
    always = mock.patch.object(devices, "slower_states", return_value=reason)
    refused = None if is_one else f"the way {way!r} is measured"
    with context(), mock.patch.object(mosaic, "_refused_devices", return_value=refused), always:
        yield


def _cross_entropy(devices: int, shrink: int) -> Iterator[Cell]:
    for rows, cols, mesh in ((8192, VOCABULARY, "explicit"), (8192, VOCABULARY, "auto"), (4096, 151936, "explicit")):
        shape = rows // shrink, cols // shrink // devices * devices
        base = cross_entropy.cell_of("bfloat16", shape, backward=True)
        of_optax = next(contender for contender in base.contenders if contender.name == "optax")

        yield _sharded(base, devices, [COLUMNS, P()], mesh=mesh, again=_gradient_again, peers=[of_optax], mesh_of_peers="auto")


def _linear_cross_entropy(devices: int, shrink: int) -> Iterator[Cell]:
    for class_axis, spec in ((0, ROWS), (1, COLUMNS)):
        shape = 16384 // shrink, 4096 // shrink, VOCABULARY // shrink // devices * devices
        base = linear_cross_entropy.cell_of(*shape, backward=True, class_axis=class_axis)
        letters = "hv" if class_axis else "vh"
        plain = Contender("jax.nn", functools.partial(_plain_linear, letters))
        yield _sharded(base, devices, [P(), spec, P()], peers=[plain], mesh_of_peers="auto")


def _plain_linear(letters: str) -> Callable[..., Any]:
    """The mean loss from whole logits, and its gradients; the label's logit is a sum, so that no row is gathered."""

    def loss(hidden, weight, labels):
        logits = jnp.einsum(f"th,{letters}->tv", hidden, weight).astype(jnp.float32)
        of_label = jnp.where(lax.broadcasted_iota(labels.dtype, logits.shape, 1) == labels[:, None], logits, 0)
        return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.sum(of_label, -1))

    return jax.value_and_grad(loss, (0, 1))


def _attention(devices: int, shrink: int) -> Iterator[Cell]:
    def cell(tokens: int = TOKENS, zigzag: bool = False, flags: dict[str, Any] | None = None, **more: Any) -> Cell:
        call = attention.Call(1, tokens // shrink * devices, max(HEADS // shrink, 2), 128, **more)
        base, specs = attention.cell_of(call), [COLUMNS] * (3 + call.backward)
        sharded = functools.partial(_sharded, base, devices, specs, flags=flags)
        if tokens == FEW_TOKENS:
            sharded = functools.partial(sharded, again=_gradients_again if call.backward else _output_again)
        if zigzag:
            return sharded(ours=attention.cell_of(replace(call, zigzag=devices)), zigzag=devices)
        if flags:
            return sharded()
        peers = [contender for contender in base.contenders if contender.name == "cudnn"]
        if 4 * call.heads * call.length**2 <= devices * _MOST_SCORES and call.key_heads is None:
            peers.append(attention.of_xla(call))
        return sharded(peers=peers, mesh_of_peers="auto")

    causal: dict[str, Any] = {"causal": True, "zigzag": True}
    for backward in (False, True):
        yield from (cell(backward=backward, **kind) for kind in ({}, causal))
        # What no bar names: tokens in order, fewer tokens, and keys that heads share.
        yield cell(backward=backward, causal=True)
        yield from (cell(FEW_TOKENS, backward=backward, **kind) for kind in ({}, causal))
        yield cell(backward=backward, key_heads=max(KEY_HEADS // shrink, 1), **causal)
        for tokens in (TOKENS, FEW_TOKENS):
            yield from (cell(tokens, backward=backward, flags=PEER, **kind) for kind in ({}, causal))
    yield cell(FEW_TOKENS, backward=True, deterministic=True, **causal)


def _output_again(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The output as the next first input."""
    return output, *inputs[1:]


def _gradients_again(inputs: tuple[Any, ...], output: Any) -> tuple[Any, ...]:
    """The gradient of the query as the next cotangent."""
    return *inputs[:-1], output[0]


def _sharded(
    base: Cell,
    devices: int,
    specs: Sequence[P],
    *,
    mesh: str = "explicit",
    mesh_of_peers: str | None = None,
    again: Again | None = None,
    ours: Cell | None = None,
    peers: Sequence[Contender] = (),
    zigzag: int | None = None,
    flags: dict[str, Any] | None = None,
) -> Cell:
    """A cell of one device on several.

    Args:
      base: what one device computes, and what is true.
      devices: how many.
      specs: how each input is sharded.
      mesh: "explicit" or "auto".
      mesh_of_peers: likewise, if theirs is another one: some cannot say how results of theirs are sharded.
      again: from inputs and output the inputs of the next call, where a program makes several.
      ours: the cell whose contender runs on the devices, if it is not `base`.
      peers: those of one device, which run on the devices too.
      zigzag: over how many devices axis 1 of all inputs and outputs is dealt out for ours.
      flags: of XLA, for what runs on the devices.
    """
    options = flags or {}

    def on_devices(contender: Contender, kind: str, zigzag: int | None = None) -> Contender:
        def prepare(*inputs):
            dealt = inputs if zigzag is None else [_zigzag(array, zigzag, 1) for array in inputs]
            placed = (NamedSharding(mesh_of(devices, kind), spec) for spec in specs)
            return tuple(jax.device_put(array, place) for array, place in zip(dealt, placed, strict=True))

        return replace(
            contender,
            build=functools.partial(_chained, contender.build, again),
            prepare=prepare,
            sample=functools.partial(_sample, base, again, zigzag),
            devices=devices,
            context=lambda: _told(mesh_of(devices, kind), options),
            compiler_options=options,
        )

    own, alone = (cell.contenders[0] for cell in (ours or base, base))
    words = [*(ours or base).options.split(), f"devices={devices}", *(["mesh=auto"] if mesh == "auto" else [])]
    words += ["permute=peer"] if options else []
    return replace(
        base,
        options=" ".join(sorted(words)),
        contenders=(
            on_devices(own, mesh, zigzag),
            replace(
                alone,
                name=ONE,
                build=functools.partial(_chained, alone.build, again),
                sample=functools.partial(_sample, base, again, None),
            ),
            *(on_devices(peer, mesh_of_peers or mesh) for peer in peers),
        ),
        fewer=lambda inputs, output: [],
        program=True,
        calls=CALLS if again else 1,
    )


@contextlib.contextmanager
def _told(mesh: Mesh, flags: dict[str, Any]) -> Iterator[None]:
    """Sets the mesh, and what the library knows of XLA_FLAGS; XLA itself takes `compiler_options`."""
    with _TRACING:  # cells are traced on several threads, and what is patched is the same for all
        known = compat.xla_flags() | {name: str(value) for name, value in flags.items()}
        with mock.patch.object(compat, "xla_flags", return_value=known), jax.set_mesh(mesh):
            yield


def _chained(build: Callable[[], Callable[..., Any]], again: Again | None) -> Callable[..., Any]:
    """A program of several calls, which gives the outputs of the first and of the last one."""
    function = build()
    if again is None:
        return function

    def program(*inputs):
        first = output = function(*inputs)
        for _ in range(CALLS - 1):
            inputs = again(inputs, lax.optimization_barrier(output))  # XLA must not fuse one call's end into the next
            output = function(*inputs)
        return first, output

    return program


def _sample(base: Cell, again: Again | None, zigzag: int | None, inputs: Sequence[Any], output: Any) -> list[tuple[Any, Any]]:
    """Gathers the compared part of an output, in order."""
    output = jax.tree.map(whole, output if again is None else output[0])
    if zigzag is not None:
        tokens = inputs[0].shape[1]
        place = np.argsort(np.asarray(_zigzag(jnp.arange(tokens), zigzag, 0)))
        output = jax.tree.map(lambda array: array[:, place], output)
    return check.pairs(base, base.contenders[0], inputs, output)


def _zigzag(array: jax.Array, devices: int, axis: int) -> jax.Array:
    return importlib.import_module("jaxsoftmax").zigzag(array, devices, axis=axis)


def whole(array: jax.Array) -> jax.Array:
    """All of an array on one device, which takes no detour over the host."""
    if len(array.sharding.device_set) == 1:
        return array
    assert isinstance(array.sharding, NamedSharding)
    return jax.device_put(array, NamedSharding(array.sharding.mesh, P())).addressable_shards[0].data


@functools.cache
def mesh_of(devices: int, kind: str) -> Mesh:
    """All devices in a line, whose axis is "explicit" or "auto"."""
    return jax.make_mesh((devices,), (AXIS,), axis_types=(AxisType.Auto if kind == "auto" else AxisType.Explicit,))
