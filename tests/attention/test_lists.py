"""Lists of the blocks that a mask function shows, where its spans have holes: what is in them, and kernels that visit them."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxsoftmax
from jaxsoftmax._core.implementation import Refusal
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention import mask_blocks, primitive
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention.mosaic_sm90 import lists
from jaxsoftmax.ops.attention.score_functions import functions_and_operands

from ..core import compiled
from ..support import cases, xla_cuda
from ..support.attention import interpreted, values
from ..support.attention.gradients import cotangents_like

BATCH, HEADS, LENGTH = 2, 2, 512
RNG = np.random.default_rng(0)
SHOWN = jnp.asarray(np.arange(16).reshape(4, 4) % 3 != 1)  # of blocks of 128 queries and keys
SHOWN_BY_HEAD = jnp.asarray(
    [[[h * (i == j) + (1 - h) * (i == 3 - j) for j in range(4)] for i in range(4)] for h in range(HEADS)], bool
)
DOCUMENTS = jnp.asarray(np.sort(RNG.integers(0, 5, LENGTH)), jnp.int32)

HOLES = {
    "window and prefix": lambda b, h, q, k: (q >= k) & ((q - k < 70) | (k < 60)),
    "checkerboard": lambda b, h, q, k: (q // 128 + k // 128) % 2 == 0,
    "dilated": lambda b, h, q, k: (q // 128 - k // 128) % 3 == 0,
    "whole runs": lambda b, h, q, k: (q >= k) & ((k // 128 != 1) | (k % 2 == 0)),
    "of a table": lambda b, h, q, k: SHOWN[q // 128, k // 128],
    "of heads": lambda b, h, q, k: SHOWN_BY_HEAD[h, q // 128, k // 128],
    "empty rows": lambda b, h, q, k: (q // 128 == 2) & (k // 128 % 2 == 0) & (q != 300),
}
NO_HOLES = {
    "causal": lambda b, h, q, k: q >= k,
    "window": lambda b, h, q, k: jnp.abs(q - k) < 70,
    "prefix": lambda b, h, q, k: (q >= k) | (k < 160),
    "documents": lambda b, h, q, k: (DOCUMENTS[q] == DOCUMENTS[k]) & (q >= k),
    "everything": lambda b, h, q, k: q >= 0,
    "nothing": lambda b, h, q, k: q < 0,
}


def traced(mask, batch=(BATCH,)):
    functions, operands = functions_and_operands("f", jnp.float32, None, mask, (*batch, HEADS))
    return functions["mask_mod"], operands


# What is in lists.


def seen_by(mask, lengths, offset):
    """Returns which keys each query sees through a mask function, `[batch, heads, queries, keys]`."""
    b, h, q, k = (np.arange(n, dtype=np.int32).reshape(-1, *[1] * (3 - i)) for i, n in enumerate((BATCH, HEADS, *lengths)))
    arguments = jnp.broadcast_arrays(b, h, q + np.broadcast_to(offset, BATCH).reshape(-1, 1, 1, 1), k)
    return np.asarray(jax.vmap(mask)(*(x.ravel() for x in arguments))).reshape(arguments[0].shape)


def seen_within(lengths, window=(None, None), offset=0, query_lengths=LENGTH, key_lengths=LENGTH):
    """Returns which keys each query sees by window and lengths."""
    q, k = (np.arange(n, dtype=np.int32).reshape(-1, *[1] * (1 - i)) for i, n in enumerate(lengths))
    offset, query_lengths, key_lengths = (
        np.broadcast_to(x, BATCH).reshape(-1, 1, 1, 1) for x in (offset, query_lengths, key_lengths)
    )
    (left, right), position = window, q + offset
    seen = (q < query_lengths) & (k < key_lengths)
    return seen & (True if left is None else k >= position - left) & (True if right is None else k <= position + right)


def blocks_of(seen, blocks, test):
    """Returns what `test` says of each block, `[batch, heads, query_blocks, key_blocks]`, with `False` behind the ends."""
    more = [(0, -size % block) for size, block in zip(seen.shape[-2:], blocks, strict=True)]
    padded = np.pad(seen, [(0, 0), (0, 0), *more])
    shape = [n for size, block in zip(padded.shape[-2:], blocks, strict=True) for n in (size // block, block)]
    return test(padded.reshape(*seen.shape[:2], *shape), (3, 5))


LIMITS = {
    "nothing else": {},
    "a window": {"window": (150, 20)},
    "causal": {"window": (None, 0)},
    "lengths": {"query_lengths": np.array([300, 64], np.int32), "key_lengths": np.array([511, 200], np.int32)},
    "an offset": {"window": (200, 0), "offset": np.array([64, -32], np.int32)},
}


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("limits", LIMITS)
@pytest.mark.parametrize("name", ["window and prefix", "of a table", "of heads", "empty rows"])
def test_lists_have_the_blocks_that_are_seen(name, limits, by_keys):
    lengths, blocks, limits = (LENGTH, LENGTH - 20), (64, 128), LIMITS[limits]
    if "offset" in limits and name.startswith("of"):  # which elements a block selects is not known then
        name = "window and prefix"
    function, operands = traced(HOLES[name])
    operands |= {{"offset": "query_offset"}.get(key, key): jnp.asarray(x) for key, x in limits.items() if key != "window"}
    operands["query"] = jax.ShapeDtypeStruct((BATCH, lengths[0], HEADS, 64), jnp.bfloat16)
    window, sharers = limits.get("window", (None, None)), 2 if by_keys else 1
    heads_per_list = HEADS if limits == {} and by_keys else 1
    options = {"by_keys": by_keys, "sharers": sharers, "heads_per_list": heads_per_list}
    found = lists.list_blocks(function, operands, lengths, blocks, window, **options)
    marks = seen_by(HOLES[name], lengths, limits.get("offset", 0)), seen_within(lengths, **limits)
    some, every = (blocks_of(marks[0], blocks, test) & blocks_of(marks[1], blocks, test) for test in (np.any, np.all))
    some, every = (np.broadcast_to(x, (BATCH, HEADS, *x.shape[2:])) for x in (some, every))
    some, every = (x.mT if by_keys else x for x in (some, every))
    if heads_per_list > 1:
        some, every = (np.broadcast_to(test(x, 1, keepdims=True), x.shape) for x, test in ((some, np.any), (every, np.all)))
    some = lists.share(some, sharers)
    n_blocks = some.shape[2]
    assert found.shape[1] == n_blocks * (HEADS if name == "of heads" and heads_per_list == 1 else 1)
    found = np.asarray(found).reshape(found.shape[0], -1, n_blocks, found.shape[-1])
    found = np.broadcast_to(found, (BATCH, HEADS, *found.shape[2:]))
    np.testing.assert_array_equal(lists.visited(jnp.asarray(found), some.shape[-1]), some)
    for at in np.ndindex(found.shape[:3]):
        count, *entries = found[at].tolist()
        visited = entries[:count]
        assert visited == sorted(visited, reverse=True)
        assert len(entries) >= count + 2
        assert all(0 <= entry // 2 < some.shape[-1] for entry in entries)
        assert [entry % 2 for entry in visited] == [not every[*at, entry // 2] for entry in visited]
        assert count or entries[0] % 2


def types_of(function_operands, length=LENGTH, **more):
    shape = jax.ShapeDtypeStruct((BATCH, length, HEADS, 64), jnp.bfloat16)
    operands = {name: jax.typeof(x) for name, x in (function_operands | more).items()}
    return {"query": shape, "key": shape, "value": shape} | operands


@pytest.mark.parametrize("name", HOLES | NO_HOLES)
def test_masks_with_holes_have_lists(name):
    function, operands = traced((HOLES | NO_HOLES)[name])
    found = [lists.pays_to_list(function, types_of(operands), 64, 64, by_keys=by_keys) for by_keys in (False, True)]
    # Some masks have holes between keys alone.
    assert found == [name in HOLES, name in HOLES and name not in ("window and prefix", "whole runs", "empty rows")]


def test_other_operands_and_many_blocks_have_spans(monkeypatch):
    function, operands = traced(HOLES["checkerboard"])
    for name, shape in (("mask", (1, 1, LENGTH)), ("query_segments", (BATCH, LENGTH))):
        assert not lists.pays_to_list(function, types_of(operands, **{name: jnp.zeros(shape, jnp.int32)}), 128, 128)
    assert not lists.pays_to_list(function, types_of(operands, query_offset=jnp.zeros((), jnp.int32)), 128, 128)
    monkeypatch.setattr(mask_blocks, "LARGEST_GRID", 15)
    assert not lists.pays_to_list(function, types_of(operands), 128, 128)


# Kernels, interpreted.

SHAPES = {"batch": (BATCH,), "length": LENGTH, "keys": LENGTH, "heads": HEADS, "key_heads": 1}
TARGET = replace(HOPPER, multiprocessors=1)
TOLERANCES = {"bfloat16": 2.0**-6, "float16": 2.0**-8, "float32": 2.0**-12}
attend = functools.partial(jaxsoftmax.dot_product_attention, implementation="xla", precision="highest")


def planned(given, mask, **options):
    """Returns operands and parameters of the primitive."""
    functions, operands = functions_and_operands("f", jnp.float32, None, mask, (*given["query"].shape[:-3], HEADS))
    params = {"window": (None, 0 if options.get("is_causal") else None), "scale": given["query"].shape[-1] ** -0.5}
    params |= {"soft_cap": None, "dropout_rate": 0.0, "precision": "high"} | functions
    return interpreted.named(given) | operands, params


def plan_of(operation, operands, params, **more):
    types = {name: jax.typeof(jnp.asarray(operand)) for name, operand in operands.items()}
    plan = mosaic.plan(operation.problem(operation, types, params | more), TARGET)
    return plan.plan if isinstance(plan, Refusal) else plan


def wide(given):
    return {name: np.asarray(x, np.float32) if name in ("query", "key", "value") else x for name, x in given.items()}


def run_forward(given, mask, **options):
    """Returns output and log-sum-exp by the kernel."""
    operands, params = planned(given, mask, **options)
    params |= {"deterministic_gradients": False}
    assert plan_of(primitive.ATTENTION, operands, params).geometry.has_lists
    out, lse = interpreted.attention(TARGET, operands, **params)
    return out, jnp.swapaxes(lse, -1, -2)


def assert_close(actual, expected, dtype):
    for found, truth in zip(actual, expected, strict=True):
        found, truth = (np.asarray(x, np.float64) for x in (found, truth))
        np.testing.assert_array_equal(np.isfinite(found), np.isfinite(truth))
        size = np.max(np.abs(truth), initial=1, where=np.isfinite(truth))
        np.testing.assert_allclose(found, truth, rtol=TOLERANCES[dtype], atol=size * TOLERANCES[dtype])


def quick(every, some):
    """Returns parameters; all except `some` are slow."""
    return [pytest.param(value, marks=[] if value in some else pytest.mark.slow) for value in every]


FORWARD = [
    ("window and prefix", 64, "bfloat16", {}),
    ("window and prefix", 128, "bfloat16", {"is_causal": True}),
    ("checkerboard", 128, "float16", {}),
    ("of a table", 64, "bfloat16", {}),
    ("of heads", 128, "bfloat16", {}),
    ("dilated", 256, "bfloat16", {}),
    ("empty rows", 128, "bfloat16", {}),
    ("whole runs", 128, "bfloat16", {}),
]


@pytest.mark.parametrize("call", quick(FORWARD, FORWARD[::2]), ids=str)
def test_the_forward_kernel_interpreted(call):
    name, size, dtype, options = call
    length = 768 if size == 64 else LENGTH  # multiples of a tile
    given = values.arrays(**SHAPES | {"batch": (), "length": length}, size=size, dtype=dtype)
    expected = attend(**wide(given), **options, mask_mod=HOLES[name], return_residual=True)
    assert_close(run_forward(given, HOLES[name], **options), expected, dtype)


def test_key_blocks_in_holes_are_not_read():
    given = {name: np.array(x) for name, x in values.arrays(**SHAPES | {"batch": ()}, size=128, dtype="bfloat16").items()}

    def mask(b, h, q, k):
        return k // 128 % 2 == 0

    expected = attend(**wide(given), mask_mod=mask, return_residual=True)
    for name in ("key", "value"):
        given[name][128:256] = given[name][384:] = np.nan
    assert_close(run_forward(given, mask), expected, "bfloat16")


def gradients(given, mask, dtype, **options):
    """Returns operands and parameters of the primitive for cotangents, and the reference's cotangents in float32."""
    moving = {name: given[name] for name in ("query", "key", "value")}
    (out, lse), pull = jax.vjp(lambda moving: attend(**moving, **options, mask_mod=mask, return_residual=True), wide(moving))
    dout, dlse = cotangents_like((out.astype(dtype), lse))
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
    (expected,) = pull((dout.astype(jnp.float32), dlse))
    results = {"out": out.astype(dtype), "lse": jnp.swapaxes(lse, -1, -2), "d_out": dout, "d_lse": jnp.swapaxes(dlse, -1, -2)}
    operands, params = planned(given | results, mask, **options)
    return operands, params | {"wanted": tuple(moving)}, expected


def assert_gradients_close(operands, params, expected, dtype, is_deterministic):
    found = interpreted.cotangents(TARGET, operands, **params, deterministic_gradients=is_deterministic)
    for name, actual in zip(params["wanted"], found, strict=True):
        actual, truth = (np.asarray(x, np.float64) for x in (actual, expected[name]))
        assert np.all(np.isfinite(actual)), name
        assert np.max(np.abs(actual - truth)) <= TOLERANCES[dtype] * max(1, np.max(np.abs(truth))), name


BACKWARD = [  # mask, head size, dtype, key heads, deterministic, options
    ("checkerboard", 64, "bfloat16", 1, False, {}),
    ("checkerboard", 128, "bfloat16", 2, True, {}),
    ("dilated", 64, "float32", 1, True, {}),
    ("dilated", 128, "float16", 1, False, {"is_causal": True}),
    ("of a table", 128, "bfloat16", 1, False, {}),
    ("of a table", 128, "float32", 2, True, {}),
    ("of heads", 64, "bfloat16", 2, False, {}),
    ("of heads", 128, "bfloat16", 1, True, {}),
]


@pytest.mark.parametrize("call", quick(BACKWARD, BACKWARD[::3] + BACKWARD[7:]), ids=str)
def test_the_backward_kernel_interpreted(call):
    name, size, dtype, key_heads, is_deterministic, options = call
    given = values.arrays(**SHAPES | {"batch": (), "key_heads": key_heads}, size=size, dtype=dtype)
    operands, params, expected = gradients(given, HOLES[name], dtype, **options)
    assert plan_of(primitive.ATTENTION_VJP, operands, params, deterministic_gradients=is_deterministic).geometry.has_lists
    assert_gradients_close(operands, params, expected, dtype, is_deterministic)


@pytest.mark.parametrize("is_deterministic", [False, True])
def test_query_blocks_in_holes_are_not_read(is_deterministic):
    given = values.arrays(**SHAPES | {"batch": ()}, size=128, dtype="bfloat16")

    def mask(b, h, q, k):
        return q // 128 % 2 == 0

    operands, params, expected = gradients(given, mask, "bfloat16")
    assert plan_of(primitive.ATTENTION_VJP, operands, params, deterministic_gradients=is_deterministic).geometry.has_lists
    for name in ("query", "d_out"):
        operands[name] = operands[name].at[128:256].set(jnp.nan)
    assert_gradients_close(operands, params, expected, "bfloat16", is_deterministic)


# Plans.


def test_tiles_cost_what_lists_show():
    given = values.arrays(**SHAPES | {"batch": ()}, size=128, dtype="bfloat16")
    operands, params, _ = gradients(given, HOLES["empty rows"], "bfloat16")
    forward = plan_of(primitive.ATTENTION, operands, params, deterministic_gradients=False).geometry
    assert forward.costs() == (1, 1, 2, 1)
    operands, params, _ = gradients(given, HOLES["dilated"], "bfloat16")
    backward = plan_of(primitive.ATTENTION_VJP, operands, params, deterministic_gradients=False).geometry
    assert backward.costs() == tuple(backward.heads_per_tile * n for n in (4, 2, 2, 4))


@pytest.mark.parametrize(("name", "size"), [("dilated", 128), ("of heads", 128), ("dilated", 256)])
def test_turns_count_the_tiles_whose_lists_have_a_block(name, size):
    given = values.arrays(**SHAPES, size=size, dtype="bfloat16")
    operands, params, _ = gradients(given, HOLES[name], "bfloat16")
    geometry = plan_of(primitive.ATTENTION_VJP, operands, params, deterministic_gradients=True).geometry
    spans = geometry.spans(operands, None)
    before = np.asarray(geometry.turns_before(spans))
    blocks = geometry.config.block_q, geometry.block_kv * geometry.blocks_per_tile
    marks = blocks_of(seen_by(HOLES[name], (LENGTH, LENGTH), 0), blocks, np.any).any(1).mT
    assert geometry.is_paired == (size == 256)
    np.testing.assert_array_equal(before, np.broadcast_to(np.cumsum(marks, 1) - marks, before.shape))


# Compiled by ptxas.

COMPILED = [
    ("dilated", 64, "bfloat16"),
    ("of heads", 128, "bfloat16"),
    ("dilated", 256, "bfloat16"),
    ("of a table", 64, "float32"),
]


@pytest.mark.parametrize("call", COMPILED, ids=str)
def test_kernels_compile(call):
    xla_cuda.skip_unless_it_compiles()
    name, size, dtype = call
    given = values.arrays(**SHAPES | {"length": 768, "keys": 768}, size=size, dtype=dtype)
    operands, params, _ = gradients(given, HOLES[name], dtype)
    for operation in (primitive.ATTENTION, primitive.ATTENTION_VJP):
        names = [o.name for o in operation.operands if o.name in operands]
        plan = plan_of(operation, {n: operands[n] for n in names}, params, deterministic_gradients=False)
        assert plan.geometry.has_lists
        types = {n: jax.typeof(jnp.asarray(operands[n])) for n in names}
        for row in compiled.compile_case(compiled.Case(str(call), (), lambda o, plan=plan: plan.run(**o), types)):
            assert not row.error
            assert not row.notes  # ptxas lets no products wait for each other


# Native.


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "kind", "key_heads", "is_deterministic"),
    cases.in_turns(
        7,
        HOLES,
        [(64, "bfloat16"), (128, "bfloat16"), (256, "bfloat16"), (96, "float16"), (64, "float32"), (128, "float32")],
        [1, 2],
        [False, True],
    ),
)
def test_native_values_and_cotangents(name, kind, key_heads, is_deterministic):
    size, dtype = kind
    given = values.arrays(**SHAPES | {"length": 500, "keys": 490, "key_heads": key_heads}, size=size, dtype=dtype)
    options = {"mask_mod": HOLES[name], "return_residual": True}
    with jax.default_device(jax.devices("cpu")[0]):
        results, pull = jax.vjp(lambda moving: attend(**moving, **options), wide(given))
        dout, dlse = cotangents_like((results[0].astype(dtype), results[1]))
        dlse = np.where(results[1] == -np.inf, 0, dlse)
        (expected,) = pull((dout.astype(jnp.float32), dlse))
        cotangents = np.asarray(dout), dlse
    forced = functools.partial(jaxsoftmax.dot_product_attention, implementation="mosaic", precision="high")
    run = jax.jit(lambda moving: forced(**moving, **options, deterministic_gradients=is_deterministic))
    actual, pull = jax.vjp(run, {name: jnp.asarray(x) for name, x in given.items()})
    assert_close(actual, results, dtype)
    for name, cotangent in pull(jax.tree.map(jnp.asarray, cotangents))[0].items():
        assert_close([cotangent], [expected[name]], dtype)


@pytest.mark.gpu
def test_native_blocks_in_holes_are_not_read():
    given = {name: np.array(x) for name, x in values.arrays(**SHAPES, size=128, dtype="bfloat16").items()}

    def mask(b, h, q, k):
        return (q // 128 % 2 == 0) & (k // 128 % 2 == 0)

    def loss(moving, implementation):
        out = jaxsoftmax.dot_product_attention(**moving, mask_mod=mask, implementation=implementation)
        return jnp.sum(jnp.where((jnp.arange(LENGTH) // 128 % 2 == 0)[:, None, None], out, 0).astype(jnp.float32) ** 2)

    expected = jax.grad(loss)({name: jnp.asarray(x) for name, x in given.items()}, "xla")
    for array in given.values():
        array[:, 128:256] = np.nan
    found = jax.jit(jax.grad(loss), static_argnums=1)({name: jnp.asarray(x) for name, x in given.items()}, "mosaic")
    for name, cotangent in found.items():
        seen = np.s_[:, :128]  # blocks of 128 that are seen; the others have the cotangent 0, or NaN from their own queries
        assert_close([cotangent[seen]], [expected[name][seen]], "bfloat16")
