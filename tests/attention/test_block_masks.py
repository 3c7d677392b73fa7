"""Block masks: which blocks they say are empty or whole, and that attention reads them in place of the function's arrays."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxsoftmax
from jaxsoftmax._core.target import HOPPER
from jaxsoftmax.ops.attention import block_masks, mask_blocks, primitive, score_functions
from jaxsoftmax.ops.attention import mosaic_sm90 as mosaic
from jaxsoftmax.ops.attention.mosaic_sm90 import decode

from ..support import cases, kernels
from ..support.attention import interpreted, values
from ..support.attention.functions import NO_OPTIONS, assert_close, expected_of
from ..support.attention.gradients import cotangents_like

BATCH, HEADS, LENGTHS = 2, 2, (300, 410)
RNG = np.random.default_rng(0)
QUERY_IDS, KEY_IDS = (jnp.asarray(np.sort(RNG.integers(0, 5, (BATCH, n)), -1), jnp.int32) for n in LENGTHS)
PREFIXES = jnp.asarray([200, 70])
WIDTHS = jnp.asarray([[30, 300], [129, 64]])
SHOWN = jnp.asarray(RNG.random((5, 7)) < 0.5)

MASKS = {
    "documents": lambda b, h, q, k: QUERY_IDS[b, q] == KEY_IDS[b, k],
    "prefix": lambda b, h, q, k: (k <= q) | (k < PREFIXES[b]),
    "widths": lambda b, h, q, k: jnp.abs(q - k) < WIDTHS[b, h],
    "of heads": lambda b, h, q, k: (k < 128) | (h == q // 128),
    "of a table": lambda b, h, q, k: SHOWN[q // 64, k // 64],
    "causal": lambda b, h, q, k: q >= k,
}
BY_ARRAYS = [name for name in MASKS if name != "causal"]


@functools.cache
def mask_of(name):
    return jaxsoftmax.block_mask(MASKS[name], *LENGTHS, batch=BATCH, heads=HEADS)


def seen_through(mask):
    """Returns which keys each query sees, `[batch, heads, queries, keys]`."""
    places = jnp.meshgrid(*(jnp.arange(n, dtype=jnp.int32) for n in (BATCH, HEADS, *LENGTHS)), indexing="ij")
    return np.asarray(jax.vmap(mask)(*(place.ravel() for place in places))).reshape(places[0].shape)


def kinds_by_pairs(seen, block_q, block_kv):
    """Returns the kinds of blocks, from all pairs of a query and a key."""
    rows, cols = (range(0, n, block) for n, block in zip(seen.shape[2:], (block_q, block_kv), strict=True))
    kinds = np.empty((*seen.shape[:2], len(rows), len(cols)), np.int8)
    for (i, row), (j, col) in ((r, c) for r in enumerate(rows) for c in enumerate(cols)):
        block = seen[..., row : row + block_q, col : col + block_kv]
        kinds[..., i, j] = block.any((2, 3)).astype(np.int8) + block.all((2, 3))
    return kinds


# What is in block masks.


@pytest.mark.parametrize("name", MASKS)
def test_kinds_of_blocks(name):
    kinds = np.asarray(mask_of(name).kinds)
    assert kinds.dtype == np.int8
    np.testing.assert_array_equal(
        np.broadcast_to(kinds, (BATCH, HEADS, 5, 7)), kinds_by_pairs(seen_through(MASKS[name]), 64, 64)
    )


@pytest.mark.parametrize("blocks", [(64, 64), (64, 128), (192, 64), (32, 176), (80, 48), (300, 512)])
@pytest.mark.parametrize("name", BY_ARRAYS)
def test_kinds_of_blocks_of_other_sizes(name, blocks):
    """Blocks that take in whole blocks of 64 have their kinds exactly. Others are at most counted as partial."""
    mask = mask_of(name)
    operands = {"block_kinds": mask.kinds}
    seen, whole = mask_blocks.mark_blocks(mask.function, operands, LENGTHS, *blocks, 1)
    expected = kinds_by_pairs(seen_through(MASKS[name]), *blocks)
    found = np.broadcast_to(np.asarray(seen).astype(np.int8) + np.asarray(whole), expected.shape)
    is_exact = all(block % 64 == 0 or block >= length for block, length in zip(blocks, LENGTHS, strict=True))
    assert np.all((found == expected) | ((not is_exact) & (found == mask_blocks.PARTIAL)))


def test_long_sequences_have_larger_blocks(monkeypatch):
    monkeypatch.setattr(mask_blocks, "LARGEST_GRID", 60)
    mask = jaxsoftmax.block_mask(MASKS["documents"], *LENGTHS, batch=BATCH)
    expected = kinds_by_pairs(seen_through(MASKS["documents"]), 128, 128)[:, :1]
    np.testing.assert_array_equal(mask.kinds, expected)
    seen, whole = mask_blocks.mark_blocks(mask.function, {"block_kinds": mask.kinds}, LENGTHS, 128, 256, 1)
    expected = kinds_by_pairs(seen_through(MASKS["documents"]), 128, 256)[:, :1]
    np.testing.assert_array_equal(np.asarray(seen).astype(np.int8) + np.asarray(whole), expected)


# Calls of attention.


@functools.cache
def arrays(dtype="bfloat16", **more):
    shapes = {"batch": (BATCH,), "length": LENGTHS[0], "keys": LENGTHS[1], "heads": HEADS, "key_heads": 1, "size": 64}
    return values.arrays(**shapes | more, dtype=dtype)


attend = functools.partial(jaxsoftmax.dot_product_attention, return_residual=True)


@pytest.mark.parametrize("name", MASKS)
def test_results_are_those_of_the_function(name):
    given, mask = arrays("float32"), mask_of(name)
    expected = expected_of(given, {"mask_mod": MASKS[name]}, {})
    assert_close(jax.jit(lambda mask: attend(**given, mask_mod=mask))(mask), expected, "float32")

    def loss(given, mask):
        return jnp.sum(attend(**given, mask_mod=mask)[0] ** 2)

    found, wanted = (jax.grad(loss)(given, mask) for mask in (mask, MASKS[name]))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, wanted)


TARGET = replace(HOPPER, multiprocessors=1)


def with_kinds(mask, given, lengths=LENGTHS):
    """Returns operands of a kernel, with what a block mask says of blocks, and the parameters."""
    closure, heads = score_functions.Closure(mask.function, mask.arrays), given["query"].shape[-2]
    functions, operands = score_functions.functions_and_operands("f", jnp.float32, None, closure, (BATCH, heads))
    operands |= block_masks.kinds_for("f", mask, (BATCH,), heads, lengths)
    params = {"window": (None, None), "soft_cap": None, "scale": given["query"].shape[-1] ** -0.5}
    return interpreted.named(given) | operands, NO_OPTIONS | params | functions


def run(mask, given, lengths=LENGTHS):
    operands, params = with_kinds(mask, given, lengths)
    out, lse = interpreted.attention(TARGET, operands, **params)
    return out, jnp.swapaxes(lse, -1, -2)


@pytest.mark.parametrize("name", cases.quick("documents", slow=[name for name in BY_ARRAYS if name != "documents"]))
def test_the_forward_kernel_interpreted(name):
    given = arrays(size=128)
    assert_close(run(mask_of(name), given), expected_of(given, {"mask_mod": MASKS[name]}, {}), "bfloat16")


def of_first_keys(b, h, q, k):
    return k < 128


def test_kernels_believe_a_block_mask():
    """Blocks that it calls empty are not visited, and blocks that it calls whole are not masked."""
    given, mask = arrays(size=128), mask_of("documents")
    kinds = np.zeros((BATCH, 1, 5, 7), np.int8)
    kinds[..., :2] = 2
    whole = np.s_[:, :192]  # the tile behind reaches behind the last query, and is masked
    found, expected = run(replace(mask, kinds=jnp.asarray(kinds)), given), expected_of(given, {"mask_mod": of_first_keys}, {})
    assert_close([x[whole] for x in found], [x[whole] for x in expected], "bfloat16")


@pytest.mark.parametrize("deterministic", [False, True])
def test_the_backward_kernel_interpreted(deterministic):
    given, name = arrays(size=64), "documents"
    operands, params = with_kinds(mask_of(name), given)
    wide = {key: np.asarray(x, np.float32) for key, x in given.items()}
    reference = functools.partial(attend, mask_mod=MASKS[name], implementation="xla", precision="highest")
    (out, lse), pull = jax.vjp(lambda given: reference(**given), wide)
    dout, dlse = cotangents_like((out.astype("bfloat16"), lse))
    dlse = jnp.where(lse == -jnp.inf, 0, dlse)
    (expected,) = pull((dout.astype(jnp.float32), dlse))
    results = {"out": out.astype("bfloat16"), "lse": lse.mT, "d_out": dout, "d_lse": dlse.mT}
    options = {"wanted": ("query", "key", "value"), "deterministic_gradients": deterministic}
    found = interpreted.cotangents(TARGET, operands | results, **params | options)
    for key, actual in zip(options["wanted"], found, strict=True):
        truth = np.asarray(expected[key])
        assert np.max(np.abs(np.asarray(actual, np.float32) - truth)) <= 2.0**-6 * max(1, np.max(np.abs(truth))), key


def test_few_queries_interpreted():
    lengths = 16, LENGTHS[1]
    given = arrays(length=16, heads=8, key_heads=2)

    def prefix(b, h, q, k):
        return k < PREFIXES[b] + q

    mask = jaxsoftmax.block_mask(prefix, *lengths, batch=BATCH)
    operands, params = with_kinds(mask, given, lengths)
    plan = mosaic.plan(primitive.ATTENTION.problem(primitive.ATTENTION, jax.tree.map(jax.typeof, operands), params), TARGET)
    assert type(plan) is decode.DecodePlan
    assert_close(run(mask, given, lengths), expected_of(given, {"mask_mod": prefix}, {}), "bfloat16")


def test_plans_visit_lists():
    given, mask = arrays(), mask_of("documents")
    explain = functools.partial(jaxsoftmax.explain, platform="cuda")
    loss = jax.grad(lambda given, mask: attend(**given, mask_mod=mask)[0].astype(jnp.float32).sum())
    decisions = explain(loss, given, mask)
    assert [decision.implementation for decision in decisions] == ["mosaic"] * 2
    assert all("lists" in decision.plan for decision in decisions)
    # Positions are others with an offset: the function finds the blocks.
    (decision,) = explain(lambda given, mask: attend(**given, mask_mod=mask, query_offset=5), given, mask)
    assert "lists" not in decision.plan


def test_blocks_are_not_searched_again():
    """A kernel with a block mask loads nothing at positions to find blocks: the kinds are there."""
    given = {name: jnp.asarray(x) for name, x in arrays().items()}
    loss = jax.grad(lambda given, mask: attend(**given, mask_mod=mask)[0].astype(jnp.float32).sum())
    searched = kernels.lowered_for_cuda(lambda given: loss(given, MASKS["documents"]), given)
    found = kernels.lowered_for_cuda(loss, given, mask_of("documents"))
    own, shared = (text.count(f"tensor<{BATCH}x{LENGTHS[0]}xi32>") for text in (searched, found))
    assert shared < own


# Transformations.


def test_block_masks_are_pytrees():
    given, mask = arrays("float32"), mask_of("documents")
    expected = attend(**given, mask_mod=MASKS["documents"])

    @functools.partial(jax.jit, donate_argnums=0)
    def through(mask):
        return attend(**given, mask_mod=mask), mask

    copied = jax.tree.map(jnp.copy, mask)
    results, returned = through(copied)
    jax.tree.map(np.testing.assert_array_equal, (results, returned), (expected, mask))
    _, (scanned, _) = jax.lax.scan(lambda mask, _: (mask, attend(**given, mask_mod=mask)), mask, length=2)
    np.testing.assert_allclose(scanned[1], expected[0], rtol=1e-6)


def test_made_inside_of_a_program():
    given = arrays("float32")

    @jax.jit
    def inside(query_ids, key_ids):
        mask = jaxsoftmax.block_mask(lambda b, h, q, k: query_ids[b, q] == key_ids[b, k], *LENGTHS, batch=BATCH)
        return attend(**given, mask_mod=mask)

    found = inside(QUERY_IDS, KEY_IDS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6), found, attend(**given, mask_mod=MASKS["documents"]))


@pytest.mark.parametrize("mapped", ["everything", "the mask"])
def test_examples_with_masks_of_their_own(mapped):
    given, ids = arrays("float32"), jnp.stack([QUERY_IDS[0], QUERY_IDS[1]])

    def make(query_ids, key_ids):
        return jaxsoftmax.block_mask(lambda b, h, q, k: query_ids[q] == key_ids[k], *LENGTHS)

    masks = jax.vmap(make)(ids, KEY_IDS)
    assert masks.kinds.shape == (2, 1, 5, 7)
    in_axes = 0 if mapped == "everything" else None
    alone = given if mapped == "everything" else {name: x[0] for name, x in given.items()}
    found = jax.vmap(lambda given, mask: attend(**given, mask_mod=mask)[0], (in_axes, 0))(alone, masks)
    for i in range(2):
        own = {name: x[i] for name, x in given.items()} if mapped == "everything" else alone
        expected = attend(**own, mask_mod=lambda b, h, q, k, i=i: ids[i, q] == KEY_IDS[i, k])[0]
        np.testing.assert_allclose(found[i], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
@pytest.mark.parametrize("axis", ["batch", "heads"])
def test_shards(axis, kind):
    """On devices that share the batch or the heads, kinds are sharded with them."""
    given = {name: jnp.asarray(x) for name, x in arrays("float32", key_heads=HEADS).items()}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    spec, of_kinds = (P("x"), P("x")) if axis == "batch" else (P(None, None, "x"), P(None, "x"))
    mask = jaxsoftmax.block_mask(MASKS["widths"], *LENGTHS, batch=BATCH, heads=HEADS)
    placed = jax.device_put(given, NamedSharding(mesh, spec))
    mask = replace(mask, kinds=jax.device_put(mask.kinds, NamedSharding(mesh, of_kinds)))
    found = jax.jit(lambda given, mask: attend(**given, mask_mod=mask))(placed, mask)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), found, attend(**given, mask_mod=MASKS["widths"])
    )


@pytest.mark.parametrize("strategy", ["ring", "all_gather", "all_to_all"])
def test_shared_sequences(strategy):
    """Devices that share a sequence take the function alone."""
    shapes = {"length": 256, "keys": 256, "key_heads": HEADS}
    given = {name: jnp.asarray(x) for name, x in arrays("float32", **shapes).items()}
    ids = QUERY_IDS[:, :256]
    mask = jaxsoftmax.block_mask(lambda b, h, q, k: ids[b, q] == ids[b, k], 256, batch=BATCH)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    parallel = jaxsoftmax.ContextParallel(axis_name="x", strategy=strategy)

    def shard(given, mask):
        return jaxsoftmax.dot_product_attention(**given, mask_mod=mask, parallel=parallel)

    run = jax.shard_map(shard, mesh=mesh, in_specs=(P(None, "x"), P()), out_specs=P(None, "x"))
    expected = jaxsoftmax.dot_product_attention(**given, mask_mod=lambda b, h, q, k: ids[b, q] == ids[b, k])
    np.testing.assert_allclose(jax.jit(run)(given, mask), expected, rtol=1e-5, atol=1e-5)


# Wrong arguments.


@pytest.mark.parametrize(
    ("arguments", "options", "error", "words"),
    [
        ((MASKS["documents"], 0), {"batch": 2}, ValueError, "query_length must be at least 1 and below 2.30, got 0"),
        ((MASKS["documents"], 64, 2.0), {"batch": 2}, TypeError, "key_length must be a concrete integer, got 2.0"),
        ((MASKS["documents"], 64), {}, ValueError, "batch must be given, as mask_mod reads batch, got None"),
        ((MASKS["of heads"], 64), {"batch": 2}, ValueError, "heads must be given, as mask_mod reads head, got None"),
        ((MASKS["documents"], 64), {"batch": (2, -1)}, ValueError, "batch must be at least 1 and below 2.30, got -1"),
        ((lambda q, k: q >= k, 64), {}, TypeError, r"mask_mod must be a function mask_mod\(batch, head"),
        ((None, 64), {}, TypeError, "mask_mod must be a function .*, got NoneType"),
    ],
)
def test_wrong_arguments(arguments, options, error, words):
    with pytest.raises(error, match=f"block_mask: {words}"):
        jaxsoftmax.block_mask(*arguments, **options)


def test_masks_for_other_calls():
    given = arrays()
    mask = jaxsoftmax.block_mask(MASKS["documents"], 64, 410, batch=BATCH)
    with pytest.raises(ValueError, match="a BlockMask for 300 queries and 410 keys, got one for 64 and 410"):
        attend(**given, mask_mod=mask)
    for batch, heads, name in ((1, None, "prefix"), (3, None, "prefix"), ((1, 2), None, "documents"), (BATCH, 1, "widths")):
        mask = jaxsoftmax.block_mask(MASKS[name], *LENGTHS, batch=batch, heads=heads)
        with pytest.raises(ValueError, match=r"a BlockMask for batch axes \(2,\) and [12] heads, got one for"):
            attend(**given, mask_mod=mask)
    with pytest.raises(TypeError, match=r"mask_mod must be a function .*, got BlockMask"):
        jaxsoftmax.block_mask(mask_of("documents"), *LENGTHS, batch=BATCH)
    with pytest.raises(TypeError, match=r"mask_mod must be None, a BlockMask or a function .*, got int"):
        attend(**given, mask_mod=5)


def test_parts_of_masks():
    given, mask = arrays(), mask_of("documents")
    part = replace(mask, arrays=tuple(array[:1] for array in mask.arrays))
    with pytest.raises(ValueError, match=r"with its whole arrays, got 300 elements of 600; in a jax.vmap"):
        attend(**given, mask_mod=part)
    for kinds in (mask.kinds.astype(jnp.float32), mask.kinds[..., :1], mask.kinds[..., :0]):
        with pytest.raises(ValueError, match="a BlockMask as block_mask makes it, got kinds"):
            attend(**given, mask_mod=replace(mask, kinds=kinds))


def test_more_arrays_than_there_are_tables():
    many = [jnp.ones(3) * i for i in range(17)]
    with pytest.raises(ValueError, match="block_mask: mask_mod must close over at most 16 arrays, got 17"):
        jaxsoftmax.block_mask(lambda b, h, q, k: sum(array[q % 3] for array in many) > 0, 64)


def test_more_batch_entries_than_blocks_fit_a_grid(monkeypatch):
    monkeypatch.setattr(mask_blocks, "LARGEST_GRID", 3)
    mask = jaxsoftmax.block_mask(lambda b, h, q, k: k > b, 64, batch=4)
    np.testing.assert_array_equal(mask.kinds, np.ones((4, 1, 1, 1)))


# Native.


@pytest.mark.gpu
@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("name", "kind"), cases.in_turns(2, BY_ARRAYS, [(64, "bfloat16"), (128, "float16"), (256, "bfloat16")])
)
def test_native_values_and_cotangents(name, kind):
    size, dtype = kind
    given, mask = arrays(dtype, size=size), mask_of(name)
    forced = functools.partial(attend, implementation="mosaic", precision="high")
    expected, wanted = jax.vjp(lambda given: forced(**given, mask_mod=MASKS[name]), given)
    found, pull = jax.vjp(jax.jit(lambda given: forced(**given, mask_mod=mask)), given)
    assert_close(found, [np.asarray(x, np.float64) for x in expected], dtype)
    cotangents = jax.tree.map(jnp.ones_like, expected)
    for key, cotangent in pull(cotangents)[0].items():
        assert_close([cotangent], [np.asarray(wanted(cotangents)[0][key], np.float64)], dtype)
