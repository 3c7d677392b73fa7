"""Ring attention: keys and values travel around the devices, and each device attends to those that it holds.

Forward, in step `s` device `i` attends to the keys of device `i - s`, from the state `(lse, out)` of the steps before:

    step 0       step 1       step 2       step 3

    Q0: K0       Q0: K3       Q0: K2       Q0: K1
    Q1: K1       Q1: K0       Q1: K3       Q1: K2
    Q2: K2       Q2: K1       Q2: K0       Q2: K3
    Q3: K3       Q3: K2       Q3: K1       Q3: K0

1. Keys are sent from where they live, one step ahead: they arrive while the step before computes. A barrier keeps XLA from
   sending more before that step is done, so a device has its own keys and those of two others at most.
2. Steps in which no device sees anything are left out, and a device that sees nothing of some keys does not receive them.
3. Backward, keys are sent again and a device's own keys come last. Derivatives of visiting keys go straight home while the next
   step computes. There they are added in the order of the steps, so the bits are equal run after run.

In each step a device sends the bytes of its keys and values; backward also their derivatives in float32. A causal mask leaves
devices without work unless tokens are in zigzag order, where each has an early and a late piece (`cut.py`, `visible.py`).

Source: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889 (ring); Brandon et al. 2023, arXiv:2311.09431 (balance of causal rings).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from jaxsoftmax._core import compat
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.context_parallel import attend, cut, visible
from jaxsoftmax.ops.attention.context_parallel.attend import KeyShard
from jaxsoftmax.ops.attention.context_parallel.cut import EVERYTHING, SequenceCut
from jaxsoftmax.ops.attention.context_parallel.shard import AttentionShard, add_named, without_sinks
from jaxsoftmax.ops.attention.context_parallel.visible import AttentionPart, RingSchedule
from jaxsoftmax.ops.attention.operands import INITIAL_RESULTS

_COMBINED_BYTES = 30 << 20  # bytes that XLA sends by one collective, unless XLA_FLAGS has another number

# Computes a step: `carry, derivatives = compute(carry, keys, parts, shift)`. `keys` is a `KeyShard`. `derivatives` are those of
# these keys by name, if there are any. `shift` is None in a loop, where only the program knows it.
_Compute = Callable[..., tuple]


def attention(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[out, lse]`.

    The first part starts from the sinks, and each other part from the output and the log-sum-exp of those before it: Hopper's
    kernel starts its sums with that output, and the other implementations merge two states. So the program has up to three
    compiled kernels: for the first step, for those that follow, and for the last one, which rounds the output.
    """
    schedule, at, sinks = shard.sequences.ring, shard.n_batch_axes, shard.operands.get("sinks")
    query_dtype = shard.operands["query"].dtype
    shard = replace(without_sinks(shard), sequences=schedule.sequences)
    last = schedule.steps[-1]

    def compute(state, keys, parts, shift):
        for part in parts:
            extra = {}
            if state is not None:
                parts_of_state = [cut.take_pieces(x, part.queries, at) for x in state]
                extra = dict(zip(INITIAL_RESULTS, parts_of_state, strict=True))
            elif sinks is not None:
                extra = {"sinks": jnp.expand_dims(sinks, at)}
            # The last call rounds the output itself, if it has all queries.
            is_last = shift == last.shift and part == last.parts[-1] and part.queries == EVERYTHING and not shard.is_partial
            results = attend.attend(shard, primitive.ATTENTION, part, keys, extra, return_lse=True, is_partial=not is_last)
            if state is None:
                state = results
            else:
                state = [cut.put_pieces(x, part.queries, new, at) for x, new in zip(state, results, strict=True)]
        return state, {}

    (out, lse), _ = _around(shard, schedule, compute, None)
    out = out if shard.is_partial else out.astype(query_dtype)
    return [cut.join_pieces("out", out, at), cut.join_pieces("lse", lse, at)]


def tangents(shard: AttentionShard) -> list[jax.Array]:
    """Computes `[dout, dlse]`."""
    schedule, d_sinks = shard.sequences.ring, shard.operands.get("d_sinks")
    shard = replace(shard.without("d_sinks"), sequences=schedule.sequences)

    def compute(sums, keys, parts, shift):
        del shift
        return attend.add_tangents(shard, sums, keys, parts, d_sinks), {}

    (out, lse), _ = _around(shard, schedule, compute, None)
    return attend.finish_tangents(shard, out, lse)


def cotangents(shard: AttentionShard, wanted: Sequence[str]) -> list[jax.Array]:
    """Computes the cotangents of the operands `wanted`.

    A device's own keys come last, so that no derivative is on its way when the last step has run. Nothing hides the keys that
    the first step waits for, which have half the bytes of derivatives. (To attend to some of a device's own keys first, which
    would hide them, took as long on two H200s at their limit of power. Sums of derivatives that travel on with the keys would
    send 1.5 times the bytes, and nothing would hide the last hop.)
    """
    schedule = shard.sequences.ring
    shard = attend.before_cotangents(replace(shard, sequences=schedule.sequences))

    def compute(sums, keys, parts, shift):
        return attend.add_cotangents(shard, wanted, sums, keys, parts, has_sinks=shift == 0)

    def receive(sums, derivatives):
        return add_named(sums, {name: x.astype(shard.sum_dtype) for name, x in derivatives.items()})

    sums = attend.zero_cotangents(shard, wanted)
    sums, own_keys = _around(shard, schedule, compute, sums, receive, own_last=True)
    sums = receive(sums, own_keys)
    return [attend.finish_cotangent(shard, name, sums[name]) for name in wanted]


@dataclass(frozen=True)
class _Stretch:
    """Consecutive steps of a ring with the same parts. A stretch of several is a loop, in which devices hand keys on."""

    shifts: range  # shifts of the steps
    parts: tuple[AttentionPart, ...]  # parts of each step


def _stretches(schedule: RingSchedule) -> list[_Stretch]:
    """Groups steps into stretches: a stretch for each step unless there are more than `attend.MOST_UNROLLED` steps."""
    stretches: list[_Stretch] = []
    for step in schedule.steps:
        before = stretches[-1] if stretches and len(schedule.steps) > attend.MOST_UNROLLED else None
        if before and before.shifts[0] and before.shifts.stop == step.shift and before.parts == step.parts:
            stretches[-1] = _Stretch(range(before.shifts[0], step.shift + 1), step.parts)
        else:
            stretches.append(_Stretch(range(step.shift, step.shift + 1), step.parts))
    return stretches


def _no_derivatives(carry, derivatives):
    del derivatives
    return carry


def _around(shard, schedule: RingSchedule, compute: _Compute, carry, receive=_no_derivatives, *, own_last=False):
    """Runs the steps of a ring.

    Args:
      shard: the attention.
      schedule: the steps.
      compute: computes a step: `_Compute`.
      carry: carry before the first step.
      receive: `carry = receive(carry, derivatives)` adds derivatives of this device's keys that other devices have sent.
      own_last: True if the step of a device's own keys comes last and not first.

    Returns:
      The carry, and the derivatives from the last step, which `receive` has not added.
    """
    home, queries = shard.keys_in_pieces(), shard.sequences.queries
    stretches = _stretches(schedule)
    stretches = [*stretches[1:], stretches[0]] if own_last else stretches
    index = queries.index
    # The first step waits for these keys, so they are sent as they are: packing them would only delay it.
    arriving = _send_first(shard, stretches[0], home)
    outgoing: dict[str, jax.Array] = {}
    if any(stretch.shifts[0] for stretch in stretches[1:]):
        outgoing = home if _are_sent_together(home) else _pack(home)
    derivatives: dict[str, jax.Array] = {}
    for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
        shift, sums = stretch.shifts[-1], {}
        if len(stretch.shifts) > 1:
            carry, arriving, sums = _loop(shard, compute, receive(carry, derivatives), arriving, home, stretch)
            derivatives = {}
        keys = _unpack(arriving, home) if shift else home
        arriving = _send_first(shard, following, outgoing)  # started before the attention, which runs meanwhile
        carry, visiting = compute(carry, KeyShard(keys, _before(queries, index, shift)), stretch.parts, shift)
        sent = _send_home(shard, visiting, sums, stretch)
        carry = receive(carry, derivatives) if derivatives else carry
        if following is not None:  # no more keys are sent before this step is done
            carry, arriving, home, outgoing = lax.optimization_barrier((carry, arriving, home, outgoing))
        derivatives = sent
    return carry, derivatives


def _loop(shard, compute: _Compute, carry, arriving, home, stretch: _Stretch):
    """Runs all steps of a stretch except the last one, in a loop in which each device hands its keys on to the next device.

    A loop cannot send to another device in each step, as the other steps do. Sums of the derivatives of keys travel with the
    keys, so that they are added in the order of the steps, as at home, and go home from the last step.

    Returns:
      The carry, the keys of the last step, and the sums of their derivatives.
    """
    queries = shard.sequences.queries
    devices, index = queries.devices, queries.index
    hops = np.any(visible.needs(shard.sequences, stretch.shifts, stretch.parts)[1:], 0)
    key_hops = [(int(i - 1) % devices, int(i)) for i in np.flatnonzero(hops)]
    sum_hops = [(i, (i + 1) % devices) for i in range(devices)]

    def run(shift, state):
        carry, keys, sums = state
        following = _send(queries, keys, key_hops)  # started before the attention, which runs meanwhile
        device = _before(queries, index, jnp.asarray(shift, jnp.int32))
        carry, visiting = compute(carry, KeyShard(_unpack(keys, home), device), stretch.parts, None)
        visiting = _pack(visiting) if visiting else {}
        sums = jax.tree.map(jnp.add, sums, visiting) if sums else visiting
        return lax.optimization_barrier((carry, following, _send(queries, sums, sum_hops)))

    first, *_, last = stretch.shifts
    return attend.repeat(run, first + 1, last, run(first, (carry, arriving, {})))


def _before(queries: SequenceCut, index, shift):
    """Computes the number of the device `shift` before this one."""
    return lax.rem(index - shift + queries.devices, jnp.int32(queries.devices))


def _send(queries: SequenceCut, arrays: Mapping[str, jax.Array], routes: list[tuple[int, int]]):
    return jax.tree.map(lambda x: lax.ppermute(x, queries.axes, routes), arrays)


def _send_first(shard, stretch: _Stretch | None, keys: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Sends the keys of a stretch's first step from where they live. Nothing is sent if these are a device's own."""
    if stretch is None or stretch.shifts[0] == 0:
        return {}
    queries, shift = shard.sequences.queries, stretch.shifts[0]
    needed = visible.needs(shard.sequences, stretch.shifts, stretch.parts)[0]
    routes = [(j, i) for j in range(queries.devices) if needed[i := (j + shift) % queries.devices]]
    return _send(queries, keys, routes)


def _send_home(shard, derivatives, sums, stretch: _Stretch):
    """Sends derivatives of visiting keys to the device of these keys, with the packed `sums` that travelled with the keys.

    They are packed whatever XLA combines: Hopper's kernel writes the derivatives of keys and values into one array, which is
    sent without a copy if it has no padding.
    """
    shift = stretch.shifts[-1]
    if shift == 0 or not derivatives:
        return derivatives
    if sums:
        before = _unpack(sums, derivatives)
        derivatives = {name: before[name] + x for name, x in derivatives.items()}
        devices = shard.sequences.queries.devices
        pairs = [((j + shift) % devices, j) for j in range(devices)]
    else:
        pairs = [(i, j) for j, i in visible.key_routes(shard.sequences, shift, stretch.parts)]
    return _unpack(_send(shard.sequences.queries, _pack(derivatives), pairs), derivatives)


def _are_sent_together(arrays: dict[str, jax.Array]) -> bool:
    """Tells whether XLA sends these arrays by one collective. It is unknown, so False, if their sizes are symbolic."""
    most = compat.xla_flags().get("xla_gpu_collective_permute_combine_threshold_bytes", _COMBINED_BYTES)
    size = sum(x.nbytes for x in arrays.values())
    return isinstance(size, int) and size <= int(most)


def _pack(arrays: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Packs arrays by name into one flat array of each dtype, by the name of the dtype, which one collective sends.

    XLA's scheduler lets one collective at a time run beside kernels, and would wait for a second one. Up to a number of bytes
    XLA combines several arrays into one collective. Larger ones are packed before they are sent: that is a copy of 64 us, where
    the collective takes 540 us (keys and values of 134 MB). Slices of the packed array that arrives are no copies in the
    forward pass. Segments have a dtype of their own, and are small.

    It returns the arrays as they are if automatic mesh axes may shard them too: flat arrays have no axes that such a sharding
    fits, and XLA would gather them.
    """
    mesh = jax.typeof(next(iter(arrays.values()))).sharding.mesh
    if any(kind == AxisType.Auto and mesh.shape[axis] > 1 for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)):
        return arrays
    flat = {}
    for name in sorted(arrays):
        flat.setdefault(arrays[name].dtype.name, []).append(arrays[name].ravel())
    return {dtype: jnp.concatenate(parts) for dtype, parts in flat.items()}


def _unpack(arrays: dict[str, jax.Array], like: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Undoes `_pack`: returns arrays with the names and shapes of `like`. Arrays that are not packed stay as they are."""
    if arrays.keys() == like.keys():
        return arrays
    result, starts = {}, dict.fromkeys(arrays, 0)
    for name in sorted(like):
        dtype, shape, size = like[name].dtype.name, like[name].shape, like[name].size
        result[name] = arrays[dtype][starts[dtype] :][:size].reshape(shape)
        starts[dtype] += size
    return result
