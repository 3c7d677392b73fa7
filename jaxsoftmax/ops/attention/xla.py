"""The reference: attention and its derivatives in plain `jax.numpy`, on every platform.

It defines the right results, and runs where no kernel does. With `s = cap(scale * q k^T) + bias`, weights `p = exp(s - lse)`,
and factors `z` of dropout, 0 or `1 / (1 - rate)`:

    forward   lse = log(sum(exp(s)) + exp(sink)),   out = (z p) v
    tangent   dlse = sum(p ds) + p_sink dsink,      dout = (z p ds) v + (z p) dv - dlse out
    cotangent ds = p (z (dout v^T) - sum(out dout) + dlse), from which the cotangents of q, k, v, bias and sinks follow

If the scores are few, they are one tile. Else they are cut into tiles of about `BLOCK`, and each tile is pushed to the state of
its rows, so that all scores are never in memory. The arithmetic is float32, or float64 if the operands are.

`operands.py` describes the axes of the operands. A batch axis has its full size or size 1 in each operand, and so has each axis
of bias and mask. All operands except query, key and value may be None.

Source: Dao 2023, arXiv:2307.08691, for the tiles and the derivatives.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxsoftmax import online
from jaxsoftmax._core.dtypes import accumulator
from jaxsoftmax._core.implementation import ReferencePlan
from jaxsoftmax._core.primitive import summed_to
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.sharding import vary_alike
from jaxsoftmax._core.target import ONE_DEVICE, Target
from jaxsoftmax.ops.attention import dropout, mask_blocks
from jaxsoftmax.ops.attention.context_parallel.order import position_of
from jaxsoftmax.ops.attention.operands import (
    AXES,
    OPERANDS,
    TABLES,
    batch_of,
    dequantised,
    merged,
    paged,
    without_pages,
)
from jaxsoftmax.ops.attention.score_functions import wide_tables

# The scores of all heads are one tile up to this number.
ONE_TILE = 2**24

# Queries and keys of a tile otherwise, and the largest number of scores of all heads in such a tile.
BLOCK = (512, 512)
LARGEST_TILE = 2**26

ROWS, COLS = 0, 1  # the axes of the scores


def dot_product_attention(*, return_lse=True, is_partial=False, initial_out=None, initial_lse=None, **arguments):
    """Computes `[out, lse]`, or `[out]` without `return_lse`.

    Args:
      return_lse: True to return lse too.
      is_partial: True if out is one of several that are merged: it is not rounded to the dtype of the queries.
      initial_out: out of other keys, with which the results are merged, or None.
      initial_lse: lse of those keys, or None.
      **arguments: operands by name, and parameters of the primitive.
    """
    attention = _TiledAttention(dequantised(arguments, accumulator(arguments["query"].dtype)))
    rows, value_size = attention.rows, attention["value"].shape[-1]

    def push(state, tile):
        scores = tile.scores
        value, unit = tile.seen_part("value").astype(attention.dtype), attention.unit
        so_far = online.State(*(tile.cut(ROWS, part, axis) for part, axis in zip(state, (-1, -1, -2), strict=True)))
        kept = tile.dropout_factors()
        if kept is None and attention.precision is lax.Precision.HIGHEST:
            pushed = online.push(so_far, scores, value, scale=unit)
        else:
            lifted = online.lift(scores, scale=unit)
            weights = online.weights(scores, lifted.m, scale=unit)
            weights = weights if kept is None else kept * weights
            pushed = online.merge(so_far, online.State(lifted.m, lifted.d, _product(weights, value, attention)), scale=unit)
        return online.State(*(tile.put(ROWS, *args) for args in zip(state, pushed, (-1, -1, -2), strict=True)))

    def state_and_out(tile):  # by the operations of the derivatives, so that XLA computes common ones once
        m, weights, sums = tile.exponentials
        (weights, share), kept = tile.normalized(m, weights, sums), tile.dropout_factors()
        weights = weights if kept is None else kept * weights
        product = _product(weights, tile.seen_part("value").astype(attention.dtype), attention)
        return online.State(m[..., 0], sums[..., 0]), product * share

    if attention.is_one_tile:
        state, out = state_and_out(attention.whole)
    else:
        state, out = attention.over_tiles(push, online.identity(rows, value_size, attention.dtype)), None
    if attention.unit is not None:
        state = state._replace(m=jnp.where(state.m == -jnp.inf, -jnp.inf, attention.unit * state.m))
    if (sinks := attention["sinks"]) is not None:  # a key without a value
        pushed = online.push(state._replace(o=None), jnp.broadcast_to(sinks.astype(attention.dtype), (*rows, 1)))
        state = online.State(*pushed[:2], online.rescale(state, pushed.m).o)
    state = online.finish(state)
    out, lse = _heads_last(state.o if out is None else out), lax.collapse(state.m, -3, -1)
    if initial_out is not None:
        out, lse = merged((initial_out, initial_lse), (out, lse))
    out = out if is_partial else out.astype(attention["query"].dtype)
    return [out, lse] if return_lse else [out]


def paged_attention(**arguments):
    """Computes the results of `dot_product_attention` for keys and values in pages, which are gathered first."""
    operands, options = paged(arguments)
    absent = {operand.name: None for operand in OPERANDS}
    gathered = without_pages(operands, accumulator(operands["query"].dtype))
    return dot_product_attention(**absent | gathered, **options, dropout_rate=0.0)


def dot_product_attention_jvp(*, is_partial=False, **arguments):
    """Computes `[dout, dlse]`.

    Args:
      is_partial: True if the keys are a part of the keys that out and lse belong to.
      **arguments: operands, out, lse and the tangents of `MOVING` by name, where a tangent may be None, and parameters of the
        primitive.
    """
    attention = _TiledAttention(arguments, is_partial)
    dtype, rows, value_size = attention.dtype, attention.rows, attention["value"].shape[-1]

    def add(sums, tile):
        scores, slope = tile.scores, tile.slope
        p, kept = tile.weights(scores), tile.dropout_factors()
        ds = jnp.zeros_like(scores)
        if tile["d_query"] is not None:
            ds += attention.scale * slope * _product(tile.seen_part("d_query"), tile.seen_part("key").mT)
        if tile["d_key"] is not None:
            ds += attention.scale * slope * _product(tile.seen_part("query"), tile.seen_part("d_key").mT)
        if (dbias := tile["d_bias"]) is not None:
            ds += dbias.astype(dtype)
        if (change := tile.change_of_tables()) is not None:
            ds += change
        ds = p * _where(tile.seen, ds, 0)
        dlse = jnp.sum(ds, -1)
        if kept is not None:
            p, ds = p * kept, ds * kept
        dout = _product(ds, tile.seen_part("value").astype(dtype), attention)
        if tile["d_value"] is not None:
            dout += _product(p, tile.seen_part("d_value").astype(dtype), attention)
        return [tile.add(ROWS, sums[0], dout, -2), tile.add(ROWS, sums[1], dlse, -1)]

    dout, dlse = attention.over_tiles(add, [jnp.zeros((*rows, value_size), dtype), jnp.zeros(rows, dtype)])
    if (dsinks := attention["d_sinks"]) is not None:
        dlse += attention.weight_of_sink() * dsinks[..., 0].astype(dtype)
    dout -= dlse[..., None] * attention["out"].astype(dtype)
    return [_heads_last(dout).astype(attention["query"].dtype), lax.collapse(dlse, -3, -1)]


def dot_product_attention_vjp(*, wanted, is_partial=False, initial_d_query=None, **arguments):
    """Computes the cotangents of the `wanted` operands.

    Args:
      wanted: names of operands, some of `MOVING`.
      is_partial: True if the keys are a part of the keys that out and lse belong to. The cotangents of queries, keys and values
        are then terms of sums, in the dtype of the arithmetic, and the one of queries must still be multiplied by `scale`.
      initial_d_query: such a cotangent of the queries from other keys, to which the one of these keys is added, or None.
      **arguments: operands, out, lse and the cotangents dout and dlse by name, where one of the cotangents may be None, and
        parameters of the primitive.

    Returns:
      The cotangents, in the shapes of the operands, and in their dtypes unless `is_partial`.
    """
    attention = _TiledAttention(arguments, is_partial)
    attention.clear_rows_without_keys()
    is_of_weights = attention.takes_delta_from_weights(wanted)
    delta = attention.add_delta(is_of_weights)
    sums: dict[str, Any] = {}
    for name in wanted:  # in this order, not that of a set of strings: the program is the same in every process
        if name in TABLES:
            sums[name] = jnp.zeros_like(attention.tables[name])
        elif name != "sinks":
            shape = attention[name].shape
            whole = shape if name == "bias" else (*attention.batch, *shape[len(attention.batch) :])
            sums[name] = jnp.zeros(whole, attention.dtype)
    if sums:
        sums = attention.over_tiles(functools.partial(_add_cotangents, is_of_weights), sums)
    if "sinks" in wanted:
        sums["sinks"] = (-attention.weight_of_sink() * delta)[..., None]
    if "query" in sums and not is_partial:
        sums["query"] *= attention.scale
    results = [_ungrouped(name, sums[name], arguments[name].shape) for name in wanted]
    if initial_d_query is not None:
        results = [initial_d_query + x if name == "query" else x for x, name in zip(results, wanted, strict=True)]
    return [x if is_partial else x.astype(arguments[name].dtype) for x, name in zip(results, wanted, strict=True)]


def _add_cotangents(is_of_weights, sums, tile):
    """Adds the cotangents of a tile of scores to the sums by name. The one of queries is not yet multiplied by `scale`."""
    attention, dtype = tile.attention, tile.attention.dtype
    scores, slope = tile.scores, tile.slope
    (p, share), kept = tile.weights_and_share(scores), tile.dropout_factors()
    ds = jnp.broadcast_to(-tile["delta"], scores.shape)
    dout = None
    if tile["d_out"] is not None:
        dout = tile.seen_part("d_out").astype(dtype) * share
        dp = _product(tile.seen_part("d_out"), tile.seen_part("value").mT)
        dp = dp if kept is None else kept * dp
        ds += dp
        if is_of_weights:
            ds -= jnp.sum(p * _where(tile.seen, dp, 0), -1, keepdims=True) * share
    ds = p * (_where(tile.seen, ds, 0) * share)
    sums, dx = dict(sums), slope * ds
    if "query" in sums:
        dq = _product(dx, tile.seen_part("key").astype(dtype), attention)
        sums["query"] = tile.add(ROWS, sums["query"], dq, -2)
    if "key" in sums:
        dk = _summed_product(dx, tile.seen_part("query").astype(dtype), attention, attention.scale)
        sums["key"] = tile.add(COLS, sums["key"], dk, -2)
    if "value" in sums and dout is not None:
        dv = _summed_product(p if kept is None else p * kept, dout, attention)
        sums["value"] = tile.add(COLS, sums["value"], dv, -2)
    if "bias" in sums:
        sums["bias"] = tile.add_scores(sums["bias"], ds)
    function = attention.score_mod
    if function is not None and (names := [name for name in function.table_names if name in sums]):
        sums |= {name: sums[name] + x for name, x in tile.cotangents_of_tables(names, ds).items()}
    return sums


class _TiledAttention:
    """Operands of attention whose query heads are grouped by their key head, and how the scores are cut into tiles.

    Operands have five axes behind the batch, and any of them may have size 1: key heads K, query heads of each key head G, then
    rows and columns: queries, keys or the head size. So the query is `[*batch, K, G, T, H]`, the key `[*batch, K, 1, S, H]`,
    the bias `[*batch, K, G, T, S]`, and a number of each query `[*batch, K, G, T, 1]`.
    """

    def __init__(self, arguments: dict[str, Any], is_partial: bool = False):
        operands = {name: a for name, a in arguments.items() if name in _GROUPED_AXES}
        query, key = operands["query"], operands["key"]
        self.scale, self.window, self.soft_cap, self.dropout_rate = (
            arguments[name] for name in ("scale", "window", "soft_cap", "dropout_rate")
        )
        self.zigzag = arguments.get("zigzag")
        self.score_mod, self.mask_mod = arguments.get("score_mod"), arguments.get("mask_mod")
        machine = arguments.get("machine", ONE_DEVICE)
        self.dtype = accumulator(query.dtype)  # of the arithmetic
        self.lengths = query.shape[-3], key.shape[-3]
        heads = key.shape[-2], query.shape[-2] // key.shape[-2]
        # The tables of functions by name, wide, with the axes of the scores and then the table.
        tables = {name: a for name, a in arguments.items() if name.removeprefix("d_") in TABLES and a is not None}
        self.batch = batch_of(operands | tables)
        self.tables = {name: _table(a) for name, a in tables.items()}
        self.rows = (*self.batch, *heads, self.lengths[0])
        self.arrays = {name: None if a is None else _grouped(name, a, heads) for name, a in operands.items()}
        self.block = self._block(machine.devices)  # queries and keys of a tile
        # The scores are stored as multiples of this number; None for 1, with a bias. The maximum of such multiples is exact,
        # and only a difference to it is multiplied: XLA would contract `scale * x - m` to one operation, and `m` was rounded,
        # by 512 at 1e10.
        self.unit: Any = None
        if self["bias"] is None and self.score_mod is None:
            self.unit = np.asarray(abs(self.scale) if self.soft_cap is None else self.soft_cap, self.dtype)
        # A tile has all keys of its queries. Derivatives then normalize the weights anew: a large lse cannot hold the logarithm
        # of a sum.
        self.has_whole_rows = self.block[COLS] == self.lengths[COLS] and not is_partial
        self.is_one_tile = self.block == self.lengths
        # The program is for a GPU alone.
        self.is_on_gpu = machine.target is not None and machine.target.platform in ("cuda", "rocm")
        # Three bfloat16 products err by 2^-16 each, which is enough if operands have 16 bits: the gradient of [1, 512, 8, 64]
        # takes 56 us on an H100 with them, 85 in float32, and 42 with `jax.nn`, which rounds more.
        is_coarse = query.dtype.itemsize == 2 and arguments.get("precision", "highest") == "high"
        gpu = machine.target  # it has a name if it is known: a program without a known GPU must run on all
        has_three = gpu is not None and gpu.name is not None and (gpu.compute_capability or (0, 0)) >= (8, 0)
        self.precision: Any = lax.DotAlgorithmPreset.BF16_BF16_F32_X3 if is_coarse and has_three else lax.Precision.HIGHEST
        # Each query sees a key and each key is seen, except for scores of -inf.
        self.sees_all = self.is_one_tile and self._sees_all()

    def __getitem__(self, name) -> Any:
        return self.arrays.get(name)

    def tables_of(self, function) -> list[Any]:
        """Lists the tables of a score or mask function."""
        return [self.tables[name] for name in function.table_names]

    def _block(self, devices):
        """Returns the queries and keys of a tile.

        With many heads there are fewer of both, and if there are few queries or keys, more of the other. If several devices may
        share the operands, a tile has all queries, and each device its share of them: XLA would gather the queries of a slice.
        The exception is a window that leaves so few tiles that all of them are less work than the share of a device in the
        whole.
        """
        (queries, keys), heads = self.lengths, math.prod(self.rows[:-1])
        if not all(isinstance(size, int) for size in (queries, keys, heads)) or heads * queries * keys <= ONE_TILE:
            return self.lengths
        rows, cols = BLOCK
        while heads * rows * cols > LARGEST_TILE and rows > 128:
            rows, cols = rows // 2, cols // 2
        block = min(queries, rows * max(1, cols // keys)), min(keys, cols * max(1, rows // queries))
        if devices == 1 or devices * np.mean(self._visible(block)) < 1:
            return block
        # A causal mask leaves out no such tile: devices that share batch entries or heads do up to twice the work.
        return queries, min(keys, max(BLOCK[1] // 4, rows * cols // queries))

    def over_tiles(self, step, carry):
        """Folds `step(carry, tile)` over the tiles that the window leaves."""
        if self.block == self.lengths:
            return step(carry, self.whole)
        leaves, structure = jax.tree.flatten(carry)
        carry = structure.unflatten(vary_alike([*leaves, self["query"]])[:-1])  # as a loop in a `shard_map` needs

        @functools.partial(jax.checkpoint, prevent_cse=False)  # reverse mode through a scan would keep every tile
        def body(carry, indices):
            return step(carry, _ScoreTile(self, (indices[0], indices[1])))

        # The indices are a constant of an inner function: custom_partitioning takes no other constants.
        tiles = jax.jit(lambda: jnp.asarray(np.argwhere(self._visible(self.block)).astype(np.int32)))()
        return lax.scan(lambda *args: (body(*args), None), carry, tiles)[0]

    def _visible(self, block):
        """Marks the tiles that the window and the mask function leave, `[rows of tiles, columns of tiles]`."""
        is_known = self["query_offset"] is None and self.zigzag is None
        (rows, cols), (left, right) = block, self.window if is_known else (None, None)
        i, j = np.indices([-(-length // size) for length, size in zip(self.lengths, block, strict=True)])
        visible = np.ones(i.shape, bool)
        if left is not None:
            visible &= (j + 1) * cols - 1 >= i * rows - left
        if right is not None:
            visible &= j * cols <= (i + 1) * rows - 1 + right
        if is_known and self.mask_mod is not None and self["query_numbers"] is None:
            visible &= mask_blocks.classify(self.mask_mod, self.lengths, rows, cols) != mask_blocks.EMPTY
        return visible

    def _sees_all(self):
        """Returns True if each query sees a key and each key is seen, except for scores of -inf."""
        names = ("query_offset", "query_lengths", "key_lengths", "query_segments", "mask", "bias")
        if self.zigzag is not None or not all(isinstance(length, int) for length in self.lengths):
            return False
        if self.score_mod is not None or self.mask_mod is not None:
            return False
        return all(self[name] is None for name in names) and sees_all(*self.lengths, *self.window)

    @functools.cached_property
    def whole(self) -> "_ScoreTile":
        """The tile that has all scores."""
        return _ScoreTile(self, (0, 0))

    def clear_rows_without_keys(self):
        """Sets the cotangents of queries that see no key to 0: they may hold NaN. With a sink the cotangent of lse counts."""
        lse = self["lse"]
        if self.sees_all and self.has_whole_rows and self["sinks"] is None:
            # Only scores of -inf leave nothing to see, which the weights show: XLA:CPU fuses the maximum if nothing reads lse.
            is_empty = sees_no_key = self.whole.exponentials[2] == 0
        else:
            is_empty = sees_no_key = lse == -jnp.inf
        if (sinks := self["sinks"]) is not None:
            sees_no_key |= (lse == sinks.astype(self.dtype)) & jnp.all(self["out"] == 0, -1, keepdims=True)
        for name, rows in (("d_out", sees_no_key), ("d_lse", is_empty)):
            if (array := self[name]) is not None:
                self.arrays[name] = jnp.where(rows, jnp.zeros_like(array), array)

    def takes_delta_from_weights(self, wanted) -> bool:
        """Decides whether `sum(out dout)` is computed as a sum of weights, where that is no slower.

        A program that needs `out` for nothing else then multiplies no values. On a CPU a mask would keep XLA from fusing the
        sum: the causal gradient of [1, 512, 8, 64] takes 17.6 ms with it, and 10.1 from `out`.
        """
        is_fused = self.is_on_gpu or self.whole.seen is None
        return is_fused and self.is_one_tile and self.has_whole_rows and "sinks" not in wanted

    def add_delta(self, is_of_weights):
        """Adds the array `delta`, `sum(out dout) - dlse`, and returns it without its last axis.

        The cotangent of a score is its weight times a difference to `delta`. With `is_of_weights` the sum is left out.
        """
        delta = jnp.zeros(self.rows, self.dtype)
        if (dout := self["d_out"]) is not None and not is_of_weights:
            delta += jnp.sum(self["out"].astype(self.dtype) * dout.astype(self.dtype), -1)
        if (dlse := self["d_lse"]) is not None:
            delta -= dlse[..., 0].astype(self.dtype)
        self.arrays["delta"] = delta[..., None]
        return delta

    def weight_of_sink(self):
        """Computes `exp(sink - lse)`, `[*batch, K, G, T]`; 0 where lse is `-inf`."""
        lse = self["lse"][..., 0]
        sinks = jnp.broadcast_to(self["sinks"][..., 0].astype(self.dtype), lse.shape)
        return _exp_of_difference(sinks, lse, lse != -jnp.inf)


def sees_all(queries: int, keys: int, left: int | None, right: int | None) -> bool:
    """Returns True if in a window each query sees a key, if there are keys, and each key is seen. None is no limit."""
    left, right = (queries + keys if side is None else side for side in (left, right))
    rows, cols = np.arange(queries), np.arange(keys)
    each_query = np.all((rows - left < keys) & (rows + right >= 0))
    return bool(each_query and np.all((cols - right < queries) & (cols + left >= 0)))


@dataclass(frozen=True)
class _ScoreTile:
    """The scores of some rows, which are queries, and some columns, which are keys.

    All tiles have one size. If the size does not divide a length, the last tile begins earlier, and the rows or columns that it
    shares with the tile before count as not seen.
    """

    attention: _TiledAttention
    index: tuple[Any, Any]  # of the tile along rows and along columns

    def _first(self, axis):
        size, length = self.attention.block[axis], self.attention.lengths[axis]
        return 0 if size == length else jnp.minimum(self.index[axis] * size, length - size)

    def _positions(self, axis):
        """Returns the positions of rows, `[..., rows, 1]`, or columns, `[..., 1, cols]`, and marks those of no earlier tile.

        The marks are None if no tile shares any.
        """
        size, length = self.attention.block[axis], self.attention.lengths[axis]
        places = self._first(axis) + lax.iota(np.int32, size)
        ndim = len(self.attention.rows) + 1
        places = lax.expand_dims(places, [a for a in range(ndim) if a != ndim - 2 + axis])
        is_divided = size == length or (isinstance(length, int) and length % size == 0)
        order = self.attention.zigzag
        positions = places if order is None else position_of(places, length, order)
        return positions, None if is_divided else places >= self.index[axis] * size

    def __getitem__(self, name) -> Any:
        array = self.attention[name]
        for which, axis in zip((ROWS, COLS), "TS", strict=True):
            if array is not None and axis in _GROUPED_AXES[name]:
                array = self.cut(which, array, _GROUPED_AXES[name].index(axis) - 3)
        return array

    def cut(self, which, array, axis):
        """Returns the part of an array that belongs to the tile's rows or columns: `which` is `ROWS` or `COLS`."""
        size = self.attention.block[which]
        if array.shape[axis] == 1 or size == self.attention.lengths[which]:
            return array
        return lax.dynamic_slice_in_dim(array, self._first(which), size, axis)

    def put(self, which, whole, part, axis):
        """Returns `whole` with `part` in the place of the tile's rows or columns."""
        return part if part.shape == whole.shape else lax.dynamic_update_slice_in_dim(whole, part, self._first(which), axis)

    def add(self, which, whole, part, axis):
        """Returns `whole` with `part` added in the place of the tile's rows or columns. A single tile adds to zeros."""
        if self.attention.is_one_tile:
            return part
        return self.put(which, whole, self.cut(which, whole, axis) + part, axis)

    def add_scores(self, whole, part):
        """Returns `whole` with `part`, as large as the scores, added; summed along axes where `whole` has size 1."""
        if self.attention.is_one_tile:
            return summed_to(part, whole.shape)
        of_tile = self.cut(COLS, self.cut(ROWS, whole, -2), -1)
        of_tile += summed_to(part, of_tile.shape)
        if of_tile.shape == whole.shape:
            return of_tile
        starts = [self._first(axis) if whole.shape[axis - 2] != 1 else 0 for axis in (0, 1)]
        starts = [jnp.asarray(start, np.int32) for start in [0] * (whole.ndim - 2) + starts]
        return lax.dynamic_update_slice(whole, of_tile, starts)

    @functools.cached_property
    def products(self):
        """The products of queries and keys."""
        batch = self.attention.batch
        products = _product(self.seen_part("query"), self.seen_part("key").mT)
        return jnp.broadcast_to(products, (*batch, *products.shape[len(batch) :]))

    def on_pairs(self, function, tables, *scores):
        """Runs a score or mask function on the pairs of a query and a key, with these tables and scores."""
        (rows, _), (cols, _) = self._positions(ROWS), self._positions(COLS)
        if (offset := self.attention["query_offset"]) is not None:
            rows += offset
        if (numbers := self["query_numbers"]) is not None:  # devices share the sequence: see `context_parallel.attend`
            rows, cols = numbers, self["key_numbers"]
        ones = np.zeros((1,) * rows.ndim, np.int32)
        entries, heads = (ones if self[name] is None else self[name] for name in ("entries", "head_numbers"))
        return function.on_arrays(tables, *scores, entries, heads, rows, cols, axes=rows.ndim)

    @functools.cached_property
    def scaled(self):
        """The products times the scale, as the score function gets them: 0 where not seen, so that they are finite."""
        return _where(self.seen, self.attention.scale * self.products, 0)

    @functools.cached_property
    def changed(self):
        """The results of the score function, which the soft cap bends; without a function those of `scaled`."""
        attention = self.attention
        if attention.score_mod is None:
            return self.scaled
        result = self.on_pairs(attention.score_mod, attention.tables_of(attention.score_mod), self.scaled)
        return jnp.broadcast_to(result, self.scaled.shape)

    @functools.cached_property
    def bent(self):
        """The hyperbolic tangent of `changed` in multiples of the soft cap; 0 where the score function hides a key."""
        changed, cap = self.changed, self.attention.soft_cap
        if self.attention.score_mod is not None:
            changed = jnp.where(changed == -jnp.inf, 0, changed)
        return jnp.tanh(changed / cap)

    def change_of_tables(self):
        """Computes the tangent of the scores from the tangents of the score function's tables; None if there is none."""
        attention = self.attention
        if attention.score_mod is None:
            return None
        names = [name for name in attention.score_mod.table_names if f"d_{name}" in attention.tables]
        if not names:
            return None
        # Mapped examples may share a table and have tangents of their own, or the other way round.
        pairs = [jnp.broadcast_arrays(attention.tables[name], attention.tables[f"d_{name}"]) for name in names]
        primals, tangents = (list(arrays) for arrays in zip(*pairs, strict=True))
        change = jax.jvp(self._of_tables(names), (primals,), (tangents,))[1]
        return self.slope_of_cap * jnp.broadcast_to(change, self.scaled.shape)

    def cotangents_of_tables(self, names, ds):
        """Computes the cotangents of tables of the score function from those of the scores."""
        _, pull = jax.vjp(self._of_tables(names), [self.attention.tables[name] for name in names])
        return dict(zip(names, pull(self.slope_of_cap * ds)[0], strict=True))

    def _of_tables(self, names):
        """Returns the results of the score function as a function of the tables `names`, as large as the scores."""
        function: Any = self.attention.score_mod
        tables = self.attention.tables

        def run(moving):
            now = tables | dict(zip(names, moving, strict=True))
            result = self.on_pairs(function, [now[name] for name in function.table_names], self.scaled)
            return jnp.broadcast_to(result, self.scaled.shape)

        return run

    @functools.cached_property
    def scores(self):
        """The scores in multiples of the unit, `-inf` where not seen."""
        attention, unit, cap = self.attention, self.attention.unit, self.attention.soft_cap
        if cap is not None:
            scores = self.bent if unit is not None else cap * self.bent
            if attention.score_mod is not None:
                scores = jnp.where(self.changed == -jnp.inf, -jnp.inf, scores)
        elif attention.score_mod is not None:
            scores = self.changed
        elif unit is None:
            scores = attention.scale * self.products
        else:
            scores = -self.products if attention.scale < 0 else self.products
        if (bias := self["bias"]) is not None:
            scores += bias.astype(attention.dtype)
        return _where(self.seen, scores, -jnp.inf)

    @property
    def slope_of_cap(self):
        """The derivative of the scores by `changed`."""
        return 1.0 if self.attention.soft_cap is None else 1 - self.bent * self.bent

    @functools.cached_property
    def slope(self):
        """The derivative of the scores by `scaled`."""
        attention = self.attention
        if attention.score_mod is None:
            return self.slope_of_cap
        run = functools.partial(self.on_pairs, attention.score_mod, attention.tables_of(attention.score_mod))
        if attention.score_mod.has_custom_vjp:  # which forward mode refuses
            result, pull = jax.vjp(run, self.scaled)
            (slope,) = pull(jnp.ones_like(result))
        else:
            slope = jax.jvp(run, (self.scaled,), (jnp.ones_like(self.scaled),))[1]
        return self.slope_of_cap * _where(self.seen, jnp.broadcast_to(slope, self.scaled.shape), 0)

    def seen_part(self, name):
        """Returns an operand of queries or keys, with 0 for queries that see no key and keys that no query sees.

        Those may hold NaN. They are cleared before each product: a mask behind it would leave the NaN to its derivative.
        """
        array, seen = self[name], self.seen
        if seen is None or self.attention.sees_all:
            return array
        seen = jnp.any(seen, -1, keepdims=True) if "T" in _GROUPED_AXES[name] else jnp.any(seen, (-2, -3), keepdims=True).mT
        return jnp.where(seen, array, jnp.zeros_like(array))

    @functools.cached_property
    def seen(self):
        """Marks the pairs of a query and a key that it sees; it broadcasts with the scores. None if all do."""
        (rows, new_rows), (cols, new_cols) = self._positions(0), self._positions(1)
        (left, right), lengths = self.attention.window, [self.attention[name] for name in ("query_lengths", "key_lengths")]
        terms, at = [new_rows, new_cols], rows
        if (offset := self.attention["query_offset"]) is not None:
            at += offset
        terms.append(None if left is None else cols >= at - left)
        terms.append(None if right is None else cols <= at + right)
        terms += [None if most is None else places < most for places, most in zip((rows, cols), lengths, strict=True)]
        if (segments := self["query_segments"]) is not None:
            terms.append(segments == self["key_segments"])
        if (mask := self["mask"]) is not None:
            terms.append(mask)
        if (bias := self["bias"]) is not None:
            terms.append(bias != -jnp.inf)
        if (mask_mod := self.attention.mask_mod) is not None:
            terms.append(self.on_pairs(mask_mod, self.attention.tables_of(mask_mod)))
        terms = [term for term in terms if term is not None]
        return functools.reduce(jnp.logical_and, terms) if terms else None

    def weights(self, scores):
        """Computes `exp(scores - lse)` from scores in multiples of the unit; 0 where a key is not seen."""
        weights, share = self.weights_and_share(scores)
        return weights * share

    def weights_and_share(self, scores):
        """Computes `weights` as two factors, one as large as the scores and one for each row.

        The caller multiplies by the second factor where an array is smaller than the scores.
        """
        unit, is_seen = self.attention.unit, scores != -jnp.inf
        if self.attention.has_whole_rows:
            return self.normalized(*self.exponentials)
        if unit is not None:  # a maximum stands between product and difference: XLA cannot contract them
            scores = jnp.maximum(unit * jnp.where(is_seen, scores, 0), jnp.finfo(scores.dtype).min)
        return _exp_of_difference(scores, jnp.broadcast_to(self["lse"], scores.shape), is_seen), jnp.ones((), scores.dtype)

    @functools.cached_property
    def exponentials(self):
        """The maxima of whole rows in multiples of the unit, `exp(unit * (scores - maximum))`, and its sums along rows.

        The exponential is 0 where a key is not seen.
        """
        scores = self.scores
        m, unit = jnp.max(lax.stop_gradient(scores), -1, keepdims=True, initial=-jnp.inf), self.attention.unit
        if unit is not None and unit < jnp.finfo(unit.dtype).tiny:
            weights = online.weights(scores, m[..., 0], scale=unit)
        else:
            # One subtraction makes the exponentials, without the selects of `online.weights`: XLA:CPU then compiles one
            # vectorised loop (see `ops/softmax/xla.py`).
            exponent = scores - online.finite(m)
            weights = jnp.exp(exponent if unit is None else unit * exponent)
        return m, weights, jnp.sum(weights, -1, keepdims=True)

    def normalized(self, m, weights, sums):
        """Returns the two factors of `weights_and_share` from `exponentials`.

        On a GPU the first factor is normalized: XLA multiplies the weights in the kernel that computes them (`triton_softmax`).
        XLA:CPU would write them once more.
        """
        share = self._share(m, sums)
        return (weights * share, jnp.ones((), share.dtype)) if self.attention.is_on_gpu else (weights, share)

    def _share(self, m, sums):
        """Computes the reciprocal of the sum of `exponentials` and of the exponential of the sink."""
        if (sinks := self["sinks"]) is None:
            return 1 / jnp.maximum(sums, 0.5)  # `sums` is 0 or at least 1: there is no tie, which would halve a derivative
        unit, top = self.attention.unit, online.shift(m)
        above = sinks.astype(top.dtype) - (top if unit is None else unit * top)
        factor = jnp.exp(jnp.minimum(-above, 0))
        sums = sums * factor + jnp.exp(jnp.minimum(above, 0))
        return factor / jnp.where(sums == 0, 1, sums)

    def dropout_factors(self):
        """Returns the factors by which dropout multiplies the weights, 0 or `1 / (1 - rate)`; None without dropout."""
        if self.attention["seeds"] is None:
            return None
        seeds = [self.attention["seeds"][..., i : i + 1] for i in range(4)]
        rows, cols = (self._positions(axis)[0].astype(np.uint32) + seeds[2 + axis] for axis in (0, 1))
        kept = dropout.keep(seeds[0], seeds[1], rows, cols, self.attention.dropout_rate)
        return kept.astype(self.attention.dtype) / (1 - self.attention.dropout_rate)


# The letters of the axes that an operand has as heads, rows and columns; "1" stands for none. See `operands.py`.
_GROUPED = {"TNH": "NTH", "SKH": "KSH", "NTS": "NTS", "NT": "NT1", "T": "1T1", "S": "11S", "N": "N11", "N4": "N14", "": "111"}
_GROUPED_AXES = {name: _GROUPED[axes] for name, axes in AXES.items() if axes in _GROUPED} | {"delta": "NT1"}


def _grouped(name, array, heads):
    """Returns an operand with the axes `[*batch, K, G, rows, columns]`."""
    axes = AXES[name]
    at = array.ndim - len(axes)
    sizes = dict(zip(axes, array.shape[at:], strict=True)) | {"1": 1}
    n_heads, rows, cols = (sizes[axis] for axis in _GROUPED_AXES[name])
    groups = heads if "N" in axes and n_heads != 1 else (n_heads, 1)
    array = jnp.swapaxes(array, -2, -3) if "H" in axes else array
    return array.reshape(*array.shape[:at], *groups, rows, cols)


def _table(array):
    """Returns a table, or its tangent, as score functions take it, with size 1 along the axes of the scores."""
    *batch, _, size = array.shape
    return wide_tables([array.reshape(*batch, 1, 1, 1, 1, size)])[0]


def _ungrouped(name, array, shape):
    """Returns the cotangent of an operand in the operand's shape, from a grouped sum."""
    if name in TABLES:
        return array.reshape(shape)
    array = _heads_last(array) if "H" in AXES[name] else lax.collapse(array, -4, -2)
    array = jnp.sum(array[..., 0], -1) if name == "sinks" else array
    return summed_to(array, shape)


def _heads_last(array):
    """Returns `[*batch, T, N, H]` from `[*batch, K, G, T, H]`."""
    return jnp.swapaxes(lax.collapse(array, -4, -2), -2, -3)


def _product(a, b, attention=None):
    """Computes a matrix product in float32 or float64; with `attention` in its precision of products with weights.

    16-bit numbers need no cast, as their products are exact.
    """
    dtype = accumulator(a.dtype, b.dtype)
    if a.dtype != b.dtype or a.dtype.itemsize != 2:
        a, b = a.astype(dtype), b.astype(dtype)
    precision = lax.Precision.HIGHEST if attention is None else attention.precision
    return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)


def _summed_product(a, b, attention, factor=1):
    """Computes `factor * a^T b`, summed over query heads of a key head: `[..., K, 1, S, H]` from `[..., K, G, T, S or H]`."""
    a, b = (jnp.broadcast_to(x, (*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *x.shape[-2:])) for x in (a, b))
    # In this order XLA:CPU transposes the smaller operand. With the factor behind the product it would transpose inside the
    # product, which is slow: the gradient of [8, 64, 8, 32] takes 1.9 ms then, and 1.6 with the factor in front.
    product = jnp.einsum("...gth,...gts->...hs", factor * b, a, precision=attention.precision)
    return product.mT[..., None, :, :]


def _exp_of_difference(a, b, where):
    """Computes `exp(a - b)` where `where` is true, else 0, with derivatives of 0."""
    return jnp.where(where, jnp.exp(jnp.where(where, a, 0) - jnp.where(where, b, 0)), 0)


def _where(seen, array, otherwise):
    return array if seen is None else jnp.where(seen, array, jnp.asarray(otherwise, jnp.asarray(array).dtype))


_FUNCTIONS = {
    "dot_product_attention": dot_product_attention,
    "paged_attention": paged_attention,
    "dot_product_attention_jvp": dot_product_attention_jvp,
    "dot_product_attention_vjp": dot_product_attention_vjp,
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
