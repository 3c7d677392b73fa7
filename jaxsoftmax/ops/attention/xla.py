"""The reference: attention and its derivatives in plain `jax.numpy`, on every platform.

It defines what is right, and is the one that runs where no kernel does. With `s = cap(scale * q k^T) + bias`, and weights
`p = exp(s - lse)` of which dropout keeps and divides `z p`:

    forward   lse = log(sum(exp(s)) + exp(sink)),   out = z p v
    tangent   dlse = sum(p ds) + p_sink dsink,      dout = (z p ds) v + (z p) dv - dlse out
    cotangent ds = p (z (dout v^T) - sum(out dout) + dlse), from which those of q, k, v, bias and sinks

A small problem is one tile of scores. A larger one is cut into tiles of about `BLOCK`, each of which is pushed to the state of
its rows: see docs/design.md. Arithmetic is float32, or float64 where the operands are.

Operands have the axes that `operands.py` says; each of the batch is whole or 1 in every one, and so are all of bias and mask.
All but query, key and value may be None.

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
from jaxsoftmax._core.problem import Problem
from jaxsoftmax._core.sharding import vary_alike
from jaxsoftmax._core.target import ONE_DEVICE, Target
from jaxsoftmax.ops.attention import dropout
from jaxsoftmax.ops.attention.context_parallel.order import position_of
from jaxsoftmax.ops.attention.operands import AXES, OPERANDS, batch_of, dequantised, merged, paged, without_pages

# Up to how many scores, of all heads, a problem is one tile.
ONE_TILE = 2**24

# Queries and keys of a tile of a larger one, and how many scores of all heads it may have at most.
BLOCK = (512, 512)
LARGEST_TILE = 2**26

ROWS, COLS = 0, 1  # the axes of the scores


def dot_product_attention(*, return_lse=True, is_partial=False, onto=None, **given):
    """`[out, lse]`, or `[out]`: `return_lse` says whether lse is a result. `_Attention` says what else is `given`.

    With `is_partial` out, which is one of several that are merged, is not rounded to the dtype of the queries. `onto` is
    `(out, lse)` of other keys, if there are any: the results are those of all of these keys together.
    """
    problem = _Attention(**dequantised(given, accumulator(given["query"].dtype)))
    rows, value_size = problem.rows, problem["value"].shape[-1]

    def push(state, tile):
        scores, _ = tile.scores
        value, unit = tile.seen_part("value").astype(problem.dtype), problem.unit
        so_far = online.State(*(tile.cut(ROWS, part, axis) for part, axis in zip(state, (-1, -1, -2), strict=True)))
        kept = tile.kept()
        if kept is None and problem.precision is lax.Precision.HIGHEST:
            pushed = online.push(so_far, scores, value, scale=unit)
        else:
            lifted = online.lift(scores, scale=unit)
            weights = online.weights(scores, lifted.m, scale=unit)
            weights = weights if kept is None else kept * weights
            pushed = online.merge(so_far, online.State(lifted.m, lifted.d, _product(weights, value, problem)), scale=unit)
        return online.State(*(tile.put(ROWS, *args) for args in zip(state, pushed, (-1, -1, -2), strict=True)))

    def of_one_tile(tile):  # as in derivatives, with which XLA then shares what is equal
        m, weights, sums = tile.exponentials
        (weights, share), kept = tile.normalized(m, weights, sums), tile.kept()
        product = _product(weights if kept is None else kept * weights, tile.seen_part("value").astype(problem.dtype), problem)
        return online.State(m[..., 0], sums[..., 0]), product * share

    if problem.is_one_tile:
        state, out = of_one_tile(problem.whole)
    else:
        state, out = problem.over_tiles(push, online.identity(rows, value_size, problem.dtype)), None
    if problem.unit is not None:
        state = state._replace(m=jnp.where(state.m == -jnp.inf, -jnp.inf, problem.unit * state.m))
    if (sinks := problem["sinks"]) is not None:  # a key without a value
        pushed = online.push(state._replace(o=None), jnp.broadcast_to(sinks.astype(problem.dtype), (*rows, 1)))
        state = online.State(*pushed[:2], online.rescale(state, pushed.m).o)
    state = online.finish(state)
    out, lse = _heads_last(state.o if out is None else out), lax.collapse(state.m, -3, -1)
    out, lse = (out, lse) if onto is None else merged(onto, (out, lse))
    out = out if is_partial else out.astype(problem["query"].dtype)
    return [out, lse] if return_lse else [out]


def paged_attention(**given):
    """The same, of keys and values in pages."""
    operands, options = paged(given)
    absent = {operand.name: None for operand in OPERANDS}
    gathered = without_pages(operands, accumulator(operands["query"].dtype))
    return dot_product_attention(**absent | gathered, **options, dropout_rate=0.0)


def dot_product_attention_jvp(*, is_partial=False, **given):
    """`[dout, dlse]` of the operands, out, lse and the tangents of `MOVING`, any of which may be None.

    With `is_partial` the keys are some of those of out and lse.
    """
    problem = _Attention(**given, is_partial=is_partial)
    dtype, rows, value_size = problem.dtype, problem.rows, problem["value"].shape[-1]

    def add(sums, tile):
        scores, slope = tile.scores
        p, kept = tile.weights(scores), tile.kept()
        ds = jnp.zeros_like(scores)
        if tile["d_query"] is not None:
            ds += problem.scale * slope * _product(tile.seen_part("d_query"), tile.seen_part("key").mT)
        if tile["d_key"] is not None:
            ds += problem.scale * slope * _product(tile.seen_part("query"), tile.seen_part("d_key").mT)
        if (dbias := tile["d_bias"]) is not None:
            ds += dbias.astype(dtype)
        ds = p * _where(tile.seen, ds, 0)
        dlse = jnp.sum(ds, -1)
        if kept is not None:
            p, ds = p * kept, ds * kept
        dout = _product(ds, tile.seen_part("value").astype(dtype), problem)
        if tile["d_value"] is not None:
            dout += _product(p, tile.seen_part("d_value").astype(dtype), problem)
        return [tile.add(ROWS, sums[0], dout, -2), tile.add(ROWS, sums[1], dlse, -1)]

    dout, dlse = problem.over_tiles(add, [jnp.zeros((*rows, value_size), dtype), jnp.zeros(rows, dtype)])
    if (dsinks := problem["d_sinks"]) is not None:
        dlse += problem.weight_of_sink() * dsinks[..., 0].astype(dtype)
    dout -= dlse[..., None] * problem["out"].astype(dtype)
    return [_heads_last(dout).astype(problem["query"].dtype), lax.collapse(dlse, -3, -1)]


def dot_product_attention_vjp(*, wanted, is_partial=False, onto=None, **given):
    """Returns the cotangents of the `wanted` operands, some of `MOVING`.

    It gets the operands, out, lse and the cotangents dout and dlse, either of which may be None. Results have the shapes of the
    operands, and their dtypes unless `is_partial`: then those of queries, keys and values are parts of sums, and the one of
    queries is yet to be multiplied by `scale`. `onto`, if given, is such a part for the queries from other keys, and is added.
    """
    problem = _Attention(**given, is_partial=is_partial)
    dtype = problem.dtype
    problem.forget_rows_without_keys()
    # `delta` is what the scores of a row get less than their own share, sum(out dout) - dlse. The sum is taken of weights where
    # that is no slower: a program that needs `out` for nothing else multiplies no values, then. On a CPU a mask would keep XLA
    # from fusing it: the causal gradient of [1, 512, 8, 64] takes 17.6 ms so, and 10.1 from `out`.
    is_of_weights = problem.is_one_tile and problem.has_whole_rows and "sinks" not in wanted
    is_of_weights &= problem.is_on_gpu or problem.whole.seen is None
    delta = jnp.zeros(problem.rows, dtype)
    if (dout := problem["d_out"]) is not None and not is_of_weights:
        delta += jnp.sum(problem["out"].astype(dtype) * dout.astype(dtype), -1)
    if (dlse := problem["d_lse"]) is not None:
        delta -= dlse[..., 0].astype(dtype)
    problem.arrays["delta"] = delta[..., None]

    def add(sums, tile):
        scores, slope = tile.scores
        (p, share), kept = tile.weights_and_share(scores), tile.kept()
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
            dq = _product(dx, tile.seen_part("key").astype(dtype), problem)
            sums["query"] = tile.add(ROWS, sums["query"], dq, -2)
        if "key" in sums:
            dk = _summed_product(dx, tile.seen_part("query").astype(dtype), problem, problem.scale)
            sums["key"] = tile.add(COLS, sums["key"], dk, -2)
        if "value" in sums and dout is not None:
            dv = _summed_product(p if kept is None else p * kept, dout, problem)
            sums["value"] = tile.add(COLS, sums["value"], dv, -2)
        if "bias" in sums:
            sums["bias"] = tile.add_scores(sums["bias"], ds)
        return sums

    sums: dict[str, Any] = {}
    for name in wanted:  # in this order, not that of a set of strings: the program is the same in every process
        shape = problem[name].shape
        if name != "sinks":
            sums[name] = jnp.zeros(shape if name == "bias" else (*problem.batch, *shape[len(problem.batch) :]), dtype)
    if sums:
        sums = problem.over_tiles(add, sums)
    if "sinks" in wanted:
        sums["sinks"] = (-problem.weight_of_sink() * delta)[..., None]
    if "query" in sums and not is_partial:
        sums["query"] *= problem.scale
    found = [_ungrouped(name, sums[name], given[name].shape) for name in wanted]
    found = [x if onto is None or name != "query" else onto + x for x, name in zip(found, wanted, strict=True)]
    return [x if is_partial else x.astype(given[name].dtype) for x, name in zip(found, wanted, strict=True)]


class _Attention:
    """Operands in which query heads are grouped by the key head that they share, and what tiles of scores are made of.

    All have five axes behind the batch, of which one may be 1: key heads K, query heads of each G, and then rows and columns:
    queries, keys, or the size of a head. So query is `[*batch, K, G, T, H]`, key `[*batch, K, 1, S, H]`, bias
    `[*batch, K, G, T, S]`, and what belongs to rows `[*batch, K, G, T, 1]`.

    Parameters are those of the primitives. XLA may cut the operands over the devices of `machine`, in a way that is not known
    here.
    """

    def __init__(
        self,
        *,
        scale,
        window,
        soft_cap,
        dropout_rate,
        precision="highest",
        deterministic_gradients=False,
        machine=ONE_DEVICE,
        zigzag=None,
        strategy=None,
        axis_name=None,
        is_partial=False,
        **given: Any,
    ):
        del deterministic_gradients  # met as far as XLA's products do
        del strategy, axis_name  # which matter to `across_devices`
        query, key = given["query"], given["key"]
        self.scale, self.window, self.soft_cap, self.dropout_rate = scale, window, soft_cap, dropout_rate
        self.zigzag = zigzag
        self.dtype = accumulator(query.dtype)
        self.lengths = query.shape[-3], key.shape[-3]
        heads = key.shape[-2], query.shape[-2] // key.shape[-2]
        self.batch = batch_of(given)
        self.rows = (*self.batch, *heads, self.lengths[0])
        self.arrays = {name: None if a is None else _grouped(name, a, heads) for name, a in given.items()}
        self.block = self._block(machine.devices)
        # What scores are multiples of: their maximum is exact, and what is multiplied is a difference to it. XLA would contract
        # `scale * x - m` to one operation, and `m` was rounded: by 512 where it is 1e10.
        self.unit: Any = None
        if self["bias"] is None:
            self.unit = np.asarray(abs(scale) if soft_cap is None else soft_cap, self.dtype)
        # Where a tile has all keys of its rows, weights are normalized anew: a large lse cannot hold the logarithm of a sum.
        self.has_whole_rows = self.block[COLS] == self.lengths[COLS] and not is_partial
        self.is_one_tile = self.block == self.lengths
        self.is_on_gpu = machine.target is not None and machine.target.platform in ("cuda", "rocm")
        # The precision of products with float32 weights. Where operands have 16 bits, three products of bfloat16 each err by
        # 2^-16: the gradient of [1, 512, 8, 64] takes 56 us on an H100 so, 85 in float32, 42 with `jax.nn`, which rounds more.
        is_coarse = query.dtype.itemsize == 2 and precision == "high"
        gpu = machine.target  # named if it is there: a program for any GPU is to run on all
        has_three = gpu is not None and gpu.name is not None and (gpu.compute_capability or (0, 0)) >= (8, 0)
        self.precision: Any = lax.DotAlgorithmPreset.BF16_BF16_F32_X3 if is_coarse and has_three else lax.Precision.HIGHEST
        self.sees_all = self.is_one_tile and self._sees_all()

    def __getitem__(self, name) -> Any:
        return self.arrays.get(name)

    def _block(self, devices):
        """Queries and keys of a tile: fewer where there are many heads, more of one where there are few of the other.

        A slice of queries would make XLA gather those that are cut over several devices. So there a tile has all queries, and
        each device its share of them, unless a window leaves so few tiles that all of them are less work than such a share.
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
        return queries, min(keys, max(BLOCK[1] // 4, rows * cols // queries))

    def over_tiles(self, step, carry):
        """`step(carry, tile)` for each tile that may hold something to see."""
        if self.block == self.lengths:
            return step(carry, self.whole)
        leaves, structure = jax.tree.flatten(carry)
        carry = structure.unflatten(vary_alike([*leaves, self["query"]])[:-1])  # as a loop in a `shard_map` wants it

        @functools.partial(jax.checkpoint, prevent_cse=False)  # reverse mode through a scan would keep every tile
        def body(carry, indices):
            return step(carry, _Tile(self, (indices[0], indices[1])))

        # A constant of an inner function, as custom_partitioning takes no others.
        tiles = jax.jit(lambda: jnp.asarray(np.argwhere(self._visible(self.block)).astype(np.int32)))()
        return lax.scan(lambda *args: (body(*args), None), carry, tiles)[0]

    def _visible(self, block):
        """Which tiles the window leaves: a bool for each of the rows and columns of tiles."""
        is_known = self["query_offset"] is None and self.zigzag is None
        (rows, cols), (left, right) = block, self.window if is_known else (None, None)
        i, j = np.indices([-(-length // size) for length, size in zip(self.lengths, block, strict=True)])
        visible = np.ones(i.shape, bool)
        if left is not None:
            visible &= (j + 1) * cols - 1 >= i * rows - left
        if right is not None:
            visible &= j * cols <= (i + 1) * rows - 1 + right
        return visible

    def _sees_all(self):
        """Tells whether each query sees a key and each key is seen, except for scores of -inf. Nothing else is hidden."""
        names = ("query_offset", "query_lengths", "key_lengths", "query_segments", "mask", "bias")
        if self.zigzag is not None or not all(isinstance(length, int) for length in self.lengths):
            return False
        return all(self[name] is None for name in names) and sees_all(*self.lengths, *self.window)

    @functools.cached_property
    def whole(self) -> "_Tile":
        """The one tile of a small problem."""
        return _Tile(self, (0, 0))

    def forget_rows_without_keys(self):
        """Sets the cotangents of rows to 0 that see no key: they may hold NaN. Those of lse count where there is a sink."""
        lse = self["lse"]
        if self.sees_all and self.has_whole_rows and self["sinks"] is None:
            # Only scores of -inf leave nothing. Weights tell of them: XLA:CPU fuses the maximum if no lse reads it.
            empty = alone = self.whole.exponentials[2] == 0
        else:
            empty = alone = lse == -jnp.inf
        if (sinks := self["sinks"]) is not None:
            alone |= (lse == sinks.astype(self.dtype)) & jnp.all(self["out"] == 0, -1, keepdims=True)
        for name, rows in (("d_out", alone), ("d_lse", empty)):
            if (array := self[name]) is not None:
                self.arrays[name] = jnp.where(rows, jnp.zeros_like(array), array)

    def weight_of_sink(self):
        """`exp(sink - lse)`, `[*batch, K, G, T]`; 0 where there is nothing at all to see."""
        lse = self["lse"][..., 0]
        sinks = jnp.broadcast_to(self["sinks"][..., 0].astype(self.dtype), lse.shape)
        return _exp_of_difference(sinks, lse, lse != -jnp.inf)


def sees_all(queries: int, keys: int, left: int | None, right: int | None) -> bool:
    """Tells whether in a window each query sees a key, if there are keys, and each key is seen. None is for no limit."""
    left, right = (queries + keys if side is None else side for side in (left, right))
    rows, cols = np.arange(queries), np.arange(keys)
    each_query = np.all((rows - left < keys) & (rows + right >= 0))
    return bool(each_query and np.all((cols - right < queries) & (cols + left >= 0)))


@dataclass(frozen=True)
class _Tile:
    """The scores of some rows, the queries, and some columns, the keys.

    The last tile of a length that is not a multiple of the tile's is as large as the others. What it shares with the one
    before it counts as not seen.
    """

    problem: _Attention
    index: tuple[Any, Any]

    def _first(self, axis):
        size, length = self.problem.block[axis], self.problem.lengths[axis]
        return 0 if size == length else jnp.minimum(self.index[axis] * size, length - size)

    def _positions(self, axis):
        """Of the rows `[..., rows, 1]` or columns `[..., 1, cols]`, and which of them are new, None for all."""
        size, length = self.problem.block[axis], self.problem.lengths[axis]
        places = self._first(axis) + lax.iota(np.int32, size)
        ndim = len(self.problem.rows) + 1
        places = lax.expand_dims(places, [a for a in range(ndim) if a != ndim - 2 + axis])
        whole = size == length or (isinstance(length, int) and length % size == 0)
        order = self.problem.zigzag
        positions = places if order is None else position_of(places, length, order)
        return positions, None if whole else places >= self.index[axis] * size

    def __getitem__(self, name) -> Any:
        array = self.problem[name]
        for which, axis in zip((ROWS, COLS), "TS", strict=True):
            if array is not None and axis in _axes[name]:
                array = self.cut(which, array, _axes[name].index(axis) - 3)
        return array

    def cut(self, which, array, axis):
        """The rows of this tile of an array, or the columns: `which` is `ROWS` or `COLS`."""
        size = self.problem.block[which]
        if array.shape[axis] == 1 or size == self.problem.lengths[which]:
            return array
        return lax.dynamic_slice_in_dim(array, self._first(which), size, axis)

    def put(self, which, whole, part, axis):
        """`whole` with `part` in the place of this tile's rows, or columns."""
        return part if part.shape == whole.shape else lax.dynamic_update_slice_in_dim(whole, part, self._first(which), axis)

    def add(self, which, whole, part, axis):
        """`whole` with `part` added; where there is one tile, nothing was there before."""
        if self.problem.is_one_tile:
            return part
        return self.put(which, whole, self.cut(which, whole, axis) + part, axis)

    def add_scores(self, whole, part):
        """Adds to what may have size 1 along any axis: those are summed."""
        if self.problem.is_one_tile:
            return summed_to(part, whole.shape)
        here = self.cut(COLS, self.cut(ROWS, whole, -2), -1)
        here += summed_to(part, here.shape)
        if here.shape == whole.shape:
            return here
        starts = [self._first(axis) if whole.shape[axis - 2] != 1 else 0 for axis in (0, 1)]
        starts = [jnp.asarray(start, np.int32) for start in [0] * (whole.ndim - 2) + starts]
        return lax.dynamic_update_slice(whole, here, starts)

    @functools.cached_property
    def scores(self):
        """Scores in multiples of the problem's unit, `-inf` where not seen, and their derivative by `scale * product`."""
        problem, unit = self.problem, self.problem.unit
        scores, slope = _product(self.seen_part("query"), self.seen_part("key").mT), 1.0
        scores = jnp.broadcast_to(scores, (*problem.batch, *scores.shape[len(problem.batch) :]))
        if problem.soft_cap is not None:
            bent = jnp.tanh(_where(self.seen, problem.scale * scores / problem.soft_cap, 0))
            scores, slope = bent if unit is not None else problem.soft_cap * bent, 1 - bent * bent
        elif unit is None:
            scores = problem.scale * scores
        elif problem.scale < 0:
            scores = -scores
        if (bias := self["bias"]) is not None:
            scores += bias.astype(problem.dtype)
        return _where(self.seen, scores, -jnp.inf), slope

    def seen_part(self, name):
        """An operand of queries or keys, with 0 for those that see nothing, or that nothing sees: they may hold NaN."""
        array, seen = self[name], self.seen
        if seen is None or self.problem.sees_all:
            return array
        seen = jnp.any(seen, -1, keepdims=True) if "T" in _axes[name] else jnp.any(seen, (-2, -3), keepdims=True).mT
        return jnp.where(seen, array, jnp.zeros_like(array))

    @functools.cached_property
    def seen(self):
        """Which keys which queries see, to be broadcast with the scores, or None for all."""
        (rows, new_rows), (cols, new_cols) = self._positions(0), self._positions(1)
        (left, right), lengths = self.problem.window, [self.problem[name] for name in ("query_lengths", "key_lengths")]
        terms, at = [new_rows, new_cols], rows
        if (offset := self.problem["query_offset"]) is not None:
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
        terms = [term for term in terms if term is not None]
        return functools.reduce(jnp.logical_and, terms) if terms else None

    def weights(self, scores):
        """`exp(scores - lse)` of scores in multiples of the unit, 0 where nothing is seen."""
        weights, share = self.weights_and_share(scores)
        return weights * share

    def weights_and_share(self, scores):
        """`weights` as a product: of numbers of their shape, and of numbers of rows, which are multiplied where it is cheap."""
        unit, is_seen = self.problem.unit, scores != -jnp.inf
        if self.problem.has_whole_rows:
            return self.normalized(*self.exponentials)
        if unit is not None:  # a maximum stands between product and difference: XLA cannot contract them
            scores = jnp.maximum(unit * jnp.where(is_seen, scores, 0), jnp.finfo(scores.dtype).min)
        return _exp_of_difference(scores, jnp.broadcast_to(self["lse"], scores.shape), is_seen), jnp.ones((), scores.dtype)

    @functools.cached_property
    def exponentials(self):
        """Returns maxima of whole rows, in multiples of the unit, `exp(unit * (scores - maximum))`, and their sums.

        The exponential is 0 where nothing is seen.
        """
        scores, _ = self.scores
        m, unit = jnp.max(lax.stop_gradient(scores), -1, keepdims=True, initial=-jnp.inf), self.problem.unit
        if unit is not None and unit < jnp.finfo(unit.dtype).tiny:
            weights = online.weights(scores, m[..., 0], scale=unit)
        else:
            exponent = scores - online.finite(m)
            weights = jnp.exp(exponent if unit is None else unit * exponent)
        return m, weights, jnp.sum(weights, -1, keepdims=True)

    def normalized(self, m, weights, sums):
        """`weights_and_share` of `exponentials`.

        XLA:GPU multiplies weights in the kernel that makes them, and XLA:CPU would write them once more.
        """
        share = self._share(m, sums)
        return (weights * share, jnp.ones((), share.dtype)) if self.problem.is_on_gpu else (weights, share)

    def _share(self, m, sums):
        """One by the sum of `exponentials` and that of the sink."""
        if (sinks := self["sinks"]) is None:
            return 1 / jnp.maximum(sums, 0.5)  # `sums` is 0 or at least 1: there is no tie, which would halve a derivative
        unit, top = self.problem.unit, online.shift(m)
        above = sinks.astype(top.dtype) - (top if unit is None else unit * top)
        factor = jnp.exp(jnp.minimum(-above, 0))
        sums = sums * factor + jnp.exp(jnp.minimum(above, 0))
        return factor / jnp.where(sums == 0, 1, sums)

    def kept(self):
        """What dropout multiplies the weights with, 0 or `1 / (1 - rate)`; None without dropout."""
        if self.problem["seeds"] is None:
            return None
        seeds = [self.problem["seeds"][..., i : i + 1] for i in range(4)]
        rows, cols = (self._positions(axis)[0].astype(np.uint32) + seeds[2 + axis] for axis in (0, 1))
        kept = dropout.keep(seeds[0], seeds[1], rows, cols, self.problem.dropout_rate)
        return kept.astype(self.problem.dtype) / (1 - self.problem.dropout_rate)


# Which axes an operand has as those of heads, rows and columns, where "1" is none.
_GROUPED = {"TNH": "NTH", "SKH": "KSH", "NTS": "NTS", "NT": "NT1", "T": "1T1", "S": "11S", "N": "N11", "N4": "N14", "": "111"}
_axes = {name: _GROUPED[axes] for name, axes in AXES.items() if axes in _GROUPED} | {"delta": "NT1"}


def _grouped(name, array, heads):
    """An operand with axes `[*batch, K, G, rows, columns]`."""
    axes = AXES[name]
    at = array.ndim - len(axes)
    sizes = dict(zip(axes, array.shape[at:], strict=True)) | {"1": 1}
    own, rows, cols = (sizes[axis] for axis in _axes[name])
    group = heads if "N" in axes and own != 1 else (own, 1)
    array = jnp.swapaxes(array, -2, -3) if "H" in axes else array
    return array.reshape(*array.shape[:at], *group, rows, cols)


def _ungrouped(name, array, shape):
    """The cotangent of an operand, from its grouped sum, with the operand's shape."""
    array = _heads_last(array) if "H" in AXES[name] else lax.collapse(array, -4, -2)
    array = jnp.sum(array[..., 0], -1) if name == "sinks" else array
    return summed_to(array, shape)


def _heads_last(array):
    """`[*batch, T, N, H]` of `[*batch, K, G, T, H]`."""
    return jnp.swapaxes(lax.collapse(array, -4, -2), -2, -3)


def summed_to(array, shape):
    """The sum along the axes along which `shape` is 1."""
    axes = tuple(axis for axis, size in enumerate(shape) if size == 1 and array.shape[axis] != 1)
    return jnp.sum(array, axes, keepdims=True) if axes else array


def _product(a, b, problem=None):
    """A matrix product in float32 or float64: that of 16-bit numbers needs no cast, as their products are exact.

    With a problem it is that of weights, in its precision.
    """
    dtype = accumulator(a.dtype, b.dtype)
    if a.dtype != b.dtype or a.dtype.itemsize != 2:
        a, b = a.astype(dtype), b.astype(dtype)
    precision = lax.Precision.HIGHEST if problem is None else problem.precision
    return jnp.matmul(a, b, precision=precision, preferred_element_type=dtype)


def _summed_product(a, b, problem, factor=1):
    """`factor * a^T b`, summed over query heads that share a key head: `[..., K, 1, S, H]` of `[..., K, G, T, S | H]`."""
    a, b = (jnp.broadcast_to(x, (*jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2]), *x.shape[-2:])) for x in (a, b))
    # What is transposed on a CPU is the smaller one. A factor behind the product would make XLA:CPU transpose in the product,
    # where it is slow: the gradient of [8, 64, 8, 32] takes 1.9 ms so, and 1.6 with the factor in front.
    product = jnp.einsum("...gth,...gts->...hs", factor * b, a, precision=problem.precision)
    return product.mT[..., None, :, :]


def _exp_of_difference(a, b, where):
    """`exp(a - b)` where `where`, else 0, and so its derivatives."""
    return jnp.where(where, jnp.exp(jnp.where(where, a, 0) - jnp.where(where, b, 0)), 0)


def _where(seen, array, otherwise):
    return array if seen is None else jnp.where(seen, array, jnp.asarray(otherwise, jnp.asarray(array).dtype))


_FUNCTIONS = {
    function.__name__: function
    for function in (dot_product_attention, paged_attention, dot_product_attention_jvp, dot_product_attention_vjp)
}


def plan(problem: Problem, target: Target | None = None) -> ReferencePlan:
    """Plans any problem of this op."""
    del target
    return ReferencePlan(_FUNCTIONS[problem.operation.name], problem)
