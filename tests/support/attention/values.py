"""Attention's operands by feature and shape, those that are differentiated, and checks against float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

import jaxsoftmax
from jaxsoftmax.ops import OPS
from jaxsoftmax.ops.attention import dropout, primitive, xla

from .. import cases, oracle
from . import oracle as attention_oracle

# Float32 on the reference, whatever the platform: a kernel makes less precise products of it, where `function` lets it.
attend = functools.partial(jaxsoftmax.dot_product_attention, precision="highest")

# A kernel is tested by being listed in `OPS`: natively, where its platform is. The reference runs in one tile and in many.
KERNELS = [*OPS["attention"].kernels]


def small_tiles(monkeypatch):
    monkeypatch.setattr(xla, "ONE_TILE", 0)
    monkeypatch.setattr(xla, "BLOCK", (16, 24))  # what is jitted anew is lowered so; eager calls may be cached


def arrays(batch=(2,), length=40, keys=56, heads=4, key_heads=2, size=16, value_size=None, dtype="float32", seed=0):
    """Returns query, key and value with some scores that stand out."""
    rng = np.random.default_rng(seed)
    shapes = {
        "query": (*batch, length, heads, size),
        "key": (*batch, keys, key_heads, size),
        "value": (*batch, keys, key_heads, value_size or size),
    }
    return {name: (2 * rng.standard_normal(shape)).astype(jnp.dtype(dtype)) for name, shape in shapes.items()}


def random(shape, kind="mask", seed=1, dtype="float32"):
    rng = np.random.default_rng(seed)
    if kind == "mask":
        return rng.random(shape) < 0.6
    return (3 * rng.standard_normal(shape)).astype(jnp.dtype(dtype))


def segments(length, seed, batch=(2,), count=3):
    return np.sort(np.random.default_rng(seed).integers(0, count, (*batch, length)), -1).astype(np.int32)


def case(shapes=None, make=None, **options):
    """Returns a function that makes the operands, differentiable or not, in a dtype, and the options."""

    def of(dtype="float32"):
        given = arrays(dtype=dtype, **(shapes or {}))
        return given | ({} if make is None else make()), options

    return of


def key_masks():
    mask = random((2, 4, 40, 56))
    mask[0, 1], mask[1, :, 3:7] = False, False  # rows that see nothing
    return {"mask": mask}


def minus_infinity():
    bias = random((2, 4, 40, 56), "bias")
    bias[bias > 2] = -np.inf
    bias[0, 0, :5], bias[..., 11] = -np.inf, -np.inf  # rows that see nothing, and a key that nobody sees
    return {"bias": bias}


SCORES = [(2, 4, 40, 56), (1, 4, 40, 56), (2, 1, 40, 56), (1, 1, 40, 56), (2, 4, 1, 56), (2, 4, 40, 1), (1, 1, 1, 56)]
SCORES += [(40, 56), (4, 1, 1), (56,), (1, 1, 1, 1), ()]

LENGTHS = {"query_seq_lengths": np.array([0, 33], np.int32), "key_value_seq_lengths": np.array([17, 0], np.int32)}

FEATURES = {
    "plain": case(),
    "equal heads": case({"key_heads": 4}),
    "multi-query": case({"key_heads": 1}),
    "one head": case({"heads": 1, "key_heads": 1}),
    "no batch": case({"batch": ()}),
    "two batch axes": case({"batch": (2, 3), "length": 9, "keys": 11}),
    "smaller values": case({"value_size": 8}),
    "larger values": case({"value_size": 40}),
    "odd sizes": case({"length": 37, "keys": 53, "size": 36, "value_size": 21}),
    "head size 128": case({"size": 128}),
    "one query": case({"length": 1}),
    "one key": case({"keys": 1}),
    "no queries": case({"length": 0}),
    "no keys": case({"keys": 0}),
    "no batch entries": case({"batch": (0,)}),
    "scale": case(scale=0.5),
    "negative scale": case(scale=-0.3),
    "no scale": case(scale=0),
    "causal": case(is_causal=True),
    "causal, many queries": case({"length": 70, "keys": 23}, is_causal=True),
    "window": case(local_window_size=5),
    "window of none": case(local_window_size=0),
    "window before": case({"length": 70}, local_window_size=(7, None)),
    "window after": case(local_window_size=(None, 3)),
    "window on two sides": case(local_window_size=(3, 30)),
    "window, some rows see nothing": case({"length": 70, "keys": 23}, local_window_size=(7, 0)),
    "causal window": case(is_causal=True, local_window_size=(9, 4)),
    "offset, causal": case(None, lambda: {"query_offset": np.array([16, -3], np.int32)}, is_causal=True),
    "offset, window": case({"batch": (2, 3)}, lambda: {"query_offset": np.uint32(9)}, local_window_size=(7, 2)),
    "offset, some rows see nothing": case(
        {"keys": 23}, lambda: {"query_offset": np.array([-3, 19]), **LENGTHS}, local_window_size=(3, None)
    ),
    "offset of one query": case({"length": 1}, lambda: {"query_offset": np.array([55, 30], np.int8)}, is_causal=True),
    "offset without a window": case(None, lambda: {"query_offset": np.array([55, 30])}),
    "lengths": case(None, lambda: dict(LENGTHS)),
    "query lengths": case(None, lambda: {"query_seq_lengths": np.array([40, 7], np.int32)}),
    "key lengths": case(None, lambda: {"key_value_seq_lengths": np.array([56, 30], np.int32)}),
    "key lengths, causal": case(None, lambda: {"key_value_seq_lengths": np.array([56, 30], np.int32)}, is_causal=True),
    "segments": case(None, lambda: {"query_segment_ids": segments(40, 0), "key_value_segment_ids": segments(56, 1, count=5)}),
    "segments of both": case({"keys": 40}, lambda: {"query_segment_ids": segments(40, 0)}, is_causal=True),
    "soft cap": case(logits_soft_cap=2.0),
    "sinks": case(None, lambda: {"sinks": random((4,), "bias")}),
    "sinks alone": case(None, lambda: {"sinks": random((4,), "bias"), **LENGTHS}),
    "no sink in some heads": case(None, lambda: {"sinks": np.array([0, -np.inf, 1, 50], np.float32)}),
    "rows that see nothing": case(None, key_masks),
    "bias of -inf": case(None, minus_infinity),
    "dropout": case(dropout_rate=0.3, dropout_rng=3),
    "dropout, causal": case(dropout_rate=0.8, dropout_rng=4, is_causal=True),
    "dropout, broadcast": case(dropout_rate=0.3, dropout_rng=5, broadcast_dropout=True),
    "deterministic": case(dropout_rate=0.3, deterministic=True, deterministic_gradients=True),
    **{f"mask {cases.ident(shape)}": case(None, lambda shape=shape: {"mask": random(shape)}) for shape in SCORES},
    **{f"bias {cases.ident(shape)}": case(None, lambda shape=shape: {"bias": random(shape, "bias")}) for shape in SCORES[:10]},
}
MOVING = ("query", "key", "value", "bias", "sinks")


def together(names, dtype):
    """Returns the operands and options of several features, in the shapes of the first one."""
    given, options = {}, {}
    for name in reversed(names):
        more, own = FEATURES[name](dtype)
        given, options = given | more, options | own
    return given, options


def split(given):
    """Separates the arrays that may be differentiated from the others."""
    return {k: a for k, a in given.items() if k in MOVING}, {k: a for k, a in given.items() if k not in MOVING}


def function(options, fixed, implementation=None):
    """Returns attention as a function of the arrays that may be differentiated: output and lse."""
    options = dict(options)
    if (seed := options.get("dropout_rng")) is not None:
        options["dropout_rng"] = jax.random.key(seed)
    options = {"implementation": implementation, "precision": "high" if implementation in KERNELS else "highest"} | options
    return lambda moving: attend(**moving, **fixed, **options, return_residual=True)


def truth_of(truth, name, given, options, *args):
    """Returns `truth` of these arrays and options in float64, with the budget of the implementation `name`."""
    is_float32, is_coarse = given["query"].dtype == np.float32, options.get("precision") == "high"
    options = {
        name: value for name, value in options.items() if name not in ("deterministic", "deterministic_gradients", "precision")
    }
    rate, seed = options.pop("dropout_rate", 0), options.pop("dropout_rng", None)
    broadcast = options.pop("broadcast_dropout", False)
    if seed is not None:
        query, keys = given["query"], given["key"].shape[-3]
        shape = (*query.shape[:-3], query.shape[-2], 2)
        seeds = np.broadcast_to(jax.random.bits(jax.random.key(seed), shape[-1:] if broadcast else shape, np.uint32), shape)
        first, second = seeds[..., :1, None], seeds[..., 1:, None]
        ndim = seeds.ndim + 1
        rows = np.arange(query.shape[-3], dtype=np.uint32).reshape((1,) * (ndim - 2) + (-1, 1))
        cols = np.arange(keys, dtype=np.uint32).reshape((1,) * (ndim - 1) + (-1,))
        options["kept"] = np.asarray(dropout.keep(first, second, rows, cols, rate)) / (1 - rate)
    return truth(
        *args,
        *(given[k] for k in ("query", "key", "value")),
        **{k: a for k, a in given.items() if k not in ("query", "key", "value")},
        **options,
        product=attention_oracle.THREE_PRODUCTS if (name in KERNELS and is_float32) or is_coarse else 0.0,
    )


def assert_ran(forced, f, moving, *args):
    if forced != "xla":  # which can run anything
        has_tangents = forced == "mosaic" and moving["query"].dtype != np.float32
        cases.assert_ran(forced, f, moving, *args, without=() if has_tangents else ("dot_product_attention_jvp",))


def assert_right(name, results, given, options):
    for result, truth in zip(results, truth_of(attention_oracle.attention, name, given, options), strict=True):
        assert oracle.error(result, truth) <= 1


def is_tight(name, dtype):
    """Tells whether the tight budget of cotangents was derived for an implementation and a dtype."""
    return name == "mosaic" or (name != "xla" and dtype != np.float32)


def check_cotangents(forced, given, options):
    moving, fixed = split(given)
    f = function(options, fixed, forced)
    rng = np.random.default_rng(7)
    shapes = jax.eval_shape(f, moving)
    dout, dlse = (rng.standard_normal(s.shape).astype(s.dtype) for s in shapes)

    @jax.jit
    def pull(moving, *cotangents):
        results, vjp = jax.vjp(f, moving)
        return results, *vjp(cotangents)

    assert_ran(forced, pull, moving, dout, dlse)
    (out, lse), actual = pull(moving, dout, dlse)
    assert (out.dtype, lse.dtype) == (given["query"].dtype, jnp.float32)
    assert_right(forced, (out, lse), given, options)
    dlse = np.where(np.isneginf(lse), 0, dlse)  # nothing moves an lse of -inf
    tight = is_tight(forced, given["query"].dtype)  # and with what a kernel in 16 bits loses
    cotangents = functools.partial(attention_oracle.cotangents, tight=tight)
    for name, truth in truth_of(cotangents, forced, given, options, dout, dlse).items():
        assert actual[name].dtype == given[name].dtype
        assert oracle.error(actual[name], truth) <= 1, name


def run_planned(implementation, operation, target, operands, **params):
    """Computes an operation by the plan of an implementation for a target, without the primitive around it."""
    present = {name: operand for name, operand in operands.items() if operand is not None}
    params = {"precision": "high", "deterministic_gradients": False} | params
    problem = operation.problem(operation, {name: jax.typeof(operand) for name, operand in present.items()}, params)
    return implementation.plan(problem, target).run(**present)


def runs(implementation, operation, target=None):
    """A function of operands by name and parameters that computes an operation by an implementation.

    Without a target, and where an implementation has no plans, it is the function of the operation's name.
    """
    if target is None or not hasattr(implementation, "plan"):
        options = {} if target is None else {"target": target}
        absent = dict.fromkeys(operation.by_name)
        function = functools.partial(getattr(implementation, operation.name), **options)
        return lambda operands, **params: function(**absent | operands, **params)
    return functools.partial(run_planned, implementation, operation, target)


def check_parts(
    name, implementation, given, soft_cap=None, count=3, wanted=("query", "key", "value"), has_offset=False, target=None
):
    """Checks attention to parts of the keys, each started from the parts before it, and its cotangents, against float64.

    `has_offset` says that a position of the queries is an operand, as in a ring.
    """
    forward, backward = (runs(implementation, o, target) for o in (primitive.ATTENTION, primitive.ATTENTION_VJP))
    offset = {"query_offset": jnp.zeros(given["query"].shape[:-3], jnp.int32)} if has_offset else {}
    options = {"scale": 0.1, "window": (None, None), "soft_cap": soft_cap, "dropout_rate": 0.0}

    @jax.jit
    def in_parts(given, d_out, d_lse):
        split = {n: jnp.split(given[n], count, -3) for n in ("key", "value")}
        parts = [{n: split[n][i] for n in split} for i in range(count)]
        results, shared = (None, None), {"query": given["query"]} | offset
        for i, part in enumerate(parts):
            initial = {"initial_out": results[0], "initial_lse": results[1]}
            results = forward(shared | part | initial, **options, is_partial=i + 1 < count)
            assert results[0].dtype == (jnp.float32 if i + 1 < count else given["query"].dtype)
        if not wanted:
            return results, []
        shared |= {"d_out": d_out, "d_lse": d_lse} | dict(zip(("out", "lse"), results, strict=True))
        query, of_keys = jnp.zeros(given["query"].shape, jnp.float32), []
        for part in parts:
            more = {"initial_d_query": query}
            query, *own = backward(shared | part | more, **options, wanted=wanted, is_partial=True)
            of_keys.append(own)
        found = [options["scale"] * query, *(jnp.concatenate(own, -3) for own in zip(*of_keys, strict=True))]
        assert {x.dtype for x in found} == {np.dtype(np.float32)}
        return results, [x.astype(given[n].dtype) for n, x in zip(wanted, found, strict=True)]

    rng, query = np.random.default_rng(7), given["query"]
    d_out = rng.standard_normal((*query.shape[:-1], given["value"].shape[-1])).astype(query.dtype)
    d_lse = rng.standard_normal(query.shape[:-1]).astype(np.float32)
    (out, lse), found = in_parts(given, d_out, np.swapaxes(d_lse, -1, -2))
    public = {"scale": 0.1, "logits_soft_cap": soft_cap}
    truths = truth_of(attention_oracle.attention, name, given, public)
    for actual, truth in zip((out, np.swapaxes(lse, -1, -2)), truths, strict=True):
        assert oracle.error(actual, truth) <= 1
    tight = functools.partial(attention_oracle.cotangents, tight=is_tight(name, query.dtype))
    truths = truth_of(tight, name, given, public, d_out, d_lse)
    for n, x in zip(wanted, found, strict=True):
        assert oracle.error(x, truths[n]) <= 1, n


@st.composite
def calls(draw):
    """Draws any combination of features."""
    batch = draw(st.sampled_from([(), (2,), (1, 2)]))
    length, keys = draw(st.integers(1, 40)), draw(st.integers(1, 40))
    key_heads, groups = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2]))
    heads = key_heads * groups
    shapes = {"batch": batch, "length": length, "keys": keys, "heads": heads, "key_heads": key_heads}
    shapes |= {"size": draw(st.sampled_from([8, 24, 36])), "value_size": draw(st.sampled_from([8, 16, 33]))}
    given, options = arrays(dtype=draw(st.sampled_from(cases.DTYPES)), **shapes), {}
    seed, yes = draw(st.integers(0, 99)), st.booleans()
    whole = (*batch, heads, length, keys)
    for kind in ("mask", "bias"):
        if draw(yes):
            given[kind] = random(tuple(size if draw(yes) else 1 for size in whole), kind, seed)
    if draw(yes):
        given["query_seq_lengths"] = np.asarray(np.random.default_rng(seed).integers(0, length + 1, batch), np.int32)
    if draw(yes):
        given["key_value_seq_lengths"] = np.asarray(np.random.default_rng(seed).integers(0, keys + 1, batch), np.int32)
    if draw(yes):
        shape = batch if draw(yes) else ()
        given["query_offset"] = np.asarray(np.random.default_rng(seed).integers(-9, 40, shape), np.int32)
    if draw(yes):
        given["query_segment_ids"] = segments(length, seed, batch)
        given["key_value_segment_ids"] = segments(keys, seed + 1, batch)
    if draw(yes):
        given["sinks"] = random((heads,), "bias", seed)
    side = st.none() | st.integers(0, 20)
    options["local_window_size"] = draw(st.none() | st.tuples(side, side))
    options["is_causal"] = draw(yes)
    options["logits_soft_cap"] = draw(st.sampled_from([None, 3.0, 30.0]))
    if draw(yes):
        options |= {"dropout_rate": draw(st.sampled_from([0.1, 0.5])), "dropout_rng": seed}
    if options["local_window_size"] is None:
        del options["local_window_size"]
    return given, options


def several(make_scores, kind, dtype="float32", **options):
    """Returns a case with a mask or bias of a shape. Whole ones have 2 entries, 4 heads, 130 queries and 200 or 201 keys."""
    keys = make_scores[-1] if make_scores and make_scores[-1] > 1 else 200
    return case({"length": 130, "keys": keys, "size": 64}, lambda: {kind: random(make_scores, kind, dtype=dtype)}, **options)


def ids(length, seed, kind, count=5):
    """Returns segment ids of two batch entries: sorted, in any order, or with no id in common between different seeds."""
    found = segments(length, seed, count=count)
    if kind == "shuffled":
        return np.random.default_rng(seed).permutation(found, axis=-1)
    return found + (100 * seed if kind == "apart" else 0)


def segmented(kind, length=300, keys=401, size=64, **options):
    def make():
        return {"query_segment_ids": ids(length, 0, kind), "key_value_segment_ids": ids(keys, 1, kind)}

    return case({"length": length, "keys": keys, "size": size}, make, **options)


def everything_at_once():
    rng = np.random.default_rng(5)
    return {
        "query_seq_lengths": np.array([300, 129], np.int32),
        "key_value_seq_lengths": np.array([401, 70], np.int32),
        "query_segment_ids": ids(300, 0, "sorted", 2),
        "key_value_segment_ids": ids(401, 1, "sorted", 2),
        "sinks": rng.standard_normal(4).astype(np.float32),
        "mask": random((2, 1, 300, 401)),
        "bias": random((4, 300, 401), "bias"),
    }


def lengths_of(queries, keys):
    given = {"query_seq_lengths": queries, "key_value_seq_lengths": keys}
    return lambda: {name: np.array(own, np.int32) for name, own in given.items() if own is not None}


def least_number(dtype="float32"):
    """Returns a padding mask as a bias: the dtype's least number for some keys of all rows, and for all keys of some rows."""
    bias = random((2, 4, 400, 500), "bias", dtype="float32")
    bias[..., 300:] = bias[:, :, 64:80] = jnp.finfo(dtype).min
    return bias.astype(jnp.dtype(dtype))


def ahead(gap):
    """Makes operands with one key whose value is 0 and whose score is larger than those of the others, which are alike."""

    def of(dtype):
        given = {name: np.zeros((1, 2048, 1, 64), dtype=jnp.dtype(dtype)) for name in ("query", "key", "value")}
        given["query"][..., 0], given["key"][:, 700, :, 0], given["value"][...] = 8, gap, 1
        given["value"][:, 700] = 0
        return given, {}

    return of


RAGGED = [(1, 1), (1, 300), (300, 1), (63, 65), (65, 63), (127, 129), (129, 127), (192, 128), (385, 513)]
SIZES = [(8, 8), (16, 16), (64, 64), (80, 80), (128, 128), (192, 192), (256, 256)]
SIZES += [(192, 128), (128, 256), (64, 128), (8, 256), (256, 24), (36, 50), (100, 33), (1, 250)]
SIZES += [(32, 32), (96, 96), (160, 160), (224, 224), (64, 96), (96, 224)]  # in tiles of 32 columns if whole
# Whose columns come in halves: the kernels have no gradients of them.
LARGE_SIZES = [(512, 512), (384, 384), (440, 440), (320, 512), (512, 256), (512, 40), (64, 512), (200, 264)]


WINDOWS = [(30, None), (200, None), (None, 30), (None, 200), (0, 0), (30, 30), (200, 300), (5, 200), (200, 0), (600, 0)]
WIDE = {"length": 400, "keys": 500, "size": 64}
FEW = {"length": 3, "keys": 700, "heads": 8, "key_heads": 2, "size": 64}  # the queries of a key head are one tile


def few(length=3, size=64, **options):
    """Returns all features that depend on rows, for this number of queries."""

    def make():
        return {
            "query_seq_lengths": np.array([length, 2], np.int32),
            "key_value_seq_lengths": np.array([651, 700], np.int32),
            "query_offset": np.array([600, 123], np.int32),
            "query_segment_ids": ids(length, 0, "sorted", 2),
            "key_value_segment_ids": ids(700, 1, "sorted", 2),
            "sinks": random((8,), "bias"),
            "mask": random((2, 1, length, 700)),
            "bias": random((8, length, 700), "bias"),
        }

    return case(FEW | {"length": length, "size": size}, make, **options)


def large_sizes():
    """Returns cases of large heads, by name: whole tiles and clipped ones, few queries, and all features."""
    cases_of = {}
    for h, v in LARGE_SIZES:
        sizes = {"size": h, "value_size": v}
        cases_of[f"large sizes {h} and {v}"] = case({"length": 200, "keys": 250} | sizes, is_causal=True)
        cases_of[f"large sizes {h} and {v}, whole"] = case({"length": 384, "keys": 256} | sizes)
        cases_of[f"few, large sizes {h} and {v}"] = case(FEW | sizes)
    everything = {"local_window_size": (220, 100), "logits_soft_cap": 9.0}
    cases_of["large sizes, everything"] = case({"length": 300, "keys": 401, "size": 512}, everything_at_once, **everything)
    cases_of["large sizes, lengths"] = case(
        WIDE | {"batch": (4,), "size": 512}, lengths_of([0, 400, 129, 64], [17, 0, 500, 128])
    )
    cases_of["large sizes, segments"] = segmented("sorted", size=512)
    cases_of["large sizes, dropout"] = case(WIDE | {"size": 512}, dropout_rate=0.3, dropout_rng=3)
    cases_of["large sizes, many tiles"] = case({"batch": (9,), "length": 200, "heads": 10, "key_heads": 5, "size": 512})
    cases_of["few, large sizes, everything"] = few(size=512, local_window_size=(500, 100), logits_soft_cap=9.0)
    cases_of["few, large sizes, 256 rows"] = case(FEW | {"length": 64, "size": 512}, is_causal=True)
    return cases_of


EMPTY = np.zeros((130, 200), bool)
IN_SHAPES = {
    **{f"{t} and {s}": case({"length": t, "keys": s, "size": 64}) for t, s in RAGGED},
    **{f"{t} and {s}, causal": case({"length": t, "keys": s, "size": 128}, is_causal=True) for t, s in RAGGED},
    **{f"sizes {h} and {v}": case({"length": 200, "keys": 150, "size": h, "value_size": v}, is_causal=True) for h, v in SIZES},
    **{f"sizes {h} and {v}, whole": case({"length": 384, "keys": 256, "size": h, "value_size": v}) for h, v in SIZES},
    "groups of 3": case({"length": 130, "keys": 200, "heads": 6, "key_heads": 2, "size": 64}),
    "groups of 8": case({"length": 130, "keys": 200, "heads": 8, "key_heads": 1, "size": 64}),
    "two batch axes": case({"batch": (2, 3), "length": 130, "keys": 200, "size": 64}, is_causal=True),
    "no batch axes": case({"batch": (), "length": 130, "keys": 200, "size": 64}),
    "many tiles": case({"batch": (9,), "length": 200, "keys": 70, "heads": 10, "key_heads": 5, "size": 64}, is_causal=True),
    "4097": case(
        {"batch": (), "length": 4097, "keys": 4097, "heads": 1, "key_heads": 1, "size": 64}, local_window_size=(200, 9)
    ),
    **{f"window {window}": case(WIDE, local_window_size=window) for window in WINDOWS},
    **{f"window {window}, size 128": case(WIDE | {"size": 128}, local_window_size=window) for window in WINDOWS[::3]},
    "window beyond the keys": case(WIDE | {"keys": 100}, local_window_size=(20, 0)),
    "causal window": case(WIDE, is_causal=True, local_window_size=(150, 7)),
    "offset, causal": case(WIDE, lambda: {"query_offset": np.array([100, -70])}, is_causal=True),
    "offset, window": case(
        WIDE | {"batch": (4,), "size": 128},
        lambda: {"query_offset": np.array([0, 300, 77, 499]), **lengths_of([400, 390, 129, 64], [17, 500, 500, 499])()},
        local_window_size=(150, 7),
    ),
    "few": case(FEW),
    "few, one query": case(FEW | {"length": 1}),
    "few, one of each head": case(FEW | {"length": 1, "heads": 2}),
    "few, 64 rows": case(FEW | {"length": 16}),
    "few, 65 rows of groups": case(FEW | {"length": 13, "heads": 10, "size": 128}, lambda: {"sinks": random((10,), "bias")}),
    **{f"few, 256 rows, size {size}": case(FEW | {"length": 64, "size": size}, is_causal=True) for size in (64, 128, 256)},
    "few, 200 rows, everything": few(50, local_window_size=(500, 100), logits_soft_cap=9.0),
    "few, 65 rows": case(FEW | {"length": 65, "heads": 2}),
    "few, one key": case(FEW | {"keys": 1}),
    "few, no batch": case(FEW | {"batch": ()}),
    "few, many tiles": case(FEW | {"batch": (9, 11), "keys": 200}),
    "few, longer": case(FEW | {"length": 1, "keys": 20001, "batch": (1,), "key_heads": 1}),
    **{f"few, sizes {h} and {v}": case(FEW | {"size": h, "value_size": v}) for h, v in SIZES},
    "few, causal": case(FEW, is_causal=True),
    "few, window": case(FEW, local_window_size=(1, 300)),
    "few, offset": case(FEW, lambda: {"query_offset": np.array([690, 130])}, is_causal=True),
    "few, offset, window": case(FEW, lambda: {"query_offset": np.array([690, 130])}, local_window_size=(200, 5)),
    "few, lengths": case(FEW | {"batch": (4,)}, lengths_of([0, 3, 2, 3], [700, 0, 129, 64])),
    "few, segments": segmented("sorted", 3, 700),
    "few, soft cap": case(FEW, logits_soft_cap=2.0),
    "few, sinks": case(FEW, lambda: {"sinks": random((8,), "bias")}),
    "few, sinks alone": case(FEW, lambda: {"sinks": random((8,), "bias"), **lengths_of([0, 2], [7, 0])()}),
    **{
        f"few, {kind} {cases.ident(shape)}": case(FEW, lambda shape=shape, kind=kind: {kind: random(shape, kind)})
        for shape in ((2, 8, 3, 700), (2, 1, 3, 700), (2, 8, 1, 700), (1, 1, 1, 700), (8, 3, 1), (8, 1, 1), (3, 1), ())
        for kind in ("mask", "bias")
    },
    "few, everything": few(local_window_size=(500, 100), logits_soft_cap=9.0),
    "few, everything of one query": few(1, local_window_size=(500, 100), logits_soft_cap=9.0),
    "few, bias of the least number": case(
        FEW | {"keys": 645}, lambda: {"bias": np.full((8, 3, 645), np.finfo(np.float32).min, np.float32)}
    ),
    "few, dropout": case(FEW, dropout_rate=0.3, dropout_rng=3),
    "lengths": case(WIDE | {"batch": (4,)}, lengths_of([0, 400, 129, 64], [17, 0, 500, 128])),
    "lengths, causal": case(WIDE | {"batch": (4,)}, lengths_of([0, 400, 129, 64], [17, 0, 500, 128]), is_causal=True),
    "lengths of queries": case(WIDE, lengths_of([0, 65], None)),
    "lengths of keys": case(WIDE, lengths_of(None, [129, 0]), local_window_size=(40, 40)),
    **{f"segments {kind}": segmented(kind) for kind in ("sorted", "shuffled", "apart")},
    "segments, causal": segmented("sorted", 400, 400, is_causal=True),
    **{f"segments, size {size}": segmented("sorted", size=size) for size in (128, 256)},
    **{
        f"lengths, size {size}": case(WIDE | {"batch": (4,), "size": size}, lengths_of([0, 400, 129, 64], [17, 0, 500, 128]))
        for size in (128, 256)
    },
    **{  # which fill shared memory
        f"lengths, sizes {size} and {other}": case(WIDE | {"size": size, "value_size": other}, lengths_of([300, 65], [17, 500]))
        for size, other in ((256, 192), (192, 256))
    },
    "segments, lines of no multiple of 16 bytes": segmented("shuffled", 301, 402),
    "segments, window": segmented("shuffled", local_window_size=(70, 90)),
    "soft cap": case(WIDE, logits_soft_cap=2.0),
    "soft cap, causal": case(WIDE | {"size": 128}, logits_soft_cap=30.0, is_causal=True),
    "sinks": case(WIDE, lambda: {"sinks": random((4,), "bias")}, is_causal=True),
    "sinks alone": case(WIDE, lambda: {"sinks": random((4,), "bias"), **lengths_of([0, 65], [7, 0])()}),
    "no sink in some heads": case(WIDE, lambda: {"sinks": np.array([0, -np.inf, 1, 50], np.float32), "mask": random((1, 500))}),
    "dropout": case(WIDE | {"batch": (3,)}, dropout_rate=0.3, dropout_rng=3),
    "dropout, causal": case(WIDE | {"size": 128}, dropout_rate=0.1, dropout_rng=4, is_causal=True),
    "dropout, size 256": case(WIDE | {"size": 256}, dropout_rate=0.5, dropout_rng=5, local_window_size=(300, 9)),
    "scale": case(WIDE, scale=0.7),
    "bias of the least number": case(WIDE, lambda: {"bias": least_number(), "mask": random((1, 500))}),
    "bias of the least number of 16 bits": case(WIDE, lambda: {"bias": least_number("bfloat16")}, logits_soft_cap=5.0),
    **{f"one key ahead by {gap}": ahead(gap) for gap in (9, 13, 17, 20)},
    **{  # 16 and 2 elements of a mask at a time
        f"mask of {keys} keys, size {size}": case(
            {"length": 130, "keys": keys, "size": size}, lambda keys=keys: {"mask": random((2, 4, 130, keys))}
        )
        for keys, size in ((208, 64), (202, 64), (208, 256), (202, 128))
    },
    "nothing to see": case({"length": 130, "keys": 200, "size": 64}, lambda: {"mask": EMPTY}),
    "sinks alone everywhere": case(
        {"length": 130, "keys": 200, "size": 64}, lambda: {"mask": EMPTY, "sinks": random((4,), "bias")}
    ),
    "everything": case(
        {"length": 300, "keys": 401, "size": 64}, everything_at_once, local_window_size=(220, 100), logits_soft_cap=9.0
    ),
    **{
        f"{kind} {cases.ident(shape)} {dtype}": several(shape, kind, dtype)
        for keys in (200, 201)
        for shape in (
            *((2, 4, 130, keys), (1, 4, 130, keys), (2, 1, 130, keys), (1, 1, 130, keys), (2, 4, 1, keys)),
            *((2, 4, 130, 1), (1, 1, 1, keys), (130, keys), (4, 1, 1), (keys,), (1, 1, 1, 1), ()),
        )
        for kind, dtype in (("mask", "bool"), ("bias", "float32"), ("bias", "bfloat16"))
    },
    **large_sizes(),
}
