"""Attention whose sequence is cut over devices: what they exchange, and what each computes on its shard.

    ring         each device attends to its own keys and then, step by step, to those of the others, which arrive meanwhile;
                 backward its own come last
    all_gather   each device gets all keys, and attends to them once
    all_to_all   each device gets all of the sequence for some of the heads (Ulysses), and attends to it once
    merge        where queries are whole: each device attends to its keys, and the states are merged

A state is `(lse, out)`. A step of a ring starts from the state of the steps before it. Elsewhere states of parts of the keys
are merged with `online`. With the log-sum-exp and `delta` of whole rows, derivatives of parts add up. A device adds up those
of its queries; those of keys that visit it go straight home, where they are added in the order of the steps: equal bits run
after run.

A shard is cut into pieces of neighbouring positions: one, or two where the sequence is in zigzag order. A kernel counts
positions from the first key that it is given: `query_offset`, lengths and seeds say where that is. They are not known while
lowering, so steps of one kind run one kernel, kernels skip what positions rule out, and blocks of threads take tickets: a
collective that runs beside them has some of the multiprocessors.

Source: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889 (ring); Jacobs et al. 2023, arXiv:2309.14509 (Ulysses); Brandon et al.
2023, arXiv:2311.09431 (the balance of causal rings).
"""

import functools
import math
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType

from jaxsoftmax import online
from jaxsoftmax._core import compat
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax.ops.attention import primitive
from jaxsoftmax.ops.attention.context_parallel.order import granules, ordered, reordered, start_of
from jaxsoftmax.ops.attention.context_parallel.settings import Strategy
from jaxsoftmax.ops.attention.operands import AXES, state_of

STRATEGIES = get_args(Strategy)

# What `_cheapest` counts with, of one H200 and NVLink: operations and bytes of a second, and seconds of a step beside those.
_OPERATIONS, _BYTES, _STEP = 6e14, 2.6e11, 3e-5
_MOST_GATHERED = 2**29  # bytes of keys and values that a device may have of the others
_MOST_COMBINED = 30 << 20  # bytes that XLA sends by one collective, unless XLA_FLAGS says how many
_MOST_UNROLLED = 16  # steps of a ring, or states of devices, that are written out: of more, those alike are one loop
_MOST_MERGED = 2**22  # numbers of the states of all devices, above which they are summed up and not gathered

# Operands and results with an axis of queries, of keys, and of both: of the latter only the queries are cut.
_OF_QUERIES = frozenset(["query", "query_segments", "out", "lse", "d_out", "d_lse", "d_query"])
_OF_KEYS = frozenset(["key", "value", "key_segments", "d_key", "d_value"])
_OF_BOTH = frozenset(["bias", "mask", "d_bias"])
_MAPS = {this.name: this for this in (primitive.ATTENTION, primitive.ATTENTION_JVP, primitive.ATTENTION_VJP)}


def dot_product_attention(run, *, return_lse=True, **given):
    """`[out, lse]`, or `[out]`, of a shard.

    Args:
      run: `run(map, operands, **params)`, the results of a map on this device, of operands by name.
      return_lse: whether lse is a result.
      given: shards of the operands, by name, and parameters: see `_Work`. Masks and biases have their part of the queries, and
        all keys.
    """
    return _Work(run, primitive.ATTENTION, given).attention()[: 2 if return_lse else 1]


def dot_product_attention_jvp(run, **given):
    """`[dout, dlse]` of a shard."""
    return _Work(run, primitive.ATTENTION_JVP, given).tangents()


def dot_product_attention_vjp(run, *, wanted, **given):
    """The cotangents of a shard that are wanted. Of operands that several devices share each has its part of the sum."""
    return _Work(run, primitive.ATTENTION_VJP, given).cotangents(wanted)


@dataclass(frozen=True)
class _Cut:
    """How a sequence is cut over devices, into pieces of neighbouring positions.

    Attributes:
      axes: the mesh axes over which it is, or none.
      devices: how many there are along those.
      length: tokens of a shard.
      zigzag: the `n` of its order, or None.
    """

    axes: tuple[str, ...]
    devices: int
    length: int
    zigzag: int | None

    @property
    def pieces(self) -> int:
        return granules(self.devices, self.zigzag) // self.devices

    @property
    def size(self) -> int:
        """Tokens of a piece."""
        return self.length // self.pieces

    @property
    def index(self):
        """The number of this device."""
        return lax.axis_index(self.axes) if self.axes else jnp.int32(0)

    def starts(self, device, xp: Any = jnp):
        """The positions of the first tokens of a device's pieces, int32 `[pieces]`."""
        granule = device * self.pieces + xp.arange(self.pieces, dtype=np.int32)
        return self.size * start_of(granule, granules(self.devices, self.zigzag), self.zigzag, xp.where)

    @functools.cached_property
    def all_starts(self) -> np.ndarray:
        """Returns the first positions of the pieces of all devices, int64 `[devices, pieces]`."""
        return self.starts(np.arange(self.devices)[:, None], np).astype(np.int64)

    def places(self, device):
        """Where those are in arrays of the whole sequence."""
        return device * self.length + self.size * jnp.arange(self.pieces, dtype=np.int32)


@dataclass(frozen=True)
class _Part:
    """Which queries of this device attend to which keys, or are paired with them piece by piece.

    Attributes:
      rows: the pieces of queries.
      cols: the pieces of keys, as many or one.
      window: one that hides what the window does.
      halves: whether early queries see no keys of devices behind, and late keys are seen by none of those: see `_is_halved`.
    """

    rows: slice
    cols: slice
    window: tuple[int | None, int | None]
    halves: bool = False


@dataclass(frozen=True)
class _Stretch:
    """Steps of a ring that are alike: one, or several in a loop, in which each device hands keys on to the next.

    Attributes:
      shifts: from how many devices before the keys come, one after the other.
      parts: what attends to them.
    """

    shifts: range
    parts: list[_Part]


class _Work:
    """What a device does.

    Parameters are those of the primitives, and `over`: how "queries" and "keys" are cut. `is_manual` says that the user has cut
    them, in a `shard_map`, which adds up what devices have of the derivatives of what they share.
    """

    def __init__(self, run, this, given):
        operands = {name: given[name] for name in this.by_name if given.get(name) is not None}
        self._start(run, operands, **{name: option for name, option in given.items() if name not in this.by_name})

    def _start(
        self,
        run,
        given,
        *,
        over,
        window,
        zigzag=None,
        strategy=None,
        is_manual=False,
        knows_cuts=True,
        is_partial=False,
        **params,
    ):
        strategy = strategy if knows_cuts else None
        self.given, self.window, self.zigzag, self.is_manual = given, window, zigzag, is_manual
        self.is_partial, self.scale = is_partial, params["scale"]
        self.at, self.dtype = given["query"].ndim - 3, accumulator(given["query"].dtype)
        axes = [over[name].over if name in over else () for name in ("queries", "keys")]
        counts = [math.prod([lax.axis_size(axis) for axis in own]) for own in axes]
        axes = [own if count > 1 else () for own, count in zip(axes, counts, strict=True)]
        lengths = [given[name].shape[-3] for name in ("query", "key")]
        has_order = window != (None, None) or {"seeds", "query_lengths", "key_lengths"} & set(given)
        self.rows, self.cols = map(_Cut, axes, counts, lengths, [zigzag if has_order else None] * 2)
        self.halves = False
        self.steps = self._steps() if self.rows.axes and self.rows.axes == self.cols.axes else []
        if strategy is not None and not {"queries", "keys"} & set(over):
            raise ValueError(
                "dot_product_attention: parallel.strategy must be None where no sequence is sharded, got"
                f" {strategy!r} with whole queries and keys; in a jax.shard_map give parallel.axis_name"
            )
        self.way = self._way(strategy)
        self.halves = self.way == "ring" and self._is_halved()
        if self.halves:
            self.rows, self.cols = (replace(cut, zigzag=None) for cut in (self.rows, self.cols))
            self.steps = self._steps()
        # One function, so that parts of the same shapes are traced and lowered once.
        self.run = jax.jit(
            lambda this, operands, window, **more: run(_MAPS[this], operands, window=window, **params, **more),
            static_argnums=(0, 2),
            static_argnames=("return_lse", "wanted", "is_partial"),
        )

    # Which way.

    def _way(self, wanted) -> str:
        """One of `STRATEGIES`, or "merge", or "whole" where nothing is cut, and only the order of `zigzag` is to be undone."""
        if not self.cols.axes:
            return "all_gather" if self.rows.axes else "whole"
        if not set(self.cols.axes) & set(self.rows.axes):
            return "merge"
        devices, reasons = self.rows.devices, {}
        if self.rows.axes != self.cols.axes:
            reasons = dict.fromkeys(("ring", "all_to_all"), "queries and keys are cut over different mesh axes")
        elif self.rows.zigzag not in (None, devices):
            reasons["ring"] = f"the order is that of zigzag={self.zigzag}, and there are {devices} shards"
        heads, key_heads = (self.given[name].shape[-2] for name in ("query", "key"))
        if heads % devices or key_heads % devices:
            reasons.setdefault("all_to_all", f"{devices} devices cannot share {heads} heads and {key_heads} key heads evenly")
        if self.rows.length == 1 and not _OF_BOTH.isdisjoint(self.given):
            reasons.setdefault("all_to_all", "of masks and biases it is not known whether devices share them")
        if wanted in reasons:
            raise NotImplementedError(f"dot_product_attention: parallel.strategy={wanted!r} cannot run: {reasons[wanted]}")
        return wanted or self._cheapest([way for way in STRATEGIES if way not in reasons])

    def _cheapest(self, ways) -> str:
        """The one that should take the least time, by a model of what is computed and what is sent."""
        if len(ways) == 1:
            return ways[0]
        (*batch, length, heads, size), (*_, keys, key_heads, _) = self.given["query"].shape, self.given["key"].shape
        sizes, devices = size + self.given["value"].shape[-1], self.rows.devices
        of_head = math.prod(batch) * sizes * self.given["query"].dtype.itemsize
        of_queries, of_keys = of_head * heads * length, of_head * key_heads * keys
        of_scores = sum(self.given[name].nbytes for name in ("bias", "mask") if name in self.given)
        block = 2 * math.prod(batch) * heads * length * keys * sizes / _OPERATIONS
        shares = block * np.array([self._shares(shift) for shift in range(devices)])
        own, *others = (shares[shift].max() for shift, _ in self.steps)
        seconds = {
            "ring": own + sum(max(step, of_keys / _BYTES) + _STEP for step in others),
            "all_gather": shares.sum(0).max() + (devices - 1) * of_keys / _BYTES + _STEP,
            "all_to_all": shares.sum() / devices + (of_queries + of_keys + devices * of_scores) / _BYTES + 2 * _STEP,
        }
        if (devices - 1) * of_keys > _MOST_GATHERED:
            seconds["all_gather"] = math.inf
        return min(ways, key=seconds.__getitem__)

    def _shares(self, shift) -> np.ndarray:
        """The share of the keys `shift` devices before it that the queries of each device see, from 8 positions of a piece."""
        left, right = self._sides()
        row, col = (cut.size * (np.arange(8) + 0.5) / 8 for cut in (self.rows, self.cols))
        ahead = np.sort(np.subtract.outer(col, row).ravel())
        apart = self._apart(shift)
        seen = np.searchsorted(ahead, right - apart, "right") - np.searchsorted(ahead, -left - apart, "left")
        return np.maximum(seen, 0).mean((1, 2)) / ahead.size

    def _sides(self) -> tuple[float, float]:
        """Positions that a query sees to the left and to the right, infinite where nothing ends them."""
        left, right = (math.inf if side is None else side for side in self.window)
        return left, right

    def _apart(self, shift) -> np.ndarray:
        """Positions of keys `shift` devices before, less those of queries, `[devices, pieces of queries, pieces of keys]`."""
        return np.roll(self.cols.all_starts, shift, 0)[:, None, :] - self.rows.all_starts[:, :, None]

    def _is_halved(self) -> bool:
        """Whether keys of others are seen by halves: in zigzag order, if nothing but a causal mask depends on positions.

        All queries see the early keys of a device before, and late queries all keys of one behind. Lengths say so, backward
        segments: nothing is copied, and a kernel is called once. On its own shard a query sees keys as wherever positions grow.
        """
        if self.rows.zigzag is None or self.window != (None, 0) or self.rows.size != self.cols.size:
            return False
        return {"query_offset", "seeds", "query_lengths", "key_lengths", "query_segments"}.isdisjoint(self.given)

    def _parts(self, shift: int = 0) -> list[_Part]:
        """What the queries of a shard attend to of a shard of the keys, of so many devices before.

        In zigzag order pieces are paired with their like. Late queries see all early keys that `left` shows, and no early query
        sees more of late keys than `right` shows.
        """
        (left, right), everything = self.window, slice(None)
        if self.halves and shift:
            return [_Part(everything, everything, (None, None), halves=True)]
        found = [_Part(everything, everything, self.window)]
        if self.cols.pieces == 2:
            is_exact = "query_offset" not in self.given and self.rows.size == self.cols.size
            sides = ((left, None), (None, right)) if is_exact else (self.window,) * 2
            early, late = slice(0, 1), slice(1, 2)
            found += [_Part(late, early, sides[0]), _Part(early, late, sides[1])]
        return found

    def _seen(self, shift, parts) -> np.ndarray:
        """Tells whether a query of each device may see a key of the device `shift` before it, `[parts, devices]`."""
        found = np.ones((len(parts), self.rows.devices), bool)
        if "query_offset" in self.given:
            return found
        (left, right), apart = self._sides(), self._apart(shift)
        for sees, part in zip(found, parts, strict=True):
            if not part.halves:
                own = apart[:, part.rows, part.cols]
                sees[:] = ((own <= self.rows.size - 1 + right) & (own + self.cols.size - 1 >= -left)).any((1, 2))
        return found

    def _steps(self) -> list[tuple[int, list[_Part]]]:
        """From how many devices before the keys come, and what attends to them, as far as some device sees any."""
        found = []
        for shift in range(self.rows.devices):
            parts = self._parts(shift)
            parts = [part for part, sees in zip(parts, self._seen(shift, parts), strict=True) if sees.any()]
            if shift == 0 and not (parts and parts[0].rows == slice(None)):
                parts.insert(0, self._parts()[0])  # which has every row
            if parts:
                found.append((shift, parts))
        return found

    def _pairs(self, shift):
        """Finds the devices that send keys, and those that get them because they see any."""
        devices, sees = self.rows.devices, self._seen(shift, self._parts(shift)).any(0)
        return [(j, i) for j in range(devices) if sees[i := (j + shift) % devices]]

    # The maps.

    def attention(self):
        """`[out, lse]`."""
        name = "dot_product_attention"
        if self.way in ("whole", "all_to_all"):
            return self._of_whole_sequences(name, ("out", "lse"), return_lse=True, is_partial=self.is_partial)
        is_one = self.way == "all_gather"
        sinks = None if is_one else self.given.pop("sinks", None)
        if sinks is not None:  # which not all steps have: their batch is that of the queries
            query = self.given["query"]
            batch = jnp.broadcast_shapes(query.shape[: self.at], sinks.shape[: self.at])
            self.given["query"] = jnp.broadcast_to(query, (*batch, *query.shape[self.at :]))
        if self.way == "ring":
            return self._along_ring(sinks)

        def attend(_, keys, device, parts, shift):
            options = {"return_lse": True, "is_partial": self.is_partial or not is_one}
            return [self._attend(name, part, keys, device, **options) for part in parts], {}

        found, _ = self._over_keys(attend, None, lambda found, _: found)
        if is_one:
            ((out, lse),) = found
            return [self._joined("out", out), self._joined("lse", lse)]
        state = self._merged(functools.reduce(online.merge, [state_of(out, lse, self.dtype) for out, lse in found]))
        if sinks is not None:  # keys without a value
            m = jnp.broadcast_to(jnp.expand_dims(sinks, (self.at, self.at + 1)).astype(self.dtype), state.m.shape)
            state = online.merge(state, online.State(m, jnp.ones_like(m), jnp.zeros_like(cast(jax.Array, state.o))))
        state: Any = online.finish(state)
        out, lse = state.o if self.is_partial else state.o.astype(self.given["query"].dtype), jnp.swapaxes(state.m, -1, -2)
        return [self._joined("out", out), self._joined("lse", lse)]

    def _along_ring(self, sinks):
        """`[out, lse]`. Each part of the keys starts from the state of the parts before it; the first part has the sinks."""
        last_shift, last_parts = self.steps[-1]

        def attend(found, keys, device, parts, shift):
            for part in parts:
                more = {} if found is None else {"onto": [_sliced(x, part.rows, self.at) for x in found]}
                extra = {"sinks": jnp.expand_dims(sinks, self.at)} if found is None and sinks is not None else None
                is_last = shift == last_shift and part == last_parts[-1] and part.rows == slice(None) and not self.is_partial
                more |= {"return_lse": True, "is_partial": not is_last}
                own = self._attend(primitive.ATTENTION.name, part, keys, device, extra, **more)
                found = own if found is None else [self._replaced(*pair, part) for pair in zip(found, own, strict=True)]
            return found, {}

        (out, lse), _ = self._over_keys(attend, None, lambda found, _: found)
        out = out if self.is_partial else out.astype(self.given["query"].dtype)
        return [self._joined("out", out), self._joined("lse", lse)]

    def _replaced(self, x, own, part):
        """An array of all pieces of the queries with those of a part."""
        if part.rows == slice(None):
            return own
        start, _, _ = part.rows.indices(self.rows.pieces)
        return lax.dynamic_update_slice_in_dim(x, own, start, self.at)

    def _merged(self, state):
        """The state of the keys of all devices, by one collective where rows are few."""
        axes, devices, finished = self.cols.axes, self.cols.devices, online.finish(state)
        m, o = finished.m, cast(jax.Array, finished.o)
        if devices * o.size <= _MOST_MERGED:
            both = jnp.concatenate([o, m[..., None]], -1)
            if self.is_manual:  # a sum is the same on all devices by its type, and its transpose is right there
                both = jnp.where(lax.iota(np.int32, devices).reshape(-1, *(1,) * both.ndim) == self.cols.index, both[None], 0)
                both = lax.psum(both, axes)
            else:
                both = lax.all_gather(both, axes)
            o, m = jnp.split(both, [o.shape[-1]], -1)

            def pushed(i, state):
                return online.merge(state, state_of(o[i], jnp.swapaxes(m[i, ..., 0], -1, -2), self.dtype))

            first = state_of(o[0], jnp.swapaxes(m[0, ..., 0], -1, -2), self.dtype)
            return _repeated(pushed, 1, devices, first)
        top = lax.pmax(lax.stop_gradient(m), axes)
        return online.State(top, *lax.psum(online.rescale(finished, top)[1:], axes))

    def tangents(self):
        """`[dout, dlse]`: with out and lse of all keys, those by parts of the keys add up."""
        name, sinks = "dot_product_attention_jvp", self.given.pop("d_sinks", None)
        if self.way in ("whole", "all_to_all"):
            self.given |= {} if sinks is None else {"d_sinks": sinks}
            return self._of_whole_sequences(name, ("out", "lse"))
        if sinks is not None and self.way == "merge":
            sinks = jnp.where(self.cols.index == 0, sinks, 0)

        def attend(sums, keys, device, parts, shift):
            for part in parts:
                more = {}
                if sinks is not None and part.rows == slice(None) and sums is None:
                    more = {"d_sinks": jnp.expand_dims(sinks, self.at)}
                parts_of_sums = self._attend(name, part, keys, device, more, is_partial=True)
                found = [self._in_rows(x.astype(self.dtype), part) for x in parts_of_sums]
                sums = found if sums is None else [a + b for a, b in zip(sums, found, strict=True)]
            return sums, {}

        (out, lse), _ = self._over_keys(attend, None, lambda sums, _: sums)
        if self.way == "merge":
            out, lse = lax.psum((out, lse), self.cols.axes)
        return [self._joined("out", out).astype(self.given["query"].dtype), self._joined("lse", lse)]

    def cotangents(self, wanted):
        """Those that are wanted."""
        name = "dot_product_attention_vjp"
        if self.way in ("whole", "all_to_all"):
            found = self._of_whole_sequences(name, wanted, wanted=wanted)
            return [self._summed(*pair).astype(pair[1].dtype) for pair in zip(wanted, found, strict=True)]
        # Or else XLA would keep the keys that came in the forward pass, to send none a second time; or would send them before
        # `lse` is there, and with it all of that pass.
        names = [name for name in self.given if name in _OF_KEYS or name in ("lse", "d_out", "d_lse")]
        self.given |= dict(zip(names, lax.optimization_barrier([self.given[name] for name in names]), strict=True))
        sums = {name: jnp.zeros_like(self._in_pieces(name), self.dtype) for name in ("query", "bias") if name in wanted}

        def attend(sums, keys, device, parts, shift):
            sums, visitors = dict(sums), {}
            for part in parts:
                # Those of sinks are found from lse and delta alone, once, with all queries.
                names = tuple([n for n in wanted if n != "sinks" or (shift == 0 and "sinks" not in sums)])
                more = {"onto": _sliced(sums["query"], part.rows, self.at)} if "query" in names else {}
                found = self._attend(name, part, keys, device, wanted=names, is_partial=True, **more) if names else ()
                for name_, x in zip(names, found, strict=True):
                    if name_ == "bias":
                        sums[name_] = self._with_columns(sums[name_], x.astype(self.dtype), part, device)
                    elif name_ == "sinks":
                        sums[name_] = jnp.squeeze(x, self.at)
                    elif name_ == "query":
                        sums[name_] = self._replaced(sums[name_], x, part)
                    else:
                        _add(visitors, name_, self._in_cols(x.astype(self.dtype), part))
            return sums, visitors

        def arrived(sums, visitors):
            sums = dict(sums)
            for name_, x in visitors.items():
                _add(sums, name_, x.astype(self.dtype))
            return sums

        sums, last = self._over_keys(attend, sums, arrived, own_last=True)
        sums = arrived(sums, last)
        found = []
        for name_ in wanted:
            x = sums[name_] * self.scale if name_ == "query" else sums[name_]
            if name_ == "sinks" and self.way == "merge":
                x = jnp.where(self.cols.index == 0, x, 0)
            if name_ == "bias" and self.way == "all_gather" and self.cols.zigzag and x.shape[-1] > 1:
                x = reordered(x, self.cols.zigzag, x.ndim - 1)
            x = x if name_ == "sinks" else self._joined(name_, x)
            found.append(self._summed(name_, x).astype(self.given[name_].dtype))
        return found

    def _summed(self, name, x):
        """What devices that share an operand add up, unless a `shard_map` of the user's does."""
        if self.is_manual:
            return x
        own = ()
        if name in _OF_QUERIES or name in _OF_BOTH:  # where all queries share a bias, it has an axis of the name all the same
            own = self.rows.axes
        elif name in _OF_KEYS:
            own = self.cols.axes
        over = tuple([axis for axis in dict.fromkeys((*self.rows.axes, *self.cols.axes)) if axis not in own])
        return lax.psum(x.astype(self.dtype), over) if over else x

    # What an attention of parts takes, and gives.

    def _over_keys(self, attend, carry, arrived, *, own_last=False):
        """`carry, visitors = attend(carry, keys, device, parts, shift)` for the keys of each device that matter.

        Own ones come first, or last with `own_last`, so that nothing is on its way when the last step has run. `visitors` are
        derivatives of the keys, by name: they are sent home while the next step runs, and then `carry = arrived(carry, sent)`;
        those of the last step come back with `carry`. `device` is whose keys they are, None if they are those of all in their
        order. `shift` is None in a loop.
        """
        home, everything = {name: self._in_pieces(name) for name in self.given if name in _OF_KEYS}, slice(None)
        if self.way == "all_gather":
            carry, visitors = attend(carry, self._gathered(), None, [_Part(everything, everything, self.window)], 0)
            return carry, {name: self._scattered(x.astype(self.dtype)) for name, x in visitors.items()}
        if self.way == "merge":
            parts = [_Part(everything, slice(piece, piece + 1), self.window) for piece in range(self.cols.pieces)]
            return attend(carry, home, self.cols.index, parts, 0)
        own, *others = self._stretches()
        stretches = [*others, own] if own_last else [own, *others]
        index = self.rows.index
        arriving = self._sent_by(stretches[0], home)  # as they are: the first step waits for them
        outgoing: dict[str, jax.Array] = {}
        if any(stretch.shifts[0] for stretch in stretches[1:]):
            outgoing = home if _are_sent_together(home) else _packed(home)
        last: dict[str, jax.Array] = {}
        for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
            shift, sums = stretch.shifts[-1], {}
            if len(stretch.shifts) > 1:
                carry, arriving, sums = self._handed_on(attend, arrived(carry, last), arriving, home, stretch)
                last = {}
            keys = _unpacked(arriving, home) if shift else home
            arriving = self._sent_by(following, outgoing)  # started before the attention, which runs meanwhile
            carry, visitors = attend(carry, keys, self._before(index, shift), stretch.parts, shift)
            sent = self._sent_home(visitors, sums, shift)
            carry = arrived(carry, last) if last else carry
            if following is not None:  # no keys are sent before others have been attended to: two blocks of them are here
                carry, arriving, home, outgoing = lax.optimization_barrier((carry, arriving, home, outgoing))
            last = sent
        return carry, last

    def _stretches(self) -> list[_Stretch]:
        """Groups consecutive steps that are alike into stretches; each becomes one loop where there are many steps."""
        found: list[_Stretch] = []
        for shift, parts in self.steps:
            before = found[-1] if found and len(self.steps) > _MOST_UNROLLED else None
            if before and before.shifts[0] and before.shifts.stop == shift and before.parts == parts:
                found[-1] = _Stretch(range(before.shifts[0], shift + 1), parts)
            else:
                found.append(_Stretch(range(shift, shift + 1), parts))
        return found

    def _handed_on(self, attend, carry, arriving, home, stretch):
        """Runs a loop but its last step: `carry`, the keys of that step, and the sums of their derivatives up to there.

        Those derivatives go on with the keys, so that they are added in the order of the steps, as at home.
        """
        devices, index, hops = self.rows.devices, self.rows.index, np.any(self._needs(stretch)[1:], 0)
        keys_on = [(int(i - 1) % devices, int(i)) for i in np.flatnonzero(hops)]
        sums_on = [(i, (i + 1) % devices) for i in range(devices)]

        def step(shift, found):
            carry, keys, sums = found
            following = self._sent(keys, keys_on)  # started before the attention, which runs meanwhile
            device = self._before(index, jnp.asarray(shift, jnp.int32))
            carry, visitors = attend(carry, _unpacked(keys, home), device, stretch.parts, None)
            visitors = _packed(visitors) if visitors else {}
            sums = jax.tree.map(jnp.add, sums, visitors) if sums else visitors
            return lax.optimization_barrier((carry, following, self._sent(sums, sums_on)))

        first, *_, last = stretch.shifts
        return _repeated(step, first + 1, last, step(first, (carry, arriving, {})))

    def _needs(self, stretch) -> np.ndarray:
        """Finds the devices that need the keys in each step of a stretch, for themselves or for a device behind them."""
        found = [self._seen(shift, stretch.parts).any(0) for shift in stretch.shifts]
        for here, behind in zip(found[-2::-1], found[:0:-1], strict=True):
            here |= np.roll(behind, -1)
        return np.array(found)

    def _before(self, index, shift):
        """The number of the device `shift` before `index`."""
        return lax.rem(index - shift + self.rows.devices, jnp.int32(self.rows.devices))

    def _sent_by(self, stretch, keys):
        """The keys of a stretch's first step, on their way; none of a device's own, or where there is no stretch."""
        if stretch is None or stretch.shifts[0] == 0:
            return {}
        devices, shift, needs = self.rows.devices, stretch.shifts[0], self._needs(stretch)[0]
        return self._sent(keys, [(j, i) for j in range(devices) if needs[i := (j + shift) % devices]])

    def _sent(self, arrays, pairs):
        return jax.tree.map(lambda x: lax.ppermute(x, self.rows.axes, pairs), arrays)

    def _sent_home(self, visitors, sums, shift):
        """Derivatives of keys, on their way to whose keys they are, with `sums` that have come along with the keys."""
        if shift == 0 or not visitors:
            return visitors
        if sums:
            before = _unpacked(sums, visitors)
            visitors, devices = {name: before[name] + x for name, x in visitors.items()}, self.rows.devices
            pairs = [((j + shift) % devices, j) for j in range(devices)]
        else:
            pairs = [(i, j) for j, i in self._pairs(shift)]
        return _unpacked(self._sent(_packed(visitors), pairs), visitors)

    def _gathered(self):
        """The keys of all devices in their order; masks and biases get it too."""
        found, order = {}, self.cols.zigzag
        for name, x in self.given.items():
            axis = _sequence(name, x) if name in _OF_KEYS else x.ndim - 1
            if name in _OF_KEYS:
                x = lax.all_gather(x, self.cols.axes, axis=axis, tiled=True) if self.cols.axes else x
                x = ordered(x, order, axis) if order else x
                found[name] = jnp.expand_dims(x, self.at)
            elif name in _OF_BOTH and order and x.shape[-1] > 1:
                self.given = self.given | {name: ordered(x, order, axis)}
        return found

    def _scattered(self, x):
        """The sum over devices of derivatives of all keys, of which each gets its own; if all have all keys, its part of it."""
        axis = self.at + 1
        x = reordered(x, self.cols.zigzag, axis) if self.cols.zigzag else x
        return lax.psum_scatter(x, self.cols.axes, scatter_dimension=axis, tiled=True) if self.cols.axes else x

    def _attend(self, name, part, keys, device, extra=None, **more):
        """The results of a map for a part of the queries and of the keys."""
        zero = jnp.zeros(1, np.int32)
        rows = self.rows.starts(self.rows.index)[part.rows]
        cols, places = (zero, None) if device is None else (f(device)[part.cols] for f in (self.cols.starts, self.cols.places))
        ones, given = (1,) * self.at, dict(extra or {})
        pieces = 2 if part.halves and name == primitive.ATTENTION.name else None
        for operand, x in self.given.items():
            if operand in _OF_KEYS:
                given[operand] = _sliced(keys[operand], part.cols, self.at)
            elif operand in _OF_QUERIES:
                given[operand] = _sliced(self._in_pieces(operand, pieces), part.rows, self.at)
            elif operand in _OF_BOTH:
                given[operand] = self._columns(self._in_pieces(operand, pieces), part, places)
            elif operand in ("query_lengths", "key_lengths"):
                start = rows if operand == "query_lengths" else cols
                given[operand] = x[..., None] - start.reshape(*ones, -1)
            elif operand == "seeds":
                both = jnp.broadcast_arrays(rows, cols)
                starts = jnp.stack([jnp.zeros_like(both[0])] * 2 + list(both), -1).astype(np.uint32)
                given[operand] = jnp.expand_dims(x, self.at) + starts.reshape(*ones, -1, 1, 4)
            elif operand != "query_offset":
                given[operand] = jnp.expand_dims(x, self.at)
        if pieces:  # early queries and late ones are entries of a batch, which costs kernels less than segments
            size, is_behind = self.cols.length, device < self.rows.index
            lengths = jnp.where(is_behind, np.array([size // 2] * 2, np.int32), np.array([0, size], np.int32))
            given["key_lengths"] = lengths.reshape(*ones, 2)
            onto = zip(("out", "lse"), more["onto"], strict=True)
            more["onto"] = [self._cut(result, jnp.squeeze(x, self.at), pieces) for result, x in onto]
            found = zip(("out", "lse"), self.run(name, given, part.window, **more), strict=True)
            return [jnp.expand_dims(self._joined(result, x), self.at) for result, x in found]
        if part.halves:
            early = lax.iota(np.int32, self.rows.length) < self.rows.length // 2
            given["query_segments"] = (early & (device > self.rows.index)).astype(np.int32).reshape(*ones, 1, -1)
            given["key_segments"] = (~early & (device < self.rows.index)).astype(np.int32).reshape(*ones, 1, -1)
        elif self.way == "ring" or self.window != (None, None):  # a kernel that is told an offset takes tickets
            offset = self.given.get("query_offset", jnp.zeros(ones, np.int32))[..., None]
            given["query_offset"] = offset + (rows - cols).reshape(*ones, -1)
        return self.run(name, given, part.window, **more)

    def _in_pieces(self, name, pieces=None):
        """An operand, with an axis of pieces behind the batch: 1 where it does not vary along what is cut."""
        cut = self.cols if name in _OF_KEYS else self.rows
        return self._cut(name, self.given[name], pieces or cut.pieces)

    def _cut(self, name, x, pieces):
        """The same of an operand or result."""
        axis = _sequence(name, x)
        if x.shape[axis] == 1:
            return jnp.expand_dims(x, self.at)
        x = x.reshape(*x.shape[:axis], pieces, x.shape[axis] // pieces, *x.shape[axis + 1 :])
        return jnp.moveaxis(x, axis, self.at)

    def _joined(self, name, x):
        """The inverse, of results too."""
        axis = _sequence(name, x)
        x = jnp.moveaxis(x, self.at, axis - 1)
        return x.reshape(*x.shape[: axis - 1], x.shape[axis - 1] * x.shape[axis], *x.shape[axis + 1 :])

    def _in_rows(self, x, part):
        """A result for some pieces of queries as one for all, 0 for the others."""
        return _padded(x, part.rows, self.rows.pieces, self.at)

    def _in_cols(self, x, part):
        return x if self.way == "all_gather" else _padded(x, part.cols, self.cols.pieces, self.at)

    def _columns(self, x, part, places):
        """The columns of a mask or bias that belong to the keys of a part, for each of its pieces."""
        x = _sliced(x, part.rows, self.at) if x.shape[self.at] > 1 else x
        if places is None or x.shape[-1] == 1:
            return x
        blocks = [x] if places.shape[0] == 1 else [_piece(x, i, self.at) for i in range(places.shape[0])]
        found = [lax.dynamic_slice_in_dim(block, places[i], self.cols.size, -1) for i, block in enumerate(blocks)]
        return jnp.concatenate(found, self.at)

    def _with_columns(self, sums, x, part, device):
        """The derivative of a bias, and in it one for the columns of a part."""
        if device is None:
            return sums + x
        does_vary = sums.shape[self.at] > 1
        if sums.shape[-1] == 1:
            return sums + (_padded(x, part.rows, self.rows.pieces, self.at) if does_vary else x)
        places = self.cols.places(device)[part.cols]
        for i in range(places.shape[0]):
            block, start = x if places.shape[0] == 1 else _piece(x, i, self.at), [np.int32(0)] * x.ndim
            start[self.at] = np.int32(part.rows.indices(self.rows.pieces)[0] + i if does_vary else 0)
            start[-1] = places[i]
            sums = lax.dynamic_update_slice(sums, lax.dynamic_slice(sums, start, block.shape) + block, start)
        return sums

    # Whole sequences.

    def _of_whole_sequences(self, name, results, **more):
        """The results of a map for whole sequences in their order, of some of the heads where they were cut."""
        given = {operand: self._to_heads(operand, x) for operand, x in self.given.items()}
        return [self._from_heads(*pair) for pair in zip(results, self.run(name, given, self.window, **more), strict=True)]

    def _axes_of(self, name, x):
        """Which axes of an operand or result are those of heads and of what is cut of its sequence, or None."""
        axes = dict(zip(AXES[name], range(x.ndim - len(AXES[name]), x.ndim), strict=True))
        head, sequence = (next((axes[letter] for letter in letters if letter in axes), None) for letters in ("NK", "TS"))
        if name in _OF_BOTH:
            head, sequence = (None if self.given[name].shape[axis] == 1 else axis for axis in (head, sequence))
        return head, sequence

    def _to_heads(self, name, x):
        axes, devices, (head, sequence) = self.rows.axes, self.rows.devices, self._axes_of(name, x)
        if axes and sequence is not None and head is not None:
            x = lax.all_to_all(x, axes, split_axis=head, concat_axis=sequence, tiled=True)
        elif axes and sequence is not None:
            x = lax.all_gather(x, axes, axis=sequence, tiled=True)
        elif axes and head is not None:
            size = x.shape[head] // devices
            x = lax.dynamic_slice_in_dim(x, self.rows.index * size, size, head)
        if (order := self.rows.zigzag) is not None:
            x = x if sequence is None else ordered(x, order, sequence)
            x = ordered(x, order, x.ndim - 1) if name in _OF_BOTH and x.shape[-1] > 1 else x
        return x

    def _from_heads(self, name, x):
        axes, devices, (head, sequence) = self.rows.axes, self.rows.devices, self._axes_of(name, x)
        if (order := self.rows.zigzag) is not None:
            x = x if sequence is None else reordered(x, order, sequence)
            x = reordered(x, order, x.ndim - 1) if name in _OF_BOTH and x.shape[-1] > 1 else x
        if not axes:
            return x
        if head is not None and sequence is not None:
            return lax.all_to_all(x, axes, split_axis=sequence, concat_axis=head, tiled=True)
        if sequence is not None:  # of all heads: each device has the sum of its own
            return lax.psum_scatter(x.astype(self.dtype), axes, scatter_dimension=sequence, tiled=True)
        if head is not None:
            shape = (*x.shape[:head], x.shape[head] * devices, *x.shape[head + 1 :])
            start = self.rows.index * x.shape[head]
            return lax.dynamic_update_slice_in_dim(jnp.zeros(shape, x.dtype), x, start, head)
        return x


def _repeated(body, start: int, stop: int, carry):
    """Repeats `carry = body(i, carry)`, in a loop if there are many; two in its body swap buffers, so that none is copied."""
    if stop - start < _MOST_UNROLLED:
        return functools.reduce(lambda carry, i: body(i, carry), range(start, stop), carry)
    return lax.fori_loop(start, stop, body, carry, unroll=2)


def _add(sums, name, x):
    sums[name] = sums[name] + x if name in sums else x


def _sequence(name, x):
    """The axis of an operand or result along which it is cut; an axis of pieces would be before it."""
    axes = AXES[name]
    return x.ndim - len(axes) + axes.index("S" if name in _OF_KEYS else "T")


def _sliced(x, pieces, axis):
    """Some pieces of an array, all if it does not vary along them."""
    start, stop, _ = pieces.indices(x.shape[axis])
    return x if pieces == slice(None) or x.shape[axis] == 1 else lax.slice_in_dim(x, start, stop, axis=axis)


def _piece(x, i, axis):
    return _sliced(x, slice(i, i + 1), axis)


def _padded(x, pieces, count, axis):
    """An array of some of so many pieces, 0 for the others."""
    start, stop, _ = pieces.indices(count)
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (start, count - stop, 0)
    return x if stop - start == count else lax.pad(x, jnp.zeros((), x.dtype), widths)


def _are_sent_together(arrays) -> bool:
    """Whether XLA sends these arrays by one collective, as it does up to a number of bytes; not if their sizes are symbolic."""
    most = compat.xla_flags().get("xla_gpu_collective_permute_combine_threshold_bytes", _MOST_COMBINED)
    size = sum(x.nbytes for x in arrays.values())
    return isinstance(size, int) and size <= int(most)


def _packed(arrays):
    """Arrays by name as one of each dtype: XLA's scheduler lets one collective at a time run beside kernels.

    As they are where automatic mesh axes may shard them too, of which flat arrays know nothing: XLA would gather them.
    """
    mesh = jax.typeof(next(iter(arrays.values()))).sharding.mesh
    if any(kind == AxisType.Auto and mesh.shape[axis] > 1 for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)):
        return arrays
    found = {}
    for name in sorted(arrays):
        found.setdefault(arrays[name].dtype.name, []).append(arrays[name].ravel())
    return {dtype: jnp.concatenate(flat) for dtype, flat in found.items()}


def _unpacked(packed, like):
    """The arrays that were packed, of the names and shapes of others."""
    if packed.keys() == like.keys():
        return packed
    found, starts = {}, dict.fromkeys(packed, 0)
    for name in sorted(like):
        dtype, shape, size = like[name].dtype.name, like[name].shape, like[name].size
        found[name] = packed[dtype][starts[dtype] :][:size].reshape(shape)
        starts[dtype] += size
    return found


# The rules by the names of the operations.
_ALL = (
    dot_product_attention,
    dot_product_attention_jvp,
    dot_product_attention_vjp,
)
RULES = {rule.__name__: rule for rule in _ALL}
