"""Visibility by position: which devices' keys the queries of a device see. It settles the steps of a ring.

A window, or a causal mask, rules keys out while a program is traced. Lengths, segments and masks are known only when it runs,
and rule nothing out here. NumPy computes a step for all devices at a time: 256 devices have 65536 pairs, and a loop over pairs
took 6 s.
"""

import functools
import math
from dataclasses import dataclass, replace

import numpy as np

from jaxsoftmax.ops.attention.context_parallel.cut import EVERYTHING, SequenceCut

Window = tuple[int | None, int | None]

# Operands beside a causal mask that depend on positions. `Sequences.sees_halves` allows none of them.
_DEPEND_ON_POSITIONS = frozenset(["query_offset", "seeds", "query_lengths", "key_lengths", "query_segments"])


@dataclass(frozen=True)
class AttentionPart:
    """Pairs pieces of queries with pieces of keys, which one call of a kernel attends to."""

    queries: slice
    keys: slice  # several pieces are paired with the pieces of queries one by one, and one serves all of these
    window: Window  # it hides all that the window of the attention hides of this part
    # True if each query sees all of one half of the keys of another device, or none: see `Sequences.sees_halves`.
    is_halved: bool = False
    # True if the blocks of threads of the kernel take tickets for their tiles, even if nothing depends on positions. They
    # do if the kernel gets an offset.
    takes_tickets: bool = False


@dataclass(frozen=True)
class RingStep:
    """One step of a ring, in which a device has the keys of the device `shift` before it."""

    shift: int  # number of devices between the two, 0 for a device's own keys
    parts: tuple[AttentionPart, ...]


@dataclass(frozen=True)
class RingSchedule:
    """The steps of a ring, without those in which no device sees anything."""

    # If queries see keys by halves, the sequences are in the usual order here: a shard is one piece then.
    sequences: "Sequences"
    # In the order of their shifts. The first step has a device's own keys, and its first part all queries.
    steps: tuple[RingStep, ...]


@dataclass(frozen=True)
class Sequences:
    """Says how devices share the queries and the keys of one attention, and which keys a query may see."""

    queries: SequenceCut
    keys: SequenceCut
    window: Window  # numbers of positions before and after its own that a query sees; None for a side without a limit
    names: frozenset[str]  # of the operands

    @property
    def can_ring(self) -> bool:
        """True if keys can travel around: queries and keys are cut alike, in the usual order or that of these devices."""
        is_alike = bool(self.queries.axes) and self.queries.axes == self.keys.axes
        return is_alike and self.queries.zigzag in (None, self.queries.devices)

    @functools.cached_property
    def ring(self) -> RingSchedule:
        """The steps of a ring."""
        is_halved, steps, sequences = self.sees_halves, [], self
        for shift in range(self.queries.devices):
            parts = ring_parts(self, shift, is_halved)
            is_seen = sees(self, shift, parts).any(1)
            if is_seen.any():
                steps.append(RingStep(shift, tuple(part for part, some in zip(parts, is_seen, strict=True) if some)))
        if is_halved:
            queries, keys = (replace(cut, zigzag=None) for cut in (self.queries, self.keys))
            sequences = replace(self, queries=queries, keys=keys)
        return RingSchedule(sequences, tuple(steps))

    @property
    def sees_halves(self) -> bool:
        """True if queries see the keys of another device by halves.

        They do in zigzag order if nothing except a causal mask depends on positions. All queries see the early keys of a device
        before theirs, and late queries see all keys of a device behind. Lengths say so in the forward pass, and segments in the
        backward pass: nothing is copied, and one kernel call does a step. A query sees keys of its own device as it does
        wherever positions grow along a shard, so the order does not matter there.
        """
        is_causal = self.window == (None, 0)
        if self.queries.zigzag is None or not is_causal or self.queries.piece_length != self.keys.piece_length:
            return False
        return _DEPEND_ON_POSITIONS.isdisjoint(self.names)

    @property
    def sides(self) -> tuple[float, float]:
        """The window, infinite for a side without a limit."""
        left, right = (math.inf if side is None else side for side in self.window)
        return left, right

    def distances(self, shift: int) -> np.ndarray:
        """Computes by how much pieces of keys start behind pieces of queries.

        Returns:
          int64 `[devices, pieces of queries, pieces of keys]`, for the keys of the device `shift` before each.
        """
        return np.roll(self.keys.all_starts, shift, 0)[:, None, :] - self.queries.all_starts[:, :, None]


def ring_parts(sequences: Sequences, shift: int, is_halved: bool) -> list[AttentionPart]:
    """Lists the parts by which the queries of a device attend to the keys of the device `shift` before it.

    In zigzag order early queries are paired with early keys and late queries with late keys, as two entries of a batch;
    positions may rule one entry out. Late queries attend to early keys in a call of their own, and early queries to late keys.
    """

    # A collective that runs beside the kernel holds some multiprocessors. Tiles of a fixed schedule would wait for these.
    def part(queries, keys, window, is_halved=False):
        return AttentionPart(queries, keys, window, is_halved, takes_tickets=True)

    if is_halved and shift:
        return [part(EVERYTHING, EVERYTHING, (None, None), is_halved=True)]
    parts = [part(EVERYTHING, EVERYTHING, sequences.window)]
    if not is_halved and sequences.keys.n_pieces == 2:
        left, right = sequences.window
        is_exact = "query_offset" not in sequences.names and sequences.queries.piece_length == sequences.keys.piece_length
        # Early keys then come before all late queries, and only the left side can hide some. Late keys come after all early
        # queries, and only the right side can hide some.
        windows = ((left, None), (None, right)) if is_exact else (sequences.window, sequences.window)
        early, late = slice(0, 1), slice(1, 2)
        parts += [part(late, early, windows[0]), part(early, late, windows[1])]
    return parts


def sees(sequences: Sequences, shift: int, parts: list[AttentionPart] | tuple[AttentionPart, ...]) -> np.ndarray:
    """Tells whether a query of each device may see a key of the device `shift` before it, bool `[parts, devices]`."""
    visible = np.ones((len(parts), sequences.queries.devices), bool)
    if "query_offset" in sequences.names:
        return visible
    (left, right), distances = sequences.sides, sequences.distances(shift)
    last_query, last_key = sequences.queries.piece_length - 1, sequences.keys.piece_length - 1
    for sees_part, part in zip(visible, parts, strict=True):
        if not part.is_halved:
            ahead = distances[:, part.queries, part.keys]
            sees_part[:] = ((ahead <= last_query + right) & (ahead + last_key >= -left)).any((1, 2))
    return visible


def visible_shares(sequences: Sequences, shift: int) -> np.ndarray:
    """Estimates which share of the keys of the device `shift` before it the queries of each device see, float `[devices]`.

    It samples 8 positions of each piece.
    """
    left, right = sequences.sides
    query, key = (cut.piece_length * (np.arange(8) + 0.5) / 8 for cut in (sequences.queries, sequences.keys))
    ahead = np.sort(np.subtract.outer(key, query).ravel())
    distances = sequences.distances(shift)
    n_seen = np.searchsorted(ahead, right - distances, "right") - np.searchsorted(ahead, -left - distances, "left")
    return np.maximum(n_seen, 0).mean((1, 2)) / ahead.size


def needs(sequences: Sequences, shifts: range, parts: tuple[AttentionPart, ...]) -> np.ndarray:
    """Tells which devices need the keys that arrive in each of several steps, bool `[steps, devices]`.

    In these steps a device hands the keys on, so it needs them for itself or for a device behind it.
    """
    needed = [sees(sequences, shift, parts).any(0) for shift in shifts]
    for here, next_step in zip(needed[-2::-1], needed[:0:-1], strict=True):
        here |= np.roll(next_step, -1)
    return np.array(needed)


def key_routes(sequences: Sequences, shift: int, parts: tuple[AttentionPart, ...]) -> list[tuple[int, int]]:
    """Lists the devices as pairs with the device `shift` behind each, if that one sees any of its keys."""
    devices, visible = sequences.queries.devices, sees(sequences, shift, parts).any(0)
    return [(j, i) for j in range(devices) if visible[i := (j + shift) % devices]]
